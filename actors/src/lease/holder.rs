//! The holder's actor: the shell around [`Keeper`], and the handle that conductors and users' programs use it by.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef};
use tokio::sync::oneshot;

use super::error::{AcquireError, LeaseError, LostReason};
use super::keeper::{BatchKey, CallFailure, HeldLease, Input, Keeper, LostLease, Output};
use super::leases::{LeasesStartError, start_error};
use super::types::{Beneficiary, Grant, LeaseSpec};
use super::wire::{LeaseReply, LeaseRequest};
use super::{Leases, timing};
use crate::env::{Clock, Env, Spawner};
use crate::ids::{InstanceId, LeaseId, NodeId, Term};
use crate::service::{CallError, Inbound, Services};
use crate::wake::Wake;

/// Hears of leases that are gone without having been given back. It must not block.
pub type LostSubscriber = Box<dyn Fn(&LostLease) + Send + Sync>;

/// What this node holds, as the rest of the node uses it. Every clone is the same; it outlives restarts of the actor.
#[derive(Clone)]
pub struct LeaseKeeper {
    shared: Arc<Shared>,
}

struct Shared {
    clock: Arc<dyn Clock>,
    services: Services,
    last_batch: AtomicU64,
    state: Mutex<State>,
    subscribers: Mutex<Vec<Arc<LostSubscriber>>>,
}

/// Lost leases of which it is remembered why.
const LOST_KEPT: usize = 256;

#[derive(Default)]
struct State {
    keeper: Keeper,
    actor: Option<ActorRef<LeaseKeeperMessage>>,
    /// The leases that were lost last, for whoever asks why.
    lost: VecDeque<LostLease>,
}

type Answer = oneshot::Sender<Result<Vec<Grant>, AcquireError>>;

/// What the actor hears.
pub enum LeaseKeeperMessage {
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
    /// Give these back, and say so when it is done.
    Release(Vec<LeaseId>, oneshot::Sender<()>),
    /// Give everything back, and say so when it is done.
    Stop(oneshot::Sender<()>),
    /// From its alarm clock.
    Wake,
}

impl fmt::Debug for LeaseKeeperMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Notice(inbound) => write!(f, "Notice({inbound:?})"),
            Self::Input(input) => write!(f, "Input({input:?})"),
            Self::Acquire { batch, wanted, .. } => write!(f, "Acquire({batch:?}, {} leases)", wanted.len()),
            Self::Stop(_) => f.write_str("Stop"),
            Self::Release(leases, _) => write!(f, "Release({leases:?})"),
            Self::Wake => f.write_str("Wake"),
        }
    }
}

impl From<Inbound<LeaseKeeper>> for LeaseKeeperMessage {
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
    /// A holder of nothing, on the node of `services`, before its actor runs.
    pub fn new(clock: Arc<dyn Clock>, services: Services) -> Self {
        let (state, subscribers) = (Mutex::default(), Mutex::default());
        Self { shared: Arc::new(Shared { clock, services, last_batch: AtomicU64::new(0), state, subscribers }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, message: LeaseKeeperMessage) -> bool {
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
        if !self.send(LeaseKeeperMessage::Acquire { batch, wanted, answer }) {
            return Err(AcquireError::Stopped);
        }
        let mut pending = Pending { keeper: self, batch, granted, heard: false };
        let result = (&mut pending.granted).await.unwrap_or(Err(AcquireError::Stopped));
        pending.heard = true;
        result
    }

    /// Gives leases back; unknown ones are ignored. Resolves when their owners have heard it, or after
    /// [`timing::CALL_DEADLINE`]: the keeper goes on trying by itself. The leases may not be used any more from the
    /// call on, whether or not the future is waited for.
    pub fn release(&self, leases: &[LeaseId]) -> impl Future<Output = ()> + Send + 'static {
        let (done, all_back) = oneshot::channel();
        let sent = self.send(LeaseKeeperMessage::Release(leases.to_vec(), done));
        self.patiently(sent, all_back)
    }

    fn patiently(&self, sent: bool, done: oneshot::Receiver<()>) -> impl Future<Output = ()> + Send + 'static {
        let patience = self.shared.clock.sleep_until(self.shared.clock.now() + timing::CALL_DEADLINE);
        async move {
            if sent {
                futures::future::select(done, patience).await;
            }
        }
    }

    /// Notes that memory of this beneficiary is in use, so that its owners take idle leases first when they must.
    pub fn touch(&self, beneficiary: Beneficiary) {
        self.send(LeaseKeeperMessage::Input(Input::Touch(beneficiary)));
    }

