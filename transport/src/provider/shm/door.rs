//! How two processes of one machine come to share memory: a socket with an abstract name, the handshake that all providers have,
//! and descriptors handed through the socket.
//!
//! ```text
//! dialler                                  acceptor
//!   hello, challenge, proof, verdict      as in `handshake`
//!                                      ←   'm', with the memory and the four bells: its own two, then the dialler's two
//! ```
//!
//! Only processes of the same user are heard, which the kernel vouches for: others use the network. The acceptor makes everything
//! that is shared, and nothing of it before the dialler has proved itself.

use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::bell::Bell;
use super::link::{Bells, Parts, ShmLink};
use super::segment::Segment;
use crate::Effects;
use crate::env::Instant;
use crate::link::{CloseReason, LinkOptions};
use crate::provider::handshake::{self, CHALLENGE_BYTES, HELLO_BYTES, PROOF_BYTES, VERDICT_BYTES, Verdict};
use crate::provider::words::Words;
use crate::provider::{Desk, DialError, Endpoint, ProviderKind, Ticket};

/// Descriptors that are handed over: the memory, and four bells.
const HANDED: usize = 5;
/// What comes with them.
const MARK: u8 = b'm';

/// The socket's name for a door.
pub(super) fn address(door: u128) -> std::io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("shoal/{door:032x}"))
}

/// Opens a door.
pub(super) fn listen(door: u128) -> std::io::Result<UnixListener> {
    UnixListener::bind_addr(&address(door)?)
}

pub(super) fn of_this_user(stream: &UnixStream) -> bool {
    rustix::net::sockopt::socket_peercred(stream).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

/// What both ends of a link need to make it.
#[derive(Clone)]
pub(super) struct Making {
    pub(super) effects: Effects,
    pub(super) ring_bytes: usize,
    pub(super) silence_max: Duration,
    pub(super) handshake_max: Duration,
}

impl Making {
    /// Hears one newcomer out and delivers its link, if it makes one.
    pub(super) fn answer(&self, stream: UnixStream, desk: &Desk, made: &dyn Fn(&Arc<ShmLink>)) {
        if !of_this_user(&stream) {
            tracing::info!("a process of another user came to the door for tensor links");
            return;
        }
        if let Err(error) = self.try_answer(stream, desk, made) {
            tracing::debug!(%error, "a tensor link through shared memory was not made");
        }
    }

    fn try_answer(&self, stream: UnixStream, desk: &Desk, made: &dyn Fn(&Arc<ShmLink>)) -> std::io::Result<()> {
        let words = Words { stream: &stream, clock: &*self.effects.clock, deadline: self.effects.after(self.handshake_max) };
        let mut hello = [0; HELLO_BYTES];
        words.hear(&mut hello)?;
        let Some((id, theirs)) = handshake::read_hello(&hello) else { return Err(ErrorKind::InvalidData.into()) };
        let expected = desk.look_up(id);
        let mut challenge = [0; CHALLENGE_BYTES];
        self.effects.rng.fill("link challenge", &mut challenge);
        words.say(&challenge)?;
        let mut proof = [0; PROOF_BYTES];
        words.hear(&mut proof)?;
        // The same work is done for an unknown id, so that time tells nothing either.
        let nobody = (Ticket::new(id, [0; 32]), LinkOptions::default());
        let (ticket, ours) = expected.as_ref().unwrap_or(&nobody);
        let proved = handshake::proved(ticket, &hello, &challenge, &proof) && expected.is_some();
        let Some(claim) = proved.then(|| desk.claim(id)).flatten() else {
            if !proved {
                desk.refuse(id);
            }
            tracing::info!(ticket = %format_args!("{id:032x}"), "a tensor link was refused");
            return words.say(&handshake::REFUSAL);
        };
        let segment = Segment::create(self.ring_bytes)?;
        let [bytes, room, peer_bytes, peer_room] = [Bell::new()?, Bell::new()?, Bell::new()?, Bell::new()?];
        words.say(&handshake::welcome(ticket, &hello, &challenge, &proof, *ours))?;
        hand_over(&stream, &segment, [&bytes, &room, &peer_bytes, &peer_room])?;
        let pid = rustix::net::sockopt::socket_peercred(&stream)?.pid;
        let parts = Parts {
            anchor: stream,
            segment,
            lane: 0,
            bells: Bells { bytes, room, peer_bytes, peer_room },
            peer: format!("process {}", pid.as_raw_nonzero()),
            limits: [ours.message_bytes_max, theirs.message_bytes_max],
        };
        let link = ShmLink::new(parts, Arc::clone(&self.effects.clock), self.silence_max)?;
        made(&link);
        claim.deliver(link);
        Ok(())
    }

    /// Dials a door.
    pub(super) fn dial(&self, door: u128, ticket: &Ticket, ours: LinkOptions, deadline: Instant) -> Result<Arc<ShmLink>, DialError> {
        let endpoint = Endpoint::Shm { door };
        let deadline = deadline.min(self.effects.after(self.handshake_max));
        let stream = self.connect(door, deadline).map_err(|error| match error.kind() {
            ErrorKind::TimedOut => DialError::Deadline { endpoint },
            ErrorKind::ConnectionRefused => DialError::Nobody { endpoint },
            _ => DialError::Unreachable { endpoint, reason: error.to_string() },
        })?;
        // Whoever has the name has not proved anything yet, but another user is nobody to talk to.
        if !of_this_user(&stream) {
            return Err(DialError::Unreachable { endpoint, reason: "a process of another user listens there".to_owned() });
        }
        let failed = |error: std::io::Error| match error.kind() {
            ErrorKind::TimedOut => DialError::Deadline { endpoint },
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                DialError::Handshake { endpoint, reason: CloseReason::Peer }
            }
            _ => DialError::Handshake { endpoint, reason: CloseReason::Broken(error.to_string()) },
        };
        let words = Words { stream: &stream, clock: &*self.effects.clock, deadline };
        let mut nonce = [0; 32];
        self.effects.rng.fill("link hello", &mut nonce);
        let hello = handshake::hello(ticket, &nonce, ours);
        let mut challenge = [0; CHALLENGE_BYTES];
        words.say(&hello).and_then(|()| words.hear(&mut challenge)).map_err(failed)?;
        let proof = handshake::proof(ticket, &hello, &challenge);
        let mut verdict = [0; VERDICT_BYTES];
        words.say(&proof).and_then(|()| words.hear(&mut verdict)).map_err(failed)?;
        let id = ticket.id();
        let theirs = match handshake::read_verdict(ticket, &hello, &challenge, &proof, &verdict) {
            Verdict::Welcome(theirs) => theirs,
            Verdict::Refused => return Err(DialError::Refused { endpoint, id }),
            Verdict::Impostor => return Err(DialError::Impostor { endpoint, id }),
        };
        let make = || {
            let [memory, peer_bytes, peer_room, bytes, room] = words.receive_handed()?;
            let [peer_bytes, peer_room, bytes, room] =
                [Bell::handed_over(peer_bytes)?, Bell::handed_over(peer_room)?, Bell::handed_over(bytes)?, Bell::handed_over(room)?];
            let segment = Segment::open(memory)?;
            let pid = rustix::net::sockopt::socket_peercred(&stream)?.pid;
            let parts = Parts {
                anchor: stream.try_clone()?,
                segment,
                lane: 1,
                bells: Bells { bytes, room, peer_bytes, peer_room },
                peer: format!("process {}", pid.as_raw_nonzero()),
                limits: [ours.message_bytes_max, theirs.message_bytes_max],
            };
            ShmLink::new(parts, Arc::clone(&self.effects.clock), self.silence_max)
        };
        make().map_err(failed)
    }

    /// Connects without waiting longer than the deadline for a listener that takes nobody in.
    fn connect(&self, door: u128, deadline: Instant) -> std::io::Result<UnixStream> {
        let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        let address = socket2::SockAddr::unix(format!("\0shoal/{door:032x}"))?;
        let mut pause = Duration::from_millis(1);
        loop {
            match socket.connect(&address) {
                Ok(()) => break,
                // Its queue is full.
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if self.effects.clock.now() + pause >= deadline {
                        return Err(ErrorKind::TimedOut.into());
                    }
                    wait_for(pause);
                    pause = (pause * 2).min(Duration::from_millis(50));
                }
                Err(error) => return Err(error),
            }
        }
        socket.set_nonblocking(false)?;
        Ok(OwnedFd::from(socket).into())
    }
}

