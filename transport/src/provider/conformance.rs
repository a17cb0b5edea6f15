//! What every provider must do, written once and run for each.

use std::sync::Arc;
use std::time::Duration;

use super::memory::{MemoryFabric, MemoryProvider, Shape};
#[cfg(target_os = "linux")]
use super::shm::{ShmOptions, ShmProvider};
use super::tcp::{Encryption, TcpOptions, TcpProvider};
#[cfg(target_os = "linux")]
use super::verbs::{Profile, VerbsOptions, apple::AppleFabric, guest};
use super::{AcceptError, DialError, Endpoint, ExpectError, Provider, Ticket};
use crate::Effects;
use crate::channel::{self, Broken, ChannelOptions, Violation};
use crate::env::SystemRng;
use crate::frame::{Fence, FrameClass, FrameError, FrameHeader, TermTag, payload_crc};
use crate::link::{CloseReason, Link, LinkCloser, LinkOptions, RecvError, SendError};
use crate::testing::{effects, soon};

/// Two providers that reach each other.
struct Place {
    effects: Effects,
    near: Arc<dyn Provider>,
    far: Arc<dyn Provider>,
}

fn tcp(address: &str) -> Place {
    tcp_with(address, Encryption::Auto, 1)
}

fn tcp_with(address: &str, encryption: Encryption, rails: u8) -> Place {
    let effects = effects();
    let start = || {
        let listen = vec![address.parse().unwrap()];
        let options = TcpOptions { listen, silence_max: Duration::from_secs(60), encryption, rails, ..TcpOptions::default() };
        Arc::new(TcpProvider::new(effects.clone(), options).unwrap())
    };
    Place { near: start(), far: start(), effects }
}

fn memory(shape: Shape) -> Place {
    let effects = effects();
    let fabric = MemoryFabric::new(&SystemRng, shape);
    let join = || Arc::new(MemoryProvider::new(effects.clone(), &fabric));
    Place { near: join(), far: join(), effects }
}

#[cfg(target_os = "linux")]
fn shm(ring_bytes: usize) -> Place {
    let effects = effects();
    let patience = Duration::from_secs(60);
    let options = ShmOptions { ring_bytes, silence_max: patience, handshake_max: patience, ..ShmOptions::default() };
    let start = || Arc::new(ShmProvider::new(effects.clone(), options).unwrap());
    Place { near: start(), far: start(), effects }
}

/// Devices that hold to Apple's contract. Whatever breaks it fails the test.
#[cfg(target_os = "linux")]
fn strict_apple(chunk_bytes: usize) -> Place {
    let effects = effects();
    let patience = Duration::from_secs(60);
    let options = VerbsOptions { chunk_bytes, silence_max: patience, handshake_max: patience, ..VerbsOptions::of(Profile::Uc) };
    let fabric = AppleFabric::default();
    let start = |address| Arc::new(fabric.provider(&effects, address, options.clone()).unwrap());
    Place { near: start("127.0.0.1"), far: start("127.0.0.2"), effects }
}

/// The devices of the guest that `.ci/verbs` boots.
#[cfg(target_os = "linux")]
fn soft_roce(profile: Profile) -> Place {
    let effects = effects();
    let [near, far] = guest::providers(&effects, profile).map(Arc::new);
    Place { near, far, effects }
}

impl Place {
    fn endpoint(&self) -> Endpoint {
        self.far.endpoints()[0]
    }

    fn options(&self) -> LinkOptions {
        LinkOptions::for_payload(4 * 1024 * 1024)
    }

    /// Both ends of a new link: the dialled one, the accepted one.
    fn link(&self) -> (Arc<dyn Link>, Arc<dyn Link>) {
        let ticket = Ticket::random(&SystemRng);
        let expected = self.far.expect(&ticket, self.options()).unwrap();
        let near = self.near.dial(&self.endpoint(), &ticket, self.options(), soon(&self.effects)).unwrap();
        let far = expected.accept(soon(&self.effects)).unwrap();
        (near, far)
    }

    fn soon(&self) -> crate::env::Instant {
        soon(&self.effects)
    }

    fn in_ms(&self, ms: u64) -> crate::env::Instant {
        self.effects.after(Duration::from_millis(ms))
    }

