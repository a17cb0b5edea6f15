//! The models folder: models on disk, shared by all nodes of a user.
//!
//! ```text
//! models/
//!   smollm2-135m/            one folder for each model, named after it
//!     manifest.json          name, hash, size, source, licence, when
//!     SmolLM2-….gguf
//!   .staging/smollm2-135m/   what is being fetched, kept when that is interrupted
//!   .locks/smollm2-135m      held while it is fetched or removed
//!   .hashes.json             hashes of files elsewhere
//! ```
//!
//! A model's folder appears under its name when it is complete, in one step, and disappears in one step. So whoever
//! lists the folder sees whole models or none, however many processes are at work.

mod hashes;
mod in_use;
mod lock;
mod manifest;

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

pub(crate) use in_use::InUse;
pub(crate) use lock::Lock;
pub(crate) use manifest::Manifest;

use super::cancel::Cancel;
use super::digest::{Hasher, Sha256, hash_file};
use crate::card::ModelOnDisk;

const STAGING: &str = ".staging";
const LOCKS: &str = ".locks";
const HASHES: &str = ".hashes.json";

/// A model on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LocalModel {
    /// The name users call it by; the path for a file outside the models folder.
    pub name: String,
    /// The GGUF file.
    pub path: PathBuf,
    /// SHA-256 of the file, in lower-case hexadecimal.
    pub sha256: String,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Where it came from, for people.
    pub source: String,
    /// Its licence, if known.
    pub licence: Option<String>,
    /// When it came, in seconds since 1970, if known.
    pub fetched_unix_seconds: Option<u64>,
}

impl LocalModel {
    /// As it stands in a node's card.
    pub fn on_disk(&self) -> ModelOnDisk {
        ModelOnDisk { name: self.name.clone(), sha256: self.sha256.clone(), bytes: self.bytes }
    }
}

/// Something in the models folder that is no whole model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BrokenEntry {
    /// Where.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

/// What the models folder holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Listing {
    /// Whole models, by name.
    pub models: Vec<LocalModel>,
    /// What cannot be used.
    pub broken: Vec<BrokenEntry>,
}

