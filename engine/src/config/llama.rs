//! Llama, and what is built like it.

use super::hyper::Hyper;
use super::rope::original_tokens;
use super::{Activation, ConfigError, DecoderConfig, Growth, NormKind, NormTensors, RopeLayout, Weighting};

fn interleaved(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    DecoderConfig::usual(hyper, RopeLayout::Interleaved, NormKind::RootMeanSquare)
}

/// InternLM 2, ERNIE 4.5: nothing but the usual.
pub(super) fn plain(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    interleaved(hyper)
}

/// Llama, Mistral, SmolLM, TinyLlama and others; Mixtral, which has experts.
pub(super) fn read(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let mut config = interleaved(hyper)?;
    // Mistral's first models have the same window in all layers.
    config.windows = vec![hyper.count_or_zero("attention.sliding_window")?; config.layers];
    if let Some(scale) = hyper.positive_or_zero("attention.scale")? {
        config.attention_scale = scale;
    }
    config.with_experts_if_any(hyper, Weighting::Softmax, true)
}

/// Mistral's models from Ministral 3 on: queries grow with their position, if the file says so.
pub(super) fn mistral3(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let config = read(hyper)?;
    let every = original_tokens(hyper)?;
    Ok(DecoderConfig { attention_growth: Growth::read(hyper, Some(every))?, ..config })
}

/// SmolLM 3: every fourth layer turns nothing.
pub(super) fn smollm3(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let mut config = interleaved(hyper)?;
    config.layer_ropes = (0..config.layers).map(|layer| ((layer + 1) % 4 != 0).then_some(0)).collect();
    Ok(config)
}

/// EXAONE 3.
pub(super) fn exaone(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    DecoderConfig::usual(hyper, RopeLayout::Halves, NormKind::RootMeanSquare)
}

/// Arcee: no gates.
pub(super) fn arcee(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let config = DecoderConfig { activation: Activation::ReluSquared, ..interleaved(hyper)? };
    Ok(config.map_layers(|tensors, _| tensors.ungated()))
}

/// Seed-OSS: the norm before the feed-forward part goes by another name.
pub(super) fn seed_oss(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let mut config = DecoderConfig::usual(hyper, RopeLayout::Halves, NormKind::RootMeanSquare)?;
    for (tensors, layer) in config.layer_tensors.iter_mut().zip(0..) {
        tensors.feed_forward_norm = Some(NormTensors::named(hyper.gguf(), &format!("blk.{layer}.post_attention_norm")));
    }
    Ok(config)
}

/// ERNIE 4.5 with experts.
pub(super) fn ernie4_5_moe(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    interleaved(hyper)?.with_experts(hyper, Weighting::Softmax, true)
}
