//! Placed models: planning where their layers go, holding the leases, taking them down when they break.

mod actor;
mod assemble;
mod elsewhere;
mod files;
pub mod instance;
pub mod journal;
mod leaving;
mod moves;
mod placement;
mod recover;
mod succession;

pub use actor::{Begin, Conductor, ConductorArguments, ConductorMsg, ConductorState, Running, StateSink, Whole};
pub use assemble::{Assembled, FindModel, Ground, Order};
pub use files::LocalFiles;
pub use leaving::{Drain, LeavingRefusal, LeavingRequest, Leavings, Undrained, serve_leaving};
pub(crate) use placement::links;
pub use placement::{
    InstancesSink, Placement, PlacementActor, PlacementArguments, PlacementMsg, PlacementRefusal, PlacementReply, PlacementRequest,
    PlacementState, Prepared, Reuse, Schedulers,
};
pub use succession::{Heir, succeed};
