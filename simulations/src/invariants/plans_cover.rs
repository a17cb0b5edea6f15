//! A pipeline has every layer of its model once.

use super::{Invariant, Scene};

/// The stages of an instance that is to be placed hold all layers of its model, in their order, each of them once.
#[derive(Debug, Default)]
pub struct PlansCover;

impl Invariant for PlansCover {
    fn name(&self) -> &'static str {
        "plans cover every layer once"
    }

    fn check(&mut self, scene: &Scene<'_>) -> Result<(), String> {
        for placed in &scene.served.placed {
            let mut next = 0;
            let fits =
                placed.stages.iter().all(|layers| layers.start == std::mem::replace(&mut next, layers.end) && layers.start < layers.end);
            if !fits || next != placed.layers {
                return Err(format!("instance {:?} has stages {:?} of {} layers", placed.instance, placed.stages, placed.layers));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use shoal_actors::ids::InstanceId;

    use super::super::Placed;
    use super::super::scene::tests::Made;
    use super::*;

    #[test]
    fn no_gap_no_overlap_no_rest() {
        let check = |stages: &[(u32, u32)]| {
            let mut made = Made::new(2);
            let stages = stages.iter().map(|(start, end)| *start..*end).collect();
            made.served.placed.push(Placed { instance: InstanceId(1), layers: 4, stages });
            made.check(&mut PlansCover, &[])
        };
        check(&[(0, 4)]).unwrap();
        check(&[(0, 1), (1, 3), (3, 4)]).unwrap();
        let wrong: [&[(u32, u32)]; 8] =
            [&[], &[(0, 3)], &[(1, 4)], &[(0, 2), (1, 4)], &[(0, 1), (2, 4)], &[(0, 2), (2, 2), (2, 4)], &[(2, 4), (0, 2)], &[(0, 5)]];
        for stages in wrong {
            let why = check(stages).unwrap_err();
            assert!(why.contains("of 4 layers"), "{why}");
        }
    }
}
