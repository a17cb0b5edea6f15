//! What only verbs links have: fabrics that lose and corrupt, devices that die or run full, peers that lie.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use super::apple::{AppleFabric, Faults};
use super::device::{Ask, Device, InUse, Pair, VerbsError};
use super::profile::{APPLE_PAIRS_MAX, Profile};
use super::wire::{Card, HEADER_BYTES};
use super::{VerbsOptions, VerbsProvider};
use crate::Effects;
use crate::env::SystemRng;
use crate::link::{CloseReason, Link, LinkOptions, RecvError, SendError};
use crate::provider::handshake::{self, CHALLENGE_BYTES, VERDICT_BYTES};
use crate::provider::{DialError, Endpoint, Provider, ProviderKind, Ticket};
use crate::region::{Region, Slot};
use crate::testing::{effects, soon};

const OPTIONS: LinkOptions = LinkOptions::for_payload(8 * 1024 * 1024);

/// The patience of a loaded machine.
pub(super) fn patient() -> VerbsOptions {
    VerbsOptions { silence_max: Duration::from_secs(60), handshake_max: Duration::from_secs(60), ..VerbsOptions::of(Profile::Uc) }
}

struct Two {
    effects: Effects,
    fabric: AppleFabric,
    near: VerbsProvider,
    far: VerbsProvider,
}

fn two(options: VerbsOptions) -> Two {
    let effects = effects();
    let fabric = AppleFabric::default();
    let start = |address: &str| fabric.provider(&effects, address, options.clone()).unwrap();
    Two { near: start("127.0.0.1"), far: start("127.0.0.2"), fabric, effects }
}

impl Two {
    fn link(&self) -> (Arc<dyn Link>, Arc<dyn Link>) {
        let ticket = Ticket::random(&SystemRng);
        let expected = self.far.expect(&ticket, OPTIONS).unwrap();
        let near = self.near.dial(&self.far.endpoints()[0], &ticket, OPTIONS, soon(&self.effects)).unwrap();
        (near, expected.accept(soon(&self.effects)).unwrap())
    }

    fn address(&self) -> std::net::SocketAddr {
        let Endpoint::Verbs { address } = self.far.endpoints()[0] else { panic!() };
        address
    }
}

fn message(seed: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|i| ((i ^ (i >> 9)).wrapping_mul(17).wrapping_add(seed)) as u8).collect()
}

#[test]
fn messages_of_all_lengths_pass_by_chunks_of_all_lengths() {
    for chunk_bytes in [4096, 16_384, 1 << 19] {
        let two = two(VerbsOptions { chunk_bytes, receives: 16, sends: 16, ..patient() });
        let (near, far) = two.link();
        let room = chunk_bytes - HEADER_BYTES;
        let lengths = [0, 1, room - 1, room, room + 1, 2 * room, 2 * room + 1, 40 * 4096, 5_000_000];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for (i, bytes) in lengths.into_iter().enumerate() {
                    let whole = message(i as u64, bytes);
                    let (start, end) = whole.split_at(bytes / 3);
                    near.send(&[start, &[], end], soon(&two.effects)).unwrap();
                }
            });
            let mut buffer = vec![0; 5_000_000];
            for (i, bytes) in lengths.into_iter().enumerate() {
                assert_eq!(far.recv(&mut buffer, soon(&two.effects)), Ok(bytes));
                assert!(buffer[..bytes] == message(i as u64, bytes), "{bytes}");
            }
        });
        assert!(two.fabric.delivered() >= 1200 / (chunk_bytes as u64 / 4096));
    }
}

/// Neither waits for a keep-alive to tell it of credits.
#[test]
fn messages_as_long_as_the_window_follow_each_other() {
    let two = two(VerbsOptions { keepalive_interval: Duration::from_secs(3600), receives: 32, sends: 64, chunk_bytes: 4096, ..patient() });
    let (near, far) = two.link();
    let room = 4096 - HEADER_BYTES;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for chunks in (1..=32).chain((20..32).rev()) {
                near.send(&[&message(chunks, chunks as usize * room)], soon(&two.effects)).unwrap();
            }
        });
        let mut buffer = vec![0; 32 * room];
        for chunks in (1..=32).chain((20..32).rev()) {
            assert_eq!(far.recv(&mut buffer, soon(&two.effects)), Ok(chunks as usize * room));
            assert!(buffer[..chunks as usize * room] == message(chunks, chunks as usize * room));
        }
    });
}

