//! The tokens of a model: their texts, what kind each is, and which of them mean something to whoever runs the model.

use std::collections::BTreeSet;

use super::error::TokenizerError;
use super::index::TextIndex;
use crate::gguf::Gguf;

/// What a token is for, as the file says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenKind {
    /// Ordinary text.
    Normal,
    /// Stands for text the vocabulary cannot express.
    Unknown,
    /// Steers the model and is not part of the text it writes, e.g. `<|im_end|>`.
    Control,
    /// Text that is matched as it stands before anything else is.
    UserDefined,
    /// Fills a place in the table.
    Unused,
    /// One byte, `<0x00>` to `<0xFF>`.
    Byte,
}

impl TokenKind {
    /// Numbering of `tokenizer.ggml.token_type`.
    fn from_number(number: i32) -> Self {
        match number {
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => Self::Normal,
        }
    }
}

/// How text is written in the tokens' texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spelling {
    /// Each byte is one printable character, as GPT-2 began it.
    ByteLevel,
    /// Plain UTF-8 with `▁` for a space, as SentencePiece writes it.
    Spaced,
}

/// Tokens by their names that end a turn or a document, whatever else the file says about them. Files often name only
/// one end token although the model was trained to use several.
const END_NAMES: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// Of those, the ones that end a turn of a conversation, the likeliest first.
const END_OF_TURN_NAMES: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
];

