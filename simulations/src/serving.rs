//! What makes a simulated node hold stages and conduct pipelines: the real workers, journal, conductors and schedulers.
//!
//! Left out is the actor that looks models up and places them: a scenario says itself what is placed where.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, ActorStatus};
use shoal_actors::catalog::LocalModel;
use shoal_actors::conductor::instance::{InstanceState, InstanceSummary};
use shoal_actors::conductor::journal::{Journal, JournalStore};
use shoal_actors::conductor::{
    Begin, Conductor, ConductorArguments, ConductorMsg, Ground, Heir, Leavings, Order, Running, StateSink, serve_leaving, succeed,
};
use shoal_actors::env::Env;
use shoal_actors::ids::{InstanceId, NodeId, Term};
use shoal_actors::lease::{FenceHook, LeaseKeeper, Leases};
use shoal_actors::membership::{MemberEvent, Membership};
use shoal_actors::plan::{LinkMatrix, Plan};
use shoal_actors::scheduler::{Generate, GenerateRefusal, SchedulerMsg};
use shoal_actors::service::{Inbound, Services};
use shoal_actors::stage::{StageNotices, Stages, Workers, WorkersArguments, WorkersMsg};

use crate::broken::Broken;
use crate::compute::SimCompute;
use crate::pipes::{SimLinks, SimPipes};
use crate::world::World;

/// The hash of every model's file: there is one model.
pub const SHA256: &str = "70795f70795f70795f70795f70795f70795f70795f70795f70795f70795f7079";
/// Instances and requests of each that a node remembers for others.
const JOURNAL_INSTANCES: usize = 256;
const JOURNAL_ENTRIES: usize = 1024;

/// How long pipelines stand before they go over to a better plan.
const REPLAN_AFTER: Duration = Duration::from_secs(25);

/// With what a node serves.
#[derive(Debug, Clone)]
pub struct ServingPlan {
    /// Its devices and its model.
    pub compute: Arc<SimCompute>,
    /// The model's path in it.
    pub model: PathBuf,
    /// Links to other nodes.
    pub links: SimLinks,
    /// What is wrong on purpose.
    pub broken: Option<Broken>,
}

/// Where the workers will be, once they are.
pub(crate) type Slot = Arc<Mutex<Option<ActorRef<WorkersMsg>>>>;

type Book<T> = Arc<Mutex<BTreeMap<InstanceId, ActorRef<T>>>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives up the memory of a lease by dropping what it paid for.
pub(crate) fn fence(slot: &Slot, broken: Option<Broken>) -> FenceHook {
    let slot = Arc::clone(slot);
    Arc::new(move |lease, holds| match lock(&slot).clone() {
        Some(_) if broken == Some(Broken::StagesStay) => holds(),
        Some(workers) => drop(workers.cast(WorkersMsg::Fence(lease, holds))),
        None => holds(),
    })
}

/// What of a node serving needs.
pub(crate) struct Parts<'a> {
    pub(crate) world: &'a World,
    pub(crate) number: u16,
    pub(crate) node: NodeId,
    pub(crate) env: &'a Env,
    pub(crate) services: &'a Services,
    pub(crate) membership: &'a Membership,
    pub(crate) leases: &'a Leases,
    pub(crate) keeper: &'a LeaseKeeper,
    pub(crate) root: ActorCell,
    /// Conductors come and go.
    pub(crate) nursery: ActorRef<()>,
}

/// Told of every change of an instance that a node conducts, and of the plan that runs.
pub type Told = Arc<dyn Fn(InstanceId, InstanceState, Option<Plan>) + Send + Sync>;

/// The conductors of one life of a node.
#[derive(Clone)]
struct Keepers {
    ground: Ground,
    conductors: Book<ConductorMsg>,
    schedulers: Book<SchedulerMsg>,
    summaries: Arc<Mutex<BTreeMap<InstanceId, InstanceSummary>>>,
    told: Arc<Mutex<Option<Told>>>,
    nursery: ActorRef<()>,
}

