//! Kernels of graphics processors, written once with CubeCL and compiled for whatever driver there is: WGSL for Vulkan and DirectX,
//! and for Metal.
//!
//! Weights stay quantised on the device ([`layout`]); keys and values are half-precision numbers in pages there. A layer is some eight
//! launches: three products that normalise their input as they go ([`product`]), two for cache and attention ([`attention`]), one
//! for the output, one for the gate, one for what it opens. Activations stay on the device from the embedding to the
//! logits, and the host reads once a step. Mixtures of experts and latent attention go by the defaults in Burn's operations, with
//! these products; there the host reads which experts a layer's rows go to.
//!
//! Sums are formed in single precision, in an order that depends on shapes; and unlike on the CPU, activations are not rounded to 8
//! bits. So a device's numbers are nearer the exact ones than the CPU's and differ from them in the third digit, and tokens are
//! the same as long as no two are that near each other.
#![allow(clippy::too_many_arguments, reason = "a kernel's arguments are its buffers")]

mod adapters;
mod attention;
mod held;
mod layout;
mod product;
mod rows;
mod speed;
#[cfg(test)]
mod tests;
mod words;

pub(crate) use adapters::{devices, open};
pub(crate) use held::{DeviceMatrix, DevicePages, Steps};
pub(crate) use speed::measure;

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_wgpu::{CubeTensor, Wgpu};
use cubecl::Device;
use cubecl::prelude::{CubeCount, CubeDim};

use super::{
    AttentionShape, Batch, Gate, HeadWeights, Held, HeldKv, Kernels, KvLayer, KvShape, LayerError, Linear, LogitsFinish, Matrix, Norm,
    Residual, Rotation, Workspace, plain,
};
use crate::config::{Activation, NormKind, RopeLayout};
use crate::device::DeviceError;
use crate::gguf::TensorView;
use held::upload;

/// A tensor `[rows, columns]` with anything in it.
fn empty(like: &CubeTensor, rows: usize, columns: usize) -> CubeTensor {
    let memory = like.client.empty(rows * columns * size_of::<f32>());
    CubeTensor::new_contiguous(like.client.clone(), like.device.clone(), Shape::new([rows, columns]), memory, DType::F32)
}

/// Grids have sides of 32 bits, and nothing that is multiplied here comes near.
fn count(x: usize, y: usize, z: usize) -> CubeCount {
    CubeCount::Static(x as u32, y as u32, z as u32)
}

fn units(units: usize) -> CubeDim {
    CubeDim::new_1d(units as u32)
}

impl Matrix<Wgpu> {
    fn on_device(&self) -> Option<&DeviceMatrix> {
        match &self.0 {
            Held::Device(matrix) => Some(matrix),
            _ => None,
        }
    }
}

/// What a product is made of.
#[derive(Clone, Copy)]
struct Product<'a> {
    x: &'a CubeTensor,
    /// One that divides by the root mean square and has no bias.
    norm: Option<&'a Norm<Wgpu>>,
    matrix: &'a DeviceMatrix,
    bias: Option<&'a CubeTensor>,
    finish: Finish<'a>,
}

/// What becomes of it.
#[derive(Clone, Copy)]
enum Finish<'a> {
    Nothing,
    /// It is multiplied with a factor and added to a residual.
    Add(&'a CubeTensor, f32),
    /// It goes through an activation.
    Activate(Activation),
    /// It opens the products of another matrix, which is in as many parts, and its bias.
    Gate(Activation, &'a DeviceMatrix, Option<&'a CubeTensor>),
}

