//! A request for text as it travels between nodes, whatever dialect the client spoke.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use shoal_engine::sampler::SamplingParams;

use crate::ids::{InstanceId, RequestId};
pub use crate::scheduler::{Finish, Timing};

/// Who speaks in a conversation, and what.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, `tool` or another role that the model's template knows.
    pub role: String,
    /// The text. None in messages that only call tools.
    pub content: Option<String>,
    /// Everything else that the template may want (`tool_calls`, `tool_call_id`, `name`…), as the JSON text of an
    /// object; empty if there is nothing.
    pub extra: String,
}

impl ChatMessage {
    /// A message of text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: Some(content.into()), extra: String::new() }
    }
}

/// Who sent a request, as far as fairness needs to know it: memory and time are shared out evenly among accounts, and what an account
/// has of them evenly among its users.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Client {
    /// An account, by its hash.
    pub account: u64,
    /// One of its users, by the hash of the name that the account has for it; zero if it says none.
    pub user: u64,
}

impl Client {
    /// Of an account, which whatever bytes stand for, and what it calls its user.
    pub fn new(account: &[u8], user: Option<&str>) -> Self {
        let hash = |context: &str, bytes: &[u8]| {
            let [a, b, c, d, e, f, g, h, ..] = blake3::derive_key(context, bytes);
            u64::from_le_bytes([a, b, c, d, e, f, g, h])
        };
        let user = user.map_or(0, |user| hash("shoal 2026-11 user of an account", user.as_bytes()));
        Self { account: hash("shoal 2026-11 account of a client", account), user }
    }
}

/// How urgent a request is. Those of a higher priority go first, but never for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Priority {
    /// When there is time.
    Low,
    /// As usual.
    #[default]
    Normal,
    /// Before others.
    High,
}

/// What a model is asked to continue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Prompt {
    /// A conversation, rendered with the model's own template.
    Chat {
        /// The messages, oldest first.
        messages: Vec<ChatMessage>,
        /// Tools on offer, as the JSON text of the list that OpenAI's API takes; none if empty.
        tools: String,
    },
    /// Plain text. Special tokens in it are text.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

/// A request for text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerateRequest {
    /// Its name. Submitting the same one again is the same request.
    pub id: RequestId,
    /// Which placed model is asked.
    pub instance: InstanceId,
    /// What to continue.
    pub prompt: Prompt,
    /// How tokens are chosen, and how many of the likeliest are reported. The seed is set by whoever makes the request.
    pub sampling: SamplingParams,
    /// Most tokens to make; none: as many as the context holds.
    pub max_tokens: Option<u32>,
    /// Texts that end the answer; not part of it.
    pub stop: Vec<String>,
    /// Whether to go on when the model ends its text.
    pub ignore_end: bool,
    /// What becomes of it when nobody reads its answer any more.
    pub unread: Unread,
    /// How the answer is shaped for its client, in the words of the interface that took the request, so that another node can go on
    /// with it. Carried, not read; at most [`SHAPE_BYTES_MAX`].
    pub shape: String,
    /// Who sent it.
    pub client: Client,
    /// How urgent it is.
    pub priority: Priority,
}

/// Longest [`GenerateRequest::shape`], in bytes.
pub const SHAPE_BYTES_MAX: usize = 4096;

impl GenerateRequest {
    /// Whether both ask for the same text, whoever asks and wherever it is made.
    pub fn asks_the_same(&self, other: &Self) -> bool {
        (&self.prompt, &self.sampling, self.max_tokens, &self.stop, self.ignore_end)
            == (&other.prompt, &other.sampling, other.max_tokens, &other.stop, other.ignore_end)
    }
}

/// What becomes of a request whose answer nobody reads any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Unread {
    /// It ends at once when its reader says that it goes: nobody else knows its id.
    #[default]
    Cancel,
    /// Its reader may come back, at this node or another: it ends a little after the reader has gone. A reader that dies without a word
    /// is waited for, up to the answer's end.
    Wait,
    /// It goes on to its end, and the answer is kept for a while.
    GoOn,
}

/// One token of an answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenEvent {
    /// Counts up from zero.
    pub index: u32,
    /// The token.
    pub token: u32,
    /// The text that became certain with it: empty inside a character of several tokens.
    pub text: String,
    /// Natural logarithm of its probability, if it was asked for.
    pub logprob: Option<f32>,
    /// The bytes that the token stands for, if its probability was asked for; they need not be whole characters.
    pub bytes: Vec<u8>,
    /// The likeliest tokens, best first, if they were asked for.
    pub top: Vec<Likely>,
}

/// A token that could have come, and how likely it was.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Likely {
    /// The token.
    pub token: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The bytes that it stands for.
    pub bytes: Vec<u8>,
}

/// How an answer ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum End {
    /// As it should.
    Finished {
        /// Why.
        reason: Finish,
        /// Text that was held back until the end was known.
        text: String,
        /// How long it took.
        timing: Timing,
    },
    /// It broke off; the text says what happened and what to do.
    Failed(String),
}

/// What came since the reader last asked.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Chunk {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// New tokens, in order.
    pub tokens: Vec<TokenEvent>,
    /// Set with the last tokens.
    pub end: Option<End>,
}

/// Longest time that a reader is kept waiting for the next token before it gets an empty chunk.
pub const READ_WAIT: Duration = Duration::from_millis(1000);
