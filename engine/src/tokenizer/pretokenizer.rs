//! The rules that cut text into words before byte pairs are merged. Merges never cross the cuts, so a model only
//! sees familiar tokens if its text is cut as in training.
//!
//! Each rule is data: patterns that are applied one after the other, each to the pieces the one before has left; its
//! matches and what lies between them become pieces. The patterns are those of the models' own tokenizer files, with
//! one change. They say `\s+(?!\S)|\s+`: spaces up to the last one before a word. The expression engine here has no
//! look-ahead, because that is what keeps it linear in the text's length whatever the text is; so [`Pattern::next`]
//! gives the last space back instead.

use regex::Regex;

use super::error::TokenizerError;
use crate::shown::shown;

/// How a family of models cuts text.
#[derive(Debug)]
struct Rule {
    /// What files call it.
    names: &'static [&'static str],
    /// Applied in order.
    patterns: &'static [&'static str],
    /// Whether a word that is a token as a whole is taken as such, even if merges would not lead there.
    whole_words: bool,
    /// Whether prompts start with the beginning-of-text token if the file does not say.
    adds_bos: bool,
}

/// GPT-2's own pattern.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";

/// Llama 3's: contractions in any case, punctuation before a word joins it, digits in threes.
const LLAMA3: &str = concat!(
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
);

/// Qwen 2's: Llama 3's with single digits.
const QWEN2: &str = concat!(
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
);

/// Qwen 3.5's: Qwen 2's with combining marks as part of words.
const QWEN35: &str = concat!(
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}",
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
);

/// GPT-4o's: words are cut where lower case turns into upper case.
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+"
);

/// Mistral's Tekken: GPT-4o's without contractions and with single digits.
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+"
);

/// Kimi K2's: GPT-4o's with Han characters apart from other letters.
const KIMI_K2: &str = concat!(
    r"\p{Han}+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
);

/// Ling's (Bailing): Qwen 2's, with line ends one at a time.
const BAILING: &str =
    concat!(r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}", r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+");

/// Seed-Coder's: Qwen 2's, with line ends never part of punctuation.
const SEED_CODER: &str = concat!(
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+"
);

/// DeepSeek V3's last pattern, after digits and CJK are apart.
const DEEPSEEK3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+"
);

