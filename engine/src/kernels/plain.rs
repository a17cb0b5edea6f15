//! The steps of a layer in plain Burn operations, with weights as `f32`: slow, short, and the measure of the others.

use burn::backend::Backend;
use burn::backend::tensor::{Device, FloatTensor, IntTensor};
use burn::backend::{Scalar, TensorMetadata};
use burn::tensor::{FloatDType, Shape, Slice, TensorData};

use super::{AttentionShape, Batch, Gate, Held, HeldKv, KvLayer, KvShape, LayerError, Linear, Matrix, Norm, PAGE_TOKENS, Rotation, Run};
use crate::config::{Activation, RopeLayout};
use crate::device::DeviceError;
use crate::gguf::TensorView;

fn tensor<B: Backend>(device: &Device<B>, values: Vec<f32>, shape: &[usize]) -> FloatTensor<B> {
    B::float_from_data(TensorData::new(values, Shape::from(shape.to_vec())), device)
}

fn indices<B: Backend>(device: &Device<B>, values: impl Iterator<Item = usize>) -> IntTensor<B> {
    let values: Vec<i32> = values.map(|value| value as i32).collect();
    let count = values.len();
    B::int_from_data(TensorData::new(values, [count]), device)
}

fn reshape<B: Backend>(x: FloatTensor<B>, shape: &[usize]) -> FloatTensor<B> {
    B::float_reshape(x, Shape::from(shape.to_vec()))
}

fn scalar(value: f32) -> Scalar {
    Scalar::from(value)
}

/// Part `range` of the last of `ranks` dimensions.
fn last<B: Backend>(x: FloatTensor<B>, ranks: usize, range: std::ops::Range<usize>) -> FloatTensor<B> {
    let mut slices = vec![Slice::full(); ranks - 1];
    slices.push(Slice::from(range));
    B::float_slice(x, &slices)
}

/// The matrix as a tensor of shape `[rows, columns]`.
fn dense<B: Backend>(device: &Device<B>, matrix: &Matrix<B>) -> FloatTensor<B> {
    match &matrix.0 {
        Held::Plain { tensor, .. } => tensor.clone(),
        Held::Packed(packed) => {
            let (rows, columns) = (packed.rows(), packed.columns());
            let mut values = vec![0.0; rows * columns];
            for (row, values) in values.chunks_exact_mut(columns).enumerate() {
                packed.row(row, values);
            }
            tensor::<B>(device, values, &[rows, columns])
        }
        #[cfg(gpu)]
        Held::Device(matrix) => tensor::<B>(device, matrix.values(), &[matrix.rows(), matrix.columns()]),
    }
}

pub(super) fn matrix<B: Backend>(device: &Device<B>, view: &TensorView<'_>) -> Result<Matrix<B>, LayerError> {
    let values = view.dequantise().map_err(|error| LayerError { tensor: view.name.to_owned(), problem: error.to_string() })?;
    let bytes = size_of_val(values.as_slice()) as u64;
    Ok(Matrix(Held::Plain { tensor: tensor::<B>(device, values, &[view.rows(), view.row_len()]), bytes }))
}

pub(super) fn kv_layer<B: Backend>(device: &Device<B>, shape: KvShape) -> KvLayer<B> {
    let zeros = |length: usize| B::float_zeros(Shape::new([shape.pages * PAGE_TOKENS, shape.kv_heads * length]), device, FloatDType::F32);
    KvLayer(HeldKv::Plain { shape, keys: zeros(shape.key_length), values: zeros(shape.value_length) })
}

pub(super) fn embed<B: Backend>(device: &Device<B>, table: &Matrix<B>, tokens: &[u32], scale: f32) -> FloatTensor<B> {
    let rows = B::float_select(dense(device, table), 0, indices::<B>(device, tokens.iter().map(|&token| token as usize)));
    B::float_mul_scalar(rows, scalar(scale))
}

/// Normalises along the last of `ranks` dimensions.
fn norm<B: Backend>(x: FloatTensor<B>, ranks: usize, norm: &Norm<B>) -> FloatTensor<B> {
    let squares = B::float_mul(x.clone(), x.clone());
    let mean = B::float_mean_dim(squares, ranks - 1);
    let factor = B::float_recip(B::float_sqrt(B::float_add_scalar(mean, scalar(norm.epsilon))));
    let mut shape = vec![1; ranks];
    shape[ranks - 1] = norm.weight.shape().num_elements();
    B::float_mul(B::float_mul(x, factor), reshape::<B>(norm.weight.clone(), &shape))
}

fn multiply<B: Backend>(x: FloatTensor<B>, matrix: &Matrix<B>) -> FloatTensor<B> {
    let weights = dense(&x.device(), matrix);
    B::float_matmul(x, B::float_transpose(weights))
}

