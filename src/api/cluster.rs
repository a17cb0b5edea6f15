//! The node's health, the cluster's state, and placing of models.

use std::collections::BTreeSet;
use std::net::SocketAddr;

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
use crate::{Goal, InstanceId, NodeId, Prefer, default_goal};

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

pub(super) async fn load(FromState(shared): FromState<Shared>, body: Body) -> Result<Json<Instance>, ApiError> {
    let mut fields = Fields::read(body)?;
    let model = fields.required_string("model")?;
    let goal = goal(&mut fields)?;
    let replica = fields.boolean("replica")?.unwrap_or(false);
    fields.finish("placing")?;
    models::check_name(&shared, &model)?;
    let summary = shared.node.load(&model, goal, replica).await?;
    Ok(Json(Instance::of(&shared.node, &summary)))
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

pub(super) async fn leave(FromState(shared): FromState<Shared>, ConnectInfo(from): ConnectInfo<SocketAddr>) -> Result<Response, ApiError> {
    if !from.ip().to_canonical().is_loopback() {
        return Err(ApiError::new(StatusCode::FORBIDDEN, "a node is told to leave from its own machine only"));
    }
    (shared.on_leave)();
    Ok((StatusCode::ACCEPTED, Json(json!({"status": "leaving", "node": shared.node.id().to_string()}))).into_response())
}
