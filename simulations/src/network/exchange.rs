//! What connects the nodes of a world.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use shoal_actors::env::{
    BoxFuture, Connected, DisconnectReason, FRAME_BYTES_MAX, Network, NetworkConfig, NetworkError, NetworkEvent, NetworkFactory,
    NetworkSink, SendError,
};
use shoal_actors::ids::NodeId;

use super::hosts::{Hosts, pair};
use super::link::{LinkModel, Load, Packet, Wire};
use crate::world::World;

/// How long a dial goes on that nobody answers.
const DIAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Round trips of a handshake after the first packet: TCP, Noise, hello.
const HANDSHAKE: u32 = 3;
/// Pause between two announcements of a node that announces itself.
const ANNOUNCE_EVERY: Duration = Duration::from_secs(10);

/// How a node ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Crash {
    /// Its process dies, and the kernel closes its connections.
    Process,
    /// Its host loses power, and nobody is told.
    Power,
}

/// What connects the nodes of a world. Every clone is the same exchange.
#[derive(Clone)]
pub struct SimExchange {
    world: World,
    hosts: Arc<Mutex<Hosts>>,
}

impl SimExchange {
    /// An exchange without nodes.
    pub fn new(world: World, model: LinkModel) -> Self {
        Self { world, hosts: Arc::new(Mutex::new(Hosts::new(model))) }
    }

    fn hosts(&self) -> MutexGuard<'_, Hosts> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cuts the link between two nodes. Nobody notices.
    pub fn cut(&self, one: NodeId, other: NodeId) {
        let mut hosts = self.hosts();
        if hosts.cut.insert(pair(one, other)) {
            for (from, to) in [(one, other), (other, one)] {
                // What is on its way is lost, and waits to be sent again.
                hosts.wire(&self.world, from, to).epoch += 1;
            }
        }
    }

    /// Mends the link: what waited is sent again.
    pub fn mend(&self, one: NodeId, other: NodeId) {
        let mut hosts = self.hosts();
        if !hosts.cut.remove(&pair(one, other)) {
            return;
        }
        for (from, to) in [(one, other), (other, one)] {
            for _ in 0..hosts.wire(&self.world, from, to).packets.len() {
                self.travel(&mut hosts, from, to);
            }
        }
    }

    /// Whether the link between two nodes is cut.
    pub fn is_cut(&self, one: NodeId, other: NodeId) -> bool {
        self.hosts().is_cut(one, other)
    }

    /// Breaks the connection between two nodes, if there is one. Both learn it at once; the link is whole.
    pub fn sever(&self, one: NodeId, other: NodeId) {
        let mut hosts = self.hosts();
        for (end, peer) in [(one, other), (other, one)] {
            self.leave(&mut hosts, end, peer, DisconnectReason::Closed);
            hosts.wire(&self.world, end, peer).clear();
        }
    }

    /// Ends a node.
    pub fn crash(&self, node: NodeId, crash: Crash) {
        let mut hosts = self.hosts();
        self.remove(&mut hosts, node, crash == Crash::Process);
        if crash == Crash::Power {
            hosts.dark.insert(node);
            let others: Vec<NodeId> = hosts.numbers.keys().copied().filter(|other| *other != node).collect();
            for other in others {
                hosts.wire(&self.world, node, other).clear();
            }
        }
    }

    /// Which life of a node runs, if one does. Lives are numbered over all nodes.
    pub fn life(&self, node: NodeId) -> Option<u64> {
        self.hosts().running.get(&node).map(|host| host.life)
    }

    /// Whether a node's host is without power.
    pub fn is_dark(&self, node: NodeId) -> bool {
        self.hosts().dark.contains(&node)
    }

    /// The number of a node in the world; the highest for one that never ran.
    pub fn number(&self, node: NodeId) -> u16 {
        self.hosts().number(node)
    }

    /// The life whose frame was the last to get from one node to another, and when, in nanoseconds of the world.
    pub fn heard(&self, from: NodeId, to: NodeId) -> Option<(u64, u64)> {
        self.hosts().heard.get(&(from, to)).copied()
    }

