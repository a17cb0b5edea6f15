//! The membership machine: who is there, by probing and gossip. No I/O, no clock, and chance from a seed only.
//!
//! Each round (half a second) a node pings a few peers that it is connected to, at most [`Timing::fanout`], in a
//! random order that visits everybody. One that does not answer is pinged through others; if that fails too it is
//! suspected, everybody hears of it, and unless it objects within a second it is dead. Members that are not
//! connected are audited through others at a slow pace. News ride on the pings. So what a node sends does not
//! depend on the size of the cluster. Only peers that are *watched*, the other members of an instance, are pinged
//! every quarter of a second.
//!
//! The file holds the beliefs about members; [`super::probing`] tests them and [`super::cards`] fetches cards.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::gossip::Gossip;
use super::message::{self, DIGEST_MAX, Digest, Hello, MemberState, Message, Update, Updates};
use super::probing::{Asked, Probe};
use super::view::{ClusterView, MemberEvent, MemberView};
use crate::card::NodeCard;
use crate::dice::Dice;
use crate::env::Instant;
use crate::ids::NodeId;

/// The most members that are kept track of.
pub(crate) const MEMBERS_MAX: usize = 4096;
/// How long the dead and those who left are remembered, so that stale gossip does not revive them.
const REMEMBERED: Duration = Duration::from_secs(10 * 60);
/// A machine that is stepped so much later than it asked for was suspended or starved; it grants everybody the time.
const LATE: Duration = Duration::from_millis(250);
/// How long ago a connected member may have been heard from for its death to be doubted: two rounds of probes.
const IN_TOUCH: Duration = Duration::from_secs(1);
/// Pause between comparisons of knowledge with a random peer.
const COMPARE_EVERY: Duration = Duration::from_secs(10);
/// Shortest pause between two revisions of the own card.
const CARD_PAUSE: Duration = Duration::from_millis(200);
/// Shortest pause between two reminders to a peer of what is believed of it.
const REMIND_PAUSE: Duration = Duration::from_millis(100);
/// The most peers to which urgent news go directly; the rest hear by gossip.
const URGENT_MAX: usize = 16;

/// The pace of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// Pause between rounds of probes.
    pub round: Duration,
    /// The most peers that are probed in a round.
    pub fanout: usize,
    /// How long a ping may take before others are asked to ping too.
    pub direct: Duration,
    /// How long those others may take.
    pub indirect: Duration,
    /// How many others are asked.
    pub relays: usize,
    /// Time to object for a suspected member. Halved once another member suspects it too.
    pub suspicion: Duration,
    /// Pause between pings to a watched member.
    pub beat: Duration,
    /// Silence of a watched member after which others are asked to ping it.
    pub silence: Duration,
    /// Time to object for a watched member, and for one whose connection was closed by its end.
    pub suspicion_short: Duration,
    /// Pause between audits of members that are not connected.
    pub audit: Duration,
    /// Connections up to which one that was made for an audit is kept.
    pub mesh: usize,
}

impl Default for Timing {
    /// Watched members and those whose connection closes are given up in about a second, others in about two.
    fn default() -> Self {
        Self {
            round: Duration::from_millis(500),
            fanout: 4,
            direct: Duration::from_millis(300),
            indirect: Duration::from_millis(300),
            relays: 3,
            suspicion: Duration::from_millis(1000),
            beat: Duration::from_millis(250),
            silence: Duration::from_millis(450),
            suspicion_short: Duration::from_millis(500),
            audit: Duration::from_secs(2),
            mesh: crate::discovery::CONNECTIONS_TARGET,
        }
    }
}

/// What the machine is told.
#[derive(Debug, Clone)]
pub(crate) enum Input {
    /// Time has passed.
    Tick,
    /// A peer is connected.
    Connected(NodeId),
    /// No connection to the peer is left. `broken`: its end closed, which a healthy node does not do without a word.
    Disconnected { peer: NodeId, broken: bool },
    /// A message.
    Message { from: NodeId, message: Message },
    /// The own card is to say this. Node, incarnation and revision are the machine's to fill in.
    Card(Box<NodeCard>),
    /// Whether to watch a member closely.
    Watch { node: NodeId, watched: bool },
    /// This node leaves.
    Leave,
}

