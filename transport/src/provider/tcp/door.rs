//! The thread that answers strangers and keeps links alive.
//!
//! Strangers cost little here: a fixed number of them is heard at a time, each for a limited time and by a fixed number
//! of bytes, without a thread of its own. When there are too many, the one that has dawdled longest goes, so those who
//! know what to say, which takes them milliseconds, get through.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use super::addresses;
use super::link::{Liveness, Rail, TcpLink};
use super::seal::{Cipher, Seal};
use super::terms::{Disagree, Said, Terms, cipher};
use crate::Effects;
use crate::env::Instant;
use crate::link::LinkOptions;
use crate::provider::expected::Claim;
use crate::provider::handshake::{self, CHALLENGE_BYTES, HELLO_BYTES, Offer, PROOF_BYTES};
use crate::provider::links::Links;
use crate::provider::{Desk, Ticket};

/// Strangers that are heard at a time.
pub(super) const STRANGERS_MAX: usize = 64;

/// Strangers that are heard at a time from one address.
const STRANGERS_PER_ADDRESS_MAX: usize = 16;

/// How often the sockets of strangers are looked at while there are any.
const LOOK_EVERY: Duration = Duration::from_millis(1);

enum Stage {
    Hello,
    Proof(Box<Acquaintance>),
}

/// A stranger that has said hello and owes a proof.
struct Acquaintance {
    hello: [u8; HELLO_BYTES],
    challenge: [u8; CHALLENGE_BYTES],
    id: u128,
    theirs: Offer,
    expected: Option<(Ticket, LinkOptions)>,
}

/// A link of which not all connections are there.
struct Joining {
    claim: Claim<Arc<Desk>>,
    address: SocketAddr,
    since: Instant,
    limits: [u32; 2],
    options: LinkOptions,
    cipher: Option<Cipher>,
    /// In the order of the rails; the first one is there.
    rails: Vec<(Ticket, Option<Rail>)>,
}

struct Stranger {
    stream: TcpStream,
    address: SocketAddr,
    since: Instant,
    said: Stage,
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
    pub(super) links: Arc<Links<TcpLink>>,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) incoming: Receiver<(TcpStream, SocketAddr)>,
    pub(super) liveness: Liveness,
    pub(super) terms: Terms,
    pub(super) listening: Vec<SocketAddr>,
    pub(super) advertise: Vec<SocketAddr>,
    pub(super) keepalive_interval: Duration,
    pub(super) handshake_max: Duration,
}

