//! The decoder written down again, as plainly as can be: loops over dequantised weights, all positions at once, no cache. Keys and
//! values are rounded to half precision, as the cache does.

#![allow(clippy::needless_range_loop, reason = "positions index several things")]

use half::f16;

use crate::config::{Activation, DecoderConfig, FeedForward, NormTensors, Part, Projections, RopeLayout};
use crate::gguf::Gguf;

/// A matrix's or vector's elements.
fn weights(gguf: &Gguf, name: &str) -> Vec<f32> {
    gguf.tensor(name).unwrap().dequantise().unwrap()
}

fn multiply(x: &[f32], matrix: &[f32]) -> Vec<f32> {
    matrix.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>() as f32).collect()
}

fn norm(x: &[f32], weight: &[f32], epsilon: f32) -> Vec<f32> {
    let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (mean + f64::from(epsilon)).sqrt();
    x.iter().zip(weight).map(|(v, w)| (f64::from(*v) * factor) as f32 * w).collect()
}

fn add(to: &mut [f32], values: &[f32]) {
    to.iter_mut().zip(values).for_each(|(to, value)| *to += value);
}

/// Logits of every token's row.
pub(super) fn logits(gguf: &Gguf, tokens: &[u32]) -> Vec<Vec<f32>> {
    let config = DecoderConfig::from_gguf(gguf).unwrap();
    let (key, value, hidden) = (config.key_length, config.value_length, config.hidden);
    // None of these models has parts of tensors.
    let get = |part: &Part| weights(gguf, &part.tensor);
    let normed = |x: &[f32], part: &Part| norm(x, &get(part), config.norm_epsilon);
    let by = |x: &[f32], names: &Option<NormTensors>| normed(x, &names.as_ref().unwrap().weight);
    let embedding = weights(gguf, &config.tensors.embedding);
    let mut rows: Vec<Vec<f32>> = tokens
        .iter()
        .map(|&token| embedding[token as usize * hidden..][..hidden].iter().map(|v| v * config.embedding_scale).collect())
        .collect();
    for (layer, names) in config.layer_tensors.iter().enumerate() {
        let Projections::Heads(heads) = &names.projections else { panic!("latent") };
        let project = |x: &[f32], matrix: &Part, bias: &Option<Part>| {
            let mut out = multiply(x, &get(matrix));
            if let Some(bias) = bias {
                add(&mut out, &get(bias));
            }
            out
        };
        let place = |mut x: Vec<f32>, weight: &Option<Part>, position: usize| {
            let rope = config.layer_rope(layer).unwrap();
            for head in x.chunks_exact_mut(key) {
                if let Some(weight) = weight {
                    head.copy_from_slice(&normed(head, weight));
                }
                let pairs = rope.dimension / 2;
                for (i, frequency) in rope.frequencies(1).into_iter().enumerate() {
                    let (sin, cos) = (position as f64 * f64::from(frequency)).sin_cos();
                    let (a, b) = if rope.layout == RopeLayout::Halves { (i, i + pairs) } else { (2 * i, 2 * i + 1) };
                    let (x, y) = (f64::from(head[a]), f64::from(head[b]));
                    head[a] = (x * cos - y * sin) as f32;
                    head[b] = (x * sin + y * cos) as f32;
                }
            }
            x
        };
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for now in 0..rows.len() {
            let x = by(&rows[now], &names.attention_norm);
            let queries = place(project(&x, &heads.query, &heads.query_bias), &names.query_norm, now);
            let halved = |x: Vec<f32>| x.into_iter().map(|v| f16::from_f32(v).to_f32()).collect::<Vec<_>>();
            keys.push(halved(place(project(&x, &heads.key, &heads.key_bias), &names.key_norm, now)));
            values.push(halved(project(&x, &heads.value, &heads.value_bias)));
            let first = config.windows[layer].map_or(0, |window| (now + 1).saturating_sub(window));
            let mut attended = vec![0.0; config.heads * value];
            for head in 0..config.heads {
                let shared = head / (config.heads / config.kv_heads);
                let query = &queries[head * key..][..key];
                let scores: Vec<f64> = (first..=now)
                    .map(|p| {
                        let products = query.iter().zip(&keys[p][shared * key..]).map(|(q, k)| f64::from(*q) * f64::from(*k));
                        products.sum::<f64>() * f64::from(config.attention_scale)
                    })
                    .collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let exponentials: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
                let sum: f64 = exponentials.iter().sum();
                for (p, e) in (first..=now).zip(&exponentials) {
                    for (out, v) in attended[head * value..][..value].iter_mut().zip(&values[p][shared * value..]) {
                        *out += (e / sum) as f32 * v;
                    }
                }
            }
            let mut out = project(&attended, &names.attention_output, &names.attention_output_bias);
            if names.post_attention_norm.is_some() {
                out = by(&out, &names.post_attention_norm);
            }
            add(&mut rows[now], &out);
            let x = by(&rows[now], &names.feed_forward_norm);
            let FeedForward::Dense(dense) = &names.feed_forward else { panic!("experts") };
            let gated: Vec<f32> = multiply(&x, &get(dense.gate.as_ref().unwrap()))
                .into_iter()
                .zip(multiply(&x, &get(&dense.up)))
                .map(|(gate, up)| {
                    let x = f64::from(gate);
                    let open = match config.activation {
                        Activation::Silu => x / (1.0 + (-x).exp()),
                        _ => 0.5 * x * (1.0 + (0.797_884_560_802_865_4 * (x + 0.044_715 * x.powi(3))).tanh()),
                    };
                    open as f32 * up
                })
                .collect();
            let mut out = multiply(&gated, &get(&dense.down));
            if names.post_feed_forward_norm.is_some() {
                out = by(&out, &names.post_feed_forward_norm);
            }
            add(&mut rows[now], &out);
        }
    }
    let head = weights(gguf, &config.tensors.head);
    rows.iter()
        .map(|row| {
            let logits = multiply(&normed(row, &config.tensors.output_norm.weight), &head);
            logits.into_iter().map(|v| config.logit_softcap.map_or(v, |cap| cap * (v / cap).tanh())).collect()
        })
        .collect()
}
