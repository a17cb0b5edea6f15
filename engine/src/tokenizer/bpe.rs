//! Byte pair encoding as GPT-2 began it: words, written one character a byte, are merged pair by pair in the order
//! that training found the pairs.

use tokenizers::Model as _;
use tokenizers::models::bpe::{BPE, Vocab};

use super::bytes::char_of_byte;
use super::error::TokenizerError;
use super::pretokenizer::PreTokenizer;
use super::vocabulary::Vocabulary;
use crate::gguf::Gguf;
use crate::shown::shown;

/// Words that are kept with their tokens. Text repeats itself; a few thousand words cover most of it.
const CACHED_WORDS: usize = 8192;

/// Encodes by byte pairs.
pub(crate) struct BytePairs {
    cutter: PreTokenizer,
    merges: BPE,
    /// Which bytes are tokens. Some vocabularies lack a few control characters.
    known: [bool; 256],
}

impl BytePairs {
    pub(crate) fn from_gguf(file: &Gguf, vocabulary: &Vocabulary, cutter: PreTokenizer) -> Result<Self, TokenizerError> {
        const KEY: &str = "tokenizer.ggml.merges";
        let lines = file.strings(KEY).ok_or(TokenizerError::Missing { key: KEY, expected: "a list of strings" })?;
        let mut merges = Vec::with_capacity(lines.len());
        for line in lines.iter() {
            let line: &str = line.as_ref();
            // The first character may itself be a space in vocabularies that spell plainly.
            let cut = line.char_indices().skip(1).find(|&(_, character)| character == ' ').map(|(at, _)| at);
            let Some(cut) = cut.filter(|&at| at + 1 < line.len()) else {
                return Err(TokenizerError::Malformed(format!("merge `{}` is not two parts", shown(line))));
            };
            merges.push((line[..cut].to_owned(), line[cut + 1..].to_owned()));
        }
        let texts: Vocab = (0..vocabulary.len()).map(|id| (vocabulary.text(id).to_owned(), id)).collect();
        let merges = BPE::builder()
            .vocab_and_merges(texts, merges)
            .ignore_merges(cutter.whole_words)
            .cache_capacity(CACHED_WORDS)
            .build()
            .map_err(|error| TokenizerError::Malformed(shown(&format!("its merges do not fit its tokens: {error}"))))?;
        let mut known = [false; 256];
        for byte in 0..=u8::MAX {
            known[usize::from(byte)] = vocabulary.find(char_of_byte(byte).encode_utf8(&mut [0; 4])).is_some();
        }
        Ok(Self { cutter, merges, known })
    }

    /// Appends the tokens of `text`. Bytes that are no token are left out, and nothing is merged across them.
    pub(crate) fn encode(&self, text: &str, out: &mut Vec<u32>) {
        let mut spelled = String::new();
        for word in self.cutter.cut(text) {
            for part in word.as_bytes().split(|&byte| !self.known[usize::from(byte)]) {
                spelled.clear();
                spelled.extend(part.iter().map(|&byte| char_of_byte(byte)));
                // It fails only for a configured unknown token that is missing; none is configured.
                if let Ok(tokens) = self.merges.tokenize(&spelled) {
                    out.extend(tokens.iter().map(|token| token.id));
                }
            }
        }
    }
}

impl std::fmt::Debug for BytePairs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BytePairs").field("cutter", &self.cutter).finish_non_exhaustive()
    }
}
