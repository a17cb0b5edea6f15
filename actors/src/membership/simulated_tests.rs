//! Many machines in virtual time on a network that drops, delays, cuts and closes.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use proptest::prelude::*;

use super::Timing;
use super::message::{Message, test_card};
use super::swim::{Input, Output, Swim};
use super::view::{MemberEvent, MemberState};
use crate::dice::Dice;
use crate::env::Instant;
use crate::ids::{Incarnation, NodeId};

fn id(index: usize) -> NodeId {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&(index as u64 + 1).to_be_bytes());
    NodeId(bytes)
}

fn at(millis: u64) -> Instant {
    Instant::ZERO + Duration::from_millis(millis)
}

/// A message under way, or a thing that happens.
#[derive(Debug)]
enum Happening {
    Deliver { from: usize, to: usize, life: (u64, u64), message: Message },
    Connect { a: usize, b: usize },
    Closed { at: usize, peer: usize },
}

struct Host {
    swim: Option<Swim>,
    life: u64,
    paused_until: Instant,
    events: Vec<(Instant, MemberEvent)>,
    sent: u64,
}

struct Network {
    now: Instant,
    dice: Dice,
    hosts: Vec<Host>,
    queue: BinaryHeap<Reverse<(Instant, u64)>>,
    happenings: BTreeMap<u64, Happening>,
    next: u64,
    links: BTreeSet<(usize, usize)>,
    cut: BTreeSet<(usize, usize)>,
    /// Messages lost of a thousand.
    loss: u64,
    delay: Duration,
    timing: Timing,
}

fn pair(a: usize, b: usize) -> (usize, usize) {
    (a.min(b), a.max(b))
}

impl Network {
    fn new(count: usize, seed: u64) -> Self {
        Self::with(count, seed, Timing::default())
    }

    fn with(count: usize, seed: u64, timing: Timing) -> Self {
        let mut network = Self {
            now: Instant::ZERO,
            dice: Dice::new(seed),
            hosts: Vec::new(),
            queue: BinaryHeap::new(),
            happenings: BTreeMap::new(),
            next: 0,
            links: BTreeSet::new(),
            cut: BTreeSet::new(),
            loss: 0,
            delay: Duration::from_millis(2),
            timing,
        };
        for index in 0..count {
            network.hosts.push(Host { swim: None, life: 0, paused_until: Instant::ZERO, events: Vec::new(), sent: 0 });
            network.start(index);
        }
        network
    }

    fn start(&mut self, index: usize) {
        let host = &mut self.hosts[index];
        host.life += 1;
        let card = test_card(id(index), host.life);
        host.swim = Some(Swim::new(self.now, self.timing, card, self.dice.next()));
        host.events.clear();
        self.meet(index);
    }

    /// Dials as the peer book would: everybody up to the target.
    fn meet(&mut self, index: usize) {
        let mut others: Vec<usize> = (0..self.hosts.len()).filter(|other| *other != index).collect();
        self.dice.shuffle(&mut others);
        others.truncate(self.timing.mesh);
        for other in others {
            let soon = self.now + self.dice.jitter(Duration::from_millis(50));
            self.push(soon, Happening::Connect { a: index, b: other });
        }
    }

    fn push(&mut self, when: Instant, happening: Happening) {
        self.next += 1;
        self.queue.push(Reverse((when, self.next)));
        self.happenings.insert(self.next, happening);
    }

    fn crash(&mut self, index: usize, closes: bool) {
        self.hosts[index].swim = None;
        for other in 0..self.hosts.len() {
            if self.links.remove(&pair(index, other)) && closes {
                self.push(self.now + self.delay, Happening::Closed { at: other, peer: index });
            }
        }
    }

    fn pause(&mut self, index: usize, how_long: Duration) {
        self.hosts[index].paused_until = self.now + how_long;
    }

