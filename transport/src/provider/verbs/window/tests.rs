//! Windows from both ends in one process: over adapters that are played here, and over those of the guest in `guest`.

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::Effects;
use crate::access::{AccessTable, Denied, Grant, Handle, Operation, RevokeError};
use crate::env::SystemRng;
use crate::frame::TermTag;
use crate::link::{Link, LinkOptions};
use crate::provider::verbs::reliable::ReliableFabric;
use crate::provider::verbs::{InUse, VerbsOptions, VerbsProvider};
use crate::provider::{Provider, Ticket};
use crate::testing::{effects, soon};

const HOLDER: [u8; 32] = [1; 32];
const FIRST: TermTag = TermTag { counter: 1, node: 2 };
const PAGE: u64 = 4096;

/// A holder and an owner on two devices.
pub(super) struct World {
    pub(super) effects: Effects,
    pub(super) near: VerbsProvider,
    pub(super) far: VerbsProvider,
    pub(super) table: AccessTable,
}

/// A link between them, as both ends have it.
pub(super) struct Ends {
    near: Arc<dyn Link>,
    far: Arc<dyn Link>,
}

impl World {
    pub(super) fn new(effects: Effects, [near, far]: [VerbsProvider; 2]) -> Self {
        Self { table: AccessTable::new(effects.clone(), 64 * PAGE), effects, near, far }
    }

    pub(super) fn link(&self) -> Ends {
        let ticket = Ticket::random(&SystemRng);
        let options = LinkOptions::for_payload(64 * 1024);
        let expected = self.far.expect(&ticket, options).unwrap();
        let near = self.near.dial(&self.far.endpoints()[0], &ticket, options, soon(&self.effects)).unwrap();
        Ends { near, far: expected.accept(soon(&self.effects)).unwrap() }
    }

    fn lend(&self, page: u64, bytes: u64, rights: Rights, lasts: Duration) -> Handle {
        let deadline = self.effects.after(lasts);
        self.table.grant(Grant { holder: HOLDER, start: page * PAGE, bytes, rights, term: FIRST, deadline }).unwrap()
    }

    /// A window onto a lease, as the two ends of [`crate::remote`] make one.
    fn open(&self, ends: &Ends, handle: Handle, term: TermTag, generation: u64) -> Result<Option<(Reach, Closer)>, Denied> {
        let [near, far] = [&ends.near, &ends.far].map(|end| Arc::clone(end).one_sided().unwrap());
        let asking = Asking::new(&near, &SystemRng, &*self.effects.clock).unwrap();
        let request = Request::decode(&asking.request().encode()).unwrap();
        let operation = Operation { handle, peer: HOLDER, term, write: None, offset: 0, bytes: 0 };
        let opened =
            self.table.open_reach(operation, generation, |pages, bytes, rights| far.expose(&request, pages, bytes, rights).ok())?;
        let Some((answer, closer)) = opened else { return Ok(None) };
        let answer = Answer::decode(&answer.encode()).unwrap();
        Ok(Some((asking.open(&answer, answer.bytes).unwrap(), closer)))
    }

    fn opened(&self, ends: &Ends, handle: Handle) -> (Reach, Closer) {
        self.open(ends, handle, FIRST, 0).unwrap().unwrap()
    }

    fn put(&self, reach: &mut Reach, offset: u64, bytes: &[u8]) -> usize {
        reach.put(offset, bytes, &*self.effects.clock, soon(&self.effects))
    }

    fn write_blindly(&self, reach: &mut Reach, offset: u64, bytes: &[u8]) -> bool {
        reach.write_blindly(offset, bytes, &*self.effects.clock, self.effects.after(Duration::from_secs(20)))
    }

    fn read(&self, handle: Handle, bytes: usize) -> Vec<u8> {
        let mut all = vec![0xdd; bytes];
        assert!(self.table.read(handle, 0, &mut all));
        all
    }

    fn works(&self, ends: &Ends) {
        ends.near.send(&[b"still here"], soon(&self.effects)).unwrap();
        assert_eq!(ends.far.recv(&mut [0; 16], soon(&self.effects)), Ok(10));
    }

    /// Waits until nothing but so many links is on the devices.
    fn come_down_to(&self, links: usize) {
        let links = InUse { pairs: links, completion_queues: links, registrations: links };
        until(|| self.near.in_use() == links && self.far.in_use() == links);
    }
}

