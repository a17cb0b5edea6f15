//! Which of a peer's addresses to try first.
//!
//! Machines announce every address that they have: of container bridges that exist on every other machine too, of
//! tunnels, of cables that were unplugged yesterday. Trying them in the wrong order costs seconds, and a connection
//! over a tunnel costs for as long as it lasts.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use crate::env::Interface;

/// How good an address is, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rank {
    /// The loopback address of a peer on this host.
    Loopback,
    /// On the same network as one of this host's cards.
    SameNetwork,
    /// Link-local, on a link that this host has.
    SameLink,
    /// Private, behind a router.
    Private,
    /// Any other.
    Public,
    /// Reached through a container bridge or a tunnel of this host.
    Virtual,
    /// Link-local without a link that this host shares: most often a cable that is no longer there.
    Stale,
}

/// Whether two addresses share their first `prefix` bits.
pub(crate) fn same_network(a: IpAddr, prefix: u8, b: IpAddr) -> bool {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => {
            let shift = 32_u32.saturating_sub(u32::from(prefix));
            (u64::from(u32::from(a)) >> shift) == (u64::from(u32::from(b)) >> shift)
        }
        (IpAddr::V6(a), IpAddr::V6(b)) => {
            let differ = u128::from(a) ^ u128::from(b);
            differ.leading_zeros() >= u32::from(prefix.min(128))
        }
        _ => false,
    }
}

/// Writes an IPv4 address that came as an IPv6 one as what it is, so that one address has one form.
pub(crate) fn plain(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(v4) => SocketAddr::from((v4, v6.port())),
            // The flow label is no part of an address, and a scope means something for link-local addresses only.
            None => {
                let scope = if v6.ip().is_unicast_link_local() { v6.scope_id() } else { 0 };
                SocketAddr::V6(SocketAddrV6::new(*v6.ip(), v6.port(), 0, scope))
            }
        },
        v4 => v4,
    }
}

/// Whether an address is of the kind that an open cluster talks to: private, link-local or loopback.
pub(crate) fn is_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.is_private() || v4.is_link_local() || v4.is_loopback(),
        IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.is_unique_local() || v6.is_loopback(),
    }
}

