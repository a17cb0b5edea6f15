//! The models that requests can name.

use std::collections::{BTreeMap, BTreeSet};

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};
use shoal_actors::catalog::Reference;

use super::Shared;
use super::error::ApiError;
use crate::InstanceState;

/// Whether whoever reaches the interface may name this model. A file's path names anything on the disk, so it is for
/// programs on the same machine.
pub(super) fn check_name(shared: &Shared, model: &str) -> Result<(), ApiError> {
    if !shared.is_local() && matches!(shared.node.catalog().parse(model), Ok(Reference::File(_))) {
        return Err(ApiError::no_model(format!(
            "`{model}` is a file; this node serves other machines, which can name only models of the catalogue"
        )));
    }
    Ok(())
}

#[derive(Debug, Default)]
struct Entry {
    bytes: Option<u64>,
    sha256: String,
    on_disk: BTreeSet<String>,
    placed: bool,
    created: u64,
}

async fn entries(shared: &Shared) -> BTreeMap<String, Entry> {
    let mut models: BTreeMap<String, Entry> = BTreeMap::new();
    for (node, member) in shared.node.view().present() {
        for model in &member.card.models {
            let entry = models.entry(model.name.clone()).or_default();
            entry.bytes = Some(model.bytes);
            entry.sha256 = model.sha256.clone();
            entry.on_disk.insert(node.to_string());
        }
    }
    for instance in shared.node.instances() {
        let entry = models.entry(instance.model.clone()).or_default();
        entry.sha256 = instance.sha256.clone();
        entry.placed |= matches!(instance.state, InstanceState::Ready | InstanceState::Recovering(_));
    }
    // When a model came is known of those on this machine; the others count as old as can be.
    if let Ok(listing) = shared.node.catalog().list().await {
        for model in listing.models {
            if let Some(entry) = models.get_mut(&model.name) {
                entry.created = model.fetched_unix_seconds.unwrap_or(0);
            }
        }
    }
    models
}

fn model(name: &str, entry: &Entry) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": entry.created,
        "owned_by": "shoal",
        "shoal": {"placed": entry.placed, "on_disk": entry.on_disk, "bytes": entry.bytes, "sha256": entry.sha256},
    })
}

pub(super) async fn list(State(shared): State<Shared>) -> Json<Value> {
    let models = entries(&shared).await;
    let data: Vec<Value> = models.iter().map(|(name, entry)| model(name, entry)).collect();
    Json(json!({"object": "list", "data": data}))
}

pub(super) async fn one(State(shared): State<Shared>, Path(name): Path<String>) -> Result<Json<Value>, ApiError> {
    let models = entries(&shared).await;
    // A name without its tag means the same model.
    let known = shared.node.catalog().parse(&name).map_or_else(|_| name.clone(), |reference| reference.to_string());
    match models.get_key_value(&name).or_else(|| models.get_key_value(&known)) {
        Some((name, entry)) => Ok(Json(model(name, entry))),
        None => {
            let names: Vec<&str> = models.keys().map(String::as_str).collect();
            let there = if names.is_empty() { "there are none".to_owned() } else { format!("there are: {}", names.join(", ")) };
            Err(ApiError::no_model(format!("no node has the model `{name}`; {there}")))
        }
    }
}
