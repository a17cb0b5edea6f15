//! The part of RFC 3986 that fetching needs: absolute `http` and `https` URLs, and references relative to them.

use std::fmt;

use zeroize::Zeroizing;

/// Longest URL that is taken, in bytes.
const URL_BYTES_MAX: usize = 8 * 1024;

/// An absolute `http` or `https` URL without credentials and fragment.
///
/// It displays without its query, because the query of a storage service's link is a secret of a kind.
#[derive(Clone, PartialEq, Eq)]
pub struct Url {
    secure: bool,
    host: String,
    port: Option<u16>,
    path: String,
    query: Option<String>,
}

/// A user name and a password. Neither is printed, and both are wiped when dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    user: Zeroizing<String>,
    password: Zeroizing<String>,
}

/// What a text holds besides the [`Url`] itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedUrl {
    /// Where.
    pub url: Url,
    /// As whom, if the text says so.
    pub credentials: Option<Credentials>,
    /// What follows the `#`.
    pub fragment: Option<String>,
}

/// Why a text is no URL that can be fetched. The text itself is not repeated: it may hold a password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UrlError {
    /// Another scheme, or none.
    #[error("only http and https addresses can be fetched, not `{0}:`")]
    Scheme(String),
    /// The host is missing or has characters that no host has.
    #[error("the address has no usable host")]
    Host,
    /// The port is no number from 1 to 65535.
    #[error("the address has no usable port")]
    Port,
    /// Control characters or far too long.
    #[error("the address is malformed")]
    Malformed,
}

impl Credentials {
    /// Joins the two.
    pub fn new(user: &str, password: &str) -> Self {
        Self { user: Zeroizing::new(user.to_owned()), password: Zeroizing::new(password.to_owned()) }
    }

    /// The value of an `authorization` header (RFC 7617).
    pub fn basic(&self) -> Zeroizing<String> {
        let pair = Zeroizing::new(format!("{}:{}", self.user.as_str(), self.password.as_str()));
        Zeroizing::new(format!("Basic {}", base64(pair.as_bytes())))
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials(…)")
    }
}

