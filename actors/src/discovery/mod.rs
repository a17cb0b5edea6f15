//! Finding peers: who may be out there, and whom to dial.
//!
//! Rumours come from mDNS (through the control network), from the node's own [beacon], from addresses that the user
//! gives, from the cards of members, and from a file of peers met in earlier runs. The peer book weighs them and says
//! whom to dial, where, and when to try again; the actor does it.
//!
//! ```text
//! mDNS ─────┐
//! beacon ───┤                ┌─▶ dial
//! --peer ───┼─▶ peer book ───┼─▶ refusals, for the user
//! cards ────┤                └─▶ file of peers met
//! file ─────┘
//! ```

mod actor;
pub(crate) mod address;
pub mod beacon;
mod book;
mod seen;

pub use actor::{Discovery, DiscoveryActor, DiscoveryArguments, DiscoveryError, DiscoveryMessage};
pub use book::Refusal;

/// The number of connections up to which a node connects to everybody it hears of. Beyond it, on demand.
pub const CONNECTIONS_TARGET: usize = 16;
