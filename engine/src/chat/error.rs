//! Why a conversation could not be turned into a prompt.

/// What is wrong with a model's template, or with a conversation for it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The model has no chat template and its tokens show none of the known formats.
    #[error(
        "model `{model}` has no chat template, and its vocabulary has the markers of no known chat format: it is a base model; ask it for plain completions, or use its instruction-tuned variant"
    )]
    NoTemplate {
        /// The model's name.
        model: String,
    },
    /// The template cannot be parsed.
    #[error("the model's chat template cannot be read: {0}")]
    Template(String),
    /// The template refuses the conversation, in its own words.
    #[error("the model's chat template refuses the conversation: {0}")]
    Refused(String),
    /// The template wants more memory or time than a template may have.
    #[error("the model's chat template is stopped: {0}")]
    TooMuch(String),
    /// The template failed.
    #[error("the model's chat template fails on this conversation: {0}")]
    Render(String),
}
