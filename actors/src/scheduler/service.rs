//! How any node asks an instance for text.

use serde::{Deserialize, Serialize};

use crate::ids::{InstanceId, RequestId};
use crate::request::{Chunk, GenerateRequest};
use crate::service::{Service, ServiceId};
use crate::service_numbers as ids;

/// The instances that a node conducts, as its peers ask them for text.
#[derive(Debug)]
pub struct Generate;

impl Service for Generate {
    const ID: ServiceId = ids::GENERATE;
    const NAME: &'static str = "generate";
    type Request = GenerateCall;
    type Reply = Result<GenerateReply, GenerateRefusal>;
}

/// A call to the conductor of an instance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum GenerateCall {
    /// Take a request. Answered when it is accepted: when another member remembers it, if there is one.
    Submit(Box<GenerateRequest>),
    /// Tell what came after the first `after` tokens; wait for it if there is nothing yet.
    Read {
        /// The instance.
        instance: InstanceId,
        /// The request.
        request: RequestId,
        /// Tokens that the reader has.
        after: u32,
    },
    /// Nobody wants the answer any more.
    Cancel {
        /// The instance.
        instance: InstanceId,
        /// The request.
        request: RequestId,
    },
    /// Its reader goes and may come back: cancel it a little later if nobody has read by then.
    Leave {
        /// The instance.
        instance: InstanceId,
        /// The request.
        request: RequestId,
    },
    /// Say what a request asks, if the node conducts the instance that answers it or remembers it for another conductor.
    Find(RequestId),
}

impl GenerateCall {
    /// The instance that is asked, if it is a certain one.
    pub fn instance(&self) -> Option<InstanceId> {
        match self {
            Self::Submit(request) => Some(request.instance),
            Self::Read { instance, .. } | Self::Cancel { instance, .. } | Self::Leave { instance, .. } => Some(*instance),
            Self::Find(_) => None,
        }
    }
}

/// A conductor's answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum GenerateReply {
    /// The request is taken.
    Accepted {
        /// Tokens of its prompt.
        prompt_tokens: u32,
    },
    /// What came.
    Chunk(Chunk),
    /// Done.
    Done,
    /// The request, with its seed and the instance that answers it.
    Found {
        /// What it asks.
        request: Box<GenerateRequest>,
        /// Tokens of its prompt, if this node conducts its instance; none if it only remembers it.
        prompt_tokens: Option<u32>,
    },
}

/// Why a conductor did not do it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateRefusal {
    /// This node does not conduct the instance.
    #[error("node does not run instance {0:?} (any more)")]
    UnknownInstance(InstanceId),
    /// No such request, or its answer was dropped.
    #[error("request {0:?} is not known (any more)")]
    UnknownRequest(RequestId),
    /// The request itself is at fault.
    #[error("{0}")]
    Invalid(String),
    /// Too much is waiting.
    #[error("{0}")]
    Busy(String),
    /// The instance cannot take requests now.
    #[error("{0}")]
    Unavailable(String),
    /// Another request has this id.
    #[error("request {0} is known and asks something else; a new request needs an id of its own")]
    OtherRequest(RequestId),
}
