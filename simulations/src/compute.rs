//! Devices and models that exist only as numbers: a cost model, and stages whose arithmetic is a toy.
//!
//! A toy stage does with rows what a real one does, except that the numbers mean nothing: each layer maps each element
//! by a fixed rule, so any split of the layers over stages gives the same bits, and the logits depend on the whole
//! prefix of the sequence.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use shoal_actors::card::{DeviceCard, ModelCard};
use shoal_actors::env::stage::{Input, Row, SequenceId, Stage, StageOptions, StageSpec, StepError};
use shoal_actors::env::{Compute, ComputeError, TextDecoder, TextModel};
use shoal_actors::request::Prompt;

/// Tokens of a page of keys and values.
const PAGE_TOKENS: u32 = 16;
/// The token that ends a toy's answer; those below it are bytes.
const END: u32 = 256;

/// Devices with given speeds, and models with given sizes.
#[derive(Debug, Clone, Default)]
pub struct SimCompute {
    devices: Vec<DeviceCard>,
    models: BTreeMap<PathBuf, ModelCard>,
    stale_keys: bool,
}

impl SimCompute {
    /// These devices, best first, and these models by the paths that they are opened by.
    pub fn new(devices: Vec<DeviceCard>, models: BTreeMap<PathBuf, ModelCard>) -> Self {
        Self { devices, models, stale_keys: false }
    }

    /// The same with stages that forget to forget: what a sequence has cached stays when it is freed.
    #[must_use]
    pub fn with_stale_keys(mut self) -> Self {
        self.stale_keys = true;
        self
    }

    /// How long a step of `rows` rows through `layers` of a model takes on the best device: the slower of reading the
    /// weights once and of multiplying them with every row. Zero without a device or a model.
    pub fn step_time(&self, path: &Path, layers: Range<u32>, rows: usize) -> Duration {
        let (Some(device), Some(card)) = (self.devices.first(), self.models.get(path)) else { return Duration::ZERO };
        let bytes: u64 = layers.filter_map(|layer| card.layer_bytes.get(usize::try_from(layer).ok()?)).sum();
        let all: u64 = card.layer_bytes.iter().sum();
        let weights = card.parameters as f64 * bytes as f64 / all.max(1) as f64;
        let read = bytes as f64 / device.read_bytes_per_second.max(1.0);
        let multiply = weights * rows as f64 / device.multiply_adds_per_second.max(1.0);
        Duration::try_from_secs_f64(read.max(multiply)).unwrap_or(Duration::MAX)
    }

    fn card(&self, path: &Path) -> Result<&ModelCard, ComputeError> {
        let missing = || ComputeError { reason: format!("there is no model `{}` in this simulation", path.display()) };
        self.models.get(path).ok_or_else(missing)
    }
}

impl Compute for SimCompute {
    fn devices(&self) -> Vec<DeviceCard> {
        self.devices.clone()
    }

    fn model_card(&self, path: &Path) -> Result<ModelCard, ComputeError> {
        self.card(path).cloned()
    }

    fn text(&self, path: &Path) -> Result<Arc<dyn TextModel>, ComputeError> {
        self.card(path).map(|_| Arc::new(ByteText) as Arc<dyn TextModel>)
    }

    fn load(&self, path: &Path, spec: &StageSpec, options: &StageOptions) -> Result<Box<dyn Stage>, ComputeError> {
        let card = self.card(path)?;
        let Range { start, end } = spec.layers;
        if start >= end || end > card.layers {
            return Err(ComputeError { reason: format!("layers {start}..{end} are not layers of a model with {}", card.layers) });
        }
        let page = card.kv_bytes_per_token.max(1) * u64::from(PAGE_TOKENS) * u64::from(end - start);
        let pages = usize::try_from(options.kv_bytes / page).unwrap_or(usize::MAX);
        let layers = card.layer_bytes.iter().skip(usize::try_from(start).unwrap_or(usize::MAX));
        let weight_bytes = layers.take(usize::try_from(end - start).unwrap_or(usize::MAX)).sum();
        let stage = ToyStage {
            hidden: usize::try_from(card.hidden).unwrap_or(usize::MAX),
            vocabulary: usize::try_from(card.vocabulary).unwrap_or(usize::MAX),
            layers: start..end,
            layers_all: card.layers,
            rows_max: options.rows_max,
            context: options.context_tokens,
            pages,
            weight_bytes,
            sequences: BTreeMap::new(),
            taken: 0,
            stale_keys: self.stale_keys,
        };
        Ok(Box::new(stage))
    }
}

