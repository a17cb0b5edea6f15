//! Typed metadata values.

use super::cursor::Cursor;
use super::error::{GgufFault, Place};

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "named for what they hold")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array(Array),
}

/// An array of values of one type.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "named for what they hold")]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bools(Vec<bool>),
    Strings(Vec<String>),
    Arrays(Vec<Array>),
}

/// The format's numbers for types.
pub(super) mod id {
    pub(in super::super) const U8: u32 = 0;
    pub(in super::super) const I8: u32 = 1;
    pub(in super::super) const U16: u32 = 2;
    pub(in super::super) const I16: u32 = 3;
    pub(in super::super) const U32: u32 = 4;
    pub(in super::super) const I32: u32 = 5;
    pub(in super::super) const F32: u32 = 6;
    pub(in super::super) const BOOL: u32 = 7;
    pub(in super::super) const STRING: u32 = 8;
    pub(in super::super) const ARRAY: u32 = 9;
    pub(in super::super) const U64: u32 = 10;
    pub(in super::super) const I64: u32 = 11;
    pub(in super::super) const F64: u32 = 12;
}

impl Value {
    /// An integer of any width that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::U8(n) => Some(n.into()),
            Value::U16(n) => Some(n.into()),
            Value::U32(n) => Some(n.into()),
            Value::U64(n) => Some(n),
            Value::I8(n) => n.try_into().ok(),
            Value::I16(n) => n.try_into().ok(),
            Value::I32(n) => n.try_into().ok(),
            Value::I64(n) => n.try_into().ok(),
            _ => None,
        }
    }

    /// A floating-point number of either width.
    pub fn as_f32(&self) -> Option<f32> {
        match *self {
            Value::F32(number) => Some(number),
            Value::F64(number) => Some(number as f32),
            _ => None,
        }
    }

    /// A truth value.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Value::Bool(truth) => Some(truth),
            _ => None,
        }
    }

    /// A string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    /// An array.
    pub fn as_array(&self) -> Option<&Array> {
        match self {
            Value::Array(array) => Some(array),
            _ => None,
        }
    }

    /// What sort of value it is, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Value::U8(_) | Value::I8(_) | Value::U16(_) | Value::I16(_) => "a small integer",
            Value::U32(_) | Value::I32(_) | Value::U64(_) | Value::I64(_) => "an integer",
            Value::F32(_) | Value::F64(_) => "a floating-point number",
            Value::Bool(_) => "a truth value",
            Value::String(_) => "a string",
            Value::Array(_) => "an array",
        }
    }

    /// Reads a value with its type before it.
    pub(super) fn read(cursor: &mut Cursor<'_>, key: &str) -> Result<Value, GgufFault> {
        let place = &|| Place::Key(key.to_owned());
        let kind = cursor.u32(place)?;
        Ok(match kind {
            id::U8 => Value::U8(u8::from_le_bytes(cursor.array(place)?)),
            id::I8 => Value::I8(i8::from_le_bytes(cursor.array(place)?)),
            id::U16 => Value::U16(u16::from_le_bytes(cursor.array(place)?)),
            id::I16 => Value::I16(i16::from_le_bytes(cursor.array(place)?)),
            id::U32 => Value::U32(u32::from_le_bytes(cursor.array(place)?)),
            id::I32 => Value::I32(i32::from_le_bytes(cursor.array(place)?)),
            id::F32 => Value::F32(f32::from_le_bytes(cursor.array(place)?)),
            id::BOOL => Value::Bool(read_bool(cursor, place)?),
            id::STRING => Value::String(cursor.string(place)?),
            id::ARRAY => Value::Array(Array::read(cursor, place, 0)?),
            id::U64 => Value::U64(u64::from_le_bytes(cursor.array(place)?)),
            id::I64 => Value::I64(i64::from_le_bytes(cursor.array(place)?)),
            id::F64 => Value::F64(f64::from_le_bytes(cursor.array(place)?)),
            id => return Err(GgufFault::ValueType { at: place(), id }),
        })
    }
}

fn read_bool(cursor: &mut Cursor<'_>, place: &dyn Fn() -> Place) -> Result<bool, GgufFault> {
    match cursor.array(place)? {
        [0] => Ok(false),
        [1] => Ok(true),
        [byte] => Err(GgufFault::Bool { at: place(), byte }),
    }
}

/// Arrays within arrays within arrays: deeper than anybody writes, shallow enough for the stack.
const NESTING_LIMIT: usize = 4;

