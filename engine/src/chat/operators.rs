//! The interpreter's operators as [`super::program`] has it call them: the same results, bounded by what the rendering may use.

use std::cmp::Ordering;
use std::sync::Arc;

use minijinja::value::{Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};

use super::limits::{ITEM, Meter, entries, is_container};
use super::python;

/// Adds them to `environment`. Their names are none that a template can write.
pub(super) fn add(environment: &mut Environment<'_>, meter: &Arc<Meter>) {
    let mut with = |name: &'static str, operator: fn(&Meter, &[Value]) -> Result<Value, Error>| {
        let meter = Arc::clone(meter);
        environment.add_filter(name, move |operands: Rest<Value>| operator(&meter, &operands));
    };
    with("%add", add_values);
    with("%mul", multiply);
    with("%concat", concatenate);
    with("%eq", |meter, it| compare(meter, it, |a, b| a == b));
    with("%ne", |meter, it| compare(meter, it, |a, b| a != b));
    with("%gt", |meter, it| compare(meter, it, |a, b| a > b));
    with("%ge", |meter, it| compare(meter, it, |a, b| a >= b));
    with("%lt", |meter, it| compare(meter, it, |a, b| a < b));
    with("%le", |meter, it| compare(meter, it, |a, b| a <= b));
    with("%in", |meter, it| contains(meter, operand(it, 1), operand(it, 0)));
    with("%item", |meter, it| item(meter, operand(it, 0), operand(it, 1)));
    with("%slice", slice);
    with("%map", map);
    with("%list", |meter, it| {
        meter.put_in(operand(it, 0))?;
        meter.made(entries(operand(it, 0)) * ITEM)?;
        Ok(operand(it, 0).clone())
    });
    with("%put", |meter, it| {
        meter.put_in(operand(it, 0))?;
        Ok(operand(it, 0).clone())
    });
    with("%look", |meter, it| {
        meter.look(operand(it, 0))?;
        Ok(operand(it, 0).clone())
    });
    with("%unpack", |meter, it| {
        meter.list(operand(it, 0))?;
        Ok(operand(it, 0).clone())
    });
    with("%operand", |meter, it| {
        meter.look_deep(operand(it, 0))?;
        Ok(operand(it, 0).clone())
    });
    with("%pay", |meter, it| {
        meter.made(entries(operand(it, 0)).max(operand(it, 0).as_usize().unwrap_or(0) as u64))?;
        Ok(Value::UNDEFINED)
    });
}

fn operand(operands: &[Value], nth: usize) -> &Value {
    const NONE: &Value = &Value::UNDEFINED;
    operands.get(nth).unwrap_or(NONE)
}

fn fault(text: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, text)
}

fn unsupported(operator: char, left: &Value, right: &Value) -> Error {
    fault(format!("tried to use {operator} operator on unsupported types {} and {}", left.kind(), right.kind()))
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

/// `a + b` or `a * b` of numbers; booleans are numbers too, as in Python.
fn arithmetic(
    operator: char,
    left: &Value,
    right: &Value,
    whole: fn(i128, i128) -> Option<i128>,
    real: fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    let is_number = |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    if !is_number(left) || !is_number(right) {
        return Err(unsupported(operator, left, right));
    }
    let is_real = |value: &Value| value.kind() == ValueKind::Number && !value.is_integer();
    let float = |value: &Value| match value.kind() {
        ValueKind::Bool => Ok(f64::from(u8::from(value.is_true()))),
        _ => f64::try_from(value.clone()),
    };
    if is_real(left) || is_real(right) {
        return Ok(Value::from(real(float(left)?, float(right)?)));
    }
    let result = whole(i128::try_from(left.clone())?, i128::try_from(right.clone())?);
    let result = result.ok_or_else(|| fault(format!("unable to calculate {left} {operator} {right}")))?;
    Ok(i64::try_from(result).map_or_else(|_| Value::from(result), Value::from))
}

fn add_values(meter: &Meter, operands: &[Value]) -> Result<Value, Error> {
    let (left, right) = (operand(operands, 0), operand(operands, 1));
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        meter.made(a.len() as u64 + b.len() as u64 + ITEM)?;
        return Ok(Value::from([a, b].concat()));
    }
    if is_list(left) && is_list(right) {
        meter.list(left)?;
        meter.list(right)?;
        let mut items: Vec<Value> = left.try_iter()?.collect();
        items.extend(right.try_iter()?);
        return Ok(Value::from(items));
    }
    arithmetic('+', left, right, i128::checked_add, |a, b| a + b)
}

