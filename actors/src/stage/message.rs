//! What travels from stage to stage: one message per hop and step.
//!
//! ```text
//! step message, little-endian, every part padded to 4 bytes
//!   0  step          u64   counts up by one within a plan epoch
//!   8  rows          u32   R
//!  12  changes_bytes u32   B   postcard of Vec<Change>, rare
//!  16  hidden        u32   H   0: no activations, the receiver embeds
//!  20  zero          u32
//!  24  rows          R × { sequence u32, position u32, token u32, flags u32 }
//!      changes       B bytes + padding
//!      activations   R × H × f32
//! ```
//!
//! What becomes of sequences (they begin, their pages are kept for others, they end) is told in the step itself, in the order in
//! which it was decided and before its rows, so that a free cannot overtake the rows that came before it, nor be overtaken by rows
//! that reuse the number, and so that every stage makes the same of its pages.

use serde::{Deserialize, Serialize};
use shoal_engine::sampler::SamplingParams;
use shoal_engine::stage::{Row, SequenceId};

/// Kind byte of a step message in the tensor frame's header.
pub const KIND_STEP: u8 = 1;
/// Kind byte of a tokens message, from the last stage back to the scheduler.
pub const KIND_TOKENS: u8 = 2;

/// Bytes before the first row.
const HEAD_BYTES: usize = 24;
/// Bytes of a row.
const ROW_BYTES: usize = 16;
/// Row flag: the last stage samples it.
const FLAG_SAMPLE: u32 = 1;
/// Flag beside the count of candidates: the log probability is given.
const HAS_LOGPROB: u32 = 1 << 31;
/// Most candidates that a sampled row can report.
pub const TOP_MAX: usize = 20;

/// Prefixes that are kept at once, at most: it bounds a stage's tables.
pub const KEPT_MAX: usize = 256;

/// A sequence's first mention: what the last stage needs to sample it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Open {
    /// The sequence's number.
    pub sequence: u32,
    /// How many of its tokens are the prompt: penalties treat the prompt and the answer differently.
    pub prompt_tokens: u32,
    /// How its tokens are chosen.
    pub sampling: SamplingParams,
    /// What it has in common with another one, and need not run again; its rows go on from there.
    pub shared: Option<Shared>,
}

/// The first whole pages of a sequence that runs, or of a prefix that is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shared {
    /// Its number.
    pub from: u32,
    /// How many of its tokens: whole pages.
    pub tokens: u32,
}

/// What becomes of a sequence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Change {
    /// It begins.
    Open(Open),
    /// The first of its pages, or of a prefix's, are kept under a number of their own, for sequences that begin alike.
    Keep {
        /// Whose pages.
        shared: Shared,
        /// The prefix's number, which no sequence and no other prefix has.
        prefix: u32,
    },
    /// It ends, or the prefix is not kept any more.
    Free(u32),
}

/// A step as the scheduler composes it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Step {
    /// Counts up by one within a plan epoch.
    pub step: u64,
    /// What happens to sequences before its rows run, in order.
    pub changes: Vec<Change>,
    /// The rows, a sequence's own in order.
    pub rows: Vec<Row>,
}

/// Why bytes are not a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// Shorter or longer than its counts say.
    #[error("a message of {bytes} bytes does not have the length that its counts give")]
    Length {
        /// Its length.
        bytes: usize,
    },
    /// A count is above what was agreed.
    #[error("{what}: {count} is more than the agreed {limit}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many.
        count: usize,
        /// The limit.
        limit: usize,
    },
    /// A list of changes that does not decode.
    #[error("the list of changes does not decode")]
    Changes,
    /// Bits that no version gives a meaning.
    #[error("unknown flags {0:#x}")]
    Flags(u32),
}

/// Bytes of a step message with this many rows of this width, without changes.
pub fn step_bytes(rows: usize, hidden: usize) -> usize {
    HEAD_BYTES + rows * ROW_BYTES + rows * hidden * 4
}

fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(4)
}

fn put_u32(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_le_bytes());
}

