//! Activations as matrices take them: in 8-bit blocks for quantised weights, as they are for float ones.
//!
//! Rows are taken in tiles of up to [`TILE`]: a kernel multiplies sixteen rows of weights with all rows of a tile at a
//! time. In a tile the rows are interleaved, so that a kernel reads one stream of memory, whatever the number of rows. A tile of
//! one row is that row as it stands.

use bytemuck::{Pod, Zeroable};

use super::simd::{BLOCK, LANES, Simd};

/// Rows of the largest tile.
pub(crate) const TILE: usize = 8;

/// Thirty-two activations of each of `T` rows: `scale · values`, with the sums that kernels need of them.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Tile<const T: usize> {
    /// Elements `4·j..4·j + 4` of row `t` at `[j][t]`, in `-127..=127`.
    pub(crate) values: [[[i8; 4]; T]; BLOCK / 4],
    /// The largest magnitude of a row is 127 times this.
    pub(crate) scale: [f32; T],
    /// `scale · Σ values`.
    pub(crate) scaled_sum: [f32; T],
    /// `16 · Σ values`.
    pub(crate) sixteenfold: [i32; T],
    /// `−8 · Σ` of the values whose place is 0 or 1 modulo 4, and of those where it is 2 or 3.
    pub(crate) minus_eightfold: [[i16; 2]; T],
    /// `−32 · Σ` of the same, over the first and over the second sixteen values.
    pub(crate) minus_32_fold: [[[i16; 2]; T]; 2],
}

// SAFETY: an array of numbers, all zeros of which are numbers.
unsafe impl<const T: usize> Zeroable for Tile<T> {}
// SAFETY: `repr(C)`, and every field is an array of four-byte elements (`[i8; 4]`, `f32`, `i32`, `[i16; 2]`), so there is no padding; every
// pattern of bits is a value.
unsafe impl<const T: usize> Pod for Tile<T> {}

/// A block of one row. A tile of `T` rows takes the memory of `T` of these.
pub(crate) type ActivationBlock = Tile<1>;

impl ActivationBlock {
    /// All zero.
    pub(crate) const ZERO: Self = Self {
        values: [[[0; 4]; 1]; BLOCK / 4],
        scale: [0.0],
        scaled_sum: [0.0],
        sixteenfold: [0],
        minus_eightfold: [[0; 2]],
        minus_32_fold: [[[0; 2]]; 2],
    };
}

/// The tiles of `rows` rows: first row and number of rows of each. Widths are powers of two, the widest first.
pub(crate) fn tiles(rows: std::ops::Range<usize>) -> impl Iterator<Item = (usize, usize)> {
    let mut first = rows.start;
    std::iter::from_fn(move || {
        let left = rows.end - first;
        let width = if left >= TILE { TILE } else { 1 << left.checked_ilog2()? };
        first += width;
        Some((first - width, width))
    })
}

/// Magnitudes below this are taken for zero: their reciprocal would overflow.
const SMALLEST: f32 = 1e-30;

/// Quantises a row, a multiple of [`BLOCK`] long, as row `t` of the tile `out` of `width` rows: `width` blocks for each [`BLOCK`] elements.
#[inline(always)]
pub(crate) fn quantise<S: Simd>(s: S, row: &[f32], out: &mut [ActivationBlock], t: usize, width: usize) {
    match width {
        1 => quantise_to::<S, 1>(s, row, bytemuck::cast_slice_mut(out), t),
        2 => quantise_to::<S, 2>(s, row, bytemuck::cast_slice_mut(out), t),
        4 => quantise_to::<S, 4>(s, row, bytemuck::cast_slice_mut(out), t),
        _ => quantise_to::<S, TILE>(s, row, bytemuck::cast_slice_mut(out), t),
    }
}

