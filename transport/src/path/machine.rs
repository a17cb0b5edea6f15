//! The dialling end of a hop: which way to the peer carries it, when another one takes its place, and what is measured.
//!
//! It has no I/O and no clock. The shell hands it what happened and does what it says; it looks in again at
//! [`Caller::wake_at`].
//!
//! Every way to the peer ([`Action::Dial`] names it by its number) is measured now and then over a link of its own, that in
//! use like the others, so that their numbers can be compared. What a message of the usual size would cost on each decides: the
//! cheapest is used when there is no link; while there is one, another way must have been cheaper by a margin, for a while,
//! before it takes over, and for longer the more often it has failed lately.
//!
//! A link is made in two strokes. Several may be dialled at a time, but only one is being *taken* ([`Action::Take`]): the
//! accepting end is asked to end the link before it and to go on with this one, under an epoch that no other attempt has.
//! So the accepting end has ended the old link before this end uses the new one, whoever noticed what first; and what
//! becomes of an attempt whose answer is lost does no harm, because the next one has a higher epoch.

use std::collections::BTreeMap;
use std::time::Duration;

use super::estimate::{Estimate, Sample};
pub use super::terms::{Action, Event, Failure, PathOptions, Prospect};
use super::tickets::Numbers;
use crate::env::Instant;

/// Links that are dialled at a time while there is none.
const DIALS_MAX: usize = 4;
/// Pause before a way that failed is tried again while there is no link.
const RETRY: Duration = Duration::from_millis(100);
/// Costs that differ by less than this are equal, in nanoseconds: less than what shared memory saves beside a socket of the same
/// machine that is not busy.
const NOISE_NS: f64 = 2_000.0;
/// Tries of each way before a hop that never had a link is given up, if they all fail at once.
const FIRST_TRIES: u32 = 4;
/// After so many staggers a spare way is tried, too.
const SPARE_STAGGERS: u32 = 6;
/// How many doublings the wait for a way that fails again and again is stretched by.
const DOUBLINGS_MAX: u32 = 5;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Measuring,
    Dialling,
    Made,
    Taking { epoch: u64 },
}

#[derive(Debug, Clone)]
struct Attempt {
    way: usize,
    number: u64,
    stage: Stage,
}

#[derive(Debug, Clone)]
struct Way {
    estimate: Estimate,
    spare: bool,
    /// Why it is not to be had, since it was last tried.
    failed: Option<String>,
    /// Whether it has ever been there.
    known: bool,
    /// Whether nobody listens there any more, as the last try since the link was lost has shown.
    gone: bool,
    /// Failures in a row.
    failures: u32,
    /// How often it has failed under way, lately.
    losses: u32,
    /// When it is measured next.
    next: Instant,
    /// Since when it has been better than the one in use.
    better_since: Option<Instant>,
    /// Tries since there is no link.
    tries: u32,
}

#[derive(Debug, Clone, Copy)]
struct Current {
    epoch: u64,
    way: usize,
    since: Instant,
}

/// The dialling end.
#[derive(Debug, Clone)]
pub struct Caller {
    options: PathOptions,
    ways: Vec<Way>,
    attempts: BTreeMap<u64, Attempt>,
    attempt: u64,
    epoch: u64,
    numbers: Numbers,
    current: Option<Current>,
    /// When the hop is given up, if there is no link by then.
    limit: Instant,
    /// While there is no link: when the next way is tried beside those under way.
    next_dial: Instant,
    message_bytes: u64,
    down: bool,
}

impl Caller {
    /// A hop with these ways, in order of preference as long as nothing is measured. The first link must come by `limit`.
    pub fn new(options: PathOptions, ways: &[Prospect], now: Instant, limit: Instant) -> Self {
        let way = |prospect: &Prospect| Way {
            estimate: prospect.estimate,
            spare: prospect.spare,
            failed: None,
            known: false,
            gone: false,
            failures: 0,
            losses: 0,
            next: if prospect.spare { now + options.stagger * SPARE_STAGGERS } else { now },
            better_since: None,
            tries: u32::from(prospect.spare),
        };
        Self {
            options,
            ways: ways.iter().map(way).collect(),
            attempts: BTreeMap::new(),
            attempt: 0,
            epoch: 0,
            numbers: Numbers::default(),
            current: None,
            limit,
            next_dial: now,
            message_bytes: 4096,
            down: false,
        }
    }

