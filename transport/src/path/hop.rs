//! What the threads of one end of a hop have in common: which link carries it, and what became of it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak, mpsc};
use std::time::Duration;

use super::Down;
use super::dialling::Notice;
use super::follower::Follower;
use super::sender::Cell;
use crate::Effects;
use crate::env::Instant;
use crate::link::{CloseReason, Link, lock, nap};

/// The link that carries the hop, and its number.
#[derive(Clone)]
pub(super) struct Current {
    pub(super) epoch: u64,
    pub(super) link: Arc<dyn Link>,
}

/// Told once that a hop is down.
pub(super) type WhenDown = Box<dyn FnOnce(&Down) + Send>;

struct State {
    current: Option<Current>,
    down: Option<Down>,
    when_down: Vec<WhenDown>,
}

/// Who decides at this end.
pub(super) enum Owner {
    /// The dialling end's keeper.
    Caller(mpsc::Sender<Notice>),
    Follower(Mutex<Follower>),
}

pub(super) struct Hop {
    pub(super) effects: Effects,
    pub(super) owner: Owner,
    state: Mutex<State>,
    changed: Condvar,
    /// Held while a half of the channel is put onto the present link, so that no half goes back to an earlier one.
    pub(super) moving: Mutex<()>,
    /// The sending half, so that it can be put onto another link while its thread has nothing to send.
    cell: Mutex<Weak<Mutex<Cell>>>,
    /// Smoothed length of messages, in bytes.
    usual_bytes: AtomicU64,
}

/// Why a wait for another link ended.
pub(super) enum Waited {
    Deadline,
    Down(Down),
}

impl Hop {
    pub(super) fn new(effects: Effects, owner: Owner) -> Arc<Self> {
        Arc::new(Self {
            effects,
            owner,
            state: Mutex::new(State { current: None, down: None, when_down: Vec::new() }),
            changed: Condvar::new(),
            moving: Mutex::new(()),
            cell: Mutex::new(Weak::new()),
            usual_bytes: AtomicU64::new(0),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// From now on `link` carries the hop; the one before is ended. `false`: the hop is not there any more.
    pub(super) fn publish(&self, epoch: u64, link: Arc<dyn Link>) -> bool {
        let mut state = self.state();
        if state.down.is_some() {
            drop(state);
            link.close(CloseReason::Local);
            return false;
        }
        let before = state.current.replace(Current { epoch, link });
        drop(state);
        if let Some(before) = before {
            before.link.close(CloseReason::Local);
        }
        self.changed.notify_all();
        true
    }

    pub(super) fn current(&self) -> Option<Current> {
        self.state().current.clone()
    }

    /// Ends the hop, unless it has ended before.
    pub(super) fn go_down(&self, down: Down) {
        let mut state = self.state();
        let down = state.down.get_or_insert(down).clone();
        let (current, told) = (state.current.clone(), std::mem::take(&mut state.when_down));
        drop(state);
        if let Some(current) = current {
            current.link.close(CloseReason::Local);
        }
        self.changed.notify_all();
        told.into_iter().for_each(|tell| tell(&down));
    }

    /// Has `tell` called when the hop is down: at once, if it is.
    pub(super) fn when_down(&self, tell: WhenDown) {
        let mut state = self.state();
        match state.down.clone() {
            Some(down) => {
                drop(state);
                tell(&down);
            }
            None => state.when_down.push(tell),
        }
    }

    pub(super) fn down(&self) -> Option<Down> {
        self.state().down.clone()
    }

    /// The link of this epoch is of no use any more.
    pub(super) fn lost(&self, epoch: u64, reason: String) {
        let current = self.current();
        if let Some(current) = current.filter(|current| current.epoch == epoch) {
            current.link.close(CloseReason::Local);
        }
        match &self.owner {
            // Nobody hears it only when the hop is gone.
            Owner::Caller(notices) => drop(notices.send(Notice::Lost { epoch, reason })),
            Owner::Follower(follower) => lock(follower).lost(self.effects.clock.now(), epoch, reason),
        }
    }

    /// Waits for a link that is newer than `epoch`.
    pub(super) fn newer(&self, epoch: u64, deadline: Instant) -> Result<Current, Waited> {
        let mut state = self.state();
        loop {
            if let Some(down) = &state.down {
                return Err(Waited::Down(down.clone()));
            }
            if let Some(current) = state.current.as_ref().filter(|current| current.epoch > epoch) {
                return Ok(current.clone());
            }
            let now = self.effects.clock.now();
            let wait = nap(now, deadline).ok_or(Waited::Deadline)?;
            state = match self.changed.wait_timeout(state, wait) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    pub(super) fn sends_with(&self, cell: &Arc<Mutex<Cell>>) {
        *lock(&self.cell) = Arc::downgrade(cell);
    }

    fn cell(&self) -> Option<Arc<Mutex<Cell>>> {
        lock(&self.cell).upgrade()
    }

    /// Puts the sending half onto the present link and repeats what the peer lacks, if its own thread does not. `true`:
    /// nothing is left to do. Waits for at most `wait`.
    pub(super) fn catch_up(&self, wait: Duration) -> bool {
        let Some(cell) = self.cell() else { return true };
        let Ok(mut cell) = cell.try_lock() else {
            // Its thread is sending, and does this itself.
            return false;
        };
        cell.catch_up(self, self.effects.after(wait))
    }

    /// Tells the peer that no more messages will come, if it takes one at once.
    pub(super) fn farewell(&self) {
        if let Some(cell) = self.cell()
            && let Ok(mut cell) = cell.try_lock()
        {
            cell.farewell(self);
        }
    }

    pub(super) fn note_message(&self, bytes: usize) {
        let bytes = bytes as u64;
        let before = self.usual_bytes.load(Ordering::Relaxed);
        let smoothed = if before == 0 { bytes } else { before - before / 16 + bytes / 16 };
        self.usual_bytes.store(smoothed, Ordering::Relaxed);
    }

    /// The usual length of a message, in bytes; 0 before the first.
    pub(super) fn usual_bytes(&self) -> u64 {
        self.usual_bytes.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Hop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        let link = state.current.as_ref().map(|current| (current.epoch, &current.link));
        f.debug_struct("Hop").field("link", &link).field("down", &state.down).finish_non_exhaustive()
    }
}

/// Ends a hop from any thread: what waits at this end returns at once.
#[derive(Debug, Clone)]
pub struct PathCloser(Weak<Hop>);

impl PathCloser {
    pub(super) fn new(hop: &Arc<Hop>) -> Self {
        Self(Arc::downgrade(hop))
    }

    /// Ends it. The peer is told, if it takes a word at once.
    pub fn close(&self) {
        if let Some(hop) = self.0.upgrade() {
            hop.farewell();
            hop.go_down(Down::Local);
        }
    }
}
