//! The two processes: one measures, the other echoes or takes.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use shoal_transport::Effects;
use shoal_transport::channel::{self, ChannelOptions, Receiver, Sender};
use shoal_transport::frame::Fence;
use shoal_transport::link::{Link, LinkOptions};
use shoal_transport::provider::shm::{ShmOptions, ShmProvider};
use shoal_transport::provider::tcp::{TcpOptions, TcpProvider};
use shoal_transport::provider::{Endpoint, Provider, Ticket};

use super::bare::{BIG, BUFFERS, Memory, Spinning};
use super::table::Row;
use super::world::{Outcome, Peer, effects, pin, soon};

const SMALL: usize = 64;
/// Round trips that are timed together, and how often in a round.
const BATCH: u64 = 50;
const BATCHES: usize = 40;
/// Long messages of a round.
const STREAM: usize = 48;

const PROVIDERS: [&str; 2] = ["shm", "tcp"];

/// Everything that connects the two processes, as one of them has it.
struct Ends {
    effects: Effects,
    memory: Memory,
    socket: TcpStream,
    links: BTreeMap<&'static str, Arc<dyn Link>>,
    channels: BTreeMap<&'static str, (Sender, Receiver)>,
    buffer: Vec<u8>,
    message: Vec<u8>,
    /// Where the ping-pongs of bare words have got to.
    word: u64,
    _providers: Vec<Arc<dyn Provider>>,
}

fn providers(effects: &Effects) -> Outcome<Vec<Arc<dyn Provider>>> {
    let options = TcpOptions { listen: vec![([127, 0, 0, 1], 0).into()], ..TcpOptions::default() };
    Ok(vec![Arc::new(ShmProvider::new(effects.clone(), ShmOptions::default())?), Arc::new(TcpProvider::new(effects.clone(), options)?)])
}

fn options() -> LinkOptions {
    LinkOptions::for_payload(BIG as u32)
}

fn ticket(id: u128) -> Ticket {
    Ticket::new(id, [9; 32])
}

fn open(link: Arc<dyn Link>, effects: &Effects) -> Outcome<(Sender, Receiver)> {
    let options = ChannelOptions { slot_bytes: BIG as u32, slots: BUFFERS as u16 };
    Ok(channel::duplex(link, Fence::default(), options, effects)?)
}

impl Ends {
    /// The measuring end, which expects what the other one dials.
    fn near(peer: &mut Peer) -> Outcome<Self> {
        let effects = effects();
        let memory = Memory::create()?;
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let providers = providers(&effects)?;
        let mut line = format!("/proc/{}/fd/{} {}", std::process::id(), memory.file.as_raw_fd(), listener.local_addr()?);
        for provider in &providers {
            line += &match provider.endpoints().first() {
                Some(Endpoint::Shm { door }) => format!(" {door:x}"),
                Some(Endpoint::Tcp(address)) => format!(" {address}"),
                other => return Err(format!("nobody knows how to dial {other:?}").into()),
            };
        }
        let expect = |of: usize, id| providers[of].expect(&ticket(id), options());
        let expected = [expect(0, 1)?, expect(0, 2)?, expect(1, 3)?, expect(1, 4)?];
        peer.tell(&line)?;
        let socket = listener.accept()?.0;
        let mut links = expected.iter().map(|expected| expected.accept(soon(&effects)));
        let mut next = || links.next().ok_or("too few links").map(|link| link.map_err(|error| error.to_string()));
        let made = [next()??, next()??, next()??, next()??];
        Self::new(effects, memory, socket, made, providers)
    }

    fn far(line: &str) -> Outcome<Self> {
        let effects = effects();
        let words: Vec<&str> = line.split_whitespace().collect();
        let [memory, socket, door, address] = words[..] else { return Err("this is no greeting".into()) };
        let providers = providers(&effects)?;
        let shm = Endpoint::Shm { door: u128::from_str_radix(door, 16)? };
        let tcp = Endpoint::Tcp(address.parse()?);
        let dial = |of: usize, to: &Endpoint, id| providers[of].dial(to, &ticket(id), options(), soon(&effects));
        let socket = TcpStream::connect(socket)?;
        let made = [dial(0, &shm, 1)?, dial(0, &shm, 2)?, dial(1, &tcp, 3)?, dial(1, &tcp, 4)?];
        Self::new(effects, Memory::open(memory)?, socket, made, providers)
    }