    /// The epoch and the way that carry the hop.
    pub fn current(&self) -> Option<(u64, usize)> {
        self.current.map(|current| (current.epoch, current.way))
    }

    /// What is known of a way, and why it is not to be had, if so.
    pub fn way(&self, way: usize) -> Option<(&Estimate, Option<&str>)> {
        self.ways.get(way).map(|way| (&way.estimate, way.failed.as_deref()))
    }

    /// Something happened.
    pub fn handle(&mut self, now: Instant, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.down {
            if let Event::Made { attempt } = event {
                actions.push(Action::Drop { attempt });
            }
            return actions;
        }
        match event {
            Event::Made { attempt } => self.made(attempt),
            Event::Measured { attempt, sample } => self.measured(now, attempt, sample),
            Event::Taken { attempt } => self.taken(now, attempt, &mut actions),
            Event::Failed { attempt, failure, reason } => self.failed(now, attempt, failure, reason),
            Event::Lost { epoch, reason } => self.lost(now, epoch, reason),
            Event::Traffic { bytes, over } => {
                if let Some(current) = self.current {
                    self.ways[current.way].estimate.carried(bytes, over);
                }
            }
            Event::Message { bytes } => self.message_bytes = bytes,
        }
        self.go_on(now, &mut actions);
        actions
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        if !self.down {
            self.go_on(now, &mut actions);
        }
        actions
    }

    /// When to [`Caller::tick`], if nothing happens before. None: only something that happens makes a difference.
    pub fn wake_at(&self) -> Option<Instant> {
        let idle = |index: &usize| !self.is_busy(*index);
        match self.current {
            _ if self.down => None,
            None if self.dials() >= DIALS_MAX => Some(self.limit),
            None => {
                let retry = (0..self.ways.len()).filter(idle).map(|index| self.ways[index].next).min().unwrap_or(self.limit);
                Some(self.limit.min(if self.dials() == 0 { retry } else { retry.max(self.next_dial) }))
            }
            Some(_) => {
                let probes = (0..self.ways.len()).filter(|index| self.is_measured_now(*index)).map(|index| self.ways[index].next);
                let better = (0..self.ways.len()).filter_map(|index| self.ways[index].better_since.map(|since| since + self.settle(index)));
                if self.attempts.is_empty() { probes.chain(better).min() } else { None }
            }
        }
    }

    fn is_busy(&self, way: usize) -> bool {
        self.attempts.values().any(|attempt| attempt.way == way)
    }

    /// Whether a way may be measured while there is a link.
    fn is_measured_now(&self, way: usize) -> bool {
        !self.is_busy(way) && (!self.ways[way].spare || self.current.is_some_and(|current| current.way == way))
    }

    /// Links under way that are meant to carry.
    fn dials(&self) -> usize {
        self.attempts.values().filter(|attempt| attempt.stage != Stage::Measuring).count()
    }

    fn made(&mut self, attempt: u64) {
        let Some(Attempt { way, number, stage }) = self.attempts.get_mut(&attempt) else { return };
        self.numbers.made(*number);
        if *stage == Stage::Dialling {
            *stage = Stage::Made;
            let way = &mut self.ways[*way];
            way.failed = None;
            way.known = true;
            way.gone = false;
            way.failures = 0;
        }
    }

    fn measured(&mut self, now: Instant, attempt: u64, sample: Sample) {
        let Some(Attempt { way, .. }) = self.attempts.remove(&attempt) else { return };
        let way = &mut self.ways[way];
        way.failed = None;
        way.known = true;
        way.failures = 0;
        way.estimate.take(sample);
        // Where there is no link, it is to be had at once.
        way.next = if self.current.is_some() { now + self.options.probe_interval } else { now };
    }

