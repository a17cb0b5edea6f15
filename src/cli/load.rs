//! `shoal load`

use clap::Args;
use serde_json::{Value, json};
use shoal::NodeId;
use shoal::api::state::Instance;

use super::output::{rate, short, stage_table};
use super::{ApiOption, Exit, Failure, say};

/// What a model is placed for.
#[derive(Debug, Clone, Args)]
pub(crate) struct GoalOptions {
    /// Longest conversation, in tokens
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,
    /// Conversations at the same time
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    sequences: Option<u32>,
    /// Use at least so many nodes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    nodes_min: Option<u32>,
    /// Use at most so many nodes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    nodes_max: Option<u32>,
    /// A node (64-digit id) that must take part; may be given more than once
    #[arg(long, value_name = "ID")]
    pin: Vec<NodeId>,
    /// A node (64-digit id) that must not take part; may be given more than once
    #[arg(long, value_name = "ID")]
    exclude: Vec<NodeId>,
}

impl GoalOptions {
    /// As a request for `model` has it.
    pub(crate) fn body(&self, model: &str) -> Result<Value, Failure> {
        let contradiction = |message: String| Err(Failure::new(message).exit(Exit::Usage));
        if let (Some(min), Some(max)) = (self.nodes_min, self.nodes_max)
            && min > max
        {
            return contradiction(format!("--nodes-min {min} is more than --nodes-max {max}"));
        }
        if let Some(node) = self.pin.iter().find(|node| self.exclude.contains(node)) {
            return contradiction(format!("node {node} must take part by --pin and must not by --exclude"));
        }
        let ids = |nodes: &[NodeId]| nodes.iter().map(ToString::to_string).collect::<Vec<_>>();
        Ok(json!({
            "model": model,
            "context_tokens": self.context,
            "sequences": self.sequences,
            "nodes_min": self.nodes_min,
            "nodes_max": self.nodes_max,
            "pinned": ids(&self.pin),
            "excluded": ids(&self.exclude),
        }))
    }
}

#[derive(Debug, Args)]
#[command(after_help = "Requests place a model by themselves; this does it beforehand, or another way than they would.\n\n\
    Examples:\n  shoal load smollm2:135m --nodes-min 3\n  shoal load smollm2:135m --replica")]
pub(crate) struct Load {
    /// The model
    model: String,
    #[command(flatten)]
    goal: GoalOptions,
    /// Place another copy beside one that is there
    #[arg(long)]
    replica: bool,
    /// If there is no room for it, have it placed as soon as there is
    #[arg(long, conflicts_with = "replica")]
    wait: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    api: ApiOption,
}

impl Load {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let mut body = self.goal.body(&super::absolute(&self.model))?;
        body["replica"] = Value::from(self.replica);
        body["wait"] = Value::from(self.wait);
        let instance: Instance = self.api.client().post("/v1/shoal/load", body).await?;
        if self.json {
            say!("{}", serde_json::to_string(&instance).unwrap_or_default());
        } else if instance.state == "waiting" {
            let reason = instance.reason.as_deref().unwrap_or("there is no room for it");
            say!("{} waits until there is room: {reason}", instance.model);
            say!("`shoal status` shows it; `shoal unload` takes the wish back");
        } else {
            say!(
                "{} is placed as instance {} for {} tokens, predicted {}",
                instance.model,
                short(&instance.id),
                instance.context_tokens,
                rate(instance.decode_tok_s)
            );
            say!("{}", stage_table(&instance.stages));
        }
        Ok(())
    }
}
