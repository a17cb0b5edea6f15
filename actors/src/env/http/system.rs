//! HTTP over the machine's network.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use ureq::tls::{PemItem, RootCerts, TlsConfig};

use super::{Http, HttpError, HttpRequest, HttpResponse, ProxyRules, Url};

/// How long a connection may take to come about, name look-up and encryption included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// How long the headers of an answer may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a body may be silent.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);
/// Largest certificate bundle that is read, in bytes.
const BUNDLE_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// Whose certificates are trusted.
#[derive(Debug, Clone, Default)]
pub struct TlsRoots {
    bundles: BTreeSet<PathBuf>,
}

impl TlsRoots {
    /// The system's, unless one of `PIP_CERT`, `REQUESTS_CA_BUNDLE`, `CURL_CA_BUNDLE` or `SSL_CERT_FILE` names a file.
    pub fn from_variables(variable: &dyn Fn(&str) -> Option<String>) -> Self {
        let mut roots = Self::default();
        for name in ["PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"] {
            if let Some(path) = variable(name).filter(|path| !path.is_empty()) {
                roots.trust(path.into());
            }
        }
        roots
    }

    /// Trusts the certificates in a PEM file, too. Once there is one such file, the system's own are not asked.
    pub fn trust(&mut self, bundle: PathBuf) {
        self.bundles.insert(bundle);
    }

    fn load(&self) -> Result<RootCerts, HttpError> {
        if self.bundles.is_empty() {
            return Ok(RootCerts::PlatformVerifier);
        }
        let mut certificates = Vec::new();
        for bundle in &self.bundles {
            let refused = |reason: String| {
                let path = bundle.display();
                HttpError::Setup(format!("the certificate bundle {path} cannot be used: {reason}; correct or unset what names it"))
            };
            let size = std::fs::metadata(bundle).map_err(|error| refused(error.to_string()))?.len();
            if size > BUNDLE_BYTES_MAX {
                return Err(refused(format!("it has {size} bytes")));
            }
            let pem = std::fs::read(bundle).map_err(|error| refused(error.to_string()))?;
            let before = certificates.len();
            for item in ureq::tls::parse_pem(&pem) {
                if let PemItem::Certificate(certificate) = item.map_err(|error| refused(error.to_string()))? {
                    certificates.push(certificate);
                }
            }
            if certificates.len() == before {
                return Err(refused("it holds no certificate in PEM form".to_owned()));
            }
        }
        Ok(RootCerts::from(certificates))
    }
}

/// The real thing.
pub struct SystemHttp {
    proxies: ProxyRules,
    // A wrong setting must not keep a node from starting, so it is reported by the request that would need it.
    direct: Result<ureq::Agent, HttpError>,
    plain: Result<ureq::Agent, HttpError>,
    encrypted: Result<ureq::Agent, HttpError>,
}

impl SystemHttp {
    /// Uses these proxies and trusts these certificates.
    pub fn new(proxies: ProxyRules, roots: &TlsRoots) -> Self {
        let roots = roots.load();
        let with = |proxy: Option<&str>, variable: &str| agent(&roots, proxy, variable);
        Self { direct: with(None, ""), plain: with(proxies.http(), "HTTP_PROXY"), encrypted: with(proxies.https(), "HTTPS_PROXY"), proxies }
    }

    /// Follows the variables and files of the process it runs in.
    #[expect(clippy::disallowed_methods, reason = "where the process's settings are read")]
    pub fn from_process() -> Self {
        let variable = |name: &str| std::env::var(name).ok();
        Self::new(ProxyRules::from_variables(&variable), &TlsRoots::from_variables(&variable))
    }
}

fn agent(roots: &Result<RootCerts, HttpError>, proxy: Option<&str>, variable: &str) -> Result<ureq::Agent, HttpError> {
    let roots = roots.clone()?;
    let proxy = match proxy {
        // The library's message would repeat the address, and with it a password.
        Some(address) => Some(ureq::Proxy::new(address).map_err(|_| {
            HttpError::Setup(format!("{variable} holds no usable proxy; it looks like http://host:port (SOCKS is not supported)"))
        })?),
        None => None,
    };
    let config = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .proxy(proxy)
        .tls_config(TlsConfig::builder().root_certs(roots).build())
        .timeout_resolve(Some(CONNECT_TIMEOUT))
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .timeout_recv_response(Some(ANSWER_TIMEOUT))
        .timeout_per_read(Some(SILENCE_TIMEOUT))
        .user_agent(concat!("shoal/", env!("CARGO_PKG_VERSION")))
        .build();
    Ok(config.new_agent())
}

impl fmt::Debug for SystemHttp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SystemHttp").field("proxies", &self.proxies).finish_non_exhaustive()
    }
}

