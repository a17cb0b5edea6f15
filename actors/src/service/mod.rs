//! Services: what a node offers to its peers, and how peers ask for it.
//!
//! A [`Service`] has a stable number, a request and a reply. A node serves it with a function or with an actor through
//! its [`Services`]; anyone who knows the node asks through a [`Remote`]. Whether the other end is this node or one
//! across the network makes no difference to either, except that nothing is serialised inside a node.
//!
//! ```text
//! caller                              wire                               owner
//! Remote::call ──▶ Call {correlation, service, deadline} body ──▶ handler gets an Inbound
//!              ◀── Reply {correlation} body  or  Fault {correlation, fault} ◀── its Replier
//! Remote::cast ──▶ Cast {service} body ──▶ handler gets an Inbound without a Replier
//! ```
//!
//! Every call ends: with a reply, with a fault that says why, at its deadline, or at once when the peer's connection
//! is lost. A node works on a bounded number of calls of one peer at a time and turns the rest away.

mod error;
mod frame;
mod id;
mod inbound;
mod remote;
mod router;
#[cfg(test)]
mod tests;

pub use error::{CallError, ServeError};
pub use frame::{Fault, FrameError, Header};
pub use id::{Service, ServiceId};
pub use inbound::{Inbound, Replier};
pub use remote::Remote;
pub use router::{Services, ServicesLimits};
