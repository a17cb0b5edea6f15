//! The cluster as one node sees it at one moment.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

pub use super::message::MemberState;
use crate::card::NodeCard;
use crate::env::Instant;
use crate::ids::{Incarnation, NodeId};

/// A member, or one that was.
#[derive(Debug, Clone, PartialEq)]
pub struct MemberView {
    /// What it says of itself.
    pub card: Arc<NodeCard>,
    /// What is believed of its health.
    pub state: MemberState,
    /// Since when, on this node's clock.
    pub since: Instant,
    /// Whether this node has a connection to it.
    pub connected: bool,
    /// Smoothed time of a small message to it and back; `None` if never connected, zero for this node itself.
    pub rtt: Option<Duration>,
}

/// Who is in the cluster, this node included. A snapshot: it never changes.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterView {
    /// This node.
    pub me: NodeId,
    /// Everybody known, in order of ids. The dead and those who left stay for some minutes.
    pub members: BTreeMap<NodeId, MemberView>,
}

impl ClusterView {
    /// What is known of a node.
    pub fn get(&self, node: NodeId) -> Option<&MemberView> {
        self.members.get(&node)
    }

    /// The card of a node that is there (alive or suspected).
    pub fn card(&self, node: NodeId) -> Option<&Arc<NodeCard>> {
        self.members.get(&node).filter(|member| member.state.is_present()).map(|member| &member.card)
    }

    /// Those who are there, this node included: alive, or suspected and not yet given up.
    pub fn present(&self) -> impl Iterator<Item = (NodeId, &MemberView)> {
        self.members.iter().filter(|(_, member)| member.state.is_present()).map(|(node, member)| (*node, member))
    }

    /// Whether a node counts as there.
    pub fn is_present(&self, node: NodeId) -> bool {
        self.members.get(&node).is_some_and(|member| member.state.is_present())
    }

    /// Those who are there and stay: of them replacements are chosen. Whoever is about to leave is none of them.
    pub fn staying(&self) -> impl Iterator<Item = (NodeId, &MemberView)> {
        self.alive().filter(|(_, member)| !member.card.leaving)
    }

    /// Whether a node has said that it is about to leave. One that is gone has left.
    pub fn is_leaving(&self, node: NodeId) -> bool {
        self.card(node).is_some_and(|card| card.leaving)
    }

    /// Those who are alive beyond doubt, this node included.
    pub fn alive(&self) -> impl Iterator<Item = (NodeId, &MemberView)> {
        self.members.iter().filter(|(_, member)| member.state == MemberState::Alive).map(|(node, member)| (*node, member))
    }
}

/// A change in the cluster. When it is told, the view already shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemberEvent {
    /// A node is there that was not, and its card is known.
    Joined {
        /// Who.
        node: NodeId,
        /// Which life of it.
        incarnation: Incarnation,
    },
    /// A member's card has changed.
    CardChanged {
        /// Whose.
        node: NodeId,
    },
    /// A member does not answer.
    Suspect {
        /// Who.
        node: NodeId,
        /// Which life of it.
        incarnation: Incarnation,
    },
    /// A suspected member has objected.
    Alive {
        /// Who.
        node: NodeId,
        /// Which life of it.
        incarnation: Incarnation,
    },
    /// This life of a member is over, as far as anybody can tell. If it was only cut off it comes back with
    /// [`MemberEvent::Joined`].
    Dead {
        /// Who.
        node: NodeId,
        /// Which life of it.
        incarnation: Incarnation,
    },
    /// A member has said that it leaves.
    Left {
        /// Who.
        node: NodeId,
        /// Which life of it.
        incarnation: Incarnation,
    },
}

impl MemberEvent {
    /// The member that it is about.
    pub fn node(&self) -> NodeId {
        match self {
            Self::Joined { node, .. }
            | Self::CardChanged { node }
            | Self::Suspect { node, .. }
            | Self::Alive { node, .. }
            | Self::Dead { node, .. }
            | Self::Left { node, .. } => *node,
        }
    }
}
