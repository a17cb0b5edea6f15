//! Links over RDMA adapters: InfiniBand and RoCE on Linux, Thunderbolt 5 on macOS.
//!
//! The verbs library is opened at run time; a machine without it, or without a device, gets [`NoDevices`] and goes on by its other
//! providers. Queue pairs are used in one of two ways, see [`Profile`]: `rc` where the adapter retransmits, `uc` within the narrow contract
//! of Apple's library. Both SEND from registered slots into slots that the peer has posted, and never more than it has posted.
//!
//! A link's memory is its own, and the peer is never told an address or a key of it, so none of it is written to by one-sided
//! operations. (WRITE_WITH_IMM would save a receive's copy only if messages were received in place.) Memory that is lent is reached by queue
//! pairs of its own.
//!
//! | module | what |
//! |---|---|
//! | `device` | what the protocol needs of a device |
//! | `ffi` | the machine's devices |
//! | `profile` | the two ways of using queue pairs |
//! | `door` | handshake, cards, and queue pairs brought up |
//! | `wire` | cards and chunk headers, byte for byte |
//! | `accounts` | credits and frames: what may be posted now |
//! | `pump` | a queue pair with its books |
//! | `anchor` | the bootstrap connection, which ends with the peer |
//! | `link` | messages in chunks, and waiting |
//! | `seats` | how many links a device carries |
//! | `window` | lent memory that the holder's adapter reaches by itself (`rc` on Linux) |

mod accounts;
mod anchor;
mod bell;
mod device;
mod door;
mod ffi;
mod link;
mod patience;
mod profile;
mod pump;
mod seats;
#[cfg(target_os = "linux")]
pub(crate) mod window;
mod wire;

#[cfg(test)]
pub(crate) mod apple;
#[cfg(test)]
pub(crate) mod guest;
#[cfg(test)]
pub(crate) mod reliable;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::reception::Reception;
use super::tcp::wake;
use super::{Capabilities, Desk, DialError, Endpoint, ExpectError, Expected, Provider, ProviderKind, StartError, Ticket};
use crate::Effects;
use crate::env::{Instant, Join};
use crate::link::{Link, LinkOptions, lock};
use device::Devices;
use door::{Making, Place};
use link::VerbsLink;
use seats::Seats;

pub use device::{InUse, NoDevices};
pub use profile::Profile;
#[cfg(target_os = "linux")]
pub use window::OneSided;

const KIND: ProviderKind = ProviderKind::Verbs;

/// How the provider is set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerbsOptions {
    /// How queue pairs are used. Both ends must agree.
    pub profile: Profile,
    /// Where to listen for the connections that links are made over; port 0 picks a free one. Empty: all interfaces, a free port. Dials leave
    /// from the first of these addresses of the right family that is no "any" address.
    pub listen: Vec<SocketAddr>,
    /// Length of a chunk in bytes: whole frames of 4 KiB, else rounded up. On a `uc` link every chunk takes its full length on the wire; the
    /// shorter of both ends' is used.
    pub chunk_bytes: usize,
    /// Chunks that a link has posted for receiving, 16 or more.
    pub receives: u32,
    /// Chunks that a link has for sending, 16 or more. All chunks of a link are locked memory.
    pub sends: u32,
    /// Windows that peers may have onto lent memory at once, on each device: a queue pair and a registration each. Beyond that a thread of
    /// this node moves the bytes. A holder's end takes 2 MiB of locked memory.
    pub windows: usize,
    /// Bytes that may be open in all of them together. They are locked in memory, which the system may limit further (`ulimit -l`).
    pub window_bytes: u64,
    /// How often a link says that it lives. A quarter of `silence_max` or less.
    pub keepalive_interval: Duration,
    /// A peer that was not heard for this long is taken for dead.
    pub silence_max: Duration,
    /// How long a newcomer may take to prove itself and bring its queue pair up.
    pub handshake_max: Duration,
}

impl VerbsOptions {
    /// For one way of using queue pairs.
    pub fn of(profile: Profile) -> Self {
        let (chunk_bytes, receives, sends) = match profile {
            Profile::Uc => (16 * 1024, 128, 64),
            Profile::Rc => (32 * 1024, 64, 32),
        };
        Self {
            profile,
            listen: Vec::new(),
            chunk_bytes,
            receives,
            sends,
            windows: 64,
            window_bytes: 64 * 1024 * 1024 * 1024,
            keepalive_interval: Duration::from_millis(300),
            silence_max: Duration::from_millis(1500),
            handshake_max: Duration::from_secs(2),
        }
    }
}

impl Default for VerbsOptions {
    /// What this platform's devices can: 3 MiB of locked memory a link.
    fn default() -> Self {
        Self::of(Profile::native())
    }
}

/// Links over RDMA adapters.
pub struct VerbsProvider {
    shared: Arc<Shared>,
    running: Mutex<Running>,
}

/// What [`Provider::shutdown`] has to end.
#[derive(Default)]
struct Running {
    listeners: Vec<Arc<TcpListener>>,
    threads: Vec<Box<dyn Join>>,
}

struct Shared {
    making: Making,
    desk: Arc<Desk>,
    listening: Vec<SocketAddr>,
    reception: Arc<Reception<VerbsLink>>,
}

impl VerbsProvider {
    /// Starts to listen, with a desk of its own.
    ///
    /// # Errors
    /// [`StartError::NoDevices`] on a machine that has none; others if an address cannot be had or a thread not be started.
    pub fn new(effects: Effects, options: VerbsOptions) -> Result<Self, StartError> {
        let desk = Desk::new(KIND, Arc::clone(&effects.clock));
        Self::with_desk(effects, options, desk)
    }

