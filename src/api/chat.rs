//! Requests for text.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{ConnectInfo, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::sse::{Event, KeepAlive};
use axum::response::{IntoResponse, Response, Sse};

use super::answer::{Dialect, Ended, Shape};
use super::error::ApiError;
use super::fields::Fields;
use super::parameters::{self, Asked};
use super::requests::{REQUEST_HEADER, chosen, seed_of};
use super::told::{Resume, Telling, Told};
use super::{Running, Shared, models};
use crate::{Client, Generation, Piece, RequestId, TokenEvent, Unread};

type Body = Result<Bytes, BytesRejection>;

pub(super) async fn chat(
    State(shared): State<Shared>,
    ConnectInfo(from): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let asked = parameters::chat(Fields::read(body)?)?;
    answer(shared, Dialect::Chat, asked, &headers, from.ip()).await
}

pub(super) async fn text(
    State(shared): State<Shared>,
    ConnectInfo(from): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let asked = parameters::text(Fields::read(body)?)?;
    answer(shared, Dialect::Text, asked, &headers, from.ip()).await
}

/// Who asks: by the key that it shows, or else by the address that it has.
fn client(headers: &HeaderMap, from: IpAddr, user: Option<&str>) -> Client {
    let account = match (headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes), from) {
        (Some(key), _) if !key.is_empty() => [b"key ", key].concat(),
        (_, IpAddr::V4(address)) => [&b"address "[..], &address.octets()].concat(),
        (_, IpAddr::V6(address)) => match address.to_ipv4_mapped() {
            Some(address) => [&b"address "[..], &address.octets()].concat(),
            // A host has as many addresses as it likes, and one network.
            None => [&b"network "[..], &address.octets()[..8]].concat(),
        },
    };
    Client::new(&account, user)
}

/// What a model's answers are made with, as far as a client can tell.
async fn fingerprint(shared: &Shared, model: &str) -> Option<String> {
    let sha256 = match shared.node.catalog().resolve(model).await {
        Ok(local) => local.sha256,
        Err(_) => {
            let name = shared.node.catalog().parse(model).ok()?.to_string();
            let view = shared.node.view();
            let found = view.alive().find_map(|(_, member)| member.card.models.iter().find(|known| known.name == name));
            found?.sha256.clone()
        }
    };
    let digest: String = sha256.chars().take(10).collect();
    Some(format!("shoal_{}_{digest}", env!("CARGO_PKG_VERSION")))
}

async fn answer(shared: Shared, dialect: Dialect, mut asked: Asked, headers: &HeaderMap, from: IpAddr) -> Result<Response, ApiError> {
    models::check_name(&shared, &asked.model)?;
    let running = shared.not_leaving()?;
    let node = &shared.node;
    let chosen = chosen(headers)?;
    let id = chosen.unwrap_or_else(|| RequestId::random(&*node.env().rng));
    if !asked.seeded {
        // Whoever sends a request of its own name again means the same one.
        asked.options.sampling.seed = chosen.map_or_else(|| node.env().rng.next_u64("request seed"), seed_of);
    }
    let mut shape = Shape::new(dialect, &asked, id, shared.unix_seconds());
    shape.fingerprint = fingerprint(&shared, &asked.model).await;
    asked.options.unread = match (asked.background, asked.stream || chosen.is_some()) {
        (true, _) => Unread::GoOn,
        (false, true) => Unread::Wait,
        // The client learns its id with the answer, and not before.
        (false, false) => Unread::Cancel,
    };
    asked.options.id = Some(id);
    asked.options.client = Some(client(headers, from, asked.user.as_deref()));
    asked.options.shape = shape.to_text();
    let known = if chosen.is_some() { node.resume(id, true).await? } else { None };
    let generation = match known {
        Some(generation) => {
            let other = || ApiError::from(crate::GenerateError::Refused(shoal_actors::scheduler::GenerateRefusal::OtherRequest(id)));
            let first = Shape::of(generation.request()).ok_or_else(other)?;
            let (before, options) = (generation.request(), &asked.options);
            let before =
                (&before.prompt, &before.sampling, before.max_tokens, &before.stop, before.ignore_end, &first.model, first.dialect);
            let now = (&options.prompt, &options.sampling, options.max_tokens, &options.stop, options.ignore_end, &asked.model, dialect);
            if before != now {
                return Err(other());
            }
            (shape.created, shape.fingerprint) = (first.created, first.fingerprint);
            generation
        }
        None => node.generate(&asked.model, asked.options).await?,
    };
    let response = match asked.stream {
        true => stream(Streamed::new(Telling::new(shape), generation, None, running)?),
        false => whole(shape, generation).await?,
    };
    Ok(named(response, id))
}

/// A response that says which request it answers.
pub(super) fn named(mut response: Response, id: RequestId) -> Response {
    if let Ok(value) = HeaderValue::from_str(&id.to_string()) {
        response.headers_mut().insert(REQUEST_HEADER, value);
    }
    response
}

