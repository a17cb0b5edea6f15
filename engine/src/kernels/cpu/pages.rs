//! Keys and values of one layer, in pages of half-precision numbers.
//!
//! A page holds [`PAGE_TOKENS`] positions of one sequence. Within it each head has its keys with the positions next to
//! each other (`[element][position]`), so that sixteen scores are computed at once, and its values with the elements next
//! to each other (`[position][element]`, filled up to whole vectors), so that sixteen elements are summed at once.

use std::ops::Range;

use super::super::KvShape;
use super::simd::LANES;
use crate::kernels::PAGE_TOKENS;

/// One layer's pages.
#[derive(Debug)]
pub(crate) struct Pages {
    shape: KvShape,
    /// Half-precision bits.
    pub(super) keys: Vec<u16>,
    /// Half-precision bits.
    pub(super) values: Vec<u16>,
}

impl Pages {
    /// Memory of one page, in bytes.
    pub(crate) fn page_bytes(shape: &KvShape) -> u64 {
        let elements = key_head_len(shape) + value_head_len(shape);
        (shape.kv_heads * elements * size_of::<u16>()) as u64
    }

    /// `shape.pages` pages. The memory is the system's zero pages until it is written to.
    ///
    /// # Errors
    /// When so much cannot be had.
    pub(crate) fn new(shape: KvShape) -> Result<Self, std::collections::TryReserveError> {
        let zeroed = |len: usize| -> Result<Vec<u16>, std::collections::TryReserveError> {
            // Asked for once with an answer, because the zeroed allocation has none.
            Vec::<u16>::new().try_reserve_exact(len)?;
            Ok(vec![0u16; len])
        };
        let heads = shape.pages.saturating_mul(shape.kv_heads);
        let keys = zeroed(heads.saturating_mul(key_head_len(&shape)))?;
        let values = zeroed(heads.saturating_mul(value_head_len(&shape)))?;
        Ok(Self { shape, keys, values })
    }

    /// Sizes.
    pub(crate) fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Memory, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(self.keys.as_slice()) + size_of_val(self.values.as_slice())
    }

    /// Where the keys of a head lie in a page.
    #[inline(always)]
    pub(super) fn key_head(shape: &KvShape, page: u32, head: usize) -> Range<usize> {
        let len = key_head_len(shape);
        let start = (page as usize * shape.kv_heads + head) * len;
        start..start + len
    }

    /// Where the values of a head lie in a page.
    #[inline(always)]
    pub(super) fn value_head(shape: &KvShape, page: u32, head: usize) -> Range<usize> {
        let len = value_head_len(shape);
        let start = (page as usize * shape.kv_heads + head) * len;
        start..start + len
    }

    /// Elements between one position's values and the next's.
    #[inline(always)]
    pub(super) fn value_stride(shape: &KvShape) -> usize {
        shape.value_length.next_multiple_of(LANES)
    }
}

fn key_head_len(shape: &KvShape) -> usize {
    shape.key_length * PAGE_TOKENS
}

fn value_head_len(shape: &KvShape) -> usize {
    Pages::value_stride(shape) * PAGE_TOKENS
}
