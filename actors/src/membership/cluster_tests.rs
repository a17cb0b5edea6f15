//! Whole nodes in one process: network, discovery, membership and topology together.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ractor::ActorCell;
use shoal_engine::card::ModelCard;
use shoal_engine::stage::{Stage, StageOptions, StageSpec};

use super::message::test_card;
use super::{MemberEvent, MemberState, Membership, MembershipActor, MembershipArguments, Timing};
use crate::card::DeviceCard;
use crate::discovery::beacon::SystemBeacon;
use crate::discovery::{CONNECTIONS_TARGET, Discovery, DiscoveryActor, DiscoveryArguments};
use crate::env::{
    Beacon, Compute, ComputeError, Env, MemoryStorage, NetworkConfig, NetworkFactory, Storage, SystemClock, SystemRng, SystemSpawner,
    TextModel,
};
use crate::ids::NodeId;
use crate::membership::next_incarnation;
use crate::network::{Libp2pNetwork, MemoryExchange, MemoryNetwork, NetworkActor, NetworkArguments, NetworkHandle};
use crate::secret::{ClusterKey, Identity};
use crate::service::{Services, ServicesLimits};
use crate::topology::{Topology, TopologyActor, TopologyArguments};

/// A node without devices.
#[derive(Debug)]
struct Nothing;

impl Compute for Nothing {
    fn devices(&self) -> Vec<DeviceCard> {
        Vec::new()
    }

    fn model_card(&self, _: &Path) -> Result<ModelCard, ComputeError> {
        Err(ComputeError { reason: "no device".to_owned() })
    }

    fn text(&self, _: &Path) -> Result<Arc<dyn TextModel>, ComputeError> {
        Err(ComputeError { reason: "no device".to_owned() })
    }

    fn load(&self, _: &Path, _: &StageSpec, _: &StageOptions) -> Result<Box<dyn Stage>, ComputeError> {
        Err(ComputeError { reason: "no device".to_owned() })
    }
}

/// How a node is started.
#[derive(Clone)]
struct Plan {
    factory: Arc<dyn NetworkFactory>,
    storage: Arc<dyn Storage>,
    beacon: Option<Arc<dyn Beacon>>,
    cluster: Option<ClusterKey>,
    listen: Vec<SocketAddr>,
    peers: Vec<SocketAddr>,
    mdns: bool,
}

impl Plan {
    fn memory(exchange: &MemoryExchange) -> Self {
        Self {
            factory: Arc::new(MemoryNetwork::new(exchange.clone())),
            storage: Arc::new(MemoryStorage::default()),
            beacon: None,
            cluster: None,
            listen: Vec::new(),
            peers: Vec::new(),
            mdns: true,
        }
    }
}

struct Node {
    id: NodeId,
    membership: Membership,
    discovery: Discovery,
    topology: Topology,
    network: NetworkHandle,
    /// In the order in which they are stopped.
    actors: Vec<ActorCell>,
    events: Arc<Mutex<Vec<MemberEvent>>>,
}

