//! The portable instruction set: arrays. It defines what the others must give, bit for bit.

use half::{bf16, f16};

use super::{BLOCK, LANES, Op, PartOp, Simd, Tile, Vector};

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

/// Joins lanes `i` and `i + 8`, then `i` and `i + 4` of what came of it, and so on.
#[inline(always)]
fn tree(mut lanes: [f32; LANES], join: impl Fn(f32, f32) -> f32) -> f32 {
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] = join(lanes[i], lanes[i + width]);
        }
    }
    lanes[0]
}

/// Sums over elements 0–15 and 16–31 of weights times activations.
#[inline(always)]
fn dot_halves<const T: usize>(weight: impl Fn(usize, usize) -> i32, x: &Tile<T>) -> [[[i32; LANES]; T]; 2] {
    let mut sums = [[[0i32; LANES]; T]; 2];
    for element in 0..BLOCK {
        for row in 0..LANES {
            let weight = weight(row, element);
            for t in 0..T {
                sums[element / 16][t][row] += weight * i32::from(x.values[element / 4][t][element % 4]);
            }
        }
    }
    sums
}

/// The sum of both halves, each times its scale.
#[inline(always)]
fn scaled<const T: usize>([first, second]: [[[i32; LANES]; T]; 2], [a, b]: [[i32; LANES]; 2]) -> [[i32; LANES]; T] {
    std::array::from_fn(|t| std::array::from_fn(|row| first[t][row] * a[row] + second[t][row] * b[row]))
}

#[inline(always)]
fn dot<const T: usize>(weight: impl Fn(usize, usize) -> i32, x: &Tile<T>) -> [[i32; LANES]; T] {
    let [first, second] = dot_halves(weight, x);
    std::array::from_fn(|t| zip_ints(first[t], second[t], |a, b| a + b))
}

#[inline(always)]
fn nibble(low: &[u8; 256], row: usize, element: usize) -> u8 {
    low[64 * (element % 16 / 4) + 4 * row + element % 4] >> (4 * (element / 16)) & 15
}

impl Simd for Scalar {
    fn run<O: Op>(self, op: O) -> O::Output {
        op.eval(self)
    }

    #[inline(always)]
    fn each_part<O: PartOp<Output = ()> + Copy>(self, op: O) {
        op.eval(self);
    }

    #[inline(always)]
    fn sum_of(self, a: Self::F) -> f32 {
        tree(a, |a, b| a + b)
    }

    #[inline(always)]
    fn max_of(self, a: Self::F) -> f32 {
        tree(a, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn pair_sums(self, values: &[i8; LANES]) -> [i32; 2] {
        let sum = |pair: usize| values.iter().enumerate().filter(|(i, _)| i % 4 / 2 == pair).map(|(_, v)| i32::from(*v)).sum();
        [sum(0), sum(1)]
    }
}

impl Vector for Scalar {
    type F = [f32; LANES];
    type I = [i32; LANES];

    fn call<O: PartOp>(self, op: O) -> O::Output {
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
    fn load_u8(self, from: &[u8; LANES]) -> Self::I {
        from.map(i32::from)
    }

    #[inline(always)]
    fn to_floats(self, a: Self::I) -> Self::F {
        a.map(|v| v as f32)
    }

    #[inline(always)]
    fn to_ints(self, a: Self::F) -> Self::I {
        a.map(|v| v.round_ties_even() as i32)
    }

    #[inline(always)]
    fn store_i8(self, a: Self::I, to: &mut [i8; LANES]) {
        *to = a.map(|v| v as i8);
    }

    #[inline(always)]
    fn dot_fours<const T: usize, const CENTRED: bool>(self, low: &[u8; 256], x: &Tile<T>) -> [Self::I; T] {
        let centre = if CENTRED { 8 } else { 0 };
        dot(|row, element| i32::from(nibble(low, row, element)) - centre, x)
    }

    #[inline(always)]
    fn dot_fives<const T: usize, const CENTRED: bool>(self, low: &[u8; 256], high: &[u8; 64], x: &Tile<T>) -> [Self::I; T] {
        let centre = if CENTRED { 16 } else { 0 };
        let fifth = |row: usize, element: usize| high[4 * row + element % 4] >> (element / 4) & 1;
        dot(|row, element| i32::from(nibble(low, row, element) | fifth(row, element) << 4) - centre, x)
    }

    #[inline(always)]
    fn dot_sixes<const T: usize>(self, low: &[u8; 256], high: &[u8; 128], scales: &[[i8; LANES]; 2], x: &Tile<T>) -> [Self::I; T] {
        let upper = |row: usize, element: usize| high[64 * (element / 16) + 4 * row + element % 4] >> (element % 16 / 4 * 2) & 3;
        let halves = dot_halves(|row, element| i32::from(nibble(low, row, element) | upper(row, element) << 4) - 32, x);
        scaled(halves, scales.map(|scales| scales.map(i32::from)))
    }

    #[inline(always)]
    fn dot_halves<const T: usize>(self, low: &[u8; 256], scales: &[[u8; LANES]; 2], x: &Tile<T>) -> [Self::I; T] {
        scaled(dot_halves(|row, element| i32::from(nibble(low, row, element)), x), scales.map(|scales| scales.map(i32::from)))
    }

    #[inline(always)]
    fn sum_halves<const T: usize>(self, scales: &[[u8; LANES]; 2], x: &Tile<T>) -> [Self::I; T] {
        scaled(dot_halves(|_, _| 1, x), scales.map(|scales| scales.map(i32::from)))
    }

    #[inline(always)]
    fn dot_levels<const T: usize>(self, low: &[u8; 256], levels: &[i8; LANES], scales: &[[i8; LANES]; 2], x: &Tile<T>) -> [Self::I; T] {
        let level = |row: usize, element: usize| i32::from(levels[usize::from(nibble(low, row, element))]);
        scaled(dot_halves(level, x), scales.map(|scales| scales.map(i32::from)))
    }

    #[inline(always)]
    fn dot_eights<const T: usize>(self, bytes: &[i8; 512], x: &Tile<T>) -> [Self::I; T] {
        dot(|row, element| i32::from(bytes[64 * (element / 4) + 4 * row + element % 4]), x)
    }
}
