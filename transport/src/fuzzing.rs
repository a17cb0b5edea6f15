//! Every parser that hears a peer, as functions of bytes: what the fuzz targets in `fuzz/` call, and the property tests beside them.
//!
//! Each panics if a promise is broken; whatever the bytes are, that must not happen.

use crate::channel::Grant;
use crate::frame::{FrameHeader, HEADER_BYTES};

pub use crate::provider::fuzz_handshake as handshake;
pub use crate::provider::tcp::fuzzing::{addresses, records};
pub use crate::remote::fuzz_head as remote_head;

/// A frame header is refused, or is exactly what would be written for what was read; and a payload that does not fit it is refused.
pub fn frame_header(bytes: &[u8]) {
    let limit = 1 << 20;
    let Ok(header) = FrameHeader::decode(bytes, limit) else { return };
    assert_eq!(header.encode()[..], bytes[..HEADER_BYTES]);
    assert!(header.length <= limit);
    let payload = &bytes[HEADER_BYTES..];
    if header.verify(payload).is_ok() {
        assert_eq!(header.length as usize, payload.len());
    }
}

/// A grant is refused, or is exactly what would be written for what was read.
pub fn grant(bytes: &[u8]) {
    if let Some(grant) = Grant::decode(bytes) {
        assert_eq!(grant.encode()[..], *bytes);
        assert!(grant.acked <= grant.limit);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::frame::{Fence, FrameClass, payload_crc};

    /// Random bytes, and bytes that mean something with a few changed.
    fn bytes(meaningful: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
        let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
        let changed = (changes, any::<prop::sample::Index>(), any::<bool>()).prop_map(move |(changes, end, cut)| {
            let mut bytes = meaningful.clone();
            for (at, with) in changes {
                let at = at.index(bytes.len());
                bytes[at] ^= with;
            }
            if cut {
                bytes.truncate(end.index(bytes.len() + 1));
            }
            bytes
        });
        prop_oneof![prop::collection::vec(any::<u8>(), 0..200), changed]
    }

    fn frame() -> Vec<u8> {
        let payload = b"payload";
        let crc32c = payload_crc(&[payload]);
        let header = FrameHeader { class: FrameClass::Data, kind: 1, flags: 0, length: 7, sequence: 2, fence: Fence::default(), crc32c };
        [&header.encode()[..], payload].concat()
    }

    proptest! {
        #[test]
        fn headers_and_grants_of_any_bytes(
            header in bytes(frame()), grant_bytes in bytes(Grant { acked: 3, limit: 5, slot_bytes: 64 }.encode().to_vec()),
            head in bytes(vec![0; 64]),
        ) {
            frame_header(&header);
            // Most changes are found by the check at the end; this looks behind it.
            if header.len() >= HEADER_BYTES {
                let mut sealed = header;
                let check = crc32c::crc32c(&sealed[..60]);
                sealed[60..64].copy_from_slice(&check.to_le_bytes());
                frame_header(&sealed);
            }
            grant(&grant_bytes);
            remote_head(&head);
        }

        #[test]
        fn handshakes_of_any_bytes(
            hello in bytes(crate::provider::golden::golden("hello")), verdict in bytes(crate::provider::golden::golden("verdict")),
            list in bytes(crate::provider::golden::golden("list")),
        ) {
            handshake(&hello);
            handshake(&[&hello[..], &verdict].concat());
            addresses(&list);
        }
    }
}
