//! Rotary position embedding.

use super::ConfigError;
use super::hyper::Hyper;

/// Which elements of a head are rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeLayout {
    /// Neighbours, `2 i` and `2 i + 1`, as ggml's `norm`. Llama files are permuted to this when converted.
    Interleaved,
    /// Element `i` of the first half and element `i` of the second, as ggml's `neox`.
    Halves,
}

/// A rotary position embedding (Su et al., "RoFormer", 2021).
///
/// At position `p` pair `i` is turned by `p · frequencies()[i]`. Elements of a head from `dimension` on are left as
/// they are.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Which elements are pairs.
    pub layout: RopeLayout,
    /// Elements of a head that are rotated; even.
    pub dimension: usize,
    /// Base of the geometric row of frequencies.
    pub base: f32,
    /// What positions are multiplied with: 1, or less where the context was stretched linearly.
    pub scale: f32,
    /// What each frequency is divided by besides, `dimension / 2` of them; empty for nothing. Llama 3.1 and its like
    /// stretch their contexts with these.
    pub factors: Vec<f32>,
}

impl Rope {
    /// Radians by which each pair turns from one position to the next; `dimension / 2` of them.
    ///
    /// Computed from additions, multiplications and divisions alone, so that every machine gets the same bits; within
    /// one unit in the last place of the true value.
    pub fn frequencies(&self) -> Vec<f32> {
        let pairs = self.dimension / 2;
        let log = natural_log(f64::from(self.base));
        (0..pairs)
            .map(|i| {
                let frequency = exponential(-log * (i as f64) / (pairs as f64)) * f64::from(self.scale);
                (frequency / self.factors.get(i).map_or(1.0, |&factor| f64::from(factor))) as f32
            })
            .collect()
    }

    /// Reads what most architectures have in common.
    pub(super) fn read(hyper: &Hyper<'_>, layout: RopeLayout, key_length: usize, default_base: f32) -> Result<Rope, ConfigError> {
        const DIMENSION: &str = "rope.dimension_count";
        let dimension = hyper.count_if_any(DIMENSION)?.unwrap_or(key_length);
        if dimension > key_length || !dimension.is_multiple_of(2) {
            return Err(hyper.invalid(DIMENSION, "even and no more than the length of a key", dimension));
        }
        let base = hyper.positive_if_any("rope.freq_base")?.unwrap_or(default_base);
        let scale = match hyper.str_if_any("rope.scaling.type")? {
            Some("none") => 1.0,
            // Files from before scaling types have only a linear factor. Zero stands for none.
            None => match hyper.positive_or_zero("rope.scaling.factor")? {
                Some(factor) => 1.0 / factor,
                None => hyper.positive_or_zero("rope.scale_linear")?.map_or(1.0, |factor| 1.0 / factor),
            },
            Some("linear") => hyper.positive_or_zero("rope.scaling.factor")?.map_or(1.0, |factor| 1.0 / factor),
            Some(other) => return Err(hyper.unsupported(format!("rope scaling of type {other:?}"))),
        };
        Ok(Rope { layout, dimension, base, scale, factors: Vec::new() })
    }
}

/// The natural logarithm of a positive, finite number.
fn natural_log(x: f64) -> f64 {
    // x = m · 2^e with m around 1, and ln m = 2 artanh((m − 1) / (m + 1)), whose series converges fast there.
    let mut exponent = 0i32;
    let mut mantissa = x;
    while mantissa > std::f64::consts::SQRT_2 {
        mantissa /= 2.0;
        exponent += 1;
    }
    while mantissa < std::f64::consts::FRAC_1_SQRT_2 {
        mantissa *= 2.0;
        exponent -= 1;
    }
    let t = (mantissa - 1.0) / (mantissa + 1.0);
    let square = t * t;
    let series = (0..16).rev().fold(0.0, |sum, k| sum * square + 1.0 / f64::from(2 * k + 1));
    2.0 * t * series + f64::from(exponent) * std::f64::consts::LN_2
}

/// The exponential of a number whose result is neither tiny nor huge.
fn exponential(x: f64) -> f64 {
    // e^x = (e^(x / 1024))^1024: a short series, then ten squarings.
    let small = x / 1024.0;
    let mut term = 1.0;
    // Summed without the leading one, which would cost the digits that the squarings need.
    let mut less_one = 0.0;
    for k in 1..=12 {
        term *= small / f64::from(k);
        less_one += term;
    }
    for _ in 0..10 {
        less_one = less_one * (less_one + 2.0);
    }
    less_one + 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_are_the_geometric_row() {
        for base in [10_000.0f32, 100_000.0, 500_000.0, 1_000_000.0] {
            let rope = Rope { layout: RopeLayout::Interleaved, dimension: 128, base, scale: 1.0, factors: Vec::new() };
            let frequencies = rope.frequencies();
            assert_eq!(frequencies.len(), 64);
            assert_eq!(frequencies[0], 1.0);
            for (i, &frequency) in frequencies.iter().enumerate() {
                let exact = f64::from(base).powf(-(i as f64) / 64.0) as f32;
                assert!(frequency.to_bits().abs_diff(exact.to_bits()) <= 1, "{base} {i}: {frequency} {exact}");
            }
        }
    }

    #[test]
    fn scale_and_factors_divide() {
        let rope = Rope { layout: RopeLayout::Halves, dimension: 4, base: 100.0, scale: 0.125, factors: vec![1.0, 4.0] };
        assert_eq!(rope.frequencies(), [0.125, 0.1 * 0.125 / 4.0]);
    }
}
