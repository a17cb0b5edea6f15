//! A node's clock: it began at another moment than the others, and runs a little fast or slow.

use std::time::Duration;

use shoal_actors::env::{BoxFuture, Clock, Instant};

use crate::world::World;

/// Seconds since 1970 at the beginning of every world.
const CALENDAR: Duration = Duration::from_secs(1_800_000_000);

/// Virtual time as one node measures it.
#[derive(Debug, Clone)]
pub struct SimClock {
    world: World,
    node: u16,
    /// What it showed when the world began, in nanoseconds.
    offset: u64,
    /// How much faster than the world it runs, in millionths.
    drift: i32,
}

impl SimClock {
    /// The most that a clock may be fast or slow, in millionths. Quartz is within 100.
    pub const DRIFT_MAX: i32 = 100_000;

    /// A clock that showed `offset` nanoseconds at the beginning and is `drift` millionths fast (slow if negative),
    /// at most [`SimClock::DRIFT_MAX`] either way.
    pub fn new(world: World, node: u16, offset: u64, drift: i32) -> Self {
        Self { world, node, offset, drift: drift.clamp(-Self::DRIFT_MAX, Self::DRIFT_MAX) }
    }

    fn rate(&self) -> u128 {
        u128::from((1_000_000 + self.drift).unsigned_abs())
    }

    fn local(&self, real: u64) -> u64 {
        let passed = u128::from(real) * self.rate() / 1_000_000;
        self.offset.saturating_add(u64::try_from(passed).unwrap_or(u64::MAX))
    }

    /// The first moment of the world at which the clock shows `local` or more.
    pub(crate) fn real(&self, local: u64) -> u64 {
        let passed = u128::from(local.saturating_sub(self.offset)) * 1_000_000;
        u64::try_from(passed.div_ceil(self.rate())).unwrap_or(u64::MAX)
    }
}

impl Clock for SimClock {
    fn now(&self) -> Instant {
        Instant::from_nanos(self.local(self.world.now()))
    }

    fn unix_time(&self) -> Duration {
        CALENDAR + Duration::from_nanos(self.world.now())
    }

    fn sleep_until(&self, deadline: Instant) -> BoxFuture<'static, ()> {
        Box::pin(self.world.sleep_until(self.node, self.real(deadline.as_nanos())))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn who_sleeps_until_a_moment_wakes_no_earlier(offset in 0..1_u64 << 50, drift in -100_000..100_000_i32, local in 0..1_u64 << 55) {
            let clock = SimClock::new(World::new(0), 0, offset, drift);
            let real = clock.real(local);
            prop_assert!(clock.local(real) >= local);
            prop_assert!(real == 0 || clock.local(real - 1) < local);
        }
    }
}
