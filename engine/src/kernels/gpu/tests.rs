//! The overrides against the defaults, on whatever device there is: Mesa's software one will do.

use burn::tensor::TensorData;
use burn_flex::{Flex, FlexDevice};
use proptest::prelude::*;

use super::*;
use crate::config::{Growth, Rope};
use crate::kernels::testing::{Numbers, TYPES, gpu, random_blocks};
use crate::kernels::{Backend, PAGE_TOKENS};
use crate::quant::BlockType;

/// A workspace.
fn workspace() -> Workspace {
    Workspace::new(1).unwrap()
}

fn floats<B: Backend>(device: &B::Device, values: &[f32], shape: &[usize]) -> burn::backend::tensor::FloatTensor<B> {
    B::float_from_data(TensorData::new(values.to_vec(), shape.to_vec()), device)
}

fn elements<B: Kernels>(tensor: burn::backend::tensor::FloatTensor<B>) -> Vec<f32> {
    let mut out = vec![0.0; tensor.shape().num_elements()];
    B::read(tensor, &mut out).unwrap();
    out
}

/// Random weights, as each backend holds them.
struct Weights {
    block: BlockType,
    bytes: Vec<u8>,
    shape: [u64; 2],
    bias: Option<Vec<f32>>,
}

impl Weights {
    fn new(kind: usize, rows: usize, columns: usize, seed: u64, bias: bool) -> Self {
        let block = TYPES[kind];
        let bias = bias.then(|| Numbers::new(seed).units(rows));
        Self { block, bytes: random_blocks(block, rows * columns, seed), shape: [columns as u64, rows as u64], bias }
    }

    fn view(&self) -> TensorView<'_> {
        TensorView { name: "w", shape: &self.shape, block: self.block, offset: 0, bytes: &self.bytes }
    }

    fn linear<B: Kernels>(&self, device: &B::Device, matrix: Matrix<B>) -> Linear<B> {
        Linear { matrix, bias: self.bias.as_ref().map(|bias| floats::<B>(device, bias, &[bias.len()])) }
    }

    fn host(&self) -> Linear<Flex> {
        self.linear(&FlexDevice, plain::matrix::<Flex>(&FlexDevice, &self.view()).unwrap())
    }

    fn on(&self, device: &Device) -> Linear<Wgpu> {
        self.linear(device, Wgpu::matrix(&mut workspace(), device, &self.view()).unwrap())
    }
}

fn norm<B: Kernels>(device: &B::Device, size: usize, seed: u64) -> Norm<B> {
    let weight: Vec<f32> = Numbers::new(seed).units(size).iter().map(|v| 1.0 + 0.5 * v).collect();
    Norm { kind: NormKind::RootMeanSquare, weight: floats::<B>(device, &weight, &[size]), bias: None, epsilon: 1e-5 }
}

/// A norm that takes the mean off and has a bias, or one that does neither.
fn some_norm<B: Kernels>(device: &B::Device, size: usize, seed: u64, layer: bool) -> Norm<B> {
    let norm = norm::<B>(device, size, seed);
    if layer {
        Norm { kind: NormKind::Layer, bias: Some(floats::<B>(device, &Numbers::new(!seed).units(size), &[size])), ..norm }
    } else {
        norm
    }
}

/// Both computed in single precision, in other orders.
fn check(found: &[f32], expected: &[f32]) -> Result<(), TestCaseError> {
    prop_assert_eq!(found.len(), expected.len());
    let size = (expected.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / expected.len() as f64).sqrt() as f32;
    for (found, expected) in found.iter().zip(expected) {
        let bound = 1e-4 * (size + expected.abs()) + 1e-6;
        prop_assert!((found - expected).abs() <= bound, "{found} {expected} ± {bound}");
    }
    Ok(())
}

