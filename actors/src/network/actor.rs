//! The actor that owns a node's control network and hands its events on, in order.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SpawnErr};

use crate::env::{Connected, DisconnectReason, Network, NetworkConfig, NetworkError, NetworkEvent, NetworkFactory, TROUBLES_MAX, Trouble};
use crate::ids::NodeId;
use crate::service::Services;

/// Somebody who wants to know what the network reports. It must not block.
pub type Subscriber = Box<dyn Fn(&NetworkEvent) + Send + Sync>;

/// The network as the rest of the node uses it. Every clone is the same; it outlives restarts of the actor.
#[derive(Clone)]
pub struct NetworkHandle {
    shared: Arc<Shared>,
}

struct Shared {
    services: Services,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    actor: Option<ActorRef<NetworkMessage>>,
    network: Option<Arc<dyn Network>>,
    subscribers: Vec<Arc<Subscriber>>,
    listening: Vec<SocketAddr>,
    connected: BTreeMap<NodeId, Connected>,
    troubles: Vec<Trouble>,
}

impl NetworkHandle {
    /// A handle for the network that `services` will use, before there is one.
    pub fn new(services: Services) -> Self {
        Self { shared: Arc::new(Shared { services, state: Mutex::default() }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells `subscriber` of every event but frames, in order. It first hears of the addresses that are listened at
    /// and the peers that are connected already.
    pub fn subscribe(&self, subscriber: Subscriber) {
        let subscriber = Arc::new(subscriber);
        let mut state = self.state();
        match state.actor.clone() {
            // On the actor, so that the first words fit what comes next.
            Some(actor) => {
                drop(state);
                if actor.send_message(NetworkMessage::Subscribe(Arc::clone(&subscriber))).is_err() {
                    self.state().subscribers.push(subscriber);
                }
            }
            None => state.subscribers.push(subscriber),
        }
    }

    /// Tries to connect to a peer; see [`Network::dial`]. Without a running network nothing happens.
    pub fn dial(&self, peer: Option<NodeId>, address: SocketAddr) {
        if let Some(network) = self.network() {
            network.dial(peer, address);
        }
    }

    /// Looks for another connection to a peer of which nothing is heard; see [`Network::doubt`].
    pub fn doubt(&self, peer: NodeId, addresses: Vec<SocketAddr>) {
        if let Some(network) = self.network() {
            network.doubt(peer, addresses);
        }
    }

    /// Closes the connection to a peer.
    pub fn disconnect(&self, peer: NodeId) {
        if let Some(network) = self.network() {
            network.disconnect(peer);
        }
    }

    /// The addresses that the node listens at.
    pub fn listening(&self) -> Vec<SocketAddr> {
        self.state().listening.clone()
    }

    /// The connected peers, in order of their ids.
    pub fn connected(&self) -> Vec<Connected> {
        self.state().connected.values().cloned().collect()
    }

    /// What does not work at the moment, oldest first.
    pub fn troubles(&self) -> Vec<Trouble> {
        self.state().troubles.clone()
    }

    fn network(&self) -> Option<Arc<dyn Network>> {
        self.state().network.clone()
    }

    /// Hands an event on.
    fn hand_on(&self, event: &NetworkEvent) {
        if let NetworkEvent::Frame { .. } = event {
            return self.shared.services.on_event(event);
        }
        let subscribers = {
            let mut state = self.state();
            match event {
                NetworkEvent::Listening(address) if !state.listening.contains(address) => state.listening.push(*address),
                NetworkEvent::Connected(connected) => drop(state.connected.insert(connected.peer, connected.clone())),
                NetworkEvent::Disconnected { peer, .. } => drop(state.connected.remove(peer)),
                NetworkEvent::Trouble(trouble) => {
                    state.troubles.retain(|known| known.about != trouble.about);
                    state.troubles.push(trouble.clone());
                    state.troubles.truncate(TROUBLES_MAX);
                }
                NetworkEvent::TroubleOver { about } => state.troubles.retain(|known| known.about != *about),
                _ => {}
            }
            state.subscribers.clone()
        };
        self.shared.services.on_event(event);
        for subscriber in subscribers {
            subscriber(event);
        }
    }

    fn begin(&self, actor: ActorRef<NetworkMessage>) {
        self.state().actor = Some(actor);
    }

    fn run(&self, network: &Arc<dyn Network>) {
        self.state().network = Some(Arc::clone(network));
        self.shared.services.attach(Arc::clone(network));
    }

    /// The network is gone, and so is everybody on it.
    fn end(&self, reason: &DisconnectReason) {
        self.shared.services.detach();
        let peers: Vec<NodeId> = {
            let mut state = self.state();
            state.network = None;
            state.listening.clear();
            state.troubles.clear();
            state.connected.keys().copied().collect()
        };
        for peer in peers {
            self.hand_on(&NetworkEvent::Disconnected { peer, reason: reason.clone() });
        }
    }
}

impl fmt::Debug for NetworkHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("NetworkHandle")
            .field("listening", &state.listening)
            .field("connected", &state.connected.keys())
            .finish_non_exhaustive()
    }
}

/// What a [`NetworkActor`] is started with. A clone starts its successor.
#[derive(Debug, Clone)]
pub struct NetworkArguments {
    /// What others use it by.
    pub handle: NetworkHandle,
    /// Starts the network.
    pub factory: Arc<dyn NetworkFactory>,
    /// How.
    pub config: NetworkConfig,
}

/// What the actor hears.
pub enum NetworkMessage {
    /// From the network.
    Event(NetworkEvent),
    /// From [`NetworkHandle::subscribe`].
    Subscribe(Arc<Subscriber>),
}

impl fmt::Debug for NetworkMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Event(event) => write!(f, "Event({event:?})"),
            Self::Subscribe(_) => f.write_str("Subscribe"),
        }
    }
}

