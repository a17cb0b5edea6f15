//! Cohere's Command models: attention and the feed-forward part side by side.

use super::hyper::Hyper;
use super::{ConfigError, DecoderConfig, NormKind, RopeLayout};

/// Command R.
pub(super) fn command_r(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let config = DecoderConfig::usual(hyper, RopeLayout::Interleaved, NormKind::Layer)?;
    let logit_scale = hyper.positive_or_zero("logit_scale")?.unwrap_or(1.0);
    Ok(DecoderConfig { parallel: true, logit_scale, ..config }.map_layers(|tensors, _| tensors.with_one_norm()))
}

/// Command R7B and A: every fourth layer sees everything and turns nothing.
pub(super) fn cohere2(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let window = hyper.count("attention.sliding_window")?;
    let mut config = command_r(hyper)?.with_windows(hyper, Some(window), 4, None)?;
    config.turn_in_windows_only();
    Ok(config)
}
