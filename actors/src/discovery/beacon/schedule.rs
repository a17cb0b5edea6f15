//! When the beacon speaks, and whom it answers: a machine without I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::payload::{Hello, Kind};
use crate::dice::Dice;
use crate::env::{Family, Instant, Interface};
use crate::ids::{Incarnation, NodeId};

/// Delays before the first hellos on an interface that has come up: a newcomer is found at once even if a packet is
/// lost.
const BURST: [Duration; 3] = [Duration::from_millis(100), Duration::from_millis(250), Duration::from_millis(600)];
/// Time between hellos on an interface, in a small cluster.
const PERIOD: Duration = Duration::from_secs(1);
/// The most hellos a second that a node wants to hear; beyond it everybody speaks less often.
const HEARD_PER_SECOND_MAX: u64 = 50;
/// Time after which a silent peer counts as a newcomer again.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(30);
/// The shortest time between two answers to one address.
const ANSWER_PAUSE: Duration = Duration::from_millis(500);
/// The most answers within one [`PERIOD`], so that a storm of hellos makes no storm of answers.
const ANSWERS_MAX: u32 = 32;
/// The most senders that are remembered.
const SENDERS_MAX: usize = 2048;

/// What the schedule wants done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Send a hello to the group on an interface, naming this control port.
    Announce { interface: u32, family: Family, port: u16 },
    /// Answer one sender.
    Answer { to: SocketAddr, port: u16 },
    /// Tell the peer book.
    Found { peer: NodeId, incarnation: Incarnation, address: SocketAddr, wire_version: u32 },
}

#[derive(Debug)]
struct Sender {
    incarnation: Incarnation,
    heard: Instant,
    answered: Option<Instant>,
}

#[derive(Debug)]
struct Station {
    port: u16,
    sent: usize,
    due: Instant,
}

/// The schedule of one node.
#[derive(Debug)]
pub(crate) struct Schedule {
    me: NodeId,
    dice: Dice,
    interfaces: Vec<Interface>,
    listening: BTreeSet<SocketAddr>,
    stations: BTreeMap<(u32, Family), Station>,
    senders: BTreeMap<(NodeId, IpAddr), Sender>,
    answers: (Instant, u32),
}

impl Schedule {
    /// A schedule that sends nothing until it knows interfaces and a listening address.
    pub(crate) fn new(me: NodeId, seed: u64) -> Self {
        Self {
            me,
            dice: Dice::new(seed),
            interfaces: Vec::new(),
            listening: BTreeSet::new(),
            stations: BTreeMap::new(),
            senders: BTreeMap::new(),
            answers: (Instant::ZERO, 0),
        }
    }

    /// The control network listens at one more address.
    pub(crate) fn listening(&mut self, now: Instant, address: SocketAddr) {
        self.listening.insert(address);
        self.arrange(now);
    }

    /// The list of interfaces was read.
    pub(crate) fn interfaces(&mut self, now: Instant, interfaces: Vec<Interface>) {
        if self.interfaces != interfaces {
            self.interfaces = interfaces;
            self.arrange(now);
        }
    }

    /// The port at which the control network is reached through `ip`, one of the host's own addresses.
    fn port_at(&self, ip: IpAddr) -> Option<u16> {
        let exact = self.listening.iter().find(|at| at.ip() == ip);
        let any = || self.listening.iter().find(|at| at.ip().is_unspecified() && at.is_ipv4() == ip.is_ipv4());
        exact.or_else(any).map(SocketAddr::port)
    }

    fn arrange(&mut self, now: Instant) {
        let mut wanted = BTreeMap::new();
        for interface in &self.interfaces {
            for address in &interface.addresses {
                let family = match address.ip {
                    IpAddr::V4(_) => Family::V4,
                    // The group is link-local, so packets to it leave with the link-local address.
                    IpAddr::V6(ip) if ip.is_unicast_link_local() => Family::V6,
                    IpAddr::V6(_) => continue,
                };
                if let Some(port) = self.port_at(address.ip) {
                    wanted.entry((interface.index, family)).or_insert(port);
                }
            }
        }
        self.stations.retain(|place, _| wanted.contains_key(place));
        for (place, port) in wanted {
            let station = self.stations.entry(place).or_insert(Station { port, sent: 0, due: now });
            station.port = port;
        }
    }

