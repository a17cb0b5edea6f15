//! The actor around the membership machine, and the handle by which the node uses it.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SpawnErr};
use tokio::sync::oneshot;

use super::message::Message;
use super::swim::{Input, Output, Swim, Timing};
use super::view::{ClusterView, MemberEvent, MemberState, MemberView};
use crate::card::NodeCard;
use crate::discovery::Discovery;
use crate::env::{DisconnectReason, Env, NetworkEvent};
use crate::ids::NodeId;
use crate::network::NetworkHandle;
use crate::service::{Inbound, Service, ServiceId, Services};
use crate::service_numbers;
use crate::wake::Wake;

/// Messages of peers that wait for the actor. What comes on top is dropped: the protocol lives with loss.
const WAITING_MAX: usize = 1024;
/// Time that a leaving node's last words get to reach the wire.
const FAREWELL: Duration = Duration::from_millis(50);

/// The service that members speak through. Casts only.
#[derive(Debug)]
pub enum MembershipService {}

impl Service for MembershipService {
    const ID: ServiceId = service_numbers::MEMBERSHIP;
    const NAME: &'static str = "membership";
    type Request = Message;
    type Reply = ();
}

/// Somebody who wants to know what changes. It must not block.
type Subscriber = dyn Fn(&MemberEvent) + Send + Sync;

/// Membership as the rest of the node uses it. Every clone is the same; it outlives restarts of the actor.
#[derive(Clone)]
pub struct Membership {
    shared: Arc<Shared>,
}

struct Shared {
    me: NodeId,
    state: Mutex<State>,
}

struct State {
    actor: Option<ActorRef<MembershipMessage>>,
    view: Arc<ClusterView>,
    subscribers: BTreeMap<u64, Arc<Subscriber>>,
    next_subscriber: u64,
    /// How many want each node watched.
    watched: BTreeMap<NodeId, usize>,
    /// What the own card is to say.
    card: NodeCard,
}