    fn channel(&self, options: ChannelOptions) -> (channel::Sender, channel::Receiver) {
        let (near, far) = self.link();
        let sender = channel::sender(near, fence(1), options, &self.effects).unwrap();
        (sender, channel::receiver(far, fence(1), options, &self.effects).unwrap())
    }

    /// A receiving end, and the bare link to it, with which a test plays a sender that does wrong.
    fn against_bare_link(&self, options: ChannelOptions) -> (Arc<dyn Link>, channel::Receiver) {
        let (near, far) = self.link();
        (near, channel::receiver(far, fence(1), options, &self.effects).unwrap())
    }
}

fn fence(epoch: u32) -> Fence {
    Fence { instance: 77, term: TermTag { counter: 3, node: 9 }, epoch }
}

const SMALL: ChannelOptions = ChannelOptions { slot_bytes: 64, slots: 4 };

/// Bytes that differ from message to message and from place to place.
fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|i| ((i ^ (i >> 8)).wrapping_mul(31).wrapping_add(seed * 7)) as u8).collect()
}

fn data(sequence: u64, fence: Fence, payload: &[u8]) -> FrameHeader {
    FrameHeader {
        class: FrameClass::Data,
        kind: 1,
        flags: 0,
        length: payload.len() as u32,
        sequence,
        fence,
        crc32c: payload_crc(&[payload]),
    }
}

fn links_carry_whole_messages_both_ways(place: &Place) {
    let (near, far) = place.link();
    let mut buffer = vec![0; 5 * 1024 * 1024];
    for (i, bytes) in [0, 1, 7, 4096, 70_000, 3_000_001].into_iter().enumerate() {
        let message = pattern(i as u64, bytes);
        let (start, end) = message.split_at(bytes / 3);
        for (from, to) in [(&near, &far), (&far, &near)] {
            std::thread::scope(|scope| {
                scope.spawn(|| from.send(&[start, &[], end], place.soon()).unwrap());
                let got = to.recv(&mut buffer, place.soon()).unwrap();
                assert_eq!(&buffer[..got], &message[..]);
            });
        }
    }
    let health = near.health();
    assert_eq!(health.sent_bytes, 3_000_001 + 70_000 + 4096 + 8);
    assert_eq!(health.received_bytes, health.sent_bytes);
    assert_eq!(health.closed, None);
}

fn many_parts_arrive_as_one_message(place: &Place) {
    let (near, far) = place.link();
    let whole = pattern(1, 1000);
    let parts: Vec<&[u8]> = whole.chunks(7).collect();
    near.send(&parts, place.soon()).unwrap();
    let mut buffer = [0; 1000];
    assert_eq!(far.recv(&mut buffer, place.soon()), Ok(1000));
    assert_eq!(&buffer[..], &whole[..]);
}

fn a_deadline_is_kept_and_does_no_harm(place: &Place) {
    let (near, far) = place.link();
    let mut buffer = [0; 64];
    assert_eq!(far.recv(&mut buffer, place.in_ms(10)), Err(RecvError::Deadline));
    assert_eq!(far.recv(&mut buffer, place.effects.clock.now()), Err(RecvError::Deadline));
    near.send(&[b"after"], place.soon()).unwrap();
    assert_eq!(far.recv(&mut buffer, place.soon()), Ok(5));
}

fn messages_that_are_too_long_are_refused_at_both_ends(place: &Place) {
    let (near, far) = place.link();
    let long = vec![0; near.message_bytes_max() + 1];
    let limit = near.message_bytes_max();
    assert_eq!(near.send(&[&long], place.soon()), Err(SendError::TooLong { bytes: limit + 1, limit }));
    // Longer than what the receiver is ready for, though not than what the link carries.
    near.send(&[&[7; 100]], place.soon()).unwrap();
    let Err(RecvError::Closed(CloseReason::Misbehaved(what))) = far.recv(&mut [0; 64], place.soon()) else { panic!("taken") };
    assert!(what.contains("100 bytes") && what.contains("64"), "{what}");
    assert!(matches!(near.recv(&mut [0; 64], place.soon()), Err(RecvError::Closed(CloseReason::Peer))));
}

