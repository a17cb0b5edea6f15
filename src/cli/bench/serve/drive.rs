//! Clients that all ask at once and note when each token comes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use futures::future::try_join_all;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::figures::Spread;
use crate::cli::client::Told;
use crate::cli::{Client, ClientError, Exchange, Failure};

/// Tokens of a stream that pass before its gaps count.
const SETTLED: usize = 4;
/// Tokens of each stream whose gaps are measured with nothing beside them.
const ALONE: usize = 48;
/// Prompts consist of these: every vocabulary has them.
const TOKENS: std::ops::Range<u64> = 64..300;

/// Asks a model.
#[derive(Debug)]
pub(super) struct Asking {
    client: Client,
    model: String,
    chance: AtomicU64,
}

/// What so many streams at once came to.
#[derive(Debug)]
pub(super) struct Load {
    pub(super) streams: u32,
    /// From the first request to the last token, all rounds together, in seconds.
    seconds: f64,
    answers: Vec<Answer>,
}

/// When the tokens of an answer came, in seconds after it was asked for.
#[derive(Debug, Default)]
struct Answer {
    tokens: Vec<f64>,
}

/// What a long prompt did to streams that decode.
#[derive(Debug)]
pub(super) struct Gaps {
    pub(super) streams: u32,
    pub(super) prompt_tokens: u32,
    pub(super) alone: Spread,
    pub(super) beside: Spread,
    pub(super) first_token: Spread,
}

impl Load {
    /// Tokens a second of all streams together, prompts included.
    pub(super) fn tok_s(&self) -> f64 {
        let tokens: usize = self.answers.iter().map(|answer| answer.tokens.len()).sum();
        if self.seconds > 0.0 { tokens as f64 / self.seconds } else { 0.0 }
    }

    /// Times until first tokens.
    pub(super) fn first_tokens(&self) -> Spread {
        Spread::of(self.answers.iter().filter_map(|answer| answer.tokens.first().copied()).collect())
    }

    /// Tokens a second of a stream, after its first token; the mean over streams.
    pub(super) fn stream_tok_s(&self) -> f64 {
        let rate = |answer: &Answer| match answer.tokens[..] {
            [first, .., last] if last > first => Some((answer.tokens.len() - 1) as f64 / (last - first)),
            _ => None,
        };
        let rates: Vec<f64> = self.answers.iter().filter_map(rate).collect();
        if rates.is_empty() { 0.0 } else { rates.iter().sum::<f64>() / rates.len() as f64 }
    }
}

/// A stream under way.
struct Stream {
    asked: Instant,
    events: mpsc::Receiver<Result<Told, ClientError>>,
}

impl Stream {
    /// How many tokens came, and when; none at the end.
    async fn next(&mut self) -> Result<Option<(usize, f64)>, Failure> {
        loop {
            let Some(event) = self.events.recv().await else { return Ok(None) };
            let event = event?;
            let tokens = event.data.pointer("/choices/0/token_ids").and_then(Value::as_array).map_or(0, Vec::len);
            if tokens > 0 {
                return Ok(Some((tokens, self.asked.elapsed().as_secs_f64())));
            }
        }
    }
}

impl Asking {
    pub(super) fn new(client: Client, model: String) -> Self {
        // Another run's prompts are others, too.
        let begin = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(1, |time| time.as_nanos() as u64);
        Self { client, model, chance: AtomicU64::new(begin | 1) }
    }

