//! The parts of a node and the actor that supervises them: started in order, stopped in the reverse order.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ractor::{Actor, ActorCell, ActorId, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::sync::watch;

use super::error::StartError;
use super::lock::FolderLock;
use super::{Inner, Node};
use crate::card::NodeCard;
use crate::catalog::{Catalog, CatalogEffects, CatalogSettings};
use crate::conductor::journal::{Journal, JournalStore};
use crate::conductor::{Ground, Leavings, LocalFiles, Placement, PlacementActor, PlacementArguments, PlacementMsg, Schedulers};
use crate::discovery::{CONNECTIONS_TARGET, Discovery, DiscoveryActor, DiscoveryArguments};
use crate::env::{Beacon, Env, Http, Instant, NetworkConfig, NetworkError};
use crate::ids::Incarnation;
use crate::lease::{FenceHolds, LeaseKeeper, LeaseKeeperActor, LeaseKeeperArguments, Leases, LeasesActor, LeasesArguments};
use crate::linkbench::{LinkBench, LinkBenchServer};
use crate::membership::{MemberEvent, Membership, MembershipActor, MembershipArguments, Timing};
use crate::network::{NetworkActor, NetworkArguments, NetworkHandle};
use crate::pressure::{MemoryGauge, MemoryWatch, MemoryWatchActor, MemoryWatchArguments};
use crate::region::{RegionMemory, RegionServers, Regions};
use crate::scheduler::Generate;
use crate::secret::{ClusterKey, Identity};
use crate::service::{Inbound, Services, ServicesLimits};
use crate::stage::links::TensorLinks;
use crate::stage::pipes::{Pipes, ThreadPipes};
use crate::stage::{DetourServer, Detours, StageNotices, Stages, Workers, WorkersArguments, WorkersMsg};
use crate::supervise::{ChildSpec, Restart, SuperviseError, Supervision};
use crate::topology::{Topology, TopologyActor, TopologyArguments};

/// Instances and requests of each that a node remembers for others.
const JOURNAL_INSTANCES: usize = 256;
const JOURNAL_ENTRIES: usize = 1024;

/// How long the stages of a leaving node may take to end.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// What a node is made of.
pub(super) struct Settings {
    pub(super) env: Env,
    pub(super) identity: Identity,
    pub(super) incarnation: Incarnation,
    pub(super) card: NodeCard,
    pub(super) offered: u64,
    /// Of the memory that is offered; `None` if it is not the host's.
    pub(super) gauge: Option<Arc<dyn MemoryGauge>>,
    pub(super) threads: usize,
    pub(super) links: TensorLinks,
    pub(super) cluster: Option<ClusterKey>,
    pub(super) listen: Vec<SocketAddr>,
    pub(super) peers: Vec<SocketAddr>,
    pub(super) mdns: bool,
    pub(super) beacon: Option<Arc<dyn Beacon>>,
    pub(super) catalog: CatalogSettings,
    pub(super) http: Arc<dyn Http>,
    pub(super) replan_after: Duration,
    pub(super) lock: Option<FolderLock>,
}

