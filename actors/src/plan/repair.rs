//! New places for the layers that a broken plan has lost, beside the stages that stand.
//!
//! Stages that stand keep their nodes and layers, so that nothing which is in memory is loaded again. Lost stages that
//! follow each other are taken together and given to as few nodes as hold them; of those choices the fastest is taken.
//! A node that holds a stage already may take another one beside it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::arrange::Candidate;
use super::cost::{Picos, Work};
use super::predict;
use super::types::{Arrangement, Goal, Plan, PlanRequest, Shard, StagePlan};
use super::{candidates, check_goal, check_model};
use crate::ids::NodeId;

/// Nodes that are tried for lost layers, those with most memory first.
const TRIED_MAX: usize = 8;

/// Most nodes for one run of lost layers.
const PIECES_MAX: usize = 4;

/// A plan that was put together again.
#[derive(Debug, Clone, PartialEq)]
pub struct Repair {
    /// The whole plan.
    pub plan: Plan,
    /// For each of its stages, which stage of the broken plan it is; `None` for one that is to be loaded.
    pub kept: Vec<Option<usize>>,
}

/// The broken plan with new nodes for the layers of its `lost` stages; `None` if the memory that the nodes have free does
/// not hold them beside what stands. The request's goal says which nodes may be given layers, and is otherwise what the
/// broken plan was made for.
pub fn repair(request: &PlanRequest<'_>, broken: &Plan, lost: &BTreeSet<usize>) -> Option<Repair> {
    let goal = Goal {
        context_tokens: broken.context_tokens,
        sequences: broken.sequences,
        rows_max: broken.rows_max,
        nodes_min: 1,
        pinned: BTreeSet::new(),
        ..request.goal.clone()
    };
    check_model(request.model).ok()?;
    check_goal(&goal, request.model).ok()?;
    // Who holds a stage may be a node that is to be given no more.
    let anybody = Goal { excluded: BTreeSet::new(), only_on_disk: false, ..goal.clone() };
    let nodes: BTreeMap<NodeId, Candidate> =
        candidates(&PlanRequest { goal: &anybody, ..*request }).ok()?.into_iter().map(|node| (node.node, node)).collect();
    let takers: Vec<NodeId> = match candidates(&PlanRequest { goal: &goal, ..*request }) {
        Ok(takers) => takers.into_iter().map(|node| node.node).collect(),
        Err(_) => Vec::new(),
    };
    let work = Work::new(request.model, &goal);
    let mut room = Room { work: &work, nodes: &nodes, takers, free: nodes.iter().map(|(id, node)| (*id, node.free)).collect() };
    let mut stages: Vec<StagePlan> = Vec::new();
    let mut kept = Vec::new();
    let mut at = 0;
    while let Some(stage) = broken.stages.get(at) {
        if !lost.contains(&at) {
            nodes.get(&stage.node)?;
            stages.push(stage.clone());
            kept.push(Some(at));
            at += 1;
            continue;
        }
        let end = (at..broken.stages.len()).find(|next| !lost.contains(next)).unwrap_or(broken.stages.len());
        let run = stage.layers.start as usize..broken.stages[end - 1].layers.end as usize;
        for piece in room.place(run)? {
            stages.push(piece);
            kept.push(None);
        }
        at = end;
    }
    let order: Vec<&Candidate> = stages.iter().filter_map(|stage| nodes.get(&stage.node)).collect();
    let ends: Vec<usize> = stages.iter().map(|stage| stage.layers.end as usize).collect();
    let plan = Plan {
        arrangement: if stages.len() == 1 { Arrangement::SingleNode } else { Arrangement::Pipeline },
        predicted: predict::predict(&work, request.links, &order, &ends),
        stages,
        ..broken.clone()
    };
    Some(Repair { plan, kept })
}

/// The memory that is left, while lost layers are given away.
struct Room<'a> {
    work: &'a Work<'a>,
    nodes: &'a BTreeMap<NodeId, Candidate>,
    takers: Vec<NodeId>,
    free: BTreeMap<NodeId, u64>,
}

/// Layers on nodes, and how long a token takes there.
type Pieces = (Picos, Vec<(NodeId, Range<usize>)>);

