//! A control network inside one process: the same rules, no sockets, and one fixed order of events.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use super::hello::{Refusal, judge, other_version};
use super::queue::FrameQueue;
use crate::card::WIRE_VERSION;
use crate::env::{
    BoxFuture, Connected, DisconnectReason, FRAME_BYTES_MAX, Network, NetworkConfig, NetworkError, NetworkEvent, NetworkFactory,
    NetworkSink, SendError,
};
use crate::ids::NodeId;
use crate::secret::ClusterKey;

/// What connects the nodes of one process. Every clone is the same exchange; nodes on different exchanges never meet.
///
/// Events are delivered one at a time, in the order in which they arose. What a node does in answer to an event joins
/// the end of the queue, so nothing depends on the order of locks or tasks.
#[derive(Clone, Default)]
pub struct MemoryExchange {
    shared: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    nodes: BTreeMap<NodeId, Node>,
    by_address: BTreeMap<SocketAddr, NodeId>,
    /// Who believes to be connected to whom, and over which session.
    views: BTreeMap<(NodeId, NodeId), u64>,
    /// Directions in which frames do not move at the moment.
    stalled: BTreeSet<(NodeId, NodeId)>,
    /// Pairs without any way between them, lower id first.
    cut: BTreeSet<(NodeId, NodeId)>,
    /// Frames that wait for their direction to move again.
    held: BTreeMap<(NodeId, NodeId), VecDeque<(u64, Bytes)>>,
    /// Frames and bytes of each direction that were sent and not delivered.
    under_way: BTreeMap<(NodeId, NodeId), (usize, usize)>,
    events: VecDeque<Delivery>,
    /// Only [`MemoryExchange::step`] delivers.
    stepped: bool,
    /// Somebody is delivering.
    busy: bool,
    last_life: u64,
    last_session: u64,
    last_host: u16,
}

struct Node {
    life: u64,
    sink: NetworkSink,
    wire: u32,
    key: Option<ClusterKey>,
    announces: bool,
    addresses: Vec<SocketAddr>,
}

struct Delivery {
    to: NodeId,
    life: u64,
    /// The session that a frame belongs to.
    session: Option<u64>,
    event: NetworkEvent,
}

fn pair(one: NodeId, other: NodeId) -> (NodeId, NodeId) {
    if one < other { (one, other) } else { (other, one) }
}

impl MemoryExchange {
    /// An exchange that delivers nothing by itself, but one event for each [`MemoryExchange::step`].
    pub fn stepped() -> Self {
        let exchange = Self::default();
        exchange.state().stepped = true;
        exchange
    }

    /// Delivers the oldest event; `false` if there is none. Only of use on a [stepped](MemoryExchange::stepped)
    /// exchange: others are never left with an undelivered event.
    pub fn step(&self) -> bool {
        let mut state = self.state();
        let Some((sink, event)) = state.next_delivery() else { return false };
        drop(state);
        sink(event);
        true
    }

    /// Cuts the way between two nodes. Like an unplugged cable it is noticed by nobody: what is sent waits, and dials
    /// fail.
    pub fn cut(&self, one: NodeId, other: NodeId) {
        let mut state = self.state();
        state.cut.insert(pair(one, other));
    }

    /// Mends what was cut: what waited is delivered, and whoever was given up by the other end learns it.
    pub fn mend(&self, one: NodeId, other: NodeId) {
        let mut state = self.state();
        state.cut.remove(&pair(one, other));
        for (end, peer) in [(one, other), (other, one)] {
            let session = state.views.get(&(end, peer)).copied();
            if session.is_some() && state.views.get(&(peer, end)).copied() != session {
                state.leave(end, peer, DisconnectReason::Closed);
            }
            state.release(end, peer);
        }
        self.pump(state);
    }

    /// Keeps frames in one direction waiting, as if the receiver did not read.
    pub fn stall(&self, from: NodeId, to: NodeId) {
        self.state().stalled.insert((from, to));
    }

