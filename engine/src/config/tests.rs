//! Configurations of whole files, and of files with something wrong.

use super::*;
use crate::card::ModelCard;
use crate::gguf::{Array, Value, Writer};
use crate::quant::BlockType;

fn tiny() -> Gguf {
    Gguf::parse(&include_bytes!("../../tests/data/tiny-llama.gguf")[..]).unwrap()
}

/// A model of zeros, as data that a test can change before it writes it.
#[derive(Clone)]
struct Model {
    architecture: &'static str,
    values: Vec<(String, Value)>,
    tensors: Vec<(String, Vec<u64>, BlockType)>,
}

impl Model {
    /// Two layers, rows of 32, 4 query heads on 2, feed-forward 64, 10 tokens.
    fn llama() -> Model {
        let mut model = Model { architecture: "llama", values: Vec::new(), tensors: Vec::new() };
        for (key, count) in [
            ("block_count", 2),
            ("embedding_length", 32),
            ("attention.head_count", 4),
            ("attention.head_count_kv", 2),
            ("feed_forward_length", 64),
            ("context_length", 128),
        ] {
            model.set(key, Value::U32(count));
        }
        model.set("attention.layer_norm_rms_epsilon", Value::F32(1e-5));
        model.put("token_embd.weight", &[32, 10], BlockType::Q8_0);
        model.put("output_norm.weight", &[32], BlockType::F32);
        for layer in 0..2 {
            model.layer(layer, 8);
        }
        model
    }

    fn gemma3() -> Model {
        let mut model = Model::llama();
        model.architecture = "gemma3";
        model.set("attention.key_length", Value::U32(16));
        model.set("attention.value_length", Value::U32(16));
        model.set("attention.sliding_window", Value::U32(512));
        model.set("block_count", Value::U32(7));
        model.tensors.truncate(2);
        for layer in 0..7 {
            model.layer(layer, 16);
            for (part, length) in [("attn_q_norm", 16), ("attn_k_norm", 16), ("post_attention_norm", 32), ("post_ffw_norm", 32)] {
                model.put(&format!("blk.{layer}.{part}.weight"), &[length], BlockType::F32);
            }
        }
        model
    }

    fn layer(&mut self, layer: usize, head: u64) {
        for (part, shape) in [
            ("attn_norm", vec![32]),
            ("attn_q", vec![32, 4 * head]),
            ("attn_k", vec![32, 2 * head]),
            ("attn_v", vec![32, 2 * head]),
            ("attn_output", vec![4 * head, 32]),
            ("ffn_norm", vec![32]),
            ("ffn_gate", vec![32, 64]),
            ("ffn_up", vec![32, 64]),
            ("ffn_down", vec![64, 32]),
        ] {
            let block = if shape.len() == 1 { BlockType::F32 } else { BlockType::Q4_0 };
            self.put(&format!("blk.{layer}.{part}.weight"), &shape, block);
        }
    }

    fn set(&mut self, key: &str, value: Value) {
        self.values.retain(|(name, _)| name != key);
        self.values.push((key.to_owned(), value));
    }

    fn without(mut self, key: &str) -> Model {
        self.values.retain(|(name, _)| name != key);
        self
    }

    fn with(mut self, key: &str, value: Value) -> Model {
        self.set(key, value);
        self
    }

    fn put(&mut self, name: &str, shape: &[u64], block: BlockType) {
        self.tensors.retain(|(other, ..)| other != name);
        self.tensors.push((name.to_owned(), shape.to_vec(), block));
    }

    fn with_tensor(mut self, name: &str, shape: &[u64], block: BlockType) -> Model {
        self.put(name, shape, block);
        self
    }

    fn gguf(&self) -> Gguf {
        let mut writer = Writer::new();
        writer.metadata("general.architecture", Value::String(self.architecture.into()));
        for (key, value) in &self.values {
            writer.metadata(&format!("{}.{key}", self.architecture), value.clone());
        }
        for (name, shape, block) in &self.tensors {
            let rows: u64 = shape[1..].iter().product();
            writer.tensor(name, shape, *block, vec![0; block.row_bytes(shape[0] as usize).unwrap() * rows as usize]);
        }
        Gguf::parse(writer.finish()).unwrap()
    }

    fn read(&self) -> Result<DecoderConfig, ConfigError> {
        DecoderConfig::from_gguf(&self.gguf())
    }

    fn error(&self) -> ConfigError {
        self.read().unwrap_err()
    }
}

fn heads(config: &DecoderConfig, layer: usize) -> &HeadTensors {
    match &config.layer_tensors[layer].projections {
        Projections::Heads(heads) => heads,
        Projections::Latent(_) => panic!("latent"),
    }
}

