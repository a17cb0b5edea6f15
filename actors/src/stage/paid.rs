//! What the leases of a stage pay for. A node checks it before it loads a byte, and again when the weights are in memory.

use std::collections::BTreeSet;
use std::ops::Range;

use super::service::LoadStage;
use crate::card::ModelCard;
use crate::ids::LeaseId;
use crate::lease::{Beneficiary, LeaseInfo, LeaseUse, Purpose};
use crate::plan;

/// Memory that a stage was granted, by purpose, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Paid {
    /// For its weights.
    pub weights: u64,
    /// For keys and values.
    pub kv: u64,
    /// For the buffers of a step, and headroom.
    pub activations: u64,
}

impl Paid {
    /// Adds up the leases of a load, if each of them is for just this stage of this instance under this term, and is not used
    /// already. `check` is the owner's word on a lease.
    ///
    /// # Errors
    /// Which lease does not pay for the stage, and why.
    pub(super) fn by(
        load: &LoadStage,
        check: impl Fn(&LeaseUse) -> Result<LeaseInfo, String>,
        in_use: impl Fn(LeaseId) -> bool,
    ) -> Result<Self, String> {
        let mut paid = Self::default();
        let mut seen = BTreeSet::new();
        for right in &load.leases {
            let info = check(right)?;
            let wrong = |why: &str| Err(format!("lease {} does not pay for the stage: {why}", right.lease));
            if !seen.insert(right.lease) {
                return wrong("it is named twice");
            }
            if in_use(right.lease) {
                return wrong("another stage is paid for with it");
            }
            if info.beneficiary != Beneficiary::Instance(load.key.instance) {
                return wrong("it is for another instance");
            }
            if info.term != load.key.term {
                return wrong("it is held under another term");
            }
            if info.stage.as_ref() != Some(&load.layers) {
                return wrong("it is for other layers");
            }
            let sum = match info.purpose {
                Purpose::Weights => &mut paid.weights,
                Purpose::Kv => &mut paid.kv,
                Purpose::Activations => &mut paid.activations,
                _ => return wrong("it is for another purpose"),
            };
            *sum = sum.saturating_add(info.bytes);
        }
        if paid.kv < load.kv_bytes {
            return Err(format!("leases of {} bytes do not pay for {} bytes of keys and values", paid.kv, load.kv_bytes));
        }
        Ok(paid)
    }

    /// Whether that is enough for these layers of a model, in steps of so many rows.
    ///
    /// # Errors
    /// What is missing.
    pub fn covers(&self, model: &ModelCard, layers: &Range<u32>, rows_max: usize) -> Result<(), String> {
        let need = plan::least(model, layers, u32::try_from(rows_max).unwrap_or(u32::MAX)).ok_or_else(|| {
            format!("{} has {} layers, and those from {} to {} are asked for", model.name, model.layers, layers.start, layers.end)
        })?;
        for (what, paid, need) in [("weights", self.weights, need.weights), ("activations", self.activations, need.activations)] {
            if paid < need {
                return Err(format!("leases of {paid} bytes do not pay for the stage's {what}, which take {need}"));
            }
        }
        Ok(())
    }

