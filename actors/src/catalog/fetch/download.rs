//! One file over HTTP: resumed, checked while it comes, tried again when the network fails.

use std::fmt;
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

use super::super::digest::{CHUNK_BYTES, Sha256};
use super::part::{Note, Part};
use super::request::{self, Answer, Authorization};
use super::retry::Retries;
use super::{FetchError, Phase, Tools};
use crate::env::{HttpError, Url};

/// Turns an answer that is no success into an error.
pub(crate) type Refusal<'a> = dyn Fn(&Answer) -> FetchError + 'a;

/// What to download, and what is known of it.
pub(crate) struct Wanted<'a> {
    /// From where.
    pub(crate) url: &'a Url,
    /// As whom.
    pub(crate) authorization: Option<&'a Authorization>,
    /// Name of the file, for people.
    pub(crate) file: &'a str,
    /// Name of the source, for people.
    pub(crate) source_name: &'a str,
    /// Its hash, if known beforehand.
    pub(crate) sha256: Option<Sha256>,
    /// Its size, if known beforehand.
    pub(crate) bytes: Option<u64>,
    /// The size that it surely does not have.
    pub(crate) bytes_max: u64,
    /// Where it goes, under this name plus `.part` until it is complete.
    pub(crate) to: &'a Path,
    /// Bytes to be written elsewhere once it is here, for the check of disk space.
    pub(crate) bytes_after: u64,
    /// Whether to give up at once if the host cannot be reached, because there is another source.
    pub(crate) impatient: bool,
    /// What an answer means that is no success.
    pub(crate) refusal: &'a Refusal<'a>,
}

/// What was downloaded.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Downloaded {
    /// Its hash.
    pub(crate) sha256: Sha256,
    /// Its size.
    pub(crate) bytes: u64,
    /// Whether its hash was promised by somebody, and so checked.
    pub(crate) checked: bool,
}

impl fmt::Debug for Downloaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes, {}", self.bytes, self.sha256)
    }
}

/// How one try went wrong.
enum Failure {
    /// For good.
    Final(Box<FetchError>),
    /// Worth another try after this many new bytes.
    Again { error: Box<FetchError>, new_bytes: u64 },
    /// What was there before did not fit; start over.
    Stale(Box<FetchError>),
}

impl From<FetchError> for Failure {
    fn from(error: FetchError) -> Self {
        let error = Box::new(error);
        if error.is_transient() { Self::Again { error, new_bytes: 0 } } else { Self::Final(error) }
    }
}

/// Downloads a file to [`Wanted::to`], going on from what an earlier try left.
pub(crate) fn download(tools: &Tools<'_>, wanted: &Wanted<'_>) -> Result<Downloaded, FetchError> {
    let mut retries = Retries::new(tools.retry);
    let mut started_over = 0;
    let part_path = super::part::beside(wanted.to, ".part");
    if let Some(done) = already_there(tools, wanted)? {
        return Ok(done);
    }
    loop {
        let (error, new_bytes) = match attempt(tools, wanted, &part_path) {
            Ok(done) => return Ok(done),
            Err(Failure::Final(error)) => return Err(*error),
            Err(Failure::Stale(error)) => {
                started_over += 1;
                if started_over > 2 {
                    return Err(*error);
                }
                continue;
            }
            Err(Failure::Again { error, new_bytes }) => (*error, new_bytes),
        };
        let unreachable = matches!(&error, FetchError::Http(HttpError::Unreachable { .. }));
        if unreachable && wanted.impatient && new_bytes == 0 {
            return Err(error);
        }
        let asked = match &error {
            FetchError::Status { retry_after_seconds, .. } => retry_after_seconds.map(Duration::from_secs),
            _ => None,
        };
        let Some(delay) = retries.failed(new_bytes, asked, tools.rng.next_u64("catalog retry")) else {
            return Err(error);
        };
        tracing::debug!(target: "shoal::catalog", file = wanted.file, %error, ?delay, "download interrupted, trying again");
        tools.report(Phase::Retry, 0, wanted.bytes);
        if tools.cancel.sleep(delay) {
            return Err(FetchError::Cancelled);
        }
    }
}

/// An earlier run may have completed this file and been stopped after that.
fn already_there(tools: &Tools<'_>, wanted: &Wanted<'_>) -> Result<Option<Downloaded>, FetchError> {
    let Some(sha256) = wanted.sha256 else { return Ok(None) };
    if !wanted.to.is_file() {
        return Ok(None);
    }
    let found = super::hash_whole(tools, wanted.to, Phase::Verify)?;
    if found.0 == sha256 {
        return Ok(Some(Downloaded { sha256, bytes: found.1, checked: true }));
    }
    std::fs::remove_file(wanted.to).map_err(|error| super::part::disk("remove", wanted.to, &error))?;
    Ok(None)
}

