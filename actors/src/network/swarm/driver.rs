//! The task that owns the swarm: it obeys commands, watches connections come and go, and reports events.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use libp2p::core::ConnectedPoint;
use libp2p::swarm::{ConnectionId, ListenError, Swarm, SwarmEvent};
use libp2p::{Multiaddr, PeerId, identify};
use tokio::sync::{mpsc, oneshot};

use super::address::{lacks_zone, multiaddr, node_id, own_zone, peer_id, socket_address};
use super::announce::{self, Announcer, Found};
use super::behaviour::{self, Behaviour, BehaviourEvent};
use super::connection::{self, Link, Order, Report};
use super::control::{self, Denied, Gate};
use super::errors::{chain, dial_error};
use super::tasks::Tasks;
use super::{Libp2pNetwork, Links, listen};
use crate::env::{
    BoxFuture, Clock, Connected, DisconnectReason, Instant, NetworkConfig, NetworkError, NetworkEvent, NetworkSink, Rng, Spawner, Trouble,
};
use crate::ids::NodeId;
use crate::network::hello::{Handshake, Party, other_version};
use crate::network::peers::{Output, Peers, Verified};
use crate::network::refusals::{Pace, Refusals};

/// How long to wait for the words of a peer that does not know our protocol, before it is reported without them.
const VERSION_TIME: Duration = Duration::from_secs(2);
/// How long a connection to be closed stays, so that the other end learns the reason too.
const FAREWELL_TIME: Duration = Duration::from_secs(1);
/// How long each part of a shutdown may take.
const SHUTDOWN_TIME: Duration = Duration::from_millis(500);
/// How long a peer that turned us away is not dialled again: this, doubling.
const REFUSED_PACE: Pace = Pace { first: Duration::from_secs(2), longest: Duration::from_secs(60) };

/// What the handle asks for.
pub(super) enum Command {
    Dial { peer: Option<NodeId>, address: SocketAddr },
    Doubt { peer: NodeId, addresses: Vec<SocketAddr> },
    Disconnect(NodeId),
    Shutdown(oneshot::Sender<()>),
}

/// A dial under way.
pub(super) struct Dial {
    pub(super) peer: Option<NodeId>,
    pub(super) address: SocketAddr,
    /// Whether it is told if it comes to nothing.
    pub(super) told: bool,
}

/// An established connection.
pub(super) struct Connection {
    pub(super) node: NodeId,
    pub(super) address: SocketAddr,
    pub(super) dialled: bool,
    /// Its task, from the control stream on.
    orders: Option<mpsc::UnboundedSender<Order>>,
    /// What it carries frames with.
    link: Option<Arc<Link>>,
    /// The peer's words on which protocol it speaks.
    protocol: Option<String>,
    /// The peer does not know our protocol.
    unsupported: bool,
    /// What became of it was reported.
    pub(super) concluded: bool,
    /// The swarm has closed it, but its task still reads what had arrived.
    closed: bool,
}

/// What happens to a connection at some moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Doom {
    /// It is closed.
    Close,
    /// It is reported as one that does not know the protocol.
    Unsupported,
    /// Its task is not waited for any longer.
    Forget,
}

/// Whom not to dial.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Target {
    Node(NodeId),
    Address(SocketAddr),
}

pub(super) struct Driver {
    pub(super) swarm: Swarm<Behaviour>,
    commands: mpsc::UnboundedReceiver<Command>,
    reports: mpsc::UnboundedReceiver<(ConnectionId, Report)>,
    reporter: mpsc::UnboundedSender<(ConnectionId, Report)>,
    announcer: Option<(Announcer, mpsc::Receiver<Found>)>,
    pub(super) party: Party,
    protocol: String,
    pub(super) peers: Peers<ConnectionId>,
    pub(super) connections: BTreeMap<ConnectionId, Connection>,
    pub(super) dials: BTreeMap<ConnectionId, Dial>,
    pub(super) refused: Refusals<Target>,
    dooms: BTreeMap<(Instant, ConnectionId), Doom>,
    links: Arc<Links>,
    sink: NetworkSink,
    pub(super) clock: Arc<dyn Clock>,
    rng: Arc<dyn Rng>,
    spawner: Arc<dyn Spawner>,
    tasks: Tasks,
    stopping: bool,
}

