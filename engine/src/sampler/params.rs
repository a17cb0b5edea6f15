//! What a request asks of sampling.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// How the next token is chosen. It is part of a request's journal: with the seed and the tokens so far it
/// determines the choice.
///
/// Order of effects: penalties, biases, temperature, then the truncations top-k, top-p and min-p, each on what the
/// one before has left. The defaults change nothing: plain sampling from the model's distribution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SamplingParams {
    /// Divides the logits. Zero means the likeliest token, always.
    pub temperature: f32,
    /// Keeps only so many of the likeliest tokens; zero keeps all.
    pub top_k: u32,
    /// Keeps the likeliest tokens that together have this probability; one keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this fraction as likely as the likeliest one; zero keeps all.
    pub min_p: f32,
    /// Divides positive logits, and multiplies negative ones, of tokens that occur in the prompt or the answer; one
    /// changes nothing. Keskar et al., "CTRL" (2019).
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens that occur in the answer so far.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit once for each time it occurs in the answer so far.
    pub frequency_penalty: f32,
    /// Added to tokens' logits.
    pub logit_bias: BTreeMap<u32, f32>,
    /// What chance is drawn from.
    pub seed: u64,
    /// Whether the chosen token's log probability is wanted, and of how many of the likeliest tokens besides.
    pub logprobs: Option<u8>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            seed: 0,
            logprobs: None,
        }
    }
}

/// Most tokens that may have a bias. It bounds what a request costs to carry and to apply.
pub const LOGIT_BIASES_MAX: usize = 1024;

/// Which parameter cannot be used, and why.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ParamsError {
    /// A number is out of its range.
    #[error("{name} is {value}; it must be {range}")]
    OutOfRange {
        /// The parameter as requests call it.
        name: &'static str,
        /// What was given.
        value: f32,
        /// What is allowed, in words.
        range: &'static str,
    },
    /// A biased token is not in the vocabulary.
    #[error("logit_bias names token {token}, but the model's tokens end at {last}")]
    UnknownToken {
        /// The token.
        token: u32,
        /// The last token of the vocabulary.
        last: usize,
    },
    /// There are too many biases.
    #[error("logit_bias names {count} tokens; at most {LOGIT_BIASES_MAX} are possible")]
    TooManyBiases {
        /// How many were given.
        count: usize,
    },
}

impl SamplingParams {
    /// The likeliest token, always.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Checks the parameters against a model with `vocabulary` tokens.
    ///
    /// # Errors
    /// [`ParamsError`] names the first that cannot be used.
    pub fn validate(&self, vocabulary: usize) -> Result<(), ParamsError> {
        let check = |name, value: f32, fits: bool, range| match fits {
            true => Ok(()),
            false => Err(ParamsError::OutOfRange { name, value, range }),
        };
        let within = |value: f32, low: f32, high: f32| (low..=high).contains(&value);
        check("temperature", self.temperature, within(self.temperature, 0.0, 100.0), "from 0 to 100")?;
        check("top_p", self.top_p, within(self.top_p, 0.0, 1.0), "from 0 to 1")?;
        check("min_p", self.min_p, within(self.min_p, 0.0, 1.0), "from 0 to 1")?;
        let repetition = self.repetition_penalty;
        check("repetition_penalty", repetition, within(repetition, 0.01, 100.0), "from 0.01 to 100")?;
        check("presence_penalty", self.presence_penalty, within(self.presence_penalty, -100.0, 100.0), "from -100 to 100")?;
        check("frequency_penalty", self.frequency_penalty, within(self.frequency_penalty, -100.0, 100.0), "from -100 to 100")?;
        if self.logit_bias.len() > LOGIT_BIASES_MAX {
            return Err(ParamsError::TooManyBiases { count: self.logit_bias.len() });
        }
        for (&token, &bias) in &self.logit_bias {
            check("logit_bias", bias, within(bias, -1000.0, 1000.0), "from -1000 to 1000")?;
            if token as usize >= vocabulary {
                return Err(ParamsError::UnknownToken { token, last: vocabulary.saturating_sub(1) });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_parameters_are_named() {
        let refused = |params: SamplingParams| params.validate(100).unwrap_err().to_string();
        assert!(SamplingParams::default().validate(100).is_ok());
        assert!(refused(SamplingParams { temperature: f32::NAN, ..Default::default() }).starts_with("temperature is NaN"));
        assert!(refused(SamplingParams { temperature: -0.1, ..Default::default() }).contains("from 0 to 100"));
        assert!(refused(SamplingParams { top_p: 1.5, ..Default::default() }).starts_with("top_p"));
        assert!(refused(SamplingParams { repetition_penalty: 0.0, ..Default::default() }).starts_with("repetition_penalty"));
        let bias = |token, value| SamplingParams { logit_bias: [(token, value)].into(), ..Default::default() };
        assert!(bias(99, -100.0).validate(100).is_ok());
        assert!(refused(bias(100, 1.0)).contains("token 100"));
        assert!(refused(bias(1, f32::INFINITY)).starts_with("logit_bias is inf"));
    }

    #[test]
    fn absent_fields_have_defaults_and_bias_keys_are_strings() {
        let params: SamplingParams = serde_json::from_str(r#"{"temperature": 0.5, "logit_bias": {"42": -100}}"#).unwrap();
        assert_eq!(params, SamplingParams { temperature: 0.5, logit_bias: [(42, -100.0)].into(), ..Default::default() });
    }
}
