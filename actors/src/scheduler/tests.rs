//! The scheduler drives real stage machines around a toy model whose next token depends on the whole history, so
//! that any row run twice, skipped, reordered or run on stale keys shows as a wrong token.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;
use shoal_engine::sampler::SamplingParams;
use shoal_engine::stage::{Input, Row, SequenceId, Stage, StepError};

use super::*;
use crate::env::Instant;
use crate::ids::RequestId;
use crate::request::{Client, Priority};
use crate::stage::machine::StageMachine;
use crate::stage::message::{Change, Open, Shared, Step, Tokens};

const VOCABULARY: usize = 64;
const PAGE: usize = 4;

/// A stage whose "keys" are the tokens themselves. Its activation carries the token; its logits point at a hash of
/// everything the sequence has cached.
struct Toy {
    first: bool,
    last: bool,
    cache: BTreeMap<SequenceId, Cached>,
    pages: usize,
    /// Pages that were ever taken: each has a name of its own.
    taken: usize,
}

/// The tokens of a sequence, and the pages that they lie in.
#[derive(Clone, Default)]
struct Cached {
    tokens: Vec<u32>,
    pages: Vec<usize>,
}

impl Toy {
    fn new(first: bool, last: bool, pages: usize) -> Self {
        Self { first, last, cache: BTreeMap::new(), pages, taken: 0 }
    }

    fn used(&self) -> usize {
        self.cache.values().flat_map(|cached| &cached.pages).collect::<BTreeSet<_>>().len()
    }
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
            let Cached { tokens: history, pages } = self.cache.entry(row.sequence).or_default();
            if history.len() != row.position as usize {
                return Err(StepError::Malformed(format!("position {} after {} cached tokens", row.position, history.len())));
            }
            history.push(token);
            if history.len() > pages.len() * PAGE {
                pages.push(self.taken);
                self.taken += 1;
            }
            if self.last {
                if row.sample {
                    let next = next_token(history) as usize;
                    output[at * VOCABULARY + next] = 10.0;
                    // For those who must not take it.
                    output[at * VOCABULARY + (next + 1) % VOCABULARY] = 5.0;
                    at += 1;
                }
            } else {
                output[index] = token as f32;
            }
        }
        let used = self.used();
        if used > self.pages {
            return Err(StepError::KvFull { needed: used, free: self.pages });
        }
        Ok(())
    }
    fn share(&mut self, from: SequenceId, to: SequenceId, tokens: usize) -> Result<(), StepError> {
        let source = self.cache.get(&from).filter(|source| (1..=source.tokens.len()).contains(&tokens) && tokens.is_multiple_of(PAGE));
        let Some(source) = source.filter(|_| !self.cache.contains_key(&to)) else {
            return Err(StepError::Malformed(format!("{tokens} tokens of sequence {} cannot be shared", from.0)));
        };
        let shared = Cached { tokens: source.tokens[..tokens].to_vec(), pages: source.pages[..tokens / PAGE].to_vec() };
        self.cache.insert(to, shared);
        Ok(())
    }
    fn free(&mut self, sequence: SequenceId) {
        self.cache.remove(&sequence);
    }
    fn page_tokens(&self) -> usize {
        PAGE
    }
    fn pages(&self) -> (usize, usize) {
        (self.pages, self.pages - self.used())
    }
    fn weight_bytes(&self) -> u64 {
        0
    }
}

fn pipeline(stages: usize, pages: usize, rows_max: usize) -> Vec<StageMachine> {
    (0..stages).map(|i| StageMachine::new(Box::new(Toy::new(i == 0, i + 1 == stages, pages)), rows_max, 8)).collect()
}

