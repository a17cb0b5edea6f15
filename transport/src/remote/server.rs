//! The owner's end.

use std::sync::Arc;
use std::time::Duration;

use super::Denial;
use super::message::{DATA, DONE, GET, HEAD_BYTES, Head, NOTIFY, PUT, Tidings, WINDOW};
use super::native::Hands;
use super::notices::{Notice, NoticeSender};
use crate::Effects;
use crate::access::{AccessTable, Operation};
use crate::channel::{self, Broken, ChannelCloser, ChannelOptions, OpenError, Receiver, RecvError, SendError, Sender};
use crate::frame::Fence;
use crate::link::Link;

/// How long to wait for a request before waiting again. What ends the link also ends the wait.
const IDLE: Duration = Duration::from_secs(3600);

/// A client that does not take its answers for this long loses its link.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Serves leased memory to one peer over one link.
#[derive(Debug)]
pub struct RegionServer {
    effects: Effects,
    sender: Sender,
    receiver: Receiver,
    peer: [u8; 32],
    table: AccessTable,
    notices: Option<NoticeSender>,
    /// How the peer is given windows.
    hands: Hands,
    /// Bytes on their way out, as many as fit a message.
    outgoing: Vec<u8>,
}

impl RegionServer {
    /// Prepares to serve the memory of `table` to the node whose public key is `peer`. Whoever made the link has
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
        effects: &Effects,
    ) -> Result<Self, OpenError> {
        let hands = Hands::over(&link);
        let (sender, receiver) = channel::duplex(link, fence, options, effects)?;
        let outgoing = vec![0; usize::try_from(options.slot_bytes).unwrap_or(usize::MAX).saturating_sub(HEAD_BYTES)];
        Ok(Self { effects: effects.clone(), sender, receiver, peer, table, notices: None, hands, outgoing })
    }

    /// Tells what holders notify to whoever holds the other end of `notices`. Without one, they are denied.
    #[must_use]
    pub fn with_notices(mut self, notices: NoticeSender) -> Self {
        self.notices = Some(notices);
        self
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
        let whole = |body: &[u8]| usize::try_from(head.bytes) == Ok(body.len());
        let put = |body: &[u8]| {
            let pass = self.table.admit(operation(Some(head.generation), u64::from(head.bytes)))?;
            pass.write(body)
        };
        let outcome = match kind {
            PUT if whole(body) => put(body).map(|()| (DONE, 0)).map_err(Denial::from),
            GET if body.is_empty() => match usize::try_from(head.bytes).ok().and_then(|bytes| self.outgoing.get_mut(..bytes)) {
                Some(into) => {
                    let bytes = into.len();
                    let pass = self.table.admit(operation(None, u64::from(head.bytes)));
                    pass.and_then(|pass| pass.read(into)).map(|()| (DATA, bytes)).map_err(Denial::from)
                }
                None => Err(Denial::Bounds),
            },
            NOTIFY => match Tidings::decode(body) {
                Some((tidings, body)) if whole(body) => {
                    // The range that the owner is told of has to be the holder's, too.
                    let told = Operation { offset: tidings.start, ..operation(Some(head.generation), tidings.bytes) };
                    let notice = Notice { handle: head.handle, offset: tidings.start, bytes: tidings.bytes, number: tidings.number };
                    let put = self.table.admit(told).and_then(|_pass| put(body)).map_err(Denial::from);
                    put.and_then(|()| self.notices.as_ref().map_or(Err(Denial::Deaf), |notices| notices.tell(notice))).map(|()| (DONE, 0))
                }
                _ => return Err(misbehaved("a notice that cannot be read")),
            },
            WINDOW if head.bytes == 0 => {
                let opening = operation(None, 0);
                match self.hands.hand_over(&self.table, opening, head.generation, body) {
                    Some(Ok((kind, answer))) => match self.outgoing.get_mut(..answer.len()) {
                        Some(into) => {
                            into.copy_from_slice(&answer);
                            Ok((kind, answer.len()))
                        }
                        None => return Err(misbehaved("a request for a window whose answer does not fit a message")),
                    },
                    Some(Err(denied)) => Err(denied.into()),
                    None => return Err(misbehaved("a place for a window that cannot be read")),
                }
            }
            _ => return Err(misbehaved("a request of an unknown kind or length")),
        };
        let (kind, denial, bytes) = match outcome {
            Ok((kind, bytes)) => (kind, None, bytes),
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

fn misbehaved(what: &str) -> Broken {
    Broken::Link(crate::link::CloseReason::Misbehaved(what.to_owned()))
}
