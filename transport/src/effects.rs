//! What providers and channels need of the world, in one handle.

use std::sync::Arc;
use std::time::Duration;

use crate::env::{Clock, Instant, Rng, Spawner};

/// Time, chance and threads, as the node that owns a link hands them over.
///
/// The blocking shells of this crate wait in the operating system, so they need a clock that runs in real time.
/// Simulations drive the machines beneath the shells instead.
#[derive(Clone, Debug)]
pub struct Effects {
    /// Deadlines are moments on this clock.
    pub clock: Arc<dyn Clock>,
    /// Nonces and handles are drawn from here.
    pub rng: Arc<dyn Rng>,
    /// Starts the threads of providers and channels.
    pub spawner: Arc<dyn Spawner>,
}

impl Effects {
    /// The moment `delay` from now.
    pub fn after(&self, delay: Duration) -> Instant {
        self.clock.now() + delay
    }
}
