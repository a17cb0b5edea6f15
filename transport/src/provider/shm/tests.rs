//! What only shared memory has: other users, memory that is scribbled over, processes that die in the middle.

use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use super::{ShmOptions, ShmProvider, door};
use crate::Effects;
use crate::env::SystemRng;
use crate::link::{CloseReason, Link, LinkOptions, RecvError, SendError};
use crate::provider::{DialError, Endpoint, Provider, Ticket};
use crate::testing::{effects, soon};

const OPTIONS: LinkOptions = LinkOptions::for_payload(8 * 1024 * 1024);

fn provider(effects: &Effects, options: ShmOptions) -> ShmProvider {
    let usual = options.silence_max == ShmOptions::default().silence_max;
    let silence_max = if usual { Duration::from_secs(60) } else { options.silence_max };
    // The patience of a loaded machine.
    let options = ShmOptions { silence_max, handshake_max: Duration::from_secs(60), ..options };
    ShmProvider::new(effects.clone(), options).unwrap()
}

fn link(effects: &Effects, near: &ShmProvider, far: &ShmProvider) -> (Arc<dyn Link>, Arc<dyn Link>) {
    let ticket = Ticket::random(&SystemRng);
    let expected = far.expect(&ticket, OPTIONS).unwrap();
    let near = near.dial(&far.endpoints()[0], &ticket, OPTIONS, soon(effects)).unwrap();
    (near, expected.accept(soon(effects)).unwrap())
}

#[test]
fn nobody_behind_a_door_is_said_at_once() {
    let effects = effects();
    let one = provider(&effects, ShmOptions::default());
    let endpoint = Endpoint::Shm { door: 1 };
    let error = one.dial(&endpoint, &Ticket::random(&SystemRng), OPTIONS, soon(&effects)).unwrap_err();
    assert!(matches!(error, DialError::Nobody { .. }), "{error}");
}

#[test]
fn messages_longer_than_the_ring_pass() {
    let effects = effects();
    let small = ShmOptions { ring_bytes: 4096, ..ShmOptions::default() };
    let (one, two) = (provider(&effects, small), provider(&effects, small));
    let (near, far) = link(&effects, &one, &two);
    let message: Vec<u8> = (0..3_000_000u32).map(|i| (i ^ (i >> 9)) as u8).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for bytes in [0, 1, 4087, 4088, 4089, 4096, 10_000, message.len()] {
                near.send(&[&message[..bytes / 2], &message[bytes / 2..bytes]], soon(&effects)).unwrap();
            }
        });
        let mut buffer = vec![0; message.len()];
        for bytes in [0, 1, 4087, 4088, 4089, 4096, 10_000, message.len()] {
            assert_eq!(far.recv(&mut buffer, soon(&effects)), Ok(bytes));
            assert!(buffer[..bytes] == message[..bytes], "{bytes}");
        }
    });
    // What does not fit while nobody reads is not begun, so a deadline does no harm.
    near.send(&[&message[..4000]], soon(&effects)).unwrap();
    let short = effects.after(Duration::from_millis(5));
    assert_eq!(near.send(&[&message[..4000]], short), Err(SendError::Deadline));
    assert_eq!(near.health().closed, None);
    // One that has begun cannot be taken back.
    let mut buffer = vec![0; 4000];
    far.recv(&mut buffer, soon(&effects)).unwrap();
    assert_eq!(near.send(&[&message[..9000]], effects.after(Duration::from_millis(5))), Err(SendError::Closed(CloseReason::Stalled)));
}

#[test]
fn a_silent_visitor_keeps_nobody_out() {
    let effects = effects();
    let (one, two) = (provider(&effects, ShmOptions::default()), provider(&effects, ShmOptions::default()));
    let Endpoint::Shm { door } = two.endpoints()[0] else { panic!() };
    let _idle: Vec<UnixStream> = (0..8).map(|_| UnixStream::connect_addr(&door::address(door).unwrap()).unwrap()).collect();
    let (near, far) = link(&effects, &one, &two);
    near.send(&[b"hello"], soon(&effects)).unwrap();
    assert_eq!(far.recv(&mut [0; 8], soon(&effects)), Ok(5));
}

