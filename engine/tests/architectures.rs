//! A small model of each architecture against llama.cpp.
//!
//! `data/architectures/make.py` described the models and had llama.cpp compute their logits in single precision. Weights are not
//! quantised, so what is left is the order of sums, and keys and values in half precision, of which llama.cpp says how much it is.

#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use std::ops::Range;
use std::path::PathBuf;

use half::f16;
use serde::Deserialize;
use shoal_engine::config::DecoderConfig;
use shoal_engine::gguf::{Gguf, Value, Writer};
use shoal_engine::quant::BlockType;
use shoal_engine::stage::{Input, Row, SequenceId, Stage, StageOptions, StageSpec, load};

/// As far as logits may be off, as a multiple of llama.cpp's own rounding of keys and values...
const ROUNDING_FACTOR: f64 = 2.0;
/// ... and besides, as a share of their size (root mean squares), for the order of sums.
const SHARE: f64 = 5e-5;
/// The same for models whose weights are quantised, so that their activations are.
const SHARE_QUANTISED: f64 = 5e-3;

/// A model and its answers.
#[derive(Deserialize)]
struct Described {
    metadata: Vec<(String, String, serde_json::Value)>,
    tensors: Vec<(String, Vec<u64>, String, f64, f64)>,
    context: u32,
    tokens: Vec<u32>,
    rounding: f64,
    rows: Vec<usize>,
    logits: Vec<Vec<f32>>,
}

