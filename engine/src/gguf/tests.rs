//! What is read as it was written, and what is refused, with which words.

use super::*;

/// A file with one value and one tensor of two rows of Q8_0.
fn small() -> Writer {
    let mut writer = Writer::new();
    writer.metadata("general.architecture", Value::String("llama".into()));
    writer.tensor("w", &[32, 2], BlockType::Q8_0, vec![1; 68]);
    writer
}

/// The fault in a file that must not be accepted.
fn fault(bytes: &[u8]) -> GgufFault {
    match Gguf::parse(bytes) {
        Ok(_) => panic!("the file was accepted"),
        Err(error) => {
            assert!(error.to_string().starts_with("cannot use the model file GGUF in memory: "), "{error}");
            error.fault
        }
    }
}

/// Replaces the only occurrence of `from`.
fn replace(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let places: Vec<usize> = bytes.windows(from.len()).enumerate().filter(|(_, window)| *window == from).map(|(at, _)| at).collect();
    assert_eq!(places.len(), 1, "{from:?} occurs {} times", places.len());
    let mut out = bytes[..places[0]].to_vec();
    out.extend(to);
    out.extend(&bytes[places[0] + from.len()..]);
    out
}

#[test]
fn a_file_from_elsewhere_is_read() {
    let gguf = Gguf::parse(&include_bytes!("../../tests/data/tiny-llama.gguf")[..]).unwrap();
    assert_eq!(gguf.version(), 3);
    assert_eq!(gguf.alignment(), 32);
    assert_eq!(gguf.file_bytes(), 130_912);
    assert_eq!(gguf.str("general.architecture"), Some("llama"));
    assert_eq!(gguf.u32("llama.embedding_length"), Some(64));
    assert_eq!(gguf.f32("llama.rope.freq_base"), Some(10_000.0));
    assert_eq!(gguf.bool("tokenizer.ggml.add_bos_token"), Some(false));
    let tokens = gguf.strings("tokenizer.ggml.tokens").unwrap();
    assert_eq!((tokens.len(), tokens[0].as_str(), tokens[36].as_str()), (320, "<|endoftext|>", "!"));
    assert_eq!(&gguf.i32s("tokenizer.ggml.token_type").unwrap()[1..5], [3, 3, 1, 1]);
    assert_eq!(gguf.tensors().len(), 29);
    let embedding = gguf.tensor("token_embd.weight").unwrap();
    assert_eq!((embedding.shape, embedding.block), (&[64, 320][..], BlockType::Q8_0));
    assert_eq!((embedding.row_len(), embedding.rows(), embedding.row_bytes(), embedding.elements()), (64, 320, 68, 20480));
    assert_eq!(embedding.row(319).unwrap(), &embedding.bytes[319 * 68..]);
    assert!(embedding.row(320).is_none());
    assert_eq!(embedding.dequantise().unwrap().len(), 20480);
    let norm = gguf.tensor("output_norm.weight").unwrap().dequantise().unwrap();
    assert!(norm.iter().all(|weight| (0.5..1.5).contains(weight)));
}

#[test]
fn a_mapped_file_is_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, small().finish()).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    assert_eq!(gguf.name(), path.display().to_string());
    assert_eq!(gguf.clone().tensor("w").unwrap().bytes, [1; 68]);

    std::fs::write(&path, b"").unwrap();
    assert!(Gguf::open(&path).unwrap_err().to_string().contains("model.gguf: it is not a GGUF file but empty"));
    let missing = Gguf::open(&folder.path().join("missing.gguf")).unwrap_err();
    assert!(matches!(missing.fault, GgufFault::Io(_)) && missing.to_string().contains("missing.gguf"), "{missing}");
    assert!(Gguf::open(folder.path()).unwrap_err().to_string().contains("it is a folder"));
}

/// A file whose size would justify any count: the header has a limit of its own.
#[cfg(unix)]
#[test]
fn a_header_without_end_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut start = b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0k".to_vec();
    let size: u64 = 1 << 40;
    // The rest is zeros that take no room on the disk.
    let open = |start: &[u8]| {
        std::fs::write(&path, start).unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(size).unwrap();
        Gguf::open(&path).unwrap_err().fault
    };
    start.extend(8u32.to_le_bytes());
    assert!(
        matches!(open(&[&start[..], &(size / 2).to_le_bytes()].concat()), GgufFault::HeaderTooLong { at: Place::Key(key), .. } if key == "k")
    );
    let end = start.len() - 4;
    start[end..].copy_from_slice(&9u32.to_le_bytes());
    start.extend(8u32.to_le_bytes());
    assert!(matches!(open(&[&start[..], &(size / 16).to_le_bytes()].concat()), GgufFault::Count { at: Place::Key(key), .. } if key == "k"));
}

