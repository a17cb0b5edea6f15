//! Angles of the rotary position embedding.

use crate::config::{Rope, RopeLayout};

/// Sines and cosines for each row of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotation {
    layout: RopeLayout,
    pairs: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Rotation {
    /// Angles of rows at `positions`, where `frequencies` are those of `rope`.
    pub fn new(rope: &Rope, frequencies: &[f32], positions: &[usize]) -> Self {
        let pairs = frequencies.len();
        let mut rotation =
            Self { layout: rope.layout, pairs, cos: vec![0.0; positions.len() * pairs], sin: vec![0.0; positions.len() * pairs] };
        let angles = positions.iter().flat_map(|&position| frequencies.iter().map(move |&f| position as f64 * f64::from(f)));
        for ((angle, cos), sin) in angles.zip(&mut rotation.cos).zip(&mut rotation.sin) {
            let (s, c) = sin_cos(angle);
            let magnitude = f64::from(rope.magnitude);
            (*cos, *sin) = ((c * magnitude) as f32, (s * magnitude) as f32);
        }
        rotation
    }

    /// No angles: nothing is turned.
    pub fn none() -> Self {
        Self { layout: RopeLayout::Halves, pairs: 0, cos: Vec::new(), sin: Vec::new() }
    }

    /// Which elements are turned together.
    pub fn layout(&self) -> RopeLayout {
        self.layout
    }

    /// Pairs of elements that are turned.
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// Cosines and sines of a row, one for each pair, times the embedding's magnitude.
    pub fn row(&self, row: usize) -> (&[f32], &[f32]) {
        let range = row * self.pairs..(row + 1) * self.pairs;
        (&self.cos[range.clone()], &self.sin[range])
    }

    /// All cosines and all sines.
    pub(super) fn all(&self) -> (&[f32], &[f32]) {
        (&self.cos, &self.sin)
    }
}

/// Sine and cosine of an angle from 0 to some 10⁹, to about 10⁻¹⁵, from additions and multiplications only, so that every
/// machine gives the same bits.
fn sin_cos(angle: f64) -> (f64, f64) {
    // π/2 in three parts; the first two have so few bits that their products with the count of quarters are exact.
    const PARTS: [f64; 3] = [1.570_796_310_901_641_8, 1.589_325_471_229_585_7e-8, 6.123_233_995_736_766e-17];
    let quarters = (angle * std::f64::consts::FRAC_2_PI).round_ties_even();
    let r = ((angle - quarters * PARTS[0]) - quarters * PARTS[1]) - quarters * PARTS[2];
    let square = r * r;
    // Taylor's series; |r| is at most π/4.
    let (mut sin, mut cos) = (0.0, 0.0);
    for k in (1..=8).rev() {
        let k = f64::from(k);
        sin = (1.0 - sin) * square / ((2.0 * k) * (2.0 * k + 1.0));
        cos = (1.0 - cos) * square / ((2.0 * k - 1.0) * (2.0 * k));
    }
    let (sin, cos) = (r * (1.0 - sin), 1.0 - cos);
    match quarters as i64 & 3 {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sines_are_accurate() {
        for i in 0..200_000 {
            let angle = f64::from(i) * 0.731 * f64::from(i % 11 + 1);
            let (sin, cos) = sin_cos(angle);
            assert!((sin - angle.sin()).abs() < 2e-15 * (1.0 + angle * 1e-2), "sin {angle}: {sin} {}", angle.sin());
            assert!((cos - angle.cos()).abs() < 2e-15 * (1.0 + angle * 1e-2), "cos {angle}: {cos} {}", angle.cos());
        }
    }

    #[test]
    fn rows_have_their_positions_angles() {
        let rope = Rope::plain(RopeLayout::Halves, 8, 10_000.0);
        let frequencies = rope.frequencies(1);
        let rotation = Rotation::new(&rope, &frequencies, &[0, 7]);
        assert_eq!(rotation.row(0), ([1.0; 4].as_slice(), [0.0; 4].as_slice()));
        let (cos, sin) = rotation.row(1);
        for (i, f) in frequencies.iter().enumerate() {
            assert!((cos[i] - (7.0 * f).cos()).abs() < 1e-6);
            assert!((sin[i] - (7.0 * f).sin()).abs() < 1e-6);
        }
    }
}
