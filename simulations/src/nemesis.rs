//! Crashes and pauses nodes, cuts links and breaks connections, and mends all of it in the end.

use std::sync::Mutex;
use std::time::Duration;

use crate::broken::Broken;
use crate::chance::Chance;
use crate::cluster::Cluster;
use crate::network::Crash;
use crate::report::Counts;
use crate::scenario::lock;
use shoal_actors::env::BoxFuture;

/// Pause between two faults.
const PAUSE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));
/// How long a node stays down.
const DOWN: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(20));
/// How long a link stays cut.
const CUT: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(18));
/// Nodes that are always left running.
const LEFT: usize = 2;

/// How long a node that leaves may take for what it has.
const LEAVING: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(12));
/// How long a node does nothing, and its clock goes on.
const PAUSED: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(8));

/// What is harmed.
pub(crate) trait Target: Clone + Send + Sync + 'static {
    /// The nodes.
    fn cluster(&self) -> &Cluster;

    /// Where harm is counted.
    fn counts(&self) -> &Mutex<Counts>;

    /// Starts a node that does not run, with all that the scenario has on it.
    fn start(&self, number: u16) -> BoxFuture<'static, Result<(), String>>;
}

/// Which harm, beyond crashes, cuts and broken connections.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Faults {
    /// Whether nodes are paused, as by a machine that is suspended.
    pub(crate) pauses: bool,
    /// Whether nodes leave after giving away what they have.
    pub(crate) leaves: bool,
}

/// Does harm for so long, and then mends everything.
///
/// # Errors
/// If a node does not start again.
pub(crate) async fn harm<T: Target>(stage: &T, time: Duration, faults: Faults) -> Result<(), String> {
    let world = stage.cluster().world.clone();
    let mut chance = world.chance("nemesis", 0);
    let end = world.now().saturating_add(crate::world::nanos(time));
    while world.now() < end {
        world.sleep(0, chance.duration(PAUSE.0, PAUSE.1)).await;
        if faults.pauses && chance.percent(20) {
            pause(stage, &mut chance, end);
            continue;
        }
        if faults.leaves && chance.percent(20) {
            leave(stage, &mut chance, end);
            continue;
        }
        match chance.below(100) {
            0..=39 => crash(stage, &mut chance, end),
            40..=64 => cut(stage, &mut chance, end),
            65..=79 => isolate(stage, &mut chance, end),
            _ => sever(stage, &mut chance),
        }
    }
    // Every fault that lasts was given an end that does not lie behind this moment.
    world.sleep(0, Duration::from_millis(1)).await;
    let ids = stage.cluster().ids().to_vec();
    for (n, one) in ids.iter().enumerate() {
        for other in &ids[n + 1..] {
            stage.cluster().exchange.mend(*one, *other);
        }
    }
    for number in stage.cluster().down() {
        stage.start(number).await?;
    }
    if let (Some(Broken::CutStays), Some((one, others))) = (stage.cluster().broken(), ids.split_first()) {
        others.iter().for_each(|other| stage.cluster().exchange.cut(*one, *other));
    }
    Ok(())
}

/// When a fault that begins now ends: in that range, and before the harm does.
fn until(stage: &impl Target, chance: &mut Chance, range: (Duration, Duration), end: u64) -> Duration {
    let left = Duration::from_nanos(end.saturating_sub(stage.cluster().world.now()));
    chance.duration(range.0, range.1).min(left)
}

fn crash(stage: &impl Target, chance: &mut Chance, end: u64) {
    let live = stage.cluster().live();
    if live.len() <= LEFT {
        return;
    }
    let Some(number) = chance.pick(&live).map(|life| life.node.number) else { return };
    let how = if chance.percent(50) { Crash::Process } else { Crash::Power };
    drop(live);
    stage.cluster().crash(number, how);
    lock(stage.counts()).crashes += 1;
    let (down, stage) = (until(stage, chance, DOWN, end), stage.clone());
    let world = stage.cluster().world.clone();
    world.clone().after(down, move || {
        drop(tokio::spawn(async move {
            if let Err(error) = stage.start(number).await {
                world.fail(error);
            }
        }));
    });
}

