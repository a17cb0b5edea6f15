//! What a dead node held is free again soon.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_actors::lease::timing;

use super::{Invariant, Scene};
use crate::cluster::FENCE_MAX;
use crate::env::SimEnv;
use crate::world::nanos;

/// A lease whose holder's life is over is free within one time to live, the sweep and the time that its writers may
/// take, counted from when the last word of that life reached the owner (a message may wait behind a cut link for
/// longer than its sender lives).
#[derive(Debug, Default)]
pub struct DeadHoldersLose {
    /// The first moment at which a node is late, for those that lend to the dead.
    due: BTreeMap<u16, u64>,
}

impl DeadHoldersLose {
    /// How long a lease may outlive its holder.
    fn limit() -> u64 {
        let by_clock = nanos(timing::TTL + timing::SWEEP);
        let drift = by_clock / 1_000_000 * u64::from(SimEnv::DRIFT_MAX.unsigned_abs());
        by_clock + drift + nanos(FENCE_MAX) + nanos(Duration::from_millis(1))
    }
}

impl Invariant for DeadHoldersLose {
    fn name(&self) -> &'static str {
        "dead holders lose their leases"
    }

    fn check(&mut self, scene: &Scene<'_>) -> Result<(), String> {
        for number in scene.books {
            let first = scene.nodes.get(number).and_then(|node| node.orphans.iter().map(|orphan| orphan.last_word).min());
            match first {
                Some(last_word) => self.due.insert(*number, last_word.saturating_add(Self::limit())),
                None => self.due.remove(number),
            };
        }
        let Some((number, _)) = self.due.iter().find(|(_, due)| scene.now > **due) else { return Ok(()) };
        let late = scene.nodes.get(number).and_then(|node| node.orphans.iter().min_by_key(|orphan| orphan.last_word));
        let Some(orphan) = late else { return Ok(()) };
        Err(format!(
            "node {number} still charges {:?} to life {} of node {:?}, which was last heard of {:?} ago",
            orphan.lease,
            orphan.life,
            orphan.holder,
            Duration::from_nanos(scene.now - orphan.last_word)
        ))
    }
}

#[cfg(test)]
mod tests {
    use shoal_actors::ids::LeaseId;

    use super::super::Orphan;
    use super::super::scene::tests::{Made, id};
    use super::*;

    #[test]
    fn a_lease_may_outlive_its_holder_for_so_long() {
        let (mut made, mut invariant) = (Made::new(2), DeadHoldersLose::default());
        let orphan = |last_word| Orphan { lease: LeaseId(7), holder: id(1), life: 3, last_word };
        made.node(0).orphans = vec![orphan(900), orphan(500)];
        made.now = 500 + DeadHoldersLose::limit();
        made.check(&mut invariant, &[0, 1]).unwrap();
        // Time alone makes it late: the node has not changed.
        made.now += 1;
        let why = made.check(&mut invariant, &[]).unwrap_err();
        assert!(why.contains("node 0 still charges") && why.contains("life 3"), "{why}");
        // A later word had been on its way.
        made.node(0).orphans = vec![orphan(900)];
        made.check(&mut invariant, &[0]).unwrap();
        // It is given back, or the owner dies too.
        made.now = u64::MAX;
        made.check(&mut invariant, &[]).unwrap_err();
        made.node(0).orphans.clear();
        made.check(&mut invariant, &[0]).unwrap();
        made.node(0).orphans = vec![orphan(900)];
        made.nodes.remove(&0);
        made.check(&mut invariant, &[0, 1]).unwrap();
    }
}
