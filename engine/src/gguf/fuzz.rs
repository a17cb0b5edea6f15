//! Whatever the bytes, reading them ends well: with an error, or with tensors that are within the file.

use super::*;
use proptest::prelude::*;

const TINY: &[u8] = include_bytes!("../../tests/data/tiny-llama.gguf");

/// What must hold of a file that was accepted.
fn sound(bytes: &[u8]) {
    let Ok(gguf) = Gguf::parse(bytes) else { return };
    let mut ranges = Vec::new();
    for view in gguf.tensors() {
        let (start, end) = (view.offset, view.offset + view.bytes.len() as u64);
        assert!(start >= gguf.data_offset() && end <= bytes.len() as u64 && start < end);
        assert!(start.is_multiple_of(gguf.alignment()));
        assert_eq!(view.shape.iter().product::<u64>(), view.elements() as u64);
        assert_eq!(view.rows() * view.row_bytes(), view.bytes.len());
        assert_eq!(view.bytes, &bytes[start as usize..end as usize]);
        ranges.push((start, end));
    }
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
    // The layers above must live with what is accepted.
    let _ = crate::card::ModelCard::from_gguf(&gguf);
}

/// A small file that has a bit of everything, so that changes hit something.
fn dense() -> Vec<u8> {
    let mut writer = Writer::new();
    writer
        .metadata("general.architecture", Value::String("llama".into()))
        .metadata("a", Value::Array(Array::Strings(vec!["x".into(), "yz".into()])))
        .metadata("b", Value::Array(Array::Arrays(vec![Array::U16(vec![1, 2]), Array::Bools(vec![true])])))
        .metadata("c", Value::F64(1.0))
        .metadata("general.alignment", Value::U32(8))
        .tensor("t", &[2, 3], BlockType::F32, vec![0; 24])
        .tensor("u", &[32], BlockType::Q4_0, vec![0; 18])
        .tensor("v", &[1, 1, 1, 2], BlockType::I64, vec![0; 16]);
    writer.finish()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn arbitrary_bytes_after_the_magic(version in 0u32..5, rest in prop::collection::vec(any::<u8>(), 0..400)) {
        sound(&[b"GGUF", &version.to_le_bytes()[..], &rest].concat());
    }

    #[test]
    fn small_numbers_after_the_magic(rest in prop::collection::vec(prop_oneof![4 => Just(0u8), 2 => 0u8..16, 1 => any::<u8>()], 0..400)) {
        sound(&[b"GGUF\x03\0\0\0", &rest[..]].concat());
    }

    #[test]
    fn bytes_changed(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let mut bytes = dense();
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        sound(&bytes);
    }

    #[test]
    fn numbers_changed(place in any::<prop::sample::Index>(), number in prop_oneof![
        Just(u64::MAX), Just(1 << 63), Just(1 << 32), Just(u64::from(u32::MAX)), 0u64..300, any::<u64>(),
    ]) {
        let mut bytes = dense();
        let place = place.index(bytes.len() - 8);
        bytes[place..place + 8].copy_from_slice(&number.to_le_bytes());
        sound(&bytes);
    }

    #[test]
    fn pieces_moved(from in any::<prop::sample::Index>(), to in any::<prop::sample::Index>(), length in 0usize..64, cut in any::<bool>()) {
        let bytes = dense();
        let (from, to) = (from.index(bytes.len()), to.index(bytes.len()));
        let piece = &bytes[from..bytes.len().min(from + length)];
        let rest = if cut { &bytes[bytes.len().min(to + piece.len())..] } else { &bytes[to..] };
        sound(&[&bytes[..to], piece, rest].concat());
    }

    #[test]
    fn cut_off(length in any::<prop::sample::Index>()) {
        let bytes = dense();
        sound(&bytes[..length.index(bytes.len())]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_real_header_changed(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6), near_start in any::<bool>()) {
        let header = Gguf::parse(TINY).unwrap().data_offset() as usize;
        let mut bytes = TINY.to_vec();
        for (place, byte) in changes {
            let place = place.index(if near_start { 700 } else { header });
            bytes[place] = byte;
        }
        sound(&bytes);
    }

    #[test]
    fn a_real_file_cut_off(length in any::<prop::sample::Index>()) {
        let bytes = &TINY[..length.index(TINY.len())];
        prop_assert!(Gguf::parse(bytes).is_err(), "the last tensor ends where the file does");
    }
}