    /// Whether a lease may be used at this moment. It may not from shortly before its owner's deadline on.
    pub fn may_use(&self, lease: LeaseId) -> bool {
        self.state().keeper.may_use(self.shared.clock.now(), lease)
    }

    /// What is held, by id.
    pub fn held(&self) -> Vec<HeldLease> {
        self.state().keeper.held().collect()
    }

    /// Why a lease was lost, if that is not long ago.
    pub fn why_lost(&self, lease: LeaseId) -> Option<LostReason> {
        self.state().lost.iter().find(|lost| lost.lease == lease).map(|lost| lost.reason.clone())
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
                    self.send(LeaseKeeperMessage::Input(Input::Adopt { spec: spec.clone(), grant: grant.clone(), sent }));
                }
                Ok(leases)
            }
            Ok(LeaseReply::Refused(why)) => Err(ClaimError::Refused { node: owner, why }),
            Ok(_) => Err(ClaimError::Unreachable { node: owner, why: "the answer does not fit the question".to_owned() }),
            Err(error) => Err(ClaimError::Unreachable { node: owner, why: error.to_string() }),
        }
    }

    /// Tells an owner who may take over an instance of which this node holds leases there. It changes nothing of the leases: a claim
    /// under the term in force gives no new tokens, and what this node has given back meanwhile it does not hold again.
    ///
    /// # Errors
    /// [`ClaimError`].
    pub async fn amend(&self, owner: NodeId, instance: InstanceId, term: Term, members: Vec<NodeId>) -> Result<(), ClaimError> {
        let request = LeaseRequest::Claim { instance, term, members };
        match self.shared.services.remote::<Leases>(owner).call(request, timing::CALL_DEADLINE).await {
            Ok(LeaseReply::Claimed { .. }) => Ok(()),
            Ok(LeaseReply::Refused(why)) => Err(ClaimError::Refused { node: owner, why }),
            Ok(_) => Err(ClaimError::Unreachable { node: owner, why: "the answer does not fit the question".to_owned() }),
            Err(error) => Err(ClaimError::Unreachable { node: owner, why: error.to_string() }),
        }
    }

    /// Gives everything back and acquires nothing more. Resolves when all owners have heard it, or after
    /// [`timing::CALL_DEADLINE`].
    pub fn stop(&self) -> impl Future<Output = ()> + Send + 'static {
        let (done, all_back) = oneshot::channel();
        let sent = self.send(LeaseKeeperMessage::Stop(done));
        self.patiently(sent, all_back)
    }
}

impl fmt::Debug for LeaseKeeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseKeeper").field("held", &self.held().len()).finish_non_exhaustive()
    }
}

/// A set that somebody waits for. Whoever stops waiting wants none of it.
struct Pending<'a> {
    keeper: &'a LeaseKeeper,
    batch: BatchKey,
    granted: oneshot::Receiver<Result<Vec<Grant>, AcquireError>>,
    heard: bool,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if self.heard {
            return;
        }
        // The answer may have come without being heard; after this it cannot.
        self.granted.close();
        let input = match self.granted.try_recv() {
            Ok(Ok(grants)) => Input::Release(grants.into_iter().map(|grant| grant.lease).collect()),
            Ok(Err(_)) => return,
            Err(_) => Input::Cancel(self.batch),
        };
        self.keeper.send(LeaseKeeperMessage::Input(input));
    }
}

/// What a [`LeaseKeeperActor`] is started with. A clone starts its successor.
#[derive(Debug, Clone)]
pub struct LeaseKeeperArguments {
    /// What others use it by.
    pub handle: LeaseKeeper,
    /// Time and tasks.
    pub env: Env,
}

/// Runs a node's [`LeaseKeeper`].
#[derive(Debug, Clone, Copy, Default)]
pub struct LeaseKeeperActor;

impl LeaseKeeperActor {
    /// Starts the actor, linked to `supervisor` if there is one, and listens for owners' notices with it.
    ///
    /// # Errors
    /// If the service is served already or the actor does not start.
    pub async fn start(
        arguments: LeaseKeeperArguments,
        supervisor: Option<ActorCell>,
    ) -> Result<ActorRef<LeaseKeeperMessage>, LeasesStartError> {
        let started = match supervisor {
            Some(supervisor) => Actor::spawn_linked(None, Self, arguments, supervisor).await,
            None => Actor::spawn(None, Self, arguments).await,
        };
        started.map(|(actor, _)| actor).map_err(start_error)
    }
}

