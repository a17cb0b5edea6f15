//! The router of a node: which handler serves what, which calls are outstanding, who is connected.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use futures::future::{Either, select};
use ractor::{ActorRef, ActorStatus, Message};
use tokio::sync::oneshot;

use super::error::{CallError, ServeError};
use super::frame::{Fault, Header, decode_body};
use super::id::{Service, ServiceId};
use super::inbound::{Inbound, Replier, WireWay};
use super::remote::Remote;
use crate::env::{Clock, Instant, Network, NetworkEvent};
use crate::ids::NodeId;

/// How much a node takes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServicesLimits {
    /// Calls of one peer that may be worked on at a time. More are turned away as overload.
    pub calls_per_peer: usize,
    /// Calls of this node that may be outstanding at one peer. More fail as overload before they are sent.
    pub outstanding_per_peer: usize,
}

impl Default for ServicesLimits {
    fn default() -> Self {
        Self { calls_per_peer: 1024, outstanding_per_peer: 4096 }
    }
}

/// The services of a node and the way to those of others. Cheap to clone; every clone is the same router.
#[derive(Clone)]
pub struct Services {
    inner: Arc<Inner>,
}

struct Inner {
    node: NodeId,
    clock: Arc<dyn Clock>,
    limits: ServicesLimits,
    network: RwLock<Option<Arc<dyn Network>>>,
    handlers: RwLock<BTreeMap<ServiceId, Arc<dyn Handler>>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Connected peers, each with the number of its present connection. An answer goes out only on the connection
    /// that its call came in on: a restarted peer must not get answers to what it asked in an earlier life.
    sessions: BTreeMap<NodeId, u64>,
    last_session: u64,
    last_correlation: u64,
    outstanding: BTreeMap<NodeId, BTreeMap<u64, oneshot::Sender<Ended>>>,
    in_service: BTreeMap<NodeId, usize>,
}

/// How an outstanding call ended.
enum Ended {
    Reply(Bytes),
    Fault(Fault),
    PeerGone,
}

/// Counts one call of a peer as being worked on.
pub(super) struct Permit {
    services: Services,
    peer: NodeId,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.services.state();
        if let Some(count) = state.in_service.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                state.in_service.remove(&self.peer);
            }
        }
    }
}

/// Takes a call off the books when its caller stops waiting, whichever way that happens.
struct Outstanding<'a> {
    services: &'a Services,
    peer: NodeId,
    correlation: u64,
}

impl Drop for Outstanding<'_> {
    fn drop(&mut self) {
        let mut state = self.services.state();
        if let Some(calls) = state.outstanding.get_mut(&self.peer) {
            calls.remove(&self.correlation);
            if calls.is_empty() {
                state.outstanding.remove(&self.peer);
            }
        }
    }
}

/// A handler without its types.
trait Handler: Send + Sync {
    fn name(&self) -> &'static str;
    /// Whether the handler can no longer answer, so that another may take its place.
    fn is_gone(&self) -> bool;
    fn wire(&self, from: NodeId, body: &[u8], call: Option<(WireWay, Permit, Instant)>);
    /// `inbound` is an [`Inbound`] of the handler's service; `false` says that it is of another one.
    fn local(&self, inbound: Box<dyn Any + Send>) -> bool;
}

struct Typed<S, F, G> {
    handle: F,
    gone: G,
    service: PhantomData<fn() -> S>,
}

impl<S, F, G> Typed<S, F, G>
where
    S: Service,
    F: Fn(Inbound<S>) + Send + Sync,
{
    fn run(&self, inbound: Inbound<S>) {
        // A handler is foreign code that runs on the network's actor. If it panics, its caller hears a fault (the
        // replier is dropped by the unwinding) and everybody else goes on.
        if catch_unwind(AssertUnwindSafe(|| (self.handle)(inbound))).is_err() {
            tracing::error!(target: "shoal::service", service = S::NAME, "a handler panicked");
        }
    }
}

