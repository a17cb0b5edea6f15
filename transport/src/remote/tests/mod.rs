//! What `put`, `get` and `notify` mean on every provider, written once and run for each.

#[cfg(target_os = "linux")]
mod processes;

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::Effects;
use crate::access::{AccessTable, Grant, GrantError, Handle, RevokeError, Rights};
use crate::channel::{Broken, ChannelOptions};
use crate::env::SystemRng;
use crate::frame::{Fence, TermTag};
use crate::link::{CloseReason, Link, LinkOptions};
use crate::provider::memory::{MemoryFabric, MemoryProvider, Shape};
#[cfg(target_os = "linux")]
use crate::provider::shm::{ShmOptions, ShmProvider};
use crate::provider::tcp::{TcpOptions, TcpProvider};
#[cfg(target_os = "linux")]
use crate::provider::verbs::reliable::ReliableFabric;
use crate::provider::{Provider, Ticket};
use crate::testing::{effects, soon};

const HOLDER: [u8; 32] = [1; 32];
const OPTIONS: ChannelOptions = ChannelOptions { slot_bytes: 64 * 1024, slots: 3 };
const SLAB_BYTES: u64 = 4 * 1024 * 1024;

/// An owner and a holder, and a provider between them.
struct World {
    effects: Effects,
    near: Box<dyn Provider>,
    far: Box<dyn Provider>,
    table: AccessTable,
    way: Way,
}

fn world(near: Box<dyn Provider>, far: Box<dyn Provider>, effects: Effects, way: Way) -> World {
    World { near, far, table: AccessTable::new(effects.clone(), SLAB_BYTES), effects, way }
}

fn memory() -> World {
    let effects = effects();
    let fabric = MemoryFabric::new(&SystemRng, Shape::default());
    let join = || Box::new(MemoryProvider::new(effects.clone(), &fabric));
    world(join(), join(), effects, Way::Served)
}

fn tcp() -> World {
    let effects = effects();
    let start = || {
        let options =
            TcpOptions { listen: vec!["127.0.0.1:0".parse().unwrap()], silence_max: Duration::from_secs(60), ..TcpOptions::default() };
        Box::new(TcpProvider::new(effects.clone(), options).unwrap())
    };
    world(start(), start(), effects, Way::Served)
}

#[cfg(target_os = "linux")]
fn shm(way: Way) -> World {
    let effects = effects();
    let patience = Duration::from_secs(60);
    let options = ShmOptions { silence_max: patience, handshake_max: patience, ..ShmOptions::default() };
    let start = || Box::new(ShmProvider::new(effects.clone(), options).unwrap());
    world(start(), start(), effects, way)
}

/// Adapters that are played.
#[cfg(target_os = "linux")]
fn verbs(way: Way) -> World {
    verbs_on(&ReliableFabric::default(), way)
}

#[cfg(target_os = "linux")]
fn verbs_on(fabric: &ReliableFabric, way: Way) -> World {
    use crate::provider::verbs::{Profile, VerbsOptions};
    let effects = effects();
    let patience = Duration::from_secs(60);
    let options = VerbsOptions { silence_max: patience, handshake_max: patience, ..VerbsOptions::of(Profile::Rc) };
    let start = |address| Box::new(fabric.provider(&effects, address, options.clone()));
    world(start("127.0.0.1"), start("127.0.0.2"), effects, way)
}

/// The devices of the guest that `.ci/verbs` boots.
#[cfg(target_os = "linux")]
fn soft_roce(profile: crate::provider::verbs::Profile, way: Way) -> World {
    let effects = effects();
    let [near, far] = crate::provider::verbs::guest::providers(&effects, profile);
    world(Box::new(near), Box::new(far), effects, way)
}

impl World {
    fn link(&self) -> (Arc<dyn Link>, Arc<dyn Link>) {
        let ticket = Ticket::random(&SystemRng);
        let options = LinkOptions::for_payload(OPTIONS.slot_bytes);
        let expected = self.far.expect(&ticket, options).unwrap();
        let near = self.near.dial(&self.far.endpoints()[0], &ticket, options, soon(&self.effects)).unwrap();
        (near, expected.accept(soon(&self.effects)).unwrap())
    }

