//! `shoal list`

use clap::Args;
use serde_json::json;

use super::output::table;
use super::{Failure, ModelsOption, note, open_catalog, say, size_text};

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Also list models of the catalogue that are not on disk
    #[arg(long)]
    all: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    models: ModelsOption,
}

impl List {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let catalog = open_catalog(&self.models).await?;
        let listing = catalog.list().await?;
        let here = |name: &str| listing.models.iter().any(|model| model.name == name);
        let absent: Vec<_> = catalog.known().iter().filter(|known| !here(known.name())).collect();
        if self.json {
            let known = absent.iter().map(
                |known| json!({"name": known.name(), "bytes": known.bytes, "licence": known.licence, "description": known.description}),
            );
            let mut value = json!({"folder": catalog.root(), "models": listing.models, "broken": listing.broken});
            if self.all {
                value["available"] = known.collect();
            }
            say!("{value}");
            return Ok(());
        }
        for entry in &listing.broken {
            note!("warning: {}: {}", entry.path.display(), entry.reason);
        }
        if listing.models.is_empty() && !self.all {
            note!(
                "no models in {}; fetch one with `shoal pull {}`",
                catalog.root().display(),
                catalog.known().first().map_or("MODEL", |known| known.name())
            );
            return Ok(());
        }
        let mut rows = table(&["model", "licence", "from", "size"], 3);
        for model in &listing.models {
            rows.add_row([model.name.clone(), model.licence.clone().unwrap_or_default(), model.source.clone(), size_text(model.bytes)]);
        }
        if self.all {
            for known in absent {
                rows.add_row([known.name().to_owned(), known.licence.clone(), "(not on disk)".to_owned(), size_text(known.bytes)]);
            }
        }
        say!("{rows}");
        Ok(())
    }
}
