//! Sixteen-lane arithmetic: each kernel is written once, generic over [`Simd`], and instantiated for every
//! instruction set.
//!
//! All sets give the same bits. Integer operations are exact; floating-point ones are IEEE single operations with a
//! fixed order, and a fused multiply-add is fused everywhere (the portable set calls `f32::mul_add`). An instruction set
//! differs only in how fast it is.
//!
//! Where a kernel needs many vectors at once it is written for a [`Vector`] instead: some of the sixteen lanes, as many as
//! one of the machine's registers holds, and [`Simd::each_part`] runs it for all lanes, part after part.
//!
//! A value of an instruction set's type is the proof that this machine has it, because only detection makes one. A
//! further set is one more type with these traits and one more variant of [`Isa`].

#[cfg(target_arch = "x86_64")]
mod avx2;
mod scalar;
#[cfg(test)]
mod tests;

pub(crate) use scalar::Scalar;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;

use bytemuck::Pod;

use super::activations::Tile;

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

/// Lane-wise work that is compiled anew for each instruction set, and done for some lanes at a time.
pub(crate) trait PartOp {
    /// What it gives.
    type Output;

    /// Does the work. Implementations are `#[inline(always)]`.
    fn eval<V: Vector>(self, vector: V) -> Self::Output;
}

/// All or some of sixteen lanes of `f32` and of `i32` on one instruction set. What reads or writes an array reads or writes the
/// places of its lanes, and no others.
///
/// Where a machine could differ the text says what is meant; `scalar.rs` is the definition.
pub(crate) trait Vector: Copy + Send + Sync + 'static {
    /// An `f32` in each lane.
    type F: Copy;
    /// An `i32` in each lane.
    type I: Copy;

    /// Runs `op` on these lanes, as a function of its own.
    fn call<O: PartOp>(self, op: O) -> O::Output;

    /// `value` in all lanes.
    fn splat(self, value: f32) -> Self::F;
    /// Reads values.
    fn load(self, from: &[f32; LANES]) -> Self::F;
    /// Writes values.
    fn store(self, value: Self::F, to: &mut [f32; LANES]);
    /// Reads IEEE half-precision values, exactly.
    fn load_half(self, from: &[u16; LANES]) -> Self::F;
    /// Writes IEEE half-precision values, rounded to nearest, ties to even.
    fn store_half(self, value: Self::F, to: &mut [u16; LANES]);
    /// Reads bfloat16 values, exactly.
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

    /// Unsigned bytes.
    fn load_u8(self, from: &[u8; LANES]) -> Self::I;
    /// As floats; exact below 2²⁴.
    fn to_floats(self, a: Self::I) -> Self::F;
    /// The nearest integers, ties to even, of lanes from -127 to 127.
    fn to_ints(self, a: Self::F) -> Self::I;
    /// Writes lanes in `-128..=127` as bytes.
    fn store_i8(self, a: Self::I, to: &mut [i8; LANES]);

    /// Tells the processor that as many bytes as `near` has, which lie some way after it, will be read soon. Whether they are there does
    /// not matter.
    #[inline(always)]
    fn fetch_after<T: Pod>(self, near: &T) {
        let _ = near;
    }

    /// Dot products of rows of 4-bit weights, one row for each lane, with the rows of a tile, over all 32 elements. With `CENTRED` a weight stands
    /// for itself less 8.
    ///
    /// Byte `64·j + 4·row + i` of `low` holds the row's element `4·j + i` in its low nibble, and element `16 + 4·j + i` in its high
    /// nibble.
    fn dot_fours<const T: usize, const CENTRED: bool>(self, low: &[u8; 256], x: &Tile<T>) -> [Self::I; T];

    /// The same for 5-bit weights, whose low four bits are in `low` as above: bit `j` of byte `4·row + i` of `high` is the fifth
    /// one of element `4·j + i`. With `CENTRED` a weight stands for itself less 16.
    fn dot_fives<const T: usize, const CENTRED: bool>(self, low: &[u8; 256], high: &[u8; 64], x: &Tile<T>) -> [Self::I; T];

    /// The same for 6-bit weights, which stand for themselves less 32: bits `2·j, 2·j + 1` of byte `64·h + 4·row + i` of `high` are the
    /// upper ones of element `16·h + 4·j + i`. The sum over elements 0–15 is multiplied with the row's first scale, and that
    /// over elements 16–31 with its second.
    fn dot_sixes<const T: usize>(self, low: &[u8; 256], high: &[u8; 128], scales: &[[i8; LANES]; 2], x: &Tile<T>) -> [Self::I; T];

    /// The same for 4-bit weights, not centred, where the sum over elements 0–15 is multiplied with the row's first scale, and that over
    /// elements 16–31 with its second; scales are below 128.
    fn dot_halves<const T: usize>(self, low: &[u8; 256], scales: &[[u8; LANES]; 2], x: &Tile<T>) -> [Self::I; T];

    /// The sums of the activations alone, elements 0–15 times the row's first scale and elements 16–31 times its second.
    fn sum_halves<const T: usize>(self, scales: &[[u8; LANES]; 2], x: &Tile<T>) -> [Self::I; T];

    /// The same as [`dot_halves`](Self::dot_halves) where the nibbles are places in `levels`, of magnitudes up to 127.
    fn dot_levels<const T: usize>(self, low: &[u8; 256], levels: &[i8; LANES], scales: &[[i8; LANES]; 2], x: &Tile<T>) -> [Self::I; T];

    /// The same for signed bytes: byte `64·j + 4·row + i` is the row's element `4·j + i`.
    fn dot_eights<const T: usize>(self, bytes: &[i8; 512], x: &Tile<T>) -> [Self::I; T];
}

/// All sixteen lanes.
pub(crate) trait Simd: Vector {
    /// Runs `op` compiled for this set.
    fn run<O: Op>(self, op: O) -> O::Output;

    /// Does `op` for all lanes, some of them at a time.
    fn each_part<O: PartOp<Output = ()> + Copy>(self, op: O);

    /// The sum of the lanes, as a balanced tree: lanes `i` and `i + 8` first, then `i` and `i + 4` of these, and so on.
    fn sum_of(self, a: Self::F) -> f32;
    /// The largest lane, by [`max`](Vector::max) in the same tree.
    fn max_of(self, a: Self::F) -> f32;
    /// The sum of the values whose place is 0 or 1 modulo 4, and of those where it is 2 or 3.
    fn pair_sums(self, values: &[i8; LANES]) -> [i32; 2];
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
