//! Nodes as processes, for tests.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Longest that anything is waited for. It is no measure of speed: machines that run tests may be busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The name of the tiny model in [`models_folder`].
pub(crate) const TINY: &str = "test/tiny:tiny-llama.gguf";

/// The program.
pub(crate) fn shoal() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shoal"));
    for name in ["SHOAL_KEY", "SHOAL_API", "SHOAL_MODELS"] {
        command.env_remove(name);
    }
    if std::env::var_os("SHOAL_TEST_LOGS").is_none() {
        command.env_remove("SHOAL_LOG");
    }
    command
}

/// The tiny model, by its path.
pub(crate) fn tiny_file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("engine/tests/data/tiny-llama.gguf")
}

/// A models folder with the tiny model in it, as the catalogue lays it out.
pub(crate) fn models_folder(root: &Path) -> PathBuf {
    let models = root.join("models");
    std::fs::create_dir_all(&models).expect("a folder");
    let bytes = std::fs::read(tiny_file()).expect("the tiny model is there");
    // The catalogue names a folder after its model; the digits tell names apart that look alike as folders.
    let folder = models.join(format!("test-tiny-tiny-llama.gguf-{}", &sha256(TINY.as_bytes())[..8]));
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::write(folder.join("tiny-llama.gguf"), &bytes).expect("written");
    let manifest = json!({
        "form": 1, "name": TINY, "file": "tiny-llama.gguf", "sha256": sha256(&bytes), "bytes": bytes.len(), "source": "a test",
    });
    std::fs::write(folder.join("manifest.json"), manifest.to_string()).expect("written");
    models
}

/// SHA-256 in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest;
    hex::encode(sha2::Sha256::digest(bytes))
}

/// A node process. It is killed when this is dropped.
pub(crate) struct NodeProcess {
    child: Child,
    /// What it said when it was ready.
    pub(crate) ready: Value,
    lines: mpsc::Receiver<String>,
    heard: Vec<Value>,
}

/// Adds what every node of a test has: a data folder, the models folder, ports of its own.
pub(crate) fn up(root: &Path, name: &str) -> Command {
    up_in(root, name, &root.join("models"), 256 << 20)
}

/// A node that lends so many bytes.
pub(crate) fn up_lending(root: &Path, name: &str, bytes: u64) -> Command {
    up_in(root, name, &root.join("models"), bytes)
}

/// The same with another models folder.
pub(crate) fn up_with(root: &Path, name: &str, models: &Path) -> Command {
    up_in(root, name, models, 256 << 20)
}

fn up_in(root: &Path, name: &str, models: &Path, bytes: u64) -> Command {
    let mut command = shoal();
    command.args(["up", "--json", "--exit-with-stdin", "--threads", "1", "--api", "127.0.0.1:0", "--name", name]);
    command.arg("--memory").arg(bytes.to_string());
    command.arg("--data-dir").arg(root.join(name)).arg("--models-dir").arg(models);
    command
}

/// A key of a test's own cluster, so that tests that run at the same time do not find each other.
pub(crate) fn key() -> String {
    let output = shoal().args(["key", "new"]).output().expect("runs");
    String::from_utf8(output.stdout).expect("text").trim().to_owned()
}

/// Has a node only go where it is told.
pub(crate) fn direct(mut command: Command, key: Option<&str>, peer: Option<&NodeProcess>) -> Command {
    command.args(["--no-mdns", "--no-beacon", "--listen", "127.0.0.1:0", "--tensor-listen", "127.0.0.1:0"]);
    if let Some(key) = key {
        command.env("SHOAL_KEY", key);
    }
    if let Some(peer) = peer {
        command.arg("--peer").arg(peer.peer_address());
    }
    command
}

impl NodeProcess {
    /// Starts a node and waits until it is ready.
    pub(crate) fn start(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // To find out why a test fails now and then: what each node logs, in a file of its own.
        if let Some(folder) = std::env::var_os("SHOAL_TEST_LOGS") {
            let name: PathBuf = command.get_args().skip_while(|argument| *argument != "--name").nth(1).unwrap_or_default().into();
            let log = std::fs::File::options().create(true).append(true).open(Path::new(&folder).join(name.with_extension("log")));
            command.stderr(log.expect("a log"));
        }
        let mut child = command.spawn().expect("starts");
        let stdout = child.stdout.take().expect("piped");
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        let mut node = Self { child, ready: Value::Null, lines, heard: Vec::new() };
        node.ready = node.wait_for("ready", |_| true);
        node
    }

