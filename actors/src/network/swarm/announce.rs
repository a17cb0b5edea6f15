//! mDNS, IPv4 and IPv6.
//!
//! libp2p's mDNS starts a task for every interface and lets go of them when it is dropped, so that they would go on
//! announcing a node that has stopped. It therefore lives on a thread with a small runtime of its own, and its tasks
//! and sockets end with that.

use std::io;
use std::task::Poll;

use libp2p::core::transport::ListenerId;
use libp2p::mdns;
use libp2p::swarm::{ExpiredListenAddr, FromSwarm, NetworkBehaviour, NewListenAddr, ToSwarm};
use libp2p::{Multiaddr, PeerId};
use tokio::sync::{mpsc, oneshot};

use crate::env::Spawner;

/// Announcements that may wait to be read. A network that sends more is not ours.
const FOUND_MAX: usize = 256;

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
    /// Starts it; what it finds comes out of the receiver.
    pub(super) fn start(spawner: &dyn Spawner, me: PeerId) -> io::Result<(Self, mpsc::Receiver<Found>)> {
        let (orders, inbox) = mpsc::unbounded_channel();
        let (found, finds) = mpsc::channel(FOUND_MAX);
        let (done, stopped) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let body = move || {
            runtime.block_on(run(me, inbox, found));
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

async fn run(me: PeerId, mut orders: mpsc::UnboundedReceiver<Order>, found: mpsc::Sender<Found>) {
    // Its switch for IPv6 means *instead of* IPv4.
    let mut sources: Vec<mdns::tokio::Behaviour> = [false, true]
        .into_iter()
        .filter_map(|enable_ipv6| {
            let source = mdns::tokio::Behaviour::new(mdns::Config { enable_ipv6, ..mdns::Config::default() }, me);
            source
                .inspect_err(|error| tracing::warn!(target: "shoal::network", enable_ipv6, %error, "no mDNS: peers may not find this node"))
                .ok()
        })
        .collect();
    let listener_id = ListenerId::next();
    std::future::poll_fn(|context| {
        loop {
            match orders.poll_recv(context) {
                Poll::Ready(None) => return Poll::Ready(()),
                Poll::Ready(Some(order)) => {
                    for source in &mut sources {
                        source.on_swarm_event(match &order {
                            Order::Listening(addr) => FromSwarm::NewListenAddr(NewListenAddr { listener_id, addr }),
                            Order::Expired(addr) => FromSwarm::ExpiredListenAddr(ExpiredListenAddr { listener_id, addr }),
                        });
                    }
                }
                Poll::Pending => break,
            }
        }
        for source in &mut sources {
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
