//! Real node processes on this machine: they join, answer for each other, lose one of them, refuse strangers, and end
//! without leaving anything behind.

mod common;

use std::process::Command;

use common::{NodeProcess, TINY, direct, key, models_folder, post, shoal, stream, up, up_lending, wait_until, wait_until_joined};
use rustix::process::Signal;
use serde_json::{Value, json};

/// A node that finds others by multicast on this machine.
fn private(root: &std::path::Path, name: &str, key: &str) -> Command {
    let mut command = up(root, name);
    command.env("SHOAL_KEY", key);
    command
}

/// A node that only goes where it is told.
fn directed(root: &std::path::Path, name: &str, key: Option<&str>, peer: Option<&NodeProcess>) -> Command {
    direct(up(root, name), key, peer)
}

fn question(model: &str, max_tokens: u32) -> Value {
    json!({"model": model, "messages": [{"role": "user", "content": "Tell me a long story."}], "temperature": 0, "max_tokens": max_tokens,
        "ignore_eos": true, "stream_options": {"include_usage": true}})
}

fn goal(nodes: u32) -> Value {
    json!({"model": TINY, "nodes_min": nodes, "nodes_max": nodes, "context_tokens": 128})
}

/// How many layers the tiny model has, and so how many nodes can share it, is its own affair.
const NODES: u32 = 2;

#[test]
fn nodes_find_each_other_share_a_model_and_any_of_them_answers() {
    let root = tempfile::tempdir().expect("a folder");
    models_folder(root.path());
    let key = key();
    let mut nodes: Vec<NodeProcess> = (1..=3).map(|n| NodeProcess::start(private(root.path(), &format!("n{n}"), &key))).collect();
    wait_until_joined(&nodes.iter().collect::<Vec<_>>());

    let (status, plans) = post(nodes[0].api(), "/v1/shoal/plan", &goal(NODES));
    assert_eq!(status, 200, "{plans}");
    assert_eq!(plans["plans"][0]["stages"].as_array().map(Vec::len), Some(NODES as usize), "{plans}");
    let (status, instance) = post(nodes[0].api(), "/v1/shoal/load", &goal(NODES));
    assert_eq!((status, &instance["state"]), (200, &json!("ready")), "{instance}");
    let stages = instance["stages"].as_array().expect("stages");
    assert_eq!(stages.len(), NODES as usize);
    // The layers follow each other, and each owner has lent just what the plan says.
    let mut next = 0;
    for stage in stages {
        assert_eq!(stage["layers"][0], json!(next));
        next = stage["layers"][1].as_u64().expect("a layer");
        let owner = nodes.iter().find(|node| node.id() == stage["node"]).expect("one of ours");
        assert_eq!(owner.state()["lent"]["used_bytes"], stage["lease_bytes"], "{stage}");
    }

    // Whoever holds nothing of it answers like the others.
    let outside = nodes.iter().find(|node| stages.iter().all(|stage| stage["node"] != node.id())).expect("one is not needed");
    wait_until("the instance is known everywhere", || outside.state()["instances"][0]["state"] == "ready");
    let answer = stream(outside.api(), &question(TINY, 24), |_| {});
    assert!(answer.done && answer.error.is_none(), "{answer:?}");
    assert_eq!((answer.token_ids.len(), answer.finish.as_deref()), (24, Some("length")));
    assert_eq!(answer.usage["completion_tokens"], 24);
    let (status, whole) = post(nodes[0].api(), "/v1/chat/completions", &{
        let mut body = question(TINY, 24);
        body.as_object_mut().expect("an object").shift_remove("stream_options");
        body["return_token_ids"] = json!(true);
        body["logprobs"] = json!(true);
        body["top_logprobs"] = json!(2);
        body
    });
    assert_eq!(status, 200, "{whole}");
    let ids: Vec<u64> = whole["choices"][0]["token_ids"].as_array().expect("ids").iter().filter_map(Value::as_u64).collect();
    assert_eq!(ids, answer.token_ids, "the same question has the same answer, whole and streamed");
    assert_eq!(whole["choices"][0]["message"]["content"], json!(answer.text));
    let first = &whole["choices"][0]["logprobs"]["content"][0];
    assert!(first["logprob"].as_f64().is_some_and(|logprob| logprob <= 0.0), "{first}");
    assert_eq!(first["top_logprobs"].as_array().map(Vec::len), Some(2), "{first}");
    assert!(whole["timings"]["prefill_tok_s"].as_f64().is_some_and(|rate| rate > 0.0), "{whole}");

    let (status, models) = common::get(outside.api(), "/v1/models");
    assert_eq!((status, &models["data"][0]["id"], &models["data"][0]["shoal"]["placed"]), (200, &json!(TINY), &json!(true)));
    let (status, gone) = post(outside.api(), "/v1/shoal/unload", &json!({"model": TINY}));
    assert_eq!(status, 200, "{gone}");
    for node in &nodes {
        wait_until("its memory is free", || node.state()["lent"]["used_bytes"] == 0);
    }

    let text = shoal().args(["status", "--api", nodes[1].api()]).output().expect("runs");
    let text = String::from_utf8(text.stdout).expect("text");
    assert!(["n1", "n2 *", "n3"].iter().all(|name| text.contains(name)), "{text}");

    // One leaves when asked over HTTP, one by SIGTERM, one when whoever started it is gone.
    let left = shoal().args(["leave", "--api", nodes[0].api()]).output().expect("runs");
    assert!(left.status.success(), "{}", String::from_utf8_lossy(&left.stderr));
    let first = nodes[0].id().to_owned();
    nodes[1].wait_for("left", |event| event["node"] == first.as_str());
    nodes[1].signal(Signal::TERM);
    nodes[2].close_stdin();
    for node in &mut nodes {
        assert!(node.wait(), "a node ends well");
    }
}

