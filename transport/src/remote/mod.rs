//! `put` and `get`: leased memory of a peer, written and read from afar.
//!
//! The owner of a [`Slab`] runs a [`RegionServer`] on a thread for each link; the holder of a lease uses a
//! [`RemoteRegion`]. Every request is checked against the owner's [`AccessTable`](crate::access::AccessTable) before a
//! byte moves, by the handle that it names and the peer that the link belongs to. This is how providers without
//! one-sided hardware do it; the meaning is the same on all.

mod client;
mod message;
mod server;
mod slab;
#[cfg(test)]
mod tests;

#[cfg(any(test, fuzzing))]
pub use message::fuzz as fuzz_head;

pub use client::{RegionLease, RemoteRegion, TransferError};
pub use server::RegionServer;
pub use slab::Slab;

/// Why the owner of the memory did not do what was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Denial {
    /// There is no such lease, or it is another node's.
    #[error("this node holds no such lease; acquire one")]
    NoLease,
    /// It was revoked.
    #[error("the lease was revoked by its owner")]
    Revoked,
    /// It ran out.
    #[error("the lease has run out; renew leases in time")]
    Expired,
    /// Another claimant holds the lease under a higher term.
    #[error("the lease is held under a higher term")]
    Superseded,
    /// It allows reading or writing only.
    #[error("the lease does not allow this operation")]
    Rights,
    /// The range is not all inside.
    #[error("the range reaches outside the lease")]
    Bounds,
    /// A later generation of writes has begun.
    #[error("a later generation of writes has begun")]
    Generation,
    /// The owner has too many operations under way.
    #[error("the owner has too many operations under way")]
    Busy,
}
