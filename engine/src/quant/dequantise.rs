//! From blocks to numbers.

use super::{BlockType, Coded, k_quants, levels};
use half::{bf16, f16};

/// Why blocks were not turned into numbers, or numbers into blocks. Nothing was written then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// Nobody has taught us this type.
    #[error("weights of type {0} are not supported; take a file with another quantisation, e.g. Q4_K or Q8_0")]
    Unsupported(BlockType),
    /// The bytes and the elements do not belong together.
    #[error("{elements} elements of type {block} do not fit {bytes} bytes")]
    Length {
        /// The type.
        block: BlockType,
        /// Length of the packed side.
        bytes: usize,
        /// Length of the plain side.
        elements: usize,
    },
}

/// Unpacks `blocks` into `output`, which must have as many elements as the blocks hold.
///
/// Values are exactly what ggml's reference code gives. NaN and infinite scales pass through.
///
/// # Errors
/// [`QuantError::Unsupported`] for a type that is not [`BlockType::is_supported`]; [`QuantError::Length`] where the
/// two sides differ in length.
pub fn dequantise(block: BlockType, blocks: &[u8], output: &mut [f32]) -> Result<(), QuantError> {
    check(block, blocks.len(), output.len())?;
    match block {
        BlockType::F32 => each::<4, 1>(blocks, output, |b, out| out[0] = f32::from_le_bytes(*b)),
        BlockType::F16 => each::<2, 1>(blocks, output, |b, out| out[0] = f16::from_le_bytes(*b).to_f32()),
        BlockType::BF16 => each::<2, 1>(blocks, output, |b, out| out[0] = bf16::from_le_bytes(*b).to_f32()),
        BlockType::Q4_0 => each(blocks, output, q4_0),
        BlockType::Q4_1 => each(blocks, output, q4_1),
        BlockType::Q5_0 => each(blocks, output, q5_0),
        BlockType::Q5_1 => each(blocks, output, q5_1),
        BlockType::Q8_0 => each(blocks, output, q8_0),
        BlockType::Q2_K => each(blocks, output, k_quants::q2_k),
        BlockType::Q4_K => each(blocks, output, k_quants::q4_k),
        BlockType::Q5_K => each(blocks, output, k_quants::q5_k),
        BlockType::Q6_K => each(blocks, output, k_quants::q6_k),
        other => match levels(other) {
            Some(levels) => {
                for (bytes, out) in blocks.chunks_exact(other.block_bytes()).zip(output.chunks_exact_mut(other.block_len())) {
                    Coded::read(other, bytes).write(levels, out);
                }
            }
            None => return Err(QuantError::Unsupported(other)),
        },
    }
    Ok(())
}

/// Refuses what is not supported, and sides that differ in length.
pub(super) fn check(block: BlockType, bytes: usize, elements: usize) -> Result<(), QuantError> {
    if !block.is_supported() {
        return Err(QuantError::Unsupported(block));
    }
    if block.row_bytes(elements) != Some(bytes) {
        return Err(QuantError::Length { block, bytes, elements });
    }
    Ok(())
}

/// Runs `unpack` over pairs of a block and its elements. Lengths were checked; a type whose sizes in the table differ
/// from those in the code would leave a remainder, which the tests would see.
fn each<const BYTES: usize, const ELEMENTS: usize>(blocks: &[u8], output: &mut [f32], unpack: impl Fn(&[u8; BYTES], &mut [f32; ELEMENTS])) {
    let (blocks, rest) = blocks.as_chunks::<BYTES>();
    let (output, left) = output.as_chunks_mut::<ELEMENTS>();
    debug_assert!(rest.is_empty() && left.is_empty() && blocks.len() == output.len());
    for (block, elements) in blocks.iter().zip(output) {
        unpack(block, elements);
    }
}

/// The half-precision number at `at`.
pub(super) fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The 32-bit number at `at`.
fn word_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Scale, 16 bytes of nibbles: low ones are the first half of the block, high ones the second. Value `d (q − 8)`.
fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (i, &pair) in block[2..].iter().enumerate() {
        out[i] = d * (f32::from(pair & 15) - 8.0);
        out[i + 16] = d * (f32::from(pair >> 4) - 8.0);
    }
}

/// Scale, minimum, nibbles as in Q4_0. Value `d q + m`.
fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (i, &pair) in block[4..].iter().enumerate() {
        out[i] = d * f32::from(pair & 15) + m;
        out[i + 16] = d * f32::from(pair >> 4) + m;
    }
}

/// Scale, a word with the fifth bits (bit `i` for element `i`), nibbles. Value `d (q − 16)`.
fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    let high = word_at(block, 2);
    for (i, &pair) in block[6..].iter().enumerate() {
        out[i] = d * (five(pair & 15, high >> i) - 16.0);
        out[i + 16] = d * (five(pair >> 4, high >> (i + 16)) - 16.0);
    }
}

/// Scale, minimum, fifth bits, nibbles. Value `d q + m`.
fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let high = word_at(block, 4);
    for (i, &pair) in block[8..].iter().enumerate() {
        out[i] = d * five(pair & 15, high >> i) + m;
        out[i + 16] = d * five(pair >> 4, high >> (i + 16)) + m;
    }
}

/// A nibble and, in the lowest bit of `high`, the fifth bit.
fn five(nibble: u8, high: u32) -> f32 {
    f32::from(nibble | (((high & 1) as u8) << 4))
}

/// Scale, 32 signed bytes. Value `d q`.
fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (value, &q) in out.iter_mut().zip(&block[2..]) {
        *value = f32::from(q as i8) * d;
    }
}
