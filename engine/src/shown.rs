//! Texts that come with a model file, as they may be shown to a person.

/// Longest such text, in characters.
const SHOWN_MAX: usize = 1000;

/// A text that somebody else has written, to be shown: at most so long, and without characters that do something to a terminal or hide
/// what it says; each of those becomes `�`.
pub(crate) fn shown(text: &str) -> String {
    let mut characters = text.chars();
    let mut out: String =
        characters.by_ref().take(SHOWN_MAX).map(|c| if is_harmless(c) { c } else { char::REPLACEMENT_CHARACTER }).collect();
    if characters.next().is_some() {
        out.push('…');
    }
    out
}

/// Whether a character only shows itself. Those that turn the direction of a text hide what it says.
fn is_harmless(character: char) -> bool {
    let turns = matches!(character, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    matches!(character, '\n' | '\t') || !(character.is_control() || turns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_shows_itself_is_left() {
        assert_eq!(shown("Qwen3 é 中\n\tx"), "Qwen3 é 中\n\tx");
        assert_eq!(shown("\x1b[2J\u{9b}1m\u{202e}txt\r\0\x7f"), "\u{fffd}[2J\u{fffd}1m\u{fffd}txt\u{fffd}\u{fffd}\u{fffd}");
        let long = shown(&"x".repeat(5000));
        assert!(long.ends_with("x…") && long.chars().count() == 1001);
        assert_eq!(shown(&"x".repeat(1000)), "x".repeat(1000));
    }
}
