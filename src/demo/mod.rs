//! `shoal demo`: the whole of it on one machine. Several node *processes*, each with a data folder, an identity and
//! ports of its own, find each other, share a model's layers and answer a question.

mod chaos;
mod crew;
mod show;

use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use shoal::api::state::{Instance, Plans};
use shoal::{Cancel, LocalModel};

use crate::cli::{Asked, Exit, Failure, ModelsOption, Signals, absolute, fetch, open_catalog, parse_temperature};
use chaos::{ChaosPlan, Tally};
pub(crate) use crew::{Crew, CrewPlan};
use show::Show;

/// How long nodes may take to find each other. They need about a second where multicast works.
const MEET_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug, Args)]
#[command(after_help = "The nodes share a fresh key, so they keep to themselves whatever else runs on the network.\n\n\
    With --chaos, nodes are killed without warning and started again, over and over, while clients stream answers; each goes on at\n\
    another node when its own dies. Any answer that fails or differs from that of an undisturbed cluster makes the exit code 1.\n\n\
    Examples:\n  shoal demo\n  shoal demo --chaos --kills 50 --nodes 5 --json\n  shoal demo --nodes 2 --prompt 'Write a haiku about herring'\n  shoal demo --keep    serve until Ctrl-C")]
pub(crate) struct Demo {
    /// How many nodes
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=16))]
    nodes: u32,
    /// The question
    #[arg(long, value_name = "TEXT", default_value = "Why is the sky blue? Answer in two sentences.")]
    prompt: String,
    /// Most tokens of the answer
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// How much chance there is: 0 takes the likeliest token always
    #[arg(long, value_name = "0–2", default_value_t = 0.0, value_parser = parse_temperature)]
    temperature: f32,
    /// What chance is drawn from
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
    /// The model [default: the catalogue's first]
    #[arg(long)]
    model: Option<String>,
    /// Stay up and serve after the answer, until Ctrl-C
    #[arg(long)]
    keep: bool,
    /// Print one JSON object at the end: text, tokens, prefill_tok_s, decode_tok_s, plan.stages[] with node, layers, lease_bytes,
    /// discovery_seconds from the start of the last process until all see each other, the program's own start included
    #[arg(long)]
    json: bool,
    /// Kill nodes at random while clients stream answers, and compare every answer
    #[arg(long, conflicts_with_all = ["keep", "temperature"])]
    chaos: bool,
    /// How many nodes are killed, one after the other
    #[arg(long, value_name = "K", default_value_t = 15, requires = "chaos", value_parser = clap::value_parser!(u32).range(1..))]
    kills: u32,
    /// How many clients stream at the same time
    #[arg(long, value_name = "N", default_value_t = 4, requires = "chaos", value_parser = clap::value_parser!(u32).range(1..=64))]
    streams: u32,
    #[command(flatten)]
    models: ModelsOption,
}

/// What a demonstration came to, to be told when its nodes have stopped.
enum Came {
    Answered,
    Chaos(Box<Tally>),
}

