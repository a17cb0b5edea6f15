//! One authenticated connection to one peer over one provider.
//!
//! A link carries whole messages, both ways, in order. It is shared by reference: one thread may send while another
//! receives and a third closes. What it promises:
//!
//! * every call returns by its deadline, or at once when the link ends, whichever thread or peer ended it;
//! * a message arrives whole or not at all;
//! * a peer that is gone without a word is noticed by whoever waits in [`Link::recv`] within the silence limit that the
//!   provider was set up with, even if neither side had anything to say;
//! * nothing is buffered without bound: a sender waits for a peer that does not receive.

mod gate;
mod vitals;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub(crate) use gate::Gate;
pub(crate) use vitals::Vitals;

use crate::env::Instant;
use crate::provider::ProviderKind;

/// Why a link ended. The first reason stays.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CloseReason {
    /// This end closed it, or dropped everything that used it.
    #[error("the link was closed on this node")]
    Local,
    /// The other end closed it.
    #[error("the peer closed the link")]
    Peer,
    /// Nothing was heard from the peer, not even a keep-alive.
    #[error("nothing was heard from the peer for {silence_ms} ms; it is off, hung or unplugged")]
    Silent {
        /// How long, in milliseconds.
        silence_ms: u64,
    },
    /// A message had begun and did not move on fast enough to be worth waiting for.
    #[error("the link stalled in the middle of a message")]
    Stalled,
    /// The connection broke; the text is the system's.
    #[error("the link broke: {0}")]
    Broken(String),
    /// The peer did what the protocol does not allow; the text says what.
    #[error("the peer broke the protocol: {0}")]
    Misbehaved(String),
}

/// Why a message was not sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// Nothing of the message was taken by the deadline; the link is as good as before.
    #[error("the link took nothing by the deadline: the peer receives too slowly")]
    Deadline,
    /// The link has ended.
    #[error(transparent)]
    Closed(#[from] CloseReason),
    /// Longer than the peer is prepared to receive.
    #[error("a message of {bytes} bytes is longer than the {limit} that the peer of this link receives")]
    TooLong {
        /// Length of the message.
        bytes: usize,
        /// The peer's limit.
        limit: usize,
    },
}

/// Why no message was received.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecvError {
    /// None came by the deadline.
    #[error("no message came by the deadline")]
    Deadline,
    /// The link has ended, and everything that arrived before has been received.
    #[error(transparent)]
    Closed(#[from] CloseReason),
}

/// What is agreed when a link is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkOptions {
    /// Longest message that this end receives, in bytes, header and payload together. A peer that announces a longer
    /// one ends the link before anything is read.
    pub message_bytes_max: u32,
}

impl LinkOptions {
    /// For channels whose payloads are at most `payload_bytes_max` long.
    pub const fn for_payload(payload_bytes_max: u32) -> Self {
        Self { message_bytes_max: payload_bytes_max.saturating_add(crate::frame::HEADER_BYTES as u32) }
    }
}

impl Default for LinkOptions {
    /// Payloads of up to 16 MiB: 1,024 rows of a hidden size of 8,192 in 16-bit numbers.
    fn default() -> Self {
        Self::for_payload(16 * 1024 * 1024)
    }
}

/// What a link knows of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkHealth {
    /// Smoothed round-trip time of keep-alives, once one has come back. It includes the time that the peer's receiving
    /// thread takes to be scheduled.
    pub rtt: Option<Duration>,
    /// Bytes of messages taken for sending.
    pub sent_bytes: u64,
    /// Bytes of messages received.
    pub received_bytes: u64,
    /// When a receiving thread last saw anything from the peer. While no thread receives, it grows old.
    pub last_heard: Instant,
    /// Why the link ended, if it has.
    pub closed: Option<CloseReason>,
}

/// One authenticated connection to one peer.
pub trait Link: Send + Sync + fmt::Debug + 'static {
    /// What carries it.
    fn provider(&self) -> ProviderKind;

    /// Where the peer is, for people.
    fn peer(&self) -> String;

    /// Longest message that the peer receives, in bytes.
    fn message_bytes_max(&self) -> usize;

    /// Sends one message, the concatenation of `parts`.
    ///
    /// Returning `Ok` says that the message is on its way, not that it arrived. If the deadline passes after part of
    /// the message was taken, the link ends, because a message cannot be taken back.
    ///
    /// # Errors
    /// [`SendError`].
    fn send(&self, parts: &[&[u8]], deadline: Instant) -> Result<(), SendError>;

    /// [`Link::send`], which calls `blocked` before this thread sleeps because the peer takes nothing. The peer may be doing the same, so
    /// that neither receives; `blocked` is how somebody is got to.
    ///
    /// A provider that does not know when a thread sleeps calls it before it sends what may not fit into the buffers on the way.
    ///
    /// # Errors
    /// [`SendError`].
    fn send_or_tell(&self, parts: &[&[u8]], deadline: Instant, blocked: &mut dyn FnMut()) -> Result<(), SendError> {
        if parts.iter().map(|part| part.len()).sum::<usize>() > EASY_BYTES {
            blocked();
        }
        self.send(parts, deadline)
    }

    /// Receives the next message into the start of `buffer` and says how long it is. At most one thread receives at a
    /// time; a second one waits.
    ///
    /// A message longer than `buffer` or than the agreed limit ends the link.
    ///
    /// # Errors
    /// [`RecvError`].
    fn recv(&self, buffer: &mut [u8], deadline: Instant) -> Result<usize, RecvError>;

    /// Whether [`Link::call_off`] does anything.
    fn calls_off(&self) -> bool {
        false
    }

    /// Lets the thread that waits in [`Link::recv`], or the next that comes, return with [`RecvError::Deadline`] although there is time
    /// left, unless it is in the middle of a message.
    fn call_off(&self) {}

    /// What is known of the link now.
    fn health(&self) -> LinkHealth;

    /// What the ends of leased memory move bytes by themselves with, where this link's adapters can.
    #[cfg(target_os = "linux")]
    fn one_sided(self: Arc<Self>) -> Option<crate::provider::verbs::OneSided> {
        None
    }

    /// Ends the link with a reason: waiting threads of both ends return at once. Later calls change nothing.
    fn close(&self, reason: CloseReason);
}

/// A handle with which another thread can end a link, and nothing else.
#[derive(Clone, Debug)]
pub struct LinkCloser(Arc<dyn Link>);

impl LinkCloser {
    /// A handle on `link`. It keeps the link's memory, not its connection, alive.
    pub fn new(link: &Arc<dyn Link>) -> Self {
        Self(Arc::clone(link))
    }

    /// Ends the link.
    pub fn close(&self) {
        self.0.close(CloseReason::Local);
    }
}

/// The longest that a shell waits in the system before it looks at its clock again. The system's timers stop while a
/// machine is suspended, the node's clock does not.
pub(crate) const NAP: Duration = Duration::from_millis(250);

/// A message this long is taken at once by the buffers of any connection on which there is not much under way.
const EASY_BYTES: usize = 64 * 1024;

/// How long to wait in the system now, if `deadline` is still ahead.
pub(crate) fn nap(now: Instant, deadline: Instant) -> Option<Duration> {
    let left = deadline.since(now);
    (!left.is_zero()).then(|| left.min(NAP))
}

/// Locks a mutex whose data stays consistent if a thread that held it panicked: every update here is a single step.
pub(crate) fn lock<T: ?Sized>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
