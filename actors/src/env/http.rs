//! HTTP as the node uses it: plain GET requests, answered with a status, headers and a body to read from.
//!
//! Redirects are not followed here. Who may see a token after a redirect is a decision, and decisions belong to the
//! code that holds the token, where they can be tested without a network.

mod proxy;
mod system;
mod url;

use std::fmt;
use std::io::Read;

pub use proxy::ProxyRules;
pub use system::{SystemHttp, TlsRoots};
pub use url::{Credentials, ParsedUrl, Url, UrlError};

/// A GET request.
#[derive(Clone)]
pub struct HttpRequest {
    /// What to get. It never carries credentials.
    pub url: Url,
    /// Names in lower case, with their values.
    pub headers: Vec<(String, String)>,
}

impl fmt::Debug for HttpRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Values may be secret, names are not.
        let names: Vec<&str> = self.headers.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("HttpRequest").field("url", &self.url).field("headers", &names).finish()
    }
}

/// An answer whose body has yet to be read.
pub struct HttpResponse {
    /// The status code.
    pub status: u16,
    /// Names in lower case, with their values, in the order of the wire.
    pub headers: Vec<(String, String)>,
    /// The body. Reading blocks; a broken connection is an error, never a silent end.
    pub body: Box<dyn Read + Send>,
}

impl HttpResponse {
    /// The first header of that name (lower case).
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

impl fmt::Debug for HttpResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpResponse").field("status", &self.status).finish_non_exhaustive()
    }
}

/// Why there was no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HttpError {
    /// No connection: the name is unknown, or nothing accepts there.
    #[error("cannot reach {host}: {reason}")]
    Unreachable {
        /// The host.
        host: String,
        /// The system's words.
        reason: String,
    },
    /// The host was silent for too long.
    #[error("{host} did not answer in time ({stage})")]
    Timeout {
        /// The host.
        host: String,
        /// What was waited for.
        stage: String,
    },
    /// The connection broke before the answer had come.
    #[error("the connection to {host} broke: {reason}")]
    Broken {
        /// The host.
        host: String,
        /// The system's words.
        reason: String,
    },
    /// The host's certificate is not trusted, or the two ends found no common way to encrypt.
    #[error("{host} could not prove who it is: {reason}; if your network inspects TLS, name its certificates in SSL_CERT_FILE")]
    Tls {
        /// The host.
        host: String,
        /// The library's words.
        reason: String,
    },
    /// The answer is not HTTP, or breaks its rules.
    #[error("{host} sent no valid HTTP: {reason}")]
    Protocol {
        /// The host.
        host: String,
        /// The library's words.
        reason: String,
    },
    /// What the user set (a proxy, certificates) cannot be used.
    #[error("{0}")]
    Setup(String),
}

impl HttpError {
    /// Whether the same request may well succeed in a moment.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Timeout { .. } | Self::Broken { .. })
    }
}

/// Sends requests. Blocks, so it is called from threads that the node's spawner made for it.
pub trait Http: Send + Sync + fmt::Debug + 'static {
    /// Sends one request and waits for the headers of its answer, whatever the status.
    ///
    /// # Errors
    /// If no answer came.
    fn get(&self, request: &HttpRequest) -> Result<HttpResponse, HttpError>;
}
