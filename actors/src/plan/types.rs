//! What is asked of the planner and what it answers.

use std::collections::BTreeSet;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::links::LinkMatrix;
use crate::card::{ModelCard, NodeCard};
use crate::ids::NodeId;
use crate::lease::Purpose;

/// Which plans come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Prefer {
    /// Those that answer soonest: a prompt of [`PROMPT_TOKENS`](super::PROMPT_TOKENS) and an answer of
    /// [`ANSWER_TOKENS`](super::ANSWER_TOKENS) tokens for every sequence.
    #[default]
    Speed,
    /// Those with the fewest nodes; among them those that answer soonest.
    FewestNodes,
}

/// What a placement is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Goal {
    /// Longest sequence, in tokens: prompt and answer together.
    pub context_tokens: u32,
    /// Sequences at the same time, each with the whole context.
    pub sequences: u32,
    /// Most rows of one step: the chunk in which prompts are read.
    pub rows_max: u32,
    /// Fewest nodes.
    pub nodes_min: u32,
    /// Most nodes.
    pub nodes_max: u32,
    /// Nodes that must take part.
    pub pinned: BTreeSet<NodeId>,
    /// Nodes that must not.
    pub excluded: BTreeSet<NodeId>,
    /// The model's file by SHA-256, as node cards name it. Nodes that have it are preferred where all else is equal.
    pub sha256: Option<String>,
    /// Whether only nodes that have the file may take part.
    pub only_on_disk: bool,
    /// Which plans come first.
    pub prefer: Prefer,
}

impl Default for Goal {
    fn default() -> Self {
        Self {
            context_tokens: 2048,
            sequences: 1,
            rows_max: 128,
            nodes_min: 1,
            nodes_max: super::NODES_MAX,
            pinned: BTreeSet::new(),
            excluded: BTreeSet::new(),
            sha256: None,
            only_on_disk: false,
            prefer: Prefer::Speed,
        }
    }
}

/// What the planner looks at.
#[derive(Debug, Clone, Copy)]
pub struct PlanRequest<'a> {
    /// The nodes, with what they have free at the moment.
    pub cards: &'a [NodeCard],
    /// The links between them.
    pub links: &'a LinkMatrix,
    /// The model.
    pub model: &'a ModelCard,
    /// What it is placed for.
    pub goal: &'a Goal,
}

/// How the nodes of a plan share the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Arrangement {
    /// One node does everything.
    SingleNode,
    /// Each node has some of the layers, one after the other.
    Pipeline,
}

/// Which part of each matrix of its layers a stage holds. One of one today: all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// Which part, from zero.
    pub index: u32,
    /// Of how many.
    pub of: u32,
}

/// Memory of a stage by purpose, in bytes, headroom included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StageMemory {
    /// Layers, and embedding and head where the stage has them.
    pub weights: u64,
    /// Keys and values of every sequence at full length.
    pub kv: u64,
    /// Buffers of a step, and headroom.
    pub activations: u64,
}

impl StageMemory {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.activations)
    }

    /// What to lease, by purpose, leaving out what is zero.
    pub fn by_purpose(&self) -> impl Iterator<Item = (Purpose, u64)> {
        [(Purpose::Weights, self.weights), (Purpose::Kv, self.kv), (Purpose::Activations, self.activations)]
            .into_iter()
            .filter(|(_, bytes)| *bytes > 0)
    }
}

/// One stage of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StagePlan {
    /// On which node.
    pub node: NodeId,
    /// The node's name, for people.
    pub name: String,
    /// Its layers. The first stage embeds, the last one has the output head.
    pub layers: Range<u32>,
    /// Its part of those layers.
    pub shard: Shard,
    /// What it leases.
    pub memory: StageMemory,
    /// Whether the node has the model's file. Always `true` if the goal does not name the file.
    pub on_disk: bool,
}

/// What a plan is expected to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// Tokens of a prompt of [`PROMPT_TOKENS`](super::PROMPT_TOKENS) read in a second.
    pub prefill_tok_s: f64,
    /// Tokens a second of one sequence that has the cluster for itself.
    pub decode_tok_s: f64,
    /// Tokens a second of all sequences of the goal together.
    pub decode_total_tok_s: f64,
    /// From the submission of a prompt of [`PROMPT_TOKENS`](super::PROMPT_TOKENS) to its first token, in seconds.
    pub first_token_seconds: f64,
    /// What most of a token's time goes into, in words.
    pub bottleneck: String,
}

/// A way to place the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// How the nodes share the work.
    pub arrangement: Arrangement,
    /// The stages, in the order in which a token passes them. Their layers cover the model without gaps.
    pub stages: Vec<StagePlan>,
    /// What it is expected to do.
    pub predicted: Prediction,
    /// Longest sequence it is made for, in tokens.
    pub context_tokens: u32,
    /// Sequences it is made for.
    pub sequences: u32,
    /// Most rows of a step it is made for.
    pub rows_max: u32,
}

impl Plan {
    /// Its nodes, in the order of the stages.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.stages.iter().map(|stage| stage.node)
    }

    /// Memory on all nodes together, in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.stages.iter().fold(0, |sum, stage| sum.saturating_add(stage.memory.total()))
    }
}