impl<S, F, G> Handler for Typed<S, F, G>
where
    S: Service,
    F: Fn(Inbound<S>) + Send + Sync,
    G: Fn() -> bool + Send + Sync,
{
    fn name(&self) -> &'static str {
        S::NAME
    }

    fn is_gone(&self) -> bool {
        (self.gone)()
    }

    fn wire(&self, from: NodeId, body: &[u8], call: Option<(WireWay, Permit, Instant)>) {
        let (reply, deadline) = match call {
            Some((way, permit, deadline)) => (Some(Replier::<S>::wire(way, permit)), Some(deadline)),
            None => (None, None),
        };
        match decode_body::<S::Request>(body) {
            Ok(request) => self.run(Inbound { from, request, reply, deadline }),
            Err(error) => {
                tracing::warn!(target: "shoal::service", service = S::NAME, peer = ?from, %error, "a request cannot be read");
                if let Some(reply) = reply {
                    reply.fault(Fault::Malformed(error.to_string()));
                }
            }
        }
    }

    fn local(&self, inbound: Box<dyn Any + Send>) -> bool {
        match inbound.downcast::<Inbound<S>>() {
            Ok(inbound) => {
                self.run(*inbound);
                true
            }
            Err(_) => false,
        }
    }
}

impl Services {
    /// The router of `node`. It serves and calls locally from the start, and remotely once a network is
    /// [attached](Services::attach).
    pub fn new(node: NodeId, clock: Arc<dyn Clock>, limits: ServicesLimits) -> Self {
        // Correlations begin at the clock's reading, so that two lives of a node do not use the same ones.
        let state = State { last_correlation: clock.now().as_nanos(), ..State::default() };
        Self {
            inner: Arc::new(Inner {
                node,
                clock,
                limits,
                network: RwLock::new(None),
                handlers: RwLock::new(BTreeMap::new()),
                state: Mutex::new(state),
            }),
        }
    }

    /// This node.
    pub fn node(&self) -> NodeId {
        self.inner.node
    }

    /// Sends through `network` from now on. Its events have to be given to [`Services::on_event`], in order.
    pub fn attach(&self, network: Arc<dyn Network>) {
        *self.inner.network.write().unwrap_or_else(PoisonError::into_inner) = Some(network);
    }

