//! Page-aligned memory, carved into slots.
//!
//! A region is one mapping, so that a provider can register it once and, where it is backed by a memory file, share it
//! with another process. Its bytes are handed out as [`Slot`]s that never overlap: holding a slot is holding its memory.
//! Memory that is lent to other nodes is another kind, `lent`, with a memory file of its own for each lease.

mod lent;

use std::fmt;
use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};

pub(crate) use lent::{Lent, LentPages, WriteRefused, Writer};

/// A mapping of whole pages, zeroed, not yet carved.
pub struct Region {
    map: Arc<MmapRaw>,
    file: Option<Arc<std::fs::File>>,
}

/// Why a region could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// Nothing, or more than an address space holds, was asked for.
    #[error("a memory region of {count} × {bytes} bytes cannot exist; ask for at least 1 byte and fewer slots or smaller ones")]
    Size {
        /// How many pieces.
        count: usize,
        /// Bytes in each.
        bytes: usize,
    },
    /// The operating system has no memory, or no mapping, left.
    #[error("cannot map {bytes} bytes of memory: {source}; lend or use less, or raise the process's limits")]
    Map {
        /// Bytes asked for.
        bytes: usize,
        /// The system's words.
        source: std::io::Error,
    },
}

impl Region {
    /// Maps at least `bytes` zeroed bytes. Pages are taken from the machine as they are first touched.
    ///
    /// # Errors
    /// [`RegionError`] if the size is absurd or the system refuses.
    pub fn new(bytes: usize) -> Result<Self, RegionError> {
        let bytes = round_to_pages(bytes).filter(|bytes| *bytes > 0).ok_or(RegionError::Size { count: 1, bytes })?;
        let (map, file) = map(bytes).map_err(|source| RegionError::Map { bytes, source })?;
        Ok(Self { map: Arc::new(map), file })
    }

    /// Maps a region for `count` slots of `bytes` each and carves it. Slots begin at multiples of 64 bytes from the start.
    ///
    /// # Errors
    /// As [`Region::new`].
    pub fn slots(count: usize, bytes: usize) -> Result<Vec<Slot>, RegionError> {
        let absurd = RegionError::Size { count, bytes };
        let stride = bytes.checked_next_multiple_of(64).filter(|stride| *stride > 0);
        let Some(total) = stride.and_then(|stride| stride.checked_mul(count)) else { return Err(absurd) };
        if total == 0 {
            return Err(absurd);
        }
        Ok(Self::new(total)?.carve(count, bytes))
    }

    /// Length in bytes, a whole number of pages.
    pub fn bytes(&self) -> usize {
        self.map.len()
    }

    /// The memory file behind the region, where the platform has them: what another process would map.
    pub fn file(&self) -> Option<&std::fs::File> {
        self.file.as_deref()
    }

    /// Gives the region up for as many of `count` slots of `bytes` each as fit.
    pub fn carve(self, count: usize, bytes: usize) -> Vec<Slot> {
        let stride = bytes.next_multiple_of(64).max(64);
        (0..count.min(self.map.len() / stride)).map(|i| Slot { map: Arc::clone(&self.map), offset: i * stride, bytes }).collect()
    }

    /// Gives the region up as one slot.
    pub fn whole(self) -> Slot {
        let bytes = self.map.len();
        Slot { map: self.map, offset: 0, bytes }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("bytes", &self.map.len()).field("shareable", &self.file.is_some()).finish()
    }
}

/// A piece of a region that nobody else holds.
pub struct Slot {
    map: Arc<MmapRaw>,
    offset: usize,
    bytes: usize,
}

impl Slot {
    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Its bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: slots are only made by `Region::carve` and `Region::whole`, which consume the region (there is one
        // `Region` per mapping and it is not Clone) and give out ranges inside the mapping that do not overlap. The
        // mapping is readable, initialised by the kernel, and lives as long as `self.map`. `&self` keeps
        // `as_mut_slice` from being called meanwhile. The file behind it is unlinked and never handed to another
        // process while slots are carved from it by this crate.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(self.offset), self.bytes) }
    }

    /// Its bytes, to write.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`; the mapping is writable, and `&mut self` makes this the only reference to the range.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(self.offset), self.bytes) }
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("offset", &self.offset).field("bytes", &self.bytes).finish()
    }
}

fn round_to_pages(bytes: usize) -> Option<usize> {
    // A slice may not be longer than isize::MAX, and a mapping is seen as one.
    bytes.checked_next_multiple_of(page_bytes()).filter(|bytes| isize::try_from(*bytes).is_ok())
}

/// The machine's page: what mappings, and so leases, are whole multiples of.
#[cfg(unix)]
pub(crate) fn page_bytes() -> usize {
    rustix::param::page_size()
}

/// What mappings, and so leases, are whole multiples of: at least a page on any machine.
#[cfg(not(unix))]
pub(crate) fn page_bytes() -> usize {
    64 * 1024
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn map(bytes: usize) -> std::io::Result<(MmapRaw, Option<Arc<std::fs::File>>)> {
    let file: std::fs::File = rustix::fs::memfd_create("shoal region", rustix::fs::MemfdFlags::CLOEXEC)?.into();
    file.set_len(u64::try_from(bytes).map_err(std::io::Error::other)?)?;
    let map = MmapOptions::new().len(bytes).map_raw(&file)?;
    Ok((map, Some(Arc::new(file))))
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn map(bytes: usize) -> std::io::Result<(MmapRaw, Option<Arc<std::fs::File>>)> {
    Ok((MmapOptions::new().len(bytes).map_anon()?.into(), None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_zeroed_apart_and_aligned() {
        let mut slots = Region::slots(5, 100).unwrap();
        assert_eq!(slots.len(), 5);
        for (i, slot) in slots.iter_mut().enumerate() {
            assert_eq!(slot.as_slice(), [0; 100]);
            assert_eq!(slot.as_slice().as_ptr() as usize % 64, 0);
            slot.as_mut_slice().fill(i as u8 + 1);
        }
        for (i, slot) in slots.iter().enumerate() {
            assert!(slot.as_slice().iter().all(|byte| *byte == i as u8 + 1), "slot {i} was written through another");
        }
    }

    #[test]
    fn a_slot_outlives_its_region_and_moves_between_threads() {
        let mut slot = Region::new(1).unwrap().whole();
        assert_eq!(slot.len() % page_bytes(), 0);
        slot.as_mut_slice()[0] = 7;
        let slot = std::thread::spawn(move || slot).join().unwrap();
        assert_eq!(slot.as_slice()[0], 7);
        assert_eq!(*slot.as_slice().last().unwrap(), 0);
    }

    #[test]
    fn absurd_sizes_are_refused() {
        assert!(matches!(Region::new(0), Err(RegionError::Size { .. })));
        assert!(matches!(Region::new(usize::MAX), Err(RegionError::Size { .. })));
        assert!(matches!(Region::slots(usize::MAX, 64), Err(RegionError::Size { .. })));
        assert!(matches!(Region::slots(0, 64), Err(RegionError::Size { .. })));
        assert!(Region::new(1 << 62).is_err());
    }

    #[test]
    fn carving_never_gives_more_than_fits() {
        let region = Region::new(4096).unwrap();
        let fits = region.bytes() / 1024;
        assert_eq!(region.carve(usize::MAX, 1000).len(), fits);
    }
}
