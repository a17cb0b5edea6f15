//! Counts the tasks of a network.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::env::{BoxFuture, Spawner};

/// Counts the tasks that hold sockets, so that a shutdown can wait for them.
#[derive(Clone, Default)]
pub(super) struct Tasks(Arc<AtomicUsize>);

impl Tasks {
    pub(super) fn spawn(&self, spawner: &dyn Spawner, name: &'static str, future: BoxFuture<'static, ()>) {
        struct Counted(Arc<AtomicUsize>);
        impl Drop for Counted {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::AcqRel);
            }
        }
        self.0.fetch_add(1, Ordering::AcqRel);
        let counted = Counted(Arc::clone(&self.0));
        let whole = async move {
            let _counted = counted;
            future.await;
        };
        spawner.task(name, Box::pin(whole));
    }

    pub(super) fn are_running(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }
}
