//! Weight rows as the device's kernels read them: 32-bit words, quantised as in the file.
//!
//! A row is three planes one after the other, each of whole words: the low bits of its quants, their high bits if there are any, and
//! the scales. Quants stand in the order of the columns, the first one in the lowest bits, so that neighbouring units read neighbouring
//! words and each of them has the weights of neighbouring columns. Nothing is rounded.
//!
//! | type | low | high | less | scales |
//! |---|---|---|---|---|
//! | Q4_0 | 4 | – | 8 | a half for 32 columns |
//! | Q4_1 | 4 | – | 0 | halves of scale and minimum for 32 columns |
//! | Q5_0 | 4 | 1 | 16 | a half for 32 columns |
//! | Q5_1 | 4 | 1 | 0 | halves of scale and minimum for 32 columns |
//! | Q8_0 | 8 | – | 128 | a half for 32 columns |
//! | Q4_K | 4 | – | 0 | two halves for 256 columns, then a byte of scale and one of minimum for each 32 |
//! | Q5_K | 4 | 1 | 0 | the same |
//! | Q6_K | 4 | 2 | 32 | a half for 256 columns, then a signed byte of scale for each 16 |
//! | Q2_K | 4 | – | 0 | two halves for 256 columns, then a nibble of scale and one of minimum for each 16 |
//! | IQ4_NL | 4 | – | level | a half for 32 columns |
//! | MXFP4 | 4 | – | level | the upper half of a float for 32 columns |
//! | others of few levels | 4 | – | level | as Q6_K |
//!
//! *Less* is what is taken off a quant to get its integer: quants are stored without a sign. Where it says *level*, the quant is the place
//! of one of sixteen levels instead ([`quant`](crate::quant)'s `levels`). Plain numbers fill words in their order.

use half::{bf16, f16};

use crate::quant::{self, BlockType, Coded};

/// Columns that a unit of a kernel takes at once.
pub(super) const OCTET: usize = 8;

/// How weights are written down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// Numbers of 32 bits.
    Single,
    /// Half-precision numbers.
    Half,
    /// Upper halves of numbers of 32 bits.
    Brain,
    /// Quants.
    Quants {
        /// Low bits: 4 or 8.
        low: usize,
        /// High bits: 0, 1 or 2.
        high: usize,
        /// What is taken off each.
        less: u32,
    },
    /// Places of levels, four bits each.
    Levels {
        /// The levels, signed bytes, four to a word.
        levels: [u32; 4],
        /// Scales are divided by two so often.
        halvings: u32,
    },
}

/// What quants are multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Scales {
    /// One.
    One,
    /// A half-precision scale for 32 columns, two to a word.
    Half,
    /// The upper half of a single-precision scale for 32 columns, two to a word.
    Brain,
    /// A scale and a minimum for 32 columns, in one word.
    Pair,
    /// For 256 columns a word of scale and minimum, and four words with a byte of scale and one of minimum for each 32.
    Super,
    /// For 256 columns a word with a scale, and four words with a signed byte of scale for each 16.
    Signed,
    /// For 256 columns a word of scale and minimum, and four words with a nibble of scale and one of minimum for each 16.
    Nibbles,
}

/// How a matrix's rows lie in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Layout {
    pub(super) kind: Kind,
    pub(super) scales: Scales,
    pub(super) columns: usize,
}