    fn soon(&self) -> crate::env::Instant {
        soon(&self.effects)
    }

    fn lend(&self, start: u64, bytes: u64, rights: Rights) -> RegionLease {
        let term = TermTag { counter: 1, node: 2 };
        let grant = Grant { holder: HOLDER, start, bytes, rights, term, deadline: self.soon() };
        RegionLease { handle: self.table.grant(grant).unwrap(), bytes, term, generation: 0 }
    }

    fn region(&self, near: Arc<dyn Link>, lease: RegionLease) -> RemoteRegion {
        let region = RemoteRegion::open(near, Fence::default(), OPTIONS, lease, &self.effects).unwrap();
        if self.way == Way::Native { region } else { region.served() }
    }

    fn server(&self, far: Arc<dyn Link>, peer: [u8; 32]) -> RegionServer {
        RegionServer::open(far, Fence::default(), OPTIONS, peer, self.table.clone(), &self.effects).unwrap()
    }

    /// Runs `body` with a region whose server runs beside it, and gives the server's last word.
    fn with(&self, lease: RegionLease, peer: [u8; 32], body: impl FnOnce(&mut RemoteRegion)) -> Broken {
        let (near, far) = self.link();
        let server = self.server(far, peer);
        let mut region = self.region(near, lease);
        std::thread::scope(|scope| {
            let serving = scope.spawn(|| server.run());
            body(&mut region);
            drop(region);
            serving.join().unwrap()
        })
    }

    fn read(&self, lease: RegionLease, offset: u64, bytes: usize) -> Vec<u8> {
        let mut got = vec![0xee; bytes];
        assert!(self.table.read(lease.handle, offset, &mut got));
        got
    }
}

const READ_ONLY: Rights = Rights { read: true, write: false };
const WRITE_ONLY: Rights = Rights { read: false, write: true };

fn denied(denial: Denial) -> Result<(), TransferError> {
    Err(TransferError::Denied(denial))
}

fn bytes(count: usize, seed: u8) -> Vec<u8> {
    (0..count).map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed).collect()
}

fn what_is_put_is_got(world: &World) {
    let lease = world.lend(4096, 3_000_000, Rights::ALL);
    let ended = world.with(lease, HOLDER, |region| {
        let soon = world.soon();
        // Shorter and longer than a message, at the start, in the middle and at the end of the lease.
        for (offset, count) in [(0, 1), (77, 0), (5, 64 * 1024 - 64), (100_000, 1_000_000), (0, 3_000_000)] {
            let message = bytes(count, offset as u8);
            region.put(offset, &message, soon).unwrap();
            let mut got = vec![0; count];
            region.get(offset, &mut got, soon).unwrap();
            assert!(got == message, "{count} bytes at {offset}");
            assert_eq!(region.way(), world.way);
        }
        let outside = region.put(2_999_999, &[1, 2], soon);
        assert!(matches!(outside, Err(TransferError::Bounds { .. })));
        // What the owner writes is seen.
        assert!(world.table.write(lease.handle, 2_000_000, b"owner"));
        let mut got = [0; 5];
        region.get(2_000_000, &mut got, soon).unwrap();
        assert_eq!(&got, b"owner");
    });
    assert_eq!(ended, Broken::Link(CloseReason::Peer));
    let mut kept = bytes(3_000_000, 0);
    kept[2_000_000..2_000_005].copy_from_slice(b"owner");
    assert!(world.read(lease, 0, 3_000_000) == kept);
}

fn leases_are_apart(world: &World) {
    let leases = [world.lend(0, 5000, Rights::ALL), world.lend(8192, 5000, Rights::ALL), world.lend(16_384, 5000, Rights::ALL)];
    world.with(leases[1], HOLDER, |region| {
        region.put(0, &[7; 5000], world.soon()).unwrap();
    });
    for (lease, value) in leases.into_iter().zip([0, 7, 0]) {
        assert!(world.read(lease, 0, 5000).iter().all(|byte| *byte == value));
    }
}

