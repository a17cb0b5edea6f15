//! The records that a link's byte stream is cut into.
//!
//! `length u32 │ kind u8 │ zero 3`, little-endian, then `length` bytes. A record is a message, or a keep-alive ([`PING`]) or its
//! echo ([`PONG`]), which carry the sender's clock.
//!
//! On a link that is sealed or has rails, a message is cut into [`pieces`]: piece k goes on rail k modulo the number of rails, and
//! where the link is sealed each piece is sealed by itself. All else goes on the first rail. So the length in a message's prefix says
//! where each byte is to be found, and both ends write and read in one order, without any further word.

use std::ops::Range;

pub(super) const PREFIX_BYTES: usize = 8;
pub(super) const STAMP_BYTES: usize = 8;

pub(super) const MESSAGE: u8 = 1;
pub(super) const PING: u8 = 2;
pub(super) const PONG: u8 = 3;

/// Length of all pieces of a message but the last: long enough that a tag and a system call for each cost little, short enough to stay
/// in a processor's cache from sealing to writing.
pub(super) const PIECE_BYTES: usize = 64 * 1024;

/// What stands before a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Prefix {
    pub(super) bytes: u32,
    pub(super) kind: u8,
}

impl Prefix {
    pub(super) fn encode(self) -> [u8; PREFIX_BYTES] {
        let mut out = [0; PREFIX_BYTES];
        out[..4].copy_from_slice(&self.bytes.to_le_bytes());
        out[4] = self.kind;
        out
    }

    /// None if reserved bytes are in use.
    pub(super) fn decode(bytes: [u8; PREFIX_BYTES]) -> Option<Self> {
        let [a, b, c, d, kind, zeros @ ..] = bytes;
        (zeros == [0; 3]).then_some(Self { bytes: u32::from_le_bytes([a, b, c, d]), kind })
    }
}

/// The pieces of a message of this length, as ranges of it. A message without bytes has one piece without bytes.
pub(super) fn pieces(bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let count = bytes.div_ceil(PIECE_BYTES).max(1);
    (0..count).map(move |i| i * PIECE_BYTES..bytes.min((i + 1) * PIECE_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_pinned() {
        let prefix = Prefix { bytes: 0x0102_0304, kind: PING };
        assert_eq!(prefix.encode(), [4, 3, 2, 1, 2, 0, 0, 0]);
        assert_eq!(Prefix::decode(prefix.encode()), Some(prefix));
        for reserved in 5..8 {
            let mut bytes = prefix.encode();
            bytes[reserved] = 1;
            assert_eq!(Prefix::decode(bytes), None);
        }
        assert_eq!([MESSAGE, PING, PONG], [1, 2, 3]);
        assert_eq!(PIECE_BYTES, 65_536);
    }

    #[test]
    fn pieces_cover_a_message_once() {
        let only = |bytes| pieces(bytes).eq(std::iter::once(0..bytes));
        assert!(only(0) && only(1) && only(65_536));
        assert_eq!(pieces(65_537).collect::<Vec<_>>(), [0..65_536, 65_536..65_537]);
        assert_eq!(pieces(200_000).collect::<Vec<_>>(), [0..65_536, 65_536..131_072, 131_072..196_608, 196_608..200_000]);
    }
}