/// Starts everything.
pub(super) async fn start(settings: Settings) -> Result<Node, StartError> {
    let node = settings.identity.node();
    let env = settings.env.clone();
    let services = Services::new(node, Arc::clone(&env.clock), ServicesLimits::default());
    let network = NetworkHandle::new(services.clone());
    let discovery = Discovery::new();
    let membership = Membership::new(settings.card.clone());
    let topology = Topology::new();
    let (ended, stopped) = watch::channel(None);

    let part = |what: &'static str| move |reason: String| StartError::Part { what, reason };
    let (supervisor, _) = Actor::spawn(None, NodeSupervisor, SupervisorArguments { env: env.clone(), ended })
        .await
        .map_err(|error| part("the supervisor")(error.to_string()))?;
    let add = async |spec: ChildSpec| {
        let what = spec.name;
        match ractor::call!(supervisor, SupervisorMsg::Add, Box::new(spec)) {
            Ok(started) => started.map_err(|error| not_started(what, error)),
            Err(error) => Err(part(what)(error.to_string())),
        }
    };
    // What has started is stopped again if something after it does not start.
    let undo = Undo(Some(supervisor.clone()));

    let config = NetworkConfig {
        identity: settings.identity.clone(),
        cluster: settings.cluster.clone(),
        listen: settings.listen,
        mdns: settings.mdns,
        clock: Arc::clone(&env.clock),
        rng: Arc::clone(&env.rng),
        spawner: Arc::clone(&env.spawner),
    };
    let arguments = NetworkArguments { handle: network.clone(), factory: Arc::clone(&env.network), config };
    add(child("the control network", move |cell| {
        let arguments = arguments.clone();
        async move { Ok(NetworkActor::start(arguments, Some(cell)).await?.get_cell()) }
    }))
    .await?;

    let arguments = DiscoveryArguments {
        handle: discovery.clone(),
        env: env.clone(),
        network: network.clone(),
        beacon: settings.beacon,
        cluster: settings.cluster,
        node,
        incarnation: settings.incarnation,
        peers: settings.peers,
        target: CONNECTIONS_TARGET,
    };
    add(child("the search for peers", move |cell| {
        let arguments = arguments.clone();
        async move { Ok(DiscoveryActor::start(arguments, Some(cell)).await?.get_cell()) }
    }))
    .await?;

    let arguments = MembershipArguments {
        handle: membership.clone(),
        env: env.clone(),
        services: services.clone(),
        network: network.clone(),
        discovery: discovery.clone(),
        timing: Timing::default(),
    };
    add(child("membership", move |cell| {
        let arguments = arguments.clone();
        async move { Ok(MembershipActor::start(arguments, Some(cell)).await?.get_cell()) }
    }))
    .await?;

    let arguments = TopologyArguments { handle: topology.clone(), env: env.clone(), services: services.clone(), network: network.clone() };
    add(child("topology", move |cell| {
        let arguments = arguments.clone();
        async move { Ok(TopologyActor::start(arguments, Some(cell)).await?.get_cell()) }
    }))
    .await?;

    let effects =
        CatalogEffects { http: settings.http, clock: Arc::clone(&env.clock), rng: Arc::clone(&env.rng), spawner: Arc::clone(&env.spawner) };
    let catalog = Catalog::start(settings.catalog, effects).await?;

    let workers = Arc::new(Mutex::new(None::<ActorRef<WorkersMsg>>));
    let leases = Leases::new(node, settings.incarnation, settings.offered, Arc::clone(&env.clock));
    let regions = Regions::new(settings.links.effects().clone());
    let (fence, reached, renewed) = (Arc::clone(&workers), regions.clone(), regions.clone());
    let arguments = LeasesArguments {
        handle: leases.clone(),
        env: env.clone(),
        services: services.clone(),
        on_fence: Arc::new(move |lease, holds| {
            let workers = fence.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let then: FenceHolds = match workers {
                Some(workers) => Box::new(move || drop(workers.cast(WorkersMsg::Fence(lease, holds)))),
                // Nothing has been loaded yet.
                None => holds,
            };
            reached.fence(lease, then);
        }),
        on_renew: Arc::new(move |lease, deadline| renewed.renew(lease, deadline)),
        // Frames carry their term, and a stage's links are made for one: there is nothing to turn off.
        on_term: Arc::new(|_, _| {}),
    };
    add(child("the lease owner", move |cell| {
        let arguments = arguments.clone();
        async move { Ok(LeasesActor::start(arguments, Some(cell)).await?.get_cell()) }
    }))
    .await?;
    let announce = membership.clone();
    leases.subscribe(Box::new(move |totals| {
        announce.update_card(move |card| (card.memory_offered_bytes, card.memory_free_bytes) = (totals.offered, totals.free()));
    }));
    let memory = MemoryWatch::new(settings.offered);
    if let Some(gauge) = settings.gauge {
        let (clock, spawner) = (Arc::clone(&env.clock), Arc::clone(&env.spawner));
        let arguments = MemoryWatchArguments { handle: memory.clone(), clock, spawner, gauge, leases: leases.clone() };
        add(child("the watch over memory", move |cell| {
            let arguments = arguments.clone();
            async move { Ok(MemoryWatchActor::start(arguments, cell).await?.get_cell()) }
        }))
        .await?;
    }
    let servers = RegionServers::new(regions, leases.clone(), settings.links.clone());
    services.serve::<RegionMemory>(move |call| servers.answer(call)).map_err(|e| part("leased memory")(e.to_string()))?;
    let keeper = LeaseKeeper::new(Arc::clone(&env.clock), services.clone());
    let arguments = LeaseKeeperArguments { handle: keeper.clone(), env: env.clone() };
    add(child("the lease keeper", move |cell| {
        let arguments = arguments.clone();
        async move { Ok(LeaseKeeperActor::start(arguments, Some(cell)).await?.get_cell()) }
    }))
    .await?;

    let announce = membership.clone();
    catalog.subscribe(Box::new(move |models| {
        let models = models.to_vec();
        announce.update_card(move |card| card.models = models);
    }));
    let files = LocalFiles::default();
    let check = leases.clone();
    let (find, store) = (files.clone(), catalog.clone());
    let detours = DetourServer::new(settings.links.clone());
    let passing = detours.clone();
    services.serve::<Detours>(move |call| passing.answer(call)).map_err(|e| part("detours")(e.to_string()))?;
    let links = settings.links.clone().with_detours(services.clone());
    let pipes: Arc<dyn Pipes> = Arc::new(ThreadPipes::new(env.clone(), links));
    let arguments = WorkersArguments {
        env: env.clone(),
        services: services.clone(),
        pipes: Arc::clone(&pipes),
        leases: Arc::new(move |from, right| check.check(from, right).map_err(|error| error.to_string())),
        models: Arc::new(move |sha256| find.path(&store, sha256)),
        threads: settings.threads,
    };
    let (worker, _) =
        Actor::spawn_linked(None, Workers, arguments, supervisor.get_cell()).await.map_err(|e| part("the stage workers")(e.to_string()))?;
    let _ = supervisor.cast(SupervisorMsg::Vital(worker.get_id()));
    *workers.lock().unwrap_or_else(PoisonError::into_inner) = Some(worker.clone());
    services.serve_actor::<Stages, _>(worker.clone()).map_err(|e| part("the stage workers")(e.to_string()))?;

    let journal = Arc::new(Mutex::new(JournalStore::new(JOURNAL_INSTANCES, JOURNAL_ENTRIES)));
    let (kept, clock) = (Arc::clone(&journal), Arc::clone(&env.clock));
    services.serve::<Journal>(move |call| keep_journal(&kept, clock.now(), call)).map_err(|e| part("the journal")(e.to_string()))?;

    let schedulers = Schedulers::new(Arc::clone(&journal));
    let route = schedulers.clone();
    services.serve::<Generate>(move |call| route.route(call)).map_err(|e| part("the schedulers")(e.to_string()))?;
    let announce = membership.clone();
    let (measured, known, store) = (topology.clone(), files.clone(), catalog.clone());
    let arguments = PlacementArguments {
        ground: Ground {
            env: env.clone(),
            node,
            services: services.clone(),
            pipes,
            keeper: keeper.clone(),
            membership: membership.clone(),
            links: Arc::new(move || crate::conductor::links(&measured.links())),
            journal,
            models: Arc::new(move |sha256| known.model(&store, sha256)),
            replan_after: settings.replan_after,
        },
        catalog: catalog.clone(),
        files,
        schedulers,
        instances: Arc::new(move |instances| announce.update_card(move |card| card.instances = instances)),
    };
    let (placement, _) =
        Actor::spawn_linked(None, PlacementActor, arguments, supervisor.get_cell()).await.map_err(|e| part("placement")(e.to_string()))?;
    let _ = supervisor.cast(SupervisorMsg::Vital(placement.get_id()));
    services.serve_actor::<Placement, _>(placement.clone()).map_err(|e| part("placement")(e.to_string()))?;
    services.serve_actor::<Leavings, _>(placement.clone()).map_err(|e| part("placement")(e.to_string()))?;
    services.serve_actor::<StageNotices, _>(placement.clone()).map_err(|e| part("placement")(e.to_string()))?;
    let told = placement.clone();
    membership.subscribe(Box::new(move |event| {
        let (node, left) = match event {
            MemberEvent::Dead { node, .. } => (*node, false),
            MemberEvent::Left { node, .. } => (*node, true),
            _ => return,
        };
        let _ = told.cast(PlacementMsg::Gone { node, left });
    }));
    let told = placement.clone();
    keeper.on_lost(Box::new(move |lost| {
        let _ = told.cast(PlacementMsg::LeaseLost(lost.lease, lost.to_string()));
    }));

    let bench = LinkBenchServer::new(settings.links.clone());
    services.serve::<LinkBench>(move |call| bench.answer(call)).map_err(|e| part("the measuring of tensor links")(e.to_string()))?;

    undo.keep();
    Ok(Node(Arc::new(Inner {
        env,
        node,
        services,
        network,
        discovery,
        membership,
        topology,
        catalog,
        leases,
        memory,
        keeper,
        links: settings.links,
        detours,
        placement,
        workers: worker,
        supervisor,
        stopped,
        lock: Mutex::new(settings.lock),
        left: tokio::sync::OnceCell::new(),
    })))
}

