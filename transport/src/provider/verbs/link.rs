//! A link over a queue pair and the connection that it was made over.
//!
//! Messages are cut into chunks of one length. Each is copied into a registered slot, sent, received into another, checked and copied out;
//! what came is acknowledged by posting its receive again, of which the sender learns as a credit.
//!
//! There is no thread for a link. Whoever sends or receives turns the pump, and so does the provider's thread with every keep-alive. Who
//! waits spins a little and then sleeps on three descriptors: the completion queue's events, a bell that another thread of this end rings
//! when it took something that this one waits for, and the anchor.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::anchor::{Anchor, Peer};
use super::bell::Bell;
use super::patience::Patience;
use super::profile::Profile;
use super::pump::{Chunk, Moved, Pump, Who, payload_check};
use super::seats::Seat;
#[cfg(target_os = "linux")]
use super::window::{OneSided, Route};
use super::wire::{HEADER_BYTES, Kind};
use crate::env::{Clock, Instant};
use crate::link::{CloseReason, Gate, Link, LinkHealth, NAP, RecvError, SendError, Vitals, lock, nap};
use crate::provider::ProviderKind;
use crate::provider::links::Living;

/// A message that moves more slowly than this, in bytes per second, is given up.
const RATE_MIN: u64 = 128 * 1024;

/// How long a receiver waits for what a peer sent before it went.
const LINGER: Duration = Duration::from_secs(1);

/// How long an end that is dropped waits until its last chunks have left.
const LEAVE: Duration = Duration::from_millis(200);

/// How long a wait sleeps where the library gives no events: at first, and at most.
const EVENTLESS_MIN: Duration = Duration::from_micros(50);
const EVENTLESS_MAX: Duration = Duration::from_millis(1);

/// What a link is made of.
pub(super) struct Parts {
    /// The pump, whose queue pair is up.
    pub(super) pump: Pump,
    /// The completion queue's events, where there are any.
    pub(super) events: Option<OwnedFd>,
    pub(super) anchor: Anchor,
    pub(super) seat: Seat,
    pub(super) profile: Profile,
    pub(super) chunk_bytes: usize,
    /// What the checks of chunks begin with: ours, the peer's.
    pub(super) salts: [u32; 2],
    /// The peer, for people.
    pub(super) peer: String,
    /// Longest message that this end receives, and that the peer does.
    pub(super) limits: [u32; 2],
    pub(super) silence_max: Duration,
    #[cfg(target_os = "linux")]
    pub(super) route: Route,
}

struct Receiving {
    patience: Patience,
    /// Since when somebody has been waiting, and when it last looked.
    waiting: Option<(Instant, Instant)>,
}

/// Why a wait ended without what it was for.
enum Stop {
    Deadline,
    Closed(CloseReason),
}

/// One end of a link. The pump is dropped before the seat, so that the device has room when the seat is free.
pub(super) struct VerbsLink {
    events: Option<OwnedFd>,
    pump: Mutex<Pump>,
    _seat: Seat,
    anchor: Anchor,
    /// By [`Who`].
    bells: [Bell; 2],
    profile: Profile,
    chunk_bytes: usize,
    salts: [u32; 2],
    peer: String,
    clock: Arc<dyn Clock>,
    silence_max: Duration,
    receive_max: usize,
    send_max: usize,
    writer: Gate<Patience>,
    reader: Gate<Receiving>,
    vitals: Vitals,
    /// When the peer was found gone, and how many chunks it sent, if it said so.
    gone: Mutex<Option<(Instant, Option<u64>)>>,
    sent_chunks: AtomicU64,
    #[cfg(target_os = "linux")]
    windows: Windows,
}

/// What a link knows of windows.
#[cfg(target_os = "linux")]
struct Windows {
    route: Route,
    /// Those onto this end's memory are numbered from 1.
    last: AtomicU64,
    /// Those onto the peer's have ended up to this one.
    ended: AtomicU64,
}

