//! A stage: a contiguous range of a model's layers on one device, with the KV pages of the sequences that run
//! through it.
//!
//! A stage knows neither networks nor time. Whoever owns it hands it rows and an input buffer, and gets an output
//! buffer filled: activations for the next stage, or logits from the last one.

mod decoder;
mod kv;
mod load;
#[cfg(test)]
mod tests;

pub use load::{LoadError, load, load_to};

use std::ops::Range;

use crate::device::DeviceError;

/// A sequence, as the scheduler numbers it. Numbers are reused only after the sequence was freed at every stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u32);

/// One row of a step: one token of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Whose.
    pub sequence: SequenceId,
    /// Its place in the sequence, from zero. Rows of a sequence come in order, without gaps, each one past what the
    /// stage has cached; or back at an earlier position, which forgets what was cached from there on (not in the middle of a page
    /// that is [shared](Stage::share)).
    pub position: u32,
    /// The token. Only the first stage looks at it.
    pub token: u32,
    /// Whether the last stage gives logits for it.
    pub sample: bool,
}

/// Which part of a model a stage holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageSpec {
    /// The layers, out of `0..card.layers`. A range that starts at 0 embeds tokens too; one that ends at the last
    /// layer has the output head too.
    pub layers: Range<u32>,
}

/// What a stage may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageOptions {
    /// Compute threads.
    pub threads: usize,
    /// Memory for keys and values, in bytes, as leased.
    pub kv_bytes: u64,
    /// Most rows of one step.
    pub rows_max: usize,
    /// Longest sequence, in tokens.
    pub context_tokens: u32,
}

/// What goes into a step.
#[derive(Debug, Clone, Copy)]
pub enum Input<'a> {
    /// The first stage embeds the rows' tokens.
    Tokens,
    /// Output of the stage before: `rows × hidden` elements, row-major.
    Activations(&'a [f32]),
}

/// Why a step was not run. The cache is then as before, unless the device failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// No KV page is left.
    #[error("the stage's KV memory is full: {needed} more pages needed, {free} free")]
    KvFull {
        /// Pages that the step needs.
        needed: usize,
        /// Pages that are free.
        free: usize,
    },
    /// The rows, input or output do not fit the stage; the text says how.
    #[error("the step does not fit the stage: {0}")]
    Malformed(String),
    /// The device failed. The stage is of no use any more.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A loaded stage. Not shared: one device thread owns it.
pub trait Stage: Send {
    /// Elements of an activation row.
    fn hidden(&self) -> usize;

    /// Entries of the vocabulary.
    fn vocabulary(&self) -> usize;

    /// Whether it embeds tokens.
    fn is_first(&self) -> bool;

    /// Whether it gives logits.
    fn is_last(&self) -> bool;

    /// Runs `rows` through the stage's layers and appends their keys and values to the cache.
    ///
    /// `output` is `rows × hidden` elements, or on the last stage `sampled rows × vocabulary`, in row order.
    ///
    /// # Errors
    /// [`StepError`]; nothing was changed then, unless the device failed.
    fn step(&mut self, rows: &[Row], input: Input<'_>, output: &mut [f32]) -> Result<(), StepError>;

    /// Lets `to`, a new sequence, begin with the first `tokens` positions of `from`, without running them: both hold the same pages, which
    /// nobody writes to any more. `tokens` are whole pages.
    ///
    /// # Errors
    /// [`StepError::Malformed`] if `from` has not that many, `to` has begun already, or these are no whole pages; nothing was changed then.
    fn share(&mut self, from: SequenceId, to: SequenceId, tokens: usize) -> Result<(), StepError>;

    /// Forgets a sequence and gives its pages back, as far as no other sequence holds them. Unknown ones are ignored.
    fn free(&mut self, sequence: SequenceId);

    /// Tokens of one KV page.
    fn page_tokens(&self) -> usize;

    /// Pages in all, and pages that are free.
    fn pages(&self) -> (usize, usize);

    /// Memory of the loaded weights in bytes, as they are held.
    fn weight_bytes(&self) -> u64;
}