/// Nodes that go only where they are told, each with so much memory if that is said.
fn cluster(root: &std::path::Path, count: usize, memory: Option<u64>) -> Vec<NodeProcess> {
    cluster_with(root, &key(), count, memory)
}

fn cluster_with(root: &std::path::Path, key: &str, count: usize, memory: Option<u64>) -> Vec<NodeProcess> {
    let mut nodes: Vec<NodeProcess> = Vec::new();
    for n in 1..=count {
        let name = format!("n{n}");
        let command = memory.map_or_else(|| up(root, &name), |bytes| up_lending(root, &name, bytes));
        nodes.push(NodeProcess::start(direct(command, Some(key), nodes.first())));
    }
    wait_until_joined(&nodes.iter().collect::<Vec<_>>());
    nodes
}

/// Loads the tiny model on two nodes and gives the places of its conductor and of a holder that is not the conductor.
fn load_on_two(nodes: &[NodeProcess]) -> (usize, usize) {
    let mut wanted = goal(NODES);
    wanted["context_tokens"] = json!(512);
    let (status, instance) = post(nodes[0].api(), "/v1/shoal/load", &wanted);
    assert_eq!(status, 200, "{instance}");
    let place = |id: &Value| nodes.iter().position(|node| json!(node.id()) == *id).expect("ours");
    let conductor = place(&instance["conductor"]);
    let mut holders = instance["stages"].as_array().expect("stages").iter().map(|stage| place(&stage["node"]));
    (conductor, holders.find(|holder| *holder != conductor).expect("a stage that the conductor does not hold"))
}

/// Asks a node for a long answer, does something in the midst of it, and gives the answer and the longest pause after that.
fn stream_through(api: &str, what: impl FnOnce() + Send) -> (common::Streamed, std::time::Duration) {
    let (mut what, mut at) = (Some(what), None);
    let mut longest = std::time::Duration::ZERO;
    let answer = stream(api, &question(TINY, 450), |tokens| {
        if let Some(what) = what.take_if(|_| tokens >= 5) {
            what();
            at = Some(std::time::Instant::now());
        } else if let Some(before) = &mut at {
            longest = longest.max(before.elapsed());
            *before = std::time::Instant::now();
        }
    });
    assert!(at.is_some(), "{answer:?}");
    (answer, longest)
}