impl Url {
    /// Reads an absolute URL.
    ///
    /// # Errors
    /// If it is none, or not one of `http` or `https`.
    pub fn parse(text: &str) -> Result<ParsedUrl, UrlError> {
        let text = text.trim();
        if text.len() > URL_BYTES_MAX || text.chars().any(char::is_control) {
            return Err(UrlError::Malformed);
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            let scheme = text.split_once(':').map_or("", |(scheme, _)| scheme);
            let plain = scheme.len() < 16 && scheme.chars().all(|c| c.is_ascii_alphanumeric());
            return Err(UrlError::Scheme(if plain { scheme.to_owned() } else { String::new() }));
        };
        let secure = match scheme.to_ascii_lowercase().as_str() {
            "https" => true,
            "http" => false,
            other => return Err(UrlError::Scheme(other.chars().take(16).collect())),
        };
        let (rest, fragment) = split_fragment(rest);
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, tail) = rest.split_at(end);
        let (user_info, host_port) = match authority.rsplit_once('@') {
            Some((user_info, host_port)) => (Some(user_info), host_port),
            None => (None, authority),
        };
        let (host, port) = split_port(host_port)?;
        let host = host.to_ascii_lowercase();
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let good = if host.starts_with('[') {
            bare.parse::<std::net::Ipv6Addr>().is_ok()
        } else {
            !host.is_empty() && host.len() < 254 && host.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_'))
        };
        if !good {
            return Err(UrlError::Host);
        }
        let (path, query) = split_query(tail);
        let path = if path.is_empty() { "/".to_owned() } else { without_dots(&encode_stray(path)) };
        let credentials = user_info.filter(|info| !info.is_empty()).map(|info| {
            let (user, password) = info.split_once(':').unwrap_or((info, ""));
            Credentials::new(&percent_decode(user), &percent_decode(password))
        });
        let url = Self { secure, host, port, path, query: query.map(encode_stray) };
        Ok(ParsedUrl { url, credentials, fragment: fragment.map(str::to_owned) })
    }

    /// Reads a reference that stands in a document or a `location` header of this URL.
    ///
    /// # Errors
    /// If it leads to no `http` or `https` URL.
    pub fn join(&self, reference: &str) -> Result<ParsedUrl, UrlError> {
        let reference = reference.trim();
        if reference.len() > URL_BYTES_MAX || reference.chars().any(char::is_control) {
            return Err(UrlError::Malformed);
        }
        if has_scheme(reference) {
            return Self::parse(reference);
        }
        if let Some(rest) = reference.strip_prefix("//") {
            return Self::parse(&format!("{}://{rest}", self.scheme()));
        }
        let (rest, fragment) = split_fragment(reference);
        let (path, query) = split_query(rest);
        let mut url = self.clone();
        if path.is_empty() {
            if query.is_some() {
                url.query = query.map(encode_stray);
            }
        } else {
            let merged = if path.starts_with('/') {
                path.to_owned()
            } else {
                let folder = self.path.rfind('/').map_or("/", |at| &self.path[..=at]);
                format!("{folder}{path}")
            };
            url.path = without_dots(&encode_stray(&merged));
            url.query = query.map(encode_stray);
        }
        Ok(ParsedUrl { url, credentials: None, fragment: fragment.map(str::to_owned) })
    }

    /// This URL with more segments below its path, each percent-encoded, and without its query. A `/` inside a
    /// segment is encoded too.
    pub fn below<'a>(&self, segments: impl IntoIterator<Item = &'a str>) -> Self {
        let mut path = self.path.trim_end_matches('/').to_owned();
        for segment in segments {
            path.push('/');
            for byte in segment.bytes() {
                push_encoded(&mut path, byte, |b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b'~'));
            }
        }
        Self { path, query: None, ..self.clone() }
    }

    /// This URL with another query, without the `?`.
    #[must_use]
    pub fn with_query(mut self, query: &str) -> Self {
        self.query = Some(encode_stray(query));
        self
    }

    /// `http` or `https`.
    pub fn scheme(&self) -> &'static str {
        if self.secure { "https" } else { "http" }
    }

    /// Whether the connection is encrypted.
    pub fn is_secure(&self) -> bool {
        self.secure
    }

    /// The host, a v6 address without its brackets.
    pub fn host(&self) -> &str {
        self.host.trim_start_matches('[').trim_end_matches(']')
    }

    /// The port, given or implied by the scheme.
    pub fn port(&self) -> u16 {
        self.port.unwrap_or(if self.secure { 443 } else { 80 })
    }

    /// The path, percent-encoded.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Whether both have the same scheme, host and port: what may see the same secrets.
    pub fn same_origin(&self, other: &Self) -> bool {
        self.secure == other.secure && self.host == other.host && self.port() == other.port()
    }

    /// Whether the host is this machine.
    pub fn is_loopback(&self) -> bool {
        let host = self.host();
        host == "localhost" || host.ends_with(".localhost") || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }

    /// The whole of it, query included, for the wire alone.
    pub fn for_wire(&self) -> String {
        match &self.query {
            Some(query) => format!("{self}?{query}"),
            None => self.to_string(),
        }
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme(), self.host)?;
        if let Some(port) = self.port {
            write!(f, ":{port}")?;
        }
        f.write_str(&self.path)
    }
}

impl fmt::Debug for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn has_scheme(text: &str) -> bool {
    let Some((scheme, _)) = text.split_once(':') else { return false };
    scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
}

fn split_fragment(text: &str) -> (&str, Option<&str>) {
    text.split_once('#').map_or((text, None), |(rest, fragment)| (rest, Some(fragment)))
}

fn split_query(text: &str) -> (&str, Option<&str>) {
    text.split_once('?').map_or((text, None), |(path, query)| (path, Some(query)))
}

fn split_port(text: &str) -> Result<(&str, Option<u16>), UrlError> {
    let colon = match text.rfind(']') {
        Some(bracket) => text[bracket..].find(':').map(|at| bracket + at),
        None => text.rfind(':'),
    };
    let Some(colon) = colon else { return Ok((text, None)) };
    let (host, port) = (&text[..colon], &text[colon + 1..]);
    if port.is_empty() {
        return Ok((host, None));
    }
    if !port.bytes().all(|b| b.is_ascii_digit()) {
        return Err(UrlError::Port);
    }
    match port.parse() {
        Ok(0) | Err(_) => Err(UrlError::Port),
        Ok(port) => Ok((host, Some(port))),
    }
}

/// Resolves `.` and `..` segments (RFC 3986, 5.2.4).
fn without_dots(path: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let mut segments = path.split('/').skip(1).peekable();
    while let Some(segment) = segments.next() {
        let last = segments.peek().is_none();
        match segment {
            "." | ".." => {
                if segment == ".." {
                    kept.pop();
                }
                if last {
                    kept.push("");
                }
            }
            other => kept.push(other),
        }
    }
    format!("/{}", kept.join("/"))
}

fn push_encoded(out: &mut String, byte: u8, plain: impl Fn(u8) -> bool) {
    if plain(byte) {
        out.push(char::from(byte));
    } else {
        out.push('%');
        out.push_str(&hex::encode_upper([byte]));
    }
}

