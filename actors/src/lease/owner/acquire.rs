//! Granting: what is asked for, whether it fits, and the queue of those that wait for a fence.

use crate::env::Instant;
use crate::ids::{LeaseId, NodeId};

use super::{Output, Owner, Record, RequestKey, State, valid_members};
use crate::lease::error::LeaseError;
use crate::lease::timing;
use crate::lease::types::{Beneficiary, EndReason, Grant, HolderUse, LeaseSpec, LeaseToken, TokenSeed};
use crate::lease::wire::LeaseReply;

/// A request that fits once enough fences hold.
#[derive(Debug)]
pub(super) struct Waiting {
    spec: LeaseSpec,
    from: NodeId,
    /// The same question may come more than once; all are answered together.
    keys: Vec<RequestKey>,
    seed: TokenSeed,
    until: Instant,
}

impl Waiting {
    pub(super) fn until(&self) -> Instant {
        self.until
    }

    pub(super) fn beneficiary(&self) -> &Beneficiary {
        &self.spec.beneficiary
    }
}

impl Owner {
    /// Grants, or queues (`None`: the answer comes later), or refuses.
    pub(super) fn acquire(
        &mut self,
        now: Instant,
        from: NodeId,
        key: RequestKey,
        spec: LeaseSpec,
        seed: &TokenSeed,
        out: &mut Vec<Output>,
    ) -> Result<Option<Grant>, LeaseError> {
        valid(from, &spec)?;
        if self.leases.contains_key(&spec.id) {
            return self.acquire_again(now, from, &spec).map(Some);
        }
        if let Some((reason, _)) = self.ended.get(spec.id) {
            return Err(LeaseError::Ended { lease: spec.id, reason: reason.clone() });
        }
        if let Some(waiting) = self.waiting.iter_mut().find(|w| w.spec.id == spec.id) {
            if waiting.from != from {
                return Err(LeaseError::WrongHolder { lease: spec.id });
            }
            if waiting.spec != spec {
                return Err(LeaseError::DifferentTerms { lease: spec.id });
            }
            if waiting.keys.len() >= timing::WAITING_KEYS_MAX {
                let limit = timing::WAITING_KEYS_MAX as u64;
                return Err(LeaseError::TooMany { what: "requests for the same lease".to_owned(), limit });
            }
            waiting.keys.push(key);
            return Ok(None);
        }
        if let Beneficiary::Instance(instance) = spec.beneficiary {
            self.may_act(from, instance, spec.term)?;
        }
        self.within_limits(from, &spec)?;

        let promised: u64 = self.waiting.iter().map(|w| w.spec.bytes).sum();
        let needed = promised.saturating_add(spec.bytes);
        if needed <= self.free() {
            self.bind_for(&spec, out);
            return Ok(Some(self.grant(now, from, spec, seed)));
        }
        // What is ended counts as soon as its fence holds, and what was not renewed in time can be ended for it.
        if needed > self.free_after_fences().saturating_add(self.reclaimable(now)) {
            return Err(self.out_of_memory(spec.bytes, promised));
        }
        if self.waiting.len() >= timing::WAITING_MAX {
            return Err(LeaseError::TooMany { what: "requests that wait for memory".to_owned(), limit: timing::WAITING_MAX as u64 });
        }
        self.bind_for(&spec, out);
        self.reclaim(now, needed, out);
        self.waiting.push_back(Waiting { spec, from, keys: vec![key], seed: *seed, until: now + timing::FENCE_PATIENCE });
        Ok(None)
    }

