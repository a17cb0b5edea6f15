//! A conversation as the text that a model was trained to continue.
//!
//! Models carry a Jinja template that Hugging Face's library would run in Python. It is run here with the functions
//! and habits those templates expect: Python's methods on strings, lists and dicts, `tojson` as Python writes it,
//! `raise_exception`, `strftime_now`, and blocks that leave no blank lines behind.
//!
//! A template comes from a model file, so it is not trusted: it sees nothing but the conversation, and what it can use of
//! memory and time is bounded (`limits.rs`) whatever it does.

mod date;
mod error;
mod filters;
mod json;
mod known;
mod limits;
mod message;
mod operators;
mod program;
mod python;

use std::sync::Arc;

use minijinja::machinery::{Vm, make_string_output};
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior};
use serde_json::{Map, Value as Json};

pub use error::ChatError;
pub use message::Message;

use crate::gguf::Gguf;
use crate::shown::shown;
use crate::tokenizer::Tokenizer;
use limits::{Meter, TooMuch};
use program::Program;

/// The only template of an environment.
const NAME: &str = "chat";
/// Longest format of a date.
const DATE_MAX: usize = 256;

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
    source: Arc<str>,
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
            let model = shown(file.str("general.name").unwrap_or(file.name()));
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
        let source = python::without_generation_marks(source);
        Program::new(NAME, &source).map_err(|error| match caused_by::<TooMuch>(&error) {
            true => ChatError::TooMuch(describe(&error)),
            false => ChatError::Template(describe(&error)),
        })?;
        Ok(Self { source: source.into(), bos, eos, assumed: None })
    }

    /// The format that was assumed because the file has no template.
    pub fn assumed_format(&self) -> Option<&'static str> {
        self.assumed
    }

    /// The conversation as text, in which control tokens are meant as such:
    /// [`Tokenizer::encode_prompt`]`(text, true)` makes the prompt of it.
    ///
    /// # Errors
    /// [`ChatError::Refused`] if the template raises an exception, [`ChatError::TooMuch`] if it passes a limit,
    /// [`ChatError::Render`] if it fails.
    pub fn render(&self, messages: &[Message], options: &ChatOptions) -> Result<String, ChatError> {
        let first = self.render_once(messages, options, true);
        // Some templates join the arguments of calls to strings, and fail on objects.
        match first {
            Err(ChatError::Render(_)) if messages.iter().any(Message::calls_tools) => self.render_once(messages, options, false).or(first),
            other => other,
        }
    }

    fn render_once(&self, messages: &[Message], options: &ChatOptions, arguments_as_objects: bool) -> Result<String, ChatError> {
        let fault = |error: Error| match error.kind() {
            _ if caused_by::<RaisedByTemplate>(&error) => ChatError::Refused(shown(error.detail().unwrap_or("it gives no reason"))),
            _ if caused_by::<TooMuch>(&error) || is_out_of_fuel(&error) => ChatError::TooMuch(describe(&error)),
            _ => ChatError::Render(describe(&error)),
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
            let now = move |format: &str| match format.len() {
                ..=DATE_MAX => Ok(date::strftime(moment, format)),
                _ => Err(limits::too_much("a date is too long")),
            };
            set("strftime_now", Value::from_function(now));
        }
        let context = Value::from_serialize(context);
        let input = input_size(&context);
        let meter = Arc::new(Meter::new(input));
        let environment = environment(&meter);
        let mut text = String::new();
        let program = Program::new(NAME, &self.source).map_err(fault)?;
        let vm = Vm::new(&environment);
        let ran = vm.eval(&program.main, context, &program.blocks, &mut make_string_output(&mut text), AutoEscape::None).map(drop);
        ran.and_then(|()| limits::check_prompt(&text, input)).map_err(fault)?;
        Ok(text)
    }
}

/// Where a template runs. It holds the meter of one rendering.
fn environment(meter: &Arc<Meter>) -> Environment<'static> {
    let mut environment = Environment::empty();
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_recursion_limit(limits::RECURSION_MAX);
    environment.set_fuel(Some(limits::STEPS_MAX));
    environment.add_function("raise_exception", |text: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, text).with_source(RaisedByTemplate))
    });
    filters::add(&mut environment, meter);
    operators::add(&mut environment, meter);
    environment
}

/// The size of what a template is given, in bytes, roughly.
fn input_size(context: &Value) -> usize {
    // Clients' messages are bounded where they are received, and are no deeper than JSON can be.
    Meter::unlimited().look_deep(context).map_or(0, |size| usize::try_from(size).unwrap_or(usize::MAX))
}

/// Marks errors that a template raises itself.
#[derive(Debug, thiserror::Error)]
#[error("raised by the template")]
struct RaisedByTemplate;

fn caused_by<E: std::error::Error + 'static>(error: &Error) -> bool {
    std::iter::successors(std::error::Error::source(error), |error| error.source()).any(|error| error.is::<E>())
}

/// Whether the template ran out of steps, also where an error within a macro is told by the error of its call.
fn is_out_of_fuel(error: &Error) -> bool {
    let inner = std::iter::successors(std::error::Error::source(error), |error| error.source());
    error.kind() == ErrorKind::OutOfFuel
        || inner.filter_map(|error| error.downcast_ref::<Error>()).any(|error| error.kind() == ErrorKind::OutOfFuel)
}

/// An error with its line.
fn describe(error: &Error) -> String {
    let text = error.detail().map_or_else(|| error.kind().to_string(), |detail| format!("{}: {detail}", error.kind()));
    match error.line() {
        Some(line) => format!("{} (line {line})", shown(&text)),
        None => shown(&text),
    }
}

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod tests;
