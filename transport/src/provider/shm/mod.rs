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
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::reception::Reception;
use super::{Capabilities, Desk, DialError, Endpoint, ExpectError, Expected, Provider, ProviderKind, StartError, Ticket};
use crate::Effects;
use crate::env::{Instant, Join};
use crate::link::{Link, LinkOptions, lock};
use door::{KIND, Making};
use link::ShmLink;

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
    reception: Arc<Reception<ShmLink>>,
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
        let reception = Reception::new("shm", Arc::clone(&effects.spawner));
        let shared = Arc::new(Shared { making, desk, door, reception });
        // From here on dropping the provider ends what has been started.
        let provider = Self { shared: Arc::clone(&shared), running: Mutex::default() };
        let mut running = lock(&provider.running);
        let reception = Arc::clone(&shared.reception);
        let hear = move |stream| {
            shared.making.answer(stream, &shared.desk, &|link| {
                shared.reception.keep(link);
            })
        };
        running.push(reception.take_in(move || Ok(listener.accept()?.0), hear).map_err(StartError::Thread)?);
        running.push(reception.keep_alive(options.keepalive_interval, ShmLink::ping).map_err(StartError::Thread)?);
        drop(running);
        Ok(provider)
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
        if self.shared.reception.is_stopped() {
            return Err(DialError::Stopped(KIND));
        }
        let link = self.shared.making.dial(door, ticket, options, deadline)?;
        if !self.shared.reception.keep(&link) {
            return Err(DialError::Stopped(KIND));
        }
        Ok(link)
    }

    fn shutdown(&self) {
        self.shared.reception.stop();
        self.shared.desk.stop();
        // A visit gets the thread out of `accept`.
        if let Ok(address) = door::address(self.shared.door) {
            drop(UnixStream::connect_addr(&address));
        }
        for thread in std::mem::take(&mut *lock(&self.running)) {
            thread.join();
        }
        self.shared.reception.close_all();
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