impl Room<'_> {
    /// Gives a run of layers to as few nodes as can take it.
    fn place(&mut self, run: Range<usize>) -> Option<Vec<StagePlan>> {
        let mut takers = self.takers.clone();
        takers.sort_by_key(|node| (std::cmp::Reverse(self.free(*node)), *node));
        takers.truncate(TRIED_MAX);
        let (_, pieces) = (1..=PIECES_MAX).find_map(|count| self.best(&run, count, &takers, &mut Vec::new()))?;
        let stages = pieces.into_iter().map(|(node, layers)| {
            let bytes = self.work.total(layers.start, layers.end);
            self.free.entry(node).and_modify(|free| *free = free.saturating_sub(bytes));
            let candidate = self.nodes.get(&node)?;
            Some(StagePlan {
                node,
                name: candidate.name.clone(),
                layers: layers.start as u32..layers.end as u32,
                shard: Shard { index: 0, of: 1 },
                memory: self.work.memory(layers.start, layers.end),
                on_disk: candidate.on_disk,
            })
        });
        stages.collect()
    }

    fn free(&self, node: NodeId) -> u64 {
        self.free.get(&node).copied().unwrap_or(0)
    }

    /// The fastest way to give `run` to `count` of the nodes that are not `used` yet, each as many layers as it can take.
    fn best(&self, run: &Range<usize>, count: usize, takers: &[NodeId], used: &mut Vec<NodeId>) -> Option<Pieces> {
        let mut best: Option<Pieces> = None;
        for node in takers {
            if used.contains(node) {
                continue;
            }
            let free = self.free(*node);
            let fits = |to: usize| self.work.total(run.start, to) <= free;
            // The last one has to take all that is left, the others leave a layer for each that comes after.
            let most = if count == 1 { run.end } else { (run.end + 1).saturating_sub(count) };
            let to = if count == 1 { fits(run.end).then_some(run.end) } else { (run.start + 1..=most).rev().find(|to| fits(*to)) };
            let Some(to) = to else { continue };
            let own = self.time(*node, run.start..to);
            let pieces = if count == 1 {
                Some((own, vec![(*node, run.start..to)]))
            } else {
                used.push(*node);
                let rest = self.best(&(to..run.end), count - 1, takers, used);
                used.pop();
                rest.map(|(time, mut rest)| {
                    rest.insert(0, (*node, run.start..to));
                    (own.saturating_add(time), rest)
                })
            };
            if let Some(pieces) = pieces
                && best.as_ref().is_none_or(|known| pieces.0 < known.0)
            {
                best = Some(pieces);
            }
        }
        best
    }

    fn time(&self, node: NodeId, layers: Range<usize>) -> Picos {
        let Some(candidate) = self.nodes.get(&node) else { return Picos::MAX };
        layers.map(|layer| self.work.token_picos(layer, candidate.speed, 1)).fold(self.work.overhead_picos(), Picos::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::{card, id, model, run, smollm2};
    use super::*;
    use crate::card::NodeCard;
    use crate::plan::LinkMatrix;

    const MB: u64 = 1_000_000;

    fn again(cards: &[NodeCard], broken: &Plan, lost: &[usize], goal: &Goal) -> Option<Repair> {
        let request = PlanRequest { cards, links: &LinkMatrix::new(), model: &smollm2(), goal };
        repair(&request, broken, &lost.iter().copied().collect())
    }

    /// Three nodes with equal shares.
    fn broken(cards: &[NodeCard]) -> Plan {
        let plan = run(cards, &smollm2(), &Goal { nodes_min: 3, nodes_max: 3, ..Goal::default() }).expect("fits").remove(0);
        assert_eq!(plan.stages.len(), 3);
        plan
    }

    /// The cards when the plan's leases are taken, without the nodes that are gone.
    fn left(cards: &[NodeCard], plan: &Plan, gone: &[NodeId]) -> Vec<NodeCard> {
        let mut left: Vec<NodeCard> = cards.iter().filter(|card| !gone.contains(&card.node)).cloned().collect();
        for stage in &plan.stages {
            if let Some(card) = left.iter_mut().find(|card| card.node == stage.node) {
                card.memory_free_bytes -= stage.memory.total();
            }
        }
        left
    }

    #[test]
    fn a_spare_node_takes_what_is_lost_and_the_rest_stays() {
        let cards: Vec<NodeCard> = (1..=3).map(|n| card(n, n as u128, 75 * MB, 10e9, 100e9)).collect();
        let plan = broken(&cards);
        let gone = plan.stages[1].node;
        let mut now = left(&cards, &plan, &[gone]);
        // Slow and fast, each with room.
        now.push(card(8, 8, 75 * MB, 1e9, 10e9));
        now.push(card(9, 9, 75 * MB, 20e9, 200e9));
        let repaired = again(&now, &plan, &[1], &Goal::default()).expect("fits");
        assert_eq!(repaired.kept, [Some(0), None, Some(2)]);
        assert_eq!((repaired.plan.stages[1].node, &repaired.plan.stages[1].layers), (id(9), &plan.stages[1].layers));
        assert_eq!((&repaired.plan.stages[0], &repaired.plan.stages[2]), (&plan.stages[0], &plan.stages[2]));
        // One that must not take part does not.
        let goal = Goal { excluded: BTreeSet::from([id(9)]), ..Goal::default() };
        assert_eq!(again(&now, &plan, &[1], &goal).expect("fits").plan.stages[1].node, id(8));
    }

    #[test]
    fn layers_are_shared_out_where_no_node_takes_them_all() {
        let cards: Vec<NodeCard> = (1..=3).map(|n| card(n, n as u128, 200 * MB, 10e9, 100e9)).collect();
        let plan = broken(&cards);
        let mut now = left(&cards, &plan, &[plan.stages[0].node, plan.stages[1].node]);
        now.iter_mut().for_each(|card| card.memory_free_bytes = 0);
        // The first two stages are lost together; two nodes have room for about half of that each.
        let layers = plan.stages[1].layers.end as usize;
        let work_goal = Goal::default();
        let model = smollm2();
        let work = Work::new(&model, &work_goal);
        let half = work.total(0, layers.div_ceil(2) + 1);
        now.push(card(8, 8, half, 10e9, 100e9));
        now.push(card(9, 9, half, 10e9, 100e9));
        let repaired = again(&now, &plan, &[0, 1], &Goal::default()).expect("fits");
        assert_eq!(repaired.kept, [None, None, Some(2)]);
        assert_eq!(repaired.plan.stages[0].layers.start, 0);
        assert_eq!(repaired.plan.stages[0].layers.end, repaired.plan.stages[1].layers.start);
        assert_eq!(repaired.plan.stages[1].layers.end as usize, layers);
        // With one of them alone there is no way.
        now.pop();
        assert_eq!(again(&now, &plan, &[0, 1], &Goal::default()), None);
    }

    #[test]
    fn a_holder_takes_another_stage_beside_its_own() {
        let cards: Vec<NodeCard> = (1..=3).map(|n| card(n, n as u128, 500 * MB, 10e9, 100e9)).collect();
        let plan = broken(&cards);
        let now = left(&cards, &plan, &[plan.stages[0].node, plan.stages[2].node]);
        let repaired = again(&now, &plan, &[0, 2], &Goal::default()).expect("fits");
        assert_eq!(repaired.kept, [None, Some(1), None]);
        assert!(repaired.plan.nodes().all(|node| node == plan.stages[1].node));
        assert!(repaired.plan.predicted.decode_tok_s > 0.0);
    }

    proptest! {
        #[test]
        fn a_repair_covers_every_layer_within_the_memory(
            layers in 3usize..12, free in prop::collection::vec(0u64..80, 3..7), lost in prop::collection::btree_set(0usize..3, 1..4),
        ) {
            let model = model(vec![10 * MB; layers]);
            let cards: Vec<NodeCard> = (1..=3).map(|n| card(n, n as u128, 2000 * MB, 10e9, 100e9)).collect();
            let plan = run(&cards, &model, &Goal { nodes_min: 3, nodes_max: 3, ..Goal::default() }).expect("fits").remove(0);
            let gone: Vec<NodeId> = lost.iter().map(|&at| plan.stages[at].node).collect();
            let mut now = left(&cards, &plan, &gone);
            now.iter_mut().for_each(|card| card.memory_free_bytes = free[0] * MB);
            now.extend(free.iter().enumerate().skip(1).map(|(n, free)| card(10 + n, 10 + n as u128, free * MB, 10e9, 100e9)));
            let goal = Goal::default();
            let request = PlanRequest { cards: &now, links: &LinkMatrix::new(), model: &model, goal: &goal };
            if let Some(Repair { plan: repaired, kept }) = repair(&request, &plan, &lost) {
                prop_assert_eq!(kept.len(), repaired.stages.len());
                let mut next = 0;
                let mut taken: BTreeMap<NodeId, u64> = BTreeMap::new();
                for (stage, kept) in repaired.stages.iter().zip(&kept) {
                    prop_assert_eq!(stage.layers.start, next);
                    next = stage.layers.end;
                    match kept {
                        Some(old) => prop_assert!(!lost.contains(old) && *stage == plan.stages[*old]),
                        None => *taken.entry(stage.node).or_default() += stage.memory.total(),
                    }
                }
                prop_assert_eq!(next as usize, layers);
                for (node, bytes) in taken {
                    let card = now.iter().find(|card| card.node == node).expect("it is there");
                    prop_assert!(bytes <= card.memory_free_bytes);
                }
                prop_assert_eq!(kept.iter().flatten().count(), 3 - lost.len());
            }
        }
    }
}
