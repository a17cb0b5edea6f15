//! Products of packed matrices with rows of activations: normalise, quantise, multiply, and what is done to the product
//! before it is written.

use super::activations::{ActivationBlock, quantise};
use super::math::{RowNorm, activate, normalise};
use super::packed::{GROUP, Input, PackedMatrix};
use super::pool::{Parts, Pool, share};
use super::simd::{BLOCK, Isa, LANES, Op, Simd};
use crate::config::Activation;

/// Rows of activations that a group of weights is multiplied with at a time.
const TILE: usize = 4;

/// Activations of this many bytes stay in a core's second-level cache while all weights pass by.
const CACHED: usize = 192 << 10;

/// Rows of activations, made ready for matrices. Kept from step to step for its memory.
#[derive(Debug, Default)]
pub(crate) struct Prepared {
    columns: usize,
    rows: usize,
    blocks: Vec<ActivationBlock>,
    floats: Vec<f32>,
}

impl Prepared {
    /// Makes rows of `columns` elements ready: normalised with `norm` if given, in blocks if
    /// `in_blocks`, as they are if `as_floats`.
    pub(crate) fn fill(
        &mut self,
        pool: &mut Pool,
        isa: Isa,
        x: &[f32],
        columns: usize,
        norm: Option<RowNorm<'_>>,
        (in_blocks, as_floats): (bool, bool),
    ) {
        let rows = x.len() / columns;
        let per_row = if in_blocks { columns / BLOCK } else { 0 };
        let kept = if as_floats || norm.is_some() { columns } else { 0 };
        (self.rows, self.columns) = (rows, columns);
        self.blocks.resize(rows * per_row, ActivationBlock::ZERO);
        self.floats.resize(rows * kept, 0.0);
        let (blocks, floats) = (Parts::new(&mut self.blocks), Parts::new(&mut self.floats));
        each_share(pool, rows, rows > 1, |mine| {
            // SAFETY: shares of rows are disjoint.
            let (blocks, floats) =
                unsafe { (blocks.part(mine.start * per_row..mine.end * per_row), floats.part(mine.start * kept..mine.end * kept)) };
            let x = &x[mine.start * columns..mine.end * columns];
            isa.run(PrepareRows { x, columns, norm, per_row, blocks, kept, floats });
        });
    }

    fn input(&self) -> Input<'_> {
        Input { columns: self.columns, blocks: &self.blocks, floats: &self.floats }
    }
}

/// Calls `work` with each thread's share of `items`, in the threads if `shared`, else in this one.
pub(crate) fn each_share(pool: &mut Pool, items: usize, shared: bool, work: impl Fn(std::ops::Range<usize>) + Sync) {
    let threads = pool.threads();
    if threads == 1 || !shared {
        return work(0..items);
    }
    pool.run(&|worker| {
        let mine = share(items, worker, threads);
        if !mine.is_empty() {
            work(mine);
        }
    });
}

struct PrepareRows<'a> {
    x: &'a [f32],
    columns: usize,
    norm: Option<RowNorm<'a>>,
    per_row: usize,
    blocks: &'a mut [ActivationBlock],
    kept: usize,
    floats: &'a mut [f32],
}

impl Op for PrepareRows<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        for (i, row) in self.x.chunks_exact(self.columns).enumerate() {
            let mut row = row;
            if self.kept > 0 {
                let kept = &mut self.floats[i * self.kept..][..self.kept];
                match self.norm {
                    Some(norm) => normalise(s, row, norm, kept),
                    None => kept.copy_from_slice(row),
                }
                row = kept;
            }
            if self.per_row > 0 {
                quantise(s, row, &mut self.blocks[i * self.per_row..][..self.per_row]);
            }
        }
    }
}

/// What happens to a product before it is written.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Finish<'a> {
    /// It is written as it is.
    Set,
    /// Times this it is added to what is there.
    Add(f32),
    /// It goes through the activation.
    Activate(Activation),
    /// It goes through the activation and opens the product of this second matrix, of the same shape, with its bias.
    Gate(Activation, &'a PackedMatrix, Option<&'a [f32]>),
}

/// One matrix to multiply with.
pub(crate) struct Product<'a> {
    /// The matrix.
    pub(crate) matrix: &'a PackedMatrix,
    /// Added to each row of the product; one element for each of the matrix's rows.
    pub(crate) bias: Option<&'a [f32]>,
    /// What then.
    pub(crate) finish: Finish<'a>,
    /// Which of the prepared rows; all if not given.
    pub(crate) rows: Option<std::ops::Range<usize>>,
    /// Where to: rows of as many elements as the matrix has rows, for each of the rows that it takes.
    pub(crate) out: Parts<'a, f32>,
}

