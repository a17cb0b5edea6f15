//! `shoal unload`

use clap::Args;
use serde_json::{Value, json};

use super::{ApiOption, Failure, say};

#[derive(Debug, Args)]
pub(crate) struct Unload {
    /// A model, or an instance's id as `shoal status --json` shows it
    model: String,
    #[command(flatten)]
    api: ApiOption,
}

impl Unload {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let is_id = self.model.len() == 32 && self.model.bytes().all(|byte| byte.is_ascii_hexdigit());
        let field = if is_id { "instance" } else { "model" };
        let name = if is_id { self.model.clone() } else { super::absolute(&self.model) };
        self.api.client().post::<Value>("/v1/shoal/unload", json!({field: name})).await?;
        say!("{} is taken down; its memory is free, and it is not waited for any more", self.model);
        Ok(())
    }
}
