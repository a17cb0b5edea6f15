//! Ways to reach a peer, and how a link over one of them comes about.
//!
//! Two nodes that want a link agree on a [`Ticket`] over their control stream. The accepting end tells its provider to
//! [`expect`](Provider::expect) it, the other one [`dial`](Provider::dial)s an [`Endpoint`] of the accepting end with the
//! same ticket. Both prove that they hold the ticket's secret, without sending it, before anything else is said; a
//! ticket makes one link.

mod expected;
mod handshake;
mod links;
pub mod memory;
#[cfg(unix)]
mod reception;
#[cfg(target_os = "linux")]
pub mod shm;
pub mod tcp;
mod ticket;
#[cfg(unix)]
pub mod verbs;
mod words;

#[cfg(test)]
mod conformance;
#[cfg(test)]
pub(crate) mod golden;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use expected::{AcceptError, Canceller, Desk, Expected, accept_any};
pub use ticket::Ticket;

#[cfg(any(test, fuzzing))]
pub use handshake::fuzz as fuzz_handshake;

use crate::env::Instant;
use crate::link::{CloseReason, Link, LinkOptions};

/// What carries a link. Sorted from worst to best where two nodes have several in common. Kinds are only added at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ProviderKind {
    /// TCP over whatever the system has an address on.
    Tcp,
    /// Memory that two processes of one machine share.
    Shm,
    /// Two ends in one process.
    Memory,
    /// An RDMA adapter.
    Verbs,
}

impl ProviderKind {
    /// Higher is better. The order of declaration is that of the wire.
    const fn rank(self) -> u8 {
        match self {
            Self::Tcp => 0,
            Self::Verbs => 1,
            Self::Shm => 2,
            Self::Memory => 3,
        }
    }
}

impl Ord for ProviderKind {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.rank().cmp(&other.rank())
    }
}

impl PartialOrd for ProviderKind {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for ProviderKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Shm => "shm",
            Self::Memory => "memory",
            Self::Verbs => "verbs",
        })
    }
}

/// What a provider's links can do. The layer above adapts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Whether `put` and `get` reach the peer's memory without a thread of the peer.
    pub one_sided: bool,
    /// Whether the ends may be on different machines.
    pub remote: bool,
    /// Longest message in bytes, header included.
    pub message_bytes_max: u32,
    /// Round trip of a short message that such links usually have, in nanoseconds: a first guess until it is measured.
    pub rtt_guess_ns: u64,
}

/// Where a provider can be dialled. Passed to peers in node cards and on the control stream; kinds are only added at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Endpoint {
    /// A TCP address.
    Tcp(SocketAddr),
    /// A place in a [`memory::MemoryFabric`].
    Memory {
        /// Which fabric; another process never has the same.
        fabric: u128,
        /// Which provider on it.
        port: u64,
    },
    /// A door for processes of the same machine.
    Shm {
        /// Which: drawn at random, so that another machine never has the same.
        door: u128,
    },
    /// Where an RDMA adapter's links are made: the address of its network interface.
    Verbs {
        /// The TCP address that the two ends meet at.
        address: SocketAddr,
    },
}

impl Endpoint {
    /// The provider that can dial it.
    pub const fn kind(&self) -> ProviderKind {
        match self {
            Self::Tcp(_) => ProviderKind::Tcp,
            Self::Memory { .. } => ProviderKind::Memory,
            Self::Shm { .. } => ProviderKind::Shm,
            Self::Verbs { .. } => ProviderKind::Verbs,
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "tcp {address}"),
            Self::Memory { fabric, port } => write!(f, "memory {:08x}/{port}", fabric >> 96),
            Self::Shm { door } => write!(f, "shm {:08x}", door >> 96),
            Self::Verbs { address } => write!(f, "verbs {address}"),
        }
    }
}

/// Why a provider did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// An address could not be listened at.
    #[error("cannot listen for tensor links at {address}: {source}; choose another address or port")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// The system's words.
        source: std::io::Error,
    },
    /// The door for processes of the same machine could not be opened.
    #[error("cannot open a door for tensor links between processes of this machine: {0}")]
    Door(std::io::Error),
    /// A thread could not be started.
    #[error("cannot start a thread for tensor links: {0}")]
    Thread(std::io::Error),
    /// The machine has nothing that this kind of link goes over. Others are as good as before.
    #[cfg(unix)]
    #[error(transparent)]
    NoDevices(#[from] verbs::NoDevices),
}

