//! What members remember of an instance's requests, so that whoever conducts it next can go on.
//!
//! The conductor stores a request with the members before the client sees its first byte, and appends the tokens as
//! they are made. Entries of one request can be of different length at different members; they never contradict each
//! other, because every token follows from the request alone. So the longest one wins.
//!
//! Answers that have ended are kept for a while, so that a client whose node died with the last words on its lips can hear them
//! from another one.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::card::ModelCard;
use crate::env::Instant;
use crate::ids::{InstanceId, NodeId, PlanEpoch, RequestId, Term};
use crate::plan::{Goal, Plan};
use crate::request::{Finish, GenerateRequest, Timing};
use crate::service::{Service, ServiceId};
use crate::service_numbers as ids;

/// The journal that a member keeps.
#[derive(Debug)]
pub struct Journal;

impl Service for Journal {
    const ID: ServiceId = ids::JOURNAL;
    const NAME: &'static str = "journal";
    type Request = JournalRequest;
    type Reply = Result<JournalReply, JournalRefusal>;
}

/// A request as it is journaled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JournalEntry {
    /// The request with its seed.
    pub request: GenerateRequest,
    /// The prompt as tokens.
    pub prompt: Vec<u32>,
    /// The tokens emitted so far.
    pub emitted: Vec<u32>,
    /// How it ended, if it has, and those are all tokens.
    pub ended: Option<Ended>,
}

/// How an answer ended as it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Why.
    pub reason: Finish,
    /// How long it took.
    pub timing: Timing,
    /// Tokens of the whole answer.
    pub tokens: u32,
}

/// How long a member keeps an answer that has ended.
pub const KEEP: Duration = Duration::from_secs(120);
/// How many a member keeps of one instance; the oldest go first.
pub const ENDED_MAX: usize = 256;
/// Size of a part of what a member tells of an instance's requests, in bytes; one request more than that is told as a whole.
const PART_BYTES: usize = 512 * 1024;

/// What a conductor asks of a member's journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum JournalRequest {
    /// Remember a request.
    Store {
        /// The instance.
        instance: InstanceId,
        /// The conductor's term.
        term: Term,
        /// The request.
        entry: Box<JournalEntry>,
    },
    /// Remember tokens of a request.
    Append {
        /// The instance.
        instance: InstanceId,
        /// The conductor's term.
        term: Term,
        /// The request.
        request: RequestId,
        /// Index of the first token.
        from: u32,
        /// The tokens.
        tokens: Vec<u32>,
    },
    /// A request has ended. Its answer is kept for a while if it ended well, or else forgotten.
    Finish {
        /// The instance.
        instance: InstanceId,
        /// The conductor's term.
        term: Term,
        /// The request.
        request: RequestId,
        /// How it ended, if it ended well.
        ended: Option<Ended>,
    },
    /// Tell what is known of an instance's requests, in order of their ids.
    Collect {
        /// The instance.
        instance: InstanceId,
        /// The claimant's term.
        term: Term,
        /// Only of those after this one: the last one of the part before.
        after: Option<RequestId>,
    },
    /// Forget an instance.
    Forget {
        /// The instance.
        instance: InstanceId,
        /// The conductor's term.
        term: Term,
    },
    /// Remember what the instance is: with this a member can take it over.
    Describe {
        /// The instance.
        instance: InstanceId,
        /// The conductor's term.
        term: Term,
        /// What it is.
        record: Box<InstanceRecord>,
    },
}

/// What an instance is, for whoever conducts it next.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InstanceRecord {
    /// The term of who describes it.
    pub term: Term,
    /// The newest arrangement.
    pub epoch: PlanEpoch,
    /// The model's name.
    pub model: String,
    /// SHA-256 of the model's file.
    pub sha256: String,
    /// The model's sizes.
    pub card: ModelCard,
    /// What it was placed for.
    pub goal: Goal,
    /// Where its layers are.
    pub plan: Plan,
    /// Everybody who may conduct it.
    pub members: Vec<NodeId>,
}

impl JournalRequest {
    /// The term that it is made under.
    pub fn term(&self) -> Term {
        match self {
            Self::Store { term, .. }
            | Self::Append { term, .. }
            | Self::Finish { term, .. }
            | Self::Collect { term, .. }
            | Self::Forget { term, .. }
            | Self::Describe { term, .. } => *term,
        }
    }
}