    /// The holder asks for what it has: the same grant, renewed.
    fn acquire_again(&mut self, now: Instant, from: NodeId, spec: &LeaseSpec) -> Result<Grant, LeaseError> {
        let lease = spec.id;
        let ttl = self.config.ttl;
        let Some(record) = self.leases.get_mut(&lease) else { return Err(LeaseError::UnknownLease { lease }) };
        // A holder that was superseded hears that; to anybody else the lease is just another node's.
        if let Some(instance) = record.instance()
            && record.spec.beneficiary == spec.beneficiary
        {
            self.terms.current(instance, spec.term)?;
        }
        if record.holder != from {
            return Err(LeaseError::WrongHolder { lease });
        }
        if record.spec != *spec {
            return Err(LeaseError::DifferentTerms { lease });
        }
        match &record.state {
            State::Fenced { reason } => return Err(LeaseError::Fenced { lease, reason: reason.clone() }),
            State::Granted { .. } => record.state = State::Granted { deadline: now + ttl },
        }
        match self.leases.get(&lease) {
            Some(record) => Ok(self.grant_of(lease, record)),
            None => Err(LeaseError::UnknownLease { lease }),
        }
    }

    fn bind_for(&mut self, spec: &LeaseSpec, out: &mut Vec<Output>) {
        if let Beneficiary::Instance(instance) = spec.beneficiary {
            self.bind(instance, spec.term, out);
        }
    }

    fn grant(&mut self, now: Instant, from: NodeId, spec: LeaseSpec, seed: &TokenSeed) -> Grant {
        let lease = spec.id;
        self.order += 1;
        self.used += spec.bytes;
        let record = Record {
            holder: from,
            token: LeaseToken::derive(seed, lease),
            order: self.order,
            idle: std::time::Duration::ZERO,
            state: State::Granted { deadline: now + self.config.ttl },
            spec,
        };
        let grant = self.grant_of(lease, &record);
        self.leases.insert(lease, record);
        grant
    }

    /// Grants to those that wait, in their order, as fences come to hold, and turns away those that waited too long.
    pub(super) fn serve_waiting(&mut self, now: Instant, out: &mut Vec<Output>) {
        while let Some(first) = self.waiting.front() {
            if first.spec.bytes > self.free() {
                break;
            }
            let Some(waiting) = self.waiting.pop_front() else { break };
            let still = match waiting.spec.beneficiary {
                Beneficiary::Instance(instance) => self.terms.current(instance, waiting.spec.term),
                Beneficiary::User(_) => Ok(()),
            };
            let reply = match still {
                Ok(()) => LeaseReply::Granted(self.grant(now, waiting.from, waiting.spec, &waiting.seed)),
                Err(error) => LeaseReply::Refused(error),
            };
            reply_all(waiting.keys, &reply, out);
        }
        let (late, waiting): (Vec<_>, Vec<_>) = self.waiting.drain(..).partition(|w| now >= w.until);
        self.waiting = waiting.into();
        for waiting in late {
            let reply = LeaseReply::Refused(self.out_of_memory(waiting.spec.bytes, 0));
            reply_all(waiting.keys, &reply, out);
        }
    }

    /// Drops a request that waits, because its holder no longer wants it.
    pub(super) fn forget_waiting(&mut self, from: NodeId, lease: LeaseId, out: &mut Vec<Output>) {
        let Some(at) = self.waiting.iter().position(|w| w.spec.id == lease && w.from == from) else { return };
        if let Some(waiting) = self.waiting.remove(at) {
            let reply = LeaseReply::Refused(LeaseError::Ended { lease, reason: EndReason::Released });
            reply_all(waiting.keys, &reply, out);
        }
    }

    pub(super) fn free(&self) -> u64 {
        self.config.offered_bytes.saturating_sub(self.used)
    }

    fn free_after_fences(&self) -> u64 {
        self.config.offered_bytes.saturating_sub(self.used - self.fenced)
    }

    fn reclaimable(&self, now: Instant) -> u64 {
        self.leases.values().filter(|r| r.deadline().is_some_and(|d| now >= d)).map(|r| r.spec.bytes).sum()
    }

