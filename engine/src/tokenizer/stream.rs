//! Text of tokens that arrive one at a time.

use std::sync::Arc;

use super::vocabulary::Vocabulary;

/// Turns tokens into text as they come. A character whose bytes are spread over several tokens is held back until it
/// is whole; bytes that can never become a character turn into `U+FFFD`, exactly as if all had been decoded at once.
///
/// Memory: at most one incomplete character. Clone it to try a continuation.
#[derive(Debug, Clone)]
pub struct DecodeStream {
    vocabulary: Arc<Vocabulary>,
    /// The start of a character that is not complete.
    pending: Vec<u8>,
    /// Whether the next text starts the whole, where vocabularies put a space that is none of the text's.
    drops_space: bool,
    shows_control: bool,
}

impl DecodeStream {
    pub(crate) fn new(vocabulary: Arc<Vocabulary>, drops_space: bool, shows_control: bool) -> Self {
        Self { vocabulary, pending: Vec::new(), drops_space, shows_control }
    }

    /// Takes the next token and gives the text that is complete now; empty if there is none.
    pub fn push(&mut self, token: u32) -> String {
        self.vocabulary.write_piece(token, self.shows_control, &mut self.pending);
        if self.drops_space && !self.pending.is_empty() {
            self.drops_space = false;
            if self.pending[0] == b' ' {
                self.pending.remove(0);
            }
        }
        self.take_complete()
    }

    /// Ends the text: what was held back comes as `U+FFFD`.
    pub fn finish(mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }

    /// Whether the start of a character is held back.
    pub fn is_holding(&self) -> bool {
        !self.pending.is_empty()
    }

    fn take_complete(&mut self) -> String {
        let mut text = String::new();
        let mut rest = self.pending.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, bad) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    rest = bad;
                    match error.error_len() {
                        Some(length) => {
                            text.push(char::REPLACEMENT_CHARACTER);
                            rest = &rest[length..];
                        }
                        None => break,
                    }
                }
            }
        }
        let kept = rest.len();
        self.pending.drain(..self.pending.len() - kept);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::super::vocabulary::TokenKind::{Byte, Control, Normal};
    use super::*;
    use proptest::prelude::*;

    fn bytes_vocabulary() -> Arc<Vocabulary> {
        let mut texts: Vec<(String, _)> = (0..=255_u8).map(|byte| (format!("<0x{byte:02X}>"), Byte)).collect();
        texts.push(("▁a".to_owned(), Normal));
        texts.push(("</s>".to_owned(), Control));
        let borrowed: Vec<_> = texts.iter().map(|(text, kind)| (text.as_str(), *kind)).collect();
        Arc::new(Vocabulary::of_texts(&borrowed))
    }

    #[test]
    fn characters_come_whole() {
        let mut stream = DecodeStream::new(bytes_vocabulary(), false, false);
        assert_eq!(stream.push(0xf0), "");
        assert_eq!(stream.push(0x9f), "");
        assert_eq!(stream.push(257), "", "a hidden token in between changes nothing");
        assert_eq!(stream.push(0x99), "");
        assert_eq!(stream.push(0x82), "🙂");
        assert_eq!(stream.push(256), " a");
        assert_eq!(stream.push(0xc3), "");
        assert!(stream.is_holding());
        assert_eq!(stream.push(256), "\u{fffd} a");
        assert_eq!(stream.push(999_999), "");
        assert_eq!(stream.push(0xe6), "");
        assert_eq!(stream.finish(), "\u{fffd}");
    }

    #[test]
    fn the_first_space_is_dropped_once() {
        let mut stream = DecodeStream::new(bytes_vocabulary(), true, false);
        assert_eq!(stream.push(257), "");
        assert_eq!(stream.push(256), "a");
        assert_eq!(stream.push(256), " a");
    }

    proptest! {
        #[test]
        fn equals_decoding_at_once(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let mut stream = DecodeStream::new(bytes_vocabulary(), false, false);
            let mut text: String = bytes.iter().map(|&byte| stream.push(u32::from(byte))).collect();
            text.push_str(&stream.finish());
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes).into_owned());
        }

        #[test]
        fn valid_text_never_shows_a_replacement(source in any::<String>()) {
            let mut stream = DecodeStream::new(bytes_vocabulary(), false, false);
            let mut text: String = source.bytes().map(|byte| stream.push(u32::from(byte))).collect();
            prop_assert!(!stream.is_holding());
            text.push_str(&stream.finish());
            prop_assert_eq!(text, source);
        }
    }
}
