//! The dialling end of the handshake.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use super::link::{Rail, TcpLink};
use super::seal::Cipher;
use super::terms::{Disagree, Said, cipher};
use super::{TcpProvider, set_buffers};
use crate::env::Instant;
use crate::link::{CloseReason, LinkOptions};
use crate::provider::handshake::{self, Answer, CHALLENGE_BYTES, HELLO_BYTES, Offer, PROOF_BYTES, VERDICT_BYTES};
use crate::provider::words::Words;
use crate::provider::{DialError, Endpoint, ProviderKind, Ticket};

/// First pause before a peer that was too busy to answer is dialled again; doubled each time.
const PAUSE_MIN: Duration = Duration::from_millis(10);
/// Longest such pause.
const PAUSE_MAX: Duration = Duration::from_millis(200);

/// How long to try an address that the peer told of and that may be out of reach.
const TOLD_MAX: Duration = Duration::from_millis(500);

/// A connection whose ends have proved themselves.
struct Introduced {
    stream: TcpStream,
    hello: [u8; HELLO_BYTES],
    challenge: [u8; CHALLENGE_BYTES],
    proof: [u8; PROOF_BYTES],
    ours: Offer,
    theirs: Offer,
}

impl Introduced {
    fn into_rail(self, ticket: &Ticket, cipher: Option<Cipher>) -> Rail {
        let said = Said { ticket, hello: &self.hello, challenge: &self.challenge, proof: &self.proof };
        Rail { seals: cipher.map(|cipher| said.seals(cipher)), stream: self.stream }
    }
}

/// How one attempt failed.
enum Failed {
    /// The peer took the connection and let it go before it said anything: too many others were at its door.
    Busy(CloseReason),
    Final(DialError),
}

