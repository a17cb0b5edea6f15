//! Shoal's actors in virtual time.
//!
//! A node's actors (network, services, discovery, membership, lease owner, lease keeper, and if the scenario wants it
//! stage workers, conductors and schedulers) run here exactly as they do in production, many nodes in one process. What is
//! replaced are their effects, all of which pass through [`shoal_actors::env`] and [`shoal_actors::stage::pipes`]: time
//! is a number that jumps from one event to the next, chance comes from a seed, the control network is a model with
//! latency, broken connections, cut links and crashes, and stages are toys with a cost model.
//!
//! ```text
//! root future: wait until no task can run ─▶ check invariants ─▶ take the next event (timer, packet, fault) ─▶ …
//!                                                                        │ wakes
//! nodes: ractor actors and their tasks on the same thread ◀──────────────┘
//! ```
//!
//! One event at a time means that a run is a function of its seed: [`World`] hashes every event, and two runs of one
//! seed have the same hash. A scenario ([`scenario`]) is an ordinary future that starts and harms nodes; the
//! [`invariants`] are checked after each event.

pub mod broken;
pub mod chance;
pub mod clock;
pub mod cluster;
pub mod compute;
pub mod env;
pub mod invariants;
mod join_and_lend;
mod nemesis;
pub mod network;
pub mod node;
pub mod pipes;
mod place_and_answer;
pub mod report;
mod run;
pub mod scenario;
pub mod serving;
pub mod spawner;
mod trace;
pub mod world;

pub use run::{RunError, run};
pub use world::World;
