//! Two queues of messages between two ends in one process.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use super::Shape;
use crate::env::{Clock, Instant};
use crate::link::{CloseReason, Gate, Link, LinkHealth, LinkOptions, NAP, RecvError, SendError, lock, nap};
use crate::provider::ProviderKind;

/// Bytes that one direction holds before its sender waits, unless it is empty: one message always fits.
const IN_FLIGHT_BYTES: usize = 4 * 1024 * 1024;

/// Emptied buffers that a direction keeps for the next messages.
const SPARE_BUFFERS: usize = 8;

/// One direction.
#[derive(Default)]
struct Lane {
    queue: VecDeque<(Instant, Vec<u8>)>,
    spare: Vec<Vec<u8>>,
    bytes: usize,
    /// When the wire is free again, where bandwidth is shaped.
    wire_free: Instant,
}

/// Both directions, and how they ended for each end.
struct Wire {
    lanes: [Lane; 2],
    /// Threads of both ends that wait for a change. Waking costs a system call, even if nobody is there.
    waiting: usize,
    /// Whose receiving thread is to return early.
    called_off: [bool; 2],
    ended: Option<[CloseReason; 2]>,
}

struct Shared {
    wire: Mutex<Wire>,
    changed: Condvar,
    shape: Shape,
}

/// One end.
pub(super) struct MemoryLink {
    shared: Arc<Shared>,
    clock: Arc<dyn Clock>,
    /// 0 or 1: which lane this end sends on.
    side: usize,
    /// What this end receives, what the peer receives.
    limits: [usize; 2],
    peer: String,
    /// Held while a message is sent.
    sending: Gate<()>,
    sent: AtomicU64,
    received: AtomicU64,
    heard: AtomicU64,
}

/// Two ends that reach each other. `options` and `peers` are those of the first end, then of the second.
pub(super) fn pair(
    clock: &Arc<dyn Clock>,
    shape: Shape,
    options: [LinkOptions; 2],
    peers: [String; 2],
) -> (Arc<MemoryLink>, Arc<MemoryLink>) {
    let wire = Wire { lanes: Default::default(), waiting: 0, called_off: [false; 2], ended: None };
    let shared = Arc::new(Shared { wire: Mutex::new(wire), changed: Condvar::new(), shape });
    let limit = options.map(|options| usize::try_from(options.message_bytes_max).unwrap_or(usize::MAX));
    let [first, second] = peers;
    let end = |side: usize, peer: String| {
        Arc::new(MemoryLink {
            shared: Arc::clone(&shared),
            clock: Arc::clone(clock),
            side,
            limits: [limit[side], limit[1 - side]],
            peer,
            sending: Gate::new(()),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            heard: AtomicU64::new(clock.now().as_nanos()),
        })
    };
    (end(0, first), end(1, second))
}

impl MemoryLink {
    /// Waits for a change, at most for `wait`.
    fn wait<'a>(&self, mut wire: MutexGuard<'a, Wire>, wait: Duration) -> MutexGuard<'a, Wire> {
        wire.waiting += 1;
        let mut wire = match self.shared.changed.wait_timeout(wire, wait) {
            Ok((wire, _)) => wire,
            Err(poisoned) => poisoned.into_inner().0,
        };
        wire.waiting -= 1;
        wire
    }

    /// Wakes whoever waits, after a change.
    fn tell(&self, wire: MutexGuard<'_, Wire>) {
        let waiting = wire.waiting > 0;
        drop(wire);
        if waiting {
            self.shared.changed.notify_all();
        }
    }

    fn send_blocked(&self, parts: &[&[u8]], deadline: Instant, blocked: &mut dyn FnMut()) -> Result<(), SendError> {
        let bytes = parts.iter().map(|part| part.len()).sum();
        if bytes > self.limits[1] {
            return Err(SendError::TooLong { bytes, limit: self.limits[1] });
        }
        let mut told = false;
        // Messages are copied without holding anybody up, and stay in order.
        let Some(_sending) = self.sending.enter(&*self.clock, deadline) else { return Err(SendError::Deadline) };
        let mut wire = lock(&self.shared.wire);
        loop {
            if let Some(reason) = self.ended(&wire) {
                return Err(reason.into());
            }
            let lane = &wire.lanes[self.side];
            if lane.queue.is_empty() || lane.bytes.saturating_add(bytes) <= IN_FLIGHT_BYTES {
                break;
            }
            if !told {
                told = true;
                drop(wire);
                blocked();
                wire = lock(&self.shared.wire);
                continue;
            }
            let Some(wait) = nap(self.clock.now(), deadline) else { return Err(SendError::Deadline) };
            wire = self.wait(wire, wait);
        }
        let now = self.clock.now();
        let lane = &mut wire.lanes[self.side];
        let due = self.arrival(lane, now, bytes);
        let mut message = lane.spare.pop().unwrap_or_default();
        lane.bytes += bytes;
        drop(wire);
        for part in parts {
            message.extend_from_slice(part);
        }
        let mut wire = lock(&self.shared.wire);
        if let Some(reason) = self.ended(&wire) {
            return Err(reason.into());
        }
        wire.lanes[self.side].queue.push_back((due, message));
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
        self.tell(wire);
        Ok(())
    }

    fn ended(&self, wire: &Wire) -> Option<CloseReason> {
        wire.ended.as_ref().map(|reasons| reasons[self.side].clone())
    }

    /// When a message of `bytes` that is sent now will have arrived.
    fn arrival(&self, lane: &mut Lane, now: Instant, bytes: usize) -> Instant {
        let Some(rate) = self.shared.shape.bytes_per_second else { return now + self.shared.shape.latency };
        let nanos = u128::try_from(bytes).unwrap_or(u128::MAX).saturating_mul(1_000_000_000) / u128::from(rate.max(1));
        lane.wire_free = lane.wire_free.max(now) + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        lane.wire_free + self.shared.shape.latency
    }
}