    /// Delivers an event after what is due now.
    fn emit(&self, hosts: &Hosts, to: NodeId, event: NetworkEvent) {
        let Some(life) = hosts.running.get(&to).map(|host| host.life) else { return };
        let exchange = self.clone();
        self.world.at(self.world.now(), move || exchange.deliver(to, life, event));
    }

    /// Delivers an event: now, or when the node goes on.
    fn deliver(&self, to: NodeId, life: u64, event: NetworkEvent) {
        let (exchange, number) = (self.clone(), self.number(to));
        self.world.on_node(number, Box::new(move || exchange.hand_over(to, life, event)));
    }

    fn hand_over(&self, to: NodeId, life: u64, event: NetworkEvent) {
        let sink = {
            let hosts = self.hosts();
            let Some(host) = hosts.running.get(&to).filter(|host| host.life == life) else { return };
            let number = hosts.number(to);
            self.world.touch(number);
            match &event {
                NetworkEvent::Frame { peer, frame } => self.world.detail(2, hosts.number(*peer), number, frame),
                other => self.world.detail(3, number, number, format!("{other:?}").as_bytes()),
            }
            Arc::clone(&host.sink)
        };
        sink(event);
    }

    /// `end` is no longer connected to `peer`, as far as it knows.
    fn leave(&self, hosts: &mut Hosts, end: NodeId, peer: NodeId, reason: DisconnectReason) -> Option<u64> {
        let session = hosts.views.remove(&(end, peer))?;
        self.emit(hosts, end, NetworkEvent::Disconnected { peer, reason });
        Some(session)
    }

    /// Puts a packet on the wire.
    fn post(&self, hosts: &mut Hosts, from: NodeId, to: NodeId, session: u64, load: Load) {
        let life = hosts.running.get(&from).map_or(0, |host| host.life);
        hosts.wire(&self.world, from, to).push(Packet { session, life, load });
        if !hosts.is_cut(from, to) {
            self.travel(hosts, from, to);
        }
    }

    /// Lets one more packet of a wire arrive.
    fn travel(&self, hosts: &mut Hosts, from: NodeId, to: NodeId) {
        let (now, model) = (self.world.now(), hosts.model);
        let wire = hosts.wire(&self.world, from, to);
        let (at, epoch) = (wire.arrival(now, &model), wire.epoch);
        let exchange = self.clone();
        self.world.at(at, move || exchange.arrive(from, to, epoch));
    }

    fn arrive(&self, from: NodeId, to: NodeId, epoch: u64) {
        let mut hosts = self.hosts();
        let wire = hosts.wire(&self.world, from, to);
        if wire.epoch != epoch {
            return;
        }
        let Some(Packet { session, life, load }) = wire.pop() else { return };
        let Some(there) = hosts.running.get(&to).map(|host| host.life) else { return };
        let known = hosts.views.get(&(to, from)) == Some(&session);
        match load {
            Load::Frame(frame) if known => {
                let now = self.world.now();
                hosts.heard.insert((from, to), (life, now));
                drop(hosts);
                self.deliver(to, there, NetworkEvent::Frame { peer: from, frame });
            }
            // The kernel there knows no such connection and says so.
            Load::Frame(_) => self.post(&mut hosts, to, from, session, Load::End),
            Load::End if known => {
                self.leave(&mut hosts, to, from, DisconnectReason::Closed);
            }
            Load::End => {}
        }
    }

    /// Takes a node out. If `told`, its peers get word.
    fn remove(&self, hosts: &mut Hosts, node: NodeId, told: bool) {
        let connections: Vec<(NodeId, u64)> =
            hosts.views.range((node, NodeId([0; 32]))..=(node, NodeId([0xff; 32]))).map(|((_, peer), session)| (*peer, *session)).collect();
        for (peer, session) in connections {
            hosts.views.remove(&(node, peer));
            if told {
                self.post(hosts, node, peer, session, Load::End);
            }
        }
        hosts.running.remove(&node);
    }

    fn send(&self, from: NodeId, life: u64, to: NodeId, frame: Bytes) -> Result<(), SendError> {
        let mut hosts = self.hosts();
        let connected = hosts.lives(from, life).then(|| hosts.views.get(&(from, to)).copied()).flatten();
        let session = connected.ok_or(SendError::NotConnected(to))?;
        let wire = hosts.wire(&self.world, from, to);
        if wire.packets.len() >= Wire::PACKETS_MAX || wire.bytes + frame.len() > Wire::BYTES_MAX {
            return Err(SendError::Overloaded(to));
        }
        self.post(&mut hosts, from, to, session, Load::Frame(frame));
        Ok(())
    }

