//! The owner's side as a pure machine: the only authority over a node's memory.
//!
//! A lease goes *granted → fenced → free*. Its memory is charged from the grant until whoever could still write to it
//! has given that up ([`Input::Fenced`] answers [`Output::Fence`]), and only then lent again. So the sum of all charges
//! never passes the offer, except after the offer itself was lowered; then nothing is granted until it fits again.

mod acquire;
mod ended;
mod offer;
mod terms;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::error::LeaseError;
use super::timing;
use super::types::{Beneficiary, EndReason, Grant, LeaseInfo, LeaseSpec, LeaseState, LeaseToken, LeaseUse, LeaseView, TokenSeed, Totals};
use super::wire::{LeaseNotice, LeaseReply, LeaseRequest};
use crate::env::Instant;
use crate::ids::{Incarnation, InstanceId, LeaseId, NodeId, Term};
use acquire::Waiting;
use ended::Ended;
use terms::Terms;

/// Names a request between the machine and its shell, so that the answer may come later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestKey(pub u64);

/// What an owner is made of.
#[derive(Debug, Clone)]
pub struct OwnerConfig {
    /// Whose memory.
    pub node: NodeId,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// How much is on offer, in bytes.
    pub offered_bytes: u64,
    /// How long a grant lasts: [`timing::TTL`] but in tests.
    pub ttl: Duration,
}

/// What happens to an owner.
#[derive(Debug, Clone)]
pub enum Input {
    /// A node asks for something.
    Request {
        /// Who; proved by the network.
        from: NodeId,
        /// Names the request in its answer.
        key: RequestKey,
        /// What.
        request: LeaseRequest,
        /// Fresh secret bytes for the tokens that the request creates.
        seed: TokenSeed,
    },
    /// Nobody can write to the memory of this lease any more.
    Fenced(LeaseId),
    /// The node offers more or less than before, in bytes.
    Offer(u64),
    /// The node wants one lease back.
    Revoke {
        /// Which.
        lease: LeaseId,
        /// Why, for its holder.
        why: String,
    },
    /// Time has passed; due at [`Owner::next_wake`].
    Tick,
}

/// What an owner wants done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Answer this request. Every key is answered exactly once.
    Reply {
        /// Which.
        key: RequestKey,
        /// The answer.
        reply: LeaseReply,
    },
    /// Make writes to the memory of this lease impossible, then say [`Input::Fenced`].
    Fence(LeaseId),
    /// Tell a holder.
    Notify {
        /// Whom.
        to: NodeId,
        /// What.
        notice: LeaseNotice,
    },
    /// An instance here is under a new term: its stages refuse frames of older ones from now on.
    TermRaised {
        /// Which.
        instance: InstanceId,
        /// The term.
        term: Term,
    },
    /// After a lower offer, this many bytes are lent beyond it; the leases that had to end are being fenced.
    OverCommitted {
        /// How many.
        bytes: u64,
    },
}

#[derive(Debug)]
enum State {
    Granted { deadline: Instant },
    Fenced { reason: EndReason },
}

#[derive(Debug)]
struct Record {
    spec: LeaseSpec,
    holder: NodeId,
    token: LeaseToken,
    /// Raised with every grant: who came later.
    order: u64,
    /// As the holder last reported it.
    idle: Duration,
    state: State,
}

impl Record {
    fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Granted { deadline } => Some(deadline),
            State::Fenced { .. } => None,
        }
    }

    fn instance(&self) -> Option<InstanceId> {
        match self.spec.beneficiary {
            Beneficiary::Instance(instance) => Some(instance),
            Beneficiary::User(_) => None,
        }
    }
}

/// The owner of a node's memory.
#[derive(Debug)]
pub struct Owner {
    config: OwnerConfig,
    leases: BTreeMap<LeaseId, Record>,
    waiting: VecDeque<Waiting>,
    ended: Ended,
    terms: Terms,
    /// Bytes of all records, granted and fenced.
    used: u64,
    /// The fenced part of `used`.
    fenced: u64,
    order: u64,
}

