//! The nodes of a scenario: those that run, and what became of the others.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use shoal_actors::env::{Compute, Instant, Spawner};
use shoal_actors::ids::{LeaseId, NodeId};
use shoal_actors::lease::{FenceHolds, FenceHook};
use shoal_actors::secret::Identity;

use crate::broken::Broken;
use crate::clock::SimClock;
use crate::compute::{SimCompute, desktop};
use crate::env::SimEnv;
use crate::network::{Crash, LinkModel, SimExchange};
use crate::node::{NodePlan, SimNode};
use crate::pipes::SimLinks;
use crate::serving::ServingPlan;
use crate::world::World;

/// The longest that a writer goes on writing into memory after it was asked to stop.
pub const FENCE_MAX: Duration = Duration::from_millis(1500);

/// One life of a node, and what is true of its memory whatever its actors say.
#[derive(Debug)]
pub struct Life {
    /// Its actors.
    pub node: SimNode,
    /// Which life, as the exchange counts them.
    pub life: u64,
    /// Memory that there is, in bytes.
    pub physical: u64,
    /// Leases that are still written to although they have ended.
    pub writing: Arc<Mutex<BTreeSet<LeaseId>>>,
}

#[derive(Default)]
struct State {
    live: BTreeMap<u16, Arc<Life>>,
    /// When each life ended, in nanoseconds of the world.
    deaths: BTreeMap<u64, u64>,
    /// How often a node has begun or ended.
    generation: u64,
}

/// The nodes of a scenario. Every clone is the same cluster.
#[derive(Clone)]
pub struct Cluster {
    /// Where they live.
    pub world: World,
    /// What connects them.
    pub exchange: SimExchange,
    envs: Arc<Vec<SimEnv>>,
    ids: Arc<Vec<NodeId>>,
    numbers: Arc<BTreeMap<NodeId, u16>>,
    memory: u64,
    serving: Option<(Arc<SimCompute>, PathBuf, SimLinks)>,
    broken: Option<Broken>,
    state: Arc<Mutex<State>>,
}

impl Cluster {
    /// `nodes` nodes with `memory` bytes each, none of which runs yet.
    ///
    /// # Errors
    /// If a node cannot have an identity.
    pub fn new(world: &World, nodes: u16, memory: u64, broken: Option<Broken>) -> Result<Self, String> {
        Self::make(world, nodes, memory, broken, Arc::new(SimCompute::new(vec![desktop()], BTreeMap::new())), None)
    }

    /// The same with nodes that hold stages of the model at that path and conduct.
    ///
    /// # Errors
    /// If a node cannot have an identity.
    pub fn serving(
        world: &World,
        nodes: u16,
        memory: u64,
        broken: Option<Broken>,
        compute: SimCompute,
        model: PathBuf,
    ) -> Result<Self, String> {
        Self::make(world, nodes, memory, broken, Arc::new(compute), Some(model))
    }

