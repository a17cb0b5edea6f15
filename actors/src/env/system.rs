//! The real clock and the real executor.

use std::time::Duration;

use super::{BoxFuture, Clock, Instant, Join, Spawner};

/// The machine's clock ([`shoal_transport::env::system_now`]), with tokio's timer for sleeping.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        shoal_transport::env::system_now()
    }

    #[expect(clippy::disallowed_methods, reason = "this is the system's clock")]
    fn unix_time(&self) -> Duration {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default()
    }

    #[expect(clippy::disallowed_methods, reason = "this is the system's clock")]
    fn sleep_until(&self, deadline: Instant) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            // tokio's timer does not count suspend, so after a wake-up the remaining time is asked for again, and no
            // single nap is long enough to oversleep a suspend by much.
            loop {
                let left = deadline.since(shoal_transport::env::system_now());
                if left.is_zero() {
                    return;
                }
                tokio::time::sleep(left.min(Duration::from_secs(1))).await;
            }
        })
    }
}

/// Tasks on the tokio runtime that the node was started in, threads from the operating system.
#[derive(Debug, Clone)]
pub struct SystemSpawner {
    runtime: tokio::runtime::Handle,
}

impl SystemSpawner {
    /// Uses `runtime` for tasks.
    pub fn new(runtime: tokio::runtime::Handle) -> Self {
        Self { runtime }
    }
}

impl Spawner for SystemSpawner {
    #[expect(clippy::disallowed_methods, reason = "this is the system's spawner")]
    fn task(&self, _name: &'static str, future: BoxFuture<'static, ()>) {
        drop(self.runtime.spawn(future));
    }

    #[expect(clippy::disallowed_methods, reason = "this is the system's spawner")]
    fn thread(&self, name: String, body: Box<dyn FnOnce() + Send>) -> std::io::Result<Box<dyn Join>> {
        let handle = std::thread::Builder::new().name(name).spawn(body)?;
        Ok(Box::new(Thread(handle)))
    }
}

struct Thread(std::thread::JoinHandle<()>);

impl Join for Thread {
    fn join(self: Box<Self>) -> bool {
        self.0.join().is_ok()
    }
}
