//! The dialling end's keeper: a thread around [`Caller`], and a short-lived one for each link that is made.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use super::estimate::Sample;
use super::hop::{Hop, Owner};
use super::machine::{Action, Caller, Event, Failure, PathOptions, Prospect};
use super::route::{Route, measure};
use super::tickets::ticket;
use super::wire::{HEAD_BYTES, Said};
use super::{Down, Keeper, Opening, PathError};
use crate::Effects;
use crate::env::Instant;
use crate::link::{CloseReason, Link, LinkOptions, RecvError};
use crate::provider::Ticket;

/// How often the link in use is looked at, for ends that nobody waited for.
const LOOK: Duration = Duration::from_millis(100);
/// The same, while something is to be repeated on a new link.
const LOOK_BEHIND: Duration = Duration::from_millis(5);
/// How often the traffic is told to the machine.
const COUNT: Duration = Duration::from_secs(1);
/// How long a link that was made waits to be asked for.
const KEPT: Duration = Duration::from_secs(10);

/// What a keeper is told.
pub(super) enum Notice {
    Made { attempt: u64 },
    Measured { attempt: u64, sample: Sample },
    Taken { attempt: u64, link: Arc<dyn Link> },
    Failed { attempt: u64, failure: Failure, reason: String },
    Lost { epoch: u64, reason: String },
    Stop,
}

/// What becomes of a link that was made.
struct Take {
    epoch: u64,
    until: Instant,
}

/// Makes the first link of a hop to a peer that [`expect`](super::expect)s it with the same secret, and keeps the hop
/// on the best of `routes` from then on. Blocks until there is a link.
///
/// # Errors
/// [`PathError`]: the reasons of each route, if there is none by `deadline`.
pub fn dial(
    routes: Vec<Arc<dyn Route>>,
    secret: &Ticket,
    link: LinkOptions,
    options: PathOptions,
    effects: &Effects,
    deadline: Instant,
) -> Result<Opening, PathError> {
    let (notices, heard) = channel();
    let hop = Hop::new(effects.clone(), Owner::Caller(notices.clone()));
    let prospects: Vec<_> = routes.iter().map(|route| Prospect { estimate: route.guess(), spare: route.is_spare() }).collect();
    let caller = Caller::new(options, &prospects, effects.clock.now(), deadline);
    let keeping = Keeping {
        hop: Arc::clone(&hop),
        routes,
        secret: secret.clone(),
        link,
        caller,
        notices: notices.clone(),
        orders: BTreeMap::new(),
        taken: BTreeMap::new(),
        behind: None,
        lost: None,
        counted: (effects.clock.now(), 0, 0),
    };
    let wake = Box::new(move || drop(notices.send(Notice::Stop)));
    let keeper = Keeper::start(&hop, wake, Box::new(move || keeping.run(&heard)))?;
    Opening::wait(hop, keeper, deadline)
}

struct Keeping {
    hop: Arc<Hop>,
    routes: Vec<Arc<dyn Route>>,
    secret: Ticket,
    link: LinkOptions,
    caller: Caller,
    notices: Sender<Notice>,
    /// To the threads whose links wait.
    orders: BTreeMap<u64, Sender<Take>>,
    /// Links that were taken and are to carry next.
    taken: BTreeMap<u64, Arc<dyn Link>>,
    /// Since when something may have to be repeated on the present link.
    behind: Option<Instant>,
    /// Why there is no link.
    lost: Option<String>,
    /// When traffic was counted last, on the link of which epoch, and its bytes then.
    counted: (Instant, u64, u64),
}

impl Keeping {
    fn run(mut self, heard: &Receiver<Notice>) {
        let first = self.caller.tick(self.now());
        self.act(first);
        while self.hop.down().is_none() {
            // A receiving end that is busy with something else is not asked again and again.
            let look = self.behind.map_or(LOOK, |since| (self.now().since(since) / 4).clamp(LOOK_BEHIND, LOOK));
            let wake = self.caller.wake_at().map_or(look, |at| at.since(self.now()));
            let actions = match heard.recv_timeout(wake.clamp(Duration::from_millis(1), look)) {
                Ok(Notice::Stop) | Err(RecvTimeoutError::Disconnected) => break,
                Ok(notice) => self.hear(notice),
                Err(RecvTimeoutError::Timeout) => self.caller.tick(self.now()),
            };
            self.act(actions);
            self.look();
        }
        // Links that wait are closed by the threads that hold them, which hear that nobody will ask.
    }

