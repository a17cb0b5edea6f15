//! The scenario's model, and what it says when it is alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use shoal_actors::SamplingParams;
use shoal_actors::card::ModelCard;
use shoal_actors::env::Compute;
use shoal_actors::env::stage::{Row, SequenceId, StageOptions, StageSpec};
use shoal_actors::stage::machine::StageMachine;
use shoal_actors::stage::message::{Change, Open, Step, Tokens};

use crate::compute::{SimCompute, desktop};

/// Longest sequence, in tokens.
pub(super) const CONTEXT: u32 = 128;

/// Where every node has it.
pub(super) fn path() -> PathBuf {
    PathBuf::from("toy")
}

/// Its sizes: twelve layers of half a GiB each.
pub(super) fn card() -> ModelCard {
    const LAYER: u64 = 1 << 29;
    ModelCard {
        architecture: "toy".to_owned(),
        name: "toy".to_owned(),
        quantisation: "F32".to_owned(),
        parameters: 12 * LAYER / 4,
        layers: 12,
        hidden: 8,
        heads: 1,
        kv_heads: 1,
        head_dim: 8,
        feed_forward: 8,
        vocabulary: 300,
        context_tokens: CONTEXT,
        embedding_bytes: 9600,
        head_bytes: 9600,
        tied_head: false,
        layer_bytes: vec![LAYER; 12],
        kv_bytes_per_token: 64,
        file_bytes: 12 * LAYER,
    }
}

/// Devices that know it.
pub(super) fn compute(stale_keys: bool) -> SimCompute {
    let compute = SimCompute::new(vec![desktop()], BTreeMap::from([(path(), card())]));
    if stale_keys { compute.with_stale_keys() } else { compute }
}

/// The tokens that follow a prompt if one node holds all layers and nobody else asks: at most `most`, and none from the
/// one on that ends the text.
pub(super) fn alone(
    prompt: &[u32],
    sampling: &SamplingParams,
    most: u32,
    ends: &std::collections::BTreeSet<u32>,
) -> Result<Vec<u32>, String> {
    let options = StageOptions { threads: 1, kv_bytes: 1 << 20, rows_max: CONTEXT as usize, context_tokens: CONTEXT };
    let spec = StageSpec { layers: 0..card().layers };
    let stage = compute(false).load(Path::new("toy"), &spec, &options).map_err(|error| error.to_string())?;
    let mut machine = StageMachine::new(stage, CONTEXT as usize, 1);
    let (sequence, mut said) = (SequenceId(0), Vec::new());
    let open =
        Open { sequence: 0, prompt_tokens: u32::try_from(prompt.len()).unwrap_or(u32::MAX), sampling: sampling.clone(), shared: None };
    let mut step = Step { step: 0, changes: vec![Change::Open(open)], rows: Vec::new() };
    let mut tokens = prompt.to_vec();
    let (mut message, mut out) = (Vec::new(), Vec::new());
    while said.len() < most as usize {
        let from = if said.is_empty() { 0 } else { tokens.len() - 1 };
        let row = |at: usize| Row {
            sequence,
            position: u32::try_from(at).unwrap_or(u32::MAX),
            token: tokens[at],
            sample: at + 1 == tokens.len(),
        };
        step.rows = (from..tokens.len()).map(row).collect();
        step.encode(&mut message);
        machine.step(&message, &mut out).map_err(|fault| fault.to_string())?;
        let answer = Tokens::decode(&out, 1).map_err(|error| error.to_string())?;
        let Some(next) = answer.tokens.first().map(|token| token.token).filter(|token| !ends.contains(token)) else { break };
        said.push(next);
        tokens.push(next);
        step = Step { step: step.step + 1, changes: Vec::new(), rows: Vec::new() };
    }
    Ok(said)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn it_says_the_same_again_and_something_else_to_others() {
        let ends = BTreeSet::from([256]);
        let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let said = |prompt: &[u32], sampling: &SamplingParams| alone(prompt, sampling, 20, &ends).unwrap();
        let first = said(&[1, 2, 3], &greedy);
        assert_eq!(first.len(), 20);
        assert_eq!(first, said(&[1, 2, 3], &greedy));
        assert_ne!(first, said(&[1, 2, 4], &greedy));
        let warm = |seed| SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() };
        assert_ne!(said(&[1, 2, 3], &warm(1)), said(&[1, 2, 3], &warm(2)));
        assert_eq!(alone(&[1, 2, 3], &greedy, 20, &BTreeSet::from([first[5]])).unwrap(), first[..5]);
    }
}