#[test]
fn every_value_type_survives_writing_and_reading() {
    let values = [
        Value::U8(200),
        Value::I8(-100),
        Value::U16(60_000),
        Value::I16(-30_000),
        Value::U32(4_000_000_000),
        Value::I32(-2_000_000_000),
        Value::U64(1 << 63),
        Value::I64(i64::MIN),
        Value::F32(0.1),
        Value::F64(-1e300),
        Value::Bool(true),
        Value::String("grüße 🐟".into()),
        Value::Array(Array::U8(vec![1, 2])),
        Value::Array(Array::I8(vec![-1])),
        Value::Array(Array::U16(vec![1])),
        Value::Array(Array::I16(vec![-1])),
        Value::Array(Array::U32(vec![1, 2, 3])),
        Value::Array(Array::I32(vec![-1])),
        Value::Array(Array::U64(vec![u64::MAX])),
        Value::Array(Array::I64(vec![-1])),
        Value::Array(Array::F32(vec![0.5, -0.5])),
        Value::Array(Array::F64(vec![0.25])),
        Value::Array(Array::Bools(vec![true, false])),
        Value::Array(Array::Strings(vec![String::new(), "a".into()])),
        Value::Array(Array::Arrays(vec![Array::U8(vec![7]), Array::Arrays(vec![Array::Strings(vec!["x".into()])])])),
        Value::Array(Array::U32(Vec::new())),
    ];
    let mut writer = Writer::new();
    for (place, value) in values.iter().enumerate() {
        writer.metadata(&format!("key{place}"), value.clone());
    }
    let gguf = Gguf::parse(writer.finish()).unwrap();
    let read: Vec<&Value> = gguf.all_metadata().map(|(_, value)| value).collect();
    assert_eq!(read, values.iter().collect::<Vec<_>>());
    assert_eq!(gguf.u32("key0"), Some(200));
    assert_eq!(gguf.u32("key5"), None, "a negative number");
    assert_eq!(gguf.u32("key6"), None, "a number too large");
    assert_eq!(gguf.u64("key6"), Some(1 << 63));
    assert_eq!(gguf.f32("key0"), None, "another type");
}

#[test]
fn version_2_is_read_and_others_are_refused_by_number() {
    let mut bytes = small().finish();
    bytes[4] = 2;
    assert_eq!(Gguf::parse(&bytes[..]).unwrap().version(), 2);
    for version in [0u32, 1, 4] {
        bytes[4..8].copy_from_slice(&version.to_le_bytes());
        assert!(matches!(fault(&bytes), GgufFault::Version(v) if v == version));
    }
    bytes[4..8].copy_from_slice(&3u32.to_be_bytes());
    assert!(matches!(fault(&bytes), GgufFault::BigEndian));
}

#[test]
fn what_is_no_gguf_is_recognised() {
    let cases: [(&[u8], &str); 7] = [
        (b"", "empty"),
        (b"<!DOCTYPE html>", "a web page or XML"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b"tjgg\x03\0\0\0", "before GGUF"),
        (b"\x40\0\0\0\0\0\0\0{\"a\":1}", "safetensors"),
        (b"PK\x03\x04zzzz", "ZIP"),
        (b"something that nobody knows", "something else"),
    ];
    for (bytes, words) in cases {
        let fault = fault(bytes);
        assert!(matches!(fault, GgufFault::Magic { .. }) && fault.to_string().contains(words), "{fault}");
    }
    assert!(matches!(fault(b"GG"), GgufFault::Truncated { at: Place::Start }));
}

#[test]
fn a_file_cut_anywhere_is_refused_and_says_where() {
    let bytes = small().finish();
    let gguf = Gguf::parse(&bytes[..]).unwrap();
    for length in 1..bytes.len() {
        let fault = fault(&bytes[..length]);
        let header = matches!(fault, GgufFault::Truncated { .. } | GgufFault::Count { .. });
        let data = matches!(fault, GgufFault::PastEnd { .. });
        assert!(if length < gguf.data_offset() as usize - 32 { header } else { header || data }, "{length}: {fault}");
        assert!(fault.to_string().contains("download it again"), "{fault}");
    }
}

