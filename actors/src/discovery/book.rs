//! The peer book: who may be there, where, and whom to dial next. A machine without I/O.
//!
//! It is told what mDNS, the beacon, the user, the cluster's gossip and earlier runs say, and what became of its
//! dials. What it believes of an unconnected peer is never more than a rumour.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use super::address::{self, Rank};
use super::seen::{self, SeenPeer};
use crate::dice::Dice;
use crate::env::{Instant, Interface, Trouble};
use crate::ids::{Incarnation, NodeId};

/// The most peers that are remembered. When there are more, those heard least recently go.
const PEERS_MAX: usize = 4096;
/// The most addresses that are remembered of a peer.
const ADDRESSES_MAX: usize = 16;
/// The most addresses without a name, given by the user.
const ASKED_MAX: usize = 256;
/// An unconnected peer that nothing was heard of for so long is dropped.
const DEAD_AFTER: Duration = Duration::from_secs(15 * 60);
/// Head start of the next address of a peer after the one before it, while that has not answered (RFC 8305 names 250 ms).
const STAGGER: Duration = Duration::from_millis(250);
/// A dial that was not answered by then counts as failed.
const DIAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause after the first failure; it doubles with each one.
const BACKOFF_FIRST: Duration = Duration::from_millis(500);
/// The longest pause.
const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// A peer that is heard right now may be tried again after this pause, however often it failed before.
const BACKOFF_HEARD: Duration = Duration::from_secs(2);
/// Of two nodes that hear of each other the one with the lower id dials; the other waits this long before it does too,
/// as the first may be unable to (a firewall lets only one direction through).
const COURTESY: Duration = Duration::from_millis(400);
/// A peer that turned us away is asked again after this: its owner may have changed the key.
const REFUSED_PAUSE: Duration = Duration::from_secs(60);
/// A given address that nobody has answered at for so long is a trouble for the user to see.
const TROUBLE_AFTER: Duration = Duration::from_secs(3);
/// The most refusals that are kept for the user to see.
const REFUSALS_MAX: usize = 64;
/// Dials under way at a time.
const DIALS_MAX: usize = 32;

/// Where a rumour comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// An announcement by mDNS.
    Mdns,
    /// A packet of the beacon, just now, from that very address.
    Beacon,
    /// The card of a member.
    Card,
    /// An earlier run.
    Seen,
}

/// What the book is told.
#[derive(Debug, Clone)]
pub(crate) enum Input {
    /// The interfaces of this host.
    Interfaces(Vec<Interface>),
    /// The control network listens at one more address.
    Listening(SocketAddr),
    /// The user names an address.
    Ask(SocketAddr),
    /// Peers of earlier runs.
    Seen(Vec<SeenPeer>),
    /// Somebody may be at these addresses.
    Heard { peer: NodeId, incarnation: Option<Incarnation>, addresses: Vec<SocketAddr>, source: Source },
    /// A peer has passed the handshake.
    Connected { peer: NodeId, address: SocketAddr, dialled: bool },
    /// A dial led to a peer that was connected already.
    AlreadyConnected { peer: NodeId, address: SocketAddr },
    /// No connection to the peer is left.
    Disconnected { peer: NodeId },
    /// A dial came to nothing.
    DialFailed { address: SocketAddr, reason: String },
    /// A peer turned us away, or we it.
    Refused { peer: Option<NodeId>, address: Option<SocketAddr>, reason: String },
    /// Whether a connection to the peer is wanted beyond the usual number.
    Want { peer: NodeId, wanted: bool },
    /// Time has passed.
    Tick,
}

/// What the book wants done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Output {
    /// Dial.
    Dial { peer: Option<NodeId>, address: SocketAddr },
    /// Somebody who was not known before was heard of.
    Newcomer { peer: NodeId, source_address: SocketAddr },
    /// Write the file of peers met.
    Save(Vec<SeenPeer>),
    /// A refusal that the user should see. Not repeated while it stays the same.
    Refusal(Refusal),
}

