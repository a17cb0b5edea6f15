//! `shoal up`

use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use shoal::api::{Api, BindError, Serving};
use shoal::card::{DeviceKind, NodeCard};
use shoal::survey::DeviceChoice;
use shoal::{ClusterKey, Encryption, GPU_BACKEND, MemberEvent, Node, ProviderKind};
use tokio::sync::mpsc;

use super::news::News;
use super::pull::catalog_settings;
use super::size::parse_size;
use super::{API_DEFAULT, Exit, Failure, ModelsOption, Signals, note, say, size_text};

/// How often the node is asked whom it cannot talk to and what does not work.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long the control network may take to say where it listens.
const LISTEN_PATIENCE: Duration = Duration::from_secs(3);
/// Signals that come so soon after the first are the same request.
const SAME_REQUEST: Duration = Duration::from_millis(500);
/// How long leaving may take when nobody is left to be told about it.
const LEAVE_ALONE: Duration = Duration::from_secs(8);

#[derive(Debug, Args)]
#[command(after_help = "Without flags the node joins whatever nodes it finds on the local network. Ctrl-C leaves the cluster, after\n\
    what the node holds has moved to others; a second one ends at once.\n\n\
    Examples:\n  shoal up\n  shoal up --memory 8GiB --threads 6\n  shoal up --device gpu:0                  computes on a graphics processor, and lends its memory\n  SHOAL_KEY=$(cat key) shoal up            a private cluster\n  \
    shoal up --peer 10.0.0.7:4100 --no-mdns  an address instead of discovery\n  shoal up --api 0.0.0.0:52800             HTTP for other machines")]
pub(crate) struct Up {
    /// Folder for the node's identity and what it knows of peers; one node at a time can use it [default: the user's data folder]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Name of the node, for people [default: the host's name]
    #[arg(long)]
    name: Option<String>,
    /// Address for connections of peers; may be given more than once [default: every interface, a free port]
    #[arg(long, value_name = "ADDR")]
    listen: Vec<SocketAddr>,
    /// Address for tensor links; may be given more than once [default: every interface, a free port]
    #[arg(long, value_name = "ADDR")]
    tensor_listen: Vec<SocketAddr>,
    /// Whether tensor links over TCP are encrypted; auto: those that leave the machine, and those of peers that demand it
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = EncryptTensors::Auto)]
    encrypt_tensors: EncryptTensors,
    /// Connections of a tensor link over TCP, as many as both ends want: more than one where two machines have several cables
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    tensor_rails: u8,
    /// What may carry tensors to other nodes [default: whatever the machine has]
    #[arg(long, value_name = "KINDS", value_enum, value_delimiter = ',')]
    tensor_links: Vec<TensorLinkKind>,
    /// Address of a peer, beside those that are found; may be given more than once
    #[arg(long, value_name = "ADDR")]
    peer: Vec<SocketAddr>,
    /// Key of a private cluster, as `shoal key new` makes it; better given as SHOAL_KEY, where other users cannot read it
    #[arg(long, value_name = "TEXT", env = "SHOAL_KEY", hide_env_values = true)]
    key: Option<String>,
    /// Memory to lend, e.g. 4GiB; of the device if it has its own [default: a good part of what is available]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: Option<u64>,
    /// Threads for computing [default: the cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    threads: Option<u32>,
    /// What to compute on: cpu, gpu:0, gpu:1 …, or auto for a graphics processor if one can be used
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::default())]
    device: DeviceChoice,
    #[command(flatten)]
    models: ModelsOption,
    /// Address of the HTTP interface; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = API_DEFAULT)]
    api: SocketAddr,
    /// No HTTP interface
    #[arg(long, conflicts_with = "api")]
    no_api: bool,
    /// Do not announce the node, nor look for others, by mDNS
    #[arg(long)]
    no_mdns: bool,
    /// Do not announce the node, nor look for others, by multicast hellos
    #[arg(long)]
    no_beacon: bool,
    /// Print what happens as JSON, one object a line; the first one tells the node's id and addresses
    #[arg(long)]
    json: bool,
    /// Write the node's id and addresses to this file, as JSON, once it runs
    #[arg(long, value_name = "FILE")]
    ready_file: Option<PathBuf>,
    /// Seconds that leaving may take at most, while layers move to other nodes and answers come to their end; 0 leaves at once
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=3600))]
    drain_seconds: u64,
    /// Leave when standard input ends, at once: for programs that start nodes, so that none outlives them
    #[arg(long)]
    exit_with_stdin: bool,
    /// Remove the data folder at the end, and the folder that it is in if that is empty then
    #[arg(long, hide = true, requires = "data_dir")]
    temporary: bool,
}

