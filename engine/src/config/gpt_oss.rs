//! OpenAI's open-weight models.

use super::hyper::Hyper;
use super::{Activation, ConfigError, DecoderConfig, NormKind, NormTensors, Part, RopeLayout, Weighting};

/// Experts with biases, sinks, windows in every other layer, stretched frequencies in all.
pub(super) fn read(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let gguf = hyper.gguf();
    let config = DecoderConfig::usual(hyper, RopeLayout::Halves, NormKind::RootMeanSquare)?;
    let config = DecoderConfig { activation: Activation::ClampedSilu, ..config }.map_layers(|mut tensors, layer| {
        // The norm before the feed-forward part goes by another name.
        tensors.feed_forward_norm = Some(NormTensors::named(gguf, &format!("blk.{layer}.post_attention_norm")));
        tensors.sinks = Some(Part::whole(format!("blk.{layer}.attn_sinks.weight")));
        tensors
    });
    let window = hyper.count("attention.sliding_window")?;
    config.with_experts(hyper, Weighting::SoftmaxOfChosen, false)?.with_windows(hyper, Some(window), 2, None)
}
