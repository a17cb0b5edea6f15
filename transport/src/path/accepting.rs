//! The accepting end's keeper: a thread that expects the hop's next links, and a short-lived one for each that comes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::follower::{Follower, Verdict};
use super::hop::{Hop, Owner, Waited};
use super::machine::PathOptions;
use super::route::LOAD_MAX;
use super::tickets::ticket;
use super::wire::{HEAD_BYTES, Said};
use super::{Down, Keeper, Opening, PathError};
use crate::Effects;
use crate::env::Instant;
use crate::link::{CloseReason, Link, LinkOptions, lock};
use crate::provider::{AcceptError, Canceller, Expected, Provider, Ticket, accept_any};

/// How often the link in use is looked at, for ends that nobody waited for.
const LOOK: Duration = Duration::from_millis(250);
/// The same, while there is none.
const LOOK_LOST: Duration = Duration::from_millis(25);
/// Newcomers that are heard at a time.
const NEWCOMERS_MAX: usize = 8;
/// How long a newcomer may take to say what it wants, and to be measured.
const NEWCOMER_MAX: Duration = Duration::from_secs(12);
/// How long the yes to a new link may take to leave.
const ANSWER_MAX: Duration = Duration::from_millis(100);
/// How long to wait before what is to be repeated on a new link is looked at again.
const BEHIND: Duration = Duration::from_millis(20);
/// How much longer than the dialling end this one waits for a new link: it may have noticed the loss earlier.
const ALLOWANCE: Duration = Duration::from_millis(200);

/// A hop that a peer will [`dial`](super::dial()) with the same secret. Dropping it ends the wait.
#[derive(Debug)]
pub struct Expecting {
    hop: Arc<Hop>,
    keeper: Arc<Keeper>,
}

/// Gets ready for a hop from a peer: for its links, one after the other, at `provider` and all others that share its desk.
///
/// # Errors
/// [`PathError`] if nothing can be expected.
pub fn expect(
    provider: &Arc<dyn Provider>,
    secret: &Ticket,
    link: LinkOptions,
    options: PathOptions,
    effects: &Effects,
) -> Result<Expecting, PathError> {
    let hop = Hop::new(effects.clone(), Owner::Follower(Mutex::new(Follower::new(options.patience + ALLOWANCE))));
    let canceller = Arc::new(Mutex::new(None));
    let mut keeping = Keeping {
        hop: Arc::clone(&hop),
        provider: Arc::clone(provider),
        secret: secret.clone(),
        link,
        expected: BTreeMap::new(),
        canceller: Arc::clone(&canceller),
        newcomers: Arc::default(),
    };
    // From here on a dial with any of the tickets is good.
    keeping.refresh()?;
    let wake = Box::new(move || {
        if let Some(canceller) = lock(&canceller).take() {
            Canceller::cancel(&canceller);
        }
    });
    let keeper = Keeper::start(&hop, wake, Box::new(move || keeping.run()))?;
    Ok(Expecting { hop, keeper })
}

impl Expecting {
    /// Waits for the first link.
    ///
    /// # Errors
    /// [`PathError`] if there is none by `deadline`.
    pub fn accept(self, deadline: Instant) -> Result<Opening, PathError> {
        Opening::wait(self.hop, self.keeper, deadline)
    }

    /// A handle with which another thread can end the wait, and later the hop.
    pub fn closer(&self) -> super::PathCloser {
        super::PathCloser::new(&self.hop)
    }
}

struct Keeping {
    hop: Arc<Hop>,
    provider: Arc<dyn Provider>,
    secret: Ticket,
    link: LinkOptions,
    expected: BTreeMap<u64, Expected>,
    canceller: Arc<Mutex<Option<Canceller>>>,
    newcomers: Arc<AtomicUsize>,
}

/// The follower of an accepting end.
fn follower(hop: &Hop) -> Option<MutexGuard<'_, Follower>> {
    match &hop.owner {
        Owner::Follower(follower) => Some(lock(follower)),
        Owner::Caller(_) => None,
    }
}

impl Keeping {
    /// Expects what is to be expected now.
    fn refresh(&mut self) -> Result<(), PathError> {
        let wanted = follower(&self.hop).map(|follower| follower.window.expected()).unwrap_or_default();
        self.expected.retain(|number, _| wanted.contains(number));
        for number in wanted {
            if !self.expected.contains_key(&number) {
                let expected = self.provider.expect(&ticket(&self.secret, number), self.link)?;
                self.expected.insert(number, expected);
            }
        }
        *lock(&self.canceller) = self.expected.values().next().map(Expected::canceller);
        Ok(())
    }

