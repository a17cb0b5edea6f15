//! Rotary embedding, the paged cache, and attention over it.
//!
//! A cube has as many units as a page has positions. Keys of a head lie in a page with the positions next to each other, two elements
//! to a word (`[page][head][pair of elements][position]`), so that each unit forms the score of one position and neighbours read
//! neighbouring words; values lie with the pairs next to each other (`[page][head][position][pair]`), so that each unit sums some
//! pairs over the positions. The softmax goes along page by page: what was summed is scaled down when a larger score comes.

use cubecl::prelude::*;

use super::product::tanh;
use super::words::{float_to_half, half_to_float};
use crate::kernels::PAGE_TOKENS;

/// Units of a cube.
pub(super) const UNITS: usize = PAGE_TOKENS;

/// Words of a row in the table of rows: position, where its pages begin in the table, place in the cache of its own key.
pub(super) const ROW_WORDS: usize = 3;

/// A score that no position has.
const LEAST: f32 = -1e30;

/// How a head is placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Head {
    /// Elements.
    pub(super) length: usize,
    /// Pairs of them that are turned.
    pub(super) pairs: usize,
    /// Whether the first half's elements are paired with the second half's, rather than each with its neighbour.
    pub(super) halves: bool,
    /// Whether the head is normalised first.
    pub(super) normed: bool,
}

/// What the kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    /// Heads of queries, or of keys.
    pub(super) head: Head,
    /// Elements of a value head.
    pub(super) value_length: usize,
    /// Query heads.
    pub(super) heads: usize,
    /// Key and value heads.
    pub(super) kv_heads: usize,
    /// Whether scores are capped.
    pub(super) capped: bool,
    /// Whether each head has a score that takes its share and gives nothing.
    pub(super) sinks: bool,
}

impl Shape {
    fn key_words(&self) -> usize {
        self.head.length.div_ceil(2)
    }

    fn value_words(&self) -> usize {
        self.value_length.div_ceil(2)
    }
}

/// The sum of the units' values, to each of them.
#[cube]
fn sum_of(shared: &mut Shared<[f32]>, value: f32) -> f32 {
    let unit = UNIT_POS as usize;
    shared[unit] = value;
    sync_cube();
    let mut step = comptime!(UNITS / 2).runtime();
    while step > 0 {
        if unit < step {
            shared[unit] = shared[unit] + shared[unit + step];
        }
        sync_cube();
        step /= 2;
    }
    let sum = shared[0];
    sync_cube();
    sum
}

/// The largest of the units' values, to each of them.
#[cube]
fn largest_of(shared: &mut Shared<[f32]>, value: f32) -> f32 {
    let unit = UNIT_POS as usize;
    shared[unit] = value;
    sync_cube();
    let mut step = comptime!(UNITS / 2).runtime();
    while step > 0 {
        if unit < step {
            shared[unit] = max(shared[unit], shared[unit + step]);
        }
        sync_cube();
        step /= 2;
    }
    let largest = shared[0];
    sync_cube();
    largest
}

/// Normalises and turns the head that begins at `from`, into `placed`.
#[cube]
fn place(
    source: &[f32],
    from: usize,
    gain: &[f32],
    epsilon: f32,
    angles: &[f32],
    row: usize,
    raw: &mut Shared<[f32]>,
    placed: &mut Shared<[f32]>,
    shared: &mut Shared<[f32]>,
    #[comptime] head: Head,
) {
    let unit = UNIT_POS as usize;
    let length = comptime!(head.length);
    let pairs = comptime!(head.pairs);
    let mut square = f32::new(0.0);
    let mut i = unit;
    while i < length {
        let value = source[from + i];
        raw[i] = value;
        square += value * value;
        i += comptime!(UNITS);
    }
    if comptime!(head.normed) {
        let mean = sum_of(shared, square) / comptime!(head.length as f32);
        let factor = f32::new(1.0) / (mean + epsilon).sqrt();
        let mut i = unit;
        while i < length {
            raw[i] = raw[i] * factor * gain[i];
            i += comptime!(UNITS);
        }
    }
    sync_cube();
    let mut pair = unit;
    while pair < pairs {
        let mut first = pair * 2;
        let mut second = pair * 2 + 1;
        if comptime!(head.halves) {
            first = pair;
            second = pair + pairs;
        }
        let cos = angles[row * 2 * pairs + pair];
        let sin = angles[(row * 2 + 1) * pairs + pair];
        let a = raw[first];
        let b = raw[second];
        placed[first] = a * cos - b * sin;
        placed[second] = a * sin + b * cos;
        pair += comptime!(UNITS);
    }
    let mut i = unit + comptime!(2 * head.pairs);
    while i < length {
        placed[i] = raw[i];
        i += comptime!(UNITS);
    }
    sync_cube();
}

