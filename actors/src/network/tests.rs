//! The same stories on both networks: real sockets on loopback, and memory.

use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use ractor::ActorRef;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::*;
use crate::card::WIRE_VERSION;
use crate::env::{
    Connected, DisconnectReason, FRAME_BYTES_MAX, Network, NetworkConfig, NetworkError, NetworkEvent, NetworkFactory, NetworkSink,
    SendError, SystemClock, SystemRng, SystemSpawner,
};
use crate::ids::NodeId;
use crate::secret::{ClusterKey, Identity};
use crate::service::{CallError, Inbound, Replier, Service, ServiceId, Services, ServicesLimits};

/// Nothing here takes this long; a test that hangs ends with a message.
const PATIENCE: Duration = Duration::from_secs(30);
const SOON: Duration = Duration::from_secs(20);
const KEY: &str = "correct horse battery";

#[derive(Clone)]
enum World {
    Libp2p,
    Memory(MemoryExchange),
}

impl World {
    fn factory(&self, wire: u32) -> Arc<dyn NetworkFactory> {
        match self {
            Self::Libp2p => Arc::new(Libp2pNetwork::default().with_wire_version(wire)),
            Self::Memory(exchange) => Arc::new(MemoryNetwork::new(exchange.clone()).with_wire_version(wire)),
        }
    }

    fn listen(&self) -> Vec<SocketAddr> {
        match self {
            Self::Libp2p => vec![([127, 0, 0, 1], 0).into()],
            Self::Memory(_) => vec![],
        }
    }

    fn config(&self, seed: u8, key: Option<&str>) -> NetworkConfig {
        NetworkConfig {
            identity: Identity::from_seed([seed; 32]),
            cluster: key.map(|text| ClusterKey::from_text(text).unwrap()),
            listen: self.listen(),
            mdns: false,
            clock: Arc::new(SystemClock),
            rng: Arc::new(SystemRng),
            spawner: Arc::new(SystemSpawner::new(tokio::runtime::Handle::current())),
        }
    }

    async fn node(&self, seed: u8) -> Node {
        self.node_with(seed, None, WIRE_VERSION).await
    }

    async fn node_with(&self, seed: u8, key: Option<&str>, wire: u32) -> Node {
        let config = self.config(seed, key);
        let id = config.identity.node();
        let limits = ServicesLimits { calls_per_peer: 4, ..ServicesLimits::default() };
        let services = Services::new(id, Arc::new(SystemClock), limits);
        let handle = NetworkHandle::new(services.clone());
        let (sender, inbox) = mpsc::unbounded_channel();
        handle.subscribe(Box::new(move |event| drop(sender.send(event.clone()))));
        let held = Held::default();
        let keep = Arc::clone(&held);
        services.serve::<Echo>(move |inbound| echo(inbound, &keep)).unwrap();
        let arguments = NetworkArguments { handle: handle.clone(), factory: self.factory(wire), config };
        let actor = NetworkActor::start(arguments, None).await.unwrap();
        let mut node = Node { id, services, handle, actor, inbox, seen: vec![], address: ([0, 0, 0, 0], 0).into(), held };
        node.address = node.until(|event| if let NetworkEvent::Listening(address) = event { Some(*address) } else { None }).await;
        node
    }
}

/// What callers asked to be kept waiting for, with everything else that arrived.
type Held = Arc<Mutex<Vec<(Ask, Option<Replier<Echo>>)>>>;

struct Node {
    id: NodeId,
    services: Services,
    handle: NetworkHandle,
    actor: ActorRef<NetworkMessage>,
    inbox: mpsc::UnboundedReceiver<NetworkEvent>,
    /// All events so far, in order.
    seen: Vec<NetworkEvent>,
    address: SocketAddr,
    held: Held,
}

