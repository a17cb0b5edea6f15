//! Products of packed matrices with rows of activations: normalise, quantise, multiply, and what is done to the product
//! before it is written.

use super::activations::{ActivationBlock, quantise};
use super::math::{gelu, rms_norm, silu};
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
    /// Makes rows of `columns` elements ready: normalised with `norm` (weight and epsilon) if given, in blocks if
    /// `in_blocks`, as they are if `as_floats`.
    pub(crate) fn fill(
        &mut self,
        pool: &mut Pool,
        isa: Isa,
        x: &[f32],
        columns: usize,
        norm: Option<(&[f32], f32)>,
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
    norm: Option<(&'a [f32], f32)>,
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
                    Some((weight, epsilon)) => rms_norm(s, row, weight, epsilon, kept),
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
    /// It is added to what is there.
    Add,
    /// It goes through the activation and is multiplied with the product of this second matrix, of the same shape.
    Gate(Activation, &'a PackedMatrix),
}

/// One matrix to multiply with.
pub(crate) struct Product<'a> {
    /// The matrix.
    pub(crate) matrix: &'a PackedMatrix,
    /// Added to each row of the product; one element for each of the matrix's rows.
    pub(crate) bias: Option<&'a [f32]>,
    /// What then.
    pub(crate) finish: Finish<'a>,
    /// Where to: rows of as many elements as the matrix has rows.
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
                if start < end {
                    let groups = start - before..end - before;
                    isa.run(MultiplyGroups { input: &input, product, groups, rows: rows.clone() });
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
        let Product { matrix, bias, finish, out } = self.product;
        let first_lane = group * GROUP;
        let lanes = GROUP.min(matrix.rows() - first_lane);
        let mut totals = matrix.tile::<S, T>(s, group, self.input, first);
        if let Some(bias) = bias {
            let mut padded = [0.0; LANES];
            padded[..lanes].copy_from_slice(&bias[first_lane..first_lane + lanes]);
            let bias = s.load(&padded);
            for total in &mut totals {
                *total = s.add(*total, bias);
            }
        }
        if let Finish::Gate(activation, up) = finish {
            let up = up.tile::<S, T>(s, group, self.input, first);
            for t in 0..T {
                let gate = match activation {
                    Activation::Silu => silu(s, totals[t]),
                    Activation::GeluTanh => gelu(s, totals[t]),
                };
                totals[t] = s.mul(gate, up[t]);
            }
        }
        for (t, total) in totals.into_iter().enumerate() {
            let start = (first + t) * matrix.rows() + first_lane;
            // SAFETY: a group of a matrix's rows is one thread's, and no other product writes to this buffer.
            let out = unsafe { out.part(start..start + lanes) };
            let add = matches!(finish, Finish::Add);
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