/// A peer that cannot be talked to, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Who, if known.
    pub peer: Option<NodeId>,
    /// Where, if known.
    pub address: Option<SocketAddr>,
    /// Why and what to do, for people.
    pub reason: String,
}

/// What is known of one address.
#[derive(Debug, Clone)]
struct Spot {
    address: SocketAddr,
    heard: Instant,
    failures: u32,
    next: Instant,
    dialled: Option<Instant>,
    worked: bool,
}

impl Spot {
    fn new(address: SocketAddr, now: Instant) -> Self {
        Self { address, heard: now, failures: 0, next: now, dialled: None, worked: false }
    }

    fn failed(&mut self, now: Instant, dice: &mut Dice) {
        let pause = BACKOFF_FIRST.saturating_mul(1 << self.failures.min(16)).min(BACKOFF_MAX);
        self.failures = self.failures.saturating_add(1);
        self.dialled = None;
        self.next = now + dice.jitter(pause);
    }

    fn worked(&mut self, now: Instant) {
        self.failures = 0;
        self.dialled = None;
        self.next = now;
        self.worked = true;
    }
}

#[derive(Debug)]
struct Peer {
    spots: Vec<Spot>,
    incarnation: Option<Incarnation>,
    heard: Instant,
    connected: bool,
    wanted: bool,
    same_host: bool,
    /// Not dialled before.
    next: Instant,
    refused: Option<Instant>,
    starts: u16,
    met: bool,
}

impl Peer {
    fn new(now: Instant) -> Self {
        Self {
            spots: Vec::new(),
            incarnation: None,
            heard: now,
            connected: false,
            wanted: false,
            same_host: false,
            next: now,
            refused: None,
            starts: 0,
            met: false,
        }
    }

    fn dialling(&self) -> bool {
        self.spots.iter().any(|spot| spot.dialled.is_some())
    }
}

/// An address that the user gave.
#[derive(Debug)]
struct Asked {
    spot: Spot,
    peer: Option<NodeId>,
    refused: Option<Instant>,
    /// Since when every dial has come to nothing, and what the last one met with.
    failing: Option<(Instant, String)>,
}

impl Asked {
    fn failed(&mut self, now: Instant, reason: &str, dice: &mut Dice) {
        let since = self.failing.take().map_or(now, |(since, _)| since);
        self.failing = Some((since, reason.to_owned()));
        self.spot.failed(now, dice);
    }
}

/// Whether `address` is one that this node itself listens at.
fn leads_here(listening: &BTreeSet<SocketAddr>, interfaces: &[Interface], address: SocketAddr) -> bool {
    let own = || address.ip().is_loopback() || address::is_own(address.ip(), interfaces);
    listening.contains(&address) || listening.iter().any(|at| at.port() == address.port() && at.ip().is_unspecified() && own())
}

/// The book of one node.
#[derive(Debug)]
pub(crate) struct PeerBook {
    me: NodeId,
    /// The number of connections up to which everybody is dialled.
    target: usize,
    dice: Dice,
    interfaces: Vec<Interface>,
    listening: BTreeSet<SocketAddr>,
    peers: BTreeMap<NodeId, Peer>,
    asked: BTreeMap<SocketAddr, Asked>,
    refusals: Vec<Refusal>,
    unsaved: bool,
    next_save: Instant,
}

impl PeerBook {
    /// An empty book. `target` is the number of connections up to which everybody heard of is dialled.
    pub(crate) fn new(me: NodeId, target: usize, seed: u64) -> Self {
        Self {
            me,
            target,
            dice: Dice::new(seed),
            interfaces: Vec::new(),
            listening: BTreeSet::new(),
            peers: BTreeMap::new(),
            asked: BTreeMap::new(),
            refusals: Vec::new(),
            unsaved: false,
            next_save: Instant::ZERO,
        }
    }

    /// Peers that could not be talked to, latest last.
    pub(crate) fn refusals(&self) -> &[Refusal] {
        &self.refusals
    }