/// What the machine wants done.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Output {
    /// Send, if connected.
    Send { to: NodeId, message: Message },
    /// Tell subscribers. The view before the event is already the new one.
    Event(MemberEvent),
    /// Publish a view.
    View(Arc<ClusterView>),
    /// Whether a connection to a peer is needed; where it may be reached.
    Want { peer: NodeId, wanted: bool, addresses: Vec<String> },
    /// Nothing is heard of a connected peer; it may be reached at these addresses, too.
    Doubt { peer: NodeId, addresses: Vec<String> },
    /// Close the connections to a peer.
    Disconnect(NodeId),
    /// Others know a later life of this node, or another process runs with its identity.
    Superseded,
}

/// What is believed of a member.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) claim: Update,
    pub(super) card: Option<Arc<NodeCard>>,
    /// Whether its joining was told.
    pub(super) announced: bool,
    pub(super) since: Instant,
    pub(super) suspicion: Option<Suspicion>,
    /// When it was last known to be well, from its own mouth or through another.
    pub(super) contact: Instant,
    pub(super) rtt: Option<Duration>,
    pub(super) rtt_shown: Option<Duration>,
    pub(super) card_asked: Option<Instant>,
}

/// Why a member is suspected, and until when it may object.
#[derive(Debug, Clone, Copy)]
pub(super) struct Suspicion {
    pub(super) until: Instant,
    pub(super) allowed: Duration,
    own: bool,
    heard: bool,
}

/// A connection.
#[derive(Debug, Default)]
pub(super) struct Link {
    /// The last ping on it, for the round-trip time.
    pub(super) ping: Option<(u32, Instant)>,
    /// One of the two said that it is not needed, so its end means nothing.
    pub(super) parting: bool,
    reminded: Option<Instant>,
}

/// The machine.
#[derive(Debug)]
pub(crate) struct Swim {
    pub(super) timing: Timing,
    pub(super) dice: Dice,
    pub(super) me: NodeId,
    pub(super) my_claim: Update,
    pub(super) my_card: Arc<NodeCard>,
    my_since: Instant,
    card_next: Instant,
    card_waits: Option<Box<NodeCard>>,
    pub(super) members: BTreeMap<NodeId, Member>,
    pub(super) links: BTreeMap<NodeId, Link>,
    pub(super) suspects: BTreeSet<NodeId>,
    /// When each watched member is pinged next.
    pub(super) watched: BTreeMap<NodeId, Instant>,
    pub(super) wanted: BTreeSet<NodeId>,
    gossip: Gossip,
    pub(super) sequence: u32,
    pub(super) probes: BTreeMap<u32, Probe>,
    pub(super) asked: BTreeMap<u32, Asked>,
    pub(super) rotation: Vec<NodeId>,
    pub(super) audits: Vec<NodeId>,
    pub(super) next_round: Instant,
    pub(super) next_audit: Instant,
    next_compare: Instant,
    due: Instant,
    superseded: bool,
    dirty: bool,
    events: Vec<MemberEvent>,
    pub(super) out: Vec<Output>,
}

impl Swim {
    /// The machine of the node with this card, alone in its cluster.
    pub(crate) fn new(now: Instant, timing: Timing, mut card: NodeCard, seed: u64) -> Self {
        message::fit(&mut card);
        let mut dice = Dice::new(seed);
        let my_claim =
            Update { node: card.node, incarnation: card.incarnation, version: 0, state: MemberState::Alive, revision: card.revision };
        let first = now + Duration::from_nanos(dice.below(timing.round.as_nanos() as u64));
        Self {
            timing,
            me: card.node,
            my_claim,
            my_card: Arc::new(card),
            my_since: now,
            card_next: now,
            card_waits: None,
            members: BTreeMap::new(),
            links: BTreeMap::new(),
            suspects: BTreeSet::new(),
            watched: BTreeMap::new(),
            wanted: BTreeSet::new(),
            gossip: Gossip::default(),
            sequence: dice.next() as u32,
            probes: BTreeMap::new(),
            asked: BTreeMap::new(),
            rotation: Vec::new(),
            audits: Vec::new(),
            next_round: first,
            next_audit: first,
            next_compare: first + dice.jitter(COMPARE_EVERY),
            due: first,
            superseded: false,
            dirty: true,
            events: Vec::new(),
            out: Vec::new(),
            dice,
        }
    }

