//! Messages as clients send them.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

/// One message of a conversation. Reads the form of OpenAI's API.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Message {
    /// Whose: `system`, `user`, `assistant`, `tool`, or what else the template knows.
    pub role: String,
    /// The text. Absent in messages that only call tools. A list of text parts is read as their concatenation.
    #[serde(default, deserialize_with = "content")]
    pub content: Option<String>,
    /// Everything else, handed to the template as it is: `name`, `tool_calls`, `tool_call_id`, `reasoning_content`.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Message {
    /// A message of text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: Some(content.into()), other: Map::new() }
    }

    /// As templates expect it. Clients send the arguments of a call as JSON in a string; most templates want the
    /// object that it holds, some the string.
    pub(crate) fn for_template(&self, arguments_as_objects: bool) -> Value {
        let mut fields = Map::new();
        fields.insert("role".to_owned(), Value::from(self.role.as_str()));
        fields.insert("content".to_owned(), self.content.as_deref().map_or(Value::Null, Value::from));
        for (key, value) in &self.other {
            let mut value = value.clone();
            if arguments_as_objects && key == "tool_calls" {
                value.as_array_mut().into_iter().flatten().for_each(read_arguments);
            }
            fields.insert(key.clone(), value);
        }
        Value::Object(fields)
    }

    /// Whether it calls tools.
    pub(crate) fn calls_tools(&self) -> bool {
        self.other.get("tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty())
    }
}

fn read_arguments(call: &mut Value) {
    for place in ["/function/arguments", "/arguments"] {
        if let Some(arguments) = call.pointer_mut(place)
            && let Some(text) = arguments.as_str()
            && let Ok(object @ Value::Object(_)) = serde_json::from_str::<Value>(text)
        {
            *arguments = object;
        }
    }
}

fn content<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let parts = match Value::deserialize(deserializer)? {
        Value::Null => return Ok(None),
        Value::String(text) => return Ok(Some(text)),
        Value::Array(parts) => parts,
        _ => return Err(serde::de::Error::custom("`content` must be a string or a list of parts")),
    };
    let mut whole = String::new();
    for part in &parts {
        match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
            (Some("text" | "input_text" | "output_text") | None, Some(text)) => whole.push_str(text),
            (Some(kind), _) if kind != "text" => {
                return Err(serde::de::Error::custom(format!("content of type `{kind}` is not supported; send text")));
            }
            _ => return Err(serde::de::Error::custom("a part of `content` has no `text`")),
        }
    }
    Ok(Some(whole))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(value: Value) -> Result<Message, String> {
        serde_json::from_value(value).map_err(|error| error.to_string())
    }

    #[test]
    fn content_in_its_forms() {
        assert_eq!(read(json!({"role": "user", "content": "hi"})), Ok(Message::new("user", "hi")));
        assert_eq!(read(json!({"role": "assistant", "content": null})).unwrap().content, None);
        assert_eq!(read(json!({"role": "assistant"})).unwrap().content, None);
        let parts = json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]});
        assert_eq!(read(parts).unwrap().content.as_deref(), Some("ab"));
        let image = json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]});
        assert!(read(image).unwrap_err().contains("`image_url` is not supported"));
        assert!(read(json!({"role": "user", "content": 5})).unwrap_err().contains("string or a list"));
        assert!(read(json!({"role": "user", "content": [{}]})).unwrap_err().contains("no `text`"));
    }

    #[test]
    fn arguments_become_objects_on_request() {
        let call = json!({"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{\"b\":1,\"a\":2}"}}]});
        let message = read(call).unwrap();
        assert!(message.calls_tools());
        let as_object = message.for_template(true);
        assert_eq!(as_object.pointer("/tool_calls/0/function/arguments").unwrap().to_string(), r#"{"b":1,"a":2}"#);
        let as_text = message.for_template(false);
        assert!(as_text.pointer("/tool_calls/0/function/arguments").unwrap().is_string());
        assert_eq!(as_object.get("content"), Some(&Value::Null));
    }
}