fn multiply(meter: &Meter, operands: &[Value]) -> Result<Value, Error> {
    let (left, right) = (operand(operands, 0), operand(operands, 1));
    let repeated = [(left, right), (right, left)].into_iter().find(|(what, _)| what.as_str().is_some() || is_list(what));
    let Some((what, times)) = repeated else {
        return arithmetic('*', left, right, i128::checked_mul, |a, b| a * b);
    };
    if !times.is_integer() {
        return Err(unsupported('*', left, right));
    }
    // Python takes negative numbers for 0.
    let times = times.as_usize().unwrap_or(match times.as_i64() {
        Some(number) if number < 0 => 0,
        _ => usize::MAX,
    });
    match what.as_str() {
        Some("") => Ok(what.clone()),
        Some(text) => {
            meter.made((text.len() as u64).saturating_mul(times as u64).saturating_add(ITEM))?;
            Ok(Value::from(text.repeat(times)))
        }
        None => {
            meter.made((entries(what).max(1)).saturating_mul(times as u64).saturating_mul(ITEM))?;
            let items: Vec<Value> = what.try_iter()?.collect();
            Ok(Value::from(std::iter::repeat_n(&items, times).flatten().cloned().collect::<Vec<_>>()))
        }
    }
}

fn concatenate(meter: &Meter, operands: &[Value]) -> Result<Value, Error> {
    let mut out = String::new();
    for value in operands {
        python::write_text(meter, value, &mut out)?;
    }
    meter.made(ITEM)?;
    Ok(Value::from(out))
}

/// Compares two values. What is compared entry by entry is looked at as a whole first.
fn compare(meter: &Meter, operands: &[Value], by: fn(&Value, &Value) -> bool) -> Result<Value, Error> {
    let (left, right) = (operand(operands, 0), operand(operands, 1));
    match (left.as_str(), right.as_str()) {
        (Some(a), Some(b)) => meter.work(a.len().min(b.len()) as u64)?,
        _ if is_container(left) && is_container(right) => {
            meter.look_deep(left)?;
            meter.look_deep(right)?;
        }
        _ => meter.work(1)?,
    }
    Ok(Value::from(by(left, right)))
}

/// Whether `container` has `value`.
pub(super) fn contains(meter: &Meter, container: &Value, value: &Value) -> Result<Value, Error> {
    if container.is_undefined() {
        return Ok(Value::from(false));
    }
    if let Some(text) = container.as_str() {
        let part = python::text(meter, value)?;
        meter.work(text.len() as u64 + part.len() as u64)?;
        return Ok(Value::from(text.contains(&*part)));
    }
    meter.look_deep(value)?;
    match container.kind() {
        ValueKind::Map => {
            scalar_key(value)?;
            let found = container.as_object().is_some_and(|object| object.get_value(value).is_some());
            Ok(Value::from(found))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            if is_container(value) {
                meter.look_deep(container)?;
            } else {
                meter.look(container)?;
                // Texts of other lengths are not compared.
                meter.work(entries(container).saturating_mul(entries(value) / 8))?;
            }
            Ok(Value::from(container.try_iter()?.any(|item| &item == value)))
        }
        _ => Err(fault("cannot perform a containment check on this value")),
    }
}

fn scalar_key(key: &Value) -> Result<(), Error> {
    match key.as_object() {
        Some(_) => Err(fault(format!("a {} cannot be a key", key.kind()))),
        None => Ok(()),
    }
}

/// `value[key]`.
pub(super) fn item(meter: &Meter, value: &Value, key: &Value) -> Result<Value, Error> {
    scalar_key(key)?;
    meter.look(key)?;
    if value.as_str().is_some() || value.kind() == ValueKind::Iterable {
        meter.look(value)?;
    }
    value.get_item(key)
}