    /// The cluster as it is believed to be.
    pub(crate) fn view(&self) -> ClusterView {
        let known = self.members.iter().filter_map(|(node, member)| {
            let view = MemberView {
                card: Arc::clone(member.card.as_ref()?),
                state: member.claim.state,
                since: member.since,
                connected: self.links.contains_key(node),
                rtt: member.rtt,
            };
            Some((*node, view))
        });
        let mut members: BTreeMap<NodeId, MemberView> = known.collect();
        let mine = MemberView {
            card: Arc::clone(&self.my_card),
            state: self.my_claim.state,
            since: self.my_since,
            connected: true,
            rtt: Some(Duration::ZERO),
        };
        members.insert(self.me, mine);
        ClusterView { me: self.me, members }
    }

    /// Takes what happened and says what to do.
    pub(crate) fn step(&mut self, now: Instant, input: Input) -> Vec<Output> {
        let late = now.since(self.due);
        if late > LATE {
            self.grant(late);
        }
        match input {
            Input::Tick => {}
            Input::Connected(peer) => self.connected(now, peer),
            Input::Disconnected { peer, broken } => self.disconnected(now, peer, broken),
            Input::Message { from, message } => self.message(now, from, message),
            Input::Card(card) => self.update_card(now, card),
            Input::Watch { node, watched } => self.watch(now, node, watched),
            Input::Leave => self.leave(now),
        }
        self.advance(now);
        self.due = self.deadline();
        if self.dirty {
            self.dirty = false;
            self.out.push(Output::View(Arc::new(self.view())));
        }
        // Views come before the events that they show, so that a subscriber who looks sees what it is told.
        let events = std::mem::take(&mut self.events);
        self.out.extend(events.into_iter().map(Output::Event));
        std::mem::take(&mut self.out)
    }

    /// When there is something to do though nothing happens.
    pub(crate) fn deadline(&self) -> Instant {
        let mut next = self.next_round;
        let suspicions = self.suspects.iter().filter_map(|node| self.members.get(node)?.suspicion).map(|suspicion| suspicion.until);
        let probes = self.probes.values().map(|probe| probe.until);
        let card = self.card_waits.iter().map(|_| self.card_next);
        for moment in suspicions.chain(probes).chain(card).chain(self.watch_deadlines()) {
            next = next.min(moment);
        }
        next
    }

    fn advance(&mut self, now: Instant) {
        if now >= self.card_next
            && let Some(card) = self.card_waits.take()
        {
            self.publish_card(now, *card);
        }
        self.advance_probes(now);
        let over: Vec<NodeId> = self.suspects.iter().copied().filter(|node| self.suspicion_over(*node, now)).collect();
        for node in over {
            self.declare_dead(now, node);
        }
        if now >= self.next_round {
            self.next_round = now + self.dice.jitter(self.timing.round);
            self.round(now);
            self.fetch_cards(now);
            let (links, watched) = (&self.links, &self.watched);
            let before = self.members.len();
            self.members.retain(|node, member| {
                member.claim.state.is_present()
                    || links.contains_key(node)
                    || watched.contains_key(node)
                    || now.since(member.since) < REMEMBERED
            });
            self.dirty |= self.members.len() != before;
        }
        if now >= self.next_compare {
            self.next_compare = now + self.dice.jitter(COMPARE_EVERY);
            let peers: Vec<NodeId> = self.links.keys().copied().collect();
            if let Some(peer) = peers.get(self.dice.below(peers.len() as u64) as usize) {
                let summary = Message::Summary(self.fingerprint());
                self.send(*peer, summary);
            }
        }
    }

    fn suspicion_over(&self, node: NodeId, now: Instant) -> bool {
        self.members.get(&node).and_then(|member| member.suspicion).is_some_and(|suspicion| suspicion.until <= now)
    }

    /// Time that this node lost is time that nobody could have answered it in.
    fn grant(&mut self, late: Duration) {
        for member in self.members.values_mut() {
            member.contact = member.contact + late;
            if let Some(suspicion) = &mut member.suspicion {
                suspicion.until = suspicion.until + late;
            }
        }
        for probe in self.probes.values_mut() {
            probe.until = probe.until + late;
        }
        for asked in self.asked.values_mut() {
            asked.until = asked.until + late;
        }
    }

    pub(super) fn send(&mut self, to: NodeId, message: Message) {
        self.out.push(Output::Send { to, message });
    }

