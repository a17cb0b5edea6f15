//! Nodes on hosts of their own, joined by cables that can be pulled: network namespaces stand for the hosts.
//!
//! What only a network between hosts shows is tested here: nodes that are told no address find each other, a model is
//! split between hosts, a host whose cable is pulled in mid-answer is missed by the others, which go on without it, and
//! it is one of them again when the cable is back; a host that has another cable is not missed. How long things took is printed; only bounds far above what they
//! should take are asserted.
//!
//! It takes Linux, root and the program `ip`. Where they lack, a line says so and the tests pass; with
//! `SHOAL_REQUIRE_NAMESPACES` set they fail instead.

#![cfg(target_os = "linux")]

#[path = "../common/mod.rs"]
mod common;
mod host;
mod lan;

use std::io::Write;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use host::{Door, Host, wait};
use lan::{Addresses, Lan};
use serde_json::Value;

const JOIN: Duration = Duration::from_secs(30);
const MISSED: Duration = Duration::from_secs(20);
const BACK: Duration = Duration::from_secs(60);
/// Tokens of an answer that is to be compared with others.
const SHORT: u32 = 32;
/// Tokens of an answer in the midst of which a cable is pulled: about all that the model's context takes.
const LONG: u32 = 440;
/// A pause of an answer that is longer than this is one in which a host was missed: links are silent for more than a second before that.
const NOTICED: Duration = Duration::from_millis(500);
/// How often it is tried to pull a cable before the answer is complete. A few tries are the rule.
const TRIES: usize = 20;

/// One network at a time: several would slow each other down, and it is told how long things take.
static TURN: Mutex<()> = Mutex::new(());

/// Tells something even if the test passes, when what tests print is not shown.
fn tell(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "namespaces: {text}");
}

/// Tells how long something took. With `SHOAL_ASSERT_TIMES` set, as on a machine that does nothing else, the target is asserted, too.
fn took(what: &str, found: Duration, target: Duration) {
    tell(&format!("{what}: {found:.2?} (target: {target:?})"));
    assert!(found <= target || std::env::var_os("SHOAL_ASSERT_TIMES").is_none(), "{what} took {found:.2?}, the target is {target:?}");
}

/// Nodes on one network know each other within this.
const JOIN_TARGET: Duration = Duration::from_secs(2);
/// A node whose cable is pulled is missed within this, and who waits for its words is told.
const GONE_TARGET: Duration = Duration::from_secs(3);

fn lay(tag: &str, hosts: &[&str], addresses: Addresses) -> Option<(Lan, MutexGuard<'static, ()>)> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    match Lan::lay(tag, hosts, addresses) {
        Ok(lan) => Some((lan, turn)),
        Err(reason) => {
            assert!(std::env::var_os("SHOAL_REQUIRE_NAMESPACES").is_none(), "no network of namespaces: {reason}");
            tell(&format!("skipped: {reason}"));
            None
        }
    }
}

fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path().to_owned();
    common::models_folder(&root);
    (folder, root)
}

/// Starts a node on each host and waits until all see all, and nobody else.
fn join(lan: &Lan, root: &std::path::Path, how: &str, hosts: &[(&str, Option<&str>)]) -> Vec<Host> {
    let started = Instant::now();
    joined(how, started, Host::start_all(lan, root, hosts))
}

/// Waits until all of these hosts, which were started a moment ago, see all, and nobody else.
fn joined(how: &str, started: Instant, hosts: Vec<Host>) -> Vec<Host> {
    let ready = started.elapsed();
    let doors: Vec<&Door> = hosts.iter().map(|host| &host.door).collect();
    let names: Vec<&str> = doors.iter().map(|door| door.name.as_str()).collect();
    let joined = wait("the hosts find each other", JOIN, &doors, |door| {
        let seen = door.sees();
        let all = seen.len() == names.len() && names.iter().all(|name| seen.get(*name).is_some_and(|state| state == "alive"));
        if all { Ok(()) } else { Err(format!("{} sees {seen:?}", door.name)) }
    });
    wait("the hosts know of each other's models", JOIN, &doors, |door| door.is_with(&names));
    let count = hosts.len();
    took(&format!("{how}: {count} hosts ready after {ready:.2?}, each sees all after"), joined - started, JOIN_TARGET);
    hosts
}

