//! The multicast sockets of a real machine.
//!
//! Two shared sockets listen to the groups (one a family, with address and port re-use, so that every node of a host
//! hears every packet). Each interface has its own sending socket a family, bound to one of its addresses: that
//! decides the interface a packet leaves by and the source that peers see, and gives answers a port of their own,
//! which a shared port could not (the system would hand an answer to any one of the nodes of the host).
//!
//! If another program has the port for itself, hellos still go out and answers come in; only the hellos of others are
//! not heard. That is told as a trouble, and the port is tried again at every refresh.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::{AbortHandle, abortable};
use socket2::{Domain, InterfaceIndexOrAddress, Protocol, Socket, Type};

use crate::discovery::address::same_network;
use crate::env::{
    BEACON_BYTES_MAX, Beacon, BeaconError, BeaconPacket, BeaconSink, BeaconSocket, Family, Interface, InterfaceAddress, Spawner, Trouble,
};

/// In the administratively scoped block (RFC 2365): routers do not pass it out of a site.
const GROUP_V4: Ipv4Addr = Ipv4Addr::new(239, 255, 83, 72);
/// Link-local scope, not assigned by a registry (the T flag of RFC 4291 section 2.7).
const GROUP_V6: Ipv6Addr = Ipv6Addr::new(0xff12, 0, 0, 0, 0, 0, 0x5348, 0x4f41);
/// Port of both groups.
const GROUP_PORT: u16 = 52_807;
/// The most interfaces that are spoken on. A host with thousands of container bridges needs no hello on each.
const INTERFACES_MAX: usize = 64;

/// The machine's interfaces.
#[derive(Debug, Clone, Copy)]
pub struct SystemBeacon {
    port: u16,
}

impl Default for SystemBeacon {
    fn default() -> Self {
        Self { port: GROUP_PORT }
    }
}

impl SystemBeacon {
    /// The usual groups at another UDP port, for nodes that must not meet the others of the network, as in tests.
    pub fn at_port(port: u16) -> Self {
        Self { port }
    }
}

impl Beacon for SystemBeacon {
    fn open(&self, spawner: Arc<dyn Spawner>, sink: BeaconSink) -> Result<Arc<dyn BeaconSocket>, BeaconError> {
        let socket = SystemSocket { port: self.port, spawner, sink, state: Mutex::default() };
        {
            let mut state = socket.state.lock().unwrap_or_else(PoisonError::into_inner);
            let (v4, v6) = (socket.group(&mut state, Family::V4), socket.group(&mut state, Family::V6));
            state.taken = [&v4, &v6].into_iter().any(is_taken);
            if let (Err(v4), Err(v6), false) = (&v4, &v6, state.taken) {
                return Err(BeaconError { reason: format!("UDP port {}: {v4}; IPv6: {v6}", self.port) });
            }
        }
        Ok(Arc::new(socket))
    }
}

struct Station {
    address: IpAddr,
    socket: UdpSocket,
    listener: AbortHandle,
}

#[derive(Default)]
struct State {
    v4: Option<Socket>,
    v6: Option<Socket>,
    /// Whether another program has the port of a group that is not listened to.
    taken: bool,
    stations: BTreeMap<(u32, Family), Station>,
    listeners: Vec<AbortHandle>,
    closed: bool,
}

struct SystemSocket {
    port: u16,
    spawner: Arc<dyn Spawner>,
    sink: BeaconSink,
    state: Mutex<State>,
}

impl fmt::Debug for SystemSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SystemSocket").field("port", &self.port).finish_non_exhaustive()
    }
}

