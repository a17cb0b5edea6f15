//! The control network as a model: latency, links that are cut, connections that break, hosts that go dark.
//!
//! It replaces the network above its interface: a connection carries frames in order or ends, and a handshake takes
//! its round trips. What follows is what TCP does in a kernel:
//!
//! - A **cut** link tells nobody. Packets wait and are sent again when the link is **mended**; dials time out.
//! - A node whose **process** dies leaves a kernel behind that closes its connections; what was queued still arrives.
//! - A host that loses **power** says nothing. Its peers learn of it when they send to the host after it is back.
//! - Each end has its own belief about a connection. Whoever gives it up tells the other end by a packet, which a cut
//!   link holds up like any other.

mod exchange;
mod hosts;
mod link;

pub use exchange::{Crash, SimExchange, SimNetwork};
pub use link::LinkModel;
