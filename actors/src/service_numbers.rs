//! The numbers of the node's own services, in one place so that no two are the same. A number is never given again.

use crate::service::ServiceId;

/// [`crate::membership`].
pub(crate) const MEMBERSHIP: ServiceId = ServiceId::system(1);
/// [`crate::topology`].
pub(crate) const LINKS: ServiceId = ServiceId::system(2);
