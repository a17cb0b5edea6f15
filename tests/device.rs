//! What a node computes on: a device that is not there is refused by name, `auto` falls back on the host's processor, and a graphics
//! processor says what the host's says.

mod common;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use shoal::card::DeviceKind;
use shoal::survey::DeviceChoice;
use shoal::{CatalogSettings, ClusterKey, Device, GPU_BACKEND, GenerateOptions, Goal, Node, Piece, Prompt, SamplingParams, StartError};

const PROMPTS: [&str; 4] = ["The capital of France is", "Once upon a time", "1, 1, 2, 3, 5, 8,", "Water boils at"];

async fn start(models: &Path, device: DeviceChoice) -> Result<Node, StartError> {
    let mut settings = CatalogSettings::from_variables(&|_| None, Some(models)).expect("has a place for models");
    settings.root = models.to_owned();
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let key = ClusterKey::from_text(&format!("devices {device} {}", std::process::id())).expect("long enough");
    let builder = Node::builder().in_memory().models(settings).listen(vec![any]).tensor_listen(vec![any]).cluster_key(key);
    builder.mdns(false).beacon(false).threads(1).memory(512 << 20).device(device).start().await
}

async fn answers(node: &Node, model: &str) -> Vec<Vec<u32>> {
    let mut all = Vec::new();
    for prompt in PROMPTS {
        let options = GenerateOptions {
            sampling: SamplingParams::greedy(),
            max_tokens: Some(24),
            ignore_end: true,
            goal: Goal { context_tokens: 128, sequences: 2, ..Goal::default() },
            ..GenerateOptions::new(Prompt::Text(prompt.to_owned()))
        };
        let mut answer = node.generate(model, options).await.expect("is accepted");
        let mut tokens = Vec::new();
        while let Some(piece) = answer.next().await {
            if let Piece::Token(token) = piece.expect("does not break") {
                tokens.push(token.token);
            }
        }
        assert_eq!(tokens.len(), 24);
        all.push(tokens);
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn a_graphics_processor_says_what_the_host_says() {
    let root = tempfile::tempdir().expect("a folder");
    let (models, model) = match (std::env::var_os("SHOAL_TEST_MODELS"), std::env::var("SHOAL_TEST_MODEL")) {
        (Some(models), Ok(model)) => (models.into(), model),
        _ => (common::models_folder(root.path()), common::TINY.to_owned()),
    };
    let on_device = match start(&models, DeviceChoice::Only(Device::Gpu(0))).await {
        Ok(node) => node,
        Err(error) => {
            assert!(std::env::var_os("SHOAL_TEST_GPU").is_none(), "{error}");
            println!("not tested: {error}");
            return;
        }
    };
    let card = on_device.view().card(on_device.id()).cloned().expect("it knows itself");
    assert_eq!(card.devices[0].kind, DeviceKind::Gpu, "{:?}", card.devices);
    assert!(card.devices[0].read_bytes_per_second > 0.0 && card.devices[0].multiply_adds_per_second > 0.0);
    let found = answers(&on_device, &model).await;
    on_device.leave().await;
    let on_host = start(&models, DeviceChoice::default()).await.expect("starts");
    let expected = answers(&on_host, &model).await;
    on_host.leave().await;
    // The host rounds activations to 8 bits and the device does not, so where two tokens are as good as each other they part.
    let same = found.iter().zip(&expected).filter(|(a, b)| a == b).count();
    println!("{same} of {} answers are the same on {}", PROMPTS.len(), card.devices[0].name);
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found[0], expected[0]);
    }
}

#[test]
fn a_device_that_is_not_there_is_refused_with_what_to_do() {
    let root = tempfile::tempdir().expect("a folder");
    let output = common::up(root.path(), "n1").args(["--device", "gpu:77"]).output().expect("runs");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    let expected = if GPU_BACKEND { "there is no gpu:77" } else { "--features gpu" };
    assert!(text.contains(expected), "{text}");
    let output = common::up(root.path(), "n1").args(["--device", "toaster"]).output().expect("runs");
    assert!(String::from_utf8_lossy(&output.stderr).contains("cpu, gpu:0"), "{output:?}");
}

#[test]
fn auto_starts_on_every_machine() {
    let root = tempfile::tempdir().expect("a folder");
    common::models_folder(root.path());
    let mut command = common::up(root.path(), "n1");
    command.args(["--no-mdns", "--no-beacon", "--listen", "127.0.0.1:0", "--tensor-listen", "127.0.0.1:0", "--device", "auto"]);
    let node = common::NodeProcess::start(command);
    assert_eq!(node.ready["event"], "ready");
}