fn denials_reach_the_holder_and_harm_nothing(world: &World) {
    let soon = world.soon();
    let lease = world.lend(0, 1000, Rights::ALL);
    let read_only = world.lend(4096, 1000, READ_ONLY);
    let write_only = world.lend(8192, 1000, WRITE_ONLY);
    assert!(world.table.write(read_only.handle, 0, b"read me"));
    world.with(lease, HOLDER, |region| {
        let cases = [
            (RegionLease { handle: Handle(1), ..lease }, Denial::NoLease),
            (RegionLease { term: TermTag { counter: 0, node: 9 }, ..lease }, Denial::Superseded),
            (RegionLease { bytes: 2000, ..lease }, Denial::Bounds),
            (read_only, Denial::Rights),
        ];
        for (wrong, denial) in cases {
            region.set_lease(wrong);
            assert_eq!(region.put(0, &bytes(wrong.bytes as usize, 1), soon), denied(denial));
            assert_eq!(region.notify(0, &bytes(wrong.bytes as usize, 1), 1, soon), denied(denial));
        }
        let mut got = [0; 7];
        region.get(0, &mut got, soon).unwrap();
        assert_eq!((&got, region.way()), (b"read me", world.way));
        region.set_lease(write_only);
        region.put(3, b"blind", soon).unwrap();
        assert_eq!(region.get(3, &mut got, soon), denied(Denial::Rights));
        assert_eq!((world.read(write_only, 3, 5), region.way()), (b"blind".to_vec(), Way::Served));
        assert_eq!(world.read(lease, 0, 1000), [0; 1000], "something that was denied was written");
    });
    // Another node that learned the handle gets nothing by it.
    world.with(lease, [2; 32], |region| {
        assert_eq!(region.get(0, &mut [0; 3], soon), denied(Denial::NoLease));
        assert_eq!(region.put(0, &[1; 3], soon), denied(Denial::NoLease));
        assert_eq!(region.notify(0, &[1; 3], 1, soon), denied(Denial::NoLease));
    });
    assert_eq!(world.read(lease, 0, 3), [0; 3]);
}

fn what_has_begun_under_a_lease_ends_with_it(world: &World) {
    let soon = world.soon();
    let lease = world.lend(0, 1000, Rights::ALL);
    world.with(lease, HOLDER, |region| {
        region.put(0, b"first", soon).unwrap();
        // Its deadline passes, and it is renewed.
        world.table.renew(lease.handle, world.effects.clock.now() - Duration::from_secs(1)).unwrap();
        assert_eq!(region.put(0, b"after", soon), denied(Denial::Expired));
        assert_eq!(region.get(0, &mut [0; 5], soon), denied(Denial::Expired));
        assert_eq!(region.notify(0, b"after", 1, soon), denied(Denial::Expired));
        assert_eq!(world.read(lease, 0, 5), b"first");
        world.table.renew(lease.handle, soon).unwrap();
        region.put(0, b"again", soon).unwrap();
        assert_eq!((world.read(lease, 0, 5), region.way()), (b"again".to_vec(), world.way));
        // A deadline that passes by itself, while the region is in use.
        world.table.renew(lease.handle, world.effects.after(Duration::from_millis(30))).unwrap();
        let end = loop {
            if let Err(end) = region.put(0, b"again", soon) {
                break end;
            }
        };
        assert_eq!(end, TransferError::Denied(Denial::Expired));
        world.table.renew(lease.handle, soon).unwrap();
        // A higher term takes it over.
        let term = TermTag { counter: 5, node: 0 };
        region.put(0, b"seven", soon).unwrap();
        world.table.raise_term(lease.handle, term).unwrap();
        assert_eq!(region.put(0, b"stale", soon), denied(Denial::Superseded));
        assert_eq!(region.get(0, &mut [0; 5], soon), denied(Denial::Superseded));
        region.set_lease(RegionLease { term, ..lease });
        let mut got = [0; 5];
        region.get(0, &mut got, soon).unwrap();
        assert_eq!((&got, region.way()), (b"seven", world.way), "what was there stays");
        assert_eq!(world.table.retired_bytes(), 0, "the window of the older term was given up");
        // Its end.
        world.table.revoke(lease.handle, soon).unwrap();
        assert_eq!(region.put(0, b"later", soon), denied(Denial::NoLease));
        assert_eq!(region.get(0, &mut got, soon), denied(Denial::NoLease));
        assert_eq!(world.table.retired_bytes(), 0);
        let next = world.lend(0, 1000, Rights::ALL);
        assert_eq!(world.read(next, 0, 1000), [0; 1000]);
        assert_eq!(region.put(0, b"later", soon), denied(Denial::NoLease));
        assert_eq!(world.read(next, 0, 1000), [0; 1000]);
    });
}

