//! Both ends of a hop, and a channel on it, over ways that fail, heal and delay at random.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use proptest::prelude::*;

use super::estimate::{Estimate, Sample};
use super::follower::{Follower, Verdict};
use super::machine::*;
use crate::channel::machine::{Admission, Arrival, ReceiverMachine, SenderMachine};
use crate::env::Instant;
use crate::frame::{Fence, FrameClass, FrameHeader};

const SILENCE: u64 = 15;
const CALLER: usize = 0;
const FOLLOWER: usize = 1;

fn at(ms: u64) -> Instant {
    Instant::from_nanos(ms * 1_000_000)
}

fn ms(at: Instant) -> u64 {
    at.as_nanos() / 1_000_000
}

fn fence() -> Fence {
    Fence { instance: 5, ..Fence::default() }
}

fn options(patience: u64) -> PathOptions {
    PathOptions {
        patience: Duration::from_millis(patience),
        dial_max: Duration::from_millis(40),
        take_max: Duration::from_millis(30),
        stagger: Duration::from_millis(5),
        probe_interval: Duration::from_millis(100),
        retry_interval: Duration::from_millis(20),
        margin_percent: 25,
        settle: Duration::from_millis(50),
    }
}

#[derive(Debug, Clone)]
enum Message {
    Take(u64),
    Taken(u64),
    Data(FrameHeader),
    Grant(FrameHeader, Vec<u8>),
}

struct Way {
    up: bool,
    latency: u64,
    down_since: u64,
}

/// A link between both ends. Messages keep their order; behind a cut they wait until it is mended or an end has had enough.
struct Link {
    way: usize,
    /// What is under way to an end, and when it arrives.
    lanes: [VecDeque<(u64, Message)>; 2],
    open: [bool; 2],
    /// When an end learns that the other one has closed.
    closing: [Option<u64>; 2],
    /// How much longer than the silence limit an end takes to notice.
    slack: [u64; 2],
}

/// What is yet to become of an attempt.
enum Pending {
    Dial { due: u64, until: u64, number: u64, measure: bool, way: usize, answer_lost: bool },
    Measure { due: u64, until: u64, way: usize },
    Made { link: usize },
    Taking { link: usize, epoch: u64, until: u64 },
}

struct World {
    now: u64,
    caller: Caller,
    follower: Follower,
    ways: Vec<Way>,
    links: Vec<Link>,
    pending: BTreeMap<u64, Pending>,
    carrying: [Option<(u64, usize)>; 2],
    sender: SenderMachine,
    receiver: ReceiverMachine,
    repeat: bool,
    received: u64,
    target: u64,
    down: Option<Vec<(usize, String)>>,
    chance: u64,
    answers_lost: bool,
}

impl World {
    fn new(latencies: &[u64], patience: u64, seed: u64) -> Self {
        Self::with_spares(latencies, latencies.len(), patience, seed)
    }

    /// The ways from `spares` on are used only when nothing else works.
    fn with_spares(latencies: &[u64], spares: usize, patience: u64, seed: u64) -> Self {
        let estimate = Estimate::guess(Duration::from_millis(10), 1e9);
        let guess: Vec<Prospect> = (0..latencies.len()).map(|way| Prospect { estimate, spare: way >= spares }).collect();
        let ways = latencies.iter().map(|latency| Way { up: true, latency: *latency, down_since: 0 }).collect();
        Self {
            now: 0,
            caller: Caller::new(options(patience), &guess, at(0), at(patience)),
            follower: Follower::new(Duration::from_millis(patience)),
            ways,
            links: Vec::new(),
            pending: BTreeMap::new(),
            carrying: [None; 2],
            sender: SenderMachine::new(fence(), 4, 10),
            receiver: ReceiverMachine::new(fence(), 4, 10),
            repeat: false,
            received: 0,
            target: 0,
            down: None,
            chance: seed | 1,
            answers_lost: false,
        }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.chance ^= self.chance << 13;
        self.chance ^= self.chance >> 7;
        self.chance ^= self.chance << 17;
        self.chance % below
    }

    fn event(&mut self, event: Event) {
        let actions = self.caller.handle(at(self.now), event);
        self.act(actions);
    }

