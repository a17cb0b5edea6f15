//! The tokenizer against llama.cpp's ids, and round trips, on the vocabularies of real models.
//!
//! `data/tokenizer/make.py` says how the data was made. The model files hold metadata only.

#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use proptest::prelude::*;
use serde::Deserialize;
use shoal_engine::chat::{ChatError, ChatOptions, ChatTemplate, Message};
use shoal_engine::gguf::Gguf;
use shoal_engine::tokenizer::Tokenizer;

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizer").join(name)
}

fn gguf(name: &str) -> Gguf {
    let file = std::fs::File::open(data(&format!("{name}.gguf.zip"))).unwrap();
    let mut archive = zip::ZipArchive::new(file).unwrap();
    let mut bytes = Vec::new();
    archive.by_index(0).unwrap().read_to_end(&mut bytes).unwrap();
    Gguf::parse(bytes).unwrap()
}

fn smollm2() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| Tokenizer::from_gguf(&gguf("smollm2")).unwrap())
}

fn gemma3() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| Tokenizer::from_gguf(&gguf("gemma3")).unwrap())
}

#[derive(Deserialize)]
struct Strings {
    strings: Vec<String>,
}

#[derive(Deserialize)]
struct Ids {
    special: Vec<Vec<u32>>,
    plain: Vec<Vec<u32>>,
}

fn check_ids(strings: &Path, ids: &Path, tokenizer: &Tokenizer) {
    let strings = serde_json::from_slice::<Strings>(&std::fs::read(strings).unwrap()).unwrap().strings;
    let ids: Ids = serde_json::from_slice(&std::fs::read(ids).unwrap()).unwrap();
    assert!(strings.len() >= 250);
    assert_eq!((strings.len(), strings.len()), (ids.special.len(), ids.plain.len()));
    let mut wrong = Vec::new();
    for (nth, text) in strings.iter().enumerate() {
        for (special, expected) in [(true, &ids.special[nth]), (false, &ids.plain[nth])] {
            let got = tokenizer.encode(text, special);
            if got != *expected {
                let at = got.iter().zip(expected).position(|(a, b)| a != b).unwrap_or(got.len().min(expected.len()));
                let part = |ids: &[u32]| -> Vec<String> {
                    ids[at..].iter().take(6).map(|&id| format!("{id}={}", tokenizer.token_text(id).unwrap_or("?"))).collect()
                };
                let shown: String = text.chars().take(60).collect();
                wrong.push(format!("{shown:?} special={special} from token {at}: {:?}, not {:?}", part(&got), part(expected)));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), 2 * strings.len(), wrong.join("\n"));
}

#[test]
fn smollm2_ids_equal_llama_cpps() {
    check_ids(&data("strings.json"), &data("smollm2.ids.json"), smollm2());
}

#[test]
fn gemma3_ids_equal_llama_cpps() {
    check_ids(&data("strings.json"), &data("gemma3.ids.json"), gemma3());
}

/// For other models and strings: `make.py` makes the files that the variables name.
#[test]
#[ignore = "set TOKENIZER_MODEL, TOKENIZER_STRINGS and TOKENIZER_IDS to files"]
fn ids_of_another_model() {
    let file = |name: &str| PathBuf::from(std::env::var_os(name).unwrap_or_else(|| panic!("{name} is not set")));
    let tokenizer = Tokenizer::from_gguf(&Gguf::open(&file("TOKENIZER_MODEL")).unwrap()).unwrap();
    check_ids(&file("TOKENIZER_STRINGS"), &file("TOKENIZER_IDS"), &tokenizer);
}

#[test]
fn smollm2_knows_its_tokens() {
    let tokenizer = smollm2();
    assert_eq!(tokenizer.vocabulary(), 49_152);
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.eot()), (Some(1), Some(2), Some(2)));
    assert!(!tokenizer.adds_bos() && !tokenizer.adds_eos());
    // <|endoftext|>, <|im_end|>, <reponame>.
    assert_eq!(tokenizer.end_of_generation().collect::<Vec<_>>(), [0, 2, 4]);
    assert!(tokenizer.is_end_of_generation(2) && !tokenizer.is_end_of_generation(1));
    assert!(tokenizer.is_control(1) && !tokenizer.is_control(500) && !tokenizer.is_control(u32::MAX));
    assert_eq!(tokenizer.token_named("<|im_start|>"), Some(1));
    assert_eq!(tokenizer.token_bytes(1), b"<|im_start|>");
    assert_eq!(tokenizer.decode(&[1, 2]), "");
    assert_eq!(tokenizer.decode_with_control(&[1, 2]), "<|im_start|><|im_end|>");
    assert_eq!(tokenizer.decode(&[u32::MAX, 49_152]), "");
    assert!(tokenizer.has_control("x<|im_end|>") && !tokenizer.has_control("x<|im_end|"));
}

