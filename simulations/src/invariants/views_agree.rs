//! When nothing goes wrong any more, all nodes soon agree on who is there.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_actors::ids::{Incarnation, NodeId};

use super::{Invariant, Scene};
use crate::world::nanos;

/// From a while after the last fault on, every node sees exactly the nodes that run as alive, in their present lives.
#[derive(Debug)]
pub struct ViewsAgree {
    within: u64,
    applies: bool,
}

impl ViewsAgree {
    /// The nodes get `within` to find together.
    pub fn new(within: Duration) -> Self {
        Self { within: nanos(within), applies: false }
    }
}

impl Invariant for ViewsAgree {
    fn name(&self) -> &'static str {
        "views agree"
    }

    fn check(&mut self, scene: &Scene<'_>) -> Result<(), String> {
        if scene.phases.quiet_since.is_none_or(|since| scene.now < since + self.within) {
            return Ok(());
        }
        for node in scene.since(&mut self.applies, scene.views) {
            let seen = || node.cluster.alive().map(|(id, member)| (id, member.card.incarnation));
            let there = scene.there.iter().map(|(id, incarnation)| (*id, *incarnation));
            if !seen().eq(there) {
                let seen: BTreeMap<NodeId, Incarnation> = seen().collect();
                let states: Vec<String> = node.cluster.members.iter().map(|(id, member)| format!("{id:?} {:?}", member.state)).collect();
                return Err(format!(
                    "{:?} after the last fault node {} sees {seen:?}, but there are {:?}; its members: {}",
                    Duration::from_nanos(self.within),
                    node.number,
                    scene.there,
                    states.join(", ")
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use shoal_actors::membership::MemberState;

    use super::super::scene::tests::Made;
    use super::*;

    #[test]
    fn everybody_sees_who_is_there() {
        let made = |seen, incarnation, state| {
            let mut made = Made::new(3);
            made.phases.quiet_since = Some(100);
            made.sees(1, seen, Incarnation(incarnation), state);
            made
        };
        let check = |made: &Made| made.check(&mut ViewsAgree::new(Duration::from_nanos(20)), &[]);
        // Somebody who has gone may be remembered.
        let mut fine = made(7, 1, MemberState::Dead);
        fine.now = 120;
        check(&fine).unwrap();
        for (seen, incarnation, state) in [(2, 1, MemberState::Suspect), (2, 0, MemberState::Alive), (7, 1, MemberState::Alive)] {
            let mut wrong = made(seen, incarnation, state);
            wrong.now = 119;
            check(&wrong).unwrap();
            wrong.now = 120;
            let why = check(&wrong).unwrap_err();
            assert!(why.contains("node 1 sees"), "{why}");
        }
    }

    #[test]
    fn they_have_to_stay_agreed() {
        let (mut made, mut invariant) = (Made::new(2), ViewsAgree::new(Duration::ZERO));
        made.phases.quiet_since = Some(0);
        made.check(&mut invariant, &[0, 1]).unwrap();
        made.sees(0, 1, Incarnation(1), MemberState::Dead);
        made.check(&mut invariant, &[0]).unwrap_err();
    }
}
