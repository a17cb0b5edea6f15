//! Which tokens a sequence has, and how that changes the logits of the next one.

use std::collections::BTreeMap;

use super::params::SamplingParams;

/// How often a token occurs.
#[derive(Debug, Clone, Copy, Default)]
struct Occurrences {
    in_prompt: bool,
    in_answer: u32,
}

/// The tokens of a sequence, counted. It is empty while no penalty asks for it.
#[derive(Debug, Clone)]
pub(crate) struct History {
    counts: BTreeMap<u32, Occurrences>,
    /// Whether anything depends on the counts.
    counts_matter: bool,
    /// Tokens whose logits were changed for the current position, with what they were; ascending.
    changed: Vec<(u32, f32)>,
}

impl History {
    pub(crate) fn new(params: &SamplingParams, prompt: &[u32]) -> Self {
        let repetition = params.repetition_penalty != 1.0;
        let mut counts = BTreeMap::new();
        if repetition {
            counts.extend(prompt.iter().map(|&token| (token, Occurrences { in_prompt: true, in_answer: 0 })));
        }
        let counts_matter = repetition || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0;
        Self { counts, counts_matter, changed: Vec::new() }
    }

    /// Takes a token of the answer.
    pub(crate) fn accept(&mut self, token: u32) {
        if self.counts_matter {
            let seen = self.counts.entry(token).or_default();
            seen.in_answer = seen.in_answer.saturating_add(1);
        }
    }

    /// Applies penalties and biases. Tokens outside the vocabulary are ignored.
    pub(crate) fn adjust(&mut self, params: &SamplingParams, logits: &mut [f32]) {
        self.changed.clear();
        for (&token, seen) in &self.counts {
            let Some(logit) = logits.get_mut(token as usize) else { break };
            self.changed.push((token, *logit));
            if seen.in_prompt || seen.in_answer > 0 {
                *logit = if *logit > 0.0 { *logit / params.repetition_penalty } else { *logit * params.repetition_penalty };
            }
            if seen.in_answer > 0 {
                *logit -= params.presence_penalty + params.frequency_penalty * seen.in_answer as f32;
            }
            *logit = usable(*logit);
        }
        let counted = self.changed.len();
        for (&token, &bias) in &params.logit_bias {
            let Some(logit) = logits.get_mut(token as usize) else { break };
            if self.changed[..counted].binary_search_by_key(&token, |&(id, _)| id).is_err() {
                self.changed.push((token, *logit));
            }
            *logit = usable(*logit + bias);
        }
        self.changed.sort_unstable_by_key(|&(id, _)| id);
    }

    /// What a token's logit was before [`Self::adjust`], given what it is now.
    pub(crate) fn original(&self, token: u32, now: f32) -> f32 {
        match self.changed.binary_search_by_key(&token, |&(id, _)| id) {
            Ok(at) => self.changed[at].1,
            Err(_) => now,
        }
    }
}

/// A logit that can be compared: not-a-number is as unlikely as can be, infinity is the largest number, and −0 is 0.
pub(crate) fn usable(logit: f32) -> f32 {
    if logit.is_nan() { f32::NEG_INFINITY } else { logit.min(f32::MAX) + 0.0 }
}
