//! The holder's end of a window.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Answer, OneSided, READS_MAX, Refused, Request};
use crate::env::{Clock, Instant, Rng};
use crate::link::nap;
use crate::provider::verbs::device::{Ask, Done, Init, Pair, ReadyToSend, ReliableSend, Spot, VerbsError};
use crate::provider::verbs::link::VerbsLink;
use crate::provider::verbs::patience::Patience;
use crate::provider::verbs::profile::Profile;
use crate::provider::verbs::wire::PSN_MASK;
use crate::region::{Region, Slot};

/// Bytes go through registered slots of the holder's: so many, of so many bytes. Together they are 2 MiB of locked memory.
const PIECES: usize = 8;
const PIECE_BYTES: usize = 256 * 1024;

/// Bytes of a WRITE that go out without the device reading memory, where it can.
const INLINE_BYTES: u32 = 220;

/// How long a wait sleeps before it looks at the link again: at most, and where the library gives no events at first.
const SLEEP_MAX: Duration = Duration::from_millis(5);
const EVENTLESS_MIN: Duration = Duration::from_micros(50);

/// In how many looks at the window there is one at the link.
const GLANCE_EVERY: u32 = 128;

/// The window does not let something through, or it is too late.
struct Over;

/// A holder that is about to ask for a window.
pub(crate) struct Asking {
    link: Arc<VerbsLink>,
    pair: Box<dyn Pair>,
    slots: Vec<Slot>,
    psn: u32,
    since: Instant,
}

impl Asking {
    /// Makes the holder's queue pair.
    ///
    /// # Errors
    /// [`Refused`].
    pub(crate) fn new(end: &OneSided, rng: &dyn Rng, clock: &dyn Clock) -> Result<Self, Refused> {
        let link = Arc::clone(&end.0);
        let since = clock.now();
        let depth = PIECES as u32;
        let ask = Ask {
            profile: Profile::Rc,
            send_depth: depth,
            receive_depth: 1,
            completions: depth + 1,
            inline_bytes: INLINE_BYTES,
            alone: false,
        };
        let mut pair = link.route().device.create(&ask)?;
        // The owner may nothing here.
        pair.init(&Init { port: link.route().port, access: 0 })?;
        let slots = Region::slots(PIECES.min(pair.granted().send_depth as usize), PIECE_BYTES)?;
        pair.register(&slots)?;
        let psn = rng.next_u64("verbs psn") as u32 & PSN_MASK;
        Ok(Self { link, pair, slots, psn, since })
    }

    /// What to ask the owner with.
    pub(crate) fn request(&self) -> Request {
        Request { number: self.pair.number(), psn: self.psn }
    }

    /// Goes on with what the owner answered. `bytes` is the length of the lease as the holder knows it.
    ///
    /// # Errors
    /// [`Refused`].
    pub(crate) fn open(mut self, answer: &Answer, bytes: u64) -> Result<Reach, Refused> {
        if answer.bytes < bytes {
            return Err(Refused::Answer("the owner's lease is shorter than this node's"));
        }
        let route = self.link.route();
        self.pair.ready_to_receive(&route.ready_to_receive(answer.number, 0))?;
        // A packet is repeated after 67 ms (4.096 µs × 2¹⁴), six times: soft-RoCE takes seven for ever, and an owner that ended the window
        // while its link was cut answers nothing.
        let reliable = ReliableSend { timeout: 14, retries: 6, rnr_retries: 7, reads_max: READS_MAX };
        self.pair.ready_to_send(&ReadyToSend { send_psn: self.psn, reliable: Some(reliable) })?;
        let events = self.pair.events().map(|events| events.as_fd().try_clone_to_owned()).transpose()?;
        Ok(Reach {
            pair: Some(self.pair),
            link: self.link,
            events,
            slots: self.slots,
            under_way: 0,
            done: VecDeque::new(),
            polled: Vec::new(),
            patience: Patience::new(),
            answer: Answer { bytes, ..*answer },
            until: self.since + answer.left,
            fruitful: false,
        })
    }
}

/// Lent memory, reached by its holder. Fields are dropped in this order.
pub(crate) struct Reach {
    /// None when it has ended.
    pair: Option<Box<dyn Pair>>,
    link: Arc<VerbsLink>,
    events: Option<OwnedFd>,
    slots: Vec<Slot>,
    /// Requests that are not complete.
    under_way: usize,
    /// Those that are, in the order in which they were posted.
    done: VecDeque<Slot>,
    polled: Vec<Done>,
    patience: Patience,
    answer: Answer,
    /// When the lease ends as far as this node knows, on its own clock.
    until: Instant,
    /// Something went through.
    fruitful: bool,
}

