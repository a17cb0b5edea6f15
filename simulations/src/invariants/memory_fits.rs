//! A node's memory is never in use beyond what there is.

use super::{Invariant, Scene};

/// What a node has lent, and what is still written to although its lease has ended, fits into the node's memory.
#[derive(Debug, Default)]
pub struct MemoryFits;

impl Invariant for MemoryFits {
    fn name(&self) -> &'static str {
        "memory fits"
    }

    fn check(&mut self, scene: &Scene<'_>) -> Result<(), String> {
        for node in scene.of(scene.books) {
            let lent: u64 = node.lent.iter().map(|lease| lease.bytes).sum();
            let number = node.number;
            if node.used != lent {
                return Err(format!("node {number} counts {} bytes as lent, and its leases are {lent}", node.used));
            }
            let forgotten = node.writing.iter().filter(|lease| !node.lent.iter().any(|known| known.lease == **lease));
            let bytes = |lease| scene.past.rightful(node.id, node.incarnation, lease).map_or(0, |rightful| rightful.bytes);
            let lingering: u64 = forgotten.map(|lease| bytes(*lease)).sum();
            if lent + lingering > node.physical {
                return Err(format!(
                    "node {number} has {} bytes, of which {lent} are lent and {lingering} more are still written to",
                    node.physical
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use shoal_actors::ids::LeaseId;

    use super::super::scene::tests::Made;
    use super::*;

    #[test]
    fn what_is_lent_and_written_to_has_to_fit() {
        let mut made = Made::new(2);
        made.lend(0, 7, 1, 60);
        made.lend(0, 8, 1, 40);
        // A fence that does not hold yet is charged already.
        made.node(0).writing.insert(LeaseId(8));
        made.check(&mut MemoryFits, &[0, 1]).unwrap();

        made.lend(0, 9, 1, 1);
        let why = made.check(&mut MemoryFits, &[0]).unwrap_err();
        assert!(why.contains("101 are lent"), "{why}");
        made.check(&mut MemoryFits, &[1]).unwrap();
    }

    #[test]
    fn memory_that_is_still_written_to_is_not_free() {
        let mut made = Made::new(2);
        made.lend(0, 7, 1, 60);
        made.node(0).lent.clear();
        made.node(0).used = 0;
        made.node(0).writing.insert(LeaseId(7));
        made.lend(0, 8, 1, 40);
        made.check(&mut MemoryFits, &[0]).unwrap();
        made.lend(0, 9, 1, 10);
        let why = made.check(&mut MemoryFits, &[0]).unwrap_err();
        assert!(why.contains("50 are lent and 60 more are still written to"), "{why}");
    }

    #[test]
    fn the_sum_has_to_be_the_sum() {
        let mut made = Made::new(1);
        made.lend(0, 7, 0, 60);
        made.node(0).used = 59;
        let why = made.check(&mut MemoryFits, &[0]).unwrap_err();
        assert!(why.contains("counts 59 bytes"), "{why}");
    }
}