fn short_answers(doors: &[&Door], expected: &[u64]) {
    for door in doors {
        assert_eq!(door.answer(SHORT), expected, "the answer does not depend on who is asked, nor on where the layers are");
    }
}

/// Takes the model down wherever it is, and waits until all know.
fn take_down(doors: &[&Door]) {
    wait("the model is taken down", BACK, doors, |door| {
        let answer = door.unload();
        let instances = &door.state()["instances"];
        if instances.as_array().is_some_and(Vec::is_empty) { Ok(()) } else { Err(format!("{} knows {instances}: {answer}", door.name)) }
    });
}

/// Waits until all know of an instance that was placed a moment ago: cards are gossiped.
fn known(doors: &[&Door], instance: &Value) {
    wait("the instance is known", BACK, doors, |door| {
        let instances = door.instances();
        if instances == [id(&instance["id"])] { Ok(()) } else { Err(format!("{} knows {instances:?}", door.name)) }
    });
}

fn id(value: &Value) -> &str {
    value.as_str().expect("an id")
}

#[test]
fn hosts_find_each_other_split_a_model_and_get_over_a_pulled_cable() {
    let Some((lan, _turn)) = lay("open", &["alpha", "bravo", "charlie"], Addresses::V4(1)) else { return };
    let (_folder, root) = folder();
    let hosts = join(&lan, &root, "open", &[("alpha", None), ("bravo", None), ("charlie", None)]);
    let doors: Vec<&Door> = hosts.iter().map(|host| &host.door).collect();

    let instance = doors[0].load(3);
    let stages = instance["stages"].as_array().expect("stages");
    let mut holders: Vec<&str> = stages.iter().map(|stage| id(&stage["name"])).collect();
    holders.sort_unstable();
    assert_eq!(holders, ["alpha", "bravo", "charlie"]);
    let expected = doors[0].answer(SHORT);
    short_answers(&doors, &expected);
    let began = Instant::now();
    let whole = doors[1].answer(LONG);
    tell(&format!("{LONG} tokens of the tiny model over three hosts, asked of one of them: {:.2?}", began.elapsed()));

    for conducts in [false, true] {
        pull_and_plug_in(&lan, &doors, conducts, &expected, &whole);
    }
}

/// Pulls the cable of a host that holds a stage in the midst of an answer, and plugs it in again.
fn pull_and_plug_in(lan: &Lan, doors: &[&Door], conducts: bool, expected: &[u64], whole: &[u64]) {
    let names: Vec<&str> = doors.iter().map(|door| door.name.as_str()).collect();
    let what = if conducts { "the conductor's cable" } else { "the cable of a stage" };
    let mut tries = 0;
    let (victim, others) = loop {
        tries += 1;
        assert!(tries <= TRIES, "every answer was complete before the cable was out");
        take_down(doors);
        let conductor = id(&doors[0].load(3)["conductor"]).to_owned();
        let (victim, others): (Vec<&Door>, Vec<&Door>) = match conducts {
            true => doors.iter().partition(|door| door.id == conductor),
            false => {
                let chosen = doors.iter().find(|door| door.id != conductor).expect("three hosts");
                doors.iter().partition(|door| door.id == chosen.id)
            }
        };
        let victim = victim[0];
        // An answer takes some tenths of a second: it is tried at other moments until it is in its midst.
        let after = Duration::from_millis(20 + 35 * (tries as u64 - 1) % 200);
        if pull_through(lan, what, victim, &others, whole, after) {
            break (victim, others);
        }
        lan.plug_in(&victim.name);
        wait("the hosts are together again", BACK, doors, |door| door.is_with(&names));
    };

    let left: Vec<&str> = others.iter().map(|door| door.name.as_str()).collect();
    let began = Instant::now();
    assert_eq!(others[0].answer(SHORT), expected, "the two that are left give the same answer");
    tell(&format!("{what}: the two that are left answer the next question in {:.2?}", began.elapsed()));
    let alone = |door: &Door| match door.sees().iter().find(|(name, state)| left.contains(&name.as_str()) && *state != "dead") {
        None => Ok(()),
        Some(other) => Err(format!("{} thinks of {other:?}", door.name)),
    };
    wait("the one whose cable was pulled misses the others", MISSED, &[victim], alone);

    // Split between both, the model needs both to go on undisturbed when the third comes back.
    take_down(&others);
    let instance = id(&others[1].load(2)["id"]).to_owned();
    short_answers(&others, expected);
    let plugged = Instant::now();
    lan.plug_in(&victim.name);
    let back = wait("the hosts are together again", BACK, doors, |door| door.is_with(&names));
    tell(&format!("{what}: all see all {:.2?} after it was plugged in", back - plugged));
    short_answers(doors, expected);
    // Whoever comes back does not disturb those who were there, and what it went on with alone yields.
    wait("there is one instance again", BACK, &others, |door| {
        // Whoever is starved of time may miss another for a moment, and with it what that one conducts: it has to be the same in the end.
        if door.instances() == [instance.as_str()] { Ok(()) } else { Err(format!("{} knows {}", door.name, door.state()["instances"])) }
    });
}

