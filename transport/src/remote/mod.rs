//! `put`, `get` and `notify`: leased memory of a peer, written and read from afar.
//!
//! The owner of the memory runs a [`RegionServer`] on a thread for each link; the holder of a lease uses a
//! [`RemoteRegion`]. Every request is checked against the owner's [`AccessTable`](crate::access::AccessTable) before a
//! byte moves, by the handle that it names and the peer that the link belongs to.
//!
//! Between processes of one machine the owner hands a holder a window onto the memory, and `put` and `get` are copies by the
//! holder. Over reliable verbs links a window is a queue pair, and they are WRITE and READ by the holder's adapter. Everywhere else, and for
//! what a window does not let through, the server's thread does them. What they mean, and what is denied, is the same. `notify` tells the
//! owner in the order of the holder's calls, so it always goes over the link.

mod client;
mod message;
mod native;
mod notices;
mod server;
#[cfg(test)]
mod tests;

#[cfg(any(test, fuzzing))]
pub use message::fuzz as fuzz_head;

pub use client::{RegionLease, RemoteRegion, TransferError, Way};
pub use notices::{Notice, NoticeSender, Notices, NoticesError, notices};
pub use server::RegionServer;

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
    #[error("the owner has too many operations under way, or notices that it has not looked at")]
    Busy,
    /// Nobody at the owner wants to be told.
    #[error("nobody at the owner of the memory listens to notices")]
    Deaf,
}
