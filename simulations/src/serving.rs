//! What makes a simulated node hold stages and conduct pipelines: the real workers, journal, conductors and schedulers.
//!
//! Left out is the actor that looks models up and places them: a scenario says itself what is placed where.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, ActorStatus};
use shoal_actors::conductor::instance::InstanceState;
use shoal_actors::conductor::journal::{Journal, JournalStore};
use shoal_actors::conductor::{Conductor, ConductorArguments, ConductorMsg, Ground, Order, Running};
use shoal_actors::env::Env;
use shoal_actors::ids::{InstanceId, NodeId};
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

/// The serving parts of one life of a node.
pub struct Serving {
    /// What its stages run on.
    pub pipes: SimPipes,
    ground: Ground,
    workers: ActorRef<WorkersMsg>,
    conductors: Book<ConductorMsg>,
    schedulers: Book<SchedulerMsg>,
    nursery: ActorRef<()>,
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
        let (check, path) = (leases.clone(), plan.model);
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

        let journal = Mutex::new(JournalStore::new(JOURNAL_INSTANCES, JOURNAL_ENTRIES));
        services.serve::<Journal>(move |call: Inbound<Journal>| {
            let own = call.request.term().node == call.from;
            let result = own.then(|| lock(&journal).apply(call.request));
            match (call.reply, result) {
                (Some(reply), Some(result)) => reply.reply(result),
                (Some(reply), None) => reply.fail("a journal belongs to the conductor that its term names"),
                (None, _) => {}
            }
        })?;
        let (conductors, schedulers) = (Book::<ConductorMsg>::default(), Book::<SchedulerMsg>::default());
        let known = Arc::clone(&schedulers);
        services.serve::<Generate>(move |call| route(&known, call))?;
        let known = Arc::clone(&conductors);
        services.serve::<StageNotices>(move |notice: Inbound<StageNotices>| {
            let conductor = lock(&known).get(&notice.request.key.instance).cloned();
            conductor.into_iter().for_each(|conductor| drop(conductor.cast(ConductorMsg::Notice(notice.request.clone()))));
        })?;
        let known = Arc::clone(&conductors);
        membership.subscribe(Box::new(move |event| {
            if let MemberEvent::Dead { node, .. } | MemberEvent::Left { node, .. } = event {
                lock(&known).values().for_each(|conductor| drop(conductor.cast(ConductorMsg::Gone(*node))));
            }
        }));
        let known = Arc::clone(&conductors);
        keeper.on_lost(Box::new(move |lost| {
            lock(&known).values().for_each(|conductor| drop(conductor.cast(ConductorMsg::LeaseLost(lost.lease, lost.to_string()))));
        }));
        let ground = Ground {
            env: env.clone(),
            node,
            services: services.clone(),
            pipes: Arc::new(pipes.clone()),
            keeper: keeper.clone(),
            membership: membership.clone(),
            links: Arc::new(LinkMatrix::new),
        };
        Ok(Self { pipes, ground, workers, conductors, schedulers, nursery })
    }

    /// Has a conductor of this node assemble what is ordered. `told` hears of every change, and of the plan that
    /// runs.
    ///
    /// # Errors
    /// If the conductor does not start.
    pub async fn place(&self, order: Order, told: impl Fn(InstanceState, Option<Plan>) + Send + Sync + 'static) -> Result<(), String> {
        let (instance, schedulers, conductors) = (order.instance, Arc::clone(&self.schedulers), Arc::clone(&self.conductors));
        let state = move |state: InstanceState, running: Option<Running>| {
            let plan = running.map(|running| {
                lock(&schedulers).insert(instance, running.scheduler);
                running.plan
            });
            if matches!(state, InstanceState::Failed(_)) {
                lock(&conductors).remove(&instance);
            }
            told(state, plan);
        };
        let arguments = ConductorArguments { ground: self.ground.clone(), order, state: Arc::new(state) };
        let (conductor, _) =
            Actor::spawn_linked(None, Conductor, arguments, self.nursery.get_cell()).await.map_err(|error| error.to_string())?;
        lock(&self.conductors).insert(instance, conductor);
        Ok(())
    }

    /// Takes down what this node conducts.
    pub fn unload_all(&self) {
        lock(&self.conductors).values().for_each(|conductor| drop(conductor.cast(ConductorMsg::Unload(Box::new(|| {})))));
    }

    /// The parts in the order in which a crash ends them.
    pub(crate) fn cells(&self) -> Vec<ActorCell> {
        let schedulers: Vec<ActorCell> = lock(&self.schedulers).values().map(ActorRef::get_cell).collect();
        let conductors: Vec<ActorCell> = lock(&self.conductors).values().map(ActorRef::get_cell).collect();
        schedulers.into_iter().chain(conductors).chain([self.workers.get_cell(), self.nursery.get_cell()]).collect()
    }
}

/// Hands a call to the scheduler of the instance that it asks for.
fn route(schedulers: &Mutex<BTreeMap<InstanceId, ActorRef<SchedulerMsg>>>, mut call: Inbound<Generate>) {
    let instance = call.request.instance();
    let scheduler = lock(schedulers).get(&instance).cloned();
    match scheduler.filter(|known| !matches!(known.get_status(), ActorStatus::Stopping | ActorStatus::Stopped)) {
        Some(scheduler) => drop(scheduler.cast(SchedulerMsg::Call(call))),
        None => call.reply.take().into_iter().for_each(|reply| reply.reply(Err(GenerateRefusal::UnknownInstance(instance)))),
    }
}
