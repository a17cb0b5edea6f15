//! A link over one TCP connection.
//!
//! The byte stream is cut into records: `length u32 │ kind u8 │ zero 3`, little-endian, then `length` bytes. A record is
//! a message, or a keep-alive ([`PING`]) or its echo ([`PONG`]), which carry the sender's clock.
//!
//! Sending and receiving are done by the calling threads, straight from and into their buffers. Keep-alives are sent
//! by the provider's own thread, so they go out however long a device thread computes; they are judged by whoever
//! receives: a socket that stays empty for the silence limit has a dead peer.

use std::fmt;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::env::{Clock, Instant};
use crate::link::{CloseReason, Gate, Link, LinkHealth, NAP, RecvError, SendError, lock};
use crate::provider::ProviderKind;

const PREFIX_BYTES: usize = 8;
const STAMP_BYTES: usize = 8;
const NOTE_BYTES: usize = PREFIX_BYTES + STAMP_BYTES;

const MESSAGE: u8 = 1;
const PING: u8 = 2;
const PONG: u8 = 3;

/// Read ahead, so that a short message takes one system call.
const READ_AHEAD_BYTES: usize = 16 * 1024;

/// A record this short may be left half-written for the next sender to finish.
const TAIL_BYTES: usize = 256;

/// Parts of a message that go into one system call.
const PARTS_AT_ONCE: usize = 16;

/// How long a blocked write sleeps before it looks at its deadline.
const WRITE_NAP: Duration = Duration::from_millis(50);

/// A message that moves more slowly than this, in bytes per second, is given up.
const RATE_MIN: u64 = 128 * 1024;

/// The end of a short record that the system did not take yet.
struct Writer {
    tail: [u8; TAIL_BYTES],
    start: usize,
    end: usize,
}

struct Reader {
    ahead: Box<[u8]>,
    start: usize,
    end: usize,
    /// Since when the socket has been empty, as far as a reader saw.
    quiet_since: Option<Instant>,
    /// What the socket's read timeout is set to.
    timeout: Duration,
}

/// How a link notices that its peer is gone.
#[derive(Debug, Clone, Copy)]
pub(super) struct Liveness {
    pub(super) silence_max: Duration,
}

pub(super) struct TcpLink {
    stream: TcpStream,
    address: SocketAddr,
    clock: Arc<dyn Clock>,
    liveness: Liveness,
    receive_max: usize,
    send_max: usize,
    writer: Gate<Writer>,
    reader: Gate<Reader>,
    ended: Mutex<Option<CloseReason>>,
    /// Set after `ended`, so that the loops need no lock.
    is_ended: AtomicBool,
    sent: AtomicU64,
    received: AtomicU64,
    heard: AtomicU64,
    /// Smoothed round trip in nanoseconds; 0 before the first.
    rtt: AtomicU64,
}

/// The parts of a record, and how much of it is still to be written.
struct Outgoing<'a> {
    prefix: [u8; PREFIX_BYTES],
    parts: &'a [&'a [u8]],
    bytes: usize,
    done: usize,
}

impl Outgoing<'_> {
    fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::once(&self.prefix[..]).chain(self.parts.iter().copied()).scan(self.done, |skip, part| {
            let from = (*skip).min(part.len());
            *skip -= from;
            Some(&part[from..])
        })
    }
}

fn prefix(bytes: u32, kind: u8) -> [u8; PREFIX_BYTES] {
    let mut out = [0; PREFIX_BYTES];
    out[..4].copy_from_slice(&bytes.to_le_bytes());
    out[4] = kind;
    out
}

