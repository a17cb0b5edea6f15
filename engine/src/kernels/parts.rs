//! The parts of a layer, as a backend holds them.

use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;

use super::Matrix;
use crate::config::{self, Activation, NormKind};

/// A norm.
#[derive(Debug, Clone)]
pub struct Norm<B: Backend> {
    /// How rows are normalised.
    pub kind: NormKind,
    /// What normalised elements are multiplied with, one for each element.
    pub weight: FloatTensor<B>,
    /// What is added then.
    pub bias: Option<FloatTensor<B>>,
    /// What is added to the mean of squares.
    pub epsilon: f32,
}

/// A matrix and perhaps a bias.
#[derive(Debug, Clone)]
pub struct Linear<B: Backend> {
    /// The matrix.
    pub matrix: Matrix<B>,
    /// Added to the product; one element for each row of the matrix.
    pub bias: Option<FloatTensor<B>>,
}

/// The first half of a feed-forward part: the activation of `gate · x` and `up · x`, or of `up · x` alone.
#[derive(Debug, Clone)]
pub struct Gate<B: Backend> {
    /// What goes through the activation; `up` if not given.
    pub gate: Option<Linear<B>>,
    /// What it opens.
    pub up: Linear<B>,
    /// The activation.
    pub activation: Activation,
}

/// A whole feed-forward part.
#[derive(Debug, Clone)]
pub struct FeedForward<B: Backend> {
    /// Its first half.
    pub gate: Gate<B>,
    /// Its second.
    pub down: Linear<B>,
}

/// A mixture of experts.
#[derive(Debug, Clone)]
pub struct Experts<B: Backend> {
    /// How experts are chosen.
    pub choice: config::Experts,
    /// Gives each expert's score.
    pub router: Linear<B>,
    /// Added to weights when experts are chosen.
    pub selection_bias: Option<Vec<f32>>,
    /// The experts.
    pub experts: Vec<FeedForward<B>>,
    /// What all rows go through besides.
    pub shared: Option<SharedExpert<B>>,
}

/// A feed-forward part next to experts.
#[derive(Debug, Clone)]
pub struct SharedExpert<B: Backend> {
    /// The part.
    pub part: FeedForward<B>,
    /// What it puts out is multiplied with the sigmoid of the row's product with this.
    pub opening: Option<FloatTensor<B>>,
}

/// What makes queries, keys and values of latent attention; see [`config::Latent`].
#[derive(Debug, Clone)]
pub struct Latent<B: Backend> {
    /// Makes the short vector of queries, where there is one, and normalises it.
    pub query_down: Option<(Linear<B>, Norm<B>)>,
    /// Makes queries: of each head what is fixed, then what is turned.
    pub query: Linear<B>,
    /// Makes the short vector and then what is turned of a key.
    pub down: Linear<B>,
    /// Norm of the short vector.
    pub down_norm: Norm<B>,
    /// For each head, brings what is fixed of a query to the short vector's space.
    pub query_ups: Vec<Matrix<B>>,
    /// For each head, makes its value of a short vector.
    pub value_ups: Vec<Matrix<B>>,
    /// The lengths.
    pub lengths: config::Latent,
}

/// What a product is added to, and how.
#[derive(Debug)]
pub struct Residual<'a, B: Backend> {
    /// The rows.
    pub rows: FloatTensor<B>,
    /// Normalises the product first.
    pub norm: Option<&'a Norm<B>>,
    /// Multiplies the product then.
    pub scale: f32,
}

/// Weights of attention besides its matrices.
#[derive(Debug, Clone)]
pub struct HeadWeights<B: Backend> {
    /// Norm of queries: of each head, or of whole rows if its weight is as long.
    pub query_norm: Option<Norm<B>>,
    /// Norm of keys, likewise.
    pub key_norm: Option<Norm<B>>,
    /// A score for each head that takes its share of the softmax and gives nothing.
    pub sinks: Option<FloatTensor<B>>,
}

/// Sizes of a layer's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a key.
    pub key_length: usize,
    /// Elements of a value.
    pub value_length: usize,
    /// Pages of [`PAGE_TOKENS`](super::PAGE_TOKENS) positions.
    pub pages: usize,
}

/// How a layer attends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads; each `heads / kv_heads` of them share a key head.
    pub heads: usize,
    /// What scores are multiplied with before the softmax.
    pub scale: f32,
    /// How that grows with a row's position.
    pub growth: Option<config::Growth>,
    /// Scores become `cap · tanh(score / cap)` then.
    pub softcap: Option<f32>,
    /// How many positions a row sees, itself included; all before it if not given.
    pub window: Option<usize>,
}

impl AttentionShape {
    /// What scores of a row at this position are multiplied with.
    pub fn scale_at(&self, position: usize) -> f32 {
        self.growth.map_or(self.scale, |growth| self.scale * growth.at(position))
    }
}

/// What becomes of logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitsFinish {
    /// They are multiplied with this.
    pub scale: f32,
    /// They become `cap · tanh(logit / cap)` then.
    pub softcap: Option<f32>,
}
