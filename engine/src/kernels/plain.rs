//! The steps of a layer in plain Burn operations, with weights as `f32`: slow, short, and the measure of the others.

use burn::backend::Backend;
use burn::backend::tensor::{Device, FloatTensor, IntTensor};
use burn::backend::{Scalar, TensorMetadata};
use burn::tensor::{FloatDType, IndexingUpdateOp, Shape, Slice, TensorData};

use super::{
    AttentionShape, Batch, Experts, FeedForward, Gate, HeadWeights, Held, HeldKv, Kernels, KvLayer, KvShape, Latent, LayerError, Linear,
    LogitsFinish, Matrix, Norm, PAGE_TOKENS, Residual, Rotation, Run,
};
use crate::config::{Activation, NormKind, RopeLayout};
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
    let x = match norm.kind {
        NormKind::RootMeanSquare => x,
        NormKind::Layer => B::float_sub(x.clone(), B::float_mean_dim(x, ranks - 1)),
    };
    let squares = B::float_mul(x.clone(), x.clone());
    let mean = B::float_mean_dim(squares, ranks - 1);
    let factor = B::float_recip(B::float_sqrt(B::float_add_scalar(mean, scalar(norm.epsilon))));
    let mut shape = vec![1; ranks];
    shape[ranks - 1] = norm.weight.shape().num_elements();
    let normed = B::float_mul(B::float_mul(x, factor), reshape::<B>(norm.weight.clone(), &shape));
    match &norm.bias {
        Some(bias) => B::float_add(normed, reshape::<B>(bias.clone(), &shape)),
        None => normed,
    }
}

/// Rows, normalised if there is a norm.
fn normed<B: Backend>(x: &FloatTensor<B>, before: Option<&Norm<B>>) -> FloatTensor<B> {
    match before {
        Some(before) => norm(x.clone(), 2, before),
        None => x.clone(),
    }
}

pub(super) fn multiply<B: Backend>(x: FloatTensor<B>, matrix: &Matrix<B>) -> FloatTensor<B> {
    let weights = dense(&x.device(), matrix);
    B::float_matmul(x, B::float_transpose(weights))
}

fn linear<B: Kernels>(x: FloatTensor<B>, linear: &Linear<B>) -> FloatTensor<B> {
    let product = B::multiply(x, &linear.matrix);
    match &linear.bias {
        Some(bias) => B::float_add(product, reshape::<B>(bias.clone(), &[1, bias.shape().num_elements()])),
        None => product,
    }
}

pub(super) fn project<B: Kernels>(x: &FloatTensor<B>, before: Option<&Norm<B>>, linears: [&Linear<B>; 3]) -> [FloatTensor<B>; 3] {
    let x = normed(x, before);
    linears.map(|one| linear(x.clone(), one))
}

pub(super) fn project_latent<B: Kernels>(x: &FloatTensor<B>, before: Option<&Norm<B>>, latent: &Latent<B>) -> [FloatTensor<B>; 3] {
    let x = normed(x, before);
    let (fixed, turned, rank) = (latent.lengths.fixed, latent.lengths.turned, latent.lengths.rank);
    let short = match &latent.query_down {
        Some((down, after)) => norm(linear(x.clone(), down), 2, after),
        None => x.clone(),
    };
    let queries = linear(short, &latent.query);
    let each = fixed + turned;
    let heads = latent.query_ups.iter().enumerate().flat_map(|(head, up)| {
        let part = |range: std::ops::Range<usize>| last::<B>(queries.clone(), 2, head * each + range.start..head * each + range.end);
        [part(fixed..each), B::multiply(part(0..fixed), up)]
    });
    let queries = B::float_cat(heads.collect(), 1);
    let both = linear(x, &latent.down);
    let values = norm(last::<B>(both.clone(), 2, 0..rank), 2, &latent.down_norm);
    let keys = B::float_cat(vec![last::<B>(both, 2, rank..rank + turned), values.clone()], 1);
    [queries, keys, values]
}

pub(super) fn expand_latent<B: Kernels>(attended: &FloatTensor<B>, latent: &Latent<B>) -> FloatTensor<B> {
    let rank = latent.lengths.rank;
    let heads = latent.value_ups.iter().enumerate();
    B::float_cat(heads.map(|(head, up)| B::multiply(last::<B>(attended.clone(), 2, head * rank..(head + 1) * rank), up)).collect(), 1)
}

