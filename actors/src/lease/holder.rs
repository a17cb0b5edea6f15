//! The holder's actor: the shell around [`Keeper`], and the handle that conductors and users' programs use it by.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef};
use tokio::sync::oneshot;

use super::error::{AcquireError, LeaseError};
use super::keeper::{BatchKey, CallFailure, HeldLease, Input, Keeper, LostLease, Output};
use super::leases::{LeasesStartError, start_error};
use super::types::{Beneficiary, Grant, LeaseSpec};
use super::wire::{LeaseReply, LeaseRequest};
use super::{Leases, timing};
use crate::env::{Clock, Env, Instant, Spawner};
use crate::ids::{InstanceId, LeaseId, NodeId, Term};
use crate::service::{CallError, Inbound, Services};

/// Hears of leases that are gone without having been given back. It must not block.
pub type LostSubscriber = Box<dyn Fn(&LostLease) + Send + Sync>;

/// What this node holds, as the rest of the node uses it. Every clone is the same; it outlives restarts of the actor.
#[derive(Clone)]
pub struct LeaseKeeper {
    shared: Arc<Shared>,
}

struct Shared {
    clock: Arc<dyn Clock>,
    spawner: Arc<dyn Spawner>,
    services: Services,
    last_batch: AtomicU64,
    state: Mutex<State>,
    subscribers: Mutex<Vec<Arc<LostSubscriber>>>,
}

#[derive(Default)]
struct State {
    keeper: Keeper,
    actor: Option<ActorRef<KeeperMessage>>,
}

type Answer = oneshot::Sender<Result<Vec<Grant>, AcquireError>>;

/// What the actor hears.
pub enum KeeperMessage {
    /// From an owner.
    Notice(Inbound<LeaseKeeper>),
    /// From this node.
    Input(Input),
    /// A set of leases is wanted.
    Acquire {
        /// Names it.
        batch: BatchKey,
        /// From whom, what.
        wanted: Vec<(NodeId, LeaseSpec)>,
        /// Where the answer goes.
        answer: oneshot::Sender<Result<Vec<Grant>, AcquireError>>,
    },
    /// Give everything back, and say so when it is done.
    Stop(oneshot::Sender<()>),
    /// From a timer.
    Wake(Instant),
}

impl fmt::Debug for KeeperMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Notice(inbound) => write!(f, "Notice({inbound:?})"),
            Self::Input(input) => write!(f, "Input({input:?})"),
            Self::Acquire { batch, wanted, .. } => write!(f, "Acquire({batch:?}, {} leases)", wanted.len()),
            Self::Stop(_) => f.write_str("Stop"),
            Self::Wake(at) => write!(f, "Wake({at:?})"),
        }
    }
}

impl From<Inbound<LeaseKeeper>> for KeeperMessage {
    fn from(inbound: Inbound<LeaseKeeper>) -> Self {
        Self::Notice(inbound)
    }
}

/// Why an instance's leases at an owner were not taken over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClaimError {
    /// The owner refuses.
    #[error("node {node:?} refuses the claim: {why}")]
    Refused {
        /// Which owner.
        node: NodeId,
        /// Its words.
        why: LeaseError,
    },
    /// The owner did not answer, or not to the question.
    #[error("node {node:?} does not answer the claim: {why}")]
    Unreachable {
        /// Which owner.
        node: NodeId,
        /// What went wrong.
        why: String,
    },
}