/// Three nodes with the tiny model on two of them, of which one is to go.
struct Trio {
    _root: tempfile::TempDir,
    nodes: Vec<NodeProcess>,
    /// The place of the one that goes.
    goes: usize,
    /// The interface of one that has nothing to do with the model, or else of the other holder.
    api: String,
    undisturbed: common::Streamed,
}

impl Trio {
    fn start(conductor_goes: bool) -> Self {
        let root = tempfile::tempdir().expect("a folder");
        models_folder(root.path());
        let nodes = cluster(root.path(), 3, None);
        let (conductor, holder) = load_on_two(&nodes);
        let goes = if conductor_goes { conductor } else { holder };
        let asked = (0..3).find(|place| *place != conductor && *place != holder).expect("three");
        let api = nodes[asked].api().to_owned();
        wait_until("the instance is known everywhere", || nodes[asked].state()["instances"][0]["state"] == "ready");
        let undisturbed = stream(&api, &question(TINY, 450), |_| {});
        assert!(undisturbed.done && undisturbed.token_ids.len() == 450, "{undisturbed:?}");
        Self { _root: root, nodes, goes, api, undisturbed }
    }

    /// An answer in the midst of which one went is the one that was not disturbed.
    fn is_undisturbed(&self, answer: &common::Streamed) {
        assert!(answer.done && answer.error.is_none(), "{answer:?}");
        assert_eq!(answer.token_ids, self.undisturbed.token_ids, "nothing is lost, said twice or said otherwise");
        assert_eq!(answer.text, self.undisturbed.text);
    }

    fn left(&self) -> impl Iterator<Item = &NodeProcess> {
        (0..3).filter(|place| *place != self.goes).map(|place| &self.nodes[place])
    }

    /// Waits until those who are left know one instance, with nothing of it on the one that went; gives it.
    fn instance(&self) -> Value {
        let gone = json!(self.nodes[self.goes].id());
        let first = self.left().next().expect("two");
        let mut found = Value::Null;
        wait_until("who is left knows one instance", || {
            let instances = first.state()["instances"].as_array().cloned().unwrap_or_default();
            let whole = |instance: &Value| instance["stages"].as_array().is_some_and(|all| all.iter().all(|stage| stage["node"] != gone));
            found = instances.first().cloned().unwrap_or_default();
            instances.len() == 1 && found["state"] == "ready" && found["conductor"] != gone && whole(&found)
        });
        found
    }

    /// Those who are left answer, too, and in the end nothing is left over.
    fn end(self) {
        let short = stream(&self.api, &question(TINY, 8), |_| {});
        assert_eq!(short.token_ids, self.undisturbed.token_ids[..8], "{short:?}");
        let (status, unloaded) = post(&self.api, "/v1/shoal/unload", &json!({"model": TINY}));
        assert_eq!(status, 200, "{unloaded}");
        for node in self.left() {
            wait_until("its memory is free", || node.state()["lent"]["used_bytes"] == 0);
        }
    }
}

/// Kills the conductor of a model, or a holder of a stage that is not the conductor, in the midst of an answer.
#[allow(clippy::print_stdout)]
fn dies(conductor_dies: bool) {
    let mut trio = Trio::start(conductor_dies);
    let victim = &mut trio.nodes[trio.goes];
    let (answer, pause) = stream_through(&trio.api, || victim.kill());
    println!("conductor: {conductor_dies}; the longest pause after the kill was {pause:?}");
    trio.is_undisturbed(&answer);
    trio.instance();
    trio.end();
}

#[test]
fn a_killed_stage_is_placed_anew_and_the_answer_goes_on() {
    dies(false);
}

