//! Cuts text at the tokens that are matched as they stand, before anything else looks at it.
//!
//! Longer tokens win over shorter ones wherever they are in the text, and among tokens of one length the leftmost
//! occurrence wins. Two kinds take part: control tokens (only where the caller trusts the text to contain them) and
//! user-defined ones (always; vocabularies use them for runs of spaces, newlines and markup).

use std::collections::{BTreeMap, BTreeSet};

use super::error::TokenizerError;
use super::vocabulary::{TokenKind, Vocabulary};

/// A stretch of text: plain, or one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fragment<'t> {
    /// Text that the vocabulary's own method encodes.
    Text(&'t str),
    /// A token that stood in the text.
    Token(u32),
}

/// The tokens that are matched as they stand.
#[derive(Debug)]
pub(crate) struct Specials {
    /// Matched only in trusted text.
    control: Matcher,
    /// Matched in trusted text: control and user-defined ones together.
    all: Matcher,
    /// Matched in any text.
    user_defined: Matcher,
    /// Tokens that swallow the white space after them; none for most models.
    swallows_space: BTreeSet<u32>,
}

/// Tokens that leave white space alone where the others swallow it.
const LEAVE_SPACE: &[&str] = &["<unk>", "<s>", "<|endoftext|>"];

/// Most that the different lengths of these tokens add up to, in bytes: at each place in a text a stretch of each length is looked up.
/// Gemma's runs of spaces and line ends have some 2,000.
const LENGTHS_MAX: usize = 16 << 10;

impl Specials {
    /// `swallow_space` says that the white space after most special tokens is not text.
    ///
    /// # Errors
    /// If there are too many different lengths.
    pub(crate) fn new(vocabulary: &Vocabulary, swallow_space: bool) -> Result<Self, TokenizerError> {
        let is_special = |id: &u32| matches!(vocabulary.kind(*id), TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined);
        let mut swallows_space = BTreeSet::new();
        if swallow_space {
            swallows_space.extend((0..vocabulary.len()).filter(is_special).filter(|&id| !LEAVE_SPACE.contains(&vocabulary.text(id))));
        }
        let lengths: BTreeSet<usize> = (0..vocabulary.len()).filter(is_special).map(|id| vocabulary.text(id).len()).collect();
        if lengths.iter().sum::<usize>() > LENGTHS_MAX {
            return Err(TokenizerError::Malformed("its special tokens have too many different lengths".to_owned()));
        }
        let of = |wanted: &[TokenKind]| Matcher::new(vocabulary, (0..vocabulary.len()).filter(|&id| wanted.contains(&vocabulary.kind(id))));
        Ok(Self {
            control: of(&[TokenKind::Control, TokenKind::Unknown]),
            all: of(&[TokenKind::Control, TokenKind::Unknown, TokenKind::UserDefined]),
            user_defined: of(&[TokenKind::UserDefined]),
            swallows_space,
        })
    }

    /// Cuts `text`; `control` says whether control tokens in it are meant as such.
    pub(crate) fn cut<'t>(&self, vocabulary: &Vocabulary, text: &'t str, control: bool) -> Vec<Fragment<'t>> {
        let mut fragments = match control {
            true => self.all.cut(vocabulary, text),
            false => self.user_defined.cut(vocabulary, text),
        };
        if !self.swallows_space.is_empty() {
            let mut swallows = false;
            for fragment in &mut fragments {
                match fragment {
                    Fragment::Token(token) => swallows = self.swallows_space.contains(token),
                    Fragment::Text(text) if swallows => *text = text.trim_start_matches([' ', '\t', '\n', '\x0b', '\x0c', '\r']),
                    Fragment::Text(_) => {}
                }
            }
            fragments.retain(|fragment| *fragment != Fragment::Text(""));
        }
        fragments
    }

    /// Whether a control token stands in the text.
    pub(crate) fn has_control(&self, vocabulary: &Vocabulary, text: &str) -> bool {
        self.control.cut(vocabulary, text).iter().any(|f| matches!(f, Fragment::Token(_)))
    }
}

/// Finds a fixed set of tokens in text.
#[derive(Debug)]
struct Matcher {
    /// Lengths in bytes that some token has, with the two-byte starts of the tokens of that length.
    lengths: BTreeMap<usize, Starts>,
    /// Starts of any length: positions where none applies are looked at only once.
    any: Starts,
    /// Which ids belong to the set, by id.
    members: Vec<bool>,
}

/// A set of first bytes and first two bytes.
#[derive(Debug, Clone)]
struct Starts {
    pairs: Vec<u64>,
}

impl Starts {
    fn new() -> Self {
        Self { pairs: vec![0; 65536 / 64] }
    }

    fn add(&mut self, text: &[u8]) {
        match text {
            [] => {}
            [first] => (0..=u8::MAX).for_each(|second| self.add(&[*first, second])),
            [first, second, ..] => {
                let pair = usize::from(*first) << 8 | usize::from(*second);
                self.pairs[pair / 64] |= 1 << (pair % 64);
            }
        }
    }

    /// Whether a token of the set may start with these bytes. The last byte of a text counts as followed by zero.
    fn has(&self, first: u8, second: u8) -> bool {
        let pair = usize::from(first) << 8 | usize::from(second);
        self.pairs[pair / 64] >> (pair % 64) & 1 == 1
    }
}

