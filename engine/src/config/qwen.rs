//! Qwen's models.

use super::hyper::Hyper;
use super::{ConfigError, DecoderConfig, NormKind, RopeLayout, Weighting};

/// Qwen 2 and 2.5: biases at queries, keys and values. The language part of their models that see is the same: text has the same position in
/// all of their position's dimensions.
pub(super) fn qwen2(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    DecoderConfig::usual(hyper, RopeLayout::Halves, NormKind::RootMeanSquare)
}

/// Qwen 3: norms of heads. Likewise the language part of models that see.
pub(super) fn qwen3(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    Ok(qwen2(hyper)?.map_layers(|tensors, layer| tensors.with_head_norms(layer)))
}

/// Experts, and a part that all tokens go through and open as far as they need.
pub(super) fn qwen2moe(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    qwen2(hyper)?.with_experts(hyper, Weighting::Softmax, false)
}

/// Experts alone.
pub(super) fn qwen3moe(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    qwen3(hyper)?.with_experts(hyper, Weighting::Softmax, true)
}