impl Node {
    async fn start(plan: &Plan) -> Self {
        let env = Env {
            clock: Arc::new(SystemClock),
            rng: Arc::new(SystemRng),
            spawner: Arc::new(SystemSpawner::new(tokio::runtime::Handle::current())),
            network: Arc::clone(&plan.factory),
            storage: Arc::clone(&plan.storage),
            compute: Arc::new(Nothing),
        };
        let identity = Identity::load_or_create(&*env.storage, &*env.rng).unwrap();
        let incarnation = next_incarnation(&*env.storage, &*env.rng).unwrap();
        let id = identity.node();
        let services = Services::new(id, Arc::clone(&env.clock), ServicesLimits::default());
        let network = NetworkHandle::new(services.clone());
        let config = NetworkConfig {
            identity,
            cluster: plan.cluster.clone(),
            listen: plan.listen.clone(),
            mdns: plan.mdns,
            clock: Arc::clone(&env.clock),
            rng: Arc::clone(&env.rng),
            spawner: Arc::clone(&env.spawner),
        };
        let (discovery, topology) = (Discovery::new(), Topology::new());
        let membership = Membership::new(test_card(id, incarnation.0));
        let events = Arc::new(Mutex::new(Vec::new()));
        let (seen, handle) = (Arc::clone(&events), membership.clone());
        membership.subscribe(Box::new(move |event| {
            if let MemberEvent::Joined { node, .. } = event {
                assert!(handle.view().card(*node).is_some(), "the view shows what is told");
            }
            seen.lock().unwrap().push(*event);
        }));
        let membership_actor = MembershipActor::start(
            MembershipArguments {
                handle: membership.clone(),
                env: env.clone(),
                services: services.clone(),
                network: network.clone(),
                discovery: discovery.clone(),
                timing: Timing::default(),
            },
            None,
        );
        let membership_actor = membership_actor.await.unwrap();
        let topology_arguments =
            TopologyArguments { handle: topology.clone(), env: env.clone(), services: services.clone(), network: network.clone() };
        let topology_actor = TopologyActor::start(topology_arguments, None).await.unwrap();
        let discovery_actor = DiscoveryActor::start(
            DiscoveryArguments {
                handle: discovery.clone(),
                env: env.clone(),
                network: network.clone(),
                beacon: plan.beacon.clone(),
                cluster: plan.cluster.clone(),
                node: id,
                incarnation,
                peers: plan.peers.clone(),
                target: CONNECTIONS_TARGET,
            },
            None,
        );
        let discovery_actor = discovery_actor.await.unwrap();
        let network_arguments = NetworkArguments { handle: network.clone(), factory: Arc::clone(&env.network), config };
        let network_actor = NetworkActor::start(network_arguments, None).await.unwrap();
        let actors = vec![discovery_actor.get_cell(), topology_actor.get_cell(), membership_actor.get_cell(), network_actor.get_cell()];
        Self { id, membership, discovery, topology, network, actors, events }
    }

    async fn stop(&self) {
        for actor in &self.actors {
            drop(actor.stop_and_wait(None, Some(Duration::from_secs(10))).await);
        }
    }

    fn state(&self, of: NodeId) -> Option<MemberState> {
        self.membership.view().get(of).map(|member| member.state)
    }

    fn sees(&self, others: &[&Node]) -> bool {
        let view = self.membership.view();
        view.alive().count() == others.len()
            && others.iter().all(|other| {
                view.card(other.id).is_some_and(|card| card.incarnation == other.membership.view().card(other.id).unwrap().incarnation)
            })
    }
}

