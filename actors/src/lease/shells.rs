//! The actors on nodes of one process, under a clock that the test moves.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::oneshot;

use super::error::{AcquireError, LeaseError, LostReason};
use super::leases::FenceHolds;
use super::types::{Beneficiary, EndReason, LeaseSpec, LeaseState, LeaseUse, Purpose};
use super::wire::{LeaseReply, LeaseRequest};
use super::{LeaseKeeper, LeaseKeeperActor, LeaseKeeperArguments, Leases, LeasesActor, LeasesArguments, timing};
use crate::card::{DeviceCard, ModelCard};
use crate::env::{
    BoxFuture, Clock, Compute, ComputeError, Env, Instant, MemoryStorage, NetworkConfig, NetworkEvent, SystemRng, SystemSpawner, TextModel,
};
use crate::ids::{Incarnation, InstanceId, LeaseId, NodeId, Term};
use crate::network::{MemoryExchange, MemoryNetwork};
use crate::secret::Identity;
use crate::service::{Services, ServicesLimits};
use shoal_engine::stage::{Stage, StageOptions, StageSpec};

const MB: u64 = 1_000_000;

/// Somebody who sleeps until a moment.
type Sleeper = (Instant, oneshot::Sender<()>);

#[derive(Debug, Default)]
struct TestClock {
    state: Mutex<(u64, Vec<Sleeper>)>,
}

impl Clock for TestClock {
    fn now(&self) -> Instant {
        Instant::from_nanos(self.state.lock().unwrap().0)
    }

    fn sleep_until(&self, deadline: Instant) -> BoxFuture<'static, ()> {
        let (wake, woken) = oneshot::channel();
        let mut state = self.state.lock().unwrap();
        if deadline > Instant::from_nanos(state.0) {
            state.1.push((deadline, wake));
        }
        Box::pin(async move {
            let _ = woken.await;
        })
    }
}

/// Lets every task run until none has anything to do.
async fn settle() {
    for _ in 0..300 {
        tokio::task::yield_now().await;
    }
}

impl TestClock {
    /// Moves on in small steps, so that alarms come in their order.
    async fn advance(&self, by: Duration) {
        let end = self.now() + by;
        while self.now() < end {
            settle().await;
            {
                let mut state = self.state.lock().unwrap();
                state.0 += 50_000_000;
                let now = Instant::from_nanos(state.0);
                state.1.retain(|(deadline, _)| *deadline > now);
            }
            settle().await;
        }
    }
}

#[derive(Debug)]
struct NoCompute;

impl NoCompute {
    fn no<T>() -> Result<T, ComputeError> {
        Err(ComputeError { reason: "there is no device here".to_owned() })
    }
}

impl Compute for NoCompute {
    fn devices(&self) -> Vec<DeviceCard> {
        Vec::new()
    }

    fn model_card(&self, _: &Path) -> Result<ModelCard, ComputeError> {
        Self::no()
    }

    fn text(&self, _: &Path) -> Result<Arc<dyn TextModel>, ComputeError> {
        Self::no()
    }

    fn load(&self, _: &Path, _: &StageSpec, _: &StageOptions) -> Result<Box<dyn Stage>, ComputeError> {
        Self::no()
    }
}

type Fences = Arc<Mutex<BTreeMap<LeaseId, FenceHolds>>>;

struct TestNode {
    id: NodeId,
    services: Services,
    leases: Leases,
    keeper: LeaseKeeper,
    /// Fences that wait for the test; none if they hold at once.
    fences: Option<Fences>,
}

struct Cluster {
    clock: Arc<TestClock>,
    exchange: MemoryExchange,
    nodes: Vec<TestNode>,
}