impl Product<'_> {
    fn run(self) -> CubeTensor {
        let x = into_contiguous(self.x.clone());
        let tokens = x.shape()[0];
        let width = self.matrix.rows;
        let out = empty(&x, tokens, width);
        let tile = match tokens {
            0..=2 => tokens.max(1),
            3..=4 => 4,
            _ => 8,
        };
        // Few rows leave units for the columns.
        let columns = if tile <= 2 && self.matrix.layout.octets() > 32 { 64 } else { 32 };
        let (residual, scale) = match self.finish {
            Finish::Add(residual, scale) => (Some(residual), scale),
            _ => (None, 1.0),
        };
        let (activation, second) = match self.finish {
            Finish::Activate(activation) => (Some(activation), None),
            Finish::Gate(activation, second, bias) => (Some(activation), Some((second, bias))),
            _ => (None, None),
        };
        let second_bias = second.and_then(|(_, bias)| bias);
        for (i, part) in self.matrix.parts.iter().enumerate() {
            let second = second.and_then(|(matrix, _)| Some((matrix.layout, matrix.parts.get(i)?)));
            let shape = product::Shape {
                layout: self.matrix.layout,
                second: second.map(|(layout, _)| layout),
                activation,
                rows: part.rows,
                first: part.first,
                width,
                tile,
                units: columns,
                normed: self.norm.is_some(),
                biased: self.bias.is_some(),
                second_biased: second_bias.is_some(),
                added: residual.is_some(),
            };
            let (across, deep) = shape.groups();
            // A buffer that is not read can be any.
            let floats = |tensor: Option<&CubeTensor>| tensor.unwrap_or(&x).clone().into_buffer_arg();
            // SAFETY: the kernel reads rows of `x`, elements of the norm's weight, the biases and the residual, and rows of the matrices,
            // only within the sizes of its shape, which are those of the buffers (whoever loads a decoder checks that they fit each
            // other), and writes elements of rows and columns that there are.
            unsafe {
                product::product::launch_unchecked(
                    &x.client,
                    count(across, tokens.div_ceil(tile), deep),
                    units(columns),
                    x.clone().into_buffer_arg(),
                    floats(self.norm.map(|norm| &norm.weight)),
                    part.words.clone().into_buffer_arg(),
                    second.map_or(&part.words, |(_, part)| &part.words).clone().into_buffer_arg(),
                    floats(self.bias),
                    floats(residual.or(second_bias)),
                    out.clone().into_buffer_arg(),
                    tokens as u32,
                    self.norm.map_or(0.0, |norm| norm.epsilon),
                    scale,
                    shape,
                );
            }
        }
        out
    }
}

/// Rows of `columns` elements, normalised; multiplied with a factor and added to a residual if there is one.
fn normalise(x: &CubeTensor, columns: usize, norm: &Norm<Wgpu>, residual: Option<(&CubeTensor, f32)>) -> CubeTensor {
    let x = into_contiguous(x.clone());
    let rows = x.shape().num_elements() / columns;
    let out = empty(&x, x.shape()[0], x.shape()[1]);
    let shape = rows::NormShape { columns, centred: norm.kind == NormKind::Layer, biased: norm.bias.is_some(), added: residual.is_some() };
    // SAFETY: a cube reads and writes the elements of one row, and there are as many cubes as rows.
    unsafe {
        rows::normalise::launch_unchecked(
            &x.client,
            count(rows, 1, 1),
            units(rows::UNITS),
            x.clone().into_buffer_arg(),
            norm.weight.clone().into_buffer_arg(),
            norm.bias.as_ref().unwrap_or(&x).clone().into_buffer_arg(),
            residual.map_or(&x, |(residual, _)| residual).clone().into_buffer_arg(),
            out.clone().into_buffer_arg(),
            norm.epsilon,
            residual.map_or(1.0, |(_, scale)| scale),
            shape,
        );
    }
    out
}

/// Whether products can normalise their input by it as they go.
fn is_simple(norm: &Norm<Wgpu>) -> bool {
    norm.kind == NormKind::RootMeanSquare && norm.bias.is_none()
}

/// The input of products, and the norm that they are left with.
fn ready<'a>(x: &CubeTensor, norm: Option<&'a Norm<Wgpu>>) -> (CubeTensor, Option<&'a Norm<Wgpu>>) {
    match norm {
        Some(norm) if !is_simple(norm) => (normalise(x, x.shape()[1], norm, None), None),
        norm => (x.clone(), norm),
    }
}

/// Queries or keys, and the norm of each head that is left to be taken.
fn headed<'a>(x: &CubeTensor, length: usize, norm: Option<&'a Norm<Wgpu>>) -> (CubeTensor, Option<&'a Norm<Wgpu>>) {
    match norm {
        Some(norm) if norm.weight.shape().num_elements() != length => (normalise(x, x.shape()[1], norm, None), None),
        Some(norm) if !is_simple(norm) => (normalise(x, length, norm, None), None),
        norm => (into_contiguous(x.clone()), norm),
    }
}

fn head(shape: &KvShape, rotation: &Rotation, norm: Option<&Norm<Wgpu>>) -> attention::Head {
    attention::Head {
        length: shape.key_length,
        pairs: rotation.pairs(),
        halves: rotation.layout() == RopeLayout::Halves,
        normed: norm.is_some(),
    }
}

impl Kernels for Wgpu {
    fn matrix(_work: &mut Workspace, device: &Device, view: &TensorView<'_>) -> Result<Matrix<Self>, LayerError> {
        DeviceMatrix::load(device, view).map(|matrix| Matrix(Held::Device(matrix)))
    }

    fn kv_page_bytes(shape: &KvShape) -> u64 {
        DevicePages::page_bytes(shape)
    }

    fn kv_pages_max(device: &Device, shape: &KvShape) -> u64 {
        DevicePages::pages_max(device, shape)
    }

