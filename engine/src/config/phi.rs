//! Phi 3 and 4.

use super::hyper::Hyper;
use super::{ConfigError, DecoderConfig, NormKind, RopeLayout, check};

/// Queries, keys and values are one matrix, gate and up another; long contexts have other frequencies.
pub(super) fn read(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let gguf = hyper.gguf();
    let mut config = DecoderConfig::usual(hyper, RopeLayout::Halves, NormKind::RootMeanSquare)?;
    config.read_long_factors(hyper)?;
    // The files' windows are not those of the models: llama.cpp does not use them either.
    let width = config.feed_forward;
    Ok(config.map_layers(|tensors, _| tensors.with_fused_gate(gguf, width)))
}

impl DecoderConfig {
    /// Reads the frequencies' divisors for short and for long contexts, where the file has them.
    pub(super) fn read_long_factors(&mut self, hyper: &Hyper<'_>) -> Result<(), ConfigError> {
        const SHORT: &str = "rope_factors_short.weight";
        const LONG: &str = "rope_factors_long.weight";
        let gguf = hyper.gguf();
        for rope in &mut self.ropes {
            let pairs = rope.dimension / 2;
            if gguf.tensor(SHORT).is_some() {
                rope.factors = check::positive_vector(gguf, SHORT, pairs)?;
            }
            match (&mut rope.long, gguf.tensor(LONG)) {
                (Some(long), Some(_)) => long.factors = check::positive_vector(gguf, LONG, pairs)?,
                (None, Some(_)) => {
                    let original_tokens = match hyper.count_or_zero("rope.scaling.original_context_length")? {
                        Some(tokens) => tokens,
                        None => self.context_tokens,
                    };
                    rope.long = Some(super::LongFactors { original_tokens, factors: check::positive_vector(gguf, LONG, pairs)? });
                }
                _ => {}
            }
        }
        Ok(())
    }
}
