//! Whole stages on a graphics processor.

use burn_wgpu::Wgpu;

use super::*;
use crate::device::{Device, DeviceError};
use crate::kernels::testing::gpu;

fn stage(gguf: &Gguf, layers: Range<u32>, options: &StageOptions) -> Option<Box<dyn Stage>> {
    gpu()?;
    Some(load_to(Device::Gpu(0), gguf, &StageSpec { layers }, options).unwrap())
}

/// Sums in another order; and keys and values that fell to neighbouring half-precision numbers.
const NEAR: f64 = 2e-3;

#[test]
fn a_device_computes_the_model_in_whatever_steps() {
    let all = [tokens(45, 1), tokens(20, 2)];
    for gguf in models() {
        let Some(stage) = stage(&gguf, WHOLE, &options(1)) else { return };
        let mut stages = [stage];
        let expected: Vec<Vec<Vec<f32>>> = all.iter().map(|tokens| reference::logits(&gguf, tokens)).collect();
        let mut found = vec![Vec::new(); 2];
        // A prompt; the rest of it beside another; both token by token.
        for (first, second) in [(0..30, 0..0), (30..42, 0..17), (42..43, 17..18), (43..44, 18..19), (44..45, 19..20)] {
            let step: Vec<Row> = [rows(0, &all[0], first), rows(1, &all[1], second)].concat();
            for (row, logits) in step.iter().zip(run(&mut stages, &step)) {
                found[row.sequence.0 as usize].push(logits);
            }
        }
        for (found, expected) in found.iter().zip(&expected) {
            let difference = difference(found, expected);
            assert!(difference < NEAR, "{}: {difference}", gguf.str("general.architecture").unwrap());
        }
    }
}

#[test]
fn a_device_holds_a_part_of_the_layers() {
    let tokens = tokens(40, 3);
    let gguf = model::gemma();
    let expected = reference::logits(&gguf, &tokens);
    // One stage on the device and one on the host, either way round.
    for device_first in [true, false] {
        let Some(one) = stage(&gguf, if device_first { 0..2 } else { 2..4 }, &options(1)) else { return };
        let other = load(&gguf, &StageSpec { layers: if device_first { 2..4 } else { 0..2 } }, &options(1)).unwrap();
        let mut stages = if device_first { [one, other] } else { [other, one] };
        let difference = difference(&run(&mut stages, &rows(0, &tokens, 0..40)), &expected);
        // The host rounds activations to 8 bits.
        assert!(difference < 0.04, "{difference}");
    }
}

#[test]
fn a_sequence_on_a_device_goes_back_and_is_freed() {
    let gguf = model::llama(Some(BlockType::Q8_0), true);
    let Some(mut stage) = stage(&gguf, WHOLE, &options(1)) else { return };
    let (first, other) = (tokens(60, 8), tokens(60, 9));
    let mixed: Vec<u32> = first[..37].iter().chain(&other[37..]).copied().collect();
    let (all, _) = stage.pages();
    let mut stages = [stage];
    run(&mut stages, &rows(0, &first, 0..60));
    let found = run(&mut stages, &rows(0, &mixed, 37..60));
    assert!(difference(&found, &reference::logits(&gguf, &mixed)[37..]) < NEAR);
    stages[0].free(SequenceId(0));
    assert_eq!(stages[0].pages(), (all, all));
    // The pages' old contents do not shine through.
    let found = run(&mut stages, &rows(1, &other, 0..60));
    assert!(difference(&found, &reference::logits(&gguf, &other)) < NEAR);
    [stage] = stages;
    let some: Vec<Row> = rows(2, &other, 0..9).into_iter().map(|row| Row { sample: row.position == 4, ..row }).collect();
    let found = run(&mut [stage], &some);
    assert!(difference(&found, &reference::logits(&gguf, &other)[4..5]) < NEAR);
}

#[test]
fn memory_on_a_device_is_what_was_leased() {
    let gguf = model::llama(None, true);
    let tokens = tokens(200, 12);
    let page = 4 * 32 * 2 * 64 * 2;
    let few = StageOptions { kv_bytes: 3 * page + page / 2, ..options(1) };
    let Some(mut stage) = stage(&gguf, WHOLE, &few) else { return };
    assert_eq!(stage.pages(), (3, 3));
    stage.step(&rows(1, &tokens, 0..64), Input::Tokens, &mut vec![0.0; 64 * VOCABULARY]).unwrap();
    let refused = stage.step(&rows(1, &tokens, 64..97), Input::Tokens, &mut vec![0.0; 33 * VOCABULARY]);
    assert_eq!(refused, Err(StepError::KvFull { needed: 2, free: 1 }));
    let host = load(&gguf, &StageSpec { layers: WHOLE }, &few).unwrap().weight_bytes();
    assert!(stage.weight_bytes() <= host + host / 64, "{} {host}", stage.weight_bytes());
    let device = gpu().unwrap();
    let work = Workspace::new(1).unwrap();
    let small = StageOptions { kv_bytes: page - 1, ..options(1) };
    let error = load_on::<Wgpu>(&gguf, &StageSpec { layers: WHOLE }, &small, device, work).err();
    assert!(matches!(error, Some(LoadError::KvMemory { page: p, .. }) if p == page));
}

#[test]
fn a_device_that_is_not_there_is_refused() {
    let gguf = model::llama(None, true);
    let error = load_to(Device::Gpu(99), &gguf, &StageSpec { layers: WHOLE }, &options(1)).err();
    assert!(matches!(error, Some(LoadError::Device(DeviceError::Missing { device: Device::Gpu(99), .. }))));
}