impl Keepers {
    /// Starts a conductor, whose reports go onto the node's card, as in a node.
    async fn conduct(&self, order: &Order, begin: impl FnOnce(StateSink) -> ConductorArguments) -> Result<(), String> {
        let Order { instance, term, .. } = *order;
        lock(&self.summaries).insert(instance, InstanceSummary::of(order, InstanceState::Leasing));
        let keepers = self.clone();
        let arguments = begin(Arc::new(move |state, running| keepers.hears(instance, term, state, running)));
        let spawned = Actor::spawn_linked(None, Conductor, arguments, self.nursery.get_cell()).await;
        let (conductor, _) = spawned.map_err(|error| error.to_string())?;
        lock(&self.conductors).insert(instance, conductor);
        Ok(())
    }

    fn hears(&self, instance: InstanceId, term: Term, state: InstanceState, running: Option<Running>) {
        let mut summaries = lock(&self.summaries);
        // One that was superseded by another one of this node has no say any more.
        if summaries.get(&instance).is_none_or(|known| known.term != term) {
            return;
        }
        if matches!(state, InstanceState::Failed(_) | InstanceState::Waiting(_)) {
            lock(&self.conductors).remove(&instance);
            summaries.remove(&instance);
        }
        if let Some(known) = summaries.get_mut(&instance) {
            known.state = state.clone();
            running.iter().for_each(|running| known.runs(running));
        }
        let all: Vec<InstanceSummary> = summaries.values().cloned().collect();
        drop(summaries);
        self.ground.membership.update_card(move |card| card.instances = all);
        let plan = running.map(|running| {
            lock(&self.schedulers).insert(instance, running.scheduler);
            running.plan
        });
        let told = lock(&self.told).clone();
        told.into_iter().for_each(|told| told(instance, state.clone(), plan.clone()));
    }

    /// A node that leaves asks for something.
    fn leaving(&self, call: Inbound<Leavings>) {
        let (keepers, conductor) = (self.clone(), |instance| lock(&self.conductors).get(&instance).cloned());
        serve_leaving(&self.ground, call, conductor, move |heir| keepers.inherit(heir));
    }

    /// Goes on with what was taken over.
    fn inherit(&self, heir: Heir) {
        let keepers = self.clone();
        let task = async move {
            let order = heir.order().clone();
            // It fails only when the node is ending.
            let _ = keepers.conduct(&order, |state| ConductorArguments::heir(keepers.ground.clone(), heir, state)).await;
        };
        self.ground.env.spawner.task("heir", Box::pin(task));
    }

    /// A node is gone: the instances that it was of, and those that it conducted.
    fn gone(&self, node: NodeId) {
        lock(&self.conductors).values().for_each(|conductor| drop(conductor.cast(ConductorMsg::Gone(node))));
        let keepers = self.clone();
        succeed(&self.ground, node, move |heir| keepers.inherit(heir));
    }
}

/// The serving parts of one life of a node.
pub struct Serving {
    /// What its stages run on.
    pub pipes: SimPipes,
    keepers: Keepers,
    workers: ActorRef<WorkersMsg>,
}

impl fmt::Debug for Serving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Serving").field("pipes", &self.pipes).finish_non_exhaustive()
    }
}

