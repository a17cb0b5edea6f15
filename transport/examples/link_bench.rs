//! How fast tensor channels are on this machine: round trips and throughput of each provider, both ends in this process.
//!
//! `cargo run --release --example link_bench`
#![allow(clippy::print_stdout)]
// A program of its own, not a part of a node.
#![allow(clippy::disallowed_methods)]

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use shoal_transport::Effects;
use shoal_transport::channel::{self, ChannelOptions, Receiver, Sender};
use shoal_transport::env::{BoxFuture, Clock, Instant, Join, Spawner, SystemRng, system_now};
use shoal_transport::frame::Fence;
use shoal_transport::link::LinkOptions;
use shoal_transport::provider::memory::{MemoryFabric, MemoryProvider, Shape};
#[cfg(target_os = "linux")]
use shoal_transport::provider::shm::{ShmOptions, ShmProvider};
use shoal_transport::provider::tcp::{TcpOptions, TcpProvider};
use shoal_transport::provider::{Provider, Ticket};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Payload of the throughput test.
const BIG: u32 = 4 * 1024 * 1024;

fn main() -> Outcome<()> {
    let effects = Effects { clock: Arc::new(RealClock), rng: Arc::new(SystemRng), spawner: Arc::new(Threads) };
    let tcp = || {
        let options = TcpOptions { listen: vec![([127, 0, 0, 1], 0).into()], ..TcpOptions::default() };
        TcpProvider::new(effects.clone(), options).map(|provider| Arc::new(provider) as Arc<dyn Provider>)
    };
    let fabric = MemoryFabric::new(&SystemRng, Shape::default());
    let memory = || Arc::new(MemoryProvider::new(effects.clone(), &fabric)) as Arc<dyn Provider>;
    println!("{:<10} {:>18} {:>18} {:>18} {:>12}", "provider", "64 B round trip", "2 KiB round trip", "16 KiB round trip", "4 MiB");
    #[cfg(target_os = "linux")]
    let shm = || ShmProvider::new(effects.clone(), ShmOptions::default()).map(|provider| Arc::new(provider) as Arc<dyn Provider>);
    let pairs = [
        (tcp()?, tcp()?),
        #[cfg(target_os = "linux")]
        (shm()?, shm()?),
        (memory(), memory()),
    ];
    for (near, far) in pairs {
        let mut line = format!("{:<10}", near.kind().to_string());
        for bytes in [64, 2 * 1024, 16 * 1024] {
            let micros = round_trip(&effects, &*near, &*far, bytes, 3000)?;
            line += &format!(" {:>15.1} µs", micros);
        }
        println!("{line} {:>7.2} GB/s", throughput(&effects, &*near, &*far, 200)?);
    }
    Ok(())
}

type Ends = [(Sender, Receiver); 2];

fn ends(effects: &Effects, near: &dyn Provider, far: &dyn Provider, options: ChannelOptions) -> Outcome<Ends> {
    let ticket = Ticket::random(&SystemRng);
    let link_options = LinkOptions::for_payload(options.slot_bytes);
    let expected = far.expect(&ticket, link_options)?;
    let deadline = effects.after(Duration::from_secs(10));
    let endpoint = *far.endpoints().first().ok_or("the provider has no endpoint")?;
    let near = near.dial(&endpoint, &ticket, link_options, deadline)?;
    let far = expected.accept(deadline)?;
    let open = |link| channel::duplex(link, Fence::default(), options, effects);
    Ok([open(near)?, open(far)?])
}

/// Median time there and back, in microseconds.
fn round_trip(effects: &Effects, near: &dyn Provider, far: &dyn Provider, bytes: usize, count: usize) -> Outcome<f64> {
    let options = ChannelOptions { slot_bytes: 16 * 1024, slots: 4 };
    let [(mut sender, mut receiver), (mut back, mut there)] = ends(effects, near, far, options)?;
    let soon = || effects.after(Duration::from_secs(10));
    std::thread::scope(|scope| {
        let echo = scope.spawn(move || -> Outcome<()> {
            for _ in 0..count {
                let received = there.recv(soon())?;
                back.send(received.kind(), &[received.payload()], soon())?;
            }
            Ok(back.flush(soon())?)
        });
        let message = vec![7; bytes];
        let mut samples = Vec::with_capacity(count);
        for _ in 0..count {
            let started = effects.clock.now();
            sender.send(0, &[&message], soon())?;
            receiver.recv(soon())?;
            samples.push(effects.clock.now().since(started));
        }
        receiver.give_back();
        echo.join().map_err(|_| "the echoing thread panicked")??;
        samples.sort_unstable();
        Ok(samples[count / 2].as_secs_f64() * 1e6)
    })
}

/// Bytes per second of large messages in one direction, in 10⁹.
fn throughput(effects: &Effects, near: &dyn Provider, far: &dyn Provider, count: usize) -> Outcome<f64> {
    let [(mut sender, _receiver), (_back, mut there)] = ends(effects, near, far, ChannelOptions { slot_bytes: BIG, slots: 4 })?;
    let soon = || effects.after(Duration::from_secs(60));
    let message = vec![7; BIG as usize];
    std::thread::scope(|scope| {
        let receiving = scope.spawn(move || -> Outcome<Receiver> {
            for _ in 0..count {
                there.recv(soon())?;
            }
            there.give_back();
            Ok(there)
        });
        // The first messages touch the slots' pages for the first time, which later ones do not.
        for _ in 0..count / 5 {
            sender.send(0, &[&message], soon())?;
        }
        sender.flush(soon())?;
        let started = effects.clock.now();
        for _ in count / 5..count {
            sender.send(0, &[&message], soon())?;
        }
        sender.flush(soon())?;
        let seconds = effects.clock.now().since(started).as_secs_f64();
        drop(receiving.join().map_err(|_| "the receiving thread panicked")??);
        Ok((count - count / 5) as f64 * f64::from(BIG) / seconds / 1e9)
    })
}

#[derive(Debug)]
struct RealClock;

impl Clock for RealClock {
    fn now(&self) -> Instant {
        system_now()
    }

    fn sleep_until(&self, deadline: Instant) -> BoxFuture<'static, ()> {
        Box::pin(async move { std::thread::sleep(deadline.since(system_now())) })
    }
}

#[derive(Debug)]
struct Threads;

struct Thread(std::thread::JoinHandle<()>);

impl Join for Thread {
    fn join(self: Box<Self>) -> bool {
        self.0.join().is_ok()
    }
}

impl Spawner for Threads {
    fn task(&self, _name: &'static str, _future: BoxFuture<'static, ()>) {
        // Links and channels start threads only.
    }

    fn thread(&self, name: String, body: Box<dyn FnOnce() + Send>) -> std::io::Result<Box<dyn Join>> {
        Ok(Box::new(Thread(std::thread::Builder::new().name(name).spawn(body)?)))
    }
}
