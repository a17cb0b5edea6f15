//! Channels under load while bad things happen at random points: links that are cut, peers that are paused or killed.
//!
//! Each message carries its number and a check over all of it, so nothing that is lost, repeated, out of order or damaged
//! passes. What a process holds is counted in a process that runs one test alone.
//!
//! | | memory | shm | tcp | tcp, sealed | uc as Apple's | rc, uc in the guest |
//! |---|---|---|---|---|---|---|
//! | cut and made anew, both ways at full speed | here | here | `tcp/tests_faults.rs` | there, on three rails, too | here | `verbs/guest.rs` |
//! | paused for less and for longer than the silence limit, then killed | one process | here | here | here | `verbs/tests.rs`: a fabric that dies | `verbs/guest.rs` |
//!
//! (The paths are those in `provider/`.)

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
use crate::provider::tcp::{Encryption, TcpOptions, TcpProvider};
use crate::provider::verbs::{Profile, VerbsOptions, apple::AppleFabric, guest};
use crate::provider::{Endpoint, Provider, Ticket};
use crate::testing::{effects, soon};

const OPTIONS: ChannelOptions = ChannelOptions { slot_bytes: 40_000, slots: 4 };

/// Links that are cut in one run.
const CUTS_MAX: u32 = 60;

/// No wait may take longer than this beyond its bound, however loaded the machine is.
const GRACE: Duration = Duration::from_secs(20);

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
pub(crate) struct Exchange {
    near: Box<dyn Provider>,
    far: Box<dyn Provider>,
    effects: Effects,
    newest: Mutex<Option<[Arc<dyn Link>; 2]>>,
    /// How many of the four users have done all that they had to do.
    done: AtomicUsize,
    over: AtomicBool,
}

impl Exchange {
    pub(crate) fn new(effects: Effects, near: Box<dyn Provider>, far: Box<dyn Provider>) -> Self {
        Self { near, far, effects, newest: Mutex::new(None), done: AtomicUsize::new(0), over: AtomicBool::new(false) }
    }

    /// A link other than `seen`, which has ended.
    fn next(&self, side: usize, seen: Option<&Arc<dyn Link>>) -> Arc<dyn Link> {
        let mut newest = lock(&self.newest);
        match &*newest {
            Some(links) if seen.is_none_or(|seen| !Arc::ptr_eq(seen, &links[side])) => Arc::clone(&links[side]),
            _ => {
                let links = newest.insert(self.make());
                Arc::clone(&links[side])
            }
        }
    }

