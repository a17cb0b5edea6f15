//! A lock that is waited for with a deadline.
//!
//! It guards the sending half of a connection, which a thread may hold for as long as its own deadline allows; the next
//! one must not wait past its own. Coming and going cost an atomic operation each, if nobody waits: on shared memory a message takes
//! hardly longer than a handful of them.

use parking_lot::{Mutex, MutexGuard};

use super::nap;
use crate::env::{Clock, Instant};

/// Holds a value that one thread uses at a time.
pub(crate) struct Gate<T>(Mutex<T>);

/// The value, on loan. Dropping it gives it back.
pub(crate) type Pass<'a, T> = MutexGuard<'a, T>;

impl<T> Gate<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// The value, if nobody has it.
    #[inline]
    pub(crate) fn try_enter(&self) -> Option<Pass<'_, T>> {
        self.0.try_lock()
    }

    /// The value, once nobody has it; none if that takes until `deadline`.
    #[inline]
    pub(crate) fn enter(&self, clock: &dyn Clock, deadline: Instant) -> Option<Pass<'_, T>> {
        self.try_enter().or_else(|| self.wait(clock, deadline))
    }

    #[cold]
    fn wait(&self, clock: &dyn Clock, deadline: Instant) -> Option<Pass<'_, T>> {
        loop {
            let wait = nap(clock.now(), deadline)?;
            if let Some(pass) = self.0.try_lock_for(wait) {
                return Some(pass);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing::effects;

    #[test]
    fn one_at_a_time_and_no_longer_than_the_deadline() {
        let effects = effects();
        let clock = &*effects.clock;
        let gate = Gate::new(1);
        let mut pass = gate.try_enter().unwrap();
        assert!(gate.try_enter().is_none());
        assert!(gate.enter(clock, clock.now() + Duration::from_millis(5)).is_none());
        *pass = 2;
        drop(pass);
        assert_eq!(*gate.enter(clock, clock.now()).unwrap(), 2);
    }

    #[test]
    fn a_waiting_thread_is_let_in_when_the_value_comes_back() {
        let effects = effects();
        let gate = Gate::new(());
        let pass = gate.try_enter().unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| gate.enter(&*effects.clock, effects.after(Duration::from_secs(30))).is_some());
            drop(pass);
            assert!(waiting.join().unwrap());
        });
    }
}
