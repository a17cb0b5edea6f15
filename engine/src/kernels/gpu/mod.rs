//! Kernels of graphics processors, written once with CubeCL and compiled for whatever driver there is: WGSL for Vulkan and DirectX,
//! and for Metal.
//!
//! Weights stay quantised on the device ([`layout`]); keys and values are half-precision numbers in pages there. A layer is some eight
//! launches: three products that normalise their input as they go ([`product`]), two for cache and attention ([`attention`]), one
//! for the output, one for the gate, one for what it opens. Activations stay on the device from the embedding to the
//! logits, and the host reads once a step.
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
    AttentionShape, Batch, Gate, Held, HeldKv, Kernels, KvLayer, KvShape, LayerError, Linear, Matrix, Norm, Rotation, Workspace, plain,
};
use crate::config::{Activation, RopeLayout};
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
struct Product<'a> {
    x: &'a CubeTensor,
    norm: Option<&'a Norm<Wgpu>>,
    matrix: &'a DeviceMatrix,
    /// A matrix in as many parts, for whose products the first one's are a gate.
    gated: Option<(&'a DeviceMatrix, Activation)>,
    bias: Option<&'a CubeTensor>,
    residual: Option<&'a CubeTensor>,
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
        for (i, part) in self.matrix.parts.iter().enumerate() {
            let second = self.gated.and_then(|(matrix, activation)| Some((matrix, matrix.parts.get(i)?, activation)));
            let shape = product::Shape {
                layout: self.matrix.layout,
                second: second.map(|(matrix, ..)| matrix.layout),
                gelu: second.is_some_and(|(.., activation)| activation == Activation::GeluTanh),
                rows: part.rows,
                first: part.first,
                width,
                tile,
                units: columns,
                normed: self.norm.is_some(),
                biased: self.bias.is_some(),
                added: self.residual.is_some(),
            };
            let (across, deep) = shape.groups();
            // A buffer that is not read can be any.
            let floats = |tensor: Option<&CubeTensor>| tensor.unwrap_or(&x).clone().into_buffer_arg();
            // SAFETY: the kernel reads rows of `x`, elements of the norm's weight, the bias and the residual, and rows of the matrices, only
            // within the sizes of its shape, which are those of the buffers (whoever loads a decoder checks that they fit each other), and
            // writes elements of rows and columns that there are.
            unsafe {
                product::product::launch_unchecked(
                    &x.client,
                    count(across, tokens.div_ceil(tile), deep),
                    units(columns),
                    x.clone().into_buffer_arg(),
                    floats(self.norm.map(|norm| &norm.weight)),
                    part.words.clone().into_buffer_arg(),
                    second.map_or(&part.words, |(_, part, _)| &part.words).clone().into_buffer_arg(),
                    floats(self.bias),
                    floats(self.residual),
                    out.clone().into_buffer_arg(),
                    tokens as u32,
                    self.norm.map_or(0.0, |norm| norm.epsilon),
                    shape,
                );
            }
        }
        out
    }
}

