//! The desk at which dialling peers present their tickets, shared by all providers.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex, Weak};

use super::{ExpectError, ProviderKind, Ticket};
use crate::env::{Clock, Instant};
use crate::link::{Link, LinkOptions, lock, nap};

/// How many links a provider expects at once.
const EXPECTED_MAX: usize = 4096;

/// Why no link was accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AcceptError {
    /// Nobody came with the right secret.
    #[error("no peer made the link of ticket {id:032x} by the deadline ({refused} came with a wrong secret and were refused)")]
    Deadline {
        /// The ticket's id.
        id: u128,
        /// How many dials named the ticket and did not hold its secret.
        refused: u32,
    },
    /// The link was made and has been taken.
    #[error("the link of ticket {id:032x} has been accepted before; a ticket makes one link")]
    Used {
        /// The ticket's id.
        id: u128,
    },
    /// [`Expected::cancel`] was called.
    #[error("the link of ticket {id:032x} is no longer expected")]
    Cancelled {
        /// The ticket's id.
        id: u128,
    },
    /// The peer came, and one end demands an encrypted link, which the other forbids.
    #[error("the link of ticket {id:032x} was not made: one end demands an encrypted link and the other forbids it; set both ends alike")]
    Encryption {
        /// The ticket's id.
        id: u128,
    },
    /// The provider has been shut down.
    #[error("the {0} provider has been shut down")]
    Stopped(ProviderKind),
}

enum Stage {
    /// Nobody has come yet.
    Open,
    /// A peer is being answered.
    Claimed,
    /// The link waits to be taken.
    Made(Arc<dyn Link>),
    /// It was taken.
    Taken,
    /// The ends do not agree about encryption.
    Disagreed,
    /// It is no longer wanted.
    Cancelled,
}

struct Entry {
    ticket: Ticket,
    options: LinkOptions,
    stage: Stage,
    refused: u32,
}

struct Book {
    entries: BTreeMap<u128, Entry>,
    stopped: bool,
}

/// The expected links of a provider, or of all providers of a node: whichever of them a peer comes to, its ticket is known.
pub struct Desk {
    kind: ProviderKind,
    clock: Arc<dyn Clock>,
    book: Mutex<Book>,
    changed: Condvar,
}

/// A peer that has proved itself, while its link is being made. Dropping the claim opens the ticket again.
pub(crate) struct Claim<D: Deref<Target = Desk>> {
    desk: D,
    id: u128,
}

impl Desk {
    /// An empty desk. `kind` is what errors speak of.
    pub fn new(kind: ProviderKind, clock: Arc<dyn Clock>) -> Arc<Self> {
        let book = Book { entries: BTreeMap::new(), stopped: false };
        Arc::new(Self { kind, clock, book: Mutex::new(book), changed: Condvar::new() })
    }

    /// Opens the desk for one ticket.
    pub(crate) fn expect(self: &Arc<Self>, ticket: &Ticket, options: LinkOptions) -> Result<Expected, ExpectError> {
        let mut book = lock(&self.book);
        if book.stopped {
            return Err(ExpectError::Stopped(self.kind));
        }
        if book.entries.len() >= EXPECTED_MAX {
            return Err(ExpectError::TooMany { limit: EXPECTED_MAX });
        }
        let id = ticket.id();
        if book.entries.contains_key(&id) {
            return Err(ExpectError::Duplicate { id });
        }
        let entry = Entry { ticket: ticket.clone(), options, stage: Stage::Open, refused: 0 };
        book.entries.insert(id, entry);
        Ok(Expected { desk: Arc::clone(self), id })
    }

    /// The ticket and options that a peer must match, if anybody waits for it.
    pub(crate) fn look_up(&self, id: u128) -> Option<(Ticket, LinkOptions)> {
        let book = lock(&self.book);
        let entry = book.entries.get(&id)?;
        matches!(entry.stage, Stage::Open).then(|| (entry.ticket.clone(), entry.options))
    }

    /// Notes that somebody came with this id and without its secret.
    pub(crate) fn refuse(&self, id: u128) {
        if let Some(entry) = lock(&self.book).entries.get_mut(&id) {
            entry.refused = entry.refused.saturating_add(1);
        }
    }

