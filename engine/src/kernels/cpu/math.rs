//! Elementary functions and row operations with the same bits on every instruction set.

use super::simd::{LANES, Simd, Vector};
use crate::config::{Activation, NormKind};

/// eˣ, to about one unit in the last place between −87 and 88, and held at those bounds outside.
///
/// The argument is reduced by a multiple of ln 2 held in two parts, then a polynomial of degree six (the coefficients of
/// Cephes' `expf`) does the rest.
#[inline(always)]
pub(crate) fn exp<V: Vector>(s: V, x: V::F) -> V::F {
    let x = s.max(s.min(x, s.splat(88.0)), s.splat(-87.0));
    let n = s.nearest(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    let r = s.neg_fma(n, s.splat(0.693_359_4), x);
    let r = s.neg_fma(n, s.splat(-2.121_944_4e-4), r);
    let mut p = s.splat(1.987_569_1e-4);
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = s.fma(p, r, s.splat(c));
    }
    let p = s.add(s.fma(p, s.mul(r, r), r), s.splat(1.0));
    s.mul(p, s.exp2_integer(n))
}

/// x / (1 + e⁻ˢˣ) with s the `slope`.
#[inline(always)]
fn gate<V: Vector>(s: V, x: V::F, slope_x: V::F) -> V::F {
    let e = exp(s, s.sub(s.splat(0.0), slope_x));
    s.div(x, s.add(s.splat(1.0), e))
}

/// The sigmoid-weighted unit, x · σ(x).
#[inline(always)]
pub(crate) fn silu<V: Vector>(s: V, x: V::F) -> V::F {
    gate(s, x, x)
}

/// The Gaussian error unit in its tanh form: ½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))), which is x·σ of twice the
/// tanh's argument.
#[inline(always)]
pub(crate) fn gelu<V: Vector>(s: V, x: V::F) -> V::F {
    let cube = s.mul(s.mul(x, x), x);
    let inner = s.fma(cube, s.splat(0.044_715), x);
    gate(s, x, s.mul(inner, s.splat(2.0 * 0.797_884_6)))
}

/// What an activation makes of a gate and of what it opens; of the gate alone if that is all.
#[inline(always)]
pub(crate) fn activate<V: Vector>(s: V, activation: Activation, x: V::F, up: Option<V::F>) -> V::F {
    let (open, up) = match activation {
        Activation::Silu => (silu(s, x), up),
        Activation::GeluTanh => (gelu(s, x), up),
        Activation::ReluSquared => {
            let positive = s.max(x, s.splat(0.0));
            (s.mul(positive, positive), up)
        }
        Activation::ClampedSilu => {
            let x = s.min(x, s.splat(7.0));
            let up = up.map(|up| s.add(s.min(s.max(up, s.splat(-7.0)), s.splat(7.0)), s.splat(1.0)));
            (gate(s, x, s.mul(x, s.splat(1.702))), up)
        }
    };
    match up {
        Some(up) => s.mul(open, up),
        None => open,
    }
}

/// `cap · tanh(x / cap)`.
#[inline(always)]
pub(crate) fn softcap<V: Vector>(s: V, x: V::F, cap: f32) -> V::F {
    // tanh y = 1 − 2 / (1 + e²ʸ)
    let e = exp(s, s.mul(x, s.splat(2.0 / cap)));
    let tanh = s.sub(s.splat(1.0), s.div(s.splat(2.0), s.add(s.splat(1.0), e)));
    s.mul(tanh, s.splat(cap))
}

/// Up to sixteen values, with zeros after them.
#[inline(always)]
pub(crate) fn padded(values: &[f32]) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    lanes[..values.len()].copy_from_slice(values);
    lanes
}

/// 1 / √(mean of squares + ε): what root-mean-square normalisation multiplies a row with.
#[inline(always)]
pub(crate) fn rms_factor<S: Simd>(s: S, row: &[f32], epsilon: f32) -> f32 {
    let (chunks, rest) = row.as_chunks::<LANES>();
    let mut squares = s.splat(0.0);
    for chunk in chunks {
        let v = s.load(chunk);
        squares = s.fma(v, v, squares);
    }
    if !rest.is_empty() {
        let v = s.load(&padded(rest));
        squares = s.fma(v, v, squares);
    }
    1.0 / (s.sum_of(squares) / row.len() as f32 + epsilon).sqrt()
}

/// Writes `row` normalised and weighted to the front of `out`, which may be longer.
#[inline(always)]
pub(crate) fn rms_norm<S: Simd>(s: S, row: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    let factor = rms_factor(s, row, epsilon);
    let factors = s.splat(factor);
    let out = &mut out[..row.len()];
    let (rows, row_rest) = row.as_chunks::<LANES>();
    let (weights, weight_rest) = weight.as_chunks::<LANES>();
    let (outs, out_rest) = out.as_chunks_mut::<LANES>();
    for ((row, weight), out) in rows.iter().zip(weights).zip(outs) {
        s.store(s.mul(s.mul(s.load(row), factors), s.load(weight)), out);
    }
    for ((row, weight), out) in row_rest.iter().zip(weight_rest).zip(out_rest) {
        *out = row * factor * weight;
    }
}