#[test]
fn a_peer_that_hangs_is_noticed_and_one_that_idles_is_not() {
    let effects = effects();
    let quick =
        ShmOptions { keepalive_interval: Duration::from_millis(20), silence_max: Duration::from_millis(400), ..ShmOptions::default() };
    let (one, two) = (provider(&effects, quick), provider(&effects, ShmOptions { keepalive_interval: Duration::from_secs(600), ..quick }));
    let (near, far) = link(&effects, &one, &two);
    // The one hears nothing from the other, whose keep-alives are turned off as good as.
    let Err(RecvError::Closed(CloseReason::Silent { silence_ms })) = near.recv(&mut [0; 8], soon(&effects)) else { panic!("heard") };
    assert!(silence_ms >= 400);
    drop(far);
    let (near, far) = link(&effects, &two, &one);
    // The other way round there are keep-alives, and their echoes give a round trip.
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(near.recv(&mut [0; 8], effects.after(Duration::from_secs(1))), Err(RecvError::Deadline)));
        assert_eq!(far.recv(&mut [0; 8], effects.after(Duration::from_secs(1))), Err(RecvError::Deadline));
    });
    assert!(far.health().rtt.is_some());
}

/// The other end of [`a_process_that_is_killed_takes_nobody_with_it`]: floods whoever gave it door and ticket.
#[test]
#[ignore = "started by another test, in a process of its own"]
fn flood() {
    let effects = effects();
    let words: Vec<String> = std::env::var("SHOAL_TEST_FLOOD").unwrap().split(' ').map(str::to_owned).collect();
    let number = |text: &str| u128::from_str_radix(text, 16).unwrap();
    let mut secret = [0; 32];
    secret[..16].copy_from_slice(&number(&words[2]).to_le_bytes());
    let ticket = Ticket::new(number(&words[1]), secret);
    let provider = provider(&effects, ShmOptions::default());
    let link = provider.dial(&Endpoint::Shm { door: number(&words[0]) }, &ticket, OPTIONS, soon(&effects)).unwrap();
    for i in 0u64.. {
        let bytes = (i * 7919 % 3_000_000) as usize;
        let message: Vec<u8> = (0..bytes).map(|at| (at as u64 ^ i) as u8).collect();
        link.send(&[&i.to_le_bytes(), &message], soon(&effects)).unwrap();
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|line| line.contains("shoal-link")).count()
}

/// What the process sees of the links of its own test only: others run beside it.
#[test]
fn a_process_that_is_killed_takes_nobody_with_it() {
    let effects = effects();
    let provider = provider(&effects, ShmOptions::default());
    let Endpoint::Shm { door } = provider.endpoints()[0] else { panic!() };
    for round in 0..6u64 {
        let mut secret = [0; 32];
        secret[..16].copy_from_slice(&u128::from(round + 5).to_le_bytes());
        let ticket = Ticket::new(u128::from(round + 1), secret);
        let expected = provider.expect(&ticket, OPTIONS).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["provider::shm::tests::flood", "--exact", "--ignored", "--quiet"])
            .env("SHOAL_TEST_FLOOD", format!("{door:x} {:x} {:x}", round + 1, round + 5))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let link = expected.accept(soon(&effects)).unwrap();
        let mut buffer = vec![0; 4_000_000];
        let mut next = 0u64;
        let result = loop {
            if next == 10 + round * 3 {
                // In the middle of whatever it is writing.
                child.kill().unwrap();
            }
            match link.recv(&mut buffer, soon(&effects)) {
                Ok(bytes) => {
                    let mut number = [0; 8];
                    number.copy_from_slice(&buffer[..8]);
                    assert_eq!(u64::from_le_bytes(number), next, "nothing is lost, repeated or out of order");
                    assert_eq!(bytes - 8, (next * 7919 % 3_000_000) as usize);
                    assert!(buffer[8..bytes].iter().enumerate().all(|(at, byte)| *byte == (at as u64 ^ next) as u8), "nothing is torn");
                    next += 1;
                }
                Err(error) => break error,
            }
        };
        assert_eq!(result, RecvError::Closed(CloseReason::Peer));
        assert!(next >= 10 + round * 3);
        child.wait().unwrap();
    }
}

/// Run alone by name in the long checks: other tests of this process open and close descriptors, too.
#[test]
#[ignore = "counts what the whole process holds, so it has to run alone"]
fn links_leave_nothing_behind() {
    let effects = effects();
    let (one, two) = (provider(&effects, ShmOptions::default()), provider(&effects, ShmOptions::default()));
    drop(link(&effects, &one, &two));
    let before = (descriptors(), mappings());
    for _ in 0..50 {
        let (near, far) = link(&effects, &one, &two);
        near.send(&[b"x"], soon(&effects)).unwrap();
        far.recv(&mut [0; 8], soon(&effects)).unwrap();
    }
    assert_eq!((descriptors(), mappings()), before);
}
