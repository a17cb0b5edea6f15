//! The memory of one lease.
//!
//! Each lease has pages of its own, which nothing else ever had and nothing else will have: on Linux a memory file that is
//! made when the lease is granted and goes when it is over. A process of this machine can be handed the file, and then holds
//! exactly what it was lent. Others may write here at any time, so the bytes are only ever copied, in and out.
//!
//! An adapter can be told of the pages, too (`provider::verbs::window`); it reaches them until its registration is taken back.
//!
//! What the file's seals say, whoever has a descriptor of it and however it was opened: its length never changes, so nobody
//! who has mapped it can be killed by the other end cutting it off; and a lease that may only be read cannot be written,
//! because the one mapping that can was made before the seal. Seals are never taken off.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use memmap2::MmapRaw;

use super::{RegionError, round_to_pages};
use crate::frame::TermTag;

/// Each stripe has a lock of its own, so threads of this process that copy at different places seldom meet.
const STRIPE_BYTES: usize = 1024 * 1024;

/// Under what somebody writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Writer {
    pub(crate) term: TermTag,
    pub(crate) generation: u64,
}

impl Writer {
    /// The owner of the memory, who is never late.
    pub(crate) const OWNER: Self = Self { term: TermTag { counter: u64::MAX, node: u64::MAX }, generation: u64::MAX };
    /// Before everybody else.
    const FIRST: Self = Self { term: TermTag { counter: 0, node: 0 }, generation: 0 };

    /// Whether a later term or generation than this has begun, if `floor` are the oldest that may write.
    pub(crate) fn is_late(&self, floor: &Self) -> bool {
        self.term < floor.term || self.generation < floor.generation
    }
}

/// Why nothing was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WriteRefused {
    /// It would reach past the end.
    Outside,
    /// A later term has begun.
    Term,
    /// A later generation has begun.
    Generation,
}

/// Pages that are lent.
pub(crate) struct Lent {
    /// Whether others may write.
    writable: bool,
    current: RwLock<Current>,
}

struct Current {
    /// The oldest term and generation that may write. Raised while nobody writes, so that nothing older comes later.
    floor: Writer,
    /// Replaced as a whole when somebody who may no longer write has them mapped.
    pages: Pages,
}

struct Pages {
    map: Arc<MmapRaw>,
    stripes: Vec<RwLock<()>>,
    #[cfg(target_os = "linux")]
    file: std::fs::File,
}

impl Lent {
    /// Zeroed pages for `bytes`, taken from the machine as they are first touched. `writable`: others may write them.
    ///
    /// # Errors
    /// [`RegionError`].
    pub(crate) fn new(bytes: u64, writable: bool) -> Result<Self, RegionError> {
        let asked = usize::try_from(bytes).unwrap_or(usize::MAX);
        let bytes = round_to_pages(asked).filter(|bytes| *bytes > 0).ok_or(RegionError::Size { count: 1, bytes: asked })?;
        let mut pages = Pages::new(bytes).map_err(|source| RegionError::Map { bytes, source })?;
        pages.seal(writable).map_err(|source| RegionError::Map { bytes, source })?;
        Ok(Self { writable, current: RwLock::new(Current { floor: Writer::FIRST, pages }) })
    }

    fn current(&self) -> RwLockReadGuard<'_, Current> {
        self.current.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets only this and later terms and generations write. Waits for copies that are under way.
    pub(crate) fn raise(&self, to: Writer) {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        current.floor.term = current.floor.term.max(to.term);
        current.floor.generation = current.floor.generation.max(to.generation);
    }

    /// Copies out; `false`, and nothing copied, if that reaches past the end.
    #[must_use]
    pub(crate) fn read(&self, at: u64, into: &mut [u8]) -> bool {
        let current = self.current();
        let Some(at) = current.pages.inside(at, into.len()) else { return false };
        current.pages.copy_out(at, into);
        true
    }

