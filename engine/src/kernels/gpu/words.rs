//! Weights out of words, in kernels: the reading side of [`layout`](super::layout).

use cubecl::prelude::*;

use super::layout::{Kind, Layout, Scales};

/// The half-precision number in the lower half of a word. In integers, because not every device has such numbers, and because devices
/// may take numbers below the normal range of single precision for zero.
#[cube]
pub(super) fn half_to_float(word: u32) -> f32 {
    let exponent = (word >> 10u32) & 31u32;
    let fraction = word & 1023u32;
    let normal = f32::reinterpret(((exponent + 112u32) << 23u32) | (fraction << 13u32));
    // 2⁻²⁴ is the step below the normal range.
    let small = f32::cast_from(fraction) * f32::new(5.960_464_5e-8);
    let size = select(exponent == 0u32, small, normal);
    select(word & 0x8000u32 == 0u32, size, -size)
}

/// The bits of the half-precision number next to `value`, of two that are as near the even one; infinite beyond the range.
#[cube]
pub(super) fn float_to_half(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    let sign = (bits >> 16u32) & 0x8000u32;
    let size = bits & 0x7fff_ffffu32;
    // Within the normal range the exponent is shifted, and what does not fit is rounded off; a carry goes into the exponent.
    let odd = (size >> 13u32) & 1u32;
    let normal = ((size + 0x0fffu32 + odd) >> 13u32) - 0x1_c000u32;
    // Below it the fraction is moved to where the smallest exponent has it.
    let fraction = (size & 0x007f_ffffu32) | 0x0080_0000u32;
    let shift = min(126u32 - min(size >> 23u32, 113u32), 25u32);
    let kept = fraction >> shift;
    let lost = fraction & ((1u32 << shift) - 1u32);
    let middle = 1u32 << (shift - 1u32);
    let up = lost > middle || (lost == middle && (kept & 1u32) == 1u32);
    let small = kept + select(up, 1u32, 0u32);
    let rounded = select(size < 0x3880_0000u32, small, normal);
    sign | select(size >= 0x4780_0000u32, 0x7c00u32, rounded)
}

/// Eight weights of the row that begins at word `row`, not yet scaled: those of columns from `8 · octet` on.
#[cube]
pub(super) fn octet_of(words: &[u32], row: usize, octet: usize, #[comptime] layout: Layout) -> Array<f32> {
    let mut out = Array::<f32>::new(8usize);
    match comptime!(layout.kind) {
        Kind::Single =>
        {
            #[unroll]
            for i in 0..8usize {
                out[i] = f32::reinterpret(words[row + octet * 8 + i]);
            }
        }
        Kind::Half =>
        {
            #[unroll]
            for i in 0..4usize {
                let word = words[row + octet * 4 + i];
                out[i * 2] = half_to_float(word & 0xffffu32);
                out[i * 2 + 1] = half_to_float(word >> 16u32);
            }
        }
        Kind::Brain =>
        {
            #[unroll]
            for i in 0..4usize {
                let word = words[row + octet * 4 + i];
                out[i * 2] = f32::reinterpret(word << 16u32);
                out[i * 2 + 1] = f32::reinterpret(word & 0xffff_0000u32);
            }
        }
        Kind::Levels { levels, halvings: _ } => {
            let word = words[row + octet];
            #[unroll]
            for i in 0..8usize {
                out[i] = level_of((word >> u32::cast_from(i * 4)) & 15u32, levels);
            }
        }
        Kind::Quants { low, high, less } => {
            let mut upper = 0u32;
            if comptime!(high > 0) {
                let each = comptime!(32 / high.max(1));
                let high_at = comptime!(layout.high_at());
                let column = octet * 8;
                let shift = u32::cast_from((column % each) * comptime!(high));
                upper = words[row + high_at + column / each] >> shift;
            }
            let count = comptime!(low / 4);
            let each = comptime!(32 / low);
            let mask = comptime!((1u32 << low) - 1);
            let high_mask = comptime!((1u32 << high) - 1);
            #[unroll]
            for i in 0..count {
                let word = words[row + octet * count + i];
                #[unroll]
                for j in 0..each {
                    let at = i * each + j;
                    let mut quant = (word >> u32::cast_from(j * low)) & mask;
                    if comptime!(high > 0) {
                        quant |= ((upper >> u32::cast_from(at * high)) & high_mask) << comptime!(low as u32);
                    }
                    out[at] = f32::cast_from(quant) - comptime!(less as f32);
                }
            }
        }
    }
    out
}

