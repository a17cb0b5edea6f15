//! Held against ggml's own Python package; see `tests/data/make_quant_golden.py`.

use super::*;
use proptest::prelude::*;

struct Record<'a> {
    block: BlockType,
    packing: bool,
    blocks: &'a [u8],
    numbers: Vec<f32>,
}

/// Very many blocks of a type, by the code of the numbers that they stand for.
struct Many {
    block: BlockType,
    count: usize,
    masked: Vec<usize>,
    code: u64,
}

fn golden() -> (Vec<Record<'static>>, Vec<Many>) {
    let mut rest: &[u8] = include_bytes!("../../tests/data/quant_golden.bin");
    let (mut records, mut many) = (Vec::new(), Vec::new());
    while let Some((header, after)) = rest.split_first_chunk::<16>() {
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        if word(4) == 2 {
            let (masked, after) = after.split_at(4).1.split_at(4 * u32::from_le_bytes(after[..4].try_into().unwrap()) as usize);
            let masked = masked.as_chunks::<4>().0.iter().map(|place| u32::from_le_bytes(*place) as usize).collect();
            let (code, after) = after.split_first_chunk::<8>().unwrap();
            let block = BlockType::from_id(word(0)).unwrap();
            many.push(Many { block, count: word(8) as usize, masked, code: u64::from_le_bytes(*code) });
            rest = after;
            continue;
        }
        let (blocks, after) = after.split_at(word(8) as usize);
        let (numbers, after) = after.split_at(word(12) as usize * 4);
        let numbers = numbers.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        records.push(Record { block: BlockType::from_id(word(0)).unwrap(), packing: word(4) == 1, blocks, numbers });
        rest = after;
    }
    (records, many)
}

/// Bits of a number; zeros of both signs are one, for −0 comes and goes with the order of a product and a difference.
fn bits(number: f32) -> u32 {
    if number == 0.0 { 0 } else { number.to_bits() }
}

/// Bit for bit: every operation rounds once, in the same order in both.
#[test]
fn numbers_are_those_of_ggml() {
    let mut seen = Vec::new();
    for record in golden().0.iter().filter(|record| !record.packing) {
        let mut numbers = vec![f32::NAN; record.numbers.len()];
        dequantise(record.block, record.blocks, &mut numbers).unwrap();
        for (place, (found, expected)) in numbers.iter().zip(&record.numbers).enumerate() {
            assert_eq!(bits(*found), bits(*expected), "{} element {place}: {found} and not {expected}", record.block);
        }
        seen.push(record.block);
    }
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen, BlockType::all().filter(|block| block.is_supported()).collect::<Vec<_>>());
}

/// So many that every entry of every grid occurs.
#[test]
fn numbers_of_many_blocks_are_those_of_ggml() {
    let (_, all) = golden();
    for Many { block, count, masked, code } in &all {
        let splitmix = |i: u64| {
            let x = i.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            x ^ (x >> 31)
        };
        let bytes = count * block.block_bytes();
        let mut blocks: Vec<u8> = (0..bytes.div_ceil(8) as u64).flat_map(|i| splitmix(i).to_le_bytes()).take(bytes).collect();
        for block in blocks.chunks_exact_mut(block.block_bytes()) {
            masked.iter().for_each(|&place| block[place] &= 0xbf);
        }
        let mut numbers = vec![0.0; count * block.block_len()];
        dequantise(*block, &blocks, &mut numbers).unwrap();
        let bytes = numbers.iter().flat_map(|&number| bits(number).to_le_bytes());
        let found = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |code, byte| (code ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        assert_eq!(found, *code, "{block}");
    }
    let few = BlockType::all().filter(|block| levels(*block).is_some()).count();
    assert_eq!(all.len(), few);
}

#[test]
fn blocks_are_those_of_ggml() {
    let mut seen = 0;
    for record in golden().0.iter().filter(|record| record.packing) {
        assert_eq!(quantise(record.block, &record.numbers).unwrap(), record.blocks, "{}", record.block);
        seen += 1;
    }
    assert_eq!(seen, 6);
}

#[test]
fn lengths_must_fit() {
    for block in BlockType::all().filter(|block| block.is_supported()) {
        let bytes = vec![0; block.block_bytes()];
        let mut numbers = vec![7.0; block.block_len()];
        let length = |bytes, elements| Err(QuantError::Length { block, bytes, elements });
        assert_eq!(dequantise(block, &bytes[1..], &mut numbers), length(bytes.len() - 1, numbers.len()));
        assert_eq!(dequantise(block, &bytes, &mut []), length(bytes.len(), 0));
        assert!(numbers.iter().all(|&number| number == 7.0));
        assert_eq!(dequantise(block, &[], &mut []), Ok(()));
        assert_eq!(dequantise(block, &bytes, &mut numbers), Ok(()));
        assert!(numbers.iter().all(|&number| number == 0.0), "{block}");
    }
    assert_eq!(quantise(BlockType::Q8_0, &[0.0; 33]), Err(QuantError::Length { block: BlockType::Q8_0, bytes: 0, elements: 33 }));
}

#[test]
fn unsupported_types_are_refused_by_name() {
    let error = dequantise(BlockType::NVFP4, &[0; 36], &mut [0.0; 64]).unwrap_err();
    assert_eq!(error, QuantError::Unsupported(BlockType::NVFP4));
    assert!(error.to_string().contains("NVFP4"));
    assert_eq!(quantise(BlockType::Q6_K, &[0.0; 256]), Err(QuantError::Unsupported(BlockType::Q6_K)));
}

proptest! {
    /// Half a step, where steps follow from the block's extremes, and the scales' own rounding.
    #[test]
    fn packing_is_close(numbers in prop::collection::vec(-4.0f32..4.0, 64)) {
        let scale_error = 1.0 / 1024.0;
        for (block, steps) in [(BlockType::Q8_0, 127.0), (BlockType::Q4_1, 15.0), (BlockType::F16, 4096.0), (BlockType::BF16, 256.0), (BlockType::F32, f32::MAX)] {
            let blocks = quantise(block, &numbers).unwrap();
            let mut back = vec![0.0; numbers.len()];
            dequantise(block, &blocks, &mut back).unwrap();
            for (chunk, back) in numbers.chunks(32).zip(back.chunks(32)) {
                let (low, high) = chunk.iter().fold((f32::MAX, f32::MIN), |(low, high), &x| (low.min(x), high.max(x)));
                let largest = low.abs().max(high.abs());
                let range = if block == BlockType::Q4_1 { high - low } else { largest };
                let most = 0.5 * range / steps + largest * scale_error;
                for (x, y) in chunk.iter().zip(back) {
                    prop_assert!((x - y).abs() <= most, "{block}: {x} became {y}, off by more than {most}");
                }
            }
        }
    }

    #[test]
    fn any_bytes_unpack(seed in prop::collection::vec(any::<u8>(), 292)) {
        for block in BlockType::all().filter(|block| block.is_supported()) {
            let mut numbers = vec![0.0; block.block_len()];
            prop_assert!(dequantise(block, &seed[..block.block_bytes()], &mut numbers).is_ok());
        }
    }
}
