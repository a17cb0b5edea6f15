//! How much to offer, from readings of the machine's memory: a pure machine.
//!
//! With *r* bytes of what is lent in memory already and *a* bytes available, *r* + *a* less a reserve can be promised. Free
//! memory follows that down at once and up slowly. What is lent is a promise: it is only taken back when what is available
//! falls under half the reserve twice in a row, and then as much as is missing from the whole reserve.

use std::time::Duration;

use crate::env::Instant;
use crate::lease::Totals;

use super::Reading;

/// Pause between readings.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Most and least that is left to the machine's other programs.
const RESERVE: std::ops::RangeInclusive<u64> = (64 << 20)..=(768 << 20);
/// Which part of all memory the reserve is, within those bounds.
const RESERVE_PART: u64 = 32;
/// Offers are not changed by less than this part of what the user allowed.
const STEP_PART: u64 = 64;
/// How long there has to be more before more is offered.
const CALM: Duration = Duration::from_secs(10);
/// How long what was taken back may take to come free before more is taken back.
const SETTLE: Duration = Duration::from_secs(3);
/// Readings in a row that make a shortage.
const SHORT_AFTER: u32 = 2;

/// The machine.
#[derive(Debug)]
pub(crate) struct Pressure {
    /// What the user allowed, in bytes.
    allowed: u64,
    offer: u64,
    /// Readings in a row with less than half the reserve.
    short: u32,
    /// Until when what was taken back is waited for.
    settling: Option<Instant>,
    /// Since when more could be offered, and the least that could be since.
    calm: Option<(Instant, u64)>,
}

/// What is left to the machine's other programs, in bytes.
fn reserve(total: u64) -> u64 {
    (total / RESERVE_PART).clamp(*RESERVE.start(), *RESERVE.end())
}

impl Pressure {
    /// Begins with an offer of all that the user allowed.
    pub(crate) fn new(allowed: u64) -> Self {
        Self { allowed, offer: allowed, short: 0, settling: None, calm: None }
    }

    /// Takes a reading, with what is lent; gives the new offer if it has changed.
    pub(crate) fn step(&mut self, now: Instant, reading: Reading, lent: Totals) -> Option<u64> {
        let reserve = reserve(reading.total_bytes);
        let held = reading.resident_bytes.unwrap_or(lent.used).min(lent.used);
        let could = held.saturating_add(reading.available_bytes).saturating_sub(reserve).min(self.allowed);
        let short = reading.available_bytes < reserve / 2;
        self.short = if short { self.short.saturating_add(1) } else { 0 };
        if self.settling.is_some_and(|until| now >= until) {
            self.settling = None;
        }
        // What is being taken back is lent no more.
        let lent = lent.used.saturating_sub(lent.fenced);
        let wanted = if self.short >= SHORT_AFTER && lent > 0 {
            if self.settling.is_some() {
                return None;
            }
            self.settling = Some(now + SETTLE);
            could.min(lent.saturating_sub(reserve - reading.available_bytes))
        } else {
            could.max(lent.min(self.offer))
        };
        let step = self.allowed / STEP_PART;
        if wanted >= self.offer {
            // All of it counts as more, however little is missing.
            let more = wanted > self.offer && (wanted == self.allowed || wanted - self.offer > step);
            let Some((since, least)) = self.calm.filter(|_| more) else {
                self.calm = more.then_some((now, wanted));
                return None;
            };
            let least = least.min(wanted);
            if now.since(since) < CALM {
                self.calm = Some((since, least));
                return None;
            }
            return self.change(least);
        }
        self.calm = None;
        let much = self.offer - wanted > step || wanted < lent;
        if much { self.change(wanted) } else { None }
    }

