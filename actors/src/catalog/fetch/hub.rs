//! The hub: repositories of model files, behind an interface that several services offer.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use zeroize::Zeroizing;

use super::super::digest::Sha256;
use super::super::known::HubFile;
use super::super::reference::{HubReference, ends_in_gguf};
use super::download::{Downloaded, Wanted, download};
use super::request::{self, Answer, Authorization};
use super::{FetchError, Phase, Tools};
use crate::env::{HttpError, Url};

/// Where the hub is if the user says nothing.
pub const HUB_DEFAULT: &str = "https://huggingface.co";
/// Longest list of a repository's files that is read, in bytes.
const LIST_BYTES_MAX: u64 = 32 * 1024 * 1024;
/// Longest token, in bytes.
const TOKEN_BYTES_MAX: u64 = 4 * 1024;
/// Larger than any model file, in bytes.
pub(crate) const MODEL_BYTES_MAX: u64 = 4 << 40;
/// Quantisations in the order in which one is chosen where the user chose none.
const PREFERRED: [&str; 10] = ["Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "F16", "F32"];

/// Where the hub is and as whom to ask.
#[derive(Clone)]
pub struct HubSettings {
    endpoint: Result<Url, String>,
    token: Option<Zeroizing<String>>,
    offline: bool,
}

impl HubSettings {
    /// A hub at that address, asked without a token.
    ///
    /// # Errors
    /// If the address is no http or https address.
    pub fn new(endpoint: &str) -> Result<Self, crate::env::UrlError> {
        Ok(Self { endpoint: Ok(Url::parse(endpoint)?.url), token: None, offline: false })
    }

    /// The same with a token.
    #[must_use]
    pub fn with_token(mut self, token: &str) -> Self {
        let token = token.trim();
        // What could not stand in a header is no token.
        let good = !token.is_empty() && token.bytes().all(|b| b.is_ascii_graphic());
        self.token = good.then(|| Zeroizing::new(token.to_owned()));
        self
    }

    /// Follows `HF_ENDPOINT`, `HF_TOKEN` (or `HUGGING_FACE_HUB_TOKEN`), `HF_HUB_OFFLINE`, and the token file that the
    /// hub's own tools leave in `HF_TOKEN_PATH`, `HF_HOME`, `XDG_CACHE_HOME/huggingface` or `~/.cache/huggingface`.
    pub fn from_variables(variable: &dyn Fn(&str) -> Option<String>, home: Option<&Path>) -> Self {
        let get = |name: &str| variable(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        let endpoint = get("HF_ENDPOINT").unwrap_or_else(|| HUB_DEFAULT.to_owned());
        let endpoint = Url::parse(&endpoint).map(|parsed| parsed.url).map_err(|error| format!("HF_ENDPOINT cannot be used: {error}"));
        let offline = get("HF_HUB_OFFLINE").is_some_and(|value| matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on"));
        let settings = Self { endpoint, token: None, offline };
        let token = get("HF_TOKEN").or_else(|| get("HUGGING_FACE_HUB_TOKEN")).map(Zeroizing::new).or_else(|| {
            let file = get("HF_TOKEN_PATH")
                .map(PathBuf::from)
                .or_else(|| get("HF_HOME").map(|folder| Path::new(&folder).join("token")))
                .or_else(|| get("XDG_CACHE_HOME").map(|folder| Path::new(&folder).join("huggingface/token")))
                .or_else(|| home.map(|home| home.join(".cache/huggingface/token")))?;
            let small = std::fs::metadata(&file).is_ok_and(|meta| meta.is_file() && meta.len() <= TOKEN_BYTES_MAX);
            small.then(|| std::fs::read_to_string(&file).ok()).flatten().map(Zeroizing::new)
        });
        match token {
            Some(token) => settings.with_token(&token),
            None => settings,
        }
    }

    /// Name for people.
    pub(crate) fn name(&self) -> String {
        match &self.endpoint {
            Ok(url) => format!("hub {}", url.host()),
            Err(_) => "hub".to_owned(),
        }
    }

    fn endpoint(&self) -> Result<&Url, FetchError> {
        if self.offline {
            return Err(FetchError::Setting("HF_HUB_OFFLINE is set, so the hub is not asked; unset it to fetch from there".to_owned()));
        }
        self.endpoint.as_ref().map_err(|reason| FetchError::Setting(reason.clone()))
    }

    /// A token goes over an encrypted connection, or to this machine, or nowhere.
    fn authorization(&self, endpoint: &Url) -> Option<Authorization> {
        let token = self.token.as_ref().filter(|_| endpoint.is_secure() || endpoint.is_loopback())?;
        Some(Authorization::bearer(endpoint, token))
    }

    /// What an answer means that is no success.
    fn refusal(&self, endpoint: &Url, repository: &str, what: &str, answer: &Answer) -> FetchError {
        let status = answer.response.status;
        let code = answer.header_on_the_way("x-error-code").unwrap_or_default();
        let place = answer.url.to_string();
        let missing = |todo: &str| FetchError::Missing { what: what.to_owned(), place: place.clone(), todo: todo.to_owned() };
        match (status, code) {
            (_, "EntryNotFound") => missing("look up the file's name on the repository's page"),
            (_, "RevisionNotFound") => missing("the repository has no such revision; leave `@…` out for the main branch"),
            (401 | 403, code) if answer.url.same_origin(endpoint) => {
                let problem = match &self.token {
                    None if code == "RepoNotFound" => "no such repository is open to everybody, and no token was given",
                    None => "no token was given",
                    Some(_) if !endpoint.is_secure() && !endpoint.is_loopback() => {
                        "the token is not sent over a connection without encryption"
                    }
                    Some(_) => "the token that was found is not allowed to read it",
                };
                let page = endpoint.below(repository.split('/')).to_string();
                let tokens = endpoint.below(["settings", "tokens"]).to_string();
                let (hub, problem) = (endpoint.host().to_owned(), problem.to_owned());
                FetchError::Gated { repository: repository.to_owned(), hub, problem, page, tokens }
            }
            (404, _) => missing("check owner, name, file and revision"),
            _ => FetchError::Status { what: what.to_owned(), place, status, retry_after_seconds: answer.retry_after_seconds() },
        }
    }
}

impl fmt::Debug for HubSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubSettings")
            .field("endpoint", &self.endpoint)
            .field("token", &self.token.is_some())
            .field("offline", &self.offline)
            .finish()
    }
}

/// A file that was chosen from a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chosen {
    /// Which.
    pub(crate) file: HubFile,
    /// Its size, if the hub says it.
    pub(crate) bytes: Option<u64>,
    /// Its hash, if the hub says it.
    pub(crate) sha256: Option<Sha256>,
    /// The licence, if the hub says it.
    pub(crate) licence: Option<String>,
}

