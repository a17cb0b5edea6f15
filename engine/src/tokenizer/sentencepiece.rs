//! SentencePiece vocabularies with scores: neighbouring pieces are merged, the best-scored result first, until no
//! two neighbours make a token. What is then no token is written byte by byte.
//!
//! Spaces are spelled `▁`. Of equally good merges the leftmost is done first; that matters for runs of one character
//! (Gemma scores all of its short runs alike). Kudo and Richardson, "SentencePiece" (2018), section 3.2.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::error::TokenizerError;
use super::vocabulary::Vocabulary;
use crate::gguf::Gguf;

/// Marks the end of the chain of symbols.
const NONE: u32 = u32::MAX;

/// Encodes by scores.
#[derive(Debug)]
pub(crate) struct ScoredPieces {
    scores: Vec<f32>,
    /// The token of each byte.
    bytes: Vec<Option<u32>>,
}

/// A stretch of the text that is one symbol for now.
#[derive(Debug, Clone, Copy)]
struct Symbol {
    start: u32,
    /// Zero once it was merged into the symbol before.
    length: u32,
    previous: u32,
    next: u32,
}

/// Two neighbours that together are a token.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    score: f32,
    left: u32,
    right: u32,
    /// Length of the two when they were found: another length now means that one has grown or gone.
    length: u32,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left)).then(other.length.cmp(&self.length))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}

impl ScoredPieces {
    pub(crate) fn from_gguf(file: &Gguf, vocabulary: &Vocabulary) -> Result<Self, TokenizerError> {
        const KEY: &str = "tokenizer.ggml.scores";
        let scores = file.f32s(KEY).ok_or(TokenizerError::Missing { key: KEY, expected: "a list of 32-bit floats" })?;
        Self::new(scores.to_vec(), vocabulary)
    }

    fn new(mut scores: Vec<f32>, vocabulary: &Vocabulary) -> Result<Self, TokenizerError> {
        if scores.len() != vocabulary.len() as usize {
            return Err(TokenizerError::Malformed(format!("it lists {} tokens but {} scores", vocabulary.len(), scores.len())));
        }
        for (id, score) in scores.iter_mut().enumerate() {
            if score.is_nan() {
                return Err(TokenizerError::Malformed(format!("the score of token {id} is not a number")));
            }
            // Makes −0 into 0: the two are equal here, but not in the total order.
            *score += 0.0;
        }
        let bytes: Vec<_> = (0..=u8::MAX)
            .map(|byte| {
                let plain = char::from(byte).to_string();
                vocabulary.find(&format!("<0x{byte:02X}>")).or_else(|| byte.is_ascii().then(|| vocabulary.find(&plain)).flatten())
            })
            .collect();
        if vocabulary.unknown.is_none() && bytes.iter().any(Option::is_none) {
            return Err(TokenizerError::Malformed("it has neither a token for every byte nor an unknown token".to_owned()));
        }
        Ok(Self { scores, bytes })
    }

    /// Appends the tokens of `text`, in which spaces are already spelled `▁`.
    pub(crate) fn encode(&self, vocabulary: &Vocabulary, text: &str, out: &mut Vec<u32>) {
        // Positions are 32-bit; a text that long is cut where that cannot be avoided.
        let mut rest = text;
        while !rest.is_empty() {
            let mut cut = rest.len().min(NONE as usize / 2);
            while !rest.is_char_boundary(cut) {
                cut -= 1;
            }
            self.encode_part(vocabulary, &rest[..cut], out);
            rest = &rest[cut..];
        }
    }