/// Puts keys, normalised and turned, and values into the cache. A cube takes one head of one row.
#[cube(launch_unchecked)]
pub(super) fn store(
    keys: &[f32],
    values: &[f32],
    gain: &[f32],
    angles: &[f32],
    rows: &[u32],
    key_cache: &mut [u32],
    value_cache: &mut [u32],
    epsilon: f32,
    #[comptime] shape: Shape,
) {
    let row = CUBE_POS_X as usize;
    let head = CUBE_POS_Y as usize;
    let length = comptime!(shape.head.length);
    let value_length = comptime!(shape.value_length);
    let key_words = comptime!(shape.key_words());
    let value_words = comptime!(shape.value_words());
    let mut raw = Shared::<[f32]>::new_slice(length);
    let mut placed = Shared::<[f32]>::new_slice(length);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(UNITS));
    let from = (row * comptime!(shape.kv_heads) + head) * length;
    place(keys, from, gain, epsilon, angles, row, &mut raw, &mut placed, &mut shared, comptime!(shape.head));
    let slot = rows[row * comptime!(ROW_WORDS) + 2] as usize;
    let page = slot / comptime!(PAGE_TOKENS);
    let position = slot % comptime!(PAGE_TOKENS);
    let place = page * comptime!(shape.kv_heads) + head;
    let mut word = UNIT_POS as usize;
    while word < key_words {
        let mut bits = float_to_half(placed[word * 2]);
        if word * 2 + 1 < length {
            bits |= float_to_half(placed[word * 2 + 1]) << 16u32;
        }
        key_cache[(place * key_words + word) * comptime!(PAGE_TOKENS) + position] = bits;
        word += comptime!(UNITS);
    }
    let from = (row * comptime!(shape.kv_heads) + head) * value_length;
    let mut word = UNIT_POS as usize;
    while word < value_words {
        let mut bits = float_to_half(values[from + word * 2]);
        if word * 2 + 1 < value_length {
            bits |= float_to_half(values[from + word * 2 + 1]) << 16u32;
        }
        value_cache[(place * comptime!(PAGE_TOKENS) + position) * value_words + word] = bits;
        word += comptime!(UNITS);
    }
}