impl VerbsLink {
    pub(super) fn new(parts: Parts, clock: Arc<dyn Clock>) -> std::io::Result<Arc<Self>> {
        let [receive_max, send_max] = parts.limits.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX));
        Ok(Arc::new(Self {
            events: parts.events,
            pump: Mutex::new(parts.pump),
            _seat: parts.seat,
            anchor: parts.anchor,
            bells: [Bell::new()?, Bell::new()?],
            profile: parts.profile,
            chunk_bytes: parts.chunk_bytes,
            salts: parts.salts,
            peer: parts.peer,
            silence_max: parts.silence_max,
            receive_max,
            send_max,
            writer: Gate::new(Patience::new()),
            reader: Gate::new(Receiving { patience: Patience::new(), waiting: None }),
            gone: Mutex::new(None),
            sent_chunks: AtomicU64::new(0),
            #[cfg(target_os = "linux")]
            windows: Windows { route: parts.route, last: AtomicU64::new(0), ended: AtomicU64::new(0) },
            vitals: Vitals::new(clock.now()),
            clock,
        }))
    }

    /// Ends the link and gives the reason that stands, which may be an earlier one.
    fn end(&self, reason: CloseReason) -> CloseReason {
        self.close(reason);
        self.vitals.reason()
    }

    /// Notes if the peer is gone, which ends the link. What it sent before may still be on its way.
    fn look_at_anchor(&self) {
        match self.anchor.look() {
            Peer::There => {}
            Peer::Babbles => {
                self.end(CloseReason::Misbehaved("it says what it should not on the bootstrap connection".to_owned()));
            }
            Peer::Gone(sent) if !self.vitals.has_ended() => {
                lock(&self.gone).get_or_insert((self.clock.now(), sent));
                self.end(CloseReason::Peer);
            }
            Peer::Gone(_) => {}
        }
    }

    /// What a failure means: if the peer has gone, that is why.
    fn failed(&self, reason: CloseReason) -> CloseReason {
        self.look_at_anchor();
        self.end(reason)
    }

    /// Turns the pump and tells whom it concerns.
    fn look(&self, pump: &mut Pump) -> Result<(), CloseReason> {
        let moved = match pump.turn(!self.vitals.has_ended()) {
            Ok(moved) => moved,
            Err(reason) => match self.failed(reason) {
                // What arrived is still to be had.
                CloseReason::Peer => Moved { arrived: true, room: true, ..Moved::default() },
                other => return Err(other),
            },
        };
        self.sent_chunks.store(pump.books().sent(), Ordering::Release);
        if moved.heard {
            self.vitals.heard(self.clock.now());
        }
        if let Some(stamp) = moved.echoed {
            self.note_round_trip(stamp);
        }
        #[cfg(target_os = "linux")]
        if let Some(number) = moved.ended {
            self.windows.ended.fetch_max(number, Ordering::AcqRel);
        }
        for (who, concerned) in [(Who::Receiver, moved.arrived), (Who::Sender, moved.room)] {
            if concerned && std::mem::take(&mut pump.asleep[who as usize]) {
                self.bells[who as usize].ring();
            }
        }
        Ok(())
    }

    fn note_round_trip(&self, stamp: u64) {
        self.vitals.echoed(self.clock.now(), stamp);
    }

    /// Sends a keep-alive and looks at everything. Never waits for the peer.
    pub(super) fn beat(&self) {
        self.look_at_anchor();
        if self.vitals.has_ended() {
            return;
        }
        let mut pump = lock(&self.pump);
        let beaten =
            self.look(&mut pump).and_then(|()| pump.beat(Kind::Ping, self.clock.now().as_nanos()).map_err(|reason| self.failed(reason)));
        self.sent_chunks.store(pump.books().sent(), Ordering::Release);
        if let Err(reason) = beaten {
            tracing::debug!(peer = %self.peer, %reason, "a verbs link ended");
        }
    }

    /// Whether a peer that is gone has sent something that may still come.
    fn more_to_come(&self, pump: &Pump) -> bool {
        let Some((since, Some(sent))) = *lock(&self.gone) else { return false };
        pump.books().received() < sent && self.clock.now().since(since) < LINGER
    }

    /// Waits until `take` finds what it looks for.
    fn wait_for<T>(
        &self,
        who: Who,
        patience: &mut Patience,
        mut quiet: Option<&mut Option<(Instant, Instant)>>,
        deadline: Instant,
        mut take: impl FnMut(&mut Pump) -> Option<T>,
    ) -> Result<T, Stop> {
        let mut spun = 0;
        let mut eventless = EVENTLESS_MIN;
        loop {
            // What the peer sent before it went is still to be had, so whether it went is looked at first.
            let over = self.vitals.has_ended();
            {
                let mut pump = lock(&self.pump);
                pump.asleep[who as usize] = false;
                self.look(&mut pump).map_err(Stop::Closed)?;
                // A sender has nothing to do on a link that is over.
                let found = if over && who == Who::Sender { None } else { take(&mut pump) };
                if let Some(found) = found {
                    patience.over(spun);
                    if let Some(quiet) = quiet {
                        *quiet = None;
                    }
                    return Ok(found);
                }
                if over {
                    let reason = self.vitals.reason();
                    if who == Who::Sender || reason != CloseReason::Peer || !self.more_to_come(&pump) {
                        return Err(Stop::Closed(reason));
                    }
                }
            }
            if patience.spin(&mut spun) {
                continue;
            }
            if !over {
                self.look_at_anchor();
                if self.vitals.has_ended() {
                    continue;
                }
            }
            let now = self.clock.now();
            if let Some(quiet) = quiet.as_deref_mut() {
                self.judge_silence(quiet, now).map_err(Stop::Closed)?;
            }
            let Some(wait) = nap(now, deadline) else { return Err(Stop::Deadline) };
            {
                let mut pump = lock(&self.pump);
                pump.asleep[who as usize] = true;
                pump.arm().map_err(|reason| Stop::Closed(self.failed(reason)))?;
                self.look(&mut pump).map_err(Stop::Closed)?;
                if !pump.asleep[who as usize] {
                    // It was just now that something came.
                    continue;
                }
            }
            let wait = if self.events.is_some() { wait } else { wait.min(eventless) };
            eventless = (eventless * 2).min(EVENTLESS_MAX);
            self.sleep(who, wait, over)?;
        }
    }

    /// Ends the link if nothing has been heard for too long while somebody waited.
    fn judge_silence(&self, waiting: &mut Option<(Instant, Instant)>, now: Instant) -> Result<(), CloseReason> {
        // A machine that slept has not been waiting, nor has a thread that did other things.
        let since = match *waiting {
            Some((since, last)) if now.since(last) <= NAP * 2 => since,
            _ => now,
        };
        *waiting = Some((since, now));
        let silence = now.since(since.max(self.vitals.last_heard()));
        if silence > self.silence_max && !self.vitals.has_ended() {
            let silence_ms = u64::try_from(silence.as_millis()).unwrap_or(u64::MAX);
            return Err(self.end(CloseReason::Silent { silence_ms }));
        }
        Ok(())
    }

    /// Sleeps until the bell, an event, or the end of the peer.
    fn sleep(&self, who: Who, wait: Duration, over: bool) -> Result<(), Stop> {
        let bell = &self.bells[who as usize];
        let timeout = Timespec { tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX), tv_nsec: wait.subsec_nanos().into() };
        let watched = PollFlags::IN;
        // A descriptor in whose place another stands is looked at twice, which does no harm.
        let mut fds = [PollFd::new(bell, watched), PollFd::new(bell, watched), PollFd::new(bell, watched)];
        if let Some(events) = &self.events {
            fds[1] = PollFd::new(events, watched);
        }
        // Once it is over, the anchor has nothing more to say, and would say so at once.
        if !over {
            fds[2] = PollFd::new(&self.anchor, watched);
        }
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Stop::Closed(self.end(CloseReason::Broken(format!("cannot wait: {error}"))))),
        }
        bell.hush();
        if !over && !fds[2].revents().is_empty() {
            self.look_at_anchor();
        }
        Ok(())
    }

    /// Bytes of a message that a chunk holds.
    fn room(&self) -> usize {
        self.chunk_bytes - HEADER_BYTES
    }

    fn next_chunk(&self, receiving: &mut Receiving, deadline: Instant) -> Result<Chunk, Stop> {
        let Receiving { patience, waiting } = receiving;
        self.wait_for(Who::Receiver, patience, Some(waiting), deadline, Pump::next)
    }

    /// Copies a chunk's payload to the start of `into` and posts its slot again.
    fn unload(&self, chunk: Chunk, into: &mut [u8]) -> Result<(), CloseReason> {
        let payload = chunk.payload();
        into[..payload.len()].copy_from_slice(payload);
        // What is checked is the copy, which no device touches.
        if payload_check(self.profile, self.salts[1], &into[..payload.len()]) != chunk.header.payload_check {
            let text = format!("chunk {} was damaged on its way: its payload's check is wrong", chunk.header.sequence);
            return Err(self.failed(CloseReason::Broken(text)));
        }
        if self.vitals.has_ended() {
            return Ok(());
        }
        let mut pump = lock(&self.pump);
        let given = pump.give_back(chunk.slot).and_then(|()| pump.speak());
        self.sent_chunks.store(pump.books().sent(), Ordering::Release);
        match given.map_err(|reason| self.failed(reason)) {
            // What arrived before is whole.
            Ok(()) | Err(CloseReason::Peer) => Ok(()),
            Err(reason) => Err(reason),
        }
    }
}

