//! Channels under load whose links are cut, stalled and made anew, and whose peers are paused and killed.
//!
//! What a process holds is counted, so these run in processes of their own: this test's own program, started again.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::proxy::Proxy;
use super::{Encryption, TcpOptions, TcpProvider};
use crate::Effects;
use crate::channel::{self, Broken, ChannelOptions, Receiver, RelinkError, Sender};
use crate::env::Instant;
use crate::frame::{Fence, HEADER_BYTES};
use crate::link::{CloseReason, Link, LinkOptions};
use crate::provider::{Endpoint, Provider, Ticket};
use crate::testing::{effects, soon};

/// Says to a process started again what it is to do.
const ROLE: &str = "SHOAL_TRANSPORT_TCP_FAULTS";

const CHANNEL: ChannelOptions = ChannelOptions { slot_bytes: 200_000, slots: 4 };
const LINK: LinkOptions = LinkOptions::for_payload(CHANNEL.slot_bytes);

/// What a link bears of its peer.
const SILENCE: Duration = Duration::from_millis(1000);

/// No wait of these tests may take longer than this beyond its deadline, however loaded the machine is.
const GRACE: Duration = Duration::from_secs(20);

struct Dice(u64);

impl Dice {
    /// A number below `limit` (xorshift64*).
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % limit
    }
}

/// Message `i`: most are short, some are longer than three pieces.
fn text(seed: u64, i: u64) -> Vec<u8> {
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (i + 1).wrapping_mul(0xbf58_476d_1ce4_e5b9) | 1);
    let bytes = if dice.below(20) == 0 { dice.below(u64::from(CHANNEL.slot_bytes)) } else { dice.below(300) };
    let first = dice.below(256);
    (0..bytes).map(|at| (first + at * 7 + at / 251) as u8).collect()
}

/// One end's way to links. All are made with one ticket, which is expected anew each time.
struct Side<'a> {
    effects: &'a Effects,
    provider: &'a TcpProvider,
    /// Where to dial; none for the accepting end.
    dials: Option<Endpoint>,
    over: &'a AtomicBool,
    /// How many messages were sent. Harm is done when so much has happened, not when so much time has passed: so a loaded machine gets
    /// on as well, only later.
    progress: &'a AtomicU64,
}

fn ticket() -> Ticket {
    Ticket::new(77, [7; 32])
}

