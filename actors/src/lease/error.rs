//! Why an owner refuses, and why a holder ends up without its leases.

use serde::{Deserialize, Serialize};

use super::size::size;
use super::types::{EndReason, HolderUse, Purpose};
use crate::ids::{Incarnation, InstanceId, LeaseId, NodeId, Term};

/// Why an owner refuses a request. It crosses the network, so variants are only added at the end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LeaseError {
    /// The memory is not there.
    #[error("{}", out_of_memory(*.asked, *.free, *.offered, *.fenced, .largest))]
    OutOfMemory {
        /// Bytes asked for.
        asked: u64,
        /// Bytes that are free.
        free: u64,
        /// Bytes on offer in all.
        offered: u64,
        /// Bytes whose former user has not let go of them yet.
        fenced: u64,
        /// Who has the most, largest first; at most three.
        largest: Vec<HolderUse>,
    },
    /// The id names a lease with other terms.
    #[error("lease {lease} exists with other terms; a different lease needs a fresh id")]
    DifferentTerms {
        /// Which.
        lease: LeaseId,
    },
    /// The id names a lease that is over.
    #[error("lease {lease} has ended ({reason}); ask again under a fresh id")]
    Ended {
        /// Which.
        lease: LeaseId,
        /// Why.
        reason: EndReason,
    },
    /// The owner knows no such lease.
    #[error("lease {lease} is not known here; acquire it again under a fresh id")]
    UnknownLease {
        /// Which.
        lease: LeaseId,
    },
    /// The token is not the lease's.
    #[error("the token does not belong to lease {lease}; only its holder can use it")]
    WrongToken {
        /// Which.
        lease: LeaseId,
    },
    /// The lease is another node's.
    #[error("lease {lease} belongs to another node than the one that asks")]
    WrongHolder {
        /// Which.
        lease: LeaseId,
    },
    /// The lease was granted by an earlier life of the owner.
    #[error("the owner has restarted since (life {:016x}, now {:016x}) and keeps no leases from before; acquire again", .yours.0, .current.0)]
    WrongIncarnation {
        /// The life that the caller means.
        yours: Incarnation,
        /// The life that answers.
        current: Incarnation,
    },
    /// Somebody has taken the instance over.
    #[error("term {} of instance {instance} is over: node {:?} conducts it under term {}", .yours.counter, .current.node, .current.counter)]
    StaleTerm {
        /// Which instance.
        instance: InstanceId,
        /// The caller's term.
        yours: Term,
        /// The term in force here.
        current: Term,
    },
    /// Another node was the first to claim this term here.
    #[error("term {counter} of instance {instance} belongs to node {by:?}, which claimed it first; claim a higher one")]
    TermTaken {
        /// Which instance.
        instance: InstanceId,
        /// Which counter.
        counter: u64,
        /// Whose it is.
        by: NodeId,
    },
    /// A node acts under a term that names another one.
    #[error("node {caller:?} cannot act under a term of node {claimant:?}")]
    ForeignTerm {
        /// Who asks.
        caller: NodeId,
        /// Whose term it shows.
        claimant: NodeId,
    },
    /// The lease is still under another term than the one shown.
    #[error("lease {lease} is held under term {counter}; claim the instance under the new term first")]
    NotClaimed {
        /// Which.
        lease: LeaseId,
        /// Counter of the term that it is under.
        counter: u64,
    },
    /// A node claims an instance that it does not belong to.
    #[error("node {node:?} is not in the succession set of instance {instance} and cannot take it over")]
    NotAMember {
        /// Which instance.
        instance: InstanceId,
        /// Who asks.
        node: NodeId,
    },
    /// The lease is over and its memory is being given up.
    #[error("lease {lease} is fenced: {reason}")]
    Fenced {
        /// Which.
        lease: LeaseId,
        /// Why.
        reason: EndReason,
    },
    /// The lease's deadline has passed.
    #[error("lease {lease} has run out; renew it before it is used again")]
    Expired {
        /// Which.
        lease: LeaseId,
    },
    /// A limit is reached.
    #[error("too many {what}: the limit is {limit}")]
    TooMany {
        /// Of what.
        what: String,
        /// The limit.
        limit: u64,
    },
    /// The request makes no sense; the text says how.
    #[error("the request for a lease is not valid: {0}")]
    Malformed(String),
}

