use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::Effects;
use crate::access::{AccessTable, Grant, Rights};
use crate::channel::{Broken, ChannelOptions};
use crate::env::SystemRng;
use crate::frame::{Fence, TermTag};
use crate::link::{CloseReason, Link, LinkOptions};
use crate::provider::memory::{MemoryFabric, MemoryProvider, Shape};
use crate::provider::tcp::{TcpOptions, TcpProvider};
use crate::provider::{Provider, Ticket};
use crate::testing::{effects, soon};

const HOLDER: [u8; 32] = [1; 32];
const OPTIONS: ChannelOptions = ChannelOptions { slot_bytes: 64 * 1024, slots: 3 };
const SLAB_BYTES: u64 = 4 * 1024 * 1024;

struct World {
    effects: Effects,
    near: Box<dyn Provider>,
    far: Box<dyn Provider>,
    table: AccessTable,
    slab: Slab,
}

fn world(near: Box<dyn Provider>, far: Box<dyn Provider>, effects: Effects) -> World {
    let table = AccessTable::new(effects.clone(), SLAB_BYTES);
    World { near, far, table, slab: Slab::new(SLAB_BYTES).unwrap(), effects }
}

fn memory() -> World {
    let effects = effects();
    let fabric = MemoryFabric::new(&SystemRng, Shape::default());
    let join = || Box::new(MemoryProvider::new(effects.clone(), &fabric));
    world(join(), join(), effects)
}

fn tcp() -> World {
    let effects = effects();
    let start = || {
        let options =
            TcpOptions { listen: vec!["127.0.0.1:0".parse().unwrap()], silence_max: Duration::from_secs(60), ..TcpOptions::default() };
        Box::new(TcpProvider::new(effects.clone(), options).unwrap())
    };
    world(start(), start(), effects)
}

impl World {
    fn link(&self) -> (Arc<dyn Link>, Arc<dyn Link>) {
        let ticket = Ticket::random(&SystemRng);
        let options = LinkOptions::for_payload(OPTIONS.slot_bytes);
        let expected = self.far.expect(&ticket, options).unwrap();
        let near = self.near.dial(&self.far.endpoints()[0], &ticket, options, soon(&self.effects)).unwrap();
        (near, expected.accept(soon(&self.effects)).unwrap())
    }

    fn lend(&self, start: u64, bytes: u64, rights: Rights) -> RegionLease {
        let term = TermTag { counter: 1, node: 2 };
        let grant = Grant { holder: HOLDER, start, bytes, rights, term, deadline: soon(&self.effects) };
        RegionLease { handle: self.table.grant(grant).unwrap(), bytes, term, generation: 0 }
    }

    /// Runs `body` with a region whose server runs beside it, and gives the server's last word.
    fn with(&self, lease: RegionLease, peer: [u8; 32], body: impl FnOnce(&mut RemoteRegion)) -> Broken {
        let (near, far) = self.link();
        let (table, slab) = (self.table.clone(), self.slab.clone());
        let server = RegionServer::open(far, Fence::default(), OPTIONS, peer, table, slab, &self.effects).unwrap();
        let mut region = RemoteRegion::open(near, Fence::default(), OPTIONS, lease, &self.effects).unwrap();
        std::thread::scope(|scope| {
            let serving = scope.spawn(|| server.run());
            body(&mut region);
            drop(region);
            serving.join().unwrap()
        })
    }
}

fn bytes(count: usize, seed: u8) -> Vec<u8> {
    (0..count).map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed).collect()
}

fn what_is_put_is_got(world: &World) {
    let lease = world.lend(1000, 3_000_000, Rights::ALL);
    let ended = world.with(lease, HOLDER, |region| {
        let soon = soon(&world.effects);
        // Shorter and longer than a message, at the start, in the middle and at the end of the lease.
        for (offset, count) in [(0, 1), (77, 0), (5, 64 * 1024 - 64), (100_000, 1_000_000), (0, 3_000_000)] {
            let message = bytes(count, offset as u8);
            region.put(offset, &message, soon).unwrap();
            let mut got = vec![0; count];
            region.get(offset, &mut got, soon).unwrap();
            assert!(got == message, "{count} bytes at {offset}");
        }
        let outside = region.put(2_999_999, &[1, 2], soon);
        assert!(matches!(outside, Err(TransferError::Bounds { .. })));
    });
    assert_eq!(ended, Broken::Link(CloseReason::Peer));
    let mut kept = vec![0; 3_000_000];
    assert!(world.slab.read(1000, &mut kept) && kept == bytes(3_000_000, 0));
    let mut around = [9; 1000];
    assert!(world.slab.read(0, &mut around) && around == [0; 1000], "bytes before the lease were touched");
}

