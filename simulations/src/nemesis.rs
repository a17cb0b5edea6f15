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
