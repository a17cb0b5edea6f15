//! Links between processes of one machine, through memory that both have mapped.
//!
//! A provider listens on a socket with an abstract name that was drawn at random; a peer that knows it from the control
//! stream and runs on the same machine, as the same user and in the same network namespace, reaches it. Everybody else is
//! refused by the kernel and takes the next provider. Linux only: it needs memory files with seals.
//!
//! | module | what |
//! |---|---|
//! | `door` | handshake, and memory and bells handed through the socket |
//! | `segment` | the memory file |
//! | `ring` | a ring of bytes in it |
//! | `bell` | sleeping until the other end rings, or is gone |
//! | `link` | records in the rings |
//! | `window` | lent memory, mapped by its holder |

mod bell;
mod door;
mod link;
mod ring;
mod segment;
#[cfg(test)]
mod tests;
pub(crate) mod window;

use std::fmt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use super::links::{Links, Living};
use super::{Capabilities, Desk, DialError, Endpoint, ExpectError, Expected, Provider, ProviderKind, StartError, Ticket};
use crate::Effects;
use crate::env::{Instant, Join};
use crate::link::{CloseReason, Link, LinkOptions, lock};
use door::{KIND, Making};
use link::ShmLink;

/// Newcomers that are heard at a time. Further ones wait in the socket's queue.
const NEWCOMERS_MAX: usize = 16;

/// How the provider is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShmOptions {
    /// Bytes of a link's ring, for each direction: rounded up to a power of two, 4 KiB to 1 GiB. Longer messages pass, piece by piece.
    pub ring_bytes: usize,
    /// How often a link says that it lives. A quarter of `silence_max` or less.
    pub keepalive_interval: Duration,
    /// A peer that was not heard for this long is taken for hung. One that has died is known at once.
    pub silence_max: Duration,
    /// How long a newcomer may take to prove itself.
    pub handshake_max: Duration,
}

impl Default for ShmOptions {
    fn default() -> Self {
        Self {
            ring_bytes: 1024 * 1024,
            keepalive_interval: Duration::from_millis(300),
            silence_max: Duration::from_millis(1500),
            handshake_max: Duration::from_secs(2),
        }
    }
}

/// Links between processes of one machine.
pub struct ShmProvider {
    shared: Arc<Shared>,
    running: Mutex<Vec<Box<dyn Join>>>,
}

struct Shared {
    making: Making,
    desk: Arc<Desk>,
    door: u128,
    keepalive_interval: Duration,
    links: Links<ShmLink>,
    newcomers: AtomicUsize,
    stop: AtomicBool,
    stopped: (Mutex<()>, Condvar),
}

impl ShmProvider {
    /// Opens a door with a desk of its own.
    ///
    /// # Errors
    /// [`StartError`] if the door cannot be opened or a thread not be started.
    pub fn new(effects: Effects, options: ShmOptions) -> Result<Self, StartError> {
        let desk = Desk::new(KIND, Arc::clone(&effects.clock));
        Self::with_desk(effects, options, desk)
    }

    /// Opens a door whose tickets are those of `desk`.
    ///
    /// # Errors
    /// [`StartError`] if the door cannot be opened or a thread not be started.
    pub fn with_desk(effects: Effects, options: ShmOptions, desk: Arc<Desk>) -> Result<Self, StartError> {
        let mut door = [0; 16];
        effects.rng.fill("shm door", &mut door);
        let door = u128::from_le_bytes(door);
        let listener = door::listen(door).map_err(StartError::Door)?;
        let making = Making {
            effects: effects.clone(),
            ring_bytes: options.ring_bytes.clamp(4096, 1 << 30).next_power_of_two(),
            silence_max: options.silence_max,
            handshake_max: options.handshake_max,
        };
        let shared = Arc::new(Shared {
            making,
            desk,
            door,
            keepalive_interval: options.keepalive_interval.max(Duration::from_millis(1)),
            links: Links::default(),
            newcomers: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            stopped: Default::default(),
        });
        // From here on dropping the provider ends what has been started.
        let provider = Self { shared: Arc::clone(&shared), running: Mutex::default() };
        let mut running = lock(&provider.running);
        let taking = Arc::clone(&shared);
        let accept = effects.spawner.thread("shm accept".to_owned(), Box::new(move || taking.take_in(&listener)));
        running.push(accept.map_err(StartError::Thread)?);
        let pinging = effects.spawner.thread("shm keep-alive".to_owned(), Box::new(move || shared.keep_alive()));
        running.push(pinging.map_err(StartError::Thread)?);
        drop(running);
        Ok(provider)
    }
}