proptest! {
    // Most of a case's time goes into compiling its kernels.
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn projections_agree(
        kinds in [0..TYPES.len(), 0..TYPES.len(), 0..TYPES.len()], sizes in [1..40usize, 1..40usize, 1..40usize],
        rows in 1..20usize, parts in 1..3usize, layer in any::<bool>(), seed in any::<u64>(),
    ) {
        let Some(device) = gpu() else { return Ok(()) };
        let columns = 256 * parts;
        let all: Vec<Weights> = (0..3).map(|i| Weights::new(kinds[i], sizes[i], columns, seed ^ i as u64, i == 1)).collect();
        let x = Numbers::new(seed).units(rows * columns);
        let (theirs, ours): (Vec<_>, Vec<_>) = all.iter().map(|weights| (weights.host(), weights.on(&device))).unzip();
        let expected = plain::project::<Flex>(&floats::<Flex>(&FlexDevice, &x, &[rows, columns]), Some(&some_norm(&FlexDevice, columns, seed, layer)), [&theirs[0], &theirs[1], &theirs[2]]);
        let x = floats::<Wgpu>(&device, &x, &[rows, columns]);
        let found = Wgpu::project(&mut workspace(), &x, Some(&some_norm(&device, columns, seed, layer)), [&ours[0], &ours[1], &ours[2]]);
        for (found, expected) in found.into_iter().zip(expected) {
            check(&elements::<Wgpu>(found), &elements::<Flex>(expected))?;
        }
    }

    #[test]
    fn sums_with_projections_agree(
        kind in 0..TYPES.len(), size in 1..70usize, rows in 1..11usize, parts in 1..9usize, normed in any::<bool>(), layer in any::<bool>(),
        scale in 0.5..2f32, seed in any::<u64>(),
    ) {
        let Some(device) = gpu() else { return Ok(()) };
        // Plain numbers have rows of any length.
        let columns = if TYPES[kind].is_plain() { parts * 37 } else { parts * TYPES[kind].block_len() };
        let weights = Weights::new(kind, size, columns, seed, normed);
        let mut numbers = Numbers::new(seed);
        let (x, to) = (numbers.units(rows * columns), numbers.units(rows * size));
        let post = normed.then(|| some_norm::<Flex>(&FlexDevice, size, seed, layer));
        let residual = Residual { rows: floats::<Flex>(&FlexDevice, &to, &[rows, size]), norm: post.as_ref(), scale };
        let expected = plain::project_add::<Flex>(&floats::<Flex>(&FlexDevice, &x, &[rows, columns]), &weights.host(), residual);
        let post = normed.then(|| some_norm::<Wgpu>(&device, size, seed, layer));
        let residual = Residual { rows: floats::<Wgpu>(&device, &to, &[rows, size]), norm: post.as_ref(), scale };
        let found = Wgpu::project_add(&mut workspace(), &floats::<Wgpu>(&device, &x, &[rows, columns]), &weights.on(&device), residual);
        // A single element less its mean is nothing, or what is left by rounding.
        if !(normed && layer && size < 3) {
            check(&elements::<Wgpu>(found), &elements::<Flex>(expected))?;
        }
    }

    #[test]
    fn gated_products_agree(
        kinds in [0..TYPES.len(), 0..TYPES.len()], size in 1..40usize, rows in 1..11usize, activation in 0..4usize, alone in any::<bool>(),
        biased in any::<bool>(), seed in any::<u64>(),
    ) {
        let Some(device) = gpu() else { return Ok(()) };
        let columns = 256;
        let [gate, up] = [0, 1].map(|i| Weights::new(kinds[i], size, columns, seed ^ i as u64, biased));
        let activation = [Activation::Silu, Activation::GeluTanh, Activation::ReluSquared, Activation::ClampedSilu][activation];
        let x: Vec<f32> = Numbers::new(seed).units(rows * columns).iter().map(|v| v * 3.0).collect();
        let theirs = Gate { gate: (!alone).then(|| gate.host()), up: up.host(), activation };
        let input = floats::<Flex>(&FlexDevice, &x, &[rows, columns]);
        let expected = plain::gated::<Flex>(&input, Some(&norm(&FlexDevice, columns, seed)), &theirs);
        let ours = Gate { gate: (!alone).then(|| gate.on(&device)), up: up.on(&device), activation };
        let input = floats::<Wgpu>(&device, &x, &[rows, columns]);
        let found = Wgpu::gated(&mut workspace(), &input, Some(&norm(&device, columns, seed)), &ours);
        check(&elements::<Wgpu>(found), &elements::<Flex>(expected))?;
    }

    #[test]
    fn logits_agree(
        kind in 0..TYPES.len(), size in 1..70usize, rows in 1..6usize, every in 1..3usize, cap in any::<bool>(), layer in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let Some(device) = gpu() else { return Ok(()) };
        let columns = 256;
        let weights = Weights::new(kind, size, columns, seed, false);
        let x = Numbers::new(seed).units(rows * columns);
        let finish = LogitsFinish { scale: if layer { 0.7 } else { 1.0 }, softcap: cap.then_some(2.0) };
        let sampled: Vec<usize> = (0..rows).filter(|row| row % every == 0).collect();
        let mut expected = vec![0.0; sampled.len() * size];
        let mut found = expected.clone();
        let theirs = floats::<Flex>(&FlexDevice, &x, &[rows, columns]);
        let before = some_norm(&FlexDevice, columns, seed, layer);
        plain::logits::<Flex>(&theirs, &sampled, &before, &weights.host().matrix, &finish, &mut expected).unwrap();
        let ours = floats::<Wgpu>(&device, &x, &[rows, columns]);
        let before = some_norm(&device, columns, seed, layer);
        Wgpu::logits(&mut workspace(), &ours, &sampled, &before, &weights.on(&device).matrix, &finish, &mut found).unwrap();
        check(&found, &expected)?;
    }

    #[test]
    fn embeddings_agree(kind in 0..TYPES.len(), tokens in proptest::collection::vec(0..19u32, 1..20), seed in any::<u64>()) {
        let Some(device) = gpu() else { return Ok(()) };
        let columns = if TYPES[kind].is_plain() { 37 } else { 256 };
        let weights = Weights::new(kind, 19, columns, seed, false);
        let expected = plain::embed::<Flex>(&FlexDevice, &weights.host().matrix, &tokens, 3.5);
        let found = Wgpu::embed(&mut workspace(), &device, &weights.on(&device).matrix, &tokens, 3.5);
        check(&elements::<Wgpu>(found), &elements::<Flex>(expected))?;
    }
}

