//! A mark on a model's file that somebody on this machine needs it.

use std::fs::{File, TryLockError};
use std::path::Path;
use std::time::Duration;

use super::super::cancel::Cancel;

/// How often and how long apart a mark is looked for. Reading a header marks nothing, so what is marked mostly stays so.
const LOOKS: u32 = 3;
const INTERVAL: Duration = Duration::from_millis(100);

/// A shared lock on the file, held until this is dropped or the process ends, however it ends. Where the file system has no
/// locks there is no mark.
#[derive(Debug)]
pub(crate) struct InUse {
    _file: Option<File>,
}

impl InUse {
    /// Marks a file.
    pub(crate) fn take(path: &Path) -> Self {
        let file = File::open(path).ok().filter(|file| {
            let marked = file.try_lock_shared();
            if let Err(error) = &marked {
                tracing::debug!(target: "shoal::catalog", path = %path.display(), %error, "a model in use is not marked as such");
            }
            marked.is_ok()
        });
        Self { _file: file }
    }

    /// Whether anybody has marked a file.
    pub(crate) fn is_marked(path: &Path) -> bool {
        let Ok(file) = File::open(path) else { return false };
        (0..LOOKS).all(|look| {
            if look > 0 {
                Cancel::new().sleep(INTERVAL);
            }
            matches!(file.try_lock(), Err(TryLockError::WouldBlock))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_seen_as_long_as_it_is_held() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        assert!(!InUse::is_marked(file.path()));
        let mark = InUse::take(file.path());
        assert!(InUse::is_marked(file.path()));
        drop(mark);
        assert!(!InUse::is_marked(file.path()));
        assert!(!InUse::is_marked(Path::new("/nowhere/at/all")));
        drop(InUse::take(Path::new("/nowhere/at/all")));
    }
}
