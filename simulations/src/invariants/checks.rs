//! Makes the scene of a running cluster, again and again, and checks it.
//!
//! An event changes one node, as a rule: a timer of it fires, or a message reaches it. So only the nodes that the world
//! names as touched are looked at again, and the others are as they were. That is a claim about the simulation, and
//! every so often it is checked itself: an untouched node that has changed fails the run.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use shoal_actors::ids::{Incarnation, LeaseId, NodeId};
use shoal_actors::lease::{Beneficiary, HeldLease, LeaseUse};
use shoal_actors::stage::StageKey;

use super::{Belief, Invariant, Lent, NodeScene, Orphan, Past, Phases, Scene, Served};
use crate::cluster::{Cluster, Life};
use crate::pipes::LoadedStage;

/// Events between two looks at everything.
const AUDIT_EVERY: u64 = 1024;

/// All invariants, and the scene that they look at.
pub struct Checks {
    cluster: Cluster,
    past: Past,
    invariants: Vec<Box<dyn Invariant>>,
    nodes: BTreeMap<u16, NodeScene>,
    there: BTreeMap<NodeId, Incarnation>,
    held: BTreeMap<u16, Vec<HeldLease>>,
    served: Arc<Mutex<Served>>,
    /// The nodes that run, as the cluster counts its changes of them.
    generation: u64,
    checked: u64,
}

impl fmt::Debug for Checks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.invariants.iter().map(|invariant| invariant.name())).finish()
    }
}

impl Checks {
    /// These invariants over `cluster`.
    pub fn new(cluster: Cluster, invariants: Vec<Box<dyn Invariant>>) -> Self {
        Self {
            cluster,
            past: Past::default(),
            invariants,
            nodes: BTreeMap::new(),
            there: BTreeMap::new(),
            held: BTreeMap::new(),
            served: Arc::default(),
            generation: 0,
            checked: 0,
        }
    }

    /// The same with what users see, as a scenario notes it down there.
    #[must_use]
    pub fn with_served(mut self, served: Arc<Mutex<Served>>) -> Self {
        self.served = served;
        self
    }

    /// Checks all.
    ///
    /// # Errors
    /// The name of the first that does not hold, and its words.
    pub fn check(&mut self, phases: Phases) -> Result<(), String> {
        let touched = self.cluster.world.take_touched();
        self.checked += 1;
        if self.checked.is_multiple_of(AUDIT_EVERY) {
            self.audit(&touched)?;
        }
        let Changes { books, views } = self.look(&touched);
        let mut served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        let scene = Scene {
            now: self.cluster.world.now(),
            nodes: &self.nodes,
            there: &self.there,
            books: &books,
            views: &views,
            past: &self.past,
            served: &served,
            phases,
        };
        for invariant in &mut self.invariants {
            invariant.check(&scene).map_err(|why| format!("{} does not hold: {why}", invariant.name()))?;
        }
        served.placed.clear();
        served.heard.clear();
        Ok(())
    }

    /// Brings the scene up to date, and says which nodes differ.
    fn look(&mut self, touched: &BTreeSet<u16>) -> Changes {
        let generation = self.cluster.generation();
        let mut changed = Changes::default();
        if generation == self.generation {
            for number in touched {
                let Some(life) = self.cluster.running(*number) else { continue };
                self.refresh(&life, &mut changed);
            }
        } else {
            self.generation = generation;
            let live = self.cluster.live();
            // Who begins and who ends matters to everybody: all are new.
            changed.books.extend(self.nodes.keys());
            self.nodes.clear();
            self.held.clear();
            self.there = live.iter().map(|life| (life.node.id, life.node.incarnation)).collect();
            for life in &live {
                self.refresh(life, &mut changed);
            }
        }
        self.ask_owners(&mut changed.books);
        changed
    }

    /// Looks at one node again, without what others say of its leases.
    fn refresh(&mut self, life: &Arc<Life>, changes: &mut Changes) {
        let number = life.node.number;
        let cluster = life.node.membership.view();
        let before = self.nodes.get_mut(&number);
        let same_view = before.as_ref().is_some_and(|before| Arc::ptr_eq(&before.cluster, &cluster));
        if !same_view {
            changes.views.insert(number);
        }
        let (lent, used) = lent(&self.cluster, life);
        let (writing, stages, held) = (writing(life), stages(life), life.node.keeper.held());
        if let Some(before) = before {
            let same_books = before.lent == lent && before.used == used && before.writing == writing && before.stages == stages;
            // A dead holder's last word changes no books.
            if same_books && before.orphans.is_empty() && self.held.get(&number) == Some(&held) {
                before.cluster = cluster;
                return;
            }
        }
        changes.books.insert(number);
        let mut scene = NodeScene {
            number,
            id: life.node.id,
            incarnation: life.node.incarnation,
            life: life.life,
            physical: life.physical,
            used,
            lent,
            writing,
            orphans: Vec::new(),
            beliefs: Vec::new(),
            stages,
            cluster,
        };
        self.past.note(&scene, |holder| self.cluster.exchange.life(holder));
        scene.orphans = scene.lent.iter().filter_map(|lease| self.orphan(&scene, lease)).collect();
        self.nodes.insert(number, scene);
        self.held.insert(number, held);
    }

