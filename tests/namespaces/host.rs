//! A node on each host of the network.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::{NodeProcess, PATIENCE, Streamed, TINY, get, post, stream, up};
use crate::lan::{Lan, inside};

/// Pause between two looks at a node's state.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How to reach a node from a test: through its host's namespace.
#[derive(Debug, Clone)]
pub(crate) struct Door {
    pub(crate) name: String,
    pub(crate) id: String,
    namespace: String,
    api: String,
}

/// A host with a node.
pub(crate) struct Host {
    pub(crate) door: Door,
    pub(crate) node: NodeProcess,
}

impl Host {
    fn start(lan: &Lan, root: &Path, name: &str, key: Option<&str>) -> Self {
        Self::start_with(lan, up(root, name), name, |command| {
            command.envs(key.map(|key| ("SHOAL_KEY", key)));
        })
    }

    /// Starts a node on a host by this command, with what `more` adds to it.
    pub(crate) fn start_with(lan: &Lan, mut command: Command, name: &str, more: impl FnOnce(&mut Command)) -> Self {
        let namespace = lan.namespace(name);
        more(&mut command);
        let node = inside(&namespace, || NodeProcess::start(command));
        let door = Door { name: name.to_owned(), id: node.id().to_owned(), namespace, api: node.api().to_owned() };
        Self { door, node }
    }

    /// Starts a node on each host, all at once, without an address of any other.
    pub(crate) fn start_all(lan: &Lan, root: &Path, hosts: &[(&str, Option<&str>)]) -> Vec<Self> {
        std::thread::scope(|scope| {
            let start = |(name, key): &(&'_ str, Option<&'_ str>)| {
                let (name, key) = ((*name).to_owned(), key.map(str::to_owned));
                scope.spawn(move || Self::start(lan, root, &name, key.as_deref()))
            };
            let starting: Vec<_> = hosts.iter().map(start).collect();
            starting.into_iter().map(|host| host.join().expect("the node starts")).collect()
        })
    }
}

impl Door {
    pub(crate) fn state(&self) -> Value {
        let (status, state) = inside(&self.namespace, || get(&self.api, "/v1/shoal/state"));
        assert_eq!(status, 200, "{state}");
        state
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        inside(&self.namespace, || post(&self.api, path, body))
    }

    /// The nodes that it knows, by name, each with its state. One that is there but not connected says so.
    pub(crate) fn sees(&self) -> BTreeMap<String, String> {
        let state = self.state();
        let nodes = state["nodes"].as_array().expect("a list");
        let seen = |node: &Value| {
            let text = |field: &str| node[field].as_str().expect("a text").to_owned();
            let apart = text("state") == "alive" && node["connected"] != true;
            (text("name"), if apart { "apart".to_owned() } else { text("state") })
        };
        nodes.iter().map(seen).collect()
    }

    /// Whether the others, and nobody else, are there, connected, and have the model.
    pub(crate) fn is_with(&self, names: &[&str]) -> Result<(), String> {
        let state = self.state();
        let nodes = state["nodes"].as_array().expect("a list");
        let here = nodes.iter().filter(|node| {
            let model = node["models"].as_array().is_some_and(|models| models.iter().any(|model| model["name"] == TINY));
            node["state"] == "alive" && node["connected"] == true && model
        });
        let mut here: Vec<&str> = here.filter_map(|node| node["name"].as_str()).collect();
        here.sort_unstable();
        if here == names { Ok(()) } else { Err(format!("{} is with {here:?}, knows {:?}", self.name, self.sees())) }
    }

    /// Places the model on so many nodes. One that is placed already, or was a moment ago, is what the answer is about
    /// then, wherever that is; so it is taken down and asked for again until it is on that many.
    pub(crate) fn load(&self, nodes: u32) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let instance = self.load_once(nodes);
            if instance["stages"].as_array().map(Vec::len) == Some(nodes as usize) {
                return instance;
            }
            assert!(Instant::now() < deadline, "{}: {instance}", self.name);
            self.unload();
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn load_once(&self, nodes: u32) -> Value {
        let goal = json!({"model": TINY, "nodes_min": nodes, "nodes_max": nodes, "context_tokens": 512});
        let (status, instance) = self.post("/v1/shoal/load", &goal);
        assert_eq!((status, &instance["state"]), (200, &json!("ready")), "{}: {instance}", self.name);
        instance
    }

    /// Takes the model down wherever this node knows it to be. The answer is of no use: the node may not know yet that
    /// another one has taken it down.
    pub(crate) fn unload(&self) -> Value {
        self.post("/v1/shoal/unload", &json!({"model": TINY})).1
    }

    /// Instances of the model that are ready.
    pub(crate) fn instances(&self) -> Vec<String> {
        let state = self.state();
        let instances = state["instances"].as_array().expect("a list").iter().filter(|instance| instance["state"] == "ready");
        instances.map(|instance| instance["id"].as_str().expect("an id").to_owned()).collect()
    }

    /// Asks for an answer of so many tokens, always the same ones.
    pub(crate) fn ask(&self, tokens: u32, on_token: impl FnMut(usize) + Send) -> Streamed {
        let question = json!({
            "model": TINY, "messages": [{"role": "user", "content": "What is a shoal?"}],
            "max_tokens": tokens, "ignore_eos": true, "temperature": 0,
        });
        inside(&self.namespace, || stream(&self.api, &question, on_token))
    }

    /// The tokens of a whole answer.
    pub(crate) fn answer(&self, tokens: u32) -> Vec<u64> {
        let answer = self.ask(tokens, |_| {});
        assert!(answer.done && answer.error.is_none(), "{}: {answer:?}", self.name);
        assert_eq!((answer.token_ids.len(), answer.finish.as_deref()), (tokens as usize, Some("length")), "{}", self.name);
        answer.token_ids
    }
}

/// Waits until something holds for all; says when that was. The limit is far above what it should take.
pub(crate) fn wait(what: &str, limit: Duration, doors: &[&Door], holds: impl Fn(&Door) -> Result<(), String>) -> Instant {
    let deadline = Instant::now() + limit;
    loop {
        let Some(reason) = doors.iter().find_map(|door| holds(door).err()) else { return Instant::now() };
        assert!(Instant::now() < deadline, "{what}: not within {limit:?}: {reason}");
        std::thread::sleep(LOOK_EVERY);
    }
}
