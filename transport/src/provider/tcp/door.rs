//! The thread that answers strangers and keeps links alive.
//!
//! Strangers cost little here: a fixed number of them is heard at a time, each for a limited time and by a fixed number
//! of bytes, without a thread of its own. When there are too many, the one that has dawdled longest goes, so those who
//! know what to say, which takes them milliseconds, get through.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use super::link::{Liveness, TcpLink};
use crate::Effects;
use crate::env::Instant;
use crate::link::{LinkOptions, lock};
use crate::provider::handshake::{self, CHALLENGE_BYTES, HELLO_BYTES, PROOF_BYTES};
use crate::provider::{Desk, Ticket};

/// Strangers that are heard at a time.
pub(super) const STRANGERS_MAX: usize = 64;

/// Strangers that are heard at a time from one address.
const STRANGERS_PER_ADDRESS_MAX: usize = 16;

/// How often the sockets of strangers are looked at while there are any.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// The provider's living links.
#[derive(Default)]
pub(super) struct Links(Mutex<Vec<Weak<TcpLink>>>);

impl Links {
    pub(super) fn add(&self, link: &Arc<TcpLink>) {
        lock(&self.0).push(Arc::downgrade(link));
    }

    /// All that have not ended.
    pub(super) fn living(&self) -> Vec<Arc<TcpLink>> {
        let mut links = lock(&self.0);
        let living: Vec<_> = links.iter().filter_map(Weak::upgrade).filter(|link| !link.has_ended()).collect();
        if living.len() < links.len() {
            *links = living.iter().map(Arc::downgrade).collect();
        }
        living
    }
}

enum Said {
    Hello,
    Proof(Box<Acquaintance>),
}

/// A stranger that has said hello and owes a proof.
struct Acquaintance {
    hello: [u8; HELLO_BYTES],
    challenge: [u8; CHALLENGE_BYTES],
    id: u128,
    theirs: LinkOptions,
    expected: Option<(Ticket, LinkOptions)>,
}

struct Stranger {
    stream: TcpStream,
    address: SocketAddr,
    since: Instant,
    said: Said,
    heard: [u8; HELLO_BYTES],
    bytes: usize,
}

/// What came of listening to a stranger.
enum Outcome {
    Wait,
    Gone,
}

pub(super) struct Door {
    pub(super) effects: Effects,
    pub(super) desk: Arc<Desk>,
    pub(super) links: Arc<Links>,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) incoming: Receiver<(TcpStream, SocketAddr)>,
    pub(super) liveness: Liveness,
    pub(super) keepalive_interval: Duration,
    pub(super) handshake_max: Duration,
}