    /// Gossip for a message to `to`, which always hears what is believed of itself if that is bad: only it can object.
    pub(super) fn news_for(&mut self, to: NodeId) -> Vec<Update> {
        let mut updates = self.gossip.take(self.members.len() + 1);
        if let Some(member) = self.members.get(&to)
            && member.claim.state != MemberState::Alive
            && !updates.contains(&member.claim)
        {
            updates.push(member.claim);
        }
        updates
    }

    /// Tells up to [`URGENT_MAX`] connected peers at once, and the rest by gossip.
    fn spread(&mut self, update: Update, urgent: bool) {
        self.gossip.push(update);
        if urgent {
            let mut peers: Vec<NodeId> = self.links.keys().copied().collect();
            if peers.len() > URGENT_MAX {
                self.dice.shuffle(&mut peers);
                peers.truncate(URGENT_MAX);
            }
            for peer in peers {
                self.send(peer, Message::News(Updates { updates: vec![update] }));
            }
        }
    }

    fn connected(&mut self, now: Instant, peer: NodeId) {
        if peer == self.me {
            return;
        }
        self.links.insert(peer, Link::default());
        self.dirty = true;
        let hello = Hello { card: Arc::clone(&self.my_card), version: self.my_claim.version };
        self.send(peer, Message::Hello(hello));
        // Two that know the same, which is the rule once a cluster stands, need not tell each other.
        if self.me < peer {
            let summary = Message::Summary(self.fingerprint());
            self.send(peer, summary);
        }
        if let Some(member) = self.members.get_mut(&peer) {
            member.contact = now;
        }
        self.connection_helps(now, peer);
    }

    fn disconnected(&mut self, now: Instant, peer: NodeId, broken: bool) {
        let Some(link) = self.links.remove(&peer) else { return };
        self.dirty = true;
        let present = self.members.get(&peer).is_some_and(|member| member.claim.state.is_present());
        if present && broken && !link.parting {
            self.probe(now, peer, self.timing.suspicion_short);
        }
        self.asked.retain(|_, asked| asked.asker != peer && asked.target != peer);
    }

    fn message(&mut self, now: Instant, from: NodeId, message: Message) {
        if from == self.me || !self.links.contains_key(&from) {
            return;
        }
        if let Some(excess) = message.excess() {
            tracing::warn!(peer = ?from, excess, "a membership message is not looked at");
            return;
        }
        let greets = matches!(message, Message::Hello(_));
        if let Some(member) = self.members.get_mut(&from) {
            member.contact = now;
        }
        match message {
            Message::Ping(ping) => {
                self.accept_all(now, from, &ping.updates);
                let updates = self.news_for(from);
                self.send(from, Message::Ack(message::Numbered { sequence: ping.sequence, updates }));
            }
            Message::Ack(ack) => {
                self.accept_all(now, from, &ack.updates);
                self.acknowledged(now, from, ack.sequence);
            }
            Message::Relay(relay) => {
                self.accept_all(now, from, &relay.updates);
                self.relay(now, from, relay.sequence, relay.target);
            }
            Message::Relayed(relayed) => {
                self.accept_all(now, from, &relayed.updates);
                self.relayed(now, relayed.sequence, relayed.reached);
            }
            Message::News(news) => self.accept_all(now, from, &news.updates),
            Message::Hello(hello) => self.greeted(now, from, hello),
            Message::Digest(digest) => {
                self.accept_all(now, from, &digest.updates);
                self.contradict(from, &digest.updates);
                if digest.answer {
                    self.send_digest(from, false);
                }
            }
            Message::Summary(theirs) => {
                if theirs != self.fingerprint() {
                    self.send_digest(from, true);
                }
            }
            Message::Want(nodes) => self.send_cards(from, &nodes),
            Message::Cards(cards) => {
                for card in cards {
                    self.accept_card(now, from, card);
                }
            }
            Message::Parting => self.parting(from),
        }
        if !greets {
            self.remind(now, from);
        }
    }

    /// Tells a peer that talks to us though it is thought suspect or dead, so that it can object.
    fn remind(&mut self, now: Instant, peer: NodeId) {
        let Some(claim) = self.members.get(&peer).map(|member| member.claim) else { return };
        let Some(link) = self.links.get_mut(&peer) else { return };
        let wrong = matches!(claim.state, MemberState::Suspect | MemberState::Dead);
        if wrong && link.reminded.is_none_or(|at| now.since(at) >= REMIND_PAUSE) {
            link.reminded = Some(now);
            self.send(peer, Message::News(Updates { updates: vec![claim] }));
        }
    }