    fn new(
        effects: Effects,
        memory: Memory,
        socket: TcpStream,
        [shm, shm_channel, tcp, tcp_channel]: [Arc<dyn Link>; 4],
        providers: Vec<Arc<dyn Provider>>,
    ) -> Outcome<Self> {
        socket.set_nodelay(true)?;
        Ok(Self {
            memory,
            socket,
            links: [("shm", shm), ("tcp", tcp)].into(),
            channels: [("shm", open(shm_channel, &effects)?), ("tcp", open(tcp_channel, &effects)?)].into(),
            buffer: vec![0; 2 * BIG],
            message: (0..BIG).map(|i| (i * 31) as u8).collect(),
            word: 0,
            _providers: providers,
            effects,
        })
    }

    fn link(&self, name: &str) -> Outcome<Arc<dyn Link>> {
        Ok(Arc::clone(self.links.get(name).ok_or("no such link")?))
    }

    fn channel(&mut self, name: &str) -> Outcome<&mut (Sender, Receiver)> {
        self.channels.get_mut(name).ok_or_else(|| "no such channel".into())
    }

    /// One way of going there and back, `count` times, as the end that begins or as the one that answers.
    fn ping_pong(&mut self, how: &str, provider: &str, count: u64, first: bool) -> Outcome<()> {
        let deadline = soon(&self.effects);
        let mut small = [7; SMALL];
        match how {
            "word" | "word+64" => {
                let words = if how == "word" { 0 } else { SMALL / 8 };
                if first {
                    self.memory.first(self.word, count, words);
                } else {
                    self.memory.second(self.word, count, words);
                }
                self.word += count;
            }
            "blocking" => stream_ping_pong(&mut &self.socket, &mut small, count, first)?,
            "spinning" => stream_ping_pong(&mut Spinning(&self.socket), &mut small, count, first)?,
            "link" => {
                let link = self.link(provider)?;
                for _ in 0..count {
                    if first {
                        link.send(&[&small], deadline)?;
                    }
                    link.recv(&mut self.buffer, deadline)?;
                    if !first {
                        link.send(&[&small], deadline)?;
                    }
                }
            }
            "channel" => {
                let (sender, receiver) = self.channel(provider)?;
                for _ in 0..count {
                    if first {
                        sender.send(1, &[&small], deadline)?;
                    }
                    let received = receiver.recv(deadline)?;
                    if !first {
                        sender.send(1, &[received.payload()], deadline)?;
                    }
                }
            }
            other => return Err(format!("nobody knows how to {other}").into()),
        }
        Ok(())
    }

    /// Long messages one way, and a short one back.
    fn stream(&mut self, how: &str, provider: &str, count: usize, first: bool) -> Outcome<()> {
        let deadline = soon(&self.effects);
        match (how, first) {
            ("blocking", true) => {
                for _ in 0..count {
                    self.socket.write_all(&self.message)?;
                }
                self.socket.read_exact(&mut [0])?;
            }
            ("blocking", false) => {
                for _ in 0..count {
                    self.socket.read_exact(&mut self.buffer[..BIG])?;
                }
                self.socket.write_all(&[1])?;
            }
            ("link", true) => {
                let link = self.link(provider)?;
                for _ in 0..count {
                    link.send(&[&self.message], deadline)?;
                }
                link.recv(&mut self.buffer, deadline)?;
            }
            ("link", false) => {
                let link = self.link(provider)?;
                for _ in 0..count {
                    link.recv(&mut self.buffer, deadline)?;
                }
                link.send(&[b"x"], deadline)?;
            }
            ("channel", true) => {
                let message = std::mem::take(&mut self.message);
                let (sender, receiver) = self.channel(provider)?;
                for _ in 0..count {
                    sender.send(1, &[&message], deadline)?;
                }
                receiver.recv(deadline)?;
                self.message = message;
            }
            ("channel", false) => {
                let (sender, receiver) = self.channel(provider)?;
                for _ in 0..count {
                    receiver.recv(deadline)?;
                }
                sender.send(1, &[b"x"], deadline)?;
            }
            (other, _) => return Err(format!("nobody knows how to {other}").into()),
        }
        Ok(())
    }
}

fn stream_ping_pong(stream: &mut (impl Read + Write), small: &mut [u8], count: u64, first: bool) -> Outcome<()> {
    for _ in 0..count {
        if first {
            stream.write_all(small)?;
        }
        stream.read_exact(small)?;
        if !first {
            stream.write_all(small)?;
        }
    }
    Ok(())
}