    fn isolate(&mut self, index: usize, cut: bool) {
        for other in (0..self.hosts.len()).filter(|other| *other != index) {
            if cut {
                self.cut.insert(pair(index, other));
            } else {
                self.cut.remove(&pair(index, other));
            }
        }
        if !cut {
            self.meet(index);
        }
    }

    fn step(&mut self, index: usize, input: Input) {
        let now = self.now;
        let host = &mut self.hosts[index];
        let Some(swim) = &mut host.swim else { return };
        let outputs = swim.step(now, input);
        let life = host.life;
        for output in outputs {
            match output {
                Output::Send { to, message } => {
                    let to = self.hosts.iter().enumerate().find(|(other, _)| id(*other) == to).unwrap().0;
                    self.hosts[index].sent += 1;
                    assert!(message.excess().is_none());
                    if !self.links.contains(&pair(index, to)) || self.cut.contains(&pair(index, to)) || self.dice.below(1000) < self.loss {
                        continue;
                    }
                    let when = now + self.dice.jitter(self.delay);
                    let life = (life, self.hosts[to].life);
                    self.push(when, Happening::Deliver { from: index, to, life, message });
                }
                Output::Event(event) => {
                    let view = self.hosts[index].swim.as_ref().unwrap().view();
                    if let MemberEvent::Joined { node, .. } = event {
                        assert!(view.card(node).is_some(), "who has joined has a card");
                    }
                    self.hosts[index].events.push((now, event));
                }
                Output::Want { peer, wanted: true, .. } => {
                    let peer = (0..self.hosts.len()).find(|other| id(*other) == peer).unwrap();
                    self.push(now + self.delay * 3, Happening::Connect { a: index, b: peer });
                }
                Output::Disconnect(peer) => {
                    let peer = (0..self.hosts.len()).find(|other| id(*other) == peer).unwrap();
                    self.links.remove(&pair(index, peer));
                    self.step(index, Input::Disconnected { peer: id(peer), broken: false });
                    if !self.cut.contains(&pair(index, peer)) {
                        self.push(now + self.delay, Happening::Closed { at: peer, peer: index });
                        // Both are heard of by their beacons, so they connect again if they have few connections.
                        let few = |host: usize| self.links.iter().filter(|(a, b)| *a == host || *b == host).count() < self.timing.mesh;
                        if few(index) || few(peer) {
                            self.push(now + Duration::from_millis(500), Happening::Connect { a: index, b: peer });
                        }
                    }
                }
                Output::Want { .. } | Output::Doubt { .. } | Output::View(_) | Output::Superseded => {}
            }
        }
    }

