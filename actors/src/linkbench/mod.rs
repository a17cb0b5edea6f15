//! How fast tensor links are, by provider and size of message: between two nodes, and between two processes of one machine.
//!
//! A node that is asked for a link to measure expects one with a fresh ticket, answers on it for a bounded time and for so many
//! bytes, and has only a few at a time. So whoever is in the cluster can measure, and cannot keep a node busy by it for long.

mod local;
mod service;

use serde::{Deserialize, Serialize};
pub use shoal_transport::bench::{BenchError, BenchOptions, BenchRow, MESSAGE_BYTES_MAX};

pub use local::{Local, LocalError, answer_invitations};
pub(crate) use service::start;
pub use service::{BenchOffer, BenchRefusal, BenchRequest, LinkBench, LinkBenchError, LinkBenchServer};

/// What was measured over one provider for one size of message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinkBenchRow {
    /// What carried it: `shm`, `tcp`, …
    pub provider: String,
    /// Length of the messages.
    pub bytes: u32,
    /// Median of the round trips, in microseconds.
    pub rtt_us_p50: f64,
    /// What 99 of 100 round trips took no longer than, in microseconds.
    pub rtt_us_p99: f64,
    /// Bytes a second in one direction, in units of 2³⁰.
    pub gib_per_s: f64,
}

impl LinkBenchRow {
    fn new(provider: impl ToString, row: &BenchRow) -> Self {
        Self {
            provider: provider.to_string(),
            bytes: row.bytes,
            rtt_us_p50: row.rtt_p50.as_secs_f64() * 1e6,
            rtt_us_p99: row.rtt_p99.as_secs_f64() * 1e6,
            gib_per_s: row.bytes_per_second / f64::from(1 << 30),
        }
    }
}