impl Reach {
    /// Whether it can be written.
    pub(crate) fn writable(&self) -> bool {
        self.answer.writable
    }

    /// Whether it has ended. Another one may be had, or the owner says why not.
    pub(crate) fn has_ended(&self) -> bool {
        self.pair.is_none()
    }

    /// Whether something went through, or nothing because the owner ended it.
    pub(crate) fn was_of_use(&self) -> bool {
        self.fruitful || self.is_over()
    }

    /// Writes `bytes` to `offset`, and says how many of them are in the owner's memory: all, or none that this node knows of, because the
    /// window did not let something through or it was `deadline`.
    pub(crate) fn put(&mut self, offset: u64, bytes: &[u8], clock: &dyn Clock, deadline: Instant) -> usize {
        if bytes.is_empty() || !self.inside(offset, bytes.len()) || !self.writable() || !self.may_begin(clock, deadline) {
            return 0;
        }
        match self.try_put(offset, bytes, clock, deadline) {
            Ok(()) => bytes.len(),
            Err(Over) => {
                self.end();
                0
            }
        }
    }

    /// Reads from `offset` into `into`, and says how many bytes were had. Fewer than all: as [`Reach::put`].
    pub(crate) fn get(&mut self, offset: u64, into: &mut [u8], clock: &dyn Clock, deadline: Instant) -> usize {
        if !self.inside(offset, into.len()) || !self.may_begin(clock, deadline) {
            return 0;
        }
        let mut got = 0;
        if self.try_get(offset, into, &mut got, clock, deadline).is_err() {
            self.end();
        }
        got
    }

    fn inside(&self, offset: u64, bytes: usize) -> bool {
        u64::try_from(bytes).ok().and_then(|bytes| offset.checked_add(bytes)).is_some_and(|end| end <= self.answer.bytes)
    }

    /// Gives up what is under way, and the window with it: the device lets go of the slots when the queue pair is gone.
    fn end(&mut self) {
        self.pair = None;
        self.under_way = 0;
        self.done.clear();
    }

    fn is_over(&self) -> bool {
        self.link.was_told_ended(self.answer.window) || self.link.is_over()
    }

    fn may_begin(&mut self, clock: &dyn Clock, deadline: Instant) -> bool {
        let now = clock.now();
        if self.is_over() || now >= self.until {
            self.end();
        }
        self.pair.is_some() && now < deadline
    }

    fn spot(&self, offset: u64) -> Spot {
        // The end of the range was seen to be an address.
        Spot { address: self.answer.address.saturating_add(offset), key: self.answer.key }
    }

    fn post_write(&mut self, mut slot: Slot, bytes: &[u8], to: Spot) -> Result<(), Over> {
        slot.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        let pair = self.pair.as_mut().ok_or(Over)?;
        pair.post_write(slot, bytes.len(), to).map_err(|error| refused(&error))?;
        self.under_way += 1;
        Ok(())
    }

    fn post_read(&mut self, slot: Slot, bytes: usize, from: Spot) -> Result<(), Over> {
        let pair = self.pair.as_mut().ok_or(Over)?;
        pair.post_read(slot, bytes, from).map_err(|error| refused(&error))?;
        self.under_way += 1;
        Ok(())
    }

    fn try_put(&mut self, offset: u64, bytes: &[u8], clock: &dyn Clock, deadline: Instant) -> Result<(), Over> {
        let mut sent = 0;
        let mut flushed = false;
        loop {
            while sent < bytes.len()
                && let Some(slot) = self.slots.pop()
            {
                let piece = &bytes[sent..bytes.len().min(sent + PIECE_BYTES)];
                self.post_write(slot, piece, self.spot(offset + sent as u64))?;
                sent += piece.len();
            }
            // Reading the last byte shows that all are there: see the module.
            if sent == bytes.len()
                && !flushed
                && let Some(slot) = self.slots.pop()
            {
                self.post_read(slot, 1, self.spot(offset + sent as u64 - 1))?;
                flushed = true;
            }
            if flushed && self.under_way == 0 {
                return Ok(());
            }
            self.wait(clock, deadline)?;
            self.slots.extend(self.done.drain(..));
        }
    }