/// Padding and separators of fill-in-the-middle training: a model that writes one has left its text.
const INFILL_END_NAMES: &[&str] = &[
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// Other tokens of fill-in-the-middle prompts. Like all of the above they are control tokens even if a file calls
/// them ordinary.
const INFILL_NAMES: &[&str] = &[
    "<|fim_prefix|>",
    "<fim-prefix>",
    "<fim_prefix>",
    "<｜fim▁begin｜>",
    "<PRE>",
    "▁<PRE>",
    "<|code_prefix|>",
    "<|fim_suffix|>",
    "<fim-suffix>",
    "<fim_suffix>",
    "<｜fim▁hole｜>",
    "<SUF>",
    "▁<SUF>",
    "<|code_suffix|>",
    "<|fim_middle|>",
    "<fim-middle>",
    "<fim_middle>",
    "<｜fim▁end｜>",
    "<MID>",
    "▁<MID>",
    "<|code_middle|>",
];

/// Channel markers of the harmony format. They are structure that a client's parser must see, hence text.
const VISIBLE_NAMES: &[&str] = &["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// Longest token, in bytes as the file spells it. The longest that are known have some hundred; encoding looks at stretches of text of
/// that length, and a token's whole text is written when a model emits it.
const TOKEN_BYTES_MAX: usize = 4096;

/// The tokens of a model.
#[derive(Debug)]
pub(crate) struct Vocabulary {
    /// All texts, one after the other.
    texts: String,
    /// Where each token's text ends in `texts`.
    ends: Vec<u32>,
    kinds: Vec<TokenKind>,
    index: TextIndex,
    pub(crate) spelling: Spelling,
    pub(crate) longest_bytes: usize,
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Option<u32>,
    pub(crate) eot: Option<u32>,
    pub(crate) unknown: Option<u32>,
    pub(crate) ends_generation: BTreeSet<u32>,
}

impl Vocabulary {
    /// Reads the tokens of `file`, which are spelled as `spelling` says.
    pub(crate) fn from_gguf(file: &Gguf, spelling: Spelling) -> Result<Self, TokenizerError> {
        let tokens = file
            .strings("tokenizer.ggml.tokens")
            .ok_or(TokenizerError::Missing { key: "tokenizer.ggml.tokens", expected: "a list of strings" })?;
        let kinds = match file.metadata("tokenizer.ggml.token_type") {
            None => vec![TokenKind::Normal; tokens.len()],
            Some(_) => file
                .i32s("tokenizer.ggml.token_type")
                .ok_or(TokenizerError::Missing { key: "tokenizer.ggml.token_type", expected: "a list of 32-bit integers" })?
                .iter()
                .map(|&number| TokenKind::from_number(number))
                .collect(),
        };
        if kinds.len() != tokens.len() {
            return Err(TokenizerError::Malformed(format!("it lists {} tokens but {} token types", tokens.len(), kinds.len())));
        }
        let mut vocabulary = Self::new(tokens.iter().map(AsRef::as_ref), kinds, spelling)?;
        let (bos, eos, unknown) = match spelling {
            Spelling::Spaced => (Some(1), Some(2), Some(0)),
            Spelling::ByteLevel => (None, None, None),
        };
        vocabulary.bos = vocabulary.named(file, "tokenizer.ggml.bos_token_id", bos);
        vocabulary.eos = vocabulary.named(file, "tokenizer.ggml.eos_token_id", eos);
        vocabulary.eot = vocabulary.named(file, "tokenizer.ggml.eot_token_id", None);
        vocabulary.unknown = vocabulary.named(file, "tokenizer.ggml.unknown_token_id", unknown);
        let eom = vocabulary.named(file, "tokenizer.ggml.eom_token_id", None);
        vocabulary.find_ends(eom);
        Ok(vocabulary)
    }

    fn new<'a>(
        tokens: impl ExactSizeIterator<Item = &'a str> + Clone,
        kinds: Vec<TokenKind>,
        spelling: Spelling,
    ) -> Result<Self, TokenizerError> {
        let count = u32::try_from(tokens.len()).ok().filter(|&count| count < u32::MAX);
        let bytes: usize = tokens.clone().map(str::len).sum();
        let (Some(count), Ok(_)) = (count, u32::try_from(bytes)) else {
            return Err(TokenizerError::Malformed(format!(
                "{} tokens with {bytes} bytes of text is beyond any real vocabulary",
                tokens.len()
            )));
        };
        if count == 0 {
            return Err(TokenizerError::Malformed("its list of tokens is empty".to_owned()));
        }
        let mut texts = String::with_capacity(bytes);
        let mut ends = Vec::with_capacity(count as usize);
        let mut longest_bytes = 0;
        for token in tokens {
            texts.push_str(token);
            longest_bytes = longest_bytes.max(token.len());
            // Fits: the sum was checked above.
            ends.push(texts.len() as u32);
        }
        if longest_bytes > TOKEN_BYTES_MAX {
            return Err(TokenizerError::Malformed(format!("a token has {longest_bytes} bytes; {TOKEN_BYTES_MAX} is the most")));
        }
        let index = TextIndex::build(count, |id| slice(&texts, &ends, id));
        let index = index.ok_or_else(|| TokenizerError::Malformed("its tokens are chosen to make looking them up slow".to_owned()))?;
        Ok(Self {
            texts,
            ends,
            kinds,
            index,
            spelling,
            longest_bytes,
            bos: None,
            eos: None,
            eot: None,
            unknown: None,
            ends_generation: BTreeSet::new(),
        })
    }

    /// A vocabulary for tests.
    #[cfg(test)]
    pub(crate) fn of_texts(tokens: &[(&str, TokenKind)]) -> Self {
        let kinds = tokens.iter().map(|t| t.1).collect();
        Self::new(tokens.iter().map(|t| t.0), kinds, Spelling::Spaced).unwrap()
    }

    /// A token that the file names by number; numbers outside the vocabulary count as absent.
    fn named(&self, file: &Gguf, key: &str, default: Option<u32>) -> Option<u32> {
        file.u32(key).filter(|&id| id < self.len()).or(default.filter(|&id| id < self.len()))
    }

    /// Decides which tokens end generation, and corrects the kinds of tokens whose names give them away.
    fn find_ends(&mut self, eom: Option<u32>) {
        for name in END_NAMES.iter().chain(INFILL_END_NAMES) {
            if let Some(id) = self.find(name) {
                self.kinds[id as usize] = TokenKind::Control;
                self.ends_generation.insert(id);
            }
        }
        for name in INFILL_NAMES {
            if let Some(id) = self.find(name) {
                self.kinds[id as usize] = TokenKind::Control;
            }
        }
        for name in VISIBLE_NAMES {
            if let Some(id) = self.find(name) {
                self.kinds[id as usize] = TokenKind::UserDefined;
            }
        }
        if self.eot.is_none() {
            self.eot = END_OF_TURN_NAMES.iter().find_map(|name| self.find(name));
        }
        self.ends_generation.extend([self.eos, self.eot, eom].into_iter().flatten());
        let ends = |name: &str| self.find(name).filter(|id| self.ends_generation.contains(id));
        // In the harmony format and its kin `<|end|>` closes one message of several.
        let harmony = ends("<|return|>").is_some() && ends("<|call|>").is_some();
        let solar = ends("<|flush|>").is_some() && (ends("<|call|>").is_some() || ends("<|calls|>").is_some());
        let end = ends("<|end|>").filter(|_| harmony || solar);
        // Where `<|tool_response>` exists, `</s>` is the HTML tag for strikethrough.
        let strike = ends("</s>").filter(|_| ends("<|tool_response>").is_some());
        if let Some(id) = end {
            self.ends_generation.remove(&id);
            self.kinds[id as usize] = TokenKind::UserDefined;
        }
        if let Some(id) = strike {
            self.ends_generation.remove(&id);
            self.kinds[id as usize] = TokenKind::Normal;
        }
    }

    /// Count of tokens.
    pub(crate) fn len(&self) -> u32 {
        // Fits: checked when it was built.
        self.ends.len() as u32
    }

    /// A token's text as the file spells it. `id` must be below [`Self::len`].
    pub(crate) fn text(&self, id: u32) -> &str {
        slice(&self.texts, &self.ends, id)
    }

    /// A token's kind. `id` must be below [`Self::len`].
    pub(crate) fn kind(&self, id: u32) -> TokenKind {
        self.kinds[id as usize]
    }

    /// The token with this text, as the file spells it.
    pub(crate) fn find(&self, text: &str) -> Option<u32> {
        self.index.find(text, |id| self.text(id))
    }
}

fn slice<'a>(texts: &'a str, ends: &[u32], id: u32) -> &'a str {
    let id = id as usize;
    let start = if id == 0 { 0 } else { ends[id - 1] as usize };
    &texts[start..ends[id] as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_give_end_tokens_away() {
        let mut vocabulary = Vocabulary::of_texts(&[
            ("a", TokenKind::Normal),
            ("<|im_end|>", TokenKind::Normal),
            ("<|endoftext|>", TokenKind::Control),
            ("<eos>", TokenKind::Control),
        ]);
        vocabulary.eos = Some(2);
        vocabulary.find_ends(None);
        assert_eq!(vocabulary.ends_generation, BTreeSet::from([1, 2, 3]));
        assert_eq!(vocabulary.eot, Some(1));
        assert_eq!(vocabulary.kind(1), TokenKind::Control);
    }

    #[test]
    fn harmony_messages_end_without_ending_generation() {
        let mut vocabulary =
            Vocabulary::of_texts(&[("<|end|>", TokenKind::Control), ("<|return|>", TokenKind::Control), ("<|call|>", TokenKind::Control)]);
        vocabulary.find_ends(None);
        assert!(!vocabulary.ends_generation.contains(&0));
        assert!(vocabulary.ends_generation.contains(&1));
        assert_eq!(vocabulary.kind(0), TokenKind::UserDefined);
    }

    #[test]
    fn an_empty_vocabulary_is_refused() {
        assert!(Vocabulary::new([].into_iter(), vec![], Spelling::Spaced).is_err());
    }

    #[test]
    fn a_token_of_no_sane_length_is_refused() {
        let of = |bytes: usize| Vocabulary::new([&*"x".repeat(bytes)].into_iter(), vec![TokenKind::Normal], Spelling::Spaced).map(drop);
        assert_eq!(of(TOKEN_BYTES_MAX), Ok(()));
        assert!(of(TOKEN_BYTES_MAX + 1).unwrap_err().to_string().contains("4097 bytes"));
    }
}