impl LeaseKeeper {
    /// A holder of nothing, before its actor runs.
    pub fn new(env: &Env, services: Services) -> Self {
        let shared = Shared {
            clock: Arc::clone(&env.clock),
            spawner: Arc::clone(&env.spawner),
            services,
            last_batch: AtomicU64::new(0),
            state: Mutex::default(),
            subscribers: Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, message: KeeperMessage) -> bool {
        let actor = self.state().actor.clone();
        actor.is_some_and(|actor| actor.send_message(message).is_ok())
    }

    /// Acquires all of these leases or none: one owner after the other, in the order of their ids. Grants come back in
    /// the order of `wanted`, and are renewed from then on. Dropping the future gives up the set and whatever of it
    /// was granted.
    ///
    /// # Errors
    /// [`AcquireError`] says who refused and why; nothing is held then.
    pub async fn acquire_all(&self, wanted: Vec<(NodeId, LeaseSpec)>) -> Result<Vec<Grant>, AcquireError> {
        let batch = BatchKey(self.shared.last_batch.fetch_add(1, Ordering::Relaxed));
        let (answer, granted) = oneshot::channel();
        if !self.send(KeeperMessage::Acquire { batch, wanted, answer }) {
            return Err(AcquireError::Stopped);
        }
        let guard = CancelOnDrop { keeper: self, batch };
        let result = granted.await.unwrap_or(Err(AcquireError::Stopped));
        // It is decided: there is nothing left to cancel.
        std::mem::drop(guard);
        result
    }

    /// Gives leases back. Unknown ones are ignored.
    pub fn release(&self, leases: Vec<LeaseId>) {
        self.send(KeeperMessage::Input(Input::Release(leases)));
    }

    /// Notes that memory of this beneficiary is in use, so that its owners take idle leases first when they must.
    pub fn touch(&self, beneficiary: Beneficiary) {
        self.send(KeeperMessage::Input(Input::Touch(beneficiary)));
    }

    /// Whether a lease may be used at this moment. It may not from shortly before its owner's deadline on.
    pub fn may_use(&self, lease: LeaseId) -> bool {
        self.state().keeper.may_use(self.shared.clock.now(), lease)
    }

    /// What is held, by id.
    pub fn held(&self) -> Vec<HeldLease> {
        self.state().keeper.held().collect()
    }

    /// Tells `subscriber` of every lease that is lost from now on.
    pub fn on_lost(&self, subscriber: LostSubscriber) {
        self.shared.subscribers.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::new(subscriber));
    }

    /// Takes over an instance's leases at one owner under a new term, and holds them from then on. This node must be
    /// the term's node and one of the instance's members.
    ///
    /// # Errors
    /// [`ClaimError`]; nothing has changed then, unless the answer was lost on the way: claiming again is the same claim.
    pub async fn claim(
        &self,
        owner: NodeId,
        instance: InstanceId,
        term: Term,
        members: Vec<NodeId>,
    ) -> Result<Vec<(LeaseSpec, Grant)>, ClaimError> {
        let sent = self.shared.clock.now();
        let request = LeaseRequest::Claim { instance, term, members };
        match self.shared.services.remote::<Leases>(owner).call(request, timing::CALL_DEADLINE).await {
            Ok(LeaseReply::Claimed { leases }) => {
                for (spec, grant) in &leases {
                    self.send(KeeperMessage::Input(Input::Adopt { spec: spec.clone(), grant: grant.clone(), sent }));
                }
                Ok(leases)
            }
            Ok(LeaseReply::Refused(why)) => Err(ClaimError::Refused { node: owner, why }),
            Ok(_) => Err(ClaimError::Unreachable { node: owner, why: "the answer does not fit the question".to_owned() }),
            Err(error) => Err(ClaimError::Unreachable { node: owner, why: error.to_string() }),
        }
    }

    /// Gives everything back and acquires nothing more. Resolves when all owners have heard it, or after
    /// [`timing::CALL_DEADLINE`].
    pub async fn stop(&self) {
        let (done, all_back) = oneshot::channel();
        if self.send(KeeperMessage::Stop(done)) {
            let patience = self.shared.clock.sleep_until(self.shared.clock.now() + timing::CALL_DEADLINE);
            futures::future::select(all_back, patience).await;
        }
    }
}

impl fmt::Debug for LeaseKeeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseKeeper").field("held", &self.held().len()).finish_non_exhaustive()
    }
}

/// Gives a set up if whoever wanted it is gone before it was decided.
struct CancelOnDrop<'a> {
    keeper: &'a LeaseKeeper,
    batch: BatchKey,
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        self.keeper.send(KeeperMessage::Input(Input::Cancel(self.batch)));
    }
}

/// Runs a node's [`LeaseKeeper`].
#[derive(Debug, Clone, Copy, Default)]
pub struct KeeperActor;

impl KeeperActor {
    /// Starts the actor, linked to `supervisor` if there is one, and listens for owners' notices with it.
    ///
    /// # Errors
    /// If the service is served already or the actor does not start.
    pub async fn start(keeper: LeaseKeeper, supervisor: Option<ActorCell>) -> Result<ActorRef<KeeperMessage>, LeasesStartError> {
        let started = match supervisor {
            Some(supervisor) => Actor::spawn_linked(None, Self, keeper, supervisor).await,
            None => Actor::spawn(None, Self, keeper).await,
        };
        started.map(|(actor, _)| actor).map_err(start_error)
    }
}

/// What the actor keeps beside the machine.
pub struct Running {
    keeper: LeaseKeeper,
    answers: std::collections::BTreeMap<BatchKey, Answer>,
    stopped: Vec<oneshot::Sender<()>>,
    wake: Option<Instant>,
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("answers", &self.answers.len()).finish_non_exhaustive()
    }
}

impl Actor for KeeperActor {
    type Msg = KeeperMessage;
    type State = Running;
    type Arguments = LeaseKeeper;

