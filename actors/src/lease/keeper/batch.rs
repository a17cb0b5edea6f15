//! Acquiring a set: one owner after the other in the order of their ids, all or nothing.
//!
//! The order is the same for everybody, so of two nodes that place at once one is refused early, and neither waits for
//! what the other holds.

use super::{BatchKey, CallFailure, CallKey, Entry, Keeper, Output, State, fits, holding, refused, unreachable};
use crate::env::Instant;
use crate::ids::{LeaseId, NodeId};
use crate::lease::error::AcquireError;
use crate::lease::timing;
use crate::lease::types::LeaseSpec;
use crate::lease::wire::LeaseReply;

#[derive(Debug)]
pub(super) struct Batch {
    /// As asked for.
    asked: Vec<LeaseId>,
    /// What is still to be acquired, the next one last.
    rest: Vec<(NodeId, LeaseSpec)>,
    /// Acquired or being acquired.
    begun: Vec<LeaseId>,
}

impl Keeper {
    pub(super) fn acquire_all(&mut self, now: Instant, batch: BatchKey, wanted: Vec<(NodeId, LeaseSpec)>, out: &mut Vec<Output>) {
        if let Err(error) = self.acceptable(batch, &wanted) {
            out.push(Output::Batch { batch, result: Err(error) });
            return;
        }
        let asked = wanted.iter().map(|(_, spec)| spec.id).collect();
        let mut rest = wanted;
        // The sort is stable: leases of one owner keep the order in which they were asked for.
        rest.sort_by_key(|(owner, _)| *owner);
        rest.reverse();
        self.batches.insert(batch, Batch { asked, rest, begun: Vec::new() });
        self.advance(now, batch, out);
    }

    fn acceptable(&self, batch: BatchKey, wanted: &[(NodeId, LeaseSpec)]) -> Result<(), AcquireError> {
        if self.stopped {
            return Err(AcquireError::Stopped);
        }
        if wanted.len() > timing::BATCH_MAX {
            return Err(AcquireError::Malformed(format!("{} leases at once; the limit is {}", wanted.len(), timing::BATCH_MAX)));
        }
        if self.batches.contains_key(&batch) {
            return Err(AcquireError::Malformed("its key is in use".to_owned()));
        }
        let mut ids: Vec<LeaseId> = wanted.iter().map(|(_, spec)| spec.id).collect();
        ids.sort_unstable();
        if let Some(twice) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(AcquireError::Malformed(format!("lease {} is in it twice", twice[0])));
        }
        let pending = self.batches.values().flat_map(|b| &b.rest).map(|(_, spec)| spec.id);
        let known = |id: &LeaseId| self.entries.contains_key(id) || pending.clone().any(|p| p == *id);
        if let Some(id) = ids.iter().find(|id| known(id)) {
            return Err(AcquireError::Malformed(format!("lease {id} is already held or asked for")));
        }
        Ok(())
    }

    /// Goes on to the next lease of a set, or reports that it is complete.
    fn advance(&mut self, now: Instant, key: BatchKey, out: &mut Vec<Output>) {
        let Some(batch) = self.batches.get_mut(&key) else { return };
        if let Some((owner, spec)) = batch.rest.pop() {
            batch.begun.push(spec.id);
            let state = State::Asking { next: Some(now), give_up: now + timing::ACQUIRE_PATIENCE };
            self.entries.insert(spec.id, Entry { owner, spec, batch: Some(key), state });
            return;
        }
        let Some(batch) = self.batches.remove(&key) else { return };
        let mut grants = Vec::with_capacity(batch.asked.len());
        for lease in &batch.asked {
            if let Some(entry) = self.entries.get_mut(lease)
                && let State::Held(held) = &entry.state
            {
                entry.batch = None;
                grants.push(held.grant.clone());
            }
        }
        out.push(Output::Batch { batch: key, result: Ok(grants) });
    }

    pub(super) fn acquire_answered(&mut self, now: Instant, call: CallKey, result: Result<LeaseReply, CallFailure>, out: &mut Vec<Output>) {
        let Some(entry) = self.entries.get_mut(&call.lease) else { return };
        let Some(batch) = entry.batch else { return };
        let failure = match result {
            Ok(LeaseReply::Granted(grant)) if fits(&entry.spec, entry.owner, &grant) => {
                let held = holding(now, &grant, call.sent);
                if held.until > now {
                    entry.state = State::Held(held);
                    self.announce(call.lease, out);
                    self.advance(now, batch, out);
                    return;
                }
                // Too old to be of use; asking again renews it.
                CallFailure { reason: "the grant came too late to be of use".to_owned(), retry: true }
            }
            Ok(LeaseReply::Refused(error)) => {
                let error = refused(entry.owner, &entry.spec, error);
                // There is nothing to give back of this one.
                self.entries.remove(&call.lease);
                self.fail(now, batch, error, out);
                return;
            }
            Ok(_) => CallFailure { reason: "the answer does not fit the question".to_owned(), retry: false },
            Err(failure) => failure,
        };
        let State::Asking { next, give_up } = &mut entry.state else { return };
        let again = now + timing::RETRY;
        if failure.retry && again < *give_up {
            // Answers to earlier requests may still come; only one repetition is planned at a time.
            if next.is_none() {
                *next = Some(again);
            }
            return;
        }
        let error = unreachable(entry.owner, &entry.spec, failure.reason);
        self.fail(now, batch, error, out);
    }

    /// Gives a set up and everything back that belongs to it.
    pub(super) fn fail(&mut self, now: Instant, key: BatchKey, error: AcquireError, out: &mut Vec<Output>) {
        let Some(batch) = self.batches.remove(&key) else { return };
        for lease in batch.begun {
            self.leave(now, lease, out);
        }
        out.push(Output::Batch { batch: key, result: Err(error) });
    }
}
