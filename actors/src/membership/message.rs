//! What members say to each other. Enums grow at their end only; golden-byte tests pin the encoding.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::card::NodeCard;
use crate::ids::{Incarnation, NodeId};

/// The most updates that one gossip message carries: about 1.2 kB.
pub(crate) const GOSSIP_MAX: usize = 20;
/// The most updates that one digest carries: about 24 kB. A longer one comes in parts.
pub(crate) const DIGEST_MAX: usize = 400;
/// The most bytes of cards that one message carries, except that a single card always fits.
pub(crate) const CARDS_BYTES_MAX: usize = 64 * 1024;
/// The most cards that one message carries or asks for.
pub(crate) const CARDS_MAX: usize = 64;

/// What is believed of a member's health. The order is that of precedence among claims of one version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum MemberState {
    /// It answers.
    Alive,
    /// It did not answer; it has a moment to object.
    Suspect,
    /// It is gone.
    Dead,
    /// It said that it leaves.
    Left,
}

impl MemberState {
    /// Whether it counts as there.
    pub fn is_present(self) -> bool {
        matches!(self, Self::Alive | Self::Suspect)
    }
}

/// A claim about a member.
///
/// Of two claims the one of the later life holds; within one life that of the higher version, which only the member
/// itself raises, to object; within one version the worse one (Das, Gupta and Motivala, "SWIM", 2002, section 4.2).
/// Other than in the paper a member may object to its death, so that one that was cut off or suspended comes back
/// without a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Update {
    pub(crate) node: NodeId,
    pub(crate) incarnation: Incarnation,
    pub(crate) version: u32,
    pub(crate) state: MemberState,
    /// Revision of its card, the highest known to whoever says this.
    pub(crate) revision: u64,
}

impl Update {
    /// Whether this claim holds against `other`, which is about the same node. The revision does not count.
    pub(crate) fn beats(&self, other: &Self) -> bool {
        (self.incarnation, self.version, self.state) > (other.incarnation, other.version, other.state)
    }
}

/// A message of the membership service. Always a cast: answers are messages of their own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Message {
    /// Answer with [`Message::Ack`].
    Ping(Numbered),
    /// The answer.
    Ack(Numbered),
    /// Ping somebody for me.
    Relay(Relay),
    /// What came of it.
    Relayed(Relayed),
    /// News that should not wait for the next ping.
    News(Updates),
    /// The first message on a connection, both ways.
    Hello(Hello),
    /// What the sender knows of everybody, or a part of it.
    Digest(Digest),
    /// A fingerprint of what the sender knows. If the receiver's differs it sends a digest.
    Summary([u8; 16]),
    /// Send me the cards of these.
    Want(Vec<NodeId>),
    /// Here they are.
    Cards(Vec<Arc<NodeCard>>),
    /// I do not need this connection: close it if you do not either. It says nothing against my health.
    Parting,
}

/// A number by which ping and answer find each other, with gossip.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Numbered {
    pub(crate) sequence: u32,
    pub(crate) updates: Vec<Update>,
}

/// A request to ping somebody.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Relay {
    pub(crate) sequence: u32,
    pub(crate) target: NodeId,
    pub(crate) updates: Vec<Update>,
}

/// What came of a request to ping somebody.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Relayed {
    pub(crate) sequence: u32,
    pub(crate) reached: bool,
    pub(crate) updates: Vec<Update>,
}

/// Gossip alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Updates {
    pub(crate) updates: Vec<Update>,
}

/// Who the sender is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    pub(crate) card: Arc<NodeCard>,
    pub(crate) version: u32,
}

/// What the sender knows of everybody.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Digest {
    pub(crate) updates: Vec<Update>,
    /// Whether the receiver is to send its own.
    pub(crate) answer: bool,
}

impl Message {
    /// What in the message is larger than the protocol allows, if anything. Such a message is not looked at.
    pub(crate) fn excess(&self) -> Option<&'static str> {
        let (updates, limit) = match self {
            Self::Ping(Numbered { updates, .. }) | Self::Ack(Numbered { updates, .. }) => (updates, GOSSIP_MAX + 1),
            Self::Relay(Relay { updates, .. }) | Self::Relayed(Relayed { updates, .. }) => (updates, GOSSIP_MAX + 1),
            Self::News(Updates { updates }) | Self::Digest(Digest { updates, .. }) => (updates, DIGEST_MAX),
            Self::Want(nodes) => return (nodes.len() > CARDS_MAX).then_some("too many cards asked for"),
            Self::Cards(cards) => return (cards.len() > CARDS_MAX).then_some("too many cards"),
            Self::Hello(_) | Self::Summary(_) | Self::Parting => return None,
        };
        (updates.len() > limit).then_some("too many updates")
    }
}

/// Size of a card on the wire, in bytes.
pub(crate) fn card_bytes(card: &NodeCard) -> usize {
    postcard::experimental::serialized_size(card).unwrap_or(usize::MAX)
}

