//! Answers by the id of their request, between real node processes: a client whose node dies goes on at another one, and nothing is
//! lost, said twice or said otherwise.

mod common;

use common::{Events, NodeProcess, TINY, direct, events, get, key, models_folder, post, raw_request, up, wait_until, wait_until_joined};
use serde_json::{Value, json};

struct Cluster {
    root: tempfile::TempDir,
    key: String,
    nodes: Vec<NodeProcess>,
}

impl Cluster {
    fn start(count: usize) -> Self {
        let root = tempfile::tempdir().expect("a folder");
        models_folder(root.path());
        let mut cluster = Self { root, key: key(), nodes: Vec::new() };
        for place in 0..count {
            let node = cluster.node(place);
            cluster.nodes.push(node);
        }
        wait_until_joined(&cluster.nodes.iter().collect::<Vec<_>>());
        cluster
    }

    /// A node with the data folder of its place.
    fn node(&self, place: usize) -> NodeProcess {
        let peer = self.nodes.iter().enumerate().find(|(other, _)| *other != place).map(|(_, node)| node);
        NodeProcess::start(direct(up(self.root.path(), &format!("n{place}")), Some(&self.key), peer))
    }

    fn restart(&mut self, place: usize) {
        self.nodes[place] = self.node(place);
        wait_until_joined(&self.nodes.iter().collect::<Vec<_>>());
    }

    /// The one instance, once it answers and everybody knows of it.
    fn instance(&self) -> Value {
        let mut found = Value::Null;
        wait_until("one instance answers", || {
            let told: Vec<Value> = self.nodes.iter().map(|node| node.state()["instances"].clone()).collect();
            found = told[0][0].clone();
            told.iter().all(|list| list.as_array().is_some_and(|list| list.len() == 1) && list == &told[0]) && found["state"] == "ready"
        });
        found
    }

    fn place(&self, id: &Value) -> usize {
        self.nodes.iter().position(|node| json!(node.id()) == *id).expect("ours")
    }
}

fn question(sampled: bool, tokens: u32) -> Value {
    let mut question = json!({"model": TINY, "messages": [{"role": "user", "content": "Tell me a long story."}], "max_tokens": tokens,
        "ignore_eos": true, "stream": true, "stream_options": {"include_usage": true}, "return_token_ids": true, "temperature": 0});
    if sampled {
        question["temperature"] = json!(1.0);
        question["seed"] = json!(7);
    }
    question
}

fn ask(api: &str, question: &Value) -> Events {
    events(api, "POST", "/v1/chat/completions", &[], question.to_string().as_bytes())
}

/// What a client was told: everything but what differs from run to run.
fn said(data: &str) -> Value {
    if data == "[DONE]" {
        return json!(data);
    }
    let mut value: Value = serde_json::from_str(data).expect("JSON");
    let fields = value.as_object_mut().expect("an object");
    for name in ["id", "created", "timings"] {
        fields.shift_remove(name);
    }
    if let Some(usage) = fields.get_mut("usage").and_then(Value::as_object_mut) {
        usage.shift_remove("prompt_tokens_details");
    }
    value
}

type Told = Vec<(Option<String>, Value)>;

fn told(events: impl Iterator<Item = (Option<String>, String)>) -> Told {
    events.map(|(id, data)| (id, said(&data))).collect()
}

#[test]
#[allow(clippy::print_stdout)]
fn an_answer_goes_on_at_another_node_when_the_one_that_was_asked_dies() {
    let mut cluster = Cluster::start(3);
    let wanted = json!({"model": TINY, "nodes_min": 2, "nodes_max": 2, "context_tokens": 512});
    let (status, instance) = post(cluster.nodes[0].api(), "/v1/shoal/load", &wanted);
    assert_eq!(status, 200, "{instance}");
    cluster.instance();
    let whole: Vec<Told> = [false, true].iter().map(|sampled| told(ask(cluster.nodes[0].api(), &question(*sampled, 450)))).collect();
    assert!(whole.iter().all(|told| told.last() == Some(&(None, json!("[DONE]")))), "{whole:?}");
    assert_ne!(whole[0], whole[1]);

    for role in ["api", "stage", "conductor"] {
        let instance = cluster.instance();
        let conductor = cluster.place(&instance["conductor"]);
        let holders: Vec<usize> =
            instance["stages"].as_array().expect("stages").iter().map(|stage| cluster.place(&stage["node"])).collect();
        let fits = |place: &usize| match role {
            "api" => *place != conductor && !holders.contains(place),
            "stage" => *place != conductor && holders.contains(place),
            _ => *place == conductor,
        };
        // After a death all layers may be where the conductor is.
        let Some(victim) = (0..3).find(fits) else {
            println!("nobody is only {role}");
            continue;
        };
        let mut streams: Vec<Events> =
            [false, true].iter().map(|sampled| ask(cluster.nodes[victim].api(), &question(*sampled, 450))).collect();
        let mut shown: Vec<Told> = streams.iter_mut().map(|stream| told(stream.take(8))).collect();
        cluster.nodes[victim].kill();
        let killed = std::time::Instant::now();
        for (sampled, stream) in streams.into_iter().enumerate() {
            let request = stream.request.clone();
            // What was on its way is shown, too.
            shown[sampled].extend(told(stream));
            assert!(shown[sampled].last().is_some_and(|(_, data)| data != "[DONE]"), "{role}: it is over before the kill");
            let other = cluster.nodes[(victim + 1 + sampled) % 3].api().to_owned();
            let path = format!("/v1/shoal/requests/{request}");
            let last = shown[sampled].last().and_then(|(id, _)| id.clone()).expect("an id");
            let mut rest = events(&other, "GET", &path, &[("Last-Event-ID", &last)], b"");
            assert_eq!(rest.request, request);
            shown[sampled].extend(told(rest.by_ref().take(1)));
            println!("{role}: the first word after {:?}", killed.elapsed());
            shown[sampled].extend(told(rest));
            assert_eq!(shown[sampled], whole[sampled], "{role}, sampled: {sampled}");
        }
        cluster.restart(victim);
    }
}

