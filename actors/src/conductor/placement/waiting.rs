//! Models that are wanted and fit nowhere at the moment: they are placed as soon as there is room.
//!
//! One node sees to each: the last conductor of an instance that could not be made whole, or the one that was asked to place it. It
//! looks at what the nodes have free, and plans again only when that has changed. Everybody sees on its card what waits, and why.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::super::assemble::Order;
use super::super::instance::{InstanceState, InstanceSummary};
use super::{AGAIN, Held, PlacementMsg, PlacementRequest, PlacementState};
use crate::card::{ModelCard, NodeCard};
use crate::catalog::LocalModel;
use crate::env::Instant;
use crate::ids::{InstanceId, NodeId, Term};
use crate::plan::{Goal, PlanError};

/// How often placing is tried in vain although there seemed to be room, before the model is given up.
const TRIES: u32 = 10;
/// The longest pause between two of them.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// What is to be placed.
#[derive(Clone)]
pub(super) struct Wish {
    pub(super) model: LocalModel,
    pub(super) card: ModelCard,
    pub(super) goal: Goal,
    /// How often it was tried in vain.
    pub(super) tries: u32,
}

impl Wish {
    /// Of an instance that ran: as with every repair, the nodes that it was placed over are not what counts.
    pub(super) fn again(order: &Order) -> Self {
        let goal = Goal {
            context_tokens: order.plan.context_tokens,
            sequences: order.plan.sequences,
            nodes_min: 1,
            pinned: BTreeSet::new(),
            ..order.goal.clone()
        };
        Self { model: order.model.clone(), card: order.card.clone(), goal, tries: 0 }
    }
}

/// A wish that waits.
pub(super) struct Waiting {
    pub(super) summary: InstanceSummary,
    wish: Wish,
    /// Not before.
    next: Instant,
    /// What the nodes had free when it was last planned.
    seen: Option<Vec<Free>>,
}

/// What of a node counts for planning: memory, and whether it has the model.
type Free = (NodeId, u64, bool);

/// Whether more memory, more nodes or the model on another disk may help.
pub(super) fn may_fit_later(error: &PlanError) -> bool {
    !matches!(error, PlanError::BadGoal(_) | PlanError::BadModel { .. })
}

impl PlacementState {
    /// Has a wish wait, under the name of an instance that it was or will be shown as.
    pub(super) fn wait_for_room(&mut self, instance: InstanceId, term: Term, wish: Wish, reason: String) -> InstanceSummary {
        let summary = InstanceSummary {
            instance,
            model: wish.model.name.clone(),
            sha256: wish.model.sha256.clone(),
            term,
            state: InstanceState::Waiting(reason),
            context_tokens: wish.goal.context_tokens,
            stages: Vec::new(),
            decode_tok_s: 0.0,
            prefill_tok_s: 0.0,
            forked: false,
        };
        let pause = if wish.tries == 0 { Duration::ZERO } else { PAUSE_MAX.min(Duration::from_secs(1 << wish.tries.min(6))) };
        let next = self.arguments.ground.env.clock.now() + pause;
        tracing::info!(target: "shoal::conductor", model = %summary.model, ?instance, "a model waits for room");
        self.waiting.insert(instance, Waiting { summary: summary.clone(), wish, next, seen: None });
        self.publish();
        self.look_soon();
        summary
    }

    /// Has a wish wait, if the same does not wait already.
    pub(super) fn wish(&mut self, wish: Wish, reason: String) -> InstanceSummary {
        let same = |waiting: &&Waiting| waiting.wish.goal == wish.goal && waiting.summary.sha256 == wish.model.sha256;
        if let Some(waiting) = self.waiting.values().find(same) {
            return waiting.summary.clone();
        }
        let (instance, term) = self.next_name();
        self.wait_for_room(instance, term, wish, reason)
    }

    /// An instance of which nothing stands any more is placed again when there is room.
    pub(super) fn waits(&mut self, held: Held, reason: String) {
        let (instance, term) = (held.summary.instance, held.summary.term);
        self.wait_for_room(instance, term, held.again, reason);
    }

