//! Waking a thread of this process that sleeps on descriptors.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// Rung by any thread, waited on by one.
pub(super) struct Bell {
    rope: UnixStream,
    clapper: UnixStream,
}

impl Bell {
    pub(super) fn new() -> std::io::Result<Self> {
        let (rope, clapper) = UnixStream::pair()?;
        rope.set_nonblocking(true)?;
        clapper.set_nonblocking(true)?;
        Ok(Self { rope, clapper })
    }

    /// Wakes who waits, now or next.
    pub(super) fn ring(&self) {
        // It fails only if it was rung so often and not heard that it will be heard anyway.
        drop((&self.rope).write(&[1]));
    }

    /// Forgets that it was rung.
    pub(super) fn hush(&self) {
        let mut heard = [0; 64];
        while (&self.clapper).read(&mut heard).is_ok_and(|bytes| bytes == heard.len()) {}
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.clapper.as_fd()
    }
}
