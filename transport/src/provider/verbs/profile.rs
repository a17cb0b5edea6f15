//! The two ways in which queue pairs are used, and what each sets them up with.
//!
//! `uc` keeps to what Apple's library can (technote TN3205 and what others ran into): unreliable connections, SEND and
//! nothing else, whole messages of the receiver's length, depths in frames. `rc` is for adapters that retransmit by
//! themselves.

use serde::{Deserialize, Serialize};

use super::device::{FRAME_BYTES, Init, ReadyToReceive, ReadyToSend, ReliableReceive, ReliableSend};
use super::wire::Card;

/// How queue pairs are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Profile {
    /// Unreliable connections within Apple's contract.
    Uc,
    /// Reliable connections.
    Rc,
}

/// `LOCAL_WRITE`, `REMOTE_WRITE` and `REMOTE_READ`. A queue pair of Apple's that is given fewer is refused by some versions.
const ACCESS: u32 = 1 | 2 | 4;

/// Most work requests in a queue of Apple's.
const APPLE_DEPTH_MAX: u32 = 4095;

/// Queue pairs that one of Apple's devices gives out. The next one is refused, and every one after it until the machine is
/// started anew, so it must not be asked for.
pub(super) const APPLE_PAIRS_MAX: usize = 10;

/// Longest chunk: Apple's longest message, in whole frames.
const CHUNK_BYTES_MAX: usize = 16_773_120;

impl Profile {
    /// What this platform's devices can.
    pub const fn native() -> Self {
        if cfg!(target_os = "macos") { Self::Uc } else { Self::Rc }
    }

    pub(super) const fn is_reliable(self) -> bool {
        matches!(self, Self::Rc)
    }

    /// A chunk's length in bytes, from what is wished for: whole frames, at least one.
    pub(super) fn chunk_bytes(self, wished: usize) -> usize {
        wished.clamp(FRAME_BYTES, CHUNK_BYTES_MAX).next_multiple_of(FRAME_BYTES)
    }

    /// What a chunk takes of a queue's depth: its frames, or one work request.
    pub(super) fn cost(self, chunk_bytes: usize) -> u32 {
        match self {
            Self::Uc => u32::try_from(chunk_bytes.div_ceil(FRAME_BYTES)).unwrap_or(u32::MAX),
            Self::Rc => 1,
        }
    }

    /// How many chunks a queue is to hold, of those wished for.
    pub(super) fn slots(self, wished: u32, chunk_bytes: usize) -> u32 {
        let most = match self {
            Self::Uc => APPLE_DEPTH_MAX / self.cost(chunk_bytes).max(1),
            Self::Rc => 16_384,
        };
        wished.min(most)
    }

    /// Bytes that go out for a chunk of which `used` matter. On Apple's devices a message must take as many frames as what it
    /// is received into.
    pub(super) fn sent_bytes(self, used: usize, chunk_bytes: usize) -> usize {
        match self {
            Self::Uc => chunk_bytes,
            Self::Rc => used,
        }
    }

    /// Links that a device carries at most.
    pub(super) const fn pairs_max(self) -> usize {
        match self {
            Self::Uc => APPLE_PAIRS_MAX,
            Self::Rc => usize::MAX,
        }
    }

    pub(super) fn init(self, port: u8) -> Init {
        Init { port, access: ACCESS }
    }

    /// `gid_index` is where the local address stands in the port's own table; `mtu` the smaller of both ends'.
    pub(super) fn ready_to_receive(self, peer: &Card, port: u8, gid_index: u8, mtu: u8) -> ReadyToReceive {
        ReadyToReceive {
            mtu,
            peer_number: peer.number,
            receive_psn: peer.psn,
            peer: peer.gid,
            gid_index,
            hop_limit: match self {
                // There are no routers on a cable.
                Self::Uc => 1,
                Self::Rc => 64,
            },
            port,
            // 12 is 0.64 ms. One read at a time, of which there are none.
            reliable: self.is_reliable().then_some(ReliableReceive { min_rnr_timer: 12, reads_max: 1 }),
        }
    }

    pub(super) fn ready_to_send(self, psn: u32) -> ReadyToSend {
        // A packet is repeated after 67 ms (4.096 µs × 2¹⁴), seven times; a receiver that is not ready is asked for ever, which
        // does not happen, because nothing is sent without a credit.
        let reliable = ReliableSend { timeout: 14, retries: 7, rnr_retries: 7, reads_max: 1 };
        ReadyToSend { send_psn: psn, reliable: self.is_reliable().then_some(reliable) }
    }
}

impl std::fmt::Display for Profile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Uc => "uc",
            Self::Rc => "rc",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_whole_frames_that_apple_takes() {
        for (wished, given) in [(0, 4096), (1, 4096), (4097, 8192), (16_384, 16_384), (usize::MAX, 16_773_120)] {
            assert_eq!(Profile::Uc.chunk_bytes(wished), given);
        }
        assert_eq!(Profile::Uc.cost(16_384), 4);
        assert_eq!(Profile::Rc.cost(16_384), 1);
        // 4,095 frames hold 1,023 chunks of four.
        assert_eq!(Profile::Uc.slots(5000, 16_384), 1023);
        assert_eq!(Profile::Uc.slots(64, 16_384), 64);
        assert_eq!(Profile::Uc.sent_bytes(1, 16_384), 16_384);
        assert_eq!(Profile::Rc.sent_bytes(1, 16_384), 1);
    }
}
