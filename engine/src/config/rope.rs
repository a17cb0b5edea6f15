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
/// At position `p` pair `i` is turned by `p · frequencies()[i]`, and what is turned is multiplied with `magnitude`. Elements of a head
/// from `dimension` on are left as they are.
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
    /// Other factors for long contexts.
    pub long: Option<LongFactors>,
    /// Scaling that leaves high frequencies as they are.
    pub yarn: Option<Yarn>,
    /// What is turned is multiplied with this.
    pub magnitude: f32,
}

/// Factors for contexts that are longer than the original one (Ding et al., "LongRoPE", 2024).
#[derive(Debug, Clone, PartialEq)]
pub struct LongFactors {
    /// The longest context that takes the usual factors, in tokens.
    pub original_tokens: usize,
    /// What each frequency is divided by in longer contexts.
    pub factors: Vec<f32>,
}

/// Scaling by parts (Peng et al., "YaRN", 2023): pairs that turn more than `fast` times in the original context keep their frequencies,
/// those that turn less than `slow` times are scaled, and those between are mixed.
#[derive(Debug, Clone, PartialEq)]
pub struct Yarn {
    /// The context before stretching, in tokens.
    pub original_tokens: usize,
    /// Turns, see above.
    pub fast: f32,
    /// Turns, see above.
    pub slow: f32,
}

impl Rope {
    /// An embedding of whole heads without any scaling.
    pub fn plain(layout: RopeLayout, dimension: usize, base: f32) -> Rope {
        Rope { layout, dimension, base, scale: 1.0, factors: Vec::new(), long: None, yarn: None, magnitude: 1.0 }
    }

    /// Radians by which each pair turns from one position to the next, where contexts have up to `context_tokens`; `dimension / 2` of
    /// them.
    ///
    /// Computed from additions, multiplications and divisions alone, so that every machine gets the same bits; within
    /// one unit in the last place of the true value.
    pub fn frequencies(&self, context_tokens: usize) -> Vec<f32> {
        let pairs = self.dimension / 2;
        let log = natural_log(f64::from(self.base));
        let factors = match &self.long {
            Some(long) if context_tokens > long.original_tokens => &long.factors,
            _ => &self.factors,
        };
        let kept = self.yarn.as_ref().map(|yarn| yarn.kept(self.dimension, log));
        (0..pairs)
            .map(|i| {
                let scale = f64::from(self.scale);
                let kept = kept.map_or(0.0, |(first, last)| {
                    let place = (i as f64 - first) / (last - first).max(0.001);
                    1.0 - place.clamp(0.0, 1.0)
                });
                let frequency = exponential(-log * (i as f64) / (pairs as f64)) * (scale * (1.0 - kept) + kept);
                (frequency / factors.get(i).map_or(1.0, |&factor| f64::from(factor))) as f32
            })
            .collect()
    }