impl Layout {
    /// The layout of rows of `columns` elements; `None` for types without one, and where columns are no whole blocks.
    pub(super) fn new(block: BlockType, columns: usize) -> Option<Self> {
        if columns == 0 || !columns.is_multiple_of(block.block_len()) {
            return None;
        }
        let quants = |low, high, less| Kind::Quants { low, high, less };
        let (kind, scales) = match block {
            BlockType::F32 => (Kind::Single, Scales::One),
            BlockType::F16 => (Kind::Half, Scales::One),
            BlockType::BF16 => (Kind::Brain, Scales::One),
            BlockType::Q4_0 => (quants(4, 0, 8), Scales::Half),
            BlockType::Q4_1 => (quants(4, 0, 0), Scales::Pair),
            BlockType::Q5_0 => (quants(4, 1, 16), Scales::Half),
            BlockType::Q5_1 => (quants(4, 1, 0), Scales::Pair),
            BlockType::Q8_0 => (quants(8, 0, 128), Scales::Half),
            BlockType::Q4_K => (quants(4, 0, 0), Scales::Super),
            BlockType::Q5_K => (quants(4, 1, 0), Scales::Super),
            BlockType::Q6_K => (quants(4, 2, 32), Scales::Signed),
            BlockType::Q2_K => (quants(4, 0, 0), Scales::Nibbles),
            other => {
                let levels = quant::levels(other)?;
                let mut words = [0; 4];
                for (word, levels) in words.iter_mut().zip(levels.as_chunks::<4>().0) {
                    *word = u32::from_le_bytes(levels.map(|level| level as u8));
                }
                let scales = match other {
                    BlockType::IQ4_NL => Scales::Half,
                    BlockType::MXFP4 => Scales::Brain,
                    _ => Scales::Signed,
                };
                (Kind::Levels { levels: words, halvings: halvings(other) }, scales)
            }
        };
        Some(Self { kind, scales, columns })
    }

    /// Groups of [`OCTET`] columns, the last one perhaps with columns that are not there.
    pub(super) fn octets(&self) -> usize {
        self.columns.div_ceil(OCTET)
    }

    /// Whether the last group has columns that are not there.
    pub(super) fn ragged(&self) -> bool {
        !self.columns.is_multiple_of(OCTET)
    }

    /// Whether there are minimums.
    pub(super) fn has_minimums(&self) -> bool {
        matches!(self.scales, Scales::Pair | Scales::Super | Scales::Nibbles)
    }

    /// How often scales are divided by two.
    pub(super) fn halvings(&self) -> u32 {
        match self.kind {
            Kind::Levels { halvings, .. } => halvings,
            _ => 0,
        }
    }

    /// Words of the plane of low bits, or of plain numbers.
    fn low_words(&self) -> usize {
        match self.kind {
            Kind::Single => self.octets() * OCTET,
            Kind::Half | Kind::Brain => self.octets() * OCTET / 2,
            Kind::Quants { low, .. } => self.columns * low / 32,
            Kind::Levels { .. } => self.columns / 8,
        }
    }

    /// Where in a row the words of high bits begin.
    pub(super) fn high_at(&self) -> usize {
        self.low_words()
    }

    /// Where in a row the words of scales begin.
    pub(super) fn scales_at(&self) -> usize {
        match self.kind {
            Kind::Quants { high, .. } => self.low_words() + self.columns * high / 32,
            _ => self.low_words(),
        }
    }

    /// Words of a row.
    pub(super) fn words(&self) -> usize {
        let scales = match self.scales {
            Scales::One => 0,
            Scales::Half | Scales::Brain => (self.columns / 32).div_ceil(2),
            Scales::Pair => self.columns / 32,
            Scales::Super | Scales::Signed | Scales::Nibbles => self.columns / 256 * 5,
        };
        self.scales_at() + scales
    }

