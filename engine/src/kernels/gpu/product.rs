//! Rows of activations times a matrix whose weights stay packed, with what goes before and after it: norm, bias, residual, gate.
//!
//! A cube makes [`ROWS`] elements of each of a few rows of the output. Its units share the columns: each takes every so many octets of
//! them, unpacks the weights of all the cube's rows once, and uses them for all its input rows. At the end the units' sums are added
//! up in shared memory. The norm is not a step of its own: a row's factor is one number, so the products of its elements times the
//! norm's weights are multiplied with it at the end, and its sum of squares is formed on the way.

use cubecl::prelude::*;

use super::layout::Layout;
use super::words::{minimum_of, octet_of, scale_of};
use crate::config::Activation;

/// Rows of the matrix that a cube takes.
pub(super) const ROWS: usize = 4;
/// Most cubes along one side of the grid; devices allow 65,535.
pub(super) const SIDE: usize = 32_768;

/// What a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    /// Of the matrix.
    pub(super) layout: Layout,
    /// Of a second matrix of as many rows and columns, which the first one is the gate of.
    pub(super) second: Option<Layout>,
    /// What products go through, together with the second one's if there are any.
    pub(super) activation: Option<Activation>,
    /// Rows of the matrix.
    pub(super) rows: usize,
    /// Where they begin among the output's columns.
    pub(super) first: usize,
    /// Columns of the output.
    pub(super) width: usize,
    /// Input rows that a cube takes.
    pub(super) tile: usize,
    /// Units of a cube, a power of two.
    pub(super) units: usize,
    /// Whether the input is normalised.
    pub(super) normed: bool,
    /// Whether there is a bias.
    pub(super) biased: bool,
    /// Whether the second matrix has one.
    pub(super) second_biased: bool,
    /// Whether the product is added to a residual, and multiplied with a factor first.
    pub(super) added: bool,
}

impl Shape {
    /// How many groups of rows there are: along the grid's first side, and along its last.
    pub(super) fn groups(&self) -> (usize, usize) {
        let groups = self.rows.div_ceil(ROWS);
        let across = groups.min(SIDE);
        (across, groups.div_ceil(across))
    }

    /// Sums that a cube forms: of products, of the second matrix's, of squares.
    fn sums(&self) -> usize {
        let products = ROWS * self.tile;
        products * if self.second.is_some() { 2 } else { 1 } + if self.normed { self.tile } else { 0 }
    }
}

/// A column, or the last one where there are no more.
#[cube]
fn column_of(column: usize, #[comptime] layout: Layout) -> usize {
    if comptime!(layout.ragged()) { min(column, comptime!(layout.columns - 1)) } else { column }
}

/// Adds the products of a cube's share to `sums`, from place `at` on; and each input row's squares, from place `squares` on.
#[cube]
fn accumulate(
    x: &[f32],
    gain: &[f32],
    weights: &[u32],
    sums: &mut Array<f32>,
    first_row: usize,
    first_token: usize,
    last_token: usize,
    #[comptime] shape: Shape,
    #[comptime] layout: Layout,
    #[comptime] at: usize,
    #[comptime] squares: Option<usize>,
) {
    let tile = comptime!(shape.tile);
    let columns = comptime!(layout.columns);
    let octets = comptime!(layout.octets());
    let mut octet = UNIT_POS as usize;
    while octet < octets {
        let mut values = Array::<f32>::new(comptime!(8 * shape.tile));
        let mut totals = Array::<f32>::new(tile);
        #[unroll]
        for t in 0..tile {
            let from = min(first_token + t, last_token) * columns;
            let mut total = f32::new(0.0);
            let mut square = f32::new(0.0);
            #[unroll]
            for i in 0..8usize {
                let column = octet * 8 + i;
                let there = column_of(column, layout);
                let mut value = x[from + there];
                if comptime!(layout.ragged()) {
                    value = select(column < columns, value, f32::new(0.0));
                }
                if comptime!(shape.normed) {
                    if comptime!(squares.is_some()) {
                        square += value * value;
                    }
                    value *= gain[there];
                }
                values[t * 8 + i] = value;
                if comptime!(layout.has_minimums()) {
                    total += value;
                }
            }
            totals[t] = total;
            if comptime!(squares.is_some()) {
                sums[comptime!(squares.unwrap_or(0)) + t] += square;
            }
        }
        #[unroll]
        for r in 0..ROWS {
            let row = min(first_row + r, comptime!(shape.rows - 1)) * comptime!(layout.words());
            let octet_weights = octet_of(weights, row, octet, layout);
            let scale = scale_of(weights, row, octet, layout);
            let minimum = minimum_of(weights, row, octet, layout);
            #[unroll]
            for t in 0..tile {
                let mut product = f32::new(0.0);
                #[unroll]
                for i in 0..8usize {
                    product += octet_weights[i] * values[t * 8 + i];
                }
                product *= scale;
                if comptime!(layout.has_minimums()) {
                    product += minimum * totals[t];
                }
                sums[at + r * tile + t] += product;
            }
        }
        octet += comptime!(shape.units);
    }
}

