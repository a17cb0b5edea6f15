//! Ordered tensor messages of one direction over a link.
//!
//! The receiving end owns slots of an agreed size, allocated once, and grants them to the sending end; so a slow
//! receiver bounds its sender, and nothing is allocated for a message. A message is one header and one payload, sent in
//! one piece. A link carries one channel in each direction.
//!
//! ```no_run
//! # fn example(link: std::sync::Arc<dyn shoal_transport::link::Link>, effects: shoal_transport::Effects,
//! #     fence: shoal_transport::frame::Fence) -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//! use shoal_transport::channel::{self, ChannelOptions};
//!
//! let (mut sender, mut receiver) = channel::duplex(link, fence, ChannelOptions::default(), &effects)?;
//! sender.send(16, &[b"activations"], effects.after(Duration::from_secs(5)))?;
//! let received = receiver.recv(effects.after(Duration::from_secs(5)))?;
//! println!("{} bytes of kind {}", received.payload().len(), received.kind());
//! # Ok(()) }
//! ```
//!
//! [`Outlet`] and [`Inlet`] are what the two ends can do, of this channel and of one that outlives its links
//! ([`path`](crate::path)).
//!
//! The protocol is [`machine`], which simulations and tests drive by hand. Around it, [`Sender`] and [`Receiver`] belong to the
//! threads that use them, and a thread that waits in one of them takes frames off the link itself (`turn`): nobody has to be woken
//! for it. Where none has waited for a while, a thread of the channel does so, so that grants are taken and keep-alives
//! answered whatever the user is at.

mod ends;
#[cfg(test)]
#[cfg(target_os = "linux")]
pub(crate) mod faults;
mod grant;
pub mod machine;
mod receiver;
mod sender;
mod shared;
mod taking;
#[cfg(test)]
mod tests;
mod turn;

use std::sync::{Arc, Weak};

pub use ends::{Inlet, Outlet};
pub use grant::{GRANT_BYTES, Grant};
pub use machine::{Counters, RearmError, Violation};
pub use receiver::{Received, Receiver, RecvError};
pub use sender::{RelinkError, SendError, Sender};

use crate::Effects;
use crate::frame::{Fence, FrameError};
use crate::link::{CloseReason, Link};
use crate::region::RegionError;
use shared::{Directions, Shared};

/// How big a channel is. Both ends should be given the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChannelOptions {
    /// Longest payload in bytes: rows × hidden size × bytes per number of the largest step.
    pub slot_bytes: u32,
    /// How many messages the receiving end holds, and the sending end keeps until they are acknowledged. One more than
    /// the steps in flight keeps both ends busy. Memory is taken as slots are first used.
    pub slots: u16,
}

impl Default for ChannelOptions {
    /// Four slots of 4 MiB.
    fn default() -> Self {
        Self { slot_bytes: 4 * 1024 * 1024, slots: 4 }
    }
}

/// Why a channel was not opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The slots could not be allocated.
    #[error(transparent)]
    Memory(#[from] RegionError),
    /// The channel's messages would be longer than the link's.
    #[error("a channel with slots of {slot_bytes} bytes needs messages of {needed} bytes, the peer of this link receives {limit}")]
    Link {
        /// Asked-for payload, in bytes.
        slot_bytes: u32,
        /// With its header.
        needed: usize,
        /// What the link carries.
        limit: usize,
    },
    /// The channel's thread could not be started.
    #[error("cannot start a thread for a tensor channel: {0}")]
    Thread(std::io::Error),
}

/// Why a channel is of no use any more. The first reason stays until the channel gets another link.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Broken {
    /// Its link ended.
    #[error(transparent)]
    Link(#[from] CloseReason),
    /// A frame was damaged on the way, or is of another protocol.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The peer broke the channel's protocol.
    #[error("the peer broke the channel's protocol: {0}")]
    Protocol(#[from] Violation),
    /// A data frame came to an end that only sends, or a grant to one that only receives.
    #[error("a frame came for a direction that this end of the channel does not have; open it the same way on both ends")]
    Direction,
}

/// A handle with which another thread can end a channel's link, whichever it is by then: what waits on either end
/// returns at once.
#[derive(Clone)]
pub struct ChannelCloser(Weak<Shared>);

impl ChannelCloser {
    fn new(shared: &Arc<Shared>) -> Self {
        Self(Arc::downgrade(shared))
    }

    /// Ends the link.
    pub fn close(&self) {
        if let Some(shared) = self.0.upgrade() {
            shared.close();
        }
    }
}

impl std::fmt::Debug for ChannelCloser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ChannelCloser")
    }
}

/// Opens a channel in each direction of `link`, with `fence`.
///
/// # Errors
/// [`OpenError`].
pub fn duplex(link: Arc<dyn Link>, fence: Fence, options: ChannelOptions, effects: &Effects) -> Result<(Sender, Receiver), OpenError> {
    let slots = sender::sender_slots(options)?;
    let sending = Shared::open(link, fence, options, effects, Directions::Both)?;
    let receiving = sending.other();
    Ok((Sender::new(sending, slots), Receiver::new(receiving)))
}

/// Opens the sending end of a channel over `link`, whose other end opens [`receiver`](fn@receiver).
///
/// # Errors
/// [`OpenError`].
pub fn sender(link: Arc<dyn Link>, fence: Fence, options: ChannelOptions, effects: &Effects) -> Result<Sender, OpenError> {
    let slots = sender::sender_slots(options)?;
    Ok(Sender::new(Shared::open(link, fence, options, effects, Directions::Send)?, slots))
}

/// Opens the receiving end of a channel over `link`, whose other end opens [`sender`](fn@sender).
///
/// # Errors
/// [`OpenError`].
pub fn receiver(link: Arc<dyn Link>, fence: Fence, options: ChannelOptions, effects: &Effects) -> Result<Receiver, OpenError> {
    Ok(Receiver::new(Shared::open(link, fence, options, effects, Directions::Receive)?))
}