/// For windows onto memory at either end.
#[cfg(target_os = "linux")]
impl VerbsLink {
    /// The way to the peer.
    pub(super) fn route(&self) -> &Route {
        &self.windows.route
    }

    /// A number for a new window onto this end's memory.
    pub(super) fn number_window(&self) -> u64 {
        self.windows.last.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Tells the peer that its windows have ended up to this one. Never waits: where there is no room, it goes out later.
    pub(super) fn tell_ended(&self, number: u64) {
        if self.vitals.has_ended() {
            return;
        }
        let mut pump = lock(&self.pump);
        pump.tell_ended(number);
        let spoken = pump.speak();
        self.sent_chunks.store(pump.books().sent(), Ordering::Release);
        drop(pump);
        if let Err(reason) = spoken {
            self.failed(reason);
        }
    }

    /// Whether the peer has told that this window has ended.
    pub(super) fn was_told_ended(&self, number: u64) -> bool {
        number <= self.windows.ended.load(Ordering::Acquire)
    }

    /// Whether the link has ended.
    pub(super) fn is_over(&self) -> bool {
        self.vitals.has_ended()
    }

    /// Looks at what has come and whether the peer is there, for a thread that waits for something else. Never waits.
    pub(super) fn glance(&self) {
        self.look_at_anchor();
        if !self.vitals.has_ended() {
            // What it finds is told to whom it concerns.
            drop(self.look(&mut lock(&self.pump)));
        }
    }
}

/// Copies from `parts`, beginning `at` bytes into their concatenation.
fn fill(into: &mut [u8], parts: &[&[u8]], at: usize) {
    let (mut skip, mut done) = (at, 0);
    for part in parts {
        let from = skip.min(part.len());
        skip -= from;
        let bytes = (part.len() - from).min(into.len() - done);
        into[done..done + bytes].copy_from_slice(&part[from..from + bytes]);
        done += bytes;
    }
}

impl Living for VerbsLink {
    fn has_ended(&self) -> bool {
        self.vitals.has_ended()
    }
}

impl Link for VerbsLink {
    fn provider(&self) -> ProviderKind {
        ProviderKind::Verbs
    }