impl Side<'_> {
    /// The next link; none once all is over.
    fn link(&self) -> Option<Arc<dyn Link>> {
        let until = soon(self.effects);
        while !self.over.load(Ordering::SeqCst) {
            assert!(self.effects.clock.now() < until, "no link is to be had any more");
            let made = match &self.dials {
                Some(endpoint) => {
                    let made = self.provider.dial(endpoint, &ticket(), LINK, self.effects.after(Duration::from_millis(500)));
                    made.map_err(|_| std::thread::sleep(Duration::from_millis(2))).ok()
                }
                None => self.provider.expect(&ticket(), LINK).unwrap().accept(self.effects.after(Duration::from_millis(500))).ok(),
            };
            if made.is_some() {
                return made;
            }
        }
        None
    }

    /// Runs something that may take until `deadline`, and sees that it does.
    fn in_time<T>(&self, deadline: Instant, run: impl FnOnce(Instant) -> T) -> T {
        let result = run(deadline);
        assert!(self.effects.clock.now() < deadline + GRACE, "a wait went past its bound");
        result
    }

    /// Waits until so many more messages were sent; `false` if that will not be.
    fn wait_for(&self, messages: u64, given_up: impl Fn() -> bool) -> bool {
        let target = self.progress.load(Ordering::SeqCst) + messages;
        while self.progress.load(Ordering::SeqCst) < target {
            if self.over.load(Ordering::SeqCst) || given_up() {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    fn in_ms(&self, ms: u64) -> Instant {
        self.effects.after(Duration::from_millis(ms))
    }

    fn relink(&self, sender: &mut Sender) {
        loop {
            let link = self.link().expect("the sender says when all is over");
            match self.in_time(self.in_ms(2000), |deadline| sender.relink(&link, deadline)) {
                Ok(()) => return,
                // Broken again, or the other end is not there yet.
                Err(RelinkError::Repeat(_)) => {}
                Err(other) => panic!("{other}"),
            }
        }
    }

    /// Sends messages `from` on and waits until they have arrived; says how often the channel moved.
    fn send_all(&self, sender: &mut Sender, seed: u64, count: u64) -> u32 {
        let mut moves = 0;
        let mut next = sender.next_sequence();
        while next < count {
            let message = text(seed, next);
            let (head, tail) = message.split_at(message.len() / 2);
            match self.in_time(self.in_ms(500), |deadline| sender.send((next % 251) as u8, &[head, tail], deadline)) {
                Ok(()) => next += 1,
                Err(channel::SendError::Deadline) => {}
                Err(channel::SendError::Broken(Broken::Link(_))) => {
                    moves += 1;
                    // The message on which it broke may have got its number.
                    next = sender.next_sequence();
                    self.relink(sender);
                }
                Err(other) => panic!("{other}"),
            }
            assert_eq!(sender.next_sequence(), next);
            self.progress.store(next, Ordering::SeqCst);
        }
        loop {
            match self.in_time(self.in_ms(500), |deadline| sender.flush(deadline)) {
                Ok(()) => return moves,
                Err(channel::SendError::Deadline) => {}
                Err(_) => {
                    moves += 1;
                    self.relink(sender);
                }
            }
        }
    }

    /// Receives until all is over, and sees that nothing is lost, repeated, out of order or damaged.
    fn receive_all(&self, receiver: &mut Receiver, seed: u64) -> u64 {
        let mut next = 0;
        loop {
            match self.in_time(self.in_ms(50), |deadline| receiver.recv(deadline)) {
                Ok(received) => {
                    assert_eq!((received.sequence(), received.kind()), (next, (next % 251) as u8));
                    assert!(received.payload() == text(seed, next), "message {next} is damaged");
                    next += 1;
                }
                Err(_) if self.over.load(Ordering::SeqCst) => return next,
                Err(channel::RecvError::Deadline) => {}
                Err(channel::RecvError::Broken(Broken::Link(_))) => match self.link() {
                    Some(link) => receiver.relink(&link).unwrap(),
                    None => return next,
                },
                Err(other) => panic!("{other}"),
            }
        }
    }
}

fn provider(effects: &Effects, encryption: Encryption, rails: u8) -> TcpProvider {
    let options = TcpOptions {
        listen: vec!["127.0.0.1:0".parse().unwrap()],
        keepalive_interval: Duration::from_millis(40),
        silence_max: SILENCE,
        encryption,
        rails,
        ..TcpOptions::default()
    };
    TcpProvider::new(effects.clone(), options).unwrap()
}

/// Sends messages by a way that is cut and stalled all the time; says how often the channel moved to another link.
fn by_a_bad_way(seed: u64, encryption: Encryption, rails: u8, count: u64) -> u32 {
    let effects = &effects();
    let (near, far) = (provider(effects, encryption, rails), provider(effects, encryption, rails));
    let proxy = Proxy::new(far.listening()[0]);
    let (over, progress) = (&AtomicBool::new(false), &AtomicU64::new(0));
    let dialling = Side { effects, provider: &near, dials: Some(Endpoint::Tcp(proxy.address())), over, progress };
    let accepting = Side { effects, provider: &far, dials: None, over, progress };
    let moves = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            let link = accepting.link().unwrap();
            let mut receiver = channel::receiver(link, Fence::default(), CHANNEL, effects).unwrap();
            accepting.receive_all(&mut receiver, seed)
        });
        let sending = scope.spawn(|| {
            let link = dialling.link().unwrap();
            let mut sender = channel::sender(link, Fence::default(), CHANNEL, effects).unwrap();
            let moves = dialling.send_all(&mut sender, seed, count);
            over.store(true, Ordering::SeqCst);
            moves
        });
        let mut dice = Dice(seed | 1);
        for harm in 0.. {
            if !dialling.wait_for(1 + dice.below(60), || sending.is_finished() || receiving.is_finished()) {
                break;
            }
            let stall = match harm {
                // Once for longer than the silence that is borne.
                2 => SILENCE * 3 / 2,
                _ if dice.below(4) == 0 => Duration::from_millis(dice.below(40)),
                _ => {
                    proxy.cut();
                    continue;
                }
            };
            proxy.stall(true);
            std::thread::sleep(stall);
            proxy.stall(false);
        }
        // A failure on either side must not leave the other one waiting.
        over.store(true, Ordering::SeqCst);
        let moves = sending.join().unwrap();
        assert_eq!(receiving.join().unwrap(), count);
        moves
    });
    near.shutdown();
    far.shutdown();
    moves
}

/// Descriptors and threads of this process.
fn held() -> [usize; 2] {
    ["/proc/self/fd", "/proc/self/task"].map(|folder| std::fs::read_dir(folder).unwrap().count())
}

/// Memory of this process, in bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<usize>().unwrap() * 1024
}

