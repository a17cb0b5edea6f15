//! Chance from a seed: one ChaCha stream for each node and purpose.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};
use shoal_actors::env::Rng;

use crate::world::nanos;

/// One stream.
#[derive(Clone)]
pub struct Chance(ChaCha8Rng);

impl Chance {
    /// The stream of `purpose` and `number` in the world of `seed`. A new purpose does not disturb the others.
    pub fn new(seed: u64, purpose: &str, number: u64) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("shoal simulation chance v1");
        hasher.update(&seed.to_le_bytes()).update(&number.to_le_bytes()).update(purpose.as_bytes());
        Self(ChaCha8Rng::from_seed(*hasher.finalize().as_bytes()))
    }

    /// The next bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        self.0.fill_bytes(bytes);
    }

    /// A number below `bound`; zero if `bound` is zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.0.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A number from `from` up to and including `to`; `from` if they are in the wrong order.
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        from.saturating_add(self.below(to.saturating_sub(from).saturating_add(1)))
    }

    /// A duration in that range.
    pub fn duration(&mut self, from: Duration, to: Duration) -> Duration {
        Duration::from_nanos(self.between(nanos(from), nanos(to)))
    }

    /// True in `percent` of all cases.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of `items`, or nothing if there is none.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        items.get(usize::try_from(self.below(items.len() as u64)).unwrap_or(0))
    }

    /// Puts `items` into a random order (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, usize::try_from(self.below(last as u64 + 1)).unwrap_or(0));
        }
    }
}

impl fmt::Debug for Chance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Chance(…)")
    }
}

/// A node's chance. It goes on over restarts, as a machine's would.
#[derive(Debug)]
pub struct SimRng {
    seed: u64,
    node: u16,
    streams: Mutex<BTreeMap<&'static str, Chance>>,
}

impl SimRng {
    /// The chance of a node in the world of `seed`.
    pub fn new(seed: u64, node: u16) -> Self {
        Self { seed, node, streams: Mutex::default() }
    }
}

impl Rng for SimRng {
    fn fill(&self, purpose: &'static str, bytes: &mut [u8]) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = || Chance::new(self.seed, purpose, 1 << 32 | u64::from(self.node));
        streams.entry(purpose).or_insert_with(fresh).fill(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_apart_and_repeat() {
        let draw = |seed, node, purpose| {
            let rng = SimRng::new(seed, node);
            (rng.next_u64(purpose), rng.next_u64("other"), rng.next_u64(purpose))
        };
        let (first, _, second) = draw(1, 0, "a");
        assert_eq!(draw(1, 0, "a").0, first);
        assert_ne!(first, second);
        let (rng, other) = (SimRng::new(1, 0), SimRng::new(1, 0));
        let _ = other.next_u64("b");
        assert_eq!(rng.next_u64("a"), other.next_u64("a"), "one purpose does not disturb another");
        for different in [draw(2, 0, "a").0, draw(1, 1, "a").0, draw(1, 0, "b").0] {
            assert_ne!(different, first);
        }
    }

    #[test]
    fn bounds_hold() {
        let mut chance = Chance::new(7, "test", 0);
        assert_eq!(chance.below(0), 0);
        for _ in 0..1000 {
            assert!((3..=9).contains(&chance.between(3, 9)));
        }
        assert!(chance.pick::<u8>(&[]).is_none());
    }
}
