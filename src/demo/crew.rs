//! The node processes of a demonstration.
//!
//! None outlives it: each is told to leave at the end, and killed if it does not. If this process is killed itself, the
//! pipe that is each node's standard input ends, and the node leaves by itself and removes its folder.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;
use shoal::ClusterKey;
use shoal::api::state::{NodeState, State};
use shoal::env::SystemRng;
use shoal::survey::{Facts, default_offer};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::cli::{Client, Failure, Signals};

/// How long a node may take from its start until it says that it is ready.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a node may take to leave before it is killed.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(15);
/// Pause between two questions whether all nodes see each other.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// What to start.
#[derive(Debug)]
pub(crate) struct CrewPlan {
    pub(crate) nodes: u32,
    /// The models folder, if it is not the default one.
    pub(crate) models: Option<PathBuf>,
    /// What each lends, in bytes; none: its share of what this machine would.
    pub(crate) memory: Option<u64>,
    /// Compute threads of each.
    pub(crate) threads: u16,
}

/// A node that runs.
#[derive(Debug, Clone)]
pub(crate) struct Member {
    pub(super) name: String,
    pub(super) id: String,
    pub(super) api: String,
    pub(super) control: Vec<String>,
    pub(super) pid: u32,
}

/// The key of the nodes' own cluster; it is not printed.
struct Key(String);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(…)")
    }
}

/// The processes, and the folder that all their folders are in.
#[derive(Debug)]
pub(crate) struct Crew {
    plan: CrewPlan,
    key: Key,
    folder: Option<TempDir>,
    processes: Vec<Child>,
    /// The nodes' standard inputs, which they watch. Waiting for a process would close its own.
    inputs: Vec<Option<ChildStdin>>,
    members: Vec<Member>,
    /// When the last process was started.
    started: Instant,
}

