//! What a template may use. It comes from a model file, so it is a program by a stranger: each of its steps costs fuel, which the
//! interpreter counts, and whatever a single step can do at length is counted here. Whoever makes a value pays for its bytes, whoever
//! looks at one for the time, both *before* it is done; and no value can be nested deeply or contain itself, so that nothing that
//! walks values can run out of stack.

use std::sync::atomic::{AtomicU64, Ordering};

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Most steps of a template's program. A turn takes some hundred; the longest conversations stay below a million.
pub(super) const STEPS_MAX: u64 = 5_000_000;
/// Deepest nesting of blocks, loops and macros that run (a macro counts four).
pub(super) const RECURSION_MAX: usize = 100;
/// Most bytes of all values together that one rendering makes, besides [`MADE_PER_INPUT`]. What it no longer needs counts too.
const MADE_MAX: u64 = 128 << 20;
/// Further such bytes for each byte of the conversation.
const MADE_PER_INPUT: u64 = 16;
/// Most work of one rendering; a unit is about a nanosecond.
const WORK_MAX: u64 = 512 << 20;
/// Further work for each byte of the conversation.
const WORK_PER_INPUT: u64 = 64;
/// What an entry of a list or a map counts for, in bytes and in work.
pub(super) const ITEM: u64 = 40;
/// The work of going to an entry of a list or a map that holds nothing itself.
const ENTRY: u64 = 30;
/// The work of going into a list or a map.
const NODE: u64 = 250;
/// The work of a place in a text where something is replaced.
pub(super) const PLACE: u64 = 32;
/// What a macro that is declared counts for: the interpreter copies the list of all of them when it declares one more.
pub(super) const MACRO: u64 = 16 << 10;
/// Longest prompt that a template writes, in bytes, besides [`PROMPT_PER_INPUT`]. It is made into tokens next, which takes longer.
const PROMPT_MAX: u64 = 2 << 20;
/// Further bytes of it for each byte of the conversation.
const PROMPT_PER_INPUT: u64 = 4;
/// Deepest nesting of lists and maps that a template makes. JSON of clients is no deeper.
const DEPTH_MAX: usize = 128;

/// Marks errors of templates that want too much.
#[derive(Debug, thiserror::Error)]
#[error("the template wants too much")]
pub(super) struct TooMuch;

/// The error of a template that wants too much of `what`.
pub(super) fn too_much(what: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, what).with_source(TooMuch)
}

/// Whether a prompt is no longer than it may be for a conversation of so many bytes.
pub(super) fn check_prompt(prompt: &str, input: usize) -> Result<(), Error> {
    match prompt.len() as u64 <= PROMPT_MAX.saturating_add(PROMPT_PER_INPUT.saturating_mul(input as u64)) {
        true => Ok(()),
        false => Err(too_much("the prompt that it writes is too long")),
    }
}

/// What is left for one rendering.
#[derive(Debug)]
pub(super) struct Meter {
    made: AtomicU64,
    work: AtomicU64,
}

fn take(left: &AtomicU64, much: u64, what: &'static str) -> Result<(), Error> {
    // Only one thread counts at a time.
    match left.load(Ordering::Relaxed).checked_sub(much) {
        Some(rest) => {
            left.store(rest, Ordering::Relaxed);
            Ok(())
        }
        None => {
            left.store(0, Ordering::Relaxed);
            Err(too_much(what))
        }
    }
}

impl Meter {
    /// For a conversation of so many bytes.
    pub(super) fn new(input: usize) -> Self {
        let of = |most: u64, each: u64| AtomicU64::new(most.saturating_add(each.saturating_mul(input as u64)));
        Self { made: of(MADE_MAX, MADE_PER_INPUT), work: of(WORK_MAX, WORK_PER_INPUT) }
    }

    /// For what is not a template's doing.
    pub(super) fn unlimited() -> Self {
        Self { made: AtomicU64::new(u64::MAX), work: AtomicU64::new(u64::MAX) }
    }

    /// So many bytes are about to be made.
    pub(super) fn made(&self, bytes: u64) -> Result<(), Error> {
        take(&self.made, bytes, "it makes texts or lists of more than is allowed")?;
        self.work(bytes / 4)
    }

