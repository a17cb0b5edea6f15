//! What kernels work with besides their arguments: threads, an instruction set, memory that is kept.

use super::attention::Scratch;
use super::buffers::Buffers;
use super::math::{RowNorm, normalise};
use super::memory::Memory;
use super::multiply::{Prepared, Rows, each_share};
use super::packed::PackedMatrix;
use super::pool::{Parts, Pool};
use super::simd::{Isa, Op, Simd};

/// Threads, instruction set and scratch memory of a stage's host side, and what it has copied to a device for the current step.
pub struct Workspace {
    pub(super) pool: Pool,
    pub(super) isa: Isa,
    /// Where the stage's weights are put.
    pub(super) memory: Memory,
    pub(super) prepared: Prepared,
    pub(super) buffers: Buffers,
    pub(super) scratch: Vec<Scratch>,
    /// What is copied to devices other than the host's processor.
    #[cfg(gpu)]
    pub(in crate::kernels) steps: crate::kernels::gpu::Steps,
}

impl Workspace {
    /// A workspace with so many compute threads, the caller's included, and the best instruction set there is.
    ///
    /// # Errors
    /// When the system gives no more threads.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        Self::with(threads, Isa::detect())
    }

    /// The same with a given instruction set.
    pub(crate) fn with(threads: usize, isa: Isa) -> std::io::Result<Self> {
        Ok(Self {
            pool: Pool::new(threads)?,
            isa,
            memory: Memory::default(),
            prepared: Prepared::default(),
            buffers: Buffers::default(),
            scratch: Vec::new(),
            #[cfg(gpu)]
            steps: crate::kernels::gpu::Steps::default(),
        })
    }

    /// The instruction set's name, for logs.
    pub fn instruction_set(&self) -> &'static str {
        self.isa.name()
    }

    /// Rows normalised, each as long as the norm.
    pub(super) fn normalised(&mut self, x: &[f32], norm: RowNorm<'_>) -> Vec<f32> {
        let columns = norm.weight.len();
        let mut out = vec![0.0; x.len()];
        let parts = Parts::new(&mut out);
        let (isa, rows) = (self.isa, x.len() / columns);
        each_share(&mut self.pool, rows, rows > 8, |mine| {
            let range = mine.start * columns..mine.end * columns;
            // SAFETY: shares of rows are disjoint.
            isa.run(Normalise { x: &x[range.clone()], norm, out: unsafe { parts.part(range) } });
        });
        out
    }

    /// Makes rows ready for all of `matrices`, which have the same number of columns.
    pub(super) fn prepare(&mut self, x: &[f32], norm: Option<RowNorm<'_>>, matrices: &[&PackedMatrix]) {
        let columns = matrices.first().map_or(1, |matrix| matrix.columns());
        self.prepare_runs(x, norm, matrices, std::slice::from_ref(&(0..x.len() / columns)));
    }

    /// The same for products that take one of these runs of rows each; the runs follow each other.
    pub(super) fn prepare_runs(
        &mut self,
        x: &[f32],
        norm: Option<RowNorm<'_>>,
        matrices: &[&PackedMatrix],
        runs: &[std::ops::Range<usize>],
    ) {
        let columns = matrices.first().map_or(1, |matrix| matrix.columns());
        let in_blocks = matrices.iter().any(|matrix| matrix.takes_blocks());
        let as_floats = matrices.iter().any(|matrix| !matrix.takes_blocks());
        self.prepared.fill(&mut self.pool, self.isa, &Rows { x, columns, norm, runs }, (in_blocks, as_floats));
    }
}

struct Normalise<'a> {
    x: &'a [f32],
    norm: RowNorm<'a>,
    out: &'a mut [f32],
}

impl Op for Normalise<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        let columns = self.norm.weight.len();
        for (row, out) in self.x.chunks_exact(columns).zip(self.out.chunks_exact_mut(columns)) {
            normalise(s, row, self.norm, out);
        }
    }
}

impl std::fmt::Debug for Workspace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workspace").field("threads", &self.pool.threads()).field("isa", &self.isa.name()).finish_non_exhaustive()
    }
}