/// Ends what [`Membership::subscribe_while`] began when it is dropped.
#[must_use = "the subscription ends when this is dropped"]
pub struct Subscription {
    shared: Arc<Shared>,
    number: u64,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let ended = self.shared.state().subscribers.remove(&self.number);
        // Dropped outside the lock: what it holds is not ours to know.
        drop(ended);
    }
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Subscription({})", self.number)
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Membership {
    /// A handle, before there is an actor: the cluster is this node alone, with this card.
    pub fn new(card: NodeCard) -> Self {
        let me = card.node;
        let mine = MemberView {
            card: Arc::new(card.clone()),
            state: MemberState::Alive,
            since: crate::env::Instant::ZERO,
            connected: true,
            rtt: Some(Duration::ZERO),
        };
        let view = Arc::new(ClusterView { me, members: BTreeMap::from([(me, mine)]) });
        let state = State { actor: None, view, subscribers: BTreeMap::new(), next_subscriber: 0, watched: BTreeMap::new(), card };
        Self { shared: Arc::new(Shared { me, state: Mutex::new(state) }) }
    }

    /// This node.
    pub fn me(&self) -> NodeId {
        self.shared.me
    }

    /// The cluster as it is believed to be now.
    pub fn view(&self) -> Arc<ClusterView> {
        Arc::clone(&self.shared.state().view)
    }

    /// Calls `subscriber` for every change from now on, in order, for as long as the node runs. It runs on the
    /// membership's actor and must not block.
    pub fn subscribe(&self, subscriber: Box<dyn Fn(&MemberEvent) + Send + Sync>) {
        self.insert(subscriber.into());
    }

    /// The same until the [`Subscription`] is dropped.
    pub fn subscribe_while(&self, subscriber: Box<dyn Fn(&MemberEvent) + Send + Sync>) -> Subscription {
        Subscription { number: self.insert(subscriber.into()), shared: Arc::clone(&self.shared) }
    }

    /// What `work` comes to, or `None` as soon as `node` is no member any more; then `work` is dropped unfinished.
    pub async fn while_present<T>(&self, node: NodeId, work: impl Future<Output = T>) -> Option<T> {
        let gone = Arc::new(tokio::sync::Notify::new());
        let tell = Arc::clone(&gone);
        let _subscription = self.subscribe_while(Box::new(move |event| {
            if let MemberEvent::Dead { node: dead, .. } | MemberEvent::Left { node: dead, .. } = event
                && *dead == node
            {
                tell.notify_one();
            }
        }));
        // Looked at after subscribing, so that no change falls between.
        if !self.view().is_present(node) {
            return None;
        }
        tokio::select! {
            biased;
            result = work => Some(result),
            () = gone.notified() => None,
        }
    }

    fn insert(&self, subscriber: Arc<Subscriber>) -> u64 {
        let mut state = self.shared.state();
        state.next_subscriber += 1;
        let number = state.next_subscriber;
        state.subscribers.insert(number, subscriber);
        number
    }

    /// Watches `node` closely, so that its death is known in about a second. Counted: it ends when [`Membership::unwatch`]
    /// was called as often.
    pub fn watch_closely(&self, node: NodeId) {
        *self.shared.state().watched.entry(node).or_insert(0) += 1;
        self.tell(Told::Watch { node });
    }

    /// Takes one [`Membership::watch_closely`] back.
    pub fn unwatch(&self, node: NodeId) {
        {
            let mut state = self.shared.state();
            if let Some(count) = state.watched.get_mut(&node) {
                *count -= 1;
                if *count == 0 {
                    state.watched.remove(&node);
                }
            }
        }
        self.tell(Told::Watch { node });
    }

    /// Changes what this node says of itself. `change` is called at once; the others hear of it soon after. Node,
    /// incarnation and revision are not for it to change, and addresses are added by the network.
    pub fn update_card(&self, change: impl FnOnce(&mut NodeCard)) {
        change(&mut self.shared.state().card);
        self.tell(Told::Card);
    }

    /// Says good-bye to everybody. Resolves when the words have had time to go out; the network may then be stopped.
    pub async fn leave(&self) {
        let (sender, receiver) = oneshot::channel();
        self.tell(Told::Leave(sender));
        // No answer means no actor: then nobody knows this node.
        let _ = receiver.await;
    }

    fn tell(&self, message: Told) {
        let actor = self.shared.state().actor.clone();
        drop(actor.map(|actor| actor.cast(MembershipMessage(message))));
    }
}

impl fmt::Debug for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Membership").field("me", &self.shared.me).finish_non_exhaustive()
    }
}

/// What a [`MembershipActor`] is started with. A clone starts its successor.
#[derive(Clone, Debug)]
pub struct MembershipArguments {
    /// What others use it by.
    pub handle: Membership,
    /// Time, chance, tasks.
    pub env: Env,
    /// The way to the others.
    pub services: Services,
    /// Who is connected.
    pub network: NetworkHandle,
    /// Who dials.
    pub discovery: Discovery,
    /// The pace.
    pub timing: Timing,
}

/// What the actor hears.
#[derive(Debug)]
pub struct MembershipMessage(Told);

enum Told {
    Tick,
    Network(NetworkEvent),
    Said { from: NodeId, message: Message },
    Watch { node: NodeId },
    Card,
    Leave(oneshot::Sender<()>),
}

impl fmt::Debug for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tick => f.write_str("Tick"),
            Self::Network(event) => write!(f, "Network({event:?})"),
            Self::Said { from, message } => write!(f, "Said({from:?}, {message:?})"),
            Self::Watch { node } => write!(f, "Watch({node:?})"),
            Self::Card => f.write_str("Card"),
            Self::Leave(_) => f.write_str("Leave"),
        }
    }
}

/// Why the actor did not start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("membership did not start: {0}")]
pub struct MembershipError(String);

/// Keeps track of who is in the cluster.
#[derive(Debug, Clone, Copy, Default)]
pub struct MembershipActor;

