//! x86-64 with AVX2, FMA and F16C: sixteen lanes are two registers.

use std::arch::x86_64::{
    __m256, __m256i, _CMP_GT_OQ, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_packs_epi16, _mm_storeu_si128,
    _mm256_abs_epi8, _mm256_add_epi16, _mm256_add_epi32, _mm256_add_ps, _mm256_and_ps, _mm256_and_si256, _mm256_andnot_ps,
    _mm256_broadcastsi128_si256, _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cmp_ps, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps,
    _mm256_cvtepu8_epi32, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_cvtps_epi32, _mm256_cvtps_ph, _mm256_div_ps,
    _mm256_extracti128_si256, _mm256_fmadd_ps, _mm256_fnmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_madd_epi16,
    _mm256_maddubs_epi16, _mm256_max_ps, _mm256_min_ps, _mm256_mul_ps, _mm256_mullo_epi32, _mm256_or_si256, _mm256_packs_epi32,
    _mm256_permute4x64_epi64, _mm256_round_ps, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps,
    _mm256_setzero_si256, _mm256_shuffle_epi8, _mm256_sign_epi8, _mm256_slli_epi16, _mm256_slli_epi32, _mm256_srli_epi16, _mm256_storeu_ps,
    _mm256_sub_epi32, _mm256_sub_ps,
};

use super::{BLOCK, LANES, Op, Simd};

/// Proof that this machine has AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// The proof, where the machine gives it.
    pub(crate) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }
}

/// Evaluates an expression that needs only that the machine has this set and that pointers come from references.
macro_rules! proven {
    ($($body:tt)*) => {{
        // SAFETY: a value of `Avx2` exists only where the machine has AVX2, FMA and F16C. Every pointer read or written
        // in these expressions is made from a reference to an array at least as long as the access, and the accesses
        // are unaligned ones.
        unsafe { $($body)* }
    }};
}

/// The same expression for both registers.
macro_rules! both {
    ($i:ident => $body:expr) => {
        proven!([
            {
                let $i = 0;
                $body
            },
            {
                let $i = 1;
                $body
            }
        ])
    };
}

impl Avx2 {
    /// Thirty-two bytes from `from[at..]`.
    #[inline(always)]
    fn bytes(self, from: &[u8], at: usize) -> __m256i {
        let from: &[u8] = &from[at..at + 32];
        proven!(_mm256_loadu_si256(from.as_ptr().cast()))
    }

    /// Elements `4·j..4·j + 4` of a block in every 32-bit lane.
    #[inline(always)]
    fn four(self, x: &[i8; BLOCK], j: usize) -> __m256i {
        let four = &x[4 * j..4 * j + 4];
        proven!(_mm256_set1_epi32(four.as_ptr().cast::<i32>().read_unaligned()))
    }

    /// The low nibbles, or the high ones, as bytes.
    #[inline(always)]
    fn nibbles(self, bytes: __m256i, high: bool) -> __m256i {
        proven!({
            let bytes = if high { _mm256_srli_epi16::<4>(bytes) } else { bytes };
            _mm256_and_si256(bytes, _mm256_set1_epi8(15))
        })
    }

    /// Adds products of unsigned weights and activations to sixteen-bit sums. The caller sees to it that they fit.
    #[inline(always)]
    fn multiply(self, sums: __m256i, weights: __m256i, x: __m256i) -> __m256i {
        proven!(_mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, x)))
    }

    /// Pairs of sixteen-bit sums as 32-bit sums.
    #[inline(always)]
    fn widen(self, sums: __m256i) -> __m256i {
        proven!(_mm256_madd_epi16(sums, _mm256_set1_epi16(1)))
    }

    /// The bits above the nibble, in their place: see [`Simd::dot_unsigned`].
    #[inline(always)]
    fn high_bits<const HIGH: usize>(self, high: &[u8], register: usize, half: usize, j: usize) -> __m256i {
        proven!(match (HIGH, half, j) {
            (0, ..) => _mm256_setzero_si256(),
            (1, ..) => {
                let bits = self.bytes(high, 32 * register);
                let bits = match 4 * half + j {
                    0 => _mm256_slli_epi16::<4>(bits),
                    1 => _mm256_slli_epi16::<3>(bits),
                    2 => _mm256_slli_epi16::<2>(bits),
                    3 => _mm256_slli_epi16::<1>(bits),
                    4 => bits,
                    5 => _mm256_srli_epi16::<1>(bits),
                    6 => _mm256_srli_epi16::<2>(bits),
                    _ => _mm256_srli_epi16::<3>(bits),
                };
                _mm256_and_si256(bits, _mm256_set1_epi8(0x10))
            }
            _ => {
                let bits = self.bytes(high, 64 * half + 32 * register);
                let bits = match j {
                    0 => _mm256_slli_epi16::<4>(bits),
                    1 => _mm256_slli_epi16::<2>(bits),
                    2 => bits,
                    _ => _mm256_srli_epi16::<2>(bits),
                };
                _mm256_and_si256(bits, _mm256_set1_epi8(0x30))
            }
        })
    }
}