    /// Reads what most architectures have in common.
    pub(super) fn read(hyper: &Hyper<'_>, layout: RopeLayout, key_length: usize) -> Result<Rope, ConfigError> {
        const DIMENSION: &str = "rope.dimension_count";
        /// Base where the file does not say.
        const BASE: f32 = 10_000.0;
        let dimension = hyper.count_if_any(DIMENSION)?.unwrap_or(key_length);
        if dimension > key_length || !dimension.is_multiple_of(2) {
            return Err(hyper.invalid(DIMENSION, "even and no more than the length of a key", dimension));
        }
        let base = hyper.positive_if_any("rope.freq_base")?.unwrap_or(BASE);
        let mut rope = Rope::plain(layout, dimension, base);
        rope.magnitude = hyper.positive_or_zero("rope.scaling.attn_factor")?.unwrap_or(1.0);
        let kind = hyper.str_if_any("rope.scaling.type")?;
        if kind != Some("none") {
            let factor = match hyper.positive_or_zero("rope.scaling.factor")? {
                Some(factor) => Some(factor),
                // Files from before scaling types have only a linear factor. Zero stands for none.
                None => hyper.positive_or_zero("rope.scale_linear")?,
            };
            rope.scale = factor.map_or(1.0, |factor| 1.0 / factor);
        }
        match kind {
            None | Some("none" | "linear") => {}
            Some("longrope") => rope.long = Some(LongFactors { original_tokens: original_tokens(hyper)?, factors: Vec::new() }),
            Some("yarn") => {
                let yarn = Yarn {
                    original_tokens: original_tokens(hyper)?,
                    fast: hyper.positive_if_any("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                    slow: hyper.positive_if_any("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                };
                let stretched = |by: f64| if rope.scale >= 1.0 { 1.0 } else { 1.0 - 0.1 * by * natural_log(f64::from(rope.scale)) };
                // What is said of all dimensions is in the attention's own scale already.
                let besides = hyper.positive_or_zero("rope.scaling.yarn_log_multiplier")?.map_or(1.0, |by| stretched(f64::from(by)));
                rope.magnitude *= (stretched(1.0) / besides) as f32;
                rope.yarn = Some(yarn);
            }
            Some(other) => return Err(hyper.unsupported(format!("rope scaling of type {other:?}"))),
        }
        Ok(rope)
    }
}

/// The context before it was stretched.
pub(super) fn original_tokens(hyper: &Hyper<'_>) -> Result<usize, ConfigError> {
    match hyper.count_or_zero("rope.scaling.original_context_length")? {
        Some(tokens) => Ok(tokens),
        None => hyper.count("context_length"),
    }
}

impl Yarn {
    /// The pairs up to which frequencies are kept and from which on they are scaled; `log` is that of the base.
    fn kept(&self, dimension: usize, log: f64) -> (f64, f64) {
        let pair = |turns: f32| {
            let circle = f64::from(turns) * 2.0 * std::f64::consts::PI;
            dimension as f64 * natural_log(self.original_tokens as f64 / circle) / (2.0 * log)
        };
        (pair(self.fast).floor().max(0.0), pair(self.slow).ceil().min(dimension as f64 - 1.0))
    }
}

/// The natural logarithm of a positive, finite number.
pub(super) fn natural_log(x: f64) -> f64 {
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
pub(crate) fn exponential(x: f64) -> f64 {
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
            let rope = Rope::plain(RopeLayout::Interleaved, 128, base);
            let frequencies = rope.frequencies(1);
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
        let rope = Rope { scale: 0.125, factors: vec![1.0, 4.0], ..Rope::plain(RopeLayout::Halves, 4, 100.0) };
        assert_eq!(rope.frequencies(1), [0.125, 0.1 * 0.125 / 4.0]);
    }

    #[test]
    fn long_contexts_have_their_own_factors() {
        let long = Some(LongFactors { original_tokens: 100, factors: vec![2.0, 8.0] });
        let rope = Rope { factors: vec![1.0, 4.0], long, ..Rope::plain(RopeLayout::Halves, 4, 100.0) };
        assert_eq!(rope.frequencies(100), [1.0, 0.1 / 4.0]);
        assert_eq!(rope.frequencies(101), [0.5, 0.1 / 8.0]);
    }

    #[test]
    fn yarn_keeps_what_turns_fast() {
        let yarn = Some(Yarn { original_tokens: 4096, fast: 32.0, slow: 1.0 });
        let plain = Rope::plain(RopeLayout::Halves, 64, 150_000.0);
        let rope = Rope { scale: 1.0 / 32.0, yarn, ..plain.clone() };
        let ratios: Vec<f32> = rope.frequencies(1).iter().zip(plain.frequencies(1)).map(|(scaled, plain)| scaled / plain).collect();
        // 32 turns: 32 · ln(4096 / 201) / ln 150000 = 8.09; one: 17.4.
        assert!(ratios[..=8].iter().all(|&ratio| ratio == 1.0), "{ratios:?}");
        assert!(ratios[18..].iter().all(|ratio| (ratio - 1.0 / 32.0).abs() < 1e-6), "{ratios:?}");
        assert!(ratios[8..=18].windows(2).all(|pair| pair[0] > pair[1]), "{ratios:?}");
    }
}