    /// A peer needs the connection no longer. The one who is told closes it, so that the word is never lost.
    fn parting(&mut self, peer: NodeId) {
        let spare = self.links.len() > self.timing.mesh && !self.wanted.contains(&peer);
        if let Some(link) = self.links.get_mut(&peer)
            && spare
        {
            link.parting = true;
            self.out.push(Output::Disconnect(peer));
        }
    }

    fn greeted(&mut self, now: Instant, from: NodeId, hello: Hello) {
        if hello.card.node != from {
            tracing::warn!(peer = ?from, claimed = ?hello.card.node, "a peer sent another node's card as its own");
            return;
        }
        let claim = Update {
            node: from,
            incarnation: hello.card.incarnation,
            version: hello.version,
            state: MemberState::Alive,
            revision: hello.card.revision,
        };
        self.accept(now, from, claim);
        self.accept_card(now, from, hello.card);
        self.remind(now, from);
    }

    fn send_digest(&mut self, to: NodeId, answer: bool) {
        let mut updates = vec![self.my_claim];
        updates.extend(self.members.values().map(|member| member.claim).filter(|claim| claim.node != to));
        let parts = updates.chunks(DIGEST_MAX).map(<[Update]>::to_vec).collect::<Vec<_>>();
        let last = parts.len().saturating_sub(1);
        for (at, updates) in parts.into_iter().enumerate() {
            self.send(to, Message::Digest(Digest { updates, answer: answer && at == last }));
        }
    }

    /// Answers the claims of a digest that this node knows better.
    fn contradict(&mut self, to: NodeId, theirs: &[Update]) {
        let better = theirs.iter().filter_map(|their| {
            let mine = if their.node == self.me { self.my_claim } else { self.members.get(&their.node)?.claim };
            mine.beats(their).then_some(mine)
        });
        let better: Vec<Update> = better.take(DIGEST_MAX).collect();
        if !better.is_empty() {
            self.send(to, Message::News(Updates { updates: better }));
        }
    }

    /// A fingerprint of who is there with which card. Suspicion does not count: it passes by itself.
    fn fingerprint(&self) -> [u8; 16] {
        let mut hasher = blake3::Hasher::new();
        let mut known: BTreeMap<NodeId, Update> = BTreeMap::from([(self.me, self.my_claim)]);
        known.extend(self.members.iter().map(|(node, member)| (*node, member.claim)));
        for (node, claim) in known.iter().filter(|(_, claim)| claim.state.is_present()) {
            hasher.update(&node.0).update(&claim.incarnation.0.to_le_bytes()).update(&claim.revision.to_le_bytes());
        }
        let mut short = [0; 16];
        short.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        short
    }

    fn accept_all(&mut self, now: Instant, from: NodeId, updates: &[Update]) {
        for update in updates {
            self.accept(now, from, *update);
        }
    }

    /// Weighs a claim against what is believed.
    pub(super) fn accept(&mut self, now: Instant, from: NodeId, update: Update) {
        if update.node == self.me {
            return self.about_me(update);
        }
        let Some(member) = self.members.get_mut(&update.node) else {
            if self.members.len() < MEMBERS_MAX {
                self.members.insert(
                    update.node,
                    Member {
                        claim: update,
                        card: None,
                        announced: false,
                        since: now,
                        suspicion: None,
                        contact: now,
                        rtt: None,
                        rtt_shown: None,
                        card_asked: None,
                    },
                );
                self.believed(now, update.node, false);
                self.want_card(now, update.node, from);
            }
            return;
        };
        let old = member.claim;
        let in_touch = self.links.contains_key(&update.node) && now.since(member.contact) < IN_TOUCH;
        let same_life = update.incarnation == old.incarnation;
        if in_touch && same_life && update.state == MemberState::Dead && old.state.is_present() {
            return self.question(now, update);
        }
        if update.beats(&old) {
            let reborn = update.incarnation != old.incarnation;
            let revision = if reborn { update.revision } else { update.revision.max(old.revision) };
            member.claim = Update { revision, ..update };
            if reborn {
                // The old life is over, whatever it held is void, and its card with it.
                let over = std::mem::take(&mut member.announced);
                member.card = None;
                member.card_asked = None;
                member.contact = now;
                if over {
                    self.events.push(MemberEvent::Dead { node: update.node, incarnation: old.incarnation });
                }
            }
            if reborn || member.claim.state != old.state {
                self.believed(now, update.node, true);
            } else {
                let allowed = self.timing.suspicion;
                member.suspicion = member.suspicion.map(|_| Suspicion { until: now + allowed, allowed, own: false, heard: true });
                let claim = member.claim;
                self.gossip.push(claim);
            }
            self.want_card(now, update.node, from);
        } else if update.incarnation == old.incarnation {
            if update.revision > old.revision {
                member.claim.revision = update.revision;
                let claim = member.claim;
                self.gossip.push(claim);
            }
            if update.state == MemberState::Suspect && old.state == MemberState::Suspect && update.version == old.version {
                self.doubt_again(now, update.node, false);
            }
            self.want_card(now, update.node, from);
        }
    }

