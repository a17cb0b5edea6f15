//! A conductor moves layers of a pipeline that runs, and hands the whole instance over.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;

use super::super::assemble::{Cancel, Ground, Order, drop_stages};
use super::super::instance::InstanceState;
use super::super::journal::{InstanceRecord, Journal, JournalEntry, JournalRequest};
use super::super::leaving::{LeavingRefusal, LeavingRequest, Leavings, Vacated};
use super::super::moves::{Prepared, Room, better, prepare, room, standing};
use super::super::recover::{Standing, lose, recover, tell_owners};
use super::super::succession::describe;
use super::{ConductorMsg, ConductorState, Whole, watched};
use crate::ids::{NodeId, PlanEpoch, RequestId};
use crate::lease::LeaseUse;
use crate::plan::Repair;
use crate::scheduler::SchedulerMsg;

/// How long an heir may take to claim what it is handed.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(8);
/// How long an heir may take to remember a request.
const STORE_TIMEOUT: Duration = Duration::from_secs(2);
/// How many it is told at a time.
const STORES_AT_ONCE: usize = 8;
/// How long a node that leaves may take to be known as one.
const KNOWN_WITHIN: Duration = Duration::from_secs(2);
/// How often that is looked at.
const KNOWN_LOOK: Duration = Duration::from_millis(20);

/// An arrangement that is being got ready.
pub(super) struct Moving {
    epoch: PlanEpoch,
    /// Dropping it ends that.
    _wanted: tokio::sync::watch::Sender<bool>,
    why: String,
}

/// What the arrangement before leaves behind: its stages that have no place in the next.
pub(super) struct Left {
    order: Order,
    stages: Vec<(usize, Vec<LeaseUse>)>,
}

impl Left {
    pub(super) async fn drop_all(self, ground: &Ground) {
        drop_stages(ground, &self.order, &self.stages).await;
    }
}

impl ConductorMsg {
    /// Asks for everything of an instance to be moved from a node, which answers `reply`.
    pub(in super::super) fn vacate(
        node: NodeId,
        instance: crate::ids::InstanceId,
        reply: impl FnOnce(Result<(), LeavingRefusal>) + Send + 'static,
    ) -> Self {
        Self::Vacate(node, Vacating(Vacated::new(instance, reply)))
    }
}

/// Whoever waits for that, opaque outside.
#[doc(hidden)]
pub struct Vacating(Vacated);

/// What a preparation came to, opaque outside.
#[doc(hidden)]
pub struct Ready(PlanEpoch, Result<Prepared, String>);

/// What a handover came to, opaque outside.
#[doc(hidden)]
pub struct Handed(Result<NodeId, String>);

impl ConductorState {
    /// A node wants to be rid of what it has of the instance. It is noted when its card says so, which may be a moment later.
    pub(super) fn vacate(&mut self, node: NodeId, Vacating(reply): Vacating) {
        if self.arguments.ground.membership.view().is_leaving(node) {
            self.vacates.push((node, reply));
            return self.move_on();
        }
        let (me, ground) = (self.me.clone(), self.arguments.ground.clone());
        let clock = Arc::clone(&ground.env.clock);
        let later = async move {
            let until = clock.now() + KNOWN_WITHIN;
            while !ground.membership.view().is_leaving(node) {
                if clock.now() >= until {
                    let reason = "the conductor does not see that it leaves".to_owned();
                    return reply.tell(Err(LeavingRefusal::Stays { reason, busy: true }));
                }
                clock.sleep_until(clock.now() + KNOWN_LOOK).await;
            }
            let _ = me.cast(ConductorMsg::Vacate(node, Vacating(reply)));
        };
        self.arguments.ground.env.spawner.task("conductor", Box::pin(later));
    }

    /// Whether the pipeline runs and nothing is being done about it.
    pub(super) fn is_settled(&self) -> bool {
        let idle = !self.ended && !self.assembling && !self.handing && self.moving.is_none();
        idle && self.broken.is_none() && self.unloads.is_empty() && self.scheduler.is_some()
    }

    /// Does what is next for those who leave.
    pub(super) fn move_on(&mut self) {
        if self.vacates.is_empty() || !self.is_settled() {
            return;
        }
        let leaving = self.arguments.ground.leaving();
        let order = &self.arguments.order;
        let moved: BTreeSet<usize> =
            order.plan.nodes().enumerate().filter(|(_, node)| leaving.contains(node)).map(|(index, _)| index).collect();
        if moved.is_empty() {
            let me = self.arguments.ground.node;
            let (own, others): (Vec<_>, Vec<_>) = std::mem::take(&mut self.vacates).into_iter().partition(|(node, _)| *node == me);
            others.into_iter().for_each(|(_, reply)| reply.tell(Ok(())));
            self.vacates = own;
            if !self.vacates.is_empty() {
                self.hand_over();
            }
            return;
        }
        let names: BTreeSet<&str> = moved.iter().map(|index| order.plan.stages[*index].name.as_str()).collect();
        let why = format!("its layers move away from {}, which leaves", names.into_iter().collect::<Vec<_>>().join(" and "));
        match room(&self.arguments.ground, order, &moved, &leaving) {
            Room::Beside(to) => self.start_moving(to, why),
            Room::Instead => self.move_instead(moved, why),
            Room::None(reason) => self.refuse_to_move(reason),
        }
    }