/// A stage of a toy model.
#[derive(Debug)]
struct ToyStage {
    hidden: usize,
    vocabulary: usize,
    layers: Range<u32>,
    layers_all: u32,
    rows_max: usize,
    context: u32,
    pages: usize,
    weight_bytes: u64,
    sequences: BTreeMap<SequenceId, Cached>,
    /// Pages that were ever taken.
    taken: u64,
    stale_keys: bool,
}

/// What is cached of a sequence.
#[derive(Debug, Default)]
struct Cached {
    /// Of each position: a digest of the prefix as this stage saw it.
    digests: Vec<u64>,
    /// The pages that hold them, by names that are never used again. Sequences that begin alike may have the same ones.
    pages: Vec<u64>,
}

impl Cached {
    /// The same for the first so many tokens, if these are whole pages that are there.
    fn first(&self, tokens: usize) -> Option<Self> {
        let whole = tokens > 0 && tokens.is_multiple_of(PAGE_TOKENS as usize);
        let digests = self.digests.get(..tokens).filter(|_| whole)?.to_vec();
        Some(Self { digests, pages: self.pages.get(..pages_of(tokens))?.to_vec() })
    }
}

/// Mixes two numbers (the finaliser of splitmix64).
fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A number between 0 and 1 with as many bits as an `f32` holds exactly.
fn unit(x: u64) -> f32 {
    (x >> 40) as f32 / (1_u64 << 24) as f32
}

fn pages_of(tokens: usize) -> usize {
    tokens.div_ceil(PAGE_TOKENS as usize)
}

impl ToyStage {
    fn check(&self, rows: &[Row], input: Input<'_>, output: &[f32]) -> Result<(), StepError> {
        let wrong = |text: String| Err(StepError::Malformed(text));
        if rows.len() > self.rows_max {
            return wrong(format!("{} rows, at most {}", rows.len(), self.rows_max));
        }
        match (self.is_first(), input) {
            (true, Input::Tokens) => {}
            (false, Input::Activations(values)) if values.len() == rows.len() * self.hidden => {}
            _ => return wrong("the input is not what this stage takes".to_owned()),
        }
        let sampled = rows.iter().filter(|row| row.sample).count();
        let expected = if self.is_last() { sampled * self.vocabulary } else { rows.len() * self.hidden };
        if output.len() != expected {
            return wrong(format!("an output of {} elements instead of {expected}", output.len()));
        }
        let mut lengths: BTreeMap<SequenceId, usize> = self.sequences.iter().map(|(id, cached)| (*id, cached.digests.len())).collect();
        for row in rows {
            let position = usize::try_from(row.position).unwrap_or(usize::MAX);
            let length = lengths.entry(row.sequence).or_default();
            if position > *length || row.position >= self.context {
                return wrong(format!("position {position} of a sequence with {length} tokens"));
            }
            *length = position + 1;
        }
        let held = |id: &SequenceId| self.sequences.get(id).map_or(0, |cached| cached.pages.len());
        let needed: usize = lengths.iter().map(|(id, length)| pages_of(*length).saturating_sub(held(id))).sum();
        let (_, free) = self.pages();
        if needed > free { Err(StepError::KvFull { needed, free }) } else { Ok(()) }
    }
}

impl Stage for ToyStage {
    fn hidden(&self) -> usize {
        self.hidden
    }

    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn is_first(&self) -> bool {
        self.layers.start == 0
    }

    fn is_last(&self) -> bool {
        self.layers.end == self.layers_all
    }

    fn step(&mut self, rows: &[Row], input: Input<'_>, output: &mut [f32]) -> Result<(), StepError> {
        self.check(rows, input, output)?;
        let (layers, last, mut sampled) = (self.layers.clone(), self.is_last(), 0);
        for (n, row) in rows.iter().enumerate() {
            let mut values: Vec<u32> = match input {
                Input::Tokens => (0..self.hidden).map(|i| unit(mix(row.token.into(), i as u64)).to_bits()).collect(),
                Input::Activations(all) => all[n * self.hidden..(n + 1) * self.hidden].iter().map(|value| value.to_bits()).collect(),
            };
            let cached = self.sequences.entry(row.sequence).or_default();
            if !self.stale_keys {
                cached.digests.truncate(usize::try_from(row.position).unwrap_or(usize::MAX));
                cached.pages.truncate(pages_of(cached.digests.len()));
            }
            for layer in layers.clone() {
                for value in &mut values {
                    *value = unit(mix(u64::from(*value), u64::from(layer))).to_bits();
                }
            }
            // After the layers, so that on the last stage it is the same however they are split.
            let seen = values.iter().fold(cached.digests.last().copied().unwrap_or(0), |digest, bits| mix(digest, u64::from(*bits)));
            cached.digests.push(seen);
            while cached.pages.len() < pages_of(cached.digests.len()) {
                cached.pages.push(self.taken);
                self.taken += 1;
            }
            if !last {
                for (to, bits) in output[n * self.hidden..(n + 1) * self.hidden].iter_mut().zip(&values) {
                    *to = f32::from_bits(*bits);
                }
            } else if row.sample {
                let start = sampled * self.vocabulary;
                for (token, to) in output[start..start + self.vocabulary].iter_mut().enumerate() {
                    *to = unit(mix(seen, token as u64));
                }
                sampled += 1;
            }
        }
        Ok(())
    }