impl TcpProvider {
    /// Connects and proves both ends.
    #[expect(clippy::disallowed_methods, reason = "a thread of real sockets: a busy listener gives no event to wait for")]
    pub(super) fn dial_address(
        &self,
        address: SocketAddr,
        ticket: &Ticket,
        options: LinkOptions,
        deadline: Instant,
    ) -> Result<Arc<TcpLink>, DialError> {
        let mut pause = PAUSE_MIN;
        loop {
            if self.stop.load(Ordering::Acquire) {
                return Err(DialError::Stopped(ProviderKind::Tcp));
            }
            match self.attempt(address, ticket, options, deadline) {
                Ok(link) => return Ok(link),
                Err(Failed::Final(error)) => return Err(error),
                Err(Failed::Busy(reason)) => {
                    if self.effects.clock.now() + pause >= deadline {
                        return Err(DialError::Handshake { endpoint: Endpoint::Tcp(address), reason });
                    }
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        }
    }

    fn attempt(&self, address: SocketAddr, ticket: &Ticket, ours: LinkOptions, deadline: Instant) -> Result<Arc<TcpLink>, Failed> {
        let endpoint = Endpoint::Tcp(address);
        let Introduced { stream, hello, challenge, proof, ours, theirs } = self.introduce(address, ticket, ours, deadline)?;
        let said = Said { ticket, hello: &hello, challenge: &challenge, proof: &proof };
        let cipher = cipher(&ours, &theirs).map_err(|Disagree| Failed::Final(DialError::Encryption { endpoint }))?;
        let limits = [ours.options.message_bytes_max, theirs.options.message_bytes_max];
        let mut rails = Vec::new();
        if theirs.further_rails > 0 {
            let broken = |what: &str| {
                let reason = CloseReason::Misbehaved(what.to_owned());
                Failed::Final(DialError::Handshake { endpoint, reason })
            };
            if theirs.further_rails > ours.further_rails {
                return Err(broken("it wants more connections than were offered"));
            }
            let further = said.further(theirs.further_rails);
            let mut list = vec![0; further.list_bytes()];
            let words = Words { stream: &stream, clock: &*self.effects.clock, deadline };
            words.hear(&mut list).map_err(|error| failed(endpoint, &error))?;
            let Some(addresses) = further.read_list(&list) else {
                return Err(broken("the list of its addresses is not its own"));
            };
            // Interfaces of the peer that this machine does not reach are no reason to do without the link.
            let mut lost = Vec::new();
            for (ticket, told) in further.tickets().iter().zip(addresses) {
                let told = Some(told).filter(|told| *told != address && told.port() != 0 && !lost.contains(told));
                let soon = deadline.min(self.effects.after(TOLD_MAX));
                let introduced = match told.map(|told| self.introduce(told, ticket, ours.options, soon)) {
                    Some(Ok(introduced)) => introduced,
                    _ => {
                        lost.extend(told);
                        self.introduce(address, ticket, ours.options, deadline)?
                    }
                };
                rails.push(introduced.into_rail(ticket, cipher));
            }
        }
        let seals = cipher.map(|cipher| said.seals(cipher));
        rails.insert(0, Rail { stream, seals });
        TcpLink::new(rails, address, Arc::clone(&self.effects.clock), self.liveness(), limits).map_err(|error| failed(endpoint, &error))
    }

    /// Connects and goes through the handshake.
    fn introduce(&self, address: SocketAddr, ticket: &Ticket, options: LinkOptions, deadline: Instant) -> Result<Introduced, Failed> {
        let clock = &*self.effects.clock;
        let endpoint = Endpoint::Tcp(address);
        let stream = self.connect(address, deadline).map_err(|error| {
            Failed::Final(match error.kind() {
                ErrorKind::TimedOut | ErrorKind::WouldBlock => DialError::Deadline { endpoint },
                ErrorKind::ConnectionRefused => DialError::Nobody { endpoint },
                _ => DialError::Unreachable { endpoint, reason: error.to_string() },
            })
        })?;
        let local = stream.local_addr().map_err(|error| failed(endpoint, &error))?;
        let ours = self.terms().offer(options, local.ip(), address.ip());
        let words = Words { stream: &stream, clock, deadline };
        let mut nonce = [0; 32];
        self.effects.rng.fill("link hello", &mut nonce);
        let hello = handshake::hello(ticket, &nonce, ours);
        let mut challenge = [0; CHALLENGE_BYTES];
        words.say(&hello).and_then(|()| words.hear(&mut challenge)).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => Failed::Busy(reason(&error)),
            _ => failed(endpoint, &error),
        })?;
        let proof = handshake::proof(ticket, &hello, &challenge);
        let mut verdict = [0; VERDICT_BYTES];
        words.say(&proof).and_then(|()| words.hear(&mut verdict)).map_err(|error| failed(endpoint, &error))?;
        let id = ticket.id();
        match handshake::read_answer(ticket, &hello, &challenge, &proof, &verdict) {
            Answer::Welcome(theirs) => Ok(Introduced { stream, hello, challenge, proof, ours, theirs }),
            Answer::Disagreed(_) => Err(Failed::Final(DialError::Encryption { endpoint })),
            Answer::Refused => Err(Failed::Final(DialError::Refused { endpoint, id })),
            Answer::Impostor => Err(Failed::Final(DialError::Impostor { endpoint, id })),
        }
    }

    fn connect(&self, address: SocketAddr, deadline: Instant) -> std::io::Result<TcpStream> {
        let left = deadline.since(self.effects.clock.now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        set_buffers(&socket, &self.options)?;
        socket.connect_timeout(&address.into(), left)?;
        socket.set_tcp_nodelay(true)?;
        Ok(socket.into())
    }
}

fn failed(endpoint: Endpoint, error: &std::io::Error) -> Failed {
    Failed::Final(match error.kind() {
        ErrorKind::TimedOut => DialError::Deadline { endpoint },
        _ => DialError::Handshake { endpoint, reason: reason(error) },
    })
}

fn reason(error: &std::io::Error) -> CloseReason {
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => CloseReason::Peer,
        _ => CloseReason::Broken(error.to_string()),
    }
}