    /// Lets the frames of that direction move again.
    pub fn resume(&self, from: NodeId, to: NodeId) {
        let mut state = self.state();
        state.stalled.remove(&(from, to));
        state.release(from, to);
        self.pump(state);
    }

    /// Ends a node as a crash would: it hears nothing more, and its peers see their connections break, except those
    /// behind a cut.
    pub fn crash(&self, node: NodeId) {
        let mut state = self.state();
        state.remove(node, false);
        self.pump(state);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers until nothing is left, unless somebody further up the stack or on another thread already does.
    fn pump(&self, mut state: MutexGuard<'_, State>) {
        if state.stepped || std::mem::replace(&mut state.busy, true) {
            return;
        }
        drop(state);
        let _idle = Idle(self);
        loop {
            let mut state = self.state();
            let Some((sink, event)) = state.next_delivery() else {
                // Under the same lock as the look into the queue, so that no event is left behind.
                state.busy = false;
                return;
            };
            drop(state);
            sink(event);
        }
    }
}

/// Lets others deliver, even if a sink has panicked.
struct Idle<'a>(&'a MemoryExchange);

impl Drop for Idle<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.state().busy = false;
        }
    }
}

impl fmt::Debug for MemoryExchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("MemoryExchange")
            .field("nodes", &state.nodes.keys())
            .field("undelivered", &state.events.len())
            .finish_non_exhaustive()
    }
}

impl State {
    fn next_delivery(&mut self) -> Option<(NetworkSink, NetworkEvent)> {
        loop {
            let Delivery { to, life, session, event } = self.events.pop_front()?;
            if let NetworkEvent::Frame { peer, frame } = &event {
                self.count(*peer, to, frame.len(), false);
                if self.views.get(&(to, *peer)).copied() != session {
                    continue;
                }
            }
            if let Some(node) = self.nodes.get(&to).filter(|node| node.life == life) {
                return Some((Arc::clone(&node.sink), event));
            }
        }
    }

    fn count(&mut self, from: NodeId, to: NodeId, bytes: usize, sent: bool) {
        let (frames, total) = self.under_way.entry((from, to)).or_default();
        if sent {
            *frames += 1;
            *total += bytes;
        } else {
            *frames = frames.saturating_sub(1);
            *total = total.saturating_sub(bytes);
        }
    }

    fn emit(&mut self, to: NodeId, event: NetworkEvent) {
        if let Some(node) = self.nodes.get(&to) {
            self.events.push_back(Delivery { to, life: node.life, session: None, event });
        }
    }

    fn is_cut(&self, one: NodeId, other: NodeId) -> bool {
        self.cut.contains(&pair(one, other))
    }

    /// `end` is no longer connected to `peer`, as far as it knows.
    fn leave(&mut self, end: NodeId, peer: NodeId, reason: DisconnectReason) {
        if self.views.remove(&(end, peer)).is_some() {
            self.emit(end, NetworkEvent::Disconnected { peer, reason });
        }
    }

    /// Ends a connection at `end`; the peer learns it if there is a way.
    fn disconnect(&mut self, end: NodeId, peer: NodeId, reason: DisconnectReason) {
        let Some(session) = self.views.get(&(end, peer)).copied() else { return };
        self.leave(end, peer, reason);
        if !self.is_cut(end, peer) && self.views.get(&(peer, end)) == Some(&session) {
            self.release(end, peer);
            self.leave(peer, end, DisconnectReason::Closed);
        }
    }

    fn send(&mut self, from: NodeId, to: NodeId, frame: Bytes) -> Result<(), SendError> {
        let session = *self.views.get(&(from, to)).ok_or(SendError::NotConnected(to))?;
        let (frames, bytes) = self.under_way.get(&(from, to)).copied().unwrap_or_default();
        if frames >= FrameQueue::FRAMES_MAX || bytes + frame.len() > FrameQueue::BYTES_MAX {
            return Err(SendError::Overloaded(to));
        }
        self.count(from, to, frame.len(), true);
        self.held.entry((from, to)).or_default().push_back((session, frame));
        self.release(from, to);
        Ok(())
    }