fn get_u32(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn get_u64(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// Lengths are bounded by the frame's 32-bit length long before this could matter.
fn count_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

impl Step {
    /// Writes the message without activations, replacing what is in `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.clear();
        let changes = if self.changes.is_empty() { Vec::new() } else { postcard::to_stdvec(&self.changes).unwrap_or_default() };
        out.extend_from_slice(&self.step.to_le_bytes());
        put_u32(out, count_u32(self.rows.len()));
        put_u32(out, count_u32(changes.len()));
        put_u32(out, 0);
        put_u32(out, 0);
        for row in &self.rows {
            put_u32(out, row.sequence.0);
            put_u32(out, row.position);
            put_u32(out, row.token);
            put_u32(out, if row.sample { FLAG_SAMPLE } else { 0 });
        }
        out.extend_from_slice(&changes);
        out.resize(out.len() + padded(changes.len()) - changes.len(), 0);
    }
}

/// A received step message, read in place.
#[derive(Debug, Clone, Copy)]
pub struct StepView<'a> {
    bytes: &'a [u8],
    rows: usize,
    changes_bytes: usize,
    hidden: usize,
}

/// What a receiver agreed to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepLimits {
    /// Rows of one step.
    pub rows_max: usize,
    /// Sequences open at once; it bounds the changes of a step.
    pub sequences_max: usize,
    /// Elements of an activation row; zero for the first stage.
    pub hidden: usize,
}

impl<'a> StepView<'a> {
    /// Checks the counts against the limits and the length against the counts.
    ///
    /// # Errors
    /// [`MessageError`] if anything does not fit.
    pub fn parse(bytes: &'a [u8], limits: StepLimits) -> Result<Self, MessageError> {
        if bytes.len() < HEAD_BYTES {
            return Err(MessageError::Length { bytes: bytes.len() });
        }
        let view = Self {
            bytes,
            rows: get_u32(bytes, 8) as usize,
            changes_bytes: get_u32(bytes, 12) as usize,
            hidden: get_u32(bytes, 16) as usize,
        };
        let too_many = |what, count, limit| if count > limit { Err(MessageError::TooMany { what, count, limit }) } else { Ok(()) };
        too_many("rows of a step", view.rows, limits.rows_max)?;
        too_many("bytes of changes", view.changes_bytes, limits.sequences_max.saturating_mul(64 * 1024))?;
        if get_u32(bytes, 20) != 0 {
            return Err(MessageError::Flags(get_u32(bytes, 20)));
        }
        if view.rows > 0 && view.hidden != limits.hidden {
            return Err(MessageError::TooMany { what: "elements of an activation row", count: view.hidden, limit: limits.hidden });
        }
        let end = view.activations_at() + view.rows * view.hidden * 4;
        if bytes.len() != end {
            return Err(MessageError::Length { bytes: bytes.len() });
        }
        for row in 0..view.rows {
            let flags = get_u32(bytes, HEAD_BYTES + row * ROW_BYTES + 12);
            if flags & !FLAG_SAMPLE != 0 {
                return Err(MessageError::Flags(flags));
            }
        }
        Ok(view)
    }

    fn changes_at(&self) -> usize {
        HEAD_BYTES + self.rows * ROW_BYTES
    }

    fn activations_at(&self) -> usize {
        self.changes_at() + padded(self.changes_bytes)
    }

    /// The step's number.
    pub fn step(&self) -> u64 {
        get_u64(self.bytes, 0)
    }

    /// The rows.
    pub fn rows(&self) -> impl Iterator<Item = Row> + 'a {
        let bytes = self.bytes;
        (0..self.rows).map(move |row| {
            let at = HEAD_BYTES + row * ROW_BYTES;
            Row {
                sequence: SequenceId(get_u32(bytes, at)),
                position: get_u32(bytes, at + 4),
                token: get_u32(bytes, at + 8),
                sample: get_u32(bytes, at + 12) & FLAG_SAMPLE != 0,
            }
        })
    }

    /// What happens to sequences before its rows run.
    ///
    /// # Errors
    /// If the list does not decode.
    pub fn changes(&self) -> Result<Vec<Change>, MessageError> {
        if self.changes_bytes == 0 {
            return Ok(Vec::new());
        }
        let blob = self.bytes.get(self.changes_at()..self.changes_at() + self.changes_bytes).ok_or(MessageError::Changes)?;
        postcard::from_bytes(blob).map_err(|_| MessageError::Changes)
    }

    /// Everything but the activations, which a stage passes on with its own; its hidden width must be set by
    /// [`set_hidden`].
    pub fn head(&self) -> &'a [u8] {
        &self.bytes[..self.activations_at()]
    }

    /// Copies the activations, `rows × hidden` elements, replacing what is in `out`.
    pub fn activations(&self, out: &mut Vec<f32>) {
        out.clear();
        let bytes = &self.bytes[self.activations_at()..];
        out.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
    }
}

