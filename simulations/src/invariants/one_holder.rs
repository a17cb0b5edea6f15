//! A lease is honoured for one holder, and no holder believes in one longer than its owner does.

use std::collections::BTreeMap;

use shoal_actors::ids::{Incarnation, LeaseId, NodeId};
use shoal_actors::lease::LeaseError;

use super::{Belief, Invariant, NodeScene, Scene};

/// Of the nodes that believe that they may use a lease, its owner agrees with at most one, and for at least as long as
/// that one believes it. It refuses the others for one of two reasons only: another node has taken the lease over, or
/// the owner has restarted.
///
/// The ends of both are compared, and not only what is so at this moment. So it does not matter that nobody looks at
/// the nodes between two events.
#[derive(Debug, Default)]
pub struct OneHolder {
    /// For whom a lease is honoured, and until when that one believes it.
    honoured: BTreeMap<Key, (u16, u64)>,
    /// The leases that are honoured for a node.
    of: BTreeMap<u16, Vec<Key>>,
}

/// A lease of one life of an owner.
type Key = (NodeId, Incarnation, LeaseId);

impl Invariant for OneHolder {
    fn name(&self) -> &'static str {
        "one holder"
    }

    fn check(&mut self, scene: &Scene<'_>) -> Result<(), String> {
        // First forget what is no longer so, for a lease may have moved between two nodes of the same scene.
        for number in scene.books {
            for key in self.of.remove(number).unwrap_or_default() {
                if self.honoured.get(&key).is_some_and(|(by, _)| by == number) {
                    self.honoured.remove(&key);
                }
            }
        }
        // Whoever is not there any more believes nothing.
        if self.of.keys().any(|number| !scene.nodes.contains_key(number)) {
            self.of.retain(|number, _| scene.nodes.contains_key(number));
            self.honoured.retain(|_, (number, _)| scene.nodes.contains_key(number));
        }
        for node in scene.of(scene.books) {
            for belief in node.beliefs.iter().filter(|belief| scene.now < belief.until) {
                let key = (belief.owner, belief.incarnation, belief.lease);
                if honours(scene, node, belief)? {
                    let before = self.honoured.insert(key, (node.number, belief.until));
                    if let Some((other, _)) = before.filter(|(_, until)| scene.now < *until) {
                        let (lease, owner) = (belief.lease, belief.owner);
                        return Err(format!("lease {lease:?} of node {owner:?} is honoured for nodes {other} and {}", node.number));
                    }
                    self.of.entry(node.number).or_default().push(key);
                }
            }
        }
        Ok(())
    }
}

/// Whether an owner agrees with a belief.
fn honours(scene: &Scene<'_>, node: &NodeScene, belief: &Belief) -> Result<bool, String> {
    let (number, lease, owner) = (node.number, belief.lease, belief.owner);
    match &belief.said {
        None => Ok(false),
        Some(Ok(until)) if belief.until <= *until => Ok(true),
        Some(Ok(until)) => Err(format!(
            "node {number} believes in lease {lease:?} until {} ns, and its owner {owner:?} only until {until} ns",
            belief.until
        )),
        Some(Err(LeaseError::WrongIncarnation { .. } | LeaseError::StaleTerm { .. })) => Ok(false),
        Some(Err(error)) => {
            let last = scene.past.rightful(owner, belief.incarnation, lease);
            let taken_over = last.is_some_and(|last| last.holder != node.id);
            if taken_over && matches!(error, LeaseError::Ended { .. }) {
                Ok(false)
            } else {
                Err(format!("node {number} believes in lease {lease:?} of node {owner:?}, which says: {error}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use shoal_actors::lease::EndReason;

    use super::super::scene::tests::{Made, id};
    use super::*;

    const LEASE: LeaseId = LeaseId(7);

    fn ended() -> Option<Result<u64, LeaseError>> {
        Some(Err(LeaseError::Ended { lease: LEASE, reason: EndReason::Released }))
    }

    #[test]
    fn one_is_honoured_and_two_are_not() {
        let (mut made, mut invariant) = (Made::new(3), OneHolder::default());
        made.lend(0, 7, 1, 10);
        made.believe(1, 7, 0, 500, Some(Ok(600)));
        made.check(&mut invariant, &[0, 1, 2]).unwrap();
        made.check(&mut invariant, &[0, 1, 2]).unwrap();
        // The second believer is found whoever of the two has changed last.
        made.believe(2, 7, 0, 500, Some(Ok(600)));
        let why = made.check(&mut invariant, &[2]).unwrap_err();
        assert!(why.contains("honoured for nodes 1 and 2"), "{why}");
    }

    #[test]
    fn a_lease_may_move() {
        let (mut made, mut invariant) = (Made::new(3), OneHolder::default());
        made.lend(0, 7, 2, 10);
        made.believe(2, 7, 0, 500, Some(Ok(600)));
        made.check(&mut invariant, &[2]).unwrap();
        // The old holder is told later.
        made.node(2).beliefs[0].said = Some(Err(LeaseError::WrongIncarnation { yours: Incarnation(1), current: Incarnation(2) }));
        made.believe(1, 7, 0, 500, Some(Ok(600)));
        made.check(&mut invariant, &[1, 2]).unwrap();
        // A dead node holds nothing.
        made.nodes.remove(&1);
        made.node(2).beliefs[0].said = Some(Ok(600));
        made.check(&mut invariant, &[0, 2]).unwrap();
    }

    #[test]
    fn nobody_believes_longer_than_the_owner() {
        let mut made = Made::new(2);
        made.lend(0, 7, 1, 10);
        made.believe(1, 7, 0, 601, Some(Ok(600)));
        let why = made.check(&mut OneHolder::default(), &[1]).unwrap_err();
        assert!(why.contains("until 601 ns"), "{why}");
        made.now = 601;
        made.check(&mut OneHolder::default(), &[1]).unwrap();
    }

    #[test]
    fn an_owner_refuses_only_those_who_were_succeeded() {
        let mut made = Made::new(3);
        made.lend(0, 7, 1, 10);
        made.believe(1, 7, 0, 500, ended());
        let why = made.check(&mut OneHolder::default(), &[1]).unwrap_err();
        assert!(why.contains("which says"), "{why}");
        // Node 2 has taken it over and given it back, and node 1 has not heard of it.
        made.node(0).lent[0].holder = id(2);
        made.past.note(&made.nodes[&0], |_| None);
        made.check(&mut OneHolder::default(), &[1]).unwrap();
        made.node(1).beliefs[0].said = Some(Err(LeaseError::UnknownLease { lease: LEASE }));
        made.check(&mut OneHolder::default(), &[1]).unwrap_err();
        // Nobody asks an owner that does not run.
        made.node(1).beliefs[0].said = None;
        made.check(&mut OneHolder::default(), &[1]).unwrap();
    }
}
