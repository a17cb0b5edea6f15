//! The actor around the link table.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SpawnErr};
use serde::{Deserialize, Serialize};

use super::matrix::{LinkMatrix, LinkMeasure};
use super::table::{Input, LinkTable, Output};
use crate::env::{Env, NetworkEvent};
use crate::ids::NodeId;
use crate::network::NetworkHandle;
use crate::service::{CallError, Inbound, Service, ServiceId, Services};
use crate::service_numbers;
use crate::wake::Wake;

/// How long an echo may take.
const ECHO_DEADLINE: Duration = Duration::from_secs(2);
/// Bytes of one message of a bandwidth measurement.
const LOAD_BYTES: usize = 256 * 1024;
/// Messages of a measurement that are under way at a time.
const LOADS_AT_ONCE: usize = 4;
/// The most messages of a measurement.
const LOADS_MAX: usize = 64;
/// A measurement ends after this time, however little went through.
const LOAD_TIME: Duration = Duration::from_millis(300);
/// How long one message of a measurement may take.
const LOAD_DEADLINE: Duration = Duration::from_secs(2);

/// The service by which nodes measure their links.
#[derive(Debug)]
pub enum Links {}

impl Service for Links {
    const ID: ServiceId = service_numbers::LINKS;
    const NAME: &'static str = "links";
    type Request = LinksRequest;
    type Reply = LinksReply;
}

/// A request of the [`Links`] service.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum LinksRequest {
    /// Answer at once.
    Echo,
    /// Tell what you have measured.
    Row,
    /// Take these bytes and say so.
    Load(Vec<u8>),
}

/// An answer of the [`Links`] service.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum LinksReply {
    /// To an echo.
    Echo,
    /// What was measured, by peer.
    Row(Vec<(NodeId, LinkMeasure)>),
    /// So many bytes were taken.
    Taken(u32),
}

/// Why a bandwidth was not measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BandwidthError {
    /// A message was not taken or not answered.
    #[error("the bandwidth to node {} cannot be measured: {source}", peer.short())]
    Call {
        /// To whom.
        peer: NodeId,
        /// Why.
        source: CallError,
    },
    /// Another measurement of this node is under way, and two would disturb each other.
    #[error("another bandwidth measurement is under way; try again in a second")]
    Busy,
}

/// The links as the rest of the node sees them. Every clone is the same; it outlives restarts of the actor.
#[derive(Clone)]
pub struct Topology {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    /// Held while a bandwidth is measured.
    measuring: tokio::sync::Mutex<()>,
}

struct State {
    actor: Option<ActorRef<TopologyMessage>>,
    links: Arc<LinkMatrix>,
    /// This node's own row, for peers who ask.
    row: Vec<(NodeId, LinkMeasure)>,
    /// Set while the actor runs.
    way: Option<(Env, Services)>,
}

impl Default for Topology {
    fn default() -> Self {
        Self::new()
    }
}

impl Topology {
    /// A handle, before there is an actor: no link is known.
    pub fn new() -> Self {
        let state = State { actor: None, links: Arc::default(), row: Vec::new(), way: None };
        Self { shared: Arc::new(Shared { state: Mutex::new(state), measuring: tokio::sync::Mutex::new(()) }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The links that are known now.
    pub fn links(&self) -> Arc<LinkMatrix> {
        Arc::clone(&self.state().links)
    }

    /// Measures the bandwidth of the control network to a connected peer, in bytes a second, and enters it into the
    /// matrix. Sends for about 0.3 s, at most 16 MiB.
    ///
    /// # Errors
    /// If the peer does not answer, or another measurement is under way.
    pub async fn measure_bandwidth(&self, peer: NodeId) -> Result<f64, BandwidthError> {
        let Ok(_alone) = self.shared.measuring.try_lock() else { return Err(BandwidthError::Busy) };
        let way = self.state().way.clone();
        let Some((env, services)) = way else {
            return Err(BandwidthError::Call { peer, source: CallError::NotConnected { node: peer } });
        };
        let remote = services.remote::<Links>(peer);
        let load = || remote.call(LinksRequest::Load(vec![0x5a; LOAD_BYTES]), LOAD_DEADLINE);
        let begin = env.clock.now();
        let mut under_way = futures::stream::FuturesUnordered::new();
        let (mut sent, mut taken) = (0, 0_usize);
        loop {
            while sent < LOADS_MAX && under_way.len() < LOADS_AT_ONCE && env.clock.now().since(begin) < LOAD_TIME {
                sent += 1;
                under_way.push(load());
            }
            match futures::StreamExt::next(&mut under_way).await {
                Some(Ok(_)) => taken += LOAD_BYTES,
                Some(Err(source)) => return Err(BandwidthError::Call { peer, source }),
                None => break,
            }
        }
        let seconds = env.clock.now().since(begin).as_secs_f64().max(1e-6);
        let bytes_per_second = taken as f64 / seconds;
        let actor = self.state().actor.clone();
        drop(actor.map(|actor| actor.cast(TopologyMessage(Told::Table(Input::Bandwidth { peer, bytes_per_second })))));
        Ok(bytes_per_second)
    }
}

impl fmt::Debug for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Topology").finish_non_exhaustive()
    }
}

/// What a [`TopologyActor`] is started with. A clone starts its successor.
#[derive(Clone, Debug)]
pub struct TopologyArguments {
    /// What others use it by.
    pub handle: Topology,
    /// Time, chance, tasks.
    pub env: Env,
    /// The way to the others.
    pub services: Services,
    /// Who is connected.
    pub network: NetworkHandle,
}

/// What the actor hears.
#[derive(Debug)]
pub struct TopologyMessage(Told);

#[derive(Debug)]
enum Told {
    Tick,
    Changed,
    Table(Input),
}

/// Why the actor did not start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the measuring of links did not start: {0}")]
pub struct TopologyError(String);

/// Measures the links of a node.
#[derive(Debug, Clone, Copy, Default)]
pub struct TopologyActor;

impl TopologyActor {
    /// Starts the actor, linked to `supervisor` if there is one.
    ///
    /// # Errors
    /// If it cannot be started, or its service is served by another.
    pub async fn start(arguments: TopologyArguments, supervisor: Option<ActorCell>) -> Result<ActorRef<TopologyMessage>, TopologyError> {
        let started = match supervisor {
            Some(supervisor) => Actor::spawn_linked(None, Self, arguments, supervisor).await,
            None => Actor::spawn(None, Self, arguments).await,
        };
        started.map(|(actor, _)| actor).map_err(|error: SpawnErr| TopologyError(error.to_string()))
    }
}

/// What the actor holds.
#[derive(Debug)]
pub struct TopologyState {
    arguments: TopologyArguments,
    table: LinkTable,
    wake: Wake,
}

impl Actor for TopologyActor {
    type Msg = TopologyMessage;
    type State = TopologyState;
    type Arguments = TopologyArguments;

