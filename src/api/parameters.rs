//! What a request for text asks, checked: each parameter of OpenAI's interface is honoured or refused by name.

use std::collections::BTreeMap;

use serde_json::Value;

use super::error::ApiError;
use super::fields::{Fields, missing, wrong};
use super::messages::messages;
use crate::{GenerateOptions, Priority, Prompt, SamplingParams};

/// Most stop strings of a request.
const STOPS_MAX: usize = 4;
/// Most likely tokens that can be asked for.
const TOP_LOGPROBS_MAX: u32 = 20;
/// Most pairs of `metadata`.
const METADATA_MAX: usize = 16;

/// A request for text.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) model: String,
    pub(super) options: GenerateOptions,
    /// Whether a seed was given; if not, one is drawn.
    pub(super) seeded: bool,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    pub(super) logprobs: bool,
    pub(super) token_ids: bool,
    /// Whether it goes on when the client goes.
    pub(super) background: bool,
    /// Which of its users a client asks for.
    pub(super) user: Option<String>,
}

/// Reads the body of a chat completion.
pub(super) fn chat(mut fields: Fields) -> Result<Asked, ApiError> {
    let messages = messages(fields.take("messages").ok_or_else(|| missing("messages"))?)?;
    refuse_chat_only(&mut fields)?;
    let logprobs = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0, TOP_LOGPROBS_MAX)?;
    if top.is_some() && !logprobs {
        return Err(ApiError::parameter("top_logprobs", "`top_logprobs` needs `logprobs`: true"));
    }
    let longest = fields.integer("max_completion_tokens", 1, u32::MAX)?;
    let prompt = Prompt::Chat { messages, tools: String::new() };
    let mut asked = common(&mut fields, prompt, longest)?;
    if logprobs {
        asked.logprobs = true;
        asked.options.sampling.logprobs = Some(u8::try_from(top.unwrap_or(0)).unwrap_or(u8::MAX));
    }
    fields.finish("chat completions")?;
    Ok(asked)
}

/// Reads the body of a plain completion.
pub(super) fn text(mut fields: Fields) -> Result<Asked, ApiError> {
    let prompt = plain_prompt(fields.take("prompt").ok_or_else(|| missing("prompt"))?)?;
    only(&mut fields, "echo", &[Value::Bool(false)])?;
    only(&mut fields, "best_of", &[Value::from(1)])?;
    only(&mut fields, "suffix", &[])?;
    only(&mut fields, "logprobs", &[])?;
    let asked = common(&mut fields, prompt, None)?;
    fields.finish("completions")?;
    Ok(asked)
}

/// What both have.
fn common(fields: &mut Fields, prompt: Prompt, longest: Option<u32>) -> Result<Asked, ApiError> {
    let model = fields.required_string("model")?;
    only(fields, "n", &[Value::from(1)])?;
    let mut options = GenerateOptions::new(prompt);
    let max_tokens = fields.integer("max_tokens", 1, u32::MAX)?;
    if let (Some(one), Some(other)) = (max_tokens, longest)
        && one != other
    {
        return Err(ApiError::parameter("max_tokens", "`max_tokens` and `max_completion_tokens` differ; give one of them"));
    }
    options.max_tokens = max_tokens.or(longest);
    options.stop = stops(fields)?;
    options.ignore_end = fields.boolean("ignore_eos")?.unwrap_or(false);
    let seed = seed(fields)?;
    let plain = SamplingParams::default();
    options.sampling = SamplingParams {
        temperature: fields.number("temperature", 0.0, 2.0)?.unwrap_or(plain.temperature),
        top_p: fields.number("top_p", 0.0, 1.0)?.unwrap_or(plain.top_p),
        top_k: fields.integer("top_k", 0, u32::MAX)?.unwrap_or(plain.top_k),
        min_p: fields.number("min_p", 0.0, 1.0)?.unwrap_or(plain.min_p),
        repetition_penalty: fields.number("repetition_penalty", 0.01, 100.0)?.unwrap_or(plain.repetition_penalty),
        presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?.unwrap_or(plain.presence_penalty),
        frequency_penalty: fields.number("frequency_penalty", -2.0, 2.0)?.unwrap_or(plain.frequency_penalty),
        logit_bias: logit_bias(fields)?,
        seed: seed.unwrap_or(0),
        logprobs: None,
    };
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let include_usage = stream_options(fields, stream)?;
    let user = labels(fields)?;
    options.priority = priority(fields)?;
    let token_ids = fields.boolean("return_token_ids")?.unwrap_or(false);
    let background = fields.boolean("background")?.unwrap_or(false);
    Ok(Asked { model, options, seeded: seed.is_some(), stream, include_usage, logprobs: false, token_ids, background, user })
}

