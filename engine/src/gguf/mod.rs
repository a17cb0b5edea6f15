//! GGUF files: a header of typed metadata and tensor descriptions, then the tensors' bytes.
//!
//! The format is described in ggml's `docs/gguf.md`. Versions 2 and 3, little-endian, are read. A file is mapped, not
//! read, and everything in its header is checked before anything is handed out: whoever has a [`Gguf`] can rely on
//! every tensor lying within the file, aligned, apart from the others, and of a size that follows from its shape.

mod cursor;
mod error;
mod header;
mod source;
mod value;
mod writer;

pub use error::{GgufError, GgufFault, Place};
pub use value::{Array, Value};
pub use writer::Writer;

use crate::quant::{self, BlockType, QuantError};
use header::{Header, TensorInfo};
use source::Source;
use std::path::Path;
use std::sync::Arc;

/// An open GGUF file. Clones share it.
#[derive(Debug, Clone)]
pub struct Gguf {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    name: String,
    source: Source,
    header: Header,
}

impl Gguf {
    /// Maps a file and checks its header. Tensors are read from the disk as they are touched.
    ///
    /// The file must not be changed while it is open: replace it by renaming another over it.
    ///
    /// # Errors
    /// [`GgufError`], which names the file, where in it the fault is, and what to do.
    pub fn open(path: &Path) -> Result<Gguf, GgufError> {
        let name = path.display().to_string();
        let fail = |fault| GgufError { file: name.clone(), fault };
        let source = Source::map(path).map_err(|error| fail(GgufFault::Io(error)))?;
        let header = Header::read(source.bytes()).map_err(fail)?;
        Ok(Gguf { shared: Arc::new(Shared { name, source, header }) })
    }

    /// The same for a file in memory.
    ///
    /// # Errors
    /// As [`Gguf::open`].
    pub fn parse(bytes: impl Into<Arc<[u8]>>) -> Result<Gguf, GgufError> {
        let name = String::from("GGUF in memory");
        let source = Source::Memory(bytes.into());
        match Header::read(source.bytes()) {
            Ok(header) => Ok(Gguf { shared: Arc::new(Shared { name, source, header }) }),
            Err(fault) => Err(GgufError { file: name, fault }),
        }
    }

    /// The file's path, for messages.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Length of the file in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.shared.source.bytes().len() as u64
    }

    /// The format's version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.shared.header.version
    }

    /// What tensors are aligned to, in bytes from the file's start.
    pub fn alignment(&self) -> u64 {
        self.shared.header.alignment
    }

    /// Where the tensors' bytes start in the file.
    pub fn data_offset(&self) -> u64 {
        self.shared.header.data_offset as u64
    }

    /// A metadata value.
    pub fn metadata(&self, key: &str) -> Option<&Value> {
        self.shared.header.metadata.get(key)
    }

    /// All metadata, in the file's order.
    pub fn all_metadata(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.shared.header.metadata.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// An integer of any width that fits; `None` if absent or of another type.
    pub fn u32(&self, key: &str) -> Option<u32> {
        self.metadata(key)?.as_u64()?.try_into().ok()
    }

    /// An integer of any width that is not negative.
    pub fn u64(&self, key: &str) -> Option<u64> {
        self.metadata(key)?.as_u64()
    }

    /// A floating-point number.
    pub fn f32(&self, key: &str) -> Option<f32> {
        self.metadata(key)?.as_f32()
    }

    /// A truth value.
    pub fn bool(&self, key: &str) -> Option<bool> {
        self.metadata(key)?.as_bool()
    }

    /// A string.
    pub fn str(&self, key: &str) -> Option<&str> {
        self.metadata(key)?.as_str()
    }

    /// An array of strings.
    pub fn strings(&self, key: &str) -> Option<&[String]> {
        match self.metadata(key)?.as_array()? {
            Array::Strings(strings) => Some(strings),
            _ => None,
        }
    }

    /// An array of 32-bit floating-point numbers.
    pub fn f32s(&self, key: &str) -> Option<&[f32]> {
        match self.metadata(key)?.as_array()? {
            Array::F32(numbers) => Some(numbers),
            _ => None,
        }
    }

    /// An array of signed 32-bit integers.
    pub fn i32s(&self, key: &str) -> Option<&[i32]> {
        match self.metadata(key)?.as_array()? {
            Array::I32(numbers) => Some(numbers),
            _ => None,
        }
    }

    /// A tensor by its name.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (name, info) = self.shared.header.tensors.get_key_value(name)?;
        Some(self.view(name, info))
    }

    /// All tensors, in the file's order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorView<'_>> {
        self.shared.header.tensors.iter().map(|(name, info)| self.view(name, info))
    }

    /// Lets the system take back the memory in which a tensor's bytes were read, once they have been copied elsewhere. They can
    /// be read again at any time.
    pub fn forget(&self, view: &TensorView<'_>) {
        if let Some(info) = self.shared.header.tensors.get(view.name) {
            self.shared.source.forget(info.range.clone());
        }
    }

    fn view<'a>(&'a self, name: &'a str, info: &'a TensorInfo) -> TensorView<'a> {
        let bytes = &self.shared.source.bytes()[info.range.clone()];
        TensorView { name, shape: &info.shape, block: info.block, offset: info.range.start as u64, bytes }
    }
}

/// A tensor in a file.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its dimensions in ggml's order: the first is the length of a row, which is contiguous. One to four, none zero.
    pub shape: &'a [u64],
    /// Type of its elements.
    pub block: BlockType,
    /// Where it starts in the file, in bytes.
    pub offset: u64,
    /// Its elements: [`TensorView::rows`] rows of [`TensorView::row_bytes`] bytes, one after the other. No alignment
    /// in memory should be relied on.
    pub bytes: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// Elements of a row: the first dimension.
    pub fn row_len(&self) -> usize {
        // The reader made sure that a row fits the address space, and that there is a first dimension.
        self.shape.first().map_or(1, |&length| length as usize)
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.row_len() / self.block.block_len() * self.block.block_bytes()
    }

    /// Rows: all dimensions but the first, multiplied.
    pub fn rows(&self) -> usize {
        self.bytes.len() / self.row_bytes()
    }

    /// Elements in all.
    pub fn elements(&self) -> usize {
        self.row_len() * self.rows()
    }

    /// The bytes of row `index`, if there is one.
    pub fn row(&self, index: usize) -> Option<&'a [u8]> {
        self.bytes.chunks_exact(self.row_bytes()).nth(index)
    }

    /// All its elements as plain numbers, in a new vector.
    ///
    /// # Errors
    /// [`QuantError::Unsupported`].
    pub fn dequantise(&self) -> Result<Vec<f32>, QuantError> {
        if !self.block.is_supported() {
            return Err(QuantError::Unsupported(self.block));
        }
        let mut elements = vec![0.0; self.elements()];
        quant::dequantise(self.block, self.bytes, &mut elements)?;
        Ok(elements)
    }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
