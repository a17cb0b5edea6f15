//! What `put` and `get` say to each other: a fixed head in front of the bytes.
//!
//! ```text
//!  0  request u64        which request of this link
//!  8  handle u128
//! 24  term: counter u64, node tag u64
//! 40  generation u64
//! 48  offset u64         from the start of the lease
//! 56  bytes u32          how many are meant
//! 60  status u8, zero 3
//! ```
//!
//! Little-endian. The frame's kind says what it is:
//!
//! | kind | from | behind the head |
//! |---|---|---|
//! | 1 put | holder | the bytes |
//! | 2 get | holder | |
//! | 3 done | owner | |
//! | 4 data | owner | the bytes |
//! | 5 notify | holder | number u64, start u64 and length u64 of the whole range, then the bytes of its last part, if any |
//! | 6 window | holder | through shared memory where it is to be handed over: name u128, secret 32; over verbs a queue pair: 16 bytes, see `provider::verbs::window` |
//! | 7 handed | owner | through shared memory nothing; over verbs what can be reached: 56 bytes, see there |

use super::Denial;
use crate::access::{Denied, Handle};
use crate::frame::TermTag;

/// Length of an encoded [`Head`] in bytes.
pub(super) const HEAD_BYTES: usize = 64;

/// Client to server: write the bytes that follow.
pub(super) const PUT: u8 = 1;
/// Client to server: send bytes.
pub(super) const GET: u8 = 2;
/// Server to client: done, or not, by the status.
pub(super) const DONE: u8 = 3;
/// Server to client: the bytes follow.
pub(super) const DATA: u8 = 4;
/// Client to server: write what follows, then tell the owner.
pub(super) const NOTIFY: u8 = 5;
/// Client to server: hand over a window onto the lease's memory.
pub(super) const WINDOW: u8 = 6;
/// Server to client: that is done. (`DONE` without a denial: it is not.)
pub(super) const HANDED: u8 = 7;

/// Length of an encoded [`Tidings`] in bytes.
pub(super) const TIDINGS_BYTES: usize = 24;

/// What the owner is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tidings {
    pub(super) number: u64,
    pub(super) start: u64,
    pub(super) bytes: u64,
}

impl Tidings {
    pub(super) fn encode(&self) -> [u8; TIDINGS_BYTES] {
        let mut out = [0; TIDINGS_BYTES];
        out[..8].copy_from_slice(&self.number.to_le_bytes());
        out[8..16].copy_from_slice(&self.start.to_le_bytes());
        out[16..].copy_from_slice(&self.bytes.to_le_bytes());
        out
    }

    /// The tidings, and the bytes behind them.
    pub(super) fn decode(body: &[u8]) -> Option<(Self, &[u8])> {
        let (number, rest) = body.split_first_chunk()?;
        let (start, rest) = rest.split_first_chunk()?;
        let (bytes, rest) = rest.split_first_chunk()?;
        Some((Self { number: u64::from_le_bytes(*number), start: u64::from_le_bytes(*start), bytes: u64::from_le_bytes(*bytes) }, rest))
    }
}

const STATUS_DONE: u8 = 0;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) request: u64,
    pub(super) handle: Handle,
    pub(super) term: TermTag,
    pub(super) generation: u64,
    pub(super) offset: u64,
    pub(super) bytes: u32,
    /// None: done.
    pub(super) denial: Option<Denial>,
}

