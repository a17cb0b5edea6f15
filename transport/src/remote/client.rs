//! The holder's end.

use std::sync::Arc;

use super::Denial;
use super::message::{DATA, DONE, GET, HEAD_BYTES, Head, PUT};
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

/// Leased memory of a peer.
#[derive(Debug)]
pub struct RemoteRegion {
    sender: Sender,
    receiver: Receiver,
    lease: RegionLease,
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
        let (sender, receiver) = channel::duplex(link, fence, options, effects)?;
        let piece_bytes = usize::try_from(options.slot_bytes).unwrap_or(usize::MAX).saturating_sub(HEAD_BYTES).max(1);
        Ok(Self { sender, receiver, lease, piece_bytes, window: u64::from(options.slots.max(1)), next_request: 0, next_answer: 0 })
    }

    /// The lease in use.
    pub fn lease(&self) -> &RegionLease {
        &self.lease
    }

    /// Goes on under another term or generation.
    pub fn set_lease(&mut self, lease: RegionLease) {
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
        let first = self.next_request;
        let mut pieces = bytes.chunks(self.piece_bytes);
        let count = pieces.len() as u64;
        let mut at = offset;
        while self.next_answer < first + count {
            if self.may_ask()
                && let Some(piece) = pieces.next()
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

    /// Reads into `into` from `offset` on.
    ///
    /// # Errors
    /// [`TransferError`].
    pub fn get(&mut self, offset: u64, into: &mut [u8], deadline: Instant) -> Result<(), TransferError> {
        self.check(offset, into.len())?;
        let first = self.next_request;
        let piece = self.piece_bytes;
        let count = into.len().div_ceil(piece) as u64;
        let (mut asked, mut got) = (0, 0);
        while self.next_answer < first + count {
            if self.may_ask() && asked < into.len() {
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

    fn head(&self, offset: u64, bytes: usize) -> Head {
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
