//! Restarts the children of an actor one by one, within limits, and stops them in a fixed order.
//!
//! ractor tells a supervisor that a child has ended and leaves the rest to it. A [`Supervision`] is that rest: the
//! supervisor keeps one in its state, starts its children through it, gives it every event that it gets in
//! `handle_supervisor_evt`, and stops them through it. Overriding `handle_supervisor_evt` is a must: ractor's default
//! stops a parent when a child does.
//!
//! ```ignore
//! async fn handle_supervisor_evt(&self, myself: ActorRef<Msg>, event: SupervisionEvent, state: &mut State) -> Result<(), ActorProcessingErr> {
//!     Ok(state.supervision.handle(&myself.get_cell(), event).await?)
//! }
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ractor::{ActorCell, ActorProcessingErr, SupervisionEvent};

use crate::env::{BoxFuture, Clock, Instant};

/// When a child that has ended is started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Restart {
    /// However it ended, unless the supervisor stopped it.
    Always,
    /// When it failed or panicked.
    OnFailure,
    /// Not.
    Never,
}

/// How many restarts of one child are tolerated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Intensity {
    /// At most so many restarts …
    pub restarts: usize,
    /// … in any period of this length.
    pub within: Duration,
}

impl Default for Intensity {
    fn default() -> Self {
        Self { restarts: 5, within: Duration::from_secs(30) }
    }
}

/// Counts restarts against an [`Intensity`].
#[derive(Debug, Clone, Default)]
struct Window {
    restarts: VecDeque<Instant>,
}

impl Window {
    /// Whether one more restart is within the limits, and which one in a row it is, from 0; it then counts.
    fn admit(&mut self, now: Instant, intensity: Intensity) -> Option<usize> {
        while self.restarts.front().is_some_and(|first| now.since(*first) >= intensity.within) {
            self.restarts.pop_front();
        }
        let count = self.restarts.len();
        (count < intensity.restarts).then(|| {
            self.restarts.push_back(now);
            count
        })
    }
}

/// Starts a child, linked to the supervisor that it is given.
pub type StartChild = Box<dyn Fn(ActorCell) -> BoxFuture<'static, Result<ActorCell, ActorProcessingErr>> + Send + Sync>;

/// What a supervisor needs to know of a child.
pub struct ChildSpec {
    /// For logs and errors.
    pub name: &'static str,
    /// When it is started again.
    pub restart: Restart,
    /// How often at most.
    pub intensity: Intensity,
    /// How long it may take to stop before it is killed.
    pub stop_within: Duration,
    /// Starts it.
    pub start: StartChild,
}

impl fmt::Debug for ChildSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChildSpec").field("name", &self.name).field("restart", &self.restart).finish_non_exhaustive()
    }
}

impl ChildSpec {
    /// A child that is always restarted, within the default limits, and has five seconds to stop.
    pub fn new<F>(name: &'static str, start: impl Fn(ActorCell) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<ActorCell, ActorProcessingErr>> + Send + 'static,
    {
        Self {
            name,
            restart: Restart::Always,
            intensity: Intensity::default(),
            stop_within: Duration::from_secs(5),
            start: Box::new(move |supervisor| Box::pin(start(supervisor))),
        }
    }

    /// With another rule for restarts.
    #[must_use]
    pub fn restarted(mut self, restart: Restart) -> Self {
        self.restart = restart;
        self
    }

    /// With other limits.
    #[must_use]
    pub fn within(mut self, intensity: Intensity) -> Self {
        self.intensity = intensity;
        self
    }
}

/// Why a child does not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SuperviseError {
    /// It did not start the first time.
    #[error("{child} did not start: {reason}")]
    Start {
        /// Its name.
        child: &'static str,
        /// Its words.
        reason: ActorProcessingErr,
    },
    /// It ended too often. The supervisor should stop.
    #[error("{child} ended more than {restarts} times within {} s, the last time because: {reason}", within.as_secs())]
    TooOften {
        /// Its name.
        child: &'static str,
        /// The limit.
        restarts: usize,
        /// The period of the limit.
        within: Duration,
        /// What ended it last.
        reason: String,
    },
}

struct Child {
    spec: ChildSpec,
    cell: Option<ActorCell>,
    window: Window,
}

/// The children of one actor, in the order in which they were started.
pub struct Supervision {
    clock: Arc<dyn Clock>,
    children: Vec<Child>,
    stopping: bool,
}

impl Supervision {
    /// The first wait before a restart that follows another one closely; it doubles.
    const PAUSE_FIRST: Duration = Duration::from_millis(50);
    /// The longest wait before a restart.
    const PAUSE_MAX: Duration = Duration::from_secs(1);

