//! Links over TCP.
//!
//! One thread for each address that is listened at takes connections in; one more hears the newcomers and sends
//! keep-alives. The bytes of links are moved by the threads that use them.
//!
//! | module | what |
//! |---|---|
//! | `dial`, `door` | the two ends of the handshake |
//! | `terms`, `rails` | what the ends agree on: encryption, further connections |
//! | `record`, `seal` | how a byte stream is cut into records, and how they are encrypted |
//! | `read`, `write`, `link` | records between sockets and the buffers of the caller |

mod addresses;
mod dial;
mod door;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod link;
#[cfg(test)]
mod proxy;
mod rails;
mod read;
mod record;
mod seal;
mod terms;
#[cfg(test)]
mod tests;
#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests_faults;
#[cfg(test)]
mod tests_rails;
#[cfg(test)]
mod tests_sealed;
mod write;

use std::fmt;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::links::Links;
use super::{Capabilities, Desk, DialError, Endpoint, ExpectError, Expected, Provider, ProviderKind, StartError, Ticket};
use crate::Effects;
use crate::env::{Instant, Join};
use crate::link::{CloseReason, Link, LinkOptions, lock};
use door::{Door, STRANGERS_MAX};
use link::{Liveness, TcpLink};
pub use terms::Encryption;
use terms::Terms;

/// How the provider is set up. The default suits a node on its own network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpOptions {
    /// Where to listen; port 0 picks a free one. Empty: all interfaces, IPv4 and IPv6, a free port.
    pub listen: Vec<SocketAddr>,
    /// What to tell peers, instead of the addresses of the interfaces.
    pub advertise: Vec<SocketAddr>,
    /// How often a link says that it lives. A quarter of `silence_max` or less.
    pub keepalive_interval: Duration,
    /// A peer that was not heard for this long is taken for dead.
    pub silence_max: Duration,
    /// How long a newcomer may take to prove itself.
    pub handshake_max: Duration,
    /// Size of the system's send and receive buffers, in bytes; none leaves it to the system. Linux sizes them by itself,
    /// further than it allows to ask for.
    pub socket_buffer_bytes: Option<usize>,
    /// Whether links are encrypted.
    pub encryption: Encryption,
    /// Connections of a link, 1 to 16, of which there are as many as both ends want. Long messages go over all of them, piece by piece,
    /// each connection by another interface of the accepting end where it has several. It pays where two machines have two cables (two
    /// of 1 Gbit/s: 0.237 GB/s instead of 0.119, measured) and costs where one was fast enough, so it is 1 unless it is asked for.
    pub rails: u8,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self {
            listen: Vec::new(),
            advertise: Vec::new(),
            keepalive_interval: Duration::from_millis(300),
            silence_max: Duration::from_millis(1500),
            handshake_max: Duration::from_secs(2),
            socket_buffer_bytes: if cfg!(any(target_os = "linux", target_os = "android")) { None } else { Some(4 * 1024 * 1024) },
            encryption: Encryption::default(),
            rails: 1,
        }
    }
}

/// Links over TCP.
pub struct TcpProvider {
    effects: Effects,
    options: TcpOptions,
    desk: Arc<Desk>,
    links: Arc<Links<TcpLink>>,
    listening: Vec<SocketAddr>,
    stop: Arc<AtomicBool>,
    running: Mutex<Running>,
}

/// What [`Provider::shutdown`] has to end.
#[derive(Default)]
struct Running {
    listeners: Vec<Arc<TcpListener>>,
    threads: Vec<Box<dyn Join>>,
}

impl TcpProvider {
    /// Starts to listen, with a desk of its own.
    ///
    /// # Errors
    /// [`StartError`] if an address cannot be had or a thread not be started.
    pub fn new(effects: Effects, options: TcpOptions) -> Result<Self, StartError> {
        let desk = Desk::new(ProviderKind::Tcp, Arc::clone(&effects.clock));
        Self::with_desk(effects, options, desk)
    }

    /// Starts to listen for peers whose tickets are those of `desk`.
    ///
    /// # Errors
    /// [`StartError`] if an address cannot be had or a thread not be started.
    pub fn with_desk(effects: Effects, options: TcpOptions, desk: Arc<Desk>) -> Result<Self, StartError> {
        let listeners = listen(&options)?;
        let mut listening = Vec::new();
        for listener in &listeners {
            let unknown = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
            listening.push(listener.local_addr().map_err(|source| StartError::Listen { address: unknown, source })?);
        }
        let provider = Self { desk, links: Arc::default(), listening, stop: Arc::default(), running: Mutex::default(), effects, options };
        // From here on dropping the provider ends what has been started.
        provider.start(listeners).map_err(StartError::Thread)?;
        Ok(provider)
    }

    fn start(&self, listeners: Vec<Arc<TcpListener>>) -> std::io::Result<()> {
        let (newcomers, incoming) = sync_channel(STRANGERS_MAX);
        let door = Door {
            effects: self.effects.clone(),
            desk: Arc::clone(&self.desk),
            links: Arc::clone(&self.links),
            stop: Arc::clone(&self.stop),
            incoming,
            liveness: self.liveness(),
            terms: self.terms(),
            listening: self.listening.clone(),
            advertise: self.options.advertise.clone(),
            keepalive_interval: self.options.keepalive_interval.max(Duration::from_millis(1)),
            handshake_max: self.options.handshake_max,
        };
        let mut running = lock(&self.running);
        running.threads.push(self.effects.spawner.thread("tcp door".to_owned(), Box::new(move || door.run()))?);
        for listener in listeners {
            let stop = Arc::clone(&self.stop);
            let newcomers = newcomers.clone();
            let taking = Arc::clone(&listener);
            running.listeners.push(listener);
            let take_in = Box::new(move || take_in(&taking, &newcomers, &stop));
            running.threads.push(self.effects.spawner.thread("tcp accept".to_owned(), take_in)?);
        }
        Ok(())
    }

