//! One fetcher of a model at a time, on the whole machine.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::Path;
use std::time::Duration;

use super::super::cancel::Cancel;
use super::StoreError;

/// How often a lock that is held is asked for again.
const INTERVAL: Duration = Duration::from_millis(200);

/// Held until it is dropped, or until the process ends, however it ends.
#[derive(Debug)]
pub(crate) struct Lock {
    /// The operating system gives the lock back when the file is closed. The file itself stays: removing it would let
    /// a third process lock a new file of that name while a second one still waits for the old.
    _file: File,
}

/// Takes the lock, or says that somebody else has it.
pub(crate) fn try_lock(path: &Path) -> Result<Option<Lock>, StoreError> {
    let failed = |error: &std::io::Error| StoreError::Disk { doing: "lock", path: path.to_owned(), reason: error.to_string() };
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path).map_err(|error| failed(&error))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(Lock { _file: file })),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(failed(&error)),
    }
}

/// Waits for the lock; `waiting` is called at every look. `None` if it was called off.
pub(crate) fn lock(path: &Path, cancel: &Cancel, waiting: &dyn Fn()) -> Result<Option<Lock>, StoreError> {
    loop {
        if let Some(lock) = try_lock(path)? {
            return Ok(Some(lock));
        }
        waiting();
        if cancel.sleep(INTERVAL) {
            return Ok(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("x.lock");
        let held = try_lock(&path).expect("works").expect("free");
        assert!(try_lock(&path).expect("works").is_none());
        let cancel = Cancel::new();
        let stop = cancel.clone();
        assert!(lock(&path, &cancel, &|| stop.cancel()).expect("works").is_none());
        drop(held);
        assert!(lock(&path, &Cancel::new(), &|| {}).expect("works").is_some());
    }
}