impl Owner {
    /// An owner that lends nothing yet.
    pub fn new(config: OwnerConfig) -> Self {
        Self {
            config,
            leases: BTreeMap::new(),
            waiting: VecDeque::new(),
            ended: Ended::default(),
            terms: Terms::default(),
            used: 0,
            fenced: 0,
            order: 0,
        }
    }

    /// Takes one input and says what it leads to.
    pub fn step(&mut self, now: Instant, input: Input) -> Vec<Output> {
        let mut out = Vec::new();
        match input {
            Input::Request { from, key, request, seed } => self.request(now, from, key, request, &seed, &mut out),
            Input::Fenced(lease) => self.fence_holds(lease),
            Input::Offer(bytes) => self.offer(now, bytes, &mut out),
            Input::Revoke { lease, why } => {
                let cut = (0..=timing::REASON_BYTES_MAX.min(why.len())).rev().find(|&at| why.is_char_boundary(at)).unwrap_or(0);
                self.end(lease, EndReason::Revoked(why[..cut].to_owned()), &mut out);
            }
            Input::Tick => {}
        }
        self.sweep(now, &mut out);
        self.serve_waiting(now, &mut out);
        debug_assert_eq!(self.used, self.leases.values().map(|r| r.spec.bytes).sum::<u64>());
        out
    }

    /// When [`Input::Tick`] is due next, if nothing else happens.
    pub fn next_wake(&self) -> Option<Instant> {
        let sweep = self.leases.values().filter_map(Record::deadline).min().map(|deadline| deadline + timing::SWEEP);
        let patience = self.waiting.iter().map(Waiting::until).min();
        sweep.into_iter().chain(patience).min()
    }

    /// The sums.
    pub fn totals(&self) -> Totals {
        Totals {
            offered: self.config.offered_bytes,
            used: self.used,
            fenced: self.fenced,
            leases: u32::try_from(self.leases.len()).unwrap_or(u32::MAX),
        }
    }

    /// Who has what, for people and peers.
    pub fn view(&self, now: Instant) -> LeaseView {
        let leases = self.leases.iter().map(|(&id, record)| info(now, id, record)).collect();
        LeaseView { owner: self.config.node, incarnation: self.config.incarnation, totals: self.totals(), leases }
    }

    /// Whether `from` may use the memory of a lease now.
    ///
    /// # Errors
    /// The reason why not.
    pub fn check(&self, now: Instant, from: NodeId, right: &LeaseUse) -> Result<LeaseInfo, LeaseError> {
        self.this_life(right.incarnation)?;
        let record = self.authorised(from, right.lease, right.token, right.term)?;
        match &record.state {
            State::Fenced { reason } => Err(LeaseError::Fenced { lease: right.lease, reason: reason.clone() }),
            State::Granted { deadline } if now >= *deadline => Err(LeaseError::Expired { lease: right.lease }),
            State::Granted { .. } => Ok(info(now, right.lease, record)),
        }
    }

    fn request(&mut self, now: Instant, from: NodeId, key: RequestKey, request: LeaseRequest, seed: &TokenSeed, out: &mut Vec<Output>) {
        let reply = match request {
            LeaseRequest::Acquire(spec) => match self.acquire(now, from, key, spec, seed, out) {
                Ok(Some(grant)) => Ok(LeaseReply::Granted(grant)),
                Ok(None) => return,
                Err(error) => Err(error),
            },
            LeaseRequest::Renew { lease, token, incarnation, term, idle } => self
                .this_life(incarnation)
                .and_then(|()| self.renew(now, from, lease, token, term, idle))
                .map(|ttl| LeaseReply::Renewed { lease, ttl }),
            LeaseRequest::Release { lease, token, incarnation, term } => self
                .this_life(incarnation)
                .and_then(|()| self.release(from, lease, token, term, out))
                .map(|()| LeaseReply::Released { lease }),
            LeaseRequest::Abandon { lease } => self.abandon(from, lease, out).map(|()| LeaseReply::Released { lease }),
            LeaseRequest::Claim { instance, term, members } => {
                self.claim(now, from, instance, term, members, seed, out).map(|leases| LeaseReply::Claimed { leases })
            }
            LeaseRequest::List => Ok(LeaseReply::View(self.view(now))),
        };
        out.push(Output::Reply { key, reply: reply.unwrap_or_else(LeaseReply::Refused) });
    }

