//! The scenario by seed: it passes, a seed is one run, and what is broken on purpose is found.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use clap::ValueEnum;
use shoal_simulations::broken::Broken;
use shoal_simulations::report::Counts;
use shoal_simulations::scenario::{Options, Scenario, run_once};

fn short(seed: u64) -> Options {
    Options { faults: Duration::from_secs(40), ..Options::new(Scenario::JoinAndLend, seed) }
}

#[test]
fn seeds_pass_and_things_happen() {
    let mut sum = Counts::default();
    for seed in 0..20 {
        match run_once(short(seed)) {
            Ok(report) => sum.add(&report.counts),
            Err(failure) => panic!("{failure}"),
        }
    }
    let Counts { granted, refused, abandoned, released, lost, claimed, claims_refused: _, crashes, cuts, severed, deaths_seen, .. } = sum;
    assert!([granted, refused, abandoned, released, lost, claimed, crashes, cuts, severed, deaths_seen].iter().all(|n| *n > 10), "{sum:?}");
}

#[test]
fn a_seed_is_a_run() {
    let mut hashes = BTreeSet::new();
    for seed in 100..103 {
        let [first, second] = [(); 2].map(|()| run_once(short(seed)).unwrap_or_else(|failure| panic!("{failure}")));
        assert_eq!(first, second);
        hashes.insert(first.trace_hash);
    }
    assert_eq!(hashes.len(), 3, "different seeds are different runs");
}

#[test]
fn what_is_broken_is_found_and_shown_again() {
    for broken in Broken::value_variants().iter().filter(|broken| broken.scenario() == Scenario::JoinAndLend) {
        let found = (0..10).find_map(|seed| run_once(Options { broken: Some(*broken), ..short(seed) }).err());
        let failure = found.unwrap_or_else(|| panic!("{broken:?} was not found"));
        assert!(failure.reason.starts_with(&format!("{} does not hold", broken.finder())), "{broken:?}: {failure}");
        assert!(!failure.recent.is_empty());

        // The command that the failure prints fails in the same way, after the same events.
        let words: Vec<&str> = failure.reproduce.split(' ').collect();
        assert_eq!(words[0], "sim");
        let again = Command::new(env!("CARGO_BIN_EXE_sim")).args(&words[1..]).output().unwrap();
        let text = String::from_utf8(again.stderr).unwrap();
        assert!(!again.status.success());
        assert!(text.contains(&failure.reason) && text.contains(&failure.trace_hash), "{text}\nshould be\n{failure}");
        assert!(text.contains(&failure.reproduce), "{text}");
    }
}

#[test]
fn one_node_is_refused() {
    let error = run_once(Options { nodes: 1, ..short(0) }).unwrap_err();
    assert!(error.reason.contains("at least 2"), "{error}");
}
