//! The books of an exchange: hosts, their addresses, who believes to be connected to whom.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use shoal_actors::env::{NetworkConfig, NetworkError, NetworkSink};
use shoal_actors::ids::NodeId;
use shoal_actors::secret::ClusterKey;

use super::link::{LinkModel, Wire};
use crate::world::World;

/// A node that runs.
pub(super) struct Host {
    pub(super) life: u64,
    pub(super) sink: NetworkSink,
    pub(super) key: Option<ClusterKey>,
    pub(super) announces: bool,
    pub(super) addresses: Vec<SocketAddr>,
}

/// Everything that an exchange knows.
pub(super) struct Hosts {
    pub(super) model: LinkModel,
    pub(super) running: BTreeMap<NodeId, Host>,
    /// Numbers of all nodes that ever ran: a node keeps its address.
    pub(super) numbers: BTreeMap<NodeId, u16>,
    pub(super) by_address: BTreeMap<SocketAddr, NodeId>,
    /// Hosts without power: nobody answers there, not even to refuse.
    pub(super) dark: BTreeSet<NodeId>,
    /// Who believes to be connected to whom, and over which session.
    pub(super) views: BTreeMap<(NodeId, NodeId), u64>,
    /// Pairs without any way between them, lower id first.
    pub(super) cut: BTreeSet<(NodeId, NodeId)>,
    pub(super) wires: BTreeMap<(NodeId, NodeId), Wire>,
    /// When the last frame from a life of one node reached another, in nanoseconds.
    pub(super) heard: BTreeMap<(NodeId, NodeId), (u64, u64)>,
    last_life: u64,
    last_session: u64,
}

pub(super) fn pair(one: NodeId, other: NodeId) -> (NodeId, NodeId) {
    if one < other { (one, other) } else { (other, one) }
}

impl Hosts {
    pub(super) fn new(model: LinkModel) -> Self {
        Self {
            model,
            running: BTreeMap::new(),
            numbers: BTreeMap::new(),
            by_address: BTreeMap::new(),
            dark: BTreeSet::new(),
            views: BTreeMap::new(),
            cut: BTreeSet::new(),
            wires: BTreeMap::new(),
            heard: BTreeMap::new(),
            last_life: 0,
            last_session: 0,
        }
    }

    /// The number that a node has in the trace; the highest for one that never ran.
    pub(super) fn number(&self, node: NodeId) -> u16 {
        self.numbers.get(&node).copied().unwrap_or(u16::MAX)
    }

    pub(super) fn is_cut(&self, one: NodeId, other: NodeId) -> bool {
        self.cut.contains(&pair(one, other))
    }

    pub(super) fn wire(&mut self, world: &World, from: NodeId, to: NodeId) -> &mut Wire {
        let purpose = u64::from(self.number(from)) << 16 | u64::from(self.number(to));
        self.wires.entry((from, to)).or_insert_with(|| Wire::new(world.chance("wire", purpose)))
    }

    pub(super) fn next_session(&mut self) -> u64 {
        self.last_session += 1;
        self.last_session
    }

    /// Takes a node in, and says which life of it this is.
    pub(super) fn start(&mut self, number: u16, config: &NetworkConfig, sink: NetworkSink) -> Result<u64, NetworkError> {
        let me = config.identity.node();
        if self.running.contains_key(&me) {
            return Err(NetworkError::Start(format!("node {} already runs on this exchange", me.short())));
        }
        self.numbers.insert(me, number);
        let [high, low] = number.wrapping_add(1).to_be_bytes();
        let own = SocketAddr::from(([10, 77, high, low], 52801));
        let wanted = if config.listen.is_empty() { vec![own] } else { config.listen.clone() };
        let mut addresses = Vec::new();
        for mut address in wanted {
            if address.ip().is_unspecified() {
                address.set_ip(own.ip());
            }
            if address.port() == 0 {
                address.set_port(own.port());
            }
            let taken = self.by_address.get(&address).is_some_and(|by| *by != me && self.running.contains_key(by));
            if taken {
                return Err(NetworkError::Listen { address, reason: "another node listens there".to_owned(), in_use: true });
            }
            addresses.push(address);
        }
        self.last_life += 1;
        self.dark.remove(&me);
        self.by_address.extend(addresses.iter().map(|address| (*address, me)));
        let host = Host { life: self.last_life, sink, key: config.cluster.clone(), announces: config.mdns, addresses };
        self.running.insert(me, host);
        Ok(self.last_life)
    }

    /// Whether this life of a node still runs.
    pub(super) fn lives(&self, node: NodeId, life: u64) -> bool {
        self.running.get(&node).is_some_and(|host| host.life == life)
    }
}
