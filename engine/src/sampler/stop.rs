//! Stop strings, found in text that arrives in pieces.

/// Most stop strings of a request.
pub const STOP_STRINGS_MAX: usize = 64;
/// Longest stop string, in bytes. As much text may be held back.
pub const STOP_BYTES_MAX: usize = 1024;

/// Why stop strings cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StopError {
    /// One is empty, which would stop every answer before it begins.
    #[error("stop string {place} is empty; leave it out")]
    Empty {
        /// Its place in the list.
        place: usize,
    },
    /// One is too long.
    #[error("stop string {place} has {bytes} bytes; at most {STOP_BYTES_MAX} are possible")]
    TooLong {
        /// Its place in the list.
        place: usize,
        /// Its length.
        bytes: usize,
    },
    /// There are too many.
    #[error("{count} stop strings were given; at most {STOP_STRINGS_MAX} are possible")]
    TooMany {
        /// How many were given.
        count: usize,
    },
}

/// What a stop matcher lets through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stopped {
    /// Text that can be shown.
    pub text: String,
    /// The place in the list of the stop string that has appeared, if one has. Neither it nor what follows is text.
    pub stop: Option<u32>,
}

/// Lets text through up to the first stop string, whatever pieces it comes in. It holds back the end of the text as
/// long as that may be the start of a stop string.
///
/// The stop string that is complete first wins; of those complete at the same place, the longest.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    stopped: Option<u32>,
}

impl StopMatcher {
    /// A matcher for `stops`; without any it lets everything through.
    ///
    /// # Errors
    /// [`StopError`] for lists that no request needs.
    pub fn new(stops: Vec<String>) -> Result<Self, StopError> {
        if stops.len() > STOP_STRINGS_MAX {
            return Err(StopError::TooMany { count: stops.len() });
        }
        for (place, stop) in stops.iter().enumerate() {
            match stop.len() {
                0 => return Err(StopError::Empty { place }),
                bytes if bytes > STOP_BYTES_MAX => return Err(StopError::TooLong { place, bytes }),
                _ => {}
            }
        }
        Ok(Self { stops, held: String::new(), stopped: None })
    }

    /// Takes the next piece of text. After a stop string it gives no more text.
    pub fn push(&mut self, text: &str) -> Stopped {
        if self.stopped.is_some() {
            return Stopped { text: String::new(), stop: self.stopped };
        }
        self.held.push_str(text);
        let found = self
            .stops
            .iter()
            .enumerate()
            .filter_map(|(place, stop)| self.held.find(stop.as_str()).map(|start| (start + stop.len(), start, place)))
            .min();
        if let Some((_, start, place)) = found {
            let mut text = std::mem::take(&mut self.held);
            text.truncate(start);
            // Fits: the list is short.
            self.stopped = Some(place as u32);
            return Stopped { text, stop: self.stopped };
        }
        let keep = self.stops.iter().map(|stop| longest_start(stop, &self.held)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        Stopped { text: std::mem::replace(&mut self.held, rest), stop: None }
    }

    /// Ends the text: gives what was held back.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The stop string that has appeared.
    pub fn stopped(&self) -> Option<u32> {
        self.stopped
    }
}

/// Length of the longest proper prefix of `stop` that `text` ends with. It is a whole number of characters in both:
/// a character's first byte is never another one's inner byte, and `text` ends with a whole character.
fn longest_start(stop: &str, text: &str) -> usize {
    let most = (stop.len() - 1).min(text.len());
    (1..=most).rev().find(|&length| text.as_bytes().ends_with(&stop.as_bytes()[..length])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn matcher(stops: &[&str]) -> StopMatcher {
        StopMatcher::new(stops.iter().map(|s| s.to_string()).collect()).unwrap()
    }

    /// Pushes each piece; gives what was let through each time, and what stopped it.
    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, Option<u32>) {
        let mut matcher = matcher(stops);
        let mut shown: Vec<String> = pieces.iter().map(|piece| matcher.push(piece).text).collect();
        shown.push(matcher.finish());
        (shown, matcher.stopped())
    }

    #[test]
    fn text_passes_up_to_the_stop() {
        assert_eq!(run(&["END"], &["a", "bE", "N", "x"]), (vec!["a".into(), "b".into(), "".into(), "ENx".into(), "".into()], None));
        assert_eq!(run(&["END"], &["aEN", "D more", "x"]), (vec!["a".into(), "".into(), "".into(), "".into()], Some(0)));
        assert_eq!(run(&["END"], &["aE"]), (vec!["a".into(), "E".into()], None));
        assert_eq!(run(&[], &["a"]), (vec!["a".into(), "".into()], None));
    }

    #[test]
    fn the_first_complete_one_wins() {
        assert_eq!(run(&["abcd", "bc"], &["xabcd"]), (vec!["xa".into(), "".into()], Some(1)));
        assert_eq!(run(&["c", "abc"], &["abc"]), (vec!["".into(), "".into()], Some(1)), "same end: the longest");
        assert_eq!(run(&["aab"], &["aa", "ab"]), (vec!["".into(), "a".into(), "".into()], Some(0)), "a failed start may hold another");
    }

    #[test]
    fn held_text_is_whole_characters() {
        // É and È share their first byte.
        assert_eq!(run(&["È!"], &["É"]), (vec!["É".into(), "".into()], None));
        assert_eq!(run(&["日本"], &["a日", "日", "本"]), (vec!["a".into(), "日".into(), "".into(), "".into()], Some(0)));
    }

    #[test]
    fn useless_lists_are_refused() {
        assert_eq!(StopMatcher::new(vec!["a".into(), "".into()]).unwrap_err(), StopError::Empty { place: 1 });
        assert!(matches!(StopMatcher::new(vec!["a".repeat(2000)]).unwrap_err(), StopError::TooLong { bytes: 2000, .. }));
        assert!(matches!(StopMatcher::new(vec!["a".into(); 65]).unwrap_err(), StopError::TooMany { count: 65 }));
    }

    proptest! {
        /// However the text is cut, what is shown and what stops it are the same.
        #[test]
        fn pieces_do_not_matter(
            text in "[abé日]{0,40}",
            stops in proptest::collection::vec("[abé日]{1,4}", 0..4),
            cuts in proptest::collection::vec(1_usize..5, 0..40),
        ) {
            let mut whole = StopMatcher::new(stops.clone()).unwrap();
            let mut expected = whole.push(&text).text;
            expected.push_str(&whole.finish());
            let mut matcher = StopMatcher::new(stops).unwrap();
            let mut shown = String::new();
            let mut rest: &str = &text;
            let mut cuts = cuts.into_iter();
            while !rest.is_empty() {
                let length = cuts.next().unwrap_or(1);
                let at = rest.char_indices().nth(length).map_or(rest.len(), |(at, _)| at);
                shown.push_str(&matcher.push(&rest[..at]).text);
                rest = &rest[at..];
            }
            shown.push_str(&matcher.finish());
            prop_assert_eq!(shown, expected);
            prop_assert_eq!(matcher.stopped(), whole.stopped());
        }
    }
}
