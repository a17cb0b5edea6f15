//! Memory of other nodes to read and write: the pool that a cluster is, for programs that embed a node.
//!
//! A lease of a user's program ([`Node::pool`](crate::node::Node::pool)) is memory of its owner. The first time that it is used, the
//! holder shows its right over the control network, gets a link's ticket and the lease's handle, and from then on puts and gets over
//! that link: through a window onto the owner's memory between processes of one machine, by a thread of the owner elsewhere
//! (`shoal_transport::remote`). A link that fails is made again under a higher generation, so that what is late on the old one
//! is refused.
//!
//! The owner of the memory opens nothing by itself: [`Regions`] are written by the lease actor's word alone. What a lease ends by
//! (given back, run out, taken back) fences its region first, and only then is the memory free.

mod client;
mod server;
mod service;
mod table;

pub use client::{RegionClient, RegionError};
pub use server::RegionServers;
pub use service::{RegionMemory, RegionOffer, RegionRefusal, RegionRequest};
pub use table::Regions;

/// What memory is lent to programs in whole multiples of, in bytes: the largest page that a common machine has.
pub const REGION_UNIT: u64 = 16 * 1024;