/// Elements that room is made for on the array's word alone.
const TRUSTED: usize = 4096;

impl Array {
    /// Elements in it.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::F64(v) => v.len(),
            Array::Bools(v) => v.len(),
            Array::Strings(v) => v.len(),
            Array::Arrays(v) => v.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its integers, whatever their width, if all fit and none is negative.
    pub fn as_u64s(&self) -> Option<Vec<u64>> {
        fn all<T: Copy + TryInto<u64>>(numbers: &[T]) -> Option<Vec<u64>> {
            numbers.iter().map(|&n| n.try_into().ok()).collect()
        }
        match self {
            Array::U8(v) => all(v),
            Array::I8(v) => all(v),
            Array::U16(v) => all(v),
            Array::I16(v) => all(v),
            Array::U32(v) => all(v),
            Array::I32(v) => all(v),
            Array::U64(v) => all(v),
            Array::I64(v) => all(v),
            _ => None,
        }
    }

    /// Its truth values.
    pub fn as_bools(&self) -> Option<&[bool]> {
        match self {
            Array::Bools(truths) => Some(truths),
            _ => None,
        }
    }

    /// Reads an array with its type and length before it.
    fn read(cursor: &mut Cursor<'_>, place: &dyn Fn() -> Place, depth: usize) -> Result<Array, GgufFault> {
        if depth == NESTING_LIMIT {
            return Err(GgufFault::Nesting { at: place(), limit: NESTING_LIMIT });
        }
        let kind = cursor.u32(place)?;
        let count = cursor.u64(place)?;
        // The least that an element takes in the file bounds how many there can be, before any room is made for them.
        let least: usize = match kind {
            id::U8 | id::I8 | id::BOOL => 1,
            id::U16 | id::I16 => 2,
            id::U32 | id::I32 | id::F32 => 4,
            id::U64 | id::I64 | id::F64 | id::STRING => 8,
            id::ARRAY => 12,
            id => return Err(GgufFault::ValueType { at: place(), id }),
        };
        let limit = cursor.remaining() / least;
        let count = match usize::try_from(count) {
            Ok(count) if count <= limit => count,
            _ => return Err(GgufFault::Count { at: place(), count, limit: limit as u64 }),
        };
        Ok(match kind {
            id::U8 => Array::U8(cursor.take(count, place)?.to_vec()),
            id::I8 => Array::I8(numbers(cursor, count, place, i8::from_le_bytes)?),
            id::U16 => Array::U16(numbers(cursor, count, place, u16::from_le_bytes)?),
            id::I16 => Array::I16(numbers(cursor, count, place, i16::from_le_bytes)?),
            id::U32 => Array::U32(numbers(cursor, count, place, u32::from_le_bytes)?),
            id::I32 => Array::I32(numbers(cursor, count, place, i32::from_le_bytes)?),
            id::U64 => Array::U64(numbers(cursor, count, place, u64::from_le_bytes)?),
            id::I64 => Array::I64(numbers(cursor, count, place, i64::from_le_bytes)?),
            id::F32 => Array::F32(numbers(cursor, count, place, f32::from_le_bytes)?),
            id::F64 => Array::F64(numbers(cursor, count, place, f64::from_le_bytes)?),
            id::BOOL => Array::Bools(each(count, || read_bool(cursor, place))?),
            id::STRING => Array::Strings(each(count, || cursor.string(place))?),
            // Only arrays are left.
            _ => Array::Arrays(each(count, || Array::read(cursor, place, depth + 1))?),
        })
    }
}

/// Numbers one after the other.
fn numbers<T, const N: usize>(
    cursor: &mut Cursor<'_>,
    count: usize,
    place: &dyn Fn() -> Place,
    number: fn([u8; N]) -> T,
) -> Result<Vec<T>, GgufFault> {
    // Cannot overflow: the count was held against the bytes that are left.
    let (chunks, _) = cursor.take(count * N, place)?.as_chunks::<N>();
    Ok(chunks.iter().map(|bytes| number(*bytes)).collect())
}

/// Elements that have to be read to know their size. A false count is found at the first that is not there, so room
/// grows with what was read.
fn each<T>(count: usize, mut next: impl FnMut() -> Result<T, GgufFault>) -> Result<Vec<T>, GgufFault> {
    let mut elements = Vec::with_capacity(count.min(TRUSTED));
    for _ in 0..count {
        elements.push(next()?);
    }
    Ok(elements)
}
