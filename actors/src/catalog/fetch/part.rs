//! A download that is not complete yet: the bytes that came, and beside them a note of what they are a part of.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::super::digest::{Hasher, Sha256, hash_file};
use super::FetchError;

/// Largest note that is read, in bytes.
const NOTE_BYTES_MAX: u64 = 64 * 1024;

/// What the bytes are a part of.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Note {
    /// Where they came from, without credentials and query.
    pub(crate) url: String,
    /// The server's strong validator, with its quotes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) etag: Option<String>,
    /// Size of the whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bytes: Option<u64>,
    /// SHA-256 of the whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) sha256: Option<String>,
}

/// The growing file.
pub(crate) struct Part {
    file: File,
    path: PathBuf,
    note_path: PathBuf,
    /// Bytes that are there.
    bytes: u64,
    hasher: Hasher,
}

impl Part {
    /// Opens or makes the file at `path`; gives the note as well if the bytes can be trusted to belong to it.
    pub(crate) fn open(path: &Path) -> Result<(Self, Option<Note>), FetchError> {
        let note_path = beside(path, ".json");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(|error| disk("open", path, &error))?;
        let bytes = file.metadata().map_err(|error| disk("read", path, &error))?.len();
        let note = if bytes > 0 { read_note(&note_path) } else { None };
        let mut part = Self { file, path: path.to_owned(), note_path, bytes, hasher: Hasher::default() };
        if note.is_none() {
            part.clear()?;
        }
        Ok((part, note))
    }

    /// Bytes that are there.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Throws away what is there.
    pub(crate) fn clear(&mut self) -> Result<(), FetchError> {
        if self.bytes > 0 {
            self.file.set_len(0).map_err(|error| disk("shorten", &self.path, &error))?;
        }
        self.file.seek(SeekFrom::Start(0)).map_err(|error| disk("write", &self.path, &error))?;
        self.bytes = 0;
        self.hasher = Hasher::default();
        Ok(())
    }

    /// Hashes what is there, so that the hash of the whole can go on from it. `step` is told how far it is.
    pub(crate) fn rehash(&mut self, mut step: impl FnMut(u64) -> Result<(), FetchError>) -> Result<(), FetchError> {
        let mut stopped = None;
        self.hasher = Hasher::default();
        let hashed = self.file.seek(SeekFrom::Start(0)).and_then(|_| {
            hash_file(&mut self.file, &mut self.hasher, |bytes| {
                step(bytes).map_err(|error| {
                    stopped = Some(error);
                    io::Error::other("stopped")
                })
            })
        });
        match (hashed, stopped) {
            (_, Some(error)) => Err(error),
            (Err(error), None) => Err(disk("read", &self.path, &error)),
            (Ok(bytes), None) => {
                self.bytes = bytes;
                Ok(())
            }
        }
    }

    /// Writes the note that makes the bytes usable after an interruption.
    pub(crate) fn annotate(&self, note: &Note) -> Result<(), FetchError> {
        let text = serde_json::to_vec(note).unwrap_or_default();
        std::fs::write(&self.note_path, text).map_err(|error| full_or(&self.note_path, note.bytes.unwrap_or(0), "write", &error))
    }

    /// Adds bytes; `missing` is how many are to come, for the message of a full disk.
    pub(crate) fn append(&mut self, bytes: &[u8], missing: u64) -> Result<(), FetchError> {
        if let Err(error) = self.file.write_all(bytes) {
            // A part of the chunk may have been written; the note's owner counts only what was hashed.
            let _ = self.file.set_len(self.bytes);
            return Err(full_or(&self.path, missing, "write", &error));
        }
        self.hasher.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// The hash of all that is there.
    pub(crate) fn hash(&self) -> Sha256 {
        self.hasher.clone().finish()
    }

    /// Makes the file complete under its final name.
    pub(crate) fn finish(self, to: &Path) -> Result<(), FetchError> {
        self.file.sync_all().map_err(|error| full_or(&self.path, 0, "write", &error))?;
        drop(self.file);
        std::fs::rename(&self.path, to).map_err(|error| disk("rename", &self.path, &error))?;
        let _ = std::fs::remove_file(&self.note_path);
        Ok(())
    }

    /// Removes the file and its note.
    pub(crate) fn discard(self) {
        drop(self.file);
        let _ = std::fs::remove_file(&self.path);
        let _ = std::fs::remove_file(&self.note_path);
    }
}

/// `path` with something added to its last name.
pub(crate) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(suffix);
    path.with_file_name(name)
}

fn read_note(path: &Path) -> Option<Note> {
    let size = std::fs::metadata(path).ok()?.len();
    if size > NOTE_BYTES_MAX {
        return None;
    }
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// Wraps the file system's word.
pub(crate) fn disk(doing: &'static str, path: &Path, error: &io::Error) -> FetchError {
    FetchError::Disk { doing, path: path.to_owned(), reason: error.to_string() }
}

/// The same, with a word of its own for a full disk.
pub(crate) fn full_or(path: &Path, missing: u64, doing: &'static str, error: &io::Error) -> FetchError {
    if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
        FetchError::DiskFull { path: path.to_owned(), missing }
    } else {
        disk(doing, path, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goes_on_where_it_stopped() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("x.part");
        let note = Note { url: "http://h/x".into(), etag: Some("\"1\"".into()), bytes: Some(6), sha256: None };
        {
            let (mut part, found) = Part::open(&path).expect("opens");
            assert_eq!(found, None);
            part.annotate(&note).expect("notes");
            part.append(b"abc", 3).expect("writes");
        }
        let (mut part, found) = Part::open(&path).expect("opens again");
        assert_eq!((found, part.bytes()), (Some(note), 3));
        part.rehash(|_| Ok(())).expect("hashes");
        part.append(b"def", 0).expect("writes");
        let mut whole = Hasher::default();
        whole.update(b"abcdef");
        assert_eq!(part.hash(), whole.finish());
        part.finish(&folder.path().join("x")).expect("finishes");
        assert_eq!(std::fs::read(folder.path().join("x")).expect("reads"), b"abcdef");
        assert_eq!(std::fs::read_dir(folder.path()).expect("lists").count(), 1);
    }

    #[test]
    fn bytes_without_a_readable_note_are_not_used() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("x.part");
        for note in [None, Some("{\"url\": \"htt")] {
            std::fs::write(&path, b"abc").expect("writes");
            if let Some(note) = note {
                std::fs::write(beside(&path, ".json"), note).expect("writes");
            }
            let (part, found) = Part::open(&path).expect("opens");
            assert_eq!((found, part.bytes()), (None, 0));
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_said_to_be_full() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("x.part");
        std::os::unix::fs::symlink("/dev/full", &path).expect("links");
        let (mut part, _) = Part::open(&path).expect("opens");
        assert_eq!(part.append(b"abc", 7), Err(FetchError::DiskFull { path, missing: 7 }));
    }
}
