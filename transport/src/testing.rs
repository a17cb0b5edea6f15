//! Real time and threads for this crate's own tests.

use std::sync::Arc;
use std::time::Duration;

use crate::Effects;
use crate::env::{BoxFuture, Clock, Instant, Join, Spawner, SystemRng, system_now};

/// What the other process of a test says next, in a line that `who` begins.
pub(crate) fn said(lines: &mut impl std::io::BufRead, who: &str) -> String {
    let mut line = String::new();
    loop {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the {who}'s process ended");
        if let Some((_, said)) = line.trim_end().split_once(&format!("{who}: ")) {
            return said.to_owned();
        }
    }
}

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
struct RealThreads;

struct Thread(std::thread::JoinHandle<()>);

impl Join for Thread {
    fn join(self: Box<Self>) -> bool {
        self.0.join().is_ok()
    }
}

impl Spawner for RealThreads {
    fn task(&self, name: &'static str, _future: BoxFuture<'static, ()>) {
        unreachable!("the transport starts no tasks, but {name} was asked for");
    }

    fn thread(&self, name: String, body: Box<dyn FnOnce() + Send>) -> std::io::Result<Box<dyn Join>> {
        Ok(Box::new(Thread(std::thread::Builder::new().name(name).spawn(body)?)))
    }
}

pub(crate) fn effects() -> Effects {
    Effects { clock: Arc::new(RealClock), rng: Arc::new(SystemRng), spawner: Arc::new(RealThreads) }
}

/// A deadline that a passing test never reaches.
pub(crate) fn soon(effects: &Effects) -> Instant {
    effects.after(Duration::from_secs(60))
}

/// Runs an ignored test in a process of its own, and wants the model checker to find this.
pub(crate) fn finds(test: &str, what: &str) {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let output = command.args([test, "--exact", "--ignored", "--nocapture", "--test-threads=1"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains(what), "{test} does not find {what}: {said}");
}