impl Shared {
    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Hands newcomers to threads of their own until the provider stops.
    fn take_in(self: Arc<Self>, listener: &UnixListener) {
        while !self.is_stopped() {
            match listener.accept() {
                Ok((stream, _)) if !self.is_stopped() => self.hear(stream),
                Ok(_) => return,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // Most likely the process has no descriptors left; asking again at once would only burn time.
                    tracing::warn!(%error, "cannot take in connections for tensor links");
                    door::wait_for(Duration::from_millis(50));
                }
            }
        }
    }

    fn hear(self: &Arc<Self>, stream: UnixStream) {
        while self.newcomers.load(Ordering::Acquire) >= NEWCOMERS_MAX {
            if self.is_stopped() {
                return;
            }
            door::wait_for(Duration::from_millis(1));
        }
        self.newcomers.fetch_add(1, Ordering::AcqRel);
        let hearing = Arc::clone(self);
        let body = move || {
            hearing.making.answer(stream, &hearing.desk, &|link| hearing.keep(link));
            hearing.newcomers.fetch_sub(1, Ordering::AcqRel);
        };
        if let Err(error) = self.making.effects.spawner.thread("shm newcomer".to_owned(), Box::new(body)) {
            tracing::warn!(%error, "cannot hear a newcomer for tensor links");
            self.newcomers.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Notes a link, so that it is kept alive and ends with the provider.
    fn keep(&self, link: &Arc<ShmLink>) {
        self.links.add(link);
        // Whoever stopped the provider in the meantime has not seen this link.
        if self.is_stopped() {
            link.close(CloseReason::Local);
        }
    }

    fn keep_alive(&self) {
        let mut waiting = lock(&self.stopped.0);
        while !self.is_stopped() {
            for link in self.links.living() {
                link.ping();
            }
            waiting = match self.stopped.1.wait_timeout(waiting, self.keepalive_interval) {
                Ok((waiting, _)) => waiting,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }
}

impl Provider for ShmProvider {
    fn kind(&self) -> ProviderKind {
        KIND
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { one_sided: true, remote: false, message_bytes_max: u32::MAX, rtt_guess_ns: 20_000 }
    }

    fn endpoints(&self) -> Vec<Endpoint> {
        vec![Endpoint::Shm { door: self.shared.door }]
    }

    fn expect(&self, ticket: &Ticket, options: LinkOptions) -> Result<Expected, ExpectError> {
        self.shared.desk.expect(ticket, options)
    }

    fn dial(&self, endpoint: &Endpoint, ticket: &Ticket, options: LinkOptions, deadline: Instant) -> Result<Arc<dyn Link>, DialError> {
        let Endpoint::Shm { door } = *endpoint else {
            return Err(DialError::Endpoint { provider: KIND, endpoint: *endpoint });
        };
        if self.shared.is_stopped() {
            return Err(DialError::Stopped(KIND));
        }
        let link = self.shared.making.dial(door, ticket, options, deadline)?;
        self.shared.keep(&link);
        if link.has_ended() && self.shared.is_stopped() {
            return Err(DialError::Stopped(KIND));
        }
        Ok(link)
    }

    fn shutdown(&self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.desk.stop();
        drop(lock(&self.shared.stopped.0));
        self.shared.stopped.1.notify_all();
        // A visit gets the thread out of `accept`.
        if let Ok(address) = door::address(self.shared.door) {
            drop(UnixStream::connect_addr(&address));
        }
        for thread in std::mem::take(&mut *lock(&self.running)) {
            thread.join();
        }
        for link in self.shared.links.living() {
            link.close(CloseReason::Local);
        }
    }
}

impl Drop for ShmProvider {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl fmt::Debug for ShmProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShmProvider({:08x})", (self.shared.door >> 96) as u32)
    }
}