    fn change(&mut self, offer: u64) -> Option<u64> {
        self.calm = None;
        (self.offer != offer).then(|| {
            self.offer = offer;
            offer
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;
    const TOTAL: u64 = 16 << 30;

    fn at(half_seconds: u64) -> Instant {
        Instant::ZERO + LOOK_EVERY * u32::try_from(half_seconds).unwrap()
    }

    fn reading(available: u64, resident: u64) -> Reading {
        Reading { total_bytes: TOTAL, available_bytes: available, resident_bytes: Some(resident) }
    }

    fn lent(used: u64) -> Totals {
        Totals { offered: 0, used, fenced: 0, leases: u32::from(used > 0) }
    }

    #[test]
    fn what_others_take_is_not_offered() {
        let mut machine = Pressure::new(8 << 30);
        assert_eq!(machine.step(at(0), reading(12 << 30, 0), lent(0)), None);
        // 5 GiB are left, less a reserve of 512 MiB.
        assert_eq!(machine.step(at(1), reading(5 << 30, 0), lent(0)), Some((5 << 30) - 512 * MIB));
        assert_eq!(machine.step(at(2), reading((5 << 30) - MIB, 0), lent(0)), None, "that is no change");
        // What it holds itself is not taken by others.
        assert_eq!(machine.step(at(3), reading(3 << 30, 2 << 30), lent(2 << 30)), None);
    }

    #[test]
    fn more_is_offered_when_it_has_been_there_for_a_while() {
        let mut machine = Pressure::new(8 << 30);
        machine.step(at(0), reading(5 << 30, 0), lent(0));
        for half_seconds in 1..=20 {
            let available = if half_seconds == 7 { 7 << 30 } else { 15 << 30 };
            assert_eq!(machine.step(at(half_seconds), reading(available, 0), lent(0)), None, "{half_seconds}");
        }
        assert_eq!(machine.step(at(21), reading(15 << 30, 0), lent(0)), Some((7 << 30) - 512 * MIB), "the least of that time");
        assert_eq!(machine.step(at(22), reading(15 << 30, 0), lent(0)), None);
        assert_eq!(machine.step(at(42), reading(15 << 30, 0), lent(0)), Some(8 << 30), "and all of it in the end");
    }

    #[test]
    fn what_is_lent_is_taken_back_only_when_the_machine_runs_out() {
        let mut machine = Pressure::new(8 << 30);
        let used = lent(6 << 30);
        // Little is left, and no more is promised than is lent.
        assert_eq!(machine.step(at(0), reading(600 * MIB, 6 << 30), used), Some((6 << 30) + 88 * MIB));
        assert_eq!(machine.step(at(1), reading(300 * MIB, 6 << 30), used), None, "88 MiB are next to nothing");
        assert_eq!(machine.step(at(2), reading(200 * MIB, 6 << 30), used), None, "once is no shortage");
        assert_eq!(machine.step(at(3), reading(300 * MIB, 6 << 30), used), None);
        assert_eq!(machine.step(at(4), reading(200 * MIB, 6 << 30), used), None);
        assert_eq!(machine.step(at(5), reading(100 * MIB, 6 << 30), used), Some((6 << 30) - 412 * MIB), "a shortage");
        assert_eq!(machine.step(at(6), reading(50 * MIB, 6 << 30), used), None, "that takes a while to come free");
        assert_eq!(machine.step(at(12), reading(50 * MIB, 6 << 30), used), Some((6 << 30) - 462 * MIB), "it was not enough");
    }

    #[test]
    fn where_nothing_is_lent_there_is_nothing_to_take_back() {
        let mut machine = Pressure::new(8 << 30);
        assert_eq!(machine.step(at(0), reading(10 * MIB, 0), lent(0)), Some(0));
        assert_eq!(machine.step(at(1), reading(10 * MIB, 0), lent(0)), None);
    }

    proptest! {
        /// A machine whose other programs take and give back memory as they please, and an owner who ends leases of 64 MiB, all of it
        /// in memory, until they fit.
        #[test]
        fn the_machine_never_runs_out_and_all_is_offered_again(others in prop::collection::vec(-600i64..600, 1..400), allowed in (1u64 << 30)..(14 << 30)) {
            const LEASE: u64 = 64 * MIB;
            let mut machine = Pressure::new(allowed);
            let (mut elsewhere, mut used, mut low) = (1u64 << 30, 0u64, 0u64);
            for (look, change) in (0..).zip(&others) {
                // Others do not take what is not there; they may take all that is.
                let available = TOTAL - elsewhere - used;
                let take = change.unsigned_abs() * MIB;
                elsewhere = if *change < 0 { elsewhere.saturating_sub(take) } else { elsewhere + take.min(available) };
                // Somebody borrows whatever is on offer.
                let free = machine.offer.saturating_sub(used);
                used += (free / 2 / LEASE * LEASE).min((TOTAL - elsewhere - used) / LEASE * LEASE);
                let available = TOTAL - elsewhere - used;
                let before = used;
                if let Some(offer) = machine.step(at(look), reading(available, used), lent(used)) {
                    prop_assert!(offer <= allowed);
                    while used > offer { used -= LEASE.min(used); }
                }
                low = if available < 256 * MIB { low + 1 } else { 0 };
                prop_assert!(used == before || low >= u64::from(SHORT_AFTER), "taken back without need: {available}");
                prop_assert_eq!(machine.offer < used, false);
            }
            // The others go.
            let looks = others.len() as u64;
            for look in looks..looks + 100 {
                if let Some(offer) = machine.step(at(look), reading(TOTAL - used, used), lent(used)) {
                    while used > offer { used -= LEASE.min(used); }
                }
            }
            prop_assert_eq!(machine.offer, allowed);
        }

        /// As long as others want more, leases end until they have it.
        #[test]
        fn whoever_needs_memory_gets_it(used in (1u64 << 30)..(12 << 30)) {
            let mut machine = Pressure::new(12 << 30);
            let mut used = used;
            // They would take everything: whatever comes free is gone at once, but for some 100 MiB.
            for look in 0..2000 {
                if let Some(offer) = machine.step(at(look), reading(100 * MIB, used), lent(used)) {
                    used = used.min(offer);
                }
            }
            prop_assert_eq!(used, 0);
        }
    }
}