    /// A prompt that nobody has asked before.
    fn prompt(&self, tokens: u32) -> Vec<u64> {
        let mut state = self.chance.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed) | 1;
        let next = |_| {
            // xorshift64
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            TOKENS.start + state % (TOKENS.end - TOKENS.start)
        };
        (0..tokens).map(next).collect()
    }

    async fn ask(&self, prompt_tokens: u32, max_tokens: u32) -> Result<Stream, Failure> {
        let body = json!({
            "model": self.model, "prompt": self.prompt(prompt_tokens), "max_tokens": max_tokens, "temperature": 0, "stream": true,
            "ignore_eos": true, "return_token_ids": true,
        });
        let asked = Instant::now();
        let events = self.client.events(Exchange { path: "/v1/completions".to_owned(), body: Some(body), headers: Vec::new() }).await?;
        Ok(Stream { asked, events })
    }

    async fn answer(&self, prompt_tokens: u32, max_tokens: u32) -> Result<Answer, Failure> {
        let mut stream = self.ask(prompt_tokens, max_tokens).await?;
        let mut answer = Answer::default();
        while let Some((tokens, at)) = stream.next().await? {
            answer.tokens.extend(std::iter::repeat_n(at, tokens));
        }
        Ok(answer)
    }

    /// Has so many streams at once, `rounds` times.
    pub(super) async fn load(&self, streams: u32, prompt_tokens: u32, max_tokens: u32, rounds: u32) -> Result<Load, Failure> {
        let mut load = Load { streams, seconds: 0.0, answers: Vec::new() };
        for _ in 0..rounds {
            let begin = Instant::now();
            let answers = try_join_all((0..streams).map(|_| self.answer(prompt_tokens, max_tokens))).await?;
            load.seconds += begin.elapsed().as_secs_f64();
            load.answers.extend(answers);
        }
        Ok(load)
    }

    /// Measures the gaps of streams that decode, alone and while a long prompt is read.
    pub(super) async fn gaps(&self, streams: u32, long: u32, context: u32, rounds: u32) -> Result<Gaps, Failure> {
        let (mut alone, mut beside, mut first) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            // They end when they are dropped, which is long before their own end.
            let mut running = try_join_all((0..streams).map(|_| self.ask(8, context - 8))).await?;
            // Of each: when its last token came.
            let mut last = Vec::new();
            for stream in &mut running {
                last.push(tokens(stream, SETTLED, None, &mut Vec::new()).await?);
            }
            let mut calm: Vec<Vec<f64>> = vec![Vec::new(); running.len()];
            let reading = running.iter_mut().zip(&last).zip(&mut calm).map(|((stream, last), gaps)| tokens(stream, ALONE, *last, gaps));
            let last = try_join_all(reading).await?;
            alone.extend(calm.into_iter().flatten());
            // The long prompt, and what the others hear until its first token is there.
            let begin = Instant::now();
            let mut disturbed: Vec<Vec<f64>> = vec![Vec::new(); running.len()];
            let hearing =
                running.iter_mut().zip(&last).zip(&mut disturbed).map(|((stream, last), gaps)| tokens(stream, usize::MAX, *last, gaps));
            let hearing = try_join_all(hearing);
            let prompt = async {
                let mut stream = self.ask(long, 1).await?;
                stream.next().await
            };
            tokio::select! {
                came = prompt => drop(came?),
                ended = hearing => {
                    ended?;
                    return Err(Failure::new("the streams ended before the long prompt was read; their context is too short"));
                }
            }
            first.push(begin.elapsed().as_secs_f64());
            beside.extend(disturbed.into_iter().flatten());
        }
        let (alone, beside, first_token) = (Spread::of(alone), Spread::of(beside), Spread::of(first));
        Ok(Gaps { streams, prompt_tokens: long, alone, beside, first_token })
    }
}

/// Hears so many tokens of a stream, or all, and notes the gaps between them and from the one before; gives when the last one came.
async fn tokens(stream: &mut Stream, count: usize, before: Option<f64>, gaps: &mut Vec<f64>) -> Result<Option<f64>, Failure> {
    let (mut heard, mut last) = (0, before);
    while heard < count {
        let Some((tokens, at)) = stream.next().await? else { break };
        if let Some(last) = last {
            gaps.push(at - last);
        }
        last = Some(at);
        heard += tokens;
    }
    Ok(last)
}
