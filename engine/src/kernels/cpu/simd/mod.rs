//! Sixteen-lane arithmetic: each kernel is written once, generic over [`Simd`], and instantiated for every
//! instruction set.
//!
//! All sets give the same bits. Integer operations are exact; floating-point ones are IEEE single operations with a
//! fixed order, and a fused multiply-add is fused everywhere (the portable set calls `f32::mul_add`). An instruction set
//! differs only in how fast it is.
//!
//! A value of an instruction set's type is the proof that this machine has it, because only detection makes one. A
//! further set (AVX-512 with VNNI, NEON with dot products) is one more type with this trait and one more variant of
//! [`Isa`].

#[cfg(target_arch = "x86_64")]
mod avx2;
mod scalar;
#[cfg(test)]
mod tests;

pub(crate) use scalar::Scalar;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;

/// Lanes of a vector, whatever the width of the machine's registers.
pub(crate) const LANES: usize = 16;

/// Elements of a block of 8-bit activations.
pub(crate) const BLOCK: usize = 32;

/// Work that is compiled anew for each instruction set.
pub(crate) trait Op {
    /// What it gives.
    type Output;

    /// Does the work. Implementations are `#[inline(always)]`, so that they are compiled with the set's instructions.
    fn eval<S: Simd>(self, simd: S) -> Self::Output;
}

/// Sixteen lanes of `f32` and of `i32` on one instruction set.
///
/// Where a machine could differ the text says what is meant; `scalar.rs` is the definition.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen `f32`.
    type F: Copy;
    /// Sixteen `i32`.
    type I: Copy;

    /// Runs `op` compiled for this set.
    fn run<O: Op>(self, op: O) -> O::Output;

    /// `value` in all lanes.
    fn splat(self, value: f32) -> Self::F;
    /// Reads sixteen values.
    fn load(self, from: &[f32; LANES]) -> Self::F;
    /// Writes sixteen values.
    fn store(self, value: Self::F, to: &mut [f32; LANES]);
    /// Reads sixteen IEEE half-precision values, exactly.
    fn load_half(self, from: &[u16; LANES]) -> Self::F;
    /// Writes sixteen IEEE half-precision values, rounded to nearest, ties to even.
    fn store_half(self, value: Self::F, to: &mut [u16; LANES]);
    /// Reads sixteen bfloat16 values, exactly.
    fn load_brain(self, from: &[u16; LANES]) -> Self::F;

    /// `a + b`.
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`.
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a · b`.
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`.
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a · b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `c - a · b`, rounded once.
    fn neg_fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a` where `a > b`, else `b`: so `b` if either is not a number.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a` where `a < b`, else `b`.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// `|a|`.
    fn abs(self, a: Self::F) -> Self::F;
    /// The nearest integer, ties to even.
    fn nearest(self, a: Self::F) -> Self::F;
    /// `value` where `a > b`, else zero.
    fn where_above(self, a: Self::F, b: Self::F, value: Self::F) -> Self::F;
    /// `2ⁿ` for integer-valued lanes in `-126..=127`.
    fn exp2_integer(self, n: Self::F) -> Self::F;

    /// Zero in all lanes.
    fn zero_ints(self) -> Self::I;
    /// `value` in all lanes.
    fn splat_int(self, value: i32) -> Self::I;
    /// `a + b`.
    fn add_ints(self, a: Self::I, b: Self::I) -> Self::I;
    /// `a - b`.
    fn sub_ints(self, a: Self::I, b: Self::I) -> Self::I;
    /// `a · b`, low half.
    fn mul_ints(self, a: Self::I, b: Self::I) -> Self::I;
    /// Sixteen unsigned bytes.
    fn load_u8(self, from: &[u8; LANES]) -> Self::I;
    /// Sixteen signed bytes.
    fn load_i8(self, from: &[i8; LANES]) -> Self::I;
    /// As floats; exact below 2²⁴.
    fn to_floats(self, a: Self::I) -> Self::F;
    /// Integer-valued lanes in `-127..=127` as integers.
    fn to_ints(self, a: Self::F) -> Self::I;
    /// Writes lanes in `-128..=127` as bytes.
    fn store_i8(self, a: Self::I, to: &mut [i8; LANES]);

    /// Dot products of sixteen rows of unsigned weights of `4 + HIGH` bits with `T` blocks of activations, each as two
    /// sums: over elements 0–15 and 16–31.
    ///
    /// Byte `64·j + 4·row + i` of `low` holds the low four bits of the row's element `4·j + i` in its low nibble, and of
    /// element `16 + 4·j + i` in its high nibble. `high` holds the further bits: with `HIGH = 1` bit `j` of byte
    /// `4·row + i` belongs to element `4·j + i`; with `HIGH = 2` bits `2·j, 2·j + 1` of byte `64·h + 4·row + i` belong to
    /// element `16·h + 4·j + i`. It is empty with `HIGH = 0`.
    fn dot_unsigned<const HIGH: usize, const T: usize>(self, low: &[u8; 256], high: &[u8], x: [&[i8; BLOCK]; T]) -> [[Self::I; 2]; T];

    /// As [`dot_unsigned`](Self::dot_unsigned) for nibbles, but one sum over all 32 elements.
    fn dot_nibbles<const T: usize>(self, low: &[u8; 256], x: [&[i8; BLOCK]; T]) -> [Self::I; T];

    /// Dot products of sixteen rows of levels with `T` blocks of activations, as two sums: over elements 0–15 and 16–31. Nibbles lie
    /// as in [`dot_unsigned`](Self::dot_unsigned) and are places in `levels`, of magnitudes up to 127.
    #[inline(always)]
    fn dot_levels<const T: usize>(self, low: &[u8; 256], levels: &[i8; LANES], x: [&[i8; BLOCK]; T]) -> [[Self::I; 2]; T] {
        let mut sums = [[self.zero_ints(); 2]; T];
        for half in 0..2 {
            let mut bytes = [0; 512];
            for (to, byte) in bytes[256 * half..][..256].iter_mut().zip(low) {
                *to = levels[usize::from((byte >> (4 * half)) & 15)];
            }
            for (sums, found) in sums.iter_mut().zip(self.dot_signed::<T>(&bytes, x)) {
                sums[half] = found;
            }
        }
        sums
    }

    /// Dot products of sixteen rows of signed bytes with `T` blocks of activations. Byte `64·j + 4·row + i` is the row's
    /// element `4·j + i`.
    fn dot_signed<const T: usize>(self, bytes: &[i8; 512], x: [&[i8; BLOCK]; T]) -> [Self::I; T];
}

/// The instruction sets that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Isa {
    /// Any machine.
    #[allow(dead_code, reason = "chosen by detection on other machines, and by tests")]
    Scalar(Scalar),
    /// x86-64 with AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
}

impl Isa {
    /// The best that this machine has.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(avx2) = Avx2::detect() {
            return Self::Avx2(avx2);
        }
        Self::Scalar(Scalar)
    }

    /// All that this machine has, the portable one first.
    #[cfg(test)]
    pub(crate) fn all() -> Vec<Self> {
        let mut all = vec![Self::Scalar(Scalar)];
        if Self::detect() != all[0] {
            all.push(Self::detect());
        }
        all
    }

    /// Its name, for logs.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Scalar(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
        }
    }

    /// Runs `op` on this set.
    pub(crate) fn run<O: Op>(self, op: O) -> O::Output {
        match self {
            Self::Scalar(simd) => simd.run(op),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(simd) => simd.run(op),
        }
    }
}
