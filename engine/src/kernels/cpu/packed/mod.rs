//! Weight matrices as the CPU kernels read them: quantised as in the file, sixteen rows interleaved.
//!
//! Rows are taken in groups of sixteen, one for each lane; the last group is filled up with rows of zeros. Within a
//! group blocks follow each other along the columns, and a block holds, for its sixteen rows, four columns of the first
//! row, four of the second and so on: what one step of an integer dot product takes. Nothing is rounded, and a
//! matrix takes the memory that it takes in the file, but for the scales of Q4_K and Q5_K, whose six bits become a byte, and for types
//! of less than four bits, which become nibbles.

mod floats;
mod formats;
mod levels;
#[cfg(test)]
mod tests;

use std::io;

use formats::{Format, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};

use super::activations::{ActivationBlock, Tile};
use super::memory::{Memory, Piece};
use super::simd::{BLOCK, LANES, PartOp, Vector};
use crate::quant::{self, BlockType};

use floats::{Brain, Float, Half, Single};
use levels::{Iq4Nl, LongLevels, Mxfp4, Q2K};

/// Rows of a group.
pub(crate) const GROUP: usize = LANES;

/// A packed matrix.
#[derive(Debug, Clone)]
pub(crate) struct PackedMatrix {
    rows: usize,
    columns: usize,
    data: Data,
}

/// Groups of rows, one after the other.
#[derive(Debug, Clone)]
enum Data {
    Q4_0(Piece<Q4_0>),
    Q4_1(Piece<Q4_1>),
    Q5_0(Piece<Q5_0>),
    Q5_1(Piece<Q5_1>),
    Q8_0(Piece<Q8_0>),
    Q4K(Piece<Q4K>),
    Q5K(Piece<Q5K>),
    Q6K(Piece<Q6K>),
    Q2K(Piece<Q2K>),
    Iq4Nl(Piece<Iq4Nl>),
    Mxfp4(Piece<Mxfp4>),
    LongLevels(Piece<LongLevels>),
    Single(Piece<Single>),
    Half(Piece<Half>),
    Brain(Piece<Brain>),
}

/// Does the same with whichever vector of quantised blocks or float lanes there is.
macro_rules! each {
    ($data:expr, $quantised:ident => $with_blocks:expr, $floats:ident => $with_floats:expr) => {
        match $data {
            Data::Q4_0($quantised) => $with_blocks,
            Data::Q4_1($quantised) => $with_blocks,
            Data::Q5_0($quantised) => $with_blocks,
            Data::Q5_1($quantised) => $with_blocks,
            Data::Q8_0($quantised) => $with_blocks,
            Data::Q4K($quantised) => $with_blocks,
            Data::Q5K($quantised) => $with_blocks,
            Data::Q6K($quantised) => $with_blocks,
            Data::Q2K($quantised) => $with_blocks,
            Data::Iq4Nl($quantised) => $with_blocks,
            Data::Mxfp4($quantised) => $with_blocks,
            Data::LongLevels($quantised) => $with_blocks,
            Data::Single($floats) => $with_floats,
            Data::Half($floats) => $with_floats,
            Data::Brain($floats) => $with_floats,
        }
    };
}

/// Why a matrix cannot be packed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PackError {
    /// There are no kernels for the type.
    #[error("weights of type {0} cannot be computed with on this backend")]
    Unsupported(BlockType),
    /// The bytes are not those of a matrix of this shape.
    #[error("{bytes} bytes of type {block} are no matrix of {rows} rows and {columns} columns")]
    Shape {
        /// Bytes given.
        bytes: usize,
        /// Their type.
        block: BlockType,
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        columns: usize,
    },
    /// No memory.
    #[error("no memory for {rows} rows and {columns} columns of weights: {source}")]
    Memory {
        /// Rows.
        rows: usize,
        /// Columns.
        columns: usize,
        /// What the system said.
        source: io::Error,
    },
}

/// What matrices multiply with: rows of activations.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Input<'a> {
    /// Elements of a row.
    pub(crate) columns: usize,
    /// Tiles of rows of `columns / 32` blocks; empty if no quantised matrix is there to take them.
    pub(crate) blocks: &'a [ActivationBlock],
    /// Tiles of rows of `columns` numbers: one column of the tile's rows after the other. Empty if no float matrix is there to take
    /// them.
    pub(crate) floats: &'a [f32],
}

