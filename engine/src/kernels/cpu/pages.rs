//! Keys and values of one layer, in pages of half-precision numbers.
//!
//! A page holds [`PAGE_TOKENS`] positions of one sequence. Within it each head has its keys with the positions next to
//! each other (`[element][position]`), so that sixteen scores are computed at once, and its values with the elements next
//! to each other (`[position][element]`, filled up to whole vectors), so that sixteen elements are summed at once.

use std::ops::Range;

use memmap2::MmapMut;

use super::super::KvShape;
use super::simd::LANES;
use crate::kernels::PAGE_TOKENS;

/// One layer's pages.
#[derive(Debug)]
pub(crate) struct Pages {
    shape: KvShape,
    keys: MmapMut,
    values: MmapMut,
}

impl Pages {
    /// Memory of one page, in bytes.
    pub(crate) fn page_bytes(shape: &KvShape) -> u64 {
        let elements = key_head_len(shape) + value_head_len(shape);
        (shape.kv_heads * elements * size_of::<u16>()) as u64
    }

    /// `shape.pages` pages. Their memory is taken from the system as they are written to.
    ///
    /// # Errors
    /// When so much cannot be had.
    pub(crate) fn new(shape: KvShape) -> std::io::Result<Self> {
        let heads = shape.pages.saturating_mul(shape.kv_heads);
        let zeroed = |head_len: usize| MmapMut::map_anon(heads.saturating_mul(head_len).saturating_mul(size_of::<u16>()));
        Ok(Self { shape, keys: zeroed(key_head_len(&shape))?, values: zeroed(value_head_len(&shape))? })
    }

    /// All keys and all values, as half-precision bits.
    #[inline(always)]
    pub(super) fn halves(&self) -> (&[u16], &[u16]) {
        (bytemuck::cast_slice(&self.keys), bytemuck::cast_slice(&self.values))
    }

    /// The same, to write to.
    pub(super) fn halves_mut(&mut self) -> (&mut [u16], &mut [u16]) {
        (bytemuck::cast_slice_mut(&mut self.keys), bytemuck::cast_slice_mut(&mut self.values))
    }

    /// Sizes.
    pub(crate) fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Memory, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.keys.len() + self.values.len()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_begin_as_zeros_of_the_size_that_was_said() {
        let shape = KvShape { kv_heads: 3, key_length: 20, value_length: 24, pages: 5 };
        let pages = Pages::new(shape).unwrap();
        assert_eq!(pages.bytes() as u64, 5 * Pages::page_bytes(&shape));
        let (keys, values) = pages.halves();
        assert!(keys.iter().chain(values).all(|half| *half == 0));
        assert_eq!(Pages::key_head(&shape, 4, 2).end, keys.len());
        assert_eq!(Pages::value_head(&shape, 4, 2).end, values.len());
    }

    #[test]
    fn more_than_there_is_is_refused() {
        let shape = KvShape { kv_heads: 8, key_length: 128, value_length: 128, pages: usize::MAX / 2 };
        Pages::new(shape).unwrap_err();
    }
}
