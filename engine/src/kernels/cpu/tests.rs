//! The overrides against the defaults, and against themselves under other instruction sets, thread counts and step sizes.

use burn::tensor::TensorData;
use proptest::prelude::*;

use super::*;
use crate::config::{self, Activation, Rope, RopeLayout, Weighting};
use crate::kernels::testing::{Numbers, TYPES, random_blocks};
use crate::kernels::{FeedForward, PAGE_TOKENS, SharedExpert, plain};
use crate::quant::{self, BlockType};

const EPSILON: f32 = 1e-5;

/// A matrix in all its forms.
struct Weights {
    packed: Linear<Flex>,
    plain: Linear<Flex>,
    values: Vec<f32>,
    columns: usize,
    in_blocks: bool,
}

fn vector(values: &[f32]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values.to_vec(), [values.len()]))
}

fn weights(block: BlockType, rows: usize, columns: usize, seed: u64, bias: bool) -> Weights {
    let bytes = random_blocks(block, rows * columns, seed);
    let shape = [columns as u64, rows as u64];
    let view = TensorView { name: "w", shape: &shape, block, offset: 0, bytes: &bytes };
    let mut values = vec![0.0; rows * columns];
    quant::dequantise(block, &bytes, &mut values).unwrap();
    let bias = bias.then(|| vector(&Numbers::new(seed).units(rows)));
    let packed = Flex::matrix(&mut Workspace::new(1).unwrap(), &FlexDevice, &view).unwrap();
    let in_blocks = packed.as_packed().unwrap().takes_blocks();
    Weights {
        packed: Linear { matrix: packed, bias: bias.clone() },
        plain: Linear { matrix: plain::matrix::<Flex>(&FlexDevice, &view).unwrap(), bias },
        values,
        columns,
        in_blocks,
    }
}

impl Weights {
    /// How far products may be off because activations were rounded to 8 bits: half a step of their block for each. Rounding in single
    /// precision comes on top.
    fn bounds(&self, x: &[f32]) -> Vec<f32> {
        let mut bounds = Vec::new();
        for x in x.chunks_exact(self.columns) {
            for w in self.values.chunks_exact(self.columns) {
                let mut bound = 1e-5;
                for (x, w) in x.chunks(32).zip(w.chunks(32)) {
                    let step = if self.in_blocks { x.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0 } else { 0.0 };
                    bound += x.iter().zip(w).map(|(x, w)| 0.51 * step * w.abs() + 1e-5 * (x * w).abs()).sum::<f32>();
                }
                bounds.push(bound);
            }
        }
        bounds
    }
}

fn check(found: &FlexTensor, expected: &FlexTensor, bounds: &[f32]) -> Result<(), TestCaseError> {
    let (found, expected) = (elements(found), elements(expected));
    prop_assert_eq!(found.len(), expected.len());
    prop_assert_eq!(found.len(), bounds.len());
    for ((found, expected), bound) in found.iter().zip(expected.iter()).zip(bounds) {
        prop_assert!((found - expected).abs() <= *bound, "{found} {expected} ± {bound}");
    }
    Ok(())
}

fn norm(size: usize, seed: u64) -> Norm<Flex> {
    let weight: Vec<f32> = Numbers::new(seed).units(size).iter().map(|v| 1.0 + 0.5 * v).collect();
    Norm { kind: NormKind::RootMeanSquare, weight: vector(&weight), bias: None, epsilon: EPSILON }
}

fn normed(x: &[f32], norm: &Norm<Flex>) -> Vec<f32> {
    let weight = elements(&norm.weight);
    x.chunks_exact(weight.len())
        .flat_map(|row| {
            let mean = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / row.len() as f64;
            let factor = 1.0 / (mean + f64::from(norm.epsilon)).sqrt();
            row.iter().zip(weight.iter()).map(move |(v, w)| (f64::from(*v) * factor) as f32 * w).collect::<Vec<_>>()
        })
        .collect()
}