    /// Goes over to a better plan if there is one by now. It is looked for when what the nodes have has changed, and not soon after the
    /// pipeline was made.
    pub(super) fn consider(&mut self) {
        let ground = &self.arguments.ground;
        let stood = self.stood_since.is_some_and(|since| ground.env.clock.now().since(since) >= ground.replan_after);
        if !stood || !self.vacates.is_empty() || !self.is_settled() {
            return;
        }
        let now = standing(ground, &self.arguments.order);
        if self.considered.as_ref() == Some(&now) {
            return;
        }
        let found = better(ground, &self.arguments.order);
        self.considered = Some(now);
        if let Some(to) = found {
            let tok_s = to.plan.predicted.decode_tok_s;
            self.start_moving(to, format!("other nodes are predicted to make {tok_s:.1} tokens a second of it"));
        }
    }

    /// Tells those who leave that nothing moves.
    fn refuse_to_move(&mut self, reason: String) {
        let reason = format!("{} stays here: {reason}", self.arguments.order.model.name);
        for (_, reply) in std::mem::take(&mut self.vacates) {
            let stays = |busy| Err(LeavingRefusal::Stays { reason: reason.clone(), busy });
            match &self.scheduler {
                None => reply.tell(stays(false)),
                Some(scheduler) => {
                    let idle = stays(false);
                    let asked = Asked(Some(reply), stays(true));
                    let _ = scheduler.cast(SchedulerMsg::IfIdle(Box::new(move || asked.tell(idle))));
                }
            }
        }
    }

    /// Gets another arrangement ready while this one runs.
    pub(super) fn start_moving(&mut self, to: Repair, why: String) {
        self.newest = PlanEpoch(self.newest.0.max(self.arguments.order.epoch.0) + 1);
        let (wanted, cancel) = Cancel::new();
        let epoch = self.newest;
        tracing::info!(target: "shoal::conductor", model = %self.arguments.order.model.name, %why, "layers are moved");
        self.moving = Some(Moving { epoch, _wanted: wanted, why });
        let (ground, me) = (self.arguments.ground.clone(), self.me.clone());
        let (order, leases) = (self.arguments.order.clone(), self.leases.clone());
        let task = async move {
            let result = prepare(&ground, &order, &leases, (to, epoch), &cancel).await;
            // A conductor lives on for a while after its end, and drops what nobody wants then.
            let _ = me.cast(ConductorMsg::Ready(Box::new(Ready(epoch, result))));
        };
        self.arguments.ground.env.spawner.task("move", Box::pin(task));
    }

    /// An arrangement is ready, or could not be made.
    pub(super) fn ready(&mut self, Ready(epoch, result): Ready) {
        let Some(moving) = self.moving.take_if(|moving| moving.epoch == epoch) else {
            return result.into_iter().for_each(|prepared| self.forget(prepared));
        };
        let prepared = match result {
            Ok(prepared) => prepared,
            Err(reason) => {
                tracing::info!(target: "shoal::conductor", model = %self.arguments.order.model.name, %reason, "layers were not moved");
                self.stood_since = Some(self.arguments.ground.env.clock.now());
                return self.refuse_to_move(reason);
            }
        };
        if !self.is_settled() {
            return self.forget(prepared);
        }
        self.switch(prepared, moving.why);
    }

    /// Drops what was got ready and is not wanted.
    fn forget(&self, prepared: Prepared) {
        let ground = self.arguments.ground.clone();
        let task = async move { drop_stages(&ground, &prepared.order, &prepared.new_stages()).await };
        self.arguments.ground.env.spawner.task("move", Box::pin(task));
    }

    /// Goes over to an arrangement that is ready.
    fn switch(&mut self, prepared: Prepared, why: String) {
        let kept: BTreeSet<usize> = prepared.kept.iter().flatten().copied().collect();
        let stages = std::mem::take(&mut self.leases).into_iter().enumerate().filter(|(index, _)| !kept.contains(index)).collect();
        self.left = Some(Left { order: self.arguments.order.clone(), stages });
        if self.vacates.iter().any(|(node, _)| *node == self.arguments.ground.node) {
            // The heir links it.
            self.watch(&prepared.order);
            self.arguments.order = prepared.order;
            self.leases = prepared.leases;
            return self.hand_over();
        }
        let paid = prepared.leases.into_iter().map(Some).collect();
        let standing = Standing { order: prepared.order, paid, text: self.text.clone() };
        self.relink(standing, BTreeSet::new(), why);
    }

