//! What templates get from Python without asking: how values print, and where Jinja's filters and tests differ from
//! those of the engine that runs them here.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Output, State, Value};

/// Deepest nesting that is printed; a value that contains itself cannot be made, but a deep one can.
const DEPTH_MAX: usize = 64;

/// Prints a value as Python's `str` does: lists and dicts by their `repr`.
pub(crate) fn print(out: &mut Output<'_>, state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Map | ValueKind::Seq => {
            let mut text = String::new();
            repr(value, DEPTH_MAX, &mut text)?;
            out.write_str(&text).map_err(Error::from)
        }
        _ => minijinja::escape_formatter(out, state, value),
    }
}

/// The filter `string`.
pub(crate) fn string(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => Ok(value.clone()),
        ValueKind::Map | ValueKind::Seq => {
            let mut text = String::new();
            repr(value, DEPTH_MAX, &mut text)?;
            Ok(Value::from(text))
        }
        _ => Ok(Value::from(value.to_string())),
    }
}

fn repr(value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    let Some(depth) = depth.checked_sub(1) else {
        return Err(Error::new(ErrorKind::InvalidOperation, "a value is nested too deeply to be printed"));
    };
    match value.kind() {
        ValueKind::String => repr_text(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq => {
            out.push('[');
            for (nth, item) in value.try_iter()?.enumerate() {
                out.push_str(if nth > 0 { ", " } else { "" });
                repr(&item, depth, out)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (nth, key) in value.try_iter()?.enumerate() {
                out.push_str(if nth > 0 { ", " } else { "" });
                repr(&key, depth, out)?;
                out.push_str(": ");
                repr(&value.get_item(&key)?, depth, out)?;
            }
            out.push('}');
        }
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// A string in quotes: single ones, unless it has such and no double ones.
fn repr_text(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if c < ' ' || ('\x7f'..'\u{a0}').contains(&c) => {
                // Writing to a string does not fail.
                let _ = write!(out, "\\x{:02x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// The test `iterable`: none is not, an undefined value is.
pub(crate) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// The filters `escape` and `e`, which work although nothing is escaped by itself.
pub(crate) fn escape(text: String) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// Widest indent. A template comes from a model file and may ask for anything.
const INDENT_MAX: usize = 1024;

/// The filter `indent(width=4, first=false, blank=false)`, which keeps a line end at the end.
pub(crate) fn indent(text: String, width: Option<Value>, first: Option<bool>, blank: Option<bool>, named: Kwargs) -> Result<String, Error> {
    let width = width.or(named.get("width")?);
    let first = first.or(named.get("first")?).unwrap_or(false);
    let blank = blank.or(named.get("blank")?).unwrap_or(false);
    named.assert_all_used()?;
    let unit = match &width {
        None => " ".repeat(4),
        Some(width) => match (width.as_str(), width.as_usize()) {
            (Some(unit), _) if unit.len() <= INDENT_MAX => unit.to_owned(),
            (_, Some(count)) if count <= INDENT_MAX => " ".repeat(count),
            _ => return Err(Error::new(ErrorKind::InvalidOperation, format!("cannot indent by {width}"))),
        },
    };
    let mut out = String::with_capacity(text.len());
    for (nth, line) in text.split('\n').enumerate() {
        if nth > 0 {
            out.push('\n');
        }
        if (nth == 0 && first) || (nth > 0 && (blank || !line.is_empty())) {
            out.push_str(&unit);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// `{% generation %}` marks what training looks at, and is nothing to rendering: it becomes a block that always runs,
/// so that what the marks say about white space still holds.
pub(crate) fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let inside = &tag[2..end];
        let word = inside.trim_matches(['-', '+', ' ', '\t', '\r', '\n']);
        let replaced = match word {
            "generation" => inside.replace("generation", "if true"),
            "endgeneration" => inside.replace("endgeneration", "endif"),
            _ => inside.to_owned(),
        };
        out.push_str("{%");
        out.push_str(&replaced);
        out.push_str("%}");
        rest = &tag[end + 2..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_in_quotes() {
        let quoted = |text: &str| {
            let mut out = String::new();
            repr_text(text, &mut out);
            out
        };
        assert_eq!(quoted("a"), "'a'");
        assert_eq!(quoted("it's"), "\"it's\"");
        assert_eq!(quoted("it's \"x\""), "'it\\'s \"x\"'");
        assert_eq!(quoted("é\n\u{1b}\\"), "'é\\n\\x1b\\\\'");
    }

    #[test]
    fn marks_become_blocks() {
        assert_eq!(
            without_generation_marks("a{%- generation -%} b {% endgeneration %}{% if x %}{{ '{%' }}"),
            "a{%- if true -%} b {% endif %}{% if x %}{{ '{%' }}"
        );
        assert_eq!(without_generation_marks("{% generations %}"), "{% generations %}");
        assert_eq!(without_generation_marks("{% x"), "{% x");
    }
}
