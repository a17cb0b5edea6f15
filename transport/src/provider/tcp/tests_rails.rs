//! Links of several connections.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use super::link::TcpLink;
use super::rails::RAILS_MAX;
use super::record::PIECE_BYTES;
use super::terms::Said;
use super::tests::provider;
use super::{Encryption, TcpOptions, TcpProvider};
use crate::Effects;
use crate::env::SystemRng;
use crate::link::{CloseReason, Link, LinkOptions, RecvError};
use crate::provider::handshake::{self, CHALLENGE_BYTES, HELLO_BYTES, Offer, PROOF_BYTES, VERDICT_BYTES};
use crate::provider::{Provider, Ticket};
use crate::testing::{effects, soon};

const OPTIONS: LinkOptions = LinkOptions::for_payload(1 << 20);

fn with_rails(effects: &Effects, rails: u8, handshake_max: Duration) -> TcpProvider {
    provider(effects, TcpOptions { rails, encryption: Encryption::Never, handshake_max, ..TcpOptions::default() })
}

fn link(effects: &Effects, [near, far]: [&TcpProvider; 2]) -> (Arc<TcpLink>, Arc<dyn Link>) {
    let ticket = Ticket::random(&SystemRng);
    let expected = far.expect(&ticket, OPTIONS).unwrap();
    let near = near.dial_address(far.listening()[0], &ticket, OPTIONS, soon(effects)).unwrap();
    (near, expected.accept(soon(effects)).unwrap())
}

#[test]
fn a_link_has_as_many_rails_as_both_ends_want() {
    let effects = effects();
    let patience = Duration::from_secs(60);
    for (near, far, agreed) in [(1, 1, 1), (0, 3, 1), (3, 0, 1), (4, 2, 2), (2, 4, 2), (u8::MAX, u8::MAX, RAILS_MAX)] {
        let [near, far] = [near, far].map(|rails| with_rails(&effects, rails, patience));
        let (near, far) = link(&effects, [&near, &far]);
        for text in [format!("{near:?}"), format!("{far:?}")] {
            assert!(text.contains(&format!("rails: {agreed},")), "{text}");
        }
    }
}

#[test]
fn a_rail_that_dies_ends_the_link() {
    let effects = effects();
    let [near, far] = [3, 3].map(|rails| with_rails(&effects, rails, Duration::from_secs(60)));
    for rail in 0..3 {
        let (near, far) = link(&effects, [&near, &far]);
        let message = vec![3; 3 * PIECE_BYTES];
        let mut buffer = vec![0; message.len()];
        std::thread::scope(|scope| {
            let sending = scope.spawn(|| near.send(&[&message], soon(&effects)));
            assert_eq!(far.recv(&mut buffer, soon(&effects)), Ok(message.len()));
            sending.join().unwrap().unwrap();
        });
        near.rail(rail).shutdown(Shutdown::Write).unwrap();
        let received = std::thread::scope(|scope| {
            scope.spawn(|| drop(near.send(&[&message], soon(&effects))));
            far.recv(&mut buffer, soon(&effects))
        });
        assert_eq!(received, Err(RecvError::Closed(CloseReason::Peer)), "rail {rail}");
        // All of it ends.
        assert!(matches!(near.recv(&mut buffer, soon(&effects)), Err(RecvError::Closed(CloseReason::Peer))));
    }
}

/// What a dialler says and hears on one connection.
struct ByHand {
    stream: TcpStream,
    hello: [u8; HELLO_BYTES],
    challenge: [u8; CHALLENGE_BYTES],
    proof: [u8; PROOF_BYTES],
    verdict: [u8; VERDICT_BYTES],
}

fn by_hand(far: &TcpProvider, ticket: &Ticket, further_rails: u8) -> ByHand {
    let mut stream = TcpStream::connect(far.listening()[0]).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let hello = handshake::hello(ticket, &[5; 32], Offer { further_rails, ..OPTIONS.into() });
    stream.write_all(&hello).unwrap();
    let mut challenge = [0; CHALLENGE_BYTES];
    stream.read_exact(&mut challenge).unwrap();
    let proof = handshake::proof(ticket, &hello, &challenge);
    stream.write_all(&proof).unwrap();
    let mut verdict = [0; VERDICT_BYTES];
    stream.read_exact(&mut verdict).unwrap();
    ByHand { stream, hello, challenge, proof, verdict }
}

impl ByHand {
    /// The tickets of the further rails, once their addresses have been heard.
    fn further(&mut self, ticket: &Ticket) -> Vec<Ticket> {
        let said = Said { ticket, hello: &self.hello, challenge: &self.challenge, proof: &self.proof };
        let further = said.further(self.verdict[2]);
        let mut list = vec![0; further.list_bytes()];
        self.stream.read_exact(&mut list).unwrap();
        assert!(further.read_list(&list).is_some());
        further.tickets()
    }
}

#[test]
fn messages_are_spread_as_the_page_says() {
    let effects = effects();
    let far = with_rails(&effects, 2, Duration::from_secs(60));
    let ticket = Ticket::random(&SystemRng);
    let expected = far.expect(&ticket, OPTIONS).unwrap();
    let mut first = by_hand(&far, &ticket, 7);
    assert_eq!(first.verdict[..3], [1, first.verdict[1], 1]);
    let tickets = first.further(&ticket);
    let second = by_hand(&far, &tickets[0], 0);
    assert_eq!(second.verdict[0], 1);
    let link = expected.accept(soon(&effects)).unwrap();
    let text: Vec<u8> = (0..2 * PIECE_BYTES + 10).map(|i| (i / 7) as u8).collect();
    let mut rails = [first.stream, second.stream];
    rails[0].write_all(&(text.len() as u32).to_le_bytes()).unwrap();
    rails[0].write_all(&[1, 0, 0, 0]).unwrap();
    let mut buffer = vec![0; text.len()];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The second rail first: what is to be read next does not depend on what comes first.
            rails[1].write_all(&text[PIECE_BYTES..2 * PIECE_BYTES]).unwrap();
            rails[0].write_all(&text[..PIECE_BYTES]).unwrap();
            rails[0].write_all(&text[2 * PIECE_BYTES..]).unwrap();
        });
        assert_eq!(link.recv(&mut buffer, soon(&effects)), Ok(text.len()));
    });
    assert!(buffer == text);
}

#[test]
fn an_unfinished_link_gives_its_ticket_back() {
    let effects = effects();
    let [near, far] = [2, 2].map(|rails| with_rails(&effects, rails, Duration::from_millis(300)));
    let ticket = Ticket::random(&SystemRng);
    let expected = far.expect(&ticket, OPTIONS).unwrap();
    let mut first = by_hand(&far, &ticket, 1);
    let tickets = first.further(&ticket);
    // Another secret adds no rail.
    let other = by_hand(&far, &Ticket::new(tickets[0].id(), [9; 32]), 0);
    assert_eq!(other.verdict, handshake::REFUSAL);
    // While the link waits for its second rail, its ticket is taken; when it has waited too long, it is free again.
    assert!(matches!(first.stream.read(&mut [0]), Ok(0) | Err(_)), "the acceptor lets go");
    let dialled = near.dial_address(far.listening()[0], &ticket, OPTIONS, soon(&effects)).unwrap();
    let accepted = expected.accept(soon(&effects)).unwrap();
    dialled.send(&[b"words"], soon(&effects)).unwrap();
    assert_eq!(accepted.recv(&mut [0; 8], soon(&effects)), Ok(5));
}
