//! From logits to a token.
//!
//! The choice is a pure function of the logits, the request's parameters and seed, the tokens so far and the position
//! of the new one. It is the same bit for bit on any platform: elementary functions are the module's own, sums have a
//! fixed order, and ties go to the lowest id. A replay on another node therefore continues the same answer.

mod finish;
mod history;
mod math;
mod noise;
mod params;
mod stop;
mod top;

pub use finish::FinishReason;
pub use noise::noise;
pub use params::{LOGIT_BIASES_MAX, ParamsError, SamplingParams};
pub use stop::{STOP_BYTES_MAX, STOP_STRINGS_MAX, StopError, StopMatcher, Stopped};

use history::{History, usable};
use top::{argmax, largest};

/// A chosen token.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// Its log probability (natural) in the model's own distribution, before penalties, biases and temperature; given
    /// if the parameters ask for it.
    pub logprob: Option<f32>,
    /// The likeliest tokens of that distribution with their log probabilities, as many as were asked for, the
    /// likeliest first.
    pub top_logprobs: Vec<(u32, f32)>,
}

/// Why no token could be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// There are no logits.
    #[error("there are no logits to sample from")]
    Empty,
    /// No token is possible: every logit is −∞ or not a number. The model's weights or arithmetic are broken.
    #[error("the model gave no usable logit: all of them are NaN or minus infinity; its file may be damaged")]
    NothingPossible,
}

/// Chooses the tokens of one sequence.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    history: History,
    weights: Vec<f32>,
    ids: Vec<u32>,
}

impl Sampler {
    /// A sampler for a sequence that begins with the tokens `prompt`. Tokens of the answer go to [`Self::accept`].
    pub fn new(params: SamplingParams, prompt: &[u32]) -> Self {
        let history = History::new(&params, prompt);
        Self { params, history, weights: Vec::new(), ids: Vec::new() }
    }

    /// The request's parameters.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Takes a token of the answer, sampled or replayed.
    pub fn accept(&mut self, token: u32) {
        self.history.accept(token);
    }

    /// Chooses the token for `position`, counted from the start of the prompt, and changes `logits` on the way. The
    /// choice is not accepted yet.
    ///
    /// # Errors
    /// [`SampleError`] if the logits leave nothing to choose.
    pub fn sample(&mut self, logits: &mut [f32], position: u32) -> Result<Sampled, SampleError> {
        if logits.is_empty() {
            return Err(SampleError::Empty);
        }
        for logit in logits.iter_mut() {
            *logit = usable(*logit);
        }
        let top_of = |logits: &[f32]| logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let top = top_of(logits);
        if top == f32::NEG_INFINITY {
            return Err(SampleError::NothingPossible);
        }
        let mut top_logprobs = Vec::new();
        let mut log_total = None;
        if let Some(wanted) = self.params.logprobs {
            let total = math::exponentials(logits, top, 1.0, &mut self.weights);
            let log = f64::from(top) + math::ln(total);
            largest(logits, usize::from(wanted), &mut self.ids);
            top_logprobs.extend(self.ids.iter().map(|&id| (id, logprob(logits[id as usize], log))));
            log_total = Some(log);
        }
        self.history.adjust(&self.params, logits);
        let top = top_of(logits);
        if top == f32::NEG_INFINITY {
            return Err(SampleError::NothingPossible);
        }
        let token = match self.params.temperature > 0.0 {
            false => argmax(logits).ok_or(SampleError::Empty)?,
            true => self.draw(logits, top, noise(self.params.seed, position)),
        };
        let logprob = log_total.map(|log| logprob(self.history.original(token, logits[token as usize]), log));
        Ok(Sampled { token, logprob, top_logprobs })
    }

    /// Draws from the truncated distribution; `chance` is in `[0, 1)`.
    fn draw(&mut self, logits: &[f32], top: f32, chance: f64) -> u32 {
        let scale = 1.0 / self.params.temperature.max(f32::MIN_POSITIVE);
        let keeps_all = self.params.top_k == 0 && self.params.top_p >= 1.0;
        if keeps_all {
            math::exponentials(logits, top, scale, &mut self.weights);
            self.ids.clear();
        } else {
            self.keep_likeliest(logits, top, scale);
        }
        // The likeliest token has weight one.
        if self.params.min_p > 0.0 {
            for weight in &mut self.weights {
                if *weight < self.params.min_p {
                    *weight = 0.0;
                }
            }
        }
        let target = chance * math::sum(&self.weights);
        let mut passed = 0.0;
        let mut last = 0;
        for (at, &weight) in self.weights.iter().enumerate() {
            if weight > 0.0 {
                last = at;
                passed += f64::from(weight);
                if passed > target {
                    break;
                }
            }
        }
        if keeps_all { last as u32 } else { self.ids[last] }
    }

    /// Puts the tokens that top-k and top-p keep into `ids`, the likeliest first, and their weights into `weights`.
    fn keep_likeliest(&mut self, logits: &[f32], top: f32, scale: f32) {
        let most = match self.params.top_k as usize {
            0 => logits.len(),
            count => count.min(logits.len()),
        };
        let mut total = None;
        if self.params.top_k == 0 {
            total = Some(math::exponentials(logits, top, scale, &mut self.weights));
        }
        let weight = |id: u32| math::exp_not_positive((logits[id as usize] - top) * scale);
        // Top-p mostly keeps a handful of tokens, so sorting all of them is avoided as long as can be.
        let mut count = if self.params.top_k == 0 { most.min(64) } else { most };
        loop {
            largest(logits, count, &mut self.ids);
            let kept = self.ids.iter().map(|&id| weight(id));
            let total = total.unwrap_or_else(|| kept.clone().map(f64::from).sum());
            let target = f64::from(self.params.top_p) * total;
            let mut sum = 0.0;
            let enough = kept.clone().position(|weight| {
                sum += f64::from(weight);
                sum >= target
            });
            if let Some(last) = enough {
                self.ids.truncate(last + 1);
            }
            if enough.is_some() || count == most {
                break;
            }
            count = most.min(count * 16);
        }
        self.weights.clear();
        self.weights.extend(self.ids.iter().map(|&id| weight(id)));
    }
}

fn logprob(logit: f32, log_total: f64) -> f32 {
    (f64::from(logit) - log_total) as f32
}

#[cfg(test)]
mod tests;
