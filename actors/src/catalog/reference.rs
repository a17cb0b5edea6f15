//! What a user may write for MODEL.
//!
//! | written | meant |
//! |---|---|
//! | `smollm2:135m`, `smollm2` | a catalogue name, with or without its tag |
//! | `./x.gguf`, `/models/x.gguf`, `~/x.gguf`, `x.gguf`, `sub/x.gguf` | a file |
//! | `owner/name`, `owner/name:Q4_K_M`, `owner/name:file.gguf`, `owner/name@revision:…` | a repository on the hub |
//!
//! A hub repository may be written with `hf.co/`, `huggingface.co/` or the whole address before it.

use std::fmt;
use std::path::{Path, PathBuf};

use super::known::KnownModel;

/// Longest text that is taken, in bytes.
const TEXT_BYTES_MAX: usize = 1024;

/// A model, as a user named it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reference {
    /// A model of the catalogue, by its first name.
    Known(String),
    /// A file on this machine.
    File(PathBuf),
    /// A file in a repository on the hub.
    Hub(HubReference),
}

/// A repository on the hub, and which of its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubReference {
    /// `owner/name`.
    pub repository: String,
    /// A branch, tag or commit; the repository's main branch if none.
    pub revision: Option<String>,
    /// A file's path in the repository, or a quantisation such as `Q4_K_M`; the best fit if none.
    pub choice: Option<String>,
}

impl fmt::Display for HubReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repository)?;
        if let Some(revision) = &self.revision {
            write!(f, "@{revision}")?;
        }
        if let Some(choice) = &self.choice {
            write!(f, ":{choice}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(name) => f.write_str(name),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Hub(hub) => hub.fmt(f),
        }
    }
}

/// Why a text names no model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReferenceError {
    /// Nothing was written.
    #[error("no model was named; try `{example}`")]
    Empty {
        /// A name of the catalogue.
        example: String,
    },
    /// Control characters, or far too long.
    #[error("the model's name has control characters or more than {TEXT_BYTES_MAX} bytes")]
    Malformed,
    /// The catalogue has no such name.
    #[error("the catalogue has no model `{text}`{}", hint(near, known))]
    Unknown {
        /// What was written.
        text: String,
        /// Names that look like it, best first.
        near: Vec<String>,
        /// All names of the catalogue.
        known: Vec<String>,
    },
    /// It looks like a hub repository but is none.
    #[error("`{text}` is no hub repository: {reason}; write owner/name, owner/name:QUANT, owner/name:file.gguf or owner/name@revision")]
    Hub {
        /// What was written.
        text: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// `~` cannot be resolved.
    #[error("`{text}` starts at the home folder, but this user has none that is known; write the whole path")]
    NoHome {
        /// What was written.
        text: String,
    },
}

fn hint(near: &[String], known: &[String]) -> String {
    let place = "a file is written as ./file.gguf, a hub repository as owner/name";
    match near {
        [] => format!("; it has {}; {place}", known.join(", ")),
        [best] => format!(" - did you mean {best}? ({place})"),
        [best, rest @ ..] => format!(" - did you mean {best} (or {})? ({place})", rest.join(", ")),
    }
}

impl Reference {
    /// Reads what a user wrote.
    ///
    /// # Errors
    /// If it names nothing, with the nearest names of the catalogue.
    pub fn parse(text: &str, known: &[KnownModel], home: Option<&Path>) -> Result<Self, ReferenceError> {
        let text = text.trim();
        if text.is_empty() {
            let example = known.first().map_or("owner/name", |model| model.name()).to_owned();
            return Err(ReferenceError::Empty { example });
        }
        if text.len() > TEXT_BYTES_MAX || text.chars().any(char::is_control) {
            return Err(ReferenceError::Malformed);
        }
        for prefix in ["https://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/", "hf:"] {
            if let Some(rest) = text.strip_prefix(prefix) {
                return hub(text, &from_page(rest)).map(Self::Hub);
            }
        }
        if let Some(path) = as_path(text, home)? {
            return Ok(Self::File(path));
        }
        if text.contains('/') {
            return hub(text, text).map(Self::Hub);
        }
        let lower = text.to_ascii_lowercase();
        let lower = lower.strip_suffix(":latest").unwrap_or(&lower);
        if let Some(model) = known.iter().find(|model| model.names.iter().any(|name| name == lower)) {
            return Ok(Self::Known(model.name().to_owned()));
        }
        let names: Vec<String> = known.iter().map(|model| model.name().to_owned()).collect();
        Err(ReferenceError::Unknown { text: text.to_owned(), near: near(lower, known), known: names })
    }
}