impl SystemSocket {
    /// Listens to the group of `family`, unless it does already. The stations that are there begin anew, so that they join it.
    fn group(&self, state: &mut State, family: Family) -> io::Result<()> {
        let any = match family {
            Family::V4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            Family::V6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        let there = match family {
            Family::V4 => &mut state.v4,
            Family::V6 => &mut state.v6,
        };
        if there.is_some() {
            return Ok(());
        }
        let group = group_socket(SocketAddr::new(any, self.port))?;
        let listener = self.listen(group.try_clone()?.into());
        *there = Some(group);
        state.listeners.push(listener);
        for (_, station) in state.stations.extract_if(.., |(_, of), _| *of == family) {
            station.listener.abort();
        }
        Ok(())
    }

    /// Delivers what `socket` receives until the handle is aborted.
    fn listen(&self, socket: UdpSocket) -> AbortHandle {
        let sink = Arc::clone(&self.sink);
        let (future, handle) = abortable(async move {
            let socket = match tokio::net::UdpSocket::from_std(socket) {
                Ok(socket) => socket,
                Err(error) => {
                    tracing::warn!(%error, "a beacon socket cannot be read");
                    return;
                }
            };
            // One byte more than allowed, so that a longer packet is seen to be too long and not cut.
            let mut buffer = [0; BEACON_BYTES_MAX + 1];
            loop {
                match socket.recv_from(&mut buffer).await {
                    Ok((length, from)) if length <= BEACON_BYTES_MAX => sink(BeaconPacket { from, bytes: buffer[..length].to_vec() }),
                    Ok(_) => {}
                    // ICMP errors of earlier answers come out here. A short pause keeps a persistent one from spinning.
                    Err(_) => tokio::task::yield_now().await,
                }
            }
        });
        self.spawner.task(
            "beacon",
            Box::pin(async move {
                let _ = future.await;
            }),
        );
        handle
    }

    fn station(&self, state: &State, interface: &Interface, family: Family, ip: IpAddr) -> io::Result<Station> {
        match (family, ip) {
            (Family::V4, IpAddr::V4(own)) => {
                if let Some(group) = &state.v4 {
                    joined(group.join_multicast_v4_n(&GROUP_V4, &InterfaceIndexOrAddress::Index(interface.index)))?;
                }
                let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
                socket.set_multicast_if_v4(&own)?;
                socket.set_multicast_loop_v4(true)?;
                socket.set_multicast_ttl_v4(1)?;
                socket.set_nonblocking(true)?;
                socket.bind(&SocketAddr::V4(SocketAddrV4::new(own, 0)).into())?;
                self.started(ip, socket.into())
            }
            (Family::V6, IpAddr::V6(own)) => {
                if let Some(group) = &state.v6 {
                    joined(group.join_multicast_v6(&GROUP_V6, interface.index))?;
                }
                let socket = Socket::new(Domain::IPV6, Type::DGRAM, Some(Protocol::UDP))?;
                socket.set_only_v6(true)?;
                socket.set_multicast_if_v6(interface.index)?;
                socket.set_multicast_loop_v6(true)?;
                socket.set_multicast_hops_v6(1)?;
                socket.set_nonblocking(true)?;
                socket.bind(&SocketAddr::V6(SocketAddrV6::new(own, 0, 0, interface.index)).into())?;
                self.started(ip, socket.into())
            }
            _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "address of another family")),
        }
    }

    fn started(&self, address: IpAddr, socket: UdpSocket) -> io::Result<Station> {
        let listener = self.listen(socket.try_clone()?);
        Ok(Station { address, socket, listener })
    }
}

/// Whether another program has the port.
fn is_taken(result: &io::Result<()>) -> bool {
    result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
}

/// Joining a group again is fine: an interface that went and came keeps its membership on some systems.
fn joined(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => Err(error),
        _ => Ok(()),
    }
}

