//! The real compute: the engine on one of this machine's devices.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use shoal_engine::card::ModelCard;
use shoal_engine::chat::{ChatOptions, ChatTemplate, Message};
use shoal_engine::device::Device;
use shoal_engine::gguf::Gguf;
use shoal_engine::stage::{self, Input, Row, SequenceId, Stage, StageOptions, StageSpec, StepError};
use shoal_engine::tokenizer::{DecodeStream, Tokenizer};

use crate::card::DeviceCard;
use crate::catalog::InUse;
use crate::env::{Clock, Compute, ComputeError, TextDecoder, TextModel};
use crate::request::{ChatMessage, Prompt};
use crate::survey;

/// Runs stages with the engine.
#[derive(Debug, Clone)]
pub struct EngineCompute {
    device: Device,
    card: DeviceCard,
    clock: Arc<dyn Clock>,
}

fn failed(error: impl std::fmt::Display) -> ComputeError {
    ComputeError { reason: error.to_string() }
}

impl EngineCompute {
    /// Computes on this device of the machine.
    pub fn new(device: Device, card: DeviceCard, clock: Arc<dyn Clock>) -> Self {
        Self { device, card, clock }
    }
}

impl Compute for EngineCompute {
    fn devices(&self) -> Vec<DeviceCard> {
        vec![self.card.clone()]
    }

    fn measure(&self) -> Vec<DeviceCard> {
        vec![survey::measured(self.device, &self.card, &*self.clock)]
    }

    fn model_card(&self, path: &Path) -> Result<ModelCard, ComputeError> {
        let file = Gguf::open(path).map_err(failed)?;
        ModelCard::from_gguf(&file).map_err(failed)
    }

    fn text(&self, path: &Path) -> Result<Arc<dyn TextModel>, ComputeError> {
        let file = Gguf::open(path).map_err(failed)?;
        let tokenizer = Tokenizer::from_gguf(&file).map_err(failed)?;
        // A model without a template still continues plain text.
        let template = ChatTemplate::from_gguf(&file, &tokenizer).map_err(|error| error.to_string());
        Ok(Arc::new(EngineText { tokenizer, template, clock: Arc::clone(&self.clock) }))
    }

    fn load(&self, path: &Path, spec: &StageSpec, options: &StageOptions) -> Result<Box<dyn Stage>, ComputeError> {
        let in_use = InUse::take(path);
        let file = Gguf::open(path).map_err(failed)?;
        let stage = stage::load_to(self.device, &file, spec, options).map_err(failed)?;
        Ok(Box::new(Loaded { stage, _in_use: in_use }))
    }
}

/// A stage, and the mark on its model's file that somebody needs it: whoever repairs or moves it reads the file again.
struct Loaded {
    stage: Box<dyn Stage>,
    _in_use: InUse,
}

impl Stage for Loaded {
    fn hidden(&self) -> usize {
        self.stage.hidden()
    }

    fn vocabulary(&self) -> usize {
        self.stage.vocabulary()
    }

    fn is_first(&self) -> bool {
        self.stage.is_first()
    }

    fn is_last(&self) -> bool {
        self.stage.is_last()
    }

    fn step(&mut self, rows: &[Row], input: Input<'_>, output: &mut [f32]) -> Result<(), StepError> {
        self.stage.step(rows, input, output)
    }

    fn share(&mut self, from: SequenceId, to: SequenceId, tokens: usize) -> Result<(), StepError> {
        self.stage.share(from, to, tokens)
    }

    fn free(&mut self, sequence: SequenceId) {
        self.stage.free(sequence);
    }

    fn page_tokens(&self) -> usize {
        self.stage.page_tokens()
    }

    fn pages(&self) -> (usize, usize) {
        self.stage.pages()
    }

    fn weight_bytes(&self) -> u64 {
        self.stage.weight_bytes()
    }
}

struct EngineText {
    tokenizer: Tokenizer,
    template: Result<ChatTemplate, String>,
    clock: Arc<dyn Clock>,
}

fn message(message: &ChatMessage) -> Result<Message, String> {
    let other = match message.extra.as_str() {
        "" => serde_json::Map::new(),
        extra => serde_json::from_str(extra).map_err(|error| format!("a message's further fields are no JSON object: {error}"))?,
    };
    Ok(Message { role: message.role.clone(), content: message.content.clone(), other })
}

impl TextModel for EngineText {
    fn encode(&self, prompt: &Prompt) -> Result<Vec<u32>, String> {
        match prompt {
            Prompt::Tokens(tokens) => {
                let vocabulary = self.tokenizer.vocabulary();
                match tokens.iter().find(|token| **token as usize >= vocabulary) {
                    Some(odd) => Err(format!("token {odd} is outside the model's vocabulary of {vocabulary}")),
                    None => Ok(tokens.clone()),
                }
            }
            Prompt::Text(text) => Ok(self.tokenizer.encode_prompt(text, false)),
            Prompt::Chat { messages, tools } => {
                let template = self.template.as_ref().map_err(Clone::clone)?;
                let messages = messages.iter().map(message).collect::<Result<Vec<_>, _>>()?;
                let tools = match tools.as_str() {
                    "" => None,
                    tools => Some(serde_json::from_str(tools).map_err(|error| format!("the tools are no JSON: {error}"))?),
                };
                let unix_seconds = i64::try_from(self.clock.unix_time().as_secs()).ok().filter(|seconds| *seconds > 0);
                let options = ChatOptions { tools, unix_seconds, ..ChatOptions::default() };
                let text = template.render(&messages, &options).map_err(|error| error.to_string())?;
                Ok(self.tokenizer.encode_prompt(&text, true))
            }
        }
    }

    fn decoder(&self) -> Box<dyn TextDecoder> {
        Box::new(Decoder { stream: Some(self.tokenizer.stream_after_prompt()), tokenizer: self.tokenizer.clone() })
    }

    fn ends(&self) -> BTreeSet<u32> {
        self.tokenizer.end_of_generation().collect()
    }
}

struct Decoder {
    stream: Option<DecodeStream>,
    tokenizer: Tokenizer,
}

impl TextDecoder for Decoder {
    fn push(&mut self, token: u32) -> String {
        self.stream.as_mut().map(|stream| stream.push(token)).unwrap_or_default()
    }

    fn bytes(&self, token: u32) -> Vec<u8> {
        self.tokenizer.token_bytes(token)
    }

    fn finish(&mut self) -> String {
        self.stream.take().map(DecodeStream::finish).unwrap_or_default()
    }
}
