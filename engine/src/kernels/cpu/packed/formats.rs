//! The quantised formats: sixteen rows of ggml's blocks, interleaved.
//!
//! With integer weights `w`, activations `x` and their scale `a`, each block of 32 columns adds to a row's total, in this
//! order and with these roundings:
//!
//! - `fma(f32(Σ(w − centre)·x) · scale, a, total)`, then
//! - with an offset: `fma(offset, a·Σx, total)`, negated for K-quants, whose offset is subtracted.
//!
//! Scales and offsets of K-quants are products of a half-precision number and a small integer, which are exact. A block
//! of Q6_K has two scales; they are integers and enter the integer sum.

use bytemuck::{Pod, Zeroable};
use half::f16;

use super::GROUP;
use crate::kernels::cpu::activations::Tile;
use crate::kernels::cpu::simd::{BLOCK, Vector};

/// A block of sixteen rows.
pub(super) trait Format: Pod + Send + Sync {
    /// Its columns, in blocks of activations.
    const PARTS: usize;

    /// Sets one row from a block of the file.
    fn put(&mut self, row: usize, bytes: &[u8]);

    /// Writes one row as plain numbers, with the roundings of [`quant::dequantise`](crate::quant::dequantise).
    fn row(&self, row: usize, out: &mut [f32]);

    /// Adds the rows' products with the rows of activations in `x`, [`PARTS`](Self::PARTS) of them, to their totals.
    fn add_products<V: Vector, const T: usize>(&self, v: V, x: &[Tile<T>], totals: &mut [V::F; T]);
}

pub(super) fn half_bits(bytes: &[u8]) -> u16 {
    u16::from_le_bytes([bytes[0], bytes[1]])
}

pub(super) fn half(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}

