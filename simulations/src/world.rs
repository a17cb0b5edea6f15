//! Virtual time: one queue of everything that is going to happen, in nanoseconds.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::chance::Chance;
use crate::trace::Trace;

/// A time and, among events of one time, the order in which they were scheduled.
type Key = (u64, u64);

enum Event {
    Timer { node: u16, waker: Waker },
    Call(Act),
}

struct State {
    now: u64,
    order: u64,
    queue: BTreeMap<Key, Event>,
    touched: BTreeSet<u16>,
    /// What waits until paused nodes go on.
    paused: BTreeMap<u16, Vec<Act>>,
}

type Act = Box<dyn FnOnce() + Send>;

struct Shared {
    seed: u64,
    state: Mutex<State>,
    trace: Mutex<Trace>,
    failure: Mutex<Option<String>>,
}

/// A simulated world. Every clone is the same one.
///
/// Time stands still while anything can run, and then jumps to the next event. Nothing in a world depends on the
/// machine's clock, on its number of processors or on addresses in memory.
#[derive(Clone)]
pub struct World {
    shared: Arc<Shared>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    /// An empty world at time zero. All chance in it follows from `seed`.
    pub fn new(seed: u64) -> Self {
        let state = State { now: 0, order: 0, queue: BTreeMap::new(), touched: BTreeSet::new(), paused: BTreeMap::new() };
        let (trace, failure) = (Mutex::new(Trace::new(seed)), Mutex::default());
        Self { shared: Arc::new(Shared { seed, state: Mutex::new(state), trace, failure }) }
    }

    /// What all chance follows from.
    pub fn seed(&self) -> u64 {
        self.shared.seed
    }

    /// A stream of chance for `purpose`, told apart from others of that name by `number`.
    pub fn chance(&self, purpose: &str, number: u64) -> Chance {
        Chance::new(self.shared.seed, purpose, number)
    }

    /// Nanoseconds since the beginning of the world.
    pub fn now(&self) -> u64 {
        lock(&self.shared.state).now
    }

    /// Calls `act` after `delay`, when nothing can run that was caused by earlier events.
    pub fn after(&self, delay: Duration, act: impl FnOnce() + Send + 'static) {
        let now = self.now();
        self.at(now.saturating_add(nanos(delay)), act);
    }

    /// Calls `act` at a time in nanoseconds since the beginning, or at once after what is due now if that has passed.
    pub fn at(&self, at: u64, act: impl FnOnce() + Send + 'static) {
        let mut state = lock(&self.shared.state);
        state.order += 1;
        let key = (at.max(state.now), state.order);
        state.queue.insert(key, Event::Call(Box::new(act)));
    }

    /// Resolves after `delay`. `node` is whose timer it is, for the trace.
    pub fn sleep(&self, node: u16, delay: Duration) -> Sleep {
        let at = self.now().saturating_add(nanos(delay));
        self.sleep_until(node, at)
    }

    /// Resolves at a time in nanoseconds since the beginning.
    pub fn sleep_until(&self, node: u16, at: u64) -> Sleep {
        Sleep { world: self.clone(), node, at, key: None }
    }

    /// Takes the next event; `false` if there is none.
    pub(crate) fn step(&self) -> bool {
        let (at, event) = {
            let mut state = lock(&self.shared.state);
            let Some(((at, _), event)) = state.queue.pop_first() else { return false };
            state.now = at;
            if let Event::Timer { node, .. } = event {
                state.touched.insert(node);
            }
            (at, event)
        };
        lock(&self.shared.trace).event(at);
        match event {
            Event::Timer { node, waker } => {
                self.detail(1, node, node, &[]);
                self.on_node(node, Box::new(move || waker.wake()));
            }
            Event::Call(act) => act(),
        }
        true
    }

    /// Says that something happens to a node now, so that [`Checks`](crate::invariants::Checks) looks at it. Timers of a
    /// node and what the network delivers to it say so by themselves.
    pub fn touch(&self, node: u16) {
        lock(&self.shared.state).touched.insert(node);
    }

    /// The nodes to which something has happened since this was asked last.
    pub(crate) fn take_touched(&self) -> BTreeSet<u16> {
        std::mem::take(&mut lock(&self.shared.state).touched)
    }

    /// Does something to a node: now, or when it goes on.
    pub(crate) fn on_node(&self, node: u16, act: Box<dyn FnOnce() + Send>) {
        let mut state = lock(&self.shared.state);
        match state.paused.get_mut(&node) {
            Some(waiting) => waiting.push(act),
            None => {
                drop(state);
                act();
            }
        }
    }

    /// Stops a node where it stands, while its clock goes on. `false` if it is paused already.
    pub fn pause(&self, node: u16) -> bool {
        let mut state = lock(&self.shared.state);
        let fresh = !state.paused.contains_key(&node);
        state.paused.entry(node).or_default();
        fresh
    }

    /// Lets a paused node go on: all that has happened to it in the meantime happens now.
    pub fn resume(&self, node: u16) {
        let waiting = lock(&self.shared.state).paused.remove(&node).unwrap_or_default();
        self.touch(node);
        waiting.into_iter().for_each(|act| act());
    }

