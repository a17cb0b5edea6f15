//! What the two ends of a hop say on a link before it carries the hop.
//!
//! ```text
//!  0  "shP1"
//!  4  kind u8 │ zero 3: 1 echo, 2 answer, 3 take, 4 taken, 5 stale
//!  8  number u64: of an echo, or the epoch
//! 16  length of what follows u32, bytes; only an echo has any
//! 20  crc32c of what follows u32
//! 24  zero u32
//! 28  crc32c of the 28 bytes before u32
//! ```
//!
//! Little-endian. The dialling end asks, the accepting end answers: an echo is how links are measured, and `take` asks the
//! accepting end to end the link before and to go on with this one. After `taken` the link belongs to the channel.

/// Length of a message without what follows, in bytes.
pub(super) const HEAD_BYTES: usize = 32;
const MAGIC: [u8; 4] = *b"shP1";

/// A message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Said {
    /// Please answer.
    Echo(u64),
    /// The answer.
    Answer(u64),
    /// Go on with this link, under this epoch.
    Take(u64),
    /// Done; nothing comes over an earlier one any more.
    Taken(u64),
    /// No: a newer one is in use.
    Stale(u64),
}

impl Said {
    const fn code(self) -> (u8, u64) {
        match self {
            Self::Echo(number) => (1, number),
            Self::Answer(number) => (2, number),
            Self::Take(epoch) => (3, epoch),
            Self::Taken(epoch) => (4, epoch),
            Self::Stale(epoch) => (5, epoch),
        }
    }

    /// Writes it, to be followed by `load`.
    pub(super) fn encode(self, load: &[u8]) -> [u8; HEAD_BYTES] {
        let (kind, number) = self.code();
        let mut out = [0; HEAD_BYTES];
        out[..4].copy_from_slice(&MAGIC);
        out[4] = kind;
        out[8..16].copy_from_slice(&number.to_le_bytes());
        // Loads are bounded far below.
        out[16..20].copy_from_slice(&u32::try_from(load.len()).unwrap_or(u32::MAX).to_le_bytes());
        out[20..24].copy_from_slice(&crc32c::crc32c(load).to_le_bytes());
        let check = crc32c::crc32c(&out[..28]);
        out[28..].copy_from_slice(&check.to_le_bytes());
        out
    }

    /// Reads a whole message; none if it is damaged or something else.
    pub(super) fn decode(message: &[u8]) -> Option<Self> {
        let (head, load) = message.split_first_chunk::<HEAD_BYTES>()?;
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let whole = head[..4] == MAGIC
            && head[5..8] == [0; 3]
            && word(24) == 0
            && word(28) == crc32c::crc32c(&head[..28])
            && usize::try_from(word(16)) == Ok(load.len())
            && word(20) == crc32c::crc32c(load);
        let mut number = [0; 8];
        number.copy_from_slice(&head[8..16]);
        let number = u64::from_le_bytes(number);
        let said = match head[4] {
            1 => Self::Echo(number),
            2 => Self::Answer(number),
            3 => Self::Take(number),
            4 => Self::Taken(number),
            5 => Self::Stale(number),
            _ => return None,
        };
        (whole && (load.is_empty() || matches!(said, Self::Echo(_)))).then_some(said)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_layout_is_pinned() {
        let bytes = Said::Take(0x0102).encode(&[]);
        assert_eq!(&bytes[..28], b"shP1\x03\0\0\0\x02\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        // crc32c of "123456789" is 0xe3069283, as RFC 3720 has it.
        let bytes = Said::Echo(1).encode(b"123456789");
        assert_eq!(bytes[16..24], [9, 0, 0, 0, 0x83, 0x92, 0x06, 0xe3]);
    }

    proptest! {
        #[test]
        fn what_is_said_is_heard_and_damage_is_seen(kind in 1u8..6, number in any::<u64>(), load in prop::collection::vec(any::<u8>(), 0..50), at in any::<prop::sample::Index>(), bit in 0u8..8) {
            let said = match kind {
                1 => Said::Echo(number),
                2 => Said::Answer(number),
                3 => Said::Take(number),
                4 => Said::Taken(number),
                _ => Said::Stale(number),
            };
            let load = if kind == 1 { load } else { Vec::new() };
            let mut message = said.encode(&load).to_vec();
            message.extend_from_slice(&load);
            prop_assert_eq!(Said::decode(&message), Some(said));
            let at = at.index(message.len());
            message[at] ^= 1 << bit;
            prop_assert_eq!(Said::decode(&message), None);
            message[at] ^= 1 << bit;
            message.pop();
            prop_assert_eq!(Said::decode(&message), None);
        }

        #[test]
        fn nothing_makes_the_reader_panic(message in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = Said::decode(&message);
        }
    }
}
