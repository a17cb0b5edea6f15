//! x86-64 with AVX2, FMA and F16C: sixteen lanes are two registers, each a [`Part`].

mod part;

use std::arch::x86_64::{
    __m128, __m256, __m256i, _MM_HINT_T0, _mm_add_epi16, _mm_add_ps, _mm_cvtsi128_si32, _mm_cvtss_f32, _mm_loadu_si128, _mm_maddubs_epi16,
    _mm_max_ps, _mm_movehl_ps, _mm_prefetch, _mm_set1_epi8, _mm_shuffle_ps, _mm_srli_si128, _mm256_castps256_ps128, _mm256_extractf128_ps,
};

use bytemuck::Pod;

use super::{LANES, Op, PartOp, Simd, Tile, Vector};

/// Proof that this machine has AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// The proof, where the machine gives it.
    pub(crate) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }

    /// Joins the eight lanes of a register in a balanced tree.
    #[inline(always)]
    fn tree(self, a: __m256, join: impl Fn(__m128, __m128) -> __m128) -> f32 {
        proven!({
            let a = join(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = join(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(join(a, _mm_shuffle_ps::<1>(a, a)))
        })
    }
}

/// Evaluates an expression that needs only that the machine has this set and that pointers come from references.
macro_rules! proven {
    ($($body:tt)*) => {{
        // SAFETY: a value of `Avx2`, or a part of it, exists only where the machine has AVX2, FMA and F16C. Every pointer read or
        // written in these expressions is made from a reference to an array at least as long as the access, and the
        // accesses are unaligned ones.
        unsafe { $($body)* }
    }};
}
use proven;

impl Simd for Avx2 {
    fn run<O: Op>(self, op: O) -> O::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn inner<O: Op>(simd: Avx2, op: O) -> O::Output {
            op.eval(simd)
        }
        proven!(inner(self, op))
    }

    #[inline(always)]
    fn each_part<O: PartOp<Output = ()> + Copy>(self, op: O) {
        let (first, second) = self.parts();
        first.call(op);
        second.call(op);
    }

    #[inline(always)]
    fn sum_of(self, [a, b]: Self::F) -> f32 {
        self.tree(self.parts().0.add(a, b), |a, b| proven!(_mm_add_ps(a, b)))
    }

    #[inline(always)]
    fn max_of(self, [a, b]: Self::F) -> f32 {
        self.tree(self.parts().0.max(a, b), |a, b| proven!(_mm_max_ps(a, b)))
    }

    #[inline(always)]
    fn pair_sums(self, values: &[i8; LANES]) -> [i32; 2] {
        proven!({
            // Neighbours, then fours of places, as sixteen-bit sums.
            let sums = _mm_maddubs_epi16(_mm_set1_epi8(1), _mm_loadu_si128(values.as_ptr().cast()));
            let sums = _mm_add_epi16(sums, _mm_srli_si128::<8>(sums));
            let both = _mm_cvtsi128_si32(_mm_add_epi16(sums, _mm_srli_si128::<4>(sums)));
            [i32::from(both as i16), both >> 16]
        })
    }
}

impl Vector for Avx2 {
    type F = [__m256; 2];
    type I = [__m256i; 2];

    #[inline(always)]
    fn call<O: PartOp>(self, op: O) -> O::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn inner<O: PartOp>(simd: Avx2, op: O) -> O::Output {
            op.eval(simd)
        }
        proven!(inner(self, op))
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::F {
        let (first, second) = self.parts();
        [first.splat(value), second.splat(value)]
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        let (first, second) = self.parts();
        [first.load(from), second.load(from)]
    }

    #[inline(always)]
    fn store(self, value: Self::F, to: &mut [f32; LANES]) {
        let (first, second) = self.parts();
        first.store(value[0], to);
        second.store(value[1], to);
    }

    #[inline(always)]
    fn load_half(self, from: &[u16; LANES]) -> Self::F {
        let (first, second) = self.parts();
        [first.load_half(from), second.load_half(from)]
    }

    #[inline(always)]
    fn store_half(self, value: Self::F, to: &mut [u16; LANES]) {
        let (first, second) = self.parts();
        first.store_half(value[0], to);
        second.store_half(value[1], to);
    }

    #[inline(always)]
    fn load_brain(self, from: &[u16; LANES]) -> Self::F {
        let (first, second) = self.parts();
        [first.load_brain(from), second.load_brain(from)]
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        let (first, second) = self.parts();
        [first.add(a[0], b[0]), second.add(a[1], b[1])]
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        let (first, second) = self.parts();
        [first.sub(a[0], b[0]), second.sub(a[1], b[1])]
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        let (first, second) = self.parts();
        [first.mul(a[0], b[0]), second.mul(a[1], b[1])]
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        let (first, second) = self.parts();
        [first.div(a[0], b[0]), second.div(a[1], b[1])]
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        let (first, second) = self.parts();
        [first.fma(a[0], b[0], c[0]), second.fma(a[1], b[1], c[1])]
    }