/// The residual's rows plus `product`.
fn add<B: Backend>(product: FloatTensor<B>, residual: Residual<'_, B>) -> FloatTensor<B> {
    let product = normed(&product, residual.norm);
    let product = if residual.scale == 1.0 { product } else { B::float_mul_scalar(product, scalar(residual.scale)) };
    B::float_add(residual.rows, product)
}

pub(super) fn project_add<B: Kernels>(input: &FloatTensor<B>, one: &Linear<B>, residual: Residual<'_, B>) -> FloatTensor<B> {
    add(linear(input.clone(), one), residual)
}

pub(super) fn gated<B: Kernels>(x: &FloatTensor<B>, before: Option<&Norm<B>>, gate: &Gate<B>) -> FloatTensor<B> {
    open(normed(x, before), gate)
}

/// The gated part of rows that are normalised.
fn open<B: Kernels>(x: FloatTensor<B>, gate: &Gate<B>) -> FloatTensor<B> {
    let up = linear(x.clone(), &gate.up);
    let (open, up) = match &gate.gate {
        Some(gate) => (linear(x, gate), Some(up)),
        None => (up, None),
    };
    let (open, up) = match gate.activation {
        Activation::Silu => (B::float_mul(open.clone(), B::sigmoid(open)), up),
        Activation::GeluTanh => {
            let cube = B::float_mul(B::float_mul(open.clone(), open.clone()), open.clone());
            let inner = B::float_add(open.clone(), B::float_mul_scalar(cube, scalar(0.044_715)));
            let tanh = B::float_tanh(B::float_mul_scalar(inner, scalar(0.797_884_6)));
            (B::float_mul(B::float_mul_scalar(open, scalar(0.5)), B::float_add_scalar(tanh, scalar(1.0))), up)
        }
        Activation::ReluSquared => {
            let positive = B::relu(open);
            (B::float_mul(positive.clone(), positive), up)
        }
        Activation::ClampedSilu => {
            let open = B::float_clamp_max(open, scalar(7.0));
            let up = up.map(|up| B::float_add_scalar(B::float_clamp(up, scalar(-7.0), scalar(7.0)), scalar(1.0)));
            (B::float_mul(open.clone(), B::sigmoid(B::float_mul_scalar(open, scalar(1.702)))), up)
        }
    };
    match up {
        Some(up) => B::float_mul(open, up),
        None => open,
    }
}

/// A whole feed-forward part of rows that are normalised.
fn feed_forward<B: Kernels>(x: FloatTensor<B>, part: &FeedForward<B>) -> FloatTensor<B> {
    linear(open(x, &part.gate), &part.down)
}

pub(super) fn experts<B: Kernels>(
    x: &FloatTensor<B>,
    before: Option<&Norm<B>>,
    experts: &Experts<B>,
    residual: Residual<'_, B>,
) -> FloatTensor<B> {
    let device = x.device();
    let x = normed(x, before);
    let shape = x.shape();
    let (rows, columns) = (shape[0], shape[1]);
    let mut scores = vec![0.0; rows * experts.choice.count];
    // A device that has failed says so when the step's result is read.
    if read::<B>(linear(x.clone(), &experts.router), &mut scores).is_err() {
        scores.fill(0.0);
    }
    // Each expert's rows, with their weights.
    let mut chosen = vec![(Vec::new(), Vec::new()); experts.choice.count];
    for (row, scores) in scores.chunks_exact(experts.choice.count).enumerate() {
        for (expert, weight) in experts.choice.choose(scores, experts.selection_bias.as_deref()) {
            chosen[expert].0.push(row);
            chosen[expert].1.push(weight);
        }
    }
    let mut sum = B::float_zeros(Shape::new([rows, columns]), &device, FloatDType::F32);
    for ((mine, weights), part) in chosen.into_iter().zip(&experts.experts) {
        if mine.is_empty() {
            continue;
        }
        let count = mine.len();
        let mine = indices::<B>(&device, mine.into_iter());
        let out = feed_forward(B::float_select(x.clone(), 0, mine.clone()), part);
        let out = B::float_mul(out, tensor::<B>(&device, weights, &[count, 1]));
        sum = B::float_select_assign(sum, 0, mine, out, IndexingUpdateOp::Add);
    }
    if let Some(shared) = &experts.shared {
        let mut out = feed_forward(x.clone(), &shared.part);
        if let Some(opening) = &shared.opening {
            let open = B::sigmoid(B::float_matmul(x, reshape::<B>(opening.clone(), &[columns, 1])));
            out = B::float_mul(out, open);
        }
        sum = B::float_add(sum, out);
    }
    add(sum, residual)
}

