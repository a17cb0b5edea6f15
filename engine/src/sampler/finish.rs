//! Why an answer ended.

use serde::{Deserialize, Serialize};

/// Why an answer ended. Journaled and sent between nodes: variants are only added at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FinishReason {
    /// The model ended it with an end-of-generation token.
    EndOfGeneration,
    /// A stop string of the request appeared; the number is its place in the request's list.
    StopString(u32),
    /// The request's limit of tokens was reached.
    TokenLimit,
    /// The model's or the stage's longest context was reached.
    ContextLimit,
    /// The client gave up.
    Cancelled,
    /// It could not go on; the error says why.
    Failed,
}

impl FinishReason {
    /// The `finish_reason` of OpenAI's API; none for an answer that was not finished.
    pub fn openai(self) -> Option<&'static str> {
        match self {
            Self::EndOfGeneration | Self::StopString(_) => Some("stop"),
            Self::TokenLimit | Self::ContextLimit => Some("length"),
            Self::Cancelled | Self::Failed => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_see_what_they_know() {
        assert_eq!(FinishReason::StopString(3).openai(), Some("stop"));
        assert_eq!(FinishReason::ContextLimit.openai(), Some("length"));
        assert_eq!(FinishReason::Cancelled.openai(), None);
    }
}
