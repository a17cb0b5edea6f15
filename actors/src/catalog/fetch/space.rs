//! Room on disk.

use std::fmt;
use std::io;
use std::path::Path;

/// Left free in any case, in bytes: a disk that is full to the last byte breaks everything else on it.
pub(crate) const RESERVE_BYTES: u64 = 64 * 1024 * 1024;

/// Tells how much room there is.
pub trait Space: Send + Sync + fmt::Debug + 'static {
    /// Bytes that this user can still write in `folder`; `None` where that cannot be known.
    ///
    /// # Errors
    /// The operating system's.
    fn free_bytes(&self, folder: &Path) -> io::Result<Option<u64>>;
}

/// Asks the operating system.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemSpace;

impl Space for SystemSpace {
    #[cfg(unix)]
    fn free_bytes(&self, folder: &Path) -> io::Result<Option<u64>> {
        let stat = rustix::fs::statvfs(folder)?;
        Ok(Some(stat.f_bavail.saturating_mul(stat.f_frsize)))
    }

    #[cfg(not(unix))]
    fn free_bytes(&self, _folder: &Path) -> io::Result<Option<u64>> {
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_answers() {
        let folder = tempfile::tempdir().expect("a folder");
        let free = SystemSpace.free_bytes(folder.path()).expect("answers");
        assert_eq!(free.is_some(), cfg!(unix));
        if cfg!(unix) {
            assert!(SystemSpace.free_bytes(&folder.path().join("missing")).is_err());
        }
    }
}
