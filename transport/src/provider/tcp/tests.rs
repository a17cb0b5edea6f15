//! What only TCP has: strangers, recorded handshakes, byte streams that break anywhere, silence.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use super::{TcpOptions, TcpProvider};
use crate::Effects;
use crate::env::{Join, SystemRng};
use crate::link::{CloseReason, Link, LinkOptions, RecvError, SendError};
use crate::provider::handshake::{self, CHALLENGE_BYTES, HELLO_BYTES, VERDICT_BYTES};
use crate::provider::{DialError, Endpoint, Provider, Ticket};
use crate::testing::{effects, soon};

const OPTIONS: LinkOptions = LinkOptions::for_payload(4096);

/// On loopback, with the patience of a loaded machine unless a test has its own.
pub(super) fn provider(effects: &Effects, options: TcpOptions) -> TcpProvider {
    let usual = options.silence_max == TcpOptions::default().silence_max;
    let silence_max = if usual { Duration::from_secs(60) } else { options.silence_max };
    let options = TcpOptions { silence_max, ..options };
    TcpProvider::new(effects.clone(), TcpOptions { listen: vec!["127.0.0.1:0".parse().unwrap()], ..options }).unwrap()
}

/// Waits, so that a broken test fails instead of hanging.
fn connect(provider: &TcpProvider) -> TcpStream {
    let stream = TcpStream::connect(provider.listening()[0]).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

/// Says everything that a dialler says. Gives back the stream and what was said: hello, challenge, proof, verdict.
fn by_hand(provider: &TcpProvider, ticket: &Ticket) -> (TcpStream, [u8; HELLO_BYTES], [u8; 32], [u8; VERDICT_BYTES]) {
    let mut stream = connect(provider);
    let hello = handshake::hello(ticket, &[5; 32], OPTIONS);
    stream.write_all(&hello).unwrap();
    let mut challenge = [0; CHALLENGE_BYTES];
    stream.read_exact(&mut challenge).unwrap();
    let proof = handshake::proof(ticket, &hello, &challenge);
    stream.write_all(&proof).unwrap();
    let mut verdict = [0; VERDICT_BYTES];
    stream.read_exact(&mut verdict).unwrap();
    (stream, hello, proof, verdict)
}

/// A link and the bare socket at its other end.
fn against_bare_socket(effects: &Effects, provider: &TcpProvider) -> (Arc<dyn Link>, TcpStream) {
    let ticket = Ticket::random(&SystemRng);
    let expected = provider.expect(&ticket, OPTIONS).unwrap();
    let (stream, _, _, verdict) = by_hand(provider, &ticket);
    assert_eq!(verdict[0], 1);
    (expected.accept(soon(effects)).unwrap(), stream)
}

fn record(bytes: u32, kind: u8, body: &[u8]) -> Vec<u8> {
    let mut out = bytes.to_le_bytes().to_vec();
    out.extend_from_slice(&[kind, 0, 0, 0]);
    out.extend_from_slice(body);
    out
}

#[test]
fn a_recorded_handshake_does_not_work_again() {
    let effects = effects();
    let provider = provider(&effects, TcpOptions::default());
    let ticket = Ticket::random(&SystemRng);
    let expected = provider.expect(&ticket, OPTIONS).unwrap();
    let (_first, hello, proof, verdict) = by_hand(&provider, &ticket);
    assert_eq!(verdict[0], 1);
    expected.accept(soon(&effects)).unwrap();
    drop(expected);
    // Even if the same ticket is expected once more, another nonce is asked about.
    let _expected = provider.expect(&ticket, OPTIONS).unwrap();
    let mut replay = connect(&provider);
    replay.write_all(&hello).unwrap();
    replay.write_all(&proof).unwrap();
    let mut answer = Vec::new();
    replay.read_to_end(&mut answer).unwrap();
    assert_eq!(answer[CHALLENGE_BYTES..], handshake::REFUSAL);
}

#[test]
fn a_stranger_gets_the_same_answer_for_known_and_unknown_tickets() {
    let effects = effects();
    let provider = provider(&effects, TcpOptions::default());
    let ticket = Ticket::random(&SystemRng);
    let _expected = provider.expect(&ticket, OPTIONS).unwrap();
    let answers = [ticket.id(), ticket.id() ^ 1].map(|id| {
        let mut stream = connect(&provider);
        stream.write_all(&handshake::hello(&Ticket::new(id, [1; 32]), &[5; 32], OPTIONS)).unwrap();
        stream.write_all(&[9; 32]).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        answer
    });
    // All but the nonce.
    assert_eq!(answers[0][32..], answers[1][32..]);
    assert_eq!(answers[0].len(), answers[1].len());
}

#[test]
fn other_protocols_get_no_answer() {
    let effects = effects();
    let provider = provider(&effects, TcpOptions::default());
    let mut stream = connect(&provider);
    stream.write_all(&[b'G'; HELLO_BYTES]).unwrap();
    let mut answer = Vec::new();
    // Closed or reset, but nothing said.
    drop(stream.read_to_end(&mut answer));
    assert_eq!(answer, b"");
}

#[test]
fn silent_strangers_keep_nobody_out_and_are_put_out() {
    let effects = effects();
    let provider = provider(&effects, TcpOptions { handshake_max: Duration::from_secs(1), ..TcpOptions::default() });
    let mut strangers: Vec<TcpStream> = (0..100).map(|_| connect(&provider)).collect();
    let ticket = Ticket::random(&SystemRng);
    let expected = provider.expect(&ticket, OPTIONS).unwrap();
    provider.dial(&provider.endpoints()[0], &ticket, OPTIONS, soon(&effects)).unwrap();
    expected.accept(soon(&effects)).unwrap();
    for stranger in &mut strangers {
        assert!(matches!(stranger.read(&mut [0; 8]), Ok(0) | Err(_)));
    }
}

#[test]
fn an_acceptor_without_the_secret_is_found_out() {
    let effects = effects();
    let provider = provider(&effects, TcpOptions::default());
    let impostor = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = Endpoint::Tcp(impostor.local_addr().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = impostor.accept().unwrap();
            stream.read_exact(&mut [0; HELLO_BYTES]).unwrap();
            stream.write_all(&[3; CHALLENGE_BYTES]).unwrap();
            let mut proof = [0; 32];
            stream.read_exact(&mut proof).unwrap();
            let mut verdict = vec![1, 0, 0, 0, 0, 0, 1, 0];
            verdict.extend_from_slice(&proof);
            stream.write_all(&verdict).unwrap();
        });
        let dialled = provider.dial(&endpoint, &Ticket::random(&SystemRng), OPTIONS, soon(&effects));
        assert!(matches!(dialled, Err(DialError::Impostor { .. })), "{dialled:?}");
    });
}

