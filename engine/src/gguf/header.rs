//! The header: read once, checked as a whole.

use super::cursor::Cursor;
use super::error::{GgufFault, Place};
use super::value::Value;
use crate::quant::BlockType;
use indexmap::IndexMap;
use indexmap::map::Entry;
use std::ops::Range;

/// What a file says of itself.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) alignment: u64,
    /// Where the tensors' bytes start.
    pub(super) data_offset: usize,
    pub(super) metadata: IndexMap<String, Value>,
    pub(super) tensors: IndexMap<String, TensorInfo>,
}

/// A tensor, all of it checked against the file.
#[derive(Debug)]
pub(super) struct TensorInfo {
    pub(super) shape: Vec<u64>,
    pub(super) block: BlockType,
    /// Its bytes in the file.
    pub(super) range: Range<usize>,
}

/// A tensor as the header describes it.
struct Claim {
    name: String,
    shape: Vec<u64>,
    block: BlockType,
    size: u64,
    /// From the start of the tensor data.
    offset: u64,
}

pub(super) const MAGIC: [u8; 4] = *b"GGUF";
/// Alignment where the file does not say otherwise, in bytes.
pub(super) const DEFAULT_ALIGNMENT: u64 = 32;
pub(super) const ALIGNMENT_KEY: &str = "general.alignment";
/// Greatest alignment in bytes; more than any page.
pub(super) const ALIGNMENT_LIMIT: u64 = 1 << 20;
/// Longest name of a metadata entry, as the format's description has it.
const KEY_LIMIT: usize = 65535;
/// Longest name of a tensor. ggml holds 63 bytes; nobody needs more than this.
const NAME_LIMIT: usize = 1024;
/// Most dimensions, as ggml has it.
const DIMENSIONS_LIMIT: u32 = 4;
/// The least that entries take in a header: length of the key, one byte of it, type and one byte of value; length of
/// the name, one byte of it, number of dimensions, one of them, type and offset.
const METADATA_BYTES: u64 = 8 + 1 + 4 + 1;
const TENSOR_BYTES: u64 = 8 + 1 + 4 + 8 + 4 + 8;
/// Most entries of either sort, whatever the file's size. The largest known models have some 50 000 tensors.
const ENTRIES_LIMIT: u64 = 1 << 20;

impl Header {
    /// Reads the header of a whole file.
    pub(super) fn read(file: &[u8]) -> Result<Header, GgufFault> {
        let mut cursor = Cursor::new(file);
        let version = read_version(&mut cursor, file)?;
        let tensor_count = cursor.u64(&|| Place::TensorCount)?;
        let metadata_count = cursor.u64(&|| Place::MetadataCount)?;
        let remaining = cursor.remaining() as u64;
        bound(tensor_count, ENTRIES_LIMIT.min(remaining / TENSOR_BYTES), Place::TensorCount)?;
        bound(metadata_count, ENTRIES_LIMIT.min(remaining / METADATA_BYTES), Place::MetadataCount)?;

        let metadata = read_metadata(&mut cursor, metadata_count)?;
        let alignment = alignment(&metadata)?;
        let claims = (0..tensor_count).map(|index| Claim::read(&mut cursor, index)).collect::<Result<Vec<_>, _>>()?;
        let data_offset = match (cursor.position() as u64).checked_next_multiple_of(alignment) {
            // A file without tensors may end where its header does.
            Some(offset) if claims.is_empty() => offset.min(file.len() as u64),
            Some(offset) => offset,
            None => return Err(GgufFault::Truncated { at: Place::Start }),
        };
        let available = (file.len() as u64).saturating_sub(data_offset);
        let mut tensors = IndexMap::with_capacity(claims.len());
        for claim in claims {
            let range = claim.range(alignment, available, data_offset)?;
            match tensors.entry(claim.name) {
                Entry::Occupied(entry) => return Err(GgufFault::Duplicate { at: Place::Tensor(entry.key().clone()) }),
                Entry::Vacant(entry) => entry.insert(TensorInfo { shape: claim.shape, block: claim.block, range }),
            };
        }
        apart(&tensors)?;
        Ok(Header { version, alignment, data_offset: data_offset as usize, metadata, tensors })
    }
}

fn bound(count: u64, limit: u64, at: Place) -> Result<(), GgufFault> {
    if count > limit { Err(GgufFault::Count { at, count, limit }) } else { Ok(()) }
}

/// Magic and version.
fn read_version(cursor: &mut Cursor<'_>, file: &[u8]) -> Result<u32, GgufFault> {
    let start = &|| Place::Start;
    if !file.starts_with(&MAGIC) {
        return Err(match file.len() {
            0..4 if MAGIC.starts_with(file) && !file.is_empty() => GgufFault::Truncated { at: Place::Start },
            _ => GgufFault::Magic { seen: resembles(file).to_owned() },
        });
    }
    cursor.take(MAGIC.len(), start)?;
    match cursor.u32(start)? {
        version @ (2 | 3) => Ok(version),
        // Small numbers seen from the wrong end.
        version if version & 0xffff == 0 && version != 0 => Err(GgufFault::BigEndian),
        version => Err(GgufFault::Version(version)),
    }
}