    fn encode_part(&self, vocabulary: &Vocabulary, text: &str, out: &mut Vec<u32>) {
        let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len());
        for (start, character) in text.char_indices() {
            let here = symbols.len() as u32;
            symbols.push(Symbol {
                start: start as u32,
                length: character.len_utf8() as u32,
                previous: here.checked_sub(1).unwrap_or(NONE),
                next: here + 1,
            });
        }
        if let Some(last) = symbols.last_mut() {
            last.next = NONE;
        }
        let mut queue = BinaryHeap::with_capacity(symbols.len());
        let consider = |symbols: &[Symbol], left: u32, right: u32, queue: &mut BinaryHeap<Candidate>| {
            if left == NONE || right == NONE {
                return;
            }
            let (a, b) = (symbols[left as usize], symbols[right as usize]);
            let length = a.length + b.length;
            if length as usize > vocabulary.longest_bytes {
                return;
            }
            let start = a.start as usize;
            if let Some(token) = vocabulary.find(&text[start..start + length as usize]) {
                queue.push(Candidate { score: self.scores[token as usize], left, right, length });
            }
        };
        for right in 1..symbols.len() as u32 {
            consider(&symbols, right - 1, right, &mut queue);
        }
        while let Some(Candidate { left, right, length, .. }) = queue.pop() {
            let (a, b) = (symbols[left as usize], symbols[right as usize]);
            if a.length == 0 || b.length == 0 || a.length + b.length != length {
                continue;
            }
            symbols[left as usize].length = length;
            symbols[left as usize].next = b.next;
            symbols[right as usize].length = 0;
            if b.next != NONE {
                symbols[b.next as usize].previous = left;
            }
            consider(&symbols, a.previous, left, &mut queue);
            consider(&symbols, left, b.next, &mut queue);
        }
        for symbol in symbols.iter().filter(|symbol| symbol.length > 0) {
            let start = symbol.start as usize;
            let piece = &text[start..start + symbol.length as usize];
            match vocabulary.find(piece) {
                Some(token) => out.push(token),
                None => self.encode_bytes(vocabulary, piece, out),
            }
        }
    }

    /// Writes a piece that is no token: byte by byte, or as the unknown token where the vocabulary has no bytes.
    fn encode_bytes(&self, vocabulary: &Vocabulary, piece: &str, out: &mut Vec<u32>) {
        let before = out.len();
        out.extend(piece.bytes().map_while(|byte| self.bytes[usize::from(byte)]));
        if out.len() - before != piece.len() {
            out.truncate(before);
            out.extend(vocabulary.unknown);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::vocabulary::TokenKind::{Byte, Normal, Unknown};
    use super::*;

    fn encode(tokens: &[(&str, f32)], text: &str) -> Vec<u32> {
        let mut texts: Vec<_> = tokens.iter().map(|t| (t.0, Normal)).collect();
        let mut scores: Vec<f32> = tokens.iter().map(|t| t.1).collect();
        texts.push(("<unk>", Unknown));
        scores.push(0.0);
        let mut vocabulary = Vocabulary::of_texts(&texts);
        vocabulary.unknown = Some(tokens.len() as u32);
        let pieces = ScoredPieces::new(scores, &vocabulary).unwrap();
        let mut out = Vec::new();
        pieces.encode(&vocabulary, text, &mut out);
        out
    }

    #[test]
    fn the_best_score_merges_first() {
        let tokens = [("a", 0.0), ("b", 0.0), ("c", 0.0), ("ab", -2.0), ("bc", -1.0), ("abc", -3.0)];
        assert_eq!(encode(&tokens[..5], "abc"), [0, 4]);
        assert_eq!(encode(&tokens, "abc"), [5]);
        assert_eq!(encode(&tokens, ""), [0; 0]);
    }

    #[test]
    fn equal_scores_merge_from_the_left() {
        let tokens = [("a", 0.0), ("aa", -1.0), ("aaaa", -1.0)];
        assert_eq!(encode(&tokens, "aaaaa"), [2, 0]);
        assert_eq!(encode(&tokens, "aaa"), [1, 0]);
    }

    #[test]
    fn what_is_no_token_becomes_unknown_or_bytes() {
        assert_eq!(encode(&[("a", 0.0)], "aéa"), [0, 1, 0]);
        let mut texts: Vec<(String, _)> = (0..=255_u8).map(|b| (format!("<0x{b:02X}>"), Byte)).collect();
        texts.push(("a".to_owned(), Normal));
        let borrowed: Vec<_> = texts.iter().map(|(t, k)| (t.as_str(), *k)).collect();
        let vocabulary = Vocabulary::of_texts(&borrowed);
        let pieces = ScoredPieces::new(vec![0.0; 257], &vocabulary).unwrap();
        let mut out = Vec::new();
        pieces.encode(&vocabulary, "aé", &mut out);
        assert_eq!(out, [256, 0xc3, 0xa9]);
    }

    #[test]
    fn damaged_scores_are_refused() {
        let mut vocabulary = Vocabulary::of_texts(&[("a", Normal)]);
        vocabulary.unknown = Some(0);
        assert!(ScoredPieces::new(vec![f32::NAN], &vocabulary).is_err());
        assert!(ScoredPieces::new(vec![], &vocabulary).is_err());
        vocabulary.unknown = None;
        assert!(ScoredPieces::new(vec![0.0], &vocabulary).is_err());
    }
}
