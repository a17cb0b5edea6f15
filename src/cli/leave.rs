//! `shoal leave`

use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::{ApiOption, ClientError, Failure, say};

/// How long a node may take to leave once it has given away what it had, or has not: it gives back what it lent and borrowed.
const PATIENCE: Duration = Duration::from_secs(40);

#[derive(Debug, Args)]
#[command(
    after_help = "The layers that the node holds move to other nodes first, and models that it conducts are handed to others, while their\n\
    answers go on; then it leaves. What fits nowhere else goes with it."
)]
pub(crate) struct Leave {
    /// Seconds that this may take at most; 0 leaves at once [default: what the node was started with]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(0..=3600))]
    drain_seconds: Option<u32>,
    #[command(flatten)]
    api: ApiOption,
}

impl Leave {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let client = self.api.client();
        let told: Value = client.post("/v1/shoal/leave", json!({"drain_seconds": self.drain_seconds})).await?;
        let patience = PATIENCE + Duration::from_secs(told["drain_seconds"].as_u64().unwrap_or(0));
        let gone = async {
            while !matches!(client.get::<Value>("/health/live").await, Err(ClientError::NoNode { .. })) {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        match tokio::time::timeout(patience, gone).await {
            Ok(()) => say!("the node at {} has left", client.address()),
            Err(_) => return Err(Failure::new(format!("the node at {} was told to leave and is still there", client.address()))),
        }
        Ok(())
    }
}
