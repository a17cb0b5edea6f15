//! Channels under load while bad things happen at random points: links that are cut, peers that are paused or killed.
//!
//! Each message carries its number and a check over all of it, so nothing that is lost, repeated, out of order or damaged
//! passes. What a process holds is counted in a process that runs one test alone.

use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::{Broken, ChannelOptions, Receiver, RecvError, SendError, Sender, duplex, receiver, sender};
use crate::Effects;
use crate::env::{Rng, SystemRng};
use crate::frame::{Fence, payload_crc};
use crate::link::{CloseReason, Link, LinkOptions, lock};
use crate::provider::memory::{MemoryFabric, MemoryProvider, Shape};
use crate::provider::shm::{ShmOptions, ShmProvider};
use crate::provider::{Endpoint, Provider, Ticket};
use crate::testing::{effects, soon};

const OPTIONS: ChannelOptions = ChannelOptions { slot_bytes: 40_000, slots: 4 };

/// Links that are cut in one run.
const CUTS_MAX: u32 = 60;

/// SplitMix64: chance that a seed gives again.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// Two fixed seeds, and one that no run before had.
fn seeds() -> [u64; 3] {
    let fresh = SystemRng.next_u64("seed");
    println!("seeds 1, 2 and {fresh}");
    [1, 2, fresh]
}

/// Most messages are short; some are longer than a short ring, and some empty but for number and check.
fn message(number: u64) -> Vec<u8> {
    let mut chance = Chance(number);
    let bytes = match chance.below(8) {
        0 => 0,
        1 => chance.below(30_000),
        _ => chance.below(300),
    };
    let body: Vec<u8> = (0..bytes).map(|i| (i.wrapping_mul(number | 1) >> 3) as u8).collect();
    let check = payload_crc(&[&number.to_le_bytes(), &body]);
    [&number.to_le_bytes()[..], &check.to_le_bytes(), &body].concat()
}

fn check(payload: &[u8], number: u64) {
    assert_eq!(payload[..8], number.to_le_bytes(), "message {number} was lost or repeated, or another came first");
    let check = payload_crc(&[&payload[..8], &payload[12..]]);
    assert_eq!(payload[8..12], check.to_le_bytes(), "message {number} is damaged");
    assert_eq!(payload.len(), message(number).len());
}

/// Where the two ends of a channel get their next link.
struct Exchange {
    near: Box<dyn Provider>,
    far: Box<dyn Provider>,
    effects: Effects,
    newest: Mutex<Option<[Arc<dyn Link>; 2]>>,
    /// How many of the four users have done all that they had to do.
    done: AtomicUsize,
    over: AtomicBool,
}

impl Exchange {
    fn new(effects: Effects, near: Box<dyn Provider>, far: Box<dyn Provider>) -> Self {
        Self { near, far, effects, newest: Mutex::new(None), done: AtomicUsize::new(0), over: AtomicBool::new(false) }
    }

    /// A link other than `seen`, which has ended.
    fn next(&self, side: usize, seen: Option<&Arc<dyn Link>>) -> Arc<dyn Link> {
        let mut newest = lock(&self.newest);
        match &*newest {
            Some(links) if seen.is_none_or(|seen| !Arc::ptr_eq(seen, &links[side])) => Arc::clone(&links[side]),
            _ => {
                let options = LinkOptions::for_payload(OPTIONS.slot_bytes);
                let ticket = Ticket::random(&SystemRng);
                let expected = self.far.expect(&ticket, options).unwrap();
                let near = self.near.dial(&self.far.endpoints()[0], &ticket, options, soon(&self.effects)).unwrap();
                let links = newest.insert([near, expected.accept(soon(&self.effects)).unwrap()]);
                Arc::clone(&links[side])
            }
        }
    }