impl Matcher {
    fn new(vocabulary: &Vocabulary, ids: impl Iterator<Item = u32>) -> Self {
        let mut lengths = BTreeMap::new();
        let mut any = Starts::new();
        let mut members = vec![false; vocabulary.len() as usize];
        for id in ids {
            let text = vocabulary.text(id).as_bytes();
            if text.is_empty() {
                continue;
            }
            members[id as usize] = true;
            any.add(text);
            lengths.entry(text.len()).or_insert_with(Starts::new).add(text);
        }
        Self { lengths, any, members }
    }

    fn cut<'t>(&self, vocabulary: &Vocabulary, text: &'t str) -> Vec<Fragment<'t>> {
        let bytes = text.as_bytes();
        let second = |at: usize| bytes.get(at + 1).copied().unwrap_or(0);
        let mut candidates: Vec<usize> = (0..bytes.len()).filter(|&at| self.any.has(bytes[at], second(at))).collect();
        // Start of each match, with its end and token.
        let mut found: BTreeMap<usize, (usize, u32)> = BTreeMap::new();
        for (&length, starts) in self.lengths.iter().rev() {
            if candidates.is_empty() {
                break;
            }
            let mut matched = false;
            let mut free_from = 0;
            for &at in &candidates {
                if at < free_from || !starts.has(bytes[at], second(at)) {
                    continue;
                }
                let end = at + length;
                let Some(token) = text.get(at..end).and_then(|t| vocabulary.find(t)).filter(|&t| self.members[t as usize]) else {
                    continue;
                };
                // A longer token further right may already own the tail.
                if found.range(at..end).next().is_some() {
                    continue;
                }
                found.insert(at, (end, token));
                free_from = end;
                matched = true;
            }
            if matched {
                candidates.retain(|&at| found.range(..=at).next_back().is_none_or(|(_, &(end, _))| at >= end));
            }
        }
        let mut fragments = Vec::with_capacity(found.len() * 2 + 1);
        let mut done = 0;
        for (start, (end, token)) in found {
            if start > done {
                fragments.push(Fragment::Text(&text[done..start]));
            }
            fragments.push(Fragment::Token(token));
            done = end;
        }
        if done < text.len() {
            fragments.push(Fragment::Text(&text[done..]));
        }
        fragments
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vocabulary(tokens: &[(&str, TokenKind)]) -> Vocabulary {
        Vocabulary::of_texts(tokens)
    }

    fn cut(tokens: &[(&str, TokenKind)], text: &str, control: bool) -> Vec<String> {
        let vocabulary = vocabulary(tokens);
        let specials = Specials::new(&vocabulary, false).unwrap();
        specials
            .cut(&vocabulary, text, control)
            .into_iter()
            .map(|fragment| match fragment {
                Fragment::Text(text) => format!("'{text}'"),
                Fragment::Token(id) => format!("#{id}"),
            })
            .collect()
    }

    use TokenKind::{Control, Normal, UserDefined};

    #[test]
    fn control_tokens_count_only_in_trusted_text() {
        let tokens = [("a", Normal), ("<s>", Control), ("<b>", UserDefined)];
        assert_eq!(cut(&tokens, "a<s>b<b>", true), ["'a'", "#1", "'b'", "#2"]);
        assert_eq!(cut(&tokens, "a<s>b<b>", false), ["'a<s>b'", "#2"]);
        assert_eq!(cut(&tokens, "", true), [""; 0]);
    }

    #[test]
    fn longer_tokens_win_even_further_right() {
        let tokens = [("ab", Control), ("bcd", Control)];
        assert_eq!(cut(&tokens, "abcd", true), ["'a'", "#1"]);
        assert_eq!(cut(&tokens, "abab", true), ["#0", "#0"]);
    }

    #[test]
    fn runs_take_the_longest_token_first() {
        let tokens = [("\n", UserDefined), ("\n\n", UserDefined), ("\n\n\n", UserDefined)];
        assert_eq!(cut(&tokens, "\n\n\n\n\n\n\n\n", false), ["#2", "#2", "#1"]);
        assert_eq!(cut(&tokens, "x\ny", false), ["'x'", "#0", "'y'"]);
    }

    #[test]
    fn some_models_swallow_the_space_behind() {
        let vocabulary = vocabulary(&[("<|end|>", Control), ("<s>", Control)]);
        let cut = Specials::new(&vocabulary, true).unwrap().cut(&vocabulary, "<s> a <|end|> \n\u{b}<|end|>  b ", true);
        use Fragment::{Text, Token};
        assert_eq!(cut, [Token(1), Text(" a "), Token(0), Token(0), Text("b ")]);
    }

    #[test]
    fn multibyte_text_is_never_cut_inside_a_character() {
        let tokens = [("é", Control)];
        assert_eq!(cut(&tokens, "è日é", true), ["'è日'", "#0"]);
    }

    #[test]
    fn special_tokens_of_very_many_lengths_are_refused() {
        let texts: Vec<String> = (1..=200).map(|length| "x".repeat(length)).collect();
        let specials = |count: usize| {
            let tokens: Vec<_> = texts[..count].iter().map(|text| (text.as_str(), TokenKind::UserDefined)).collect();
            Specials::new(&vocabulary(&tokens), false).map(drop)
        };
        assert!(specials(150).is_ok());
        assert!(specials(200).unwrap_err().to_string().contains("too many different lengths"));
    }
}