    fn disconnect(&self, from: NodeId, life: u64, to: NodeId) {
        let mut hosts = self.hosts();
        if hosts.lives(from, life)
            && let Some(session) = self.leave(&mut hosts, from, to, DisconnectReason::Requested)
        {
            self.post(&mut hosts, from, to, session, Load::End);
        }
    }

    /// The first packet of a dial is sent.
    fn dial(&self, from: NodeId, life: u64, wanted: Option<NodeId>, address: SocketAddr) {
        let mut hosts = self.hosts();
        if !hosts.lives(from, life) {
            return;
        }
        let failed = |reason: &str| NetworkEvent::DialFailed { address, reason: reason.to_owned() };
        let silence = |exchange: &Self| {
            let exchange = exchange.clone();
            let event = failed("it does not answer");
            exchange.world.clone().after(DIAL_TIMEOUT, move || exchange.deliver(from, life, event));
        };
        let Some(to) = hosts.by_address.get(&address).copied() else { return silence(self) };
        if to == from {
            return self.emit(&hosts, from, failed("it is this node itself"));
        }
        if hosts.is_cut(from, to) || hosts.dark.contains(&to) {
            return silence(self);
        }
        let model = hosts.model;
        let wire = hosts.wire(&self.world, from, to);
        let latency = model.latency(&mut wire.chance);
        let exchange = self.clone();
        if !hosts.running.contains_key(&to) {
            let event = failed("nobody listens there");
            return self.world.after(2 * latency, move || exchange.deliver(from, life, event));
        }
        self.world.after(latency * (1 + 2 * HANDSHAKE), move || exchange.establish(from, life, to, wanted, address));
    }

    /// The handshake is over, if nothing came between.
    fn establish(&self, from: NodeId, life: u64, to: NodeId, wanted: Option<NodeId>, address: SocketAddr) {
        let mut hosts = self.hosts();
        if !hosts.lives(from, life) {
            return;
        }
        let failed = |reason: String| NetworkEvent::DialFailed { address, reason };
        let unanswered = hosts.is_cut(from, to) || !hosts.running.contains_key(&to);
        if unanswered {
            let (exchange, event) = (self.clone(), failed("it does not answer".to_owned()));
            return self.world.after(DIAL_TIMEOUT, move || exchange.deliver(from, life, event));
        }
        if wanted.is_some_and(|wanted| wanted != to) {
            return self.emit(&hosts, from, failed(format!("another node answers there: {}", to.short())));
        }
        let test =
            |node| hosts.running.get(&node).and_then(|host| host.key.as_ref()).map(|key| key.tag("shoal simulated network", b"same?"));
        if test(from) != test(to) {
            let reason = "the two nodes do not have the same cluster key".to_owned();
            let address_there = hosts.running.get(&from).and_then(|host| host.addresses.first().copied());
            self.emit(&hosts, to, NetworkEvent::Refused { peer: Some(from), address: address_there, reason: reason.clone() });
            return self.emit(&hosts, from, NetworkEvent::Refused { peer: Some(to), address: Some(address), reason });
        }
        let (mine, theirs) = (hosts.views.get(&(from, to)).copied(), hosts.views.get(&(to, from)).copied());
        if mine.is_some() && mine == theirs {
            return self.emit(&hosts, from, NetworkEvent::AlreadyConnected { peer: to, address });
        }
        self.leave(&mut hosts, to, from, DisconnectReason::Closed);
        self.leave(&mut hosts, from, to, DisconnectReason::Closed);
        let session = hosts.next_session();
        hosts.views.insert((from, to), session);
        hosts.views.insert((to, from), session);
        let came_from = hosts.running.get(&from).and_then(|host| host.addresses.first().copied()).unwrap_or(address);
        self.emit(&hosts, to, NetworkEvent::Connected(Connected { peer: from, address: came_from, dialled: false }));
        self.emit(&hosts, from, NetworkEvent::Connected(Connected { peer: to, address, dialled: true }));
    }

