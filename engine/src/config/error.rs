//! Why a file's model cannot be run.

use crate::quant::BlockType;

/// Why a file's model cannot be run, though the file itself is sound.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// An architecture that nobody has described yet.
    #[error("models of architecture {architecture:?} are not supported; known are {known}")]
    UnknownArchitecture {
        /// Its name in the file.
        architecture: String,
        /// Those that are known.
        known: String,
    },
    /// A hyperparameter is not there.
    #[error("{file} lacks the metadata entry {key}; it may hold no language model, take another conversion of the model")]
    Missing {
        /// The file.
        file: String,
        /// The key.
        key: String,
    },
    /// A hyperparameter that cannot be.
    #[error("{file}: the metadata entry {key} must be {must}, and is {is}; take another conversion of the model")]
    Invalid {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// What it should be.
        must: &'static str,
        /// What it is.
        is: String,
    },
    /// Something that the model does and the decoder does not.
    #[error("{file} needs what is not supported yet: {what}")]
    Unsupported {
        /// The file.
        file: String,
        /// What.
        what: String,
    },
    /// A tensor is not there.
    #[error("{file} lacks the tensor {tensor}; take another conversion of the model")]
    MissingTensor {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
    },
    /// A tensor has another shape than the hyperparameters say.
    #[error("{file}: the tensor {tensor} should have the shape {expected:?} and has {found:?}; take another conversion of the model")]
    TensorShape {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// Its shape by the hyperparameters, row length first.
        expected: Vec<u64>,
        /// Its shape in the file.
        found: Vec<u64>,
    },
    /// A tensor of a type that cannot be used.
    #[error(
        "{file}: weights of type {block} (tensor {tensor}) are not supported; take a file with another quantisation, e.g. Q4_K or Q8_0"
    )]
    TensorType {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// The type.
        block: BlockType,
    },
}
