//! Real time, real threads, and a second process.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use shoal_transport::Effects;
use shoal_transport::env::{BoxFuture, Clock, Instant, Join, Spawner, SystemRng, system_now};

pub(crate) type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

#[derive(Debug)]
struct RealClock;

impl Clock for RealClock {
    fn now(&self) -> Instant {
        system_now()
    }

    fn sleep_until(&self, deadline: Instant) -> BoxFuture<'static, ()> {
        Box::pin(async move { std::thread::sleep(deadline.since(system_now())) })
    }
}

#[derive(Debug)]
struct Threads;

struct Thread(std::thread::JoinHandle<()>);

impl Join for Thread {
    fn join(self: Box<Self>) -> bool {
        self.0.join().is_ok()
    }
}

impl Spawner for Threads {
    fn task(&self, _name: &'static str, _future: BoxFuture<'static, ()>) {
        // Links and channels start threads only.
    }

    fn thread(&self, name: String, body: Box<dyn FnOnce() + Send>) -> std::io::Result<Box<dyn Join>> {
        Ok(Box::new(Thread(std::thread::Builder::new().name(name).spawn(body)?)))
    }
}

pub(crate) fn effects() -> Effects {
    Effects { clock: Arc::new(RealClock), rng: Arc::new(SystemRng), spawner: Arc::new(Threads) }
}

pub(crate) fn soon(effects: &Effects) -> Instant {
    effects.after(Duration::from_secs(20))
}

/// The other process, which does what it is told line by line.
pub(crate) struct Peer {
    child: Child,
    tell: ChildStdin,
    hear: BufReader<ChildStdout>,
}

impl Peer {
    pub(crate) fn start() -> Outcome<Self> {
        let mut child = Command::new(std::env::current_exe()?).arg("--peer").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (tell, hear) = (child.stdin.take(), child.stdout.take());
        Ok(Self { child, tell: tell.ok_or("no stdin")?, hear: BufReader::new(hear.ok_or("no stdout")?) })
    }

    pub(crate) fn tell(&mut self, line: &str) -> Outcome<()> {
        Ok(writeln!(self.tell, "{line}")?)
    }

    pub(crate) fn hear(&mut self) -> Outcome<String> {
        let mut line = String::new();
        self.hear.read_line(&mut line)?;
        if line.is_empty() { Err("the other process is gone".into()) } else { Ok(line.trim().to_owned()) }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Keeps the calling thread on one processor, so that two of them do not share it.
#[cfg(target_os = "linux")]
pub(crate) fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    // Where there is no such processor, it runs wherever it can.
    let _ = rustix::thread::sched_setaffinity(None, &set);
}
