//! The stages that a node holds: loaded under leases, linked on the conductor's word, dropped before their memory is
//! given to anybody else.
//!
//! One actor for the node, one device thread for each stage. The actor never waits for a thread: threads report.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ractor::{Actor, ActorProcessingErr, ActorRef};
use shoal_engine::stage::{StageOptions, StageSpec};

use super::paid::Paid;
use super::pipes::{Pipes, Place, RunningStage, StageEvent, StageJob};
use super::service::{LoadStage, LoadedStage, StageKey, StageNotice, StageNotices, StageRefusal, StageReply, StageRequest, Stages};
use crate::countdown::Countdown;
use crate::env::Env;
use crate::ids::{LeaseId, NodeId};
use crate::lease::{LeaseInfo, LeaseUse};
use crate::service::{Inbound, Replier, Services};

/// Rows of a step that a node lets a conductor ask for.
const ROWS_MAX: u32 = 4096;
/// Sequences at once that a node lets a conductor ask for.
const SEQUENCES_MAX: u32 = 1024;
/// Longest message on a hop that a node lets a conductor ask for, in bytes.
const SLOT_BYTES_MAX: u32 = 256 * 1024 * 1024;
/// Stages that a node holds at once.
const STAGES_MAX: usize = 64;

/// Proves a lease to its owner, which is this node.
pub type LeaseCheck = Arc<dyn Fn(NodeId, &LeaseUse) -> Result<LeaseInfo, String> + Send + Sync>;
/// Finds a model's file by its hash.
pub type ModelPath = Arc<dyn Fn(&str) -> Option<PathBuf> + Send + Sync>;

/// What the actor is started with.
pub struct WorkersArguments {
    /// Seams.
    pub env: Env,
    /// Peers.
    pub services: Services,
    /// What stages run on.
    pub pipes: Arc<dyn Pipes>,
    /// The owner's word on leases.
    pub leases: LeaseCheck,
    /// Models on disk.
    pub models: ModelPath,
    /// Compute threads of a stage.
    pub threads: usize,
}

/// Messages of the actor.
pub enum WorkersMsg {
    /// A conductor asks for something.
    Call(Inbound<Stages>),
    /// A device thread reports.
    #[doc(hidden)]
    Device(u64, DeviceReport),
    /// A lease is fenced: whatever it paid for must go. Answered when nothing can touch the memory any more.
    Fence(LeaseId, Box<dyn FnOnce() + Send>),
    /// Drop every stage; answered when all are gone.
    Stop(Box<dyn FnOnce() + Send>),
}

/// A device thread's report, opaque outside.
#[doc(hidden)]
pub struct DeviceReport(StageEvent);

impl From<Inbound<Stages>> for WorkersMsg {
    fn from(call: Inbound<Stages>) -> Self {
        Self::Call(call)
    }
}

impl std::fmt::Debug for WorkersMsg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Call(_) => "Call",
            Self::Device(..) => "Device",
            Self::Fence(..) => "Fence",
            Self::Stop(_) => "Stop",
        })
    }
}

/// Loads, links and drops the stages of a node.
pub struct Workers;

/// What the actor remembers.
pub struct WorkersState {
    arguments: WorkersArguments,
    me: ActorRef<WorkersMsg>,
    stages: BTreeMap<StageKey, Held>,
    last_number: u64,
}

struct Held {
    /// By which its device thread's reports are recognised, whatever its key is by then.
    number: u64,
    load: Box<LoadStage>,
    stage: RunningStage,
    loading: Option<Replier<Stages>>,
    loaded: Option<LoadedStage>,
    linking: Option<Replier<Stages>>,
    /// Whether it was told where its output goes, in its present place.
    linked: bool,
    /// Told when the thread has ended.
    gone: Vec<Box<dyn FnOnce() + Send>>,
}

impl Held {
    /// Whether it is in memory just as `load` asks for it, for an arrangement of the same instance that came before. Who says so
    /// has shown the same leases again.
    fn serves(&self, load: &LoadStage) -> bool {
        let old = &self.load;
        let before = (old.key.term, old.key.epoch) < (load.key.term, load.key.epoch);
        let same = (&old.sha256, &old.layers, old.kv_bytes, old.rows_max, old.sequences_max, old.context_tokens)
            == (&load.sha256, &load.layers, load.kv_bytes, load.rows_max, load.sequences_max, load.context_tokens);
        let leases = old.leases.iter().map(|lease| lease.lease).eq(load.leases.iter().map(|lease| lease.lease));
        old.key.instance == load.key.instance && before && same && leases && self.loaded.is_some() && self.gone.is_empty()
    }
}