#[test]
fn a_killed_conductor_has_an_heir_and_the_answer_goes_on() {
    dies(true);
}

/// Has a node leave in the midst of an answer that another one reads.
#[allow(clippy::print_stdout)]
fn leaves(conductor_leaves: bool) {
    let mut trio = Trio::start(conductor_leaves);
    let leaver_api = trio.nodes[trio.goes].api().to_owned();
    let mut left = None;
    let (answer, longest) = stream_through(&trio.api, || {
        left = Some(shoal().args(["leave", "--api", &leaver_api]).stdout(std::process::Stdio::piped()).spawn().expect("runs"));
    });
    println!("conductor: {conductor_leaves}; the longest pause after it was told to leave was {longest:?}");
    trio.is_undisturbed(&answer);
    assert!(left.expect("told").wait().expect("ended").success());
    let said = trio.nodes[trio.goes].wait_for_end();
    assert!(said.iter().all(|event| event["event"] != "stays"), "everything has moved: {said:?}");

    let instance = trio.instance();
    assert_eq!(instance["term"], json!(if conductor_leaves { 2 } else { 1 }), "nobody had to die for it: {instance}");
    trio.end();
}

#[test]
fn a_stage_moves_before_its_holder_leaves_and_the_answer_goes_on() {
    leaves(false);
}

#[test]
fn a_conductor_hands_over_before_it_leaves_and_the_answer_goes_on() {
    leaves(true);
}

#[test]
fn a_node_whose_model_fits_nowhere_else_says_so_and_finishes_its_answers() {
    let root = tempfile::tempdir().expect("a folder");
    models_folder(root.path());
    let mut nodes = cluster(root.path(), 1, None);
    let undisturbed = stream(nodes[0].api(), &question(TINY, 300), |_| {});
    let api = nodes[0].api().to_owned();
    let mut told = false;
    let answer = stream(&api, &question(TINY, 300), |tokens| {
        if tokens >= 5 && !std::mem::replace(&mut told, true) {
            nodes[0].signal(Signal::TERM);
            nodes[0].wait_for("leaving", |_| true);
            let late = json!({"model": TINY, "messages": [{"role": "user", "content": "One more?"}]});
            let (status, refused) = post(&api, "/v1/chat/completions", &late);
            assert_eq!((status, &refused["error"]["code"]), (503, &json!("leaving")), "{refused}");
        }
    });
    assert!(told && answer.done && answer.error.is_none(), "{answer:?}");
    assert_eq!(answer.token_ids, undisturbed.token_ids);
    let said = nodes[0].wait_for_end();
    let stays = said.iter().find(|event| event["event"] == "stays").unwrap_or_else(|| panic!("it is said: {said:?}"));
    assert!(stays["reason"].as_str().is_some_and(|reason| reason.contains(TINY)), "{stays}");
}

#[test]
fn a_model_stays_usable_when_nobody_else_is_left() {
    for leaves in [false, true] {
        let root = tempfile::tempdir().expect("a folder");
        models_folder(root.path());
        let mut nodes = cluster(root.path(), 2, None);
        let (status, instance) = post(nodes[0].api(), "/v1/shoal/load", &goal(1));
        assert_eq!(status, 200, "{instance}");
        let conductor = nodes.iter().position(|node| json!(node.id()) == instance["conductor"]).expect("ours");
        let other = 1 - conductor;
        let before = stream(nodes[conductor].api(), &question(TINY, 8), |_| {});
        assert!(before.done, "{before:?}");
        if leaves {
            nodes[other].signal(Signal::TERM);
            assert!(nodes[other].wait(), "it leaves");
        } else {
            nodes[other].kill();
        }
        let after = stream(nodes[conductor].api(), &question(TINY, 8), |_| {});
        assert!(after.done && after.error.is_none(), "{after:?}");
        assert_eq!(after.token_ids, before.token_ids);
    }
}

