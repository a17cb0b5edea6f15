//! Latent attention on packed weights: what is before and after the attention itself.

use burn_flex::{Flex, FlexTensor};

use super::math::RowNorm;
use super::multiply::{Finish, Product, multiply};
use super::pool::Parts;
use super::workspace::Workspace;
use super::{Normed, PackedMatrix, bias, elements, tensor};
use crate::kernels::{Latent, Linear, Matrix, Norm};

/// Latent attention whose matrices are packed.
pub(super) struct PackedLatent<'a> {
    of: &'a Latent<Flex>,
    query_ups: Vec<&'a PackedMatrix>,
    value_ups: Vec<&'a PackedMatrix>,
}

impl<'a> PackedLatent<'a> {
    pub(super) fn new(of: &'a Latent<Flex>) -> Option<Self> {
        let packed = |matrices: &'a [Matrix<Flex>]| matrices.iter().map(Matrix::as_packed).collect::<Option<Vec<_>>>();
        let linears = [Some(&of.query), Some(&of.down), of.query_down.as_ref().map(|(down, _)| down)];
        let all_packed = linears.iter().flatten().all(|linear| linear.matrix.as_packed().is_some());
        all_packed.then_some(())?;
        Some(Self { of, query_ups: packed(&of.query_ups)?, value_ups: packed(&of.value_ups)? })
    }

    pub(super) fn project(&self, work: &mut Workspace, x: &FlexTensor, norm: Option<&Norm<Flex>>) -> [FlexTensor; 3] {
        let (fixed, turned, rank) = (self.of.lengths.fixed, self.of.lengths.turned, self.of.lengths.rank);
        let (x, norm) = (elements(x), norm.map(Normed::new));
        let before = norm.as_ref().map(Normed::row);
        let both = product(work, &x, before, &self.of.down);
        let queries = match &self.of.query_down {
            Some((down, after)) => {
                let short = product(work, &x, before, down);
                product(work, &short, Some(Normed::new(after).row()), &self.of.query)
            }
            None => product(work, &x, before, &self.of.query),
        };
        let (heads, each) = (self.query_ups.len(), fixed + turned);
        let rows = both.len() / (rank + turned);

        let head = |row: usize, head: usize| &queries[(row * heads + head) * each..][..each];
        let gathered: Vec<f32> = (0..heads).flat_map(|h| (0..rows).flat_map(move |row| &head(row, h)[..fixed])).copied().collect();
        let ups = each_head(work, &gathered, &self.query_ups);
        let mut out = Vec::with_capacity(rows * heads * (turned + rank));
        for row in 0..rows {
            for h in 0..heads {
                out.extend_from_slice(&head(row, h)[fixed..]);
                out.extend_from_slice(&ups[(h * rows + row) * rank..][..rank]);
            }
        }

        let shorts: Vec<f32> = both.chunks_exact(rank + turned).flat_map(|both| &both[..rank]).copied().collect();
        let values = work.normalised(&shorts, Normed::new(&self.of.down_norm).row());
        let keys = both.chunks_exact(rank + turned).zip(values.chunks_exact(rank));
        let keys = keys.flat_map(|(both, value)| both[rank..].iter().chain(value)).copied().collect();
        [tensor(out, heads * (turned + rank)), tensor(keys, turned + rank), tensor(values, rank)]
    }

    pub(super) fn expand(&self, work: &mut Workspace, attended: &FlexTensor) -> FlexTensor {
        let (rank, length, heads) = (self.of.lengths.rank, self.of.lengths.value_length, self.value_ups.len());
        let attended = elements(attended);
        let rows = attended.len() / (heads * rank);
        let head = |row: usize, head: usize| &attended[(row * heads + head) * rank..][..rank];
        let gathered: Vec<f32> = (0..heads).flat_map(|h| (0..rows).flat_map(move |row| head(row, h))).copied().collect();
        let values = each_head(work, &gathered, &self.value_ups);
        let value = |row: usize, head: usize| &values[(head * rows + row) * length..][..length];
        let out = (0..rows).flat_map(|row| (0..heads).flat_map(move |h| value(row, h))).copied().collect();
        tensor(out, heads * length)
    }
}

/// Rows, normalised if there is a norm, times a matrix that is packed.
fn product(work: &mut Workspace, x: &[f32], norm: Option<RowNorm<'_>>, linear: &Linear<Flex>) -> Vec<f32> {
    let Some(matrix) = linear.matrix.as_packed() else { return Vec::new() };
    work.prepare(x, norm, &[matrix]);
    let mut out = vec![0.0; x.len() / matrix.columns() * matrix.rows()];
    let bias = bias(linear);
    let product = Product { matrix, bias: bias.as_deref(), finish: Finish::Set, rows: None, out: Parts::new(&mut out) };
    multiply(&mut work.pool, work.isa, &work.prepared, &[product]);
    out
}

/// Each head's rows, head after head, times the head's matrix. All matrices have the same shape.
fn each_head(work: &mut Workspace, x: &[f32], matrices: &[&PackedMatrix]) -> Vec<f32> {
    let Some(first) = matrices.first() else { return Vec::new() };
    let rows = x.len() / first.columns() / matrices.len();
    let runs: Vec<std::ops::Range<usize>> = (0..matrices.len()).map(|head| head * rows..(head + 1) * rows).collect();
    work.prepare_runs(x, None, matrices, &runs);
    let mut out = vec![0.0; rows * matrices.len() * first.rows()];
    let outs = out.chunks_mut((rows * first.rows()).max(1));
    let products: Vec<_> = (matrices.iter().zip(outs).zip(&runs))
        .map(|((matrix, out), run)| Product { matrix, bias: None, finish: Finish::Set, rows: Some(run.clone()), out: Parts::new(out) })
        .collect();
    multiply(&mut work.pool, work.isa, &work.prepared, &products);
    out
}
