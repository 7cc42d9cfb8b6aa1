//! Text to ids: the built-in normalisation rules, the tokenizer, and the thinning of silent speech tokens.

mod numbers;
mod phonemes;
mod rules;
mod tokenizer;

pub use numbers::words;
pub use phonemes::inlined;
pub use rules::{normalize, segments};
pub use tokenizer::{Tokenizer, TokenizerError};

use super::config::{SILENT_RUN, SILENT_TOKENS};

/// The system text that opens every prompt.
pub const SYSTEM: &str = "You are a helpful assistant.";
/// The special token that ends the prompt's instructions; the model refuses to speak without it.
pub const END_OF_PROMPT: &str = "<|endofprompt|>";

/// Decides which speech tokens are passed on: of a run of silent ones only the first few.
#[derive(Clone, Copy, Debug, Default)]
pub struct Thinner {
    run: usize,
}

impl Thinner {
    /// Whether the next token is passed on.
    pub fn keeps(&mut self, token: u32) -> bool {
        self.run = if SILENT_TOKENS.contains(&token) { self.run + 1 } else { 0 };
        self.run <= SILENT_RUN
    }
}
