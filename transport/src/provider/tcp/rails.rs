//! How a link gets connections besides its first.
//!
//! After the handshake on the first connection, the acceptor says where it can be reached, an address for each further rail (as a
//! rule each on another interface), under a tag. The dialler goes through the handshake again on each of them, with tickets that both
//! ends draw from the first handshake; so nobody else can add a rail, and each has keys of its own.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use zeroize::Zeroizing;

use crate::provider::Ticket;

/// Most connections of a link.
pub(super) const RAILS_MAX: u8 = 16;

/// The purpose of the key that all of this is drawn from.
pub(super) const CONTEXT: &str = "shoal 2026 tensor link v2: further rails";

/// An address in a list: 16 bytes of IPv6 (IPv4 mapped into it), the port.
const ADDRESS_BYTES: usize = 18;
const TAG_BYTES: usize = 32;

/// What both ends know about the further rails of one link.
pub(super) struct Further {
    key: Zeroizing<[u8; 32]>,
    count: u8,
}

impl Further {
    /// For `count` further rails; `key` is drawn from the first handshake for [`CONTEXT`].
    pub(super) fn new(key: [u8; 32], count: u8) -> Self {
        Self { key: Zeroizing::new(key), count }
    }

    /// The tickets of the further rails.
    pub(super) fn tickets(&self) -> Vec<Ticket> {
        let drawn = |what: u8, rail: u8| blake3::keyed_hash(&self.key, &[what, rail]);
        let ticket = |rail| {
            let mut id = [0; 16];
            id.copy_from_slice(&drawn(b'i', rail).as_bytes()[..16]);
            Ticket::new(u128::from_le_bytes(id), drawn(b's', rail).into())
        };
        (1..=self.count).map(ticket).collect()
    }

    /// Length of the list of addresses, in bytes.
    pub(super) fn list_bytes(&self) -> usize {
        usize::from(self.count) * ADDRESS_BYTES + TAG_BYTES
    }

    /// The list of addresses; rails without one get the last.
    pub(super) fn list(&self, addresses: &[SocketAddr]) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.list_bytes());
        for i in 0..usize::from(self.count) {
            let unknown = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
            let address = addresses.get(i).or(addresses.last()).unwrap_or(&unknown);
            let ip = match address.ip() {
                IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                IpAddr::V6(v6) => v6,
            };
            out.extend_from_slice(&ip.octets());
            out.extend_from_slice(&address.port().to_le_bytes());
        }
        let tag = self.tag(&out);
        out.extend_from_slice(tag.as_bytes());
        out
    }

    /// Reads a list of [`Further::list_bytes`]; none if it is not the acceptor's.
    pub(super) fn read_list(&self, list: &[u8]) -> Option<Vec<SocketAddr>> {
        let (addresses, theirs) = list.split_last_chunk::<TAG_BYTES>()?;
        if self.tag(addresses) != blake3::Hash::from_bytes(*theirs) {
            return None;
        }
        let read = |bytes: &[u8]| {
            let (ip, port) = bytes.split_first_chunk::<16>()?;
            let ip = Ipv6Addr::from(*ip);
            Some(SocketAddr::new(IpAddr::V6(ip).to_canonical(), u16::from_le_bytes(port.try_into().ok()?)))
        };
        addresses.chunks_exact(ADDRESS_BYTES).map(read).collect()
    }

    fn tag(&self, addresses: &[u8]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(b"l");
        hasher.update(addresses);
        hasher.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tickets_differ_by_rail_and_by_link() {
        let further = Further::new([1; 32], 3);
        let ids: Vec<_> = further.tickets().iter().map(|ticket| (ticket.id(), ticket.key("purpose"))).collect();
        assert_eq!(ids.len(), 3);
        let other: Vec<_> = Further::new([2; 32], 3).tickets().iter().map(|ticket| (ticket.id(), ticket.key("purpose"))).collect();
        let all: std::collections::BTreeSet<_> = ids.iter().chain(&other).collect();
        assert_eq!(all.len(), 6);
        let again: Vec<_> = Further::new([1; 32], 2).tickets().iter().map(|ticket| (ticket.id(), ticket.key("purpose"))).collect();
        assert_eq!(again[..], ids[..2]);
    }

    #[test]
    fn a_list_is_read_by_its_key_only() {
        let further = Further::new([1; 32], 3);
        let addresses: Vec<SocketAddr> = ["10.0.0.1:5", "[fd00::1]:770"].map(|text| text.parse().unwrap()).to_vec();
        let list = further.list(&addresses);
        assert_eq!(list.len(), further.list_bytes());
        assert_eq!(list[..18], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1, 5, 0]);
        assert_eq!(list[34..36], [2, 3], "the port");
        assert_eq!(further.read_list(&list), Some(vec![addresses[0], addresses[1], addresses[1]]));
        assert_eq!(Further::new([2; 32], 3).read_list(&list), None);
        for place in 0..list.len() {
            let mut other = list.clone();
            other[place] ^= 1;
            assert_eq!(further.read_list(&other), None);
        }
        assert_eq!(further.read_list(&list[..list.len() - 1]), None);
    }
}
