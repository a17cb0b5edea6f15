//! Runs scenarios in virtual time.
//!
//! ```text
//! sim run --scenario join_and_lend --seed 7 --nodes 5
//! sim swarm --seeds 0..1000 --twice-every 10
//! sim find --seeds 0..10
//! ```

use std::io::Write;
use std::num::NonZeroU64;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand, ValueEnum};
use shoal_simulations::broken::Broken;
use shoal_simulations::report::{Counts, Failure, Report};
use shoal_simulations::scenario::{Options, Scenario, run_once};

/// Nodes of a run, unless told otherwise.
const NODES: u16 = 5;
/// Seconds of faults, unless told otherwise.
const SECONDS: u64 = 60;

/// Shoal's actors in virtual time, from a seed.
#[derive(Debug, Parser)]
#[command(name = "sim", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs one seed and prints what happened as JSON.
    Run {
        /// The seed that everything follows from.
        #[arg(long)]
        seed: u64,
        /// Runs it twice and compares the trace hashes.
        #[arg(long)]
        twice: bool,
        #[command(flatten)]
        what: What,
    },
    /// Runs a range of seeds, and stops at the first that fails.
    Swarm {
        /// The seeds: `A..B`, without B.
        #[arg(long)]
        seeds: Seeds,
        /// Runs one seed in N twice and compares the trace hashes.
        #[arg(long, value_name = "N")]
        twice_every: Option<NonZeroU64>,
        #[command(flatten)]
        what: What,
    },
    /// Breaks the system on purpose in every way it knows, and sees to it that each is found by the right invariant.
    Find {
        /// The seeds to look in: `A..B`, without B.
        #[arg(long)]
        seeds: Seeds,
    },
}

#[derive(Debug, Args)]
struct What {
    /// What to run.
    #[arg(long, default_value = "join_and_lend")]
    scenario: Scenario,
    /// Nodes.
    #[arg(long, default_value_t = NODES)]
    nodes: u16,
    /// Seconds of faults, in virtual time.
    #[arg(long, default_value_t = SECONDS)]
    seconds: u64,
    /// Breaks the system on purpose, to see that it is found.
    #[arg(long)]
    broken: Option<Broken>,
}

impl Default for What {
    fn default() -> Self {
        Self { scenario: Scenario::default(), nodes: NODES, seconds: SECONDS, broken: None }
    }
}

impl What {
    fn run(&self, seed: u64) -> Result<Report, Box<Failure>> {
        let Self { scenario, nodes, seconds, broken } = *self;
        run_once(Options { scenario, seed, nodes, faults: Duration::from_secs(seconds), broken })
    }
}

#[derive(Debug, Clone, Copy)]
struct Seeds {
    from: u64,
    to: u64,
}

impl FromStr for Seeds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a range of seeds: write A..B, with A below B");
        let (from, to) = text.split_once("..").ok_or_else(wrong)?;
        let (from, to) = (from.parse().map_err(|_| wrong())?, to.parse().map_err(|_| wrong())?);
        if from < to { Ok(Self { from, to }) } else { Err(wrong()) }
    }
}

fn say(text: &str) {
    // Whoever has closed the pipe does not want to know.
    let _ = writeln!(std::io::stdout().lock(), "{text}");
}

fn complain(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

fn speed(virtual_time: Duration, begun: Instant) -> f64 {
    virtual_time.as_secs_f64() / begun.elapsed().as_secs_f64().max(1e-9)
}

/// Runs a seed again, and compares.
fn again(what: &What, report: &Report) -> Result<(), String> {
    let seed = report.seed;
    let second = what.run(seed).map_err(|failure| format!("the second run of seed {seed} failed:\n{failure}"))?;
    if second == *report {
        return Ok(());
    }
    Err(format!(
        "seed {seed} is not one run: its trace hashes are {} and {}; something in the nodes depends on more than the seed",
        report.trace_hash, second.trace_hash
    ))
}

fn one(seed: u64, twice: bool, what: &What) -> Result<(), String> {
    let begun = Instant::now();
    let report = what.run(seed).map_err(|failure| failure.to_string())?;
    let faster = speed(report.virtual_time, begun);
    if twice {
        again(what, &report)?;
    }
    say(&serde_json::to_string_pretty(&report).map_err(|error| error.to_string())?);
    complain(&format!("{faster:.0} virtual seconds in a second"));
    Ok(())
}

fn swarm(seeds: Seeds, twice_every: Option<NonZeroU64>, what: &What) -> Result<(), String> {
    let begun = Instant::now();
    let (mut counts, mut virtual_time, mut events, mut twice) = (Counts::default(), Duration::ZERO, 0, 0);
    for seed in seeds.from..seeds.to {
        let report = what.run(seed).map_err(|failure| failure.to_string())?;
        if twice_every.is_some_and(|every| (seed - seeds.from).is_multiple_of(every.get())) {
            again(what, &report)?;
            twice += 1;
        }
        counts.add(&report.counts);
        virtual_time += report.virtual_time;
        events += report.events;
    }
    say(&serde_json::to_string(&counts).map_err(|error| error.to_string())?);
    let (number, seconds) = (seeds.to - seeds.from, begun.elapsed().as_secs_f64().max(1e-9));
    say(&format!(
        "{number} seeds of {} nodes passed, {twice} of them run twice with equal traces: {:.0} virtual seconds and {events} events in {seconds:.1} s",
        what.nodes,
        virtual_time.as_secs_f64(),
    ));
    Ok(())
}

fn find(seeds: Seeds) -> Result<(), String> {
    for broken in Broken::value_variants().iter().copied() {
        let what = What { scenario: broken.scenario(), broken: Some(broken), ..What::default() };
        let found = (seeds.from..seeds.to).find_map(|seed| what.run(seed).err());
        let Some(failure) = found else {
            return Err(format!("`{}` was not found in seeds {}..{}", broken.name(), seeds.from, seeds.to));
        };
        if !failure.reason.starts_with(broken.finder()) {
            return Err(format!("`{}` was found by another invariant than `{}`:\n{failure}", broken.name(), broken.finder()));
        }
        say(&format!("{}: {}\n    {}", broken.name(), failure.reason, failure.reproduce));
    }
    Ok(())
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match &cli.command {
        Command::Run { seed, twice, what } => one(*seed, *twice, what),
        Command::Swarm { seeds, twice_every, what } => swarm(*seeds, *twice_every, what),
        Command::Find { seeds } => find(*seeds),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            complain(&text);
            ExitCode::FAILURE
        }
    }
}
