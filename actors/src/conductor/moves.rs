//! Where the layers of a running pipeline could go instead, and getting that ready beside it.
//!
//! Stages that stay keep their weights. The others are leased and loaded on their new nodes while the old pipeline runs on, in an
//! arrangement of their own that nothing is sent through. After that the pipeline is made whole with all of them, as if it had broken
//! ([`super::recover`]): that takes no longer than linking it.

use std::collections::{BTreeMap, BTreeSet};

use super::assemble::{Cancel, Failure, Ground, Order, Paid, lease, load};
use crate::card::{DeviceKind, NodeCard};
use crate::ids::{NodeId, PlanEpoch};
use crate::lease::LeaseUse;
use crate::plan::{Goal, LinkMatrix, Plan, PlanRequest, Repair, plan, repair};

/// What can be done about stages that are to go elsewhere.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Room {
    /// There is room for them beside what runs.
    Beside(Repair),
    /// There is room once what runs is given back.
    Instead,
    /// There is none; the text says what is missing.
    None(String),
}

/// The goal of a plan that is to take the place of the one that runs.
fn goal(order: &Order, without: &BTreeSet<NodeId>) -> Goal {
    Goal {
        context_tokens: order.plan.context_tokens,
        sequences: order.plan.sequences,
        rows_max: order.plan.rows_max,
        nodes_min: 1,
        pinned: BTreeSet::new(),
        excluded: order.goal.excluded.union(without).copied().collect(),
        ..order.goal.clone()
    }
}

/// The cards with what the pipeline itself has counted as free.
fn given_back(cards: &[NodeCard], plan: &Plan) -> Vec<NodeCard> {
    let mut cards = cards.to_vec();
    for stage in &plan.stages {
        let own = cards.iter_mut().filter(|card| card.node == stage.node);
        own.for_each(|card| card.memory_free_bytes = card.memory_free_bytes.saturating_add(stage.memory.total()));
    }
    cards
}

/// Finds places for the stages `moved`, none of them on a node of `without`.
pub(super) fn room(ground: &Ground, order: &Order, moved: &BTreeSet<usize>, without: &BTreeSet<NodeId>) -> Room {
    let (cards, links, goal) = (ground.cards(&order.model), (ground.links)(), goal(order, without));
    let request = |cards| PlanRequest { cards, links: &links, model: &order.card, goal: &goal };
    if cards.iter().all(|card| without.contains(&card.node)) {
        return Room::None("no other node is there to take it".to_owned());
    }
    let beside = if moved.len() == order.plan.stages.len() {
        let best = plan(&request(&cards)).ok().and_then(|plans| plans.into_iter().next());
        best.map(|plan| Repair { kept: vec![None; plan.stages.len()], plan })
    } else {
        repair(&request(&cards), &order.plan, moved)
    };
    if let Some(repair) = beside {
        return Room::Beside(repair);
    }
    let cards = given_back(&cards, &order.plan);
    match plan(&request(&cards)) {
        Ok(_) => Room::Instead,
        Err(error) => Room::None(error.to_string()),
    }
}

/// How many times as fast as the plan that runs another one has to be, in decoding, to be worth going over to.
const WORTH: f64 = 1.25;

/// What planning depends on: memory, speed and disk of those who stay.
pub(super) type Standing = Vec<(NodeId, u64, u64, bool)>;

/// What another plan would be made from now.
pub(super) fn standing(ground: &Ground, order: &Order) -> Standing {
    let speed = |card: &NodeCard| card.devices.first().map_or(0, |device| device.read_bytes_per_second.to_bits());
    let cards = ground.cards(&order.model);
    let stands = |card: &NodeCard| (card.node, card.memory_free_bytes, speed(card), card.has_model(&order.model.sha256));
    cards.iter().filter(|card| !card.leaving).map(stands).collect()
}