    /// Ends expired leases, the longest expired first, until `needed` bytes fit once all fences hold.
    fn reclaim(&mut self, now: Instant, needed: u64, out: &mut Vec<Output>) {
        let mut expired: Vec<(Instant, LeaseId)> = self
            .leases
            .iter()
            .filter_map(|(&id, record)| record.deadline().filter(|&deadline| now >= deadline).map(|deadline| (deadline, id)))
            .collect();
        expired.sort_unstable();
        for (_, lease) in expired {
            if needed <= self.free_after_fences() {
                break;
            }
            self.end(lease, EndReason::Expired, out);
        }
    }

    fn within_limits(&self, from: NodeId, spec: &LeaseSpec) -> Result<(), LeaseError> {
        let too_many = |what: &str, limit: usize| Err(LeaseError::TooMany { what: what.to_owned(), limit: limit as u64 });
        if self.leases.len() + self.waiting.len() >= timing::LEASES_MAX {
            return too_many("leases on this node", timing::LEASES_MAX);
        }
        let held = self.leases.values().filter(|r| r.holder == from).count();
        let queued = self.waiting.iter().filter(|w| w.from == from).count();
        if held + queued >= timing::LEASES_PER_HOLDER_MAX {
            return too_many("leases of one holder on this node", timing::LEASES_PER_HOLDER_MAX);
        }
        if let Beneficiary::Instance(_) = spec.beneficiary {
            let held = self.leases.values().filter(|r| r.spec.beneficiary == spec.beneficiary).count();
            let queued = self.waiting.iter().filter(|w| w.spec.beneficiary == spec.beneficiary).count();
            if held + queued >= timing::LEASES_PER_INSTANCE_MAX {
                return too_many("leases of one instance on this node", timing::LEASES_PER_INSTANCE_MAX);
            }
        }
        Ok(())
    }

    fn out_of_memory(&self, asked: u64, promised: u64) -> LeaseError {
        let mut uses: Vec<HolderUse> = Vec::new();
        for record in self.leases.values() {
            match uses.iter_mut().find(|u| u.holder == record.holder && u.beneficiary == record.spec.beneficiary) {
                Some(entry) => entry.bytes += record.spec.bytes,
                None => {
                    let beneficiary = record.spec.beneficiary.clone();
                    uses.push(HolderUse { holder: record.holder, beneficiary, bytes: record.spec.bytes });
                }
            }
        }
        uses.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.beneficiary.cmp(&b.beneficiary)));
        uses.truncate(3);
        LeaseError::OutOfMemory {
            asked,
            free: self.free().saturating_sub(promised),
            offered: self.config.offered_bytes,
            fenced: self.fenced,
            largest: uses,
        }
    }
}

fn reply_all(keys: Vec<RequestKey>, reply: &LeaseReply, out: &mut Vec<Output>) {
    out.extend(keys.into_iter().map(|key| Output::Reply { key, reply: reply.clone() }));
}

fn valid(from: NodeId, spec: &LeaseSpec) -> Result<(), LeaseError> {
    if spec.bytes == 0 {
        return Err(LeaseError::Malformed(format!("lease {} asks for no bytes", spec.id)));
    }
    if spec.term.node != from {
        return Err(LeaseError::ForeignTerm { caller: from, claimant: spec.term.node });
    }
    if let Beneficiary::User(name) = &spec.beneficiary {
        if name.len() > timing::LABEL_BYTES_MAX {
            return Err(LeaseError::Malformed(format!(
                "a user's name of {} bytes is longer than the limit of {}",
                name.len(),
                timing::LABEL_BYTES_MAX
            )));
        }
        if name.chars().any(char::is_control) {
            return Err(LeaseError::Malformed("a user's name contains control characters".to_owned()));
        }
    }
    if let Some(stage) = &spec.stage
        && stage.start >= stage.end
    {
        return Err(LeaseError::Malformed(format!("a stage of layers {}..{} has no layers", stage.start, stage.end)));
    }
    valid_members(&spec.members)
}