    /// Copies in.
    ///
    /// # Errors
    /// [`WriteRefused`]; nothing was copied then.
    pub(crate) fn write(&self, at: u64, from: &[u8], writer: Writer) -> Result<(), WriteRefused> {
        let current = self.current();
        if writer.term < current.floor.term {
            return Err(WriteRefused::Term);
        }
        if writer.generation < current.floor.generation {
            return Err(WriteRefused::Generation);
        }
        let at = current.pages.inside(at, from.len()).ok_or(WriteRefused::Outside)?;
        current.pages.copy_in(at, from);
        Ok(())
    }
}

/// Pages of a lease as an adapter is told of them: they stay mapped as long as this lives. Nobody has a reference into them.
#[derive(Clone)]
pub(crate) struct LentPages(Arc<MmapRaw>);

#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "adapters are let at lent memory on Linux only"))]
impl LentPages {
    /// Where they begin: at a page.
    pub(crate) fn start(&self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    /// Their length in bytes: whole pages.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

/// What an adapter would do, for one that is simulated.
#[cfg(test)]
impl LentPages {
    pub(crate) fn place(&self, at: usize, from: &[u8]) {
        assert!(
            at.checked_add(from.len()).is_some_and(|end| end <= self.len()),
            "a simulated adapter reaches outside of what it was given"
        );
        // SAFETY: the range lies inside of the mapping, which is writable and to which nobody has a reference.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.start().add(at), from.len()) }
    }

    pub(crate) fn fetch(&self, at: usize, into: &mut [u8]) {
        assert!(
            at.checked_add(into.len()).is_some_and(|end| end <= self.len()),
            "a simulated adapter reaches outside of what it was given"
        );
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(self.start().add(at), into.as_mut_ptr(), into.len()) }
    }
}

#[cfg(target_os = "linux")]
impl Lent {
    /// The pages that are in use now.
    pub(crate) fn pages(&self) -> LentPages {
        LentPages(Arc::clone(&self.current().pages.map))
    }

    /// Whether these are the pages in use.
    pub(crate) fn uses(&self, pages: &LentPages) -> bool {
        Arc::ptr_eq(&self.current().pages.map, &pages.0)
    }

    /// Whether others may write.
    pub(crate) fn writable(&self) -> bool {
        self.writable
    }

    /// Calls `hand` with the memory file that is mapped now.
    pub(crate) fn with_file<T>(&self, hand: impl FnOnce(&std::fs::File) -> T) -> T {
        hand(&self.current().pages.file)
    }

    /// Goes on with other pages and the same bytes. Who has the old ones mapped goes on with what nobody else sees.
    ///
    /// What was written to the old pages before this was called is in the new ones; what is written to them meanwhile may or
    /// may not be.
    ///
    /// # Errors
    /// The system's. The old pages stay in use.
    pub(crate) fn replace(&self) -> std::io::Result<()> {
        // Threads of this process that copy are waited for, and later ones find the new pages.
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        let mut new = Pages::new(current.pages.map.len())?;
        let mut piece = vec![0; STRIPE_BYTES];
        current.pages.each_run(&mut piece, |at, piece, old| {
            old.copy_out(at, piece);
            new.copy_in(at, piece);
        });
        new.seal(self.writable)?;
        let old = std::mem::replace(&mut current.pages, new);
        drop(current);
        old.scrap(self.writable);
        Ok(())
    }

    /// Gives the pages' memory back to the machine, or at least what is in them, although somebody may still have them mapped.
    pub(crate) fn scrap(&self) {
        self.current().pages.scrap(self.writable);
    }
}

impl Pages {
    #[cfg(target_os = "linux")]
    fn new(bytes: usize) -> std::io::Result<Self> {
        use rustix::fs::MemfdFlags;
        let file: std::fs::File = rustix::fs::memfd_create("shoal-lease", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?.into();
        file.set_len(u64::try_from(bytes).map_err(std::io::Error::other)?)?;
        let map = Arc::new(memmap2::MmapOptions::new().len(bytes).map_raw(&file)?);
        Ok(Self { map, stripes: stripes(bytes), file })
    }

    #[cfg(not(target_os = "linux"))]
    fn new(bytes: usize) -> std::io::Result<Self> {
        let map = Arc::new(memmap2::MmapOptions::new().len(bytes).map_anon()?.into());
        Ok(Self { map, stripes: stripes(bytes) })
    }

    /// Fixes what others can do with the file.
    #[cfg(target_os = "linux")]
    fn seal(&mut self, writable: bool) -> std::io::Result<()> {
        use rustix::fs::SealFlags;
        let others = if writable { SealFlags::empty() } else { SealFlags::FUTURE_WRITE };
        Ok(rustix::fs::fcntl_add_seals(&self.file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL | others)?)
    }

    #[cfg(not(target_os = "linux"))]
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "as on Linux, where there is something to do")]
    fn seal(&mut self, _writable: bool) -> std::io::Result<()> {
        Ok(())
    }

