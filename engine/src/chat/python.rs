//! What templates get from Python without asking: how values print, and where Jinja's filters and tests differ from
//! those of the engine that runs them here.

use std::borrow::Cow;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Output, Value};

use super::limits::{ITEM, Meter, too_much};

/// Deepest nesting that is printed.
const DEPTH_MAX: usize = 64;

/// Prints a value as Python's `str` does: lists and dicts by their `repr`.
pub(crate) fn print(meter: &Meter, out: &mut Output<'_>, value: &Value) -> Result<(), Error> {
    if let Some(text) = value.as_str() {
        meter.made(text.len() as u64)?;
        return out.write_str(text).map_err(Error::from);
    }
    let mut text = String::new();
    write_text(meter, value, &mut text)?;
    out.write_str(&text).map_err(Error::from)
}

/// A value as Python's `str` has it.
pub(crate) fn text<'a>(meter: &Meter, value: &'a Value) -> Result<Cow<'a, str>, Error> {
    match value.as_str() {
        Some(text) => Ok(Cow::Borrowed(text)),
        None => {
            let mut out = String::new();
            write_text(meter, value, &mut out)?;
            Ok(Cow::Owned(out))
        }
    }
}

/// Writes a value as Python's `str` has it, and pays for what it writes.
pub(crate) fn write_text(meter: &Meter, value: &Value, out: &mut String) -> Result<(), Error> {
    match value.kind() {
        ValueKind::String => add(meter, out, value.as_str().unwrap_or_default()),
        ValueKind::Map | ValueKind::Seq | ValueKind::Iterable => repr(meter, value, DEPTH_MAX, out),
        _ => add(meter, out, &value.to_string()),
    }
}

fn add(meter: &Meter, out: &mut String, text: &str) -> Result<(), Error> {
    meter.made(text.len() as u64)?;
    out.push_str(text);
    Ok(())
}

/// The filter `string`.
pub(crate) fn string(meter: &Meter, value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => Ok(value.clone()),
        _ => text(meter, value).map(Value::from),
    }
}

fn repr(meter: &Meter, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    let Some(depth) = depth.checked_sub(1) else {
        return Err(Error::new(ErrorKind::InvalidOperation, "a value is nested too deeply to be printed"));
    };
    meter.work(ITEM)?;
    match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            // At worst each byte becomes four.
            meter.made(text.len() as u64 * 4 + 2)?;
            repr_text(text, out);
        }
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (nth, item) in value.try_iter()?.enumerate() {
                add(meter, out, if nth > 0 { ", " } else { "" })?;
                repr(meter, &item, depth, out)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (nth, key) in value.try_iter()?.enumerate() {
                add(meter, out, if nth > 0 { ", " } else { "" })?;
                repr(meter, &key, depth, out)?;
                out.push_str(": ");
                repr(meter, &value.get_item(&key)?, depth, out)?;
            }
            out.push('}');
        }
        ValueKind::None => add(meter, out, "None")?,
        ValueKind::Bool => add(meter, out, if value.is_true() { "True" } else { "False" })?,
        ValueKind::Plain => add(meter, out, "<object>")?,
        _ => add(meter, out, &value.to_string())?,
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
                out.push_str(&format!("\\x{:02x}", u32::from(c)));
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// The test `iterable`: none is not, an undefined value is.
pub(crate) fn is_iterable(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Undefined | ValueKind::String | ValueKind::Map | ValueKind::Seq | ValueKind::Iterable)
}

/// The filters `escape` and `e`, which work although nothing is escaped by itself.
pub(crate) fn escape(meter: &Meter, value: &Value) -> Result<Value, Error> {
    let text = text(meter, value)?;
    let mut out = String::new();
    for character in text.chars() {
        match character {
            '&' => add(meter, &mut out, "&amp;")?,
            '<' => add(meter, &mut out, "&lt;")?,
            '>' => add(meter, &mut out, "&gt;")?,
            '"' => add(meter, &mut out, "&#34;")?,
            '\'' => add(meter, &mut out, "&#39;")?,
            c => add(meter, &mut out, c.encode_utf8(&mut [0; 4]))?,
        }
    }
    Ok(Value::from(out))
}

/// Widest indent. A template comes from a model file and may ask for anything.
const INDENT_MAX: usize = 1024;

/// The filter `indent(width=4, first=false, blank=false)`, which keeps a line end at the end.
pub(crate) fn indent(
    meter: &Meter,
    value: &Value,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    named: &Kwargs,
) -> Result<Value, Error> {
    let width = width.or(named.get("width")?);
    let first = first.or(named.get("first")?).unwrap_or(false);
    let blank = blank.or(named.get("blank")?).unwrap_or(false);
    named.assert_all_used()?;
    let unit = match &width {
        None => " ".repeat(4),
        Some(width) => match (width.as_str(), width.as_usize()) {
            (Some(unit), _) if unit.len() <= INDENT_MAX => unit.to_owned(),
            (_, Some(count)) if count <= INDENT_MAX => " ".repeat(count),
            _ => return Err(too_much("an indent is too wide")),
        },
    };
    let text = text(meter, value)?;
    let mut out = String::new();
    for (nth, line) in text.split('\n').enumerate() {
        if nth > 0 {
            add(meter, &mut out, "\n")?;
        }
        if (nth == 0 && first) || (nth > 0 && (blank || !line.is_empty())) {
            add(meter, &mut out, &unit)?;
        }
        add(meter, &mut out, line)?;
    }
    Ok(Value::from(out))
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
