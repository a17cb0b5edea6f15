//! Requests for text.

use std::collections::VecDeque;
use std::convert::Infallible;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive};
use axum::response::{IntoResponse, Response, Sse};
use serde_json::Value;

use super::answer::{Dialect, Ended, Shape};
use super::error::ApiError;
use super::fields::Fields;
use super::parameters::{self, Asked};
use super::{Shared, models};
use crate::{Generation, Piece, TokenEvent};

type Body = Result<Bytes, BytesRejection>;

pub(super) async fn chat(State(shared): State<Shared>, body: Body) -> Result<Response, ApiError> {
    let asked = parameters::chat(Fields::read(body)?)?;
    answer(shared, Dialect::Chat, asked).await
}

pub(super) async fn text(State(shared): State<Shared>, body: Body) -> Result<Response, ApiError> {
    let asked = parameters::text(Fields::read(body)?)?;
    answer(shared, Dialect::Text, asked).await
}

async fn answer(shared: Shared, dialect: Dialect, mut asked: Asked) -> Result<Response, ApiError> {
    models::check_name(&shared, &asked.model)?;
    if shared.is_leaving() {
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "this node is leaving the cluster; ask another one");
        return Err(ApiError { code: Some("leaving"), ..error });
    }
    let node = &shared.node;
    if !asked.seeded {
        asked.options.sampling.seed = node.env().rng.next_u64("request seed");
    }
    let generation = node.generate(&asked.model, asked.options.clone()).await?;
    let instance = node.instances().into_iter().find(|known| known.instance == generation.instance());
    let fingerprint = instance.map(|instance| {
        let digest: String = instance.sha256.chars().take(10).collect();
        format!("shoal_{}_{digest}", env!("CARGO_PKG_VERSION"))
    });
    let prefix = match dialect {
        Dialect::Chat => "chatcmpl",
        Dialect::Text => "cmpl",
    };
    let id = format!("{prefix}-{}", generation.id());
    let shape = Shape::new(dialect, &asked, id, shared.unix_seconds(), asked.model.clone(), fingerprint);
    match asked.stream {
        true => Ok(stream(shape, generation)),
        false => whole(shape, generation).await,
    }
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
    Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the answer ended without an end"))
}

struct Streamed {
    shape: Shape,
    generation: Generation,
    completion_tokens: u32,
    ready: VecDeque<Event>,
    ended: bool,
}

fn event(value: &Value) -> Event {
    Event::default().data(value.to_string())
}

impl Streamed {
    fn take(&mut self, piece: Option<Result<Piece, crate::GenerateError>>) {
        match piece {
            Some(Ok(Piece::Token(token))) => {
                self.completion_tokens = self.completion_tokens.saturating_add(1);
                let piece = self.shape.piece(&token.text, std::slice::from_ref(&token));
                self.ready.extend(piece.as_ref().map(event));
            }
            Some(Ok(Piece::End { reason, text, timing })) => {
                self.ready.extend(self.shape.piece(&text, &[]).as_ref().map(event));
                let (prompt_tokens, completion_tokens) = (self.generation.prompt_tokens(), self.completion_tokens);
                let ended = Ended { reason, prompt_tokens, completion_tokens, timing };
                self.ready.extend(self.shape.closing(&ended).iter().map(event));
                self.ready.push_back(Event::default().data("[DONE]"));
                self.ended = true;
            }
            Some(Ok(_)) => {}
            Some(Err(error)) => self.fail(&error.into()),
            None => self.fail(&ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the answer ended without an end")),
        }
    }

    fn fail(&mut self, error: &ApiError) {
        self.ready.push_back(event(&error.body()).event("error"));
        self.ended = true;
    }
}

/// If the client goes away, the server drops the stream, and with it the generation.
fn stream(shape: Shape, generation: Generation) -> Response {
    let ready = shape.opening().as_ref().map(event).into_iter().collect();
    let state = Streamed { shape, generation, completion_tokens: 0, ready, ended: false };
    let events = futures::stream::unfold(state, |mut state| async move {
        loop {
            if let Some(event) = state.ready.pop_front() {
                return Some((Ok::<_, Infallible>(event), state));
            }
            if state.ended {
                return None;
            }
            let piece = state.generation.next().await;
            state.take(piece);
        }
    });
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}
