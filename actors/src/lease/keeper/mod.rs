//! The holder's side as a pure machine: it acquires sets of leases, renews what it holds, and knows to the moment
//! until when each may be used.
//!
//! The right to a lease is counted from when the request that granted or renewed it was *sent*, and ends
//! [`USE_MARGIN`](timing::USE_MARGIN) early. The owner counts from when the request *arrived*. So the holder is never
//! the one that believes longer, whatever the offset of the two clocks and however slow the answer.

mod batch;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::error::{AcquireError, LeaseError, LostReason};
use super::size::size;
use super::timing;
use super::types::{Beneficiary, Grant, LeaseSpec};
use super::wire::{LeaseNotice, LeaseReply, LeaseRequest};
use crate::env::Instant;
use crate::ids::{LeaseId, NodeId};
use batch::Batch;

/// Names a set of leases that are acquired together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BatchKey(pub u64);

/// What a request was about, so that its answer finds its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CallKind {
    /// To get a lease.
    Acquire,
    /// To keep it.
    Renew,
    /// To give it back.
    Release,
}

/// Names a request between the machine and its shell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallKey {
    /// Which lease.
    pub lease: LeaseId,
    /// About what.
    pub kind: CallKind,
    /// When it was sent.
    pub sent: Instant,
}

/// Why a request got no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallFailure {
    /// For people.
    pub reason: String,
    /// Whether it may go better the next time.
    pub retry: bool,
}

/// What happens to a holder.
#[derive(Debug, Clone)]
pub enum Input {
    /// Get all of these or none.
    AcquireAll {
        /// Names the set in its answer.
        batch: BatchKey,
        /// From whom, what.
        wanted: Vec<(NodeId, LeaseSpec)>,
    },
    /// Whoever asked for the set no longer waits.
    Cancel(BatchKey),
    /// A request was answered, or was not.
    Answer {
        /// Which.
        call: CallKey,
        /// By whom.
        owner: NodeId,
        /// With what.
        result: Result<LeaseReply, CallFailure>,
    },
    /// An owner says something unasked.
    Notice {
        /// Who; proved by the network.
        from: NodeId,
        /// What.
        notice: LeaseNotice,
    },
    /// Hold this too: a claim has brought it.
    Adopt {
        /// Its terms.
        spec: LeaseSpec,
        /// The right.
        grant: Grant,
        /// When the claim was sent.
        sent: Instant,
    },
    /// Give these back.
    Release(Vec<LeaseId>),
    /// The memory of this beneficiary is in use.
    Touch(Beneficiary),
    /// The shell has lost the calls that were under way and those who waited for sets.
    Restarted,
    /// Give everything back and take nothing more.
    Stop,
    /// Time has passed; due at [`Keeper::next_wake`].
    Tick,
}

/// What a holder wants done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Ask an owner; the answer or its absence is an [`Input::Answer`].
    Send {
        /// Names the request.
        call: CallKey,
        /// Whom.
        to: NodeId,
        /// What.
        request: LeaseRequest,
    },
    /// The set is there, in the order in which it was asked for, or is not.
    Batch {
        /// Which.
        batch: BatchKey,
        /// The rights.
        result: Result<Vec<Grant>, AcquireError>,
    },
    /// A lease may be used until then, or not any more.
    Right {
        /// Which.
        lease: LeaseId,
        /// The moment on this node's clock from which it must not be used.
        until: Option<Instant>,
    },
    /// A lease is gone without having been given back.
    Lost(LostLease),
}

/// A lease that a holder has no longer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostLease {
    /// Which.
    pub lease: LeaseId,
    /// Whose memory it was.
    pub owner: NodeId,
    /// Its terms.
    pub spec: LeaseSpec,
    /// Why.
    pub reason: LostReason,
}

impl fmt::Display for LostLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LeaseSpec { bytes, purpose, .. } = self.spec;
        write!(f, "{} of node {:?} for {purpose} are lost: {}", size(bytes), self.owner, self.reason)
    }
}

/// A lease in hand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldLease {
    /// Its terms.
    pub spec: LeaseSpec,
    /// The right.
    pub grant: Grant,
    /// From when on it must not be used, on this node's clock.
    pub until: Instant,
}

