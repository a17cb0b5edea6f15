//! What turns a conversation into tokens and tokens into text: the engine's tokenizer in a real node, a toy in a
//! simulated one.

use std::collections::BTreeSet;

use crate::request::Prompt;

/// The text side of a model. Shared by all its requests.
pub trait TextModel: Send + Sync + 'static {
    /// The tokens of a prompt, a conversation's with the model's own template.
    ///
    /// # Errors
    /// What is wrong with the prompt, for the client.
    fn encode(&self, prompt: &Prompt) -> Result<Vec<u32>, String>;

    /// A decoder for one answer.
    fn decoder(&self) -> Box<dyn TextDecoder>;

    /// Tokens that end an answer.
    fn ends(&self) -> BTreeSet<u32>;
}

/// Turns the tokens of one answer into text, as they come.
pub trait TextDecoder: Send + 'static {
    /// The text that becomes certain with this token: whole characters only.
    fn push(&mut self, token: u32) -> String;

    /// The bytes that a token stands for by itself; they need not be whole characters. Nothing if it is not known.
    fn bytes(&self, token: u32) -> Vec<u8> {
        let _ = token;
        Vec::new()
    }

    /// What is left when no token follows.
    fn finish(&mut self) -> String;
}
