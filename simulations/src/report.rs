//! What a run comes to, for people and for scripts.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

/// How often things happened in a run. A run in which nothing happened proves nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Counts {
    /// Sets of leases granted.
    pub granted: u64,
    /// Sets refused or not answered.
    pub refused: u64,
    /// Requests for sets that were given up by whoever asked.
    pub abandoned: u64,
    /// Sets given back.
    pub released: u64,
    /// Leases lost.
    pub lost: u64,
    /// Leases taken over from nodes believed dead.
    pub claimed: u64,
    /// Claims that an owner refused.
    pub claims_refused: u64,
    /// Nodes that ended.
    pub crashes: u64,
    /// Links cut.
    pub cuts: u64,
    /// Connections broken.
    pub severed: u64,
    /// Times that a node took another one for dead.
    pub deaths_seen: u64,
    /// Nodes paused.
    pub pauses: u64,
    /// Nodes that left, and gave away what they had before.
    pub left: u64,
    /// Nodes that left with something that had not moved.
    pub left_early: u64,
    /// Models placed.
    pub placed: u64,
    /// Pipelines that broke and were made whole.
    pub recovered: u64,
    /// Instances that were taken over from a conductor that had died.
    pub inherited: u64,
    /// Models that could not be placed.
    pub not_placed: u64,
    /// Answers that came to their end.
    pub whole: u64,
    /// Answers that broke off or were refused.
    pub broken_off: u64,
    /// Answers that nobody wanted any more.
    pub cancelled: u64,
    /// Tokens of all answers.
    pub tokens: u64,
}

impl Counts {
    /// Adds another run's.
    pub fn add(&mut self, other: &Self) {
        let Self { granted, refused, abandoned, released, lost, claimed, claims_refused, crashes, cuts, severed, deaths_seen, .. } = other;
        let Self { pauses, left, left_early, placed, recovered, inherited, not_placed, whole, broken_off, cancelled, tokens, .. } = other;
        self.granted += granted;
        self.refused += refused;
        self.abandoned += abandoned;
        self.released += released;
        self.lost += lost;
        self.claimed += claimed;
        self.claims_refused += claims_refused;
        self.crashes += crashes;
        self.cuts += cuts;
        self.severed += severed;
        self.deaths_seen += deaths_seen;
        self.pauses += pauses;
        self.left += left;
        self.left_early += left_early;
        self.placed += placed;
        self.recovered += recovered;
        self.inherited += inherited;
        self.not_placed += not_placed;
        self.whole += whole;
        self.broken_off += broken_off;
        self.cancelled += cancelled;
        self.tokens += tokens;
    }
}

/// A run that came to its end, with everything as it should be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The seed that it follows from.
    pub seed: u64,
    /// Nodes.
    pub nodes: u16,
    /// Virtual time that passed.
    pub virtual_time: Duration,
    /// Events.
    pub events: u64,
    /// The hash over all events, in hexadecimal: the same for every run of the seed.
    pub trace_hash: String,
    /// What happened.
    pub counts: Counts,
}

/// A run in which something was wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The command that shows it again.
    pub reproduce: String,
    /// What was wrong.
    pub reason: String,
    /// When, in virtual time.
    pub at: Duration,
    /// The hash over all events up to there.
    pub trace_hash: String,
    /// What happened last, oldest first.
    pub recent: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.recent {
            writeln!(f, "{line}")?;
        }
        writeln!(f, "failed after {:.6} s: {}", self.at.as_secs_f64(), self.reason)?;
        writeln!(f, "trace hash so far: {}", self.trace_hash)?;
        write!(f, "to see it again: {}", self.reproduce)
    }
}

impl std::error::Error for Failure {}