impl Node {
    /// Waits for an event.
    async fn until<T>(&mut self, wanted: impl Fn(&NetworkEvent) -> Option<T>) -> T {
        loop {
            let next = tokio::time::timeout(PATIENCE, self.inbox.recv()).await;
            let Ok(Some(event)) = next else { panic!("node {:?} waits in vain; it saw {:#?}", self.id, self.seen) };
            self.seen.push(event.clone());
            if let Some(found) = wanted(&event) {
                return found;
            }
        }
    }

    async fn until_connected(&mut self, to: NodeId) -> Connected {
        self.until(|event| match event {
            NetworkEvent::Connected(connected) if connected.peer == to => Some(connected.clone()),
            _ => None,
        })
        .await
    }

    async fn until_disconnected(&mut self, from: NodeId) -> DisconnectReason {
        self.until(|event| match event {
            NetworkEvent::Disconnected { peer, reason } if *peer == from => Some(reason.clone()),
            _ => None,
        })
        .await
    }

    async fn until_refused(&mut self) -> String {
        self.until(|event| if let NetworkEvent::Refused { reason, .. } = event { Some(reason.clone()) } else { None }).await
    }

    async fn until_failed(&mut self) -> String {
        self.until(|event| if let NetworkEvent::DialFailed { reason, .. } = event { Some(reason.clone()) } else { None }).await
    }

    fn saw_connected(&self) -> usize {
        self.seen.iter().filter(|event| matches!(event, NetworkEvent::Connected(_))).count()
    }

    async fn join(&mut self, other: &mut Self) {
        self.handle.dial(Some(other.id), other.address);
        self.until_connected(other.id).await;
        other.until_connected(self.id).await;
    }

    async fn ask(&self, to: &Self, ask: Ask) -> Result<Ask, CallError> {
        self.services.remote::<Echo>(to.id).call(ask, SOON).await
    }

    async fn until_held(&self, count: usize) {
        while self.held.lock().unwrap().len() < count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    async fn stop(&self) {
        self.actor.stop_and_wait(None, Some(PATIENCE)).await.unwrap();
    }
}

struct Echo;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum Ask {
    Bytes(Vec<u8>),
    Grow(usize),
    Hold,
    Forget,
    Fail(String),
}

impl Service for Echo {
    const ID: ServiceId = ServiceId::user(1);
    const NAME: &'static str = "echo";
    type Request = Ask;
    type Reply = Ask;
}

fn echo(inbound: Inbound<Echo>, held: &Held) {
    let Inbound { request, reply, .. } = inbound;
    match (request, reply) {
        (Ask::Forget, Some(_)) => {}
        (Ask::Fail(text), Some(reply)) => reply.fail(text),
        (Ask::Grow(size), Some(reply)) => reply.reply(Ask::Bytes(vec![7; size])),
        (ask @ Ask::Bytes(_), Some(reply)) => reply.reply(ask),
        (ask, reply) => held.lock().unwrap().push((ask, reply)),
    }
}

/// Like [`Echo`] to the eye of the caller, unknown to everybody else.
struct Nobody;

impl Service for Nobody {
    const ID: ServiceId = ServiceId::user(2);
    const NAME: &'static str = "nobody";
    type Request = ();
    type Reply = ();
}

macro_rules! on_both {
    ($($name:ident),* $(,)?) => {
        mod on_libp2p {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() { super::$name(super::World::Libp2p).await })*
        }
        mod on_memory {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() { super::$name(super::World::Memory(super::MemoryExchange::default())).await })*
        }
    };
}

on_both!(
    calls_and_casts_arrive,
    a_call_ends_with_the_reason,
    long_frames_pass_and_longer_ones_are_refused,
    a_peer_that_works_on_enough_says_so,
    a_peer_vanishes_during_a_call,
    strangers_are_refused_on_both_sides,
    the_same_key_opens,
    other_versions_are_refused_on_both_sides,
    simultaneous_dials_connect_once,
    a_peer_is_let_go_and_taken_back,
    a_dial_to_the_wrong_place_fails_with_the_reason,
    a_late_subscriber_hears_what_is,
    a_node_restarts_at_its_port,
);

