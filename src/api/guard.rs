//! Turns away what a web page sent.
//!
//! A page from anywhere can make a browser send requests to this machine, and by DNS rebinding under a name that the
//! page chose. Browsers say where a request comes from (`Origin`) and which name was used (`Host`), and neither can be
//! forged by a page.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;

use super::Shared;
use super::error::ApiError;

pub(super) async fn check(State(shared): State<Shared>, request: Request, next: Next) -> Result<Response, ApiError> {
    allowed(shared.is_local(), request.headers())?;
    Ok(next.run(request).await)
}

fn allowed(local: bool, headers: &HeaderMap) -> Result<(), ApiError> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or(""));
    let host = text(header::HOST);
    if local
        && let Some(host) = host
        && !is_this_machine(host_name(host))
    {
        let message = format!("this node answers only requests to localhost, not to `{host}`; start it with --api to serve other names");
        return Err(ApiError { code: Some("host_refused"), ..ApiError::new(StatusCode::FORBIDDEN, message) });
    }
    if let Some(origin) = text(header::ORIGIN) {
        let place = origin.split_once("://").map(|(_, place)| place);
        let same = place.is_some_and(|place| Some(place) == host || (local && is_this_machine(host_name(place))));
        if !same {
            let message = format!("requests of web pages from `{origin}` are refused");
            return Err(ApiError { code: Some("origin_refused"), ..ApiError::new(StatusCode::FORBIDDEN, message) });
        }
    }
    Ok(())
}

/// A host without its port.
fn host_name(host: &str) -> &str {
    if let Some(rest) = host.strip_prefix('[') {
        return rest.split_once(']').map_or("", |(name, _)| name);
    }
    host.rsplit_once(':').map_or(host, |(name, _)| name)
}

fn is_this_machine(name: &str) -> bool {
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    name == "localhost" || name.ends_with(".localhost") || name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    fn answer(local: bool, host: &str, origin: Option<&str>) -> Option<&'static str> {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, HeaderValue::from_str(host).unwrap());
        if let Some(origin) = origin {
            headers.insert(header::ORIGIN, HeaderValue::from_str(origin).unwrap());
        }
        allowed(local, &headers).err().and_then(|error| error.code)
    }

    #[test]
    fn names_that_a_page_could_choose_are_refused_on_loopback() {
        for host in ["localhost:52800", "127.0.0.1:52800", "127.1.2.3", "[::1]:52800", "LOCALHOST", "shoal.localhost:1"] {
            assert_eq!(answer(true, host, None), None, "{host}");
        }
        for host in ["evil.example:52800", "127.0.0.1.evil.example", "10.0.0.1:52800", "localhost.evil.example", "", "[::1", "notlocalhost"]
        {
            assert_eq!(answer(true, host, None), Some("host_refused"), "{host}");
            assert_eq!(answer(false, host, None), None, "{host}");
        }
    }

    #[test]
    fn pages_from_elsewhere_are_refused_everywhere() {
        assert_eq!(answer(true, "localhost:52800", Some("http://localhost:3000")), None);
        assert_eq!(answer(true, "localhost:52800", Some("https://evil.example")), Some("origin_refused"));
        assert_eq!(answer(true, "localhost:52800", Some("null")), Some("origin_refused"));
        assert_eq!(answer(false, "desk:52800", Some("http://desk:52800")), None);
        assert_eq!(answer(false, "desk:52800", Some("http://localhost:3000")), Some("origin_refused"));
    }
}
