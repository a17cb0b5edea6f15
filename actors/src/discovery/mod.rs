//! Finding peers: who may be out there, and whom to dial.

pub(crate) mod address;
pub mod beacon;
pub(crate) mod book;
mod seen;
