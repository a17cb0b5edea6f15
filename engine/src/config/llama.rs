//! Llama, and what is built like it: Mistral, SmolLM, TinyLlama and others.

use super::hyper::Hyper;
use super::{Activation, ConfigError, DecoderConfig, LayerTensors, ModelTensors, Rope, RopeLayout, check};

/// Frequencies' divisors of Llama 3.1 and later.
const ROPE_FACTORS: &str = "rope_freqs.weight";

pub(super) fn read(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let gguf = hyper.gguf();
    if hyper.count_or_zero("expert_count")?.is_some() {
        return Err(hyper.unsupported("a mixture of experts"));
    }
    let hidden = hyper.count("embedding_length")?;
    let heads = hyper.count("attention.head_count")?;
    let kv_heads = hyper.count_if_any("attention.head_count_kv")?.unwrap_or(heads);
    let key_length = match hyper.count_if_any("attention.key_length")? {
        Some(length) => length,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => return Err(hyper.invalid("attention.head_count", "a divisor of the embedding length", heads)),
    };
    let value_length = hyper.count_if_any("attention.value_length")?.unwrap_or(key_length);
    let mut rope = Rope::read(hyper, RopeLayout::Interleaved, key_length, 10_000.0)?;
    if gguf.tensor(ROPE_FACTORS).is_some() {
        rope.factors = check::positive_vector(gguf, ROPE_FACTORS, rope.dimension / 2)?;
    }
    let layers = check::layers(hyper)?;
    let tensors = ModelTensors::usual(gguf);
    Ok(DecoderConfig {
        architecture: hyper.architecture().to_owned(),
        layers,
        hidden,
        heads,
        kv_heads,
        key_length,
        value_length,
        feed_forward: hyper.count("feed_forward_length")?,
        vocabulary: check::vocabulary(gguf, &tensors)?,
        context_tokens: hyper.count("context_length")?,
        norm_epsilon: hyper.positive("attention.layer_norm_rms_epsilon")?,
        embedding_scale: 1.0,
        attention_scale: 1.0 / (key_length as f32).sqrt(),
        activation: Activation::Silu,
        window_rope: rope.clone(),
        rope,
        windows: vec![None; layers],
        logit_softcap: None,
        tensors,
        layer_tensors: (0..layers).map(|layer| layer_tensors(hyper, layer)).collect(),
    })
}

/// The usual, and biases where the file has them.
fn layer_tensors(hyper: &Hyper<'_>, layer: usize) -> LayerTensors {
    let bias = |part: &str| {
        let name = format!("blk.{layer}.{part}.bias");
        hyper.gguf().tensor(&name).map(|_| name)
    };
    LayerTensors {
        query_bias: bias("attn_q"),
        key_bias: bias("attn_k"),
        value_bias: bias("attn_v"),
        attention_output_bias: bias("attn_output"),
        ..LayerTensors::usual(layer)
    }
}