    /// Takes the ticket for a peer that has proved itself: only one gets it.
    pub(crate) fn claim(&self, id: u128) -> Option<Claim<&Self>> {
        self.take(id).then_some(Claim { desk: self, id })
    }

    /// [`Desk::claim`] for a link that is made in several steps.
    pub(crate) fn claim_for_long(self: &Arc<Self>, id: u128) -> Option<Claim<Arc<Self>>> {
        self.take(id).then(|| Claim { desk: Arc::clone(self), id })
    }

    fn take(&self, id: u128) -> bool {
        match lock(&self.book).entries.get_mut(&id) {
            Some(entry) if matches!(entry.stage, Stage::Open) => {
                entry.stage = Stage::Claimed;
                true
            }
            _ => false,
        }
    }

    /// Refuses everybody from now on and wakes all that wait.
    pub(crate) fn stop(&self) {
        lock(&self.book).stopped = true;
        self.changed.notify_all();
    }
}

impl<D: Deref<Target = Desk>> Claim<D> {
    /// Hands the finished link over; `false` if nobody wants it any more.
    pub(crate) fn deliver(self, link: Arc<dyn Link>) -> bool {
        self.settle(Stage::Made(link))
    }

    /// Tells whoever waits that the ends do not agree about encryption.
    pub(crate) fn disagreed(self) {
        self.settle(Stage::Disagreed);
    }

    fn settle(self, stage: Stage) -> bool {
        let mut book = lock(&self.desk.book);
        match book.entries.get_mut(&self.id) {
            Some(entry) if matches!(entry.stage, Stage::Claimed) => entry.stage = stage,
            _ => return false,
        }
        drop(book);
        self.desk.changed.notify_all();
        true
    }
}

impl<D: Deref<Target = Desk>> Drop for Claim<D> {
    fn drop(&mut self) {
        if let Some(entry) = lock(&self.desk.book).entries.get_mut(&self.id)
            && matches!(entry.stage, Stage::Claimed)
        {
            entry.stage = Stage::Open;
        }
    }
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk").field("expected", &lock(&self.book).entries.len()).finish_non_exhaustive()
    }
}

/// A link that a peer is expected to make. Dropping it forgets the ticket.
pub struct Expected {
    desk: Arc<Desk>,
    id: u128,
}

impl Expected {
    /// The ticket's id.
    pub fn id(&self) -> u128 {
        self.id
    }

