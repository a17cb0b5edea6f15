//! What the two halves of a channel and the link's thread have in common.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use super::machine::{ReceiverMachine, SenderMachine};
use super::pump::Pump;
use super::{Broken, ChannelOptions, GRANT_BYTES, OpenError};
use crate::Effects;
use crate::env::{Instant, Join};
use crate::frame::{Fence, FrameHeader, HEADER_BYTES};
use crate::link::{self, CloseReason, Link, lock, nap};
use crate::region::{Region, RegionError, Slot};

/// How long a grant may wait for the sending half of a busy link before something else is done first.
const GRANT_WAIT: Duration = Duration::from_millis(20);

/// The receiving end's messages and slots.
pub(super) struct Inbox {
    pub(super) machine: ReceiverMachine,
    pub(super) ready: VecDeque<(FrameHeader, Slot)>,
    pub(super) free: Vec<Slot>,
    /// A newer fence that the sender was seen with and the user has not been told of.
    pub(super) ahead: Option<Fence>,
}

pub(super) struct State {
    pub(super) link: Arc<dyn Link>,
    pub(super) sender: Option<SenderMachine>,
    pub(super) inbox: Option<Inbox>,
    pub(super) broken: Option<Broken>,
}

/// The link's thread, and the slot that it receives into.
struct Running {
    thread: Option<Box<dyn Join>>,
    landing: Option<Slot>,
}

pub(super) struct Shared {
    pub(super) effects: Effects,
    state: Mutex<State>,
    /// Something arrived, or broke.
    arrived: Condvar,
    /// Something was granted, or broke.
    credited: Condvar,
    running: Mutex<Running>,
    /// Held while a grant is drawn up and sent, so that grants go out in order.
    granting: Mutex<()>,
    halves: AtomicUsize,
}

/// Which directions of a link a channel uses at this end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Directions {
    Send,
    Receive,
    Both,
}

/// A half's hold on the channel; the last one ends the link and waits for its thread.
pub(super) struct Half(Arc<Shared>);

impl Half {
    /// The other half's hold.
    pub(super) fn other(&self) -> Self {
        self.0.halves.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(&self.0))
    }
}

/// Bytes of a slot for payloads of `payload` bytes.
fn slot_with_header(payload: u32) -> Option<usize> {
    usize::try_from(payload).ok()?.checked_add(HEADER_BYTES)
}

/// Slots for `count` whole messages.
pub(super) fn slots(count: usize, payload: u32) -> Result<Vec<Slot>, RegionError> {
    let bytes = slot_with_header(payload).ok_or(RegionError::Size { count, bytes: usize::MAX })?;
    Region::slots(count, bytes)
}

impl Shared {
    pub(super) fn open(
        link: Arc<dyn Link>,
        fence: Fence,
        options: ChannelOptions,
        effects: &Effects,
        directions: Directions,
    ) -> Result<Half, OpenError> {
        let sends = directions != Directions::Receive;
        let receives = directions != Directions::Send;
        let window = options.slots.max(1);
        let needed = slot_with_header(options.slot_bytes).unwrap_or(usize::MAX);
        let limit = link.message_bytes_max();
        if sends && needed > limit {
            return Err(OpenError::Link { slot_bytes: options.slot_bytes, needed, limit });
        }
        // One slot more than is granted: the one that the link's thread receives into.
        let landing_bytes = options.slot_bytes.max(GRANT_BYTES as u32);
        let (inbox, landing) = if receives {
            let mut free = slots(usize::from(window) + 1, landing_bytes)?;
            let landing = free.pop();
            let machine = ReceiverMachine::new(fence, window, options.slot_bytes);
            let ready = VecDeque::with_capacity(usize::from(window) + 1);
            (Some(Inbox { machine, ready, free, ahead: None }), landing)
        } else {
            (None, slots(1, GRANT_BYTES as u32)?.pop())
        };
        let sender = sends.then(|| SenderMachine::new(fence, window, options.slot_bytes));
        let shared = Arc::new(Self {
            effects: effects.clone(),
            state: Mutex::new(State { link, sender, inbox, broken: None }),
            arrived: Condvar::new(),
            credited: Condvar::new(),
            running: Mutex::new(Running { thread: None, landing }),
            granting: Mutex::new(()),
            halves: AtomicUsize::new(1),
        });
        let half = Half(shared);
        half.start_pump().map_err(OpenError::Thread)?;
        Ok(half)
    }