fn a_later_generation_shuts_the_earlier_out(world: &World) {
    let soon = world.soon();
    let lease = world.lend(0, 1000, Rights::ALL);
    let later = RegionLease { generation: 5, ..lease };
    world.with(lease, HOLDER, |old| {
        old.put(0, b"old", soon).unwrap();
        // On another link, as after the first one failed.
        world.with(later, HOLDER, |new| {
            new.put(0, b"new", soon).unwrap();
            assert_eq!((new.way(), old.way()), (world.way, world.way));
            assert_eq!(old.put(0, b"old", soon), denied(Denial::Generation));
            // Reading is no matter of generations.
            let mut got = [0; 3];
            old.get(0, &mut got, soon).unwrap();
            assert_eq!(&got, b"new");
            new.set_lease(RegionLease { generation: 4, ..lease });
            assert_eq!(new.put(0, b"old", soon), denied(Denial::Generation));
            new.set_lease(RegionLease { generation: 6, ..lease });
            new.put(0, b"six", soon).unwrap();
        });
    });
    assert_eq!(world.read(lease, 0, 3), b"six");
    assert_eq!(world.table.retired_bytes(), 0);
}

fn owners_are_told_in_order(world: &World) {
    let soon = world.soon();
    let lease = world.lend(0, 1_000_000, Rights::ALL);
    let (near, far) = world.link();
    let (sender, notices) = notices();
    let server = world.server(far, HOLDER).with_notices(sender);
    let mut region = world.region(near, lease);
    std::thread::scope(|scope| {
        scope.spawn(|| server.run());
        let telling = scope.spawn(move || {
            for number in 0..40u64 {
                // From nothing to more than several messages.
                let count = (number * number * 97) as usize;
                region.notify(number * 100, &bytes(count, number as u8), number, soon).unwrap();
                if number == 20 {
                    region.put(900_000, b"just put", soon).unwrap();
                }
            }
            assert!(matches!(region.notify(999_999, &[0; 2], 0, soon), Err(TransferError::Bounds { .. })));
            region
        });
        for number in 0..40u64 {
            let notice = notices.recv(&*world.effects.clock, soon).unwrap();
            assert_eq!(notice, Notice { handle: lease.handle, offset: number * 100, bytes: number * number * 97, number });
        }
        drop(telling.join().unwrap());
        assert_eq!(notices.recv(&*world.effects.clock, soon), Err(NoticesError::Ended));
    });
    let last = 39 * 39 * 97;
    assert!(world.read(lease, 3900, last) == bytes(last, 39), "the bytes are there when the owner is told");
    assert_eq!(world.read(lease, 900_000, 8), b"just put");
    // Where nobody listens, that is said, and the bytes are there all the same.
    world.with(lease, HOLDER, |region| assert_eq!(region.notify(7, b"deaf", 1, soon), denied(Denial::Deaf)));
    assert_eq!(world.read(lease, 7, 4), b"deaf");
}