async fn calls_and_casts_arrive(world: World) {
    let (mut one, mut two, mut three) = (world.node(1).await, world.node(2).await, world.node(3).await);
    one.join(&mut two).await;
    three.join(&mut two).await;
    three.join(&mut one).await;
    for (from, to) in [(&one, &two), (&two, &one), (&three, &one), (&two, &three), (&one, &one)] {
        let ask = Ask::Bytes(vec![from.id.0[0], to.id.0[0]]);
        assert_eq!(from.ask(to, ask.clone()).await, Ok(ask));
    }
    let remote = one.services.remote::<Echo>(two.id);
    for number in 0..100 {
        remote.cast(Ask::Bytes(vec![number])).unwrap();
    }
    two.until_held(100).await;
    let arrived: Vec<Ask> = two.held.lock().unwrap().drain(..).map(|(ask, _)| ask).collect();
    assert_eq!(arrived, (0..100).map(|number| Ask::Bytes(vec![number])).collect::<Vec<_>>(), "in order");
    let peers: Vec<NodeId> = one.handle.connected().into_iter().map(|connected| connected.peer).collect();
    let mut expected = vec![two.id, three.id];
    expected.sort_unstable();
    assert_eq!(peers, expected);
}

async fn a_call_ends_with_the_reason(world: World) {
    let (mut one, mut two) = (world.node(1).await, world.node(2).await);
    let node = two.id;
    assert_eq!(one.ask(&two, Ask::Hold).await, Err(CallError::NotConnected { node }));
    one.join(&mut two).await;
    let service = Echo::NAME;
    assert_eq!(one.ask(&two, Ask::Fail("no".into())).await, Err(CallError::Fault { node, service, reason: "no".into() }));
    let error = one.ask(&two, Ask::Forget).await.unwrap_err();
    assert!(error.to_string().contains("without an answer"), "{error}");
    let unknown = CallError::UnknownService { node, service: Nobody::NAME, id: Nobody::ID };
    assert_eq!(one.services.remote::<Nobody>(node).call((), SOON).await, Err(unknown));
    let brief = Duration::from_millis(20);
    let error = one.services.remote::<Echo>(node).call(Ask::Hold, brief).await.unwrap_err();
    assert_eq!(error, CallError::Deadline { node, service, waited: brief });
}

async fn long_frames_pass_and_longer_ones_are_refused(world: World) {
    let (mut one, mut two) = (world.node(1).await, world.node(2).await);
    one.join(&mut two).await;
    let long = Ask::Bytes((0..FRAME_BYTES_MAX - 64).map(|index| (index % 251) as u8).collect());
    let answer = one.ask(&two, long.clone()).await;
    assert!(answer == Ok(long), "a long frame arrives as it was sent");
    let error = one.ask(&two, Ask::Bytes(vec![0; FRAME_BYTES_MAX])).await.unwrap_err();
    assert!(matches!(error, CallError::TooLong { limit: FRAME_BYTES_MAX, .. }), "{error}");
    let error = one.ask(&two, Ask::Grow(FRAME_BYTES_MAX)).await.unwrap_err();
    assert!(matches!(&error, CallError::Fault { reason, .. } if reason.contains("cannot be sent")), "{error}");
    let fine = Ask::Bytes(vec![1]);
    assert_eq!(one.ask(&two, fine.clone()).await, Ok(fine));
}

async fn a_peer_that_works_on_enough_says_so(world: World) {
    let (mut one, mut two) = (world.node(1).await, world.node(2).await);
    one.join(&mut two).await;
    let mut waiting = vec![];
    for _ in 0..4 {
        let remote = one.services.remote::<Echo>(two.id);
        waiting.push(tokio::spawn(async move { remote.call(Ask::Hold, SOON).await }));
    }
    two.until_held(4).await;
    assert_eq!(one.ask(&two, Ask::Bytes(vec![])).await, Err(CallError::Overloaded { node: two.id }));
    let answered: Vec<_> = two.held.lock().unwrap().drain(..).collect();
    for (_, reply) in answered {
        reply.unwrap().reply(Ask::Hold);
    }
    for call in waiting {
        assert_eq!(call.await.unwrap(), Ok(Ask::Hold));
    }
    assert_eq!(one.ask(&two, Ask::Bytes(vec![])).await, Ok(Ask::Bytes(vec![])));
}