/// A norm's numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowNorm<'a> {
    /// How rows are normalised.
    pub(crate) kind: NormKind,
    /// Multiplies normalised elements.
    pub(crate) weight: &'a [f32],
    /// Is added then.
    pub(crate) bias: Option<&'a [f32]>,
    /// Is added to the mean of squares.
    pub(crate) epsilon: f32,
}

/// Writes `row` normalised to the front of `out`, which may be longer.
#[inline(always)]
pub(crate) fn normalise<S: Simd>(s: S, row: &[f32], norm: RowNorm<'_>, out: &mut [f32]) {
    let out = &mut out[..row.len()];
    if let (NormKind::RootMeanSquare, None) = (norm.kind, norm.bias) {
        return rms_norm(s, row, norm.weight, norm.epsilon, out);
    }
    out.copy_from_slice(row);
    normalise_in_place(s, out, norm);
}

/// The same where the row is.
#[inline(always)]
pub(crate) fn normalise_in_place<S: Simd>(s: S, row: &mut [f32], norm: RowNorm<'_>) {
    if norm.kind == NormKind::Layer {
        let mut sum = s.splat(0.0);
        for chunk in row.chunks(LANES) {
            sum = s.add(sum, s.load(&padded(chunk)));
        }
        let mean = s.sum_of(sum) / row.len() as f32;
        row.iter_mut().for_each(|value| *value -= mean);
    }
    let factor = rms_factor(s, row, norm.epsilon);
    row.iter_mut().zip(norm.weight).for_each(|(value, weight)| *value = *value * factor * weight);
    if let Some(bias) = norm.bias {
        row.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::simd::{Isa, Op};
    use super::*;

    struct Functions([f32; LANES]);

    impl Op for Functions {
        type Output = [[f32; LANES]; 3];

        #[inline(always)]
        fn eval<S: Simd>(self, s: S) -> Self::Output {
            let x = s.load(&self.0);
            let mut out = [[0.0; LANES]; 3];
            s.store(exp(s, x), &mut out[0]);
            s.store(silu(s, x), &mut out[1]);
            s.store(gelu(s, x), &mut out[2]);
            out
        }
    }

    struct Norm<'a>(&'a [f32], &'a [f32]);

    impl Op for Norm<'_> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn eval<S: Simd>(self, s: S) -> Vec<f32> {
            let mut out = vec![0.0; self.0.len()];
            rms_norm(s, self.0, self.1, 1e-5, &mut out);
            out
        }
    }

    fn close(found: f32, expected: f64, relative: f64) -> bool {
        (f64::from(found) - expected).abs() <= relative * expected.abs() + 1e-37
    }

    proptest! {
        #[test]
        fn functions_are_accurate_and_the_same_everywhere(x in proptest::array::uniform16(-87f32..88.0)) {
            let reference = Isa::all()[0].run(Functions(x));
            for isa in Isa::all() {
                let [e, silu, gelu] = isa.run(Functions(x));
                prop_assert_eq!([e, silu, gelu].map(|v| v.map(f32::to_bits)), reference.map(|v| v.map(f32::to_bits)));
                for i in 0..LANES {
                    let x = f64::from(x[i]);
                    prop_assert!(close(e[i], x.exp(), 3e-7), "exp({x}) = {}", e[i]);
                    prop_assert!(close(silu[i], x / (1.0 + (-x).exp()), 4e-7), "silu({x}) = {}", silu[i]);
                    let inner = 0.797_884_560_802_865_4 * (x + 0.044_715 * x * x * x);
                    let expected = 0.5 * x * (1.0 + inner.tanh());
                    prop_assert!((f64::from(gelu[i]) - expected).abs() <= 4e-6 * x.abs().max(1e-3), "gelu({x}) = {}", gelu[i]);
                }
            }
        }

        #[test]
        fn norm_has_unit_mean_square(row in proptest::collection::vec(-3f32..3.0, 1..100)) {
            let weight = vec![2.0; row.len()];
            let reference = Isa::all()[0].run(Norm(&row, &weight));
            let mean = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / row.len() as f64;
            for isa in Isa::all() {
                let found = isa.run(Norm(&row, &weight));
                prop_assert_eq!(&found, &reference);
                for (found, x) in found.iter().zip(&row) {
                    prop_assert!(close(*found, 2.0 * f64::from(*x) / (mean + 1e-5).sqrt(), 2e-6));
                }
            }
        }
    }

    #[test]
    fn exp_holds_at_its_bounds() {
        let mut x = [0.0; LANES];
        x[..4].copy_from_slice(&[f32::NEG_INFINITY, -1000.0, 1000.0, f32::INFINITY]);
        for isa in Isa::all() {
            let [e, ..] = isa.run(Functions(x));
            assert_eq!(e[0], e[1]);
            assert!(e[0] > 0.0 && e[0] < 1e-37);
            assert_eq!(e[2], e[3]);
            assert!(e[2].is_finite());
            assert_eq!(e[4], 1.0);
        }
    }
}