#[test]
fn counts_are_held_against_the_file() {
    for (at, place) in [(8, Place::TensorCount), (16, Place::MetadataCount)] {
        for count in [1 << 40, u64::MAX] {
            let mut bytes = small().finish();
            bytes[at..at + 8].copy_from_slice(&u64::to_le_bytes(count));
            assert!(matches!(fault(&bytes), GgufFault::Count { at, count: c, .. } if at == place && c == count));
        }
    }
    // An array of a length that overflows when multiplied, and one of a length that is merely not there.
    for count in [u64::MAX, 1 << 61, 1000] {
        let mut writer = small();
        writer.metadata("array", Value::Array(Array::U64(vec![0x5555_5555_5555_5555])));
        let bytes =
            replace(&writer.finish(), &[&1u64.to_le_bytes()[..], &[0x55; 8]].concat(), &[&count.to_le_bytes()[..], &[0x55; 8]].concat());
        assert!(matches!(fault(&bytes), GgufFault::Count { at: Place::Key(key), .. } if key == "array"));
    }
    // A string longer than the file.
    let bytes = replace(&small().finish(), b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\x80llama");
    assert!(matches!(fault(&bytes), GgufFault::Truncated { at: Place::Key(key) } if key == "general.architecture"));
}

#[test]
fn false_values_are_refused_with_their_key() {
    let with = |value: Value| small().metadata("key", value).finish();
    let bytes = replace(&with(Value::String("text".into())), b"text", b"te\xfft");
    assert_eq!(
        fault(&bytes).to_string(),
        "the metadata entry \"key\" is not valid UTF-8: the file is damaged or incomplete; download it again"
    );
    let bytes = replace(&with(Value::U32(0x7777_7777)), b"\x04\0\0\0wwww", b"\x0d\0\0\0wwww");
    assert!(matches!(fault(&bytes), GgufFault::ValueType { at: Place::Key(key), id: 13 } if key == "key"));
    let bytes = replace(
        &with(Value::Array(Array::U32(vec![0x7777_7777]))),
        b"\x04\0\0\0\x01\0\0\0\0\0\0\0wwww",
        b"\x63\0\0\0\x01\0\0\0\0\0\0\0wwww",
    );
    assert!(matches!(fault(&bytes), GgufFault::ValueType { id: 0x63, .. }));
    let bytes = replace(&with(Value::Bool(true)), b"key\x07\0\0\0\x01", b"key\x07\0\0\0\x02");
    assert!(matches!(fault(&bytes), GgufFault::Bool { byte: 2, .. }));
    let nested = (0..4).fold(Array::U8(vec![1]), |inner, _| Array::Arrays(vec![inner]));
    assert!(matches!(fault(&with(Value::Array(nested))), GgufFault::Nesting { .. }));
}

#[test]
fn names_are_not_empty_nor_given_twice() {
    let bytes = small().metadata("one", Value::U8(1)).metadata("two", Value::U8(2)).finish();
    assert!(matches!(fault(&replace(&bytes, b"two", b"one")), GgufFault::Duplicate { at: Place::Key(key) } if key == "one"));
    let bytes = small().tensor("v", &[1], BlockType::F32, vec![0; 4]).finish();
    let twice = replace(&bytes, b"\x01\0\0\0\0\0\0\0v", b"\x01\0\0\0\0\0\0\0w");
    assert!(matches!(fault(&twice), GgufFault::Duplicate { at: Place::Tensor(name) } if name == "w"));
    assert!(matches!(fault(&small().metadata("", Value::U8(1)).finish()), GgufFault::NameLength { at: Place::KeyName(1), .. }));
    assert!(matches!(fault(&small().tensor("", &[1], BlockType::I8, vec![0]).finish()), GgufFault::NameLength { .. }));
}

#[test]
fn alignment_is_a_power_of_two_and_heeded() {
    for alignment in [8u32, 64, 4096] {
        let mut writer = small();
        writer.metadata("general.alignment", Value::U32(alignment)).tensor("v", &[2], BlockType::F32, vec![9; 8]);
        let gguf = Gguf::parse(writer.finish()).unwrap();
        assert_eq!(gguf.alignment(), u64::from(alignment));
        assert_eq!(gguf.tensor("v").unwrap().bytes, [9; 8]);
        assert!(gguf.tensors().all(|view| view.offset.is_multiple_of(u64::from(alignment))));
    }
    for value in [Value::U32(0), Value::U32(24), Value::U32(1 << 30), Value::String("x".into())] {
        assert!(matches!(fault(&small().metadata("general.alignment", value).finish()), GgufFault::Alignment { .. }));
    }
}

/// A header that says whatever is wanted of a tensor named `t`, with 64 bytes of data.
fn claim(shape: &[u64], id: u32, offset: u64) -> Vec<u8> {
    let mut bytes = b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0t".to_vec();
    bytes.extend((shape.len() as u32).to_le_bytes());
    shape.iter().for_each(|length| bytes.extend(length.to_le_bytes()));
    bytes.extend(id.to_le_bytes());
    bytes.extend(offset.to_le_bytes());
    bytes.resize(bytes.len().next_multiple_of(32) + 64, 0);
    bytes
}

#[test]
fn tensors_lie_within_the_file() {
    assert!(Gguf::parse(claim(&[16], 0, 0)).is_ok());
    assert!(Gguf::parse(claim(&[8], 0, 32)).is_ok());
    assert!(matches!(fault(&claim(&[17], 0, 0)), GgufFault::PastEnd { size: 68, available: 64, .. }));
    assert!(matches!(fault(&claim(&[16], 0, 32)), GgufFault::PastEnd { .. }));
    assert!(matches!(fault(&claim(&[1], 0, 1 << 40)), GgufFault::PastEnd { .. }));
    assert!(matches!(fault(&claim(&[1], 0, u64::MAX - 31)), GgufFault::PastEnd { .. }));
    assert!(matches!(fault(&claim(&[1], 0, 4)), GgufFault::Unaligned { offset: 4, alignment: 32, .. }));
    assert!(matches!(fault(&claim(&[u64::MAX], 24, 32)), GgufFault::PastEnd { .. }));
}

#[test]
fn shapes_and_types_are_possible() {
    assert_eq!(Gguf::parse(claim(&[], 0, 0)).unwrap().tensor("t").unwrap().shape, [1]);
    assert!(matches!(fault(&claim(&[0], 0, 0)), GgufFault::Shape { .. }));
    assert!(matches!(fault(&claim(&[4, 0], 0, 0)), GgufFault::Shape { .. }));
    assert!(matches!(fault(&claim(&[1 << 32, 1 << 32], 0, 0)), GgufFault::Shape { .. }));
    assert!(matches!(fault(&claim(&[1 << 62], 0, 0)), GgufFault::Shape { .. }));
    assert!(matches!(fault(&claim(&[1, 1, 1, 1, 1], 0, 0)), GgufFault::Count { count: 5, limit: 4, .. }));
    assert!(matches!(fault(&claim(&[33], 2, 0)), GgufFault::Row { elements: 33, block: "Q4_0", .. }));
    assert!(matches!(fault(&claim(&[1], 77, 0)), GgufFault::TensorType { id: 77, .. }));
    assert!(matches!(fault(&claim(&[32], 31, 0)), GgufFault::WithdrawnType { name: "Q4_0_4_4", .. }));
    // A type that is known but cannot be unpacked is a matter for whoever needs the tensor.
    let unusual = Gguf::parse(claim(&[8], BlockType::I32.id(), 0)).unwrap();
    assert_eq!(unusual.tensor("t").unwrap().dequantise(), Err(QuantError::Unsupported(BlockType::I32)));
}

#[test]
fn tensors_do_not_overlap() {
    let bytes = small().tensor("v", &[8], BlockType::F32, vec![2; 32]).finish();
    // The first takes 68 bytes, so the second starts at 96.
    assert!(Gguf::parse(&bytes[..]).is_ok());
    let bytes = replace(&bytes, &96u64.to_le_bytes(), &64u64.to_le_bytes());
    let fault = fault(&bytes);
    assert_eq!(fault.to_string(), "the tensor \"w\" and the tensor \"v\" overlap: the file is damaged or incomplete; download it again");
}

#[test]
fn names_are_shown_escaped_and_short() {
    let name = format!("\u{1b}[31m{}", "x".repeat(500));
    let shown = Place::Tensor(name).to_string();
    assert!(shown.starts_with("the tensor \"\\u{1b}[31mxxx") && shown.len() < 120, "{shown}");
}