    fn act(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Dial { attempt, way, number, measure, until } => {
                    let due = self.now + 2 * self.ways[way].latency + self.random(2);
                    let answer_lost = self.answers_lost && self.random(4) == 0;
                    let dial = Pending::Dial { due, until: ms(until), number, measure, way, answer_lost };
                    assert!(self.pending.insert(attempt, dial).is_none());
                }
                Action::Take { attempt, epoch, until } => {
                    let Some(Pending::Made { link }) = self.pending.remove(&attempt) else { panic!("taken before it was made") };
                    let taking = self.pending.values().any(|pending| matches!(pending, Pending::Taking { .. }));
                    assert!(!taking, "two are taken at once");
                    self.send(link, FOLLOWER, Message::Take(epoch));
                    self.pending.insert(attempt, Pending::Taking { link, epoch, until: ms(until) });
                }
                Action::Drop { attempt } => {
                    let Some(Pending::Made { link }) = self.pending.remove(&attempt) else { panic!("dropped before it was made") };
                    self.close(link, CALLER);
                }
                Action::Carry { attempt, epoch } => {
                    let Some(Pending::Taking { link, epoch: asked, .. }) = self.pending.remove(&attempt) else { panic!("not taken") };
                    assert_eq!(epoch, asked);
                    if let Some((_, old)) = self.carrying[CALLER].replace((epoch, link)) {
                        self.close(old, CALLER);
                    }
                    self.sender.relink();
                    self.repeat = true;
                }
                Action::Down { reasons } => self.down = Some(reasons),
            }
        }
    }

    fn send(&mut self, link: usize, to: usize, message: Message) {
        let due = self.now + self.ways[self.links[link].way].latency;
        if self.links[link].open[1 - to] {
            self.links[link].lanes[to].push_back((due, message));
        }
    }

    /// An end closes a link; the other one hears of it when what was sent before has arrived.
    fn close(&mut self, link: usize, end: usize) {
        let latency = self.ways[self.links[link].way].latency;
        let link = &mut self.links[link];
        if std::mem::replace(&mut link.open[end], false) {
            link.lanes[end].clear();
            link.closing[1 - end] = Some(self.now + latency);
        }
    }

    fn end_of(&mut self, link: usize, end: usize, reason: &str) {
        self.close(link, end);
        let Some((epoch, _)) = self.carrying[end].filter(|(_, carrying)| *carrying == link) else { return };
        if end == CALLER {
            self.event(Event::Lost { epoch, reason: reason.to_owned() });
        } else {
            self.follower.lost(at(self.now), epoch, reason.to_owned());
        }
    }

    fn step(&mut self) {
        self.now += 1;
        self.dials();
        for link in 0..self.links.len() {
            for end in [CALLER, FOLLOWER] {
                self.deliver(link, end);
            }
        }
        self.chat();
        let actions = self.caller.tick(at(self.now));
        self.act(actions);
        let wake = self.caller.wake_at();
        assert!(self.down.is_some() || wake.is_none_or(|wake| wake > at(self.now)), "it would spin: {:?}", self.caller);
        self.check();
    }

    fn dials(&mut self) {
        let now = self.now;
        for attempt in self.pending.keys().copied().collect::<Vec<_>>() {
            let failed = |failure, reason: &str| Event::Failed { attempt, failure, reason: reason.to_owned() };
            let event = match self.pending[&attempt] {
                Pending::Dial { due, until, number, measure, way, answer_lost } if now >= due => {
                    if !self.ways[way].up {
                        if now < until {
                            continue;
                        }
                        failed(Failure::Unreached, "nobody there")
                    } else if !self.follower.window.expected().contains(&number) {
                        failed(Failure::Refused, "refused")
                    } else {
                        self.follower.window.used(number);
                        if answer_lost {
                            failed(Failure::Unknown, "the answer was lost")
                        } else if measure {
                            let due = now + 6 * self.ways[way].latency;
                            self.pending.insert(attempt, Pending::Measure { due, until, way });
                            self.event(Event::Made { attempt });
                            continue;
                        } else {
                            let slack = [self.random(SILENCE), self.random(SILENCE)];
                            self.links.push(Link { way, lanes: Default::default(), open: [true; 2], closing: [None; 2], slack });
                            self.pending.insert(attempt, Pending::Made { link: self.links.len() - 1 });
                            self.event(Event::Made { attempt });
                            continue;
                        }
                    }
                }
                Pending::Measure { due, until, way } if now >= due => {
                    if !self.ways[way].up && now < until {
                        continue;
                    }
                    match self.ways[way].up {
                        true => {
                            let rtt = Duration::from_millis(2 * self.ways[way].latency);
                            Event::Measured { attempt, sample: Sample { rtt, bytes_per_second: Some(1e9) } }
                        }
                        false => failed(Failure::Unknown, "cut while it was measured"),
                    }
                }
                Pending::Taking { link, until, .. } if now >= until || !self.links[link].open[CALLER] => {
                    self.close(link, CALLER);
                    failed(Failure::Unknown, "no answer")
                }
                _ => continue,
            };
            self.pending.remove(&attempt);
            self.event(event);
        }
    }

    fn deliver(&mut self, link: usize, end: usize) {
        if !self.links[link].open[end] {
            return;
        }
        let way = &self.ways[self.links[link].way];
        if !way.up {
            if self.now - way.down_since > SILENCE + self.links[link].slack[end] {
                self.end_of(link, end, "silent");
            }
            return;
        }
        while self.links[link].open[end] && self.links[link].lanes[end].front().is_some_and(|(due, _)| *due <= self.now) {
            let Some((_, message)) = self.links[link].lanes[end].pop_front() else { break };
            self.message(link, message);
        }
        let closed = self.links[link].closing[end].is_some_and(|due| due <= self.now);
        if closed && self.links[link].open[end] {
            self.end_of(link, end, "closed by the peer");
        }
    }

    fn message(&mut self, link: usize, message: Message) {
        match message {
            Message::Take(epoch) => match self.follower.take(epoch) {
                Verdict::Take => {
                    if let Some((_, old)) = self.carrying[FOLLOWER].replace((epoch, link)) {
                        self.close(old, FOLLOWER);
                    }
                    self.send(link, CALLER, Message::Taken(epoch));
                    self.receiver.relink();
                }
                Verdict::Stale => self.close(link, FOLLOWER),
            },
            Message::Taken(epoch) => {
                let taken = |pending: &Pending| matches!(pending, Pending::Taking { epoch: asked, .. } if *asked == epoch);
                let attempt = self.pending.iter().find(|(_, pending)| taken(pending)).map(|(attempt, _)| *attempt);
                if let Some(attempt) = attempt {
                    self.event(Event::Taken { attempt });
                }
            }
            Message::Data(header) => {
                assert_eq!(self.carrying[FOLLOWER].map(|(_, link)| link), Some(link), "something came over a link that was ended");
                match self.receiver.arrive(&header).expect("correct ends break no rule") {
                    Arrival::Expected => {
                        assert_eq!(header.sequence, self.received, "lost, repeated or out of order");
                        assert!(self.receiver.accept(&header));
                        self.received += 1;
                        self.receiver.release();
                    }
                    Arrival::Repeated | Arrival::Answer => {}
                    other => panic!("{other:?}"),
                }
            }
            Message::Grant(header, payload) => {
                if self.carrying[CALLER].map(|(_, link)| link) != Some(link) {
                    // Comes behind the answer that the caller has not dealt with.
                    return;
                }
                self.sender.granted(&header, &payload).expect("correct ends break no rule");
                if self.repeat && !self.sender.is_relinking() {
                    self.repeat = false;
                    for sequence in self.sender.unacked() {
                        self.send(link, FOLLOWER, Message::Data(data(sequence)));
                    }
                }
            }
        }
    }

    /// Both ends of the channel say what they have to say.
    fn chat(&mut self) {
        if let Some((_, link)) = self.carrying[CALLER].filter(|_| !self.repeat) {
            match self.sender.admit(1) {
                Admission::Now if self.sender.unacked().end < self.target => {
                    let header = self.sender.commit(0, 0, 1, 0);
                    self.send(link, FOLLOWER, Message::Data(header));
                }
                Admission::Probe => {
                    let probe = self.sender.probe();
                    self.send(link, FOLLOWER, Message::Data(probe));
                }
                _ => {}
            }
        }
        if let Some((_, link)) = self.carrying[FOLLOWER]
            && (self.receiver.grant_due() || self.receiver.grant_useful())
            && self.links[link].open[FOLLOWER]
        {
            let (header, payload) = self.receiver.grant();
            self.send(link, CALLER, Message::Grant(header, payload.to_vec()));
        }
    }

    fn check(&self) {
        let epoch = |end: usize| self.carrying[end].map_or(0, |(epoch, _)| epoch);
        assert!(epoch(CALLER) <= epoch(FOLLOWER), "the sender uses a link before the receiver has ended the one before");
        assert!(self.received <= self.sender.unacked().end);
    }

    fn set(&mut self, way: usize, up: bool) {
        let now = self.now;
        let way = &mut self.ways[way];
        if way.up && !up {
            way.down_since = now;
        }
        way.up = up;
    }

    fn run(&mut self, steps: u64) {
        for _ in 0..steps {
            self.step();
        }
    }
}

