//! Which ways a hop has: memory inside a node; shared memory and the network between nodes. The hop itself chooses among
//! them, and goes over to another when one fails (`shoal_transport::path`).

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use shoal_transport::Effects;
use shoal_transport::channel::ChannelOptions;
use shoal_transport::env::Instant;
use shoal_transport::link::{Link, LinkOptions};
use shoal_transport::path::forward::{self, Around, Detour, ForwardError};
use shoal_transport::path::{self, Direct, Expecting, Failure, Opening, PathHealth, PathOptions, PathWatch, Route, RouteError};
use shoal_transport::provider::memory::{MemoryFabric, MemoryProvider, Shape};
use shoal_transport::provider::{AcceptError, Endpoint, Expected, Provider, ProviderKind, Ticket};

use super::detour::Neighbour;
use super::reach;
use crate::discovery::beacon::read_interfaces;
use crate::ids::NodeId;
use crate::service::Services;

/// How long both ends of a hop have to find each other.
pub const LINK_TIMEOUT: Duration = Duration::from_secs(15);

/// Nodes that are asked to pass messages on, if no way leads to a peer itself.
const NEIGHBOURS_MAX: usize = 2;

/// Why nothing was dialled.
const NOTHING_OFFERED: &str = "it offers no endpoint that this node can dial";

/// Slots of a channel beyond the steps in flight.
const SLOTS: u16 = 4;

/// A node's tensor providers.
#[derive(Clone)]
pub struct TensorLinks {
    node: NodeId,
    effects: Effects,
    local: Arc<dyn Provider>,
    network: Vec<Arc<dyn Provider>>,
    /// Reaches the nodes that can be asked to pass messages on.
    services: Option<Services>,
    /// The hops that this node dialled.
    hops: Arc<Mutex<Vec<(NodeId, PathWatch)>>>,
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

impl LinkFailure {
    fn from(peer: NodeId, reason: String) -> Self {
        Self { direction: "from", peer, reason }
    }

    fn to(peer: NodeId, reason: String) -> Self {
        Self { direction: "to", peer, reason }
    }
}

impl TensorLinks {
    /// Links inside `node` by memory, and to others by the `network` providers, best first, which share a desk: a ticket that one of
    /// them expects is good at each.
    pub fn new(node: NodeId, effects: Effects, network: Vec<Arc<dyn Provider>>) -> Self {
        let fabric = MemoryFabric::new(&*effects.rng, Shape::default());
        let local = Arc::new(MemoryProvider::new(effects.clone(), &fabric));
        Self { node, effects, local, network, services: None, hops: Arc::default() }
    }

    /// The same links, and detours over the nodes that `services` is connected to.
    pub fn with_detours(self, services: Services) -> Self {
        Self { services: Some(services), ..self }
    }

    /// Time, chance and threads of the links.
    pub fn effects(&self) -> &Effects {
        &self.effects
    }

    /// Channel sizes for messages of at most `slot_bytes`.
    pub fn options(slot_bytes: u32) -> ChannelOptions {
        ChannelOptions { slot_bytes, slots: SLOTS }
    }

    /// Gets ready for a hop from `peer`: where it is to dial, the secret that it has to know, and what to wait on.
    ///
    /// # Errors
    /// If no provider can take it.
    pub fn expect(&self, peer: NodeId, slot_bytes: u32) -> Result<(Vec<Endpoint>, Ticket, Expecting), LinkFailure> {
        let secret = Ticket::random(&*self.effects.rng);
        let (first, endpoints) = self.desk(peer)?;
        let link = LinkOptions::for_payload(slot_bytes);
        let expecting = path::expect(first, &secret, link, PathOptions::default(), &self.effects);
        let expecting = expecting.map_err(|error| LinkFailure::from(peer, error.to_string()))?;
        Ok((endpoints, secret, expecting))
    }