    /// Moves what waits in one direction, if it moves.
    fn release(&mut self, from: NodeId, to: NodeId) {
        if self.stalled.contains(&(from, to)) || self.is_cut(from, to) {
            return;
        }
        let life = self.nodes.get(&to).map(|node| node.life).unwrap_or_default();
        for (session, frame) in self.held.remove(&(from, to)).unwrap_or_default() {
            self.events.push_back(Delivery { to, life, session: Some(session), event: NetworkEvent::Frame { peer: from, frame } });
        }
    }

    fn dial(&mut self, from: NodeId, wanted: Option<NodeId>, address: SocketAddr) {
        let Some(node) = self.nodes.get(&from) else { return };
        let failed = |reason: &str| NetworkEvent::DialFailed { address, reason: reason.to_owned() };
        let target = self.by_address.get(&address).copied();
        let (to, other) = match target.and_then(|to| self.nodes.get(&to).map(|other| (to, other))) {
            Some((to, _)) if to == from => return self.emit(from, failed("it is this node itself")),
            Some((to, _)) if self.is_cut(from, to) => return self.emit(from, failed("it does not answer")),
            Some((to, _)) if wanted.is_some_and(|wanted| wanted != to) => {
                return self.emit(from, failed(&format!("another node answers there: {}", to.short())));
            }
            Some(found) => found,
            None => return self.emit(from, failed("nobody listens there")),
        };
        let from_address = node.addresses.first().copied();
        let test = |key: &Option<ClusterKey>| key.as_ref().map(|key| key.tag("shoal memory network", b"same key?"));
        let refusal = judge(other.wire, other.key.is_some(), node.wire, node.key.is_some())
            .or_else(|| (test(&node.key) != test(&other.key)).then_some(Refusal::WrongKey));
        if let Some(refusal) = refusal {
            let (ours, theirs) = (node.wire, other.wire);
            let text = |by_us: bool, peer: NodeId, mine: u32, his: u32| match refusal {
                Refusal::Version(_) => other_version(&peer.short(), his, mine),
                refusal => refusal.text(by_us, peer, mine),
            };
            let (there, here) = (text(true, from, theirs, ours), text(false, to, ours, theirs));
            self.emit(to, NetworkEvent::Refused { peer: Some(from), address: from_address, reason: there });
            return self.emit(from, NetworkEvent::Refused { peer: Some(to), address: Some(address), reason: here });
        }
        let (mine, his) = (self.views.get(&(from, to)).copied(), self.views.get(&(to, from)).copied());
        if mine.is_some() && mine == his {
            return self.emit(from, NetworkEvent::AlreadyConnected { peer: to, address });
        }
        self.leave(to, from, DisconnectReason::Closed);
        self.leave(from, to, DisconnectReason::Closed);
        self.last_session += 1;
        let session = self.last_session;
        self.views.insert((from, to), session);
        self.views.insert((to, from), session);
        let came_from = from_address.unwrap_or(address);
        self.emit(to, NetworkEvent::Connected(Connected { peer: from, address: came_from, dialled: false }));
        self.emit(from, NetworkEvent::Connected(Connected { peer: to, address, dialled: true }));
    }