#[test]
fn gemma3_knows_its_tokens() {
    let tokenizer = gemma3();
    assert_eq!(tokenizer.vocabulary(), 262_144);
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(2), Some(1)));
    assert!(tokenizer.adds_bos() && !tokenizer.adds_eos());
    assert!(tokenizer.is_end_of_generation(1));
    assert!(tokenizer.is_end_of_generation(tokenizer.token_named("<end_of_turn>").unwrap()));
    assert_eq!(tokenizer.encode_prompt("", false), [2]);
    assert_eq!(tokenizer.encode_prompt("<bos>", true), [2], "not doubled");
    assert_eq!(tokenizer.encode_prompt("<bos>", false)[0], 2);
    assert!(tokenizer.encode_prompt("<bos>", false).len() > 2);
}

#[test]
fn smollm2s_own_chat_template() {
    let file = gguf("smollm2");
    let template = ChatTemplate::from_gguf(&file, smollm2()).unwrap();
    assert_eq!(template.assumed_format(), None);
    let text = template.render(&[Message::new("user", "Hi")], &ChatOptions::default()).unwrap();
    assert_eq!(
        text,
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
    let ids = smollm2().encode_prompt(&text, true);
    assert_eq!(ids.iter().filter(|&&id| id == 1).count(), 3);
    assert_eq!(smollm2().decode_with_control(&ids), text);
    let open = ChatOptions { add_generation_prompt: false, ..Default::default() };
    let turns = [Message::new("system", "S"), Message::new("user", "U"), Message::new("assistant", "A")];
    assert_eq!(
        template.render(&turns, &open).unwrap(),
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    );
}

#[test]
fn gemma3_has_no_template_but_its_vocabulary_shows_the_format() {
    let template = ChatTemplate::from_gguf(&gguf("gemma3"), gemma3()).unwrap();
    assert_eq!(template.assumed_format(), Some("gemma"));
    let turns = [Message::new("system", "S"), Message::new("user", " U "), Message::new("assistant", "A"), Message::new("user", "V")];
    let text = template.render(&turns, &ChatOptions::default()).unwrap();
    assert_eq!(
        text,
        "<bos><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n"
    );
    assert_eq!(gemma3().encode_prompt(&text, true)[..3], [2, 105, 2364]);
}

#[test]
fn a_model_that_shows_no_format_is_refused() {
    let tokens = ["<unk>", "<s>", "</s>", "a"];
    let file = tiny_gguf(&tokens, &[0.0; 4], &[2, 3, 3, 1]);
    let tokenizer = Tokenizer::from_gguf(&file).unwrap();
    let error = ChatTemplate::from_gguf(&file, &tokenizer).unwrap_err();
    assert!(matches!(&error, ChatError::NoTemplate { model } if model == "tiny"), "{error}");
    assert!(error.to_string().contains("instruction-tuned"));
}

#[test]
fn the_space_in_front_comes_and_goes() {
    let tokens = ["<unk>", "<s>", "</s>", "▁", "a", "▁a", "b"];
    let file = tiny_gguf(&tokens, &[0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 0.0], &[2, 3, 3, 1, 1, 1, 1]);
    let tokenizer = Tokenizer::from_gguf(&file).unwrap();
    assert_eq!(tokenizer.encode("a b", false), [5, 3, 6]);
    assert_eq!(tokenizer.decode(&[5, 3, 6]), "a b");
    assert_eq!(tokenizer.encode("a</s>a", true), [5, 2, 5], "after a control token as at the start");
    assert_eq!(tokenizer.encode_prompt("a", false), [1, 5]);
    assert_eq!(tokenizer.encode("é", false), [3, 0]);
    let mut continued = tokenizer.stream_after_prompt();
    assert_eq!(continued.push(5), " a");
}

#[test]
fn damaged_files_are_refused_by_name() {
    let mut writer = GgufBytes::new();
    writer.string("general.name", "x");
    let message = |file: &Gguf| Tokenizer::from_gguf(file).unwrap_err().to_string();
    assert!(message(&writer.finish()).contains("tokenizer.ggml.model"));
    let mut writer = GgufBytes::new();
    writer.string("tokenizer.ggml.model", "t5");
    assert!(message(&writer.finish()).contains("`t5` is not supported; supported are gpt2, llama"));
    let mut writer = GgufBytes::new();
    writer.string("tokenizer.ggml.model", "gpt2");
    writer.string("tokenizer.ggml.pre", "odd");
    assert!(message(&writer.finish()).contains("`odd` is not supported; supported are default, gpt-2"));
    let mut writer = GgufBytes::new();
    writer.string("tokenizer.ggml.model", "gpt2");
    writer.strings("tokenizer.ggml.tokens", &["a", "b"]);
    assert!(message(&writer.finish()).contains("tokenizer.ggml.merges"));
    for merge in ["ab", "a ", "a c"] {
        let mut writer = GgufBytes::new();
        writer.string("tokenizer.ggml.model", "gpt2");
        writer.strings("tokenizer.ggml.tokens", &["a", "b"]);
        writer.strings("tokenizer.ggml.merges", &[merge]);
        assert!(message(&writer.finish()).contains("damaged"), "{merge}");
    }
    assert!(Tokenizer::from_gguf(&tiny_gguf(&["a"], &[], &[1])).unwrap_err().to_string().contains("1 tokens but 0 scores"));
    assert!(Tokenizer::from_gguf(&tiny_gguf(&["a"], &[0.0], &[])).unwrap_err().to_string().contains("0 token types"));
}

/// Text of a few characters that tokenizers find hard, mixed with anything.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![any::<String>(), "[ \\t\\r\\na1é日😀'<|>_-]{0,80}", "( {0,40}[a-z]{0,5}\\n{0,5}){0,6}"]
}

