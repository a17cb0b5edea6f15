//! Hashes of files outside the models folder, so that a large file is read once and not at every start.

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::super::digest::Sha256;
use super::manifest::write_whole;

/// Most files that are remembered.
const ENTRIES_MAX: usize = 512;
/// Longest list that is read, in bytes.
const BYTES_MAX: u64 = 4 * 1024 * 1024;

/// What a file was when it was hashed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    bytes: u64,
    modified_nanos: u64,
    sha256: String,
}

/// The remembered hash of a file, if the file looks untouched.
pub(crate) fn recall(list: &Path, path: &Path, meta: &Metadata) -> Option<Sha256> {
    let entries = read(list);
    let entry = entries.get(path.to_str()?)?;
    let same = entry.bytes == meta.len() && entry.modified_nanos == modified_nanos(meta)?;
    if same { entry.sha256.parse().ok() } else { None }
}

/// Remembers the hash of a file. `meta` is from before it was hashed. That it cannot be remembered is no failure.
pub(crate) fn remember(list: &Path, path: &Path, meta: &Metadata, sha256: Sha256) {
    let (Some(key), Some(modified_nanos)) = (path.to_str(), modified_nanos(meta)) else { return };
    let mut entries = read(list);
    if entries.len() >= ENTRIES_MAX {
        entries.retain(|path, _| Path::new(path).is_file());
        while entries.len() >= ENTRIES_MAX {
            entries.pop_first();
        }
    }
    entries.insert(key.to_owned(), Entry { bytes: meta.len(), modified_nanos, sha256: sha256.to_string() });
    if let Ok(text) = serde_json::to_vec_pretty(&entries)
        && let Err(error) = write_whole(list, &text)
    {
        tracing::debug!(target: "shoal::catalog", %error, "a file's hash could not be remembered");
    }
}

fn read(list: &Path) -> BTreeMap<String, Entry> {
    let small = std::fs::metadata(list).is_ok_and(|meta| meta.len() <= BYTES_MAX);
    let text = small.then(|| std::fs::read(list).ok()).flatten().unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

fn modified_nanos(meta: &Metadata) -> Option<u64> {
    let since = meta.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?;
    u64::try_from(since.as_nanos()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_touched_file_is_hashed_anew() {
        let folder = tempfile::tempdir().expect("a folder");
        let (list, path) = (folder.path().join("list"), folder.path().join("x"));
        std::fs::write(&path, "abc").expect("writes");
        let meta = std::fs::metadata(&path).expect("is there");
        assert_eq!(recall(&list, &path, &meta), None);
        remember(&list, &path, &meta, Sha256([7; 32]));
        assert_eq!(recall(&list, &path, &meta), Some(Sha256([7; 32])));
        std::fs::write(&path, "abcd").expect("writes");
        assert_eq!(recall(&list, &path, &std::fs::metadata(&path).expect("is there")), None);
        std::fs::write(&list, "{ damaged").expect("writes");
        assert_eq!(recall(&list, &path, &meta), None);
    }
}
