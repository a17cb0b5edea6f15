//! Taking records out of the byte streams of a link.
//!
//! Pure but for [`Wire`], which brings bytes: the link's sockets, or what a test or a fuzzer makes up.

use std::time::Duration;

use crate::env::Instant;
use crate::link::RecvError;

use super::record::{MESSAGE, PING, PONG, PREFIX_BYTES, Prefix, STAMP_BYTES, pieces};
use super::seal::{Damaged, Seal, TAG_BYTES};

/// Read ahead, so that a short message takes one system call.
pub(super) const READ_AHEAD_BYTES: usize = 16 * 1024;

/// Where bytes come from.
pub(super) trait Wire {
    /// Reads from a rail into `into` and then into what it has ahead. Says how much went into `into`; 0 if all of what came, if
    /// anything, is ahead, or if nothing came and it is not yet time to give up.
    ///
    /// # Errors
    /// [`RecvError`]; at the deadline nothing is lost.
    fn read(&self, rail: usize, lane: &mut Lane, into: &mut [u8], deadline: Instant) -> Result<usize, RecvError>;

    /// Until when a message of this length that has begun must be there.
    fn patience(&self, bytes: usize) -> Instant;

    /// A keep-alive or its echo came.
    fn noted(&self, kind: u8, stamp: u64);

    /// The peer does what it must not, or somebody else does.
    fn misbehaved(&self, what: String) -> RecvError;

    /// A message that has begun does not go on.
    fn stalled(&self) -> RecvError;
}

/// One rail's read-ahead buffer, and the key that opens what it holds.
pub(super) struct Lane {
    ahead: Box<[u8]>,
    start: usize,
    end: usize,
    seal: Option<Seal>,
    /// Since when the socket has been empty, as far as a reader saw.
    pub(super) quiet_since: Option<Instant>,
    /// What the socket's read timeout is set to; none if that is not known.
    pub(super) timeout: Option<Duration>,
}

impl Lane {
    pub(super) fn new(seal: Option<Seal>) -> Self {
        Self { ahead: vec![0; READ_AHEAD_BYTES].into_boxed_slice(), start: 0, end: 0, seal, quiet_since: None, timeout: None }
    }

    fn bytes(&self) -> usize {
        self.end - self.start
    }

    /// Room behind what is ahead. There always is some: no more is ever waited for than a note, which is short.
    pub(super) fn room(&mut self) -> &mut [u8] {
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        } else if self.end == self.ahead.len() {
            self.ahead.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        &mut self.ahead[self.end..]
    }

    /// So many bytes were put into [`Lane::room`].
    pub(super) fn filled(&mut self, bytes: usize) {
        self.end += bytes;
    }

    /// The next bytes, which stay.
    fn peek<const N: usize>(&self) -> Option<[u8; N]> {
        self.ahead[self.start..self.end].first_chunk().copied()
    }

    fn take(&mut self, into: &mut [u8]) -> usize {
        let bytes = into.len().min(self.bytes());
        into[..bytes].copy_from_slice(&self.ahead[self.start..self.start + bytes]);
        self.start += bytes;
        bytes
    }

    fn open(&mut self, prefix: &[u8], piece: &mut [u8], tag: [u8; TAG_BYTES]) -> Result<(), Damaged> {
        self.seal.as_mut().map_or(Ok(()), |seal| seal.open(prefix, piece, tag))
    }
}

/// The receiving half of a link.
pub(super) struct Reader {
    lanes: Vec<Lane>,
    sealed: bool,
    receive_max: usize,
}

impl Reader {
    /// `lanes` are those of the rails, the first rail's first; there is at least one.
    pub(super) fn new(lanes: Vec<Lane>, receive_max: usize) -> Self {
        Self { sealed: lanes.iter().any(|lane| lane.seal.is_some()), lanes, receive_max }
    }