impl PackedMatrix {
    /// Packs `rows` rows of `columns` elements, given as GGUF stores them.
    pub(crate) fn pack(to: &mut Memory, block: BlockType, rows: usize, columns: usize, bytes: &[u8]) -> Result<Self, PackError> {
        let shape = || PackError::Shape { bytes: bytes.len(), block, rows, columns };
        let row_bytes = block.row_bytes(columns).ok_or_else(shape)?;
        if row_bytes == 0 || row_bytes.checked_mul(rows) != Some(bytes.len()) {
            return Err(shape());
        }
        let memory = |source| PackError::Memory { rows, columns, source };
        let data = match block {
            BlockType::Q4_0 => quantised(to, columns, row_bytes, bytes).map(Data::Q4_0),
            BlockType::Q4_1 => quantised(to, columns, row_bytes, bytes).map(Data::Q4_1),
            BlockType::Q5_0 => quantised(to, columns, row_bytes, bytes).map(Data::Q5_0),
            BlockType::Q5_1 => quantised(to, columns, row_bytes, bytes).map(Data::Q5_1),
            BlockType::Q8_0 => quantised(to, columns, row_bytes, bytes).map(Data::Q8_0),
            BlockType::Q4_K => quantised(to, columns, row_bytes, bytes).map(Data::Q4K),
            BlockType::Q5_K => quantised(to, columns, row_bytes, bytes).map(Data::Q5K),
            BlockType::Q6_K => quantised(to, columns, row_bytes, bytes).map(Data::Q6K),
            BlockType::Q2_K => quantised(to, columns, row_bytes, bytes).map(Data::Q2K),
            BlockType::IQ4_NL => quantised(to, columns, row_bytes, bytes).map(Data::Iq4Nl),
            BlockType::MXFP4 => quantised(to, columns, row_bytes, bytes).map(Data::Mxfp4),
            BlockType::F32 => floats(to, columns, row_bytes, bytes).map(Data::Single),
            BlockType::F16 => floats(to, columns, row_bytes, bytes).map(Data::Half),
            BlockType::BF16 => floats(to, columns, row_bytes, bytes).map(Data::Brain),
            other if has_long_levels(other) => packed(to, Some(LongLevels::of(other)), columns, row_bytes, bytes).map(Data::LongLevels),
            other => return Err(PackError::Unsupported(other)),
        };
        Ok(Self { rows, columns, data: data.map_err(memory)? })
    }

    /// Memory that a matrix will take, in bytes; `None` if it cannot be packed.
    pub(crate) fn bytes_for(block: BlockType, rows: usize, columns: usize) -> Option<u64> {
        let (span, block_bytes) = match block {
            BlockType::Q4_0 => spanned::<Q4_0>(),
            BlockType::Q4_1 => spanned::<Q4_1>(),
            BlockType::Q5_0 => spanned::<Q5_0>(),
            BlockType::Q5_1 => spanned::<Q5_1>(),
            BlockType::Q8_0 => spanned::<Q8_0>(),
            BlockType::Q4_K => spanned::<Q4K>(),
            BlockType::Q5_K => spanned::<Q5K>(),
            BlockType::Q6_K => spanned::<Q6K>(),
            BlockType::Q2_K => spanned::<Q2K>(),
            BlockType::IQ4_NL => spanned::<Iq4Nl>(),
            BlockType::MXFP4 => spanned::<Mxfp4>(),
            BlockType::F32 => (1, size_of::<Single>()),
            BlockType::F16 => (1, size_of::<Half>()),
            BlockType::BF16 => (1, size_of::<Brain>()),
            other if has_long_levels(other) => spanned::<LongLevels>(),
            _ => return None,
        };
        if !columns.is_multiple_of(span) {
            return None;
        }
        let blocks = (columns / span).checked_mul(rows.div_ceil(GROUP))?;
        u64::try_from(blocks.checked_mul(block_bytes)?).ok()
    }

    /// Rows: elements of what it puts out.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Columns: elements of what it takes.
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// Groups of rows, the last one perhaps with rows that are not there.
    pub(crate) fn groups(&self) -> usize {
        self.rows.div_ceil(GROUP)
    }

