//! Rotary embedding, writing keys and values to pages, and attention over them.
//!
//! What a query gets depends on the query and on the keys and values at the positions that it sees, never on how rows came
//! together in steps: scores are summed along the elements of a head, the softmax's denominator in sixteen lanes by
//! position modulo sixteen, and the values along the positions, each in that order. A position that a query does not see
//! adds an exact zero.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::math::{RowNorm, exp, normalise_in_place, padded, softcap};
use super::multiply::each_share;
use super::pages::Pages;
use super::pool::{Parts, Pool};
use super::simd::{Isa, LANES, Op, Simd};
use crate::config::RopeLayout;
use crate::kernels::{AttentionShape, Batch, KvShape, PAGE_TOKENS, Rotation, Run};

/// Queries that share the reading of a key or value.
const QUERIES: usize = 6;
/// Rows of a sequence that are one piece of work.
const ROWS: usize = 4;
/// The largest half-precision number: larger keys and values are held at it, so that all that is stored is finite.
const LARGEST_HALF: f32 = 65_504.0;
/// e to less than this is taken for zero.
const SMALLEST_EXPONENT: f32 = -87.0;

/// One layer's attention over a step's rows.
pub(crate) struct Attention<'a> {
    /// Heads, scale, window.
    pub(crate) shape: &'a AttentionShape,
    /// A score for each head that gives nothing.
    pub(crate) sinks: Option<&'a [f32]>,
    /// Norm of query heads.
    pub(crate) query_norm: Option<RowNorm<'a>>,
    /// Norm of key heads.
    pub(crate) key_norm: Option<RowNorm<'a>>,
    /// Angles of the rows.
    pub(crate) rotation: &'a Rotation,
    /// The rows' places.
    pub(crate) batch: &'a Batch,
    /// Rows of `heads · key_length`.
    pub(crate) queries: &'a [f32],
    /// Rows of `kv_heads · key_length`.
    pub(crate) keys: &'a [f32],
    /// Rows of `kv_heads · value_length`.
    pub(crate) values: &'a [f32],
}

/// Memory of one thread, kept from step to step.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    queries: Vec<f32>,
    scores: Vec<f32>,
}

impl Attention<'_> {
    /// Writes the rows' keys and values to their pages, then what each row's heads attend to into `out`: rows of
    /// `heads · value_length`.
    pub(crate) fn run(&self, pool: &mut Pool, isa: Isa, scratch: &mut Vec<Scratch>, pages: &mut Pages, out: &mut [f32]) {
        let kv = *pages.shape();
        let runs = self.batch.runs();
        {
            let (keys, values) = pages.halves_mut();
            let (keys, values) = (Parts::new(keys), Parts::new(values));
            let units = runs.len() * kv.kv_heads;
            // A row or two are written faster than another thread is told to.
            each_share(pool, units, self.batch.positions().len() > 4, |mine| {
                for unit in mine {
                    let (run, head) = (&runs[unit / kv.kv_heads], unit % kv.kv_heads);
                    isa.run(WriteHead { attention: self, kv: &kv, run, head, keys: &keys, values: &values });
                }
            });
        }
        // Pieces of work: some rows of a run with one key head.
        let mut pieces = Vec::new();
        for run in runs {
            for first in (0..run.rows().len()).step_by(ROWS) {
                let rows = first..run.rows().len().min(first + ROWS);
                pieces.extend((0..kv.kv_heads).map(|head| Piece { run, rows: rows.clone(), head }));
            }
        }
        scratch.resize_with(pool.threads(), Scratch::default);
        let (scratch, out) = (Parts::new(scratch), Parts::new(out));
        let next = AtomicUsize::new(0);
        let pages = &*pages;
        let attend = |worker: usize| {
            // SAFETY: each thread takes its own.
            let scratch = unsafe { scratch.part(worker..worker + 1) };
            while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                isa.run(AttendPiece { attention: self, piece, pages, scratch: &mut scratch[0], out: &out });
            }
        };
        if pieces.len() > 1 { pool.run(&attend) } else { attend(0) }
    }
}

struct Piece<'a> {
    run: &'a Run,
    /// Of the run.
    rows: Range<usize>,
    /// Key and value head.
    head: usize,
}

/// Normalises and turns a head, as the architecture asks.
#[inline(always)]
fn place_head<S: Simd>(s: S, head: &mut [f32], norm: Option<RowNorm<'_>>, rotation: &Rotation, row: usize) {
    if let Some(norm) = norm {
        normalise_in_place(s, head, norm);
    }
    let (cos, sin) = rotation.row(row);
    let pairs = cos.len();
    for (i, (cos, sin)) in cos.iter().zip(sin).enumerate() {
        let (first, second) = match rotation.layout() {
            RopeLayout::Interleaved => (2 * i, 2 * i + 1),
            RopeLayout::Halves => (i, pairs + i),
        };
        let (a, b) = (head[first], head[second]);
        head[first] = a * cos - b * sin;
        head[second] = a * sin + b * cos;
    }
}