impl Crew {
    pub(crate) fn new(plan: CrewPlan) -> Result<Self, Failure> {
        let folder = tempfile::Builder::new().prefix("shoal-demo-").tempdir()?;
        let key = Key(ClusterKey::generate(&SystemRng));
        let (processes, inputs, members) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { plan, key, folder: Some(folder), processes, inputs, members, started: Instant::now() })
    }

    pub(super) fn members(&self) -> &[Member] {
        &self.members
    }

    /// The HTTP interface of a node.
    pub(crate) fn client(&self, index: usize) -> Result<Client, Failure> {
        let member = self.members.get(index).ok_or_else(|| Failure::new("there is no such node"))?;
        Ok(Client::new(&member.api))
    }

    /// Starts all processes and waits until each is ready.
    pub(crate) async fn start(&mut self) -> Result<(), Failure> {
        let mut outputs = Vec::new();
        for index in 0..self.plan.nodes {
            let (mut process, output) = self.spawn(index)?;
            self.inputs.push(process.stdin.take());
            self.processes.push(process);
            outputs.push(output);
        }
        for (index, output) in outputs.into_iter().enumerate() {
            let member = self.wait_ready(index, output).await?;
            self.members.push(member);
        }
        Ok(())
    }

    /// Starts the process of a node, with the data folder that it has or had.
    fn spawn(&mut self, index: u32) -> Result<(Child, Output), Failure> {
        let folder = self.folder.as_ref().map(TempDir::path).ok_or_else(|| Failure::new("the nodes' folder is gone"))?;
        // They share this machine's memory.
        let share = || (default_offer(&Facts::read().memory) / u64::from(self.plan.nodes)).max(1);
        let memory = self.plan.memory.unwrap_or_else(share);
        let program = std::env::current_exe()?;
        let name = name(index as usize);
        let mut command = Command::new(&program);
        command.args(["up", "--json", "--exit-with-stdin", "--temporary", "--api", "127.0.0.1:0"]);
        command.arg("--threads").arg(self.plan.threads.to_string());
        // They leave together.
        command.args(["--drain-seconds", "0"]);
        command.arg("--name").arg(&name).arg("--data-dir").arg(folder.join(&name)).arg("--memory").arg(memory.to_string());
        if let Some(models) = &self.plan.models {
            command.arg("--models-dir").arg(models);
        }
        // Arguments can be read by everybody on this machine, variables cannot.
        command.env("SHOAL_KEY", &self.key.0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        // Ctrl-C is for this process, which then tells the nodes.
        #[cfg(unix)]
        command.process_group(0);
        let mut process = command.spawn().map_err(|error| Failure::new(format!("cannot start {}: {error}", program.display())))?;
        let stdout = process.stdout.take().ok_or_else(|| Failure::new("a node has no output"))?;
        self.started = Instant::now();
        Ok((process, BufReader::new(stdout).lines()))
    }

    async fn wait_ready(&self, index: usize, mut lines: Output) -> Result<Member, Failure> {
        let name = name(index);
        let member = tokio::time::timeout(START_TIMEOUT, ready(&name, &mut lines)).await;
        let member = member.map_err(|_| Failure::new(format!("{name} is not ready after {} s", START_TIMEOUT.as_secs())))??;
        // Whatever it says later is read, so that it never has to wait for a reader.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Ok(member)
    }

    /// Kills a node without a word.
    pub(super) async fn kill(&mut self, index: usize) -> Result<(), Failure> {
        if let Some(process) = self.processes.get_mut(index) {
            process.kill().await?;
        }
        Ok(())
    }

    /// Starts a node again that was killed, and waits until it is ready.
    pub(super) async fn restart(&mut self, index: usize) -> Result<(), Failure> {
        let (mut process, output) = self.spawn(u32::try_from(index).unwrap_or(u32::MAX))?;
        let input = process.stdin.take();
        if let (Some(old), Some(place)) = (self.processes.get_mut(index), self.inputs.get_mut(index)) {
            (*old, *place) = (process, input);
        }
        let member = self.wait_ready(index, output).await?;
        if let Some(place) = self.members.get_mut(index) {
            *place = member;
        }
        Ok(())
    }

    /// Waits until every node is connected to every other, and each says that it has the model; tells how long that took since the
    /// last process was started, so that its own start is part of it. The wait ends `timeout` after this call.
    pub(crate) async fn meet(&self, timeout: Duration, sha256: Option<&str>) -> Result<Duration, Failure> {
        let called = Instant::now();
        let wanted = self.members.len();
        loop {
            let mut least = wanted;
            for member in &self.members {
                let state: State = Client::new(&member.api).get("/v1/shoal/state").await?;
                let has = |node: &NodeState| sha256.is_none_or(|hash| node.models.iter().any(|model| model.sha256 == hash));
                let seen = state.nodes.iter().filter(|node| node.state == "alive" && node.connected && has(node));
                least = least.min(seen.count());
            }
            if least >= wanted {
                return Ok(self.started.elapsed());
            }
            if called.elapsed() > timeout {
                let message = format!("after {} s a node sees only {least} of {wanted} nodes", timeout.as_secs());
                let help =
                    "nodes find each other by multicast: check that a firewall lets UDP ports 5353 and above through on this machine";
                return Err(Failure::new(message).help(help));
            }
            tokio::time::sleep(ASK_EVERY).await;
        }
    }

    /// Whether a node has ended by itself.
    pub(super) fn casualty(&mut self) -> Option<String> {
        for (index, process) in self.processes.iter_mut().enumerate() {
            if let Ok(Some(status)) = process.try_wait() {
                return Some(format!("node{} ended ({status})", index + 1));
            }
        }
        None
    }

    /// Waits for a signal.
    pub(super) async fn watch(&self, signals: &mut Signals) -> Result<(), Failure> {
        signals.next().await;
        Ok(())
    }

    /// Tells all nodes to leave and waits for them; whichever does not in time, or at another signal, is killed. The
    /// folder is removed.
    pub(crate) async fn dismiss(mut self, signals: &mut Signals) -> Result<(), Failure> {
        #[cfg(unix)]
        self.processes.iter().for_each(tell);
        #[cfg(not(unix))]
        self.inputs.clear();
        let processes = &mut self.processes;
        let leaving = async {
            for process in processes.iter_mut() {
                let _ = process.wait().await;
            }
        };
        let in_time = tokio::select! {
            biased;
            () = signals.next() => false,
            ended = tokio::time::timeout(LEAVE_TIMEOUT, leaving) => ended.is_ok(),
        };
        let mut killed = 0;
        if !in_time {
            for process in &mut self.processes {
                if !matches!(process.try_wait(), Ok(Some(_))) {
                    killed += 1;
                    let _ = process.kill().await;
                }
            }
        }
        if let Some(folder) = self.folder.take() {
            let path = folder.path().to_owned();
            // The last node may have removed it.
            if let Err(error) = folder.close()
                && path.exists()
            {
                return Err(Failure::new(format!("cannot remove {}: {error}", path.display())));
            }
        }
        match killed {
            0 => Ok(()),
            count => Err(Failure::new(format!("{count} of the nodes did not leave in time and were killed"))),
        }
    }
}

/// What a node prints.
type Output = Lines<BufReader<ChildStdout>>;

fn name(index: usize) -> String {
    format!("node{}", index + 1)
}

#[cfg(unix)]
fn tell(process: &Child) {
    let pid = process.id().and_then(|pid| i32::try_from(pid).ok()).and_then(rustix::process::Pid::from_raw);
    if let Some(pid) = pid {
        // A process that has ended already hears nothing.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
}

/// Reads the line with which a node says that it is ready.
async fn ready(name: &str, lines: &mut Output) -> Result<Member, Failure> {
    let Some(line) = lines.next_line().await? else { return Err(Failure::new(format!("{name} did not start; see its error above"))) };
    let value: Value =
        serde_json::from_str(&line).map_err(|error| Failure::new(format!("{name} said `{line}`, which is no JSON: {error}")))?;
    let text = |field: &str| value.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
    let control = value.get("control").and_then(Value::as_array).into_iter().flatten();
    Ok(Member {
        name: text("name"),
        id: text("node"),
        api: text("api"),
        control: control.filter_map(Value::as_str).map(str::to_owned).collect(),
        pid: value.get("pid").and_then(Value::as_u64).and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0),
    })
}
