//! The command line: one file for each command.

mod answer;
mod bench;
mod client;
mod failure;
mod key;
mod leave;
mod list;
mod load;
pub(crate) mod log;
mod news;
mod output;
mod percentile;
mod plan;
mod pool;
mod pull;
mod rm;
mod run;
mod signals;
mod size;
mod status;
mod unload;
mod up;

use clap::{Args, Parser, Subcommand};

pub(crate) use answer::{Asked, Event, Summary, words_of};
pub(crate) use client::{Client, ClientError, Exchange};
pub(crate) use failure::{Exit, Failure};
pub(crate) use output::{note, plan_table, say, stage_table};
pub(crate) use percentile::percentile;
pub(crate) use pull::{fetch, open_catalog};
pub(crate) use run::{absolute, parse_temperature};
pub(crate) use signals::Signals;
pub(crate) use size::size_text;

/// The address at which a node's HTTP interface listens unless it is told otherwise.
pub(crate) const API_DEFAULT: &str = "127.0.0.1:52800";

const AFTER_HELP: &str = "\
Examples:
  shoal demo                          three nodes on this machine split a model and answer a question
  shoal up                            run a node: it joins whatever nodes it finds on the local network
  shoal pull smollm2:135m             fetch a model
  shoal run smollm2:135m 'Say hello'  ask it

MODEL is a name of the catalogue (`shoal list --all`), a path of a GGUF file, or a repository on the hub:
owner/name, owner/name:QUANT, owner/name:file.gguf, owner/name@revision.

Environment:
  SHOAL_API     the node that commands talk to (default 127.0.0.1:52800)
  SHOAL_KEY     the key of a private cluster
  SHOAL_MODELS  the folder for models (default ~/.shoal/models)
  SHOAL_LOG     what is logged to standard error, e.g. info or shoal=debug (default: errors)

Exit codes:
  0  done
  1  failed
  2  the command line is not valid
  3  there is no such model, or it is not on disk
  4  no node answers at --api
  5  the model cannot be placed: too little memory, or too few nodes
  6  a port or a data folder is in use by another program
  7  a model could not be fetched
  130  interrupted";

/// Your machines, one model: a peer-to-peer runtime for large language models.
#[derive(Debug, Parser)]
#[command(name = "shoal", version, about, after_help = AFTER_HELP, arg_required_else_help = true, max_term_width = 110)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a node
    Up(up::Up),
    /// Show the cluster: nodes, links, placed models, leases
    Status(status::Status),
    /// Show the memory of the cluster: who lends what to whom, and for what
    Pool(pool::Pool),
    /// Fetch a model
    Pull(pull::Pull),
    /// List models on disk
    #[command(visible_alias = "ls")]
    List(list::List),
    /// Remove a model from disk
    Rm(rm::Rm),
    /// Ask a model
    Run(run::Run),
    /// Show how a model could be placed, and how fast that would be
    Plan(plan::PlanCommand),
    /// Place a model on the cluster
    Load(load::Load),
    /// Take a placed model down
    Unload(unload::Unload),
    /// Keys of private clusters
    Key(key::Key),
    /// Stop the node on this machine
    Leave(leave::Leave),
    /// Measure how fast a model runs on this machine, how it serves several clients at once, or how fast tensor links are
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Start three nodes on this machine, split a model between them and ask it a question
    Demo(crate::demo::Demo),
}

/// Which node a command talks to.
#[derive(Debug, Clone, Args)]
pub(crate) struct ApiOption {
    /// Address of the node to talk to
    #[arg(long, value_name = "ADDR", env = "SHOAL_API", default_value = API_DEFAULT)]
    api: String,
}

impl ApiOption {
    fn client(&self) -> Client {
        Client::new(&self.api)
    }
}

/// Where models lie.
#[derive(Debug, Clone, Args)]
pub(crate) struct ModelsOption {
    /// Folder for models, shared by all nodes of a user
    #[arg(long, value_name = "DIR", env = "SHOAL_MODELS")]
    pub(crate) models_dir: Option<std::path::PathBuf>,
}

/// Runs a command.
pub(crate) async fn run(cli: Cli) -> Result<(), Failure> {
    match cli.command {
        Command::Up(command) => command.run().await,
        Command::Status(command) => command.run().await,
        Command::Pool(command) => command.run().await,
        Command::Pull(command) => command.run().await,
        Command::List(command) => command.run().await,
        Command::Rm(command) => command.run().await,
        Command::Run(command) => command.run().await,
        Command::Plan(command) => command.run().await,
        Command::Load(command) => command.run().await,
        Command::Unload(command) => command.run().await,
        Command::Key(command) => command.run(),
        Command::Leave(command) => command.run().await,
        Command::Bench(command) => command.run().await,
        Command::Demo(command) => command.run().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