fn attempt(tools: &Tools<'_>, wanted: &Wanted<'_>, part_path: &Path) -> Result<Downloaded, Failure> {
    tools.check_cancel()?;
    let (mut part, note) = Part::open(part_path)?;
    let mut resumed = note.filter(|note| belongs(note, wanted));
    if wanted.bytes.is_some_and(|bytes| part.bytes() > bytes) {
        resumed = None;
    }
    if resumed.is_none() {
        part.clear()?;
    }
    if part.bytes() > 0 && wanted.sha256.is_some() && wanted.bytes == Some(part.bytes()) {
        part.rehash(|done| tools.step(Phase::Verify, done, wanted.bytes))?;
        return conclude(wanted, part, wanted.sha256, true);
    }

    tools.report(Phase::Connect, part.bytes(), wanted.bytes);
    let mut headers = vec![("accept-encoding".to_owned(), "identity".to_owned())];
    if part.bytes() > 0 {
        headers.push(("range".to_owned(), format!("bytes={}-", part.bytes())));
        // From another mirror the validator means nothing, and the hash of the whole decides anyway.
        if let Some(etag) = resumed.as_ref().filter(|note| note.url == wanted.url.to_string()).and_then(|note| note.etag.clone()) {
            headers.push(("if-range".to_owned(), etag));
        }
    }
    let mut answer = request::get(tools.http, wanted.url, &headers, wanted.authorization)?;
    let start_over = |part: Part, reason: &str| {
        part.discard();
        Failure::Stale(Box::new(bad(wanted, reason)))
    };
    match answer.response.status {
        200 => part.clear()?,
        206 => match content_range(answer.response.header("content-range")) {
            Some((first, total)) if first == part.bytes() && wanted.bytes.is_none_or(|bytes| bytes == total) => {}
            _ if part.bytes() == 0 => {
                return Err(bad(wanted, "a part of the file where all of it was asked for").into());
            }
            _ => return Err(start_over(part, "another part of the file than the one asked for")),
        },
        416 if part.bytes() > 0 => return Err(start_over(part, "the file is shorter than what is here")),
        _ => return Err((wanted.refusal)(&answer).into()),
    }

    // A hub says what the file is before it sends the client off to the storage.
    let promised = answer.header_on_the_way("x-linked-etag").and_then(|etag| etag.trim_matches(['"', 'W', '/']).parse::<Sha256>().ok());
    if let (Some(expected), Some(found)) = (wanted.sha256, promised)
        && expected != found
    {
        return Err(wrong_hash(wanted, expected, found).into());
    }
    let sha256 = wanted.sha256.or(promised);
    let linked = answer.header_on_the_way("x-linked-size").and_then(|size| size.trim().parse::<u64>().ok());
    let encoded = answer.response.header("content-encoding").is_some_and(|encoding| !encoding.eq_ignore_ascii_case("identity"));
    if encoded {
        return Err(bad(wanted, "the file is compressed, though that was not asked for").into());
    }
    let length = answer.response.header("content-length").and_then(|length| length.trim().parse::<u64>().ok());
    let coming = length.and_then(|length| length.checked_add(part.bytes()));
    let total = coming.or(linked).or(wanted.bytes);
    if let (Some(expected), Some(found)) = (wanted.bytes.or(linked), total)
        && expected != found
    {
        let (file, source_name) = (wanted.file.to_owned(), wanted.source_name.to_owned());
        return Err(FetchError::WrongSize { file, source_name, expected, found }.into());
    }
    let limit = total.unwrap_or(wanted.bytes_max).min(wanted.bytes_max);
    if total.is_some_and(|total| total > wanted.bytes_max) {
        return Err(too_large(wanted, wanted.bytes_max).into());
    }
    if let Some(note) = &resumed
        && part.bytes() > 0
        && !same_file(note, sha256, &answer)
    {
        return Err(start_over(part, "the file has changed since the download began"));
    }
    tools.need_space(wanted.to, total.unwrap_or(0).saturating_sub(part.bytes()).saturating_add(wanted.bytes_after))?;

    let before = part.bytes();
    if before > 0 {
        part.rehash(|done| tools.step(Phase::Verify, done, total))?;
    }
    part.annotate(&Note {
        url: wanted.url.to_string(),
        etag: strong_etag(&answer),
        bytes: total,
        sha256: sha256.map(|sha256| sha256.to_string()),
    })?;
    receive(tools, wanted, &mut part, &mut answer, total, limit)?;
    conclude(wanted, part, sha256, before > 0)
}

