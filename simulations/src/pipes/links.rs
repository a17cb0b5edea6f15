//! Tensor links as a model: messages arrive in their order, whoever drops an end tells the other one, and silence ends
//! a link.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Poll, Waker};
use std::time::Duration;

use futures::future::{Either, select};
use shoal_actors::ids::NodeId;
use shoal_actors::stage::links::LINK_TIMEOUT;
use shoal_actors::stage::pipes::Ticket;

use crate::chance::Chance;
use crate::network::{LinkModel, SimExchange};
use crate::world::{World, nanos};

/// How long a link may be silent, as of the TCP provider.
const SILENCE: Duration = Duration::from_millis(1500);
/// How often the ends of a link would say something if they had nothing to say.
const BEAT: Duration = Duration::from_millis(300);
/// How often a dial that nobody answers is repeated.
const REDIAL: Duration = Duration::from_millis(100);
/// What goes through a link in a second, in bytes.
const BYTES_PER_SECOND: u64 = 1 << 30;

/// All tensor links of a world. Every clone is the same.
#[derive(Clone)]
pub struct SimLinks {
    world: World,
    exchange: SimExchange,
    model: LinkModel,
    expected: Arc<Mutex<BTreeMap<u128, Weak<Pipe>>>>,
}

impl fmt::Debug for SimLinks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimLinks").field("expected", &lock(&self.expected).len()).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct State {
    chance: Chance,
    dialled: bool,
    /// When the message before the next arrives: none overtakes another.
    last: u64,
    /// What waits behind a cut.
    held: VecDeque<Vec<u8>>,
    arrived: VecDeque<Vec<u8>>,
    reader: Option<Waker>,
    /// One end is not there any more, and the other was not told.
    gone: bool,
    silent_since: Option<u64>,
    ended: Option<String>,
}

/// A link in its one direction.
struct Pipe {
    links: SimLinks,
    from: NodeId,
    to: NodeId,
    state: Mutex<State>,
}

impl SimLinks {
    /// Links between the hosts of an exchange, which are cut where the exchange's are.
    pub fn new(world: World, exchange: SimExchange) -> Self {
        Self { world, exchange, model: LinkModel::default(), expected: Arc::default() }
    }

    /// `to` expects a link from `from`, who shows this ticket.
    pub(super) fn expect(&self, from: NodeId, to: NodeId, ticket: &Ticket) -> Receiver {
        let chance = self.world.chance("tensor link", u64::try_from(ticket.id() & u128::from(u64::MAX)).unwrap_or(0));
        let state = State {
            chance,
            dialled: false,
            last: 0,
            held: VecDeque::new(),
            arrived: VecDeque::new(),
            reader: None,
            gone: false,
            silent_since: None,
            ended: None,
        };
        let pipe = Arc::new(Pipe { links: self.clone(), from, to, state: Mutex::new(state) });
        let mut expected = lock(&self.expected);
        expected.retain(|_, pipe| pipe.strong_count() > 0);
        expected.insert(ticket.id(), Arc::downgrade(&pipe));
        Receiver(pipe)
    }

    /// Links `from` to `to`.
    pub(super) async fn dial(&self, number: u16, from: NodeId, to: NodeId, ticket: &Ticket) -> Result<Sender, String> {
        let give_up = self.world.now().saturating_add(nanos(LINK_TIMEOUT));
        loop {
            self.world.sleep(number, self.model.latency_max).await;
            if self.reaches(from, to) {
                if self.exchange.life(to).is_none() {
                    return Err(format!("no tensor link to node {to:?}: nobody listens there"));
                }
                let pipe = lock(&self.expected).remove(&ticket.id()).and_then(|pipe| pipe.upgrade());
                let Some(pipe) = pipe.filter(|pipe| pipe.from == from && pipe.to == to) else {
                    return Err(format!("no tensor link to node {to:?}: nobody there expects it"));
                };
                pipe.dialled();
                return Ok(Sender(pipe));
            }
            if self.world.now() >= give_up {
                return Err(format!("no tensor link to node {to:?}: it does not answer"));
            }
            self.world.sleep(number, REDIAL).await;
        }
    }