#[test]
fn requests_that_come_while_a_model_loads_wait_for_it() {
    let root = tempfile::tempdir().expect("a folder");
    models_folder(root.path());
    // Memory for one copy and not for two.
    let bytes = {
        let node = NodeProcess::start(directed(root.path(), "planner", None, None));
        let (status, plans) = post(node.api(), "/v1/shoal/plan", &json!({"model": TINY}));
        assert_eq!(status, 200, "{plans}");
        plans["plans"][0]["stages"][0]["lease_bytes"].as_u64().expect("bytes")
    };
    let node = NodeProcess::start(direct(up_lending(root.path(), "n1", bytes + bytes / 2), None, None));
    std::thread::scope(|scope| {
        let asked: Vec<_> = (0..12)
            .map(|n| {
                let api = node.api().to_owned();
                scope.spawn(move || {
                    std::thread::sleep(std::time::Duration::from_millis(10 * n));
                    stream(&api, &question(TINY, 4), |_| {})
                })
            })
            .collect();
        for answer in asked {
            let answer = answer.join().expect("asked");
            assert!(answer.done && answer.error.is_none(), "{answer:?}");
        }
    });
}

#[test]
fn a_question_is_answered_by_a_smaller_instance_where_the_usual_one_does_not_fit() {
    let root = tempfile::tempdir().expect("a folder");
    models_folder(root.path());
    let planned = |node: &NodeProcess, sequences: u32| {
        let (status, plans) = post(node.api(), "/v1/shoal/plan", &json!({"model": TINY, "sequences": sequences}));
        assert_eq!(status, 200, "{plans}");
        plans["plans"][0]["stages"][0]["lease_bytes"].as_u64().expect("bytes")
    };
    let (one, two) = {
        let node = NodeProcess::start(directed(root.path(), "planner", None, None));
        (planned(&node, 1), planned(&node, 2))
    };
    assert!(one < two);
    let node = NodeProcess::start(direct(up_lending(root.path(), "n1", one), None, None));
    let answer = stream(node.api(), &question(TINY, 4), |_| {});
    assert!(answer.done && answer.error.is_none(), "{answer:?}");
    // Who says what is wanted gets that or a refusal.
    let (status, refused) = post(node.api(), "/v1/shoal/load", &json!({"model": TINY, "sequences": 2, "replica": true}));
    assert!(status >= 400, "{refused}");
}