#[test]
fn a_matrix_in_parts_is_as_one_in_one_piece() {
    let Some(device) = gpu() else { return };
    let (size, columns, rows) = (50, 256, 3);
    let [gate, up] = [Weights::new(1, size, columns, 1, false), Weights::new(5, size, columns, 2, false)];
    let x = Numbers::new(3).units(rows * columns);
    let x = floats::<Wgpu>(&device, &x, &[rows, columns]);
    let norm = norm::<Wgpu>(&device, columns, 4);
    let parts =
        |weights: &Weights, limit| Matrix::<Wgpu>(Held::Device(DeviceMatrix::load_in_parts(&device, &weights.view(), limit).unwrap()));
    let run = |gate: Matrix<Wgpu>, up: Matrix<Wgpu>| {
        let tokens = [0, 49, 17, 16, 23];
        let embedded = elements::<Wgpu>(Wgpu::embed(&mut workspace(), &device, &gate, &tokens, 1.0));
        let [gate, up] = [gate, up].map(|matrix| Linear { matrix, bias: None });
        let gate = Gate { gate: Some(gate), up, activation: Activation::Silu };
        (embedded, elements::<Wgpu>(Wgpu::gated(&mut workspace(), &x, Some(&norm), &gate)))
    };
    let expected = run(gate.on(&device).matrix, up.on(&device).matrix);
    // 16 rows of 160 bytes; then as many of the other one's rows, then others.
    for (one, other) in [(16 * 160, 16 * 148), (17 * 160, 17 * 148), (50 * 160, 20 * 148)] {
        let (embedded, gated) = run(parts(&gate, one), parts(&up, other));
        assert_eq!(embedded, expected.0);
        check(&gated, &expected.1).unwrap();
    }
    let small = DeviceMatrix::load_in_parts(&device, &gate.view(), 100).unwrap_err();
    assert!(small.to_string().contains("100 bytes for one buffer"), "{small}");
}

