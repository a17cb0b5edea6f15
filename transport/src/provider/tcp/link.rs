//! A link over one TCP connection, or several.
//!
//! Sending and receiving are done by the calling threads, straight from and into their buffers. Keep-alives are sent
//! by the provider's own thread, so they go out however long a device thread computes; they are judged by whoever
//! receives: a socket that stays empty for the silence limit has a dead peer.

use std::fmt;
use std::io::{ErrorKind, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

use super::read::{Lane, Reader, Wire};
use super::record::{MESSAGE, PIECE_BYTES, PING, PONG, PREFIX_BYTES, Prefix, STAMP_BYTES, pieces};
use super::seal::{Seal, TAG_BYTES};
use super::write::{FLAT_BYTES, Outgoing, TAIL_BYTES, Writer, stretch};
use crate::env::{Clock, Instant};
use crate::link::{CloseReason, Gate, Link, LinkHealth, NAP, RecvError, SendError, Vitals};
use crate::provider::ProviderKind;
use crate::provider::links::Living;

/// How long a blocked write sleeps before it looks at its deadline.
const WRITE_NAP: Duration = Duration::from_millis(50);

/// How long a further rail may be quiet before the system asks whether the peer is there.
const KEEPALIVE_TIME: Duration = Duration::from_secs(5);

/// A message that moves more slowly than this, in bytes per second, is given up.
const RATE_MIN: u64 = 128 * 1024;

/// How a link notices that its peer is gone.
#[derive(Debug, Clone, Copy)]
pub(super) struct Liveness {
    pub(super) silence_max: Duration,
}

/// One connection of a link.
pub(super) struct Rail {
    pub(super) stream: TcpStream,
    /// What seals its records, if the link is sealed: those that are sent, those that come.
    pub(super) seals: Option<[Seal; 2]>,
}

pub(super) struct TcpLink {
    /// The first one carries all but the pieces of long messages.
    rails: Vec<TcpStream>,
    sealed: bool,
    address: SocketAddr,
    clock: Arc<dyn Clock>,
    liveness: Liveness,
    send_max: usize,
    writer: Gate<Writer>,
    reader: Gate<Reader>,
    vitals: Vitals,
}

impl TcpLink {
    /// Wraps connections whose ends have proved themselves; there is at least one, and all are sealed or none. `receive_max` is this
    /// end's limit, `send_max` the peer's.
    pub(super) fn new(
        rails: Vec<Rail>,
        address: SocketAddr,
        clock: Arc<dyn Clock>,
        liveness: Liveness,
        [receive_max, send_max]: [u32; 2],
    ) -> std::io::Result<Arc<Self>> {
        let (mut streams, mut seals, mut lanes) = (Vec::new(), Vec::new(), Vec::new());
        for Rail { stream, seals: pair } in rails {
            if !streams.is_empty() {
                // The first rail has notes of its own; on the others nothing goes for as long as messages are short.
                SockRef::from(&stream).set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE_TIME))?;
            }
            stream.set_nonblocking(false)?;
            stream.set_nodelay(true)?;
            stream.set_write_timeout(Some(WRITE_NAP))?;
            streams.push(stream);
            let (sending, receiving) = pair.map_or((None, None), |[sending, receiving]| (Some(sending), Some(receiving)));
            seals.extend(sending);
            lanes.push(Lane::new(receiving));
        }
        Ok(Arc::new(Self {
            rails: streams,
            sealed: !seals.is_empty(),
            address,
            liveness,
            send_max: usize::try_from(send_max).unwrap_or(usize::MAX),
            writer: Gate::new(Writer::new(seals)),
            reader: Gate::new(Reader::new(lanes, usize::try_from(receive_max).unwrap_or(usize::MAX))),
            vitals: Vitals::new(clock.now()),
            clock,
        }))
    }

    #[cfg(test)]
    pub(super) fn rail(&self, rail: usize) -> &TcpStream {
        &self.rails[rail]
    }

    /// Ends the link and gives the reason that stands, which may be an earlier one.
    fn end(&self, reason: CloseReason) -> CloseReason {
        self.close(reason);
        self.vitals.reason()
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
        if !self.vitals.has_ended() {
            self.note(PING, self.clock.now().as_nanos());
        }
    }

    /// Sends a short record if the socket takes it without waiting.
    fn note(&self, kind: u8, stamp: u64) {
        let Some(mut writer) = self.writer.try_enter() else { return };
        if !self.flush_tail_now(&mut writer) {
            return;
        }
        let mut record = [0; PREFIX_BYTES + STAMP_BYTES + TAG_BYTES];
        let (prefix, rest) = record.split_at_mut(PREFIX_BYTES);
        let (body, tag) = rest.split_at_mut(STAMP_BYTES);
        prefix.copy_from_slice(&Prefix { bytes: STAMP_BYTES as u32, kind }.encode());
        body.copy_from_slice(&stamp.to_le_bytes());
        let mut bytes = PREFIX_BYTES + STAMP_BYTES;
        if let Some(seal) = writer.seals.first() {
            let Ok(sealed) = seal.seal(prefix, body) else { return };
            tag.copy_from_slice(&sealed);
            bytes += TAG_BYTES;
        }
        match self.write_now(&record[..bytes]) {
            Ok(0) => {}
            Ok(taken) => {
                writer.tail.keep(std::iter::once(&record[taken..bytes]));
                writer.seals.first_mut().into_iter().for_each(Seal::advance);
            }
            Err(error) => drop(self.end_by(&error)),
        }
    }

    /// Writes to the first rail what it takes at once; 0 if it takes nothing.
    fn write_now(&self, bytes: &[u8]) -> std::io::Result<usize> {
        #[cfg(unix)]
        let taken = rustix::net::send(&self.rails[0], bytes, rustix::net::SendFlags::DONTWAIT).map_err(std::io::Error::from);
        // Elsewhere the write timeout bounds the wait.
        #[cfg(not(unix))]
        let taken = (&self.rails[0]).write(bytes);
        match taken {
            Err(error) if is_timeout(&error) || error.kind() == ErrorKind::Interrupted => Ok(0),
            taken => taken,
        }
    }

    fn flush_tail_now(&self, writer: &mut Writer) -> bool {
        while !writer.tail.owed().is_empty() {
            match self.write_now(writer.tail.owed()) {
                Ok(0) => return false,
                Ok(taken) => writer.tail.taken(taken),
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
        while !writer.tail.owed().is_empty() {
            match (&self.rails[0]).write(writer.tail.owed()) {
                Ok(taken) => writer.tail.taken(taken),
                Err(error) => self.write_stopped(&error, deadline)?,
            }
        }
        Ok(())
    }

    /// What to do about a write that took nothing: go on, or give up by the deadline or for good.
    fn write_stopped(&self, error: &std::io::Error, deadline: Instant) -> Result<(), SendError> {
        if self.vitals.has_ended() {
            return Err(self.vitals.reason().into());
        }
        if error.kind() == ErrorKind::Interrupted {
            return Ok(());
        }
        if !is_timeout(error) {
            return Err(self.end_by(error).into());
        }
        if self.clock.now() < deadline { Ok(()) } else { Err(SendError::Deadline) }
    }

    /// Writes until the deadline. At [`SendError::Deadline`] a part may have been taken.
    fn write(&self, rail: usize, outgoing: &mut Outgoing<'_>, deadline: Instant) -> Result<(), SendError> {
        while !outgoing.is_done() {
            let (slices, count) = outgoing.slices();
            let mut stream = &self.rails[rail];
            let taken = if count == 1 { stream.write(&slices[0]) } else { stream.write_vectored(&slices[..count]) };
            match taken {
                Ok(taken) => outgoing.taken(taken),
                Err(error) => self.write_stopped(&error, deadline)?,
            }
        }
        Ok(())
    }

    /// Writes a message as one record.
    fn write_record(&self, writer: &mut Writer, prefix: &[u8], parts: &[&[u8]], bytes: usize, deadline: Instant) -> Result<(), SendError> {
        let Writer { tail, scratch, .. } = writer;
        let flat = PREFIX_BYTES + bytes;
        let mut outgoing = if flat <= FLAT_BYTES {
            let mut at = 0;
            for part in std::iter::once(&prefix).chain(parts) {
                scratch[at..at + part.len()].copy_from_slice(part);
                at += part.len();
            }
            Outgoing::new(&scratch[..flat], &[], 0..0)
        } else {
            Outgoing::new(prefix, parts, 0..bytes)
        };
        match self.write(0, &mut outgoing, deadline) {
            Err(SendError::Deadline) if !outgoing.has_begun() => Err(SendError::Deadline),
            Err(SendError::Deadline) if outgoing.bytes() <= TAIL_BYTES => {
                tail.keep(outgoing.rest());
                Ok(())
            }
            Err(SendError::Deadline) => Err(self.end(CloseReason::Stalled).into()),
            other => other,
        }
    }

    /// Writes a message piece by piece over all rails.
    fn write_pieces(&self, prefix: &[u8], parts: &[&[u8]], bytes: usize, deadline: Instant) -> Result<(), SendError> {
        for (i, place) in pieces(bytes).enumerate() {
            let mut outgoing = Outgoing::new(if i == 0 { prefix } else { &[] }, parts, place);
            match self.write(i % self.rails.len(), &mut outgoing, deadline) {
                Err(SendError::Deadline) if i == 0 && !outgoing.has_begun() => return Err(SendError::Deadline),
                Err(SendError::Deadline) => return Err(self.end(CloseReason::Stalled).into()),
                other => other?,
            }
        }
        Ok(())
    }

    /// [`TcpLink::write_pieces`], each sealed.
    fn write_sealed(&self, writer: &mut Writer, prefix: &[u8], parts: &[&[u8]], bytes: usize, deadline: Instant) -> Result<(), SendError> {
        let Writer { tail, seals, scratch } = writer;
        scratch[..PREFIX_BYTES].copy_from_slice(prefix);
        for (i, place) in pieces(bytes).enumerate() {
            let rail = i % seals.len();
            let end = PREFIX_BYTES + place.len();
            let mut at = PREFIX_BYTES;
            for part in stretch(parts, place) {
                scratch[at..at + part.len()].copy_from_slice(part);
                at += part.len();
            }
            let tag = seals[rail].seal(prefix, &mut scratch[PREFIX_BYTES..end]).map_err(|reason| self.end(reason))?;
            scratch[end..end + TAG_BYTES].copy_from_slice(&tag);
            let mut outgoing = Outgoing::new(&scratch[if i == 0 { 0 } else { PREFIX_BYTES }..end + TAG_BYTES], &[], 0..0);
            match self.write(rail, &mut outgoing, deadline) {
                // Nothing of it has left, so it was not sealed.
                Err(SendError::Deadline) if i == 0 && !outgoing.has_begun() => return Err(SendError::Deadline),
                Err(SendError::Deadline) if bytes <= PIECE_BYTES && outgoing.bytes() <= TAIL_BYTES => tail.keep(outgoing.rest()),
                Err(SendError::Deadline) => return Err(self.end(CloseReason::Stalled).into()),
                other => other?,
            }
            seals[rail].advance();
        }
        Ok(())
    }
}

impl Wire for TcpLink {
    fn read(&self, rail: usize, lane: &mut Lane, into: &mut [u8], deadline: Instant) -> Result<usize, RecvError> {
        let began = self.clock.now();
        let wait = deadline.since(began).clamp(Duration::from_millis(1), NAP);
        if lane.timeout != Some(wait) {
            self.rails[rail].set_read_timeout(Some(wait)).map_err(|error| self.end_by(&error))?;
            lane.timeout = Some(wait);
        }
        let wanted = into.len();
        let mut stream = &self.rails[rail];
        let result = match wanted {
            0 => stream.read(lane.room()),
            _ => stream.read_vectored(&mut [IoSliceMut::new(into), IoSliceMut::new(lane.room())]),
        };
        let now = self.clock.now();
        match result {
            Ok(0) => Err(self.end(CloseReason::Peer).into()),
            Ok(bytes) => {
                lane.quiet_since = None;
                self.vitals.heard(now);
                let direct = bytes.min(wanted);
                lane.filled(bytes - direct);
                Ok(direct)
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(0),
            Err(error) if is_timeout(&error) => {
                let quiet_since = *lane.quiet_since.get_or_insert(began);
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

    /// What bounds the wait is the silence limit and the slowest rate that is worth waiting for.
    fn patience(&self, bytes: usize) -> Instant {
        let slowest = Duration::from_millis(u64::try_from(bytes).unwrap_or(u64::MAX) / (RATE_MIN / 1000));
        self.clock.now() + slowest + self.liveness.silence_max * 2
    }

    fn noted(&self, kind: u8, stamp: u64) {
        if kind == PING {
            self.note(PONG, stamp);
            return;
        }
        self.vitals.echoed(self.clock.now(), stamp);
    }

    fn misbehaved(&self, what: String) -> RecvError {
        self.end(CloseReason::Misbehaved(what)).into()
    }

    fn stalled(&self) -> RecvError {
        self.end(CloseReason::Stalled).into()
    }
}

impl Living for TcpLink {
    fn has_ended(&self) -> bool {
        self.vitals.has_ended()
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
        if self.vitals.has_ended() {
            return Err(self.vitals.reason().into());
        }
        self.flush_tail(&mut writer, deadline)?;
        let prefix = Prefix { bytes: length, kind: MESSAGE }.encode();
        if self.sealed {
            self.write_sealed(&mut writer, &prefix, parts, bytes, deadline)?;
        } else if self.rails.len() > 1 && bytes > PIECE_BYTES {
            self.write_pieces(&prefix, parts, bytes, deadline)?;
        } else {
            self.write_record(&mut writer, &prefix, parts, bytes, deadline)?;
        }
        self.vitals.sent(bytes);
        Ok(())
    }

    fn recv(&self, buffer: &mut [u8], deadline: Instant) -> Result<usize, RecvError> {
        let Some(mut reader) = self.reader.enter(&*self.clock, deadline) else { return Err(RecvError::Deadline) };
        if self.vitals.has_ended() {
            // What arrived before the peer went is still to be had; after any other end the stream means nothing.
            let reason = self.vitals.reason();
            if reason != CloseReason::Peer {
                return Err(reason.into());
            }
        }
        let bytes = reader.recv(self, buffer, deadline)?;
        self.vitals.received(bytes);
        Ok(bytes)
    }

    fn health(&self) -> LinkHealth {
        self.vitals.health()
    }

    fn close(&self, reason: CloseReason) {
        self.vitals.end(reason);
        // Wakes readers and writers on both ends. It fails where the peer was faster, which is as good.
        for rail in &self.rails {
            drop(rail.shutdown(Shutdown::Both));
        }
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        self.close(CloseReason::Local);
    }
}

impl fmt::Debug for TcpLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpLink")
            .field("peer", &self.address)
            .field("rails", &self.rails.len())
            .field("sealed", &self.sealed)
            .field("ended", &self.vitals.has_ended())
            .finish_non_exhaustive()
    }
}

fn is_timeout(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}
