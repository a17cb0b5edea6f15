//! The names of things that cross the network: nodes, instances, leases, requests, terms.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A node: the public half of its persistent ed25519 key.
///
/// The libp2p peer id is derived from it, so whoever is at the other end of a Noise session has proved that it holds
/// the private half.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeId(pub [u8; 32]);

impl NodeId {
    /// The first ten hexadecimal digits, for tables and logs.
    pub fn short(&self) -> String {
        hex::encode(&self.0[..5])
    }

    /// How high the node ranks among those that may place the file with this hash: everybody finds the same one highest (rendezvous
    /// hashing, also known as highest random weight).
    pub(crate) fn rank_for(self, sha256: &str) -> [u8; 32] {
        *blake3::hash(&[sha256.as_bytes(), &self.0].concat()).as_bytes()
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.short())
    }
}

/// Why a text is not a [`NodeId`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a node id: it has 64 hexadecimal digits")]
pub struct NodeIdError {
    text: String,
}

impl FromStr for NodeId {
    type Err = NodeIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes).map_err(|_| NodeIdError { text: text.to_owned() })?;
        Ok(Self(bytes))
    }
}

macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub u128);

        impl $name {
            /// A fresh one that nobody can guess.
            pub fn random(rng: &dyn shoal_transport::env::Rng) -> Self {
                let mut bytes = [0; 16];
                rng.fill(stringify!($name), &mut bytes);
                Self(u128::from_le_bytes(bytes))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:032x}", self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:08x}", (self.0 >> 96) as u32)
            }
        }

        impl FromStr for $name {
            type Err = std::num::ParseIntError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                u128::from_str_radix(text, 16).map(Self)
            }
        }
    };
}

random_id! {
    /// A placed model: what holds one lease for every stage of a plan.
    InstanceId
}
random_id! {
    /// A lease, named by its holder, so that asking twice for the same one gives one lease.
    LeaseId
}
random_id! {
    /// A request for text. Submitting the same id again is the same request.
    RequestId
}

/// Which life of a node this is. A node draws a new one at every start, so that what it granted before a restart
/// names an owner that no longer exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Incarnation(pub u64);

/// Who conducts an instance, and since when: claimants raise the counter, and the node id breaks ties.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Term {
    /// Raised by every claim.
    pub counter: u64,
    /// The claimant.
    pub node: NodeId,
}

/// Which arrangement of stages a step belongs to. A re-plan raises it, so that a frame of the old arrangement is
/// recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PlanEpoch(pub u32);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_id_reads_back_what_it_prints() {
        let id = NodeId([0xa5; 32]);
        assert_eq!(id.to_string().parse::<NodeId>(), Ok(id));
        assert!("a5".parse::<NodeId>().is_err());
        assert!("zz".repeat(32).parse::<NodeId>().is_err());
    }

    #[test]
    fn terms_order_by_counter_first() {
        let low = Term { counter: 1, node: NodeId([9; 32]) };
        let high = Term { counter: 2, node: NodeId([1; 32]) };
        assert!(low < high);
        assert!(Term { counter: 1, node: NodeId([1; 32]) } < low);
    }
}
