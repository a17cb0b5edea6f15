//! JSON as Python's `json.dumps(value, ensure_ascii=False)` writes it, which is what templates were written against:
//! a space after each colon and comma, and nothing escaped for HTML.

use std::io;

use serde::Serialize as _;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// Widest indent. A template comes from a model file and may ask for anything.
const INDENT_MAX: usize = 64;

/// What is written, as long as somebody pays for it.
struct Paid<'a> {
    out: Vec<u8>,
    pay: &'a mut dyn FnMut(usize) -> bool,
}

impl io::Write for Paid<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !(self.pay)(bytes.len()) {
            return Err(io::Error::from(io::ErrorKind::FileTooLarge));
        }
        self.out.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes `value`, on one line or indented by so many spaces. `pay` is asked before bytes are written.
///
/// # Errors
/// When `pay` refuses.
pub(crate) fn dumps(
    value: &serde_json::Value,
    indent: Option<usize>,
    pay: &mut dyn FnMut(usize) -> bool,
) -> Result<String, serde_json::Error> {
    let mut out = Paid { out: Vec::new(), pay };
    match indent {
        None => value.serialize(&mut Serializer::with_formatter(&mut out, Spaced))?,
        Some(width) => {
            let indent = " ".repeat(width.min(INDENT_MAX));
            value.serialize(&mut Serializer::with_formatter(&mut out, PrettyFormatter::with_indent(indent.as_bytes())))?;
        }
    }
    Ok(String::from_utf8_lossy(&out.out).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn as_python_writes_it() {
        let value = json!({"b": [1, 2.0, "é<'&>\n"], "a": {}, "c": [], "d": null, "e": true});
        assert_eq!(dumps(&value, None, &mut |_| true).unwrap(), r#"{"b": [1, 2.0, "é<'&>\n"], "a": {}, "c": [], "d": null, "e": true}"#);
        assert_eq!(
            dumps(&json!({"a": [1, {}], "b": []}), Some(2), &mut |_| true).unwrap(),
            "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": []\n}"
        );
        let mut left = 5;
        let mut pay = |bytes: usize| {
            left -= bytes.min(left);
            left > 0
        };
        assert!(dumps(&value, None, &mut pay).is_err());
    }
}
