//! A link through a segment of shared memory.
//!
//! The bytes of a lane are cut into records, as on a TCP connection: `length u32 │ kind u8 │ zero 3`, little-endian, then
//! `length` bytes; a message, a keep-alive or its echo. A record that the ring can hold is written whole or not at all;
//! a longer one flows through while it is read.
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

const PREFIX_BYTES: usize = 8;
const STAMP_BYTES: usize = 8;
const NOTE_BYTES: usize = PREFIX_BYTES + STAMP_BYTES;

const MESSAGE: u8 = 1;
const PING: u8 = 2;
const PONG: u8 = 3;

/// A long message is shown to the reader, and its room given back to the writer, in pieces of this size.
const PIECE_BYTES: usize = 128 * 1024;

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

fn prefix(length: u32, kind: u8) -> [u8; PREFIX_BYTES] {
    let [a, b, c, d] = length.to_le_bytes();
    [a, b, c, d, kind, 0, 0, 0]
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
        self.misbehaved("its counts in shared memory are impossible".to_owned())
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
        let Some(mut writer) = self.writer.try_enter() else { return };
        let writer = &mut writer.ring;
        if writer.room().is_ok_and(|room| room >= NOTE_BYTES) {
            writer.write(&prefix(STAMP_BYTES as u32, kind));
            writer.write(&stamp.to_le_bytes());
            self.show(writer);
        }
    }

    /// Publishes what was written.
    fn show(&self, writer: &mut Writer) {
        if writer.publish() {
            self.bells.peer_bytes.ring();
        }
    }

    /// Waits until the ring has room for `bytes`, which it can hold.
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
            if writer.room().map_err(|odd| self.scribbled(odd))? < bytes {
                self.sleep(&self.bells.room, nap)?;
            }
        }
    }

    /// Writes a piece of a record that has begun, for which there may be no room yet.
    fn write_on(&self, sending: &mut Sending, mut bytes: &[u8], deadline: Instant, blocked: &mut dyn FnMut()) -> Result<(), SendError> {
        while !bytes.is_empty() {
            let mut room = sending.ring.room().map_err(|odd| self.scribbled(odd))?;
            if room == 0 {
                self.show(&mut sending.ring);
                let some = bytes.len().min(PIECE_BYTES).min(sending.ring.ring_bytes() / 2);
                self.await_room(sending, some, deadline, blocked).map_err(|error| match error {
                    // The peer has seen its beginning.
                    SendError::Deadline => self.end(CloseReason::Stalled).into(),
                    other => other,
                })?;
                room = sending.ring.room().map_err(|odd| self.scribbled(odd))?;
            }
            let (now, later) = bytes.split_at(bytes.len().min(room).min(PIECE_BYTES));
            sending.ring.write(now);
            if sending.ring.unpublished() >= PIECE_BYTES {
                self.show(&mut sending.ring);
            }
            bytes = later;
        }
        Ok(())
    }

    fn send_record(&self, parts: &[&[u8]], deadline: Instant, blocked: &mut dyn FnMut()) -> Result<(), SendError> {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        let length = u32::try_from(bytes).ok().filter(|_| bytes <= self.send_max);
        let Some(length) = length else { return Err(SendError::TooLong { bytes, limit: self.send_max }) };
        let Some(mut sending) = self.writer.enter(&*self.clock, deadline) else { return Err(SendError::Deadline) };
        let sending = &mut *sending;
        let record = PREFIX_BYTES + bytes;
        let ring = sending.ring.ring_bytes();
        // A long one begins when it can make some way at once.
        let whole = record <= ring - ring / OWED_PART;
        self.await_room(sending, if whole { record } else { ring / 2 }, deadline, blocked)?;
        sending.ring.write(&prefix(length, MESSAGE));
        for part in parts {
            if whole && record <= PIECE_BYTES {
                sending.ring.write(part);
            } else {
                self.write_on(sending, part, deadline, blocked)?;
            }
        }
        self.show(&mut sending.ring);
        self.vitals.sent(bytes);
        Ok(())
    }

    /// Waits until `bytes` can be read, or until it is called off.
    fn await_bytes(&self, receiving: &mut Receiving, bytes: usize, deadline: Instant, may_be_called_off: bool) -> Result<usize, RecvError> {
        if receiving.ring.known() >= bytes {
            return Ok(receiving.ring.known());
        }
        if receiving.ring.owed() > 0 {
            self.give_back(receiving);
        }
        let mut wait = Wait::default();
        let before = receiving.ring.known();
        loop {
            // What the peer wrote before it went is still to be had, so whether it went is looked at first.
            let ended = self.vitals.has_ended();
            let ready = receiving.ring.ready().map_err(|odd| self.scribbled(odd))?;
            if ready > before || ready >= bytes {
                receiving.quiet_since = None;
            }
            if ready >= bytes {
                receiving.patience.over(&wait, &*self.clock);
                return Ok(ready);
            }
            if ended {
                return Err(self.vitals.reason().into());
            }
            if receiving.patience.spin(&mut wait) {
                continue;
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
            if receiving.ring.ready().map_err(|odd| self.scribbled(odd))? < bytes {
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

    /// Reads the rest of a message whose prefix was read.
    fn read_body(&self, receiving: &mut Receiving, body: &mut [u8]) -> Result<(), RecvError> {
        if receiving.ring.known() >= body.len() && body.len() <= PIECE_BYTES {
            receiving.ring.read(body);
        } else {
            // A message that has begun is finished, or the link ends. What bounds the wait is the silence limit and the
            // slowest rate that is worth waiting for.
            let slowest = Duration::from_millis(u64::try_from(body.len()).unwrap_or(u64::MAX) / (RATE_MIN / 1000));
            let deadline = self.clock.now() + slowest + self.silence_max * 2;
            let mut got = 0;
            while got < body.len() {
                let ready = self.await_bytes(receiving, 1, deadline, false).map_err(|error| match error {
                    RecvError::Deadline => self.end(CloseReason::Stalled).into(),
                    other => other,
                })?;
                let piece = ready.min(body.len() - got).min(PIECE_BYTES);
                receiving.ring.read(&mut body[got..got + piece]);
                self.give_back(receiving);
                got += piece;
            }
        }
        // The writing end counts on all but this part.
        if receiving.ring.owed() > receiving.ring.ring_bytes() / OWED_PART {
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
        self.send_record(parts, deadline, &mut || {})
    }

    fn send_or_tell(&self, parts: &[&[u8]], deadline: Instant, blocked: &mut dyn FnMut()) -> Result<(), SendError> {
        self.send_record(parts, deadline, blocked)
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
            self.await_bytes(receiving, PREFIX_BYTES, deadline, true)?;
            let mut prefix = [0; PREFIX_BYTES];
            receiving.ring.read(&mut prefix);
            receiving.unheard += 1;
            if receiving.unheard >= HEARD_EVERY {
                self.note_heard(receiving, None);
            }
            let bytes = u32::from_le_bytes([prefix[0], prefix[1], prefix[2], prefix[3]]) as usize;
            match (prefix[4], prefix[5..] == [0; 3]) {
                (MESSAGE, true) => {
                    let limit = buffer.len().min(self.receive_max);
                    if bytes > limit {
                        let what = format!("a message of {bytes} bytes is announced where at most {limit} are agreed");
                        return Err(self.misbehaved(what).into());
                    }
                    self.read_body(receiving, &mut buffer[..bytes])?;
                    self.vitals.received(bytes);
                    return Ok(bytes);
                }
                (kind @ (PING | PONG), true) if bytes == STAMP_BYTES => {
                    let mut stamp = [0; STAMP_BYTES];
                    self.read_body(receiving, &mut stamp)?;
                    self.note_arrived(kind, u64::from_le_bytes(stamp));
                }
                (kind, _) => {
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