/// If the client goes away, the server drops this future, and with it the generation.
async fn whole(shape: Shape, mut generation: Generation) -> Result<Response, ApiError> {
    let mut text = String::new();
    let mut tokens: Vec<TokenEvent> = Vec::new();
    while let Some(piece) = generation.next().await {
        match piece? {
            Piece::Token(token) => {
                text.push_str(&token.text);
                tokens.push(token);
            }
            Piece::End { reason, text: rest, timing } => {
                text.push_str(&rest);
                let completion_tokens = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
                let ended = Ended { reason, prompt_tokens: generation.prompt_tokens(), completion_tokens, timing };
                return Ok(Json(shape.whole(&text, &tokens, &ended)).into_response());
            }
            _ => {}
        }
    }
    Err(ended_without_end())
}

fn ended_without_end() -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the answer ended without an end")
}

/// A streamed answer on its way.
#[derive(Debug)]
pub(super) struct Streamed {
    telling: Telling,
    generation: Generation,
    resume: Option<Resume>,
    ready: VecDeque<Event>,
    ended: bool,
    _running: Running,
}

impl Streamed {
    /// From the beginning, or without what `resume` leaves out.
    pub(super) fn new(mut telling: Telling, generation: Generation, resume: Option<Resume>, running: Running) -> Result<Self, ApiError> {
        let opening = telling.opening().into_iter().collect();
        let mut streamed = Self { telling, generation, resume, ready: VecDeque::new(), ended: false, _running: running };
        streamed.tell(opening)?;
        Ok(streamed)
    }

    /// Waits until the answer is as far as what was shown.
    ///
    /// # Errors
    /// If it is another one, or breaks off before.
    pub(super) async fn catch_up(&mut self) -> Result<(), ApiError> {
        loop {
            let here = self.telling.mark();
            match &self.resume {
                Some(resume) if !resume.reached(&here).map_err(|why| ApiError::contradiction(&why))? => {}
                _ => return Ok(()),
            }
            if self.ended {
                return Ok(());
            }
            let piece = self.generation.next().await;
            self.take(piece)?;
        }
    }

    fn tell(&mut self, told: Vec<Told>) -> Result<(), ApiError> {
        let new = match &self.resume {
            Some(resume) => resume.new_of(told).map_err(|why| ApiError::contradiction(&why))?,
            None => told,
        };
        self.ready.extend(new.iter().map(|told| Event::default().id(told.mark.id()).data(told.value.to_string())));
        Ok(())
    }

    fn take(&mut self, piece: Option<Result<Piece, crate::GenerateError>>) -> Result<(), ApiError> {
        match piece {
            Some(Ok(Piece::Token(token))) => {
                let told = self.telling.token(&token).into_iter().collect();
                self.tell(told)
            }
            Some(Ok(Piece::End { reason, text, timing })) => {
                let (prompt_tokens, completion_tokens) = (self.generation.prompt_tokens(), self.telling.tokens());
                let ended = Ended { reason, prompt_tokens, completion_tokens, timing };
                let told = self.telling.end(&text, &ended);
                self.tell(told)?;
                if let Some(resume) = &self.resume {
                    resume.ended(&self.telling.mark()).map_err(|why| ApiError::contradiction(&why))?;
                }
                self.ready.push_back(Event::default().data("[DONE]"));
                self.ended = true;
                Ok(())
            }
            Some(Ok(_)) => Ok(()),
            Some(Err(error)) => Err(error.into()),
            None => Err(ended_without_end()),
        }
    }

    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.ended {
                return None;
            }
            let piece = self.generation.next().await;
            if let Err(error) = self.take(piece) {
                self.ended = true;
                return Some(Event::default().event("error").data(error.body().to_string()));
            }
        }
    }
}

/// If the client goes away, the server drops the stream, and with it the generation.
pub(super) fn stream(streamed: Streamed) -> Response {
    let events = futures::stream::unfold(streamed, |mut streamed| async move {
        let event = streamed.next().await?;
        Some((Ok::<_, Infallible>(event), streamed))
    });
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_known_by_its_key_or_else_by_where_it_is() {
        let of = |key: Option<&str>, from: &str, user: Option<&str>| {
            let headers = key.map(|key| (header::AUTHORIZATION, HeaderValue::from_str(key).unwrap()));
            client(&HeaderMap::from_iter(headers), from.parse().unwrap(), user)
        };
        let plain = of(None, "10.0.0.1", None);
        assert_eq!(of(None, "::ffff:10.0.0.1", None), plain);
        assert_ne!(of(None, "10.0.0.2", None).account, plain.account);
        assert_eq!(of(None, "2001:db8::1", None), of(None, "2001:db8::2:3", None));
        assert_eq!(of(Some("Bearer a"), "10.0.0.1", None), of(Some("Bearer a"), "10.0.0.9", None));
        assert_ne!(of(Some("Bearer a"), "10.0.0.1", None).account, of(Some("Bearer b"), "10.0.0.1", None).account);
        let user = of(None, "10.0.0.1", Some("u"));
        assert!(user.account == plain.account && user.user != plain.user && plain.user == 0);
    }
}