    /// Memory, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        each!(&self.data, blocks => size_of_val::<[_]>(blocks), lanes => size_of_val::<[_]>(lanes))
    }

    /// Whether it takes activations in 8-bit blocks, rather than as they are.
    pub(crate) fn takes_blocks(&self) -> bool {
        each!(&self.data, _blocks => true, _lanes => false)
    }

    /// Writes row `row` as plain numbers; `out` has as many elements as there are columns.
    ///
    /// The row must exist.
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        let (group, lane) = (row / GROUP, row % GROUP);
        each!(&self.data,
            blocks => {
                let (blocks, span) = group_of(blocks, self.columns, group);
                for (block, out) in blocks.iter().zip(out.chunks_exact_mut(span)) {
                    block.row(lane, out);
                }
            },
            lanes => {
                for (column, out) in lanes[group * self.columns..][..self.columns].iter().zip(out) {
                    *out = column.value(lane);
                }
            }
        );
    }

    /// Products of group `group` with the `T` rows of the input's tile that begins with row `first`. Each lane is a row of the matrix, and
    /// the sum runs along the columns in order, whatever `T` is.
    #[inline(always)]
    pub(crate) fn tile<V: Vector, const T: usize>(&self, v: V, group: usize, input: &Input<'_>, first: usize) -> [V::F; T] {
        each!(&self.data,
            blocks => {
                let (blocks, _) = group_of(blocks, self.columns, group);
                let span = self.columns / BLOCK;
                let x = bytemuck::cast_slice(&input.blocks[first * span..(first + T) * span]);
                v.call(QuantisedTile::<_, _, T> { v, blocks, x })
            },
            lanes => {
                let lanes = &lanes[group * self.columns..][..self.columns];
                let (x, _) = input.floats[first * self.columns..(first + T) * self.columns].as_chunks();
                v.call(FloatTile::<_, _, T> { v, lanes, x })
            }
        )
    }
}

/// Columns that a block spans, and its bytes.
fn spanned<F: Format>() -> (usize, usize) {
    (F::PARTS * BLOCK, size_of::<F>())
}

/// The blocks of a group, and the columns that each spans.
#[inline(always)]
fn group_of<F: Format>(blocks: &[F], columns: usize, group: usize) -> (&[F], usize) {
    let span = F::PARTS * BLOCK;
    let count = columns / span;
    (&blocks[group * count..][..count], span)
}

/// Whether [`LongLevels`] holds blocks of the type.
fn has_long_levels(block: BlockType) -> bool {
    quant::levels(block).is_some() && block.block_len() == quant::LONGEST
}

fn quantised<F: Format>(to: &mut Memory, columns: usize, row_bytes: usize, bytes: &[u8]) -> io::Result<Piece<F>> {
    packed(to, None, columns, row_bytes, bytes)
}

/// Packs rows into copies of `empty`, or of zeros.
fn packed<F: Format>(to: &mut Memory, empty: Option<F>, columns: usize, row_bytes: usize, bytes: &[u8]) -> io::Result<Piece<F>> {
    let per_row = columns / (F::PARTS * BLOCK);
    let groups = (bytes.len() / row_bytes).div_ceil(GROUP);
    to.filled(groups * per_row, |out: &mut [F]| {
        if let Some(empty) = empty {
            out.fill(empty);
        }
        for (row, bytes) in bytes.chunks_exact(row_bytes).enumerate() {
            let blocks = &mut out[row / GROUP * per_row..][..per_row];
            for (block, bytes) in blocks.iter_mut().zip(bytes.chunks_exact(row_bytes / per_row)) {
                block.put(row % GROUP, bytes);
            }
        }
    })
}

fn floats<F: Float>(to: &mut Memory, columns: usize, row_bytes: usize, bytes: &[u8]) -> io::Result<Piece<F>> {
    let groups = (bytes.len() / row_bytes).div_ceil(GROUP);
    to.filled(groups * columns, |out: &mut [F]| {
        for (row, bytes) in bytes.chunks_exact(row_bytes).enumerate() {
            let lanes = &mut out[row / GROUP * columns..][..columns];
            for (column, bytes) in lanes.iter_mut().zip(bytes.chunks_exact(row_bytes / columns)) {
                column.put(row % GROUP, bytes);
            }
        }
    })
}

struct QuantisedTile<'a, V, F, const T: usize> {
    v: V,
    blocks: &'a [F],
    x: &'a [Tile<T>],
}

impl<V: Vector, F: Format, const T: usize> PartOp for QuantisedTile<'_, V, F, T> {
    type Output = [V::F; T];

    #[inline(always)]
    fn eval<Same: Vector>(self, _: Same) -> [V::F; T] {
        let v = self.v;
        let mut totals = [v.splat(0.0); T];
        for (block, x) in self.blocks.iter().zip(self.x.chunks_exact(F::PARTS)) {
            block.add_products(v, x, &mut totals);
        }
        totals
    }
}

struct FloatTile<'a, V, F, const T: usize> {
    v: V,
    lanes: &'a [F],
    x: &'a [[f32; T]],
}

impl<V: Vector, F: Float, const T: usize> PartOp for FloatTile<'_, V, F, T> {
    type Output = [V::F; T];

    #[inline(always)]
    fn eval<Same: Vector>(self, _: Same) -> [V::F; T] {
        let v = self.v;
        let mut totals = [v.splat(0.0); T];
        for (lanes, x) in self.lanes.iter().zip(self.x) {
            let weights = lanes.load(v);
            for t in 0..T {
                totals[t] = v.fma(weights, v.splat(x[t]), totals[t]);
            }
        }
        totals
    }
}