impl Serving {
    pub(crate) async fn start(parts: Parts<'_>, plan: ServingPlan, slot: &Slot) -> Result<Self, ActorProcessingErr> {
        let Parts { world, number, node, env, services, membership, leases, keeper, root, nursery } = parts;
        let pipes = SimPipes::new(world, number, node, env.clone(), Arc::clone(&plan.compute), plan.links, plan.broken);
        let (check, path) = (leases.clone(), plan.model.clone());
        membership.update_card(|card| card.models = vec![model(&plan.model).on_disk()]);
        let arguments = WorkersArguments {
            env: env.clone(),
            services: services.clone(),
            pipes: Arc::new(pipes.clone()),
            leases: Arc::new(move |from, right| check.check(from, right).map_err(|error| error.to_string())),
            models: Arc::new(move |sha256| (sha256 == SHA256).then(|| path.clone())),
            threads: 1,
        };
        let (workers, _) = Actor::spawn_linked(None, Workers, arguments, root).await?;
        *lock(slot) = Some(workers.clone());
        services.serve_actor::<Stages, _>(workers.clone())?;

        let journal = Arc::new(Mutex::new(JournalStore::new(JOURNAL_INSTANCES, JOURNAL_ENTRIES)));
        let (kept, clock) = (Arc::clone(&journal), Arc::clone(&env.clock));
        services.serve::<Journal>(move |call: Inbound<Journal>| {
            let own = call.request.term().node == call.from;
            let result = own.then(|| lock(&kept).apply(clock.now(), call.request));
            match (call.reply, result) {
                (Some(reply), Some(result)) => reply.reply(result),
                (Some(reply), None) => reply.fail("a journal belongs to the conductor that its term names"),
                (None, _) => {}
            }
        })?;
        let ground = Ground {
            env: env.clone(),
            node,
            services: services.clone(),
            pipes: Arc::new(pipes.clone()),
            keeper: keeper.clone(),
            membership: membership.clone(),
            links: Arc::new(LinkMatrix::new),
            journal,
            models: Arc::new(move |sha256| (sha256 == SHA256).then(|| model(&plan.model))),
            replan_after: REPLAN_AFTER,
        };
        let keepers = Keepers {
            ground,
            conductors: Book::default(),
            schedulers: Book::default(),
            summaries: Arc::default(),
            told: Arc::default(),
            nursery,
        };
        let known = Arc::clone(&keepers.schedulers);
        services.serve::<Generate>(move |call| route(&known, call))?;
        let known = Arc::clone(&keepers.conductors);
        services.serve::<StageNotices>(move |notice: Inbound<StageNotices>| {
            let conductor = lock(&known).get(&notice.request.key.instance).cloned();
            conductor.into_iter().for_each(|conductor| drop(conductor.cast(ConductorMsg::Notice(notice.request.clone()))));
        })?;
        let asked = keepers.clone();
        services.serve::<Leavings>(move |call| asked.leaving(call))?;
        let told = keepers.clone();
        membership.subscribe(Box::new(move |event| {
            if let MemberEvent::Dead { node, .. } | MemberEvent::Left { node, .. } = event {
                told.gone(*node);
            }
        }));
        let known = Arc::clone(&keepers.conductors);
        keeper.on_lost(Box::new(move |lost| {
            lock(&known).values().for_each(|conductor| drop(conductor.cast(ConductorMsg::LeaseLost(lost.lease, lost.to_string()))));
        }));
        Ok(Self { pipes, keepers, workers })
    }

    /// Has `told` hear of the instances that this node conducts, whether it places them or takes them over.
    pub fn hear(&self, told: Told) {
        *lock(&self.keepers.told) = Some(told);
    }

    /// Has a conductor of this node assemble what is ordered.
    ///
    /// # Errors
    /// If the conductor does not start.
    pub async fn place(&self, order: Order) -> Result<(), String> {
        let arguments =
            |state| ConductorArguments { ground: self.keepers.ground.clone(), order: order.clone(), begin: Begin::anew(), state };
        self.keepers.conduct(&order, arguments).await
    }

    /// Takes down what this node conducts.
    pub fn unload_all(&self) {
        lock(&self.keepers.conductors).values().for_each(|conductor| drop(conductor.cast(ConductorMsg::Unload(Box::new(|| {})))));
    }

    /// The parts in the order in which a crash ends them.
    pub(crate) fn cells(&self) -> Vec<ActorCell> {
        let schedulers: Vec<ActorCell> = lock(&self.keepers.schedulers).values().map(ActorRef::get_cell).collect();
        let conductors: Vec<ActorCell> = lock(&self.keepers.conductors).values().map(ActorRef::get_cell).collect();
        schedulers.into_iter().chain(conductors).chain([self.workers.get_cell(), self.keepers.nursery.get_cell()]).collect()
    }
}

/// The one model, as it is on a node's disk.
pub(crate) fn model(path: &Path) -> LocalModel {
    LocalModel {
        name: "toy".to_owned(),
        path: path.to_owned(),
        sha256: SHA256.to_owned(),
        bytes: 0,
        source: "simulated".to_owned(),
        licence: None,
        fetched_unix_seconds: None,
    }
}

/// Hands a call to the scheduler of the instance that it asks for.
fn route(schedulers: &Mutex<BTreeMap<InstanceId, ActorRef<SchedulerMsg>>>, mut call: Inbound<Generate>) {
    let Some(instance) = call.request.instance() else { return };
    let scheduler = lock(schedulers).get(&instance).cloned();
    match scheduler.filter(|known| !matches!(known.get_status(), ActorStatus::Stopping | ActorStatus::Stopped)) {
        Some(scheduler) => drop(scheduler.cast(SchedulerMsg::Call(call))),
        None => call.reply.take().into_iter().for_each(|reply| reply.reply(Err(GenerateRefusal::UnknownInstance(instance)))),
    }
}
