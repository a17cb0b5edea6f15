//! Types whose elements are few levels: a block's scale, times a small integer for every sixteen elements, times a level from a row
//! of at most sixteen.
//!
//! Q3_K, the ternary types, MXFP4 and all IQ types are of this kind, however differently their bits lie. All the products are exact
//! in single precision, so whoever multiplies them in any order, or sums integers first, computes with ggml's numbers.

use super::BlockType;
use super::dequantise::half_at;
use super::grids;

/// Elements that have an integer scale in common.
const STEP: usize = 16;
/// The most elements of a block.
pub(crate) const LONGEST: usize = 256;

/// A block: element `i` stands for `scale · steps[i / 16] · levels[codes[i]]`, where the levels are the type's.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Coded {
    /// The block's scale.
    pub(crate) scale: f32,
    /// Integer scales.
    pub(crate) steps: [i8; LONGEST / STEP],
    /// Places in the type's levels, below sixteen. Types with shorter blocks use the first of them.
    pub(crate) codes: [u8; LONGEST],
}

type Levels = [i8; 16];

/// Of Q3_K.
const EIGHT: Levels = [-4, -3, -2, -1, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0];
/// Of the ternary types, one of which has room for a fourth.
const TERNARY: Levels = [-1, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
/// Twice the values of a four-bit float with two bits of exponent.
const FLOAT: Levels = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
/// Denser around zero.
const NON_LINEAR: Levels = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Eight times −1, 0 or 1 raised by an eighth, then the same lowered.
const ONE: Levels = [-7, 1, 9, 0, -9, -1, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0];
/// Magnitudes, then the same negated: [`NEGATIVE`] is the distance.
const TWO: Levels = [8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0];
const THREE: Levels = [4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62];
const THREE_ODD: Levels = [1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15];
/// In codes of types with magnitudes and signs: that the level is negative.
const NEGATIVE: u8 = 8;
/// In codes of IQ1 types: that the level is lowered.
const LOWERED: u8 = 4;

/// The levels of a type of this kind.
pub(crate) fn levels(block: BlockType) -> Option<&'static [i8; 16]> {
    Some(match block {
        BlockType::Q3_K => &EIGHT,
        BlockType::TQ1_0 | BlockType::TQ2_0 => &TERNARY,
        BlockType::MXFP4 => &FLOAT,
        BlockType::IQ4_NL | BlockType::IQ4_XS => &NON_LINEAR,
        BlockType::IQ1_S | BlockType::IQ1_M => &ONE,
        BlockType::IQ2_XXS | BlockType::IQ2_XS | BlockType::IQ2_S => &TWO,
        BlockType::IQ3_XXS => &THREE,
        BlockType::IQ3_S => &THREE_ODD,
        _ => return None,
    })
}

impl Coded {
    /// Reads a block of a type of this kind, which is as long as the type's blocks are.
    pub(crate) fn read(block: BlockType, bytes: &[u8]) -> Coded {
        let mut coded = Coded { scale: 0.0, steps: [1; LONGEST / STEP], codes: [0; LONGEST] };
        match block {
            BlockType::Q3_K => coded.q3_k(bytes),
            BlockType::TQ1_0 => coded.tq1_0(bytes),
            BlockType::TQ2_0 => coded.tq2_0(bytes),
            BlockType::MXFP4 => coded.mxfp4(bytes),
            BlockType::IQ4_NL => {
                coded.scale = half_at(bytes, 0);
                nibbles(&bytes[2..], &mut coded.codes);
            }
            BlockType::IQ4_XS => coded.iq4_xs(bytes),
            BlockType::IQ1_S => coded.iq1_s(bytes),
            BlockType::IQ1_M => coded.iq1_m(bytes),
            BlockType::IQ2_XXS => coded.iq2_xxs(bytes),
            BlockType::IQ2_XS => coded.iq2_xs(bytes),
            BlockType::IQ2_S => coded.iq2_s(bytes),
            BlockType::IQ3_XXS => coded.iq3_xxs(bytes),
            BlockType::IQ3_S => coded.iq3_s(bytes),
            _ => debug_assert!(false, "{block} has no levels"),
        }
        coded
    }

    /// Writes the elements as plain numbers: as many as `out` has.
    pub(crate) fn write(&self, levels: &[i8; 16], out: &mut [f32]) {
        for ((out, codes), step) in out.chunks_mut(STEP).zip(self.codes.chunks(STEP)).zip(self.steps) {
            let scale = self.scale * f32::from(step);
            for (out, &code) in out.iter_mut().zip(codes) {
                *out = scale * f32::from(levels[usize::from(code)]);
            }
        }
    }

