//! A switch with which a caller calls off what it asked for.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Calls work off. Clones are the same switch; once on, it stays on.
#[derive(Clone, Default)]
pub struct Cancel {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    state: Mutex<State>,
    turned_on: Condvar,
}

#[derive(Default)]
struct State {
    on: bool,
    next: u64,
    waiting: BTreeMap<u64, Box<dyn FnOnce() + Send>>,
}

/// Keeps a call-back of [`Cancel::on_cancel`] registered until it is dropped.
#[must_use]
pub struct CancelGuard {
    inner: Arc<Inner>,
    key: u64,
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Cancel {
    /// A switch that is off.
    pub fn new() -> Self {
        Self::default()
    }

    /// Turns it on, runs the call-backs and wakes who sleeps.
    pub fn cancel(&self) {
        let waiting = {
            let mut state = self.inner.state();
            state.on = true;
            std::mem::take(&mut state.waiting)
        };
        self.inner.turned_on.notify_all();
        for (_, call) in waiting {
            call();
        }
    }

    /// Whether it is on.
    pub fn is_cancelled(&self) -> bool {
        self.inner.state().on
    }

    /// Runs `call` when it is turned on, at once if it is on. `call` must not block.
    pub fn on_cancel(&self, call: impl FnOnce() + Send + 'static) -> CancelGuard {
        let mut state = self.inner.state();
        let key = state.next;
        state.next += 1;
        if state.on {
            drop(state);
            call();
        } else {
            state.waiting.insert(key, Box::new(call));
        }
        CancelGuard { inner: Arc::clone(&self.inner), key }
    }

    /// Blocks the thread for that long, or until it is turned on; says whether it is on.
    pub fn sleep(&self, delay: Duration) -> bool {
        let state = self.inner.state();
        let (state, _) = self.inner.turned_on.wait_timeout_while(state, delay, |state| !state.on).unwrap_or_else(PoisonError::into_inner);
        state.on
    }
}

impl Drop for CancelGuard {
    fn drop(&mut self) {
        let call = self.inner.state().waiting.remove(&self.key);
        drop(call);
    }
}

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cancel({})", if self.is_cancelled() { "on" } else { "off" })
    }
}

impl fmt::Debug for CancelGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CancelGuard")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn call_backs_run_once_and_only_while_guarded() {
        let count = Arc::new(AtomicU32::new(0));
        let bump = |count: &Arc<AtomicU32>| {
            let count = Arc::clone(count);
            move || {
                count.fetch_add(1, Ordering::SeqCst);
            }
        };
        let cancel = Cancel::new();
        let _kept = cancel.on_cancel(bump(&count));
        drop(cancel.on_cancel(bump(&count)));
        assert!(!cancel.sleep(Duration::ZERO));
        cancel.clone().cancel();
        cancel.cancel();
        assert_eq!(count.load(Ordering::SeqCst), 1);
        let _late = cancel.on_cancel(bump(&count));
        assert_eq!(count.load(Ordering::SeqCst), 2);
        assert!(cancel.sleep(Duration::from_secs(3600)));
    }
}
