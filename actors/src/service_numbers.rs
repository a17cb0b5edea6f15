//! The numbers of the node's own services, in one place so that no two are the same. A number is never used again for
//! something else.

use crate::service::ServiceId;

/// Probes, gossip and heartbeats of [`crate::membership`].
pub(crate) const MEMBERSHIP: ServiceId = ServiceId::system(1);
/// Round trips and rows of the link matrix, for [`crate::topology`].
pub(crate) const LINKS: ServiceId = ServiceId::system(2);
/// Memory of a node, for [`crate::lease`].
pub(crate) const LEASES: ServiceId = ServiceId::system(3);
/// What owners tell holders, for [`crate::lease`].
pub(crate) const LEASE_NOTICES: ServiceId = ServiceId::system(4);
/// Stages that a node holds, for [`crate::stage`].
pub(crate) const STAGES: ServiceId = ServiceId::system(5);
/// What stage holders tell conductors, for [`crate::stage`].
pub(crate) const STAGE_NOTICES: ServiceId = ServiceId::system(6);
/// Text of an instance, for [`crate::scheduler`].
pub(crate) const GENERATE: ServiceId = ServiceId::system(7);
/// What members remember of an instance, for [`crate::conductor::journal`].
pub(crate) const JOURNAL: ServiceId = ServiceId::system(8);
/// Placing of models, for [`crate::conductor`].
pub(crate) const PLACEMENT: ServiceId = ServiceId::system(9);
/// Measuring of tensor links, for [`crate::linkbench`].
pub(crate) const LINK_BENCH: ServiceId = ServiceId::system(10);
/// The way to memory that a node lends to programs, for [`crate::region`].
pub(crate) const REGION_MEMORY: ServiceId = ServiceId::system(12);
/// What a node that leaves asks of conductors and heirs, for [`crate::conductor`].
pub(crate) const LEAVINGS: ServiceId = ServiceId::system(13);
/// Hops that a node passes messages on for, for [`crate::stage`].
pub(crate) const DETOURS: ServiceId = ServiceId::system(11);
