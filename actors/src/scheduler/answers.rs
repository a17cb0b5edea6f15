//! The text side of an instance's requests: what readers were promised, what they have to wait for, and when nobody
//! reads any more. A pure machine beside [`super::Scheduler`].
//!
//! Readers *pull*: they name the index after which they want to go on. So a slow reader costs nothing but the tokens
//! themselves, a lost answer is asked for again, and a client that comes back after a broken connection gets what it
//! missed.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use shoal_engine::sampler::StopMatcher;

use crate::env::{Instant, TextDecoder};
use crate::ids::RequestId;
use crate::request::{Chunk, End, Finish, GenerateRequest, Likely, READ_WAIT, Timing, TokenEvent, Unread};

/// A request that only one reader knows of is cancelled when nothing was asked for in this time: its reader's node is gone.
pub const UNREAD_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the others go on without a reader. It only keeps one from using memory for ever: most end sooner by themselves.
pub const UNATTENDED_MAX: Duration = Duration::from_secs(15 * 60);
/// How long a reader that has gone may take to come back.
pub const GRACE: Duration = Duration::from_secs(10);
/// How long an ended answer is kept for readers that come back.
pub const KEEP: Duration = Duration::from_secs(120);
/// How many ended answers are kept; the oldest go first.
pub(super) const ENDED_MAX: usize = 256;
/// Most tokens of one chunk, so that a chunk fits a control frame.
pub const CHUNK_TOKENS_MAX: usize = 256;

/// What a token did to an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pushed {
    /// It goes on.
    More,
    /// A stop string was completed: the sequence should be ended.
    Stopped,
}

struct Answer<R> {
    asked: GenerateRequest,
    prompt_tokens: u32,
    decoder: Box<dyn TextDecoder>,
    stop: StopMatcher,
    stopped: bool,
    tokens: Vec<TokenEvent>,
    end: Option<End>,
    readers: Vec<Reader<R>>,
    last_read: Instant,
    /// When its reader has said that it goes, if nobody has read since.
    left: Option<Instant>,
    ended: Option<Instant>,
}

struct Reader<R> {
    after: u32,
    since: Instant,
    reply: R,
}

impl<R> Answer<R> {
    /// Whether it has gone on without a reader for too long.
    fn unread(&self, now: Instant) -> bool {
        let silent = |since: Instant, most: Duration| now.since(since) >= most;
        let left = self.asked.unread != Unread::GoOn && self.left.is_some_and(|left| silent(left, GRACE));
        let most = if self.asked.unread == Unread::Cancel { UNREAD_TIMEOUT } else { UNATTENDED_MAX };
        self.end.is_none() && (left || (self.readers.is_empty() && silent(self.last_read, most)))
    }

    /// What a reader at `after` would get now; `None` if it has to wait.
    fn chunk(&self, after: u32) -> Option<Chunk> {
        let start = (after as usize).min(self.tokens.len());
        let end = self.tokens.len().min(start + CHUNK_TOKENS_MAX);
        let last = end == self.tokens.len();
        if start == end && self.end.is_none() {
            return None;
        }
        let tokens = self.tokens[start..end].to_vec();
        Some(Chunk { prompt_tokens: self.prompt_tokens, tokens, end: if last { self.end.clone() } else { None } })
    }
}

/// The answers of an instance's requests. `R` is what a waiting reader is answered through.
pub struct Answers<R> {
    answers: BTreeMap<RequestId, Answer<R>>,
}

impl<R> fmt::Debug for Answers<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answers").field("requests", &self.answers.len()).finish()
    }
}

impl<R> Default for Answers<R> {
    fn default() -> Self {
        Self { answers: BTreeMap::new() }
    }
}

impl<R> Answers<R> {
    /// Begins an answer.
    pub fn open(&mut self, now: Instant, asked: GenerateRequest, prompt_tokens: u32, decoder: Box<dyn TextDecoder>, stop: StopMatcher) {
        let id = asked.id;
        let answer = Answer {
            asked,
            prompt_tokens,
            decoder,
            stop,
            stopped: false,
            tokens: Vec::new(),
            end: None,
            readers: Vec::new(),
            last_read: now,
            left: None,
            ended: None,
        };
        self.answers.insert(id, answer);
    }

    /// Tokens of the prompt, if the request is known.
    pub fn prompt_tokens(&self, id: RequestId) -> Option<u32> {
        self.answers.get(&id).map(|a| a.prompt_tokens)
    }

