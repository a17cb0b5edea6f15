//! What a layer costs on a node, in time and in memory.
//!
//! Time follows the roofline: a step reads each weight once, whatever its rows, and multiplies once for each row; the
//! slower of the two counts. Times are whole picoseconds, so that sums do not depend on their order and equal nodes
//! are equal to the last digit.

use std::collections::BTreeMap;
use std::ops::Range;

use super::types::{Goal, StageMemory};
use super::{ANSWER_TOKENS, LAYERS_MAX, PROMPT_TOKENS};
use crate::card::{DeviceCard, DeviceKind, ModelCard, NodeCard};
use crate::ids::NodeId;

/// A picosecond count.
pub(super) type Picos = u64;

/// What one step costs beside its layers: a wake-up, a frame, a checksum.
const STEP_OVERHEAD: Picos = 30_000_000;

/// What is assumed of a device that was not measured: a slow one, so that measured ones go first.
const UNKNOWN_READ_BYTES_PER_SECOND: f64 = 5e9;
const UNKNOWN_MULTIPLY_ADDS_PER_SECOND: f64 = 2e10;

/// Tokens of a KV page: the cache grows by whole pages.
const KV_PAGE_TOKENS: u64 = 64;

/// Activation buffers of a stage: two to receive into, two to send from.
const ACTIVATION_BUFFERS: u64 = 4;

/// One part in so many of weights and cache is added for what nobody counted.
const HEADROOM_DIVISOR: u64 = 64;

/// And this, however small the stage is.
const HEADROOM_BYTES: u64 = 1 << 20;

/// How fast a node is, by measurement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Speed {
    pub(super) read: f64,
    pub(super) multiply_adds: f64,
}

/// Whether the time of a step goes into reading or into arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bound {
    Reading,
    Arithmetic,
}

fn device(card: &NodeCard) -> Option<&DeviceCard> {
    card.devices.iter().find(|d| d.kind != DeviceKind::UnusedGpu)
}

/// The nodes' speeds. Nodes of one machine measure the same device, and what one measured while the other was busy
/// says nothing about either: they share the average.
pub(super) fn speeds(cards: &[&NodeCard]) -> BTreeMap<NodeId, Speed> {
    let sane = |value: f64, unknown: f64| if value.is_finite() && value > 0.0 { value } else { unknown };
    let own = |card: &NodeCard| {
        let (read, multiply_adds) = device(card).map_or((0.0, 0.0), |d| (d.read_bytes_per_second, d.multiply_adds_per_second));
        Speed { read: sane(read, UNKNOWN_READ_BYTES_PER_SECOND), multiply_adds: sane(multiply_adds, UNKNOWN_MULTIPLY_ADDS_PER_SECOND) }
    };
    let mut sorted: Vec<&NodeCard> = cards.to_vec();
    sorted.sort_by_key(|card| card.node);
    let mut shared: BTreeMap<(u128, &str), (f64, f64, f64)> = BTreeMap::new();
    let key = |card: &'_ NodeCard| card.host;
    for card in &sorted {
        let name = device(card).map_or("", |d| d.name.as_str());
        let speed = own(card);
        let sum = shared.entry((key(card), name)).or_default();
        *sum = (sum.0 + speed.read, sum.1 + speed.multiply_adds, sum.2 + 1.0);
    }
    sorted
        .iter()
        .map(|card| {
            let name = device(card).map_or("", |d| d.name.as_str());
            let (read, multiply_adds, count) = shared.get(&(key(card), name)).copied().unwrap_or((0.0, 0.0, 1.0));
            (card.node, Speed { read: read / count, multiply_adds: multiply_adds / count })
        })
        .collect()
}

/// A model's work and memory, layer by layer.
#[derive(Debug)]
pub(super) struct Work<'a> {
    pub(super) model: &'a ModelCard,
    pub(super) goal: &'a Goal,
    /// Multiply-adds of one row, by layer.
    multiply_adds: Vec<f64>,
    head_multiply_adds: f64,
    /// `weights[l]`: bytes of the first `l` layers.
    weights: Vec<u64>,
    /// Memory of every possible stage in all, by first layer and length: the split asks for it all the time.
    totals: Vec<Vec<u64>>,
}