    /// Writes a row of a file, which is as long as the type and the columns say, as words.
    pub(super) fn pack(&self, block: BlockType, row: &[u8], words: &mut [u32]) {
        words.fill(0);
        let (low, high) = match self.kind {
            Kind::Quants { low, high, .. } => (low, high),
            Kind::Levels { .. } => (4, 0),
            _ => return pack_numbers(self.kind, row, words),
        };
        let (lows, rest) = words.split_at_mut(self.high_at());
        let (highs, scales) = rest.split_at_mut(self.scales_at() - self.high_at());
        let (length, bytes) = (block.block_len(), block.block_bytes());
        let mut quants = [0; 256];
        for (i, block_bytes) in row.chunks_exact(bytes).enumerate() {
            let quants = &mut quants[..length];
            let coded = matches!(self.kind, Kind::Levels { .. }).then(|| Coded::read(block, block_bytes));
            match &coded {
                Some(coded) => quants.copy_from_slice(&coded.codes[..length]),
                None => unpack(block, block_bytes, quants),
            }
            let per_word = 32 / low;
            for (word, quants) in lows[i * length / per_word..].iter_mut().zip(quants.chunks_exact(per_word)) {
                let mask = (1 << low) - 1;
                *word = quants.iter().rev().fold(0, |word, &quant| word << low | u32::from(quant) & mask);
            }
            if high > 0 {
                let per_word = 32 / high;
                for (word, quants) in highs[i * length / per_word..].iter_mut().zip(quants.chunks_exact(per_word)) {
                    *word = quants.iter().rev().fold(0, |word, &quant| word << high | u32::from(quant) >> low);
                }
            }
            match &coded {
                Some(coded) => self.pack_levels(coded, i, scales),
                None => pack_scales(block, block_bytes, i, scales),
            }
        }
    }

    /// The scales of block `i` of a row of levels.
    fn pack_levels(&self, coded: &Coded, i: usize, scales: &mut [u32]) {
        let Kind::Levels { halvings, .. } = self.kind else { return };
        let scale = coded.scale * (1u32 << halvings) as f32;
        match self.scales {
            Scales::Half => scales[i / 2] |= u32::from(f16::from_f32(scale).to_bits()) << (i % 2 * 16),
            Scales::Brain => scales[i / 2] |= u32::from(bf16::from_f32(scale).to_bits()) << (i % 2 * 16),
            _ => {
                let scales = &mut scales[i * 5..][..5];
                scales[0] = u32::from(f16::from_f32(scale).to_bits());
                for (scale, steps) in scales[1..].iter_mut().zip(coded.steps.as_chunks::<4>().0) {
                    *scale = u32::from_le_bytes(steps.map(|step| step as u8));
                }
            }
        }
    }
}

/// How often ggml's scales of a type are divided by two, so that steps and levels are integers.
fn halvings(block: BlockType) -> u32 {
    match block {
        BlockType::IQ1_S | BlockType::IQ1_M | BlockType::IQ2_XXS | BlockType::IQ2_XS | BlockType::IQ2_S => 3,
        BlockType::IQ3_XXS => 2,
        _ => 0,
    }
}

fn pack_numbers(kind: Kind, row: &[u8], words: &mut [u32]) {
    match kind {
        Kind::Single => {
            for (word, bytes) in words.iter_mut().zip(row.as_chunks::<4>().0) {
                *word = u32::from_le_bytes(*bytes);
            }
        }
        _ => {
            for (word, bytes) in words.iter_mut().zip(row.chunks(4)) {
                let byte = |i: usize| u32::from(bytes.get(i).copied().unwrap_or(0));
                *word = byte(0) | byte(1) << 8 | byte(2) << 16 | byte(3) << 24;
            }
        }
    }
}