impl Cluster {
    async fn new(offers: &[u64], hold_fences: bool) -> Self {
        let mut cluster = Self { clock: Arc::new(TestClock::default()), exchange: MemoryExchange::default(), nodes: vec![] };
        for (n, &offer) in offers.iter().enumerate() {
            let identity = Identity::from_seed([n as u8 + 1; 32]);
            let node = cluster.start(identity, offer, hold_fences).await;
            cluster.nodes.push(node);
        }
        cluster.nodes.sort_by_key(|node| node.id);
        settle().await;
        for node in &cluster.nodes {
            assert_eq!(node.services.connected().len(), offers.len() - 1, "all are connected");
        }
        cluster
    }

    async fn start(&self, identity: Identity, offer: u64, hold_fences: bool) -> TestNode {
        let id = identity.node();
        let clock: Arc<dyn Clock> = self.clock.clone();
        let env = Env {
            clock: clock.clone(),
            rng: Arc::new(SystemRng),
            spawner: Arc::new(SystemSpawner::new(tokio::runtime::Handle::current())),
            network: Arc::new(MemoryNetwork::new(self.exchange.clone())),
            storage: Arc::new(MemoryStorage::default()),
            compute: Arc::new(NoCompute),
        };
        let services = Services::new(id, clock.clone(), ServicesLimits::default());
        let config = NetworkConfig {
            identity,
            cluster: None,
            listen: vec![],
            mdns: true,
            clock: clock.clone(),
            rng: env.rng.clone(),
            spawner: env.spawner.clone(),
        };
        let found = Arc::new(Mutex::new(Vec::new()));
        let (routed, noted) = (services.clone(), found.clone());
        let sink = Arc::new(move |event: NetworkEvent| {
            if let NetworkEvent::Discovered { peer, addresses } = &event {
                noted.lock().unwrap().push((*peer, addresses.clone()));
            }
            routed.on_event(&event);
        });
        let network = env.network.start(config, sink).await.expect("starts");
        services.attach(network.clone());
        for (peer, addresses) in found.lock().unwrap().drain(..) {
            network.dial(Some(peer), addresses[0]);
        }
        let fences: Option<Fences> = hold_fences.then(Fences::default);
        let waiting = fences.clone();
        let leases = Leases::new(id, Incarnation(1), offer, clock.clone());
        let arguments = LeasesArguments {
            handle: leases.clone(),
            env: env.clone(),
            services: services.clone(),
            on_fence: Arc::new(move |lease, holds| match &waiting {
                Some(fences) => drop(fences.lock().unwrap().insert(lease, holds)),
                None => holds(),
            }),
            on_renew: Arc::new(|_, _| {}),
            on_term: Arc::new(|_, _| {}),
        };
        LeasesActor::start(arguments, None).await.expect("starts");
        let keeper = LeaseKeeper::new(clock, services.clone());
        LeaseKeeperActor::start(LeaseKeeperArguments { handle: keeper.clone(), env }, None).await.expect("starts");
        TestNode { id, services, leases, keeper, fences }
    }

    fn spec(&self, holder: usize, lease: u128, bytes: u64) -> LeaseSpec {
        LeaseSpec {
            id: LeaseId(lease),
            beneficiary: Beneficiary::Instance(InstanceId(7)),
            purpose: Purpose::Weights,
            bytes,
            term: Term { counter: 1, node: self.nodes[holder].id },
            members: self.nodes.iter().map(|node| node.id).collect(),
            stage: Some(0..3),
        }
    }

    fn used(&self) -> Vec<u64> {
        self.nodes.iter().map(|node| node.leases.totals().used / MB).collect()
    }
}

