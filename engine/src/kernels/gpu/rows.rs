//! Small steps on rows: embedding, norm and sum, soft cap, picking of rows.

use cubecl::prelude::*;

use super::layout::Layout;
use super::product::tanh;
use super::words::{minimum_of, octet_of, scale_of};

/// Units of a cube.
pub(super) const UNITS: usize = 64;

/// Tokens' rows of a table whose rows begin with the model's row `first`, times `scale`. A unit takes an octet; tokens of other parts of
/// the table are left alone.
#[cube(launch_unchecked)]
pub(super) fn embed(
    table: &[u32],
    tokens: &[u32],
    out: &mut [f32],
    first: u32,
    scale: f32,
    #[comptime] rows: usize,
    #[comptime] layout: Layout,
) {
    let octets = comptime!(layout.octets());
    let columns = comptime!(layout.columns);
    let row = CUBE_POS_Y as usize;
    let octet = CUBE_POS_X as usize * comptime!(UNITS) + UNIT_POS as usize;
    // What is before the part wraps round and is far beyond it.
    let place = (tokens[row] - first) as usize;
    if octet < octets && place < rows {
        let at = place * comptime!(layout.words());
        let weights = octet_of(table, at, octet, layout);
        let factor = scale_of(table, at, octet, layout);
        let minimum = minimum_of(table, at, octet, layout);
        #[unroll]
        for i in 0..8usize {
            let column = octet * 8 + i;
            if column < columns {
                out[row * columns + column] = (weights[i] * factor + minimum) * scale;
            }
        }
    }
}

/// Rows of `x` by their numbers.
#[cube(launch_unchecked)]
pub(super) fn pick(x: &[f32], rows: &[u32], out: &mut [f32], columns: u32) {
    let column = CUBE_POS_X as usize * comptime!(UNITS) + UNIT_POS as usize;
    let columns = columns as usize;
    let row = CUBE_POS_Y as usize;
    if column < columns {
        out[row * columns + column] = x[rows[row] as usize * columns + column];
    }
}

/// `residual` plus rows of `x`, normalised. A cube takes a row.
#[cube(launch_unchecked)]
pub(super) fn add_normed(x: &[f32], gain: &[f32], residual: &[f32], out: &mut [f32], epsilon: f32, #[comptime] columns: usize) {
    let unit = UNIT_POS as usize;
    let from = CUBE_POS_X as usize * columns;
    let mut shared = Shared::<[f32]>::new_slice(comptime!(UNITS));
    let mut square = f32::new(0.0);
    let mut i = unit;
    while i < columns {
        let value = x[from + i];
        square += value * value;
        i += comptime!(UNITS);
    }
    shared[unit] = square;
    sync_cube();
    let mut step = comptime!(UNITS / 2).runtime();
    while step > 0 {
        if unit < step {
            shared[unit] = shared[unit] + shared[unit + step];
        }
        sync_cube();
        step /= 2;
    }
    let factor = f32::new(1.0) / (shared[0] / comptime!(columns as f32) + epsilon).sqrt();
    let mut i = unit;
    while i < columns {
        out[from + i] = residual[from + i] + x[from + i] * factor * gain[i];
        i += comptime!(UNITS);
    }
}

/// `cap · tanh(x / cap)`, in place.
#[cube(launch_unchecked)]
pub(super) fn soften(x: &mut [f32], cap: f32, columns: u32) {
    let column = CUBE_POS_X * comptime!(UNITS as u32) + UNIT_POS;
    if column < columns {
        let place = (CUBE_POS_Y * columns + column) as usize;
        x[place] = cap * tanh(x[place] / cap);
    }
}