    fn start_pump(self: &Arc<Self>) -> std::io::Result<()> {
        let link = Arc::clone(&self.state().link);
        let mut running = lock(&self.running);
        let landing = running.landing.take().ok_or_else(|| std::io::Error::other("the thread before it failed"))?;
        let pump = Pump::new(Arc::clone(self), link, landing);
        let started = self.effects.spawner.thread("tensor link".to_owned(), Box::new(move || pump.run()))?;
        running.thread = Some(started);
        Ok(())
    }

    /// Ends the link and waits for its thread.
    fn stop_pump(&self) {
        self.close();
        let thread = lock(&self.running).thread.take();
        if let Some(thread) = thread {
            thread.join();
        }
    }

    /// Takes a landing slot back from a thread that ends.
    pub(super) fn return_landing(&self, landing: Slot) {
        lock(&self.running).landing = Some(landing);
    }

    /// Ends the present link.
    pub(super) fn close(&self) {
        let link = Arc::clone(&self.state().link);
        link.close(CloseReason::Local);
    }

    /// Puts the channel onto another link, unless it is on that one already.
    pub(super) fn relink(self: &Arc<Self>, link: &Arc<dyn Link>) -> std::io::Result<()> {
        if Arc::ptr_eq(&self.state().link, link) {
            return Ok(());
        }
        // Rule: nothing of the old link may arrive once the new one is in use, so its thread must be gone first.
        self.stop_pump();
        let mut state = self.state();
        state.link = Arc::clone(link);
        state.broken = None;
        if let Some(sender) = &mut state.sender {
            sender.relink();
        }
        if let Some(inbox) = &mut state.inbox {
            inbox.machine.relink();
        }
        drop(state);
        self.start_pump()
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Notes why the channel is of no use any more, and wakes everybody.
    pub(super) fn break_with(&self, broken: Broken) {
        self.state().broken.get_or_insert(broken);
        self.arrived.notify_all();
        self.credited.notify_all();
    }

    pub(super) fn notify_arrived(&self) {
        self.arrived.notify_one();
    }

    pub(super) fn notify_credited(&self) {
        self.credited.notify_one();
    }

    /// Waits until something arrives; none if the deadline has passed.
    pub(super) fn wait_arrived<'a>(&'a self, state: MutexGuard<'a, State>, deadline: Instant) -> Option<MutexGuard<'a, State>> {
        self.wait(&self.arrived, state, deadline)
    }

    /// Waits until something is granted; none if the deadline has passed.
    pub(super) fn wait_credited<'a>(&'a self, state: MutexGuard<'a, State>, deadline: Instant) -> Option<MutexGuard<'a, State>> {
        self.wait(&self.credited, state, deadline)
    }

    fn wait<'a>(&'a self, on: &Condvar, state: MutexGuard<'a, State>, deadline: Instant) -> Option<MutexGuard<'a, State>> {
        let wait = nap(self.effects.clock.now(), deadline)?;
        Some(match on.wait_timeout(state, wait) {
            Ok((state, _)) => state,
            Err(poisoned) => poisoned.into_inner().0,
        })
    }

    /// Sends a grant if one is due. `false` if it is still due, because the link is busy. A broken link is noticed elsewhere.
    pub(super) fn send_due_grant(&self, patient: bool) -> bool {
        // Most of the time there is nothing to send, and the present state says so.
        if !self.state().inbox.as_ref().is_some_and(|inbox| inbox.machine.grant_due()) {
            return true;
        }
        let granting = if patient {
            Some(lock(&self.granting))
        } else {
            match self.granting.try_lock() {
                Ok(granting) => Some(granting),
                Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
                Err(std::sync::TryLockError::WouldBlock) => None,
            }
        };
        if granting.is_none() {
            return false;
        }
        let mut state = self.state();
        let link = Arc::clone(&state.link);
        let Some(inbox) = &mut state.inbox else { return true };
        if !inbox.machine.grant_due() {
            return true;
        }
        let (header, payload) = inbox.machine.grant();
        drop(state);
        let now = self.effects.clock.now();
        let deadline = if patient { now + GRANT_WAIT } else { now };
        match link.send(&[&header.encode(), &payload], deadline) {
            Err(link::SendError::Deadline) => {
                if let Some(inbox) = &mut self.state().inbox {
                    inbox.machine.grant_failed();
                }
                false
            }
            Ok(()) | Err(_) => true,
        }
    }
}

impl std::ops::Deref for Half {
    type Target = Arc<Shared>;

    fn deref(&self) -> &Arc<Shared> {
        &self.0
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        if self.0.halves.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.stop_pump();
        }
    }
}

impl fmt::Debug for Half {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("Channel").field("link", &state.link).field("broken", &state.broken).finish_non_exhaustive()
    }
}