    /// Somebody says that a member is dead from which this node has just heard. Who was cut off thinks so of everybody
    /// and says it when it is back: taken at its word, it would end what those who were never apart do together. So the
    /// member is told, and is dead only if it has nothing to say to that.
    fn question(&mut self, now: Instant, update: Update) {
        let Some(member) = self.members.get_mut(&update.node) else { return };
        let doubt = Update { state: MemberState::Suspect, revision: update.revision.max(member.claim.revision), ..update };
        if doubt.beats(&member.claim) {
            member.claim = doubt;
            self.believed(now, update.node, true);
            let allowed = self.timing.suspicion_short;
            if let Some(member) = self.members.get_mut(&update.node) {
                member.suspicion = Some(Suspicion { until: now + allowed, allowed, own: false, heard: true });
            }
            self.send(update.node, Message::News(Updates { updates: vec![doubt] }));
        } else if (doubt.version, doubt.state) == (member.claim.version, member.claim.state) {
            self.doubt_again(now, update.node, false);
        }
    }

    /// The belief about `node` has become what its claim now says: keep the books, tell, pass on.
    fn believed(&mut self, now: Instant, node: NodeId, known: bool) {
        let Some(member) = self.members.get_mut(&node) else { return };
        let claim = member.claim;
        let announced = member.announced;
        member.since = now;
        self.dirty = true;
        member.suspicion = match claim.state {
            MemberState::Suspect => {
                self.suspects.insert(node);
                let allowed = self.timing.suspicion;
                Some(Suspicion { until: now + allowed, allowed, own: false, heard: true })
            }
            _ => {
                self.suspects.remove(&node);
                None
            }
        };
        match claim.state {
            MemberState::Alive => {
                member.contact = now;
                if announced {
                    self.events.push(MemberEvent::Alive { node, incarnation: claim.incarnation });
                } else {
                    self.announce(node);
                }
            }
            MemberState::Suspect => {
                if announced {
                    self.events.push(MemberEvent::Suspect { node, incarnation: claim.incarnation });
                } else {
                    self.announce(node);
                }
            }
            MemberState::Dead | MemberState::Left => {
                member.announced = false;
                if announced {
                    let event = match claim.state {
                        MemberState::Left => MemberEvent::Left { node, incarnation: claim.incarnation },
                        _ => MemberEvent::Dead { node, incarnation: claim.incarnation },
                    };
                    self.events.push(event);
                }
                self.forget_probes(node);
            }
        }
        // Old news of the dead that this node never knew are not worth spreading.
        if known || claim.state.is_present() {
            self.gossip.push(claim);
        }
    }

    /// Tells that a member is there, once its card is known.
    pub(super) fn announce(&mut self, node: NodeId) {
        let Some(member) = self.members.get_mut(&node) else { return };
        if member.card.is_some() && member.claim.state.is_present() && !member.announced {
            member.announced = true;
            self.dirty = true;
            self.events.push(MemberEvent::Joined { node, incarnation: member.claim.incarnation });
        }
    }

    pub(super) fn card_changed(&mut self, node: NodeId) {
        self.dirty = true;
        self.events.push(MemberEvent::CardChanged { node });
    }

