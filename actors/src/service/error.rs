//! Why a call came to nothing, and why a service was not taken up.

use std::time::Duration;

use super::frame::{Fault, FrameError};
use super::id::ServiceId;
use crate::env::SendError;
use crate::ids::NodeId;

/// Why a call or a cast came to nothing.
///
/// After [`CallError::Deadline`] and [`CallError::PeerGone`] the peer may or may not have done what was asked. After
/// the others it has not, except [`CallError::Fault`], where the service itself says what happened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// There is no connection to the node.
    #[error("node {} is not connected", node.short())]
    NotConnected {
        /// Which node.
        node: NodeId,
    },
    /// The queue to the node is full, or the node works on as many calls of this one as it allows. Try again later.
    #[error("node {} is overloaded: try again later", node.short())]
    Overloaded {
        /// Which node.
        node: NodeId,
    },
    /// No answer came in time.
    #[error("{service} on node {} did not answer within {} ms", node.short(), waited.as_millis())]
    Deadline {
        /// Which node.
        node: NodeId,
        /// The service's name.
        service: &'static str,
        /// How long the caller was ready to wait.
        waited: Duration,
    },
    /// The node does not offer the service.
    #[error("node {} does not offer the service {service} (number {id})", node.short())]
    UnknownService {
        /// Which node.
        node: NodeId,
        /// The service's name.
        service: &'static str,
        /// The service's number.
        id: ServiceId,
    },
    /// One end could not read what the other sent, although both speak the same wire version.
    #[error("a message of {service} between this node and node {} cannot be read: {reason}", node.short())]
    Malformed {
        /// Which node.
        node: NodeId,
        /// The service's name.
        service: &'static str,
        /// What was wrong.
        reason: String,
    },
    /// The request does not fit into a frame.
    #[error("a request of {bytes} bytes to {service} is longer than the limit of {limit}")]
    TooLong {
        /// The service's name.
        service: &'static str,
        /// Length of the encoded request.
        bytes: usize,
        /// Longest frame.
        limit: usize,
    },
    /// The connection was lost while the call was under way.
    #[error("the connection to node {} was lost while {service} was asked", node.short())]
    PeerGone {
        /// Which node.
        node: NodeId,
        /// The service's name.
        service: &'static str,
    },
    /// The service failed, in its own words.
    #[error("{service} on node {} failed: {reason}", node.short())]
    Fault {
        /// Which node.
        node: NodeId,
        /// The service's name.
        service: &'static str,
        /// The service's words.
        reason: String,
    },
}

impl CallError {
    pub(super) fn from_send(error: &SendError, node: NodeId, service: &'static str) -> Self {
        match *error {
            SendError::NotConnected(_) => Self::NotConnected { node },
            SendError::Overloaded(_) => Self::Overloaded { node },
            SendError::TooLong { bytes, limit } => Self::TooLong { service, bytes, limit },
        }
    }

    pub(super) fn from_frame(error: FrameError, node: NodeId, service: &'static str) -> Self {
        match error {
            FrameError::TooLong { bytes, limit } => Self::TooLong { service, bytes, limit },
            FrameError::Malformed(reason) => Self::Malformed { node, service, reason },
        }
    }

    pub(super) fn from_fault(fault: Fault, node: NodeId, service: &'static str, id: ServiceId) -> Self {
        match fault {
            Fault::UnknownService => Self::UnknownService { node, service, id },
            Fault::Overloaded => Self::Overloaded { node },
            Fault::Malformed(reason) => Self::Malformed { node, service, reason },
            Fault::Failed(reason) => Self::Fault { node, service, reason },
        }
    }
}

/// Why a service was not taken up.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// Its number is in use on this node.
    #[error("cannot serve {service}: its number {id} is already served by {by}; a service needs a number of its own")]
    Taken {
        /// The name of the service that was refused.
        service: &'static str,
        /// The number.
        id: ServiceId,
        /// The name of the service that has it.
        by: &'static str,
    },
}
