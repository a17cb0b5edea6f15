//! Kernels of the CPU backend (burn-flex): packed quantised weights, integer dot products, paged attention.
#![allow(clippy::needless_range_loop, reason = "registers and tiles are fixed arrays, several of which go by one index")]

mod activations;
mod attention;
mod math;
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

use super::{AttentionShape, Batch, Gate, Kernels, KvLayer, KvShape, LayerError, Linear, Matrix, Norm, Rotation};
use crate::device::DeviceError;
use crate::gguf::TensorView;
use attention::Attention;
use math::rms_norm;
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
    weight: Cow<'a, [f32]>,
    epsilon: f32,
}

impl<'a> Normed<'a> {
    fn new(norm: &'a Norm<Flex>) -> Self {
        Self { weight: elements(&norm.weight), epsilon: norm.epsilon }
    }

    fn parts(&self) -> (&[f32], f32) {
        (&self.weight, self.epsilon)
    }
}

impl Kernels for Flex {
    fn matrix(_device: &FlexDevice, view: &TensorView<'_>) -> Result<Matrix<Self>, LayerError> {
        let packed = PackedMatrix::pack(view.block, view.rows(), view.row_len(), view.bytes);
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

    fn project(work: &mut Workspace, x: &FlexTensor, norm: &Norm<Self>, linears: [&Linear<Self>; 3]) -> [FlexTensor; 3] {
        let [Some(queries), Some(keys), Some(values)] = linears.map(|linear| linear.matrix.as_packed()) else {
            return super::plain::project::<Self>(x, norm, linears);
        };
        let matrices = [queries, keys, values];
        let (x, norm) = (elements(x), Normed::new(norm));
        work.prepare(&x, Some(norm.parts()), &matrices);
        let rows = x.len() / queries.columns();
        let mut outs = matrices.map(|matrix| vec![0.0; rows * matrix.rows()]);
        let biases = linears.map(bias);
        let [q, k, v] = outs.each_mut().map(|out| Parts::new(out));
        let [q_bias, k_bias, v_bias] = biases.each_ref().map(Option::as_deref);
        let products = [
            Product { matrix: queries, bias: q_bias, finish: Finish::Set, out: q },
            Product { matrix: keys, bias: k_bias, finish: Finish::Set, out: k },
            Product { matrix: values, bias: v_bias, finish: Finish::Set, out: v },
        ];
        multiply(&mut work.pool, work.isa, &work.prepared, &products);
        let [q, k, v] = outs;
        [tensor(q, queries.rows()), tensor(k, keys.rows()), tensor(v, values.rows())]
    }

    fn attend(
        work: &mut Workspace,
        [queries, keys, values]: [&FlexTensor; 3],
        shape: &AttentionShape,
        norms: [Option<&Norm<Self>>; 2],
        rotation: &Rotation,
        batch: &Batch,
        kv: &mut KvLayer<Self>,
    ) -> FlexTensor {
        let Some(pages) = kv.as_paged() else {
            return super::plain::attend::<Self>([queries, keys, values], shape, norms, rotation, batch, kv);
        };
        let norms = norms.map(|norm| norm.map(Normed::new));
        let width = shape.heads * pages.shape().value_length;
        let mut out = vec![0.0; batch.positions().len() * width];
        let attention = Attention {
            shape,
            query_norm: norms[0].as_ref().map(Normed::parts),
            key_norm: norms[1].as_ref().map(Normed::parts),
            rotation,
            batch,
            queries: &elements(queries),
            keys: &elements(keys),
            values: &elements(values),
        };
        attention.run(&mut work.pool, work.isa, &mut work.scratch, pages, &mut out);
        tensor(out, width)
    }

    fn project_add(
        work: &mut Workspace,
        input: &FlexTensor,
        linear: &Linear<Self>,
        post: Option<&Norm<Self>>,
        residual: FlexTensor,
    ) -> FlexTensor {
        let Some(matrix) = linear.matrix.as_packed() else {
            return super::plain::project_add::<Self>(input, linear, post, residual);
        };
        work.prepare(&elements(input), None, &[matrix]);
        let bias = bias(linear);
        let mut residual = if residual.as_slice::<f32>().is_some_and(|all| all.len() == residual.storage::<f32>().len()) {
            residual
        } else {
            residual.to_contiguous()
        };
        let to = residual.storage_mut::<f32>();
        match post {
            None => {
                let product = Product { matrix, bias: bias.as_deref(), finish: Finish::Add, out: Parts::new(to) };
                multiply(&mut work.pool, work.isa, &work.prepared, &[product]);
            }
            Some(norm) => {
                let mut out = vec![0.0; to.len()];
                let product = Product { matrix, bias: bias.as_deref(), finish: Finish::Set, out: Parts::new(&mut out) };
                multiply(&mut work.pool, work.isa, &work.prepared, &[product]);
                let (norm, columns, isa) = (Normed::new(norm), matrix.rows(), work.isa);
                let to = Parts::new(to);
                let rows = out.len() / columns;
                each_share(&mut work.pool, rows, rows > 8, |mine| {
                    let range = mine.start * columns..mine.end * columns;
                    // SAFETY: shares of rows are disjoint.
                    isa.run(AddNormed { rows: &out[range.clone()], columns, norm: norm.parts(), to: unsafe { to.part(range) } });
                });
            }
        }
        residual
    }

    fn gated(work: &mut Workspace, x: &FlexTensor, norm: &Norm<Self>, gate: &Gate<Self>) -> FlexTensor {
        let (Some(matrix), Some(up)) = (gate.gate.as_packed(), gate.up.as_packed()) else {
            return super::plain::gated::<Self>(x, norm, gate);
        };
        let (x, norm) = (elements(x), Normed::new(norm));
        work.prepare(&x, Some(norm.parts()), &[matrix, up]);
        let mut out = vec![0.0; x.len() / matrix.columns() * matrix.rows()];
        let product = Product { matrix, bias: None, finish: Finish::Gate(gate.activation, up), out: Parts::new(&mut out) };
        multiply(&mut work.pool, work.isa, &work.prepared, &[product]);
        tensor(out, matrix.rows())
    }

    fn logits(
        work: &mut Workspace,
        x: &FlexTensor,
        sampled: &[usize],
        norm: &Norm<Self>,
        head: &Matrix<Self>,
        softcap: Option<f32>,
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        let Some(matrix) = head.as_packed() else { return super::plain::logits::<Self>(x, sampled, norm, head, softcap, out) };
        let (x, norm) = (elements(x), Normed::new(norm));
        let columns = matrix.columns();
        let rows: Vec<f32> = sampled.iter().flat_map(|&row| &x[row * columns..(row + 1) * columns]).copied().collect();
        work.prepare(&rows, Some(norm.parts()), &[matrix]);
        let product = Product { matrix, bias: None, finish: Finish::Set, out: Parts::new(out) };
        multiply(&mut work.pool, work.isa, &work.prepared, &[product]);
        if let Some(cap) = softcap {
            let isa = work.isa;
            let len = out.len();
            let parts = Parts::new(out);
            each_share(&mut work.pool, len, true, |mine| {
                // SAFETY: shares are disjoint.
                isa.run(Softcap { values: unsafe { parts.part(mine) }, cap });
            });
        }
        Ok(())
    }

    fn read(x: FlexTensor, out: &mut [f32]) -> Result<(), DeviceError> {
        out.copy_from_slice(&elements(&x));
        Ok(())
    }
}

/// `to += norm(row) · weight` for each row.
struct AddNormed<'a> {
    rows: &'a [f32],
    columns: usize,
    norm: (&'a [f32], f32),
    to: &'a mut [f32],
}

impl Op for AddNormed<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        let mut normed = vec![0.0; self.columns];
        for (row, to) in self.rows.chunks_exact(self.columns).zip(self.to.chunks_exact_mut(self.columns)) {
            rms_norm(s, row, self.norm.0, self.norm.1, &mut normed);
            for (to, value) in to.iter_mut().zip(&normed) {
                *to += value;
            }
        }
    }
}

/// `cap · tanh(value / cap)`.
struct Softcap<'a> {
    values: &'a mut [f32],
    cap: f32,
}

impl Op for Softcap<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        let (chunks, rest) = self.values.as_chunks_mut::<LANES>();
        let capped = |v: S::F| {
            // tanh y = 1 − 2 / (1 + e²ʸ)
            let e = math::exp(s, s.mul(v, s.splat(2.0 / self.cap)));
            let tanh = s.sub(s.splat(1.0), s.div(s.splat(2.0), s.add(s.splat(1.0), e)));
            s.mul(tanh, s.splat(self.cap))
        };
        for chunk in chunks {
            let v = s.load(chunk);
            s.store(capped(v), chunk);
        }
        let mut last = [0.0; LANES];
        s.store(capped(s.load(&math::padded(rest))), &mut last);
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

#[cfg(test)]
mod tests;