#[tokio::test]
async fn a_set_is_leased_used_renewed_and_given_back() {
    let cluster = Cluster::new(&[100 * MB, 100 * MB, 100 * MB], false).await;
    let [a, b, c] = &cluster.nodes[..] else { panic!() };
    let wanted = vec![(c.id, cluster.spec(0, 1, 30 * MB)), (a.id, cluster.spec(0, 2, 20 * MB)), (b.id, cluster.spec(0, 3, 10 * MB))];
    let grants = a.keeper.acquire_all(wanted).await.expect("there is room");
    assert_eq!(grants.iter().map(|g| (g.owner, g.lease.0)).collect::<Vec<_>>(), [(c.id, 1), (a.id, 2), (b.id, 3)]);
    assert_eq!(cluster.used(), [20, 10, 30]);
    assert!(c.leases.check(a.id, &LeaseUse::from(&grants[0])).is_ok());
    assert!(matches!(c.leases.check(b.id, &LeaseUse::from(&grants[0])), Err(LeaseError::WrongHolder { .. })));

    // Far past the time to live it is still there, because it is renewed.
    cluster.clock.advance(timing::TTL * 3).await;
    assert!(a.keeper.may_use(LeaseId(1)) && a.keeper.may_use(LeaseId(2)));
    let LeaseReply::View(view) = b.services.remote::<Leases>(c.id).call(LeaseRequest::List, timing::CALL_DEADLINE).await.expect("answers")
    else {
        panic!()
    };
    assert_eq!(view, c.leases.view());
    assert_eq!((view.leases[0].holder, &view.leases[0].state), (a.id, &LeaseState::Granted));

    a.keeper.release(&[LeaseId(1), LeaseId(3)]).await;
    assert_eq!(cluster.used(), [20, 0, 0]);
    assert!(!a.keeper.may_use(LeaseId(1)));
    a.keeper.stop().await;
    assert_eq!(cluster.used(), [0, 0, 0]);
    assert_eq!(a.keeper.acquire_all(vec![(b.id, cluster.spec(0, 9, MB))]).await, Err(AcquireError::Stopped));
}

#[tokio::test]
async fn when_one_refuses_all_is_given_back() {
    let cluster = Cluster::new(&[100 * MB, 100 * MB, 10 * MB], false).await;
    let short = cluster.nodes.iter().position(|n| n.leases.totals().offered == 10 * MB).expect("one");
    let holder = (short + 1) % 3;
    let wanted = cluster.nodes.iter().enumerate().map(|(n, node)| (node.id, cluster.spec(holder, n as u128, 30 * MB))).collect();
    let error = cluster.nodes[holder].keeper.acquire_all(wanted).await.expect_err("one is too small");
    let AcquireError::Refused { node, why: LeaseError::OutOfMemory { free, .. }, .. } = &error else { panic!("{error}") };
    assert_eq!((*node, *free), (cluster.nodes[short].id, 10 * MB));
    settle().await;
    assert_eq!(cluster.used(), [0, 0, 0]);
}

#[tokio::test]
async fn whoever_stops_waiting_holds_nothing() {
    let cluster = Cluster::new(&[100 * MB, 100 * MB], false).await;
    for rounds in [0, 1, 3, 8, 20, 300] {
        let keeper = cluster.nodes[0].keeper.clone();
        let wanted = vec![
            (cluster.nodes[0].id, cluster.spec(0, 10 * rounds, 30 * MB)),
            (cluster.nodes[1].id, cluster.spec(0, 10 * rounds + 1, 30 * MB)),
        ];
        let mut future = Box::pin(keeper.acquire_all(wanted));
        // Begun, and dropped at some point on the way.
        assert!(futures::poll!(future.as_mut()).is_pending());
        for _ in 0..rounds {
            tokio::task::yield_now().await;
        }
        drop(future);
        cluster.clock.advance(Duration::from_secs(1)).await;
        assert_eq!(cluster.used(), [0, 0], "after {rounds} rounds");
        assert!(cluster.nodes[0].keeper.held().is_empty());
    }
}