/// `--encrypt-tensors`
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum EncryptTensors {
    /// What leaves the machine
    Auto,
    /// Everything
    Always,
    /// Nothing: for networks that nobody else has a cable to
    Never,
}

/// `--tensor-links`
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TensorLinkKind {
    /// Memory shared between processes of one machine
    Shm,
    /// RDMA adapters
    Verbs,
    /// TCP
    Tcp,
}

/// What the node's parts have to tell.
enum Told {
    Member(MemberEvent),
    /// For so long at most it may give away what it has.
    AskedToLeave(Duration),
    StdinEnded,
}

impl Up {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let mut signals = Signals::listen()?;
        let key = match &self.key {
            Some(text) => Some(ClusterKey::from_text(text).map_err(|error| Failure::new(error.to_string()).exit(Exit::Usage))?),
            None => None,
        };
        let private = key.is_some();
        let api = if self.no_api { None } else { Some(Api::bind(self.api).await.map_err(port_taken)?) };
        let started = tokio::select! {
            biased;
            () = signals.next() => return Err(Failure::interrupted()),
            started = self.start(key, api.as_ref().map(Api::address)) => started,
        };
        let node = started?;
        let (tell, mut told) = mpsc::unbounded_channel();
        let member = tell.clone();
        node.membership().subscribe(Box::new(move |event| drop(member.send(Told::Member(*event)))));
        let (asked, usual) = (tell.clone(), Duration::from_secs(self.drain_seconds));
        let on_leave = move |within: Option<Duration>| {
            let within = within.unwrap_or(usual);
            let _ = asked.send(Told::AskedToLeave(within));
            within
        };
        let serving = api.map(|api| api.serve(node.clone(), on_leave));
        if self.exit_with_stdin {
            watch_stdin(tell, self.temporary_folder())?;
        }
        let result = match self.ready(&node, serving.as_ref(), private).await {
            Ok(()) => self.watch(&node, &mut told, &mut signals).await,
            Err(failure) => Err(failure),
        };
        self.end(node, serving, *result.as_ref().unwrap_or(&Duration::ZERO), &mut signals).await;
        result.map(drop)
    }

    async fn start(&self, key: Option<ClusterKey>, api: Option<SocketAddr>) -> Result<Node, Failure> {
        let mut node = Node::builder()
            .listen(self.listen.clone())
            .tensor_listen(self.tensor_listen.clone())
            .tensor_encryption(match self.encrypt_tensors {
                EncryptTensors::Auto => Encryption::Auto,
                EncryptTensors::Always => Encryption::Always,
                EncryptTensors::Never => Encryption::Never,
            })
            .tensor_rails(self.tensor_rails)
            .peers(self.peer.clone())
            .mdns(!self.no_mdns)
            .beacon(!self.no_beacon)
            .device(self.device)
            .models(catalog_settings(&self.models)?);
        if !self.tensor_links.is_empty() {
            let kind = |kind: &TensorLinkKind| match kind {
                TensorLinkKind::Shm => ProviderKind::Shm,
                TensorLinkKind::Verbs => ProviderKind::Verbs,
                TensorLinkKind::Tcp => ProviderKind::Tcp,
            };
            node = node.tensor_links(self.tensor_links.iter().map(kind).collect());
        }
        if let Some(folder) = &self.data_dir {
            node = node.data_dir(folder);
        }
        if let Some(name) = &self.name {
            node = node.name(name);
        }
        if let Some(key) = key {
            node = node.cluster_key(key);
        }
        if let Some(bytes) = self.memory {
            node = node.memory(bytes);
        }
        if let Some(threads) = self.threads {
            node = node.threads(threads);
        }
        if let Some(api) = api {
            node = node.api_address(api.to_string());
        }
        Ok(node.start().await?)
    }

    async fn ready(&self, node: &Node, serving: Option<&Serving>, private: bool) -> Result<(), Failure> {
        let listening = async {
            while node.network().listening().is_empty() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let _ = tokio::time::timeout(LISTEN_PATIENCE, listening).await;
        let view = node.view();
        let Some(card) = view.card(node.id()) else { return Err(Failure::new("the node does not know itself; this is a bug")) };
        let control: Vec<String> = node.network().listening().iter().map(ToString::to_string).collect();
        let api = serving.map(Serving::address);
        let ready = json!({
            "event": "ready",
            "node": node.id().to_string(),
            "name": card.name,
            "version": card.version,
            "control": control,
            "api": api.map(|api| api.to_string()),
            "private": private,
            "pid": std::process::id(),
        });
        if let Some(file) = &self.ready_file {
            write_whole(file, &ready).map_err(|error| Failure::new(format!("cannot write {}: {error}", file.display())))?;
        }
        if self.json {
            say!("{ready}");
        } else {
            banner(card, node, &control, api, private);
        }
        Ok(())
    }

    /// Announces what happens until there is a reason to leave; gives how long that may take for what it has to be given away.
    async fn watch(&self, node: &Node, told: &mut mpsc::UnboundedReceiver<Told>, signals: &mut Signals) -> Result<Duration, Failure> {
        let mut news = News::new(self.json);
        // Events come from before this moment on, so nobody is missed.
        news.present(node);
        let mut look = tokio::time::interval(LOOK_EVERY);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = signals.next() => return Ok(Duration::from_secs(self.drain_seconds)),
                reason = node.stopped() => return Err(Failure::new(format!("the node stopped: {reason}"))),
                told = told.recv() => match told {
                    Some(Told::Member(event)) => news.member(node, event),
                    Some(Told::AskedToLeave(within)) => return Ok(within),
                    // Whoever started it is gone, and does not wait.
                    Some(Told::StdinEnded) | None => return Ok(Duration::ZERO),
                },
                _ = look.tick() => news.look(node),
            }
        }
    }

    /// Gives away what the node has and finishes the answers that are read here, for so long at most.
    async fn drain(&self, node: &Node, serving: Option<&Serving>, within: Duration) {
        let answers = async {
            if let Some(serving) = serving {
                serving.idle().await;
            }
        };
        let answers = tokio::time::timeout(within, answers);
        let (left, answered) = futures::future::join(node.drain(within), answers).await;
        for left in &left {
            if self.json {
                say!("{}", json!({"event": "stays", "instance": left.instance.to_string(), "reason": left.reason}));
            } else {
                say!("instance {} goes with this node: {}", left.instance, left.reason);
            }
        }
        if answered.is_err() {
            note!("answers that are read at this node break off: they took longer than {} seconds", within.as_secs());
        }
    }

    /// Leaves the cluster. Another signal ends it at once.
    async fn end(&self, node: Node, serving: Option<Serving>, within: Duration, signals: &mut Signals) {
        if self.json {
            say!("{}", json!({"event": "leaving"}));
        } else {
            say!("leaving the cluster");
        }
        if let Some(serving) = &serving {
            serving.announce_leaving();
        }
        let leaving = async {
            if !within.is_zero() {
                self.drain(&node, serving.as_ref(), within).await;
            }
            node.leave_at_once().await;
            if let Some(serving) = serving {
                serving.stop().await;
            }
        };
        let signalled = async {
            // Some who end a program tell it twice: the process and its group, or by a signal and the end of its input.
            let _ = tokio::time::timeout(SAME_REQUEST, async {
                for _ in 0..4 {
                    signals.next().await;
                }
            })
            .await;
            signals.next().await;
        };
        tokio::select! {
            biased;
            () = signalled => {
                note!("ending at once");
                self.remove_data();
                std::process::exit(i32::from(Exit::Interrupted as u8));
            }
            () = leaving => {}
        }
        self.remove_data();
        if self.json {
            say!("{}", json!({"event": "left", "node": node.id().to_string()}));
        }
    }

    /// The data folder, if it is to go at the end.
    fn temporary_folder(&self) -> Option<PathBuf> {
        self.data_dir.clone().filter(|_| self.temporary)
    }

    fn remove_data(&self) {
        self.temporary_folder().iter().for_each(|folder| remove_folder(folder));
    }
}