fn group_socket(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_reuse_address(true)?;
    // BSD systems want this one for a shared port; Linux delivers multicast to every socket with either.
    #[cfg(all(unix, not(any(target_os = "solaris", target_os = "illumos"))))]
    socket.set_reuse_port(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

/// Reads the list of interfaces that are up, each with its addresses.
pub(crate) fn read_interfaces() -> Vec<Interface> {
    let list = match if_addrs::get_if_addrs() {
        Ok(list) => list,
        Err(error) => {
            tracing::warn!(%error, "the network interfaces cannot be listed");
            return Vec::new();
        }
    };
    let mut interfaces: BTreeMap<u32, Interface> = BTreeMap::new();
    for entry in list {
        // Drivers that do not report a state say "unknown" (loopback does); only a clear no counts.
        let down = matches!(
            entry.oper_status,
            if_addrs::IfOperStatus::Down | if_addrs::IfOperStatus::NotPresent | if_addrs::IfOperStatus::LowerLayerDown
        );
        let Some(index) = entry.index.filter(|_| !down) else { continue };
        let prefix = match &entry.addr {
            if_addrs::IfAddr::V4(v4) => u32::from(v4.netmask).leading_ones(),
            if_addrs::IfAddr::V6(v6) => u128::from(v6.netmask).leading_ones(),
        };
        let address = InterfaceAddress { ip: entry.ip(), prefix: prefix.min(128) as u8 };
        let loopback = entry.is_loopback();
        let interface = interfaces.entry(index).or_insert_with(|| Interface {
            index,
            name: entry.name.clone(),
            addresses: Vec::new(),
            loopback,
            point_to_point: entry.is_p2p,
        });
        interface.loopback |= loopback;
        interface.addresses.push(address);
    }
    let mut interfaces: Vec<Interface> = interfaces.into_values().collect();
    for interface in &mut interfaces {
        interface.addresses.sort_unstable();
        interface.addresses.dedup();
    }
    interfaces
}

impl BeaconSocket for SystemSocket {
    fn refresh(&self) -> Vec<Interface> {
        let interfaces = read_interfaces();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.closed {
            return interfaces;
        }
        if state.taken {
            state.taken = [Family::V4, Family::V6].map(|family| self.group(&mut state, family)).iter().any(is_taken);
        }
        let mut wanted: BTreeMap<(u32, Family), (&Interface, IpAddr)> = BTreeMap::new();
        for interface in interfaces.iter().take(INTERFACES_MAX) {
            for address in &interface.addresses {
                match address.ip {
                    ip @ IpAddr::V4(_) => wanted.entry((interface.index, Family::V4)).or_insert((interface, ip)),
                    ip @ IpAddr::V6(v6) if v6.is_unicast_link_local() => {
                        wanted.entry((interface.index, Family::V6)).or_insert((interface, ip))
                    }
                    IpAddr::V6(_) => continue,
                };
            }
        }
        let gone: Vec<(u32, Family)> = state
            .stations
            .iter()
            .filter(|(place, station)| wanted.get(place).is_none_or(|(_, ip)| *ip != station.address))
            .map(|(place, _)| *place)
            .collect();
        for place in gone {
            if let Some(station) = state.stations.remove(&place) {
                station.listener.abort();
            }
            // The membership of an interface that is gone is void; leaving it lets a new one be joined.
            match place {
                (index, Family::V4) => {
                    let group = state.v4.as_ref();
                    let _ = group.map(|group| group.leave_multicast_v4_n(&GROUP_V4, &InterfaceIndexOrAddress::Index(index)));
                }
                (index, Family::V6) => {
                    let _ = state.v6.as_ref().map(|group| group.leave_multicast_v6(&GROUP_V6, index));
                }
            }
        }
        for (place, (interface, ip)) in wanted {
            if state.stations.contains_key(&place) {
                continue;
            }
            match self.station(&state, interface, place.1, ip) {
                Ok(station) => drop(state.stations.insert(place, station)),
                Err(error) => tracing::debug!(%error, interface = interface.name, family = ?place.1, "no hello on this interface"),
            }
        }
        interfaces
    }

    fn announce(&self, index: u32, family: Family, payload: &[u8]) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(station) = state.stations.get(&(index, family)) else { return false };
        let group = match family {
            Family::V4 => SocketAddr::V4(SocketAddrV4::new(GROUP_V4, self.port)),
            Family::V6 => SocketAddr::V6(SocketAddrV6::new(GROUP_V6, self.port, 0, index)),
        };
        station.socket.send_to(payload, group).is_ok()
    }

    fn reply(&self, to: SocketAddr, payload: &[u8]) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let family = if to.is_ipv4() { Family::V4 } else { Family::V6 };
        let of_family = || state.stations.iter().filter(|((_, of), _)| *of == family);
        let near = match to {
            SocketAddr::V6(v6) if v6.scope_id() != 0 => of_family().find(|((index, _), _)| *index == v6.scope_id()),
            // The prefix of the station's network is not at hand here; the longest common one finds it.
            _ => (8..=32).rev().find_map(|prefix| of_family().find(|(_, station)| same_network(station.address, prefix, to.ip()))),
        };
        let Some((_, station)) = near.or_else(|| of_family().next()) else { return false };
        station.socket.send_to(payload, to).is_ok()
    }

    fn trouble(&self) -> Option<Trouble> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let over = match (&state.v4, &state.v6) {
            (Some(_), None) => " over IPv6",
            (None, Some(_)) => " over IPv4",
            _ => "",
        };
        state.taken.then(|| Trouble {
            about: "multicast hellos".to_owned(),
            what: format!("another program has UDP port {} for itself: hellos of other nodes are not heard{over}", self.port),
            help: "end that program (`ss -lunp` lists them), or give addresses with --peer; other ways to find nodes go on".to_owned(),
        })
    }

    fn close(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.closed = true;
        for listener in state.listeners.drain(..) {
            listener.abort();
        }
        for (_, station) in std::mem::take(&mut state.stations) {
            station.listener.abort();
        }
        state.v4 = None;
        state.v6 = None;
    }
}