    /// A link. A device that has only so many may need a moment until those that ended are gone.
    fn make(&self) -> [Arc<dyn Link>; 2] {
        let options = LinkOptions::for_payload(OPTIONS.slot_bytes);
        let limit = soon(&self.effects);
        loop {
            let ticket = Ticket::random(&SystemRng);
            let expected = self.far.expect(&ticket, options).unwrap();
            match self.near.dial(&self.far.endpoints()[0], &ticket, options, limit) {
                Ok(near) => return [near, expected.accept(limit).unwrap()],
                Err(error) => assert!(self.effects.clock.now() < limit, "no link is to be had any more: {error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Cuts whatever link is the newest, at a random end, again and again; but not for ever, because on a busy machine links are cut
    /// faster than they are made.
    fn cut(&self, mut chance: Chance, most: u32) -> u32 {
        let mut cuts = 0;
        while cuts < most && !self.over.load(Ordering::Acquire) {
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

/// Both directions of one channel, each at full speed, over links of which so many at most are cut.
pub(crate) fn cut_links(exchange: &Exchange, seed: u64, count: u64, most: u32) -> u32 {
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
        let cutting = scope.spawn(|| exchange.cut(Chance(seed), most));
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

/// What a link bears where nothing but the end of its peer may end it.
const PATIENCE: Duration = Duration::from_secs(60);

fn shm(effects: &Effects, ring_bytes: usize) -> Box<dyn Provider> {
    let options = ShmOptions { ring_bytes, silence_max: PATIENCE, handshake_max: PATIENCE, ..ShmOptions::default() };
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
    let fabric = AppleFabric::default();
    let apple = |address: &str| {
        let options = VerbsOptions { silence_max: PATIENCE, handshake_max: PATIENCE, ..VerbsOptions::of(Profile::Uc) };
        Box::new(fabric.provider(&effects, address, options).unwrap()) as Box<dyn Provider>
    };
    let run = |seed: u64, kind: u64| {
        let (near, far) = match kind {
            0 => (memory(), memory()),
            1 => (shm(&effects, 4096), shm(&effects, 4096)),
            2 => (shm(&effects, 1 << 20), shm(&effects, 1 << 20)),
            _ => (apple("127.0.0.1"), apple("127.0.0.2")),
        };
        cut_links(&Exchange::new(effects.clone(), near, far), seed, 2_000, CUTS_MAX)
    };
    // The first run leaves what a process has once.
    run(0, 1);
    let before = holds();
    for seed in seeds() {
        for kind in 0..4 {
            let cuts = run(seed, kind);
            println!("seed {seed}, kind {kind}: {cuts} cuts");
            assert!(cuts > 0, "no link was cut");
        }
    }
    holds_again(before);
}

/// Waits until this process holds no more than it did before: threads are waited for, but the system may take a moment to forget them.
fn holds_again(before: [usize; 3]) {
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

/// Runs an ignored test in a process of its own, and wants it to pass.
fn passes_alone(test: &str) {
    let output = alone(test).output().unwrap();
    assert!(output.status.success(), "{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "it did not run");
}

#[test]
fn links_that_are_cut_lose_nothing_and_leave_nothing() {
    passes_alone("alone_links_are_cut");
}

/// One end of the links between two processes, of which one is paused and killed: `place` is 0 for that one. It bears little silence.
fn provider(effects: &Effects, kind: &str, place: usize) -> Box<dyn Provider> {
    let keepalive_interval = silence(kind) / 20;
    let tcp = |encryption| {
        let listen = vec!["127.0.0.1:0".parse().unwrap()];
        let options = TcpOptions { listen, encryption, keepalive_interval, silence_max: silence(kind), ..TcpOptions::default() };
        Box::new(TcpProvider::new(effects.clone(), options).unwrap())
    };
    match kind {
        "shm" => {
            let options = ShmOptions { ring_bytes: 1 << 16, keepalive_interval, silence_max: silence(kind), handshake_max: PATIENCE };
            Box::new(ShmProvider::new(effects.clone(), options).unwrap())
        }
        "tcp" => tcp(Encryption::Never),
        "sealed" => tcp(Encryption::Always),
        "rc" => Box::new(guest::provider(effects, Profile::Rc, &guest::addresses()[place], silence(kind))),
        "uc" => Box::new(guest::provider(effects, Profile::Uc, &guest::addresses()[place], silence(kind))),
        other => panic!("nobody knows what {other} is"),
    }
}

/// What a link of this kind bears. An emulated machine is slow.
fn silence(kind: &str) -> Duration {
    Duration::from_millis(if matches!(kind, "rc" | "uc") { 3_000 } else { 800 })
}

fn written(endpoint: Endpoint) -> String {
    match endpoint {
        Endpoint::Shm { door } => format!("{door:x}"),
        Endpoint::Tcp(address) | Endpoint::Verbs { address } => address.to_string(),
        other => panic!("{other:?} is of one process"),
    }
}

fn read(kind: &str, endpoint: &str) -> Endpoint {
    match kind {
        "shm" => Endpoint::Shm { door: u128::from_str_radix(endpoint, 16).unwrap() },
        "tcp" | "sealed" => Endpoint::Tcp(endpoint.parse().unwrap()),
        _ => Endpoint::Verbs { address: endpoint.parse().unwrap() },
    }
}

fn ticket() -> Ticket {
    Ticket::new(1, [3; 32])
}

const LINK: LinkOptions = LinkOptions::for_payload(OPTIONS.slot_bytes);

/// The process that is paused and killed: it sends without end, and dials anew whenever it sees that its link has ended.
#[test]
#[ignore = "started by another test, in a process of its own"]
fn alone_floods() {
    let effects = effects();
    let words = std::env::var("SHOAL_TEST_FLOOD").unwrap();
    let (kind, endpoint) = words.split_once(' ').unwrap();
    let endpoint = read(kind, endpoint);
    let provider = provider(&effects, kind, 0);
    let dial = || {
        let limit = soon(&effects);
        loop {
            // The other end may not have seen yet that the last link is no more.
            match provider.dial(&endpoint, &ticket(), LINK, effects.after(silence(kind))) {
                Ok(link) => return link,
                Err(error) => assert!(effects.clock.now() < limit, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    let mut sender = sender(dial(), Fence::default(), OPTIONS, &effects).unwrap();
    for number in 0.. {
        let message = message(number);
        while sender.taken() <= number {
            match sender.send(1, &[&message], soon(&effects)) {
                Ok(()) => {}
                Err(SendError::Broken(Broken::Link(_))) => while sender.relink(&dial(), effects.after(silence(kind))).is_err() {},
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// A process that floods whoever expects it.
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

/// Receives up to message `until`, unless none comes for so long or the link ends.
fn take(effects: &Effects, number: &mut u64, receiver: &mut Receiver, until: u64, wait: Duration) -> Result<(), RecvError> {
    while *number < until {
        let deadline = effects.after(wait);
        let received = receiver.recv(deadline).map(|received| check(received.payload(), *number));
        assert!(effects.clock.now() < deadline + GRACE, "a wait went past its bound");
        received?;
        *number += 1;
    }
    Ok(())
}

/// Receives what a process sends that is paused a few times, once for longer than its links bear, and killed after some `count` messages.
pub(crate) fn paused_and_killed(kind: &str, seed: u64, count: u64) {
    let effects = effects();
    let provider = provider(&effects, kind, 1);
    let endpoint = written(provider.endpoints()[0]);
    let accept = || provider.expect(&ticket(), LINK).unwrap().accept(soon(&effects)).unwrap();
    let child = alone("alone_floods").env("SHOAL_TEST_FLOOD", format!("{kind} {endpoint}")).stdout(Stdio::null()).spawn().unwrap();
    let flood = Flood(child);
    let mut receiver = receiver(accept(), Fence::default(), OPTIONS, &effects).unwrap();
    let mut chance = Chance(seed);
    let mut pauses: Vec<u64> = (0..4).map(|_| chance.below(count)).collect();
    pauses.sort_unstable();
    pauses.dedup();
    let long = pauses[chance.below(pauses.len() as u64) as usize];
    let end = count + chance.below(count / 4);
    let (mut number, mut moves) = (0, 0);
    let take = |number: &mut u64, receiver: &mut Receiver, until: u64, wait: Duration| take(&effects, number, receiver, until, wait);
    for (until, pause) in pauses.iter().map(|pause| (*pause, true)).chain([(end, false)]) {
        loop {
            match take(&mut number, &mut receiver, until, PATIENCE) {
                Ok(()) => break,
                // On a machine that is busy enough a process is silent for too long although nobody pauses it.
                Err(RecvError::Broken(Broken::Link(_))) => receiver.relink(&accept()).unwrap(),
                Err(error) => panic!("{error}"),
            }
        }
        if !pause {
            continue;
        }
        flood.signal(Signal::STOP);
        if until == long {
            // It is missed, which ends the link; and the process that wakes up finds its link ended and makes another.
            let ended = |missed| match missed {
                Err(RecvError::Broken(Broken::Link(reason))) => reason,
                other => panic!("{other:?}"),
            };
            let mut reason = ended(take(&mut number, &mut receiver, u64::MAX, PATIENCE));
            // Or it had ended by itself, on a machine that is very busy.
            while !matches!(reason, CloseReason::Silent { .. } | CloseReason::Stalled) {
                flood.signal(Signal::CONT);
                receiver.relink(&accept()).unwrap();
                flood.signal(Signal::STOP);
                reason = ended(take(&mut number, &mut receiver, u64::MAX, PATIENCE));
            }
            std::thread::sleep(silence(kind) / 2);
            flood.signal(Signal::CONT);
            receiver.relink(&accept()).unwrap();
            moves += 1;
        } else {
            // What it had sent is received, and then nothing comes, for no longer than was asked for.
            let nothing = take(&mut number, &mut receiver, u64::MAX, silence(kind) / 20);
            assert!(matches!(nothing, Err(RecvError::Deadline | RecvError::Broken(Broken::Link(_)))), "{nothing:?}");
            flood.signal(Signal::CONT);
        }
    }
    // In the middle of whatever it is writing.
    flood.signal(Signal::KILL);
    let error = take(&mut number, &mut receiver, u64::MAX, PATIENCE).unwrap_err();
    assert!(matches!(error, RecvError::Broken(Broken::Link(CloseReason::Peer | CloseReason::Silent { .. }))), "{error}");
    assert!(moves == 1 && number >= end);
}

#[test]
#[ignore = "started by another test, in a process of its own"]
fn alone_peers_are_paused_and_killed() {
    // The first run leaves what a process has once.
    paused_and_killed("shm", 0, 40);
    let before = holds();
    for (seed, kind) in seeds().into_iter().zip(["shm", "tcp", "sealed"]) {
        println!("{kind}: seed {seed}");
        paused_and_killed(kind, seed, 3_000);
    }
    holds_again(before);
}

#[test]
fn peers_that_are_paused_or_killed_harm_nobody_and_leave_nothing() {
    passes_alone("alone_peers_are_paused_and_killed");
}

/// The same for longer, by hand and in the long checks.
#[test]
#[ignore = "takes minutes: run by .ci/full"]
fn long_faults() {
    for _ in 0..4 {
        passes_alone("alone_links_are_cut");
    }
    for kind in ["shm", "tcp", "sealed"] {
        for seed in seeds() {
            println!("{kind}: seed {seed}");
            paused_and_killed(kind, seed, 10_000);
        }
    }
}
