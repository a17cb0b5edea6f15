//! The tickets of a hop: one secret, agreed once, gives both ends a ticket for each link that they may ever make.
//!
//! Tickets are numbered from 1. Each makes one link, as every ticket does; one says nothing of the others. The
//! accepting end expects a window of numbers, the dialling end tries those of its own window. A dial whose end is not
//! known (the answer was lost) may have used its number up or not, so the two windows can drift apart; they never lose each
//! other, because the accepting end's reaches as far beyond the highest used number as the dialling end ever goes.

use std::collections::BTreeSet;

use crate::provider::Ticket;

/// How many numbers beyond the last known link are tried.
pub const WINDOW: u64 = 8;

const CONTEXT: &str = "shoal 2026 path v1: tickets of a hop";

/// The ticket of the hop's link with this number.
pub fn ticket(secret: &Ticket, number: u64) -> Ticket {
    let mut key = secret.key(CONTEXT);
    let mut drawn = [0; 48];
    let mut hasher = blake3::Hasher::new_keyed(&key);
    hasher.update(&secret.id().to_le_bytes());
    hasher.update(&number.to_le_bytes());
    hasher.finalize_xof().fill(&mut drawn);
    zeroize::Zeroize::zeroize(&mut key);
    let (mut id, mut own) = ([0; 16], [0; 32]);
    id.copy_from_slice(&drawn[..16]);
    own.copy_from_slice(&drawn[16..]);
    zeroize::Zeroize::zeroize(&mut drawn);
    let ticket = Ticket::new(u128::from_le_bytes(id), own);
    zeroize::Zeroize::zeroize(&mut own);
    ticket
}

/// The dialling end's numbers.
#[derive(Debug, Clone)]
pub struct Numbers {
    /// The number after the last link that was made.
    base: u64,
    next: u64,
    in_use: BTreeSet<u64>,
    refused: BTreeSet<u64>,
    /// Refusals since the peer was last met in any other way.
    refusals: u64,
}

impl Default for Numbers {
    fn default() -> Self {
        Self { base: 1, next: 1, in_use: BTreeSet::new(), refused: BTreeSet::new(), refusals: 0 }
    }
}

impl Numbers {
    /// A number to dial with; none while all of them are being tried.
    pub fn draw(&mut self) -> Option<u64> {
        for _ in 0..WINDOW {
            let number = if (self.base..self.base + WINDOW).contains(&self.next) { self.next } else { self.base };
            self.next = number + 1;
            if !self.in_use.contains(&number) && !self.refused.contains(&number) {
                self.in_use.insert(number);
                return Some(number);
            }
        }
        None
    }

    /// A link was made with it.
    pub fn made(&mut self, number: u64) {
        self.in_use.remove(&number);
        self.refusals = 0;
        if number >= self.base {
            self.base = number + 1;
            self.refused = self.refused.split_off(&self.base);
        }
    }

    /// The peer refused it: it does not expect the number any more.
    pub fn refused(&mut self, number: u64) {
        self.in_use.remove(&number);
        if number < self.base {
            return;
        }
        self.refusals += 1;
        self.refused.insert(number);
        if self.refused.len() as u64 == WINDOW {
            // All were used up by links of which this end never heard.
            self.base += WINDOW;
            self.refused.clear();
        }
    }

    /// Nobody was there to use it.
    pub fn unused(&mut self, number: u64) {
        self.in_use.remove(&number);
    }

    /// It led to nothing; whether it is used up is not known.
    pub fn failed(&mut self, number: u64) {
        self.in_use.remove(&number);
        self.refusals = 0;
    }

    /// Whether the peer has refused so many in a row that it cannot be a matter of numbers.
    pub fn is_unwanted(&self) -> bool {
        self.refusals > 2 * WINDOW
    }
}

/// The accepting end's numbers.
#[derive(Debug, Clone, Default)]
pub struct Window {
    highest: u64,
    used: BTreeSet<u64>,
}

impl Window {
    /// What is to be expected now.
    pub fn expected(&self) -> Vec<u64> {
        (self.lowest()..=self.highest + WINDOW).filter(|number| !self.used.contains(number)).collect()
    }

    fn lowest(&self) -> u64 {
        (self.highest + 1).saturating_sub(WINDOW).max(1)
    }

    /// A link came with it.
    pub fn used(&mut self, number: u64) {
        self.used.insert(number);
        self.highest = self.highest.max(number);
        self.used = self.used.split_off(&self.lowest());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_number_has_a_ticket_of_its_own() {
        let secret = Ticket::new(7, [1; 32]);
        let ids: BTreeSet<u128> = (1..100).map(|number| ticket(&secret, number).id()).collect();
        assert_eq!(ids.len(), 99);
        assert!(!ids.contains(&7));
        assert_eq!(ticket(&secret, 5).id(), ticket(&secret, 5).id());
        assert_eq!(ticket(&secret, 5).key("x"), ticket(&secret, 5).key("x"));
        assert_ne!(ticket(&secret, 5).key("x"), ticket(&secret, 6).key("x"));
        for other in [Ticket::new(8, [1; 32]), Ticket::new(7, [2; 32])] {
            assert_ne!(ticket(&secret, 5).id(), ticket(&other, 5).id());
            assert_ne!(ticket(&secret, 5).key("x"), ticket(&other, 5).key("x"));
        }
    }

    #[test]
    fn a_window_is_not_left_behind() {
        let mut window = Window::default();
        assert_eq!(window.expected(), (1..=8).collect::<Vec<_>>());
        window.used(3);
        assert_eq!(window.expected(), [1, 2, 4, 5, 6, 7, 8, 9, 10, 11]);
        window.used(11);
        assert_eq!(window.expected(), (4..=10).chain(12..=19).collect::<Vec<_>>());
    }

    proptest! {
        /// Whatever becomes of dials, the ends find each other again within a few tries.
        #[test]
        fn the_ends_never_lose_each_other(outcomes in prop::collection::vec(0u8..4, 0..300)) {
            let (mut numbers, mut window) = (Numbers::default(), Window::default());
            let dial = |numbers: &mut Numbers, window: &mut Window, outcome: u8| -> bool {
                let number = numbers.draw().expect("one at a time");
                let expected = window.expected().contains(&number);
                match outcome {
                    _ if outcome == 0 => numbers.failed(number),
                    _ if !expected => numbers.refused(number),
                    1 => {
                        // Made at the accepting end only.
                        window.used(number);
                        numbers.failed(number);
                    }
                    _ => {
                        window.used(number);
                        numbers.made(number);
                        return true;
                    }
                }
                false
            };
            for outcome in outcomes {
                dial(&mut numbers, &mut window, outcome);
            }
            let found = (0..=WINDOW).any(|_| dial(&mut numbers, &mut window, 3));
            prop_assert!(found, "{numbers:?} {window:?}");
            prop_assert!(window.expected().len() as u64 <= 2 * WINDOW);
            prop_assert!(!numbers.is_unwanted());
        }
    }

    #[test]
    fn a_peer_that_refuses_everything_is_given_up() {
        let mut numbers = Numbers::default();
        let mut tries = 0;
        while !numbers.is_unwanted() {
            let number = numbers.draw().unwrap();
            numbers.refused(number);
            tries += 1;
        }
        assert_eq!(tries, 2 * WINDOW + 1);
        let all: Vec<u64> = std::iter::from_fn(|| numbers.draw()).collect();
        assert!(all.len() as u64 <= WINDOW, "no more are tried at once than there are in a window");
    }
}