    /// Takes what happened and says what to do.
    pub(crate) fn step(&mut self, now: Instant, input: Input) -> Vec<Output> {
        let mut outputs = Vec::new();
        match input {
            Input::Interfaces(interfaces) => {
                if self.interfaces != interfaces {
                    self.interfaces = interfaces;
                    // A cable that was just plugged in makes old failures meaningless.
                    for spot in self.peers.values_mut().flat_map(|peer| &mut peer.spots) {
                        spot.next = spot.next.min(now + BACKOFF_FIRST);
                    }
                }
            }
            Input::Listening(address) => {
                self.listening.insert(address::plain(address));
            }
            Input::Ask(address) => {
                let address = address::plain(address);
                if self.asked.len() < ASKED_MAX {
                    self.asked.entry(address).or_insert_with(|| Asked {
                        spot: Spot::new(address, now),
                        peer: None,
                        refused: None,
                        failing: None,
                    });
                }
            }
            Input::Seen(peers) => {
                for seen in peers {
                    let Some(peer) = self.peer(now, seen.node) else { continue };
                    peer.starts = seen.starts;
                    peer.met = true;
                    self.note(now, seen.node, None, seen.addresses, Source::Seen, &mut outputs);
                }
            }
            Input::Heard { peer, incarnation, addresses, source } => {
                self.note(now, peer, incarnation, addresses, source, &mut outputs);
            }
            Input::Connected { peer, address, dialled } => self.connected(now, peer, address::plain(address), dialled),
            Input::AlreadyConnected { peer, address } => self.connected(now, peer, address::plain(address), true),
            Input::Disconnected { peer } => {
                let courtesy = self.courtesy(peer);
                if let Some(peer) = self.peers.get_mut(&peer) {
                    peer.connected = false;
                    peer.heard = now;
                    peer.next = now + courtesy;
                }
            }
            Input::DialFailed { address, reason } => self.dial_failed(now, address::plain(address), &reason),
            Input::Refused { peer, address, reason } => {
                let address = address.map(address::plain);
                self.refused(now, peer, address, reason, &mut outputs);
            }
            Input::Want { peer: node, wanted } => {
                let known = self.peers.contains_key(&node);
                if (known || wanted)
                    && let Some(peer) = self.peer(now, node)
                {
                    peer.wanted = wanted;
                    peer.next = if wanted { now } else { peer.next };
                }
            }
            Input::Tick => {}
        }
        self.advance(now, &mut outputs);
        outputs
    }

    /// The entry of a peer; made if there is room. `None` for this node itself.
    fn peer(&mut self, now: Instant, node: NodeId) -> Option<&mut Peer> {
        if node == self.me {
            return None;
        }
        if !self.peers.contains_key(&node) && self.peers.len() >= PEERS_MAX {
            let unneeded = self.peers.iter().filter(|(_, peer)| !peer.connected && !peer.wanted);
            let oldest = unneeded.min_by_key(|(_, peer)| peer.heard).map(|(node, _)| *node)?;
            self.peers.remove(&oldest);
        }
        Some(self.peers.entry(node).or_insert_with(|| Peer::new(now)))
    }

    fn courtesy(&self, peer: NodeId) -> Duration {
        if peer < self.me { COURTESY } else { Duration::ZERO }
    }

    fn is_me(&self, address: SocketAddr) -> bool {
        leads_here(&self.listening, &self.interfaces, address)
    }