/// The process that is told what to do: `WHAT HOW PROVIDER COUNT`.
pub(crate) fn peer() -> Outcome<()> {
    let mut lines = std::io::stdin().lines();
    let mut ends = Ends::far(&lines.next().ok_or("nobody speaks")??)?;
    pin(1);
    println!("ready");
    for line in lines {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let [what, how, provider, count] = words[..] else { return Err(format!("{line} is no order").into()) };
        ends.socket.set_nonblocking(how == "spinning")?;
        println!("ready");
        match what {
            "ping" => ends.ping_pong(how, provider, count.parse()?, false)?,
            _ => ends.stream(how, provider, count.parse()?, false)?,
        }
    }
    Ok(())
}

/// The best tenth of what was measured, smallest first.
fn best(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 10).copied().unwrap_or(f64::NAN)
}

/// What one round of something takes: microseconds there and back, or seconds for a byte of a stream.
fn round(ends: &mut Ends, peer: &mut Peer, what: &str, how: &str, provider: &str) -> Outcome<f64> {
    ends.socket.set_nonblocking(how == "spinning")?;
    let ping = what == "ping";
    let count = if ping { BATCH * (BATCHES as u64 + 1) } else { 2 * STREAM as u64 };
    peer.tell(&format!("{what} {how} {provider} {count}"))?;
    peer.hear()?;
    if ping {
        // The first ones wake the other process.
        ends.ping_pong(how, provider, BATCH, true)?;
        let mut batches = Vec::with_capacity(BATCHES);
        for _ in 0..BATCHES {
            let started = Instant::now();
            ends.ping_pong(how, provider, BATCH, true)?;
            batches.push(started.elapsed().as_secs_f64() * 1e6 / BATCH as f64);
        }
        return Ok(best(batches));
    }
    let started = Instant::now();
    ends.stream(how, provider, 2 * STREAM, true)?;
    Ok(started.elapsed().as_secs_f64() / (2 * STREAM * BIG) as f64)
}

/// How long copying takes, for each byte.
fn copying(ends: &Ends) -> f64 {
    best(
        (0..STREAM)
            .map(|i| {
                let started = Instant::now();
                ends.memory.put(i, &ends.message);
                started.elapsed().as_secs_f64() / BIG as f64
            })
            .collect(),
    )
}

/// Measures everything in so many rounds.
pub(crate) fn measure(rounds: usize) -> Outcome<Vec<Row>> {
    let mut peer = Peer::start()?;
    let mut ends = Ends::near(&mut peer)?;
    peer.hear()?;
    pin(0);
    let mut found: BTreeMap<(&str, &str, &str), Vec<f64>> = BTreeMap::new();
    for _ in 0..rounds {
        let mut note = |key, value| found.entry(key).or_default().push(value);
        for provider in PROVIDERS {
            let limits: &[&str] = if provider == "shm" { &["word", "word+64"] } else { &["blocking", "spinning"] };
            for how in limits.iter().chain(&["link", "channel"]) {
                note(("ping", provider, *how), round(&mut ends, &mut peer, "ping", how, provider)?);
            }
            match provider {
                "shm" => note(("stream", provider, "memcpy"), copying(&ends)),
                _ => note(("stream", provider, "blocking"), round(&mut ends, &mut peer, "stream", "blocking", provider)?),
            }
            for how in ["link", "channel"] {
                note(("stream", provider, how), round(&mut ends, &mut peer, "stream", how, provider)?);
            }
        }
    }
    let found: BTreeMap<_, f64> = found.into_iter().map(|(key, values)| (key, best(values))).collect();
    let value = |key| found.get(&key).copied().unwrap_or(f64::NAN);
    let mut rows = Vec::new();
    for (provider, limits, stream) in [("shm", &["word", "word+64"][..], "memcpy"), ("tcp", &["blocking", "spinning"], "blocking")] {
        for what in ["link", "channel"] {
            for limit in limits {
                let (it, its_limit) = (value(("ping", provider, what)), value(("ping", provider, limit)));
                rows.push(Row { provider, what, bytes: SMALL, limit, value: it, limit_value: its_limit });
            }
            let speed = |how| 1e-9 / value(("stream", provider, how));
            rows.push(Row { provider, what, bytes: BIG, limit: stream, value: speed(what), limit_value: speed(stream) });
        }
    }
    Ok(rows)
}
