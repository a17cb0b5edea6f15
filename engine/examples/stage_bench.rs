//! Prefill and decode speed of a GGUF on this machine:
//!
//! ```text
//! cargo run --release --example stage_bench -- MODEL.gguf [THREADS [STAGES [DEVICE]]]
//! ```
//!
//! Prints tokens a second for a prompt of 512 tokens and for 128 tokens after an empty context (medians of five), with the
//! layers in one stage on a device (`cpu` or `gpu:0`) or split evenly into several that run one after the other; on a machine that does other things, too, the
//! best figures say more.
#![allow(clippy::print_stdout, reason = "it is a program")]

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use shoal_engine::config::DecoderConfig;
use shoal_engine::device::Device;
use shoal_engine::gguf::Gguf;
use shoal_engine::stage::{Input, Row, SequenceId, Stage, StageOptions, StageSpec, load_to};

const PROMPT: usize = 512;
const DECODED: usize = 128;
const SEQUENCE: SequenceId = SequenceId(0);

/// Stages that feed each other.
struct Pipeline {
    stages: Vec<Box<dyn Stage>>,
    buffers: [Vec<f32>; 2],
    logits: Vec<f32>,
}

impl Pipeline {
    /// Runs tokens from `position` on; logits of the last one are kept.
    fn run(&mut self, tokens: &[u32], position: usize) -> Result<&[f32], Box<dyn Error>> {
        let last = tokens.len() - 1;
        let rows: Vec<Row> = (tokens.iter().enumerate())
            .map(|(i, &token)| Row { sequence: SEQUENCE, position: (position + i) as u32, token, sample: i == last })
            .collect();
        let count = self.stages.len();
        for (i, stage) in self.stages.iter_mut().enumerate() {
            let [from, to] = &mut self.buffers;
            let input = if i == 0 { Input::Tokens } else { Input::Activations(from) };
            if i + 1 == count {
                self.logits.resize(stage.vocabulary(), 0.0);
                stage.step(&rows, input, &mut self.logits)?;
            } else {
                to.resize(rows.len() * stage.hidden(), 0.0);
                stage.step(&rows, input, to)?;
            }
            self.buffers.swap(0, 1);
        }
        Ok(&self.logits)
    }

    fn free(&mut self) {
        self.stages.iter_mut().for_each(|stage| stage.free(SEQUENCE));
    }
}

/// "The capital of France is", of whole words of the vocabulary.
fn question(gguf: &Gguf) -> Vec<u32> {
    let texts = gguf.strings("tokenizer.ggml.tokens").unwrap_or_default();
    let find = |word: &str| texts.iter().position(|text| text == word).map(|token| token as u32);
    let start = gguf.bool("tokenizer.ggml.add_bos_token").unwrap_or(false).then(|| gguf.u32("tokenizer.ggml.bos_token_id")).flatten();
    let rest = ["capital", "of", "France", "is"].into_iter().map(|word| find(&format!("Ġ{word}")).or_else(|| find(&format!("▁{word}"))));
    let tokens: Vec<u32> = start.into_iter().chain(find("The")).chain(rest.flatten()).collect();
    if tokens.is_empty() { vec![1] } else { tokens }
}

fn best(logits: &[f32]) -> u32 {
    logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(token, _)| token as u32)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: stage_bench MODEL.gguf [THREADS [STAGES [DEVICE]]]")?;
    let threads = arguments.next().map_or(Ok(1), |text| text.parse())?;
    let stages: u32 = arguments.next().map_or(Ok(1), |text| text.parse())?;
    let device: Device = arguments.next().map_or(Ok(Device::Cpu), |text| text.parse())?;

    let start = Instant::now();
    let gguf = Gguf::open(Path::new(&path))?;
    let config = DecoderConfig::from_gguf(&gguf)?;
    let layers = config.layers as u32;
    let options = StageOptions { threads, kv_bytes: 256 << 20, rows_max: PROMPT, context_tokens: 2048 };
    let stages = (0..stages)
        .map(|i| load_to(device, &gguf, &StageSpec { layers: layers * i / stages..layers * (i + 1) / stages }, &options))
        .collect::<Result<Vec<_>, _>>()?;
    let weights: u64 = stages.iter().map(|stage| stage.weight_bytes()).sum();
    println!("{}: {:.1} MB of weights, loaded in {:.2} s", config.architecture, weights as f64 / 1e6, start.elapsed().as_secs_f64());
    let mut pipeline = Pipeline { stages, buffers: [Vec::new(), Vec::new()], logits: Vec::new() };

    let mut tokens = question(&gguf);
    let mut next = best(pipeline.run(&tokens, 0)?);
    for position in tokens.len()..tokens.len() + 24 {
        tokens.push(next);
        next = best(pipeline.run(&[next], position)?);
    }
    pipeline.free();
    let texts = gguf.strings("tokenizer.ggml.tokens").unwrap_or_default();
    let text: String = tokens.iter().filter_map(|&token| texts.get(token as usize)).map(String::as_str).collect();
    println!("greedy: {}", text.replace(['Ġ', '▁'], " ").replace(['Ċ', '\n'], "\\n"));

    let prompt: Vec<u32> = (0..PROMPT as u32).map(|i| i * 7919 % config.vocabulary as u32).collect();
    let (mut prefill, mut decode, mut fastest) = (Vec::new(), Vec::new(), f64::MAX);
    for _ in 0..5 {
        let start = Instant::now();
        pipeline.run(&prompt, 0)?;
        prefill.push(PROMPT as f64 / start.elapsed().as_secs_f64());
        pipeline.free();
        let mut token = 1;
        let start = Instant::now();
        for position in 0..DECODED {
            let start = Instant::now();
            token = best(pipeline.run(&[token], position)?);
            fastest = fastest.min(start.elapsed().as_secs_f64());
        }
        decode.push(DECODED as f64 / start.elapsed().as_secs_f64());
        pipeline.free();
    }
    let highest = prefill.iter().copied().fold(0.0, f64::max);
    println!("{threads} threads a stage: pp{PROMPT} {:.1} tok/s (best {highest:.1})", median(prefill));
    println!("{threads} threads a stage: tg{DECODED} {:.1} tok/s (fastest token {:.1})", median(decode), 1.0 / fastest);
    Ok(())
}
