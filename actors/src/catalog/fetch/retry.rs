//! When to try again: exponential back-off with jitter, as a pure machine.

use std::time::Duration;

/// How often and how patiently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Tries in a row without progress before giving up.
    pub attempts: u32,
    /// Delay before the second try.
    pub delay_first: Duration,
    /// Longest delay, also where a server asks for more.
    pub delay_max: Duration,
    /// Bytes that count as progress.
    pub progress_bytes: u64,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self { attempts: 5, delay_first: Duration::from_millis(500), delay_max: Duration::from_secs(60), progress_bytes: 1 << 20 }
    }
}

/// The tries at one thing.
#[derive(Debug)]
pub(crate) struct Retries {
    policy: RetryPolicy,
    failures: u32,
    /// Failures in all, however much came in between.
    total: u32,
}

/// Most failures of one download, even if each brought progress.
const FAILURES_MAX: u32 = 1_000;

impl Retries {
    /// None yet.
    pub(crate) fn new(policy: RetryPolicy) -> Self {
        Self { policy, failures: 0, total: 0 }
    }

    /// A try failed after so many new bytes: how long to wait before the next, or `None` to give up. `chance` is any
    /// number; `asked` is what the server asked for.
    pub(crate) fn failed(&mut self, new_bytes: u64, asked: Option<Duration>, chance: u64) -> Option<Duration> {
        if new_bytes >= self.policy.progress_bytes {
            self.failures = 0;
        }
        self.failures += 1;
        self.total += 1;
        if self.failures >= self.policy.attempts || self.total >= FAILURES_MAX {
            return None;
        }
        let doubled = self.policy.delay_first.saturating_mul(1 << (self.failures - 1).min(16));
        let delay = doubled.min(self.policy.delay_max);
        // Between half and the whole, so that nodes that failed together do not come back together.
        let delay = delay / 2 + (delay / 2).mul_f64((chance % 1024) as f64 / 1024.0);
        Some(delay.max(asked.unwrap_or_default().min(self.policy.delay_max)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gives_up_only_without_progress() {
        let mut retries = Retries::new(RetryPolicy { attempts: 3, ..RetryPolicy::default() });
        assert!(retries.failed(0, None, 0).is_some());
        assert!(retries.failed(0, None, 0).is_some());
        assert!(retries.failed(2 << 20, None, 0).is_some());
        assert!(retries.failed(0, None, 0).is_some());
        assert_eq!(retries.failed(0, None, 0), None);
    }

    #[test]
    fn delays_grow_within_bounds() {
        let policy = RetryPolicy { attempts: 40, ..RetryPolicy::default() };
        let mut retries = Retries::new(policy);
        let delays: Vec<Duration> = (0..30).filter_map(|_| retries.failed(0, None, 1023)).collect();
        assert!(delays.windows(2).all(|pair| pair[0] <= pair[1]));
        assert!(delays[0] >= policy.delay_first / 2 && delays[29] <= policy.delay_max);
        assert_eq!(retries.failed(0, Some(Duration::from_secs(7200)), 0), Some(policy.delay_max));
    }

    #[test]
    fn a_server_that_always_drops_is_left_in_the_end() {
        let mut retries = Retries::new(RetryPolicy::default());
        assert!((0..FAILURES_MAX).any(|_| retries.failed(u64::MAX, None, 0).is_none()));
    }
}
