//! The owner's actor: the shell around [`Owner`], and the handle that the rest of the node uses it by.
//!
//! The machine lives in the handle. A restart of the actor therefore forgets no lease: memory that is lent stays lent,
//! and fences that were under way are asked for again.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SpawnErr};

use super::error::LeaseError;
use super::owner::{Input, Output, Owner, OwnerConfig, RequestKey};
use super::types::{LeaseInfo, LeaseState, LeaseUse, LeaseView, TokenSeed, Totals};
use super::wire::LeaseReply;
use super::{LeaseKeeper, timing};
use crate::env::{Clock, Env, Instant};
use crate::ids::{Incarnation, InstanceId, LeaseId, NodeId, Term};
use crate::service::{Inbound, Replier, ServeError, Services};
use crate::wake::Wake;

/// Called by a [`FenceHook`] when nobody can write to a lease's memory any more. If it is dropped instead, the memory
/// stays charged.
pub type FenceHolds = Box<dyn FnOnce() + Send>;

/// Makes writes to a lease's memory impossible, and then calls what it is given. It must not block, and it may be
/// asked twice for the same lease.
pub type FenceHook = Arc<dyn Fn(LeaseId, FenceHolds) + Send + Sync>;

/// Hears that an instance is under a new term here, before the claimant does. It must not block.
pub type TermHook = Arc<dyn Fn(InstanceId, Term) + Send + Sync>;

/// Hears that a holder has renewed a lease, and until when it holds now. It must not block.
pub type RenewHook = Arc<dyn Fn(LeaseId, Instant) + Send + Sync>;

/// Hears the sums whenever they change. It must not block.
pub type TotalsSubscriber = Box<dyn Fn(Totals) + Send + Sync>;

/// What a [`LeasesActor`] is started with. A clone starts its successor.
#[derive(Clone)]
pub struct LeasesArguments {
    /// What others use it by.
    pub handle: Leases,
    /// Chance and tasks.
    pub env: Env,
    /// The node's services, on which this one is served.
    pub services: Services,
    /// Whoever holds memory of leases gives it up here.
    pub on_fence: FenceHook,
    /// Whoever lets holders at memory learns of renewals here.
    pub on_renew: RenewHook,
    /// Whoever must refuse frames of older terms learns of new ones here.
    pub on_term: TermHook,
}

impl fmt::Debug for LeasesArguments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeasesArguments").field("handle", &self.handle).finish_non_exhaustive()
    }
}

/// A node's lending, as the rest of the node uses it. Every clone is the same; it outlives restarts of the actor.
#[derive(Clone)]
pub struct Leases {
    shared: Arc<Shared>,
}

struct Shared {
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    subscribers: Mutex<Vec<Arc<TotalsSubscriber>>>,
}

struct State {
    owner: Owner,
    actor: Option<ActorRef<LeasesMessage>>,
    /// What was decided while no actor was there to hear it.
    backlog: Vec<Input>,
}

/// What the actor hears.
#[derive(Debug)]
pub enum LeasesMessage {
    /// From a holder.
    Request(Inbound<Leases>),
    /// From this node.
    Input(Input),
    /// From its alarm clock.
    Wake,
}

impl From<Inbound<Leases>> for LeasesMessage {
    fn from(inbound: Inbound<Leases>) -> Self {
        Self::Request(inbound)
    }
}

