//! The events of a streamed answer, numbered, so that whoever was shown some of them can ask any node for the rest.
//!
//! Which events there are follows from the request and its tokens alone, so every node numbers them alike. Each carries as its id its
//! number, counted from 1, and a hash of all text up to and including its own: `17-0a1b2c3d4e5f6071`. The hash is the first 16
//! hexadecimal digits of the SHA-256 of the text in UTF-8. Whoever comes back names the last id, or just counts events; a node that would tell
//! another past than the one that was shown says so instead.

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::answer::{Ended, Shape};
use crate::TokenEvent;

/// Hexadecimal digits of a hash.
const HASH_DIGITS: usize = 16;

/// An event.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Told {
    pub(super) value: Value,
    pub(super) mark: Mark,
}

/// How far a stream was told: so many events, with such a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) events: u64,
    /// The hash of the text; none if it is not known.
    pub(super) hash: Option<String>,
}

impl Mark {
    /// As event ids have it, or just the number.
    pub(super) fn read(text: &str) -> Option<Self> {
        let (events, hash) = match text.split_once('-') {
            Some((events, hash)) => (events, Some(Self::read_hash(hash)?)),
            None => (text, None),
        };
        let digits = !events.is_empty() && events.bytes().all(|byte| byte.is_ascii_digit());
        Some(Self { events: events.parse().ok().filter(|_| digits)?, hash })
    }

    /// A hash by itself.
    pub(super) fn read_hash(text: &str) -> Option<String> {
        (text.len() == HASH_DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| text.to_ascii_lowercase())
    }

    /// As event ids have it.
    pub(super) fn id(&self) -> String {
        match &self.hash {
            Some(hash) => format!("{}-{hash}", self.events),
            None => self.events.to_string(),
        }
    }
}

/// Turns an answer into events.
#[derive(Debug)]
pub(super) struct Telling {
    shape: Shape,
    text: Sha256,
    events: u64,
    tokens: u32,
}

impl Telling {
    pub(super) fn new(shape: Shape) -> Self {
        Self { shape, text: Sha256::new(), events: 0, tokens: 0 }
    }

    /// How far it is.
    pub(super) fn mark(&self) -> Mark {
        let mut hash = hex::encode(self.text.clone().finalize());
        hash.truncate(HASH_DIGITS);
        Mark { events: self.events, hash: Some(hash) }
    }

    pub(super) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Tokens so far.
    pub(super) fn tokens(&self) -> u32 {
        self.tokens
    }

    fn tell(&mut self, value: Value) -> Told {
        self.events += 1;
        Told { value, mark: self.mark() }
    }

    fn say(&mut self, text: &str, tokens: &[TokenEvent]) -> Option<Told> {
        self.text.update(text.as_bytes());
        let value = self.shape.piece(text, tokens)?;
        Some(self.tell(value))
    }

    /// What comes before the first token.
    pub(super) fn opening(&mut self) -> Option<Told> {
        let value = self.shape.opening()?;
        Some(self.tell(value))
    }

    /// What a token makes.
    pub(super) fn token(&mut self, token: &TokenEvent) -> Option<Told> {
        self.tokens = self.tokens.saturating_add(1);
        self.say(&token.text, std::slice::from_ref(token))
    }

    /// What the end makes, with the text that was held back until then.
    pub(super) fn end(&mut self, text: &str, ended: &Ended) -> Vec<Told> {
        let mut all: Vec<Told> = self.say(text, &[]).into_iter().collect();
        for value in self.shape.closing(ended) {
            all.push(self.tell(value));
        }
        all
    }
}

/// What was shown is not what this answer is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Contradiction {
    shown: Mark,
    here: Mark,
}

impl std::fmt::Display for Contradiction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "you were shown {}, and here it is {}: ask anew, with another id", self.shown.id(), self.here.id())
    }
}

/// Leaves out what was shown before.
#[derive(Debug)]
pub(super) struct Resume {
    shown: Mark,
}

impl Resume {
    pub(super) fn after(shown: Mark) -> Self {
        Self { shown }
    }