#[derive(Deserialize)]
struct Listing {
    #[serde(default)]
    siblings: Vec<Sibling>,
    #[serde(default)]
    tags: Vec<String>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    #[serde(default)]
    size: Option<u64>,
    #[serde(default)]
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    #[serde(default)]
    sha256: Option<String>,
    #[serde(default)]
    size: Option<u64>,
}

/// Asks the hub for a repository's files and chooses one.
pub(crate) fn choose(tools: &Tools<'_>, settings: &HubSettings, reference: &HubReference) -> Result<Chosen, FetchError> {
    tools.check_cancel()?;
    tools.report(Phase::Connect, 0, None);
    let endpoint = settings.endpoint()?;
    let revision = reference.revision.as_deref().unwrap_or("main");
    let path = ["api", "models"].into_iter().chain(reference.repository.split('/')).chain(["revision", revision]);
    let url = endpoint.below(path).with_query("blobs=true");
    let authorization = settings.authorization(endpoint);
    let mut retries = super::retry::Retries::new(tools.retry);
    let text = loop {
        let outcome = list(tools, settings, endpoint, reference, &url, authorization.as_ref());
        match outcome {
            Ok(text) => break text,
            Err(error) if error.is_transient() => tools.back_off(&mut retries, error)?,
            Err(error) => return Err(error),
        }
    };
    let odd = |reason: String| FetchError::BadAnswer { place: url.to_string(), reason };
    let listing: Listing = serde_json::from_slice(&text).map_err(|error| odd(error.to_string()))?;
    let names: Vec<&str> = listing.siblings.iter().map(|sibling| sibling.rfilename.as_str()).collect();
    let name = pick(&reference.repository, &names, reference.choice.as_deref())?;
    let sibling = listing.siblings.iter().find(|sibling| sibling.rfilename == name);
    let lfs = sibling.and_then(|sibling| sibling.lfs.as_ref());
    Ok(Chosen {
        file: HubFile { repository: reference.repository.clone(), revision: revision.to_owned(), file: name.clone() },
        bytes: lfs.and_then(|lfs| lfs.size).or_else(|| sibling.and_then(|sibling| sibling.size)),
        sha256: lfs.and_then(|lfs| lfs.sha256.as_ref()).and_then(|text| text.parse().ok()),
        licence: listing.tags.iter().find_map(|tag| tag.strip_prefix("license:")).map(str::to_owned),
    })
}

