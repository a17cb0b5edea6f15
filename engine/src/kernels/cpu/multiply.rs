//! Products of packed matrices with rows of activations: normalise, quantise, multiply, and what is done to the product
//! before it is written.

use super::activations::{ActivationBlock, TILE, quantise, tiles};
use super::math::{RowNorm, activate, normalise};
use super::packed::{GROUP, Input, PackedMatrix};
use super::pool::{Parts, Pool, share};
use super::simd::{BLOCK, Isa, LANES, Op, PartOp, Simd, Vector};
use crate::config::Activation;

/// Activations of this many bytes stay in a core's second-level cache while all weights pass by.
const CACHED: usize = 192 << 10;

/// Weights of this many bytes stay in a core's first-level cache beside a tile.
const HELD: usize = 20 << 10;

/// Rows of activations, made ready for matrices. Kept from step to step for its memory.
#[derive(Debug, Default)]
pub(crate) struct Prepared {
    columns: usize,
    rows: usize,
    /// Rows that are tiled on their own.
    runs: Vec<std::ops::Range<usize>>,
    /// First row and number of rows of each tile.
    tiles: Vec<(usize, usize)>,
    blocks: Vec<ActivationBlock>,
    floats: Vec<f32>,
}

/// Rows of activations to make ready.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a> {
    /// Their elements.
    pub(crate) x: &'a [f32],
    /// How many of them are one row.
    pub(crate) columns: usize,
    /// They are normalised with this.
    pub(crate) norm: Option<RowNorm<'a>>,
    /// Products take one of these runs of rows, which follow each other, or all rows if there is only one.
    pub(crate) runs: &'a [std::ops::Range<usize>],
}

impl Prepared {
    /// Makes rows ready, in blocks if `in_blocks`, as they are if `as_floats`.
    pub(crate) fn fill(&mut self, pool: &mut Pool, isa: Isa, rows: &Rows<'_>, (in_blocks, as_floats): (bool, bool)) {
        let &Rows { x, columns, norm, runs } = rows;
        let rows = x.len() / columns;
        let per_row = if in_blocks { columns / BLOCK } else { 0 };
        let kept = if as_floats { columns } else { 0 };
        (self.rows, self.columns) = (rows, columns);
        self.runs.clear();
        self.runs.extend_from_slice(runs);
        self.tiles.clear();
        self.tiles.extend(runs.iter().cloned().flat_map(tiles));
        self.blocks.resize(rows * per_row, ActivationBlock::ZERO);
        self.floats.resize(rows * kept, 0.0);
        let (blocks, floats) = (Parts::new(&mut self.blocks), Parts::new(&mut self.floats));
        // One row is made ready faster than another thread is told to.
        let all = &self.tiles;
        each_share(pool, all.len(), rows > 1, |mine| {
            for &(first, width) in &all[mine] {
                let tile = first..first + width;
                // SAFETY: tiles are disjoint.
                let (blocks, floats) =
                    unsafe { (blocks.part(tile.start * per_row..tile.end * per_row), floats.part(tile.start * kept..tile.end * kept)) };
                let x = &x[tile.start * columns..tile.end * columns];
                isa.run(PrepareTile { x, columns, width, norm, blocks, floats });
            }
        });
    }