fn workspaces() -> Vec<Workspace> {
    let mut all = vec![Workspace::with(3, Isa::detect()).unwrap()];
    all.extend(Isa::all().into_iter().map(|isa| Workspace::with(1, isa).unwrap()));
    all
}

/// All workspaces give the same bits; the result of the last.
fn same_everywhere<T: PartialEq + std::fmt::Debug>(mut compute: impl FnMut(&mut Workspace) -> T) -> T {
    let mut results: Vec<T> = workspaces().iter_mut().map(&mut compute).collect();
    for pair in results.windows(2) {
        assert_eq!(pair[0], pair[1]);
    }
    results.remove(0)
}

fn bits(tensor: &FlexTensor) -> Vec<u32> {
    elements(tensor).iter().map(|v| v.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn projections_agree(
        kinds in [0..TYPES.len(), 0..TYPES.len(), 0..TYPES.len()], sizes in [1..40usize, 1..40usize, 1..40usize],
        rows in 1..11usize, parts in 1..3usize, seed in any::<u64>(),
    ) {
        let columns = 256 * parts;
        let all: Vec<Weights> = (0..3).map(|i| weights(TYPES[kinds[i]], sizes[i], columns, seed + i as u64, i == 1)).collect();
        let x = Numbers::new(seed).units(rows * columns);
        let (input, norm) = (tensor(x.clone(), columns), norm(columns, seed));
        let mut found = None;
        same_everywhere(|work| {
            let out = Flex::project(work, &input, Some(&norm), [&all[0].packed, &all[1].packed, &all[2].packed]);
            let all_bits = out.each_ref().map(bits);
            found = Some(out);
            all_bits
        });
        let expected = plain::project::<Flex>(&input, Some(&norm), [&all[0].plain, &all[1].plain, &all[2].plain]);
        for ((found, expected), weights) in found.unwrap().iter().zip(&expected).zip(&all) {
            check(found, expected, &weights.bounds(&normed(&x, &norm)))?;
        }
    }

    #[test]
    fn sums_agree(kind in 0..TYPES.len(), size in 1..40usize, rows in 1..11usize, post in any::<bool>(), seed in any::<u64>()) {
        let (columns, scale) = (256, if seed % 2 == 0 { 1.0 } else { 0.5 });
        let weights = weights(TYPES[kind], size, columns, seed, true);
        let x = Numbers::new(seed).units(rows * columns);
        let residual = tensor(Numbers::new(seed ^ 1).units(rows * size), size);
        let (input, post) = (tensor(x.clone(), columns), post.then(|| norm(size, seed)));
        let mut found = None;
        same_everywhere(|work| {
            let out = Flex::project_add(work, &input, &weights.packed, Residual { rows: residual.clone(), norm: post.as_ref(), scale });
            let all_bits = bits(&out);
            found = Some(out);
            all_bits
        });
        let expected = plain::project_add::<Flex>(&input, &weights.plain, Residual { rows: residual, norm: post.as_ref(), scale });
        let mut bounds = weights.bounds(&x);
        if post.is_some() {
            // A row's norm divides by its size: an error of any element moves all of them.
            let product = plain::project_add::<Flex>(
                &input, &weights.plain, Residual { rows: tensor(vec![0.0; rows * size], size), norm: None, scale: 1.0 },
            );
            for (bounds, product) in bounds.chunks_exact_mut(size).zip(elements(&product).chunks_exact(size)) {
                let length = product.iter().map(|v| v * v).sum::<f32>().sqrt();
                let error = bounds.iter().map(|v| v * v).sum::<f32>().sqrt();
                bounds.fill(if error * 3.0 < length { 1.5 * 3.0 * (size as f32).sqrt() * error / length + 1e-4 } else { f32::INFINITY });
            }
        }
        check(&found.unwrap(), &expected, &bounds)?;
    }

    #[test]
    fn gated_products_agree(
        kinds in [0..TYPES.len(), 0..TYPES.len()], size in 1..40usize, rows in 1..11usize, kind in 0..4usize,
        biased in any::<bool>(), seed in any::<u64>(),
    ) {
        let columns = 256;
        let [gate, up] = [0, 1].map(|i| weights(TYPES[kinds[i]], size, columns, seed + i as u64, biased));
        let activation = [Activation::Silu, Activation::GeluTanh, Activation::ReluSquared, Activation::ClampedSilu][kind];
        let x = Numbers::new(seed).units(rows * columns);
        let (input, norm) = (tensor(x.clone(), columns), norm(columns, seed));
        let packed = Gate { gate: Some(gate.packed.clone()), up: up.packed.clone(), activation };
        let plain_gate = Gate { gate: Some(gate.plain.clone()), up: up.plain.clone(), activation };
        let mut found = None;
        same_everywhere(|work| {
            let out = Flex::gated(work, &input, Some(&norm), &packed);
            let all_bits = bits(&out);
            found = Some(out);
            all_bits
        });
        let expected = plain::gated::<Flex>(&input, Some(&norm), &plain_gate);
        // The activations' slopes are at most 1.13, and |f(x)| ≤ |x|; but for the square, which is twice as steep as it is far.
        let x = normed(&x, &norm);
        let products = |weights: &Weights| {
            let [out, ..] = plain::project::<Flex>(&tensor(x.clone(), columns), None, [&weights.plain; 3]);
            elements(&out).to_vec()
        };
        let (g, u, eg, eu) = (products(&gate), products(&up), gate.bounds(&x), up.bounds(&x));
        let bounds: Vec<f32> = (0..g.len())
            .map(|i| {
                let (steep, size) = match activation {
                    Activation::ReluSquared => (2.0 * (g[i].abs() + eg[i]), g[i] * g[i]),
                    _ => (1.13, g[i].abs()),
                };
                // The clamped one opens one more than its `up`.
                1.01 * (steep * eg[i] * (u[i].abs() + 1.0 + eu[i]) + size * eu[i]) + 1e-4
            })
            .collect();
        check(&found.unwrap(), &expected, &bounds)?;
    }

    #[test]
    fn logits_agree(kind in 0..TYPES.len(), size in 1..70usize, rows in 1..6usize, cap in any::<bool>(), seed in any::<u64>()) {
        let columns = 256;
        let weights = weights(TYPES[kind], size, columns, seed, false);
        let x = Numbers::new(seed).units(rows * columns);
        let (input, norm) = (tensor(x.clone(), columns), norm(columns, seed));
        let finish = LogitsFinish { scale: if seed % 2 == 0 { 1.0 } else { 0.5 }, softcap: cap.then_some(2.0) };
        let sampled: Vec<usize> = (0..rows).filter(|row| row % 2 == 0).collect();
        let found = same_everywhere(|work| {
            let mut out = vec![0.0; sampled.len() * size];
            Flex::logits(work, &input, &sampled, &norm, &weights.packed.matrix, &finish, &mut out).unwrap();
            out
        });
        let mut expected = vec![0.0; found.len()];
        plain::logits::<Flex>(&input, &sampled, &norm, &weights.plain.matrix, &finish, &mut expected).unwrap();
        let rows: Vec<f32> = sampled.iter().flat_map(|&row| normed(&x, &norm)[row * columns..][..columns].to_vec()).collect();
        check(&tensor(found, size), &tensor(expected, size), &weights.bounds(&rows).iter().map(|b| b + 1e-5).collect::<Vec<_>>())?;
    }

    #[test]
    fn embeddings_are_exact(kind in 0..TYPES.len(), tokens in proptest::collection::vec(0..19u32, 1..20), seed in any::<u64>()) {
        let weights = weights(TYPES[kind], 19, 256, seed, false);
        for scale in [1.0, 3.5] {
            let found = same_everywhere(|work| bits(&Flex::embed(work, &FlexDevice, &weights.packed.matrix, &tokens, scale)));
            let expected = plain::embed::<Flex>(&FlexDevice, &weights.plain.matrix, &tokens, scale);
            prop_assert_eq!(found, bits(&expected));
        }
    }
}

/// One layer's attention over sequences of given lengths, whose rows come in steps.
struct Case {
    shape: AttentionShape,
    kv: KvShape,
    rope: Rope,
    weights: HeadWeights<Flex>,
    /// For each sequence, rows of queries, keys and values.
    sequences: Vec<[Vec<f32>; 3]>,
    lengths: Vec<usize>,
}

impl Case {
    fn new(group: usize, kv: KvShape, window: Option<usize>, layout: RopeLayout, normed: bool, lengths: &[usize], seed: u64) -> Self {
        let heads = group * kv.kv_heads;
        let mut numbers = Numbers::new(seed);
        let widths = [heads * kv.key_length, kv.kv_heads * kv.key_length, kv.kv_heads * kv.value_length];
        Self {
            shape: AttentionShape { heads, scale: 1.5 / (kv.key_length as f32).sqrt(), growth: None, softcap: None, window },
            kv,
            rope: Rope::plain(layout, kv.key_length / 4 * 2, 10_000.0),
            weights: HeadWeights {
                query_norm: normed.then(|| norm(kv.key_length, seed)),
                key_norm: normed.then(|| norm(kv.key_length, seed + 1)),
                sinks: None,
            },
            sequences: lengths.iter().map(|&length| widths.map(|width| numbers.units(length * width))).collect(),
            lengths: lengths.to_vec(),
        }
    }

    /// Runs in steps: each is a list of (sequence, count of rows); rows of a step's sequences are interleaved. Gives each sequence's output.
    fn run(&self, work: &mut Workspace, kv: &mut KvLayer<Flex>, steps: &[Vec<(usize, usize)>]) -> Vec<Vec<f32>> {
        let frequencies = self.rope.frequencies(1);
        let per_sequence = self.kv.pages / self.lengths.len();
        let mut done = vec![0; self.lengths.len()];
        let mut outputs = vec![Vec::new(); self.lengths.len()];
        for step in steps {
            let mut order = Vec::new();
            for i in 0..step.iter().map(|(_, count)| *count).max().unwrap_or(0) {
                order.extend(step.iter().filter(|(_, count)| i < *count).map(|(sequence, _)| (*sequence, done[*sequence] + i)));
            }
            let mut batch = Batch::new();
            for &(sequence, count) in step {
                let rows: Vec<usize> = (0..order.len()).filter(|&row| order[row].0 == sequence).collect();
                assert_eq!(rows.len(), count);
                // Pages in no order.
                let pages = (0..per_sequence).map(|page| ((page * 7 + 3) % per_sequence * self.lengths.len() + sequence) as u32).collect();
                batch.push(rows, done[sequence], pages);
            }
            let gather = |which: usize| {
                let width = self.sequences[0][which].len() / self.lengths[0];
                let rows = order.iter().flat_map(|&(s, p)| self.sequences[s][which][p * width..][..width].to_vec()).collect();
                tensor(rows, width)
            };
            let rotation = Rotation::new(&self.rope, &frequencies, batch.positions());
            let inputs = [gather(0), gather(1), gather(2)];
            let out = Flex::attend(work, inputs.each_ref(), &self.shape, &self.weights, &rotation, &batch, kv);
            let width = self.shape.heads * self.kv.value_length;
            for (row, &(sequence, _)) in elements(&out).chunks_exact(width).zip(&order) {
                outputs[sequence].extend_from_slice(row);
            }
            step.iter().for_each(|&(sequence, count)| done[sequence] += count);
        }
        outputs
    }

    fn check(&self) {
        // All at once, by the default.
        let at_once: Vec<_> = self.lengths.iter().copied().enumerate().collect();
        let mut kv = plain::kv_layer::<Flex>(&FlexDevice, self.kv);
        let expected = self.run(&mut Workspace::new(1).unwrap(), &mut kv, std::slice::from_ref(&at_once));
        let run =
            |work: &mut Workspace, steps: &[Vec<(usize, usize)>]| self.run(work, &mut Flex::kv_layer(&FlexDevice, self.kv).unwrap(), steps);
        let found = same_everywhere(|work| run(work, std::slice::from_ref(&at_once)));
        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            // Values are at most one, and an output is their mean: what differs is keys that fell to neighbouring
            // half-precision numbers.
            assert!((found - expected).abs() < 2e-3, "{found} {expected}");
        }
        // One sequence after the other; in chunks, together; one row at a time, together.
        let mut splits = vec![at_once.iter().map(|one| vec![*one]).collect::<Vec<_>>()];
        for chunk in [1, 5, 33] {
            let longest = self.lengths.iter().copied().max().unwrap();
            splits.push(
                (0..longest)
                    .step_by(chunk)
                    .map(|from| {
                        let left = |(s, &length): (usize, &usize)| (length > from).then(|| (s, chunk.min(length - from)));
                        self.lengths.iter().enumerate().filter_map(left).collect()
                    })
                    .collect(),
            );
        }
        for steps in splits {
            assert_eq!(found, run(&mut Workspace::new(2).unwrap(), &steps));
        }
    }
}