fn linear<B: Backend>(x: FloatTensor<B>, linear: &Linear<B>) -> FloatTensor<B> {
    let product = multiply(x, &linear.matrix);
    match &linear.bias {
        Some(bias) => B::float_add(product, reshape::<B>(bias.clone(), &[1, bias.shape().num_elements()])),
        None => product,
    }
}

pub(super) fn project<B: Backend>(x: &FloatTensor<B>, before: &Norm<B>, linears: [&Linear<B>; 3]) -> [FloatTensor<B>; 3] {
    let x = norm(x.clone(), 2, before);
    linears.map(|one| linear(x.clone(), one))
}

pub(super) fn project_add<B: Backend>(
    input: &FloatTensor<B>,
    one: &Linear<B>,
    post: Option<&Norm<B>>,
    residual: FloatTensor<B>,
) -> FloatTensor<B> {
    let mut product = linear(input.clone(), one);
    if let Some(post) = post {
        product = norm(product, 2, post);
    }
    B::float_add(residual, product)
}

pub(super) fn gated<B: Backend>(x: &FloatTensor<B>, before: &Norm<B>, gate: &Gate<B>) -> FloatTensor<B> {
    let x = norm(x.clone(), 2, before);
    open::<B>(multiply(x.clone(), &gate.gate), multiply(x, &gate.up), gate.activation)
}

/// `up` through a gate.
pub(super) fn open<B: Backend>(gate: FloatTensor<B>, up: FloatTensor<B>, activation: Activation) -> FloatTensor<B> {
    let open = match activation {
        Activation::Silu => B::float_mul(gate.clone(), B::sigmoid(gate)),
        Activation::GeluTanh => {
            let cube = B::float_mul(B::float_mul(gate.clone(), gate.clone()), gate.clone());
            let inner = B::float_add(gate.clone(), B::float_mul_scalar(cube, scalar(0.044_715)));
            let tanh = B::float_tanh(B::float_mul_scalar(inner, scalar(0.797_884_6)));
            B::float_mul(B::float_mul_scalar(gate, scalar(0.5)), B::float_add_scalar(tanh, scalar(1.0)))
        }
    };
    B::float_mul(open, up)
}

/// Turns heads: `x` is `[rows, heads, length]`.
fn rotate<B: Backend>(x: FloatTensor<B>, rotation: &Rotation) -> FloatTensor<B> {
    let device = x.device();
    let shape = x.shape();
    let (rows, heads, length) = (shape[0], shape[1], shape[2]);
    let (pairs, (cos, sin)) = (rotation.pairs(), rotation.all());
    let angles = |values: &[f32]| tensor::<B>(&device, values.to_vec(), &[rows, 1, pairs, 1]);
    let (cos, sin) = (angles(cos), angles(sin));
    let turned = last::<B>(x.clone(), 3, 0..2 * pairs);
    // `[rows, heads, pairs, 2]`, whichever elements are pairs.
    let turned = match rotation.layout() {
        RopeLayout::Interleaved => reshape::<B>(turned, &[rows, heads, pairs, 2]),
        RopeLayout::Halves => B::float_swap_dims(reshape::<B>(turned, &[rows, heads, 2, pairs]), 2, 3),
    };
    let (a, b) = (last::<B>(turned.clone(), 4, 0..1), last::<B>(turned, 4, 1..2));
    let first = B::float_sub(B::float_mul(a.clone(), cos.clone()), B::float_mul(b.clone(), sin.clone()));
    let second = B::float_add(B::float_mul(a, sin), B::float_mul(b, cos));
    let turned = B::float_cat(vec![first, second], 3);
    let turned = match rotation.layout() {
        RopeLayout::Interleaved => turned,
        RopeLayout::Halves => B::float_swap_dims(turned, 2, 3),
    };
    let turned = reshape::<B>(turned, &[rows, heads, 2 * pairs]);
    if 2 * pairs == length { turned } else { B::float_cat(vec![turned, last::<B>(x, 3, 2 * pairs..length)], 2) }
}

/// To half precision and back.
fn halved<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    B::float_cast(B::float_cast(x, FloatDType::F16), FloatDType::F32)
}

/// Where positions `0..end` of a run are in a plain cache.
fn slots(run: &Run, end: usize) -> impl Iterator<Item = usize> + '_ {
    (0..end).map(|position| run.page(position) as usize * PAGE_TOKENS + position % PAGE_TOKENS)
}

