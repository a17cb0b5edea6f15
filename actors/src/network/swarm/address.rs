//! Between the addresses of the socket interface and those of libp2p, and between node ids and peer ids.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use libp2p::core::multiaddr::Protocol;
use libp2p::identity::{PublicKey, ed25519};
use libp2p::{Multiaddr, PeerId};

use crate::ids::NodeId;
use crate::network::reach::is_link_local;

/// The libp2p name of a node; none if the 32 bytes are no ed25519 public key.
pub(super) fn peer_id(node: NodeId) -> Option<PeerId> {
    let key = ed25519::PublicKey::try_from_bytes(&node.0).ok()?;
    Some(PublicKey::from(key).to_peer_id())
}

/// The node of a libp2p name; none if its key is not an ed25519 key.
pub(super) fn node_id(peer: &PeerId) -> Option<NodeId> {
    // The name of an ed25519 key is the key itself in an identity multihash (code 0).
    let hash = peer.as_ref();
    let key = (hash.code() == 0).then(|| PublicKey::try_decode_protobuf(hash.digest()).ok()).flatten()?;
    Some(NodeId(key.try_into_ed25519().ok()?.to_bytes()))
}

/// `address` for libp2p. The zone of a link-local address is kept as the number of its interface.
pub(super) fn multiaddr(address: SocketAddr) -> Multiaddr {
    let mut multiaddr = Multiaddr::empty();
    match address {
        SocketAddr::V4(v4) => multiaddr.push(Protocol::Ip4(*v4.ip())),
        SocketAddr::V6(v6) => {
            if v6.scope_id() != 0 && is_link_local(v6.ip()) {
                multiaddr.push(Protocol::Ip6zone(Cow::Owned(v6.scope_id().to_string())));
            }
            multiaddr.push(Protocol::Ip6(*v6.ip()));
        }
    }
    multiaddr.with(Protocol::Tcp(address.port()))
}

/// The TCP address in `multiaddr`, if it begins with one.
pub(super) fn socket_address(multiaddr: &Multiaddr) -> Option<SocketAddr> {
    let mut parts = multiaddr.iter();
    let mut zone = 0;
    loop {
        match parts.next()? {
            Protocol::Ip6zone(text) => zone = text.parse().ok()?,
            Protocol::Ip4(ip) => return port(parts.next()?).map(|port| SocketAddr::new(IpAddr::V4(ip), port)),
            Protocol::Ip6(ip) => return port(parts.next()?).map(|port| SocketAddrV6::new(ip, port, 0, zone).into()),
            _ => return None,
        }
    }
}

fn port(part: Protocol<'_>) -> Option<u16> {
    match part {
        Protocol::Tcp(port) => Some(port),
        _ => None,
    }
}

/// The interface that has this link-local address, of this machine.
pub(super) fn own_zone(ip: IpAddr) -> Option<u32> {
    let interfaces = if_addrs::get_if_addrs().ok()?;
    interfaces.into_iter().find(|interface| interface.ip() == ip)?.index
}

/// The interfaces over which a link-local address of another machine could be reached: those that have one
/// themselves. mDNS does not say over which it came.
pub(super) fn link_local_zones() -> Vec<u32> {
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let has_one = |ip: IpAddr| matches!(ip, IpAddr::V6(ip) if is_link_local(&ip));
    let mut zones: Vec<u32> =
        interfaces.into_iter().filter(|interface| has_one(interface.ip())).filter_map(|interface| interface.index).collect();
    zones.sort_unstable();
    zones.dedup();
    zones
}

/// Whether `address` means nothing without a zone and has none.
pub(super) fn lacks_zone(address: &SocketAddr) -> bool {
    matches!(address, SocketAddr::V6(v6) if v6.scope_id() == 0 && is_link_local(v6.ip()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secret::Identity;

    #[test]
    fn ids_convert_both_ways() {
        let identity = Identity::from_seed([3; 32]);
        let peer = peer_id(identity.node()).unwrap();
        assert_eq!(peer, identity.keypair().public().to_peer_id());
        assert_eq!(node_id(&peer), Some(identity.node()));
        assert_eq!(node_id(&PeerId::random()), None, "a name without a key in it is no node's");
    }

    #[test]
    fn addresses_convert_both_ways() {
        for text in ["10.0.0.1:7", "[::1]:7", "[fd00::1]:65535", "[fe80::1%3]:7"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(socket_address(&multiaddr(address)), Some(address), "{text}");
        }
        assert_eq!(multiaddr("[fe80::1%3]:7".parse().unwrap()).to_string(), "/ip6zone/3/ip6/fe80::1/tcp/7");
        for text in ["/dns4/example.com/tcp/1", "/ip4/1.2.3.4/udp/1", "/ip4/1.2.3.4", "/ip6zone/eth0/ip6/fe80::1/tcp/1"] {
            assert_eq!(socket_address(&text.parse().unwrap()), None, "{text}");
        }
        assert!(lacks_zone(&"[fe80::1]:7".parse().unwrap()));
        assert!(!lacks_zone(&"[fe80::1%3]:7".parse().unwrap()));
    }
}