    async fn pre_start(&self, myself: ActorRef<TopologyMessage>, arguments: TopologyArguments) -> Result<Self::State, ActorProcessingErr> {
        let env = &arguments.env;
        let mut state = TopologyState {
            table: LinkTable::new(arguments.services.node(), env.rng.next_u64("topology")),
            wake: Wake::new("topology", Arc::clone(&env.clock), Arc::clone(&env.spawner)),
            arguments,
        };
        let handle = state.arguments.handle.clone();
        {
            let mut shared = handle.state();
            shared.actor = Some(myself.clone());
            shared.way = Some((state.arguments.env.clone(), state.arguments.services.clone()));
        }
        state.arguments.services.withdraw::<Links>();
        // Answered where it comes in: the time of an echo must not depend on what an actor is busy with.
        state.arguments.services.serve::<Links>(move |inbound: Inbound<Links>| {
            let Some(reply) = inbound.reply else { return };
            match inbound.request {
                LinksRequest::Echo => reply.reply(LinksReply::Echo),
                LinksRequest::Row => reply.reply(LinksReply::Row(handle.state().row.clone())),
                LinksRequest::Load(bytes) => reply.reply(LinksReply::Taken(u32::try_from(bytes.len()).unwrap_or(u32::MAX))),
            }
        })?;
        let actor = myself.clone();
        state.arguments.network.subscribe(Box::new(move |event| {
            if matches!(event, NetworkEvent::Connected(_) | NetworkEvent::Disconnected { .. }) {
                // Once the actor has stopped its successor listens for itself.
                let _ = actor.cast(TopologyMessage(Told::Changed));
            }
        }));
        state.peers(&myself);
        state.arm(&myself);
        Ok(state)
    }

    async fn handle(
        &self,
        myself: ActorRef<TopologyMessage>,
        message: TopologyMessage,
        state: &mut Self::State,
    ) -> Result<(), ActorProcessingErr> {
        match message.0 {
            Told::Tick => {
                state.wake.fired(state.arguments.env.clock.now());
                state.step(&myself, Input::Tick);
            }
            Told::Changed => state.peers(&myself),
            Told::Table(input) => state.step(&myself, input),
        }
        state.arm(&myself);
        Ok(())
    }

    async fn post_stop(&self, _: ActorRef<TopologyMessage>, state: &mut Self::State) -> Result<(), ActorProcessingErr> {
        state.arguments.services.withdraw::<Links>();
        let mut shared = state.arguments.handle.state();
        shared.way = None;
        shared.actor = None;
        Ok(())
    }
}

impl TopologyState {
    fn arm(&mut self, myself: &ActorRef<TopologyMessage>) {
        if let Some(next) = self.table.deadline() {
            self.wake.set(myself, next, TopologyMessage(Told::Tick));
        }
    }

    fn peers(&mut self, myself: &ActorRef<TopologyMessage>) {
        let connected: BTreeSet<NodeId> = self.arguments.services.connected().into_iter().collect();
        self.step(myself, Input::Peers(connected));
    }

    fn step(&mut self, myself: &ActorRef<TopologyMessage>, input: Input) {
        let now = self.arguments.env.clock.now();
        for output in self.table.step(now, input) {
            match output {
                Output::Echo(peer) => self.ask(myself, peer, LinksRequest::Echo),
                Output::FetchRow(peer) => self.ask(myself, peer, LinksRequest::Row),
                Output::Matrix(links) => self.arguments.handle.state().links = links,
            }
        }
        self.arguments.handle.state().row = self.table.row();
    }

    fn ask(&self, myself: &ActorRef<TopologyMessage>, peer: NodeId, request: LinksRequest) {
        let echo = request == LinksRequest::Echo;
        let (clock, actor) = (Arc::clone(&self.arguments.env.clock), myself.clone());
        let remote = self.arguments.services.remote::<Links>(peer);
        self.arguments.env.spawner.task(
            "topology",
            Box::pin(async move {
                let sent = clock.now();
                let answer = remote.call(request, ECHO_DEADLINE).await;
                let input = match answer {
                    Ok(LinksReply::Row(row)) => Input::Row { peer, row },
                    Ok(LinksReply::Echo) => Input::Echoed { peer, rtt: Some(clock.now().since(sent)) },
                    Err(_) if echo => Input::Echoed { peer, rtt: None },
                    Ok(LinksReply::Taken(_)) | Err(_) => return,
                };
                let _ = actor.cast(TopologyMessage(Told::Table(input)));
            }),
        );
    }
}