fn a_link_that_nobody_receives_from_stops_its_sender(place: &Place) {
    let (near, far) = place.link();
    let message = pattern(5, 1024 * 1024);
    let mut taken = 0;
    loop {
        match near.send(&[&message], place.in_ms(100)) {
            Ok(()) => taken += 1,
            // Where part of a message has gone out, the link ends instead.
            Err(SendError::Deadline | SendError::Closed(CloseReason::Stalled)) => break,
            Err(other) => panic!("{other}"),
        }
        assert!(taken < 256, "256 MiB were taken for a peer that does not receive");
    }
    drop(far);
}

fn a_waiting_receiver_sees_its_peer_go(place: &Place) {
    let (near, far) = place.link();
    near.send(&[b"last words"], place.soon()).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let mut buffer = [0; 64];
            assert_eq!(far.recv(&mut buffer, place.soon()), Ok(10));
            far.recv(&mut buffer, place.soon())
        });
        drop(near);
        assert_eq!(waiting.join().unwrap(), Err(RecvError::Closed(CloseReason::Peer)));
    });
    assert_eq!(far.health().closed, Some(CloseReason::Peer));
    assert!(matches!(far.send(&[b"too late"], place.soon()), Err(SendError::Closed(_))));
}

fn a_blocked_sender_sees_its_peer_go(place: &Place) {
    let (near, far) = place.link();
    let message = pattern(5, 1024 * 1024);
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| {
            loop {
                if let Err(error) = near.send(&[&message], place.soon()) {
                    return error;
                }
            }
        });
        // One message is received, so that the sender is under way when the peer goes.
        far.recv(&mut vec![0; 2 * 1024 * 1024], place.soon()).unwrap();
        drop(far);
        assert_eq!(sending.join().unwrap(), SendError::Closed(CloseReason::Peer));
    });
}

fn a_message_that_is_cut_off_is_never_delivered(place: &Place) {
    let (near, far) = place.link();
    let message = pattern(5, 4 * 1024 * 1024);
    let closer = LinkCloser::new(&near);
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| {
            loop {
                if let Err(error) = near.send(&[&message], place.soon()) {
                    return error;
                }
            }
        });
        let mut buffer = vec![0; 4 * 1024 * 1024];
        assert_eq!(far.recv(&mut buffer, place.soon()), Ok(message.len()));
        closer.close();
        assert_eq!(sending.join().unwrap(), SendError::Closed(CloseReason::Local));
        loop {
            match far.recv(&mut buffer, place.soon()) {
                Ok(bytes) => assert!(buffer[..bytes] == message, "a torn message was delivered"),
                Err(error) => {
                    assert_eq!(error, RecvError::Closed(CloseReason::Peer));
                    break;
                }
            }
        }
    });
}

fn closing_from_another_thread_wakes_a_receiver(place: &Place) {
    let (near, _far) = place.link();
    let closer = LinkCloser::new(&near);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| near.recv(&mut [0; 64], place.soon()));
        closer.close();
        assert_eq!(waiting.join().unwrap(), Err(RecvError::Closed(CloseReason::Local)));
    });
}

fn a_wrong_secret_is_refused_and_harms_nobody(place: &Place) {
    let right = Ticket::random(&SystemRng);
    let wrong = Ticket::new(right.id(), [7; 32]);
    let (busy_near, busy_far) = place.link();
    let expected = place.far.expect(&right, place.options()).unwrap();
    let refusal = place.near.dial(&place.endpoint(), &wrong, place.options(), place.soon());
    assert!(matches!(refusal, Err(DialError::Refused { id, .. }) if id == right.id()), "{refusal:?}");
    let error = expected.accept(place.in_ms(1)).unwrap_err();
    assert_eq!(error, AcceptError::Deadline { id: right.id(), refused: 1 });
    // Neither the link that was waited for nor the one that stood is disturbed.
    place.near.dial(&place.endpoint(), &right, place.options(), place.soon()).unwrap();
    expected.accept(place.soon()).unwrap();
    busy_near.send(&[b"still here"], place.soon()).unwrap();
    assert_eq!(busy_far.recv(&mut [0; 64], place.soon()), Ok(10));
}

