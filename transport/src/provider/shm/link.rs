//! A link through a segment of shared memory.
//!
//! The head of a record is what the prefix is on a TCP connection: `length u32 │ kind u8 │ zero 3`, little-endian. It is that of a message,
//! a keep-alive or its echo. A long message is cut into pieces, so that one end reads while the other writes: the head of the first
//! has the length of the whole message, those of the others have their own. A message that the ring can hold is begun only if it
//! can be ended; a longer one flows through while it is read.
//!
//! Whoever waits spins a little and then sleeps on its bell and on the socket that the link
//! was made over. Nothing is said on that socket any more: it ends when the other process does, however it does.

use std::fmt;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::bell::{Bell, Woken};
use super::ring::{Reader, Scribbled, Writer};
use super::segment::Segment;
use crate::env::{Clock, Instant};
use crate::link::{CloseReason, Gate, Link, LinkHealth, RecvError, SendError, Vitals, nap};
use crate::provider::ProviderKind;
use crate::provider::links::Living;

const HEAD_BYTES: usize = 8;
const STAMP_BYTES: usize = 8;

const MESSAGE: u8 = 1;
const PING: u8 = 2;
const PONG: u8 = 3;
/// A piece of a message that is not its first.
const MORE: u8 = 4;

/// Pieces of long messages take this much of the ring, if that is no more than a quarter of it.
const PIECE_BYTES: usize = 128 * 1024;

/// Bytes of a message that lie in one piece, in a ring of so many bytes.
const fn piece_bytes(ring: usize) -> usize {
    (if ring / 4 < PIECE_BYTES { ring / 4 } else { PIECE_BYTES }) - HEAD_BYTES
}

/// How often a wait looks again before it sleeps: at most, where that has paid; at least, to find out whether it does.
const SPINS_MAX: u32 = 4_000;
const SPINS_MIN: u32 = 50;

/// A wait that was over this soon after it went to sleep should have spun instead. Two threads that both sleep take about as long
/// to wake each other, so that they find out of it.
const WORTH_SPINNING: Duration = Duration::from_micros(150);

/// Of a ring, this part may be kept back by who reads, so that it need not be given back message by message.
const OWED_PART: usize = 16;

/// How many messages a reader takes before it looks at the clock, if it need not wait for them.
const HEARD_EVERY: u32 = 32;

/// A message that moves more slowly than this, in bytes per second, is given up.
const RATE_MIN: u64 = 128 * 1024;

/// The four bells of a link, as one end sees them.
pub(super) struct Bells {
    /// Bytes have come.
    pub(super) bytes: Bell,
    /// There is room again for what this end writes.
    pub(super) room: Bell,
    /// Rung for the peer: bytes have come for it.
    pub(super) peer_bytes: Bell,
    /// Rung for the peer: there is room again for what it writes.
    pub(super) peer_room: Bell,
}

struct Receiving {
    ring: Reader,
    patience: Patience,
    /// Since when nothing has come, as far as a reader saw.
    quiet_since: Option<Instant>,
    /// Messages since the clock was looked at.
    unheard: u32,
}

/// How long waits of one kind spin before they sleep: longer where what was waited for came soon after, shorter where it did not. With a
/// core for each end it stays long, and on a busy machine, where spinning takes from the other end the time to answer, it becomes short.
struct Patience {
    spins: u32,
}

/// One wait.
#[derive(Default)]
struct Wait {
    spun: u32,
    /// When it first went to sleep.
    slept: Option<Instant>,
}

impl Patience {
    const fn new() -> Self {
        Self { spins: SPINS_MAX }
    }

    /// Spins once more, or says `false` when it is time to sleep.
    #[inline]
    fn spin(&self, wait: &mut Wait) -> bool {
        let spins = wait.spun < self.spins;
        if spins {
            wait.spun += 1;
            std::hint::spin_loop();
        }
        spins
    }