    /// Lets go of the network: peers cannot be reached any more.
    pub fn detach(&self) {
        *self.inner.network.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Serves `S` with a function. It is called by the network's actor, so it must not block: it hands the request to
    /// whoever does the work.
    ///
    /// # Errors
    /// If the service's number is in use.
    pub fn serve<S: Service>(&self, handler: impl Fn(Inbound<S>) + Send + Sync + 'static) -> Result<(), ServeError> {
        self.register::<S>(Arc::new(Typed { handle: handler, gone: || false, service: PhantomData }))
    }

    /// Serves `S` with an actor, to which a request is one of its messages. When the actor has stopped, its successor
    /// may be put in its place by calling this again.
    ///
    /// # Errors
    /// If the service's number is in use.
    pub fn serve_actor<S, M>(&self, actor: ActorRef<M>) -> Result<(), ServeError>
    where
        S: Service,
        M: Message + From<Inbound<S>>,
    {
        let to = actor.clone();
        let handle = move |inbound: Inbound<S>| {
            // A message that cannot be delivered is dropped, and its replier then tells the caller.
            if to.send_message(M::from(inbound)).is_err() {
                tracing::debug!(target: "shoal::service", service = S::NAME, "the service's actor has stopped");
            }
        };
        let gone = move || matches!(actor.get_status(), ActorStatus::Stopping | ActorStatus::Stopped);
        self.register::<S>(Arc::new(Typed { handle, gone, service: PhantomData }))
    }

    fn register<S: Service>(&self, handler: Arc<dyn Handler>) -> Result<(), ServeError> {
        let mut handlers = self.inner.handlers.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(by) = handlers.get(&S::ID).filter(|present| !present.is_gone()) {
            return Err(ServeError::Taken { service: S::NAME, id: S::ID, by: by.name() });
        }
        handlers.insert(S::ID, handler);
        Ok(())
    }

    /// Stops serving `S`; `false` if it was not served.
    pub fn withdraw<S: Service>(&self) -> bool {
        self.inner.handlers.write().unwrap_or_else(PoisonError::into_inner).remove(&S::ID).is_some()
    }

    /// The service `S` on `node`, which may be this node.
    pub fn remote<S: Service>(&self, node: NodeId) -> Remote<S> {
        Remote::new(self.clone(), node)
    }

    /// The peers that are connected at the moment, in order of their ids.
    pub fn connected(&self) -> Vec<NodeId> {
        self.state().sessions.keys().copied().collect()
    }

    /// Takes note of what the network reports. Events have to come in order.
    pub fn on_event(&self, event: &NetworkEvent) {
        match event {
            NetworkEvent::Connected(connected) => {
                let mut state = self.state();
                state.last_session += 1;
                let session = state.last_session;
                state.sessions.insert(connected.peer, session);
            }
            NetworkEvent::Disconnected { peer, .. } => {
                let mut state = self.state();
                state.sessions.remove(peer);
                let calls = state.outstanding.remove(peer);
                drop(state);
                for sender in calls.into_iter().flat_map(BTreeMap::into_values) {
                    drop(sender.send(Ended::PeerGone));
                }
            }
            NetworkEvent::Frame { peer, frame } => self.on_frame(*peer, frame),
            _ => {}
        }
    }

    fn on_frame(&self, peer: NodeId, frame: &Bytes) {
        let (header, body) = match Header::decode(frame) {
            Ok(read) => read,
            Err(error) => {
                // Both ends speak the same wire version, so this peer is broken or worse.
                tracing::warn!(target: "shoal::service", ?peer, %error, "a frame cannot be read: the peer is disconnected");
                if let Some(network) = self.network() {
                    network.disconnect(peer);
                }
                return;
            }
        };
        match header {
            Header::Call { correlation, service, deadline_ms } => {
                let Some(session) = self.state().sessions.get(&peer).copied() else { return };
                let way = WireWay { services: self.clone(), peer, session, correlation };
                let Some(handler) = self.handler(service) else { return way.fault("unknown", Fault::UnknownService) };
                let Some(permit) = self.permit(peer) else { return way.fault(handler.name(), Fault::Overloaded) };
                let deadline = self.inner.clock.now() + Duration::from_millis(deadline_ms.into());
                handler.wire(peer, body, Some((way, permit, deadline)));
            }
            Header::Cast { service } => match self.handler(service) {
                Some(handler) => handler.wire(peer, body, None),
                None => tracing::debug!(target: "shoal::service", ?peer, %service, "a cast to a service that is not offered"),
            },
            Header::Reply { correlation } => self.end(peer, correlation, Ended::Reply(frame.slice_ref(body))),
            Header::Fault { correlation, fault } => self.end(peer, correlation, Ended::Fault(fault)),
        }
    }

    fn end(&self, peer: NodeId, correlation: u64, ended: Ended) {
        let sender = self.state().outstanding.get_mut(&peer).and_then(|calls| calls.remove(&correlation));
        match sender {
            Some(sender) => drop(sender.send(ended)),
            None => tracing::trace!(target: "shoal::service", ?peer, correlation, "an answer that nobody waits for"),
        }
    }

    /// Sends an answer on the connection that its call came in on.
    pub(super) fn answer(&self, way: &WireWay, service: &'static str, frame: Bytes) {
        if self.state().sessions.get(&way.peer) != Some(&way.session) {
            return;
        }
        let Some(network) = self.network() else { return };
        if let Err(error) = network.send(way.peer, frame) {
            // The caller finds out at its deadline: there is no room to tell it more.
            tracing::warn!(target: "shoal::service", service, %error, "an answer was lost");
        }
    }

    pub(super) async fn call<S: Service>(&self, node: NodeId, request: S::Request, deadline: Duration) -> Result<S::Reply, CallError> {
        let until = self.inner.clock.now() + deadline;
        if node == self.inner.node {
            self.call_here::<S>(request, deadline, until).await
        } else {
            self.call_peer::<S>(node, request, deadline, until).await
        }
    }

    async fn call_here<S: Service>(&self, request: S::Request, waited: Duration, until: Instant) -> Result<S::Reply, CallError> {
        let (node, service) = (self.inner.node, S::NAME);
        let unknown = CallError::UnknownService { node, service, id: S::ID };
        let Some(handler) = self.handler(S::ID) else { return Err(unknown) };
        let permit = self.permit(node).ok_or(CallError::Overloaded { node })?;
        let (sender, receiver) = oneshot::channel();
        let reply = Some(Replier::<S>::local(node, sender, permit));
        if !handler.local(Box::new(Inbound { from: node, request, reply, deadline: Some(until) })) {
            return Err(unknown);
        }
        match select(receiver, self.inner.clock.sleep_until(until)).await {
            Either::Left((Ok(result), _)) => result,
            Either::Left((Err(_), _)) => Err(CallError::Fault { node, service, reason: "the service stopped".to_owned() }),
            Either::Right(_) => Err(CallError::Deadline { node, service, waited }),
        }
    }

    async fn call_peer<S: Service>(
        &self,
        node: NodeId,
        request: S::Request,
        waited: Duration,
        until: Instant,
    ) -> Result<S::Reply, CallError> {
        let service = S::NAME;
        let network = self.network().ok_or(CallError::NotConnected { node })?;
        let (sender, receiver) = oneshot::channel();
        let correlation = {
            let mut state = self.state();
            state.last_correlation = state.last_correlation.wrapping_add(1);
            let correlation = state.last_correlation;
            let calls = state.outstanding.entry(node).or_default();
            if calls.len() >= self.inner.limits.outstanding_per_peer {
                return Err(CallError::Overloaded { node });
            }
            calls.insert(correlation, sender);
            correlation
        };
        // On the books before it is sent: the answer may be faster than this thread.
        let _booked = Outstanding { services: self, peer: node, correlation };
        let deadline_ms = u32::try_from(waited.as_micros().div_ceil(1000)).unwrap_or(u32::MAX);
        let header = Header::Call { correlation, service: S::ID, deadline_ms };
        let frame = header.encode_with(&request).map_err(|error| CallError::from_frame(error, node, service))?;
        drop(request);
        network.send(node, frame).map_err(|error| CallError::from_send(&error, node, service))?;
        match select(receiver, self.inner.clock.sleep_until(until)).await {
            Either::Left((Ok(Ended::Reply(body)), _)) => {
                decode_body(&body).map_err(|error| CallError::Malformed { node, service, reason: error.to_string() })
            }
            Either::Left((Ok(Ended::Fault(fault)), _)) => Err(CallError::from_fault(fault, node, service, S::ID)),
            Either::Left((Ok(Ended::PeerGone) | Err(_), _)) => Err(CallError::PeerGone { node, service }),
            Either::Right(_) => Err(CallError::Deadline { node, service, waited }),
        }
    }

    pub(super) fn cast<S: Service>(&self, node: NodeId, request: S::Request) -> Result<(), CallError> {
        let service = S::NAME;
        if node == self.inner.node {
            let unknown = CallError::UnknownService { node, service, id: S::ID };
            let Some(handler) = self.handler(S::ID) else { return Err(unknown) };
            let inbound = Inbound::<S> { from: node, request, reply: None, deadline: None };
            return if handler.local(Box::new(inbound)) { Ok(()) } else { Err(unknown) };
        }
        let network = self.network().ok_or(CallError::NotConnected { node })?;
        let frame = Header::Cast { service: S::ID }.encode_with(&request);
        let frame = frame.map_err(|error| CallError::from_frame(error, node, service))?;
        network.send(node, frame).map_err(|error| CallError::from_send(&error, node, service))
    }

    fn permit(&self, peer: NodeId) -> Option<Permit> {
        let mut state = self.state();
        let count = state.in_service.entry(peer).or_default();
        if *count >= self.inner.limits.calls_per_peer {
            return None;
        }
        *count += 1;
        Some(Permit { services: self.clone(), peer })
    }

    fn handler(&self, service: ServiceId) -> Option<Arc<dyn Handler>> {
        self.inner.handlers.read().unwrap_or_else(PoisonError::into_inner).get(&service).cloned()
    }

    fn network(&self) -> Option<Arc<dyn Network>> {
        self.inner.network.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Services {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Services").field("node", &self.inner.node).finish_non_exhaustive()
    }
}
