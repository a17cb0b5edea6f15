//! The real network: libp2p's swarm on TCP, Noise and yamux.

mod address;
mod announce;
mod behaviour;
mod connection;
mod control;
mod driver;
mod errors;
mod listen;
mod outreach;
mod scoped;
mod tasks;
mod wire;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};

use self::connection::Link;
use self::driver::{Command, Driver};
use super::queue::PushError;
use crate::card::WIRE_VERSION;
use crate::env::{BoxFuture, FRAME_BYTES_MAX, Network, NetworkConfig, NetworkError, NetworkFactory, NetworkSink, SendError};
use crate::ids::NodeId;

/// Starts control networks on libp2p. It has to be started on a tokio runtime.
#[derive(Debug, Clone)]
pub struct Libp2pNetwork {
    wire_version: u32,
    carrier_nat: bool,
}

impl Default for Libp2pNetwork {
    fn default() -> Self {
        Self { wire_version: WIRE_VERSION, carrier_nat: false }
    }
}

impl Libp2pNetwork {
    /// Speaks another wire version than this program's. Only for tests of how versions refuse each other.
    #[must_use]
    pub fn with_wire_version(mut self, version: u32) -> Self {
        self.wire_version = version;
        self
    }

    /// Whether an open cluster takes peers from 100.64.0.0/10 as well. Overlay networks such as Tailscale use these
    /// addresses, but so do providers that put strangers behind one address; off by default.
    #[must_use]
    pub fn with_carrier_nat(mut self, allowed: bool) -> Self {
        self.carrier_nat = allowed;
        self
    }
}

impl NetworkFactory for Libp2pNetwork {
    fn start<'a>(&'a self, config: NetworkConfig, sink: NetworkSink) -> BoxFuture<'a, Result<Arc<dyn Network>, NetworkError>> {
        Box::pin(async move {
            let spawner = Arc::clone(&config.spawner);
            let links = Arc::new(Links::default());
            let (commands, inbox) = mpsc::unbounded_channel();
            let driver = Driver::start(self, config, sink, Arc::clone(&links), inbox)?;
            spawner.task("network driver", Box::pin(driver.run()));
            Ok(Arc::new(Running { links, commands }) as Arc<dyn Network>)
        })
    }
}

/// Connected peers, for those who send.
#[derive(Default)]
struct Links {
    by_peer: RwLock<BTreeMap<NodeId, Arc<Link>>>,
}

impl Links {
    fn insert(&self, peer: NodeId, link: Arc<Link>) {
        self.by_peer.write().unwrap_or_else(PoisonError::into_inner).insert(peer, link);
    }

    fn remove(&self, peer: NodeId) {
        self.by_peer.write().unwrap_or_else(PoisonError::into_inner).remove(&peer);
    }

    pub(super) fn get(&self, peer: NodeId) -> Option<Arc<Link>> {
        self.by_peer.read().unwrap_or_else(PoisonError::into_inner).get(&peer).cloned()
    }
}

/// A handle to the driver. When it is dropped, the driver stops.
struct Running {
    links: Arc<Links>,
    commands: mpsc::UnboundedSender<Command>,
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Libp2pNetwork(running)")
    }
}

impl Network for Running {
    fn send(&self, peer: NodeId, frame: Bytes) -> Result<(), SendError> {
        if frame.len() > FRAME_BYTES_MAX {
            return Err(SendError::TooLong { bytes: frame.len(), limit: FRAME_BYTES_MAX });
        }
        let link = self.links.get(peer).ok_or(SendError::NotConnected(peer))?;
        link.queue.push(frame).map_err(|error| match error {
            PushError::Full => SendError::Overloaded(peer),
            PushError::Closed => SendError::NotConnected(peer),
        })
    }

    fn dial(&self, peer: Option<NodeId>, address: SocketAddr) {
        let _ = self.commands.send(Command::Dial { peer, address });
    }

    fn doubt(&self, peer: NodeId, addresses: Vec<SocketAddr>) {
        let _ = self.commands.send(Command::Doubt { peer, addresses });
    }

    fn disconnect(&self, peer: NodeId) {
        let _ = self.commands.send(Command::Disconnect(peer));
    }

    fn shutdown(&self) -> BoxFuture<'static, ()> {
        let (done, stopped) = oneshot::channel();
        let asked = self.commands.send(Command::Shutdown(done));
        Box::pin(async move {
            if asked.is_ok() {
                // An error says that the driver has stopped for another reason.
                let _ = stopped.await;
            }
        })
    }
}
