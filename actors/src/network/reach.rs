//! Which addresses an open cluster deals with.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Whether an address belongs to a private network, the link, or this machine: where an open cluster lives.
///
/// `carrier_nat` adds 100.64.0.0/10, which providers share among strangers but overlay networks also use.
pub fn is_private(ip: IpAddr, carrier_nat: bool) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(ip) => ip.is_private() || ip.is_loopback() || ip.is_link_local() || (carrier_nat && is_carrier_nat(ip)),
        IpAddr::V6(ip) => ip.is_loopback() || ip.is_unique_local() || is_link_local(&ip),
    }
}

fn is_carrier_nat(ip: Ipv4Addr) -> bool {
    let [first, second, ..] = ip.octets();
    first == 100 && second & 0xc0 == 64
}

/// fe80::/10: an address that means something only together with an interface.
pub(super) fn is_link_local(ip: &Ipv6Addr) -> bool {
    ip.is_unicast_link_local()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_addresses_are_told_from_public_ones() {
        for text in
            ["10.1.2.3", "172.16.0.1", "172.31.255.1", "192.168.1.1", "127.0.0.1", "169.254.7.7", "::1", "fe80::1", "fd00::1", "fc00::1"]
        {
            assert!(is_private(text.parse().unwrap(), false), "{text}");
        }
        assert!(is_private("::ffff:10.0.0.1".parse().unwrap(), false));
        for text in ["8.8.8.8", "172.32.0.1", "100.64.0.1", "192.0.2.1", "2001:db8::1", "2a00::1", "fec0::1", "::", "0.0.0.0"] {
            assert!(!is_private(text.parse().unwrap(), false), "{text}");
        }
        assert!(!is_private("::ffff:8.8.8.8".parse().unwrap(), false));
        assert!(is_private("100.127.0.1".parse().unwrap(), true));
        assert!(!is_private("100.128.0.1".parse().unwrap(), true));
    }
}