    fn share(&mut self, from: SequenceId, to: SequenceId, tokens: usize) -> Result<(), StepError> {
        let first = self.sequences.get(&from).and_then(|cached| cached.first(tokens));
        match first {
            Some(first) if self.stale_keys || !self.sequences.contains_key(&to) => {
                self.sequences.insert(to, first);
                Ok(())
            }
            _ => Err(StepError::Malformed(format!("sequence {} cannot begin with {tokens} tokens of {}", to.0, from.0))),
        }
    }

    fn free(&mut self, sequence: SequenceId) {
        if !self.stale_keys {
            self.sequences.remove(&sequence);
        }
    }

    fn page_tokens(&self) -> usize {
        PAGE_TOKENS as usize
    }

    fn pages(&self) -> (usize, usize) {
        let used: BTreeSet<u64> = self.sequences.values().flat_map(|cached| cached.pages.iter().copied()).collect();
        (self.pages, self.pages.saturating_sub(used.len()))
    }

    fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }
}

/// Text whose tokens are its bytes.
#[derive(Debug)]
pub(crate) struct ByteText;

impl TextModel for ByteText {
    fn encode(&self, prompt: &Prompt) -> Result<Vec<u32>, String> {
        let text = match prompt {
            Prompt::Tokens(tokens) => return Ok(tokens.clone()),
            Prompt::Text(text) => text.clone(),
            Prompt::Chat { messages, .. } => {
                let say = |message: &shoal_actors::request::ChatMessage| {
                    format!("{}: {}\n", message.role, message.content.as_deref().unwrap_or_default())
                };
                messages.iter().map(say).collect()
            }
            _ => return Err("a simulated model does not know this kind of prompt".to_owned()),
        };
        Ok(text.bytes().map(u32::from).collect())
    }

    fn decoder(&self) -> Box<dyn TextDecoder> {
        Box::new(ByteDecoder::default())
    }

    fn ends(&self) -> BTreeSet<u32> {
        BTreeSet::from([END])
    }
}

#[derive(Debug, Default)]
struct ByteDecoder {
    waiting: Vec<u8>,
}

impl TextDecoder for ByteDecoder {
    fn push(&mut self, token: u32) -> String {
        self.waiting.extend(u8::try_from(token).ok());
        match std::str::from_utf8(&self.waiting) {
            Ok(text) => {
                let text = text.to_owned();
                self.waiting.clear();
                text
            }
            Err(error) if error.error_len().is_none() => String::new(),
            Err(_) => String::from_utf8_lossy(&std::mem::take(&mut self.waiting)).into_owned(),
        }
    }

    fn bytes(&self, token: u32) -> Vec<u8> {
        u8::try_from(token).into_iter().collect()
    }

    fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.waiting)).into_owned()
    }
}

