//! Elementary functions that give the same bits on every platform.
//!
//! A system's own `expf` and `logf` differ in the last place between libraries, which is enough to choose another
//! token. These use only IEEE additions, multiplications and bit operations in a fixed order.

/// Base of the natural logarithm's logarithm to base two.
const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// The natural logarithm of two in two parts: the first has trailing zeros, so that small multiples of it are exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Adding and subtracting this rounds a small number to the nearest integer (ties to even).
const ROUND: f32 = 12_582_912.0;

/// `e^x` for `x ≤ 0`; below about −87 it is zero, for NaN too.
///
/// Relative error below 2·10⁻⁷. Cephes' reduction: `x = n·ln 2 + r`, a polynomial of degree five in `r`, and `n` added
/// to the exponent.
pub(crate) fn exp_not_positive(x: f32) -> f32 {
    let clamped = x.clamp(-87.0, 0.0);
    let n = clamped * LOG2_E + ROUND - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let poly = ((((1.987_569_2e-4 * r + 1.398_2e-3) * r + 8.333_452e-3) * r + 4.166_579_6e-2) * r + 1.666_666_6e-1) * r + 5.000_000_3e-1;
    let value = poly * r * r + r + 1.0;
    let power = f32::from_bits(((n as i32 + 127) as u32) << 23);
    if x >= -87.0 { value * power } else { 0.0 }
}

/// The natural logarithm of a positive, finite number.
///
/// Relative error below 10⁻¹⁴: `x = m·2^n` with `m` near one, and the series of `2·artanh((m − 1)/(m + 1))`.
pub(crate) fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = ((bits >> 52) & 0x7ff) as i64 - 1023;
    let mut mantissa = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | 0x3ff0_0000_0000_0000);
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    let ratio = (mantissa - 1.0) / (mantissa + 1.0);
    let square = ratio * ratio;
    let mut sum = 0.0;
    for denominator in [23.0, 21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0_f64] {
        sum = sum * square + 1.0 / denominator;
    }
    2.0 * ratio * sum + exponent as f64 * std::f64::consts::LN_2
}

/// Lanes that are summed side by side.
const LANES: usize = 16;

/// `e^((x − top)·scale)` of each logit into `out`, and their sum.
///
/// The sum's order is fixed by the position alone: sixteen partial sums of f64 that are added in their order.
pub(crate) fn exponentials(logits: &[f32], top: f32, scale: f32, out: &mut Vec<f32>) -> f64 {
    out.clear();
    out.extend(logits.iter().map(|&logit| exp_not_positive((logit - top) * scale)));
    sum(out)
}

/// The sum of `values` in the fixed order.
pub(crate) fn sum(values: &[f32]) -> f64 {
    let mut partial = [0.0_f64; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (sum, &value) in partial.iter_mut().zip(chunk) {
            *sum += f64::from(value);
        }
    }
    for (sum, &value) in partial.iter_mut().zip(chunks.remainder()) {
        *sum += f64::from(value);
    }
    partial.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ends_of_the_range() {
        assert_eq!(exp_not_positive(0.0), 1.0);
        assert_eq!(exp_not_positive(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_not_positive(-1e30), 0.0);
        assert_eq!(exp_not_positive(f32::NAN), 0.0);
        assert_eq!(ln(1.0), 0.0);
    }

    /// Pinned: another platform, compiler or "faster" rewrite must give these bits.
    #[test]
    fn bits_are_pinned() {
        let bits: Vec<u32> = [-0.1, -1.0, -3.75, -20.0, -86.9].map(|x: f32| exp_not_positive(x).to_bits()).to_vec();
        assert_eq!(bits, [1063756653, 1052531378, 1019258954, 822977587, 12980105]);
        let bits: Vec<u64> = [0.3, 2.5, 49_152.0, 1e-9].map(|x: f64| ln(x).to_bits()).to_vec();
        assert_eq!(bits, [13831473067500349216, 4606428432742539383, 4622270982213636882, 13849898335305727928]);
    }

    proptest! {
        #[test]
        fn near_the_true_exponential(x in -87.0_f32..0.0) {
            let truth = f64::from(x).exp();
            prop_assert!((f64::from(exp_not_positive(x)) - truth).abs() <= truth * 2e-7);
        }

        #[test]
        fn near_the_true_logarithm(x in 1e-30_f64..1e30) {
            prop_assert!((ln(x) - x.ln()).abs() <= x.ln().abs() * 1e-14 + 1e-15);
        }

        #[test]
        fn the_sum_is_near_the_true_sum(values in proptest::collection::vec(0.0_f32..1.0, 0..100)) {
            let truth: f64 = values.iter().map(|&v| f64::from(v)).sum();
            prop_assert!((sum(&values) - truth).abs() < 1e-9);
        }
    }
}
