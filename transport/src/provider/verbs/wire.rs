//! What is said on the bootstrap connection and what a chunk begins with. All numbers are little-endian.
//!
//! After the handshake (see `provider::handshake`) both ends say a card, the dialler first, and, once they can receive, one byte. Nothing
//! more is said on the connection until the link is closed: then the number of chunks that were sent, so that the other end knows how many
//! of them are still to come.

use super::device::Gid;
use super::profile::Profile;

/// A card's length in bytes.
pub(super) const CARD_BYTES: usize = 64;

const CARD_MAGIC: [u8; 4] = *b"shVB";

/// Said when this end can receive.
pub(super) const READY: u8 = b'r';

/// Said when the link is closed: how many chunks were sent.
pub(super) const BYE_BYTES: usize = 8;

/// A chunk's header, in bytes.
pub(super) const HEADER_BYTES: usize = 40;

/// Packet sequence numbers have 24 bits.
pub(super) const PSN_MASK: u32 = 0x00ff_ffff;

/// What one end tells the other of its queue pair.
///
/// ```text
///  0 │ magic 4 │ profile 1 │ mtu 1 │ zero 2 │ gid 16
/// 24 │ queue pair's number 4 │ packet sequence number 4 │ chunk bytes 4 │ receives 4 │ salt 4 │ zero 20
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Card {
    pub(super) profile: Profile,
    /// Largest packet, as verbs number them.
    pub(super) mtu: u8,
    pub(super) gid: Gid,
    /// The queue pair's number.
    pub(super) number: u32,
    /// The number that its first packet will have.
    pub(super) psn: u32,
    /// How long it would like chunks to be. The shorter of both ends' is taken.
    pub(super) chunk_bytes: u32,
    /// How many chunks it can have posted for receiving.
    pub(super) receives: u32,
    /// What its chunks' checks begin with.
    pub(super) salt: u32,
}

impl Card {
    pub(super) fn encode(&self) -> [u8; CARD_BYTES] {
        let mut out = [0; CARD_BYTES];
        out[..4].copy_from_slice(&CARD_MAGIC);
        out[4] = match self.profile {
            Profile::Uc => 1,
            Profile::Rc => 2,
        };
        out[5] = self.mtu;
        out[8..24].copy_from_slice(&self.gid.0);
        for (i, word) in [self.number, self.psn, self.chunk_bytes, self.receives, self.salt].into_iter().enumerate() {
            out[24 + i * 4..28 + i * 4].copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// Reads a card; what it says is possible, but not yet what was agreed.
    pub(super) fn decode(bytes: &[u8; CARD_BYTES]) -> Result<Self, &'static str> {
        if bytes[..4] != CARD_MAGIC {
            return Err("it begins with something else than a card");
        }
        let profile = match bytes[4] {
            1 => Profile::Uc,
            2 => Profile::Rc,
            _ => return Err("it uses queue pairs in a way that this version does not know"),
        };
        let [number, psn, chunk_bytes, receives, salt] = [24, 28, 32, 36, 40].map(|at| word(bytes, at));
        if bytes[6..8] != [0; 2] || bytes[44..] != [0; 20] {
            return Err("a card's reserved bytes are in use");
        }
        if number > PSN_MASK || psn > PSN_MASK {
            return Err("a queue pair's number has more than 24 bits");
        }
        if !(1..=5).contains(&bytes[5]) {
            return Err("its packets have an impossible length");
        }
        if (chunk_bytes as usize) < super::device::FRAME_BYTES || !(chunk_bytes as usize).is_multiple_of(super::device::FRAME_BYTES) {
            return Err("its chunks are no whole frames");
        }
        if receives < super::accounts::RECEIVES_MIN {
            return Err("it receives too few chunks at a time");
        }
        let gid = Gid(array(bytes, 8));
        Ok(Self { profile, mtu: bytes[5], gid, number, psn, chunk_bytes, receives, salt })
    }
}

/// What a chunk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The beginning of a message.
    First,
    /// More of it.
    More,
    /// Nothing but what the header says of credits.
    Note,
    /// A keep-alive, to be echoed. Its payload is the sender's clock.
    Ping,
    /// The echo.
    Pong,
    /// Windows onto the sender's memory have ended: all up to the number that is its payload.
    Ended,
}

/// A chunk's header.
///
/// ```text
///  0 │ check 4: CRC-32C of bytes 4 to 39, begun with the sender's salt
///  4 │ payload's check 4: CRC-32C, begun with the sender's salt; 0 on a reliable connection
///  8 │ sequence 8: the sender's chunks, counted from 0
/// 16 │ posted 8: receives that the sender has posted, counted from the link's beginning
/// 24 │ length 4: bytes of payload behind the header
/// 28 │ message 4: bytes of the whole message
/// 32 │ kind 1 │ zero 7
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: Kind,
    pub(super) sequence: u64,
    pub(super) posted: u64,
    pub(super) length: u32,
    pub(super) message: u32,
    pub(super) payload_check: u32,
}

