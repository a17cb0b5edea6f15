//! TCP that can dial link-local IPv6 addresses.
//!
//! libp2p's TCP transport forgets the zone of such an address, and without it the system does not know which
//! interface is meant. Dials to addresses with a zone are made here; everything else is left to libp2p's.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::FutureExt;
use libp2p::Multiaddr;
use libp2p::core::multiaddr::Protocol;
use libp2p::core::transport::{DialOpts, ListenerId, Transport, TransportError, TransportEvent};
use libp2p::tcp;

use super::address::socket_address;

type Tcp = tcp::tokio::Transport;

/// libp2p's TCP, and dials with a zone.
pub(super) struct ScopedTcp {
    inner: Tcp,
}

impl ScopedTcp {
    pub(super) fn new(config: tcp::Config) -> Self {
        Self { inner: Tcp::new(config) }
    }
}

async fn dial_scoped(address: SocketAddr) -> io::Result<tcp::tokio::TcpStream> {
    let stream = tokio::net::TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(tcp::tokio::TcpStream(stream))
}

impl Transport for ScopedTcp {
    type Output = tcp::tokio::TcpStream;
    type Error = io::Error;
    type ListenerUpgrade = <Tcp as Transport>::ListenerUpgrade;
    type Dial = <Tcp as Transport>::Dial;

    fn listen_on(&mut self, id: ListenerId, address: Multiaddr) -> Result<(), TransportError<io::Error>> {
        self.inner.listen_on(id, address)
    }

    fn remove_listener(&mut self, id: ListenerId) -> bool {
        self.inner.remove_listener(id)
    }

    fn dial(&mut self, address: Multiaddr, options: DialOpts) -> Result<Self::Dial, TransportError<io::Error>> {
        if matches!(address.iter().next(), Some(Protocol::Ip6zone(_))) {
            let scoped = socket_address(&address).ok_or(TransportError::MultiaddrNotSupported(address))?;
            return Ok(dial_scoped(scoped).boxed());
        }
        self.inner.dial(address, options)
    }

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<TransportEvent<Self::ListenerUpgrade, io::Error>> {
        Pin::new(&mut self.inner).poll(context)
    }
}
