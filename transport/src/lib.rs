//! Tensor links between Shoal nodes.
//!
//! Control messages travel elsewhere; here go activations, keys and values, and the bytes of leased memory. From the
//! bottom up:
//!
//! * [`provider`]: ways to reach a peer (TCP, memory shared with a process of the same machine, or a peer in the same process). A provider hands out [`link::Link`]s,
//!   each proved by a one-time [`provider::Ticket`] that both ends were given over the control stream.
//! * [`link`]: one authenticated connection that carries whole messages both ways, knows when its peer is gone, and can
//!   be closed from any thread.
//! * [`frame`]: the header of every message, which names instance, term, plan epoch and sequence, and carries checks.
//! * [`channel`]: ordered tensor messages of one direction over a link, with slots, credits, acknowledgements and fences.
//! * [`path`]: a hop between two nodes that outlives its links: it measures all ways to the peer, keeps its channel on the
//!   best, and moves it when a link fails.
//! * [`collective`]: sums over the vectors of several ranks, with the same bits on each.
//! * [`access`]: which lease may touch which bytes of a slab, and the fence that must hold before they are lent again.
//! * [`remote`]: `put` and `get` into leased memory of a peer, checked by its access table.
//! * [`region`]: page-aligned memory, carved into slots.
//! * [`mod@bench`]: how fast a link is.
//!
//! Everything here blocks with a deadline and is meant for threads of its own; no call needs an async executor. Time
//! and threads come from the caller as [`Effects`].

// Tests wait for real machines and start what they need; the list in `clippy.toml` is for what runs in a node.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

pub mod access;
pub mod bench;
pub mod channel;
pub mod collective;
pub mod env;
pub mod frame;
pub mod link;
pub mod path;
pub mod provider;
pub mod region;
pub mod remote;

mod effects;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(test)]
mod testing;

pub use effects::Effects;