#[test]
fn what_is_loaded_can_be_read_back() {
    let Some(device) = gpu() else { return };
    for kind in 0..TYPES.len() {
        let weights = Weights::new(kind, 7, 256, kind as u64, false);
        let expected = weights.view().dequantise().unwrap();
        assert_eq!(weights.on(&device).matrix.on_device().unwrap().values(), expected);
    }
}

mod halves {
    use cubecl::prelude::*;

    use crate::kernels::gpu::words::{float_to_half, half_to_float};

    #[cube(launch_unchecked)]
    pub(super) fn there_and_back(x: &[f32], halves: &mut [u32], back: &mut [f32], count: u32) {
        if ABSOLUTE_POS < count as usize {
            let half = float_to_half(x[ABSOLUTE_POS]);
            halves[ABSOLUTE_POS] = half;
            back[ABSOLUTE_POS] = half_to_float(half);
        }
    }
}

#[test]
fn halves_are_rounded_as_they_should_be() {
    let Some(device) = gpu() else { return };
    // Every half, what is next to it, and the middles between it and the next.
    let mut values: Vec<f32> = vec![0.0, -0.0, 65_519.0, 65_520.0, 1e9, -1e9, 1e-9, 5.9e-8, 2.9e-8, 3.0e-8];
    for bits in 0..0x7c00u16 {
        let [half, next] = [bits, bits + 1].map(|bits| half::f16::from_bits(bits).to_f32());
        let middle = if next.is_finite() { (half + next) / 2.0 } else { half };
        values.extend([half, -half, middle, -middle, middle.next_up(), middle.next_down()]);
    }
    let x = floats::<Wgpu>(&device, &values, &[values.len()]);
    let (bits, back) = (upload(&device, vec![0; values.len()]), floats::<Wgpu>(&device, &vec![0.0; values.len()], &[values.len()]));
    // SAFETY: units beyond the count do nothing.
    unsafe {
        halves::there_and_back::launch_unchecked(
            &x.client,
            count(values.len().div_ceil(64), 1, 1),
            units(64),
            x.clone().into_buffer_arg(),
            bits.clone().into_buffer_arg(),
            back.clone().into_buffer_arg(),
            values.len() as u32,
        );
    }
    let bits = x.client.read_one(bits.handle).unwrap();
    let back = elements::<Wgpu>(back);
    for ((value, bits), back) in values.iter().zip(bits.as_chunks::<4>().0).zip(back) {
        // Numbers below the normal range of single precision may be taken for zero; there are none here.
        let expected = half::f16::from_f32(*value);
        assert_eq!(u32::from_le_bytes(*bits), u32::from(expected.to_bits()), "{value:e}");
        assert!(expected.is_infinite() || back == expected.to_f32(), "{value:e}: {back:e}");
    }
}

/// One layer's attention over sequences, in steps, against the default all at once.
struct Case {
    group: usize,
    kv: KvShape,
    window: Option<usize>,
    layout: RopeLayout,
    normed: Normed,
    /// Growth, cap and sinks.
    more: bool,
    lengths: Vec<usize>,
}

/// What is normalised before it is turned.
#[derive(Clone, Copy, PartialEq)]
enum Normed {
    Nothing,
    Heads,
    /// With a mean taken off and a bias.
    Centred,
    Rows,
}