#[test]
fn attention_agrees_and_does_not_depend_on_steps() {
    let kv = |kv_heads, key_length, value_length| KvShape { kv_heads, key_length, value_length, pages: 12 };
    use RopeLayout::{Halves, Interleaved};
    Case::new(3, kv(3, 64, 64), None, Interleaved, false, &[70, 3, 40], 1).check();
    Case::new(1, kv(2, 48, 32), None, Halves, false, &[100], 2).check();
    Case::new(4, kv(1, 32, 32), Some(20), Halves, true, &[90, 41], 3).check();
    // Lengths of heads that are no whole vectors, and a window that is one page and a bit.
    Case::new(2, kv(2, 20, 24), Some(PAGE_TOKENS + 1), Interleaved, true, &[75, 10], 4).check();
    Case::new(7, kv(1, 16, 40), Some(1), Halves, false, &[34], 5).check();
}

#[test]
fn bounded_scores_sinks_and_norms_of_rows_agree() {
    let kv = KvShape { kv_heads: 2, key_length: 32, value_length: 32, pages: 12 };
    let mut case = Case::new(2, kv, Some(40), RopeLayout::Halves, false, &[70, 9], 6);
    case.shape.softcap = Some(0.5);
    case.weights.sinks = Some(vector(&[0.5, -3.0, 2.0, 40.0]));
    case.check();
    let whole = |size, seed| Some(norm(size, seed));
    case.weights = HeadWeights { query_norm: whole(128, 1), key_norm: whole(64, 2), sinks: None };
    case.shape.softcap = None;
    case.shape.growth = Some(config::Growth { by: 0.5, every: 16 });
    case.rope.magnitude = 1.2;
    case.check();
    case.rope.dimension = 0;
    case.check();
}