    fn run(mut self) {
        while self.hop.down().is_none() {
            if let Err(error) = self.refresh() {
                // The desk is full or closed. With one number left a link can still come.
                if self.expected.is_empty() {
                    return self.hop.go_down(Down::NoPeer { lost: error.to_string() });
                }
            }
            // Whoever stopped the hop before this canceller was there has not cancelled it.
            if self.hop.down().is_some() {
                return;
            }
            let carried = follower(&self.hop).is_some_and(|follower| follower.is_carried() || follower.epoch() == 0);
            let look = if carried { LOOK } else { LOOK_LOST };
            let numbers: Vec<u64> = self.expected.keys().copied().collect();
            let expected: Vec<&Expected> = self.expected.values().collect();
            match accept_any(&expected, self.hop.effects.after(look)) {
                Ok((index, link)) => {
                    let number = numbers[index];
                    self.expected.remove(&number);
                    if let Some(mut follower) = follower(&self.hop) {
                        follower.window.used(number);
                    }
                    self.hear(link);
                }
                Err(AcceptError::Deadline { .. }) => {}
                Err(AcceptError::Cancelled { .. } | AcceptError::Used { .. }) => self.expected.clear(),
                Err(error) => self.hop.go_down(Down::NoPeer { lost: error.to_string() }),
            }
            self.look();
        }
    }

    /// Looks at the link in use, and whether there has been none for too long.
    fn look(&self) {
        let current = self.hop.current();
        let Some(mut follower) = follower(&self.hop) else { return };
        let now = self.hop.effects.clock.now();
        if let Some(current) = current
            && let Some(reason) = current.link.health().closed
        {
            follower.lost(now, current.epoch, reason.to_string());
        }
        let down = follower.down(now).map(|lost| Down::NoPeer { lost: lost.to_owned() });
        drop(follower);
        if let Some(down) = down {
            self.hop.go_down(down);
        }
    }

    fn hear(&self, link: Arc<dyn Link>) {
        if self.newcomers.fetch_add(1, Ordering::AcqRel) >= NEWCOMERS_MAX {
            self.newcomers.fetch_sub(1, Ordering::AcqRel);
            link.close(CloseReason::Local);
            return;
        }
        let (hop, newcomers) = (Arc::clone(&self.hop), Arc::clone(&self.newcomers));
        let spawner = Arc::clone(&self.hop.effects.spawner);
        let held = Arc::clone(&link);
        let body = move || {
            serve(&hop, &link);
            newcomers.fetch_sub(1, Ordering::AcqRel);
        };
        // Nobody waits for it: it ends by its deadline, or with the hop.
        if let Err(error) = spawner.thread("tensor newcomer".to_owned(), Box::new(body)) {
            tracing::warn!(target: "shoal::path", %error, "cannot hear a newcomer");
            held.close(CloseReason::Local);
            self.newcomers.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// Answers a new link until it is closed, or until it carries the hop and nothing is left to be repeated on it.
fn serve(hop: &Hop, link: &Arc<dyn Link>) {
    let until = hop.effects.after(NEWCOMER_MAX);
    let mut buffer = vec![0; HEAD_BYTES + LOAD_MAX];
    while hop.down().is_none() {
        let Ok(bytes) = link.recv(&mut buffer, until) else { break };
        let answer = match Said::decode(&buffer[..bytes]) {
            Some(Said::Echo(number)) => Said::Answer(number),
            Some(Said::Take(epoch)) => {
                if take(hop, epoch, link) {
                    repeat(hop, epoch);
                    return;
                }
                Said::Stale(epoch)
            }
            _ => {
                link.close(CloseReason::Misbehaved("a new link said something else".to_owned()));
                return;
            }
        };
        if link.send(&[&answer.encode(&[])], until).is_err() {
            break;
        }
    }
    link.close(CloseReason::Local);
}

/// Goes on with this link, if it is newer than the one in use.
fn take(hop: &Hop, epoch: u64, link: &Arc<dyn Link>) -> bool {
    let Some(mut follower) = follower(hop) else { return false };
    if follower.take(epoch) == Verdict::Stale {
        return false;
    }
    // Rule: nothing of the old link may arrive once the new one is in use, so it is ended before the peer is told.
    if let Some(before) = hop.current() {
        before.link.close(CloseReason::Local);
    }
    if let Err(error) = link.send(&[&Said::Taken(epoch).encode(&[])], hop.effects.after(ANSWER_MAX)) {
        link.close(CloseReason::Local);
        follower.lost(hop.effects.clock.now(), epoch, error.to_string());
        return true;
    }
    tracing::info!(target: "shoal::path", peer = %link.peer(), provider = %link.provider(), epoch, "a tensor link carries the hop");
    hop.publish(epoch, Arc::clone(link));
    true
}

/// Has what the peer lacks repeated, where this end also sends.
fn repeat(hop: &Hop, epoch: u64) {
    let is_in_use = || hop.current().is_some_and(|current| current.epoch == epoch && current.link.health().closed.is_none());
    while is_in_use() && !hop.catch_up(BEHIND) {
        // Another link, or the end of the hop, makes this one's state nobody's business.
        if !matches!(hop.newer(epoch, hop.effects.after(BEHIND)), Err(Waited::Deadline)) {
            return;
        }
    }
}