/// Normalises and turns queries, and attends. A cube takes one head of one row. `rows` is the table of rows, and after it come the
/// pages of all sequences. Scores are multiplied with `scale · (1 + growth · ln(1 + ⌊position / every⌋))`.
#[cube(launch_unchecked)]
pub(super) fn attend(
    queries: &[f32],
    gain: &[f32],
    angles: &[f32],
    key_cache: &[u32],
    value_cache: &[u32],
    rows: &[u32],
    sinks: &[f32],
    out: &mut [f32],
    epsilon: f32,
    scale: f32,
    growth: f32,
    every: u32,
    cap: f32,
    window: u32,
    #[comptime] shape: Shape,
) {
    let row = CUBE_POS_X as usize;
    let head = CUBE_POS_Y as usize;
    let unit = UNIT_POS as usize;
    let kv_head = head / comptime!(shape.heads / shape.kv_heads);
    let length = comptime!(shape.head.length);
    let value_length = comptime!(shape.value_length);
    let key_words = comptime!(shape.key_words());
    let value_words = comptime!(shape.value_words());
    // How many pairs of value elements a unit sums.
    let mine = comptime!(shape.value_words().div_ceil(UNITS));
    let mut raw = Shared::<[f32]>::new_slice(length);
    let mut query = Shared::<[f32]>::new_slice(comptime!(shape.key_words() * 2));
    let mut shared = Shared::<[f32]>::new_slice(comptime!(UNITS));
    let mut weights = Shared::<[f32]>::new_slice(comptime!(UNITS));
    if comptime!(shape.head.length % 2 == 1) {
        query[length] = f32::new(0.0);
    }
    let from = (row * comptime!(shape.heads) + head) * length;
    place(queries, from, gain, epsilon, angles, row, &mut raw, &mut query, &mut shared, comptime!(shape.head));

    let now = rows[row * comptime!(ROW_WORDS)];
    let pages = rows[row * comptime!(ROW_WORDS) + 1] as usize;
    let scale = scale * (f32::new(1.0) + growth * (f32::new(1.0) + f32::cast_from(now / every)).ln());
    let first = now + 1u32 - min(now + 1u32, window);
    let mut largest = f32::new(comptime!(LEAST));
    let mut total = f32::new(0.0);
    let mut sums = Array::<f32>::new(comptime!(2 * shape.value_words().div_ceil(UNITS)));
    let mut page = first / comptime!(PAGE_TOKENS as u32);
    let last_page = now / comptime!(PAGE_TOKENS as u32);
    while page <= last_page {
        let place = rows[pages + page as usize] as usize * comptime!(shape.kv_heads) + kv_head;
        let start = page * comptime!(PAGE_TOKENS as u32);
        let position = start + UNIT_POS;
        let seen = position >= first && position <= now;
        let mut score = f32::new(comptime!(LEAST));
        if seen {
            let mut product = f32::new(0.0);
            for word in 0..key_words {
                let bits = key_cache[(place * key_words + word) * comptime!(PAGE_TOKENS) + unit];
                product += half_to_float(bits & 0xffffu32) * query[word * 2];
                product += half_to_float(bits >> 16u32) * query[word * 2 + 1];
            }
            score = product * scale;
            if comptime!(shape.capped) {
                score = cap * tanh(score / cap);
            }
        }
        let new = max(largest, largest_of(&mut shared, score));
        let weight = select(seen, (score - new).exp(), f32::new(0.0));
        weights[unit] = weight;
        let kept = (largest - new).exp();
        total = total * kept + sum_of(&mut shared, weight);
        largest = new;
        let from = (max(first, start) - start) as usize;
        let to = (min(now - start, comptime!(PAGE_TOKENS as u32 - 1)) + 1u32) as usize;
        #[unroll]
        for i in 0..mine {
            let word = unit + i * comptime!(UNITS);
            if word < value_words {
                let mut low = sums[i * 2] * kept;
                let mut high = sums[i * 2 + 1] * kept;
                for position in from..to {
                    let bits = value_cache[(place * comptime!(PAGE_TOKENS) + position) * value_words + word];
                    low += weights[position] * half_to_float(bits & 0xffffu32);
                    high += weights[position] * half_to_float(bits >> 16u32);
                }
                sums[i * 2] = low;
                sums[i * 2 + 1] = high;
            }
        }
        sync_cube();
        page += 1u32;
    }
    // What was summed, as a share of all.
    let mut share = f32::new(1.0) / total;
    if comptime!(shape.sinks) {
        let sink = sinks[head];
        let new = max(largest, sink);
        let kept = (largest - new).exp();
        share = kept / (total * kept + (sink - new).exp());
    }
    let to = (row * comptime!(shape.heads) + head) * value_length;
    #[unroll]
    for i in 0..mine {
        let word = unit + i * comptime!(UNITS);
        if word < value_words {
            out[to + word * 2] = sums[i * 2] * share;
            if word * 2 + 1 < value_length {
                out[to + word * 2 + 1] = sums[i * 2 + 1] * share;
            }
        }
    }
}
