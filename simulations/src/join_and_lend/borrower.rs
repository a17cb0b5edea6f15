//! Borrows memory at random, gives it back, and takes over what the dead have left.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use shoal_actors::env::Spawner;
use shoal_actors::ids::{InstanceId, LeaseId, NodeId, Term};
use shoal_actors::lease::{Beneficiary, LeaseKeeper, LeaseSpec, Purpose, timing};
use shoal_actors::membership::{MemberEvent, Membership};

use super::registry::Instance;
use super::{MEMORY, Stage};
use crate::chance::Chance;
use crate::cluster::Life;
use crate::scenario::lock;

/// Most instances that a node holds at a time.
const HOLDINGS_MAX: usize = 6;
/// Pause between two acts.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_millis(2500));

/// The borrower of one life of a node.
pub(super) struct Borrower {
    stage: Stage,
    number: u16,
    me: NodeId,
    keeper: LeaseKeeper,
    membership: Membership,
    spawner: Arc<dyn Spawner>,
    chance: Mutex<Chance>,
    /// What it holds, as far as it knows.
    holdings: Mutex<BTreeMap<InstanceId, Vec<LeaseId>>>,
}

impl Borrower {
    /// Starts one on a node; it ends with this life of the node.
    pub(super) fn start(stage: Stage, life: &Arc<Life>) {
        let node = &life.node;
        let chance = stage.cluster.world.chance("borrower", life.life << 16 | u64::from(node.number));
        let borrower = Arc::new(Self {
            stage,
            number: node.number,
            me: node.id,
            keeper: node.keeper.clone(),
            membership: node.membership.clone(),
            spawner: Arc::clone(&node.env.spawner),
            chance: Mutex::new(chance),
            holdings: Mutex::default(),
        });
        // Who calls back is held by the borrower, so it must not hold the borrower.
        let losing = Arc::downgrade(&borrower);
        node.keeper.on_lost(Box::new(move |lost| {
            let Some(losing) = losing.upgrade() else { return };
            losing.note(format!("loses {:?}: {}", lost.lease, lost.reason));
            losing.stage.count(|counts| counts.lost += 1);
            losing.lost(lost.lease);
        }));
        let mourning = Arc::downgrade(&borrower);
        node.membership.subscribe(Box::new(move |event| {
            let Some(mourning) = mourning.upgrade() else { return };
            if !matches!(event, MemberEvent::CardChanged { .. }) {
                mourning.note(format!("hears {event:?}"));
            }
            if let MemberEvent::Dead { node, .. } = *event {
                mourning.stage.count(|counts| counts.deaths_seen += 1);
                mourning.inherit(node);
            }
        }));
        let spawner = Arc::clone(&borrower.spawner);
        spawner.task("borrower", Box::pin(async move { borrower.go_on().await }));
    }

    fn note(&self, text: String) {
        self.stage.cluster.world.note(format!("node {} {text}", self.number));
    }

    async fn sleep(&self, least: Duration, most: Duration) {
        let pause = lock(&self.chance).duration(least, most);
        self.stage.cluster.world.sleep(self.number, pause).await;
    }

    async fn go_on(&self) {
        loop {
            self.sleep(PAUSE.0, PAUSE.1).await;
            if self.stage.closed() {
                return;
            }
            let holdings = lock(&self.holdings).len();
            let act = lock(&self.chance).below(100);
            match act {
                _ if holdings >= HOLDINGS_MAX => self.give_back(),
                0..=59 => self.borrow().await,
                60..=89 => self.give_back(),
                _ => self.touch(),
            }
        }
    }

    /// Some memory of some members, for a new instance.
    async fn borrow(&self) {
        let mut members: Vec<NodeId> = self.membership.view().alive().map(|(node, _)| node).collect();
        let (instance, term) = (InstanceId(self.draw()), Term { counter: 1, node: self.me });
        let (wanted, patience) = {
            let mut chance = lock(&self.chance);
            chance.shuffle(&mut members);
            let owners = usize::try_from(chance.between(1, 3)).unwrap_or(1).min(members.len());
            let succession: Vec<NodeId> = members.iter().copied().filter(|node| *node != self.me).take(3).chain([self.me]).collect();
            let spec = |chance: &mut Chance, owner: NodeId, id: LeaseId| {
                let bytes = MEMORY / 100 * chance.between(5, 45);
                let beneficiary = Beneficiary::Instance(instance);
                (owner, LeaseSpec { id, beneficiary, purpose: Purpose::Weights, bytes, term, members: succession.clone(), stage: None })
            };
            let mut wanted = Vec::new();
            for owner in &members[..owners] {
                let mut id = [0; 16];
                chance.fill(&mut id);
                wanted.push(spec(&mut chance, *owner, LeaseId(u128::from_le_bytes(id))));
            }
            let patience = chance.percent(10).then(|| chance.duration(Duration::ZERO, Duration::from_millis(5)));
            (wanted, patience)
        };
        let leases: Vec<(NodeId, LeaseId)> = wanted.iter().map(|(owner, spec)| (*owner, spec.id)).collect();
        let members = wanted.first().map(|(_, spec)| spec.members.clone()).unwrap_or_default();
        let bytes: u64 = wanted.iter().map(|(_, spec)| spec.bytes).sum();
        let asked = self.keeper.acquire_all(wanted);
        let result = match patience {
            None => asked.await,
            Some(patience) => {
                let nap = self.stage.cluster.world.sleep(self.number, patience);
                match futures::future::select(Box::pin(asked), nap).await {
                    futures::future::Either::Left((result, _)) => result,
                    futures::future::Either::Right(_) => {
                        self.note(format!("wants instance {instance:?} no longer"));
                        return self.stage.count(|counts| counts.abandoned += 1);
                    }
                }
            }
        };
        match result {
            Ok(grants) => {
                self.note(format!("holds instance {instance:?}: {} leases, {} GiB", grants.len(), bytes >> 30));
                self.stage.count(|counts| counts.granted += 1);
                lock(&self.holdings).insert(instance, grants.iter().map(|grant| grant.lease).collect());
                lock(&self.stage.registry).instances.insert(instance, Instance { term, members, leases });
            }
            Err(error) => {
                self.note(format!("does not get instance {instance:?}: {error}"));
                self.stage.count(|counts| counts.refused += 1);
            }
        }
    }

