//! Where a file's bytes are: mapped, or in memory.

use memmap2::Mmap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Bytes that do not change.
#[derive(Debug)]
pub(super) enum Source {
    /// A file.
    Mapped(Mmap),
    /// Held by us.
    Memory(Arc<[u8]>),
}

impl Source {
    /// Maps a file for reading.
    pub(super) fn map(path: &Path) -> io::Result<Source> {
        let file = File::open(path)?;
        let about = file.metadata()?;
        if about.is_dir() {
            return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a folder; name a file in it"));
        }
        if !about.is_file() {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "it is not a regular file"));
        }
        if about.len() == 0 {
            // Not every system can map nothing.
            return Ok(Source::Memory(Arc::from([])));
        }
        // SAFETY: the map is private to us and read-only. What remains is that another process changes or truncates
        // the file meanwhile, which no system lets us exclude. Model files are written under another name and renamed
        // when complete, so an open one stays as it was; the bytes are only ever read as numbers, for which every
        // bit pattern is valid, except in the header, which is copied out as it is checked.
        let map = unsafe { Mmap::map(&file) }?;
        Ok(Source::Mapped(map))
    }

    /// All of it.
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Source::Mapped(map) => map,
            Source::Memory(bytes) => bytes,
        }
    }

    /// Lets the system take back the memory of a part of the file that will not be read for now.
    pub(super) fn forget(&self, range: std::ops::Range<usize>) {
        #[cfg(unix)]
        if let Source::Mapped(map) = self {
            // SAFETY: the advice drops pages of a read-only map of a file. Whoever reads them again gets the same bytes,
            // from the file.
            let advice = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len()) };
            // It is advice: without it the memory stays in use until the system needs it.
            advice.unwrap_or_default();
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}
