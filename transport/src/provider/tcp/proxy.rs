//! A way between two ends on which a test does harm: it listens, passes bytes on both ways, and cuts, stalls or changes them.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// From the dialler.
    There,
    /// From the acceptor.
    Back,
}

/// What is done to bytes: the way, how many went before on this connection, the bytes.
pub(super) type Change = Box<dyn Fn(Way, usize, &mut Vec<u8>) + Send + Sync>;

struct Shared {
    target: SocketAddr,
    change: Change,
    stalled: AtomicBool,
    stopped: AtomicBool,
    streams: Mutex<Vec<TcpStream>>,
}

pub(super) struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    listening: Option<std::thread::JoinHandle<()>>,
}

impl Proxy {
    /// A way to `target` on which nothing happens until it is asked for.
    pub(super) fn new(target: SocketAddr) -> Self {
        Self::changing(target, Box::new(|_, _, _| ()))
    }

    pub(super) fn changing(target: SocketAddr, change: Change) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            target,
            change,
            stalled: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            streams: Mutex::default(),
        });
        let serving = Arc::clone(&shared);
        let listening = std::thread::spawn(move || serving.listen(&listener));
        Self { address, shared, listening: Some(listening) }
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends all connections there are.
    pub(super) fn cut(&self) {
        for stream in self.shared.streams.lock().unwrap().drain(..) {
            drop(stream.shutdown(Shutdown::Both));
        }
    }

    /// Holds all bytes back, or lets them go.
    pub(super) fn stall(&self, stalled: bool) {
        self.shared.stalled.store(stalled, Ordering::SeqCst);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(self.address));
        self.listening.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

impl Shared {
    fn listen(self: &Arc<Self>, listener: &TcpListener) {
        let mut passing = Vec::new();
        while let Ok((near, _)) = listener.accept() {
            if self.stopped.load(Ordering::SeqCst) {
                break;
            }
            let Ok(far) = TcpStream::connect(self.target) else { continue };
            for stream in [&near, &far] {
                stream.set_nodelay(true).unwrap();
                self.streams.lock().unwrap().push(stream.try_clone().unwrap());
            }
            let back = (far.try_clone().unwrap(), near.try_clone().unwrap());
            for (way, (from, to)) in [(Way::There, (near, far)), (Way::Back, back)] {
                let shared = Arc::clone(self);
                passing.push(std::thread::spawn(move || shared.pass(way, from, to)));
            }
        }
        for stream in self.streams.lock().unwrap().drain(..) {
            drop(stream.shutdown(Shutdown::Both));
        }
        passing.into_iter().for_each(|thread| thread.join().unwrap());
    }

    fn pass(&self, way: Way, mut from: TcpStream, mut to: TcpStream) {
        let mut passed = 0;
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(bytes @ 1..) = from.read(&mut buffer) {
            while self.stalled.load(Ordering::SeqCst) && !self.stopped.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let mut going = buffer[..bytes].to_vec();
            (self.change)(way, passed, &mut going);
            passed += bytes;
            if to.write_all(&going).is_err() {
                break;
            }
        }
        for stream in [from, to] {
            drop(stream.shutdown(Shutdown::Both));
        }
    }
}
