//! What a decoder looks like, as data: read from a model file, checked against its tensors.
//!
//! There is one decoder. An architecture is a few lines in a file next to this one that map a file's names and
//! hyperparameters onto [`DecoderConfig`]; what is the same for all is in `usual`.

mod card;
mod check;
mod cohere;
mod deepseek;
mod error;
mod experts;
mod gemma;
mod glm;
mod gpt_oss;
mod granite;
mod hyper;
mod llama;
mod olmo;
mod phi;
mod qwen;
mod rope;
mod starcoder;
mod tensors;
mod usual;

pub use error::ConfigError;
pub use experts::{Experts, Weighting};
pub(crate) use rope::exponential;
use rope::natural_log;
pub use rope::{LongFactors, Rope, RopeLayout, Yarn};
pub use tensors::{
    DenseTensors, ExpertTensors, FeedForward, HeadTensors, LatentTensors, LayerTensors, ModelTensors, NormTensors, Part, Projections,
};

use crate::gguf::Gguf;
use hyper::Hyper;

/// An architecture: its name in files, and how to read it.
type Architecture = (&'static str, fn(&Hyper<'_>) -> Result<DecoderConfig, ConfigError>);

/// All that are known, by name.
const ARCHITECTURES: [Architecture; 34] = [
    ("arcee", llama::arcee),
    ("cohere2", cohere::cohere2),
    ("command-r", cohere::command_r),
    ("deepseek2", deepseek::deepseek2),
    ("dots1", glm::dots1),
    ("ernie4_5", llama::plain),
    ("ernie4_5-moe", llama::ernie4_5_moe),
    ("exaone", llama::exaone),
    ("exaone4", olmo::exaone4),
    ("gemma", gemma::gemma),
    ("gemma2", gemma::gemma2),
    ("gemma3", gemma::gemma3),
    ("glm4", glm::glm4),
    ("glm4moe", glm::glm4moe),
    ("gpt-oss", gpt_oss::read),
    ("granite", granite::read),
    ("granitemoe", granite::read),
    ("internlm2", llama::plain),
    ("llama", llama::read),
    ("minicpm", granite::minicpm),
    ("mistral3", llama::mistral3),
    ("olmo2", olmo::olmo2),
    ("olmoe", olmo::olmoe),
    ("phi3", phi::read),
    ("qwen2", qwen::qwen2),
    ("qwen2moe", qwen::qwen2moe),
    ("qwen2vl", qwen::qwen2),
    ("qwen3", qwen::qwen3),
    ("qwen3moe", qwen::qwen3moe),
    ("qwen3vl", qwen::qwen3),
    ("qwen3vlmoe", qwen::qwen3moe),
    ("seed_oss", llama::seed_oss),
    ("smollm3", llama::smollm3),
    ("starcoder2", starcoder::read),
];

/// What a feed-forward part makes of its gate and what the gate opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `gate · sigmoid(gate) × up`.
    Silu,
    /// The Gaussian error linear unit in its tanh approximation: `gate/2 · (1 + tanh(√(2/π) · (gate + 0.044715 gate³))) × up`.
    GeluTanh,
    /// `max(gate, 0)² × up`.
    ReluSquared,
    /// `g · sigmoid(1.702 g) × (u + 1)`, where g is the gate up to 7 and u what it opens, from −7 to 7.
    ClampedSilu,
}

/// How rows are normalised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// Divided by their root mean square.
    RootMeanSquare,
    /// Less their mean, then divided by their root mean square.
    Layer,
}

/// How queries grow with their position, so that attention stays sharp over long contexts: at position `p` by the factor
/// `1 + by · ln(1 + ⌊p / every⌋)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Growth {
    /// See above.
    pub by: f32,
    /// Positions that have the same factor.
    pub every: usize,
}

impl Growth {
    /// The factor at a position, the same on every machine.
    pub fn at(&self, position: usize) -> f32 {
        (1.0 + f64::from(self.by) * natural_log(1.0 + (position / self.every) as f64)) as f32
    }