    fn reaches(&self, one: NodeId, other: NodeId) -> bool {
        let still = |node| self.exchange.is_dark(node) || self.world.is_paused(self.exchange.number(node));
        one == other || !(self.exchange.is_cut(one, other) || still(one) || still(other))
    }
}

impl Pipe {
    fn dialled(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        state.dialled = true;
        let reader = state.reader.take();
        drop(state);
        self.touch(self.to);
        reader.into_iter().for_each(Waker::wake);
        self.beat();
    }

    fn touch(&self, node: NodeId) {
        self.links.world.touch(self.links.exchange.number(node));
    }

    /// Looks, from time to time, whether the ends would still hear each other.
    fn beat(self: &Arc<Self>) {
        let pipe = Arc::downgrade(self);
        self.links.world.after(BEAT, move || {
            let Some(pipe) = pipe.upgrade() else { return };
            let now = pipe.links.world.now();
            let mut state = lock(&pipe.state);
            if state.ended.is_some() {
                return;
            }
            if state.gone || !pipe.links.reaches(pipe.from, pipe.to) {
                let since = *state.silent_since.get_or_insert(now);
                drop(state);
                if now - since >= nanos(SILENCE) {
                    return pipe
                        .end(format!("nothing was heard from the peer for {} ms; it is off, hung or unplugged", SILENCE.as_millis()));
                }
            } else {
                state.silent_since = None;
                let held = std::mem::take(&mut state.held);
                state.arrived.extend(held);
                let reader = if state.arrived.is_empty() { None } else { state.reader.take() };
                drop(state);
                pipe.touch(pipe.to);
                reader.into_iter().for_each(Waker::wake);
            }
            pipe.beat();
        });
    }

    fn arrive(&self, message: Vec<u8>) {
        let mut state = lock(&self.state);
        if !state.held.is_empty() || !self.links.reaches(self.from, self.to) {
            state.held.push_back(message);
            return;
        }
        let (from, to) = (self.links.exchange.number(self.from), self.links.exchange.number(self.to));
        self.links.world.detail(4, from, to, &message);
        state.arrived.push_back(message);
        let reader = state.reader.take();
        drop(state);
        self.touch(self.to);
        reader.into_iter().for_each(Waker::wake);
    }

    fn end(&self, reason: String) {
        let mut state = lock(&self.state);
        state.ended.get_or_insert(reason);
        let reader = state.reader.take();
        drop(state);
        self.touch(self.to);
        reader.into_iter().for_each(Waker::wake);
    }

    /// One end is dropped.
    fn close(self: &Arc<Self>, by: NodeId) {
        let now = self.links.world.now();
        let mut state = lock(&self.state);
        if state.ended.is_some() {
            return;
        }
        if !self.links.reaches(self.from, self.to) || self.links.exchange.is_dark(by) {
            state.gone = true;
            return;
        }
        let latency = nanos(self.links.model.latency(&mut state.chance));
        let at = (now + latency).max(state.last + 1);
        drop(state);
        let pipe = Arc::clone(self);
        self.links.world.at(at, move || pipe.end("the peer closed the link".to_owned()));
    }
}

/// The end that sends. Dropping it closes the link.
pub(super) struct Sender(Arc<Pipe>);

impl Sender {
    /// Puts a message on its way.
    pub(super) fn send(&self, message: Vec<u8>) -> Result<(), String> {
        let pipe = &self.0;
        let now = pipe.links.world.now();
        let mut state = lock(&pipe.state);
        if let Some(reason) = &state.ended {
            return Err(reason.clone());
        }
        let transfer = u64::try_from(message.len()).unwrap_or(u64::MAX).saturating_mul(1_000_000_000) / BYTES_PER_SECOND;
        let latency = nanos(pipe.links.model.latency(&mut state.chance)).saturating_add(transfer);
        state.last = now.saturating_add(latency).max(state.last + 1);
        let at = state.last;
        drop(state);
        let there = Arc::clone(pipe);
        pipe.links.world.at(at, move || there.arrive(message));
        Ok(())
    }

    /// What closes it from elsewhere.
    pub(super) fn closer(&self) -> impl Fn() + Send + Sync + 'static {
        let (pipe, by) = (Arc::downgrade(&self.0), self.0.from);
        move || pipe.upgrade().into_iter().for_each(|pipe| pipe.close(by))
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.0.close(self.0.from);
    }
}