    fn taken(&mut self, now: Instant, attempt: u64, actions: &mut Vec<Action>) {
        let Some(Attempt { way: index, stage: Stage::Taking { epoch }, .. }) = self.attempts.remove(&attempt) else { return };
        self.current = Some(Current { epoch, way: index, since: now });
        for (order, way) in (0..).zip(&mut self.ways) {
            way.better_since = None;
            if !way.estimate.is_measured() || order == index {
                // Ways that were not needed are looked at soon, one after the other.
                way.next = way.next.max(now + self.options.retry_interval * (order as u32 + 1));
            }
        }
        actions.push(Action::Carry { attempt, epoch });
    }

    fn failed(&mut self, now: Instant, attempt: u64, failure: Failure, reason: String) {
        let Some(Attempt { way: index, number, stage }) = self.attempts.remove(&attempt) else { return };
        if matches!(stage, Stage::Measuring | Stage::Dialling) {
            match failure {
                Failure::Refused => self.numbers.refused(number),
                Failure::Unreached | Failure::Gone => self.numbers.unused(number),
                Failure::Unknown => self.numbers.failed(number),
            }
        }
        let carries = self.current.is_some_and(|current| current.way == index);
        let options = self.options;
        let way = &mut self.ways[index];
        way.failures = way.failures.saturating_add(1);
        way.gone = failure == Failure::Gone;
        let pause = match (failure, self.current) {
            // The next number may be the right one.
            (Failure::Refused, None) => Duration::ZERO,
            (_, None) => RETRY.min(options.retry_interval),
            _ => {
                let longest = options.probe_interval * if way.known { 1 } else { 6 };
                (options.retry_interval * 2_u32.pow(way.failures.min(2 * DOUBLINGS_MAX) - 1)).min(longest)
            }
        };
        way.next = now + pause;
        if carries {
            // It carries the hop, so it is there, whatever became of the measurement.
            return;
        }
        way.failed = Some(reason);
        way.better_since = None;
        way.estimate.forget();
    }

    fn lost(&mut self, now: Instant, epoch: u64, reason: String) {
        let Some(current) = self.current.filter(|current| current.epoch == epoch) else { return };
        self.current = None;
        self.limit = now + self.options.patience;
        let replaced = self.attempts.values().any(|attempt| matches!(attempt.stage, Stage::Taking { .. }));
        self.next_dial = if replaced { now + self.options.stagger } else { now };
        let lasting = now.since(current.since) > self.settle(current.way) * 8;
        for way in &mut self.ways {
            way.better_since = None;
            way.gone = false;
            way.tries = u32::from(way.spare);
            way.next = if way.spare { now + self.options.stagger * SPARE_STAGGERS } else { now };
        }
        let way = &mut self.ways[current.way];
        if replaced {
            // The accepting end ends it when it goes on with another one.
            return;
        }
        way.losses = if lasting { 1 } else { way.losses.saturating_add(1) };
        way.failures = way.failures.saturating_add(1);
        way.failed = Some(reason);
        way.estimate.forget();
        // The others come first.
        way.tries = 1;
    }

    /// For how long a way must have been better than the one in use.
    fn settle(&self, way: usize) -> Duration {
        self.options.settle * 2_u32.pow(self.ways[way].losses.min(DOUBLINGS_MAX))
    }

    fn is_better(&self, index: usize, current: usize) -> bool {
        let (way, now) = (&self.ways[index], &self.ways[current]);
        let keep = 1.0 - f64::from(self.options.margin_percent.min(99)) / 100.0;
        let there = index != current && !way.spare && way.failed.is_none() && way.estimate.is_measured();
        there && now.spare
            || there
            // Nothing is held against a guess.
            && (now.estimate.is_measured() || now.failures > 0)
            && way.estimate.cost_ns(self.message_bytes) + NOISE_NS < now.estimate.cost_ns(self.message_bytes) * keep
    }

    fn go_on(&mut self, now: Instant, actions: &mut Vec<Action>) {
        match self.current {
            None => self.find(now, actions),
            Some(current) => self.watch(now, current, actions),
        }
    }

