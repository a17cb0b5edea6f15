//! The page beside the memory, on which the owner says whether it may still be used.
//!
//! ```text
//!  0  magic u64, version u64
//! 64  state u64                1 open, 2 ended
//! 72  deadline u64             nanoseconds on the clock of both
//! ```
//!
//! Only the owner writes, and a seal sees to that; only the holder reads.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags};

use super::sealed;
use crate::env::Instant;

const MAGIC: u64 = u64::from_le_bytes(*b"shoalWIN");
const VERSION: u64 = 1;
const PAGE_BYTES: usize = 4096;

const OPEN: u64 = 1;
const ENDED: u64 = 2;

#[repr(C)]
struct Words {
    magic: AtomicU64,
    version: AtomicU64,
    _apart: [u64; 6],
    state: AtomicU64,
    deadline: AtomicU64,
}

/// The words at the start of a mapping.
fn words(map: &MmapRaw) -> &Words {
    assert!(map.len() >= size_of::<Words>(), "a page is shorter than its words");
    // SAFETY: the words lie inside of the mapping, whose file cannot shrink, and a mapping begins at a page, so they are aligned.
    // They are atomics, so that another process may store to them at any time; through a read-only mapping they are only loaded.
    unsafe { &*map.as_ptr().cast::<Words>() }
}

/// The owner's side.
pub(super) struct Page {
    map: MmapRaw,
    file: File,
}

impl Page {
    pub(super) fn new(deadline: Instant) -> io::Result<Self> {
        let file = File::from(rustix::fs::memfd_create("shoal-window", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        file.set_len(PAGE_BYTES as u64)?;
        let map = MmapOptions::new().len(PAGE_BYTES).map_raw(&file)?;
        // From here on nobody can write but through this mapping.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL)?;
        let page = Self { map, file };
        let words = words(&page.map);
        words.magic.store(MAGIC, Ordering::Relaxed);
        words.version.store(VERSION, Ordering::Relaxed);
        words.deadline.store(deadline.as_nanos(), Ordering::Relaxed);
        words.state.store(OPEN, Ordering::Release);
        Ok(page)
    }

    /// Ends the window, for good. What this thread reads of the memory afterwards has in it all that the holder believes to have
    /// written.
    pub(super) fn end(&self) {
        words(&self.map).state.store(ENDED, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    pub(super) fn set_deadline(&self, deadline: Instant) {
        words(&self.map).deadline.store(deadline.as_nanos(), Ordering::SeqCst);
    }
}

impl AsFd for Page {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The holder's side.
pub(super) struct View {
    map: MmapRaw,
}

impl View {
    /// Maps what an owner handed over.
    ///
    /// # Errors
    /// If it is no such page, or could be taken away.
    pub(super) fn open(file: OwnedFd) -> io::Result<Self> {
        let file = sealed(file, PAGE_BYTES as u64)?;
        let view = Self { map: MmapOptions::new().len(PAGE_BYTES).map_raw_read_only(&file)? };
        let words = words(&view.map);
        if words.magic.load(Ordering::Relaxed) != MAGIC || words.version.load(Ordering::Relaxed) != VERSION {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the owner's page is laid out in a way that this version does not know",
            ));
        }
        Ok(view)
    }

    /// Whether the window is open and its deadline ahead. Nothing that this thread copied before is seen by the owner later than
    /// this answer was true, and nothing that it copies afterwards earlier.
    pub(super) fn is_open(&self, now: Instant) -> bool {
        fence(Ordering::SeqCst);
        let words = words(&self.map);
        words.state.load(Ordering::SeqCst) == OPEN && now.as_nanos() < words.deadline.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(nanos: u64) -> Instant {
        Instant::from_nanos(nanos)
    }

    #[test]
    fn the_layout_is_pinned_and_the_holder_sees_what_the_owner_says() {
        let page = Page::new(at(0x0102)).unwrap();
        let mut head = [0; 80];
        std::os::unix::fs::FileExt::read_exact_at(&page.file, &mut head, 0).unwrap();
        assert_eq!(&head[..16], b"shoalWIN\x01\0\0\0\0\0\0\0");
        assert_eq!(head[64..], [1, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]);
        let view = View::open(page.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert!(view.is_open(at(0x0101)) && !view.is_open(at(0x0102)));
        page.set_deadline(at(0x0200));
        assert!(view.is_open(at(0x0102)));
        page.end();
        assert!(!view.is_open(at(0)));
    }

    #[test]
    fn only_the_owner_writes_and_nobody_cuts() {
        let page = Page::new(at(1)).unwrap();
        let theirs = File::from(page.as_fd().try_clone_to_owned().unwrap());
        assert!(MmapOptions::new().len(PAGE_BYTES).map_raw(&theirs).is_err());
        assert!(std::os::unix::fs::FileExt::write_all_at(&theirs, &[9], 64).is_err());
        assert!(theirs.set_len(0).is_err() && theirs.set_len(8192).is_err());
    }

    #[test]
    fn what_is_no_page_is_refused() {
        let memory = |bytes: u64, seal: bool| {
            let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
            rustix::fs::ftruncate(&file, bytes).unwrap();
            if seal {
                rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
            }
            file
        };
        let text = |file: OwnedFd| View::open(file).err().expect("is refused").to_string();
        assert!(text(memory(4096, false)).contains("cut off"));
        assert!(text(memory(8192, true)).contains("8192 bytes"));
        assert!(text(memory(4096, true)).contains("laid out"));
        assert!(text(File::open("/proc/self/exe").unwrap().into()).contains("no memory file"));
    }
}
