//! What became of leases: who had each of them last, in which life.

use std::collections::BTreeMap;

use shoal_actors::ids::{Incarnation, LeaseId, NodeId};

use super::NodeScene;

/// The last holder of a lease in its owner's books.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rightful {
    /// Which node.
    pub holder: NodeId,
    /// Which life of it; none if it did not run when it became the holder.
    pub life: Option<u64>,
    /// How much, in bytes.
    pub bytes: u64,
}

/// What became of leases, by owner and its life.
#[derive(Debug, Default)]
pub struct Past {
    leases: BTreeMap<(NodeId, Incarnation, LeaseId), Rightful>,
}

impl Past {
    /// Remembers what an owner says now. `life` names the life of a node that runs.
    pub(super) fn note(&mut self, owner: &NodeScene, life: impl Fn(NodeId) -> Option<u64>) {
        for lease in &owner.lent {
            let key = (owner.id, owner.incarnation, lease.lease);
            if self.leases.get(&key).is_none_or(|known| known.holder != lease.holder) {
                let rightful = Rightful { holder: lease.holder, life: life(lease.holder), bytes: lease.bytes };
                self.leases.insert(key, rightful);
            }
        }
    }

    /// The last holder of a lease of that life of an owner.
    pub fn rightful(&self, owner: NodeId, incarnation: Incarnation, lease: LeaseId) -> Option<Rightful> {
        self.leases.get(&(owner, incarnation, lease)).copied()
    }
}
