//! Everything that a template can call: Jinja's filters, tests and functions, and Python's methods. Each pays for what it looks at before
//! it does, and for what it makes; those whose result can be much larger than what they are given are written here.

use std::sync::Arc;

use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, FormatStyle, State, filters, format_filter, functions, tests};

use super::limits::{ITEM, Meter, PLACE, entries, is_container, too_much};
use super::{json, operators, python};

/// Most numbers of one `range`, and most parts of a list.
const COUNT_MAX: usize = 100_000;
/// Widest field of `format`, and most digits.
const WIDTH_MAX: usize = 1000;
/// Most characters that are stripped from ends.
const STRIPPED_MAX: usize = 256;

/// What a built-in function does with its arguments.
#[derive(Clone, Copy, PartialEq)]
enum Cost {
    /// Looks at texts, and at no entries of lists and maps.
    Texts,
    /// Lists the entries of the first.
    Entries,
    /// Lists them, and puts them into others.
    Nests,
    /// Compares the entries with each other, and may put them into others.
    Sorts,
}

/// What sorting looks at is looked at so many times: the logarithm of the longest list.
const SORTING: u64 = 20;

fn pay(meter: &Meter, cost: Cost, arguments: &[Value]) -> Result<(), Error> {
    for (nth, argument) in arguments.iter().enumerate() {
        match cost {
            Cost::Texts if argument.as_str().is_none() => meter.work(1)?,
            Cost::Sorts => {
                let size = meter.look_deep(argument)?;
                meter.work(size.saturating_mul(SORTING))?;
            }
            _ => meter.look(argument)?,
        }
        if nth == 0 && cost != Cost::Texts {
            meter.list(argument)?;
        }
    }
    Ok(())
}

/// Adds all of them to `environment`, which is empty.
pub(super) fn add(environment: &mut Environment<'_>, meter: &Arc<Meter>) {
    add_built_in(environment, meter);
    add_tests(environment, meter);
    let with = || Arc::clone(meter);
    macro_rules! filter {
        ($name:literal, |$meter:ident, $($argument:ident: $kind:ty),*| $body:expr) => {{
            let $meter = with();
            environment.add_filter($name, move |$($argument: $kind),*| -> Result<Value, Error> { $body });
        }};
    }
    filter!("tojson", |meter, value: &Value, indent: Option<usize>, options: Kwargs| tojson(&meter, value, indent, &options));
    filter!("indent", |meter, text: &Value, width: Option<Value>, first: Option<bool>, blank: Option<bool>, named: Kwargs| {
        python::indent(&meter, text, width, first, blank, &named)
    });
    filter!("string", |meter, value: &Value| python::string(&meter, value));
    filter!("escape", |meter, value: &Value| python::escape(&meter, value));
    filter!("e", |meter, value: &Value| python::escape(&meter, value));
    filter!("join", |meter, list: &Value, between: Option<Value>, named: Kwargs| join(&meter, list, between, &named));
    filter!("replace", |meter, text: &Value, old: &Value, new: &Value| replace(&meter, text, old, new, None));
    filter!("length", |meter, value: &Value| {
        if value.as_str().is_some() {
            meter.look(value)?;
        }
        filters::length(value).map(Value::from)
    });
    filter!("count", |meter, value: &Value| {
        if value.as_str().is_some() {
            meter.look(value)?;
        }
        filters::length(value).map(Value::from)
    });
    filter!("attr", |meter, value: &Value, key: &Value| operators::item(&meter, value, key));
    filter!("split", |meter, text: &Value, by: Option<Value>, most: Option<i64>| split(&meter, text, by.as_ref(), most));
    filter!("trim", |meter, text: &Value, characters: Option<Value>| {
        let (text, characters) =
            (python::text(&meter, text)?, characters.map(|it| python::text(&meter, &it).map(|it| it.into_owned())).transpose()?);
        strip(&meter, &text, characters.as_deref(), true, true)
    });
    filter!("format", |meter, text: &Value, arguments: Rest<Value>| format(&meter, FormatStyle::Printf, text, &arguments));

    let counts = with();
    environment.add_function("range", move |lower: i64, upper: Option<i64>, step: Option<i64>| range(&counts, lower, upper, step));
    let counts = with();
    environment.add_function("dict", move |base: Option<Value>, named: Kwargs| -> Result<Value, Error> {
        if let Some(base) = &base {
            counts.list(base)?;
        }
        let made = functions::dict(base, named)?;
        counts.list(&made)?;
        counts.put_in(&made)?;
        Ok(made)
    });
    let counts = with();
    environment.add_function("namespace", move |defaults: Option<Value>| -> Result<Value, Error> {
        if let Some(defaults) = &defaults {
            counts.list(defaults)?;
            for key in defaults.try_iter()? {
                counts.look(&key)?;
                counts.put_in(&defaults.get_item(&key)?)?;
            }
        }
        functions::namespace(defaults)
    });
    let counts = with();
    environment.set_unknown_method_callback(move |state, value, name, arguments| method(&counts, state, value, name, arguments));
    let counts = with();
    environment.set_formatter(move |out, _, value| python::print(&counts, out, value));
}

