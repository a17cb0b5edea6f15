//! Records made of any bytes, cut anywhere.

use std::cell::{Cell, RefCell};

use super::rails::Further;
use super::read::{Lane, Reader, Wire};
use super::record::{MESSAGE, PING, PONG, PREFIX_BYTES, STAMP_BYTES};
use super::seal::{Cipher, Seal};
use crate::env::Instant;
use crate::link::{CloseReason, RecvError};

/// Longest message of these links: a piece and a half.
const RECEIVE_MAX: usize = 100_000;

/// Rails that bring given bytes, some at a time.
struct Fed<'a> {
    rails: Vec<RefCell<&'a [u8]>>,
    step: Cell<usize>,
    notes: Cell<usize>,
}

impl<'a> Fed<'a> {
    fn new(rails: Vec<&'a [u8]>, step: u8) -> Self {
        Self { rails: rails.into_iter().map(RefCell::new).collect(), step: Cell::new(usize::from(step)), notes: Cell::new(0) }
    }
}

impl Wire for Fed<'_> {
    fn read(&self, rail: usize, lane: &mut Lane, into: &mut [u8], _deadline: Instant) -> Result<usize, RecvError> {
        let mut rest = self.rails[rail].borrow_mut();
        if rest.is_empty() {
            return Err(CloseReason::Peer.into());
        }
        // From one byte at a time to all there is.
        self.step.set((self.step.get() * 5 + 3) % 256);
        let come = if self.step.get() > 200 { rest.len() } else { rest.len().min(1 + self.step.get()) };
        let direct = come.min(into.len());
        into[..direct].copy_from_slice(&rest[..direct]);
        let room = lane.room();
        assert!(!room.is_empty(), "a full buffer is read into");
        let ahead = (come - direct).min(room.len());
        room[..ahead].copy_from_slice(&rest[direct..direct + ahead]);
        lane.filled(ahead);
        *rest = &rest[direct + ahead..];
        Ok(direct)
    }

    fn patience(&self, _bytes: usize) -> Instant {
        Instant::ZERO
    }

    fn noted(&self, kind: u8, _stamp: u64) {
        assert!(matches!(kind, PING | PONG));
        self.notes.set(self.notes.get() + 1);
    }

    fn misbehaved(&self, what: String) -> RecvError {
        CloseReason::Misbehaved(what).into()
    }

    fn stalled(&self) -> RecvError {
        CloseReason::Stalled.into()
    }
}

/// Everything that a link of these rails would deliver.
fn delivered(fed: &Fed<'_>, seals: Vec<Option<Seal>>) -> Vec<Vec<u8>> {
    let mut reader = Reader::new(seals.into_iter().map(Lane::new).collect(), RECEIVE_MAX);
    let mut buffer = vec![0; RECEIVE_MAX + 1];
    let mut out = Vec::new();
    while let Ok(bytes) = reader.recv(fed, &mut buffer, Instant::ZERO) {
        assert!(bytes <= RECEIVE_MAX);
        out.push(buffer[..bytes].to_vec());
    }
    out
}

/// What a plain link of one rail has to deliver, said in the simplest way.
fn expected(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut out = Vec::new();
    while let Some((&[a, b, c, d, kind, 0, 0, 0], rest)) = bytes.split_first_chunk::<PREFIX_BYTES>() {
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        let known = (kind == MESSAGE && length <= RECEIVE_MAX) || (matches!(kind, PING | PONG) && length == STAMP_BYTES);
        if !known || rest.len() < length {
            break;
        }
        if kind == MESSAGE {
            out.push(rest[..length].to_vec());
        }
        bytes = &rest[length..];
    }
    out
}

/// The first byte says how many rails there are and whether they are sealed, the second how the bytes are cut, the rest comes on the
/// rails. A sealed link delivers nothing that its peer did not seal; a plain one of one rail delivers what the format says.
pub fn records(data: &[u8]) {
    let [shape, step, bytes @ ..] = data else { return };
    let rails = usize::from(shape % 3) + 1;
    let sealed = shape & 0x80 != 0;
    let each = bytes.len().div_ceil(rails).max(1);
    let mut parts: Vec<&[u8]> = bytes.chunks(each).collect();
    parts.resize(rails, &[]);
    let fed = Fed::new(parts, *step);
    let cipher = if shape & 0x40 == 0 { Cipher::Aes256Gcm } else { Cipher::ChaCha20Poly1305 };
    let seals = (0..rails).map(|_| sealed.then(|| Seal::new(cipher, [0x5a; 32]))).collect();
    let delivered = delivered(&fed, seals);
    if sealed {
        assert!(delivered.is_empty() && fed.notes.get() == 0, "something was opened that nobody sealed");
    } else if rails == 1 {
        assert_eq!(delivered, expected(bytes));
    }
}

