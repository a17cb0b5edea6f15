//! An owner heeds one conductor of an instance at a time.

use std::collections::BTreeMap;

use shoal_actors::ids::{Incarnation, InstanceId, LeaseId, NodeId, Term};

use super::{Invariant, Scene};

/// How much the end of a lease may seem to move, in nanoseconds, because clocks run at different speeds.
const DRIFT: u64 = 100_000_000;

/// At each life of an owner the highest term under which an instance holds leases only ever rises, no counter has two claimants, and
/// leases under older terms are left to run out: nobody renews them. So whoever conducts an instance under an older term has nothing to
/// run it on at any owner that knows a newer one.
#[derive(Debug, Default)]
pub struct OneConductor {
    /// The highest term that each life of an owner has seen.
    heeded: BTreeMap<(NodeId, Incarnation, InstanceId), Term>,
    /// When leases under older terms run out.
    superseded: BTreeMap<(NodeId, LeaseId), u64>,
}

impl Invariant for OneConductor {
    fn name(&self) -> &'static str {
        "one conductor"
    }

    fn check(&mut self, scene: &Scene<'_>) -> Result<(), String> {
        for node in scene.of(scene.books) {
            let in_force = || node.lent.iter().filter_map(|lent| Some((lent, lent.until?, lent.conducted?)));
            for (lent, _, (instance, term)) in in_force() {
                if lent.holder != term.node {
                    let holder = lent.holder;
                    return Err(format!("node {} honours lease {:?} of {term:?} for node {holder:?}", node.number, lent.lease));
                }
                let known = self.heeded.entry((node.id, node.incarnation, instance)).or_insert(term);
                if known.counter == term.counter && known.node != term.node {
                    return Err(format!("node {} lends to two claimants of instance {instance:?}: {known:?} and {term:?}", node.number));
                }
                *known = (*known).max(term);
            }
            for (lent, until, (instance, term)) in in_force() {
                if self.heeded.get(&(node.id, node.incarnation, instance)).is_none_or(|newest| *newest == term) {
                    // Perhaps claimed by now.
                    self.superseded.remove(&(node.id, lent.lease));
                    continue;
                }
                let before = *self.superseded.entry((node.id, lent.lease)).or_insert(until);
                if until > before.saturating_add(DRIFT) {
                    let lease = lent.lease;
                    return Err(format!("node {} goes on honouring lease {lease:?} of {term:?}, which is superseded", node.number));
                }
            }
            self.superseded.retain(|(owner, lease), _| *owner != node.id || node.lent.iter().any(|lent| lent.lease == *lease));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::scene::tests::{Made, id};
    use super::*;

    const INSTANCE: InstanceId = InstanceId(3);

    fn term(counter: u64, node: u16) -> Term {
        Term { counter, node: id(node) }
    }

    /// Node 0 lends to the conductors of these terms.
    fn lending(terms: &[Term]) -> Made {
        let mut made = Made::new(4);
        for (lease, term) in (1..).zip(terms) {
            made.lend(0, lease, u16::from(term.node.0[0]) - 1, 10);
            made.node(0).lent.last_mut().unwrap().conducted = Some((INSTANCE, *term));
        }
        made
    }

    #[test]
    fn what_is_superseded_runs_out() {
        let mut invariant = OneConductor::default();
        lending(&[term(1, 1), term(1, 1)]).check(&mut invariant, &[0]).unwrap();
        // A claim moves all of it; who only leases more leaves the rest to run out.
        lending(&[term(2, 2), term(2, 2)]).check(&mut invariant, &[0]).unwrap();
        let mut made = lending(&[term(2, 2), term(3, 3)]);
        made.check(&mut invariant, &[0]).unwrap();
        made.node(0).lent[1].until = Some(2 * DRIFT);
        made.check(&mut invariant, &[0]).unwrap();
        let mut claimed = lending(&[term(3, 3), term(3, 3)]);
        claimed.node(0).lent[0].until = Some(2 * DRIFT);
        claimed.check(&mut invariant, &[0]).unwrap();
        let mut again = lending(&[term(3, 3), term(4, 1)]);
        again.node(0).lent[0].until = Some(2 * DRIFT);
        again.check(&mut invariant, &[0]).unwrap();
        again.node(0).lent[0].until = Some(4 * DRIFT);
        let why = again.check(&mut invariant, &[0]).unwrap_err();
        assert!(why.contains("node 0 goes on honouring"), "{why}");
    }

    #[test]
    fn terms_do_not_come_back() {
        let mut invariant = OneConductor::default();
        lending(&[term(2, 2)]).check(&mut invariant, &[0]).unwrap();
        let mut made = lending(&[term(1, 1)]);
        made.check(&mut invariant, &[0]).unwrap();
        made.node(0).lent[0].until = Some(2 * DRIFT);
        assert!(made.check(&mut invariant, &[0]).is_err(), "renewed under a term that is over");
        // A new life of the owner knows nothing of it.
        let mut invariant = OneConductor::default();
        lending(&[term(2, 2)]).check(&mut invariant, &[0]).unwrap();
        made.node(0).incarnation = Incarnation(2);
        made.check(&mut invariant, &[0]).unwrap();
    }

    #[test]
    fn a_counter_has_one_claimant() {
        let mut invariant = OneConductor::default();
        lending(&[term(2, 2)]).check(&mut invariant, &[0]).unwrap();
        let why = lending(&[term(2, 3)]).check(&mut invariant, &[0]).unwrap_err();
        assert!(why.contains("two claimants"), "{why}");
    }

    #[test]
    fn a_term_is_its_claimants() {
        let mut made = lending(&[term(1, 1)]);
        made.node(0).lent[0].holder = id(2);
        let why = made.check(&mut OneConductor::default(), &[0]).unwrap_err();
        assert!(why.contains("for node"), "{why}");
    }
}
