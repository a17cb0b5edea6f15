//! Kernels of the CPU backend (burn-flex): packed quantised weights, integer dot products, paged attention.
#![allow(clippy::needless_range_loop, reason = "registers and tiles are fixed arrays, several of which go by one index")]

mod activations;
mod attention;
mod buffers;
mod experts;
mod latent;
mod math;
mod memory;
mod multiply;
mod packed;
mod pages;
mod pool;
mod simd;
mod speed;
mod workspace;

pub(crate) use packed::PackedMatrix;
pub(crate) use pages::Pages;
#[cfg(test)]
pub(crate) use simd::Isa;
pub use speed::{Speed, measure};
pub use workspace::Workspace;

use burn::tensor::TensorData;
use burn_flex::{Flex, FlexDevice, FlexTensor};
use std::borrow::Cow;

use super::{
    AttentionShape, Batch, Experts, Gate, HeadWeights, Kernels, KvLayer, KvShape, Latent, LayerError, Linear, LogitsFinish, Matrix, Norm,
    Residual, Rotation,
};
use crate::config::{Activation, NormKind};
use crate::device::DeviceError;
use crate::gguf::TensorView;
use attention::Attention;
use math::{RowNorm, normalise};
use multiply::{Finish, Product, each_share, multiply};
use pool::Parts;
use simd::{LANES, Op, Simd};

/// A contiguous tensor's elements; others are copied.
fn elements(tensor: &FlexTensor) -> Cow<'_, [f32]> {
    match tensor.as_slice() {
        Some(slice) => Cow::Borrowed(slice),
        None => Cow::Owned(tensor.to_contiguous().as_slice().map(<[f32]>::to_vec).unwrap_or_default()),
    }
}

fn tensor(elements: Vec<f32>, columns: usize) -> FlexTensor {
    let rows = elements.len() / columns;
    FlexTensor::from_data(TensorData::new(elements, [rows, columns]))
}

/// Bias vectors and norms are borrowed for the duration of one step of a layer.
fn bias(linear: &Linear<Flex>) -> Option<Cow<'_, [f32]>> {
    linear.bias.as_ref().map(elements)
}

struct Normed<'a> {
    kind: NormKind,
    weight: Cow<'a, [f32]>,
    bias: Option<Cow<'a, [f32]>>,
    epsilon: f32,
}

impl<'a> Normed<'a> {
    fn new(norm: &'a Norm<Flex>) -> Self {
        Self { kind: norm.kind, weight: elements(&norm.weight), bias: norm.bias.as_ref().map(elements), epsilon: norm.epsilon }
    }

    fn row(&self) -> RowNorm<'_> {
        RowNorm { kind: self.kind, weight: &self.weight, bias: self.bias.as_deref(), epsilon: self.epsilon }
    }
}

/// The matrices and biases of a gate.
struct OpenGate<'a> {
    gate: Option<(&'a PackedMatrix, Option<Cow<'a, [f32]>>)>,
    up: (&'a PackedMatrix, Option<Cow<'a, [f32]>>),
    activation: Activation,
}

impl<'a> OpenGate<'a> {
    /// A gate whose matrices are packed.
    fn new(gate: &'a Gate<Flex>) -> Option<Self> {
        let packed = |linear: &'a Linear<Flex>| Some((linear.matrix.as_packed()?, bias(linear)));
        let open = match &gate.gate {
            Some(linear) => Some(packed(linear)?),
            None => None,
        };
        Some(Self { gate: open, up: packed(&gate.up)?, activation: gate.activation })
    }

    /// The matrices, for [`Workspace::prepare`].
    fn matrices(&self) -> Vec<&'a PackedMatrix> {
        self.gate.iter().map(|(matrix, _)| *matrix).chain([self.up.0]).collect()
    }

    /// The product with prepared rows, of which `rows` are taken.
    fn product<'b>(&'b self, rows: Option<std::ops::Range<usize>>, out: Parts<'b, f32>) -> Product<'b> {
        let (up, up_bias) = (self.up.0, self.up.1.as_deref());
        match &self.gate {
            Some((gate, bias)) => {
                Product { matrix: gate, bias: bias.as_deref(), finish: Finish::Gate(self.activation, up, up_bias), rows, out }
            }
            None => Product { matrix: up, bias: up_bias, finish: Finish::Activate(self.activation), rows, out },
        }
    }
}

