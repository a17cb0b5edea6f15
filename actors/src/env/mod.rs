//! The seams of a node: every effect that its actors have goes through an [`Env`].
//!
//! [`Clock`], [`Rng`] and [`Spawner`] come from the transport, which needs them too. Added here are the control
//! [`Network`], the node's [`Storage`] and its [`Compute`].

mod beacon;
mod compute;
mod http;
mod network;
mod storage;
mod system;
mod text;
mod trouble;

use std::sync::Arc;

pub use beacon::{BEACON_BYTES_MAX, Beacon, BeaconError, BeaconPacket, BeaconSink, BeaconSocket, Family, Interface, InterfaceAddress};
pub use compute::{Compute, ComputeError};
pub use http::{Credentials, Http, HttpError, HttpRequest, HttpResponse, ParsedUrl, ProxyRules, SystemHttp, TlsRoots, Url, UrlError};
pub use network::{
    Connected, DisconnectReason, FRAME_BYTES_MAX, Network, NetworkConfig, NetworkError, NetworkEvent, NetworkFactory, NetworkSink,
    SendError,
};
/// What a stage is and does, for whoever brings a [`Compute`] of their own.
pub use shoal_engine::stage;
pub use shoal_transport::env::{BoxFuture, Clock, Instant, Join, Rng, Spawner, SystemRng};
pub use storage::{DirectoryStorage, MemoryStorage, Storage};
pub use system::{SystemClock, SystemSpawner};
pub use text::{TextDecoder, TextModel};
pub use trouble::{TROUBLES_MAX, Trouble};

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

impl Env {
    /// Runs `work` on a thread of its own and waits for what it gives.
    ///
    /// # Errors
    /// If the thread cannot be started, or panicked.
    pub fn blocking<T: Send + 'static>(
        &self,
        name: &'static str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> BoxFuture<'static, Result<T, String>> {
        let (send, receive) = tokio::sync::oneshot::channel();
        let started = self.spawner.thread(name.to_owned(), Box::new(move || drop(send.send(work()))));
        Box::pin(async move {
            drop(started.map_err(|error| format!("cannot start a thread: {error}"))?);
            receive.await.map_err(|_| format!("the thread `{name}` panicked; this is a bug"))
        })
    }
}