fn a_ticket_makes_one_link(place: &Place) {
    let ticket = Ticket::random(&SystemRng);
    let dial = || place.near.dial(&place.endpoint(), &ticket, place.options(), place.soon());
    assert!(matches!(dial(), Err(DialError::Refused { .. })), "nobody expects it yet");
    let expected = place.far.expect(&ticket, place.options()).unwrap();
    assert!(matches!(place.far.expect(&ticket, place.options()), Err(ExpectError::Duplicate { .. })));
    let _near = dial().unwrap();
    assert!(matches!(dial(), Err(DialError::Refused { .. })), "it is used");
    let _far = expected.accept(place.soon()).unwrap();
    assert!(matches!(expected.accept(place.soon()), Err(AcceptError::Used { .. })));
    drop(expected);
    let expected = place.far.expect(&ticket, place.options()).unwrap();
    drop(expected);
    assert!(matches!(dial(), Err(DialError::Refused { .. })), "it was forgotten");
}

fn waiting_for_a_peer_can_be_ended(place: &Place) {
    let ticket = Ticket::random(&SystemRng);
    let expected = place.far.expect(&ticket, place.options()).unwrap();
    let canceller = expected.canceller();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| expected.accept(place.soon()));
        canceller.cancel();
        assert!(matches!(waiting.join().unwrap(), Err(AcceptError::Cancelled { .. })));
    });
    let refusal = place.near.dial(&place.endpoint(), &ticket, place.options(), place.soon());
    assert!(matches!(refusal, Err(DialError::Refused { .. })));
}

fn shutting_down_ends_everything(place: &Place) {
    let (near, far) = place.link();
    let ticket = Ticket::random(&SystemRng);
    let expected = place.far.expect(&ticket, place.options()).unwrap();
    let endpoint = place.endpoint();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| expected.accept(place.soon()));
        let receiving = scope.spawn(|| near.recv(&mut [0; 64], place.soon()));
        place.far.shutdown();
        assert_eq!(waiting.join().unwrap().unwrap_err(), AcceptError::Stopped(place.far.kind()));
        assert_eq!(receiving.join().unwrap(), Err(RecvError::Closed(CloseReason::Peer)));
    });
    assert!(far.health().closed.is_some());
    assert!(place.near.dial(&endpoint, &ticket, place.options(), place.soon()).is_err());
    assert!(matches!(place.far.expect(&ticket, place.options()), Err(ExpectError::Stopped(_))));
}

fn channels_keep_order_and_carry_four_megabytes(place: &Place) {
    let options = ChannelOptions { slot_bytes: 4 * 1024 * 1024 - 64, slots: 3 };
    let (mut sender, mut receiver) = place.channel(options);
    let messages: Vec<Vec<u8>> =
        (0..12u64).map(|i| pattern(i, if i % 4 == 0 { options.slot_bytes as usize } else { i as usize * 1000 })).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for (i, message) in messages.iter().enumerate() {
                let (start, end) = message.split_at(message.len() / 2);
                sender.send_flagged(i as u8, 255 - i as u8, &[start, end], place.soon()).unwrap();
            }
            sender.flush(place.soon()).unwrap();
            assert_eq!(sender.unacknowledged(), 0);
        });
        for (i, message) in messages.iter().enumerate() {
            let received = receiver.recv(place.soon()).unwrap();
            assert_eq!((received.sequence(), received.kind(), received.flags()), (i as u64, i as u8, 255 - i as u8));
            assert!(received.payload() == &message[..], "message {i} differs");
            assert_eq!(received.payload().as_ptr() as usize % 64, 0);
        }
    });
}

fn both_directions_share_a_link(place: &Place) {
    let (near, far) = place.link();
    let options = ChannelOptions { slot_bytes: 256 * 1024, slots: 2 };
    let ends = [near, far].map(|link| channel::duplex(link, fence(1), options, &place.effects).unwrap());
    // Every end sends and receives at full speed at once: neither direction may wait for the other.
    let done = std::sync::Barrier::new(4);
    std::thread::scope(|scope| {
        for (side, (mut sender, mut receiver)) in ends.into_iter().enumerate() {
            let (place, done) = (&place, &done);
            let message = move |side: usize, i: u64| pattern(i + side as u64 * 100, 256 * 1024);
            scope.spawn(move || {
                for i in 0..40 {
                    sender.send(0, &[&message(side, i)], place.soon()).unwrap();
                }
                sender.flush(place.soon()).unwrap();
                done.wait();
            });
            scope.spawn(move || {
                for i in 0..40 {
                    assert!(receiver.recv(place.soon()).unwrap().payload() == &message(1 - side, i)[..]);
                }
                done.wait();
            });
        }
    });
}

