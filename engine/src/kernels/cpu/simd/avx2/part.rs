//! Eight of the sixteen lanes: one register.

use std::arch::x86_64::{
    __m256, __m256i, _CMP_GT_OQ, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT, _mm_loadl_epi64, _mm_loadu_si128, _mm_packs_epi16,
    _mm_packs_epi32, _mm_storel_epi64, _mm_storeu_si128, _mm256_abs_epi8, _mm256_add_epi16, _mm256_add_epi32, _mm256_add_ps, _mm256_and_ps,
    _mm256_and_si256, _mm256_andnot_ps, _mm256_blend_epi16, _mm256_broadcastsi128_si256, _mm256_castsi256_ps, _mm256_castsi256_si128,
    _mm256_cmp_ps, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32, _mm256_cvtepu16_epi32, _mm256_cvtph_ps,
    _mm256_cvtps_epi32, _mm256_cvtps_ph, _mm256_div_ps, _mm256_extracti128_si256, _mm256_fmadd_ps, _mm256_fnmadd_ps, _mm256_loadu_ps,
    _mm256_loadu_si256, _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_max_ps, _mm256_min_ps, _mm256_mul_ps, _mm256_or_si256,
    _mm256_round_ps, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_si256, _mm256_shuffle_epi8,
    _mm256_sign_epi8, _mm256_slli_epi16, _mm256_slli_epi32, _mm256_srai_epi32, _mm256_srli_epi16, _mm256_storeu_ps, _mm256_sub_epi32,
    _mm256_sub_ps,
};

use super::super::{LANES, PartOp, Tile, Vector};
use super::{Avx2, proven};

/// Lanes `8 · PART..8 · PART + 8`, with `PART` 0 or 1; and proof of the instruction set.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Part<const PART: usize>(());

impl Avx2 {
    #[inline(always)]
    pub(super) fn parts(self) -> (Part<0>, Part<1>) {
        (Part(()), Part(()))
    }
}

impl<const PART: usize> Part<PART> {
    #[inline(always)]
    fn zero(self) -> __m256i {
        proven!(_mm256_setzero_si256())
    }

    /// This part's thirty-two of the sixty-four bytes at `from[at..]`.
    #[inline(always)]
    fn bytes(self, from: &[u8], at: usize) -> __m256i {
        let from: &[u8] = &from[at + 32 * PART..at + 32 * PART + 32];
        proven!(_mm256_loadu_si256(from.as_ptr().cast()))
    }

    /// Four bytes in every lane.
    #[inline(always)]
    fn four(self, four: &[i8; 4]) -> __m256i {
        proven!(_mm256_set1_epi32(four.as_ptr().cast::<i32>().read_unaligned()))
    }

    /// Sixteen-bit sums that begin with these in every lane.
    #[inline(always)]
    fn begin<const T: usize>(self, sums: &[[i16; 2]; T]) -> [__m256i; T] {
        let mut all = [self.zero(); T];
        for t in 0..T {
            all[t] = self.four(bytemuck::cast_ref(&sums[t]));
        }
        all
    }

    /// The low nibbles as bytes.
    #[inline(always)]
    fn low(self, bytes: __m256i) -> __m256i {
        proven!(_mm256_and_si256(bytes, _mm256_set1_epi8(15)))
    }

    /// The high nibbles as bytes.
    #[inline(always)]
    fn high(self, bytes: __m256i) -> __m256i {
        self.low(proven!(_mm256_srli_epi16::<4>(bytes)))
    }

    /// Adds products of unsigned weights and four activations of each row to sixteen-bit sums.
    #[inline(always)]
    fn multiply<const T: usize>(self, sums: &mut [__m256i; T], weights: __m256i, x: &[[i8; 4]; T]) {
        for t in 0..T {
            sums[t] = proven!(_mm256_add_epi16(sums[t], _mm256_maddubs_epi16(weights, self.four(&x[t]))));
        }
    }

    /// Pairs of products of signed weights and four activations of each row, in sixteen bits.
    #[inline(always)]
    fn signed_products<const T: usize>(self, weights: __m256i, x: &[[i8; 4]; T]) -> [__m256i; T] {
        // |w| · (x with w's sign): the sum of two products is at most 2 · 128 · 127 < 2¹⁵.
        let magnitudes = proven!(_mm256_abs_epi8(weights));
        let mut products = [self.zero(); T];
        for t in 0..T {
            products[t] = proven!(_mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(self.four(&x[t]), weights)));
        }
        products
    }

    /// Each lane's scale in both of its sixteen-bit halves.
    #[inline(always)]
    fn scales(self, scales: &[i8; LANES]) -> __m256i {
        proven!({
            let scales = _mm256_cvtepi8_epi32(_mm_loadl_epi64(scales.as_ptr().add(8 * PART).cast()));
            _mm256_blend_epi16::<0b1010_1010>(scales, _mm256_slli_epi32::<16>(scales))
        })
    }

    /// Adds pairs of sixteen-bit sums, times scales, to 32-bit sums.
    #[inline(always)]
    fn add_scaled<const T: usize>(self, totals: &mut [__m256i; T], sums: [__m256i; T], scales: __m256i) {
        for t in 0..T {
            totals[t] = proven!(_mm256_add_epi32(totals[t], _mm256_madd_epi16(sums[t], scales)));
        }
    }

    /// Pairs of sixteen-bit sums as 32-bit sums.
    #[inline(always)]
    fn widen<const T: usize>(self, mut sums: [__m256i; T]) -> [__m256i; T] {
        for sum in &mut sums {
            *sum = proven!(_mm256_madd_epi16(*sum, _mm256_set1_epi16(1)));
        }
        sums
    }
}

