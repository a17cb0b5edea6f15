//! Tests on two devices that carry what is sent, as the machine that `.ci/verbs` boots has them: soft-RoCE on both ends of a veth pair. The
//! variable `SHOAL_TEST_VERBS` holds their two addresses. These tests are ignored where nobody asks for them; where somebody does, a device
//! that is missing is a failure.

use std::net::IpAddr;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device::Gid;
use super::{InUse, Profile, VerbsOptions, VerbsProvider, ffi};
use crate::Effects;
use crate::channel::faults;
use crate::env::SystemRng;
use crate::link::{CloseReason, Link, LinkOptions, RecvError};
use crate::provider::{Endpoint, Provider, Ticket};
use crate::testing::{effects, soon};

const OPTIONS: LinkOptions = LinkOptions::for_payload(4 * 1024 * 1024);

pub(crate) fn addresses() -> [String; 2] {
    let both = std::env::var("SHOAL_TEST_VERBS").expect("the addresses of two verbs devices are in SHOAL_TEST_VERBS");
    let both: Vec<String> = both.split(' ').map(str::to_owned).collect();
    both.try_into().expect("two addresses")
}

/// The patience of an emulated machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A provider on the device with this address, whose links bear so much silence.
pub(crate) fn provider(effects: &Effects, profile: Profile, address: &str, silence_max: Duration) -> VerbsProvider {
    let listen = vec![format!("{address}:0").parse().unwrap()];
    let options = VerbsOptions { listen, silence_max, handshake_max: PATIENCE, ..VerbsOptions::of(profile) };
    VerbsProvider::new(effects.clone(), options).unwrap()
}

/// A provider on each of the two devices.
pub(crate) fn providers(effects: &Effects, profile: Profile) -> [VerbsProvider; 2] {
    addresses().map(|address| provider(effects, profile, &address, PATIENCE))
}

fn link(effects: &Effects, [near, far]: &[VerbsProvider; 2]) -> [Arc<dyn Link>; 2] {
    let ticket = Ticket::random(&SystemRng);
    let expected = far.expect(&ticket, OPTIONS).unwrap();
    let near = near.dial(&far.endpoints()[0], &ticket, OPTIONS, soon(effects)).unwrap();
    [near, expected.accept(soon(effects)).unwrap()]
}

#[test]
#[ignore = "needs devices: run by .ci/verbs"]
fn both_devices_are_there() {
    let devices = ffi::devices().unwrap();
    for address in addresses() {
        let gid = Gid::of(address.parse::<IpAddr>().unwrap());
        let found = devices.iter().filter_map(|device| device.port().ok()).find(|port| port.index_of(gid).is_some());
        let port = found.unwrap_or_else(|| panic!("no device has {address}: {devices:?}"));
        assert!(port.active && (1..=5).contains(&port.mtu), "{port:?}");
    }
}

#[test]
#[ignore = "needs devices: run by .ci/verbs"]
fn links_leave_nothing_on_the_devices() {
    let effects = effects();
    for profile in [Profile::Rc, Profile::Uc] {
        let both = providers(&effects, profile);
        let nothing = || both.iter().all(|one| one.in_use() == InUse::default());
        for _ in 0..10 {
            let ends = link(&effects, &both);
            assert_eq!(both[0].in_use(), InUse { pairs: 1, completion_queues: 1, registrations: 1 });
            ends[0].send(&[&[7; 100_000]], soon(&effects)).unwrap();
            assert_eq!(ends[1].recv(&mut vec![0; 100_000], soon(&effects)), Ok(100_000));
            drop(ends);
            // A provider's thread may be looking at an end just now.
            assert!((0..10_000).any(|_| nothing() || {
                std::thread::sleep(Duration::from_millis(1));
                false
            }));
        }
    }
}

/// The other end of [`a_process_that_is_killed_takes_nobody_with_it`]: floods whoever gave it address and ticket.
#[test]
#[ignore = "started by another test, in a process of its own"]
fn flood() {
    let effects = effects();
    let words: Vec<String> = std::env::var("SHOAL_TEST_FLOOD").unwrap().split(' ').map(str::to_owned).collect();
    let profile = if words[0] == "rc" { Profile::Rc } else { Profile::Uc };
    let ticket = Ticket::new(words[2].parse().unwrap(), [5; 32]);
    let provider = provider(&effects, profile, &addresses()[0], PATIENCE);
    let link = provider.dial(&Endpoint::Verbs { address: words[1].parse().unwrap() }, &ticket, OPTIONS, soon(&effects)).unwrap();
    for i in 0u64.. {
        let bytes = (i * 7919 % 300_000) as usize;
        let message: Vec<u8> = (0..bytes).map(|at| (at as u64 ^ i) as u8).collect();
        link.send(&[&i.to_le_bytes(), &message], soon(&effects)).unwrap();
    }
}

