//! The libp2p protocol of the control stream: one stream a connection, opened by whoever dialled.
//!
//! `libp2p-stream` offers streams by peer and picks any connection; here it matters which connection a stream is on,
//! because of two connections to one peer only one survives. So this is a small protocol of its own. It is also the
//! gate: it turns away connections before they cost anything.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use libp2p::core::upgrade::{InboundUpgrade, OutboundUpgrade, UpgradeInfo};
use libp2p::core::{Endpoint, transport::PortUse};
use libp2p::swarm::handler::{ConnectionEvent, ConnectionHandler, DialUpgradeError, FullyNegotiatedInbound, FullyNegotiatedOutbound};
use libp2p::swarm::{
    ConnectionDenied, ConnectionHandlerEvent, ConnectionId, FromSwarm, NetworkBehaviour, Stream, StreamProtocol, StreamUpgradeError,
    SubstreamProtocol, THandler, THandlerInEvent, THandlerOutEvent, ToSwarm,
};
use libp2p::{Multiaddr, PeerId};

use super::address::{node_id, socket_address};
use crate::env::Clock;
use crate::ids::NodeId;
use crate::network::reach::is_private;
use crate::network::refusals::{Pace, Refusals};

/// Why the gate does not let a connection through.
#[derive(Debug, thiserror::Error)]
pub(super) enum Denied {
    #[error(
        "{0} is a public address, and a cluster without a key takes peers only from private networks: make a key with `shoal key new` and start all nodes with it"
    )]
    Public(IpAddr),
    #[error("it was refused a moment ago")]
    TooSoon,
    #[error("it has no ed25519 identity, so it is no Shoal node")]
    Foreign,
}

/// Decides who gets as far as a handshake.
pub(super) struct Gate {
    clock: Arc<dyn Clock>,
    /// Whether the cluster has no key, so that addresses are what keeps strangers out.
    open: bool,
    carrier_nat: bool,
    /// Addresses of this machine: a peer on the same machine is no stranger, whatever its address.
    pub(super) own: Vec<IpAddr>,
    /// Peers that were turned away at the handshake.
    refused: Refusals<NodeId>,
    /// Addresses that refusals went to, so that new identities do not get around the limit.
    answered: Refusals<IpAddr>,
}

impl Gate {
    pub(super) fn new(clock: Arc<dyn Clock>, open: bool, carrier_nat: bool) -> Self {
        let second = Duration::from_secs(1);
        Self {
            clock,
            open,
            carrier_nat,
            own: vec![],
            refused: Refusals::new(Pace { first: second, longest: 8 * second }),
            answered: Refusals::new(Pace { first: second / 8, longest: 2 * second }),
        }
    }

    /// Whether an address may be dealt with at all.
    pub(super) fn reach(&self, ip: IpAddr) -> Result<(), Denied> {
        let ip = ip.to_canonical();
        if !self.open || is_private(ip, self.carrier_nat) || self.own.contains(&ip) { Ok(()) } else { Err(Denied::Public(ip)) }
    }

    /// Notes that a peer that dialled was turned away.
    pub(super) fn refuse(&mut self, node: NodeId, address: SocketAddr) {
        let now = self.clock.now();
        self.refused.note(node, now, "");
        self.answered.note(address.ip(), now, "");
    }

    /// Notes that a peer is of the cluster.
    pub(super) fn welcome(&mut self, node: NodeId, address: SocketAddr) {
        self.refused.forget(&node);
        self.answered.forget(&address.ip());
    }

    fn inbound(&self, address: &Multiaddr) -> Result<(), Denied> {
        let Some(ip) = socket_address(address).map(|address| address.ip()) else { return Ok(()) };
        // Nodes of this machine share an address, so it says nothing about them.
        let mine = ip.is_loopback() || self.own.contains(&ip);
        if !mine && self.answered.standing(&ip, self.clock.now()).is_some() {
            return Err(Denied::TooSoon);
        }
        self.reach(ip)
    }

    fn peer(&self, peer: &PeerId, inbound: bool) -> Result<NodeId, Denied> {
        let node = node_id(peer).ok_or(Denied::Foreign)?;
        if inbound && self.refused.standing(&node, self.clock.now()).is_some() { Err(Denied::TooSoon) } else { Ok(node) }
    }
}

/// What the protocol reports.
#[derive(Debug)]
pub(super) enum Event {
    /// The control stream of a connection is there.
    Stream(ConnectionId, Stream),
    /// The peer does not know the protocol.
    Unsupported(ConnectionId),
    /// The stream could not be opened for another reason.
    Failed(ConnectionId, String),
}

/// The protocol on the side of the swarm.
pub(super) struct Behaviour {
    pub(super) gate: Gate,
    protocol: StreamProtocol,
    events: VecDeque<Event>,
    waker: Option<Waker>,
}

impl Behaviour {
    pub(super) fn new(protocol: StreamProtocol, gate: Gate) -> Self {
        Self { gate, protocol, events: VecDeque::new(), waker: None }
    }
}

impl NetworkBehaviour for Behaviour {
    type ConnectionHandler = Handler;
    type ToSwarm = Event;

    fn handle_pending_inbound_connection(&mut self, _: ConnectionId, _: &Multiaddr, remote: &Multiaddr) -> Result<(), ConnectionDenied> {
        self.gate.inbound(remote).map_err(ConnectionDenied::new)
    }