/// Waits until something is so; the test fails if it takes absurdly long.
async fn until(what: &str, mut is_so: impl FnMut() -> bool) -> Duration {
    let clock = SystemClock;
    let begin = crate::env::Clock::now(&clock);
    loop {
        let waited = crate::env::Clock::now(&clock).since(begin);
        if is_so() {
            return waited;
        }
        assert!(waited < Duration::from_secs(60), "still waiting: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn converged(nodes: &[&Node]) -> bool {
    nodes.iter().all(|node| node.sees(nodes))
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(test);
    runtime.shutdown_timeout(Duration::from_secs(5));
}

#[test]
fn five_nodes_join_one_is_dropped_one_restarts_one_leaves_and_all_agree() {
    run(async {
        let exchange = MemoryExchange::default();
        let plans: Vec<Plan> = (0..5).map(|_| Plan::memory(&exchange)).collect();
        let mut nodes = Vec::new();
        for plan in &plans {
            nodes.push(Node::start(plan).await);
        }
        let all: Vec<&Node> = nodes.iter().collect();
        let joined = until("five nodes meet", || converged(&all)).await;
        println!("five nodes agreed {joined:?} after the last was started");
        until("links are measured", || all.iter().all(|node| node.topology.links().between(all[0].id, all[4].id).is_some())).await;

        // A crash: its peers see their connections break.
        exchange.crash(nodes[1].id);
        let gone = nodes.remove(1);
        let rest: Vec<&Node> = nodes.iter().collect();
        let dead = until("the crash is seen", || rest.iter().all(|node| node.state(gone.id) == Some(MemberState::Dead))).await;
        println!("a crashed node was dead for all after {dead:?}");
        gone.stop().await;

        // It starts again from the same folder.
        let again = Node::start(&plans[1]).await;
        assert_eq!(again.id, gone.id);
        let mut rest = rest;
        rest.push(&again);
        until("the next life joins", || converged(&rest)).await;
        assert!(rest[0].events.lock().unwrap().iter().filter(|event| event.node() == gone.id).count() >= 3, "joined, died, joined");

        // Without a word of farewell first, and with nobody having noticed: the old life is replaced at once.
        exchange.crash(again.id);
        let third = Node::start(&plans[1]).await;
        rest.pop();
        rest.push(&third);
        until("the third life joins", || converged(&rest)).await;
        again.stop().await;

        // A card that changes is seen by all.
        rest[0].membership.update_card(|card| card.memory_free_bytes = 12_345);
        let id = rest[0].id;
        until("the card spreads", || {
            rest.iter().all(|node| node.membership.view().card(id).is_some_and(|card| card.memory_free_bytes == 12_345))
        })
        .await;

        // One leaves in good order.
        third.membership.leave().await;
        third.stop().await;
        rest.pop();
        until("the farewell is heard", || rest.iter().all(|node| node.state(third.id) == Some(MemberState::Left))).await;
        for node in rest {
            node.stop().await;
        }
    });
}

#[test]
fn a_node_that_is_unplugged_is_dead_and_comes_back() {
    run(async {
        let exchange = MemoryExchange::default();
        let mut nodes = Vec::new();
        for _ in 0..3 {
            nodes.push(Node::start(&Plan::memory(&exchange)).await);
        }
        let all: Vec<&Node> = nodes.iter().collect();
        until("three nodes meet", || converged(&all)).await;
        let (a, b, c) = (all[0], all[1], all[2]);
        a.membership.watch_closely(c.id);
        exchange.cut(a.id, c.id);
        exchange.cut(b.id, c.id);
        let watched = until("the watcher sees it", || a.state(c.id) == Some(MemberState::Dead)).await;
        let silent = until("the other sees it", || b.state(c.id) == Some(MemberState::Dead)).await;
        println!("an unplugged node was dead after {watched:?} for its watcher, {:?} for the other", watched + silent);
        until("the one cut off is alone", || c.membership.view().alive().count() == 1).await;
        exchange.mend(a.id, c.id);
        exchange.mend(b.id, c.id);
        let back = until("it is back", || converged(&all)).await;
        println!("it was back {back:?} after it was plugged in");
        for node in &nodes {
            node.stop().await;
        }
    });
}

#[test]
fn a_given_address_is_enough_to_meet_everybody() {
    run(async {
        let exchange = MemoryExchange::default();
        let silent = Plan { mdns: false, ..Plan::memory(&exchange) };
        let first = Node::start(&Plan { storage: Arc::new(MemoryStorage::default()), ..silent.clone() }).await;
        until("it listens", || !first.network.listening().is_empty()).await;
        let peers = first.network.listening();
        let given = |_| Plan { storage: Arc::new(MemoryStorage::default()), peers: peers.clone(), ..silent.clone() };
        let second = Node::start(&given(2)).await;
        let third = Node::start(&given(3)).await;
        let all = [&first, &second, &third];
        until("all meet", || converged(&all)).await;
        // Second and third know each other's addresses from their cards alone.
        until("all are connected", || all.iter().all(|node| node.network.connected().len() == 2)).await;
        for node in all {
            node.stop().await;
        }
    });
}

#[test]
fn a_node_without_the_key_is_told_why() {
    run(async {
        let exchange = MemoryExchange::default();
        let key = ClusterKey::from_text("a key that is long enough").unwrap();
        let private = Node::start(&Plan { cluster: Some(key), ..Plan::memory(&exchange) }).await;
        let stranger = Node::start(&Plan::memory(&exchange)).await;
        until("it is told", || !stranger.discovery.refusals().is_empty()).await;
        assert!(stranger.discovery.refusals()[0].reason.contains("key"), "{:?}", stranger.discovery.refusals());
        assert_eq!(private.membership.view().alive().count(), 1);
        private.stop().await;
        stranger.stop().await;
    });
}

/// Real sockets, the own beacon alone: no mDNS, no addresses given.
#[test]
fn real_nodes_of_one_host_meet_by_the_beacon() {
    run(async {
        let port = 52_911;
        let plan = |key: Option<&str>| Plan {
            factory: Arc::new(Libp2pNetwork::default()),
            storage: Arc::new(MemoryStorage::default()),
            beacon: Some(Arc::new(SystemBeacon::at_port(port))),
            cluster: key.map(|key| ClusterKey::from_text(key).unwrap()),
            listen: Vec::new(),
            peers: Vec::new(),
            mdns: false,
        };
        if !multicast_loops_back(port).await {
            println!("SKIPPED: this machine does not loop UDP multicast back");
            return;
        }
        let mut nodes = Vec::new();
        for _ in 0..3 {
            nodes.push(Node::start(&plan(Some("the key of this test cluster"))).await);
        }
        let stranger = Node::start(&plan(None)).await;
        let all: Vec<&Node> = nodes.iter().collect();
        let joined = until("three nodes meet", || converged(&all)).await;
        println!("three nodes on real sockets agreed {joined:?} after the last was started");
        let seen: Vec<_> = all[0].network.connected().iter().map(|peer| peer.address).collect();
        println!("connected at {seen:?}");
        until("all are connected", || all.iter().all(|node| node.network.connected().len() == 2)).await;
        let rate = all[0].topology.measure_bandwidth(all[1].id).await.unwrap();
        println!("control bandwidth {:.0} MB/s", rate / 1e6);
        until("the rate is in the matrix", || {
            all[0].topology.links().between(all[1].id, all[0].id).is_some_and(|link| link.bytes_per_second == Some(rate))
        })
        .await;
        assert_eq!(stranger.membership.view().alive().count(), 1, "beacons of another cluster say nothing");
        assert!(stranger.discovery.refusals().is_empty());

        // A process that dies closes its sockets; here its network is stopped without a farewell.
        let gone = nodes.pop().unwrap();
        gone.stop().await;
        let rest: Vec<&Node> = nodes.iter().collect();
        let dead = until("its end is seen", || rest.iter().all(|node| node.state(gone.id) == Some(MemberState::Dead))).await;
        println!("a stopped node was dead for all after {dead:?}");
        for node in rest {
            node.stop().await;
        }
        stranger.stop().await;
    });
}

async fn multicast_loops_back(port: u16) -> bool {
    use crate::env::{Family, Spawner};
    let heard = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let note = Arc::clone(&heard);
    let spawner: Arc<dyn Spawner> = Arc::new(SystemSpawner::new(tokio::runtime::Handle::current()));
    let sink = Arc::new(move |_| note.store(true, std::sync::atomic::Ordering::Relaxed));
    let Ok(socket) = SystemBeacon::at_port(port).open(spawner, sink) else { return false };
    let interfaces = socket.refresh();
    for _ in 0..20 {
        for interface in &interfaces {
            socket.announce(interface.index, Family::V4, b"is anybody there");
            socket.announce(interface.index, Family::V6, b"is anybody there");
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        if heard.load(std::sync::atomic::Ordering::Relaxed) {
            socket.close();
            return true;
        }
    }
    socket.close();
    false
}