/// Rows as they are to be written to: alone in their memory, one after the other.
fn owned(rows: FlexTensor) -> FlexTensor {
    let alone = rows.as_slice::<f32>().is_some_and(|all| all.len() == rows.storage::<f32>().len());
    if alone { rows } else { rows.to_contiguous() }
}

/// Adds rows of `columns` elements to the residual's, normalised and scaled as it says.
fn add_rows(work: &mut Workspace, products: &[f32], columns: usize, residual: Residual<'_, Flex>) -> FlexTensor {
    let mut rows = owned(residual.rows);
    let norm = residual.norm.map(Normed::new);
    let (isa, scale, count) = (work.isa, residual.scale, products.len() / columns);
    let to = Parts::new(rows.storage_mut::<f32>());
    each_share(&mut work.pool, count, count > 8, |mine| {
        let range = mine.start * columns..mine.end * columns;
        // SAFETY: shares of rows are disjoint.
        let to = unsafe { to.part(range.clone()) };
        isa.run(AddRows { rows: &products[range], columns, norm: norm.as_ref().map(Normed::row), scale, to });
    });
    rows
}

impl Kernels for Flex {
    fn matrix(work: &mut Workspace, _device: &FlexDevice, view: &TensorView<'_>) -> Result<Matrix<Self>, LayerError> {
        let packed = PackedMatrix::pack(&mut work.memory, view.block, view.rows(), view.row_len(), view.bytes);
        packed.map(Matrix::packed).map_err(|error| LayerError { tensor: view.name.to_owned(), problem: error.to_string() })
    }

    fn kv_page_bytes(shape: &KvShape) -> u64 {
        Pages::page_bytes(shape)
    }

    fn kv_layer(_device: &FlexDevice, shape: KvShape) -> Result<KvLayer<Self>, LayerError> {
        let pages = Pages::new(shape);
        pages.map(KvLayer::paged).map_err(|error| LayerError { tensor: "keys and values".to_owned(), problem: error.to_string() })
    }

    fn embed(work: &mut Workspace, device: &FlexDevice, table: &Matrix<Self>, tokens: &[u32], scale: f32) -> FlexTensor {
        let Some(packed) = table.as_packed() else { return super::plain::embed::<Self>(device, table, tokens, scale) };
        let columns = packed.columns();
        let mut out = vec![0.0; tokens.len() * columns];
        let parts = Parts::new(&mut out);
        each_share(&mut work.pool, tokens.len(), tokens.len() > 8, |mine| {
            for row in mine {
                // SAFETY: each row is one thread's.
                let out = unsafe { parts.part(row * columns..(row + 1) * columns) };
                packed.row(tokens[row] as usize, out);
                if scale != 1.0 {
                    out.iter_mut().for_each(|value| *value *= scale);
                }
            }
        });
        tensor(out, columns)
    }

    fn project(work: &mut Workspace, x: &FlexTensor, norm: Option<&Norm<Self>>, linears: [&Linear<Self>; 3]) -> [FlexTensor; 3] {
        let [Some(queries), Some(keys), Some(values)] = linears.map(|linear| linear.matrix.as_packed()) else {
            return super::plain::project::<Self>(x, norm, linears);
        };
        let matrices = [queries, keys, values];
        let (x, norm) = (elements(x), norm.map(Normed::new));
        work.prepare(&x, norm.as_ref().map(Normed::row), &matrices);
        let rows = x.len() / queries.columns();
        let mut outs = matrices.map(|matrix| work.buffers.take(rows, matrix.rows()));
        let biases = linears.map(bias);
        let [q, k, v] = outs.each_mut().map(|out| Parts::new(out.storage_mut::<f32>()));
        let [q_bias, k_bias, v_bias] = biases.each_ref().map(Option::as_deref);
        let products = [(queries, q_bias, q), (keys, k_bias, k), (values, v_bias, v)].map(|(matrix, bias, out)| Product {
            matrix,
            bias,
            finish: Finish::Set,
            rows: None,
            out,
        });
        multiply(&mut work.pool, work.isa, &work.prepared, &products);
        outs.map(|out| work.buffers.give(out))
    }