/// `value[start:stop:step]`, as Python has it.
fn slice(meter: &Meter, operands: &[Value]) -> Result<Value, Error> {
    let value = operand(operands, 0);
    let bound = |nth: usize| match operand(operands, nth) {
        bound if bound.is_none() || bound.is_undefined() => Ok(None),
        bound => i64::try_from(bound.clone()).map(Some),
    };
    let (start, stop, step) = (bound(1)?, bound(2)?, bound(3)?.unwrap_or(1));
    if step == 0 {
        return Err(fault("cannot slice by step size of 0"));
    }
    meter.look(value)?;
    if let Some(text) = value.as_str() {
        let characters = text.chars().count();
        if step == 1 {
            let (from, until) = (place(start, characters, 0), place(stop, characters, characters));
            let at = |nth: usize| text.char_indices().nth(nth).map_or(text.len(), |(at, _)| at);
            let part = &text[at(from)..at(until.max(from))];
            meter.made(part.len() as u64 + ITEM)?;
            return Ok(Value::from(part));
        }
        meter.made(text.len() as u64 * 5 + ITEM)?;
        let characters: Vec<char> = text.chars().collect();
        return Ok(Value::from(indices(start, stop, step, characters.len()).map(|at| characters[at]).collect::<String>()));
    }
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => Ok(Value::from(Vec::<Value>::new())),
        ValueKind::Seq | ValueKind::Iterable => {
            meter.list(value)?;
            let items: Vec<Value> = value.try_iter()?.collect();
            Ok(Value::from(indices(start, stop, step, items.len()).map(|at| items[at].clone()).collect::<Vec<_>>()))
        }
        kind => Err(fault(format!("value of type {kind} cannot be sliced"))),
    }
}

/// A bound of a slice that goes forward.
fn place(bound: Option<i64>, length: usize, absent: usize) -> usize {
    match bound {
        None => absent,
        Some(bound) if bound < 0 => length.saturating_sub(usize::try_from(bound.unsigned_abs()).unwrap_or(usize::MAX)),
        Some(bound) => usize::try_from(bound).unwrap_or(usize::MAX).min(length),
    }
}

/// The places that a slice of `length` entries has.
fn indices(start: Option<i64>, stop: Option<i64>, step: i64, length: usize) -> impl Iterator<Item = usize> {
    let stride = usize::try_from(step.unsigned_abs()).unwrap_or(usize::MAX);
    let (forward, backward) = match step.cmp(&0) {
        Ordering::Less => {
            // Counted from the end: the place one before the first is 0 here.
            let before = |bound: Option<i64>, absent: usize| match bound {
                None => absent,
                Some(bound) if bound < 0 => (length + 1).saturating_sub(usize::try_from(bound.unsigned_abs()).unwrap_or(usize::MAX)),
                Some(bound) => usize::try_from(bound).unwrap_or(usize::MAX).min(length.saturating_sub(1)) + 1,
            };
            let (from, until) = (before(start, length).min(length), before(stop, 0));
            (None, Some((until..from).rev()))
        }
        _ => (Some(place(start, length, 0)..place(stop, length, length)), None),
    };
    forward.into_iter().flatten().chain(backward.into_iter().flatten()).step_by(stride)
}

fn map(meter: &Meter, operands: &[Value]) -> Result<Value, Error> {
    meter.made(operands.len() as u64 * 2 * ITEM)?;
    for pair in operands.chunks_exact(2) {
        scalar_key(&pair[0])?;
        meter.look(&pair[0])?;
        meter.put_in(&pair[1])?;
    }
    let made = Value::from_iter(operands.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())));
    // One level more.
    meter.put_in(&made)?;
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_pythons() {
        let run = |start: Option<i64>, stop: Option<i64>, step: i64| indices(start, stop, step, 5).collect::<Vec<_>>();
        assert_eq!(run(None, None, 1), [0, 1, 2, 3, 4]);
        assert_eq!(run(Some(1), Some(-1), 2), [1, 3]);
        assert_eq!(run(None, None, -1), [4, 3, 2, 1, 0]);
        assert_eq!(run(Some(-2), None, -1), [3, 2, 1, 0]);
        assert_eq!(run(Some(3), Some(0), -1), [3, 2, 1]);
        assert_eq!(run(Some(99), Some(-99), -2), [4, 2, 0]);
        assert_eq!(run(Some(0), None, -1), [0]);
        assert_eq!(run(Some(-9), None, -1), Vec::<usize>::new());
        assert_eq!(run(Some(4), Some(2), 1), Vec::<usize>::new());
        assert_eq!(run(Some(i64::MIN), Some(i64::MAX), i64::MAX), [0]);
        assert_eq!(indices(None, None, -1, 0).count(), 0);
        assert_eq!(indices(Some(0), None, i64::MIN, 0).count(), 0);
    }
}