#[derive(Debug)]
enum State {
    /// A request for it is on its way, or due at `next`.
    Asking {
        next: Option<Instant>,
        give_up: Instant,
    },
    Held(Holding),
    /// Being given back.
    Leaving {
        request: LeaseRequest,
        next: Option<Instant>,
        give_up: Instant,
    },
}

#[derive(Debug)]
struct Holding {
    grant: Grant,
    until: Instant,
    renew_at: Instant,
    /// When the renewal that is on its way was sent.
    asked: Option<Instant>,
    used_at: Instant,
}

#[derive(Debug)]
struct Entry {
    owner: NodeId,
    spec: LeaseSpec,
    batch: Option<BatchKey>,
    state: State,
}

/// The holder of leases at any number of owners.
#[derive(Debug, Default)]
pub struct Keeper {
    entries: BTreeMap<LeaseId, Entry>,
    batches: BTreeMap<BatchKey, Batch>,
    /// When leases that are not held any more were given up: what was granted before says nothing about them.
    parted: BTreeMap<LeaseId, Instant>,
    stopped: bool,
}

/// How long it is remembered that a lease was given up: longer than an answer to a claim can be on its way.
const PARTED_FOR: Duration = Duration::from_secs(2 * timing::TTL.as_secs());

impl Keeper {
    /// A holder of nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes one input and says what it leads to.
    pub fn step(&mut self, now: Instant, input: Input) -> Vec<Output> {
        let mut out = Vec::new();
        // First of all what has run out: an answer that comes too late must not find the lease still held.
        self.expire(now, &mut out);
        match input {
            Input::AcquireAll { batch, wanted } => self.acquire_all(now, batch, wanted, &mut out),
            Input::Cancel(batch) => self.fail(now, batch, AcquireError::Cancelled, &mut out),
            Input::Answer { call, owner, result } => self.answer(now, call, owner, result, &mut out),
            Input::Notice { from, notice } => self.notice(now, from, notice, &mut out),
            Input::Adopt { spec, grant, sent } => self.adopt(now, spec, grant, sent, &mut out),
            Input::Release(leases) => {
                for lease in leases {
                    self.release(now, lease, &mut out);
                }
            }
            Input::Touch(beneficiary) => {
                for entry in self.entries.values_mut().filter(|e| e.spec.beneficiary == beneficiary) {
                    if let State::Held(holding) = &mut entry.state {
                        holding.used_at = now;
                    }
                }
            }
            Input::Restarted => self.restart(now, &mut out),
            Input::Stop => self.stop(now, &mut out),
            Input::Tick => {}
        }
        self.send_due(now, &mut out);
        out
    }

    /// When [`Input::Tick`] is due next, if nothing else happens.
    pub fn next_wake(&self) -> Option<Instant> {
        self.entries
            .values()
            .filter_map(|entry| match &entry.state {
                State::Asking { next, .. } => *next,
                State::Held(Holding { until, renew_at, asked, .. }) => Some(if asked.is_none() { (*until).min(*renew_at) } else { *until }),
                State::Leaving { next, .. } => *next,
            })
            .min()
    }

    /// Whether a lease may be used now.
    pub fn may_use(&self, now: Instant, lease: LeaseId) -> bool {
        matches!(self.entries.get(&lease), Some(Entry { state: State::Held(holding), .. }) if now < holding.until)
    }