impl Link for MemoryLink {
    fn provider(&self) -> ProviderKind {
        ProviderKind::Memory
    }

    fn peer(&self) -> String {
        self.peer.clone()
    }

    fn message_bytes_max(&self) -> usize {
        self.limits[1]
    }

    fn send(&self, parts: &[&[u8]], deadline: Instant) -> Result<(), SendError> {
        self.send_blocked(parts, deadline, &mut || {})
    }

    fn send_or_tell(&self, parts: &[&[u8]], deadline: Instant, blocked: &mut dyn FnMut()) -> Result<(), SendError> {
        self.send_blocked(parts, deadline, blocked)
    }

    fn calls_off(&self) -> bool {
        true
    }

    fn call_off(&self) {
        let mut wire = lock(&self.shared.wire);
        wire.called_off[self.side] = true;
        self.tell(wire);
    }

    fn recv(&self, buffer: &mut [u8], deadline: Instant) -> Result<usize, RecvError> {
        let mut wire = lock(&self.shared.wire);
        loop {
            let now = self.clock.now();
            let ended = self.ended(&wire);
            let lane = &mut wire.lanes[1 - self.side];
            let due = lane.queue.front().map(|(due, _)| *due);
            let mut until = deadline;
            match (due, ended) {
                (Some(due), _) if due <= now => {
                    let Some((_, mut message)) = lane.queue.pop_front() else { continue };
                    drop(wire);
                    let bytes = message.len();
                    let fits = bytes <= buffer.len() && bytes <= self.limits[0];
                    if fits {
                        buffer[..bytes].copy_from_slice(&message);
                    }
                    message.clear();
                    let mut wire = lock(&self.shared.wire);
                    let lane = &mut wire.lanes[1 - self.side];
                    lane.bytes -= bytes;
                    if lane.spare.len() < SPARE_BUFFERS {
                        lane.spare.push(message);
                    }
                    self.tell(wire);
                    if !fits {
                        let limit = buffer.len().min(self.limits[0]);
                        let reason = CloseReason::Misbehaved(format!("a message of {bytes} bytes came where at most {limit} are agreed"));
                        self.close(reason.clone());
                        return Err(reason.into());
                    }
                    self.received.fetch_add(bytes as u64, Ordering::Relaxed);
                    self.heard.store(now.as_nanos(), Ordering::Relaxed);
                    return Ok(bytes);
                }
                // This end was told to stop, so nothing that is under way matters any more.
                (_, Some(reason @ CloseReason::Local)) | (None, Some(reason)) => return Err(reason.into()),
                (Some(due), _) => until = until.min(due),
                (None, None) => {}
            }
            if std::mem::take(&mut wire.called_off[self.side]) {
                return Err(RecvError::Deadline);
            }
            let Some(wait) = nap(now, until) else {
                if now < deadline {
                    continue;
                }
                return Err(RecvError::Deadline);
            };
            wire = self.wait(wire, wait.min(NAP));
        }
    }

    fn health(&self) -> LinkHealth {
        LinkHealth {
            rtt: (!self.shared.shape.latency.is_zero()).then(|| self.shared.shape.latency * 2),
            sent_bytes: self.sent.load(Ordering::Relaxed),
            received_bytes: self.received.load(Ordering::Relaxed),
            last_heard: Instant::from_nanos(self.heard.load(Ordering::Relaxed)),
            closed: self.ended(&lock(&self.shared.wire)),
        }
    }

    fn close(&self, reason: CloseReason) {
        let mut wire = lock(&self.shared.wire);
        if wire.ended.is_none() {
            let mut reasons = [CloseReason::Peer, CloseReason::Peer];
            reasons[self.side] = reason;
            wire.ended = Some(reasons);
        }
        drop(wire);
        self.shared.changed.notify_all();
    }
}

impl Drop for MemoryLink {
    fn drop(&mut self) {
        self.close(CloseReason::Local);
    }
}

impl fmt::Debug for MemoryLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryLink").field("peer", &self.peer).finish_non_exhaustive()
    }
}
