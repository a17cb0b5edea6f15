//! Holders in processes of their own, which are killed, stopped, or take no notice.

use std::fs::{File, OpenOptions};
use std::io::{BufReader, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::{Child, ChildStdout, Command, Stdio};

use memmap2::MmapOptions;
use rustix::fs::{FallocateFlags, SealFlags};
use rustix::process::{Pid, Signal};

use super::*;
use crate::provider::Endpoint;
use crate::provider::shm::window::Waiting;
use crate::testing::said;

const LEASE_BYTES: u64 = 2 * 1024 * 1024;

fn world_for(slab_bytes: u64) -> World {
    let world = shm(Way::Native);
    World { table: AccessTable::new(world.effects.clone(), slab_bytes), ..world }
}

/// A holder in another process, and what it says.
struct Holder {
    child: Child,
    says: BufReader<ChildStdout>,
}

impl Holder {
    /// Starts a process that holds `lease`, and serves it; it says `ready` when it has begun.
    fn start(world: &World, lease: RegionLease, what: &str) -> Self {
        let Endpoint::Shm { door } = world.far.endpoints()[0] else { panic!() };
        let mut secret = [0; 32];
        crate::env::Rng::fill(&SystemRng, "test", &mut secret[..16]);
        let short = u128::from_le_bytes(secret[..16].try_into().unwrap());
        let ticket = Ticket::new(short ^ 1, secret);
        let expected = world.far.expect(&ticket, LinkOptions::for_payload(OPTIONS.slot_bytes)).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["remote::tests::processes::holder", "--exact", "--ignored", "--nocapture", "--quiet"])
            .env("SHOAL_TEST_HOLDER", format!("{door:x} {short:x} {:x} {:x}", lease.handle.0, lease.bytes))
            .env("SHOAL_TEST_WHAT", what)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let far = expected.accept(world.soon()).unwrap();
        let server = world.server(far, HOLDER);
        std::thread::spawn(move || server.run());
        let says = BufReader::new(child.stdout.take().unwrap());
        let mut holder = Self { child, says };
        assert_eq!(holder.hear(), "ready");
        holder
    }

    fn hear(&mut self) -> String {
        said(&mut self.says, "holder")
    }

    fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Stops it where it is, and waits until it stands still.
    fn stop(&self) {
        self.signal(Signal::STOP);
        let stat = format!("/proc/{}/stat", self.child.id());
        while !std::fs::read_to_string(&stat).unwrap().rsplit_once(')').unwrap().1.trim_start().starts_with('T') {
            std::thread::yield_now();
        }
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// The process of a [`Holder`].
#[test]
#[ignore = "started by other tests, in a process of its own"]
fn holder() {
    let effects = effects();
    let words = std::env::var("SHOAL_TEST_HOLDER").unwrap();
    let words: Vec<u128> = words.split(' ').map(|text| u128::from_str_radix(text, 16).unwrap()).collect();
    let mut secret = [0; 32];
    secret[..16].copy_from_slice(&words[1].to_le_bytes());
    let ticket = Ticket::new(words[1] ^ 1, secret);
    let patience = Duration::from_secs(60);
    let options = ShmOptions { silence_max: patience, handshake_max: patience, ..ShmOptions::default() };
    let provider = ShmProvider::new(effects.clone(), options).unwrap();
    let link_options = LinkOptions::for_payload(OPTIONS.slot_bytes);
    let link = provider.dial(&Endpoint::Shm { door: words[0] }, &ticket, link_options, soon(&effects)).unwrap();
    let bytes = words[3] as u64;
    let lease = RegionLease { handle: Handle(words[2]), bytes, term: TermTag { counter: 1, node: 2 }, generation: 0 };
    let mut region = RemoteRegion::open(link, Fence::default(), OPTIONS, lease, &effects).unwrap();
    let soon = soon(&effects);
    match std::env::var("SHOAL_TEST_WHAT").unwrap().as_str() {
        "put" => {
            let message = vec![0xee; bytes as usize];
            region.put(0, &message, soon).unwrap();
            assert_eq!(region.way(), Way::Native);
            println!("holder: ready");
            let end = loop {
                if let Err(end) = region.put(0, &message, soon) {
                    break end;
                }
            };
            println!("holder: {end:?}");
        }
        "scribble" => {
            let window = take(&mut region, &effects, |waiting| waiting.take(bytes, &*effects.clock).unwrap());
            let (start, length) = window.raw();
            println!("holder: ready");
            loop {
                // SAFETY: the mapping is writable, and so long; it lives as long as the window.
                unsafe { start.write_bytes(0xee, length) };
                println!("holder: round");
            }
        }
        "reach" => {
            let (_line, page, memory) = take(&mut region, &effects, |waiting| waiting.take_raw().unwrap());
            println!("holder: ready");
            for (name, file) in [("page", page), ("memory", memory)] {
                for reached in reach(file) {
                    println!("holder: {name}: {reached}");
                }
            }
            println!("holder: done");
        }
        other => panic!("{other}"),
    }
    // Whoever started it has to have looked.
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// Asks for a window and takes it otherwise than usual.
fn take<T>(region: &mut RemoteRegion, effects: &Effects, take: impl FnOnce(Waiting) -> T) -> T {
    let waiting = Waiting::new(&SystemRng, &*effects.clock).unwrap();
    let head = region.head(0, 0);
    let meeting = waiting.meeting().encode();
    assert_eq!(region.ask(message::WINDOW, &head, &[&meeting], soon(effects)), Ok(message::HANDED));
    take(waiting)
}

/// Tries everything that would write what may only be read, or change its length, and says what went well.
fn reach(file: OwnedFd) -> Vec<&'static str> {
    let file = File::from(file);
    let bytes = file.metadata().unwrap().len();
    let mut reached = Vec::new();
    let mut attempt = |name, done: bool| {
        if done {
            reached.push(name);
        }
    };
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    attempt("sealed otherwise", rustix::fs::fcntl_add_seals(&file, SealFlags::WRITE).is_ok());
    attempt("made writable", file.set_permissions(std::fs::Permissions::from_mode(0o777)).is_err());
    let again = OpenOptions::new().read(true).write(true).open(&path).expect("it can be opened, which is no harm");
    let truncated = OpenOptions::new().write(true).truncate(true).open(&path);
    attempt("opened and cut", truncated.is_ok() && file.metadata().unwrap().len() != bytes);
    for file in [&file, &again] {
        attempt("mapped", MmapOptions::new().len(bytes as usize).map_raw(file).is_ok());
        attempt("written", file.write_all_at(b"reached", 0).is_ok());
        attempt("cut off", file.set_len(0).is_ok());
        attempt("lengthened", file.set_len(bytes * 2).is_ok());
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        attempt("emptied", rustix::fs::fallocate(file.as_fd(), hole, 0, bytes).is_ok());
        attempt("zeroed", rustix::fs::fallocate(file.as_fd(), FallocateFlags::ZERO_RANGE, 0, bytes).is_ok());
        let map = MmapOptions::new().len(bytes as usize).map_raw_read_only(file).unwrap();
        // SAFETY: the range is the mapping, to which nobody has a reference.
        let changed = unsafe { rustix::mm::mprotect(map.as_mut_ptr().cast(), bytes as usize, rustix::mm::MprotectFlags::WRITE) };
        attempt("made writable in place", changed.is_ok());
    }
    reached
}

fn all_are(world: &World, lease: RegionLease, value: u8) -> bool {
    world.read(lease, 0, LEASE_BYTES as usize).iter().all(|byte| *byte == value)
}

#[test]
fn a_holder_that_is_killed_in_the_middle_leaves_nothing() {
    let world = world_for(LEASE_BYTES);
    for round in 0..4 {
        let lease = world.lend(0, LEASE_BYTES, Rights::ALL);
        assert!(all_are(&world, lease, 0));
        let holder = Holder::start(&world, lease, "put");
        for _ in 0..round * 300_000 {
            std::hint::spin_loop();
        }
        holder.kill();
        // What it wrote is whole pages of memory like any other.
        assert!(world.read(lease, 0, LEASE_BYTES as usize).iter().all(|byte| matches!(byte, 0 | 0xee)));
        world.table.revoke(lease.handle, world.soon()).unwrap();
        assert_eq!((world.table.lent_bytes(), world.table.retired_bytes()), (0, 0));
    }
}

#[test]
fn a_holder_that_is_stopped_in_the_middle_is_not_waited_for() {
    let world = world_for(2 * LEASE_BYTES);
    for _ in 0..3 {
        let lease = world.lend(0, LEASE_BYTES, Rights::ALL);
        let mut holder = Holder::start(&world, lease, "put");
        holder.stop();
        // No time at all: the fence holds at once.
        world.table.revoke(lease.handle, world.effects.clock.now()).unwrap();
        assert_eq!((world.table.lent_bytes(), world.table.retired_bytes()), (0, LEASE_BYTES));
        let next = world.lend(0, LEASE_BYTES, Rights::ALL);
        holder.signal(Signal::CONT);
        // It finishes its copy, and then hears.
        assert_eq!(holder.hear(), format!("{:?}", TransferError::Denied(Denial::NoLease)));
        assert!(all_are(&world, next, 0), "the next holder sees what the last one wrote");
        assert_eq!(world.table.retired_bytes(), 0, "it gave its window up");
        holder.kill();
        world.table.revoke(next.handle, world.soon()).unwrap();
    }
}

#[test]
fn a_holder_that_takes_no_notice_writes_where_nobody_looks() {
    let world = world_for(2 * LEASE_BYTES);
    let lease = world.lend(0, LEASE_BYTES, Rights::ALL);
    let mut holder = Holder::start(&world, lease, "scribble");
    assert_eq!(holder.hear(), "round");
    assert!(all_are(&world, lease, 0xee));
    // Somebody else takes the lease over.
    let term = TermTag { counter: 2, node: 2 };
    world.table.raise_term(lease.handle, term).unwrap();
    assert!(all_are(&world, lease, 0xee), "what was there stays");
    assert!(world.table.write(lease.handle, 0, &[5; LEASE_BYTES as usize]));
    for _ in 0..3 {
        holder.hear();
    }
    assert!(all_are(&world, lease, 5));
    world.table.revoke(lease.handle, world.soon()).unwrap();
    let next = world.lend(0, LEASE_BYTES, Rights::ALL);
    for _ in 0..3 {
        holder.hear();
    }
    assert!(all_are(&world, next, 0));
    assert_eq!(world.table.retired_bytes(), LEASE_BYTES, "it is charged as long as it has that mapped");
    holder.kill();
    assert_eq!(world.table.retired_bytes(), 0);
}

#[test]
fn a_holder_reaches_no_more_than_it_was_lent() {
    let world = world_for(LEASE_BYTES);
    let lease = world.lend(0, LEASE_BYTES, READ_ONLY);
    assert!(world.table.write(lease.handle, 0, &[3; LEASE_BYTES as usize]));
    let mut holder = Holder::start(&world, lease, "reach");
    let mut reached = Vec::new();
    loop {
        match holder.hear().as_str() {
            "done" => break,
            other => reached.push(other.to_owned()),
        }
    }
    assert_eq!(reached, Vec::<String>::new());
    assert!(all_are(&world, lease, 3));
    holder.kill();
}
