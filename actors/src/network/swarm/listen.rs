//! Where to listen.
//!
//! libp2p shares its ports (`SO_REUSEPORT`), so a second node of the same user would take the port of the first
//! without an error, and connections would go to either. A port is therefore tried with a plain socket first.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

use crate::env::NetworkError;

/// How often a port that the system chose for IPv4 is tried for IPv6 as well.
const TRIES: usize = 8;

/// The addresses to listen at: those asked for, each with a port that is free now, or all interfaces.
pub(super) fn resolve(asked: &[SocketAddr]) -> Result<Vec<SocketAddr>, NetworkError> {
    if asked.is_empty() {
        return everywhere();
    }
    asked.iter().map(|address| free(*address).map_err(|error| refused(*address, &error))).collect()
}

fn refused(address: SocketAddr, error: &io::Error) -> NetworkError {
    let reason = match error.kind() {
        io::ErrorKind::AddrInUse => "another program listens there".to_owned(),
        io::ErrorKind::AddrNotAvailable => "no interface of this machine has that address".to_owned(),
        _ => error.to_string(),
    };
    NetworkError::Listen { address, reason, in_use: error.kind() == io::ErrorKind::AddrInUse }
}

/// Binds and lets go again; the port is the one chosen where 0 was asked for.
fn free(address: SocketAddr) -> io::Result<SocketAddr> {
    let listener = match address {
        SocketAddr::V4(_) => TcpListener::bind(address)?,
        SocketAddr::V6(_) => {
            let socket = socket2::Socket::new(socket2::Domain::IPV6, socket2::Type::STREAM, Some(socket2::Protocol::TCP))?;
            // As libp2p will: v4 has a socket of its own.
            socket.set_only_v6(true)?;
            #[cfg(unix)]
            socket.set_reuse_address(true)?;
            socket.bind(&address.into())?;
            socket.listen(1)?;
            socket.into()
        }
    };
    listener.local_addr()
}

/// All interfaces, IPv4 and IPv6, at one port that is free for both. A machine without one of the two uses the other.
fn everywhere() -> Result<Vec<SocketAddr>, NetworkError> {
    let v4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    let v6 = |port| SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
    let mut first = None;
    for _ in 0..TRIES {
        let Ok(chosen) = free(v4) else { break };
        match free(v6(chosen.port())) {
            Ok(same) => return Ok(vec![chosen, same]),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => first = Some(chosen),
            Err(error) => {
                tracing::info!(target: "shoal::network", %error, "no IPv6 here: listening on IPv4 alone");
                return Ok(vec![chosen]);
            }
        }
    }
    match (first, free(v6(0))) {
        (first, Ok(other)) => Ok(first.into_iter().chain([other]).collect()),
        (Some(chosen), Err(_)) => Ok(vec![chosen]),
        (None, Err(error)) => Err(refused(v6(0), &error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_in_use_is_said() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let error = resolve(&[address]).unwrap_err();
        assert!(matches!(error, NetworkError::Listen { in_use: true, .. }));
        assert_eq!(error.to_string(), format!("cannot listen at {address}: another program listens there; choose another address or port"));
        drop(taken);
        assert_eq!(resolve(&[address]).unwrap(), [address]);
    }

    #[test]
    fn an_address_of_another_machine_is_said() {
        let error = resolve(&["203.0.113.77:0".parse().unwrap()]).unwrap_err();
        assert!(matches!(error, NetworkError::Listen { in_use: false, .. }));
        assert!(error.to_string().contains("no interface of this machine"), "{error}");
    }

    #[test]
    fn everywhere_has_one_port() {
        let addresses = resolve(&[]).unwrap();
        assert!(addresses.iter().all(|address| address.ip().is_unspecified() && address.port() == addresses[0].port()));
    }
}
