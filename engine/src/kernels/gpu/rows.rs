//! Small steps on rows: embedding, norms, what becomes of logits, picking of rows.

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

/// What [`normalise`] is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct NormShape {
    /// Elements of a row.
    pub(super) columns: usize,
    /// Whether rows lose their mean first.
    pub(super) centred: bool,
    /// Whether there is a bias.
    pub(super) biased: bool,
    /// Whether the row is added to a residual, and multiplied with a factor first.
    pub(super) added: bool,
}

/// The sum of the units' values, to each of them.
#[cube]
fn sum_of(shared: &mut Shared<[f32]>, value: f32) -> f32 {
    let unit = UNIT_POS as usize;
    shared[unit] = value;
    sync_cube();
    let mut step = comptime!(UNITS / 2).runtime();
    while step > 0 {
        if unit < step {
            shared[unit] = shared[unit] + shared[unit + step];
        }
        sync_cube();
        step /= 2;
    }
    let sum = shared[0];
    sync_cube();
    sum
}

/// Rows of `x`, normalised, and perhaps added to a residual. A cube takes a row.
#[cube(launch_unchecked)]
pub(super) fn normalise(
    x: &[f32],
    gain: &[f32],
    bias: &[f32],
    residual: &[f32],
    out: &mut [f32],
    epsilon: f32,
    scale: f32,
    #[comptime] shape: NormShape,
) {
    let unit = UNIT_POS as usize;
    let columns = comptime!(shape.columns);
    let from = CUBE_POS_X as usize * columns;
    let mut shared = Shared::<[f32]>::new_slice(comptime!(UNITS));
    let mut mean = f32::new(0.0);
    if comptime!(shape.centred) {
        let mut sum = f32::new(0.0);
        let mut i = unit;
        while i < columns {
            sum += x[from + i];
            i += comptime!(UNITS);
        }
        mean = sum_of(&mut shared, sum) / comptime!(shape.columns as f32);
    }
    let mut square = f32::new(0.0);
    let mut i = unit;
    while i < columns {
        let value = x[from + i] - mean;
        square += value * value;
        i += comptime!(UNITS);
    }
    let factor = f32::new(1.0) / (sum_of(&mut shared, square) / comptime!(shape.columns as f32) + epsilon).sqrt();
    let mut i = unit;
    while i < columns {
        let mut value = (x[from + i] - mean) * factor * gain[i];
        if comptime!(shape.biased) {
            value += bias[i];
        }
        if comptime!(shape.added) {
            value = residual[from + i] + value * scale;
        }
        out[from + i] = value;
        i += comptime!(UNITS);
    }
}

/// Multiplies `x` with `scale`, then makes `cap · tanh(x / cap)` of it if it is capped; in place.
#[cube(launch_unchecked)]
pub(super) fn finish(x: &mut [f32], scale: f32, cap: f32, columns: u32, #[comptime] capped: bool) {
    let column = CUBE_POS_X * comptime!(UNITS as u32) + UNIT_POS;
    if column < columns {
        let place = (CUBE_POS_Y * columns + column) as usize;
        let mut value = x[place] * scale;
        if comptime!(capped) {
            value = cap * tanh(value / cap);
        }
        x[place] = value;
    }
}