impl Door {
    /// Runs until the provider stops.
    pub(super) fn run(self) {
        let mut strangers: Vec<Stranger> = Vec::new();
        let mut joining: Vec<Joining> = Vec::new();
        let mut next_ping = self.effects.clock.now();
        while !self.stop.load(Ordering::Acquire) {
            let now = self.effects.clock.now();
            if now >= next_ping {
                for link in self.links.living() {
                    link.ping();
                }
                next_ping = now + self.keepalive_interval;
            }
            // Dropping it opens its ticket again.
            joining.retain(|link| now.since(link.since) <= self.handshake_max);
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
            strangers.retain_mut(|stranger| matches!(self.hear(stranger, &mut joining), Outcome::Wait));
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
        strangers.push(Stranger { stream, address, since, said: Stage::Hello, heard: [0; HELLO_BYTES], bytes: 0 });
    }

    fn hear(&self, stranger: &mut Stranger, joining: &mut Vec<Joining>) -> Outcome {
        if self.effects.clock.now().since(stranger.since) > self.handshake_max {
            tracing::debug!(address = %stranger.address, "a connection for tensor links said nothing in time");
            return Outcome::Gone;
        }
        let wanted = match stranger.said {
            Stage::Hello => HELLO_BYTES,
            Stage::Proof(_) => PROOF_BYTES,
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
            Stage::Hello => self.answer_hello(stranger, joining),
            Stage::Proof(_) => {
                self.answer_proof(stranger, joining);
                Outcome::Gone
            }
        }
    }

    fn answer_hello(&self, stranger: &mut Stranger, joining: &[Joining]) -> Outcome {
        let hello = stranger.heard;
        let Some((id, theirs)) = handshake::read_offer(&hello) else {
            tracing::debug!(address = %stranger.address, "a connection for tensor links speaks something else");
            return Outcome::Gone;
        };
        let rail = joining.iter().find_map(|link| {
            let (ticket, _) = link.rails.iter().find(|(ticket, rail)| ticket.id() == id && rail.is_none())?;
            Some((ticket.clone(), link.options))
        });
        let expected = rail.or_else(|| self.desk.look_up(id));
        let mut challenge = [0; CHALLENGE_BYTES];
        self.effects.rng.fill("link challenge", &mut challenge);
        if say(&stranger.stream, &challenge).is_err() {
            return Outcome::Gone;
        }
        stranger.said = Stage::Proof(Box::new(Acquaintance { hello, challenge, id, theirs, expected }));
        stranger.bytes = 0;
        Outcome::Wait
    }

    fn answer_proof(&self, stranger: &Stranger, joining: &mut Vec<Joining>) {
        let Stage::Proof(acquaintance) = &stranger.said else { return };
        let Acquaintance { hello, challenge, id, expected, .. } = &**acquaintance;
        let mut proof = [0; PROOF_BYTES];
        proof.copy_from_slice(&stranger.heard[..PROOF_BYTES]);
        // The same work is done for an unknown id, so that time tells nothing either.
        let nobody = (Ticket::new(*id, [0; 32]), LinkOptions::default());
        let (ticket, options) = expected.as_ref().unwrap_or(&nobody);
        let proved = handshake::proved(ticket, hello, challenge, &proof) && expected.is_some();
        let said = Said { ticket, hello, challenge, proof: &proof };
        let made = match proved.then(|| place_of(joining, *id)) {
            Some(Some((link, rail))) => self.add_rail(stranger, acquaintance, &said, joining, link, rail),
            Some(None) => match self.desk.claim_for_long(*id) {
                Some(claim) => self.welcome(stranger, acquaintance, &said, *options, claim, joining),
                None => self.refuse(stranger, *id, true),
            },
            None => self.refuse(stranger, *id, false),
        };
        if let Err(error) = made {
            tracing::info!(address = %stranger.address, %error, "a tensor link broke while it was made");
        }
    }

    fn refuse(&self, stranger: &Stranger, id: u128, proved: bool) -> std::io::Result<()> {
        if !proved {
            self.desk.refuse(id);
        }
        tracing::info!(address = %stranger.address, ticket = %format_args!("{id:032x}"), "a tensor link was refused");
        say(&stranger.stream, &handshake::REFUSAL)
    }

    /// Answers the first connection of a link.
    fn welcome(
        &self,
        stranger: &Stranger,
        acquaintance: &Acquaintance,
        said: &Said<'_>,
        options: LinkOptions,
        claim: Claim<Arc<Desk>>,
        joining: &mut Vec<Joining>,
    ) -> std::io::Result<()> {
        let Acquaintance { hello, challenge, theirs, .. } = acquaintance;
        let local = stranger.stream.local_addr()?;
        let mut ours = self.terms.offer(options, local.ip(), stranger.address.ip());
        ours.further_rails = ours.further_rails.min(theirs.further_rails);
        let cipher = match cipher(&ours, theirs) {
            Ok(cipher) => cipher,
            Err(Disagree) => {
                tracing::warn!(address = %stranger.address, "a peer and this node do not agree whether tensor links are encrypted");
                claim.disagreed();
                return say(&stranger.stream, &handshake::disagreed(said.ticket, hello, challenge, said.proof, ours));
            }
        };
        say(&stranger.stream, &handshake::welcome(said.ticket, hello, challenge, said.proof, ours))?;
        let further = said.further(ours.further_rails);
        if ours.further_rails > 0 {
            let addresses = addresses::for_rails(local, &self.listening, &self.advertise, usize::from(ours.further_rails));
            say(&stranger.stream, &further.list(&addresses))?;
        }
        let first = Rail { stream: stranger.stream.try_clone()?, seals: cipher.map(|cipher| as_acceptor(said, cipher)) };
        let mut rails = vec![(said.ticket.clone(), Some(first))];
        rails.extend(further.tickets().into_iter().map(|ticket| (ticket, None)));
        let limits = [options.message_bytes_max, theirs.options.message_bytes_max];
        let since = self.effects.clock.now();
        let link = Joining { claim, address: stranger.address, since, limits, options, cipher, rails };
        self.finish(link, joining)
    }

    /// Answers a further connection of a link.
    fn add_rail(
        &self,
        stranger: &Stranger,
        acquaintance: &Acquaintance,
        said: &Said<'_>,
        joining: &mut Vec<Joining>,
        link: usize,
        rail: usize,
    ) -> std::io::Result<()> {
        let Acquaintance { hello, challenge, .. } = acquaintance;
        let mut link = joining.swap_remove(link);
        let stream = stranger.stream.try_clone()?;
        link.rails[rail].1 = Some(Rail { stream, seals: link.cipher.map(|cipher| as_acceptor(said, cipher)) });
        say(&stranger.stream, &handshake::welcome(said.ticket, hello, challenge, said.proof, link.options))?;
        self.finish(link, joining)
    }

    /// Delivers the link, if all its connections are there.
    fn finish(&self, link: Joining, joining: &mut Vec<Joining>) -> std::io::Result<()> {
        if link.rails.iter().any(|(_, rail)| rail.is_none()) {
            // Each of them was claimed by a peer that was expected, so there are never many.
            joining.push(link);
            return Ok(());
        }
        let Joining { claim, address, limits, rails, .. } = link;
        let rails = rails.into_iter().filter_map(|(_, rail)| rail).collect();
        let link = TcpLink::new(rails, address, Arc::clone(&self.effects.clock), self.liveness, limits)?;
        self.links.add(&link);
        claim.deliver(link);
        Ok(())
    }
}

/// Which rail of which link waits for a connection with this ticket.
fn place_of(joining: &[Joining], id: u128) -> Option<(usize, usize)> {
    joining.iter().enumerate().find_map(|(i, link)| {
        let rail = link.rails.iter().position(|(ticket, rail)| ticket.id() == id && rail.is_none())?;
        Some((i, rail))
    })
}

/// What seals the records of a connection at this end: those that it sends, those that come.
fn as_acceptor(said: &Said<'_>, cipher: Cipher) -> [Seal; 2] {
    let [dialler, acceptor] = said.seals(cipher);
    [acceptor, dialler]
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
