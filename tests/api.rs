//! The HTTP interface refuses what it cannot do, by name, before it looks for a model.

mod common;

use std::net::SocketAddr;

use common::{get, post, raw_request, request};
use serde_json::{Value, json};
use shoal::api::{Api, Serving};
use shoal::{CatalogSettings, Node};

struct Quiet {
    node: Node,
    serving: Serving,
    runtime: tokio::runtime::Runtime,
    models: tempfile::TempDir,
}

impl Quiet {
    /// A node alone, with an empty models folder.
    fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
        let models = tempfile::tempdir().expect("a folder");
        let (node, serving) = runtime.block_on(async {
            let mut settings = CatalogSettings::from_process().expect("settings");
            settings.root = models.path().to_owned();
            let local = SocketAddr::from(([127, 0, 0, 1], 0));
            let api = Api::bind(local).await.expect("a port");
            let node = Node::builder().in_memory().mdns(false).beacon(false).listen(vec![local]).tensor_listen(vec![local]).threads(1);
            let node = node.memory(1 << 26).models(settings).start().await.expect("starts");
            let serving = api.serve(node.clone(), |asked| asked.unwrap_or_default());
            (node, serving)
        });
        Self { node, serving, runtime, models }
    }

    fn api(&self) -> String {
        self.serving.address().to_string()
    }

    fn stop(self) {
        self.runtime.block_on(async {
            self.node.leave().await;
            self.serving.stop().await;
        });
        drop(self.models);
    }
}