/// `2⁄(1 + e⁻²ˣ) − 1`: the hyperbolic tangent, without what overflows.
#[cube]
pub(super) fn tanh(x: f32) -> f32 {
    let x = max(min(x, f32::new(15.0)), f32::new(-15.0));
    f32::new(2.0) / (f32::new(1.0) + (x * f32::new(-2.0)).exp()) - f32::new(1.0)
}

#[cube]
fn sigmoid(x: f32) -> f32 {
    f32::new(1.0) / (f32::new(1.0) + (-max(x, f32::new(-80.0))).exp())
}

/// What a gate makes of itself.
#[cube]
fn activate(x: f32, #[comptime] activation: Activation) -> f32 {
    match comptime!(activation) {
        Activation::Silu => x * sigmoid(x),
        Activation::GeluTanh => {
            let inner = (x + f32::new(0.044_715) * x * x * x) * f32::new(0.797_884_6);
            f32::new(0.5) * x * (f32::new(1.0) + tanh(inner))
        }
        Activation::ReluSquared => {
            let positive = max(x, f32::new(0.0));
            positive * positive
        }
        Activation::ClampedSilu => {
            let below = min(x, f32::new(7.0));
            below * sigmoid(below * f32::new(1.702))
        }
    }
}

/// What a gate opens, made ready.
#[cube]
fn opened(x: f32, #[comptime] activation: Activation) -> f32 {
    match comptime!(activation) {
        Activation::ClampedSilu => max(min(x, f32::new(7.0)), f32::new(-7.0)) + f32::new(1.0),
        Activation::Silu | Activation::GeluTanh | Activation::ReluSquared => x,
    }
}

/// The kernel. Buffers that a shape has no use for are not read; `other` is the residual, or the second matrix's bias.
#[cube(launch_unchecked)]
pub(super) fn product(
    x: &[f32],
    gain: &[f32],
    weights: &[u32],
    second: &[u32],
    bias: &[f32],
    other: &[f32],
    out: &mut [f32],
    tokens: u32,
    epsilon: f32,
    scale: f32,
    #[comptime] shape: Shape,
) {
    let tile = comptime!(shape.tile);
    let units = comptime!(shape.units);
    let products = comptime!(ROWS * shape.tile);
    let count = comptime!(shape.sums());
    let across = comptime!(shape.groups().0);
    let group = CUBE_POS_Z as usize * across + CUBE_POS_X as usize;
    let first_row = group * comptime!(ROWS);
    let first_token = CUBE_POS_Y as usize * tile;
    let last_token = tokens as usize - 1;
    let unit = UNIT_POS as usize;
    if first_row < comptime!(shape.rows) {
        let mut sums = Array::<f32>::new(count);
        let squares = comptime!(if shape.normed { Some(shape.sums() - shape.tile) } else { None });
        accumulate(x, gain, weights, &mut sums, first_row, first_token, last_token, shape, comptime!(shape.layout), 0usize, squares);
        if comptime!(shape.second.is_some()) {
            let layout = comptime!(shape.second.unwrap_or(shape.layout));
            accumulate(x, gain, second, &mut sums, first_row, first_token, last_token, shape, layout, products, comptime!(None));
        }
        // The units' sums are added up: each step halves how many there are of each.
        let mut shared = Shared::<[f32]>::new_slice(comptime!(shape.sums() * shape.units));
        #[unroll]
        for i in 0..count {
            shared[i * units + unit] = sums[i];
        }
        sync_cube();
        let mut step = comptime!(shape.units / 2).runtime();
        while step > 0 {
            let mut i = unit;
            while i < count * step {
                let place = i / step * units + i % step;
                shared[place] = shared[place] + shared[place + step];
                i += units;
            }
            sync_cube();
            step /= 2;
        }
        let mut i = unit;
        while i < products {
            let row = first_row + i / tile;
            let token = first_token + i % tile;
            if row < comptime!(shape.rows) && token <= last_token {
                let mut value = shared[i * units];
                let mut factor = f32::new(1.0);
                if comptime!(shape.normed) {
                    let square = shared[(comptime!(shape.sums() - shape.tile) + i % tile) * units];
                    factor = f32::new(1.0) / (square / comptime!(shape.layout.columns as f32) + epsilon).sqrt();
                }
                value *= factor;
                let column = row + comptime!(shape.first);
                if comptime!(shape.biased) {
                    value += bias[column];
                }
                if comptime!(shape.activation.is_some()) {
                    let activation = comptime!(shape.activation.unwrap_or(Activation::Silu));
                    value = activate(value, activation);
                    if comptime!(shape.second.is_some()) {
                        let mut up = shared[(products + i) * units] * factor;
                        if comptime!(shape.second_biased) {
                            up += other[column];
                        }
                        value *= opened(up, activation);
                    }
                }
                let place = token * comptime!(shape.width) + column;
                if comptime!(shape.added) {
                    value = other[place] + value * scale;
                }
                out[place] = value;
            }
            i += units;
        }
    }
}