fn denials_reach_the_client_and_harm_nothing(world: &World) {
    let soon = soon(&world.effects);
    let lease = world.lend(0, 1000, Rights::ALL);
    let read_only = world.lend(1000, 1000, Rights { read: true, write: false });
    world.with(lease, HOLDER, |region| {
        let cases = [
            (RegionLease { handle: crate::access::Handle(1), ..lease }, Denial::NoLease),
            (RegionLease { term: TermTag { counter: 0, node: 9 }, ..lease }, Denial::Superseded),
            (RegionLease { bytes: 2000, ..lease }, Denial::Bounds),
            (read_only, Denial::Rights),
        ];
        for (wrong, denial) in cases {
            region.set_lease(wrong);
            assert_eq!(region.put(0, &bytes(wrong.bytes as usize, 1), soon), Err(TransferError::Denied(denial)));
        }
        region.set_lease(RegionLease { generation: 5, ..lease });
        region.put(0, b"new", soon).unwrap();
        region.set_lease(RegionLease { generation: 4, ..lease });
        assert_eq!(region.put(0, b"old", soon), Err(TransferError::Denied(Denial::Generation)));
        let mut got = [0; 3];
        region.get(0, &mut got, soon).unwrap();
        assert_eq!(&got, b"new");
        world.table.revoke(lease.handle, soon).unwrap();
        assert_eq!(region.get(0, &mut got, soon), Err(TransferError::Denied(Denial::NoLease)));
    });
    let lease = world.lend(0, 1000, Rights::ALL);
    // Another node that learned the handle gets nothing by it.
    world.with(lease, [2; 32], |region| {
        assert_eq!(region.get(0, &mut [0; 3], soon), Err(TransferError::Denied(Denial::NoLease)));
    });
    world.table.renew(lease.handle, world.effects.clock.now() - Duration::from_secs(1)).unwrap();
    world.with(lease, HOLDER, |region| {
        assert_eq!(region.get(0, &mut [0; 3], soon), Err(TransferError::Denied(Denial::Expired)));
    });
}

#[test]
fn memory_put_and_get() {
    what_is_put_is_got(&memory());
}

#[test]
fn tcp_put_and_get() {
    what_is_put_is_got(&tcp());
}

#[test]
fn memory_denials() {
    denials_reach_the_client_and_harm_nothing(&memory());
}

#[test]
fn tcp_denials() {
    denials_reach_the_client_and_harm_nothing(&tcp());
}

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
        let soon = soon(&world.effects);
        region.put(10, b"afterwards", soon).unwrap();
        let mut got = [0; 10];
        region.get(10, &mut got, soon).unwrap();
        assert_eq!(&got, b"afterwards");
    });
}

#[test]
fn nonsense_ends_the_link() {
    let world = memory();
    for (kind, message) in [(PUT_KIND, &[0; 3][..]), (99, &[0; 64]), (GET_KIND, &[0; 65])] {
        let (near, far) = world.link();
        let (table, slab) = (world.table.clone(), world.slab.clone());
        let server = RegionServer::open(far, Fence::default(), OPTIONS, HOLDER, table, slab, &world.effects).unwrap();
        let (mut sender, _receiver) = crate::channel::duplex(near, Fence::default(), OPTIONS, &world.effects).unwrap();
        std::thread::scope(|scope| {
            let serving = scope.spawn(|| server.run());
            sender.send(kind, &[message], soon(&world.effects)).unwrap();
            assert!(matches!(serving.join().unwrap(), Broken::Link(CloseReason::Misbehaved(_))));
        });
    }
}

const PUT_KIND: u8 = message::PUT;
const GET_KIND: u8 = message::GET;
