//! Gemma's text models.

use super::hyper::Hyper;
use super::{Activation, ConfigError, DecoderConfig, NormKind, Rope, RopeLayout};

/// What all have in common: scaled embeddings, heads whose width is given.
fn common(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    // Heads are wider than a row's share, so the file must say.
    hyper.count("attention.key_length")?;
    let config = DecoderConfig::usual(hyper, RopeLayout::Halves, NormKind::RootMeanSquare)?;
    Ok(DecoderConfig { embedding_scale: (config.hidden as f32).sqrt(), activation: Activation::GeluTanh, ..config })
}

/// The largest model of a generation, known by its layers, scales attention by a row's share.
fn scaled_for_27b(config: DecoderConfig, layers: usize) -> DecoderConfig {
    if config.layers != layers {
        return config;
    }
    DecoderConfig { attention_scale: 1.0 / (config.hidden as f32 / config.heads as f32).sqrt(), ..config }
}

/// The first generation.
pub(super) fn gemma(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    common(hyper)
}

/// The second: every other layer has a window, scores and logits are bounded.
pub(super) fn gemma2(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let mut config = common(hyper)?;
    // Files from before these were written have the only values that there were.
    config.attention_softcap = Some(hyper.positive_if_any("attn_logit_softcapping")?.unwrap_or(50.0));
    config.logit_softcap = Some(hyper.positive_if_any("final_logit_softcapping")?.unwrap_or(30.0));
    let window = hyper.count_if_any("attention.sliding_window")?.unwrap_or(4096);
    let gguf = hyper.gguf();
    let config = config.map_layers(|tensors, layer| tensors.with_post_norms(gguf, layer));
    scaled_for_27b(config, 46).with_windows(hyper, Some(window), 2, None)
}

/// The third: one layer in six sees everything, and turns slower than those with a window.
pub(super) fn gemma3(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let mut config = common(hyper)?;
    if hyper.positive_if_any("rope.freq_base")?.is_none() {
        config.ropes[0].base = 1_000_000.0;
    }
    config.logit_softcap = hyper.positive_or_zero("final_logit_softcapping")?;
    let base = hyper.positive_if_any("rope.freq_base_swa")?.unwrap_or(10_000.0);
    // A stretched context is the business of the layers that see it all.
    let windowed = Rope { base, scale: 1.0, ..config.ropes[0].clone() };
    let gguf = hyper.gguf();
    let config = config.map_layers(|tensors, layer| tensors.with_head_norms(layer).with_post_norms(gguf, layer));
    scaled_for_27b(config, 62).with_windows(hyper, hyper.count_or_zero("attention.sliding_window")?, 6, Some(windowed))
}
