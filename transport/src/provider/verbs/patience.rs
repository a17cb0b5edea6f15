//! How long a wait looks again before it sleeps.

/// Most and fewest looks.
const SPINS_MAX: u32 = 4_000;
const SPINS_MIN: u32 = 50;

/// Spinning that was for nothing halves it, spinning that paid doubles it: with a core for each end it stays long, and on a busy
/// machine, where it takes from the other end the time to answer, it becomes short.
pub(super) struct Patience {
    spins: u32,
}

impl Patience {
    pub(super) const fn new() -> Self {
        Self { spins: SPINS_MAX }
    }

    /// Spins once more, or says `false` when it is time to sleep. `spun` counts a wait's spins.
    pub(super) fn spin(&mut self, spun: &mut u32) -> bool {
        if *spun < self.spins {
            *spun += 1;
            std::hint::spin_loop();
            return true;
        }
        if *spun == self.spins {
            // The first time that this wait comes here.
            *spun = u32::MAX;
            self.spins = (self.spins / 2).max(SPINS_MIN);
        }
        false
    }

    /// Learns from a wait that is over.
    pub(super) fn over(&mut self, spun: u32) {
        if spun > 0 && spun < u32::MAX {
            self.spins = (self.spins * 2).min(SPINS_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(patience: &mut Patience, looks: u32) -> bool {
        let mut spun = 0;
        let slept = (0..looks).any(|_| !patience.spin(&mut spun));
        patience.over(spun);
        slept
    }

    #[test]
    fn it_is_lost_by_waiting_for_nothing_and_won_back_by_success() {
        let mut patience = Patience::new();
        assert!(!wait(&mut patience, 3_000));
        for _ in 0..20 {
            assert!(wait(&mut patience, 10_000));
        }
        assert!(wait(&mut patience, 60), "it sleeps soon by now");
        for _ in 0..20 {
            assert!(!wait(&mut patience, 40));
        }
        assert!(!wait(&mut patience, 3_000));
    }
}
