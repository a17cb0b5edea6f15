//! Memory that the owner's other programs need is given back before the machine swaps.
//!
//! What a node offers was chosen when it started. The machine's other programs come and go since, so a watch looks at the
//! machine's free memory every half second, and has the lease owner offer what is there: less as others take it, which costs
//! nobody anything while it is not lent, and more again when they have given it back for a while. Only if the machine is about
//! to run out is something taken back that is lent, in the order of [`crate::lease::owner`]: what nobody renewed, programs'
//! memory, then the models that have been idle longest. A model that loses a stage by that is made whole elsewhere.
//!
//! `machine` decides and has no effects; `watch` reads the gauge and tells the owner.

mod gauge;
pub(crate) mod machine;
mod watch;

pub use gauge::{MemoryGauge, Reading, SystemGauge};
pub(crate) use watch::{MemoryWatch, MemoryWatchActor, MemoryWatchArguments};