/// A member's answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum JournalReply {
    /// Remembered, or forgotten.
    Done,
    /// What is known.
    Entries {
        /// The requests.
        entries: Vec<JournalEntry>,
        /// Whether there are more of them.
        more: bool,
    },
}

/// Why a member did not do it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum JournalRefusal {
    /// Somebody conducts the instance under a higher term.
    #[error("instance {instance:?} is conducted by node {:?} under a higher term", current.node)]
    StaleTerm {
        /// The instance.
        instance: InstanceId,
        /// The term known here.
        current: Term,
    },
    /// The tokens do not join what is known: the conductor stores the request anew.
    #[error("request {request:?} has {known} tokens here, which do not reach to {from}")]
    Gap {
        /// The request.
        request: RequestId,
        /// Tokens known.
        known: u32,
        /// Index of the first token that was to be appended.
        from: u32,
    },
    /// No room.
    #[error("the journal is full: it holds {limit} requests")]
    Full {
        /// The limit.
        limit: usize,
    },
}

#[derive(Debug)]
struct Instance {
    term: Term,
    record: Option<Box<InstanceRecord>>,
    entries: BTreeMap<RequestId, JournalEntry>,
    /// Those of them that have ended, by age.
    ended: VecDeque<(Instant, RequestId)>,
}

impl Instance {
    /// Forgets answers that ended too long ago, and the oldest of too many.
    fn tidy(&mut self, now: Instant) {
        while let Some((since, id)) = self.ended.front().copied() {
            if self.ended.len() <= ENDED_MAX && now.since(since) < KEEP {
                return;
            }
            self.ended.pop_front();
            // One that was stored again since runs again.
            if self.entries.get(&id).is_some_and(|entry| entry.ended.is_some()) {
                self.entries.remove(&id);
            }
        }
    }

    fn open(&self) -> usize {
        self.entries.values().filter(|entry| entry.ended.is_none()).count()
    }
}

/// About how many bytes an entry takes on the wire.
fn bytes_of(entry: &JournalEntry) -> usize {
    postcard::experimental::serialized_size(entry).unwrap_or(usize::MAX)
}

/// A member's journal: a pure machine.
#[derive(Debug)]
pub struct JournalStore {
    instances: BTreeMap<InstanceId, Instance>,
    /// Instances by age, so that a forgotten one does not stay for ever.
    order: VecDeque<InstanceId>,
    instances_max: usize,
    entries_max: usize,
}

impl JournalStore {
    /// An empty journal that remembers so many instances, and so many requests of each.
    pub fn new(instances_max: usize, entries_max: usize) -> Self {
        Self { instances: BTreeMap::new(), order: VecDeque::new(), instances_max, entries_max }
    }

    /// The instances that `conductor` conducts as far as this member knows, under which term, and what they are.
    pub fn conducted_by(&self, conductor: NodeId) -> Vec<(InstanceId, Term, InstanceRecord)> {
        let of = |instance: &Instance| {
            let record = instance.record.as_deref().filter(|_| instance.term.node == conductor)?;
            Some((instance.term, record.clone()))
        };
        self.instances.iter().filter_map(|(id, instance)| of(instance).map(|(term, record)| (*id, term, record))).collect()
    }

    /// The instances of a model that this member knows, under which term, and what they are.
    pub fn of_model(&self, sha256: &str) -> Vec<(InstanceId, Term, InstanceRecord)> {
        let of = |instance: &Instance| {
            let record = instance.record.as_deref().filter(|record| record.sha256 == sha256)?;
            Some((instance.term, record.clone()))
        };
        self.instances.iter().filter_map(|(id, instance)| of(instance).map(|(term, record)| (*id, term, record))).collect()
    }

    /// A request that is remembered here, with what it asks.
    pub fn find(&self, request: RequestId) -> Option<&GenerateRequest> {
        self.instances.values().find_map(|instance| instance.entries.get(&request)).map(|entry| &entry.request)
    }

    /// Who conducts an instance as far as this member knows.
    pub fn term(&self, instance: InstanceId) -> Option<Term> {
        self.instances.get(&instance).map(|i| i.term)
    }