#[test]
fn a_stage_that_fits_nowhere_ends_the_answer_with_what_is_missing_and_the_model_comes_back() {
    let root = tempfile::tempdir().expect("a folder");
    models_folder(root.path());
    // Half of the model and a little more: one node alone cannot hold it.
    let memory = {
        let node = NodeProcess::start(directed(root.path(), "planner", None, None));
        let mut wanted = goal(1);
        wanted["context_tokens"] = json!(512);
        let (status, plans) = post(node.api(), "/v1/shoal/plan", &wanted);
        assert_eq!(status, 200, "{plans}");
        plans["plans"][0]["stages"][0]["lease_bytes"].as_u64().expect("bytes") - 1
    };
    let key = key();
    let mut nodes = cluster_with(root.path(), &key, 2, Some(memory));
    let (conductor, victim) = load_on_two(&nodes);
    let api = nodes[conductor].api().to_owned();
    let mut killed = None;
    let answer = stream(&api, &question(TINY, 450), |tokens| {
        if tokens >= 5 && killed.is_none() {
            killed = Some(std::time::Instant::now());
            nodes[victim].kill();
        }
    });
    println!("the answer ended {:?} after the kill", killed.map(|killed| killed.elapsed()));
    let error = answer.error.as_ref().unwrap_or_else(|| panic!("it went on to its end: {} tokens", answer.token_ids.len()));
    assert!(!answer.done && answer.token_ids.len() >= 5, "{answer:?}");
    let text = error["message"].as_str().expect("words");
    assert!(text.contains(&format!("n{}", victim + 1)) && text.contains("memory"), "{text}");
    wait_until("its memory is free", || nodes[conductor].state()["lent"]["used_bytes"] == 0);

    // It is wanted all the same, and says what it waits for.
    wait_until("it waits", || nodes[conductor].state()["instances"][0]["state"] == "waiting");
    let waiting = nodes[conductor].state()["instances"][0].clone();
    assert!(waiting["reason"].as_str().is_some_and(|reason| reason.contains("free")), "{waiting}");
    let mut wanted = goal(NODES);
    wanted["context_tokens"] = json!(512);
    let (status, refused) = post(&api, "/v1/shoal/load", &wanted);
    assert_eq!((status, &refused["error"]["code"]), (503, &json!("not_placed")), "{refused}");
    // When there is memory again nobody has to ask for it.
    let third = NodeProcess::start(direct(up_lending(root.path(), "n3", memory), Some(&key), Some(&nodes[conductor])));
    wait_until("it is placed again", || {
        let state = nodes[conductor].state();
        let instances = state["instances"].as_array().cloned().unwrap_or_default();
        instances.len() == 1 && instances[0]["state"] == "ready"
    });
    let again = stream(&api, &question(TINY, 450), |_| {});
    assert!(again.done && again.error.is_none(), "{again:?}");
    assert_eq!(again.token_ids[..answer.token_ids.len()], answer.token_ids);
    let (status, gone) = post(&api, "/v1/shoal/unload", &json!({"model": TINY}));
    assert_eq!(status, 200, "{gone}");
    for node in [&nodes[conductor], &third] {
        wait_until("its memory is free", || node.state()["lent"]["used_bytes"] == 0 && node.state()["instances"] == json!([]));
    }
}

#[test]
fn a_model_that_is_asked_to_wait_uses_the_memory_of_a_node_that_joins() {
    let root = tempfile::tempdir().expect("a folder");
    models_folder(root.path());
    let bytes = {
        let node = NodeProcess::start(directed(root.path(), "planner", None, None));
        let (status, plans) = post(node.api(), "/v1/shoal/plan", &json!({"model": TINY}));
        assert_eq!(status, 200, "{plans}");
        plans["plans"][0]["stages"][0]["lease_bytes"].as_u64().expect("bytes")
    };
    let key = key();
    let first = NodeProcess::start(direct(up_lending(root.path(), "n1", bytes - 1), Some(&key), None));
    let (status, refused) = post(first.api(), "/v1/shoal/load", &json!({"model": TINY}));
    assert_eq!(status, 503, "whoever does not wait hears at once: {refused}");
    assert_eq!(first.state()["instances"], json!([]));
    // A wish can be taken back.
    let wish = json!({"model": TINY, "wait": true});
    for _ in 0..2 {
        let (status, waiting) = post(first.api(), "/v1/shoal/load", &wish);
        assert_eq!((status, &waiting["state"]), (202, &json!("waiting")), "{waiting}");
        assert!(waiting["reason"].as_str().is_some_and(|reason| reason.contains("free")), "{waiting}");
        wait_until("it is shown", || first.state()["instances"][0]["state"] == "waiting");
        let (status, gone) = post(first.api(), "/v1/shoal/unload", &json!({"instance": waiting["id"]}));
        assert_eq!(status, 200, "{gone}");
        wait_until("it is shown no more", || first.state()["instances"] == json!([]));
    }
    let (status, waiting) = post(first.api(), "/v1/shoal/load", &wish);
    assert_eq!(status, 202, "{waiting}");
    let second = NodeProcess::start(direct(up_lending(root.path(), "n2", bytes), Some(&key), Some(&first)));
    wait_until("it is placed", || {
        let state = second.state();
        let instances = state["instances"].as_array().cloned().unwrap_or_default();
        instances.len() == 1 && instances[0]["state"] == "ready"
    });
    let answer = stream(second.api(), &question(TINY, 8), |_| {});
    assert!(answer.done && answer.error.is_none(), "{answer:?}");
}