    fn this_life(&self, yours: Incarnation) -> Result<(), LeaseError> {
        let current = self.config.incarnation;
        if yours == current { Ok(()) } else { Err(LeaseError::WrongIncarnation { yours, current }) }
    }

    /// The record of `lease`, if `from` shows the right to act on it.
    fn authorised(&self, from: NodeId, lease: LeaseId, token: LeaseToken, term: Term) -> Result<&Record, LeaseError> {
        let Some(record) = self.leases.get(&lease) else {
            let Some((reason, of)) = self.ended.get(lease) else { return Err(LeaseError::UnknownLease { lease }) };
            if let Some(instance) = of {
                self.terms.current(*instance, term)?;
            }
            return Err(LeaseError::Ended { lease, reason: reason.clone() });
        };
        // Before the token, which a claim has changed: a conductor that was superseded shall hear just that.
        if let Some(instance) = record.instance() {
            self.terms.current(instance, term)?;
        }
        if record.token != token {
            return Err(LeaseError::WrongToken { lease });
        }
        if record.holder != from {
            return Err(LeaseError::WrongHolder { lease });
        }
        if record.spec.term != term {
            return Err(LeaseError::NotClaimed { lease, counter: record.spec.term.counter });
        }
        Ok(record)
    }

    fn renew(
        &mut self,
        now: Instant,
        from: NodeId,
        lease: LeaseId,
        token: LeaseToken,
        term: Term,
        idle: Duration,
    ) -> Result<Duration, LeaseError> {
        if let State::Fenced { reason } = &self.authorised(from, lease, token, term)?.state {
            return Err(LeaseError::Fenced { lease, reason: reason.clone() });
        }
        let ttl = self.config.ttl;
        if let Some(record) = self.leases.get_mut(&lease) {
            record.state = State::Granted { deadline: now + ttl };
            record.idle = idle;
        }
        Ok(ttl)
    }