    fn now(&self) -> Instant {
        self.hop.effects.clock.now()
    }

    fn hear(&mut self, notice: Notice) -> Vec<Action> {
        let event = match notice {
            Notice::Made { attempt } => Event::Made { attempt },
            Notice::Measured { attempt, sample } => {
                self.orders.remove(&attempt);
                tracing::trace!(target: "shoal::path", ?sample, "a way was measured");
                Event::Measured { attempt, sample }
            }
            Notice::Taken { attempt, link } => {
                self.orders.remove(&attempt);
                self.taken.insert(attempt, link);
                Event::Taken { attempt }
            }
            Notice::Failed { attempt, failure, reason } => {
                self.orders.remove(&attempt);
                tracing::debug!(target: "shoal::path", %reason, "a way gave no link");
                Event::Failed { attempt, failure, reason }
            }
            Notice::Lost { epoch, reason } => return self.lose(epoch, reason),
            Notice::Stop => return Vec::new(),
        };
        self.caller.handle(self.now(), event)
    }

    fn lose(&mut self, epoch: u64, reason: String) -> Vec<Action> {
        if let Some((_, way)) = self.caller.current().filter(|(current, _)| *current == epoch) {
            tracing::info!(target: "shoal::path", way = %self.label(way), %reason, "a tensor link is gone");
            self.lost = Some(reason.clone());
        }
        self.caller.handle(self.now(), Event::Lost { epoch, reason })
    }

    fn label(&self, way: usize) -> String {
        self.routes.get(way).map(|route| route.label()).unwrap_or_default()
    }

    /// Looks at the link in use.
    fn look(&mut self) {
        let Some(current) = self.hop.current() else { return };
        let health = current.link.health();
        if let Some(reason) = health.closed
            && self.caller.current().is_some_and(|(epoch, _)| epoch == current.epoch)
        {
            let actions = self.lose(current.epoch, reason.to_string());
            self.act(actions);
            return;
        }
        if self.behind.is_some() && self.hop.catch_up(LOOK_BEHIND) {
            self.behind = None;
        }
        let now = self.now();
        let (since, epoch, before) = self.counted;
        let bytes = health.sent_bytes;
        if now.since(since) < COUNT {
            return;
        }
        self.counted = (now, current.epoch, bytes);
        let usual = self.hop.usual_bytes();
        let mut actions = Vec::new();
        if usual > 0 {
            actions = self.caller.handle(now, Event::Message { bytes: usual });
        }
        if epoch == current.epoch {
            let traffic = Event::Traffic { bytes: bytes.saturating_sub(before), over: now.since(since) };
            actions.extend(self.caller.handle(now, traffic));
        }
        self.act(actions);
    }

    fn act(&mut self, actions: Vec<Action>) {
        let mut actions = std::collections::VecDeque::from(actions);
        while let Some(action) = actions.pop_front() {
            match action {
                Action::Dial { attempt, way, number, measure, until } => {
                    if let Err(error) = self.dial(attempt, way, number, measure, until) {
                        let failed = Event::Failed { attempt, failure: Failure::Unreached, reason: error.to_string() };
                        actions.extend(self.caller.handle(self.now(), failed));
                    }
                }
                Action::Take { attempt, epoch, until } => {
                    let told = self.orders.get(&attempt).is_some_and(|order| order.send(Take { epoch, until }).is_ok());
                    if !told {
                        let failed = Event::Failed { attempt, failure: Failure::Unknown, reason: "its link is gone".to_owned() };
                        actions.extend(self.caller.handle(self.now(), failed));
                    }
                }
                // Its thread hears that nobody will ask.
                Action::Drop { attempt } => drop(self.orders.remove(&attempt)),
                Action::Carry { attempt, epoch } => {
                    let Some(link) = self.taken.remove(&attempt) else { continue };
                    let way = self.caller.current().map_or(0, |(_, way)| way);
                    tracing::info!(target: "shoal::path", way = %self.label(way), epoch, "a tensor link carries the hop");
                    if self.hop.publish(epoch, link) {
                        self.behind = Some(self.now());
                    }
                }
                Action::Down { reasons } => {
                    let ways = reasons.into_iter().map(|(way, reason)| format!("{}: {reason}", self.label(way)));
                    let ways: Vec<String> = ways.collect();
                    let ways = if ways.is_empty() { "there is no way to dial".to_owned() } else { ways.join("; ") };
                    let lost = self.lost.clone();
                    self.hop.go_down(Down::NoWay { lost, ways });
                }
            }
        }
    }

