//! Activations as matrices take them: in 8-bit blocks for quantised weights, as they are for float ones.

use super::math::{max_lanes, sum_lanes};
use super::simd::{BLOCK, LANES, Simd};

/// Thirty-two activations: `scale · values`, with what weights with an offset need of them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ActivationBlock {
    /// In `-127..=127`.
    pub(crate) values: [i8; BLOCK],
    /// The largest magnitude is 127 times this.
    pub(crate) scale: f32,
    /// `scale · (sums[0] + sums[1])`.
    pub(crate) scaled_sum: f32,
    /// Sums of the first and second sixteen values.
    pub(crate) sums: [i32; 2],
}

impl ActivationBlock {
    /// All zero.
    pub(crate) const ZERO: Self = Self { values: [0; BLOCK], scale: 0.0, scaled_sum: 0.0, sums: [0; 2] };
}

/// Magnitudes below this are taken for zero: their reciprocal would overflow.
const SMALLEST: f32 = 1e-30;

/// Quantises a row, a multiple of [`BLOCK`] long, into `out`, one block for each [`BLOCK`] elements.
#[inline(always)]
pub(crate) fn quantise<S: Simd>(s: S, row: &[f32], out: &mut [ActivationBlock]) {
    let (blocks, _) = row.as_chunks::<BLOCK>();
    for (block, out) in blocks.iter().zip(out) {
        let (halves, _) = block.as_chunks::<LANES>();
        let v = [s.load(&halves[0]), s.load(&halves[1])];
        let largest = max_lanes(s, s.max(s.abs(v[0]), s.abs(v[1])));
        let (scale, inverse) = if largest > SMALLEST { (largest / 127.0, 127.0 / largest) } else { (0.0, 0.0) };
        let (values, _) = out.values.as_chunks_mut::<LANES>();
        for half in 0..2 {
            // The bounds also turn what is not a number into one, so that integer sums stay in range.
            let scaled = s.mul(v[half], s.splat(inverse));
            let scaled = s.min(s.max(scaled, s.splat(-127.0)), s.splat(127.0));
            let nearest = s.nearest(scaled);
            s.store_i8(s.to_ints(nearest), &mut values[half]);
            // A sum of small integers is exact as a float, too.
            out.sums[half] = sum_lanes(s, nearest) as i32;
        }
        out.scale = scale;
        out.scaled_sum = scale * (out.sums[0] + out.sums[1]) as f32;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::simd::{Isa, Op};
    use super::*;

    struct Quantise<'a>(&'a [f32]);

    impl Op for Quantise<'_> {
        type Output = Vec<ActivationBlock>;

        #[inline(always)]
        fn eval<S: Simd>(self, s: S) -> Self::Output {
            let mut out = vec![ActivationBlock::ZERO; self.0.len() / BLOCK];
            quantise(s, self.0, &mut out);
            out
        }
    }

    proptest! {
        #[test]
        fn quantised_rows_are_within_half_a_step(row in proptest::collection::vec(-50f32..50.0, 3 * BLOCK), scale in -34i32..20) {
            let row: Vec<f32> = row.iter().map(|v| v * 10f32.powi(scale)).collect();
            let reference = Isa::all()[0].run(Quantise(&row));
            for isa in Isa::all() {
                for (b, (block, expected)) in isa.run(Quantise(&row)).iter().zip(&reference).enumerate() {
                    prop_assert_eq!(block.values, expected.values);
                    prop_assert_eq!(block.scale.to_bits(), expected.scale.to_bits());
                    prop_assert_eq!(block.sums[0], block.values[..16].iter().map(|v| i32::from(*v)).sum::<i32>());
                    prop_assert_eq!(block.sums[1], block.values[16..].iter().map(|v| i32::from(*v)).sum::<i32>());
                    for (i, v) in block.values.iter().enumerate() {
                        let error = (f32::from(*v) * block.scale - row[b * BLOCK + i]).abs();
                        prop_assert!(error <= 0.5001 * block.scale + SMALLEST, "{error} {}", block.scale);
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_not_a_number_stays_in_range() {
        let mut row = vec![1.0; BLOCK];
        (row[3], row[20], row[31]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
        for isa in Isa::all() {
            let out = isa.run(Quantise(&row));
            assert!(out[0].values.iter().all(|v| *v > -128));
        }
    }
}
