//! Formats for types of few levels and for Q2_K, in nibbles.
//!
//! Types of few levels ([`quant`](crate::quant)'s `levels`) keep a nibble for each element, the place of its level, whatever they take in
//! the file: the levels are looked up as they are multiplied. Scales of sixteen elements are integers and enter the integer sum, so
//! that nothing is rounded that is not rounded in [`formats`](super::formats).

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};

use super::GROUP;
use super::formats::{Format, add_scaled, fetch_after, four, half, half_bits, low, put_low};
use crate::kernels::cpu::activations::Tile;
use crate::kernels::cpu::simd::{BLOCK, Vector};
use crate::quant::{self, BlockType, Coded};

/// A format `scale · levels[code]`, blocks of 32, for a type with the given way to hold its scale in sixteen bits.
macro_rules! short_levels {
    ($(#[$about:meta])* $name:ident, $block:expr, $float:ident, $load:ident) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, Pod, Zeroable)]
        #[repr(C, align(32))]
        pub(super) struct $name {
            codes: [u8; 256],
            scale: [u16; GROUP],
        }

        impl Format for $name {
            const PARTS: usize = 1;

            fn put(&mut self, row: usize, bytes: &[u8]) {
                let coded = Coded::read($block, bytes);
                self.scale[row] = $float::from_f32(coded.scale).to_bits();
                put_low(&mut self.codes, row, |j| four(&coded.codes, 4 * j));
            }

            fn row(&self, row: usize, out: &mut [f32]) {
                let scale = $float::from_bits(self.scale[row]).to_f32();
                for (i, out) in out.iter_mut().enumerate() {
                    *out = scale * f32::from(levels_of($block)[usize::from(low(&self.codes, row, i))]);
                }
            }

            #[inline(always)]
            fn add_products<V: Vector, const T: usize>(&self, v: V, x: &[Tile<T>], totals: &mut [V::F; T]) {
                fetch_after::<V, _, T>(v, self);
                let sums = v.dot_levels::<T>(&self.codes, levels_of($block), &[[1; GROUP]; 2], &x[0]);
                add_scaled(v, sums, v.$load(&self.scale), &x[0], totals);
            }
        }
    };
}

/// The levels of a type that has them.
#[inline(always)]
fn levels_of(block: BlockType) -> &'static [i8; 16] {
    const NONE: [i8; 16] = [0; 16];
    quant::levels(block).unwrap_or(&NONE)
}

short_levels! {
    /// Levels that are denser around zero, scales in half precision.
    Iq4Nl, BlockType::IQ4_NL, f16, load_half
}

short_levels! {
    /// Four-bit floats, whose scales are powers of two beyond half precision.
    Mxfp4, BlockType::MXFP4, bf16, load_brain
}

/// `scale · factor · steps[part][half] · levels[code]`, eight parts of two halves: all types of few levels with blocks of 256.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(32))]
pub(super) struct LongLevels {
    scale: [u16; GROUP],
    levels: [i8; 16],
    /// A power of two.
    factor: f32,
    /// The type's number in files.
    kind: u32,
    unused: [u32; 2],
    parts: [LongPart; 8],
}

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(32))]
struct LongPart {
    codes: [u8; 256],
    steps: [[i8; GROUP]; 2],
}

impl LongLevels {
    /// An empty block of a type.
    pub(super) fn of(block: BlockType) -> Self {
        // What ggml's half-precision scales are divided by, so that steps and levels are integers.
        let factor = match block {
            BlockType::IQ1_S | BlockType::IQ1_M | BlockType::IQ2_XXS | BlockType::IQ2_XS | BlockType::IQ2_S => 0.125,
            BlockType::IQ3_XXS => 0.25,
            _ => 1.0,
        };
        Self { levels: *levels_of(block), factor, kind: block.id(), ..Self::zeroed() }
    }
}

impl Format for LongLevels {
    const PARTS: usize = 8;

