//! The offer can change while the node runs. A lower one may leave more lent than offered, and then leases end until
//! it fits: first those nobody renewed, then users', then the instances that have been idle longest.

use std::time::Duration;

use super::{Output, Owner};
use crate::env::Instant;
use crate::ids::LeaseId;
use crate::lease::size::size;
use crate::lease::types::{Beneficiary, EndReason};

/// Leases that end together, with what decides who goes first.
struct Candidate {
    /// 0 expired, 1 users', 2 instances'.
    class: u8,
    /// How long it has not been used, as reported; the shortest of its leases.
    idle: Duration,
    /// When it was granted; later ones go first.
    order: u64,
    leases: Vec<LeaseId>,
    beneficiary: Beneficiary,
}

impl Owner {
    pub(super) fn offer(&mut self, now: Instant, bytes: u64, out: &mut Vec<Output>) {
        self.config.offered_bytes = bytes;
        let over = self.totals().over_committed();
        if over == 0 {
            return;
        }
        out.push(Output::OverCommitted { bytes: over });
        let mut candidates = self.candidates(now);
        candidates.sort_by(|a, b| {
            a.class
                .cmp(&b.class)
                .then_with(|| b.idle.cmp(&a.idle))
                .then_with(|| b.order.cmp(&a.order))
                .then_with(|| a.leases.cmp(&b.leases))
        });
        for candidate in candidates {
            if self.used - self.fenced <= bytes {
                break;
            }
            let reason = if candidate.class == 0 {
                EndReason::Expired
            } else {
                EndReason::Revoked(format!("the node now offers only {}", size(bytes)))
            };
            for lease in candidate.leases {
                self.end(lease, reason.clone(), out);
            }
        }
    }

    fn candidates(&self, now: Instant) -> Vec<Candidate> {
        let mut candidates: Vec<Candidate> = Vec::new();
        for (&id, record) in &self.leases {
            let Some(deadline) = record.deadline() else { continue };
            let class = match &record.spec.beneficiary {
                _ if now >= deadline => 0,
                Beneficiary::User(_) => 1,
                Beneficiary::Instance(_) => 2,
            };
            // A stage without its weights or its cache is of no use, so what an instance has here goes together.
            if class == 2
                && let Some(group) = candidates.iter_mut().find(|c| c.class == 2 && c.beneficiary == record.spec.beneficiary)
            {
                group.leases.push(id);
                group.idle = group.idle.min(record.idle);
                group.order = group.order.max(record.order);
                continue;
            }
            let beneficiary = record.spec.beneficiary.clone();
            candidates.push(Candidate { class, idle: record.idle, order: record.order, leases: vec![id], beneficiary });
        }
        candidates
    }
}
