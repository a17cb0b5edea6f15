//! What came of it.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::{Board, Outcome};
use crate::cli;

/// How long after a kill the pause that it makes may begin: what is on its way still arrives.
const BEGINS: Duration = Duration::from_millis(250);

/// The part that a killed node had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// It conducted the model.
    Conductor,
    /// It held layers.
    Stage,
    /// Neither.
    Bystander,
}

impl Role {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Conductor => "conductor",
            Self::Stage => "stage",
            Self::Bystander => "bystander",
        }
    }
}

/// Counts and times.
#[derive(Debug, Default)]
pub(in crate::demo) struct Tally {
    kills: [u32; 3],
    /// Who was killed, and when.
    killed: Vec<(Role, usize, Instant)>,
    streams: u32,
    resumed: u32,
    failed: Vec<String>,
    different: Vec<String>,
    /// Everything else that is wrong.
    faults: Vec<String>,
    stage: Vec<Duration>,
    conductor: Vec<Duration>,
    api: Vec<Duration>,
}

/// How long after a kill a stream went on, by its longest pause; none if it was not there.
fn pause(heard: &[(usize, Instant)], at: Instant) -> Option<(usize, Duration)> {
    let over = heard.windows(2).filter(|pair| pair[1].1 > at && pair[0].1 <= at + BEGINS);
    over.max_by_key(|pair| pair[1].1.saturating_duration_since(pair[0].1)).map(|pair| (pair[0].0, pair[1].1.saturating_duration_since(at)))
}

/// The time that so many in a hundred do not exceed, in milliseconds.
fn percentile(times: &[Duration], percent: usize) -> Option<f64> {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    cli::percentile(&sorted, percent).map(|time| (time.as_secs_f64() * 1e4).round() / 10.0)
}

impl Tally {
    /// Notes a kill.
    pub(super) fn kill(&mut self, role: Role, victim: usize, at: Instant) {
        self.kills[role as usize] += 1;
        self.killed.push((role, victim, at));
    }

    /// Looks how long streams paused, when they have all ended.
    pub(super) fn measure(&mut self, board: &Board) {
        let heard = board.all_heard();
        for (role, victim, at) in std::mem::take(&mut self.killed) {
            heard.iter().for_each(|heard| self.paused(role, victim, pause(heard, at)));
        }
    }

    fn paused(&mut self, role: Role, victim: usize, pause: Option<(usize, Duration)>) {
        match (pause, role) {
            (Some((node, time)), _) if node == victim => self.api.push(time),
            (Some((_, time)), Role::Stage) => self.stage.push(time),
            (Some((_, time)), Role::Conductor) => self.conductor.push(time),
            _ => {}
        }
    }

    pub(super) fn add(&mut self, outcome: Outcome) {
        self.streams += outcome.streams;
        self.resumed += outcome.resumed;
        self.failed.extend(outcome.failed);
        self.different.extend(outcome.different);
    }

    pub(super) fn fault(&mut self, what: String) {
        self.faults.push(what);
    }

    /// Whether all went as it should.
    pub(in crate::demo) fn is_well(&self) -> bool {
        self.failed.is_empty() && self.different.is_empty() && self.faults.is_empty()
    }

    /// Everything that did not.
    pub(in crate::demo) fn wrongs(&self) -> impl Iterator<Item = &String> {
        self.failed.iter().chain(&self.different).chain(&self.faults)
    }

    /// The rows of a table: what was killed, how often, and how long streams paused.
    pub(in crate::demo) fn rows(&self) -> Vec<[String; 4]> {
        let time = |times: &[Duration], percent| percentile(times, percent).map_or_else(|| "–".to_owned(), |ms| format!("{ms:.0} ms"));
        let row = |name: &str, times: &[Duration]| [name.to_owned(), times.len().to_string(), time(times, 50), time(times, 95)];
        vec![row("a stage's node", &self.stage), row("the conductor", &self.conductor), row("the client's own node", &self.api)]
    }

    /// Counts, for people.
    pub(in crate::demo) fn words(&self) -> String {
        format!(
            "{} kills ({} conductors, {} holders of layers, {} others), {} streams that went on {} times elsewhere: {} failed, {} different",
            self.kills.iter().sum::<u32>(),
            self.kills[Role::Conductor as usize],
            self.kills[Role::Stage as usize],
            self.kills[Role::Bystander as usize],
            self.streams,
            self.resumed,
            self.failed.len(),
            self.different.len()
        )
    }

    pub(in crate::demo) fn json(&self) -> Value {
        let times = |times: &[Duration]| json!({"count": times.len(), "p50": percentile(times, 50), "p95": percentile(times, 95)});
        json!({
            "kills": self.kills.iter().sum::<u32>(),
            "killed": {
                "conductor": self.kills[Role::Conductor as usize],
                "stage": self.kills[Role::Stage as usize],
                "bystander": self.kills[Role::Bystander as usize],
            },
            "streams": self.streams,
            "resumed": self.resumed,
            "failed": self.failed.len(),
            "different": self.different.len(),
            "recovery_ms": {"stage": times(&self.stage), "conductor": times(&self.conductor), "api": times(&self.api)},
            "faults": self.wrongs().collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recovery_is_the_end_of_the_longest_pause_after_the_kill() {
        let zero = Instant::now();
        let at = |ms: u64| zero + Duration::from_millis(ms);
        let heard = |times: &[u64]| times.iter().map(|ms| (usize::from(*ms > 500), at(*ms))).collect::<Vec<_>>();
        // Killed at 100; one token was still on its way; the next came at 900 from another node.
        assert_eq!(pause(&heard(&[50, 110, 900, 920, 3000]), at(100)), Some((0, Duration::from_millis(800))));
        // Nothing came after the kill, or nothing had come before.
        assert_eq!(pause(&heard(&[50, 90]), at(100)), None);
        assert_eq!(pause(&heard(&[]), at(100)), None);
        // A pause long after it has other reasons.
        assert_eq!(pause(&heard(&[95, 105, 115, 1200, 9000]), at(100)), Some((0, Duration::from_millis(1100))));
    }

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let times: Vec<Duration> = (1..=20).map(Duration::from_millis).collect();
        assert_eq!((percentile(&times, 50), percentile(&times, 95), percentile(&times, 100)), (Some(10.0), Some(19.0), Some(20.0)));
        assert_eq!((percentile(&times[..1], 95), percentile(&[], 50)), (Some(1.0), None));
    }

    #[test]
    fn a_client_whose_node_was_killed_counts_as_such_whatever_else_the_node_was() {
        let mut tally = Tally::default();
        let pause = |node| Some((node, Duration::from_millis(7)));
        tally.paused(Role::Conductor, 2, pause(2));
        tally.paused(Role::Conductor, 2, pause(1));
        tally.paused(Role::Stage, 2, pause(1));
        tally.paused(Role::Bystander, 2, pause(1));
        assert_eq!((tally.api.len(), tally.conductor.len(), tally.stage.len()), (1, 1, 1));
        assert!(tally.is_well());
        tally.add(Outcome { streams: 3, resumed: 1, failed: vec!["x".to_owned()], different: Vec::new() });
        assert!(!tally.is_well());
        assert_eq!((tally.json()["failed"].as_u64(), tally.json()["streams"].as_u64()), (Some(1), Some(3)));
    }
}