/// Four bytes of a block: elements, or parts of elements, that stay together.
#[inline(always)]
pub(super) fn four(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Sets four bytes of a row.
#[inline(always)]
fn put_four(bytes: &mut [u8], at: usize, four: u32) {
    bytes[at..at + 4].copy_from_slice(&four.to_le_bytes());
}

/// Sets a row's low four bits from those of its elements, which `elements` gives from `4·j` on, in the low nibbles of four bytes. The
/// order is described at [`Vector::dot_fours`] and its like.
#[inline(always)]
pub(super) fn put_low(low: &mut [u8; 256], row: usize, elements: impl Fn(usize) -> u32) {
    const NIBBLES: u32 = 0x0f0f_0f0f;
    for j in 0..4 {
        put_four(low, 64 * j + 4 * row, elements(j) & NIBBLES | (elements(4 + j) & NIBBLES) << 4);
    }
}

/// Sets a row's fifth bits, which `elements` gives in the lowest bits of four bytes.
#[inline(always)]
fn put_fifths(high: &mut [u8; 64], row: usize, elements: impl Fn(usize) -> u32) {
    let bits = (0..8).fold(0, |bits, j| bits | (elements(j) & 0x0101_0101) << j);
    put_four(high, 4 * row, bits);
}

/// Sets a row's fifth and sixth bits, which `elements` gives in the two lowest bits of four bytes.
#[inline(always)]
fn put_uppers(high: &mut [u8; 128], row: usize, elements: impl Fn(usize) -> u32) {
    for half in 0..2 {
        let bits = (0..4).fold(0, |bits, j| bits | (elements(4 * half + j) & 0x0303_0303) << (2 * j));
        put_four(high, 64 * half + 4 * row, bits);
    }
}

pub(super) fn low(low: &[u8; 256], row: usize, element: usize) -> u8 {
    low[64 * (element % 16 / 4) + 4 * row + element % 4] >> (element / 16 * 4) & 15
}

fn fifth(high: &[u8; 64], row: usize, element: usize) -> u8 {
    (high[4 * row + element % 4] >> (element / 4) & 1) << 4
}

fn upper(high: &[u8; 128], row: usize, element: usize) -> u8 {
    (high[64 * (element / 16) + 4 * row + element % 4] >> (element % 16 / 4 * 2) & 3) << 4
}

/// The nibbles of the simple formats: element `i` in the low half of byte `i`, element `16 + i` in the high one.
fn nibbles(bytes: &[u8]) -> impl Fn(usize) -> u32 {
    |j| four(bytes, 4 * (j % 4)) >> (j / 4 * 4)
}

/// The fifth bits of the simple formats: bit `i` of four bytes is that of element `i`.
fn fifth_bits(bytes: &[u8]) -> impl Fn(usize) -> u32 {
    let bits = four(bytes, 0);
    // The four lowest bits, one to each byte: products with these powers of two do not meet in their lowest bits.
    move |j| ((bits >> (4 * j) & 15) * 0x0020_4081) & 0x0101_0101
}

/// The six-bit scale and offset of part `part` of eight, from the twelve bytes of Q4_K and Q5_K: see
/// [`quant`](crate::quant).
fn six_bits(packed: &[u8], part: usize) -> (u8, u8) {
    if part < 4 {
        (packed[part] & 63, packed[part + 4] & 63)
    } else {
        (packed[part + 4] & 15 | packed[part - 4] >> 6 << 4, packed[part + 4] >> 4 | packed[part] >> 6 << 4)
    }
}

/// A single row waits for memory; more rows find the weights in a cache.
#[inline(always)]
pub(super) fn fetch_after<V: Vector, F: Pod, const T: usize>(v: V, weights: &F) {
    if T == 1 {
        v.fetch_after(weights);
    }
}

#[inline(always)]
pub(super) fn add_scaled<V: Vector, const T: usize>(v: V, sums: [V::I; T], scale: V::F, x: &Tile<T>, totals: &mut [V::F; T]) {
    for t in 0..T {
        let product = v.mul(v.to_floats(sums[t]), scale);
        totals[t] = v.fma(product, v.splat(x.scale[t]), totals[t]);
    }
}

#[inline(always)]
fn add_offset<V: Vector, const T: usize>(v: V, offset: V::F, x: &Tile<T>, totals: &mut [V::F; T]) {
    for t in 0..T {
        totals[t] = v.fma(offset, v.splat(x.scaled_sum[t]), totals[t]);
    }
}

/// `scale · (w − 8)`, four bits.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(32))]
pub(super) struct Q4_0 {
    low: [u8; 256],
    scale: [u16; GROUP],
}

impl Format for Q4_0 {
    const PARTS: usize = 1;

    fn put(&mut self, row: usize, bytes: &[u8]) {
        self.scale[row] = half_bits(bytes);
        put_low(&mut self.low, row, nibbles(&bytes[2..18]));
    }

    fn row(&self, row: usize, out: &mut [f32]) {
        let scale = half(self.scale[row]);
        for (i, out) in out.iter_mut().enumerate() {
            *out = scale * (f32::from(low(&self.low, row, i)) - 8.0);
        }
    }

    #[inline(always)]
    fn add_products<V: Vector, const T: usize>(&self, v: V, x: &[Tile<T>], totals: &mut [V::F; T]) {
        fetch_after::<V, _, T>(v, self);
        let sums = v.dot_fours::<T, true>(&self.low, &x[0]);
        add_scaled(v, sums, v.load_half(&self.scale), &x[0], totals);
    }
}

/// `scale · w + offset`, four bits.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(32))]
pub(super) struct Q4_1 {
    low: [u8; 256],
    scale: [u16; GROUP],
    offset: [u16; GROUP],
}

impl Format for Q4_1 {
    const PARTS: usize = 1;

    fn put(&mut self, row: usize, bytes: &[u8]) {
        self.scale[row] = half_bits(bytes);
        self.offset[row] = half_bits(&bytes[2..]);
        put_low(&mut self.low, row, nibbles(&bytes[4..20]));
    }

    fn row(&self, row: usize, out: &mut [f32]) {
        let (scale, offset) = (half(self.scale[row]), half(self.offset[row]));
        for (i, out) in out.iter_mut().enumerate() {
            *out = scale * f32::from(low(&self.low, row, i)) + offset;
        }
    }

    #[inline(always)]
    fn add_products<V: Vector, const T: usize>(&self, v: V, x: &[Tile<T>], totals: &mut [V::F; T]) {
        fetch_after::<V, _, T>(v, self);
        let sums = v.dot_fours::<T, false>(&self.low, &x[0]);
        add_scaled(v, sums, v.load_half(&self.scale), &x[0], totals);
        add_offset(v, v.load_half(&self.offset), &x[0], totals);
    }
}

/// `scale · (w − 16)`, five bits.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(32))]
pub(super) struct Q5_0 {
    low: [u8; 256],
    high: [u8; 64],
    scale: [u16; GROUP],
}

impl Format for Q5_0 {
    const PARTS: usize = 1;

    fn put(&mut self, row: usize, bytes: &[u8]) {
        self.scale[row] = half_bits(bytes);
        put_fifths(&mut self.high, row, fifth_bits(&bytes[2..6]));
        put_low(&mut self.low, row, nibbles(&bytes[6..22]));
    }

    fn row(&self, row: usize, out: &mut [f32]) {
        let scale = half(self.scale[row]);
        for (i, out) in out.iter_mut().enumerate() {
            let w = low(&self.low, row, i) | fifth(&self.high, row, i);
            *out = scale * (f32::from(w) - 16.0);
        }
    }

    #[inline(always)]
    fn add_products<V: Vector, const T: usize>(&self, v: V, x: &[Tile<T>], totals: &mut [V::F; T]) {
        fetch_after::<V, _, T>(v, self);
        let sums = v.dot_fives::<T, true>(&self.low, &self.high, &x[0]);
        add_scaled(v, sums, v.load_half(&self.scale), &x[0], totals);
    }
}

/// `scale · w + offset`, five bits.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(32))]
pub(super) struct Q5_1 {
    low: [u8; 256],
    high: [u8; 64],
    scale: [u16; GROUP],
    offset: [u16; GROUP],
}

impl Format for Q5_1 {
    const PARTS: usize = 1;

    fn put(&mut self, row: usize, bytes: &[u8]) {
        self.scale[row] = half_bits(bytes);
        self.offset[row] = half_bits(&bytes[2..]);
        put_fifths(&mut self.high, row, fifth_bits(&bytes[4..8]));
        put_low(&mut self.low, row, nibbles(&bytes[8..24]));
    }

    fn row(&self, row: usize, out: &mut [f32]) {
        let (scale, offset) = (half(self.scale[row]), half(self.offset[row]));
        for (i, out) in out.iter_mut().enumerate() {
            let w = low(&self.low, row, i) | fifth(&self.high, row, i);
            *out = scale * f32::from(w) + offset;
        }
    }

    #[inline(always)]
    fn add_products<V: Vector, const T: usize>(&self, v: V, x: &[Tile<T>], totals: &mut [V::F; T]) {
        fetch_after::<V, _, T>(v, self);
        let sums = v.dot_fives::<T, false>(&self.low, &self.high, &x[0]);
        add_scaled(v, sums, v.load_half(&self.scale), &x[0], totals);
        add_offset(v, v.load_half(&self.offset), &x[0], totals);
    }
}

/// `scale · w`, eight bits with a sign.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(32))]
pub(super) struct Q8_0 {
    bytes: [i8; 512],
    scale: [u16; GROUP],
}

impl Format for Q8_0 {
    const PARTS: usize = 1;

    fn put(&mut self, row: usize, bytes: &[u8]) {
        self.scale[row] = half_bits(bytes);
        let to: &mut [u8; 512] = bytemuck::cast_mut(&mut self.bytes);
        for j in 0..8 {
            put_four(to, 64 * j + 4 * row, four(&bytes[2..34], 4 * j));
        }
    }

    fn row(&self, row: usize, out: &mut [f32]) {
        let scale = half(self.scale[row]);
        for (i, out) in out.iter_mut().enumerate() {
            *out = scale * f32::from(self.bytes[64 * (i / 4) + 4 * row + i % 4]);
        }
    }

    #[inline(always)]
    fn add_products<V: Vector, const T: usize>(&self, v: V, x: &[Tile<T>], totals: &mut [V::F; T]) {
        fetch_after::<V, _, T>(v, self);
        let sums = v.dot_eights::<T>(&self.bytes, &x[0]);
        add_scaled(v, sums, v.load_half(&self.scale), &x[0], totals);
    }
}

/// Adds products of a K-quant's part whose scale and offset are small integers times those of the block.
#[inline(always)]
fn add_k<V: Vector, const T: usize>(
    v: V,
    sums: [V::I; T],
    (scale, scales): (V::F, &[u8; GROUP]),
    (offset, offsets): (V::F, &[u8; GROUP]),
    x: &Tile<T>,
    totals: &mut [V::F; T],
) {
    let scale = v.mul(scale, v.to_floats(v.load_u8(scales)));
    let offset = v.mul(offset, v.to_floats(v.load_u8(offsets)));
    add_scaled(v, sums, scale, x, totals);
    for t in 0..T {
        totals[t] = v.neg_fma(offset, v.splat(x.scaled_sum[t]), totals[t]);
    }
}

/// `scale · scales[part] · w − offset · offsets[part]`, four bits, eight parts.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(32))]
pub(super) struct Q4K {
    scale: [u16; GROUP],
    offset: [u16; GROUP],
    parts: [Q4KPart; 8],
}

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(32))]
struct Q4KPart {
    low: [u8; 256],
    scales: [u8; GROUP],
    offsets: [u8; GROUP],
}