async fn a_peer_vanishes_during_a_call(world: World) {
    let (mut one, mut two) = (world.node(1).await, world.node(2).await);
    one.join(&mut two).await;
    let remote = one.services.remote::<Echo>(two.id);
    let call = tokio::spawn(async move { remote.call(Ask::Hold, SOON).await });
    two.until_held(1).await;
    two.stop().await;
    assert_eq!(call.await.unwrap(), Err(CallError::PeerGone { node: two.id, service: Echo::NAME }));
    assert_eq!(one.until_disconnected(two.id).await, DisconnectReason::Closed);
    assert_eq!(one.ask(&two, Ask::Hold).await, Err(CallError::NotConnected { node: two.id }));
}

async fn strangers_are_refused_on_both_sides(world: World) {
    let other = "incorrect horse battery";
    let cases = [
        (None, Some(KEY), "this cluster needs a key: ", "this cluster needs a key, and node "),
        (Some(KEY), None, "has no key but this cluster does", "this node has no key but the peer's cluster does"),
        (Some(other), Some(KEY), "wrong key", "wrong key"),
    ];
    for (index, (mine, theirs, told, says)) in (0_u8..).zip(cases) {
        let mut dialler = world.node_with(10 + 2 * index, mine, WIRE_VERSION).await;
        let mut listener = world.node_with(11 + 2 * index, theirs, WIRE_VERSION).await;
        dialler.handle.dial(Some(listener.id), listener.address);
        let (here, there) = (dialler.until_refused().await, listener.until_refused().await);
        assert!(here.contains(told), "{here}");
        assert!(there.contains(says), "{there}");
        assert_eq!(dialler.saw_connected() + listener.saw_connected(), 0);
        assert_eq!(dialler.ask(&listener, Ask::Hold).await, Err(CallError::NotConnected { node: listener.id }));
    }
}

async fn the_same_key_opens(world: World) {
    let (mut one, mut two) = (world.node_with(1, Some(KEY), WIRE_VERSION).await, world.node_with(2, Some(KEY), WIRE_VERSION).await);
    one.join(&mut two).await;
    assert_eq!(one.ask(&two, Ask::Bytes(vec![1])).await, Ok(Ask::Bytes(vec![1])));
}

async fn other_versions_are_refused_on_both_sides(world: World) {
    let (mut old, mut new) = (world.node(1).await, world.node_with(2, None, WIRE_VERSION + 1).await);
    old.handle.dial(Some(new.id), new.address);
    let (here, there) = (old.until_refused().await, new.until_refused().await);
    let (theirs, ours) = (WIRE_VERSION + 1, WIRE_VERSION);
    assert!(here.contains(&format!("speaks wire version {theirs} and this node speaks {ours}: update shoal on this node")), "{here}");
    assert!(there.contains(&format!("speaks wire version {ours} and this node speaks {theirs}: update shoal on that node")), "{there}");
    assert_eq!(old.saw_connected() + new.saw_connected(), 0);
}

