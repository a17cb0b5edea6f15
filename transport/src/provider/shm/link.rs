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
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::bell::{Bell, Woken};
use super::ring::{Reader, Scribbled, Writer};
use super::segment::Segment;
use crate::env::{Clock, Instant};
use crate::link::{CloseReason, Gate, Link, LinkHealth, RecvError, SendError, lock, nap};
use crate::provider::ProviderKind;

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
}

/// How long waits of one kind spin before they sleep. Spinning that was for nothing halves it, spinning that paid doubles it: with a
/// core for each end it stays long, and on a busy machine, where it takes from the other end the time to answer, it becomes short.
struct Patience {
    spins: u32,
}

impl Patience {
    const fn new() -> Self {
        Self { spins: SPINS_MAX }
    }

    /// Spins once more, or says `false` when it is time to sleep. `spun` counts a wait's spins.
    fn spin(&mut self, spun: &mut u32) -> bool {
        if *spun < self.spins {
            *spun += 1;
            std::hint::spin_loop();
            return true;
        }
        if *spun == self.spins {
            // The first time that this wait comes here.
            *spun = u32::MAX;
            self.spins = (self.spins / 2).max(SPINS_MIN);
        }
        false
    }

    /// Learns from a wait that is over.
    fn over(&mut self, spun: u32) {
        if spun > 0 && spun < u32::MAX {
            self.spins = (self.spins * 2).min(SPINS_MAX);
        }
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
    ended: Mutex<Option<CloseReason>>,
    is_ended: AtomicBool,
    sent: AtomicU64,
    received: AtomicU64,
    heard: AtomicU64,
    rtt: AtomicU64,
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
            reader: Gate::new(Receiving { ring: Reader::new(segment, 1 - lane), patience: Patience::new(), quiet_since: None }),
            ended: Mutex::new(None),
            is_ended: AtomicBool::new(false),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            heard: AtomicU64::new(clock.now().as_nanos()),
            rtt: AtomicU64::new(0),
            clock,
        }))
    }

    /// Whether the link has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.is_ended.load(Ordering::Acquire)
    }

    fn reason(&self) -> CloseReason {
        lock(&self.ended).clone().unwrap_or(CloseReason::Peer)
    }

    /// Ends the link and gives the reason that stands, which may be an earlier one.
    fn end(&self, reason: CloseReason) -> CloseReason {
        self.close(reason);
        self.reason()
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
        if !self.has_ended() {
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
    fn await_room(&self, sending: &mut Sending, bytes: usize, deadline: Instant) -> Result<(), SendError> {
        let Sending { ring: writer, patience } = sending;
        let mut spun = 0;
        loop {
            if self.has_ended() {
                return Err(self.reason().into());
            }
            if writer.room().map_err(|odd| self.scribbled(odd))? >= bytes {
                patience.over(spun);
                return Ok(());
            }
            if patience.spin(&mut spun) {
                continue;
            }
            let Some(wait) = nap(self.clock.now(), deadline) else { return Err(SendError::Deadline) };
            writer.will_wait();
            if writer.room().map_err(|odd| self.scribbled(odd))? < bytes {
                self.sleep(&self.bells.room, wait)?;
            }
        }
    }

    /// Writes a piece of a record that has begun, for which there may be no room yet.
    fn write_on(&self, sending: &mut Sending, mut bytes: &[u8], deadline: Instant) -> Result<(), SendError> {
        while !bytes.is_empty() {
            let mut room = sending.ring.room().map_err(|odd| self.scribbled(odd))?;
            if room == 0 {
                self.show(&mut sending.ring);
                let some = bytes.len().min(PIECE_BYTES).min(sending.ring.ring_bytes());
                self.await_room(sending, some, deadline).map_err(|error| match error {
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

    /// Waits until `bytes` can be read.
    fn await_bytes(&self, receiving: &mut Receiving, bytes: usize, deadline: Instant) -> Result<usize, RecvError> {
        let mut spun = 0;
        let before = receiving.ring.ready().map_err(|odd| self.scribbled(odd))?;
        loop {
            // What the peer wrote before it went is still to be had, so whether it went is looked at first.
            let ended = self.has_ended();
            let ready = receiving.ring.ready().map_err(|odd| self.scribbled(odd))?;
            if ready > before || ready >= bytes {
                receiving.quiet_since = None;
            }
            if ready >= bytes {
                receiving.patience.over(spun);
                return Ok(ready);
            }
            if ended {
                return Err(self.reason().into());
            }
            if receiving.patience.spin(&mut spun) {
                continue;
            }
            let now = self.clock.now();
            let silence = now.since(*receiving.quiet_since.get_or_insert(now));
            if silence > self.silence_max {
                let silence_ms = u64::try_from(silence.as_millis()).unwrap_or(u64::MAX);
                return Err(self.end(CloseReason::Silent { silence_ms }).into());
            }
            let Some(wait) = nap(now, deadline) else { return Err(RecvError::Deadline) };
            receiving.ring.will_wait();
            if receiving.ring.ready().map_err(|odd| self.scribbled(odd))? < bytes {
                self.sleep(&self.bells.bytes, wait)?;
            }
        }
    }

    fn take(&self, receiving: &mut Receiving, into: &mut [u8]) {
        receiving.ring.read(into);
    }

    fn give_back(&self, receiving: &Receiving) {
        if receiving.ring.give_back() {
            self.bells.peer_room.ring();
        }
    }

    /// Reads the rest of a message whose prefix was read.
    fn read_body(&self, receiving: &mut Receiving, body: &mut [u8]) -> Result<(), RecvError> {
        // A message that has begun is finished, or the link ends. What bounds the wait is the silence limit and the
        // slowest rate that is worth waiting for.
        let slowest = Duration::from_millis(u64::try_from(body.len()).unwrap_or(u64::MAX) / (RATE_MIN / 1000));
        let deadline = self.clock.now() + slowest + self.silence_max * 2;
        let mut got = 0;
        while got < body.len() {
            let ready = self.await_bytes(receiving, 1, deadline).map_err(|error| match error {
                RecvError::Deadline => self.end(CloseReason::Stalled).into(),
                other => other,
            })?;
            let piece = ready.min(body.len() - got).min(PIECE_BYTES);
            self.take(receiving, &mut body[got..got + piece]);
            self.give_back(receiving);
            got += piece;
        }
        Ok(())
    }

    fn note_arrived(&self, kind: u8, stamp: u64) {
        if kind == PING {
            self.note(PONG, stamp);
            return;
        }
        let now = self.clock.now().as_nanos();
        let Some(sample) = now.checked_sub(stamp).filter(|sample| *sample > 0) else { return };
        let before = self.rtt.load(Ordering::Relaxed);
        let smoothed = if before == 0 { sample } else { before - before / 8 + sample / 8 };
        self.rtt.store(smoothed.max(1), Ordering::Relaxed);
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
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        let length = u32::try_from(bytes).ok().filter(|_| bytes <= self.send_max);
        let Some(length) = length else { return Err(SendError::TooLong { bytes, limit: self.send_max }) };
        let Some(mut sending) = self.writer.enter(&*self.clock, deadline) else { return Err(SendError::Deadline) };
        let sending = &mut *sending;
        let record = PREFIX_BYTES + bytes;
        let ring = sending.ring.ring_bytes();
        // A long one begins when it can make some way at once.
        let room = if record <= ring { record } else { ring / 2 };
        self.await_room(sending, room, deadline)?;
        sending.ring.write(&prefix(length, MESSAGE));
        for part in parts {
            self.write_on(sending, part, deadline)?;
        }
        self.show(&mut sending.ring);
        self.sent.fetch_add(u64::from(length), Ordering::Relaxed);
        Ok(())
    }

    fn recv(&self, buffer: &mut [u8], deadline: Instant) -> Result<usize, RecvError> {
        let Some(mut receiving) = self.reader.enter(&*self.clock, deadline) else { return Err(RecvError::Deadline) };
        let receiving = &mut *receiving;
        if self.has_ended() {
            // What arrived before the peer went is still to be had; after any other end the stream means nothing.
            let reason = self.reason();
            if reason != CloseReason::Peer {
                return Err(reason.into());
            }
        }
        loop {
            self.await_bytes(receiving, PREFIX_BYTES, deadline)?;
            let mut prefix = [0; PREFIX_BYTES];
            self.take(receiving, &mut prefix);
            self.heard.store(self.clock.now().as_nanos(), Ordering::Relaxed);
            let bytes = u32::from_le_bytes([prefix[0], prefix[1], prefix[2], prefix[3]]) as usize;
            match (prefix[4], prefix[5..] == [0; 3]) {
                (MESSAGE, true) => {
                    let limit = buffer.len().min(self.receive_max);
                    if bytes > limit {
                        let what = format!("a message of {bytes} bytes is announced where at most {limit} are agreed");
                        return Err(self.misbehaved(what).into());
                    }
                    self.read_body(receiving, &mut buffer[..bytes])?;
                    // Where there was no body, nothing has been given back yet.
                    self.give_back(receiving);
                    self.received.fetch_add(bytes as u64, Ordering::Relaxed);
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
        let rtt = self.rtt.load(Ordering::Relaxed);
        LinkHealth {
            rtt: (rtt > 0).then(|| Duration::from_nanos(rtt)),
            sent_bytes: self.sent.load(Ordering::Relaxed),
            received_bytes: self.received.load(Ordering::Relaxed),
            last_heard: Instant::from_nanos(self.heard.load(Ordering::Relaxed)),
            closed: lock(&self.ended).clone(),
        }
    }

    fn close(&self, reason: CloseReason) {
        lock(&self.ended).get_or_insert(reason);
        self.is_ended.store(true, Ordering::Release);
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
        f.debug_struct("ShmLink").field("peer", &self.peer).field("ended", &self.has_ended()).finish_non_exhaustive()
    }
}
