//! Fetches a model as `shoal pull` does and shows how it comes: `cargo run --release --example pull -- smollm2:135m`.
//!
//! Variables are followed as everywhere: `SHOAL_MODELS`, `HF_TOKEN`, `PIP_INDEX_URL`, proxies and certificates.
//! `HF_HUB_OFFLINE=1` leaves the hub out.

#![allow(clippy::print_stdout, clippy::print_stderr)]
// A program of its own, not a part of a node.
#![allow(clippy::disallowed_methods)]

use std::io::Write;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use shoal_actors::catalog::{Cancel, Catalog, CatalogEffects, CatalogError, CatalogSettings, Phase, Progress, ProgressSink};
use shoal_actors::env::{SystemClock, SystemRng, SystemSpawner};

#[tokio::main]
async fn main() -> ExitCode {
    let model = std::env::args().nth(1).unwrap_or_else(|| "smollm2:135m".to_owned());
    match pull(&model).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\n{error}");
            ExitCode::FAILURE
        }
    }
}

async fn pull(model: &str) -> Result<(), CatalogError> {
    let settings = CatalogSettings::from_process()?;
    let http = Arc::new(settings.http(&|name| std::env::var(name).ok()));
    let spawner = Arc::new(SystemSpawner::new(tokio::runtime::Handle::current()));
    let effects = CatalogEffects { http, clock: Arc::new(SystemClock), rng: Arc::new(SystemRng), spawner };
    let catalog = Catalog::start(settings, effects).await?;
    println!("models live in {}", catalog.root().display());
    let cancel = Cancel::new();
    let stop = cancel.clone();
    tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            stop.cancel();
        }
    });
    let started = Instant::now();
    let pulled = catalog.pull(model, printer(), &cancel).await?;
    println!("\n{} in {:.1} s", pulled.path.display(), started.elapsed().as_secs_f64());
    println!("{} bytes, sha256 {}, from {}", pulled.bytes, pulled.sha256, pulled.source);
    println!("licence: {}", pulled.licence.as_deref().unwrap_or("unknown"));
    catalog.stop().await;
    Ok(())
}

/// Prints a line for each phase and brings it up to date ten times a second.
fn printer() -> ProgressSink {
    let last: Mutex<Option<(Phase, Instant)>> = Mutex::new(None);
    Arc::new(move |progress: &Progress| {
        let Ok(mut last) = last.lock() else { return };
        let complete = progress.total == Some(progress.done);
        match *last {
            Some((phase, at)) if phase == progress.phase && at.elapsed() < Duration::from_millis(100) && !complete => return,
            Some((phase, _)) if phase != progress.phase => println!(),
            _ => {}
        }
        *last = Some((progress.phase, Instant::now()));
        let megabytes = |bytes: u64| bytes as f64 / 1e6;
        let total = progress.total.map_or_else(String::new, |total| format!(" of {:.1}", megabytes(total)));
        print!("\r{} ({}): {:.1}{total} MB   ", progress.phase, progress.source, megabytes(progress.done));
        let _ = std::io::stdout().flush();
    })
}