/// A device of the simulation's machines: about a small desktop's processor.
pub(crate) fn desktop() -> DeviceCard {
    DeviceCard {
        kind: shoal_actors::card::DeviceKind::Cpu,
        name: "simulated processor".to_owned(),
        features: Vec::new(),
        memory_bytes: 0,
        threads: 8,
        read_bytes_per_second: 40e9,
        multiply_adds_per_second: 200e9,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compute() -> SimCompute {
        let card = ModelCard {
            architecture: "toy".to_owned(),
            name: "toy".to_owned(),
            quantisation: "F32".to_owned(),
            parameters: 4_000_000,
            layers: 4,
            hidden: 8,
            heads: 1,
            kv_heads: 1,
            head_dim: 8,
            feed_forward: 8,
            vocabulary: 32,
            context_tokens: 64,
            embedding_bytes: 0,
            head_bytes: 0,
            tied_head: false,
            layer_bytes: vec![1_000_000; 4],
            kv_bytes_per_token: 10,
            file_bytes: 4_000_000,
        };
        SimCompute::new(vec![desktop()], BTreeMap::from([(PathBuf::from("toy"), card)]))
    }

    fn logits(splits: &[u32], tokens: &[u32]) -> Vec<f32> {
        let compute = compute();
        let options = StageOptions { threads: 1, kv_bytes: 100_000, rows_max: 64, context_tokens: 64 };
        let rows: Vec<Row> = (0..)
            .zip(tokens)
            .map(|(position, token)| Row {
                sequence: SequenceId(1),
                position,
                token: *token,
                sample: position as usize + 1 == tokens.len(),
            })
            .collect();
        let mut from = vec![];
        for ends in splits.windows(2) {
            let mut stage = compute.load(Path::new("toy"), &StageSpec { layers: ends[0]..ends[1] }, &options).unwrap();
            let mut to = vec![0.0; if stage.is_last() { 32 } else { rows.len() * 8 }];
            let input = if stage.is_first() { Input::Tokens } else { Input::Activations(&from) };
            stage.step(&rows, input, &mut to).unwrap();
            from = to;
        }
        from
    }

    #[test]
    fn the_split_does_not_show() {
        let whole = logits(&[0, 4], &[1, 2, 3]);
        assert_eq!(whole, logits(&[0, 1, 4], &[1, 2, 3]));
        assert_eq!(whole, logits(&[0, 2, 3, 4], &[1, 2, 3]));
        assert_ne!(whole, logits(&[0, 4], &[1, 2, 4]));
        assert_ne!(whole, logits(&[0, 4], &[4, 2, 3]), "the prefix counts");
    }

    #[test]
    fn memory_for_keys_and_values_is_finite() {
        let options = StageOptions { threads: 1, kv_bytes: 10 * 16 * 4 * 2, rows_max: 64, context_tokens: 64 };
        let mut stage = compute().load(Path::new("toy"), &StageSpec { layers: 0..4 }, &options).unwrap();
        let rows: Vec<Row> = (0..33).map(|position| Row { sequence: SequenceId(0), position, token: 0, sample: false }).collect();
        assert_eq!(stage.pages(), (2, 2));
        assert_eq!(stage.step(&rows, Input::Tokens, &mut []), Err(StepError::KvFull { needed: 3, free: 2 }));
        stage.step(&rows[..32], Input::Tokens, &mut []).unwrap();
        assert_eq!(stage.pages(), (2, 0));
        assert!(matches!(stage.step(&rows[..1], Input::Activations(&[0.0; 8]), &mut []), Err(StepError::Malformed(_))));
        stage.free(SequenceId(0));
        assert_eq!(stage.pages(), (2, 2));
    }

    #[test]
    fn sequences_that_begin_alike_share_pages() {
        let options = StageOptions { threads: 1, kv_bytes: 10 * 16 * 4 * 4, rows_max: 64, context_tokens: 64 };
        let mut stage = compute().load(Path::new("toy"), &StageSpec { layers: 0..4 }, &options).unwrap();
        let rows = |sequence, positions: Range<u32>| -> Vec<Row> {
            positions.map(|position| Row { sequence: SequenceId(sequence), position, token: position, sample: position == 39 }).collect()
        };
        let (mut alone, mut shared) = (vec![0.0; 32], vec![0.0; 32]);
        stage.step(&rows(0, 0..40), Input::Tokens, &mut alone).unwrap();
        assert!(stage.share(SequenceId(0), SequenceId(1), 40).is_err() && stage.share(SequenceId(0), SequenceId(1), 48).is_err());
        stage.share(SequenceId(0), SequenceId(1), 32).unwrap();
        assert_eq!(stage.pages(), (4, 1));
        stage.step(&rows(1, 32..40), Input::Tokens, &mut shared).unwrap();
        assert_eq!((stage.pages(), shared), ((4, 0), alone));
        stage.free(SequenceId(0));
        assert_eq!(stage.pages(), (4, 1));
        stage.free(SequenceId(1));
        assert_eq!(stage.pages(), (4, 4));
    }

    #[test]
    fn time_is_the_slower_of_reading_and_multiplying() {
        let compute = compute();
        assert_eq!(compute.step_time(Path::new("toy"), 0..2, 1), Duration::from_micros(50));
        assert_eq!(compute.step_time(Path::new("toy"), 0..2, 1000), Duration::from_millis(10));
    }
}
