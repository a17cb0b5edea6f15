//! The node's health, the cluster's state, and placing of models.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{ConnectInfo, State as FromState};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::{Fields, wrong};
use super::state::{Instance, PlanLine, Plans, PoolState, State};
use super::{Shared, models};
use crate::{Goal, InstanceId, InstanceState, NodeId, Prefer, default_goal};

/// Longest that a node may be told to take for leaving.
const DRAIN_SECONDS_MAX: u32 = 3600;

type Body = Result<Bytes, BytesRejection>;

/// The process runs.
pub(super) async fn live() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// The node takes requests.
pub(super) async fn health(FromState(shared): FromState<Shared>) -> Response {
    let leaving = shared.is_leaving();
    let (status, word) = if leaving { (StatusCode::SERVICE_UNAVAILABLE, "leaving") } else { (StatusCode::OK, "ok") };
    (status, Json(json!({"status": word, "node": shared.node.id().to_string(), "version": env!("CARGO_PKG_VERSION")}))).into_response()
}

pub(super) async fn state(FromState(shared): FromState<Shared>, ConnectInfo(from): ConnectInfo<SocketAddr>) -> Json<State> {
    let mut state = State::of(&shared.node);
    if from.ip().to_canonical().is_loopback() {
        state.models_folder = Some(shared.node.catalog().root().display().to_string());
    }
    Json(state)
}

/// The memory of the whole cluster.
pub(super) async fn pool(FromState(shared): FromState<Shared>) -> Json<PoolState> {
    Json(PoolState::of(&shared.node).await)
}

fn nodes(fields: &mut Fields, name: &str) -> Result<BTreeSet<NodeId>, ApiError> {
    let list = match fields.take(name) {
        None => return Ok(BTreeSet::new()),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(wrong(name, "a list of node ids", &other)),
    };
    let read = |value: Value| match value.as_str() {
        Some(text) => text.parse().map_err(|error: shoal_actors::ids::NodeIdError| ApiError::parameter(name, error.to_string())),
        None => Err(wrong(name, "a list of node ids", &value)),
    };
    list.into_iter().map(read).collect()
}

/// What a model is placed for.
fn goal(fields: &mut Fields) -> Result<Goal, ApiError> {
    let plain = default_goal();
    let prefer = match fields.string("prefer")?.as_deref() {
        None | Some("speed") => Prefer::Speed,
        Some("fewest_nodes") => Prefer::FewestNodes,
        Some(_) => return Err(ApiError::parameter("prefer", "`prefer` must be speed or fewest_nodes")),
    };
    Ok(Goal {
        context_tokens: fields.integer("context_tokens", 1, u32::MAX)?.unwrap_or(plain.context_tokens),
        sequences: fields.integer("sequences", 1, u32::MAX)?.unwrap_or(plain.sequences),
        nodes_min: fields.integer("nodes_min", 1, u32::MAX)?.unwrap_or(plain.nodes_min),
        nodes_max: fields.integer("nodes_max", 1, u32::MAX)?.unwrap_or(plain.nodes_max),
        pinned: nodes(fields, "pinned")?,
        excluded: nodes(fields, "excluded")?,
        prefer,
        ..plain
    })
}

pub(super) async fn plan(FromState(shared): FromState<Shared>, body: Body) -> Result<Json<Plans>, ApiError> {
    let mut fields = Fields::read(body)?;
    let model = fields.required_string("model")?;
    let goal = goal(&mut fields)?;
    fields.finish("plans")?;
    models::check_name(&shared, &model)?;
    let plans = shared.node.plan(&model, goal).await?;
    Ok(Json(Plans { model, plans: plans.iter().map(PlanLine::of).collect() }))
}

/// Places a model. With `wait` one that fits nowhere is wanted from now on: the answer is then 202, and tells what is missing.
pub(super) async fn load(FromState(shared): FromState<Shared>, body: Body) -> Result<Response, ApiError> {
    let mut fields = Fields::read(body)?;
    let model = fields.required_string("model")?;
    let goal = goal(&mut fields)?;
    let replica = fields.boolean("replica")?.unwrap_or(false);
    let wait = fields.boolean("wait")?.unwrap_or(false);
    fields.finish("placing")?;
    if replica && wait {
        return Err(ApiError::parameter("wait", "`wait` and `replica` cannot be asked for together"));
    }
    models::check_name(&shared, &model)?;
    let summary = if wait { shared.node.want(&model, goal).await? } else { shared.node.load(&model, goal, replica).await? };
    let status = if summary.state == InstanceState::Ready { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok((status, Json(Instance::of(&shared.node, &summary))).into_response())
}

/// Takes down one instance by its id, or all of a model.
pub(super) async fn unload(FromState(shared): FromState<Shared>, body: Body) -> Result<Json<Value>, ApiError> {
    let mut fields = Fields::read(body)?;
    let instance = fields.string("instance")?;
    let model = fields.string("model")?;
    fields.finish("taking down")?;
    let known = shared.node.instances();
    let wanted: Vec<InstanceId> = match (instance, model) {
        (Some(text), None) => {
            let id: InstanceId = text
                .parse()
                .map_err(|_| ApiError::parameter("instance", format!("`{text}` is no instance's id: it has 32 hexadecimal digits")))?;
            vec![id]
        }
        (None, Some(model)) => {
            let name = shared.node.catalog().parse(&model).map_or_else(|_| model.clone(), |reference| reference.to_string());
            known.iter().filter(|known| known.model == name || known.model == model).map(|known| known.instance).collect()
        }
        _ => return Err(ApiError::parameter("instance", "give either `instance`, an id, or `model`")),
    };
    if wanted.is_empty() {
        return Err(ApiError { code: Some("instance_not_found"), ..ApiError::not_found("no instance of this model is placed") });
    }
    for instance in &wanted {
        shared.node.unload(*instance).await?;
    }
    Ok(Json(json!({"unloaded": wanted.iter().map(ToString::to_string).collect::<Vec<_>>()})))
}

/// Has the node leave: what it has moves to other nodes first, for at most as many seconds as `drain_seconds` says.
pub(super) async fn leave(
    FromState(shared): FromState<Shared>,
    ConnectInfo(from): ConnectInfo<SocketAddr>,
    body: Body,
) -> Result<Response, ApiError> {
    if !from.ip().to_canonical().is_loopback() {
        return Err(ApiError::new(StatusCode::FORBIDDEN, "a node is told to leave from its own machine only"));
    }
    let asked = match &body {
        Ok(bytes) if bytes.is_empty() => None,
        _ => {
            let mut fields = Fields::read(body)?;
            let seconds = fields.integer("drain_seconds", 0, DRAIN_SECONDS_MAX)?;
            fields.finish("leaving")?;
            seconds.map(|seconds| Duration::from_secs(u64::from(seconds)))
        }
    };
    let within = (shared.on_leave)(asked);
    let told = json!({"status": "leaving", "node": shared.node.id().to_string(), "drain_seconds": within.as_secs()});
    Ok((StatusCode::ACCEPTED, Json(told)).into_response())
}