impl Header {
    pub(super) fn encode(&self, salt: u32) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[4..8].copy_from_slice(&self.payload_check.to_le_bytes());
        out[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        out[16..24].copy_from_slice(&self.posted.to_le_bytes());
        out[24..28].copy_from_slice(&self.length.to_le_bytes());
        out[28..32].copy_from_slice(&self.message.to_le_bytes());
        out[32] = match self.kind {
            Kind::First => 1,
            Kind::More => 2,
            Kind::Note => 3,
            Kind::Ping => 4,
            Kind::Pong => 5,
            Kind::Ended => 6,
        };
        let check = crc32c::crc32c_append(salt, &out[4..]);
        out[..4].copy_from_slice(&check.to_le_bytes());
        out
    }

    /// Reads the header of a received chunk of `received` bytes.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn decode(bytes: &[u8], salt: u32, received: usize) -> Result<Self, &'static str> {
        let Some(header) = bytes.get(..HEADER_BYTES.min(received)).and_then(|bytes| <&[u8; HEADER_BYTES]>::try_from(bytes).ok()) else {
            return Err("it is shorter than its header");
        };
        if word(header, 0) != crc32c::crc32c_append(salt, &header[4..]) {
            return Err("its header's check is wrong");
        }
        let kind = match header[32] {
            1 => Kind::First,
            2 => Kind::More,
            3 => Kind::Note,
            4 => Kind::Ping,
            5 => Kind::Pong,
            6 => Kind::Ended,
            _ => return Err("it is of a kind that this version does not know"),
        };
        let length = word(header, 24);
        if header[33..] != [0; 7] || length as usize > received - HEADER_BYTES {
            return Err("its header says what cannot be");
        }
        let (sequence, posted) = (u64::from_le_bytes(array(header, 8)), u64::from_le_bytes(array(header, 16)));
        Ok(Self { kind, sequence, posted, length, message: word(header, 28), payload_check: word(header, 4) })
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CARD: Card = Card {
        profile: Profile::Uc,
        mtu: 5,
        gid: Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 0, 1]),
        number: 0x0001_0203,
        psn: 0x00aa_bbcc,
        chunk_bytes: 16_384,
        receives: 64,
        salt: 0xdead_beef,
    };

    const HEADER: Header = Header { kind: Kind::First, sequence: 1, posted: 2, length: 3, message: 4, payload_check: 5 };

    #[test]
    fn a_card_has_these_bytes() {
        let bytes = CARD.encode();
        let (start, zeros) = bytes.split_at(44);
        assert_eq!(
            start,
            [
                b's', b'h', b'V', b'B', 1, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 0, 1, 3, 2, 1, 0, 0xcc, 0xbb, 0xaa, 0,
                0, 0x40, 0, 0, 64, 0, 0, 0, 0xef, 0xbe, 0xad, 0xde
            ]
        );
        assert_eq!(zeros, [0; 20]);
        assert_eq!(Card::decode(&bytes), Ok(CARD));
    }

    #[test]
    fn a_header_has_these_bytes() {
        // The check is that of the 36 bytes behind it, by a table-driven CRC-32C elsewhere, from a register that begins as if the salt
        // were the check of what came before.
        let bytes = HEADER.encode(0);
        assert_eq!(bytes[4..36], [5, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(bytes[36..], [0; 4]);
        assert_eq!(bytes[..4], [0xac, 0x1d, 0x0e, 0xd5]);
        assert_eq!(HEADER.encode(0x0102_0304)[..4], [0xb4, 0x75, 0xa7, 0xdf]);
        for (number, kind) in (1..).zip([Kind::First, Kind::More, Kind::Note, Kind::Ping, Kind::Pong, Kind::Ended]) {
            let bytes = Header { kind, ..HEADER }.encode(7);
            assert_eq!((bytes[32], Header::decode(&bytes, 7, 100).map(|header| header.kind)), (number, Ok(kind)));
        }
    }

    proptest! {
        #[test]
        fn no_card_panics_and_what_is_read_is_what_was_said(bytes in any::<[u8; CARD_BYTES]>(), flip in 0..CARD_BYTES, by in 1u8..) {
            let _ = Card::decode(&bytes);
            let mut bytes = CARD.encode();
            bytes[flip] ^= by;
            if let Ok(card) = Card::decode(&bytes) {
                prop_assert_eq!(card.encode(), bytes);
                prop_assert_ne!(card, CARD);
            }
        }

        #[test]
        fn a_damaged_header_or_one_of_another_link_is_not_taken(
            sequence in any::<u64>(), posted in any::<u64>(), salt in any::<u32>(), flip in 0..HEADER_BYTES, by in 1u8.., other in any::<u32>(),
        ) {
            let header = Header { sequence, posted, ..HEADER };
            let bytes = header.encode(salt);
            prop_assert_eq!(Header::decode(&bytes, salt, HEADER_BYTES + 3), Ok(header));
            prop_assert!(Header::decode(&bytes, salt, HEADER_BYTES + 2).is_err(), "shorter than it says");
            prop_assert!(other == salt || Header::decode(&bytes, other, HEADER_BYTES + 3).is_err());
            let mut damaged = bytes;
            damaged[flip] ^= by;
            prop_assert!(Header::decode(&damaged, salt, HEADER_BYTES + 3).is_err());
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80), received in 0usize..90) {
            let _ = Header::decode(&bytes, 0, received);
        }
    }
}
