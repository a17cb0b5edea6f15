//! When a conductor dies, another member of the instance takes it over.
//!
//! Members remember what the instance is and what was asked of it ([`super::journal`]). The one with the lowest id that has the
//! model's file claims first, the others a little later each, unless they hear of a claim before. A claimant collects what all
//! members remember under its new term, so that from then on none of them takes a word of the old conductor; claims the leases at
//! the owners, which do the same; and then makes the pipeline whole as a conductor does whose stage died. Weights stay where they
//! are.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures::future::join_all;

use super::assemble::{Ground, Order, Paid};
use super::journal::{self, InstanceRecord, Journal, JournalEntry, JournalReply, JournalRequest};
use crate::ids::{InstanceId, LeaseId, NodeId, Term};
use crate::lease::{ClaimError, Grant, LeaseError, LeaseSpec, LeaseUse, Purpose, timing};
use crate::membership::ClusterView;
use crate::service::CallError;

/// How long a member may take to tell what it remembers.
const COLLECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How often a claim that another claimant spoilt is tried again, each time under a higher term.
const TRIES: u32 = 4;

/// An instance that was taken over, to be made whole.
pub struct Heir {
    pub(super) order: Order,
    pub(super) paid: Vec<Paid>,
    pub(super) entries: Vec<JournalEntry>,
    /// Why somebody else conducts it no more.
    pub(super) reason: String,
}

impl std::fmt::Debug for Heir {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Heir").field("instance", &self.order.instance).field("term", &self.order.term).finish_non_exhaustive()
    }
}

impl Heir {
    /// The instance.
    pub fn instance(&self) -> InstanceId {
        self.order.instance
    }

    /// What was claimed.
    pub fn order(&self) -> &Order {
        &self.order
    }
}

/// This node's place among those who may take an instance over from `gone` now: the other members that are there and have the model.
/// `None` if it may not.
fn rank(view: &ClusterView, record: &InstanceRecord, gone: NodeId) -> Option<u32> {
    let has_model = |node: &NodeId| view.card(*node).is_some_and(|card| card.has_model(&record.sha256));
    let may = |node: &NodeId| *node != gone && view.is_present(*node) && !view.is_leaving(*node) && has_model(node);
    let heirs: BTreeSet<NodeId> = record.members.iter().copied().filter(may).collect();
    heirs.iter().position(|node| *node == view.me).and_then(|place| u32::try_from(place).ok())
}

/// Whether a conductor that was missed is back. One that was started anew is there, too, and knows nothing of what it conducted.
pub(super) fn is_back(view: &ClusterView, instance: InstanceId, term: Term) -> bool {
    view.card(term.node).is_some_and(|card| card.instances.iter().any(|known| known.instance == instance && known.term == term))
}

/// Takes over what `gone` conducted, where this node is the one to do it. `heir` is called with each instance.
pub fn succeed(ground: &Ground, gone: NodeId, heir: impl Fn(Heir) + Send + Sync + 'static) {
    let heir = Arc::new(heir);
    let records = ground.journal.lock().unwrap_or_else(PoisonError::into_inner).conducted_by(gone);
    for (instance, term, record) in records {
        let (env, ground, heir) = (ground.env.clone(), ground.clone(), Arc::clone(&heir));
        let task = async move {
            if let Some(taken) = take_over(&ground, instance, term, &record).await {
                heir(taken);
            }
        };
        env.spawner.task("succession", Box::pin(task));
    }
}

/// Waits for this node's turn and takes the instance over, unless somebody else does.
async fn take_over(ground: &Ground, instance: InstanceId, before: Term, record: &InstanceRecord) -> Option<Heir> {
    let mut known = before;
    for attempt in 0..TRIES {
        let rank = rank(&ground.membership.view(), record, before.node)?;
        ground.env.clock.sleep_until(ground.env.clock.now() + timing::CLAIM * (rank + attempt.min(1))).await;
        // Somebody else was faster, or the conductor is back.
        let current = ground.journal.lock().unwrap_or_else(PoisonError::into_inner).term(instance)?;
        if current != known || is_back(&ground.membership.view(), instance, before) {
            return None;
        }
        let term = Term { counter: known.counter + 1, node: ground.node };
        let reason = format!("node {}, which conducted it, is gone", before.node.short());
        match claim(ground, instance, (record, reason), term).await {
            Ok(heir) => return Some(heir),
            Err(reason) => tracing::info!(target: "shoal::conductor", ?instance, attempt, %reason, "an instance was not taken over"),
        }
        known = term;
    }
    None
}