impl Format for Q4K {
    const PARTS: usize = 8;

    fn put(&mut self, row: usize, bytes: &[u8]) {
        self.scale[row] = half_bits(bytes);
        self.offset[row] = half_bits(&bytes[2..]);
        let (packed, (nibbles, _)) = (&bytes[4..16], bytes[16..144].as_chunks::<32>());
        for (p, part) in self.parts.iter_mut().enumerate() {
            (part.scales[row], part.offsets[row]) = six_bits(packed, p);
            let nibbles = &nibbles[p / 2];
            put_low(&mut part.low, row, |j| four(nibbles, 4 * j) >> (p % 2 * 4));
        }
    }

    fn row(&self, row: usize, out: &mut [f32]) {
        for (part, out) in self.parts.iter().zip(out.chunks_exact_mut(BLOCK)) {
            let scale = half(self.scale[row]) * f32::from(part.scales[row]);
            let offset = half(self.offset[row]) * f32::from(part.offsets[row]);
            for (i, out) in out.iter_mut().enumerate() {
                *out = scale * f32::from(low(&part.low, row, i)) - offset;
            }
        }
    }

    #[inline(always)]
    fn add_products<V: Vector, const T: usize>(&self, v: V, x: &[Tile<T>], totals: &mut [V::F; T]) {
        let (scale, offset) = (v.load_half(&self.scale), v.load_half(&self.offset));
        for (part, x) in self.parts.iter().zip(x) {
            fetch_after::<V, _, T>(v, part);
            let sums = v.dot_fours::<T, false>(&part.low, x);
            add_k(v, sums, (scale, &part.scales), (offset, &part.offsets), x, totals);
        }
    }
}