fn splitmix(tensor: usize, i: usize) -> u64 {
    let x = (((tensor as u64) << 32) + i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Described {
    fn read(name: &str) -> Described {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/architectures").join(format!("{name}.json"));
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    /// The file, as `make.py` says how it is made.
    fn gguf(&self) -> Gguf {
        let mut writer = Writer::new();
        for (key, kind, value) in &self.metadata {
            let value = match kind.as_str() {
                "u32" => Value::U32(value.as_u64().unwrap() as u32),
                "f32" => Value::F32(value.as_f64().unwrap() as f32),
                "bool" => Value::Bool(value.as_bool().unwrap()),
                _ => Value::String(value.as_str().unwrap().into()),
            };
            writer.metadata(key, value);
        }
        for (number, (name, shape, kind, size, centre)) in self.tensors.iter().enumerate() {
            let count = shape.iter().product::<u64>() as usize;
            let values = (0..count).map(|i| {
                let unit = (splitmix(number, i) >> 40) as f64 / f64::from(1 << 23);
                (centre + size * unit - size) as f32
            });
            let (block, bytes) = match kind.as_str() {
                "F32" => (BlockType::F32, values.flat_map(f32::to_le_bytes).collect()),
                "F16" => (BlockType::F16, values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect()),
                _ => {
                    let len = count / 32 * 17;
                    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|i| splitmix(number, i).to_le_bytes()).take(len).collect();
                    bytes.chunks_exact_mut(17).for_each(|block| block[0] = 119 + (block[0] & 3));
                    (BlockType::MXFP4, bytes)
                }
            };
            writer.tensor(name, shape, block, bytes);
        }
        Gguf::parse(writer.finish()).unwrap()
    }

    fn stage(&self, gguf: &Gguf, layers: Range<u32>, threads: usize) -> Box<dyn Stage> {
        let options = StageOptions { threads, kv_bytes: 8 << 20, rows_max: 64, context_tokens: self.context };
        load(gguf, &StageSpec { layers }, &options).unwrap()
    }

    /// Holds the logits of all rows against llama.cpp's.
    fn compare(&self, name: &str, found: &[Vec<f32>]) {
        let (mut error, mut size) = (0.0, 0.0);
        for (&row, expected) in self.rows.iter().zip(&self.logits) {
            assert_eq!(found[row].len(), expected.len());
            for (found, expected) in found[row].iter().zip(expected) {
                error += f64::from(found - expected).powi(2);
                size += f64::from(*expected).powi(2);
            }
            assert_eq!(best(&found[row]), best(expected), "{name}: the likeliest token after {row}");
        }
        let quantised = self.tensors.iter().any(|(_, _, kind, ..)| kind == "MXFP4");
        let share = (error / size).sqrt();
        let most = ROUNDING_FACTOR * self.rounding + if quantised { SHARE_QUANTISED } else { SHARE };
        assert!(share < most, "{name}: logits are off by {share}, {most} at most");
    }

    fn sequence(&self, sequence: u32, positions: Range<usize>) -> Vec<Row> {
        positions.map(|p| Row { sequence: SequenceId(sequence), position: p as u32, token: self.tokens[p], sample: true }).collect()
    }
}

/// Runs rows through stages that feed each other; logits of all rows.
fn run(stages: &mut [Box<dyn Stage>], rows: &[Row]) -> Vec<Vec<f32>> {
    let last = stages.len() - 1;
    let (hidden, vocabulary) = (stages[0].hidden(), stages[0].vocabulary());
    let mut activations = Vec::new();
    for (i, stage) in stages.iter_mut().enumerate() {
        let input = if i == 0 { Input::Tokens } else { Input::Activations(&activations) };
        let mut output = vec![0.0; rows.len() * if i == last { vocabulary } else { hidden }];
        stage.step(rows, input, &mut output).unwrap();
        activations = output;
    }
    activations.chunks_exact(vocabulary).map(<[f32]>::to_vec).collect()
}

fn best(row: &[f32]) -> usize {
    (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap()
}

fn check(name: &str) {
    let model = Described::read(name);
    let gguf = model.gguf();
    let layers = DecoderConfig::from_gguf(&gguf).unwrap().layers as u32;
    let count = model.tokens.len();
    let found = run(&mut [model.stage(&gguf, 0..layers, 1)], &model.sequence(0, 0..count));

    model.compare(name, &found);

    // However the rows come: in two stages, two sequences at once, in pieces.
    let other = 9;
    let mut stages = [model.stage(&gguf, 0..1, 1), model.stage(&gguf, 1..layers, 2)];
    let mut pieces = Vec::new();
    for positions in [0..5, 5..6, 6..other, other..40, 40..count] {
        let mut rows = model.sequence(1, positions.clone());
        if positions.start < other {
            rows.extend(model.sequence(2, positions));
        }
        let logits = run(&mut stages, &rows);
        for (row, logits) in rows.iter().zip(logits) {
            if row.sequence == SequenceId(1) {
                pieces.push(logits);
            } else {
                assert_eq!(logits, found[row.position as usize], "{name}: beside another sequence");
            }
        }
    }
    assert_eq!(pieces, found, "{name}: in pieces");

    // And what a planner is told is what is held.
    let card = shoal_engine::card::ModelCard::from_gguf(&gguf).unwrap();
    let ends = card.embedding_bytes + card.head_bytes - if card.tied_head { card.embedding_bytes } else { 0 };
    let said = card.layer_bytes.iter().sum::<u64>() + ends;
    assert_eq!(model.stage(&gguf, 0..layers, 1).weight_bytes(), said, "{name}: memory");
}

/// The same on a graphics processor, whose arithmetic depends on how rows come in the last digits.
#[cfg(gpu)]
fn check_on_device(name: &str) {
    let model = Described::read(name);
    let gguf = model.gguf();
    let layers = DecoderConfig::from_gguf(&gguf).unwrap().layers as u32;
    let count = model.tokens.len();
    let options = StageOptions { threads: 1, kv_bytes: 8 << 20, rows_max: 64, context_tokens: model.context };
    let stage =
        |layers| shoal_engine::stage::load_to(shoal_engine::device::Device::Gpu(0), &gguf, &StageSpec { layers }, &options).unwrap();
    model.compare(name, &run(&mut [stage(0..layers)], &model.sequence(0, 0..count)));
    let mut stages = [stage(0..1), stage(1..layers)];
    let mut pieces = Vec::new();
    for positions in [0..5, 5..6, 6..40, 40..count] {
        pieces.extend(run(&mut stages, &model.sequence(1, positions)));
    }
    model.compare(name, &pieces);
}

macro_rules! architectures {
    ($($name:ident: $file:literal,)*) => {
        $(#[test]
        fn $name() {
            check($file);
        })*

        #[cfg(gpu)]
        #[test]
        #[ignore = "needs a graphics processor, at least Mesa's software one, and takes minutes on that one"]
        fn all_on_a_graphics_processor() {
            for name in [$($file),*] {
                println!("{name}");
                check_on_device(name);
            }
        }

        /// Every architecture that is known has a model here.
        #[test]
        fn none_is_left_out() {
            let checked = [$($file),*].map(|name| DecoderConfig::from_gguf(&Described::read(name).gguf()).unwrap().architecture);
            for name in DecoderConfig::architectures() {
                assert!(checked.iter().any(|checked| checked == name), "{name}");
            }
        }
    };
}

architectures! {
    arcee: "arcee",
    cohere2: "cohere2",
    command_r: "command-r",
    deepseek2: "deepseek2",
    deepseek2_lite: "deepseek2-lite",
    dots1: "dots1",
    ernie4_5: "ernie4_5",
    ernie4_5_moe: "ernie4_5-moe",
    exaone: "exaone",
    exaone4: "exaone4",
    gemma: "gemma",
    gemma2: "gemma2",
    gemma3: "gemma3",
    glm4: "glm4",
    glm4moe: "glm4moe",
    gpt_oss: "gpt-oss",
    granite: "granite",
    granitemoe: "granitemoe",
    internlm2: "internlm2",
    llama: "llama",
    minicpm: "minicpm",
    mistral3: "mistral3",
    mixtral: "mixtral",
    olmo2: "olmo2",
    olmoe: "olmoe",
    phi3_long: "phi3-long",
    phi3_short: "phi3-short",
    qwen2: "qwen2",
    qwen2moe: "qwen2moe",
    qwen2vl: "qwen2vl",
    qwen3: "qwen3",
    qwen3moe: "qwen3moe",
    qwen3vl: "qwen3vl",
    qwen3vlmoe: "qwen3vlmoe",
    seed_oss: "seed_oss",
    smollm3: "smollm3",
    starcoder2: "starcoder2",
}
