//! Continuous batching as a pure machine: requests in, steps out, tokens in, events out.
//!
//! A step mixes decode rows of running sequences with prefill chunks of new ones. Decode rows go first, so that one
//! user's long prompt does not stall everybody's stream, and prompts are cut into chunks, so that several stages work
//! on one prompt at once. As many steps are in flight as there are stages.
//!
//! KV memory is counted in the pages of the stages. Sequences are admitted while their prompt fits; when a running
//! one needs a page and none is free, the youngest is preempted: its pages are freed in the step stream, and later its
//! tokens are run again. Because sampling depends on (seed, position) alone, nobody sees a difference but time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shoal_engine::sampler::SamplingParams;
use shoal_engine::stage::{Row, SequenceId};

use crate::env::Instant;
use crate::ids::RequestId;
use crate::stage::message::{Open, Step, Tokens};

/// Sequences that one step opens at most: it bounds the step's message.
const OPENS_MAX: usize = 8;

/// What the scheduler may count on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Steps in flight at once: the number of stages.
    pub depth: usize,
    /// Rows of one step.
    pub rows_max: usize,
    /// Rows of one sequence's prompt in one step.
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
}

/// A request as the scheduler sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Work {
    /// Its name.
    pub id: RequestId,
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

/// How long the parts of a request took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Timing {
    /// From submission until its first rows were sent.
    pub queued: Duration,
    /// From then until its first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
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
struct Sequence {
    work: Work,
    /// Prompt, then emitted tokens.
    tokens: Vec<u32>,
    /// Tokens whose rows were sent since the sequence was last opened.
    sent: usize,
    /// Its number while it is open.
    number: Option<SequenceId>,
    /// Changes when it is preempted, so that answers of before are recognised.
    generation: u32,
    submitted: Instant,
    started: Option<Instant>,
    first: Option<Instant>,
}

impl Sequence {
    fn unsent(&self) -> usize {
        self.tokens.len() - self.sent
    }
}

#[derive(Debug)]
struct InFlight {
    step: u64,
    /// Sampled rows in order: which sequence, in which generation.
    samples: Vec<(u64, u32)>,
}