    /// Whether a product can take these rows: one of the runs, because rows lie in memory as their run's tiles have them.
    fn takes(&self, rows: Option<&std::ops::Range<usize>>) -> bool {
        match rows {
            None => self.runs.len() == 1,
            Some(rows) => rows.is_empty() || self.runs.contains(rows),
        }
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

struct PrepareTile<'a> {
    x: &'a [f32],
    columns: usize,
    width: usize,
    norm: Option<RowNorm<'a>>,
    blocks: &'a mut [ActivationBlock],
    floats: &'a mut [f32],
}

impl Op for PrepareTile<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        let mut normed = vec![0.0; if self.norm.is_some() { self.columns } else { 0 }];
        for (t, row) in self.x.chunks_exact(self.columns).enumerate() {
            let row = match self.norm {
                Some(norm) => {
                    normalise(s, row, norm, &mut normed);
                    &normed
                }
                None => row,
            };
            if !self.blocks.is_empty() {
                quantise(s, row, self.blocks, t, self.width);
            }
            if !self.floats.is_empty() {
                for (to, value) in self.floats[t..].iter_mut().step_by(self.width).zip(row) {
                    *to = *value;
                }
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
    assert!(products.iter().all(|product| prepared.takes(product.rows.as_ref())), "a product takes rows that were made ready otherwise");
    let input = prepared.input();
    let groups: usize = products.iter().map(|product| product.matrix.groups()).sum();
    let row_bytes = input.columns * if input.blocks.is_empty() { 4 } else { size_of::<ActivationBlock>() / BLOCK };
    let chunk = (CACHED / row_bytes.max(1)).next_multiple_of(TILE).max(4 * TILE);
    let longest = products.iter().map(|product| product.taken(prepared.rows).len()).max().unwrap_or(0);
    each_share(pool, groups, true, |mine| {
        for skipped in (0..longest).step_by(chunk) {
            let mut before = 0;
            for product in products {
                let count = product.matrix.groups();
                let (start, end) = (mine.start.max(before), mine.end.min(before + count));
                let taken = product.taken(prepared.rows);
                let rows = taken.start + skipped..taken.end.min(taken.start + skipped + chunk);
                if start < end && !rows.is_empty() {
                    let groups = start - before..end - before;
                    isa.run(MultiplyGroups { input: &input, product, groups, rows });
                }
                before += count;
            }
        }
    });
}

impl Product<'_> {
    /// The rows that it takes, of so many.
    fn taken(&self, rows: usize) -> std::ops::Range<usize> {
        self.rows.clone().unwrap_or(0..rows)
    }
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
        // A tile meets several groups while it is in the first-level cache, and these stay there for the next tile.
        let matrix = self.product.matrix;
        let together = (HELD / (matrix.bytes() / matrix.groups().max(1)).max(1)).max(1);
        for start in self.groups.clone().step_by(together) {
            for (first, width) in tiles(self.rows.clone()) {
                for group in start..self.groups.end.min(start + together) {
                    match width {
                        1 => self.tile::<S, 1>(s, group, first),
                        2 => self.tile::<S, 2>(s, group, first),
                        4 => s.each_part(MultiplyTile::<4> { work: &self, group, first }),
                        _ => s.each_part(MultiplyTile::<TILE> { work: &self, group, first }),
                    }
                }
            }
        }
    }
}

/// One group and one tile of so many rows that their totals take all registers.
#[derive(Clone, Copy)]
struct MultiplyTile<'a, const T: usize> {
    work: &'a MultiplyGroups<'a>,
    group: usize,
    first: usize,
}

impl<const T: usize> PartOp for MultiplyTile<'_, T> {
    type Output = ();

    #[inline(always)]
    fn eval<V: Vector>(self, v: V) {
        self.work.tile::<V, T>(v, self.group, self.first);
    }
}

impl MultiplyGroups<'_> {
    #[inline(always)]
    fn tile<V: Vector, const T: usize>(&self, v: V, group: usize, first: usize) {
        let Product { matrix, bias, finish, rows, out } = self.product;
        let skipped = rows.as_ref().map_or(0, |rows| rows.start);
        let first_lane = group * GROUP;
        let lanes = GROUP.min(matrix.rows() - first_lane);
        let mut totals = matrix.tile::<V, T>(v, group, self.input, first);
        let add_bias = |totals: &mut [V::F; T], bias: &[f32]| {
            let mut padded = [0.0; LANES];
            padded[..lanes].copy_from_slice(&bias[first_lane..first_lane + lanes]);
            let bias = v.load(&padded);
            for total in totals {
                *total = v.add(*total, bias);
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
                totals = totals.map(|total| v.mul(total, v.splat(*scale)));
            }
            Finish::Activate(activation) => totals = totals.map(|total| activate(v, *activation, total, None)),
            Finish::Gate(activation, up, up_bias) => {
                let mut ups = up.tile::<V, T>(v, group, self.input, first);
                if let Some(bias) = up_bias {
                    add_bias(&mut ups, bias);
                }
                for t in 0..T {
                    totals[t] = activate(v, *activation, totals[t], Some(ups[t]));
                }
            }
        }
        for (t, total) in totals.into_iter().enumerate() {
            let start = (first - skipped + t) * matrix.rows() + first_lane;
            // SAFETY: a group of a matrix's rows is one thread's, and no other product writes to this buffer.
            let out = unsafe { out.part(start..start + lanes) };
            if let Ok(out) = <&mut [f32; LANES]>::try_from(&mut *out) {
                v.store(if add { v.add(total, v.load(out)) } else { total }, out);
            } else {
                // The last group may have fewer rows than lanes. What is not among the vector's lanes stays as it is.
                let mut values = [0.0; LANES];
                values[..lanes].copy_from_slice(out);
                v.store(if add { v.add(total, v.load(&values)) } else { total }, &mut values);
                out.copy_from_slice(&values[..lanes]);
            }
        }
    }
}