    /// Forgets a pause, and what has happened in it.
    pub(crate) fn unpause(&self, node: u16) {
        let waiting = lock(&self.shared.state).paused.remove(&node);
        drop(waiting);
    }

    /// Whether a node is paused.
    pub fn is_paused(&self, node: u16) -> bool {
        lock(&self.shared.state).paused.contains_key(&node)
    }

    /// Drops everything that was going to happen. Events and what they belong to refer to each other, so a world that
    /// is not ended is never freed.
    pub(crate) fn end(&self) {
        let mut state = lock(&self.shared.state);
        let (queue, paused) = (std::mem::take(&mut state.queue), std::mem::take(&mut state.paused));
        drop(state);
        drop((queue, paused));
    }

    /// Adds to the trace's hash what an event was.
    pub(crate) fn detail(&self, tag: u8, from: u16, to: u16, content: &[u8]) {
        lock(&self.shared.trace).detail(tag, from, to, content);
    }

    /// Adds something to the trace that people may want to read.
    pub fn note(&self, text: impl AsRef<str>) {
        let now = self.now();
        lock(&self.shared.trace).note(now, text.as_ref());
    }

    /// The run has failed. The first reason counts.
    pub fn fail(&self, reason: impl Into<String>) {
        lock(&self.shared.failure).get_or_insert_with(|| reason.into());
    }

    /// Why the run has failed, if it has.
    pub fn failure(&self) -> Option<String> {
        lock(&self.shared.failure).clone()
    }

    /// Events that have happened.
    pub fn events(&self) -> u64 {
        lock(&self.shared.trace).events()
    }

    /// The hash over all that has happened.
    pub fn trace_hash(&self) -> blake3::Hash {
        lock(&self.shared.trace).hash()
    }

    /// The latest notes, oldest first.
    pub fn recent(&self) -> Vec<String> {
        lock(&self.shared.trace).recent()
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.shared.state);
        f.debug_struct("World").field("now", &state.now).field("events", &state.queue.len()).finish_non_exhaustive()
    }
}

/// Nanoseconds of a duration; the longest ones saturate.
pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// A timer in virtual time. Dropped, it leaves no trace in the queue.
#[derive(Debug)]
#[must_use = "a timer that nobody waits for does nothing"]
pub struct Sleep {
    world: World,
    node: u16,
    at: u64,
    key: Option<Key>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let world = self.world.clone();
        let mut state = lock(&world.shared.state);
        if state.now >= self.at {
            return Poll::Ready(());
        }
        let at = self.at;
        let key = *self.key.get_or_insert_with(|| {
            state.order += 1;
            (at, state.order)
        });
        let timer = Event::Timer { node: self.node, waker: cx.waker().clone() };
        let before = state.queue.insert(key, timer);
        // A waker may own the last reference to a task, whose end may take this lock.
        drop(state);
        drop(before);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            let event = lock(&self.world.shared.state).queue.remove(&key);
            drop(event);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run;

    #[test]
    fn time_jumps_and_events_of_one_time_keep_their_order() {
        let world = World::new(1);
        let log = Arc::new(Mutex::new(vec![]));
        for (at, what) in [(5, "b"), (3, "a"), (5, "c")] {
            let log = Arc::clone(&log);
            world.at(at, move || lock(&log).push(what));
        }
        let (inside, told) = (world.clone(), Arc::clone(&log));
        let main = async move {
            inside.sleep(0, Duration::from_secs(3600)).await;
            lock(&told).push("d");
            inside.now()
        };
        assert_eq!(run(&world, main, || Ok(())).unwrap(), 3_600_000_000_000);
        assert_eq!(*lock(&log), ["a", "b", "c", "d"]);
    }

    #[test]
    fn who_waits_for_nothing_is_found_out() {
        let world = World::new(1);
        let error = run(&world, std::future::pending::<()>(), || Ok(())).unwrap_err();
        assert!(error.to_string().contains("nothing is left to happen"), "{error}");
    }

    #[test]
    fn a_dropped_timer_is_gone() {
        let world = World::new(1);
        let inside = world.clone();
        let main = async move {
            let long = Box::pin(inside.sleep(0, Duration::from_secs(100)));
            let short = Box::pin(inside.sleep(0, Duration::from_secs(1)));
            drop(futures::future::select(long, short).await);
            inside.now()
        };
        assert_eq!(run(&world, main, || Ok(())).unwrap(), 1_000_000_000);
        assert!(!world.step());
    }

    #[test]
    fn a_paused_node_goes_on_where_it_stood() {
        let world = World::new(1);
        let inside = world.clone();
        let main = async move {
            assert!(inside.pause(3) && !inside.pause(3) && inside.is_paused(3));
            let resumed = inside.clone();
            inside.after(Duration::from_secs(10), move || resumed.resume(3));
            inside.sleep(4, Duration::from_secs(1)).await;
            assert_eq!(inside.now(), 1_000_000_000, "others do not wait");
            inside.sleep(3, Duration::from_secs(2)).await;
            inside.now()
        };
        assert_eq!(run(&world, main, || Ok(())).unwrap(), 10_000_000_000);
    }
}