impl MembershipActor {
    /// Starts the actor, linked to `supervisor` if there is one.
    ///
    /// # Errors
    /// If it cannot be started, or its service is served by another.
    pub async fn start(
        arguments: MembershipArguments,
        supervisor: Option<ActorCell>,
    ) -> Result<ActorRef<MembershipMessage>, MembershipError> {
        let started = match supervisor {
            Some(supervisor) => Actor::spawn_linked(None, Self, arguments, supervisor).await,
            None => Actor::spawn(None, Self, arguments).await,
        };
        started.map(|(actor, _)| actor).map_err(|error: SpawnErr| MembershipError(error.to_string()))
    }
}

/// What the actor holds.
#[derive(Debug)]
pub struct MembershipState {
    arguments: MembershipArguments,
    swim: Swim,
    wake: Wake,
    waiting: Arc<AtomicUsize>,
    listening: Vec<SocketAddr>,
}

impl Actor for MembershipActor {
    type Msg = MembershipMessage;
    type State = MembershipState;
    type Arguments = MembershipArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<MembershipMessage>,
        arguments: MembershipArguments,
    ) -> Result<Self::State, ActorProcessingErr> {
        let env = &arguments.env;
        let now = env.clock.now();
        let (card, watched) = {
            let mut state = arguments.handle.shared.state();
            state.actor = Some(myself.clone());
            let mut card = state.card.clone();
            // Above what an earlier actor of this life may have published.
            let last = state.view.get(arguments.handle.shared.me).map_or(0, |mine| mine.card.revision);
            card.revision = card.revision.max(last + 1);
            (card, state.watched.keys().copied().collect::<Vec<_>>())
        };
        let mut state = MembershipState {
            swim: Swim::new(now, arguments.timing, card, env.rng.next_u64("membership")),
            wake: Wake::new("membership", Arc::clone(&env.clock), Arc::clone(&env.spawner)),
            waiting: Arc::new(AtomicUsize::new(0)),
            listening: Vec::new(),
            arguments,
        };
        let (actor, waiting) = (myself.clone(), Arc::clone(&state.waiting));
        // A successor takes the place of one that has crashed.
        state.arguments.services.withdraw::<MembershipService>();
        state.arguments.services.serve::<MembershipService>(move |inbound: Inbound<MembershipService>| {
            let Inbound { from, request, reply, .. } = inbound;
            if let Some(reply) = reply {
                return reply.fail("membership takes no calls, only casts");
            }
            if waiting.fetch_add(1, Ordering::Relaxed) >= WAITING_MAX
                || actor.cast(MembershipMessage(Told::Said { from, message: request })).is_err()
            {
                waiting.fetch_sub(1, Ordering::Relaxed);
            }
        })?;
        let actor = myself.clone();
        state.arguments.network.subscribe(Box::new(move |event| {
            // Once the actor has stopped its successor listens for itself.
            let _ = actor.cast(MembershipMessage(Told::Network(event.clone())));
        }));
        for node in watched {
            state.step(Input::Watch { node, watched: true });
        }
        state.step(Input::Tick);
        state.arm(&myself);
        Ok(state)
    }

    async fn handle(
        &self,
        myself: ActorRef<MembershipMessage>,
        message: MembershipMessage,
        state: &mut Self::State,
    ) -> Result<(), ActorProcessingErr> {
        match message.0 {
            Told::Tick => {
                state.wake.fired(state.arguments.env.clock.now());
                state.step(Input::Tick);
            }
            Told::Network(event) => state.network(event),
            Told::Said { from, message } => {
                state.waiting.fetch_sub(1, Ordering::Relaxed);
                state.step(Input::Message { from, message });
            }
            Told::Watch { node } => {
                let watched = state.arguments.handle.shared.state().watched.contains_key(&node);
                state.step(Input::Watch { node, watched });
            }
            Told::Card => state.card(),
            Told::Leave(done) => {
                state.step(Input::Leave);
                let clock = Arc::clone(&state.arguments.env.clock);
                let until = clock.now() + FAREWELL;
                state.arguments.env.spawner.task(
                    "membership leave",
                    Box::pin(async move {
                        clock.sleep_until(until).await;
                        let _ = done.send(());
                    }),
                );
            }
        }
        state.arm(&myself);
        Ok(())
    }

    async fn post_stop(&self, _: ActorRef<MembershipMessage>, state: &mut Self::State) -> Result<(), ActorProcessingErr> {
        state.arguments.services.withdraw::<MembershipService>();
        Ok(())
    }
}

