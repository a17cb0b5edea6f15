//! The node's own multicast hello, beside mDNS: one packet a second on every interface.
//!
//! It finds what mDNS does not: peers on the second network card, on a cable that was plugged in a moment ago, on
//! IPv6 alone, or several nodes of one host. `payload` is the packet, `schedule` says when to send and whom to
//! answer, `socket` does it.

pub(crate) mod payload;
pub(crate) mod schedule;
mod socket;

pub use socket::SystemBeacon;
pub(crate) use socket::read_interfaces;
