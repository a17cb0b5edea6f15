//! Reads little-endian numbers and strings, never past the end.

use super::error::{GgufFault, Place};

/// A place in the header.
pub(super) struct Cursor<'a> {
    /// The whole file.
    file: &'a [u8],
    /// What has been read.
    at: usize,
    /// Where the header must have ended.
    end: usize,
}

/// The most that a header may take. The largest known, with vocabularies of a quarter of a million tokens, take some
/// 20 MB; what is read from it is held in memory at a few times its size.
pub(super) const HEADER_LIMIT: usize = 128 << 20;

impl<'a> Cursor<'a> {
    pub(super) fn new(file: &'a [u8]) -> Cursor<'a> {
        Cursor { file, at: 0, end: file.len().min(HEADER_LIMIT) }
    }

    /// Bytes read so far.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    /// Bytes that can still be read.
    pub(super) fn remaining(&self) -> usize {
        self.end - self.at
    }

    /// The next `length` bytes.
    pub(super) fn take(&mut self, length: usize, place: &dyn Fn() -> Place) -> Result<&'a [u8], GgufFault> {
        if length > self.remaining() {
            return Err(self.short(place));
        }
        let from = self.at;
        self.at += length;
        Ok(&self.file[from..self.at])
    }

    /// The fault of having too few bytes left: the file's or the limit's.
    pub(super) fn short(&self, place: &dyn Fn() -> Place) -> GgufFault {
        if self.end < self.file.len() {
            GgufFault::HeaderTooLong { at: place(), limit: HEADER_LIMIT as u64 }
        } else {
            GgufFault::Truncated { at: place() }
        }
    }

    /// The next bytes as an array, for `from_le_bytes`.
    pub(super) fn array<const N: usize>(&mut self, place: &dyn Fn() -> Place) -> Result<[u8; N], GgufFault> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N, place)?);
        Ok(bytes)
    }

    pub(super) fn u32(&mut self, place: &dyn Fn() -> Place) -> Result<u32, GgufFault> {
        self.array(place).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, place: &dyn Fn() -> Place) -> Result<u64, GgufFault> {
        self.array(place).map(u64::from_le_bytes)
    }

    /// A string with its length before it.
    pub(super) fn string(&mut self, place: &dyn Fn() -> Place) -> Result<String, GgufFault> {
        let length = self.u64(place)?;
        let length = usize::try_from(length).map_err(|_| self.short(place))?;
        let bytes = self.take(length, place)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(GgufFault::NotUtf8 { at: place() }),
        }
    }
}
