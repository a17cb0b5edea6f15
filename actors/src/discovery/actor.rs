//! The actor around the peer book and the beacon.

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SpawnErr};

use super::beacon::payload::{Hello, Kind, Seal};
use super::beacon::schedule::{Action, Schedule};
use super::book::{Input, Output, PeerBook, Refusal, Source};
use super::{address, seen};
use crate::card::WIRE_VERSION;
use crate::env::{Beacon, BeaconSocket, Env, Instant, NetworkEvent, TROUBLES_MAX, Trouble};
use crate::ids::{Incarnation, NodeId};
use crate::network::NetworkHandle;
use crate::secret::ClusterKey;
use crate::wake::Wake;

/// Pause between two looks at the list of interfaces.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Packets of the beacon that wait for the actor. What comes on top is dropped, as packets are.
const PACKETS_MAX: usize = 256;

/// Discovery as the rest of the node uses it. Every clone is the same; it outlives restarts of the actor.
#[derive(Clone, Default)]
pub struct Discovery {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    actor: Mutex<Option<ActorRef<DiscoveryMessage>>>,
    refusals: Mutex<Vec<Refusal>>,
    troubles: Mutex<Vec<Trouble>>,
}

impl Discovery {
    /// A handle, before there is an actor.
    pub fn new() -> Self {
        Self::default()
    }

    fn tell(&self, message: DiscoveryMessage) {
        let actor = self.shared.actor.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // Without an actor there is nobody to find peers, and with the next one everything is heard of again.
        drop(actor.map(|actor| actor.cast(message)));
    }

    /// Connects to whoever is at `address`, now and whenever the connection is lost.
    pub fn add_peer(&self, address: SocketAddr) {
        self.tell(DiscoveryMessage(Told::Book(Input::Ask(address))));
    }

    /// Somebody said that `peer` is at these addresses.
    pub fn heard(&self, peer: NodeId, addresses: Vec<SocketAddr>) {
        self.tell(DiscoveryMessage(Told::Book(Input::Heard { peer, incarnation: None, addresses, source: Source::Card })));
    }

    /// Whether a connection to `peer` is needed even beyond [`super::CONNECTIONS_TARGET`].
    pub fn want(&self, peer: NodeId, wanted: bool) {
        self.tell(DiscoveryMessage(Told::Book(Input::Want { peer, wanted })));
    }