    fn kv_layer(device: &Device, shape: KvShape) -> Result<KvLayer<Self>, LayerError> {
        DevicePages::new(device, shape).map(|pages| KvLayer(HeldKv::Device(pages)))
    }

    fn embed(_work: &mut Workspace, device: &Device, table: &Matrix<Self>, tokens: &[u32], scale: f32) -> CubeTensor {
        let Some(matrix) = table.on_device() else { return plain::embed::<Self>(device, table, tokens, scale) };
        let numbers = upload(device, tokens.to_vec());
        let out = empty(&numbers, tokens.len(), matrix.layout.columns);
        for part in &matrix.parts {
            // SAFETY: a unit reads the octet of a row that is in this part, and writes the columns that there are.
            unsafe {
                rows::embed::launch_unchecked(
                    &out.client,
                    count(matrix.layout.octets().div_ceil(rows::UNITS), tokens.len(), 1),
                    units(rows::UNITS),
                    part.words.clone().into_buffer_arg(),
                    numbers.clone().into_buffer_arg(),
                    out.clone().into_buffer_arg(),
                    part.first as u32,
                    scale,
                    part.rows,
                    matrix.layout,
                );
            }
        }
        out
    }

    fn multiply(x: CubeTensor, matrix: &Matrix<Self>) -> CubeTensor {
        match matrix.on_device() {
            Some(matrix) => Product { x: &x, norm: None, matrix, bias: None, finish: Finish::Nothing }.run(),
            None => plain::multiply::<Self>(x, matrix),
        }
    }

    fn project(_work: &mut Workspace, x: &CubeTensor, norm: Option<&Norm<Self>>, linears: [&Linear<Self>; 3]) -> [CubeTensor; 3] {
        let [Some(queries), Some(keys), Some(values)] = linears.map(|linear| linear.matrix.on_device()) else {
            return plain::project::<Self>(x, norm, linears);
        };
        let matrices = [queries, keys, values];
        let (x, norm) = ready(x, norm);
        [0, 1, 2].map(|i| {
            let bias = linears[i].bias.as_ref();
            Product { x: &x, norm, matrix: matrices[i], bias, finish: Finish::Nothing }.run()
        })
    }

    fn attend(
        work: &mut Workspace,
        [queries, keys, values]: [&CubeTensor; 3],
        shape: &AttentionShape,
        weights: &HeadWeights<Self>,
        rotation: &Rotation,
        batch: &Batch,
        kv: &mut KvLayer<Self>,
    ) -> CubeTensor {
        let HeldKv::Device(pages) = &kv.0 else {
            return plain::attend::<Self>([queries, keys, values], shape, weights, rotation, batch, kv);
        };
        let sizes = &pages.shape;
        let (queries, query_norm) = headed(queries, sizes.key_length, weights.query_norm.as_ref());
        let (keys, key_norm) = headed(keys, sizes.key_length, weights.key_norm.as_ref());
        let values = into_contiguous(values.clone());
        let (client, device) = (&queries.client, &queries.device);
        let rows = batch.positions().len();
        let table = work.steps.rows(device, batch);
        let angles = work.steps.angles(device, rotation);
        let shaped = |norm| attention::Shape {
            head: head(sizes, rotation, norm),
            value_length: sizes.value_length,
            heads: shape.heads,
            kv_heads: sizes.kv_heads,
            capped: shape.softcap.is_some(),
            sinks: weights.sinks.is_some(),
        };
        let gain = |norm: Option<&Norm<Self>>| norm.map_or(&angles, |norm| &norm.weight).clone().into_buffer_arg();
        let epsilon = |norm: Option<&Norm<Self>>| norm.map_or(0.0, |norm| norm.epsilon);
        // SAFETY: a cube reads one head of one row of keys and values, that row's angles and place, and writes the words of that place, which
        // is in a page that the batch was promised to exist.
        unsafe {
            attention::store::launch_unchecked(
                client,
                count(rows, sizes.kv_heads, 1),
                units(attention::UNITS),
                keys.into_buffer_arg(),
                values.into_buffer_arg(),
                gain(key_norm),
                angles.clone().into_buffer_arg(),
                table.clone().into_buffer_arg(),
                pages.keys.clone().into_buffer_arg(),
                pages.values.clone().into_buffer_arg(),
                epsilon(key_norm),
                shaped(key_norm),
            );
        }
        let out = empty(&queries, rows, shape.heads * sizes.value_length);
        // SAFETY: a cube reads one head of one row of queries, and of the cache the positions up to the row's in pages that the batch was
        // promised to exist; it writes that head's part of the output.
        unsafe {
            attention::attend::launch_unchecked(
                client,
                count(rows, shape.heads, 1),
                units(attention::UNITS),
                queries.clone().into_buffer_arg(),
                gain(query_norm),
                angles.clone().into_buffer_arg(),
                pages.keys.clone().into_buffer_arg(),
                pages.values.clone().into_buffer_arg(),
                table.into_buffer_arg(),
                weights.sinks.as_ref().unwrap_or(&angles).clone().into_buffer_arg(),
                out.clone().into_buffer_arg(),
                epsilon(query_norm),
                shape.scale,
                shape.growth.map_or(0.0, |growth| growth.by),
                shape.growth.map_or(1, |growth| u32::try_from(growth.every).unwrap_or(u32::MAX).max(1)),
                shape.softcap.unwrap_or(1.0),
                shape.window.map_or(u32::MAX, |window| u32::try_from(window).unwrap_or(u32::MAX)),
                shaped(query_norm),
            );
        }
        out
    }

