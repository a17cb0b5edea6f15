//! The seams through which every effect passes: time, randomness, tasks and threads.
//!
//! Code of a node never asks the operating system for these directly. It is handed a [`Clock`], an [`Rng`] and a
//! [`Spawner`], so that a simulation can run the same code in virtual time from a seed, and so that several nodes
//! can live in one process without sharing anything.

use std::fmt;
use std::future::Future;
use std::ops::{Add, Sub};
use std::pin::Pin;
use std::time::Duration;

/// A boxed future, as returned by object-safe asynchronous traits.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A moment on a node's own clock, in nanoseconds since an arbitrary origin.
///
/// It never goes backwards and it counts the time that the machine was suspended, because a lease ends whether its
/// holder slept or not. Moments of two nodes cannot be compared.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Instant(u64);

impl Instant {
    /// The clock's origin.
    pub const ZERO: Self = Self(0);

    /// The moment `nanos` nanoseconds after the clock's origin.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the clock's origin.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Time passed since `earlier`, zero if `earlier` is later than this moment.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, delay: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub<Duration> for Instant {
    type Output = Self;

    fn sub(self, delay: Duration) -> Self {
        Self(self.0.saturating_sub(u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl fmt::Debug for Instant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.6}s", self.0 as f64 / 1e9)
    }
}

/// Monotonic time that counts suspend.
pub trait Clock: Send + Sync + fmt::Debug + 'static {
    /// The present moment.
    fn now(&self) -> Instant;

    /// The calendar's time since 1970, UTC, for people: it may jump, and nothing but text depends on it. Zero where no
    /// calendar is known.
    fn unix_time(&self) -> Duration {
        Duration::ZERO
    }

    /// Resolves once [`Clock::now`] is at or past `deadline`.
    fn sleep_until(&self, deadline: Instant) -> BoxFuture<'static, ()>;
}

/// Randomness, one independent stream for each purpose, so that a new user of chance does not disturb the others in
/// a simulation.
pub trait Rng: Send + Sync + fmt::Debug + 'static {
    /// Fills `bytes` from the stream named `purpose`. Fit for secrets outside a simulation.
    fn fill(&self, purpose: &'static str, bytes: &mut [u8]);

    /// A number from the stream named `purpose`.
    fn next_u64(&self, purpose: &'static str) -> u64 {
        let mut bytes = [0; 8];
        self.fill(purpose, &mut bytes);
        u64::from_le_bytes(bytes)
    }
}

/// A running thread that the node waits for when it stops.
pub trait Join: Send {
    /// Waits for the end of the thread; `false` says that it panicked.
    fn join(self: Box<Self>) -> bool;
}

/// Starts tasks and threads that belong to one node. What is not started here would outlive a simulated crash.
pub trait Spawner: Send + Sync + fmt::Debug + 'static {
    /// Runs `future` to its end on the node's executor.
    fn task(&self, name: &'static str, future: BoxFuture<'static, ()>);

    /// Runs `body` on a thread of its own, for device loops and blocking I/O.
    ///
    /// # Errors
    /// The operating system's, if it cannot start a thread.
    fn thread(&self, name: String, body: Box<dyn FnOnce() + Send>) -> std::io::Result<Box<dyn Join>>;
}

/// The machine's randomness: `getrandom`, whatever the purpose.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemRng;

impl Rng for SystemRng {
    #[expect(clippy::disallowed_methods, reason = "this is the system's randomness")]
    fn fill(&self, _purpose: &'static str, bytes: &mut [u8]) {
        // A machine that cannot give random bytes can make no identity, key or token: there is no way to go on.
        if let Err(error) = getrandom::fill(bytes) {
            panic!("the operating system gives no random bytes: {error}");
        }
    }
}

/// The machine's clock that counts suspend (`CLOCK_BOOTTIME` on Linux; `CLOCK_MONOTONIC` on macOS, which there is
/// `mach_continuous_time`).
///
/// It has no executor of its own, so it measures but does not sleep; the runtime adds that.
pub fn system_now() -> Instant {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let id = rustix::time::ClockId::Boottime;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let id = rustix::time::ClockId::Monotonic;
    let time = rustix::time::clock_gettime(id);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    Instant::from_nanos(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_saturate_instead_of_wrapping() {
        let late = Instant::from_nanos(u64::MAX) + Duration::from_secs(1);
        assert_eq!(late.as_nanos(), u64::MAX);
        assert_eq!(Instant::ZERO - Duration::from_secs(1), Instant::ZERO);
        assert_eq!(Instant::ZERO.since(late), Duration::ZERO);
    }

    #[test]
    fn the_system_clock_does_not_go_back() {
        let first = system_now();
        assert!(system_now() >= first);
    }
}
