//! What crosses the wire for a service: a postcard header, then the body.
//!
//! The body is the last thing in a frame and as long as what is left of it, so a request is encoded straight into
//! its frame. The wire version is pinned by golden bytes in the tests below: within one version these enums may only
//! grow at their ends.

use bytes::{BufMut, Bytes, BytesMut};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::id::ServiceId;
use crate::env::FRAME_BYTES_MAX;

/// Longest text in a [`Fault`], in bytes. Longer ones are cut.
const FAULT_TEXT_BYTES_MAX: usize = 1024;

/// The head of a frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Header {
    /// Asks a service. The encoded request follows.
    Call {
        /// Chosen by the caller, returned with the answer.
        correlation: u64,
        /// Whom to ask.
        service: ServiceId,
        /// How long the caller still waits, in milliseconds.
        deadline_ms: u32,
    },
    /// Tells a service something, with no answer. The encoded request follows.
    Cast {
        /// Whom to tell.
        service: ServiceId,
    },
    /// The answer to a call. The encoded reply follows.
    Reply {
        /// The call's.
        correlation: u64,
    },
    /// There is no answer to a call, and why. Nothing follows.
    Fault {
        /// The call's.
        correlation: u64,
        /// Why.
        fault: Fault,
    },
}

/// Why a peer has no answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Fault {
    /// It does not offer the service.
    UnknownService,
    /// It cannot read the request.
    Malformed(String),
    /// It already works on as many calls of this peer as it allows.
    Overloaded,
    /// The service says that it failed, and how.
    Failed(String),
}

impl Fault {
    fn cut(self) -> Self {
        match self {
            Self::Malformed(text) => Self::Malformed(cut(text)),
            Self::Failed(text) => Self::Failed(cut(text)),
            other => other,
        }
    }
}

fn cut(mut text: String) -> String {
    if text.len() > FAULT_TEXT_BYTES_MAX {
        let end = (0..=FAULT_TEXT_BYTES_MAX).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        text.truncate(end);
    }
    text
}

/// Why bytes are no frame, or a message has none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The frame would be longer than a control frame may be.
    #[error("a message of {bytes} bytes is longer than the limit of {limit}")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The bytes do not say what they should.
    #[error("{0}")]
    Malformed(String),
}

impl From<postcard::Error> for FrameError {
    fn from(error: postcard::Error) -> Self {
        Self::Malformed(error.to_string())
    }
}

impl Header {
    /// Makes a frame without a body.
    ///
    /// # Errors
    /// None that a well-formed header could cause; the codec's, if it had one.
    pub fn encode(self) -> Result<Bytes, FrameError> {
        let header = match self {
            Self::Fault { correlation, fault } => Self::Fault { correlation, fault: fault.cut() },
            other => other,
        };
        Ok(postcard::to_stdvec(&header)?.into())
    }

    /// Makes a frame with `body`.
    ///
    /// # Errors
    /// [`FrameError::TooLong`] if it does not fit into [`FRAME_BYTES_MAX`], [`FrameError::Malformed`] if `body` cannot
    /// be encoded (postcard does not know how long a sequence is that does not know it itself).
    pub fn encode_with<T: Serialize>(self, body: &T) -> Result<Bytes, FrameError> {
        let head = postcard::to_extend(&self, Limited { bytes: BytesMut::with_capacity(64), dropped: 0 })?;
        let whole = postcard::to_extend(body, head)?;
        let bytes = whole.bytes.len() + whole.dropped;
        if bytes > FRAME_BYTES_MAX {
            return Err(FrameError::TooLong { bytes, limit: FRAME_BYTES_MAX });
        }
        Ok(whole.bytes.freeze())
    }

    /// Splits a frame into its header and its body.
    ///
    /// # Errors
    /// [`FrameError`] if it is too long, does not begin with a header, or has something where nothing belongs.
    pub fn decode(frame: &[u8]) -> Result<(Self, &[u8]), FrameError> {
        if frame.len() > FRAME_BYTES_MAX {
            return Err(FrameError::TooLong { bytes: frame.len(), limit: FRAME_BYTES_MAX });
        }
        let (header, body) = postcard::take_from_bytes::<Self>(frame)?;
        if matches!(header, Self::Fault { .. }) && !body.is_empty() {
            return Err(FrameError::Malformed(format!("{} bytes follow a fault", body.len())));
        }
        Ok((header, body))
    }
}

/// Reads a body whole.
pub(super) fn decode_body<T: DeserializeOwned>(body: &[u8]) -> Result<T, FrameError> {
    let (value, rest) = postcard::take_from_bytes(body)?;
    if rest.is_empty() { Ok(value) } else { Err(FrameError::Malformed(format!("{} bytes follow the message", rest.len()))) }
}