    fn make(
        world: &World,
        nodes: u16,
        memory: u64,
        broken: Option<Broken>,
        devices: Arc<SimCompute>,
        model: Option<PathBuf>,
    ) -> Result<Self, String> {
        let exchange = SimExchange::new(world.clone(), LinkModel::default());
        let compute = || Arc::clone(&devices) as Arc<dyn Compute>;
        let serving = model.map(|model| (Arc::clone(&devices), model, SimLinks::new(world.clone(), exchange.clone())));
        let drift_max = if broken == Some(Broken::WildClocks) { SimClock::DRIFT_MAX } else { SimEnv::DRIFT_MAX };
        let envs: Vec<SimEnv> = (0..nodes).map(|number| SimEnv::new(world, &exchange, number, drift_max, compute())).collect();
        let mut ids = Vec::new();
        for env in &envs {
            let (env, _) = env.life();
            ids.push(Identity::load_or_create(&*env.storage, &*env.rng).map_err(|error| error.to_string())?.node());
        }
        let numbers = Arc::new(ids.iter().copied().zip(0..).collect());
        let (envs, ids) = (Arc::new(envs), Arc::new(ids));
        Ok(Self { world: world.clone(), exchange, envs, ids, numbers, memory, serving, broken, state: Arc::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is wrong with the system on purpose, if anything is.
    pub fn broken(&self) -> Option<Broken> {
        self.broken
    }

    /// The ids of all nodes by their numbers, whether they run or not.
    pub fn ids(&self) -> &[NodeId] {
        &self.ids
    }

    /// The nodes that run, by number.
    pub fn live(&self) -> Vec<Arc<Life>> {
        self.state().live.values().cloned().collect()
    }

    /// The life of a node, if it runs.
    pub fn running(&self, number: u16) -> Option<Arc<Life>> {
        self.state().live.get(&number).cloned()
    }

    /// The life of the node of that id, if it runs.
    pub fn owner(&self, id: NodeId) -> Option<Arc<Life>> {
        self.running(*self.numbers.get(&id)?)
    }

    /// How often a node has begun or ended so far.
    pub fn generation(&self) -> u64 {
        self.state().generation
    }

    /// What a moment on a node's clock is in nanoseconds of the world.
    pub fn real(&self, number: u16, moment: Instant) -> u64 {
        self.envs.get(usize::from(number)).map_or(u64::MAX, |env| env.real(moment))
    }

    /// The numbers of the nodes that do not run.
    pub fn down(&self) -> Vec<u16> {
        let state = self.state();
        (0..).zip(self.ids.iter()).map(|(number, _)| number).filter(|number| !state.live.contains_key(number)).collect()
    }

    /// When a life ended, in nanoseconds of the world, if it has.
    pub fn death(&self, life: u64) -> Option<u64> {
        self.state().deaths.get(&life).copied()
    }

    /// Starts a node that does not run; one that runs stays as it is.
    ///
    /// # Errors
    /// What did not start.
    pub async fn start(&self, number: u16) -> Result<Option<Arc<Life>>, String> {
        let Some(env) = self.envs.get(usize::from(number)).filter(|_| !self.state().live.contains_key(&number)) else { return Ok(None) };
        let writing = Arc::default();
        // Filled in when the node's life has its spawner.
        let spawner: Arc<Mutex<Option<Arc<dyn Spawner>>>> = Arc::default();
        let on_fence = self.fence(number, Arc::clone(&writing), Arc::clone(&spawner));
        let offered = if self.broken == Some(Broken::TwiceOffered) { 2 * self.memory } else { self.memory };
        let serving = self.serving.clone().map(|(compute, model, links)| ServingPlan { compute, model, links, broken: self.broken });
        let node = SimNode::start(&self.world, env, NodePlan { offered, on_fence, serving }).await?;
        *spawner.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&node.env.spawner));
        let life = self.exchange.life(node.id).ok_or("a node started without a network")?;
        self.world.note(format!("node {number} starts ({}, life {life})", node.id.short()));
        let life = Arc::new(Life { node, life, physical: self.memory, writing });
        let mut state = self.state();
        state.generation += 1;
        state.live.insert(number, Arc::clone(&life));
        drop(state);
        Ok(Some(life))
    }

    /// Whoever uses leased memory stops some time after it was asked to, and says so then.
    fn fence(&self, number: u16, writing: Arc<Mutex<BTreeSet<LeaseId>>>, spawner: Arc<Mutex<Option<Arc<dyn Spawner>>>>) -> FenceHook {
        let (world, broken) = (self.world.clone(), self.broken);
        let chance = Mutex::new(world.chance("fence", u64::from(number) << 48 | world.now()));
        let lock = |writing: &Mutex<BTreeSet<LeaseId>>, lease: LeaseId, there: bool| {
            let mut writing = writing.lock().unwrap_or_else(PoisonError::into_inner);
            if there {
                writing.insert(lease)
            } else {
                writing.remove(&lease)
            };
        };
        Arc::new(move |lease, holds: FenceHolds| {
            let Some(spawner) = spawner.lock().unwrap_or_else(PoisonError::into_inner).clone() else { return holds() };
            lock(&writing, lease, true);
            let delay = chance.lock().unwrap_or_else(PoisonError::into_inner).duration(Duration::ZERO, FENCE_MAX);
            let (nap, written) = (world.sleep(number, delay), Arc::clone(&writing));
            let mut holds = Some(holds);
            match broken {
                Some(Broken::FencesSkipped) => holds.take().into_iter().for_each(|holds| holds()),
                Some(Broken::FencesNeverHold) => holds = None,
                _ => {}
            }
            spawner.task(
                "writer",
                Box::pin(async move {
                    nap.await;
                    lock(&written, lease, false);
                    if let Some(holds) = holds {
                        holds();
                    }
                }),
            );
        })
    }

    /// Ends a node where it stands.
    pub fn crash(&self, number: u16, crash: Crash) {
        let life = {
            let mut state = self.state();
            let Some(life) = state.live.remove(&number) else { return };
            state.generation += 1;
            state.deaths.insert(life.life, self.world.now());
            life
        };
        self.world.note(format!("node {number} ends: {crash:?} (life {})", life.life));
        self.world.unpause(number);
        self.exchange.crash(life.node.id, crash);
        life.node.crash();
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").field("nodes", &self.ids.len()).field("live", &self.state().live.keys()).finish_non_exhaustive()
    }
}