/// What came of an answer in the midst of which a cable was pulled.
struct Pulled {
    answer: common::Streamed,
    /// The longest that nothing came.
    pause: Duration,
    /// From the pull until all others knew that the host is gone.
    missed: Duration,
}

/// Asks for a long answer and pulls a cable so long after.
fn pull(lan: &Lan, victim: &Door, others: &[&Door], after: Duration) -> Pulled {
    let mut cable = lan.hand_on(&victim.name);
    let missed = |door: &Door| match door.sees().get(&victim.name).map(String::as_str) {
        None | Some("dead") => Ok(()),
        Some(state) => Err(format!("{} thinks that {} is {state}", door.name, victim.name)),
    };
    std::thread::scope(|scope| {
        let hand = scope.spawn(move || {
            std::thread::sleep(after);
            cable.pull();
            let pulled = Instant::now();
            wait("the others miss it", MISSED, others, missed) - pulled
        });
        let (mut last, mut pause) = (Instant::now(), Duration::ZERO);
        let answer = others[0].ask(LONG, |_| {
            pause = pause.max(last.elapsed());
            last = Instant::now();
        });
        Pulled { answer, pause, missed: hand.join().expect("it is missed") }
    })
}

/// A host that holds a stage, and perhaps conducts, loses its cable, and the answer goes on. False if it was complete before.
fn pull_through(lan: &Lan, what: &str, victim: &Door, others: &[&Door], whole: &[u64], after: Duration) -> bool {
    let Pulled { answer, pause, missed } = pull(lan, victim, others, after);
    assert!(answer.done && answer.error.is_none(), "the answer broke off: {answer:?}");
    assert_eq!(answer.token_ids, whole, "nothing is lost, said twice or said otherwise");
    if pause < NOTICED {
        return false;
    }
    wait("it goes on without that host", MISSED, others, |door| {
        let state = door.state();
        let stages = state["instances"][0]["stages"].as_array().cloned().unwrap_or_default();
        let without = !stages.is_empty() && stages.iter().all(|stage| id(&stage["node"]) != victim.id);
        if without { Ok(()) } else { Err(format!("{} knows {}", door.name, state["instances"])) }
    });
    tell(&format!("{what}: pulled {after:?} after the question, the answer of {LONG} tokens went on after a pause of {pause:.2?}"));
    took(&format!("{what}: both others know after"), missed, GONE_TARGET);
    true
}

#[test]
fn a_private_cluster_keeps_hosts_without_its_key_out() {
    let names = ["alpha", "bravo", "charlie", "wrong", "keyless"];
    let Some((lan, _turn)) = lay("key", &names, Addresses::V4(2)) else { return };
    let (_folder, root) = folder();
    let new_key = || {
        let key = common::shoal().args(["key", "new"]).output().expect("runs");
        assert!(key.status.success());
        String::from_utf8(key.stdout).expect("text").trim().to_owned()
    };
    let (key, other_key) = (new_key(), new_key());
    assert_ne!(key, other_key);
    let strangers = [("wrong", Some(other_key.as_str())), ("keyless", None)];
    let mut outside = Host::start_all(&lan, &root, &strangers);
    let key = Some(key.as_str());
    let mut inside = join(&lan, &root, "private", &[("alpha", key), ("bravo", key), ("charlie", key)]);

    let began = Instant::now();
    for stranger in &mut outside {
        // Each side says whom it does not talk to, and why.
        for member in &mut inside {
            let refused = member.node.wait_for("refused", |event| event["node"] == stranger.door.id.as_str());
            assert!(refused["reason"].as_str().is_some_and(|reason| reason.contains("key")), "{refused}");
            let refused = stranger.node.wait_for("refused", |event| event["node"] == member.door.id.as_str());
            assert!(refused["reason"].as_str().is_some_and(|reason| reason.contains("key")), "{refused}");
            if member.door.name == "alpha" {
                tell(&format!("{} says: {}", stranger.door.name, refused["reason"]));
            }
        }
    }
    tell(&format!("private: all refusals were told within {:.2?} after the join", began.elapsed()));

    // That lasts: nobody slips in later.
    std::thread::sleep(Duration::from_secs(3));
    for member in &inside {
        member.door.is_with(&["alpha", "bravo", "charlie"]).unwrap();
        assert_eq!(member.door.sees().len(), 3, "{:?}", member.door.sees());
    }
    for stranger in &outside {
        stranger.door.is_with(&[&stranger.door.name]).unwrap();
        assert_eq!(stranger.door.sees().len(), 1, "{:?}", stranger.door.sees());
    }
    inside[0].door.load(3);
    let doors: Vec<&Door> = inside.iter().map(|host| &host.door).collect();
    let expected = doors[0].answer(SHORT);
    short_answers(&doors, &expected);
}

