//! Encrypted links against somebody on the way, and against ends that do not agree.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::proxy::{Proxy, Way};
use super::read::READ_AHEAD_BYTES;
use super::record::{MESSAGE, PIECE_BYTES, Prefix};
use super::seal::{Cipher, Seal};
use super::terms::Said;
use super::tests::provider;
use super::{Encryption, TcpOptions, TcpProvider};
use crate::Effects;
use crate::env::{Instant, SystemRng};
use crate::link::{CloseReason, Link, LinkOptions, RecvError};
use crate::provider::handshake::{self, CHALLENGE_BYTES, HELLO_BYTES, Offer, PROOF_BYTES, VERDICT_BYTES, Wish};
use crate::provider::{AcceptError, DialError, Endpoint, Provider, Ticket};
use crate::testing::{effects, soon};

const OPTIONS: LinkOptions = LinkOptions::for_payload(200_000);

fn provider_that(effects: &Effects, encryption: Encryption) -> TcpProvider {
    provider(effects, TcpOptions { encryption, keepalive_interval: Duration::from_secs(3600), ..TcpOptions::default() })
}

/// An encrypted link, and at its other end a bare socket with what seals its records and what opens the link's.
fn against_bare_socket(effects: &Effects, provider: &TcpProvider, slow_aes: bool) -> (Arc<dyn Link>, TcpStream, Seal, Seal) {
    let ticket = Ticket::random(&SystemRng);
    let expected = provider.expect(&ticket, OPTIONS).unwrap();
    let mut stream = TcpStream::connect(provider.listening()[0]).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let hello = handshake::hello(&ticket, &[5; 32], Offer { sealing: Wish::Demands, slow_aes, ..OPTIONS.into() });
    stream.write_all(&hello).unwrap();
    let mut challenge = [0; CHALLENGE_BYTES];
    stream.read_exact(&mut challenge).unwrap();
    let proof = handshake::proof(&ticket, &hello, &challenge);
    stream.write_all(&proof).unwrap();
    let mut verdict = [0; VERDICT_BYTES];
    stream.read_exact(&mut verdict).unwrap();
    let handshake::Answer::Welcome(theirs) = handshake::read_answer(&ticket, &hello, &challenge, &proof, &verdict) else {
        panic!("{verdict:?}")
    };
    let cipher = if slow_aes || theirs.slow_aes { Cipher::ChaCha20Poly1305 } else { Cipher::Aes256Gcm };
    let said = Said { ticket: &ticket, hello: &hello, challenge: &challenge, proof: &proof };
    let [ours, its] = said.seals(cipher);
    (expected.accept(soon(effects)).unwrap(), stream, ours, its)
}

fn sealed(seal: &mut Seal, text: &[u8]) -> Vec<u8> {
    let prefix = Prefix { bytes: text.len() as u32, kind: MESSAGE }.encode();
    let mut out = prefix.to_vec();
    for piece in text.chunks(PIECE_BYTES).chain(text.is_empty().then_some(&[][..])) {
        let mut piece = piece.to_vec();
        let tag = seal.seal(&prefix, &mut piece).unwrap();
        seal.advance();
        out.extend_from_slice(&piece);
        out.extend_from_slice(&tag);
    }
    out
}

#[test]
fn encrypted_messages_of_all_lengths_are_what_the_page_says() {
    let effects = effects();
    let provider = provider_that(&effects, Encryption::Auto);
    for slow_aes in [false, true] {
        let (link, mut stream, mut ours, mut its) = against_bare_socket(&effects, &provider, slow_aes);
        let mut buffer = vec![0; 200_064];
        for bytes in [0, 1, 100, READ_AHEAD_BYTES, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES, 200_000] {
            let text: Vec<u8> = (0..bytes).map(|i| (i * 7 / 3) as u8).collect();
            let there = sealed(&mut ours, &text);
            let mut writing = stream.try_clone().unwrap();
            std::thread::scope(|scope| {
                scope.spawn(move || writing.write_all(&there).unwrap());
                let got = link.recv(&mut buffer, soon(&effects)).unwrap();
                assert!(buffer[..got] == text, "{bytes} bytes came as {got} others");
            });
            let (head, tail) = text.split_at(bytes / 3);
            let expected = sealed(&mut its, &text);
            std::thread::scope(|scope| {
                scope.spawn(|| link.send(&[head, &[], tail], soon(&effects)).unwrap());
                let mut got = vec![0; expected.len()];
                stream.read_exact(&mut got).unwrap();
                assert!(got == expected, "{bytes} bytes");
            });
        }
    }
}

