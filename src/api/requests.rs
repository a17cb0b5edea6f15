//! Requests by their ids: going on with an answer at any node after the one that was asked is gone, and looking how far it is.

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::Shared;
use super::answer::{Ended, Shape};
use super::chat::{Streamed, named, stream};
use super::error::ApiError;
use super::told::{Mark, Resume, Telling};
use crate::{End, Generation, RequestId};

/// The header that names a request: in responses, and in requests of clients that choose the name.
pub(super) const REQUEST_HEADER: &str = "x-shoal-request";
/// What an event stream says of the last event that a client got.
const LAST_EVENT_HEADER: &str = "last-event-id";
/// Longest name that a client can choose, in bytes.
const NAME_BYTES_MAX: usize = 128;

/// The request that a text names: 32 hexadecimal digits, with or without the prefix that answers have and the dashes of a UUID; any
/// other text by its hash.
pub(super) fn named_by(text: &str) -> RequestId {
    let plain = text.strip_prefix("chatcmpl-").or_else(|| text.strip_prefix("cmpl-")).unwrap_or(text);
    let uuid = plain.len() == 36 && [8, 13, 18, 23].iter().all(|place| plain.as_bytes().get(*place) == Some(&b'-'));
    let digits = if uuid { plain.replace('-', "") } else { plain.to_owned() };
    let hex = digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    digits.parse().ok().filter(|_| hex).unwrap_or_else(|| RequestId(u128::from_be_bytes(halves(text).0)))
}

fn halves(text: &str) -> ([u8; 16], [u8; 16]) {
    let digest = Sha256::digest(text.as_bytes());
    let (mut first, mut second) = ([0; 16], [0; 16]);
    first.copy_from_slice(&digest[..16]);
    second.copy_from_slice(&digest[16..]);
    (first, second)
}

/// The name that a client has chosen for its request.
pub(super) fn chosen(headers: &HeaderMap) -> Result<Option<RequestId>, ApiError> {
    let Some(value) = headers.get(REQUEST_HEADER) else { return Ok(None) };
    match value.to_str().map(str::trim) {
        Ok(text) if (1..=NAME_BYTES_MAX).contains(&text.len()) => Ok(Some(named_by(text))),
        _ => {
            let message = format!("the header `{REQUEST_HEADER}` must have 1 to {NAME_BYTES_MAX} visible characters of ASCII");
            Err(ApiError::parameter(REQUEST_HEADER, message))
        }
    }
}

/// What chance is drawn from for a request that its client has named and given no seed.
pub(super) fn seed_of(id: RequestId) -> u64 {
    let (_, [a, b, c, d, e, f, g, h, ..]) = halves(&id.to_string());
    u64::from_be_bytes([a, b, c, d, e, f, g, h])
}

/// From where a client wants to go on.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct After {
    after: Option<String>,
    hash: Option<String>,
}

/// What a client was shown, if it says so.
fn shown(from: &After, headers: &HeaderMap) -> Result<Option<Mark>, ApiError> {
    let number = "a number of events, alone or with a hash as in the events' ids";
    let last = headers.get(LAST_EVENT_HEADER).map(|value| value.to_str().unwrap_or(""));
    // A browser that comes back by itself asks for the same address, and says in the header what it has by now.
    let (name, text) = match (last, &from.after) {
        (Some(text), _) if !text.is_empty() => ("Last-Event-ID", text),
        (_, Some(text)) => ("after", text.as_str()),
        _ => return Ok(None),
    };
    let mut mark = Mark::read(text).ok_or_else(|| ApiError::parameter(name, format!("`{name}` must be {number}")))?;
    if let (Some(hash), None) = (&from.hash, &mark.hash) {
        let hash = Mark::read_hash(hash);
        mark.hash = Some(hash.ok_or_else(|| ApiError::parameter("hash", "`hash` must have 16 hexadecimal digits"))?);
    }
    Ok(Some(mark))
}

/// `GET /v1/shoal/requests/{id}`
pub(super) async fn request(
    State(shared): State<Shared>,
    Path(name): Path<String>,
    from: Result<Query<After>, axum::extract::rejection::QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let Query(from) = from.map_err(|rejection| ApiError::parameter("after", rejection.body_text()))?;
    let running = shared.not_leaving()?;
    let shown = shown(&from, &headers)?;
    let wants_stream =
        headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).is_some_and(|text| text.contains("text/event-stream"));
    let id = named_by(&name);
    let generation = shared.node.resume(id, false).await?.ok_or_else(|| unknown(&name))?;
    let shape = Shape::of(generation.request()).ok_or_else(|| unknown(&name))?;
    let response = match (shown, wants_stream) {
        (None, false) => so_far(shape, generation).await?,
        (shown, _) => {
            let resume = Resume::after(shown.unwrap_or(Mark { events: 0, hash: None }));
            let mut streamed = Streamed::new(Telling::new(shape), generation, Some(resume), running)?;
            streamed.catch_up().await?;
            stream(streamed)
        }
    };
    Ok(named(response, id))
}

fn unknown(name: &str) -> ApiError {
    let message = format!("no node knows request `{name}` (any more); answers are kept for two minutes after their end");
    ApiError { code: Some("request_not_found"), ..ApiError::new(StatusCode::NOT_FOUND, message) }
}

/// How far an answer is.
async fn so_far(shape: Shape, generation: Generation) -> Result<Response, ApiError> {
    let prompt_tokens = generation.prompt_tokens();
    let (tokens, end) = generation.so_far().await?;
    Ok(Json(state(shape, prompt_tokens, &tokens, end)).into_response())
}

