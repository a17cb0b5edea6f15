//! What a lease is, for its owner, its holder and people.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

use super::size::size;
use crate::ids::{Incarnation, InstanceId, LeaseId, NodeId, Term};

/// Whom the memory is for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Beneficiary {
    /// A placed model.
    Instance(InstanceId),
    /// A user's own program, by the name it gives itself (at most [`LABEL_BYTES_MAX`](super::timing::LABEL_BYTES_MAX)
    /// bytes).
    User(String),
}

impl fmt::Display for Beneficiary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Instance(instance) => write!(f, "instance {instance:?}"),
            Self::User(name) => write!(f, "user `{name}`"),
        }
    }
}

/// What the memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Purpose {
    /// A stage's weights.
    Weights,
    /// Keys and values of sequences.
    Kv,
    /// Buffers that a step needs.
    Activations,
    /// Whatever a user's program does with it.
    User,
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Weights => "weights",
            Self::Kv => "keys and values",
            Self::Activations => "activations",
            Self::User => "a user's data",
        })
    }
}

/// The terms of a lease, as its holder asks for them. Asking again with the same id and the same terms gives the same
/// lease; the same id with other terms is refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseSpec {
    /// Its name, chosen by the holder: fresh and random.
    pub id: LeaseId,
    /// For whom.
    pub beneficiary: Beneficiary,
    /// For what.
    pub purpose: Purpose,
    /// How much, in bytes; not zero.
    pub bytes: u64,
    /// Under which term of the instance. The term's node is the holder. Leases of users have no contest: use
    /// [`LeaseSpec::user_term`].
    pub term: Term,
    /// The nodes that may take the instance over: its succession set, kept with the lease so that each of them can
    /// prove to the owner that it belongs.
    pub members: Vec<NodeId>,
    /// The layers of the stage it belongs to, for people.
    pub stage: Option<Range<u32>>,
}

impl LeaseSpec {
    /// The term of a lease that belongs to no instance.
    pub fn user_term(holder: NodeId) -> Term {
        Term { counter: 0, node: holder }
    }

    /// Terms for memory that a user's program borrows under a name of its own.
    pub fn user(id: LeaseId, holder: NodeId, name: impl Into<String>, bytes: u64) -> Self {
        Self {
            id,
            beneficiary: Beneficiary::User(name.into()),
            purpose: Purpose::User,
            bytes,
            term: Self::user_term(holder),
            members: Vec::new(),
            stage: None,
        }
    }
}

/// What proves the right to a lease: 128 random bits, drawn by the owner and known to the holder alone. Never
/// printed, compared in constant time.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct LeaseToken([u8; 16]);

impl LeaseToken {
    /// The token of `lease` that follows from a fresh secret.
    pub(crate) fn derive(seed: &TokenSeed, lease: LeaseId) -> Self {
        let hash = blake3::keyed_hash(&seed.0, &lease.0.to_le_bytes());
        let mut token = [0; 16];
        token.copy_from_slice(&hash.as_bytes()[..16]);
        Self(token)
    }
}

impl PartialEq for LeaseToken {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for LeaseToken {}

impl fmt::Debug for LeaseToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LeaseToken(…)")
    }
}

/// Fresh secret bytes, drawn by the owner's shell for every request, from which the tokens that the request creates
/// are derived. So the machine itself needs no chance.
#[derive(Clone, Copy)]
pub struct TokenSeed(pub [u8; 32]);

impl fmt::Debug for TokenSeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenSeed(…)")
    }
}

/// What a holder gets: the right to memory of `owner`, in this life of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Which lease.
    pub lease: LeaseId,
    /// Whose memory.
    pub owner: NodeId,
    /// Which life of the owner: a restarted one knows nothing of the lease.
    pub incarnation: Incarnation,
    /// What to show with every use.
    pub token: LeaseToken,
    /// Under which term.
    pub term: Term,
    /// How much, in bytes.
    pub bytes: u64,
    /// How long from the request on.
    pub ttl: Duration,
}

/// How the holder shows its right when it uses leased memory, e.g. to load a stage into it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseUse {
    /// Which lease.
    pub lease: LeaseId,
    /// Its token.
    pub token: LeaseToken,
    /// The owner's life that granted it.
    pub incarnation: Incarnation,
    /// The term that the holder acts under.
    pub term: Term,
}

impl From<&Grant> for LeaseUse {
    fn from(grant: &Grant) -> Self {
        Self { lease: grant.lease, token: grant.token, incarnation: grant.incarnation, term: grant.term }
    }
}

/// Why a lease ended or is about to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum EndReason {
    /// The holder gave it back.
    Released,
    /// The holder did not renew it in time.
    Expired,
    /// The owner took it back; the text says why.
    Revoked(String),
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Released => f.write_str("its holder gave it back"),
            Self::Expired => f.write_str("its holder did not renew it in time"),
            Self::Revoked(why) => write!(f, "its owner took it back: {why}"),
        }
    }
}

/// Where a lease stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LeaseState {
    /// In force.
    Granted,
    /// Past its deadline: its memory goes to the next who needs it.
    Reclaimable,
    /// Ended, but its memory may still be written to: charged until that is impossible.
    Fenced(EndReason),
}

/// A lease as its owner tells others about it: everything but the token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseInfo {
    /// Which.
    pub id: LeaseId,
    /// Who has it.
    pub holder: NodeId,
    /// For whom.
    pub beneficiary: Beneficiary,
    /// For what.
    pub purpose: Purpose,
    /// How much, in bytes.
    pub bytes: u64,
    /// Under which term.
    pub term: Term,
    /// Layers of the stage it belongs to.
    pub stage: Option<Range<u32>>,
    /// Where it stands.
    pub state: LeaseState,
    /// How long until its deadline; zero if that has passed.
    pub remaining: Duration,
}

/// What an owner offers and how much of it is lent, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Totals {
    /// On offer.
    pub offered: u64,
    /// Lent or charged: what is granted and what is fenced.
    pub used: u64,
    /// The part of `used` that is ended but not safe to lend again yet.
    pub fenced: u64,
    /// Leases, fenced ones included.
    pub leases: u32,
}

impl Totals {
    /// What can be lent at once.
    pub fn free(&self) -> u64 {
        self.offered.saturating_sub(self.used)
    }

    /// What is lent beyond the offer, after the offer was lowered.
    pub fn over_committed(&self) -> u64 {
        self.used.saturating_sub(self.offered)
    }
}

/// One node's lending at a moment: who lends what to whom and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseView {
    /// Whose memory.
    pub owner: NodeId,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// The sums.
    pub totals: Totals,
    /// The leases, by id.
    pub leases: Vec<LeaseInfo>,
}

/// What one beneficiary has of an owner's memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolderUse {
    /// Who has it.
    pub holder: NodeId,
    /// For whom.
    pub beneficiary: Beneficiary,
    /// How much in all, in bytes.
    pub bytes: u64,
}

impl fmt::Display for HolderUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} (held by node {:?})", self.beneficiary, size(self.bytes), self.holder)
    }
}
