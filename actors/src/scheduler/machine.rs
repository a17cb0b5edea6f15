//! Continuous batching as a pure machine: requests in, steps out, tokens in, events out.
//!
//! A step mixes decode rows of running sequences with prefill chunks of new ones. Decode rows go first, and a step has no more than
//! one chunk of prompts beside them, so that one user's long prompt does not stall everybody's stream; where that takes long, chunks
//! are made shorter ([`GAP`]). As many steps are in flight as there are stages.
//!
//! Whose prompt is next is a matter of fairness and priority ([`super::fair`]). KV memory is counted in the pages of the stages
//! ([`super::pages`]). Sequences are admitted while their prompt fits; when a running one needs a page and none is free, another is
//! preempted ([`super::room`]): its pages are freed in the step stream, and later its tokens are run again. Because
//! sampling depends on (seed, position) alone, nobody sees a difference but time. What a sequence begins with and somebody has
//! computed already it need not run again, if the pages are still there.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shoal_engine::sampler::SamplingParams;
use shoal_engine::stage::{Row, SequenceId};

use super::fair::{Candidate, Fair};
use super::pages::{Chain, Found, Pages, chain};
use crate::env::Instant;
use crate::ids::RequestId;
use crate::request::{Client, Priority};
use crate::stage::message::{Open, Step, Tokens};

/// Sequences that one step opens at most: it bounds the step's message.
const OPENS_MAX: usize = 8;
/// How long a chunk of prompts may hold up those who decode. Chunks are as short as that needs, but not shorter than
/// [`CHUNK_LEAST`].
pub const GAP: Duration = Duration::from_millis(100);
/// Rows of the shortest chunk: fewer would take almost as long.
pub const CHUNK_LEAST: usize = 16;
/// Rows that one user may be behind another, in longest steps.
const LAG_STEPS: usize = 8;

/// What the scheduler may count on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Steps in flight at once: the number of stages.
    pub depth: usize,
    /// Rows of one step.
    pub rows_max: usize,
    /// Rows of prompts in one step.
    pub chunk_rows: usize,
    /// Sequences that run at once.
    pub sequences_max: usize,
    /// KV pages of the stage that has fewest.
    pub pages: usize,
    /// Tokens of a page.
    pub page_tokens: usize,
    /// Longest sequence.
    pub context_tokens: u32,
    /// Requests that wait or run at once.
    pub requests_max: usize,
    /// Whether pages of what ran before are used again.
    pub prefix_cache: bool,
}

/// A request as the scheduler sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Work {
    /// Its name.
    pub id: RequestId,
    /// Who sent it.
    pub client: Client,
    /// How urgent it is.
    pub priority: Priority,
    /// The prompt; at least one token.
    pub prompt: Vec<u32>,
    /// Tokens that were already emitted before (by an earlier conductor): forced, not emitted again.
    pub emitted: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Most tokens to emit, counting those emitted before.
    pub max_tokens: u32,
    /// Tokens that end the text; not emitted.
    pub ends: BTreeSet<u32>,
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Finish {
    /// The model ended its text, or a stop string came.
    Stop,
    /// The token limit or the context is used up.
    Length,
    /// The client asked for it.
    Cancelled,
}

/// How long the parts of a request took, and what it was spared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Timing {
    /// From submission until its first rows were sent.
    pub queued: Duration,
    /// From then until its first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
    /// Tokens of the prompt that did not have to be run, because their pages were there.
    pub cached: u32,
}

/// What happened to a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// One more token.
    Emitted {
        /// Of which request.
        id: RequestId,
        /// Counts up from zero.
        index: u32,
        /// The token.
        token: u32,
        /// Natural logarithm of its probability, if it was asked for.
        logprob: Option<f32>,
        /// The likeliest tokens, best first.
        top: Vec<(u32, f32)>,
    },
    /// It is over.
    Finished {
        /// Which request.
        id: RequestId,
        /// Why.
        reason: Finish,
        /// How long it took.
        timing: Timing,
    },
}