/// Decides which rows run in which step: requests in, steps out, tokens in, events out.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    next_step: u64,
    next_key: u64,
    /// All sequences by age: the key counts up with submissions.
    sequences: BTreeMap<u64, Sequence>,
    by_id: BTreeMap<RequestId, u64>,
    waiting: VecDeque<u64>,
    /// Open sequences, oldest admission first.
    running: Vec<u64>,
    numbers: BTreeSet<u32>,
    frees: Vec<SequenceId>,
    free_pages: usize,
    in_flight: VecDeque<InFlight>,
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
            waiting: VecDeque::new(),
            running: Vec::new(),
            numbers,
            frees: Vec::new(),
            free_pages: config.pages,
            in_flight: VecDeque::new(),
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

    /// KV pages that are free.
    pub fn free_pages(&self) -> usize {
        self.free_pages
    }

    /// Every request that has not ended.
    pub fn requests(&self) -> Vec<RequestId> {
        self.by_id.keys().copied().collect()
    }

    fn pages_of(&self, tokens: usize) -> usize {
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
        self.waiting.push_back(key);
        let sequence = Sequence { work, tokens, sent: 0, number: None, generation: 0, submitted: now, started: None, first: None };
        self.sequences.insert(key, sequence);
        Ok(())
    }

    /// The pipeline was made anew, with other limits and no sequence in it: whatever ran is run again, prompt and answer so
    /// far, and goes on from there. Steps under way are never answered. Gives the requests that the new pipeline can never
    /// hold; they stay until they are finished.
    pub fn restart(&mut self, config: SchedulerConfig) -> Vec<RequestId> {
        self.next_step = 0;
        self.in_flight.clear();
        self.frees.clear();
        self.running.clear();
        self.numbers = (0..u32::try_from(config.sequences_max).unwrap_or(u32::MAX)).collect();
        self.free_pages = config.pages;
        self.config = config;
        for sequence in self.sequences.values_mut() {
            if sequence.number.take().is_some() {
                sequence.sent = 0;
                sequence.generation += 1;
            }
        }
        // Keys count up with age.
        self.waiting = self.sequences.keys().copied().collect();
        let context = self.config.context_tokens as usize;
        let fits = |s: &&Sequence| s.tokens.len() < context && self.pages_of(s.tokens.len() + 1) <= self.config.pages;
        self.sequences.values().filter(|s| !fits(s)).map(|s| s.work.id).collect()
    }

    /// What is known of a request that has not ended: its prompt, and the tokens emitted so far.
    pub fn known(&self, id: RequestId) -> Option<(&[u32], &[u32])> {
        let sequence = self.sequences.get(self.by_id.get(&id)?)?;
        Some(sequence.tokens.split_at(sequence.work.prompt.len()))
    }

    /// Ends a request: because its client went away, or because a stop string was seen in its text. Its sequence is
    /// freed with the next step. `None` if there is no such request any more.
    pub fn finish(&mut self, now: Instant, id: RequestId, reason: Finish) -> Option<Event> {
        let key = self.by_id.get(&id).copied()?;
        Some(self.end(now, key, reason))
    }

    fn end(&mut self, now: Instant, key: u64, reason: Finish) -> Event {
        self.close(key);
        self.waiting.retain(|waiting| *waiting != key);
        let Some(sequence) = self.sequences.remove(&key) else { unreachable!("keys come from the same map") };
        self.by_id.remove(&sequence.work.id);
        let started = sequence.started.unwrap_or(now);
        let first = sequence.first.unwrap_or(now);
        let timing = Timing { queued: started.since(sequence.submitted), prefill: first.since(started), decode: now.since(first) };
        Event::Finished { id: sequence.work.id, reason, timing }
    }

    /// Gives a sequence's number and pages back, if it is open.
    fn close(&mut self, key: u64) {
        let pages = self.sequences.get(&key).map_or(0, |s| self.pages_of(s.sent));
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        let Some(number) = sequence.number.take() else { return };
        sequence.sent = 0;
        sequence.generation += 1;
        self.frees.push(number);
        self.free_pages += pages;
        self.running.retain(|running| *running != key);
    }

    /// Makes room for `pages` more by preempting sequences younger than `key`, the youngest first. `false` if that is
    /// not enough; `key` itself is then the youngest and has to wait.
    fn make_room(&mut self, pages: usize, key: u64, used: &BTreeSet<u64>) -> bool {
        while self.free_pages < pages {
            // A sequence with rows in the step that is being composed must not be freed by the same step.
            let Some(youngest) = self.running.iter().copied().filter(|k| *k > key && !used.contains(k)).max() else { return false };
            self.close(youngest);
            let place = self.waiting.iter().position(|waiting| *waiting > youngest).unwrap_or(self.waiting.len());
            self.waiting.insert(place, youngest);
        }
        true
    }

    fn admit(&mut self, now: Instant, opens: &mut Vec<Open>) {
        while let Some(key) = self.waiting.front().copied() {
            if opens.len() >= OPENS_MAX {
                return;
            }
            let free_number = self.numbers.iter().copied().find(|n| !self.taken(*n));
            let Some(number) = free_number else { return };
            let Some(sequence) = self.sequences.get(&key) else { return };
            // The whole prompt and one token more must fit, beside what the admitted ones have still to send.
            let promised: usize = self
                .running
                .iter()
                .filter_map(|k| self.sequences.get(k))
                .map(|s| self.pages_of(s.tokens.len() + 1) - self.pages_of(s.sent))
                .sum();
            if self.pages_of(sequence.tokens.len() + 1) + promised > self.free_pages {
                return;
            }
            self.waiting.pop_front();
            self.running.push(key);
            let Some(sequence) = self.sequences.get_mut(&key) else { return };
            sequence.number = Some(SequenceId(number));
            sequence.started.get_or_insert(now);
            let prompt_tokens = u32::try_from(sequence.work.prompt.len()).unwrap_or(u32::MAX);
            opens.push(Open { sequence: number, prompt_tokens, sampling: sequence.work.sampling.clone() });
        }
    }

    fn taken(&self, number: u32) -> bool {
        self.running.iter().filter_map(|k| self.sequences.get(k)).any(|s| s.number == Some(SequenceId(number)))
    }

    /// Composes the next step, if there is one to send now. Call again until it gives none.
    pub fn next_step(&mut self, now: Instant) -> Option<Step> {
        if self.in_flight.len() >= self.config.depth {
            return None;
        }
        let mut opens = Vec::new();
        self.admit(now, &mut opens);
        let mut rows = Vec::new();
        let mut samples = Vec::new();
        let mut used = BTreeSet::new();
        // Sequences that owe a single row are decoding: they go first.
        let mut order = self.running.clone();
        order.sort_by_key(|key| (self.sequences.get(key).map_or(0, Sequence::unsent) > 1, *key));
        for key in order {
            let left = self.config.rows_max - rows.len();
            let Some(sequence) = self.sequences.get(&key) else { continue };
            let count = sequence.unsent().min(left).min(self.config.chunk_rows);
            if count == 0 || sequence.number.is_none() {
                continue;
            }
            let more = self.pages_of(sequence.sent + count) - self.pages_of(sequence.sent);
            if !self.make_room(more, key, &used) {
                continue;
            }
            self.free_pages -= more;
            used.insert(key);
            let Some(sequence) = self.sequences.get_mut(&key) else { continue };
            let Some(number) = sequence.number else { continue };
            for place in sequence.sent..sequence.sent + count {
                let sample = place + 1 == sequence.tokens.len();
                let position = u32::try_from(place).unwrap_or(u32::MAX);
                rows.push(Row { sequence: number, position, token: sequence.tokens[place], sample });
                if sample {
                    samples.push((key, sequence.generation));
                }
            }
            sequence.sent += count;
        }
        // A sequence that was opened and at once preempted again for an older one was never opened.
        let never: BTreeSet<u32> = opens.iter().map(|open| open.sequence).filter(|number| !self.taken(*number)).collect();
        opens.retain(|open| !never.contains(&open.sequence));
        let mut frees = std::mem::take(&mut self.frees);
        for number in &never {
            if let Some(place) = frees.iter().rposition(|free| free.0 == *number) {
                frees.remove(place);
            }
        }
        if rows.is_empty() && frees.is_empty() && opens.is_empty() {
            return None;
        }
        let step = Step { step: self.next_step, opens, frees, rows };
        self.next_step += 1;
        self.in_flight.push_back(InFlight { step: step.step, samples });
        Some(step)
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