    fn note(
        &mut self,
        now: Instant,
        node: NodeId,
        incarnation: Option<Incarnation>,
        addresses: Vec<SocketAddr>,
        source: Source,
        outputs: &mut Vec<Output>,
    ) {
        let courtesy = self.courtesy(node);
        let addresses: Vec<SocketAddr> = addresses.into_iter().map(address::plain).filter(|address| !self.is_me(*address)).collect();
        let local = addresses.iter().any(|address| address::is_own(address.ip(), &self.interfaces));
        let newcomer = !self.peers.contains_key(&node) && source != Source::Seen;
        let first = addresses.first().copied();
        let Some(peer) = self.peer(now, node) else { return };
        if peer.spots.is_empty() && source != Source::Seen {
            peer.next = now + courtesy;
        }
        if source != Source::Seen {
            peer.heard = now;
        }
        // The source of a packet cannot lie about loopback: such packets do not leave a host.
        let loopback = source == Source::Beacon && addresses.iter().any(|address| address.ip().is_loopback());
        peer.same_host |= local || loopback;
        let reborn = incarnation.is_some() && peer.incarnation.is_some() && incarnation != peer.incarnation;
        peer.incarnation = incarnation.or(peer.incarnation);
        if reborn {
            // Another life may have another key, another version, and nothing of its back-offs.
            peer.refused = None;
            for spot in &mut peer.spots {
                spot.failures = 0;
                spot.next = now;
            }
        }
        for address in addresses {
            match peer.spots.iter_mut().find(|spot| spot.address == address) {
                Some(spot) => {
                    spot.heard = now;
                    if source == Source::Beacon {
                        spot.next = spot.next.min(now + BACKOFF_HEARD);
                    }
                }
                None => {
                    if peer.spots.len() >= ADDRESSES_MAX {
                        let worst = peer.spots.iter().enumerate().filter(|(_, spot)| spot.dialled.is_none());
                        let Some(worst) = worst.min_by_key(|(_, spot)| (spot.worked, spot.heard)).map(|(at, _)| at) else { continue };
                        peer.spots.remove(worst);
                    }
                    peer.spots.push(Spot::new(address, now));
                }
            }
        }
        if newcomer && let Some(source_address) = first {
            outputs.push(Output::Newcomer { peer: node, source_address });
        }
    }

    fn connected(&mut self, now: Instant, node: NodeId, address: SocketAddr, dialled: bool) {
        if let Some(asked) = self.asked.get_mut(&address)
            && dialled
        {
            asked.peer = Some(node);
            asked.spot.worked(now);
        }
        self.refusals.retain(|refusal| refusal.peer != Some(node) && (refusal.address.is_none() || refusal.address != Some(address)));
        let Some(peer) = self.peer(now, node) else { return };
        peer.connected = true;
        peer.met = true;
        peer.starts = 0;
        peer.heard = now;
        peer.refused = None;
        if dialled {
            // The port of an incoming connection is not one that listens.
            match peer.spots.iter_mut().find(|spot| spot.address == address) {
                Some(spot) => spot.worked(now),
                None => {
                    let mut spot = Spot::new(address, now);
                    spot.worked(now);
                    if peer.spots.len() >= ADDRESSES_MAX {
                        peer.spots.remove(0);
                    }
                    peer.spots.push(spot);
                }
            }
        }
        for spot in &mut peer.spots {
            spot.dialled = None;
        }
        self.unsaved = true;
    }

    fn dial_failed(&mut self, now: Instant, address: SocketAddr, reason: &str) {
        if let Some(asked) = self.asked.get_mut(&address)
            && asked.spot.dialled.is_some()
        {
            asked.failed(now, reason, &mut self.dice);
        }
        for peer in self.peers.values_mut() {
            for spot in peer.spots.iter_mut().filter(|spot| spot.address == address && spot.dialled.is_some()) {
                spot.failed(now, &mut self.dice);
                // The next best address need not wait for its head start.
                peer.next = now;
            }
        }
    }

    fn refused(&mut self, now: Instant, node: Option<NodeId>, address: Option<SocketAddr>, reason: String, outputs: &mut Vec<Output>) {
        let until = now + self.dice.jitter(REFUSED_PAUSE);
        if let Some(peer) = node.and_then(|node| self.peers.get_mut(&node)) {
            peer.refused = Some(until);
            peer.spots.iter_mut().for_each(|spot| spot.dialled = None);
        }
        if let Some(address) = address {
            if let Some(asked) = self.asked.get_mut(&address) {
                asked.refused = Some(until);
                asked.spot.dialled = None;
                // Somebody answers there, and what he says is shown.
                asked.failing = None;
            }
            for peer in self.peers.values_mut() {
                if peer.spots.iter().any(|spot| spot.address == address && spot.dialled.is_some()) {
                    peer.refused = Some(until);
                    peer.spots.iter_mut().for_each(|spot| spot.dialled = None);
                }
            }
        }
        let refusal = Refusal { peer: node, address, reason };
        if !self.refusals.contains(&refusal) {
            // One who is turned away from many ports is one line, not many.
            self.refusals.retain(|old| old.peer.is_none() || old.peer != refusal.peer);
            if self.refusals.len() >= REFUSALS_MAX {
                self.refusals.remove(0);
            }
            self.refusals.push(refusal.clone());
            outputs.push(Output::Refusal(refusal));
        }
    }