fn state(shape: Shape, prompt_tokens: u32, tokens: &[crate::TokenEvent], end: Option<End>) -> Value {
    let mut telling = Telling::new(shape);
    telling.opening();
    let mut text = String::new();
    for token in tokens {
        text.push_str(&token.text);
        telling.token(token);
    }
    let shape = telling.shape();
    let mut value = json!({
        "id": shape.id(), "object": "shoal.request", "request": shape.request.to_string(), "model": shape.model, "created": shape.created,
    });
    match end {
        None => value["status"] = Value::from("running"),
        Some(End::Finished { reason, text: rest, timing }) => {
            text.push_str(&rest);
            let ended = Ended { reason, prompt_tokens, completion_tokens: telling.tokens(), timing };
            value["status"] = Value::from("completed");
            value["response"] = telling.shape().whole(&text, tokens, &ended);
            telling.end(&rest, &ended);
        }
        Some(End::Failed(reason)) => {
            value["status"] = Value::from("failed");
            value["error"] = ApiError::from(crate::GenerateError::Broken(reason)).body()["error"].take();
        }
        Some(_) => value["status"] = Value::from("unknown"),
    }
    value["tokens"] = Value::from(telling.tokens());
    value["text"] = Value::from(text);
    // Where a stream goes on from here.
    value["after"] = Value::from(telling.mark().id());
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Finish, Timing, TokenEvent};
    use axum::http::HeaderValue;

    #[test]
    fn a_request_has_one_id_however_it_is_written() {
        let id = RequestId(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef);
        for text in [
            "0123456789abcdef0123456789abcdef",
            "chatcmpl-0123456789abcdef0123456789abcdef",
            "cmpl-0123456789ABCDEF0123456789ABCDEF",
            "01234567-89ab-cdef-0123-456789abcdef",
        ] {
            assert_eq!(named_by(text), id, "{text}");
        }
        // As `printf %s my-own-name | sha256sum` has it.
        assert_eq!(named_by("my-own-name").to_string(), NAME_HASH);
        assert_ne!(named_by("+123456789abcdef0123456789abcdef"), named_by("0123456789abcdef0123456789abcde"));
        assert_ne!(seed_of(id), seed_of(RequestId(1)));
        let header =
            |text: &str| HeaderMap::from_iter([(header::HeaderName::from_static(REQUEST_HEADER), HeaderValue::from_str(text).unwrap())]);
        assert_eq!(chosen(&HeaderMap::new()).unwrap(), None);
        assert_eq!(chosen(&header("my-own-name")).unwrap(), Some(named_by("my-own-name")));
        assert!(chosen(&header("")).is_err() && chosen(&header(&"x".repeat(129))).is_err());
    }

    const NAME_HASH: &str = "1d6f0714d2efc802cad33312d4580861";

    #[test]
    fn what_was_shown_is_said_by_the_header_or_the_query() {
        let from = |after: Option<&str>, hash: Option<&str>| After { after: after.map(str::to_owned), hash: hash.map(str::to_owned) };
        let none = HeaderMap::new();
        let (hash, other) = ("e3b0c44298fc1c14", "0123456789abcdef");
        let mark = |events, hash: Option<&str>| Some(Mark { events, hash: hash.map(str::to_owned) });
        assert_eq!(shown(&from(None, None), &none).unwrap(), None);
        assert_eq!(shown(&from(Some("7"), None), &none).unwrap(), mark(7, None));
        assert_eq!(shown(&from(Some("7"), Some(hash)), &none).unwrap(), mark(7, Some(hash)));
        assert_eq!(shown(&from(Some(&format!("7-{hash}")), Some(other)), &none).unwrap(), mark(7, Some(hash)));
        let last = HeaderMap::from_iter([(header::HeaderName::from_static(LAST_EVENT_HEADER), HeaderValue::from_static("9"))]);
        assert_eq!(shown(&from(Some("7"), None), &last).unwrap(), mark(9, None));
        assert_eq!(shown(&from(Some("x"), None), &none).unwrap_err().param.as_deref(), Some("after"));
        assert_eq!(shown(&from(Some("7"), Some("x")), &none).unwrap_err().param.as_deref(), Some("hash"));
    }

    #[test]
    fn a_look_says_how_far_an_answer_is_and_from_where_to_go_on() {
        let shape = Shape::example;
        let token =
            |text: &str| TokenEvent { index: 0, token: 0, text: text.to_owned(), logprob: None, bytes: Vec::new(), top: Vec::new() };
        let tokens = [token("a"), token(""), token("b")];
        let running = state(shape(), 1, &tokens, None);
        assert_eq!((&running["status"], &running["text"], &running["tokens"]), (&json!("running"), &json!("ab"), &json!(3)));
        assert_eq!((&running["after"], running.get("response")), (&json!("3-fb8e20fc2e4c3f24"), None));
        let ended = End::Finished { reason: Finish::Stop, text: "c".to_owned(), timing: Timing::default() };
        let whole = state(shape(), 1, &tokens, Some(ended));
        assert_eq!((&whole["status"], &whole["text"], &whole["after"]), (&json!("completed"), &json!("abc"), &json!("5-ba7816bf8f01cfea")));
        assert_eq!(whole["response"]["choices"][0]["message"]["content"], "abc");
        let failed = state(shape(), 1, &tokens, Some(End::Failed("no memory".to_owned())));
        assert_eq!((&failed["status"], &failed["error"]["message"]), (&json!("failed"), &json!("no memory")));
    }
}
