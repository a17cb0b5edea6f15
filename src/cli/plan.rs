//! `shoal plan`

use clap::Args;
use shoal::api::state::Plans;

use super::load::GoalOptions;
use super::{ApiOption, Failure, plan_table, say};

#[derive(Debug, Args)]
#[command(
    after_help = "Nothing is placed. The first plan is the one that a request would get.\n\nExample:\n  shoal plan smollm2:135m --nodes-min 2"
)]
pub(crate) struct PlanCommand {
    /// The model
    model: String,
    #[command(flatten)]
    goal: GoalOptions,
    /// Show so many plans at most
    #[arg(long, value_name = "N", default_value_t = 3)]
    show: usize,
    /// Print all plans as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    api: ApiOption,
}

impl PlanCommand {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let plans: Plans = self.api.client().post("/v1/shoal/plan", self.goal.body(&super::absolute(&self.model))?).await?;
        if self.json {
            say!("{}", serde_json::to_string(&plans).unwrap_or_default());
            return Ok(());
        }
        for (index, plan) in plans.plans.iter().take(self.show).enumerate() {
            say!(
                "plan {} of {}: {} for {} × {} tokens",
                index + 1,
                plans.plans.len(),
                plan.arrangement,
                plan.sequences,
                plan.context_tokens
            );
            say!("{}\n", plan_table(plan));
        }
        Ok(())
    }
}
