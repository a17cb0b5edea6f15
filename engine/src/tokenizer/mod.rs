//! Text to tokens and back, as the model's file describes it.
//!
//! Two kinds of vocabulary are known, by the names GGUF files give them: `gpt2`, byte pair encoding after a cut into
//! words that differs between model families, and `llama`, SentencePiece with scores. The ids are those that llama.cpp
//! gives for the same file, held by tests over some hundred strings of many languages.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use shoal_engine::{gguf::Gguf, tokenizer::Tokenizer};
//!
//! let tokenizer = Tokenizer::from_gguf(&Gguf::open("model.gguf".as_ref())?)?;
//! let prompt = tokenizer.encode_prompt("Once upon a time", false);
//! let mut stream = tokenizer.stream_after_prompt();
//! for token in prompt {
//!     let _text = stream.push(token);
//! }
//! # Ok(())
//! # }
//! ```

mod bpe;
mod bytes;
mod error;
mod index;
mod pieces;
mod pretokenizer;
mod sentencepiece;
mod specials;
mod stream;
mod vocabulary;

use std::sync::Arc;

pub use error::TokenizerError;
pub use stream::DecodeStream;

use crate::gguf::Gguf;
use crate::shown::shown;
use bpe::BytePairs;
use pretokenizer::PreTokenizer;
use sentencepiece::ScoredPieces;
use specials::{Fragment, Specials};
use vocabulary::{Spelling, TokenKind, Vocabulary};

/// A model's tokenizer. Clones share it.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    vocabulary: Arc<Vocabulary>,
    rules: Arc<Rules>,
}

/// What encoding needs beyond the vocabulary.
#[derive(Debug)]
struct Rules {
    specials: Specials,
    method: Method,
    adds_bos: bool,
    adds_eos: bool,
    /// Whether text that starts a prompt or follows a control token gets a space in front.
    prefixes_space: bool,
}

#[derive(Debug)]
enum Method {
    BytePairs(Box<BytePairs>),
    Scores(ScoredPieces),
}

impl Tokenizer {
    /// Builds the tokenizer that `file` describes.
    ///
    /// # Errors
    /// [`TokenizerError`] if the file has none, one of a kind that is not known, or a damaged one.
    pub fn from_gguf(file: &Gguf) -> Result<Self, TokenizerError> {
        const MODEL: &str = "tokenizer.ggml.model";
        let model = file.str(MODEL).ok_or(TokenizerError::Missing { key: MODEL, expected: "a string" })?;
        let flag = |key: &str, default: bool| file.bool(key).unwrap_or(default);
        let (vocabulary, method, adds_bos, prefixes_space) = match model {
            "gpt2" => {
                let cutter = PreTokenizer::named(file.str("tokenizer.ggml.pre").unwrap_or("default"))?;
                let vocabulary = Vocabulary::from_gguf(file, Spelling::ByteLevel)?;
                let adds_bos = cutter.adds_bos;
                let pairs = BytePairs::from_gguf(file, &vocabulary, cutter)?;
                (vocabulary, Method::BytePairs(Box::new(pairs)), adds_bos, false)
            }
            "llama" => {
                let vocabulary = Vocabulary::from_gguf(file, Spelling::Spaced)?;
                let pieces = ScoredPieces::from_gguf(file, &vocabulary)?;
                let prefixes_space = flag("tokenizer.ggml.add_space_prefix", true);
                (vocabulary, Method::Scores(pieces), true, prefixes_space)
            }
            other => return Err(TokenizerError::UnknownModel { name: shown(other), known: vec!["gpt2", "llama"] }),
        };
        let rules = Rules {
            specials: Specials::new(&vocabulary, swallows_space(file))?,
            method,
            adds_bos: flag("tokenizer.ggml.add_bos_token", adds_bos) && vocabulary.bos.is_some(),
            adds_eos: flag("tokenizer.ggml.add_eos_token", false) && vocabulary.eos.is_some(),
            prefixes_space,
        };
        Ok(Self { vocabulary: Arc::new(vocabulary), rules: Arc::new(rules) })
    }

    /// The tokens of `text`, nothing added.
    ///
    /// `special` says that control tokens in the text, like `<|im_start|>`, are meant as such: right for what a chat
    /// template has rendered, wrong for what a stranger has typed.
    pub fn encode(&self, text: &str, special: bool) -> Vec<u32> {
        let mut out = Vec::with_capacity(text.len() / 3);
        let mut after_special = true;
        for fragment in self.rules.specials.cut(&self.vocabulary, text, special) {
            match fragment {
                Fragment::Token(token) => {
                    out.push(token);
                    after_special = true;
                }
                Fragment::Text(text) => {
                    match &self.rules.method {
                        Method::BytePairs(pairs) => pairs.encode(text, &mut out),
                        Method::Scores(pieces) => {
                            let prefix = if self.rules.prefixes_space && after_special { "▁" } else { "" };
                            let spelled = format!("{prefix}{}", text.replace(' ', "▁"));
                            pieces.encode(&self.vocabulary, &spelled, &mut out);
                        }
                    }
                    after_special = false;
                }
            }
        }
        out
    }

