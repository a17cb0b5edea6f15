//! The scheduler drives real stage machines around a toy model whose next token depends on the whole history, so
//! that any row run twice, skipped, reordered or run on stale keys shows as a wrong token.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;
use shoal_engine::sampler::SamplingParams;
use shoal_engine::stage::{Input, Row, SequenceId, Stage, StepError};

use super::*;
use crate::env::Instant;
use crate::ids::RequestId;
use crate::stage::machine::StageMachine;
use crate::stage::message::Tokens;

const VOCABULARY: usize = 64;
const PAGE: usize = 4;

/// A stage whose "keys" are the tokens themselves. Its activation carries the token; its logits point at a hash of
/// everything the sequence has cached.
struct Toy {
    first: bool,
    last: bool,
    cache: BTreeMap<SequenceId, Vec<u32>>,
    pages: usize,
}

fn next_token(history: &[u32]) -> u32 {
    let hash = history.iter().fold(17u32, |hash, token| (hash ^ token).wrapping_mul(0x9e37_79b1).rotate_left(13));
    (hash >> 8) % VOCABULARY as u32
}

impl Stage for Toy {
    fn hidden(&self) -> usize {
        1
    }
    fn vocabulary(&self) -> usize {
        VOCABULARY
    }
    fn is_first(&self) -> bool {
        self.first
    }
    fn is_last(&self) -> bool {
        self.last
    }
    fn step(&mut self, rows: &[Row], input: Input<'_>, output: &mut [f32]) -> Result<(), StepError> {
        let mut at = 0;
        for (index, row) in rows.iter().enumerate() {
            let token = match input {
                Input::Tokens => row.token,
                Input::Activations(values) => values[index] as u32,
            };
            let history = self.cache.entry(row.sequence).or_default();
            if history.len() != row.position as usize {
                return Err(StepError::Malformed(format!("position {} after {} cached tokens", row.position, history.len())));
            }
            history.push(token);
            if self.last {
                if row.sample {
                    output[at * VOCABULARY + next_token(history) as usize] = 10.0;
                    at += 1;
                }
            } else {
                output[index] = token as f32;
            }
        }
        let used: usize = self.cache.values().map(|h| h.len().div_ceil(PAGE)).sum();
        if used > self.pages {
            return Err(StepError::KvFull { needed: used, free: self.pages });
        }
        Ok(())
    }
    fn free(&mut self, sequence: SequenceId) {
        self.cache.remove(&sequence);
    }
    fn page_tokens(&self) -> usize {
        PAGE
    }
    fn pages(&self) -> (usize, usize) {
        (self.pages, 0)
    }
    fn weight_bytes(&self) -> u64 {
        0
    }
}

fn pipeline(stages: usize, pages: usize, rows_max: usize) -> Vec<StageMachine> {
    (0..stages)
        .map(|i| {
            let toy = Toy { first: i == 0, last: i + 1 == stages, cache: BTreeMap::new(), pages };
            StageMachine::new(Box::new(toy), rows_max, 8)
        })
        .collect()
}

fn expected(prompt: &[u32], max_tokens: u32, limit: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    while tokens.len() < prompt.len() + max_tokens as usize && tokens.len() < limit {
        let next = next_token(&tokens);
        tokens.push(next);
        if next == 0 {
            tokens.pop();
            break;
        }
    }
    tokens.split_off(prompt.len())
}

fn work(id: u128, prompt: Vec<u32>, max_tokens: u32) -> Work {
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    Work { id: RequestId(id), prompt, emitted: Vec::new(), sampling, max_tokens, ends: BTreeSet::from([0]) }
}

#[derive(Debug, Clone)]
enum Action {
    Submit {
        prompt: Vec<u32>,
        max_tokens: u32,
    },
    Cancel {
        which: usize,
    },
    Send,
    Answer,
    /// The pipeline breaks and is made anew, of so many stages.
    Restart {
        depth: usize,
    },
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        2 => (prop::collection::vec(0u32..VOCABULARY as u32, 1..20), 1u32..16).prop_map(|(prompt, max_tokens)| Action::Submit { prompt, max_tokens }),
        1 => any::<usize>().prop_map(|which| Action::Cancel { which }),
        6 => Just(Action::Send),
        6 => Just(Action::Answer),
        1 => (1usize..4).prop_map(|depth| Action::Restart { depth }),
    ]
}

