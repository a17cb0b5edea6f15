//! The receiving half of a hop, for the thread that waits for messages.

use std::sync::Arc;

use super::hop::{Hop, PathCloser, Waited};
use super::{Down, FLAG_LAST, Keeper, PathHealth};
use crate::channel::{self, Inlet, Received, Receiver};
use crate::env::Instant;
use crate::frame::Fence;
use crate::link::lock;

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
    /// No more messages will come; those that arrived before have been received.
    #[error(transparent)]
    Down(#[from] Down),
}

/// The receiving half. It is used like [`Receiver`], and does not end with a link.
#[derive(Debug)]
pub struct PathReceiver {
    // The keeper goes first, so that it takes no new link for a channel that is gone.
    keeper: Arc<Keeper>,
    receiver: Receiver,
    hop: Arc<Hop>,
    epoch: u64,
    ended: bool,
}

impl PathReceiver {
    pub(super) fn new(hop: Arc<Hop>, keeper: Arc<Keeper>, receiver: Receiver, epoch: u64) -> Self {
        Self { keeper, receiver, hop, epoch, ended: false }
    }

    /// Gives the slot of the last message back and waits for the next one.
    ///
    /// # Errors
    /// [`RecvError`].
    pub fn recv(&mut self, deadline: Instant) -> Result<Received<'_>, RecvError> {
        self.wait(deadline)?;
        // A message was received just now, and is held.
        self.receiver.held().ok_or(RecvError::Deadline)
    }

    fn wait(&mut self, deadline: Instant) -> Result<(), RecvError> {
        loop {
            if self.ended {
                return Err(Down::Ended.into());
            }
            self.settle();
            let broken = match self.receiver.recv(deadline) {
                Ok(received) if received.flags() & FLAG_LAST != 0 => {
                    self.ended = true;
                    continue;
                }
                Ok(_) => return Ok(()),
                Err(channel::RecvError::Deadline) => {
                    return Err(self.hop.down().map_or(RecvError::Deadline, RecvError::Down));
                }
                Err(channel::RecvError::Ahead { armed, theirs }) => return Err(RecvError::Ahead { armed, theirs }),
                Err(channel::RecvError::Broken(broken)) => broken,
            };
            self.hop.lost(self.epoch, broken.to_string());
            match self.hop.newer(self.epoch, deadline) {
                Ok(_) => {}
                Err(Waited::Deadline) => return Err(RecvError::Deadline),
                Err(Waited::Down(down)) => return Err(down.into()),
            }
        }
    }

    /// Moves to the present link, if this half is on an earlier one.
    fn settle(&mut self) {
        let _moving = lock(&self.hop.moving);
        let Some(current) = self.hop.current().filter(|current| current.epoch > self.epoch) else { return };
        self.epoch = current.epoch;
        if let Err(error) = self.receiver.relink(&current.link) {
            self.hop.lost(self.epoch, error.to_string());
        }
    }

    /// Gives the slot of the last message back without waiting for the next one.
    pub fn give_back(&mut self) {
        self.receiver.give_back();
    }

    /// Which link carries the hop, and what it knows of itself.
    pub fn health(&self) -> Option<PathHealth> {
        PathHealth::of(&self.hop)
    }

    /// A handle with which another thread can end the hop.
    pub fn closer(&self) -> PathCloser {
        PathCloser::new(&self.hop)
    }
}

impl Inlet for PathReceiver {
    type Error = RecvError;

    fn receive(&mut self, deadline: Instant) -> Result<Option<Received<'_>>, RecvError> {
        match self.recv(deadline) {
            Ok(received) => Ok(Some(received)),
            Err(RecvError::Deadline) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn give_back(&mut self) {
        Self::give_back(self);
    }
}

impl Drop for PathReceiver {
    fn drop(&mut self) {
        // Where the sending half of this end lives on, so does the hop.
        if Arc::strong_count(&self.keeper) == 1 {
            self.keeper.stop();
        }
    }
}