    /// Without children.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, children: vec![], stopping: false }
    }

    /// Starts a child of `supervisor`.
    ///
    /// # Errors
    /// [`SuperviseError::Start`] with the child's words. It is not tried again.
    pub async fn start(&mut self, supervisor: &ActorCell, spec: ChildSpec) -> Result<ActorCell, SuperviseError> {
        let started = (spec.start)(supervisor.clone()).await;
        let cell = started.map_err(|reason| SuperviseError::Start { child: spec.name, reason })?;
        self.children.push(Child { spec, cell: Some(cell.clone()), window: Window::default() });
        Ok(cell)
    }

    /// The running child of that name, if there is one.
    pub fn child(&self, name: &str) -> Option<&ActorCell> {
        self.children.iter().find(|child| child.spec.name == name)?.cell.as_ref()
    }

    /// Takes note of an event that `supervisor` got, and starts the child again that it is about, if its rule says
    /// so. While a child is waited for, its siblings run and their events wait.
    ///
    /// # Errors
    /// [`SuperviseError::TooOften`] if the child's limits do not allow another restart.
    pub async fn handle(&mut self, supervisor: &ActorCell, event: SupervisionEvent) -> Result<(), SuperviseError> {
        let (who, failed, mut reason) = match event {
            SupervisionEvent::ActorTerminated(who, _, reason) => (who, false, reason.unwrap_or_else(|| "it stopped".to_owned())),
            SupervisionEvent::ActorFailed(who, error) => (who, true, error.to_string()),
            _ => return Ok(()),
        };
        let is_it = |child: &Child| child.cell.as_ref().is_some_and(|cell| cell.get_id() == who.get_id());
        let Some(child) = self.children.iter_mut().find(|child| is_it(child)) else { return Ok(()) };
        child.cell = None;
        let wanted = match child.spec.restart {
            Restart::Always => true,
            Restart::OnFailure => failed,
            Restart::Never => false,
        };
        if self.stopping || !wanted {
            return Ok(());
        }
        let name = child.spec.name;
        loop {
            let Some(count) = child.window.admit(self.clock.now(), child.spec.intensity) else {
                let Intensity { restarts, within } = child.spec.intensity;
                return Err(SuperviseError::TooOften { child: name, restarts, within, reason });
            };
            tracing::warn!(target: "shoal::supervise", child = name, %reason, "a part of the node has ended and is started again");
            if count > 0 {
                let doublings = u32::try_from(count - 1).unwrap_or(u32::MAX).min(16);
                let pause = (Self::PAUSE_FIRST * 2_u32.pow(doublings)).min(Self::PAUSE_MAX);
                self.clock.sleep_until(self.clock.now() + pause).await;
            }
            match (child.spec.start)(supervisor.clone()).await {
                Ok(cell) => {
                    child.cell = Some(cell);
                    return Ok(());
                }
                Err(error) => reason = format!("it did not start: {error}"),
            }
        }
    }

    /// Stops all children, the last started first, each after the one before it has ended. A child that does not stop
    /// in time is killed.
    pub async fn stop(&mut self, reason: &str) {
        self.stopping = true;
        for child in self.children.iter_mut().rev() {
            let Some(cell) = child.cell.take() else { continue };
            if cell.stop_and_wait(Some(reason.to_owned()), Some(child.spec.stop_within)).await.is_err() {
                tracing::warn!(target: "shoal::supervise", child = child.spec.name, "does not stop and is killed");
                // It cannot fail for a reason that we could do something about: the child ends or has ended.
                let _ = cell.kill_and_wait(Some(child.spec.stop_within)).await;
            }
        }
        self.children.clear();
    }
}