/// Why a part did not start, said once however many had a hand in it.
fn not_started(what: &'static str, error: SuperviseError) -> StartError {
    let reason = match error {
        SuperviseError::Start { reason, .. } => reason,
        error => return StartError::Part { what, reason: error.to_string() },
    };
    match reason.downcast::<NetworkError>() {
        Ok(error) => StartError::Network(*error),
        Err(reason) => {
            let reason = reason.to_string();
            let said = reason.strip_prefix(what).and_then(|rest| rest.strip_prefix(" did not start: "));
            StartError::Part { what, reason: said.unwrap_or(&reason).to_owned() }
        }
    }
}

fn child<F>(name: &'static str, start: impl Fn(ActorCell) -> F + Send + Sync + 'static) -> ChildSpec
where
    F: Future<Output = Result<ActorCell, ActorProcessingErr>> + Send + 'static,
{
    ChildSpec::new(name, start).restarted(Restart::Always)
}

fn keep_journal(journal: &Mutex<JournalStore>, now: Instant, call: Inbound<Journal>) {
    // A term names its claimant: nobody speaks for another.
    if call.request.term().node != call.from {
        if let Some(reply) = call.reply {
            reply.fail("a journal belongs to the conductor that its term names");
        }
        return;
    }
    let result = journal.lock().unwrap_or_else(PoisonError::into_inner).apply(now, call.request);
    match call.reply {
        Some(reply) => reply.reply(result),
        None => {
            if let Err(error) = result {
                tracing::debug!(target: "shoal::journal", %error, "an entry was not remembered");
            }
        }
    }
}

