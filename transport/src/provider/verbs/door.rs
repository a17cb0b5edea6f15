//! How two ends come to a queue pair each: a TCP connection, the handshake that all providers have, then cards.
//!
//! ```text
//! dialler                                  acceptor
//!   hello, challenge, proof, verdict      as in `handshake`
//!   card                              ↔   card
//!   both make their queue pairs ready to receive, post all receives, and make them ready to send
//!   ready                             ↔   ready
//! ```
//!
//! The device is the one whose port has the address of this end's socket: then both ends of the connection and both ends of the queue pairs
//! are on the same cable. Nothing is made before the peer has proved itself, and nothing is sent before both have said that they can
//! receive. Whatever fails, both ends start again from the connection.

use std::io::ErrorKind;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use super::VerbsOptions;
use super::accounts::{Accounts, Limits, RECEIVES_MIN};
use super::anchor::Anchor;
use super::device::{Ask, Device, Gid, Port, VerbsError};
use super::link::{Parts, VerbsLink};
use super::pump::{self, Pump};
use super::seats::Seats;
#[cfg(target_os = "linux")]
use super::window::{Rooms, Route};
use super::wire::{CARD_BYTES, Card, PSN_MASK, READY};
use crate::Effects;
use crate::env::Instant;
use crate::link::{CloseReason, LinkOptions};
use crate::provider::handshake::{self, CHALLENGE_BYTES, HELLO_BYTES, PROOF_BYTES, VERDICT_BYTES, Verdict};
use crate::provider::words::Words;
use crate::provider::{Desk, DialError, Endpoint, Ticket};
use crate::region::{Region, RegionError};

/// Bytes that go out without the device reading memory, where it can.
const INLINE_BYTES: u32 = 220;

/// Why an authenticated connection gave no queue pair.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failed {
    #[error("no verbs device with a cable plugged in has the address {0}")]
    NoDevice(IpAddr),
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    #[error(transparent)]
    Memory(#[from] RegionError),
    #[error("{device} grants room for {granted} chunks of {chunk_bytes} bytes, of which {RECEIVES_MIN} are needed; ask for shorter ones")]
    Shallow { device: String, granted: u32, chunk_bytes: usize },
    #[error("the peer broke the protocol: {0}")]
    Peer(String),
    #[error(transparent)]
    Connection(#[from] std::io::Error),
}

/// A device and the links that it carries.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) device: Arc<dyn Device>,
    pub(super) seats: Seats,
    #[cfg(target_os = "linux")]
    pub(super) rooms: Rooms,
}

/// What both ends of a link need to make it.
#[derive(Clone)]
pub(super) struct Making {
    pub(super) effects: Effects,
    pub(super) options: VerbsOptions,
    pub(super) places: Vec<Place>,
}

