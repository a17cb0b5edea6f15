//! What a pipeline runs on: device threads and tensor links in a real node, tasks and a model of links in a simulated
//! one.
//!
//! Whoever holds a stage and whoever conducts a pipeline see only this. So they run in virtual time as they are.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use shoal_engine::stage::{StageOptions, StageSpec};
pub use shoal_transport::provider::{Endpoint, Ticket};

use super::device::{self, Control, DeviceArguments, Seat, Stop};
use super::links::TensorLinks;
pub use super::paid::Paid;
use super::port::{Port, PortPlan, PortSender};
use super::service::{LinkStage, StageKey};
use crate::env::{BoxFuture, Env};
use crate::ids::NodeId;

/// Runs stages, and opens the conductor's ends of pipelines.
pub trait Pipes: Send + Sync + fmt::Debug + 'static {
    /// Starts a stage. It loads, waits to be told where its output goes, and then takes one step after the other. When its
    /// pipeline breaks it waits for a place in another one. It reports what it comes to.
    ///
    /// # Errors
    /// If it cannot be started, in words.
    fn stage(&self, job: StageJob) -> Result<RunningStage, String>;

    /// Gets ready for the link from the last stage of a pipeline, whose holder is `last`, with messages of at most
    /// `token_bytes` bytes.
    ///
    /// # Errors
    /// If no link can be taken, in words.
    fn port(&self, last: NodeId, token_bytes: u32) -> Result<OpenPort, String>;
}

/// A stage to run.
pub struct StageJob {
    /// Its first place.
    pub place: Place,
    /// What its leases pay for. It has to be checked against the model's file before anything is loaded, and against what was.
    pub paid: Paid,
    /// The model's file.
    pub path: PathBuf,
    /// Its layers.
    pub spec: StageSpec,
    /// Memory and limits.
    pub options: StageOptions,
    /// Most sequences at once.
    pub sequences_max: usize,
    /// Told what becomes of it, in order; [`StageEvent::Ended`] is the last.
    pub events: Box<dyn Fn(StageEvent) + Send>,
}

impl fmt::Debug for StageJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StageJob").field("place", &self.place).field("spec", &self.spec).finish_non_exhaustive()
    }
}

/// What a running stage reports.
#[derive(Debug)]
pub enum StageEvent {
    /// It is in memory.
    Loaded {
        /// Elements of an activation row.
        hidden: usize,
        /// Entries of the vocabulary.
        vocabulary: usize,
        /// KV pages in all.
        pages: usize,
        /// Tokens of a page.
        page_tokens: usize,
        /// Memory of the weights, in bytes.
        weight_bytes: u64,
        /// How long loading took.
        took: Duration,
    },
    /// The stage after it is connected, in this arrangement.
    Linked(StageKey),
    /// The pipeline that it was part of broke, and why. It is still in memory, and waits for a place in another one.
    Broken(StageKey, String),
    /// It has ended and its memory is free. `None`: it was asked to.
    Ended(Option<String>),
}

/// A place in a pipeline.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Which.
    pub key: StageKey,
    /// The node that will link to it.
    pub from: NodeId,
    /// Longest message that comes from there, in bytes.
    pub slot_bytes: u32,
}

/// Where a stage takes its link.
#[derive(Debug, Clone)]
pub struct Door {
    /// Where the node before it dials.
    pub endpoints: Vec<Endpoint>,
    /// What that node has to show.
    pub ticket: Ticket,
}

/// Gives a stage another place.
pub type MoveTo = Box<dyn Fn(Place) -> Result<Door, String> + Send>;

/// A stage that was started.
pub struct RunningStage {
    /// Where it takes its first link.
    pub door: Door,
    /// Tells it where its output goes. `false`: it has ended.
    pub link: Box<dyn Fn(Box<LinkStage>) -> bool + Send>,
    /// Gives it a place in another pipeline: it leaves the one that it is in, forgets its sequences and keeps its weights. The text
    /// says why it cannot.
    pub move_to: MoveTo,
    /// Asks it to end, which it does within a step.
    pub stop: Box<dyn Fn() + Send>,
}

impl fmt::Debug for RunningStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunningStage").field("door", &self.door).finish_non_exhaustive()
    }
}

/// Connects both ends of a pipeline.
pub type Connect = Box<dyn FnOnce(PortPlan) -> BoxFuture<'static, Result<(PortSender, Port), String>> + Send>;

/// The conductor's end of a pipeline, before it is connected.
pub struct OpenPort {
    /// Where the last stage dials.
    pub endpoints: Vec<Endpoint>,
    /// What it has to show.
    pub ticket: Ticket,
    /// Connects it to the first stage, and takes the link from the last.
    pub connect: Connect,
}

impl fmt::Debug for OpenPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenPort").field("endpoints", &self.endpoints).finish_non_exhaustive()
    }
}

/// Gets ready for the link from the stage before.
fn open(links: &TensorLinks, place: Place, number: u64) -> Result<(Door, Seat), String> {
    let (endpoints, ticket, upstream) = links.expect(place.from, place.slot_bytes).map_err(|error| error.to_string())?;
    Ok((Door { endpoints, ticket }, Seat { key: place.key, upstream, slot_bytes: place.slot_bytes, number }))
}

/// A device thread for each stage, and tensor links between them.
#[derive(Debug, Clone)]
pub struct ThreadPipes {
    env: Env,
    links: TensorLinks,
}

impl ThreadPipes {
    /// Threads of `env`, linked by `links`.
    pub fn new(env: Env, links: TensorLinks) -> Self {
        Self { env, links }
    }
}

impl Pipes for ThreadPipes {
    fn stage(&self, job: StageJob) -> Result<RunningStage, String> {
        let StageJob { place, paid, path, spec, options, sequences_max, events } = job;
        let (door, first) = open(&self.links, place, 0)?;
        let (control, told) = mpsc::channel();
        let stop = Arc::new(Stop::default());
        let arguments = DeviceArguments {
            clock: Arc::clone(&self.env.clock),
            compute: Arc::clone(&self.env.compute),
            links: self.links.clone(),
            paid,
            path,
            spec,
            options,
            sequences_max,
            first,
            control: told,
            stop: Arc::clone(&stop),
            events,
        };
        self.env
            .spawner
            .thread(format!("shoal-stage-{}", place.key.stage), Box::new(move || device::run(arguments)))
            .map_err(|error| format!("cannot start a device thread: {error}"))?;
        let (links, move_control, mover) = (self.links.clone(), control.clone(), Arc::clone(&stop));
        let move_to = Box::new(move |place| {
            let (door, next) = open(&links, place, mover.next_move())?;
            move_control.send(Control::Move(next)).map_err(|_| "the stage has ended".to_owned())?;
            mover.leave();
            Ok(door)
        });
        let link = Box::new(move |link| control.send(Control::Link(link)).is_ok());
        Ok(RunningStage { door, link, move_to, stop: Box::new(move || stop.ask()) })
    }

    fn port(&self, last: NodeId, token_bytes: u32) -> Result<OpenPort, String> {
        let (endpoints, ticket, expected) = self.links.expect(last, token_bytes).map_err(|error| error.to_string())?;
        let (env, links) = (self.env.clone(), self.links.clone());
        let connect = move |plan| -> BoxFuture<'static, Result<(PortSender, Port), String>> {
            let spawner = Arc::clone(&env.spawner);
            Box::pin(async move { env.blocking("shoal-port", move || Port::connect(&links, spawner, plan, expected, token_bytes)).await? })
        };
        Ok(OpenPort { endpoints, ticket, connect: Box::new(connect) })
    }
}