fn list(
    tools: &Tools<'_>,
    settings: &HubSettings,
    endpoint: &Url,
    reference: &HubReference,
    url: &Url,
    authorization: Option<&Authorization>,
) -> Result<Vec<u8>, FetchError> {
    let mut answer = request::get(tools.http, url, &[("accept".to_owned(), "application/json".to_owned())], authorization)?;
    if answer.response.status != 200 {
        return Err(settings.refusal(endpoint, &reference.repository, &reference.to_string(), &answer));
    }
    read_text(&mut answer, LIST_BYTES_MAX)
}

/// Reads a whole body that must not be longer than `limit`.
pub(crate) fn read_text(answer: &mut Answer, limit: u64) -> Result<Vec<u8>, FetchError> {
    let mut text = Vec::new();
    let read = answer.response.body.by_ref().take(limit + 1).read_to_end(&mut text);
    read.map_err(|error| HttpError::Broken { host: answer.url.host().to_owned(), reason: error.to_string() })?;
    if text.len() as u64 > limit {
        return Err(FetchError::BadAnswer { place: answer.url.to_string(), reason: format!("it is longer than {limit} bytes") });
    }
    Ok(text)
}

/// Chooses a GGUF file by its name, by its quantisation, or by what is usual.
pub(crate) fn pick(repository: &str, files: &[&str], choice: Option<&str>) -> Result<String, FetchError> {
    let whole = |name: &str| if is_piece(name) { Err(FetchError::Pieces { file: name.to_owned() }) } else { Ok(name.to_owned()) };
    if let Some(exact) = files.iter().find(|file| Some(**file) == choice && ends_in_gguf(file)) {
        return whole(exact);
    }
    let mut models: Vec<&str> = files.iter().copied().filter(|file| ends_in_gguf(file) && !is_companion(file)).collect();
    models.sort_unstable();
    let failed = |files: Vec<&str>| FetchError::Choice {
        repository: repository.to_owned(),
        choice: choice.map(str::to_owned),
        files: files.into_iter().map(str::to_owned).collect(),
    };
    let fitting = |quantisation: &str| models.iter().copied().filter(|file| has_word(file, quantisation)).collect::<Vec<_>>();
    if let Some(choice) = choice {
        return match fitting(choice).as_slice() {
            [one] => whole(one),
            [] => Err(failed(models)),
            [first, ..] if is_piece(first) => whole(first),
            several => Err(failed(several.to_vec())),
        };
    }
    if let [one] = models.as_slice() {
        return whole(one);
    }
    for quantisation in PREFERRED {
        let single: Vec<&str> = fitting(quantisation).into_iter().filter(|file| !is_piece(file)).collect();
        if let [one] = single.as_slice() {
            return whole(one);
        }
    }
    match models.as_slice() {
        [first, ..] if models.iter().all(|file| is_piece(file)) => whole(first),
        _ => Err(failed(models)),
    }
}

/// Whether a name holds a quantisation as a word of its own, so that `Q4_K` is not found in `Q4_K_M`.
fn has_word(file: &str, word: &str) -> bool {
    let (file, word) = (file.to_ascii_lowercase(), word.to_ascii_lowercase());
    let boundary = |c: Option<char>| c.is_none_or(|c| !(c.is_ascii_alphanumeric() || c == '_'));
    !word.is_empty()
        && file
            .match_indices(&word)
            .any(|(at, _)| boundary(file[..at].chars().next_back()) && boundary(file[at + word.len()..].chars().next()))
}

/// `…-00001-of-00003.gguf`.
fn is_piece(file: &str) -> bool {
    let stem = &file[..file.len().saturating_sub(5)];
    let mut words = stem.rsplit('-');
    let (last, of, number) = (words.next(), words.next(), words.next());
    let digits = |word: Option<&str>| word.is_some_and(|word| word.len() == 5 && word.bytes().all(|b| b.is_ascii_digit()));
    of == Some("of") && digits(last) && digits(number) && (last != Some("00001") || number != Some("00001"))
}