impl<'a> Work<'a> {
    pub(super) fn new(model: &'a ModelCard, goal: &'a Goal) -> Self {
        let hidden = f64::from(model.hidden);
        let query = f64::from(model.heads) * f64::from(model.head_dim);
        let keys = f64::from(model.kv_heads) * f64::from(model.head_dim);
        let layer = hidden * (2.0 * query + 2.0 * keys + 3.0 * f64::from(model.feed_forward));
        let bytes: f64 = model.layer_bytes.iter().map(|&b| b as f64).sum();
        let average = bytes / model.layer_bytes.len().max(1) as f64;
        // A layer that is larger than its sisters has that much more to multiply.
        let multiply_adds = model.layer_bytes.iter().map(|&b| if average > 0.0 { layer * b as f64 / average } else { layer }).collect();
        let mut weights = vec![0];
        for &bytes in &model.layer_bytes {
            weights.push(weights.last().copied().unwrap_or(0_u64).saturating_add(bytes));
        }
        let head_multiply_adds = hidden * f64::from(model.vocabulary);
        let mut work = Self { model, goal, multiply_adds, head_multiply_adds, weights, totals: Vec::new() };
        let layers = work.layers();
        work.totals = (0..layers).map(|from| (from + 1..=layers).map(|to| work.memory(from, to).total()).collect()).collect();
        work
    }

    /// Memory that the stage of layers `from..to` leases in all.
    pub(super) fn total(&self, from: usize, to: usize) -> u64 {
        self.totals[from][to - from - 1]
    }

    pub(super) fn layers(&self) -> usize {
        self.model.layer_bytes.len()
    }

    /// Prompt chunks of the reference prompt, and the rows of one.
    pub(super) fn chunks(&self) -> (u64, u64) {
        let rows = u64::from(self.goal.rows_max).clamp(1, PROMPT_TOKENS);
        let chunks = PROMPT_TOKENS.div_ceil(rows);
        (chunks, PROMPT_TOKENS.div_ceil(chunks))
    }

    /// How many groups of sequences are in the pipeline at once, and the rows of one.
    pub(super) fn groups(&self, stages: usize) -> (u64, u64) {
        let sequences = u64::from(self.goal.sequences.max(1));
        let groups = sequences.min(stages as u64).max(1);
        (groups, sequences.div_ceil(groups))
    }

    /// Bytes of activations that `rows` rows carry from stage to stage.
    pub(super) fn activation_bytes(&self, rows: u64) -> f64 {
        rows as f64 * f64::from(self.model.hidden) * 4.0
    }

    /// One layer, one step of `rows` rows of which each looks back at `context` tokens.
    fn layer_seconds(&self, layer: usize, speed: Speed, rows: u64, context: u64, own_cache: bool) -> (f64, f64) {
        let rows = rows as f64;
        let kv = self.model.kv_bytes_per_token as f64 * context as f64;
        // Rows of one prompt share what they read of the cache; sequences do not.
        let cache = if own_cache { kv * rows } else { kv };
        let attention = 2.0 * f64::from(self.model.heads) * f64::from(self.model.head_dim) * context as f64;
        let read = (self.model.layer_bytes[layer] as f64 + cache) / speed.read;
        let multiply = rows * (self.multiply_adds[layer] + attention) / speed.multiply_adds;
        (read, multiply)
    }

    /// One layer while a chunk of the reference prompt is read.
    pub(super) fn chunk_picos(&self, layer: usize, speed: Speed) -> Picos {
        let (_, rows) = self.chunks();
        let (read, multiply) = self.layer_seconds(layer, speed, rows, PROMPT_TOKENS / 2, false);
        picos(read.max(multiply))
    }