fn a_slow_receiver_bounds_its_sender(place: &Place) {
    let (mut sender, mut receiver) = place.channel(SMALL);
    for i in 0..4u8 {
        sender.send(i, &[&[i]], place.soon()).unwrap();
    }
    assert_eq!(sender.send(4, &[&[4]], place.in_ms(50)), Err(channel::SendError::Deadline));
    assert_eq!(sender.unacknowledged(), 4);
    // As slots come back, more is granted.
    for i in 0..40u8 {
        assert_eq!(receiver.recv(place.soon()).unwrap().payload(), [i]);
        receiver.give_back();
        if i % 2 == 1 {
            sender.send(i + 3, &[&[i + 3]], place.soon()).unwrap();
            sender.send(i + 4, &[&[i + 4]], place.soon()).unwrap();
        }
    }
}

fn a_channel_refuses_what_does_not_fit_a_slot(place: &Place) {
    let (mut sender, mut receiver) = place.channel(SMALL);
    let long = [0; 65];
    assert_eq!(sender.send(0, &[&long], place.soon()), Err(channel::SendError::TooLong { bytes: 65, limit: 64 }));
    sender.send(0, &[&long[..64]], place.soon()).unwrap();
    assert_eq!(receiver.recv(place.soon()).unwrap().payload().len(), 64);
}

fn a_frame_that_announces_too_much_is_refused(place: &Place) {
    let (bare, mut receiver) = place.against_bare_link(SMALL);
    let header = FrameHeader { length: u32::MAX, ..data(0, fence(1), b"") };
    bare.send(&[&header.encode()], place.soon()).unwrap();
    let error = receiver.recv(place.soon()).unwrap_err();
    let too_long = FrameError::TooLong { bytes: u32::MAX, limit: 64 };
    assert_eq!(error, channel::RecvError::Broken(Broken::Frame(too_long)));
}

fn a_damaged_byte_is_seen(place: &Place) {
    for place_of_damage in [70, 3] {
        let (bare, mut receiver) = place.against_bare_link(SMALL);
        let payload = pattern(1, 32);
        let mut message = data(0, fence(1), &payload).encode().to_vec();
        message.extend_from_slice(&payload);
        message[place_of_damage] ^= 0x10;
        bare.send(&[&message], place.soon()).unwrap();
        let error = receiver.recv(place.soon()).unwrap_err();
        let channel::RecvError::Broken(Broken::Frame(error)) = error else { panic!("{error}") };
        let seen = match place_of_damage {
            70 => matches!(error, FrameError::PayloadCheck { sequence: 0, .. }),
            _ => matches!(error, FrameError::HeaderCheck { .. }),
        };
        assert!(seen, "{error}");
        // The sender learns of it: its link is gone.
        while bare.recv(&mut [0; 256], place.soon()).is_ok() {}
    }
}

fn holes_and_ungranted_frames_break_the_channel(place: &Place) {
    let (bare, mut receiver) = place.against_bare_link(SMALL);
    bare.send(&[&data(1, fence(1), b"x").encode(), b"x"], place.soon()).unwrap();
    let error = receiver.recv(place.soon()).unwrap_err();
    assert_eq!(error, channel::RecvError::Broken(Broken::Protocol(Violation::Gap { expected: 0, found: 1 })));

    let (bare, mut receiver) = place.against_bare_link(SMALL);
    for i in 0..5 {
        bare.send(&[&data(i, fence(1), b"x").encode(), b"x"], place.soon()).unwrap();
    }
    // Whoever sends more than was granted loses the link, not the receiver its memory.
    let mut buffer = [0; 256];
    while bare.recv(&mut buffer, place.soon()).is_ok() {}
    for _ in 0..4 {
        assert_eq!(receiver.recv(place.soon()).unwrap().payload(), b"x");
    }
    let error = receiver.recv(place.soon()).unwrap_err();
    assert_eq!(error, channel::RecvError::Broken(Broken::Protocol(Violation::Ungranted { found: 4, limit: 4 })));
}