pub(super) fn attend<B: Backend>(
    [queries, keys, values]: [&FloatTensor<B>; 3],
    shape: &AttentionShape,
    [query_norm, key_norm]: [Option<&Norm<B>>; 2],
    rotation: &Rotation,
    batch: &Batch,
    kv: &mut KvLayer<B>,
) -> FloatTensor<B> {
    let device = queries.device();
    let rows = batch.positions().len();
    let HeldKv::Plain { shape: sizes, keys: key_cache, values: value_cache } = &mut kv.0 else {
        // A cache in the CPU kernels' pages belongs to the CPU backend, which does not come here with it.
        return B::float_zeros(queries.shape(), &device, FloatDType::F32);
    };
    let (heads, kv_heads, key_length, value_length) = (shape.heads, sizes.kv_heads, sizes.key_length, sizes.value_length);
    let share = heads / kv_heads;
    let place = |x: &FloatTensor<B>, heads: usize, before: Option<&Norm<B>>| {
        let mut x = reshape::<B>(x.clone(), &[rows, heads, key_length]);
        if let Some(before) = before {
            x = norm(x, 3, before);
        }
        rotate::<B>(x, rotation)
    };
    let queries = place(queries, heads, query_norm);
    let keys = halved::<B>(reshape::<B>(place(keys, kv_heads, key_norm), &[rows, kv_heads * key_length]));
    let values = halved::<B>(values.clone());

    let mut outputs = Vec::new();
    let mut order = vec![0; rows];
    let mut done = 0;
    for run in batch.runs() {
        for (i, &row) in run.rows().iter().enumerate() {
            order[row] = done + i;
        }
        done += run.rows().len();
        let count = run.rows().len();
        let mine = indices::<B>(&device, run.rows().iter().copied());
        let to: Vec<usize> = slots(run, run.end()).skip(run.start()).collect();
        for (cache, new) in [(&mut *key_cache, &keys), (&mut *value_cache, &values)] {
            let new = B::float_select(new.clone(), 0, mine.clone());
            for (i, &slot) in to.iter().enumerate() {
                let row = B::float_slice(new.clone(), &[Slice::from(i..i + 1), Slice::full()]);
                *cache = B::float_slice_assign(cache.clone(), &[Slice::from(slot..slot + 1), Slice::full()], row);
            }
        }
        let end = run.end();
        let seen = |cache: &FloatTensor<B>, length: usize| {
            let seen = B::float_select(cache.clone(), 0, indices::<B>(&device, slots(run, end)));
            reshape::<B>(seen, &[end, kv_heads, length])
        };
        let keys = B::float_permute(seen(key_cache, key_length), &[1, 2, 0]);
        let values = B::float_permute(seen(value_cache, value_length), &[1, 0, 2]);
        // Heads that share keys stand together: `[kv_heads, share · count, …]`.
        let queries = B::float_select(queries.clone(), 0, mine);
        let queries = B::float_permute(reshape::<B>(queries, &[count, kv_heads, share, key_length]), &[1, 2, 0, 3]);
        let queries = reshape::<B>(queries, &[kv_heads, share * count, key_length]);
        let scores = B::float_mul_scalar(B::float_matmul(queries, keys), scalar(shape.scale));
        let mask = (0..share).flat_map(|_| 0..count).flat_map(|row| {
            let now = run.start() + row;
            let first = shape.window.map_or(0, |window| (now + 1).saturating_sub(window));
            (0..end).map(move |position| if (first..=now).contains(&position) { 0.0 } else { -1e30 })
        });
        let mask = tensor::<B>(&device, mask.collect(), &[1, share * count, end]);
        let weights = B::softmax(B::float_add(scores, mask), 2);
        let out = reshape::<B>(B::float_matmul(weights, values), &[kv_heads, share, count, value_length]);
        outputs.push(reshape::<B>(B::float_permute(out, &[2, 0, 1, 3]), &[count, heads * value_length]));
    }
    B::float_select(B::float_cat(outputs, 0), 0, indices::<B>(&device, order.into_iter()))
}

pub(super) fn logits<B: Backend>(
    x: &FloatTensor<B>,
    sampled: &[usize],
    before: &Norm<B>,
    head: &Matrix<B>,
    softcap: Option<f32>,
    out: &mut [f32],
) -> Result<(), DeviceError> {
    if sampled.is_empty() {
        return Ok(());
    }
    let rows = B::float_select(x.clone(), 0, indices::<B>(&x.device(), sampled.iter().copied()));
    let mut logits = multiply(norm(rows, 2, before), head);
    if let Some(cap) = softcap {
        logits = B::float_mul_scalar(B::float_tanh(B::float_div_scalar(logits, scalar(cap))), scalar(cap));
    }
    read::<B>(logits, out)
}

/// Writes a tensor's elements.
pub(super) fn read<B: Backend>(x: FloatTensor<B>, out: &mut [f32]) -> Result<(), DeviceError> {
    let failed = |reason: String| DeviceError::Failed { reason };
    let data = burn::tensor::read_sync(B::float_into_data(x)).map_err(|error| failed(error.to_string()))?;
    let values = data.as_slice::<f32>().map_err(|error| failed(format!("{error:?}")))?;
    if values.len() != out.len() {
        return Err(failed(format!("it gave {} numbers in place of {}", values.len(), out.len())));
    }
    out.copy_from_slice(values);
    Ok(())
}
