//! Whose turn it is: prompts are run in an order that is fair to those who sent them.
//!
//! What is shared out is rows of steps. Each account has had so many, and of those that want some, the one that has had least is
//! next; within an account the same holds for its users, and what one user sends runs in the order in which it came. Who comes back
//! after having asked for nothing begins where the others are, so that nobody saves up; and nobody falls behind so far that others would
//! have to wait for long until they are even.
//!
//! Requests of a higher priority go first, but whoever has been passed over often enough has a turn nevertheless.

use std::collections::BTreeMap;

use crate::request::{Client, Priority};

/// How often in a row a lower priority is passed over at most.
pub(super) const PASSED_MAX: u32 = 7;

/// A request that could run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Candidate {
    /// Counts up with age.
    pub(super) key: u64,
    /// Who sent it.
    pub(super) client: Client,
    /// How urgent it is.
    pub(super) priority: Priority,
}

/// What somebody has had, in rows, and how many of its requests have not ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Had {
    rows: u64,
    requests: usize,
}

/// Those who share something out among themselves.
#[derive(Debug, Default)]
struct Shares(BTreeMap<u64, Had>);

impl Shares {
    fn enter(&mut self, who: u64) {
        let least = self.0.values().map(|had| had.rows).min().unwrap_or(0);
        let had = self.0.entry(who).or_insert(Had { rows: least, requests: 0 });
        had.requests += 1;
    }

    fn leave(&mut self, who: u64) {
        let Some(had) = self.0.get_mut(&who) else { return };
        had.requests = had.requests.saturating_sub(1);
        if had.requests == 0 {
            self.0.remove(&who);
        }
    }

    fn charge(&mut self, who: u64, rows: u64, lag: u64) {
        let Some(had) = self.0.get_mut(&who) else { return };
        had.rows = had.rows.saturating_add(rows);
        // Those who are far behind have not asked for more; they are not owed it for ever.
        let least = had.rows.saturating_sub(lag);
        self.0.values_mut().for_each(|had| had.rows = had.rows.max(least));
    }

    /// Of candidates, oldest first, all of one: who has had least, and of equals the one with the oldest.
    fn next(&self, wanting: impl Iterator<Item = u64>) -> Option<u64> {
        // The first of equals is kept.
        wanting.min_by_key(|who| self.0.get(who).map_or(0, |had| had.rows))
    }
}

/// Keeps the accounts.
#[derive(Debug)]
pub(super) struct Fair {
    accounts: Shares,
    users: BTreeMap<u64, Shares>,
    /// How often each priority was passed over since it had a turn.
    passed: BTreeMap<Priority, u32>,
    /// Rows that one may be behind another.
    lag: u64,
}

impl Fair {
    /// Nobody has asked for anything. Nobody gets more than `lag` rows behind.
    pub(super) fn new(lag: usize) -> Self {
        Self { accounts: Shares::default(), users: BTreeMap::new(), passed: BTreeMap::new(), lag: lag as u64 }
    }

    /// A request came.
    pub(super) fn enter(&mut self, client: Client) {
        self.accounts.enter(client.account);
        self.users.entry(client.account).or_default().enter(client.user);
    }

    /// A request ended.
    pub(super) fn leave(&mut self, client: Client) {
        self.accounts.leave(client.account);
        if let Some(users) = self.users.get_mut(&client.account) {
            users.leave(client.user);
            if users.0.is_empty() {
                self.users.remove(&client.account);
            }
        }
    }

    /// Accounts with requests.
    pub(super) fn accounts(&self) -> usize {
        self.accounts.0.len()
    }

    /// Rows were run for somebody.
    pub(super) fn charge(&mut self, client: Client, rows: usize) {
        self.accounts.charge(client.account, rows as u64, self.lag);
        if let Some(users) = self.users.get_mut(&client.account) {
            users.charge(client.user, rows as u64, self.lag);
        }
    }

    /// Who is next, of candidates in order of age. Nothing changes until that is [told](Self::turn).
    pub(super) fn next(&self, candidates: &[Candidate]) -> Option<Candidate> {
        let priorities = || candidates.iter().map(|candidate| candidate.priority);
        let passed = |priority: &Priority| self.passed.get(priority).copied().unwrap_or(0);
        let impatient = priorities().filter(|priority| passed(priority) >= PASSED_MAX).max_by_key(passed);
        let priority = impatient.or_else(|| priorities().max())?;
        let equal = || candidates.iter().filter(|candidate| candidate.priority == priority);
        let account = self.accounts.next(equal().map(|candidate| candidate.client.account))?;
        let users = || equal().filter(|candidate| candidate.client.account == account);
        let user = self.users.get(&account)?.next(users().map(|candidate| candidate.client.user))?;
        users().find(|candidate| candidate.client.user == user).copied()
    }