    fn project_latent(work: &mut Workspace, x: &FlexTensor, norm: Option<&Norm<Self>>, latent: &Latent<Self>) -> [FlexTensor; 3] {
        match latent::PackedLatent::new(latent) {
            Some(packed) => packed.project(work, x, norm),
            None => super::plain::project_latent::<Self>(x, norm, latent),
        }
    }

    fn expand_latent(work: &mut Workspace, attended: &FlexTensor, latent: &Latent<Self>) -> FlexTensor {
        match latent::PackedLatent::new(latent) {
            Some(packed) => packed.expand(work, attended),
            None => super::plain::expand_latent::<Self>(attended, latent),
        }
    }

    fn attend(
        work: &mut Workspace,
        [queries, keys, values]: [&FlexTensor; 3],
        shape: &AttentionShape,
        weights: &HeadWeights<Self>,
        rotation: &Rotation,
        batch: &Batch,
        kv: &mut KvLayer<Self>,
    ) -> FlexTensor {
        let Some(pages) = kv.as_paged() else {
            return super::plain::attend::<Self>([queries, keys, values], shape, weights, rotation, batch, kv);
        };
        let key_length = pages.shape().key_length;
        let norms = [&weights.query_norm, &weights.key_norm].map(|norm| norm.as_ref().map(Normed::new));
        let (mut queries, mut keys) = (elements(queries), elements(keys));
        let [query_norm, key_norm] = norms.each_ref().map(|norm| norm.as_ref().map(Normed::row));
        let of_head = |norm: &RowNorm<'_>| norm.weight.len() == key_length;
        // Norms of whole rows are taken here, those of heads where the heads are.
        for (rows, norm) in [(&mut queries, query_norm), (&mut keys, key_norm)] {
            if let Some(norm) = norm.filter(|norm| !of_head(norm)) {
                *rows = Cow::Owned(work.normalised(rows, norm));
            }
        }
        let sinks = weights.sinks.as_ref().map(elements);
        let width = shape.heads * pages.shape().value_length;
        let mut out = work.buffers.take(batch.positions().len(), width);
        let attention = Attention {
            shape,
            sinks: sinks.as_deref(),
            query_norm: query_norm.filter(of_head),
            key_norm: key_norm.filter(of_head),
            rotation,
            batch,
            queries: &queries,
            keys: &keys,
            values: &elements(values),
        };
        attention.run(&mut work.pool, work.isa, &mut work.scratch, pages, out.storage_mut::<f32>());
        work.buffers.give(out)
    }

    fn project_add(work: &mut Workspace, input: &FlexTensor, linear: &Linear<Self>, residual: Residual<'_, Self>) -> FlexTensor {
        let Some(matrix) = linear.matrix.as_packed() else {
            return super::plain::project_add::<Self>(input, linear, residual);
        };
        work.prepare(&elements(input), None, &[matrix]);
        let bias = bias(linear);
        if residual.norm.is_none() {
            let mut rows = owned(residual.rows);
            let (finish, out) = (Finish::Add(residual.scale), Parts::new(rows.storage_mut::<f32>()));
            let product = Product { matrix, bias: bias.as_deref(), finish, rows: None, out };
            multiply(&mut work.pool, work.isa, &work.prepared, &[product]);
            return rows;
        }
        let mut out = work.buffers.take(elements(input).len() / matrix.columns(), matrix.rows());
        let to = Parts::new(out.storage_mut::<f32>());
        let product = Product { matrix, bias: bias.as_deref(), finish: Finish::Set, rows: None, out: to };
        multiply(&mut work.pool, work.isa, &work.prepared, &[product]);
        let out = work.buffers.give(out);
        add_rows(work, out.storage::<f32>(), matrix.rows(), residual)
    }