/// The quants of a block, in the order of the columns and without signs.
fn unpack(block: BlockType, bytes: &[u8], quants: &mut [u8]) {
    let nibbles = |packed: &[u8], quants: &mut [u8]| {
        let (low, high) = quants.split_at_mut(packed.len());
        for ((&pair, low), high) in packed.iter().zip(low).zip(high) {
            (*low, *high) = (pair & 15, pair >> 4);
        }
    };
    let fifth = |bits: &[u8], quants: &mut [u8]| {
        for (i, quant) in quants.iter_mut().enumerate() {
            *quant |= (bits[i / 8] >> (i % 8) & 1) << 4;
        }
    };
    match block {
        BlockType::Q4_0 => nibbles(&bytes[2..], quants),
        BlockType::Q4_1 => nibbles(&bytes[4..], quants),
        BlockType::Q5_0 => {
            nibbles(&bytes[6..], quants);
            fifth(&bytes[2..6], quants);
        }
        BlockType::Q5_1 => {
            nibbles(&bytes[8..], quants);
            fifth(&bytes[4..8], quants);
        }
        BlockType::Q8_0 => {
            for (quant, &byte) in quants.iter_mut().zip(&bytes[2..]) {
                *quant = byte ^ 128;
            }
        }
        BlockType::Q4_K => {
            for (packed, quants) in bytes[16..].chunks_exact(32).zip(quants.chunks_exact_mut(64)) {
                nibbles(packed, quants);
            }
        }
        BlockType::Q5_K => {
            for (packed, quants) in bytes[48..].chunks_exact(32).zip(quants.chunks_exact_mut(64)) {
                nibbles(packed, quants);
            }
            for (sub, quants) in quants.chunks_exact_mut(32).enumerate() {
                for (quant, &bits) in quants.iter_mut().zip(&bytes[16..48]) {
                    *quant |= (bits >> sub & 1) << 4;
                }
            }
        }
        BlockType::Q2_K => {
            for (sub, quants) in quants.chunks_exact_mut(32).enumerate() {
                for (quant, &bits) in quants.iter_mut().zip(&bytes[16 + sub / 4 * 32..]) {
                    *quant = bits >> (sub % 4 * 2) & 3;
                }
            }
        }
        BlockType::Q6_K => {
            for (half, quants) in quants.chunks_exact_mut(128).enumerate() {
                let (nibbles, uppers) = (&bytes[half * 64..][..64], &bytes[128 + half * 32..][..32]);
                for (quarter, quants) in quants.chunks_exact_mut(32).enumerate() {
                    for (i, quant) in quants.iter_mut().enumerate() {
                        let low = nibbles[quarter % 2 * 32 + i] >> (quarter / 2 * 4) & 15;
                        *quant = low | (uppers[i] >> (quarter * 2) & 3) << 4;
                    }
                }
            }
        }
        // Others have no layout with quants.
        _ => {}
    }
}

/// The scales of block `i` of a row.
fn pack_scales(block: BlockType, bytes: &[u8], i: usize, scales: &mut [u32]) {
    let half = |at: usize| u32::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    match block {
        BlockType::Q4_0 | BlockType::Q5_0 | BlockType::Q8_0 => scales[i / 2] |= half(0) << (i % 2 * 16),
        BlockType::Q4_1 | BlockType::Q5_1 => scales[i] = half(0) | half(2) << 16,
        BlockType::Q4_K | BlockType::Q5_K => {
            let scales = &mut scales[i * 5..][..5];
            scales[0] = half(0) | half(2) << 16;
            for sub in 0..8 {
                let (scale, minimum) = six_bits(&bytes[4..16], sub);
                scales[1 + sub / 2] |= (u32::from(scale) | u32::from(minimum) << 8) << (sub % 2 * 16);
            }
        }
        BlockType::Q2_K => {
            let scales = &mut scales[i * 5..][..5];
            scales[0] = half(80) | half(82) << 16;
            for (scale, bytes) in scales[1..].iter_mut().zip(bytes[..16].as_chunks::<4>().0) {
                *scale = u32::from_le_bytes(*bytes);
            }
        }
        BlockType::Q6_K => {
            let scales = &mut scales[i * 5..][..5];
            scales[0] = half(208);
            for sub in 0..16 {
                scales[1 + sub / 4] |= u32::from(bytes[192 + sub]) << (sub % 4 * 8);
            }
        }
        _ => {}
    }
}

/// Scale and minimum of sub-block `sub` of eight, as Q4_K and Q5_K pack them into 12 bytes: those of the first four have bytes of
/// their own, whose upper two bits are the upper two of the others'.
fn six_bits(packed: &[u8], sub: usize) -> (u8, u8) {
    if sub < 4 {
        (packed[sub] & 63, packed[sub + 4] & 63)
    } else {
        (packed[sub + 4] & 15 | packed[sub - 4] >> 6 << 4, packed[sub + 4] >> 4 | packed[sub] >> 6 << 4)
    }
}