    /// Whether a stream at `here` has come as far as what was shown.
    ///
    /// # Errors
    /// If it was something else.
    pub(super) fn reached(&self, here: &Mark) -> Result<bool, Contradiction> {
        if here.events < self.shown.events {
            return Ok(false);
        }
        let same = here.events > self.shown.events || self.shown.hash.is_none() || self.shown.hash == here.hash;
        if same { Ok(true) } else { Err(Contradiction { shown: self.shown.clone(), here: here.clone() }) }
    }

    /// Which of `told` are new, or none yet.
    ///
    /// # Errors
    /// If what was shown was something else.
    pub(super) fn new_of(&self, told: Vec<Told>) -> Result<Vec<Told>, Contradiction> {
        told.iter().try_for_each(|event| self.reached(&event.mark).map(drop))?;
        Ok(told.into_iter().filter(|event| event.mark.events > self.shown.events).collect())
    }

    /// The answer has ended at `here`.
    ///
    /// # Errors
    /// If more was shown than there is.
    pub(super) fn ended(&self, here: &Mark) -> Result<(), Contradiction> {
        match here.events < self.shown.events {
            true => Err(Contradiction { shown: self.shown.clone(), here: here.clone() }),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Finish, Timing};

    fn telling(include_usage: bool) -> Telling {
        Telling::new(Shape { include_usage, ..Shape::example() })
    }

    fn token(text: &str) -> TokenEvent {
        TokenEvent { index: 0, token: 0, text: text.to_owned(), logprob: None, bytes: Vec::new(), top: Vec::new() }
    }

    fn whole() -> Vec<Told> {
        let mut telling = telling(true);
        let mut all: Vec<Told> = telling.opening().into_iter().collect();
        all.extend(["ab", "", "c"].iter().filter_map(|text| telling.token(&token(text))));
        let timing = Timing { queued: Duration::ZERO, prefill: Duration::ZERO, decode: Duration::ZERO, cached: 0 };
        all.extend(telling.end("!", &Ended { reason: Finish::Stop, prompt_tokens: 1, completion_tokens: 3, timing }));
        all
    }

    #[test]
    fn events_are_numbered_and_carry_the_hash_of_the_text() {
        let ids: Vec<String> = whole().iter().map(|told| told.mark.id()).collect();
        // As `printf %s TEXT | sha256sum` has it for "", "ab", "abc" and "abc!".
        let (empty, ab, abc, all) = ("e3b0c44298fc1c14", "fb8e20fc2e4c3f24", "ba7816bf8f01cfea", "53e0eff3204626f3");
        let expected =
            [format!("1-{empty}"), format!("2-{ab}"), format!("3-{abc}"), format!("4-{all}"), format!("5-{all}"), format!("6-{all}")];
        assert_eq!(ids, expected);
    }

    #[test]
    fn whoever_comes_back_gets_the_rest_and_no_other_past() {
        let all = whole();
        for shown in 0..=all.len() {
            let mark = all[..shown].last().map_or(Mark { events: 0, hash: None }, |told| told.mark.clone());
            assert_eq!(Mark::read(&mark.id()), Some(mark.clone()));
            let resume = Resume::after(mark.clone());
            assert_eq!(resume.new_of(all.clone()), Ok(all[shown..].to_vec()));
            assert_eq!(resume.ended(&all[all.len() - 1].mark), Ok(()));
            if shown > 0 {
                let lied = Resume::after(Mark { hash: Some("0123456789abcdef".to_owned()), ..mark.clone() });
                assert!(lied.new_of(all.clone()).is_err(), "{shown}");
                let counted = Resume::after(Mark { hash: None, ..mark });
                assert_eq!(counted.new_of(all.clone()), Ok(all[shown..].to_vec()));
            }
        }
        let more = Resume::after(Mark { events: 7, hash: None });
        assert_eq!(more.new_of(all.clone()), Ok(Vec::new()));
        assert!(more.ended(&all[5].mark).is_err(), "more was shown than there is");
    }

    #[test]
    fn marks_are_read_or_refused() {
        assert_eq!(Mark::read("5"), Some(Mark { events: 5, hash: None }));
        assert_eq!(Mark::read("5-E3B0C44298FC1C14"), Some(Mark { events: 5, hash: Some("e3b0c44298fc1c14".to_owned()) }));
        for bad in ["", "-", "x", "+5", "-5", "5-", "5-abc", "5-g3b0c44298fc1c14", "18446744073709551616"] {
            assert_eq!(Mark::read(bad), None, "{bad}");
        }
    }
}