/// Sets the width of the activations that will follow a copied head.
pub fn set_hidden(head: &mut [u8], hidden: usize) {
    if let Some(field) = head.get_mut(16..20) {
        field.copy_from_slice(&count_u32(hidden).to_le_bytes());
    }
}

/// One sampled token on its way back to the scheduler.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// Whose.
    pub sequence: SequenceId,
    /// Position of the row that was sampled; the token belongs at the next one.
    pub position: u32,
    /// The token.
    pub token: u32,
    /// Natural logarithm of its probability, if it was asked for.
    pub logprob: Option<f32>,
    /// The likeliest tokens with theirs, best first; as many as were asked for.
    pub top: Vec<(u32, f32)>,
}

/// What the last stage sends for a step: one token for each sampled row, in row order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Tokens {
    /// The step that it answers.
    pub step: u64,
    /// The tokens.
    pub tokens: Vec<Token>,
}

impl Tokens {
    /// Bytes before the first token.
    const HEAD_BYTES: usize = 12;
    /// Bytes of a token without candidates.
    const TOKEN_BYTES: usize = 20;

    /// Longest message for this many tokens.
    pub fn bytes_max(tokens: usize) -> usize {
        Self::HEAD_BYTES + tokens * (Self::TOKEN_BYTES + TOP_MAX * 8)
    }

