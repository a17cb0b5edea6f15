//! The device thread of a stage: loads it, takes its links, and then does nothing but receive a step, run it and send
//! it on.
//!
//! It is a shell around [`StageMachine`]. No actor and no executor is in its loop, and no lock that anybody holds while
//! the links are well; it tells its actor about the beginning and the end only. Its links may be replaced under it, of
//! which it notices nothing.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use shoal_engine::stage::{StageOptions, StageSpec};
use shoal_transport::frame::Fence;
use shoal_transport::path::{self, Expecting, PathCloser};

use super::links::{LINK_TIMEOUT, TensorLinks};
use super::machine::StageMachine;
use super::message::KIND_STEP;
use super::pipes::StageEvent;
use super::service::LinkStage;
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
    pub(super) path: PathBuf,
    pub(super) spec: StageSpec,
    pub(super) options: StageOptions,
    pub(super) sequences_max: usize,
    pub(super) fence: Fence,
    pub(super) upstream: Expecting,
    pub(super) upstream_slot_bytes: u32,
    pub(super) downstream: mpsc::Receiver<Box<LinkStage>>,
    pub(super) stop: Arc<Stop>,
    pub(super) events: Box<dyn Fn(StageEvent) + Send>,
}

/// How a device thread is stopped from outside, wherever it waits.
#[derive(Debug, Default)]
pub(super) struct Stop {
    asked: AtomicBool,
    closers: std::sync::Mutex<Vec<PathCloser>>,
}

impl Stop {
    fn asked(&self) -> bool {
        self.asked.load(Ordering::Acquire)
    }

    fn watch(&self, closer: PathCloser) {
        self.closers.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(closer);
        // Asked in the meantime: the list may have been gone through already.
        if self.asked() {
            self.close();
        }
    }

    fn close(&self) {
        self.closers.lock().unwrap_or_else(std::sync::PoisonError::into_inner).drain(..).for_each(|closer| closer.close());
    }

    /// Asks the thread to end; it does so within a step.
    pub(super) fn ask(&self) {
        self.asked.store(true, Ordering::Release);
        self.close();
    }
}

/// The thread's body.
pub(super) fn run(arguments: DeviceArguments) {
    let stop = Arc::clone(&arguments.stop);
    // The events outlive the stage: when `Ended` is reported, its memory is free.
    let (arguments, events) = split(arguments);
    let end = drive(arguments, &events);
    stop.close();
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
    let DeviceArguments {
        clock,
        compute,
        links,
        path,
        spec,
        options,
        sequences_max,
        fence,
        upstream,
        upstream_slot_bytes,
        downstream,
        stop,
        ..
    } = arguments;
    let begun = clock.now();
    let stage = compute.load(&path, &spec, &options).map_err(|error| error.to_string())?;
    let (pages, _) = stage.pages();
    events(StageEvent::Loaded {
        hidden: stage.hidden(),
        vocabulary: stage.vocabulary(),
        pages,
        page_tokens: stage.page_tokens(),
        weight_bytes: stage.weight_bytes(),
        took: clock.now().since(begun),
    });
    let to = loop {
        match downstream.recv_timeout(IDLE) {
            Ok(to) => break to,
            Err(mpsc::RecvTimeoutError::Timeout) if !stop.asked() => {}
            Err(_) => return Ok(()),
        }
    };
    let down = links.dial(to.to, &to.endpoints, &to.ticket, to.slot_bytes).map_err(|error| error.to_string())?;
    stop.watch(down.closer());
    let down = down.sender(fence, TensorLinks::options(to.slot_bytes)).map_err(|error| error.to_string())?;
    events(StageEvent::Linked);
    stop.watch(upstream.closer());
    let up = upstream.accept(links.effects().after(LINK_TIMEOUT)).map_err(|error| format!("the stage before did not connect: {error}"))?;
    let up = up.receiver(fence, TensorLinks::options(upstream_slot_bytes)).map_err(|error| error.to_string())?;
    steps(StageMachine::new(stage, options.rows_max, sequences_max), up, down, &links, &stop)
}

fn steps(
    mut machine: StageMachine,
    mut up: path::PathReceiver,
    mut down: path::PathSender,
    links: &TensorLinks,
    stop: &Stop,
) -> Result<(), String> {
    let effects = links.effects();
    let mut out = Vec::new();
    while !stop.asked() {
        let received = match up.recv(effects.after(IDLE)) {
            Ok(received) => received,
            Err(path::RecvError::Deadline) => continue,
            Err(error) => return Err(format!("the stage before is gone: {error}")),
        };
        if received.kind() != KIND_STEP {
            return Err(format!("the stage before sent a message of unknown kind {}", received.kind()));
        }
        let kind = machine.step(received.payload(), &mut out).map_err(|fault| fault.to_string())?;
        // Its slot is free for the next step while this one travels on.
        up.give_back();
        down.send(kind, &[&out], effects.after(SEND_TIMEOUT)).map_err(|error| format!("the stage after is gone: {error}"))?;
    }
    Ok(())
}
