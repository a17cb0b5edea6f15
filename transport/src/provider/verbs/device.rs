//! What the protocol needs of a verbs device, apart from whose device it is.
//!
//! A [`Device`] is one port of one adapter. A [`Pair`] is a queue pair with the completion queue and the registration that
//! serve it alone. Memory is handed to a pair slot by slot and comes back with the completion, so whatever the device may
//! write to belongs to nobody else meanwhile.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::profile::Profile;
use crate::region::{LentPages, Slot};

/// What Apple's queues count their depth in, in bytes. A message takes as many as it begins.
pub(super) const FRAME_BYTES: usize = 4096;

/// Why verbs cannot be used on this machine. Nothing is wrong with such a machine; its links go another way.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoDevices {
    /// The verbs library cannot be loaded.
    #[error("no verbs devices: the verbs library is not here ({reason})")]
    Library {
        /// The loader's words.
        reason: String,
    },
    /// It is not the library that was expected.
    #[error("no verbs devices: the verbs library has no {name}")]
    Symbol {
        /// The function that it lacks.
        name: &'static str,
    },
    /// There is a library and nothing to use it with.
    #[error("no verbs devices: the library knows none that can be opened ({reason})")]
    Nothing {
        /// What was seen.
        reason: String,
    },
}

/// A call that the library or the device refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum VerbsError {
    /// With the system's number for it.
    #[error("{call} failed on {device}: {} (error {code}){hint}", std::io::Error::from_raw_os_error(*code))]
    Call { call: &'static str, device: String, code: i32, hint: &'static str },
    /// Asking the device for more would make it refuse for good.
    #[error("{device} carries {limit} links already, which is all that it can")]
    Full { device: String, limit: usize },
}

/// A port's address on the fabric.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Gid(pub(super) [u8; 16]);

impl Gid {
    /// The address that a port has whose network interface has this one.
    pub(super) fn of(ip: IpAddr) -> Self {
        Self(match ip.to_canonical() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        })
    }

    /// The network address that it stands for.
    pub(super) fn ip(self) -> IpAddr {
        IpAddr::V6(Ipv6Addr::from(self.0)).to_canonical()
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.ip(), f)
    }
}

/// What a port says of itself now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Port {
    /// Its number on the adapter.
    pub(super) number: u8,
    /// Whether anything is plugged in.
    pub(super) active: bool,
    /// Largest packet, as verbs number them: 1 is 256 bytes, each further one twice as much.
    pub(super) mtu: u8,
    /// Its addresses, each with its place in the port's table, best first.
    pub(super) gids: Vec<(u8, Gid)>,
}

impl Port {
    /// Where in the table an address stands.
    pub(super) fn index_of(&self, gid: Gid) -> Option<u8> {
        self.gids.iter().find(|(_, theirs)| *theirs == gid).map(|(index, _)| *index)
    }
}

/// What is asked of a new queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ask {
    pub(super) profile: Profile,
    /// Depth of the send queue, in what [`Profile::cost`] counts in.
    pub(super) send_depth: u32,
    /// Depth of the receive queue, likewise.
    pub(super) receive_depth: u32,
    /// Work requests that may be outstanding together: room in the completion queue.
    pub(super) completions: u32,
    /// Bytes that should be sent without the device reading memory.
    pub(super) inline_bytes: u32,
    /// In a protection domain of its own: what is registered there, no other queue pair reaches, whatever key its peer may guess.
    pub(super) alone: bool,
}

/// What was got, which may be more or less.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Granted {
    pub(super) send_depth: u32,
    pub(super) receive_depth: u32,
}

/// The first step of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Init {
    pub(super) port: u8,
    /// Bits of `ibv_access_flags`.
    pub(super) access: u32,
}

/// The second step: whom it hears.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReadyToReceive {
    pub(super) mtu: u8,
    pub(super) peer_number: u32,
    pub(super) receive_psn: u32,
    pub(super) peer: Gid,
    pub(super) gid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) port: u8,
    pub(super) reliable: Option<ReliableReceive>,
}

/// What only a reliable queue pair is told with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReliableReceive {
    pub(super) min_rnr_timer: u8,
    pub(super) reads_max: u8,
}

/// The third step: it speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReadyToSend {
    pub(super) send_psn: u32,
    pub(super) reliable: Option<ReliableSend>,
}

/// What only a reliable queue pair is told with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReliableSend {
    pub(super) timeout: u8,
    pub(super) retries: u8,
    pub(super) rnr_retries: u8,
    pub(super) reads_max: u8,
}

/// Which way a completed slot went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Sent,
    Received,
}

