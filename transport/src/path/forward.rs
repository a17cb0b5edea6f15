//! A detour: where no link leads from one node to another, a third one that both reach passes messages on.
//!
//! The node in the middle is asked over the control stream, by the dialling end of a hop, with one ticket of that hop. It dials the
//! accepting end with it, and gives the dialling end a ticket of its own: nobody else gets in, and it learns no other
//! ticket of the hop. From then on it passes whole messages on, both ways, one at a time in each direction, so that its
//! memory is bounded and a slow end slows the other down. What the ends say to each other, measurements included, goes through
//! as it is; the frames' checks are theirs. It sees what it passes on.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::estimate::Estimate;
use super::machine::Failure;
use super::route::{Route, RouteError};
use crate::Effects;
use crate::env::{Instant, Join};
use crate::link::{CloseReason, Link, LinkOptions, RecvError, SendError, lock};
use crate::provider::{Endpoint, ExpectError, Expected, Provider, Ticket};

/// How long to wait for a message before looking round. What ends a link also ends the wait.
const IDLE: Duration = Duration::from_secs(3600);
/// How long a message may wait for the receiving link before the sending one is looked at.
const BUSY: Duration = Duration::from_millis(500);
/// How long whoever asked for a detour may take to come.
const COME_MAX: Duration = Duration::from_secs(5);

/// Why there is no detour.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// The accepting end was not reached.
    #[error("no way onward: {}", .0.reason)]
    Onward(RouteError),
    /// The asking end cannot be expected.
    #[error(transparent)]
    Expect(#[from] ExpectError),
    /// No thread could be started.
    #[error("cannot start a thread for a detour: {0}")]
    Thread(std::io::Error),
}

/// What a detour has passed on, from the end that asked for it and to it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Passed {
    /// Messages of the asking end.
    pub messages_out: u64,
    /// Their bytes.
    pub bytes_out: u64,
    /// Messages of the accepting end.
    pub messages_back: u64,
    /// Their bytes.
    pub bytes_back: u64,
}

#[derive(Default)]
struct Lane {
    messages: AtomicU64,
    bytes: AtomicU64,
}

/// What the threads of a detour have in common.
struct Shared {
    links: Mutex<Vec<Arc<dyn Link>>>,
    lanes: [Lane; 2],
    ended: Mutex<bool>,
}

impl Shared {
    /// Notes a link that ends with the detour; `false` if that has ended.
    fn keep(&self, link: &Arc<dyn Link>) -> bool {
        let ended = lock(&self.ended);
        if *ended {
            link.close(CloseReason::Local);
            return false;
        }
        lock(&self.links).push(Arc::clone(link));
        true
    }

    fn end(&self) {
        *lock(&self.ended) = true;
        for link in lock(&self.links).drain(..) {
            link.close(CloseReason::Local);
        }
    }
}

/// A detour over this node. Dropping it ends it.
pub struct Detour {
    shared: Arc<Shared>,
    cancel: crate::provider::Canceller,
    thread: Option<Box<dyn Join>>,
}

impl Detour {
    /// What went through.
    pub fn passed(&self) -> Passed {
        let [out, back] = &self.shared.lanes;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Passed {
            messages_out: read(&out.messages),
            bytes_out: read(&out.bytes),
            messages_back: read(&back.messages),
            bytes_back: read(&back.bytes),
        }
    }

    /// Whether it has ended: either end has left, or nobody came.
    pub fn has_ended(&self) -> bool {
        *lock(&self.shared.ended)
    }
}

impl fmt::Debug for Detour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Detour").field("passed", &self.passed()).field("ended", &self.has_ended()).finish_non_exhaustive()
    }
}

impl Drop for Detour {
    fn drop(&mut self) {
        self.shared.end();
        self.cancel.cancel();
        if let Some(thread) = self.thread.take() {
            thread.join();
        }
    }
}

/// Opens a detour over this node: dials the accepting end by the first of `onward` that works, with the ticket that the asking end
/// handed over, and expects the asking end at `desk`. Gives what that has to show there. Blocks, at most until `deadline`.
///
/// # Errors
/// [`ForwardError`].
pub fn forward(
    desk: &Arc<dyn Provider>,
    onward: &[Arc<dyn Route>],
    ticket: &Ticket,
    link: LinkOptions,
    effects: &Effects,
    deadline: Instant,
) -> Result<(Ticket, Detour), ForwardError> {
    let mut failed = RouteError { failure: Failure::Unreached, reason: "no way leads there".to_owned() };
    let mut far = None;
    for (left, route) in (1..=onward.len()).rev().zip(onward) {
        let now = effects.clock.now();
        let share = deadline.since(now) / u32::try_from(left).unwrap_or(u32::MAX);
        match route.dial(ticket, link, now + share) {
            Ok(link) => {
                far = Some(link);
                break;
            }
            Err(error) => {
                let known = !matches!(failed.failure, Failure::Unreached | Failure::Gone);
                failed = RouteError { failure: if known { failed.failure } else { error.failure }, reason: error.reason };
            }
        }
    }
    let far = far.ok_or(ForwardError::Onward(failed))?;
    let own = Ticket::random(&*effects.rng);
    let expected = desk.expect(&own, link)?;
    let shared = Arc::new(Shared { links: Mutex::default(), lanes: Default::default(), ended: Mutex::new(false) });
    shared.keep(&far);
    let cancel = expected.canceller();
    let (passing, effects) = (Arc::clone(&shared), effects.clone());
    let spawner = Arc::clone(&effects.spawner);
    let body = Box::new(move || {
        pass_both(&passing, &expected, &far, link, &effects);
        passing.end();
    });
    match spawner.thread("tensor detour".to_owned(), body) {
        Ok(thread) => Ok((own, Detour { shared, cancel, thread: Some(thread) })),
        Err(error) => {
            shared.end();
            Err(ForwardError::Thread(error))
        }
    }
}

