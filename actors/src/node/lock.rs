//! One node for each data folder: two with the same identity would confuse every peer.

use std::fs::File;
use std::io;
use std::path::Path;

/// Held for as long as a node uses its folder; the system lets go of it however the process ends.
#[derive(Debug)]
pub(super) struct FolderLock {
    _file: File,
}

impl FolderLock {
    /// Takes the folder, or gives `None` if another node has it.
    pub(super) fn take(folder: &Path) -> io::Result<Option<Self>> {
        let file = File::options().create(true).truncate(false).write(true).open(folder.join("lock"))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self { _file: file })),
            Err(std::fs::TryLockError::WouldBlock) => Ok(None),
            Err(std::fs::TryLockError::Error(error)) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_taken_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let first = FolderLock::take(folder.path()).expect("can be locked");
        assert!(first.is_some());
        assert!(FolderLock::take(folder.path()).expect("can be asked").is_none());
        drop(first);
        assert!(FolderLock::take(folder.path()).expect("can be locked").is_some());
    }
}