impl Http for SystemHttp {
    fn get(&self, request: &HttpRequest) -> Result<HttpResponse, HttpError> {
        let agent = if self.proxies.is_direct(&request.url) {
            &self.direct
        } else if request.url.is_secure() {
            &self.encrypted
        } else {
            &self.plain
        };
        let mut call = agent.as_ref().map_err(Clone::clone)?.get(request.url.for_wire());
        for (name, value) in &request.headers {
            call = call.header(name, value);
        }
        let response = call.call().map_err(|error| explain(&request.url, error))?;
        let headers = response
            .headers()
            .iter()
            .map(|(name, value)| (name.as_str().to_owned(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
            .collect();
        let status = response.status().as_u16();
        let body = response.into_body().into_with_config().limit(u64::MAX).reader();
        Ok(HttpResponse { status, headers, body: Box::new(body) })
    }
}

/// Says what happened without repeating the address, whose query may be secret.
fn explain(url: &Url, error: ureq::Error) -> HttpError {
    let host = url.host().to_owned();
    match error {
        ureq::Error::HostNotFound => HttpError::Unreachable { host, reason: "no such host".to_owned() },
        ureq::Error::ConnectionFailed => HttpError::Unreachable { host, reason: "the connection failed".to_owned() },
        ureq::Error::ConnectProxyFailed(reason) => HttpError::Unreachable { host, reason: format!("the proxy refused: {reason}") },
        ureq::Error::InvalidProxyUrl => HttpError::Setup("the proxy's address cannot be used".to_owned()),
        ureq::Error::Timeout(ureq::Timeout::Resolve | ureq::Timeout::Connect) => {
            HttpError::Unreachable { host, reason: "no answer in time".to_owned() }
        }
        ureq::Error::Timeout(stage) => HttpError::Timeout { host, stage: stage.to_string() },
        ureq::Error::Tls(reason) => HttpError::Tls { host, reason: reason.to_owned() },
        ureq::Error::Rustls(reason) => HttpError::Tls { host, reason: reason.to_string() },
        ureq::Error::Pem(reason) => HttpError::Tls { host, reason: reason.to_string() },
        ureq::Error::Io(error) => explain_io(host, &error),
        ureq::Error::Protocol(reason) => HttpError::Protocol { host, reason: reason.to_string() },
        ureq::Error::LargeResponseHeader(..) => HttpError::Protocol { host, reason: "its headers are too long".to_owned() },
        _ => HttpError::Protocol { host, reason: "the request could not be made".to_owned() },
    }
}

fn explain_io(host: String, error: &io::Error) -> HttpError {
    let reason = error.to_string();
    // The encryption layer reports a refused certificate as an input error.
    if error.kind() == io::ErrorKind::InvalidData {
        return HttpError::Tls { host, reason };
    }
    // Only these happen to a connection that stood; a name that is not found has no kind of its own.
    match error.kind() {
        io::ErrorKind::ConnectionReset
        | io::ErrorKind::ConnectionAborted
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::UnexpectedEof
        | io::ErrorKind::TimedOut
        | io::ErrorKind::WouldBlock => HttpError::Broken { host, reason },
        _ => HttpError::Unreachable { host, reason },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(text: &str) -> HttpRequest {
        HttpRequest { url: Url::parse(text).expect("parses").url, headers: Vec::new() }
    }

    #[test]
    fn a_missing_bundle_is_named_when_it_is_needed() {
        let mut roots = TlsRoots::default();
        roots.trust("/nowhere/ca.pem".into());
        let http = SystemHttp::new(ProxyRules::default(), &roots);
        let error = http.get(&request("http://127.0.0.1:9/")).expect_err("cannot be used");
        assert!(error.to_string().contains("/nowhere/ca.pem"), "{error}");
    }

    #[test]
    fn a_proxy_with_a_password_is_not_repeated() {
        let rules = ProxyRules::from_variables(&|name| (name == "all_proxy").then(|| "socks5://u:hunter2@p:1".to_owned()));
        let http = SystemHttp::new(rules, &TlsRoots::default());
        let error = http.get(&request("https://example.invalid/")).expect_err("no such proxy").to_string();
        assert!(!error.contains("hunter2") && !format!("{http:?}").contains("hunter2"), "{error}");
    }

    #[test]
    fn a_refused_connection_and_an_unknown_name_are_unreachable() {
        let port = {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("binds");
            listener.local_addr().expect("has an address").port()
        };
        let http = SystemHttp::new(ProxyRules::default(), &TlsRoots::default());
        let error = http.get(&request(&format!("http://127.0.0.1:{port}/"))).expect_err("nobody there");
        assert!(matches!(error, HttpError::Unreachable { .. }), "{error:?}");
        assert!(error.is_transient());
        let error = http.get(&request("http://shoal.invalid/")).expect_err("no such name");
        assert!(matches!(error, HttpError::Unreachable { .. }), "{error:?}");
    }
}