    /// What a request asks, and the tokens of its prompt.
    pub fn asked(&self, id: RequestId) -> Option<(&GenerateRequest, u32)> {
        self.answers.get(&id).map(|answer| (&answer.asked, answer.prompt_tokens))
    }

    /// Tokens of an answer so far.
    pub fn tokens(&self, id: RequestId) -> u32 {
        self.answers.get(&id).map_or(0, |answer| u32::try_from(answer.tokens.len()).unwrap_or(u32::MAX))
    }

    /// Its reader goes, and may come back. `true` if nobody is there for it until then.
    pub fn leave(&mut self, now: Instant, id: RequestId) -> bool {
        let Some(answer) = self.answers.get_mut(&id) else { return false };
        answer.left = Some(now);
        answer.asked.unread != Unread::GoOn
    }

    /// Adds a token. Readers that waited for it are answered through `send`.
    pub fn push(
        &mut self,
        id: RequestId,
        token: u32,
        logprob: Option<f32>,
        top: Vec<(u32, f32)>,
        send: &mut dyn FnMut(R, Chunk),
    ) -> Pushed {
        let Some(answer) = self.answers.get_mut(&id) else { return Pushed::More };
        if answer.stopped || answer.end.is_some() {
            return Pushed::More;
        }
        let certain = answer.decoder.push(token);
        let text = answer.stop.push(&certain).text;
        answer.stopped = answer.stop.stopped().is_some();
        let index = u32::try_from(answer.tokens.len()).unwrap_or(u32::MAX);
        // Who asks for probabilities wants to see what they belong to, and may be on a node without the model.
        let bytes = logprob.map(|_| answer.decoder.bytes(token)).unwrap_or_default();
        let top = top.into_iter().map(|(token, logprob)| Likely { token, logprob, bytes: answer.decoder.bytes(token) }).collect();
        answer.tokens.push(TokenEvent { index, token, text, logprob, bytes, top });
        let stopped = answer.stopped;
        self.wake(id, send);
        if stopped { Pushed::Stopped } else { Pushed::More }
    }

    /// Ends an answer well.
    pub fn finish(&mut self, now: Instant, id: RequestId, reason: Finish, timing: Timing, send: &mut dyn FnMut(R, Chunk)) {
        let Some(answer) = self.answers.get_mut(&id) else { return };
        let mut text = String::new();
        if !answer.stopped {
            let rest = answer.decoder.finish();
            text = answer.stop.push(&rest).text;
            if answer.stop.stopped().is_none() {
                text.push_str(&answer.stop.finish());
            }
        }
        self.end(now, id, End::Finished { reason, text, timing }, send);
    }

    /// Breaks an answer off.
    pub fn fail(&mut self, now: Instant, id: RequestId, reason: String, send: &mut dyn FnMut(R, Chunk)) {
        self.end(now, id, End::Failed(reason), send);
    }

    fn end(&mut self, now: Instant, id: RequestId, end: End, send: &mut dyn FnMut(R, Chunk)) {
        if let Some(answer) = self.answers.get_mut(&id)
            && answer.end.is_none()
        {
            answer.end = Some(end);
            answer.ended = Some(now);
            self.wake(id, send);
        }
    }

    fn wake(&mut self, id: RequestId, send: &mut dyn FnMut(R, Chunk)) {
        let Some(answer) = self.answers.get_mut(&id) else { return };
        for reader in std::mem::take(&mut answer.readers) {
            match answer.chunk(reader.after) {
                Some(chunk) => send(reader.reply, chunk),
                None => answer.readers.push(reader),
            }
        }
    }

    /// A reader wants what comes after the first `after` tokens. Answered now or when there is something; `false` if
    /// the request is not known.
    pub fn read(&mut self, now: Instant, id: RequestId, after: u32, reply: R, send: &mut dyn FnMut(R, Chunk)) -> Result<(), R> {
        let Some(answer) = self.answers.get_mut(&id) else { return Err(reply) };
        answer.last_read = now;
        answer.left = None;
        match answer.chunk(after) {
            Some(chunk) => send(reply, chunk),
            None => answer.readers.push(Reader { after, since: now, reply }),
        }
        Ok(())
    }

