//! GPT-2's way to write any byte as one printable character, so that tokens of arbitrary bytes are text.
//!
//! Printable characters of Latin-1 stand for themselves; the other 68 bytes take the characters from U+0100 on, in
//! their order.

/// The character that stands for a byte.
pub(crate) fn char_of_byte(byte: u8) -> char {
    match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        0x00..=0x20 => char_past(u32::from(byte)),
        0x7f..=0xa0 => char_past(u32::from(byte) - 0x7f + 0x21),
        0xad => char_past(0x43),
    }
}

fn char_past(offset: u32) -> char {
    // U+0100 to U+0143 are assigned letters.
    char::from_u32(0x100 + offset).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The byte that a character stands for; none if it stands for none.
pub(crate) fn byte_of_char(character: char) -> Option<u8> {
    match u32::from(character) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_comes_back() {
        let mut seen = std::collections::BTreeSet::new();
        for byte in 0..=u8::MAX {
            let character = char_of_byte(byte);
            assert!(seen.insert(character));
            assert_eq!(byte_of_char(character), Some(byte));
        }
        assert_eq!(char_of_byte(b' '), 'Ġ');
        assert_eq!(char_of_byte(b'\n'), 'Ċ');
        assert_eq!(byte_of_char('日'), None);
    }
}