    /// Time between hellos: it grows with the number of senders, so that nobody hears more than
    /// [`HEARD_PER_SECOND_MAX`] a second.
    fn period(&self) -> Duration {
        PERIOD.max(Duration::from_millis(self.senders.len() as u64 * 1000 / HEARD_PER_SECOND_MAX))
    }

    /// A packet of this cluster came in.
    pub(crate) fn heard(&mut self, now: Instant, from: SocketAddr, hello: &Hello) -> Vec<Action> {
        if hello.node == self.me || hello.port == 0 {
            return Vec::new();
        }
        let mut address = from;
        address.set_port(hello.port);
        let mut actions =
            vec![Action::Found { peer: hello.node, incarnation: hello.incarnation, address, wire_version: hello.wire_version }];
        let forgotten = FORGOTTEN_AFTER.max(self.period() * 5);
        let key = (hello.node, from.ip());
        if !self.senders.contains_key(&key) && self.senders.len() >= SENDERS_MAX {
            self.senders.retain(|_, sender| now.since(sender.heard) < forgotten);
            if self.senders.len() >= SENDERS_MAX {
                return actions;
            }
        }
        let mut newcomer = false;
        let sender = self.senders.entry(key).or_insert_with(|| {
            newcomer = true;
            Sender { incarnation: hello.incarnation, heard: now, answered: None }
        });
        newcomer |= sender.incarnation != hello.incarnation || now.since(sender.heard) > forgotten;
        sender.incarnation = hello.incarnation;
        sender.heard = now;
        if newcomer && hello.kind == Kind::Hello && sender.answered.is_none_or(|at| now.since(at) >= ANSWER_PAUSE) {
            if now.since(self.answers.0) >= PERIOD {
                self.answers = (now, 0);
            }
            if self.answers.1 < ANSWERS_MAX
                && let Some(port) = self.port_towards(from)
            {
                self.answers.1 += 1;
                if let Some(sender) = self.senders.get_mut(&key) {
                    sender.answered = Some(now);
                }
                actions.push(Action::Answer { to: from, port });
            }
        }
        actions
    }

    /// The control port for a peer at `to`: of the interface that shares its network, else of any in the family.
    fn port_towards(&self, to: SocketAddr) -> Option<u16> {
        let near = self.interfaces.iter().flat_map(|interface| &interface.addresses);
        let near = near.filter(|own| crate::discovery::address::same_network(own.ip, own.prefix, to.ip()));
        near.filter_map(|own| self.port_at(own.ip))
            .next()
            .or_else(|| self.listening.iter().find(|at| at.is_ipv4() == to.is_ipv4() && !at.ip().is_loopback()).map(SocketAddr::port))
    }

    /// Sends what is due.
    pub(crate) fn tick(&mut self, now: Instant) -> Vec<Action> {
        let period = self.period();
        let mut actions = Vec::new();
        for (&(interface, family), station) in &mut self.stations {
            if station.due > now {
                continue;
            }
            actions.push(Action::Announce { interface, family, port: station.port });
            let pause = BURST.get(station.sent).copied().unwrap_or_else(|| self.dice.jitter(period));
            station.sent = station.sent.saturating_add(1);
            station.due = now + pause;
        }
        let forgotten = FORGOTTEN_AFTER.max(period * 5);
        self.senders.retain(|_, sender| now.since(sender.heard) <= forgotten * 2);
        actions
    }

    /// When [`Schedule::tick`] has something to do, or `None` while there is nobody to speak to.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.stations.values().map(|station| station.due).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::InterfaceAddress;

    fn at(millis: u64) -> Instant {
        Instant::ZERO + Duration::from_millis(millis)
    }

    fn interface(index: u32, ip: &str) -> Interface {
        let addresses = vec![InterfaceAddress { ip: ip.parse().unwrap(), prefix: 24 }];
        Interface { index, name: format!("eth{index}"), addresses, loopback: false, point_to_point: false }
    }