fn an_operation_past_its_deadline_ends(world: &World) {
    let lease = world.lend(0, 1000, Rights::ALL);
    let (near, far) = world.link();
    let mut region = world.region(near, lease);
    // Nobody serves.
    let late = world.effects.after(Duration::from_millis(20));
    assert!(matches!(region.get(0, &mut [0; 8], late), Err(TransferError::Recv(_) | TransferError::Send(_))));
    far.close(CloseReason::Local);
    assert!(matches!(region.put(0, &[0; 8], world.soon()), Err(TransferError::Recv(_) | TransferError::Send(_))));
}

/// For each provider a module, with each of the tests above in it.
macro_rules! on {
    ($name:ident, $world:expr $(, $ignored:literal)?) => {
        mod $name {
            use super::*;

            on!($world, [$($ignored)?], what_is_put_is_got, leases_are_apart, denials_reach_the_holder_and_harm_nothing);
            on!($world, [$($ignored)?], what_has_begun_under_a_lease_ends_with_it, a_later_generation_shuts_the_earlier_out);
            on!($world, [$($ignored)?], owners_are_told_in_order, an_operation_past_its_deadline_ends);
        }
    };
    ($world:expr, [], $($test:ident),+) => {
        $(#[test]
        fn $test() {
            super::$test(&$world);
        })+
    };
    ($world:expr, [$ignored:literal], $($test:ident),+) => {
        $(#[test]
        #[ignore = $ignored]
        fn $test() {
            super::$test(&$world);
        })+
    };
}

on!(memory_served, memory());
on!(tcp_served, tcp());
#[cfg(target_os = "linux")]
on!(shm_served, shm(Way::Served));
#[cfg(target_os = "linux")]
on!(shm_native, shm(Way::Native));
#[cfg(target_os = "linux")]
on!(verbs_native, verbs(Way::Native));
#[cfg(target_os = "linux")]
on!(soft_roce_native, soft_roce(crate::provider::verbs::Profile::Rc, Way::Native), "needs devices: run by .ci/verbs");
#[cfg(target_os = "linux")]
on!(soft_roce_served, soft_roce(crate::provider::verbs::Profile::Uc, Way::Served), "needs devices: run by .ci/verbs");

#[test]
fn answers_to_given_up_requests_are_passed_over() {
    let world = memory();
    let lease = world.lend(0, SLAB_BYTES, Rights::ALL);
    world.with(lease, HOLDER, |region| {
        // Gives up while requests are under way, whatever of them was sent.
        for i in 0..20 {
            let late = world.effects.after(Duration::from_micros(i * 20));
            drop(region.get(0, &mut vec![0; 300_000], late));
        }
        let soon = world.soon();
        region.put(10, b"afterwards", soon).unwrap();
        let mut got = [0; 10];
        region.get(10, &mut got, soon).unwrap();
        assert_eq!(&got, b"afterwards");
    });
}

#[test]
fn nonsense_ends_the_link() {
    let world = memory();
    let nonsense = [
        (message::PUT, vec![0; 3]),
        (99, vec![0; 64]),
        (message::GET, vec![0; 65]),
        (message::NOTIFY, vec![0; 64 + 23]),
        (message::WINDOW, vec![0; 64 + 47]),
        (message::WINDOW, vec![0; 64 + 16]),
    ];
    for (kind, message) in nonsense {
        let (near, far) = world.link();
        let server = world.server(far, HOLDER);
        let (mut sender, _receiver) = crate::channel::duplex(near, Fence::default(), OPTIONS, &world.effects).unwrap();
        std::thread::scope(|scope| {
            let serving = scope.spawn(|| server.run());
            sender.send(kind, &[&message], world.soon()).unwrap();
            assert!(matches!(serving.join().unwrap(), Broken::Link(CloseReason::Misbehaved(_))));
        });
    }
}