    /// The tokens of `text` as a prompt: as [`Self::encode`], with the beginning-of-text and end-of-text tokens that
    /// the model was trained to see. A beginning that a template has already written is not doubled.
    pub fn encode_prompt(&self, text: &str, special: bool) -> Vec<u32> {
        let mut out = self.encode(text, special);
        if self.rules.adds_bos
            && let Some(bos) = self.vocabulary.bos
            && out.first() != Some(&bos)
        {
            out.insert(0, bos);
        }
        if self.rules.adds_eos
            && let Some(eos) = self.vocabulary.eos
            && out.last() != Some(&eos)
        {
            out.push(eos);
        }
        out
    }

    /// The text of `tokens`, control tokens left out. Bytes that are no UTF-8 come as `U+FFFD`; ids outside the
    /// vocabulary are skipped.
    pub fn decode(&self, tokens: &[u32]) -> String {
        Self::run(self.stream(), tokens)
    }

    /// As [`Self::decode`], with control tokens by their names.
    pub fn decode_with_control(&self, tokens: &[u32]) -> String {
        Self::run(DecodeStream::new(self.vocabulary.clone(), self.rules.prefixes_space, true), tokens)
    }

    fn run(mut stream: DecodeStream, tokens: &[u32]) -> String {
        let mut text = String::new();
        for &token in tokens {
            text.push_str(&stream.push(token));
        }
        text.push_str(&stream.finish());
        text
    }

    /// A stream that gives the same text as [`Self::decode`], piece by piece.
    pub fn stream(&self) -> DecodeStream {
        DecodeStream::new(self.vocabulary.clone(), self.rules.prefixes_space, false)
    }

    /// A stream for tokens that continue a text, hence one that keeps a leading space.
    pub fn stream_after_prompt(&self) -> DecodeStream {
        DecodeStream::new(self.vocabulary.clone(), false, false)
    }

    /// Count of tokens in the vocabulary; ids are below it.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary.len() as usize
    }

    /// A token's text as the file spells it: `Ġthe`, `▁the`, `<0x0A>`.
    pub fn token_text(&self, token: u32) -> Option<&str> {
        (token < self.vocabulary.len()).then(|| self.vocabulary.text(token))
    }

    /// The bytes that a token stands for, control tokens by their names. They need not be whole characters.
    pub fn token_bytes(&self, token: u32) -> Vec<u8> {
        let mut out = Vec::new();
        self.vocabulary.write_piece(token, true, &mut out);
        out
    }

    /// The token with this text, as the file spells it.
    pub fn token_named(&self, text: &str) -> Option<u32> {
        self.vocabulary.find(text)
    }

    /// Whether a token steers the model and is no text.
    pub fn is_control(&self, token: u32) -> bool {
        token < self.vocabulary.len() && matches!(self.vocabulary.kind(token), TokenKind::Control | TokenKind::Unknown)
    }

    /// Whether `text` contains the name of a control token.
    pub fn has_control(&self, text: &str) -> bool {
        self.rules.specials.has_control(&self.vocabulary, text)
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.vocabulary.bos
    }

    /// The token that ends a text.
    pub fn eos(&self) -> Option<u32> {
        self.vocabulary.eos
    }

    /// The token that ends a turn of a conversation.
    pub fn eot(&self) -> Option<u32> {
        self.vocabulary.eot
    }

    /// Whether a model that emits this token is done.
    pub fn is_end_of_generation(&self, token: u32) -> bool {
        self.vocabulary.ends_generation.contains(&token)
    }

    /// All tokens that end generation, in ascending order.
    pub fn end_of_generation(&self) -> impl Iterator<Item = u32> + '_ {
        self.vocabulary.ends_generation.iter().copied()
    }

    /// Whether prompts start with [`Self::bos`].
    pub fn adds_bos(&self) -> bool {
        self.rules.adds_bos
    }

    /// Whether prompts end with [`Self::eos`].
    pub fn adds_eos(&self) -> bool {
        self.rules.adds_eos
    }
}

/// Phi-3's special tokens take the white space after them along. Files do not say so; the model's name does.
fn swallows_space(file: &Gguf) -> bool {
    let name = file.str("general.name").unwrap_or_default().to_lowercase();
    name.contains("phi-3") || name.contains("phi3")
}
