//! What a decoder looks like, as data: read from a model file, checked against its tensors.
//!
//! There is one decoder. An architecture is a small file next to this one that maps a file's names and
//! hyperparameters onto [`DecoderConfig`].

mod card;
mod check;
mod error;
mod gemma3;
mod hyper;
mod llama;
mod rope;
mod tensors;

pub use error::ConfigError;
pub use rope::{Rope, RopeLayout};
pub use tensors::{LayerTensors, ModelTensors};

use crate::gguf::Gguf;
use hyper::Hyper;

/// An architecture: its name in files, and how to read it.
type Architecture = (&'static str, fn(&Hyper<'_>) -> Result<DecoderConfig, ConfigError>);

/// All that are known.
const ARCHITECTURES: [Architecture; 2] = [("gemma3", gemma3::read), ("llama", llama::read)];

/// What a feed-forward part applies to its gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// The Gaussian error linear unit in its tanh approximation:
    /// `x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`.
    GeluTanh,
}

/// One decoder.
///
/// A token's row is its embedding times [`embedding_scale`](Self::embedding_scale). Each layer adds to it, first,
/// attention over its RMS-normalised self, then a gated feed-forward part `down(activation(gate(x)) · up(x))` of the
/// same. Which optional tensors a layer has, [`LayerTensors`] says. At the end come a norm and the output head.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    /// The architecture's name.
    pub architecture: String,
    /// Decoder layers.
    pub layers: usize,
    /// Width of a row, in elements.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; each serves `heads / kv_heads` query heads that follow each other.
    pub kv_heads: usize,
    /// Elements of a query or key head.
    pub key_length: usize,
    /// Elements of a value head.
    pub value_length: usize,
    /// Width of the feed-forward part, in elements.
    pub feed_forward: usize,
    /// Entries of the vocabulary: rows of the embedding and of the output head.
    pub vocabulary: usize,
    /// Longest context that the model was trained for, in tokens.
    pub context_tokens: usize,
    /// What RMS norms add to the mean square. Norms' weights multiply as they are in the file.
    pub norm_epsilon: f32,
    /// What an embedding is multiplied with.
    pub embedding_scale: f32,
    /// What products of queries and keys are multiplied with before the softmax.
    pub attention_scale: f32,
    /// What the gate goes through.
    pub activation: Activation,
    /// Rotary embedding of layers that see everything.
    pub rope: Rope,
    /// Rotary embedding of layers with a window; the same as `rope` where there are none.
    pub window_rope: Rope,
    /// Each layer's window: a token sees itself and the `window − 1` before it. `None` sees all.
    pub windows: Vec<Option<usize>>,
    /// Logits become `cap · tanh(logits / cap)`.
    pub logit_softcap: Option<f32>,
    /// Names of the tensors that are not in layers.
    pub tensors: ModelTensors,
    /// Names of each layer's tensors.
    pub layer_tensors: Vec<LayerTensors>,
}

impl DecoderConfig {
    /// Reads the decoder that a file holds, and makes sure that its tensors are there, have the shapes that follow
    /// from the hyperparameters, and are of types that can be used. Only the header is touched, and the rope factors
    /// where there are any.
    ///
    /// # Errors
    /// [`ConfigError`]; an architecture that is not known is refused by its name.
    pub fn from_gguf(gguf: &Gguf) -> Result<DecoderConfig, ConfigError> {
        let hyper = Hyper::new(gguf)?;
        let Some((_, read)) = ARCHITECTURES.iter().find(|(name, _)| *name == hyper.architecture()) else {
            return Err(ConfigError::UnknownArchitecture {
                architecture: hyper.architecture().to_owned(),
                known: Self::architectures().collect::<Vec<_>>().join(", "),
            });
        };
        if let Some(parts) = gguf.u64("split.count").filter(|&parts| parts > 1) {
            return Err(hyper.unsupported(format!("the other parts of a model in {parts} files; merge them into one first")));
        }
        let config = read(&hyper)?;
        check::check(&config, gguf)?;
        Ok(config)
    }

    /// Names of the architectures that are known.
    pub fn architectures() -> impl Iterator<Item = &'static str> {
        ARCHITECTURES.iter().map(|(name, _)| *name)
    }

    /// The rotary embedding of a layer.
    pub fn layer_rope(&self, layer: usize) -> &Rope {
        match self.windows.get(layer) {
            Some(Some(_)) => &self.window_rope,
            _ => &self.rope,
        }
    }

    /// Whether the output head is the embedding tensor.
    pub fn tied_head(&self) -> bool {
        self.tensors.head == self.tensors.embedding
    }

    /// Keys and values of one token in one layer, in bytes, as half-precision numbers.
    pub fn kv_bytes_per_token(&self) -> u64 {
        (self.kv_heads * (self.key_length + self.value_length) * size_of::<half::f16>()) as u64
    }
}

#[cfg(test)]
mod tests;
