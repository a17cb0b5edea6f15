//! `shoal bench link`

use std::io::BufReader;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use shoal_actors::linkbench::{BenchOptions, LinkBenchRow, Local, MESSAGE_BYTES_MAX, answer_invitations};
use tokio::sync::mpsc;

use super::plot;
use crate::cli::output::table;
use crate::cli::{ApiOption, Exchange, Failure, Signals, note, say};

/// Rows that wait to be shown.
const ROWS_WAITING: usize = 64;

#[derive(Debug, Args)]
#[command(
    after_help = "Each kind of link that both ends have is measured with messages of each size: the time there and back, and how much \
    goes through in one direction. With PEER the node at --api measures links to that node; with --local two processes of this machine, \
    which the command starts, are the ends, and no node is needed.\n\n\
    Examples:\n  shoal bench link --local\n  shoal bench link studio --svg links.svg\n  \
    shoal bench link --local --sizes 64,65536,1048576 --ms 50 --json"
)]
pub(crate) struct BenchLink {
    /// The other node: its name, or the beginning of its id
    #[arg(required_unless_present = "local", conflicts_with = "local")]
    peer: Option<String>,
    /// Measure between two processes of this machine
    #[arg(long)]
    local: bool,
    /// Sizes of messages, in bytes; 64 B to 16 MiB in powers of four if left out
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=i64::from(MESSAGE_BYTES_MAX)))]
    sizes: Vec<u32>,
    /// How long to measure, in milliseconds: for each size, first latency and then bandwidth
    #[arg(long, value_name = "MS", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=2000))]
    ms: u32,
    /// Draw the figures into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print JSON: rows, each with provider, bytes, rtt_us_p50, rtt_us_p99, gib_per_s
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    api: ApiOption,
}

type Rows = mpsc::Receiver<Result<LinkBenchRow, Failure>>;

impl BenchLink {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let mut signals = Signals::listen()?;
        let work = async {
            let (mut rows, other) = match &self.peer {
                Some(peer) => (self.through_node(peer).await?, None),
                None => self.local()?,
            };
            let mut all = Vec::new();
            while let Some(row) = rows.recv().await {
                let row = row?;
                note!("{}: {} there and back in {}, {:.2} GiB/s", row.provider, length(row.bytes), micros(row.rtt_us_p50), row.gib_per_s);
                all.push(row);
            }
            drop(other);
            Ok::<_, Failure>(all)
        };
        let rows = tokio::select! {
            biased;
            () = signals.next() => return Err(Failure::interrupted()),
            rows = work => rows?,
        };
        self.show(&rows)
    }

    fn options(&self) -> BenchOptions {
        let usual = BenchOptions::usual();
        let sizes = if self.sizes.is_empty() { usual.sizes } else { self.sizes.clone() };
        BenchOptions { sizes, time: Duration::from_millis(self.ms.into()) }
    }

    /// Has the node measure. Dropping the rows' receiver closes the connection, which ends that.
    async fn through_node(&self, peer: &str) -> Result<Rows, Failure> {
        let options = self.options();
        let body = json!({"peer": peer, "sizes": options.sizes, "milliseconds": self.ms});
        let mut events =
            self.api.client().events(Exchange { path: "/v1/shoal/bench/link".to_owned(), body: Some(body), headers: Vec::new() }).await?;
        let (rows, receive) = mpsc::channel(ROWS_WAITING);
        tokio::spawn(async move {
            while let Some(event) = events.recv().await {
                let row = match event {
                    Ok(told) => serde_json::from_value(told.data)
                        .map_err(|error| Failure::new(format!("the node's answer cannot be read: {error}"))),
                    Err(error) => Err(error.into()),
                };
                if rows.send(row).await.is_err() {
                    return;
                }
            }
        });
        Ok(receive)
    }

    /// Starts the other process and a thread that measures. The process ends when the second value is dropped.
    fn local(&self) -> Result<(Rows, Option<Other>), Failure> {
        let mut other = Other::start()?;
        let mut invitations = other.0.stdin.take().ok_or_else(|| Failure::new("the other process has no standard input"))?;
        let (runtime, options) = (tokio::runtime::Handle::current(), self.options());
        let (rows, receive) = mpsc::channel(ROWS_WAITING);
        let work = move || {
            let mut each = |row| rows.blocking_send(Ok(row)).is_ok();
            let measured = Local::new(runtime).and_then(|local| local.measure(&options, &mut invitations, &mut each));
            if let Err(error) = measured {
                let _ = rows.blocking_send(Err(Failure::new(error.to_string())));
            }
        };
        std::thread::Builder::new().name("shoal-linkbench".to_owned()).spawn(work)?;
        Ok((receive, Some(other)))
    }

    fn show(&self, rows: &[LinkBenchRow]) -> Result<(), Failure> {
        if let Some(path) = &self.svg {
            let title = self.peer.as_ref().map_or_else(|| "between two processes".to_owned(), |peer| format!("to {peer}"));
            let drawn = std::fs::write(path, plot::svg(&format!("Tensor links {title}"), rows));
            drawn.map_err(|error| Failure::new(format!("cannot write {}: {error}", path.display())))?;
        }
        if self.json {
            let value: Value = json!({"peer": self.peer, "local": self.local, "rows": rows});
            say!("{value}");
            return Ok(());
        }
        let mut lines = table(&["provider", "message", "there and back", "99 of 100 within", "GiB/s"], 1);
        for row in rows {
            lines.add_row([
                row.provider.clone(),
                length(row.bytes),
                micros(row.rtt_us_p50),
                micros(row.rtt_us_p99),
                format!("{:.3}", row.gib_per_s),
            ]);
        }
        say!("{lines}");
        Ok(())
    }
}

/// The other process. It ends with this value, or when this process does.
struct Other(Child);

impl Other {
    fn start() -> Result<Self, Failure> {
        let program = std::env::current_exe()?;
        let mut command = Command::new(program);
        command.args(["bench", "answer"]).stdin(Stdio::piped()).stdout(Stdio::null());
        Ok(Self(command.spawn()?))
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The other process's part.
pub(super) async fn answer() -> Result<(), Failure> {
    let runtime = tokio::runtime::Handle::current();
    let work = move || answer_invitations(runtime, &mut BufReader::new(std::io::stdin()));
    let answered = tokio::task::spawn_blocking(work).await.map_err(|error| Failure::new(error.to_string()))?;
    answered.map_err(|error| Failure::new(error.to_string()))
}

/// A length in the largest unit that divides it.
pub(super) fn length(bytes: u32) -> String {
    match bytes {
        bytes if bytes >= 1 << 20 && bytes % (1 << 20) == 0 => format!("{} MiB", bytes >> 20),
        bytes if bytes >= 1 << 10 && bytes % (1 << 10) == 0 => format!("{} KiB", bytes >> 10),
        bytes => format!("{bytes} B"),
    }
}

fn micros(us: f64) -> String {
    if us < 10_000.0 { format!("{us:.1} µs") } else { format!("{:.1} ms", us / 1000.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_short() {
        assert_eq!([64, 1024, 1500, 1 << 24].map(length), ["64 B", "1 KiB", "1500 B", "16 MiB"]);
        assert_eq!((micros(1.25), micros(12_345.0)), ("1.2 µs".to_owned(), "12.3 ms".to_owned()));
    }
}