#[test]
fn kinds_are_sorted_from_worst_to_best() {
    let mut kinds = [ProviderKind::Memory, ProviderKind::Verbs, ProviderKind::Tcp, ProviderKind::Shm];
    kinds.sort();
    assert_eq!(kinds, [ProviderKind::Tcp, ProviderKind::Verbs, ProviderKind::Shm, ProviderKind::Memory]);
}

#[test]
fn what_the_fabric_loses_or_changes_ends_the_link_and_is_never_delivered() {
    for (at, lose) in [(0, true), (7, true), (0, false), (7, false), (3, false)] {
        // Nothing but the chunks of messages is on the fabric.
        let two = two(VerbsOptions { keepalive_interval: Duration::from_secs(3600), ..patient() });
        let (near, far) = two.link();
        two.fabric.fail(if lose {
            Faults { lose: Some(at), ..Faults::default() }
        } else {
            Faults { corrupt: Some(at), ..Faults::default() }
        });
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Three chunks each. It goes on until it hears that it is over.
                for i in 0.. {
                    if near.send(&[&message(i, 40_000)], soon(&two.effects)).is_err() {
                        break;
                    }
                }
            });
            let mut buffer = vec![0; 40_000];
            for i in 0.. {
                match far.recv(&mut buffer, soon(&two.effects)) {
                    Ok(bytes) => {
                        assert!(buffer[..bytes] == message(i, 40_000), "message {i} is not what was sent");
                        assert!(i <= at / 3, "more arrived than was whole");
                    }
                    Err(RecvError::Closed(CloseReason::Broken(what))) => {
                        assert!(what.contains("chunk"), "{what}");
                        break;
                    }
                    Err(other) => panic!("{other}"),
                }
            }
        });
        // Both ends start anew on the same fabric.
        let (near, far) = two.link();
        near.send(&[b"again"], soon(&two.effects)).unwrap();
        assert_eq!(far.recv(&mut [0; 8], soon(&two.effects)), Ok(5));
    }
}

#[test]
fn a_lost_last_message_is_missed_with_the_next_keep_alive() {
    let two = two(VerbsOptions { keepalive_interval: Duration::from_millis(20), ..patient() });
    let (near, far) = two.link();
    two.fabric.fail(Faults { lose: Some(0), ..Faults::default() });
    // Whichever end's keep-alive or message it is that is lost, somebody misses it; and then the other learns that it is over.
    drop(near.send(&[b"lost"], soon(&two.effects)));
    std::thread::scope(|scope| {
        let ends = [&near, &far].map(|end| {
            scope.spawn(|| {
                loop {
                    if let Err(error) = end.recv(&mut [0; 8], soon(&two.effects)) {
                        return error;
                    }
                }
            })
        });
        let ends = ends.map(|end| end.join().unwrap());
        assert!(ends.iter().any(|error| matches!(error, RecvError::Closed(CloseReason::Broken(_)))), "{ends:?}");
    });
}

#[test]
fn a_fabric_that_dies_silently_is_noticed_by_who_waits() {
    let quick = VerbsOptions { keepalive_interval: Duration::from_millis(20), silence_max: Duration::from_millis(400), ..patient() };
    let two = two(quick);
    let (near, far) = two.link();
    near.send(&[b"alive"], soon(&two.effects)).unwrap();
    assert_eq!(far.recv(&mut [0; 8], soon(&two.effects)), Ok(5));
    // Idle, it stays, and its round trip is known.
    assert_eq!(far.recv(&mut [0; 8], two.effects.after(Duration::from_secs(1))), Err(RecvError::Deadline));
    assert!(far.health().rtt.is_some());
    two.fabric.fail(Faults { dead: true, ..Faults::default() });
    let Err(RecvError::Closed(CloseReason::Silent { silence_ms })) = far.recv(&mut [0; 8], soon(&two.effects)) else { panic!("heard") };
    assert!(silence_ms >= 400);
    // The other end learns of it through the bootstrap connection; nothing was said of its send before.
    assert!(matches!(near.recv(&mut [0; 8], soon(&two.effects)), Err(RecvError::Closed(_))));
    assert!(matches!(near.send(&[b"x"], soon(&two.effects)), Err(SendError::Closed(_))));
}

