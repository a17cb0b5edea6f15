//! The control network as the actors see it: authenticated peers and bounded frames, whatever carries them.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;

use super::{BoxFuture, Clock, Rng, Spawner, Trouble};
use crate::ids::NodeId;
use crate::secret::{ClusterKey, Identity};

/// Longest control frame, in bytes. Tensors never travel here.
pub const FRAME_BYTES_MAX: usize = 4 * 1024 * 1024;

/// What a network is started with.
#[derive(Clone)]
pub struct NetworkConfig {
    /// The node's key pair.
    pub identity: Identity,
    /// The key of a private cluster; none for an open one.
    pub cluster: Option<ClusterKey>,
    /// Where to listen for peers; port 0 picks a free one. Empty: all interfaces, v4 and v6, port 0.
    pub listen: Vec<SocketAddr>,
    /// Whether to announce and look for peers by mDNS.
    pub mdns: bool,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Chance.
    pub rng: Arc<dyn Rng>,
    /// Tasks.
    pub spawner: Arc<dyn Spawner>,
}

impl fmt::Debug for NetworkConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NetworkConfig").field("listen", &self.listen).field("mdns", &self.mdns).finish_non_exhaustive()
    }
}

/// A peer that has passed the handshake.
#[derive(Debug, Clone)]
pub struct Connected {
    /// Who it is.
    pub peer: NodeId,
    /// The address that it is reached at or came from.
    pub address: SocketAddr,
    /// Whether this node dialled.
    pub dialled: bool,
}

/// Why a peer is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum DisconnectReason {
    /// Its end closed, or the connection broke.
    Closed,
    /// This node asked for it.
    Requested,
    /// It sent what the protocol does not allow; the text says what.
    Misbehaved(String),
}

/// What a network reports. Order within one peer is the order of the wire.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum NetworkEvent {
    /// The node listens at one more address.
    Listening(SocketAddr),
    /// A peer was announced (mDNS) at these addresses.
    Discovered {
        /// Who, as announced. Proved only by a connection.
        peer: NodeId,
        /// Where.
        addresses: Vec<SocketAddr>,
    },
    /// A peer is connected, authenticated and of the same cluster and wire version. Sent once per peer until
    /// [`NetworkEvent::Disconnected`], however many connections carry it.
    Connected(Connected),
    /// No connection to the peer is left.
    Disconnected {
        /// Who.
        peer: NodeId,
        /// Why.
        reason: DisconnectReason,
    },
    /// A dial came to nothing.
    DialFailed {
        /// Where it went.
        address: SocketAddr,
        /// What happened, for people.
        reason: String,
    },
    /// A peer was turned away, or turned this node away: another wire version, no key, the wrong key.
    Refused {
        /// Who, if known.
        peer: Option<NodeId>,
        /// Where.
        address: Option<SocketAddr>,
        /// Why and what to do, for people.
        reason: String,
    },
    /// A frame from a connected peer.
    Frame {
        /// From whom.
        peer: NodeId,
        /// The frame, at most [`FRAME_BYTES_MAX`] long. A network may count it against what the peer is allowed to
        /// have unread until it is dropped, so whoever keeps a part of it for long copies that part.
        frame: Bytes,
    },
    /// A dial reached a peer that is connected already. The connection that was there stays.
    AlreadyConnected {
        /// Who answered.
        peer: NodeId,
        /// Where the dial went.
        address: SocketAddr,
    },
    /// Something does not work, or not as it was told before.
    Trouble(Trouble),
    /// It works now.
    TroubleOver {
        /// What the trouble was about.
        about: String,
    },
}

/// Where a network delivers its events. It must not block.
pub type NetworkSink = Arc<dyn Fn(NetworkEvent) + Send + Sync>;

/// Why a frame was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// No connection to the peer.
    #[error("node {0} is not connected")]
    NotConnected(NodeId),
    /// The peer's write queue is full: it reads too slowly.
    #[error("node {0} reads too slowly: its queue is full")]
    Overloaded(NodeId),
    /// The frame is too long.
    #[error("a control frame of {bytes} bytes is longer than the limit of {limit}")]
    TooLong {
        /// Length of the frame.
        bytes: usize,
        /// [`FRAME_BYTES_MAX`].
        limit: usize,
    },
}

/// Why a network did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkError {
    /// An address could not be listened at.
    #[error("cannot listen at {address}: {reason}; choose another address or port")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// The system's words.
        reason: String,
        /// Whether another program listens there.
        in_use: bool,
    },
    /// Anything else that kept it from starting.
    #[error("the control network did not start: {0}")]
    Start(String),
}

/// A node's running control network.
pub trait Network: Send + Sync + fmt::Debug + 'static {
    /// Queues a frame for a connected peer. Never blocks.
    ///
    /// # Errors
    /// [`SendError`] if the frame was not taken.
    fn send(&self, peer: NodeId, frame: Bytes) -> Result<(), SendError>;

    /// Tries to connect to a peer. The answer is an event. `peer` is verified when given.
    fn dial(&self, peer: Option<NodeId>, address: SocketAddr);

    /// Nothing is heard of a connected peer, which may be at these addresses, too. A network that can make another connection to it tries;
    /// if one comes about, [`NetworkEvent::Disconnected`] and [`NetworkEvent::Connected`] say so.
    fn doubt(&self, peer: NodeId, addresses: Vec<SocketAddr>) {
        let _ = (peer, addresses);
    }

    /// Closes every connection to a peer.
    fn disconnect(&self, peer: NodeId);

    /// Stops: connections are closed, ports are freed when the future resolves.
    fn shutdown(&self) -> BoxFuture<'static, ()>;
}

/// Starts the control network of a node.
pub trait NetworkFactory: Send + Sync + fmt::Debug + 'static {
    /// Starts it; events go to `sink` until [`Network::shutdown`] has resolved.
    fn start<'a>(&'a self, config: NetworkConfig, sink: NetworkSink) -> BoxFuture<'a, Result<Arc<dyn Network>, NetworkError>>;
}
