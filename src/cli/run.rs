//! `shoal run`

use std::io::{IsTerminal, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::Value;
use shoal::api::Api;
use shoal::api::state::State;
use shoal::{Cancel, CatalogError, Node};
use shoal_actors::catalog::Reference;

use super::pull::catalog_settings;
use super::{
    ApiOption, Asked, Client, ClientError, Event, Exit, Failure, ModelsOption, Signals, Summary, fetch, note, open_catalog, say, words_of,
};

#[derive(Debug, Args)]
#[command(after_help = "The node at --api answers, if there is one; else a node of its own, which ends with the command.\n\
    A model that nobody has is fetched first, into the models folder of the node that answers.\n\n\
    Examples:\n  shoal run smollm2:135m 'Why is the sky blue?'\n  \
    shoal run ./model.gguf --temperature 0 < question.txt\n  \
    shoal run gemma3:270m --raw 'Once upon a time'")]
pub(crate) struct Run {
    /// The model
    model: String,
    /// The question; from standard input if it is left out
    prompt: Vec<String>,
    /// Instructions that come before the question
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Continue the prompt as it stands, without the model's chat template
    #[arg(long, conflicts_with = "system")]
    raw: bool,
    /// How much chance there is: 0 takes the likeliest token always
    #[arg(long, value_name = "0–2", default_value_t = 0.7, value_parser = parse_temperature)]
    temperature: f32,
    /// What chance is drawn from: the same seed gives the same answer
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
    /// Most tokens of the answer
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// Print one JSON object at the end: text, tokens, token_ids, prompt_tokens, prefill_tok_s, decode_tok_s, finish_reason
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    api: ApiOption,
    #[command(flatten)]
    models: ModelsOption,
}

/// A node works in another folder: a path is told as a whole one, whether there is anything or not.
pub(crate) fn absolute(model: &str) -> String {
    let path = Path::new(model);
    let whole = match path.canonicalize() {
        Ok(whole) if whole.is_file() => Some(whole),
        // `~` is for the node, whose user it is, to resolve.
        _ if model.starts_with('~') => None,
        _ => match Reference::parse(model, &[], None) {
            Ok(Reference::File(path)) => std::path::absolute(path).ok(),
            _ => None,
        },
    };
    whole.map_or_else(|| model.to_owned(), |path| path.display().to_string())
}

/// Reads a temperature.
pub(crate) fn parse_temperature(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(temperature) if (0.0..=2.0).contains(&temperature) => Ok(temperature),
        Ok(_) => Err("it must be from 0 to 2".to_owned()),
        Err(_) => Err(format!("`{text}` is no number")),
    }
}

impl Run {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        // Read before signals are caught: Ctrl-C ends a wait for input.
        let prompt = self.prompt()?;
        let mut signals = Signals::listen()?;
        let client = self.api.client();
        if client.get::<Value>("/health/live").await.is_ok() {
            return tokio::select! {
                biased;
                () = signals.next() => Err(Failure::interrupted()),
                result = self.ask_or_fetch(&client, &prompt) => result,
            };
        }
        let node = tokio::select! {
            biased;
            () = signals.next() => return Err(Failure::interrupted()),
            node = self.embedded() => node?,
        };
        let api = Api::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await.map_err(|error| Failure::new(error.to_string()))?;
        let client = Client::new(&api.address().to_string());
        let serving = api.serve(node.clone(), |asked| asked.unwrap_or_default());
        let result = tokio::select! {
            biased;
            () = signals.next() => Err(Failure::interrupted()),
            result = self.ask(&client, &prompt) => result.map_err(Failure::from),
        };
        serving.announce_leaving();
        node.leave_at_once().await;
        serving.stop().await;
        result
    }

    fn prompt(&self) -> Result<String, Failure> {
        let mut text = self.prompt.join(" ");
        if text.is_empty() && !std::io::stdin().is_terminal() {
            std::io::stdin().lock().read_to_string(&mut text)?;
        }
        match text.trim().is_empty() {
            true => {
                Err(Failure::new("there is no question").exit(Exit::Usage).help("write it after the model, or send it to standard input"))
            }
            false => Ok(text),
        }
    }

    /// A node that ends with the command, with the model on its disk.
    async fn embedded(&self) -> Result<Node, Failure> {
        let catalog = open_catalog(&self.models).await?;
        if let Err(error) = catalog.resolve(&self.model).await {
            match error {
                CatalogError::NotHere { .. } => drop(fetch(&catalog, &self.model, &Cancel::new()).await?),
                error => return Err(error.into()),
            }
        }
        catalog.stop().await;
        let local = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let node = Node::builder().in_memory().mdns(false).beacon(false).listen(vec![local]).tensor_listen(vec![local]);
        Ok(node.models(catalog_settings(&self.models)?).start().await?)
    }

    async fn ask_or_fetch(&self, client: &Client, prompt: &str) -> Result<(), Failure> {
        match self.ask(client, prompt).await {
            Err(error) if error.is_no_model() => {
                let catalog = open_catalog(&self.folder_of(client).await?).await?;
                // If it is no model at all, the catalogue says so better.
                let on_disk = fetch(&catalog, &self.model, &Cancel::new()).await?;
                catalog.stop().await;
                note!("{} is on disk now", on_disk.name);
                self.ask(client, prompt).await.map_err(Failure::from)
            }
            result => result.map_err(Failure::from),
        }
    }

    /// Where the node that answers looks for models: what is fetched has to come there.
    async fn folder_of(&self, client: &Client) -> Result<ModelsOption, Failure> {
        let state: State = client.get("/v1/shoal/state").await?;
        let Some(theirs) = state.models_folder.map(PathBuf::from) else {
            let message = format!("no node has the model {}, and the node at {} is on another machine", self.model, client.address());
            let help = format!("fetch it on a machine of the cluster with `shoal pull {}`", self.model);
            return Err(Failure::new(message).exit(Exit::NoModel).help(help));
        };
        let own = catalog_settings(&self.models)?.root;
        let same = |a: &Path, b: &Path| a == b || matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b);
        if self.models.models_dir.is_some() && !same(&own, &theirs) {
            let message = format!(
                "the node at {} keeps models in {}, and what is fetched into {} is not there for it",
                client.address(),
                theirs.display(),
                own.display()
            );
            let help = "leave out --models-dir (and SHOAL_MODELS) to fetch the model into the node's folder, or start a node with this one";
            return Err(Failure::new(message).exit(Exit::Usage).help(help));
        }
        Ok(ModelsOption { models_dir: Some(theirs) })
    }

    async fn ask(&self, client: &Client, prompt: &str) -> Result<(), ClientError> {
        let asked = Asked {
            model: absolute(&self.model),
            system: self.system.clone(),
            prompt: prompt.to_owned(),
            raw: self.raw,
            temperature: self.temperature,
            seed: self.seed,
            max_tokens: self.max_tokens,
        };
        let mut answer = asked.ask(client).await?;
        let mut whole = String::new();
        let mut summary = Summary::default();
        while let Some(event) = answer.next().await {
            match event? {
                Event::Text(text) if self.json => whole.push_str(&text),
                Event::Text(text) => {
                    let mut stdout = std::io::stdout().lock();
                    if stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).is_err() {
                        // Whoever reads has read enough.
                        return Ok(());
                    }
                }
                Event::End(end) => summary = end,
            }
        }
        if self.json {
            let mut value = serde_json::to_value(&summary).unwrap_or_default();
            value["model"] = Value::from(self.model.as_str());
            value["text"] = Value::from(whole);
            say!("{value}");
        } else {
            say!("");
            note!("{}", words_of(&summary));
        }
        Ok(())
    }
}
