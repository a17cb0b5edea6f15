//! How fast tensor links are.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive};
use axum::response::{IntoResponse, Response, Sse};
use serde_json::Value;
use shoal_actors::linkbench::{BenchOptions, LinkBenchError};

use super::Shared;
use super::error::ApiError;
use super::fields::{Fields, wrong};
use crate::{Node, NodeId};

/// Longest time for each size, in milliseconds.
const MILLISECONDS_MAX: u32 = 2000;

/// The node that is called so, or whose id begins so.
fn peer(node: &Node, text: &str) -> Result<NodeId, ApiError> {
    let view = node.view();
    let named: Vec<NodeId> = view.alive().filter(|(_, member)| member.card.name == text).map(|(id, _)| id).collect();
    let found = if named.is_empty() && !text.is_empty() {
        let start = text.to_lowercase();
        view.alive().map(|(id, _)| id).filter(|id| id.to_string().starts_with(&start)).collect()
    } else {
        named
    };
    match found[..] {
        [one] => Ok(one),
        [] => Err(ApiError {
            code: Some("node_not_found"),
            ..ApiError::not_found(format!("no node of this cluster is called `{text}`, and no id begins so"))
        }),
        _ => Err(ApiError::parameter("peer", format!("`{text}` means {} nodes; give more digits of the id", found.len()))),
    }
}

fn sizes(fields: &mut Fields) -> Result<Vec<u32>, ApiError> {
    let list = match fields.take("sizes") {
        None => return Ok(BenchOptions::usual().sizes),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(wrong("sizes", "a list of numbers of bytes", &other)),
    };
    let read =
        |value: Value| value.as_u64().and_then(|size| u32::try_from(size).ok()).ok_or_else(|| wrong("sizes", "numbers of bytes", &value));
    list.into_iter().map(read).collect()
}

/// One event for each row, then `[DONE]`. If the client goes away, the measurement ends.
pub(super) async fn link(State(shared): State<Shared>, body: Result<Bytes, BytesRejection>) -> Result<Response, ApiError> {
    let mut fields = Fields::read(body)?;
    let peer = peer(&shared.node, &fields.required_string("peer")?)?;
    let sizes = sizes(&mut fields)?;
    let milliseconds = fields.integer("milliseconds", 1, MILLISECONDS_MAX)?;
    fields.finish("measuring links")?;
    let time = milliseconds.map_or_else(|| BenchOptions::usual().time, |ms| Duration::from_millis(ms.into()));
    let options = BenchOptions { sizes, time };
    if let Err(error) = options.slot_bytes() {
        return Err(ApiError::parameter("sizes", error.to_string()));
    }
    let rows = shared.node.bench_links(peer, options);
    let events = futures::stream::unfold(Some(rows), |rows| async move {
        let mut rows = rows?;
        let (event, rows) = match rows.recv().await {
            Some(Ok(row)) => (Event::default().data(serde_json::to_string(&row).unwrap_or_default()), Some(rows)),
            Some(Err(error)) => (Event::default().event("error").data(failure(&error).body().to_string()), None),
            None => (Event::default().data("[DONE]"), None),
        };
        Some((Ok::<_, Infallible>(event), rows))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()).into_response())
}

fn failure(error: &LinkBenchError) -> ApiError {
    let code = match error {
        LinkBenchError::Call { .. } => "node_unreachable",
        LinkBenchError::Refused { .. } => "node_refuses",
        _ => "link_failed",
    };
    ApiError { code: Some(code), ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string()) }
}