/// A work request that is over.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) way: Way,
    pub(super) slot: Slot,
    /// Bytes received.
    pub(super) bytes: usize,
    /// The completion's status where it is not success (`ibv_wc_status`).
    pub(super) failed: Option<u32>,
}

/// What a peer may do to memory by itself: bits of `ibv_access_flags`.
pub(super) mod access {
    pub(in super::super) const LOCAL_WRITE: u32 = 1;
    pub(in super::super) const REMOTE_WRITE: u32 = 2;
    pub(in super::super) const REMOTE_READ: u32 = 4;
}

/// Where in the peer's memory an operation goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spot {
    /// As the peer's registration has it.
    pub(super) address: u64,
    /// The registration's key.
    pub(super) key: u32,
}

/// What exists on devices, counted as it is made and destroyed. A link is one of each, and so is each end of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct InUse {
    /// Queue pairs.
    pub pairs: usize,
    /// Completion queues.
    pub completion_queues: usize,
    /// Registrations of memory.
    pub registrations: usize,
}

impl std::iter::Sum for InUse {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            pairs: sum.pairs + one.pairs,
            completion_queues: sum.completion_queues + one.completion_queues,
            registrations: sum.registrations + one.registrations,
        })
    }
}

/// One port of one adapter.
pub(super) trait Device: Send + Sync + fmt::Debug {
    /// Its name, for people.
    fn name(&self) -> &str;

    /// What it says of itself now.
    fn port(&self) -> Result<Port, VerbsError>;

    /// Makes a queue pair.
    fn create(&self, ask: &Ask) -> Result<Box<dyn Pair>, VerbsError>;

    /// What exists on it now.
    fn in_use(&self) -> InUse;
}

/// A queue pair. Dropping it destroys it first, then its registration, then its completion queue.
pub(super) trait Pair: Send {
    /// Its number on its port.
    fn number(&self) -> u32;

    /// Its depths, as the device says.
    fn granted(&self) -> Granted;

    /// Registers the memory of all these slots, which lie one behind the other.
    fn register(&mut self, slots: &[Slot]) -> Result<(), VerbsError>;

    fn init(&mut self, step: &Init) -> Result<(), VerbsError>;
    fn ready_to_receive(&mut self, step: &ReadyToReceive) -> Result<(), VerbsError>;
    fn ready_to_send(&mut self, step: &ReadyToSend) -> Result<(), VerbsError>;

    /// Gives a slot to be received into.
    fn post_receive(&mut self, slot: Slot) -> Result<(), VerbsError>;

    /// Sends the first bytes of a slot.
    fn post_send(&mut self, slot: Slot, bytes: usize) -> Result<(), VerbsError>;

    /// Writes the first bytes of a slot to the peer's memory.
    fn post_write(&mut self, slot: Slot, bytes: usize, to: Spot) -> Result<(), VerbsError>;

    /// Reads bytes of the peer's memory to the start of a slot.
    fn post_read(&mut self, slot: Slot, bytes: usize, from: Spot) -> Result<(), VerbsError>;

    /// Lets the peer reach the first bytes of lent memory as far as `access` and that of the queue pair say, and gives the key. A queue pair
    /// has slots or lent memory, not both.
    fn expose(&mut self, memory: &LentPages, bytes: usize, access: u32) -> Result<u32, VerbsError>;

    /// Destroys the queue pair, then its registration. `true`: the device has let go of all memory, and nothing that comes from the peer
    /// can touch it any more. `false`: it refused, and may be asked again. Afterwards the pair is of no use.
    fn destroy(&mut self) -> bool;

    /// Appends what is over by now.
    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), VerbsError>;

    /// Asks for an event at the next completion. What completed before gives none, so poll once more afterwards.
    fn arm(&mut self) -> Result<(), VerbsError>;

    /// What is readable when there is an event; none where the library has no such thing.
    fn events(&self) -> Option<BorrowedFd<'_>>;

    /// Takes the events that are there.
    fn take_events(&mut self);
}

/// Everything that can be used on this machine.
pub(super) type Devices = Vec<Arc<dyn Device>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_that_of_the_network_interface() {
        let gid = Gid::of("10.9.0.1".parse().unwrap());
        assert_eq!(gid.0, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 0, 1]);
        assert_eq!(gid.ip(), "10.9.0.1".parse::<IpAddr>().unwrap());
        assert_eq!(gid, Gid::of("::ffff:10.9.0.1".parse().unwrap()));
        let v6: IpAddr = "fe80::1:2".parse().unwrap();
        assert_eq!(Gid::of(v6).ip(), v6);
    }
}
