//! Closes windows of adapters when their lease runs out.
//!
//! A table has a thread for that while it has such windows, and else none. It need not be exact for what the owner sees: whoever asks the
//! table for a lease whose deadline has passed closes its windows first.

use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

use super::{AccessTable, Inner, State};
use crate::env::Clock;
use crate::link::{lock, nap};

/// Wakes the thread.
#[derive(Default)]
pub(super) struct Watch {
    rung: Mutex<bool>,
    bell: Condvar,
}

impl Watch {
    /// There is something to look at: a deadline was moved, or the table is gone.
    pub(super) fn ring(&self) {
        *lock(&self.rung) = true;
        self.bell.notify_all();
    }

    fn sleep(&self, wait: Duration) {
        let mut rung = lock(&self.rung);
        if !*rung {
            rung = self.bell.wait_timeout(rung, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
        *rung = false;
    }
}

#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "other systems have no windows"))]
impl AccessTable {
    /// Sees to it that the thread is there and knows of all windows.
    pub(super) fn watch(&self, state: &mut State) -> std::io::Result<()> {
        let Self(inner) = self;
        if state.watched {
            inner.watch.ring();
            return Ok(());
        }
        let (table, watch, clock) = (Arc::downgrade(inner), Arc::clone(&inner.watch), Arc::clone(&inner.effects.clock));
        let body = move || keep_watch(&table, &watch, &*clock);
        // It ends by itself when there is nothing to watch.
        drop(inner.effects.spawner.thread("lease windows".to_owned(), Box::new(body))?);
        state.watched = true;
        Ok(())
    }
}

fn keep_watch(table: &Weak<Inner>, watch: &Watch, clock: &dyn Clock) {
    loop {
        let wait = {
            let Some(inner) = table.upgrade() else { return };
            let mut state = lock(&inner.state);
            let now = clock.now();
            let Some(next) = state.end_due(now) else {
                state.watched = false;
                return;
            };
            nap(now, next).unwrap_or_default()
        };
        watch.sleep(wait);
    }
}
