//! What programs that embed a node rely on; and the example does what it shows.

#![allow(clippy::print_stdout)]

use std::net::SocketAddr;
use std::time::Duration;

use shoal::{LeaseFailure, Node, NodeBuilder};

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
    assert_eq!((lease.owner(), lease.bytes(), lease.is_usable()), (large.id(), 20_000_000, true));
    let lent = large.leases();
    assert_eq!((lent.totals.used, lent.leases[0].holder, lent.leases[0].id), (20_000_000, small.id(), lease.id()));
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