    /// A node tells the others where it is, and does so again and again.
    fn announce(&self, node: NodeId, life: u64, first: bool) {
        let mut hosts = self.hosts();
        if !hosts.lives(node, life) {
            return;
        }
        let announcing = hosts.running.iter().filter(|(other, host)| **other != node && host.announces);
        let others: Vec<NodeId> = announcing.map(|(other, _)| *other).collect();
        for other in others {
            // Whoever is new also asks, and is answered.
            let ways = if first { vec![(node, other), (other, node)] } else { vec![(node, other)] };
            for (who, to) in ways {
                let Some(addresses) = hosts.running.get(&who).map(|host| host.addresses.clone()) else { continue };
                let Some(there) = hosts.running.get(&to).map(|host| host.life) else { continue };
                if hosts.is_cut(who, to) {
                    continue;
                }
                let model = hosts.model;
                let latency = model.latency(&mut hosts.wire(&self.world, who, to).chance);
                let (exchange, event) = (self.clone(), NetworkEvent::Discovered { peer: who, addresses });
                self.world.after(latency, move || exchange.deliver(to, there, event));
            }
        }
        let exchange = self.clone();
        self.world.after(ANNOUNCE_EVERY, move || exchange.announce(node, life, false));
    }
}

impl fmt::Debug for SimExchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts = self.hosts();
        f.debug_struct("SimExchange").field("running", &hosts.running.len()).field("cut", &hosts.cut.len()).finish_non_exhaustive()
    }
}

/// Starts a node's control network on a [`SimExchange`].
#[derive(Debug, Clone)]
pub struct SimNetwork {
    /// Where.
    pub exchange: SimExchange,
    /// The node's number in the world, from which its address follows.
    pub number: u16,
}

impl NetworkFactory for SimNetwork {
    fn start<'a>(&'a self, config: NetworkConfig, sink: NetworkSink) -> BoxFuture<'a, Result<Arc<dyn Network>, NetworkError>> {
        let node = config.identity.node();
        let exchange = self.exchange.clone();
        let started = exchange.hosts().start(self.number, &config, sink);
        let result = started.map(|life| {
            let hosts = exchange.hosts();
            for address in hosts.running.get(&node).map(|host| host.addresses.clone()).unwrap_or_default() {
                exchange.emit(&hosts, node, NetworkEvent::Listening(address));
            }
            drop(hosts);
            if config.mdns {
                let announcing = exchange.clone();
                exchange.world.at(exchange.world.now(), move || announcing.announce(node, life, true));
            }
            Arc::new(Running { exchange, node, life }) as Arc<dyn Network>
        });
        Box::pin(std::future::ready(result))
    }
}

/// The network of one life of a node.
struct Running {
    exchange: SimExchange,
    node: NodeId,
    life: u64,
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimNetwork({:?})", self.node)
    }
}

impl Network for Running {
    fn send(&self, peer: NodeId, frame: Bytes) -> Result<(), SendError> {
        if frame.len() > FRAME_BYTES_MAX {
            return Err(SendError::TooLong { bytes: frame.len(), limit: FRAME_BYTES_MAX });
        }
        self.exchange.send(self.node, self.life, peer, frame)
    }

    fn dial(&self, peer: Option<NodeId>, address: SocketAddr) {
        self.exchange.dial(self.node, self.life, peer, address);
    }

    fn disconnect(&self, peer: NodeId) {
        self.exchange.disconnect(self.node, self.life, peer);
    }

