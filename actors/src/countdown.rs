//! Something to do when the last of several things has happened.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// Calls what it was made with when its last clone is dropped.
#[derive(Clone)]
pub(crate) struct Countdown {
    _last: Arc<Last>,
}

struct Last(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Drop for Last {
    fn drop(&mut self) {
        if let Some(done) = self.0.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            done();
        }
    }
}

impl Countdown {
    /// Waits for all clones of the result.
    pub(crate) fn new(done: Box<dyn FnOnce() + Send>) -> Self {
        Self { _last: Arc::new(Last(Mutex::new(Some(done)))) }
    }
}

impl fmt::Debug for Countdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Countdown")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn the_last_one_calls_once() {
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let first = Countdown::new(Box::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        }));
        let second = first.clone();
        drop(first);
        assert_eq!(calls.load(Ordering::Relaxed), 0);
        drop(second);
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    }
}
