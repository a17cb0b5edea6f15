//! What is known of a placed model outside its conductor: the summary that travels in node cards.

use std::collections::BTreeSet;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::actor::Running;
use super::assemble::Order;
use crate::ids::{InstanceId, NodeId, Term};
use crate::plan::{Goal, Plan, StagePlan};

/// How far an instance is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum InstanceState {
    /// Memory is being leased.
    Leasing,
    /// Stage holders load their layers.
    Loading,
    /// It answers requests.
    Ready,
    /// Its pipeline broke, the text says why, and is being made whole. Answers wait, and so do new requests.
    Recovering(String),
    /// It is being taken down; the text says why.
    Stopping(String),
    /// It is gone, and its memory is given back; the text says why.
    Failed(String),
    /// Nothing of it stands, because it fits nowhere; the text says what is missing. It is placed, as a new instance, as soon as there
    /// is room.
    Waiting(String),
}

impl InstanceState {
    /// Whether nothing of it stands, or soon will.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Stopping(_) | Self::Failed(_) | Self::Waiting(_))
    }
}

/// A stage of an instance, for people and for status tables.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageSummary {
    /// Who holds it.
    pub node: NodeId,
    /// Its layers.
    pub layers: Range<u32>,
    /// Memory leased for it, in bytes.
    pub lease_bytes: u64,
}

/// An instance as its conductor announces it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InstanceSummary {
    /// Its name.
    pub instance: InstanceId,
    /// The model's name.
    pub model: String,
    /// SHA-256 of the model's file.
    pub sha256: String,
    /// Who conducts it, and since which claim.
    pub term: Term,
    /// How far it is.
    pub state: InstanceState,
    /// Longest sequence, in tokens.
    pub context_tokens: u32,
    /// Its stages in pipeline order.
    pub stages: Vec<StageSummary>,
    /// Predicted speed of decoding one stream, in tokens a second.
    pub decode_tok_s: f64,
    /// Predicted speed of prefill, in tokens a second.
    pub prefill_tok_s: f64,
    /// Whether it was made whole without some of its holders, who may be going on with the model as well.
    pub forked: bool,
}

impl InstanceSummary {
    /// Of what was ordered.
    pub fn of(order: &Order, state: InstanceState) -> Self {
        let mut summary = Self {
            instance: order.instance,
            model: order.model.name.clone(),
            sha256: order.model.sha256.clone(),
            term: order.term,
            state,
            context_tokens: order.plan.context_tokens,
            stages: Vec::new(),
            decode_tok_s: 0.0,
            prefill_tok_s: 0.0,
            forked: false,
        };
        summary.lies(&order.plan);
        summary
    }

    /// Its layers are on these nodes.
    fn lies(&mut self, plan: &Plan) {
        let stage = |s: &StagePlan| StageSummary { node: s.node, layers: s.layers.clone(), lease_bytes: s.memory.total() };
        self.stages = plan.stages.iter().map(stage).collect();
        self.decode_tok_s = plan.predicted.decode_tok_s;
        self.prefill_tok_s = plan.predicted.prefill_tok_s;
    }

    /// It answers, as `running` says.
    pub fn runs(&mut self, running: &Running) {
        self.lies(&running.plan);
        self.forked = running.forked;
    }

    /// Whether it is what a placing for `goal` would make, as far as the goal says how: nodes, their number, and a context at least as
    /// long. How many sequences it was made for, and in which chunks it reads prompts, is no reason to place a model twice.
    pub fn meets(&self, goal: &Goal) -> bool {
        let nodes: BTreeSet<NodeId> = self.stages.iter().map(|stage| stage.node).collect();
        (goal.nodes_min as usize..=goal.nodes_max as usize).contains(&nodes.len())
            && goal.pinned.is_subset(&nodes)
            && goal.excluded.is_disjoint(&nodes)
            && self.context_tokens >= goal.context_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance(nodes: &[u8]) -> InstanceSummary {
        let stage = |(at, node): (usize, &u8)| StageSummary { node: NodeId([*node; 32]), layers: at as u32..at as u32 + 1, lease_bytes: 1 };
        InstanceSummary {
            instance: InstanceId(1),
            model: "tiny".to_owned(),
            sha256: "ab".to_owned(),
            term: Term { counter: 1, node: NodeId([1; 32]) },
            state: InstanceState::Ready,
            context_tokens: 2048,
            stages: nodes.iter().enumerate().map(stage).collect(),
            decode_tok_s: 1.0,
            prefill_tok_s: 1.0,
            forked: false,
        }
    }

    #[test]
    fn a_goal_names_nodes_their_number_and_a_context() {
        let two = instance(&[1, 2]);
        let goal = Goal::default();
        assert!(two.meets(&goal));
        assert!(!two.meets(&Goal { nodes_min: 3, ..goal.clone() }));
        assert!(!two.meets(&Goal { nodes_max: 1, ..goal.clone() }));
        assert!(two.meets(&Goal { nodes_min: 2, nodes_max: 2, ..goal.clone() }));
        assert!(two.meets(&Goal { pinned: BTreeSet::from([NodeId([2; 32])]), ..goal.clone() }));
        assert!(!two.meets(&Goal { pinned: BTreeSet::from([NodeId([3; 32])]), ..goal.clone() }));
        assert!(!two.meets(&Goal { excluded: BTreeSet::from([NodeId([2; 32])]), ..goal.clone() }));
        assert!(two.meets(&Goal { context_tokens: 2048, sequences: 9, ..goal.clone() }));
        assert!(!two.meets(&Goal { context_tokens: 4096, ..goal }));
    }
}