    /// What is known of a lease whose holder's life has ended.
    fn orphan(&self, owner: &NodeScene, lease: &Lent) -> Option<Orphan> {
        let life = self.past.rightful(owner.id, owner.incarnation, lease.lease)?.life?;
        let death = self.cluster.death(life)?;
        let heard = self.cluster.exchange.heard(lease.holder, owner.id).filter(|(from, _)| *from == life);
        let last_word = heard.map_or(death, |(_, at)| at.max(death));
        Some(Orphan { lease: lease.lease, holder: lease.holder, life, last_word })
    }

    /// What owners say of all leases that they or their holders have changed something about.
    fn ask_owners(&mut self, books: &mut BTreeSet<u16>) {
        if books.is_empty() {
            return;
        }
        let owners: BTreeSet<NodeId> = books.iter().filter_map(|number| self.nodes.get(number)).map(|node| node.id).collect();
        let mut asked = BTreeSet::new();
        for (number, held) in &self.held {
            let own = books.contains(number);
            if own || held.iter().any(|held| owners.contains(&held.grant.owner)) {
                asked.insert(*number);
            }
        }
        for number in &asked {
            let beliefs = self.held.get(number).map(|held| held.iter().map(|held| self.belief(*number, held)).collect());
            if let (Some(node), Some(beliefs)) = (self.nodes.get_mut(number), beliefs) {
                node.beliefs = beliefs;
            }
        }
        books.extend(asked);
    }

    fn belief(&self, holder: u16, held: &HeldLease) -> Belief {
        let cluster = &self.cluster;
        let said = cluster.owner(held.grant.owner).map(|owner| {
            let me = cluster.ids().get(usize::from(holder)).copied().unwrap_or(owner.node.id);
            let end = |remaining| cluster.real(owner.node.number, owner.node.env.clock.now() + remaining);
            owner.node.leases.check(me, &LeaseUse::from(&held.grant)).map(|info| end(info.remaining))
        });
        Belief {
            lease: held.spec.id,
            owner: held.grant.owner,
            incarnation: held.grant.incarnation,
            until: cluster.real(holder, held.until),
            said,
        }
    }

    /// Looks at everything, and finds nothing new among the untouched.
    fn audit(&self, touched: &BTreeSet<u16>) -> Result<(), String> {
        if self.generation != self.cluster.generation() {
            return Ok(());
        }
        for life in self.cluster.live() {
            let number = life.node.number;
            let Some(known) = self.nodes.get(&number).filter(|_| !touched.contains(&number)) else { continue };
            let (now, used) = lent(&self.cluster, &life);
            let books = |lent: &[Lent]| lent.iter().map(|lease| (lease.lease, lease.holder, lease.bytes)).collect::<Vec<_>>();
            let same = used == known.used
                && books(&now) == books(&known.lent)
                && writing(&life) == known.writing
                && stages(&life) == known.stages
                && Arc::ptr_eq(&life.node.membership.view(), &known.cluster)
                && self.held.get(&number) == Some(&life.node.keeper.held());
            if !same {
                return Err(format!("node {number} has changed in an event that did not touch it: the simulation is wrong"));
            }
        }
        Ok(())
    }
}

/// What differs from the scene before.
#[derive(Default)]
struct Changes {
    books: BTreeSet<u16>,
    views: BTreeSet<u16>,
}

/// What a node lends, and how much it says that is.
fn lent(cluster: &Cluster, life: &Life) -> (Vec<Lent>, u64) {
    let view = life.node.leases.view();
    let now = life.node.env.clock.now();
    let lease = |info: &shoal_actors::lease::LeaseInfo| Lent {
        lease: info.id,
        holder: info.holder,
        bytes: info.bytes,
        until: (!info.remaining.is_zero()).then(|| cluster.real(life.node.number, now + info.remaining)),
        conducted: match info.beneficiary {
            Beneficiary::Instance(instance) => Some((instance, info.term)),
            Beneficiary::User(_) => None,
        },
    };
    (view.leases.iter().map(lease).collect(), view.totals.used)
}

fn stages(life: &Life) -> BTreeMap<StageKey, LoadedStage> {
    life.node.serving.as_ref().map(|serving| serving.pipes.loaded()).unwrap_or_default()
}

fn writing(life: &Life) -> BTreeSet<LeaseId> {
    life.writing.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::run;
    use crate::world::World;

    /// Two nodes run for some seconds. Then something happens to one of them, said or not.
    fn some_seconds(say: bool) -> Result<(), String> {
        let world = World::new(1);
        let cluster = Cluster::new(&world, 2, 1 << 30, None)?;
        let mut checks = Checks::new(cluster.clone(), Vec::new());
        let inside = world.clone();
        let main = async move {
            for number in 0..2 {
                cluster.start(number).await.unwrap();
            }
            inside.sleep(7, Duration::from_secs(10)).await;
            cluster.running(1).unwrap().writing.lock().unwrap().insert(LeaseId(1));
            if say {
                inside.touch(1);
            }
            // Timers of a node that there is not touch nobody.
            for _ in 0..2 * AUDIT_EVERY {
                inside.sleep(7, Duration::from_nanos(1)).await;
            }
        };
        run(&world, main, move || checks.check(Phases::default())).map_err(|error| error.to_string())
    }

    #[test]
    fn who_changes_untouched_is_found() {
        some_seconds(true).unwrap();
        let why = some_seconds(false).unwrap_err();
        assert!(why.contains("node 1 has changed in an event that did not touch it"), "{why}");
    }
}