impl Drop for SystemSocket {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::env::SystemSpawner;

    #[test]
    fn the_loopback_interface_is_listed() {
        let interfaces = read_interfaces();
        assert!(interfaces.iter().any(|interface| interface.loopback), "{interfaces:?}");
    }

    /// Two nodes of one host hear each other's hellos, and an answer reaches the one it is for.
    #[test]
    fn two_nodes_of_one_host_hear_each_other() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let spawner: Arc<dyn Spawner> = Arc::new(SystemSpawner::new(runtime.handle().clone()));
        let beacon = SystemBeacon::at_port(52_907);
        let open = |name: &'static str| {
            let (sender, receiver) = mpsc::channel();
            let sink: BeaconSink = Arc::new(move |packet| drop(sender.send(packet)));
            beacon.open(Arc::clone(&spawner), sink).map(|socket| (socket, receiver)).map_err(|error| format!("{name}: {error}"))
        };
        let ((one, _one_hears), (two, two_hears), (three, three_hears)) = match (open("one"), open("two"), open("three")) {
            (Ok(one), Ok(two), Ok(three)) => (one, two, three),
            (one, two, three) => {
                println!("SKIPPED: no UDP multicast on this machine: {:?} {:?} {:?}", one.err(), two.err(), three.err());
                return;
            }
        };
        let interfaces = one.refresh();
        two.refresh();
        three.refresh();
        let sent = interfaces.iter().flat_map(|interface| [(interface.index, Family::V4), (interface.index, Family::V6)]);
        let sent = sent.filter(|(index, family)| one.announce(*index, *family, b"hello")).count();
        if sent == 0 {
            println!("SKIPPED: this machine sends no multicast on any interface");
            return;
        }
        let Ok(packet) = two_hears.recv_timeout(Duration::from_secs(5)) else {
            println!("SKIPPED: this machine does not loop multicast back");
            return;
        };
        assert_eq!(packet.bytes, b"hello");
        three_hears.recv_timeout(Duration::from_secs(5)).expect("every node of the host hears every hello");
        if let SocketAddr::V6(from) = packet.from {
            assert!(!from.ip().is_unicast_link_local() || from.scope_id() != 0, "a link-local source keeps its scope");
        }
        let _ = while_some(&_one_hears);
        assert!(two.reply(packet.from, b"answer"));
        let answer = std::iter::from_fn(|| _one_hears.recv_timeout(Duration::from_secs(5)).ok()).find(|packet| packet.bytes == b"answer");
        assert!(answer.is_some(), "the answer came to the node that it was for");
        assert!(!while_some(&three_hears).iter().any(|packet| packet.bytes == b"answer"));
        one.close();
        assert!(!one.announce(interfaces[0].index, Family::V4, b"late"));
        drop((one, two, three));
        runtime.shutdown_background();
    }

    /// Another program that takes the port is told of, and no more when it is gone.
    #[test]
    fn a_taken_port_is_told_and_taken_when_it_is_free() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let _entered = runtime.enter();
        let spawner: Arc<dyn Spawner> = Arc::new(SystemSpawner::new(runtime.handle().clone()));
        // Without the option to share it, as a program has it that wants the port for itself.
        let taken = UdpSocket::bind("0.0.0.0:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let socket = SystemBeacon::at_port(port).open(spawner, Arc::new(drop)).unwrap();
        socket.refresh();
        let trouble = socket.trouble().expect("the port is taken");
        assert!(trouble.what.contains(&port.to_string()) && trouble.help.contains("--peer"), "{trouble:?}");
        drop(taken);
        socket.refresh();
        assert_eq!(socket.trouble(), None);
        socket.close();
    }

    fn while_some(receiver: &mpsc::Receiver<BeaconPacket>) -> Vec<BeaconPacket> {
        std::iter::from_fn(|| receiver.try_recv().ok()).collect()
    }
}