/// As [`Q4K`], five bits.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(32))]
pub(super) struct Q5K {
    scale: [u16; GROUP],
    offset: [u16; GROUP],
    parts: [Q5KPart; 8],
}

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(32))]
struct Q5KPart {
    low: [u8; 256],
    high: [u8; 64],
    scales: [u8; GROUP],
    offsets: [u8; GROUP],
}

impl Format for Q5K {
    const PARTS: usize = 8;

    fn put(&mut self, row: usize, bytes: &[u8]) {
        self.scale[row] = half_bits(bytes);
        self.offset[row] = half_bits(&bytes[2..]);
        let (packed, fifths, (nibbles, _)) = (&bytes[4..16], &bytes[16..48], bytes[48..176].as_chunks::<32>());
        for (p, part) in self.parts.iter_mut().enumerate() {
            (part.scales[row], part.offsets[row]) = six_bits(packed, p);
            let nibbles = &nibbles[p / 2];
            put_low(&mut part.low, row, |j| four(nibbles, 4 * j) >> (p % 2 * 4));
            put_fifths(&mut part.high, row, |j| four(fifths, 4 * j) >> p);
        }
    }

    fn row(&self, row: usize, out: &mut [f32]) {
        for (part, out) in self.parts.iter().zip(out.chunks_exact_mut(BLOCK)) {
            let scale = half(self.scale[row]) * f32::from(part.scales[row]);
            let offset = half(self.offset[row]) * f32::from(part.offsets[row]);
            for (i, out) in out.iter_mut().enumerate() {
                let w = low(&part.low, row, i) | fifth(&part.high, row, i);
                *out = scale * f32::from(w) - offset;
            }
        }
    }