#[test]
fn a_llama_file_from_elsewhere() {
    let config = DecoderConfig::from_gguf(&tiny()).unwrap();
    assert_eq!((config.layers, config.hidden, config.heads, config.kv_heads), (3, 64, 4, 2));
    assert_eq!((config.key_length, config.value_length, config.feed_forward), (16, 16, 128));
    assert_eq!((config.vocabulary, config.context_tokens), (320, 512));
    assert_eq!((config.norm_epsilon, config.embedding_scale, config.attention_scale), (1e-5, 1.0, 0.25));
    assert_eq!(config.activation, Activation::Silu);
    let rope = Rope::plain(RopeLayout::Interleaved, 16, 10_000.0);
    assert_eq!((config.ropes.as_slice(), config.layer_rope(2)), ([rope.clone()].as_slice(), Some(&rope)));
    assert_eq!(config.layer_rope(3), None);
    assert_eq!(config.windows, [None; 3]);
    assert!(config.tied_head());
    assert_eq!(config.tensors.head, "token_embd.weight");
    assert_eq!(config.layer_tensors[1].attention_output, Part::whole("blk.1.attn_output.weight"));
    assert_eq!(heads(&config, 1).query_bias, None);
    assert_eq!(config.kv_bytes_per_token(), 2 * 2 * 16 * 2);
}

#[test]
fn its_card_adds_up() {
    let gguf = tiny();
    let card = ModelCard::from_gguf(&gguf).unwrap();
    assert_eq!((card.architecture.as_str(), card.name.as_str(), card.quantisation.as_str()), ("llama", "Tiny Llama for tests", "Q8_0"));
    assert_eq!(card.parameters, gguf.tensors().map(|view| view.elements() as u64).sum::<u64>());
    assert_eq!((card.embedding_bytes, card.head_bytes, card.tied_head), (320 * 68, 320 * 68 + 64 * 4, true));
    let all: u64 = gguf.tensors().map(|view| view.bytes.len() as u64).sum();
    assert_eq!(card.layer_bytes.len(), 3);
    assert_eq!(card.layer_bytes.iter().sum::<u64>() + card.head_bytes, all);
    assert_eq!((card.kv_bytes_per_token, card.file_bytes), (128, 130_912));
}

#[test]
fn a_head_of_its_own_is_not_tied() {
    let model = Model::llama().with_tensor("output.weight", &[32, 10], BlockType::Q4_0);
    let gguf = model.gguf();
    let config = DecoderConfig::from_gguf(&gguf).unwrap();
    assert!(!config.tied_head());
    let card = ModelCard::of(&config, &gguf);
    // Ten rows take the room of sixteen.
    assert_eq!((card.embedding_bytes, card.head_bytes, card.tied_head), (16 * 34, 16 * 18 + 128, false));
    assert_eq!(card.name, "llama", "a file without a name goes by its architecture");
    let wrong = model.with_tensor("output.weight", &[32, 11], BlockType::Q4_0).error();
    assert!(matches!(wrong, ConfigError::TensorShape { tensor, .. } if tensor == "output.weight"));
}

#[test]
fn widths_that_are_not_said_follow_from_others() {
    let config = Model::llama().without("attention.head_count_kv").error();
    assert!(matches!(config, ConfigError::TensorShape { tensor, .. } if tensor == "blk.0.attn_k.weight"), "as many as query heads");
    // As some converters write it: an entry a layer.
    let heads = Value::Array(Array::I32(vec![4, 4]));
    assert_eq!(Model::llama().with("attention.head_count", heads).read().unwrap().heads, 4);
    let uneven = Model::llama().with("attention.head_count", Value::Array(Array::I32(vec![4, 2]))).error();
    assert!(uneven.to_string().contains("layers that differ in llama.attention.head_count"), "{uneven}");
}

#[test]
fn rope_scaling() {
    let scaled = |kind: Option<&str>, factor: f32| {
        let mut model = Model::llama().with("rope.scaling.factor", Value::F32(factor)).with("rope.freq_base", Value::F32(5e5));
        if let Some(kind) = kind {
            model.set("rope.scaling.type", Value::String(kind.into()));
        }
        model.read().map(|config| config.ropes[0].scale)
    };
    assert_eq!(scaled(Some("linear"), 8.0), Ok(0.125));
    assert_eq!(scaled(None, 4.0), Ok(0.25));
    assert_eq!(scaled(Some("none"), 4.0), Ok(1.0));
    assert_eq!(scaled(Some("yarn"), 4.0), Ok(0.25));
    assert!(scaled(Some("dynamic"), 4.0).unwrap_err().to_string().contains("rope scaling of type \"dynamic\""));
    assert!(matches!(scaled(Some("linear"), -1.0), Err(ConfigError::Invalid { .. })));
    let wide = Model::llama().with("rope.dimension_count", Value::U32(10)).error();
    assert!(matches!(wide, ConfigError::Invalid { key, .. } if key == "llama.rope.dimension_count"));
}

