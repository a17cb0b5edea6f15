//! Granite and MiniCPM: everything has a scale.

use super::hyper::Hyper;
use super::{ConfigError, DecoderConfig, NormKind, RopeLayout, Weighting};

/// Granite 3 and the dense models of 4, with or without experts.
pub(super) fn read(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let mut config = DecoderConfig::usual(hyper, RopeLayout::Interleaved, NormKind::RootMeanSquare)?;
    config.read_long_factors(hyper)?;
    config.embedding_scale = hyper.positive_or_zero("embedding_scale")?.unwrap_or(1.0);
    config.residual_scale = hyper.positive_or_zero("residual_scale")?.unwrap_or(1.0);
    config.attention_scale = hyper.positive_or_zero("attention.scale")?.unwrap_or(config.attention_scale);
    // Logits are divided.
    config.logit_scale = 1.0 / hyper.positive("logit_scale")?;
    if hyper.bool_if_any("rope.scaling.finetuned")? == Some(false) {
        config.layer_ropes = vec![None; config.layers];
    }
    config.with_experts_if_any(hyper, Weighting::Softmax, true)
}

/// MiniCPM. Old files do not say its scales.
pub(super) fn minicpm(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let mut config = DecoderConfig::usual(hyper, RopeLayout::Interleaved, NormKind::RootMeanSquare)?;
    config.read_long_factors(hyper)?;
    config.embedding_scale = hyper.positive_or_zero("embedding_scale")?.unwrap_or(12.0);
    config.residual_scale = hyper.positive_or_zero("residual_scale")?.unwrap_or(1.4 / (config.layers as f32).sqrt());
    config.logit_scale = 1.0 / hyper.positive_or_zero("logit_scale")?.unwrap_or(256.0 / config.hidden as f32);
    Ok(config)
}