    /// What is held, by id.
    pub fn held(&self) -> impl Iterator<Item = HeldLease> + '_ {
        self.entries.values().filter_map(|entry| match &entry.state {
            State::Held(holding) => Some(HeldLease { spec: entry.spec.clone(), grant: holding.grant.clone(), until: holding.until }),
            _ => None,
        })
    }

    /// Whether a lease is held, asked for or on its way back.
    pub fn knows(&self, lease: LeaseId) -> bool {
        self.entries.contains_key(&lease)
    }

    /// Whether nothing is held, asked for or on its way back.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.batches.is_empty()
    }

    fn answer(&mut self, now: Instant, call: CallKey, owner: NodeId, result: Result<LeaseReply, CallFailure>, out: &mut Vec<Output>) {
        let Some(entry) = self.entries.get_mut(&call.lease) else { return };
        if entry.owner != owner {
            return;
        }
        match (call.kind, &mut entry.state) {
            (CallKind::Acquire, State::Asking { .. }) => self.acquire_answered(now, call, result, out),
            (CallKind::Renew, State::Held(holding)) => {
                if holding.asked == Some(call.sent) {
                    holding.asked = None;
                }
                match result {
                    Ok(LeaseReply::Renewed { ttl, .. }) => {
                        let ttl = ttl.min(timing::TTL_MAX);
                        let until = (call.sent + ttl) - timing::USE_MARGIN;
                        if until > holding.until {
                            holding.until = until;
                            out.push(Output::Right { lease: call.lease, until: Some(until) });
                        }
                        holding.renew_at = call.sent + ttl / timing::RENEW_DIVISOR;
                    }
                    Ok(LeaseReply::Refused(error)) => self.lose(now, call.lease, LostReason::Refused(error), out),
                    Ok(_) | Err(_) => holding.renew_at = now + timing::RETRY,
                }
            }
            (CallKind::Release, State::Leaving { next, give_up, .. }) => match result {
                // Whatever the owner says, it has heard that nobody holds the lease.
                Ok(_) => self.part(now, call.lease),
                Err(failure) => {
                    let again = now + timing::RETRY;
                    if failure.retry && again < *give_up {
                        *next = Some(again);
                    } else {
                        self.part(now, call.lease);
                    }
                }
            },
            // An answer to a question that no longer matters.
            _ => {}
        }
    }

    fn notice(&mut self, now: Instant, from: NodeId, notice: LeaseNotice, out: &mut Vec<Output>) {
        let LeaseNotice::Ended { lease, incarnation, reason } = notice;
        if let Some(Entry { owner, state: State::Held(holding), .. }) = self.entries.get(&lease)
            && *owner == from
            && holding.grant.incarnation == incarnation
        {
            self.lose(now, lease, LostReason::Ended(reason), out);
        }
    }

    fn adopt(&mut self, now: Instant, spec: LeaseSpec, grant: Grant, sent: Instant, out: &mut Vec<Output>) {
        let lease = spec.id;
        let owner = grant.owner;
        let held = holding(now, &grant, sent);
        // An answer that was on its way while the lease was given back comes too late: its owner has ended it, or is about to.
        let late = self.parted.get(&lease).is_some_and(|parted| sent <= *parted);
        let busy = |entry: &Entry| entry.batch.is_some() || matches!(entry.state, State::Leaving { .. });
        if late || self.entries.get(&lease).is_some_and(busy) {
            return;
        }
        self.entries.insert(lease, Entry { owner, spec, batch: None, state: State::Held(held) });
        if self.stopped {
            self.release(now, lease, out);
        } else {
            self.announce(lease, out);
        }
    }

    /// Nothing is left to do about a lease.
    fn part(&mut self, now: Instant, lease: LeaseId) {
        if self.entries.remove(&lease).is_some() {
            self.parted.retain(|_, parted| now.since(*parted) < PARTED_FOR);
            self.parted.insert(lease, now);
        }
    }

    fn announce(&self, lease: LeaseId, out: &mut Vec<Output>) {
        if let Some(Entry { state: State::Held(holding), .. }) = self.entries.get(&lease) {
            out.push(Output::Right { lease, until: Some(holding.until) });
        }
    }

    /// Gives up what was not renewed in time. The owner may still believe in it, so it is told.
    fn expire(&mut self, now: Instant, out: &mut Vec<Output>) {
        let due = |entry: &Entry| matches!(&entry.state, State::Held(holding) if now >= holding.until);
        let leases: Vec<LeaseId> = self.entries.iter().filter(|(_, entry)| due(entry)).map(|(&id, _)| id).collect();
        for lease in leases {
            self.lose(now, lease, LostReason::TimedOut, out);
        }
    }

    fn lose(&mut self, now: Instant, lease: LeaseId, reason: LostReason, out: &mut Vec<Output>) {
        let Some(entry) = self.entries.get(&lease) else { return };
        let (owner, spec, batch) = (entry.owner, entry.spec.clone(), entry.batch);
        if reason == LostReason::TimedOut {
            self.leave(now, lease, out);
        } else {
            self.part(now, lease);
            out.push(Output::Right { lease, until: None });
        }
        match batch {
            Some(batch) => self.fail(now, batch, AcquireError::Lost { node: owner, lease, why: reason }, out),
            None => out.push(Output::Lost(LostLease { lease, owner, spec, reason })),
        }
    }

    fn release(&mut self, now: Instant, lease: LeaseId, out: &mut Vec<Output>) {
        match self.entries.get(&lease) {
            Some(Entry { batch: Some(batch), .. }) => {
                let batch = *batch;
                self.fail(now, batch, AcquireError::Cancelled, out);
            }
            Some(_) => self.leave(now, lease, out),
            None => {}
        }
    }

    /// Starts to give a lease back, whether or not it is known to be granted.
    fn leave(&mut self, now: Instant, lease: LeaseId, out: &mut Vec<Output>) {
        let Some(entry) = self.entries.get_mut(&lease) else { return };
        let request = match &entry.state {
            State::Asking { .. } => LeaseRequest::Abandon { lease },
            State::Held(Holding { grant, .. }) => {
                out.push(Output::Right { lease, until: None });
                LeaseRequest::Release { lease, token: grant.token, incarnation: grant.incarnation, term: grant.term }
            }
            State::Leaving { .. } => return,
        };
        entry.batch = None;
        // Past its time to live the owner ends the lease without being told.
        entry.state = State::Leaving { request, next: Some(now), give_up: now + timing::TTL };
    }

    fn restart(&mut self, now: Instant, out: &mut Vec<Output>) {
        let batches: Vec<BatchKey> = self.batches.keys().copied().collect();
        for batch in batches {
            self.fail(now, batch, AcquireError::Cancelled, out);
        }
        for entry in self.entries.values_mut() {
            match &mut entry.state {
                State::Held(holding) => holding.asked = None,
                State::Asking { next, .. } | State::Leaving { next, .. } => *next = Some(now),
            }
        }
    }

    fn stop(&mut self, now: Instant, out: &mut Vec<Output>) {
        self.stopped = true;
        let batches: Vec<BatchKey> = self.batches.keys().copied().collect();
        for batch in batches {
            self.fail(now, batch, AcquireError::Stopped, out);
        }
        let leases: Vec<LeaseId> = self.entries.keys().copied().collect();
        for lease in leases {
            self.leave(now, lease, out);
        }
    }

    /// Sends what is due.
    fn send_due(&mut self, now: Instant, out: &mut Vec<Output>) {
        for (&lease, entry) in &mut self.entries {
            let (kind, request) = match &mut entry.state {
                State::Asking { next, .. } if next.is_some_and(|at| now >= at) => {
                    *next = None;
                    (CallKind::Acquire, LeaseRequest::Acquire(entry.spec.clone()))
                }
                State::Held(holding) if holding.asked.is_none() && now >= holding.renew_at => {
                    holding.asked = Some(now);
                    let Grant { token, incarnation, term, .. } = holding.grant;
                    let idle = now.since(holding.used_at);
                    (CallKind::Renew, LeaseRequest::Renew { lease, token, incarnation, term, idle })
                }
                State::Leaving { request, next, .. } if next.is_some_and(|at| now >= at) => {
                    *next = None;
                    (CallKind::Release, request.clone())
                }
                _ => continue,
            };
            out.push(Output::Send { call: CallKey { lease, kind, sent: now }, to: entry.owner, request });
        }
    }
}

/// The right that an answer to a request `sent` then gives.
fn holding(now: Instant, grant: &Grant, sent: Instant) -> Holding {
    let ttl: Duration = grant.ttl.min(timing::TTL_MAX);
    Holding {
        grant: grant.clone(),
        until: (sent + ttl) - timing::USE_MARGIN,
        renew_at: sent + ttl / timing::RENEW_DIVISOR,
        asked: None,
        used_at: now,
    }
}

/// Whether an owner granted what it was asked for.
fn fits(spec: &LeaseSpec, owner: NodeId, grant: &Grant) -> bool {
    grant.lease == spec.id && grant.owner == owner && grant.bytes == spec.bytes && grant.term == spec.term
}

fn refused(owner: NodeId, spec: &LeaseSpec, why: LeaseError) -> AcquireError {
    AcquireError::Refused { node: owner, lease: spec.id, bytes: spec.bytes, purpose: spec.purpose, why }
}

fn unreachable(owner: NodeId, spec: &LeaseSpec, why: String) -> AcquireError {
    AcquireError::Unreachable { node: owner, lease: spec.id, bytes: spec.bytes, purpose: spec.purpose, why }
}
