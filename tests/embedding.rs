//! What programs that embed a node rely on; and the example does what it shows.

#![allow(clippy::print_stdout)]

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use shoal::pressure::{MemoryGauge, Reading};
use shoal::{LeaseFailure, Node, NodeBuilder, ProviderKind, REGION_UNIT, RegionError};

#[path = "../examples/own_service.rs"]
mod own_service;

#[test]
fn an_own_service_is_called_and_memory_is_lent() {
    own_service::main().expect("the example ends well");
}

fn quiet() -> NodeBuilder {
    let local = SocketAddr::from(([127, 0, 0, 1], 0));
    Node::builder().in_memory().mdns(false).beacon(false).listen(vec![local]).tensor_listen(vec![local]).threads(1)
}

async fn wait_until(what: &str, ready: impl Fn() -> bool) {
    let waited = async {
        while !ready() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waited).await.unwrap_or_else(|_| panic!("{what}: not in time"));
}

#[tokio::test]
async fn memory_comes_from_who_has_it_and_goes_back() {
    let small = quiet().memory(10_000_000).start().await.expect("starts");
    let large = quiet().memory(50_000_000).peers(small.network().listening()).start().await.expect("starts");
    wait_until("they see each other", || small.view().card(large.id()).is_some()).await;

    let pool = small.pool("a test");
    let lease = pool.lease(20_000_000, None).await.expect("the large one has it");
    assert_eq!((lease.owner(), lease.is_usable()), (large.id(), true));
    assert_eq!(lease.bytes(), 20_004_864, "whole units of 16 KiB");
    let lent = large.leases();
    assert_eq!((lent.totals.used, lent.leases[0].holder, lent.leases[0].id), (lease.bytes(), small.id(), lease.id()));
    assert!(lent.leases[0].beneficiary.to_string().contains("a test"));

    let refused = pool.lease(40_000_000, Some(large.id())).await.expect_err("it has lent half of it");
    assert!(matches!(&refused, LeaseFailure::Refused(_)) && refused.to_string().contains("40.0 MB"), "{refused}");
    let refused = pool.lease(1_000_000_000, None).await.expect_err("nobody has that much");
    assert!(matches!(refused, LeaseFailure::NobodyHas { asked: 1_000_000_000, .. }), "{refused}");

    drop(lease);
    wait_until("what is dropped goes back", || large.leases().totals.used == 0).await;
    let lease = pool.lease(1_000_000, Some(small.id())).await.expect("its own memory");
    lease.release().await;
    assert_eq!(small.leases().totals.used, 0);

    let kept = pool.lease(1_000_000, Some(large.id())).await.expect("lent");
    large.leave().await;
    wait_until("who left lends nothing", || !kept.is_usable()).await;
    drop(kept);
    small.leave().await;
}

/// Two nodes that see each other, linked by these providers.
async fn pair(kinds: Option<Vec<ProviderKind>>) -> [Node; 2] {
    let with = |builder: NodeBuilder| match &kinds {
        Some(kinds) => builder.tensor_links(kinds.clone()),
        None => builder,
    };
    let near = with(quiet().memory(10_000_000)).start().await.expect("starts");
    let far = with(quiet().memory(50_000_000).peers(near.network().listening())).start().await.expect("starts");
    wait_until("they see each other", || near.view().card(far.id()).is_some()).await;
    [near, far]
}