    fn peer(&self) -> String {
        self.peer.clone()
    }

    fn message_bytes_max(&self) -> usize {
        self.send_max
    }

    #[cfg(target_os = "linux")]
    fn one_sided(self: Arc<Self>) -> Option<OneSided> {
        self.profile.is_reliable().then(|| OneSided::new(self))
    }

    fn send(&self, parts: &[&[u8]], deadline: Instant) -> Result<(), SendError> {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        let message = u32::try_from(bytes).ok().filter(|_| bytes <= self.send_max);
        let Some(message) = message else { return Err(SendError::TooLong { bytes, limit: self.send_max }) };
        let Some(mut patience) = self.writer.enter(&*self.clock, deadline) else { return Err(SendError::Deadline) };
        let mut done = 0;
        loop {
            // A message begins when it can go out whole, or a long one when it can make some way at once. More than half of the window must
            // not be asked for: the peer tells of receives that it posted only now and then.
            let chunks = if done == 0 { bytes.div_ceil(self.room()).max(1) as u64 } else { 1 };
            let take = |pump: &mut Pump| {
                let most = (pump.books().window() / 2).max(1);
                pump.slot_for_data(chunks.min(most))
            };
            let mut slot = self.wait_for(Who::Sender, &mut patience, None, deadline, take).map_err(|stop| match stop {
                Stop::Deadline if done == 0 => SendError::Deadline,
                // The peer has seen its beginning.
                Stop::Deadline => self.end(CloseReason::Stalled).into(),
                Stop::Closed(reason) => reason.into(),
            })?;
            let length = (bytes - done).min(self.room());
            let payload = &mut slot.as_mut_slice()[HEADER_BYTES..HEADER_BYTES + length];
            fill(payload, parts, done);
            let check = payload_check(self.profile, self.salts[0], payload);
            let kind = if done == 0 { Kind::First } else { Kind::More };
            let mut pump = lock(&self.pump);
            if self.vitals.has_ended() {
                pump.put_back(slot);
                return Err(self.vitals.reason().into());
            }
            let sent = pump.send(slot, kind, length, message, check);
            self.sent_chunks.store(pump.books().sent(), Ordering::Release);
            drop(pump);
            sent.map_err(|reason| self.failed(reason))?;
            done += length;
            if done == bytes {
                break;
            }
        }
        self.vitals.sent(bytes);
        Ok(())
    }

