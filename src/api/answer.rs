//! An answer in the shapes of OpenAI's interface, whole and in pieces.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::parameters::Asked;
use super::speed::timings;
use crate::{Finish, GenerateRequest, RequestId, Timing, TokenEvent};

/// Which of the two interfaces asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Dialect {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Text,
}

/// What all pieces of an answer have in common. It travels with the request, as JSON, so that another node can go on with the answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Shape {
    pub(super) dialect: Dialect,
    #[serde(skip, default = "nameless")]
    pub(super) request: RequestId,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) fingerprint: Option<String>,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    pub(super) logprobs: bool,
    pub(super) token_ids: bool,
}

#[cfg(test)]
impl Shape {
    /// Of a streamed answer of a chat.
    pub(super) fn example() -> Self {
        Self {
            dialect: Dialect::Chat,
            request: RequestId(1),
            created: 7,
            model: "m".to_owned(),
            fingerprint: None,
            stream: true,
            include_usage: false,
            logprobs: false,
            token_ids: false,
        }
    }
}

/// A request says its id itself.
fn nameless() -> RequestId {
    RequestId(0)
}

/// How it ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ended {
    pub(super) reason: Finish,
    pub(super) prompt_tokens: u32,
    pub(super) completion_tokens: u32,
    pub(super) timing: Timing,
}

impl Ended {
    fn usage(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens.saturating_add(self.completion_tokens),
            "prompt_tokens_details": {"cached_tokens": self.timing.cached},
        })
    }

    fn timings(&self) -> Value {
        timings(self.prompt_tokens, self.completion_tokens, self.timing)
    }
}

fn finish_reason(reason: Finish) -> &'static str {
    match reason {
        Finish::Length => "length",
        _ => "stop",
    }
}

fn likely(bytes: &[u8], logprob: f32) -> Map<String, Value> {
    let mut entry = Map::new();
    entry.insert("token".to_owned(), Value::from(String::from_utf8_lossy(bytes)));
    entry.insert("logprob".to_owned(), Value::from(logprob));
    entry.insert("bytes".to_owned(), Value::from(bytes.to_vec()));
    entry
}

fn logprob(token: &TokenEvent) -> Value {
    let mut entry = likely(&token.bytes, token.logprob.unwrap_or(f32::MIN));
    let top: Vec<Value> = token.top.iter().map(|other| Value::Object(likely(&other.bytes, other.logprob))).collect();
    entry.insert("top_logprobs".to_owned(), Value::from(top));
    Value::Object(entry)
}

impl Shape {
    pub(super) fn new(dialect: Dialect, asked: &Asked, request: RequestId, created: u64) -> Self {
        let (stream, include_usage, logprobs, token_ids) = (asked.stream, asked.include_usage, asked.logprobs, asked.token_ids);
        Self { dialect, request, created, model: asked.model.clone(), fingerprint: None, stream, include_usage, logprobs, token_ids }
    }

    /// As it travels with the request.
    pub(super) fn to_text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// As it came with the request; none if that was not asked over HTTP.
    pub(super) fn of(request: &GenerateRequest) -> Option<Self> {
        let shape: Self = serde_json::from_str(&request.shape).ok()?;
        Some(Self { request: request.id, ..shape })
    }

    /// The answer's id.
    pub(super) fn id(&self) -> String {
        let prefix = match self.dialect {
            Dialect::Chat => "chatcmpl",
            Dialect::Text => "cmpl",
        };
        format!("{prefix}-{}", self.request)
    }

    fn frame(&self, piece: bool, choices: Value) -> Value {
        let object = match (self.dialect, piece) {
            (Dialect::Chat, true) => "chat.completion.chunk",
            (Dialect::Chat, false) => "chat.completion",
            (Dialect::Text, _) => "text_completion",
        };
        let mut frame = json!({"id": self.id(), "object": object, "created": self.created, "model": self.model, "choices": choices});
        if let Some(fingerprint) = &self.fingerprint {
            frame["system_fingerprint"] = Value::from(fingerprint.as_str());
        }
        if piece && self.include_usage {
            frame["usage"] = Value::Null;
        }
        frame
    }

    fn choice(&self, mut choice: Value, tokens: &[TokenEvent], finish: Option<Finish>) -> Value {
        choice["index"] = Value::from(0);
        choice["finish_reason"] = finish.map_or(Value::Null, |reason| Value::from(finish_reason(reason)));
        choice["logprobs"] = match self.logprobs {
            true => json!({"content": tokens.iter().map(logprob).collect::<Vec<_>>(), "refusal": null}),
            false => Value::Null,
        };
        if self.token_ids {
            choice["token_ids"] = tokens.iter().map(|token| token.token).collect();
        }
        choice
    }

    /// The piece that opens a stream: who speaks. Plain text has none.
    pub(super) fn opening(&self) -> Option<Value> {
        (self.dialect == Dialect::Chat)
            .then(|| self.frame(true, json!([self.choice(json!({"delta": {"role": "assistant", "content": ""}}), &[], None)])))
    }