    /// It was the turn of this one of the candidates.
    pub(super) fn turn(&mut self, candidates: &[Candidate], chosen: Candidate) {
        let mut waiting: Vec<Priority> = candidates.iter().map(|candidate| candidate.priority).collect();
        waiting.sort_unstable();
        waiting.dedup();
        for priority in waiting.into_iter().filter(|priority| *priority < chosen.priority) {
            *self.passed.entry(priority).or_default() += 1;
        }
        self.passed.remove(&chosen.priority);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn candidate(key: u64, account: u64, user: u64, priority: Priority) -> Candidate {
        Candidate { key, client: Client { account, user }, priority }
    }

    /// Everybody always wants more; gives who had how many turns of one row.
    fn turns(fair: &mut Fair, candidates: &[Candidate], count: usize) -> BTreeMap<u64, usize> {
        let mut had = BTreeMap::new();
        for _ in 0..count {
            let next = fair.next(candidates).unwrap();
            fair.turn(candidates, next);
            fair.charge(next.client, 1);
            *had.entry(next.key).or_default() += 1;
        }
        had
    }

    fn entered(candidates: &[Candidate]) -> Fair {
        let mut fair = Fair::new(100);
        candidates.iter().for_each(|candidate| fair.enter(candidate.client));
        fair
    }

    #[test]
    fn accounts_share_evenly_and_so_do_the_users_of_each() {
        use Priority::Normal;
        // The first account has two users, of whom one has two requests.
        let candidates = [
            candidate(0, 1, 0, Normal),
            candidate(1, 1, 0, Normal),
            candidate(2, 1, 7, Normal),
            candidate(3, 2, 0, Normal),
            candidate(4, 3, 0, Normal),
        ];
        let had = turns(&mut entered(&candidates), &candidates, 120);
        assert_eq!(had, BTreeMap::from([(0, 20), (2, 20), (3, 40), (4, 40)]), "and the second request of one user waits for its first");
    }

    #[test]
    fn who_comes_later_is_not_owed_what_others_had() {
        use Priority::Normal;
        let all = [candidate(0, 1, 0, Normal), candidate(1, 2, 0, Normal)];
        let mut fair = entered(&all[..1]);
        turns(&mut fair, &all[..1], 1000);
        fair.enter(all[1].client);
        assert_eq!(turns(&mut fair, &all, 10), BTreeMap::from([(0, 5), (1, 5)]));
        // Who asks for nothing for a while, with a request that runs, gets no farther behind than is allowed.
        turns(&mut fair, &all[..1], 1000);
        assert_eq!(turns(&mut fair, &all, 200), BTreeMap::from([(0, 50), (1, 150)]));
        fair.leave(all[1].client);
        fair.leave(all[0].client);
        assert_eq!((fair.accounts(), fair.users.len()), (0, 0));
    }

    #[test]
    fn the_urgent_go_first_and_the_others_have_their_turns() {
        use Priority::{High, Low, Normal};
        let all = [candidate(0, 1, 0, Low), candidate(1, 2, 0, Normal), candidate(2, 3, 0, High)];
        let had = turns(&mut entered(&all), &all, 900);
        assert!(had[&2] >= 650 && had[&1] >= 100 && had[&0] >= 100, "{had:?}");
        let mut fair = entered(&all);
        assert_eq!(turns(&mut fair, &all, PASSED_MAX as usize), BTreeMap::from([(2, PASSED_MAX as usize)]));
    }

    proptest! {
        /// Nobody who waits is passed over for ever, whatever others do.
        #[test]
        fn nobody_starves(
            others in prop::collection::vec((0..3u64, 0..3u64, 0..3usize, 1..40usize), 1..30),
            priority in 0..3usize,
        ) {
            let class = |index: usize| [Priority::Low, Priority::Normal, Priority::High][index];
            let me = candidate(99, 9, 9, class(priority));
            let mut fair = Fair::new(64);
            fair.enter(me.client);
            let mut waited = 0;
            for round in 0..200 {
                // The others' requests come and go, and each is new.
                let now: Vec<Candidate> = others.iter().enumerate()
                    .filter(|(index, (.., every))| round % every == 0 || index % 3 == 0)
                    .map(|(index, (account, user, class_of, _))| candidate(100 + index as u64, *account, *user, class(*class_of)))
                    .collect();
                now.iter().for_each(|other| fair.enter(other.client));
                let candidates = [&[me][..], &now].concat();
                let next = fair.next(&candidates).unwrap();
                fair.turn(&candidates, next);
                fair.charge(next.client, 16);
                now.iter().for_each(|other| fair.leave(other.client));
                waited = if next.key == me.key { 0 } else { waited + 1 };
                // Its priority has a turn in eight, in which it is one of four accounts, which may be as far ahead as is allowed.
                prop_assert!(waited <= 8 * 2 * (4 + 3 * 64 / 16), "{waited}");
            }
        }
    }
}