/// Has a node leave: it gives away what it has, for so long at most, says good-bye and ends.
fn leave(stage: &impl Target, chance: &mut Chance, end: u64) {
    let live = stage.cluster().live();
    let (time, down) = (until(stage, chance, LEAVING, end), until(stage, chance, DOWN, end));
    if live.len() <= LEFT || time < LEAVING.0 {
        return;
    }
    let Some(life) = chance.pick(&live).cloned() else { return };
    let (number, world) = (life.node.number, stage.cluster().world.clone());
    world.note(format!("node {number} leaves within {time:?}"));
    let (drain, membership) = (life.node.drain(), life.node.membership.clone());
    let clock = std::sync::Arc::clone(&life.node.env.clock);
    let (done, gone) = tokio::sync::oneshot::channel();
    let work = async move {
        let left = drain.run(clock.now() + time).await;
        membership.leave().await;
        let _ = done.send(left.len());
    };
    life.node.env.spawner.task("leave", Box::pin(work));
    world.touch(number);
    let stage = stage.clone();
    drop(tokio::spawn(async move {
        // It may be paused, or crash.
        let late = world.sleep(0, time + Duration::from_millis(500));
        let left = match futures::future::select(gone, Box::pin(late)).await {
            futures::future::Either::Left((Ok(left), _)) => Some(left),
            _ => None,
        };
        if stage.cluster().running(number).is_none_or(|now| now.life != life.life) {
            return;
        }
        world.note(format!("node {number} goes; {left:?} things have not moved"));
        count(stage.counts(), left == Some(0));
        stage.cluster().crash(number, Crash::Process);
        world.sleep(0, down).await;
        if let Err(error) = stage.start(number).await {
            world.fail(error);
        }
    }));
}

fn count(counts: &Mutex<Counts>, all_moved: bool) {
    let mut counts = lock(counts);
    if all_moved {
        counts.left += 1;
    } else {
        counts.left_early += 1;
    }
}

fn pause(stage: &impl Target, chance: &mut Chance, end: u64) {
    let live = stage.cluster().live();
    let Some(number) = chance.pick(&live).map(|life| life.node.number) else { return };
    let (world, time) = (stage.cluster().world.clone(), until(stage, chance, PAUSED, end));
    if world.pause(number) {
        lock(stage.counts()).pauses += 1;
        world.note(format!("node {number} is paused for {time:?}"));
        world.clone().after(time, move || {
            world.note(format!("node {number} goes on"));
            world.resume(number);
        });
    }
}

fn cut(stage: &impl Target, chance: &mut Chance, end: u64) {
    let mut ids = stage.cluster().ids().to_vec();
    chance.shuffle(&mut ids);
    let [one, other, ..] = ids[..] else { return };
    let time = until(stage, chance, CUT, end);
    cut_for(stage, &[(one, other)], time);
}

/// Cuts a node off from all others.
fn isolate(stage: &impl Target, chance: &mut Chance, end: u64) {
    let ids = stage.cluster().ids();
    let Some(one) = chance.pick(ids).copied() else { return };
    let links: Vec<_> = ids.iter().filter(|other| **other != one).map(|other| (one, *other)).collect();
    let time = until(stage, chance, CUT, end);
    cut_for(stage, &links, time);
}

fn cut_for(stage: &impl Target, links: &[(shoal_actors::ids::NodeId, shoal_actors::ids::NodeId)], time: Duration) {
    for (one, other) in links.iter().copied() {
        if stage.cluster().exchange.is_cut(one, other) {
            continue;
        }
        stage.cluster().world.note(format!("the link {one:?}–{other:?} is cut for {time:?}"));
        lock(stage.counts()).cuts += 1;
        stage.cluster().exchange.cut(one, other);
        let (exchange, world) = (stage.cluster().exchange.clone(), stage.cluster().world.clone());
        stage.cluster().world.after(time, move || {
            world.note(format!("the link {one:?}–{other:?} is mended"));
            exchange.mend(one, other);
        });
    }
}

fn sever(stage: &impl Target, chance: &mut Chance) {
    let mut ids = stage.cluster().ids().to_vec();
    chance.shuffle(&mut ids);
    if let [one, other, ..] = ids[..] {
        stage.cluster().world.note(format!("the connection {one:?}–{other:?} breaks"));
        lock(stage.counts()).severed += 1;
        stage.cluster().exchange.sever(one, other);
    }
}
