//! mDNS, IPv4 and IPv6.
//!
//! libp2p's mDNS starts a task for every interface and lets go of them when it is dropped, so that they would go on
//! announcing a node that has stopped. It therefore lives on a thread with a small runtime of its own, and its tasks
//! and sockets end with that.
//!
//! If another program has the port for itself, libp2p logs that and does nothing from then on. So the port is tried
//! first, and tried again until it can be had; meanwhile there is a trouble for people to see.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use libp2p::core::transport::ListenerId;
use libp2p::mdns;
use libp2p::swarm::{ExpiredListenAddr, FromSwarm, NetworkBehaviour, NewListenAddr, ToSwarm};
use libp2p::{Multiaddr, PeerId};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::sync::{mpsc, oneshot};

use crate::env::{BoxFuture, Clock, NetworkEvent, NetworkSink, Spawner, Trouble};

/// Announcements that may wait to be read. A network that sends more is not ours.
const FOUND_MAX: usize = 256;
/// The port of mDNS (RFC 6762 section 3).
const PORT: u16 = 5353;
/// Pause before a port that could not be had is tried again.
const AGAIN: Duration = Duration::from_secs(5);
/// What its troubles are about.
const ABOUT: &str = "mDNS";

/// Peers that were announced, with their addresses.
pub(super) type Found = Vec<(PeerId, Multiaddr)>;

enum Order {
    Listening(Multiaddr),
    Expired(Multiaddr),
}

/// Announces this node and listens for others until it is stopped.
pub(super) struct Announcer {
    orders: mpsc::UnboundedSender<Order>,
    stopped: oneshot::Receiver<()>,
}

impl Announcer {
    /// Starts it; what it finds comes out of the receiver, its troubles go to `sink`.
    pub(super) fn start(
        spawner: &dyn Spawner,
        clock: Arc<dyn Clock>,
        me: PeerId,
        sink: NetworkSink,
    ) -> io::Result<(Self, mpsc::Receiver<Found>)> {
        let (orders, inbox) = mpsc::unbounded_channel();
        let (found, finds) = mpsc::channel(FOUND_MAX);
        let (done, stopped) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let body = move || {
            runtime.block_on(run(Families::new(me, sink), clock, inbox, found));
            // Takes the tasks of all interfaces with it.
            drop(runtime);
            let _ = done.send(());
        };
        spawner.thread("shoal-mdns".to_owned(), Box::new(body))?;
        Ok((Self { orders, stopped }, finds))
    }

    /// The node listens at one more address.
    pub(super) fn listening(&self, address: Multiaddr) {
        let _ = self.orders.send(Order::Listening(address));
    }

    /// The node no longer listens there.
    pub(super) fn expired(&self, address: Multiaddr) {
        let _ = self.orders.send(Order::Expired(address));
    }

    /// Stops announcing; resolves when all sockets are closed.
    pub(super) async fn stop(self) {
        drop(self.orders);
        let _ = self.stopped.await;
    }
}

/// That mDNS does not work, and why.
pub(super) fn trouble(what: &str) -> Trouble {
    let help = "end the program that has it (`ss -lunp` lists them), or give addresses with --peer; other ways to find nodes go on";
    Trouble { about: ABOUT.to_owned(), what: what.to_owned(), help: help.to_owned() }
}

/// Takes the port as libp2p's mDNS does, and lets go of it again.
fn port_is_free(ipv6: bool, port: u16) -> io::Result<()> {
    let (domain, any) = match ipv6 {
        true => (Domain::IPV6, SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))),
        false => (Domain::IPV4, SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))),
    };
    let socket = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_reuse_address(true)?;
    #[cfg(unix)]
    socket.set_reuse_port(true)?;
    socket.bind(&any.into())
}

/// mDNS over one kind of addresses; its switch for IPv6 means *instead of* IPv4.
struct Family {
    ipv6: bool,
    source: Option<mdns::tokio::Behaviour>,
    failure: Option<String>,
}

struct Families {
    me: PeerId,
    port: u16,
    sink: NetworkSink,
    families: [Family; 2],
    /// What the node listens at.
    addresses: Vec<Multiaddr>,
    listener: ListenerId,
    told: Option<Trouble>,
}

impl Families {
    fn new(me: PeerId, sink: NetworkSink) -> Self {
        let families = [false, true].map(|ipv6| Family { ipv6, source: None, failure: None });
        Self { me, port: PORT, sink, families, addresses: Vec::new(), listener: ListenerId::next(), told: None }
    }