    pub(crate) fn id(&self) -> &str {
        self.ready["node"].as_str().expect("an id")
    }

    pub(crate) fn api(&self) -> &str {
        self.ready["api"].as_str().expect("an address")
    }

    /// An address of its control port on the loopback interface.
    pub(crate) fn peer_address(&self) -> String {
        let control = self.ready["control"].as_array().expect("addresses");
        let v4 = control.iter().filter_map(Value::as_str).find(|address| !address.starts_with('[')).expect("a v4 address");
        let (_, port) = v4.rsplit_once(':').expect("a port");
        format!("127.0.0.1:{port}")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for an event that it prints.
    pub(crate) fn wait_for(&mut self, event: &str, fits: impl Fn(&Value) -> bool) -> Value {
        let is = |value: &Value| value["event"] == event && fits(value);
        if let Some(found) = self.heard.iter().find(|value| is(value)) {
            return found.clone();
        }
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = match self.lines.recv_timeout(left) {
                Ok(line) => line,
                Err(error) => panic!("no `{event}` came ({error}); heard: {:?}", self.heard),
            };
            let value: Value = serde_json::from_str(&line).expect("JSON");
            self.heard.push(value.clone());
            if is(&value) {
                return value;
            }
        }
    }

    pub(crate) fn state(&self) -> Value {
        let (status, body) = get(self.api(), "/v1/shoal/state");
        assert_eq!(status, 200);
        body
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = i32::try_from(self.pid()).ok().and_then(rustix::process::Pid::from_raw).expect("a process id");
        rustix::process::kill_process(pid, signal).expect("signalled");
    }