    /// One layer while one token of each of `rows` sequences is made.
    pub(super) fn token_picos(&self, layer: usize, speed: Speed, rows: u64) -> Picos {
        let (read, multiply) = self.layer_seconds(layer, speed, rows, PROMPT_TOKENS + ANSWER_TOKENS / 2, true);
        picos(read.max(multiply))
    }

    /// What bounds a token of a single sequence on a node.
    pub(super) fn token_bound(&self, speed: Speed) -> Bound {
        let (read, multiply) = self.layer_seconds(0, speed, 1, PROMPT_TOKENS + ANSWER_TOKENS / 2, true);
        if read >= multiply { Bound::Reading } else { Bound::Arithmetic }
    }

    /// The output head for `rows` rows.
    pub(super) fn head_picos(&self, speed: Speed, rows: u64) -> Picos {
        let read = self.model.head_bytes as f64 / speed.read;
        let multiply = rows as f64 * self.head_multiply_adds / speed.multiply_adds;
        picos(read.max(multiply))
    }

    /// What a stage costs beside its layers, in each step.
    pub(super) fn overhead_picos(&self) -> Picos {
        STEP_OVERHEAD
    }

    /// What the stage of layers `from..to` leases.
    pub(super) fn memory(&self, from: usize, to: usize) -> StageMemory {
        let model = self.model;
        let (first, last) = (from == 0, to == self.layers());
        let ends = match (first, last) {
            (true, true) if model.tied_head => model.embedding_bytes.max(model.head_bytes),
            (true, true) => model.embedding_bytes.saturating_add(model.head_bytes),
            (true, false) => model.embedding_bytes,
            (false, true) => model.head_bytes,
            (false, false) => 0,
        };
        let weights = (self.weights[to] - self.weights[from]).saturating_add(ends);

        let pages = u64::from(self.goal.context_tokens).div_ceil(KV_PAGE_TOKENS) * u64::from(self.goal.sequences);
        let tokens = pages.saturating_mul(KV_PAGE_TOKENS);
        let kv = model.kv_bytes_per_token.saturating_mul(tokens).saturating_mul((to - from) as u64);

        let wide = |value: u32| u64::from(value);
        let inner = 2 * wide(model.hidden)
            + 2 * wide(model.feed_forward)
            + (wide(model.heads) + 2 * wide(model.kv_heads)).saturating_mul(wide(model.head_dim));
        let row = (ACTIVATION_BUFFERS * wide(model.hidden)).saturating_add(inner).saturating_mul(4);
        let mut activations = row.saturating_mul(wide(self.goal.rows_max));
        if last {
            let sampled = wide(self.goal.sequences).min(wide(self.goal.rows_max));
            activations = activations.saturating_add(sampled.saturating_mul(wide(model.vocabulary)).saturating_mul(4));
        }
        let headroom = weights.saturating_add(kv) / HEADROOM_DIVISOR + HEADROOM_BYTES;
        StageMemory { weights, kv, activations: activations.saturating_add(headroom) }
    }
}

/// Seconds as picoseconds; what does not fit is as good as for ever.
pub(super) fn picos(seconds: f64) -> Picos {
    // Far from the limit, so that sums of many such times still fit.
    const FOREVER: f64 = 1e16;
    (seconds * 1e12).clamp(0.0, FOREVER).round() as Picos
}

/// The least that a stage of these layers takes: its weights, and what a step of `rows_max` rows needs beside them. Keys and values
/// are none of it. `None` if the model has no such layers.
pub fn least(model: &ModelCard, layers: &Range<u32>, rows_max: u32) -> Option<StageMemory> {
    let goal = Goal { context_tokens: 1, sequences: 1, rows_max, ..Goal::default() };
    let inside = layers.start < layers.end && layers.end as usize <= model.layer_bytes.len() && model.layer_bytes.len() <= LAYERS_MAX;
    inside.then(|| Work::new(model, &goal).memory(layers.start as usize, layers.end as usize))
}