impl Leases {
    /// The lending of `node` in this life of it, with so many bytes on offer, before its actor runs.
    pub fn new(node: NodeId, incarnation: Incarnation, offered_bytes: u64, clock: Arc<dyn Clock>) -> Self {
        let owner = Owner::new(OwnerConfig { node, incarnation, offered_bytes, ttl: timing::TTL });
        let state = Mutex::new(State { owner, actor: None, backlog: Vec::new() });
        Self { shared: Arc::new(Shared { clock, state, subscribers: Mutex::default() }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who has what of this node's memory.
    pub fn view(&self) -> LeaseView {
        self.state().owner.view(self.shared.clock.now())
    }

    /// The sums.
    pub fn totals(&self) -> Totals {
        self.state().owner.totals()
    }

    /// Whether `from` may use the memory of a lease now, e.g. load a stage into it.
    ///
    /// # Errors
    /// The reason why not.
    pub fn check(&self, from: NodeId, right: &LeaseUse) -> Result<LeaseInfo, LeaseError> {
        self.state().owner.check(self.shared.clock.now(), from, right)
    }

    /// Offers more or less memory from now on, in bytes. What is lent beyond it is taken back in the order that
    /// [`owner`](super::owner) describes.
    pub fn offer(&self, bytes: u64) {
        self.tell(Input::Offer(bytes));
    }

    /// Takes a lease back. Its holder is told `why`.
    pub fn revoke(&self, lease: LeaseId, why: impl Into<String>) {
        self.tell(Input::Revoke { lease, why: why.into() });
    }

    /// Tells `subscriber` the sums, now and whenever they change.
    pub fn subscribe(&self, subscriber: TotalsSubscriber) {
        subscriber(self.totals());
        self.shared.subscribers.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::new(subscriber));
    }

    fn tell(&self, input: Input) {
        let mut state = self.state();
        if let Some(actor) = &state.actor
            && actor.send_message(LeasesMessage::Input(input.clone())).is_ok()
        {
            return;
        }
        state.backlog.push(input);
    }
}

impl fmt::Debug for Leases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leases").field("totals", &self.totals()).finish_non_exhaustive()
    }
}

/// Why the actor did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LeasesStartError {
    /// Its service is served already.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// Anything else.
    #[error("the lease actor did not start: {0}")]
    Start(String),
}

pub(super) fn start_error(error: SpawnErr) -> LeasesStartError {
    match error {
        SpawnErr::StartupFailed(error) => match error.downcast::<ServeError>() {
            Ok(error) => LeasesStartError::Serve(*error),
            Err(error) => LeasesStartError::Start(error.to_string()),
        },
        other => LeasesStartError::Start(other.to_string()),
    }
}

/// Runs a node's [`Leases`].
#[derive(Debug, Clone, Copy, Default)]
pub struct LeasesActor;

impl LeasesActor {
    /// Starts the actor, linked to `supervisor` if there is one, and serves [`Leases`] with it.
    ///
    /// # Errors
    /// If the service is served already or the actor does not start.
    pub async fn start(arguments: LeasesArguments, supervisor: Option<ActorCell>) -> Result<ActorRef<LeasesMessage>, LeasesStartError> {
        let started = match supervisor {
            Some(supervisor) => Actor::spawn_linked(None, Self, arguments, supervisor).await,
            None => Actor::spawn(None, Self, arguments).await,
        };
        started.map(|(actor, _)| actor).map_err(start_error)
    }
}

/// What the actor keeps beside the machine: questions that are not answered yet, and its alarm clock.
pub struct Running {
    arguments: LeasesArguments,
    questions: BTreeMap<RequestKey, Replier<Leases>>,
    last_key: u64,
    wake: Wake,
    told: Option<Totals>,
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("questions", &self.questions.len()).finish_non_exhaustive()
    }
}

impl Actor for LeasesActor {
    type Msg = LeasesMessage;
    type State = Running;
    type Arguments = LeasesArguments;

