//! The receiving end of a channel, for the thread that waits for messages.

use std::fmt;
use std::sync::Arc;

use super::machine::{Counters, RearmError, ReceiverMachine};
use super::shared::{Half, Patience};
use super::{Broken, ChannelCloser};
use crate::env::Instant;
use crate::frame::{Fence, FrameHeader, HEADER_BYTES};
use crate::link::{Link, LinkHealth};
use crate::region::Slot;

/// Why no message was received.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecvError {
    /// None came by the deadline.
    #[error("no message came by the deadline")]
    Deadline,
    /// The sending end is armed with a newer term or plan epoch. Said once for each frame that shows it.
    #[error("the sending end is armed with {theirs:?}, this end with {armed:?}; arm this end again")]
    Ahead {
        /// This end's fence.
        armed: Fence,
        /// The newer one.
        theirs: Fence,
    },
    /// The channel is broken, and everything that arrived whole before has been received.
    #[error(transparent)]
    Broken(#[from] Broken),
}

/// The receiving end.
#[derive(Debug)]
pub struct Receiver {
    half: Half,
    /// The message that the user looks at.
    held: Option<(FrameHeader, Slot)>,
}

/// A message in its slot. The slot is granted to the sender again at the next call of [`Receiver::recv`] or
/// [`Receiver::give_back`].
pub struct Received<'a> {
    header: &'a FrameHeader,
    payload: &'a [u8],
}

impl<'a> Received<'a> {
    /// The message kind that the sender gave.
    pub fn kind(&self) -> u8 {
        self.header.kind
    }

    /// The flags that the sender gave.
    pub fn flags(&self) -> u8 {
        self.header.flags
    }

    /// Position in the stream of this fence, from 0.
    pub fn sequence(&self) -> u64 {
        self.header.sequence
    }

    /// The message, where it arrived: aligned to 64 bytes.
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }
}

impl fmt::Debug for Received<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Received")
            .field("kind", &self.kind())
            .field("sequence", &self.sequence())
            .field("bytes", &self.payload.len())
            .finish()
    }
}

fn look((header, slot): &(FrameHeader, Slot)) -> Received<'_> {
    let bytes = usize::try_from(header.length).unwrap_or(0);
    Received { header, payload: &slot.as_slice()[HEADER_BYTES..HEADER_BYTES + bytes] }
}

impl Receiver {
    pub(super) fn new(half: Half) -> Self {
        Self { half, held: None }
    }

    /// Gives the slot of the last message back and waits for the next one.
    ///
    /// # Errors
    /// [`RecvError`].
    pub fn recv(&mut self, deadline: Instant) -> Result<Received<'_>, RecvError> {
        let mut state = self.half.state();
        if let (Some((_, slot)), Some(inbox)) = (self.held.take(), &mut state.inbox) {
            inbox.take_back(slot);
        }
        loop {
            let Some(inbox) = &mut state.inbox else { return Err(Broken::Direction.into()) };
            if let Some(message) = inbox.ready.pop_front() {
                let due = inbox.machine.grant_due();
                drop(state);
                // Where there is a message already, the sender may be waiting for credit.
                if due {
                    self.half.send_due_grant(Patience::Some);
                }
                return Ok(look(self.held.insert(message)));
            }
            if let Some(theirs) = inbox.ahead.take() {
                return Err(RecvError::Ahead { armed: inbox.machine.fence(), theirs });
            }
            if let Some(broken) = &state.broken {
                return Err(broken.clone().into());
            }
            // A grant that is due goes out before the wait.
            state = self.half.wait_arrived(state, deadline).ok_or(RecvError::Deadline)?;
        }
    }

    /// The message that was received last, until its slot is given back.
    pub fn held(&self) -> Option<Received<'_>> {
        self.held.as_ref().map(look)
    }

    /// Gives the slot of the last message back without waiting for the next one, and tells the sender if it is time to.
    pub fn give_back(&mut self) {
        let Some((_, slot)) = self.held.take() else { return };
        let due = match &mut self.half.state().inbox {
            Some(inbox) => {
                inbox.take_back(slot);
                inbox.machine.grant_due()
            }
            None => false,
        };
        if due {
            self.half.send_due_grant(Patience::Some);
        }
    }

    /// Arms this end with a newer fence. What arrived under the old one and was not received is dropped.
    ///
    /// # Errors
    /// [`RearmError`] if the fence is not newer.
    pub fn rearm(&mut self, fence: Fence) -> Result<(), RearmError> {
        let mut state = self.half.state();
        if let Some(inbox) = &mut state.inbox {
            inbox.machine.rearm(fence)?;
            inbox.free.extend(self.held.take().into_iter().chain(inbox.ready.drain(..)).map(|(_, slot)| slot));
            inbox.ahead = inbox.ahead.filter(|ahead| ahead.supersedes(&fence));
        }
        drop(state);
        self.half.send_due_grant(Patience::Some);
        Ok(())
    }

    /// Puts the channel onto another link, whose other end does the same. The old link is closed first: nothing that is
    /// still on its way on it can arrive. Where both directions share the link, the other half moves along.
    ///
    /// # Errors
    /// None today: the channel's thread goes on.
    pub fn relink(&mut self, link: &Arc<dyn Link>) -> std::io::Result<()> {
        self.half.relink(link);
        Ok(())
    }

    /// The fence that this end is armed with.
    pub fn fence(&self) -> Fence {
        self.half.state().inbox.as_ref().map(|inbox| inbox.machine.fence()).unwrap_or_default()
    }

    /// What was counted at this end.
    pub fn counters(&self) -> Counters {
        self.half.state().inbox.as_ref().map(|inbox| ReceiverMachine::counters(&inbox.machine)).unwrap_or_default()
    }

    /// What the link knows of itself.
    pub fn health(&self) -> LinkHealth {
        let link = Arc::clone(&self.half.state().link);
        link.health()
    }

    /// A handle with which another thread can end the channel's link.
    pub fn closer(&self) -> ChannelCloser {
        ChannelCloser::new(&self.half)
    }
}