    fn instance(&mut self, instance: InstanceId, term: Term) -> Result<&mut Instance, JournalRefusal> {
        if !self.instances.contains_key(&instance) {
            self.order.push_back(instance);
            while self.order.len() > self.instances_max {
                self.order.pop_front().map(|oldest| self.instances.remove(&oldest));
            }
        }
        let new = || Instance { term, record: None, entries: BTreeMap::new(), ended: VecDeque::new() };
        let known = self.instances.entry(instance).or_insert_with(new);
        if term < known.term {
            return Err(JournalRefusal::StaleTerm { instance, current: known.term });
        }
        known.term = term;
        Ok(known)
    }

    /// Applies one request.
    ///
    /// # Errors
    /// [`JournalRefusal`]; nothing was changed then.
    pub fn apply(&mut self, now: Instant, request: JournalRequest) -> Result<JournalReply, JournalRefusal> {
        let limit = self.entries_max;
        match request {
            JournalRequest::Store { instance, term, entry } => {
                let known = self.instance(instance, term)?;
                known.tidy(now);
                if known.open() >= limit && !known.entries.contains_key(&entry.request.id) {
                    return Err(JournalRefusal::Full { limit });
                }
                let id = entry.request.id;
                let longer = known.entries.get(&id).is_none_or(|old| old.emitted.len() <= entry.emitted.len());
                if longer {
                    known.entries.insert(id, *entry);
                }
            }
            JournalRequest::Append { instance, term, request, from, tokens } => {
                let known = self.instance(instance, term)?;
                let Some(entry) = known.entries.get_mut(&request) else { return Err(JournalRefusal::Gap { request, known: 0, from }) };
                let have = entry.emitted.len();
                let start = from as usize;
                if start > have {
                    return Err(JournalRefusal::Gap { request, known: u32::try_from(have).unwrap_or(u32::MAX), from });
                }
                // A repeated message brings tokens that are known already.
                entry.emitted.extend(tokens.into_iter().skip(have - start));
            }
            JournalRequest::Finish { instance, term, request, ended } => {
                let known = self.instance(instance, term)?;
                match (ended, known.entries.get_mut(&request)) {
                    (Some(ended), Some(entry)) if entry.emitted.len() == ended.tokens as usize => {
                        if entry.ended.replace(ended).is_none() {
                            known.ended.push_back((now, request));
                        }
                    }
                    // What is not whole would be worth as much as the request alone, for which nobody waits any more.
                    _ => drop(known.entries.remove(&request)),
                }
                known.tidy(now);
            }
            JournalRequest::Collect { instance, term, after } => {
                let known = self.instance(instance, term)?;
                known.tidy(now);
                let from = after.map_or(std::ops::Bound::Unbounded, std::ops::Bound::Excluded);
                let mut rest = known.entries.range((from, std::ops::Bound::Unbounded)).map(|(_, entry)| entry).peekable();
                let (mut entries, mut bytes) = (Vec::new(), 0);
                while let Some(entry) = rest.next_if(|entry| entries.is_empty() || bytes + bytes_of(entry) <= PART_BYTES) {
                    bytes += bytes_of(entry);
                    entries.push(entry.clone());
                }
                return Ok(JournalReply::Entries { entries, more: rest.peek().is_some() });
            }
            JournalRequest::Describe { instance, term, record } => {
                let known = self.instance(instance, term)?;
                if known.record.as_ref().is_none_or(|old| (old.term, old.epoch) <= (record.term, record.epoch)) {
                    known.record = Some(record);
                }
            }
            JournalRequest::Forget { instance, term } => {
                self.instance(instance, term)?;
                self.instances.remove(&instance);
                self.order.retain(|known| *known != instance);
            }
        }
        Ok(JournalReply::Done)
    }
}

/// Merges what members remember: of every request the longest entry.
pub fn merge(journals: impl IntoIterator<Item = Vec<JournalEntry>>) -> BTreeMap<RequestId, JournalEntry> {
    let mut merged: BTreeMap<RequestId, JournalEntry> = BTreeMap::new();
    for entry in journals.into_iter().flatten() {
        let known = |entry: &JournalEntry| (entry.emitted.len(), entry.ended.is_some());
        let longer = merged.get(&entry.request.id).is_none_or(|old| known(old) < known(&entry));
        if longer {
            merged.insert(entry.request.id, entry);
        }
    }
    merged
}