/// A list of addresses is refused unless the acceptor made it.
pub fn addresses(list: &[u8]) {
    let further = Further::new([0x5a; 32], u8::try_from(list.len() / 18).unwrap_or(0));
    assert_eq!(further.read_list(list), None);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::record::{PIECE_BYTES, Prefix, pieces};
    use super::*;

    /// What a correct end writes for these messages, rail by rail.
    fn written(messages: &[Vec<u8>], rails: usize, mut seals: Option<Vec<Seal>>) -> Vec<Vec<u8>> {
        let mut out = vec![Vec::new(); rails];
        for message in messages {
            let prefix = Prefix { bytes: message.len() as u32, kind: MESSAGE }.encode();
            out[0].extend_from_slice(&prefix);
            for (i, place) in pieces(message.len()).enumerate() {
                let mut piece = message[place].to_vec();
                let tag = seals.as_mut().map(|seals| {
                    let seal = &mut seals[i % rails];
                    let tag = seal.seal(&prefix, &mut piece).unwrap();
                    seal.advance();
                    tag
                });
                out[i % rails].extend_from_slice(&piece);
                out[i % rails].extend(tag.iter().flatten());
            }
        }
        out
    }

    fn message() -> impl Strategy<Value = Vec<u8>> {
        let length = prop_oneof![8 => 0usize..300, 1 => PIECE_BYTES - 2..PIECE_BYTES + 3, 1 => 0..RECEIVE_MAX];
        (length, any::<u8>()).prop_map(|(length, seed)| (0..length).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect())
    }

    fn seals(rails: usize) -> Vec<Seal> {
        (0..rails).map(|rail| Seal::with_limit(Cipher::Aes256Gcm, [rail as u8; 32], 5)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_bytes_in_any_pieces(
            shape in any::<u8>(), step in any::<u8>(),
            records_in in prop::collection::vec((0u32..90, 0u8..5, prop::collection::vec(any::<u8>(), 0..90), any::<bool>()), 0..12),
            noise in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            let mut data = vec![shape, step];
            for (length, kind, body, honest) in records_in {
                let bytes = if honest { body.len() as u32 } else { length };
                data.extend_from_slice(&Prefix { bytes, kind }.encode());
                data.extend_from_slice(&body);
            }
            data.extend_from_slice(&noise);
            records(&data);
            records(&noise);
        }

        #[test]
        fn messages_arrive_whole_and_in_order(
            messages in prop::collection::vec(message(), 0..8), rails in 1usize..4, sealed in any::<bool>(), step in any::<u8>(),
        ) {
            let bytes = written(&messages, rails, sealed.then(|| seals(rails)));
            let fed = Fed::new(bytes.iter().map(Vec::as_slice).collect(), step);
            let opening = if sealed { seals(rails).into_iter().map(Some).collect() } else { (0..rails).map(|_| None).collect() };
            prop_assert!(delivered(&fed, opening) == messages);
        }

        /// Whatever is changed, cut, repeated or left out on a sealed link: what arrives are the first messages, as they were.
        #[test]
        fn harm_to_a_sealed_link_is_seen(
            messages in prop::collection::vec(message(), 1..8), rails in 1usize..4, step in any::<u8>(),
            rail in any::<prop::sample::Index>(), from in any::<prop::sample::Index>(), length in 1usize..200, harm in 0u8..4, bit in 0u8..8,
        ) {
            let mut bytes = written(&messages, rails, Some(seals(rails)));
            let rail = rail.index(rails);
            prop_assume!(!bytes[rail].is_empty());
            let from = from.index(bytes[rail].len());
            let to = (from + length).min(bytes[rail].len());
            match harm {
                0 => bytes[rail][from] ^= 1 << bit,
                1 => bytes[rail].truncate(from),
                2 => drop(bytes[rail].drain(from..to)),
                _ => {
                    let again = bytes[rail][from..to].to_vec();
                    bytes[rail].splice(from..from, again);
                }
            }
            let fed = Fed::new(bytes.iter().map(Vec::as_slice).collect(), step);
            let arrived = delivered(&fed, seals(rails).into_iter().map(Some).collect());
            // Bytes that were repeated at the end of a rail may come too late to be looked at.
            prop_assert!(arrived.len() <= messages.len() && (harm == 3 || arrived.len() < messages.len()));
            prop_assert!(arrived[..] == messages[..arrived.len()]);
        }
    }
}
