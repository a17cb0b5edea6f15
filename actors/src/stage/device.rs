//! The device thread of a stage: loads it, takes its links, and then does nothing but receive a step, run it and send
//! it on. When the pipeline breaks the stage stays in memory, and waits for a place in the next one.
//!
//! It is a shell around [`StageMachine`]. No actor and no executor is in its loop, and no lock that anybody holds while
//! the links are well; it tells its actor about the beginning and the end only. Its links may be replaced under it, of
//! which it notices nothing.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use shoal_engine::stage::{StageOptions, StageSpec};
use shoal_transport::Effects;
use shoal_transport::channel::{Inlet, Outlet};
use shoal_transport::path::{Expecting, PathCloser};

use super::links::{LINK_TIMEOUT, TensorLinks};
use super::machine::{StageFault, StageMachine};
use super::message::KIND_STEP;
use super::paid::Paid;
use super::pipes::StageEvent;
use super::service::{LinkStage, StageKey};
use crate::env::{Clock, Compute};

/// How long the stage after may leave a step lying before the pipeline counts as broken.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// How often an idle device thread looks whether it is to stop.
const IDLE: Duration = Duration::from_millis(500);

/// What a device thread is started with.
pub(super) struct DeviceArguments {
    pub(super) clock: Arc<dyn Clock>,
    pub(super) compute: Arc<dyn Compute>,
    pub(super) links: TensorLinks,
    pub(super) paid: Paid,
    pub(super) path: PathBuf,
    pub(super) spec: StageSpec,
    pub(super) options: StageOptions,
    pub(super) sequences_max: usize,
    pub(super) first: Seat,
    pub(super) control: mpsc::Receiver<Control>,
    pub(super) stop: Arc<Stop>,
    pub(super) events: Box<dyn Fn(StageEvent) + Send>,
}

/// A stage's place in a pipeline.
pub(super) struct Seat {
    pub(super) key: StageKey,
    pub(super) upstream: Expecting,
    pub(super) slot_bytes: u32,
    /// Counts the places that the stage was given.
    pub(super) number: u64,
}

/// What a device thread is told.
pub(super) enum Control {
    /// Where its output goes.
    Link(Box<LinkStage>),
    /// It has another place.
    Move(Seat),
}

/// How a device thread is stopped, or made to leave its pipeline, from outside, wherever it waits.
#[derive(Debug, Default)]
pub(super) struct Stop {
    asked: AtomicBool,
    /// The number of the newest place.
    newest: AtomicU64,
    closers: std::sync::Mutex<Vec<PathCloser>>,
}

impl Stop {
    fn asked(&self) -> bool {
        self.asked.load(Ordering::Acquire)
    }

    /// Closes a hop when the thread is to leave the place with this number.
    fn watch(&self, closer: PathCloser, number: u64) {
        self.closers.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(closer);
        // Asked in the meantime: the list may have been gone through already.
        if self.asked() || self.newest.load(Ordering::Acquire) > number {
            self.leave();
        }
    }