    fn about_me(&mut self, update: Update) {
        if update.incarnation > self.my_claim.incarnation {
            if !self.superseded {
                self.superseded = true;
                self.out.push(Output::Superseded);
            }
            return;
        }
        if update.incarnation < self.my_claim.incarnation {
            return self.gossip.push(self.my_claim);
        }
        let contradicted = update.state != MemberState::Alive && update.version >= self.my_claim.version;
        if contradicted && self.my_claim.state == MemberState::Alive {
            self.my_claim.version = update.version.saturating_add(1);
            self.spread(self.my_claim, true);
        }
    }

    /// This node itself has found that a member does not answer.
    pub(super) fn suspect(&mut self, now: Instant, node: NodeId, allowed: Duration) {
        let Some(member) = self.members.get_mut(&node) else { return };
        match member.claim.state {
            MemberState::Alive => {
                member.claim.state = MemberState::Suspect;
                let claim = member.claim;
                self.believed(now, node, true);
                if let Some(member) = self.members.get_mut(&node) {
                    member.suspicion = Some(Suspicion { until: now + allowed, allowed, own: true, heard: false });
                }
                self.spread(claim, true);
            }
            MemberState::Suspect => self.doubt_again(now, node, true),
            MemberState::Dead | MemberState::Left => {}
        }
    }

    /// A second opinion on a suspect: this node's own or another's. Two that agree need half the time.
    fn doubt_again(&mut self, now: Instant, node: NodeId, own: bool) {
        let Some(member) = self.members.get_mut(&node) else { return };
        let Some(suspicion) = &mut member.suspicion else { return };
        let before = suspicion.own && suspicion.heard;
        suspicion.own |= own;
        suspicion.heard |= !own;
        // A short time is for one whose connection broke, and is what it needs to connect again.
        let long = suspicion.allowed > self.timing.suspicion_short;
        if !before && suspicion.own && suspicion.heard && long {
            suspicion.until = suspicion.until.min(now.max(member.since + suspicion.allowed / 2));
        }
    }

    fn declare_dead(&mut self, now: Instant, node: NodeId) {
        let Some(member) = self.members.get_mut(&node) else { return };
        member.claim.state = MemberState::Dead;
        let claim = member.claim;
        self.believed(now, node, true);
        self.spread(claim, true);
        if self.links.contains_key(&node) {
            // A cable that was cut closes nothing. Closing it here lets the book dial anew.
            self.out.push(Output::Disconnect(node));
        }
    }

    fn update_card(&mut self, now: Instant, card: Box<NodeCard>) {
        if now >= self.card_next {
            self.card_waits = None;
            self.publish_card(now, *card);
        } else {
            self.card_waits = Some(card);
        }
    }

    fn publish_card(&mut self, now: Instant, mut card: NodeCard) {
        card.node = self.me;
        card.incarnation = self.my_claim.incarnation;
        card.revision = self.my_card.revision;
        message::fit(&mut card);
        if card == *self.my_card {
            return;
        }
        card.revision += 1;
        self.card_next = now + CARD_PAUSE;
        self.my_claim.revision = card.revision;
        self.my_card = Arc::new(card);
        self.dirty = true;
        self.events.push(MemberEvent::CardChanged { node: self.me });
        self.gossip.push(self.my_claim);
        self.push_card();
    }

    fn leave(&mut self, now: Instant) {
        self.my_claim.state = MemberState::Left;
        self.my_since = now;
        self.dirty = true;
        let claim = self.my_claim;
        // Everybody, not only some: after this nobody is there to pass it on from here.
        let peers: Vec<NodeId> = self.links.keys().copied().collect();
        for peer in peers {
            self.send(peer, Message::News(Updates { updates: vec![claim] }));
        }
    }

    /// Notes a measured round trip (smoothed as in RFC 6298, one eighth at a time).
    pub(super) fn measured(&mut self, node: NodeId, sample: Duration) {
        let Some(member) = self.members.get_mut(&node) else { return };
        let smoothed = member.rtt.map_or(sample, |old| old - old / 8 + sample / 8);
        member.rtt = Some(smoothed);
        let shown = member.rtt_shown.unwrap_or(Duration::ZERO);
        // A view for every ping would be a waste: only what a planner could care about.
        if smoothed.abs_diff(shown) > shown / 4 {
            member.rtt_shown = Some(smoothed);
            self.dirty = true;
        }
    }
}