#[test]
fn layer_norms_agree() {
    let weights = weights(BlockType::F32, 20, 96, 3, true);
    let norm = Norm { kind: NormKind::Layer, bias: Some(vector(&Numbers::new(5).units(96))), ..norm(96, 4) };
    let x: Vec<f32> = Numbers::new(6).units(5 * 96).iter().map(|v| 3.0 + v).collect();
    let input = tensor(x, 96);
    let mut found = None;
    same_everywhere(|work| {
        let [out, ..] = Flex::project(work, &input, Some(&norm), [&weights.packed; 3]);
        let all_bits = bits(&out);
        found = Some(out);
        all_bits
    });
    let [expected, ..] = plain::project::<Flex>(&input, Some(&norm), [&weights.plain; 3]);
    check(&found.unwrap(), &expected, &[1e-4; 100]).unwrap();
}

/// Experts of float weights, so that the choice is the same in both; several rows, whose experts are shared by some and not by others.
#[test]
fn experts_agree_and_do_not_depend_on_each_other() {
    const HIDDEN: usize = 64;
    const WIDTH: usize = 40;
    let seeds = std::cell::Cell::new(100);
    let next = |rows, columns, bias| {
        seeds.set(seeds.get() + 1);
        weights(BlockType::F32, rows, columns, seeds.get(), bias)
    };
    let make = |choice: &config::Experts, biased: bool, gated: bool, shared: bool| {
        seeds.set(100);
        let mut both = [Vec::new(), Vec::new()];
        let part = || {
            let (gate, up, down) = (next(WIDTH, HIDDEN, biased), next(WIDTH, HIDDEN, biased), next(HIDDEN, WIDTH, biased));
            [0, 1].map(|i| {
                let pick = |weights: &Weights| if i == 0 { weights.packed.clone() } else { weights.plain.clone() };
                let gate = Gate { gate: gated.then(|| pick(&gate)), up: pick(&up), activation: Activation::Silu };
                FeedForward { gate, down: pick(&down) }
            })
        };
        for _ in 0..choice.count {
            part().into_iter().zip(&mut both).for_each(|(part, all)| all.push(part));
        }
        let router = next(choice.count, HIDDEN, biased);
        let opening = vector(&Numbers::new(9).units(HIDDEN));
        let mut shared_parts = part().map(Some).into_iter();
        let mut routers = [router.packed, router.plain].into_iter();
        both.map(|experts| Experts {
            choice: choice.clone(),
            router: routers.next().unwrap(),
            selection_bias: biased.then(|| Numbers::new(8).units(choice.count)),
            experts,
            shared: shared_parts
                .next()
                .unwrap()
                .filter(|_| shared)
                .map(|part| SharedExpert { part, opening: gated.then(|| opening.clone()) }),
        })
    };
    let choice = config::Experts {
        count: 6,
        used: 2,
        feed_forward: WIDTH,
        shared_feed_forward: WIDTH,
        weighting: Weighting::Softmax,
        normalised: true,
        scale: 1.5,
        groups: 1,
        groups_used: 1,
    };
    let rows = 13;
    let x = tensor(Numbers::new(1).units(rows * HIDDEN), HIDDEN);
    let residual = tensor(Numbers::new(2).units(rows * HIDDEN), HIDDEN);
    let (before, post) = (norm(HIDDEN, 3), norm(HIDDEN, 4));
    for (biased, gated, shared, posted) in
        [(false, true, false, false), (true, true, true, false), (true, false, true, true), (false, true, true, false)]
    {
        let [packed, plain] = make(&choice, biased, gated, shared);
        let norm = posted.then_some(&post);
        let mut found = None;
        same_everywhere(|work| {
            let out = Flex::experts(work, &x, Some(&before), &packed, Residual { rows: residual.clone(), norm, scale: 0.7 });
            let all_bits = bits(&out);
            found = Some(out);
            all_bits
        });
        let found = found.unwrap();
        let expected = plain::experts::<Flex>(&x, Some(&before), &plain, Residual { rows: residual.clone(), norm, scale: 0.7 });
        check(&found, &expected, &vec![2e-4; rows * HIDDEN]).unwrap();
        // Each row alone.
        for row in 0..rows {
            let one = |all: &FlexTensor| tensor(elements(all)[row * HIDDEN..][..HIDDEN].to_vec(), HIDDEN);
            let rows = Residual { rows: one(&residual), norm, scale: 0.7 };
            let alone = Flex::experts(&mut Workspace::new(1).unwrap(), &one(&x), Some(&before), &packed, rows);
            assert_eq!(bits(&alone), bits(&found)[row * HIDDEN..][..HIDDEN]);
        }
    }
}

