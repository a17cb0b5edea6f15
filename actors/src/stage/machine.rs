//! A stage's step as a pure machine: one message in, one message out.
//!
//! It owns the stage's compute and, on the last stage, one sampler per sequence, and knows which sequences run and which prefixes are
//! kept for others to begin with. It has no I/O: the device thread
//! (`stage::device`) feeds it from a tensor channel, a simulation from its event queue.

use std::collections::BTreeMap;

use shoal_engine::sampler::{SampleError, Sampler, SamplingParams};
use shoal_engine::stage::{Input, Row, SequenceId, Stage, StepError};

use super::message::{
    Change, KEPT_MAX, KIND_STEP, KIND_TOKENS, MessageError, Open, Shared, StepLimits, StepView, TOP_MAX, Token, Tokens, set_hidden,
};

/// Why a stage cannot go on. Its instance has to be re-made: steps after this one make no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StageFault {
    /// The message is malformed.
    #[error("stage received a malformed step: {0}")]
    Message(#[from] MessageError),
    /// A step was skipped or repeated.
    #[error("stage expected step {expected} and received step {received}")]
    Order {
        /// The one that is next.
        expected: u64,
        /// The one that came.
        received: u64,
    },
    /// Rows or pages of a sequence that was never opened, one that was opened twice, or one too many.
    #[error("sequence {0} is {1}")]
    Sequence(u32, &'static str),
    /// The model's output leaves nothing to choose from.
    #[error("no token can be chosen: {0}")]
    Sample(#[from] SampleError),
    /// The stage's compute refused.
    #[error("stage could not run a step: {0}")]
    Step(#[from] StepError),
}

/// Runs a stage step by step: one message in, one message out.
pub struct StageMachine {
    stage: Box<dyn Stage>,
    limits: StepLimits,
    next_step: u64,
    /// Those that run, and prefixes that are kept.
    sequences: BTreeMap<SequenceId, Known>,
    /// How many of them are prefixes.
    kept: usize,
    rows: Vec<Row>,
    input: Vec<f32>,
    output: Vec<f32>,
}

/// A sequence or a prefix.
struct Known {
    /// Whether rows may go on with it.
    runs: bool,
    /// On the last stage: the tokens whose rows have run, for samplers of sequences that begin alike.
    tokens: Vec<u32>,
    /// On the last stage, while it runs: what chooses its tokens.
    sampling: Option<Sampling>,
}

/// What is known of a sequence where its tokens are chosen. The prompt comes by in rows, in as many steps as it takes.
enum Sampling {
    Prompt { tokens: Vec<u32>, length: usize, params: SamplingParams },
    Answer(Box<Sampler>),
}

impl Sampling {
    fn new(open: Open) -> Self {
        let params = SamplingParams { logprobs: open.sampling.logprobs.map(|count| count.min(TOP_MAX as u8)), ..open.sampling };
        Self::Prompt { tokens: Vec::new(), length: open.prompt_tokens as usize, params }
    }

    /// Takes note of a row's token and gives the sampler once the prompt is complete.
    fn accept(&mut self, token: u32) -> Option<&mut Sampler> {
        match self {
            Self::Prompt { tokens, length, params } => {
                tokens.push(token);
                if tokens.len() < *length {
                    return None;
                }
                *self = Self::Answer(Box::new(Sampler::new(std::mem::take(params), tokens)));
            }
            Self::Answer(sampler) => sampler.accept(token),
        }
        match self {
            Self::Answer(sampler) => Some(sampler),
            Self::Prompt { .. } => None,
        }
    }
}

impl std::fmt::Debug for StageMachine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StageMachine").field("next_step", &self.next_step).field("sequences", &self.sequences.len()).finish_non_exhaustive()
    }
}

impl StageMachine {
    /// Wraps a loaded stage. `rows_max` and `sequences_max` are what the conductor agreed to stay within.
    pub fn new(stage: Box<dyn Stage>, rows_max: usize, sequences_max: usize) -> Self {
        let hidden = if stage.is_first() { 0 } else { stage.hidden() };
        Self {
            stage,
            limits: StepLimits { rows_max, sequences_max, hidden },
            next_step: 0,
            sequences: BTreeMap::new(),
            kept: 0,
            rows: Vec::with_capacity(rows_max),
            input: Vec::new(),
            output: Vec::new(),
        }
    }

    /// The compute that it wraps.
    pub fn stage(&self) -> &dyn Stage {
        &*self.stage
    }

    /// Forgets every sequence, to begin anew with step 0: the stage gets a place in another pipeline. Its weights stay.
    pub fn reset(&mut self) {
        for sequence in std::mem::take(&mut self.sequences).into_keys() {
            self.stage.free(sequence);
        }
        self.kept = 0;
        self.next_step = 0;
    }

    /// Does what happens to sequences before a step's rows run.
    fn change(&mut self, change: Change) -> Result<(), StageFault> {
        match change {
            Change::Open(open) => self.open(open),
            Change::Keep { shared, prefix } => {
                let tokens = self.share(shared, prefix)?;
                if self.kept >= KEPT_MAX {
                    return Err(StageFault::Sequence(prefix, "one prefix more than agreed"));
                }
                self.kept += 1;
                self.sequences.insert(SequenceId(prefix), Known { runs: false, tokens, sampling: None });
                Ok(())
            }
            Change::Free(number) => {
                let Some(known) = self.sequences.remove(&SequenceId(number)) else {
                    return Err(StageFault::Sequence(number, "freed without having been opened"));
                };
                self.kept -= usize::from(!known.runs);
                self.stage.free(SequenceId(number));
                Ok(())
            }
        }
    }

    fn open(&mut self, open: Open) -> Result<(), StageFault> {
        let number = open.sequence;
        if self.sequences.contains_key(&SequenceId(number)) {
            return Err(StageFault::Sequence(number, "opened twice"));
        }
        if self.sequences.len() - self.kept >= self.limits.sequences_max {
            return Err(StageFault::Sequence(number, "one more than agreed"));
        }
        let tokens = open.shared.map(|shared| self.share(shared, number)).transpose()?.unwrap_or_default();
        let mut sampling = self.stage.is_last().then(|| Sampling::new(open));
        if let Some(sampling) = &mut sampling {
            for token in &tokens {
                sampling.accept(*token);
            }
        }
        self.sequences.insert(SequenceId(number), Known { runs: true, tokens, sampling });
        Ok(())
    }

    /// Has `to` begin with pages of another one, and gives their tokens, which only the last stage knows.
    fn share(&mut self, Shared { from, tokens }: Shared, to: u32) -> Result<Vec<u32>, StageFault> {
        let Some(source) = self.sequences.get(&SequenceId(from)) else {
            return Err(StageFault::Sequence(from, "shared without having been opened"));
        };
        if self.sequences.contains_key(&SequenceId(to)) {
            return Err(StageFault::Sequence(to, "opened twice"));
        }
        self.stage.share(SequenceId(from), SequenceId(to), tokens as usize)?;
        Ok(source.tokens.iter().take(tokens as usize).copied().collect())
    }

    /// Runs one step message and writes the message for the next stage, or for the scheduler, into `out`; returns
    /// its kind.
    ///
    /// # Errors
    /// [`StageFault`]; after one the machine must be [`reset`](Self::reset) before it is used again.
    pub fn step(&mut self, message: &[u8], out: &mut Vec<u8>) -> Result<u8, StageFault> {
        let view = StepView::parse(message, self.limits)?;
        if view.step() != self.next_step {
            return Err(StageFault::Order { expected: self.next_step, received: view.step() });
        }
        self.next_step += 1;
        for change in view.changes()? {
            self.change(change)?;
        }
        self.rows.clear();
        self.rows.extend(view.rows());
        if let Some(row) = self.rows.iter().find(|row| !self.sequences.get(&row.sequence).is_some_and(|known| known.runs)) {
            return Err(StageFault::Sequence(row.sequence.0, "used without having been opened"));
        }
        let sampled = self.rows.iter().filter(|row| row.sample).count();
        let (width, count) = if self.stage.is_last() { (self.stage.vocabulary(), sampled) } else { (self.stage.hidden(), self.rows.len()) };
        self.output.clear();
        self.output.resize(width * count, 0.0);
        if !self.rows.is_empty() {
            view.activations(&mut self.input);
            let input = if self.stage.is_first() { Input::Tokens } else { Input::Activations(&self.input) };
            self.stage.step(&self.rows, input, &mut self.output)?;
        }
        if self.stage.is_last() {
            self.sample(view.step(), out)?;
            return Ok(KIND_TOKENS);
        }
        out.clear();
        out.extend_from_slice(view.head());
        set_hidden(out, if self.rows.is_empty() { 0 } else { width });
        out.reserve(self.output.len() * 4);
        self.output.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes()));
        Ok(KIND_STEP)
    }

    /// Tells the samplers which tokens went by, and lets them choose for the rows that ask.
    fn sample(&mut self, step: u64, out: &mut Vec<u8>) -> Result<(), StageFault> {
        let mut tokens = Tokens { step, tokens: Vec::new() };
        let mut logits = self.output.chunks_exact_mut(self.stage.vocabulary());
        for row in &self.rows {
            let Some(Known { tokens: known, sampling: Some(sampling), .. }) = self.sequences.get_mut(&row.sequence) else { continue };
            known.push(row.token);
            let sampler = sampling.accept(row.token);
            if !row.sample {
                continue;
            }
            let (Some(sampler), Some(logits)) = (sampler, logits.next()) else {
                return Err(StageFault::Sequence(row.sequence.0, "sampled before the end of its prompt"));
            };
            // Noise belongs to the place where the token goes, which is the one after the row.
            let chosen = sampler.sample(logits, row.position + 1)?;
            tokens.tokens.push(Token {
                sequence: row.sequence,
                position: row.position,
                token: chosen.token,
                logprob: chosen.logprob,
                top: chosen.top_logprobs,
            });
        }
        tokens.encode(out);
        Ok(())
    }
}
