//! `shoal bench model`

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use serde_json::json;
use shoal_actors::bench::{BenchError, BenchOptions, BenchReport, measure, median};

use crate::cli::output::{rate, table};
use crate::cli::{Exit, Failure, ModelsOption, Signals, open_catalog, say, size_text};

#[derive(Debug, Args)]
#[command(after_help = "The figures mean what those of llama.cpp's llama-bench mean: a prompt in an empty context, and tokens decoded \
    one by one from an empty context.\n\n\
    Examples:\n  shoal bench model smollm2:135m\n  shoal bench model ./model.gguf -p 512 -n 128 --threads 2 --repeat 5 --json")]
pub(crate) struct BenchModel {
    /// The model: one that is on disk, or a path of a GGUF file
    model: String,
    /// Tokens of the prompt; 0 leaves prefill out
    #[arg(short, long, value_name = "N", default_value_t = 512)]
    prompt: usize,
    /// Tokens to decode; 0 leaves decoding out
    #[arg(short = 'n', long = "decode", value_name = "N", default_value_t = 128)]
    decoded: usize,
    /// Compute threads; one for each core if left out
    #[arg(short, long, value_name = "T", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// How often to measure; medians are shown
    #[arg(short, long, value_name = "R", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    repeat: u16,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    models: ModelsOption,
}

impl BenchModel {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let mut signals = Signals::listen()?;
        let path = self.path().await?;
        let threads = self.threads.map_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get), usize::from);
        let options = BenchOptions { prompt: self.prompt, decoded: self.decoded, threads, repeat: self.repeat.into() };
        let measured = {
            let (path, options) = (path.clone(), options.clone());
            tokio::task::spawn_blocking(move || {
                let begin = Instant::now();
                measure(&path, &options, &|| begin.elapsed())
            })
        };
        let report = tokio::select! {
            biased;
            () = signals.next() => return Err(Failure::interrupted()),
            result = measured => result.map_err(|error| Failure::new(error.to_string()))?.map_err(failure)?,
        };
        self.show(&path, &options, &report);
        Ok(())
    }

    /// Where the model lies.
    async fn path(&self) -> Result<PathBuf, Failure> {
        if Path::new(&self.model).is_file() {
            return Ok(PathBuf::from(&self.model));
        }
        let catalog = open_catalog(&self.models).await?;
        let model = catalog.resolve(&self.model).await;
        catalog.stop().await;
        Ok(model?.path)
    }

    fn show(&self, path: &Path, options: &BenchOptions, report: &BenchReport) {
        let (prefill, decode) = (median(&report.prefill), median(&report.decode));
        let peak = peak_memory();
        if self.json {
            let value = json!({
                "model": self.model,
                "path": path,
                "architecture": report.architecture,
                "weight_bytes": report.weight_bytes,
                "threads": options.threads,
                "prompt_tokens": options.prompt,
                "decoded_tokens": options.decoded,
                "prefill_tok_s": prefill,
                "decode_tok_s": decode,
                "prefill_tok_s_each": report.prefill,
                "decode_tok_s_each": report.decode,
                "load_s": report.load.as_secs_f64(),
                "first_token_s": report.first_token.as_secs_f64(),
                "peak_memory_bytes": peak,
            });
            say!("{value}");
            return;
        }
        let threads = if options.threads == 1 { "1 thread".to_owned() } else { format!("{} threads", options.threads) };
        say!("{}: {}, {} of weights, {threads}", self.model, report.architecture, size_text(report.weight_bytes));
        let mut rows = table(&["test", "median", "lowest", "highest"], 1);
        for (name, figures, median) in [
            (format!("prefill, {} tokens", options.prompt), &report.prefill, prefill),
            (format!("decode, {} tokens", options.decoded), &report.decode, decode),
        ] {
            if let Some(median) = median {
                let lowest = figures.iter().copied().fold(f64::MAX, f64::min);
                let highest = figures.iter().copied().fold(0.0, f64::max);
                rows.add_row([name, rate(median), rate(lowest), rate(highest)]);
            }
        }
        say!("{rows}");
        say!("first token after {:.2} s, of which loading took {:.2} s", report.first_token.as_secs_f64(), report.load.as_secs_f64());
        if let Some(peak) = peak {
            say!("peak memory {}", size_text(peak));
        }
    }
}

fn failure(error: BenchError) -> Failure {
    let exit = match &error {
        BenchError::Nothing | BenchError::Context { .. } => Exit::Usage,
        _ => Exit::Failed,
    };
    Failure::new(error.to_string()).exit(exit)
}

/// The most memory that this process had at once, in bytes, where the system tells (Linux).
fn peak_memory() -> Option<u64> {
    high_water(&std::fs::read_to_string("/proc/self/status").ok()?)
}

/// `VmHWM` of a status file, which is in units of 1024 bytes whatever it says.
fn high_water(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_read_from_the_status_file() {
        assert_eq!(high_water("Name:\tshoal\nVmPeak:\t  5 kB\nVmHWM:\t  178328 kB\nVmRSS:\t 3 kB\n"), Some(178_328 * 1024));
        assert_eq!(high_water("Name:\tshoal\n"), None);
        assert_eq!(high_water("VmHWM:\n"), None);
    }
}