    fn liveness(&self) -> Liveness {
        Liveness { silence_max: self.options.silence_max }
    }

    fn terms(&self) -> Terms {
        Terms { encryption: self.options.encryption, rails: self.options.rails }
    }

    /// The addresses that are listened at, with the ports that were picked.
    pub fn listening(&self) -> &[SocketAddr] {
        &self.listening
    }
}

/// Binds what the options ask for.
fn listen(options: &TcpOptions) -> Result<Vec<Arc<TcpListener>>, StartError> {
    if options.listen.is_empty() {
        // One socket for both families; where there is no IPv6, the other family alone.
        let both = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
        let v4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        let listener =
            bind(both, true, options).or_else(|_| bind(v4, false, options)).map_err(|source| StartError::Listen { address: v4, source })?;
        return Ok(vec![Arc::new(listener)]);
    }
    let bind_one = |address: &SocketAddr| {
        bind(*address, false, options).map(Arc::new).map_err(|source| StartError::Listen { address: *address, source })
    };
    options.listen.iter().map(bind_one).collect()
}

fn bind(address: SocketAddr, both_families: bool, options: &TcpOptions) -> std::io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(!both_families)?;
    }
    // A fixed port is to be had again at once after a restart. On Windows the option means something else.
    #[cfg(unix)]
    socket.set_reuse_address(true)?;
    set_buffers(&socket, options)?;
    socket.bind(&address.into())?;
    socket.listen(128)?;
    Ok(socket.into())
}

/// Must come before the connection is made: the window's scale is settled then.
fn set_buffers(socket: &Socket, options: &TcpOptions) -> std::io::Result<()> {
    if let Some(bytes) = options.socket_buffer_bytes {
        socket.set_send_buffer_size(bytes)?;
        socket.set_recv_buffer_size(bytes)?;
    }
    Ok(())
}

/// Hands connections to the door until the provider stops.
#[expect(clippy::disallowed_methods, reason = "a thread of real sockets, with nothing to wait on when the system has no descriptors")]
fn take_in(listener: &TcpListener, newcomers: &SyncSender<(TcpStream, SocketAddr)>, stop: &AtomicBool) {
    while !stop.load(Ordering::Acquire) {
        match listener.accept() {
            Ok(newcomer) => match newcomers.try_send(newcomer) {
                // A door that is this far behind is under attack; whoever means it tries again.
                Ok(()) | Err(TrySendError::Full(_)) => {}
                Err(TrySendError::Disconnected(_)) => return,
            },
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
            Err(error) => {
                if stop.load(Ordering::Acquire) {
                    return;
                }
                // Most likely the process has no descriptors left; asking again at once would only burn time.
                tracing::warn!(%error, "cannot take in connections for tensor links");
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

impl Provider for TcpProvider {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Tcp
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { one_sided: false, remote: true, message_bytes_max: u32::MAX, rtt_guess_ns: 200_000 }
    }

    fn endpoints(&self) -> Vec<Endpoint> {
        addresses::to_advertise(&self.listening, &self.options.advertise).into_iter().map(Endpoint::Tcp).collect()
    }

    fn expect(&self, ticket: &Ticket, options: LinkOptions) -> Result<Expected, ExpectError> {
        self.desk.expect(ticket, options)
    }

    fn dial(&self, endpoint: &Endpoint, ticket: &Ticket, options: LinkOptions, deadline: Instant) -> Result<Arc<dyn Link>, DialError> {
        let Endpoint::Tcp(address) = *endpoint else {
            return Err(DialError::Endpoint { provider: ProviderKind::Tcp, endpoint: *endpoint });
        };
        let link = self.dial_address(address, ticket, options, deadline)?;
        self.links.add(&link);
        // Whoever stopped the provider in the meantime has not seen this link.
        if self.stop.load(Ordering::Acquire) {
            link.close(CloseReason::Local);
            return Err(DialError::Stopped(ProviderKind::Tcp));
        }
        Ok(link)
    }

    fn shutdown(&self) {
        self.stop.store(true, Ordering::Release);
        self.desk.stop();
        let Running { listeners, threads } = std::mem::take(&mut *lock(&self.running));
        for listener in &listeners {
            wake(listener);
        }
        drop(listeners);
        for thread in threads {
            thread.join();
        }
        for link in self.links.living() {
            link.close(CloseReason::Local);
        }
    }
}

/// Gets a thread out of `accept`: by closing the socket where that helps, by a visit where it does not.
pub(super) fn wake(listener: &TcpListener) {
    drop(SockRef::from(listener).shutdown(Shutdown::Both));
    if let Ok(mut address) = listener.local_addr() {
        if address.ip().is_unspecified() {
            address.set_ip(if address.is_ipv6() { IpAddr::from(Ipv6Addr::LOCALHOST) } else { IpAddr::from(Ipv4Addr::LOCALHOST) });
        }
        drop(TcpStream::connect_timeout(&address, Duration::from_millis(500)));
    }
}

impl Drop for TcpProvider {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl fmt::Debug for TcpProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpProvider").field("listening", &self.listening).finish_non_exhaustive()
    }
}