fn add_built_in(environment: &mut Environment<'_>, meter: &Arc<Meter>) {
    let mut with = |name: &'static str, cost: Cost, filter: Value| {
        let meter = Arc::clone(meter);
        environment.add_filter(name, move |state: &State<'_, '_>, arguments: Rest<Value>| -> Result<Value, Error> {
            pay(&meter, cost, &arguments)?;
            let made = meter.keep(filter.call(state, &arguments)?)?;
            if matches!(cost, Cost::Nests | Cost::Sorts) {
                meter.put_in(&made)?;
            }
            Ok(made)
        });
    };
    with("safe", Cost::Texts, Value::from_function(filters::safe));
    with("lower", Cost::Texts, Value::from_function(filters::lower));
    with("upper", Cost::Texts, Value::from_function(filters::upper));
    with("title", Cost::Texts, Value::from_function(filters::title));
    with("capitalize", Cost::Texts, Value::from_function(filters::capitalize));
    with("lines", Cost::Entries, Value::from_function(filters::lines));
    with("default", Cost::Texts, Value::from_function(filters::default));
    with("d", Cost::Texts, Value::from_function(filters::default));
    with("round", Cost::Texts, Value::from_function(filters::round));
    with("abs", Cost::Texts, Value::from_function(filters::abs));
    with("int", Cost::Texts, Value::from_function(filters::int));
    with("float", Cost::Texts, Value::from_function(filters::float));
    with("bool", Cost::Texts, Value::from_function(filters::bool));
    with("first", Cost::Texts, Value::from_function(filters::first));
    with("last", Cost::Entries, Value::from_function(filters::last));
    with("list", Cost::Entries, Value::from_function(filters::list));
    with("reverse", Cost::Entries, Value::from_function(filters::reverse));
    with("sum", Cost::Entries, Value::from_function(filters::sum));
    with("select", Cost::Entries, Value::from_function(filters::select));
    with("reject", Cost::Entries, Value::from_function(filters::reject));
    with("selectattr", Cost::Entries, Value::from_function(filters::selectattr));
    with("rejectattr", Cost::Entries, Value::from_function(filters::rejectattr));
    with("items", Cost::Nests, Value::from_function(filters::items));
    with("map", Cost::Nests, Value::from_function(filters::map));
    with("min", Cost::Sorts, Value::from_function(filters::min));
    with("max", Cost::Sorts, Value::from_function(filters::max));
    with("sort", Cost::Sorts, Value::from_function(filters::sort));
    with("unique", Cost::Sorts, Value::from_function(filters::unique));
    with("dictsort", Cost::Sorts, Value::from_function(filters::dictsort));
    with("groupby", Cost::Sorts, Value::from_function(filters::groupby));

    let mut parts = |name: &'static str, filter: Value| {
        let meter = Arc::clone(meter);
        environment.add_filter(name, move |state: &State<'_, '_>, arguments: Rest<Value>| -> Result<Value, Error> {
            pay(&meter, Cost::Nests, &arguments)?;
            let count = arguments.get(1).and_then(Value::as_usize).unwrap_or(COUNT_MAX + 1);
            if count > COUNT_MAX {
                return Err(too_much("a list in too many or too long parts"));
            }
            meter.made(count as u64 * 2 * ITEM)?;
            let made = meter.keep(filter.call(state, &arguments)?)?;
            meter.put_in(&made)?;
            Ok(made)
        });
    };
    parts("batch", Value::from_function(filters::batch));
    parts("slice", Value::from_function(filters::slice));
}