    /// Reads it, if there is any; `every` is what the file does not say.
    fn read(hyper: &Hyper<'_>, every: Option<usize>) -> Result<Option<Growth>, ConfigError> {
        const EVERY: &str = "attention.temperature_length";
        let Some(by) = hyper.positive_or_zero("attention.temperature_scale")? else { return Ok(None) };
        let every = match every {
            Some(every) => every,
            None => hyper.count(EVERY)?,
        };
        Ok(Some(Growth { by, every }))
    }
}

/// Lengths of latent attention (DeepSeek-AI, "DeepSeek-V2", 2024).
///
/// Of a row only a short vector of `rank` elements is kept, and `turned` elements of a key that all heads share. A head's key is made of the
/// short vector by a matrix; instead its query is brought to the short vector's space by the same matrix, so that to the cache all this is
/// one key head of `turned + rank` elements, whose values are the short vector. What a head attends to becomes its value by another matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latent {
    /// Elements of the short vector that queries are made of, where they are.
    pub query_rank: usize,
    /// Elements of the short vector.
    pub rank: usize,
    /// Elements of a head's query that know nothing of positions.
    pub fixed: usize,
    /// Elements that the rotary embedding turns.
    pub turned: usize,
    /// Elements of a head's value.
    pub value_length: usize,
}

/// One decoder.
///
/// A token's row is its embedding times [`embedding_scale`](Self::embedding_scale). Each layer adds to it, first,
/// attention over its normalised self, then a feed-forward part `down(activation(gate(x), up(x)))` of the
/// same, each times [`residual_scale`](Self::residual_scale). Which optional tensors a layer has, [`LayerTensors`] says. At the end come
/// a norm and the output head.
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
    /// Latent attention: keys and values are those of one head.
    pub latent: Option<Latent>,
    /// Width of dense feed-forward parts, in elements; zero where there are none.
    pub feed_forward: usize,
    /// Mixtures of experts, where there are any.
    pub experts: Option<Experts>,
    /// Entries of the vocabulary: rows of the embedding and of the output head.
    pub vocabulary: usize,
    /// Longest context that the model was trained for, in tokens.
    pub context_tokens: usize,
    /// How rows are normalised.
    pub norm: NormKind,
    /// What norms add to the mean square. Norms' weights multiply as they are in the file.
    pub norm_epsilon: f32,
    /// Whether norms of queries and keys are of whole rows, rather than of each head.
    pub whole_row_norms: bool,
    /// What an embedding is multiplied with.
    pub embedding_scale: f32,
    /// What products of queries and keys are multiplied with before the softmax.
    pub attention_scale: f32,
    /// How queries grow with their position.
    pub attention_growth: Option<Growth>,
    /// Scores become `cap · tanh(score / cap)` before the softmax.
    pub attention_softcap: Option<f32>,
    /// What a layer's parts are multiplied with before they are added to the row.
    pub residual_scale: f32,
    /// Whether attention and feed-forward part take the row as it comes into the layer, rather than one after the other.
    pub parallel: bool,
    /// What the gate goes through.
    pub activation: Activation,
    /// Rotary embeddings.
    pub ropes: Vec<Rope>,
    /// Each layer's rotary embedding, as a place in `ropes`; `None` turns nothing.
    pub layer_ropes: Vec<Option<usize>>,
    /// Each layer's window: a token sees itself and the `window − 1` before it. `None` sees all.
    pub windows: Vec<Option<usize>>,
    /// What logits are multiplied with.
    pub logit_scale: f32,
    /// Logits become `cap · tanh(logits / cap)` then.
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
        if !gguf.is_whole() {
            return Err(hyper.unsupported("the other parts of the model, of which this is one"));
        }
        let config = read(&hyper)?;
        if config.experts.is_none() && hyper.count_or_zero("expert_count")?.is_some() {
            return Err(hyper.unsupported(format!("a mixture of experts in {} models", config.architecture)));
        }
        check::check(&config, gguf)?;
        Ok(config)
    }

    /// Names of the architectures that are known.
    pub fn architectures() -> impl Iterator<Item = &'static str> {
        ARCHITECTURES.iter().map(|(name, _)| *name)
    }

    /// The rotary embedding of a layer.
    pub fn layer_rope(&self, layer: usize) -> Option<&Rope> {
        self.ropes.get((*self.layer_ropes.get(layer)?)?)
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
