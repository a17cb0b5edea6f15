//! The bytes of a beacon packet.
//!
//! ```text
//! offset  length  what
//!      0       8  magic
//!      8      16  nonce, fresh for every packet
//!     24      32  tag over nonce and body
//!     56    rest  body: postcard of Hello, enciphered
//! ```
//!
//! Everything hangs on the nonce and a key. In a private cluster tag and key stream are keyed BLAKE3 with keys derived
//! from the cluster's, so that an outsider learns no more than that somebody sends beacons, and cannot make one that
//! is believed. In an open cluster the same is done with a key that is no secret: the code path is one, and a packet
//! of another program or cluster is dropped by its tag before anything in it is parsed. A recorded packet can be
//! played again; all it does is make nodes dial an address where the handshake then fails.

use serde::{Deserialize, Serialize};

use crate::env::BEACON_BYTES_MAX;
use crate::ids::{Incarnation, NodeId};
use crate::secret::ClusterKey;

const MAGIC: [u8; 8] = *b"shoal\xb7\x01\n";
const NONCE: usize = 16;
const TAG: usize = 32;
const HEAD: usize = MAGIC.len() + NONCE + TAG;

const TAG_CONTEXT: &str = "shoal 2026 beacon tag";
const STREAM_CONTEXT: &str = "shoal 2026 beacon key stream";

/// Whether a packet asks for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// Sent to everybody, from time to time. Whoever sees its sender for the first time answers.
    Hello,
    /// Sent to one newcomer. Never answered.
    Answer,
}

/// What a node says in a beacon. The address is the packet's source. New fields go to the end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// [`crate::card::WIRE_VERSION`] of the sender.
    pub(crate) wire_version: u32,
    /// Hello or answer.
    pub(crate) kind: Kind,
    /// Who.
    pub(crate) node: NodeId,
    /// Which life of it.
    pub(crate) incarnation: Incarnation,
    /// Port of its control network at the address that the packet comes from.
    pub(crate) port: u16,
}

/// Seals and opens packets of one cluster.
#[derive(Debug, Clone)]
pub(crate) struct Seal {
    cluster: Option<ClusterKey>,
}

impl Seal {
    /// For the cluster with this key, or for the open one.
    pub(crate) fn new(cluster: Option<ClusterKey>) -> Self {
        Self { cluster }
    }

    fn mac(&self, context: &'static str, message: &[u8]) -> blake3::Hash {
        match &self.cluster {
            Some(key) => key.tag(context, message),
            None => blake3::keyed_hash(&blake3::derive_key(context, b"open cluster"), message),
        }
    }

    /// Turns the body into ciphertext, or back: the same operation both ways. Each block of 32 bytes has a mask that
    /// depends on nonce and block number.
    fn cipher(&self, nonce: &[u8; NONCE], body: &mut [u8]) {
        for (number, block) in body.chunks_mut(32).enumerate() {
            let mut message = [0; NONCE + 1];
            message[..NONCE].copy_from_slice(nonce);
            message[NONCE] = number as u8;
            let mask = self.mac(STREAM_CONTEXT, &message);
            for (byte, mask) in block.iter_mut().zip(mask.as_bytes()) {
                *byte ^= mask;
            }
        }
    }

    /// The packet for `hello`. The nonce must never repeat under one key.
    pub(crate) fn seal(&self, hello: &Hello, nonce: [u8; NONCE]) -> Vec<u8> {
        let mut packet = Vec::with_capacity(BEACON_BYTES_MAX);
        packet.extend_from_slice(&MAGIC);
        packet.extend_from_slice(&nonce);
        packet.extend_from_slice(&[0; TAG]);
        // Plain data of fixed shape into a vector: postcard has no way to fail here, and an empty body is refused.
        packet = postcard::to_extend(hello, packet).unwrap_or_default();
        if packet.len() < HEAD {
            return Vec::new();
        }
        self.cipher(&nonce, &mut packet[HEAD..]);
        let tag = self.tag(&packet);
        packet[MAGIC.len() + NONCE..HEAD].copy_from_slice(tag.as_bytes());
        packet
    }

    /// What the packet says, or `None` if it is none of this cluster's.
    pub(crate) fn open(&self, packet: &[u8]) -> Option<Hello> {
        if packet.len() <= HEAD || packet.len() > BEACON_BYTES_MAX || packet[..MAGIC.len()] != MAGIC {
            return None;
        }
        let nonce: [u8; NONCE] = packet[MAGIC.len()..MAGIC.len() + NONCE].try_into().ok()?;
        let tag: [u8; TAG] = packet[MAGIC.len() + NONCE..HEAD].try_into().ok()?;
        // `Hash` compares in constant time.
        if self.tag(packet) != blake3::Hash::from_bytes(tag) {
            return None;
        }
        let mut body = packet[HEAD..].to_vec();
        self.cipher(&nonce, &mut body);
        postcard::take_from_bytes(&body).ok().map(|(hello, _later_fields)| hello)
    }