    /// The next message, into the start of `buffer`.
    pub(super) fn recv(&mut self, wire: &impl Wire, buffer: &mut [u8], deadline: Instant) -> Result<usize, RecvError> {
        loop {
            self.wait(wire, PREFIX_BYTES, deadline)?;
            let Some(prefix) = self.lanes[0].peek::<PREFIX_BYTES>() else { continue };
            let Some(Prefix { bytes, kind }) = Prefix::decode(prefix) else {
                return Err(wire.misbehaved("a record's reserved bytes are in use".to_owned()));
            };
            let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
            match kind {
                MESSAGE => {
                    let limit = buffer.len().min(self.receive_max);
                    if bytes > limit {
                        return Err(wire.misbehaved(format!("a message of {bytes} bytes is announced where at most {limit} are agreed")));
                    }
                    self.lanes[0].start += PREFIX_BYTES;
                    self.message(wire, &prefix, &mut buffer[..bytes])?;
                    return Ok(bytes);
                }
                PING | PONG if bytes == STAMP_BYTES => {
                    let tail = if self.sealed { TAG_BYTES } else { 0 };
                    self.wait(wire, PREFIX_BYTES + STAMP_BYTES + tail, deadline)?;
                    let lane = &mut self.lanes[0];
                    lane.start += PREFIX_BYTES;
                    let (mut stamp, mut tag) = ([0; STAMP_BYTES], [0; TAG_BYTES]);
                    lane.take(&mut stamp);
                    lane.take(&mut tag[..tail]);
                    lane.open(&prefix, &mut stamp, tag).map_err(|damaged| damaged_record(wire, damaged))?;
                    wire.noted(kind, u64::from_le_bytes(stamp));
                }
                _ => return Err(wire.misbehaved(format!("a record of kind {kind} and {bytes} bytes is none that this version knows"))),
            }
        }
    }

    /// Waits until so much of the first rail is ahead.
    fn wait(&mut self, wire: &impl Wire, bytes: usize, deadline: Instant) -> Result<(), RecvError> {
        while self.lanes[0].bytes() < bytes {
            wire.read(0, &mut self.lanes[0], &mut [], deadline)?;
        }
        Ok(())
    }

    /// Reads a message, of which nothing but the prefix has been taken: it is finished, or the link ends, because the stream cannot
    /// be taken up in its middle.
    fn message(&mut self, wire: &impl Wire, prefix: &[u8; PREFIX_BYTES], body: &mut [u8]) -> Result<(), RecvError> {
        let deadline = wire.patience(body.len());
        if !self.sealed && self.lanes.len() == 1 {
            return fill(wire, 0, &mut self.lanes[0], body, deadline);
        }
        let rails = self.lanes.len();
        for (i, place) in pieces(body.len()).enumerate() {
            let rail = i % rails;
            let lane = &mut self.lanes[rail];
            let piece = &mut body[place];
            fill(wire, rail, lane, piece, deadline)?;
            if self.sealed {
                let mut tag = [0; TAG_BYTES];
                fill(wire, rail, lane, &mut tag, deadline)?;
                lane.open(prefix, piece, tag).map_err(|damaged| damaged_record(wire, damaged))?;
            }
        }
        Ok(())
    }
}

/// Reads exactly as much as `into` holds.
fn fill(wire: &impl Wire, rail: usize, lane: &mut Lane, into: &mut [u8], deadline: Instant) -> Result<(), RecvError> {
    let mut got = lane.take(into);
    while got < into.len() {
        match wire.read(rail, lane, &mut into[got..], deadline) {
            Ok(0) => got += lane.take(&mut into[got..]),
            Ok(more) => got += more,
            Err(RecvError::Deadline) => return Err(wire.stalled()),
            Err(other) => return Err(other),
        }
    }
    Ok(())
}

fn damaged_record(wire: &impl Wire, _: Damaged) -> RecvError {
    wire.misbehaved("an encrypted record is damaged, forged, repeated or out of its place".to_owned())
}