    /// So much is about to be done.
    pub(super) fn work(&self, units: u64) -> Result<(), Error> {
        take(&self.work, units.saturating_add(1), "it takes longer than is allowed")
    }

    /// A value is about to be looked at without what its entries hold.
    pub(super) fn look(&self, value: &Value) -> Result<(), Error> {
        match value.as_str() {
            Some(text) => self.work(text.len() as u64),
            None => self.work(entries(value).saturating_mul(ITEM)),
        }
    }

    /// The entries of a value are about to be listed.
    pub(super) fn list(&self, value: &Value) -> Result<(), Error> {
        self.made(entries(value).saturating_mul(ITEM))
    }

    /// A value is about to be looked at as a whole. Gives its bytes as a text, roughly.
    pub(super) fn look_deep(&self, value: &Value) -> Result<u64, Error> {
        self.look_within(value, DEPTH_MAX * 2)
    }

    fn look_within(&self, value: &Value, depth: usize) -> Result<u64, Error> {
        if let Some(text) = value.as_str() {
            self.work(text.len() as u64 + ENTRY)?;
            return Ok(text.len() as u64 + ITEM);
        }
        self.work(if value.as_object().is_some() { NODE } else { ENTRY })?;
        let mut size = ITEM;
        if is_container(value) {
            let depth = depth.checked_sub(1).ok_or_else(|| too_much("it nests values too deeply"))?;
            let is_map = value.kind() == ValueKind::Map;
            for entry in value.try_iter()? {
                if is_map {
                    size = size.saturating_add(self.look_within(&value.get_item(&entry)?, depth)?);
                }
                size = size.saturating_add(self.look_within(&entry, depth)?);
            }
        }
        Ok(size)
    }

    /// A value is about to be put into another. It must be plain data: what can change or holds frames of the interpreter could come
    /// to contain itself.
    pub(super) fn put_in(&self, value: &Value) -> Result<(), Error> {
        self.put_in_at(value, DEPTH_MAX)
    }

    fn put_in_at(&self, value: &Value, depth: usize) -> Result<(), Error> {
        let Some(object) = value.as_object() else { return self.work(ENTRY) };
        self.work(NODE)?;
        if !is_container(value) || is_of_interpreter(object.type_name()) {
            let text = "a namespace, loop, macro or function cannot be put into a list, map or namespace";
            return Err(Error::new(ErrorKind::InvalidOperation, text));
        }
        let depth = depth.checked_sub(1).ok_or_else(|| too_much("it nests values too deeply"))?;
        let is_map = value.kind() == ValueKind::Map;
        for entry in value.try_iter()? {
            let entry = if is_map { value.get_item(&entry)? } else { entry };
            self.put_in_at(&entry, depth)?;
        }
        Ok(())
    }

    /// The result of a filter or a method, with nothing in it that is still to be computed.
    pub(super) fn keep(&self, value: Value) -> Result<Value, Error> {
        match (value.kind(), value.as_str()) {
            (_, Some(text)) => self.made(text.len() as u64 + ITEM)?,
            (ValueKind::Iterable, _) => {
                let mut items = Vec::new();
                for item in value.try_iter()? {
                    self.made(ITEM)?;
                    items.push(valid(item)?);
                }
                return Ok(Value::from(items));
            }
            (ValueKind::Seq | ValueKind::Map, _) => self.made(entries(&value).saturating_mul(2 * ITEM))?,
            _ => {}
        }
        Ok(value)
    }
}

/// The error that a value stands for, if it does.
fn valid(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Invalid => Err(Error::new(ErrorKind::InvalidOperation, value.to_string())),
        _ => Ok(value),
    }
}

/// The length of a text in bytes, the number of entries of anything else.
pub(super) fn entries(value: &Value) -> u64 {
    match value.as_str() {
        Some(text) => text.len() as u64,
        None if value.as_object().is_some() => value.len().unwrap_or(0) as u64,
        None => 0,
    }
}

/// Whether it has entries.
pub(super) fn is_container(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Map | ValueKind::Seq | ValueKind::Iterable)
}

/// Whether an object of this type is one of the interpreter's own, and not data.
fn is_of_interpreter(type_name: &str) -> bool {
    ["::Namespace", "::Loop", "::Macro", "::Closure", "::Module"].iter().any(|name| type_name.ends_with(name))
}
