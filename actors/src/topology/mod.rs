//! The links between nodes: how long a message takes, and how much goes through in a second.
//!
//! Each node measures its own row: the round trip to every connected peer by small calls, again and again, and the
//! bandwidth only when asked, because that costs. Rows of others are fetched from them. A planner reads the
//! [`LinkMatrix`] that comes of it.

mod actor;
mod matrix;
mod table;

pub use actor::{
    BandwidthError, Links, LinksReply, LinksRequest, Topology, TopologyActor, TopologyArguments, TopologyError, TopologyMessage,
};
pub use matrix::{LinkMatrix, LinkMeasure};
