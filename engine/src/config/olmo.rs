//! OLMo, and EXAONE 4, which is built like OLMo 2.

use super::hyper::Hyper;
use super::{ConfigError, DecoderConfig, NormKind, Rope, RopeLayout, Weighting};

/// OLMo 2 and 3: norms after each part and none before, norms of whole queries and keys.
pub(super) fn olmo2(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let gguf = hyper.gguf();
    let config = DecoderConfig::usual(hyper, RopeLayout::Halves, NormKind::RootMeanSquare)?;
    let config = DecoderConfig { whole_row_norms: true, ..config };
    let config = config.map_layers(|tensors, layer| tensors.without_norms().with_head_norms(layer).with_post_norms(gguf, layer));
    let window = hyper.count_or_zero("attention.sliding_window")?;
    // Only layers that see everything are stretched.
    let base = hyper.positive_if_any("rope.freq_base_swa")?.unwrap_or(config.ropes[0].base);
    let windowed = Rope { base, scale: 1.0, yarn: None, magnitude: 1.0, ..config.ropes[0].clone() };
    config.with_windows(hyper, window, 4, Some(windowed))
}

/// OLMoE: norms of whole queries and keys, experts.
pub(super) fn olmoe(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let config = DecoderConfig::usual(hyper, RopeLayout::Halves, NormKind::RootMeanSquare)?;
    let config = DecoderConfig { whole_row_norms: true, ..config };
    config.map_layers(|tensors, layer| tensors.with_head_norms(layer)).with_experts(hyper, Weighting::Softmax, false)
}

/// EXAONE 4: norms after each part and none before, norms of heads. Where layers have windows, those without turn nothing.
pub(super) fn exaone4(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    /// Layers of the model that has windows.
    const LAYERS_OF_32B: usize = 64;
    let gguf = hyper.gguf();
    let config = DecoderConfig::usual(hyper, RopeLayout::Halves, NormKind::RootMeanSquare)?;
    let config = config.map_layers(|tensors, layer| tensors.without_norms().with_head_norms(layer).with_post_norms(gguf, layer));
    if config.layers != LAYERS_OF_32B {
        return Ok(config);
    }
    let window = hyper.count_if_any("attention.sliding_window")?.unwrap_or(4096);
    let mut config = config.with_windows(hyper, Some(window), 4, None)?;
    config.turn_in_windows_only();
    Ok(config)
}

impl DecoderConfig {
    /// Layers without a window turn nothing.
    pub(super) fn turn_in_windows_only(&mut self) {
        self.layer_ropes = self.windows.iter().map(|window| window.map(|_| 0)).collect();
    }
}
