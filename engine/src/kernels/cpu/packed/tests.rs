use proptest::prelude::*;

use super::super::activations::quantise;
use super::super::simd::{Isa, Op, Simd};
use super::*;
use crate::kernels::testing::{TYPES, random_blocks};
use crate::quant;

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
        let mut floats = vec![0.0; self.x.len()];
        for (tile, x) in self.x.chunks_exact(T * columns).enumerate() {
            for (t, row) in x.chunks_exact(columns).enumerate() {
                quantise(s, row, &mut blocks[tile * T * columns / BLOCK..][..T * columns / BLOCK], t, T);
                for (column, value) in row.iter().enumerate() {
                    floats[(tile * columns + column) * T + t] = *value;
                }
            }
        }
        let input = Input { columns, blocks: &blocks, floats: &floats };
        let count = self.x.len() / columns;
        let mut out = vec![0.0; count * rows];
        for group in 0..self.matrix.groups() {
            for first in (0..count).step_by(T) {
                let lanes = std::cell::RefCell::new([[0.0; LANES]; T]);
                s.each_part(Part::<T> { matrix: self.matrix, group, input, first, lanes: &lanes });
                let whole = self.matrix.tile::<S, T>(s, group, &input, first);
                for (t, total) in whole.into_iter().enumerate() {
                    let mut values = [0.0; LANES];
                    s.store(total, &mut values);
                    assert_eq!(values, lanes.borrow()[t]);
                    for (lane, value) in values.iter().enumerate().take(rows - GROUP * group) {
                        out[(first + t) * rows + GROUP * group + lane] = *value;
                    }
                }
            }
        }
        out
    }
}

#[derive(Clone, Copy)]
struct Part<'a, const T: usize> {
    matrix: &'a PackedMatrix,
    group: usize,
    input: Input<'a>,
    first: usize,
    lanes: &'a std::cell::RefCell<[[f32; LANES]; T]>,
}

impl<const T: usize> PartOp for Part<'_, T> {
    type Output = ();

    #[inline(always)]
    fn eval<V: Vector>(self, v: V) {
        let totals = self.matrix.tile::<V, T>(v, self.group, &self.input, self.first);
        for (total, lanes) in totals.into_iter().zip(self.lanes.borrow_mut().iter_mut()) {
            v.store(total, lanes);
        }
    }
}

fn check(block: BlockType, rows: usize, parts: usize, seed: u64, x: &[f32]) -> Result<(), TestCaseError> {
    let columns = parts * block.block_len().max(BLOCK);
    let bytes = random_blocks(block, rows * columns, seed);
    let matrix = PackedMatrix::pack(&mut Memory::default(), block, rows, columns, &bytes).unwrap();

    // Packing loses nothing.
    let mut plain = vec![0.0; rows * columns];
    quant::dequantise(block, &bytes, &mut plain).unwrap();
    let mut row = vec![0.0; columns];
    for r in 0..rows {
        matrix.row(r, &mut row);
        prop_assert_eq!(&row, &plain[r * columns..][..columns], "{} row {}", block, r);
    }
    prop_assert_eq!(Some(matrix.bytes() as u64), PackedMatrix::bytes_for(block, rows, columns));

    // Products: the same bits one row at a time or several, on every instruction set.
    let x: Vec<f32> = x.iter().cycle().copied().take(8 * columns).enumerate().map(|(i, v)| v * (1.0 + (i % 7) as f32)).collect();
    let expected = Isa::all()[0].run(Products::<1> { matrix: &matrix, x: &x });
    for isa in Isa::all() {
        prop_assert_eq!(&expected, &isa.run(Products::<1> { matrix: &matrix, x: &x }), "{} {}", block, isa.name());
        prop_assert_eq!(&expected, &isa.run(Products::<2> { matrix: &matrix, x: &x }), "{} {}", block, isa.name());
        prop_assert_eq!(&expected, &isa.run(Products::<4> { matrix: &matrix, x: &x }), "{} {}", block, isa.name());
        prop_assert_eq!(&expected, &isa.run(Products::<8> { matrix: &matrix, x: &x }), "{} {}", block, isa.name());
    }

    // Products: each activation is off by at most half a step of its block, which bounds the error; what is left is rounding.
    for (t, x) in x.chunks_exact(columns).enumerate().take(4) {
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
fn a_matrix_takes_what_it_takes_in_the_file() {
    for block in TYPES {
        let (rows, columns) = (48, 512);
        let in_file = block.row_bytes(rows * columns).unwrap() as u64;
        let elements = (rows * columns) as u64;
        let held = match block {
            // The eight six-bit scales and offsets of these take a byte each, not twelve together.
            BlockType::Q4_K | BlockType::Q5_K => in_file + 4 * 48 * 2,
            // A nibble and a sixteenth of a scale for each element, two common scales.
            BlockType::Q2_K => elements / 2 + 2 * elements / 16 + 2 * 2 * elements / 256,
            // A scale of two bytes and not one.
            BlockType::MXFP4 => in_file + elements / 32,
            _ if quant::levels(block).is_some() && block.block_len() == 256 => {
                // The levels and what else is the same for sixteen rows take as much as the scales.
                elements / 2 + elements / 16 + 2 * 2 * elements / 256
            }
            _ => in_file,
        };
        assert_eq!(PackedMatrix::bytes_for(block, rows, columns), Some(held), "{block}");
        // Rows are taken by sixteen.
        assert_eq!(PackedMatrix::bytes_for(block, rows - 15, columns), Some(held), "{block}");
    }
    assert_eq!(PackedMatrix::bytes_for(BlockType::Q4_0, 16, 33), None);
    assert_eq!(PackedMatrix::bytes_for(BlockType::Q8_0, usize::MAX, usize::MAX & !31), None);
    assert_eq!(PackedMatrix::bytes_for(BlockType::NVFP4, 16, 256), None);
}

#[test]
fn what_does_not_fit_is_refused() {
    let refused =
        |block, rows, columns, bytes: usize| PackedMatrix::pack(&mut Memory::default(), block, rows, columns, &vec![0; bytes]).unwrap_err();
    assert!(matches!(refused(BlockType::Q4_0, 1, 33, 18), PackError::Shape { .. }));
    assert!(matches!(refused(BlockType::Q4_0, 2, 32, 18), PackError::Shape { .. }));
    assert!(matches!(refused(BlockType::Q4_0, usize::MAX, 32, 18), PackError::Shape { .. }));
    assert!(matches!(refused(BlockType::F32, 3, 0, 0), PackError::Shape { .. }));
    assert!(matches!(refused(BlockType::NVFP4, 1, 64, 36), PackError::Unsupported(BlockType::NVFP4)));
}