impl Driver {
    pub(super) fn start(
        network: &Libp2pNetwork,
        config: NetworkConfig,
        sink: NetworkSink,
        links: Arc<Links>,
        commands: mpsc::UnboundedReceiver<Command>,
    ) -> Result<Self, NetworkError> {
        let NetworkConfig { identity, cluster, listen, mdns, clock, rng, spawner } = config;
        let wanted = listen::resolve(&listen)?;
        let keypair = identity.keypair();
        let tasks = Tasks::default();
        let gate = Gate::new(Arc::clone(&clock), cluster.is_none(), network.carrier_nat);
        let mut swarm = behaviour::swarm(keypair, network.wire_version, gate, &tasks, &spawner)?;
        for address in wanted {
            swarm.listen_on(multiaddr(address)).map_err(|error| NetworkError::Listen { address, reason: chain(&error), in_use: false })?;
        }

        let announcer = mdns.then(|| Announcer::start(&*spawner, Arc::clone(&clock), *swarm.local_peer_id(), Arc::clone(&sink)));
        let announcer = announcer.and_then(|started| {
            started.inspect_err(|error| sink(NetworkEvent::Trouble(announce::trouble(&format!("it does not start: {error}"))))).ok()
        });
        let boot = rng.next_u64("network boot");
        let party = Party { node: identity.node(), wire: network.wire_version, key: cluster, boot };
        let (reporter, reports) = mpsc::unbounded_channel();
        Ok(Self {
            swarm,
            commands,
            reports,
            reporter,
            announcer,
            peers: Peers::new(party.node),
            party,
            protocol: behaviour::protocol(network.wire_version),
            connections: BTreeMap::new(),
            dials: BTreeMap::new(),
            refused: Refusals::new(REFUSED_PACE),
            dooms: BTreeMap::new(),
            links,
            sink,
            clock,
            rng,
            spawner,
            tasks,
            stopping: false,
        })
    }

    /// Runs until it is told to stop, or until nobody can tell it any more.
    pub(super) async fn run(mut self) {
        let done = loop {
            let alarm = self.alarm();
            tokio::select! {
                biased;
                command = self.commands.recv() => match command {
                    Some(Command::Dial { peer, address }) => self.dial(peer, address),
                    Some(Command::Doubt { peer, addresses }) => self.doubt(peer, addresses),
                    Some(Command::Disconnect(peer)) => self.disconnect(peer),
                    Some(Command::Shutdown(done)) => break Some(done),
                    None => break None,
                },
                Some((id, report)) = self.reports.recv() => self.report(id, report),
                event = self.swarm.select_next_some() => self.event(event),
                Some(found) = found(&mut self.announcer) => self.discovered(found),
                () = alarm => self.alarmed(),
            }
        };
        self.shut_down().await;
        if let Some(done) = done {
            let _ = done.send(());
        }
    }

    pub(super) fn emit(&self, event: NetworkEvent) {
        (self.sink)(event);
    }

    // ---- Commands.

    fn disconnect(&mut self, peer: NodeId) {
        let outputs = self.peers.disconnect(peer, false);
        self.obey(outputs);
        // Whatever else there is, such as connections that are not through the handshake yet.
        if let Some(id) = peer_id(peer) {
            let _ = self.swarm.disconnect_peer_id(id);
        }
    }

    // ---- What the swarm reports.

    fn event(&mut self, event: SwarmEvent<BehaviourEvent>) {
        match event {
            SwarmEvent::Behaviour(BehaviourEvent::Control(event)) => self.control(event),
            SwarmEvent::Behaviour(BehaviourEvent::Identify(identify::Event::Received { connection_id, info, .. })) => {
                self.identified(connection_id, info.protocol_version);
            }
            SwarmEvent::ConnectionEstablished { peer_id, connection_id, endpoint, .. } => {
                self.established(&peer_id, connection_id, &endpoint);
            }
            SwarmEvent::ConnectionClosed { connection_id, .. } => self.closed(connection_id),
            SwarmEvent::OutgoingConnectionError { connection_id, error, .. } => {
                if let Some(dial) = self.dials.remove(&connection_id).filter(|dial| dial.told) {
                    self.emit(NetworkEvent::DialFailed { address: dial.address, reason: dial_error(&error) });
                }
            }
            SwarmEvent::IncomingConnectionError { send_back_addr, error, .. } => self.incoming_failed(&send_back_addr, &error),
            SwarmEvent::NewListenAddr { address, .. } => self.listening(address),
            SwarmEvent::ExpiredListenAddr { address, .. } => self.expired(address),
            SwarmEvent::ListenerClosed { reason: Err(error), addresses, .. } => {
                tracing::error!(target: "shoal::network", %error, "a listener has failed: peers cannot reach this node there");
                for address in addresses.iter().filter_map(socket_address) {
                    self.emit(NetworkEvent::Trouble(Trouble {
                        about: format!("control connections at {address}"),
                        what: format!("this node cannot be reached there any more: {error}"),
                        help: "start it again".to_owned(),
                    }));
                }
            }
            SwarmEvent::ListenerError { error, .. } => tracing::warn!(target: "shoal::network", %error, "a listener has trouble"),
            _ => {}
        }
    }

