//! The sizes that a planner needs.

use super::tensors::Kind;
use super::{ConfigError, DecoderConfig, Experts, Part};
use crate::card::ModelCard;
use crate::gguf::Gguf;
use crate::kernels::matrix_bytes;
use crate::quant::BlockType;
use crate::shown::shown;
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
        let tensors = &config.tensors;
        let matrix = |name: &String| Part::whole(name);
        let end = Kind::Matrix(config.hidden, config.vocabulary);
        let (embedding, head) = (matrix(&tensors.embedding), matrix(&tensors.head));
        let norm: Vec<_> = tensors.output_norm.parts(config.hidden).collect();
        let layers: Vec<_> = config.layer_tensors.iter().map(|layer| layer.parts(config)).collect();
        let bytes = |parts: &[(&Part, Kind)]| parts.iter().map(|(part, kind)| held_bytes(gguf, part, *kind)).sum::<u64>();
        let mut all: Vec<(&Part, Kind)> = layers.iter().flatten().copied().chain(norm.iter().copied()).collect();
        all.push((&embedding, end));
        if !config.tied_head() {
            all.push((&head, end));
        }
        let name = gguf.str("general.name").filter(|name| !name.trim().is_empty()).unwrap_or(&config.architecture);
        ModelCard {
            architecture: config.architecture.clone(),
            name: shown(name),
            quantisation: commonest(gguf, &all).name().to_owned(),
            parameters: all.iter().map(|(_, kind)| kind.elements()).sum(),
            // Each of these is bounded by the shape of a tensor, or was bounded when it was read.
            layers: config.layers as u32,
            hidden: config.hidden as u32,
            heads: config.heads as u32,
            kv_heads: config.kv_heads as u32,
            head_dim: config.key_length as u32,
            feed_forward: config.feed_forward.max(config.experts.as_ref().map_or(0, Experts::width)).min(u32::MAX as usize) as u32,
            vocabulary: config.vocabulary as u32,
            context_tokens: config.context_tokens as u32,
            embedding_bytes: bytes(&[(&embedding, end)]),
            head_bytes: bytes(&norm) + bytes(&[(&head, end)]),
            tied_head: config.tied_head(),
            layer_bytes: layers.iter().map(|parts| bytes(parts)).collect(),
            kv_bytes_per_token: config.kv_bytes_per_token(),
            file_bytes: gguf.file_bytes(),
        }
    }
}

/// Memory of a part as loaded: matrices stay quantised, vectors become `f32`.
fn held_bytes(gguf: &Gguf, part: &Part, kind: Kind) -> u64 {
    let Some(block) = gguf.tensor(&part.tensor).map(|view| view.block) else { return 0 };
    let matrix = |columns, rows| matrix_bytes(block, rows, columns).unwrap_or(0);
    match kind {
        Kind::Matrix(columns, rows) => matrix(columns, rows),
        Kind::Matrices(columns, rows, count) => matrix(columns, rows).saturating_mul(count as u64),
        Kind::Vector(_) | Kind::Vectors(..) => kind.elements() * size_of::<f32>() as u64,
    }
}

impl Kind {
    fn elements(self) -> u64 {
        let lengths = match self {
            Kind::Vector(length) => [length, 1, 1],
            Kind::Matrix(columns, rows) => [columns, rows, 1],
            Kind::Vectors(length, count) => [length, count, 1],
            Kind::Matrices(columns, rows, count) => [columns, rows, count],
        };
        lengths.iter().map(|&length| length as u64).product()
    }
}

/// The type that most elements of matrices have.
fn commonest(gguf: &Gguf, parts: &[(&Part, Kind)]) -> BlockType {
    let mut elements = BTreeMap::<BlockType, u64>::new();
    for (part, kind) in parts.iter().filter(|(_, kind)| matches!(kind, Kind::Matrix(..) | Kind::Matrices(..))) {
        if let Some(view) = gguf.tensor(&part.tensor) {
            *elements.entry(view.block).or_default() += kind.elements();
        }
    }
    elements.into_iter().max_by_key(|(_, count)| *count).map_or(BlockType::F32, |(block, _)| block)
}