/// Refuses a field unless it has one of the values under which it changes nothing.
fn only(fields: &mut Fields, name: &str, accepted: &[Value]) -> Result<(), ApiError> {
    match fields.take(name) {
        None => Ok(()),
        Some(value) if accepted.contains(&value) => Ok(()),
        Some(_) if accepted.is_empty() => Err(ApiError::unsupported(name, format!("`{name}` is not supported; leave it out"))),
        Some(_) => {
            let words: Vec<String> = accepted.iter().map(Value::to_string).collect();
            Err(ApiError::unsupported(name, format!("`{name}` can only be {} here, or be left out", words.join(" or "))))
        }
    }
}

/// Parameters that this version does not honour are refused, unless what they say changes nothing.
fn refuse_chat_only(fields: &mut Fields) -> Result<(), ApiError> {
    let text = |word: &str| Value::from(word);
    only(fields, "audio", &[])?;
    only(fields, "modalities", &[Value::from(vec!["text"])])?;
    only(fields, "prediction", &[])?;
    only(fields, "web_search_options", &[])?;
    only(fields, "reasoning_effort", &[text("none")])?;
    only(fields, "verbosity", &[text("medium")])?;
    only(fields, "functions", &[Value::Array(Vec::new())])?;
    only(fields, "function_call", &[text("none")])?;
    response_format(fields)?;
    // Without tools to call there is nothing that could happen in parallel.
    fields.boolean("parallel_tool_calls")?;
    tools(fields)
}

fn tools(fields: &mut Fields) -> Result<(), ApiError> {
    let tools = match fields.take("tools") {
        None => false,
        Some(Value::Array(tools)) => !tools.is_empty(),
        Some(other) => return Err(wrong("tools", "a list", &other)),
    };
    match fields.take("tool_choice") {
        // They are on the table and must not be used.
        Some(Value::String(choice)) if choice == "none" => Ok(()),
        Some(Value::String(choice)) if choice == "auto" && !tools => Ok(()),
        None if !tools => Ok(()),
        Some(_) if !tools => {
            Err(ApiError::unsupported("tool_choice", "`tool_choice` can only be \"none\" or \"auto\" where there are no `tools`"))
        }
        _ => Err(ApiError::unsupported("tools", "calling `tools` is not supported; leave them out, or set `tool_choice` to \"none\"")),
    }
}

fn response_format(fields: &mut Fields) -> Result<(), ApiError> {
    match fields.take("response_format") {
        None => Ok(()),
        Some(Value::Object(format)) if format.len() == 1 && format.get("type") == Some(&Value::from("text")) => Ok(()),
        Some(Value::Object(_)) => Err(ApiError::unsupported("response_format", "`response_format` can only be {\"type\": \"text\"}")),
        Some(other) => Err(wrong("response_format", "an object", &other)),
    }
}

/// How urgent a request is: as vLLM has it in `priority`, where less comes first, or by OpenAI's `service_tier`.
fn priority(fields: &mut Fields) -> Result<Priority, ApiError> {
    let number = match fields.take("priority") {
        None => None,
        Some(value) => match value.as_i64() {
            Some(number) => Some(if number < 0 {
                Priority::High
            } else if number > 0 {
                Priority::Low
            } else {
                Priority::Normal
            }),
            None => return Err(wrong("priority", "a whole number: 0 as usual, less to go first, more to wait", &value)),
        },
    };
    let tier = match fields.string("service_tier")?.as_deref() {
        None => None,
        Some("auto" | "default") => Some(Priority::Normal),
        Some("flex") => Some(Priority::Low),
        Some("priority") => Some(Priority::High),
        Some(other) => {
            let message = format!("`service_tier` is `{other}`; it must be auto, default, flex or priority");
            return Err(ApiError::parameter("service_tier", message));
        }
    };
    match (number, tier) {
        (Some(number), Some(tier)) if number != tier => {
            Err(ApiError::parameter("priority", "`priority` and `service_tier` differ; give one of them"))
        }
        (number, tier) => Ok(number.or(tier).unwrap_or_default()),
    }
}