#[test]
fn links_leave_nothing_on_the_device() {
    let two = two(patient());
    for _ in 0..30 {
        let (near, far) = two.link();
        assert_eq!(two.fabric.in_use(), InUse { pairs: 2, completion_queues: 2, registrations: 2 });
        near.send(&[&message(1, 100_000)], soon(&two.effects)).unwrap();
        assert_eq!(far.recv(&mut vec![0; 100_000], soon(&two.effects)), Ok(100_000));
        // The provider's thread may be looking at either of them just now.
        drop((near, far));
        let gone = || two.fabric.in_use() == InUse::default();
        assert!((0..10_000).any(|_| gone() || {
            std::thread::sleep(Duration::from_millis(1));
            false
        }));
    }
}

#[test]
fn a_device_is_not_asked_for_one_link_too_many() {
    let two = two(patient());
    let links: Vec<_> = (0..APPLE_PAIRS_MAX).map(|_| two.link()).collect();
    let ticket = Ticket::random(&SystemRng);
    let _expected = two.far.expect(&ticket, OPTIONS).unwrap();
    let error = two.near.dial(&two.far.endpoints()[0], &ticket, OPTIONS, soon(&two.effects)).unwrap_err();
    assert!(error.to_string().contains("10 links already"), "{error}");
    drop(links);
    // The device was not driven into its corner: it still gives queue pairs.
    let works = |_| two.far.expect(&Ticket::random(&SystemRng), OPTIONS).is_ok() && two.fabric.in_use() == InUse::default();
    assert!((0..10_000).any(|i| works(i) || {
        std::thread::sleep(Duration::from_millis(1));
        false
    }));
    two.link();
}

/// Whichever end could not make its queue pair, the ticket is good again when the dialler hears of it.
#[test]
fn a_dialler_that_fails_goes_to_another_door_with_the_same_ticket() {
    for (near_profile, far_profile) in [(Profile::Rc, Profile::Uc), (Profile::Uc, Profile::Rc)] {
        let effects = effects();
        let fabric = AppleFabric::default();
        let start = |address: &str, profile| fabric.provider(&effects, address, VerbsOptions { profile, ..patient() }).unwrap();
        let (near, far) = (start("127.0.0.1", near_profile), start("127.0.0.2", far_profile));
        for _ in 0..20 {
            let ticket = Ticket::random(&SystemRng);
            let _expected = far.expect(&ticket, OPTIONS).unwrap();
            near.dial(&far.endpoints()[0], &ticket, OPTIONS, soon(&effects)).unwrap_err();
            assert!(far.shared.desk.look_up(ticket.id()).is_some(), "the ticket is still taken");
        }
    }
}

#[test]
fn reliable_links_and_other_addresses_are_refused_in_words() {
    let effects = effects();
    let fabric = AppleFabric::default();
    let reliable = VerbsOptions { profile: Profile::Rc, ..patient() };
    let near = fabric.provider(&effects, "127.0.0.1", reliable).unwrap();
    let far = fabric.provider(&effects, "127.0.0.2", patient()).unwrap();
    let ticket = Ticket::random(&SystemRng);
    let _expected = far.expect(&ticket, OPTIONS).unwrap();
    let error = near.dial(&far.endpoints()[0], &ticket, OPTIONS, soon(&effects)).unwrap_err();
    assert!(error.to_string().contains("ibv_create_qp"), "{error}");
    let error = near.dial(&Endpoint::Tcp("127.0.0.1:1".parse().unwrap()), &ticket, OPTIONS, soon(&effects)).unwrap_err();
    assert!(matches!(error, DialError::Endpoint { .. }), "{error}");
    // A peer that is reached over an interface without a device.
    let bare =
        VerbsProvider::with_devices(effects.clone(), patient(), super::Desk::new(super::KIND, Arc::clone(&effects.clock)), vec![]).unwrap();
    assert_eq!(bare.endpoints(), []);
    let error = bare.dial(&far.endpoints()[0], &ticket, OPTIONS, soon(&effects)).unwrap_err();
    assert!(matches!(&error, DialError::Unreachable { reason, .. } if reason.contains("no verbs device")), "{error}");
}