/// `residual` plus the rows of `x`, normalised.
fn add_normed(x: &CubeTensor, norm: &Norm<Wgpu>, residual: &CubeTensor) -> CubeTensor {
    let (rows, columns) = (x.shape()[0], x.shape()[1]);
    let out = empty(x, rows, columns);
    // SAFETY: a cube reads and writes the elements of one row, and there are as many cubes as rows.
    unsafe {
        rows::add_normed::launch_unchecked(
            &x.client,
            count(rows, 1, 1),
            units(rows::UNITS),
            x.clone().into_buffer_arg(),
            norm.weight.clone().into_buffer_arg(),
            residual.clone().into_buffer_arg(),
            out.clone().into_buffer_arg(),
            norm.epsilon,
            columns,
        );
    }
    out
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
    fn matrix(device: &Device, view: &TensorView<'_>) -> Result<Matrix<Self>, LayerError> {
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

    fn project(_work: &mut Workspace, x: &CubeTensor, norm: &Norm<Self>, linears: [&Linear<Self>; 3]) -> [CubeTensor; 3] {
        let [Some(queries), Some(keys), Some(values)] = linears.map(|linear| linear.matrix.on_device()) else {
            return plain::project::<Self>(x, norm, linears);
        };
        let matrices = [queries, keys, values];
        [0, 1, 2].map(|i| {
            let bias = linears[i].bias.as_ref();
            Product { x, norm: Some(norm), matrix: matrices[i], gated: None, bias, residual: None }.run()
        })
    }

    fn attend(
        work: &mut Workspace,
        [queries, keys, values]: [&CubeTensor; 3],
        shape: &AttentionShape,
        norms: [Option<&Norm<Self>>; 2],
        rotation: &Rotation,
        batch: &Batch,
        kv: &mut KvLayer<Self>,
    ) -> CubeTensor {
        let HeldKv::Device(pages) = &kv.0 else {
            return plain::attend::<Self>([queries, keys, values], shape, norms, rotation, batch, kv);
        };
        let [queries, keys, values] = [queries, keys, values].map(|x| into_contiguous(x.clone()));
        let (client, device) = (&queries.client, &queries.device);
        let rows = batch.positions().len();
        let table = work.steps.rows(device, batch);
        let angles = work.steps.angles(device, rotation);
        let sizes = |norm| attention::Shape {
            head: head(&pages.shape, rotation, norm),
            value_length: pages.shape.value_length,
            heads: shape.heads,
            kv_heads: pages.shape.kv_heads,
        };
        let [query_gain, key_gain] = norms.map(|norm| norm.map_or(&angles, |norm| &norm.weight).clone());
        let [query_epsilon, key_epsilon] = norms.map(|norm| norm.map_or(0.0, |norm| norm.epsilon));
        // SAFETY: a cube reads one head of one row of keys and values, that row's angles and place, and writes the words of that place, which
        // is in a page that the batch was promised to exist.
        unsafe {
            attention::store::launch_unchecked(
                client,
                count(rows, pages.shape.kv_heads, 1),
                units(attention::UNITS),
                keys.into_buffer_arg(),
                values.into_buffer_arg(),
                key_gain.into_buffer_arg(),
                angles.clone().into_buffer_arg(),
                table.clone().into_buffer_arg(),
                pages.keys.clone().into_buffer_arg(),
                pages.values.clone().into_buffer_arg(),
                key_epsilon,
                sizes(norms[1]),
            );
        }
        let out = empty(&queries, rows, shape.heads * pages.shape.value_length);
        // SAFETY: a cube reads one head of one row of queries, and of the cache the positions up to the row's in pages that the batch was
        // promised to exist; it writes that head's part of the output.
        unsafe {
            attention::attend::launch_unchecked(
                client,
                count(rows, shape.heads, 1),
                units(attention::UNITS),
                queries.clone().into_buffer_arg(),
                query_gain.into_buffer_arg(),
                angles.into_buffer_arg(),
                pages.keys.clone().into_buffer_arg(),
                pages.values.clone().into_buffer_arg(),
                table.into_buffer_arg(),
                out.clone().into_buffer_arg(),
                query_epsilon,
                shape.scale,
                shape.window.map_or(u32::MAX, |window| u32::try_from(window).unwrap_or(u32::MAX)),
                sizes(norms[0]),
            );
        }
        out
    }

    fn project_add(
        _work: &mut Workspace,
        input: &CubeTensor,
        linear: &Linear<Self>,
        post: Option<&Norm<Self>>,
        residual: CubeTensor,
    ) -> CubeTensor {
        let Some(matrix) = linear.matrix.on_device() else { return plain::project_add::<Self>(input, linear, post, residual) };
        let residual = into_contiguous(residual);
        let product = |residual| Product { x: input, norm: None, matrix, gated: None, bias: linear.bias.as_ref(), residual }.run();
        match post {
            None => product(Some(&residual)),
            Some(norm) => add_normed(&product(None), norm, &residual),
        }
    }

    fn gated(_work: &mut Workspace, x: &CubeTensor, norm: &Norm<Self>, gate: &Gate<Self>) -> CubeTensor {
        let (Some(matrix), Some(up)) = (gate.gate.on_device(), gate.up.on_device()) else {
            return plain::gated::<Self>(x, norm, gate);
        };
        let norm = Some(norm);
        if matrix.parts.iter().map(|part| part.rows).eq(up.parts.iter().map(|part| part.rows)) {
            return Product { x, norm, matrix, gated: Some((up, gate.activation)), bias: None, residual: None }.run();
        }
        let [open, up] = [matrix, up].map(|matrix| Product { x, norm, matrix, gated: None, bias: None, residual: None }.run());
        plain::open::<Self>(open, up, gate.activation)
    }

    fn logits(
        _work: &mut Workspace,
        x: &CubeTensor,
        sampled: &[usize],
        norm: &Norm<Self>,
        head: &Matrix<Self>,
        softcap: Option<f32>,
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        let Some(matrix) = head.on_device() else { return plain::logits::<Self>(x, sampled, norm, head, softcap, out) };
        if sampled.is_empty() {
            return Ok(());
        }
        let x = into_contiguous(x.clone());
        let (rows, columns) = (x.shape()[0], x.shape()[1]);
        let all = sampled.len() == rows;
        let x = if all { x } else { pick(&x, sampled, columns) };
        let logits = Product { x: &x, norm: Some(norm), matrix, gated: None, bias: None, residual: None }.run();
        if let Some(cap) = softcap {
            // SAFETY: a unit reads and writes an element of a row and a column that there are.
            unsafe {
                rows::soften::launch_unchecked(
                    &logits.client,
                    count(matrix.rows.div_ceil(rows::UNITS), sampled.len(), 1),
                    units(rows::UNITS),
                    logits.clone().into_buffer_arg(),
                    cap,
                    matrix.rows as u32,
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