/// What clients note for themselves: checked, and without effect on the answer. Gives the user that a client asks for, which counts
/// where its share is divided.
fn labels(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let user = fields.string("user")?;
    let other = fields.string("safety_identifier")?;
    fields.string("prompt_cache_key")?;
    let user = user.or(other);
    only(fields, "prompt_cache_retention", &[Value::from("in_memory"), Value::from("in-memory")])?;
    only(fields, "store", &[Value::Bool(false)])?;
    match fields.take("metadata") {
        None => Ok(user),
        Some(Value::Object(pairs)) if pairs.len() > METADATA_MAX => {
            Err(ApiError::parameter("metadata", format!("`metadata` has {} pairs; at most {METADATA_MAX} are possible", pairs.len())))
        }
        Some(Value::Object(pairs)) => match pairs.iter().find(|(_, value)| !value.is_string()) {
            None => Ok(user),
            Some((name, value)) => Err(wrong(&format!("metadata.{name}"), "a string", value)),
        },
        Some(other) => Err(wrong("metadata", "an object", &other)),
    }
}

fn stream_options(fields: &mut Fields, stream: bool) -> Result<bool, ApiError> {
    let Some(options) = fields.take("stream_options") else { return Ok(false) };
    if !stream {
        return Err(ApiError::parameter("stream_options", "`stream_options` needs `stream`: true"));
    }
    let Value::Object(map) = options else { return Err(wrong("stream_options", "an object", &options)) };
    let mut options = Fields::from_value(Value::Object(map))?;
    let include_usage = options.boolean("include_usage")?.unwrap_or(false);
    // Padding that hides the length of tokens from whoever watches an encrypted line.
    only(&mut options, "include_obfuscation", &[Value::Bool(false)])?;
    options.finish("`stream_options`")?;
    Ok(include_usage)
}

fn stops(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let stops = match fields.take("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(stops)) => stops
            .into_iter()
            .map(|stop| match stop {
                Value::String(stop) => Ok(stop),
                other => Err(wrong("stop", "a string or a list of strings", &other)),
            })
            .collect::<Result<_, _>>()?,
        Some(other) => return Err(wrong("stop", "a string or a list of strings", &other)),
    };
    if stops.len() > STOPS_MAX {
        return Err(ApiError::parameter("stop", format!("`stop` has {} texts; at most {STOPS_MAX} are possible", stops.len())));
    }
    if stops.iter().any(String::is_empty) {
        return Err(ApiError::parameter("stop", "`stop` has an empty text"));
    }
    Ok(stops)
}

fn seed(fields: &mut Fields) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.take("seed") else { return Ok(None) };
    let number = value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
    number.map(Some).ok_or_else(|| wrong("seed", "a whole number of 64 bits", &value))
}

fn logit_bias(fields: &mut Fields) -> Result<BTreeMap<u32, f32>, ApiError> {
    let map = match fields.take("logit_bias") {
        None => return Ok(BTreeMap::new()),
        Some(Value::Object(map)) => map,
        Some(other) => return Err(wrong("logit_bias", "an object from token ids to numbers", &other)),
    };
    let mut biases = BTreeMap::new();
    for (token, bias) in map {
        let id: u32 =
            token.parse().map_err(|_| ApiError::parameter("logit_bias", format!("`logit_bias` has `{token}`, which is no token id")))?;
        let number = bias.as_f64().ok_or_else(|| wrong(&format!("logit_bias.{token}"), "a number", &bias))?;
        if !(-100.0..=100.0).contains(&number) {
            return Err(ApiError::parameter("logit_bias", format!("`logit_bias` of token {id} is {number}; it must be from -100 to 100")));
        }
        biases.insert(id, number as f32);
    }
    Ok(biases)
}