    /// Learns from a wait that had to sleep and is over.
    fn over(&mut self, wait: &Wait, clock: &dyn Clock) {
        let Some(slept) = wait.slept else { return };
        let worth = clock.now().since(slept) < WORTH_SPINNING;
        if worth {
            self.spins = (self.spins * 4).min(SPINS_MAX);
        } else {
            self.shorten();
        }
    }

    /// Spinning was for nothing.
    fn shorten(&mut self) {
        self.spins = (self.spins / 2).max(SPINS_MIN);
    }
}

struct Sending {
    ring: Writer,
    patience: Patience,
}

/// One end of a link.
pub(super) struct ShmLink {
    anchor: UnixStream,
    bells: Bells,
    peer: String,
    clock: Arc<dyn Clock>,
    silence_max: Duration,
    receive_max: usize,
    send_max: usize,
    writer: Gate<Sending>,
    reader: Gate<Receiving>,
    vitals: Vitals,
    /// The thread that receives is to return early.
    called_off: AtomicBool,
}

/// What a link is made of.
pub(super) struct Parts {
    /// The socket that was used for the handshake.
    pub(super) anchor: UnixStream,
    /// The memory.
    pub(super) segment: Segment,
    /// Which lane this end writes: 0 for the acceptor, 1 for the dialler.
    pub(super) lane: usize,
    /// The bells.
    pub(super) bells: Bells,
    /// The peer, for people.
    pub(super) peer: String,
    /// Longest message that this end receives, and that the peer does.
    pub(super) limits: [u32; 2],
}

/// A head.
const fn head(length: u32, kind: u8) -> u64 {
    length as u64 | (kind as u64) << 32
}

/// What a head says: length, kind, and whether the rest is as it has to be.
fn read_head(head: u64) -> (usize, u8, bool) {
    (head as u32 as usize, (head >> 32) as u8, head >> 40 == 0)
}

