//! Wherever a model's layers are, it says the same: one node, two and three give identical tokens.

mod common;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use shoal::{CatalogSettings, ClusterKey, GenerateOptions, Goal, InstanceState, Node, Piece, Prompt, SamplingParams};

const TOKENS: u32 = 64;

const PROMPTS: [&str; 20] = [
    "The capital of France is",
    "fn main() {",
    "Once upon a time",
    "1, 1, 2, 3, 5, 8,",
    "Ein kleiner Fisch",
    "To be, or not to be",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "SELECT name FROM",
    "Water boils at",
    "a",
    "   leading spaces",
    "In 1969, people first",
    "def add(a, b):",
    "日本の首都は",
    "Dear Sir or Madam,",
    "The opposite of hot is",
    "x = [i for i in",
    "¿Dónde está la",
    "Roses are red,",
    "Question: what is a shoal? Answer:",
];

async fn start(models: &Path, name: &str, key: &ClusterKey, peers: Vec<SocketAddr>) -> Node {
    let mut settings = CatalogSettings::from_variables(&|_| None, Some(models)).expect("has a place for models");
    settings.root = models.to_owned();
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let builder = Node::builder().in_memory().name(name).models(settings).listen(vec![any]).tensor_listen(vec![any]).peers(peers);
    let builder = builder.cluster_key(key.clone()).mdns(false).beacon(false).threads(1).memory(256 << 20);
    builder.replan_after(std::time::Duration::from_millis(500)).start().await.expect("starts")
}