    fn gated(work: &mut Workspace, x: &FlexTensor, norm: Option<&Norm<Self>>, gate: &Gate<Self>) -> FlexTensor {
        let Some(open) = OpenGate::new(gate) else {
            return super::plain::gated::<Self>(x, norm, gate);
        };
        let (x, norm) = (elements(x), norm.map(Normed::new));
        work.prepare(&x, norm.as_ref().map(Normed::row), &open.matrices());
        let up = open.up.0;
        let mut out = work.buffers.take(x.len() / up.columns(), up.rows());
        let product = open.product(None, Parts::new(out.storage_mut::<f32>()));
        multiply(&mut work.pool, work.isa, &work.prepared, &[product]);
        work.buffers.give(out)
    }

    fn experts(
        work: &mut Workspace,
        x: &FlexTensor,
        norm: Option<&Norm<Self>>,
        experts: &Experts<Self>,
        residual: Residual<'_, Self>,
    ) -> FlexTensor {
        match experts::PackedExperts::new(experts) {
            Some(packed) => packed.run(work, x, norm, residual),
            None => super::plain::experts::<Self>(x, norm, experts, residual),
        }
    }

    fn logits(
        work: &mut Workspace,
        x: &FlexTensor,
        sampled: &[usize],
        norm: &Norm<Self>,
        head: &Matrix<Self>,
        finish: &LogitsFinish,
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        let Some(matrix) = head.as_packed() else { return super::plain::logits::<Self>(x, sampled, norm, head, finish, out) };
        let (x, norm) = (elements(x), Normed::new(norm));
        let columns = matrix.columns();
        let rows: Vec<f32> = sampled.iter().flat_map(|&row| &x[row * columns..(row + 1) * columns]).copied().collect();
        work.prepare(&rows, Some(norm.row()), &[matrix]);
        let product = Product { matrix, bias: None, finish: Finish::Set, rows: None, out: Parts::new(out) };
        multiply(&mut work.pool, work.isa, &work.prepared, &[product]);
        if finish.scale != 1.0 || finish.softcap.is_some() {
            let isa = work.isa;
            let len = out.len();
            let parts = Parts::new(out);
            each_share(&mut work.pool, len, true, |mine| {
                // SAFETY: shares are disjoint.
                isa.run(FinishLogits { values: unsafe { parts.part(mine) }, finish });
            });
        }
        Ok(())
    }

    fn read(x: FlexTensor, out: &mut [f32]) -> Result<(), DeviceError> {
        out.copy_from_slice(&elements(&x));
        Ok(())
    }
}

/// `to += scale · norm(row)` for each row.
struct AddRows<'a> {
    rows: &'a [f32],
    columns: usize,
    norm: Option<RowNorm<'a>>,
    scale: f32,
    to: &'a mut [f32],
}

impl Op for AddRows<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        let mut normed = vec![0.0; self.columns];
        for (row, to) in self.rows.chunks_exact(self.columns).zip(self.to.chunks_exact_mut(self.columns)) {
            match self.norm {
                Some(norm) => normalise(s, row, norm, &mut normed),
                None => normed.copy_from_slice(row),
            }
            for (to, value) in to.iter_mut().zip(&normed) {
                *to += value * self.scale;
            }
        }
    }
}

/// Scales and bounds logits.
struct FinishLogits<'a> {
    values: &'a mut [f32],
    finish: &'a LogitsFinish,
}

impl Op for FinishLogits<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        let (chunks, rest) = self.values.as_chunks_mut::<LANES>();
        let finished = |v: S::F| {
            let v = s.mul(v, s.splat(self.finish.scale));
            self.finish.softcap.map_or(v, |cap| math::softcap(s, v, cap))
        };
        for chunk in chunks {
            let v = s.load(chunk);
            s.store(finished(v), chunk);
        }
        let mut last = [0.0; LANES];
        s.store(finished(s.load(&math::padded(rest))), &mut last);
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

#[cfg(test)]
mod tests;