#[test]
fn what_is_done_to_encrypted_records_ends_the_link() {
    let effects = effects();
    let provider = provider_that(&effects, Encryption::Always);
    // Whole records, with what was done to them, and how many messages arrive before that.
    type Harm = fn(&mut Vec<Vec<u8>>);
    let harms: [(&str, usize, Harm); 10] = [
        ("nothing", 4, |_| ()),
        ("a byte of the text", 1, |records| records[1][10] ^= 1),
        ("a byte of a tag", 2, |records| *records[2].last_mut().unwrap() ^= 1),
        ("a byte of the second piece", 3, |records| records[3][PIECE_BYTES + 100] ^= 1),
        ("the length, less", 1, |records| records[1][0] -= 1),
        ("the length, more", 1, |records| records[1][0] += 1),
        ("the kind", 1, |records| records[1][4] = 2),
        ("repeated", 2, |records| records[2] = records[1].clone()),
        ("swapped", 1, |records| records.swap(1, 2)),
        ("left out", 1, |records| drop(records.remove(1))),
    ];
    for (what, arrive, harm) in harms {
        let (link, mut stream, mut ours, _) = against_bare_socket(&effects, &provider, false);
        let texts = [&b"first"[..], b"second", b"third one", &[7; PIECE_BYTES + 5000]];
        let mut records: Vec<_> = texts.iter().map(|text| sealed(&mut ours, text)).collect();
        harm(&mut records);
        stream.write_all(&records.concat()).unwrap();
        drop(stream);
        let mut buffer = vec![0; 200_064];
        for text in &texts[..arrive] {
            let got = link.recv(&mut buffer, soon(&effects)).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(&buffer[..got] == *text, "{what}");
        }
        let RecvError::Closed(reason) = link.recv(&mut buffer, soon(&effects)).unwrap_err() else { panic!("{what}") };
        if arrive == 4 {
            assert_eq!(reason, CloseReason::Peer);
        } else {
            let CloseReason::Misbehaved(text) = &reason else { panic!("{what}: {reason}") };
            assert!(text.contains("damaged, forged, repeated") || text.contains("kind 2"), "{what}: {text}");
        }
        assert!(link.health().closed.is_some());
    }
}

#[test]
fn a_cut_record_is_never_delivered() {
    let effects = effects();
    let provider = provider_that(&effects, Encryption::Always);
    for cut in [1, 8, 9, 17, 28] {
        let (link, mut stream, mut ours, _) = against_bare_socket(&effects, &provider, false);
        let record = sealed(&mut ours, b"words");
        assert_eq!(record.len(), 29);
        stream.write_all(&record[..cut]).unwrap();
        drop(stream);
        assert_eq!(link.recv(&mut [0; 64], soon(&effects)), Err(RecvError::Closed(CloseReason::Peer)), "cut after {cut}");
    }
}

#[test]
fn records_of_another_secret_open_nothing() {
    let effects = effects();
    let provider = provider_that(&effects, Encryption::Always);
    let (_other_link, _other, mut others, _) = against_bare_socket(&effects, &provider, false);
    for reflect in [false, true] {
        let (link, mut stream, _, mut reflected) = against_bare_socket(&effects, &provider, false);
        let seal = if reflect { &mut reflected } else { &mut others };
        stream.write_all(&sealed(seal, b"words")).unwrap();
        assert!(matches!(link.recv(&mut [0; 64], soon(&effects)), Err(RecvError::Closed(CloseReason::Misbehaved(_)))));
    }
}

/// A link that `near` dials and `far` accepts, by a way that changes what it is told to.
fn through(effects: &Effects, [near, far]: [&TcpProvider; 2], proxy: &Proxy, deadline: Instant) -> [Result<Arc<dyn Link>, String>; 2] {
    let ticket = Ticket::random(&SystemRng);
    let expected = far.expect(&ticket, OPTIONS).unwrap();
    let dialled = near.dial(&Endpoint::Tcp(proxy.address()), &ticket, OPTIONS, deadline);
    let accepted = expected.accept(if dialled.is_ok() { soon(effects) } else { effects.clock.now() });
    [dialled.map_err(|error| format!("{error:?}")), accepted.map_err(|error| format!("{error:?}"))]
}