#[tokio::test]
async fn memory_is_lent_again_only_when_the_fence_holds() {
    let cluster = Cluster::new(&[100 * MB, 100 * MB], true).await;
    let [a, b] = &cluster.nodes[..] else { panic!() };
    a.keeper.acquire_all(vec![(b.id, cluster.spec(0, 1, 80 * MB))]).await.expect("there is room");
    a.keeper.release(&[LeaseId(1)]).await;
    assert_eq!(b.leases.totals().fenced, 80 * MB);
    let keeper = a.keeper.clone();
    let next = cluster.spec(0, 2, 80 * MB);
    let id = b.id;
    let waiting = tokio::spawn(async move { keeper.acquire_all(vec![(id, next)]).await });
    cluster.clock.advance(Duration::from_secs(1)).await;
    assert!(!waiting.is_finished());
    let holds = b.fences.as_ref().expect("held").lock().unwrap().remove(&LeaseId(1)).expect("asked for");
    holds();
    settle().await;
    assert_eq!(waiting.await.expect("runs").expect("now there is room").len(), 1);
    // Whoever drops the word instead of saying it leaves the memory charged.
    a.keeper.release(&[LeaseId(2)]).await;
    drop(b.fences.as_ref().expect("held").lock().unwrap().remove(&LeaseId(2)).expect("asked for"));
    cluster.clock.advance(timing::TTL * 2).await;
    assert_eq!(b.leases.totals().fenced, 80 * MB);
}

#[tokio::test]
async fn a_cut_ends_a_lease_on_both_sides() {
    let cluster = Cluster::new(&[100 * MB, 100 * MB], false).await;
    let [a, b] = &cluster.nodes[..] else { panic!() };
    a.keeper.acquire_all(vec![(b.id, cluster.spec(0, 1, 80 * MB)), (a.id, cluster.spec(0, 2, MB))]).await.expect("there is room");
    let lost = Arc::new(Mutex::new(Vec::new()));
    let heard = lost.clone();
    a.keeper.on_lost(Box::new(move |lease| heard.lock().unwrap().push(lease.clone())));
    cluster.exchange.cut(a.id, b.id);
    cluster.clock.advance(timing::TTL).await;
    let gone = lost.lock().unwrap().clone();
    assert_eq!(gone.iter().map(|l| (l.lease, l.reason.clone())).collect::<Vec<_>>(), [(LeaseId(1), LostReason::TimedOut)]);
    assert!(!a.keeper.may_use(LeaseId(1)) && a.keeper.may_use(LeaseId(2)), "its own goes on");
    assert_eq!(gone[0].to_string(), format!("80.0 MB of node {:?} for weights are lost: the owner answered no renewal in time", b.id));
    cluster.clock.advance(timing::SWEEP).await;
    assert_eq!(b.leases.totals().used, 0);
}

#[tokio::test]
async fn what_an_owner_takes_back_is_heard_at_once_and_a_claim_takes_over() {
    let cluster = Cluster::new(&[100 * MB, 100 * MB], false).await;
    let [a, b] = &cluster.nodes[..] else { panic!() };
    a.keeper.acquire_all(vec![(b.id, cluster.spec(0, 1, 50 * MB)), (b.id, cluster.spec(0, 2, 30 * MB))]).await.expect("there is room");
    let lost = Arc::new(Mutex::new(Vec::new()));
    let heard = lost.clone();
    a.keeper.on_lost(Box::new(move |lease| heard.lock().unwrap().push((lease.lease, lease.reason.clone()))));
    b.leases.revoke(LeaseId(1), "somebody needs it");
    settle().await;
    let reason = LostReason::Ended(EndReason::Revoked("somebody needs it".to_owned()));
    assert_eq!(*lost.lock().unwrap(), [(LeaseId(1), reason)]);

    let term = Term { counter: 2, node: b.id };
    let claimed = b.keeper.claim(b.id, InstanceId(7), term, vec![b.id]).await.expect("a member may");
    assert_eq!(claimed.len(), 1);
    settle().await;
    assert!(b.keeper.may_use(LeaseId(2)));
    cluster.clock.advance(timing::TTL).await;
    assert!(matches!(lost.lock().unwrap()[1], (LeaseId(2), LostReason::Refused(LeaseError::StaleTerm { .. }))));
    assert!(b.keeper.may_use(LeaseId(2)), "and is renewed by its new holder");
    b.leases.offer(10 * MB);
    settle().await;
    assert_eq!(b.leases.totals().used, 0);
    assert!(b.keeper.held().is_empty());
}