struct World {
    scheduler: Scheduler,
    stages: Vec<StageMachine>,
    answers: VecDeque<Tokens>,
    got: BTreeMap<RequestId, Vec<u32>>,
    ended: BTreeMap<RequestId, Finish>,
}

impl World {
    fn new(config: SchedulerConfig) -> Self {
        let stages = pipeline(config.depth, config.pages, config.rows_max);
        Self { scheduler: Scheduler::new(config), stages, answers: VecDeque::new(), got: BTreeMap::new(), ended: BTreeMap::new() }
    }

    fn send(&mut self) -> bool {
        let Some(step) = self.scheduler.next_step(Instant::ZERO) else { return false };
        let mut message = Vec::new();
        step.encode(&mut message);
        for stage in &mut self.stages {
            let mut out = Vec::new();
            stage.step(&message, &mut out).expect("the scheduler stays within what was agreed");
            message = out;
        }
        self.answers.push_back(Tokens::decode(&message, 64).expect("well-formed"));
        true
    }

    fn answer(&mut self) -> bool {
        let Some(tokens) = self.answers.pop_front() else { return false };
        let events = self.scheduler.tokens(Instant::ZERO, tokens).expect("answers come in order");
        events.into_iter().for_each(|event| self.note(event));
        true
    }

    /// Stages that stand go on with what they have in memory, except for keys; others are new.
    fn restart(&mut self, depth: usize) {
        let config = SchedulerConfig { depth, ..self.scheduler.config().clone() };
        self.answers.clear();
        if depth == self.stages.len() {
            self.stages.iter_mut().for_each(StageMachine::reset);
        } else {
            self.stages = pipeline(depth, config.pages, config.rows_max);
        }
        assert!(self.scheduler.restart(config).is_empty(), "what fitted fits");
    }

    fn note(&mut self, event: Event) {
        match event {
            Event::Emitted { id, index, token, .. } => {
                let got = self.got.entry(id).or_default();
                assert_eq!(got.len(), index as usize, "tokens come in order, each once");
                got.push(token);
            }
            Event::Finished { id, reason, .. } => assert_eq!(self.ended.insert(id, reason), None, "a request ends once"),
        }
    }
}

proptest! {
    #[test]
    fn every_request_gets_its_own_tokens(
        actions in prop::collection::vec(action(), 1..120),
        depth in 1usize..4, pages in 6usize..14, rows_max in 2usize..24, chunk_rows in 1usize..12, sequences_max in 1usize..6,
    ) {
        let context_tokens = 32;
        let config = SchedulerConfig { depth, rows_max, chunk_rows, sequences_max, pages, page_tokens: PAGE, context_tokens, requests_max: 64 };
        let limit = (context_tokens as usize).min(pages * PAGE);
        let mut world = World::new(config);
        let mut asked = BTreeMap::new();
        for (number, action) in actions.into_iter().enumerate() {
            match action {
                Action::Submit { prompt, max_tokens } => {
                    let id = RequestId(number as u128);
                    let fits = prompt.len() < limit;
                    let taken = world.scheduler.submit(Instant::ZERO, work(id.0, prompt.clone(), max_tokens));
                    prop_assert_eq!(taken.is_ok(), fits);
                    if fits { asked.insert(id, expected(&prompt, max_tokens, limit)); }
                }
                Action::Cancel { which } => {
                    let open = world.scheduler.requests();
                    if let Some(id) = open.get(which % open.len().max(1)) {
                        let event = world.scheduler.finish(Instant::ZERO, *id, Finish::Cancelled).expect("is open");
                        world.note(event);
                    }
                }
                Action::Send => { world.send(); }
                Action::Answer => { world.answer(); }
                Action::Restart { depth } => world.restart(depth),
            }
        }
        for _ in 0..10_000 {
            let sent = world.send();
            let answered = world.answer();
            if !sent && !answered { break; }
        }
        prop_assert!(world.scheduler.requests().is_empty(), "every request ends: {:?}", world.scheduler);
        prop_assert_eq!(world.scheduler.free_pages(), pages, "every page comes back");
        for (id, tokens) in asked {
            let got = world.got.remove(&id).unwrap_or_default();
            if world.ended.get(&id) == Some(&Finish::Cancelled) {
                prop_assert_eq!(&tokens[..got.len()], &got[..], "what came before the cancel is right");
            } else {
                prop_assert_eq!(tokens, got);
            }
        }
    }
}

