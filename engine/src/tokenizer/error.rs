//! Why a tokenizer could not be built.

/// What is wrong with the tokenizer part of a model file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A key that every tokenizer needs is not in the file, or has another type.
    #[error(
        "the model file has no usable `{key}` ({expected} expected): it was converted without its tokenizer; fetch or convert it again"
    )]
    Missing {
        /// The metadata key.
        key: &'static str,
        /// What should be there.
        expected: &'static str,
    },
    /// The kind of vocabulary is none that is implemented.
    #[error("tokenizer model `{name}` is not supported; supported are {}", known.join(", "))]
    UnknownModel {
        /// What `tokenizer.ggml.model` says.
        name: String,
        /// The names that are known.
        known: Vec<&'static str>,
    },
    /// The rule that cuts text into words is none that is implemented.
    #[error("pre-tokenizer `{name}` is not supported; supported are {}", known.join(", "))]
    UnknownPreTokenizer {
        /// What `tokenizer.ggml.pre` says.
        name: String,
        /// The names that are known.
        known: Vec<&'static str>,
    },
    /// The parts contradict each other; the text says which and how.
    #[error("the model file's tokenizer is damaged: {0}; fetch or convert it again")]
    Malformed(String),
}
