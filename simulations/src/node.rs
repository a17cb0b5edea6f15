//! A node of the simulation: the real actors of the control plane, wired as a real node wires them.
//!
//! The parts that hold stages and conduct ([`Serving`]) are there if the plan says so. Left out are those that need
//! disks: catalogue and placement.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SupervisionEvent};
use shoal_actors::card::{NodeCard, WIRE_VERSION};
use shoal_actors::conductor::Drain;
use shoal_actors::discovery::{CONNECTIONS_TARGET, Discovery, DiscoveryActor, DiscoveryArguments};
use shoal_actors::env::{Env, NetworkConfig};
use shoal_actors::ids::{Incarnation, NodeId};
use shoal_actors::lease::{FenceHook, LeaseKeeper, LeaseKeeperActor, LeaseKeeperArguments, Leases, LeasesActor, LeasesArguments};
use shoal_actors::membership::{Membership, MembershipActor, MembershipArguments, Timing, next_incarnation};
use shoal_actors::network::{NetworkActor, NetworkArguments, NetworkHandle};
use shoal_actors::secret::Identity;
use shoal_actors::service::{Services, ServicesLimits};

use crate::env::SimEnv;
use crate::serving::{self, Parts, Serving, ServingPlan};
use crate::spawner::SimSpawner;
use crate::world::World;

/// One life of a node.
#[derive(Debug)]
pub struct SimNode {
    /// The node's number in the world.
    pub number: u16,
    /// Its identity.
    pub id: NodeId,
    /// Which life of it, as its peers know it.
    pub incarnation: Incarnation,
    /// The node's effects.
    pub env: Env,
    /// Requests to and from peers.
    pub services: Services,
    /// The control network.
    pub network: NetworkHandle,
    /// The peer book.
    pub discovery: Discovery,
    /// Who is there.
    pub membership: Membership,
    /// What it lends.
    pub leases: Leases,
    /// What it holds.
    pub keeper: LeaseKeeper,
    /// Stages and conductors, if it serves.
    pub serving: Option<Serving>,
    spawner: SimSpawner,
    /// In the order in which they started.
    parts: Vec<ActorCell>,
    nursery: ActorRef<()>,
    root: ActorRef<()>,
    ending: Arc<AtomicBool>,
}

/// What a node is started with.
#[derive(Clone)]
pub struct NodePlan {
    /// Memory on offer, in bytes.
    pub offered: u64,
    /// Gives up the memory of a lease. One that serves asks its workers instead.
    pub on_fence: FenceHook,
    /// Whether it holds stages and conducts, and with what.
    pub serving: Option<ServingPlan>,
}

impl SimNode {
    /// Starts a node: the first life, or the next.
    ///
    /// # Errors
    /// What did not start, in its own words.
    pub async fn start(world: &World, env: &SimEnv, plan: NodePlan) -> Result<Self, String> {
        let (number, (env, spawner)) = (env.number, env.life());
        Self::begin(world, number, env, spawner, plan).await.map_err(|error| format!("node {number} did not start: {error}"))
    }

