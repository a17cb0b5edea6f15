#[cfg(gpu)]
mod gpu;
mod model;
mod reference;

use burn::backend::{Dispatch, DispatchDevice};
use burn_flex::{Flex, FlexDevice};

use super::load::load_on;
use super::*;
use crate::config::ConfigError;
use crate::gguf::Gguf;
use crate::kernels::testing::Numbers;
use crate::kernels::{Isa, Workspace};
use crate::quant::BlockType;
use model::{HIDDEN, LAYERS, VOCABULARY};

const WHOLE: Range<u32> = 0..LAYERS as u32;

fn options(threads: usize) -> StageOptions {
    StageOptions { threads, kv_bytes: 4 << 20, rows_max: 64, context_tokens: 200 }
}

fn whole(gguf: &Gguf, threads: usize) -> Box<dyn Stage> {
    load(gguf, &StageSpec { layers: WHOLE }, &options(threads)).unwrap()
}

fn tokens(count: usize, seed: u64) -> Vec<u32> {
    let mut numbers = Numbers::new(seed);
    (0..count).map(|_| numbers.bits() % VOCABULARY as u32).collect()
}

fn rows(sequence: u32, tokens: &[u32], positions: Range<usize>) -> Vec<Row> {
    positions.map(|p| Row { sequence: SequenceId(sequence), position: p as u32, token: tokens[p], sample: true }).collect()
}

/// Runs rows through stages that feed each other, and gives the logits of the sampled ones.
fn run(stages: &mut [Box<dyn Stage>], rows: &[Row]) -> Vec<Vec<f32>> {
    let mut activations = Vec::new();
    let last = stages.len() - 1;
    for (i, stage) in stages.iter_mut().enumerate() {
        let input = if i == 0 { Input::Tokens } else { Input::Activations(&activations) };
        let sampled = rows.iter().filter(|row| row.sample).count();
        let mut output = vec![0.0; if i == last { sampled * VOCABULARY } else { rows.len() * HIDDEN }];
        stage.step(rows, input, &mut output).unwrap();
        activations = output;
    }
    activations.chunks_exact(VOCABULARY).map(<[f32]>::to_vec).collect()
}

/// Relative difference of two sets of logits, as a ratio of root mean squares.
fn difference(found: &[Vec<f32>], expected: &[Vec<f32>]) -> f64 {
    let (mut error, mut size) = (0.0, 0.0);
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        error += f64::from(found - expected).powi(2);
        size += f64::from(*expected).powi(2);
    }
    (error / size).sqrt()
}

fn models() -> [Gguf; 3] {
    [model::llama(None, false), model::llama(Some(BlockType::Q4_1), true), model::gemma()]
}

#[test]
fn the_default_steps_compute_the_model() {
    let tokens = tokens(45, 1);
    for gguf in models() {
        let expected = reference::logits(&gguf, &tokens);
        let work = Workspace::new(1).unwrap();
        let plain = load_on::<Dispatch>(&gguf, &StageSpec { layers: WHOLE }, &options(1), DispatchDevice::default(), work).unwrap();
        let mut stages: [Box<dyn Stage>; 1] = [Box::new(plain)];
        let mut found = run(&mut stages, &rows(0, &tokens, 0..40));
        found.extend(run(&mut stages, &rows(0, &tokens, 40..45)));
        let difference = difference(&found, &expected);
        // What is left is the order of sums, and keys and values that fell to neighbouring half-precision numbers.
        assert!(difference < 2e-3, "{}: {difference}", gguf.str("general.architecture").unwrap());
    }
}

#[cfg(not(gpu))]
#[test]
fn a_build_without_the_backend_says_so() {
    use crate::device::{Device, DeviceError};
    let error = load_to(Device::Gpu(0), &model::gemma(), &StageSpec { layers: WHOLE }, &options(1)).err();
    assert!(matches!(error, Some(LoadError::Device(DeviceError::NoBackend))));
}

#[test]
fn the_cpu_kernels_compute_the_model() {
    let tokens = tokens(45, 2);
    for gguf in models() {
        let expected = reference::logits(&gguf, &tokens);
        let found = run(&mut [whole(&gguf, 1)], &rows(0, &tokens, 0..45));
        let difference = difference(&found, &expected);
        // Activations of 8 bits in blocks of 32 are off by 0.6 % (root mean square) at each of the 16 matrices on the way.
        assert!(difference < 0.04, "{}: {difference}", gguf.str("general.architecture").unwrap());
    }
}

