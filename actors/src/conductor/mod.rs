//! Placed models: planning where their layers go, holding the leases, taking them down when they break.

mod actor;
mod assemble;
mod files;
pub mod instance;
pub mod journal;
mod placement;

pub use actor::{Conductor, ConductorArguments, ConductorMsg, ConductorState, StateSink};
pub use assemble::{Assembled, Ground, Order};
pub use files::LocalFiles;
pub use placement::{
    InstancesSink, Placement, PlacementActor, PlacementArguments, PlacementMsg, PlacementRefusal, PlacementReply, PlacementRequest,
    PlacementState, Prepared, Reuse, Schedulers,
};
