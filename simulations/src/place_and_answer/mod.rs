//! Nodes place a model on each other and answer requests while nodes crash, pause and leave and links are cut.
//!
//! Each node runs the control plane and everything that holds stages and conducts, and a client, which has models
//! placed over random numbers of nodes and asks any instance that it has heard of. What comes back is compared with
//! what the model says when it is alone. A nemesis does its worst. Then everything is mended, and each node has to get
//! whole answers again; then all is taken down, and all memory is given back.

mod client;
mod model;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use shoal_actors::env::BoxFuture;
use shoal_actors::ids::{InstanceId, NodeId};
use shoal_actors::lease::timing;

use crate::broken::Broken;
use crate::cluster::Cluster;
use crate::invariants::{
    Checks, Invariant, MemoryComesBack, MemoryFits, OneConductor, OneHolder, Phases, PlansCover, RequestsEnd, Served, StagesArePaidFor,
    TokensAreExact, ViewsAgree,
};
use crate::nemesis::{self, Faults, Target};
use crate::report::Counts;
use crate::run;
use crate::scenario::{Options, lock};
use crate::world::World;
use client::Client;

/// Memory of each node.
const MEMORY: u64 = 16 << 30;
/// Time for the nodes to find each other before the first fault.
const CALM: Duration = Duration::from_secs(5);
/// How long the nodes may take to agree after the last fault.
const AGREE_WITHIN: Duration = Duration::from_secs(45);
/// How long after that each node has to get a whole answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(45);
/// How long a request may take, whatever happens: it waits for memory, for stages that load, and for words that never
/// come, each of which has its limit.
const REQUEST_WITHIN: Duration = Duration::from_secs(75);
/// How long owners may take to notice that nobody wants their memory.
const BACK_WITHIN: Duration = Duration::from_secs(timing::TTL.as_secs() + timing::SWEEP.as_secs() + 5);

/// What the parts of the scenario share.
#[derive(Debug, Clone)]
struct Stage {
    cluster: Cluster,
    /// Who conducts what, as its users have heard.
    instances: Arc<Mutex<BTreeMap<InstanceId, NodeId>>>,
    served: Arc<Mutex<Served>>,
    /// Whole answers of each node.
    whole: Arc<Mutex<BTreeMap<u16, u64>>>,
    counts: Arc<Mutex<Counts>>,
    phases: Arc<Mutex<Phases>>,
}

impl Stage {
    fn count(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut lock(&self.counts));
    }

    /// Nobody asks anything any more.
    fn closed(&self) -> bool {
        lock(&self.phases).closed_since.is_some()
    }
}

impl Target for Stage {
    fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    fn counts(&self) -> &Mutex<Counts> {
        &self.counts
    }

    fn start(&self, number: u16) -> BoxFuture<'static, Result<(), String>> {
        let stage = self.clone();
        Box::pin(async move {
            if let Some(life) = stage.cluster.start(number).await? {
                // What its former life conducted is gone.
                lock(&stage.instances).retain(|_, conductor| *conductor != life.node.id);
                Client::start(stage, life);
            }
            Ok(())
        })
    }
}

/// Runs it in `world`.
pub(crate) fn play(world: &World, options: Options, counts: Arc<Mutex<Counts>>) -> Result<(), String> {
    let compute = model::compute(options.broken == Some(Broken::StaleKeys));
    let cluster = Cluster::serving(world, options.nodes, MEMORY, options.broken, compute, model::path())?;
    let served = Arc::<Mutex<Served>>::default();
    let stage = Stage {
        cluster: cluster.clone(),
        instances: Arc::default(),
        served: Arc::clone(&served),
        whole: Arc::default(),
        counts,
        phases: Arc::default(),
    };
    let phases = Arc::clone(&stage.phases);
    let invariants: Vec<Box<dyn Invariant>> = vec![
        Box::new(PlansCover),
        Box::new(TokensAreExact),
        Box::new(RequestsEnd::new(REQUEST_WITHIN)),
        Box::new(StagesArePaidFor),
        Box::new(MemoryFits),
        Box::new(OneHolder::default()),
        Box::new(OneConductor::default()),
        Box::new(ViewsAgree::new(AGREE_WITHIN)),
        Box::new(MemoryComesBack::new(BACK_WITHIN)),
    ];
    let mut checks = Checks::new(cluster, invariants).with_served(served);
    let check = move || {
        let phases = *lock(&phases);
        checks.check(phases)
    };
    run(world, script(stage, options), check).map_err(|error| error.to_string())?
}

async fn script(stage: Stage, options: Options) -> Result<(), String> {
    let world = stage.cluster.world.clone();
    let mut chance = world.chance("script", 0);
    for number in 0..options.nodes {
        world.sleep(number, chance.duration(Duration::ZERO, Duration::from_millis(1500))).await;
        stage.start(number).await?;
    }
    world.sleep(0, CALM).await;

    world.note("faults begin");
    nemesis::harm(&stage, options.faults, Faults { pauses: true, leaves: true }).await?;
    world.note("faults end");
    lock(&stage.phases).quiet_since = Some(world.now());
    world.sleep(0, AGREE_WITHIN).await;
    let before = std::mem::take(&mut *lock(&stage.whole));
    world.note(format!("whole answers so far: {before:?}"));
    world.sleep(0, ANSWER_WITHIN).await;
    for number in 0..options.nodes {
        if !lock(&stage.whole).contains_key(&number) {
            return Err(format!("node {number} got no whole answer within {ANSWER_WITHIN:?}, although nothing has gone wrong any more"));
        }
    }

    world.note("everything is taken down");
    lock(&stage.phases).closed_since = Some(world.now());
    for life in stage.cluster.live() {
        life.node.serving.iter().for_each(|serving| serving.unload_all());
        world.touch(life.node.number);
    }
    world.sleep(0, BACK_WITHIN + Duration::from_secs(1)).await;
    world.note("the end");
    Ok(())
}
