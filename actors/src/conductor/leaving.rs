//! A node that leaves: what it holds moves first, then it goes.
//!
//! It says on its card that it is about to leave, so that nobody gives it anything new. Then it asks the conductor of each instance
//! that has a stage here to move it, which that one does while its pipeline runs ([`super::actor`]); an instance that the leaving
//! node conducts itself is handed to a member, which claims it at once ([`super::succession`]). What cannot be moved is said with what
//! is missing, and asked for again until the time is up, or at once given up if nobody reads an answer of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use ractor::ActorRef;
use serde::{Deserialize, Serialize};

use super::actor::ConductorMsg;
use super::assemble::Ground;
use super::journal::InstanceRecord;
use super::succession::{Heir, take_over_from};
use crate::env::{Clock, Instant};
use crate::ids::{InstanceId, NodeId};
use crate::lease::{Beneficiary, LeaseState, Leases};
use crate::membership::Membership;
use crate::service::{Inbound, Service, ServiceId, Services};
use crate::service_numbers as ids;

/// How often a leaving node looks what it still has.
const LOOK: Duration = Duration::from_millis(100);
/// How often it asks again for what could not be moved.
const AGAIN: Duration = Duration::from_millis(700);
/// How often an instance may be unknown to who holds its leases, before that is left to the leases' end.
const UNKNOWN_MAX: u32 = 5;

/// What a node that leaves asks of others.
#[derive(Debug)]
pub struct Leavings;

impl Service for Leavings {
    const ID: ServiceId = ids::LEAVINGS;
    const NAME: &'static str = "leaving";
    type Request = LeavingRequest;
    type Reply = Result<(), LeavingRefusal>;
}

/// A request of a node that leaves.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LeavingRequest {
    /// Move everything of an instance away from the caller. Answered when nothing of it is there any more.
    Vacate(InstanceId),
    /// Conduct an instance that the caller conducts. Answered when it was claimed.
    TakeOver {
        /// Which.
        instance: InstanceId,
        /// What it is.
        record: Box<InstanceRecord>,
    },
}

/// Why something does not move.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum LeavingRefusal {
    /// The node conducts no such instance.
    #[error("the node does not conduct instance {0:?}")]
    NoInstance(InstanceId),
    /// It cannot be moved; the text says what is missing.
    #[error("{reason}")]
    Stays {
        /// For people.
        reason: String,
        /// Whether requests are open that would break off.
        busy: bool,
    },
}

/// Hears that something has moved, or why it has not.
type Tell = Box<dyn FnOnce(Result<(), LeavingRefusal>) + Send>;

/// Where that word goes. Dropped unused it says that there is no such instance any more.
pub(super) struct Vacated(Option<Tell>, InstanceId);

impl Vacated {
    /// Tells `reply`.
    pub(super) fn new(instance: InstanceId, reply: impl FnOnce(Result<(), LeavingRefusal>) + Send + 'static) -> Self {
        Self(Some(Box::new(reply)), instance)
    }

    pub(super) fn tell(mut self, result: Result<(), LeavingRefusal>) {
        self.0.take().into_iter().for_each(|reply| reply(result.clone()));
    }
}

impl Drop for Vacated {
    fn drop(&mut self) {
        let gone = Err(LeavingRefusal::NoInstance(self.1));
        self.0.take().into_iter().for_each(|reply| reply(gone.clone()));
    }
}

/// Answers a node that leaves. `conductor` finds the conductor of an instance on this node; `heir` is called with an instance that
/// was taken over.
pub fn serve_leaving(
    ground: &Ground,
    call: Inbound<Leavings>,
    conductor: impl FnOnce(InstanceId) -> Option<ActorRef<ConductorMsg>>,
    heir: impl FnOnce(Heir) + Send + 'static,
) {
    let Inbound { from, request, reply, .. } = call;
    let answer = move |result| reply.into_iter().for_each(|reply| reply.reply(Result::clone(&result)));
    match request {
        LeavingRequest::Vacate(instance) => match conductor(instance) {
            None => answer(Err(LeavingRefusal::NoInstance(instance))),
            // If the conductor has stopped the message is dropped, which tells the caller.
            Some(conductor) => drop(conductor.cast(ConductorMsg::vacate(from, instance, answer))),
        },
        LeavingRequest::TakeOver { instance, record } => {
            let ground = ground.clone();
            let spawner = Arc::clone(&ground.env.spawner);
            let task = async move {
                match take_over_from(&ground, from, instance, &record).await {
                    Ok(taken) => {
                        heir(taken);
                        answer(Ok(()));
                    }
                    Err(reason) => answer(Err(LeavingRefusal::Stays { reason, busy: true })),
                }
            };
            spawner.task("heir", Box::pin(task));
        }
    }
}

