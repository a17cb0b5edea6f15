//! Chance for pure machines: a stream that a seed decides.
//!
//! A machine draws no randomness of its own. It is given one seed when it is made, from [`crate::env::Rng`], and from
//! there on it is a function of its inputs. Not for secrets.

/// The splitmix64 generator (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
#[derive(Debug, Clone)]
pub(crate) struct Dice(u64);

impl Dice {
    /// A stream for `seed`.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`; zero if `bound` is zero.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64 }
    }

    /// `value` give or take up to a quarter.
    pub(crate) fn jitter(&mut self, value: std::time::Duration) -> std::time::Duration {
        let nanos = u64::try_from(value.as_nanos()).unwrap_or(u64::MAX / 2);
        std::time::Duration::from_nanos(nanos - nanos / 4 + self.below(nanos / 2 + 1))
    }

    /// Puts `items` into a random order (Fisher and Yates).
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.below(last as u64 + 1) as usize;
            items.swap(last, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_decides_and_bounds_hold() {
        let (mut a, mut b) = (Dice::new(7), Dice::new(7));
        for _ in 0..1000 {
            assert_eq!(a.next(), b.next());
        }
        for bound in 1..200 {
            assert!(a.below(bound) < bound);
        }
        assert_eq!(a.below(0), 0);
        let mut order: Vec<u32> = (0..50).collect();
        a.shuffle(&mut order);
        assert_ne!(order, (0..50).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..50).collect::<Vec<_>>());
        let second = std::time::Duration::from_secs(1);
        for _ in 0..200 {
            let jittered = a.jitter(second);
            assert!(jittered >= second * 3 / 4 && jittered <= second * 5 / 4);
        }
    }
}