    fn run(&mut self, until: Instant) {
        loop {
            let timer = self.hosts.iter().enumerate().filter_map(|(index, host)| {
                let due = host.swim.as_ref()?.deadline();
                Some((due.max(host.paused_until).max(self.now), index))
            });
            let timer = timer.min();
            let message = self.queue.peek().map(|Reverse((when, _))| *when);
            match (timer, message) {
                (Some((when, index)), message) if when <= until && message.is_none_or(|message| when < message) => {
                    self.now = when;
                    self.step(index, Input::Tick);
                }
                (_, Some(when)) if when <= until => {
                    let Some(Reverse((when, number))) = self.queue.pop() else { return };
                    self.now = self.now.max(when);
                    if let Some(happening) = self.happenings.remove(&number) {
                        self.happen(happening);
                    }
                }
                _ => {
                    self.now = until;
                    return;
                }
            }
        }
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Deliver { from, to, life, message } => {
                if self.hosts[to].paused_until > self.now {
                    let when = self.hosts[to].paused_until;
                    return self.push(when, Happening::Deliver { from, to, life, message });
                }
                if (self.hosts[from].life, self.hosts[to].life) == life {
                    self.step(to, Input::Message { from: id(from), message });
                }
            }
            Happening::Connect { a, b } => {
                let there = |host: &Host| host.swim.is_some() && host.paused_until <= self.now;
                if !there(&self.hosts[a]) || !there(&self.hosts[b]) || self.cut.contains(&pair(a, b)) || !self.links.insert(pair(a, b)) {
                    return;
                }
                self.step(a, Input::Connected(id(b)));
                self.step(b, Input::Connected(id(a)));
            }
            Happening::Closed { at, peer } => {
                if self.hosts[at].paused_until > self.now {
                    let when = self.hosts[at].paused_until;
                    return self.push(when, Happening::Closed { at, peer });
                }
                if !self.links.contains(&pair(at, peer)) {
                    self.step(at, Input::Disconnected { peer: id(peer), broken: true });
                    self.push(self.now + Duration::from_millis(400), Happening::Connect { a: at, b: peer });
                }
            }
        }
    }

    fn state(&self, observer: usize, of: usize) -> Option<(MemberState, Incarnation)> {
        let view = self.hosts[observer].swim.as_ref()?.view();
        view.get(id(of)).map(|member| (member.state, member.card.incarnation))
    }

    fn assert_all_see(&self, of: usize, expected: MemberState) {
        for observer in (0..self.hosts.len()).filter(|observer| *observer != of && self.hosts[*observer].swim.is_some()) {
            let seen = self.state(observer, of);
            assert_eq!(seen.map(|(state, _)| state), Some(expected), "{observer} on {of} at {:?}", self.now);
            if expected == MemberState::Alive {
                assert_eq!(seen.map(|(_, life)| life.0), Some(self.hosts[of].life), "{observer} on {of}");
            }
        }
    }

    fn assert_converged(&self) {
        for of in 0..self.hosts.len() {
            let expected = if self.hosts[of].swim.is_some() { MemberState::Alive } else { MemberState::Dead };
            self.assert_all_see(of, expected);
        }
    }

    fn deaths(&self, observer: usize) -> usize {
        self.hosts[observer].events.iter().filter(|(_, event)| matches!(event, MemberEvent::Dead { .. })).count()
    }
}

#[test]
fn five_nodes_find_each_other_in_a_blink() {
    let mut network = Network::new(5, 1);
    network.run(at(200));
    network.assert_converged();
    let view = network.hosts[0].swim.as_ref().unwrap().view();
    assert_eq!(view.alive().count(), 5);
}

#[test]
fn a_killed_node_is_dead_for_all_within_a_second_and_a_silent_one_within_three() {
    for seed in 0..20 {
        let mut network = Network::new(5, seed);
        network.run(at(3000));
        network.crash(1, true);
        network.run(at(4000));
        network.assert_all_see(1, MemberState::Dead);
        network.crash(2, false);
        network.run(at(7000));
        network.assert_all_see(2, MemberState::Dead);
        network.assert_converged();
        assert_eq!(network.deaths(0), 2);
    }
}

#[test]
fn a_watched_node_that_falls_silent_is_dead_within_a_second_and_a_half() {
    for seed in 0..20 {
        let mut network = Network::new(3, seed);
        network.run(at(2000));
        network.step(0, Input::Watch { node: id(1), watched: true });
        network.run(at(4000));
        network.crash(1, false);
        network.run(at(5500));
        assert_eq!(network.state(0, 1).map(|(state, _)| state), Some(MemberState::Dead), "seed {seed}");
    }
}

#[test]
fn two_nodes_alone_notice_too() {
    let mut network = Network::new(2, 5);
    network.run(at(1000));
    network.crash(1, false);
    network.run(at(4000));
    network.assert_all_see(1, MemberState::Dead);
}

#[test]
fn nobody_is_suspected_on_a_good_network() {
    let mut network = Network::new(12, 3);
    for node in 1..5 {
        network.step(0, Input::Watch { node: id(node), watched: true });
    }
    network.run(at(120_000));
    network.assert_converged();
    for host in &network.hosts {
        assert!(host.events.iter().all(|(_, event)| matches!(event, MemberEvent::Joined { .. })), "{:?}", host.events);
    }
}

