//! What the two halves of a channel and its pump have in common.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::Duration;

use super::machine::{ReceiverMachine, SenderMachine};
use super::taking::{Landing, Taken};
use super::turn::{self, Bench, Shell, Side, Sleep, Took, Turn};
use super::{Broken, ChannelOptions, GRANT_BYTES, OpenError};
use crate::Effects;
use crate::env::{Instant, Join};
use crate::frame::{Fence, FrameHeader, HEADER_BYTES};
use crate::link::{self, CloseReason, Link, NAP, lock, nap};
use crate::region::{Region, RegionError, Slot};

/// How long a grant may wait for the sending half of a busy link before something else is done first.
const GRANT_WAIT: Duration = Duration::from_millis(20);

/// How soon to try again to send a grant that a busy link did not take.
const GRANT_RETRY: Duration = Duration::from_millis(10);

/// How long nobody of the user has received before the pump does.
const PUMP_REST: Duration = Duration::from_millis(10);

/// How long the pump receives before it looks whether a user wants to, where the link cannot call it off.
const PUMP_LOOK: Duration = Duration::from_millis(50);

/// How long the pump receives or sleeps before it looks whether there is anything else to do.
const PUMP_LONG: Duration = Duration::from_secs(1);

/// The receiving end's messages and slots.
pub(super) struct Inbox {
    pub(super) machine: ReceiverMachine,
    pub(super) ready: VecDeque<(FrameHeader, Slot)>,
    pub(super) free: Vec<Slot>,
    /// A newer fence that the sender was seen with and the user has not been told of.
    pub(super) ahead: Option<Fence>,
}

impl Inbox {
    /// The user gives the slot of the oldest message that it holds back.
    pub(super) fn take_back(&mut self, slot: Slot) {
        self.free.push(slot);
        self.machine.release();
    }
}

pub(super) struct State {
    pub(super) link: Arc<dyn Link>,
    pub(super) sender: Option<SenderMachine>,
    pub(super) inbox: Option<Inbox>,
    pub(super) broken: Option<Broken>,
    pub(super) turn: Turn,
    /// Where frames are received. Whoever has the turn has it.
    landing: Option<Landing>,
    /// Links that the channel was on, as long as somebody has them.
    left: Vec<Weak<dyn Link>>,
}

impl State {
    fn grant_due(&self) -> bool {
        self.inbox.as_ref().is_some_and(|inbox| inbox.machine.grant_due())
    }
}

pub(super) struct Shared {
    pub(super) effects: Effects,
    state: Mutex<State>,
    /// Something arrived, or broke.
    arrived: Condvar,
    /// Something was granted, or broke.
    credited: Condvar,
    /// For the pump.
    pump: Condvar,
    /// Nobody receives from the old link any more, or there is a new one.
    relink: Condvar,
    thread: Mutex<Option<Box<dyn Join>>>,
    /// Held while a grant is drawn up and sent, so that grants go out in order.
    granting: Mutex<()>,
    /// A grant was not sent because this end's sender uses the link.
    grant_waits: AtomicBool,
    halves: AtomicUsize,
}

/// Which directions of a link a channel uses at this end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Directions {
    Send,
    Receive,
    Both,
}

/// How long to wait for the sending half of a link for a grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Patience {
    /// A little.
    Some,
    /// Not at all: who receives must not wait for the sending half, for the peer's may be waiting for it to receive.
    None,
}

