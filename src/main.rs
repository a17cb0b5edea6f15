//! The `shoal` program.

mod cli;
mod demo;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

/// How long threads that still wait for something get when everything else is done.
const LAST_WAIT: Duration = Duration::from_millis(200);

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    cli::log::start();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let failure = cli::Failure::new(format!("the operating system does not give what a program needs: {error}"));
            return failure.report();
        }
    };
    let result = runtime.block_on(cli::run(cli));
    // A thread may wait for a server that does not answer; nobody waits for it.
    runtime.shutdown_timeout(LAST_WAIT);
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