impl Simd for Avx2 {
    type F = [__m256; 2];
    type I = [__m256i; 2];

    fn run<O: Op>(self, op: O) -> O::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn inner<O: Op>(simd: Avx2, op: O) -> O::Output {
            op.eval(simd)
        }
        proven!(inner(self, op))
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::F {
        proven!([_mm256_set1_ps(value); 2])
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        both!(i => _mm256_loadu_ps(from.as_ptr().add(8 * i)))
    }

    #[inline(always)]
    fn store(self, value: Self::F, to: &mut [f32; LANES]) {
        both!(i => _mm256_storeu_ps(to.as_mut_ptr().add(8 * i), value[i]));
    }

    #[inline(always)]
    fn load_half(self, from: &[u16; LANES]) -> Self::F {
        both!(i => _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().add(8 * i).cast())))
    }

    #[inline(always)]
    fn store_half(self, value: Self::F, to: &mut [u16; LANES]) {
        both!(i => _mm_storeu_si128(to.as_mut_ptr().add(8 * i).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value[i])));
    }

    #[inline(always)]
    fn load_brain(self, from: &[u16; LANES]) -> Self::F {
        both!(i => {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().add(8 * i).cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        })
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        both!(i => _mm256_add_ps(a[i], b[i]))
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        both!(i => _mm256_sub_ps(a[i], b[i]))
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        both!(i => _mm256_mul_ps(a[i], b[i]))
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        both!(i => _mm256_div_ps(a[i], b[i]))
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(i => _mm256_fmadd_ps(a[i], b[i], c[i]))
    }

    #[inline(always)]
    fn neg_fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(i => _mm256_fnmadd_ps(a[i], b[i], c[i]))
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        both!(i => _mm256_max_ps(a[i], b[i]))
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        both!(i => _mm256_min_ps(a[i], b[i]))
    }

    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        both!(i => _mm256_andnot_ps(_mm256_set1_ps(-0.0), a[i]))
    }

    #[inline(always)]
    fn nearest(self, a: Self::F) -> Self::F {
        both!(i => _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a[i]))
    }

    #[inline(always)]
    fn where_above(self, a: Self::F, b: Self::F, value: Self::F) -> Self::F {
        both!(i => _mm256_and_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(a[i], b[i]), value[i]))
    }

    #[inline(always)]
    fn exp2_integer(self, n: Self::F) -> Self::F {
        both!(i => {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n[i]), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        })
    }

    #[inline(always)]
    fn zero_ints(self) -> Self::I {
        proven!([_mm256_setzero_si256(); 2])
    }

    #[inline(always)]
    fn splat_int(self, value: i32) -> Self::I {
        proven!([_mm256_set1_epi32(value); 2])
    }

    #[inline(always)]
    fn add_ints(self, a: Self::I, b: Self::I) -> Self::I {
        both!(i => _mm256_add_epi32(a[i], b[i]))
    }

    #[inline(always)]
    fn sub_ints(self, a: Self::I, b: Self::I) -> Self::I {
        both!(i => _mm256_sub_epi32(a[i], b[i]))
    }

    #[inline(always)]
    fn mul_ints(self, a: Self::I, b: Self::I) -> Self::I {
        both!(i => _mm256_mullo_epi32(a[i], b[i]))
    }

    #[inline(always)]
    fn load_u8(self, from: &[u8; LANES]) -> Self::I {
        // The conversion reads the low eight bytes, so the second register's bytes are shifted down by reading all
        // sixteen and taking the upper half.
        proven!({
            let bytes = _mm_loadu_si128(from.as_ptr().cast());
            [_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(std::arch::x86_64::_mm_srli_si128::<8>(bytes))]
        })
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::I {
        proven!({
            let bytes = _mm_loadu_si128(from.as_ptr().cast());
            [_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(std::arch::x86_64::_mm_srli_si128::<8>(bytes))]
        })
    }

    #[inline(always)]
    fn to_floats(self, a: Self::I) -> Self::F {
        both!(i => _mm256_cvtepi32_ps(a[i]))
    }

    #[inline(always)]
    fn to_ints(self, a: Self::F) -> Self::I {
        both!(i => _mm256_cvtps_epi32(a[i]))
    }

    #[inline(always)]
    fn store_i8(self, a: Self::I, to: &mut [i8; LANES]) {
        proven!({
            // Packing works within 128-bit halves: the permutation puts the quarters back in order.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(a[0], a[1]));
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(to.as_mut_ptr().cast(), bytes);
        });
    }

    #[inline(always)]
    fn dot_unsigned<const HIGH: usize, const T: usize>(self, low: &[u8; 256], high: &[u8], x: [&[i8; BLOCK]; T]) -> [[Self::I; 2]; T] {
        let mut all = [[self.zero_ints(); 2]; T];
        for half in 0..2 {
            for register in 0..2 {
                // Sixteen-bit sums hold four products of five-bit weights (4 · 2 · 31 · 127 < 2¹⁵), and two of six-bit
                // ones (2 · 2 · 63 · 127 < 2¹⁵).
                for pair in 0..2 {
                    let mut sums = [self.zero_ints()[0]; T];
                    for j in 2 * pair..2 * pair + 2 {
                        let weights = self.nibbles(self.bytes(low, 64 * j + 32 * register), half == 1);
                        let weights = proven!(_mm256_or_si256(weights, self.high_bits::<HIGH>(high, register, half, j)));
                        for t in 0..T {
                            sums[t] = self.multiply(sums[t], weights, self.four(x[t], 4 * half + j));
                        }
                    }
                    for t in 0..T {
                        all[t][half][register] = proven!(_mm256_add_epi32(all[t][half][register], self.widen(sums[t])));
                    }
                }
            }
        }
        all
    }

    #[inline(always)]
    fn dot_nibbles<const T: usize>(self, low: &[u8; 256], x: [&[i8; BLOCK]; T]) -> [Self::I; T] {
        // Sixteen-bit sums hold all eight products: 8 · 2 · 15 · 127 < 2¹⁵.
        let mut all = [self.zero_ints(); T];
        if T == 1 {
            // Both registers take each activation as it is loaded.
            for j in 0..4 {
                let (x_first, x_second) = (self.four(x[0], j), self.four(x[0], 4 + j));
                for register in 0..2 {
                    let bytes = self.bytes(low, 64 * j + 32 * register);
                    let sum = self.multiply(all[0][register], self.nibbles(bytes, false), x_first);
                    all[0][register] = self.multiply(sum, self.nibbles(bytes, true), x_second);
                }
            }
        } else {
            // All sums of one register fit the machine's sixteen.
            for register in 0..2 {
                let mut sums = [self.zero_ints()[0]; T];
                for j in 0..4 {
                    let bytes = self.bytes(low, 64 * j + 32 * register);
                    let (first, second) = (self.nibbles(bytes, false), self.nibbles(bytes, true));
                    for t in 0..T {
                        let sum = self.multiply(sums[t], first, self.four(x[t], j));
                        sums[t] = self.multiply(sum, second, self.four(x[t], 4 + j));
                    }
                }
                for t in 0..T {
                    all[t][register] = sums[t];
                }
            }
        }
        for sums in &mut all {
            *sums = [self.widen(sums[0]), self.widen(sums[1])];
        }
        all
    }

    #[inline(always)]
    fn dot_levels<const T: usize>(self, low: &[u8; 256], levels: &[i8; LANES], x: [&[i8; BLOCK]; T]) -> [[Self::I; 2]; T] {
        let levels = proven!(_mm256_broadcastsi128_si256(_mm_loadu_si128(levels.as_ptr().cast())));
        let mut all = [[self.zero_ints(); 2]; T];
        for half in 0..2 {
            for j in 0..4 {
                for register in 0..2 {
                    // |w| · (x with w's sign): the sum of two products is at most 2 · 127 · 127 < 2¹⁵.
                    let places = self.nibbles(self.bytes(low, 64 * j + 32 * register), half == 1);
                    let weights = proven!(_mm256_shuffle_epi8(levels, places));
                    let magnitudes = proven!(_mm256_abs_epi8(weights));
                    for t in 0..T {
                        let signed = proven!(_mm256_sign_epi8(self.four(x[t], 4 * half + j), weights));
                        let products = self.widen(proven!(_mm256_maddubs_epi16(magnitudes, signed)));
                        all[t][half][register] = proven!(_mm256_add_epi32(all[t][half][register], products));
                    }
                }
            }
        }
        all
    }

    #[inline(always)]
    fn dot_signed<const T: usize>(self, bytes: &[i8; 512], x: [&[i8; BLOCK]; T]) -> [Self::I; T] {
        let bytes: &[u8; 512] = bytemuck::cast_ref(bytes);
        let mut sums = [self.zero_ints(); T];
        for j in 0..8 {
            for register in 0..2 {
                // |w| · (x with w's sign): the sum of two products is at most 2 · 128 · 127 < 2¹⁵.
                let weights = self.bytes(bytes, 64 * j + 32 * register);
                let magnitudes = proven!(_mm256_abs_epi8(weights));
                for t in 0..T {
                    let signed = proven!(_mm256_sign_epi8(self.four(x[t], j), weights));
                    let products = self.widen(proven!(_mm256_maddubs_epi16(magnitudes, signed)));
                    sums[t][register] = proven!(_mm256_add_epi32(sums[t][register], products));
                }
            }
        }
        sums
    }
}
