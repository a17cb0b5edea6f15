//! What is known of a way to a peer, and what a message would cost on it.

use std::time::Duration;

/// Weight of a new round trip in the smoothed one, as one part of so many.
const RTT_WEIGHT: f64 = 4.0;
/// Weight of a new bandwidth in the smoothed one.
const BANDWIDTH_WEIGHT: f64 = 2.0;

/// One measurement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Shortest round trip of a short message.
    pub rtt: Duration,
    /// Bytes per second in the dialling end's direction, if it was measured.
    pub bytes_per_second: Option<f64>,
}

/// Smoothed measurements, and a guess until there are any.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    guess_rtt_ns: f64,
    guess_bytes_per_second: f64,
    rtt_ns: Option<f64>,
    bytes_per_second: Option<f64>,
}

impl Estimate {
    /// Nothing measured yet.
    pub fn guess(rtt: Duration, bytes_per_second: f64) -> Self {
        Self { guess_rtt_ns: rtt.as_nanos() as f64, guess_bytes_per_second: bytes_per_second, rtt_ns: None, bytes_per_second: None }
    }

    /// Takes a measurement in.
    pub fn take(&mut self, sample: Sample) {
        let rtt = sample.rtt.as_nanos() as f64;
        self.rtt_ns = Some(self.rtt_ns.map_or(rtt, |before| before + (rtt - before) / RTT_WEIGHT));
        if let Some(rate) = sample.bytes_per_second.filter(|rate| rate.is_finite() && *rate > 0.0) {
            self.bytes_per_second = Some(self.bytes_per_second.map_or(rate, |before| before + (rate - before) / BANDWIDTH_WEIGHT));
        }
    }

    /// So many bytes went through in this time, so at least that much can.
    pub fn carried(&mut self, bytes: u64, over: Duration) {
        let rate = bytes as f64 / over.as_secs_f64();
        if rate.is_finite() && self.bytes_per_second.is_some_and(|before| before < rate) {
            self.bytes_per_second = Some(rate);
        }
    }

    /// Forgets what was measured: the way has failed, and may come back as another one.
    pub fn forget(&mut self) {
        self.rtt_ns = None;
        self.bytes_per_second = None;
    }

    /// Whether anything was measured since the way last failed.
    pub fn is_measured(&self) -> bool {
        self.rtt_ns.is_some()
    }

    /// The smoothed round trip.
    pub fn rtt(&self) -> Option<Duration> {
        self.rtt_ns.map(|ns| Duration::from_nanos(ns as u64))
    }

    /// The smoothed bandwidth, in bytes per second.
    pub fn bytes_per_second(&self) -> Option<f64> {
        self.bytes_per_second
    }

    /// How long a message of `bytes` takes to arrive, in nanoseconds: half a round trip, and its bytes.
    pub fn cost_ns(&self, bytes: u64) -> f64 {
        let rate = self.bytes_per_second.unwrap_or(self.guess_bytes_per_second).max(1.0);
        self.rtt_ns.unwrap_or(self.guess_rtt_ns) / 2.0 + bytes as f64 * 1e9 / rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn small_messages_go_by_latency_and_large_ones_by_bandwidth() {
        let mut near = Estimate::guess(MS, 1e9);
        let mut wide = near;
        near.take(Sample { rtt: MS, bytes_per_second: Some(1e8) });
        wide.take(Sample { rtt: 4 * MS, bytes_per_second: Some(1e9) });
        assert!(near.cost_ns(1000) < wide.cost_ns(1000));
        assert!(near.cost_ns(10_000_000) > wide.cost_ns(10_000_000));
        // Half of 1 ms, and 1 MB at 100 MB/s.
        assert_eq!(near.cost_ns(1_000_000), 500_000.0 + 10_000_000.0);
    }

    #[test]
    fn guesses_give_way_and_come_back() {
        let mut way = Estimate::guess(2 * MS, 1e9);
        assert_eq!(way.cost_ns(0), 1e6);
        way.take(Sample { rtt: 4 * MS, bytes_per_second: None });
        assert_eq!(way.cost_ns(0), 2e6);
        way.take(Sample { rtt: 8 * MS, bytes_per_second: Some(f64::NAN) });
        assert_eq!((way.rtt(), way.bytes_per_second()), (Some(5 * MS), None));
        way.forget();
        assert_eq!((way.cost_ns(0), way.is_measured()), (1e6, false));
    }

    #[test]
    fn traffic_raises_the_bandwidth_and_never_lowers_it() {
        let mut way = Estimate::guess(MS, 1e9);
        way.carried(1 << 30, MS);
        assert_eq!(way.bytes_per_second(), None, "a guess is not held against traffic");
        way.take(Sample { rtt: MS, bytes_per_second: Some(1e6) });
        way.carried(500, MS);
        assert_eq!(way.bytes_per_second(), Some(1e6));
        way.carried(2000, MS);
        assert_eq!(way.bytes_per_second(), Some(2e6));
        way.carried(1, Duration::ZERO);
        assert_eq!(way.bytes_per_second(), Some(2e6), "no time, no rate");
    }
}
