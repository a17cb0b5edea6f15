//! A node that is stopped for longer than its leases last, as by a debugger or a lid that is closed: the others go on without it,
//! and when it wakes it uses nothing that is not its own any more, and is one of them again.

#![cfg(unix)]

#[path = "common/mod.rs"]
mod common;

use std::time::Duration;

use common::{NodeProcess, TINY, direct, key, models_folder, post, stream, up, wait_until, wait_until_joined};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Longer than a lease that nobody renews.
const ASLEEP: Duration = Duration::from_secs(12);

fn question(max_tokens: u32) -> Value {
    json!({"model": TINY, "messages": [{"role": "user", "content": "What sleeps?"}], "max_tokens": max_tokens, "ignore_eos": true,
        "temperature": 0})
}

/// Three nodes that go only where they are told.
fn cluster(root: &std::path::Path) -> Vec<NodeProcess> {
    let key = key();
    let mut nodes: Vec<NodeProcess> = Vec::new();
    for name in ["a", "b", "c"] {
        nodes.push(NodeProcess::start(direct(up(root, name), Some(&key), nodes.first())));
    }
    wait_until_joined(&nodes.iter().collect::<Vec<_>>());
    nodes
}

fn sleeps(conductor_sleeps: bool) {
    let root = tempfile::tempdir().expect("a folder");
    models_folder(root.path());
    let nodes = cluster(root.path());
    let goal = json!({"model": TINY, "nodes_min": 2, "nodes_max": 2, "context_tokens": 512});
    let (status, instance) = post(nodes[0].api(), "/v1/shoal/load", &goal);
    assert_eq!(status, 200, "{instance}");
    let place = |id: &Value| nodes.iter().position(|node| json!(node.id()) == *id).expect("ours");
    let conductor = place(&instance["conductor"]);
    let holders: Vec<usize> = instance["stages"].as_array().expect("stages").iter().map(|stage| place(&stage["node"])).collect();
    let sleeper = if conductor_sleeps { conductor } else { *holders.iter().find(|holder| **holder != conductor).expect("another") };
    let awake: Vec<&NodeProcess> = (0..3).filter(|place| *place != sleeper).map(|place| &nodes[place]).collect();
    let known = |node: &NodeProcess| node.state()["instances"].as_array().cloned().unwrap_or_default();
    for node in &nodes {
        wait_until("the instance is known", || known(node).first().is_some_and(|known| known["id"] == instance["id"]));
    }
    let undisturbed = stream(awake[0].api(), &question(450), |_| {});
    assert!(undisturbed.done && undisturbed.token_ids.len() == 450, "{undisturbed:?}");

    let mut asleep = None;
    let answer = stream(awake[0].api(), &question(450), |tokens| {
        if tokens >= 5 && asleep.is_none() {
            nodes[sleeper].signal(Signal::STOP);
            asleep = Some(std::time::Instant::now());
        }
    });
    let asleep = asleep.expect("in the midst of the answer");
    assert!(answer.done && answer.error.is_none(), "{answer:?}");
    assert_eq!(answer.token_ids, undisturbed.token_ids, "nothing is lost, said twice or said otherwise");
    std::thread::sleep(ASLEEP.saturating_sub(asleep.elapsed()));
    nodes[sleeper].signal(Signal::CONT);

    wait_until_joined(&nodes.iter().collect::<Vec<_>>());
    // What is lent is what the instance has where it is now, and whoever slept holds and conducts nothing of what it had.
    for node in &nodes {
        wait_until("one instance is left, and nothing is lent beside it", || {
            let (state, id) = (node.state(), json!(node.id()));
            let [one] = &known(node)[..] else { return false };
            let stages = one["stages"].as_array().cloned().unwrap_or_default();
            let lent: u64 = stages.iter().filter(|stage| stage["node"] == id).filter_map(|stage| stage["lease_bytes"].as_u64()).sum();
            one["state"] == "ready" && state["lent"]["used_bytes"] == lent
        });
    }
    for node in &nodes {
        let again = stream(node.api(), &question(16), |_| {});
        assert_eq!(again.token_ids, undisturbed.token_ids[..16], "{again:?}");
    }
    let (status, gone) = post(awake[0].api(), "/v1/shoal/unload", &json!({"model": TINY}));
    assert_eq!(status, 200, "{gone}");
    for node in &nodes {
        wait_until("its memory is free", || node.state()["lent"]["used_bytes"] == 0);
    }
}

#[test]
fn a_holder_that_slept_is_one_of_them_again() {
    sleeps(false);
}

#[test]
fn a_conductor_that_slept_finds_another_in_its_place() {
    sleeps(true);
}
