//! What most architectures have in common.

use super::hyper::Hyper;
use super::{Activation, ConfigError, DecoderConfig, LayerTensors, ModelTensors, NormKind, Rope, RopeLayout, check};

/// Frequencies' divisors of Llama 3.1 and later.
const ROPE_FACTORS: &str = "rope_freqs.weight";

impl DecoderConfig {
    /// A decoder of the commonest kind: what is read here is given under the same names by all architectures, and the others change what
    /// is different with them.
    pub(super) fn usual(hyper: &Hyper<'_>, layout: RopeLayout, norm: NormKind) -> Result<DecoderConfig, ConfigError> {
        const FEED_FORWARD: &str = "feed_forward_length";
        let gguf = hyper.gguf();
        let hidden = hyper.count("embedding_length")?;
        let heads = hyper.count("attention.head_count")?;
        let kv_heads = hyper.count_if_any("attention.head_count_kv")?.unwrap_or(heads);
        let key_length = match hyper.count_if_any("attention.key_length")? {
            Some(length) => length,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => return Err(hyper.invalid("attention.head_count", "a divisor of the embedding length", heads)),
        };
        let value_length = hyper.count_if_any("attention.value_length")?.unwrap_or(key_length);
        let mut rope = Rope::read(hyper, layout, key_length)?;
        if gguf.tensor(ROPE_FACTORS).is_some() {
            rope.factors = check::positive_vector(gguf, ROPE_FACTORS, rope.dimension / 2)?;
        }
        let layers = check::layers(hyper)?;
        let tensors = ModelTensors::usual(gguf);
        let mixed = hyper.count_or_zero("expert_count")?.is_some();
        let mut config = DecoderConfig {
            architecture: hyper.architecture().to_owned(),
            layers,
            hidden,
            heads,
            kv_heads,
            key_length,
            value_length,
            latent: None,
            // With experts there may be none, and some files then say zero.
            feed_forward: if mixed { hyper.count_or_zero(FEED_FORWARD)?.unwrap_or(0) } else { hyper.count(FEED_FORWARD)? },
            experts: None,
            vocabulary: check::vocabulary(gguf, &tensors)?,
            context_tokens: hyper.count("context_length")?,
            norm,
            norm_epsilon: hyper.positive(match norm {
                NormKind::RootMeanSquare => "attention.layer_norm_rms_epsilon",
                NormKind::Layer => "attention.layer_norm_epsilon",
            })?,
            whole_row_norms: false,
            embedding_scale: 1.0,
            attention_scale: 1.0 / (key_length as f32).sqrt(),
            attention_growth: None,
            attention_softcap: None,
            residual_scale: 1.0,
            parallel: false,
            activation: Activation::Silu,
            ropes: vec![rope],
            layer_ropes: vec![Some(0); layers],
            windows: vec![None; layers],
            logit_scale: 1.0,
            logit_softcap: None,
            tensors,
            layer_tensors: Vec::new(),
        };
        config.layer_tensors = (0..layers).map(|layer| LayerTensors::usual(gguf, &config, layer)).collect();
        Ok(config)
    }

    /// Changes every layer's tensors.
    pub(super) fn map_layers(mut self, change: impl Fn(LayerTensors, usize) -> LayerTensors) -> DecoderConfig {
        self.layer_tensors =
            std::mem::take(&mut self.layer_tensors).into_iter().zip(0..).map(|(tensors, layer)| change(tensors, layer)).collect();
        self
    }

    /// Gives layers a window, if there is one: as the file says for each, or all but one in so many. Those with a window have the rotary
    /// embedding `windowed`, if it is another.
    pub(super) fn with_windows(
        mut self,
        hyper: &Hyper<'_>,
        window: Option<usize>,
        period: usize,
        windowed: Option<Rope>,
    ) -> Result<DecoderConfig, ConfigError> {
        const KEY: &str = "attention.sliding_window_pattern";
        let Some(window) = window else { return Ok(self) };
        let layers = self.layers;
        self.windows = match hyper.bools_if_any(KEY) {
            Some(pattern) if pattern.len() == layers => pattern.iter().map(|&windowed| windowed.then_some(window)).collect(),
            Some(pattern) => return Err(hyper.invalid(KEY, "one truth value for each layer", format!("{} of them", pattern.len()))),
            None => {
                let period = hyper.count_if_any(KEY)?.unwrap_or(period);
                (0..layers).map(|layer| ((layer + 1) % period != 0).then_some(window)).collect()
            }
        };
        if let Some(rope) = windowed {
            self.ropes.push(rope);
            let last = self.ropes.len() - 1;
            self.layer_ropes = self.windows.iter().map(|window| Some(if window.is_some() { last } else { 0 })).collect();
        }
        Ok(self)
    }
}