#[test]
fn how_rows_come_together_does_not_matter() {
    let all: Vec<Vec<u32>> = vec![tokens(50, 3), tokens(7, 4), tokens(33, 5)];
    for gguf in models() {
        let expected: Vec<Vec<Vec<f32>>> = (all.iter())
            .map(|tokens| {
                tokens.iter().enumerate().flat_map(|(i, _)| run(&mut [whole(&gguf, 1)], &rows(9, tokens, 0..i + 1)).pop()).collect()
            })
            .collect();
        for chunk in [1, 3, 16] {
            let mut stages = [whole(&gguf, 2)];
            let mut found = vec![Vec::new(); all.len()];
            for from in (0..50).step_by(chunk) {
                // A step with rows of all sequences, mixed.
                let mut parts: Vec<Vec<Row>> = (all.iter().enumerate())
                    .map(|(s, tokens)| rows(s as u32, tokens, from.min(tokens.len())..tokens.len().min(from + chunk)))
                    .collect();
                let mut step = Vec::new();
                while parts.iter().any(|part| !part.is_empty()) {
                    for part in parts.iter_mut().filter(|part| !part.is_empty()) {
                        step.push(part.remove(0));
                    }
                }
                for (row, logits) in step.iter().zip(run(&mut stages, &step)) {
                    found[row.sequence.0 as usize].push(logits);
                }
            }
            assert_eq!(found, expected, "chunks of {chunk}");
        }
    }
}

#[test]
fn where_layers_run_does_not_matter() {
    let tokens = tokens(40, 6);
    for gguf in models() {
        let expected = run(&mut [whole(&gguf, 1)], &rows(0, &tokens, 0..40));
        for cuts in [vec![0, 2, 4], vec![0, 1, 4], vec![0, 1, 2, 3, 4]] {
            let mut stages: Vec<Box<dyn Stage>> = cuts
                .windows(2)
                .enumerate()
                .map(|(i, cut)| load(&gguf, &StageSpec { layers: cut[0]..cut[1] }, &options(1 + i)).unwrap())
                .collect();
            let mut found = run(&mut stages, &rows(0, &tokens, 0..33));
            found.extend(run(&mut stages, &rows(0, &tokens, 33..40)));
            assert_eq!(found, expected, "{cuts:?}");
        }
    }
}

#[test]
fn instruction_sets_and_threads_do_not_matter() {
    let tokens = tokens(20, 7);
    for gguf in models() {
        let expected = run(&mut [whole(&gguf, 1)], &rows(0, &tokens, 0..20));
        for threads in [1, 3] {
            for isa in Isa::all() {
                let work = Workspace::with(threads, isa).unwrap();
                let stage = load_on::<Flex>(&gguf, &StageSpec { layers: WHOLE }, &options(1), FlexDevice, work).unwrap();
                assert_eq!(run(&mut [Box::new(stage)], &rows(0, &tokens, 0..20)), expected, "{} {threads}", isa.name());
            }
        }
    }
}

#[test]
fn a_sequence_goes_back_and_on_as_if_nothing_had_been() {
    let gguf = model::gemma();
    let (first, other) = (tokens(60, 8), tokens(60, 9));
    let mixed: Vec<u32> = first[..37].iter().chain(&other[37..]).copied().collect();
    let expected = run(&mut [whole(&gguf, 1)], &rows(0, &mixed, 0..60));
    let mut stages = [whole(&gguf, 1)];
    run(&mut stages, &rows(0, &first, 0..60));
    let (all, free) = stages[0].pages();
    assert_eq!(run(&mut stages, &rows(0, &mixed, 37..60)), expected[37..]);
    assert_eq!(stages[0].pages(), (all, free));
    stages[0].free(SequenceId(0));
    stages[0].free(SequenceId(5));
    assert_eq!(stages[0].pages(), (all, all));
    // The pages' old contents do not shine through.
    assert_eq!(run(&mut stages, &rows(1, &mixed, 0..60)), expected);
}