impl Head {
    pub(super) fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut out = [0; HEAD_BYTES];
        out[..8].copy_from_slice(&self.request.to_le_bytes());
        out[8..24].copy_from_slice(&self.handle.0.to_le_bytes());
        out[24..32].copy_from_slice(&self.term.counter.to_le_bytes());
        out[32..40].copy_from_slice(&self.term.node.to_le_bytes());
        out[40..48].copy_from_slice(&self.generation.to_le_bytes());
        out[48..56].copy_from_slice(&self.offset.to_le_bytes());
        out[56..60].copy_from_slice(&self.bytes.to_le_bytes());
        out[60] = self.denial.map_or(STATUS_DONE, Denial::code);
        out
    }

    /// The head of a message, and the bytes behind it.
    pub(super) fn decode(message: &[u8]) -> Option<(Self, &[u8])> {
        fn take<'a, const N: usize>(rest: &mut &'a [u8]) -> Option<&'a [u8; N]> {
            let (first, tail) = rest.split_first_chunk()?;
            *rest = tail;
            Some(first)
        }
        let (head, body) = message.split_first_chunk::<HEAD_BYTES>()?;
        let mut rest = &head[..];
        let request = u64::from_le_bytes(*take(&mut rest)?);
        let handle = Handle(u128::from_le_bytes(*take(&mut rest)?));
        let term = TermTag { counter: u64::from_le_bytes(*take(&mut rest)?), node: u64::from_le_bytes(*take(&mut rest)?) };
        let generation = u64::from_le_bytes(*take(&mut rest)?);
        let offset = u64::from_le_bytes(*take(&mut rest)?);
        let bytes = u32::from_le_bytes(*take(&mut rest)?);
        let [status, 0, 0, 0] = *take(&mut rest)? else { return None };
        let denial = if status == STATUS_DONE { None } else { Some(Denial::from_code(status)?) };
        Some((Self { request, handle, term, generation, offset, bytes, denial }, body))
    }
}

impl Denial {
    pub(super) const fn code(self) -> u8 {
        match self {
            Self::NoLease => 1,
            Self::Revoked => 2,
            Self::Expired => 3,
            Self::Superseded => 4,
            Self::Rights => 5,
            Self::Bounds => 6,
            Self::Generation => 7,
            Self::Busy => 8,
            Self::Deaf => 9,
        }
    }

    pub(super) const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::NoLease,
            2 => Self::Revoked,
            3 => Self::Expired,
            4 => Self::Superseded,
            5 => Self::Rights,
            6 => Self::Bounds,
            7 => Self::Generation,
            8 => Self::Busy,
            9 => Self::Deaf,
            _ => return None,
        })
    }
}

impl From<Denied> for Denial {
    fn from(denied: Denied) -> Self {
        match denied {
            // Whether somebody else's lease exists is nobody's business.
            Denied::Unknown | Denied::Holder => Self::NoLease,
            Denied::Fenced => Self::Revoked,
            Denied::Expired => Self::Expired,
            Denied::Term => Self::Superseded,
            Denied::Rights => Self::Rights,
            Denied::Bounds => Self::Bounds,
            Denied::Generation => Self::Generation,
            Denied::TooMany => Self::Busy,
        }
    }
}

/// A head is refused, or is exactly what would be written for what was read.
#[cfg(any(test, fuzzing))]
pub fn fuzz(bytes: &[u8]) {
    if let Some((head, body)) = Head::decode(bytes) {
        assert_eq!([&head.encode()[..], body].concat(), bytes);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_layout_is_pinned() {
        let head = Head {
            request: 1,
            handle: Handle(2),
            term: TermTag { counter: 3, node: 4 },
            generation: 5,
            offset: 6,
            bytes: 7,
            denial: Some(Denial::Busy),
        };
        let bytes = head.encode();
        let mut golden = [0; HEAD_BYTES];
        for (at, value) in [(0, 1), (8, 2), (24, 3), (32, 4), (40, 5), (48, 6), (56, 7), (60, 8)] {
            golden[at] = value;
        }
        assert_eq!(bytes, golden);
        let tidings = Tidings { number: 1, start: 2, bytes: 0x0304 };
        let mut golden = [0; TIDINGS_BYTES];
        (golden[0], golden[8], golden[16], golden[17]) = (1, 2, 4, 3);
        assert_eq!(tidings.encode(), golden);
        assert_eq!(Tidings::decode(&[&golden[..], b"rest"].concat()), Some((tidings, &b"rest"[..])));
        assert_eq!(Tidings::decode(&golden[1..]), None);
    }

    proptest! {
        #[test]
        fn heads_round_trip_and_other_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..100), zero in any::<bool>()) {
            let mut bytes = bytes;
            if zero && bytes.len() >= HEAD_BYTES {
                bytes[60] %= 12;
                bytes[61..64].fill(0);
            }
            if let Some((head, body)) = Head::decode(&bytes) {
                prop_assert_eq!(&head.encode()[..], &bytes[..HEAD_BYTES]);
                prop_assert_eq!(body, &bytes[HEAD_BYTES..]);
                prop_assert!(head.denial.is_none_or(|denial| Denial::from_code(denial.code()) == Some(denial)));
            }
        }
    }
}
