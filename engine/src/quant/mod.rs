//! Blocks: how ggml packs weights, and the way back to plain numbers.
//!
//! A row of a matrix is a sequence of blocks of one [`BlockType`]; a block holds a fixed number of elements with
//! their common scales. The formats are those of ggml (`ggml-common.h`, `ggml-quants.c`). Everything here is portable
//! and exact, one rounding per multiplication and addition and no fused operation, so it can serve as the reference
//! for faster kernels.

mod block_type;
mod dequantise;
mod grids;
mod k_quants;
mod levels;
mod quantise;

pub use block_type::BlockType;
pub use dequantise::{QuantError, dequantise};
pub(crate) use levels::{Coded, LONGEST, levels};
pub use quantise::quantise;

#[cfg(test)]
mod tests;