    /// Peers that are there and cannot be talked to, with the reason, latest last.
    pub fn refusals(&self) -> Vec<Refusal> {
        self.shared.refusals.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What keeps this node from finding others at the moment, e.g. a given peer that does not answer.
    pub fn troubles(&self) -> Vec<Trouble> {
        self.shared.troubles.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl fmt::Debug for Discovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Discovery").finish_non_exhaustive()
    }
}

/// What a [`DiscoveryActor`] is started with. A clone starts its successor.
#[derive(Clone, Debug)]
pub struct DiscoveryArguments {
    /// What others use it by.
    pub handle: Discovery,
    /// Time, chance, tasks, files.
    pub env: Env,
    /// The control network, which dials and reports.
    pub network: NetworkHandle,
    /// The multicast hello; none leaves the other sources.
    pub beacon: Option<Arc<dyn Beacon>>,
    /// The key of a private cluster.
    pub cluster: Option<ClusterKey>,
    /// This node.
    pub node: NodeId,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// Addresses from the user.
    pub peers: Vec<SocketAddr>,
    /// The number of connections up to which everybody heard of is dialled; [`super::CONNECTIONS_TARGET`] as a rule.
    pub target: usize,
}

/// What the actor hears.
#[derive(Debug)]
pub struct DiscoveryMessage(Told);

#[derive(Debug)]
enum Told {
    Tick,
    Network(NetworkEvent),
    Packet { from: SocketAddr, hello: Hello },
    Book(Input),
}

/// Why the actor did not start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the search for peers did not start: {0}")]
pub struct DiscoveryError(String);

/// Finds peers for a node.
#[derive(Debug, Clone, Copy, Default)]
pub struct DiscoveryActor;

impl DiscoveryActor {
    /// Starts the actor, linked to `supervisor` if there is one.
    ///
    /// # Errors
    /// If it cannot be started.
    pub async fn start(arguments: DiscoveryArguments, supervisor: Option<ActorCell>) -> Result<ActorRef<DiscoveryMessage>, DiscoveryError> {
        let started = match supervisor {
            Some(supervisor) => Actor::spawn_linked(None, Self, arguments, supervisor).await,
            None => Actor::spawn(None, Self, arguments).await,
        };
        started.map(|(actor, _)| actor).map_err(|error: SpawnErr| DiscoveryError(error.to_string()))
    }
}

/// What the actor holds.
#[derive(Debug)]
pub struct DiscoveryState {
    arguments: DiscoveryArguments,
    book: PeerBook,
    schedule: Schedule,
    seal: Seal,
    socket: Option<Arc<dyn BeaconSocket>>,
    /// What the beacon lacks.
    deaf: Option<Trouble>,
    waiting: Arc<AtomicUsize>,
    next_look: Instant,
    wake: Wake,
}

impl Actor for DiscoveryActor {
    type Msg = DiscoveryMessage;
    type State = DiscoveryState;
    type Arguments = DiscoveryArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<DiscoveryMessage>,
        arguments: DiscoveryArguments,
    ) -> Result<Self::State, ActorProcessingErr> {
        let env = &arguments.env;
        let now = env.clock.now();
        let seal = Seal::new(arguments.cluster.clone());
        let waiting = Arc::new(AtomicUsize::new(0));
        let mut deaf = None;
        let socket = arguments.beacon.as_ref().and_then(|beacon| {
            let (actor, seal, waiting) = (myself.clone(), seal.clone(), Arc::clone(&waiting));
            let open_to_all = arguments.cluster.is_none();
            // Packets are checked where they come in, so that what floods the port does not flood the actor.
            let sink = Arc::new(move |packet: crate::env::BeaconPacket| {
                let from = address::plain(packet.from);
                if open_to_all && !address::is_local(from.ip()) {
                    return;
                }
                let Some(hello) = seal.open(&packet.bytes) else { return };
                if waiting.fetch_add(1, Ordering::Relaxed) >= PACKETS_MAX
                    || actor.cast(DiscoveryMessage(Told::Packet { from, hello })).is_err()
                {
                    waiting.fetch_sub(1, Ordering::Relaxed);
                }
            });
            match beacon.open(Arc::clone(&env.spawner), sink) {
                Ok(socket) => Some(socket),
                Err(error) => {
                    tracing::warn!(%error, "the beacon is off");
                    let help = "give addresses with --peer; other ways to find nodes go on".to_owned();
                    deaf = Some(Trouble { about: "multicast hellos".to_owned(), what: error.reason, help });
                    None
                }
            }
        });
        let mut state = DiscoveryState {
            book: PeerBook::new(arguments.node, arguments.target, env.rng.next_u64("discovery book")),
            schedule: Schedule::new(arguments.node, env.rng.next_u64("discovery schedule")),
            wake: Wake::new("discovery", Arc::clone(&env.clock), Arc::clone(&env.spawner)),
            seal,
            socket,
            deaf,
            waiting,
            next_look: now,
            arguments,
        };
        state.look(now);
        let met = state.met_before();
        state.tell_book(now, Input::Seen(met));
        for peer in state.arguments.peers.clone() {
            state.tell_book(now, Input::Ask(peer));
        }
        *state.arguments.handle.shared.actor.lock().unwrap_or_else(PoisonError::into_inner) = Some(myself.clone());
        let actor = myself.clone();
        state.arguments.network.subscribe(Box::new(move |event| {
            // Once the actor has stopped its successor listens for itself.
            let _ = actor.cast(DiscoveryMessage(Told::Network(event.clone())));
        }));
        state.arm(&myself, now);
        Ok(state)
    }

    async fn handle(
        &self,
        myself: ActorRef<DiscoveryMessage>,
        message: DiscoveryMessage,
        state: &mut Self::State,
    ) -> Result<(), ActorProcessingErr> {
        let now = state.arguments.env.clock.now();
        match message.0 {
            Told::Tick => {
                state.wake.fired(now);
                state.look(now);
                let actions = state.schedule.tick(now);
                state.act(now, actions);
                state.tell_book(now, Input::Tick);
            }
            Told::Network(event) => state.network(now, event),
            Told::Packet { from, hello } => {
                state.waiting.fetch_sub(1, Ordering::Relaxed);
                let actions = state.schedule.heard(now, from, &hello);
                state.act(now, actions);
            }
            Told::Book(input) => state.tell_book(now, input),
        }
        state.arm(&myself, now);
        Ok(())
    }

    async fn post_stop(&self, _: ActorRef<DiscoveryMessage>, state: &mut Self::State) -> Result<(), ActorProcessingErr> {
        if let Some(socket) = &state.socket {
            socket.close();
        }
        Ok(())
    }
}

impl DiscoveryState {
    fn met_before(&self) -> Vec<seen::SeenPeer> {
        match self.arguments.env.storage.read(seen::FILE) {
            Ok(Some(content)) => seen::decode(&content).unwrap_or_else(|error| {
                tracing::warn!(%error);
                Vec::new()
            }),
            Ok(None) => Vec::new(),
            Err(error) => {
                tracing::warn!(%error, "the file of peers met before cannot be read");
                Vec::new()
            }
        }
    }