/// Owns a node's [`Network`]: it is started with the actor and has stopped, its ports free, when the actor has.
#[derive(Debug, Clone, Copy, Default)]
pub struct NetworkActor;

impl NetworkActor {
    /// Starts the actor, linked to `supervisor` if there is one.
    ///
    /// # Errors
    /// [`NetworkError`] if the network does not start.
    pub async fn start(arguments: NetworkArguments, supervisor: Option<ActorCell>) -> Result<ActorRef<NetworkMessage>, NetworkError> {
        let started = match supervisor {
            Some(supervisor) => Actor::spawn_linked(None, Self, arguments, supervisor).await,
            None => Actor::spawn(None, Self, arguments).await,
        };
        started.map(|(actor, _)| actor).map_err(|error| match error {
            SpawnErr::StartupFailed(error) => match error.downcast::<NetworkError>() {
                Ok(error) => *error,
                Err(error) => NetworkError::Start(error.to_string()),
            },
            other => NetworkError::Start(other.to_string()),
        })
    }
}

impl Actor for NetworkActor {
    type Msg = NetworkMessage;
    type State = (NetworkHandle, Arc<dyn Network>);
    type Arguments = NetworkArguments;

    async fn pre_start(&self, myself: ActorRef<NetworkMessage>, arguments: NetworkArguments) -> Result<Self::State, ActorProcessingErr> {
        let NetworkArguments { handle, factory, config } = arguments;
        // After a crash of this actor the peers of its earlier life are still on the books.
        handle.end(&DisconnectReason::Closed);
        handle.begin(myself.clone());
        let sink = Arc::new(move |event| {
            // Once the actor has stopped nobody cares.
            let _ = myself.send_message(NetworkMessage::Event(event));
        });
        let network = factory.start(config, sink).await?;
        handle.run(&network);
        Ok((handle, network))
    }

    async fn handle(
        &self,
        _: ActorRef<NetworkMessage>,
        message: NetworkMessage,
        (handle, _): &mut Self::State,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            NetworkMessage::Event(event) => handle.hand_on(&event),
            NetworkMessage::Subscribe(subscriber) => {
                for address in handle.listening() {
                    subscriber(&NetworkEvent::Listening(address));
                }
                for connected in handle.connected() {
                    subscriber(&NetworkEvent::Connected(connected));
                }
                handle.state().subscribers.push(subscriber);
            }
        }
        Ok(())
    }

    async fn post_stop(&self, _: ActorRef<NetworkMessage>, (handle, network): &mut Self::State) -> Result<(), ActorProcessingErr> {
        network.shutdown().await;
        handle.end(&DisconnectReason::Requested);
        Ok(())
    }
}