/// Why the models folder could not be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The file system refused.
    #[error("cannot {doing} {path}: {reason}")]
    Disk {
        /// What was tried.
        doing: &'static str,
        /// With what.
        path: PathBuf,
        /// The system's words.
        reason: String,
    },
    /// There is no home folder to put the models folder in.
    #[error("this user has no home folder that is known; set SHOAL_MODELS to the folder for models")]
    NoHome,
    /// The model is needed.
    #[error("{name} is in use by an instance of a node; take that down first (`shoal unload {name}`, with the node's --api)")]
    InUse {
        /// The model.
        name: String,
    },
    /// Another process works on the model.
    #[error("{name} is being fetched or removed by another process; try again when that is done")]
    Busy {
        /// The model.
        name: String,
    },
    /// No such model is on disk.
    #[error("{name} is not in the models folder {folder}")]
    Absent {
        /// The model.
        name: String,
        /// The models folder.
        folder: PathBuf,
    },
    /// The file is there but is no model.
    #[error("{path} is no usable GGUF file: {reason}")]
    NotAModel {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// The models folder. Cheap to clone; all methods block.
#[derive(Debug, Clone)]
pub struct Store {
    root: PathBuf,
}

impl Store {
    /// The folder that is used where nothing else is said: `SHOAL_MODELS`, else `.shoal/models` in the home folder.
    ///
    /// # Errors
    /// If neither is known.
    pub fn default_root(variable: &dyn Fn(&str) -> Option<String>, home: Option<&Path>) -> Result<PathBuf, StoreError> {
        if let Some(folder) = variable("SHOAL_MODELS").filter(|folder| !folder.is_empty()) {
            return Ok(folder.into());
        }
        home.map(|home| home.join(".shoal/models")).ok_or(StoreError::NoHome)
    }

    /// Uses `root`, which is made if it is not there.
    ///
    /// # Errors
    /// The operating system's.
    pub fn open(root: &Path) -> Result<Self, StoreError> {
        for folder in [root.to_owned(), root.join(STAGING), root.join(LOCKS)] {
            std::fs::create_dir_all(&folder).map_err(|error| disk("create", &folder, &error))?;
        }
        let root = std::path::absolute(root).map_err(|error| disk("use", root, &error))?;
        Ok(Self { root })
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// All that is there. Broken entries are reported beside the whole ones.
    ///
    /// # Errors
    /// If the folder itself cannot be read.
    pub fn list(&self) -> Result<Listing, StoreError> {
        let mut listing = Listing::default();
        let entries = std::fs::read_dir(&self.root).map_err(|error| disk("list", &self.root, &error))?;
        let mut names: Vec<OsString> = entries.filter_map(Result::ok).map(|entry| entry.file_name()).collect();
        names.sort();
        for name in names {
            if name.to_string_lossy().starts_with('.') {
                continue;
            }
            let folder = self.root.join(&name);
            match self.read(&folder) {
                Ok(model) => listing.models.push(model),
                // It may have been removed since the folder was listed.
                Err(_) if !folder.exists() => {}
                Err(reason) => listing.broken.push(BrokenEntry { path: folder, reason }),
            }
        }
        listing.models.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(listing)
    }

    /// The model of that name, if it is there and whole.
    pub fn find(&self, name: &str) -> Option<LocalModel> {
        self.read(&self.folder(name)).ok()
    }

    fn read(&self, folder: &Path) -> Result<LocalModel, String> {
        if !folder.is_dir() {
            return Err("it is no model's folder; move it elsewhere, or name it by its path".to_owned());
        }
        let manifest = Manifest::read(folder)?;
        if self.folder(&manifest.name) != folder {
            return Err(format!("it says that it is {}, whose folder has another name", manifest.name));
        }
        Ok(LocalModel {
            path: folder.join(&manifest.file),
            name: manifest.name,
            sha256: manifest.sha256,
            bytes: manifest.bytes,
            source: manifest.source,
            licence: manifest.licence,
            fetched_unix_seconds: Some(manifest.fetched_unix_seconds),
        })
    }

    /// A file anywhere. Its hash is computed when it is first asked for, and remembered.
    ///
    /// # Errors
    /// If it cannot be read, or `check` finds that it is no model.
    pub fn file(&self, path: &Path, check: &dyn Fn(&Path) -> Result<(), String>) -> Result<LocalModel, StoreError> {
        let path = path.canonicalize().map_err(|error| disk("open", path, &error))?;
        let mut file = File::open(&path).map_err(|error| disk("open", &path, &error))?;
        let meta = file.metadata().map_err(|error| disk("read", &path, &error))?;
        if !meta.is_file() {
            return Err(StoreError::NotAModel { path, reason: "it is no file".to_owned() });
        }
        check(&path).map_err(|reason| StoreError::NotAModel { path: path.clone(), reason })?;
        let list = self.root.join(HASHES);
        let sha256 = match hashes::recall(&list, &path, &meta) {
            Some(sha256) => sha256,
            None => {
                let mut hasher = Hasher::default();
                hash_file(&mut file, &mut hasher, |_| Ok(())).map_err(|error| disk("read", &path, &error))?;
                let sha256 = hasher.finish();
                hashes::remember(&list, &path, &meta, sha256);
                sha256
            }
        };
        Ok(LocalModel {
            name: path.display().to_string(),
            sha256: sha256.to_string(),
            bytes: meta.len(),
            source: "file".to_owned(),
            licence: None,
            fetched_unix_seconds: None,
            path,
        })
    }

    /// Removes a model, and what an interrupted fetch of it left. A broken entry of that name goes, too.
    ///
    /// # Errors
    /// If it is not there, if `in_use` says that it is needed or a stage of any node on this machine was loaded from it, or if
    /// another process works on it.
    pub fn remove(&self, name: &str, in_use: &dyn Fn(&LocalModel) -> bool) -> Result<(), StoreError> {
        let Some(_lock) = lock::try_lock(&self.lock_path(name))? else {
            return Err(StoreError::Busy { name: name.to_owned() });
        };
        let folder = self.folder(name);
        let staging = self.staging_path(name);
        if !folder.exists() && !staging.exists() {
            return Err(StoreError::Absent { name: name.to_owned(), folder: self.root.clone() });
        }
        // Nodes of other folders of data, whom the caller cannot ask, mark the files that they need.
        if self.read(&folder).is_ok_and(|model| in_use(&model) || InUse::is_marked(&model.path)) {
            return Err(StoreError::InUse { name: name.to_owned() });
        }
        self.put_away(&folder)?;
        remove_folder(&staging)
    }

    /// Takes the lock of a model, waiting for who has it. `None` if that was called off.
    pub(crate) fn lock(&self, name: &str, cancel: &Cancel, waiting: &dyn Fn()) -> Result<Option<Lock>, StoreError> {
        lock::lock(&self.lock_path(name), cancel, waiting)
    }

    /// The folder in which a model is fetched. The caller holds the lock.
    pub(crate) fn staging(&self, name: &str) -> Result<PathBuf, StoreError> {
        let path = self.staging_path(name);
        std::fs::create_dir_all(&path).map_err(|error| disk("create", &path, &error))?;
        Ok(path)
    }

    /// A file that lies where the model's would but lacks its manifest, e.g. because the disk was full at the wrong
    /// moment: it may still be the right one.
    pub(crate) fn orphan(&self, name: &str, file: &str, bytes: u64) -> Option<PathBuf> {
        let path = self.folder(name).join(file);
        std::fs::metadata(&path).is_ok_and(|meta| meta.is_file() && meta.len() == bytes).then_some(path)
    }

    /// Makes a complete file part of the store. The caller holds the lock.
    pub(crate) fn commit(&self, file: &Path, manifest: &Manifest) -> Result<LocalModel, StoreError> {
        let folder = self.folder(&manifest.name);
        let staging = self.staging_path(&manifest.name);
        let ready = staging.join("ready");
        remove_folder(&ready)?;
        std::fs::create_dir_all(&ready).map_err(|error| disk("create", &ready, &error))?;
        let place = ready.join(&manifest.file);
        std::fs::rename(file, &place).map_err(|error| disk("rename", file, &error))?;
        if let Err(error) = manifest.write(&ready) {
            // What was fetched at length goes back to where the next try looks for it.
            let _ = std::fs::rename(&place, file);
            return Err(disk("write the manifest in", &ready, &error));
        }
        self.put_away(&folder)?;
        std::fs::rename(&ready, &folder).map_err(|error| disk("rename", &ready, &error))?;
        sync_folder(&self.root);
        if let Err(error) = remove_folder(&staging) {
            tracing::debug!(target: "shoal::catalog", %error, "left-overs of a fetch could not be removed");
        }
        self.read(&folder).map_err(|reason| StoreError::Disk { doing: "use", path: folder, reason })
    }

    /// Takes a folder out of sight in one step, then removes it.
    fn put_away(&self, folder: &Path) -> Result<(), StoreError> {
        if std::fs::symlink_metadata(folder).is_err() {
            return Ok(());
        }
        let mut gone = OsString::from("removed-");
        gone.push(folder.file_name().unwrap_or_default());
        let gone = self.root.join(STAGING).join(gone);
        remove_folder(&gone)?;
        std::fs::rename(folder, &gone).map_err(|error| disk("remove", folder, &error))?;
        remove_folder(&gone)
    }

    fn folder(&self, name: &str) -> PathBuf {
        self.root.join(slug(name))
    }

    fn staging_path(&self, name: &str) -> PathBuf {
        self.root.join(STAGING).join(slug(name))
    }

    fn lock_path(&self, name: &str) -> PathBuf {
        self.root.join(LOCKS).join(slug(name))
    }
}

/// A folder's name for a model: readable, and different for different models. Catalogue names (`a:b`) map to `a-b`;
/// other names carry a piece of their hash.
fn slug(name: &str) -> String {
    const LENGTH_MAX: usize = 96;
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '.' | '_' | '-');
    let readable: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' }).take(LENGTH_MAX).collect();
    let readable = readable.trim_start_matches('.');
    let catalogue = name.matches(':').count() == 1 && name.chars().all(|c| plain(c) || c == ':') && name.len() <= LENGTH_MAX;
    if catalogue && !name.starts_with('.') {
        return readable.to_owned();
    }
    let mut hasher = Hasher::default();
    hasher.update(name.as_bytes());
    let Sha256(hash) = hasher.finish();
    format!("{readable}-{}", hex::encode(&hash[..4]))
}

fn remove_folder(path: &Path) -> Result<(), StoreError> {
    let removed = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(disk("remove", path, &error)),
        _ => Ok(()),
    }
}