    /// Stops the pipeline, gives its stages back and places all of it anew, because what is to move fits nowhere beside it.
    fn move_instead(&mut self, moved: BTreeSet<usize>, why: String) {
        let standing = self.take_standing();
        self.relink(standing, moved, why);
    }

    /// What stands of the pipeline, for whoever makes it whole.
    pub(super) fn take_standing(&mut self) -> Standing {
        let paid = std::mem::take(&mut self.leases).into_iter().map(Some).collect();
        Standing { order: self.arguments.order.clone(), paid, text: self.text.clone() }
    }

    /// Makes the pipeline whole in another arrangement. What runs waits.
    pub(super) fn relink(&mut self, mut standing: Standing, given_up: BTreeSet<usize>, why: String) {
        (self.arguments.state)(InstanceState::Recovering(why.clone()), None);
        self.arguments.begin.reason = why;
        self.planned = true;
        if let Some(scheduler) = &self.scheduler {
            let _ = scheduler.cast(SchedulerMsg::Suspend);
        }
        if let Some(closer) = self.closer.take() {
            closer.close();
        }
        self.assembling = true;
        let cancel = self.cancellable();
        standing.order.epoch = PlanEpoch(standing.order.epoch.0.max(self.newest.0));
        let (ground, me) = (self.arguments.ground.clone(), self.me.clone());
        let task = async move {
            for index in given_up {
                let leases = standing.paid.get(index).cloned().flatten().unwrap_or_default();
                let order = standing.order.clone();
                lose(&ground, &order, &mut standing.paid, index, &leases).await;
            }
            let _ = me.cast(ConductorMsg::Recovered(Box::new(Whole(recover(&ground, standing, &cancel).await))));
        };
        self.arguments.ground.env.spawner.task("recover", Box::pin(task));
    }

    /// What ends the recovery that begins now.
    pub(super) fn cancellable(&mut self) -> Cancel {
        let (wanted, cancel) = Cancel::new();
        self.wanted = Some(wanted);
        cancel
    }

    /// What is left of the arrangement before goes.
    pub(super) fn clean_up(&mut self) {
        let Some(left) = self.left.take() else { return };
        let (ground, me) = (self.arguments.ground.clone(), self.me.clone());
        let task = async move {
            left.drop_all(&ground).await;
            let _ = me.cast(ConductorMsg::MoveOn);
        };
        self.arguments.ground.env.spawner.task("move", Box::pin(task));
    }

    /// Hands the instance to another member: its pipeline stops, what is asked of it is told to the heir, which claims it.
    fn hand_over(&mut self) {
        let order = self.arguments.order.clone();
        let view = self.arguments.ground.membership.view();
        let has_model = |node: &NodeId| view.card(*node).is_some_and(|card| !card.leaving && card.has_model(&order.model.sha256));
        let heirs: BTreeSet<NodeId> = order.members.iter().copied().chain(order.plan.nodes()).filter(has_model).collect();
        if heirs.is_empty() {
            return self.not_handed("no other node that stays has the model on disk".to_owned());
        }
        let Some(scheduler) = self.scheduler.clone() else { return };
        self.handing = true;
        (self.arguments.state)(InstanceState::Recovering("the node that conducts it leaves".to_owned()), None);
        let (send, receive) = tokio::sync::oneshot::channel();
        let _ = scheduler.cast(SchedulerMsg::Suspend);
        let _ = scheduler.cast(SchedulerMsg::Entries(Box::new(move |entries| drop(send.send(entries)))));
        let before = self.left.as_ref().map(|left| left.order.members.clone()).unwrap_or_default();
        let (ground, me) = (self.arguments.ground.clone(), self.me.clone());
        let task = async move {
            let entries = receive.await.unwrap_or_default();
            futures::future::join(tell_owners(&ground, &order), describe(&ground, &order)).await;
            // Requests are remembered by those who were members, too.
            let mut record = order.record();
            record.members.extend(before.into_iter().filter(|node| !order.members.contains(node)));
            let mut result = Err(String::new());
            for heir in heirs {
                result = hand(&ground, heir, &order, &record, &entries).await.map(|()| heir);
                if result.is_ok() {
                    break;
                }
            }
            let _ = me.cast(ConductorMsg::Handed(Box::new(Handed(result))));
        };
        self.arguments.ground.env.spawner.task("hand over", Box::pin(task));
    }