struct WriteHead<'a> {
    attention: &'a Attention<'a>,
    kv: &'a KvShape,
    run: &'a Run,
    head: usize,
    keys: &'a Parts<'a, u16>,
    values: &'a Parts<'a, u16>,
}

impl Op for WriteHead<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        let Self { attention, kv, run, head, .. } = self;
        let (key_length, value_length) = (kv.key_length, kv.value_length);
        let bound = |v: S::F| s.min(s.max(v, s.splat(-LARGEST_HALF)), s.splat(LARGEST_HALF));
        let mut key = vec![0.0; key_length.next_multiple_of(LANES)];
        for (i, &row) in run.rows().iter().enumerate() {
            let position = run.start() + i;
            let (page, slot) = (run.page(position), position % PAGE_TOKENS);
            // SAFETY: a page is one sequence's, and this thread alone writes this head of this run.
            let (keys, values) =
                unsafe { (self.keys.part(Pages::key_head(kv, page, head)), self.values.part(Pages::value_head(kv, page, head))) };
            key[..key_length].copy_from_slice(&attention.keys[(row * kv.kv_heads + head) * key_length..][..key_length]);
            place_head(s, &mut key[..key_length], attention.key_norm, attention.rotation, row);
            for (chunk, first) in key.as_chunks::<LANES>().0.iter().zip((0..).step_by(LANES)) {
                let mut halves = [0u16; LANES];
                s.store_half(bound(s.load(chunk)), &mut halves);
                for (half, element) in halves.iter().zip(first..key_length) {
                    keys[element * PAGE_TOKENS + slot] = *half;
                }
            }
            let value = &attention.values[(row * kv.kv_heads + head) * value_length..][..value_length];
            let stride = Pages::value_stride(kv);
            let (to, _) = values[slot * stride..][..stride].as_chunks_mut::<LANES>();
            for (to, from) in to.iter_mut().zip(value.chunks(LANES)) {
                s.store_half(bound(s.load(&padded(from))), to);
            }
        }
    }
}

struct AttendPiece<'a> {
    attention: &'a Attention<'a>,
    piece: &'a Piece<'a>,
    pages: &'a Pages,
    scratch: &'a mut Scratch,
    out: &'a Parts<'a, f32>,
}

/// One query: a row's head.
#[derive(Clone, Copy, Default)]
struct Query {
    row: usize,
    head: usize,
    /// First position that it sees.
    start: usize,
    /// The position after the last that it sees.
    end: usize,
}

impl Op for AttendPiece<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<S: Simd>(mut self, s: S) {
        let Self { attention, piece, .. } = self;
        let shape = attention.shape;
        let share = shape.heads / self.pages.shape().kv_heads;
        // Queries in order of head, then row: those of one head read the same length of keys, nearly.
        let rows = piece.rows.len();
        let mut first = 0;
        while first < share * rows {
            let count = QUERIES.min(share * rows - first);
            let mut queries = [Query::default(); QUERIES];
            for (j, query) in queries[..count].iter_mut().enumerate() {
                let (head, row) = ((first + j) / rows, piece.rows.start + (first + j) % rows);
                let end = piece.run.start() + row + 1;
                let start = shape.window.map_or(0, |window| end.saturating_sub(window));
                *query = Query { row: piece.run.rows()[row], head: piece.head * share + head, start, end };
            }
            // As many sums at a time as hide the latency of a multiply-add and still fit sixteen registers of half a vector.
            match count {
                1 => attend::<S, 1, 2>(s, &mut self, [queries[0]]),
                2 => attend::<S, 2, 2>(s, &mut self, [queries[0], queries[1]]),
                3 => attend::<S, 3, 1>(s, &mut self, [queries[0], queries[1], queries[2]]),
                4 => attend::<S, 4, 1>(s, &mut self, [queries[0], queries[1], queries[2], queries[3]]),
                5 => attend::<S, 5, 1>(s, &mut self, [queries[0], queries[1], queries[2], queries[3], queries[4]]),
                _ => attend::<S, QUERIES, 1>(s, &mut self, queries),
            }
            first += count;
        }
    }
}

