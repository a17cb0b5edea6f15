//! What whoever sends or receives needs to know of a channel, wherever it leads.
//!
//! A channel of one link ([`Sender`], [`Receiver`]) ends with it; one of a hop ([`PathSender`](crate::path::PathSender),
//! [`PathReceiver`](crate::path::PathReceiver)) goes on with another link. Loops that move tensors are written once for both.

use std::fmt;

use super::{Received, Receiver, RecvError, SendError, Sender};
use crate::env::Instant;

/// The sending end of a channel.
pub trait Outlet: Send + fmt::Debug {
    /// Why a message was not sent.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Sends one message, whose payload is `parts` one after the other, in the order of the calls. `Ok` says that it will arrive,
    /// once, unless the channel ends before. Blocks while the receiving end has no slot for it, at most until `deadline`.
    ///
    /// # Errors
    /// The message is longer than a slot, was not taken by `deadline`, or the channel has ended.
    fn send(&mut self, kind: u8, parts: &[&[u8]], deadline: Instant) -> Result<(), Self::Error>;

    /// Waits until everything sent has arrived.
    ///
    /// # Errors
    /// It has not by `deadline`, or the channel has ended.
    fn flush(&mut self, deadline: Instant) -> Result<(), Self::Error>;
}

/// The receiving end of a channel.
pub trait Inlet: Send + fmt::Debug {
    /// Why no message will come any more.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Gives the slot of the last message back and waits for the next one; none if there is none by `deadline`.
    ///
    /// # Errors
    /// The channel has ended, and all that arrived before has been received.
    fn receive(&mut self, deadline: Instant) -> Result<Option<Received<'_>>, Self::Error>;

    /// Gives the slot of the last message back without waiting for the next one.
    fn give_back(&mut self);
}

impl Outlet for Sender {
    type Error = SendError;

    fn send(&mut self, kind: u8, parts: &[&[u8]], deadline: Instant) -> Result<(), SendError> {
        Self::send(self, kind, parts, deadline)
    }

    fn flush(&mut self, deadline: Instant) -> Result<(), SendError> {
        Self::flush(self, deadline)
    }
}

impl Inlet for Receiver {
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