/// Why a request was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// Nothing to continue.
    #[error("the prompt is empty")]
    Empty,
    /// Longer than the context.
    #[error("the prompt has {prompt} tokens and the context holds {context}; shorten it or load the model with a longer context")]
    TooLong {
        /// Its tokens.
        prompt: usize,
        /// The context, in tokens.
        context: u32,
    },
    /// Longer than all KV memory.
    #[error("the prompt has {prompt} tokens and the instance's KV memory holds {holds}; load the model with a longer context")]
    NoMemory {
        /// Its tokens.
        prompt: usize,
        /// Tokens that the KV memory holds.
        holds: usize,
    },
    /// The queue is full.
    #[error("{waiting} requests are waiting already; try again later")]
    Busy {
        /// How many.
        waiting: usize,
    },
}

/// Why the answer of the last stage makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the last stage answered step {received} with {tokens} tokens where {expected} was expected")]
pub struct AnswerError {
    received: u64,
    tokens: usize,
    expected: String,
}

#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) work: Work,
    /// Prompt, then emitted tokens.
    pub(super) tokens: Vec<u32>,
    /// Tokens whose rows were sent since the sequence was last opened.
    pub(super) sent: usize,
    /// Its number while it is open.
    pub(super) number: Option<SequenceId>,
    /// Changes when it is preempted, so that answers of before are recognised.
    generation: u32,
    /// Whether it stands still, because nobody reads its answer.
    pub(super) paused: bool,
    /// What its full pages hold.
    chains: Vec<Chain>,
    submitted: Instant,
    pub(super) started: Option<Instant>,
    first: Option<Instant>,
    /// Tokens of the prompt that were there when it started.
    cached: u32,
}

impl Sequence {
    fn unsent(&self) -> usize {
        self.tokens.len() - self.sent
    }

    /// What the first `pages` pages hold, which must be full.
    fn chains(&mut self, pages: usize, page_tokens: usize) -> &[Chain] {
        for page in self.tokens.chunks_exact(page_tokens).take(pages).skip(self.chains.len()) {
            let next = chain(self.chains.last(), page);
            self.chains.push(next);
        }
        &self.chains[..pages.min(self.chains.len())]
    }
}

#[derive(Debug)]
struct InFlight {
    step: u64,
    /// Sampled rows in order: which sequence, in which generation.
    samples: Vec<(u64, u32)>,
    /// All rows, and when it was sent.
    rows: usize,
    sent: Instant,
}

/// Decides which rows run in which step: requests in, steps out, tokens in, events out.
#[derive(Debug)]
pub struct Scheduler {
    pub(super) config: SchedulerConfig,
    next_step: u64,
    next_key: u64,
    /// All sequences by age: the key counts up with submissions.
    pub(super) sequences: BTreeMap<u64, Sequence>,
    by_id: BTreeMap<RequestId, u64>,
    pub(super) waiting: BTreeSet<u64>,
    /// Open sequences, oldest admission first.
    pub(super) running: Vec<u64>,
    numbers: BTreeSet<u32>,
    pub(super) pages: Pages,
    pub(super) fair: Fair,
    in_flight: VecDeque<InFlight>,
    /// When the last answer came.
    answered: Option<Instant>,
    /// What a row takes in steps with prompts, in seconds.
    row_seconds: Option<f64>,
}

/// A step on its way.
#[derive(Debug, Default)]
struct Composed {
    rows: Vec<Row>,
    samples: Vec<(u64, u32)>,
    /// Sequences with rows in it.
    used: BTreeSet<u64>,
}

fn pages(config: &SchedulerConfig) -> Pages {
    Pages::new(config.pages, config.page_tokens, config.sequences_max, config.prefix_cache)
}

impl Scheduler {
    /// An idle scheduler.
    pub fn new(config: SchedulerConfig) -> Self {
        let numbers = (0..u32::try_from(config.sequences_max).unwrap_or(u32::MAX)).collect();
        Self {
            next_step: 0,
            next_key: 0,
            sequences: BTreeMap::new(),
            by_id: BTreeMap::new(),
            waiting: BTreeSet::new(),
            running: Vec::new(),
            numbers,
            pages: pages(&config),
            fair: Fair::new(LAG_STEPS * config.rows_max),
            in_flight: VecDeque::new(),
            answered: None,
            row_seconds: None,
            config,
        }
    }