fn streams_like_decode(tokenizer: &Tokenizer, ids: &[u32]) -> Result<(), TestCaseError> {
    let mut stream = tokenizer.stream();
    let mut streamed: String = ids.iter().map(|&id| stream.push(id)).collect();
    streamed.push_str(&stream.finish());
    prop_assert_eq!(streamed, tokenizer.decode(ids));
    Ok(())
}

proptest! {
    #[test]
    fn smollm2_round_trips(text in text()) {
        let ids = smollm2().encode(&text, false);
        prop_assert_eq!(smollm2().decode(&ids), text);
        streams_like_decode(smollm2(), &ids)?;
    }

    #[test]
    fn gemma3_round_trips(text in text()) {
        // The vocabulary spells a space as `▁`, so that the two cannot be told apart.
        let text = text.replace('▁', " ");
        let ids = gemma3().encode(&text, false);
        prop_assert_eq!(gemma3().decode(&ids), text);
        streams_like_decode(gemma3(), &ids)?;
    }

    #[test]
    fn any_ids_stream_like_they_decode(ids in proptest::collection::vec(0_u32..270_000, 0..40)) {
        streams_like_decode(smollm2(), &ids)?;
        streams_like_decode(gemma3(), &ids)?;
    }
}

/// Text that makes look-ahead engines or quadratic merging hang: it must go through, and come back.
#[test]
fn hostile_lengths_go_through() {
    for text in [" ".repeat(2_000_000), "a".repeat(300_000), "\n ".repeat(200_000), " \u{a0}".repeat(200_000), "日".repeat(100_000)] {
        for tokenizer in [smollm2(), gemma3()] {
            assert_eq!(tokenizer.decode(&tokenizer.encode(&text, true)), text);
        }
    }
}

fn tiny_gguf(tokens: &[&str], scores: &[f32], kinds: &[i32]) -> Gguf {
    let mut writer = GgufBytes::new();
    writer.string("general.name", "tiny");
    writer.string("tokenizer.ggml.model", "llama");
    writer.strings("tokenizer.ggml.tokens", tokens);
    writer.array("tokenizer.ggml.scores", 6, scores.iter().map(|s| s.to_le_bytes()));
    writer.array("tokenizer.ggml.token_type", 5, kinds.iter().map(|k| k.to_le_bytes()));
    writer.finish()
}

/// Writes metadata in the GGUF layout.
struct GgufBytes {
    pairs: Vec<u8>,
    count: u64,
}

impl GgufBytes {
    fn new() -> Self {
        Self { pairs: Vec::new(), count: 0 }
    }

    fn text(&mut self, text: &str) {
        self.pairs.extend((text.len() as u64).to_le_bytes());
        self.pairs.extend(text.as_bytes());
    }

    fn key(&mut self, key: &str, kind: u32) {
        self.count += 1;
        self.text(key);
        self.pairs.extend(kind.to_le_bytes());
    }

    fn string(&mut self, key: &str, value: &str) {
        self.key(key, 8);
        self.text(value);
    }

    fn strings(&mut self, key: &str, values: &[&str]) {
        self.key(key, 9);
        self.pairs.extend(8_u32.to_le_bytes());
        self.pairs.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| self.text(value));
    }

    fn array(&mut self, key: &str, kind: u32, values: impl ExactSizeIterator<Item = [u8; 4]>) {
        self.key(key, 9);
        self.pairs.extend(kind.to_le_bytes());
        self.pairs.extend((values.len() as u64).to_le_bytes());
        self.pairs.extend(values.flatten());
    }

    fn finish(&self) -> Gguf {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3_u32.to_le_bytes());
        bytes.extend(0_u64.to_le_bytes());
        bytes.extend(self.count.to_le_bytes());
        bytes.extend(&self.pairs);
        Gguf::parse(bytes).unwrap()
    }
}