    /// Gets ready for a single link from `peer`, which no other will replace: where it is to dial, with what, and what to wait on.
    ///
    /// # Errors
    /// If no provider can take it.
    pub fn expect_link(&self, peer: NodeId, slot_bytes: u32) -> Result<(Vec<Endpoint>, Ticket, Expected), LinkFailure> {
        let ticket = Ticket::random(&*self.effects.rng);
        let (first, endpoints) = self.desk(peer)?;
        let expected = first.expect(&ticket, LinkOptions::for_payload(slot_bytes));
        Ok((endpoints, ticket, expected.map_err(|error| LinkFailure::from(peer, error.to_string()))?))
    }

    /// Expects a single link from `peer`, as [`Self::expect_link`] does, and has a thread take it, or hear why it did not come, within
    /// [`LINK_TIMEOUT`]. Gives where the peer is to dial, and with what. Does not wait.
    ///
    /// # Errors
    /// In words, if no link can be taken.
    pub(crate) fn serve_link(
        &self,
        peer: NodeId,
        slot_bytes: u32,
        thread: &str,
        serve: impl FnOnce(Result<Arc<dyn Link>, AcceptError>) + Send + 'static,
    ) -> Result<(Vec<Endpoint>, Ticket), String> {
        let (endpoints, ticket, expected) = self.expect_link(peer, slot_bytes).map_err(|failure| failure.to_string())?;
        let deadline = self.effects.after(LINK_TIMEOUT);
        let body = Box::new(move || serve(expected.accept(deadline)));
        let started = self.effects.spawner.thread(thread.to_owned(), body);
        drop(started.map_err(|error| format!("it cannot start a thread: {error}"))?);
        Ok((endpoints, ticket))
    }

    /// Where links from `peer` are expected, and where it is to dial.
    fn desk(&self, peer: NodeId) -> Result<(&Arc<dyn Provider>, Vec<Endpoint>), LinkFailure> {
        let providers = if peer == self.node { std::slice::from_ref(&self.local) } else { self.network.as_slice() };
        let none = || LinkFailure::from(peer, "this node has no provider that reaches other nodes".to_owned());
        Ok((providers.first().ok_or_else(none)?, providers.iter().flat_map(|provider| provider.endpoints()).collect()))
    }

    /// Makes the first link of a hop to `peer`, which expects it. Blocks for at most [`LINK_TIMEOUT`].
    ///
    /// # Errors
    /// If none of the endpoints can be reached; the reason names each.
    pub fn dial(&self, peer: NodeId, endpoints: &[Endpoint], secret: &Ticket, slot_bytes: u32) -> Result<Opening, LinkFailure> {
        let mut routes = self.routes(endpoints);
        routes.extend(self.detours(peer, endpoints));
        if routes.is_empty() {
            return Err(LinkFailure::to(peer, NOTHING_OFFERED.to_owned()));
        }
        let link = LinkOptions::for_payload(slot_bytes);
        let deadline = self.effects.after(LINK_TIMEOUT);
        let opening = path::dial(routes, secret, link, PathOptions::default(), &self.effects, deadline);
        let opening = opening.map_err(|error| LinkFailure::to(peer, error.to_string()))?;
        let mut hops = self.hops.lock().unwrap_or_else(PoisonError::into_inner);
        hops.retain(|(_, hop)| !hop.is_over());
        hops.push((peer, opening.watch()));
        drop(hops);
        Ok(opening)
    }

    /// What carries each of the hops that this node dialled, in the order in which they were.
    pub fn hops(&self) -> Vec<(NodeId, PathHealth)> {
        let hops = self.hops.lock().unwrap_or_else(PoisonError::into_inner);
        hops.iter().filter_map(|(peer, hop)| hop.health().map(|health| (*peer, health))).collect()
    }