/// Turns what a browser shows after the host into the written form.
fn from_page(rest: &str) -> String {
    let rest = rest.split(['?', '#']).next().unwrap_or_default().trim_end_matches('/');
    let mut parts = rest.splitn(5, '/');
    if let (Some(owner), Some(name), Some("blob" | "resolve" | "raw" | "tree"), Some(revision), file) =
        (parts.next(), parts.next(), parts.next(), parts.next(), parts.next())
    {
        let at = if revision == "main" { String::new() } else { format!("@{revision}") };
        return file.map_or_else(|| format!("{owner}/{name}{at}"), |file| format!("{owner}/{name}{at}:{file}"));
    }
    rest.to_owned()
}

fn as_path(text: &str, home: Option<&Path>) -> Result<Option<PathBuf>, ReferenceError> {
    if let Some(rest) = text.strip_prefix('~') {
        return match (rest.strip_prefix(['/', '\\']), home) {
            (Some(rest), Some(home)) => Ok(Some(home.join(rest))),
            // `~other` is a matter of the shell.
            (None, _) if !rest.is_empty() => Ok(Some(PathBuf::from(text))),
            (None, Some(home)) => Ok(Some(home.to_owned())),
            (_, None) => Err(ReferenceError::NoHome { text: text.to_owned() }),
        };
    }
    let bytes = text.as_bytes();
    let drive = bytes.len() > 2 && bytes[0].is_ascii_alphabetic() && bytes[1] == b':' && matches!(bytes[2], b'/' | b'\\');
    let rooted = text.starts_with('/') || text.starts_with("./") || text.starts_with("../") || text == "." || text == "..";
    let model_file = ends_in_gguf(text) && !text.contains([':', '@']);
    let deep = text.matches('/').count() > 1 && !text.contains([':', '@']);
    Ok((drive || rooted || text.contains('\\') || model_file || deep).then(|| PathBuf::from(text)))
}

/// Whether a name says that the file is a GGUF.
pub(crate) fn ends_in_gguf(name: &str) -> bool {
    name.len() >= 5 && name.is_char_boundary(name.len() - 5) && name[name.len() - 5..].eq_ignore_ascii_case(".gguf")
}

fn hub(text: &str, written: &str) -> Result<HubReference, ReferenceError> {
    let refused = |reason| ReferenceError::Hub { text: text.to_owned(), reason };
    let end = written.find(['@', ':']).unwrap_or(written.len());
    let (repository, mut rest) = written.split_at(end);
    let Some((owner, name)) = repository.split_once('/') else { return Err(refused("it has no owner")) };
    let good = |part: &str| {
        (1..=96).contains(&part.len())
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
            && !part.starts_with(['.', '-'])
            && !part.contains("..")
    };
    if !good(owner) || !good(name) {
        return Err(refused("owner and name consist of letters, digits, `-`, `_` and `.`"));
    }
    let mut reference = HubReference { repository: repository.to_owned(), revision: None, choice: None };
    while let Some(mark) = rest.chars().next() {
        let body = &rest[1..];
        // A file's path may hold `@`, a revision may not hold `:`.
        let end = if mark == '@' { body.find(':') } else { body.rfind('@') }.unwrap_or(body.len());
        let (value, after) = body.split_at(end);
        let slot = if mark == '@' { &mut reference.revision } else { &mut reference.choice };
        if value.is_empty() || value.split('/').any(|part| matches!(part, "" | "." | "..")) || value.contains(['\\', ' ']) {
            return Err(refused(if mark == '@' { "the revision after `@` is not one" } else { "the file after `:` is not one" }));
        }
        if slot.replace(value.to_owned()).is_some() {
            return Err(refused("it has two files or two revisions"));
        }
        rest = after;
    }
    Ok(reference)
}

/// Names that a mistyped one may have meant, best first, at most three.
fn near(text: &str, known: &[KnownModel]) -> Vec<String> {
    let family = text.split(':').next().unwrap_or(text);
    let mut scored: Vec<(usize, String)> = Vec::new();
    for model in known {
        let score = model
            .names
            .iter()
            .map(|name| {
                let name_family = name.split(':').next().unwrap_or(name);
                let same_family = name_family == family || (family.len() >= 3 && name_family.starts_with(family));
                let whole = distance(text, name);
                if same_family { whole.min(2) } else { whole.min(distance(family, name_family) + 1) }
            })
            .min()
            .unwrap_or(usize::MAX);
        if score <= (text.chars().count() / 3).max(2) {
            scored.push((score, model.name().to_owned()));
        }
    }
    scored.sort();
    scored.into_iter().take(3).map(|(_, name)| name).collect()
}

