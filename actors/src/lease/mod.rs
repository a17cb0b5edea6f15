//! Leases: how nodes lend each other memory.
//!
//! A node's memory has one authority, its [`owner`]. It lends bytes for a purpose, under a term, until a deadline; who
//! holds a lease keeps it by renewing it ([`keeper`]). Both are pure machines. A placed model exists as long as it
//! holds a lease for each of its stages, so there is no other record that could disagree with the memory itself.
//!
//! - An owner never lends more than it offers, and lends memory again only after nobody can write to it any more.
//! - A holder is never the one that believes longer (see [`timing`] for all durations and what holds between them).
//! - A restarted owner knows none of its leases, and says so.
//! - Of an instance's terms the highest one counts, and each counter belongs to the first node that claims it.

mod error;
mod holder;
pub mod keeper;
mod leases;
pub mod owner;
mod service;
#[cfg(test)]
mod shells;
mod size;
pub mod timing;
mod types;
mod wire;
#[cfg(test)]
mod world;

pub use error::{AcquireError, LeaseError, LostReason};
pub use holder::{ClaimError, LeaseKeeper, LeaseKeeperActor, LeaseKeeperArguments, LeaseKeeperMessage, LostSubscriber};
pub use keeper::{HeldLease, LostLease};
pub use leases::{
    FenceHolds, FenceHook, Leases, LeasesActor, LeasesArguments, LeasesMessage, LeasesStartError, RenewHook, TermHook, TotalsSubscriber,
};
pub(crate) use size::size;
pub use types::{
    Beneficiary, EndReason, Grant, HolderUse, LeaseInfo, LeaseSpec, LeaseState, LeaseToken, LeaseUse, LeaseView, Purpose, TokenSeed, Totals,
};
pub use wire::{LeaseNotice, LeaseReply, LeaseRequest};
