//! What is known of a placed model outside its conductor: the summary that travels in node cards.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::ids::{InstanceId, NodeId, Term};

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
    /// It is being taken down; the text says why.
    Stopping(String),
    /// It is gone, and its memory is given back; the text says why.
    Failed(String),
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
}