/// Starts this test's program again for one of its tests.
fn again(test: &str, role: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("provider::tcp::tests_faults::{test}"), "--nocapture"])
        .env(ROLE, role)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn nothing_is_lost_or_left_behind_on_a_bad_way() {
    if std::env::var(ROLE).is_err() {
        let status = again("nothing_is_lost_or_left_behind_on_a_bad_way", "alone").wait().unwrap();
        assert!(status.success(), "{status}");
        return;
    }
    // The first run makes what stays for good.
    by_a_bad_way(1, Encryption::Auto, 1, 50);
    let before = held();
    let clock = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    eprintln!("tcp faults: the seed from the clock is {clock}");
    let mut moves = 0;
    for (seed, encryption, rails) in [(2, Encryption::Auto, 1), (3, Encryption::Always, 1), (clock, Encryption::Always, 3)] {
        moves += by_a_bad_way(seed, encryption, rails, 1500);
    }
    assert!(moves >= 3, "nothing was broken");
    // A thread that has been waited for may take a moment to be gone.
    let patience = std::time::Instant::now();
    while held() != before {
        assert!(patience.elapsed() < GRACE, "descriptors and threads: {before:?} before, {:?} after", held());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_receiver_that_does_not_receive_costs_its_sender_its_slots_and_no_more() {
    const MEBI: usize = 1 << 20;
    if std::env::var(ROLE).is_err() {
        let test = "a_receiver_that_does_not_receive_costs_its_sender_its_slots_and_no_more";
        assert!(again(test, "alone").wait().unwrap().success());
        return;
    }
    let effects = effects();
    for encryption in [Encryption::Never, Encryption::Always] {
        let options = ChannelOptions { slot_bytes: MEBI as u32, slots: 4 };
        let start = || {
            let listen = vec!["127.0.0.1:0".parse().unwrap()];
            let options = TcpOptions { listen, silence_max: Duration::from_secs(60), encryption, ..TcpOptions::default() };
            TcpProvider::new(effects.clone(), options).unwrap()
        };
        let (near, far) = (start(), start());
        let message = vec![5; MEBI];
        let before = resident();
        let link_options = LinkOptions::for_payload(options.slot_bytes);
        let expected = far.expect(&ticket(), link_options).unwrap();
        let link = near.dial(&far.endpoints()[0], &ticket(), link_options, soon(&effects)).unwrap();
        let mut sender = channel::sender(link, Fence::default(), options, &effects).unwrap();
        let _receiver = channel::receiver(expected.accept(soon(&effects)).unwrap(), Fence::default(), options, &effects).unwrap();
        for _ in 0..4 {
            sender.send(0, &[&message], soon(&effects)).unwrap();
        }
        // 200 MiB are offered.
        for _ in 0..200 {
            assert_eq!(sender.send(0, &[&message], effects.clock.now()), Err(channel::SendError::Deadline));
        }
        assert_eq!(sender.unacknowledged(), 4);
        // Both ends are in this process: slots, the one to receive into, and what the link itself has.
        let limit = (4 + 5) * (MEBI + HEADER_BYTES) + 4 * MEBI;
        let grown = resident().saturating_sub(before);
        assert!(grown < limit, "{grown} bytes where {limit} are enough");
    }
}

/// Kills the child when the test ends, however it does.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[test]
fn a_peer_that_is_paused_loses_nothing_and_one_that_is_killed_is_missed() {
    let effects = &effects();
    let (over, progress) = (&AtomicBool::new(false), &AtomicU64::new(0));
    let seed = 9;
    if let Ok(address) = std::env::var(ROLE) {
        let dialler = provider(effects, Encryption::Always, 1);
        let side = Side { effects, provider: &dialler, dials: Some(Endpoint::Tcp(address.parse().unwrap())), over, progress };
        let mut receiver = channel::receiver(side.link().unwrap(), Fence::default(), CHANNEL, effects).unwrap();
        // Until it is killed.
        side.receive_all(&mut receiver, seed);
        return;
    }
    let acceptor = provider(effects, Encryption::Auto, 1);
    let test = "a_peer_that_is_paused_loses_nothing_and_one_that_is_killed_is_missed";
    let mut child = Killed(again(test, &acceptor.listening()[0].to_string()));
    let side = Side { effects, provider: &acceptor, dials: None, over, progress };
    let mut sender = channel::sender(side.link().unwrap(), Fence::default(), CHANNEL, effects).unwrap();
    let pid = rustix::process::Pid::from_child(&child.0);
    std::thread::scope(|scope| {
        let pausing = scope.spawn(|| {
            let mut dice = Dice(seed);
            // Twice for a moment, once for longer than the silence that is borne.
            for pause in [50, 1500, 50] {
                if !side.wait_for(1 + dice.below(300), || false) {
                    return;
                }
                rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
                std::thread::sleep(Duration::from_millis(pause));
                rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
            }
        });
        // At least a thousand, and as many as it takes to be interrupted.
        let mut sent = 0;
        let mut moves = 0;
        while sent < 1000 || !pausing.is_finished() {
            sent += 100;
            moves += side.send_all(&mut sender, seed, sent);
        }
        assert!(moves >= 1, "the long pause was not noticed");
    });
    assert!(child.0.try_wait().unwrap().is_none(), "the receiving process found something wrong");
    std::thread::scope(|scope| {
        let pause = Duration::from_millis(Dice(seed).below(50));
        scope.spawn(move || {
            std::thread::sleep(pause);
            child.0.kill().unwrap();
        });
        let broken = loop {
            let message = text(seed, sender.next_sequence());
            let kind = (sender.next_sequence() % 251) as u8;
            match side.in_time(side.in_ms(500), |deadline| sender.send(kind, &[&message], deadline)) {
                Ok(()) | Err(channel::SendError::Deadline) => {}
                Err(error) => break error,
            }
        };
        let missed = matches!(broken, channel::SendError::Broken(Broken::Link(CloseReason::Peer | CloseReason::Silent { .. })));
        assert!(missed, "{broken}");
    });
}