impl Case {
    /// Runs in chunks of so many rows of each sequence, interleaved; gives each sequence's output.
    fn run<B: Kernels>(&self, device: &B::Device, mut kv: KvLayer<B>, chunk: usize, seed: u64) -> Vec<Vec<f32>> {
        let heads = self.group * self.kv.kv_heads;
        let shape = AttentionShape {
            heads,
            scale: 1.5 / (self.kv.key_length as f32).sqrt(),
            growth: self.more.then_some(Growth { by: 0.3, every: 7 }),
            softcap: self.more.then_some(1.5),
            window: self.window,
        };
        let dimension = self.kv.key_length / 4 * 2;
        let rope = Rope::plain(self.layout, dimension, 10_000.0);
        let [query_norm, key_norm] = [(0, heads), (1, self.kv.kv_heads)].map(|(i, heads)| match self.normed {
            Normed::Nothing => None,
            Normed::Heads => Some(norm::<B>(device, self.kv.key_length, seed + i)),
            Normed::Centred => Some(some_norm::<B>(device, self.kv.key_length, seed + i, true)),
            Normed::Rows => Some(norm::<B>(device, heads * self.kv.key_length, seed + i)),
        });
        let sinks = self.more.then(|| floats::<B>(device, &Numbers::new(seed).units(heads), &[heads]));
        let weights = HeadWeights { query_norm, key_norm, sinks };
        let widths = [heads * self.kv.key_length, self.kv.kv_heads * self.kv.key_length, self.kv.kv_heads * self.kv.value_length];
        let mut numbers = Numbers::new(seed);
        let inputs: Vec<_> = self.lengths.iter().map(|length| widths.map(|width| numbers.units(length * width))).collect();
        let mut work = workspace();
        let mut outputs = vec![Vec::new(); self.lengths.len()];
        let per_sequence = self.kv.pages / self.lengths.len();
        for from in (0..self.lengths.iter().copied().max().unwrap()).step_by(chunk) {
            let mut order: Vec<(usize, usize)> = Vec::new();
            for position in from..from + chunk {
                order.extend((0..self.lengths.len()).filter(|&s| position < self.lengths[s]).map(|s| (position, s)));
            }
            let mut batch = Batch::new();
            for sequence in 0..self.lengths.len() {
                let rows: Vec<usize> = (0..order.len()).filter(|&row| order[row].1 == sequence).collect();
                if !rows.is_empty() {
                    let page = |page| ((page * 7 + 3) % per_sequence * self.lengths.len() + sequence) as u32;
                    batch.push(rows, from, (0..per_sequence).map(page).collect());
                }
            }
            let gather = |which: usize| {
                let width = widths[which];
                let rows: Vec<f32> = order.iter().flat_map(|&(p, s)| inputs[s][which][p * width..][..width].to_vec()).collect();
                floats::<B>(device, &rows, &[order.len(), width])
            };
            let rotation = Rotation::new(&rope, &rope.frequencies(1), batch.positions());
            let inputs = [gather(0), gather(1), gather(2)];
            let out = B::attend(&mut work, inputs.each_ref(), &shape, &weights, &rotation, &batch, &mut kv);
            let out = elements::<B>(out);
            for (row, &(_, sequence)) in out.chunks_exact(heads * self.kv.value_length).zip(&order) {
                outputs[sequence].extend_from_slice(row);
            }
        }
        outputs
    }

    fn check(&self, device: &Device, seed: u64) {
        let longest = self.lengths.iter().copied().max().unwrap();
        let expected = self.run::<Flex>(&FlexDevice, plain::kv_layer::<Flex>(&FlexDevice, self.kv), longest, seed);
        for chunk in [longest, 1, 13] {
            let found = self.run::<Wgpu>(device, Wgpu::kv_layer(device, self.kv).unwrap(), chunk, seed);
            for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                // Values are at most one, and an output is their mean: what differs is keys that fell to neighbouring half-precision numbers.
                assert!((found - expected).abs() < 2e-3, "{found} {expected}");
            }
        }
    }
}

#[test]
fn attention_agrees_in_whatever_steps() {
    let Some(device) = gpu() else { return };
    let kv = |kv_heads, key_length, value_length| KvShape { kv_heads, key_length, value_length, pages: 12 };
    let case = |group, kv, window, layout, normed, lengths: &[usize]| Case {
        group,
        kv,
        window,
        layout,
        normed,
        more: normed == Normed::Rows || normed == Normed::Centred,
        lengths: lengths.to_vec(),
    };
    use RopeLayout::{Halves, Interleaved};
    case(3, kv(3, 64, 64), None, Interleaved, Normed::Nothing, &[70, 3, 40]).check(&device, 1);
    case(1, kv(2, 48, 32), None, Halves, Normed::Rows, &[100]).check(&device, 2);
    case(4, kv(1, 32, 100), Some(20), Halves, Normed::Heads, &[90, 41]).check(&device, 3);
    // Odd heads, and a window that is one page and a bit.
    case(2, kv(2, 21, 25), Some(PAGE_TOKENS + 1), Interleaved, Normed::Centred, &[75, 10]).check(&device, 4);
    case(7, kv(1, 16, 40), Some(1), Halves, Normed::Rows, &[34]).check(&device, 5);
}

