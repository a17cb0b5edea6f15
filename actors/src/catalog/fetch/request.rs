//! One request with its redirects, and who gets to see a secret on the way.

use std::fmt;

use zeroize::Zeroizing;

use super::FetchError;
use crate::env::{Credentials, Http, HttpRequest, HttpResponse, Url};

/// Most redirects that are followed.
const REDIRECTS_MAX: usize = 10;

/// An `authorization` header, and the only place that may see it.
#[derive(Clone)]
pub(crate) struct Authorization {
    origin: Url,
    value: Zeroizing<String>,
}

impl Authorization {
    /// A bearer token for the origin of `url`.
    pub(crate) fn bearer(url: &Url, token: &str) -> Self {
        Self { origin: url.clone(), value: Zeroizing::new(format!("Bearer {token}")) }
    }

    /// A user name and password for the origin of `url`.
    pub(crate) fn basic(url: &Url, credentials: &Credentials) -> Self {
        Self { origin: url.clone(), value: credentials.basic() }
    }
}

impl fmt::Debug for Authorization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Authorization for {}", self.origin.host())
    }
}

/// What a request came to.
pub(crate) struct Answer {
    /// The last answer.
    pub(crate) response: HttpResponse,
    /// Where it came from.
    pub(crate) url: Url,
    /// The headers of the redirects on the way there, first one first.
    redirects: Vec<HttpResponse>,
}

impl Answer {
    /// A header of the first answer that has it, redirects included: a hub describes a file before it sends the
    /// client off to the storage that has it.
    pub(crate) fn header_on_the_way(&self, name: &str) -> Option<&str> {
        self.redirects.iter().chain([&self.response]).find_map(|response| response.header(name))
    }

    /// How long the server asks to be left alone, in seconds.
    pub(crate) fn retry_after_seconds(&self) -> Option<u64> {
        self.response.header("retry-after").and_then(|value| value.trim().parse().ok())
    }
}

/// Sends a request and follows its redirects. `authorization` goes to its own origin only, and never from an
/// encrypted connection to a plain one.
pub(crate) fn get(
    http: &dyn Http,
    url: &Url,
    headers: &[(String, String)],
    authorization: Option<&Authorization>,
) -> Result<Answer, FetchError> {
    let mut url = url.clone();
    let mut redirects = Vec::new();
    loop {
        let mut headers = headers.to_vec();
        if let Some(authorization) = authorization.filter(|authorization| authorization.origin.same_origin(&url)) {
            headers.push(("authorization".to_owned(), authorization.value.to_string()));
        }
        let response = http.get(&HttpRequest { url: url.clone(), headers })?;
        if !matches!(response.status, 301 | 302 | 303 | 307 | 308) {
            return Ok(Answer { response, url, redirects });
        }
        let odd = |reason: String| FetchError::BadAnswer { place: url.to_string(), reason };
        if redirects.len() == REDIRECTS_MAX {
            return Err(odd(format!("more than {REDIRECTS_MAX} redirects")));
        }
        let location = response.header("location").ok_or_else(|| odd("a redirect to nowhere".to_owned()))?;
        let next = url.join(location).map_err(|error| odd(format!("a redirect that cannot be followed, {error}")))?.url;
        if url.is_secure() && !next.is_secure() {
            return Err(odd("a redirect from an encrypted to a plain connection".to_owned()));
        }
        redirects.push(HttpResponse { body: Box::new(std::io::empty()), ..response });
        url = next;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::env::HttpError;

    /// Answers from a table and keeps who was told what.
    #[derive(Debug, Default)]
    struct Table {
        rows: Vec<(&'static str, &'static str)>,
        seen: Mutex<Vec<(String, bool)>>,
    }

    impl Http for Table {
        fn get(&self, request: &HttpRequest) -> Result<HttpResponse, HttpError> {
            let url = request.url.for_wire();
            let authorised = request.headers.iter().any(|(name, _)| name == "authorization");
            self.seen.lock().expect("not poisoned").push((url.clone(), authorised));
            let row = self.rows.iter().find(|(from, _)| *from == url);
            let headers = row.map(|(_, to)| ("location".to_owned(), (*to).to_owned())).into_iter().collect();
            Ok(HttpResponse { status: if row.is_some() { 302 } else { 200 }, headers, body: Box::new(std::io::empty()) })
        }
    }

    fn fetch(table: &Table, url: &str) -> Result<Answer, FetchError> {
        let url = Url::parse(url).expect("parses").url;
        get(table, &url, &[], Some(&Authorization::bearer(&url, "t0ken")))
    }

    #[test]
    fn a_token_stays_with_its_origin() {
        let table = Table {
            rows: vec![("https://hub/a", "/b"), ("https://hub/b", "https://cdn/c?sig=1"), ("https://cdn/c?sig=1", "https://hub/d")],
            ..Table::default()
        };
        let answer = fetch(&table, "https://hub/a").expect("arrives");
        assert_eq!(answer.url.to_string(), "https://hub/d");
        let seen = table.seen.lock().expect("not poisoned").clone();
        let expected = [("https://hub/a", true), ("https://hub/b", true), ("https://cdn/c?sig=1", false), ("https://hub/d", true)];
        assert_eq!(seen, expected.map(|(url, authorised)| (url.to_owned(), authorised)));
        assert!(!format!("{:?}", Authorization::bearer(&answer.url, "t0ken")).contains("t0ken"));
    }

    #[test]
    fn bad_redirects_are_refused() {
        for rows in [
            vec![("https://hub/a", "http://hub/a")],
            vec![("https://hub/a", "https://hub/a")],
            vec![("https://hub/a", "file:///etc/passwd")],
        ] {
            let table = Table { rows, ..Table::default() };
            assert!(matches!(fetch(&table, "https://hub/a"), Err(FetchError::BadAnswer { .. })));
            assert!(table.seen.lock().expect("not poisoned").len() <= REDIRECTS_MAX + 1);
        }
    }
}
