//! A hop between two nodes that outlives its links.
//!
//! A [channel] lives on one link. A hop has all the ways that lead from one node to another (shared memory, this
//! cable, that one, a detour over a third node), measures them, keeps its channel on the best, and moves it to the next
//! best when a link fails: a pulled cable, a damaged frame, silence. [`PathSender`] and [`PathReceiver`] are used like the
//! channel's halves and notice nothing of it. Nothing is lost, repeated or reordered: messages are kept until the
//! receiving end has acknowledged them, and it has ended the old link before the new one is used.
//!
//! The two ends agree once, over the control stream, on a secret. From it come the [`tickets`] of all links that the hop
//! will ever have, so that no third party and no control message takes part when one fails.
//!
//! * The dialling end decides ([`machine::Caller`]): it dials, measures, chooses. Its end of the channel may send, receive or
//!   both.
//! * The accepting end follows ([`follower::Follower`]): it expects the next links, answers measurements, ends the old link
//!   when it is asked to go on with a new one.
//! * Each has a thread, the keeper, around its machine, and short-lived ones for links that are being made.
//!
//! All messages of a hop share one link, because their order is part of the promise: the link is chosen by what a message of
//! the usual length costs on it.
//!
//! A hop that had a link and gets no other within its [patience](PathOptions::patience) goes [`Down`], with the reason of each
//! way.

mod accepting;
mod dialling;
pub mod estimate;
pub mod follower;
pub mod forward;
mod hop;
pub mod machine;
#[cfg(test)]
mod model;
mod receiver;
mod route;
mod sender;
mod terms;
#[cfg(test)]
mod tests;
pub mod tickets;
mod wire;

use std::fmt;
use std::sync::{Arc, Mutex, Weak};

pub use accepting::{Expecting, expect};
pub use dialling::dial;
pub use hop::PathCloser;
pub use machine::{Failure, PathOptions};
pub use receiver::{PathReceiver, RecvError};
pub use route::{Direct, Route, RouteError};
pub use sender::{PathSender, SendError};

use crate::channel::{self, ChannelOptions, OpenError};
use crate::env::{Instant, Join};
use crate::frame::Fence;
use crate::link::{LinkHealth, lock};
use crate::provider::{ExpectError, ProviderKind};
use hop::{Hop, Waited};

/// The flag of the message that says that no more will come. Users of a hop have no flags.
const FLAG_LAST: u8 = 0x80;

/// Why a hop is of no use any more. The first reason stays.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Down {
    /// This end closed it, or dropped everything that used it.
    #[error("the hop was closed on this node")]
    Local,
    /// The other end said that no more will come.
    #[error("the peer closed the hop")]
    Ended,
    /// The dialling end found no other way in time.
    #[error("{}no way leads to the peer: {ways}", lost.as_ref().map(|lost| format!("{lost}; then ")).unwrap_or_default())]
    NoWay {
        /// What became of the last link, if there was one.
        lost: Option<String>,
        /// Each way, and why it gives no link.
        ways: String,
    },
    /// The peer made no other link in time.
    #[error("{lost}; the peer made no other link since")]
    NoPeer {
        /// What became of the last link.
        lost: String,
    },
}