    /// Answers readers that have waited long enough with an empty chunk, forgets old answers, and names the requests
    /// that nobody reads.
    pub fn tick(&mut self, now: Instant, send: &mut dyn FnMut(R, Chunk)) -> Vec<RequestId> {
        let mut unread = Vec::new();
        for (id, answer) in &mut self.answers {
            for reader in std::mem::take(&mut answer.readers) {
                if now.since(reader.since) >= READ_WAIT {
                    answer.last_read = now;
                    send(reader.reply, Chunk { prompt_tokens: answer.prompt_tokens, ..Chunk::default() });
                } else {
                    answer.readers.push(reader);
                }
            }
            if answer.unread(now) {
                unread.push(*id);
            }
        }
        self.answers.retain(|_, answer| answer.ended.is_none_or(|ended| now.since(ended) < KEEP));
        let mut ended: Vec<(Instant, RequestId)> =
            self.answers.iter().filter_map(|(id, answer)| answer.ended.map(|ended| (ended, *id))).collect();
        if ended.len() > ENDED_MAX {
            ended.sort_unstable();
            let oldest = ended.len() - ENDED_MAX;
            ended.iter().take(oldest).for_each(|(_, id)| drop(self.answers.remove(id)));
        }
        unread
    }

    /// Requests whose answer has not ended.
    pub fn open_requests(&self) -> Vec<RequestId> {
        self.answers.iter().filter(|(_, a)| a.end.is_none()).map(|(id, _)| *id).collect()
    }
}

#[cfg(test)]
mod tests {
    use shoal_engine::sampler::SamplingParams;

    use super::*;
    use crate::ids::InstanceId;
    use crate::request::Prompt;

    /// Tokens are bytes.
    #[derive(Default)]
    struct Bytes(Vec<u8>);

    impl TextDecoder for Bytes {
        fn push(&mut self, token: u32) -> String {
            self.0.push(token as u8);
            match std::str::from_utf8(&self.0) {
                Ok(text) => {
                    let text = text.to_owned();
                    self.0.clear();
                    text
                }
                Err(_) => String::new(),
            }
        }
        fn bytes(&self, token: u32) -> Vec<u8> {
            vec![token as u8]
        }
        fn finish(&mut self) -> String {
            String::from_utf8_lossy(&std::mem::take(&mut self.0)).into_owned()
        }
    }

    const ID: RequestId = RequestId(1);

    fn at(seconds: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(seconds)
    }

    fn asked(id: RequestId, unread: Unread) -> GenerateRequest {
        GenerateRequest {
            id,
            instance: InstanceId(1),
            prompt: Prompt::Text("x".to_owned()),
            sampling: SamplingParams::default(),
            max_tokens: None,
            stop: Vec::new(),
            ignore_end: false,
            unread,
            shape: String::new(),
            client: crate::request::Client::default(),
            priority: crate::request::Priority::Normal,
        }
    }

    fn open(answers: &mut Answers<u32>, asked: GenerateRequest, stop: &[&str]) {
        let stop = StopMatcher::new(stop.iter().map(|s| (*s).to_owned()).collect()).expect("short");
        answers.open(at(0), asked, 3, Box::<Bytes>::default(), stop);
    }

    fn answers(stop: &[&str]) -> Answers<u32> {
        let mut answers = Answers::default();
        open(&mut answers, asked(ID, Unread::Cancel), stop);
        answers
    }

    #[test]
    fn a_reader_that_goes_is_waited_for_and_one_that_dies_longer() {
        let mut answers = Answers::default();
        let unread = [Unread::Cancel, Unread::Wait, Unread::Wait, Unread::GoOn];
        let ids: Vec<RequestId> = (1..=4).map(RequestId).collect();
        ids.iter().zip(unread).for_each(|(id, unread)| open(&mut answers, asked(*id, unread), &[]));
        let tick = |answers: &mut Answers<u32>, seconds| answers.tick(at(seconds), &mut |_, _| {});
        // The second one's reader is back in time, the third one's is not, and the fourth one's said that it need not be.
        assert_eq!([1, 2, 3].map(|index| answers.leave(at(1), ids[index])), [true, true, false]);
        answers.read(at(5), ids[1], 0, 1, &mut |_, _| {}).expect("known");
        assert_eq!(tick(&mut answers, 10), []);
        assert_eq!(tick(&mut answers, 11), [ids[2]]);
        answers.fail(at(11), ids[2], "left".to_owned(), &mut |_, _| {});
        // The first one's reader died without a word, and nobody else knows of it.
        assert_eq!(tick(&mut answers, 30), [ids[0]]);
        answers.fail(at(30), ids[0], "dead".to_owned(), &mut |_, _| {});
        assert_eq!(tick(&mut answers, 600), []);
        assert_eq!(tick(&mut answers, 901), [ids[3]]);
        assert_eq!(tick(&mut answers, 911), [ids[1], ids[3]]);
    }