    async fn pre_start(&self, myself: ActorRef<KeeperMessage>, keeper: LeaseKeeper) -> Result<Running, ActorProcessingErr> {
        keeper.shared.services.serve_actor::<LeaseKeeper, KeeperMessage>(myself.clone())?;
        keeper.state().actor = Some(myself.clone());
        let mut running = Running { keeper, answers: std::collections::BTreeMap::new(), stopped: Vec::new(), wake: None };
        running.step(&myself, Input::Restarted);
        Ok(running)
    }

    async fn handle(&self, myself: ActorRef<KeeperMessage>, message: KeeperMessage, running: &mut Running) -> Result<(), ActorProcessingErr> {
        match message {
            KeeperMessage::Notice(Inbound { from, request, reply, .. }) => {
                running.step(&myself, Input::Notice { from, notice: request });
                if let Some(reply) = reply {
                    reply.reply(());
                }
            }
            KeeperMessage::Input(input) => running.step(&myself, input),
            KeeperMessage::Acquire { batch, wanted, answer } => {
                running.answers.insert(batch, answer);
                running.step(&myself, Input::AcquireAll { batch, wanted });
            }
            KeeperMessage::Stop(done) => {
                running.stopped.push(done);
                running.step(&myself, Input::Stop);
            }
            KeeperMessage::Wake(at) => {
                if running.wake.is_some_and(|wake| wake <= at) {
                    running.wake = None;
                }
                running.step(&myself, Input::Tick);
            }
        }
        Ok(())
    }

    async fn post_stop(&self, _: ActorRef<KeeperMessage>, running: &mut Running) -> Result<(), ActorProcessingErr> {
        running.keeper.state().actor = None;
        running.keeper.shared.services.withdraw::<LeaseKeeper>();
        Ok(())
    }
}

impl Running {
    fn step(&mut self, myself: &ActorRef<KeeperMessage>, input: Input) {
        let shared = Arc::clone(&self.keeper.shared);
        let mut inputs = vec![input];
        while let Some(input) = inputs.pop() {
            let outputs = self.keeper.state().keeper.step(shared.clock.now(), input);
            for output in outputs {
                inputs.extend(self.perform(myself, output));
            }
        }
        let (next, empty) = {
            let state = self.keeper.state();
            (state.keeper.next_wake(), state.keeper.is_empty())
        };
        if empty {
            for done in self.stopped.drain(..) {
                let _ = done.send(());
            }
        }
        if let Some(next) = next
            && self.wake.is_none_or(|wake| next < wake)
        {
            self.wake = Some(next);
            let (clock, myself) = (Arc::clone(&shared.clock), myself.clone());
            let timer = async move {
                clock.sleep_until(next).await;
                let _ = myself.send_message(KeeperMessage::Wake(next));
            };
            shared.spawner.task("lease timer", Box::pin(timer));
        }
    }

    /// Does what the machine wants, and says what follows at once.
    fn perform(&mut self, myself: &ActorRef<KeeperMessage>, output: Output) -> Option<Input> {
        let shared = &self.keeper.shared;
        match output {
            Output::Send { call, to, request } => {
                let (remote, myself) = (shared.services.remote::<Leases>(to), myself.clone());
                let task = async move {
                    let result = remote.call(request, timing::CALL_DEADLINE).await.map_err(|error| failure(&error));
                    // A keeper that has stopped has no use for answers.
                    let _ = myself.send_message(KeeperMessage::Input(Input::Answer { call, owner: to, result }));
                };
                shared.spawner.task("lease call", Box::pin(task));
                None
            }
            Output::Batch { batch, result } => {
                let unheard = match self.answers.remove(&batch) {
                    Some(answer) => answer.send(result).err()?,
                    None => result,
                };
                // Whoever wanted the set is gone.
                unheard.ok().map(|grants| Input::Release(grants.into_iter().map(|grant| grant.lease).collect()))
            }
            Output::Lost(lost) => {
                tracing::warn!(target: "shoal::lease", owner = ?lost.owner, lease = ?lost.spec.id, reason = %lost.reason, "a lease is lost");
                let subscribers = shared.subscribers.lock().unwrap_or_else(PoisonError::into_inner).clone();
                for subscriber in subscribers {
                    subscriber(&lost);
                }
                None
            }
            // The handle asks the machine itself.
            Output::Right { .. } => None,
        }
    }
}

fn failure(error: &CallError) -> CallFailure {
    let retry = !matches!(error, CallError::Malformed { .. } | CallError::TooLong { .. });
    CallFailure { reason: error.to_string(), retry }
}
