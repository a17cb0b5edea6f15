//! Why there is no plan, and what would help.

use crate::ids::NodeId;
use crate::lease::size;

/// Why a model cannot be placed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// There is nobody to place it on.
    #[error("no node may take part: {reason}")]
    NoNodes {
        /// What kept them out.
        reason: String,
    },
    /// All nodes together have too little memory.
    #[error("{}", not_enough(.0))]
    NotEnoughMemory(Shortage),
    /// There is enough memory in all, but not where it is needed.
    #[error("{}", no_split(.0))]
    NoSplit(Shortage),
    /// Fewer nodes than the goal asks for.
    #[error("{asked} nodes are asked for and {there} can take part{}", more_nodes(*asked, *there, *lacking))]
    TooFewNodes {
        /// What the goal asks for.
        asked: u32,
        /// How many can take part.
        there: u32,
        /// How many more are there and allowed, but lack the model's file.
        lacking: u32,
    },
    /// A node that must take part is not there.
    #[error("node {node:?} is asked for, but {reason}")]
    PinnedMissing {
        /// Which.
        node: NodeId,
        /// Why it cannot.
        reason: String,
    },
    /// The goal contradicts itself or the model; the text says how.
    #[error("this placement cannot be asked for: {0}")]
    BadGoal(String),
    /// The model's card contradicts itself; the text says how.
    #[error("the description of model `{name}` is not valid: {reason}")]
    BadModel {
        /// Which.
        name: String,
        /// What is wrong.
        reason: String,
    },
}

/// What a placement lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shortage {
    /// The model's name.
    pub model: String,
    /// Bytes for its weights.
    pub weights: u64,
    /// Bytes for keys and values.
    pub kv: u64,
    /// Bytes for the buffers and the headroom of one stage.
    pub activations: u64,
    /// Longest sequence that was asked for, in tokens.
    pub context_tokens: u32,
    /// How many sequences.
    pub sequences: u32,
    /// Nodes that may take part.
    pub nodes: u32,
    /// Bytes that they have free together.
    pub free: u64,
    /// Bytes that the one with the most has free.
    pub largest: u64,
    /// Bytes of the largest part that cannot be divided: one layer with its keys, values and buffers.
    pub piece: u64,
    /// A shorter context that would fit, in tokens.
    pub context_that_fits: Option<u32>,
}

fn more_nodes(asked: u32, there: u32, lacking: u32) -> String {
    let too_few = if there.saturating_add(lacking) < asked { ", start more nodes" } else { "" };
    match lacking {
        0 => "; start more nodes or ask for fewer".to_owned(),
        1 => format!("; 1 more is there but does not have the model on disk: pull the model there{too_few} or ask for fewer"),
        _ => format!("; {lacking} more are there but do not have the model on disk: pull the model there{too_few} or ask for fewer"),
    }
}

fn needs(s: &Shortage) -> String {
    let sequences = if s.sequences > 1 { format!("{} × ", s.sequences) } else { String::new() };
    format!(
        "{} needs {} for weights, {} for {sequences}{} tokens and {} for buffers",
        s.model,
        size(s.weights),
        size(s.kv),
        s.context_tokens,
        size(s.activations)
    )
}

fn advice(s: &Shortage) -> String {
    match s.context_that_fits {
        Some(context) => format!("start another node, raise --memory or ask for at most {context} tokens"),
        None => "start another node, raise --memory or take a smaller model".to_owned(),
    }
}

fn nodes(s: &Shortage) -> String {
    if s.nodes == 1 { "the only node has".to_owned() } else { format!("the {} nodes together have", s.nodes) }
}

fn not_enough(s: &Shortage) -> String {
    format!("{}; {} {} free: {}", needs(s), nodes(s), size(s.free), advice(s))
}

fn no_split(s: &Shortage) -> String {
    format!(
        "{}; {} {} free, but no way to split the layers fits (one layer with its buffers takes {}, the largest node has {}): {}",
        needs(s),
        nodes(s),
        size(s.free),
        size(s.piece),
        size(s.largest),
        advice(s)
    )
}