    fn shutdown(&self) -> BoxFuture<'static, ()> {
        let mut hosts = self.exchange.hosts();
        if hosts.lives(self.node, self.life) {
            self.exchange.remove(&mut hosts, self.node, true);
        }
        Box::pin(std::future::ready(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chance::SimRng;
    use crate::clock::SimClock;
    use crate::run;
    use crate::spawner::SimSpawner;
    use shoal_actors::secret::Identity;

    type Log = Arc<Mutex<Vec<String>>>;

    async fn node(world: &World, exchange: &SimExchange, seed: u8) -> (NodeId, Arc<dyn Network>, Log) {
        let identity = Identity::from_seed([seed; 32]);
        let id = identity.node();
        let config = NetworkConfig {
            identity,
            cluster: None,
            listen: vec![],
            mdns: false,
            clock: Arc::new(SimClock::new(world.clone(), 0, 0, 0)),
            rng: Arc::new(SimRng::new(0, 0)),
            spawner: Arc::new(SimSpawner::new(world.clone(), 0)),
        };
        let log = Log::default();
        let told = Arc::clone(&log);
        let sink: NetworkSink = Arc::new(move |event| {
            let word = match event {
                NetworkEvent::Listening(_) => return,
                NetworkEvent::Connected(_) => "connected".to_owned(),
                NetworkEvent::AlreadyConnected { .. } => "already".to_owned(),
                NetworkEvent::Disconnected { reason, .. } => format!("{reason:?}"),
                NetworkEvent::DialFailed { reason, .. } => reason,
                NetworkEvent::Frame { frame, .. } => String::from_utf8_lossy(&frame).into_owned(),
                other => format!("{other:?}"),
            };
            told.lock().unwrap().push(word);
        });
        let network = SimNetwork { exchange: exchange.clone(), number: u16::from(seed) - 1 };
        (id, network.start(config, sink).await.unwrap(), log)
    }

    fn taken(log: &Log) -> Vec<String> {
        std::mem::take(&mut *log.lock().unwrap())
    }

    #[test]
    fn frames_keep_their_order_and_wait_behind_a_cut() {
        let world = World::new(5);
        let exchange = SimExchange::new(world.clone(), LinkModel { slow_percent: 50, ..LinkModel::default() });
        let inside = world.clone();
        let main = async move {
            let pause = || inside.sleep(0, Duration::from_secs(6));
            let (one, first, log) = node(&inside, &exchange, 1).await;
            let (two, second, other) = node(&inside, &exchange, 2).await;
            assert_eq!(first.send(two, Bytes::new()), Err(SendError::NotConnected(two)));
            first.dial(Some(two), "10.77.0.2:52801".parse().unwrap());
            second.dial(None, "10.77.0.1:52801".parse().unwrap());
            second.dial(None, "10.77.0.9:52801".parse().unwrap());
            pause().await;
            let mut both = [taken(&log), taken(&other)];
            both.sort();
            assert_eq!(both.concat().iter().filter(|word| *word == "connected").count(), 2, "{both:?}");
            assert_eq!(both.concat().iter().filter(|word| *word == "already").count(), 1, "{both:?}");
            assert_eq!(both.concat().iter().filter(|word| word.contains("does not answer")).count(), 1, "{both:?}");
            let words: Vec<String> = (0..50).map(|n| n.to_string()).collect();
            for (n, word) in words.iter().enumerate() {
                first.send(two, word.clone().into()).unwrap();
                if n == 10 {
                    inside.sleep(0, Duration::from_micros(700)).await;
                }
                if n == 20 {
                    exchange.cut(one, two);
                }
            }
            pause().await;
            assert!(taken(&other).len() < 21);
            exchange.mend(one, two);
            pause().await;
            assert_eq!(taken(&other).last(), words.last());
            // A process that dies closes its connections, and a host without power does not.
            exchange.crash(two, Crash::Process);
            pause().await;
            assert_eq!(taken(&log), ["Closed"]);
            first.dial(None, "10.77.0.2:52801".parse().unwrap());
            pause().await;
            assert_eq!(taken(&log), ["nobody listens there"]);
            let (_, _third, other) = node(&inside, &exchange, 2).await;
            first.dial(None, "10.77.0.2:52801".parse().unwrap());
            pause().await;
            assert_eq!((taken(&log), taken(&other)), (vec!["connected".to_owned()], vec!["connected".to_owned()]));
            exchange.crash(two, Crash::Power);
            first.send(two, "lost".into()).unwrap();
            pause().await;
            assert!(taken(&log).is_empty());
            let (_, _fourth, other) = node(&inside, &exchange, 2).await;
            first.send(two, "stale".into()).unwrap();
            pause().await;
            assert_eq!((taken(&log), taken(&other).len()), (vec!["Closed".to_owned()], 0));
        };
        run(&world, main, || Ok(())).unwrap();
    }
}
