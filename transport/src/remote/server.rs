//! The owner's end.

use std::sync::Arc;
use std::time::Duration;

use super::Denial;
use super::message::{DATA, DONE, GET, HEAD_BYTES, Head, PUT};
use super::slab::Slab;
use crate::Effects;
use crate::access::{AccessTable, Operation};
use crate::channel::{self, Broken, ChannelCloser, ChannelOptions, OpenError, Receiver, RecvError, SendError, Sender};
use crate::frame::Fence;
use crate::link::Link;

/// How long to wait for a request before waiting again. What ends the link also ends the wait.
const IDLE: Duration = Duration::from_secs(3600);

/// A client that does not take its answers for this long loses its link.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Serves a slab to one peer over one link.
#[derive(Debug)]
pub struct RegionServer {
    effects: Effects,
    sender: Sender,
    receiver: Receiver,
    peer: [u8; 32],
    table: AccessTable,
    slab: Slab,
    /// Bytes on their way out, as many as fit a message.
    outgoing: Vec<u8>,
}

impl RegionServer {
    /// Prepares to serve `slab` by the rules of `table` to the node whose public key is `peer`. Whoever made the link has
    /// to know that: it is the node that the link's ticket was handed to.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(
        link: Arc<dyn Link>,
        fence: Fence,
        options: ChannelOptions,
        peer: [u8; 32],
        table: AccessTable,
        slab: Slab,
        effects: &Effects,
    ) -> Result<Self, OpenError> {
        let (sender, receiver) = channel::duplex(link, fence, options, effects)?;
        let outgoing = vec![0; usize::try_from(options.slot_bytes).unwrap_or(usize::MAX).saturating_sub(HEAD_BYTES)];
        Ok(Self { effects: effects.clone(), sender, receiver, peer, table, slab, outgoing })
    }

    /// A handle with which another thread can end [`RegionServer::run`].
    pub fn closer(&self) -> ChannelCloser {
        self.receiver.closer()
    }

    /// Answers requests until the link ends, and says why it did. Meant for a thread of its own.
    pub fn run(mut self) -> Broken {
        loop {
            match self.answer_one() {
                Ok(()) => {}
                Err(broken) => {
                    self.receiver.closer().close();
                    return broken;
                }
            }
        }
    }

    fn answer_one(&mut self) -> Result<(), Broken> {
        let received = match self.receiver.recv(self.effects.after(IDLE)) {
            Ok(received) => received,
            // A newer fence is for other users of channels; this one keeps its first.
            Err(RecvError::Deadline | RecvError::Ahead { .. }) => return Ok(()),
            Err(RecvError::Broken(broken)) => return Err(broken),
        };
        let kind = received.kind();
        let Some((head, body)) = Head::decode(received.payload()) else {
            return Err(misbehaved("a request that cannot be read"));
        };
        let operation =
            |write, bytes| Operation { handle: head.handle, peer: self.peer, term: head.term, write, offset: head.offset, bytes };
        let outcome = match kind {
            PUT if usize::try_from(head.bytes) == Ok(body.len()) => {
                let put = operation(Some(head.generation), u64::from(head.bytes));
                self.table.admit(put).map_err(Denial::from).and_then(|pass| in_slab(self.slab.write(pass.start(), body))).map(|()| 0)
            }
            GET if body.is_empty() => match usize::try_from(head.bytes).ok().and_then(|bytes| self.outgoing.get_mut(..bytes)) {
                Some(into) => {
                    let get = operation(None, u64::from(head.bytes));
                    let bytes = into.len();
                    self.table.admit(get).map_err(Denial::from).and_then(|pass| in_slab(self.slab.read(pass.start(), into))).map(|()| bytes)
                }
                None => Err(Denial::Bounds),
            },
            _ => return Err(misbehaved("a request of an unknown kind or length")),
        };
        let (kind, denial, bytes) = match outcome {
            Ok(bytes) => (if kind == GET { DATA } else { DONE }, None, bytes),
            Err(denial) => {
                tracing::info!(handle = ?head.handle, %denial, "remote access denied");
                (DONE, Some(denial), 0)
            }
        };
        let answer = Head { denial, ..head }.encode();
        match self.sender.send(kind, &[&answer, &self.outgoing[..bytes]], self.effects.after(ANSWER_MAX)) {
            Ok(()) => Ok(()),
            Err(SendError::Broken(broken)) => Err(broken),
            Err(_) => Err(misbehaved("it does not take answers")),
        }
    }
}

/// The table admits nothing outside the slab that it was made for; a table that was made for a larger one is caught here.
fn in_slab(done: bool) -> Result<(), Denial> {
    if done { Ok(()) } else { Err(Denial::Bounds) }
}

fn misbehaved(what: &str) -> Broken {
    Broken::Link(crate::link::CloseReason::Misbehaved(what.to_owned()))
}