/// Proves itself as a peer with the ticket's secret would, and stops before the cards.
fn proved(two: &Two, ticket: &Ticket) -> TcpStream {
    let mut stream = TcpStream::connect(two.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let hello = handshake::hello(ticket, &[1; 32], OPTIONS);
    stream.write_all(&hello).unwrap();
    let mut challenge = [0; CHALLENGE_BYTES];
    stream.read_exact(&mut challenge).unwrap();
    stream.write_all(&handshake::proof(ticket, &hello, &challenge)).unwrap();
    let mut verdict = [0; VERDICT_BYTES];
    stream.read_exact(&mut verdict).unwrap();
    assert_eq!(verdict[0], 1);
    stream
}

#[test]
fn a_peer_that_lies_about_its_queue_pair_gets_no_link_and_leaves_nothing() {
    let two = two(VerbsOptions { handshake_max: Duration::from_secs(5), ..patient() });
    let ticket = Ticket::random(&SystemRng);
    let _expected = two.far.expect(&ticket, OPTIONS).unwrap();
    let mut card = [0; super::wire::CARD_BYTES];
    for lie in 0..5 {
        let mut stream = proved(&two, &ticket);
        stream.read_exact(&mut card).unwrap();
        let ours = Card::decode(&card).unwrap();
        let honest = Card { number: 1, gid: super::device::Gid::of(stream.local_addr().unwrap().ip()), ..ours };
        let said = match lie {
            0 => Card { profile: Profile::Rc, ..honest }.encode(),
            1 => Card { gid: super::device::Gid::of("10.1.1.1".parse().unwrap()), ..honest }.encode(),
            2 => Card { receives: 2, ..honest }.encode(),
            3 => Card { chunk_bytes: u32::MAX, ..honest }.encode(),
            _ => [0xff; super::wire::CARD_BYTES],
        };
        stream.write_all(&said).unwrap();
        // The connection is ended without a word.
        let mut more = Vec::new();
        drop(stream.read_to_end(&mut more));
        assert!(more.is_empty(), "lie {lie} was believed");
        assert_eq!(two.fabric.in_use(), InUse::default());
    }
    // One that vanishes after its card.
    let mut stream = proved(&two, &ticket);
    stream.read_exact(&mut card).unwrap();
    drop(stream);
    let gone = || two.fabric.in_use() == InUse::default();
    assert!((0..10_000).any(|_| gone() || {
        std::thread::sleep(Duration::from_millis(1));
        false
    }));
}

fn bare(device: &impl Device, depth: u32) -> (Box<dyn Pair>, Vec<Slot>) {
    let ask = Ask { profile: Profile::Uc, send_depth: depth, receive_depth: depth, completions: 64, inline_bytes: 0, alone: false };
    let mut pair = device.create(&ask).unwrap();
    let slots = Region::slots(16, 8192).unwrap();
    pair.register(&slots).unwrap();
    (pair, slots)
}

/// The simulated device does what Apple's does to those who break its contract, so that passing on it means something.
#[test]
fn the_simulated_device_is_as_strict_as_the_real_one() {
    let fabric = AppleFabric::default();
    let (one, two) = (fabric.device("127.0.0.1"), fabric.device("127.0.0.2"));
    let connect = |near: &mut Box<dyn Pair>, far: u32, gid_index: u8| {
        near.init(&Profile::Uc.init(1)).unwrap();
        let peer = Card {
            profile: Profile::Uc,
            mtu: 5,
            gid: super::device::Gid([1; 16]),
            number: far,
            psn: 0,
            chunk_bytes: 8192,
            receives: 16,
            salt: 0,
        };
        near.ready_to_receive(&Profile::Uc.ready_to_receive(&peer, 1, gid_index, 5))?;
        near.ready_to_send(&Profile::Uc.ready_to_send(0))
    };
    // Sends before it is ready, fewer rights, another place in the table, and skipped steps are refused.
    let (mut a, mut slots_a) = bare(&one, 8);
    assert!(a.post_send(slots_a.pop().unwrap(), 8192).is_err());
    assert!(a.init(&super::device::Init { port: 1, access: 1 }).is_err());
    assert!(a.ready_to_send(&Profile::Uc.ready_to_send(0)).is_err());
    let (mut b, mut slots_b) = bare(&two, 8);
    assert!(connect(&mut a, b.number(), 1).is_err());
    drop(a);
    let (mut a, mut more) = bare(&one, 8);
    slots_a.append(&mut more);
    connect(&mut a, b.number(), 3).unwrap();
    connect(&mut b, a.number(), 3).unwrap();
    let mut done = Vec::new();
    // Without a receive a message is lost, and its send completes all the same.
    a.post_send(slots_a.pop().unwrap(), 8192).unwrap();
    a.poll(&mut done).unwrap();
    b.poll(&mut done).unwrap();
    assert_eq!((done.len(), fabric.delivered()), (1, 0));
    // One frame does not fit a receive of two.
    b.post_receive(slots_b.pop().unwrap()).unwrap();
    a.post_send(slots_a.pop().unwrap(), 4096).unwrap();
    a.poll(&mut done).unwrap();
    assert_eq!(fabric.delivered(), 0);
    // Of five receives of two frames where eight frames fit, the last one's message is damaged.
    for _ in 0..4 {
        b.post_receive(slots_b.pop().unwrap()).unwrap();
    }
    done.clear();
    for i in 0..5 {
        let mut slot = slots_a.pop().unwrap();
        slot.as_mut_slice().fill(i);
        a.post_send(slot, 8192).unwrap();
        a.poll(&mut done).unwrap();
    }
    done.clear();
    b.poll(&mut done).unwrap();
    let whole: Vec<bool> = done.iter().enumerate().map(|(i, done)| done.slot.as_slice().iter().all(|byte| *byte == i as u8)).collect();
    assert_eq!(whole, [true, true, true, true, false]);
    // Of five sends that wait together, the last one is lost.
    for _ in 0..4 {
        b.post_receive(slots_b.pop().unwrap()).unwrap();
    }
    let before = fabric.delivered();
    for _ in 0..5 {
        a.post_send(slots_a.pop().unwrap(), 8192).unwrap();
    }
    for _ in 0..3 {
        a.poll(&mut done).unwrap();
    }
    assert_eq!(fabric.delivered() - before, 4);
    // The eleventh queue pair is refused, and from then on all.
    let mut pairs: Vec<_> = (0..9).map(|_| bare(&one, 8)).collect();
    let ask = Ask { profile: Profile::Uc, send_depth: 8, receive_depth: 8, completions: 16, inline_bytes: 0, alone: false };
    assert!(matches!(one.create(&ask), Err(VerbsError::Call { code, .. }) if code == rustix::io::Errno::BUSY.raw_os_error()));
    pairs.clear();
    assert!(one.create(&ask).is_err());
    assert!(two.create(&Ask { send_depth: 4096, ..ask }).is_err(), "4,095 work requests are the most");
    assert!(matches!(two.create(&Ask { profile: Profile::Rc, ..ask }), Err(VerbsError::Call { code: 102, .. })));
    let violations = fabric.excuse();
    for said in
        ["found no receive", "1 frames met a receive of 2", "receive queue was over-posted", "send queue was over-posted", "eleventh"]
    {
        assert!(violations.iter().any(|violation| violation.contains(said)), "{said}: {violations:?}");
    }
}