/// Encodes what may not stand in a URL, and leaves what is encoded already.
fn encode_stray(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        let stray = |b: u8| b <= b' ' || b >= 0x7f || matches!(b, b'"' | b'<' | b'>' | b'\\' | b'^' | b'`' | b'{' | b'|' | b'}');
        push_encoded(&mut out, byte, |b| !stray(b));
    }
    out
}

/// Decodes `%XX`; what is not well-formed stays as it is.
fn percent_decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let decoded = (bytes[at] == b'%').then(|| bytes.get(at + 1..at + 3)).flatten().and_then(|pair| {
            let mut byte = [0];
            hex::decode_to_slice(pair, &mut byte).ok().map(|()| byte[0])
        });
        match decoded {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Base64 with padding (RFC 4648, section 4).
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().fold(0_u32, |word, byte| word << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for digit in 0..4 {
            if digit <= chunk.len() {
                out.push(char::from(ALPHABET[(word >> (18 - 6 * digit)) as usize & 63]));
            } else {
                out.push('=');
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).expect("parses").url
    }

    #[test]
    fn reads_all_parts_and_prints_no_secret() {
        let parsed = Url::parse("https://us%40er:p%3Aw@Example.org:8443/a%20b/c?sig=1#sha256=ff").expect("parses");
        assert_eq!(parsed.url.to_string(), "https://example.org:8443/a%20b/c");
        assert_eq!(parsed.url.for_wire(), "https://example.org:8443/a%20b/c?sig=1");
        assert_eq!(parsed.fragment.as_deref(), Some("sha256=ff"));
        assert_eq!(parsed.credentials, Some(Credentials::new("us@er", "p:w")));
        assert!(!format!("{parsed:?}").contains("sig"));
        assert!(!format!("{parsed:?}").contains("p:w"));
    }

    #[test]
    fn resolves_references() {
        let base = url("https://h/simple/pkg/");
        for (reference, expected) in [
            ("../../packages/x.whl", "https://h/packages/x.whl"),
            ("/root.whl", "https://h/root.whl"),
            ("x.whl", "https://h/simple/pkg/x.whl"),
            ("./x.whl", "https://h/simple/pkg/x.whl"),
            ("../../../../x", "https://h/x"),
            ("//other:81/x", "https://other:81/x"),
            ("http://plain/x", "http://plain/x"),
            ("..", "https://h/simple/"),
        ] {
            assert_eq!(base.join(reference).expect("resolves").url.to_string(), expected, "{reference}");
        }
        assert_eq!(base.join("?q=1").expect("resolves").url.for_wire(), "https://h/simple/pkg/?q=1");
        assert_eq!(base.join("file:///etc/passwd"), Err(UrlError::Scheme("file".into())));
    }

    #[test]
    fn refuses_what_is_no_address() {
        for text in
            ["", "ftp://h/", "https://", "https://h:0/", "https://h:99999/", "https://h:+1/", "https://a b/", "https://h/\nx", "h/x"]
        {
            assert!(Url::parse(text).is_err(), "{text:?}");
        }
        assert_eq!(url("http://[::1]:80/x").host(), "::1");
        assert!(url("http://[::1]:80/x").is_loopback());
        assert!(url("http://127.3.2.1/").is_loopback());
        assert!(!url("http://localhost.example.org/").is_loopback());
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        assert!(url("https://h/a").same_origin(&url("https://H:443/b?x")));
        assert!(!url("https://h/a").same_origin(&url("http://h/a")));
        assert!(!url("https://h/a").same_origin(&url("https://h:444/a")));
        assert!(!url("https://h/a").same_origin(&url("https://h.evil/a")));
    }

    #[test]
    fn segments_cannot_leave_their_place() {
        assert_eq!(url("https://h/x/").below(["a/../b", "c d"]).to_string(), "https://h/x/a%2F..%2Fb/c%20d");
    }

    #[test]
    fn base64_of_the_rfc() {
        for (plain, coded) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("foobar", "Zm9vYmFy")] {
            assert_eq!(base64(plain.as_bytes()), coded);
        }
        assert_eq!(Credentials::new("Aladdin", "open sesame").basic().as_str(), "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "\\PC{0,60}", reference in "\\PC{0,60}") {
            for text in [text.clone(), format!("https://{text}")] {
                if let Ok(parsed) = Url::parse(&text) {
                    let again = Url::parse(&parsed.url.for_wire()).expect("what it prints can be read");
                    prop_assert_eq!(&again.url, &parsed.url);
                    if let Ok(joined) = parsed.url.join(&reference) {
                        prop_assert!(Url::parse(&joined.url.for_wire()).is_ok());
                    }
                }
            }
        }
    }
}