/// Attention of `M` queries of one key head, with `W` vectors of scores or values at a time.
#[inline(always)]
fn attend<S: Simd, const M: usize, const W: usize>(s: S, work: &mut AttendPiece<'_>, queries: [Query; M]) {
    let AttendPiece { attention, piece, pages, scratch, out } = work;
    let (kv, shape, run) = (pages.shape(), attention.shape, piece.run);
    let (all_keys, all_values) = pages.halves();
    let key_length = kv.key_length;
    let start = queries.iter().map(|query| query.start).min().unwrap_or(0);
    let end = queries.iter().map(|query| query.end).max().unwrap_or(0);
    let origin = start / PAGE_TOKENS * PAGE_TOKENS;
    let len = (end - origin).next_multiple_of(PAGE_TOKENS);

    // One element of all queries after the other.
    scratch.queries.resize((M + 1) * key_length, 0.0);
    if scratch.scores.len() < M * len {
        scratch.scores.resize(M * len, 0.0);
    }
    let (placed, one) = scratch.queries.split_at_mut(M * key_length);
    let (placed, _) = placed.as_chunks_mut::<M>();
    for (j, query) in queries.iter().enumerate() {
        one.copy_from_slice(&attention.queries[(query.row * shape.heads + query.head) * key_length..][..key_length]);
        place_head(s, one, attention.query_norm, attention.rotation, query.row);
        for (element, placed) in one.iter().zip(placed.iter_mut()) {
            placed[j] = *element;
        }
    }

    // A query's own position is the last that it sees.
    let scales = queries.map(|query| s.splat(shape.scale_at(query.end - 1)));
    for base in (0..len).step_by(PAGE_TOKENS) {
        let keys = &all_keys[Pages::key_head(kv, run.page(origin + base), piece.head)];
        let (keys, _) = keys.as_chunks::<PAGE_TOKENS>();
        for first in (0..PAGE_TOKENS / LANES).step_by(W) {
            let mut sums = [[s.splat(0.0); W]; M];
            for (query, keys) in placed.iter().zip(keys) {
                let (keys, _) = keys.as_chunks::<LANES>();
                for w in 0..W {
                    let key = s.load_half(&keys[first + w]);
                    for j in 0..M {
                        sums[j][w] = s.fma(s.splat(query[j]), key, sums[j][w]);
                    }
                }
            }
            for j in 0..M {
                let to = &mut scratch.scores[j * len + base + first * LANES..][..W * LANES];
                for (to, sum) in to.as_chunks_mut::<LANES>().0.iter_mut().zip(sums[j]) {
                    let score = s.mul(sum, scales[j]);
                    s.store(shape.softcap.map_or(score, |cap| softcap(s, score, cap)), to);
                }
            }
        }
    }

    let mut inverse = [0.0; M];
    for j in 0..M {
        let scores = &mut scratch.scores[j * len..][..len];
        scores[..queries[j].start - origin].fill(f32::NEG_INFINITY);
        scores[queries[j].end - origin..].fill(f32::NEG_INFINITY);
        let (scores, _) = scores.as_chunks_mut::<LANES>();
        let mut largest = s.splat(f32::NEG_INFINITY);
        for scores in scores.iter() {
            largest = s.max(largest, s.load(scores));
        }
        let mut largest = s.max_of(largest);
        let sink = attention.sinks.map(|sinks| sinks[queries[j].head]);
        if let Some(sink) = sink.filter(|sink| *sink > largest) {
            largest = sink;
        }
        let top = largest;
        let largest = s.splat(largest);
        let mut sum = s.splat(0.0);
        for scores in scores {
            let exponent = s.sub(s.load(scores), largest);
            let weight = s.where_above(exponent, s.splat(SMALLEST_EXPONENT), exp(s, exponent));
            sum = s.add(sum, weight);
            s.store(weight, scores);
        }
        let mut sum = s.sum_of(sum);
        if let Some(sink) = sink {
            let mut lanes = [0.0; LANES];
            s.store(exp(s, s.splat(sink - top)), &mut lanes);
            sum += lanes[0];
        }
        inverse[j] = 1.0 / sum;
    }

    let mut weights = [&scratch.scores.as_chunks().0[..0]; M];
    for (j, weights) in weights.iter_mut().enumerate() {
        *weights = scratch.scores[j * len..][..len].as_chunks::<PAGE_TOKENS>().0;
    }
    let vectors = Pages::value_stride(kv) / LANES;
    let mut first = 0;
    while first < vectors {
        let mut sums = [[s.splat(0.0); W]; M];
        let width = W.min(vectors - first);
        for page in 0..len / PAGE_TOKENS {
            let values = &all_values[Pages::value_head(kv, run.page(origin + page * PAGE_TOKENS), piece.head)];
            let (values, _) = values.as_chunks::<LANES>();
            let weights = weights.map(|weights| &weights[page]);
            // All of the page: the weight of a position that is not seen is zero.
            for (slot, values) in (0..PAGE_TOKENS).zip(values.chunks_exact(vectors)) {
                let values = &values[first..first + width];
                for (w, value) in values.iter().enumerate().take(W) {
                    let value = s.load_half(value);
                    for j in 0..M {
                        sums[j][w] = s.fma(s.splat(weights[j][slot]), value, sums[j][w]);
                    }
                }
            }
        }
        for j in 0..M {
            for (w, sum) in sums[j].into_iter().enumerate().take(width) {
                let from = (first + w) * LANES;
                let count = LANES.min(kv.value_length.saturating_sub(from));
                let at = (queries[j].row * shape.heads + queries[j].head) * kv.value_length + from;
                let mut lanes = [0.0; LANES];
                s.store(s.mul(sum, s.splat(inverse[j])), &mut lanes);
                // SAFETY: a query is in one piece of work, and its elements are written by no other.
                unsafe { out.part(at..at + count) }.copy_from_slice(&lanes[..count]);
            }
        }
        first += W;
    }
}
