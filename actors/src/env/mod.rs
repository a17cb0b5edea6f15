//! The seams of a node: every effect that its actors have goes through an [`Env`].
//!
//! [`Clock`], [`Rng`] and [`Spawner`] come from the transport, which needs them too. Added here are the control
//! [`Network`], the node's [`Storage`] and its [`Compute`].

mod compute;
mod network;
mod storage;
mod system;

use std::sync::Arc;

pub use compute::{Compute, ComputeError};
pub use network::{
    Connected, DisconnectReason, FRAME_BYTES_MAX, Network, NetworkConfig, NetworkError, NetworkEvent, NetworkFactory, NetworkSink,
    SendError,
};
pub use shoal_transport::env::{BoxFuture, Clock, Instant, Join, Rng, Spawner, SystemRng};
pub use storage::{DirectoryStorage, MemoryStorage, Storage};
pub use system::{SystemClock, SystemSpawner};

/// Everything through which a node touches the world.
#[derive(Clone, Debug)]
pub struct Env {
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Chance.
    pub rng: Arc<dyn Rng>,
    /// Tasks and threads.
    pub spawner: Arc<dyn Spawner>,
    /// Control messages to peers.
    pub network: Arc<dyn NetworkFactory>,
    /// The node's small persistent files: identity, last-seen peers.
    pub storage: Arc<dyn Storage>,
    /// Devices that run stages.
    pub compute: Arc<dyn Compute>,
}
