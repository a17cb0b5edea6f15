//! A conversation as the text that a model was trained to continue.
//!
//! Models carry a Jinja template that Hugging Face's library would run in Python. It is run here with the functions
//! and habits those templates expect: Python's methods on strings, lists and dicts, `tojson` as Python writes it,
//! `raise_exception`, `strftime_now`, and blocks that leave no blank lines behind.
//!
//! A template comes from a model file, so it is not trusted: it sees nothing but the conversation, and how much it can
//! do is bounded.

mod date;
mod error;
mod json;
mod known;
mod message;
mod python;

use std::sync::Arc;

use minijinja::value::{Kwargs, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior};
use serde_json::{Map, Value as Json};

pub use error::ChatError;
pub use message::Message;

use crate::gguf::Gguf;
use crate::tokenizer::Tokenizer;

/// The only template of an environment.
const NAME: &str = "chat";
/// Deepest nesting of macros and includes.
const RECURSION_MAX: usize = 100;
/// Most steps of the template's program. A turn takes some hundred; the longest conversations stay below a million.
const STEPS_MAX: u64 = 20_000_000;

/// What a template is asked for besides the messages.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatOptions {
    /// The tools that the model may call: a list in the form of OpenAI's API.
    pub tools: Option<Json>,
    /// Whether the text ends where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// The time in seconds since 1970, UTC, for templates that tell the model the date. Without it they say what they
    /// say where no clock is known.
    pub unix_seconds: Option<i64>,
    /// Further variables, e.g. `enable_thinking`. They cannot replace the ones above.
    pub extra: Map<String, Json>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self { tools: None, add_generation_prompt: true, unix_seconds: None, extra: Map::new() }
    }
}

/// A model's chat template. Clones share it.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    bos: String,
    eos: String,
    assumed: Option<&'static str>,
}

impl ChatTemplate {
    /// The template of `file`. A file without one gets the format whose markers are in its vocabulary, if there is
    /// one; [`Self::assumed_format`] then names it.
    ///
    /// # Errors
    /// [`ChatError::NoTemplate`] or [`ChatError::Template`].
    pub fn from_gguf(file: &Gguf, tokenizer: &Tokenizer) -> Result<Self, ChatError> {
        if let Some(source) = file.str("tokenizer.chat_template") {
            return Self::new(source, tokenizer);
        }
        let Some((name, source)) = known::format_of(tokenizer) else {
            let model = file.str("general.name").unwrap_or(file.name()).to_owned();
            return Err(ChatError::NoTemplate { model });
        };
        Ok(Self { assumed: Some(name), ..Self::new(source, tokenizer)? })
    }

    /// A template from its source, for a model with this tokenizer.
    ///
    /// # Errors
    /// [`ChatError::Template`] says what cannot be parsed.
    pub fn new(source: &str, tokenizer: &Tokenizer) -> Result<Self, ChatError> {
        let text = |token: Option<u32>| token.and_then(|token| tokenizer.token_text(token)).unwrap_or_default().to_owned();
        Self::from_source(source, text(tokenizer.bos()), text(tokenizer.eos()))
    }

    fn from_source(source: &str, bos: String, eos: String) -> Result<Self, ChatError> {
        let mut environment = Environment::new();
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_recursion_limit(RECURSION_MAX);
        environment.set_fuel(Some(STEPS_MAX));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |text: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, text).with_source(RaisedByTemplate))
        });
        environment.set_formatter(python::print);
        environment.add_filter("tojson", tojson);
        environment.add_filter("indent", python::indent);
        environment.add_filter("string", python::string);
        environment.add_filter("escape", python::escape);
        environment.add_filter("e", python::escape);
        environment.add_test("iterable", python::is_iterable);
        environment
            .add_template_owned(NAME, python::without_generation_marks(source))
            .map_err(|error| ChatError::Template(describe(&error)))?;
        Ok(Self { environment: Arc::new(environment), bos, eos, assumed: None })
    }

    /// The format that was assumed because the file has no template.
    pub fn assumed_format(&self) -> Option<&'static str> {
        self.assumed
    }

    /// The conversation as text, in which control tokens are meant as such:
    /// [`Tokenizer::encode_prompt`]`(text, true)` makes the prompt of it.
    ///
    /// # Errors
    /// [`ChatError::Refused`] if the template raises an exception, [`ChatError::Render`] if it fails.
    pub fn render(&self, messages: &[Message], options: &ChatOptions) -> Result<String, ChatError> {
        let first = self.render_once(messages, options, true);
        // Some templates join the arguments of calls to strings, and fail on objects.
        match first {
            Err(ChatError::Render(_)) if messages.iter().any(Message::calls_tools) => self.render_once(messages, options, false).or(first),
            other => other,
        }
    }

    fn render_once(&self, messages: &[Message], options: &ChatOptions, arguments_as_objects: bool) -> Result<String, ChatError> {
        let fault = |error: Error| match is_raised(&error) {
            true => ChatError::Refused(error.detail().unwrap_or("it gives no reason").to_owned()),
            false => ChatError::Render(describe(&error)),
        };
        let messages: Vec<Json> = messages.iter().map(|message| message.for_template(arguments_as_objects)).collect();
        let mut context: std::collections::BTreeMap<String, Value> =
            options.extra.iter().map(|(key, value)| (key.clone(), Value::from_serialize(value))).collect();
        let mut set = |key: &str, value: Value| context.insert(key.to_owned(), value);
        set("messages", Value::from_serialize(&messages));
        set("add_generation_prompt", Value::from(options.add_generation_prompt));
        set("bos_token", Value::from(self.bos.as_str()));
        set("eos_token", Value::from(self.eos.as_str()));
        // Templates ask for `tools is not none` as well as for `tools is defined`.
        set("tools", options.tools.as_ref().map_or(Value::from(()), Value::from_serialize));
        if let Some(moment) = options.unix_seconds {
            set("strftime_now", Value::from_function(move |format: String| date::strftime(moment, &format)));
        }
        self.environment.get_template(NAME).and_then(|template| template.render(context)).map_err(fault)
    }
}

/// Marks errors that a template raises itself.
#[derive(Debug, thiserror::Error)]
#[error("raised by the template")]
struct RaisedByTemplate;

fn is_raised(error: &Error) -> bool {
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        if inner.is::<RaisedByTemplate>() {
            return true;
        }
        source = inner.source();
    }
    false
}

/// An error with its line.
fn describe(error: &Error) -> String {
    let text = error.detail().map_or_else(|| error.kind().to_string(), |detail| format!("{}: {detail}", error.kind()));
    match error.line() {
        Some(line) => format!("{text} (line {line})"),
        None => text,
    }
}

/// The filter `tojson(indent=none)`. Python's other options change nothing here or are not used by templates.
fn tojson(value: &Value, indent: Option<usize>, options: Kwargs) -> Result<Value, Error> {
    let named: Option<usize> = options.get("indent")?;
    for known in ["ensure_ascii", "separators", "sort_keys"] {
        let _: Option<Value> = options.get(known)?;
    }
    options.assert_all_used()?;
    let bad = |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, error.to_string());
    let json = serde_json::to_value(value).map_err(bad)?;
    json::dumps(&json, named.or(indent)).map(Value::from_safe_string).map_err(bad)
}

#[cfg(test)]
mod tests;