impl Door {
    /// Runs until the provider stops.
    pub(super) fn run(self) {
        let mut strangers: Vec<Stranger> = Vec::new();
        let mut next_ping = self.effects.clock.now();
        while !self.stop.load(Ordering::Acquire) {
            let now = self.effects.clock.now();
            if now >= next_ping {
                for link in self.links.living() {
                    link.ping();
                }
                next_ping = now + self.keepalive_interval;
            }
            let wait = if strangers.is_empty() { next_ping.since(now) } else { LOOK_EVERY };
            match self.incoming.recv_timeout(wait) {
                Ok(first) => {
                    let mut arrived = Some(first);
                    while let Some((stream, address)) = arrived {
                        self.admit(&mut strangers, stream, address);
                        arrived = self.incoming.try_recv().ok();
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            strangers.retain_mut(|stranger| matches!(self.hear(stranger), Outcome::Wait));
        }
    }

    fn admit(&self, strangers: &mut Vec<Stranger>, stream: TcpStream, address: SocketAddr) {
        let same = |stranger: &Stranger| place(stranger.address.ip()) == place(address.ip());
        // They stand in order of arrival, so the first that matches has been here longest.
        if strangers.iter().filter(|stranger| same(stranger)).count() >= STRANGERS_PER_ADDRESS_MAX
            && let Some(oldest) = strangers.iter().position(same)
        {
            drop(strangers.remove(oldest));
        }
        if strangers.len() >= STRANGERS_MAX {
            drop(strangers.remove(0));
        }
        // An IPv4 peer of a socket for both families comes with an address that looks like IPv6.
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        if stream.set_nonblocking(true).is_err() || stream.set_nodelay(true).is_err() {
            return;
        }
        let since = self.effects.clock.now();
        strangers.push(Stranger { stream, address, since, said: Said::Hello, heard: [0; HELLO_BYTES], bytes: 0 });
    }

    fn hear(&self, stranger: &mut Stranger) -> Outcome {
        if self.effects.clock.now().since(stranger.since) > self.handshake_max {
            tracing::debug!(address = %stranger.address, "a connection for tensor links said nothing in time");
            return Outcome::Gone;
        }
        let wanted = match stranger.said {
            Said::Hello => HELLO_BYTES,
            Said::Proof(_) => PROOF_BYTES,
        };
        match (&stranger.stream).read(&mut stranger.heard[stranger.bytes..wanted]) {
            Ok(0) => return Outcome::Gone,
            Ok(bytes) => stranger.bytes += bytes,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return Outcome::Wait,
            Err(_) => return Outcome::Gone,
        }
        if stranger.bytes < wanted {
            return Outcome::Wait;
        }
        match &stranger.said {
            Said::Hello => self.answer_hello(stranger),
            Said::Proof(_) => {
                self.answer_proof(stranger);
                Outcome::Gone
            }
        }
    }

    fn answer_hello(&self, stranger: &mut Stranger) -> Outcome {
        let hello = stranger.heard;
        let Some((id, theirs)) = handshake::read_hello(&hello) else {
            tracing::debug!(address = %stranger.address, "a connection for tensor links speaks something else");
            return Outcome::Gone;
        };
        let expected = self.desk.look_up(id);
        let mut challenge = [0; CHALLENGE_BYTES];
        self.effects.rng.fill("link challenge", &mut challenge);
        if say(&stranger.stream, &challenge).is_err() {
            return Outcome::Gone;
        }
        stranger.said = Said::Proof(Box::new(Acquaintance { hello, challenge, id, theirs, expected }));
        stranger.bytes = 0;
        Outcome::Wait
    }

    fn answer_proof(&self, stranger: &Stranger) {
        let Said::Proof(acquaintance) = &stranger.said else { return };
        let Acquaintance { hello, challenge, id, theirs, expected } = &**acquaintance;
        let mut proof = [0; PROOF_BYTES];
        proof.copy_from_slice(&stranger.heard[..PROOF_BYTES]);
        // The same work is done for an unknown id, so that time tells nothing either.
        let nobody = (Ticket::new(*id, [0; 32]), LinkOptions::default());
        let (ticket, ours) = expected.as_ref().unwrap_or(&nobody);
        let proved = handshake::proved(ticket, hello, challenge, &proof) && expected.is_some();
        let Some(claim) = proved.then(|| self.desk.claim(*id)).flatten() else {
            if !proved {
                self.desk.refuse(*id);
            }
            tracing::info!(address = %stranger.address, ticket = %format_args!("{id:032x}"), "a tensor link was refused");
            drop(say(&stranger.stream, &handshake::REFUSAL));
            return;
        };
        let made = stranger.stream.try_clone().and_then(|stream| {
            say(&stranger.stream, &handshake::welcome(ticket, hello, challenge, &proof, *ours))?;
            let limits = [ours.message_bytes_max, theirs.message_bytes_max];
            TcpLink::new(stream, stranger.address, Arc::clone(&self.effects.clock), self.liveness, limits)
        });
        match made {
            Ok(link) => {
                self.links.add(&link);
                claim.deliver(link);
            }
            Err(error) => tracing::info!(address = %stranger.address, %error, "a tensor link broke while it was made"),
        }
    }
}

/// Writes a few bytes to a fresh connection, whose buffer is empty. One that does not take them is not worth waiting for.
fn say(mut stream: &TcpStream, words: &[u8]) -> std::io::Result<()> {
    match stream.write(words)? {
        taken if taken == words.len() => Ok(()),
        _ => Err(ErrorKind::WriteZero.into()),
    }
}

/// What counts as one address: a whole /64 of IPv6, which one host can have.
fn place(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(v4) => IpAddr::V4(v4),
        IpAddr::V6(v6) => {
            let [a, b, c, d, ..] = v6.segments();
            IpAddr::from([a, b, c, d, 0, 0, 0, 0])
        }
    }
}
