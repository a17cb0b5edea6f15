//! The memory file behind a link, mapped by both ends.
//!
//! ```text
//!    0  magic u64, version u32
//! 1024  control words of lane 0          (see `ring`)
//! 2048  control words of lane 1
//! 4096  small ring of lane 0, then of lane 1
//! 8192  large ring of lane 0, then of lane 1
//! ```
//!
//! Lane 0 carries what the acceptor sends, lane 1 what the dialler sends. The file's length is fixed by seals, which the
//! end that receives it checks: memory that the other end could take away would kill whoever touches it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

use super::ring::{Lane, Size};

const MAGIC: u64 = u64::from_le_bytes(*b"shoalSHM");
const VERSION: u64 = 2;
const LANES: [usize; 2] = [1024, 2048];
/// The small rings: a part of the fastest cache that neither end misses.
const SMALL_AT: usize = 4096;
const SMALL_BYTES: usize = 2048;
const HEAD_BYTES: usize = SMALL_AT + 2 * SMALL_BYTES;
/// Longest ring. What a peer hands over is not mapped if it is longer.
const RING_BYTES_MAX: usize = 1 << 30;

/// Memory that both ends of a link have mapped.
pub(super) struct Segment {
    map: MmapRaw,
    file: File,
    ring_bytes: usize,
}

fn seals() -> SealFlags {
    SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL
}

impl Segment {
    /// New memory with rings of so many bytes: a power of two, at least a page. It is taken at once, so that a machine without memory
    /// says so here.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn create(ring_bytes: usize) -> io::Result<Self> {
        let file = File::from(rustix::fs::memfd_create("shoal-link", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        let bytes = (HEAD_BYTES + 2 * ring_bytes) as u64;
        rustix::fs::ftruncate(&file, bytes)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)?;
        rustix::fs::fcntl_add_seals(&file, seals())?;
        let segment = Self::map(file)?;
        // The peer has not seen it yet.
        segment.copy_head(&[MAGIC.to_le_bytes(), VERSION.to_le_bytes()].concat());
        Ok(segment)
    }

    /// Maps what a peer handed over.
    ///
    /// # Errors
    /// If it is no such memory, or could be taken away.
    pub(super) fn open(file: OwnedFd) -> io::Result<Self> {
        let odd = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("the peer's memory {what}"));
        if !rustix::fs::fcntl_get_seals(&file).map_err(|_| odd("is no memory file"))?.contains(seals()) {
            return Err(odd("could be cut off"));
        }
        let segment = Self::map(File::from(file))?;
        let mut head = [0; 16];
        segment.head(&mut head);
        if head[..8] != MAGIC.to_le_bytes() || head[8..] != VERSION.to_le_bytes() {
            return Err(odd("is laid out in a way that this version does not know"));
        }
        Ok(segment)
    }

    fn map(file: File) -> io::Result<Self> {
        let bytes = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
        let ring_bytes = bytes.saturating_sub(HEAD_BYTES) / 2;
        let right = ring_bytes.is_power_of_two() && (4096..=RING_BYTES_MAX).contains(&ring_bytes) && bytes == HEAD_BYTES + 2 * ring_bytes;
        if !right {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("memory of {bytes} bytes holds no two rings")));
        }
        let map = MmapOptions::new().len(bytes).map_raw(&file)?;
        Ok(Self { map, file, ring_bytes })
    }

    /// Bytes of a ring.
    #[inline]
    pub(super) fn ring_bytes(&self, size: Size) -> usize {
        match size {
            Size::Small => SMALL_BYTES,
            Size::Large => self.ring_bytes,
        }
    }

    /// The control words of a lane.
    pub(super) fn lane(&self, lane: usize) -> &Lane {
        let words = self.map.as_mut_ptr().wrapping_add(LANES[lane & 1]).cast::<Lane>();
        // SAFETY: the words lie inside of the mapping, which is as long as `map` checked and cannot shrink; a mapping
        // begins at a page, so they are aligned. They are atomics, so that another process may store to them at any time.
        unsafe { &*words }
    }

    fn copy_head(&self, bytes: &[u8]) {
        debug_assert!(bytes.len() <= LANES[0]);
        // SAFETY: the first kilobyte of the mapping, which no lane covers; it is written before anybody else has the file.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.map.as_mut_ptr(), bytes.len().min(LANES[0])) }
    }

    fn head(&self, into: &mut [u8; 16]) {
        // SAFETY: the mapping is longer than its head. The peer may write there, which changes what is read and no more.
        unsafe { std::ptr::copy_nonoverlapping(self.map.as_ptr(), into.as_mut_ptr(), into.len()) }
    }

    /// Where `bytes` at count `at` of a ring lie: the run up to the ring's end, and the rest from its start.
    #[inline]
    fn place(&self, lane: usize, size: Size, at: u64, bytes: usize) -> (*mut u8, usize, *mut u8) {
        let (first, ring) = match size {
            Size::Small => (SMALL_AT, SMALL_BYTES),
            Size::Large => (HEAD_BYTES, self.ring_bytes),
        };
        assert!(bytes <= ring, "a ring is asked for more than it holds");
        let start = self.map.as_mut_ptr().wrapping_add(first + (lane & 1) * ring);
        // Rings are as long as a power of two, and dividing takes as long as fetching a short record.
        let offset = at as usize & (ring - 1);
        (start.wrapping_add(offset), bytes.min(ring - offset), start)
    }

    /// The word at a count of bytes of a ring, rounded down to whole words.
    #[inline]
    pub(super) fn word(&self, lane: usize, size: Size, at: u64) -> &AtomicU64 {
        const WORD: usize = size_of::<AtomicU64>();
        let (word, _, _) = self.place(lane, size, at & !(WORD as u64 - 1), WORD);
        // SAFETY: rings begin at a multiple of their length from a page's start and are whole words long, so a word at a multiple of its
        // size lies inside of the ring and is aligned. Whatever is there is a number. Both ends use it as an atomic while the
        // reading one may look; where the writing end copies bytes over it, the other one has given it back.
        unsafe { &*word.cast::<AtomicU64>() }
    }

    /// Copies into a ring.
    #[inline]
    pub(super) fn copy_in(&self, lane: usize, size: Size, at: u64, bytes: &[u8]) {
        let (to, run, start) = self.place(lane, size, at, bytes.len());
        // SAFETY: `place` gives runs inside of the ring, which lies inside of the mapping. This end is the only
        // writer of the lane, and the other end reads what was published only; if it does otherwise it reads garbage.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, run);
            if run < bytes.len() {
                std::ptr::copy_nonoverlapping(bytes.as_ptr().add(run), start, bytes.len() - run);
            }
        }
    }

    /// Copies out of a ring.
    #[inline]
    pub(super) fn copy_out(&self, lane: usize, size: Size, at: u64, into: &mut [u8]) {
        let (from, run, start) = self.place(lane, size, at, into.len());
        // SAFETY: as above. A peer that writes where it should not changes what is copied, and the checksums of frames
        // are computed over the copy.
        unsafe {
            std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), run);
            if run < into.len() {
                std::ptr::copy_nonoverlapping(start, into.as_mut_ptr().add(run), into.len() - run);
            }
        }
    }
}