#[test]
fn latent_attention_agrees_and_does_not_depend_on_steps() {
    const HEADS: usize = 3;
    const HIDDEN: usize = 64;
    let lengths = config::Latent { query_rank: 48, rank: 32, fixed: 16, turned: 8, value_length: 20 };
    let make = |short: bool| {
        let seeds = std::cell::Cell::new(40);
        let next = |rows, columns, bias| {
            seeds.set(seeds.get() + 1);
            weights(BlockType::F16, rows, columns, seeds.get(), bias)
        };
        let all = [
            next(lengths.query_rank, HIDDEN, false),
            next(HEADS * 24, if short { lengths.query_rank } else { HIDDEN }, false),
            next(lengths.rank + lengths.turned, HIDDEN, true),
        ];
        let ups: Vec<Weights> = (0..HEADS).map(|_| next(lengths.rank, lengths.fixed, false)).collect();
        let values: Vec<Weights> = (0..HEADS).map(|_| next(lengths.value_length, lengths.rank, false)).collect();
        [false, true].map(|plain| {
            let pick = |weights: &Weights| if plain { weights.plain.clone() } else { weights.packed.clone() };
            Latent {
                query_down: short.then(|| (pick(&all[0]), norm(lengths.query_rank, 1))),
                query: pick(&all[1]),
                down: pick(&all[2]),
                down_norm: norm(lengths.rank, 2),
                query_ups: ups.iter().map(|up| pick(up).matrix).collect(),
                value_ups: values.iter().map(|up| pick(up).matrix).collect(),
                lengths,
            }
        })
    };
    let rows = 11;
    let x = tensor(Numbers::new(1).units(rows * HIDDEN), HIDDEN);
    let attended = tensor(Numbers::new(2).units(rows * HEADS * lengths.rank), HEADS * lengths.rank);
    let before = norm(HIDDEN, 3);
    for short in [false, true] {
        let [packed, plain] = make(short);
        let run = |work: &mut Workspace, x: &FlexTensor, attended: &FlexTensor| {
            let [queries, keys, values] = Flex::project_latent(work, x, Some(&before), &packed);
            [queries, keys, values, Flex::expand_latent(work, attended, &packed)]
        };
        same_everywhere(|work| run(work, &x, &attended).each_ref().map(bits));
        let found = run(&mut Workspace::new(2).unwrap(), &x, &attended);
        let [queries, keys, values] = plain::project_latent::<Flex>(&x, Some(&before), &plain);
        let expected = [queries, keys, values, plain::expand_latent::<Flex>(&attended, &plain)];
        for (found, expected) in found.iter().zip(&expected) {
            check(found, expected, &vec![1e-4; elements(expected).len()]).unwrap();
        }
        for row in 0..rows {
            let one = |all: &FlexTensor, width: usize| tensor(elements(all)[row * width..][..width].to_vec(), width);
            let alone = run(&mut Workspace::new(1).unwrap(), &one(&x, HIDDEN), &one(&attended, HEADS * lengths.rank));
            for (alone, found) in alone.iter().zip(&found) {
                let width = bits(alone).len();
                assert_eq!(bits(alone), bits(found)[row * width..][..width]);
            }
        }
    }
}

#[test]
fn what_the_cpu_cannot_hold_is_refused_by_name() {
    let view = TensorView { name: "blk.0.w", shape: &[64, 1], block: BlockType::NVFP4, offset: 0, bytes: &[0; 36] };
    let error = Flex::matrix(&mut Workspace::new(1).unwrap(), &FlexDevice, &view).unwrap_err();
    assert_eq!(error.tensor, "blk.0.w");
    assert!(error.to_string().contains("NVFP4"), "{error}");
}