    /// There is no link: the hop needs one at once.
    fn find(&mut self, now: Instant, actions: &mut Vec<Action>) {
        // A hop that had a link waits for its ways to come back; before the first, what does not answer is not there.
        let hopeless = self.epoch == 0 && self.attempts.is_empty() && self.ways.iter().all(|way| way.tries >= FIRST_TRIES);
        if now >= self.limit || self.numbers.is_unwanted() || hopeless || self.is_deserted() {
            self.down = true;
            let made = self.attempts.iter().filter(|(_, attempt)| attempt.stage == Stage::Made);
            actions.extend(made.map(|(attempt, _)| Action::Drop { attempt: *attempt }));
            let reason = |way: &Way| way.failed.clone().unwrap_or_else(|| "no answer in time".to_owned());
            actions.push(Action::Down { reasons: self.ways.iter().map(reason).enumerate().collect() });
            return;
        }
        self.take_best(now, actions);
        while self.dials() < DIALS_MAX && (self.dials() == 0 || now >= self.next_dial) {
            let bytes = self.message_bytes;
            let idle = (0..self.ways.len()).filter(|index| !self.is_busy(*index) && self.ways[*index].next <= now);
            let worth = |index: &usize| (self.ways[*index].tries, self.ways[*index].estimate.cost_ns(bytes));
            let best = idle.min_by(|a, b| {
                let ((tries_a, cost_a), (tries_b, cost_b)) = (worth(a), worth(b));
                tries_a.cmp(&tries_b).then(cost_a.total_cmp(&cost_b))
            });
            let Some(way) = best else { break };
            if !self.dial(now, way, Stage::Dialling, actions) {
                // All tickets are being tried; one of them will be free soon.
                for way in &mut self.ways {
                    way.next = way.next.max(now + self.options.stagger);
                }
                break;
            }
            self.ways[way].tries += 1;
            self.next_dial = now + self.options.stagger;
        }
    }

    /// Whether the peer's process has ended: nobody listens any more at the end of any way that ever led to it. A cable that is out
    /// does not look like that.
    fn is_deserted(&self) -> bool {
        let mut led = self.ways.iter().filter(|way| way.known && !way.spare).peekable();
        let made = |attempt: &Attempt| matches!(attempt.stage, Stage::Made | Stage::Taking { .. });
        self.epoch > 0 && led.peek().is_some() && led.all(|way| way.gone) && !self.attempts.values().any(made)
    }

    /// Has the best of the links that were made taken, unless one is being taken.
    fn take_best(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.attempts.values().any(|attempt| matches!(attempt.stage, Stage::Taking { .. })) {
            return;
        }
        let made = self.attempts.iter().filter(|(_, attempt)| attempt.stage == Stage::Made);
        let cost = |way: usize| self.ways[way].estimate.cost_ns(self.message_bytes);
        let best = made.min_by(|(_, a), (_, b)| cost(a.way).total_cmp(&cost(b.way))).map(|(attempt, _)| *attempt);
        let Some(attempt) = best else { return };
        self.epoch += 1;
        let epoch = self.epoch;
        if let Some(taking) = self.attempts.get_mut(&attempt) {
            taking.stage = Stage::Taking { epoch };
        }
        actions.push(Action::Take { attempt, epoch, until: now + self.options.take_max });
    }

