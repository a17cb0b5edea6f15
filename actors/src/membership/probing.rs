//! Testing whether members are there: rounds, relays, audits and close watch.

use std::time::Duration;

use super::message::{Message, Numbered, Relay, Relayed};
use super::swim::{Output, Swim};
use crate::env::Instant;
use crate::ids::NodeId;

/// The most pings on behalf of others at a time.
const ASKED_MAX: usize = 256;
/// The most probes under way at a time.
const PROBES_MAX: usize = 256;
/// How long a member that is not connected may take to be dialled and answer.
const AUDIT: Duration = Duration::from_secs(3);

/// A test of one member.
#[derive(Debug)]
pub(super) struct Probe {
    pub(super) target: NodeId,
    pub(super) until: Instant,
    /// Whether others were asked.
    indirect: bool,
    /// Others who were asked and have not said that they cannot reach it.
    pending: usize,
    /// Time to object if it fails.
    allowed: Duration,
    /// Whether a connection is wanted for it alone.
    audit: bool,
}

/// A ping on behalf of another.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) asker: NodeId,
    pub(super) target: NodeId,
    pub(super) until: Instant,
    sequence: u32,
}

impl Swim {
    fn number(&mut self) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        self.sequence
    }

    fn ping(&mut self, now: Instant, to: NodeId, sequence: u32) {
        if let Some(link) = self.links.get_mut(&to) {
            link.ping = Some((sequence, now));
            let updates = self.news_for(to);
            self.send(to, Message::Ping(Numbered { sequence, updates }));
        }
    }

    fn probed(&self, node: NodeId) -> bool {
        self.probes.values().any(|probe| probe.target == node)
    }

    fn present(&self, node: NodeId) -> bool {
        self.members.get(&node).is_some_and(|member| member.claim.state.is_present())
    }

    /// Tests a member: by a ping if it is connected, else through others at once.
    pub(super) fn probe(&mut self, now: Instant, target: NodeId, allowed: Duration) {
        if self.probes.len() >= PROBES_MAX {
            return;
        }
        if let Some(probe) = self.probes.values_mut().find(|probe| probe.target == target) {
            probe.allowed = probe.allowed.min(allowed);
            return;
        }
        let sequence = self.number();
        let until = now + self.timing.direct;
        self.probes.insert(sequence, Probe { target, until, indirect: false, pending: 0, allowed, audit: false });
        if self.links.contains_key(&target) {
            self.ping(now, target, sequence);
        } else {
            self.ask_others(now, sequence);
        }
    }

    /// Tests a member that is not connected: others are asked, and the peer book dials it.
    fn audit(&mut self, now: Instant, target: NodeId) {
        if self.probed(target) || self.probes.len() >= PROBES_MAX {
            return;
        }
        let sequence = self.number();
        let allowed = self.timing.suspicion;
        self.probes.insert(sequence, Probe { target, until: now, indirect: false, pending: 0, allowed, audit: true });
        self.want(target, true);
        self.ask_others(now, sequence);
        if let Some(probe) = self.probes.get_mut(&sequence) {
            probe.until = now + AUDIT;
        }
    }

    fn want(&mut self, peer: NodeId, wanted: bool) {
        let changed = if wanted { self.wanted.insert(peer) } else { self.wanted.remove(&peer) };
        if changed {
            let addresses = self.addresses(peer);
            self.out.push(Output::Want { peer, wanted, addresses });
        }
    }

    /// Where a peer says that it is.
    fn addresses(&self, peer: NodeId) -> Vec<String> {
        let card = self.members.get(&peer).and_then(|member| member.card.as_ref());
        card.map(|card| card.addresses.clone()).unwrap_or_default()
    }

    fn ask_others(&mut self, now: Instant, sequence: u32) {
        let Some(target) = self.probes.get(&sequence).map(|probe| probe.target) else { return };
        let mut others: Vec<NodeId> = self.links.keys().copied().filter(|node| *node != target && self.present(*node)).collect();
        self.dice.shuffle(&mut others);
        others.truncate(self.timing.relays);
        for other in &others {
            let updates = self.news_for(*other);
            self.send(*other, Message::Relay(Relay { sequence, target, updates }));
        }
        // The direct way gets another chance: a single lost packet proves nothing, and another cable may lead there.
        self.ping(now, target, sequence);
        if self.links.contains_key(&target) {
            let addresses = self.addresses(target);
            self.out.push(Output::Doubt { peer: target, addresses });
        }
        let indirect = self.timing.indirect;
        if let Some(probe) = self.probes.get_mut(&sequence) {
            probe.indirect = true;
            probe.pending = others.len();
            probe.until = now + indirect;
        }
    }

    /// A peer asks to ping somebody.
    pub(super) fn relay(&mut self, now: Instant, asker: NodeId, sequence: u32, target: NodeId) {
        if target == self.me || !self.links.contains_key(&target) || self.asked.len() >= ASKED_MAX {
            let reached = target == self.me;
            let updates = self.news_for(asker);
            return self.send(asker, Message::Relayed(Relayed { sequence, reached, updates }));
        }
        let number = self.number();
        let until = now + self.timing.indirect;
        self.asked.insert(number, Asked { asker, target, until, sequence });
        self.ping(now, target, number);
    }

    /// A peer says what came of pinging somebody for this node.
    pub(super) fn relayed(&mut self, now: Instant, sequence: u32, reached: bool) {
        let Some(probe) = self.probes.get_mut(&sequence).filter(|probe| probe.indirect) else { return };
        let target = probe.target;
        if reached {
            if let Some(member) = self.members.get_mut(&target) {
                member.contact = now;
            }
            return self.end_probe(sequence);
        }
        probe.pending = probe.pending.saturating_sub(1);
        if probe.pending == 0 && !probe.audit && !self.links.contains_key(&target) {
            // Nobody who was asked is connected to it either, so there is nothing to wait for.
            probe.until = now;
        }
    }

    /// A peer has answered a ping.
    pub(super) fn acknowledged(&mut self, now: Instant, from: NodeId, sequence: u32) {
        if let Some(link) = self.links.get_mut(&from)
            && let Some((_, sent)) = link.ping.take_if(|(number, _)| *number == sequence)
        {
            self.measured(from, now.since(sent));
        }
        if let Some(asked) = self.asked.remove(&sequence) {
            let updates = self.news_for(asked.asker);
            self.send(asked.asker, Message::Relayed(Relayed { sequence: asked.sequence, reached: true, updates }));
        }
        if self.probes.get(&sequence).is_some_and(|probe| probe.target == from) {
            self.end_probe(sequence);
        }
    }

    fn end_probe(&mut self, sequence: u32) {
        if let Some(probe) = self.probes.remove(&sequence)
            && probe.audit
            && !self.watched.contains_key(&probe.target)
        {
            self.want(probe.target, false);
            // It was not connected when the audit began.
            if self.links.len() > self.timing.mesh
                && let Some(link) = self.links.get_mut(&probe.target)
            {
                link.parting = true;
                self.send(probe.target, Message::Parting);
            }
        }
    }

    /// A member is believed gone: its probes have nothing left to find out.
    pub(super) fn forget_probes(&mut self, node: NodeId) {
        let over: Vec<u32> = self.probes.iter().filter(|(_, probe)| probe.target == node).map(|(sequence, _)| *sequence).collect();
        over.into_iter().for_each(|sequence| self.end_probe(sequence));
    }

    /// A connection answers what the probes of that peer wanted to know.
    pub(super) fn connection_helps(&mut self, now: Instant, peer: NodeId) {
        let waiting = self.probes.iter().filter(|(_, probe)| probe.target == peer).map(|(sequence, _)| *sequence);
        let waiting: Vec<u32> = waiting.collect();
        for sequence in waiting {
            self.ping(now, peer, sequence);
        }
    }

    /// Whether to watch a member closely.
    pub(super) fn watch(&mut self, now: Instant, node: NodeId, watched: bool) {
        if node == self.me {
            return;
        }
        if watched {
            if self.watched.contains_key(&node) {
                return;
            }
            self.watched.insert(node, now);
            if let Some(member) = self.members.get_mut(&node) {
                // Silence counts from here.
                member.contact = now;
            }
            self.want(node, true);
        } else if self.watched.remove(&node).is_some() {
            self.want(node, false);
        }
    }

    /// When the close watch has something to do.
    pub(super) fn watch_deadlines(&self) -> impl Iterator<Item = Instant> {
        self.watched.iter().filter(|(node, _)| self.present(**node)).map(|(_, beat)| *beat)
    }

    fn beat(&mut self, now: Instant) {
        let due: Vec<NodeId> = self.watched.iter().filter(|(_, beat)| **beat <= now).map(|(node, _)| *node).collect();
        for node in due {
            self.watched.insert(node, now + self.timing.beat);
            if !self.present(node) {
                continue;
            }
            let sequence = self.number();
            self.ping(now, node, sequence);
            let silent = self.members.get(&node).map(|member| now.since(member.contact));
            if silent.is_some_and(|silent| silent >= self.timing.silence) && !self.probed(node) {
                let sequence = self.number();
                let allowed = self.timing.suspicion_short;
                self.probes.insert(sequence, Probe { target: node, until: now, indirect: false, pending: 0, allowed, audit: false });
                self.ask_others(now, sequence);
            }
        }
    }

    /// Moves the probes on whose time is over, and keeps the close watch.
    pub(super) fn advance_probes(&mut self, now: Instant) {
        self.beat(now);
        let over: Vec<u32> = self.probes.iter().filter(|(_, probe)| probe.until <= now).map(|(sequence, _)| *sequence).collect();
        for sequence in over {
            let Some(probe) = self.probes.get(&sequence) else { continue };
            if probe.indirect {
                let (target, allowed) = (probe.target, probe.allowed);
                self.end_probe(sequence);
                self.suspect(now, target, allowed);
            } else {
                self.ask_others(now, sequence);
            }
        }
        self.asked.retain(|_, asked| asked.until > now);
    }

    /// Starts the probes of one round.
    pub(super) fn round(&mut self, now: Instant) {
        let allowed = self.timing.suspicion;
        for _ in 0..self.timing.fanout.min(self.links.len()) {
            if let Some(target) = self.next_connected() {
                self.probe(now, target, allowed);
            }
        }
        if now >= self.next_audit {
            self.next_audit = now + self.dice.jitter(self.timing.audit);
            if let Some(target) = self.next_unconnected() {
                self.audit(now, target);
            }
        }
    }

    /// The next connected member in an order that visits all before it visits one twice.
    fn next_connected(&mut self) -> Option<NodeId> {
        for refilled in [false, true] {
            if refilled {
                self.rotation = self.links.keys().copied().collect();
                self.dice.shuffle(&mut self.rotation);
            }
            while let Some(node) = self.rotation.pop() {
                if self.links.contains_key(&node) && self.present(node) {
                    return Some(node);
                }
            }
        }
        None
    }

    fn next_unconnected(&mut self) -> Option<NodeId> {
        for refilled in [false, true] {
            if refilled {
                let apart = self.members.iter().filter(|(node, member)| member.claim.state.is_present() && !self.links.contains_key(*node));
                self.audits = apart.map(|(node, _)| *node).collect();
                self.dice.shuffle(&mut self.audits);
            }
            while let Some(node) = self.audits.pop() {
                if !self.links.contains_key(&node) && self.present(node) {
                    return Some(node);
                }
            }
        }
        None
    }
}