    /// The number of the next place.
    pub(super) fn next_move(&self) -> u64 {
        self.newest.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Ends the hops that are there.
    pub(super) fn leave(&self) {
        self.closers.lock().unwrap_or_else(std::sync::PoisonError::into_inner).drain(..).for_each(|closer| closer.close());
    }

    /// Asks the thread to end; it does so within a step.
    pub(super) fn ask(&self) {
        self.asked.store(true, Ordering::Release);
        self.leave();
    }
}

/// The thread's body.
pub(super) fn run(arguments: DeviceArguments) {
    let stop = Arc::clone(&arguments.stop);
    // The events outlive the stage: when `Ended` is reported, its memory is free.
    let (arguments, events) = split(arguments);
    let end = drive(arguments, &events);
    stop.leave();
    let reason = match end {
        Err(reason) if !stop.asked() => Some(reason),
        _ => None,
    };
    events(StageEvent::Ended(reason));
}

type Events = Box<dyn Fn(StageEvent) + Send>;

fn split(mut arguments: DeviceArguments) -> (DeviceArguments, Events) {
    let events = std::mem::replace(&mut arguments.events, Box::new(|_| {}));
    (arguments, events)
}

fn drive(arguments: DeviceArguments, events: &Events) -> Result<(), String> {
    let DeviceArguments { clock, compute, links, paid, path, spec, options, sequences_max, first, control, stop, .. } = arguments;
    let begun = clock.now();
    let model = compute.model_card(&path).map_err(|error| error.to_string())?;
    paid.covers(&model, &spec.layers, options.rows_max)?;
    let stage = compute.load(&path, &spec, &options).map_err(|error| error.to_string())?;
    paid.holds(stage.weight_bytes())?;
    let (pages, _) = stage.pages();
    events(StageEvent::Loaded {
        hidden: stage.hidden(),
        vocabulary: stage.vocabulary(),
        pages,
        page_tokens: stage.page_tokens(),
        weight_bytes: stage.weight_bytes(),
        took: clock.now().since(begun),
    });
    let mut machine = StageMachine::new(stage, options.rows_max, sequences_max);
    let mut seat = Some(first);
    loop {
        // What comes while it has no place, or of a place that it left, is old news.
        match (control.recv_timeout(IDLE), seat.take()) {
            (Ok(Control::Move(next)), _) => seat = Some(next),
            (Ok(Control::Link(to)), Some(sat)) if to.key == sat.key => {
                let key = sat.key;
                let broken = serve(&mut machine, sat, &to, &links, &stop, events).err();
                if stop.asked() {
                    return Ok(());
                }
                stop.leave();
                machine.reset();
                events(StageEvent::Broken(key, broken.unwrap_or_else(|| "it was moved".to_owned())));
            }
            (Ok(Control::Link(_)) | Err(mpsc::RecvTimeoutError::Timeout), sat) if !stop.asked() => seat = sat,
            (Ok(Control::Link(_)) | Err(_), _) => return Ok(()),
        }
    }
}

/// Takes its place in a pipeline and does its steps there until that breaks.
fn serve(machine: &mut StageMachine, seat: Seat, to: &LinkStage, links: &TensorLinks, stop: &Stop, events: &Events) -> Result<(), String> {
    let Seat { key, upstream, slot_bytes, number } = seat;
    let fence = key.fence();
    let down = links.dial(to.to, &to.endpoints, &to.ticket, to.slot_bytes).map_err(|error| error.to_string())?;
    stop.watch(down.closer(), number);
    stop.watch(upstream.closer(), number);
    // Whoever waits for the stage before is not to wait longer when the stage after is gone.
    let before = upstream.closer();
    let mut down = down.sender(fence, TensorLinks::options(to.slot_bytes)).map_err(|error| error.to_string())?;
    down.when_down(move |_| before.close());
    events(StageEvent::Linked(key));
    let up = upstream.accept(links.effects().after(LINK_TIMEOUT)).map_err(|error| format!("the stage before did not connect: {error}"))?;
    let mut up = up.receiver(fence, TensorLinks::options(slot_bytes)).map_err(|error| error.to_string())?;
    steps(machine, &mut up, &mut down, links.effects(), || stop.asked()).map_err(|broken| match (&broken, down.down()) {
        // The end that was noticed last is closed because of the other one.
        (Broken::Before(_), Some(down)) => Broken::After(down.to_string()).to_string(),
        _ => broken.to_string(),
    })
}

/// Why a stage does no more steps in its place.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("the stage before is gone: {0}")]
    Before(String),
    #[error("the stage before sent a message of unknown kind {0}")]
    Kind(u8),
    #[error(transparent)]
    Step(#[from] StageFault),
    #[error("the stage after is gone: {0}")]
    After(String),
}

/// Takes steps from `up`, runs them and sends on what comes out, until that breaks or `stop` says so.
fn steps(
    machine: &mut StageMachine,
    up: &mut impl Inlet,
    down: &mut impl Outlet,
    effects: &Effects,
    stop: impl Fn() -> bool,
) -> Result<(), Broken> {
    let mut out = Vec::new();
    while !stop() {
        let Some(received) = up.receive(effects.after(IDLE)).map_err(|error| Broken::Before(error.to_string()))? else { continue };
        if received.kind() != KIND_STEP {
            return Err(Broken::Kind(received.kind()));
        }
        let kind = machine.step(received.payload(), &mut out)?;
        // Its slot is free for the next step while this one travels on.
        up.give_back();
        down.send(kind, &[&out], effects.after(SEND_TIMEOUT)).map_err(|error| Broken::After(error.to_string()))?;
    }
    Ok(())
}
