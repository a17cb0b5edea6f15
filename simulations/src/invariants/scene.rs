//! The world between two events, as plain data. All times are nanoseconds of the world.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use shoal_actors::ids::{Incarnation, InstanceId, LeaseId, NodeId, Term};
use shoal_actors::lease::LeaseError;
use shoal_actors::membership::ClusterView;
use shoal_actors::stage::StageKey;

use super::{Past, Served};
use crate::pipes::LoadedStage;

/// How far a scenario has come, for what must hold only later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Phases {
    /// Since when all nodes run and nothing harms them.
    pub quiet_since: Option<u64>,
    /// Since when nobody wants memory any more.
    pub closed_since: Option<u64>,
}

/// A lease in its owner's books.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lent {
    /// Which.
    pub lease: LeaseId,
    /// Who has it.
    pub holder: NodeId,
    /// How much, in bytes.
    pub bytes: u64,
    /// When it runs out; `None` if that has passed or it has ended.
    pub until: Option<u64>,
    /// Of which instance it is, and under which term; `None` if it is a user's.
    pub conducted: Option<(InstanceId, Term)>,
}

/// A lease that its holder counts as its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Belief {
    /// Which.
    pub lease: LeaseId,
    /// Whose memory.
    pub owner: NodeId,
    /// Which life of the owner granted it.
    pub incarnation: Incarnation,
    /// Until when the holder believes that it may use it.
    pub until: u64,
    /// What the owner says: until when it honours the lease, or why it does not. `None` if the owner does not run.
    pub said: Option<Result<u64, LeaseError>>,
}

/// A lease whose holder's life is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Orphan {
    /// Which.
    pub lease: LeaseId,
    /// Which node held it.
    pub holder: NodeId,
    /// Which life of it.
    pub life: u64,
    /// When that life ended, or its last word reached the owner if that was later.
    pub last_word: u64,
}

/// One node between two events.
#[derive(Debug, Clone)]
pub struct NodeScene {
    /// Its number.
    pub number: u16,
    /// Its name.
    pub id: NodeId,
    /// Which life of it, as its peers know it.
    pub incarnation: Incarnation,
    /// Which life of it, as the world counts them.
    pub life: u64,
    /// Memory that there is, in bytes.
    pub physical: u64,
    /// What it says that it has lent altogether, in bytes.
    pub used: u64,
    /// What it lends.
    pub lent: Vec<Lent>,
    /// Leases of it that are still written to although they have ended.
    pub writing: BTreeSet<LeaseId>,
    /// Those of its leases whose holders are dead.
    pub orphans: Vec<Orphan>,
    /// What it holds.
    pub beliefs: Vec<Belief>,
    /// The stages that it has in memory.
    pub stages: BTreeMap<StageKey, LoadedStage>,
    /// Whom it believes to be there.
    pub cluster: Arc<ClusterView>,
}

/// The world between two events.
#[derive(Debug, Clone, Copy)]
pub struct Scene<'a> {
    /// The time.
    pub now: u64,
    /// The nodes that run, by number.
    pub nodes: &'a BTreeMap<u16, NodeScene>,
    /// The lives of the nodes that run.
    pub there: &'a BTreeMap<NodeId, Incarnation>,
    /// The nodes of which something about leases differs from the scene before. All, if a node has begun or ended.
    pub books: &'a BTreeSet<u16>,
    /// Those that see the cluster differently from before. All, if a node has begun or ended.
    pub views: &'a BTreeSet<u16>,
    /// What happened to leases before.
    pub past: &'a Past,
    /// What users have seen.
    pub served: &'a Served,
    /// How far the scenario has come.
    pub phases: Phases,
}