#[tokio::test]
async fn leased_memory_is_written_and_read_from_afar() {
    // Whatever both have, and the network alone.
    for kinds in [None, Some(vec![ProviderKind::Tcp])] {
        let [near, far] = pair(kinds).await;
        let pool = near.pool("a test");
        for owner in [far.id(), near.id()] {
            let one = pool.lease(3_000_000, Some(owner)).await.expect("lent");
            let two = pool.lease(1, Some(owner)).await.expect("lent");
            assert_eq!(two.bytes(), REGION_UNIT);
            assert_eq!(one.get(1000, 50).await.expect("fresh memory"), [0; 50]);
            let long: Vec<u8> = (0..2_500_000_u32).map(|i| (i * 31 % 251) as u8).collect();
            one.put(400_001, long.clone()).await.expect("written");
            two.put(0, *b"other").await.expect("written");
            assert_eq!(one.get(400_001, long.len()).await.expect("read"), long);
            assert_eq!(two.get(0, 5).await.expect("read"), b"other");
            let end = one.bytes();
            for (offset, bytes) in [(end, 1), (end - 1, 2), (u64::MAX, 1), (0, usize::MAX)] {
                let error = one.get(offset, bytes).await.expect_err("outside of the lease");
                assert!(error.to_string().contains("reach outside"), "{error}");
            }
            let error = one.put(end - 1, [1, 2]).await.expect_err("outside of the lease");
            assert!(error.to_string().contains("reach outside"), "{error}");
            one.put(end - 1, [9]).await.expect("the last byte is inside");
            one.release().await;
            // Memory that is lent again is fresh.
            let again = pool.lease(3_000_000, Some(owner)).await.expect("lent again");
            assert_eq!(again.get(400_001, 1000).await.expect("read"), [0; 1000]);
        }
        far.leave().await;
        near.leave().await;
    }
}

#[tokio::test]
async fn a_lease_that_was_taken_back_is_out_of_reach_and_its_memory_is_free() {
    let [near, far] = pair(None).await;
    let pool = near.pool("a test");
    let kept = pool.lease(1_000_000, Some(far.id())).await.expect("lent");
    let lease = pool.lease(1_000_000, Some(far.id())).await.expect("lent");
    kept.put(0, [1, 2, 3]).await.expect("written");
    lease.put(0, [4, 5, 6]).await.expect("written");
    far.revoke(lease.id(), "it is needed here");
    wait_until("the holder hears it", || !lease.is_usable()).await;
    for error in [lease.put(0, [7]).await.expect_err("revoked"), lease.get(0, 1).await.map(drop).expect_err("revoked")] {
        assert!(matches!(error, RegionError::Ended { .. } | RegionError::Transfer(_)), "{error}");
    }
    wait_until("it is free again", || far.leases().totals.used == kept.bytes()).await;
    assert_eq!(kept.get(0, 3).await.expect("read"), [1, 2, 3]);
    far.leave().await;
    let error = kept.get(0, 3).await.expect_err("its owner is gone");
    assert!(!error.to_string().is_empty());
    near.leave().await;
}

/// A machine on which other programs use what a test says.
#[derive(Debug)]
struct Played(Mutex<Reading>);

impl MemoryGauge for Played {
    fn read(&self) -> Option<Reading> {
        Some(*self.0.lock().expect("not poisoned"))
    }
}

#[tokio::test]
async fn a_node_gives_back_what_other_programs_need() {
    let left = |available_bytes| Reading { total_bytes: 2 << 30, available_bytes, resident_bytes: Some(0) };
    let gauge = Arc::new(Played(Mutex::new(left(1 << 30))));
    let near = quiet().memory(10_000_000).start().await.expect("starts");
    let far = quiet().memory(256 << 20).memory_gauge(gauge.clone()).peers(near.network().listening()).start().await.expect("starts");
    let offered = || near.view().card(far.id()).map(|card| (card.memory_offered_bytes, card.memory_free_bytes));
    wait_until("they see each other", || offered() == Some((256 << 20, 256 << 20))).await;
    let lease = near.pool("a test").lease(64 << 20, Some(far.id())).await.expect("lent");
    lease.put(0, *b"the sea").await.expect("written");

    // Others take so much that 100 MiB could still be promised: what is lent stays lent, and no more is.
    *gauge.0.lock().expect("not poisoned") = left(164 << 20);
    wait_until("less is offered", || offered() == Some((100 << 20, 36 << 20))).await;
    assert!(far.troubles().iter().any(|trouble| trouble.about == "memory" && trouble.what.contains("268 MB")), "{:?}", far.troubles());
    assert_eq!(lease.get(0, 7).await.expect("read"), b"the sea");

    // The machine runs out: what is lent goes back.
    *gauge.0.lock().expect("not poisoned") = left(10 << 20);
    wait_until("the lease ends", || !lease.is_usable()).await;
    let denied = lease.get(0, 7).await.expect_err("it is not lent any more");
    assert!(denied.to_string().contains("offers only"), "{denied}");
    wait_until("it is free", || far.leases().totals.used == 0).await;
    for node in [near, far] {
        node.leave().await;
    }
}
