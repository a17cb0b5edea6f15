//! A broken pipeline is made whole again: what stands stays in memory, what is lost is placed anew.
//!
//! Nothing is known of why it broke but who is present. So every stage whose holder is there is asked to take its place in
//! the next arrangement, and one that cannot counts as lost, too. Lost layers go to nodes with free memory; if what stands
//! leaves no room for that, everything is given back and placed from scratch. Each attempt has an epoch of its own, so
//! that no frame of an attempt before is taken for one of this.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;

use super::assemble::{Assembled, Cancel, Failure, Ground, Order, Paid, assemble, give_back, take_down};
use super::succession::describe;
use crate::env::TextModel;
use crate::ids::{NodeId, PlanEpoch};
use crate::lease::LeaseUse;
use crate::plan::{Goal, Plan, PlanRequest, plan, repair};

/// Attempts before a pipeline is given up.
const ATTEMPTS: u32 = 8;
/// Pause before the next one, longer each time: a node that is about to be noticed as gone is noticed.
const PAUSE: Duration = Duration::from_millis(100);

/// What a recovery begins with: an arrangement, and the leases that pay for its stages.
pub(super) struct Standing {
    pub(super) order: Order,
    pub(super) paid: Vec<Paid>,
    /// The model's tokenizer and template, if they are known.
    pub(super) text: Option<Arc<dyn TextModel>>,
}

/// A pipeline that was made whole.
pub(super) struct Recovered {
    /// In which arrangement.
    pub(super) order: Order,
    /// Whether stages were placed anew. If not, nobody was lost.
    pub(super) placed: bool,
    pub(super) assembled: Assembled,
}

/// Makes a pipeline whole.
///
/// # Errors
/// Words for the user: what is missing. Nothing stands any more then, and every lease is given back.
pub(super) async fn recover(ground: &Ground, standing: Standing, cancel: &Cancel) -> Result<Recovered, String> {
    let Standing { mut order, mut paid, text } = standing;
    // Nodes that were asked to take layers in the last attempt, and did not.
    let mut avoided = BTreeSet::new();
    let mut placed = false;
    let mut reason = String::new();
    for attempt in 1..=ATTEMPTS {
        if cancel.asked() {
            break;
        }
        order.epoch = PlanEpoch(order.epoch.0 + 1);
        if let Err(error) = rearrange(ground, &mut order, &mut paid, &avoided, cancel).await {
            reason = error;
            if avoided.is_empty() {
                break;
            }
            // Those who did not are the only ones who can.
            avoided.clear();
            continue;
        }
        placed |= paid.iter().any(Option::is_none);
        match assemble(ground, &order, &paid, (text.clone(), cancel), &|| {}).await {
            Ok(assembled) => {
                futures::future::join(tell_owners(ground, &order), describe(ground, &order)).await;
                return Ok(Recovered { order, placed, assembled });
            }
            Err(Failure { reason: why, stages }) => {
                tracing::info!(target: "shoal::conductor", instance = ?order.instance, attempt, reason = %why, "not made whole yet");
                reason = why;
                avoided.clear();
                for index in stages {
                    match paid.get(index).and_then(Clone::clone) {
                        Some(leases) => lose(ground, &order, &mut paid, index, &leases).await,
                        None => drop(avoided.insert(order.plan.stages[index].node)),
                    }
                }
            }
        }
        let _ = cancel.unless(ground.env.clock.sleep_until(ground.env.clock.now() + PAUSE * attempt)).await;
    }
    let leases: Vec<Vec<LeaseUse>> = paid.into_iter().map(Option::unwrap_or_default).collect();
    take_down(ground, &order, &leases).await;
    Err(reason)
}