    /// 32 bytes of mask (bit `i` of byte `j`: element `32 i + j` is not lowered by 4), 64 bytes of two-bit quants, 12 bytes with
    /// sixteen six-bit scales raised by 32, the scale.
    fn q3_k(&mut self, block: &[u8]) {
        let (mask, quants, packed) = (&block[..32], &block[32..96], &block[96..108]);
        self.scale = half_at(block, 108);
        for (sub, step) in self.steps.iter_mut().enumerate() {
            // Low nibbles of bytes 0..8, then high nibbles; the upper two bits in bytes 8..12, four scales to a byte.
            let low = if sub < 8 { packed[sub] & 15 } else { packed[sub - 8] >> 4 };
            let high = (packed[8 + sub % 4] >> (sub / 4 * 2)) & 3;
            *step = (low | (high << 4)) as i8 - 32;
        }
        for (i, code) in self.codes.iter_mut().enumerate() {
            let low = (quants[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3;
            let kept = (mask[i % 32] >> (i / 32)) & 1;
            *code = low | (kept << 2);
        }
    }

    /// 32 bytes with five ternary digits each, 16 more, 4 bytes with four, the scale. A byte is a fraction of 256 whose digits come
    /// out by multiplying.
    fn tq1_0(&mut self, block: &[u8]) {
        const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
        self.scale = half_at(block, 52);
        let runs = [(0, 32, 5, 0), (32, 16, 5, 160), (48, 4, 4, 240)];
        for (from, width, digits, to) in runs {
            for (digit, power) in POWERS.iter().enumerate().take(digits) {
                for i in 0..width {
                    let fraction = block[from + i].wrapping_mul(*power);
                    self.codes[to + digit * width + i] = ((u16::from(fraction) * 3) >> 8) as u8;
                }
            }
        }
    }

    /// 64 bytes of two-bit quants, 32 bytes to 128 elements, the scale.
    fn tq2_0(&mut self, block: &[u8]) {
        self.scale = half_at(block, 64);
        for (i, code) in self.codes.iter_mut().enumerate() {
            *code = (block[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3;
        }
    }

    /// A power of two, halved because the levels are doubled; nibbles.
    fn mxfp4(&mut self, block: &[u8]) {
        let exponent = u32::from(block[0]);
        // Below 2⁻¹²⁶ the exponent's field is zero and the number is in the fraction.
        self.scale = f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 });
        nibbles(&block[1..], &mut self.codes);
    }

    /// The scale, upper two bits of eight six-bit scales raised by 32, their lower nibbles, nibbles.
    fn iq4_xs(&mut self, block: &[u8]) {
        self.scale = half_at(block, 0);
        let high = u16::from_le_bytes([block[2], block[3]]);
        for part in 0..8 {
            let low = (block[4 + part / 2] >> (part % 2 * 4)) & 15;
            let step = (low | (((high >> (2 * part)) & 3) << 4) as u8) as i8 - 32;
            self.steps[2 * part..2 * part + 2].fill(step);
            nibbles(&block[8 + 16 * part..][..16], &mut self.codes[32 * part..]);
        }
    }

    /// The scale, 32 bytes of codes, and a word for each 32 elements: upper three bits of four codes, a three-bit scale, and whether
    /// they are lowered.
    fn iq1_s(&mut self, block: &[u8]) {
        self.scale = half_at(block, 0) / 8.0;
        for part in 0..8 {
            let word = u16::from_le_bytes([block[34 + 2 * part], block[35 + 2 * part]]);
            self.odd_step(2 * part, (word >> 12) & 7);
            self.odd_step(2 * part + 1, (word >> 12) & 7);
            let shift = if word & 0x8000 == 0 { 0 } else { LOWERED };
            for i in 0..4 {
                let code = u16::from(block[2 + 4 * part + i]) | (((word >> (3 * i)) & 7) << 8);
                eight(grids::IQ1[usize::from(code)], &mut self.codes[32 * part + 8 * i..], |_| shift);
            }
        }
    }

    /// 32 bytes of codes, 16 bytes of nibbles (upper three bits of a code, and whether its elements are lowered), four words with four
    /// three-bit scales each, whose upper nibbles are the block's scale.
    fn iq1_m(&mut self, block: &[u8]) {
        let word = |i: usize| u16::from_le_bytes([block[48 + 2 * i], block[49 + 2 * i]]);
        let bits = (0..4).fold(0, |bits, i| bits | ((word(i) >> 12) << (4 * i)));
        self.scale = half::f16::from_bits(bits).to_f32() / 8.0;
        for step in 0..16 {
            self.odd_step(step, (word(step / 4) >> (step % 4 * 3)) & 7);
        }
        for i in 0..32 {
            let nibble = (block[32 + i / 2] >> (i % 2 * 4)) & 15;
            let code = u16::from(block[i]) | (u16::from(nibble & 7) << 8);
            let shift = if nibble & 8 == 0 { 0 } else { LOWERED };
            eight(grids::IQ1[usize::from(code)], &mut self.codes[8 * i..], |_| shift);
        }
    }

    /// The scale, and for each 32 elements four bytes of codes and a word: four times seven signs, a four-bit scale.
    fn iq2_xxs(&mut self, block: &[u8]) {
        self.scale = half_at(block, 0) / 8.0;
        for part in 0..8 {
            let codes = &block[2 + 8 * part..][..8];
            let word = u32::from_le_bytes([codes[4], codes[5], codes[6], codes[7]]);
            self.odd_step(2 * part, (word >> 28) as u16);
            self.odd_step(2 * part + 1, (word >> 28) as u16);
            for i in 0..4 {
                let signs = seven_signs(word >> (7 * i));
                eight(grids::IQ2_XXS[usize::from(codes[i])], &mut self.codes[32 * part + 8 * i..], negative(signs));
            }
        }
    }

    /// The scale, a word for each eight elements (nine bits of code, seven signs), four-bit scales.
    fn iq2_xs(&mut self, block: &[u8]) {
        self.scale = half_at(block, 0) / 8.0;
        self.nibble_steps(&block[66..74]);
        for i in 0..32 {
            let word = u16::from_le_bytes([block[2 + 2 * i], block[3 + 2 * i]]);
            let signs = seven_signs(u32::from(word >> 9));
            eight(grids::IQ2_XS[usize::from(word & 511)], &mut self.codes[8 * i..], negative(signs));
        }
    }

    /// The scale, 32 bytes of codes, 32 bytes of signs, the codes' upper two bits, four-bit scales.
    fn iq2_s(&mut self, block: &[u8]) {
        self.scale = half_at(block, 0) / 8.0;
        self.nibble_steps(&block[74..82]);
        for i in 0..32 {
            let code = u16::from(block[2 + i]) | (u16::from((block[66 + i / 4] >> (i % 4 * 2)) & 3) << 8);
            eight(grids::IQ2_S[usize::from(code)], &mut self.codes[8 * i..], negative(block[34 + i]));
        }
    }

    /// The scale, 64 bytes of codes, and a word for each 32 elements: four times seven signs, a four-bit scale.
    fn iq3_xxs(&mut self, block: &[u8]) {
        self.scale = half_at(block, 0) / 4.0;
        for part in 0..8 {
            let at = 66 + 4 * part;
            let word = u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
            self.odd_step(2 * part, (word >> 28) as u16);
            self.odd_step(2 * part + 1, (word >> 28) as u16);
            for i in 0..4 {
                let signs = seven_signs(word >> (7 * i));
                let codes = [0, 1].map(|j| grids::IQ3_XXS[usize::from(block[2 + 8 * part + 2 * i + j])]);
                fours(codes, &mut self.codes[32 * part + 8 * i..], signs);
            }
        }
    }

    /// The scale, 64 bytes of codes, the codes' ninth bits, 32 bytes of signs, a four-bit scale for each 32 elements.
    fn iq3_s(&mut self, block: &[u8]) {
        self.scale = half_at(block, 0);
        for part in 0..8 {
            let step = (block[106 + part / 2] >> (part % 2 * 4)) & 15;
            self.odd_step(2 * part, step.into());
            self.odd_step(2 * part + 1, step.into());
        }
        for i in 0..32 {
            let codes = [2 * i, 2 * i + 1].map(|j| {
                let ninth = u16::from((block[66 + j / 8] >> (j % 8)) & 1);
                grids::IQ3_S[usize::from(u16::from(block[2 + j]) | (ninth << 8))]
            });
            fours(codes, &mut self.codes[8 * i..], block[74 + i]);
        }
    }

    /// Scales are odd numbers: `n` stands for `2 n + 1`.
    fn odd_step(&mut self, at: usize, n: u16) {
        self.steps[at] = (2 * n + 1) as i8;
    }

    /// Four bits for each sixteen elements.
    fn nibble_steps(&mut self, packed: &[u8]) {
        for step in 0..16 {
            self.odd_step(step, ((packed[step / 2] >> (step % 2 * 4)) & 15).into());
        }
    }
}

/// Sixteen bytes: low nibbles are the first sixteen codes, high ones the next.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(&bytes[..16]) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
}

/// Eight signs of which seven are given: an even number of them is negative.
fn seven_signs(bits: u32) -> u8 {
    let seven = (bits & 127) as u8;
    seven | (((seven.count_ones() & 1) as u8) << 7)
}

/// What a code has besides its magnitude, from a byte of signs.
fn negative(signs: u8) -> impl Fn(usize) -> u8 {
    move |i| if (signs >> i) & 1 == 0 { 0 } else { NEGATIVE }
}

/// The eight elements of a grid's entry.
fn eight(entry: u16, codes: &mut [u8], besides: impl Fn(usize) -> u8) {
    for (i, code) in codes.iter_mut().enumerate().take(8) {
        *code = ((entry >> (2 * i)) & 3) as u8 | besides(i);
    }
}

/// The eight elements of two entries, with their signs.
fn fours(entries: [u16; 2], codes: &mut [u8], signs: u8) {
    for (i, code) in codes.iter_mut().enumerate().take(8) {
        *code = ((entries[i / 4] >> (i % 4 * 4)) & 15) as u8 | negative(signs)(i);
    }
}
