//! Holds a configuration against the file's tensors, both ways.

use super::hyper::Hyper;
use super::{ConfigError, DecoderConfig, ModelTensors};
use crate::gguf::{Gguf, TensorView};
use std::collections::BTreeSet;

/// The number of layers. Each has tensors, so there are no more of them than tensors in the file; which keeps a false
/// count from costing memory.
pub(super) fn layers(hyper: &Hyper<'_>) -> Result<usize, ConfigError> {
    const KEY: &str = "block_count";
    let layers = hyper.count(KEY)?;
    if layers > hyper.gguf().tensors().len() {
        return Err(hyper.invalid(KEY, "no larger than the number of tensors", layers));
    }
    Ok(layers)
}

/// Entries of the vocabulary, which the embedding tells.
pub(super) fn vocabulary(gguf: &Gguf, tensors: &ModelTensors) -> Result<usize, ConfigError> {
    Ok(tensor(gguf, &tensors.embedding)?.rows())
}

/// A tensor that must be there, of a type that can be used.
fn tensor<'a>(gguf: &'a Gguf, name: &str) -> Result<TensorView<'a>, ConfigError> {
    let Some(view) = gguf.tensor(name) else {
        return Err(ConfigError::MissingTensor { file: gguf.name().to_owned(), tensor: name.to_owned() });
    };
    if !view.block.is_supported() {
        return Err(ConfigError::TensorType { file: gguf.name().to_owned(), tensor: name.to_owned(), block: view.block });
    }
    Ok(view)
}

/// A tensor that must be there with this shape. Trailing dimensions of one do not count.
fn shaped<'a>(gguf: &'a Gguf, name: &str, expected: &[usize]) -> Result<TensorView<'a>, ConfigError> {
    let view = tensor(gguf, name)?;
    let longest = view.shape.len().max(expected.len());
    let same = (0..longest).all(|i| {
        let found = view.shape.get(i).copied().unwrap_or(1);
        found == expected.get(i).map_or(1, |&length| length as u64)
    });
    if !same {
        return Err(ConfigError::TensorShape {
            file: gguf.name().to_owned(),
            tensor: name.to_owned(),
            expected: expected.iter().map(|&length| length as u64).collect(),
            found: view.shape.to_vec(),
        });
    }
    Ok(view)
}

/// The numbers of a small tensor, all of them positive and finite.
pub(super) fn positive_vector(gguf: &Gguf, name: &str, length: usize) -> Result<Vec<f32>, ConfigError> {
    let view = shaped(gguf, name, &[length])?;
    let unusable = |_| ConfigError::TensorType { file: gguf.name().to_owned(), tensor: name.to_owned(), block: view.block };
    let numbers = view.dequantise().map_err(unusable)?;
    match numbers.iter().find(|number| !number.is_finite() || **number <= 0.0) {
        None => Ok(numbers),
        Some(number) => Err(ConfigError::Invalid {
            file: gguf.name().to_owned(),
            key: name.to_owned(),
            must: "a tensor of positive numbers",
            is: number.to_string(),
        }),
    }
}

/// Checks what does not depend on the architecture.
pub(super) fn check(config: &DecoderConfig, gguf: &Gguf) -> Result<(), ConfigError> {
    let DecoderConfig { hidden, heads, kv_heads, key_length, value_length, feed_forward, vocabulary, .. } = *config;
    if !heads.is_multiple_of(kv_heads) {
        return Err(ConfigError::Invalid {
            file: gguf.name().to_owned(),
            key: format!("{}.attention.head_count_kv", config.architecture),
            must: "a divisor of the number of query heads",
            is: kv_heads.to_string(),
        });
    }
    let tensors = &config.tensors;
    shaped(gguf, &tensors.embedding, &[hidden, vocabulary])?;
    shaped(gguf, &tensors.output_norm, &[hidden])?;
    shaped(gguf, &tensors.head, &[hidden, vocabulary])?;
    for layer in &config.layer_tensors {
        let (queries, keys, values) = (heads * key_length, kv_heads * key_length, kv_heads * value_length);
        shaped(gguf, &layer.attention_norm, &[hidden])?;
        shaped(gguf, &layer.query, &[hidden, queries])?;
        shaped(gguf, &layer.key, &[hidden, keys])?;
        shaped(gguf, &layer.value, &[hidden, values])?;
        shaped(gguf, &layer.attention_output, &[heads * value_length, hidden])?;
        shaped(gguf, &layer.feed_forward_norm, &[hidden])?;
        shaped(gguf, &layer.gate, &[hidden, feed_forward])?;
        shaped(gguf, &layer.up, &[hidden, feed_forward])?;
        shaped(gguf, &layer.down, &[feed_forward, hidden])?;
        let perhaps = [
            (&layer.query_bias, queries),
            (&layer.key_bias, keys),
            (&layer.value_bias, values),
            (&layer.attention_output_bias, hidden),
            (&layer.query_norm, key_length),
            (&layer.key_norm, key_length),
            (&layer.post_attention_norm, hidden),
            (&layer.post_feed_forward_norm, hidden),
        ];
        for (name, length) in perhaps {
            if let Some(name) = name {
                shaped(gguf, name, &[length])?;
            }
        }
    }
    nothing_else(config, gguf)
}

/// Frequencies that old converters wrote for each layer; they follow from the hyperparameters.
const SUPERFLUOUS: [&str; 2] = ["attn_rot_embd", "attn_rot_embd.weight"];

/// Makes sure that layers have no tensor that the decoder would ignore: leaving out a bias, a norm or an expert gives
/// answers that only look right.
fn nothing_else(config: &DecoderConfig, gguf: &Gguf) -> Result<(), ConfigError> {
    let used: BTreeSet<&str> = config.layer_tensors.iter().flat_map(|layer| layer.names()).collect();
    let unused = gguf.tensors().map(|view| view.name).find(|name| {
        let Some((_, part)) = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else { return false };
        !used.contains(name) && !SUPERFLUOUS.contains(&part)
    });
    match unused {
        None => Ok(()),
        Some(name) => Err(ConfigError::Unsupported {
            file: gguf.name().to_owned(),
            what: format!("the tensor {name:?} in {} models", config.architecture),
        }),
    }
}