/// A peer over a network that names a socket of this machine gets nobody to go there.
#[cfg(target_os = "linux")]
#[test]
fn windows_are_for_links_through_shared_memory_only() {
    use crate::provider::shm::window::Waiting;
    for (world, answer) in [(tcp(), message::DONE), (shm(Way::Native), message::HANDED)] {
        let lease = world.lend(0, 1000, Rights::ALL);
        let (near, far) = world.link();
        let server = world.server(far, HOLDER);
        let mut region = world.region(near, lease).served();
        let waiting = Waiting::new(&SystemRng, &*world.effects.clock).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| server.run());
            let head = region.head(0, 0);
            let meeting = waiting.meeting().encode();
            assert_eq!(region.ask(message::WINDOW, &head, &[&meeting], world.soon()), Ok(answer));
            drop(region);
        });
        assert_eq!(waiting.take(1000, &*world.effects.clock).is_ok(), answer == message::HANDED);
    }
}

/// Adapters that promise more than they do.
#[cfg(target_os = "linux")]
#[test]
fn adapters_that_let_nothing_through_are_given_up() {
    let fabric = ReliableFabric::default();
    let world = verbs_on(&fabric, Way::Native);
    let lease = world.lend(0, 100_000, Rights::ALL);
    fabric.let_nothing_through();
    world.with(lease, HOLDER, |region| {
        let soon = world.soon();
        let mut made = Vec::new();
        for round in 0..8 {
            let message = bytes(100_000, round);
            region.put(0, &message, soon).unwrap();
            let mut got = vec![0; 100_000];
            region.get(0, &mut got, soon).unwrap();
            assert!(got == message);
            assert_eq!(region.way(), Way::Served);
            made.push(fabric.made());
        }
        assert!(made[0] > 2 && made[2..].iter().all(|count| *count == made[2]), "{made:?}");
    });
}

/// A holder that is never heard of again after it was lent something, and others who come and go.
#[cfg(target_os = "linux")]
#[test]
fn what_stays_mapped_stays_charged() {
    let world = shm(Way::Native);
    let lease = world.lend(0, SLAB_BYTES, Rights::ALL);
    world.with(lease, HOLDER, |region| {
        region.put(0, b"mapped", world.soon()).unwrap();
        world.table.revoke(lease.handle, world.soon()).unwrap();
        assert_eq!((world.table.lent_bytes(), world.table.retired_bytes()), (0, SLAB_BYTES));
        let term = TermTag { counter: 1, node: 2 };
        let grant = Grant { holder: HOLDER, start: 0, bytes: 1, rights: Rights::ALL, term, deadline: world.soon() };
        assert!(matches!(world.table.grant(grant), Err(GrantError::Charged { bytes: 1, lent: 0, retired: SLAB_BYTES })));
        assert_eq!(region.put(0, b"later", world.soon()), denied(Denial::NoLease));
        assert_eq!(world.table.retired_bytes(), 0, "the holder gave it up when it heard");
        world.table.grant(grant).unwrap();
    });
}

#[derive(Debug, Clone)]
enum Act {
    Put { lease: usize, offset: u64, count: usize, term: u64, generation: u64 },
    Get { lease: usize, offset: u64, count: usize, term: u64 },
    Notify { lease: usize, offset: u64, count: usize, number: u64 },
    Lend { lease: usize, rights: usize },
    Revoke(usize),
    Expire(usize),
    Renew(usize),
    Raise { lease: usize, term: u64 },
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let lease = 0usize..3;
    let range = (0u64..9000, 0usize..9000);
    let act = prop_oneof![
        6 => (lease.clone(), range.clone(), 1u64..4, 0u64..3)
            .prop_map(|(lease, (offset, count), term, generation)| Act::Put { lease, offset, count, term, generation }),
        6 => (lease.clone(), range.clone(), 1u64..4).prop_map(|(lease, (offset, count), term)| Act::Get { lease, offset, count, term }),
        2 => (lease.clone(), range, 0u64..100).prop_map(|(lease, (offset, count), number)| Act::Notify { lease, offset, count, number }),
        3 => (lease.clone(), 0usize..4).prop_map(|(lease, rights)| Act::Lend { lease, rights }),
        1 => lease.clone().prop_map(Act::Revoke),
        1 => lease.clone().prop_map(Act::Expire),
        2 => lease.clone().prop_map(Act::Renew),
        1 => (lease, 1u64..4).prop_map(|(lease, term)| Act::Raise { lease, term }),
    ];
    prop::collection::vec(act, 1..60)
}