#[test]
fn rope_factors_are_read() {
    let gguf = |factors: &[f32]| {
        let mut writer = Writer::new();
        let model = Model::llama();
        writer.metadata("general.architecture", Value::String("llama".into()));
        for (key, value) in &model.values {
            writer.metadata(&format!("llama.{key}"), value.clone());
        }
        for (name, shape, block) in &model.tensors {
            let bytes = block.row_bytes(shape[0] as usize).unwrap() * shape.get(1).map_or(1, |&rows| rows as usize);
            writer.tensor(name, shape, *block, vec![0; bytes]);
        }
        let bytes = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        writer.tensor("rope_freqs.weight", &[factors.len() as u64], BlockType::F32, bytes);
        DecoderConfig::from_gguf(&Gguf::parse(writer.finish()).unwrap())
    };
    let rope = gguf(&[1.0, 2.0, 4.0, 8.0]).unwrap().ropes.remove(0);
    assert_eq!(rope.factors, [1.0, 2.0, 4.0, 8.0]);
    let plain = Rope { factors: Vec::new(), ..rope.clone() };
    let ratios: Vec<f32> = plain.frequencies(1).iter().zip(rope.frequencies(1)).map(|(plain, divided)| plain / divided).collect();
    assert_eq!(ratios, [1.0, 2.0, 4.0, 8.0]);
    assert!(matches!(gguf(&[1.0, 2.0]), Err(ConfigError::TensorShape { .. })));
    assert!(matches!(gguf(&[1.0, 0.0, 1.0, 1.0]), Err(ConfigError::Invalid { .. })));
}

#[test]
fn biases_are_used_where_they_are() {
    let config = Model::llama().with_tensor("blk.1.attn_q.bias", &[32], BlockType::F32).read().unwrap();
    assert_eq!(heads(&config, 0).query_bias, None);
    assert_eq!(heads(&config, 1).query_bias, Some(Part::whole("blk.1.attn_q.bias")));
    let wrong = Model::llama().with_tensor("blk.1.attn_q.bias", &[16], BlockType::F32).error();
    assert!(matches!(wrong, ConfigError::TensorShape { .. }));
}

#[test]
fn tensors_that_would_be_ignored_are_refused() {
    let error = Model::llama().with_tensor("blk.1.attn_sinks.weight", &[4], BlockType::F32).error();
    assert!(error.to_string().contains("the tensor \"blk.1.attn_sinks.weight\" in llama models"), "{error}");
    let third = Model::llama().with_tensor("blk.2.attn_q.weight", &[32, 32], BlockType::Q4_0).error();
    assert!(matches!(third, ConfigError::Unsupported { .. }), "a layer that the hyperparameters do not tell of");
    let harmless = Model::llama().with_tensor("blk.0.attn_rot_embd", &[4], BlockType::F32);
    assert!(harmless.with_tensor("mm.0.weight", &[4], BlockType::F32).read().is_ok());
}

#[test]
fn layers_that_guess_further_tokens_are_left_out() {
    let mut model = Model::llama().with("block_count", Value::U32(3)).with("nextn_predict_layers", Value::U32(1));
    model.layer(2, 8);
    model.put("blk.2.nextn.eh_proj.weight", &[64, 32], BlockType::Q4_0);
    assert_eq!(model.read().unwrap().layers, 2);
    assert!(matches!(model.clone().with("nextn_predict_layers", Value::U32(0)).error(), ConfigError::Unsupported { .. }));
    let all = model.with("nextn_predict_layers", Value::U32(3)).error();
    assert!(matches!(all, ConfigError::Invalid { key, .. } if key == "llama.nextn_predict_layers"));
}