pub(super) fn expected(prompt: &[u32], max_tokens: u32, limit: usize) -> Vec<u32> {
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

pub(super) fn work(id: u128, prompt: Vec<u32>, max_tokens: u32) -> Work {
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let (client, priority) = (Client::default(), Priority::Normal);
    Work { id: RequestId(id), client, priority, prompt, emitted: Vec::new(), sampling, max_tokens, ends: BTreeSet::from([0]) }
}

#[derive(Debug, Clone)]
enum Action {
    Submit {
        prompt: Vec<u32>,
        max_tokens: u32,
        client: Client,
        priority: Priority,
    },
    /// Nobody reads it any more, or somebody does again.
    Pause {
        which: usize,
        wake: bool,
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

/// Prompts that often begin alike.
fn prompt() -> impl Strategy<Value = Vec<u32>> {
    (0u32..3, 0usize..20, prop::collection::vec(0u32..VOCABULARY as u32, 1..6))
        .prop_map(|(family, common, own)| (0..common as u32).map(|i| (family * 17 + i) % VOCABULARY as u32).chain(own).collect())
}

fn client() -> impl Strategy<Value = Client> {
    (0u64..3, 0u64..2).prop_map(|(account, user)| Client { account, user })
}

fn priority() -> impl Strategy<Value = Priority> {
    prop_oneof![Just(Priority::Low), Just(Priority::Normal), Just(Priority::High)]
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        2 => (prompt(), 1u32..16, client(), priority()).prop_map(|(prompt, max_tokens, client, priority)| Action::Submit { prompt, max_tokens, client, priority }),
        1 => (any::<usize>(), any::<bool>()).prop_map(|(which, wake)| Action::Pause { which, wake }),
        1 => any::<usize>().prop_map(|which| Action::Cancel { which }),
        6 => Just(Action::Send),
        6 => Just(Action::Answer),
        1 => (1usize..4).prop_map(|depth| Action::Restart { depth }),
    ]
}

pub(super) struct World {
    pub(super) scheduler: Scheduler,
    pub(super) stages: Vec<StageMachine>,
    answers: VecDeque<Tokens>,
    pub(super) got: BTreeMap<RequestId, Vec<u32>>,
    pub(super) ended: BTreeMap<RequestId, Finish>,
    /// Whether requests are expected to begin in order.
    ordered: bool,
}

impl World {
    pub(super) fn new(config: SchedulerConfig) -> Self {
        let stages = pipeline(config.depth, config.pages, config.rows_max);
        Self {
            scheduler: Scheduler::new(config),
            stages,
            answers: VecDeque::new(),
            got: BTreeMap::new(),
            ended: BTreeMap::new(),
            ordered: true,
        }
    }

    pub(super) fn send(&mut self) -> bool {
        let Some(step) = self.scheduler.next_step(Instant::ZERO) else { return false };
        self.run(&step);
        true
    }

    pub(super) fn run(&mut self, step: &Step) {
        let mut message = Vec::new();
        step.encode(&mut message);
        for stage in &mut self.stages {
            let mut out = Vec::new();
            stage.step(&message, &mut out).expect("the scheduler stays within what was agreed");
            message = out;
        }
        self.answers.push_back(Tokens::decode(&message, 64).expect("well-formed"));
        if self.ordered {
            self.check_order();
        }
        // Every stage has made of its pages what the scheduler believes.
        let pages = self.scheduler.config().pages;
        for stage in &self.stages {
            assert_eq!(stage.stage().pages(), (pages, self.scheduler.empty_pages()));
        }
    }

    pub(super) fn answer(&mut self) -> bool {
        self.answer_at(Instant::ZERO)
    }

    pub(super) fn answer_at(&mut self, now: Instant) -> bool {
        let Some(tokens) = self.answers.pop_front() else { return false };
        let events = self.scheduler.tokens(now, tokens).expect("answers come in order");
        events.into_iter().for_each(|event| self.note(event));
        true
    }

    /// Whether rows of a request have ever run.
    pub(super) fn has_begun(&self, id: RequestId) -> bool {
        self.ended.contains_key(&id)
            || self.scheduler.sequences.values().any(|sequence| sequence.work.id == id && sequence.started.is_some())
    }

    /// Sequences that run and owe a single row, with their numbers.
    pub(super) fn owing(&self) -> BTreeMap<u64, SequenceId> {
        let sequences = self.scheduler.sequences.iter();
        sequences.filter(|(_, s)| s.tokens.len() == s.sent + 1).filter_map(|(key, s)| Some((*key, s.number?))).collect()
    }

    /// What one user sends begins in the order in which it came.
    fn check_order(&self) {
        let mut not_begun = BTreeSet::new();
        for sequence in self.scheduler.sequences.values().filter(|sequence| !sequence.paused) {
            let who = (sequence.work.client, sequence.work.priority);
            if sequence.started.is_none() {
                not_begun.insert(who);
            } else {
                assert!(!not_begun.contains(&who), "{:?}", self.scheduler);
            }
        }
    }

    /// Stages that stand go on with what they have in memory, except for keys; others are new.
    pub(super) fn restart(&mut self, depth: usize) {
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
        prefix_cache in prop::bool::weighted(0.9),
    ) {
        let context_tokens = 32;
        let config = SchedulerConfig { depth, rows_max, chunk_rows, sequences_max, pages, page_tokens: PAGE, context_tokens, requests_max: 64, prefix_cache };
        let limit = (context_tokens as usize).min(pages * PAGE);
        let mut world = World::new(config);
        let mut asked = BTreeMap::new();
        for (number, action) in actions.into_iter().enumerate() {
            match action {
                Action::Pause { which, wake } => {
                    let open = world.scheduler.requests();
                    if let Some(id) = open.get(which % open.len().max(1)) {
                        if wake {
                            world.scheduler.wake(*id);
                        } else {
                            world.scheduler.pause(*id);
                        }
                    }
                    // One that is woken comes after those that began meanwhile.
                    world.ordered = false;
                }
                Action::Submit { prompt, max_tokens, client, priority } => {
                    let id = RequestId(number as u128);
                    let fits = prompt.len() < limit;
                    let work = Work { client, priority, ..work(id.0, prompt.clone(), max_tokens) };
                    let taken = world.scheduler.submit(Instant::ZERO, work);
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
        for id in world.scheduler.requests() {
            world.scheduler.wake(id);
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

pub(super) fn config() -> SchedulerConfig {
    SchedulerConfig {
        depth: 1,
        rows_max: 8,
        chunk_rows: 8,
        sequences_max: 4,
        pages: 64,
        page_tokens: PAGE,
        context_tokens: 64,
        requests_max: 3,
        prefix_cache: true,
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

/// Runs a request to its end, and says how much of its prompt was there.
fn run_alone(world: &mut World, id: u128, prompt: &[u32]) -> u32 {
    world.scheduler.submit(Instant::ZERO, work(id, prompt.to_vec(), 3)).expect("fits");
    while world.send() {
        let events = world.scheduler.tokens(Instant::ZERO, world.answers.pop_front().expect("an answer")).expect("in order");
        for event in events {
            if let Event::Finished { timing, .. } = event {
                return timing.cached;
            }
        }
    }
    panic!("it does not end");
}

#[test]
fn what_was_run_before_is_not_run_again() {
    let mut world = World::new(config());
    let long: Vec<u32> = (1..18).collect();
    assert_eq!(run_alone(&mut world, 1, &long), 0);
    // Four full pages, of which the last one is left out if nothing would be left to run.
    assert_eq!(run_alone(&mut world, 2, &long), 16);
    assert_eq!(run_alone(&mut world, 3, &long[..16]), 12);
    assert_eq!(run_alone(&mut world, 4, &[&long[..9], &[60, 61, 62, 63]].concat()), 8);
    assert_eq!(run_alone(&mut world, 5, &[2; 16]), 0);
    assert_eq!(world.scheduler.free_pages(), 64);
    // What stages have is lost with them.
    world.restart(1);
    assert_eq!(world.scheduler.empty_pages(), 64);
    assert_eq!(run_alone(&mut world, 6, &long), 0);
    let mut without = World::new(SchedulerConfig { prefix_cache: false, ..config() });
    assert_eq!([run_alone(&mut without, 1, &long), run_alone(&mut without, 2, &long)], [0, 0]);
    assert_eq!(without.scheduler.empty_pages(), 64);
}

#[test]
fn a_prompt_is_shared_with_one_that_still_runs() {
    let mut world = World::new(SchedulerConfig { requests_max: 9, ..config() });
    let long: Vec<u32> = (1..18).collect();
    world.scheduler.submit(Instant::ZERO, work(1, long.clone(), 20)).expect("fits");
    while world.scheduler.known(RequestId(1)).expect("runs").1.is_empty() {
        assert!(world.send() && world.answer());
    }
    world.scheduler.submit(Instant::ZERO, work(2, long.clone(), 20)).expect("fits");
    let step = world.scheduler.next_step(Instant::ZERO).expect("there is work");
    let opened = |change: &Change| matches!(change, Change::Open(Open { sequence: 1, shared: Some(Shared { from: 0, tokens: 16 }), .. }));
    assert!(step.changes.len() == 1 && opened(&step.changes[0]), "{:?}", step.changes);
    assert_eq!(step.rows.iter().map(|row| (row.sequence.0, row.position)).collect::<Vec<_>>(), [(0, 17), (1, 16)]);
    world.run(&step);
    while world.answer() || world.send() {}
    assert_eq!(world.got[&RequestId(1)], world.got[&RequestId(2)]);
    assert_eq!(world.got[&RequestId(1)], expected(&long, 20, 64));
}

#[test]
fn what_is_kept_gives_way_to_what_runs() {
    // Of 16 pages one request needs all but one.
    let mut world = World::new(SchedulerConfig { pages: 16, ..config() });
    let big = |first: u32| (0..56).map(|i| (first + i) % 63 + 1).collect::<Vec<u32>>();
    assert_eq!([run_alone(&mut world, 1, &big(0)), run_alone(&mut world, 2, &big(20)), run_alone(&mut world, 3, &big(0))], [0, 0, 4]);
    // The last one has taken all but the first page of the one before it.
    assert_eq!(run_alone(&mut world, 4, &big(20)[..8]), 4);
    assert_eq!(world.scheduler.free_pages(), 16);
}

#[test]
fn a_cancelled_request_is_gone_from_the_stages_with_the_next_step() {
    let mut world = World::new(SchedulerConfig { prefix_cache: false, ..config() });
    world.scheduler.submit(Instant::ZERO, work(1, vec![5; 40], 20)).expect("fits");
    assert!(world.send() && world.answer() && world.send());
    // In the middle of its prompt, with a step under way.
    world.scheduler.finish(Instant::ZERO, RequestId(1), Finish::Cancelled).expect("runs");
    assert!(world.answer());
    let step = world.scheduler.next_step(Instant::ZERO).expect("something to say");
    assert_eq!((step.changes.as_slice(), step.rows.as_slice()), (&[Change::Free(0)][..], &[][..]));
    world.run(&step);
    assert_eq!(world.stages[0].stage().pages(), (64, 64));
    assert!(world.answer() && !world.send());
}

#[test]
fn changes_that_make_no_sense_are_refused() {
    let open = |sequence, shared| Change::Open(Open { sequence, prompt_tokens: 9, sampling: SamplingParams::default(), shared });
    let row = |sequence, position| Row { sequence: SequenceId(sequence), position, token: 1, sample: false };
    let refused = |changes: Vec<Change>, rows: Vec<Row>| {
        let mut stage = pipeline(1, 64, 16).remove(0);
        let (mut message, mut out) = (Vec::new(), Vec::new());
        let begin = Step { step: 0, changes: vec![open(0, None)], rows: (0..9).map(|position| row(0, position)).collect() };
        for step in [begin, Step { step: 1, changes, rows }] {
            step.encode(&mut message);
            if let Err(fault) = stage.step(&message, &mut out) {
                assert_eq!(step.step, 1);
                return fault.to_string();
            }
        }
        "nothing".to_owned()
    };
    let shared = |from, tokens| Shared { from, tokens };
    let keep = |prefix, from, tokens| Change::Keep { shared: shared(from, tokens), prefix };
    assert_eq!(refused(vec![open(1, Some(shared(0, 8))), keep(20, 1, 4), keep(21, 20, 4)], vec![row(1, 8)]), "nothing");
    assert!(refused(vec![open(1, Some(shared(5, 4)))], Vec::new()).contains("sequence 5 is shared without having been opened"));
    assert!(refused(vec![open(1, Some(shared(0, 12)))], Vec::new()).contains("12 tokens of sequence 0 cannot be shared"));
    assert!(refused(vec![open(1, Some(shared(0, 7)))], Vec::new()).contains("7 tokens"));
    assert!(refused(vec![open(0, Some(shared(0, 4)))], Vec::new()).contains("opened twice"));
    assert!(refused(vec![keep(0, 0, 4)], Vec::new()).contains("opened twice"));
    assert!(refused(vec![keep(20, 7, 4)], Vec::new()).contains("shared without"));
    assert!(refused(vec![keep(20, 0, 4), Change::Free(20), open(1, Some(shared(20, 4)))], Vec::new()).contains("20 is shared without"));
    assert!(refused(vec![keep(20, 0, 4)], vec![row(20, 4)]).contains("used without"));
    assert!(refused((20..277).map(|prefix| keep(prefix, 0, 4)).collect(), Vec::new()).contains("one prefix more"));
    assert!(refused((1..9).map(|sequence| open(sequence, None)).collect(), Vec::new()).contains("one more than agreed"));
    assert!(refused(vec![Change::Free(20)], Vec::new()).contains("freed without"));
}

#[test]
fn samplers_know_what_was_shared() {
    // Tokens of the prompt are as good as forbidden, also those whose rows another sequence has run.
    let prompt: Vec<u32> = (1..=20).map(|i| 2 * i).collect();
    let forbidding = |id| {
        let mut work = work(id, prompt.clone(), 12);
        work.sampling.repetition_penalty = 100.0;
        work
    };
    let run = |prefix_cache| {
        let mut world = World::new(SchedulerConfig { prefix_cache, ..config() });
        [1, 2].map(|id| {
            world.scheduler.submit(Instant::ZERO, forbidding(id)).expect("fits");
            while world.send() && world.answer() {}
            world.got.remove(&RequestId(id)).unwrap_or_default()
        })
    };
    let [first, second] = run(true);
    assert_eq!(first, second);
    assert_ne!(first, expected(&prompt, 12, 64), "it matters");
    assert_eq!([first, second], run(false));
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
