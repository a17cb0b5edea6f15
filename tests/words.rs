//! What people are told: who is there, what does not work, and why something was not done.

mod common;

use std::net::{TcpListener, UdpSocket};
use std::path::Path;
use std::process::{Command, Output};

use common::{NodeProcess, TINY, models_folder, post, shoal, tiny_file, up, up_with, wait_until, wait_until_joined};
use serde_json::{Value, json};

/// A node that only goes where it is told.
fn directed(root: &Path, name: &str, peer: Option<&str>) -> Command {
    let mut command = up(root, name);
    command.args(["--no-mdns", "--no-beacon", "--tensor-listen", "127.0.0.1:0"]);
    if let Some(peer) = peer {
        command.args(["--peer", peer]);
    }
    command
}

/// The same on the loopback interface.
fn local(root: &Path, name: &str, peer: Option<&NodeProcess>) -> Command {
    let mut command = directed(root, name, peer.map(NodeProcess::peer_address).as_deref());
    command.args(["--listen", "127.0.0.1:0"]);
    command
}

fn run(command: &mut Command) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = command.output().expect("runs");
    (status.code(), String::from_utf8_lossy(&stderr).into_owned())
}

/// A port of the loopback interface that nobody has at the moment.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").port()
}

#[test]
fn a_node_says_who_was_there_before_it_once() {
    let root = tempfile::tempdir().expect("a folder");
    models_folder(root.path());
    let mut first = NodeProcess::start(local(root.path(), "first", None));
    let mut second = NodeProcess::start(local(root.path(), "second", Some(&first)));
    let (one, two) = (first.id().to_owned(), second.id().to_owned());
    let told = second.wait_for("joined", |event| event["node"] == one.as_str());
    assert_eq!(told["name"], "first");
    first.wait_for("joined", |event| event["node"] == two.as_str());
    second.signal(rustix::process::Signal::TERM);
    let heard = second.wait_for_end();
    let joined = heard.iter().filter(|event| event["event"] == "joined" && event["node"] == one.as_str());
    assert_eq!(joined.count(), 1, "{heard:?}");
}