#[test]
fn a_dial_ends_by_its_deadline() {
    let effects = effects();
    let provider = provider(&effects, TcpOptions::default());
    // It takes the connection, by the system's backlog, and says nothing.
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = Endpoint::Tcp(mute.local_addr().unwrap());
    let ticket = Ticket::random(&SystemRng);
    let dialled = provider.dial(&endpoint, &ticket, OPTIONS, effects.after(Duration::from_millis(30)));
    assert!(matches!(dialled, Err(DialError::Deadline { .. })), "{dialled:?}");
    drop(mute);
    let dialled = provider.dial(&endpoint, &ticket, OPTIONS, soon(&effects));
    assert!(matches!(dialled, Err(DialError::Nobody { .. })), "{dialled:?}");
}

#[test]
fn a_peer_that_dies_inside_a_message_is_seen() {
    let effects = effects();
    let provider = provider(&effects, TcpOptions::default());
    for cut in [3, 8, 11] {
        let (link, mut stream) = against_bare_socket(&effects, &provider);
        stream.write_all(&record(100, 1, &[7; 50])[..cut]).unwrap();
        drop(stream);
        assert_eq!(link.recv(&mut [0; 4096], soon(&effects)), Err(RecvError::Closed(CloseReason::Peer)), "cut after {cut}");
    }
}

#[test]
fn absurd_records_end_the_link_before_they_are_read() {
    let effects = effects();
    let provider = provider(&effects, TcpOptions::default());
    let absurd = [
        (record(u32::MAX, 1, b""), "4294967295 bytes"),
        (record(4096 + 65, 1, b""), "at most 4160"),
        (record(4, 9, b"what"), "kind 9"),
        (record(1 << 30, 2, b""), "kind 2"),
        (vec![1, 0, 0, 0, 1, 1, 0, 0, 0], "reserved"),
    ];
    for (bytes, words) in absurd {
        let (link, mut stream) = against_bare_socket(&effects, &provider);
        stream.write_all(&bytes).unwrap();
        let error = link.recv(&mut [0; 8192], soon(&effects)).unwrap_err();
        let RecvError::Closed(CloseReason::Misbehaved(what)) = &error else { panic!("{error}") };
        assert!(what.contains(words), "{what}");
        assert!(matches!(link.send(&[b"x"], soon(&effects)), Err(SendError::Closed(CloseReason::Misbehaved(_)))));
    }
}