    /// Makes a single link to `peer`, which expects it. Blocks for at most [`LINK_TIMEOUT`].
    ///
    /// # Errors
    /// If none of the endpoints can be reached; the reason names each.
    pub fn dial_link(&self, peer: NodeId, endpoints: &[Endpoint], ticket: &Ticket, slot_bytes: u32) -> Result<Arc<dyn Link>, LinkFailure> {
        let deadline = self.effects.after(LINK_TIMEOUT);
        let mut reasons = Vec::new();
        let ways = self.ways(endpoints);
        for (at, (provider, endpoint)) in ways.iter().enumerate() {
            let now = self.effects.clock.now();
            let until = now + reach::share(deadline.since(now), ways.len() - at);
            match provider.dial(endpoint, ticket, LinkOptions::for_payload(slot_bytes), until) {
                Ok(link) => return Ok(link),
                Err(error) => reasons.push(error.to_string()),
            }
        }
        if reasons.is_empty() {
            reasons.push(NOTHING_OFFERED.to_owned());
        }
        Err(LinkFailure::to(peer, reasons.join("; ")))
    }

    /// The kinds of provider that this node shares with whoever has these endpoints, best first.
    pub fn common(&self, endpoints: &[Endpoint]) -> Vec<ProviderKind> {
        let own = std::iter::once(&self.local).chain(&self.network).map(|provider| provider.kind());
        own.filter(|kind| endpoints.iter().any(|endpoint| endpoint.kind() == *kind)).collect()
    }

    /// The ways to a peer over others.
    fn detours(&self, peer: NodeId, endpoints: &[Endpoint]) -> Vec<Arc<dyn Route>> {
        let Some(services) = self.services.as_ref().filter(|_| peer != self.node) else { return Vec::new() };
        let others = services.connected().into_iter().filter(|node| *node != peer && *node != self.node);
        let around = |node| -> Arc<dyn Route> {
            let ask = Neighbour::new(services.clone(), self.effects.clone(), node, peer, endpoints.to_vec());
            Arc::new(Around::new(Arc::new(ask), self.network.clone(), self.effects.clone()))
        };
        others.take(NEIGHBOURS_MAX).map(around).collect()
    }

    /// Opens a detour over this node to whoever takes links at these endpoints and expects this ticket. Gives where the asking
    /// end is expected, and what it has to show. Blocks, at most until `deadline`.
    ///
    /// # Errors
    /// [`ForwardError`].
    pub(super) fn forward(
        &self,
        endpoints: &[Endpoint],
        ticket: &Ticket,
        link: LinkOptions,
        deadline: Instant,
    ) -> Result<(Vec<Endpoint>, Ticket, Detour), ForwardError> {
        let nobody = || RouteError { failure: Failure::Unreached, reason: "this node has no way to other nodes".to_owned() };
        let first = self.network.first().ok_or_else(|| ForwardError::Onward(nobody()))?;
        let (ticket, detour) = forward::forward(first, &self.routes(endpoints), ticket, link, &self.effects, deadline)?;
        Ok((self.network.iter().flat_map(|provider| provider.endpoints()).collect(), ticket, detour))
    }

    /// The ways to a peer with these endpoints, those that most probably lead there first.
    fn routes(&self, endpoints: &[Endpoint]) -> Vec<Arc<dyn Route>> {
        let ways = self.ways(endpoints).into_iter();
        ways.map(|(provider, endpoint)| -> Arc<dyn Route> { Arc::new(Direct::new(Arc::clone(provider), endpoint)) }).collect()
    }

    /// Who dials what, in the same order.
    fn ways(&self, endpoints: &[Endpoint]) -> Vec<(&Arc<dyn Provider>, Endpoint)> {
        let far = endpoints.iter().any(|endpoint| matches!(endpoint, Endpoint::Tcp(_)));
        let interfaces = if far { read_interfaces() } else { Vec::new() };
        let mut ways = Vec::new();
        for provider in std::iter::once(&self.local).chain(&self.network) {
            let offered: Vec<Endpoint> = endpoints.iter().filter(|e| e.kind() == provider.kind()).copied().collect();
            ways.extend(reach::in_order(&offered, &interfaces).into_iter().map(|endpoint| (provider, endpoint)));
        }
        ways
    }

    /// Frees the ports and ends every link.
    pub fn shutdown(&self) {
        self.network.iter().for_each(|provider| provider.shutdown());
        self.local.shutdown();
    }
}
