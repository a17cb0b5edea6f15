//! `shoal bench link`: between two processes that it starts, and between two nodes.

mod common;

use std::process::Command;

use common::{NodeProcess, shoal, up, wait_until_joined};
use serde_json::Value;

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