#[test]
fn a_restarted_node_replaces_its_old_self_at_once() {
    for closes in [false, true] {
        let mut network = Network::new(6, 9);
        network.run(at(2000));
        network.crash(3, closes);
        network.start(3);
        network.run(at(2300));
        network.assert_converged();
        for observer in [0, 1, 2, 4, 5] {
            let told: Vec<MemberEvent> =
                network.hosts[observer].events.iter().map(|(_, event)| *event).filter(|event| event.node() == id(3)).collect();
            let dead = told.iter().position(|event| *event == MemberEvent::Dead { node: id(3), incarnation: Incarnation(1) });
            let joined = told.iter().position(|event| *event == MemberEvent::Joined { node: id(3), incarnation: Incarnation(2) });
            assert!(dead.is_some() && dead < joined, "{told:?}");
        }
        network.run(at(20_000));
        network.assert_converged();
    }
}

#[test]
fn an_unplugged_node_is_dead_and_comes_back_when_plugged_in() {
    let mut network = Network::new(4, 11);
    network.run(at(2000));
    network.isolate(2, true);
    network.run(at(5000));
    network.assert_all_see(2, MemberState::Dead);
    assert_eq!(network.state(2, 0).map(|(state, _)| state), Some(MemberState::Dead), "to the one cut off the others are gone");
    network.isolate(2, false);
    network.run(at(5500));
    network.assert_converged();
    network.run(at(30_000));
    network.assert_converged();
}

#[test]
fn a_node_that_was_cut_off_kills_nobody_when_it_is_back() {
    for seed in 0..20 {
        let mut network = Network::new(4, seed);
        for (one, other) in [(0, 1), (1, 0)] {
            network.step(one, Input::Watch { node: id(other), watched: true });
        }
        network.run(at(2000));
        network.isolate(2, true);
        network.run(at(6000));
        network.isolate(2, false);
        network.run(at(20_000));
        network.assert_converged();
        for observer in [0, 1, 3] {
            assert_eq!(network.deaths(observer), 1, "seed {seed}, {observer}: {:?}", network.hosts[observer].events);
        }
    }
}

#[test]
fn a_node_that_was_suspended_comes_back_and_blames_nobody() {
    let mut network = Network::new(4, 13);
    network.run(at(2000));
    network.pause(1, Duration::from_secs(20));
    network.run(at(10_000));
    network.assert_all_see(1, MemberState::Dead);
    network.run(at(24_000));
    network.assert_converged();
}

#[test]
fn a_short_pause_is_forgiven() {
    let mut network = Network::new(5, 13);
    network.run(at(2000));
    network.pause(1, Duration::from_millis(700));
    network.run(at(8000));
    network.assert_converged();
    assert!((0..5).all(|observer| network.deaths(observer) == 0));
}

#[test]
fn one_bad_link_makes_nobody_dead() {
    let mut network = Network::new(4, 17);
    network.run(at(2000));
    network.cut.insert(pair(0, 1));
    network.step(0, Input::Watch { node: id(1), watched: true });
    network.run(at(30_000));
    assert!((0..4).all(|observer| network.deaths(observer) == 0), "others reach it");
    network.assert_converged();
}

#[test]
fn who_leaves_has_left() {
    let mut network = Network::new(4, 19);
    network.run(at(2000));
    network.step(2, Input::Leave);
    network.run(at(2100));
    network.crash(2, true);
    network.run(at(10_000));
    network.assert_all_see(2, MemberState::Left);
    assert!((0..4).all(|observer| network.deaths(observer) == 0));
    network.start(2);
    network.run(at(11_000));
    network.assert_converged();
}

