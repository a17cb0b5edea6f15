//! The bootstrap connection after its work is done: it ends when the peer does, however that comes about, and its last words say how
//! much is still to come.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;

use super::wire::BYE_BYTES;
use crate::link::lock;

/// What is known of the peer's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    /// It is there.
    There,
    /// It is gone. If it had time to say so, how many chunks it sent.
    Gone(Option<u64>),
    /// It said something else than a farewell.
    Babbles,
}

struct Heard {
    words: [u8; BYE_BYTES],
    bytes: usize,
    peer: Peer,
}

/// See the module.
pub(super) struct Anchor {
    stream: TcpStream,
    heard: Mutex<Heard>,
}

impl Anchor {
    pub(super) fn new(stream: TcpStream) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { stream, heard: Mutex::new(Heard { words: [0; BYE_BYTES], bytes: 0, peer: Peer::There }) })
    }

    /// Looks whether the peer is still there. Never waits.
    pub(super) fn look(&self) -> Peer {
        let mut heard = lock(&self.heard);
        let heard = &mut *heard;
        while heard.peer == Peer::There {
            let mut more = [0; BYE_BYTES + 1];
            match (&self.stream).read(&mut more) {
                Ok(0) => {
                    let said_all = heard.bytes == BYE_BYTES;
                    heard.peer = Peer::Gone(said_all.then_some(u64::from_le_bytes(heard.words)));
                }
                Ok(bytes) if heard.bytes + bytes <= BYE_BYTES => {
                    heard.words[heard.bytes..heard.bytes + bytes].copy_from_slice(&more[..bytes]);
                    heard.bytes += bytes;
                }
                Ok(_) => heard.peer = Peer::Babbles,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => heard.peer = Peer::Gone(None),
            }
        }
        heard.peer
    }

    /// Says farewell after `sent` chunks and ends the connection, which wakes who waits for it on either end.
    pub(super) fn part(&self, sent: u64) {
        // A few bytes on a silent connection find room in its buffer; where they do not, the peer is gone.
        drop((&self.stream).write(&sent.to_le_bytes()));
        drop(self.stream.shutdown(Shutdown::Both));
    }
}

impl AsFd for Anchor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Duration;

    use super::*;

    fn pair() -> (Anchor, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Anchor::new(listener.accept().unwrap().0).unwrap(), far)
    }

    fn look_until(anchor: &Anchor, peer: Peer) {
        for _ in 0..10_000 {
            if anchor.look() == peer {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("{:?} instead of {peer:?}", anchor.look());
    }

    #[test]
    fn farewells_deaths_and_babble_are_told_apart() {
        let (anchor, far) = pair();
        assert_eq!(anchor.look(), Peer::There);
        Anchor::new(far).unwrap().part(7);
        look_until(&anchor, Peer::Gone(Some(7)));

        let (anchor, mut far) = pair();
        far.write_all(&[7, 0, 0]).unwrap();
        assert_eq!(anchor.look(), Peer::There);
        drop(far);
        look_until(&anchor, Peer::Gone(None));

        let (anchor, mut far) = pair();
        far.write_all(b"GET / HTTP/1.1").unwrap();
        look_until(&anchor, Peer::Babbles);
        drop(far);
        assert_eq!(anchor.look(), Peer::Babbles);
    }
}