async fn simultaneous_dials_connect_once(world: World) {
    for round in 0..5_u8 {
        let (mut one, mut two) = (world.node(100 + 2 * round).await, world.node(101 + 2 * round).await);
        let answered = |event: &NetworkEvent| {
            let ends = matches!(event, NetworkEvent::Connected(_) | NetworkEvent::AlreadyConnected { .. });
            ends.then_some(())
        };
        for _ in 0..3 {
            one.handle.dial(None, two.address);
            two.handle.dial(Some(one.id), one.address);
        }
        one.until(answered).await;
        two.until(answered).await;
        one.handle.dial(None, two.address);
        two.handle.dial(None, one.address);
        let already = |event: &NetworkEvent| matches!(event, NetworkEvent::AlreadyConnected { .. }).then_some(());
        one.until(already).await;
        two.until(already).await;
        for _ in 0..20 {
            assert_eq!(one.ask(&two, Ask::Bytes(vec![1])).await, Ok(Ask::Bytes(vec![1])));
            assert_eq!(two.ask(&one, Ask::Bytes(vec![2])).await, Ok(Ask::Bytes(vec![2])));
        }
        one.stop().await;
        two.until_disconnected(one.id).await;
        assert_eq!((one.saw_connected(), two.saw_connected()), (1, 1), "{:#?} {:#?}", one.seen, two.seen);
    }
}

async fn a_peer_is_let_go_and_taken_back(world: World) {
    let (mut one, mut two) = (world.node(1).await, world.node(2).await);
    one.join(&mut two).await;
    one.handle.disconnect(two.id);
    assert_eq!(one.until_disconnected(two.id).await, DisconnectReason::Requested);
    assert_eq!(two.until_disconnected(one.id).await, DisconnectReason::Closed);
    assert_eq!(one.ask(&two, Ask::Hold).await, Err(CallError::NotConnected { node: two.id }));
    two.join(&mut one).await;
    assert_eq!(one.ask(&two, Ask::Bytes(vec![3])).await, Ok(Ask::Bytes(vec![3])));
}

async fn a_dial_to_the_wrong_place_fails_with_the_reason(world: World) {
    let (mut one, two, three) = (world.node(1).await, world.node(2).await, world.node(3).await);
    one.handle.dial(Some(two.id), three.address);
    let reason = one.until_failed().await;
    assert_eq!(reason, format!("another node answers there: {}", three.id.short()));
    one.handle.dial(None, one.address);
    assert_eq!(one.until_failed().await, "it is this node itself");
    let gone = two.address;
    two.stop().await;
    one.handle.dial(None, gone);
    let reason = one.until_failed().await;
    assert!(reason.contains("refused") || reason.contains("nobody listens there"), "{reason}");
}

async fn a_late_subscriber_hears_what_is(world: World) {
    let (mut one, mut two) = (world.node(1).await, world.node(2).await);
    one.join(&mut two).await;
    let (sender, mut inbox) = mpsc::unbounded_channel();
    one.handle.subscribe(Box::new(move |event| drop(sender.send(event.clone()))));
    assert!(matches!(inbox.recv().await, Some(NetworkEvent::Listening(address)) if address == one.address));
    assert!(matches!(inbox.recv().await, Some(NetworkEvent::Connected(connected)) if connected.peer == two.id));
    one.handle.disconnect(two.id);
    assert!(matches!(inbox.recv().await, Some(NetworkEvent::Disconnected { peer, .. }) if peer == two.id));
}

async fn a_node_restarts_at_its_port(world: World) {
    let (mut one, mut two) = (world.node(1).await, world.node(2).await);
    one.join(&mut two).await;
    two.stop().await;
    one.until_disconnected(two.id).await;
    let mut config = world.config(2, None);
    config.listen = vec![two.address];
    let handle = NetworkHandle::new(Services::new(two.id, Arc::new(SystemClock), ServicesLimits::default()));
    let again = NetworkArguments { handle, factory: world.factory(WIRE_VERSION), config: config.clone() };
    let actor = NetworkActor::start(again, None).await.unwrap();
    one.handle.dial(Some(two.id), two.address);
    one.until_connected(two.id).await;
    // Another node does not get the port while it is in use.
    config.identity = Identity::from_seed([3; 32]);
    let handle = NetworkHandle::new(Services::new(config.identity.node(), Arc::new(SystemClock), ServicesLimits::default()));
    let error = NetworkActor::start(NetworkArguments { handle, factory: world.factory(WIRE_VERSION), config }, None).await.unwrap_err();
    assert!(matches!(&error, NetworkError::Listen { address, .. } if *address == two.address), "{error}");
    assert!(error.to_string().contains("listens there"), "{error}");
    actor.stop_and_wait(None, Some(PATIENCE)).await.unwrap();
}

