//! The header of every channel message: 64 bytes, little-endian, the same on every provider.
//!
//! ```text
//!  0  version u8 │ class u8 │ kind u8 │ flags u8
//!  4  payload length u32, bytes
//!  8  sequence u64
//! 16  instance u128
//! 32  term: counter u64
//! 40  term: node tag u64
//! 48  plan epoch u32
//! 52  crc32c of the payload u32
//! 56  zero u32
//! 60  crc32c of the 60 bytes before u32
//! ```
//!
//! The header is as long as a cache line, so a payload that follows it in a page-aligned slot is aligned for any
//! vector instruction. Its own check comes last: a header that fails it is not believed in any field, least of all in
//! the length.

mod fence;
#[cfg(test)]
mod tests;

pub use fence::{Fence, TermTag};

/// Length of an encoded [`FrameHeader`] in bytes.
pub const HEADER_BYTES: usize = 64;

/// The layout that this crate writes and the only one that it reads.
pub const VERSION: u8 = 1;

/// What a frame is for. Everything but [`FrameClass::Data`] is the channel's own business.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FrameClass {
    /// A message of the user. `kind` says which, `sequence` counts from 0 in each fence.
    Data,
    /// From the receiving end: what has arrived and how much more may be sent.
    Grant,
    /// From the sending end: please repeat the grant.
    Probe,
}

impl FrameClass {
    const fn code(self) -> u8 {
        match self {
            Self::Data => 1,
            Self::Grant => 2,
            Self::Probe => 3,
        }
    }

    const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Data),
            2 => Some(Self::Grant),
            3 => Some(Self::Probe),
            _ => None,
        }
    }
}

/// The header of one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// What the frame is for.
    pub class: FrameClass,
    /// The user's own message kind; 0 in frames of the channel itself.
    pub kind: u8,
    /// Reserved for the user of the channel; 0 in frames of the channel itself.
    pub flags: u8,
    /// Payload length in bytes.
    pub length: u32,
    /// Position in the stream of data messages of this fence, from 0.
    pub sequence: u64,
    /// The instance, term and plan epoch that the frame belongs to.
    pub fence: Fence,
    /// crc32c (Castagnoli) of the payload.
    pub crc32c: u32,
}

/// Why bytes are not a frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Fewer bytes than a header has.
    #[error("a message of {bytes} bytes is shorter than the frame header of {HEADER_BYTES}; the peer speaks something else")]
    Short {
        /// Length of the message.
        bytes: usize,
    },
    /// The header's check fails.
    #[error("a frame header is damaged: its check is {found:#010x}, its bytes give {computed:#010x}")]
    HeaderCheck {
        /// What the header says.
        found: u32,
        /// What its bytes give.
        computed: u32,
    },
    /// A layout that this node does not know.
    #[error("a frame has layout version {found}, this node speaks {VERSION}; run the same release on both nodes")]
    Version {
        /// The version in the header.
        found: u8,
    },
    /// A class that this node does not know, or reserved bytes that are not zero.
    #[error("a frame of version {VERSION} has an unknown class or reserved bytes in use (class {class})")]
    Malformed {
        /// The class byte.
        class: u8,
    },
    /// The payload is longer than the two ends agreed on.
    #[error("a frame announces a payload of {bytes} bytes, the slots of this channel hold {limit}")]
    TooLong {
        /// Announced length.
        bytes: u32,
        /// Agreed limit.
        limit: u32,
    },
    /// The message is longer or shorter than its header says.
    #[error("a frame announces a payload of {announced} bytes, {bytes} came")]
    Length {
        /// What the header says.
        announced: u32,
        /// What came with it.
        bytes: usize,
    },
    /// The payload's check fails.
    #[error("the payload of frame {sequence} is damaged: {bytes} bytes give crc {computed:#010x}, the header says {found:#010x}")]
    PayloadCheck {
        /// The frame's sequence number.
        sequence: u64,
        /// Its length.
        bytes: usize,
        /// What the header says.
        found: u32,
        /// What the payload gives.
        computed: u32,
    },
}

/// The check over a payload that is handed over in parts.
pub fn payload_crc(parts: &[&[u8]]) -> u32 {
    parts.iter().fold(0, |crc, part| crc32c::crc32c_append(crc, part))
}

impl FrameHeader {
    /// Writes the header.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0] = VERSION;
        out[1] = self.class.code();
        out[2] = self.kind;
        out[3] = self.flags;
        out[4..8].copy_from_slice(&self.length.to_le_bytes());
        out[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        out[16..32].copy_from_slice(&self.fence.instance.to_le_bytes());
        out[32..40].copy_from_slice(&self.fence.term.counter.to_le_bytes());
        out[40..48].copy_from_slice(&self.fence.term.node.to_le_bytes());
        out[48..52].copy_from_slice(&self.fence.epoch.to_le_bytes());
        out[52..56].copy_from_slice(&self.crc32c.to_le_bytes());
        let check = crc32c::crc32c(&out[..60]);
        out[60..64].copy_from_slice(&check.to_le_bytes());
        out
    }

    /// Reads the header of a message that begins with these bytes. Nothing is allocated and nothing beyond the header
    /// is looked at; `payload_bytes_max` is what the ends of the channel agreed on.
    ///
    /// # Errors
    /// [`FrameError`] for every header that [`FrameHeader::encode`] would not have written, or whose payload would
    /// not fit.
    pub fn decode(bytes: &[u8], payload_bytes_max: u32) -> Result<Self, FrameError> {
        let Some((header, _)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
            return Err(FrameError::Short { bytes: bytes.len() });
        };
        let found = u32::from_le_bytes(field(header, 60));
        let computed = crc32c::crc32c(&header[..60]);
        if found != computed {
            return Err(FrameError::HeaderCheck { found, computed });
        }
        if header[0] != VERSION {
            return Err(FrameError::Version { found: header[0] });
        }
        let reserved: [u8; 4] = field(header, 56);
        let class = FrameClass::from_code(header[1]).filter(|_| reserved == [0; 4]);
        let Some(class) = class else { return Err(FrameError::Malformed { class: header[1] }) };
        let length = u32::from_le_bytes(field(header, 4));
        if length > payload_bytes_max {
            return Err(FrameError::TooLong { bytes: length, limit: payload_bytes_max });
        }
        Ok(Self {
            class,
            kind: header[2],
            flags: header[3],
            length,
            sequence: u64::from_le_bytes(field(header, 8)),
            fence: Fence {
                instance: u128::from_le_bytes(field(header, 16)),
                term: TermTag { counter: u64::from_le_bytes(field(header, 32)), node: u64::from_le_bytes(field(header, 40)) },
                epoch: u32::from_le_bytes(field(header, 48)),
            },
            crc32c: u32::from_le_bytes(field(header, 52)),
        })
    }

    /// Compares a payload with what the header says of it.
    ///
    /// # Errors
    /// [`FrameError::Length`] or [`FrameError::PayloadCheck`].
    pub fn verify(&self, payload: &[u8]) -> Result<(), FrameError> {
        if usize::try_from(self.length) != Ok(payload.len()) {
            return Err(FrameError::Length { announced: self.length, bytes: payload.len() });
        }
        let computed = crc32c::crc32c(payload);
        if computed != self.crc32c {
            return Err(FrameError::PayloadCheck { sequence: self.sequence, bytes: payload.len(), found: self.crc32c, computed });
        }
        Ok(())
    }
}

/// `N` bytes of a header at a fixed place.
fn field<const N: usize>(header: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&header[at..at + N]);
    out
}
