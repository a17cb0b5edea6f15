//! Who gives way when memory or places are short.
//!
//! Whoever is the oldest of all that run is never made to give way and may make everybody else, so something always gets done. Beyond
//! that the accounts that hold more than their share give way first, the least urgent and then the youngest of their sequences, and
//! nobody who holds no more than that gives way to one who does, unless it would be for ever.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::machine::Scheduler;
use crate::request::Priority;

/// What an account holds.
#[derive(Debug, Clone, Copy, Default)]
struct Holding {
    sequences: usize,
    pages: usize,
    oldest: u64,
}

impl Scheduler {
    fn holdings(&self) -> BTreeMap<u64, Holding> {
        let mut holdings: BTreeMap<u64, Holding> = BTreeMap::new();
        for (key, sequence) in self.running.iter().filter_map(|key| Some((*key, self.sequences.get(key)?))) {
            let holding = holdings.entry(sequence.work.client.account).or_insert(Holding { oldest: key, ..Holding::default() });
            holding.sequences += 1;
            // With what it has still to send, and its next token.
            holding.pages += self.pages_of(sequence.tokens.len() + 1);
            holding.oldest = holding.oldest.min(key);
        }
        holdings
    }

    fn account(&self, key: u64) -> u64 {
        self.sequences.get(&key).map_or(0, |sequence| sequence.work.client.account)
    }

    fn priority(&self, key: u64) -> Option<Priority> {
        self.sequences.get(&key).map(|sequence| sequence.work.priority)
    }

    fn preempt(&mut self, key: u64) {
        self.close(key);
        self.waiting.insert(key);
    }

    /// Makes room for `pages` more for `key`, which runs, by preempting others. `false` if that is not enough; it then has to wait.
    pub(super) fn make_room(&mut self, pages: usize, key: u64, used: &BTreeSet<u64>) -> bool {
        while self.pages.available() < pages {
            let Some(victim) = self.victim(key, used) else { return false };
            self.preempt(victim);
        }
        true
    }

    fn victim(&self, key: u64, used: &BTreeSet<u64>) -> Option<u64> {
        let holdings = self.holdings();
        let accounts = self.fair.accounts();
        let share = self.config.pages / accounts.max(1);
        let over = |key| accounts > 1 && holdings.get(&self.account(key)).is_some_and(|holding| holding.pages > share);
        let oldest = |key| holdings.get(&self.account(key)).is_some_and(|holding| holding.oldest == key);
        let (mine, first) = (over(key), oldest(key));
        let gives_way = |other: &u64| {
            let theirs = over(*other);
            (theirs && !mine && !oldest(*other)) || (*other > key && (theirs || !mine || first))
        };
        // A sequence with rows in the step that is being composed must not be freed by the same step.
        let others = self.running.iter().copied().filter(|other| *other != key && !used.contains(other));
        others.filter(gives_way).max_by_key(|other| (over(*other), Reverse(self.priority(*other)), *other))
    }

    /// Has one sequence of an account with more than its share give way to `key`, which waits, if its account stays within its own:
    /// for a place, or for memory. None of `chosen` does. `false` if nobody has to.
    pub(super) fn yield_to(&mut self, key: u64, place: bool, chosen: &[(u64, usize)]) -> bool {
        let (accounts, holdings) = (self.fair.accounts(), self.holdings());
        let Some(sequence) = self.sequences.get(&key) else { return false };
        let mine = holdings.get(&sequence.work.client.account).copied().unwrap_or_default();
        let (had, wanted, all) = match place {
            true => (mine.sequences, 1, self.config.sequences_max),
            false => (mine.pages, self.pages_of(sequence.tokens.len() + 1), self.config.pages),
        };
        let share = (all / accounts.max(1)).max(1);
        if accounts < 2 || had + wanted > share {
            return false;
        }
        let amount = |holding: &Holding| if place { holding.sequences } else { holding.pages };
        let richest = holdings.iter().filter(|(_, holding)| holding.sequences > 1 && amount(holding) > share);
        let Some((account, holding)) = richest.max_by_key(|(_, holding)| amount(holding)) else { return false };
        let its = self.running.iter().copied().filter(|other| self.account(*other) == *account && *other != holding.oldest);
        let free = its.filter(|other| chosen.iter().all(|(chosen, _)| chosen != other));
        let Some(victim) = free.max_by_key(|other| (Reverse(self.priority(*other)), *other)) else { return false };
        self.preempt(victim);
        true
    }
}
