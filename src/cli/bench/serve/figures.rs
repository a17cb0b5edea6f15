//! What is left of many times.

use crate::cli::percentile;

/// How times are spread, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Spread {
    pub(super) count: usize,
    pub(super) p50: f64,
    pub(super) p95: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
}

impl Spread {
    /// Of any number of times; zeros if there are none.
    pub(super) fn of(mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        let within = |percent| percentile(&times, percent).copied().unwrap_or(0.0);
        Self { count: times.len(), p50: within(50), p95: within(95), p99: within(99), max: within(100) }
    }
}

/// Seconds in words.
pub(super) fn milliseconds(seconds: f64) -> String {
    if seconds < 10.0 { format!("{:.0} ms", seconds * 1000.0) } else { format!("{seconds:.1} s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_of_a_hundred_are_within() {
        let spread = Spread::of((1..=200).rev().map(f64::from).collect());
        assert_eq!(spread, Spread { count: 200, p50: 100.0, p95: 190.0, p99: 198.0, max: 200.0 });
        assert_eq!(Spread::of(vec![3.0]), Spread { count: 1, p50: 3.0, p95: 3.0, p99: 3.0, max: 3.0 });
        assert_eq!(Spread::of(Vec::new()), Spread::default());
        assert_eq!((milliseconds(0.0126), milliseconds(12.34)), ("13 ms".to_owned(), "12.3 s".to_owned()));
    }
}
