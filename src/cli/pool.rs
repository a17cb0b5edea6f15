//! `shoal pool`

use clap::Args;
use comfy_table::Table;
use shoal::api::state::{Lending, PoolState};

use super::output::{Names, layers, short, table};
use super::{ApiOption, Failure, say, size_text};

#[derive(Debug, Args)]
#[command(after_help = "Every node tells itself what it lends, so the sums are exact at the moment at which each was asked.\n\n\
    Examples:\n  shoal pool\n  shoal pool --json | jq '.nodes[] | {name, used: .lent.used_bytes}'")]
pub(crate) struct Pool {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    api: ApiOption,
}

impl Pool {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let pool: PoolState = self.api.client().get("/v1/shoal/pool").await?;
        if self.json {
            say!("{}", serde_json::to_string(&pool).unwrap_or_default());
            return Ok(());
        }
        let names = Names::new(pool.nodes.iter().map(|node| (node.id.clone(), node.name.clone())));
        let fenced =
            if pool.fenced_bytes > 0 { format!(", of which {} are not free yet", size_text(pool.fenced_bytes)) } else { String::new() };
        say!("{} of {} are lent{fenced}", size_text(pool.used_bytes), size_text(pool.offered_bytes));
        for node in &pool.nodes {
            match (&node.lent, &node.failure) {
                (Some(lent), _) => {
                    say!("\n{} lends {} of {}", names.name(&node.id), size_text(lent.used_bytes), size_text(lent.offered_bytes));
                    if !lent.leases.is_empty() {
                        say!("{}", lease_table(lent, &names));
                    }
                }
                (None, failure) => say!("\n{} does not tell: {}", names.name(&node.id), failure.as_deref().unwrap_or("no answer")),
            }
        }
        Ok(())
    }
}

/// What a node lends, a line for each lease.
pub(super) fn lease_table(lent: &Lending, names: &Names) -> Table {
    let mut rows = table(&["lease", "to", "for", "purpose", "layers", "state", "memory", "runs out in"], 6);
    for lease in &lent.leases {
        rows.add_row([
            short(&lease.id).to_owned(),
            names.name(&lease.holder),
            lease.beneficiary.clone(),
            lease.purpose.clone(),
            lease.layers.map(layers).unwrap_or_default(),
            lease.state.clone(),
            size_text(lease.bytes),
            format!("{:.1} s", lease.remaining_seconds),
        ]);
    }
    rows
}
