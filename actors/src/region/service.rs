//! How a holder asks for the way to its memory.

use serde::{Deserialize, Serialize};
use shoal_transport::access::Handle;
use shoal_transport::provider::{Endpoint, Ticket};

use crate::lease::{LeaseError, LeaseUse};
use crate::service::{Service, ServiceId};
use crate::service_numbers;

/// The service by which an owner lets holders in.
#[derive(Debug)]
pub enum RegionMemory {}

impl Service for RegionMemory {
    const ID: ServiceId = service_numbers::REGION_MEMORY;
    const NAME: &'static str = "leased memory";
    type Request = RegionRequest;
    type Reply = Result<RegionOffer, RegionRefusal>;
}

/// Shows the right to a lease, and asks for a link to its memory. The link that was there before ends.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RegionRequest {
    /// Which lease, and what proves the right to it.
    pub right: LeaseUse,
    /// Longest message on the link, in bytes.
    pub slot_bytes: u32,
}

/// The way to the memory.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RegionOffer {
    /// Where to dial, for a few seconds.
    pub endpoints: Vec<Endpoint>,
    /// What to show there.
    pub ticket: Ticket,
    /// The owner's name for the memory. It means nothing without that link.
    pub handle: Handle,
}

/// Why there is none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum RegionRefusal {
    /// The lease is not good, or not good any more.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// It is not for a program's data.
    #[error("this lease pays for what its owner loads itself; its memory cannot be reached from afar")]
    Purpose,
    /// It is not of whole units.
    #[error("memory that is reached from afar is leased in multiples of {} bytes", super::REGION_UNIT)]
    Unit,
    /// Messages of that length are not taken.
    #[error("messages of leased memory have {least} to {most} bytes")]
    Slot {
        /// At least.
        least: u32,
        /// At most.
        most: u32,
    },
    /// Too many are served already.
    #[error("this node serves {0} leases to others already")]
    Busy(usize),
    /// The owner's machine does not give the memory or the link.
    #[error("{0}")]
    Failed(String),
}