/// A half's hold on the channel; the last one ends the link and waits for the pump.
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
        // One slot more than is granted: the one that is received into.
        let landing_bytes = if receives { options.slot_bytes.max(GRANT_BYTES as u32) } else { GRANT_BYTES as u32 };
        let mut free = slots(if receives { usize::from(window) + 1 } else { 1 }, landing_bytes)?;
        let absurd = OpenError::Memory(RegionError::Size { count: 0, bytes: 0 });
        let landing = Landing::new(free.pop().ok_or(absurd)?, Arc::clone(&link), receives.then_some(options.slot_bytes));
        let inbox = receives.then(|| Inbox {
            machine: ReceiverMachine::new(fence, window, options.slot_bytes),
            ready: VecDeque::with_capacity(usize::from(window) + 1),
            free,
            ahead: None,
        });
        let sender = sends.then(|| SenderMachine::new(fence, window, options.slot_bytes));
        let state = State { link, sender, inbox, broken: None, turn: Turn::new(), landing: Some(landing), left: Vec::new() };
        let shared = Arc::new(Self {
            effects: effects.clone(),
            state: Mutex::new(state),
            arrived: Condvar::new(),
            credited: Condvar::new(),
            pump: Condvar::new(),
            relink: Condvar::new(),
            thread: Mutex::new(None),
            granting: Mutex::new(()),
            grant_waits: AtomicBool::new(false),
            halves: AtomicUsize::new(1),
        });
        let half = Half(shared);
        // What a receiving end grants at first goes out at once, while there is certainly room.
        half.send_due_grant(Patience::Some);
        let pump = Arc::clone(&half);
        let body = move || turn::pump(&*pump, pump.state());
        let thread = effects.spawner.thread("tensor link".to_owned(), Box::new(body)).map_err(OpenError::Thread)?;
        *lock(&half.thread) = Some(thread);
        Ok(half)
    }

    /// Ends the present link.
    pub(super) fn close(&self) {
        let link = Arc::clone(&self.state().link);
        link.close(CloseReason::Local);
    }

    /// Puts the channel onto another link, unless it is on that one, or has left it: where both halves are put onto links, one may come
    /// late, and what is left on an old link must not arrive after what came on a newer one.
    pub(super) fn relink(&self, link: &Arc<dyn Link>) {
        let mut state = self.state();
        while state.turn.is_replacing() {
            state = sleep_on(&self.relink, state, NAP);
        }
        let is_left = state.left.iter().any(|left| std::ptr::addr_eq(left.as_ptr(), Arc::as_ptr(link)));
        if Arc::ptr_eq(&state.link, link) || is_left {
            return;
        }
        // Rule: nothing of the old link may arrive once the new one is in use, so nobody may be receiving from it. Who does so returns,
        // because it ends.
        state.turn.replace();
        let old = Arc::clone(&state.link);
        drop(state);
        old.close(CloseReason::Local);
        let mut state = self.state();
        while state.turn.is_held() {
            state = sleep_on(&self.relink, state, NAP);
        }
        state.left.retain(|left| left.strong_count() > 0);
        state.left.push(Arc::downgrade(&old));
        state.link = Arc::clone(link);
        if let Some(landing) = &mut state.landing {
            landing.link = Arc::clone(link);
        }
        state.broken = None;
        if let Some(sender) = &mut state.sender {
            sender.relink();
        }
        if let Some(inbox) = &mut state.inbox {
            inbox.machine.relink();
        }
        state.turn.reopen();
        drop(state);
        self.wake_all();
        self.send_due_grant(Patience::Some);
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn wake_all(&self) {
        for bench in [&self.arrived, &self.credited, &self.pump, &self.relink] {
            bench.notify_all();
        }
    }

    /// Waits until something arrives; none if the deadline has passed.
    pub(super) fn wait_arrived<'a>(&'a self, state: MutexGuard<'a, State>, deadline: Instant) -> Option<MutexGuard<'a, State>> {
        self.wait(Side::Arrived, state, deadline)
    }

    /// Waits until something is granted; none if the deadline has passed.
    pub(super) fn wait_credited<'a>(&'a self, state: MutexGuard<'a, State>, deadline: Instant) -> Option<MutexGuard<'a, State>> {
        self.wait(Side::Credited, state, deadline)
    }

    fn wait<'a>(&'a self, side: Side, state: MutexGuard<'a, State>, deadline: Instant) -> Option<MutexGuard<'a, State>> {
        let (state, in_time) = turn::wait(self, state, side, deadline);
        in_time.then_some(state)
    }

    /// A sender is about to sleep because its peer takes nothing: the peer may be doing the same, so somebody has to receive.
    pub(super) fn urge(&self) {
        if self.state().turn.urge() {
            self.wake(Bench::Pump);
        }
    }

    /// A sender is done. Sends the grant that could not be sent beside it.
    pub(super) fn sent(&self, urged: bool) {
        if urged {
            self.state().turn.calm();
        }
        // Most of the time there is none, and looking costs less than taking it down.
        if self.grant_waits.load(Ordering::Acquire) && self.grant_waits.swap(false, Ordering::AcqRel) {
            self.send_due_grant(Patience::Some);
        }
    }

    /// Sends a grant if one is due. `false` if it is still due, because the link is busy. A broken link is noticed elsewhere.
    pub(super) fn send_due_grant(&self, patience: Patience) -> bool {
        // Most of the time there is nothing to send, and the present state says so.
        if !self.state().grant_due() {
            return true;
        }
        let _granting = match patience {
            Patience::Some => lock(&self.granting),
            Patience::None => match self.granting.try_lock() {
                Ok(granting) => granting,
                Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(std::sync::TryLockError::WouldBlock) => return false,
            },
        };
        let mut state = self.state();
        let link = Arc::clone(&state.link);
        let Some(inbox) = state.inbox.as_mut().filter(|inbox| inbox.machine.grant_due()) else { return true };
        let (header, payload) = inbox.machine.grant();
        drop(state);
        let header = header.encode();
        let send = |wait: Duration| link.send(&[&header, &payload], self.effects.after(wait));
        let sent = match patience {
            Patience::Some => send(GRANT_WAIT),
            Patience::None => match send(Duration::ZERO) {
                Err(link::SendError::Deadline) => {
                    // Whoever sends looks at this afterwards; it may have just done so.
                    self.grant_waits.store(true, Ordering::SeqCst);
                    send(Duration::ZERO)
                }
                sent => sent,
            },
        };
        if sent == Err(link::SendError::Deadline) {
            if let Some(inbox) = &mut self.state().inbox {
                inbox.machine.grant_failed();
            }
            return false;
        }
        true
    }

    /// Takes one frame off the link, if one comes in time.
    fn take(&self, landing: &mut Landing, due: bool, deadline: Option<Instant>) -> Result<Taken, Took> {
        let retry = due && !self.send_due_grant(Patience::None);
        let mut until = match deadline {
            Some(deadline) => deadline,
            None if landing.link.calls_off() => self.effects.after(PUMP_LONG),
            None => self.effects.after(PUMP_LOOK),
        };
        if retry {
            until = until.min(self.effects.after(GRANT_RETRY));
        }
        match landing.link.recv(landing.slot.as_mut_slice(), until) {
            Ok(bytes) => Ok(landing.look(bytes)),
            Err(link::RecvError::Closed(reason)) => Ok(Taken::Broken(Broken::Link(reason))),
            Err(link::RecvError::Deadline) => Err(match deadline {
                // The link may have been asked to return early.
                Some(deadline) if self.effects.clock.now() >= deadline => Took::Late,
                _ => Took::Nothing,
            }),
        }
    }
}