    /// Where a range begins, if it lies inside.
    fn inside(&self, at: u64, bytes: usize) -> Option<usize> {
        let at = usize::try_from(at).ok()?;
        at.checked_add(bytes).filter(|end| *end <= self.map.len()).map(|_| at)
    }

    fn copy_out(&self, at: usize, into: &mut [u8]) {
        assert!(at + into.len() <= self.map.len(), "a lease is asked for more than it has");
        pieces(at, into.len(), |stripe, done, count| {
            let _reading = self.stripes[stripe].read().unwrap_or_else(PoisonError::into_inner);
            let into = &mut into[done..done + count];
            // SAFETY: the range lies inside the mapping, as was asserted, and `into` is memory of the caller alone. No thread of
            // this process writes there while the stripe is locked; another process may, which changes what is copied and no more.
            unsafe { std::ptr::copy_nonoverlapping(self.map.as_ptr().add(at + done), into.as_mut_ptr(), count) }
        });
    }

    fn copy_in(&self, at: usize, from: &[u8]) {
        assert!(at + from.len() <= self.map.len(), "a lease is asked for more than it has");
        pieces(at, from.len(), |stripe, done, count| {
            let _writing = self.stripes[stripe].write().unwrap_or_else(PoisonError::into_inner);
            let from = &from[done..done + count];
            // SAFETY: as above; the mapping is writable, and nobody has a reference into it: it is only ever copied.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.map.as_mut_ptr().add(at + done), count) }
        });
    }
}

#[cfg(target_os = "linux")]
impl Pages {
    /// Calls `each` with every piece of the file that has pages, as long as `piece` at most: the rest is zeros. A holder that
    /// writes meanwhile changes which they are, but each round goes on from where the last one ended.
    fn each_run(&self, piece: &mut [u8], mut each: impl FnMut(usize, &mut [u8], &Self)) {
        use rustix::fs::SeekFrom;
        let end = self.map.len();
        let seek = |from| rustix::fs::seek(&self.file, from).ok().and_then(|at| usize::try_from(at).ok());
        let mut at = 0;
        while at < end {
            let Some(start) = seek(SeekFrom::Data(at as u64)) else { return };
            let start = start.max(at);
            if start >= end {
                return;
            }
            let stop = seek(SeekFrom::Hole(start as u64)).unwrap_or(end).clamp(start + 1, end);
            let count = piece.len().min(stop - start);
            each(start, &mut piece[..count], self);
            at = start + count;
        }
    }

    /// Takes the bytes out of pages that others may have mapped. A hole gives the memory back: the kernel takes the pages out of
    /// every mapping first, and who writes there afterwards gets zeroed ones. A file that is sealed against writing takes no holes,
    /// so its pages are overwritten.
    fn scrap(&self, writable: bool) {
        use rustix::fs::FallocateFlags;
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if writable && rustix::fs::fallocate(&self.file, hole, 0, self.map.len() as u64).is_ok() {
            return;
        }
        let mut piece = vec![0; STRIPE_BYTES];
        self.each_run(&mut piece, |at, zeros, pages| pages.copy_in(at, zeros));
    }
}

fn stripes(bytes: usize) -> Vec<RwLock<()>> {
    (0..bytes.div_ceil(STRIPE_BYTES)).map(|_| RwLock::new(())).collect()
}