#[test]
fn what_is_shared_is_what_would_be_computed() {
    for gguf in models() {
        let (first, other) = (tokens(80, 13), tokens(80, 14));
        let mixed: Vec<u32> = first[..64].iter().chain(&other[64..]).copied().collect();
        let expected = [&first, &mixed].map(|tokens| {
            let mut stages = [whole(&gguf, 1)];
            [run(&mut stages, &rows(0, tokens, 0..50)), run(&mut stages, &rows(0, tokens, 50..80))].concat()
        });
        let mut stages: Vec<Box<dyn Stage>> =
            [0..1, 1..4].map(|layers| load(&gguf, &StageSpec { layers }, &options(2)).unwrap()).into_iter().collect();
        let all = stages[0].pages().0;
        [0..50, 50..66].into_iter().for_each(|part| drop(run(&mut stages, &rows(0, &first, part))));
        for stage in &mut stages {
            // One page, two pages, and two again from the second one's.
            stage.share(SequenceId(0), SequenceId(1), 32).unwrap();
            stage.share(SequenceId(0), SequenceId(2), 64).unwrap();
            stage.share(SequenceId(2), SequenceId(3), 64).unwrap();
            assert_eq!(stage.pages(), (stage.pages().0, stage.pages().0 - 3));
        }
        // All go on in one step, beside the first one; the second one not before that is gone.
        let step = [rows(0, &first, 66..80), rows(2, &mixed, 64..80), rows(3, &first, 64..80)].concat();
        let found = run(&mut stages, &step);
        assert_eq!(found, [&expected[0][66..], &expected[1][64..], &expected[0][64..]].concat());
        stages.iter_mut().for_each(|stage| [0, 2].into_iter().for_each(|gone| stage.free(SequenceId(gone))));
        assert_eq!(run(&mut stages, &rows(1, &mixed, 32..80)), expected[1][32..]);
        assert_eq!(run(&mut stages, &rows(3, &first, 79..80)), expected[0][79..]);
        stages.iter_mut().for_each(|stage| [1, 3].into_iter().for_each(|gone| stage.free(SequenceId(gone))));
        assert_eq!(stages[0].pages(), (all, all));
    }
}

#[test]
fn only_sampled_rows_give_logits() {
    let gguf = model::llama(None, true);
    let tokens = tokens(12, 10);
    let expected = run(&mut [whole(&gguf, 1)], &rows(0, &tokens, 0..12));
    let mut some = rows(0, &tokens, 0..12);
    some.iter_mut().for_each(|row| row.sample = row.position % 5 == 1);
    assert_eq!(run(&mut [whole(&gguf, 1)], &some), [expected[1].clone(), expected[6].clone(), expected[11].clone()]);
    some.iter_mut().for_each(|row| row.sample = false);
    assert!(run(&mut [whole(&gguf, 1)], &some).is_empty());
}

#[test]
fn malformed_steps_change_nothing() {
    let gguf = model::llama(None, true);
    let tokens = tokens(64, 11);
    let mut stage = whole(&gguf, 1);
    let good = rows(0, &tokens, 0..1);
    let mut refused = |rows: &[Row], input: Input<'_>, output: usize| {
        let before = stage.pages();
        let error = stage.step(rows, input, &mut vec![0.0; output]).unwrap_err();
        assert_eq!(stage.pages(), before);
        error.to_string()
    };
    assert!(refused(&good, Input::Activations(&[0.0; HIDDEN]), VOCABULARY).contains("takes tokens"));
    assert!(refused(&good, Input::Tokens, VOCABULARY - 1).contains("90 elements, 89 were given"));
    let unknown = [Row { token: 90, ..good[0] }];
    assert!(refused(&unknown, Input::Tokens, VOCABULARY).contains("token 90 is not among the vocabulary's 90"));
    let gap = [Row { position: 1, ..good[0] }];
    assert!(refused(&gap, Input::Tokens, VOCABULARY).contains("0 positions are cached"));
    let far = [Row { position: 200, ..good[0] }];
    assert!(refused(&far, Input::Tokens, VOCABULARY).contains("the context ends after 200 tokens"));
    let many = vec![good[0]; 65];
    assert!(refused(&many, Input::Tokens, 65 * VOCABULARY).contains("64 at most"));
    assert_eq!(stage.step(&[], Input::Tokens, &mut []), Ok(()));

    let mut second = load(&gguf, &StageSpec { layers: 2..4 }, &options(1)).unwrap();
    let short = second.step(&good, Input::Activations(&[0.0; HIDDEN - 1]), &mut vec![0.0; VOCABULARY]).unwrap_err();
    assert!(short.to_string().contains("256 elements, 255 came"));
    let none = second.step(&good, Input::Tokens, &mut vec![0.0; VOCABULARY]).unwrap_err();
    assert!(none.to_string().contains("activations are needed"));
    assert!(second.is_last() && !second.is_first());
    assert_eq!((second.hidden(), second.vocabulary(), second.page_tokens()), (HIDDEN, VOCABULARY, 32));
}

