//! What can be run, and how.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use clap::ValueEnum;

use crate::broken::Broken;
use crate::report::{Counts, Failure, Report};
use crate::world::World;
use crate::{join_and_lend, place_and_answer};

/// What is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Scenario {
    /// Nodes find each other and lend each other memory while nodes crash and links are cut.
    #[default]
    JoinAndLend,
    /// Nodes place a model on each other and answer requests while nodes crash and pause and links are cut.
    PlaceAndAnswer,
}

impl Scenario {
    /// The name by which the command line knows it.
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// What a run is made of. The same options give the same run, event by event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// What is run.
    pub scenario: Scenario,
    /// What all chance follows from.
    pub seed: u64,
    /// Nodes, at least 2.
    pub nodes: u16,
    /// How long the nemesis goes on, in virtual time.
    pub faults: Duration,
    /// A fault in the system itself, to see that it is found.
    pub broken: Option<Broken>,
}

impl Options {
    /// Five nodes, a minute of faults.
    pub fn new(scenario: Scenario, seed: u64) -> Self {
        Self { scenario, seed, nodes: 5, faults: Duration::from_secs(60), broken: None }
    }

    fn reproduce(&self) -> String {
        let broken = self.broken.map(|broken| format!(" --broken {}", broken.name())).unwrap_or_default();
        let (scenario, seconds) = (self.scenario.name(), self.faults.as_secs());
        format!("sim run --scenario {scenario} --seed {} --nodes {} --seconds {seconds}{broken}", self.seed, self.nodes)
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a scenario once.
///
/// # Errors
/// [`Failure`], at the first thing that is wrong.
pub fn run_once(options: Options) -> Result<Report, Box<Failure>> {
    let world = World::new(options.seed);
    let counts = Arc::new(Mutex::new(Counts::default()));
    let result = match options.scenario {
        _ if options.nodes < 2 => Err(format!("{} nodes have nothing to do with each other: at least 2 are needed", options.nodes)),
        Scenario::JoinAndLend => join_and_lend::play(&world, options, Arc::clone(&counts)),
        Scenario::PlaceAndAnswer => place_and_answer::play(&world, options, Arc::clone(&counts)),
    };
    let (at, trace_hash) = (Duration::from_nanos(world.now()), world.trace_hash().to_hex().to_string());
    match result {
        Ok(()) => {
            let counts = *lock(&counts);
            Ok(Report { seed: options.seed, nodes: options.nodes, virtual_time: at, events: world.events(), trace_hash, counts })
        }
        Err(reason) => Err(Box::new(Failure { reproduce: options.reproduce(), reason, at, trace_hash, recent: world.recent() })),
    }
}