    fn dial(&mut self, attempt: u64, way: usize, number: u64, measure: bool, until: Instant) -> std::io::Result<()> {
        let Some(route) = self.routes.get(way).cloned() else { return Ok(()) };
        let (order, orders) = channel();
        let dialling = Dialling {
            attempt,
            route,
            ticket: ticket(&self.secret, number),
            link: self.link,
            measure,
            until,
            effects: self.hop.effects.clone(),
            notices: self.notices.clone(),
        };
        // Nobody waits for it: it ends by its deadline, and holds nothing that outlives it.
        drop(self.hop.effects.spawner.thread("tensor dial".to_owned(), Box::new(move || dialling.run(&orders)))?);
        self.orders.insert(attempt, order);
        Ok(())
    }
}

/// One link on its way.
struct Dialling {
    attempt: u64,
    route: Arc<dyn Route>,
    ticket: Ticket,
    link: LinkOptions,
    measure: bool,
    until: Instant,
    effects: Effects,
    notices: Sender<Notice>,
}

impl Dialling {
    fn run(self, orders: &Receiver<Take>) {
        let attempt = self.attempt;
        let link = match self.route.dial(&self.ticket, self.link, self.until) {
            Ok(link) => link,
            Err(error) => return self.tell(Notice::Failed { attempt, failure: error.failure, reason: error.reason }),
        };
        self.tell(Notice::Made { attempt });
        let clock = &*self.effects.clock;
        let failed = |reason| Notice::Failed { attempt, failure: Failure::Unknown, reason };
        if self.measure {
            let end = match measure(&*link, clock, self.until) {
                Ok(sample) => Notice::Measured { attempt, sample },
                Err(reason) => failed(reason),
            };
            link.close(CloseReason::Local);
            return self.tell(end);
        }
        // A hop that is gone hangs up, which ends this wait at once.
        let Ok(Take { epoch, until }) = orders.recv_timeout(KEPT) else { return link.close(CloseReason::Local) };
        match ask(&*link, epoch, until) {
            Ok(()) => self.tell(Notice::Taken { attempt, link }),
            Err(reason) => {
                link.close(CloseReason::Local);
                self.tell(failed(reason));
            }
        }
    }

    fn tell(&self, notice: Notice) {
        if let Err(unheard) = self.notices.send(notice)
            && let Notice::Taken { link, .. } = unheard.0
        {
            link.close(CloseReason::Local);
        }
    }
}

/// Asks the accepting end to go on with this link.
fn ask(link: &dyn Link, epoch: u64, until: Instant) -> Result<(), String> {
    link.send(&[&Said::Take(epoch).encode(&[])], until).map_err(|error| error.to_string())?;
    let mut answer = [0; HEAD_BYTES];
    match link.recv(&mut answer, until) {
        Ok(bytes) => match Said::decode(&answer[..bytes]) {
            Some(Said::Taken(taken)) if taken == epoch => Ok(()),
            Some(Said::Stale(_)) => Err("the peer goes on with another link".to_owned()),
            _ => Err("the link damages what it carries".to_owned()),
        },
        Err(RecvError::Deadline) => Err("the peer did not say in time that it goes on with this link".to_owned()),
        Err(RecvError::Closed(reason)) => Err(reason.to_string()),
    }
}
