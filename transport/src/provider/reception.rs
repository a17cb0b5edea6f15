//! What providers have in common that hear each newcomer on a thread of its own: taking them in, their links, and keeping those alive.

use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use super::links::{Links, Living};
use crate::env::{Join, Spawner};
use crate::link::{CloseReason, lock};

/// Newcomers that are heard at a time. Further ones wait in the socket's queue.
const NEWCOMERS_MAX: usize = 16;

/// A provider's newcomers and links.
pub(super) struct Reception<L> {
    /// What threads are named after.
    name: &'static str,
    spawner: Arc<dyn Spawner>,
    links: Links<L>,
    newcomers: AtomicUsize,
    stop: AtomicBool,
    stopped: (Mutex<()>, Condvar),
}

impl<L: Living> Reception<L> {
    /// Nobody has come yet.
    pub(super) fn new(name: &'static str, spawner: Arc<dyn Spawner>) -> Arc<Self> {
        Arc::new(Self {
            name,
            spawner,
            links: Links::default(),
            newcomers: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            stopped: Default::default(),
        })
    }

    /// Whether the provider has been shut down.
    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Waits, at most for `wait`, unless the provider stops.
    fn pause(&self, wait: Duration) {
        let waiting = lock(&self.stopped.0);
        if !self.is_stopped() {
            drop(self.stopped.1.wait_timeout(waiting, wait));
        }
    }

    /// Starts a thread that accepts newcomers, and has each heard on a thread of its own, until the provider stops. Whoever stops it gets
    /// the thread out of `accept`.
    ///
    /// # Errors
    /// The system's, if it cannot start a thread.
    pub(super) fn take_in<S: Send + 'static>(
        self: &Arc<Self>,
        accept: impl Fn() -> std::io::Result<S> + Send + 'static,
        hear: impl Fn(S) + Clone + Send + 'static,
    ) -> std::io::Result<Box<dyn Join>> {
        let taking = Arc::clone(self);
        let body = move || {
            while !taking.is_stopped() {
                match accept() {
                    Ok(newcomer) if !taking.is_stopped() => taking.hear(newcomer, hear.clone()),
                    Ok(_) => return,
                    Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                    Err(error) => {
                        // Most likely the process has no descriptors left; asking again at once would only burn time.
                        tracing::warn!(%error, "cannot take in connections for {} links", taking.name);
                        taking.pause(Duration::from_millis(50));
                    }
                }
            }
        };
        self.spawner.thread(format!("{} accept", self.name), Box::new(body))
    }

    fn hear<S: Send + 'static>(self: &Arc<Self>, newcomer: S, hear: impl Fn(S) + Send + 'static) {
        while self.newcomers.load(Ordering::Acquire) >= NEWCOMERS_MAX {
            if self.is_stopped() {
                return;
            }
            self.pause(Duration::from_millis(1));
        }
        self.newcomers.fetch_add(1, Ordering::AcqRel);
        let hearing = Arc::clone(self);
        let body = move || {
            hear(newcomer);
            hearing.newcomers.fetch_sub(1, Ordering::AcqRel);
        };
        if let Err(error) = self.spawner.thread(format!("{} newcomer", self.name), Box::new(body)) {
            tracing::warn!(%error, "cannot hear a newcomer for {} links", self.name);
            self.newcomers.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Starts a thread that has every living link say that it lives, until the provider stops.
    ///
    /// # Errors
    /// The system's, if it cannot start a thread.
    pub(super) fn keep_alive(self: &Arc<Self>, interval: Duration, say: impl Fn(&L) + Send + 'static) -> std::io::Result<Box<dyn Join>> {
        let (keeping, interval) = (Arc::clone(self), interval.max(Duration::from_millis(1)));
        let body = move || {
            loop {
                // A link that is made meanwhile has been heard just now.
                keeping.pause(interval);
                if keeping.is_stopped() {
                    return;
                }
                for link in keeping.links.living() {
                    say(&link);
                }
            }
        };
        self.spawner.thread(format!("{} keep-alive", self.name), Box::new(body))
    }

    /// Notes a link, so that it is kept alive and ends with the provider. `false` if the provider has been shut down and the link with it.
    pub(super) fn keep(&self, link: &Arc<L>) -> bool {
        self.links.add(link);
        // Whoever stopped the provider in the meantime has not seen this link.
        let stopped = self.is_stopped();
        if stopped {
            link.close(CloseReason::Local);
        }
        !stopped
    }

    /// Lets threads end as soon as they can.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        drop(lock(&self.stopped.0));
        self.stopped.1.notify_all();
    }

    /// Ends all links.
    pub(super) fn close_all(&self) {
        for link in self.links.living() {
            link.close(CloseReason::Local);
        }
    }
}