/// Calls `each` with every stripe that a range touches, the bytes done before, and how many.
fn pieces(at: usize, bytes: usize, mut each: impl FnMut(usize, usize, usize)) {
    let mut done = 0;
    while done < bytes {
        let here = at + done;
        let count = (STRIPE_BYTES - here % STRIPE_BYTES).min(bytes - done);
        each(here / STRIPE_BYTES, done, count);
        done += count;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::region::page_bytes;

    #[test]
    fn absurd_sizes_are_refused() {
        assert!(Lent::new(0, true).is_err());
        assert!(Lent::new(u64::MAX, true).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn lent_memory_is_one_run_of_bytes(
            bytes in 1u64..3_000_000,
            writes in prop::collection::vec((0u64..3_200_000, 0usize..1_500_000, any::<u8>(), any::<bool>()), 0..8),
            writable in any::<bool>(),
        ) {
            let lent = Lent::new(bytes, writable).unwrap();
            let length = (bytes as usize).next_multiple_of(page_bytes());
            let mut model = vec![0u8; length];
            for (start, count, value, replace) in writes {
                let inside = start as usize + count <= length;
                prop_assert_eq!(lent.write(start, &vec![value; count], Writer::FIRST).is_ok(), inside);
                if inside {
                    model[start as usize..start as usize + count].fill(value);
                }
                #[cfg(target_os = "linux")]
                if replace {
                    lent.replace().unwrap();
                }
                let _ = replace;
            }
            let mut all = vec![1; length];
            prop_assert!(lent.read(0, &mut all));
            prop_assert!(all == model);
            prop_assert!(!lent.read(1, &mut all));
            prop_assert!(!lent.read(u64::MAX, &mut [0; 2]));
        }
    }

    #[test]
    #[should_panic(expected = "more than it has")]
    fn copies_stay_inside() {
        Lent::new(1, true).unwrap().current().pages.copy_out(page_bytes(), &mut [0]);
    }

    #[test]
    fn what_is_late_is_not_written() {
        let lent = Lent::new(10, true).unwrap();
        let writer = |counter, generation| Writer { term: TermTag { counter, node: 0 }, generation };
        lent.raise(writer(2, 1));
        lent.raise(writer(1, 3));
        assert_eq!(lent.write(0, b"x", writer(1, 9)), Err(WriteRefused::Term));
        assert_eq!(lent.write(0, b"x", writer(9, 2)), Err(WriteRefused::Generation));
        assert_eq!(lent.write(u64::MAX, b"x", writer(2, 3)), Err(WriteRefused::Outside));
        assert_eq!(lent.write(0, b"x", writer(2, 3)), Ok(()));
        lent.write(1, b"y", Writer::OWNER).unwrap();
        let mut got = [0; 3];
        assert!(lent.read(0, &mut got) && &got == b"xy\0");
    }

    /// What another mapping of the same file sees, as a holder that keeps it beyond its time.
    #[cfg(target_os = "linux")]
    #[test]
    fn who_keeps_old_pages_sees_and_changes_nothing_new() {
        for writable in [true, false] {
            let lent = Lent::new(8192, writable).unwrap();
            lent.write(0, &[7; 8192], Writer::OWNER).unwrap();
            let stale = lent.with_file(|file| {
                let options = memmap2::MmapOptions::new();
                if writable { options.map_raw(file) } else { options.map_raw_read_only(file) }.unwrap()
            });
            // SAFETY: inside the mapping, by volatile access, because the other mapping changes it.
            let peek = |at: usize| unsafe { stale.as_ptr().add(at).read_volatile() };
            assert_eq!(peek(5000), 7);
            lent.replace().unwrap();
            lent.write(1, &[8; 10], Writer::OWNER).unwrap();
            assert_eq!((peek(5000), peek(1)), (0, 0), "old pages keep what was in them");
            if writable {
                // SAFETY: as above; this mapping is writable.
                unsafe { stale.as_mut_ptr().add(5000).write_volatile(99) };
            }
            let mut all = vec![0; 8192];
            assert!(lent.read(0, &mut all));
            assert!(all[0] == 7 && all[1..11] == [8; 10] && all[11..].iter().all(|byte| *byte == 7));
            assert_eq!(lent.with_file(|file| memmap2::MmapOptions::new().map_raw(file).is_ok()), writable);
        }
    }
}