/// What came of each act, and what is in each lease afterwards.
fn play(world: &World, acts: &[Act]) -> Vec<String> {
    let (near, far) = world.link();
    let (sender, notices) = notices();
    let server = world.server(far, HOLDER).with_notices(sender);
    let nobody = RegionLease { handle: Handle(0), bytes: 8500, term: TermTag::default(), generation: 0 };
    let mut region = world.region(near, nobody);
    let mut leases = [nobody; 3];
    let soon = world.soon();
    let term = |counter| TermTag { counter, node: 0 };
    std::thread::scope(|scope| {
        scope.spawn(|| server.run());
        let outcomes = acts.iter().enumerate().map(|(i, act)| match *act {
            Act::Put { lease, offset, count, term: counter, generation } => {
                region.set_lease(RegionLease { term: term(counter), generation, ..leases[lease] });
                format!("{:?}", region.put(offset, &bytes(count, i as u8), soon))
            }
            Act::Get { lease, offset, count, term: counter } => {
                region.set_lease(RegionLease { term: term(counter), ..leases[lease] });
                let mut got = vec![0; count];
                let outcome = region.get(offset, &mut got, soon);
                let got = if outcome.is_ok() { blake3::hash(&got) } else { blake3::hash(&[]) };
                format!("{outcome:?} {got}")
            }
            Act::Notify { lease, offset, count, number } => {
                region.set_lease(RegionLease { term: term(3), generation: 2, ..leases[lease] });
                let outcome = region.notify(offset, &bytes(count, i as u8), number, soon);
                let told = outcome.is_ok().then(|| notices.recv(&*world.effects.clock, soon).unwrap());
                format!("{outcome:?} {:?}", told.map(|told| (told.offset, told.bytes, told.number)))
            }
            Act::Lend { lease, rights } => {
                let rights = [Rights::ALL, Rights::ALL, READ_ONLY, WRITE_ONLY][rights];
                let grant = Grant { holder: HOLDER, start: lease as u64 * 16_384, bytes: 8500, rights, term: term(1), deadline: soon };
                match world.table.grant(grant) {
                    Ok(handle) => {
                        leases[lease].handle = handle;
                        assert!(world.table.write(handle, 0, &bytes(8500, lease as u8)));
                        "lent".to_owned()
                    }
                    Err(error) => matches!(error, GrantError::Taken { .. }).to_string(),
                }
            }
            Act::Revoke(lease) => format!("{:?}", same(world.table.revoke(leases[lease].handle, soon))),
            Act::Expire(lease) => format!("{:?}", same(world.table.renew(leases[lease].handle, world.effects.clock.now()))),
            Act::Renew(lease) => format!("{:?}", same(world.table.renew(leases[lease].handle, soon))),
            Act::Raise { lease, term: counter } => format!("{:?}", same(world.table.raise_term(leases[lease].handle, term(counter)))),
        });
        let mut outcomes: Vec<String> = outcomes.collect();
        for lease in leases {
            let mut all = vec![0; 8500];
            let there = world.table.read(lease.handle, 0, &mut all);
            outcomes.push(format!("{there} {}", blake3::hash(&all)));
        }
        drop(region);
        outcomes
    })
}

/// Handles differ from world to world.
fn same(outcome: Result<(), RevokeError>) -> bool {
    outcome.is_ok()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Whatever is asked for, in whatever order: every provider and every way gives the same bytes and the same denials.
    #[test]
    fn all_ways_mean_the_same(acts in acts()) {
        let expected = play(&memory(), &acts);
        prop_assert_eq!(&play(&tcp(), &acts), &expected);
        #[cfg(target_os = "linux")]
        {
            prop_assert_eq!(&play(&shm(Way::Served), &acts), &expected);
            prop_assert_eq!(&play(&shm(Way::Native), &acts), &expected);
            prop_assert_eq!(&play(&verbs(Way::Native), &acts), &expected);
        }
    }
}