fn config() -> SchedulerConfig {
    SchedulerConfig {
        depth: 1,
        rows_max: 8,
        chunk_rows: 8,
        sequences_max: 4,
        pages: 64,
        page_tokens: PAGE,
        context_tokens: 64,
        requests_max: 3,
    }
}

#[test]
fn decode_rows_go_before_prefill() {
    let mut world = World::new(config());
    world.scheduler.submit(Instant::ZERO, work(1, vec![5], 8)).expect("fits");
    assert!(world.send() && world.answer());
    world.scheduler.submit(Instant::ZERO, work(2, vec![3; 30], 8)).expect("fits");
    let step = world.scheduler.next_step(Instant::ZERO).expect("there is work");
    assert_eq!(step.rows.len(), 8);
    assert_eq!((step.rows[0].sequence, step.rows[0].position, step.rows[0].sample), (SequenceId(0), 1, true));
    assert!(step.rows[1..].iter().all(|row| row.sequence == SequenceId(1) && !row.sample));
}

#[test]
fn forced_tokens_are_not_emitted_again() {
    let mut whole = World::new(config());
    whole.scheduler.submit(Instant::ZERO, work(1, vec![5, 6], 10)).expect("fits");
    while whole.send() && whole.answer() {}
    let all = whole.got.remove(&RequestId(1)).expect("has tokens");
    assert!(all.len() > 4);
    let mut rest = World::new(config());
    let mut again = work(1, vec![5, 6], 10);
    again.emitted = all[..3].to_vec();
    rest.scheduler.submit(Instant::ZERO, again).expect("fits");
    let mut got = Vec::new();
    while rest.send() {
        let events = rest.scheduler.tokens(Instant::ZERO, rest.answers.pop_front().expect("an answer")).expect("in order");
        got.extend(events.into_iter().filter_map(|event| match event {
            Event::Emitted { index, token, .. } => Some((index, token)),
            Event::Finished { .. } => None,
        }));
    }
    let wanted: Vec<(u32, u32)> = all.iter().enumerate().skip(3).map(|(i, t)| (i as u32, *t)).collect();
    assert_eq!(got, wanted);
}

#[test]
fn a_smaller_pipeline_names_what_it_cannot_hold() {
    let mut world = World::new(config());
    for (id, length) in [(1, 20), (2, 7), (3, 8)] {
        world.scheduler.submit(Instant::ZERO, work(id, vec![5; length], 30)).expect("fits");
    }
    assert!(world.send());
    // Two pages: seven tokens and one more, but not eight and one more.
    assert_eq!(world.scheduler.restart(SchedulerConfig { pages: 2, ..config() }), [RequestId(1), RequestId(3)]);
    assert_eq!(world.scheduler.known(RequestId(2)), Some((&[5; 7][..], &[][..])));
}

#[test]
fn the_queue_is_bounded_and_says_so() {
    let mut scheduler = Scheduler::new(config());
    for id in 0..3 {
        scheduler.submit(Instant::ZERO, work(id, vec![1], 1)).expect("fits");
    }
    scheduler.submit(Instant::ZERO, work(0, vec![1], 1)).expect("the same id is the same request");
    assert_eq!(scheduler.submit(Instant::ZERO, work(9, vec![1], 1)), Err(SubmitError::Busy { waiting: 3 }));
    assert_eq!(Scheduler::new(config()).submit(Instant::ZERO, work(9, vec![], 1)), Err(SubmitError::Empty));
    assert!(matches!(
        Scheduler::new(config()).submit(Instant::ZERO, work(9, vec![1; 64], 1)),
        Err(SubmitError::TooLong { prompt: 64, context: 64 })
    ));
}

#[test]
fn an_answer_to_another_step_is_a_fault() {
    let mut scheduler = Scheduler::new(config());
    assert!(scheduler.tokens(Instant::ZERO, Tokens { step: 0, tokens: Vec::new() }).is_err());
    scheduler.submit(Instant::ZERO, work(1, vec![1], 1)).expect("fits");
    scheduler.next_step(Instant::ZERO).expect("a step");
    assert!(scheduler.tokens(Instant::ZERO, Tokens { step: 5, tokens: Vec::new() }).is_err());
}