    fn release(&mut self, from: NodeId, lease: LeaseId, token: LeaseToken, term: Term, out: &mut Vec<Output>) -> Result<(), LeaseError> {
        match self.authorised(from, lease, token, term) {
            Ok(_) => {
                self.end(lease, EndReason::Released, out);
                Ok(())
            }
            Err(LeaseError::Ended { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn abandon(&mut self, from: NodeId, lease: LeaseId, out: &mut Vec<Output>) -> Result<(), LeaseError> {
        match self.leases.get(&lease) {
            Some(record) if record.holder != from => return Err(LeaseError::WrongHolder { lease }),
            Some(_) => self.end(lease, EndReason::Released, out),
            // The request may still be on its way: it must find the door closed.
            None => {
                self.forget_waiting(from, lease, out);
                self.ended.insert(lease, EndReason::Released, None);
            }
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn claim(
        &mut self,
        now: Instant,
        from: NodeId,
        instance: InstanceId,
        term: Term,
        members: Vec<NodeId>,
        seed: &TokenSeed,
        out: &mut Vec<Output>,
    ) -> Result<Vec<(LeaseSpec, Grant)>, LeaseError> {
        valid_members(&members)?;
        self.may_act(from, instance, term)?;
        self.bind(instance, term, out);
        let ttl = self.config.ttl;
        let mut claimed = Vec::new();
        for (&id, record) in &mut self.leases {
            if record.instance() != Some(instance) || record.deadline().is_none() {
                continue;
            }
            if record.spec.term != term {
                record.token = LeaseToken::derive(seed, id);
                record.spec.term = term;
                record.holder = from;
            }
            record.spec.members.clone_from(&members);
            record.state = State::Granted { deadline: now + ttl };
            claimed.push(id);
        }
        Ok(claimed.into_iter().filter_map(|id| self.leases.get(&id).map(|r| (r.spec.clone(), self.grant_of(id, r)))).collect())
    }

    fn grant_of(&self, lease: LeaseId, record: &Record) -> Grant {
        Grant {
            lease,
            owner: self.config.node,
            incarnation: self.config.incarnation,
            token: record.token,
            term: record.spec.term,
            bytes: record.spec.bytes,
            ttl: self.config.ttl,
        }
    }

    /// Whether `from` may act on an instance under a term.
    fn may_act(&self, from: NodeId, instance: InstanceId, term: Term) -> Result<(), LeaseError> {
        if term.node != from {
            return Err(LeaseError::ForeignTerm { caller: from, claimant: term.node });
        }
        let raises = self.terms.check(instance, term)?;
        let mut of_instance = self.leases.values().filter(|r| r.instance() == Some(instance)).peekable();
        // Without a lease there is nothing to take over, and no list to be on.
        if raises && of_instance.peek().is_some() && !of_instance.any(|r| r.holder == from || r.spec.members.contains(&from)) {
            return Err(LeaseError::NotAMember { instance, node: from });
        }
        Ok(())
    }

    fn bind(&mut self, instance: InstanceId, term: Term, out: &mut Vec<Output>) {
        if self.terms.bind(instance, term) {
            out.push(Output::TermRaised { instance, term });
        }
        let leases = &self.leases;
        let waiting = &self.waiting;
        self.terms.trim(|known| {
            let for_it = |b: &Beneficiary| *b == Beneficiary::Instance(known);
            known == instance || leases.values().any(|r| for_it(&r.spec.beneficiary)) || waiting.iter().any(|w| for_it(w.beneficiary()))
        });
    }

    /// Granted → fenced.
    fn end(&mut self, lease: LeaseId, reason: EndReason, out: &mut Vec<Output>) {
        let Some(record) = self.leases.get_mut(&lease) else { return };
        if matches!(record.state, State::Fenced { .. }) {
            return;
        }
        self.fenced += record.spec.bytes;
        record.state = State::Fenced { reason: reason.clone() };
        out.push(Output::Fence(lease));
        if reason != EndReason::Released {
            let notice = LeaseNotice::Ended { lease, incarnation: self.config.incarnation, reason };
            out.push(Output::Notify { to: record.holder, notice });
        }
    }

    /// Fenced → free.
    fn fence_holds(&mut self, lease: LeaseId) {
        // A fence that was never asked for frees nothing.
        if !matches!(self.leases.get(&lease), Some(Record { state: State::Fenced { .. }, .. })) {
            return;
        }
        if let Some(Record { spec, state: State::Fenced { reason }, .. }) = self.leases.remove(&lease) {
            self.used -= spec.bytes;
            self.fenced -= spec.bytes;
            let of = match spec.beneficiary {
                Beneficiary::Instance(instance) => Some(instance),
                Beneficiary::User(_) => None,
            };
            self.ended.insert(lease, reason, of);
        }
    }

    /// Ends what was not renewed long after its deadline.
    fn sweep(&mut self, now: Instant, out: &mut Vec<Output>) {
        let due = |record: &Record| record.deadline().is_some_and(|deadline| now >= deadline + timing::SWEEP);
        let leases: Vec<LeaseId> = self.leases.iter().filter(|(_, record)| due(record)).map(|(&id, _)| id).collect();
        for lease in leases {
            self.end(lease, EndReason::Expired, out);
        }
    }
}

fn info(now: Instant, id: LeaseId, record: &Record) -> LeaseInfo {
    let (state, remaining) = match &record.state {
        State::Granted { deadline } if now >= *deadline => (LeaseState::Reclaimable, Duration::ZERO),
        State::Granted { deadline } => (LeaseState::Granted, deadline.since(now)),
        State::Fenced { reason } => (LeaseState::Fenced(reason.clone()), Duration::ZERO),
    };
    LeaseInfo {
        id,
        holder: record.holder,
        beneficiary: record.spec.beneficiary.clone(),
        purpose: record.spec.purpose,
        bytes: record.spec.bytes,
        term: record.spec.term,
        stage: record.spec.stage.clone(),
        state,
        remaining,
    }
}

fn valid_members(members: &[NodeId]) -> Result<(), LeaseError> {
    if members.len() > timing::MEMBERS_MAX {
        return Err(LeaseError::TooMany { what: "members of an instance".to_owned(), limit: timing::MEMBERS_MAX as u64 });
    }
    Ok(())
}