    fn start(&mut self, config: &NetworkConfig, wire: u32, sink: NetworkSink) -> Result<u64, NetworkError> {
        let me = config.identity.node();
        if self.nodes.contains_key(&me) {
            return Err(NetworkError::Start(format!("node {} already runs on this exchange", me.short())));
        }
        self.last_host += 1;
        let [high, low] = self.last_host.to_be_bytes();
        let own = [SocketAddr::from(([10, 77, high, low], 52801))];
        let wanted = if config.listen.is_empty() { &own[..] } else { &config.listen };
        let mut addresses = vec![];
        for mut address in wanted.iter().copied() {
            if address.ip().is_unspecified() {
                address.set_ip(own[0].ip());
            }
            let ports = if address.port() == 0 { 49152..=u16::MAX } else { address.port()..=address.port() };
            let free = ports.map(|port| SocketAddr::new(address.ip(), port)).find(|address| !self.by_address.contains_key(address));
            addresses.push(free.ok_or_else(|| NetworkError::Listen {
                address,
                reason: "another node listens there".to_owned(),
                in_use: true,
            })?);
        }
        self.last_life += 1;
        let life = self.last_life;
        self.by_address.extend(addresses.iter().map(|address| (*address, me)));
        let node = Node { life, sink, wire, key: config.cluster.clone(), announces: config.mdns, addresses: addresses.clone() };
        self.nodes.insert(me, node);
        for address in &addresses {
            self.emit(me, NetworkEvent::Listening(*address));
        }
        if config.mdns {
            let others: Vec<(NodeId, Vec<SocketAddr>)> = self
                .nodes
                .iter()
                .filter(|(other, node)| **other != me && node.announces && !self.is_cut(me, **other))
                .map(|(other, node)| (*other, node.addresses.clone()))
                .collect();
            for (other, theirs) in others {
                self.emit(me, NetworkEvent::Discovered { peer: other, addresses: theirs });
                self.emit(other, NetworkEvent::Discovered { peer: me, addresses: addresses.clone() });
            }
        }
        Ok(life)
    }

    fn remove(&mut self, node: NodeId, tell: bool) {
        let peers: Vec<NodeId> = self.views.keys().filter(|(end, _)| *end == node).map(|(_, peer)| *peer).collect();
        for peer in peers {
            if tell {
                self.disconnect(node, peer, DisconnectReason::Requested);
            } else {
                let session = self.views.remove(&(node, peer));
                if !self.is_cut(node, peer) && self.views.get(&(peer, node)).copied() == session {
                    self.leave(peer, node, DisconnectReason::Closed);
                }
            }
        }
        // Its own last events still have to reach it, so a node that stops in good order is taken out behind them.
        if let Some(gone) = self.nodes.get_mut(&node) {
            gone.announces = false;
            for address in std::mem::take(&mut gone.addresses) {
                self.by_address.remove(&address);
            }
        }
        if !tell {
            self.nodes.remove(&node);
        }
        self.held.retain(|(_, to), _| *to != node);
        self.under_way.retain(|(from, to), _| *from != node && *to != node);
    }
}

/// Starts control networks on a [`MemoryExchange`].
#[derive(Debug, Clone)]
pub struct MemoryNetwork {
    exchange: MemoryExchange,
    wire_version: u32,
}

impl MemoryNetwork {
    /// Networks on `exchange`.
    pub fn new(exchange: MemoryExchange) -> Self {
        Self { exchange, wire_version: WIRE_VERSION }
    }

    /// Speaks another wire version than this program's. Only for tests of how versions refuse each other.
    #[must_use]
    pub fn with_wire_version(mut self, version: u32) -> Self {
        self.wire_version = version;
        self
    }
}

impl NetworkFactory for MemoryNetwork {
    fn start<'a>(&'a self, config: NetworkConfig, sink: NetworkSink) -> BoxFuture<'a, Result<Arc<dyn Network>, NetworkError>> {
        let node = config.identity.node();
        let mut state = self.exchange.state();
        let started = state.start(&config, self.wire_version, sink);
        self.exchange.pump(state);
        let exchange = self.exchange.clone();
        Box::pin(async move { started.map(|life| Arc::new(Running { exchange, node, life }) as Arc<dyn Network>) })
    }
}

struct Running {
    exchange: MemoryExchange,
    node: NodeId,
    life: u64,
}