/// The end that receives. Dropping it closes the link.
pub(super) struct Receiver(Arc<Pipe>);

impl Receiver {
    /// Waits for the dial.
    pub(super) async fn accept(&self, number: u16) -> Result<(), String> {
        let pipe = &self.0;
        let dialled = poll_fn(|cx| {
            let mut state = lock(&pipe.state);
            if state.dialled {
                return Poll::Ready(());
            }
            state.reader = Some(cx.waker().clone());
            Poll::Pending
        });
        match select(dialled, pipe.links.world.sleep(number, LINK_TIMEOUT)).await {
            Either::Left(_) => Ok(()),
            Either::Right(_) => Err("it did not connect".to_owned()),
        }
    }

    /// The next message.
    pub(super) async fn recv(&self) -> Result<Vec<u8>, String> {
        poll_fn(|cx| {
            let mut state = lock(&self.0.state);
            if let Some(message) = state.arrived.pop_front() {
                return Poll::Ready(Ok(message));
            }
            if let Some(reason) = &state.ended {
                return Poll::Ready(Err(reason.clone()));
            }
            state.reader = Some(cx.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// What closes it from elsewhere.
    pub(super) fn closer(&self) -> impl Fn() + Send + Sync + 'static {
        let (pipe, by) = (Arc::downgrade(&self.0), self.0.to);
        move || pipe.upgrade().into_iter().for_each(|pipe| pipe.close(by))
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.0.close(self.0.to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::Crash;
    use crate::run;

    const ONE: NodeId = NodeId([1; 32]);

    #[test]
    fn messages_keep_their_order_and_ends_are_told() {
        let world = World::new(3);
        let exchange = SimExchange::new(world.clone(), LinkModel::default());
        let links = SimLinks::new(world.clone(), exchange);
        let inside = world.clone();
        let main = async move {
            let ticket = Ticket::new(7, [0; 32]);
            let receiver = links.expect(ONE, ONE, &ticket);
            // Nobody listens, for no such node runs.
            assert!(links.dial(0, ONE, ONE, &ticket).await.is_err());
            lock(&receiver.0.state).dialled = true;
            let sender = Sender(Arc::clone(&receiver.0));
            receiver.accept(0).await.unwrap();
            for n in 0..20_u8 {
                sender.send(vec![n; usize::from(n) * 1000]).unwrap();
            }
            drop(sender);
            for n in 0..20_u8 {
                assert_eq!(receiver.recv().await.unwrap(), vec![n; usize::from(n) * 1000]);
            }
            assert!(receiver.recv().await.unwrap_err().contains("closed"));
            assert!(inside.now() < 1_000_000_000);
        };
        run(&world, main, || Ok(())).unwrap();
    }

    #[test]
    fn silence_ends_a_link() {
        let world = World::new(3);
        let exchange = SimExchange::new(world.clone(), LinkModel::default());
        let links = SimLinks::new(world.clone(), exchange.clone());
        let other = NodeId([2; 32]);
        let inside = world.clone();
        let main = async move {
            for (cut, power) in [(true, false), (false, true)] {
                let receiver = links.expect(ONE, other, &Ticket::new(8, [0; 32]));
                let sender = Sender(Arc::clone(&receiver.0));
                receiver.0.dialled();
                inside.sleep(0, Duration::from_secs(10)).await;
                sender.send(vec![1]).unwrap();
                assert_eq!(receiver.recv().await.unwrap(), [1]);
                if cut {
                    exchange.cut(ONE, other);
                    sender.send(vec![2]).unwrap();
                }
                if power {
                    exchange.crash(other, Crash::Power);
                }
                let began = inside.now();
                assert!(receiver.recv().await.unwrap_err().contains("nothing was heard"));
                assert!((nanos(SILENCE)..nanos(SILENCE + 2 * BEAT)).contains(&(inside.now() - began)));
                assert!(sender.send(vec![3]).is_err());
                exchange.mend(ONE, other);
            }
        };
        run(&world, main, || Ok(())).unwrap();
    }
}
