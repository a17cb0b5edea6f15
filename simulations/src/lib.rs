//! Shoal's actors in virtual time.
//!
//! The control plane of a node (network, services, discovery, membership, lease owner, lease keeper) runs here exactly
//! as it is in production, many nodes in one process. What is replaced are its effects, all of which pass through
//! [`shoal_actors::env`]: time is a number that jumps from one event to the next, chance comes from a seed, and the
//! control network is a model with latency, broken connections, cut links and crashes.
//!
//! ```text
//! root future: wait until no task can run ─▶ check invariants ─▶ take the next event (timer, packet, fault) ─▶ …
//!                                                                        │ wakes
//! nodes: ractor actors and their tasks on the same thread ◀──────────────┘
//! ```
//!
//! One event at a time means that a run is a function of its seed: [`World`] hashes every event, and two runs of one
//! seed have the same hash. A scenario ([`join_and_lend`]) is an ordinary future that starts and harms nodes; the
//! [`invariants`] are checked after each event.

pub mod broken;
pub mod chance;
pub mod clock;
pub mod cluster;
pub mod compute;
pub mod env;
pub mod invariants;
pub mod join_and_lend;
pub mod network;
pub mod node;
pub mod report;
mod run;
pub mod spawner;
mod trace;
pub mod world;

pub use run::{RunError, run};
pub use world::World;