#[test]
fn the_defaults_run_on_the_device_too() {
    let Some(device) = gpu() else { return };
    let (rows, columns, size) = (5, 64, 12);
    let weights = Weights::new(8, size, columns, 1, true);
    let x = Numbers::new(2).units(rows * columns);
    let theirs = weights.host();
    let expected =
        plain::project::<Flex>(&floats::<Flex>(&FlexDevice, &x, &[rows, columns]), Some(&norm(&FlexDevice, columns, 3)), [&theirs; 3]);
    let x = floats::<Wgpu>(&device, &x, &[rows, columns]);
    let held = weights.linear(&device, plain::matrix::<Wgpu>(&device, &weights.view()).unwrap());
    let found = Wgpu::project(&mut workspace(), &x, Some(&norm(&device, columns, 3)), [&held; 3]);
    for (found, expected) in found.into_iter().zip(expected) {
        check(&elements::<Wgpu>(found), &elements::<Flex>(expected)).unwrap();
    }
    // A matrix of the kernels' is multiplied with by them, and else read back.
    let found = plain::project::<Wgpu>(&x, Some(&norm(&device, columns, 3)), [&weights.on(&device); 3]);
    let again = Wgpu::project(&mut workspace(), &x, Some(&norm(&device, columns, 3)), [&weights.on(&device); 3]);
    for (found, again) in found.into_iter().zip(again) {
        check(&elements::<Wgpu>(found), &elements::<Wgpu>(again)).unwrap();
    }
    let found = plain::embed::<Wgpu>(&device, &weights.on(&device).matrix, &[3, 1], 1.0);
    let expected = plain::embed::<Flex>(&FlexDevice, &theirs.matrix, &[3, 1], 1.0);
    check(&elements::<Wgpu>(found), &elements::<Flex>(expected)).unwrap();
    let case = Case {
        group: 2,
        kv: KvShape { kv_heads: 2, key_length: 16, value_length: 16, pages: 2 },
        window: None,
        layout: RopeLayout::Halves,
        normed: Normed::Rows,
        more: true,
        lengths: vec![5],
    };
    let expected = case.run::<Flex>(&FlexDevice, plain::kv_layer::<Flex>(&FlexDevice, case.kv), 3, 6);
    let found = case.run::<Wgpu>(&device, plain::kv_layer::<Wgpu>(&device, case.kv), 3, 6);
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        assert!((found - expected).abs() < 2e-3, "{found} {expected}");
    }
}

#[test]
fn what_a_device_cannot_hold_is_refused_by_name() {
    let Some(device) = gpu() else { return };
    let view = TensorView { name: "blk.0.w", shape: &[256, 1], block: BlockType::NVFP4, offset: 0, bytes: &[0; 144] };
    let error = Wgpu::matrix(&mut workspace(), &device, &view).unwrap_err();
    assert_eq!(error.tensor, "blk.0.w");
    assert!(error.to_string().contains("NVFP4"), "{error}");
}

#[test]
fn a_device_that_is_not_there_is_refused_with_those_that_are() {
    let error = open(77).unwrap_err();
    assert!(error.to_string().starts_with("there is no gpu:77: "), "{error}");
    for gpu in devices() {
        assert!(error.to_string().contains(&gpu.name), "{error}");
    }
}

#[test]
fn a_clock_of_known_pace_gives_known_speeds() {
    let Some(device) = gpu() else { return };
    // Every look at this clock is a millisecond later, so each product "takes" one.
    let looks = std::cell::Cell::new(0);
    let now = || {
        looks.set(looks.get() + 1);
        std::time::Duration::from_millis(looks.get())
    };
    let speed = speed::measure_rows(&device, 64, &now).unwrap();
    assert!((speed.multiply_adds_per_second / (16.0 * 64.0 * 2048.0 * 1e3) - 1.0).abs() < 1e-6, "{speed:?}");
    assert!((speed.read_bytes_per_second / (64.0 * 2048.0 / 32.0 * 18.0 * 1e3) - 1.0).abs() < 1e-6, "{speed:?}");
}