fn add_tests(environment: &mut Environment<'_>, meter: &Arc<Meter>) {
    let mut with = |name: &'static str, test: Value| {
        let meter = Arc::clone(meter);
        environment.add_test(name, move |state: &State<'_, '_>, arguments: Rest<Value>| -> Result<bool, Error> {
            pay(&meter, Cost::Texts, &arguments)?;
            Ok(test.call(state, &arguments)?.is_true())
        });
    };
    with("undefined", Value::from_function(tests::is_undefined));
    with("defined", Value::from_function(tests::is_defined));
    with("none", Value::from_function(tests::is_none));
    with("safe", Value::from_function(tests::is_safe));
    with("escaped", Value::from_function(tests::is_safe));
    with("boolean", Value::from_function(tests::is_boolean));
    with("odd", Value::from_function(tests::is_odd));
    with("even", Value::from_function(tests::is_even));
    with("divisibleby", Value::from_function(tests::is_divisibleby));
    with("number", Value::from_function(tests::is_number));
    with("integer", Value::from_function(tests::is_integer));
    with("int", Value::from_function(tests::is_integer));
    with("float", Value::from_function(tests::is_float));
    with("string", Value::from_function(tests::is_string));
    with("sequence", Value::from_function(tests::is_sequence));
    with("mapping", Value::from_function(tests::is_mapping));
    with("iterable", Value::from_function(python::is_iterable));
    with("startingwith", Value::from_function(tests::is_startingwith));
    with("endingwith", Value::from_function(tests::is_endingwith));
    with("lower", Value::from_function(tests::is_lower));
    with("upper", Value::from_function(tests::is_upper));
    with("sameas", Value::from_function(tests::is_sameas));
    with("true", Value::from_function(tests::is_true));
    with("false", Value::from_function(tests::is_false));
    with("filter", Value::from_function(tests::is_filter));
    with("test", Value::from_function(tests::is_test));
    // The operators as tests.
    for (names, operator) in [
        (&["eq", "equalto", "=="][..], "%eq"),
        (&["ne", "!="], "%ne"),
        (&["lt", "lessthan", "<"], "%lt"),
        (&["le", "<="], "%le"),
        (&["gt", "greaterthan", ">"], "%gt"),
        (&["ge", ">="], "%ge"),
        (&["in"], "%in"),
    ] {
        for name in names {
            environment.add_test(*name, move |state: &State<'_, '_>, left: &Value, right: &Value| -> Result<bool, Error> {
                Ok(state.apply_filter(operator, &[left.clone(), right.clone()])?.is_true())
            });
        }
    }
}

/// The filter `tojson(indent=none)`. Python's other options change nothing here or are not used by templates.
fn tojson(meter: &Meter, value: &Value, indent: Option<usize>, options: &Kwargs) -> Result<Value, Error> {
    let named: Option<usize> = options.get("indent")?;
    for known in ["ensure_ascii", "separators", "sort_keys"] {
        let _: Option<Value> = options.get(known)?;
    }
    options.assert_all_used()?;
    let size = meter.look_deep(value)?;
    // A copy, and its text; control characters become six.
    meter.made(size.saturating_mul(2))?;
    let bad = |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, error.to_string());
    let json = serde_json::to_value(value).map_err(bad)?;
    let text = json::dumps(&json, named.or(indent), &mut |bytes| meter.work(PLACE).is_ok() && meter.made(bytes as u64).is_ok());
    let text = text.map_err(|error| match meter.made(1) {
        Ok(()) => bad(error),
        Err(spent) => spent,
    })?;
    Ok(Value::from_safe_string(text))
}

