//! K-quants: super-blocks of 256 elements, whose sub-blocks have small integer scales of their own.

use super::dequantise::half_at;

/// Six-bit scale and minimum of sub-block `j` of eight, as Q4_K and Q5_K pack them: the first four in the low bits of
/// bytes 0..4 and 4..8, the others in nibbles of bytes 8..12 with their upper two bits on top of the first four.
fn scale_and_min(packed: &[u8], j: usize) -> (f32, f32) {
    let (scale, min) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        ((packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4), (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4))
    };
    (f32::from(scale), f32::from(min))
}

/// 16 bytes of scale (low nibble) and minimum (high nibble), 64 bytes of two-bit quants, `d`, `dmin`. Each 32 bytes
/// of quants hold 128 elements, two bits of every byte for 32 of them.
pub(super) fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (scales, quants) = (&block[..16], &block[16..80]);
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    for (sub, values) in out.chunks_exact_mut(16).enumerate() {
        let scale = d * f32::from(scales[sub] & 15);
        let min = dmin * f32::from(scales[sub] >> 4);
        let (from, shift) = two_bit_place(sub);
        for (value, &q) in values.iter_mut().zip(&quants[from..]) {
            *value = scale * f32::from((q >> shift) & 3) - min;
        }
    }
}

/// Where the two-bit quants of the 16 elements of sub-block `sub` lie: first byte, and shift within the bytes.
fn two_bit_place(sub: usize) -> (usize, usize) {
    (sub / 8 * 32 + sub % 2 * 16, sub % 8 / 2 * 2)
}

/// `d`, `dmin`, 12 bytes of scales and minimums, 128 bytes of nibbles: each 32 bytes hold one sub-block of 32 in the
/// low nibbles and the next in the high ones.
pub(super) fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (packed, quants) = (&block[4..16], &block[16..]);
    for (sub, values) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(packed, sub);
        let (scale, min) = (d * scale, dmin * min);
        for (value, &pair) in values.iter_mut().zip(&quants[sub / 2 * 32..]) {
            *value = scale * f32::from((pair >> (sub % 2 * 4)) & 15) - min;
        }
    }
}

/// As Q4_K, with 32 bytes of fifth bits (bit `i` of byte `j` for element `32 i + j`) before the nibbles.
pub(super) fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (packed, high, quants) = (&block[4..16], &block[16..48], &block[48..]);
    for (sub, values) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(packed, sub);
        let (scale, min) = (d * scale, dmin * min);
        for (i, value) in values.iter_mut().enumerate() {
            let nibble = (quants[sub / 2 * 32 + i] >> (sub % 2 * 4)) & 15;
            let fifth = (high[i] >> sub) & 1;
            *value = scale * f32::from(nibble | (fifth << 4)) - min;
        }
    }
}

/// 128 bytes of nibbles, 64 bytes of upper two bits, 16 signed scales, `d`. Each half of 128 elements takes 64 bytes
/// of nibbles and 32 of upper bits; value `d s (q − 32)`.
pub(super) fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let (nibbles, uppers, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = half_at(block, 208);
    for (sub, values) in out.chunks_exact_mut(16).enumerate() {
        let scale = d * f32::from(scales[sub] as i8);
        // Within its half of 128 elements: the quarter of 32, and which 16 of them.
        let (half, quarter, from) = (sub / 8, sub % 8 / 2, sub % 2 * 16);
        let low_from = half * 64 + quarter % 2 * 32 + from;
        let high_from = half * 32 + from;
        for (i, value) in values.iter_mut().enumerate() {
            let low = (nibbles[low_from + i] >> (quarter / 2 * 4)) & 15;
            let high = (uppers[high_from + i] >> (quarter * 2)) & 3;
            *value = scale * (f32::from(low | (high << 4)) - 32.0);
        }
    }
}