impl fmt::Debug for Supervision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.children.iter().map(|child| (child.spec.name, child.cell.is_some()))).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use ractor::{Actor, ActorRef};
    use tokio::sync::oneshot;

    use super::*;
    use crate::env::SystemClock;

    type Log = Arc<Mutex<Vec<String>>>;

    struct Worker(&'static str, Log);

    impl Actor for Worker {
        type Msg = &'static str;
        type State = ();
        type Arguments = ();

        async fn pre_start(&self, _: ActorRef<&'static str>, (): ()) -> Result<(), ActorProcessingErr> {
            self.1.lock().unwrap().push(format!("{} starts", self.0));
            Ok(())
        }

        async fn handle(&self, myself: ActorRef<&'static str>, message: &'static str, (): &mut ()) -> Result<(), ActorProcessingErr> {
            match message {
                "panic" => panic!("as told"),
                "stop" => myself.stop(None),
                _ => return Err("as told".into()),
            }
            Ok(())
        }

        async fn post_stop(&self, _: ActorRef<&'static str>, (): &mut ()) -> Result<(), ActorProcessingErr> {
            self.1.lock().unwrap().push(format!("{} stops", self.0));
            Ok(())
        }
    }

    struct Boss {
        log: Log,
        restart: Restart,
        intensity: Intensity,
        ended: Mutex<Option<oneshot::Sender<String>>>,
    }

    enum BossMessage {
        Tell(&'static str, &'static str),
        Stop,
    }

    impl Actor for Boss {
        type Msg = BossMessage;
        type State = Supervision;
        type Arguments = ();

        async fn pre_start(&self, myself: ActorRef<BossMessage>, (): ()) -> Result<Supervision, ActorProcessingErr> {
            let mut supervision = Supervision::new(Arc::new(SystemClock));
            for name in ["one", "two", "three"] {
                let log = Arc::clone(&self.log);
                let spec = ChildSpec::new(name, move |supervisor| {
                    let log = Arc::clone(&log);
                    async move { Ok(Worker::spawn_linked(None, Worker(name, log), (), supervisor).await?.0.get_cell()) }
                });
                supervision.start(&myself.get_cell(), spec.restarted(self.restart).within(self.intensity)).await?;
            }
            Ok(supervision)
        }

        async fn handle(
            &self,
            myself: ActorRef<BossMessage>,
            message: BossMessage,
            state: &mut Supervision,
        ) -> Result<(), ActorProcessingErr> {
            match message {
                BossMessage::Tell(child, what) => {
                    if let Some(cell) = state.child(child) {
                        cell.send_message(what)?;
                    } else {
                        self.log.lock().unwrap().push(format!("{child} is not there"));
                    }
                }
                BossMessage::Stop => {
                    state.stop("test").await;
                    myself.stop(None);
                }
            }
            Ok(())
        }

        async fn handle_supervisor_evt(
            &self,
            myself: ActorRef<BossMessage>,
            event: SupervisionEvent,
            state: &mut Supervision,
        ) -> Result<(), ActorProcessingErr> {
            if let Err(error) = state.handle(&myself.get_cell(), event).await {
                if let Some(ended) = self.ended.lock().unwrap().take() {
                    ended.send(error.to_string()).unwrap();
                }
                myself.stop(None);
            }
            Ok(())
        }
    }

    async fn boss(
        restart: Restart,
        restarts: usize,
    ) -> (ActorRef<BossMessage>, tokio::task::JoinHandle<()>, Log, oneshot::Receiver<String>) {
        let (ended, end) = oneshot::channel();
        let log = Log::default();
        let intensity = Intensity { restarts, within: Duration::from_secs(60) };
        let boss = Boss { log: Arc::clone(&log), restart, intensity, ended: Mutex::new(Some(ended)) };
        let (actor, done) = Boss::spawn(None, boss, ()).await.unwrap();
        (actor, done, log, end)
    }

    async fn until(log: &Log, length: usize) {
        while log.lock().unwrap().len() < length {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn one_is_restarted_and_all_stop_backwards() {
        let (actor, done, log, _end) = boss(Restart::Always, 5).await;
        actor.send_message(BossMessage::Tell("two", "panic")).unwrap();
        until(&log, 4).await;
        actor.send_message(BossMessage::Tell("two", "fail")).unwrap();
        until(&log, 5).await;
        actor.send_message(BossMessage::Stop).unwrap();
        done.await.unwrap();
        let expected = ["one starts", "two starts", "three starts", "two starts", "two starts", "three stops", "two stops", "one stops"];
        assert_eq!(*log.lock().unwrap(), expected);
    }

    #[tokio::test]
    async fn enough_is_enough() {
        let (actor, done, log, end) = boss(Restart::Always, 2).await;
        for restarts in 0..2 {
            actor.send_message(BossMessage::Tell("one", "fail")).unwrap();
            until(&log, 4 + restarts).await;
        }
        actor.send_message(BossMessage::Tell("one", "fail")).unwrap();
        assert_eq!(end.await.unwrap(), "one ended more than 2 times within 60 s, the last time because: as told");
        done.await.unwrap();
    }

    #[tokio::test]
    async fn a_child_that_may_stop_stays_stopped() {
        let (actor, done, log, _end) = boss(Restart::OnFailure, 2).await;
        actor.send_message(BossMessage::Tell("three", "stop")).unwrap();
        until(&log, 4).await;
        loop {
            actor.send_message(BossMessage::Tell("three", "stop")).unwrap();
            tokio::time::sleep(Duration::from_millis(1)).await;
            if log.lock().unwrap().last().unwrap() == "three is not there" {
                break;
            }
        }
        actor.send_message(BossMessage::Stop).unwrap();
        done.await.unwrap();
        let starts = log.lock().unwrap().iter().filter(|line| line.ends_with("three starts")).count();
        assert_eq!(starts, 1);
    }

    #[test]
    fn restarts_long_ago_do_not_count() {
        let intensity = Intensity { restarts: 2, within: Duration::from_secs(10) };
        let at = |seconds| Instant::ZERO + Duration::from_secs(seconds);
        let mut window = Window::default();
        assert_eq!([0, 1, 2, 9].map(|second| window.admit(at(second), intensity)), [Some(0), Some(1), None, None]);
        assert_eq!(window.admit(at(10), intensity), Some(1));
        assert_eq!(window.admit(at(30), intensity), Some(0));
    }
}