impl<'a> Scene<'a> {
    /// The nodes of these numbers, as far as they run.
    pub fn of(&self, numbers: &'a BTreeSet<u16>) -> impl Iterator<Item = &'a NodeScene> {
        let nodes = self.nodes;
        numbers.iter().filter_map(move |number| nodes.get(number))
    }

    /// The nodes of these numbers, or all of them if this is the first scene in which an invariant applies. `applies` is
    /// the invariant's memory of that.
    pub fn since(&self, applies: &mut bool, numbers: &'a BTreeSet<u16>) -> Vec<&'a NodeScene> {
        if std::mem::replace(applies, true) { self.of(numbers).collect() } else { self.nodes.values().collect() }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use shoal_actors::card::{NodeCard, WIRE_VERSION};
    use shoal_actors::env::Instant;
    use shoal_actors::membership::{MemberState, MemberView};

    use super::*;

    /// The name of a made-up node.
    pub(in super::super) fn id(number: u16) -> NodeId {
        NodeId([u8::try_from(number).unwrap() + 1; 32])
    }

    fn member(number: u16, incarnation: Incarnation, state: MemberState) -> MemberView {
        let card = NodeCard {
            node: id(number),
            incarnation,
            revision: 1,
            name: format!("node-{number}"),
            version: String::new(),
            wire_version: WIRE_VERSION,
            platform: String::new(),
            host: 0,
            cores: 1,
            memory_total_bytes: 0,
            memory_offered_bytes: 0,
            memory_free_bytes: 0,
            devices: vec![],
            models: vec![],
            instances: vec![],
            addresses: vec![],
            api: None,
            leaving: false,
        };
        MemberView { card: Arc::new(card), state, since: Instant::from_nanos(0), connected: true, rtt: Some(Duration::ZERO) }
    }

    /// A made-up world of nodes that see each other and have 100 bytes each.
    #[derive(Debug)]
    pub(in super::super) struct Made {
        pub(in super::super) now: u64,
        pub(in super::super) nodes: BTreeMap<u16, NodeScene>,
        pub(in super::super) past: Past,
        pub(in super::super) served: Served,
        pub(in super::super) phases: Phases,
    }

    impl Made {
        pub(in super::super) fn new(nodes: u16) -> Self {
            let node = |number| NodeScene {
                number,
                id: id(number),
                incarnation: Incarnation(1),
                life: u64::from(number),
                physical: 100,
                used: 0,
                lent: vec![],
                writing: BTreeSet::new(),
                orphans: vec![],
                beliefs: vec![],
                stages: BTreeMap::new(),
                cluster: Arc::new(ClusterView { me: id(number), members: BTreeMap::new() }),
            };
            let nodes = (0..nodes).map(|number| (number, node(number))).collect();
            let mut made = Self { now: 0, nodes, past: Past::default(), served: Served::default(), phases: Phases::default() };
            for seer in made.nodes.keys().copied().collect::<Vec<_>>() {
                for seen in made.nodes.keys().copied().collect::<Vec<_>>() {
                    made.sees(seer, seen, Incarnation(1), MemberState::Alive);
                }
            }
            made
        }

        pub(in super::super) fn node(&mut self, number: u16) -> &mut NodeScene {
            self.nodes.get_mut(&number).unwrap()
        }

        pub(in super::super) fn sees(&mut self, seer: u16, seen: u16, incarnation: Incarnation, state: MemberState) {
            let view = Arc::make_mut(&mut self.node(seer).cluster);
            view.members.insert(id(seen), member(seen, incarnation, state));
        }

        pub(in super::super) fn lend(&mut self, owner: u16, lease: u128, holder: u16, bytes: u64) {
            let node = self.nodes.get_mut(&owner).unwrap();
            node.used += bytes;
            node.lent.push(Lent { lease: LeaseId(lease), holder: id(holder), bytes, until: Some(1000), conducted: None });
            self.past.note(node, |holder| Some(u64::from(holder.0[0]) - 1));
        }

        pub(in super::super) fn believe(
            &mut self,
            holder: u16,
            lease: u128,
            owner: u16,
            until: u64,
            said: Option<Result<u64, LeaseError>>,
        ) {
            let belief = Belief { lease: LeaseId(lease), owner: id(owner), incarnation: Incarnation(1), until, said };
            self.node(holder).beliefs.push(belief);
        }

        /// Checks it as a scene in which these nodes are new.
        pub(in super::super) fn check(&self, invariant: &mut dyn super::super::Invariant, changed: &[u16]) -> Result<(), String> {
            let there = self.nodes.values().map(|node| (node.id, node.incarnation)).collect();
            let changed = changed.iter().copied().collect();
            invariant.check(&Scene {
                now: self.now,
                nodes: &self.nodes,
                there: &there,
                books: &changed,
                views: &changed,
                past: &self.past,
                served: &self.served,
                phases: self.phases,
            })
        }
    }
}
