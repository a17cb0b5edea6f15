//! SHA-256, as files are named and checked by it.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::str::FromStr;

use sha2::Digest as _;

/// How much is read, hashed and written at a time, in bytes.
pub(crate) const CHUNK_BYTES: usize = 256 * 1024;

/// A SHA-256, shown as 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sha256(pub [u8; 32]);

/// The text is not 64 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a SHA-256 has 64 hexadecimal digits")]
pub struct Sha256Error;

impl FromStr for Sha256 {
    type Err = Sha256Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(text.trim(), &mut bytes).map_err(|_| Sha256Error)?;
        Ok(Self(bytes))
    }
}

impl fmt::Display for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Takes bytes as they come.
#[derive(Clone, Default)]
pub(crate) struct Hasher(sha2::Sha256);

impl Hasher {
    /// Takes the next bytes.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The hash of all that came.
    pub(crate) fn finish(self) -> Sha256 {
        Sha256(self.0.finalize().into())
    }
}

/// Hashes what is left of a file; `step` is told of every chunk and may end it with an error.
pub(crate) fn hash_file(file: &mut File, hasher: &mut Hasher, mut step: impl FnMut(u64) -> io::Result<()>) -> io::Result<u64> {
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut bytes = 0;
    loop {
        let count = match file.read(&mut chunk) {
            Ok(0) => return Ok(bytes),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        hasher.update(&chunk[..count]);
        bytes += count as u64;
        step(bytes)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_like_the_standard_says() {
        let mut hasher = Hasher::default();
        hasher.update(b"a");
        hasher.update(b"bc");
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hasher.finish().to_string(), abc);
        assert_eq!(abc.parse::<Sha256>().map(|hash| hash.to_string()), Ok(abc.to_owned()));
        assert_eq!("ba78".parse::<Sha256>(), Err(Sha256Error));
    }
}
