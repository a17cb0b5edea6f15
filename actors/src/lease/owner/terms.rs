//! Which term of each instance is in force at an owner.
//!
//! A term belongs to the first node that claims its counter here; another one with the same counter is refused, and a
//! higher counter supersedes it.

use std::collections::BTreeMap;

use crate::ids::{InstanceId, Term};
use crate::lease::error::LeaseError;
use crate::lease::timing;

#[derive(Debug)]
struct Bound {
    term: Term,
    order: u64,
}

#[derive(Debug, Default)]
pub(super) struct Terms {
    bound: BTreeMap<InstanceId, Bound>,
    order: u64,
}

impl Terms {
    /// Whether `term` may act on `instance`; `true` if it would supersede another one.
    pub(super) fn check(&self, instance: InstanceId, term: Term) -> Result<bool, LeaseError> {
        let Some(Bound { term: current, .. }) = self.bound.get(&instance) else { return Ok(false) };
        if term == *current {
            Ok(false)
        } else if term.counter > current.counter {
            Ok(true)
        } else if term.counter == current.counter {
            Err(LeaseError::TermTaken { instance, counter: term.counter, by: current.node })
        } else {
            Err(LeaseError::StaleTerm { instance, yours: term, current: *current })
        }
    }

    /// Whether `term` is not superseded here.
    pub(super) fn current(&self, instance: InstanceId, term: Term) -> Result<(), LeaseError> {
        self.check(instance, term).map(|_| ())
    }

    /// Puts a term in force that [`Terms::check`] has let pass; `true` if it superseded another one.
    pub(super) fn bind(&mut self, instance: InstanceId, term: Term) -> bool {
        self.order += 1;
        let before = self.bound.insert(instance, Bound { term, order: self.order });
        before.is_some_and(|before| before.term != term)
    }

    /// Forgets the instances that were bound first and are not `in_use`, if there are too many.
    pub(super) fn trim(&mut self, in_use: impl Fn(InstanceId) -> bool) {
        if self.bound.len() <= timing::TERMS_MAX + timing::LEASES_MAX {
            return;
        }
        let mut idle: Vec<(u64, InstanceId)> =
            self.bound.iter().filter(|(instance, _)| !in_use(**instance)).map(|(&instance, bound)| (bound.order, instance)).collect();
        idle.sort_unstable();
        // Half at once, so that this is rare.
        for (_, instance) in idle.into_iter().take(self.bound.len() - timing::TERMS_MAX / 2) {
            self.bound.remove(&instance);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::NodeId;

    fn term(counter: u64, node: u8) -> Term {
        Term { counter, node: NodeId([node; 32]) }
    }

    #[test]
    fn a_term_is_its_first_claimants() {
        let mut terms = Terms::default();
        let instance = InstanceId(1);
        assert_eq!(terms.check(instance, term(3, 1)), Ok(false));
        assert!(!terms.bind(instance, term(3, 1)));
        assert_eq!(terms.check(instance, term(3, 2)), Err(LeaseError::TermTaken { instance, counter: 3, by: NodeId([1; 32]) }));
        assert_eq!(terms.check(instance, term(2, 9)), Err(LeaseError::StaleTerm { instance, yours: term(2, 9), current: term(3, 1) }));
        assert_eq!(terms.check(instance, term(4, 2)), Ok(true));
        assert!(terms.bind(instance, term(4, 2)));
        assert!(terms.current(instance, term(3, 1)).is_err());
    }

    #[test]
    fn memory_of_instances_is_bounded() {
        let mut terms = Terms::default();
        for id in 0..20_000 {
            terms.bind(InstanceId(id), term(1, 1));
            terms.trim(|instance| instance == InstanceId(0));
        }
        assert!(terms.bound.len() <= timing::TERMS_MAX + timing::LEASES_MAX);
        assert!(terms.check(InstanceId(0), term(0, 1)).is_err(), "the one in use is known");
        assert!(terms.check(InstanceId(19_999), term(0, 1)).is_err(), "the latest is known");
        assert_eq!(terms.check(InstanceId(1), term(0, 1)), Ok(false), "the oldest idle one is not");
    }
}
