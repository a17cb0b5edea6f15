//! The two services of the lease protocol: owners serve [`Leases`], holders serve [`LeaseKeeper`] for notices.

use super::holder::LeaseKeeper;
use super::leases::Leases;
use super::wire::{LeaseNotice, LeaseReply, LeaseRequest};
use crate::service::{Service, ServiceId};
use crate::service_numbers;

impl Service for Leases {
    const ID: ServiceId = service_numbers::LEASES;
    const NAME: &'static str = "leases";
    type Request = LeaseRequest;
    type Reply = LeaseReply;
}

impl Service for LeaseKeeper {
    const ID: ServiceId = service_numbers::LEASE_NOTICES;
    const NAME: &'static str = "lease notices";
    type Request = LeaseNotice;
    type Reply = ();
}
