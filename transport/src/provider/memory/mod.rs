//! Links between two ends in one process, for tests and for embedding several nodes.
//!
//! Nothing is found by itself: providers meet on a [`MemoryFabric`] that whoever wants them to meet hands to each.

mod link;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use super::{Capabilities, Desk, DialError, Endpoint, ExpectError, Expected, Provider, ProviderKind, Ticket};
use crate::Effects;
use crate::env::{Instant, Rng};
use crate::link::{CloseReason, Link, LinkOptions, lock};
use link::{MemoryLink, pair};

/// How links of a fabric behave. The default is as fast as memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Shape {
    /// Added to every message's way.
    pub latency: Duration,
    /// Bytes per second of each direction of each link; none for as fast as can be.
    pub bytes_per_second: Option<u64>,
}

/// A place where memory providers meet.
#[derive(Clone)]
pub struct MemoryFabric(Arc<Fabric>);

struct Fabric {
    id: u128,
    shape: Shape,
    ports: Mutex<Ports>,
}

#[derive(Default)]
struct Ports {
    last: u64,
    open: BTreeMap<u64, Weak<Place>>,
}

/// What a fabric knows of a provider.
struct Place {
    desk: Arc<Desk>,
    links: Mutex<Vec<Weak<MemoryLink>>>,
}

impl Place {
    /// Notes a link that must end with the provider.
    fn keep(&self, link: &Arc<MemoryLink>) {
        let mut links = lock(&self.links);
        links.retain(|link| link.strong_count() > 0);
        links.push(Arc::downgrade(link));
    }
}

impl MemoryFabric {
    /// A fabric of its own.
    pub fn new(rng: &dyn Rng, shape: Shape) -> Self {
        let mut id = [0; 16];
        rng.fill("memory fabric", &mut id);
        Self(Arc::new(Fabric { id: u128::from_le_bytes(id), shape, ports: Mutex::default() }))
    }
}

impl fmt::Debug for MemoryFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryFabric({:08x})", (self.0.id >> 96) as u32)
    }
}

/// A node's place on a fabric.
pub struct MemoryProvider {
    effects: Effects,
    fabric: MemoryFabric,
    port: u64,
    place: Arc<Place>,
    stopped: AtomicBool,
}

impl MemoryProvider {
    /// Joins `fabric`.
    pub fn new(effects: Effects, fabric: &MemoryFabric) -> Self {
        let desk = Desk::new(ProviderKind::Memory, Arc::clone(&effects.clock));
        Self::with_desk(effects, fabric, desk)
    }

    /// Joins `fabric`, with a desk that other providers may have too.
    pub fn with_desk(effects: Effects, fabric: &MemoryFabric, desk: Arc<Desk>) -> Self {
        let place = Arc::new(Place { desk, links: Mutex::default() });
        let mut ports = lock(&fabric.0.ports);
        ports.last += 1;
        let port = ports.last;
        ports.open.insert(port, Arc::downgrade(&place));
        drop(ports);
        Self { effects, fabric: fabric.clone(), port, place, stopped: AtomicBool::new(false) }
    }
}

impl fmt::Debug for MemoryProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryProvider").field("fabric", &self.fabric).field("port", &self.port).finish_non_exhaustive()
    }
}

/// Proof of a ticket within one process: tags are compared, not secrets, so that the comparison takes constant time.
fn tag(ticket: &Ticket) -> blake3::Hash {
    blake3::keyed_hash(&ticket.key("shoal memory link ticket"), &ticket.id().to_le_bytes())
}

impl Provider for MemoryProvider {
    fn kind(&self) -> ProviderKind {
        ProviderKind::Memory
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { one_sided: false, remote: false, message_bytes_max: u32::MAX, rtt_guess_ns: 10_000 }
    }

    fn endpoints(&self) -> Vec<Endpoint> {
        vec![Endpoint::Memory { fabric: self.fabric.0.id, port: self.port }]
    }

    fn expect(&self, ticket: &Ticket, options: LinkOptions) -> Result<Expected, ExpectError> {
        self.place.desk.expect(ticket, options)
    }

    fn dial(&self, endpoint: &Endpoint, ticket: &Ticket, options: LinkOptions, _deadline: Instant) -> Result<Arc<dyn Link>, DialError> {
        let endpoint = *endpoint;
        if self.stopped.load(Ordering::Acquire) {
            return Err(DialError::Stopped(ProviderKind::Memory));
        }
        let Endpoint::Memory { fabric, port } = endpoint else {
            return Err(DialError::Endpoint { provider: ProviderKind::Memory, endpoint });
        };
        let unreachable = |reason: &str| DialError::Unreachable { endpoint, reason: reason.to_owned() };
        if fabric != self.fabric.0.id {
            return Err(unreachable("it is on another fabric, perhaps in another process"));
        }
        let there = lock(&self.fabric.0.ports).open.get(&port).and_then(Weak::upgrade);
        let there = there.ok_or(DialError::Nobody { endpoint })?;
        let desk = &there.desk;
        let id = ticket.id();
        let refused = DialError::Refused { endpoint, id };
        let Some((theirs, their_options)) = desk.look_up(id) else { return Err(refused) };
        if tag(ticket) != tag(&theirs) {
            desk.refuse(id);
            return Err(refused);
        }
        let Some(claim) = desk.claim(id) else { return Err(refused) };
        let places = [format!("memory place {port}"), format!("memory place {}", self.port)];
        let (near, far) = pair(&self.effects.clock, self.fabric.0.shape, [options, their_options], places);
        self.place.keep(&near);
        there.keep(&far);
        if !claim.deliver(far) {
            return Err(refused);
        }
        Ok(near)
    }

    fn shutdown(&self) {
        self.stopped.store(true, Ordering::Release);
        self.place.desk.stop();
        lock(&self.fabric.0.ports).open.remove(&self.port);
        for link in lock(&self.place.links).drain(..).filter_map(|link| link.upgrade()) {
            link.close(CloseReason::Local);
        }
    }
}

impl Drop for MemoryProvider {
    fn drop(&mut self) {
        self.shutdown();
    }
}
