//! An answer to a question, as commands ask for it over HTTP.

use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::client::{Client, ClientError, Exchange, Told};

/// A question.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) model: String,
    pub(crate) system: Option<String>,
    pub(crate) prompt: String,
    /// Whether the prompt is continued as it stands, without the model's template.
    pub(crate) raw: bool,
    pub(crate) temperature: f32,
    pub(crate) seed: Option<u64>,
    pub(crate) max_tokens: Option<u32>,
}

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Event {
    Text(String),
    End(Summary),
}

/// What an answer took.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub(crate) struct Summary {
    /// Why it ended: `stop` or `length`.
    pub(crate) finish_reason: String,
    pub(crate) prompt_tokens: u64,
    /// Tokens of the answer, as a count.
    pub(crate) tokens: u64,
    pub(crate) token_ids: Vec<u64>,
    pub(crate) prefill_tok_s: Option<f64>,
    pub(crate) decode_tok_s: Option<f64>,
}

/// An answer as it comes.
#[derive(Debug)]
pub(crate) struct Answer {
    events: mpsc::Receiver<Result<Told, ClientError>>,
    summary: Summary,
    ended: bool,
}

/// Figures of an answer, for people.
pub(crate) fn words_of(summary: &Summary) -> String {
    let rate = |rate: Option<f64>| rate.map_or_else(|| "–".to_owned(), super::output::rate);
    format!(
        "prefill {} ({} tokens), decode {} ({} tokens)",
        rate(summary.prefill_tok_s),
        summary.prompt_tokens,
        rate(summary.decode_tok_s),
        summary.tokens
    )
}

impl Asked {
    fn body(&self) -> Value {
        let mut body = json!({
            "model": self.model,
            "temperature": self.temperature,
            "stream": true,
            "stream_options": {"include_usage": true},
            "return_token_ids": true,
        });
        if self.raw {
            body["prompt"] = Value::from(self.prompt.as_str());
        } else {
            let system = self.system.as_ref().map(|text| json!({"role": "system", "content": text}));
            let user = json!({"role": "user", "content": self.prompt});
            body["messages"] = system.into_iter().chain([user]).collect();
        }
        if let Some(seed) = self.seed {
            body["seed"] = Value::from(seed);
        }
        if let Some(most) = self.max_tokens {
            body["max_tokens"] = Value::from(most);
        }
        body
    }

    /// Asks.
    pub(crate) async fn ask(&self, client: &Client) -> Result<Answer, ClientError> {
        let path = if self.raw { "/v1/completions" } else { "/v1/chat/completions" };
        let events = client.events(Exchange { path: path.to_owned(), body: Some(self.body()), headers: Vec::new() }).await?;
        Ok(Answer { events, summary: Summary::default(), ended: false })
    }
}

impl Answer {
    /// The next piece; none after the end.
    pub(crate) async fn next(&mut self) -> Option<Result<Event, ClientError>> {
        while !self.ended {
            match self.events.recv().await {
                Some(Ok(told)) => {
                    if let Some(text) = self.take(&told.data) {
                        return Some(Ok(Event::Text(text)));
                    }
                }
                Some(Err(error)) => {
                    self.ended = true;
                    return Some(Err(error));
                }
                None => {
                    self.ended = true;
                    return Some(Ok(Event::End(std::mem::take(&mut self.summary))));
                }
            }
        }
        None
    }

    fn take(&mut self, value: &Value) -> Option<String> {
        let summary = &mut self.summary;
        if let Some(usage) = value.get("usage").filter(|usage| usage.is_object()) {
            let count = |name: &str| usage.get(name).and_then(Value::as_u64).unwrap_or(0);
            (summary.prompt_tokens, summary.tokens) = (count("prompt_tokens"), count("completion_tokens"));
        }
        if let Some(timings) = value.get("timings") {
            let figure = |name: &str| timings.get(name).and_then(Value::as_f64);
            (summary.prefill_tok_s, summary.decode_tok_s) = (figure("prefill_tok_s"), figure("decode_tok_s"));
        }
        let choice = value.pointer("/choices/0")?;
        if let Some(reason) = choice.get("finish_reason").and_then(Value::as_str) {
            summary.finish_reason = reason.to_owned();
        }
        summary.token_ids.extend(choice.get("token_ids").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_u64));
        let text = choice.pointer("/delta/content").or_else(|| choice.get("text")).and_then(Value::as_str)?;
        (!text.is_empty()).then(|| text.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stream_becomes_text_and_a_summary() {
        let (send, events) = mpsc::channel(8);
        for value in [
            json!({"choices": [{"delta": {"role": "assistant", "content": ""}, "token_ids": []}], "usage": null}),
            json!({"choices": [{"delta": {"content": "hé"}, "token_ids": [5]}]}),
            json!({"choices": [{"delta": {}, "finish_reason": "length"}], "timings": {"prefill_tok_s": 7.5, "decode_tok_s": null}}),
            json!({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}),
        ] {
            send.send(Ok(Told { id: None, data: value })).await.expect("room");
        }
        drop(send);
        let mut answer = Answer { events, summary: Summary::default(), ended: false };
        assert_eq!(answer.next().await, Some(Ok(Event::Text("hé".to_owned()))));
        let summary = Summary {
            finish_reason: "length".to_owned(),
            prompt_tokens: 3,
            tokens: 1,
            token_ids: vec![5],
            prefill_tok_s: Some(7.5),
            decode_tok_s: None,
        };
        assert_eq!(answer.next().await, Some(Ok(Event::End(summary.clone()))));
        assert_eq!(answer.next().await, None);
        assert_eq!(words_of(&summary), "prefill 7.50 tok/s (3 tokens), decode – (1 tokens)");
    }

    #[test]
    fn what_was_not_given_is_not_asked() {
        let asked = Asked {
            model: "m".to_owned(),
            system: Some("be brief".to_owned()),
            prompt: "hi".to_owned(),
            raw: false,
            temperature: 0.0,
            seed: None,
            max_tokens: None,
        };
        let body = asked.body();
        assert_eq!(body["messages"][0], json!({"role": "system", "content": "be brief"}));
        assert!(body.get("seed").is_none() && body.get("max_tokens").is_none());
        let raw = Asked { raw: true, system: None, seed: Some(u64::MAX), ..asked }.body();
        assert_eq!((&raw["prompt"], raw.get("messages"), raw["seed"].as_u64()), (&json!("hi"), None, Some(u64::MAX)));
    }
}