    fn put(&mut self, row: usize, bytes: &[u8]) {
        let Some(block) = BlockType::from_id(self.kind) else { return };
        let coded = Coded::read(block, bytes);
        self.scale[row] = f16::from_f32(coded.scale / self.factor).to_bits();
        for (p, part) in self.parts.iter_mut().enumerate() {
            for half in 0..2 {
                part.steps[half][row] = coded.steps[2 * p + half];
            }
            put_low(&mut part.codes, row, |j| four(&coded.codes, p * BLOCK + 4 * j));
        }
    }

    fn row(&self, row: usize, out: &mut [f32]) {
        for (part, out) in self.parts.iter().zip(out.chunks_exact_mut(BLOCK)) {
            for (i, out) in out.iter_mut().enumerate() {
                let scale = half(self.scale[row]) * self.factor * f32::from(part.steps[i / 16][row]);
                *out = scale * f32::from(self.levels[usize::from(low(&part.codes, row, i))]);
            }
        }
    }

    #[inline(always)]
    fn add_products<V: Vector, const T: usize>(&self, v: V, x: &[Tile<T>], totals: &mut [V::F; T]) {
        let scale = v.mul(v.load_half(&self.scale), v.splat(self.factor));
        for (part, x) in self.parts.iter().zip(x) {
            fetch_after::<V, _, T>(v, part);
            // At most 2 · 16 · 127 · 127 · 32 < 2²⁴: exact as a float.
            let sums = v.dot_levels::<T>(&part.codes, &self.levels, &part.steps, x);
            add_scaled(v, sums, scale, x, totals);
        }
    }
}

/// `scale · scales[part][half] · w − offset · offsets[part][half]`, two bits in nibbles, eight parts of two halves.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(32))]
pub(super) struct Q2K {
    scale: [u16; GROUP],
    offset: [u16; GROUP],
    parts: [Q2KPart; 8],
}

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(32))]
struct Q2KPart {
    low: [u8; 256],
    scales: [[u8; GROUP]; 2],
    offsets: [[u8; GROUP]; 2],
}

impl Format for Q2K {
    const PARTS: usize = 8;

    fn put(&mut self, row: usize, bytes: &[u8]) {
        let (scales, quants) = (&bytes[..16], &bytes[16..80]);
        self.scale[row] = half_bits(&bytes[80..]);
        self.offset[row] = half_bits(&bytes[82..]);
        for (p, part) in self.parts.iter_mut().enumerate() {
            for half in 0..2 {
                part.scales[half][row] = scales[2 * p + half] & 15;
                part.offsets[half][row] = scales[2 * p + half] >> 4;
            }
            put_low(&mut part.low, row, |j| four(quants, p / 4 * BLOCK + 4 * j) >> (p % 4 * 2) & 0x0303_0303);
        }
    }

    fn row(&self, row: usize, out: &mut [f32]) {
        for (part, out) in self.parts.iter().zip(out.chunks_exact_mut(BLOCK)) {
            for (i, out) in out.iter_mut().enumerate() {
                let scale = half(self.scale[row]) * f32::from(part.scales[i / 16][row]);
                let offset = half(self.offset[row]) * f32::from(part.offsets[i / 16][row]);
                *out = scale * f32::from(low(&part.low, row, i)) - offset;
            }
        }
    }

    #[inline(always)]
    fn add_products<V: Vector, const T: usize>(&self, v: V, x: &[Tile<T>], totals: &mut [V::F; T]) {
        let (scale, offset) = (v.load_half(&self.scale), v.load_half(&self.offset));
        for (part, x) in self.parts.iter().zip(x) {
            fetch_after::<V, _, T>(v, part);
            add_scaled(v, v.dot_halves::<T>(&part.low, &part.scales, x), scale, x, totals);
            let below = v.sum_halves::<T>(&part.offsets, x);
            for t in 0..T {
                let below = v.mul(v.to_floats(below[t]), offset);
                totals[t] = v.neg_fma(below, v.splat(x.scale[t]), totals[t]);
            }
        }
    }
}
