//! The engine's distributions against exact ones, with llama.cpp on the same file as the measure of what is good.
//!
//! `data/numbers/reference.py` made the data and says what is measured.

#![allow(clippy::print_stdout, reason = "the figures are part of the result")]
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use std::path::PathBuf;

use serde::Deserialize;
use shoal_engine::device::Device;
use shoal_engine::gguf::Gguf;
use shoal_engine::stage::{Input, Row, SequenceId, Stage, StageOptions, StageSpec, load_to};
use shoal_engine::tokenizer::Tokenizer;

/// As much worse than llama.cpp's as the mean divergence may be.
const DIVERGENCE_FACTOR: f64 = 1.1;
/// As much lower than llama.cpp's as the agreement may be.
const AGREEMENT_SLACK: f64 = 0.005;

#[derive(Deserialize)]
struct Reference {
    model: String,
    rows: usize,
    top: usize,
    tokens: Vec<u32>,
    llama_cpp: Measure,
}

#[derive(Debug, Deserialize)]
struct Measure {
    divergence_mean: f64,
    divergence_max: f64,
    agreement: f64,
}

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/numbers").join(name)
}

/// The likeliest tokens of each row with their log probabilities.
struct Distributions {
    ids: Vec<Vec<usize>>,
    logprobs: Vec<Vec<f64>>,
}

impl Distributions {
    fn read(name: &str, rows: usize, top: usize) -> Self {
        let bytes = std::fs::read(data(name)).unwrap();
        assert_eq!(bytes.len(), rows * top * 6);
        let (ids, logprobs) = bytes.split_at(rows * top * 2);
        let ids: Vec<usize> = ids.chunks_exact(2).map(|b| usize::from(u16::from_le_bytes([b[0], b[1]]))).collect();
        let logprobs: Vec<f64> = logprobs.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect();
        Self { ids: ids.chunks_exact(top).map(<[_]>::to_vec).collect(), logprobs: logprobs.chunks_exact(top).map(<[_]>::to_vec).collect() }
    }

    /// How far rows of logits are from these.
    fn measure<'a>(&self, logits: impl Iterator<Item = &'a [f32]>) -> Measure {
        let mut measure = Measure { divergence_mean: 0.0, divergence_max: 0.0, agreement: 0.0 };
        let mut rows = 0;
        for ((row, ids), reference) in logits.zip(&self.ids).zip(&self.logprobs) {
            let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let total: f64 = row.iter().map(|&logit| f64::from(logit - top).exp()).sum();
            let log_total = f64::from(top) + total.ln();
            let chosen: Vec<f64> = ids.iter().map(|&id| f64::from(row[id]) - log_total).collect();
            let within: f64 = reference.iter().zip(&chosen).map(|(p, q)| p.exp() * (p - q)).sum();
            let rest = |logprobs: &[f64]| (1.0 - logprobs.iter().map(|p| p.exp()).sum::<f64>()).max(1e-12).ln();
            let (left, other_left) = (rest(reference), rest(&chosen));
            let divergence = within + left.exp() * (left - other_left);
            measure.divergence_mean += divergence;
            measure.divergence_max = measure.divergence_max.max(divergence);
            let best = row.iter().position(|&logit| logit == top);
            measure.agreement += f64::from(u8::from(best == Some(ids[0])));
            rows += 1;
        }
        assert_eq!(rows, self.ids.len());
        measure.divergence_mean /= rows as f64;
        measure.agreement /= rows as f64;
        measure
    }
}

fn run(name: &str, device: Device) {
    let reference: Reference = serde_json::from_slice(&std::fs::read(data(&format!("{name}.json"))).unwrap()).unwrap();
    let folder = std::env::var_os("SHOAL_TEST_MODELS").expect("SHOAL_TEST_MODELS names a folder with model files");
    let file = Gguf::open(&PathBuf::from(folder).join(&reference.model)).unwrap();
    let text = std::fs::read_to_string(data("text.txt")).unwrap();
    let tokens = Tokenizer::from_gguf(&file).unwrap().encode(&text, false);
    assert_eq!(tokens[..reference.rows], reference.tokens);

    let layers = file.u32(&format!("{}.block_count", file.str("general.architecture").unwrap())).unwrap();
    let options = StageOptions { threads: 1, kv_bytes: 256 << 20, rows_max: 128, context_tokens: 1024 };
    let mut stage: Box<dyn Stage> = load_to(device, &file, &StageSpec { layers: 0..layers }, &options).unwrap();
    let rows: Vec<Row> =
        (0..).zip(&reference.tokens).map(|(position, &token)| Row { sequence: SequenceId(0), position, token, sample: true }).collect();
    let vocabulary = stage.vocabulary();
    let mut logits = vec![0.0; rows.len() * vocabulary];
    for (rows, logits) in rows.chunks(options.rows_max).zip(logits.chunks_mut(options.rows_max * vocabulary)) {
        stage.step(rows, Input::Tokens, logits).unwrap();
    }
    let exact = Distributions::read(&format!("{name}.bin"), reference.rows, reference.top);
    let ours = exact.measure(logits.chunks_exact(vocabulary));
    println!("{device}: ours {ours:?}\nllama.cpp {:?}", reference.llama_cpp);
    assert!(ours.divergence_mean <= DIVERGENCE_FACTOR * reference.llama_cpp.divergence_mean, "{ours:?}");
    assert!(ours.agreement >= reference.llama_cpp.agreement - AGREEMENT_SLACK, "{ours:?}");
}

#[test]
#[ignore = "needs the model: set SHOAL_TEST_MODELS to a folder with SmolLM2-135M-Instruct.Q4_1.gguf"]
fn smollm2_is_as_near_as_llama_cpp() {
    run("smollm2", Device::Cpu);
}

#[cfg(gpu)]
#[test]
#[ignore = "needs the model and a graphics processor, at least Mesa's software one, and takes minutes on that one"]
fn smollm2_is_as_near_on_a_graphics_processor() {
    run("smollm2", Device::Gpu(0));
}

/// The measure itself, without a model: the reference has no divergence from itself, and a distorted one has some.
#[test]
fn the_measure_measures() {
    let exact = Distributions {
        ids: vec![vec![1, 0], vec![2, 1]],
        logprobs: vec![vec![0.5_f64.ln(), 0.25_f64.ln()], vec![0.6_f64.ln(), 0.2_f64.ln()]],
    };
    let same = [[0.25_f32, 0.5, 0.25].map(f32::ln), [0.2_f32, 0.2, 0.6].map(f32::ln)];
    let measure = exact.measure(same.iter().map(|row| &row[..]));
    assert!(measure.divergence_max.abs() < 1e-6, "{measure:?}");
    assert_eq!(measure.agreement, 1.0);
    let other = [[0.5_f32, 0.25, 0.25].map(f32::ln), [0.2_f32, 0.2, 0.6].map(f32::ln)];
    let measure = exact.measure(other.iter().map(|row| &row[..]));
    // Half of 0.5·ln 2 + 0.25·ln ½.
    assert!((measure.divergence_mean - 0.125 * 2.0_f64.ln()).abs() < 1e-6, "{measure:?}");
    assert_eq!(measure.agreement, 0.5);
}