#[expect(clippy::disallowed_methods, reason = "a full queue of a real socket gives no event to wait for")]
fn wait_for(pause: Duration) {
    std::thread::sleep(pause);
}

/// Hands memory and bells to the dialler, for which they are the other way round.
fn hand_over(stream: &UnixStream, segment: &Segment, bells: [&Bell; 4]) -> std::io::Result<()> {
    let [bytes, room, peer_bytes, peer_room] = bells;
    let handed = [segment.as_fd(), bytes.as_fd(), room.as_fd(), peer_bytes.as_fd(), peer_room.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(HANDED))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&handed)) {
        return Err(ErrorKind::OutOfMemory.into());
    }
    // A socket that has said so little has room for one byte.
    match sendmsg(stream, &[IoSlice::new(&[MARK])], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)? {
        1 => Ok(()),
        _ => Err(ErrorKind::WriteZero.into()),
    }
}

impl Words<'_, UnixStream> {
    /// Receives what [`hand_over`] sent.
    fn receive_handed(&self) -> std::io::Result<[OwnedFd; HANDED]> {
        let odd = |what: &str| std::io::Error::new(ErrorKind::InvalidData, what.to_owned());
        let mut mark = [0];
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(HANDED))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            self.bound()?;
            let received = recvmsg(self.stream, &mut [IoSliceMut::new(&mut mark)], &mut control, RecvFlags::CMSG_CLOEXEC);
            match received {
                Ok(message) if message.bytes == 0 => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            let mut handed = Vec::new();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    handed.extend(fds);
                }
            }
            if mark != [MARK] {
                return Err(odd("something else came than the link's memory"));
            }
            return handed.try_into().map_err(|_| odd("the link's memory came without its bells"));
        }
    }
}

/// What is spoken of when the provider has been shut down.
pub(super) const KIND: ProviderKind = ProviderKind::Shm;