fn old_terms_and_epochs_are_fenced(place: &Place) {
    let (bare, mut receiver) = place.against_bare_link(SMALL);
    let older_term = Fence { term: TermTag { counter: 2, node: 99 }, ..fence(9) };
    let elsewhere = Fence { instance: 78, ..fence(1) };
    for stale in [fence(0), older_term, elsewhere] {
        bare.send(&[&data(0, stale, b"old").encode(), b"old"], place.soon()).unwrap();
    }
    bare.send(&[&data(0, fence(1), b"now").encode(), b"now"], place.soon()).unwrap();
    assert_eq!(receiver.recv(place.soon()).unwrap().payload(), b"now");
    assert_eq!(receiver.counters().fenced, 3);

    bare.send(&[&data(0, fence(2), b"new").encode(), b"new"], place.soon()).unwrap();
    let error = receiver.recv(place.soon()).unwrap_err();
    assert_eq!(error, channel::RecvError::Ahead { armed: fence(1), theirs: fence(2) });
    assert!(receiver.rearm(fence(1)).is_err() && receiver.rearm(fence(0)).is_err());
    receiver.rearm(fence(2)).unwrap();
    bare.send(&[&data(1, fence(1), b"old").encode(), b"old"], place.soon()).unwrap();
    bare.send(&[&data(0, fence(2), b"new").encode(), b"new"], place.soon()).unwrap();
    assert_eq!(receiver.recv(place.soon()).unwrap().payload(), b"new");
    assert_eq!(receiver.counters().fenced, 4);
}

fn both_ends_move_to_a_new_epoch(place: &Place) {
    let (mut sender, mut receiver) = place.channel(SMALL);
    sender.send(0, &[b"first"], place.soon()).unwrap();
    assert_eq!(receiver.recv(place.soon()).unwrap().payload(), b"first");
    sender.send(0, &[b"never received"], place.soon()).unwrap();
    receiver.rearm(fence(2)).unwrap();
    // The sender is told as soon as it asks for anything.
    let ahead = loop {
        match sender.send(0, &[b"stale"], place.in_ms(1)) {
            Ok(()) | Err(channel::SendError::Deadline) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(ahead, channel::SendError::Ahead { armed: fence(1), theirs: fence(2) });
    sender.rearm(fence(2)).unwrap();
    sender.send(0, &[b"second"], place.soon()).unwrap();
    let received = receiver.recv(place.soon()).unwrap();
    assert_eq!((received.sequence(), received.payload()), (0, &b"second"[..]));
}

fn a_channel_moves_to_another_link_and_loses_nothing(place: &Place) {
    let (mut sender, mut receiver) = place.channel(SMALL);
    sender.send(0, &[b"0"], place.soon()).unwrap();
    assert_eq!(receiver.recv(place.soon()).unwrap().payload(), b"0");
    receiver.give_back();
    for i in 1..4u8 {
        sender.send(0, &[&[b'0' + i]], place.soon()).unwrap();
    }
    // The link dies with three messages unacknowledged, of which any number may have arrived.
    sender.closer().close();
    let (near, far) = place.link();
    std::thread::scope(|scope| {
        scope.spawn(|| receiver.relink(&far).unwrap());
        sender.relink(&near, place.soon()).unwrap();
    });
    sender.send(0, &[b"4"], place.soon()).unwrap();
    for i in 1..5u8 {
        let received = receiver.recv(place.soon()).unwrap();
        assert_eq!((received.sequence(), received.payload()), (u64::from(i), &[b'0' + i][..]));
    }
}

fn both_directions_move_to_another_link(place: &Place) {
    let (near, far) = place.link();
    let open = |link| channel::duplex(link, fence(1), SMALL, &place.effects).unwrap();
    let mut ends = [open(near), open(far)];
    for (sender, _) in &mut ends {
        sender.send(0, &[b"0"], place.soon()).unwrap();
        sender.send(0, &[b"1"], place.soon()).unwrap();
    }
    ends[0].0.closer().close();
    let (near, far) = place.link();
    std::thread::scope(|scope| {
        for ((sender, receiver), link) in ends.iter_mut().zip([near, far]) {
            scope.spawn(move || {
                receiver.relink(&link).unwrap();
                sender.relink(&link, place.soon()).unwrap();
                sender.send(0, &[b"2"], place.soon()).unwrap();
                for expected in [b"0", b"1", b"2"] {
                    assert_eq!(receiver.recv(place.soon()).unwrap().payload(), expected);
                }
                receiver.give_back();
                sender.flush(place.soon()).unwrap();
            });
        }
    });
}

fn closing_a_channel_wakes_both_ends(place: &Place) {
    let (mut sender, mut receiver) = place.channel(SMALL);
    let closer = receiver.closer();
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            loop {
                if let Err(error) = receiver.recv(place.soon()) {
                    return error;
                }
            }
        });
        let sending = scope.spawn(|| {
            loop {
                if let Err(error) = sender.send(0, &[b"x"], place.soon()) {
                    return error;
                }
            }
        });
        closer.close();
        assert_eq!(receiving.join().unwrap(), channel::RecvError::Broken(Broken::Link(CloseReason::Local)));
        assert_eq!(sending.join().unwrap(), channel::SendError::Broken(Broken::Link(CloseReason::Peer)));
    });
}