#[test]
fn strangers_are_refused_with_a_word_on_both_sides() {
    let root = tempfile::tempdir().expect("a folder");
    models_folder(root.path());
    let (key, other) = (key(), key());
    let mut member = NodeProcess::start(directed(root.path(), "member", Some(&key), None));
    for (name, key) in [("keyless", None), ("wrong", Some(other.as_str()))] {
        let mut stranger = NodeProcess::start(directed(root.path(), name, key, Some(&member)));
        let heard = stranger.wait_for("refused", |_| true);
        let word = heard["reason"].as_str().expect("a reason").to_lowercase();
        assert!(word.contains("key"), "{heard}");
        let id = stranger.id().to_owned();
        let told = member.wait_for("refused", |event| event["node"] == id.as_str());
        assert!(told["reason"].as_str().is_some_and(|reason| reason.to_lowercase().contains("key")), "{told}");
        assert_eq!(member.state()["nodes"].as_array().map(Vec::len), Some(1), "it is no member");
    }
    assert_eq!(member.state()["refusals"].as_array().map(|list| !list.is_empty()), Some(true));
    let short = shoal().args(["up", "--key", "short", "--no-api"]).output().expect("runs");
    assert_eq!(short.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&short.stderr).contains("at least 16 characters"));
}

#[test]
fn what_is_in_use_is_said() {
    let root = tempfile::tempdir().expect("a folder");
    models_folder(root.path());
    let ready_file = root.path().join("ready.json");
    let mut command = directed(root.path(), "one", None, None);
    command.arg("--ready-file").arg(&ready_file);
    let mut node = NodeProcess::start(command);
    let ready: Value = serde_json::from_slice(&std::fs::read(&ready_file).expect("written")).expect("JSON");
    assert_eq!(ready, node.ready);

    let second = directed(root.path(), "one", None, None).output().expect("runs");
    let text = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(6), "{text}");
    assert!(text.contains("already runs in the data folder") && text.contains("--data-dir"), "{text}");

    let taken = shoal().args(["up", "--api", node.api(), "--data-dir"]).arg(root.path().join("two")).output().expect("runs");
    let text = String::from_utf8_lossy(&taken.stderr).into_owned();
    assert_eq!(taken.status.code(), Some(6), "{text}");
    assert!(text.contains(node.api()) && text.contains("--api"), "{text}");

    node.signal(Signal::INT);
    assert!(node.wait());
    let alone = shoal().args(["status", "--api", node.api()]).output().expect("runs");
    assert_eq!(alone.status.code(), Some(4));
    assert!(String::from_utf8_lossy(&alone.stderr).contains("shoal up"));
    // The folder is free again, and the node is the same one.
    let again = NodeProcess::start(directed(root.path(), "one", None, None));
    assert_eq!(again.id(), node.id());
}

