//! From numbers to blocks, for the types that need no search: the reference rounding of ggml.

use super::BlockType;
use super::dequantise::{QuantError, check};
use half::{bf16, f16};

/// Packs `elements` into blocks. F32, F16, BF16, Q8_0, Q4_0 and Q4_1 can be made; elements should be finite.
///
/// # Errors
/// [`QuantError::Unsupported`] for any other type; [`QuantError::Length`] where the elements are no whole number of
/// blocks.
pub fn quantise(block: BlockType, elements: &[f32]) -> Result<Vec<u8>, QuantError> {
    let bytes = block.row_bytes(elements.len()).ok_or(QuantError::Length { block, bytes: 0, elements: elements.len() })?;
    check(block, bytes, elements.len())?;
    let mut out = Vec::with_capacity(bytes);
    match block {
        BlockType::F32 => elements.iter().for_each(|x| out.extend(x.to_le_bytes())),
        BlockType::F16 => elements.iter().for_each(|x| out.extend(f16::from_f32(*x).to_le_bytes())),
        BlockType::BF16 => elements.iter().for_each(|x| out.extend(bf16::from_f32(*x).to_le_bytes())),
        BlockType::Q8_0 => elements.as_chunks::<32>().0.iter().for_each(|x| q8_0(x, &mut out)),
        BlockType::Q4_0 => elements.as_chunks::<32>().0.iter().for_each(|x| q4_0(x, &mut out)),
        BlockType::Q4_1 => elements.as_chunks::<32>().0.iter().for_each(|x| q4_1(x, &mut out)),
        other => return Err(QuantError::Unsupported(other)),
    }
    Ok(out)
}

/// One over a scale, where a scale of zero means that everything is zero.
fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// The largest magnitude becomes ±127.
fn q8_0(x: &[f32; 32], out: &mut Vec<u8>) {
    let d = x.iter().fold(0.0f32, |most, v| most.max(v.abs())) / 127.0;
    let id = inverse(d);
    out.extend(f16::from_f32(d).to_le_bytes());
    out.extend(x.iter().map(|v| (v * id).round() as i8 as u8));
}

/// The element of largest magnitude becomes −8, with its sign in the scale.
fn q4_0(x: &[f32; 32], out: &mut Vec<u8>) {
    let extreme = x.iter().fold(0.0f32, |most, &v| if v.abs() > most.abs() { v } else { most });
    let d = extreme / -8.0;
    let id = inverse(d);
    out.extend(f16::from_f32(d).to_le_bytes());
    nibbles(x, out, |v| v * id + 8.5);
}

/// From the least element, 0, to the greatest, 15.
fn q4_1(x: &[f32; 32], out: &mut Vec<u8>) {
    let (min, max) = x.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(min, max), &v| (min.min(v), max.max(v)));
    let d = (max - min) / 15.0;
    let id = inverse(d);
    out.extend(f16::from_f32(d).to_le_bytes());
    out.extend(f16::from_f32(min).to_le_bytes());
    nibbles(x, out, |v| (v - min) * id + 0.5);
}

/// Sixteen bytes: low nibbles are the first half, high nibbles the second.
fn nibbles(x: &[f32; 32], out: &mut Vec<u8>, level: impl Fn(f32) -> f32) {
    // The cast truncates and saturates.
    let level = |v: f32| (level(v) as u8).min(15);
    let (low, high) = x.split_at(16);
    out.extend(low.iter().zip(high).map(|(&l, &h)| level(l) | (level(h) << 4)));
}