    /// Starts to listen for peers whose tickets are those of `desk`.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_desk(effects: Effects, options: VerbsOptions, desk: Arc<Desk>) -> Result<Self, StartError> {
        Self::with_devices(effects, options, desk, ffi::devices()?)
    }

    fn with_devices(effects: Effects, options: VerbsOptions, desk: Arc<Desk>, devices: Devices) -> Result<Self, StartError> {
        let mut listeners = Vec::new();
        if options.listen.is_empty() {
            let any = [SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)), SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))];
            // One socket for both families; where there is no IPv6, the other family alone.
            let listener = TcpListener::bind(&any[..]).map_err(|source| StartError::Listen { address: any[1], source })?;
            listeners.push(Arc::new(listener));
        }
        for address in &options.listen {
            let listener = TcpListener::bind(address).map_err(|source| StartError::Listen { address: *address, source })?;
            listeners.push(Arc::new(listener));
        }
        let mut listening = Vec::new();
        for listener in &listeners {
            let unknown = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
            listening.push(listener.local_addr().map_err(|source| StartError::Listen { address: unknown, source })?);
        }
        let keepalive_interval = options.keepalive_interval;
        let place = |device| Place {
            device,
            seats: Seats::default(),
            #[cfg(target_os = "linux")]
            rooms: window::Rooms::new(options.windows, options.window_bytes),
        };
        let places = devices.into_iter().map(place).collect();
        let reception = Reception::new("verbs", Arc::clone(&effects.spawner));
        let shared = Arc::new(Shared { making: Making { effects, options, places }, desk, listening, reception });
        // From here on dropping the provider ends what has been started.
        let provider = Self { shared: Arc::clone(&shared), running: Mutex::default() };
        let mut running = lock(&provider.running);
        for listener in listeners {
            let (hearing, listens) = (Arc::clone(&shared), Arc::clone(&listener));
            running.listeners.push(listener);
            let hear = move |stream| {
                hearing.making.answer(stream, &hearing.desk, &|link| {
                    hearing.reception.keep(link);
                })
            };
            let accept = shared.reception.take_in(move || Ok(listens.accept()?.0), hear);
            running.threads.push(accept.map_err(StartError::Thread)?);
        }
        running.threads.push(shared.reception.keep_alive(keepalive_interval, VerbsLink::beat).map_err(StartError::Thread)?);
        drop(running);
        Ok(provider)
    }

    /// The devices' names and what is plugged into them now, for people.
    pub fn devices(&self) -> Vec<String> {
        let describe = |place: &Place| match place.device.port() {
            Ok(port) if port.active => format!("{} at {:?}", place.device.name(), port.gids.iter().map(|(_, gid)| gid).collect::<Vec<_>>()),
            Ok(_) => format!("{} with nothing plugged in", place.device.name()),
            Err(error) => format!("{}: {error}", place.device.name()),
        };
        self.shared.making.places.iter().map(describe).collect()
    }

    /// What exists on the devices, of all links of this provider that have not been dropped.
    pub fn in_use(&self) -> InUse {
        self.shared.making.places.iter().map(|place| place.device.in_use()).sum()
    }
}

impl Provider for VerbsProvider {
    fn kind(&self) -> ProviderKind {
        KIND
    }

    fn capabilities(&self) -> Capabilities {
        let one_sided = cfg!(target_os = "linux") && self.shared.making.options.profile.is_reliable();
        Capabilities { one_sided, remote: true, message_bytes_max: u32::MAX, rtt_guess_ns: 15_000 }
    }

    fn endpoints(&self) -> Vec<Endpoint> {
        let addresses = self.shared.making.addresses();
        let at = |bound: &SocketAddr| -> Vec<Endpoint> {
            let reached = |ip: &&IpAddr| if bound.ip().is_unspecified() { ip.is_ipv4() || bound.is_ipv6() } else { **ip == bound.ip() };
            addresses.iter().filter(reached).map(|ip| Endpoint::Verbs { address: SocketAddr::new(*ip, bound.port()) }).collect()
        };
        self.shared.listening.iter().flat_map(at).collect()
    }

    fn expect(&self, ticket: &Ticket, options: LinkOptions) -> Result<Expected, ExpectError> {
        self.shared.desk.expect(ticket, options)
    }

    fn dial(&self, endpoint: &Endpoint, ticket: &Ticket, options: LinkOptions, deadline: Instant) -> Result<Arc<dyn Link>, DialError> {
        let Endpoint::Verbs { address } = *endpoint else {
            return Err(DialError::Endpoint { provider: KIND, endpoint: *endpoint });
        };
        if self.shared.reception.is_stopped() {
            return Err(DialError::Stopped(KIND));
        }
        let fixed = |bound: &&SocketAddr| !bound.ip().is_unspecified() && bound.is_ipv4() == address.is_ipv4();
        let from = self.shared.listening.iter().find(fixed).map(SocketAddr::ip);
        let link = self.shared.making.dial(address, from, ticket, options, deadline)?;
        if !self.shared.reception.keep(&link) {
            return Err(DialError::Stopped(KIND));
        }
        Ok(link)
    }

    fn shutdown(&self) {
        self.shared.reception.stop();
        self.shared.desk.stop();
        let Running { listeners, threads } = std::mem::take(&mut *lock(&self.running));
        for listener in &listeners {
            wake(listener);
        }
        drop(listeners);
        for thread in threads {
            thread.join();
        }
        self.shared.reception.close_all();
    }
}

impl Drop for VerbsProvider {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl fmt::Debug for VerbsProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerbsProvider")
            .field("profile", &self.shared.making.options.profile)
            .field("devices", &self.shared.making.places.iter().map(|place| place.device.name()).collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}
