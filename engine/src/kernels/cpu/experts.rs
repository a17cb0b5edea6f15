//! Mixtures of experts on packed weights.
//!
//! Rows are gathered by expert, so that an expert's weights are read once for all rows that chose it, and all experts of a step are
//! multiplied in one go. What a row gets does not depend on the others: its experts are added in order of their numbers.

use burn_flex::{Flex, FlexTensor};

use super::math::padded;
use super::multiply::{Finish, Product, each_share, multiply};
use super::pool::Parts;
use super::simd::{LANES, Op, Simd};
use super::workspace::Workspace;
use super::{Normed, OpenGate, PackedMatrix, add_rows, bias, elements};
use crate::kernels::{Experts, FeedForward, Norm, Residual};

/// A feed-forward part whose matrices are packed.
struct Part<'a> {
    gate: OpenGate<'a>,
    down: &'a PackedMatrix,
    down_bias: Option<std::borrow::Cow<'a, [f32]>>,
}

impl<'a> Part<'a> {
    fn new(part: &'a FeedForward<Flex>) -> Option<Self> {
        Some(Self { gate: OpenGate::new(&part.gate)?, down: part.down.matrix.as_packed()?, down_bias: bias(&part.down) })
    }
}

/// A mixture of experts whose matrices are packed, all experts' of the same shapes.
pub(super) struct PackedExperts<'a> {
    of: &'a Experts<Flex>,
    router: &'a PackedMatrix,
    experts: Vec<Part<'a>>,
    shared: Option<Part<'a>>,
}

/// An expert that was chosen for a row.
#[derive(Clone, Copy)]
struct Chosen {
    expert: usize,
    row: usize,
    weight: f32,
}

impl<'a> PackedExperts<'a> {
    pub(super) fn new(of: &'a Experts<Flex>) -> Option<Self> {
        let shared = match &of.shared {
            Some(shared) => Some(Part::new(&shared.part)?),
            None => None,
        };
        let experts = of.experts.iter().map(Part::new).collect::<Option<Vec<_>>>()?;
        Some(Self { of, router: of.router.matrix.as_packed()?, experts, shared })
    }

    pub(super) fn run(&self, work: &mut Workspace, x: &FlexTensor, norm: Option<&Norm<Flex>>, residual: Residual<'_, Flex>) -> FlexTensor {
        let x = elements(x);
        let columns = self.router.columns();
        let rows = x.len() / columns;
        let x = match norm.map(Normed::new) {
            Some(norm) => work.normalised(&x, norm.row()).into(),
            None => x,
        };
        let chosen = self.choose(work, &x);
        let gathered: Vec<f32> = chosen.iter().flat_map(|chosen| &x[chosen.row * columns..][..columns]).copied().collect();
        // Parts that are in use with their rows of what was gathered.
        let mut uses = Vec::new();
        let mut from = 0;
        for group in chosen.chunk_by(|a, b| a.expert == b.expert) {
            uses.push((&self.experts[group[0].expert], from..from + group.len()));
            from += group.len();
        }
        let outs = run_parts(work, &gathered, &uses);
        let mut sums = vec![0.0; rows * columns];
        let isa = work.isa;
        for (chosen, out) in chosen.iter().zip(outs.chunks_exact(columns)) {
            isa.run(AddWeighted { to: &mut sums[chosen.row * columns..][..columns], row: out, weight: chosen.weight });
        }
        if let (Some(part), Some(shared)) = (&self.shared, &self.of.shared) {
            let outs = run_parts(work, &x, &[(part, 0..rows)]);
            let opening = shared.opening.as_ref().map(elements);
            for ((sum, out), x) in sums.chunks_exact_mut(columns).zip(outs.chunks_exact(columns)).zip(x.chunks_exact(columns)) {
                let weight = opening.as_ref().map_or(1.0, |opening| sigmoid(isa.run(Dot(opening, x))));
                isa.run(AddWeighted { to: sum, row: out, weight });
            }
        }
        add_rows(work, &sums, columns, residual)
    }