#[test]
fn messages_are_found_however_the_stream_is_cut() {
    let effects = effects();
    // An echo gives way to whatever is being sent, so nothing else is.
    let provider = provider(&effects, TcpOptions { keepalive_interval: Duration::from_secs(3600), ..TcpOptions::default() });
    let (link, mut stream) = against_bare_socket(&effects, &provider);
    let mut bytes = Vec::new();
    for i in 0..20u8 {
        bytes.extend(record(u32::from(i) * 30, 1, &vec![i; usize::from(i) * 30]));
        bytes.extend(record(8, 2, &[i; 8]));
    }
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for piece in bytes.chunks(13) {
                stream.write_all(piece).unwrap();
            }
            // Every ping is echoed with its own stamp, apart from the provider's one keep-alive at the start.
            let mut echoed = 0;
            while echoed < 20u8 {
                let mut note = [0; 16];
                stream.read_exact(&mut note).unwrap();
                if note[4] == 3 {
                    assert_eq!(note[8..], [echoed; 8]);
                    echoed += 1;
                }
            }
        });
        let mut buffer = [0; 4096];
        for i in 0..20u8 {
            let got = link.recv(&mut buffer, soon(&effects)).unwrap();
            assert_eq!(&buffer[..got], vec![i; usize::from(i) * 30]);
        }
        // Answers the last ping, which follows the last message; having heard that, the peer goes.
        assert_eq!(link.recv(&mut buffer, soon(&effects)), Err(RecvError::Closed(CloseReason::Peer)));
    });
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(48))]
    #[test]
    fn no_bytes_make_a_link_panic(
        records in proptest::collection::vec(
            (0u32..80, 0u8..5, proptest::collection::vec(proptest::prelude::any::<u8>(), 0..80), proptest::prelude::any::<bool>()),
            0..12,
        ),
    ) {
        let effects = effects();
        let provider = provider(&effects, TcpOptions::default());
        let (link, mut stream) = against_bare_socket(&effects, &provider);
        for (bytes, kind, mut body, honest) in records {
            let bytes = if honest { body.len() as u32 } else { bytes };
            if kind > 3 {
                body.clear();
            }
            drop(stream.write_all(&record(bytes, kind, &body)));
        }
        drop(stream);
        while let Ok(bytes) = link.recv(&mut [0; 64], soon(&effects)) {
            proptest::prop_assert!(bytes <= 64);
        }
        proptest::prop_assert!(link.health().closed.is_some());
    }
}

#[test]
fn silence_is_noticed_with_nothing_in_flight() {
    let effects = effects();
    let quick =
        TcpOptions { keepalive_interval: Duration::from_millis(20), silence_max: Duration::from_millis(150), ..TcpOptions::default() };
    let provider = provider(&effects, quick);
    // The bare socket never says anything, as if its cable had been cut.
    let (link, _stream) = against_bare_socket(&effects, &provider);
    let error = link.recv(&mut [0; 64], soon(&effects)).unwrap_err();
    assert!(matches!(error, RecvError::Closed(CloseReason::Silent { silence_ms: 150.. })), "{error}");
}

#[test]
fn silence_frees_a_blocked_sender() {
    let effects = effects();
    let quick = TcpOptions { silence_max: Duration::from_millis(300), ..TcpOptions::default() };
    let provider = provider(&effects, quick);
    let (link, _stream) = against_bare_socket(&effects, &provider);
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| {
            loop {
                if let Err(error) = link.send(&[&[7; 4096]], soon(&effects)) {
                    return error;
                }
            }
        });
        let received = link.recv(&mut [0; 64], soon(&effects));
        assert!(matches!(received, Err(RecvError::Closed(CloseReason::Silent { .. }))), "{received:?}");
        let sent = sending.join().unwrap();
        assert!(matches!(sent, SendError::Closed(CloseReason::Silent { .. })), "{sent}");
    });
}

#[test]
fn keep_alives_hold_an_idle_link_and_measure_it() {
    let effects = effects();
    let quick = TcpOptions { keepalive_interval: Duration::from_millis(10), ..TcpOptions::default() };
    let (near, far) = (provider(&effects, quick.clone()), provider(&effects, quick));
    let ticket = Ticket::random(&SystemRng);
    let expected = far.expect(&ticket, OPTIONS).unwrap();
    let near_link = near.dial(&far.endpoints()[0], &ticket, OPTIONS, soon(&effects)).unwrap();
    let far_link = expected.accept(soon(&effects)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| far_link.recv(&mut [0; 64], soon(&effects)));
        while near_link.health().rtt.is_none() {
            assert_eq!(near_link.recv(&mut [0; 64], effects.after(Duration::from_millis(20))), Err(RecvError::Deadline));
        }
        near_link.close(CloseReason::Local);
    });
}