/// A row's weights, from its words. The kernels' reading side is in `words`.
pub(super) fn values(layout: &Layout, words: &[u32]) -> Vec<f32> {
    let half = |bits: u32| f16::from_bits(bits as u16).to_f32();
    let scales = &words[layout.scales_at()..];
    (0..layout.columns)
        .map(|column| {
            let (low, high, less) = match layout.kind {
                Kind::Levels { .. } => (4, 0, 0),
                Kind::Single => return f32::from_bits(words[column]),
                Kind::Half => return half(words[column / 2] >> (column % 2 * 16)),
                Kind::Brain => return bf16::from_bits((words[column / 2] >> (column % 2 * 16)) as u16).to_f32(),
                Kind::Quants { low, high, less } => (low, high, less),
            };
            let bits = |at: usize, size: usize| {
                if size == 0 { 0 } else { words[at + column * size / 32] >> (column * size % 32) & ((1 << size) - 1) }
            };
            let bits = bits(0, low) | bits(layout.high_at(), high) << low;
            let (quant, factor) = match layout.kind {
                Kind::Levels { levels, halvings } => {
                    let level = (levels[bits as usize / 4] >> (bits % 4 * 8)) as u8 as i8;
                    (f32::from(level), 1.0 / (1u32 << halvings) as f32)
                }
                _ => (bits as f32 - less as f32, 1.0),
            };
            let block = column / 32;
            match layout.scales {
                Scales::One => quant,
                Scales::Half => quant * half(scales[block / 2] >> (block % 2 * 16)),
                Scales::Brain => quant * bf16::from_bits((scales[block / 2] >> (block % 2 * 16)) as u16).to_f32(),
                Scales::Pair => quant * half(scales[block]) + half(scales[block] >> 16),
                Scales::Super => {
                    let (first, sub) = (column / 256 * 5, block % 8);
                    let bytes = scales[first + 1 + sub / 2] >> (sub % 2 * 16);
                    let (scale, minimum) = ((bytes & 255) as f32, (bytes >> 8 & 255) as f32);
                    quant * (half(scales[first]) * scale) - half(scales[first] >> 16) * minimum
                }
                Scales::Nibbles => {
                    let (first, sub) = (column / 256 * 5, column / 16 % 16);
                    let byte = scales[first + 1 + sub / 4] >> (sub % 4 * 8) & 255;
                    quant * (half(scales[first]) * (byte & 15) as f32) - half(scales[first] >> 16) * (byte >> 4) as f32
                }
                Scales::Signed => {
                    let (first, sub) = (column / 256 * 5, column / 16 % 16);
                    let scale = (scales[first + 1 + sub / 4] >> (sub % 4 * 8)) as u8 as i8;
                    quant * (half(scales[first]) * factor * f32::from(scale))
                }
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::kernels::matrix_bytes;
    use crate::kernels::testing::{TYPES, random_blocks};
    use crate::quant;

    proptest! {
        #[test]
        fn words_hold_what_the_file_held(kind in 0..TYPES.len(), blocks in 1..4usize, seed in any::<u64>()) {
            let block = TYPES[kind];
            let columns = blocks * block.block_len() * if block.is_plain() { 7 } else { 1 };
            let bytes = random_blocks(block, columns, seed);
            let layout = Layout::new(block, columns).unwrap();
            let mut words = vec![7; layout.words()];
            layout.pack(block, &bytes, &mut words);
            let mut expected = vec![0.0; columns];
            quant::dequantise(block, &bytes, &mut expected).unwrap();
            prop_assert_eq!(values(&layout, &words), expected);
        }
    }

    #[test]
    fn matrices_take_hardly_more_than_what_is_leased_for_them() {
        for block in TYPES {
            let held = 64 * 4 * Layout::new(block, 1024).unwrap().words() as u64;
            let leased = matrix_bytes(block, 64, 1024).unwrap();
            assert!(held <= leased + leased / 100, "{block}: {held} of {leased}");
        }
    }

    #[test]
    fn other_types_have_no_layout() {
        assert_eq!(Layout::new(BlockType::NVFP4, 256), None);
        assert_eq!(Layout::new(BlockType::Q4_0, 40), None);
        assert_eq!(Layout::new(BlockType::F32, 0), None);
    }
}