impl Running {
    /// Does something for this life of the node, if it still is the present one.
    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> Option<T> {
        let mut state = self.exchange.state();
        if state.nodes.get(&self.node).is_none_or(|node| node.life != self.life) {
            return None;
        }
        let result = act(&mut state);
        self.exchange.pump(state);
        Some(result)
    }

    fn stop(&self) {
        self.with(|state| state.remove(self.node, true));
        self.with(|state| {
            if state.stepped {
                // Its last events are for nobody: the sink is told to expect none after the shutdown.
                state.events.retain(|delivery| delivery.to != self.node);
            }
            state.nodes.remove(&self.node);
        });
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryNetwork({:?})", self.node)
    }
}

impl Network for Running {
    fn send(&self, peer: NodeId, frame: Bytes) -> Result<(), SendError> {
        if frame.len() > FRAME_BYTES_MAX {
            return Err(SendError::TooLong { bytes: frame.len(), limit: FRAME_BYTES_MAX });
        }
        self.with(|state| state.send(self.node, peer, frame)).unwrap_or(Err(SendError::NotConnected(peer)))
    }

    fn dial(&self, peer: Option<NodeId>, address: SocketAddr) {
        self.with(|state| state.dial(self.node, peer, address));
    }

    fn disconnect(&self, peer: NodeId) {
        self.with(|state| state.disconnect(self.node, peer, DisconnectReason::Requested));
    }

    fn shutdown(&self) -> BoxFuture<'static, ()> {
        self.stop();
        Box::pin(std::future::ready(()))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::{SystemClock, SystemRng, SystemSpawner};
    use crate::secret::Identity;

    type Log = Arc<Mutex<Vec<(u8, String)>>>;

    async fn node(exchange: &MemoryExchange, seed: u8, log: &Log) -> Arc<dyn Network> {
        let config = NetworkConfig {
            identity: Identity::from_seed([seed; 32]),
            cluster: None,
            listen: vec![],
            mdns: true,
            clock: Arc::new(SystemClock),
            rng: Arc::new(SystemRng),
            spawner: Arc::new(SystemSpawner::new(tokio::runtime::Handle::current())),
        };
        let log = Arc::clone(log);
        let sink: NetworkSink = Arc::new(move |event| log.lock().unwrap().push((seed, format!("{event:?}"))));
        MemoryNetwork::new(exchange.clone()).start(config, sink).await.unwrap()
    }

    #[tokio::test]
    async fn the_same_story_is_told_the_same_way() {
        let mut stories = vec![];
        for _ in 0..2 {
            let (exchange, log) = (MemoryExchange::stepped(), Log::default());
            let one = node(&exchange, 1, &log).await;
            let two = node(&exchange, 2, &log).await;
            let ids = [1, 2].map(|seed| Identity::from_seed([seed; 32]).node());
            one.dial(None, "10.77.0.2:52801".parse().unwrap());
            two.dial(None, "10.77.0.1:52801".parse().unwrap());
            one.send(ids[1], Bytes::from_static(b"x")).unwrap();
            assert!(log.lock().unwrap().is_empty(), "nothing moves by itself");
            while exchange.step() {}
            exchange.cut(ids[0], ids[1]);
            one.disconnect(ids[1]);
            two.send(ids[0], Bytes::from_static(b"lost")).unwrap();
            while exchange.step() {}
            exchange.mend(ids[0], ids[1]);
            while exchange.step() {}
            stories.push(std::mem::take(&mut *log.lock().unwrap()));
        }
        let gone = |log: &[(u8, String)], seed| log.iter().filter(|(who, event)| *who == seed && event.contains("Disconnected")).count();
        assert_eq!([gone(&stories[0], 1), gone(&stories[0], 2)], [1, 1], "{:#?}", stories[0]);
        assert!(!stories[0].iter().any(|(_, event)| event.contains("lost")));
        assert_eq!(stories[0], stories[1]);
    }
}
