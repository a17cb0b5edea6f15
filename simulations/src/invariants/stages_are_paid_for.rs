//! What is in memory is charged.

use super::{Invariant, Scene};

/// The stages that a node has in memory are no more than what it has lent, fences that do not hold yet included.
#[derive(Debug, Default)]
pub struct StagesArePaidFor;

impl Invariant for StagesArePaidFor {
    fn name(&self) -> &'static str {
        "stages are paid for"
    }

    fn check(&mut self, scene: &Scene<'_>) -> Result<(), String> {
        for node in scene.of(scene.books) {
            let loaded: u64 = node.stages.values().map(|stage| stage.bytes).sum();
            if loaded > node.used {
                return Err(format!(
                    "node {} has {loaded} bytes of stages in memory and {} lent: {:?}",
                    node.number, node.used, node.stages
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use shoal_actors::ids::{InstanceId, PlanEpoch, Term};
    use shoal_actors::stage::StageKey;

    use super::super::scene::tests::{Made, id};
    use super::*;
    use crate::pipes::LoadedStage;

    #[test]
    fn no_stage_without_a_lease() {
        let mut made = Made::new(2);
        let key = |stage| StageKey { instance: InstanceId(1), term: Term { counter: 1, node: id(1) }, epoch: PlanEpoch(0), stage };
        made.lend(0, 7, 1, 50);
        made.node(0).stages.insert(key(0), LoadedStage { layers: 0..1, bytes: 50 });
        made.check(&mut StagesArePaidFor, &[0]).unwrap();
        made.node(0).stages.insert(key(1), LoadedStage { layers: 1..2, bytes: 1 });
        let why = made.check(&mut StagesArePaidFor, &[0]).unwrap_err();
        assert!(why.contains("node 0 has 51 bytes"), "{why}");
    }
}