    /// Cuts whatever link is the newest, at a random end, again and again; but not for ever, because on a busy machine links are cut
    /// faster than they are made.
    fn cut(&self, mut chance: Chance) -> u32 {
        let mut cuts = 0;
        while cuts < CUTS_MAX && !self.over.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_micros(chance.below(6_000)));
            if let Some(links) = &*lock(&self.newest) {
                cuts += u32::from(links[0].health().closed.is_none());
                links[chance.below(2) as usize].close(CloseReason::Local);
            }
        }
        cuts
    }

    fn send_all(&self, side: usize, sender: &mut Sender, mut link: Arc<dyn Link>, count: u64) {
        let broken = |error: &SendError| matches!(error, SendError::Broken(Broken::Link(_)));
        let mut relink = |sender: &mut Sender| {
            loop {
                link = self.next(side, Some(&link));
                match sender.relink(&link, soon(&self.effects)) {
                    Ok(()) => return,
                    Err(super::RelinkError::Repeat(error)) if broken(&error) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        };
        for number in 0..count {
            let message = message(number);
            while sender.taken() <= number {
                match sender.send(1, &[&message[..5], &message[5..]], soon(&self.effects)) {
                    Ok(()) => {}
                    Err(error) if broken(&error) => relink(sender),
                    Err(error) => panic!("{error}"),
                }
            }
        }
        while let Err(error) = sender.flush(soon(&self.effects)) {
            assert!(broken(&error), "{error}");
            relink(sender);
        }
    }

    /// Receives until all four are done: what was received last has to be acknowledged on whatever link there is.
    fn receive_all(&self, side: usize, receiver: &mut Receiver, mut link: Arc<dyn Link>, count: u64) {
        let mut number = 0;
        let limit = self.effects.after(Duration::from_secs(90));
        while self.done.load(Ordering::Acquire) < 4 {
            assert!(self.effects.clock.now() < limit, "the others are not done after 90 s");
            let deadline = if number < count { soon(&self.effects) } else { self.effects.after(Duration::from_millis(2)) };
            match receiver.recv(deadline) {
                Ok(received) => {
                    assert!(number < count, "more came than was sent");
                    check(received.payload(), number);
                    number += 1;
                    if number == count {
                        self.done.fetch_add(1, Ordering::AcqRel);
                    }
                }
                Err(RecvError::Deadline) if number == count => {}
                Err(RecvError::Broken(Broken::Link(_))) => {
                    link = self.next(side, Some(&link));
                    receiver.relink(&link).unwrap();
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// Both directions of one channel, each at full speed, over links that are cut.
fn cut_links(exchange: &Exchange, seed: u64, count: u64) -> u32 {
    std::thread::scope(|scope| {
        let users: Vec<_> = (0..2)
            .flat_map(|side| {
                let link = exchange.next(side, None);
                let (mut sender, mut receiver) = duplex(Arc::clone(&link), Fence::default(), OPTIONS, &exchange.effects).unwrap();
                let (first, second) = (Arc::clone(&link), link);
                let sending = scope.spawn(move || {
                    exchange.send_all(side, &mut sender, first, count);
                    exchange.done.fetch_add(1, Ordering::AcqRel);
                });
                let receiving = scope.spawn(move || exchange.receive_all(side, &mut receiver, second, count));
                [sending, receiving]
            })
            .collect();
        let cutting = scope.spawn(|| exchange.cut(Chance(seed)));
        let failed = users.into_iter().filter_map(|user| user.join().err()).count();
        exchange.over.store(true, Ordering::Release);
        let cuts = cutting.join().unwrap();
        assert_eq!(failed, 0);
        cuts
    })
}

#[test]
fn a_half_that_comes_late_does_not_take_the_channel_back_to_an_old_link() {
    let effects = effects();
    let exchange = Exchange::new(effects.clone(), shm(&effects, 4096), shm(&effects, 4096));
    let [near, far] = [0, 1].map(|side| exchange.next(side, None));
    let (mut sender, mut receiver) = duplex(Arc::clone(&near), Fence::default(), OPTIONS, &effects).unwrap();
    let (mut back, mut there) = duplex(Arc::clone(&far), Fence::default(), OPTIONS, &effects).unwrap();
    near.close(CloseReason::Local);
    let [next_near, next_far] = [exchange.next(0, Some(&near)), exchange.next(1, Some(&far))];
    there.relink(&next_far).unwrap();
    sender.relink(&next_near, soon(&effects)).unwrap();
    // The other halves have moved along.
    receiver.relink(&near).unwrap();
    back.relink(&far, soon(&effects)).unwrap();
    assert_eq!(next_near.health().closed, None);
    sender.send(1, &[b"there"], soon(&effects)).unwrap();
    assert_eq!(there.recv(soon(&effects)).unwrap().payload(), b"there");
    back.send(1, &[b"and back"], soon(&effects)).unwrap();
    assert_eq!(receiver.recv(soon(&effects)).unwrap().payload(), b"and back");
}

fn shm(effects: &Effects, ring_bytes: usize) -> Box<dyn Provider> {
    let patience = Duration::from_secs(60);
    let options = ShmOptions { ring_bytes, silence_max: patience, handshake_max: patience, ..ShmOptions::default() };
    Box::new(ShmProvider::new(effects.clone(), options).unwrap())
}

/// Descriptors, threads and shared mappings of this process.
fn holds() -> [usize; 3] {
    let entries = |path: &str| std::fs::read_dir(path).unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    [entries("/proc/self/fd"), entries("/proc/self/task"), maps.lines().filter(|line| line.contains("shoal")).count()]
}

#[test]
#[ignore = "started by another test, in a process of its own"]
fn alone_links_are_cut() {
    let effects = effects();
    let fabric = MemoryFabric::new(&SystemRng, Shape::default());
    let memory = || Box::new(MemoryProvider::new(effects.clone(), &fabric)) as Box<dyn Provider>;
    let run = |seed: u64, kind: u64| {
        let (near, far) = match kind {
            0 => (memory(), memory()),
            1 => (shm(&effects, 4096), shm(&effects, 4096)),
            _ => (shm(&effects, 1 << 20), shm(&effects, 1 << 20)),
        };
        cut_links(&Exchange::new(effects.clone(), near, far), seed, 2_000)
    };
    // The first run leaves what a process has once.
    run(0, 1);
    let before = holds();
    for seed in seeds() {
        for kind in 0..3 {
            let cuts = run(seed, kind);
            println!("seed {seed}, kind {kind}: {cuts} cuts");
            assert!(cuts > 0, "no link was cut");
        }
    }
    // Threads are waited for, but the system may take a moment to forget them.
    for _ in 0..500 {
        if holds() == before {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("descriptors, threads and mappings were {before:?} before and are {:?}", holds());
}

fn alone(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([&format!("channel::faults::{test}"), "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
    command
}

#[test]
fn links_that_are_cut_lose_nothing_and_leave_nothing() {
    let output = alone("alone_links_are_cut").output().unwrap();
    assert!(output.status.success(), "{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "it did not run");
}

/// The other end of [`peers_that_are_paused_or_killed_harm_nobody`].
#[test]
#[ignore = "started by another test, in a process of its own"]
fn alone_floods() {
    let effects = effects();
    let words: Vec<u128> =
        std::env::var("SHOAL_TEST_FLOOD").unwrap().split(' ').map(|word| u128::from_str_radix(word, 16).unwrap()).collect();
    let provider = shm(&effects, 1 << 16);
    let options = LinkOptions::for_payload(OPTIONS.slot_bytes);
    let link = provider.dial(&Endpoint::Shm { door: words[0] }, &ticket(words[1]), options, soon(&effects)).unwrap();
    let mut sender = sender(link, Fence::default(), OPTIONS, &effects).unwrap();
    for number in 0.. {
        sender.send(1, &[&message(number)], soon(&effects)).unwrap();
    }
}

fn ticket(id: u128) -> Ticket {
    Ticket::new(id, [3; 32])
}

/// A process that floods whoever has this door.
struct Flood(Child);

impl Flood {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[test]
fn peers_that_are_paused_or_killed_harm_nobody() {
    let effects = effects();
    let provider = shm(&effects, 1 << 16);
    let Endpoint::Shm { door } = provider.endpoints()[0] else { panic!() };
    for (round, seed) in seeds().into_iter().enumerate() {
        let id = round as u128 + 1;
        let expected = provider.expect(&ticket(id), LinkOptions::for_payload(OPTIONS.slot_bytes)).unwrap();
        let child = alone("alone_floods")
            .env("SHOAL_TEST_FLOOD", format!("{door:x} {id:x}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let flood = Flood(child);
        let link = expected.accept(soon(&effects)).unwrap();
        let mut receiver = receiver(link, Fence::default(), OPTIONS, &effects).unwrap();
        let mut chance = Chance(seed);
        let pauses: Vec<u64> = (0..5).map(|_| chance.below(3_000)).collect();
        let end = 3_000 + chance.below(1_000);
        let (mut number, mut killed) = (0, false);
        let error = loop {
            match receiver.recv(soon(&effects)) {
                Ok(received) => {
                    check(received.payload(), number);
                    number += 1;
                }
                Err(error) => break error,
            }
            if number >= end && !killed {
                killed = true;
                // In the middle of whatever it is writing.
                flood.signal(Signal::KILL);
            } else if pauses.contains(&number) {
                flood.signal(Signal::STOP);
                let short = effects.after(Duration::from_millis(30));
                // What it had sent is received, and then nothing comes, for no longer than was asked for.
                let stopped = loop {
                    match receiver.recv(short) {
                        Ok(received) => check(received.payload(), number),
                        Err(error) => break error,
                    }
                    number += 1;
                };
                assert_eq!(stopped, RecvError::Deadline);
                flood.signal(Signal::CONT);
            }
        };
        assert_eq!(error, RecvError::Broken(Broken::Link(CloseReason::Peer)));
        assert!(number >= end);
    }
}
