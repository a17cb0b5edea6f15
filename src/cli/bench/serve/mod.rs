//! `shoal bench serve`: how a placed model serves several clients at once, through the interface that they use.

mod drive;
mod figures;

use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use shoal::Cancel;
use shoal::api::state::Instance;

use crate::cli::output::{rate, table};
use crate::cli::{Client, Exit, Failure, ModelsOption, Signals, absolute, fetch, note, open_catalog, say};
use crate::demo::{Crew, CrewPlan};
use drive::{Asking, Gaps, Load};
use figures::{Spread, milliseconds};

/// How long nodes may take to find each other.
const MEET_TIMEOUT: Duration = Duration::from_secs(30);
/// Streams that decode while the long prompt comes, at most.
const DECODING_MAX: u32 = 4;

#[derive(Debug, Args)]
#[command(
    after_help = "Prompts are random tokens, different in each request, so that nothing is found in the prefix cache, and answers have exactly\n\
    --max-tokens tokens. Streams are begun at the same moment. `of single` compares what so many streams get together with so many times\n\
    what one gets alone. The decode gap is the time between two tokens of a stream; it is measured with nothing else going on, and while a\n\
    long prompt is read beside it.\n\n\
    Without --api the command starts nodes of its own, which end with it.\n\n\
    Examples:\n  shoal bench serve --model smollm2:135m\n  shoal bench serve --model smollm2:135m --nodes 3 --streams 1,4,16 --json\n  \
    shoal bench serve --api studio:52800 --model llama3.2:3b --prompt-tokens 512 --max-tokens 128"
)]
pub(crate) struct BenchServe {
    /// The model
    #[arg(long)]
    model: String,
    /// Measure the node at this address, and not nodes of its own
    #[arg(long, value_name = "ADDR", conflicts_with_all = ["nodes", "models_dir"])]
    api: Option<String>,
    /// How many nodes of its own share the model
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    nodes: u32,
    /// How many streams at once, one measurement after the other
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,4,16", value_parser = clap::value_parser!(u32).range(1..=256))]
    streams: Vec<u32>,
    /// Tokens of each prompt
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    prompt_tokens: u32,
    /// Tokens of each answer
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..))]
    max_tokens: u32,
    /// Tokens of the long prompt that comes while others decode; as many as the context holds if that is less. 0 leaves it out
    #[arg(long, value_name = "N", default_value_t = 2000)]
    long_prompt: u32,
    /// How often to measure
    #[arg(long, value_name = "R", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeat: u32,
    /// Print JSON: loads[] with streams, tok_s, of_single, first_token_ms, stream_tok_s, and decode_gap with alone and beside
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    models: ModelsOption,
}

/// What was measured.
struct Measured {
    instance: Instance,
    loads: Vec<Load>,
    gaps: Option<Gaps>,
}