#[test]
#[ignore = "needs devices: run by .ci/verbs"]
fn a_process_that_is_killed_takes_nobody_with_it() {
    let effects = effects();
    for (round, profile) in [Profile::Rc, Profile::Uc, Profile::Rc, Profile::Uc].into_iter().enumerate() {
        let provider = provider(&effects, profile, &addresses()[1], PATIENCE);
        let Endpoint::Verbs { address } = provider.endpoints()[0] else { panic!() };
        let expected = provider.expect(&Ticket::new(round as u128, [5; 32]), OPTIONS).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["provider::verbs::guest::flood", "--exact", "--ignored", "--quiet"])
            .env("SHOAL_TEST_FLOOD", format!("{profile} {address} {round}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let link = expected.accept(soon(&effects)).unwrap();
        let mut buffer = vec![0; 400_000];
        let mut next = 0u64;
        let result = loop {
            if next == 10 + round as u64 * 3 {
                // In the middle of whatever it is sending.
                child.kill().unwrap();
            }
            match link.recv(&mut buffer, soon(&effects)) {
                Ok(bytes) => {
                    let mut number = [0; 8];
                    number.copy_from_slice(&buffer[..8]);
                    assert_eq!(u64::from_le_bytes(number), next, "nothing is lost, repeated or out of order");
                    assert_eq!(bytes - 8, (next * 7919 % 300_000) as usize);
                    assert!(buffer[8..bytes].iter().enumerate().all(|(at, byte)| *byte == (at as u64 ^ next) as u8), "nothing is torn");
                    next += 1;
                }
                Err(error) => break error,
            }
        };
        assert_eq!(result, RecvError::Closed(CloseReason::Peer));
        assert!(next >= 10 + round as u64 * 3);
        child.wait().unwrap();
        drop(link);
        assert!((0..10_000).any(|_| provider.in_use() == InUse::default() || {
            std::thread::sleep(Duration::from_millis(1));
            false
        }));
    }
}

#[test]
#[ignore = "needs devices: run by .ci/verbs"]
fn links_that_are_cut_lose_nothing() {
    let effects = effects();
    for profile in [Profile::Rc, Profile::Uc] {
        let [near, far] = addresses().map(|address| Box::new(provider(&effects, profile, &address, PATIENCE)) as Box<dyn Provider>);
        let cuts = faults::cut_links(&faults::Exchange::new(effects.clone(), near, far), 1, 1_000, 20);
        assert!(cuts > 0, "no link was cut");
    }
}

#[test]
#[ignore = "needs devices: run by .ci/verbs"]
fn a_process_that_is_paused_or_killed_harms_nobody() {
    faults::paused_and_killed("rc", 1, 1_000);
    faults::paused_and_killed("uc", 2, 1_000);
}

/// Prints half of the median round trip of short messages, in microseconds, as perftest does for its own. `.ci/verbs` compares them.
#[test]
#[ignore = "a measurement: run by .ci/verbs"]
fn latency() {
    const ROUNDS: usize = 3000;
    let effects = effects();
    for profile in [Profile::Rc, Profile::Uc] {
        let both = providers(&effects, profile);
        let [near, far] = link(&effects, &both);
        let mut times = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut buffer = [0; 64];
                // An empty message is the last one.
                while far.recv(&mut buffer, soon(&effects)).unwrap() > 0 {
                    far.send(&[&buffer], soon(&effects)).unwrap();
                }
            });
            let mut buffer = [0; 64];
            // A machine that is busy with other things gets fewer rounds.
            let until = Instant::now() + Duration::from_secs(6);
            while times.len() < ROUNDS && Instant::now() < until {
                let began = Instant::now();
                near.send(&[&buffer], soon(&effects)).unwrap();
                near.recv(&mut buffer, soon(&effects)).unwrap();
                times.push(began.elapsed());
            }
            near.send(&[], soon(&effects)).unwrap();
        });
        // The first ones find nothing warm.
        let mut times = times.split_off(times.len() / 10);
        times.sort_unstable();
        println!("latency {profile} {:.2}", times[times.len() / 2].as_secs_f64() * 1e6 / 2.0);
    }
}