    fn look(&mut self, now: Instant) {
        if now < self.next_look {
            return;
        }
        self.next_look = now + LOOK_EVERY;
        if let Some(socket) = &self.socket {
            let interfaces = socket.refresh();
            self.deaf = socket.trouble();
            self.schedule.interfaces(now, interfaces.clone());
            self.tell_book(now, Input::Interfaces(interfaces));
        }
    }

    fn arm(&mut self, myself: &ActorRef<DiscoveryMessage>, now: Instant) {
        self.tell_troubles(now);
        let mut next = self.book.deadline(now);
        if self.socket.is_some() {
            next = next.min(self.next_look);
            next = self.schedule.deadline().map_or(next, |due| due.min(next));
        }
        self.wake.set(myself, next, DiscoveryMessage(Told::Tick));
    }

    fn tell_troubles(&self, now: Instant) {
        let mut troubles: Vec<Trouble> = self.deaf.iter().cloned().chain(self.book.troubles(now)).collect();
        troubles.truncate(TROUBLES_MAX);
        *self.arguments.handle.shared.troubles.lock().unwrap_or_else(PoisonError::into_inner) = troubles;
    }

    fn network(&mut self, now: Instant, event: NetworkEvent) {
        let input = match event {
            NetworkEvent::Listening(address) => {
                self.schedule.listening(now, address::plain(address));
                Input::Listening(address)
            }
            NetworkEvent::Discovered { peer, addresses } => Input::Heard { peer, incarnation: None, addresses, source: Source::Mdns },
            NetworkEvent::Connected(connected) => {
                Input::Connected { peer: connected.peer, address: connected.address, dialled: connected.dialled }
            }
            NetworkEvent::AlreadyConnected { peer, address } => Input::AlreadyConnected { peer, address },
            NetworkEvent::Disconnected { peer, .. } => Input::Disconnected { peer },
            NetworkEvent::DialFailed { address, reason } => Input::DialFailed { address, reason },
            NetworkEvent::Refused { peer, address, reason } => Input::Refused { peer, address, reason },
            _ => return,
        };
        self.tell_book(now, input);
    }

    fn act(&mut self, now: Instant, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Announce { interface, family, port } => {
                    let packet = self.packet(Kind::Hello, port);
                    if let Some(socket) = &self.socket
                        && !socket.announce(interface, family, &packet)
                    {
                        tracing::trace!(interface, ?family, "no hello went out");
                    }
                }
                Action::Answer { to, port } => {
                    let packet = self.packet(Kind::Answer, port);
                    if let Some(socket) = &self.socket {
                        socket.reply(to, &packet);
                    }
                }
                Action::Found { peer, incarnation, address, wire_version } if wire_version == WIRE_VERSION => {
                    let heard = Input::Heard { peer, incarnation: Some(incarnation), addresses: vec![address], source: Source::Beacon };
                    self.tell_book(now, heard);
                }
                Action::Found { peer, address, wire_version, .. } => {
                    let advice = if wire_version > WIRE_VERSION { "update this node" } else { "update that node" };
                    let reason = format!("it speaks version {wire_version} of the protocol, this node version {WIRE_VERSION}: {advice}");
                    self.tell_book(now, Input::Refused { peer: Some(peer), address: Some(address), reason });
                }
            }
        }
    }

    fn packet(&self, kind: Kind, port: u16) -> Vec<u8> {
        let (node, incarnation) = (self.arguments.node, self.arguments.incarnation);
        let mut nonce = [0; 16];
        self.arguments.env.rng.fill("beacon nonce", &mut nonce);
        self.seal.seal(&Hello { wire_version: WIRE_VERSION, kind, node, incarnation, port }, nonce)
    }

    fn tell_book(&mut self, now: Instant, input: Input) {
        for output in self.book.step(now, input) {
            match output {
                Output::Dial { peer, address } => self.arguments.network.dial(peer, address),
                Output::Newcomer { peer, source_address } => {
                    tracing::info!(peer = %peer.short(), address = %source_address, "heard of a node");
                }
                Output::Refusal(refusal) => {
                    let peer = refusal.peer.map(|peer| peer.short());
                    tracing::warn!(?peer, address = ?refusal.address, reason = refusal.reason, "a node cannot be joined");
                }
                Output::Save(met) => {
                    if let Err(error) = self.arguments.env.storage.write(seen::FILE, &seen::encode(&met), false) {
                        tracing::warn!(%error, "the peers met cannot be written down");
                    }
                }
            }
        }
        let mut shown = self.arguments.handle.shared.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        if shown.as_slice() != self.book.refusals() {
            *shown = self.book.refusals().to_vec();
        }
    }
}