fn refuse(reason: impl Into<String>) -> Result<StageReply, StageRefusal> {
    Err(StageRefusal { reason: reason.into() })
}

fn answer(reply: Option<Replier<Stages>>, with: Result<StageReply, StageRefusal>) {
    if let Some(reply) = reply {
        reply.reply(with);
    }
}

impl WorkersState {
    fn call(&mut self, call: Inbound<Stages>) {
        let Inbound { from, request, reply, .. } = call;
        // Terms name their claimant, so nobody can speak for another conductor.
        let term = request.term();
        if term.node != from {
            return answer(reply, refuse(format!("node {from:?} does not conduct under a term of node {:?}", term.node)));
        }
        match request {
            StageRequest::Load(load) => {
                let key = load.key;
                match self.load(load) {
                    Err(reason) => answer(reply, refuse(reason)),
                    Ok(Some(loaded)) => answer(reply, Ok(StageReply::Loaded(Box::new(loaded)))),
                    Ok(None) => {
                        if let Some(held) = self.stages.get_mut(&key) {
                            held.loading = reply;
                        }
                    }
                }
            }
            StageRequest::Link(link) => {
                let Some(held) = self.stages.get_mut(&link.key) else { return answer(reply, refuse("this node does not hold that stage")) };
                if held.loaded.is_none() || held.linked || !(held.stage.link)(link) {
                    return answer(reply, refuse("the stage is not ready to be linked, or is linked already"));
                }
                held.linked = true;
                held.linking = reply;
            }
            StageRequest::Unload(key) => self.stop(|held| held.load.key == key, Box::new(move || answer(reply, Ok(StageReply::Done)))),
            StageRequest::UnloadAll { instance, term } => self.stop(
                |held| held.load.key.instance == instance && held.load.key.term <= term,
                Box::new(move || answer(reply, Ok(StageReply::Done))),
            ),
        }
    }

    /// Checks that leases pay for what is asked. If the node holds just that already, from an arrangement before, it is moved;
    /// else a device thread is started, which will report.
    fn load(&mut self, load: Box<LoadStage>) -> Result<Option<LoadedStage>, String> {
        let key = load.key;
        if self.stages.contains_key(&key) {
            return Err("this node holds that stage already".to_owned());
        }
        let standing = self.stages.iter().find(|(_, held)| held.serves(&load)).map(|(old, _)| *old);
        if self.stages.len() >= STAGES_MAX && standing.is_none() {
            return Err(format!("this node holds {STAGES_MAX} stages already"));
        }
        if load.rows_max > ROWS_MAX || load.sequences_max > SEQUENCES_MAX || load.slot_bytes > SLOT_BYTES_MAX || load.rows_max == 0 {
            return Err(format!(
                "steps of {} rows, {} sequences and messages of {} bytes are more than this node takes",
                load.rows_max, load.sequences_max, load.slot_bytes
            ));
        }
        let in_use = |lease| {
            let uses = |held: &Held| held.load.leases.iter().any(|used| used.lease == lease);
            self.stages.iter().any(|(other, held)| Some(*other) != standing && uses(held))
        };
        let paid = Paid::by(&load, |right| (self.arguments.leases)(key.term.node, right), in_use)?;
        let place = Place { key, from: load.from, slot_bytes: load.slot_bytes };
        if let Some(old) = standing {
            return self.moved(old, load, place).map(Some);
        }
        let path = (self.arguments.models)(&load.sha256).ok_or_else(|| {
            format!("this node does not have {} (sha256 {}) on disk; `shoal pull {}` there", load.model, load.sha256, load.model)
        })?;
        let me = self.me.clone();
        self.last_number += 1;
        let number = self.last_number;
        let stage = self.arguments.pipes.stage(StageJob {
            place,
            paid,
            path,
            spec: StageSpec { layers: load.layers.clone() },
            options: StageOptions {
                threads: self.arguments.threads,
                kv_bytes: load.kv_bytes,
                rows_max: load.rows_max as usize,
                context_tokens: load.context_tokens,
            },
            sequences_max: load.sequences_max as usize,
            events: Box::new(move |event| {
                // Fails only when the actor has stopped, which waits for its threads first.
                let _ = me.cast(WorkersMsg::Device(number, DeviceReport(event)));
            }),
        })?;
        tracing::info!(target: "shoal::stage", model = %load.model, layers = ?load.layers, "loading a stage");
        let held = Held { number, load, stage, loading: None, loaded: None, linking: None, linked: false, gone: Vec::new() };
        self.stages.insert(key, held);
        Ok(None)
    }

