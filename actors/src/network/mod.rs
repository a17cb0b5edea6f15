//! The control network: who a node is connected to, and the frames that they exchange.
//!
//! There are two implementations of [`Network`](crate::env::Network). [`Libp2pNetwork`] is the real one: TCP, Noise
//! and yamux from libp2p, with mDNS to find peers. [`MemoryNetwork`] connects nodes of one process, without sockets,
//! in an order that depends on nothing but what the nodes do. [`NetworkActor`] owns either and hands its events on.
//!
//! ```text
//! sockets ─▶ swarm driver ─▶ connection task: hello, then frames ─▶ NetworkActor ─▶ Services ─▶ handlers
//!                                                                        └────▶ subscribers, in order
//! ```
//!
//! # Who may speak
//!
//! Noise proves who is at the other end. Before the first frame both ends show that they belong to one cluster (see
//! `hello`): the same wire version, and either no key on both sides or the same key, of which only tags over fresh
//! nonces are sent. A stranger gets one refusal that says what to do, at a limited rate, and nothing else. An open
//! cluster takes peers only from addresses of private networks (see `reach`).
//!
//! # One connection a peer
//!
//! Both ends may dial at once. The one with the lower id then decides which connection carries the frames (see
//! `peers`), so a peer is reported as connected once, and a peer that restarts replaces the connection of its
//! earlier life.

mod actor;
mod hello;
mod memory;
mod peers;
mod queue;
mod reach;
mod refusals;
mod swarm;
#[cfg(test)]
mod tests;

pub use actor::{NetworkActor, NetworkArguments, NetworkHandle, NetworkMessage, Subscriber};
pub use memory::{MemoryExchange, MemoryNetwork};
pub use reach::is_private;
pub use swarm::Libp2pNetwork;
