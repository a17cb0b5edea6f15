//! Fetching the cards that gossip only names: revisions travel with the news, contents on demand.

use std::sync::Arc;
use std::time::Duration;

use super::message::{CARDS_BYTES_MAX, CARDS_MAX, MemberState, Message, Update, card_bytes};
use super::swim::Swim;
use crate::card::NodeCard;
use crate::env::Instant;
use crate::ids::NodeId;

/// Pause before another peer is asked for a card that did not come.
const RETRY: Duration = Duration::from_millis(700);
/// Own cards up to this size go to every peer at once when they change, in clusters of up to [`PUSH_PEERS`].
const PUSH_BYTES: usize = 4096;
const PUSH_PEERS: usize = 16;

impl Swim {
    fn lacks_card(&self, node: NodeId) -> bool {
        self.members.get(&node).is_some_and(|member| {
            let held = member.card.as_ref().map(|card| card.revision);
            member.claim.state.is_present() && held.is_none_or(|held| held < member.claim.revision)
        })
    }

    /// Asks `from`, who named a card that this node does not hold, or better its owner.
    pub(super) fn want_card(&mut self, now: Instant, node: NodeId, from: NodeId) {
        if !self.lacks_card(node) {
            return;
        }
        let owner = self.links.contains_key(&node);
        let Some(member) = self.members.get_mut(&node) else { return };
        if member.card_asked.is_none_or(|at| now.since(at) >= RETRY) {
            member.card_asked = Some(now);
            self.send(if owner { node } else { from }, Message::Want(vec![node]));
        }
    }

    /// Asks anybody for cards that did not come.
    pub(super) fn fetch_cards(&mut self, now: Instant) {
        let peers: Vec<NodeId> = self.links.keys().copied().collect();
        if peers.is_empty() {
            return;
        }
        let missing: Vec<NodeId> = self.members.keys().copied().filter(|node| self.lacks_card(*node)).take(CARDS_MAX).collect();
        for node in missing {
            let anybody = peers[self.dice.below(peers.len() as u64) as usize];
            self.want_card(now, node, anybody);
        }
    }

    /// Sends the cards of `nodes` as far as they are known, in messages of bounded size.
    pub(super) fn send_cards(&mut self, to: NodeId, nodes: &[NodeId]) {
        let mut cards = Vec::new();
        let mut bytes = 0;
        for node in nodes {
            let card = if *node == self.me { Some(&self.my_card) } else { self.members.get(node).and_then(|member| member.card.as_ref()) };
            let Some(card) = card.map(Arc::clone) else { continue };
            let size = card_bytes(&card);
            if bytes + size > CARDS_BYTES_MAX && !cards.is_empty() {
                self.send(to, Message::Cards(std::mem::take(&mut cards)));
                bytes = 0;
            }
            bytes += size;
            cards.push(card);
        }
        if !cards.is_empty() {
            self.send(to, Message::Cards(cards));
        }
    }

    /// The own card has changed: in a small cluster everybody gets it, in a large one the news spread.
    pub(super) fn push_card(&mut self) {
        if self.links.len() <= PUSH_PEERS && card_bytes(&self.my_card) <= PUSH_BYTES {
            let peers: Vec<NodeId> = self.links.keys().copied().collect();
            for peer in peers {
                let card = Arc::clone(&self.my_card);
                self.send(peer, Message::Cards(vec![card]));
            }
        }
    }

    /// A card came, from its owner or from another.
    pub(super) fn accept_card(&mut self, now: Instant, from: NodeId, card: Arc<NodeCard>) {
        let node = card.node;
        if node == self.me {
            return;
        }
        if card_bytes(&card) > NodeCard::BYTES_MAX {
            tracing::warn!(peer = ?from, of = ?node, "a node card is too long and is not used");
            return;
        }
        let known = self.members.get(&node).map(|member| member.claim.incarnation);
        if known.is_none_or(|known| known < card.incarnation) {
            // The card outran the news of its owner.
            let claim = Update { node, incarnation: card.incarnation, version: 0, state: MemberState::Alive, revision: card.revision };
            self.accept(now, from, claim);
        }
        let Some(member) = self.members.get_mut(&node) else { return };
        if member.claim.incarnation != card.incarnation || member.card.as_ref().is_some_and(|held| held.revision >= card.revision) {
            return;
        }
        member.claim.revision = member.claim.revision.max(card.revision);
        member.card_asked = None;
        let first = member.card.replace(card).is_none();
        if member.announced && !first {
            self.card_changed(node);
        } else {
            self.announce(node);
        }
    }
}