    /// Whether weights that turned out so large are paid for.
    ///
    /// # Errors
    /// How much they are beyond it.
    pub fn holds(&self, weight_bytes: u64) -> Result<(), String> {
        // Packing pads here and there; the headroom that was leased is for that.
        let most = self.weights.saturating_add(self.activations);
        if weight_bytes <= most { Ok(()) } else { Err(format!("the weights take {weight_bytes} bytes and leases pay for {most}")) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ids::{Incarnation, InstanceId, NodeId, PlanEpoch, Term};
    use crate::lease::{LeaseState, LeaseToken, TokenSeed};
    use crate::stage::StageKey;

    const HOLDER: NodeId = NodeId([1; 32]);
    const TERM: Term = Term { counter: 3, node: HOLDER };

    fn right(id: u128) -> LeaseUse {
        let lease = LeaseId(id);
        LeaseUse { lease, token: LeaseToken::derive(&TokenSeed([1; 32]), lease), incarnation: Incarnation(1), term: TERM }
    }

    fn load(leases: &[u128]) -> LoadStage {
        LoadStage {
            key: StageKey { instance: InstanceId(7), term: TERM, epoch: PlanEpoch(0), stage: 0 },
            from: HOLDER,
            slot_bytes: 1,
            model: "toy".to_owned(),
            sha256: String::new(),
            layers: 2..5,
            leases: leases.iter().copied().map(right).collect(),
            kv_bytes: 50,
            rows_max: 8,
            sequences_max: 1,
            context_tokens: 64,
            members: Vec::new(),
        }
    }

    fn info(right: &LeaseUse) -> LeaseInfo {
        let purpose = [Purpose::Weights, Purpose::Kv, Purpose::Activations][(right.lease.0 % 3) as usize];
        LeaseInfo {
            id: right.lease,
            holder: HOLDER,
            beneficiary: Beneficiary::Instance(InstanceId(7)),
            purpose,
            bytes: 100,
            term: TERM,
            stage: Some(2..5),
            state: LeaseState::Granted,
            remaining: Duration::from_secs(5),
        }
    }

    #[test]
    fn what_is_granted_adds_up() {
        let paid = Paid::by(&load(&[3, 4, 5]), |right| Ok(info(right)), |_| false).unwrap();
        assert_eq!(paid, Paid { weights: 100, kv: 100, activations: 100 });
        assert_eq!(Paid::by(&load(&[3, 4, 5, 6]), |right| Ok(info(right)), |_| false).unwrap().weights, 200);
        assert!(Paid::by(&load(&[3, 5]), |right| Ok(info(right)), |_| false).unwrap_err().contains("keys and values"));
    }

    #[test]
    fn leases_of_something_else_pay_for_nothing() {
        let refused = |leases: &[u128], change: &dyn Fn(&mut LeaseInfo), in_use: bool| {
            let checked = |right: &LeaseUse| {
                let mut info = info(right);
                change(&mut info);
                Ok(info)
            };
            Paid::by(&load(leases), checked, |_| in_use).unwrap_err()
        };
        assert!(refused(&[3, 4, 3], &|_| {}, false).contains("named twice"));
        assert!(refused(&[3, 4, 5], &|_| {}, true).contains("another stage"));
        assert!(refused(&[3, 4, 5], &|info| info.beneficiary = Beneficiary::Instance(InstanceId(8)), false).contains("another instance"));
        assert!(refused(&[3, 4, 5], &|info| info.beneficiary = Beneficiary::User("x".to_owned()), false).contains("another instance"));
        assert!(refused(&[3, 4, 5], &|info| info.term.counter = 2, false).contains("another term"));
        assert!(refused(&[3, 4, 5], &|info| info.stage = Some(2..6), false).contains("other layers"));
        assert!(refused(&[3, 4, 5], &|info| info.stage = None, false).contains("other layers"));
        assert!(refused(&[3, 4, 5], &|info| info.purpose = Purpose::User, false).contains("another purpose"));
        let unknown = Paid::by(&load(&[3]), |_| Err("no such lease".to_owned()), |_| false);
        assert_eq!(unknown.unwrap_err(), "no such lease");
    }

    #[test]
    fn a_stage_takes_no_more_than_was_granted() {
        let model = crate::plan::tests::smollm2();
        let whole = plan::least(&model, &(0..30), 128).unwrap();
        let paid = Paid { weights: whole.weights, kv: 0, activations: whole.activations };
        assert_eq!(paid.covers(&model, &(0..30), 128), Ok(()));
        assert_eq!(paid.covers(&model, &(10..20), 128), Ok(()));
        assert!(Paid { weights: 1, ..paid }.covers(&model, &(0..30), 128).unwrap_err().contains("weights"));
        assert!(Paid { weights: whole.weights - 1, ..paid }.covers(&model, &(0..30), 128).unwrap_err().contains("weights"));
        assert!(paid.covers(&model, &(0..30), 4096).unwrap_err().contains("activations"));
        for layers in [10..10, 20..31, 31..40] {
            assert!(paid.covers(&model, &layers, 1).unwrap_err().contains("30 layers"), "{layers:?}");
        }
        assert_eq!(paid.holds(whole.weights), Ok(()));
        assert!(paid.holds(whole.weights + whole.activations + 1).is_err());
    }
}