/// Why a hop did not come about.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PathError {
    /// No link by the deadline.
    #[error("no peer made the link by the deadline")]
    Deadline,
    /// There will be none.
    #[error(transparent)]
    Down(#[from] Down),
    /// Nothing can be expected.
    #[error(transparent)]
    Expect(#[from] ExpectError),
    /// The keeper could not be started.
    #[error("cannot start a thread for a hop: {0}")]
    Thread(std::io::Error),
}

/// A hop that has its first link, and no channel yet.
#[derive(Debug)]
pub struct Opening {
    hop: Arc<Hop>,
    keeper: Arc<Keeper>,
    first: hop::Current,
}

impl Opening {
    fn wait(hop: Arc<Hop>, keeper: Arc<Keeper>, deadline: Instant) -> Result<Self, PathError> {
        match hop.newer(0, deadline) {
            Ok(first) => Ok(Self { hop, keeper, first }),
            Err(Waited::Deadline) => Err(PathError::Deadline),
            Err(Waited::Down(down)) => Err(down.into()),
        }
    }

    /// Opens the sending end; the other end opens the receiving one, or both as this one does.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn sender(self, fence: Fence, options: ChannelOptions) -> Result<PathSender, OpenError> {
        let sender = channel::sender(self.first.link, fence, options, &self.hop.effects)?;
        Ok(PathSender::new(self.hop, self.keeper, sender, self.first.epoch))
    }

    /// Opens the receiving end.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn receiver(self, fence: Fence, options: ChannelOptions) -> Result<PathReceiver, OpenError> {
        let receiver = channel::receiver(self.first.link, fence, options, &self.hop.effects)?;
        Ok(PathReceiver::new(self.hop, self.keeper, receiver, self.first.epoch))
    }

    /// Opens both directions.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn duplex(self, fence: Fence, options: ChannelOptions) -> Result<(PathSender, PathReceiver), OpenError> {
        let Self { hop, keeper, first } = self;
        let (sender, receiver) = channel::duplex(first.link, fence, options, &hop.effects)?;
        let sender = PathSender::new(Arc::clone(&hop), Arc::clone(&keeper), sender, first.epoch);
        Ok((sender, PathReceiver::new(hop, keeper, receiver, first.epoch)))
    }

    /// Which link carries the hop, and what it knows of itself.
    pub fn health(&self) -> Option<PathHealth> {
        PathHealth::of(&self.hop)
    }

    /// A handle with which others can look at the hop.
    pub fn watch(&self) -> PathWatch {
        PathWatch(Arc::downgrade(&self.hop))
    }

    /// A handle with which another thread can end the hop.
    pub fn closer(&self) -> PathCloser {
        PathCloser::new(&self.hop)
    }
}

/// Looks at a hop from anywhere, without keeping it.
#[derive(Debug, Clone)]
pub struct PathWatch(Weak<Hop>);

impl PathWatch {
    /// Which link carries the hop, and what it knows of itself; none while there is none.
    pub fn health(&self) -> Option<PathHealth> {
        self.0.upgrade().filter(|hop| hop.down().is_none()).and_then(|hop| PathHealth::of(&hop))
    }

    /// Whether the hop is no more.
    pub fn is_over(&self) -> bool {
        self.0.upgrade().is_none_or(|hop| hop.down().is_some())
    }
}

/// The link that carries a hop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathHealth {
    /// Its number; every link of a hop has a higher one than those before.
    pub epoch: u64,
    /// What carries it.
    pub provider: ProviderKind,
    /// Where the peer is, for people.
    pub peer: String,
    /// What it knows of itself.
    pub link: LinkHealth,
}

impl PathHealth {
    fn of(hop: &Hop) -> Option<Self> {
        let hop::Current { epoch, link } = hop.current()?;
        Some(Self { epoch, provider: link.provider(), peer: link.peer(), link: link.health() })
    }
}

/// The thread that keeps an end of a hop; the last user of the hop ends it.
struct Keeper {
    hop: Arc<Hop>,
    wake: Box<dyn Fn() + Send + Sync>,
    thread: Mutex<Option<Box<dyn Join>>>,
}

impl Keeper {
    fn start(hop: &Arc<Hop>, wake: Box<dyn Fn() + Send + Sync>, body: Box<dyn FnOnce() + Send>) -> Result<Arc<Self>, PathError> {
        let thread = hop.effects.spawner.thread("tensor hop".to_owned(), body).map_err(PathError::Thread)?;
        Ok(Arc::new(Self { hop: Arc::clone(hop), wake, thread: Mutex::new(Some(thread)) }))
    }

    /// Ends the hop, and waits for its keeper.
    fn stop(&self) {
        self.hop.go_down(Down::Local);
        (self.wake)();
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            thread.join();
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.stop();
    }
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keeper")
    }
}

impl fmt::Debug for hop::Current {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Current").field("epoch", &self.epoch).field("link", &self.link).finish()
    }
}