    /// Kills it as `kill -9` does.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("ended");
    }

    /// Waits for its end; says whether it ended well.
    pub(crate) fn wait(&mut self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("can be asked") {
                return status.success();
            }
            assert!(Instant::now() < deadline, "the node does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits for its end; gives all that it has said.
    pub(crate) fn wait_for_end(&mut self) -> Vec<Value> {
        assert!(self.wait(), "the node ends well");
        let rest: Vec<String> = self.lines.iter().collect();
        self.heard.extend(rest.iter().map(|line| serde_json::from_str(line).expect("JSON")));
        self.heard.clone()
    }

    /// Ends its standard input, as the death of whoever started it does.
    pub(crate) fn close_stdin(&mut self) {
        drop(self.child.stdin.take());
    }
}

impl Drop for NodeProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until `ready` says so.
pub(crate) fn wait_until(what: &str, mut ready: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !ready() {
        assert!(Instant::now() < deadline, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Waits until each node is connected to every other one.
pub(crate) fn wait_until_joined(nodes: &[&NodeProcess]) {
    wait_until("nodes see each other", || {
        nodes.iter().all(|node| {
            let state = node.state();
            let there = state["nodes"].as_array().expect("a list").iter().filter(|n| n["state"] == "alive" && n["connected"] == true);
            there.filter(|n| n["models"].as_array().is_some_and(|models| !models.is_empty())).count() >= nodes.len()
        })
    });
}

/// A request, as bytes on the wire say it; answers status and JSON.
pub(crate) fn request(api: &str, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> (u16, Value) {
    let (status, text) = raw_request(api, method, path, headers, body);
    (status, serde_json::from_str(&text).unwrap_or_else(|error| panic!("no JSON ({error}): {text}")))
}

/// The same, with the body as text.
pub(crate) fn raw_request(api: &str, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> (u16, String) {
    let mut stream = open(api, method, path, headers, body);
    let mut answer = Vec::new();
    // A server that has refused a long body closes before it has read all of it, which looks like an error afterwards.
    if let Err(error) = stream.read_to_end(&mut answer) {
        assert!(!answer.is_empty(), "no answer: {error}");
    }
    let answer = String::from_utf8(answer).expect("text");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no HTTP answer: {answer}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    (status, body.to_owned())
}

/// Sends a request of HTTP 1.0, whose answer is not cut into chunks and ends with the connection.
pub(crate) fn open(api: &str, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(api).expect("connects");
    stream.set_read_timeout(Some(PATIENCE)).expect("set");
    let mut head = format!("{method} {path} HTTP/1.0\r\ncontent-length: {}\r\ncontent-type: application/json\r\n", body.len());
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        head.push_str(&format!("host: {api}\r\n"));
    }
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes()).expect("written");
    // Whoever refuses a long body may not read it all.
    let _ = stream.write_all(body);
    stream
}

pub(crate) fn get(api: &str, path: &str) -> (u16, Value) {
    request(api, "GET", path, &[], b"")
}

pub(crate) fn post(api: &str, path: &str, body: &Value) -> (u16, Value) {
    request(api, "POST", path, &[], body.to_string().as_bytes())
}

/// What a streamed answer brought.
#[derive(Debug, Default)]
pub(crate) struct Streamed {
    pub(crate) text: String,
    pub(crate) token_ids: Vec<u64>,
    pub(crate) finish: Option<String>,
    pub(crate) usage: Value,
    pub(crate) done: bool,
    pub(crate) error: Option<Value>,
}

/// The events of a stream as they come: its id, if it has one, and its data.
pub(crate) struct Events {
    lines: std::io::Lines<BufReader<TcpStream>>,
    /// The request that is answered.
    pub(crate) request: String,
    id: Option<String>,
}

/// Asks for a stream of events.
pub(crate) fn events(api: &str, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Events {
    let mut lines = BufReader::new(open(api, method, path, headers, body)).lines();
    let mut head = Vec::new();
    while let Some(line) = lines.next().map(|line| line.expect("read")).filter(|line| !line.is_empty()) {
        head.push(line);
    }
    assert!(head.first().is_some_and(|line| line.contains(" 200 ")), "{head:?}: {:?}", lines.map_while(Result::ok).collect::<Vec<_>>());
    let request = head.iter().find_map(|line| line.strip_prefix("x-shoal-request: ")).expect("says which request it is").to_owned();
    Events { lines, request, id: None }
}

impl Iterator for Events {
    type Item = (Option<String>, String);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            // A connection that breaks ends like one that is closed.
            let line = self.lines.next()?.ok()?;
            if let Some(id) = line.strip_prefix("id: ") {
                self.id = Some(id.to_owned());
            } else if let Some(data) = line.strip_prefix("data: ") {
                return Some((self.id.take(), data.to_owned()));
            }
        }
    }
}

/// Asks for a stream; `on_token` hears how many tokens have come.
pub(crate) fn stream(api: &str, body: &Value, mut on_token: impl FnMut(usize)) -> Streamed {
    let mut body = body.clone();
    body["stream"] = json!(true);
    body["return_token_ids"] = json!(true);
    let connection = open(api, "POST", "/v1/chat/completions", &[], body.to_string().as_bytes());
    let mut told = Streamed::default();
    let mut lines = BufReader::new(connection).lines();
    let head = lines.next().expect("an answer").expect("read");
    assert!(head.contains(" 200 "), "{head}: {:?}", lines.map_while(Result::ok).collect::<Vec<_>>());
    for line in lines.map_while(Result::ok) {
        let Some(data) = line.strip_prefix("data: ") else { continue };
        if data == "[DONE]" {
            told.done = true;
            continue;
        }
        let value: Value = serde_json::from_str(data).expect("JSON");
        if !value["error"].is_null() {
            told.error = Some(value["error"].clone());
            continue;
        }
        if value["usage"].is_object() {
            told.usage = value["usage"].clone();
        }
        let choice = &value["choices"][0];
        told.text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        told.token_ids.extend(choice["token_ids"].as_array().into_iter().flatten().filter_map(Value::as_u64));
        told.finish = choice["finish_reason"].as_str().map(str::to_owned).or(told.finish);
        on_token(told.token_ids.len());
    }
    told
}