#[test]
fn gemma3_is_the_same_decoder_with_other_data() {
    let config = Model::gemma3().read().unwrap();
    assert_eq!((config.key_length, config.activation, config.embedding_scale), (16, Activation::GeluTanh, 32f32.sqrt()));
    assert_eq!(config.attention_scale, 0.25);
    let wide: Vec<usize> = (0..7).filter(|&layer| config.windows[layer].is_none()).collect();
    assert_eq!(wide, [5], "every sixth layer");
    assert_eq!(config.windows[0], Some(512));
    let base = |layer| config.layer_rope(layer).unwrap().base;
    assert_eq!((base(0), base(5)), (10_000.0, 1_000_000.0));
    assert_eq!(config.ropes[0].layout, RopeLayout::Halves);
    let post = NormTensors { weight: Part::whole("blk.6.post_ffw_norm.weight"), bias: None };
    assert_eq!(config.layer_tensors[6].post_feed_forward_norm, Some(post));
    assert_eq!(config.logit_softcap, None);

    let stretched = Model::gemma3()
        .with("rope.scaling.type", Value::String("linear".into()))
        .with("rope.scaling.factor", Value::F32(8.0))
        .with("final_logit_softcapping", Value::F32(30.0))
        .with("attention.sliding_window_pattern", Value::U32(2))
        .read()
        .unwrap();
    assert_eq!(stretched.ropes.iter().map(|rope| rope.scale).collect::<Vec<_>>(), [0.125, 1.0]);
    assert_eq!(stretched.logit_softcap, Some(30.0));
    assert_eq!(stretched.windows.iter().filter(|window| window.is_none()).count(), 3);
    let without = Model::gemma3().without("attention.sliding_window").read().unwrap();
    assert_eq!(without.windows, [None; 7]);
    let told = |pattern: Vec<bool>| Model::gemma3().with("attention.sliding_window_pattern", Value::Array(Array::Bools(pattern))).read();
    assert_eq!(told(vec![false, true, false, false, false, false, false]).unwrap().windows[..3], [None, Some(512), None]);
    assert!(matches!(told(vec![true; 6]), Err(ConfigError::Invalid { .. })));
}

#[test]
fn unknown_architectures_are_refused_by_name() {
    let mut model = Model::llama();
    model.architecture = "mamba";
    let error = model.error().to_string();
    assert!(error.starts_with("models of architecture \"mamba\" are not supported; known are arcee, cohere2, "), "{error}");
    assert!(DecoderConfig::architectures().all(|name| error.contains(name)) && DecoderConfig::architectures().is_sorted(), "{error}");
    let mut old = Model::llama();
    old.architecture = "deepseek2";
    assert!(old.error().to_string().contains("a conversion from before keys and values were split"), "{}", old.error());
    let none = DecoderConfig::from_gguf(&Gguf::parse(Writer::new().finish()).unwrap()).unwrap_err();
    assert!(matches!(none, ConfigError::Missing { key, .. } if key == "general.architecture"));
    let mut writer = Writer::new();
    writer.metadata("general.architecture", Value::String("llama".into())).metadata("split.count", Value::U16(3));
    let split = DecoderConfig::from_gguf(&Gguf::parse(writer.finish()).unwrap()).unwrap_err();
    assert!(split.to_string().contains("the other parts of the model"), "{split}");
    let mut model = Model::llama().with("expert_count", Value::U32(8));
    model.architecture = "smollm3";
    let experts = model.error();
    assert!(experts.to_string().contains("needs what is not supported yet: a mixture of experts in smollm3 models"), "{experts}");
}

#[test]
fn experts_are_read_and_counted() {
    let mut model = Model::llama().with("expert_count", Value::U32(8)).with("expert_used_count", Value::U32(2));
    for layer in 0..2 {
        model.tensors.retain(|(name, ..)| !name.contains("ffn_gate") && !name.contains("ffn_up") && !name.contains("ffn_down"));
        model.put(&format!("blk.{layer}.ffn_gate_inp.weight"), &[32, 8], BlockType::F32);
    }
    for layer in 0..2 {
        model.put(&format!("blk.{layer}.ffn_gate_inp.weight"), &[32, 8], BlockType::F32);
        for (part, shape) in [("gate", [32, 64, 8]), ("up", [32, 64, 8]), ("down", [64, 32, 8])] {
            model.put(&format!("blk.{layer}.ffn_{part}_exps.weight"), &shape, BlockType::Q4_0);
        }
    }
    let gguf = model.gguf();
    let config = DecoderConfig::from_gguf(&gguf).unwrap();
    let experts = config.experts.as_ref().unwrap();
    assert_eq!((experts.count, experts.used, experts.feed_forward, experts.normalised), (8, 2, 64, true));
    assert!(matches!(config.layer_tensors[1].feed_forward, FeedForward::Experts(_)));
    let card = ModelCard::of(&config, &gguf);
    assert_eq!(card.feed_forward, 2 * 64);
    let attention = 32 * 32 * 2 + 32 * 16 * 2;
    assert_eq!(card.layer_bytes[0], 2 * 32 * 4 + attention * 18 / 32 + 3 * 8 * 32 * 64 * 18 / 32 + 32 * 16 * 4);
    let many = model.clone().with("expert_used_count", Value::U32(9)).error();
    assert!(matches!(many, ConfigError::Invalid { key, .. } if key == "llama.expert_used_count"));
    let wrong = model.clone().with("expert_count", Value::U32(4)).error();
    assert!(matches!(wrong, ConfigError::TensorShape { tensor, .. } if tensor == "blk.0.ffn_gate_inp.weight"));
    let shared = model.with_tensor("blk.1.ffn_up_shexp.weight", &[32, 64], BlockType::Q4_0).error();
    assert!(matches!(shared, ConfigError::TensorShape { .. } | ConfigError::MissingTensor { .. }), "{shared}");
}