// ---- What is particular to real sockets.

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_peer_replaces_the_connection_of_its_earlier_life() {
    for (stays, restarts) in [(1, 2), (2, 1)] {
        let world = World::Libp2p;
        let (mut one, mut old) = (world.node(stays).await, world.node(restarts).await);
        one.join(&mut old).await;
        // The earlier life is not told that it is over, as after a power cut: its connection still stands.
        let mut new = world.node(restarts).await;
        new.handle.dial(Some(one.id), one.address);
        new.until_connected(one.id).await;
        one.until_disconnected(old.id).await;
        one.until_connected(new.id).await;
        let remote = one.services.remote::<Echo>(new.id);
        remote.cast(Ask::Hold).unwrap();
        new.until_held(1).await;
        assert!(old.held.lock().unwrap().is_empty());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_node_is_not_dialled_over_and_over() {
    let world = World::Libp2p;
    let (mut open, mut private) = (world.node(1).await, world.node_with(2, Some(KEY), WIRE_VERSION).await);
    open.handle.dial(Some(private.id), private.address);
    open.until_refused().await;
    private.until_refused().await;
    for _ in 0..10 {
        open.handle.dial(Some(private.id), private.address);
        let reason = open.until_failed().await;
        assert!(reason.contains("refused a moment ago") && reason.contains("this cluster needs a key"), "{reason}");
    }
    // A stranger that does not hold back is not answered each time either.
    let again = world.node(1).await;
    for _ in 0..5 {
        again.handle.dial(Some(private.id), private.address);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    private.stop().await;
    while let Ok(event) = private.inbox.try_recv() {
        private.seen.push(event);
    }
    let refusals = private.seen.iter().filter(|event| matches!(event, NetworkEvent::Refused { .. })).count();
    assert!(refusals <= 2, "{:#?}", private.seen);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_cluster_stays_away_from_public_addresses() {
    let mut one = World::Libp2p.node(1).await;
    one.handle.dial(None, "8.8.8.8:52801".parse().unwrap());
    let reason = one.until_refused().await;
    assert!(reason.starts_with("8.8.8.8 is a public address"), "{reason}");
    one.handle.dial(None, "[fe80::1]:52801".parse().unwrap());
    let reason = one.until_failed().await;
    assert!(reason.contains("needs its interface"), "{reason}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn noise_on_the_port_disturbs_nobody() {
    use tokio::io::AsyncWriteExt;

    let (mut one, mut two) = (World::Libp2p.node(1).await, World::Libp2p.node(2).await);
    let mut intruders = vec![];
    for junk in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], b"\x13/multistream/1.0.0\n\x07/noise\n\xff\xff"] {
        let mut stream = tokio::net::TcpStream::connect(one.address).await.unwrap();
        let _ = stream.write_all(junk).await;
        intruders.push(stream);
    }
    two.join(&mut one).await;
    assert_eq!(one.ask(&two, Ask::Bytes(vec![1])).await, Ok(Ask::Bytes(vec![1])));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_port_is_free_when_the_network_has_stopped() {
    let world = World::Libp2p;
    for _ in 0..3 {
        let (mut one, mut two) = (world.node(1).await, world.node(2).await);
        one.join(&mut two).await;
        one.stop().await;
        let listener = TcpListener::bind(one.address).unwrap();
        assert_eq!(listener.local_addr().unwrap(), one.address);
    }
}

/// Starts a bare network, whose frames are kept unread until they are taken out of the receiver and dropped.
async fn bare(world: &World, seed: u8) -> (Arc<dyn Network>, NodeId, mpsc::UnboundedReceiver<NetworkEvent>) {
    let (sender, inbox) = mpsc::unbounded_channel();
    let sink: NetworkSink = Arc::new(move |event| drop(sender.send(event)));
    let config = world.config(seed, None);
    let id = config.identity.node();
    (world.factory(WIRE_VERSION).start(config, sink).await.unwrap(), id, inbox)
}

async fn bare_pair(world: &World) -> (Arc<dyn Network>, NodeId, Arc<dyn Network>, NodeId, mpsc::UnboundedReceiver<NetworkEvent>) {
    let (one, one_id, mut one_inbox) = bare(world, 1).await;
    let (two, two_id, mut inbox) = bare(world, 2).await;
    let address = loop {
        if let Some(NetworkEvent::Listening(address)) = inbox.recv().await {
            break address;
        }
    };
    one.dial(Some(two_id), address);
    while !matches!(one_inbox.recv().await, Some(NetworkEvent::Connected(_))) {}
    while !matches!(inbox.recv().await, Some(NetworkEvent::Connected(_))) {}
    (one, one_id, two, two_id, inbox)
}

/// Fills the way to a peer that reads nothing, then checks that nothing was lost or reordered.
async fn fill(one: &dyn Network, to: NodeId, inbox: &mut mpsc::UnboundedReceiver<NetworkEvent>, let_go: impl FnOnce()) {
    let frame = |number: u32| {
        let mut frame = vec![0; 64 * 1024];
        frame[..4].copy_from_slice(&number.to_le_bytes());
        Bytes::from(frame)
    };
    let mut sent = 0_u32;
    let mut full = 0;
    // The sockets and the peer take some more after the queue is full for the first time.
    while full < 10 {
        match one.send(to, frame(sent)) {
            Ok(()) => (sent, full) = (sent + 1, 0),
            Err(error) => {
                assert_eq!(error, SendError::Overloaded(to));
                full += 1;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        assert!(sent < 10_000, "somebody keeps everything");
    }
    let_go();
    let mut next = 0_u32;
    while next < sent {
        match tokio::time::timeout(PATIENCE, inbox.recv()).await.unwrap().unwrap() {
            NetworkEvent::Frame { frame, .. } => {
                assert_eq!(frame[..4], next.to_le_bytes());
                next += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    one.send(to, Bytes::from_static(b"room again")).unwrap();
    let too_long = one.send(to, vec![0; FRAME_BYTES_MAX + 1].into());
    assert_eq!(too_long, Err(SendError::TooLong { bytes: FRAME_BYTES_MAX + 1, limit: FRAME_BYTES_MAX }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_does_not_read_overloads_its_queue_alone() {
    let (one, _, two, two_id, mut inbox) = bare_pair(&World::Libp2p).await;
    fill(&*one, two_id, &mut inbox, || {}).await;
    one.shutdown().await;
    two.shutdown().await;
    one.shutdown().await;
}

#[tokio::test]
async fn a_stalled_direction_overloads_in_memory_too() {
    let exchange = MemoryExchange::default();
    let (one, one_id, two, two_id, mut inbox) = bare_pair(&World::Memory(exchange.clone())).await;
    exchange.stall(one_id, two_id);
    fill(&*one, two_id, &mut inbox, || exchange.resume(one_id, two_id)).await;
    two.shutdown().await;
}

#[tokio::test]
async fn a_crashed_node_comes_back_in_memory() {
    let exchange = MemoryExchange::default();
    let world = World::Memory(exchange.clone());
    let (mut one, mut two) = (world.node(1).await, world.node(2).await);
    one.join(&mut two).await;
    exchange.cut(one.id, two.id);
    let remote = one.services.remote::<Echo>(two.id);
    remote.cast(Ask::Hold).unwrap();
    exchange.crash(two.id);
    one.handle.dial(Some(two.id), two.address);
    assert_eq!(one.handle.connected().len(), 1, "nobody notices a cut cable");
    let mut again = world.node(2).await;
    exchange.mend(one.id, two.id);
    one.until_disconnected(two.id).await;
    again.join(&mut one).await;
    assert!(again.held.lock().unwrap().is_empty(), "what was sent to the earlier life is lost");
    assert_eq!(one.ask(&again, Ask::Bytes(vec![1])).await, Ok(Ask::Bytes(vec![1])));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn latency() {
    for world in [World::Libp2p, World::Memory(MemoryExchange::default())] {
        let (mut one, mut two) = (world.node(1).await, world.node(2).await);
        one.join(&mut two).await;
        let mut times = vec![];
        for round in 0..6000 {
            let before = std::time::Instant::now();
            one.ask(&two, Ask::Bytes(vec![7; 14])).await.unwrap();
            if round >= 1000 {
                times.push(before.elapsed());
            }
        }
        times.sort_unstable();
        let kind = if matches!(world, World::Libp2p) { "libp2p" } else { "memory" };
        println!("{kind}: p50 {:?} p99 {:?}", times[times.len() / 2], times[times.len() * 99 / 100]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs an interface with multicast"]
async fn mdns_finds_peers_and_ends_with_the_node() {
    let world = World::Libp2p;
    let mut networks = vec![];
    for seed in [1, 2] {
        let (sender, inbox) = mpsc::unbounded_channel();
        let sink: NetworkSink = Arc::new(move |event| drop(sender.send(event)));
        let config = NetworkConfig { mdns: true, listen: vec![], ..world.config(seed, None) };
        networks.push((world.factory(WIRE_VERSION).start(config, sink).await.unwrap(), inbox));
    }
    let begun = std::time::Instant::now();
    let (first, inbox) = &mut networks[0];
    let mut connected = false;
    while !connected {
        match tokio::time::timeout(PATIENCE, inbox.recv()).await.unwrap().unwrap() {
            NetworkEvent::Discovered { peer, addresses } => {
                println!("{:?}: {peer:?} at {addresses:?}", begun.elapsed());
                for address in addresses {
                    first.dial(Some(peer), address);
                }
            }
            NetworkEvent::Connected(_) => connected = true,
            other => println!("{:?}: {other:?}", begun.elapsed()),
        }
    }
    println!("connected after {:?}", begun.elapsed());
    for (network, inbox) in &mut networks {
        network.shutdown().await;
        while let Ok(event) = inbox.try_recv() {
            println!("{event:?}");
        }
    }
}

/// An address of this machine that needs a zone, if it has one.
fn link_local() -> Option<std::net::SocketAddrV6> {
    let table = std::fs::read_to_string("/proc/net/if_inet6").ok()?;
    let line = table.lines().find(|line| line.starts_with("fe80"))?;
    let mut columns = line.split_whitespace();
    let ip = u128::from_str_radix(columns.next()?, 16).ok()?;
    let zone = u32::from_str_radix(columns.next()?, 16).ok()?;
    Some(std::net::SocketAddrV6::new(ip.into(), 0, 0, zone))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs an interface with a link-local address"]
async fn a_link_local_address_is_dialled_with_its_zone() {
    let world = World::Libp2p;
    let mut address = link_local().expect("an interface with a link-local address");
    let mut one = world.node(1).await;
    let (sender, mut inbox) = mpsc::unbounded_channel();
    let sink: NetworkSink = Arc::new(move |event| drop(sender.send(event)));
    let config = NetworkConfig { listen: vec![], ..world.config(2, None) };
    let (id, network) = (config.identity.node(), world.factory(WIRE_VERSION).start(config, sink).await.unwrap());
    let Some(NetworkEvent::Listening(listening)) = inbox.recv().await else { panic!("it listens first") };
    address.set_port(listening.port());
    one.handle.dial(Some(id), address.into());
    assert_eq!(one.until_connected(id).await.address, address.into());
    network.shutdown().await;
}