/// What a file that is no GGUF seems to be.
fn resembles(file: &[u8]) -> &'static str {
    const KNOWN: [(&[u8], &str); 12] = [
        (b"FUGG", "a GGUF file with its magic reversed"),
        (b"lmgg", "a file in ggml's format from before GGUF"),
        (b"fmgg", "a file in ggml's format from before GGUF"),
        (b"tjgg", "a file in ggml's format from before GGUF"),
        (b"algg", "an adapter in ggml's format from before GGUF"),
        (b"version https://git-lfs", "a pointer that Git LFS left in place of the file"),
        (b"<", "a web page or XML"),
        (b"{", "JSON"),
        (b"PK\x03\x04", "a ZIP archive"),
        (b"\x1f\x8b", "a gzip archive"),
        (b"\0\0\0\0", "a run of zeros, perhaps an unfinished download"),
        (b"Entry not found", "an answer of a server that does not have the file"),
    ];
    if file.is_empty() {
        return "empty";
    }
    if file.get(8) == Some(&b'{') {
        return "a safetensors file";
    }
    KNOWN.iter().find(|(start, _)| file.starts_with(start)).map_or("something else", |(_, name)| name)
}

fn read_metadata(cursor: &mut Cursor<'_>, count: u64) -> Result<IndexMap<String, Value>, GgufFault> {
    let mut metadata = IndexMap::new();
    for index in 0..count {
        let place = &|| Place::KeyName(index);
        let key = cursor.string(place)?;
        if key.is_empty() || key.len() > KEY_LIMIT {
            return Err(GgufFault::NameLength { at: place(), limit: KEY_LIMIT });
        }
        let value = Value::read(cursor, &key)?;
        match metadata.entry(key) {
            Entry::Occupied(entry) => return Err(GgufFault::Duplicate { at: Place::Key(entry.key().clone()) }),
            Entry::Vacant(entry) => entry.insert(value),
        };
    }
    Ok(metadata)
}

fn alignment(metadata: &IndexMap<String, Value>) -> Result<u64, GgufFault> {
    let Some(value) = metadata.get(ALIGNMENT_KEY) else { return Ok(DEFAULT_ALIGNMENT) };
    match value.as_u64() {
        Some(alignment) if alignment.is_power_of_two() && (8..=ALIGNMENT_LIMIT).contains(&alignment) => Ok(alignment),
        Some(alignment) => Err(GgufFault::Alignment { value: alignment.to_string(), limit: ALIGNMENT_LIMIT }),
        None => Err(GgufFault::Alignment { value: value.kind().to_owned(), limit: ALIGNMENT_LIMIT }),
    }
}

impl Claim {
    /// Reads one tensor's description, and works out its size.
    fn read(cursor: &mut Cursor<'_>, index: u64) -> Result<Claim, GgufFault> {
        let unnamed = &|| Place::TensorName(index);
        let name = cursor.string(unnamed)?;
        if name.is_empty() || name.len() > NAME_LIMIT {
            return Err(GgufFault::NameLength { at: unnamed(), limit: NAME_LIMIT });
        }
        let place = &|| Place::Tensor(name.clone());
        let dimensions = cursor.u32(place)?;
        if dimensions > DIMENSIONS_LIMIT {
            let (count, limit) = (dimensions.into(), DIMENSIONS_LIMIT.into());
            return Err(GgufFault::Count { at: place(), count, limit });
        }
        let mut shape = (0..dimensions).map(|_| cursor.u64(place)).collect::<Result<Vec<_>, _>>()?;
        if shape.is_empty() {
            // A single number without dimensions.
            shape.push(1);
        }
        let id = cursor.u32(place)?;
        let block = BlockType::from_id(id).ok_or_else(|| match BlockType::removed_name(id) {
            Some(name) => GgufFault::WithdrawnType { at: place(), name },
            None => GgufFault::TensorType { at: place(), id },
        })?;
        let offset = cursor.u64(place)?;
        let (len, bytes) = (block.block_len() as u64, block.block_bytes() as u64);
        if shape.contains(&0) {
            return Err(GgufFault::Shape { at: place(), shape });
        }
        if !shape[0].is_multiple_of(len) {
            return Err(GgufFault::Row { at: place(), elements: shape[0], block: block.name() });
        }
        let elements = shape.iter().try_fold(1u64, |product, &length| product.checked_mul(length));
        let Some(size) = elements.and_then(|elements| (elements / len).checked_mul(bytes)) else {
            return Err(GgufFault::Shape { at: place(), shape });
        };
        Ok(Claim { name, shape, block, size, offset })
    }

    /// Where in the file the tensor is.
    fn range(&self, alignment: u64, available: u64, data_offset: u64) -> Result<Range<usize>, GgufFault> {
        let (offset, size) = (self.offset, self.size);
        let at = || Place::Tensor(self.name.clone());
        if !offset.is_multiple_of(alignment) {
            return Err(GgufFault::Unaligned { at: at(), offset, alignment });
        }
        match offset.checked_add(size) {
            // Within the file, whose length is a usize.
            Some(end) if end <= available => Ok((data_offset + offset) as usize..(data_offset + end) as usize),
            _ => Err(GgufFault::PastEnd { at: at(), offset, size, available }),
        }
    }
}

/// Makes sure that no two tensors share bytes.
fn apart(tensors: &IndexMap<String, TensorInfo>) -> Result<(), GgufFault> {
    let mut ordered: Vec<(&String, &Range<usize>)> = tensors.iter().map(|(name, info)| (name, &info.range)).collect();
    ordered.sort_by_key(|(_, range)| (range.start, range.end));
    for pair in ordered.windows(2) {
        if let [(first, before), (second, after)] = pair
            && after.start < before.end
        {
            return Err(GgufFault::Overlap { first: Place::Tensor((*first).clone()), second: Place::Tensor((*second).clone()) });
        }
    }
    Ok(())
}