#[test]
fn a_new_card_reaches_all() {
    let mut network = Network::new(40, 23);
    network.run(at(3000));
    for (round, free) in [1_u64, 2, 3].into_iter().enumerate() {
        let mut card = test_card(id(7), 1);
        card.memory_free_bytes = free;
        network.step(7, Input::Card(Box::new(card)));
        network.run(at(3050 + round as u64 * 10));
    }
    network.run(at(8000));
    for host in &network.hosts {
        let view = host.swim.as_ref().unwrap().view();
        assert_eq!(view.card(id(7)).unwrap().memory_free_bytes, 3);
    }
}

#[test]
fn the_cost_of_a_node_does_not_grow_with_the_cluster() {
    let sent = |count: usize| {
        let mut network = Network::with(count, 29, Timing { mesh: 8, ..Timing::default() });
        network.run(at(10_000));
        let before: u64 = network.hosts.iter().map(|host| host.sent).sum();
        network.run(at(20_000));
        let after: u64 = network.hosts.iter().map(|host| host.sent).sum();
        assert!((0..count).all(|observer| network.deaths(observer) == 0));
        network.assert_converged();
        (after - before) as f64 / count as f64 / 10.0
    };
    let (small, large) = (sent(20), sent(120));
    assert!(large < small * 2.0, "{small} messages a second in a small cluster, {large} in a large one");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Whatever goes wrong for a while, afterwards everybody agrees on who is there, and on which life.
    #[test]
    fn they_agree_once_the_trouble_is_over(
        seed in any::<u64>(),
        count in 2usize..9,
        loss in 0u64..400,
        delay in 1u64..80,
        faults in proptest::collection::vec((0usize..9, 0u8..5, 0u64..1500), 0..12),
    ) {
        let mut network = Network::new(count, seed);
        network.loss = loss;
        network.delay = Duration::from_millis(delay);
        network.run(at(2000));
        let mut down = BTreeSet::new();
        for (index, fault, pause) in faults {
            let index = index % count;
            match fault {
                0 => {
                    network.crash(index, pause % 2 == 0);
                    down.insert(index);
                }
                1 => {
                    network.crash(index, pause % 2 == 0);
                    network.start(index);
                    down.remove(&index);
                }
                2 => network.pause(index, Duration::from_millis(pause * 2)),
                3 => network.isolate(index, true),
                _ => network.isolate(index, false),
            }
            let until = network.now + Duration::from_millis(pause);
            network.run(until);
        }
        network.loss = 0;
        network.delay = Duration::from_millis(2);
        network.cut.clear();
        for index in 0..count {
            if !down.contains(&index) {
                network.meet(index);
            }
        }
        let mut until = network.now + Duration::from_secs(3);
        network.run(until);
        for index in 0..count {
            if !down.contains(&index) {
                network.meet(index);
            }
        }
        until = until + Duration::from_secs(25);
        network.run(until);
        for of in 0..count {
            for observer in (0..count).filter(|observer| *observer != of && network.hosts[*observer].swim.is_some()) {
                let seen = network.state(observer, of);
                if down.contains(&of) {
                    prop_assert!(seen.is_none_or(|(state, _)| state == MemberState::Dead), "{} on {}: {:?}", observer, of, seen);
                } else {
                    prop_assert_eq!(seen, Some((MemberState::Alive, Incarnation(network.hosts[of].life))), "{} on {}", observer, of);
                }
            }
        }
    }

    #[test]
    fn strange_messages_do_no_harm(messages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..120), 1..60)) {
        let mut swim = Swim::new(at(0), Timing::default(), test_card(id(0), 1), 1);
        swim.step(at(0), Input::Connected(id(1)));
        let mut now = at(0);
        for bytes in messages {
            now = now + Duration::from_millis(100);
            if let Ok(message) = postcard::from_bytes::<Message>(&bytes) {
                swim.step(now, Input::Message { from: id(1), message });
            }
            swim.step(now, Input::Tick);
            prop_assert!(swim.deadline() > now);
        }
    }
}