    fn listening(&mut self, address: Multiaddr) {
        let Some(mut socket) = socket_address(&address) else { return };
        if let SocketAddr::V6(v6) = &mut socket
            && lacks_zone(&SocketAddr::V6(*v6))
        {
            v6.set_scope_id(own_zone(IpAddr::V6(*v6.ip())).unwrap_or(0));
        }
        let own = &mut self.swarm.behaviour_mut().control.gate.own;
        if !own.contains(&socket.ip()) {
            own.push(socket.ip());
        }
        if let Some((announcer, _)) = &self.announcer {
            announcer.listening(address);
        }
        self.emit(NetworkEvent::Listening(socket));
    }

    fn expired(&mut self, address: Multiaddr) {
        if let Some(socket) = socket_address(&address) {
            self.swarm.behaviour_mut().control.gate.own.retain(|ip| *ip != socket.ip());
        }
        if let Some((announcer, _)) = &self.announcer {
            announcer.expired(address);
        }
    }

    fn established(&mut self, peer: &PeerId, id: ConnectionId, endpoint: &ConnectedPoint) {
        let dial = self.dials.remove(&id);
        let address = dial.map(|dial| dial.address).or_else(|| socket_address(endpoint.get_remote_address()));
        // The gate lets only nodes through, and the transport only makes connections with such addresses.
        let (Some(node), Some(address), false) = (node_id(peer), address, self.stopping) else {
            self.swarm.close_connection(id);
            return;
        };
        let connection = Connection {
            node,
            address,
            dialled: endpoint.is_dialer(),
            orders: None,
            link: None,
            protocol: None,
            unsupported: false,
            concluded: false,
            closed: false,
        };
        self.connections.insert(id, connection);
    }

    fn control(&mut self, event: control::Event) {
        match event {
            control::Event::Stream(id, stream) => {
                let Some(connection) = self.connections.get_mut(&id).filter(|connection| !connection.closed) else { return };
                let (orders, inbox) = mpsc::unbounded_channel();
                connection.orders = Some(orders);
                let mut nonce = [0; 32];
                self.rng.fill("network nonce", &mut nonce);
                let (handshake, first) = Handshake::start(self.party.clone(), connection.node, connection.dialled, nonce);
                let task = connection::Connection {
                    id,
                    peer: connection.node,
                    stream,
                    handshake,
                    first,
                    reports: self.reporter.clone(),
                    orders: inbox,
                    clock: Arc::clone(&self.clock),
                    sink: Arc::clone(&self.sink),
                };
                self.tasks.spawn(&*self.spawner, "network peer", Box::pin(connection::run(task)));
            }
            control::Event::Unsupported(id) => {
                if let Some(connection) = self.connections.get_mut(&id) {
                    connection.unsupported = true;
                    let known = connection.protocol.clone();
                    match known {
                        Some(protocol) => self.identified(id, protocol),
                        None => self.doom(id, VERSION_TIME, Doom::Unsupported),
                    }
                }
            }
            control::Event::Failed(id, reason) => {
                self.dial_failed(id, format!("the control stream could not be opened: {reason}"));
                self.swarm.close_connection(id);
            }
        }
    }

