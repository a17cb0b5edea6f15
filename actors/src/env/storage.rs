//! The node's small persistent files.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// A flat folder of small files. Writes are atomic: a reader sees the old content or the new, never a part.
pub trait Storage: Send + Sync + fmt::Debug + 'static {
    /// The content of `name`, or `None` if there is none.
    ///
    /// # Errors
    /// The operating system's.
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>>;

    /// Replaces the content of `name`. `secret` files are readable by their owner alone.
    ///
    /// # Errors
    /// The operating system's; the old content is then still there.
    fn write(&self, name: &str, content: &[u8], secret: bool) -> io::Result<()>;

    /// Removes `name` if it is there.
    ///
    /// # Errors
    /// The operating system's.
    fn remove(&self, name: &str) -> io::Result<()>;
}

/// A folder on disk.
#[derive(Debug, Clone)]
pub struct DirectoryStorage {
    root: PathBuf,
}

impl DirectoryStorage {
    /// Uses `root`, which is made if it is not there.
    ///
    /// # Errors
    /// The operating system's.
    pub fn open(root: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(root)?;
        Ok(Self { root: root.to_owned() })
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    fn path(&self, name: &str) -> io::Result<PathBuf> {
        let plain = !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0']);
        if plain {
            Ok(self.root.join(name))
        } else {
            Err(io::Error::new(io::ErrorKind::InvalidInput, format!("`{name}` is not a plain file name")))
        }
    }
}

impl Storage for DirectoryStorage {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        match std::fs::read(self.path(name)?) {
            Ok(content) => Ok(Some(content)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn write(&self, name: &str, content: &[u8], secret: bool) -> io::Result<()> {
        let path = self.path(name)?;
        // The library makes its files readable by their owner alone.
        let mut file = tempfile::NamedTempFile::new_in(&self.root)?;
        file.write_all(content)?;
        file.as_file().sync_all()?;
        #[cfg(unix)]
        if !secret {
            use std::os::unix::fs::PermissionsExt;
            file.as_file().set_permissions(std::fs::Permissions::from_mode(0o644))?;
        }
        #[cfg(not(unix))]
        let _ = secret;
        file.persist(path)?;
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match std::fs::remove_file(self.path(name)?) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// Files in memory, for tests, simulations and nodes that keep nothing.
#[derive(Debug, Default)]
pub struct MemoryStorage {
    files: Mutex<BTreeMap<String, Vec<u8>>>,
}

impl Storage for MemoryStorage {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        Ok(self.files.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned())
    }

    fn write(&self, name: &str, content: &[u8], _secret: bool) -> io::Result<()> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), content.to_vec());
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_leave_the_folder() {
        let folder = tempfile::tempdir().expect("a folder");
        let storage = DirectoryStorage::open(folder.path()).expect("opens");
        for name in ["../x", "a/b", "", ".x", "a\0"] {
            assert_eq!(storage.write(name, b"x", false).map_err(|e| e.kind()), Err(io::ErrorKind::InvalidInput), "{name:?}");
        }
    }

    #[test]
    fn reads_back_and_keeps_secrets_private() {
        let folder = tempfile::tempdir().expect("a folder");
        let storage = DirectoryStorage::open(folder.path()).expect("opens");
        assert_eq!(storage.read("key").expect("reads"), None);
        storage.write("key", b"one", true).expect("writes");
        storage.write("key", b"two", true).expect("writes again");
        assert_eq!(storage.read("key").expect("reads"), Some(b"two".to_vec()));
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = std::fs::metadata(folder.path().join("key")).expect("is there").permissions().mode();
            assert_eq!(mode & 0o077, 0);
        }
        storage.remove("key").expect("removes");
        storage.remove("key").expect("removing twice is fine");
        assert_eq!(storage.read("key").expect("reads"), None);
    }
}
