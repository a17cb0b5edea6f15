//! The sending half of a hop, for the thread that has something to send.

use std::sync::{Arc, Mutex};

use super::hop::{Hop, PathCloser, Waited};
use super::{Down, FLAG_LAST, Keeper, PathHealth};
use crate::channel::{self, Outlet, RelinkError, Sender};
use crate::env::Instant;
use crate::frame::Fence;
use crate::link::lock;

/// Why a message was not sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The receiving end took nothing, or there was no link, by the deadline. The message was not sent.
    #[error("the receiving end took nothing by the deadline")]
    Deadline,
    /// The message is longer than a slot.
    #[error("a payload of {bytes} bytes does not fit the {limit} bytes of this channel's slots; send fewer rows at a time")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// Longest payload.
        limit: u32,
    },
    /// The receiving end is armed with a newer term or plan epoch. The message was not sent.
    #[error("the receiving end is armed with {theirs:?}, this end with {armed:?}; arm this end again")]
    Ahead {
        /// This end's fence.
        armed: Fence,
        /// The newer one.
        theirs: Fence,
    },
    /// There is no way to the peer any more. What was not acknowledged may not have arrived.
    #[error(transparent)]
    Down(#[from] Down),
}

/// The channel's sending half, and the epoch of the link that it is on.
pub(super) struct Cell {
    sender: Sender,
    epoch: u64,
    ended: bool,
}

impl Cell {
    pub(super) fn new(sender: Sender, epoch: u64) -> Self {
        Self { sender, epoch, ended: false }
    }

    /// Moves to the present link, if this half is on an earlier one.
    fn settle(&mut self, hop: &Hop) {
        let _moving = lock(&hop.moving);
        let Some(current) = hop.current().filter(|current| current.epoch > self.epoch) else { return };
        self.epoch = current.epoch;
        // What is to be repeated goes out when the peer has said how far it got; that is waited for by whoever sends next.
        match self.sender.relink(&current.link, hop.effects.clock.now()) {
            Ok(()) | Err(RelinkError::Repeat(_)) => {}
            Err(error) => hop.lost(self.epoch, error.to_string()),
        }
    }

    /// Does what is to be done on a new link while there is nothing to send. `true`: all has arrived at the peer.
    pub(super) fn catch_up(&mut self, hop: &Hop, deadline: Instant) -> bool {
        self.settle(hop);
        match self.sender.flush(deadline) {
            Ok(()) | Err(channel::SendError::Ahead { .. }) => true,
            Err(channel::SendError::Broken(broken)) => {
                hop.lost(self.epoch, broken.to_string());
                false
            }
            Err(_) => false,
        }
    }

    pub(super) fn farewell(&mut self, hop: &Hop) {
        if !std::mem::replace(&mut self.ended, true) && hop.down().is_none() {
            // If there is no room for a word, the peer notices by itself.
            drop(self.sender.send_flagged(0, FLAG_LAST, &[], hop.effects.clock.now()));
        }
    }
}

/// The sending half. It is used like [`Sender`], and does not end with a link.
#[derive(Debug)]
pub struct PathSender {
    // The keeper goes first, so that it makes no new link for a channel that is gone.
    _keeper: Arc<Keeper>,
    cell: Arc<Mutex<Cell>>,
    hop: Arc<Hop>,
}

impl PathSender {
    pub(super) fn new(hop: Arc<Hop>, keeper: Arc<Keeper>, sender: Sender, epoch: u64) -> Self {
        let cell = Arc::new(Mutex::new(Cell::new(sender, epoch)));
        hop.sends_with(&cell);
        Self { _keeper: keeper, cell, hop }
    }

    /// Sends one message, as [`Sender::send`] does. `Ok` says that it will arrive, once, unless the hop goes down before.
    ///
    /// # Errors
    /// [`SendError`].
    pub fn send(&mut self, kind: u8, parts: &[&[u8]], deadline: Instant) -> Result<(), SendError> {
        self.repeatedly(deadline, |sender, deadline| sender.send(kind, parts, deadline))?;
        self.hop.note_message(parts.iter().map(|part| part.len()).sum());
        Ok(())
    }

    /// Waits until everything sent has arrived whole at the receiving end.
    ///
    /// # Errors
    /// [`SendError`].
    pub fn flush(&mut self, deadline: Instant) -> Result<(), SendError> {
        self.repeatedly(deadline, |sender, deadline| sender.flush(deadline))
    }

    /// Does something on one link after the other until it is done.
    fn repeatedly(
        &mut self,
        deadline: Instant,
        mut work: impl FnMut(&mut Sender, Instant) -> Result<(), channel::SendError>,
    ) -> Result<(), SendError> {
        loop {
            if let Some(down) = self.hop.down() {
                return Err(down.into());
            }
            let mut cell = lock(&self.cell);
            cell.settle(&self.hop);
            let before = cell.sender.next_sequence();
            let error = match work(&mut cell.sender, deadline) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            let (epoch, committed) = (cell.epoch, cell.sender.next_sequence() > before);
            drop(cell);
            match error {
                channel::SendError::Deadline => return Err(SendError::Deadline),
                channel::SendError::TooLong { bytes, limit } => return Err(SendError::TooLong { bytes, limit }),
                channel::SendError::Ahead { armed, theirs } => return Err(SendError::Ahead { armed, theirs }),
                channel::SendError::Broken(broken) => {
                    self.hop.lost(epoch, broken.to_string());
                    if committed {
                        // It has a number and is kept: it is repeated on the next link.
                        return Ok(());
                    }
                }
            }
            match self.hop.newer(epoch, deadline) {
                Ok(_) => {}
                Err(Waited::Deadline) => return Err(SendError::Deadline),
                Err(Waited::Down(down)) => return Err(down.into()),
            }
        }
    }

    /// How many messages are sent and not acknowledged.
    pub fn unacknowledged(&self) -> u64 {
        lock(&self.cell).sender.unacknowledged()
    }

    /// Which link carries the hop, and what it knows of itself.
    pub fn health(&self) -> Option<PathHealth> {
        PathHealth::of(&self.hop)
    }

    /// Has `tell` called once the hop is down, from whichever thread finds out: at once, if it is down already. It must not wait.
    pub fn when_down(&self, tell: impl FnOnce(&Down) + Send + 'static) {
        self.hop.when_down(Box::new(tell));
    }

    /// Why the hop is down, if it is.
    pub fn down(&self) -> Option<Down> {
        self.hop.down()
    }

    /// A handle with which another thread can end the hop.
    pub fn closer(&self) -> PathCloser {
        PathCloser::new(&self.hop)
    }
}

impl Outlet for PathSender {
    type Error = SendError;

    fn send(&mut self, kind: u8, parts: &[&[u8]], deadline: Instant) -> Result<(), SendError> {
        Self::send(self, kind, parts, deadline)
    }

    fn flush(&mut self, deadline: Instant) -> Result<(), SendError> {
        Self::flush(self, deadline)
    }
}

impl Drop for PathSender {
    fn drop(&mut self) {
        lock(&self.cell).farewell(&self.hop);
    }
}

impl std::fmt::Debug for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cell").field("epoch", &self.epoch).finish_non_exhaustive()
    }
}