    #[test]
    fn only_so_many_ended_answers_are_kept() {
        let mut answers = Answers::default();
        for id in 0..ENDED_MAX as u128 + 2 {
            open(&mut answers, asked(RequestId(id), Unread::Wait), &[]);
            answers.finish(at(id as u64 / 200), RequestId(id), Finish::Stop, Timing::default(), &mut |_, _| {});
        }
        answers.tick(at(3), &mut |_, _| {});
        let kept = |id| answers.asked(RequestId(id)).is_some();
        assert_eq!([0, 1, 2, ENDED_MAX as u128 + 1].map(kept), [false, false, true, true]);
    }

    fn text(chunks: &[(u32, Chunk)]) -> String {
        let mut out = String::new();
        for (_, chunk) in chunks {
            chunk.tokens.iter().for_each(|t| out.push_str(&t.text));
            if let Some(End::Finished { text, .. }) = &chunk.end {
                out.push_str(text);
            }
        }
        out
    }

    #[test]
    fn a_reader_waits_and_then_gets_everything_once() {
        let mut answers = answers(&[]);
        let mut sent = Vec::new();
        let mut send = |reader, chunk| sent.push((reader, chunk));
        answers.read(at(0), ID, 0, 1, &mut send).expect("known");
        for byte in "hé".bytes() {
            answers.push(ID, u32::from(byte), None, Vec::new(), &mut send);
        }
        answers.read(at(0), ID, 1, 2, &mut send).expect("known");
        answers.finish(at(0), ID, Finish::Stop, Timing::default(), &mut send);
        answers.read(at(0), ID, 3, 3, &mut send).expect("known");
        assert_eq!(
            sent.iter().map(|(reader, chunk)| (*reader, chunk.tokens.len(), chunk.end.is_some())).collect::<Vec<_>>(),
            [(1, 1, false), (2, 2, false), (3, 0, true)]
        );
        assert_eq!(text(&sent), "hé");
        assert_eq!(answers.read(at(0), RequestId(9), 0, 4, &mut |_, _| {}), Err(4));
    }

    #[test]
    fn probabilities_come_with_their_tokens_bytes() {
        let mut answers = answers(&[]);
        let mut sent = Vec::new();
        answers.push(ID, 104, Some(-0.5), vec![(104, -0.5), (195, -1.5)], &mut |_, _| {});
        answers.push(ID, 105, None, Vec::new(), &mut |_, _| {});
        answers.read(at(0), ID, 0, 1, &mut |reader, chunk| sent.push((reader, chunk))).expect("known");
        let tokens = &sent[0].1.tokens;
        assert_eq!((tokens[0].bytes.as_slice(), tokens[1].bytes.as_slice()), (&b"h"[..], &b""[..]));
        assert_eq!(tokens[0].top[1], Likely { token: 195, logprob: -1.5, bytes: vec![195] });
        assert!(tokens[1].top.is_empty());
    }

    #[test]
    fn a_stop_string_is_not_shown() {
        let mut answers = answers(&["END"]);
        let mut sent = Vec::new();
        let mut stopped = 0;
        for byte in "one EN two END three".bytes() {
            if answers.push(ID, u32::from(byte), None, Vec::new(), &mut |_, _| {}) == Pushed::Stopped {
                stopped += 1;
            }
        }
        answers.finish(at(0), ID, Finish::Stop, Timing::default(), &mut |_, _| {});
        answers.read(at(0), ID, 0, 1, &mut |reader, chunk| sent.push((reader, chunk))).expect("known");
        assert_eq!((text(&sent).as_str(), stopped), ("one EN two ", 1));
    }

    #[test]
    fn nobody_waits_or_is_kept_for_ever() {
        let mut answers = answers(&[]);
        let mut sent = Vec::new();
        answers.read(at(0), ID, 0, 1, &mut |reader, chunk| sent.push((reader, chunk))).expect("known");
        assert!(answers.tick(at(2), &mut |reader, chunk| sent.push((reader, chunk))).is_empty());
        assert_eq!(sent, [(1, Chunk { prompt_tokens: 3, ..Chunk::default() })]);
        assert_eq!(answers.tick(at(40), &mut |_, _| {}), [ID]);
        answers.fail(at(41), ID, "gone".to_owned(), &mut |_, _| {});
        assert!(answers.tick(at(160), &mut |_, _| {}).is_empty());
        assert_eq!(answers.prompt_tokens(ID), Some(3));
        answers.tick(at(161), &mut |_, _| {});
        assert_eq!(answers.prompt_tokens(ID), None);
    }
}