impl AsFd for Segment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_see_the_same_bytes() {
        let ours = Segment::create(4096).unwrap();
        let theirs = Segment::open(ours.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let sent: Vec<u8> = (0..4096u32).map(|i| (i * 7) as u8).collect();
        for (size, bytes) in [(Size::Large, 4096), (Size::Small, 2048)] {
            assert_eq!(theirs.ring_bytes(size), bytes);
            // Each ring is its own.
            for (i, (lane, at)) in [(0, 0), (1, 4000), (1, 3 * 4096 - 1), (0, u64::MAX - 4095)].into_iter().enumerate() {
                ours.copy_in(1 - lane, size, at, &vec![i as u8; bytes]);
                ours.copy_in(lane, size, at, &sent[..bytes]);
                let mut got = vec![0; bytes];
                theirs.copy_out(lane, size, at, &mut got);
                assert!(got == sent[..bytes], "lane {lane} at {at}");
                theirs.copy_out(1 - lane, size, at, &mut got);
                assert!(got.iter().all(|byte| *byte == i as u8), "beside lane {lane} at {at}");
                let word = ours.word(lane, size, at + 3).load(std::sync::atomic::Ordering::Relaxed).to_ne_bytes();
                theirs.copy_out(lane, size, (at + 3) & !7, &mut got[..8]);
                assert_eq!(got[..8], word);
            }
        }
    }

    #[test]
    fn memory_that_is_not_ours_is_refused() {
        let text = |result: io::Result<Segment>| result.err().expect("is refused").to_string();
        let memory = |bytes: u64, sealed: bool| {
            let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
            rustix::fs::ftruncate(&file, bytes).unwrap();
            if sealed {
                rustix::fs::fcntl_add_seals(&file, seals()).unwrap();
            }
            file
        };
        assert!(text(Segment::open(memory(4096 * 4, false))).contains("cut off"));
        assert!(text(Segment::open(memory(4096 * 4, true))).contains("laid out"));
        for bytes in [0, 1, 4096, 4096 * 3, 4096 * 4 + 1, 4096 * 5] {
            assert!(text(Segment::open(memory(bytes, true))).contains("no two rings"), "{bytes}");
        }
        let plain = tempfile();
        assert!(text(Segment::open(plain)).contains("no memory file"));
    }

    fn tempfile() -> OwnedFd {
        File::open("/proc/self/exe").unwrap().into()
    }

    #[test]
    #[should_panic(expected = "more than it holds")]
    fn a_ring_gives_no_more_than_it_has() {
        Segment::create(4096).unwrap().copy_out(0, Size::Large, 0, &mut [0; 4097]);
    }
}
