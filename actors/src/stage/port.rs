//! The conductor's end of the pipeline: steps go to the first stage, tokens come back from the last.
//!
//! Two threads shield the scheduler actor from waiting on the network. The queue between them is no longer than the
//! steps that may be in flight.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use shoal_transport::channel;
use shoal_transport::frame::Fence;
use shoal_transport::link::LinkCloser;
use shoal_transport::provider::{Endpoint, Expected, Ticket};

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
#[derive(Debug)]
pub struct PortSender {
    queue: mpsc::SyncSender<Vec<u8>>,
    depth: usize,
}

impl PortSender {
    /// Queues a step. Never blocks.
    ///
    /// # Errors
    /// [`PortError`] if it was not taken.
    pub fn send(&self, step: Vec<u8>) -> Result<(), PortError> {
        self.queue.try_send(step).map_err(|error| match error {
            mpsc::TrySendError::Full(_) => PortError::Full(self.depth),
            mpsc::TrySendError::Disconnected(_) => PortError::Closed,
        })
    }
}

/// Ends the port's threads.
#[derive(Clone, Debug)]
pub struct PortCloser(Vec<LinkCloser>);

impl PortCloser {
    /// Closes both links: the stages at their other ends notice.
    pub fn close(&self) {
        self.0.iter().for_each(LinkCloser::close);
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

/// The two ends of the pipeline, connected but not running yet.
#[derive(Debug)]
pub struct Port {
    sender: channel::Sender,
    receiver: channel::Receiver,
    closer: PortCloser,
    queue: mpsc::Receiver<Vec<u8>>,
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
    /// The link that the last stage was told to make.
    pub last: Expected,
    /// Longest tokens message, in bytes.
    pub token_bytes: u32,
    /// Steps in flight at most.
    pub depth: usize,
}

impl Port {
    /// Connects both ends. Blocks for at most [`LINK_TIMEOUT`] each.
    ///
    /// # Errors
    /// [`LinkFailure`] or what kept a channel from opening, in words.
    pub fn connect(links: &TensorLinks, plan: PortPlan) -> Result<(PortSender, Self), String> {
        let words = |error: &dyn fmt::Display| error.to_string();
        let first =
            links.dial(plan.first, &plan.first_endpoints, &plan.first_ticket, plan.step_bytes).map_err(|e: LinkFailure| words(&e))?;
        let last = plan.last.accept(links.effects().after(LINK_TIMEOUT)).map_err(|e| format!("the last stage did not connect: {e}"))?;
        let closer = PortCloser(vec![LinkCloser::new(&first), LinkCloser::new(&last)]);
        let sender = channel::sender(first, plan.fence, TensorLinks::options(plan.step_bytes), links.effects()).map_err(|e| words(&e))?;
        let receiver =
            channel::receiver(last, plan.fence, TensorLinks::options(plan.token_bytes), links.effects()).map_err(|e| words(&e))?;
        let depth = plan.depth + 1;
        let (steps, queue) = mpsc::sync_channel(depth);
        Ok((PortSender { queue: steps, depth }, Self { sender, receiver, closer, queue }))
    }

    /// What ends it from outside.
    pub fn closer(&self) -> PortCloser {
        self.closer.clone()
    }

    /// Starts the threads. `sequences_max` bounds the tokens of an answer.
    ///
    /// # Errors
    /// The system's, if it cannot start a thread.
    pub fn start(self, links: &TensorLinks, spawner: &dyn Spawner, sequences_max: usize, events: PortEvents) -> std::io::Result<()> {
        let Self { mut sender, mut receiver, closer, queue } = self;
        let PortEvents { tokens, broken } = events;
        let (effects, lost) = (links.effects().clone(), Arc::clone(&broken));
        spawner.thread(
            "shoal-steps".to_owned(),
            Box::new(move || {
                while let Ok(step) = queue.recv() {
                    if let Err(error) = sender.send(KIND_STEP, &[&step], effects.after(SEND_TIMEOUT)) {
                        lost(format!("the link to the first stage is gone: {error}"));
                        break;
                    }
                }
                closer.close();
            }),
        )?;
        let effects = links.effects().clone();
        spawner.thread(
            "shoal-tokens".to_owned(),
            Box::new(move || {
                let reason = loop {
                    let received = match receiver.recv(effects.after(IDLE)) {
                        Ok(received) => received,
                        Err(channel::RecvError::Deadline) => continue,
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