    fn hello(node: u8, incarnation: u64, kind: Kind) -> Hello {
        Hello { wire_version: 1, kind, node: NodeId([node; 32]), incarnation: Incarnation(incarnation), port: 4000 }
    }

    fn schedule() -> Schedule {
        let mut schedule = Schedule::new(NodeId([1; 32]), 1);
        schedule.listening(at(0), "192.168.0.2:5000".parse().unwrap());
        schedule.interfaces(at(0), vec![interface(2, "192.168.0.2")]);
        schedule
    }

    #[test]
    fn hellos_come_fast_first_and_then_once_a_second() {
        let mut schedule = schedule();
        let mut times = Vec::new();
        while times.len() < 8 {
            let now = schedule.deadline().unwrap();
            times.push(now);
            assert_eq!(schedule.tick(now), [Action::Announce { interface: 2, family: Family::V4, port: 5000 }]);
        }
        assert!(times[3] <= at(1000), "four hellos in the first second: {times:?}");
        for pair in times[4..].windows(2) {
            let pause = pair[1].since(pair[0]);
            assert!(pause >= PERIOD * 3 / 4 && pause <= PERIOD * 5 / 4);
        }
    }

    #[test]
    fn a_cable_that_is_plugged_in_is_greeted_at_once() {
        let mut schedule = schedule();
        schedule.listening(at(0), "0.0.0.0:5000".parse().unwrap());
        schedule.tick(at(0));
        schedule.interfaces(at(50), vec![interface(2, "192.168.0.2"), interface(3, "169.254.7.7")]);
        assert_eq!(schedule.tick(at(50)), [Action::Announce { interface: 3, family: Family::V4, port: 5000 }]);
        schedule.interfaces(at(60), vec![interface(3, "169.254.7.7")]);
        assert!(schedule.tick(at(5000)).iter().all(|action| matches!(action, Action::Announce { interface: 3, .. })));
    }

    #[test]
    fn an_address_that_is_not_listened_at_is_not_announced() {
        let mut schedule = Schedule::new(NodeId([1; 32]), 1);
        schedule.listening(at(0), "127.0.0.1:5000".parse().unwrap());
        schedule.interfaces(at(0), vec![interface(2, "192.168.0.2")]);
        assert_eq!(schedule.deadline(), None);
    }

    #[test]
    fn newcomers_and_their_next_lives_are_answered_once_and_answers_never() {
        let mut schedule = schedule();
        let from: SocketAddr = "192.168.0.9:777".parse().unwrap();
        let answer = Action::Answer { to: from, port: 5000 };
        assert!(schedule.heard(at(0), from, &hello(2, 1, Kind::Hello)).contains(&answer));
        assert!(!schedule.heard(at(10), from, &hello(2, 1, Kind::Hello)).contains(&answer));
        assert!(schedule.heard(at(2000), from, &hello(2, 2, Kind::Hello)).contains(&answer), "it was started anew");
        assert!(!schedule.heard(at(2000), from, &hello(3, 1, Kind::Answer)).contains(&answer));
        assert!(schedule.heard(at(2000), from, &hello(1, 1, Kind::Hello)).is_empty(), "its own hello");
    }

    #[test]
    fn a_storm_is_bounded() {
        let mut schedule = schedule();
        let mut answers = 0;
        for node in 0..10_000_u32 {
            let mut hello = hello(0, 1, Kind::Hello);
            hello.node.0[..4].copy_from_slice(&node.to_le_bytes());
            let from = "192.168.0.9:777".parse().unwrap();
            answers += schedule.heard(at(1), from, &hello).iter().filter(|action| matches!(action, Action::Answer { .. })).count();
        }
        assert!(answers <= ANSWERS_MAX as usize);
        assert!(schedule.senders.len() <= SENDERS_MAX);
        assert!(schedule.period() >= Duration::from_secs(SENDERS_MAX as u64 / HEARD_PER_SECOND_MAX));
    }
}