/// Takes over at once what `from` conducts and cannot keep, because it leaves. The record is its newest, with everybody who remembers
/// requests of the instance.
///
/// # Errors
/// Why it is not taken over, in words.
pub(super) async fn take_over_from(ground: &Ground, from: NodeId, instance: InstanceId, record: &InstanceRecord) -> Result<Heir, String> {
    if record.term.node != from {
        return Err(format!("node {from:?} does not conduct under a term of node {:?}", record.term.node));
    }
    let describe = JournalRequest::Describe { instance, term: record.term, record: Box::new(record.clone()) };
    let known = ground.journal.lock().unwrap_or_else(PoisonError::into_inner).apply(ground.env.clock.now(), describe);
    known.map_err(|refusal| refusal.to_string())?;
    let term = Term { counter: record.term.counter + 1, node: ground.node };
    claim(ground, instance, (record, format!("node {}, which conducted it, leaves", from.short())), term).await
}

async fn claim(ground: &Ground, instance: InstanceId, (record, reason): (&InstanceRecord, String), term: Term) -> Result<Heir, String> {
    let (find, sha256) = (Arc::clone(&ground.models), record.sha256.clone());
    let model = ground.env.blocking("shoal-model", move || find(&sha256)).await?.ok_or("this node does not have the model")?;
    let view = ground.membership.view();
    let holders: Vec<NodeId> = record.plan.nodes().collect();
    let members = ground.members(holders.iter().copied());

    // What members remember; none of them hears the old conductor after this.
    let asked: BTreeSet<NodeId> = record.members.iter().copied().filter(|node| view.is_present(*node)).chain([ground.node]).collect();
    let remembered = join_all(asked.iter().map(|member| collect(ground, *member, instance, term))).await;
    let remembered: Vec<Vec<JournalEntry>> = remembered.into_iter().collect::<Result<_, _>>()?;

    // The leases at every owner that is there.
    let owners: BTreeSet<NodeId> = holders.iter().copied().filter(|node| view.is_present(*node)).collect();
    let claims = owners.iter().map(|owner| ground.keeper.claim(*owner, instance, term, members.clone()));
    let mut claimed: Vec<(NodeId, LeaseSpec, Grant)> = Vec::new();
    for (owner, result) in owners.iter().zip(join_all(claims).await) {
        match result {
            Ok(leases) => claimed.extend(leases.into_iter().map(|(spec, grant)| (*owner, spec, grant))),
            Err(ClaimError::Refused { why: why @ (LeaseError::StaleTerm { .. } | LeaseError::TermTaken { .. }), .. }) => {
                // Another claimant. What this one has got is no use to anybody but that one, who claims it again.
                let ids: Vec<LeaseId> = claimed.iter().map(|(_, _, grant)| grant.lease).collect();
                ground.keeper.release(&ids).await;
                return Err(why.to_string());
            }
            // A node that began anew has nothing to claim, and one that is gone has nothing either.
            Err(error) => tracing::debug!(target: "shoal::conductor", ?instance, %error, "leases were not claimed"),
        }
    }
    let paid = record.plan.stages.iter().map(|stage| {
        let of_purpose = |purpose: Purpose| {
            let mut leases = claimed.iter();
            let found = leases
                .find(|(owner, spec, _)| *owner == stage.node && spec.purpose == purpose && spec.stage.as_ref() == Some(&stage.layers));
            found.map(|(_, _, grant)| LeaseUse::from(grant))
        };
        stage.memory.by_purpose().map(|(purpose, _)| of_purpose(purpose)).collect::<Paid>()
    });
    let paid: Vec<Paid> = paid.collect();
    // What is left of arrangements that are over, or of a stage of which the rest is gone.
    let used: BTreeSet<LeaseId> = paid.iter().flatten().flatten().map(|lease| lease.lease).collect();
    let spare: Vec<LeaseId> = claimed.iter().map(|(_, _, grant)| grant.lease).filter(|lease| !used.contains(lease)).collect();
    if !spare.is_empty() {
        ground.keeper.release(&spare).await;
    }
    let order = Order {
        instance,
        term,
        epoch: record.epoch,
        model,
        card: record.card.clone(),
        goal: record.goal.clone(),
        plan: record.plan.clone(),
        members,
    };
    tracing::warn!(target: "shoal::conductor", ?instance, %reason, "this node takes an instance over");
    Ok(Heir { order, paid, entries: journal::merge(remembered).into_values().collect(), reason })
}

