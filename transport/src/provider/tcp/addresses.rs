//! Which addresses a node tells its peers.

use std::net::{IpAddr, SocketAddr};

/// The addresses at which peers can reach what listens at `listening`, best first: what the caller says, else the
/// bound addresses, with "any" replaced by the addresses of the interfaces that are up.
pub(super) fn to_advertise(listening: &[SocketAddr], advertise: &[SocketAddr]) -> Vec<SocketAddr> {
    if !advertise.is_empty() {
        return advertise.to_vec();
    }
    let interfaces: Vec<IpAddr> = match if_addrs::get_if_addrs() {
        Ok(interfaces) => interfaces.iter().filter(|interface| interface.is_oper_up()).map(if_addrs::Interface::ip).collect(),
        Err(error) => {
            tracing::warn!(%error, "cannot list the addresses of this machine's interfaces");
            Vec::new()
        }
    };
    resolve(listening, &interfaces)
}

/// Where further connections of a link should go whose first one came in at `first`: other interfaces in turn, then `first` again.
pub(super) fn for_rails(first: SocketAddr, listening: &[SocketAddr], advertise: &[SocketAddr], count: usize) -> Vec<SocketAddr> {
    let first = SocketAddr::new(first.ip().to_canonical(), first.port());
    let named: Vec<(String, IpAddr)> = if first.ip().is_loopback() {
        Vec::new()
    } else {
        let up = |interface: &if_addrs::Interface| interface.is_oper_up() && !interface.is_loopback();
        let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
        interfaces.into_iter().filter(up).map(|interface| (interface.name.clone(), interface.ip())).collect()
    };
    spread(first, &to_advertise(listening, advertise), &named, count)
}

/// [`for_rails`] with known interfaces: one address of each, of the first one's family if there is one.
fn spread(first: SocketAddr, candidates: &[SocketAddr], named: &[(String, IpAddr)], count: usize) -> Vec<SocketAddr> {
    let name = |ip: IpAddr| named.iter().find(|(_, of)| *of == ip).map(|(name, _)| name);
    let mut order: Vec<&SocketAddr> = candidates.iter().filter(|address| !is_link_local_v6(address.ip())).collect();
    order.sort_by_key(|address| address.is_ipv4() != first.is_ipv4());
    let mut used = vec![name(first.ip())];
    let mut turn = Vec::new();
    for address in order {
        let interface = name(address.ip());
        if interface.is_some() && !used.contains(&interface) {
            used.push(interface);
            turn.push(*address);
        }
    }
    turn.push(first);
    turn.into_iter().cycle().take(count).collect()
}

fn is_link_local_v6(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

fn resolve(listening: &[SocketAddr], interfaces: &[IpAddr]) -> Vec<SocketAddr> {
    let mut out = Vec::new();
    for bound in listening {
        if bound.ip().is_unspecified() {
            let reached = |ip: &&IpAddr| ip.is_ipv4() || bound.is_ipv6();
            out.extend(interfaces.iter().filter(reached).map(|ip| SocketAddr::new(*ip, bound.port())));
        } else {
            out.push(*bound);
        }
    }
    out.retain(|address| rank(address.ip()).is_some());
    // The machine's own loopback is of use only to itself, and it reaches itself by any other address as well.
    if out.iter().any(|address| !address.ip().is_loopback()) {
        out.retain(|address| !address.ip().is_loopback());
    }
    out.sort_by_key(|address| (rank(address.ip()), *address));
    out.dedup();
    out
}

/// Lower is better; none for addresses that a peer cannot use.
fn rank(ip: IpAddr) -> Option<u8> {
    match ip {
        _ if ip.is_unspecified() || ip.is_multicast() => None,
        _ if ip.is_loopback() => Some(9),
        IpAddr::V4(v4) if v4.is_link_local() => Some(3),
        IpAddr::V4(v4) if v4.is_private() => Some(0),
        IpAddr::V4(_) => Some(1),
        // Reaching it takes the name of the dialler's own interface, which an address passed on does not carry: the
        // dialler tries its own.
        IpAddr::V6(v6) if v6.is_unicast_link_local() => Some(4),
        IpAddr::V6(_) => Some(2),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(listening: &[&str], interfaces: &[&str], expected: &[&str]) {
        let parse = |texts: &[&str]| -> Vec<SocketAddr> { texts.iter().map(|text| text.parse().unwrap()).collect() };
        let interfaces: Vec<IpAddr> = interfaces.iter().map(|text| text.parse().unwrap()).collect();
        assert_eq!(resolve(&parse(listening), &interfaces), parse(expected));
    }

    #[test]
    fn any_becomes_the_addresses_of_the_interfaces() {
        let interfaces = ["127.0.0.1", "::1", "169.254.3.4", "fd00::5", "fe80::6", "10.0.0.7"];
        check(&["[::]:5"], &interfaces, &["10.0.0.7:5", "[fd00::5]:5", "169.254.3.4:5", "[fe80::6]:5"]);
        check(&["0.0.0.0:5"], &interfaces, &["10.0.0.7:5", "169.254.3.4:5"]);
        check(&["192.168.1.2:5"], &interfaces, &["192.168.1.2:5"]);
    }

    #[test]
    fn loopback_is_told_only_where_there_is_nothing_else() {
        check(&["[::]:5"], &["127.0.0.1", "::1"], &["127.0.0.1:5", "[::1]:5"]);
        check(&["127.0.0.1:5"], &["10.0.0.7"], &["127.0.0.1:5"]);
        check(&["[::]:5"], &[], &[]);
    }

    #[test]
    fn rails_go_to_other_interfaces_in_turn() {
        let named = [("a", "10.0.0.1"), ("a", "fd00::1"), ("b", "10.0.1.1"), ("b", "fd01::1"), ("c", "fd02::1"), ("d", "fe80::1")];
        let named: Vec<(String, IpAddr)> = named.map(|(name, ip)| (name.to_owned(), ip.parse().unwrap())).to_vec();
        let all: Vec<SocketAddr> = named.iter().map(|(_, ip)| SocketAddr::new(*ip, 5)).collect();
        let parse = |texts: &[&str]| -> Vec<SocketAddr> { texts.iter().map(|text| text.parse().unwrap()).collect() };
        let first = all[0];
        assert_eq!(spread(first, &all, &named, 5), parse(&["10.0.1.1:5", "[fd02::1]:5", "10.0.0.1:5", "10.0.1.1:5", "[fd02::1]:5"]));
        assert_eq!(spread(all[1], &all, &named, 1), parse(&["[fd01::1]:5"]));
        assert_eq!(spread(first, &[], &[], 2), [first, first]);
    }

    #[test]
    fn the_callers_word_stands() {
        let told = ["1.2.3.4:5".parse().unwrap()];
        assert_eq!(to_advertise(&["0.0.0.0:9".parse().unwrap()], &told), told);
    }
}
