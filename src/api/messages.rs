//! The messages of a chat completion. As with parameters, each key is honoured or refused by name.
//!
//! Text goes to the model's template as the message's content, and `name`, `tool_calls` and `tool_call_id` beside it, for
//! templates that have a place for them. A `refusal` is what the assistant said, so it is content; the older
//! `function_call` is a tool call.

use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::fields::{missing, wrong};
use crate::ChatMessage;

/// Reads `messages`.
pub(super) fn messages(value: Value) -> Result<Vec<ChatMessage>, ApiError> {
    let Value::Array(list) = value else { return Err(wrong("messages", "a list", &value)) };
    if list.is_empty() {
        return Err(ApiError::parameter("messages", "`messages` is empty"));
    }
    list.into_iter().enumerate().map(|(index, value)| message(&format!("messages[{index}]"), value)).collect()
}

/// An object within a message, whose keys are taken one by one.
struct Object {
    place: String,
    map: Map<String, Value>,
}

impl Object {
    fn read(place: String, value: Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { place, map }),
            other => Err(wrong(&place, "an object", &other)),
        }
    }

    fn at(&self, key: &str) -> String {
        format!("{}.{key}", self.place)
    }

    /// Takes a key; `null` counts as absent.
    fn take(&mut self, key: &str) -> Option<Value> {
        self.map.shift_remove(key).filter(|value| !value.is_null())
    }

    fn string(&mut self, key: &str) -> Result<Option<String>, ApiError> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(&self.at(key), "a string", &other)),
        }
    }

    fn required_string(&mut self, key: &str) -> Result<String, ApiError> {
        self.string(key)?.ok_or_else(|| missing(&self.at(key)))
    }

    /// Everything must have been taken by now.
    fn finish(self, what: &str) -> Result<(), ApiError> {
        match self.map.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((key, _)) => {
                let name = self.at(key);
                let error = ApiError::parameter(name.clone(), format!("`{name}` is not a part of {what}"));
                Err(ApiError { code: Some("unknown_parameter"), ..error })
            }
        }
    }
}

fn message(place: &str, value: Value) -> Result<ChatMessage, ApiError> {
    let mut given = Object::read(place.to_owned(), value)?;
    let role = given.required_string("role")?;
    let role = match role.as_str() {
        // Newer clients call the system's message the developer's.
        "developer" => "system".to_owned(),
        "system" | "user" | "assistant" | "tool" | "function" => role,
        _ => {
            let name = given.at("role");
            let message = format!("`{name}` is `{role}`; it must be system, developer, user, assistant, tool or function");
            return Err(ApiError::parameter(name, message));
        }
    };
    let mut content = given.take("content").map(|value| self::content(&given.at("content"), value)).transpose()?;
    let mut extra = Map::new();
    match role.as_str() {
        "tool" => drop(extra.insert("tool_call_id".to_owned(), given.required_string("tool_call_id")?.into())),
        _ => drop(given.string("name")?.map(|name| extra.insert("name".to_owned(), name.into()))),
    }
    if role == "assistant" {
        if let Some(refusal) = given.string("refusal")?
            && content.replace(refusal).is_some()
        {
            let name = given.at("refusal");
            let message = format!("`{name}` cannot be beside `content`; give what the assistant said in one of them");
            return Err(ApiError::parameter(name, message));
        }
        if given.take("audio").is_some() {
            let name = given.at("audio");
            return Err(ApiError::unsupported(name.clone(), format!("`{name}` is not supported; send text")));
        }
        if let Some(calls) = tool_calls(&mut given)? {
            extra.insert("tool_calls".to_owned(), calls);
        }
        if content.is_none() && !extra.contains_key("tool_calls") {
            return Err(missing(&given.at("content")));
        }
    } else if content.is_none() {
        return Err(missing(&given.at("content")));
    }
    given.finish(&format!("a message of the role {role}"))?;
    let extra = if extra.is_empty() { String::new() } else { Value::Object(extra).to_string() };
    Ok(ChatMessage { role, content, extra })
}

/// What an assistant called, in the form that templates know.
fn tool_calls(message: &mut Object) -> Result<Option<Value>, ApiError> {
    let place = message.at("tool_calls");
    let old = message.take("function_call").map(|call| function(message.at("function_call"), call)).transpose()?;
    let calls = match message.take("tool_calls") {
        None => return Ok(old.map(|function| json!([{"type": "function", "function": function}]))),
        Some(Value::Array(calls)) => calls,
        Some(other) => return Err(wrong(&place, "a list", &other)),
    };
    if old.is_some() {
        let name = message.at("function_call");
        return Err(ApiError::parameter(name.clone(), format!("`{name}` cannot be beside `tool_calls`; give one of them")));
    }
    let read = |(index, call): (usize, Value)| {
        let mut call = Object::read(format!("{place}[{index}]"), call)?;
        let id = call.required_string("id")?;
        let (kind, at) = (call.required_string("type")?, call.at("type"));
        if kind != "function" {
            return Err(ApiError::unsupported(at.clone(), format!("`{at}` is `{kind}`; it can only be \"function\" here")));
        }
        let called = call.take("function").ok_or_else(|| missing(&call.at("function")))?;
        let function = function(call.at("function"), called)?;
        call.finish("a tool call")?;
        Ok(json!({"id": id, "type": kind, "function": function}))
    };
    let calls: Vec<Value> = calls.into_iter().enumerate().map(read).collect::<Result<_, _>>()?;
    Ok((!calls.is_empty()).then(|| Value::Array(calls)))
}

