//! `shoal key`

use clap::{Args, Subcommand};
use shoal::ClusterKey;
use shoal::env::SystemRng;

use super::{Failure, say};

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  export SHOAL_KEY=$(shoal key new)   # the same text on every machine\n  shoal up")]
pub(crate) struct Key {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Make a key for a private cluster
    New,
}

impl Key {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self.what {
            What::New => say!("{}", ClusterKey::generate(&SystemRng)),
        }
        Ok(())
    }
}