    /// Moves a stage that is in memory from the arrangement in which it is `old` to another one.
    fn moved(&mut self, old: StageKey, load: Box<LoadStage>, place: Place) -> Result<LoadedStage, String> {
        let none = || "this node does not hold that stage".to_owned();
        let held = self.stages.get_mut(&old).ok_or_else(none)?;
        let known = held.loaded.as_mut().ok_or_else(none)?;
        let door = (held.stage.move_to)(place)?;
        (known.endpoints, known.ticket) = (door.endpoints, door.ticket);
        known.took = Duration::ZERO;
        let loaded = known.clone();
        answer(held.linking.take(), refuse("the stage was given another place"));
        held.linked = false;
        held.load = load;
        if let Some(held) = self.stages.remove(&old) {
            self.stages.insert(place.key, held);
        }
        tracing::info!(target: "shoal::stage", stage = place.key.stage, "a stage that stood was given another place");
        Ok(loaded)
    }

    fn device(&mut self, number: u64, event: StageEvent) {
        let Some((key, held)) = self.stages.iter_mut().find(|(_, held)| held.number == number) else { return };
        let key = *key;
        match event {
            StageEvent::Loaded { hidden, vocabulary, pages, page_tokens, weight_bytes, took } => {
                let small = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
                let loaded = LoadedStage {
                    endpoints: held.stage.door.endpoints.clone(),
                    ticket: held.stage.door.ticket.clone(),
                    hidden: small(hidden),
                    vocabulary: small(vocabulary),
                    pages: small(pages),
                    page_tokens: small(page_tokens),
                    weight_bytes,
                    took,
                };
                held.loaded = Some(loaded.clone());
                answer(held.loading.take(), Ok(StageReply::Loaded(Box::new(loaded))));
            }
            // Of a place that it has left, nobody wants to hear any more.
            StageEvent::Linked(of) | StageEvent::Broken(of, _) if of != key => {}
            StageEvent::Linked(_) => answer(held.linking.take(), Ok(StageReply::Done)),
            StageEvent::Broken(_, reason) => {
                answer(held.linking.take(), refuse(reason.clone()));
                self.notice(key, reason);
            }
            StageEvent::Ended(reason) => {
                let Some(held) = self.stages.remove(&key) else { return };
                let words = reason.clone().unwrap_or_else(|| "the stage was unloaded".to_owned());
                answer(held.loading, refuse(words.clone()));
                answer(held.linking, refuse(words));
                held.gone.into_iter().for_each(|tell| tell());
                if let Some(reason) = reason {
                    self.notice(key, reason);
                }
            }
        }
    }

    /// Tells the conductor that a stage does no more steps.
    fn notice(&self, key: StageKey, reason: String) {
        tracing::warn!(target: "shoal::stage", stage = key.stage, %reason, "a stage's pipeline ended");
        if let Err(error) = self.arguments.services.remote::<StageNotices>(key.term.node).cast(StageNotice { key, reason }) {
            tracing::debug!(target: "shoal::stage", %error, "the conductor cannot be told");
        }
    }

    /// Stops the stages that `picked` names and calls `done` when they are gone.
    fn stop(&mut self, picked: impl Fn(&Held) -> bool, done: Box<dyn FnOnce() + Send>) {
        let finish = Countdown::new(done);
        for held in self.stages.values_mut().filter(|held| picked(held)) {
            let finish = finish.clone();
            held.gone.push(Box::new(move || drop(finish)));
            (held.stage.stop)();
        }
    }
}

impl Actor for Workers {
    type Msg = WorkersMsg;
    type State = WorkersState;
    type Arguments = WorkersArguments;

    async fn pre_start(&self, me: ActorRef<WorkersMsg>, arguments: WorkersArguments) -> Result<WorkersState, ActorProcessingErr> {
        Ok(WorkersState { arguments, me, stages: BTreeMap::new(), last_number: 0 })
    }

    async fn handle(&self, _me: ActorRef<WorkersMsg>, message: WorkersMsg, state: &mut WorkersState) -> Result<(), ActorProcessingErr> {
        match message {
            WorkersMsg::Call(call) => state.call(call),
            WorkersMsg::Device(number, DeviceReport(event)) => state.device(number, event),
            WorkersMsg::Fence(lease, done) => state.stop(|held| held.load.leases.iter().any(|paid| paid.lease == lease), done),
            WorkersMsg::Stop(done) => state.stop(|_| true, done),
        }
        Ok(())
    }
}