fn pass_both(shared: &Arc<Shared>, expected: &Expected, far: &Arc<dyn Link>, link: LinkOptions, effects: &Effects) {
    let Ok(near) = expected.accept(effects.after(COME_MAX)) else { return };
    if !shared.keep(&near) {
        return;
    }
    let back = {
        let (shared, near, far, effects) = (Arc::clone(shared), Arc::clone(&near), Arc::clone(far), effects.clone());
        let spawner = Arc::clone(&effects.spawner);
        let body = Box::new(move || {
            pass(&*far, &*near, link, &shared.lanes[1], &effects);
            shared.end();
        });
        spawner.thread("tensor detour".to_owned(), body)
    };
    let Ok(back) = back else { return };
    pass(&*near, &**far, link, &shared.lanes[0], effects);
    shared.end();
    back.join();
}

/// Passes messages on until one of the links ends.
fn pass(from: &dyn Link, to: &dyn Link, link: LinkOptions, lane: &Lane, effects: &Effects) {
    // Taken from the system as it is first written to.
    let mut buffer = vec![0; usize::try_from(link.message_bytes_max).unwrap_or(0)];
    loop {
        let bytes = match from.recv(&mut buffer, effects.after(IDLE)) {
            Ok(bytes) => bytes,
            Err(RecvError::Deadline) => continue,
            Err(RecvError::Closed(_)) => return,
        };
        loop {
            match to.send(&[&buffer[..bytes]], effects.after(BUSY)) {
                Ok(()) => break,
                Err(SendError::Deadline) if from.health().closed.is_none() => {}
                Err(_) => return,
            }
        }
        lane.messages.fetch_add(1, Ordering::Relaxed);
        lane.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Asks a node for a detour to the peer of a hop, over the control stream. Blocks.
pub trait Ask: Send + Sync + fmt::Debug + 'static {
    /// Has the node dial the peer with this ticket; gives where it expects this node, and what to show there.
    ///
    /// # Errors
    /// [`RouteError`].
    fn ask(&self, ticket: &Ticket, options: LinkOptions, deadline: Instant) -> Result<(Vec<Endpoint>, Ticket), RouteError>;

    /// Which node, for people.
    fn label(&self) -> String;
}

/// A way to a peer over a third node.
#[derive(Debug)]
pub struct Around {
    ask: Arc<dyn Ask>,
    providers: Vec<Arc<dyn Provider>>,
    effects: Effects,
}

impl Around {
    /// Over the node that `ask` asks, which this node reaches by `providers`, best first.
    pub fn new(ask: Arc<dyn Ask>, providers: Vec<Arc<dyn Provider>>, effects: Effects) -> Self {
        Self { ask, providers, effects }
    }
}

impl Route for Around {
    fn dial(&self, ticket: &Ticket, options: LinkOptions, deadline: Instant) -> Result<Arc<dyn Link>, RouteError> {
        let (endpoints, own) = self.ask.ask(ticket, options, deadline)?;
        let ways = self.providers.iter().flat_map(|provider| {
            endpoints.iter().filter(|endpoint| endpoint.kind() == provider.kind()).map(move |endpoint| (provider, endpoint))
        });
        let ways: Vec<_> = ways.collect();
        let mut reasons = Vec::new();
        for (left, (provider, endpoint)) in (1..=ways.len()).rev().zip(&ways) {
            let now = self.effects.clock.now();
            let share = deadline.since(now) / u32::try_from(left).unwrap_or(u32::MAX);
            match provider.dial(endpoint, &own, options, now + share) {
                Ok(link) => return Ok(link),
                Err(error) => reasons.push(error.to_string()),
            }
        }
        // The peer has been dialled with the hop's ticket.
        Err(RouteError { failure: Failure::Unknown, reason: format!("{} is not reached: {}", self.label(), reasons.join(", ")) })
    }

    /// Twice a network's.
    fn guess(&self) -> Estimate {
        Estimate::guess(Duration::from_micros(500), 5e7)
    }

    fn is_spare(&self) -> bool {
        true
    }

    fn label(&self) -> String {
        format!("over {}", self.ask.label())
    }
}