/// A plan that is worth going over to from the one that runs, beside which there is room for its new stages, if there is one. It is on
/// the same kinds of processors, because only those give the same tokens.
pub(super) fn better(ground: &Ground, order: &Order) -> Option<Repair> {
    let (all, links) = (ground.cards(&order.model), (ground.links)());
    let kind = |card: &NodeCard| card.devices.first().map(|device| device.kind);
    let kinds: Vec<Option<DeviceKind>> =
        order.plan.nodes().filter_map(|node| all.iter().find(|card| card.node == node)).map(kind).collect();
    let cards: Vec<NodeCard> = all.into_iter().filter(|card| !card.leaving && kinds.contains(&kind(card))).collect();
    let goal = Goal { nodes_min: order.goal.nodes_min, pinned: order.goal.pinned.clone(), ..goal(order, &BTreeSet::new()) };
    better_among(&cards, &links, order, &goal)
}

fn better_among(cards: &[NodeCard], links: &LinkMatrix, order: &Order, goal: &Goal) -> Option<Repair> {
    let request = |cards| PlanRequest { cards, links, model: &order.card, goal };
    // As it is predicted from what is known now, which may be another number than when it was made.
    let now = repair(&request(cards), &order.plan, &BTreeSet::new())?.plan.predicted.decode_tok_s;
    let plans = plan(&request(&given_back(cards, &order.plan))).ok()?;
    plans.into_iter().filter(|plan| plan.predicted.decode_tok_s >= now * WORTH).find_map(|plan| {
        let kept = same_stages(&order.plan, &plan);
        let mut free: BTreeMap<NodeId, u64> = cards.iter().map(|card| (card.node, card.memory_free_bytes)).collect();
        let mut new = plan.stages.iter().zip(&kept).filter(|(_, kept)| kept.is_none());
        let fits = new.all(|(stage, _)| {
            let left = free.get(&stage.node).and_then(|free| free.checked_sub(stage.memory.total()));
            left.is_some_and(|left| free.insert(stage.node, left).is_some())
        });
        fits.then_some(Repair { plan, kept })
    })
}

/// An arrangement that stands ready, and is not linked.
#[derive(Clone)]
pub(super) struct Prepared {
    pub(super) order: Order,
    /// The leases that its stages stand on, stage by stage.
    pub(super) leases: Vec<Vec<LeaseUse>>,
    /// Which stage of the arrangement that runs each one is.
    pub(super) kept: Vec<Option<usize>>,
}

impl Prepared {
    /// Its stages that are in no arrangement that runs.
    pub(super) fn new_stages(&self) -> Vec<(usize, Vec<LeaseUse>)> {
        let new = self.kept.iter().zip(&self.leases).enumerate().filter(|(_, (kept, _))| kept.is_none());
        new.map(|(index, (_, leases))| (index, leases.clone())).collect()
    }
}

/// Gets an arrangement ready, as number `epoch`, beside the one in `order`, whose stages stand on `leases`. If it cannot be done, or
/// is not wanted any more, everything is as before.
///
/// # Errors
/// Words for people.
pub(super) async fn prepare(
    ground: &Ground,
    order: &Order,
    leases: &[Vec<LeaseUse>],
    (to, epoch): (Repair, PlanEpoch),
    cancel: &Cancel,
) -> Result<Prepared, String> {
    let Repair { plan, kept } = to;
    let members = ground.members(plan.nodes());
    let order = Order { epoch, plan, members, ..order.clone() };
    let paid: Vec<Paid> = kept.iter().map(|kept| kept.and_then(|old| leases.get(old).cloned())).collect();
    let over = || Failure::from("it is not wanted any more".to_owned());
    let leased = cancel.unless(lease(ground, &order, &paid)).await.unwrap_or_else(|| Err(over())).map_err(|failure| failure.reason)?;
    let new = |index: usize| paid.get(index).is_none_or(Option::is_none);
    match cancel.unless(load(ground, &order, &leased.leases, new)).await.unwrap_or_else(|| Err(over())) {
        Ok(_) => Ok(Prepared { order, leases: leased.leases, kept }),
        Err(failure) => {
            leased.undo(ground, &order, &paid).await;
            Err(failure.reason)
        }
    }
}