/// Edits between two texts (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::known::builtin;
    use super::*;

    fn parse(text: &str) -> Result<Reference, ReferenceError> {
        Reference::parse(text, &builtin(), Some(Path::new("/home/u")))
    }

    fn hub_of(repository: &str, revision: Option<&str>, choice: Option<&str>) -> Result<Reference, ReferenceError> {
        Ok(Reference::Hub(HubReference {
            repository: repository.into(),
            revision: revision.map(str::to_owned),
            choice: choice.map(str::to_owned),
        }))
    }

    #[test]
    fn names_with_and_without_tag() {
        for text in ["smollm2:135m", "smollm2", "SmolLM2", " smollm2:latest "] {
            assert_eq!(parse(text), Ok(Reference::Known("smollm2:135m".into())), "{text}");
        }
        assert_eq!(parse("gemma3"), Ok(Reference::Known("gemma3:270m".into())));
    }

    #[test]
    fn files() {
        for (text, path) in [
            ("~/m/x.gguf", "/home/u/m/x.gguf"),
            ("./x", "./x"),
            ("/a/b", "/a/b"),
            ("x.GGUF", "x.GGUF"),
            ("sub/x.gguf", "sub/x.gguf"),
            ("a/b/c", "a/b/c"),
            ("C:\\m\\x.gguf", "C:\\m\\x.gguf"),
        ] {
            assert_eq!(parse(text), Ok(Reference::File(path.into())), "{text}");
        }
        assert!(matches!(Reference::parse("~/x.gguf", &builtin(), None), Err(ReferenceError::NoHome { .. })));
    }

    #[test]
    fn repositories() {
        assert_eq!(parse("Qwen/Q-GGUF"), hub_of("Qwen/Q-GGUF", None, None));
        assert_eq!(parse("Qwen/Q-GGUF:Q4_K_M"), hub_of("Qwen/Q-GGUF", None, Some("Q4_K_M")));
        assert_eq!(parse("a/b@main:sub/x.gguf"), hub_of("a/b", Some("main"), Some("sub/x.gguf")));
        assert_eq!(parse("a/b:x.gguf@refs/pr/1"), hub_of("a/b", Some("refs/pr/1"), Some("x.gguf")));
        assert_eq!(parse("hf.co/a/b"), hub_of("a/b", None, None));
        assert_eq!(parse("https://huggingface.co/a/b/blob/main/x.gguf?download=true"), hub_of("a/b", None, Some("x.gguf")));
        assert_eq!(parse("https://huggingface.co/a/b/tree/v1"), hub_of("a/b", Some("v1"), None));
        for text in ["a/b:", "a/b@", "a/b:../x", "a/b:x:y@z@", "/b:x@", "a/.b", "a/b c", "hf:a", "a/b:x@y:z"] {
            let parsed = parse(text);
            assert!(matches!(parsed, Err(ReferenceError::Hub { .. }) | Ok(Reference::File(_))), "{text}: {parsed:?}");
        }
    }

    #[test]
    fn near_misses_are_named() {
        for (text, meant) in [
            ("smolm2:135m", "smollm2:135m"),
            ("smollm2:360m", "smollm2:135m"),
            ("smol", "smollm2:135m"),
            ("gemma:270m", "gemma3:270m"),
            ("gema3", "gemma3:270m"),
        ] {
            let error = parse(text).expect_err("no such name").to_string();
            assert!(error.contains(&format!("did you mean {meant}")), "{error}");
        }
        let error = parse("zebra").expect_err("no such name").to_string();
        assert!(error.contains("smollm2:135m, gemma3:270m") && !error.contains("did you mean"), "{error}");
        assert!(matches!(parse("  "), Err(ReferenceError::Empty { .. })));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "\\PC{0,40}") {
            let _ = parse(&text);
        }

        #[test]
        fn what_is_printed_reads_back(owner in "[a-z][a-z0-9-]{0,6}", name in "[A-Za-z][A-Za-z0-9._-]{0,6}[a-z]",
                                      revision in proptest::option::of("[a-z0-9]{1,6}"), choice in proptest::option::of("[A-Z0-9_]{1,6}")) {
            prop_assume!(!name.contains("..") && !ends_in_gguf(&name));
            let reference = HubReference { repository: format!("{owner}/{name}"), revision, choice };
            prop_assert_eq!(parse(&reference.to_string()), Ok(Reference::Hub(reference)));
        }
    }
}