    #[inline(always)]
    fn add_products<V: Vector, const T: usize>(&self, v: V, x: &[Tile<T>], totals: &mut [V::F; T]) {
        let (scale, offset) = (v.load_half(&self.scale), v.load_half(&self.offset));
        for (part, x) in self.parts.iter().zip(x) {
            fetch_after::<V, _, T>(v, part);
            let sums = v.dot_fives::<T, false>(&part.low, &part.high, x);
            add_k(v, sums, (scale, &part.scales), (offset, &part.offsets), x, totals);
        }
    }
}

/// `scale · scales[part][half] · (w − 32)`, six bits, eight parts of two halves.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(32))]
pub(super) struct Q6K {
    scale: [u16; GROUP],
    parts: [Q6KPart; 8],
}

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(32))]
struct Q6KPart {
    low: [u8; 256],
    high: [u8; 128],
    scales: [[i8; GROUP]; 2],
}

impl Format for Q6K {
    const PARTS: usize = 8;

    fn put(&mut self, row: usize, bytes: &[u8]) {
        let ((nibbles, _), (uppers, _)) = (bytes[..128].as_chunks::<32>(), bytes[128..192].as_chunks::<32>());
        let scales = &bytes[192..208];
        self.scale[row] = half_bits(&bytes[208..]);
        for (p, part) in self.parts.iter_mut().enumerate() {
            // Four parts to each half of the block: two in low nibbles, two in high ones.
            let (half, quarter) = (p / 4, p % 4);
            let (nibbles, uppers) = (&nibbles[2 * half + quarter % 2], &uppers[half]);
            put_low(&mut part.low, row, |j| four(nibbles, 4 * j) >> (quarter / 2 * 4));
            put_uppers(&mut part.high, row, |j| four(uppers, 4 * j) >> (quarter * 2));
            for half in 0..2 {
                part.scales[half][row] = scales[2 * p + half] as i8;
            }
        }
    }

    fn row(&self, row: usize, out: &mut [f32]) {
        for (part, out) in self.parts.iter().zip(out.chunks_exact_mut(BLOCK)) {
            for (i, out) in out.iter_mut().enumerate() {
                let scale = half(self.scale[row]) * f32::from(part.scales[i / 16][row]);
                let w = low(&part.low, row, i) | upper(&part.high, row, i);
                *out = scale * (f32::from(w) - 32.0);
            }
        }
    }

    #[inline(always)]
    fn add_products<V: Vector, const T: usize>(&self, v: V, x: &[Tile<T>], totals: &mut [V::F; T]) {
        let scale = v.load_half(&self.scale);
        for (part, x) in self.parts.iter().zip(x) {
            fetch_after::<V, _, T>(v, part);
            let sums = v.dot_sixes::<T>(&part.low, &part.high, &part.scales, x);
            add_scaled(v, sums, scale, x, totals);
        }
    }
}
