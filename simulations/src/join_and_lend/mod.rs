//! Nodes find each other and lend each other memory while nodes crash and links are cut.
//!
//! Each node runs the control plane and a borrower, which leases memory from random members for instances that exist
//! in name only, and takes over what it is a member of when their holder dies. A nemesis crashes, cuts and breaks. Then
//! everything is mended, and the nodes have to agree; then all memory is given back.

mod borrower;
mod registry;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use shoal_actors::env::BoxFuture;
use shoal_actors::lease::timing;

use crate::broken::Broken;
use crate::cluster::{Cluster, FENCE_MAX};
use crate::invariants::{Checks, DeadHoldersLose, Invariant, MemoryComesBack, MemoryFits, OneHolder, Phases, ViewsAgree};
use crate::nemesis::{self, Faults, Target};
use crate::report::Counts;
use crate::run;
use crate::scenario::{Options, lock};
use crate::world::World;
use borrower::Borrower;
use registry::Registry;

/// Memory of each node.
const MEMORY: u64 = 64 << 30;
/// Time for the nodes to find each other before the first fault.
const CALM: Duration = Duration::from_secs(5);
/// How long the nodes may take to agree after the last fault: a node that waits longest between two dials, and a few
/// rounds of gossip.
const AGREE_WITHIN: Duration = Duration::from_secs(45);
/// How long they have to stay agreed, while memory is lent on.
const AGREED: Duration = Duration::from_secs(15);
/// How long owners may take to notice that nobody wants their memory.
const BACK_WITHIN: Duration = Duration::from_secs(timing::TTL.as_secs() + timing::SWEEP.as_secs() + FENCE_MAX.as_secs() + 3);

/// What the parts of the scenario share.
#[derive(Debug, Clone)]
struct Stage {
    cluster: Cluster,
    registry: Arc<Mutex<Registry>>,
    counts: Arc<Mutex<Counts>>,
    phases: Arc<Mutex<Phases>>,
}

impl Stage {
    fn count(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut lock(&self.counts));
    }

    /// Nobody wants memory any more.
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

    /// Starts a node and its borrower.
    fn start(&self, number: u16) -> BoxFuture<'static, Result<(), String>> {
        let stage = self.clone();
        Box::pin(async move {
            if let Some(life) = stage.cluster.start(number).await? {
                Borrower::start(stage, &life);
            }
            Ok(())
        })
    }
}

/// Runs it in `world`.
pub(crate) fn play(world: &World, options: Options, counts: Arc<Mutex<Counts>>) -> Result<(), String> {
    let cluster = Cluster::new(world, options.nodes, MEMORY, options.broken)?;
    let stage = Stage { cluster: cluster.clone(), registry: Arc::default(), counts, phases: Arc::default() };
    let phases = Arc::clone(&stage.phases);
    let invariants: Vec<Box<dyn Invariant>> = vec![
        Box::new(MemoryFits),
        Box::new(OneHolder::default()),
        Box::new(DeadHoldersLose::default()),
        Box::new(ViewsAgree::new(AGREE_WITHIN)),
        Box::new(MemoryComesBack::new(BACK_WITHIN)),
    ];
    let mut checks = Checks::new(cluster, invariants);
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
    nemesis::harm(&stage, options.faults, Faults { pauses: false, leaves: false }).await?;
    world.note("faults end");
    lock(&stage.phases).quiet_since = Some(world.now());
    world.sleep(0, AGREE_WITHIN + AGREED).await;

    world.note("everything is given back");
    lock(&stage.phases).closed_since = Some(world.now());
    for life in stage.cluster.live() {
        if options.broken == Some(Broken::KeptForEver) {
            continue;
        }
        drop(life.node.keeper.stop());
        world.touch(life.node.number);
    }
    world.sleep(0, BACK_WITHIN + Duration::from_secs(1)).await;
    world.note("the end");
    Ok(())
}
