//! Chat templates against Python's renderings. `data/chat/render.py` makes those.

#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::{Map, Value};
use shoal_engine::chat::{ChatOptions, ChatTemplate, Message};
use shoal_engine::gguf::Gguf;
use shoal_engine::tokenizer::Tokenizer;

/// A tokenizer whose beginning is `<s>` and whose end is `</s>`.
fn tokenizer() -> Tokenizer {
    let texts = ["<unk>", "<s>", "</s>"];
    let mut pairs = Vec::new();
    let text = |pairs: &mut Vec<u8>, text: &str| {
        pairs.extend((text.len() as u64).to_le_bytes());
        pairs.extend(text.as_bytes());
    };
    text(&mut pairs, "tokenizer.ggml.model");
    pairs.extend(8_u32.to_le_bytes());
    text(&mut pairs, "llama");
    text(&mut pairs, "tokenizer.ggml.tokens");
    pairs.extend([9_u32, 8].map(u32::to_le_bytes).concat());
    pairs.extend(3_u64.to_le_bytes());
    texts.iter().for_each(|token| text(&mut pairs, token));
    text(&mut pairs, "tokenizer.ggml.scores");
    pairs.extend([9_u32, 6].map(u32::to_le_bytes).concat());
    pairs.extend(3_u64.to_le_bytes());
    pairs.extend([0_u8; 12]);
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3_u32.to_le_bytes());
    bytes.extend([0_u64, 3].map(u64::to_le_bytes).concat());
    bytes.extend(pairs);
    Tokenizer::from_gguf(&Gguf::parse(bytes).unwrap()).unwrap()
}

/// A conversation of `conversations.json` as a client would send it: arguments of calls are JSON in strings.
fn request(conversation: &Value) -> (Vec<Message>, ChatOptions) {
    let mut fields: Map<String, Value> = conversation.as_object().unwrap().clone();
    let mut messages = fields.remove("messages").unwrap();
    for message in messages.as_array_mut().unwrap() {
        for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            let arguments = call.pointer_mut("/function/arguments").unwrap();
            *arguments = Value::from(arguments.to_string());
        }
    }
    let options = ChatOptions {
        tools: fields.remove("tools"),
        add_generation_prompt: fields.remove("add_generation_prompt").unwrap().as_bool().unwrap(),
        unix_seconds: Some(1_709_210_096),
        extra: fields,
    };
    (serde_json::from_value(messages).unwrap(), options)
}

#[test]
#[ignore = "set CHAT_TEMPLATES to a folder of templates and CHAT_EXPECTED to what render.py wrote for it"]
fn templates_render_as_in_python() {
    let variable = |name: &str| PathBuf::from(std::env::var_os(name).unwrap_or_else(|| panic!("{name} is not set")));
    let expected: BTreeMap<String, Vec<Value>> = serde_json::from_slice(&std::fs::read(variable("CHAT_EXPECTED")).unwrap()).unwrap();
    let conversations: Vec<Value> = serde_json::from_str(include_str!("data/chat/conversations.json")).unwrap();
    let tokenizer = tokenizer();
    let mut wrong = Vec::new();
    let mut compared = 0;
    for (name, expected) in &expected {
        let source = std::fs::read_to_string(variable("CHAT_TEMPLATES").join(name)).unwrap();
        let template = match ChatTemplate::new(&source, &tokenizer) {
            Ok(template) => template,
            Err(error) => {
                wrong.push(format!("{name}: {error}"));
                continue;
            }
        };
        for (nth, (conversation, expected)) in conversations.iter().zip(expected).enumerate() {
            let (messages, options) = request(conversation);
            let got = template.render(&messages, &options);
            let Some(text) = expected.get("text").and_then(Value::as_str) else { continue };
            compared += 1;
            match got {
                Ok(got) if got == text => {}
                Ok(got) => {
                    let at = got.bytes().zip(text.bytes()).take_while(|(a, b)| a == b).count();
                    let around = |text: &str| {
                        String::from_utf8_lossy(&text.as_bytes()[at.saturating_sub(30)..(at + 50).min(text.len())]).into_owned()
                    };
                    wrong.push(format!("{name} {nth}: {:?}, not {:?}", around(&got), around(text)));
                }
                Err(error) => wrong.push(format!("{name} {nth}: {error}")),
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {compared} differ:\n{}", wrong.len(), wrong.join("\n"));
}