    /// Starts what does not run yet, and tells what keeps it from that.
    fn open(&mut self) {
        for family in self.families.iter_mut().filter(|family| family.source.is_none()) {
            family.failure = match port_is_free(family.ipv6, self.port) {
                // A machine without IPv6 lacks nothing.
                Err(error) if !family.ipv6 || error.kind() == io::ErrorKind::AddrInUse => Some(match error.kind() {
                    io::ErrorKind::AddrInUse => format!("another program has UDP port {} for itself", self.port),
                    _ => format!("UDP port {} cannot be listened at: {error}", self.port),
                }),
                _ => match mdns::tokio::Behaviour::new(mdns::Config { enable_ipv6: family.ipv6, ..mdns::Config::default() }, self.me) {
                    Ok(mut source) => {
                        for addr in &self.addresses {
                            source.on_swarm_event(FromSwarm::NewListenAddr(NewListenAddr { listener_id: self.listener, addr }));
                        }
                        family.source = Some(source);
                        None
                    }
                    Err(error) => Some(format!("it does not start: {error}")),
                },
            };
        }
        let failures: Vec<(bool, &str)> =
            self.families.iter().filter_map(|family| Some((family.ipv6, family.failure.as_deref()?))).collect();
        let now = match failures.as_slice() {
            [] => None,
            [(true, what)] => Some(trouble(&format!("over IPv6 alone it does not work: {what}"))),
            [(false, what)] => Some(trouble(&format!("over IPv4 it does not work: {what}"))),
            [(_, what), ..] => Some(trouble(what)),
        };
        if now != self.told {
            match &now {
                Some(trouble) => {
                    tracing::warn!(target: "shoal::network", what = trouble.what, "no mDNS: peers may not find this node");
                    (self.sink)(NetworkEvent::Trouble(trouble.clone()));
                }
                None => (self.sink)(NetworkEvent::TroubleOver { about: ABOUT.to_owned() }),
            }
            self.told = now;
        }
    }

    fn is_open(&self) -> bool {
        self.families.iter().all(|family| family.source.is_some())
    }

    fn running(&mut self) -> impl Iterator<Item = &mut mdns::tokio::Behaviour> {
        self.families.iter_mut().filter_map(|family| family.source.as_mut())
    }

    fn obey(&mut self, order: &Order) {
        let listener_id = self.listener;
        let event = match order {
            Order::Listening(addr) => {
                self.addresses.push(addr.clone());
                FromSwarm::NewListenAddr(NewListenAddr { listener_id, addr })
            }
            Order::Expired(addr) => {
                self.addresses.retain(|known| known != addr);
                FromSwarm::ExpiredListenAddr(ExpiredListenAddr { listener_id, addr })
            }
        };
        self.running().for_each(|source| source.on_swarm_event(event));
    }
}

async fn run(mut families: Families, clock: Arc<dyn Clock>, mut orders: mpsc::UnboundedReceiver<Order>, found: mpsc::Sender<Found>) {
    families.open();
    let mut again: Option<BoxFuture<'static, ()>> = None;
    std::future::poll_fn(|context| {
        loop {
            match orders.poll_recv(context) {
                Poll::Ready(None) => return Poll::Ready(()),
                Poll::Ready(Some(order)) => families.obey(&order),
                Poll::Pending => break,
            }
        }
        while !families.is_open() {
            let pause = again.get_or_insert_with(|| clock.sleep_until(clock.now() + AGAIN));
            if pause.as_mut().poll(context).is_pending() {
                break;
            }
            again = None;
            families.open();
        }
        for source in families.running() {
            while let Poll::Ready(event) = source.poll(context) {
                if let ToSwarm::GenerateEvent(mdns::Event::Discovered(peers)) = event
                    && found.try_send(peers).is_err()
                {
                    tracing::debug!(target: "shoal::network", "mDNS announces more than can be read");
                }
            }
        }
        Poll::Pending
    })
    .await;
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::sync::Mutex;

    use super::*;

    /// Another program that takes the port is said once, and so is that it is gone.
    #[tokio::test]
    async fn a_taken_port_is_told_and_taken_when_it_is_free() {
        // Without the option to share it, as a program has it that wants the port for itself.
        let taken = UdpSocket::bind("0.0.0.0:0").unwrap();
        let told = Arc::new(Mutex::new(Vec::new()));
        let hear = Arc::clone(&told);
        let sink: NetworkSink = Arc::new(move |event| hear.lock().unwrap().push(event));
        let me = PeerId::from(libp2p::identity::Keypair::generate_ed25519().public());
        let port = taken.local_addr().unwrap().port();
        let mut families = Families { port, ..Families::new(me, sink) };
        families.open();
        families.open();
        assert!(!families.is_open());
        let heard = std::mem::take(&mut *told.lock().unwrap());
        let [NetworkEvent::Trouble(trouble)] = heard.as_slice() else { panic!("{heard:?}") };
        assert!(trouble.about == "mDNS" && trouble.what.contains(&port.to_string()) && trouble.help.contains("--peer"), "{trouble:?}");
        drop(taken);
        families.open();
        let heard = std::mem::take(&mut *told.lock().unwrap());
        assert!(matches!(heard.as_slice(), [NetworkEvent::TroubleOver { about }] if about == "mDNS"), "{heard:?}");
    }
}
