//! What the users of a cluster have seen of its models, for the invariants.

use std::collections::BTreeMap;
use std::ops::Range;

use shoal_actors::ids::{InstanceId, RequestId};

/// An instance that is to be placed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    /// Which.
    pub instance: InstanceId,
    /// Layers of its model.
    pub layers: u32,
    /// The layers of its stages, in their order.
    pub stages: Vec<Range<u32>>,
}

/// A request that somebody waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenRequest {
    /// The node that asked.
    pub number: u16,
    /// Which life of it.
    pub life: u64,
    /// Since when, in nanoseconds of the world.
    pub since: u64,
}

/// What somebody was told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heard {
    /// Which request.
    pub request: RequestId,
    /// What the model says when it is alone.
    pub expected: Vec<u32>,
    /// What came.
    pub tokens: Vec<u32>,
    /// Whether it was said to be all.
    pub whole: bool,
}

/// What users have seen.
#[derive(Debug, Clone, Default)]
pub struct Served {
    /// Instances ordered since the scene before.
    pub placed: Vec<Placed>,
    /// Requests that have not ended.
    pub open: BTreeMap<RequestId, OpenRequest>,
    /// Requests that have ended since the scene before.
    pub heard: Vec<Heard>,
}