/// Waits until every node sees `count` that have the model on disk.
async fn joined(nodes: &[Node], count: usize) {
    let ready = |node: &Node| node.view().alive().filter(|(_, member)| !member.card.models.is_empty()).count() == count;
    let wait = async {
        while !nodes.iter().all(ready) {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(common::PATIENCE, wait).await.expect("the nodes find each other");
}

async fn answer(node: &Node, model: &str, prompt: &str, sampling: &SamplingParams, nodes: u32) -> Vec<u32> {
    let goal = Goal { context_tokens: 256, sequences: 4, nodes_min: nodes, nodes_max: nodes, ..Goal::default() };
    let options = GenerateOptions {
        sampling: sampling.clone(),
        max_tokens: Some(TOKENS),
        ignore_end: true,
        goal,
        ..GenerateOptions::new(Prompt::Text(prompt.to_owned()))
    };
    let mut answer = node.generate(model, options).await.expect("is accepted");
    let mut tokens = Vec::new();
    while let Some(piece) = answer.next().await {
        if let Piece::Token(token) = piece.expect("does not break") {
            tokens.push(token.token);
        }
    }
    tokens
}

/// The answers of `count` nodes to every prompt, several at once, greedy and sampled.
async fn answers(models: &Path, model: &str, count: u32) -> Vec<Vec<u32>> {
    let key = ClusterKey::from_text(&format!("arrangements of {count} nodes {}", std::process::id())).expect("long enough");
    let mut nodes: Vec<Node> = Vec::new();
    for number in 0..count {
        let peers = nodes.first().map(|first| first.network().listening()).unwrap_or_default();
        nodes.push(start(models, &format!("n{number}"), &key, peers).await);
    }
    joined(&nodes, count as usize).await;
    let sampled =
        |seed| SamplingParams { temperature: 0.9, top_p: 0.95, top_k: 40, repetition_penalty: 1.1, seed, ..SamplingParams::default() };
    let mut all = Vec::new();
    for (number, prompt) in PROMPTS.iter().enumerate() {
        // Asked at different nodes, two at a time, so that steps mix sequences.
        let node = &nodes[number % nodes.len()];
        let (greedy, seeded) = (SamplingParams::greedy(), sampled(number as u64));
        let (one, two) = tokio::join!(answer(node, model, prompt, &greedy, count), answer(node, model, prompt, &seeded, count));
        all.extend([one, two]);
    }
    // What a node conducts comes to its card a moment later.
    let mut instances = nodes[0].instances();
    for _ in 0..500 {
        if !instances.is_empty() {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        instances = nodes[0].instances();
    }
    assert_eq!(instances.len(), 1, "one copy serves all: {instances:?}");
    let holders: std::collections::BTreeSet<_> = instances[0].stages.iter().map(|stage| stage.node).collect();
    assert_eq!(holders.len(), count as usize, "each node holds a stage: {:?}", instances[0].stages);
    for node in &nodes {
        node.leave().await;
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn one_two_and_three_nodes_say_the_same() {
    let root = tempfile::tempdir().expect("a folder");
    // Another model than the tiny one, if somebody wants to know: a models folder and a name in it.
    let (models, model) = match (std::env::var_os("SHOAL_TEST_MODELS"), std::env::var("SHOAL_TEST_MODEL")) {
        (Some(models), Ok(model)) => (models.into(), model),
        _ => (common::models_folder(root.path()), common::TINY.to_owned()),
    };
    let one = answers(&models, &model, 1).await;
    assert!(one.iter().all(|tokens| tokens.len() == TOKENS as usize), "every answer is as long as asked for");
    assert!(one.iter().collect::<std::collections::BTreeSet<_>>().len() > PROMPTS.len(), "answers differ from each other");
    for count in [2, 3] {
        let other = answers(&models, &model, count).await;
        for (number, (a, b)) in one.iter().zip(&other).enumerate() {
            assert_eq!(a, b, "answer {number} to {:?} differs on {count} nodes", PROMPTS[number / 2]);
        }
    }
}

/// Has a node say that it is on a machine of its own, which reads and multiplies so fast.
fn claim(node: &Node, host: u128, speed: f64) {
    node.membership().update_card(|card| {
        card.host = host;
        for device in &mut card.devices {
            (device.read_bytes_per_second, device.multiply_adds_per_second) = (speed, speed);
        }
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_go_on_when_their_model_moves_to_a_faster_node_that_joins() {
    let root = tempfile::tempdir().expect("a folder");
    let models = common::models_folder(root.path());
    let key = ClusterKey::from_text(&format!("a faster node {}", std::process::id())).expect("long enough");
    let slow = start(&models, "slow", &key, Vec::new()).await;
    claim(&slow, 1, 1e6);
    let sampled = SamplingParams { temperature: 0.9, top_p: 0.95, seed: 7, ..SamplingParams::default() };
    let ask = |sampling: SamplingParams| {
        let node = slow.clone();
        async move {
            let goal = Goal { context_tokens: 512, sequences: 4, ..Goal::default() };
            let options = GenerateOptions {
                sampling,
                max_tokens: Some(300),
                ignore_end: true,
                goal,
                ..GenerateOptions::new(Prompt::Text("Once upon a time".to_owned()))
            };
            let mut answer = node.generate(common::TINY, options).await.expect("is accepted");
            let mut tokens = Vec::new();
            while let Some(piece) = answer.next().await {
                if let Piece::Token(token) = piece.expect("does not break") {
                    tokens.push(token.token);
                }
            }
            tokens
        }
    };
    let before = [ask(SamplingParams::greedy()).await, ask(sampled.clone()).await];
    assert_eq!(before[0].len(), 300);
    let instance = slow.instances()[0].clone();
    assert_eq!(instance.stages.iter().map(|stage| stage.node).collect::<Vec<_>>(), [slow.id()]);

    let fast = start(&models, "fast", &key, slow.network().listening()).await;
    claim(&fast, 2, 1e9);
    let is_moved = || {
        let instances = slow.instances();
        instances.len() == 1
            && instances[0].state == InstanceState::Ready
            && instances[0].stages.iter().all(|stage| stage.node == fast.id())
    };
    let until = std::time::Instant::now() + common::PATIENCE;
    let mut after_it = false;
    // Those that run when it moves go on; so does one after it.
    while !after_it {
        assert!(std::time::Instant::now() < until, "it does not move: {:?}", slow.instances());
        after_it = is_moved();
        let (one, two) = tokio::join!(ask(SamplingParams::greedy()), ask(sampled.clone()));
        assert!(before[0] == one && before[1] == two, "an answer has changed");
    }
    assert_eq!(slow.instances()[0].instance, instance.instance, "it is the same instance");
    while slow.leases().totals.used > 0 {
        assert!(std::time::Instant::now() < until, "something of it is left where it was: {:?}", slow.leases());
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    fast.leave().await;
    slow.leave().await;
}