fn function(place: String, value: Value) -> Result<Value, ApiError> {
    let mut given = Object::read(place, value)?;
    let (name, arguments) = (given.required_string("name")?, given.required_string("arguments")?);
    given.finish("a function call")?;
    Ok(json!({"name": name, "arguments": arguments}))
}

fn content(place: &str, value: Value) -> Result<String, ApiError> {
    let parts = match value {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        other => return Err(wrong(place, "a string or a list of parts", &other)),
    };
    let mut whole = String::new();
    for (index, part) in parts.into_iter().enumerate() {
        let mut part = Object::read(format!("{place}[{index}]"), part)?;
        let kind = part.required_string("type")?;
        if !matches!(kind.as_str(), "text" | "refusal") {
            let place = part.place;
            let message = format!("`{place}` is of type `{kind}`, which is not supported; send text");
            return Err(ApiError::unsupported(place, message));
        }
        whole.push_str(&part.required_string(&kind)?);
        part.finish(&format!("a part of the type {kind}"))?;
    }
    Ok(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(message: Value) -> Result<ChatMessage, ApiError> {
        super::message("messages[0]", message)
    }

    #[test]
    fn messages_in_their_forms() {
        let parts = json!({"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]});
        assert_eq!(read(parts).unwrap(), ChatMessage::new("system", "ab"));
        let named = read(json!({"role": "user", "content": "hi", "name": "ann"})).unwrap();
        assert_eq!((named.content.as_deref(), named.extra.as_str()), (Some("hi"), r#"{"name":"ann"}"#));
        let function = json!({"name": "f", "arguments": "{}"});
        let calls = json!([{"id": "1", "type": "function", "function": function}]);
        let call =
            json!({"role": "assistant", "content": null, "tool_calls": calls, "refusal": null, "audio": null, "function_call": null});
        let call = read(call).unwrap();
        assert_eq!((call.content, call.extra), (None, json!({"tool_calls": calls}).to_string()));
        let old = read(json!({"role": "assistant", "function_call": function})).unwrap();
        assert_eq!(old.extra, json!({"tool_calls": [{"type": "function", "function": function}]}).to_string());
        let result = read(json!({"role": "tool", "content": "42", "tool_call_id": "1"})).unwrap();
        assert_eq!(result.extra, r#"{"tool_call_id":"1"}"#);
        let refused = read(json!({"role": "assistant", "refusal": "I cannot.", "tool_calls": []})).unwrap();
        assert_eq!(refused, ChatMessage::new("assistant", "I cannot."));
        let refused = read(json!({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]})).unwrap();
        assert_eq!(refused, ChatMessage::new("assistant", "No."));
    }

    #[test]
    fn what_is_not_honoured_is_refused_by_name() {
        let call = |extra: Value| {
            let mut call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
            call.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            json!({"role": "assistant", "tool_calls": [call]})
        };
        let table = [
            (json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}), "messages[0].content[0]"),
            (json!({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}), "messages[0].content[0]"),
            (
                json!({"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}),
                "messages[0].content[0].cache_control",
            ),
            (json!({"role": "user", "content": ["a"]}), "messages[0].content[0]"),
            (json!({"role": "user", "content": [{"type": "text"}]}), "messages[0].content[0].text"),
            (json!({"role": "user"}), "messages[0].content"),
            (json!({"role": "assistant"}), "messages[0].content"),
            (json!({"role": "pirate", "content": "arr"}), "messages[0].role"),
            (json!({"role": "user", "content": "a", "nmae": "x"}), "messages[0].nmae"),
            (json!({"role": "user", "content": "a", "name": 5}), "messages[0].name"),
            (json!({"role": "user", "content": "a", "tool_calls": []}), "messages[0].tool_calls"),
            (json!({"role": "user", "content": "a", "tool_call_id": "1"}), "messages[0].tool_call_id"),
            (json!({"role": "user", "content": "a", "refusal": "x"}), "messages[0].refusal"),
            (json!({"role": "tool", "content": "a"}), "messages[0].tool_call_id"),
            (json!({"role": "tool", "content": "a", "tool_call_id": "1", "name": "f"}), "messages[0].name"),
            (json!({"role": "assistant", "content": "a", "refusal": "b"}), "messages[0].refusal"),
            (json!({"role": "assistant", "content": "a", "audio": {"id": "x"}}), "messages[0].audio"),
            (json!({"role": "assistant", "content": "a", "reasoning_content": "x"}), "messages[0].reasoning_content"),
            (json!({"role": "assistant", "tool_calls": "f"}), "messages[0].tool_calls"),
            (json!({"role": "assistant", "tool_calls": [{"id": "1"}]}), "messages[0].tool_calls[0].type"),
            (call(json!({"type": "custom"})), "messages[0].tool_calls[0].type"),
            (call(json!({"index": 0})), "messages[0].tool_calls[0].index"),
            (call(json!({"function": {"name": "f"}})), "messages[0].tool_calls[0].function.arguments"),
            (call(json!({"function": {"name": "f", "arguments": "", "x": 1}})), "messages[0].tool_calls[0].function.x"),
        ];
        for (message, param) in table {
            let error = read(message.clone()).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{message}");
            assert!(error.message.contains(param), "{message}: {}", error.message);
        }
    }
}