/// Takes at most one frame's worth of bytes and counts the rest, so that a message that is far too long costs no
/// memory.
struct Limited {
    bytes: BytesMut,
    dropped: usize,
}

impl Extend<u8> for Limited {
    fn extend<I: IntoIterator<Item = u8>>(&mut self, iter: I) {
        for byte in iter {
            if self.bytes.len() < FRAME_BYTES_MAX { self.bytes.put_u8(byte) } else { self.dropped += 1 }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn pinned(header: Header, bytes: &[u8]) {
        assert_eq!(header.clone().encode().unwrap(), bytes);
        assert_eq!(Header::decode(bytes).unwrap(), (header, &[][..]));
    }

    #[test]
    fn golden_bytes() {
        let (correlation, service) = (300, ServiceId::system(5));
        pinned(Header::Call { correlation, service, deadline_ms: 1000 }, &[0, 0xac, 2, 5, 0xe8, 7]);
        pinned(Header::Call { correlation, service: ServiceId::user(1), deadline_ms: 1 }, &[0, 0xac, 2, 0x81, 0x80, 4, 1]);
        pinned(Header::Cast { service }, &[1, 5]);
        pinned(Header::Reply { correlation }, &[2, 0xac, 2]);
        pinned(Header::Fault { correlation, fault: Fault::UnknownService }, &[3, 0xac, 2, 0]);
        pinned(Header::Fault { correlation, fault: Fault::Malformed("x".into()) }, &[3, 0xac, 2, 1, 1, b'x']);
        pinned(Header::Fault { correlation, fault: Fault::Overloaded }, &[3, 0xac, 2, 2]);
        pinned(Header::Fault { correlation, fault: Fault::Failed("no".into()) }, &[3, 0xac, 2, 3, 2, b'n', b'o']);
    }

    #[test]
    fn the_body_is_the_rest() {
        let frame = Header::Cast { service: ServiceId::system(5) }.encode_with(&(1_u8, "ab")).unwrap();
        assert_eq!(frame, [1, 5, 1, 2, b'a', b'b'][..]);
        let (_, body) = Header::decode(&frame).unwrap();
        assert_eq!(decode_body::<(u8, String)>(body).unwrap(), (1, "ab".to_owned()));
        assert!(decode_body::<u8>(body).is_err(), "what follows a message is not ignored");
    }

    #[test]
    fn too_long_is_said_and_not_kept() {
        let body = vec![7_u8; FRAME_BYTES_MAX];
        let error = Header::Cast { service: ServiceId::system(5) }.encode_with(&body).unwrap_err();
        // Two bytes of header and a length of four bytes come on top.
        assert_eq!(error, FrameError::TooLong { bytes: FRAME_BYTES_MAX + 6, limit: FRAME_BYTES_MAX });
        assert!(Header::decode(&vec![1; FRAME_BYTES_MAX + 1]).is_err());
    }

    #[test]
    fn long_fault_texts_are_cut_between_characters() {
        let fault = Fault::Failed("ä".repeat(2000));
        let frame = Header::Fault { correlation: 1, fault }.encode().unwrap();
        assert!(frame.len() < FAULT_TEXT_BYTES_MAX + 16);
        assert!(Header::decode(&frame).is_ok());
    }

    #[test]
    fn nothing_follows_a_fault() {
        assert!(Header::decode(&[3, 1, 2, 9]).is_err());
        assert!(Header::decode(&[4, 0]).is_err(), "an unknown kind is an error");
        assert!(Header::decode(&[]).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            if let Ok((header, body)) = Header::decode(&bytes) {
                let body = body.to_vec();
                let again = header.clone().encode().unwrap();
                let (read, rest) = Header::decode(&again).unwrap();
                prop_assert_eq!(read, header);
                prop_assert!(rest.is_empty());
                let _ = decode_body::<(u64, Vec<String>, Option<u32>)>(&body);
            }
        }

        #[test]
        fn calls_read_back(correlation: u64, number: u16, deadline_ms: u32, body in prop::collection::vec(any::<u8>(), 0..300)) {
            let header = Header::Call { correlation, service: ServiceId::user(number), deadline_ms };
            let frame = header.clone().encode_with(&body).unwrap();
            let (read, rest) = Header::decode(&frame).unwrap();
            prop_assert_eq!(read, header);
            prop_assert_eq!(decode_body::<Vec<u8>>(rest).unwrap(), body);
        }
    }
}