    fn project_add(_work: &mut Workspace, input: &CubeTensor, linear: &Linear<Self>, residual: Residual<'_, Self>) -> CubeTensor {
        let Some(matrix) = linear.matrix.on_device() else { return plain::project_add::<Self>(input, linear, residual) };
        let rows = into_contiguous(residual.rows);
        let product = |finish| Product { x: input, norm: None, matrix, bias: linear.bias.as_ref(), finish }.run();
        match residual.norm {
            None => product(Finish::Add(&rows, residual.scale)),
            Some(norm) => normalise(&product(Finish::Nothing), matrix.rows, norm, Some((&rows, residual.scale))),
        }
    }

    fn gated(_work: &mut Workspace, x: &CubeTensor, norm: Option<&Norm<Self>>, gate: &Gate<Self>) -> CubeTensor {
        let parts = |matrix: &DeviceMatrix| matrix.parts.iter().map(|part| part.rows).collect::<Vec<_>>();
        let (x, norm) = ready(x, norm);
        match (gate.gate.as_ref().map(|gate| (gate.matrix.on_device(), gate.bias.as_ref())), gate.up.matrix.on_device()) {
            (Some((Some(matrix), bias)), Some(up)) if parts(matrix) == parts(up) => {
                Product { x: &x, norm, matrix, bias, finish: Finish::Gate(gate.activation, up, gate.up.bias.as_ref()) }.run()
            }
            (None, Some(up)) => {
                Product { x: &x, norm, matrix: up, bias: gate.up.bias.as_ref(), finish: Finish::Activate(gate.activation) }.run()
            }
            // Matrices of different types that are too large for one buffer.
            _ => plain::gated::<Self>(&x, norm, gate),
        }
    }

    fn logits(
        _work: &mut Workspace,
        x: &CubeTensor,
        sampled: &[usize],
        norm: &Norm<Self>,
        head: &Matrix<Self>,
        finish: &LogitsFinish,
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        let Some(matrix) = head.on_device() else { return plain::logits::<Self>(x, sampled, norm, head, finish, out) };
        if sampled.is_empty() {
            return Ok(());
        }
        let x = into_contiguous(x.clone());
        let (rows, columns) = (x.shape()[0], x.shape()[1]);
        let x = if sampled.len() == rows { x } else { pick(&x, sampled, columns) };
        let (x, norm) = ready(&x, Some(norm));
        let logits = Product { x: &x, norm, matrix, bias: None, finish: Finish::Nothing }.run();
        if finish.scale != 1.0 || finish.softcap.is_some() {
            // SAFETY: a unit reads and writes an element of a row and a column that there are.
            unsafe {
                rows::finish::launch_unchecked(
                    &logits.client,
                    count(matrix.rows.div_ceil(rows::UNITS), sampled.len(), 1),
                    units(rows::UNITS),
                    logits.clone().into_buffer_arg(),
                    finish.scale,
                    finish.softcap.unwrap_or(1.0),
                    matrix.rows as u32,
                    finish.softcap.is_some(),
                );
            }
        }
        Self::read(logits, out)
    }
}

/// Rows `sampled` of `x`, which are some of its rows in their order.
fn pick(x: &CubeTensor, sampled: &[usize], columns: usize) -> CubeTensor {
    let numbers = upload(&x.device, sampled.iter().map(|&row| row as u32).collect());
    let out = empty(x, sampled.len(), columns);
    // SAFETY: a unit reads an element of a row and a column that there are, and writes one.
    unsafe {
        rows::pick::launch_unchecked(
            &x.client,
            count(columns.div_ceil(rows::UNITS), sampled.len(), 1),
            units(rows::UNITS),
            x.clone().into_buffer_arg(),
            numbers.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            columns as u32,
        );
    }
    out
}
