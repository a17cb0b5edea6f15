use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

fn params() -> SamplingParams {
    SamplingParams::default()
}

/// The token for each position up to `count`, from the same logits.
fn draw(params: SamplingParams, logits: &[f32], count: u32) -> Vec<u32> {
    let mut sampler = Sampler::new(params, &[]);
    (0..count).map(|position| sampler.sample(&mut logits.to_vec(), position).unwrap().token).collect()
}

fn kinds(params: SamplingParams, logits: &[f32]) -> Vec<u32> {
    let mut tokens = draw(params, logits, 2000);
    tokens.sort_unstable();
    tokens.dedup();
    tokens
}

#[test]
fn greedy_takes_the_likeliest_and_of_equals_the_lowest() {
    let mut sampler = Sampler::new(SamplingParams::greedy(), &[]);
    assert_eq!(sampler.sample(&mut [0.5, 2.0, 2.0, -1.0], 0).unwrap().token, 1);
    assert_eq!(sampler.sample(&mut [-0.0, 0.0], 0).unwrap().token, 0);
}

#[test]
fn frequencies_follow_the_distribution() {
    let logits = [0.0_f32, 1.0, 2.0, 0.5];
    for temperature in [0.5, 1.0, 2.0] {
        let draws = 40_000;
        let mut counts = BTreeMap::new();
        for token in draw(SamplingParams { temperature, seed: 9, ..params() }, &logits, draws) {
            *counts.entry(token).or_insert(0_u32) += 1;
        }
        let weights: Vec<f64> = logits.iter().map(|&l| f64::from(l / temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        for (token, weight) in weights.iter().enumerate() {
            let expected = weight / total;
            let seen = f64::from(counts[&(token as u32)]) / f64::from(draws);
            assert!((seen - expected).abs() < 0.01, "temperature {temperature}, token {token}: {seen}, not {expected}");
        }
    }
}

#[test]
fn truncations_keep_what_they_say() {
    // Probabilities 0.5, 0.25, 0.125, 0.125.
    let logits = [0.5_f32, 0.25, 0.125, 0.125].map(f32::ln);
    assert_eq!(kinds(params(), &logits), [0, 1, 2, 3]);
    assert_eq!(kinds(SamplingParams { top_k: 3, ..params() }, &logits), [0, 1, 2], "the tie goes to the lower id");
    assert_eq!(kinds(SamplingParams { top_k: 99, ..params() }, &logits), [0, 1, 2, 3]);
    assert_eq!(kinds(SamplingParams { top_p: 0.6, ..params() }, &logits), [0, 1], "the one that crosses is kept");
    assert_eq!(kinds(SamplingParams { top_p: 0.0, ..params() }, &logits), [0]);
    assert_eq!(kinds(SamplingParams { min_p: 0.4, ..params() }, &logits), [0, 1]);
    assert_eq!(kinds(SamplingParams { min_p: 1.0, ..params() }, &logits), [0]);
    // After top-k the rest counts as the whole: of 0.5 and 0.25, two thirds are crossed by the first alone.
    assert_eq!(kinds(SamplingParams { top_k: 2, top_p: 0.66, ..params() }, &logits), [0]);
    assert_eq!(kinds(SamplingParams { top_k: 3, min_p: 0.3, ..params() }, &logits), [0, 1]);
}

#[test]
fn penalties_and_biases_change_the_choice() {
    let greedy = SamplingParams::greedy();
    let choose = |params: SamplingParams, prompt: &[u32], answer: &[u32]| {
        let mut sampler = Sampler::new(params, prompt);
        answer.iter().for_each(|&token| sampler.accept(token));
        sampler.sample(&mut [1.0, 0.9, 0.4, -5.0], 0).unwrap().token
    };
    assert_eq!(choose(greedy.clone(), &[0], &[0]), 0);
    let repetition = SamplingParams { repetition_penalty: 2.0, ..greedy.clone() };
    assert_eq!(choose(repetition.clone(), &[0], &[]), 1, "the prompt counts");
    assert_eq!(choose(repetition, &[], &[0, 1]), 0);
    let presence = SamplingParams { presence_penalty: 0.3, ..greedy.clone() };
    assert_eq!(choose(presence.clone(), &[0], &[]), 0, "the prompt does not count");
    assert_eq!(choose(presence.clone(), &[], &[0, 0, 0]), 1);
    assert_eq!(choose(presence, &[], &[0, 1, 1]), 0);
    let frequency = SamplingParams { frequency_penalty: 0.25, ..greedy.clone() };
    assert_eq!(choose(frequency, &[], &[0, 0, 1, 1, 1]), 0);
    let bias = |token, bias| SamplingParams { logit_bias: [(token, bias)].into(), ..greedy.clone() };
    assert_eq!(choose(bias(2, 1.0), &[], &[]), 2);
    assert_eq!(choose(bias(0, -100.0), &[], &[]), 1);
    assert_eq!(choose(bias(1000, 100.0), &[], &[]), 0, "no such token");
}

#[test]
fn logprobs_are_the_models_own() {
    let logits = [0.5_f32, 0.25, 0.125, 0.125].map(f32::ln);
    let asked = SamplingParams { logprobs: Some(2), temperature: 0.0, logit_bias: [(2, 10.0)].into(), repetition_penalty: 3.0, ..params() };
    let mut sampler = Sampler::new(asked, &[0, 2]);
    let sampled = sampler.sample(&mut logits.to_vec(), 0).unwrap();
    assert_eq!(sampled.token, 2);
    assert!((sampled.logprob.unwrap() - 0.125_f32.ln()).abs() < 1e-5);
    let ids: Vec<u32> = sampled.top_logprobs.iter().map(|t| t.0).collect();
    assert_eq!(ids, [0, 1]);
    assert!((sampled.top_logprobs[1].1 - 0.25_f32.ln()).abs() < 1e-5);
    let silent = Sampler::new(params(), &[]).sample(&mut logits.to_vec(), 0).unwrap();
    assert_eq!((silent.logprob, silent.top_logprobs.len()), (None, 0));
}

#[test]
fn broken_logits_are_survived_or_refused() {
    let nan = f32::NAN;
    let inf = f32::INFINITY;
    for params in [SamplingParams::greedy(), params(), SamplingParams { top_p: 0.9, logprobs: Some(3), ..params() }] {
        let mut sampler = Sampler::new(params, &[]);
        assert_eq!(sampler.sample(&mut [], 0), Err(SampleError::Empty));
        assert_eq!(sampler.sample(&mut [nan, -inf, nan], 0), Err(SampleError::NothingPossible));
        assert_eq!(sampler.sample(&mut [nan, 1.0, -inf], 0).unwrap().token, 1);
        assert_eq!(sampler.sample(&mut [0.0, inf, 3.0], 0).unwrap().token, 1);
        assert_eq!(sampler.sample(&mut [f32::MAX, f32::MIN], 0).unwrap().token, 0);
    }
    let extreme = SamplingParams { repetition_penalty: 0.01, temperature: 1e-30, ..params() };
    let mut sampler = Sampler::new(extreme, &[0]);
    assert_eq!(sampler.sample(&mut [f32::MAX, 1.0], 0).unwrap().token, 0);
}

/// Pinned: nodes of one cluster must draw the same tokens, on any platform and in later versions.
#[test]
fn choices_are_pinned() {
    let logits: Vec<f32> = (0..1000_u32).map(|id| ((id * 7919) % 1000) as f32 / 125.0).collect();
    let shaped = SamplingParams { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, seed: 1234, ..params() };
    assert_eq!(draw(shaped, &logits, 12), [951, 593, 321, 593, 420, 284, 951, 568, 642, 988, 99, 99]);
    assert_eq!(draw(SamplingParams { seed: 1234, ..params() }, &logits, 12), [829, 877, 15, 889, 556, 124, 845, 224, 40, 766, 532, 531]);
}

/// Top-p over many candidates grows its selection in steps; the outcome is that of sorting everything.
#[test]
fn top_p_over_a_flat_distribution_keeps_the_right_share() {
    let logits = vec![0.0_f32; 5000];
    let tokens = draw(SamplingParams { top_p: 0.5, ..params() }, &logits, 3000);
    assert!(tokens.iter().all(|&token| token < 2500));
    assert!(tokens.iter().any(|&token| token > 2300), "and not fewer");
}

proptest! {
    #[test]
    fn a_pure_function_that_never_panics(
        logits in proptest::collection::vec(any::<f32>(), 0..300),
        temperature in prop_oneof![Just(0.0_f32), 0.0_f32..3.0, any::<f32>()],
        top_k in 0_u32..40,
        top_p in prop_oneof![0.0_f32..1.1, any::<f32>()],
        min_p in prop_oneof![0.0_f32..1.1, any::<f32>()],
        penalty in prop_oneof![0.5_f32..2.0, any::<f32>()],
        bias in any::<f32>(),
        seed in any::<u64>(),
        position in any::<u32>(),
        history in proptest::collection::vec(0_u32..400, 0..20),
    ) {
        let params = SamplingParams {
            temperature, top_k, top_p, min_p, seed,
            repetition_penalty: penalty, presence_penalty: penalty, frequency_penalty: penalty,
            logit_bias: [(3, bias), (500, bias)].into(), logprobs: Some(4),
        };
        let run = || {
            let mut sampler = Sampler::new(params.clone(), &history);
            history.iter().for_each(|&token| sampler.accept(token));
            sampler.sample(&mut logits.clone(), position)
        };
        let first = run();
        if let Ok(sampled) = &first {
            prop_assert!((sampled.token as usize) < logits.len());
        }
        prop_assert_eq!(format!("{:?}", first), format!("{:?}", run()));
    }

    /// The truncated draw must be among the tokens that a plain, sorted reading of the rules keeps.
    #[test]
    fn truncation_equals_the_plain_reading(
        logits in proptest::collection::vec(-8.0_f32..8.0, 1..200),
        top_k in 0_u32..30,
        top_p in 0.05_f32..1.0,
        seed in any::<u64>(),
    ) {
        let token = draw(SamplingParams { top_k, top_p, seed, ..params() }, &logits, 1)[0];
        let mut sorted: Vec<(usize, f64)> = logits.iter().map(|&l| f64::from(l).exp()).enumerate().collect();
        sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if top_k > 0 {
            sorted.truncate(top_k as usize);
        }
        let total: f64 = sorted.iter().map(|s| s.1).sum();
        let mut sum = 0.0;
        // A little slack: the plain reading rounds differently at the edge.
        let mut kept = Vec::new();
        for (id, weight) in sorted {
            kept.push(id as u32);
            sum += weight;
            if sum >= (f64::from(top_p) + 1e-5) * total {
                break;
            }
        }
        prop_assert!(kept.contains(&token));
    }
}
