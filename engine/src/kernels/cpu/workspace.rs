//! What kernels work with besides their arguments: threads, an instruction set, memory that is kept.

use super::attention::Scratch;
use super::multiply::Prepared;
use super::packed::PackedMatrix;
use super::pool::Pool;
use super::simd::Isa;

/// Threads, instruction set and scratch memory of a stage's host side, and what it has copied to a device for the current step.
pub struct Workspace {
    pub(super) pool: Pool,
    pub(super) isa: Isa,
    pub(super) prepared: Prepared,
    pub(super) scratch: Vec<Scratch>,
    /// Of devices other than the host's processor.
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
            prepared: Prepared::default(),
            scratch: Vec::new(),
            #[cfg(gpu)]
            steps: crate::kernels::gpu::Steps::default(),
        })
    }

    /// The instruction set's name, for logs.
    pub fn instruction_set(&self) -> &'static str {
        self.isa.name()
    }

    /// Makes rows ready for all of `matrices`, which have the same number of columns.
    pub(super) fn prepare(&mut self, x: &[f32], norm: Option<(&[f32], f32)>, matrices: &[&PackedMatrix]) {
        let columns = matrices.first().map_or(1, |matrix| matrix.columns());
        let in_blocks = matrices.iter().any(|matrix| matrix.takes_blocks());
        let as_floats = matrices.iter().any(|matrix| !matrix.takes_blocks());
        self.prepared.fill(&mut self.pool, self.isa, x, columns, norm, (in_blocks, as_floats));
    }
}

impl std::fmt::Debug for Workspace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workspace").field("threads", &self.pool.threads()).field("isa", &self.isa.name()).finish_non_exhaustive()
    }
}
