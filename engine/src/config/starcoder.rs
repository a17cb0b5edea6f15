//! StarCoder 2.

use super::hyper::Hyper;
use super::{Activation, ConfigError, DecoderConfig, NormKind, RopeLayout};

/// Layer norms, biases everywhere, no gates.
pub(super) fn read(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let config = DecoderConfig::usual(hyper, RopeLayout::Halves, NormKind::Layer)?;
    Ok(DecoderConfig { activation: Activation::GeluTanh, ..config }.map_layers(|tensors, _| tensors.ungated()))
}