/// Two laptops and a cable, and nobody who hands out addresses.
#[test]
fn hosts_with_nothing_but_link_local_addresses_work_together() {
    let Some((lan, _turn)) = lay("link", &["alpha", "bravo"], Addresses::LinkLocal) else { return };
    let (_folder, root) = folder();
    let hosts = join(&lan, &root, "link-local", &[("alpha", None), ("bravo", None)]);
    hosts[0].door.load(2);
    assert_eq!(hosts[0].door.answer(SHORT), hosts[1].door.answer(SHORT));
}

/// A container bridge has an address like those of the local network, but one that leads nowhere from other hosts.
#[test]
fn a_container_bridge_misleads_nobody() {
    let Some((lan, _turn)) = lay("home", &["alpha", "bravo", "charlie"], Addresses::Home) else { return };
    for host in ["alpha", "bravo"] {
        lan.run_a_container(host).expect("a bridge as the other one");
    }
    let (_folder, root) = folder();
    let hosts = join(&lan, &root, "with container bridges", &[("alpha", None), ("bravo", None), ("charlie", None)]);
    let doors: Vec<&Door> = hosts.iter().map(|host| &host.door).collect();
    let began = Instant::now();
    doors[2].load(3);
    tell(&format!("with container bridges: placed on three hosts in {:.2?}", began.elapsed()));
    let expected = doors[0].answer(SHORT);
    short_answers(&doors, &expected);
}

/// Hosts with two cables. One is pulled in mid-answer, then the other one: whatever is on it, activations or what nodes have to say to
/// each other, goes on by the one that is left, and nobody is missed.
#[test]
fn a_pulled_cable_is_little_where_there_is_another_one() {
    let names = ["alpha", "bravo"];
    let Some((lan, _turn)) = lay("two", &names, Addresses::Two(3)) else { return };
    let (_folder, root) = folder();
    let hosts = join(&lan, &root, "with two cables", &[("alpha", None), ("bravo", None)]);
    let doors: Vec<&Door> = hosts.iter().map(|host| &host.door).collect();
    let placed = doors[0].load(2);
    known(&doors, &placed);
    let whole = doors[0].answer(LONG);
    let mut noticed = false;
    for tries in 0..TRIES {
        let (cable, victim, other) = (tries % 2, doors[tries / 2 % 2], doors[(tries / 2 + 1) % 2]);
        // Both ends know where the other one is by the cable that stays.
        let pause = pull_one_of_two(&lan, cable, victim, other, &whole, Duration::from_millis(20 + 35 * tries as u64 % 200));
        tell(&format!("two cables: without number {} of {} the longest pause was {pause:.2?}", cable + 1, victim.name));
        noticed |= pause >= NOTICED;
        let instance = &other.state()["instances"][0];
        assert!(placed["term"].is_u64() && placed["id"].is_string(), "{placed}");
        assert_eq!((&instance["id"], &instance["term"]), (&placed["id"], &placed["term"]), "nobody took the model over");
        assert_eq!(instance["stages"].as_array().map(Vec::len), Some(2), "{instance}");
        // What carries activations now is the cable that is left.
        let pulled = ["10.77.", "10.76."][cable];
        for door in &doors {
            let hops = door.state()["hops"].as_array().cloned().expect("hops");
            let far: Vec<&str> = hops.iter().filter(|hop| hop["provider"] == "tcp").filter_map(|hop| hop["peer"].as_str()).collect();
            assert!(far.iter().all(|peer| !peer.starts_with(pulled)), "{} sends to {far:?}", door.name);
        }
        short_answers(&doors, &whole[..SHORT as usize]);
        lan.plug_in_nth(&victim.name, cable);
        // The links go back to a cable when it has been seen to be well.
        std::thread::sleep(Duration::from_secs(2));
        if noticed && tries >= 3 {
            return;
        }
    }
    panic!("no cable that was pulled was in use");
}