#[test]
fn either_end_that_demands_encryption_gets_it() {
    let effects = effects();
    let text = b"nobody else reads this";
    for (ends, encrypted) in [
        ([Encryption::Auto, Encryption::Auto], false),
        ([Encryption::Always, Encryption::Auto], true),
        ([Encryption::Auto, Encryption::Always], true),
        ([Encryption::Never, Encryption::Auto], false),
        ([Encryption::Never, Encryption::Never], false),
    ] {
        let [near, far] = ends.map(|encryption| provider_that(&effects, encryption));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let seeing = Arc::clone(&seen);
        let proxy = Proxy::changing(far.listening()[0], Box::new(move |_, _, bytes| seeing.lock().unwrap().extend_from_slice(bytes)));
        let [near_link, far_link] = through(&effects, [&near, &far], &proxy, soon(&effects)).map(Result::unwrap);
        for (from, to) in [(&near_link, &far_link), (&far_link, &near_link)] {
            let mut buffer = [0; 64];
            from.send(&[text], soon(&effects)).unwrap();
            let got = to.recv(&mut buffer, soon(&effects)).unwrap();
            assert_eq!(&buffer[..got], text);
        }
        let seen = seen.lock().unwrap();
        let readable = seen.windows(text.len()).filter(|window| window == text).count();
        assert_eq!(readable, if encrypted { 0 } else { 2 }, "{ends:?}");
        assert!(format!("{near_link:?}").contains(&format!("sealed: {encrypted}")));
    }
}

#[test]
fn ends_that_disagree_about_encryption_are_both_told() {
    let effects = effects();
    for ends in [[Encryption::Always, Encryption::Never], [Encryption::Never, Encryption::Always]] {
        let [near, far] = ends.map(|encryption| provider_that(&effects, encryption));
        let ticket = Ticket::random(&SystemRng);
        let expected = far.expect(&ticket, OPTIONS).unwrap();
        let dialled = near.dial(&far.endpoints()[0], &ticket, OPTIONS, soon(&effects));
        let Err(error @ DialError::Encryption { .. }) = dialled else { panic!("{dialled:?}") };
        assert!(error.to_string().contains("one end demands an encrypted link"), "{error}");
        // At once, not at the deadline; and whoever asks again is told again.
        for _ in 0..2 {
            assert_eq!(expected.accept(soon(&effects)).unwrap_err(), AcceptError::Encryption { id: ticket.id() });
        }
    }
}

/// Every bit that says something about encryption or rails is changed on the way: there is no link, and none that is weaker.
#[test]
fn nobody_on_the_way_talks_an_end_out_of_encryption() {
    let effects = effects();
    let places = (60..64).map(|at| (Way::There, at)).chain((CHALLENGE_BYTES..CHALLENGE_BYTES + 4).map(|at| (Way::Back, at)));
    for ends in [[Encryption::Always, Encryption::Auto], [Encryption::Auto, Encryption::Always]] {
        let [near, far] = ends.map(|encryption| provider_that(&effects, encryption));
        for (way, at) in places.clone() {
            for bit in [1u8, 2] {
                let flip = move |going: Way, before: usize, bytes: &mut Vec<u8>| {
                    if going == way && (before..before + bytes.len()).contains(&at) {
                        bytes[at - before] ^= bit;
                    }
                };
                let proxy = Proxy::changing(far.listening()[0], Box::new(flip));
                // Where the hello is none any more, the dialler tries again until its deadline.
                let [dialled, _accepted] = through(&effects, [&near, &far], &proxy, effects.after(Duration::from_millis(150)));
                // The acceptor may have made its end before the dialler found out; it ends, and no byte was sent on it.
                assert!(dialled.is_err(), "{way:?} {at} {bit}");
            }
        }
    }
    assert_eq!(HELLO_BYTES + PROOF_BYTES, 96);
}

#[test]
fn an_encrypted_link_survives_deadlines_that_take_nothing() {
    let effects = effects();
    let provider = provider_that(&effects, Encryption::Always);
    let (link, mut stream, _, mut its) = against_bare_socket(&effects, &provider, false);
    // Fills the sockets until nothing is taken any more, at a boundary or in the middle of a record.
    let mut sent = Vec::new();
    for i in 0.. {
        let text = [i as u8; 100];
        match link.send(&[&text], effects.after(Duration::from_millis(20))) {
            Ok(()) => sent.push(text),
            Err(crate::link::SendError::Deadline) => break,
            Err(other) => panic!("{other}"),
        }
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for text in &sent {
                let expected = sealed(&mut its, text);
                let mut got = vec![0; expected.len()];
                stream.read_exact(&mut got).unwrap();
                assert_eq!(got, expected);
            }
            let mut last = vec![0; 29];
            stream.read_exact(&mut last).unwrap();
            assert_eq!(last, sealed(&mut its, b"later"));
        });
        link.send(&[b"later"], soon(&effects)).unwrap();
    });
}
