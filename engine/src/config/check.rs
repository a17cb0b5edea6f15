//! Holds a configuration against the file's tensors, both ways.

use super::hyper::Hyper;
use super::tensors::Kind;
use super::{ConfigError, DecoderConfig, FeedForward, ModelTensors, Part};
use crate::gguf::{Gguf, TensorView};
use std::collections::BTreeMap;

/// Layers at the end that predict further tokens from what the others put out.
const GUESSING: &str = "nextn_predict_layers";

/// The number of layers. Each has tensors, so there are no more of them than tensors in the file; which keeps a false
/// count from costing memory.
pub(super) fn layers(hyper: &Hyper<'_>) -> Result<usize, ConfigError> {
    const KEY: &str = "block_count";
    let layers = hyper.count(KEY)?;
    if layers > hyper.gguf().tensors().len() {
        return Err(hyper.invalid(KEY, "no larger than the number of tensors", layers));
    }
    // The last of them may be for guessing further tokens, and are not needed.
    match hyper.count_or_zero(GUESSING)? {
        Some(guessing) if guessing >= layers => Err(hyper.invalid(GUESSING, "less than the number of layers", guessing)),
        Some(guessing) => Ok(layers - guessing),
        None => Ok(layers),
    }
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

/// Makes sure that a part's tensor has the shape that follows from what the part is.
fn part_shaped(gguf: &Gguf, part: &Part, kind: Kind) -> Result<(), ConfigError> {
    let mut expected = match kind {
        Kind::Vector(length) => vec![length],
        Kind::Matrix(columns, rows) => vec![columns, rows],
        Kind::Vectors(length, count) => vec![length, count],
        Kind::Matrices(columns, rows, count) => vec![columns, rows, count],
    };
    if let (Some(rows), Some(last)) = (&part.rows, expected.last_mut()) {
        // Of a tensor that holds several parts, which follow each other to its end.
        let view = tensor(gguf, &part.tensor)?;
        let all = view.shape.get(usize::from(matches!(kind, Kind::Matrix(..)))).map_or(1, |&length| length as usize);
        *last = all.max(rows.end);
    }
    shaped(gguf, &part.tensor, &expected).map(|_| ())
}

/// Checks what does not depend on the architecture.
pub(super) fn check(config: &DecoderConfig, gguf: &Gguf) -> Result<(), ConfigError> {
    let DecoderConfig { hidden, heads, kv_heads, vocabulary, .. } = *config;
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
    for (part, kind) in tensors.output_norm.parts(hidden) {
        part_shaped(gguf, part, kind)?;
    }
    shaped(gguf, &tensors.head, &[hidden, vocabulary])?;
    for layer in &config.layer_tensors {
        let width = match (&layer.feed_forward, &config.experts) {
            (FeedForward::Dense(_), _) => ("feed_forward_length", config.feed_forward),
            (FeedForward::Experts(_), Some(experts)) => ("expert_feed_forward_length", experts.feed_forward),
            (FeedForward::Experts(_), None) => ("expert_count", 0),
        };
        if width.1 == 0 {
            return Err(ConfigError::Missing { file: gguf.name().to_owned(), key: format!("{}.{}", config.architecture, width.0) });
        }
        for (part, kind) in layer.parts(config) {
            part_shaped(gguf, part, kind)?;
        }
    }
    nothing_else(config, gguf)
}

/// Frequencies that old converters wrote for each layer; they follow from the hyperparameters.
const SUPERFLUOUS: [&str; 2] = ["attn_rot_embd", "attn_rot_embd.weight"];

/// Makes sure that layers have no tensor, nor rows of one, that the decoder would ignore: leaving out a bias, a norm or an expert gives
/// answers that only look right.
fn nothing_else(config: &DecoderConfig, gguf: &Gguf) -> Result<(), ConfigError> {
    // Each tensor that is used, and up to which row if only parts of it are.
    let mut used = BTreeMap::<&str, usize>::new();
    let guessing = gguf.u64(&format!("{}.{GUESSING}", config.architecture)).unwrap_or(0);
    let guessing = config.layers as u64..(config.layers as u64).saturating_add(guessing);
    let lists: Vec<_> = config.layer_tensors.iter().map(|layer| layer.parts(config)).collect();
    for (part, _) in lists.iter().flatten() {
        let end = part.rows.as_ref().map_or(usize::MAX, |rows| rows.end);
        let most = used.entry(part.tensor.as_str()).or_default();
        *most = end.max(*most);
    }
    let unused = gguf.tensors().find(|view| {
        let Some((layer, part)) = view.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else { return false };
        if SUPERFLUOUS.contains(&part) || layer.parse().is_ok_and(|layer: u64| guessing.contains(&layer)) {
            return false;
        }
        let all = if view.shape.len() > 1 { view.rows() } else { view.row_len() };
        used.get(view.name).is_none_or(|&end| end < all)
    });
    match unused {
        None => Ok(()),
        Some(view) => Err(ConfigError::Unsupported {
            file: gguf.name().to_owned(),
            what: format!("the tensor {:?} in {} models", view.name, config.architecture),
        }),
    }
}