fn sleep_on<'a>(bench: &Condvar, state: MutexGuard<'a, State>, wait: Duration) -> MutexGuard<'a, State> {
    match bench.wait_timeout(state, wait) {
        Ok((state, _)) => state,
        Err(poisoned) => poisoned.into_inner().0,
    }
}

impl Shell for Shared {
    type Deadline = Instant;
    type Guard<'a> = MutexGuard<'a, State>;

    fn turn<'g>(guard: &'g mut Self::Guard<'_>) -> &'g mut Turn {
        &mut guard.turn
    }

    fn sleep<'a>(&'a self, state: Self::Guard<'a>, bench: Bench, sleep: Sleep<Instant>) -> (Self::Guard<'a>, bool) {
        let wait = match sleep {
            Sleep::Until(deadline) => match nap(self.effects.clock.now(), deadline) {
                Some(wait) => wait,
                None => return (state, false),
            },
            Sleep::Rest => PUMP_REST,
            Sleep::Long => PUMP_LONG,
        };
        let bench = match bench {
            Bench::User(Side::Arrived) => &self.arrived,
            Bench::User(Side::Credited) => &self.credited,
            Bench::Pump => &self.pump,
            Bench::Relink => &self.relink,
        };
        (sleep_on(bench, state, wait), true)
    }

    fn wake(&self, bench: Bench) {
        match bench {
            Bench::User(Side::Arrived) => self.arrived.notify_one(),
            Bench::User(Side::Credited) => self.credited.notify_one(),
            Bench::Pump => self.pump.notify_one(),
            Bench::Relink => self.relink.notify_all(),
        }
    }

    fn receive<'a>(&'a self, mut state: Self::Guard<'a>, deadline: Option<Instant>) -> (Self::Guard<'a>, Took) {
        // Whoever has the turn has this, too.
        let Some(mut landing) = state.landing.take() else { return (state, Took::Late) };
        let due = state.grant_due();
        drop(state);
        let taken = self.take(&mut landing, due, deadline);
        let mut state = self.state();
        let took = match taken {
            Err(took) => took,
            // What was taken off a link that is being replaced is repeated on the next one, if it matters.
            Ok(_) if state.turn.is_replacing() => Took::Nothing,
            Ok(taken) => match landing.put(taken, &mut state) {
                Ok(took) => took,
                Err(broken) => {
                    state.turn.end();
                    state.broken.get_or_insert(broken.clone());
                    if !matches!(broken, Broken::Link(_)) {
                        landing.link.close(CloseReason::Misbehaved(broken.to_string()));
                    }
                    self.wake_all();
                    Took::End
                }
            },
        };
        state.landing = Some(landing);
        (state, took)
    }

    fn call_off<'a>(&'a self, state: Self::Guard<'a>) -> Self::Guard<'a> {
        // It costs the link little, and does not wait.
        state.link.call_off();
        state
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
            self.0.state().turn.finish();
            self.0.close();
            self.0.wake_all();
            let thread = lock(&self.0.thread).take();
            if let Some(thread) = thread {
                thread.join();
            }
        }
    }
}

impl fmt::Debug for Half {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("Channel").field("link", &state.link).field("broken", &state.broken).finish_non_exhaustive()
    }
}
