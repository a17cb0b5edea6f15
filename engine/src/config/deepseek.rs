//! DeepSeek 2 and 3 and what is built like them, e.g. Kimi K2 and Mistral Large 3.

use super::hyper::Hyper;
use super::rope::natural_log;
use super::{ConfigError, DecoderConfig, Growth, Latent, NormKind, RopeLayout, Weighting};

/// Latent attention, and experts after some dense layers.
pub(super) fn deepseek2(hyper: &Hyper<'_>) -> Result<DecoderConfig, ConfigError> {
    const KEY: &str = "attention.key_length_mla";
    let gguf = hyper.gguf();
    let Some(key_length) = hyper.count_if_any(KEY)? else {
        return Err(hyper.unsupported("a conversion from before keys and values were split; take a newer one"));
    };
    let mut config = DecoderConfig::usual(hyper, RopeLayout::Interleaved, NormKind::RootMeanSquare)?;
    let rank = hyper.count("attention.kv_lora_rank")?;
    let turned = config.ropes[0].dimension;
    if config.kv_heads != 1 || config.key_length != rank + turned || config.value_length != rank {
        return Err(hyper.invalid("attention.key_length", "that of the one latent key", config.key_length));
    }
    if key_length <= turned {
        return Err(hyper.invalid(KEY, "more than what is turned of it", key_length));
    }
    let value_length = hyper.count("attention.value_length_mla")?;
    let query_rank = hyper.count_or_zero("attention.q_lora_rank")?.unwrap_or(0);
    config.latent = Some(Latent { query_rank, rank, fixed: key_length - turned, turned, value_length });

    // Where the context was stretched scores grow, by what the file says or as the rotary embedding does.
    let rope = &mut config.ropes[0];
    let mut stretched = f64::from(rope.magnitude);
    if rope.yarn.is_some()
        && let Some(by) = hyper.positive_or_zero("rope.scaling.yarn_log_multiplier")?
    {
        rope.magnitude = hyper.positive_or_zero("rope.scaling.attn_factor")?.unwrap_or(1.0);
        stretched = f64::from(rope.magnitude) * (1.0 - f64::from(by) * natural_log(f64::from(rope.scale)));
    }
    config.attention_growth = Growth::read(hyper, None)?;
    config.attention_scale = (stretched * stretched / (key_length as f64).sqrt()) as f32;
    config.map_layers(|tensors, layer| tensors.with_latent(gguf, layer)).with_experts(hyper, Weighting::Softmax, false)
}
