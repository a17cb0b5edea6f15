//! The effects of one simulated node.

use std::sync::Arc;
use std::time::Duration;

use shoal_actors::env::{Clock, Compute, Env, Instant, MemoryStorage, NetworkFactory, Rng, Spawner, Storage};

use crate::chance::SimRng;
use crate::clock::SimClock;
use crate::network::{SimExchange, SimNetwork};
use crate::spawner::SimSpawner;
use crate::world::{World, nanos};

/// What lasts of a node while it crashes and restarts: its clock, its chance, its files, its place on the network.
#[derive(Debug, Clone)]
pub struct SimEnv {
    /// The node's number in the world.
    pub number: u16,
    world: World,
    clock: Arc<SimClock>,
    rng: Arc<SimRng>,
    storage: Arc<MemoryStorage>,
    network: Arc<SimNetwork>,
    compute: Arc<dyn Compute>,
}

impl SimEnv {
    /// The most that the clocks of a sound world are fast or slow, in millionths.
    pub const DRIFT_MAX: i32 = 200;
    /// The most that a node's clock showed when the world began.
    const UPTIME_MAX: Duration = Duration::from_secs(30 * 24 * 3600);

    /// A node of `world`, whose clock differs from all others and is at most `drift_max` millionths fast or slow.
    pub fn new(world: &World, exchange: &SimExchange, number: u16, drift_max: i32, compute: Arc<dyn Compute>) -> Self {
        let mut chance = world.chance("clock", number.into());
        let offset = chance.below(nanos(Self::UPTIME_MAX));
        let most = u64::from(drift_max.unsigned_abs());
        let drift = i32::try_from(chance.between(0, 2 * most)).unwrap_or(0) - drift_max;
        Self {
            number,
            world: world.clone(),
            clock: Arc::new(SimClock::new(world.clone(), number, offset, drift)),
            rng: Arc::new(SimRng::new(world.seed(), number)),
            storage: Arc::default(),
            network: Arc::new(SimNetwork { exchange: exchange.clone(), number }),
            compute,
        }
    }

    /// What a moment on the node's clock is in nanoseconds of the world.
    pub fn real(&self, moment: Instant) -> u64 {
        self.clock.real(moment.as_nanos())
    }

    /// The node's effects for one life of it, and the spawner that ends with this life.
    pub fn life(&self) -> (Env, SimSpawner) {
        let spawner = SimSpawner::new(self.world.clone(), self.number);
        let env = Env {
            clock: Arc::clone(&self.clock) as Arc<dyn Clock>,
            rng: Arc::clone(&self.rng) as Arc<dyn Rng>,
            spawner: Arc::new(spawner.clone()) as Arc<dyn Spawner>,
            network: Arc::clone(&self.network) as Arc<dyn NetworkFactory>,
            storage: Arc::clone(&self.storage) as Arc<dyn Storage>,
            compute: Arc::clone(&self.compute),
        };
        (env, spawner)
    }
}
