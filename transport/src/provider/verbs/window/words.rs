//! What a holder asks for a window with, and what the owner answers. All numbers are little-endian.

use std::time::Duration;

use crate::provider::verbs::wire::PSN_MASK;

/// Length of an encoded [`Request`] in bytes.
pub(crate) const REQUEST_BYTES: usize = 16;

/// Length of an encoded [`Answer`] in bytes.
pub(crate) const ANSWER_BYTES: usize = 56;

const REQUEST_MAGIC: [u8; 4] = *b"shVw";
const ANSWER_MAGIC: [u8; 4] = *b"shVo";

/// The holder's queue pair, which has the link's port.
///
/// ```text
/// 0 │ magic 4 │ queue pair's number 4 │ packet sequence number 4 │ zero 4
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    /// The queue pair's number.
    pub(crate) number: u32,
    /// The number that its first packet will have.
    pub(crate) psn: u32,
}

impl Request {
    pub(crate) fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut out = [0; REQUEST_BYTES];
        out[..4].copy_from_slice(&REQUEST_MAGIC);
        out[4..8].copy_from_slice(&self.number.to_le_bytes());
        out[8..12].copy_from_slice(&self.psn.to_le_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; REQUEST_BYTES] = bytes.try_into().ok()?;
        let [number, psn, zero] = [4, 8, 12].map(|at| u32::from_le_bytes(array(bytes, at)));
        let right = bytes[..4] == REQUEST_MAGIC && number <= PSN_MASK && psn <= PSN_MASK && zero == 0;
        right.then_some(Self { number, psn })
    }
}

/// The owner's queue pair, and what can be reached through it.
///
/// ```text
///  0 │ magic 4 │ queue pair's number 4 │ key 4 │ writable 1 │ zero 3
/// 16 │ address 8 │ bytes 8 │ nanoseconds that the lease lasts 8 │ window's number 8 │ zero 8
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Answer {
    /// The queue pair's number. It sends nothing, so its packets have none.
    pub(crate) number: u32,
    /// The registration's key.
    pub(crate) key: u32,
    /// Whether the lease may be written.
    pub(crate) writable: bool,
    /// Where the lease begins, as the registration has it.
    pub(crate) address: u64,
    /// Its length.
    pub(crate) bytes: u64,
    /// How long the lease lasted when this was said.
    pub(crate) left: Duration,
    /// The owner's number for the window, by which it says over the link that it has ended.
    pub(crate) window: u64,
}

impl Answer {
    pub(crate) fn encode(&self) -> [u8; ANSWER_BYTES] {
        let mut out = [0; ANSWER_BYTES];
        out[..4].copy_from_slice(&ANSWER_MAGIC);
        out[4..8].copy_from_slice(&self.number.to_le_bytes());
        out[8..12].copy_from_slice(&self.key.to_le_bytes());
        out[12] = self.writable.into();
        let left = u64::try_from(self.left.as_nanos()).unwrap_or(u64::MAX);
        for (i, value) in [self.address, self.bytes, left, self.window].into_iter().enumerate() {
            out[16 + i * 8..24 + i * 8].copy_from_slice(&value.to_le_bytes());
        }
        out
    }

    /// # Errors
    /// What is wrong with it.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        let bytes: &[u8; ANSWER_BYTES] = bytes.try_into().map_err(|_| "it has another length")?;
        let [number, key] = [4, 8].map(|at| u32::from_le_bytes(array(bytes, at)));
        let [address, length, left, window] = [16, 24, 32, 40].map(|at| u64::from_le_bytes(array(bytes, at)));
        if bytes[..4] != ANSWER_MAGIC || bytes[13..16] != [0; 3] || bytes[48..] != [0; 8] || bytes[12] > 1 {
            return Err("it is none");
        }
        if number > PSN_MASK {
            return Err("a queue pair's number has more than 24 bits");
        }
        if address.checked_add(length).is_none() {
            return Err("it reaches beyond all addresses");
        }
        Ok(Self { number, key, writable: bytes[12] == 1, address, bytes: length, left: Duration::from_nanos(left), window })
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn request_and_answer_have_these_bytes() {
        let request = Request { number: 0x0001_0203, psn: 0x00aa_bbcc };
        assert_eq!(request.encode(), *b"shVw\x03\x02\x01\x00\xcc\xbb\xaa\x00\0\0\0\0");
        assert_eq!(Request::decode(&request.encode()), Some(request));
        let answer = Answer {
            number: 0x11,
            key: 0x0102_0304,
            writable: true,
            address: 0x7f00_0000_1000,
            bytes: 8500,
            left: Duration::from_nanos(5),
            window: 6,
        };
        let golden = *b"shVo\x11\0\0\0\x04\x03\x02\x01\x01\0\0\0\
            \x00\x10\0\0\0\x7f\0\0\x34\x21\0\0\0\0\0\0\x05\0\0\0\0\0\0\0\x06\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
        assert_eq!(answer.encode(), golden);
        assert_eq!(Answer::decode(&golden), Ok(answer));
    }

    proptest! {
        #[test]
        fn other_bytes_are_refused_or_mean_what_they_say(
            bytes in prop::collection::vec(any::<u8>(), 0..70), flip in 0..ANSWER_BYTES, by in 1u8..,
        ) {
            prop_assert_eq!(Request::decode(&bytes), None);
            prop_assert!(Answer::decode(&bytes).is_err());
            let answer =
                Answer { number: 1, key: 2, writable: false, address: 3, bytes: 4, left: Duration::from_nanos(5), window: 6 };
            let mut bytes = answer.encode();
            bytes[flip] ^= by;
            if let Ok(read) = Answer::decode(&bytes) {
                prop_assert_eq!(read.encode(), bytes);
                prop_assert_ne!(read, answer);
            }
            let mut bytes = Request { number: 1, psn: 2 }.encode();
            bytes[flip % REQUEST_BYTES] ^= by;
            prop_assert!(Request::decode(&bytes).is_none_or(|read| read.encode() == bytes));
        }
    }
}