fn remove_folder(folder: &Path) {
    if let Err(error) = std::fs::remove_dir_all(folder)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        note!("cannot remove {}: {error}", folder.display());
    }
    // The last of several nodes finds it empty.
    let _ = folder.parent().map(std::fs::remove_dir);
}

fn port_taken(error: BindError) -> Failure {
    let in_use = error.source.kind() == std::io::ErrorKind::AddrInUse;
    let failure = Failure::new(error.to_string());
    if in_use {
        failure.exit(Exit::InUse).help(
            "if a node runs there already, `shoal status` shows it; else choose another address with --api (127.0.0.1:0 takes a free port) or leave HTTP out with --no-api",
        )
    } else {
        failure.help("choose another address with --api, or leave HTTP out with --no-api")
    }
}

/// Tells when standard input ends, and ends the process if leaving takes too long after that: whoever started it is gone.
fn watch_stdin(tell: mpsc::UnboundedSender<Told>, temporary: Option<PathBuf>) -> Result<(), Failure> {
    let watch = move || {
        let mut stdin = std::io::stdin().lock();
        let mut sink = [0; 64];
        while matches!(stdin.read(&mut sink), Ok(count) if count > 0) {}
        let _ = tell.send(Told::StdinEnded);
        std::thread::sleep(LEAVE_ALONE);
        temporary.iter().for_each(|folder| remove_folder(folder));
        std::process::exit(i32::from(Exit::Failed as u8));
    };
    std::thread::Builder::new().name("shoal-stdin".to_owned()).spawn(watch)?;
    Ok(())
}

