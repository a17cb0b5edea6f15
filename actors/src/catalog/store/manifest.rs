//! The note beside a model that says what it is.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::super::digest::Sha256;

/// The note's file name.
pub(crate) const MANIFEST: &str = "manifest.json";
/// The form of the note that this version writes. Unknown fields are passed over, so the number is raised only
/// where an old reader would misunderstand.
const FORM: u32 = 1;
/// Longest note that is read, in bytes.
const BYTES_MAX: u64 = 64 * 1024;

/// What is known of a model on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    form: u32,
    /// The name users call it by.
    pub(crate) name: String,
    /// The file's name in its folder.
    pub(crate) file: String,
    /// SHA-256 of the file.
    pub(crate) sha256: String,
    /// Size of the file.
    pub(crate) bytes: u64,
    /// Where it came from, for people.
    pub(crate) source: String,
    /// Its licence, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) licence: Option<String>,
    /// When it came, in seconds since 1970.
    #[serde(default)]
    pub(crate) fetched_unix_seconds: u64,
}

impl Manifest {
    /// Describes a model that has come `now`, in time since 1970.
    pub(crate) fn new(name: &str, file: &str, sha256: Sha256, bytes: u64, source: &str, licence: Option<&str>, now: Duration) -> Self {
        Self {
            form: FORM,
            name: name.to_owned(),
            file: file.to_owned(),
            sha256: sha256.to_string(),
            bytes,
            source: source.to_owned(),
            licence: licence.map(str::to_owned),
            fetched_unix_seconds: now.as_secs(),
        }
    }

    /// Reads the note in a model's folder and checks it against what lies there.
    pub(crate) fn read(folder: &Path) -> Result<Self, String> {
        let path = folder.join(MANIFEST);
        let size = std::fs::metadata(&path).map_err(|error| format!("its {MANIFEST} cannot be read: {error}"))?.len();
        if size > BYTES_MAX {
            return Err(format!("its {MANIFEST} has {size} bytes, which is too many"));
        }
        let text = std::fs::read(&path).map_err(|error| format!("its {MANIFEST} cannot be read: {error}"))?;
        let manifest: Self = serde_json::from_slice(&text).map_err(|error| format!("its {MANIFEST} is damaged: {error}"))?;
        if manifest.form > FORM {
            return Err(format!("its {MANIFEST} was written by a newer version"));
        }
        if manifest.sha256.parse::<Sha256>().is_err() {
            return Err(format!("its {MANIFEST} is damaged: no SHA-256"));
        }
        let plain = !manifest.file.is_empty() && !manifest.file.starts_with('.') && !manifest.file.contains(['/', '\\', '\0']);
        if !plain {
            return Err(format!("its {MANIFEST} is damaged: `{}` is no plain file name", manifest.file));
        }
        let found = match std::fs::metadata(folder.join(&manifest.file)) {
            Ok(meta) if meta.is_file() => meta.len(),
            Ok(_) => return Err(format!("{} is no file", manifest.file)),
            Err(error) => return Err(format!("{} cannot be read: {error}", manifest.file)),
        };
        if found != manifest.bytes {
            return Err(format!("{} has {found} bytes instead of {}", manifest.file, manifest.bytes));
        }
        Ok(manifest)
    }

    /// Writes the note, whole or not at all.
    pub(crate) fn write(&self, folder: &Path) -> std::io::Result<()> {
        let text = serde_json::to_vec_pretty(self).map_err(std::io::Error::other)?;
        write_whole(&folder.join(MANIFEST), &text)
    }
}

/// Replaces a small file so that a reader sees the old content or the new one.
pub(crate) fn write_whole(path: &Path, content: &[u8]) -> std::io::Result<()> {
    // Several processes may write at once, each to a name of its own.
    let unique = format!(".{}-{:?}.new", std::process::id(), std::thread::current().id());
    let new = super::super::fetch::beside(path, &unique);
    let mut file = std::fs::File::create(&new)?;
    let written = file.write_all(content).and_then(|()| file.sync_all());
    drop(file);
    let done = written.and_then(|()| std::fs::rename(&new, path));
    if done.is_err() {
        let _ = std::fs::remove_file(&new);
    }
    done
}