impl Making {
    /// Addresses of the devices that could be used now.
    pub(super) fn addresses(&self) -> Vec<IpAddr> {
        let mut all: Vec<IpAddr> = Vec::new();
        for place in &self.places {
            match place.device.port() {
                Ok(port) if port.active => all.extend(port.gids.iter().map(|(_, gid)| gid.ip())),
                Ok(_) => {}
                Err(error) => tracing::debug!(%error, "a verbs device does not answer"),
            }
        }
        // A link-local address is of no use without the name of the dialler's own interface, except the IPv4 ones that cables have.
        all.retain(|ip| !ip.is_unspecified() && !matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local()));
        all.sort_unstable();
        all.dedup();
        all
    }

    fn place(&self, ip: IpAddr) -> Result<(&Place, Port, u8), Failed> {
        let gid = Gid::of(ip);
        for place in &self.places {
            if let Ok(port) = place.device.port()
                && port.active
                && let Some(index) = port.index_of(gid)
            {
                return Ok((place, port, index));
            }
        }
        Err(Failed::NoDevice(ip.to_canonical()))
    }

    /// Makes a link of a connection whose ends have proved themselves.
    fn bring_up(&self, stream: &TcpStream, limits: [LinkOptions; 2], deadline: Instant) -> Result<Arc<VerbsLink>, Failed> {
        let VerbsOptions { profile, silence_max, .. } = self.options;
        let words = Words { stream, clock: &*self.effects.clock, deadline };
        let (near, far) = (stream.local_addr()?, stream.peer_addr()?);
        let (place, port, gid_index) = self.place(near.ip())?;
        let device = &place.device;
        let seat = place.seats.take(device.name(), profile.pairs_max())?;

        let wished = profile.chunk_bytes(self.options.chunk_bytes);
        let cost = profile.cost(wished);
        let [sends, receives] = [self.options.sends, self.options.receives].map(|count| profile.slots(count.max(RECEIVES_MIN), wished));
        let ask = Ask {
            profile,
            send_depth: sends * cost,
            receive_depth: receives * cost,
            completions: sends + receives,
            inline_bytes: if profile.is_reliable() { INLINE_BYTES } else { 0 },
            alone: false,
        };
        let mut pair = device.create(&ask)?;
        // What was asked for is not always what was given.
        let granted = pair.granted();
        let [sends, receives] =
            [(granted.send_depth, sends), (granted.receive_depth, receives)].map(|(depth, wanted)| wanted.min(depth / cost));
        if sends.min(receives) < RECEIVES_MIN {
            return Err(Failed::Shallow { device: device.name().to_owned(), granted: sends.min(receives), chunk_bytes: wished });
        }
        pair.init(&profile.init(port.number))?;

        let ours = Card {
            profile,
            mtu: port.mtu,
            gid: Gid::of(near.ip()),
            number: pair.number(),
            psn: self.effects.rng.next_u64("verbs psn") as u32 & PSN_MASK,
            chunk_bytes: u32::try_from(wished).unwrap_or(u32::MAX),
            receives,
            salt: self.effects.rng.next_u64("verbs salt") as u32,
        };
        words.say(&ours.encode())?;
        let mut card = [0; CARD_BYTES];
        words.hear(&mut card)?;
        let theirs = Card::decode(&card).map_err(|what| Failed::Peer(what.to_owned()))?;
        if theirs.profile != profile {
            return Err(Failed::Peer(format!("it uses verbs as {}, this node as {profile}", theirs.profile)));
        }
        // Its queue pair is where its connection comes from, or something between changed one of them.
        if theirs.gid != Gid::of(far.ip()) {
            return Err(Failed::Peer(format!("it connects from {} and says that its device is at {:?}", far.ip(), theirs.gid)));
        }

        let chunk_bytes = wished.min(theirs.chunk_bytes as usize);
        let mut slots = Region::slots((sends + receives) as usize, chunk_bytes)?;
        pair.register(&slots)?;
        pair.ready_to_receive(&profile.ready_to_receive(&theirs, port.number, gid_index, port.mtu.min(theirs.mtu)))?;
        let mut books = Accounts::new(Limits {
            cost: profile.cost(chunk_bytes),
            send_depth: granted.send_depth,
            receive_depth: granted.receive_depth,
            receives,
            peer_receives: theirs.receives,
        });
        while books.may_post_receive()
            && let Some(slot) = slots.pop()
        {
            pair.post_receive(slot)?;
            books.receive_posted();
        }
        pair.ready_to_send(&profile.ready_to_send(ours.psn))?;
        words.say(&[READY])?;
        let mut ready = [0];
        words.hear(&mut ready)?;
        if ready != [READY] {
            return Err(Failed::Peer("it is not ready, and does not say why".to_owned()));
        }

        let events: Option<OwnedFd> = pair.events().map(|events| events.as_fd().try_clone_to_owned()).transpose()?;
        let salts = [ours.salt, theirs.salt];
        let parts = Parts {
            pump: Pump::new(pump::Parts { pair, books, profile, chunk_bytes, salts, free: slots }),
            events,
            anchor: Anchor::new(stream.try_clone()?)?,
            seat,
            profile,
            chunk_bytes,
            salts,
            peer: format!("{} on {}", far.ip(), device.name()),
            limits: limits.map(|limit| limit.message_bytes_max),
            silence_max,
            #[cfg(target_os = "linux")]
            route: Route {
                device: Arc::clone(device),
                port: port.number,
                gid_index,
                mtu: port.mtu.min(theirs.mtu),
                peer: theirs.gid,
                rooms: place.rooms.clone(),
            },
        };
        Ok(VerbsLink::new(parts, Arc::clone(&self.effects.clock))?)
    }

    /// Hears one newcomer out and delivers its link, if it makes one.
    pub(super) fn answer(&self, stream: TcpStream, desk: &Desk, made: &dyn Fn(&Arc<VerbsLink>)) {
        if let Err(error) = self.try_answer(stream, desk, made) {
            tracing::info!(%error, "a verbs link was not made");
        }
    }

    fn try_answer(&self, stream: TcpStream, desk: &Desk, made: &dyn Fn(&Arc<VerbsLink>)) -> Result<(), Failed> {
        stream.set_nodelay(true)?;
        let deadline = self.effects.after(self.options.handshake_max);
        let words = Words { stream: &stream, clock: &*self.effects.clock, deadline };
        let mut hello = [0; HELLO_BYTES];
        words.hear(&mut hello)?;
        let Some((id, theirs)) = handshake::read_hello(&hello) else {
            return Err(Failed::Connection(ErrorKind::InvalidData.into()));
        };
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
            return Ok(words.say(&handshake::REFUSAL)?);
        };
        words.say(&handshake::welcome(ticket, &hello, &challenge, &proof, *ours))?;
        match self.bring_up(&stream, [*ours, theirs], deadline) {
            Ok(link) => {
                made(&link);
                claim.deliver(link);
                Ok(())
            }
            Err(error) => {
                // Before the connection ends: the peer then comes to another door with the same ticket.
                drop(claim);
                Err(error)
            }
        }
    }

    /// Dials a door. `from` is the address to come from, if it matters.
    pub(super) fn dial(
        &self,
        address: SocketAddr,
        from: Option<IpAddr>,
        ticket: &Ticket,
        ours: LinkOptions,
        deadline: Instant,
    ) -> Result<Arc<VerbsLink>, DialError> {
        let endpoint = Endpoint::Verbs { address };
        let deadline = deadline.min(self.effects.after(self.options.handshake_max));
        let stream = self.connect(address, from, deadline).map_err(|error| match error.kind() {
            ErrorKind::TimedOut | ErrorKind::WouldBlock => DialError::Deadline { endpoint },
            ErrorKind::ConnectionRefused => DialError::Nobody { endpoint },
            _ => DialError::Unreachable { endpoint, reason: error.to_string() },
        })?;
        let failed = |error: std::io::Error| match error.kind() {
            ErrorKind::TimedOut => DialError::Deadline { endpoint },
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                DialError::Handshake { endpoint, reason: CloseReason::Peer }
            }
            _ => DialError::Handshake { endpoint, reason: CloseReason::Broken(error.to_string()) },
        };
        // A connection that leaves by an interface without a device is not worth a ticket.
        let near = stream.local_addr().map_err(failed)?.ip();
        self.place(near).map_err(|error| DialError::Unreachable { endpoint, reason: error.to_string() })?;
        let words = Words { stream: &stream, clock: &*self.effects.clock, deadline };
        let mut nonce = [0; 32];
        self.effects.rng.fill("link hello", &mut nonce);
        let hello = handshake::hello(ticket, &nonce, ours);
        words.say(&hello).map_err(failed)?;
        let mut challenge = [0; CHALLENGE_BYTES];
        words.hear(&mut challenge).map_err(failed)?;
        let proof = handshake::proof(ticket, &hello, &challenge);
        words.say(&proof).map_err(failed)?;
        let mut verdict = [0; VERDICT_BYTES];
        words.hear(&mut verdict).map_err(failed)?;
        let id = ticket.id();
        let theirs = match handshake::read_verdict(ticket, &hello, &challenge, &proof, &verdict) {
            Verdict::Welcome(theirs) => theirs,
            Verdict::Refused => return Err(DialError::Refused { endpoint, id }),
            Verdict::Impostor => return Err(DialError::Impostor { endpoint, id }),
        };
        self.bring_up(&stream, [ours, theirs], deadline).map_err(|error| {
            self.give_up(&stream, deadline);
            match error {
                Failed::Connection(error) => failed(error),
                Failed::Peer(what) => DialError::Handshake { endpoint, reason: CloseReason::Misbehaved(what) },
                other => DialError::Unreachable { endpoint, reason: other.to_string() },
            }
        })
    }

    /// Says that there will be no link, and waits until the acceptor has understood: until then it takes nobody else with this ticket, and
    /// the caller is about to try it elsewhere.
    fn give_up(&self, stream: &TcpStream, deadline: Instant) {
        drop(stream.shutdown(Shutdown::Write));
        let deadline = deadline.min(self.effects.after(self.options.handshake_max));
        let words = Words { stream, clock: &*self.effects.clock, deadline };
        // A card and a byte are all that can still come before the end.
        drop(words.hear(&mut [0; CARD_BYTES + 2]));
    }

    fn connect(&self, address: SocketAddr, from: Option<IpAddr>, deadline: Instant) -> std::io::Result<TcpStream> {
        let left = deadline.since(self.effects.clock.now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        if let Some(from) = from {
            socket.bind(&SocketAddr::new(from, 0).into())?;
        }
        socket.connect_timeout(&address.into(), left.max(Duration::from_millis(1)))?;
        socket.set_tcp_nodelay(true)?;
        Ok(socket.into())
    }
}