fn plain_prompt(prompt: Value) -> Result<Prompt, ApiError> {
    let wanted = "a string or a list of token ids";
    match prompt {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(mut items) if items.len() == 1 && items[0].is_string() => plain_prompt(items.remove(0)),
        Value::Array(items) if items.iter().all(Value::is_number) && !items.is_empty() => items
            .iter()
            .map(|item| item.as_u64().and_then(|token| u32::try_from(token).ok()).ok_or_else(|| wrong("prompt", wanted, item)))
            .collect::<Result<_, _>>()
            .map(Prompt::Tokens),
        Value::Array(items) if items.len() > 1 => Err(ApiError::unsupported("prompt", "only one `prompt` is possible in a request")),
        other => Err(wrong("prompt", wanted, &other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(extra: Value) -> Result<Asked, ApiError> {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        for (name, value) in extra.as_object().unwrap() {
            body[name] = value.clone();
        }
        chat(Fields::from_value(body).unwrap())
    }

    #[test]
    fn everything_that_is_honoured_arrives() {
        let asked = read(json!({
            "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": -1, "frequency_penalty": 2,
            "logit_bias": {"42": -100, "7": 0.5}, "seed": -1, "max_completion_tokens": 9, "stop": ["a", "b"], "stream": true,
            "stream_options": {"include_usage": true, "include_obfuscation": false}, "logprobs": true, "top_logprobs": 3, "n": 1, "user": "u",
            "metadata": {"a": "b"}, "store": false, "tools": [], "tool_choice": "none", "response_format": {"type": "text"},
            "modalities": ["text"], "service_tier": "auto", "parallel_tool_calls": true, "ignore_eos": true, "return_token_ids": true, "background": true, "audio": null,
        }))
        .unwrap();
        let expected = SamplingParams {
            temperature: 0.5,
            top_p: 0.9,
            top_k: 7,
            min_p: 0.1,
            repetition_penalty: 1.1,
            presence_penalty: -1.0,
            frequency_penalty: 2.0,
            logit_bias: [(42, -100.0), (7, 0.5)].into(),
            seed: u64::MAX,
            logprobs: Some(3),
        };
        assert_eq!(asked.options.sampling, expected);
        assert_eq!(asked.options.max_tokens, Some(9));
        assert_eq!(asked.options.stop, ["a", "b"]);
        assert!(
            asked.options.ignore_end
                && asked.seeded
                && asked.stream
                && asked.include_usage
                && asked.logprobs
                && asked.token_ids
                && asked.background
        );
        let plain = read(json!({})).unwrap();
        assert_eq!(plain.options.sampling, SamplingParams::default());
        assert!(!plain.seeded && !plain.stream);
    }

    #[test]
    fn urgency_has_two_names() {
        let priority = |extra: Value| read(extra).map(|asked| asked.options.priority);
        for (extra, expected) in [
            (json!({}), Priority::Normal),
            (json!({"priority": -5}), Priority::High),
            (json!({"priority": 0}), Priority::Normal),
            (json!({"priority": 1}), Priority::Low),
            (json!({"service_tier": "flex"}), Priority::Low),
            (json!({"service_tier": "priority"}), Priority::High),
            (json!({"service_tier": "default", "priority": 0}), Priority::Normal),
        ] {
            assert_eq!(priority(extra.clone()).unwrap(), expected, "{extra}");
        }
        assert_eq!(priority(json!({"service_tier": "flex", "priority": -1})).unwrap_err().param.as_deref(), Some("priority"));
        assert_eq!(read(json!({"user": "a", "safety_identifier": "b"})).unwrap().user.as_deref(), Some("a"));
        assert_eq!(read(json!({"safety_identifier": "b"})).unwrap().user.as_deref(), Some("b"));
    }

    #[test]
    fn plain_prompts() {
        let read =
            |prompt: Value| text(Fields::from_value(json!({"model": "m", "prompt": prompt})).unwrap()).map(|asked| asked.options.prompt);
        assert_eq!(read(json!("a")).unwrap(), Prompt::Text("a".to_owned()));
        assert_eq!(read(json!(["a"])).unwrap(), Prompt::Text("a".to_owned()));
        assert_eq!(read(json!([1, 2])).unwrap(), Prompt::Tokens(vec![1, 2]));
        for bad in [json!(["a", "b"]), json!([-1]), json!([1.5]), json!(7), json!([])] {
            assert_eq!(read(bad.clone()).unwrap_err().param.as_deref(), Some("prompt"), "{bad}");
        }
    }
}
