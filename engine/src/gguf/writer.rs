//! Writes GGUF files: for conversions, and for tests that need a file with something particular in it.

use super::header::{ALIGNMENT_KEY, ALIGNMENT_LIMIT, DEFAULT_ALIGNMENT, MAGIC};
use super::value::{Array, Value, id};
use crate::quant::BlockType;

/// Collects metadata and tensors and writes a GGUF file of version 3.
///
/// It does not check what it is given: what it writes may be refused by [`Gguf`](super::Gguf), which tests make use
/// of.
#[derive(Debug, Clone, Default)]
pub struct Writer {
    metadata: Vec<(String, Value)>,
    tensors: Vec<(String, Vec<u64>, BlockType, Vec<u8>)>,
}

impl Writer {
    /// Nothing in it yet.
    pub fn new() -> Writer {
        Writer::default()
    }

    /// Adds a metadata entry, or replaces the one with that key.
    pub fn metadata(&mut self, key: &str, value: Value) -> &mut Writer {
        match self.metadata.iter_mut().find(|(name, _)| name == key) {
            Some((_, old)) => *old = value,
            None => self.metadata.push((key.to_owned(), value)),
        }
        self
    }

    /// Adds a tensor: name, dimensions in ggml's order (row length first), type, and its bytes.
    pub fn tensor(&mut self, name: &str, shape: &[u64], block: BlockType, bytes: Vec<u8>) -> &mut Writer {
        self.tensors.push((name.to_owned(), shape.to_vec(), block, bytes));
        self
    }

    /// The file.
    pub fn finish(&self) -> Vec<u8> {
        let alignment = self.metadata.iter().find(|(key, _)| key == ALIGNMENT_KEY).and_then(|(_, value)| value.as_u64());
        let alignment = alignment.filter(|alignment| (1..=ALIGNMENT_LIMIT).contains(alignment)).unwrap_or(DEFAULT_ALIGNMENT) as usize;
        let mut out = Vec::new();
        out.extend(MAGIC);
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            string(&mut out, key);
            write_value(&mut out, value);
        }
        let mut offset = 0usize;
        for (name, shape, block, bytes) in &self.tensors {
            string(&mut out, name);
            out.extend((shape.len() as u32).to_le_bytes());
            shape.iter().for_each(|length| out.extend(length.to_le_bytes()));
            out.extend(block.id().to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = (offset + bytes.len()).next_multiple_of(alignment);
        }
        for (_, _, _, bytes) in &self.tensors {
            out.resize(out.len().next_multiple_of(alignment), 0);
            out.extend(bytes);
        }
        out
    }
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn write_value(out: &mut Vec<u8>, value: &Value) {
    let mut number = |id: u32, bytes: &[u8]| {
        out.extend(id.to_le_bytes());
        out.extend(bytes);
    };
    match value {
        Value::U8(n) => number(id::U8, &n.to_le_bytes()),
        Value::I8(n) => number(id::I8, &n.to_le_bytes()),
        Value::U16(n) => number(id::U16, &n.to_le_bytes()),
        Value::I16(n) => number(id::I16, &n.to_le_bytes()),
        Value::U32(n) => number(id::U32, &n.to_le_bytes()),
        Value::I32(n) => number(id::I32, &n.to_le_bytes()),
        Value::U64(n) => number(id::U64, &n.to_le_bytes()),
        Value::I64(n) => number(id::I64, &n.to_le_bytes()),
        Value::F32(n) => number(id::F32, &n.to_le_bytes()),
        Value::F64(n) => number(id::F64, &n.to_le_bytes()),
        Value::Bool(truth) => number(id::BOOL, &[u8::from(*truth)]),
        Value::String(text) => {
            number(id::STRING, &[]);
            string(out, text);
        }
        Value::Array(array) => {
            number(id::ARRAY, &[]);
            write_array(out, array);
        }
    }
}

fn write_array(out: &mut Vec<u8>, array: &Array) {
    fn elements<T>(out: &mut Vec<u8>, id: u32, elements: &[T], write: impl Fn(&mut Vec<u8>, &T)) {
        out.extend(id.to_le_bytes());
        out.extend((elements.len() as u64).to_le_bytes());
        elements.iter().for_each(|element| write(out, element));
    }
    match array {
        Array::U8(v) => elements(out, id::U8, v, |out, n| out.push(*n)),
        Array::I8(v) => elements(out, id::I8, v, |out, n| out.extend(n.to_le_bytes())),
        Array::U16(v) => elements(out, id::U16, v, |out, n| out.extend(n.to_le_bytes())),
        Array::I16(v) => elements(out, id::I16, v, |out, n| out.extend(n.to_le_bytes())),
        Array::U32(v) => elements(out, id::U32, v, |out, n| out.extend(n.to_le_bytes())),
        Array::I32(v) => elements(out, id::I32, v, |out, n| out.extend(n.to_le_bytes())),
        Array::U64(v) => elements(out, id::U64, v, |out, n| out.extend(n.to_le_bytes())),
        Array::I64(v) => elements(out, id::I64, v, |out, n| out.extend(n.to_le_bytes())),
        Array::F32(v) => elements(out, id::F32, v, |out, n| out.extend(n.to_le_bytes())),
        Array::F64(v) => elements(out, id::F64, v, |out, n| out.extend(n.to_le_bytes())),
        Array::Bools(v) => elements(out, id::BOOL, v, |out, truth| out.push(u8::from(*truth))),
        Array::Strings(v) => elements(out, id::STRING, v, |out, text| string(out, text)),
        Array::Arrays(v) => elements(out, id::ARRAY, v, write_array),
    }
}
