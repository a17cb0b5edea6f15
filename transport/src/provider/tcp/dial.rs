//! The dialling end of the handshake.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use super::link::TcpLink;
use super::{TcpProvider, set_buffers};
use crate::env::Instant;
use crate::link::{CloseReason, LinkOptions};
use crate::provider::handshake::{self, CHALLENGE_BYTES, VERDICT_BYTES, Verdict};
use crate::provider::words::Words;
use crate::provider::{DialError, Endpoint, ProviderKind, Ticket};

/// First pause before a peer that was too busy to answer is dialled again; doubled each time.
const PAUSE_MIN: Duration = Duration::from_millis(10);
/// Longest such pause.
const PAUSE_MAX: Duration = Duration::from_millis(200);

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
        let clock = &*self.effects.clock;
        let endpoint = Endpoint::Tcp(address);
        let stream = self.connect(address, deadline).map_err(|error| {
            Failed::Final(match error.kind() {
                ErrorKind::TimedOut | ErrorKind::WouldBlock => DialError::Deadline { endpoint },
                _ => DialError::Unreachable { endpoint, reason: error.to_string() },
            })
        })?;
        let words = Words { stream: &stream, clock, deadline };
        let failed = |error: std::io::Error| {
            Failed::Final(match error.kind() {
                ErrorKind::TimedOut => DialError::Deadline { endpoint },
                _ => DialError::Handshake { endpoint, reason: reason(&error) },
            })
        };
        let mut nonce = [0; 32];
        self.effects.rng.fill("link hello", &mut nonce);
        let hello = handshake::hello(ticket, &nonce, ours);
        let mut challenge = [0; CHALLENGE_BYTES];
        words.say(&hello).and_then(|()| words.hear(&mut challenge)).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => Failed::Busy(reason(&error)),
            _ => failed(error),
        })?;
        let proof = handshake::proof(ticket, &hello, &challenge);
        let mut verdict = [0; VERDICT_BYTES];
        words.say(&proof).and_then(|()| words.hear(&mut verdict)).map_err(failed)?;
        let id = ticket.id();
        let theirs = match handshake::read_verdict(ticket, &hello, &challenge, &proof, &verdict) {
            Verdict::Welcome(theirs) => theirs,
            Verdict::Refused => return Err(Failed::Final(DialError::Refused { endpoint, id })),
            Verdict::Impostor => return Err(Failed::Final(DialError::Impostor { endpoint, id })),
        };
        let limits = [ours.message_bytes_max, theirs.message_bytes_max];
        TcpLink::new(stream, address, Arc::clone(&self.effects.clock), self.liveness(), limits).map_err(failed)
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

fn reason(error: &std::io::Error) -> CloseReason {
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => CloseReason::Peer,
        _ => CloseReason::Broken(error.to_string()),
    }
}