impl BenchServe {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let mut signals = Signals::listen()?;
        let cancel = Cancel::new();
        let mut crew = None;
        let result = signals.unless_told(&cancel, self.measure(&cancel, &mut crew)).await;
        if let Some(crew) = crew {
            let clean = crew.dismiss(&mut signals).await;
            let measured = result?;
            clean?;
            self.show(&measured);
            return Ok(());
        }
        self.show(&result?);
        Ok(())
    }

    /// Finds or starts the nodes, places the model and measures. What has been started is in `crew`, also if it fails or is called off.
    async fn measure(&self, cancel: &Cancel, crew: &mut Option<Crew>) -> Result<Measured, Failure> {
        let (client, model, goal) = match &self.api {
            Some(api) => (Client::new(api), absolute(&self.model), json!({"model": absolute(&self.model)})),
            None => {
                let catalog = open_catalog(&self.models).await?;
                let model = fetch(&catalog, &absolute(&self.model), cancel).await;
                catalog.stop().await;
                let model = model?;
                note!("starting {} node {}", self.nodes, if self.nodes == 1 { "process" } else { "processes" });
                let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
                let threads = u16::try_from((cores / self.nodes as usize).max(1)).unwrap_or(u16::MAX);
                let plan = CrewPlan { nodes: self.nodes, models: self.models.models_dir.clone(), memory: None, threads };
                let crew = crew.insert(Crew::new(plan)?);
                crew.start().await?;
                crew.meet(MEET_TIMEOUT, (self.nodes > 1).then_some(model.sha256.as_str())).await?;
                let goal = json!({"model": model.name, "nodes_min": self.nodes, "nodes_max": self.nodes});
                (crew.client(0)?, model.name, goal)
            }
        };
        let instance: Instance = client.post("/v1/shoal/load", goal).await?;
        let needed = self.prompt_tokens.saturating_add(self.max_tokens);
        if needed > instance.context_tokens {
            let message = format!("prompts and answers of {needed} tokens are longer than the context of {}", instance.context_tokens);
            return Err(Failure::new(message).exit(Exit::Usage));
        }
        let asking = Asking::new(client, model);
        note!("warming up");
        asking.load(1, self.prompt_tokens, self.max_tokens, 1).await?;
        let mut loads = Vec::new();
        for streams in &self.streams {
            let load = asking.load(*streams, self.prompt_tokens, self.max_tokens, self.repeat).await?;
            note!("{streams} at once: {}", rate(load.tok_s()));
            loads.push(load);
        }
        let gaps = match self.long_prompt.min(instance.context_tokens.saturating_sub(2)) {
            0 => None,
            long => {
                note!("a prompt of {long} tokens beside streams that decode");
                let streams = self.streams.iter().copied().max().unwrap_or(1).min(DECODING_MAX);
                Some(asking.gaps(streams, long, instance.context_tokens, self.repeat).await?)
            }
        };
        Ok(Measured { instance, loads, gaps })
    }

    /// What one stream gets alone, if that was measured.
    fn single(&self, measured: &Measured) -> Option<f64> {
        measured.loads.iter().find(|load| load.streams == 1).map(Load::tok_s)
    }

    fn of_single(&self, measured: &Measured, load: &Load) -> Option<f64> {
        self.single(measured).filter(|single| *single > 0.0).map(|single| load.tok_s() / single)
    }

    fn show(&self, measured: &Measured) {
        if self.json {
            say!("{}", self.json(measured));
            return;
        }
        let nodes = measured.instance.stages.len();
        let stages = if nodes == 1 { "one stage".to_owned() } else { format!("{nodes} stages") };
        say!("{} in {stages}: prompts of {} tokens, answers of {}", measured.instance.model, self.prompt_tokens, self.max_tokens);
        let mut lines =
            table(&["streams", "together", "of single", "first token, half within", "95 of 100 within", "each stream, decoding"], 0);
        for load in &measured.loads {
            let first = load.first_tokens();
            lines.add_row([
                load.streams.to_string(),
                rate(load.tok_s()),
                self.of_single(measured, load).map_or_else(|| "–".to_owned(), |times| format!("{times:.2} ×")),
                milliseconds(first.p50),
                milliseconds(first.p95),
                rate(load.stream_tok_s()),
            ]);
        }
        say!("{lines}");
        if let Some(gaps) = &measured.gaps {
            say!("between two tokens of {} streams, while a prompt of {} tokens is read beside them", gaps.streams, gaps.prompt_tokens);
            let mut lines = table(&["", "half within", "99 of 100 within", "longest"], 1);
            for (name, spread) in [("with nothing beside them", gaps.alone), ("with the prompt", gaps.beside)] {
                lines.add_row([name.to_owned(), milliseconds(spread.p50), milliseconds(spread.p99), milliseconds(spread.max)]);
            }
            say!("{lines}");
            say!("the prompt's first token came after {}", milliseconds(gaps.first_token.p50));
        }
    }

    fn json(&self, measured: &Measured) -> Value {
        let spread = |spread: Spread| {
            let ms = |seconds: f64| seconds * 1000.0;
            json!({"count": spread.count, "p50": ms(spread.p50), "p95": ms(spread.p95), "p99": ms(spread.p99), "max": ms(spread.max)})
        };
        let loads: Vec<Value> = (measured.loads.iter())
            .map(|load| {
                json!({
                    "streams": load.streams,
                    "tok_s": load.tok_s(),
                    "of_single": self.of_single(measured, load),
                    "first_token_ms": spread(load.first_tokens()),
                    "stream_tok_s": load.stream_tok_s(),
                })
            })
            .collect();
        let gaps = measured.gaps.as_ref().map(|gaps| {
            json!({
                "streams": gaps.streams,
                "prompt_tokens": gaps.prompt_tokens,
                "alone_ms": spread(gaps.alone),
                "beside_ms": spread(gaps.beside),
                "first_token_ms": spread(gaps.first_token),
            })
        });
        json!({
            "model": measured.instance.model,
            "stages": measured.instance.stages.len(),
            "prompt_tokens": self.prompt_tokens,
            "max_tokens": self.max_tokens,
            "repeat": self.repeat,
            "loads": loads,
            "decode_gap": gaps,
        })
    }
}
