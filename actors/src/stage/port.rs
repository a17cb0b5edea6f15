//! The conductor's end of the pipeline: steps go to the first stage, tokens come back from the last.
//!
//! Two threads shield the scheduler actor from waiting on the network. The queue between them is no longer than the
//! steps that may be in flight.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use shoal_transport::Effects;
use shoal_transport::frame::Fence;
use shoal_transport::path::{self, Expecting};
use shoal_transport::provider::{Endpoint, Ticket};

use super::links::{LINK_TIMEOUT, LinkFailure, TensorLinks};
use super::message::{KIND_STEP, KIND_TOKENS, Tokens};
use crate::env::Spawner;
use crate::ids::NodeId;

/// How long the first stage may leave a step lying.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a receiving thread waits before it looks whether its port was closed.
const IDLE: Duration = Duration::from_millis(500);

/// Why a step was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PortError {
    /// The first stage takes no more.
    #[error("the first stage does not take steps: {0} are waiting for it")]
    Full(usize),
    /// The port is closed.
    #[error("the link to the first stage is closed")]
    Closed,
}

/// Takes encoded steps. Dropping it closes the pipeline.
pub struct PortSender(Box<dyn Fn(Vec<u8>) -> Result<(), PortError> + Send>);

impl fmt::Debug for PortSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PortSender")
    }
}

impl PortSender {
    /// Hands steps to `take`, which must not block. It is dropped with the sender.
    pub fn new(take: impl Fn(Vec<u8>) -> Result<(), PortError> + Send + 'static) -> Self {
        Self(Box::new(take))
    }

    /// Queues a step. Never blocks.
    ///
    /// # Errors
    /// [`PortError`] if it was not taken.
    pub fn send(&self, step: Vec<u8>) -> Result<(), PortError> {
        (self.0)(step)
    }
}

/// Ends a running port.
#[derive(Clone)]
pub struct PortCloser(Arc<dyn Fn() + Send + Sync>);

impl fmt::Debug for PortCloser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PortCloser")
    }
}

impl PortCloser {
    /// Closes with `close`, which may be called again and again.
    pub fn new(close: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(close))
    }

    /// Closes both links: the stages at their other ends notice.
    pub fn close(&self) {
        (self.0)();
    }
}

/// What the port's threads report to.
pub struct PortEvents {
    /// An answer of the last stage.
    pub tokens: Box<dyn Fn(Tokens) + Send>,
    /// A link is gone; the text says which and why.
    pub broken: Arc<dyn Fn(String) + Send + Sync>,
}

impl fmt::Debug for PortEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PortEvents")
    }
}

/// Starts what carries steps and answers, for answers of at most so many tokens.
pub type PortStart = Box<dyn FnOnce(usize, PortEvents) -> std::io::Result<()> + Send>;

/// The two ends of the pipeline, connected but not running yet.
pub struct Port {
    closer: PortCloser,
    start: PortStart,
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Port")
    }
}

/// Where the pipeline's ends are.
#[derive(Debug)]
pub struct PortPlan {
    /// What the arrangement's frames carry.
    pub fence: Fence,
    /// The first stage's holder.
    pub first: NodeId,
    /// Where it takes its link.
    pub first_endpoints: Vec<Endpoint>,
    /// What it expects.
    pub first_ticket: Ticket,
    /// Longest step message, in bytes.
    pub step_bytes: u32,
    /// Steps in flight at most.
    pub depth: usize,
}

impl Port {
    /// A port that `closer` ends and `start` sets running.
    pub fn new(closer: PortCloser, start: PortStart) -> Self {
        Self { closer, start }
    }