/// Stops the supervisor, and with it every part, unless told to keep it.
struct Undo(Option<ActorRef<SupervisorMsg>>);

impl Undo {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if let Some(supervisor) = self.0.take() {
            let _ = supervisor.cast(SupervisorMsg::Stop(None));
        }
    }
}

/// Drops every stage that this node holds, for whomever.
pub(super) async fn stop_stages(env: &Env, workers: &ActorRef<WorkersMsg>) {
    let (send, receive) = tokio::sync::oneshot::channel::<()>();
    if workers.cast(WorkersMsg::Stop(Box::new(move || drop(send)))).is_ok() {
        within(env, receive).await;
    }
}

/// Takes down every instance that this node conducts.
pub(super) async fn stop_instances(env: &Env, placement: &ActorRef<PlacementMsg>) {
    let (send, receive) = tokio::sync::oneshot::channel::<()>();
    if placement.cast(PlacementMsg::Stop(Box::new(move || drop(send)))).is_ok() {
        within(env, receive).await;
    }
}

async fn within<T>(env: &Env, what: impl Future<Output = T>) {
    let deadline = env.clock.sleep_until(env.clock.now() + STOP_TIMEOUT);
    tokio::pin!(what);
    tokio::select! {
        biased;
        _ = &mut what => {}
        () = deadline => tracing::warn!(target: "shoal::node", "a part of the node does not stop; going on without waiting"),
    }
}