#[inline(always)]
fn quantise_to<S: Simd, const T: usize>(s: S, row: &[f32], out: &mut [Tile<T>], t: usize) {
    let (blocks, _) = row.as_chunks::<BLOCK>();
    for (block, out) in blocks.iter().zip(out) {
        let (halves, _) = block.as_chunks::<LANES>();
        let v = [s.load(&halves[0]), s.load(&halves[1])];
        let largest = s.max_of(s.max(s.abs(v[0]), s.abs(v[1])));
        let (scale, inverse) = if largest > SMALLEST { (largest / 127.0, 127.0 / largest) } else { (0.0, 0.0) };
        let mut sums = [[0i32; 2]; 2];
        for half in 0..2 {
            // The bounds also turn what is not a number into one, so that integer sums stay in range.
            let scaled = s.mul(v[half], s.splat(inverse));
            let scaled = s.min(s.max(scaled, s.splat(-127.0)), s.splat(127.0));
            let mut bytes = [0; LANES];
            s.store_i8(s.to_ints(scaled), &mut bytes);
            let (fours, _) = bytes.as_chunks::<4>();
            for (four, to) in fours.iter().zip(&mut out.values[4 * half..]) {
                to[t] = *four;
            }
            sums[half] = s.pair_sums(&bytes);
        }
        let [first, second] = sums;
        let pairs = [first[0] + second[0], first[1] + second[1]];
        let sum = pairs[0] + pairs[1];
        out.scale[t] = scale;
        out.scaled_sum[t] = scale * sum as f32;
        out.sixteenfold[t] = 16 * sum;
        // At most 16 · 8 · 127 and 8 · 32 · 127 in magnitude, less than 2¹⁵.
        out.minus_eightfold[t] = pairs.map(|sum| (-8 * sum) as i16);
        out.minus_32_fold[0][t] = first.map(|sum| (-32 * sum) as i16);
        out.minus_32_fold[1][t] = second.map(|sum| (-32 * sum) as i16);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::simd::{Isa, Op};
    use super::*;

    struct Quantise<'a>(&'a [f32]);

    impl Op for Quantise<'_> {
        type Output = Vec<ActivationBlock>;

        #[inline(always)]
        fn eval<S: Simd>(self, s: S) -> Self::Output {
            let mut out = vec![ActivationBlock::ZERO; self.0.len() / BLOCK];
            quantise(s, self.0, &mut out, 0, 1);
            out
        }
    }

    struct QuantiseRows<'a, const T: usize>(&'a [f32]);

    impl<const T: usize> Op for QuantiseRows<'_, T> {
        type Output = Vec<ActivationBlock>;

        #[inline(always)]
        fn eval<S: Simd>(self, s: S) -> Self::Output {
            let mut out = vec![ActivationBlock::ZERO; self.0.len() / BLOCK];
            for (t, row) in self.0.chunks_exact(self.0.len() / T).enumerate() {
                quantise(s, row, &mut out, t, T);
            }
            out
        }
    }

    fn values(block: &ActivationBlock) -> &[i8] {
        block.values.as_flattened().as_flattened()
    }

    /// Row `t` of a tile.
    fn row_of<const T: usize>(tile: &Tile<T>, t: usize) -> ActivationBlock {
        Tile {
            values: tile.values.map(|four| [four[t]]),
            scale: [tile.scale[t]],
            scaled_sum: [tile.scaled_sum[t]],
            sixteenfold: [tile.sixteenfold[t]],
            minus_eightfold: [tile.minus_eightfold[t]],
            minus_32_fold: tile.minus_32_fold.map(|half| [half[t]]),
        }
    }

    fn check_rows<const T: usize>(rows: &[f32]) {
        let columns = rows.len() / T;
        for isa in Isa::all() {
            let tiled = isa.run(QuantiseRows::<T>(rows));
            let tiles: &[Tile<T>] = bytemuck::cast_slice(&tiled);
            for (t, row) in rows.chunks_exact(columns).enumerate() {
                let alone = isa.run(Quantise(row));
                for (tile, alone) in tiles.iter().zip(&alone) {
                    assert_eq!(bytemuck::bytes_of(&row_of(tile, t)), bytemuck::bytes_of(alone));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn quantised_rows_are_within_half_a_step(row in proptest::collection::vec(-50f32..50.0, 3 * BLOCK), scale in -34i32..20) {
            let row: Vec<f32> = row.iter().map(|v| v * 10f32.powi(scale)).collect();
            let reference = Isa::all()[0].run(Quantise(&row));
            for isa in Isa::all() {
                for (b, (block, expected)) in isa.run(Quantise(&row)).iter().zip(&reference).enumerate() {
                    prop_assert_eq!(bytemuck::bytes_of(block), bytemuck::bytes_of(expected));
                    let sum = |from: usize, pair: usize| -> i32 {
                        let four = |j: usize| i32::from(block.values[j][0][2 * pair]) + i32::from(block.values[j][0][2 * pair + 1]);
                        (from..from + 4).map(four).sum()
                    };
                    for pair in 0..2 {
                        prop_assert_eq!(i32::from(block.minus_32_fold[0][0][pair]), -32 * sum(0, pair));
                        prop_assert_eq!(i32::from(block.minus_32_fold[1][0][pair]), -32 * sum(4, pair));
                        prop_assert_eq!(i32::from(block.minus_eightfold[0][pair]), -8 * (sum(0, pair) + sum(4, pair)));
                    }
                    let all = values(block).iter().map(|v| i32::from(*v)).sum::<i32>();
                    prop_assert_eq!(block.sixteenfold[0], 16 * all);
                    prop_assert_eq!(block.scaled_sum[0], block.scale[0] * all as f32);
                    for (i, v) in values(block).iter().enumerate() {
                        let error = (f32::from(*v) * block.scale[0] - row[b * BLOCK + i]).abs();
                        prop_assert!(error <= 0.5001 * block.scale[0] + SMALLEST, "{error} {}", block.scale[0]);
                    }
                }
            }
        }

        #[test]
        fn a_row_of_a_tile_is_what_it_is_alone(rows in proptest::collection::vec(-5f32..5.0, 16 * BLOCK)) {
            check_rows::<2>(&rows);
            check_rows::<4>(&rows);
            check_rows::<8>(&rows);
        }
    }

    #[test]
    fn what_is_not_a_number_stays_in_range() {
        let mut row = vec![1.0; BLOCK];
        (row[3], row[20], row[31]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
        for isa in Isa::all() {
            let out = isa.run(Quantise(&row));
            assert!(values(&out[0]).iter().all(|v| *v > -128));
        }
    }

    #[test]
    fn tiles_cover_all_rows_in_order() {
        for rows in 0..70 {
            let all: Vec<_> = tiles(0..rows).collect();
            let mut next = 0;
            for &(first, width) in &all {
                assert_eq!(first, next);
                assert!(width <= TILE && width.is_power_of_two());
                next += width;
            }
            assert_eq!(next, rows);
        }
        // A step's rows are taken in chunks of whole tiles.
        assert_eq!(tiles(16..27).collect::<Vec<_>>(), [(16, 8), (24, 2), (26, 1)]);
    }
}
