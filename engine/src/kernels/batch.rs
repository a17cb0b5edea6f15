//! Where the rows of a step belong.

use super::PAGE_TOKENS;

/// The rows of one sequence in a step: positions that follow each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    rows: Vec<usize>,
    start: usize,
    pages: Vec<u32>,
}

impl Run {
    /// The rows' places in the step, in order of position.
    pub fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// Position of the first row.
    pub fn start(&self) -> usize {
        self.start
    }

    /// The position after the last row.
    pub fn end(&self) -> usize {
        self.start + self.rows.len()
    }

    /// The page that holds a position before [`end`](Self::end).
    #[inline(always)]
    pub fn page(&self, position: usize) -> u32 {
        self.pages[position / PAGE_TOKENS]
    }
}

/// All rows of a step.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Batch {
    positions: Vec<usize>,
    runs: Vec<Run>,
}

impl Batch {
    /// An empty step.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the rows of one sequence. `rows` are their places in the step, `start` the position of the first, and `pages` the sequence's
    /// pages from position 0 on, which must reach to the last row's position.
    pub fn push(&mut self, rows: Vec<usize>, start: usize, pages: Vec<u32>) {
        debug_assert!(pages.len() * PAGE_TOKENS >= start + rows.len());
        for (i, &row) in rows.iter().enumerate() {
            if self.positions.len() <= row {
                self.positions.resize(row + 1, 0);
            }
            self.positions[row] = start + i;
        }
        self.runs.push(Run { rows, start, pages });
    }

    /// Each row's position in its sequence.
    pub fn positions(&self) -> &[usize] {
        &self.positions
    }

    /// Rows by sequence.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }
}