/// Something that could not be moved from a node that leaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Undrained {
    /// What it is of.
    pub instance: InstanceId,
    /// Why, for people.
    pub reason: String,
    /// Whether requests were open that break off.
    pub busy: bool,
}

/// What draining needs of its node.
#[derive(Clone)]
pub struct Drain {
    /// This node.
    pub node: NodeId,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Peers.
    pub services: Services,
    /// Who is there.
    pub membership: Membership,
    /// What this node lends.
    pub leases: Leases,
}

impl std::fmt::Debug for Drain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Drain").field("node", &self.node).finish_non_exhaustive()
    }
}

impl Drain {
    /// The instances that have something on this node, with who is to be asked about them.
    fn left(&self) -> BTreeMap<InstanceId, NodeId> {
        let view = self.membership.view();
        let lent = self.leases.view().leases.into_iter().filter_map(|lease| match (lease.beneficiary, lease.state) {
            // What a dead node holds ends by itself.
            (Beneficiary::Instance(instance), LeaseState::Granted) if view.is_present(lease.holder) => Some((instance, lease.holder)),
            _ => None,
        });
        let mut left: BTreeMap<InstanceId, NodeId> = lent.collect();
        let own = view.card(self.node).map(|card| card.instances.clone()).unwrap_or_default();
        left.extend(own.iter().filter(|own| own.term.node == self.node && !own.state.is_gone()).map(|own| (own.instance, self.node)));
        left
    }

    /// Says that this node leaves, and has everything moved away from it. Resolves when nothing is left, when what is left cannot be
    /// moved and nobody would miss it, or at `until`; gives what is left.
    pub async fn run(&self, until: Instant) -> Vec<Undrained> {
        self.membership.update_card(|card| card.leaving = true);
        let known: Arc<Mutex<BTreeMap<InstanceId, Undrained>>> = Arc::default();
        let work = self.move_all(until, Arc::clone(&known));
        futures::future::select(Box::pin(work), self.clock.sleep_until(until)).await;
        let left: BTreeSet<InstanceId> = self.left().into_keys().collect();
        let known = known.lock().unwrap_or_else(PoisonError::into_inner);
        let unknown = |instance: &InstanceId| Undrained { instance: *instance, reason: "it took too long".to_owned(), busy: true };
        left.iter().map(|instance| known.get(instance).cloned().unwrap_or_else(|| unknown(instance))).collect()
    }

    async fn move_all(&self, until: Instant, known: Arc<Mutex<BTreeMap<InstanceId, Undrained>>>) {
        let mut unknown: BTreeMap<InstanceId, u32> = BTreeMap::new();
        loop {
            let given_up = |instance: &InstanceId| unknown.get(instance).is_some_and(|times| *times >= UNKNOWN_MAX);
            let left: Vec<(InstanceId, NodeId)> = self.left().into_iter().filter(|(instance, _)| !given_up(instance)).collect();
            if left.is_empty() {
                return;
            }
            let asked = left.iter().map(|(instance, conductor)| async move {
                let remote = self.services.remote::<Leavings>(*conductor);
                let call = remote.call(LeavingRequest::Vacate(*instance), until.since(self.clock.now()));
                (*instance, self.membership.while_present(*conductor, call).await)
            });
            let (mut stuck, mut busy) = (0, false);
            for (instance, answer) in join_all(asked).await {
                let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
                match answer {
                    Some(Ok(Ok(()))) => drop(known.remove(&instance)),
                    Some(Ok(Err(LeavingRefusal::Stays { reason, busy: read }))) => {
                        stuck += 1;
                        busy |= read;
                        tracing::info!(target: "shoal::node", ?instance, %reason, "something stays on this node, which leaves");
                        known.insert(instance, Undrained { instance, reason, busy: read });
                    }
                    // Its conductor is gone, or is another one by now.
                    _ => *unknown.entry(instance).or_default() += 1,
                }
            }
            if stuck == left.len() && !busy {
                return;
            }
            let pause = if stuck > 0 { AGAIN } else { LOOK };
            self.clock.sleep_until(self.clock.now() + pause).await;
        }
    }
}
