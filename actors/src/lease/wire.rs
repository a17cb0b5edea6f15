//! What holders and owners say to each other. Enums grow at their end only.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::error::LeaseError;
use super::types::{EndReason, Grant, LeaseSpec, LeaseToken, LeaseView};
use crate::ids::{Incarnation, InstanceId, LeaseId, NodeId, Term};

/// What a node asks of an owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LeaseRequest {
    /// A lease, please. Answered by [`LeaseReply::Granted`]. Asking again is the same as renewing.
    Acquire(LeaseSpec),
    /// Longer, please. Answered by [`LeaseReply::Renewed`].
    Renew {
        /// Which.
        lease: LeaseId,
        /// Its token.
        token: LeaseToken,
        /// The owner's life that granted it.
        incarnation: Incarnation,
        /// The holder's term.
        term: Term,
        /// How long the memory has not been used, so that the owner can take idle leases first.
        idle: Duration,
    },
    /// No longer needed. Answered by [`LeaseReply::Released`], also if it was released before.
    Release {
        /// Which.
        lease: LeaseId,
        /// Its token.
        token: LeaseToken,
        /// The owner's life that granted it.
        incarnation: Incarnation,
        /// The holder's term.
        term: Term,
    },
    /// Not wanted after all, whether it was granted or not: for a holder that never saw the answer and so has no
    /// token. Only the node that asked for the lease is heard. Answered by [`LeaseReply::Released`].
    Abandon {
        /// Which.
        lease: LeaseId,
    },
    /// A member of an instance takes it over: its leases at this owner, with new tokens. Answered by
    /// [`LeaseReply::Claimed`].
    Claim {
        /// Which instance.
        instance: InstanceId,
        /// The claimant's new term, higher than the last.
        term: Term,
        /// The succession set from now on.
        members: Vec<NodeId>,
    },
    /// What do you lend, and to whom? Answered by [`LeaseReply::View`].
    List,
}

/// An owner's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LeaseReply {
    /// The lease is granted, or was already.
    Granted(Grant),
    /// The lease lasts this much longer, from the request on.
    Renewed {
        /// Which.
        lease: LeaseId,
        /// How long.
        ttl: Duration,
    },
    /// The lease is over.
    Released {
        /// Which.
        lease: LeaseId,
    },
    /// The claimant holds these now.
    Claimed {
        /// The terms and the right to each lease of the instance here.
        leases: Vec<(LeaseSpec, Grant)>,
    },
    /// What the owner lends.
    View(LeaseView),
    /// No.
    Refused(LeaseError),
}

/// What an owner tells a holder unasked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LeaseNotice {
    /// A lease is over.
    Ended {
        /// Which.
        lease: LeaseId,
        /// The owner's life.
        incarnation: Incarnation,
        /// Why.
        reason: EndReason,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::types::{Beneficiary, Purpose, TokenSeed};

    #[test]
    fn the_encoding_of_requests_is_pinned() {
        let lease = LeaseId(1);
        let term = Term { counter: 300, node: NodeId([7; 32]) };
        let acquire = LeaseRequest::Acquire(LeaseSpec {
            id: lease,
            beneficiary: Beneficiary::Instance(InstanceId(2)),
            purpose: Purpose::Kv,
            bytes: 1000,
            term,
            members: vec![NodeId([1; 32])],
            stage: Some(3..9),
        });
        let bytes = postcard::to_stdvec(&acquire).expect("encodes");
        // Acquire, id; instance two; keys and values; bytes; term; one member; stage.
        let expected = ["00", "01", "0002", "01", "e807", "ac02", &"07".repeat(32), "01", &"01".repeat(32), "01", "03", "09"].concat();
        assert_eq!(hex::encode(&bytes), expected);
        assert_eq!(postcard::from_bytes::<LeaseRequest>(&bytes).expect("decodes"), acquire);
        let abandon = postcard::to_stdvec(&LeaseRequest::Abandon { lease }).expect("encodes");
        assert_eq!(hex::encode(abandon), "0301");
        assert_eq!(hex::encode(postcard::to_stdvec(&LeaseRequest::List).expect("encodes")), "05");
    }

    #[test]
    fn tokens_are_not_printed_and_differ_by_lease() {
        let seed = TokenSeed([9; 32]);
        let one = LeaseToken::derive(&seed, LeaseId(1));
        let two = LeaseToken::derive(&seed, LeaseId(2));
        assert_ne!(one, two);
        assert_eq!(one, LeaseToken::derive(&seed, LeaseId(1)));
        let request = LeaseRequest::Renew {
            lease: LeaseId(1),
            token: one,
            incarnation: Incarnation(1),
            term: LeaseSpec::user_term(NodeId([0; 32])),
            idle: Duration::ZERO,
        };
        assert!(format!("{request:?}").contains("LeaseToken(…)"));
        let clear = hex::encode(postcard::to_stdvec(&one).expect("encodes"));
        assert!(!format!("{request:?}").contains(&clear[..8]));
    }
}