#[test]
fn parts_of_one_tensor_must_be_all_of_it() {
    let fused = |rows: u64| {
        let mut model = Model::llama();
        model.architecture = "phi3";
        model.tensors.retain(|(name, ..)| !["attn_q.", "attn_k.", "attn_v.", "ffn_gate."].iter().any(|part| name.contains(part)));
        for layer in 0..2 {
            model.put(&format!("blk.{layer}.attn_qkv.weight"), &[32, rows], BlockType::Q4_0);
            model.put(&format!("blk.{layer}.ffn_up.weight"), &[32, 128], BlockType::Q4_0);
        }
        model
    };
    let gguf = fused(64).gguf();
    let config = DecoderConfig::from_gguf(&gguf).unwrap();
    assert_eq!(heads(&config, 0).value, Part { tensor: "blk.0.attn_qkv.weight".to_owned(), rows: Some(48..64) });
    let card = ModelCard::of(&config, &gguf);
    assert_eq!(card.parameters, gguf.tensors().map(|view| view.elements() as u64).sum::<u64>());
    assert!(matches!(fused(80).error(), ConfigError::Unsupported { .. }), "sixteen rows would be ignored");
    assert!(matches!(fused(48).error(), ConfigError::TensorShape { .. }));
}

#[test]
fn what_is_missing_is_named() {
    for key in ["block_count", "embedding_length", "attention.head_count", "feed_forward_length", "context_length"] {
        let error = Model::llama().without(key).error();
        assert!(matches!(&error, ConfigError::Missing { key: missing, .. } if *missing == format!("llama.{key}")), "{error}");
    }
    let all = Model::llama();
    for place in 0..all.tensors.len() {
        let mut model = all.clone();
        let (name, ..) = model.tensors.remove(place);
        let error = model.error();
        assert!(matches!(&error, ConfigError::MissingTensor { tensor, .. } if *tensor == name), "{error}");
    }
}

#[test]
fn hyperparameters_are_held_against_the_tensors() {
    for (key, value) in [
        ("embedding_length", Value::U32(64)),
        ("attention.head_count", Value::U32(8)),
        ("feed_forward_length", Value::U64(1 << 31)),
        ("attention.key_length", Value::U64(1 << 31)),
        ("block_count", Value::U32(2_000_000_000)),
        ("block_count", Value::U32(0)),
        ("block_count", Value::String("two".into())),
        ("attention.head_count_kv", Value::U32(3)),
        ("attention.head_count", Value::U64(u64::MAX)),
        ("attention.head_count", Value::U32(5)),
        ("attention.head_count", Value::Array(Array::U32(Vec::new()))),
        ("attention.layer_norm_rms_epsilon", Value::F32(f32::NAN)),
        ("attention.layer_norm_rms_epsilon", Value::F32(0.0)),
        ("rope.freq_base", Value::F32(-1.0)),
    ] {
        let error = Model::llama().with(key, value.clone()).error();
        let fits = matches!(error, ConfigError::Invalid { .. } | ConfigError::TensorShape { .. } | ConfigError::MissingTensor { .. });
        assert!(fits, "{key} {value:?}: {error}");
    }
    let shape = Model::llama().with_tensor("blk.1.ffn_down.weight", &[32, 64], BlockType::Q4_0).error();
    assert!(matches!(shape, ConfigError::TensorShape { tensor, .. } if tensor == "blk.1.ffn_down.weight"));
    let block = Model::llama().with_tensor("blk.1.ffn_down.weight", &[64, 32], BlockType::NVFP4).error();
    assert!(block.to_string().contains("weights of type NVFP4 (tensor blk.1.ffn_down.weight)"), "{block}");
}