fn chat(extra: &Value) -> Value {
    let mut body = json!({"model": "smollm2:135m", "messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in extra.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

fn refused_parameters(api: &str) {
    let table: Vec<(Value, &str)> = vec![
        (json!({"messages": null}), "messages"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": "hi"}), "messages"),
        (json!({"messages": ["hi"]}), "messages[0]"),
        (json!({"messages": [{"content": "hi"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}), "messages[0].content[0]"),
        (json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content"),
        (json!({"messages": [{"role": "user", "content": "hi", "nmae": "x"}]}), "messages[0].nmae"),
        (
            json!({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a", "audio": {"id": "x"}}]}),
            "messages[1].audio",
        ),
        (json!({"response_format": {"type": "text", "strict": true}}), "response_format"),
        (json!({"model": null}), "model"),
        (json!({"model": ""}), "model"),
        (json!({"model": 7}), "model"),
        (json!({"temperature": -0.1}), "temperature"),
        (json!({"temperature": 2.1}), "temperature"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"top_p": 1.5}), "top_p"),
        (json!({"top_k": -1}), "top_k"),
        (json!({"top_k": 1.5}), "top_k"),
        (json!({"min_p": 2}), "min_p"),
        (json!({"repetition_penalty": 0}), "repetition_penalty"),
        (json!({"presence_penalty": 3}), "presence_penalty"),
        (json!({"frequency_penalty": -3}), "frequency_penalty"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_tokens": -1}), "max_tokens"),
        (json!({"max_tokens": 4_294_967_296_u64}), "max_tokens"),
        (json!({"max_tokens": 5, "max_completion_tokens": 6}), "max_tokens"),
        (json!({"max_completion_tokens": 1e99}), "max_completion_tokens"),
        (json!({"n": 2}), "n"),
        (json!({"stop": ["a", "b", "c", "d", "e"]}), "stop"),
        (json!({"stop": ""}), "stop"),
        (json!({"stop": [1]}), "stop"),
        (json!({"seed": "x"}), "seed"),
        (json!({"seed": 0.5}), "seed"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias"),
        (json!({"logit_bias": {"1": 101}}), "logit_bias"),
        (json!({"logit_bias": [1]}), "logit_bias"),
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"logprobs": 3}), "logprobs"),
        (json!({"stream": "yes"}), "stream"),
        (json!({"stream_options": {"include_usage": true}}), "stream_options"),
        (json!({"stream": true, "stream_options": {"speed": 1}}), "speed"),
        (json!({"stream": true, "stream_options": {"include_obfuscation": true}}), "include_obfuscation"),
        (json!({"tools": [{"type": "function", "function": {"name": "f"}}]}), "tools"),
        (json!({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}), "tools"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"functions": [{"name": "f"}]}), "functions"),
        (json!({"function_call": "auto"}), "function_call"),
        (json!({"response_format": {"type": "json_object"}}), "response_format"),
        (json!({"audio": {"voice": "x"}}), "audio"),
        (json!({"modalities": ["text", "audio"]}), "modalities"),
        (json!({"prediction": {"type": "content"}}), "prediction"),
        (json!({"web_search_options": {}}), "web_search_options"),
        (json!({"reasoning_effort": "high"}), "reasoning_effort"),
        (json!({"verbosity": "low"}), "verbosity"),
        (json!({"service_tier": "scale"}), "service_tier"),
        (json!({"service_tier": 1}), "service_tier"),
        (json!({"priority": "high"}), "priority"),
        (json!({"priority": 1.5}), "priority"),
        (json!({"priority": 1, "service_tier": "priority"}), "priority"),
        (json!({"store": true}), "store"),
        (json!({"user": 5}), "user"),
        (json!({"metadata": {"a": 1}}), "metadata.a"),
        (json!({"metadata": "x"}), "metadata"),
        (json!({"parallel_tool_calls": "x"}), "parallel_tool_calls"),
        (json!({"temprature": 1}), "temprature"),
    ];
    for (extra, param) in table {
        let (status, body) = post(api, "/v1/chat/completions", &chat(&extra));
        assert_eq!((status, body["error"]["param"].as_str()), (400, Some(param)), "{extra}: {body}");
        assert_eq!(body["error"]["type"], "invalid_request_error");
        let message = body["error"]["message"].as_str().expect("a message");
        assert!(message.contains(param.split(['.', '[']).next().unwrap_or(param)), "{extra}: {message}");
    }
}

fn what_changes_nothing_is_accepted(api: &str) {
    let extra = json!({
        "n": 1, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"], "store": false, "user": "u",
        "metadata": {"a": "b"}, "service_tier": "auto", "logprobs": false, "audio": null, "stop": null, "seed": 5, "top_k": 3, "min_p": 0.1,
    });
    let (status, body) = post(api, "/v1/chat/completions", &chat(&extra));
    // It is valid; there is only no model.
    assert_eq!((status, &body["error"]["code"], &body["error"]["param"]), (404, &json!("model_not_found"), &json!("model")), "{body}");
    let message = body["error"]["message"].as_str().expect("a message");
    assert!(message.contains("smollm2:135m") && message.contains("shoal pull"), "{message}");
    for path in ["/v1/shoal/plan", "/v1/shoal/load"] {
        let (status, body) = post(api, path, &json!({"model": "smollm2:135m"}));
        assert_eq!((status, &body["error"]["code"]), (404, &json!("model_not_found")), "{body}");
        let (status, body) = post(api, path, &json!({"model": "smollm2:135m", "nodes_min": 0}));
        assert_eq!((status, &body["error"]["param"]), (400, &json!("nodes_min")), "{body}");
        let (status, body) = post(api, path, &json!({"model": "smollm2:135m", "pinned": ["xyz"]}));
        assert_eq!((status, &body["error"]["param"]), (400, &json!("pinned")), "{body}");
    }
    let (status, body) = post(api, "/v1/completions", &json!({"model": "smollm2:135m", "prompt": "a", "echo": true}));
    assert_eq!((status, &body["error"]["param"]), (400, &json!("echo")), "{body}");
    let (status, body) = post(api, "/v1/shoal/unload", &json!({"instance": "zz"}));
    assert_eq!((status, &body["error"]["param"]), (400, &json!("instance")), "{body}");
    let (status, _) = post(api, "/v1/shoal/unload", &json!({"instance": "00"}));
    assert_eq!(status, 404);
}

fn bodies_and_paths(api: &str) {
    for (body, status) in [(&b"{"[..], 400), (b"[]", 400), (b"", 400), (b"\xff\xfe", 400), (b"{\"model\": NaN}", 400)] {
        let (found, answer) = request(api, "POST", "/v1/chat/completions", &[], body);
        assert_eq!(found, status, "{answer}");
        assert_eq!(answer["error"]["type"], "invalid_request_error", "{answer}");
    }
    let long = vec![b' '; shoal::api::BODY_BYTES_MAX + 1];
    let (status, answer) = request(api, "POST", "/v1/chat/completions", &[], &long);
    assert_eq!(status, 413, "{answer}");
    assert_eq!(get(api, "/v1/nothing").0, 404);
    assert_eq!(get(api, "/v1/chat/completions").0, 405);
    assert_eq!(get(api, "/v1/models/nobody/has:this").0, 404);
    let (status, models) = get(api, "/v1/models");
    assert_eq!((status, models), (200, json!({"object": "list", "data": []})));
    for path in ["/health", "/health/live", "/health/ready"] {
        let (status, body) = get(api, path);
        assert_eq!((status, &body["status"]), (200, &json!("ok")));
    }
    let (_, state) = get(api, "/v1/shoal/state");
    assert_eq!(state["nodes"].as_array().map(Vec::len), Some(1));
    assert_eq!(state["lent"]["offered_bytes"], json!(1 << 26));
    let state: shoal::api::state::State = serde_json::from_value(state).expect("reads back");
    assert_eq!(state.node, state.nodes[0].id);
}

fn pages_are_refused(api: &str) {
    for (headers, expected) in [
        (vec![("host", "evil.example")], 403),
        (vec![("host", "localhost:1"), ("origin", "https://evil.example")], 403),
        (vec![("host", "localhost:1"), ("origin", "null")], 403),
        (vec![("host", "localhost:1"), ("origin", "http://localhost:3000")], 200),
        (vec![("host", "[::1]")], 200),
    ] {
        let (status, body) = raw_request(api, "GET", "/health", &headers, b"");
        assert_eq!(status, expected, "{headers:?}: {body}");
    }
}

#[test]
fn requests_are_checked() {
    let quiet = Quiet::start();
    let api = quiet.api();
    refused_parameters(&api);
    what_changes_nothing_is_accepted(&api);
    bodies_and_paths(&api);
    pages_are_refused(&api);
    quiet.stop();
    assert!(std::net::TcpStream::connect(&api).is_err(), "the port is free again");
}
