//! Memory that a process of this machine was lent, mapped by it: `put` and `get` are copies by the holder, without any thread
//! of the owner.
//!
//! | module | what |
//! |---|---|
//! | `page` | where the owner says whether the window is open |
//! | `hand` | how page and memory are handed over, and how the end of a mapping is seen |
//!
//! # Why the fence holds
//!
//! Nobody can take a mapping from another process. What the owner can do is to see to it that nobody looks there any more:
//!
//! * The memory of a lease is a memory file of its own (`region::lent`). Its pages belong to no other lease, before or after. So
//!   whatever a holder does with its mapping, however long it keeps it, it reaches what it was lent and nothing else. It cannot
//!   get more by opening the file again (`/proc/self/fd`): a seal, which is the file's and not the descriptor's, forbids writing
//!   where writing was not lent, and no seal can be taken off.
//! * When a lease ends, its file goes out of use with it. The next lease, of the same range or of another, has a new file. So a
//!   holder that is stopped in the middle of a copy and goes on hours later, or that does not care, writes into pages that nobody
//!   reads. Revoking therefore waits for no holder.
//! * A window is for one term and one generation of writes. When a later one begins, the window ends, and if somebody still has the
//!   memory mapped, the lease goes on in a new file with the same bytes. So what is late cannot overwrite what is new.
//! * What is written there is no loss for an honest holder, because it does not take it for done: it looks at the page before and
//!   *after* each copy, and a copy counts if the window was open at both. The owner first ends the window and then takes the
//!   memory out of use, or copies it (where a later term or generation goes on with the bytes), with a full fence between on both
//!   sides. So either the owner's copy has the bytes, or the holder sees that the window has ended: of two
//!   that each store and then look at what the other stored, one at least sees it.
//! * A file that somebody may still have mapped is emptied (`region::lent`), and stays charged to the owner's account until the
//!   mapping is gone: the connection that it came over ends when the holder has unmapped it, and by the kernel's hand when its
//!   process has died, after its memory is gone. (A holder that lies about this takes memory that is on nobody's account, as every
//!   process of the same user can; it still reaches nobody else's.)
//!
//! An operation that the page does not let through is put to the owner over the link, whose thread says why: so a holder hears
//! the same denials as on any other provider.

mod hand;
mod page;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::SealFlags;

pub(crate) use hand::{Handed, Meeting, Terms, Waiting};
use page::View;

use crate::env::{Clock, Instant};
use crate::region::page_bytes;

/// A range is copied in pieces, between which the page and the clock are looked at.
const PIECE_BYTES: usize = 1024 * 1024;

/// Lent memory, mapped by its holder.
pub(crate) struct Window {
    page: View,
    map: MmapRaw,
    bytes: u64,
    writable: bool,
    /// Ends after the mapping: fields are dropped in this order.
    line: UnixStream,
}

impl Window {
    fn open(line: UnixStream, page: OwnedFd, memory: OwnedFd, bytes: u64, writable: bool) -> io::Result<Self> {
        let page = View::open(page)?;
        let length = usize::try_from(bytes).ok().and_then(|bytes| bytes.checked_next_multiple_of(page_bytes()));
        let length = length.filter(|length| *length > 0).ok_or_else(|| odd("a lease of a length that cannot be mapped"))?;
        let memory = sealed(memory, length as u64)?;
        let mut options = MmapOptions::new();
        options.len(length);
        let map = if writable { options.map_raw(&memory)? } else { options.map_raw_read_only(&memory)? };
        Ok(Self { page, map, bytes, writable, line })
    }

    /// Whether it can be written.
    pub(crate) fn writable(&self) -> bool {
        self.writable
    }

    /// Copies `bytes` to `offset`, and says how many of them are in the owner's memory. Fewer than all: the window does not let the
    /// rest through, or it is `deadline`.
    pub(crate) fn put(&self, offset: u64, bytes: &[u8], clock: &dyn Clock, deadline: Instant) -> usize {
        let Some(at) = self.inside(offset, bytes.len()).filter(|_| self.writable) else { return 0 };
        let mut done = 0;
        for piece in bytes.chunks(PIECE_BYTES) {
            let now = clock.now();
            if now >= deadline || !self.page.is_open(now) {
                break;
            }
            // SAFETY: `inside` has checked the range against the mapping, which is writable and whose file cannot shrink. Others may
            // read or write there at the same time; nobody in this process has a reference into it.
            unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), self.map.as_mut_ptr().add(at + done), piece.len()) }
            if !self.page.is_open(clock.now()) {
                break;
            }
            done += piece.len();
        }
        done
    }

    /// Copies from `offset` into `into`, and says how many bytes were had. Fewer than all: as [`Window::put`].
    pub(crate) fn get(&self, offset: u64, into: &mut [u8], clock: &dyn Clock, deadline: Instant) -> usize {
        let Some(at) = self.inside(offset, into.len()) else { return 0 };
        let mut done = 0;
        for piece in into.chunks_mut(PIECE_BYTES) {
            let now = clock.now();
            if now >= deadline || !self.page.is_open(now) {
                break;
            }
            // SAFETY: as above; what somebody else writes meanwhile changes what is copied and no more.
            unsafe { std::ptr::copy_nonoverlapping(self.map.as_ptr().add(at + done), piece.as_mut_ptr(), piece.len()) }
            if !self.page.is_open(clock.now()) {
                break;
            }
            done += piece.len();
        }
        done
    }

    fn inside(&self, offset: u64, bytes: usize) -> Option<usize> {
        let end = u64::try_from(bytes).ok().and_then(|bytes| offset.checked_add(bytes));
        end.filter(|end| *end <= self.bytes).and_then(|_| usize::try_from(offset).ok())
    }

    /// What the window came over, for tests.
    #[cfg(test)]
    fn line(&self) -> &UnixStream {
        &self.line
    }

    /// Where the memory is mapped, for tests that play a holder who does not care.
    #[cfg(test)]
    pub(crate) fn raw(&self) -> (*mut u8, usize) {
        (self.map.as_mut_ptr(), self.map.len())
    }
}

impl std::fmt::Debug for Window {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Window")
            .field("line", &self.line)
            .field("bytes", &self.bytes)
            .field("writable", &self.writable)
            .finish_non_exhaustive()
    }
}

/// A memory file of exactly so many bytes, which nobody can change the length of.
fn sealed(file: OwnedFd, bytes: u64) -> io::Result<File> {
    let seals = rustix::fs::fcntl_get_seals(&file).map_err(|_| odd("what the owner handed over is no memory file"))?;
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
        return Err(odd("what the owner handed over could be cut off"));
    }
    let file = File::from(file);
    let found = file.metadata()?.len();
    if found != bytes {
        return Err(odd(&format!("the owner handed over {found} bytes instead of {bytes}")));
    }
    Ok(file)
}

fn odd(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}
