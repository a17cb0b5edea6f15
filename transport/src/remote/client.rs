//! The holder's end.

use std::sync::Arc;

use super::Denial;
use super::message::{DATA, DONE, GET, HEAD_BYTES, Head, NOTIFY, PUT, TIDINGS_BYTES, Tidings};
use super::native::Native;
use crate::Effects;
use crate::access::Handle;
use crate::channel::{self, ChannelCloser, ChannelOptions, OpenError, Receiver, RecvError, SendError, Sender};
use crate::env::Instant;
use crate::frame::{Fence, TermTag};
use crate::link::Link;

/// Which leased memory to use, and as whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionLease {
    /// The owner's name for it.
    pub handle: Handle,
    /// Its length in bytes.
    pub bytes: u64,
    /// The term under which this node holds it.
    pub term: TermTag,
    /// Generation of writes: raised by the holder whenever it goes to another link, so that what is late on the old one is
    /// refused.
    pub generation: u64,
}

/// Why bytes were not moved, or not all.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The range is not inside the lease. Nothing was sent.
    #[error("{bytes} bytes at {offset} reach outside a lease of {lease_bytes}")]
    Bounds {
        /// Where it was to begin.
        offset: u64,
        /// How many bytes.
        bytes: usize,
        /// Length of the lease.
        lease_bytes: u64,
    },
    /// The owner refused. Of a range that takes several messages, some may have been moved before.
    #[error("the owner of the memory refused: {0}")]
    Denied(#[from] Denial),
    /// The request did not go out by the deadline, or at all.
    #[error("the request could not be sent: {0}")]
    Send(#[from] SendError),
    /// No answer by the deadline, or at all. The bytes may or may not have been written; putting them again is harmless.
    #[error("no answer from the owner of the memory: {0}")]
    Recv(#[from] RecvError),
    /// The owner's answer makes no sense.
    #[error("the owner of the memory answered something else than was asked")]
    Answer,
}

/// How bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Way {
    /// The owner's thread moves them.
    Served,
    /// This node moves them itself, through a window onto the owner's memory.
    Native,
}

/// Leased memory of a peer.
#[derive(Debug)]
pub struct RemoteRegion {
    pub(super) effects: Effects,
    pub(super) native: Native,
    sender: Sender,
    receiver: Receiver,
    pub(super) lease: RegionLease,
    /// Longest piece of a range that one message carries.
    piece_bytes: usize,
    /// Requests that may be under way at once.
    window: u64,
    next_request: u64,
    /// The request whose answer is next. Those before the present call's first are of calls that gave up.
    next_answer: u64,
}

impl RemoteRegion {
    /// Uses `lease` over `link`, whose other end is served by a [`RegionServer`](super::RegionServer) with the same fence
    /// and options. A slot carries 64 bytes less than its length.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(
        link: Arc<dyn Link>,
        fence: Fence,
        options: ChannelOptions,
        lease: RegionLease,
        effects: &Effects,
    ) -> Result<Self, OpenError> {
        let piece_bytes = usize::try_from(options.slot_bytes).unwrap_or(usize::MAX).saturating_sub(HEAD_BYTES).max(1);
        let native = Native::over(&link, piece_bytes);
        let (sender, receiver) = channel::duplex(link, fence, options, effects)?;
        let window = u64::from(options.slots.max(1));
        Ok(Self { effects: effects.clone(), native, sender, receiver, lease, piece_bytes, window, next_request: 0, next_answer: 0 })
    }

    /// Lets the owner's thread do everything, even where this node could.
    #[must_use]
    pub fn served(mut self) -> Self {
        self.native.forgo();
        self
    }

    /// How the bytes of the last `put` or `get` went.
    pub fn way(&self) -> Way {
        if self.native.is_open() { Way::Native } else { Way::Served }
    }

    /// The lease in use.
    pub fn lease(&self) -> &RegionLease {
        &self.lease
    }

    /// Goes on with another lease, or under another term or generation.
    pub fn set_lease(&mut self, lease: RegionLease) {
        if self.lease != lease {
            self.native.shut();
        }
        self.lease = lease;
    }

    /// A handle with which another thread can end the link.
    pub fn closer(&self) -> ChannelCloser {
        self.receiver.closer()
    }

    /// Writes `bytes` at `offset` from the start of the lease. When it returns, they are in the owner's memory.
    ///
    /// # Errors
    /// [`TransferError`].
    pub fn put(&mut self, offset: u64, bytes: &[u8], deadline: Instant) -> Result<(), TransferError> {
        self.check(offset, bytes.len())?;
        let done = self.put_native(offset, bytes, deadline)?;
        if done == bytes.len() && done > 0 {
            return Ok(());
        }
        self.put_served(offset + done as u64, &bytes[done..], deadline)
    }

    /// Reads into `into` from `offset` on.
    ///
    /// # Errors
    /// [`TransferError`].
    pub fn get(&mut self, offset: u64, into: &mut [u8], deadline: Instant) -> Result<(), TransferError> {
        self.check(offset, into.len())?;
        let mut done = 0;
        if !into.is_empty()
            && let Some((window, effects)) = self.window(deadline)?
        {
            done = window.get(offset, into, &*effects.clock, deadline);
            if done == into.len() {
                return Ok(());
            }
            self.leave_window(deadline)?;
        }
        self.get_served(offset + done as u64, &mut into[done..], deadline)
    }

    /// Writes `bytes` at `offset` and then tells the owner `number` and the range. Owners are told in the order of these calls, and
    /// find the bytes there when they are. `bytes` may be empty: what was put before is there, too.
    ///
    /// # Errors
    /// [`TransferError`]. Where no answer came the owner may have been told, or may be yet.
    pub fn notify(&mut self, offset: u64, bytes: &[u8], number: u64, deadline: Instant) -> Result<(), TransferError> {
        self.check(offset, bytes.len())?;
        let mut done = self.put_native(offset, bytes, deadline)?;
        let room = self.piece_bytes.saturating_sub(TIDINGS_BYTES);
        if bytes.len() - done > room {
            let early = bytes.len() - room;
            self.put_served(offset + done as u64, &bytes[done..early], deadline)?;
            done = early;
        }
        let tidings = Tidings { number, start: offset, bytes: bytes.len() as u64 }.encode();
        let head = self.head(offset + done as u64, bytes.len() - done);
        match self.ask(NOTIFY, &head, &[&tidings, &bytes[done..]], deadline)? {
            DONE => Ok(()),
            _ => Err(TransferError::Answer),
        }
    }

    /// Writes through the window, if there is one, and says how much of `bytes` that was.
    fn put_native(&mut self, offset: u64, bytes: &[u8], deadline: Instant) -> Result<usize, TransferError> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let done = match self.window(deadline)? {
            Some((window, effects)) if window.writable() => window.put(offset, bytes, &*effects.clock, deadline),
            // What may only be read stays open for that.
            Some(_) => return Ok(0),
            None => 0,
        };
        if done < bytes.len() {
            self.leave_window(deadline)?;
        }
        Ok(done)
    }

    /// The window did not let something through: either it is too late, or it has ended and the owner has to say why.
    fn leave_window(&mut self, deadline: Instant) -> Result<(), TransferError> {
        if self.native.is_open() {
            if self.effects.clock.now() >= deadline {
                return Err(RecvError::Deadline.into());
            }
            self.native.shut();
        }
        Ok(())
    }

    /// One request and its answer's kind.
    pub(super) fn ask(&mut self, kind: u8, head: &Head, body: &[&[u8]], deadline: Instant) -> Result<u8, TransferError> {
        self.ask_into(kind, head, body, &mut [], deadline).map(|(kind, _)| kind)
    }

    /// One request and its answer's kind, with how many bytes came behind the answer's head. As many as fit are copied.
    pub(super) fn ask_into(
        &mut self,
        kind: u8,
        head: &Head,
        body: &[&[u8]],
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<(u8, usize), TransferError> {
        let encoded = head.encode();
        let mut parts: Vec<&[u8]> = vec![&encoded];
        parts.extend(body);
        while !self.may_ask() {
            self.answer(deadline)?;
        }
        self.sender.send(kind, &parts, deadline)?;
        self.next_request += 1;
        loop {
            let (kind, answer, body) = self.answer(deadline)?;
            if answer.request != head.request {
                continue;
            }
            if let Some(denial) = answer.denial {
                return Err(denial.into());
            }
            let copied = body.len().min(into.len());
            into[..copied].copy_from_slice(&body[..copied]);
            return Ok((kind, body.len()));
        }
    }

    fn put_served(&mut self, offset: u64, bytes: &[u8], deadline: Instant) -> Result<(), TransferError> {
        let first = self.next_request;
        let mut pieces = bytes.chunks(self.piece_bytes);
        // A put of nothing asks, too.
        let mut nothing = bytes.is_empty().then_some(bytes);
        let count = (pieces.len() as u64).max(1);
        let mut at = offset;
        while self.next_answer < first + count {
            if self.may_ask()
                && let Some(piece) = nothing.take().or_else(|| pieces.next())
            {
                let head = self.head(at, piece.len());
                self.sender.send(PUT, &[&head.encode(), piece], deadline)?;
                self.next_request += 1;
                at += piece.len() as u64;
                continue;
            }
            let (kind, head, _) = self.answer(deadline)?;
            if head.request < first {
                continue;
            }
            if kind != DONE {
                return Err(TransferError::Answer);
            }
            if let Some(denial) = head.denial {
                return Err(denial.into());
            }
        }
        Ok(())
    }

    fn get_served(&mut self, offset: u64, into: &mut [u8], deadline: Instant) -> Result<(), TransferError> {
        let first = self.next_request;
        let piece = self.piece_bytes;
        let count = (into.len().div_ceil(piece) as u64).max(1);
        let (mut asked, mut got) = (0, 0);
        while self.next_answer < first + count {
            if self.may_ask() && (asked < into.len() || self.next_request == first) {
                let bytes = piece.min(into.len() - asked);
                let head = self.head(offset + asked as u64, bytes);
                self.sender.send(GET, &[&head.encode()], deadline)?;
                self.next_request += 1;
                asked += bytes;
                continue;
            }
            let (kind, head, body) = self.answer(deadline)?;
            if head.request < first {
                continue;
            }
            if let Some(denial) = head.denial {
                return Err(denial.into());
            }
            let bytes = piece.min(into.len() - got);
            if kind != DATA || body.len() != bytes {
                return Err(TransferError::Answer);
            }
            into[got..got + bytes].copy_from_slice(body);
            got += bytes;
        }
        Ok(())
    }

    fn check(&self, offset: u64, bytes: usize) -> Result<(), TransferError> {
        let end = u64::try_from(bytes).ok().and_then(|bytes| offset.checked_add(bytes));
        match end {
            Some(end) if end <= self.lease.bytes => Ok(()),
            _ => Err(TransferError::Bounds { offset, bytes, lease_bytes: self.lease.bytes }),
        }
    }

    pub(super) fn head(&self, offset: u64, bytes: usize) -> Head {
        let RegionLease { handle, term, generation, .. } = self.lease;
        // A piece fits a slot, whose length is a u32.
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        Head { request: self.next_request, handle, term, generation, offset, bytes, denial: None }
    }

    /// Whether one more request may be under way: never so many that their answers would not fit this end's slots,
    /// or this end would wait for the owner's slots while the owner waits for its own.
    fn may_ask(&self) -> bool {
        self.next_request - self.next_answer < self.window
    }

    /// The next answer. They come in the order of the requests.
    fn answer(&mut self, deadline: Instant) -> Result<(u8, Head, &[u8]), TransferError> {
        let received = self.receiver.recv(deadline)?;
        let (head, body) = Head::decode(received.payload()).ok_or(TransferError::Answer)?;
        if head.request != self.next_answer {
            return Err(TransferError::Answer);
        }
        self.next_answer += 1;
        Ok((received.kind(), head, body))
    }
}