fn data(sequence: u64) -> FrameHeader {
    FrameHeader { class: FrameClass::Data, kind: 0, flags: 0, length: 1, sequence, fence: fence(), crc32c: 0 }
}

#[derive(Debug, Clone, Copy)]
enum Fault {
    None,
    Cut(usize),
    Mend(usize),
    /// The link in use breaks at one end: damaged bytes, a completion error.
    Break(usize),
    Latency(usize, u64),
}

fn faults() -> impl Strategy<Value = Vec<(Fault, u64)>> {
    let fault = prop_oneof![
        3 => Just(Fault::None),
        3 => (0usize..3).prop_map(Fault::Cut),
        3 => (0usize..3).prop_map(Fault::Mend),
        2 => (0usize..2).prop_map(Fault::Break),
        1 => (0usize..3, 1u64..12).prop_map(|(way, latency)| Fault::Latency(way, latency)),
    ];
    prop::collection::vec((fault, 1u64..60), 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn nothing_is_lost_and_the_best_way_is_found_again(faults in faults(), seed in any::<u64>(), answers_lost in any::<bool>()) {
        let mut world = World::new(&[1, 3, 6], 1_000_000, seed);
        world.target = u64::MAX;
        world.answers_lost = answers_lost;
        for (fault, steps) in faults {
            match fault {
                Fault::None => {}
                Fault::Cut(way) => world.set(way, false),
                Fault::Mend(way) => world.set(way, true),
                Fault::Break(end) => {
                    if let Some((_, link)) = world.carrying[end] && world.links[link].open[end] {
                        world.end_of(link, end, "damaged");
                    }
                }
                Fault::Latency(way, latency) => world.ways[way].latency = latency,
            }
            world.run(steps);
        }
        world.answers_lost = false;
        for (way, latency) in [1, 3, 6].into_iter().enumerate() {
            world.set(way, true);
            world.ways[way].latency = latency;
        }
        // Failures stretch the wait for a way to 32 × 50 ms, and it takes measurements before.
        world.run(8000);
        prop_assert!(world.down.is_none());
        prop_assert_eq!(world.caller.current().map(|(_, way)| way), Some(0), "{:?}", world.caller);
        prop_assert_eq!(world.carrying[CALLER].map(|(epoch, _)| epoch), world.carrying[FOLLOWER].map(|(epoch, _)| epoch));
        world.target = world.sender.unacked().end;
        world.run(100);
        prop_assert_eq!(world.received, world.target, "everything arrives in the end");
        prop_assert!(world.received > 1000);
    }
}

#[test]
fn the_best_way_is_left_when_it_is_cut_and_taken_back_when_it_is_mended() {
    let mut world = World::new(&[1, 4], 500, 1);
    world.target = u64::MAX;
    world.run(50);
    assert_eq!(world.caller.current(), Some((1, 0)));
    let links = world.links.len();
    world.run(2000);
    assert_eq!((world.caller.current(), world.links.len()), (Some((1, 0)), links), "a good link is left alone");
    world.set(0, false);
    world.run(2 * SILENCE + 60);
    assert_eq!(world.caller.current().map(|(_, way)| way), Some(1));
    let received = world.received;
    world.run(200);
    assert!(world.received > received, "it goes on");
    world.set(0, true);
    world.run(20);
    assert_eq!(world.caller.current().map(|(_, way)| way), Some(1), "not at once");
    world.run(600);
    assert_eq!(world.caller.current().map(|(_, way)| way), Some(0));
}

#[test]
fn a_spare_way_is_used_only_while_nothing_else_works() {
    // It would be the best.
    let mut world = World::with_spares(&[4, 1], 1, 500, 1);
    world.target = u64::MAX;
    world.run(2000);
    assert_eq!((world.caller.current(), world.caller.way(1).map(|(way, _)| way.is_measured())), (Some((1, 0)), Some(false)));
    world.set(0, false);
    world.run(2 * SILENCE + 60);
    assert_eq!(world.caller.current().map(|(_, way)| way), Some(1));
    world.set(0, true);
    world.run(1000);
    assert_eq!(world.caller.current().map(|(_, way)| way), Some(0));
}

#[test]
fn a_way_that_flaps_is_trusted_less_and_less() {
    let mut world = World::new(&[1, 6], 500, 1);
    let mut waits = Vec::new();
    world.run(50);
    for _ in 0..4 {
        assert_eq!(world.caller.current().map(|(_, way)| way), Some(0));
        world.set(0, false);
        world.run(2 * SILENCE + 100);
        assert_eq!(world.caller.current().map(|(_, way)| way), Some(1), "{:?}", world.caller);
        world.set(0, true);
        let mended = world.now;
        while world.caller.current().map(|(_, way)| way) != Some(0) {
            world.step();
            assert!(world.now < mended + 5000);
        }
        waits.push(world.now - mended);
    }
    assert!(waits[3] > 2 * waits[0], "{waits:?}");
}

#[test]
fn a_hop_without_any_way_is_given_up_with_the_reason_of_each() {
    let mut world = World::new(&[1, 2], 100, 1);
    world.run(50);
    for way in [0, 1] {
        world.set(way, false);
    }
    world.run(SILENCE + 99);
    assert!(world.down.is_none(), "not before its patience is over");
    world.run(SILENCE + 5);
    let reasons = world.down.clone().expect("it is down");
    assert_eq!(reasons.iter().map(|(way, _)| *way).collect::<Vec<_>>(), [0, 1]);
    assert!(reasons.iter().any(|(_, reason)| reason == "nobody there"), "{reasons:?}");
    assert_eq!(world.follower.down(at(world.now)), Some("silent"));
    world.set(0, true);
    world.run(200);
    assert_eq!(world.caller.current(), None, "what is given up is given up");
}

#[test]
fn a_peer_that_does_not_want_the_hop_any_more_is_believed() {
    let mut world = World::new(&[1, 2], 1_000_000, 1);
    world.run(50);
    // It expects nothing that this end has.
    for number in 1..200 {
        world.follower.window.used(number);
    }
    let (_, link) = world.carrying[FOLLOWER].expect("a link");
    world.end_of(link, FOLLOWER, "stopped");
    world.run(300);
    let reasons = world.down.expect("it is down");
    assert!(reasons.iter().any(|(_, reason)| reason == "refused"), "{reasons:?}");
}

#[test]
fn large_messages_take_the_wide_way_and_small_ones_the_short_one() {
    let near = Sample { rtt: Duration::from_millis(1), bytes_per_second: Some(1e8) };
    let wide = Sample { rtt: Duration::from_millis(4), bytes_per_second: Some(1e9) };
    for (bytes, best) in [(1000, 0), (50_000_000, 1)] {
        let guess = [Prospect { estimate: Estimate::guess(Duration::from_millis(2), 1e9), spare: false }; 2];
        let mut caller = Caller::new(options(500), &guess, at(0), at(500));
        let mut now = 0;
        let mut actions = caller.handle(at(0), Event::Message { bytes });
        // What is dialled is made and measured at once, and what is asked for is granted.
        for _ in 0..1000 {
            now += 1;
            actions.extend(caller.tick(at(now)));
            while let Some(action) = actions.pop() {
                match action {
                    Action::Dial { attempt, way, measure, .. } => {
                        actions.extend(caller.handle(at(now), Event::Made { attempt }));
                        if measure {
                            let sample = if way == 0 { near } else { wide };
                            actions.extend(caller.handle(at(now), Event::Measured { attempt, sample }));
                        }
                    }
                    Action::Take { attempt, .. } => actions.extend(caller.handle(at(now), Event::Taken { attempt })),
                    _ => {}
                }
            }
        }
        assert_eq!(caller.current().map(|(_, way)| way), Some(best), "for messages of {bytes} bytes");
    }
}