impl ShmLink {
    pub(super) fn new(parts: Parts, clock: Arc<dyn Clock>, silence_max: Duration) -> std::io::Result<Arc<Self>> {
        let Parts { anchor, segment, lane, bells, peer, limits } = parts;
        anchor.set_nonblocking(true)?;
        let segment = Arc::new(segment);
        let [receive_max, send_max] = limits.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX));
        Ok(Arc::new(Self {
            anchor,
            bells,
            peer,
            silence_max,
            receive_max,
            send_max,
            writer: Gate::new(Sending { ring: Writer::new(Arc::clone(&segment), lane), patience: Patience::new() }),
            reader: Gate::new(Receiving { ring: Reader::new(segment, 1 - lane), patience: Patience::new(), quiet_since: None, unheard: 0 }),
            called_off: AtomicBool::new(false),
            vitals: Vitals::new(clock.now()),
            clock,
        }))
    }

    /// Ends the link and gives the reason that stands, which may be an earlier one.
    fn end(&self, reason: CloseReason) -> CloseReason {
        self.close(reason);
        self.vitals.reason()
    }

    fn misbehaved(&self, what: String) -> CloseReason {
        self.end(CloseReason::Misbehaved(what))
    }

    fn scribbled(&self, _: Scribbled) -> CloseReason {
        self.misbehaved("what it put into shared memory is impossible".to_owned())
    }

    /// Sleeps on a bell. Notes if the peer is gone; what it wrote before is still there.
    fn sleep(&self, bell: &Bell, wait: Duration) -> Result<(), CloseReason> {
        match bell.wait(&self.anchor, wait) {
            Ok(Woken::Look) => Ok(()),
            Ok(Woken::Gone) => {
                self.end(CloseReason::Peer);
                Ok(())
            }
            Ok(Woken::Spoke) => Err(self.misbehaved("it speaks on a socket that is silent".to_owned())),
            Err(error) => Err(self.end(CloseReason::Broken(error.to_string()))),
        }
    }

    /// Sends a keep-alive unless somebody is sending anyway, which serves as well. Never waits.
    pub(super) fn ping(&self) {
        if !self.vitals.has_ended() {
            self.note(PING, self.clock.now().as_nanos());
        }
    }

    /// Sends a short record if there is room for it now.
    fn note(&self, kind: u8, stamp: u64) {
        let Some(mut sending) = self.writer.try_enter() else { return };
        let ring = &mut sending.ring;
        if ring.has_room(Writer::<Segment>::takes(STAMP_BYTES)).is_ok_and(|room| room) {
            ring.write(&stamp.to_le_bytes());
            self.show(ring, head(STAMP_BYTES as u32, kind));
        }
    }

    /// Publishes what was written.
    #[inline]
    fn show(&self, ring: &mut Writer, head: u64) {
        if ring.publish(head) {
            self.bells.peer_bytes.ring();
        }
    }

    /// Waits until records can take `bytes` of the ring, which it can hold.
    #[inline]
    fn await_room(&self, sending: &mut Sending, bytes: usize, deadline: Instant, blocked: &mut dyn FnMut()) -> Result<(), SendError> {
        let Sending { ring: writer, patience } = sending;
        let mut wait = Wait::default();
        loop {
            if self.vitals.has_ended() {
                return Err(self.vitals.reason().into());
            }
            if writer.has_room(bytes).map_err(|odd| self.scribbled(odd))? {
                patience.over(&wait, &*self.clock);
                return Ok(());
            }
            if patience.spin(&mut wait) {
                continue;
            }
            let now = self.clock.now();
            let Some(nap) = nap(now, deadline) else { return Err(SendError::Deadline) };
            if wait.slept.is_none() {
                wait.slept = Some(now);
                blocked();
            }
            writer.will_wait();
            if !writer.has_room(bytes).map_err(|odd| self.scribbled(odd))? {
                self.sleep(&self.bells.room, nap)?;
            }
        }
    }

    fn send_message(&self, parts: &[&[u8]], deadline: Instant, blocked: &mut dyn FnMut()) -> Result<(), SendError> {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        let length = u32::try_from(bytes).ok().filter(|_| bytes <= self.send_max);
        let Some(length) = length else { return Err(SendError::TooLong { bytes, limit: self.send_max }) };
        let Some(mut sending) = self.writer.enter(&*self.clock, deadline) else { return Err(SendError::Deadline) };
        let sending = &mut *sending;
        if bytes <= piece_bytes(sending.ring.ring_bytes()) {
            self.await_room(sending, Writer::<Segment>::takes(bytes), deadline, blocked)?;
            for part in parts {
                sending.ring.write(part);
            }
            self.show(&mut sending.ring, head(length, MESSAGE));
        } else {
            self.send_pieces(sending, parts, length, deadline, blocked)?;
        }
        self.vitals.sent(bytes);
        Ok(())
    }

    /// Sends a message that is longer than a piece.
    fn send_pieces(
        &self,
        sending: &mut Sending,
        parts: &[&[u8]],
        length: u32,
        deadline: Instant,
        blocked: &mut dyn FnMut(),
    ) -> Result<(), SendError> {
        let ring = sending.ring.ring_bytes();
        let piece = piece_bytes(ring);
        let mut left = length as usize;
        let takes = |bytes: usize| Writer::<Segment>::takes(bytes);
        let (pieces, rest) = (left / piece, left % piece);
        let all = pieces.saturating_mul(takes(piece)).saturating_add(if rest > 0 { takes(rest) } else { 0 });
        let whole = all <= ring - ring / OWED_PART - takes(0);
        // A longer one begins when it can make some way at once.
        self.await_room(sending, if whole { all } else { ring / 2 }, deadline, blocked)?;
        let (mut shown_as, mut missing) = (head(length, MESSAGE), piece);
        for part in parts {
            let mut part = *part;
            while !part.is_empty() {
                let (now, later) = part.split_at(part.len().min(missing));
                sending.ring.write(now);
                missing -= now.len();
                part = later;
                if missing > 0 {
                    continue;
                }
                self.show(&mut sending.ring, shown_as);
                left -= piece.min(left);
                missing = piece.min(left);
                shown_as = head(u32::try_from(missing).unwrap_or(0), MORE);
                if missing > 0 && !whole {
                    self.await_room(sending, takes(missing), deadline, blocked).map_err(|error| match error {
                        // The peer has seen its beginning.
                        SendError::Deadline => self.end(CloseReason::Stalled).into(),
                        other => other,
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Waits for a record, or until it is called off, and gives its head.
    #[inline]
    fn await_record(&self, receiving: &mut Receiving, deadline: Instant, may_be_called_off: bool) -> Result<u64, RecvError> {
        match receiving.ring.head().map_err(|odd| self.scribbled(odd))? {
            0 => self.wait_for_record(receiving, deadline, may_be_called_off),
            head => {
                receiving.quiet_since = None;
                Ok(head)
            }
        }
    }

    fn wait_for_record(&self, receiving: &mut Receiving, deadline: Instant, may_be_called_off: bool) -> Result<u64, RecvError> {
        receiving.ring.give_back_small();
        let mut wait = Wait::default();
        loop {
            // What the peer wrote before it went is still to be had, so whether it went is looked at first.
            let ended = self.vitals.has_ended();
            let head = receiving.ring.head().map_err(|odd| self.scribbled(odd))?;
            if head != 0 {
                receiving.quiet_since = None;
                receiving.patience.over(&wait, &*self.clock);
                return Ok(head);
            }
            if ended {
                return Err(self.vitals.reason().into());
            }
            if receiving.patience.spin(&mut wait) {
                continue;
            }
            // The writing end counts on all room while this one sleeps.
            if receiving.ring.owed() > 0 {
                self.give_back(receiving);
            }
            let now = self.clock.now();
            let silence = now.since(*receiving.quiet_since.get_or_insert(now));
            if silence > self.silence_max {
                let silence_ms = u64::try_from(silence.as_millis()).unwrap_or(u64::MAX);
                return Err(self.end(CloseReason::Silent { silence_ms }).into());
            }
            let Some(nap) = nap(now, deadline) else {
                receiving.patience.shorten();
                return Err(RecvError::Deadline);
            };
            if may_be_called_off && self.called_off.swap(false, Ordering::AcqRel) {
                return Err(RecvError::Deadline);
            }
            if wait.slept.is_none() {
                wait.slept = Some(now);
                self.note_heard(receiving, Some(now));
            }
            receiving.ring.will_wait();
            if receiving.ring.head().map_err(|odd| self.scribbled(odd))? == 0 {
                self.sleep(&self.bells.bytes, nap)?;
            }
        }
    }

    /// Notes when the peer was heard: `now`, if messages came since the last note.
    fn note_heard(&self, receiving: &mut Receiving, now: Option<Instant>) {
        if receiving.unheard > 0 {
            receiving.unheard = 0;
            self.vitals.heard(now.unwrap_or_else(|| self.clock.now()));
        }
    }

    fn give_back(&self, receiving: &mut Receiving) {
        if receiving.ring.give_back() {
            self.bells.peer_room.ring();
        }
    }

    /// Reads a message whose head was seen.
    #[inline]
    fn read_message(&self, receiving: &mut Receiving, message: &mut [u8]) -> Result<(), RecvError> {
        let piece = piece_bytes(receiving.ring.ring_bytes());
        if message.len() <= piece {
            receiving.ring.read(message).map_err(|odd| self.scribbled(odd))?;
        } else {
            self.read_pieces(receiving, message, piece)?;
        }
        // The writing end counts on all but this part.
        if receiving.ring.owed() > receiving.ring.ring_bytes() / OWED_PART {
            self.give_back(receiving);
        }
        Ok(())
    }

    fn read_pieces(&self, receiving: &mut Receiving, message: &mut [u8], piece: usize) -> Result<(), RecvError> {
        // A message that has begun is finished, or the link ends. What bounds the wait is the silence limit and the
        // slowest rate that is worth waiting for.
        let slowest = Duration::from_millis(u64::try_from(message.len()).unwrap_or(u64::MAX) / (RATE_MIN / 1000));
        let deadline = self.clock.now() + slowest + self.silence_max * 2;
        for (i, piece) in message.chunks_mut(piece).enumerate() {
            if i > 0 {
                let found = self.await_record(receiving, deadline, false).map_err(|error| match error {
                    RecvError::Deadline => self.end(CloseReason::Stalled).into(),
                    other => other,
                })?;
                let expected = head(u32::try_from(piece.len()).unwrap_or(0), MORE);
                if found != expected {
                    return Err(self
                        .misbehaved(format!("the head of a message's piece is {found:016x} instead of {expected:016x}"))
                        .into());
                }
            }
            receiving.ring.read(piece).map_err(|odd| self.scribbled(odd))?;
            self.give_back(receiving);
        }
        Ok(())
    }

    fn note_arrived(&self, kind: u8, stamp: u64) {
        if kind == PING {
            self.note(PONG, stamp);
            return;
        }
        self.vitals.echoed(self.clock.now(), stamp);
    }
}

impl Living for ShmLink {
    fn has_ended(&self) -> bool {
        self.vitals.has_ended()
    }
}

impl Link for ShmLink {
    fn provider(&self) -> ProviderKind {
        ProviderKind::Shm
    }

    fn peer(&self) -> String {
        self.peer.clone()
    }

    fn message_bytes_max(&self) -> usize {
        self.send_max
    }

    fn send(&self, parts: &[&[u8]], deadline: Instant) -> Result<(), SendError> {
        self.send_message(parts, deadline, &mut || {})
    }

    fn send_or_tell(&self, parts: &[&[u8]], deadline: Instant, blocked: &mut dyn FnMut()) -> Result<(), SendError> {
        self.send_message(parts, deadline, blocked)
    }

    fn calls_off(&self) -> bool {
        true
    }

    fn call_off(&self) {
        self.called_off.store(true, Ordering::Release);
        self.bells.bytes.ring();
    }

    fn recv(&self, buffer: &mut [u8], deadline: Instant) -> Result<usize, RecvError> {
        let Some(mut receiving) = self.reader.enter(&*self.clock, deadline) else { return Err(RecvError::Deadline) };
        let receiving = &mut *receiving;
        if self.vitals.has_ended() {
            // What arrived before the peer went is still to be had; after any other end the stream means nothing.
            let reason = self.vitals.reason();
            if reason != CloseReason::Peer {
                return Err(reason.into());
            }
        }
        loop {
            let head = self.await_record(receiving, deadline, true)?;
            receiving.unheard += 1;
            if receiving.unheard >= HEARD_EVERY {
                self.note_heard(receiving, None);
            }
            match read_head(head) {
                (bytes, MESSAGE, true) => {
                    let limit = buffer.len().min(self.receive_max);
                    if bytes > limit {
                        let what = format!("a message of {bytes} bytes is announced where at most {limit} are agreed");
                        return Err(self.misbehaved(what).into());
                    }
                    self.read_message(receiving, &mut buffer[..bytes])?;
                    self.vitals.received(bytes);
                    return Ok(bytes);
                }
                (STAMP_BYTES, kind @ (PING | PONG), true) => {
                    let mut stamp = [0; STAMP_BYTES];
                    self.read_message(receiving, &mut stamp)?;
                    self.note_arrived(kind, u64::from_le_bytes(stamp));
                }
                (bytes, kind, _) => {
                    let what = format!("a record of kind {kind} and {bytes} bytes is none that this version knows");
                    return Err(self.misbehaved(what).into());
                }
            }
        }
    }

    fn health(&self) -> LinkHealth {
        self.vitals.health()
    }

    fn close(&self, reason: CloseReason) {
        self.vitals.end(reason);
        // Wakes who sleeps on either end. It fails where the peer was faster, which is as good.
        drop(self.anchor.shutdown(Shutdown::Both));
    }
}

impl Drop for ShmLink {
    fn drop(&mut self) {
        self.close(CloseReason::Local);
    }
}

impl fmt::Debug for ShmLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShmLink").field("peer", &self.peer).field("ended", &self.vitals.has_ended()).finish_non_exhaustive()
    }
}