/// Why a ticket cannot be expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExpectError {
    /// The ticket's id is expected already.
    #[error("a link with ticket {id:032x} is already expected; draw a new ticket for each link")]
    Duplicate {
        /// The ticket's id.
        id: u128,
    },
    /// Too many links are expected at once.
    #[error("{limit} links are expected already; drop those that are no longer wanted")]
    TooMany {
        /// How many there may be.
        limit: usize,
    },
    /// The provider has been shut down.
    #[error("the {0} provider has been shut down")]
    Stopped(ProviderKind),
}

/// Why a dial gave no link.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DialError {
    /// The endpoint belongs to another kind of provider.
    #[error("the {provider} provider cannot dial {endpoint}")]
    Endpoint {
        /// The provider that was asked.
        provider: ProviderKind,
        /// What it was asked for.
        endpoint: Endpoint,
    },
    /// Nobody answers there.
    #[error("cannot reach {endpoint}: {reason}")]
    Unreachable {
        /// Where.
        endpoint: Endpoint,
        /// The system's words.
        reason: String,
    },
    /// The host is there, and nobody listens. If a peer ever did, its process has ended.
    #[error("nobody listens at {endpoint}")]
    Nobody {
        /// Where.
        endpoint: Endpoint,
    },
    /// The peer does not expect this ticket with this secret (any more). It does not say which.
    #[error("{endpoint} refused ticket {id:032x}: it does not expect it, has used it already, or holds another secret for it")]
    Refused {
        /// Where.
        endpoint: Endpoint,
        /// The ticket's id.
        id: u128,
    },
    /// Whoever answered could not prove that it holds the ticket's secret.
    #[error("{endpoint} answered ticket {id:032x} without holding its secret; something else listens there")]
    Impostor {
        /// Where.
        endpoint: Endpoint,
        /// The ticket's id.
        id: u128,
    },
    /// One end demands an encrypted link, the other forbids it.
    #[error("no link with {endpoint}: one end demands an encrypted link and the other forbids it; set both ends alike")]
    Encryption {
        /// Where.
        endpoint: Endpoint,
    },
    /// The connection ended, or something that is no Shoal node answered, before both ends had proved themselves.
    #[error("the handshake with {endpoint} failed: {reason}")]
    Handshake {
        /// Where.
        endpoint: Endpoint,
        /// What happened.
        reason: CloseReason,
    },
    /// No link by the deadline.
    #[error("{endpoint} did not finish the handshake by the deadline")]
    Deadline {
        /// Where.
        endpoint: Endpoint,
    },
    /// The provider has been shut down.
    #[error("the {0} provider has been shut down")]
    Stopped(ProviderKind),
}

/// A way to reach peers. Cheap to share; every call may come from any thread.
pub trait Provider: Send + Sync + fmt::Debug + 'static {
    /// Its kind.
    fn kind(&self) -> ProviderKind;

    /// What its links can do.
    fn capabilities(&self) -> Capabilities;

    /// Where peers can dial it, best first. Asked again at each call: addresses come and go.
    fn endpoints(&self) -> Vec<Endpoint>;

    /// Prepares for one link with this ticket. Until then, and after [`Expected`] is dropped, a peer that dials with it
    /// is refused.
    ///
    /// # Errors
    /// [`ExpectError`].
    fn expect(&self, ticket: &Ticket, options: LinkOptions) -> Result<Expected, ExpectError>;

    /// Makes a link to a peer that expects this ticket. Blocks.
    ///
    /// # Errors
    /// [`DialError`].
    fn dial(&self, endpoint: &Endpoint, ticket: &Ticket, options: LinkOptions, deadline: Instant) -> Result<Arc<dyn Link>, DialError>;

    /// Ends every link, frees every port and waits for the provider's threads. Dropping the provider does the same.
    fn shutdown(&self);
}