    /// A piece of text; none if it would say nothing.
    pub(super) fn piece(&self, text: &str, tokens: &[TokenEvent]) -> Option<Value> {
        if text.is_empty() && (tokens.is_empty() || !(self.logprobs || self.token_ids)) {
            return None;
        }
        let choice = match self.dialect {
            Dialect::Chat => json!({"delta": {"content": text}}),
            Dialect::Text => json!({"text": text}),
        };
        Some(self.frame(true, json!([self.choice(choice, tokens, None)])))
    }

    /// The pieces that end a stream: why, and what it took.
    pub(super) fn closing(&self, ended: &Ended) -> Vec<Value> {
        let choice = match self.dialect {
            Dialect::Chat => json!({"delta": {}}),
            Dialect::Text => json!({"text": ""}),
        };
        let mut last = self.frame(true, json!([self.choice(choice, &[], Some(ended.reason))]));
        last["timings"] = ended.timings();
        let mut pieces = vec![last];
        if self.include_usage {
            let mut usage = self.frame(true, json!([]));
            usage["usage"] = ended.usage();
            pieces.push(usage);
        }
        pieces
    }

    /// The whole answer.
    pub(super) fn whole(&self, text: &str, tokens: &[TokenEvent], ended: &Ended) -> Value {
        let choice = match self.dialect {
            Dialect::Chat => json!({"message": {"role": "assistant", "content": text, "refusal": null}}),
            Dialect::Text => json!({"text": text}),
        };
        let mut whole = self.frame(false, json!([self.choice(choice, tokens, Some(ended.reason))]));
        whole["usage"] = ended.usage();
        whole["timings"] = ended.timings();
        whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shoal_actors::request::Likely;

    fn shape(dialect: Dialect) -> Shape {
        Shape {
            dialect,
            request: RequestId(1),
            created: 7,
            model: "m".to_owned(),
            fingerprint: None,
            stream: true,
            include_usage: true,
            logprobs: false,
            token_ids: false,
        }
    }

    const ENDED: Ended = Ended {
        reason: Finish::Length,
        prompt_tokens: 3,
        completion_tokens: 2,
        timing: Timing {
            queued: std::time::Duration::ZERO,
            prefill: std::time::Duration::ZERO,
            decode: std::time::Duration::ZERO,
            cached: 1,
        },
    };

    #[test]
    fn a_stream_has_a_role_text_a_reason_and_the_use() {
        let shape = shape(Dialect::Chat);
        assert_eq!(shape.opening().unwrap()["choices"][0]["delta"]["role"], "assistant");
        let piece = shape.piece("hé", &[]).unwrap();
        assert_eq!((&piece["object"], &piece["usage"]), (&json!("chat.completion.chunk"), &Value::Null));
        assert_eq!(piece["choices"][0], json!({"delta": {"content": "hé"}, "index": 0, "finish_reason": null, "logprobs": null}));
        assert!(shape.piece("", &[]).is_none());
        let closing = shape.closing(&ENDED);
        assert_eq!(closing[0]["choices"][0]["finish_reason"], "length");
        let usage = json!({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}});
        assert_eq!(closing[1]["usage"], usage);
        assert_eq!(closing[1]["choices"], json!([]));
    }

    #[test]
    fn a_shape_travels_with_its_request() {
        let shape = Shape { fingerprint: Some("f".to_owned()), token_ids: true, ..shape(Dialect::Text) };
        let mut request = GenerateRequest {
            id: RequestId(5),
            instance: crate::InstanceId(1),
            prompt: crate::Prompt::Text(String::new()),
            sampling: crate::SamplingParams::default(),
            max_tokens: None,
            stop: Vec::new(),
            ignore_end: false,
            unread: crate::Unread::Wait,
            shape: shape.to_text(),
            client: crate::Client::default(),
            priority: crate::Priority::Normal,
        };
        assert_eq!(Shape::of(&request), Some(Shape { request: RequestId(5), ..shape }));
        request.shape.clear();
        assert_eq!(Shape::of(&request), None);
        assert_eq!(self::shape(Dialect::Chat).id(), "chatcmpl-00000000000000000000000000000001");
    }

    #[test]
    fn probabilities_name_their_tokens() {
        let shape = Shape { logprobs: true, token_ids: true, ..shape(Dialect::Chat) };
        let top = vec![Likely { token: 5, logprob: -0.25, bytes: vec![0xc3] }];
        let token = TokenEvent { index: 0, token: 5, text: String::new(), logprob: Some(-0.25), bytes: vec![0xc3], top };
        let choice = &shape.piece("", std::slice::from_ref(&token)).unwrap()["choices"][0];
        let likely = json!({"token": "\u{fffd}", "logprob": -0.25, "bytes": [0xc3]});
        assert_eq!(choice["logprobs"]["content"][0]["top_logprobs"][0], likely);
        assert_eq!(choice["logprobs"]["content"][0]["bytes"], json!([0xc3]));
        assert_eq!(choice["token_ids"], json!([5]));
        let whole = Shape { dialect: Dialect::Text, logprobs: false, ..shape }.whole("x", &[token], &ENDED);
        assert_eq!((&whole["object"], &whole["choices"][0]["text"]), (&json!("text_completion"), &json!("x")));
    }
}
