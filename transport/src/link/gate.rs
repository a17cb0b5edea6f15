//! A lock that is waited for with a deadline.
//!
//! It guards the sending half of a connection, which a thread may hold for as long as its own deadline allows; the next
//! one must not wait past its own.

use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Condvar, Mutex, MutexGuard, TryLockError};

use super::{lock, nap};
use crate::env::{Clock, Instant};

/// Holds a value that one thread uses at a time.
pub(crate) struct Gate<T> {
    value: Mutex<T>,
    /// Threads that wait. Only if there are any does who leaves call the system.
    waiting: AtomicUsize,
    waiters: Mutex<()>,
    left: Condvar,
}

/// The value, on loan. Dropping it gives it back.
pub(crate) struct Pass<'a, T> {
    gate: &'a Gate<T>,
    value: Option<MutexGuard<'a, T>>,
}

impl<T> Gate<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Mutex::new(value), waiting: AtomicUsize::new(0), waiters: Mutex::new(()), left: Condvar::new() }
    }

    /// The value, if nobody has it.
    pub(crate) fn try_enter(&self) -> Option<Pass<'_, T>> {
        let value = match self.value.try_lock() {
            Ok(value) => value,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(Pass { gate: self, value: Some(value) })
    }

    /// The value, once nobody has it; none if that takes until `deadline`.
    pub(crate) fn enter(&self, clock: &dyn Clock, deadline: Instant) -> Option<Pass<'_, T>> {
        if let Some(pass) = self.try_enter() {
            return Some(pass);
        }
        let mut waiters = lock(&self.waiters);
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let pass = loop {
            // Either this sees that the value is free, or who has it sees that somebody waits.
            fence(Ordering::SeqCst);
            if let Some(pass) = self.try_enter() {
                break Some(pass);
            }
            let Some(wait) = nap(clock.now(), deadline) else { break None };
            waiters = match self.left.wait_timeout(waiters, wait) {
                Ok((waiters, _)) => waiters,
                Err(poisoned) => poisoned.into_inner().0,
            };
        };
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        pass
    }
}

impl<T> std::ops::Deref for Pass<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match &self.value {
            Some(value) => value,
            None => unreachable!("taken only by drop"),
        }
    }
}

impl<T> std::ops::DerefMut for Pass<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match &mut self.value {
            Some(value) => value,
            None => unreachable!("taken only by drop"),
        }
    }
}

impl<T> Drop for Pass<'_, T> {
    fn drop(&mut self) {
        self.value = None;
        fence(Ordering::SeqCst);
        if self.gate.waiting.load(Ordering::SeqCst) > 0 {
            // Whoever waits has this lock until it sleeps.
            drop(lock(&self.gate.waiters));
            self.gate.left.notify_one();
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