#[test]
fn a_port_is_free_again_after_shutdown() {
    let effects = effects();
    let first = provider(&effects, TcpOptions::default());
    let address: SocketAddr = first.listening()[0];
    first.shutdown();
    assert!(TcpStream::connect(address).is_err());
    let again = TcpOptions { listen: vec![address], ..TcpOptions::default() };
    let second = TcpProvider::new(effects.clone(), again).unwrap();
    assert_eq!(second.listening(), [address]);
}

#[test]
fn the_default_listens_everywhere_and_says_where() {
    let effects = effects();
    let provider = TcpProvider::new(effects.clone(), TcpOptions::default()).unwrap();
    assert!(!provider.endpoints().is_empty());
    let ticket = Ticket::random(&SystemRng);
    let expected = provider.expect(&ticket, OPTIONS).unwrap();
    let port = provider.listening()[0].port();
    let endpoint = Endpoint::Tcp(SocketAddr::from(([127, 0, 0, 1], port)));
    let _link = provider.dial(&endpoint, &ticket, OPTIONS, soon(&effects)).unwrap();
    expected.accept(soon(&effects)).unwrap();
}

#[test]
fn a_busy_address_is_named() {
    let effects = effects();
    let first = provider(&effects, TcpOptions::default());
    let taken = TcpOptions { listen: first.listening().to_vec(), ..TcpOptions::default() };
    let error = TcpProvider::new(effects.clone(), taken).unwrap_err();
    assert!(error.to_string().contains(&first.listening()[0].to_string()), "{error}");
}

/// The other process of [`two_processes_exchange_tensors`]: it is this test's own program, started again.
const CHILD: &str = "SHOAL_TRANSPORT_TEST_CHILD";

#[test]
fn two_processes_exchange_tensors() {
    use crate::channel::{self, ChannelOptions};
    use crate::frame::Fence;

    let effects = effects();
    let ticket = Ticket::new(4711, [42; 32]);
    let options = ChannelOptions { slot_bytes: 1024 * 1024, slots: 3 };
    let link_options = LinkOptions::for_payload(options.slot_bytes);
    if let Ok(address) = std::env::var(CHILD) {
        let provider = provider(&effects, TcpOptions::default());
        let endpoint = Endpoint::Tcp(address.parse().unwrap());
        let link = provider.dial(&endpoint, &ticket, link_options, soon(&effects)).unwrap();
        let (mut sender, mut receiver) = channel::duplex(link, Fence::default(), options, &effects).unwrap();
        loop {
            // Echoes until it is killed.
            let received = receiver.recv(soon(&effects)).unwrap();
            let (kind, payload) = (received.kind(), received.payload().to_vec());
            sender.send(kind, &[&payload], soon(&effects)).unwrap();
        }
    }
    let provider = provider(&effects, TcpOptions::default());
    let expected = provider.expect(&ticket, link_options).unwrap();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "provider::tcp::tests::two_processes_exchange_tensors", "--nocapture"])
        .env(CHILD, provider.listening()[0].to_string())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let link = expected.accept(soon(&effects)).unwrap();
    let (mut sender, mut receiver) = channel::duplex(link, Fence::default(), options, &effects).unwrap();
    for i in 0..20u8 {
        let message = vec![i; usize::from(i) * 50_000];
        sender.send(i, &[&message], soon(&effects)).unwrap();
        let received = receiver.recv(soon(&effects)).unwrap();
        assert_eq!(received.kind(), i);
        assert!(received.payload() == &message[..]);
    }
    child.kill().unwrap();
    let error = receiver.recv(soon(&effects)).unwrap_err();
    assert_eq!(error, channel::RecvError::Broken(channel::Broken::Link(CloseReason::Peer)));
    child.wait().unwrap();
}

#[test]
fn a_thread_that_cannot_be_started_is_no_half_provider() {
    #[derive(Debug)]
    struct OneThread(std::sync::atomic::AtomicBool);
    impl crate::env::Spawner for OneThread {
        fn task(&self, _: &'static str, _: crate::env::BoxFuture<'static, ()>) {}
        fn thread(&self, name: String, body: Box<dyn FnOnce() + Send>) -> std::io::Result<Box<dyn Join>> {
            if self.0.swap(true, std::sync::atomic::Ordering::SeqCst) {
                return Err(std::io::Error::other("no more threads"));
            }
            effects().spawner.thread(name, body)
        }
    }
    let effects = Effects { spawner: Arc::new(OneThread(false.into())), ..effects() };
    let error = TcpProvider::new(effects, TcpOptions::default()).unwrap_err();
    assert!(error.to_string().contains("no more threads"), "{error}");
}