    fn recv(&self, buffer: &mut [u8], deadline: Instant) -> Result<usize, RecvError> {
        let Some(mut receiving) = self.reader.enter(&*self.clock, deadline) else { return Err(RecvError::Deadline) };
        let receiving = &mut *receiving;
        if self.vitals.has_ended() {
            // What arrived before the peer went is still to be had; after any other end the stream means nothing.
            let reason = self.vitals.reason();
            if reason != CloseReason::Peer {
                return Err(reason.into());
            }
        }
        let first = self.next_chunk(receiving, deadline).map_err(|stop| match stop {
            Stop::Deadline => RecvError::Deadline,
            Stop::Closed(reason) => reason.into(),
        })?;
        let bytes = first.header.message as usize;
        let limit = buffer.len().min(self.receive_max);
        if bytes > limit {
            let what = format!("a message of {bytes} bytes is announced where at most {limit} are agreed");
            return Err(self.end(CloseReason::Misbehaved(what)).into());
        }
        // A message that has begun is finished, or the link ends. What bounds the wait is the silence limit and the
        // slowest rate that is worth waiting for.
        let slowest = Duration::from_millis(bytes as u64 / (RATE_MIN / 1000));
        let body_deadline = self.clock.now() + slowest + self.silence_max * 2;
        let (mut chunk, mut got) = (first, 0);
        loop {
            let length = chunk.header.length as usize;
            let kind = if got == 0 { Kind::First } else { Kind::More };
            let fits = length > 0 || bytes == 0;
            if chunk.header.kind != kind || chunk.header.message as usize != bytes || length > bytes - got || !fits {
                let what = format!("a chunk of kind {:?} and {length} bytes comes after {got} of {bytes}", chunk.header.kind);
                return Err(self.end(CloseReason::Misbehaved(what)).into());
            }
            self.unload(chunk, &mut buffer[got..got + length])?;
            got += length;
            if got == bytes {
                break;
            }
            chunk = self.next_chunk(receiving, body_deadline).map_err(|stop| match stop {
                Stop::Deadline => self.end(CloseReason::Stalled),
                Stop::Closed(reason) => reason,
            })?;
        }
        self.vitals.received(bytes);
        Ok(bytes)
    }

    fn health(&self) -> LinkHealth {
        self.vitals.health()
    }

    fn close(&self, reason: CloseReason) {
        if self.vitals.end(reason) {
            self.anchor.part(self.sent_chunks.load(Ordering::Acquire));
        }
        for bell in &self.bells {
            bell.ring();
        }
    }
}

impl Drop for VerbsLink {
    fn drop(&mut self) {
        self.close(CloseReason::Local);
        if self.vitals.reason() != CloseReason::Local {
            return;
        }
        // What was sent is to arrive, so the queue pair outlives it a little.
        let deadline = self.clock.now() + LEAVE;
        loop {
            let mut pump = lock(&self.pump);
            if pump.turn(false).is_err() || pump.books().leaving() == 0 {
                return;
            }
            drop(pump);
            let Some(wait) = nap(self.clock.now(), deadline) else { return };
            let wait = wait.min(EVENTLESS_MIN);
            self.bells[0].hush();
            let timeout = Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() };
            // The bell does not ring any more; it is a way to wait.
            if poll(&mut [PollFd::new(&self.bells[0], PollFlags::IN)], Some(&timeout)).is_err() {
                return;
            }
        }
    }
}

impl fmt::Debug for VerbsLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerbsLink")
            .field("peer", &self.peer)
            .field("profile", &self.profile)
            .field("ended", &self.vitals.has_ended())
            .finish_non_exhaustive()
    }
}