    fn draw(&self) -> u128 {
        let mut bytes = [0; 16];
        lock(&self.chance).fill(&mut bytes);
        u128::from_le_bytes(bytes)
    }

    fn any(&self) -> Option<InstanceId> {
        let holdings: Vec<InstanceId> = lock(&self.holdings).keys().copied().collect();
        lock(&self.chance).pick(&holdings).copied()
    }

    fn give_back(&self) {
        let Some(instance) = self.any() else { return };
        self.drop_instance(instance);
        self.note(format!("gives instance {instance:?} back"));
        self.stage.count(|counts| counts.released += 1);
    }

    /// Gives up all of an instance. The keeper sees to it that its owners hear so.
    fn drop_instance(&self, instance: InstanceId) {
        let leases = lock(&self.holdings).remove(&instance).unwrap_or_default();
        let mut registry = lock(&self.stage.registry);
        if registry.instances.get(&instance).is_some_and(|known| known.term.node == self.me) {
            registry.instances.remove(&instance);
        }
        drop(registry);
        drop(self.keeper.release(&leases));
    }

    /// An instance exists as long as it holds all of its leases.
    fn lost(&self, lease: LeaseId) {
        let broken: Vec<InstanceId> =
            lock(&self.holdings).iter().filter(|(_, leases)| leases.contains(&lease)).map(|(instance, _)| *instance).collect();
        for instance in broken {
            self.drop_instance(instance);
        }
    }

    fn touch(&self) {
        if let Some(instance) = self.any() {
            self.keeper.touch(Beneficiary::Instance(instance));
        }
    }

    /// Takes over what a dead node held. The member with the lowest id tries first, the others after it.
    fn inherit(self: &Arc<Self>, dead: NodeId) {
        let orphans = lock(&self.stage.registry).left_by(dead, self.me);
        for id in orphans {
            let heir = Arc::clone(self);
            self.spawner.task("heir", Box::pin(async move { heir.take_over(id, dead).await }));
        }
    }

    async fn take_over(&self, id: InstanceId, dead: NodeId) {
        let Some(known) = lock(&self.stage.registry).instances.get(&id).cloned() else { return };
        let view = self.membership.view();
        let before_me = view.alive().filter(|(node, _)| *node < self.me && known.members.contains(node)).count();
        let turn = timing::CLAIM * u32::try_from(before_me).unwrap_or(u32::MAX);
        self.stage.cluster.world.sleep(self.number, turn).await;
        // Now and then nobody has told it that another one was faster.
        let told = !lock(&self.chance).percent(30);
        let present = lock(&self.stage.registry).instances.get(&id).cloned();
        let settled = present.is_none_or(|present| present.term.node != dead);
        if self.stage.closed() || (told && settled) {
            return;
        }
        let term = Term { counter: known.term.counter + 1, node: self.me };
        let mut owners: Vec<NodeId> = known.leases.iter().map(|(owner, _)| *owner).collect();
        owners.sort_unstable();
        owners.dedup();
        let mut leases = Vec::new();
        for owner in owners {
            match self.keeper.claim(owner, id, term, known.members.clone()).await {
                Ok(claimed) => leases.extend(claimed.into_iter().map(|(_, grant)| grant.lease)),
                Err(error) => {
                    self.note(format!("cannot take over {id:?}: {error}"));
                    self.stage.count(|counts| counts.claims_refused += 1);
                }
            }
        }
        if leases.is_empty() {
            return;
        }
        self.note(format!("takes over instance {id:?}: {} leases", leases.len()));
        let whole = leases.len() == known.leases.len();
        self.stage.count(|counts| counts.claimed += leases.len() as u64);
        lock(&self.holdings).insert(id, leases);
        if whole {
            lock(&self.stage.registry).instances.insert(id, Instance { term, ..known });
        } else {
            // A part of it is gone, so there is nothing to go on with.
            self.drop_instance(id);
        }
    }
}