    /// Gives up on silent dials, forgets the dead, dials whom it is time for, saves.
    fn advance(&mut self, now: Instant, outputs: &mut Vec<Output>) {
        let silent = |spot: &Spot| spot.dialled.is_some_and(|at| now.since(at) >= DIAL_TIMEOUT);
        for spot in self.peers.values_mut().flat_map(|peer| &mut peer.spots).filter(|spot| silent(spot)) {
            spot.failed(now, &mut self.dice);
        }
        for asked in self.asked.values_mut().filter(|asked| silent(&asked.spot)) {
            asked.failed(now, "nothing comes back", &mut self.dice);
        }
        let met: Vec<SocketAddr> = self.asked.iter().filter(|(address, asked)| self.is_met(**address, asked)).map(|(at, _)| *at).collect();
        for address in met {
            if let Some(asked) = self.asked.get_mut(&address) {
                asked.failing = None;
            }
        }
        self.peers.retain(|_, peer| peer.connected || peer.wanted || now.since(peer.heard) < DEAD_AFTER);
        for peer in self.peers.values_mut() {
            peer.refused = peer.refused.filter(|until| *until > now);
        }
        for asked in self.asked.values_mut() {
            asked.refused = asked.refused.filter(|until| *until > now);
        }

        let mut dials = self.dials();
        let due_asked: Vec<SocketAddr> = self.due_asked().filter(|(_, next)| *next <= now).map(|(address, _)| address).collect();
        for address in due_asked {
            if dials >= DIALS_MAX {
                break;
            }
            if let Some(asked) = self.asked.get_mut(&address) {
                asked.spot.dialled = Some(now);
                dials += 1;
                outputs.push(Output::Dial { peer: None, address });
            }
        }

        let mut connections = self.peers.values().filter(|peer| peer.connected || peer.dialling()).count();
        for (node, peer) in &mut self.peers {
            if dials >= DIALS_MAX {
                break;
            }
            let dialling = peer.dialling();
            if peer.connected || peer.refused.is_some() || peer.next > now || !(peer.wanted || dialling || connections < self.target) {
                continue;
            }
            let (interfaces, same_host, listening) = (&self.interfaces, peer.same_host, &self.listening);
            let due = peer.spots.iter_mut().filter(|spot| spot.dialled.is_none() && spot.next <= now);
            let due = due.filter(|spot| !leads_here(listening, interfaces, spot.address));
            let ranked = due.filter_map(|spot| address::rank(spot.address, interfaces, same_host).map(|rank| (rank, spot)));
            // Among equals the one that worked before, then the one that failed least.
            let best = ranked.min_by_key(|(rank, spot)| (*rank, !spot.worked, spot.failures, spot.address));
            if let Some((_, spot)) = best {
                spot.dialled = Some(now);
                outputs.push(Output::Dial { peer: Some(*node), address: spot.address });
                peer.next = now + STAGGER;
                dials += 1;
                connections += usize::from(!dialling);
            }
        }

        if self.unsaved && now >= self.next_save {
            self.unsaved = false;
            self.next_save = now + Duration::from_secs(5);
            outputs.push(Output::Save(self.seen()));
        }
    }

    fn dials(&self) -> usize {
        let named = self.peers.values().flat_map(|peer| &peer.spots).filter(|spot| spot.dialled.is_some()).count();
        named + self.asked.values().filter(|asked| asked.spot.dialled.is_some()).count()
    }

