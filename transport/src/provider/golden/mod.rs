//! Golden values that another implementation computed: `wire.py` beside this file prints `wire.txt`.

/// The value of this name.
pub(crate) fn golden(name: &str) -> Vec<u8> {
    let digits = include_str!("wire.txt").lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).expect(name);
    (0..digits.len() / 2).map(|i| u8::from_str_radix(&digits[2 * i..2 * i + 2], 16).unwrap()).collect()
}

/// What the values are computed from.
pub(crate) fn ticket() -> super::Ticket {
    super::Ticket::new(0x0f0e_0d0c_0b0a_0908_0706_0504_0302_0100, std::array::from_fn(|i| 0x40 + i as u8))
}
