//! Small models with random weights.

use crate::gguf::{Gguf, Value, Writer};
use crate::kernels::testing::{Numbers, TYPES, random_blocks};
use crate::quant::BlockType;

pub(super) const HIDDEN: usize = 256;
pub(super) const HEADS: usize = 4;
pub(super) const KV_HEADS: usize = 2;
pub(super) const HEAD: usize = 32;
pub(super) const FEED_FORWARD: usize = 512;
pub(super) const VOCABULARY: usize = 90;
pub(super) const LAYERS: usize = 4;
const WINDOW: u32 = 20;

/// A llama file whose matrices take turns with all types, or are all of one.
pub(super) fn llama(block: Option<BlockType>, tied: bool) -> Gguf {
    let mut file = File::new("llama", block);
    file.number("rope.freq_base", Value::F32(10_000.0));
    file.number("rope.dimension_count", Value::U32(HEAD as u32));
    for layer in 0..LAYERS {
        file.layer(layer);
        if layer == 1 {
            file.vector(&format!("blk.{layer}.attn_q.bias"), HEADS * HEAD, 0.0);
            file.vector(&format!("blk.{layer}.attn_k.bias"), KV_HEADS * HEAD, 0.0);
            file.vector(&format!("blk.{layer}.attn_output.bias"), HIDDEN, 0.0);
        }
    }
    file.ends(tied)
}

/// A Gemma 3 file with windows of 20 tokens.
pub(super) fn gemma() -> Gguf {
    let mut file = File::new("gemma3", None);
    file.number("attention.sliding_window", Value::U32(WINDOW));
    file.number("attention.sliding_window_pattern", Value::U32(2));
    file.number("rope.freq_base", Value::F32(1_000_000.0));
    file.number("final_logit_softcapping", Value::F32(30.0));
    for layer in 0..LAYERS {
        file.layer(layer);
        for (name, size) in [("attn_q_norm", HEAD), ("attn_k_norm", HEAD), ("post_attention_norm", HIDDEN), ("post_ffw_norm", HIDDEN)] {
            file.vector(&format!("blk.{layer}.{name}.weight"), size, 1.0);
        }
    }
    file.ends(true)
}

struct File {
    writer: Writer,
    architecture: &'static str,
    block: Option<BlockType>,
    seed: u64,
}

impl File {
    fn new(architecture: &'static str, block: Option<BlockType>) -> Self {
        let mut file = Self { writer: Writer::new(), architecture, block, seed: 0 };
        file.writer.metadata("general.architecture", Value::String(architecture.to_owned()));
        for (key, value) in [
            ("embedding_length", HIDDEN),
            ("attention.head_count", HEADS),
            ("attention.head_count_kv", KV_HEADS),
            ("attention.key_length", HEAD),
            ("attention.value_length", HEAD),
            ("feed_forward_length", FEED_FORWARD),
            ("block_count", LAYERS),
            ("context_length", 512),
        ] {
            file.number(key, Value::U32(value as u32));
        }
        file.number("attention.layer_norm_rms_epsilon", Value::F32(1e-5));
        file
    }

    fn number(&mut self, key: &str, value: Value) {
        self.writer.metadata(&format!("{}.{key}", self.architecture), value);
    }

    fn matrix(&mut self, name: &str, columns: usize, rows: usize) {
        self.seed += 1;
        let block = self.block.unwrap_or(TYPES[self.seed as usize % TYPES.len()]);
        let bytes = random_blocks(block, columns * rows, self.seed);
        self.writer.tensor(name, &[columns as u64, rows as u64], block, bytes);
    }

    fn vector(&mut self, name: &str, size: usize, centre: f32) {
        self.seed += 1;
        let values = Numbers::new(self.seed).units(size).into_iter().flat_map(|v| (centre + 0.3 * v).to_le_bytes()).collect();
        self.writer.tensor(name, &[size as u64], BlockType::F32, values);
    }

    fn layer(&mut self, layer: usize) {
        for (name, columns, rows) in [
            ("attn_q", HIDDEN, HEADS * HEAD),
            ("attn_k", HIDDEN, KV_HEADS * HEAD),
            ("attn_v", HIDDEN, KV_HEADS * HEAD),
            ("ffn_gate", HIDDEN, FEED_FORWARD),
            ("ffn_up", HIDDEN, FEED_FORWARD),
            ("ffn_down", FEED_FORWARD, HIDDEN),
        ] {
            self.matrix(&format!("blk.{layer}.{name}.weight"), columns, rows);
        }
        // 128 columns are no whole super-block of a K-quant.
        let block = self.block.filter(|block| block.block_len() <= 32).unwrap_or(BlockType::Q8_0);
        let bytes = random_blocks(block, HEADS * HEAD * HIDDEN, self.seed + 77);
        self.writer.tensor(&format!("blk.{layer}.attn_output.weight"), &[(HEADS * HEAD) as u64, HIDDEN as u64], block, bytes);
        self.vector(&format!("blk.{layer}.attn_norm.weight"), HIDDEN, 1.0);
        self.vector(&format!("blk.{layer}.ffn_norm.weight"), HIDDEN, 1.0);
    }

    fn ends(mut self, tied: bool) -> Gguf {
        self.matrix("token_embd.weight", HIDDEN, VOCABULARY);
        self.vector("output_norm.weight", HIDDEN, 1.0);
        if !tied {
            self.matrix("output.weight", HIDDEN, VOCABULARY);
        }
        Gguf::parse(self.writer.finish()).unwrap()
    }
}