#[test]
fn full_memory_is_said_and_leaves_the_rest_usable() {
    let gguf = model::llama(None, true);
    let tokens = tokens(200, 12);
    let page = 4 * 32 * 2 * 64 * 2;
    let few = StageOptions { kv_bytes: 3 * page + page / 2, ..options(1) };
    let mut stages = [load(&gguf, &StageSpec { layers: WHOLE }, &few).unwrap()];
    assert_eq!(stages[0].pages(), (3, 3));
    let expected = run(&mut [whole(&gguf, 1)], &rows(0, &tokens, 0..60));
    run(&mut stages, &rows(0, &tokens, 0..59));
    let refused = stages[0].step(&rows(1, &tokens, 0..33), Input::Tokens, &mut vec![0.0; 33 * VOCABULARY]);
    assert_eq!(refused, Err(StepError::KvFull { needed: 2, free: 1 }));
    assert_eq!(run(&mut stages, &rows(0, &tokens, 59..60)), expected[59..]);
}

#[test]
fn loading_says_what_is_wrong() {
    let gguf = model::llama(None, false);
    let error = |layers: Range<u32>, options: StageOptions| match load(&gguf, &StageSpec { layers }, &options) {
        Ok(_) => panic!("loaded"),
        Err(error) => error,
    };
    assert!(matches!(error(3..5, options(1)), LoadError::Layers { layers: LAYERS, .. }));
    #[allow(clippy::reversed_empty_ranges, reason = "that is what is refused")]
    let backwards = 3..2;
    assert!(matches!(error(backwards, options(1)), LoadError::Layers { .. }));
    assert!(matches!(error(2..2, options(1)), LoadError::Layers { .. }));
    let page = 4 * 32 * 2 * 64 * 2;
    assert!(matches!(error(WHOLE, StageOptions { kv_bytes: page - 1, ..options(1) }), LoadError::KvMemory { page: p, .. } if p == page));
    assert!(matches!(error(WHOLE, StageOptions { rows_max: 0, ..options(1) }), LoadError::Zero(_)));
    assert!(matches!(error(WHOLE, StageOptions { context_tokens: 0, ..options(1) }), LoadError::Zero(_)));
    let empty = Gguf::parse(crate::gguf::Writer::new().finish()).unwrap();
    let nothing = load(&empty, &StageSpec { layers: WHOLE }, &options(1));
    assert!(matches!(nothing, Err(LoadError::Config(ConfigError::Missing { .. }))));
}

#[test]
fn a_stage_holds_its_own_tensors_only() {
    let gguf = model::llama(Some(BlockType::Q8_0), true);
    let bytes = |layers: Range<u32>| load(&gguf, &StageSpec { layers }, &options(1)).unwrap().weight_bytes();
    let of = |name: &str| {
        let view = gguf.tensor(name).unwrap();
        crate::kernels::matrix_bytes(view.block, view.rows(), view.row_len()).unwrap()
    };
    let (all, middle) = (bytes(WHOLE), bytes(2..3));
    assert_eq!(bytes(0..3), bytes(0..2) + middle);
    // Both ends hold the shared tensor; a stage with both holds it once.
    assert_eq!(bytes(0..2) + bytes(2..4), all + of("token_embd.weight"));
}

#[test]
fn the_card_says_what_stages_hold() {
    for gguf in models() {
        let card = crate::card::ModelCard::from_gguf(&gguf).unwrap();
        for layers in [0..4, 0..2, 1..3, 2..4, 3..4] {
            let held = load(&gguf, &StageSpec { layers: layers.clone() }, &options(1)).unwrap().weight_bytes();
            let mut said: u64 = card.layer_bytes[layers.start as usize..layers.end as usize].iter().sum();
            let (first, last) = (layers.start == 0, layers.end == 4);
            said += if first { card.embedding_bytes } else { 0 };
            said += if last { card.head_bytes } else { 0 };
            said -= if first && last && card.tied_head { card.embedding_bytes } else { 0 };
            assert_eq!(held, said, "{layers:?}");
        }
    }
}
