//! What an owner remembers of leases that are over, so that a late message does not bring one back.

use std::collections::{BTreeMap, VecDeque};

use crate::ids::{InstanceId, LeaseId};
use crate::lease::timing;
use crate::lease::types::EndReason;

#[derive(Debug, Default)]
pub(super) struct Ended {
    /// Why each ended, and of which instance it was.
    reasons: BTreeMap<LeaseId, (EndReason, Option<InstanceId>)>,
    order: VecDeque<LeaseId>,
}

impl Ended {
    pub(super) fn get(&self, lease: LeaseId) -> Option<&(EndReason, Option<InstanceId>)> {
        self.reasons.get(&lease)
    }

    /// Remembers a lease; the one that ended first is forgotten when there are too many.
    pub(super) fn insert(&mut self, lease: LeaseId, reason: EndReason, of: Option<InstanceId>) {
        if self.reasons.insert(lease, (reason, of)).is_some() {
            return;
        }
        self.order.push_back(lease);
        if self.order.len() > timing::ENDED_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.reasons.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_the_past_is_bounded() {
        let mut ended = Ended::default();
        let many = timing::ENDED_MAX as u128 + 10;
        for id in 0..many {
            ended.insert(LeaseId(id), EndReason::Released, None);
            ended.insert(LeaseId(id), EndReason::Expired, None);
        }
        assert_eq!(ended.reasons.len(), timing::ENDED_MAX);
        assert_eq!(ended.order.len(), timing::ENDED_MAX);
        assert_eq!(ended.get(LeaseId(9)), None);
        assert_eq!(ended.get(LeaseId(10)), Some(&(EndReason::Expired, None)));
    }
}
