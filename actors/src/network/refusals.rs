//! Remembers who was turned away, so that nobody dials or answers a stranger over and over.
//!
//! A pure state machine. It forgets quickly: people fix a key and try again, and a node that was restarted with the
//! right one should not wait long.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::env::Instant;

/// How long a refusal counts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    /// After the first one.
    pub(super) first: Duration,
    /// At most; it doubles each time.
    pub(super) longest: Duration,
}

/// Refusals by some key: a peer, an address.
#[derive(Debug)]
pub(super) struct Refusals<K> {
    pace: Pace,
    entries: BTreeMap<K, Entry>,
}

#[derive(Debug)]
struct Entry {
    until: Instant,
    delay: Duration,
    reason: String,
}

/// A refusal that still counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Standing {
    /// What was said.
    pub(super) reason: String,
    /// How much longer it counts.
    pub(super) left: Duration,
}

impl<K: Ord + Clone> Refusals<K> {
    /// Most entries that are kept. The one that ends first makes room for a new one.
    const ENTRIES_MAX: usize = 1024;

    pub(super) fn new(pace: Pace) -> Self {
        Self { pace, entries: BTreeMap::new() }
    }

    /// Notes a refusal.
    pub(super) fn note(&mut self, key: K, now: Instant, reason: &str) {
        let longest = self.pace.longest;
        // One that ended a while ago starts from the beginning.
        let previous = self.entries.get(&key).filter(|entry| now <= entry.until + longest);
        let delay = previous.map_or(self.pace.first, |entry| (entry.delay * 2).min(longest));
        if self.entries.len() >= Self::ENTRIES_MAX && !self.entries.contains_key(&key) {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.until).map(|(key, _)| key.clone());
            if let Some(oldest) = oldest {
                self.entries.remove(&oldest);
            }
        }
        self.entries.insert(key, Entry { until: now + delay, delay, reason: reason.to_owned() });
    }

    /// The refusal that counts for `key`, if any.
    pub(super) fn standing(&self, key: &K, now: Instant) -> Option<Standing> {
        let entry = self.entries.get(key).filter(|entry| now < entry.until)?;
        Some(Standing { reason: entry.reason.clone(), left: entry.until.since(now) })
    }

    /// Forgets, because it went well.
    pub(super) fn forget(&mut self, key: &K) {
        self.entries.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACE: Pace = Pace { first: Duration::from_secs(1), longest: Duration::from_secs(5) };

    fn at(seconds: f64) -> Instant {
        Instant::ZERO + Duration::from_secs_f64(seconds)
    }

    #[test]
    fn the_wait_doubles_and_ends() {
        let mut refusals = Refusals::new(PACE);
        assert_eq!(refusals.standing(&1, at(0.0)), None);
        let mut now = 0.0;
        for expected in [1, 2, 4, 5, 5] {
            refusals.note(1, at(now), "no");
            assert_eq!(refusals.standing(&1, at(now)), Some(Standing { reason: "no".into(), left: Duration::from_secs(expected) }));
            now += expected as f64;
            assert_eq!(refusals.standing(&1, at(now)), None);
        }
        refusals.note(1, at(now + 100.0), "no");
        assert_eq!(refusals.standing(&1, at(now + 100.0)).map(|standing| standing.left), Some(PACE.first));
        refusals.forget(&1);
        assert_eq!(refusals.standing(&1, at(now + 100.0)), None);
    }

    #[test]
    fn strangers_do_not_fill_memory() {
        let mut refusals = Refusals::new(PACE);
        for key in 0..5000 {
            refusals.note(key, at(f64::from(key) * 0.001), "no");
        }
        assert_eq!(refusals.entries.len(), Refusals::<i32>::ENTRIES_MAX);
        assert!(refusals.standing(&4999, at(5.0)).is_some());
    }
}
