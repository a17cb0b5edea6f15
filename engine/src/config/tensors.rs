//! Names of a decoder's tensors.

use crate::gguf::Gguf;

/// Tensors outside of the layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelTensors {
    /// `[hidden, vocabulary]`: a row for each token.
    pub embedding: String,
    /// `[hidden]`: weight of the last norm.
    pub output_norm: String,
    /// `[hidden, vocabulary]`: a row for each logit. The embedding's name where the two are one.
    pub head: String,
}

impl ModelTensors {
    /// The usual names; a file without a head of its own uses the embedding.
    pub(super) fn usual(gguf: &Gguf) -> ModelTensors {
        let embedding = "token_embd.weight";
        let head = if gguf.tensor("output.weight").is_some() { "output.weight" } else { embedding };
        ModelTensors { embedding: embedding.to_owned(), output_norm: "output_norm.weight".to_owned(), head: head.to_owned() }
    }
}

/// Tensors of one layer. Shapes are in ggml's order, row length first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerTensors {
    /// `[hidden]`: norm before attention.
    pub attention_norm: String,
    /// `[hidden, heads · key_length]`.
    pub query: String,
    /// `[hidden, kv_heads · key_length]`.
    pub key: String,
    /// `[hidden, kv_heads · value_length]`.
    pub value: String,
    /// `[heads · value_length, hidden]`.
    pub attention_output: String,
    /// `[heads · key_length]`: added to queries.
    pub query_bias: Option<String>,
    /// `[kv_heads · key_length]`: added to keys.
    pub key_bias: Option<String>,
    /// `[kv_heads · value_length]`: added to values.
    pub value_bias: Option<String>,
    /// `[hidden]`: added to what attention puts out.
    pub attention_output_bias: Option<String>,
    /// `[key_length]`: norm of each query head, before the rotary embedding.
    pub query_norm: Option<String>,
    /// `[key_length]`: norm of each key head, before the rotary embedding.
    pub key_norm: Option<String>,
    /// `[hidden]`: norm of what attention puts out, before it is added to the row.
    pub post_attention_norm: Option<String>,
    /// `[hidden]`: norm before the feed-forward part.
    pub feed_forward_norm: String,
    /// `[hidden, feed_forward]`.
    pub gate: String,
    /// `[hidden, feed_forward]`.
    pub up: String,
    /// `[feed_forward, hidden]`.
    pub down: String,
    /// `[hidden]`: norm of what the feed-forward part puts out, before it is added to the row.
    pub post_feed_forward_norm: Option<String>,
}

impl LayerTensors {
    /// The names that every architecture uses, without anything optional.
    pub(super) fn usual(layer: usize) -> LayerTensors {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        LayerTensors {
            attention_norm: name("attn_norm"),
            query: name("attn_q"),
            key: name("attn_k"),
            value: name("attn_v"),
            attention_output: name("attn_output"),
            query_bias: None,
            key_bias: None,
            value_bias: None,
            attention_output_bias: None,
            query_norm: None,
            key_norm: None,
            post_attention_norm: None,
            feed_forward_norm: name("ffn_norm"),
            gate: name("ffn_gate"),
            up: name("ffn_up"),
            down: name("ffn_down"),
            post_feed_forward_norm: None,
        }
    }

    /// All that there are.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        let always = [
            &self.attention_norm,
            &self.query,
            &self.key,
            &self.value,
            &self.attention_output,
            &self.feed_forward_norm,
            &self.gate,
            &self.up,
            &self.down,
        ];
        let perhaps = [
            &self.query_bias,
            &self.key_bias,
            &self.value_bias,
            &self.attention_output_bias,
            &self.query_norm,
            &self.key_norm,
            &self.post_attention_norm,
            &self.post_feed_forward_norm,
        ];
        always.into_iter().chain(perhaps.into_iter().flatten()).map(String::as_str)
    }
}
