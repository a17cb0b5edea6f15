//! One way to a peer, and how it is measured.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::estimate::{Estimate, Sample};
use super::machine::Failure;
use super::wire::{HEAD_BYTES, Said};
use crate::env::{Clock, Instant};
use crate::link::{Link, LinkOptions};
use crate::provider::{DialError, Endpoint, Provider, ProviderKind, Ticket};

/// Short messages of a measurement. The fastest round trip counts: the others waited for a processor.
const ECHOES: u64 = 6;
/// Lengths of the long messages of a measurement, in bytes. The fastest counts: over shared memory the first ones find pages that
/// nobody has touched yet. A slow way is spared all but the first.
const LOADS: [usize; 4] = [64 * 1024, 512 * 1024, 512 * 1024, 512 * 1024];
/// A way that takes longer than this for the first load is slow.
const SLOW: Duration = Duration::from_millis(20);
/// The longest message of a measurement, in bytes.
pub(super) const LOAD_MAX: usize = LOADS[1];

/// Why a way gave no link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteError {
    /// What that says of the ticket.
    pub failure: Failure,
    /// In words.
    pub reason: String,
}

impl From<DialError> for RouteError {
    fn from(error: DialError) -> Self {
        let failure = match &error {
            DialError::Refused { .. } => Failure::Refused,
            DialError::Nobody { .. } => Failure::Gone,
            DialError::Unreachable { .. } | DialError::Endpoint { .. } | DialError::Stopped(_) => Failure::Unreached,
            _ => Failure::Unknown,
        };
        Self { failure, reason: error.to_string() }
    }
}

/// A way to the peer.
pub trait Route: Send + Sync + fmt::Debug + 'static {
    /// Makes a link to the peer, which expects this ticket. Blocks, at most until `deadline`.
    ///
    /// # Errors
    /// [`RouteError`].
    fn dial(&self, ticket: &Ticket, options: LinkOptions, deadline: Instant) -> Result<Arc<dyn Link>, RouteError>;

    /// What it is like, as long as it is not measured.
    fn guess(&self) -> Estimate;

    /// Whether it costs others something, and so is used only when nothing else works.
    fn is_spare(&self) -> bool {
        false
    }

    /// Which it is, for people.
    fn label(&self) -> String;
}

/// An endpoint that a provider of this node can dial. Which of the node's interfaces it leaves by, the system's routes
/// say, or the zone of its address.
#[derive(Debug, Clone)]
pub struct Direct {
    provider: Arc<dyn Provider>,
    endpoint: Endpoint,
}

impl Direct {
    /// That endpoint, by that provider.
    pub fn new(provider: Arc<dyn Provider>, endpoint: Endpoint) -> Self {
        Self { provider, endpoint }
    }
}

impl Route for Direct {
    fn dial(&self, ticket: &Ticket, options: LinkOptions, deadline: Instant) -> Result<Arc<dyn Link>, RouteError> {
        Ok(self.provider.dial(&self.endpoint, ticket, options, deadline)?)
    }

    fn guess(&self) -> Estimate {
        let bytes_per_second = if self.provider.kind() == ProviderKind::Tcp { 1e8 } else { 2e9 };
        Estimate::guess(Duration::from_nanos(self.provider.capabilities().rtt_guess_ns), bytes_per_second)
    }

    fn label(&self) -> String {
        self.endpoint.to_string()
    }
}

/// Measures a fresh link whose accepting end answers echoes.
pub(super) fn measure(link: &dyn Link, clock: &dyn Clock, deadline: Instant) -> Result<Sample, String> {
    let mut rtt = Duration::MAX;
    for number in 0..ECHOES {
        rtt = rtt.min(echo(link, clock, number, &[], deadline)?);
    }
    let room = link.message_bytes_max().saturating_sub(HEAD_BYTES);
    let mut bytes_per_second = None;
    for (number, bytes) in (ECHOES..).zip(LOADS) {
        let load = vec![0x5a; bytes.min(room)];
        let took = echo(link, clock, number, &load, deadline)?;
        // Less than a microsecond is not measured but guessed at.
        let moving = took.saturating_sub(rtt).max(Duration::from_micros(1));
        let rate = load.len() as f64 / moving.as_secs_f64();
        if load.len() >= 4096 {
            bytes_per_second = Some(bytes_per_second.map_or(rate, |before: f64| before.max(rate)));
        }
        if took > SLOW {
            break;
        }
    }
    Ok(Sample { rtt, bytes_per_second })
}

/// One round trip.
fn echo(link: &dyn Link, clock: &dyn Clock, number: u64, load: &[u8], deadline: Instant) -> Result<Duration, String> {
    let began = clock.now();
    let mut answer = [0; HEAD_BYTES];
    link.send(&[&Said::Echo(number).encode(load), load], deadline).map_err(|error| error.to_string())?;
    let bytes = link.recv(&mut answer, deadline).map_err(|error| error.to_string())?;
    match Said::decode(&answer[..bytes]) {
        Some(Said::Answer(answered)) if answered == number => Ok(clock.now().since(began)),
        _ => Err("the link damages what it carries".to_owned()),
    }
}