fn join(meter: &Meter, list: &Value, between: Option<Value>, named: &Kwargs) -> Result<Value, Error> {
    let between = between.or(named.get("d")?);
    let attribute: Option<Value> = named.get("attribute")?;
    named.assert_all_used()?;
    let between = between.map(|it| python::text(meter, &it).map(|it| it.into_owned())).transpose()?.unwrap_or_default();
    meter.list(list)?;
    let mut out = String::new();
    for (nth, item) in list.try_iter()?.enumerate() {
        let item = match &attribute {
            Some(attribute) => operators::item(meter, &item, attribute)?,
            None => item,
        };
        if nth > 0 {
            meter.made(between.len() as u64)?;
            out.push_str(&between);
        }
        python::write_text(meter, &item, &mut out)?;
    }
    Ok(Value::from(out))
}

fn replace(meter: &Meter, text: &Value, old: &Value, new: &Value, most: Option<usize>) -> Result<Value, Error> {
    let (text, old, new) = (python::text(meter, text)?, python::text(meter, old)?, python::text(meter, new)?);
    meter.work(text.len() as u64 * 2)?;
    let found = text.matches(&*old).count().min(most.unwrap_or(usize::MAX)) as u64;
    meter.work(found.saturating_mul(PLACE))?;
    meter.made(found.saturating_mul(new.len() as u64).saturating_add(text.len() as u64 + ITEM))?;
    Ok(Value::from(match most {
        Some(most) => text.replacen(&*old, &new, most),
        None => text.replace(&*old, &new),
    }))
}

/// `text.split(by, most)`.
fn split(meter: &Meter, text: &Value, by: Option<&Value>, most: Option<i64>) -> Result<Value, Error> {
    meter.look(text)?;
    let whole = text.as_str().ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "only texts can be split"))?;
    let by: Option<Arc<str>> = match by.filter(|by| !by.is_none() && !by.is_undefined()) {
        Some(by) => Some(Arc::from(&*python::text(meter, by)?)),
        None => None,
    };
    let parts = match &by {
        Some(by) => whole.matches(&**by).count() + 1,
        None => whole.split_whitespace().count(),
    };
    let most = most.filter(|most| *most >= 0);
    let parts = parts.min(most.map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX).saturating_add(1)));
    meter.work((parts as u64).saturating_mul(PLACE))?;
    meter.made((parts as u64).saturating_mul(ITEM).saturating_add(whole.len() as u64))?;
    filters::split(text, by, most)
}

fn strip(meter: &Meter, text: &str, characters: Option<&str>, start: bool, end: bool) -> Result<Value, Error> {
    let stripped: Option<Vec<char>> = characters.map(|characters| characters.chars().take(STRIPPED_MAX + 1).collect());
    let many = stripped.as_ref().map_or(1, Vec::len);
    if many > STRIPPED_MAX {
        return Err(too_much("it strips too many characters"));
    }
    meter.work((text.len() as u64).saturating_mul(many as u64))?;
    let is_stripped = |character: char| stripped.as_ref().map_or_else(|| character.is_whitespace(), |some| some.contains(&character));
    let mut rest = text;
    if start {
        rest = rest.trim_start_matches(is_stripped);
    }
    if end {
        rest = rest.trim_end_matches(is_stripped);
    }
    meter.made(rest.len() as u64 + ITEM)?;
    Ok(Value::from(rest))
}

