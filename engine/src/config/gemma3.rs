//! Gemma 3's text models.

use super::hyper::Hyper;
use super::{Activation, ConfigError, DecoderConfig, LayerTensors, ModelTensors, Rope, RopeLayout, check};

/// One layer in so many sees everything; the others have a window.
const PATTERN: usize = 6;
/// Rotary base of the layers with a window, where the file does not say.
const WINDOW_BASE: f32 = 10_000.0;
/// The largest model has this many layers, and alone scales its attention by the width of a row.
const LAYERS_OF_27B: usize = 62;

pub(super) fn read(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    let gguf = hyper.gguf();
    let hidden = hyper.count("embedding_length")?;
    let heads = hyper.count("attention.head_count")?;
    let kv_heads = hyper.count_if_any("attention.head_count_kv")?.unwrap_or(heads);
    let key_length = hyper.count("attention.key_length")?;
    let value_length = hyper.count_if_any("attention.value_length")?.unwrap_or(key_length);
    let layers = check::layers(hyper)?;
    let windows = match hyper.count_or_zero("attention.sliding_window")? {
        Some(window) => windows(hyper, layers, window)?,
        None => vec![None; layers],
    };
    let rope = Rope::read(hyper, RopeLayout::Halves, key_length, 1_000_000.0)?;
    let window_base = hyper.positive_if_any("rope.freq_base_swa")?.unwrap_or(WINDOW_BASE);
    let per_head = if layers == LAYERS_OF_27B { hidden as f32 / heads as f32 } else { key_length as f32 };
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
        embedding_scale: (hidden as f32).sqrt(),
        attention_scale: 1.0 / per_head.sqrt(),
        activation: Activation::GeluTanh,
        // A stretched context is the business of the layers that see it all.
        window_rope: Rope { base: window_base, scale: 1.0, ..rope.clone() },
        rope,
        windows,
        logit_softcap: hyper.positive_or_zero("final_logit_softcapping")?,
        tensors,
        layer_tensors: (0..layers).map(layer_tensors).collect(),
    })
}

/// Each layer's window: as the file says for each, or for one in so many.
fn windows(hyper: &Hyper<'_>, layers: usize, window: usize) -> Result<Vec<Option<usize>>, ConfigError> {
    const KEY: &str = "attention.sliding_window_pattern";
    match hyper.bools_if_any(KEY) {
        Some(pattern) if pattern.len() == layers => Ok(pattern.iter().map(|&windowed| windowed.then_some(window)).collect()),
        Some(pattern) => Err(hyper.invalid(KEY, "one truth value for each layer", format!("{} of them", pattern.len()))),
        None => {
            let period = hyper.count_if_any(KEY)?.unwrap_or(PATTERN);
            Ok((0..layers).map(|layer| ((layer + 1) % period != 0).then_some(window)).collect())
        }
    }
}

/// The usual, with norms of heads and norms after each part.
fn layer_tensors(layer: usize) -> LayerTensors {
    let name = |part: &str| Some(format!("blk.{layer}.{part}.weight"));
    LayerTensors {
        query_norm: name("attn_q_norm"),
        key_norm: name("attn_k_norm"),
        post_attention_norm: name("post_attention_norm"),
        post_feed_forward_norm: name("post_ffw_norm"),
        ..LayerTensors::usual(layer)
    }
}
