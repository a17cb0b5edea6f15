//! Which provider carries a hop: memory inside a node, the network between nodes.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use shoal_transport::Effects;
use shoal_transport::channel::ChannelOptions;
use shoal_transport::link::{Link, LinkOptions};
use shoal_transport::provider::memory::{MemoryFabric, MemoryProvider, Shape};
use shoal_transport::provider::{Endpoint, Expected, Provider, ProviderKind, Ticket};

use super::reach;
use crate::discovery::beacon::read_interfaces;
use crate::ids::NodeId;

/// How long both ends of a hop have to find each other.
pub const LINK_TIMEOUT: Duration = Duration::from_secs(15);

/// Slots of a channel beyond the steps in flight.
const SLOTS: u16 = 4;

/// A node's tensor providers.
#[derive(Clone)]
pub struct TensorLinks {
    node: NodeId,
    effects: Effects,
    local: Arc<dyn Provider>,
    network: Vec<Arc<dyn Provider>>,
}

impl fmt::Debug for TensorLinks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorLinks").field("network", &self.network).finish_non_exhaustive()
    }
}

/// Why a hop has no link.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no tensor link {direction} node {peer:?}: {reason}")]
pub struct LinkFailure {
    direction: &'static str,
    peer: NodeId,
    reason: String,
}

impl TensorLinks {
    /// Links inside `node` by memory, and to others by the `network` providers, best first, which share a desk: a ticket that one of
    /// them expects is good at each.
    pub fn new(node: NodeId, effects: Effects, network: Vec<Arc<dyn Provider>>) -> Self {
        let fabric = MemoryFabric::new(&*effects.rng, Shape::default());
        let local = Arc::new(MemoryProvider::new(effects.clone(), &fabric));
        Self { node, effects, local, network }
    }

    /// Time, chance and threads of the links.
    pub fn effects(&self) -> &Effects {
        &self.effects
    }

    /// Channel sizes for messages of at most `slot_bytes`.
    pub fn options(slot_bytes: u32) -> ChannelOptions {
        ChannelOptions { slot_bytes, slots: SLOTS }
    }

    /// Gets ready for one link from `peer`: where it is to dial, with what, and what to wait on.
    ///
    /// # Errors
    /// If no provider can take it.
    pub fn expect(&self, peer: NodeId, slot_bytes: u32) -> Result<(Vec<Endpoint>, Ticket, Expected), LinkFailure> {
        let ticket = Ticket::random(&*self.effects.rng);
        let providers = if peer == self.node { std::slice::from_ref(&self.local) } else { self.network.as_slice() };
        let failure = |reason: String| LinkFailure { direction: "from", peer, reason };
        let first = providers.first().ok_or_else(|| failure("this node has no provider that reaches other nodes".to_owned()))?;
        let expected = first.expect(&ticket, LinkOptions::for_payload(slot_bytes)).map_err(|e| failure(e.to_string()))?;
        Ok((providers.iter().flat_map(|provider| provider.endpoints()).collect(), ticket, expected))
    }

    /// Links to `peer`, which expects it. Blocks for at most [`LINK_TIMEOUT`].
    ///
    /// # Errors
    /// If none of the endpoints can be reached; the reason names each.
    pub fn dial(&self, peer: NodeId, endpoints: &[Endpoint], ticket: &Ticket, slot_bytes: u32) -> Result<Arc<dyn Link>, LinkFailure> {
        let deadline = self.effects.after(LINK_TIMEOUT);
        let mut reasons = Vec::new();
        for provider in std::iter::once(&self.local).chain(&self.network) {
            let offered: Vec<Endpoint> = endpoints.iter().filter(|e| e.kind() == provider.kind()).copied().collect();
            let far = offered.iter().any(|endpoint| matches!(endpoint, Endpoint::Tcp(_)));
            let interfaces = if far { read_interfaces() } else { Vec::new() };
            let order = reach::in_order(&offered, &interfaces);
            for (at, endpoint) in order.iter().enumerate() {
                let now = self.effects.clock.now();
                let until = now + reach::share(deadline.since(now), order.len() - at);
                match provider.dial(endpoint, ticket, LinkOptions::for_payload(slot_bytes), until) {
                    Ok(link) => return Ok(link),
                    Err(error) => reasons.push(error.to_string()),
                }
            }
        }
        if reasons.is_empty() {
            reasons.push("it offers no endpoint that this node can dial".to_owned());
        }
        Err(LinkFailure { direction: "to", peer, reason: reasons.join("; ") })
    }

    /// The kinds of provider that this node shares with whoever has these endpoints, best first.
    pub fn common(&self, endpoints: &[Endpoint]) -> Vec<ProviderKind> {
        let own = std::iter::once(&self.local).chain(&self.network).map(|provider| provider.kind());
        own.filter(|kind| endpoints.iter().any(|endpoint| endpoint.kind() == *kind)).collect()
    }

    /// Frees the ports and ends every link.
    pub fn shutdown(&self) {
        self.network.iter().for_each(|provider| provider.shutdown());
        self.local.shutdown();
    }
}