/// What a member remembers of an instance's requests, part by part; as much of it as comes, if it goes away in between.
///
/// # Errors
/// If the member knows of a higher term.
async fn collect(ground: &Ground, member: NodeId, instance: InstanceId, term: Term) -> Result<Vec<JournalEntry>, String> {
    let remote = ground.services.remote::<Journal>(member);
    let mut all = Vec::new();
    loop {
        let after = all.last().map(|entry: &JournalEntry| entry.request.id);
        let call = remote.call(JournalRequest::Collect { instance, term, after }, COLLECT_TIMEOUT);
        match ground.membership.while_present(member, call).await {
            Some(Ok(Ok(JournalReply::Entries { entries, more }))) => {
                let more = more && !entries.is_empty();
                all.extend(entries);
                if !more {
                    return Ok(all);
                }
            }
            Some(Ok(Err(refusal))) => return Err(refusal.to_string()),
            // It is gone, or as good as gone.
            answer => {
                let error = answer.and_then(Result::err).unwrap_or(CallError::NotConnected { node: member });
                tracing::warn!(target: "shoal::conductor", ?instance, ?member, %error, "a member does not tell what it remembers");
                return Ok(all);
            }
        }
    }
}

impl Order {
    /// What its members remember of it.
    pub(super) fn record(&self) -> InstanceRecord {
        InstanceRecord {
            term: self.term,
            epoch: self.epoch,
            model: self.model.name.clone(),
            sha256: self.model.sha256.clone(),
            card: self.card.clone(),
            goal: self.goal.clone(),
            plan: self.plan.clone(),
            members: self.members.clone(),
        }
    }
}

/// Has the other members remember what an instance is. Resolves when one does, or none can.
pub(super) async fn describe(ground: &Ground, order: &Order) {
    let record = order.record();
    let request = JournalRequest::Describe { instance: order.instance, term: order.term, record: Box::new(record) };
    let mut calls: Vec<_> = order
        .members
        .iter()
        .filter(|member| **member != ground.node)
        .map(|member| {
            let (remote, request) = (ground.services.remote::<Journal>(*member), request.clone());
            let (membership, member) = (ground.membership.clone(), *member);
            Box::pin(async move {
                let call = remote.call(request, COLLECT_TIMEOUT);
                matches!(membership.while_present(member, call).await, Some(Ok(Ok(_))))
            })
        })
        .collect();
    let mut told = calls.is_empty();
    while !told && !calls.is_empty() {
        let (result, _, rest) = futures::future::select_all(calls).await;
        (told, calls) = (result, rest);
    }
    if !told {
        tracing::warn!(target: "shoal::conductor", instance = ?order.instance, "no other node could remember what the instance is");
    }
    // The others are told as well, without waiting for them.
    ground.env.spawner.task("describe", Box::pin(async move { drop(join_all(calls).await) }));
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::conductor::instance::{InstanceState, InstanceSummary};
    use crate::membership::{MemberState, MemberView, test_card};

    #[test]
    fn a_conductor_that_was_started_anew_is_not_back() {
        let (me, conductor, instance) = (NodeId([1; 32]), NodeId([2; 32]), InstanceId(7));
        let term = |counter| Term { counter, node: conductor };
        let summary = |counter| InstanceSummary {
            instance,
            model: "m".to_owned(),
            sha256: "aa".to_owned(),
            term: term(counter),
            state: InstanceState::Ready,
            context_tokens: 128,
            stages: Vec::new(),
            decode_tok_s: 1.0,
            prefill_tok_s: 1.0,
            forked: false,
        };
        let view = |state, instances| {
            let card = Arc::new(crate::card::NodeCard { instances, ..test_card(conductor, 1) });
            let member = MemberView { card, state, since: crate::env::Instant::ZERO, connected: true, rtt: None };
            ClusterView { me, members: BTreeMap::from([(conductor, member)]) }
        };
        let back = |state, instances| is_back(&view(state, instances), instance, term(3));
        assert!(back(MemberState::Alive, vec![summary(3)]), "it was only cut off");
        assert!(!back(MemberState::Alive, Vec::new()), "a new life knows nothing of the old one");
        assert!(!back(MemberState::Alive, vec![summary(2)]));
        assert!(!back(MemberState::Dead, vec![summary(3)]));
    }
}