    async fn begin(world: &World, number: u16, env: Env, spawner: SimSpawner, plan: NodePlan) -> Result<Self, ActorProcessingErr> {
        let identity = Identity::load_or_create(&*env.storage, &*env.rng)?;
        let incarnation = next_incarnation(&*env.storage, &*env.rng)?;
        let id = identity.node();
        let services = Services::new(id, Arc::clone(&env.clock), ServicesLimits::default());
        let network = NetworkHandle::new(services.clone());
        let discovery = Discovery::new();
        let membership = Membership::new(card(number, id, incarnation, plan.offered, &env));
        let ending = Arc::new(AtomicBool::new(false));
        let root = |parts_may_stop| Root { world: world.clone(), number, ending: Arc::clone(&ending), parts_may_stop };
        let (nursery, _) = Actor::spawn(None, root(true), ()).await?;
        let (root, _) = Actor::spawn(None, root(false), ()).await?;
        let above = || Some(root.get_cell());

        let config = NetworkConfig {
            identity,
            cluster: None,
            listen: Vec::new(),
            mdns: true,
            clock: Arc::clone(&env.clock),
            rng: Arc::clone(&env.rng),
            spawner: Arc::clone(&env.spawner),
        };
        let arguments = NetworkArguments { handle: network.clone(), factory: Arc::clone(&env.network), config };
        let network_actor = NetworkActor::start(arguments, above()).await?;
        let arguments = DiscoveryArguments {
            handle: discovery.clone(),
            env: env.clone(),
            network: network.clone(),
            beacon: None,
            cluster: None,
            node: id,
            incarnation,
            peers: Vec::new(),
            target: CONNECTIONS_TARGET,
        };
        let discovery_actor = DiscoveryActor::start(arguments, above()).await?;
        let arguments = MembershipArguments {
            handle: membership.clone(),
            env: env.clone(),
            services: services.clone(),
            network: network.clone(),
            discovery: discovery.clone(),
            timing: Timing::default(),
        };
        let membership_actor = MembershipActor::start(arguments, above()).await?;
        let slot = serving::Slot::default();
        let leases = Leases::new(id, incarnation, plan.offered, Arc::clone(&env.clock));
        let arguments = LeasesArguments {
            handle: leases.clone(),
            env: env.clone(),
            services: services.clone(),
            on_fence: plan.serving.as_ref().map_or(plan.on_fence, |serving| serving::fence(&slot, serving.broken)),
            on_renew: Arc::new(|_, _| {}),
            on_term: Arc::new(|_, _| {}),
        };
        let leases_actor = LeasesActor::start(arguments, above()).await?;
        let announce = membership.clone();
        leases.subscribe(Box::new(move |totals| announce.update_card(move |card| card.memory_free_bytes = totals.free())));
        let keeper = LeaseKeeper::new(Arc::clone(&env.clock), services.clone());
        let arguments = LeaseKeeperArguments { handle: keeper.clone(), env: env.clone() };
        let keeper_actor = LeaseKeeperActor::start(arguments, above()).await?;
        let serving = match plan.serving {
            Some(plan) => {
                let parts = Parts {
                    world,
                    number,
                    node: id,
                    env: &env,
                    services: &services,
                    membership: &membership,
                    leases: &leases,
                    keeper: &keeper,
                    root: root.get_cell(),
                    nursery: nursery.clone(),
                };
                Some(Serving::start(parts, plan, &slot).await?)
            }
            None => None,
        };
        let parts = vec![
            network_actor.get_cell(),
            discovery_actor.get_cell(),
            membership_actor.get_cell(),
            leases_actor.get_cell(),
            keeper_actor.get_cell(),
        ];
        Ok(Self {
            number,
            id,
            incarnation,
            env,
            services,
            network,
            discovery,
            membership,
            leases,
            keeper,
            serving,
            spawner,
            parts,
            nursery,
            root,
            ending,
        })
    }

    /// What gives away what this node has.
    pub fn drain(&self) -> Drain {
        Drain {
            node: self.id,
            clock: Arc::clone(&self.env.clock),
            services: self.services.clone(),
            membership: self.membership.clone(),
            leases: self.leases.clone(),
        }
    }

    /// Ends the node where it stands: no actor handles another message, no task goes on. The exchange has to be told
    /// before ([`SimExchange::crash`](crate::network::SimExchange::crash)).
    pub fn crash(&self) {
        self.ending.store(true, Ordering::Relaxed);
        self.spawner.crash();
        // The parts before what links them, in one order: ractor's own order of stopping children is not fixed.
        let serving = self.serving.iter().flat_map(Serving::cells);
        for part in serving.chain(self.parts.iter().cloned()) {
            part.kill();
        }
        self.nursery.kill();
        self.root.kill();
    }
}

fn card(number: u16, node: NodeId, incarnation: Incarnation, offered: u64, env: &Env) -> NodeCard {
    NodeCard {
        node,
        incarnation,
        revision: 1,
        name: format!("node-{number}"),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        wire_version: WIRE_VERSION,
        platform: "simulated".to_owned(),
        host: u128::from(number) + 1,
        cores: 8,
        memory_total_bytes: offered,
        memory_offered_bytes: offered,
        memory_free_bytes: offered,
        devices: env.compute.devices(),
        models: Vec::new(),
        instances: Vec::new(),
        addresses: Vec::new(),
        api: None,
        leaving: false,
    }
}

/// Above all parts of a node. A real supervisor starts again what has failed; here a failure is what is looked for.
struct Root {
    world: World,
    number: u16,
    ending: Arc<AtomicBool>,
    /// Whether those below may stop by themselves.
    parts_may_stop: bool,
}

impl Actor for Root {
    type Msg = ();
    type State = ();
    type Arguments = ();

    async fn pre_start(&self, _: ActorRef<()>, (): ()) -> Result<(), ActorProcessingErr> {
        Ok(())
    }

    async fn handle_supervisor_evt(&self, _: ActorRef<()>, event: SupervisionEvent, (): &mut ()) -> Result<(), ActorProcessingErr> {
        let reason = match event {
            SupervisionEvent::ActorFailed(_, error) => error.to_string(),
            SupervisionEvent::ActorTerminated(..) if self.parts_may_stop => return Ok(()),
            SupervisionEvent::ActorTerminated(_, _, reason) => reason.unwrap_or_else(|| "it stopped".to_owned()),
            _ => return Ok(()),
        };
        if !self.ending.load(Ordering::Relaxed) {
            self.world.fail(format!("an actor of node {} ended: {reason}", self.number));
        }
        Ok(())
    }
}