#[test]
fn requests_have_names_and_are_told_again() {
    let cluster = Cluster::start(2);
    let (one, two) = (cluster.nodes[0].api(), cluster.nodes[1].api());
    let (status, unknown) = get(one, "/v1/shoal/requests/no-such-request");
    assert_eq!((status, &unknown["error"]["code"]), (404, &json!("request_not_found")), "{unknown}");

    let body = question(true, 24).to_string();
    let named =
        |api: &str, body: &str| told(events(api, "POST", "/v1/chat/completions", &[("x-shoal-request", "my-story")], body.as_bytes()));
    let first = named(one, &body);
    // Sent again, it is the same request, wherever it is sent.
    assert_eq!(named(two, &body), first);
    let other = question(true, 25).to_string();
    let (status, refused) = raw_request(one, "POST", "/v1/chat/completions", &[("x-shoal-request", "my-story")], other.as_bytes());
    assert_eq!(status, 409, "{refused}");
    assert!(refused.contains("request_exists"), "{refused}");

    // From any event on, by its id, or by how many there were.
    let path = "/v1/shoal/requests/my-story";
    for (count, (id, _)) in first.iter().enumerate().filter(|(_, (id, _))| id.is_some()) {
        let id = id.as_deref().expect("filtered");
        for (api, path, headers) in [
            (two, path.to_owned(), vec![("last-event-id", id)]),
            (one, format!("{path}?after={}", count + 1), vec![]),
            (two, format!("{path}?after={}&hash={}", count + 1, &id[id.len() - 16..]), vec![]),
        ] {
            assert_eq!(told(events(api, "GET", &path, &headers, b"")), first[count + 1..], "{path} {headers:?}");
        }
    }
    assert_eq!(told(events(two, "GET", path, &[("accept", "text/event-stream")], b"")), first);
    for wrong in ["5-0123456789abcdef", "5&hash=0123456789abcdef", "1000"] {
        let (status, refused) = get(two, &format!("{path}?after={wrong}"));
        assert_eq!((status, &refused["error"]["code"]), (409, &json!("contradiction")), "{wrong}: {refused}");
    }
    let (status, refused) = get(two, &format!("{path}?after=x"));
    assert_eq!((status, &refused["error"]["param"]), (400, &json!("after")), "{refused}");

    // Without a stream it says how far it is.
    let (status, done) = get(two, path);
    assert_eq!((status, &done["status"], &done["tokens"]), (200, &json!("completed"), &json!(24)), "{done}");
    let text: String = first.iter().filter_map(|(_, data)| data.pointer("/choices/0/delta/content")?.as_str()).collect();
    assert_eq!((&done["text"], &done["response"]["choices"][0]["message"]["content"]), (&json!(text), &json!(text)));
    assert_eq!(done["after"], json!(first[first.len() - 2].0));

    // One that needs no reader goes on without, and one whose name nobody knows ends with its reader.
    let mut long = question(false, 400);
    long["background"] = json!(true);
    let mut begun = ask(one, &long);
    let request = begun.request.clone();
    assert_eq!(begun.by_ref().take(3).count(), 3);
    drop(begun);
    let (_, running) = get(two, &format!("/v1/shoal/requests/{request}"));
    assert!(["running", "completed"].iter().any(|state| running["status"] == *state), "{running}");
    wait_until("it comes to its end", || get(two, &format!("/v1/shoal/requests/{request}")).1["tokens"] == 400);
}