    fn tag(&self, packet: &[u8]) -> blake3::Hash {
        let mut message = Vec::with_capacity(packet.len());
        message.extend_from_slice(&packet[MAGIC.len()..MAGIC.len() + NONCE]);
        message.extend_from_slice(&packet[HEAD..]);
        self.mac(TAG_CONTEXT, &message)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hello() -> Hello {
        Hello { wire_version: 1, kind: Kind::Hello, node: NodeId([0x5a; 32]), incarnation: Incarnation(0x0102_0304), port: 52801 }
    }

    fn key(text: &str) -> Option<ClusterKey> {
        Some(ClusterKey::from_text(text).unwrap())
    }

    #[test]
    fn bytes_stay_what_they_are() {
        let open = Seal::new(None).seal(&hello(), [7; 16]);
        let private = Seal::new(key("correct horse battery")).seal(&hello(), [7; 16]);
        assert_eq!(hex::encode(open), GOLDEN_OPEN);
        assert_eq!(hex::encode(private), GOLDEN_PRIVATE);
    }

    #[test]
    fn later_fields_are_passed_over() {
        let seal = Seal::new(None);
        let mut packet = seal.seal(&hello(), [1; 16]);
        packet.truncate(HEAD);
        let mut body = postcard::to_stdvec(&(hello(), 77_u32, "more")).unwrap();
        seal.cipher(&[1; 16], &mut body);
        packet.extend_from_slice(&body);
        let tag = seal.tag(&packet);
        packet[24..56].copy_from_slice(tag.as_bytes());
        assert_eq!(seal.open(&packet), Some(hello()));
    }

    #[test]
    fn other_clusters_cannot_read_or_be_read() {
        let (one, two, none) = (Seal::new(key("the first cluster's key")), Seal::new(key("the second cluster's key")), Seal::new(None));
        for (from, seal) in [&one, &two, &none].into_iter().enumerate() {
            let packet = seal.seal(&hello(), [3; 16]);
            for (to, other) in [&one, &two, &none].into_iter().enumerate() {
                assert_eq!(other.open(&packet).is_some(), from == to, "{from} to {to}");
            }
        }
    }

    #[test]
    fn a_private_packet_shows_nothing() {
        let seal = Seal::new(key("the first cluster's key"));
        let packet = seal.seal(&hello(), [3; 16]);
        assert!(!packet.windows(4).any(|part| part == [0x5a; 4]), "the node id is not to be seen");
        let again = seal.seal(&hello(), [4; 16]);
        let same = packet[HEAD..].iter().zip(&again[HEAD..]).filter(|(a, b)| a == b).count();
        assert!(same < 12, "two packets of one node have nothing in common, but {same} bytes are equal");
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            prop_assert_eq!(Seal::new(None).open(&bytes), None);
        }

        #[test]
        fn a_changed_bit_is_seen(at in 0usize..2000, nonce in any::<[u8; 16]>()) {
            let seal = Seal::new(key("correct horse battery"));
            let mut packet = seal.seal(&hello(), nonce);
            prop_assert!(packet.len() <= BEACON_BYTES_MAX);
            prop_assert_eq!(seal.open(&packet), Some(hello()));
            let bit = at % (packet.len() * 8);
            packet[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(seal.open(&packet), None);
        }

        #[test]
        fn a_body_with_a_right_tag_but_any_content_is_survived(body in proptest::collection::vec(any::<u8>(), 1..200)) {
            let seal = Seal::new(None);
            let mut packet = seal.seal(&hello(), [9; 16]);
            packet.truncate(HEAD);
            packet.extend_from_slice(&body);
            let tag = seal.tag(&packet);
            packet[24..56].copy_from_slice(tag.as_bytes());
            let _ = seal.open(&packet);
        }
    }

    const GOLDEN_OPEN: &str = "73686f616cb7010a070707070707070707070707070707074bc4e06e7ad908c0cca1e8d5eaa626572bea2a433297342e40b3e059ef354683a294d5d4ca96eee213fb466a5199ee092ab174879eab35e8c47a7a9f995c3bf862037dd67278419a88";
    const GOLDEN_PRIVATE: &str = "73686f616cb7010a07070707070707070707070707070707ef9a46a2110c459b2f02f45cb0f2167bff27b0a28544c1bc670f80c8834dcd271b42e3d825fbfc373766515f85b59dad6f8027e45529a2cfa19bf945a3d20e4ae13af864ba8443e215";
}