#[test]
fn a_given_peer_that_does_not_answer_is_a_trouble_until_it_does() {
    let root = tempfile::tempdir().expect("a folder");
    models_folder(root.path());
    let address = format!("127.0.0.1:{}", free_port());
    let mut command = directed(root.path(), "one", Some(&address));
    command.args(["--listen", "127.0.0.1:0"]);
    let mut node = NodeProcess::start(command);
    let about = format!("peer {address}");
    let told = node.wait_for("trouble", |event| event["about"] == about.as_str());
    assert!(told["what"].as_str().is_some_and(|what| what.contains("no node answers")), "{told}");
    assert!(told["help"].as_str().is_some_and(|help| help.contains("check")), "{told}");
    let state = node.state();
    assert_eq!(state["troubles"][0]["about"], about.as_str(), "{state}");
    let (_, text) = {
        let output = shoal().args(["status", "--api", node.api()]).output().expect("runs");
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    assert!(text.contains(&about) && text.contains("no node answers"), "{text}");

    let mut command = directed(root.path(), "two", None);
    command.args(["--listen", &address]);
    let _other = NodeProcess::start(command);
    node.wait_for("trouble_over", |event| event["about"] == about.as_str());
    assert_eq!(node.state()["troubles"], json!([]));
    node.signal(rustix::process::Signal::TERM);
    let heard = node.wait_for_end();
    assert_eq!(heard.iter().filter(|event| event["event"] == "trouble").count(), 1, "once, however often it is tried: {heard:?}");
}

#[test]
fn a_file_that_is_no_model_is_said_to_be_none() {
    let root = tempfile::tempdir().expect("a folder");
    models_folder(root.path());
    let node = NodeProcess::start(local(root.path(), "one", None));
    let bad = root.path().join("bad.gguf");
    std::fs::write(&bad, b"nothing that a model begins with").expect("written");
    for path in ["/v1/shoal/load", "/v1/shoal/plan"] {
        let (status, body) = post(node.api(), path, &json!({"model": bad}));
        assert_eq!((status, &body["error"]["code"]), (400, &json!("invalid_model")), "{body}");
        let message = body["error"]["message"].as_str().expect("words");
        assert!(message.contains("no usable GGUF file") && !message.contains("shoal pull"), "{message}");
    }
    let (status, body) = post(node.api(), "/v1/chat/completions", &json!({"model": bad, "messages": [{"role": "user", "content": "hi"}]}));
    assert_eq!((status, &body["error"]["code"]), (400, &json!("invalid_model")), "{body}");
    for command in ["load", "plan", "run"] {
        let mut asked = shoal();
        asked.args([command, "./bad.gguf", "--api", node.api()]).current_dir(root.path());
        if command == "run" {
            asked.arg("hi");
        }
        let (code, text) = run(&mut asked);
        assert!(code == Some(1) && text.contains("no usable GGUF file"), "{command}: {code:?} {text}");
    }
    let (code, text) = run(shoal().args(["load", "./none.gguf", "--api", node.api()]).current_dir(root.path()));
    assert!(code == Some(3) && text.contains("none.gguf") && !text.contains("shoal pull"), "{code:?} {text}");
    // One that is fine is placed by its path, wherever it lies.
    let elsewhere = root.path().join("fine.gguf");
    std::fs::copy(tiny_file(), &elsewhere).expect("copied");
    let (code, text) = run(shoal().args(["load", "./fine.gguf", "--context", "128", "--api", node.api()]).current_dir(root.path()));
    assert_eq!(code, Some(0), "{text}");
}

#[test]
fn addresses_in_use_are_said_once_and_have_their_exit_code() {
    let root = tempfile::tempdir().expect("a folder");
    models_folder(root.path());
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    for (option, word) in [("--listen", "cannot listen at"), ("--tensor-listen", "cannot listen for tensor links at")] {
        let mut command = up(root.path(), "one");
        command.args(["--no-mdns", "--no-beacon", option, address.as_str()]);
        let (code, text) = run(&mut command);
        assert_eq!(code, Some(6), "{option}: {text}");
        assert!(text.matches(word).count() == 1 && text.contains(&address) && !text.contains("did not start"), "{text}");
    }
    drop(taken);
    // Datagrams are another matter: the same number is free for connections.
    let datagrams = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let mut command = directed(root.path(), "one", None);
    command.args(["--listen", &datagrams.local_addr().expect("an address").to_string()]);
    drop(NodeProcess::start(command));
}

#[test]
fn a_model_that_was_just_taken_down_is_placed_anew() {
    let root = tempfile::tempdir().expect("a folder");
    models_folder(root.path());
    let first = NodeProcess::start(local(root.path(), "n1", None));
    let second = NodeProcess::start(local(root.path(), "n2", Some(&first)));
    let nodes = [&first, &second];
    wait_until_joined(&nodes);
    let goal = json!({"model": TINY, "context_tokens": 128, "nodes_max": 1});
    let mut seen: Vec<Value> = Vec::new();
    // Each load follows an unload at once, at a node whose cards may still name the instance that is gone.
    let mut at = nodes[0];
    for _ in 0..8 {
        let (status, placed) = post(at.api(), "/v1/shoal/load", &goal);
        assert_eq!(status, 200, "{placed}");
        let id = placed["id"].clone();
        assert!(!seen.contains(&id), "instance {id} was taken down before");
        for node in nodes {
            wait_until("the instance is known", || {
                node.state()["instances"].as_array().is_some_and(|all| all.iter().any(|instance| instance["id"] == id))
            });
        }
        let conductor = |node: &&&NodeProcess| node.id() == placed["conductor"];
        let by = nodes.iter().find(conductor).expect("one of them");
        let (status, gone) = post(by.api(), "/v1/shoal/unload", &json!({"instance": id}));
        assert_eq!(status, 200, "{gone}");
        seen.push(id);
        at = nodes.iter().find(|node| !conductor(node)).expect("one of them");
    }
}

#[test]
fn bad_input_ends_with_its_exit_code() {
    let root = tempfile::tempdir().expect("a folder");
    models_folder(root.path());
    let folder = root.path().join("data");
    let too_much =
        shoal().args(["up", "--memory", "900TB", "--api", "127.0.0.1:0", "--no-mdns", "--no-beacon", "--data-dir"]).arg(&folder).output();
    let text = String::from_utf8_lossy(&too_much.as_ref().expect("runs").stderr).into_owned();
    assert_eq!(too_much.expect("runs").status.code(), Some(2), "{text}");
    assert!(text.contains("900 TB") && text.contains("this machine has") && text.contains("--memory"), "{text}");
    let id = "ab".repeat(32);
    for arguments in [
        &["run", "m", "hi", "--temperature", "5"][..],
        &["run", "m", "hi", "--temperature", "NaN"],
        &["run", "m", "hi", "--temperature=-1"],
        &["run", "m", "hi", "--max-tokens", "0"],
        &["demo", "--temperature", "2.5"],
        &["demo", "--max-tokens", "0"],
        &["load", "m", "--context", "0"],
        &["load", "m", "--sequences", "0"],
        &["plan", "m", "--nodes-min", "0"],
        &["plan", "m", "--nodes-max", "0"],
        &["plan", "m", "--nodes-min", "3", "--nodes-max", "2"],
        &["plan", "m", "--pin", "xyz"],
        &["load", "m", "--exclude", "xyz"],
        &["load", "m", "--pin", &id, "--exclude", &id],
    ] {
        let (code, text) = run(shoal().args(arguments));
        assert_eq!(code, Some(2), "{arguments:?}: {text}");
    }
}

#[test]
fn other_nodes_that_lack_the_file_are_counted() {
    let root = tempfile::tempdir().expect("a folder");
    models_folder(root.path());
    let having = NodeProcess::start(local(root.path(), "having", None));
    let empty = root.path().join("empty");
    let mut command = up_with(root.path(), "lacking", &empty);
    command.args(["--no-mdns", "--no-beacon", "--listen", "127.0.0.1:0", "--tensor-listen", "127.0.0.1:0"]);
    command.args(["--peer", &having.peer_address()]);
    let lacking = NodeProcess::start(command);
    wait_until("they see each other", || {
        having.state()["nodes"]
            .as_array()
            .is_some_and(|nodes| nodes.iter().any(|node| node["id"] == lacking.id() && node["connected"] == true))
    });
    wait_until("the model is in the card", || {
        lacking.state()["nodes"].as_array().is_some_and(|nodes| nodes.iter().any(|node| node["models"][0]["name"] == TINY))
    });
    let (code, text) = run(shoal().args(["load", TINY, "--nodes-min", "2", "--api", having.api()]));
    assert_eq!(code, Some(5), "{text}");
    assert!(text.contains("1 more is there but does not have the model on disk: pull the model there"), "{text}");

    // Who lends what to whom: every node says so itself.
    let (status, placed) = post(having.api(), "/v1/shoal/load", &json!({"model": TINY, "context_tokens": 128}));
    assert_eq!(status, 200, "{placed}");
    let pool = shoal().args(["pool", "--json", "--api", lacking.api()]).output().expect("runs");
    let pool: Value = serde_json::from_slice(&pool.stdout).expect("one JSON object");
    let used: Vec<(&str, u64)> = pool["nodes"]
        .as_array()
        .expect("nodes")
        .iter()
        .map(|node| (node["name"].as_str().expect("a name"), node["lent"]["used_bytes"].as_u64().expect("a sum")))
        .collect();
    let lent = placed["stages"][0]["lease_bytes"].as_u64().expect("bytes");
    assert!(used.contains(&("having", lent)) && used.contains(&("lacking", 0)), "{pool}");
    assert_eq!((pool["used_bytes"].as_u64(), pool["offered_bytes"].as_u64()), (Some(lent), Some(2 * (256 << 20))), "{pool}");
    let shown = shoal().args(["pool", "--api", lacking.api()]).output().expect("runs");
    let text = String::from_utf8_lossy(&shown.stdout);
    assert!(shown.status.success() && text.contains(" lends 0 B of 268 MB") && text.contains("instance"), "{text}");

    // What is fetched for a node has to come into its folder.
    let elsewhere = root.path().join("elsewhere");
    let (code, text) = run(shoal().args(["run", "smollm2:135m", "hi", "--api", lacking.api(), "--models-dir"]).arg(&elsewhere));
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains(&empty.display().to_string()) && text.contains(&elsewhere.display().to_string()), "{text}");
    assert!(!elsewhere.exists(), "nothing was begun");
    assert_eq!(lacking.state()["models_folder"], json!(empty));
}

#[test]
fn a_model_that_any_node_of_the_machine_needs_is_not_removed() {
    let root = tempfile::tempdir().expect("a folder");
    let models = models_folder(root.path());
    let node = NodeProcess::start(local(root.path(), "one", None));
    let (status, placed) = post(node.api(), "/v1/shoal/load", &json!({"model": TINY, "context_tokens": 128}));
    assert_eq!(status, 200, "{placed}");
    // Asked of no node, or of another one than that which needs it.
    let remove = || run(shoal().args(["rm", TINY, "--api", "127.0.0.1:1", "--models-dir"]).arg(&models));
    let (code, text) = remove();
    assert!(code == Some(1) && text.contains("in use"), "{code:?} {text}");
    let (status, gone) = post(node.api(), "/v1/shoal/unload", &json!({"model": TINY}));
    assert_eq!(status, 200, "{gone}");
    wait_until("nothing holds it", || node.state()["lent"]["used_bytes"] == 0);
    let (code, text) = remove();
    assert_eq!(code, Some(0), "{text}");
}
