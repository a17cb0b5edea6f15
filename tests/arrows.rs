//! The dependency arrows between the workspace's crates are those of docs/architecture.md, and no others.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

fn arrows() -> BTreeMap<String, BTreeSet<String>> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let packages = metadata["packages"].as_array().expect("a list of packages");
    let name = |value: &serde_json::Value| value["name"].as_str().expect("a name").to_owned();
    let members: BTreeSet<String> = packages.iter().map(name).collect();
    packages
        .iter()
        .map(|package| {
            let needs = package["dependencies"].as_array().expect("a list of dependencies");
            (name(package), needs.iter().map(name).filter(|need| members.contains(need)).collect())
        })
        .collect()
}

#[test]
fn arrows_point_one_way() {
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<String>>();
    let allowed = BTreeMap::from([
        ("shoal".to_owned(), set(&["shoal-actors"])),
        ("shoal-actors".to_owned(), set(&["shoal-engine", "shoal-transport"])),
        ("shoal-simulations".to_owned(), set(&["shoal-actors"])),
        ("shoal-engine".to_owned(), set(&[])),
        ("shoal-transport".to_owned(), set(&[])),
    ]);
    assert_eq!(arrows(), allowed);
}