    fn handle_established_inbound_connection(
        &mut self,
        _: ConnectionId,
        peer: PeerId,
        _: &Multiaddr,
        _: &Multiaddr,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        self.gate.peer(&peer, true).map_err(ConnectionDenied::new)?;
        Ok(Handler::new(self.protocol.clone(), false))
    }

    fn handle_established_outbound_connection(
        &mut self,
        _: ConnectionId,
        peer: PeerId,
        _: &Multiaddr,
        _: Endpoint,
        _: PortUse,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        self.gate.peer(&peer, false).map_err(ConnectionDenied::new)?;
        Ok(Handler::new(self.protocol.clone(), true))
    }

    fn on_swarm_event(&mut self, _: FromSwarm<'_>) {}

    fn on_connection_handler_event(&mut self, _: PeerId, connection: ConnectionId, event: THandlerOutEvent<Self>) {
        self.events.push_back(match event {
            FromHandler::Stream(stream) => Event::Stream(connection, stream),
            FromHandler::Unsupported => Event::Unsupported(connection),
            FromHandler::Failed(reason) => Event::Failed(connection, reason),
        });
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<ToSwarm<Self::ToSwarm, THandlerInEvent<Self>>> {
        match self.events.pop_front() {
            Some(event) => Poll::Ready(ToSwarm::GenerateEvent(event)),
            None => {
                self.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// What a handler tells the behaviour.
#[derive(Debug)]
pub(super) enum FromHandler {
    Stream(Stream),
    Unsupported,
    Failed(String),
}

/// The protocol on one connection.
pub(super) struct Handler {
    protocol: StreamProtocol,
    /// Whether the stream is still to be opened, by this end.
    open: bool,
    /// Whether the connection has its stream; a second one is dropped.
    has_stream: bool,
    events: VecDeque<FromHandler>,
}

impl Handler {
    fn new(protocol: StreamProtocol, dialled: bool) -> Self {
        Self { protocol, open: dialled, has_stream: false, events: VecDeque::new() }
    }

    fn stream(&mut self, stream: Stream) {
        if !self.has_stream {
            self.has_stream = true;
            self.events.push_back(FromHandler::Stream(stream));
        }
    }
}

impl ConnectionHandler for Handler {
    type FromBehaviour = Infallible;
    type ToBehaviour = FromHandler;
    type InboundProtocol = Upgrade;
    type OutboundProtocol = Upgrade;
    type InboundOpenInfo = ();
    type OutboundOpenInfo = ();

    fn listen_protocol(&self) -> SubstreamProtocol<Self::InboundProtocol> {
        SubstreamProtocol::new(Upgrade(self.protocol.clone()), ())
    }

    fn poll(&mut self, _: &mut Context<'_>) -> Poll<ConnectionHandlerEvent<Upgrade, (), FromHandler>> {
        // No waker is kept: the connection polls its handler again after everything that could change the answer.
        if std::mem::take(&mut self.open) {
            let protocol = SubstreamProtocol::new(Upgrade(self.protocol.clone()), ());
            return Poll::Ready(ConnectionHandlerEvent::OutboundSubstreamRequest { protocol });
        }
        match self.events.pop_front() {
            Some(event) => Poll::Ready(ConnectionHandlerEvent::NotifyBehaviour(event)),
            None => Poll::Pending,
        }
    }

    fn on_behaviour_event(&mut self, event: Infallible) {
        match event {}
    }

    fn on_connection_event(&mut self, event: ConnectionEvent<'_, Upgrade, Upgrade>) {
        match event {
            ConnectionEvent::FullyNegotiatedInbound(FullyNegotiatedInbound { protocol: stream, .. })
            | ConnectionEvent::FullyNegotiatedOutbound(FullyNegotiatedOutbound { protocol: stream, .. }) => self.stream(stream),
            ConnectionEvent::DialUpgradeError(DialUpgradeError { error, .. }) => self.events.push_back(match error {
                StreamUpgradeError::NegotiationFailed => FromHandler::Unsupported,
                StreamUpgradeError::Timeout => FromHandler::Failed("it did not answer in time".to_owned()),
                StreamUpgradeError::Io(error) => FromHandler::Failed(error.to_string()),
                StreamUpgradeError::Apply(error) => match error {},
            }),
            _ => {}
        }
    }
}

/// Negotiates the protocol and hands out the bare stream.
#[derive(Clone)]
pub(super) struct Upgrade(StreamProtocol);

impl UpgradeInfo for Upgrade {
    type Info = StreamProtocol;
    type InfoIter = std::iter::Once<StreamProtocol>;

    fn protocol_info(&self) -> Self::InfoIter {
        std::iter::once(self.0.clone())
    }
}

impl InboundUpgrade<Stream> for Upgrade {
    type Output = Stream;
    type Error = Infallible;
    type Future = Ready<Result<Stream, Infallible>>;

    fn upgrade_inbound(self, stream: Stream, _: StreamProtocol) -> Self::Future {
        ready(Ok(stream))
    }
}

impl OutboundUpgrade<Stream> for Upgrade {
    type Output = Stream;
    type Error = Infallible;
    type Future = Ready<Result<Stream, Infallible>>;

    fn upgrade_outbound(self, stream: Stream, _: StreamProtocol) -> Self::Future {
        ready(Ok(stream))
    }
}
