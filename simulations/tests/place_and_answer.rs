//! The scenario by seed: it passes, a seed is one run, and what is broken on purpose is found.

use std::time::Duration;

use clap::ValueEnum;
use shoal_simulations::broken::Broken;
use shoal_simulations::report::Counts;
use shoal_simulations::scenario::{Options, Scenario, run_once};

fn short(seed: u64) -> Options {
    Options { faults: Duration::from_secs(40), ..Options::new(Scenario::PlaceAndAnswer, seed) }
}

#[test]
fn seeds_pass_and_things_happen() {
    let mut sum = Counts::default();
    for seed in 0..10 {
        match run_once(short(seed)) {
            Ok(report) => sum.add(&report.counts),
            Err(failure) => panic!("{failure}"),
        }
    }
    let Counts { crashes, cuts, severed, pauses, left, placed, whole, broken_off, cancelled, tokens, .. } = sum;
    assert!([crashes, cuts, severed, pauses, left, placed, broken_off, cancelled].iter().all(|n| *n > 5), "{sum:?}");
    assert!(whole > 500 && tokens > 5000, "{sum:?}");
}

#[test]
fn a_seed_is_a_run() {
    for (seed, nodes) in [(100, 5), (101, 3)] {
        let [first, second] = [(); 2].map(|()| run_once(Options { nodes, ..short(seed) }).unwrap_or_else(|failure| panic!("{failure}")));
        assert_eq!(first, second);
    }
}

#[test]
fn what_is_broken_is_found() {
    for broken in Broken::value_variants().iter().filter(|broken| broken.scenario() == Scenario::PlaceAndAnswer) {
        let found = (0..20).find_map(|seed| run_once(Options { broken: Some(*broken), ..short(seed) }).err());
        let failure = found.unwrap_or_else(|| panic!("{broken:?} was not found"));
        assert!(failure.reason.starts_with(&format!("{} does not hold", broken.finder())), "{broken:?}: {failure}");
    }
}
