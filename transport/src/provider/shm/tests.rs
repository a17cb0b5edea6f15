//! What only shared memory has: other users, memory that is scribbled over, processes that die in the middle.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use super::bell::Bell;
use super::link::{Bells, Parts, ShmLink};
use super::segment::Segment;
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
            for bytes in [0, 1, 1015, 1016, 1017, 2032, 2033, 3047, 3048, 3049, 4087, 4088, 4089, 4096, 10_000, message.len()] {
                near.send(&[&message[..bytes / 2], &message[bytes / 2..bytes]], soon(&effects)).unwrap();
            }
        });
        let mut buffer = vec![0; message.len()];
        for bytes in [0, 1, 1015, 1016, 1017, 2032, 2033, 3047, 3048, 3049, 4087, 4088, 4089, 4096, 10_000, message.len()] {
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

/// Both ends of a link without providers, and its memory.
fn bare_link(effects: &Effects) -> (Arc<ShmLink>, Arc<ShmLink>, File) {
    let segment = Segment::create(4096).unwrap();
    let bells: [Bell; 4] = std::array::from_fn(|_| Bell::new().unwrap());
    let again = |of: BorrowedFd<'_>| of.try_clone_to_owned().unwrap();
    let handed = |i: usize| Bell::handed_over(again(bells[i].as_fd())).unwrap();
    let near_bells = Bells { bytes: handed(0), room: handed(1), peer_bytes: handed(2), peer_room: handed(3) };
    let far_bells = Bells { bytes: handed(2), room: handed(3), peer_bytes: handed(0), peer_room: handed(1) };
    let memory = File::from(again(segment.as_fd()));
    let theirs = Segment::open(again(segment.as_fd())).unwrap();
    let (anchor, far_anchor) = UnixStream::pair().unwrap();
    let end = |anchor, segment, lane, bells| {
        let parts = Parts { anchor, segment, lane, bells, peer: "test".to_owned(), limits: [1 << 20; 2] };
        ShmLink::new(parts, Arc::clone(&effects.clock), Duration::from_secs(60)).unwrap()
    };
    (end(anchor, segment, 0, near_bells), end(far_anchor, theirs, 1, far_bells), memory)
}

/// As `docs/wire.md` has it.
#[test]
fn messages_lie_where_the_page_says() {
    let effects = effects();
    let (near, far, memory) = bare_link(&effects);
    let read = |at: u64, bytes: usize| {
        let mut found = vec![0; bytes];
        std::os::unix::fs::FileExt::read_exact_at(&memory, &mut found, at).unwrap();
        found
    };
    // What the dialler sends: lane 1.
    let (small, large) = (4096 + 2048, 8192 + 4096);
    far.send(&[b"ab", b"c"], soon(&effects)).unwrap();
    assert_eq!(read(large, 11), [3, 0, 0, 0, 1, 0, 0, 1, b'a', b'b', b'c']);
    far.ping();
    assert_eq!(read(small, 8), [8, 0, 0, 0, 2, 0, 0, 1]);
    // A quarter of the ring and what is beyond.
    far.send(&[&[7; 1016 + 5]], soon(&effects)).unwrap();
    assert_eq!(read(small + 64, 8), [0, 0, 0, 0, 0, 0, 0, 2]);
    assert_eq!(read(large + 64, 9), [0xfd, 3, 0, 0, 1, 0, 0, 0, 7]);
    assert_eq!(read(large + 64 + 1024, 13), [5, 0, 0, 0, 4, 0, 0, 1, 7, 7, 7, 7, 7]);
    let mut buffer = [0; 2000];
    for bytes in [3, 1021] {
        assert_eq!(near.recv(&mut buffer, soon(&effects)), Ok(bytes));
    }
    // The ping was answered, in the large ring of lane 0.
    assert_eq!(read(8192, 8), [8, 0, 0, 0, 3, 0, 0, 1]);
}

/// Whoever has the memory can write what he likes into it. It is found out, or garbles a message; it does not wedge, and nothing is read that
/// lies outside of the rings.
#[test]
fn a_peer_that_scribbles_is_found_out() {
    let effects = effects();
    let heads: [(u64, &[u8]); 8] = [
        // An unknown kind, the ring's byte, lengths that no ring and no buffer holds, and a pointer to nothing.
        (8192, &[1, 0, 0, 0, 9, 0, 0, 0]),
        (8192, &[1, 0, 0, 0, 1, 0, 0, 3]),
        (8192, &[1, 0, 0, 0, 1, 1, 0, 0]),
        (8192, &[0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0]),
        (8192, &[9, 0, 0, 0, 2, 0, 0, 0]),
        (8192, &[0, 0, 0, 0, 0, 0, 0, 1]),
        (8192, &[0, 0, 0, 0, 0, 0, 0, 2]),
        // A second piece that is none.
        (8192, &[0xd0, 7, 0, 0, 1, 0, 0, 0]),
    ];
    for (at, head) in heads {
        let (near, far, memory) = bare_link(&effects);
        let write = |at: u64, bytes: &[u8]| std::os::unix::fs::FileExt::write_all_at(&memory, bytes, at).unwrap();
        write(8192 + 1024, &[1, 0, 0, 0, 1, 0, 0, 0]);
        write(at, head);
        let found = far.recv(&mut [0; 4000], soon(&effects));
        assert!(matches!(found, Err(RecvError::Closed(CloseReason::Misbehaved(_)))), "{head:?}: {found:?}");
        drop(near);
    }
    // How far the reading end says that it has got, before anything was written.
    let (near, _far, memory) = bare_link(&effects);
    std::os::unix::fs::FileExt::write_all_at(&memory, &[0, 0, 0, 0, 0, 1, 0, 0].repeat(2), 1024).unwrap();
    let refused = (0..100).find_map(|_| near.send(&[&[0; 900]], soon(&effects)).err());
    assert!(matches!(refused, Some(SendError::Closed(CloseReason::Misbehaved(_)))), "{refused:?}");
    // Lengths that are possible but wrong give bytes that mean nothing, and no more.
    let (_near, far, memory) = bare_link(&effects);
    std::os::unix::fs::FileExt::write_all_at(&memory, &[0xf8, 3, 0, 0, 1, 0, 0, 1], 8192).unwrap();
    assert_eq!(far.recv(&mut [0; 4000], soon(&effects)), Ok(1016));
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