    /// Writes the message, replacing what is in `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(&self.step.to_le_bytes());
        put_u32(out, count_u32(self.tokens.len()));
        for token in &self.tokens {
            let top = &token.top[..token.top.len().min(TOP_MAX)];
            put_u32(out, token.sequence.0);
            put_u32(out, token.position);
            put_u32(out, token.token);
            out.extend_from_slice(&token.logprob.unwrap_or_default().to_le_bytes());
            put_u32(out, count_u32(top.len()) | if token.logprob.is_some() { HAS_LOGPROB } else { 0 });
            for (candidate, logprob) in top {
                put_u32(out, *candidate);
                out.extend_from_slice(&logprob.to_le_bytes());
            }
        }
    }

    /// Reads a message of at most `tokens_max` tokens.
    ///
    /// # Errors
    /// [`MessageError`] if it is malformed.
    pub fn decode(bytes: &[u8], tokens_max: usize) -> Result<Self, MessageError> {
        let length = MessageError::Length { bytes: bytes.len() };
        if bytes.len() < Self::HEAD_BYTES {
            return Err(length);
        }
        let count = get_u32(bytes, 8) as usize;
        if count > tokens_max {
            return Err(MessageError::TooMany { what: "sampled tokens", count, limit: tokens_max });
        }
        let mut tokens = Vec::with_capacity(count);
        let mut at = Self::HEAD_BYTES;
        for _ in 0..count {
            if bytes.len() < at + Self::TOKEN_BYTES {
                return Err(length);
            }
            let flagged = get_u32(bytes, at + 16);
            let candidates = (flagged & !HAS_LOGPROB) as usize;
            if candidates > TOP_MAX {
                return Err(MessageError::TooMany { what: "candidates of a token", count: candidates, limit: TOP_MAX });
            }
            let end = at + Self::TOKEN_BYTES + candidates * 8;
            if bytes.len() < end {
                return Err(length);
            }
            let float = |at| f32::from_bits(get_u32(bytes, at));
            let first = at + Self::TOKEN_BYTES;
            tokens.push(Token {
                sequence: SequenceId(get_u32(bytes, at)),
                position: get_u32(bytes, at + 4),
                token: get_u32(bytes, at + 8),
                logprob: (flagged & HAS_LOGPROB != 0).then(|| float(at + 12)),
                top: (0..candidates).map(|i| (get_u32(bytes, first + i * 8), float(first + i * 8 + 4))).collect(),
            });
            at = end;
        }
        if at == bytes.len() { Ok(Self { step: get_u64(bytes, 0), tokens }) } else { Err(length) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn limits(hidden: usize) -> StepLimits {
        StepLimits { rows_max: 64, sequences_max: 16, hidden }
    }

    fn row() -> impl Strategy<Value = Row> {
        (0u32..16, any::<u32>(), any::<u32>(), any::<bool>()).prop_map(|(sequence, position, token, sample)| Row {
            sequence: SequenceId(sequence),
            position,
            token,
            sample,
        })
    }

    fn change() -> impl Strategy<Value = Change> {
        let shared = || (0u32..16, 0u32..4).prop_map(|(from, pages)| Shared { from, tokens: pages * 32 });
        prop_oneof![
            (0u32..16, prop::option::of(shared())).prop_map(|(sequence, shared)| {
                Change::Open(Open { sequence, prompt_tokens: 5, sampling: SamplingParams::default(), shared })
            }),
            (shared(), 16u32..300).prop_map(|(shared, prefix)| Change::Keep { shared, prefix }),
            (0u32..300).prop_map(Change::Free),
        ]
    }

    fn step() -> impl Strategy<Value = Step> {
        (any::<u64>(), prop::collection::vec(row(), 0..64), prop::collection::vec(change(), 0..20)).prop_map(|(step, rows, changes)| Step {
            step,
            rows,
            changes,
        })
    }

    #[test]
    fn the_layout_is_pinned() {
        let step = Step {
            step: 0x0102,
            changes: vec![Change::Free(7), Change::Keep { shared: Shared { from: 3, tokens: 64 }, prefix: 200 }],
            rows: vec![Row { sequence: SequenceId(1), position: 2, token: 3, sample: true }],
        };
        let mut bytes = Vec::new();
        step.encode(&mut bytes);
        let words: Vec<u32> = bytes[..40].chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        assert_eq!(words, [0x0102, 0, 1, 8, 0, 0, 1, 2, 3, 1]);
        // Two changes: free 7; keep of 3 the first 64 tokens as 200.
        assert_eq!(bytes[40..], [2, 2, 7, 1, 3, 64, 0xc8, 1]);
        let shared = Some(Shared { from: 300, tokens: 32 });
        let open = Open { sequence: 4, prompt_tokens: 33, sampling: SamplingParams::default(), shared };
        Step { step: 1, changes: vec![Change::Open(open)], rows: Vec::new() }.encode(&mut bytes);
        let sampling = postcard::to_stdvec(&SamplingParams::default()).expect("encodes");
        assert_eq!(bytes[24..], [&[1, 0, 4, 33], &sampling[..], &[1, 0xac, 2, 32], &[0; 3][..(4 - (8 + sampling.len()) % 4) % 4]].concat());
    }

    proptest! {
        #[test]
        fn a_step_reads_back(step in step(), hidden in 1usize..8) {
            let mut bytes = Vec::new();
            step.encode(&mut bytes);
            set_hidden(&mut bytes, hidden);
            let activations: Vec<f32> = (0..step.rows.len() * hidden).map(|i| i as f32).collect();
            activations.iter().for_each(|x| bytes.extend_from_slice(&x.to_le_bytes()));
            let view = StepView::parse(&bytes, limits(hidden)).expect("is well-formed");
            prop_assert_eq!(view.step(), step.step);
            prop_assert_eq!(view.rows().collect::<Vec<_>>(), step.rows);
            prop_assert_eq!(view.changes().expect("decodes"), step.changes);
            let mut out = Vec::new();
            view.activations(&mut out);
            prop_assert_eq!(out, activations);
        }

        #[test]
        fn a_cut_step_is_refused(step in step(), cut in 1usize..32) {
            let mut bytes = Vec::new();
            step.encode(&mut bytes);
            bytes.truncate(bytes.len().saturating_sub(cut));
            prop_assert!(StepView::parse(&bytes, limits(0)).is_err());
        }

        #[test]
        fn arbitrary_bytes_are_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), hidden in 0usize..8) {
            if let Ok(view) = StepView::parse(&bytes, limits(hidden)) {
                let _ = (view.rows().count(), view.changes());
            }
            let _ = Tokens::decode(&bytes, 16);
        }

        #[test]
        fn tokens_read_back(step in any::<u64>(), count in 0usize..16, top in 0usize..=TOP_MAX) {
            let tokens = Tokens { step, tokens: (0..count as u32).map(|i| Token {
                sequence: SequenceId(i), position: i + 1, token: i * 7, logprob: (i % 2 == 0).then(|| -0.5 - i as f32),
                top: (0..top as u32).map(|t| (t, -(t as f32))).collect(),
            }).collect() };
            let mut bytes = Vec::new();
            tokens.encode(&mut bytes);
            prop_assert!(bytes.len() <= Tokens::bytes_max(count));
            prop_assert_eq!(Tokens::decode(&bytes, 16).expect("is well-formed"), tokens);
            bytes.push(0);
            prop_assert!(Tokens::decode(&bytes, 16).is_err());
        }
    }
}