/// Which stages of `now` are in `then` as they are: for each stage of `then` its number in `now`.
pub(super) fn same_stages(now: &Plan, then: &Plan) -> Vec<Option<usize>> {
    let mut places: BTreeMap<(NodeId, u32, u32), usize> = BTreeMap::new();
    for (index, stage) in now.stages.iter().enumerate() {
        places.insert((stage.node, stage.layers.start, stage.layers.end), index);
    }
    let same = |index: &usize, memory| now.stages.get(*index).is_some_and(|stage| stage.memory == memory);
    let mut place = |stage: &crate::plan::StagePlan| places.remove(&(stage.node, stage.layers.start, stage.layers.end));
    then.stages.iter().map(|stage| place(stage).filter(|index| same(index, stage.memory))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::LocalModel;
    use crate::ids::{InstanceId, Term};
    use crate::plan::tests::{card, id, smollm2};

    const GB: u64 = 1_000_000_000;

    /// The best order on these cards, whose memory for it is taken then.
    fn placed(cards: &mut [NodeCard], goal: &Goal) -> Order {
        let model = smollm2();
        let plan = plan(&PlanRequest { cards, links: &LinkMatrix::new(), model: &model, goal }).expect("fits").remove(0);
        for stage in &plan.stages {
            let own = cards.iter_mut().filter(|card| card.node == stage.node);
            own.for_each(|card| card.memory_free_bytes -= stage.memory.total());
        }
        let local = LocalModel {
            name: model.name.clone(),
            path: "model".into(),
            sha256: "aa".to_owned(),
            bytes: 1,
            source: String::new(),
            licence: None,
            fetched_unix_seconds: None,
        };
        let term = Term { counter: 1, node: id(1) };
        Order {
            instance: InstanceId(1),
            term,
            epoch: PlanEpoch(0),
            model: local,
            card: model,
            goal: goal.clone(),
            plan,
            members: Vec::new(),
        }
    }

    fn moved(cards: &[NodeCard], order: &Order) -> Option<Repair> {
        better_among(cards, &LinkMatrix::new(), order, &order.goal)
    }

    #[test]
    fn a_plan_is_worth_a_move_from_a_quarter_on_and_if_there_is_room_beside_it() {
        let with = |speed: f64, free: u64| {
            let mut cards = vec![card(1, 1, GB, 10e9, 100e9)];
            let order = placed(&mut cards, &Goal::default());
            cards.push(card(2, 2, free, speed * 10e9, speed * 100e9));
            moved(&cards, &order)
        };
        let repair = with(2.0, GB).expect("twice as fast");
        assert_eq!((repair.plan.nodes().collect::<Vec<_>>(), repair.kept), (vec![id(2)], vec![None]));
        assert_eq!(with(1.1, GB), None);
        assert_eq!(with(2.0, 1_000_000), None);
    }

    #[test]
    fn the_same_plan_is_never_better_than_itself() {
        let mut cards: Vec<NodeCard> = (1..=3).map(|n| card(n, n as u128, GB, 10e9, 100e9)).collect();
        let order = placed(&mut cards, &Goal { nodes_min: 3, ..Goal::default() });
        assert_eq!(moved(&cards, &order), None);
        assert_eq!(same_stages(&order.plan, &order.plan), [Some(0), Some(1), Some(2)]);
    }

    #[test]
    fn a_stage_that_stays_as_it_is_is_kept() {
        let mut cards: Vec<NodeCard> = (1..=2).map(|n| card(n, n as u128, GB, 10e9, 100e9)).collect();
        let order = placed(&mut cards, &Goal { nodes_min: 2, ..Goal::default() });
        let mut then = order.plan.clone();
        then.stages[1].node = id(3);
        assert_eq!(same_stages(&order.plan, &then), [Some(0), None]);
        then.stages[0].layers.end -= 1;
        assert_eq!(same_stages(&order.plan, &then), [None, None]);
    }
}
