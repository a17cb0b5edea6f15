//! Tokens back to bytes.

use super::bytes::byte_of_char;
use super::vocabulary::{Spelling, TokenKind, Vocabulary};

impl Vocabulary {
    /// Appends the bytes that a token stands for. Control tokens stand for none unless `control` asks for their
    /// names; ids outside the vocabulary stand for none.
    pub(crate) fn write_piece(&self, token: u32, control: bool, out: &mut Vec<u8>) {
        if token >= self.len() {
            return;
        }
        let text = self.text(token);
        match self.kind(token) {
            TokenKind::Control | TokenKind::Unknown if !control => {}
            TokenKind::Unused => {}
            TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined => out.extend_from_slice(text.as_bytes()),
            TokenKind::Byte => out.extend(byte_of_name(text)),
            TokenKind::Normal => match self.spelling {
                Spelling::ByteLevel => write_byte_level(text, out),
                Spelling::Spaced => write_spaced(text, out),
            },
        }
    }
}

/// The byte of a token like `<0x0A>`.
fn byte_of_name(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16).ok().filter(|_| digits.len() == 2 && !digits.starts_with('+'))
}

fn write_byte_level(text: &str, out: &mut Vec<u8>) {
    for character in text.chars() {
        match byte_of_char(character) {
            Some(byte) => out.push(byte),
            // A token that was added by hand, in plain text.
            None => out.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
}

fn write_spaced(text: &str, out: &mut Vec<u8>) {
    for (nth, part) in text.split('▁').enumerate() {
        if nth > 0 {
            out.push(b' ');
        }
        out.extend_from_slice(part.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(text: &str, kind: TokenKind, control: bool) -> Vec<u8> {
        let mut out = Vec::new();
        Vocabulary::of_texts(&[(text, kind)]).write_piece(0, control, &mut out);
        out
    }

    #[test]
    fn kinds_decide_what_is_shown() {
        assert_eq!(piece("▁a▁▁b▁", TokenKind::Normal, false), b" a  b ");
        assert_eq!(piece("<0x0A>", TokenKind::Byte, false), b"\n");
        assert_eq!(piece("<0xZZ>", TokenKind::Byte, false), b"");
        assert_eq!(piece("</s>", TokenKind::Control, false), b"");
        assert_eq!(piece("</s>", TokenKind::Control, true), b"</s>");
        assert_eq!(piece("▁", TokenKind::UserDefined, false), "▁".as_bytes());
        assert_eq!(piece("x", TokenKind::Unused, true), b"");
    }

    #[test]
    fn byte_level_text_is_bytes() {
        let mut out = Vec::new();
        write_byte_level("Ġé日", &mut out);
        assert_eq!(out, [b' ', 0xe9, 0xe6, 0x97, 0xa5]);
    }
}
