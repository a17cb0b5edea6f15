//! GLM 4, and dots.llm1, whose mixture of experts is of the same kind.

use super::hyper::Hyper;
use super::{ConfigError, DecoderConfig, NormKind, NormTensors, Part, RopeLayout, Weighting};

/// Norms after each part; gate and up are one matrix; half of each head is turned.
pub(super) fn glm4(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let gguf = hyper.gguf();
    let config = DecoderConfig::usual(hyper, RopeLayout::Interleaved, NormKind::RootMeanSquare)?;
    let width = config.feed_forward;
    Ok(config.map_layers(|tensors, layer| tensors.with_post_norms(gguf, layer).with_fused_gate(gguf, width)))
}

/// GLM 4.5 and later: experts after some dense layers. The norm before the feed-forward part goes by another name.
pub(super) fn glm4moe(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let gguf = hyper.gguf();
    let config = DecoderConfig::usual(hyper, RopeLayout::Halves, NormKind::RootMeanSquare)?;
    let config = config.map_layers(|mut tensors, layer| {
        tensors.feed_forward_norm = Some(NormTensors::named(gguf, &format!("blk.{layer}.post_attention_norm")));
        // Of the larger models.
        let normed = |part: &str| gguf.tensor(&format!("blk.{layer}.{part}.weight")).map(|view| Part::whole(view.name));
        (tensors.query_norm, tensors.key_norm) = (normed("attn_q_norm"), normed("attn_k_norm"));
        tensors
    });
    config.with_experts(hyper, Weighting::Sigmoid, false)
}

/// dots.llm1.
pub(super) fn dots1(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let config = DecoderConfig::usual(hyper, RopeLayout::Halves, NormKind::RootMeanSquare)?;
    config.map_layers(|tensors, layer| tensors.with_head_norms(layer)).with_experts(hyper, Weighting::Softmax, false)
}