    /// The peer said which protocol it speaks.
    fn identified(&mut self, id: ConnectionId, protocol: String) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let (node, unsupported) = (connection.node, connection.unsupported);
        connection.protocol = Some(protocol.clone());
        if protocol == self.protocol {
            if unsupported {
                self.turned_away(id, format!("node {} does not know the protocol {protocol} although it says so", node.short()));
            }
            return;
        }
        match protocol.strip_prefix("/shoal/").and_then(|version| version.parse().ok()) {
            Some(theirs) => {
                let reason = other_version(&node.short(), theirs, self.party.wire);
                self.turned_away(id, reason);
            }
            // Others announce themselves by mDNS too; they are none of our business, and no news.
            None => {
                self.dial_failed(id, format!("a libp2p program answers there, but no Shoal node: it speaks {protocol:?}"));
                self.remember_refusal(id, "no Shoal node answers there");
            }
        }
        self.doom(id, FAREWELL_TIME, Doom::Close);
    }

    fn closed(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.closed = true;
        if connection.orders.is_some() {
            // Its task reads what has arrived and then reports the end. Not for ever.
            self.doom(id, FAREWELL_TIME, Doom::Forget);
        } else {
            self.forget(id);
        }
    }

    /// A connection is over, and so is its task.
    fn forget(&mut self, id: ConnectionId) {
        let outputs = self.peers.ended(id, DisconnectReason::Closed);
        self.obey(outputs);
        self.dial_failed(id, "the peer closed the connection before the handshake was over".to_owned());
        self.connections.remove(&id);
    }

    fn incoming_failed(&mut self, from: &Multiaddr, error: &ListenError) {
        let address = socket_address(from);
        if let ListenError::Denied { cause } = error
            && let Some(denied @ Denied::Public(ip)) = cause.downcast_ref::<Denied>()
        {
            let now = self.clock.now();
            let target = Target::Address(SocketAddr::new(*ip, 0));
            if self.refused.standing(&target, now).is_none() {
                self.refused.note(target, now, "");
                self.emit(NetworkEvent::Refused { peer: None, address, reason: denied.to_string() });
            }
            return;
        }
        tracing::debug!(target: "shoal::network", ?address, error = %chain(error), "an incoming connection came to nothing");
    }

    // ---- What the connections' tasks report.

    fn report(&mut self, id: ConnectionId, report: Report) {
        let Some(connection) = self.connections.get(&id) else { return };
        let (node, address, dialled) = (connection.node, connection.address, connection.dialled);
        if let Some(link) = self.links.get(node) {
            self.peers.heard(node, link.heard());
        }
        match report {
            Report::Greeted { session } => self.peers.greeted(id, node, session),
            Report::Verified { boot, session } => {
                let outputs = self.peers.verified(id, Verified { peer: node, boot, session, address, dialled });
                self.obey(outputs);
            }
            Report::Said(hello) => {
                let outputs = self.peers.said(id, &hello);
                self.obey(outputs);
            }
            Report::Refused { by_us, refusal } => {
                self.turned_away(id, refusal.text(by_us, node, self.party.wire));
            }
            Report::Ended { misbehaved } => {
                if let Some(text) = &misbehaved {
                    tracing::warn!(target: "shoal::network", peer = ?node, %address, reason = %text, "a peer does not keep to the protocol");
                    self.dial_failed(id, text.clone());
                }
                let reason = misbehaved.map_or(DisconnectReason::Closed, DisconnectReason::Misbehaved);
                let outputs = self.peers.ended(id, reason);
                self.obey(outputs);
                match self.connections.get_mut(&id) {
                    Some(connection) if connection.closed => self.forget(id),
                    Some(connection) => {
                        connection.orders = None;
                        self.swarm.close_connection(id);
                    }
                    None => {}
                }
            }
        }
    }

    fn obey(&mut self, outputs: Vec<Output<ConnectionId>>) {
        for output in outputs {
            match output {
                Output::Tell(id, hello) => self.order(id, Order::Tell(hello)),
                Output::Adopt { connection: id, accept } => self.adopt(id, accept),
                Output::Leave { connection: id, peer, reason, drain } => {
                    self.links.remove(peer);
                    if let Some(link) = self.connections.get_mut(&id).and_then(|connection| connection.link.take()) {
                        link.shut();
                    }
                    self.order(id, Order::Close { drain });
                    if !drain {
                        self.swarm.close_connection(id);
                    }
                    self.emit(NetworkEvent::Disconnected { peer, reason });
                }
                Output::Drop(id) => self.order(id, Order::Close { drain: false }),
                Output::Already { connection: id, peer, address } => {
                    if let Some(connection) = self.connections.get_mut(&id) {
                        connection.concluded = true;
                    }
                    self.emit(NetworkEvent::AlreadyConnected { peer, address });
                }
            }
        }
    }

    fn adopt(&mut self, id: ConnectionId, accept: bool) {
        let link = Arc::new(Link::new(self.clock.now()));
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.concluded = true;
        connection.link = Some(Arc::clone(&link));
        let (peer, address, dialled) = (connection.node, connection.address, connection.dialled);
        self.links.insert(peer, Arc::clone(&link));
        self.swarm.behaviour_mut().control.gate.welcome(peer, address);
        self.refused.forget(&Target::Node(peer));
        self.refused.forget(&Target::Address(address));
        // Reported before the task may deliver frames.
        self.emit(NetworkEvent::Connected(Connected { peer, address, dialled }));
        self.order(id, Order::Adopt { accept, link });
    }

    fn order(&self, id: ConnectionId, order: Order) {
        if let Some(orders) = self.connections.get(&id).and_then(|connection| connection.orders.as_ref()) {
            let _ = orders.send(order);
        }
    }

    /// A peer was refused, or refused this node. Reported once a connection.
    fn turned_away(&mut self, id: ConnectionId, reason: String) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if std::mem::replace(&mut connection.concluded, true) {
            return;
        }
        let (node, address, dialled) = (connection.node, connection.address, connection.dialled);
        if dialled {
            self.remember_refusal(id, &reason);
        } else {
            self.swarm.behaviour_mut().control.gate.refuse(node, address);
        }
        self.emit(NetworkEvent::Refused { peer: Some(node), address: Some(address), reason });
    }

    // ---- Time.

    fn doom(&mut self, id: ConnectionId, after: Duration, doom: Doom) {
        self.dooms.insert((self.clock.now() + after, id), doom);
    }

    fn alarm(&self) -> BoxFuture<'static, ()> {
        match self.dooms.first_key_value() {
            Some(((at, _), _)) => self.clock.sleep_until(*at),
            None => Box::pin(std::future::pending()),
        }
    }

    fn alarmed(&mut self) {
        let now = self.clock.now();
        while let Some(entry) = self.dooms.first_entry().filter(|entry| entry.key().0 <= now) {
            let ((_, id), doom) = entry.remove_entry();
            match doom {
                Doom::Close => drop(self.swarm.close_connection(id)),
                Doom::Forget => self.forget(id),
                Doom::Unsupported => {
                    if let Some(connection) = self.connections.get(&id) {
                        let (node, wire) = (connection.node.short(), self.party.wire);
                        let reason =
                            format!("node {node} does not speak wire version {wire}: install the same version of shoal on both nodes");
                        self.turned_away(id, reason);
                        self.swarm.close_connection(id);
                    }
                }
            }
        }
    }

    // ---- The end.

    async fn shut_down(mut self) {
        self.stopping = true;
        for peer in self.peers.everybody() {
            let outputs = self.peers.disconnect(peer, true);
            self.obey(outputs);
        }
        if let Some((announcer, _)) = self.announcer.take() {
            announcer.stop().await;
        }
        // First the tasks send what is queued, then the connections are closed.
        self.pump(|driver| driver.connections.values().all(|connection| connection.orders.is_none())).await;
        let open: Vec<ConnectionId> = self.connections.keys().copied().collect();
        for id in open {
            self.swarm.close_connection(id);
        }
        self.pump(|driver| driver.swarm.network_info().connection_counters().num_connections() == 0).await;
        let Self { swarm, tasks, clock, connections, .. } = self;
        // Takes the listeners with it. Connections end with their tasks, which run on their own.
        drop(swarm);
        drop(connections);
        let until = clock.now() + SHUTDOWN_TIME;
        while tasks.are_running() && clock.now() < until {
            clock.sleep_until(clock.now() + Duration::from_millis(2)).await;
        }
    }

    /// Goes on until `done`, or for [`SHUTDOWN_TIME`].
    async fn pump(&mut self, done: impl Fn(&Self) -> bool) {
        let until = self.clock.now() + SHUTDOWN_TIME;
        while !done(self) {
            tokio::select! {
                biased;
                Some((id, report)) = self.reports.recv() => self.report(id, report),
                event = self.swarm.select_next_some() => self.event(event),
                () = self.clock.sleep_until(until) => return,
            }
        }
    }
}

/// What mDNS has found; pending for ever without mDNS.
async fn found(announcer: &mut Option<(Announcer, mpsc::Receiver<Found>)>) -> Option<Found> {
    match announcer {
        Some((_, finds)) => match finds.recv().await {
            Some(found) => Some(found),
            None => std::future::pending().await,
        },
        None => std::future::pending().await,
    }
}