/// Writes a file so that whoever waits for it never sees half of it.
fn write_whole(file: &Path, value: &Value) -> std::io::Result<()> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut temporary = tempfile::NamedTempFile::new_in(folder)?;
    std::io::Write::write_all(&mut temporary, format!("{value}\n").as_bytes())?;
    temporary.persist(file).map_err(|error| error.error)?;
    Ok(())
}

fn banner(card: &NodeCard, node: &Node, control: &[String], api: Option<SocketAddr>, private: bool) {
    say!("shoal {} · {} ({})", card.version, card.name, node.id().short());
    say!("  id       {}", node.id());
    say!("  control  {}", control.join(", "));
    match api {
        Some(api) if api.ip().is_loopback() => say!("  http     http://{api}/v1"),
        Some(api) => say!("  http     http://{api}/v1 (other machines that reach it can use this node)"),
        None => say!("  http     none"),
    }
    say!("  memory   {} of {} on offer", size_text(card.memory_offered_bytes), size_text(card.memory_total_bytes));
    for (index, device) in card.devices.iter().enumerate() {
        let title = if index == 0 { "devices" } else { "" };
        match device.kind {
            DeviceKind::UnusedGpu if GPU_BACKEND => {
                say!("  {title:8} {} (seen, not used: `shoal up --device auto` computes on it)", device.name)
            }
            DeviceKind::UnusedGpu => {
                say!(
                    "  {title:8} {} (seen, not used: this build has no GPU backend; `cargo build --release --features gpu` has)",
                    device.name
                );
            }
            DeviceKind::Cpu => say!("  {title:8} {}: {}, {} threads", device.name, device.features.join(" "), device.threads),
            _ if device.memory_bytes == 0 => say!("  {title:8} {}: {}, with the host's memory", device.name, device.features.join(" ")),
            _ => say!("  {title:8} {}: {}, {}", device.name, device.features.join(" "), size_text(device.memory_bytes)),
        }
    }
    say!("  models   {}", node.catalog().root().display());
    if private {
        say!("  cluster  private: only nodes with the key can join");
    } else {
        say!("  cluster  open: any node on the local networks can join and use this one; `shoal key new` makes a key for a private one");
    }
}