    async fn pre_start(&self, myself: ActorRef<LeasesMessage>, arguments: LeasesArguments) -> Result<Running, ActorProcessingErr> {
        arguments.services.serve_actor::<Leases, LeasesMessage>(myself.clone())?;
        let now = arguments.env.clock.now();
        let (backlog, fencing) = {
            let mut state = arguments.handle.state();
            state.actor = Some(myself.clone());
            let is_fenced = |lease: &LeaseInfo| matches!(lease.state, LeaseState::Fenced(_));
            let fencing: Vec<LeaseId> = state.owner.view(now).leases.iter().filter(|l| is_fenced(l)).map(|l| l.id).collect();
            (std::mem::take(&mut state.backlog), fencing)
        };
        let wake = Wake::new("lease alarm", Arc::clone(&arguments.env.clock), Arc::clone(&arguments.env.spawner));
        let mut running = Running { arguments, questions: BTreeMap::new(), last_key: 0, wake, told: None };
        for lease in fencing {
            running.fence(lease);
        }
        for input in backlog {
            running.step(&myself, input);
        }
        running.step(&myself, Input::Tick);
        Ok(running)
    }

    async fn handle(
        &self,
        myself: ActorRef<LeasesMessage>,
        message: LeasesMessage,
        running: &mut Running,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            LeasesMessage::Request(Inbound { from, request, reply, .. }) => {
                running.last_key += 1;
                let key = RequestKey(running.last_key);
                if let Some(reply) = reply {
                    running.questions.insert(key, reply);
                }
                let mut seed = [0; 32];
                running.arguments.env.rng.fill("lease token", &mut seed);
                running.step(&myself, Input::Request { from, key, request, seed: TokenSeed(seed) });
            }
            LeasesMessage::Input(input) => running.step(&myself, input),
            LeasesMessage::Wake => {
                running.wake.fired(running.arguments.env.clock.now());
                running.step(&myself, Input::Tick);
            }
        }
        Ok(())
    }

    async fn post_stop(&self, _: ActorRef<LeasesMessage>, running: &mut Running) -> Result<(), ActorProcessingErr> {
        running.arguments.handle.state().actor = None;
        running.arguments.services.withdraw::<Leases>();
        Ok(())
    }
}

impl Running {
    fn step(&mut self, myself: &ActorRef<LeasesMessage>, input: Input) {
        let now = self.arguments.env.clock.now();
        let (outputs, next, totals) = {
            let owner = &mut self.arguments.handle.state().owner;
            (owner.step(now, input), owner.next_wake(), owner.totals())
        };
        for output in outputs {
            self.perform(now, output);
        }
        if self.told != Some(totals) {
            self.told = Some(totals);
            let subscribers = self.arguments.handle.shared.subscribers.lock().unwrap_or_else(PoisonError::into_inner).clone();
            for subscriber in subscribers {
                subscriber(totals);
            }
        }
        if let Some(next) = next {
            self.wake.set(myself, next, LeasesMessage::Wake);
        }
    }

    fn perform(&mut self, now: Instant, output: Output) {
        match output {
            Output::Reply { key, reply } => {
                match &reply {
                    LeaseReply::Refused(error) => tracing::debug!(target: "shoal::lease", %error, "refused"),
                    LeaseReply::Renewed { lease, ttl } => (self.arguments.on_renew)(*lease, now + *ttl),
                    _ => {}
                }
                if let Some(question) = self.questions.remove(&key) {
                    question.reply(reply);
                }
            }
            Output::Fence(lease) => self.fence(lease),
            Output::Notify { to, notice } => {
                // Whoever does not hear it learns it at the next renewal.
                if let Err(error) = self.arguments.services.remote::<LeaseKeeper>(to).cast(notice) {
                    tracing::debug!(target: "shoal::lease", holder = ?to, %error, "a holder was not told that a lease has ended");
                }
            }
            Output::TermRaised { instance, term } => (self.arguments.on_term)(instance, term),
            Output::OverCommitted { bytes } => {
                tracing::warn!(target: "shoal::lease", bytes, "more memory is lent than is now offered: leases are taken back");
            }
        }
    }

    fn fence(&self, lease: LeaseId) {
        let leases = self.arguments.handle.clone();
        (self.arguments.on_fence)(lease, Box::new(move || leases.tell(Input::Fenced(lease))));
    }
}