impl TcpLink {
    /// Wraps a connection whose ends have proved themselves. `receive_max` is this end's limit, `send_max` the peer's.
    pub(super) fn new(
        stream: TcpStream,
        address: SocketAddr,
        clock: Arc<dyn Clock>,
        liveness: Liveness,
        [receive_max, send_max]: [u32; 2],
    ) -> std::io::Result<Arc<Self>> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(WRITE_NAP))?;
        stream.set_read_timeout(Some(NAP))?;
        let reader = Reader { ahead: vec![0; READ_AHEAD_BYTES].into_boxed_slice(), start: 0, end: 0, quiet_since: None, timeout: NAP };
        Ok(Arc::new(Self {
            stream,
            address,
            liveness,
            receive_max: usize::try_from(receive_max).unwrap_or(usize::MAX),
            send_max: usize::try_from(send_max).unwrap_or(usize::MAX),
            writer: Gate::new(Writer { tail: [0; TAIL_BYTES], start: 0, end: 0 }),
            reader: Gate::new(reader),
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

    fn end_by(&self, error: &std::io::Error) -> CloseReason {
        self.end(match error.kind() {
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::NotConnected => {
                CloseReason::Peer
            }
            _ => CloseReason::Broken(error.to_string()),
        })
    }

    /// Sends a keep-alive unless somebody is sending anyway, which serves as well. Never waits.
    pub(super) fn ping(&self) {
        if !self.has_ended() {
            self.note(PING, self.clock.now().as_nanos());
        }
    }

    /// Sends a short record if the socket takes it without waiting.
    fn note(&self, kind: u8, stamp: u64) {
        let Some(mut writer) = self.writer.try_enter() else { return };
        if !self.flush_tail_now(&mut writer) {
            return;
        }
        let mut record = [0; NOTE_BYTES];
        record[..PREFIX_BYTES].copy_from_slice(&prefix(STAMP_BYTES as u32, kind));
        record[PREFIX_BYTES..].copy_from_slice(&stamp.to_le_bytes());
        match self.write_now(&record) {
            Ok(0) => {}
            Ok(taken) => writer.keep(&[&record[taken..]]),
            Err(error) => drop(self.end_by(&error)),
        }
    }

    /// Writes what the socket takes at once; 0 if it takes nothing.
    fn write_now(&self, bytes: &[u8]) -> std::io::Result<usize> {
        #[cfg(unix)]
        let taken = rustix::net::send(&self.stream, bytes, rustix::net::SendFlags::DONTWAIT).map_err(std::io::Error::from);
        // Elsewhere the write timeout bounds the wait.
        #[cfg(not(unix))]
        let taken = (&self.stream).write(bytes);
        match taken {
            Err(error) if is_timeout(&error) || error.kind() == ErrorKind::Interrupted => Ok(0),
            taken => taken,
        }
    }

    fn flush_tail_now(&self, writer: &mut Writer) -> bool {
        while writer.start < writer.end {
            match self.write_now(&writer.tail[writer.start..writer.end]) {
                Ok(0) => return false,
                Ok(taken) => writer.start += taken,
                Err(error) => {
                    self.end_by(&error);
                    return false;
                }
            }
        }
        true
    }

    /// Finishes the record before.
    fn flush_tail(&self, writer: &mut Writer, deadline: Instant) -> Result<(), SendError> {
        while writer.start < writer.end {
            match (&self.stream).write(&writer.tail[writer.start..writer.end]) {
                Ok(taken) => writer.start += taken,
                Err(error) => self.write_stopped(&error, deadline)?,
            }
        }
        Ok(())
    }

    /// What to do about a write that took nothing: go on, or give up by the deadline or for good.
    fn write_stopped(&self, error: &std::io::Error, deadline: Instant) -> Result<(), SendError> {
        if self.has_ended() {
            return Err(self.reason().into());
        }
        if error.kind() == ErrorKind::Interrupted {
            return Ok(());
        }
        if !is_timeout(error) {
            return Err(self.end_by(error).into());
        }
        if self.clock.now() < deadline { Ok(()) } else { Err(SendError::Deadline) }
    }

    fn write_record(&self, writer: &mut Writer, mut record: Outgoing<'_>, deadline: Instant) -> Result<(), SendError> {
        while record.done < record.bytes {
            let mut slices = [IoSlice::new(&[]); PARTS_AT_ONCE];
            let mut count = 0;
            for piece in record.pieces().filter(|piece| !piece.is_empty()).take(PARTS_AT_ONCE) {
                slices[count] = IoSlice::new(piece);
                count += 1;
            }
            let taken = (&self.stream).write_vectored(&slices[..count]);
            match taken {
                Ok(taken) => record.done += taken,
                Err(error) => match self.write_stopped(&error, deadline) {
                    Ok(()) => {}
                    Err(SendError::Deadline) if record.done == 0 => return Err(SendError::Deadline),
                    Err(SendError::Deadline) if record.bytes <= TAIL_BYTES => {
                        writer.start = 0;
                        writer.end = 0;
                        for piece in record.pieces() {
                            writer.keep(&[piece]);
                        }
                        return Ok(());
                    }
                    Err(SendError::Deadline) => return Err(self.end(CloseReason::Stalled).into()),
                    Err(other) => return Err(other),
                },
            }
        }
        Ok(())
    }

    /// Reads into `into` and then into the read-ahead buffer. Says how much went into `into`; 0 only if all of what
    /// came, if anything, is read-ahead or nothing came by `deadline`.
    fn read(&self, reader: &mut Reader, into: &mut [u8], deadline: Instant) -> Result<usize, RecvError> {
        if reader.start == reader.end {
            reader.start = 0;
            reader.end = 0;
        } else if reader.end == reader.ahead.len() {
            reader.ahead.copy_within(reader.start..reader.end, 0);
            reader.end -= reader.start;
            reader.start = 0;
        }
        let began = self.clock.now();
        let wait = deadline.since(began).clamp(Duration::from_millis(1), NAP);
        if wait != reader.timeout {
            self.stream.set_read_timeout(Some(wait)).map_err(|error| self.end_by(&error))?;
            reader.timeout = wait;
        }
        let wanted = into.len();
        let result = {
            let ahead = &mut reader.ahead[reader.end..];
            (&self.stream).read_vectored(&mut [IoSliceMut::new(into), IoSliceMut::new(ahead)])
        };
        let now = self.clock.now();
        match result {
            Ok(0) => Err(self.end(CloseReason::Peer).into()),
            Ok(bytes) => {
                reader.quiet_since = None;
                self.heard.store(now.as_nanos(), Ordering::Relaxed);
                let direct = bytes.min(wanted);
                reader.end += bytes - direct;
                Ok(direct)
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(0),
            Err(error) if is_timeout(&error) => {
                let quiet_since = *reader.quiet_since.get_or_insert(began);
                let silence = now.since(quiet_since);
                if silence > self.liveness.silence_max {
                    let silence_ms = u64::try_from(silence.as_millis()).unwrap_or(u64::MAX);
                    return Err(self.end(CloseReason::Silent { silence_ms }).into());
                }
                if now < deadline { Ok(0) } else { Err(RecvError::Deadline) }
            }
            Err(error) => Err(self.end_by(&error).into()),
        }
    }

    /// The next record's length and kind, once its prefix is there.
    fn next_prefix(&self, reader: &mut Reader, deadline: Instant) -> Result<(usize, u8), RecvError> {
        while reader.end - reader.start < PREFIX_BYTES {
            self.read(reader, &mut [], deadline)?;
        }
        let prefix = &reader.ahead[reader.start..reader.start + PREFIX_BYTES];
        let length = u32::from_le_bytes([prefix[0], prefix[1], prefix[2], prefix[3]]);
        if prefix[5..] != [0; 3] {
            return Err(self.misbehaved("a record's reserved bytes are in use".to_owned()));
        }
        Ok((usize::try_from(length).unwrap_or(usize::MAX), prefix[4]))
    }

    fn misbehaved(&self, what: String) -> RecvError {
        self.end(CloseReason::Misbehaved(what)).into()
    }

    /// Reads the rest of a message, of which nothing but the prefix has been taken.
    fn read_body(&self, reader: &mut Reader, body: &mut [u8]) -> Result<(), RecvError> {
        // A message that has begun is finished, or the link ends: the stream cannot be taken up in its middle. What
        // bounds the wait is the silence limit and the slowest rate that is worth waiting for.
        let slowest = Duration::from_millis(u64::try_from(body.len()).unwrap_or(u64::MAX) / (RATE_MIN / 1000));
        let deadline = self.clock.now() + slowest + self.liveness.silence_max * 2;
        let bytes = body.len();
        let ready = bytes.min(reader.end - reader.start);
        body[..ready].copy_from_slice(&reader.ahead[reader.start..reader.start + ready]);
        reader.start += ready;
        let mut got = ready;
        while got < bytes {
            match self.read(reader, &mut body[got..], deadline) {
                Ok(more) => got += more,
                Err(RecvError::Deadline) => return Err(self.end(CloseReason::Stalled).into()),
                Err(other) => return Err(other),
            }
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

impl Writer {
    /// Leaves bytes for the next sender. Called only for records of at most [`TAIL_BYTES`], one at a time.
    fn keep(&mut self, pieces: &[&[u8]]) {
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
        for piece in pieces {
            self.tail[self.end..self.end + piece.len()].copy_from_slice(piece);
            self.end += piece.len();
        }
    }
}

impl Link for TcpLink {
    fn provider(&self) -> ProviderKind {
        ProviderKind::Tcp
    }

    fn peer(&self) -> String {
        self.address.to_string()
    }

    fn message_bytes_max(&self) -> usize {
        self.send_max
    }

    fn send(&self, parts: &[&[u8]], deadline: Instant) -> Result<(), SendError> {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        let length = u32::try_from(bytes).ok().filter(|_| bytes <= self.send_max);
        let Some(length) = length else { return Err(SendError::TooLong { bytes, limit: self.send_max }) };
        let Some(mut writer) = self.writer.enter(&*self.clock, deadline) else { return Err(SendError::Deadline) };
        if self.has_ended() {
            return Err(self.reason().into());
        }
        self.flush_tail(&mut writer, deadline)?;
        let record = Outgoing { prefix: prefix(length, MESSAGE), parts, bytes: PREFIX_BYTES + bytes, done: 0 };
        self.write_record(&mut writer, record, deadline)?;
        self.sent.fetch_add(u64::from(length), Ordering::Relaxed);
        Ok(())
    }

    fn recv(&self, buffer: &mut [u8], deadline: Instant) -> Result<usize, RecvError> {
        let Some(mut reader) = self.reader.enter(&*self.clock, deadline) else { return Err(RecvError::Deadline) };
        if self.has_ended() {
            // What arrived before the peer went is still to be had; after any other end the stream means nothing.
            let reason = self.reason();
            if reason != CloseReason::Peer {
                return Err(reason.into());
            }
        }
        let reader = &mut *reader;
        loop {
            let (bytes, kind) = self.next_prefix(reader, deadline)?;
            match kind {
                MESSAGE => {
                    let limit = buffer.len().min(self.receive_max);
                    if bytes > limit {
                        return Err(self.misbehaved(format!("a message of {bytes} bytes is announced where at most {limit} are agreed")));
                    }
                    reader.start += PREFIX_BYTES;
                    self.read_body(reader, &mut buffer[..bytes])?;
                    self.received.fetch_add(bytes as u64, Ordering::Relaxed);
                    return Ok(bytes);
                }
                PING | PONG if bytes == STAMP_BYTES => {
                    while reader.end - reader.start < NOTE_BYTES {
                        self.read(reader, &mut [], deadline)?;
                    }
                    let mut stamp = [0; STAMP_BYTES];
                    stamp.copy_from_slice(&reader.ahead[reader.start + PREFIX_BYTES..reader.start + NOTE_BYTES]);
                    reader.start += NOTE_BYTES;
                    self.note_arrived(kind, u64::from_le_bytes(stamp));
                }
                _ => return Err(self.misbehaved(format!("a record of kind {kind} and {bytes} bytes is none that this version knows"))),
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
        // Wakes readers and writers on both ends. It fails where the peer was faster, which is as good.
        drop(self.stream.shutdown(Shutdown::Both));
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        self.close(CloseReason::Local);
    }
}

impl fmt::Debug for TcpLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpLink").field("peer", &self.address).field("ended", &self.has_ended()).finish_non_exhaustive()
    }
}

fn is_timeout(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}