/// See [`NodeSupervisor`].
pub(super) struct SupervisorArguments {
    env: Env,
    ended: watch::Sender<Option<String>>,
}

/// Messages of the supervisor.
pub(super) enum SupervisorMsg {
    /// Start a part.
    Add(Box<ChildSpec>, ractor::RpcReplyPort<Result<(), SuperviseError>>),
    /// This linked part cannot be restarted: when it fails, the node stops.
    Vital(ActorId),
    /// Stop every part, the last started first; answered when all have.
    Stop(Option<tokio::sync::oneshot::Sender<()>>),
}

impl std::fmt::Debug for SupervisorMsg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Add(..) => "Add",
            Self::Vital(_) => "Vital",
            Self::Stop(_) => "Stop",
        })
    }
}

/// Restarts the parts that can be restarted. When one fails too often, or one that holds memory fails at all, the node
/// stops: half a node would mislead its peers.
pub(super) struct NodeSupervisor;

pub(super) struct SupervisorState {
    supervision: Supervision,
    ended: watch::Sender<Option<String>>,
    vital: Vec<ActorId>,
    stopping: bool,
}

impl Actor for NodeSupervisor {
    type Msg = SupervisorMsg;
    type State = SupervisorState;
    type Arguments = SupervisorArguments;

    async fn pre_start(&self, _me: ActorRef<SupervisorMsg>, arguments: SupervisorArguments) -> Result<SupervisorState, ActorProcessingErr> {
        Ok(SupervisorState {
            supervision: Supervision::new(arguments.env.clock),
            ended: arguments.ended,
            vital: Vec::new(),
            stopping: false,
        })
    }

    async fn handle(
        &self,
        me: ActorRef<SupervisorMsg>,
        message: SupervisorMsg,
        state: &mut SupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            SupervisorMsg::Add(spec, reply) => {
                let result = state.supervision.start(&me.get_cell(), *spec).await;
                let _ = reply.send(result.map(drop));
            }
            SupervisorMsg::Vital(part) => state.vital.push(part),
            SupervisorMsg::Stop(done) => {
                state.stopping = true;
                state.supervision.stop("the node stops").await;
                let _ = done.map(|done| done.send(()));
                me.stop(None);
            }
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        me: ActorRef<SupervisorMsg>,
        event: SupervisionEvent,
        state: &mut SupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        // A part that holds memory of instances cannot be replaced by a fresh one.
        let vital = match &event {
            SupervisionEvent::ActorFailed(who, error) if state.vital.contains(&who.get_id()) => Some(error.to_string()),
            _ => None,
        };
        let fatal = match state.supervision.handle(&me.get_cell(), event).await {
            Err(error) => Some(error.to_string()),
            Ok(()) => vital,
        };
        if let Some(reason) = fatal.filter(|_| !state.stopping) {
            tracing::error!(target: "shoal::node", %reason, "the node stops");
            let _ = state.ended.send(Some(reason));
        }
        Ok(())
    }
}