/// Cuts what makes a card too long: models first, as the list can grow without end, then what else is of free length.
pub(crate) fn fit(card: &mut NodeCard) {
    let cut = |text: &mut String, limit: usize| {
        while text.len() > limit {
            text.pop();
        }
    };
    cut(&mut card.name, 255);
    cut(&mut card.version, 64);
    cut(&mut card.platform, 64);
    if let Some(api) = &mut card.api {
        cut(api, 255);
    }
    card.addresses.truncate(64);
    card.addresses.iter_mut().for_each(|address| cut(address, 128));
    card.devices.truncate(32);
    for device in &mut card.devices {
        cut(&mut device.name, 128);
        device.features.truncate(64);
        device.features.iter_mut().for_each(|feature| cut(feature, 32));
    }
    for model in &mut card.models {
        cut(&mut model.name, 255);
        cut(&mut model.sha256, 64);
    }
    while card_bytes(card) > NodeCard::BYTES_MAX {
        // Devices alone can be too long only if someone makes them so.
        if card.models.pop().is_none() && card.devices.pop().is_none() && card.instances.pop().is_none() {
            card.addresses.clear();
            break;
        }
    }
}

#[cfg(test)]
pub(crate) fn test_card(node: NodeId, incarnation: u64) -> NodeCard {
    NodeCard {
        node,
        incarnation: Incarnation(incarnation),
        revision: 1,
        name: format!("host-{}", node.0[0]),
        version: "0.1.0".to_owned(),
        wire_version: 1,
        platform: "linux/x86_64".to_owned(),
        host: 7,
        cores: 2,
        memory_total_bytes: 8 << 30,
        memory_offered_bytes: 4 << 30,
        memory_free_bytes: 4 << 30,
        devices: Vec::new(),
        models: Vec::new(),
        instances: Vec::new(),
        addresses: vec!["192.168.0.1:4000".to_owned()],
        api: None,
        leaving: false,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::card::ModelOnDisk;

    fn update(version: u32, state: MemberState) -> Update {
        Update { node: NodeId([3; 32]), incarnation: Incarnation(300), version, state, revision: 2 }
    }

    #[test]
    fn bytes_stay_what_they_are() {
        let three = "03".repeat(32);
        let said = |message: &Message| hex::encode(postcard::to_stdvec(message).unwrap());
        let updates = vec![update(1, MemberState::Suspect)];
        let numbered = Numbered { sequence: 5, updates: updates.clone() };
        let tail = format!("01{three}ac02010102");
        assert_eq!(said(&Message::Ping(numbered.clone())), format!("0005{tail}"));
        assert_eq!(said(&Message::Ack(numbered)), format!("0105{tail}"));
        let target = NodeId([3; 32]);
        assert_eq!(said(&Message::Relay(Relay { sequence: 5, target, updates: updates.clone() })), format!("0205{three}{tail}"));
        assert_eq!(said(&Message::Relayed(Relayed { sequence: 5, reached: true, updates: updates.clone() })), format!("030501{tail}"));
        assert_eq!(said(&Message::News(Updates { updates: updates.clone() })), format!("04{tail}"));
        assert_eq!(said(&Message::Digest(Digest { updates, answer: true })), format!("06{tail}01"));
        assert_eq!(said(&Message::Summary([9; 16])), format!("07{}", "09".repeat(16)));
        assert_eq!(said(&Message::Want(vec![target])), format!("0801{three}"));
        assert_eq!(said(&Message::Cards(Vec::new())), "0900");
        assert_eq!(said(&Message::Parting), "0a");
        let hello = said(&Message::Hello(Hello { card: Arc::new(test_card(target, 300)), version: 4 }));
        assert!(hello.starts_with(&format!("05{three}ac0201")) && hello.ends_with("04"), "{hello}");
    }

    #[test]
    fn precedence_is_that_of_swim_with_a_way_back() {
        use MemberState::{Alive, Dead, Left, Suspect};
        for (better, worse) in [
            ((0, Suspect), (0, Alive)),
            ((1, Alive), (0, Suspect)),
            ((0, Dead), (0, Suspect)),
            ((1, Alive), (0, Dead)),
            ((0, Left), (0, Dead)),
        ] {
            assert!(update(better.0, better.1).beats(&update(worse.0, worse.1)));
            assert!(!update(worse.0, worse.1).beats(&update(better.0, better.1)));
        }
        let next_life = Update { incarnation: Incarnation(301), ..update(0, Alive) };
        assert!(next_life.beats(&update(9, Left)));
        assert!(!update(0, Alive).beats(&update(0, Alive)));
    }

    #[test]
    fn a_card_that_is_too_long_is_cut_to_fit() {
        let mut card = test_card(NodeId([1; 32]), 1);
        card.name = "ä".repeat(500);
        card.addresses = vec!["x".repeat(500); 500];
        card.models = (0..5000).map(|i| ModelOnDisk { name: format!("m{i}"), sha256: "0".repeat(64), bytes: 1 }).collect();
        fit(&mut card);
        assert!(card_bytes(&card) <= NodeCard::BYTES_MAX);
        assert!(card.models.len() > 100);
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(message) = postcard::from_bytes::<Message>(&bytes) {
                let _ = message.excess();
            }
        }
    }
}