    /// Looks a little later, if it is not about to be done already.
    fn look_soon(&mut self) {
        if self.waiting.is_empty() || std::mem::replace(&mut self.looking, true) {
            return;
        }
        let (me, clock) = (self.me.clone(), Arc::clone(&self.arguments.ground.env.clock));
        let look = async move {
            clock.sleep_until(clock.now() + AGAIN).await;
            let _ = me.cast(PlacementMsg::Look);
        };
        self.arguments.ground.env.spawner.task("waiting models", Box::pin(look));
    }

    /// Whether somebody has by now what a wish is for.
    fn is_met(&self, wish: &Wish) -> bool {
        let view = self.arguments.ground.membership.view();
        let told = view.present().flat_map(|(node, member)| member.card.instances.iter().filter(move |known| known.term.node == node));
        let runs = |known: &InstanceSummary| !known.state.is_gone() && known.sha256 == wish.model.sha256 && known.meets(&wish.goal);
        told.into_iter().any(runs) || self.instances.values().any(|held| runs(&held.summary))
    }

    /// Places what fits by now.
    pub(super) async fn look(&mut self) {
        self.looking = false;
        let now = self.arguments.ground.env.clock.now();
        let due: Vec<InstanceId> = self.waiting.iter().filter(|(_, waiting)| now >= waiting.next).map(|(id, _)| *id).collect();
        for instance in due {
            let Some(waiting) = self.waiting.get(&instance) else { continue };
            let wish = waiting.wish.clone();
            if self.is_met(&wish) {
                self.waiting.remove(&instance);
                self.publish();
                continue;
            }
            let cards = self.arguments.ground.cards(&wish.model);
            let free = |card: &NodeCard| (card.node, card.memory_free_bytes, card.has_model(&wish.model.sha256));
            let free: Vec<Free> = cards.iter().filter(|card| !card.leaving).map(free).collect();
            if waiting.seen.as_ref() == Some(&free) {
                continue;
            }
            match self.plans(&wish.model, &wish.card, wish.goal.clone()).map(|plans| plans.into_iter().next()) {
                Ok(Some(plan)) => {
                    self.waiting.remove(&instance);
                    let began = self.start(wish.clone(), plan, true).await;
                    if let Err(reason) = began {
                        let wish = Wish { tries: wish.tries + 1, ..wish };
                        let term = Term { counter: self.last_counter, node: self.arguments.ground.node };
                        self.wait_for_room(instance, term, wish, reason);
                    }
                }
                other => {
                    let reason = other.err().map_or_else(|| "no plan was found".to_owned(), |error| error.to_string());
                    if let Some(waiting) = self.waiting.get_mut(&instance) {
                        waiting.seen = Some(free);
                        waiting.summary.state = InstanceState::Waiting(reason);
                    }
                }
            }
            self.publish();
        }
        self.look_soon();
    }

    /// What becomes of an instance that was placed for a wish and could not be made: it waits again, for a while.
    pub(super) fn tried(&mut self, held: Held, wish: Wish, reason: String) {
        let wish = Wish { tries: wish.tries + 1, ..wish };
        if wish.tries < TRIES {
            self.wait_for_room(held.summary.instance, held.summary.term, wish, reason);
        }
    }

    /// This node leaves: others see to what waits here.
    pub(super) fn pass_on(&mut self) {
        let view = self.arguments.ground.membership.view();
        for (_, waiting) in std::mem::take(&mut self.waiting) {
            let sha256 = &waiting.summary.sha256;
            let others = view.staying().filter(|(node, _)| *node != self.arguments.ground.node);
            let having = others.filter(|(_, member)| member.card.has_model(sha256));
            if let Some((node, _)) = having.max_by_key(|(node, _)| node.rank_for(sha256)) {
                let request = PlacementRequest::Want { model: waiting.summary.model, goal: waiting.wish.goal };
                let _ = self.arguments.ground.services.remote::<super::Placement>(node).cast(request);
            }
        }
        self.publish();
    }

    /// Why a model is not placed for a request, if it waits here.
    pub(super) fn waits_because(&self, sha256: &str, error: String) -> String {
        match self.waiting.values().any(|waiting| waiting.summary.sha256 == sha256) {
            true => format!("{error}; the model waits, and is placed as soon as there is room"),
            false => error,
        }
    }
}