fn out_of_memory(asked: u64, free: u64, offered: u64, fenced: u64, largest: &[HolderUse]) -> String {
    let mut text = format!("out of memory: {} asked, {} free of {} on offer", size(asked), size(free), size(offered));
    if fenced > 0 {
        text.push_str(&format!(", {} still being given up by former users", size(fenced)));
    }
    if !largest.is_empty() {
        let holders: Vec<String> = largest.iter().map(ToString::to_string).collect();
        text.push_str(&format!("; largest: {}", holders.join(", ")));
    }
    text.push_str("; unload a model, start another node or raise --memory");
    text
}

/// Why a holder has a lease no longer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LostReason {
    /// The owner refused to renew it.
    #[error("the owner refused to renew it: {0}")]
    Refused(LeaseError),
    /// The owner took it back.
    #[error("{0}")]
    Ended(EndReason),
    /// No renewal was answered in time.
    #[error("the owner answered no renewal in time")]
    TimedOut,
}

/// Why a set of leases was not had. Whatever part of it was granted has been given back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AcquireError {
    /// An owner refused.
    #[error("node {node:?} does not lend {} for {purpose}: {why}", size(*.bytes))]
    Refused {
        /// Which owner.
        node: NodeId,
        /// Which lease.
        lease: LeaseId,
        /// Bytes asked for.
        bytes: u64,
        /// For what.
        purpose: Purpose,
        /// Its words.
        why: LeaseError,
    },
    /// An owner did not answer.
    #[error("node {node:?} does not answer a request for {} for {purpose}: {why}", size(*.bytes))]
    Unreachable {
        /// Which owner.
        node: NodeId,
        /// Which lease.
        lease: LeaseId,
        /// Bytes asked for.
        bytes: u64,
        /// For what.
        purpose: Purpose,
        /// What went wrong.
        why: String,
    },
    /// A lease was granted and lost again before the set was complete.
    #[error("node {node:?} granted a lease and it was lost again before the others were granted: {why}")]
    Lost {
        /// Which owner.
        node: NodeId,
        /// Which lease.
        lease: LeaseId,
        /// Why.
        why: LostReason,
    },
    /// The set itself is not valid; the text says how.
    #[error("the set of leases is not valid: {0}")]
    Malformed(String),
    /// Whoever asked gave up.
    #[error("the request was cancelled")]
    Cancelled,
    /// The node is stopping.
    #[error("the node is stopping and acquires no leases")]
    Stopped,
}

impl AcquireError {
    /// The owner that it lies with, if it is one's.
    pub fn owner(&self) -> Option<NodeId> {
        match self {
            Self::Refused { node, .. } | Self::Unreachable { node, .. } | Self::Lost { node, .. } => Some(*node),
            Self::Malformed(_) | Self::Cancelled | Self::Stopped => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::types::Beneficiary;

    #[test]
    fn a_refusal_says_who_has_the_memory_and_what_to_do() {
        let error = LeaseError::OutOfMemory {
            asked: 97_000_000,
            free: 1_000_000,
            offered: 60_000_000,
            fenced: 0,
            largest: vec![HolderUse {
                holder: NodeId([0xab; 32]),
                beneficiary: Beneficiary::Instance(InstanceId(0x1234_5678 << 96)),
                bytes: 59_000_000,
            }],
        };
        assert_eq!(
            error.to_string(),
            "out of memory: 97.0 MB asked, 1.00 MB free of 60.0 MB on offer; largest: instance 12345678 59.0 MB (held by node \
             ababababab); unload a model, start another node or raise --memory"
        );
    }
}
