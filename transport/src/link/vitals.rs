//! What a link over any provider knows of itself: how it is, and why it ended.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::{CloseReason, LinkHealth, lock};
use crate::env::Instant;

/// Counts, times and the end of a link. Any thread may look at them and change them.
#[derive(Debug)]
pub(crate) struct Vitals {
    ended: Mutex<Option<CloseReason>>,
    /// Set after `ended`, so that loops need no lock.
    is_ended: AtomicBool,
    sent: AtomicU64,
    received: AtomicU64,
    heard: AtomicU64,
    /// In nanoseconds; zero until one is known.
    rtt: AtomicU64,
}

impl Vitals {
    /// Of a link that was made at `now`.
    pub(crate) const fn new(now: Instant) -> Self {
        Self {
            ended: Mutex::new(None),
            is_ended: AtomicBool::new(false),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            heard: AtomicU64::new(now.as_nanos()),
            rtt: AtomicU64::new(0),
        }
    }

    /// Notes that the link ends, and says whether it had not ended before. The first reason stays.
    pub(crate) fn end(&self, reason: CloseReason) -> bool {
        lock(&self.ended).get_or_insert(reason);
        !self.is_ended.swap(true, Ordering::AcqRel)
    }

    /// Whether the link has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.is_ended.load(Ordering::Acquire)
    }

    /// Why it ended, if it has.
    pub(crate) fn reason(&self) -> CloseReason {
        lock(&self.ended).clone().unwrap_or(CloseReason::Peer)
    }

    /// A message of so many bytes was taken for sending. Said by whoever has the sending half of the link, so that adding need not lock
    /// the processor's bus.
    pub(crate) fn sent(&self, bytes: usize) {
        self.sent.store(self.sent.load(Ordering::Relaxed).wrapping_add(bytes as u64), Ordering::Relaxed);
    }

    /// A message of so many bytes was received. Said by whoever has the receiving half.
    pub(crate) fn received(&self, bytes: usize) {
        self.received.store(self.received.load(Ordering::Relaxed).wrapping_add(bytes as u64), Ordering::Relaxed);
    }

    /// Something came from the peer.
    pub(crate) fn heard(&self, now: Instant) {
        self.heard.store(now.as_nanos(), Ordering::Relaxed);
    }

    /// When something last came from the peer.
    pub(crate) fn last_heard(&self) -> Instant {
        Instant::from_nanos(self.heard.load(Ordering::Relaxed))
    }

    /// The echo of a keep-alive came, which had left with the time in nanoseconds as its stamp.
    pub(crate) fn echoed(&self, now: Instant, stamp: u64) {
        let Some(sample) = now.as_nanos().checked_sub(stamp).filter(|sample| *sample > 0) else { return };
        let before = self.rtt.load(Ordering::Relaxed);
        let smoothed = if before == 0 { sample } else { before - before / 8 + sample / 8 };
        self.rtt.store(smoothed.max(1), Ordering::Relaxed);
    }

    /// What is known now.
    pub(crate) fn health(&self) -> LinkHealth {
        let rtt = self.rtt.load(Ordering::Relaxed);
        LinkHealth {
            rtt: (rtt > 0).then(|| Duration::from_nanos(rtt)),
            sent_bytes: self.sent.load(Ordering::Relaxed),
            received_bytes: self.received.load(Ordering::Relaxed),
            last_heard: self.last_heard(),
            closed: lock(&self.ended).clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_stays() {
        let vitals = Vitals::new(Instant::ZERO);
        assert!(!vitals.has_ended() && vitals.health().closed.is_none());
        assert!(vitals.end(CloseReason::Local));
        assert!(!vitals.end(CloseReason::Stalled));
        assert_eq!((vitals.has_ended(), vitals.reason()), (true, CloseReason::Local));
        assert_eq!(vitals.health().closed, Some(CloseReason::Local));
    }

    #[test]
    fn round_trips_are_smoothed_and_echoes_of_the_future_are_none() {
        let vitals = Vitals::new(Instant::ZERO);
        vitals.echoed(Instant::from_nanos(5), 9);
        assert_eq!(vitals.health().rtt, None);
        vitals.echoed(Instant::from_nanos(1000), 200);
        assert_eq!(vitals.health().rtt, Some(Duration::from_nanos(800)));
        vitals.echoed(Instant::from_nanos(3000), 1400);
        assert_eq!(vitals.health().rtt, Some(Duration::from_nanos(900)));
    }
}