pub(super) fn until(mut holds: impl FnMut() -> bool) {
    for _ in 0..20_000 {
        if holds() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("it does not come about");
}

const LONG: Duration = Duration::from_secs(60);

/// How an answer is forged.
type Change<'a> = &'a dyn Fn(&mut Answer);

/// What somebody would try who has a window and wants more.
pub(super) fn what_is_forged_reaches_nothing(world: &World) {
    let (ends, other_ends) = (world.link(), world.link());
    let lease = world.lend(1, 5000, Rights::ALL, LONG);
    let other = world.lend(3, 5000, Rights::ALL, LONG);
    let read_only = world.lend(5, 5000, Rights { read: true, write: false }, LONG);
    let (mut theirs, their_closer) = world.opened(&other_ends, other);
    let stolen = *theirs.answer();
    assert_eq!(world.put(&mut theirs, 0, &[7; 5000]), 5000);
    let forgeries: [(&str, Change<'_>); 8] = [
        ("beyond the end", &|answer| answer.address += 5000),
        ("over the end", &|answer| answer.address += 4999),
        ("before the start", &|answer| answer.address -= 1),
        ("the next key", &|answer| answer.key = answer.key.wrapping_add(1)),
        ("the next index's key", &|answer| answer.key = answer.key.wrapping_add(256)),
        ("no key", &|answer| answer.key = 0),
        ("somebody else's key and address", &|answer| (answer.key, answer.address) = (stolen.key, stolen.address)),
        ("somebody else's address", &|answer| answer.address = stolen.address),
    ];
    for (what, change) in forgeries {
        let (mut reach, _closer) = world.opened(&ends, lease);
        assert_eq!(world.put(&mut reach, 0, b"honest"), 6);
        change(reach.answer());
        assert!(!world.write_blindly(&mut reach, 0, &[9, 9]), "{what} was let through");
        // The queue pair is broken, and the link is not.
        assert!(reach.has_ended() && world.put(&mut reach, 0, b"x") == 0);
        world.works(&ends);
    }
    let (mut reach, closer) = world.opened(&ends, read_only);
    assert_eq!(world.put(&mut reach, 0, b"x"), 0);
    assert!(!reach.has_ended() && !world.write_blindly(&mut reach, 0, b"x"), "what may only be read was written");
    assert_eq!(world.read(read_only, 5000), [0; 5000]);
    assert_eq!(world.read(lease, 5000), [&b"honest"[..], &[0; 4994]].concat());
    assert_eq!(world.read(other, 5000), [7; 5000]);
    assert_eq!(world.put(&mut theirs, 0, b"the other window is as it was"), 29);
    drop((reach, closer, theirs, their_closer));
    world.come_down_to(2);
    world.works(&ends);
}

/// How a lease ends.
type End<'a> = &'a dyn Fn(Handle);

/// Whatever ends a window, who takes no notice writes nothing more, and who does is told.
pub(super) fn a_window_that_has_ended_lets_nothing_through(world: &World) {
    let ends = world.link();
    let ways: [(&str, End<'_>); 5] = [
        ("revoked", &|handle| world.table.revoke(handle, soon(&world.effects)).unwrap()),
        ("expired", &|handle| world.table.renew(handle, world.effects.clock.now()).unwrap()),
        ("looked at after its deadline", &|handle| {
            world.table.renew(handle, world.effects.after(Duration::from_millis(20))).unwrap();
            std::thread::sleep(Duration::from_millis(25));
        }),
        ("superseded", &|handle| world.table.raise_term(handle, TermTag { counter: 2, node: 0 }).unwrap()),
        ("followed by a later generation", &|handle| {
            let write = Operation { handle, peer: HOLDER, term: FIRST, write: Some(1), offset: 0, bytes: 1 };
            world.table.admit(write).unwrap().write(b"A").unwrap();
        }),
    ];
    for (what, end) in ways {
        let lease = world.lend(0, 5000, Rights::ALL, LONG);
        let (mut reach, closer) = world.opened(&ends, lease);
        let (mut blind, blind_closer) = world.opened(&ends, lease);
        assert_eq!(world.put(&mut reach, 0, b"AAAA"), 4);
        assert!(world.write_blindly(&mut blind, 4, b"BBBB"));
        end(lease);
        let seen = world.table.read(lease, 0, &mut [0; 8]);
        assert_eq!(seen, what != "revoked");
        assert!(!world.write_blindly(&mut blind, 0, b"late"), "{what}, and written");
        // The peer's thread would do this as it waits.
        until(|| {
            ends.near.recv(&mut [0; 16], world.effects.after(Duration::from_millis(1))).unwrap_err();
            world.put(&mut reach, 0, b"late") == 0
        });
        if seen {
            assert_eq!(world.read(lease, 8), b"AAAABBBB", "{what}, and written");
            world.table.revoke(lease, soon(&world.effects)).unwrap();
        }
        drop((reach, blind, closer, blind_closer));
        assert_eq!((world.table.lent_bytes(), world.table.retired_bytes()), (0, 0));
    }
    world.come_down_to(1);
    world.works(&ends);
}

/// Nobody asks for it, and nobody ends it. `lasts` is long enough to make a link and a window.
pub(super) fn a_window_is_closed_when_its_lease_runs_out(world: &World, lasts: Duration) {
    let (ends, other) = (world.link(), world.link());
    let began = world.effects.clock.now();
    let lease = world.lend(0, 5000, Rights::ALL, lasts);
    let (mut reach, _closer) = world.opened(&ends, lease);
    let later = world.lend(2, 5000, Rights::ALL, LONG);
    let (mut stays, _stays_closer) = world.opened(&other, later);
    until(|| world.far.in_use().registrations == 3);
    assert!(world.effects.clock.now().since(began) >= lasts, "it was closed too early");
    assert!(!world.write_blindly(&mut reach, 0, b"late"));
    assert_eq!(world.read(lease, 5000), [0; 5000]);
    assert_eq!(world.put(&mut stays, 0, b"it has time left"), 16);
    // A deadline that comes earlier than it was.
    world.table.renew(later, world.effects.after(Duration::from_millis(20))).unwrap();
    until(|| world.far.in_use().registrations == 2);
}

fn played(options: VerbsOptions) -> (World, ReliableFabric) {
    let effects = effects();
    let fabric = ReliableFabric::default();
    let options = VerbsOptions { silence_max: LONG, handshake_max: LONG, ..options };
    let both = ["127.0.0.1", "127.0.0.2"].map(|address| fabric.provider(&effects, address, options.clone()));
    (World::new(effects, both), fabric)
}

fn plain() -> World {
    played(VerbsOptions::of(Profile::Rc)).0
}

#[test]
fn played_what_is_forged_reaches_nothing() {
    what_is_forged_reaches_nothing(&plain());
}

#[test]
fn played_a_window_that_has_ended_lets_nothing_through() {
    a_window_that_has_ended_lets_nothing_through(&plain());
}

#[test]
fn played_a_window_is_closed_when_its_lease_runs_out() {
    a_window_is_closed_when_its_lease_runs_out(&plain(), Duration::from_millis(500));
}

#[test]
fn long_ranges_go_piece_by_piece_and_come_back() {
    let world = plain();
    let bytes = 64 * PAGE as usize;
    let lease = world.lend(0, bytes as u64, Rights::ALL, LONG);
    let ends = world.link();
    let (mut reach, _closer) = world.opened(&ends, lease);
    let message: Vec<u8> = (0..bytes).map(|i| (i ^ (i >> 8)) as u8).collect();
    for (start, end) in [(0, bytes), (1, bytes - 1), (bytes - 1, bytes), (5, 5)] {
        assert_eq!(world.put(&mut reach, start as u64, &message[start..end]), end - start);
        let mut got = vec![0; end - start];
        assert_eq!(reach.get(start as u64, &mut got, &*world.effects.clock, soon(&world.effects)), end - start);
        assert!(got == message[start..end]);
    }
    // Outside of the lease nothing is even tried.
    assert_eq!(world.put(&mut reach, bytes as u64 - 1, b"xy"), 0);
    assert_eq!(world.put(&mut reach, u64::MAX, b"x"), 0);
    // Too late is no reason to give the window up.
    assert_eq!(reach.put(0, b"x", &*world.effects.clock, world.effects.clock.now()), 0);
    assert!(!reach.has_ended());
    // A peer that is gone is not waited for.
    drop((ends.near, ends.far));
}

/// A device that does not let go of memory keeps it charged, and who comes next does not see what is written to it.
#[test]
fn what_a_device_does_not_let_go_of_is_left_to_it() {
    let (world, fabric) = played(VerbsOptions::of(Profile::Rc));
    let ends = world.link();
    let lease = world.lend(0, 5000, Rights::ALL, LONG);
    let (mut blind, closer) = world.opened(&ends, lease);
    assert!(world.write_blindly(&mut blind, 0, b"before"));
    fabric.refuse_to_destroy(true);
    let term = TermTag { counter: 2, node: 0 };
    world.table.raise_term(lease, term).unwrap();
    assert!(world.write_blindly(&mut blind, 0, b"behind"), "the device lets it through");
    assert_eq!(world.read(lease, 6), b"before", "and nobody sees it");
    assert_eq!(world.table.retired_bytes(), 2 * PAGE);
    world.table.revoke(lease, soon(&world.effects)).unwrap();
    assert_eq!((world.table.lent_bytes(), world.table.retired_bytes()), (0, 2 * PAGE));
    // It is asked again.
    fabric.refuse_to_destroy(false);
    assert_eq!(world.table.retired_bytes(), 0);
    drop((blind, closer));
    world.come_down_to(1);
    // Nor is a window forgotten that came too late to be told of.
    let far = Arc::clone(&ends.far).one_sided().unwrap();
    let lease = world.lend(0, 5000, Rights::ALL, LONG);
    let operation = Operation { handle: lease, peer: HOLDER, term: FIRST, write: None, offset: 0, bytes: 0 };
    let opened = world.table.open_reach(operation, 0, |pages, bytes, rights| {
        let exposed = far.expose(&Request { number: 1, psn: 0 }, pages, bytes, rights).ok();
        fabric.refuse_to_destroy(true);
        world.table.raise_term(lease, term).unwrap();
        exposed
    });
    assert!(matches!(opened, Err(Denied::Term)));
    let again = Operation { term, ..operation };
    assert!(matches!(world.table.admit(again), Err(Denied::Fenced)));
    world.table.revoke(lease, soon(&world.effects)).unwrap();
    assert_eq!(world.table.retired_bytes(), 2 * PAGE);
    fabric.refuse_to_destroy(false);
    assert_eq!(world.table.retired_bytes(), 0);
    world.come_down_to(1);
}

#[test]
fn there_is_an_end_to_what_is_open() {
    let (world, _) = played(VerbsOptions { windows: 2, window_bytes: 9000, ..VerbsOptions::of(Profile::Rc) });
    let leases = [world.lend(0, 4000, Rights::ALL, LONG), world.lend(1, 4000, Rights::ALL, LONG), world.lend(2, 100, Rights::ALL, LONG)];
    let long = world.lend(4, 9001, Rights::ALL, LONG);
    let ends = [world.link(), world.link(), world.link()];
    assert!(world.open(&ends[0], long, FIRST, 0).unwrap().is_none(), "more bytes than may be");
    let first = world.opened(&ends[0], leases[0]);
    let _second = world.opened(&ends[1], leases[1]);
    assert!(world.open(&ends[2], leases[2], FIRST, 0).unwrap().is_none(), "a third");
    drop(first);
    let third = world.opened(&ends[2], leases[2]);
    drop(third);
    // Nor is there one for who may not, or is not, or is late.
    assert_eq!(world.open(&ends[0], Handle(7), FIRST, 0).err(), Some(Denied::Unknown));
    assert_eq!(world.open(&ends[0], leases[0], TermTag { counter: 0, node: 0 }, 0).err(), Some(Denied::Term));
    assert!(world.open(&ends[0], leases[0], FIRST, 3).unwrap().is_some());
    assert_eq!(world.open(&ends[0], leases[0], FIRST, 2).err(), Some(Denied::Generation));
    let blind = world.lend(10, 10, Rights { read: false, write: true }, LONG);
    assert_eq!(world.open(&ends[0], blind, FIRST, 0).err(), Some(Denied::Rights));
}

/// What happens while memory is being registered counts.
#[test]
fn what_ends_while_it_is_opened_is_not_opened() {
    let world = plain();
    let ends = world.link();
    let far = Arc::clone(&ends.far).one_sided().unwrap();
    let request = Request { number: 1, psn: 0 };
    let operation = |handle| Operation { handle, peer: HOLDER, term: FIRST, write: None, offset: 0, bytes: 0 };
    let during = |happens: &dyn Fn(Handle)| {
        let lease = world.lend(0, 100, Rights::ALL, LONG);
        let opened = world.table.open_reach(operation(lease), 0, |pages, bytes, rights| {
            let exposed = far.expose(&request, pages, bytes, rights).ok();
            happens(lease);
            exposed
        });
        let outcome = opened.map(|opened| opened.is_some());
        world.come_down_to(1);
        world.table.revoke(lease, soon(&world.effects)).unwrap();
        outcome
    };
    let now = || world.effects.clock.now();
    let still_open = |lease| world.table.revoke(lease, now()).unwrap_err();
    assert_eq!(during(&|lease| assert!(matches!(still_open(lease), RevokeError::InFlight { .. }))), Err(Denied::Fenced));
    assert_eq!(during(&|lease| world.table.renew(lease, now()).unwrap()), Err(Denied::Expired));
    assert_eq!(during(&|lease| world.table.raise_term(lease, TermTag { counter: 9, node: 0 }).unwrap()), Err(Denied::Term));
}
