//! What vectors are made of.

use half::{bf16, f16};

/// A number that collectives carry, little-endian.
pub trait Element: Copy + Default + Send + Sync + 'static {
    /// Its value.
    fn to_f32(self) -> f32;

    /// The nearest one to a value; of two that are as near, the one whose last bit is zero.
    fn from_f32(value: f32) -> Self;

    /// Appends elements' bytes.
    fn encode(elements: &[Self], out: &mut Vec<u8>);

    /// Appends the bytes of sums, rounded.
    fn encode_sums(sums: &[f32], out: &mut Vec<u8>);

    /// The values of elements, from bytes whose count is a multiple of an element's.
    fn decode(bytes: &[u8]) -> impl Iterator<Item = f32>;
}

macro_rules! element {
    ($type:ty, $bytes:literal, $to:expr, $from:expr) => {
        impl Element for $type {
            fn to_f32(self) -> f32 {
                $to(self)
            }

            fn from_f32(value: f32) -> Self {
                $from(value)
            }

            fn encode(elements: &[Self], out: &mut Vec<u8>) {
                let start = out.len();
                out.resize(start + elements.len() * $bytes, 0);
                for (bytes, element) in out[start..].chunks_exact_mut($bytes).zip(elements) {
                    bytes.copy_from_slice(&element.to_le_bytes());
                }
            }

            fn encode_sums(sums: &[f32], out: &mut Vec<u8>) {
                let start = out.len();
                out.resize(start + sums.len() * $bytes, 0);
                for (bytes, sum) in out[start..].chunks_exact_mut($bytes).zip(sums) {
                    bytes.copy_from_slice(&<$type>::to_le_bytes($from(*sum)));
                }
            }

            fn decode(bytes: &[u8]) -> impl Iterator<Item = f32> {
                bytes.chunks_exact($bytes).map(|bytes| {
                    let mut word = [0; $bytes];
                    word.copy_from_slice(bytes);
                    $to(<$type>::from_le_bytes(word))
                })
            }
        }
    };
}

element!(f32, 4, |value: f32| value, |value: f32| value);
element!(f16, 2, f16::to_f32, f16::from_f32);
element!(bf16, 2, bf16::to_f32, bf16::from_f32);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_little_endian_and_rounding_is_to_the_nearest() {
        let mut out = vec![9];
        f32::encode(&[1.0, -2.5], &mut out);
        assert_eq!(out, [9, 0, 0, 0x80, 0x3f, 0, 0, 0x20, 0xc0]);
        assert_eq!(f32::decode(&out[1..]).collect::<Vec<_>>(), [1.0, -2.5]);
        out.clear();
        f16::encode_sums(&[1.0, 2049.0, 2051.0], &mut out);
        assert_eq!(out, [0, 0x3c, 0, 0x68, 2, 0x68]);
        out.clear();
        bf16::encode_sums(&[1.0, 257.0], &mut out);
        assert_eq!(out, [0x80, 0x3f, 0x80, 0x43]);
    }
}