#[test]
fn run_answers_with_a_node_of_its_own_or_one_that_is_there() {
    let root = tempfile::tempdir().expect("a folder");
    models_folder(root.path());
    let run = |api: &str| {
        let mut command = shoal();
        command.args(["run", "--json", "--temperature", "0", "--max-tokens", "6", "--api", api, "--models-dir"]);
        command.arg(root.path().join("models")).args([TINY, "Hello", "there"]);
        let output = command.output().expect("runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<Value>(&output.stdout).expect("JSON")
    };
    let own = run("127.0.0.1:1");
    assert!(own["tokens"].as_u64().is_some_and(|tokens| (1..=6).contains(&tokens)), "{own}");
    let node = NodeProcess::start(directed(root.path(), "one", None, None));
    let theirs = run(node.api());
    assert_eq!(own["token_ids"], theirs["token_ids"]);
    let unknown = shoal().args(["run", "no-such-model", "hi", "--api", node.api()]).output().expect("runs");
    assert_eq!(unknown.status.code(), Some(3), "{}", String::from_utf8_lossy(&unknown.stderr));
}

#[test]
fn a_demonstration_leaves_nothing_behind() {
    let root = tempfile::tempdir().expect("a folder");
    models_folder(root.path());
    let temporary = root.path().join("tmp");
    std::fs::create_dir_all(&temporary).expect("a folder");
    let demo = |extra: &[&str]| {
        let mut command = shoal();
        command.args(["demo", "--nodes", "2", "--model", TINY, "--max-tokens", "8", "--models-dir"]).arg(root.path().join("models"));
        command.args(extra).env("TMPDIR", &temporary);
        command
    };
    let output = demo(&["--json"]).output().expect("runs");
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{log}");
    assert!(!log.contains("ending at once"), "the nodes leave in good order: {log}");
    let told: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert!(told["tokens"].as_u64().is_some_and(|tokens| (1..=8).contains(&tokens)), "{told}");
    assert!(told["prefill_tok_s"].as_f64().is_some_and(|rate| rate > 0.0), "{told}");
    let stages = told["plan"]["stages"].as_array().expect("stages");
    assert_eq!(stages.len(), 2);
    assert!(stages.iter().all(|stage| stage["lease_bytes"].as_u64().is_some_and(|bytes| bytes > 0)), "{told}");
    let left = || std::fs::read_dir(&temporary).expect("is there").map(|entry| entry.expect("an entry").path()).collect::<Vec<_>>();
    assert_eq!(left(), Vec::<std::path::PathBuf>::new());

    // Interrupted in any phase, it tells its nodes to leave and waits for them.
    for (phase, code) in [("starting", 130), ("found each other", 130), ("serving until", 0)] {
        let mut interrupted = demo(&["--keep"]).stdout(std::process::Stdio::piped()).spawn().expect("runs");
        let lines = std::io::BufRead::lines(std::io::BufReader::new(interrupted.stdout.take().expect("piped")));
        let mut signalled = false;
        for line in lines.map_while(Result::ok) {
            if line.contains(phase) && !signalled {
                signalled = true;
                let pid = i32::try_from(interrupted.id()).ok().and_then(rustix::process::Pid::from_raw).expect("a process id");
                rustix::process::kill_process(pid, Signal::INT).expect("signalled");
            }
        }
        // Its output ended, and with it that of its nodes.
        assert_eq!(interrupted.wait().expect("ended").code(), Some(code), "{phase}");
        assert_eq!(left(), Vec::<std::path::PathBuf>::new(), "{phase}");
    }

    // Killed without warning in the middle, its nodes notice and clean up after themselves.
    let mut killed = demo(&["--keep"]).stdout(std::process::Stdio::piped()).spawn().expect("runs");
    let lines = std::io::BufRead::lines(std::io::BufReader::new(killed.stdout.take().expect("piped")));
    let mut pids = Vec::new();
    for line in lines.map_while(Result::ok) {
        if let Some(pid) = line.split_once("process ").and_then(|(_, rest)| rest.split(' ').next()).and_then(|pid| pid.parse::<i32>().ok())
        {
            pids.push(pid);
        }
        if line.contains("serving until") {
            break;
        }
    }
    assert_eq!(pids.len(), 2, "two processes are named");
    killed.kill().expect("killed");
    killed.wait().expect("ended");
    let runs = |pid: i32| rustix::process::Pid::from_raw(pid).is_some_and(|pid| rustix::process::test_kill_process(pid).is_ok());
    // As children of nobody they may stay in the table of processes until they are collected, but then they hold nothing.
    let zombie = |pid: i32| {
        std::fs::read_to_string(format!("/proc/{pid}/stat"))
            .is_ok_and(|stat| stat.rsplit(')').next().is_some_and(|rest| rest.trim().starts_with('Z')))
    };
    wait_until("the nodes end", || pids.iter().all(|pid| !runs(*pid) || zombie(*pid)));
    wait_until("their folders go", || left().is_empty());
}
