//! Memory for weights: large chunks from the system, in huge pages where it has them.
//!
//! A token reads all weights once. With pages of four kilobytes a third of that time goes into looking up where they are;
//! matrices of small models are smaller than a huge page, so they lie together in chunks. A chunk takes memory as it is written
//! to, and is given back when the last matrix in it goes.

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

use bytemuck::Pod;
use memmap2::{MmapMut, MmapRaw};

/// Addresses that are taken from the system at once; memory follows as it is used.
const CHUNK: usize = 64 << 20;
/// A huge page of most systems.
const HUGE: usize = 2 << 20;
/// A line of the processor's caches.
const LINE: usize = 64;

/// Where weights are put.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    current: Option<Chunk>,
}

#[derive(Debug)]
struct Chunk {
    map: Arc<MmapRaw>,
    /// All before this offset is handed out.
    used: usize,
}

impl Chunk {
    fn new(bytes: usize) -> io::Result<Self> {
        let too_large = || io::Error::from(io::ErrorKind::OutOfMemory);
        let map = MmapMut::map_anon(bytes.checked_add(HUGE).ok_or_else(too_large)?)?;
        // It is advice: without it everything works, more slowly.
        #[cfg(target_os = "linux")]
        map.advise(memmap2::Advice::HugePage).unwrap_or_default();
        let used = map.as_ptr().align_offset(HUGE).min(HUGE);
        Ok(Self { map: Arc::new(map.into()), used })
    }

    fn left(&self) -> usize {
        self.map.len() - self.used
    }

    /// The next `bytes`, from the start of a cache line on; `None` if there are not so many.
    fn take(&mut self, bytes: usize) -> Option<(Arc<MmapRaw>, usize)> {
        let start = self.used.next_multiple_of(LINE);
        let end = start.checked_add(bytes)?;
        (end <= self.map.len()).then(|| {
            self.used = end;
            (Arc::clone(&self.map), start)
        })
    }
}

impl Memory {
    /// `len` values, all zero bits at first, as `fill` leaves them.
    ///
    /// # Errors
    /// When the system has no memory.
    pub(crate) fn filled<T: Pod>(&mut self, len: usize, fill: impl FnOnce(&mut [T])) -> io::Result<Piece<T>> {
        const { assert!(align_of::<T>() <= LINE) };
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let (map, start) = match self.current.as_mut().and_then(|chunk| chunk.take(bytes)) {
            Some(taken) => taken,
            None => {
                let mut chunk = Chunk::new(bytes.max(CHUNK))?;
                let taken = chunk.take(bytes).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
                if self.current.as_ref().is_none_or(|current| current.left() < chunk.left()) {
                    self.current = Some(chunk);
                }
                taken
            }
        };
        // SAFETY: `start..start + bytes` is within the map, which `map` keeps alive, and is handed out only once, here, so nothing
        // else refers to it. Its start is aligned to a cache line: maps begin at pages. It is initialised: the
        // system gives zeros, which are values of `T`, as all patterns of bits are.
        fill(unsafe { std::slice::from_raw_parts_mut(map.as_mut_ptr().add(start).cast::<T>(), len) });
        Ok(Piece { map, start, len, values: PhantomData })
    }
}

/// Values in a chunk. They do not change any more; copies share them.
#[derive(Clone)]
pub(crate) struct Piece<T> {
    map: Arc<MmapRaw>,
    /// In bytes.
    start: usize,
    len: usize,
    values: PhantomData<T>,
}

impl<T: Pod> Deref for Piece<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: `Memory::filled` made this of a part of the map that holds `len` values, aligned and initialised; since then nobody writes
        // to it, and `map` keeps it alive.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(self.start).cast::<T>(), self.len) }
    }
}

impl<T> fmt::Debug for Piece<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Piece").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_apart_and_begin_as_zeros() {
        let mut memory = Memory::default();
        let lengths = [1, 63, 0, 64, 5000, CHUNK / 4, 17, CHUNK / 2, 12, CHUNK, 8];
        let pieces: Vec<Piece<u32>> = (lengths.iter().enumerate())
            .map(|(i, &len)| {
                let fill = |values: &mut [u32]| {
                    assert!(values.iter().all(|value| *value == 0));
                    values.fill(i as u32 + 1);
                };
                memory.filled(len, fill).unwrap()
            })
            .collect();
        drop(memory);
        for ((i, piece), len) in pieces.iter().enumerate().zip(lengths) {
            assert_eq!(piece.len(), len);
            assert!(piece.iter().all(|value| *value == i as u32 + 1));
            assert_eq!(piece.as_ptr() as usize % LINE, 0);
        }
    }

    #[test]
    fn small_pieces_share_a_chunk_and_large_ones_leave_it_in_use() {
        let mut memory = Memory::default();
        let mut piece = |len| memory.filled::<u8>(len, |_| {}).unwrap();
        let (first, large, second) = (piece(100), piece(2 * CHUNK), piece(100));
        assert!(Arc::ptr_eq(&first.map, &second.map));
        assert!(!Arc::ptr_eq(&first.map, &large.map));
        let copy = first.clone();
        assert_eq!(copy.as_ptr(), first.as_ptr());
    }

    #[test]
    fn more_than_there_is_is_refused() {
        let mut memory = Memory::default();
        for len in [usize::MAX, usize::MAX / 8, usize::MAX / 16] {
            memory.filled::<u64>(len, |_| {}).unwrap_err();
        }
        memory.filled::<u64>(1, |_| {}).unwrap();
    }
}