    /// Waits for the peer. A dial with the right id and a wrong secret is refused and does not end the wait.
    ///
    /// # Errors
    /// [`AcceptError`].
    pub fn accept(&self, deadline: Instant) -> Result<Arc<dyn Link>, AcceptError> {
        let id = self.id;
        let mut book = lock(&self.desk.book);
        loop {
            if book.stopped {
                return Err(AcceptError::Stopped(self.desk.kind));
            }
            let Some(entry) = book.entries.get_mut(&id) else { return Err(AcceptError::Cancelled { id }) };
            match std::mem::replace(&mut entry.stage, Stage::Taken) {
                Stage::Made(link) => return Ok(link),
                Stage::Taken => return Err(AcceptError::Used { id }),
                Stage::Disagreed => {
                    entry.stage = Stage::Disagreed;
                    return Err(AcceptError::Encryption { id });
                }
                waiting @ (Stage::Open | Stage::Claimed) => entry.stage = waiting,
                Stage::Cancelled => {
                    entry.stage = Stage::Cancelled;
                    return Err(AcceptError::Cancelled { id });
                }
            }
            let refused = entry.refused;
            let Some(wait) = nap(self.desk.clock.now(), deadline) else { return Err(AcceptError::Deadline { id, refused }) };
            book = match self.desk.changed.wait_timeout(book, wait) {
                Ok((book, _)) => book,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    /// A handle with which another thread can end the wait.
    pub fn canceller(&self) -> Canceller {
        Canceller { desk: Arc::downgrade(&self.desk), id: self.id }
    }

    /// Ends the wait: the peer will be refused.
    pub fn cancel(&self) {
        self.canceller().cancel();
    }
}

/// Waits for any of several links, all of one desk, and says which it was.
///
/// # Errors
/// [`AcceptError`]: at the deadline, or if one of them was cancelled or used.
pub fn accept_any(expected: &[&Expected], deadline: Instant) -> Result<(usize, Arc<dyn Link>), AcceptError> {
    let Some(first) = expected.first() else { return Err(AcceptError::Cancelled { id: 0 }) };
    let desk = &first.desk;
    let mut book = lock(&desk.book);
    loop {
        if book.stopped {
            return Err(AcceptError::Stopped(desk.kind));
        }
        let mut refused = 0_u32;
        for (index, id) in expected.iter().map(|expected| expected.id).enumerate() {
            let Some(entry) = book.entries.get_mut(&id) else { return Err(AcceptError::Cancelled { id }) };
            refused = refused.saturating_add(entry.refused);
            match &entry.stage {
                Stage::Open | Stage::Claimed => {}
                Stage::Made(link) => {
                    let link = Arc::clone(link);
                    entry.stage = Stage::Taken;
                    return Ok((index, link));
                }
                Stage::Taken => return Err(AcceptError::Used { id }),
                Stage::Disagreed => return Err(AcceptError::Encryption { id }),
                Stage::Cancelled => return Err(AcceptError::Cancelled { id }),
            }
        }
        let Some(wait) = nap(desk.clock.now(), deadline) else { return Err(AcceptError::Deadline { id: first.id, refused }) };
        book = match desk.changed.wait_timeout(book, wait) {
            Ok((book, _)) => book,
            Err(poisoned) => poisoned.into_inner().0,
        };
    }
}

impl std::fmt::Debug for Expected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Expected({:08x}…)", (self.id >> 96) as u32)
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        lock(&self.desk.book).entries.remove(&self.id);
    }
}

/// Ends the wait for an [`Expected`] link from another thread.
#[derive(Clone)]
pub struct Canceller {
    desk: Weak<Desk>,
    id: u128,
}

impl Canceller {
    /// Ends the wait; changes nothing once the link was accepted or dropped.
    pub fn cancel(&self) {
        let Some(desk) = self.desk.upgrade() else { return };
        if let Some(entry) = lock(&desk.book).entries.get_mut(&self.id)
            && !matches!(entry.stage, Stage::Taken)
        {
            entry.stage = Stage::Cancelled;
        }
        desk.changed.notify_all();
    }
}

impl std::fmt::Debug for Canceller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Canceller({:08x}…)", (self.id >> 96) as u32)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::env::SystemRng;
    use crate::provider::Provider;
    use crate::provider::memory::{MemoryFabric, MemoryProvider, Shape};
    use crate::testing::{effects, soon};

    #[test]
    fn whichever_of_several_links_comes_is_accepted() {
        let effects = effects();
        let fabric = MemoryFabric::new(&SystemRng, Shape::default());
        let [near, far] = [0, 1].map(|_| MemoryProvider::new(effects.clone(), &fabric));
        let tickets = [0; 3].map(|_| Ticket::random(&SystemRng));
        let options = LinkOptions::default();
        let expected: Vec<Expected> = tickets.iter().map(|ticket| far.expect(ticket, options).unwrap()).collect();
        let all: Vec<&Expected> = expected.iter().collect();
        let at_once = accept_any(&all, effects.after(Duration::ZERO)).map(|_| ()).unwrap_err();
        assert!(matches!(at_once, AcceptError::Deadline { .. }));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| accept_any(&all, soon(&effects)).map(|(index, _)| index));
            near.dial(&far.endpoints()[0], &tickets[1], options, soon(&effects)).unwrap();
            assert_eq!(waiting.join().unwrap(), Ok(1));
        });
        assert!(matches!(accept_any(&all, soon(&effects)), Err(AcceptError::Used { id }) if id == tickets[1].id()));
        let left = [&expected[0], &expected[2]];
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| accept_any(&left, soon(&effects)).map(|_| ()));
            expected[2].cancel();
            assert_eq!(waiting.join().unwrap(), Err(AcceptError::Cancelled { id: tickets[2].id() }));
        });
        far.shutdown();
        assert!(matches!(accept_any(&left[..1], soon(&effects)), Err(AcceptError::Stopped(_))));
    }
}
