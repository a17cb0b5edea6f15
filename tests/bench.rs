//! `shoal bench link`: between two processes that it starts, and between two nodes; `shoal bench serve`: with a node that it starts.

mod common;

use std::process::Command;

use common::{NodeProcess, TINY, shoal, up, wait_until_joined};
use serde_json::{Value, json};

/// What `--json` prints, after the program has ended well.
fn json(command: &mut Command) -> Value {
    let output = command.output().expect("runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// Asserts that there is a row for each provider and size, in order, and that each figure is one.
fn look(value: &Value, providers: &[&str], sizes: &[u64]) {
    let rows = value["rows"].as_array().expect("rows");
    let found: Vec<(&str, u64)> =
        rows.iter().map(|row| (row["provider"].as_str().expect("a name"), row["bytes"].as_u64().expect("a length"))).collect();
    let expected: Vec<(&str, u64)> = providers.iter().flat_map(|provider| sizes.iter().map(|bytes| (*provider, *bytes))).collect();
    assert_eq!(found, expected, "{value}");
    for row in rows {
        let figure = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("{name} in {row}"));
        assert!(figure("rtt_us_p50") > 0.0 && figure("rtt_us_p99") >= figure("rtt_us_p50") && figure("gib_per_s") > 0.0, "{row}");
    }
}

const PROVIDERS: &[&str] = if cfg!(target_os = "linux") { &["shm", "tcp"] } else { &["tcp"] };

#[test]
fn two_processes_of_this_machine_are_measured() {
    let folder = tempfile::tempdir().expect("a folder");
    let drawing = folder.path().join("links.svg");
    let mut command = shoal();
    command.args(["bench", "link", "--local", "--json", "--sizes", "64,5000", "--ms", "2", "--svg"]).arg(&drawing);
    look(&json(&mut command), PROVIDERS, &[64, 5000]);
    let drawing = std::fs::read_to_string(&drawing).expect("a drawing");
    assert!(drawing.starts_with("<svg") && drawing.matches("<polyline").count() == 3 * PROVIDERS.len(), "{drawing}");

    let table = shoal().args(["bench", "link", "--local", "--sizes", "1024", "--ms", "1"]).output().expect("runs");
    let text = String::from_utf8(table.stdout).expect("text");
    assert!(table.status.success() && text.contains("1 KiB") && PROVIDERS.iter().all(|name| text.contains(name)), "{text}");

    for wrong in [&["bench", "link"][..], &["bench", "link", "--local", "peer"], &["bench", "link", "--local", "--sizes", "0"]] {
        let output = shoal().args(wrong).output().expect("runs");
        assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn links_between_two_nodes_are_measured() {
    let root = tempfile::tempdir().expect("a folder");
    common::models_folder(root.path());
    let key = String::from_utf8(shoal().args(["key", "new"]).output().expect("runs").stdout).expect("text");
    let start = |name: &str, peer: Option<&NodeProcess>| {
        let mut command = up(root.path(), name);
        command.args(["--no-mdns", "--no-beacon", "--listen", "127.0.0.1:0", "--tensor-listen", "127.0.0.1:0"]);
        command.env("SHOAL_KEY", key.trim());
        if let Some(peer) = peer {
            command.arg("--peer").arg(peer.peer_address());
        }
        NodeProcess::start(command)
    };
    let one = start("one", None);
    let two = start("two", Some(&one));
    wait_until_joined(&[&one, &two]);
    let bench = |peer: &str| {
        let mut command = shoal();
        command.args(["bench", "link", peer, "--json", "--sizes", "64,5000", "--ms", "2", "--api", one.api()]);
        command
    };
    look(&json(&mut bench("two")), PROVIDERS, &[64, 5000]);
    look(&json(&mut bench(&two.id()[..12])), PROVIDERS, &[64, 5000]);
    // To itself there is memory.
    look(&json(&mut bench("one")), &["memory"], &[64, 5000]);
    let nobody = bench("three").output().expect("runs");
    assert_eq!(nobody.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&nobody.stderr).contains("`three`"), "{}", String::from_utf8_lossy(&nobody.stderr));
    let (status, refused) = common::post(one.api(), "/v1/shoal/bench/link", &serde_json::json!({"peer": "two", "sizes": [0]}));
    assert_eq!((status, &refused["error"]["param"]), (400, &Value::from("sizes")), "{refused}");
}

#[test]
fn a_node_of_its_own_serves_several_streams() {
    let root = tempfile::tempdir().expect("a folder");
    let models = common::models_folder(root.path());
    let bench = |arguments: &[&str]| {
        let mut command = shoal();
        command.args(["bench", "serve", "--model", TINY, "--max-tokens", "6", "--json", "--models-dir"]).arg(&models).args(arguments);
        command
    };
    let value = self::json(&mut bench(&["--streams", "1,3", "--prompt-tokens", "40", "--long-prompt", "200", "--repeat", "1"]));
    let loads = value["loads"].as_array().expect("loads");
    assert_eq!(loads.iter().map(|load| load["streams"].as_u64()).collect::<Vec<_>>(), [Some(1), Some(3)]);
    for load in loads {
        let figure = |pointer: &str| load.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("{pointer} in {load}"));
        assert_eq!(load["first_token_ms"]["count"], load["streams"]);
        assert!(figure("/tok_s") > 0.0 && figure("/of_single") > 0.0 && figure("/stream_tok_s") > 0.0, "{load}");
        assert!(figure("/first_token_ms/p50") > 0.0 && figure("/first_token_ms/p95") >= figure("/first_token_ms/p50"), "{load}");
    }
    assert_eq!(loads[0]["of_single"], json!(1.0));
    let gap = &value["decode_gap"];
    assert_eq!((&gap["prompt_tokens"], &gap["streams"]), (&json!(200), &json!(3)));
    assert!(gap["alone_ms"]["count"].as_u64() >= Some(3 * 40) && gap["alone_ms"]["max"].as_f64() > Some(0.0), "{gap}");
    // The context has 512 tokens.
    let output = bench(&["--prompt-tokens", "600"]).output().expect("runs");
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_prompt_that_begins_like_an_earlier_one_says_so() {
    let root = tempfile::tempdir().expect("a folder");
    common::models_folder(root.path());
    let mut command = up(root.path(), "alone");
    command.args(["--no-mdns", "--no-beacon", "--listen", "127.0.0.1:0", "--tensor-listen", "127.0.0.1:0"]);
    let node = NodeProcess::start(command);
    let ask = |prompt: Vec<u32>| {
        let body =
            json!({"model": TINY, "prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": true, "return_token_ids": true});
        let (status, answer) = common::post(node.api(), "/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["timings"]["cached_tokens"]);
        (answer["timings"]["cached_tokens"].as_u64().expect("a count"), answer["choices"][0]["token_ids"].clone())
    };
    let long: Vec<u32> = (0..100).map(|i| 64 + i * i % 200).collect();
    let (first, said) = ask(long.clone());
    // Pages of 32 tokens; the same prompt has three full ones.
    let (again, said_again) = ask(long.clone());
    assert_eq!((first, again), (0, 96));
    assert_eq!(said, said_again);
    assert_eq!(ask([&long[..40], &[70; 30]].concat()).0, 32);
}
