//! What the machine can do without any of this crate: the limits.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};

use super::world::Outcome;

pub(crate) const BIG: usize = 1 << 20;
/// Buffers of [`BIG`] that are gone through in turn, as a channel goes through its slots.
pub(crate) const BUFFERS: usize = 4;

/// Memory that both processes have mapped: for each side a word with a payload behind it, and then buffers.
pub(crate) struct Memory {
    map: MmapRaw,
    pub(crate) file: File,
}

impl Memory {
    pub(crate) fn create() -> Outcome<Self> {
        let file = File::from(rustix::fs::memfd_create("limits", rustix::fs::MemfdFlags::CLOEXEC)?);
        file.set_len((4096 + BIG * BUFFERS) as u64)?;
        Self::map(file)
    }

    pub(crate) fn open(path: &str) -> Outcome<Self> {
        Self::map(File::options().read(true).write(true).open(path)?)
    }

    fn map(file: File) -> Outcome<Self> {
        Ok(Self { map: MmapOptions::new().len(4096 + BIG * BUFFERS).populate().map_raw(&file)?, file })
    }

    /// A side's line, and the words behind it.
    fn word(&self, side: usize, i: usize) -> &AtomicU64 {
        let word = self.map.as_mut_ptr().wrapping_add(side * 1024 + i * 8).cast::<AtomicU64>();
        // SAFETY: inside of the mapping, which lives as long as `self`, and aligned; both processes use it as an atomic only.
        unsafe { &*word }
    }

    /// Shows the other side a value, with so many words that come with it.
    fn show(&self, side: usize, value: u64, words: usize) {
        for i in 1..=words {
            self.word(side, i).store(value, Ordering::Relaxed);
        }
        self.word(side, 0).store(value, Ordering::Release);
    }

    /// Waits for the other side's value and takes what came with it.
    fn wait(&self, side: usize, value: u64, words: usize) {
        while self.word(side, 0).load(Ordering::Acquire) != value {
            std::hint::spin_loop();
        }
        for i in 1..=words {
            std::hint::black_box(self.word(side, i).load(Ordering::Relaxed));
        }
    }

    /// Ping-pong of values that count on from `from`, with so many words behind each.
    pub(crate) fn first(&self, from: u64, count: u64, words: usize) {
        for i in from + 1..=from + count {
            self.show(0, i, words);
            self.wait(1, i, words);
        }
    }

    /// The other end of [`Memory::first`].
    pub(crate) fn second(&self, from: u64, count: u64, words: usize) {
        for i in from + 1..=from + count {
            self.wait(0, i, words);
            self.show(1, i, words);
        }
    }

    /// Copies one message into a buffer, as the fastest put there can be.
    pub(crate) fn put(&self, i: usize, bytes: &[u8]) {
        let to = self.map.as_mut_ptr().wrapping_add(4096 + (i % BUFFERS) * BIG);
        // SAFETY: the buffer lies inside of the mapping, and only this process touches it while it measures.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len().min(BIG)) }
    }
}

/// A socket that is asked again and again instead of slept on.
pub(crate) struct Spinning<'a>(pub(crate) &'a TcpStream);

fn again<T>(mut call: impl FnMut() -> std::io::Result<T>) -> std::io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            other => return other,
        }
    }
}

impl Read for Spinning<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        again(|| self.0.read(into))
    }
}

impl Write for Spinning<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        again(|| self.0.write(bytes))
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