    /// Each row's experts, in order of the experts and then of the rows.
    fn choose(&self, work: &mut Workspace, x: &[f32]) -> Vec<Chosen> {
        let count = self.router.rows();
        work.prepare(x, None, &[self.router]);
        let mut scores = vec![0.0; x.len() / self.router.columns() * count];
        let bias = bias(&self.of.router);
        let product = Product { matrix: self.router, bias: bias.as_deref(), finish: Finish::Set, rows: None, out: Parts::new(&mut scores) };
        multiply(&mut work.pool, work.isa, &work.prepared, &[product]);
        let rows = scores.len() / count;
        let mut found = vec![Vec::new(); rows];
        let parts = Parts::new(&mut found);
        each_share(&mut work.pool, rows, rows > 8, |mine| {
            for row in mine {
                let choice = self.of.choice.choose(&scores[row * count..][..count], self.of.selection_bias.as_deref());
                // SAFETY: each row is one thread's.
                let found = unsafe { parts.part(row..row + 1) };
                found[0] = choice;
            }
        });
        let mut chosen: Vec<Chosen> = (found.into_iter().enumerate())
            .flat_map(|(row, choice)| choice.into_iter().map(move |(expert, weight)| Chosen { expert, row, weight }))
            .collect();
        chosen.sort_by_key(|chosen| (chosen.expert, chosen.row));
        chosen
    }
}

/// Puts rows through parts, each of which takes its own range of them. All have the same shapes.
fn run_parts(work: &mut Workspace, x: &[f32], uses: &[(&Part<'_>, std::ops::Range<usize>)]) -> Vec<f32> {
    let Some((first, _)) = uses.first() else { return Vec::new() };
    let (columns, width) = (first.gate.up.0.columns(), first.down.columns());
    let rows = x.len() / columns;
    let mut opened = vec![0.0; rows * width];
    let matrices: Vec<&PackedMatrix> = uses.iter().flat_map(|(part, _)| part.gate.matrices()).collect();
    let runs: Vec<std::ops::Range<usize>> = uses.iter().map(|(_, rows)| rows.clone()).collect();
    work.prepare_runs(x, None, &matrices, &runs);
    let mut products = Vec::new();
    let mut left = opened.as_mut_slice();
    for (part, rows) in uses {
        let (mine, rest) = left.split_at_mut(rows.len() * width);
        products.push(part.gate.product(Some(rows.clone()), Parts::new(mine)));
        left = rest;
    }
    multiply(&mut work.pool, work.isa, &work.prepared, &products);
    let mut out = vec![0.0; rows * columns];
    let matrices: Vec<&PackedMatrix> = uses.iter().map(|(part, _)| part.down).collect();
    work.prepare_runs(&opened, None, &matrices, &runs);
    let mut products = Vec::new();
    let mut left = out.as_mut_slice();
    for (part, rows) in uses {
        let (mine, rest) = left.split_at_mut(rows.len() * columns);
        let (bias, rows, out) = (part.down_bias.as_deref(), Some(rows.clone()), Parts::new(mine));
        products.push(Product { matrix: part.down, bias, finish: Finish::Set, rows, out });
        left = rest;
    }
    multiply(&mut work.pool, work.isa, &work.prepared, &products);
    out
}

/// `to += weight · row`.
struct AddWeighted<'a> {
    to: &'a mut [f32],
    row: &'a [f32],
    weight: f32,
}

impl Op for AddWeighted<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        let weight = s.splat(self.weight);
        for (to, row) in self.to.chunks_mut(LANES).zip(self.row.chunks(LANES)) {
            let mut sums = padded(to);
            s.store(s.fma(s.load(&padded(row)), weight, s.load(&sums)), &mut sums);
            to.copy_from_slice(&sums[..to.len()]);
        }
    }
}

/// A product of vectors of the same length, in sixteen lanes.
struct Dot<'a>(&'a [f32], &'a [f32]);

impl Op for Dot<'_> {
    type Output = f32;

    #[inline(always)]
    fn eval<S: Simd>(self, s: S) -> f32 {
        let mut sum = s.splat(0.0);
        for (a, b) in self.0.chunks(LANES).zip(self.1.chunks(LANES)) {
            sum = s.fma(s.load(&padded(a)), s.load(&padded(b)), sum);
        }
        s.sum_of(sum)
    }
}

/// By the exponential that is the same everywhere.
fn sigmoid(x: f32) -> f32 {
    (1.0 / (1.0 + crate::config::exponential(-f64::from(x).clamp(-1e3, 1e3)))) as f32
}
