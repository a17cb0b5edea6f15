use proptest::prelude::*;

use super::*;

fn example() -> FrameHeader {
    FrameHeader {
        class: FrameClass::Data,
        kind: 0x21,
        flags: 0x43,
        length: 5,
        sequence: 0x0102_0304_0506_0708,
        fence: Fence { instance: 0x0f0e_0d0c_0b0a_0908_0706_0504_0302_0100, term: TermTag::new(7, &[0xc0; 32]), epoch: 0x0a0b_0c0d },
        crc32c: payload_crc(&[b"he", b"", b"llo"]),
    }
}

#[test]
fn the_layout_is_pinned() {
    let bytes = example().encode();
    let golden: [u8; HEADER_BYTES] = [
        1, 1, 0x21, 0x43, 5, 0, 0, 0, // version, class, kind, flags, length
        8, 7, 6, 5, 4, 3, 2, 1, // sequence
        0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, // instance
        7, 0, 0, 0, 0, 0, 0, 0, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, // term
        0x0d, 0x0c, 0x0b, 0x0a, // epoch
        0x4c, 0xbb, 0x71, 0x9a, // crc32c of "hello"
        0, 0, 0, 0, // reserved
        0xf8, 0x3b, 0x42, 0xfa, // crc32c of the 60 bytes before
    ];
    assert_eq!(bytes, golden);
    // The check value of the Castagnoli polynomial, so that the checks are what other programs call crc32c.
    assert_eq!(payload_crc(&[b"123456789"]), 0xe306_9283);
}

#[test]
fn grants_and_probes_as_whole_frames_are_pinned() {
    use crate::channel::machine::{Arrival, ReceiverMachine, SenderMachine};
    let fence = Fence { instance: 9, term: TermTag { counter: 3, node: 0x0102_0304_0506_0708 }, epoch: 4 };
    let middle = [
        9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, // instance
        3, 0, 0, 0, 0, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1, // term
        4, 0, 0, 0, // epoch
    ];
    let mut receiver = ReceiverMachine::new(fence, 4, 4096);
    for sequence in 0..2 {
        let header = FrameHeader { class: FrameClass::Data, kind: 1, flags: 0, length: 0, sequence, fence, crc32c: 0 };
        assert_eq!(receiver.arrive(&header), Ok(Arrival::Expected));
        assert!(receiver.accept(&header));
        receiver.release();
    }
    let (grant, payload) = receiver.grant();
    let mut golden = vec![1, 2, 0, 0, 24, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    golden.extend(middle);
    // The payload's check, zeros, the header's check, as another program computes them.
    golden.extend([0x43, 0x24, 0x23, 0x4e, 0, 0, 0, 0, 0x67, 0x3a, 0x28, 0xc2]);
    assert_eq!(grant.encode()[..], golden);
    assert_eq!(payload, [2, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0]);
    let probe = SenderMachine::new(fence, 4, 4096).probe();
    let mut golden = vec![1, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    golden.extend(middle);
    golden.extend([0, 0, 0, 0, 0, 0, 0, 0, 0x99, 0x4a, 0x4a, 0x57]);
    assert_eq!(probe.encode()[..], golden);
}

#[test]
fn foreign_versions_classes_and_lengths_are_named() {
    let reseal = |mut bytes: [u8; HEADER_BYTES]| {
        let check = crc32c::crc32c(&bytes[..60]);
        bytes[60..].copy_from_slice(&check.to_le_bytes());
        bytes
    };
    let mut bytes = example().encode();
    bytes[0] = 2;
    assert_eq!(FrameHeader::decode(&reseal(bytes), 64), Err(FrameError::Version { found: 2 }));
    let mut bytes = example().encode();
    bytes[1] = 9;
    assert_eq!(FrameHeader::decode(&reseal(bytes), 64), Err(FrameError::Malformed { class: 9 }));
    let mut bytes = example().encode();
    bytes[57] = 1;
    assert_eq!(FrameHeader::decode(&reseal(bytes), 64), Err(FrameError::Malformed { class: 1 }));
    assert_eq!(FrameHeader::decode(&example().encode(), 4), Err(FrameError::TooLong { bytes: 5, limit: 4 }));
    assert_eq!(FrameHeader::decode(&[0; 63], 4), Err(FrameError::Short { bytes: 63 }));
}

#[test]
fn fences_order_by_term_before_epoch_and_never_across_instances() {
    let fence = |instance, counter, epoch| Fence { instance, term: TermTag { counter, node: 0 }, epoch };
    assert!(fence(1, 2, 0).supersedes(&fence(1, 1, 9)));
    assert!(fence(1, 1, 2).supersedes(&fence(1, 1, 1)));
    assert!(!fence(1, 1, 1).supersedes(&fence(1, 1, 1)));
    assert_eq!(fence(1, 2, 0).compare(&fence(2, 1, 0)), None);
    let mut low = [0; 32];
    low[0] = 1;
    let mut high = low;
    high[1] = 1;
    assert!(TermTag::new(3, &high) > TermTag::new(3, &low));
    assert!(TermTag::new(4, &low) > TermTag::new(3, &high));
}

fn any_header() -> impl Strategy<Value = FrameHeader> {
    let class = prop_oneof![Just(FrameClass::Data), Just(FrameClass::Grant), Just(FrameClass::Probe)];
    let fence = (any::<u128>(), any::<u64>(), any::<u64>(), any::<u32>()).prop_map(|(instance, counter, node, epoch)| Fence {
        instance,
        term: TermTag { counter, node },
        epoch,
    });
    (class, any::<u8>(), any::<u8>(), any::<u32>(), any::<u64>(), fence, any::<u32>()).prop_map(
        |(class, kind, flags, length, sequence, fence, crc32c)| FrameHeader { class, kind, flags, length, sequence, fence, crc32c },
    )
}

proptest! {
    #[test]
    fn headers_round_trip(header in any_header()) {
        prop_assert_eq!(FrameHeader::decode(&header.encode(), u32::MAX), Ok(header));
    }

    #[test]
    fn a_length_beyond_the_slot_is_always_refused(header in any_header(), limit in any::<u32>()) {
        let decoded = FrameHeader::decode(&header.encode(), limit);
        prop_assert_eq!(decoded.is_ok(), header.length <= limit);
    }

    #[test]
    fn arbitrary_bytes_are_refused_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), limit in any::<u32>()) {
        if let Ok(header) = FrameHeader::decode(&bytes, limit) {
            prop_assert_eq!(&header.encode()[..], &bytes[..HEADER_BYTES]);
        }
    }

    #[test]
    fn any_flipped_bit_of_a_header_is_seen(header in any_header(), bit in 0..HEADER_BYTES * 8) {
        let mut bytes = header.encode();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let seen = matches!(FrameHeader::decode(&bytes, u32::MAX), Err(FrameError::HeaderCheck { .. }));
        prop_assert!(seen);
    }

    #[test]
    fn any_flipped_bit_of_a_payload_is_seen(mut payload in prop::collection::vec(any::<u8>(), 1..300), bit in any::<prop::sample::Index>()) {
        let header = FrameHeader { length: payload.len() as u32, crc32c: payload_crc(&[&payload]), ..example() };
        prop_assert_eq!(header.verify(&payload), Ok(()));
        let bit = bit.index(payload.len() * 8);
        payload[bit / 8] ^= 1 << (bit % 8);
        let seen = matches!(header.verify(&payload), Err(FrameError::PayloadCheck { .. }));
        prop_assert!(seen);
    }
}