    /// Connects both ends over tensor links: `last` is the one that the last stage was told to make, with messages of at
    /// most `token_bytes` bytes. Blocks for at most [`LINK_TIMEOUT`] each.
    ///
    /// # Errors
    /// [`LinkFailure`] or what kept a channel from opening, in words.
    pub(super) fn connect(
        links: &TensorLinks,
        spawner: Arc<dyn Spawner>,
        plan: PortPlan,
        last: Expecting,
        token_bytes: u32,
    ) -> Result<(PortSender, Self), String> {
        let words = |error: &dyn fmt::Display| error.to_string();
        let first =
            links.dial(plan.first, &plan.first_endpoints, &plan.first_ticket, plan.step_bytes).map_err(|e: LinkFailure| words(&e))?;
        let last = last.accept(links.effects().after(LINK_TIMEOUT)).map_err(|e| format!("the last stage did not connect: {e}"))?;
        let closers = [first.closer(), last.closer()];
        let closer = PortCloser::new(move || closers.iter().for_each(path::PathCloser::close));
        let sender = first.sender(plan.fence, TensorLinks::options(plan.step_bytes)).map_err(|e| words(&e))?;
        let receiver = last.receiver(plan.fence, TensorLinks::options(token_bytes)).map_err(|e| words(&e))?;
        let depth = plan.depth + 1;
        let (steps, queue) = mpsc::sync_channel(depth);
        let take = move |step: Vec<u8>| {
            steps.try_send(step).map_err(|error| match error {
                mpsc::TrySendError::Full(_) => PortError::Full(depth),
                mpsc::TrySendError::Disconnected(_) => PortError::Closed,
            })
        };
        let threads = Threads { effects: links.effects().clone(), sender, receiver, closer: closer.clone(), queue };
        let start: PortStart = Box::new(move |sequences_max, events| threads.start(&*spawner, sequences_max, events));
        Ok((PortSender::new(take), Self { closer, start }))
    }

    /// What ends it from outside.
    pub fn closer(&self) -> PortCloser {
        self.closer.clone()
    }

    /// Sets it running. `sequences_max` bounds the tokens of an answer.
    ///
    /// # Errors
    /// The system's, if it cannot start a thread.
    pub fn start(self, sequences_max: usize, events: PortEvents) -> std::io::Result<()> {
        (self.start)(sequences_max, events)
    }
}

/// A port over tensor links, connected.
struct Threads {
    effects: Effects,
    sender: path::PathSender,
    receiver: path::PathReceiver,
    closer: PortCloser,
    queue: mpsc::Receiver<Vec<u8>>,
}

impl Threads {
    fn start(self, spawner: &dyn Spawner, sequences_max: usize, events: PortEvents) -> std::io::Result<()> {
        let Self { effects, mut sender, mut receiver, closer, queue } = self;
        let PortEvents { tokens, broken } = events;
        let (time, lost) = (effects.clone(), Arc::clone(&broken));
        // While no step is on its way, nobody else would notice that the first stage is gone.
        let (idle, both) = (Arc::clone(&broken), closer.clone());
        sender.when_down(move |down| {
            idle(format!("the link to the first stage is gone: {down}"));
            both.close();
        });
        spawner.thread(
            "shoal-steps".to_owned(),
            Box::new(move || {
                while let Ok(step) = queue.recv() {
                    if let Err(error) = sender.send(KIND_STEP, &[&step], time.after(SEND_TIMEOUT)) {
                        lost(format!("the link to the first stage is gone: {error}"));
                        break;
                    }
                }
                closer.close();
            }),
        )?;
        spawner.thread(
            "shoal-tokens".to_owned(),
            Box::new(move || {
                let reason = loop {
                    let received = match receiver.recv(effects.after(IDLE)) {
                        Ok(received) => received,
                        Err(path::RecvError::Deadline) => continue,
                        Err(error) => break format!("the link from the last stage is gone: {error}"),
                    };
                    if received.kind() != KIND_TOKENS {
                        break format!("the last stage sent a message of unknown kind {}", received.kind());
                    }
                    match Tokens::decode(received.payload(), sequences_max) {
                        Ok(answer) => tokens(answer),
                        Err(error) => break format!("the last stage sent a malformed answer: {error}"),
                    }
                };
                broken(reason);
            }),
        )?;
        Ok(())
    }
}