    fn not_handed(&mut self, reason: String) {
        self.clean_up();
        self.refuse_to_move(reason);
    }

    /// It was handed over, or could not be: then it is made whole here again.
    pub(super) async fn handed(&mut self, Handed(result): Handed) {
        self.handing = false;
        let heir = match result {
            Ok(heir) => heir,
            Err(reason) => {
                tracing::warn!(target: "shoal::conductor", instance = ?self.arguments.order.instance, %reason, "nobody takes the instance over");
                self.not_handed(reason);
                if !self.ended {
                    let standing = self.take_standing();
                    self.relink(standing, BTreeSet::new(), "no other node could take it over".to_owned());
                }
                return;
            }
        };
        tracing::info!(target: "shoal::conductor", instance = ?self.arguments.order.instance, ?heir, "the instance was handed over");
        self.ended = true;
        // Who wants it down asks the heir.
        self.unloads.clear();
        if let Some(scheduler) = self.scheduler.take() {
            // Readers are told that it is not here, not that it failed.
            scheduler.stop(None);
        }
        if let Some(closer) = self.closer.take() {
            closer.close();
        }
        for node in watched(&self.arguments.order) {
            self.arguments.ground.membership.unwatch(node);
        }
        let (ground, me, order) = (self.arguments.ground.clone(), self.me.clone(), self.arguments.order.clone());
        let left = self.left.take();
        let task = async move {
            // The stages that go on are the heir's; others of before are still this node's.
            if let Some(left) = left {
                left.drop_all(&ground).await;
            }
            // Until it is seen who conducts it, this node is the one that is known to have it.
            let until = ground.env.clock.now() + KNOWN_WITHIN;
            let known = || {
                let view = ground.membership.view();
                let mut all = view.present().flat_map(|(_, member)| &member.card.instances);
                all.any(|known| known.instance == order.instance && known.term > order.term)
            };
            while !known() && ground.env.clock.now() < until {
                ground.env.clock.sleep_until(ground.env.clock.now() + KNOWN_LOOK).await;
            }
            let _ = me.cast(ConductorMsg::Over(heir));
        };
        self.arguments.ground.env.spawner.task("hand over", Box::pin(task));
    }

    /// Nothing of what was handed over is here any more.
    pub(super) fn over(&mut self, heir: NodeId) {
        let words = format!("node {} conducts it now", heir.short());
        (self.arguments.state)(InstanceState::Failed(words), None);
        std::mem::take(&mut self.vacates).into_iter().for_each(|(_, reply)| reply.tell(Ok(())));
        self.unloaded();
    }
}

/// A word that waits for an idle scheduler. If it is not idle, the closure that holds this is dropped.
struct Asked(Option<Vacated>, Result<(), LeavingRefusal>);

impl Asked {
    fn tell(mut self, result: Result<(), LeavingRefusal>) {
        self.0.take().into_iter().for_each(|reply| reply.tell(result.clone()));
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        let busy = self.1.clone();
        self.0.take().into_iter().for_each(|reply| reply.tell(busy.clone()));
    }
}

/// Tells an heir what is asked of an instance, and has it claim it.
async fn hand(ground: &Ground, heir: NodeId, order: &Order, record: &InstanceRecord, entries: &[JournalEntry]) -> Result<(), String> {
    let journal = ground.services.remote::<Journal>(heir);
    let store = |entry: &JournalEntry| {
        let store = JournalRequest::Store { instance: order.instance, term: order.term, entry: Box::new(entry.clone()) };
        let call = journal.call(store, STORE_TIMEOUT);
        let id: RequestId = entry.request.id;
        async move {
            match ground.membership.while_present(heir, call).await {
                Some(Ok(Ok(_))) => Ok(()),
                Some(Ok(Err(refusal))) => Err(refusal.to_string()),
                Some(Err(error)) => Err(error.to_string()),
                None => Err(format!("it went away before it remembered request {id}")),
            }
        }
    };
    for some in entries.chunks(STORES_AT_ONCE) {
        join_all(some.iter().map(store)).await.into_iter().collect::<Result<Vec<()>, String>>()?;
    }
    let take = LeavingRequest::TakeOver { instance: order.instance, record: Box::new(record.clone()) };
    match ground.membership.while_present(heir, ground.services.remote::<Leavings>(heir).call(take, HANDOVER_TIMEOUT)).await {
        Some(Ok(Ok(()))) => Ok(()),
        Some(Ok(Err(refusal))) => Err(format!("node {} does not take it over: {refusal}", heir.short())),
        Some(Err(error)) => Err(format!("node {} does not take it over: {error}", heir.short())),
        None => Err(format!("node {} went away before it took it over", heir.short())),
    }
}
