use proptest::prelude::*;

use super::super::activations::quantise;
use super::super::simd::Isa;
use super::*;
use crate::quant;

pub(crate) const TYPES: [BlockType; 11] = [
    BlockType::Q4_0,
    BlockType::Q4_1,
    BlockType::Q5_0,
    BlockType::Q5_1,
    BlockType::Q8_0,
    BlockType::Q4_K,
    BlockType::Q5_K,
    BlockType::Q6_K,
    BlockType::F32,
    BlockType::F16,
    BlockType::BF16,
];

/// Random blocks whose scales are finite and of ordinary size: half-precision fields get exponents around one.
pub(crate) fn random_blocks(block: BlockType, elements: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    let mut bytes: Vec<u8> = (0..block.row_bytes(elements).unwrap()).map(|_| next() as u8).collect();
    let halves: &[usize] = match block {
        BlockType::Q4_0 | BlockType::Q5_0 | BlockType::Q8_0 => &[0],
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4_K | BlockType::Q5_K => &[0, 2],
        BlockType::Q6_K => &[208],
        _ => &[],
    };
    match block {
        BlockType::F32 => bytes.chunks_exact_mut(4).for_each(|b| b.copy_from_slice(&(next() as i32 as f32 / 2e9 - 0.5).to_le_bytes())),
        BlockType::F16 | BlockType::BF16 => bytes.chunks_exact_mut(2).for_each(|b| b[1] = b[1] & 0x83 | 0x38),
        _ => bytes.chunks_exact_mut(block.block_bytes()).for_each(|b| halves.iter().for_each(|h| b[h + 1] = b[h + 1] & 0x83 | 0x24)),
    }
    bytes
}

struct Products<'a, const T: usize> {
    matrix: &'a PackedMatrix,
    x: &'a [f32],
}

impl<const T: usize> Op for Products<'_, T> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn eval<S: Simd>(self, s: S) -> Vec<f32> {
        let (columns, rows) = (self.matrix.columns(), self.matrix.rows());
        let mut blocks = vec![ActivationBlock::ZERO; self.x.len() / BLOCK];
        quantise(s, self.x, &mut blocks);
        let input = Input { columns, blocks: &blocks, floats: self.x };
        let count = self.x.len() / columns;
        let mut out = vec![0.0; count * rows];
        for group in 0..self.matrix.groups() {
            for first in (0..count).step_by(T) {
                for (t, total) in self.matrix.tile::<S, T>(s, group, &input, first).into_iter().enumerate() {
                    let mut lanes = [0.0; LANES];
                    s.store(total, &mut lanes);
                    for (lane, value) in lanes.iter().enumerate().take(rows - GROUP * group) {
                        out[(first + t) * rows + GROUP * group + lane] = *value;
                    }
                }
            }
        }
        out
    }
}

fn check(block: BlockType, rows: usize, parts: usize, seed: u64, x: &[f32]) -> Result<(), TestCaseError> {
    let columns = parts * block.block_len().max(BLOCK);
    let bytes = random_blocks(block, rows * columns, seed);
    let matrix = PackedMatrix::pack(block, rows, columns, &bytes).unwrap();

    // Packing loses nothing.
    let mut plain = vec![0.0; rows * columns];
    quant::dequantise(block, &bytes, &mut plain).unwrap();
    let mut row = vec![0.0; columns];
    for r in 0..rows {
        matrix.row(r, &mut row);
        prop_assert_eq!(&row, &plain[r * columns..][..columns], "{} row {}", block, r);
    }
    let padded = rows.next_multiple_of(GROUP) * columns;
    prop_assert_eq!(matrix.bytes(), block.row_bytes(padded).unwrap(), "{} takes what it takes in the file", block);

    // Products: the same bits one row at a time or several, on every instruction set.
    let x: Vec<f32> = x.iter().cycle().copied().take(4 * columns).enumerate().map(|(i, v)| v * (1.0 + (i % 7) as f32)).collect();
    let expected = Isa::all()[0].run(Products::<1> { matrix: &matrix, x: &x });
    for isa in Isa::all() {
        prop_assert_eq!(&expected, &isa.run(Products::<1> { matrix: &matrix, x: &x }), "{} {}", block, isa.name());
        prop_assert_eq!(&expected, &isa.run(Products::<2> { matrix: &matrix, x: &x }), "{} {}", block, isa.name());
        prop_assert_eq!(&expected, &isa.run(Products::<4> { matrix: &matrix, x: &x }), "{} {}", block, isa.name());
    }

    // Products: each activation is off by at most half a step of its block, which bounds the error; what is left is rounding.
    for (t, x) in x.chunks_exact(columns).enumerate() {
        for (r, weights) in plain.chunks_exact(columns).enumerate() {
            let (mut exact, mut bound, mut magnitude) = (0f64, 0f64, 0f64);
            for (x, w) in x.chunks_exact(BLOCK).zip(weights.chunks_exact(BLOCK)) {
                let step = if matrix.takes_blocks() { x.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0 } else { 0.0 };
                for (x, w) in x.iter().zip(w) {
                    exact += f64::from(*x) * f64::from(*w);
                    bound += f64::from(step) * 0.5001 * f64::from(w.abs());
                    magnitude += f64::from((x * w).abs());
                }
            }
            let found = f64::from(expected[t * rows + r]);
            // K-quants and those with an offset add two large terms that cancel: allow for the rounding of these.
            prop_assert!((found - exact).abs() <= bound + 1e-5 * magnitude + 1e-6, "{block} {found} {exact} ± {bound}");
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn every_type_multiplies(
        kind in 0..TYPES.len(), rows in 1..40usize, parts in 1..4usize, seed in any::<u64>(),
        x in proptest::collection::vec(-4f32..4.0, 97),
    ) {
        check(TYPES[kind], rows, parts, seed, &x)?;
    }
}

#[test]
fn every_type_multiplies_at_least_once() {
    let x: Vec<f32> = (0..61).map(|i| (i as f32 * 0.37).sin()).collect();
    for block in TYPES {
        check(block, 21, 2, 99, &x).unwrap();
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let refused = |block, rows, columns, bytes: usize| PackedMatrix::pack(block, rows, columns, &vec![0; bytes]).unwrap_err();
    assert!(matches!(refused(BlockType::Q4_0, 1, 33, 18), PackError::Shape { .. }));
    assert!(matches!(refused(BlockType::Q4_0, 2, 32, 18), PackError::Shape { .. }));
    assert!(matches!(refused(BlockType::Q4_0, usize::MAX, 32, 18), PackError::Shape { .. }));
    assert!(matches!(refused(BlockType::F32, 3, 0, 0), PackError::Shape { .. }));
    assert!(matches!(refused(BlockType::Q3_K, 1, 256, 110), PackError::Unsupported(BlockType::Q3_K)));
}