impl MembershipState {
    fn arm(&mut self, myself: &ActorRef<MembershipMessage>) {
        self.wake.set(myself, self.swim.deadline(), MembershipMessage(Told::Tick));
    }

    fn network(&mut self, event: NetworkEvent) {
        match event {
            NetworkEvent::Connected(connected) => self.step(Input::Connected(connected.peer)),
            NetworkEvent::Disconnected { peer, reason } => {
                let broken = reason == DisconnectReason::Closed;
                self.step(Input::Disconnected { peer, broken });
            }
            NetworkEvent::Listening(address) => {
                let address = crate::discovery::address::plain(address);
                // A link-local address of this host means nothing to others: it lacks the link.
                let usable = match address {
                    SocketAddr::V4(v4) => !v4.ip().is_unspecified(),
                    SocketAddr::V6(v6) => !v6.ip().is_unspecified() && !v6.ip().is_unicast_link_local(),
                };
                if usable && !self.listening.contains(&address) {
                    self.listening.push(address);
                    // The most local last.
                    self.listening.sort_by_key(|address| (address.ip().is_loopback(), *address));
                    self.card();
                }
            }
            _ => {}
        }
    }

    fn card(&mut self) {
        let mut card = self.arguments.handle.shared.state().card.clone();
        let mut addresses: Vec<String> = self.listening.iter().map(SocketAddr::to_string).collect();
        for given in &card.addresses {
            if !addresses.contains(given) {
                addresses.push(given.clone());
            }
        }
        card.addresses = addresses;
        self.step(Input::Card(Box::new(card)));
    }

    fn step(&mut self, input: Input) {
        let now = self.arguments.env.clock.now();
        let MembershipArguments { handle, services, network, discovery, .. } = &self.arguments;
        for output in self.swim.step(now, input) {
            match output {
                Output::Send { to, message } => {
                    // Loss is part of the protocol: who cannot be reached is found out by its silence.
                    if let Err(error) = services.remote::<MembershipService>(to).cast(message) {
                        tracing::trace!(peer = ?to, %error, "a membership message was not taken");
                    }
                }
                Output::View(view) => {
                    let old = std::mem::replace(&mut handle.shared.state().view, view);
                    drop(old);
                }
                Output::Event(event) => {
                    self::told(&event);
                    if let MemberEvent::Joined { node, .. } = event {
                        let view = handle.view();
                        if let Some(member) = view.get(node).filter(|member| !member.connected) {
                            discovery.heard(node, parsed(&member.card.addresses));
                        }
                    }
                    let subscribers: Vec<Arc<Subscriber>> = handle.shared.state().subscribers.values().cloned().collect();
                    for subscriber in subscribers {
                        subscriber(&event);
                    }
                }
                Output::Want { peer, wanted, addresses } => {
                    if wanted {
                        discovery.heard(peer, parsed(&addresses));
                    }
                    discovery.want(peer, wanted);
                }
                Output::Doubt { peer, addresses } => network.doubt(peer, parsed(&addresses)),
                Output::Disconnect(peer) => network.disconnect(peer),
                Output::Superseded => tracing::error!(
                    "other nodes know a later life of this node: another process runs with a copy of its data folder, \
                     or the folder was restored from a backup. Give each node its own --data-dir, or start this one again"
                ),
            }
        }
    }
}

fn parsed(addresses: &[String]) -> Vec<SocketAddr> {
    addresses.iter().filter_map(|address| address.parse().ok()).collect()
}

fn told(event: &MemberEvent) {
    match event {
        MemberEvent::CardChanged { .. } => tracing::debug!(?event, "membership"),
        _ => tracing::info!(?event, "membership"),
    }
}
