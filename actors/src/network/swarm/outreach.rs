//! How the driver reaches out: dials, what became of them, and whom mDNS announces.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use libp2p::swarm::ConnectionId;
use libp2p::swarm::dial_opts::{DialOpts, PeerCondition};

use super::address::{lacks_zone, link_local_zones, multiaddr, node_id, peer_id, socket_address};
use super::announce::Found;
use super::driver::{Dial, Driver, Target};
use super::errors::dial_error;
use crate::env::NetworkEvent;
use crate::ids::NodeId;

/// Addresses of one announcement that are passed on.
const ADDRESSES_MAX: usize = 16;
/// Addresses that a peer is dialled at when nothing is heard over the connection to it.
const DOUBT_MAX: usize = 8;
/// Interfaces that a link-local address without a zone is tried over.
const ZONES_MAX: usize = 4;

impl Driver {
    pub(super) fn dial(&mut self, peer: Option<NodeId>, address: SocketAddr) {
        let failed = |reason: String| NetworkEvent::DialFailed { address, reason };
        if peer == Some(self.party.node) {
            return self.emit(failed("it is this node itself".to_owned()));
        }
        if let Some(peer) = peer.filter(|peer| self.peers.is_connected(*peer)) {
            return self.emit(NetworkEvent::AlreadyConnected { peer, address });
        }
        self.reach(peer, address, true);
    }

    /// Nothing is heard over the connection to a peer, which may be at these addresses, too: the first new connection to it takes the
    /// place of that one.
    pub(super) fn doubt(&mut self, peer: NodeId, mut addresses: Vec<SocketAddr>) {
        let Some(doubted) = self.peers.doubt(peer, self.clock.now()) else { return };
        // Where the connection leads, the others come first.
        let present = self.connections.get(&doubted).map(|connection| connection.address.ip());
        addresses.retain(|address| !address.ip().is_loopback() || present.is_some_and(|ip| ip.is_loopback()));
        addresses.sort_by_key(|address| present == Some(address.ip()));
        addresses.truncate(DOUBT_MAX);
        tracing::info!(target: "shoal::network", ?peer, ?addresses, "nothing is heard of a peer; trying its other addresses");
        for address in addresses {
            self.reach(Some(peer), address, false);
        }
    }

    fn reach(&mut self, peer: Option<NodeId>, address: SocketAddr, told: bool) {
        let failed = |reason: String| NetworkEvent::DialFailed { address, reason };
        if self.dials.values().any(|dial| dial.address == address && dial.peer == peer) {
            return;
        }
        let now = self.clock.now();
        let standing = peer.and_then(|peer| self.refused.standing(&Target::Node(peer), now));
        if let Some(standing) = standing.or_else(|| self.refused.standing(&Target::Address(address), now)) {
            let seconds = standing.left.as_millis().div_ceil(1000);
            return self.say(told, failed(format!("refused a moment ago, not tried again for {seconds} s: {}", standing.reason)));
        }
        if let Err(denied) = self.swarm.behaviour().control.gate.reach(address.ip()) {
            return self.say(told, NetworkEvent::Refused { peer, address: Some(address), reason: denied.to_string() });
        }
        if lacks_zone(&address) {
            return self.say(told, failed("a link-local address needs its interface, as in [fe80::1%2]:52801".to_owned()));
        }
        let to = vec![multiaddr(address)];
        // A port of its own for every dial: with the listening port, two simultaneous dials would meet in one TCP
        // connection that both ends believe to have dialled.
        let options: DialOpts = match peer {
            Some(node) => match peer_id(node) {
                Some(id) => DialOpts::peer_id(id).addresses(to).condition(PeerCondition::Always).allocate_new_port().build(),
                None => return self.say(told, failed(format!("{node} is no node id: it is not an ed25519 public key"))),
            },
            None => DialOpts::unknown_peer_id().address(multiaddr(address)).allocate_new_port().build(),
        };
        let id = options.connection_id();
        match self.swarm.dial(options) {
            Ok(()) => drop(self.dials.insert(id, Dial { peer, address, told })),
            Err(error) => self.say(told, failed(dial_error(&error))),
        }
    }

    fn say(&self, told: bool, event: NetworkEvent) {
        if told {
            self.emit(event);
        }
    }

    pub(super) fn discovered(&mut self, found: Found) {
        let mut by_peer: BTreeMap<NodeId, Vec<SocketAddr>> = BTreeMap::new();
        let mut zones = None;
        for (peer, address) in found {
            let (Some(node), Some(address)) = (node_id(&peer), socket_address(&address)) else { continue };
            if node == self.party.node {
                continue;
            }
            let addresses = by_peer.entry(node).or_default();
            match address {
                SocketAddr::V6(mut v6) if lacks_zone(&address) => {
                    // One candidate for every interface that it may have been announced over.
                    for zone in zones.get_or_insert_with(link_local_zones).iter().take(ZONES_MAX) {
                        v6.set_scope_id(*zone);
                        addresses.push(v6.into());
                    }
                }
                _ => addresses.push(address),
            }
        }
        for (peer, mut addresses) in by_peer {
            // An announcement lists loopback too, where some other node may listen; it is the last choice.
            addresses.sort_by_key(|address| (address.ip().is_loopback(), *address));
            addresses.dedup();
            addresses.truncate(ADDRESSES_MAX);
            if !addresses.is_empty() {
                self.emit(NetworkEvent::Discovered { peer, addresses });
            }
        }
    }

    /// Does not dial there again for a while.
    pub(super) fn remember_refusal(&mut self, id: ConnectionId, reason: &str) {
        let Some(connection) = self.connections.get(&id).filter(|connection| connection.dialled) else { return };
        let now = self.clock.now();
        self.refused.note(Target::Node(connection.node), now, reason);
        self.refused.note(Target::Address(connection.address), now, reason);
    }

    /// A dial came to nothing after the connection was made, unless it was reported otherwise.
    pub(super) fn dial_failed(&mut self, id: ConnectionId, reason: String) {
        let Some(connection) = self.connections.get_mut(&id).filter(|connection| connection.dialled) else { return };
        if !std::mem::replace(&mut connection.concluded, true) {
            let address = connection.address;
            self.emit(NetworkEvent::DialFailed { address, reason });
        }
    }
}
