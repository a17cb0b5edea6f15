//! What a frame must belong to in order to be let through.

use std::cmp::Ordering;
use std::fmt;

/// A term in 16 bytes: its counter, and the start of the claimant's node id.
///
/// The start is kept in big-endian order, so that tags order as the terms themselves do, except for two node ids that
/// share eight leading bytes; ids are public keys, so that is a matter of 2⁶⁴ key draws, and a fence is no proof of identity.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct TermTag {
    /// Raised by every claim.
    pub counter: u64,
    /// The first eight bytes of the claimant's node id, as a big-endian number.
    pub node: u64,
}

impl TermTag {
    /// The tag of the term `(counter, node)`.
    pub fn new(counter: u64, node: &[u8; 32]) -> Self {
        let mut start = [0; 8];
        start.copy_from_slice(&node[..8]);
        Self { counter, node: u64::from_be_bytes(start) }
    }
}

impl fmt::Debug for TermTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:08x}", self.counter, self.node >> 32)
    }
}

/// The instance, term and plan epoch that a channel is armed with.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Fence {
    /// The placed model.
    pub instance: u128,
    /// Who conducts it.
    pub term: TermTag,
    /// Which arrangement of stages; raised by every re-plan.
    pub epoch: u32,
}

impl Fence {
    /// Whether this fence is older or newer than `other`: by term first, then by epoch. Fences of two instances have no
    /// order.
    pub fn compare(&self, other: &Self) -> Option<Ordering> {
        (self.instance == other.instance).then(|| (self.term, self.epoch).cmp(&(other.term, other.epoch)))
    }

    /// Whether this fence replaces `other`.
    pub fn supersedes(&self, other: &Self) -> bool {
        self.compare(other) == Some(Ordering::Greater)
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x} term {:?} epoch {}", (self.instance >> 96) as u32, self.term, self.epoch)
    }
}