/// Multiplies the prepared rows with each of the matrices.
pub(crate) fn multiply(pool: &mut Pool, isa: Isa, prepared: &Prepared, products: &[Product<'_>]) {
    let input = prepared.input();
    let groups: usize = products.iter().map(|product| product.matrix.groups()).sum();
    let row_bytes = input.columns * if input.blocks.is_empty() { 4 } else { size_of::<ActivationBlock>() / BLOCK };
    let chunk = (CACHED / row_bytes.max(1)).next_multiple_of(TILE).max(4 * TILE);
    each_share(pool, groups, true, |mine| {
        for first in (0..prepared.rows).step_by(chunk) {
            let rows = first..prepared.rows.min(first + chunk);
            let mut before = 0;
            for product in products {
                let count = product.matrix.groups();
                let (start, end) = (mine.start.max(before), mine.end.min(before + count));
                let mut rows = rows.clone();
                if let Some(mine) = &product.rows {
                    rows = rows.start.max(mine.start)..rows.end.min(mine.end);
                }
                if start < end && !rows.is_empty() {
                    let groups = start - before..end - before;
                    isa.run(MultiplyGroups { input: &input, product, groups, rows });
                }
                before += count;
            }
        }
    });
}

struct MultiplyGroups<'a> {
    input: &'a Input<'a>,
    product: &'a Product<'a>,
    groups: std::ops::Range<usize>,
    rows: std::ops::Range<usize>,
}

impl Op for MultiplyGroups<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        for group in self.groups.clone() {
            let mut row = self.rows.start;
            while row < self.rows.end {
                match self.rows.end - row {
                    1 => self.tile::<S, 1>(s, group, row),
                    2 => self.tile::<S, 2>(s, group, row),
                    3 => self.tile::<S, 3>(s, group, row),
                    _ => self.tile::<S, TILE>(s, group, row),
                }
                row += TILE;
            }
        }
    }
}

impl MultiplyGroups<'_> {
    #[inline(always)]
    fn tile<S: Simd, const T: usize>(&self, s: S, group: usize, first: usize) {
        let Product { matrix, bias, finish, rows, out } = self.product;
        let skipped = rows.as_ref().map_or(0, |rows| rows.start);
        let first_lane = group * GROUP;
        let lanes = GROUP.min(matrix.rows() - first_lane);
        let mut totals = matrix.tile::<S, T>(s, group, self.input, first);
        let add_bias = |totals: &mut [S::F; T], bias: &[f32]| {
            let mut padded = [0.0; LANES];
            padded[..lanes].copy_from_slice(&bias[first_lane..first_lane + lanes]);
            let bias = s.load(&padded);
            for total in totals {
                *total = s.add(*total, bias);
            }
        };
        if let Some(bias) = bias {
            add_bias(&mut totals, bias);
        }
        let mut add = false;
        match finish {
            Finish::Set => {}
            Finish::Add(scale) => {
                add = true;
                totals = totals.map(|total| s.mul(total, s.splat(*scale)));
            }
            Finish::Activate(activation) => totals = totals.map(|total| activate(s, *activation, total, None)),
            Finish::Gate(activation, up, up_bias) => {
                let mut ups = up.tile::<S, T>(s, group, self.input, first);
                if let Some(bias) = up_bias {
                    add_bias(&mut ups, bias);
                }
                for t in 0..T {
                    totals[t] = activate(s, *activation, totals[t], Some(ups[t]));
                }
            }
        }
        for (t, total) in totals.into_iter().enumerate() {
            let start = (first - skipped + t) * matrix.rows() + first_lane;
            // SAFETY: a group of a matrix's rows is one thread's, and no other product writes to this buffer.
            let out = unsafe { out.part(start..start + lanes) };
            if let Ok(out) = <&mut [f32; LANES]>::try_from(&mut *out) {
                s.store(if add { s.add(total, s.load(out)) } else { total }, out);
            } else {
                let mut values = [0.0; LANES];
                s.store(total, &mut values);
                for (out, value) in out.iter_mut().zip(values) {
                    *out = if add { value + *out } else { value };
                }
            }
        }
    }
}
