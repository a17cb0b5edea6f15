//! The swarm of a node: which transport, which protocols, which limits.

use std::sync::Arc;
use std::time::Duration;

use libp2p::core::Transport;
use libp2p::core::upgrade::Version;
use libp2p::identity::Keypair;
use libp2p::swarm::{NetworkBehaviour, StreamProtocol, Swarm};
use libp2p::{connection_limits, identify, noise, ping, tcp, yamux};

use super::control::{self, Gate};
use super::scoped::ScopedTcp;
use super::tasks::Tasks;
use crate::env::{BoxFuture, NetworkError, Spawner};

/// How long a dial may take until the peer is identified.
const DIAL_TIME: Duration = Duration::from_secs(5);
/// How long a connection may stand without a control stream.
const IDLE_TIME: Duration = Duration::from_secs(10);
/// Connections to one peer, simultaneous dials to several of its addresses included.
const CONNECTIONS_PER_PEER_MAX: u32 = 8;
/// Connections that are being made in each direction.
const PENDING_MAX: u32 = 128;
/// Connections in all.
const CONNECTIONS_MAX: u32 = 2048;

/// The protocols of a node. Pings keep routers on the way awake; whether a peer is alive, membership finds out.
#[derive(NetworkBehaviour)]
pub(super) struct Behaviour {
    pub(super) limits: connection_limits::Behaviour,
    pub(super) identify: identify::Behaviour,
    pub(super) ping: ping::Behaviour,
    pub(super) control: control::Behaviour,
}

/// What nodes of a wire version call themselves when they are asked who they are.
pub(super) fn protocol(wire_version: u32) -> String {
    format!("/shoal/{wire_version}")
}

/// A swarm that listens nowhere yet.
pub(super) fn swarm(
    keypair: &Keypair,
    wire_version: u32,
    gate: Gate,
    tasks: &Tasks,
    spawner: &Arc<dyn Spawner>,
) -> Result<Swarm<Behaviour>, NetworkError> {
    let start_error = |what: &str, error: &dyn std::fmt::Display| NetworkError::Start(format!("{what}: {error}"));
    let noise = noise::Config::new(keypair).map_err(|error| start_error("no keys for Noise", &error))?;
    let transport = ScopedTcp::new(tcp::Config::default().nodelay(true))
        .upgrade(Version::V1Lazy)
        .authenticate(noise)
        .multiplex(yamux::Config::default())
        .timeout(DIAL_TIME)
        .boxed();

    let stream = StreamProtocol::try_from_owned(format!("/shoal/control/{wire_version}"))
        .map_err(|error| start_error("no name for the protocol", &error))?;
    let limits = connection_limits::ConnectionLimits::default()
        .with_max_pending_incoming(Some(PENDING_MAX))
        .with_max_pending_outgoing(Some(PENDING_MAX))
        .with_max_established(Some(CONNECTIONS_MAX))
        .with_max_established_per_peer(Some(CONNECTIONS_PER_PEER_MAX));
    // Strangers are told the protocol and nothing else, neither addresses nor which program this is.
    let identify = identify::Config::new(protocol(wire_version), keypair.public())
        .with_agent_version("shoal".to_owned())
        .with_hide_listen_addrs(true)
        .with_cache_size(0)
        .with_interval(Duration::from_secs(24 * 3600));
    let behaviour = Behaviour {
        limits: connection_limits::Behaviour::new(limits),
        identify: identify::Behaviour::new(identify),
        ping: ping::Behaviour::default(),
        control: control::Behaviour::new(stream, gate),
    };

    let (tasks, spawner) = (tasks.clone(), Arc::clone(spawner));
    let executor = move |future: BoxFuture<'static, ()>| tasks.spawn(&*spawner, "network connection", future);
    let config = libp2p::swarm::Config::with_executor(executor).with_idle_connection_timeout(IDLE_TIME);
    Ok(Swarm::new(transport, behaviour, keypair.public().to_peer_id(), config))
}