impl<const PART: usize> Vector for Part<PART> {
    type F = __m256;
    type I = __m256i;

    #[inline(always)]
    fn call<O: PartOp>(self, op: O) -> O::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn inner<const PART: usize, O: PartOp>(part: Part<PART>, op: O) -> O::Output {
            op.eval(part)
        }
        proven!(inner(self, op))
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::F {
        proven!(_mm256_set1_ps(value))
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        proven!(_mm256_loadu_ps(from.as_ptr().add(8 * PART)))
    }

    #[inline(always)]
    fn store(self, value: Self::F, to: &mut [f32; LANES]) {
        proven!(_mm256_storeu_ps(to.as_mut_ptr().add(8 * PART), value));
    }

    #[inline(always)]
    fn load_half(self, from: &[u16; LANES]) -> Self::F {
        proven!(_mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().add(8 * PART).cast())))
    }

    #[inline(always)]
    fn store_half(self, value: Self::F, to: &mut [u16; LANES]) {
        proven!(_mm_storeu_si128(to.as_mut_ptr().add(8 * PART).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value)));
    }

    #[inline(always)]
    fn load_brain(self, from: &[u16; LANES]) -> Self::F {
        proven!({
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().add(8 * PART).cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        })
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        proven!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        proven!(_mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        proven!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        proven!(_mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        proven!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn neg_fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        proven!(_mm256_fnmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        proven!(_mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        proven!(_mm256_min_ps(a, b))
    }

    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        proven!(_mm256_andnot_ps(_mm256_set1_ps(-0.0), a))
    }

    #[inline(always)]
    fn nearest(self, a: Self::F) -> Self::F {
        proven!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a))
    }

    #[inline(always)]
    fn where_above(self, a: Self::F, b: Self::F, value: Self::F) -> Self::F {
        proven!(_mm256_and_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(a, b), value))
    }

    #[inline(always)]
    fn exp2_integer(self, n: Self::F) -> Self::F {
        proven!({
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        })
    }

    #[inline(always)]
    fn load_u8(self, from: &[u8; LANES]) -> Self::I {
        proven!(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.as_ptr().add(8 * PART).cast())))
    }

    #[inline(always)]
    fn to_floats(self, a: Self::I) -> Self::F {
        proven!(_mm256_cvtepi32_ps(a))
    }

    #[inline(always)]
    fn to_ints(self, a: Self::F) -> Self::I {
        proven!(_mm256_cvtps_epi32(a))
    }

    #[inline(always)]
    fn store_i8(self, a: Self::I, to: &mut [i8; LANES]) {
        proven!({
            let words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            _mm_storel_epi64(to.as_mut_ptr().add(8 * PART).cast(), _mm_packs_epi16(words, words));
        });
    }

    #[inline(always)]
    fn dot_fours<const T: usize, const CENTRED: bool>(self, low: &[u8; 256], x: &Tile<T>) -> [Self::I; T] {
        // Sixteen-bit sums hold all products: 8 · 2 · 15 · 127 < 2¹⁵.
        let mut sums = if CENTRED { self.begin(&x.minus_eightfold) } else { [self.zero(); T] };
        for j in 0..4 {
            let bytes = self.bytes(low, 64 * j);
            self.multiply(&mut sums, self.low(bytes), &x.values[j]);
            self.multiply(&mut sums, self.high(bytes), &x.values[4 + j]);
        }
        self.widen(sums)
    }

    #[inline(always)]
    fn dot_fives<const T: usize, const CENTRED: bool>(self, low: &[u8; 256], high: &[u8; 64], x: &Tile<T>) -> [Self::I; T] {
        // Less 16 each, all products fit sixteen bits: 8 · 2 · 16 · 127 < 2¹⁵. On the way there sums may wrap.
        let mut sums = self.begin(&x.minus_eightfold);
        for sum in &mut sums {
            *sum = proven!(_mm256_add_epi16(*sum, *sum));
        }
        let fifths = self.bytes(high, 0);
        let fifth = |shifted: __m256i| proven!(_mm256_and_si256(shifted, _mm256_set1_epi8(16)));
        for j in 0..4 {
            let bytes = self.bytes(low, 64 * j);
            let (first, second) = proven!(match j {
                0 => (_mm256_slli_epi16::<4>(fifths), fifths),
                1 => (_mm256_slli_epi16::<3>(fifths), _mm256_srli_epi16::<1>(fifths)),
                2 => (_mm256_slli_epi16::<2>(fifths), _mm256_srli_epi16::<2>(fifths)),
                _ => (_mm256_slli_epi16::<1>(fifths), _mm256_srli_epi16::<3>(fifths)),
            });
            self.multiply(&mut sums, proven!(_mm256_or_si256(self.low(bytes), fifth(first))), &x.values[j]);
            self.multiply(&mut sums, proven!(_mm256_or_si256(self.high(bytes), fifth(second))), &x.values[4 + j]);
        }
        let mut sums = self.widen(sums);
        if !CENTRED {
            for t in 0..T {
                sums[t] = proven!(_mm256_add_epi32(sums[t], _mm256_set1_epi32(x.sixteenfold[t])));
            }
        }
        sums
    }

    #[inline(always)]
    fn dot_sixes<const T: usize>(self, low: &[u8; 256], high: &[u8; 128], scales: &[[i8; LANES]; 2], x: &Tile<T>) -> [Self::I; T] {
        let mut totals = [self.zero(); T];
        for half in 0..2 {
            // Less 32 each, half the products fit sixteen bits: 4 · 2 · 32 · 127 < 2¹⁵.
            let mut sums = self.begin(&x.minus_32_fold[half]);
            let uppers = self.bytes(high, 64 * half);
            for j in 0..4 {
                let bytes = self.bytes(low, 64 * j);
                let lower = if half == 0 { self.low(bytes) } else { self.high(bytes) };
                let weights = proven!({
                    let upper = match j {
                        0 => _mm256_slli_epi16::<4>(uppers),
                        1 => _mm256_slli_epi16::<2>(uppers),
                        2 => uppers,
                        _ => _mm256_srli_epi16::<2>(uppers),
                    };
                    _mm256_or_si256(lower, _mm256_and_si256(upper, _mm256_set1_epi8(0x30)))
                });
                self.multiply(&mut sums, weights, &x.values[4 * half + j]);
            }
            self.add_scaled(&mut totals, sums, self.scales(&scales[half]));
        }
        totals
    }

    #[inline(always)]
    fn dot_halves<const T: usize>(self, low: &[u8; 256], scales: &[[u8; LANES]; 2], x: &Tile<T>) -> [Self::I; T] {
        let scales: &[[i8; LANES]; 2] = bytemuck::cast_ref(scales);
        let mut totals = [self.zero(); T];
        for half in 0..2 {
            let mut sums = [self.zero(); T];
            for j in 0..4 {
                let bytes = self.bytes(low, 64 * j);
                let weights = if half == 0 { self.low(bytes) } else { self.high(bytes) };
                self.multiply(&mut sums, weights, &x.values[4 * half + j]);
            }
            self.add_scaled(&mut totals, sums, self.scales(&scales[half]));
        }
        totals
    }

    #[inline(always)]
    fn sum_halves<const T: usize>(self, scales: &[[u8; LANES]; 2], x: &Tile<T>) -> [Self::I; T] {
        let scales: &[[i8; LANES]; 2] = bytemuck::cast_ref(scales);
        let mut totals = [self.zero(); T];
        for half in 0..2 {
            self.add_scaled(&mut totals, self.begin(&x.minus_32_fold[half]), self.scales(&scales[half]));
        }
        // Whole multiples of −32.
        for total in &mut totals {
            *total = proven!(_mm256_srai_epi32::<5>(_mm256_sub_epi32(_mm256_setzero_si256(), *total)));
        }
        totals
    }

    #[inline(always)]
    fn dot_levels<const T: usize>(self, low: &[u8; 256], levels: &[i8; LANES], scales: &[[i8; LANES]; 2], x: &Tile<T>) -> [Self::I; T] {
        let levels = proven!(_mm256_broadcastsi128_si256(_mm_loadu_si128(levels.as_ptr().cast())));
        let mut totals = [self.zero(); T];
        for half in 0..2 {
            let scales = self.scales(&scales[half]);
            for j in 0..4 {
                let bytes = self.bytes(low, 64 * j);
                let places = if half == 0 { self.low(bytes) } else { self.high(bytes) };
                let weights = proven!(_mm256_shuffle_epi8(levels, places));
                let products = self.signed_products(weights, &x.values[4 * half + j]);
                self.add_scaled(&mut totals, products, scales);
            }
        }
        totals
    }

    #[inline(always)]
    fn dot_eights<const T: usize>(self, bytes: &[i8; 512], x: &Tile<T>) -> [Self::I; T] {
        let bytes: &[u8; 512] = bytemuck::cast_ref(bytes);
        let mut sums = [self.zero(); T];
        for j in 0..8 {
            let products = self.signed_products(self.bytes(bytes, 64 * j), &x.values[j]);
            self.add_scaled(&mut sums, products, proven!(_mm256_set1_epi16(1)));
        }
        sums
    }
}
