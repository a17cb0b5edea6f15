//! What a planner needs to know of a model, without its weights.

use serde::{Deserialize, Serialize};

/// Sizes of a model, read from its file's header. Small enough to send to every node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelCard {
    /// The architecture's name as the file gives it, e.g. `llama`.
    pub architecture: String,
    /// The model's own name, e.g. `SmolLM2 135M Instruct`.
    pub name: String,
    /// The commonest quantisation of its matrices, e.g. `Q4_1`.
    pub quantisation: String,
    /// Weights, as a count.
    pub parameters: u64,
    /// Decoder layers.
    pub layers: u32,
    /// Width of an activation row, in elements.
    pub hidden: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Width of the feed-forward part, in elements; of a mixture of experts, of all experts together that a row goes through.
    pub feed_forward: u32,
    /// Entries of the vocabulary.
    pub vocabulary: u32,
    /// Longest context the model was trained for, in tokens.
    pub context_tokens: u32,
    /// Memory of the token embedding as loaded by the first stage, in bytes.
    pub embedding_bytes: u64,
    /// Memory of the final norm and output head as loaded by the last stage, in bytes. Where head and embedding are
    /// one tensor it counts here too, unless one stage holds both.
    pub head_bytes: u64,
    /// Whether the output head is the embedding tensor, so that a stage with both loads it once.
    pub tied_head: bool,
    /// Memory of each layer as loaded, in bytes; `layers` entries.
    pub layer_bytes: Vec<u64>,
    /// Keys and values of one token in one layer, in bytes, as the engine stores them.
    pub kv_bytes_per_token: u64,
    /// Size of the file in bytes.
    pub file_bytes: u64,
}