    /// The configuration it was made with.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Requests that wait, and that run.
    pub fn load(&self) -> (usize, usize) {
        (self.waiting.len(), self.running.len())
    }

    /// KV pages that no running sequence holds: those that are free, and those that only keep what may be used again.
    pub fn free_pages(&self) -> usize {
        self.pages.available()
    }

    /// KV pages in which nothing is kept either.
    pub fn empty_pages(&self) -> usize {
        self.pages.empty()
    }

    /// Every request that has not ended.
    pub fn requests(&self) -> Vec<RequestId> {
        self.by_id.keys().copied().collect()
    }

    pub(super) fn pages_of(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.config.page_tokens)
    }

    /// Takes a request. One whose id is known already is the same request: nothing changes.
    ///
    /// # Errors
    /// [`SubmitError`] if it can never run, or if the queue is full.
    pub fn submit(&mut self, now: Instant, work: Work) -> Result<(), SubmitError> {
        if self.by_id.contains_key(&work.id) {
            return Ok(());
        }
        let mut tokens = work.prompt.clone();
        tokens.extend_from_slice(&work.emitted);
        if work.prompt.is_empty() {
            return Err(SubmitError::Empty);
        }
        if tokens.len() >= self.config.context_tokens as usize {
            return Err(SubmitError::TooLong { prompt: tokens.len(), context: self.config.context_tokens });
        }
        if self.pages_of(tokens.len() + 1) > self.config.pages {
            return Err(SubmitError::NoMemory { prompt: tokens.len(), holds: self.config.pages * self.config.page_tokens });
        }
        if self.sequences.len() >= self.config.requests_max {
            return Err(SubmitError::Busy { waiting: self.waiting.len() });
        }
        let key = self.next_key;
        self.next_key += 1;
        self.by_id.insert(work.id, key);
        self.fair.enter(work.client);
        self.waiting.insert(key);
        let sequence = Sequence {
            work,
            tokens,
            sent: 0,
            number: None,
            generation: 0,
            paused: false,
            chains: Vec::new(),
            submitted: now,
            started: None,
            first: None,
            cached: 0,
        };
        self.sequences.insert(key, sequence);
        Ok(())
    }

    /// The pipeline was made anew, with other limits and nothing in its pages: whatever ran is run again, prompt and answer so
    /// far, and goes on from there. Steps under way are never answered. Gives the requests that the new pipeline can never
    /// hold; they stay until they are finished.
    pub fn restart(&mut self, config: SchedulerConfig) -> Vec<RequestId> {
        self.next_step = 0;
        self.in_flight.clear();
        (self.answered, self.row_seconds) = (None, None);
        self.running.clear();
        self.numbers = (0..u32::try_from(config.sequences_max).unwrap_or(u32::MAX)).collect();
        self.pages = pages(&config);
        self.config = config;
        for sequence in self.sequences.values_mut() {
            // Pages may have another length now.
            sequence.chains.clear();
            if sequence.number.take().is_some() {
                sequence.sent = 0;
                sequence.generation += 1;
            }
        }
        // Keys count up with age.
        self.waiting = self.sequences.iter().filter(|(_, sequence)| !sequence.paused).map(|(key, _)| *key).collect();
        let context = self.config.context_tokens as usize;
        let fits = |s: &&Sequence| s.tokens.len() < context && self.pages_of(s.tokens.len() + 1) <= self.config.pages;
        self.sequences.values().filter(|s| !fits(s)).map(|s| s.work.id).collect()
    }

    /// What is known of a request that has not ended: its prompt, and the tokens emitted so far.
    pub fn known(&self, id: RequestId) -> Option<(&[u32], &[u32])> {
        let sequence = self.sequences.get(self.by_id.get(&id)?)?;
        Some(sequence.tokens.split_at(sequence.work.prompt.len()))
    }

    /// Has a request stand still: it holds nothing that anybody else could use, and can go on where it was. What is under way of it is
    /// made again then.
    pub fn pause(&mut self, id: RequestId) {
        let Some(key) = self.by_id.get(&id).copied() else { return };
        self.close(key);
        self.waiting.remove(&key);
        if let Some(sequence) = self.sequences.get_mut(&key) {
            sequence.paused = true;
        }
    }

    /// Has a request go on that stands still. `false` if it does not.
    pub fn wake(&mut self, id: RequestId) -> bool {
        let Some(key) = self.by_id.get(&id).copied() else { return false };
        let paused = self.sequences.get_mut(&key).is_some_and(|sequence| std::mem::take(&mut sequence.paused));
        if paused {
            self.waiting.insert(key);
        }
        paused
    }

    /// Ends a request: because its client went away, or because a stop string was seen in its text. Its sequence is
    /// freed with the next step. `None` if there is no such request any more.
    pub fn finish(&mut self, now: Instant, id: RequestId, reason: Finish) -> Option<Event> {
        let key = self.by_id.get(&id).copied()?;
        Some(self.end(now, key, reason))
    }

    fn end(&mut self, now: Instant, key: u64, reason: Finish) -> Event {
        self.close(key);
        self.waiting.remove(&key);
        let Some(sequence) = self.sequences.remove(&key) else { unreachable!("keys come from the same map") };
        self.by_id.remove(&sequence.work.id);
        self.fair.leave(sequence.work.client);
        let started = sequence.started.unwrap_or(now);
        let first = sequence.first.unwrap_or(now);
        let queued = started.since(sequence.submitted);
        let timing = Timing { queued, prefill: first.since(started), decode: now.since(first), cached: sequence.cached };
        Event::Finished { id: sequence.work.id, reason, timing }
    }

    /// Gives a sequence's number and pages back, if it is open.
    pub(super) fn close(&mut self, key: u64) {
        self.note(key);
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        let Some(number) = sequence.number.take() else { return };
        sequence.sent = 0;
        sequence.generation += 1;
        self.pages.close(number.0);
        self.running.retain(|running| *running != key);
    }

    /// Takes note of what is in the pages of an open sequence by the next step.
    fn note(&mut self, key: u64) {
        let page_tokens = self.config.page_tokens;
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        if let Some(number) = sequence.number {
            let full = sequence.sent / page_tokens;
            self.pages.note(number.0, sequence.chains(full, page_tokens));
        }
    }

    /// Opens a sequence that waits, if there is room for it or others have more than their share. None of `chosen` is preempted.
    fn admit(&mut self, now: Instant, key: u64, chosen: &[(u64, usize)]) -> bool {
        let page_tokens = self.config.page_tokens;
        loop {
            let number = self.numbers.iter().copied().find(|n| !self.taken(*n));
            let Some(sequence) = self.sequences.get_mut(&key) else { return false };
            // The last token is run in any case: its row is what is sampled.
            let full = (sequence.tokens.len() - 1) / page_tokens;
            let found = self.pages.find(sequence.chains(full, page_tokens));
            let length = sequence.tokens.len() + 1;
            // The whole prompt and one token more must fit, beside what the admitted ones have still to send.
            let promised: usize = (self.running.iter().filter_map(|k| self.sequences.get(k)))
                .map(|s| self.pages_of(s.tokens.len() + 1) - self.pages_of(s.sent))
                .sum();
            let (spared, cost) = found.map_or((0, 0), |found| (found.pages, self.pages.cost(found)));
            let fits = self.pages_of(length) - spared + cost + promised <= self.pages.available();
            match number.filter(|_| fits) {
                Some(number) => {
                    self.open(now, key, number, found);
                    return true;
                }
                None if !self.yield_to(key, number.is_none(), chosen) => return false,
                None => {}
            }
        }
    }

    fn open(&mut self, now: Instant, key: u64, number: u32, found: Option<Found>) {
        self.waiting.remove(&key);
        self.running.push(key);
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        sequence.number = Some(SequenceId(number));
        sequence.sent = found.map_or(0, |found| found.pages * self.config.page_tokens);
        if sequence.started.is_none() {
            sequence.started = Some(now);
            sequence.cached = u32::try_from(sequence.sent.min(sequence.work.prompt.len())).unwrap_or(u32::MAX);
        }
        let prompt_tokens = u32::try_from(sequence.work.prompt.len()).unwrap_or(u32::MAX);
        let open = Open { sequence: number, prompt_tokens, sampling: sequence.work.sampling.clone(), shared: None };
        self.pages.open(open, found);
    }

    fn taken(&self, number: u32) -> bool {
        self.running.iter().filter_map(|k| self.sequences.get(k)).any(|s| s.number == Some(SequenceId(number)))
    }

    /// Rows of prompts that the next step may have.
    fn chunk(&self) -> usize {
        let chunk = self.config.chunk_rows;
        let decoding = self.running.iter().filter_map(|key| self.sequences.get(key)).any(|s| s.unsent() <= 1);
        match self.row_seconds.filter(|_| decoding) {
            // As many as take that long on their way through all stages.
            Some(seconds) => ((GAP.as_secs_f64() / (seconds * self.config.depth as f64)) as usize).clamp(CHUNK_LEAST.min(chunk), chunk),
            None => chunk,
        }
    }

    /// Which prompts run in the next step, and how many rows of each, after those that wait were admitted.
    fn prompts(&mut self, now: Instant) -> Vec<(u64, usize)> {
        let decoding = self.running.iter().filter_map(|key| self.sequences.get(key)).filter(|s| s.unsent() == 1).count();
        let mut left = self.config.rows_max.saturating_sub(decoding).min(self.chunk());
        let mut chosen: Vec<(u64, usize)> = Vec::new();
        let (mut full, mut opened) = (false, 0);
        while left > 0 {
            let runs = |key: &u64| self.sequences.get(key).is_some_and(|s| s.unsent() > 1) && chosen.iter().all(|(known, _)| known != key);
            let running: BTreeSet<u64> = self.running.iter().copied().filter(runs).collect();
            let waiting = self.waiting.iter().filter(|_| !full && opened < OPENS_MAX);
            let keys: BTreeSet<u64> = running.iter().chain(waiting).copied().collect();
            let candidate =
                |key: u64| self.sequences.get(&key).map(|s| Candidate { key, client: s.work.client, priority: s.work.priority });
            let candidates: Vec<Candidate> = keys.into_iter().filter_map(candidate).collect();
            let Some(next) = self.fair.next(&candidates) else { break };
            if !running.contains(&next.key) {
                // Whoever is next and does not fit is waited for, or it would be for ever.
                if !self.admit(now, next.key, &chosen) {
                    full = true;
                    continue;
                }
                opened += 1;
            }
            let Some(sequence) = self.sequences.get(&next.key) else { break };
            let count = sequence.unsent().min(left);
            self.fair.turn(&candidates, next);
            self.fair.charge(next.client, count);
            chosen.push((next.key, count));
            left -= count;
        }
        chosen
    }

    /// Composes the next step, if there is one to send now. Call again until it gives none.
    pub fn next_step(&mut self, now: Instant) -> Option<Step> {
        if self.in_flight.len() >= self.config.depth {
            return None;
        }
        for key in self.running.clone() {
            self.note(key);
        }
        let prompts = self.prompts(now);
        let mut step = Composed::default();
        // Sequences that owe a single row are decoding: they go first.
        let owes = |key: &u64| self.sequences.get(key).is_some_and(|s| s.unsent() == 1) && prompts.iter().all(|(prompt, _)| prompt != key);
        let mut decoding: Vec<u64> = self.running.iter().copied().filter(owes).collect();
        decoding.sort_unstable();
        decoding.truncate(self.config.rows_max);
        for key in decoding {
            if self.compose(key, 1, &mut step)
                && let Some(sequence) = self.sequences.get(&key)
            {
                self.fair.charge(sequence.work.client, 1);
            }
        }
        for (key, count) in prompts {
            self.compose(key, count, &mut step);
        }
        let Composed { rows, samples, .. } = step;
        let changes = self.pages.take_changes();
        if rows.is_empty() && changes.is_empty() {
            return None;
        }
        let step = Step { step: self.next_step, changes, rows };
        self.next_step += 1;
        self.in_flight.push_back(InFlight { step: step.step, samples, rows: step.rows.len(), sent: now });
        Some(step)
    }

    /// Adds a sequence's next rows to a step, unless there is no memory for them.
    fn compose(&mut self, key: u64, count: usize, step: &mut Composed) -> bool {
        let Some(sequence) = self.sequences.get(&key) else { return false };
        // It may have been preempted meanwhile.
        let (Some(number), end) = (sequence.number, sequence.sent + count) else { return false };
        let more = self.pages_of(end) - self.pages_of(sequence.sent);
        if !self.make_room(more, key, &step.used) {
            return false;
        }
        self.pages.grow(number.0, end);
        step.used.insert(key);
        let Some(sequence) = self.sequences.get_mut(&key) else { return false };
        for place in sequence.sent..end {
            let sample = place + 1 == sequence.tokens.len();
            let position = u32::try_from(place).unwrap_or(u32::MAX);
            step.rows.push(Row { sequence: number, position, token: sequence.tokens[place], sample });
            if sample {
                step.samples.push((key, sequence.generation));
            }
        }
        sequence.sent = end;
        true
    }

    /// Learns from an answer what rows take.
    fn measure(&mut self, now: Instant, flight: &InFlight) {
        // The stages were busy with the steps before until the answer before.
        let begun = self.answered.map_or(flight.sent, |answered| answered.max(flight.sent));
        self.answered = Some(now);
        let seconds = now.since(begun).as_secs_f64() / flight.rows.max(1) as f64;
        if flight.rows >= CHUNK_LEAST && seconds > 0.0 {
            self.row_seconds = Some(self.row_seconds.map_or(seconds, |known| known + (seconds - known) / 4.0));
        }
    }

    /// Takes the last stage's answer to the oldest step in flight.
    ///
    /// # Errors
    /// If it is no answer to that step: the instance's pipeline is broken.
    pub fn tokens(&mut self, now: Instant, answer: Tokens) -> Result<Vec<Event>, AnswerError> {
        let wrong = |expected: String| AnswerError { received: answer.step, tokens: answer.tokens.len(), expected };
        let Some(flight) = self.in_flight.pop_front() else { return Err(wrong("no answer".to_owned())) };
        if flight.step != answer.step || flight.samples.len() != answer.tokens.len() {
            return Err(wrong(format!("step {} with {} tokens", flight.step, flight.samples.len())));
        }
        self.measure(now, &flight);
        let mut events = Vec::new();
        for ((key, generation), token) in flight.samples.into_iter().zip(answer.tokens) {
            let context = self.config.context_tokens as usize;
            let Some(sequence) = self.sequences.get_mut(&key) else { continue };
            if sequence.generation != generation {
                continue;
            }
            sequence.first.get_or_insert(now);
            if sequence.work.ends.contains(&token.token) {
                events.push(self.end(now, key, Finish::Stop));
                continue;
            }
            let emitted = sequence.tokens.len() - sequence.work.prompt.len();
            sequence.tokens.push(token.token);
            let index = u32::try_from(emitted).unwrap_or(u32::MAX);
            events.push(Event::Emitted { id: sequence.work.id, index, token: token.token, logprob: token.logprob, top: token.top });
            let full = sequence.tokens.len() >= context || self.config.pages * self.config.page_tokens <= sequence.tokens.len();
            let Some(sequence) = self.sequences.get(&key) else { continue };
            if full || index + 1 >= sequence.work.max_tokens {
                events.push(self.end(now, key, Finish::Length));
            }
        }
        Ok(events)
    }
}