const RULES: &[Rule] = &[
    Rule {
        names: &["default"],
        patterns: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
        whole_words: false,
        adds_bos: false,
    },
    Rule {
        names: &[
            "gpt-2",
            "gpt2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "granite-docling",
            "modern-bert",
            "exaone4",
        ],
        patterns: &[GPT2],
        whole_words: false,
        adds_bos: false,
    },
    Rule {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        patterns: &[r"\p{N}", GPT2],
        whole_words: false,
        adds_bos: false,
    },
    Rule { names: &["falcon"], patterns: &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"], whole_words: false, adds_bos: false },
    Rule {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"],
        patterns: &[LLAMA3],
        whole_words: true,
        adds_bos: true,
    },
    Rule { names: &["glm4"], patterns: &[LLAMA3], whole_words: true, adds_bos: false },
    Rule { names: &["dbrx", "smaug-bpe", "chatglm-bpe"], patterns: &[LLAMA3], whole_words: false, adds_bos: false },
    Rule {
        names: &["qwen2", "stablelm2", "deepseek-r1-qwen", "kormo", "hunyuan", "solar-open", "grok-2", "megrez"],
        patterns: &[QWEN2],
        whole_words: false,
        adds_bos: false,
    },
    Rule { names: &["qwen35"], patterns: &[QWEN35], whole_words: false, adds_bos: false },
    Rule { names: &["gpt-4o", "llama4", "minimax-m2"], patterns: &[GPT4O], whole_words: false, adds_bos: false },
    Rule { names: &["tekken"], patterns: &[TEKKEN], whole_words: true, adds_bos: true },
    Rule { names: &["kimi-k2"], patterns: &[KIMI_K2], whole_words: false, adds_bos: false },
    Rule { names: &["bailingmoe", "bailingmoe2", "llada-moe"], patterns: &[BAILING], whole_words: false, adds_bos: false },
    Rule { names: &["seed-coder"], patterns: &[SEED_CODER], whole_words: false, adds_bos: false },
    Rule {
        names: &["deepseek-coder"],
        patterns: &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
        whole_words: false,
        adds_bos: false,
    },
    Rule {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm"],
        patterns: &[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3],
        whole_words: false,
        adds_bos: false,
    },
];

/// One expression of a rule, ready to run.
#[derive(Debug)]
struct Pattern {
    regex: Regex,
    /// Whether its last alternative is `\s+`, standing for the two that are described above.
    ends_in_spaces: bool,
    /// Whether line ends have an alternative of their own, so that runs of spaces that end in one are whole.
    has_line_ends: bool,
}

impl Pattern {
    /// The next match at or after `from`, if there is one.
    fn next(&self, text: &str, from: usize) -> Option<(usize, usize)> {
        let found = self.regex.find_at(text, from)?;
        let (start, mut end) = (found.start(), found.end());
        if self.ends_in_spaces
            && let Some(next) = text[end..].chars().next()
            && !next.is_whitespace()
            && let matched = found.as_str()
            && matched.chars().all(char::is_whitespace)
            && !(self.has_line_ends && matched.ends_with(['\r', '\n']))
            && let Some((last, _)) = matched.char_indices().next_back()
            && last > 0
        {
            end = start + last;
        }
        Some((start, end))
    }
}

/// A rule, ready to run.
#[derive(Debug)]
pub(crate) struct PreTokenizer {
    patterns: Vec<Pattern>,
    pub(crate) whole_words: bool,
    pub(crate) adds_bos: bool,
}

impl PreTokenizer {
    /// The rule that files call `name`.
    pub(crate) fn named(name: &str) -> Result<Self, TokenizerError> {
        let Some(rule) = RULES.iter().find(|rule| rule.names.contains(&name)) else {
            let known = RULES.iter().flat_map(|rule| rule.names).copied().collect();
            return Err(TokenizerError::UnknownPreTokenizer { name: shown(name), known });
        };
        let mut patterns = Vec::with_capacity(rule.patterns.len());
        for source in rule.patterns {
            let regex =
                Regex::new(source).map_err(|error| TokenizerError::Malformed(format!("pattern of pre-tokenizer `{name}`: {error}")))?;
            patterns.push(Pattern { regex, ends_in_spaces: source.ends_with(r"|\s+"), has_line_ends: source.contains(r"|\s*[\r\n]") });
        }
        Ok(Self { patterns, whole_words: rule.whole_words, adds_bos: rule.adds_bos })
    }

    /// Cuts `text` into words. Together they are the text.
    pub(crate) fn cut<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let mut pieces = vec![text];
        for pattern in &self.patterns {
            let mut finer = Vec::with_capacity(pieces.len());
            for piece in pieces {
                let mut done = 0;
                while let Some((start, end)) = pattern.next(piece, done) {
                    if start > done {
                        finer.push(&piece[done..start]);
                    }
                    finer.push(&piece[start..end]);
                    done = end;
                }
                if done < piece.len() {
                    finer.push(&piece[done..]);
                }
            }
            pieces = finer;
        }
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cut<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
        PreTokenizer::named(name).unwrap().cut(text)
    }

    #[test]
    fn every_rule_compiles_and_no_name_is_given_twice() {
        let mut names: Vec<_> = RULES.iter().flat_map(|rule| rule.names).collect();
        for name in &names {
            PreTokenizer::named(name).unwrap();
        }
        names.sort();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn an_unknown_rule_is_refused_with_those_known() {
        let text = PreTokenizer::named("no-such").unwrap_err().to_string();
        assert!(text.contains("`no-such`") && text.contains("smollm") && text.contains("qwen2"), "{text}");
    }

    #[test]
    fn the_last_space_goes_to_the_word() {
        assert_eq!(cut("gpt-2", "a   b"), ["a", "  ", " b"]);
        assert_eq!(cut("gpt-2", "a \t b"), ["a", " \t", " b"]);
        assert_eq!(cut("gpt-2", "a  \tb"), ["a", "  ", "\t", "b"]);
        assert_eq!(cut("gpt-2", "a   "), ["a", "   "]);
        assert_eq!(cut("gpt-2", "\n\nb"), ["\n", "\n", "b"]);
        assert_eq!(cut("llama-bpe", "\n\nb"), ["\n\n", "b"]);
        assert_eq!(cut("llama-bpe", "a \n  b"), ["a", " \n", " ", " b"]);
        assert_eq!(cut("qwen2", "x  \u{3000}日"), ["x", "  ", "\u{3000}日"]);
    }

    #[test]
    fn digits_are_cut_as_each_family_does() {
        assert_eq!(cut("smollm", "in 2024"), ["in", " ", "2", "0", "2", "4"]);
        assert_eq!(cut("qwen2", "in 2024"), ["in", " ", "2", "0", "2", "4"]);
        assert_eq!(cut("llama-bpe", "in 2024"), ["in", " ", "202", "4"]);
        assert_eq!(cut("gpt-2", "in 2024"), ["in", " 2024"]);
    }

    #[test]
    fn contractions_and_case() {
        assert_eq!(cut("gpt-2", "I'm DON'T"), ["I", "'m", " DON", "'", "T"]);
        assert_eq!(cut("llama-bpe", "I'm DON'T"), ["I", "'m", " DON", "'T"]);
        assert_eq!(cut("gpt-4o", "fooBar"), ["foo", "Bar"]);
        assert_eq!(cut("kimi-k2", "ab中文cd"), ["ab", "中文", "cd"]);
    }

    proptest! {
        #[test]
        fn nothing_is_lost(text in any::<String>(), rule in 0..RULES.len()) {
            let pieces = cut(RULES[rule].names[0], &text);
            prop_assert!(pieces.iter().all(|piece| !piece.is_empty()) || text.is_empty());
            prop_assert_eq!(pieces.concat(), text);
        }
    }
}