/// Files that go along with a model but are none: image encoders, importance matrices, adapters.
fn is_companion(file: &str) -> bool {
    let name = file.rsplit('/').next().unwrap_or(file).to_ascii_lowercase();
    name.starts_with("mmproj") || name.contains("-mmproj") || name.contains("imatrix")
}

/// Downloads a file of a repository.
pub(crate) fn fetch(
    tools: &Tools<'_>,
    settings: &HubSettings,
    file: &HubFile,
    sha256: Option<Sha256>,
    bytes: Option<u64>,
    to: &Path,
    impatient: bool,
) -> Result<Downloaded, FetchError> {
    let endpoint = settings.endpoint()?;
    let path = file.repository.split('/').chain(["resolve", &file.revision]).chain(file.file.split('/'));
    let url = endpoint.below(path);
    let what = format!("{} of {}", file.file, file.repository);
    let authorization = settings.authorization(endpoint);
    let wanted = Wanted {
        url: &url,
        authorization: authorization.as_ref(),
        file: &file.file,
        source_name: &settings.name(),
        sha256,
        bytes,
        bytes_max: bytes.unwrap_or(MODEL_BYTES_MAX),
        to,
        bytes_after: 0,
        impatient,
        refusal: &|answer| settings.refusal(endpoint, &file.repository, &what, answer),
    };
    download(tools, &wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_is_found_where_the_hubs_tools_leave_it_and_never_printed() {
        let home = tempfile::tempdir().expect("a folder");
        let none = HubSettings::from_variables(&|_| None, Some(home.path()));
        assert!(none.token.is_none() && none.endpoint().is_ok_and(|url| url.host() == "huggingface.co"));
        std::fs::create_dir_all(home.path().join(".cache/huggingface")).expect("makes");
        std::fs::write(home.path().join(".cache/huggingface/token"), "hf_file\n").expect("writes");
        let file = HubSettings::from_variables(&|_| None, Some(home.path()));
        assert_eq!(file.token.as_ref().map(|token| token.as_str()), Some("hf_file"));
        let variable = HubSettings::from_variables(&|name| (name == "HF_TOKEN").then(|| "hf_variable".to_owned()), Some(home.path()));
        assert_eq!(variable.token.as_ref().map(|token| token.as_str()), Some("hf_variable"));
        assert!(!format!("{variable:?}").contains("hf_variable"));
        assert!(none.clone().with_token("a\nb").token.is_none());
    }

    #[test]
    fn a_token_is_not_sent_in_the_clear() {
        let plain = HubSettings::new("http://hub.example.org").expect("parses").with_token("t");
        assert!(plain.authorization(plain.endpoint().expect("set")).is_none());
        let local = HubSettings::new("http://127.0.0.1:1").expect("parses").with_token("t");
        assert!(local.authorization(local.endpoint().expect("set")).is_some());
    }

    #[test]
    fn offline_and_nonsense_are_said() {
        let offline = HubSettings::from_variables(&|name| (name == "HF_HUB_OFFLINE").then(|| "1".to_owned()), None);
        assert!(matches!(offline.endpoint(), Err(FetchError::Setting(_))));
        let nonsense = HubSettings::from_variables(&|name| (name == "HF_ENDPOINT").then(|| "ftp://x".to_owned()), None);
        assert!(matches!(nonsense.endpoint(), Err(FetchError::Setting(_))));
    }

    #[test]
    fn files_are_picked() {
        let files = ["README.md", "m-Q4_K_S.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m-f16.gguf", "big-Q6_K-00001-of-00002.gguf"];
        let pick = |choice| pick("o/n", &files, choice);
        assert_eq!(pick(None), Ok("m-Q4_K_M.gguf".into()));
        assert_eq!(pick(Some("q8_0")), Ok("m-Q8_0.gguf".into()));
        assert_eq!(pick(Some("m-Q4_K_S.gguf")), Ok("m-Q4_K_S.gguf".into()));
        assert!(matches!(pick(Some("Q4_K")), Err(FetchError::Choice { .. })));
        assert!(matches!(pick(Some("m")), Err(FetchError::Choice { files, .. }) if files.len() == 3));
        assert!(matches!(pick(Some("Q6_K")), Err(FetchError::Pieces { .. })));
        assert!(matches!(super::pick("o/n", &["a.txt"], None), Err(FetchError::Choice { files, .. }) if files.is_empty()));
        assert_eq!(super::pick("o/n", &["x.gguf"], None), Ok("x.gguf".into()));
    }
}