impl Demo {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let mut signals = Signals::listen()?;
        let show = Show::new(self.json);
        let cancel = Cancel::new();
        let mut crew = None;
        let result = signals.unless_told(&cancel, self.play(&show, &cancel, &mut crew)).await;
        let result = match (result, &crew) {
            (Ok(came), Some(crew)) if self.keep => {
                show.endpoints(crew, self.model_name());
                crew.watch(&mut signals).await.map(|()| came)
            }
            (result, _) => result,
        };
        if let Some(mut crew) = crew {
            let result = result.map_err(|failure| match crew.casualty() {
                Some(casualty) if !failure.is_interruption() => Failure::new(format!("{casualty}: {failure}")),
                _ => failure,
            });
            show.step("stopping the nodes");
            let clean = crew.dismiss(&mut signals).await;
            if let Ok(Came::Chaos(tally)) = &result {
                show.tally(tally, self.nodes, self.seed, clean.as_ref().err());
            }
            clean?;
            show.step("all nodes have stopped; nothing is left behind");
            return result.and_then(told);
        }
        result.and_then(told)
    }

    fn model_name(&self) -> &str {
        self.model.as_deref().unwrap_or(DEFAULT_MODEL)
    }

    /// Everything up to the answer. What has been started is in `crew`, also if it fails or is called off.
    async fn play(&self, show: &Show, cancel: &Cancel, crew: &mut Option<Crew>) -> Result<Came, Failure> {
        let model = self.model(show, cancel).await?;
        // A file outside the models folder stands in no node's card, so only the node that is asked knows of it.
        let outside = std::path::Path::new(&model.name).is_absolute();
        if outside && self.nodes > 1 {
            let message = format!("{} lies outside the models folder, so the nodes cannot share it", model.path.display());
            return Err(Failure::new(message).exit(Exit::Usage).help("take a model of the catalogue or a hub repository, or --nodes 1"));
        }
        if self.chaos {
            return self.disturb(&model, show, crew).await;
        }
        show.step(&format!("starting {} node processes", self.nodes));
        let plan = CrewPlan { nodes: self.nodes, models: self.models.models_dir.clone(), memory: None, threads: 1 };
        let crew = crew.insert(Crew::new(plan)?);
        crew.start().await?;
        show.nodes(crew);
        let took = crew.meet(MEET_TIMEOUT, (!outside).then_some(model.sha256.as_str())).await?;
        show.step(&format!(
            "they found each other {:.1} s after the last one was started, without being given an address",
            took.as_secs_f64()
        ));

        let client = crew.client(0)?;
        let name = model.name.clone();
        let goal = json!({"model": name, "nodes_min": self.nodes, "nodes_max": self.nodes});
        let plans: Plans = client.post("/v1/shoal/plan", goal.clone()).await?;
        let best = plans.plans.into_iter().next().ok_or_else(|| Failure::new("there is no plan"))?;
        show.plan(&model, &best);
        let instance: Instance = client.post("/v1/shoal/load", goal).await?;
        show.loaded(&instance, &best);

        let asked = Asked {
            model: name,
            system: None,
            prompt: self.prompt.clone(),
            raw: false,
            temperature: self.temperature,
            seed: Some(self.seed),
            max_tokens: Some(self.max_tokens),
        };
        show.question(&self.prompt);
        let told = show.answer(&asked, &client).await?;
        if self.json {
            let mut object = told;
            object["plan"] = json!({
                "model": instance.model,
                "instance": instance.id,
                "prefill_tok_s": instance.prefill_tok_s,
                "decode_tok_s": instance.decode_tok_s,
                "stages": instance.stages,
            });
            object["discovery_seconds"] = Value::from(took.as_secs_f64());
            show.json(&object);
        }
        Ok(Came::Answered)
    }

    async fn disturb(&self, model: &LocalModel, show: &Show, crew: &mut Option<Crew>) -> Result<Came, Failure> {
        if self.nodes < CHAOS_NODES_MIN {
            let message = format!("--chaos needs at least {CHAOS_NODES_MIN} nodes: two that hold the model when one is dead");
            return Err(Failure::new(message).exit(Exit::Usage));
        }
        let plan = ChaosPlan {
            nodes: self.nodes,
            kills: self.kills,
            streams: self.streams,
            seed: self.seed,
            max_tokens: self.max_tokens,
            prompt: self.prompt.clone(),
            models: self.models.models_dir.clone(),
        };
        Ok(Came::Chaos(Box::new(chaos::play(&plan, model, show, crew).await?)))
    }

    async fn model(&self, show: &Show, cancel: &Cancel) -> Result<LocalModel, Failure> {
        let catalog = open_catalog(&self.models).await?;
        let name = match &self.model {
            Some(name) => absolute(name),
            None => catalog.known().first().map_or(DEFAULT_MODEL, |known| known.name()).to_owned(),
        };
        if catalog.resolve(&name).await.is_err() {
            show.step(&format!("fetching {name} into {}", catalog.root().display()));
        }
        let model = fetch(&catalog, &name, cancel).await;
        catalog.stop().await;
        model
    }
}

/// Fewest nodes of a cluster in which any may die.
const CHAOS_NODES_MIN: u32 = 3;

/// Whether what it came to is well.
fn told(came: Came) -> Result<(), Failure> {
    match came {
        Came::Chaos(tally) if !tally.is_well() => Err(Failure::new("not every answer survived; see above")),
        Came::Answered | Came::Chaos(_) => Ok(()),
    }
}

/// The catalogue's first model, for examples that are shown.
const DEFAULT_MODEL: &str = "smollm2:135m";