/// Whether an interface is a container bridge, a tunnel or the like. Told by its name, as there is no portable flag.
pub(crate) fn is_virtual(interface: &Interface) -> bool {
    const NAMES: [&str; 18] = [
        "docker",
        "br-",
        "veth",
        "virbr",
        "vmnet",
        "vboxnet",
        "tun",
        "tap",
        "utun",
        "wg",
        "tailscale",
        "zt",
        "ppp",
        "cni",
        "flannel",
        "cali",
        "podman",
        "lxc",
    ];
    interface.point_to_point || NAMES.iter().any(|name| interface.name.starts_with(name))
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// Whether `ip` is an address of one of this host's real interfaces. Bridges do not count: each host's container
/// bridge has the same address.
pub(crate) fn is_own(ip: IpAddr, interfaces: &[Interface]) -> bool {
    let real = interfaces.iter().filter(|interface| !is_virtual(interface) && !interface.loopback);
    real.flat_map(|interface| &interface.addresses).any(|own| own.ip == ip)
}

/// How good `address` is for this host, or `None` if it leads nowhere. `same_host` says whether the peer is known to
/// run on this host.
pub(crate) fn rank(address: SocketAddr, interfaces: &[Interface], same_host: bool) -> Option<Rank> {
    let ip = address.ip();
    let nowhere = match ip {
        IpAddr::V4(v4) => v4 == Ipv4Addr::UNSPECIFIED || v4.is_multicast() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6 == Ipv6Addr::UNSPECIFIED || v6.is_multicast(),
    };
    if nowhere || address.port() == 0 {
        return None;
    }
    if ip.is_loopback() {
        // A node that knows no interface, as in tests, knows nothing of hosts either and tries everything.
        return if same_host { Some(Rank::Loopback) } else { interfaces.is_empty().then_some(Rank::Stale) };
    }
    if let SocketAddr::V6(v6) = address
        && v6.ip().is_unicast_link_local()
    {
        // Without a scope nobody can say which link is meant.
        let link = interfaces.iter().find(|interface| interface.index == v6.scope_id())?;
        return Some(if is_virtual(link) { Rank::Virtual } else { Rank::SameLink });
    }
    let mut through_virtual = false;
    for interface in interfaces.iter().filter(|interface| !interface.loopback) {
        if interface.addresses.iter().any(|own| same_network(own.ip, own.prefix, ip)) {
            if !is_virtual(interface) {
                return Some(if is_link_local(ip) { Rank::SameLink } else { Rank::SameNetwork });
            }
            through_virtual = true;
        }
    }
    Some(if through_virtual {
        Rank::Virtual
    } else if is_link_local(ip) {
        Rank::Stale
    } else if is_local(ip) {
        Rank::Private
    } else {
        Rank::Public
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::InterfaceAddress;

    fn interface(index: u32, name: &str, addresses: &[(&str, u8)]) -> Interface {
        let addresses = addresses.iter().map(|(ip, prefix)| InterfaceAddress { ip: ip.parse().unwrap(), prefix: *prefix }).collect();
        Interface { index, name: name.to_owned(), addresses, loopback: name == "lo", point_to_point: name.starts_with("tun") }
    }

    fn host() -> Vec<Interface> {
        vec![
            interface(1, "lo", &[("127.0.0.1", 8), ("::1", 128)]),
            interface(2, "eth0", &[("192.168.1.5", 24), ("fe80::5", 64), ("fd00::5", 64)]),
            interface(3, "docker0", &[("172.17.0.1", 16)]),
            interface(4, "tun0", &[("10.8.0.2", 24)]),
        ]
    }

    #[test]
    fn the_nearest_address_comes_first() {
        let order = [
            ("127.0.0.1:9", Some(Rank::Loopback)),
            ("192.168.1.9:9", Some(Rank::SameNetwork)),
            ("[fd00::9]:9", Some(Rank::SameNetwork)),
            ("[fe80::9%2]:9", Some(Rank::SameLink)),
            ("10.1.2.3:9", Some(Rank::Private)),
            ("1.1.1.1:9", Some(Rank::Public)),
            ("172.17.0.9:9", Some(Rank::Virtual)),
            ("10.8.0.7:9", Some(Rank::Virtual)),
            ("169.254.3.3:9", Some(Rank::Stale)),
            ("[fe80::9]:9", None),
            ("[fe80::9%77]:9", None),
            ("0.0.0.0:9", None),
            ("239.1.1.1:9", None),
            ("192.168.1.9:0", None),
        ];
        for (address, expected) in order {
            assert_eq!(rank(address.parse().unwrap(), &host(), true), expected, "{address}");
        }
        let ranks: Vec<_> = order.iter().filter_map(|(_, rank)| *rank).collect();
        assert!(ranks.is_sorted());
    }

    #[test]
    fn loopback_of_another_host_leads_nowhere() {
        assert_eq!(rank("127.0.0.1:9".parse().unwrap(), &host(), false), None);
    }

    #[test]
    fn a_cable_with_self_assigned_addresses_at_both_ends_is_used() {
        let mut host = host();
        host.push(interface(5, "en5", &[("169.254.1.1", 16)]));
        assert_eq!(rank("169.254.3.3:9".parse().unwrap(), &host, false), Some(Rank::SameLink));
    }

    #[test]
    fn a_bridge_that_every_host_has_makes_no_peer_local() {
        assert!(!is_own("172.17.0.1".parse().unwrap(), &host()));
        assert!(is_own("192.168.1.5".parse().unwrap(), &host()));
    }

    #[test]
    fn one_address_has_one_form() {
        assert_eq!(plain("[::ffff:10.0.0.1]:5".parse().unwrap()), "10.0.0.1:5".parse().unwrap());
        assert_eq!(plain("[fd00::1%3]:5".parse().unwrap()), "[fd00::1]:5".parse().unwrap());
        assert_eq!(plain("[fe80::1%3]:5".parse().unwrap()), "[fe80::1%3]:5".parse().unwrap());
    }

    #[test]
    fn networks_compare_by_prefix() {
        let same = |a: &str, prefix, b: &str| same_network(a.parse().unwrap(), prefix, b.parse().unwrap());
        assert!(same("10.0.0.1", 8, "10.255.0.1"));
        assert!(!same("10.0.0.1", 24, "10.0.1.1"));
        assert!(same("10.0.0.1", 0, "1.1.1.1"));
        assert!(same("fd00::1", 64, "fd00::2:1"));
        assert!(!same("fd00::1", 64, "fd00:0:0:1::1"));
        assert!(!same("10.0.0.1", 8, "fd00::1"));
    }
}
