//! The owner's account of memory that can be reached from afar: which lease has which memory.
//!
//! Each lease has a table of its own, so that what an earlier holder still has mapped is known by lease, and the lease stays charged
//! until that is gone, too.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use shoal_transport::Effects;
use shoal_transport::access::{AccessTable, Grant, Handle, RevokeError, Rights};
use shoal_transport::channel::ChannelCloser;
use shoal_transport::env::{Clock, Instant};
use shoal_transport::frame::TermTag;

use super::{REGION_UNIT, RegionRefusal};
use crate::ids::{LeaseId, NodeId};
use crate::lease::{FenceHolds, LeaseError, LeaseInfo, LeaseUse, Purpose};

/// How long a fence waits for what is under way before it ends the holder's link.
const QUIET: Duration = Duration::from_millis(200);
/// Pause between two looks whether what was under way has finished.
const LOOK_SOON: Duration = Duration::from_millis(5);
/// Pause between two looks whether an earlier holder has given its mapping up.
const LOOK: Duration = Duration::from_millis(100);

/// Says whether a node has a right at this moment.
type Check<'a> = &'a dyn Fn(NodeId, &LeaseUse) -> Result<LeaseInfo, LeaseError>;

/// The memory that this node lends to programs. Cheap to clone.
#[derive(Clone)]
pub struct Regions {
    effects: Effects,
    open: Arc<Mutex<BTreeMap<LeaseId, Region>>>,
}

/// The memory of a lease.
struct Region {
    table: AccessTable,
    handle: Handle,
    /// Ends the link that it is served on.
    link: Option<ChannelCloser>,
}

impl Regions {
    /// Nothing is lent yet.
    pub fn new(effects: Effects) -> Self {
        Self { effects, open: Arc::default() }
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<LeaseId, Region>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The memory of a lease, made if this is its first use. `check` is asked while no fence can be set.
    pub(super) fn reach(&self, from: NodeId, right: &LeaseUse, check: Check<'_>) -> Result<(AccessTable, Handle), RegionRefusal> {
        let mut open = self.open();
        let info = check(from, right)?;
        if info.purpose != Purpose::User {
            return Err(RegionRefusal::Purpose);
        }
        if !info.bytes.is_multiple_of(REGION_UNIT) {
            return Err(RegionRefusal::Unit);
        }
        if let Some(region) = open.get(&right.lease) {
            return Ok((region.table.clone(), region.handle));
        }
        let table = AccessTable::new(self.effects.clone(), info.bytes);
        let grant = Grant {
            holder: from.0,
            start: 0,
            bytes: info.bytes,
            rights: Rights::ALL,
            term: TermTag::default(),
            deadline: self.effects.clock.now() + info.remaining,
        };
        let handle = table.grant(grant).map_err(|error| RegionRefusal::Failed(error.to_string()))?;
        open.insert(right.lease, Region { table: table.clone(), handle, link: None });
        Ok((table, handle))
    }

    /// From now on the lease is served on the link that `closer` ends; the one before is ended. `false`: the lease has ended meanwhile.
    pub(super) fn serve(&self, lease: LeaseId, handle: Handle, closer: ChannelCloser) -> bool {
        let mut open = self.open();
        let Some(region) = open.get_mut(&lease).filter(|region| region.handle == handle) else { return false };
        let before = region.link.replace(closer);
        drop(open);
        if let Some(before) = before {
            before.close();
        }
        true
    }

    /// How many leases can be reached.
    pub(super) fn len(&self) -> usize {
        self.open().len()
    }

    /// The holder has renewed a lease.
    pub fn renew(&self, lease: LeaseId, deadline: Instant) {
        if let Some(region) = self.open().get(&lease) {
            // It is fenced only after it has left the map.
            let _ = region.table.renew(region.handle, deadline);
        }
    }

    /// Ends all access to a lease's memory, and calls `then` when nobody can touch it any more. Does not wait.
    pub fn fence(&self, lease: LeaseId, then: FenceHolds) {
        let Some(region) = self.open().remove(&lease) else { return then() };
        let effects = self.effects.clone();
        let end = async move {
            if region.end(&*effects.clock).await {
                then();
            }
        };
        self.effects.spawner.task("region fence", Box::pin(end));
    }
}

impl Region {
    /// Ends it, and waits until it is out of everybody's reach. `false`: nothing is known of it, which cannot be.
    async fn end(self, clock: &dyn Clock) -> bool {
        let Self { table, handle, link } = self;
        let quiet = clock.now() + QUIET;
        loop {
            match table.revoke(handle, clock.now()) {
                Ok(()) => break,
                Err(RevokeError::Unknown { .. }) => return false,
                Err(_) => {}
            }
            if let Some(link) = link.as_ref().filter(|_| clock.now() >= quiet) {
                link.close();
            }
            clock.sleep_until(clock.now() + LOOK_SOON).await;
        }
        if let Some(link) = link {
            link.close();
        }
        while table.retired_bytes() > 0 {
            clock.sleep_until(clock.now() + LOOK).await;
        }
        true
    }
}

impl fmt::Debug for Regions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Regions").field("open", &self.len()).finish_non_exhaustive()
    }
}
