//! The sizes that a planner needs.

use super::{ConfigError, DecoderConfig};
use crate::card::ModelCard;
use crate::gguf::{Gguf, TensorView};
use crate::kernels::matrix_bytes;
use crate::quant::BlockType;
use std::collections::BTreeMap;

impl ModelCard {
    /// Reads a model's card from its file's header.
    ///
    /// # Errors
    /// As [`DecoderConfig::from_gguf`].
    pub fn from_gguf(gguf: &Gguf) -> Result<ModelCard, ConfigError> {
        let config = DecoderConfig::from_gguf(gguf)?;
        Ok(ModelCard::of(&config, gguf))
    }

    /// The card of a model whose configuration has been read already.
    pub fn of(config: &DecoderConfig, gguf: &Gguf) -> ModelCard {
        // The configuration was held against the file, so every tensor that it names is there.
        let bytes = |name: &str| gguf.tensor(name).map_or(0, |view| held_bytes(&view));
        let tensors = &config.tensors;
        let ends = [tensors.embedding.as_str(), tensors.output_norm.as_str()];
        let head = (!config.tied_head()).then_some(tensors.head.as_str());
        let layers = config.layer_tensors.iter().flat_map(|layer| layer.names());
        let all: Vec<TensorView<'_>> = ends.into_iter().chain(head).chain(layers).filter_map(|name| gguf.tensor(name)).collect();
        let name = gguf.str("general.name").filter(|name| !name.trim().is_empty()).unwrap_or(&config.architecture);
        ModelCard {
            architecture: config.architecture.clone(),
            name: name.to_owned(),
            quantisation: commonest(&all).name().to_owned(),
            parameters: all.iter().map(|view| view.elements() as u64).sum(),
            // Each of these is bounded by the shape of a tensor, or was bounded when it was read.
            layers: config.layers as u32,
            hidden: config.hidden as u32,
            heads: config.heads as u32,
            kv_heads: config.kv_heads as u32,
            head_dim: config.key_length as u32,
            feed_forward: config.feed_forward as u32,
            vocabulary: config.vocabulary as u32,
            context_tokens: config.context_tokens as u32,
            embedding_bytes: bytes(&tensors.embedding),
            head_bytes: bytes(&tensors.output_norm) + bytes(&tensors.head),
            tied_head: config.tied_head(),
            layer_bytes: config.layer_tensors.iter().map(|layer| layer.names().map(bytes).sum()).collect(),
            kv_bytes_per_token: config.kv_bytes_per_token(),
            file_bytes: gguf.file_bytes(),
        }
    }
}

/// Memory of a tensor as loaded: matrices stay quantised, vectors become `f32`.
fn held_bytes(view: &TensorView<'_>) -> u64 {
    if view.rows() == 1 {
        (view.elements() * size_of::<f32>()) as u64
    } else {
        // A type without kernels will not be loaded, so its size does not matter.
        matrix_bytes(view.block, view.rows(), view.row_len()).unwrap_or(view.bytes.len() as u64)
    }
}

/// The type that most elements of matrices have.
fn commonest(tensors: &[TensorView<'_>]) -> BlockType {
    let mut elements = BTreeMap::<BlockType, usize>::new();
    for view in tensors.iter().filter(|view| view.rows() > 1) {
        *elements.entry(view.block).or_default() += view.elements();
    }
    elements.into_iter().max_by_key(|(_, count)| *count).map_or(BlockType::F32, |(block, _)| block)
}
