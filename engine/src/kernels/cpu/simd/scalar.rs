//! The portable instruction set: arrays. It defines what the others must give, bit for bit.

use half::{bf16, f16};

use super::{BLOCK, LANES, Op, Simd};

/// Plain arrays, for any machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Scalar;

#[inline(always)]
fn zip(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

#[inline(always)]
fn zip_ints(a: [i32; LANES], b: [i32; LANES], f: impl Fn(i32, i32) -> i32) -> [i32; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

/// One row's element of a block of unsigned weights, in the layout that [`Simd::dot_unsigned`] describes.
#[inline(always)]
pub(crate) fn unsigned_weight<const HIGH: usize>(low: &[u8; 256], high: &[u8], row: usize, element: usize) -> u8 {
    let (half, j, i) = (element / 16, element % 16 / 4, element % 4);
    let nibble = (low[64 * j + 4 * row + i] >> (4 * half)) & 15;
    let more = match HIGH {
        0 => 0,
        1 => (high[4 * row + i] >> (4 * half + j)) & 1,
        _ => (high[64 * half + 4 * row + i] >> (2 * j)) & 3,
    };
    nibble | more << 4
}

impl Simd for Scalar {
    type F = [f32; LANES];
    type I = [i32; LANES];

    fn run<O: Op>(self, op: O) -> O::Output {
        op.eval(self)
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::F {
        [value; LANES]
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        *from
    }

    #[inline(always)]
    fn store(self, value: Self::F, to: &mut [f32; LANES]) {
        *to = value;
    }

    #[inline(always)]
    fn load_half(self, from: &[u16; LANES]) -> Self::F {
        from.map(|bits| f16::from_bits(bits).to_f32_const())
    }

    #[inline(always)]
    fn store_half(self, value: Self::F, to: &mut [u16; LANES]) {
        *to = value.map(|v| f16::from_f32_const(v).to_bits());
    }

    #[inline(always)]
    fn load_brain(self, from: &[u16; LANES]) -> Self::F {
        from.map(|bits| bf16::from_bits(bits).to_f32_const())
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn neg_fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|i| (-a[i]).mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        a.map(f32::abs)
    }

    #[inline(always)]
    fn nearest(self, a: Self::F) -> Self::F {
        a.map(f32::round_ties_even)
    }

    #[inline(always)]
    fn where_above(self, a: Self::F, b: Self::F, value: Self::F) -> Self::F {
        std::array::from_fn(|i| if a[i] > b[i] { value[i] } else { 0.0 })
    }

    #[inline(always)]
    fn exp2_integer(self, n: Self::F) -> Self::F {
        n.map(|n| f32::from_bits(((n as i32 + 127) as u32) << 23))
    }

    #[inline(always)]
    fn zero_ints(self) -> Self::I {
        [0; LANES]
    }

    #[inline(always)]
    fn splat_int(self, value: i32) -> Self::I {
        [value; LANES]
    }

    #[inline(always)]
    fn add_ints(self, a: Self::I, b: Self::I) -> Self::I {
        zip_ints(a, b, i32::wrapping_add)
    }

    #[inline(always)]
    fn sub_ints(self, a: Self::I, b: Self::I) -> Self::I {
        zip_ints(a, b, i32::wrapping_sub)
    }

    #[inline(always)]
    fn mul_ints(self, a: Self::I, b: Self::I) -> Self::I {
        zip_ints(a, b, i32::wrapping_mul)
    }

    #[inline(always)]
    fn load_u8(self, from: &[u8; LANES]) -> Self::I {
        from.map(i32::from)
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::I {
        from.map(i32::from)
    }

    #[inline(always)]
    fn to_floats(self, a: Self::I) -> Self::F {
        a.map(|v| v as f32)
    }

    #[inline(always)]
    fn to_ints(self, a: Self::F) -> Self::I {
        a.map(|v| v as i32)
    }

    #[inline(always)]
    fn store_i8(self, a: Self::I, to: &mut [i8; LANES]) {
        *to = a.map(|v| v as i8);
    }

    #[inline(always)]
    fn dot_unsigned<const HIGH: usize, const T: usize>(self, low: &[u8; 256], high: &[u8], x: [&[i8; BLOCK]; T]) -> [[Self::I; 2]; T] {
        let mut sums = [[[0i32; LANES]; 2]; T];
        for element in 0..BLOCK {
            for row in 0..LANES {
                let weight = i32::from(unsigned_weight::<HIGH>(low, high, row, element));
                for (sums, x) in sums.iter_mut().zip(x) {
                    sums[element / 16][row] += weight * i32::from(x[element]);
                }
            }
        }
        sums
    }

    #[inline(always)]
    fn dot_nibbles<const T: usize>(self, low: &[u8; 256], x: [&[i8; BLOCK]; T]) -> [Self::I; T] {
        self.dot_unsigned::<0, T>(low, &[], x).map(|[a, b]| self.add_ints(a, b))
    }

    #[inline(always)]
    fn dot_signed<const T: usize>(self, bytes: &[i8; 512], x: [&[i8; BLOCK]; T]) -> [Self::I; T] {
        let mut sums = [[0i32; LANES]; T];
        for element in 0..BLOCK {
            for row in 0..LANES {
                let weight = i32::from(bytes[64 * (element / 4) + 4 * row + element % 4]);
                for (sums, x) in sums.iter_mut().zip(x) {
                    sums[row] += weight * i32::from(x[element]);
                }
            }
        }
        sums
    }
}