/// Makes a rename last through a power cut, where the system lets folders be synchronised.
fn sync_folder(path: &Path) {
    if let Ok(folder) = File::open(path) {
        let _ = folder.sync_all();
    }
}

fn disk(doing: &'static str, path: &Path, error: &io::Error) -> StoreError {
    StoreError::Disk { doing, path: path.to_owned(), reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(store: &Store, name: &str, content: &[u8]) -> LocalModel {
        let staged = store.staging(name).expect("a folder").join("m.gguf");
        std::fs::write(&staged, content).expect("writes");
        let manifest = Manifest::new(name, "m.gguf", Sha256([1; 32]), content.len() as u64, "test", Some("MIT"), std::time::Duration::ZERO);
        store.commit(&staged, &manifest).expect("commits")
    }

    fn store() -> (tempfile::TempDir, Store) {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::open(&folder.path().join("models")).expect("opens");
        (folder, store)
    }

    #[test]
    fn models_come_and_go() {
        let (_folder, store) = store();
        assert_eq!(store.list().expect("lists"), Listing::default());
        let model = put(&store, "a:1", b"abc");
        assert_eq!(store.find("a:1"), Some(model.clone()));
        assert_eq!(std::fs::read(&model.path).expect("reads"), b"abc");
        put(&store, "a:1", b"abcd");
        put(&store, "Owner/Name:x.gguf", b"x");
        let names: Vec<String> = store.list().expect("lists").models.into_iter().map(|model| model.name).collect();
        assert_eq!(names, ["Owner/Name:x.gguf", "a:1"]);
        assert!(matches!(store.remove("a:1", &|_| true), Err(StoreError::InUse { .. })));
        store.remove("a:1", &|_| false).expect("removes");
        assert!(matches!(store.remove("a:1", &|_| false), Err(StoreError::Absent { .. })));
        assert_eq!(store.list().expect("lists").models.len(), 1);
        let hidden = std::fs::read_dir(store.root().join(STAGING)).expect("lists").count();
        assert_eq!(hidden, 0, "nothing is left in staging");
    }

    #[test]
    fn broken_entries_are_reported_and_harm_nobody() {
        let (_folder, store) = store();
        put(&store, "good:1", b"abc");
        for (name, spoil) in [("torn:1", "{\"form\":1,\"na"), ("empty:1", ""), ("other:1", "[]")] {
            let model = put(&store, name, b"abc");
            std::fs::write(model.path.with_file_name("manifest.json"), spoil).expect("writes");
        }
        let short = put(&store, "short:1", b"abc");
        std::fs::write(&short.path, b"a").expect("writes");
        let gone = put(&store, "gone:1", b"abc");
        std::fs::remove_file(&gone.path).expect("removes");
        let outside = put(&store, "outside:1", b"abc");
        let manifest = outside.path.with_file_name("manifest.json");
        let text = std::fs::read_to_string(&manifest).expect("reads").replace("\"m.gguf\"", "\"../good-1/m.gguf\"");
        std::fs::write(&manifest, text).expect("writes");
        std::fs::rename(store.root().join("short-1"), store.root().join("renamed")).expect("renames");
        std::fs::write(store.root().join("stray.gguf"), b"x").expect("writes");
        let listing = store.list().expect("lists");
        assert_eq!(listing.models.len(), 1);
        assert_eq!(listing.broken.len(), 7, "{:?}", listing.broken);
        assert!(listing.broken.iter().all(|entry| !entry.reason.is_empty()));
        store.remove("torn:1", &|_| true).expect("a broken entry is in nobody's use");
        put(&store, "empty:1", b"abc");
        assert_eq!(store.list().expect("lists").models.len(), 2);
    }

    #[test]
    fn files_elsewhere_are_hashed_once() {
        let (folder, store) = store();
        let path = folder.path().join("x.gguf");
        std::fs::write(&path, "abc").expect("writes");
        let model = store.file(&path, &|_| Ok(())).expect("works");
        assert_eq!(model.sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(store.file(&path, &|_| Ok(())).expect("works"), model);
        assert!(matches!(store.file(&path, &|_| Err("no".into())), Err(StoreError::NotAModel { .. })));
        assert!(matches!(store.file(folder.path(), &|_| Ok(())), Err(StoreError::NotAModel { .. })));
        assert!(matches!(store.file(&folder.path().join("y"), &|_| Ok(())), Err(StoreError::Disk { .. })));
    }

    #[test]
    fn a_model_that_a_stage_was_loaded_from_cannot_be_removed() {
        let (_folder, store) = store();
        let model = put(&store, "a:1", b"abc");
        let (one, other) = (InUse::take(&model.path), InUse::take(&model.path));
        drop(one);
        assert!(matches!(store.remove("a:1", &|_| false), Err(StoreError::InUse { .. })));
        drop(other);
        store.remove("a:1", &|_| false).expect("removes");
    }

    #[test]
    fn a_model_that_is_fetched_cannot_be_removed() {
        let (_folder, store) = store();
        put(&store, "a:1", b"abc");
        let lock = store.lock("a:1", &Cancel::new(), &|| {}).expect("works").expect("free");
        assert!(matches!(store.remove("a:1", &|_| false), Err(StoreError::Busy { .. })));
        drop(lock);
        store.remove("a:1", &|_| false).expect("removes");
    }

    #[test]
    fn folder_names() {
        assert_eq!(slug("smollm2:135m"), "smollm2-135m");
        assert_ne!(slug("a/b:c"), slug("a:b/c"));
        assert_ne!(slug("a/B"), slug("a/b"));
        for name in ["../x", "..", "/", "", ".hidden", &"x".repeat(500), "a:b:c"] {
            let slug = slug(name);
            assert!(!slug.starts_with('.') && !slug.contains('/') && !slug.is_empty() && slug.len() < 120, "{slug}");
        }
    }

    #[test]
    fn the_default_folder() {
        let home = Path::new("/home/u");
        assert_eq!(Store::default_root(&|_| None, Some(home)), Ok("/home/u/.shoal/models".into()));
        assert_eq!(Store::default_root(&|_| Some("/m".into()), None), Ok("/m".into()));
        assert_eq!(Store::default_root(&|_| None, None), Err(StoreError::NoHome));
    }
}
