//! What can be wrong with a file.

use std::fmt;
use std::io;

/// Why a file was refused.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the model file {file}: {fault}")]
pub struct GgufError {
    /// The file.
    pub file: String,
    /// What is wrong with it.
    pub fault: GgufFault,
}

const AGAIN: &str = "the file is damaged or incomplete; download it again";
const NEWER: &str = "the file is damaged, or newer than this version of Shoal";
const MAKER: &str = "the file was written wrongly; take it from another source";

/// What is wrong with a file. Names that come from the file are shortened and escaped when shown.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufFault {
    /// The system would not give it to us.
    #[error("{0}")]
    Io(#[source] io::Error),
    /// It starts with something else.
    #[error("it is not a GGUF file but {seen}; a model in GGUF format is needed")]
    Magic {
        /// What it seems to be.
        seen: String,
    },
    /// Its numbers are in the other byte order.
    #[error("it is a big-endian GGUF file, which is not supported; take the usual little-endian one")]
    BigEndian,
    /// A version that we do not know.
    #[error("GGUF version {0} is not supported, only 2 and 3 are; take a newer conversion of the model, or update Shoal")]
    Version(u32),
    /// It ends too early.
    #[error("it ends within {at}: {AGAIN}")]
    Truncated {
        /// What could not be read.
        at: Place,
    },
    /// The header is beyond every reasonable size.
    #[error("its header goes past {limit} bytes, within {at}: {AGAIN}")]
    HeaderTooLong {
        /// What could not be read.
        at: Place,
        /// The most that a header may take, in bytes.
        limit: u64,
    },
    /// A count that no file of this size can justify.
    #[error("{at} claims {count}, and at most {limit} is possible: {AGAIN}")]
    Count {
        /// What is counted.
        at: Place,
        /// How many.
        count: u64,
        /// How many could be.
        limit: u64,
    },
    /// A string that is not UTF-8.
    #[error("{at} is not valid UTF-8: {AGAIN}")]
    NotUtf8 {
        /// Which.
        at: Place,
    },
    /// A value type that the format does not have.
    #[error("{at} has the unknown value type {id}: {NEWER}")]
    ValueType {
        /// Which.
        at: Place,
        /// The type's number.
        id: u32,
    },
    /// A truth value that is neither 0 nor 1.
    #[error("{at} is neither true nor false but {byte}: {AGAIN}")]
    Bool {
        /// Which.
        at: Place,
        /// The byte.
        byte: u8,
    },
    /// Arrays within arrays, too deep.
    #[error("{at} nests arrays more than {limit} deep: {MAKER}")]
    Nesting {
        /// Which.
        at: Place,
        /// How deep they may be.
        limit: usize,
    },
    /// A name given twice.
    #[error("{at} occurs twice: {MAKER}")]
    Duplicate {
        /// Which.
        at: Place,
    },
    /// A name that cannot be one.
    #[error("{at} has a name that is empty or longer than {limit} bytes: {AGAIN}")]
    NameLength {
        /// Which.
        at: Place,
        /// Longest name in bytes.
        limit: usize,
    },
    /// `general.alignment` is not a power of two of at least 8.
    #[error("general.alignment must be a power of two from 8 to {limit}, and is {value}: {MAKER}")]
    Alignment {
        /// What is said.
        value: String,
        /// The most it may be.
        limit: u64,
    },
    /// A tensor with no, or too many, or empty dimensions, or too many elements.
    #[error("{at} has the impossible shape {shape:?}: {AGAIN}")]
    Shape {
        /// Which.
        at: Place,
        /// Its dimensions, as far as they were read.
        shape: Vec<u64>,
    },
    /// An element type that ggml does not have.
    #[error("{at} has the unknown element type {id}: {NEWER}")]
    TensorType {
        /// Which.
        at: Place,
        /// The type's number.
        id: u32,
    },
    /// An element type that ggml no longer has.
    #[error("{at} is of type {name}, which ggml has withdrawn; take a file with another quantisation, e.g. Q4_0 or Q4_K")]
    WithdrawnType {
        /// Which.
        at: Place,
        /// The type's name.
        name: &'static str,
    },
    /// Rows that are not whole blocks.
    #[error("rows of {at} have {elements} elements, not whole blocks of {block}: {MAKER}")]
    Row {
        /// Which.
        at: Place,
        /// Length of a row.
        elements: u64,
        /// The element type's name.
        block: &'static str,
    },
    /// A tensor where none can start.
    #[error("{at} starts at byte {offset} of the tensor data, which is no multiple of {alignment}: {AGAIN}")]
    Unaligned {
        /// Which.
        at: Place,
        /// Where, in the data section.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// A tensor that goes past the file's end.
    #[error("{at} needs {size} bytes from byte {offset} of the tensor data, which has only {available}: {AGAIN}")]
    PastEnd {
        /// Which.
        at: Place,
        /// Where, in the data section.
        offset: u64,
        /// Its size in bytes.
        size: u64,
        /// Bytes of the data section.
        available: u64,
    },
    /// Two tensors that share bytes.
    #[error("{first} and {second} overlap: {AGAIN}")]
    Overlap {
        /// The one that starts first.
        first: Place,
        /// The one that starts within it.
        second: Place,
    },
    /// A part of a model under a name that does not lead to the others.
    #[error(
        "it is part {number} of {count} of a model; name it like NAME-{number:05}-of-{count:05}.gguf, next to the others, so that they are found"
    )]
    PartName {
        /// Which part, from 1.
        number: u64,
        /// Of how many.
        count: u64,
    },
    /// Another part of the model is not there.
    #[error("part {number} of {count} is not there: {path}; put all parts of the model into one folder")]
    MissingPart {
        /// Which part, from 1.
        number: u64,
        /// Of how many.
        count: u64,
        /// Where it should be.
        path: String,
    },
    /// A file that is another part than its name says.
    #[error("it is named as part {number} of {count} and says that it is {says}: {AGAIN}")]
    WrongPart {
        /// Which part it should be, from 1.
        number: u64,
        /// Of how many.
        count: u64,
        /// What it says.
        says: String,
    },
    /// Parts that together have more or fewer tensors than they say.
    #[error("the model has {claimed} tensors in all its parts, and {found} were found; take all parts from the same source")]
    PartTensors {
        /// How many there should be.
        claimed: u64,
        /// How many there are.
        found: u64,
    },
}

/// A place in a file, for messages.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place {
    /// The fixed fields at the start.
    Start,
    /// The number of metadata entries.
    MetadataCount,
    /// The number of tensors.
    TensorCount,
    /// The name of the metadata entry with this number, from 0.
    KeyName(u64),
    /// A metadata value, by its key.
    Key(String),
    /// The name of the tensor with this number, from 0.
    TensorName(u64),
    /// A tensor.
    Tensor(String),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Start => f.write_str("its first bytes"),
            Place::MetadataCount => f.write_str("the number of metadata entries"),
            Place::TensorCount => f.write_str("the number of tensors"),
            Place::KeyName(index) => write!(f, "the name of metadata entry {index}"),
            Place::Key(key) => write!(f, "the metadata entry {}", Shown(key)),
            Place::TensorName(index) => write!(f, "the name of tensor {index}"),
            Place::Tensor(name) => write!(f, "the tensor {}", Shown(name)),
        }
    }
}

/// A name from a file, which can hold anything: quoted, escaped, and cut where it is long.
struct Shown<'a>(&'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LONGEST: usize = 80;
        match self.0.char_indices().nth(LONGEST) {
            Some((end, _)) => write!(f, "{:?}…", &self.0[..end]),
            None => write!(f, "{:?}", self.0),
        }
    }
}