    /// There is a link: the others are measured, and one that is better for long enough takes over.
    fn watch(&mut self, now: Instant, current: Current, actions: &mut Vec<Action>) {
        if now.since(current.since) > self.settle(current.way) * 8 {
            self.ways[current.way].losses = 0;
        }
        for index in 0..self.ways.len() {
            let better = self.is_better(index, current.way);
            let way = &mut self.ways[index];
            way.better_since = if better { way.better_since.or(Some(now)) } else { None };
        }
        let made: Vec<u64> =
            self.attempts.iter().filter(|(_, attempt)| attempt.stage == Stage::Made).map(|(attempt, _)| *attempt).collect();
        for attempt in made {
            let wanted = self.attempts.get(&attempt).is_some_and(|made| self.ways[made.way].better_since.is_some());
            if !wanted {
                self.attempts.remove(&attempt);
                actions.push(Action::Drop { attempt });
            }
        }
        if self.dials() == 0 {
            let bytes = self.message_bytes;
            let settled = |index: &usize| self.ways[*index].better_since.is_some_and(|since| now >= since + self.settle(*index));
            let cost = |index: &usize| self.ways[*index].estimate.cost_ns(bytes);
            let best =
                (0..self.ways.len()).filter(|index| settled(index) && !self.is_busy(*index)).min_by(|a, b| cost(a).total_cmp(&cost(b)));
            if let Some(way) = best {
                self.dial(now, way, Stage::Dialling, actions);
            }
        }
        self.take_best(now, actions);
        // One at a time, so that measurements do not disturb each other.
        let due = (0..self.ways.len()).filter(|index| self.is_measured_now(*index) && self.ways[*index].next <= now);
        if self.attempts.is_empty()
            && let Some(way) = due.min_by_key(|index| self.ways[*index].next)
        {
            self.dial(now, way, Stage::Measuring, actions);
        }
    }

    fn dial(&mut self, now: Instant, way: usize, stage: Stage, actions: &mut Vec<Action>) -> bool {
        let Some(number) = self.numbers.draw() else { return false };
        self.attempt += 1;
        let attempt = self.attempt;
        self.attempts.insert(attempt, Attempt { way, number, stage });
        let measure = stage == Stage::Measuring;
        let until = now + self.options.dial_max;
        actions.push(Action::Dial { attempt, way, number, measure, until });
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: u64) -> Instant {
        Instant::ZERO + Duration::from_millis(milliseconds)
    }

    /// Plays a hop whose ways 0 and 1 have both been there; way 2 never was. Its link is lost after a second, and each way then
    /// fails as it is told. Says when it goes down.
    fn down_after(failures: [Failure; 3]) -> u64 {
        let way = Prospect { estimate: Estimate::guess(Duration::from_micros(100), 1e8), spare: false };
        let mut caller = Caller::new(PathOptions::default(), &[way; 3], at(0), at(15_000));
        let mut lost = None;
        let mut seen = [false; 3];
        for now in 0..10_000 {
            let mut actions = caller.tick(at(now));
            if lost.is_none() && now >= 1000 && seen[..2] == [true; 2] {
                let (epoch, _) = caller.current().expect("there is a link");
                actions.extend(caller.handle(at(now), Event::Lost { epoch, reason: "the process ended".to_owned() }));
                lost = Some(now);
            }
            while let Some(action) = actions.pop() {
                let event = match action {
                    Action::Dial { attempt, way, .. } if lost.is_some() || way == 2 => {
                        let failure = if lost.is_some() { failures[way] } else { Failure::Unreached };
                        Event::Failed { attempt, failure, reason: "no".to_owned() }
                    }
                    Action::Dial { attempt, way, measure, .. } => {
                        seen[way] = true;
                        if measure {
                            let sample = Sample { rtt: Duration::from_micros(100 + way as u64), bytes_per_second: Some(1e8) };
                            Event::Measured { attempt, sample }
                        } else {
                            Event::Made { attempt }
                        }
                    }
                    Action::Take { attempt, .. } => Event::Taken { attempt },
                    Action::Carry { .. } | Action::Drop { .. } => continue,
                    Action::Down { .. } => return now - lost.expect("it had a link"),
                };
                actions.extend(caller.handle(at(now), event));
            }
        }
        panic!("it did not go down")
    }

    #[test]
    fn a_peer_whose_process_has_ended_is_not_waited_for() {
        let patience = u64::try_from(PathOptions::default().patience.as_millis()).unwrap();
        assert!(down_after([Failure::Gone, Failure::Gone, Failure::Unreached]) < patience / 2);
        // One cable that is out, and nobody knows what is behind it.
        assert!(down_after([Failure::Unreached, Failure::Gone, Failure::Gone]) >= patience);
        assert!(down_after([Failure::Gone, Failure::Unknown, Failure::Gone]) >= patience);
    }
}