/// Pulls one of a host's cables in the midst of an answer, and looks on for a while. Gives the longest pause of the answer.
fn pull_one_of_two(lan: &Lan, cable: usize, victim: &Door, other: &Door, whole: &[u64], after: Duration) -> Duration {
    let mut hand = lan.hand_on_nth(&victim.name, cable);
    std::thread::scope(|scope| {
        let watching = scope.spawn(move || {
            std::thread::sleep(after);
            hand.pull();
            let until = Instant::now() + Duration::from_secs(3);
            while Instant::now() < until {
                let (seen, state) = (other.sees(), other.state());
                assert!(seen.get(&victim.name).is_some_and(|state| state != "dead"), "{} sees {seen:?}", other.name);
                assert_eq!(state["instances"][0]["state"], "ready", "{} knows {}", other.name, state["instances"]);
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let (mut last, mut pause) = (Instant::now(), Duration::ZERO);
        let answer = other.ask(LONG, |_| {
            pause = pause.max(last.elapsed());
            last = Instant::now();
        });
        assert!(answer.done && answer.error.is_none(), "{answer:?}");
        assert_eq!(answer.token_ids, whole, "a pulled cable changes no token");
        watching.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        pause
    })
}

/// Alpha and charlie can talk, and activations cannot go from alpha to charlie: those are taken only at an address that alpha does
/// not reach. Bravo reaches both, holds nothing of the model, and passes them on.
#[test]
fn a_host_between_two_others_passes_activations_on() {
    let Some((lan, _turn)) = lay("round", &["alpha", "bravo", "charlie"], Addresses::Two(4)) else { return };
    let (_folder, root) = folder();
    let mut second = lan.hand_on_nth("alpha", 1);
    second.pull();
    let started = Instant::now();
    let at = |name: &str, addresses: &[&str], memory: u64| {
        Host::start_with(&lan, common::up_lending(&root, name, memory), name, |command| {
            for address in addresses {
                command.args(["--tensor-listen", address]);
            }
        })
    };
    let hosts = vec![
        at("alpha", &["10.77.4.1:0"], 2_600_000),
        at("bravo", &["10.77.4.2:0", "10.76.4.2:0"], 1_000_000),
        at("charlie", &["10.76.4.3:0"], 2_600_000),
    ];
    let hosts = joined("with one who passes on", started, hosts);
    let doors: Vec<Door> = hosts.iter().map(|host| host.door.clone()).collect();
    let instance = doors[0].load(2);
    let mut holders: Vec<&str> = instance["stages"].as_array().expect("stages").iter().map(|stage| id(&stage["name"])).collect();
    holders.sort_unstable();
    assert_eq!(holders, ["alpha", "charlie"]);
    let answers = [&doors[0], &doors[2]].map(|door| door.answer(LONG));
    assert_eq!(answers[0], answers[1]);
    let hops = doors[0].state()["hops"].as_array().cloned().expect("hops");
    let over: Vec<&str> = hops.iter().filter(|hop| hop["to"] == doors[2].id.as_str()).filter_map(|hop| hop["peer"].as_str()).collect();
    assert!(over.iter().all(|peer| peer.starts_with("10.77.4.2:")), "they go over bravo: {hops:?}");
    // Ids are drawn at random, and with them the order of the stages and who conducts.
    let first = &instance["stages"][0]["name"];
    let leads = first == "alpha" || instance["conductor"] != doors[1].id.as_str();
    tell(&format!("with one who passes on: alpha {} to charlie", if leads { "sends" } else { "does not have to send" }));
    assert_eq!(over.is_empty(), !leads, "{instance} {hops:?}");
}