/// Turns heads: `x` is `[rows, heads, length]`.
fn rotate<B: Backend>(x: FloatTensor<B>, rotation: &Rotation) -> FloatTensor<B> {
    let device = x.device();
    let shape = x.shape();
    let (rows, heads, length) = (shape[0], shape[1], shape[2]);
    if rotation.pairs() == 0 {
        return x;
    }
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
    weights: &HeadWeights<B>,
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
        let split = |x: FloatTensor<B>| reshape::<B>(x, &[rows, heads, key_length]);
        let x = match before {
            Some(before) if before.weight.shape().num_elements() == key_length => norm(split(x.clone()), 3, before),
            Some(before) => split(norm(x.clone(), 2, before)),
            None => split(x.clone()),
        };
        rotate::<B>(x, rotation)
    };
    let queries = place(queries, heads, weights.query_norm.as_ref());
    let keys = halved::<B>(reshape::<B>(place(keys, kv_heads, weights.key_norm.as_ref()), &[rows, kv_heads * key_length]));
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
        let scales = (0..share).flat_map(|_| (0..count).map(|row| shape.scale_at(run.start() + row))).collect();
        let scores = B::float_mul(B::float_matmul(queries, keys), tensor::<B>(&device, scales, &[1, share * count, 1]));
        let scores = capped::<B>(scores, shape.softcap);
        let mask = (0..share).flat_map(|_| 0..count).flat_map(|row| {
            let now = run.start() + row;
            let first = shape.window.map_or(0, |window| (now + 1).saturating_sub(window));
            (0..end).map(move |position| if (first..=now).contains(&position) { 0.0 } else { -1e30 })
        });
        let mask = tensor::<B>(&device, mask.collect(), &[1, share * count, end]);
        let mut scores = B::float_add(scores, mask);
        if let Some(sinks) = &weights.sinks {
            // One more score for each head, for all of its rows.
            let sinks = reshape::<B>(sinks.clone(), &[kv_heads, share, 1, 1]);
            let sinks = B::float_expand(sinks, Shape::new([kv_heads, share, count, 1]));
            scores = B::float_cat(vec![scores, reshape::<B>(sinks, &[kv_heads, share * count, 1])], 2);
        }
        let weights = last::<B>(B::softmax(scores, 2), 3, 0..end);
        let out = reshape::<B>(B::float_matmul(weights, values), &[kv_heads, share, count, value_length]);
        outputs.push(reshape::<B>(B::float_permute(out, &[2, 0, 1, 3]), &[count, heads * value_length]));
    }
    B::float_select(B::float_cat(outputs, 0), 0, indices::<B>(&device, order.into_iter()))
}

/// `cap · tanh(x / cap)`, if there is a cap.
fn capped<B: Backend>(x: FloatTensor<B>, cap: Option<f32>) -> FloatTensor<B> {
    match cap {
        Some(cap) => B::float_mul_scalar(B::float_tanh(B::float_div_scalar(x, scalar(cap))), scalar(cap)),
        None => x,
    }
}

pub(super) fn logits<B: Kernels>(
    x: &FloatTensor<B>,
    sampled: &[usize],
    before: &Norm<B>,
    head: &Matrix<B>,
    finish: &LogitsFinish,
    out: &mut [f32],
) -> Result<(), DeviceError> {
    if sampled.is_empty() {
        return Ok(());
    }
    let rows = B::float_select(x.clone(), 0, indices::<B>(&x.device(), sampled.iter().copied()));
    let logits = B::multiply(norm(rows, 2, before), head);
    let logits = if finish.scale == 1.0 { logits } else { B::float_mul_scalar(logits, scalar(finish.scale)) };
    read::<B>(capped::<B>(logits, finish.softcap), out)
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