/// Reads the body into the part.
fn receive(
    tools: &Tools<'_>,
    wanted: &Wanted<'_>,
    part: &mut Part,
    answer: &mut Answer,
    total: Option<u64>,
    limit: u64,
) -> Result<(), Failure> {
    let before = part.bytes();
    let broken = |part: &Part, reason: String| Failure::Again {
        error: Box::new(HttpError::Broken { host: answer.url.host().to_owned(), reason }.into()),
        new_bytes: part.bytes() - before,
    };
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        tools.check_cancel()?;
        let count = match answer.response.body.read(&mut chunk) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(broken(part, error.to_string())),
        };
        if part.bytes() + count as u64 > limit {
            return Err(too_large(wanted, limit).into());
        }
        part.append(&chunk[..count], total.unwrap_or(0).saturating_sub(part.bytes()))?;
        tools.report(Phase::Download, part.bytes(), total);
    }
    match total {
        Some(total) if part.bytes() < total => Err(broken(part, format!("it ended after {} of {total} bytes", part.bytes()))),
        _ => Ok(()),
    }
}

/// Checks what is there and gives it its name, or throws it away.
fn conclude(wanted: &Wanted<'_>, part: Part, sha256: Option<Sha256>, resumed: bool) -> Result<Downloaded, Failure> {
    let found = part.hash();
    if let Some(expected) = sha256
        && expected != found
    {
        let error = Box::new(wrong_hash(wanted, expected, found));
        part.discard();
        // The old bytes may be to blame rather than the server.
        return Err(if resumed { Failure::Stale(error) } else { Failure::Final(error) });
    }
    let bytes = part.bytes();
    part.finish(wanted.to)?;
    Ok(Downloaded { sha256: found, bytes, checked: sha256.is_some() })
}

/// Whether what lies there may be a part of what is wanted, as far as can be told before the server has spoken.
fn belongs(note: &Note, wanted: &Wanted<'_>) -> bool {
    let noted: Option<Sha256> = note.sha256.as_ref().and_then(|text| text.parse().ok());
    match (wanted.sha256, noted) {
        (Some(expected), Some(noted)) => expected == noted,
        (Some(_), None) => false,
        (None, _) => note.url == wanted.url.to_string() && (note.etag.is_some() || noted.is_some()),
    }
}

/// Whether the server still speaks of the file that the bytes came from.
fn same_file(note: &Note, sha256: Option<Sha256>, answer: &Answer) -> bool {
    let noted: Option<Sha256> = note.sha256.as_ref().and_then(|text| text.parse().ok());
    match (noted, sha256) {
        (Some(noted), Some(now)) => noted == now,
        _ => note.etag.is_some() && note.etag == strong_etag(answer),
    }
}

fn strong_etag(answer: &Answer) -> Option<String> {
    answer.response.header("etag").map(str::trim).filter(|etag| etag.starts_with('"')).map(str::to_owned)
}

/// Reads `bytes first-last/total`.
fn content_range(value: Option<&str>) -> Option<(u64, u64)> {
    let (range, total) = value?.trim().strip_prefix("bytes")?.trim_start().split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last, total): (u64, u64, u64) = (first.parse().ok()?, last.parse().ok()?, total.parse().ok()?);
    (first <= last && last < total).then_some((first, total))
}

fn bad(wanted: &Wanted<'_>, reason: &str) -> FetchError {
    FetchError::BadAnswer { place: wanted.url.to_string(), reason: reason.to_owned() }
}

fn too_large(wanted: &Wanted<'_>, limit: u64) -> FetchError {
    FetchError::TooLarge { file: wanted.file.to_owned(), source_name: wanted.source_name.to_owned(), limit }
}

fn wrong_hash(wanted: &Wanted<'_>, expected: Sha256, found: Sha256) -> FetchError {
    let (file, source_name) = (wanted.file.to_owned(), wanted.source_name.to_owned());
    FetchError::WrongHash { file, source_name, expected, found }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges() {
        assert_eq!(content_range(Some("bytes 5-9/10")), Some((5, 10)));
        for bad in ["bytes 5-9/*", "bytes 9-5/10", "bytes 5-10/10", "items 5-9/10", "", "bytes */10"] {
            assert_eq!(content_range(Some(bad)), None, "{bad}");
        }
        assert_eq!(content_range(None), None);
    }
}