/// Tells the owners who may take the instance over from now on.
pub(super) async fn tell_owners(ground: &Ground, order: &Order) {
    let owners: BTreeSet<NodeId> = order.plan.nodes().collect();
    let calls = owners.into_iter().map(|owner| ground.keeper.amend(owner, order.instance, order.term, order.members.clone()));
    for result in join_all(calls).await {
        if let Err(error) = result {
            tracing::debug!(target: "shoal::conductor", %error, "an owner does not know the new members");
        }
    }
}

/// Gives up a stage of which its holder will not make use again.
pub(super) async fn lose(ground: &Ground, order: &Order, paid: &mut [Paid], index: usize, leases: &[LeaseUse]) {
    let owner = order.plan.stages[index].node;
    // The owner fences the memory, which ends the stage if it is there after all.
    give_back(ground, leases.iter().map(|lease| (owner, lease.lease)).collect()).await;
    if let Some(paid) = paid.get_mut(index) {
        *paid = None;
    }
}

/// Finds a place for every stage whose holder is not there or is not paid.
async fn rearrange(
    ground: &Ground,
    order: &mut Order,
    paid: &mut Vec<Paid>,
    avoided: &BTreeSet<NodeId>,
    cancel: &Cancel,
) -> Result<(), String> {
    let view = ground.membership.view();
    let mut lost = BTreeSet::new();
    for index in 0..order.plan.stages.len() {
        if !view.is_present(order.plan.stages[index].node)
            && let Some(leases) = paid.get(index).and_then(Clone::clone)
        {
            lose(ground, order, paid, index, &leases).await;
        }
        if paid.get(index).is_none_or(Option::is_none) {
            lost.insert(index);
        }
    }
    if !lost.is_empty() {
        let leaving = ground.leaving();
        let without: BTreeSet<NodeId> = order.goal.excluded.iter().chain(avoided).chain(&leaving).copied().collect();
        let goal = |order: &Order| Goal { excluded: without.clone(), ..order.goal.clone() };
        let repaired = {
            let (cards, links, goal) = (ground.cards(&order.model), (ground.links)(), goal(order));
            repair(&PlanRequest { cards: &cards, links: &links, model: &order.card, goal: &goal }, &order.plan, &lost)
        };
        if let Some(repaired) = repaired {
            *paid = repaired.kept.iter().map(|kept| kept.and_then(|old| paid.get(old).and_then(Clone::clone))).collect();
            order.plan = repaired.plan;
        } else {
            // Not beside what stands; so from scratch, with all the memory there is.
            let leases: Vec<Vec<LeaseUse>> = paid.drain(..).map(Option::unwrap_or_default).collect();
            take_down(ground, order, &leases).await;
            // What was given back is on its owners' cards when they have gossiped.
            let pinned = BTreeSet::new();
            let goal = Goal { pinned, nodes_min: 1, ..goal(order) };
            let plan = cancel.unless(scratch(ground, order, &goal)).await.unwrap_or_else(|| Err("it was unloaded".to_owned()))?;
            *paid = plan.stages.iter().map(|_| None).collect();
            order.plan = plan;
        }
    }
    order.members = ground.members(order.plan.nodes());
    Ok(())
}

/// How often a plan from scratch is tried, while cards tell of what was given back.
const SCRATCH_TRIES: u32 = 6;
/// How long that takes to go round.
const SCRATCH_PAUSE: Duration = Duration::from_millis(500);

async fn scratch(ground: &Ground, order: &Order, goal: &Goal) -> Result<Plan, String> {
    let mut reason = String::new();
    for _ in 0..SCRATCH_TRIES {
        let (cards, links) = (ground.cards(&order.model), (ground.links)());
        match plan(&PlanRequest { cards: &cards, links: &links, model: &order.card, goal }) {
            Ok(plans) => return plans.into_iter().next().ok_or_else(|| "no plan was found".to_owned()),
            Err(error) => reason = error.to_string(),
        }
        ground.env.clock.sleep_until(ground.env.clock.now() + SCRATCH_PAUSE).await;
    }
    Err(reason)
}
