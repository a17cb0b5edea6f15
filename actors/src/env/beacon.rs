//! The node's own multicast hello as the actors see it: interfaces, packets out, packets in.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::{Spawner, Trouble};

/// Longest beacon packet, in bytes. Longer ones are dropped unread.
pub const BEACON_BYTES_MAX: usize = 256;

/// One address of an interface, with the length of its network's prefix in bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct InterfaceAddress {
    /// The address.
    pub ip: IpAddr,
    /// Bits that name the network, e.g. 24.
    pub prefix: u8,
}

/// One network interface of the host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Interface {
    /// The system's number of it, which is also the scope id of its link-local addresses.
    pub index: u32,
    /// The system's name of it.
    pub name: String,
    /// Its addresses, sorted.
    pub addresses: Vec<InterfaceAddress>,
    /// Whether packets on it never leave the host.
    pub loopback: bool,
    /// Whether it has exactly one other end, as tunnels have.
    pub point_to_point: bool,
}

/// Which of the two groups a packet goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// The administratively scoped IPv4 group.
    V4,
    /// The link-local IPv6 group.
    V6,
}

/// A packet that came in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BeaconPacket {
    /// The sender; link-local IPv6 addresses carry the scope id of the interface.
    pub from: SocketAddr,
    /// At most [`BEACON_BYTES_MAX`] bytes, unchecked.
    pub bytes: Vec<u8>,
}

/// Where packets are delivered. It must not block.
pub type BeaconSink = Arc<dyn Fn(BeaconPacket) + Send + Sync>;

/// Why there is no beacon. The node works without: mDNS and given addresses remain.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no multicast hello on this machine: {reason}; peers are found by mDNS and --peer only")]
pub struct BeaconError {
    /// The system's words.
    pub reason: String,
}

/// Opens the multicast hello of a node.
pub trait Beacon: Send + Sync + fmt::Debug + 'static {
    /// Opens it; packets go to `sink` until [`BeaconSocket::close`].
    ///
    /// # Errors
    /// If neither group can be listened to.
    fn open(&self, spawner: Arc<dyn Spawner>, sink: BeaconSink) -> Result<Arc<dyn BeaconSocket>, BeaconError>;
}

/// An open multicast hello. Nothing here blocks, and what cannot be sent is lost, as packets are.
pub trait BeaconSocket: Send + Sync + fmt::Debug + 'static {
    /// Reads the list of interfaces anew and joins the groups on those that have come.
    fn refresh(&self) -> Vec<Interface>;

    /// Sends to the group of `family` on the interface with `index`. `false` if the system did not take it.
    fn announce(&self, index: u32, family: Family, payload: &[u8]) -> bool;

    /// Sends to one peer. `false` if the system did not take it.
    fn reply(&self, to: SocketAddr, payload: &[u8]) -> bool;

    /// What keeps it from hearing others, as of the last [`BeaconSocket::refresh`].
    fn trouble(&self) -> Option<Trouble> {
        None
    }

    /// Leaves the groups and frees the port.
    fn close(&self);
}