    #[inline(always)]
    fn neg_fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        let (first, second) = self.parts();
        [first.neg_fma(a[0], b[0], c[0]), second.neg_fma(a[1], b[1], c[1])]
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        let (first, second) = self.parts();
        [first.max(a[0], b[0]), second.max(a[1], b[1])]
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        let (first, second) = self.parts();
        [first.min(a[0], b[0]), second.min(a[1], b[1])]
    }

    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        let (first, second) = self.parts();
        [first.abs(a[0]), second.abs(a[1])]
    }

    #[inline(always)]
    fn nearest(self, a: Self::F) -> Self::F {
        let (first, second) = self.parts();
        [first.nearest(a[0]), second.nearest(a[1])]
    }

    #[inline(always)]
    fn where_above(self, a: Self::F, b: Self::F, value: Self::F) -> Self::F {
        let (first, second) = self.parts();
        [first.where_above(a[0], b[0], value[0]), second.where_above(a[1], b[1], value[1])]
    }

    #[inline(always)]
    fn exp2_integer(self, n: Self::F) -> Self::F {
        let (first, second) = self.parts();
        [first.exp2_integer(n[0]), second.exp2_integer(n[1])]
    }

    #[inline(always)]
    fn load_u8(self, from: &[u8; LANES]) -> Self::I {
        let (first, second) = self.parts();
        [first.load_u8(from), second.load_u8(from)]
    }

    #[inline(always)]
    fn to_floats(self, a: Self::I) -> Self::F {
        let (first, second) = self.parts();
        [first.to_floats(a[0]), second.to_floats(a[1])]
    }

    #[inline(always)]
    fn to_ints(self, a: Self::F) -> Self::I {
        let (first, second) = self.parts();
        [first.to_ints(a[0]), second.to_ints(a[1])]
    }

    #[inline(always)]
    fn store_i8(self, a: Self::I, to: &mut [i8; LANES]) {
        let (first, second) = self.parts();
        first.store_i8(a[0], to);
        second.store_i8(a[1], to);
    }

    #[inline(always)]
    fn fetch_after<T: Pod>(self, near: &T) {
        // As far as some blocks of weights, which take the time that memory does.
        const AHEAD: usize = 2048;
        for line in 0..size_of::<T>().div_ceil(64) {
            let there = std::ptr::from_ref(near).cast::<i8>().wrapping_add(AHEAD + 64 * line);
            // SAFETY: the machine has the instruction, which reads nothing and takes any address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(there) }
        }
    }

    #[inline(always)]
    fn dot_fours<const T: usize, const CENTRED: bool>(self, low: &[u8; 256], x: &Tile<T>) -> [Self::I; T] {
        let (first, second) = self.parts();
        join(first.dot_fours::<T, CENTRED>(low, x), second.dot_fours::<T, CENTRED>(low, x))
    }

    #[inline(always)]
    fn dot_fives<const T: usize, const CENTRED: bool>(self, low: &[u8; 256], high: &[u8; 64], x: &Tile<T>) -> [Self::I; T] {
        let (first, second) = self.parts();
        join(first.dot_fives::<T, CENTRED>(low, high, x), second.dot_fives::<T, CENTRED>(low, high, x))
    }

    #[inline(always)]
    fn dot_sixes<const T: usize>(self, low: &[u8; 256], high: &[u8; 128], scales: &[[i8; LANES]; 2], x: &Tile<T>) -> [Self::I; T] {
        let (first, second) = self.parts();
        join(first.dot_sixes::<T>(low, high, scales, x), second.dot_sixes::<T>(low, high, scales, x))
    }

    #[inline(always)]
    fn dot_halves<const T: usize>(self, low: &[u8; 256], scales: &[[u8; LANES]; 2], x: &Tile<T>) -> [Self::I; T] {
        let (first, second) = self.parts();
        join(first.dot_halves::<T>(low, scales, x), second.dot_halves::<T>(low, scales, x))
    }

    #[inline(always)]
    fn sum_halves<const T: usize>(self, scales: &[[u8; LANES]; 2], x: &Tile<T>) -> [Self::I; T] {
        let (first, second) = self.parts();
        join(first.sum_halves::<T>(scales, x), second.sum_halves::<T>(scales, x))
    }

    #[inline(always)]
    fn dot_levels<const T: usize>(self, low: &[u8; 256], levels: &[i8; LANES], scales: &[[i8; LANES]; 2], x: &Tile<T>) -> [Self::I; T] {
        let (first, second) = self.parts();
        join(first.dot_levels::<T>(low, levels, scales, x), second.dot_levels::<T>(low, levels, scales, x))
    }

    #[inline(always)]
    fn dot_eights<const T: usize>(self, bytes: &[i8; 512], x: &Tile<T>) -> [Self::I; T] {
        let (first, second) = self.parts();
        join(first.dot_eights::<T>(bytes, x), second.dot_eights::<T>(bytes, x))
    }
}

#[inline(always)]
fn join<const T: usize>(first: [__m256i; T], second: [__m256i; T]) -> [[__m256i; 2]; T] {
    let mut all = [[first[0]; 2]; T];
    for t in 0..T {
        all[t] = [first[t], second[t]];
    }
    all
}
