//! In which order a peer's endpoints are tried for a tensor link.
//!
//! A node tells every address that it has and cannot know which of them lead to it from elsewhere: a container bridge
//! has an address of a private network, like the local network itself. Whoever dials knows its own networks.

use std::net::{SocketAddr, SocketAddrV6};

use shoal_transport::provider::Endpoint;

use crate::discovery::address::{Rank, is_virtual, rank};
use crate::env::Interface;

/// The endpoints, those that most probably lead to the peer first. A link-local address of IPv6, which is told without
/// a zone because only the dialler's own zones count, comes out once for each link that it may be on.
pub(super) fn in_order(endpoints: &[Endpoint], interfaces: &[Interface]) -> Vec<Endpoint> {
    let worth = |endpoint: &Endpoint| -> (bool, Option<Rank>) {
        match endpoint {
            Endpoint::Tcp(address) => {
                let rank = rank(*address, interfaces, true);
                (rank.is_none(), rank)
            }
            _ => (false, None),
        }
    };
    let mut order: Vec<Endpoint> = endpoints.iter().flat_map(|endpoint| on_links(*endpoint, interfaces)).collect();
    order.sort_by_key(worth);
    order
}

fn on_links(endpoint: Endpoint, interfaces: &[Interface]) -> Vec<Endpoint> {
    match endpoint {
        Endpoint::Tcp(SocketAddr::V6(v6)) if v6.ip().is_unicast_link_local() => {
            let has_one = |interface: &&Interface| {
                !interface.loopback
                    && interface.addresses.iter().any(|own| matches!(own.ip, std::net::IpAddr::V6(ip) if ip.is_unicast_link_local()))
            };
            let links = interfaces.iter().filter(has_one).filter(|interface| !is_virtual(interface));
            links.map(|link| Endpoint::Tcp(SocketAddrV6::new(*v6.ip(), v6.port(), 0, link.index).into())).collect()
        }
        other => vec![other],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::InterfaceAddress;

    fn interface(index: u32, name: &str, addresses: &[(&str, u8)]) -> Interface {
        let addresses = addresses.iter().map(|(ip, prefix)| InterfaceAddress { ip: ip.parse().unwrap(), prefix: *prefix }).collect();
        Interface { index, name: name.to_owned(), addresses, loopback: name == "lo", point_to_point: false }
    }

    fn order(told: &[&str], interfaces: &[Interface]) -> Vec<String> {
        let told: Vec<Endpoint> = told.iter().map(|text| Endpoint::Tcp(text.parse().unwrap())).collect();
        let text = |endpoint: Endpoint| match endpoint {
            Endpoint::Tcp(address) => address.to_string(),
            other => format!("{other:?}"),
        };
        in_order(&told, interfaces).into_iter().map(text).collect()
    }

    #[test]
    fn the_own_network_comes_before_a_peers_container_bridge() {
        let mut host = vec![interface(1, "lo", &[("127.0.0.1", 8), ("::1", 128)]), interface(2, "eth0", &[("192.168.1.5", 24)])];
        let told = ["172.17.0.1:9", "192.168.1.7:9"];
        assert_eq!(order(&told, &host), ["192.168.1.7:9", "172.17.0.1:9"]);
        host.push(interface(3, "docker0", &[("172.17.0.1", 16)]));
        assert_eq!(order(&told, &host), ["192.168.1.7:9", "172.17.0.1:9"]);
    }

    #[test]
    fn a_link_local_address_is_tried_on_each_link() {
        let host = [
            interface(1, "lo", &[("127.0.0.1", 8), ("::1", 128)]),
            interface(2, "eth0", &[("fe80::5", 64)]),
            interface(3, "wlan0", &[("192.168.1.5", 24), ("fe80::6", 64)]),
            interface(4, "docker0", &[("172.17.0.1", 16), ("fe80::7", 64)]),
        ];
        assert_eq!(order(&["[fe80::9]:4", "192.168.1.7:4"], &host), ["192.168.1.7:4", "[fe80::9%2]:4", "[fe80::9%3]:4"]);
        assert!(order(&["[fe80::9]:4"], &host[..1]).is_empty());
    }

    #[test]
    fn everything_is_tried_where_no_interface_is_known() {
        assert_eq!(order(&["10.0.0.1:4", "127.0.0.1:4"], &[]).len(), 2);
    }
}
