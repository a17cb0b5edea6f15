//! `shoal leave`

use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::{ApiOption, ClientError, Failure, say};

/// How long a node may take to leave: it gives back what it lent and borrowed.
const PATIENCE: Duration = Duration::from_secs(40);

#[derive(Debug, Args)]
pub(crate) struct Leave {
    #[command(flatten)]
    api: ApiOption,
}

impl Leave {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let client = self.api.client();
        client.post::<Value>("/v1/shoal/leave", json!({})).await?;
        let gone = async {
            while !matches!(client.get::<Value>("/health/live").await, Err(ClientError::NoNode { .. })) {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        match tokio::time::timeout(PATIENCE, gone).await {
            Ok(()) => say!("the node at {} has left", client.address()),
            Err(_) => return Err(Failure::new(format!("the node at {} was told to leave and is still there", client.address()))),
        }
        Ok(())
    }
}
