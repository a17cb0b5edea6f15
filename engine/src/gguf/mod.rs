//! GGUF files: a header of typed metadata and tensor descriptions, then the tensors' bytes.
//!
//! The format is described in ggml's `docs/gguf.md`. Versions 2 and 3, little-endian, are read. A file is mapped, not
//! read, and everything in its header is checked before anything is handed out: whoever has a [`Gguf`] can rely on
//! every tensor lying within the file, aligned, apart from the others, and of a size that follows from its shape. A model in several
//! files is opened by any of them.

mod cursor;
mod error;
mod header;
mod parts;
mod source;
mod value;
mod writer;

pub use error::{GgufError, GgufFault, Place};
pub use value::{Array, Value};
pub use writer::Writer;

use crate::quant::{self, BlockType, QuantError};
use header::Header;
use parts::Part;
use source::Source;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An open GGUF file. Clones share it.
#[derive(Debug, Clone)]
pub struct Gguf {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    name: String,
    /// At least one; the first has the metadata.
    parts: Vec<Part>,
    /// Every tensor: its part, and its place among the part's.
    places: Vec<(usize, usize)>,
}

impl Gguf {
    /// Maps a file and checks its header. Tensors are read from the disk as they are touched.
    ///
    /// A file that is one of several parts of a model opens them all, which must be in the same folder under their usual names.
    ///
    /// The files must not be changed while they are open: replace them by renaming others over them.
    ///
    /// # Errors
    /// [`GgufError`], which names the file, where in it the fault is, and what to do.
    pub fn open(path: &Path) -> Result<Gguf, GgufError> {
        Ok(Gguf::of(path.display().to_string(), parts::open(path)?))
    }

    /// The same for a file in memory, which is looked at alone.
    ///
    /// # Errors
    /// As [`Gguf::open`].
    pub fn parse(bytes: impl Into<Arc<[u8]>>) -> Result<Gguf, GgufError> {
        let name = String::from("GGUF in memory");
        let source = Source::Memory(bytes.into());
        match Header::read(source.bytes()) {
            Ok(header) => Ok(Gguf::of(name, vec![Part { path: PathBuf::new(), source, header }])),
            Err(fault) => Err(GgufError { file: name, fault }),
        }
    }

    fn of(name: String, parts: Vec<Part>) -> Gguf {
        let places = parts.iter().enumerate().flat_map(|(part, of)| (0..of.header.tensors.len()).map(move |place| (part, place)));
        let places = places.collect();
        Gguf { shared: Arc::new(Shared { name, parts, places }) }
    }

    fn first(&self) -> &Part {
        // There is always one.
        &self.shared.parts[0]
    }

    /// The files' paths in their order: one, or one for each part. Empty paths for what was never a file.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.shared.parts.iter().map(|part| part.path.as_path())
    }

    /// Whether all parts of the model are here. Only a part that was read from memory is without the others.
    pub fn is_whole(&self) -> bool {
        self.first().count() == self.shared.parts.len() as u64
    }

    /// The file's path, for messages.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Length of the file, or of all parts together, in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.shared.parts.iter().map(|part| part.source.bytes().len() as u64).sum()
    }

    /// The format's version, 2 or 3, of the first part.
    pub fn version(&self) -> u32 {
        self.first().header.version
    }

    /// What tensors of the first part are aligned to, in bytes from the file's start.
    pub fn alignment(&self) -> u64 {
        self.first().header.alignment
    }

    /// Where the tensors' bytes start in the first part.
    pub fn data_offset(&self) -> u64 {
        self.first().header.data_offset as u64
    }

    /// A metadata value.
    pub fn metadata(&self, key: &str) -> Option<&Value> {
        self.first().header.metadata.get(key)
    }

    /// All metadata, in the file's order.
    pub fn all_metadata(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.first().header.metadata.iter().map(|(key, value)| (key.as_str(), value))
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
        self.shared.parts.iter().find_map(|part| part.header.tensors.get_index_of(name).and_then(|place| view(part, place)))
    }

    /// All tensors, in the files' order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorView<'_>> {
        // Places were made from the parts, so each has its tensor.
        self.shared.places.iter().map(|&(part, place)| view(&self.shared.parts[part], place).unwrap_or(TensorView::NONE))
    }

    /// Lets the system take back the memory in which a tensor's bytes were read, once they have been copied elsewhere. They can
    /// be read again at any time.
    pub fn forget(&self, view: &TensorView<'_>) {
        let found = self.shared.parts.iter().find_map(|part| Some((part, part.header.tensors.get(view.name)?)));
        if let Some((part, info)) = found {
            part.source.forget(info.range.clone());
        }
    }
}

fn view(part: &Part, place: usize) -> Option<TensorView<'_>> {
    let (name, info) = part.header.tensors.get_index(place)?;
    let bytes = &part.source.bytes()[info.range.clone()];
    Some(TensorView { name, shape: &info.shape, block: info.block, offset: info.range.start as u64, bytes })
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
    /// Where it starts in its file, in bytes.
    pub offset: u64,
    /// Its elements: [`TensorView::rows`] rows of [`TensorView::row_bytes`] bytes, one after the other. No alignment
    /// in memory should be relied on.
    pub bytes: &'a [u8],
}

impl<'a> TensorView<'a> {
    const NONE: TensorView<'static> = TensorView { name: "", shape: &[1], block: BlockType::F32, offset: 0, bytes: &[0; 4] };

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

    /// Some of its rows, as a tensor of one dimension, the length of a row, however many rows there are; `None` if there are not so many.
    pub fn some_rows(&self, rows: std::ops::Range<usize>) -> Option<TensorView<'a>> {
        let row = self.row_bytes();
        let bytes = self.bytes.get(rows.start.checked_mul(row)?..rows.end.checked_mul(row)?)?;
        Some(TensorView { shape: self.shape.get(..1)?, offset: self.offset + (rows.start * row) as u64, bytes, ..*self })
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