/// The level at a place, out of four words of four.
#[cube]
fn level_of(place: u32, #[comptime] levels: [u32; 4]) -> f32 {
    let first = select(place & 4u32 == 0u32, comptime!(levels[0]).runtime(), comptime!(levels[1]).runtime());
    let second = select(place & 4u32 == 0u32, comptime!(levels[2]).runtime(), comptime!(levels[3]).runtime());
    let word = select(place & 8u32 == 0u32, first, second);
    signed((word >> (place % 4u32 * 8u32)) & 255u32)
}

/// The number that a byte with a sign is.
#[cube]
fn signed(byte: u32) -> f32 {
    // The upper half of the bytes stands for what is below zero.
    f32::cast_from(byte) - select(byte > 127u32, f32::new(256.0), f32::new(0.0))
}

/// What the weights of an octet are multiplied with.
#[cube]
pub(super) fn scale_of(words: &[u32], row: usize, octet: usize, #[comptime] layout: Layout) -> f32 {
    let scales = row + comptime!(layout.scales_at());
    match comptime!(layout.scales) {
        Scales::One => f32::new(1.0),
        Scales::Half => {
            let block = octet / 4;
            half_to_float(words[scales + block / 2] >> u32::cast_from(block % 2 * 16))
        }
        Scales::Brain => {
            let block = octet / 4;
            f32::reinterpret((words[scales + block / 2] >> u32::cast_from(block % 2 * 16)) << 16u32)
        }
        Scales::Pair => half_to_float(words[scales + octet / 4]),
        Scales::Super => {
            let first = scales + octet / 32 * 5;
            let sub = octet / 4 % 8;
            let byte = (words[first + 1 + sub / 2] >> u32::cast_from(sub % 2 * 16)) & 255u32;
            half_to_float(words[first]) * f32::cast_from(byte)
        }
        Scales::Signed => {
            let first = scales + octet / 32 * 5;
            let sub = octet / 2 % 16;
            let byte = (words[first + 1 + sub / 4] >> u32::cast_from(sub % 4 * 8)) & 255u32;
            half_to_float(words[first]) * comptime!(1.0 / (1u32 << layout.halvings()) as f32) * signed(byte)
        }
        Scales::Nibbles => {
            let first = scales + octet / 32 * 5;
            let sub = octet / 2 % 16;
            let nibble = (words[first + 1 + sub / 4] >> u32::cast_from(sub % 4 * 8)) & 15u32;
            half_to_float(words[first]) * f32::cast_from(nibble)
        }
    }
}

/// What is added to each weight of an octet after that.
#[cube]
pub(super) fn minimum_of(words: &[u32], row: usize, octet: usize, #[comptime] layout: Layout) -> f32 {
    let scales = row + comptime!(layout.scales_at());
    match comptime!(layout.scales) {
        Scales::Pair => half_to_float(words[scales + octet / 4] >> 16u32),
        Scales::Super => {
            let first = scales + octet / 32 * 5;
            let sub = octet / 4 % 8;
            let byte = (words[first + 1 + sub / 2] >> u32::cast_from(sub % 2 * 16 + 8)) & 255u32;
            -(half_to_float(words[first] >> 16u32) * f32::cast_from(byte))
        }
        Scales::Nibbles => {
            let first = scales + octet / 32 * 5;
            let sub = octet / 2 % 16;
            let nibble = (words[first + 1 + sub / 4] >> u32::cast_from(sub % 4 * 8 + 4)) & 15u32;
            -(half_to_float(words[first] >> 16u32) * f32::cast_from(nibble))
        }
        Scales::One | Scales::Half | Scales::Brain | Scales::Signed => f32::new(0.0),
    }
}