/// The members of an instance: all its stage holders in pipeline order, padded with other nodes up to three where the
/// cluster has them.
pub fn members(holders: &[NodeId], others: impl IntoIterator<Item = NodeId>) -> Vec<NodeId> {
    const FEWEST: usize = 3;
    let mut members: Vec<NodeId> = Vec::new();
    for node in holders {
        if !members.contains(node) {
            members.push(*node);
        }
    }
    for node in others {
        if members.len() >= FEWEST {
            break;
        }
        if !members.contains(&node) {
            members.push(node);
        }
    }
    members
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shoal_engine::sampler::SamplingParams;

    use super::*;
    use crate::request::{Prompt, Unread};

    const INSTANCE: InstanceId = InstanceId(7);

    fn term(counter: u64) -> Term {
        Term { counter, node: NodeId([1; 32]) }
    }

    fn entry(id: u128, emitted: Vec<u32>) -> JournalEntry {
        JournalEntry {
            request: GenerateRequest {
                id: RequestId(id),
                instance: INSTANCE,
                prompt: Prompt::Text("x".to_owned()),
                sampling: SamplingParams::default(),
                max_tokens: None,
                stop: Vec::new(),
                ignore_end: false,
                unread: Unread::Cancel,
                shape: String::new(),
                client: crate::request::Client::default(),
                priority: crate::request::Priority::Normal,
            },
            prompt: vec![1, 2],
            emitted,
            ended: None,
        }
    }

    const NOW: Instant = Instant::ZERO;

    fn store(journal: &mut JournalStore, at: Term, entry: JournalEntry) -> Result<JournalReply, JournalRefusal> {
        journal.apply(NOW, JournalRequest::Store { instance: INSTANCE, term: at, entry: Box::new(entry) })
    }

    fn finish(journal: &mut JournalStore, now: Instant, id: u128, tokens: u32) {
        let ended = Some(Ended { reason: Finish::Stop, timing: Timing::default(), tokens });
        journal.apply(now, JournalRequest::Finish { instance: INSTANCE, term: term(1), request: RequestId(id), ended }).expect("noted");
    }

    fn collect(journal: &mut JournalStore, at: Term) -> Vec<JournalEntry> {
        collect_at(journal, NOW, at)
    }

    fn collect_at(journal: &mut JournalStore, now: Instant, at: Term) -> Vec<JournalEntry> {
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            match journal.apply(now, JournalRequest::Collect { instance: INSTANCE, term: at, after }) {
                Ok(JournalReply::Entries { entries, more }) => {
                    assert!(!more || !entries.is_empty());
                    after = entries.last().map(|entry| entry.request.id);
                    all.extend(entries);
                    if !more {
                        return all;
                    }
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn an_answer_that_ended_whole_is_kept_for_a_while() {
        let mut journal = JournalStore::new(4, 2);
        store(&mut journal, term(1), entry(1, vec![5, 6])).expect("stored");
        store(&mut journal, term(1), entry(2, vec![5])).expect("stored");
        finish(&mut journal, NOW, 1, 2);
        // A token of this one never came.
        finish(&mut journal, NOW, 2, 2);
        let ended = Some(Ended { reason: Finish::Stop, timing: Timing::default(), tokens: 2 });
        assert_eq!(collect(&mut journal, term(1)), [JournalEntry { ended, ..entry(1, vec![5, 6]) }]);
        assert_eq!(journal.find(RequestId(1)).map(|request| request.id), Some(RequestId(1)));
        assert_eq!(journal.find(RequestId(2)), None);
        // It takes no room from those that run.
        store(&mut journal, term(1), entry(3, vec![])).expect("stored");
        store(&mut journal, term(1), entry(4, vec![])).expect("stored");
        assert!(store(&mut journal, term(1), entry(5, vec![])).is_err());
        assert_eq!(collect_at(&mut journal, NOW + KEEP, term(1)), [entry(3, vec![]), entry(4, vec![])]);
        // The whole one wins over one that is as long and not known to have ended.
        let merged = merge([vec![entry(1, vec![5, 6])], vec![JournalEntry { ended, ..entry(1, vec![5, 6]) }], vec![entry(1, vec![5])]]);
        assert_eq!(merged[&RequestId(1)].ended, ended);
    }

    #[test]
    fn only_so_many_ended_answers_are_kept() {
        let mut journal = JournalStore::new(4, 2);
        for id in 0..ENDED_MAX as u128 + 3 {
            store(&mut journal, term(1), entry(id, vec![1])).expect("stored");
            finish(&mut journal, NOW, id, 1);
        }
        let kept = collect(&mut journal, term(1));
        assert_eq!((kept.len(), kept[0].request.id), (ENDED_MAX, RequestId(3)));
    }

    #[test]
    fn a_long_journal_is_told_in_parts() {
        let mut journal = JournalStore::new(4, 64);
        let long = |id| JournalEntry { prompt: vec![u32::MAX; PART_BYTES / 5 / 3], ..entry(id, vec![7]) };
        for id in 0..10 {
            store(&mut journal, term(1), long(id)).expect("stored");
        }
        // One that alone is longer than a part.
        store(&mut journal, term(1), JournalEntry { prompt: vec![u32::MAX; PART_BYTES], ..entry(4, vec![7]) }).expect("stored");
        let first = journal.apply(NOW, JournalRequest::Collect { instance: INSTANCE, term: term(1), after: None });
        assert!(matches!(first, Ok(JournalReply::Entries { entries, more: true }) if entries.len() == 2));
        let ids: Vec<u128> = collect(&mut journal, term(1)).iter().map(|entry| entry.request.id.0).collect();
        assert_eq!(ids, (0..10).collect::<Vec<_>>());
    }

    #[test]
    fn an_older_term_is_refused_and_changes_nothing() {
        let mut journal = JournalStore::new(4, 4);
        store(&mut journal, term(2), entry(1, vec![5])).expect("stored");
        let refusal = store(&mut journal, term(1), entry(2, vec![]));
        assert_eq!(refusal, Err(JournalRefusal::StaleTerm { instance: INSTANCE, current: term(2) }));
        assert_eq!(collect(&mut journal, term(2)), [entry(1, vec![5])]);
    }

    #[test]
    fn room_is_bounded() {
        let mut journal = JournalStore::new(2, 1);
        store(&mut journal, term(1), entry(1, vec![])).expect("stored");
        assert_eq!(store(&mut journal, term(1), entry(2, vec![])), Err(JournalRefusal::Full { limit: 1 }));
        for instance in [InstanceId(1), InstanceId(2)] {
            journal.apply(NOW, JournalRequest::Store { instance, term: term(1), entry: Box::new(entry(1, vec![])) }).expect("stored");
        }
        assert_eq!(journal.term(INSTANCE), None, "the oldest instance made room");
    }

    #[test]
    fn members_are_padded_to_three() {
        let node = |n| NodeId([n; 32]);
        assert_eq!(members(&[node(1)], [node(1), node(2), node(3), node(4)]), [node(1), node(2), node(3)]);
        assert_eq!(members(&[node(1)], []), [node(1)]);
        assert_eq!(members(&[node(1), node(2), node(3), node(4)], [node(5)]).len(), 4);
    }

    proptest! {
        /// Whatever is lost, repeated or reordered on the way, what a member remembers is a prefix of the truth, and
        /// the merge of all is the longest of them.
        #[test]
        fn journals_never_conflict(deliveries in prop::collection::vec((0usize..3, 0usize..12, 1usize..5), 0..60)) {
            let truth: Vec<u32> = (100..120).collect();
            let mut members: Vec<JournalStore> = (0..3).map(|_| JournalStore::new(4, 4)).collect();
            for member in &mut members {
                store(member, term(1), entry(1, vec![])).expect("stored");
            }
            for (member, from, count) in deliveries {
                let tokens = truth[from..(from + count).min(truth.len())].to_vec();
                let append = JournalRequest::Append { instance: INSTANCE, term: term(1), request: RequestId(1), from: from as u32, tokens };
                let _ = members[member].apply(NOW, append);
            }
            let journals: Vec<Vec<JournalEntry>> = members.iter_mut().map(|m| collect(m, term(2))).collect();
            let longest = journals.iter().flatten().map(|e| e.emitted.len()).max().unwrap_or(0);
            for entry in journals.iter().flatten() {
                prop_assert_eq!(&entry.emitted[..], &truth[..entry.emitted.len()]);
            }
            let merged = merge(journals);
            prop_assert_eq!(merged[&RequestId(1)].emitted.len(), longest);
        }
    }
}
