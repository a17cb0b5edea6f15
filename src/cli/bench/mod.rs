//! `shoal bench`

mod link;
mod model;
mod plot;
mod serve;

use clap::Subcommand;

use super::Failure;

#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Prefill and decode speed of a model on this machine's processor, without a node
    Model(model::BenchModel),
    /// Latency and bandwidth of tensor links, to another node or between two processes of this machine
    Link(link::BenchLink),
    /// How a model serves several clients at once: throughput, time to the first token, gaps while a long prompt is read
    Serve(serve::BenchServe),
    /// The other process of `shoal bench link --local`
    #[command(hide = true)]
    Answer,
}

impl Bench {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        match self {
            Self::Model(command) => command.run().await,
            Self::Link(command) => command.run().await,
            Self::Serve(command) => command.run().await,
            Self::Answer => link::answer().await,
        }
    }
}