    fn try_get(&mut self, offset: u64, into: &mut [u8], got: &mut usize, clock: &dyn Clock, deadline: Instant) -> Result<(), Over> {
        let mut asked = 0;
        while *got < into.len() {
            while asked < into.len()
                && let Some(slot) = self.slots.pop()
            {
                let bytes = PIECE_BYTES.min(into.len() - asked);
                self.post_read(slot, bytes, self.spot(offset + asked as u64))?;
                asked += bytes;
            }
            self.wait(clock, deadline)?;
            // Requests of a queue pair complete in order.
            while let Some(slot) = self.done.pop_front() {
                let bytes = PIECE_BYTES.min(into.len() - *got);
                into[*got..*got + bytes].copy_from_slice(&slot.as_slice()[..bytes]);
                *got += bytes;
                self.slots.push(slot);
            }
        }
        Ok(())
    }

    /// Takes what is complete; whether there was anything.
    fn look(&mut self) -> Result<bool, Over> {
        let pair = self.pair.as_mut().ok_or(Over)?;
        pair.poll(&mut self.polled).map_err(|error| refused(&error))?;
        for Done { slot, failed, .. } in self.polled.drain(..) {
            if let Some(status) = failed {
                tracing::debug!(status, window = self.answer.window, "a window onto a peer's memory has ended");
                return Err(Over);
            }
            self.fruitful = true;
            self.under_way -= 1;
            self.done.push_back(slot);
        }
        Ok(!self.done.is_empty())
    }

    /// Waits until something is complete.
    fn wait(&mut self, clock: &dyn Clock, deadline: Instant) -> Result<(), Over> {
        let (mut spun, mut looks) = (0, 0u32);
        let mut eventless = EVENTLESS_MIN;
        loop {
            if self.look()? {
                self.patience.over(spun);
                return Ok(());
            }
            if self.is_over() {
                return Err(Over);
            }
            looks = looks.wrapping_add(1);
            if self.patience.spin(&mut spun) {
                if looks.is_multiple_of(GLANCE_EVERY) {
                    self.link.glance();
                }
                continue;
            }
            self.link.glance();
            let wait = nap(clock.now(), deadline.min(self.until)).ok_or(Over)?;
            let pair = self.pair.as_mut().ok_or(Over)?;
            pair.take_events();
            pair.arm().map_err(|error| refused(&error))?;
            // What completed before gives no event.
            if self.look()? {
                return Ok(());
            }
            let wait = if self.events.is_some() { wait.min(SLEEP_MAX) } else { wait.min(eventless) };
            eventless = (eventless * 2).min(SLEEP_MAX);
            self.sleep(wait)?;
        }
    }

    fn sleep(&self, wait: Duration) -> Result<(), Over> {
        let timeout = Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() };
        let mut events: Vec<PollFd<'_>> = self.events.iter().map(|events| PollFd::new(events, PollFlags::IN)).collect();
        match poll(&mut events, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => {
                tracing::debug!(%error, "cannot wait for an adapter");
                Err(Over)
            }
        }
    }

    /// Where the owner's memory is, for tests that play a holder who wants more.
    #[cfg(test)]
    pub(super) fn answer(&mut self) -> &mut Answer {
        &mut self.answer
    }

    /// Writes whatever is known of the window, as a holder who takes no notice, and says whether the owner's adapter let it through.
    #[cfg(test)]
    pub(super) fn write_blindly(&mut self, offset: u64, bytes: &[u8], clock: &dyn Clock, deadline: Instant) -> bool {
        let slot = self.slots.pop().unwrap();
        let mut outcome = self.post_write(slot, bytes, self.spot(offset));
        while outcome.is_ok() && self.under_way > 0 {
            outcome = if clock.now() < deadline { self.look().map(|_| ()) } else { Err(Over) };
        }
        if outcome.is_err() {
            self.end();
        }
        self.slots.extend(self.done.drain(..));
        outcome.is_ok()
    }
}

fn refused(error: &VerbsError) -> Over {
    tracing::debug!(%error, "a window onto a peer's memory does not work");
    Over
}

impl fmt::Debug for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reach")
            .field("link", &self.link)
            .field("window", &self.answer.window)
            .field("until", &self.until)
            .finish_non_exhaustive()
    }
}