/// `'{}'.format(…)` and `'%s' | format(…)`.
fn format(meter: &Meter, style: FormatStyle, text: &Value, arguments: &[Value]) -> Result<Value, Error> {
    meter.look(text)?;
    let text = text.as_str().ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "only texts can be formats"))?;
    let mut number = 0;
    for character in text.chars() {
        number = character.to_digit(10).map_or(0, |digit| number * 10 + digit as usize);
        if number > WIDTH_MAX {
            return Err(too_much("a field of a format is too wide"));
        }
    }
    let (opening, is_printf) = match style {
        FormatStyle::StrFormat => ('{', false),
        _ => ('%', true),
    };
    if is_printf && text.contains('*') {
        return Err(too_much("a field of a format has a width that is an argument"));
    }
    let mut printed = Vec::new();
    let mut longest = 0;
    for argument in arguments {
        // Named arguments are a map of their own.
        if is_container(argument) && !argument.is_kwargs() {
            printed.push(python::string(meter, argument)?);
        } else {
            longest = longest.max(meter.look_deep(argument)?);
            printed.push(argument.clone());
        }
        longest = longest.max(printed.last().map_or(0, entries));
    }
    let fields = text.chars().filter(|character| *character == opening).count() as u64;
    meter.made(fields.saturating_mul(longest + 4 * WIDTH_MAX as u64).saturating_add(text.len() as u64))?;
    format_filter(style, text, &printed).map(Value::from)
}

fn range(meter: &Meter, lower: i64, upper: Option<i64>, step: Option<i64>) -> Result<Value, Error> {
    let (from, until) = upper.map_or((0, lower), |upper| (lower, upper));
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(Error::new(ErrorKind::InvalidOperation, "cannot create range with step of 0"));
    }
    let distance = if step > 0 { i128::from(until) - i128::from(from) } else { i128::from(from) - i128::from(until) };
    let count = usize::try_from((distance.max(0) + i128::from(step.unsigned_abs()) - 1) / i128::from(step.unsigned_abs()));
    let count = count.ok().filter(|count| *count <= COUNT_MAX).ok_or_else(|| too_much("a range has too many numbers"))?;
    meter.made(count as u64 * ITEM)?;
    Ok(std::iter::successors(Some(from), |at| at.checked_add(step)).take(count).map(Value::from).collect())
}

/// Python's methods.
fn method(meter: &Meter, state: &State<'_, '_>, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let text = if value.kind() == ValueKind::String { value.as_str() } else { None };
    let argument = |nth: usize| arguments.get(nth);
    match (text, name, arguments.len()) {
        (Some(_), "replace", 2 | 3) => {
            let most = argument(2).and_then(Value::as_i64).and_then(|most| usize::try_from(most).ok());
            return replace(meter, value, &arguments[0], &arguments[1], most);
        }
        (Some(_), "join", 1) => return join(meter, &arguments[0], Some(value.clone()), &Kwargs::from_iter::<[(String, Value); 0]>([])),
        (Some(_), "format", _) => return format(meter, FormatStyle::StrFormat, value, arguments),
        (Some(_), "split", 0..=2) => return split(meter, value, argument(0), argument(1).and_then(Value::as_i64)),
        (Some(text), "strip" | "lstrip" | "rstrip", 0 | 1) => {
            let characters = argument(0).filter(|it| !it.is_none()).map(|it| python::text(meter, it)).transpose()?;
            return strip(meter, text, characters.as_deref(), name != "rstrip", name != "lstrip");
        }
        // The empty text is between all characters, where it would be looked for without end.
        (Some(text), "count", 1) if argument(0).and_then(Value::as_str) == Some("") => {
            meter.look(value)?;
            return Ok(Value::from(text.chars().count() + 1));
        }
        (Some(_), "startswith" | "endswith", _) => {
            for argument in arguments {
                meter.look_deep(argument)?;
            }
        }
        (Some(_), "splitlines", _) => meter.list(value)?,
        (None, "count", _) => {
            meter.look_deep(value)?;
            for argument in arguments {
                let size = meter.look_deep(argument)?;
                meter.work(size.saturating_mul(entries(value)))?;
            }
        }
        (None, "get", 1 | 2) => {
            if arguments[0].as_object().is_some() {
                return Err(Error::new(ErrorKind::InvalidOperation, "a list or map cannot be a key"));
            }
            meter.look(&arguments[0])?;
            return minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments);
        }
        _ => {}
    }
    meter.look(value)?;
    for argument in arguments {
        meter.look(argument)?;
    }
    let made = minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments)?;
    meter.keep(made)
}
