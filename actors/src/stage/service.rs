//! What a conductor asks of the nodes that hold its stages.

use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shoal_transport::frame::{Fence, TermTag};
use shoal_transport::provider::{Endpoint, Ticket};

use crate::ids::{InstanceId, NodeId, PlanEpoch, Term};
use crate::lease::LeaseUse;
use crate::service::{Service, ServiceId};
use crate::service_numbers as ids;

/// The stages of a node: load, link, unload.
#[derive(Debug)]
pub struct Stages;

impl StageKey {
    /// What frames of this arrangement carry.
    pub fn fence(&self) -> Fence {
        Fence { instance: self.instance.0, term: TermTag::new(self.term.counter, &self.term.node.0), epoch: self.epoch.0 }
    }
}

impl Service for Stages {
    const ID: ServiceId = ids::STAGES;
    const NAME: &'static str = "stages";
    type Request = StageRequest;
    type Reply = Result<StageReply, StageRefusal>;
}

/// Which stage of which arrangement of which instance, and on whose word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StageKey {
    /// The instance.
    pub instance: InstanceId,
    /// The conductor's term.
    pub term: Term,
    /// The arrangement.
    pub epoch: PlanEpoch,
    /// The stage's place in the pipeline, from zero.
    pub stage: u32,
}

/// A stage to load.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LoadStage {
    /// Which.
    pub key: StageKey,
    /// The node upstream that will link to it: the holder of the stage before, or the conductor.
    pub from: NodeId,
    /// Longest message that it sends, in bytes.
    pub slot_bytes: u32,
    /// The model's name, for people.
    pub model: String,
    /// SHA-256 of the model's file.
    pub sha256: String,
    /// Its layers.
    pub layers: Range<u32>,
    /// Leases that pay for the weights, the KV pages and the activations.
    pub leases: Vec<LeaseUse>,
    /// Memory for KV pages, in bytes: no more than the leases say.
    pub kv_bytes: u64,
    /// Most rows of a step.
    pub rows_max: u32,
    /// Most sequences at once.
    pub sequences_max: u32,
    /// Longest sequence, in tokens.
    pub context_tokens: u32,
    /// Everybody who may conduct the instance after the present conductor.
    pub members: Vec<NodeId>,
}

/// Where a stage's output goes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LinkStage {
    /// Which stage.
    pub key: StageKey,
    /// The node downstream: the next stage's, or the conductor's.
    pub to: NodeId,
    /// Where that node takes tensor links.
    pub endpoints: Vec<Endpoint>,
    /// What it expects to be shown.
    pub ticket: Ticket,
    /// Longest message on this hop, in bytes.
    pub slot_bytes: u32,
}

/// A request to a stage holder.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub enum StageRequest {
    /// Load a stage. Answered when it is loaded. A node that holds just this stage from an arrangement of the instance that came
    /// before, paid for by the same leases, keeps its weights, and gives it the new place: where it was it does no more steps.
    Load(Box<LoadStage>),
    /// Connect a loaded stage to the one after it. Answered when it is connected.
    Link(Box<LinkStage>),
    /// Stop a stage and give its memory back. Answered when it is gone.
    Unload(StageKey),
    /// The same with every stage that the node holds of an instance, under whatever terms up to this one.
    UnloadAll {
        /// The instance.
        instance: InstanceId,
        /// The conductor's term.
        term: Term,
    },
}

impl StageRequest {
    /// The term that it is made under.
    pub fn term(&self) -> Term {
        match self {
            Self::Load(load) => load.key.term,
            Self::Link(link) => link.key.term,
            Self::Unload(key) => key.term,
            Self::UnloadAll { term, .. } => *term,
        }
    }
}

/// What a loaded stage is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LoadedStage {
    /// Where the stage before, or the conductor, reaches it.
    pub endpoints: Vec<Endpoint>,
    /// What it has to show there.
    pub ticket: Ticket,
    /// Elements of an activation row.
    pub hidden: u32,
    /// Entries of the vocabulary.
    pub vocabulary: u32,
    /// KV pages in all.
    pub pages: u32,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Memory of the weights, in bytes.
    pub weight_bytes: u64,
    /// How long loading took.
    pub took: Duration,
}

/// An answer of a stage holder.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub enum StageReply {
    /// The stage is loaded and waits for its links.
    Loaded(Box<LoadedStage>),
    /// Done.
    Done,
}

/// Why a stage holder did not do it; for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{reason}")]
pub struct StageRefusal {
    /// What happened, to what, and what to do.
    pub reason: String,
}

/// What stage holders tell the conductor unasked.
#[derive(Debug)]
pub struct StageNotices;

impl Service for StageNotices {
    const ID: ServiceId = ids::STAGE_NOTICES;
    const NAME: &'static str = "stage notices";
    type Request = StageNotice;
    type Reply = ();
}

/// A stage does no more steps in its place, and why.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StageNotice {
    /// Which.
    pub key: StageKey,
    /// What happened, for people.
    pub reason: String,
}