    /// Whether whoever is at an address that the user gave is connected. A connection that was made otherwise, to a peer that is
    /// known to be there, will do as well.
    fn is_met(&self, address: SocketAddr, asked: &Asked) -> bool {
        let leads_to = |node: &NodeId, peer: &Peer| asked.peer == Some(*node) || peer.spots.iter().any(|spot| spot.address == address);
        self.peers.iter().any(|(node, peer)| peer.connected && leads_to(node, peer))
    }

    /// Addresses that the user gave and nobody has answered at for a while. Who turns this node away does answer.
    pub(crate) fn troubles(&self, now: Instant) -> impl Iterator<Item = Trouble> {
        let failing = self.asked.iter().filter(|(address, _)| !self.refusals.iter().any(|refusal| refusal.address == Some(**address)));
        failing.filter_map(move |(address, asked)| {
            let (_, reason) = asked.failing.as_ref().filter(|(since, _)| now.since(*since) >= TROUBLE_AFTER)?;
            Some(Trouble {
                about: format!("peer {address}"),
                what: format!("no node answers there: {reason}"),
                help: "check that one runs there, that it listens at this port (see its line `control`), and that no firewall is between; \
                    it is tried again until then"
                    .to_owned(),
            })
        })
    }

    /// Addresses from the user that are to be dialled, and when.
    fn due_asked(&self) -> impl Iterator<Item = (SocketAddr, Instant)> {
        let open = self.asked.iter().filter(|(address, asked)| {
            asked.peer != Some(self.me) && asked.spot.dialled.is_none() && !self.is_met(**address, asked) && !self.is_me(**address)
        });
        open.map(|(address, asked)| (*address, asked.refused.unwrap_or(Instant::ZERO).max(asked.spot.next)))
    }

    /// When there is something to do though nothing happens.
    pub(crate) fn deadline(&self, now: Instant) -> Instant {
        let mut next = now + DEAD_AFTER;
        let mut at_least = |moment: Instant| next = next.min(moment);
        let under_way = self.peers.values().flat_map(|peer| &peer.spots).chain(self.asked.values().map(|asked| &asked.spot));
        for spot in under_way {
            if let Some(at) = spot.dialled {
                at_least(at + DIAL_TIMEOUT);
            }
        }
        if self.unsaved {
            at_least(self.next_save);
        }
        for (since, _) in self.asked.values().filter_map(|asked| asked.failing.as_ref()) {
            let told = *since + TROUBLE_AFTER;
            if told > now {
                at_least(told);
            }
        }
        if self.dials() < DIALS_MAX {
            self.due_asked().for_each(|(_, moment)| at_least(moment));
            let connections = self.peers.values().filter(|peer| peer.connected || peer.dialling()).count();
            for peer in self.peers.values().filter(|peer| !peer.connected) {
                if peer.wanted || peer.dialling() || connections < self.target {
                    let usable = peer.spots.iter().filter(|spot| spot.dialled.is_none() && !self.is_me(spot.address));
                    let usable = usable.filter(|spot| address::rank(spot.address, &self.interfaces, peer.same_host).is_some());
                    if let Some(spot) = usable.map(|spot| spot.next).min() {
                        at_least(spot.max(peer.next).max(peer.refused.unwrap_or(Instant::ZERO)));
                    }
                }
            }
        }
        next
    }

    /// What to write into the file of peers met.
    fn seen(&self) -> Vec<SeenPeer> {
        let met = self.peers.iter().filter(|(_, peer)| peer.met);
        let seen = met.map(|(node, peer)| {
            let mut spots: Vec<(Rank, &Spot)> = peer
                .spots
                .iter()
                .filter_map(|spot| address::rank(spot.address, &self.interfaces, peer.same_host).map(|rank| (rank, spot)))
                .collect();
            spots.sort_by_key(|(rank, spot)| (!spot.worked, *rank, spot.address));
            let addresses = spots.iter().map(|(_, spot)| spot.address).take(seen::ADDRESSES_MAX).collect();
            SeenPeer { node: *node, addresses, starts: peer.starts }
        });
        seen.filter(|peer| !peer.addresses.is_empty()).collect()
    }
}

#[cfg(test)]
#[path = "book_tests.rs"]
mod tests;
