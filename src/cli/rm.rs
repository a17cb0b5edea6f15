//! `shoal rm`

use clap::Args;
use shoal::api::state::State;

use super::{ApiOption, Failure, ModelsOption, open_catalog, say};

#[derive(Debug, Args)]
pub(crate) struct Rm {
    /// The model's name
    model: String,
    #[command(flatten)]
    api: ApiOption,
    #[command(flatten)]
    models: ModelsOption,
}

impl Rm {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let catalog = open_catalog(&self.models).await?;
        // Whoever places or repairs an instance reads the file. What nodes of this machine have loaded they have marked; this one also
        // knows of instances that would need the file later.
        let state: Option<State> = self.api.client().get("/v1/shoal/state").await.ok();
        let used: Vec<String> = state.into_iter().flat_map(|state| state.instances).map(|instance| instance.sha256).collect();
        catalog.remove(&self.model, move |model| used.contains(&model.sha256)).await?;
        say!("{} is removed", self.model);
        Ok(())
    }
}