fn dropping_an_end_is_seen_by_the_other(place: &Place) {
    let (sender, mut receiver) = place.channel(SMALL);
    drop(sender);
    assert_eq!(receiver.recv(place.soon()).unwrap_err(), channel::RecvError::Broken(Broken::Link(CloseReason::Peer)));
    let (mut sender, receiver) = place.channel(SMALL);
    drop(receiver);
    let error = loop {
        if let Err(error) = sender.send(0, &[b"x"], place.soon()) {
            break error;
        }
    };
    assert_eq!(error, channel::SendError::Broken(Broken::Link(CloseReason::Peer)));
}

macro_rules! conformance {
    ($($provider:ident = $place:expr;)*) => { $(conformance!(@all any() $provider $place);)* };
    // For what not every machine has.
    (@ignored $($provider:ident = $place:expr;)*) => { $(conformance!(@all all() $provider $place);)* };
    (@all $ignored:meta $provider:ident $place:expr) => {
        conformance!(@one $ignored $provider $place;
            links_carry_whole_messages_both_ways many_parts_arrive_as_one_message a_deadline_is_kept_and_does_no_harm
            messages_that_are_too_long_are_refused_at_both_ends a_link_that_nobody_receives_from_stops_its_sender
            a_waiting_receiver_sees_its_peer_go a_blocked_sender_sees_its_peer_go a_message_that_is_cut_off_is_never_delivered
            closing_from_another_thread_wakes_a_receiver a_wrong_secret_is_refused_and_harms_nobody a_ticket_makes_one_link
            waiting_for_a_peer_can_be_ended shutting_down_ends_everything channels_keep_order_and_carry_four_megabytes
            both_directions_share_a_link a_slow_receiver_bounds_its_sender a_channel_refuses_what_does_not_fit_a_slot
            a_frame_that_announces_too_much_is_refused a_damaged_byte_is_seen holes_and_ungranted_frames_break_the_channel
            old_terms_and_epochs_are_fenced both_ends_move_to_a_new_epoch a_channel_moves_to_another_link_and_loses_nothing
            both_directions_move_to_another_link closing_a_channel_wakes_both_ends dropping_an_end_is_seen_by_the_other
        );
    };
    (@one $ignored:meta $provider:ident $place:expr; $($test:ident)*) => {
        mod $provider {
            use super::*;
            $(#[test] #[cfg_attr($ignored, ignore = "needs devices: run by .ci/verbs")] fn $test() { super::$test(&$place); })*
        }
    };
}

conformance! {
    tcp_v4 = tcp("127.0.0.1:0");
    tcp_v6 = tcp("[::1]:0");
    tcp_encrypted = tcp_with("127.0.0.1:0", Encryption::Always, 1);
    tcp_on_rails = tcp_with("127.0.0.1:0", Encryption::Never, 3);
    tcp_on_encrypted_rails = tcp_with("127.0.0.1:0", Encryption::Always, 2);
    in_memory = memory(Shape::default());
    in_memory_with_a_slow_wire = memory(Shape { latency: Duration::from_millis(1), bytes_per_second: Some(400_000_000) });
}

#[cfg(target_os = "linux")]
conformance! {
    shared_memory = shm(1 << 20);
    shared_memory_with_a_short_ring = shm(4096);
    strict_apple_verbs = strict_apple(16 * 1024);
    strict_apple_verbs_by_single_frames = strict_apple(4096);
}

#[cfg(target_os = "linux")]
conformance! {
    @ignored
    verbs_rc = soft_roce(Profile::Rc);
    verbs_uc = soft_roce(Profile::Uc);
}