/// What the actor keeps beside the machine.
pub struct Running {
    keeper: LeaseKeeper,
    spawner: Arc<dyn Spawner>,
    answers: BTreeMap<BatchKey, Answer>,
    /// Who waits until none of these is on its way back.
    leaving: Vec<(Vec<LeaseId>, oneshot::Sender<()>)>,
    stopped: Vec<oneshot::Sender<()>>,
    wake: Wake,
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("answers", &self.answers.len()).finish_non_exhaustive()
    }
}

impl Actor for LeaseKeeperActor {
    type Msg = LeaseKeeperMessage;
    type State = Running;
    type Arguments = LeaseKeeperArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<LeaseKeeperMessage>,
        arguments: LeaseKeeperArguments,
    ) -> Result<Running, ActorProcessingErr> {
        let LeaseKeeperArguments { handle: keeper, env } = arguments;
        keeper.shared.services.serve_actor::<LeaseKeeper, LeaseKeeperMessage>(myself.clone())?;
        keeper.state().actor = Some(myself.clone());
        let wake = Wake::new("lease alarm", Arc::clone(&env.clock), Arc::clone(&env.spawner));
        let mut running =
            Running { keeper, spawner: env.spawner, answers: BTreeMap::new(), leaving: Vec::new(), stopped: Vec::new(), wake };
        running.step(&myself, Input::Restarted);
        Ok(running)
    }

    async fn handle(
        &self,
        myself: ActorRef<LeaseKeeperMessage>,
        message: LeaseKeeperMessage,
        running: &mut Running,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            LeaseKeeperMessage::Notice(Inbound { from, request, reply, .. }) => {
                running.step(&myself, Input::Notice { from, notice: request });
                if let Some(reply) = reply {
                    reply.reply(());
                }
            }
            LeaseKeeperMessage::Input(input) => running.step(&myself, input),
            LeaseKeeperMessage::Acquire { batch, wanted, answer } => {
                running.answers.insert(batch, answer);
                running.step(&myself, Input::AcquireAll { batch, wanted });
            }
            LeaseKeeperMessage::Release(leases, done) => {
                running.leaving.push((leases.clone(), done));
                running.step(&myself, Input::Release(leases));
            }
            LeaseKeeperMessage::Stop(done) => {
                running.stopped.push(done);
                running.step(&myself, Input::Stop);
            }
            LeaseKeeperMessage::Wake => {
                running.wake.fired(running.keeper.shared.clock.now());
                running.step(&myself, Input::Tick);
            }
        }
        Ok(())
    }

    async fn post_stop(&self, _: ActorRef<LeaseKeeperMessage>, running: &mut Running) -> Result<(), ActorProcessingErr> {
        running.keeper.state().actor = None;
        running.keeper.shared.services.withdraw::<LeaseKeeper>();
        Ok(())
    }
}

impl Running {
    fn step(&mut self, myself: &ActorRef<LeaseKeeperMessage>, input: Input) {
        let shared = Arc::clone(&self.keeper.shared);
        let mut inputs = vec![input];
        while let Some(input) = inputs.pop() {
            let outputs = self.keeper.state().keeper.step(shared.clock.now(), input);
            for output in outputs {
                inputs.extend(self.perform(myself, output));
            }
        }
        let state = self.keeper.state();
        if state.keeper.is_empty() {
            for done in self.stopped.drain(..) {
                let _ = done.send(());
            }
        }
        let back = |leases: &[LeaseId]| !leases.iter().any(|&lease| state.keeper.knows(lease));
        for (_, done) in self.leaving.extract_if(.., |(leases, done)| done.is_closed() || back(leases)) {
            let _ = done.send(());
        }
        if let Some(next) = state.keeper.next_wake() {
            self.wake.set(myself, next, LeaseKeeperMessage::Wake);
        }
    }

    /// Does what the machine wants, and says what follows at once.
    fn perform(&mut self, myself: &ActorRef<LeaseKeeperMessage>, output: Output) -> Option<Input> {
        let shared = &self.keeper.shared;
        match output {
            Output::Send { call, to, request } => {
                let (remote, myself) = (shared.services.remote::<Leases>(to), myself.clone());
                let task = async move {
                    let result = remote.call(request, timing::CALL_DEADLINE).await.map_err(|error| failure(&error));
                    // A keeper that has stopped has no use for answers.
                    let _ = myself.send_message(LeaseKeeperMessage::Input(Input::Answer { call, owner: to, result }));
                };
                self.spawner.task("lease call", Box::pin(task));
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
                tracing::warn!(target: "shoal::lease", %lost, "a lease is lost");
                {
                    let mut state = shared.state.lock().unwrap_or_else(PoisonError::into_inner);
                    state.lost.push_front(lost.clone());
                    state.lost.truncate(LOST_KEPT);
                }
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
