//! The Qwen2 byte-level tokenizer with the speech model's special tokens.

use std::path::Path;

use serde::Deserialize;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

use super::{END_OF_PROMPT, phonemes};
use crate::synth::cosyvoice::config::BLANK;
use crate::text::without_tokens;
use crate::turn::Markup;

/// The tokens that the speech model adds to the text vocabulary, in id order.
pub(super) const SPECIAL: &str = include_str!("special_tokens.txt");
/// How text is cut before the merges: contractions, words with one leading sign, single digits, signs, line ends,
/// spaces.
const CUTS: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/// Why the tokenizer cannot be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A file is missing or malformed.
    #[error("{path}: {reason}")]
    File {
        /// Which file.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// A special token did not get the id the model was trained with.
    #[error("special token `{token}` got id {actual}, expected {expected}: vocab.json is not the one of this model")]
    Id {
        /// Which token.
        token: String,
        /// What it got.
        actual: u32,
        /// What it must be.
        expected: u32,
    },
    /// Text could not be encoded.
    #[error("text cannot be encoded: {0}")]
    Encode(String),
}

/// Text to ids and back.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    end_of_prompt: u32,
}

#[derive(Deserialize)]
struct TokenizerConfig {
    #[serde(default)]
    added_tokens_decoder: std::collections::BTreeMap<String, Added>,
}

#[derive(Deserialize)]
struct Added {
    content: String,
}

impl Tokenizer {
    /// Reads `vocab.json`, `merges.txt` and `tokenizer_config.json` of a checkpoint directory's language model.
    ///
    /// # Errors
    /// A file is missing or malformed, or special tokens do not get their ids.
    pub fn load(checkpoint: &Path) -> Result<Self, TokenizerError> {
        let dir = checkpoint.join(BLANK);
        let fail = |path: &Path, reason: String| TokenizerError::File { path: path.display().to_string(), reason };
        let (vocab, merges) = (dir.join("vocab.json"), dir.join("merges.txt"));
        for path in [&vocab, &merges] {
            std::fs::metadata(path).map_err(|e| fail(path, e.to_string()))?;
        }
        let bpe = BPE::from_file(&vocab.to_string_lossy(), &merges.to_string_lossy())
            .build()
            .map_err(|e| fail(&vocab, e.to_string()))?;
        let mut inner = tokenizers::Tokenizer::new(bpe);
        let bug = |e: tokenizers::Error| fail(&vocab, e.to_string());
        let split =
            Split::new(SplitPattern::Regex(CUTS.into()), SplitDelimiterBehavior::Isolated, false).map_err(bug)?;
        inner.with_normalizer(Some(NFC)).map_err(bug)?;
        inner.with_pre_tokenizer(Some(Sequence::new(vec![split.into(), ByteLevel::new(false, false, false).into()])));
        inner.with_decoder(Some(ByteLevel::new(false, false, false)));
        let config_path = dir.join("tokenizer_config.json");
        let config = std::fs::read_to_string(&config_path).map_err(|e| fail(&config_path, e.to_string()))?;
        let config: TokenizerConfig = serde_json::from_str(&config).map_err(|e| fail(&config_path, e.to_string()))?;
        let mut added: Vec<(u32, String)> = Vec::new();
        for (id, token) in config.added_tokens_decoder {
            let id = id.parse().map_err(|_| fail(&config_path, format!("`{id}` is no token id")))?;
            added.push((id, token.content));
        }
        added.sort();
        let special = |text: &str| AddedToken::from(text.to_string(), true).normalized(false);
        let tokens: Vec<AddedToken> = added.iter().map(|(_, t)| special(t)).collect();
        inner.add_special_tokens(tokens).map_err(bug)?;
        inner.add_special_tokens(SPECIAL.lines().map(special).collect::<Vec<_>>()).map_err(bug)?;
        for (expected, token) in added {
            let actual = inner.token_to_id(&token).unwrap_or_default();
            if actual != expected {
                return Err(TokenizerError::Id { token, actual, expected });
            }
        }
        let end_of_prompt =
            inner.token_to_id(END_OF_PROMPT).ok_or_else(|| fail(&vocab, format!("`{END_OF_PROMPT}` is missing")))?;
        Ok(Self { inner, end_of_prompt })
    }

    /// Ids of `text`; nothing is added at its ends.
    ///
    /// # Errors
    /// The text cannot be encoded.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self.inner.encode_fast(text, false).map_err(|e| TokenizerError::Encode(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Ids of a text that comes from outside, whose phonemes are private characters ([`super::inlined`]). Control tokens
    /// (`<|...|>`) in it go; a tag (`[breath]`) is a tag only where `markup` says so, else its name is read as a word.
    ///
    /// # Errors
    /// The text cannot be encoded.
    pub fn encode_words(&self, text: &str, markup: Markup) -> Result<Vec<u32>, TokenizerError> {
        self.encode(&self.words(text, markup))
    }

    /// `text` with nothing in it that would be encoded as one special token, but for the tags that `markup` allows.
    fn words(&self, text: &str, markup: Markup) -> String {
        let text = without_tokens(text);
        let mut words = String::with_capacity(text.len());
        let mut rest = &*text;
        while let Some(at) = rest.find(['[', '<']) {
            let (before, from) = rest.split_at(at);
            words.push_str(before);
            let close = if from.starts_with('[') { ']' } else { '>' };
            let tag = from.find(close).map(|end| &from[..=end]).filter(|tag| self.id(tag).is_some());
            match tag {
                Some(tag) if markup == Markup::Tags && SPECIAL.lines().any(|known| known == tag) => {
                    words.push_str(tag);
                    rest = &from[tag.len()..];
                }
                Some(tag) => {
                    words.push(' ');
                    words.push_str(&tag[1..tag.len() - 1]);
                    words.push(' ');
                    rest = &from[tag.len()..];
                }
                None => {
                    words.push_str(&from[..1]);
                    rest = &from[1..];
                }
            }
        }
        words.push_str(rest);
        if !words.contains(phonemes::is_phone) {
            return words;
        }
        let mut said = String::with_capacity(words.len());
        for c in words.chars() {
            match phonemes::token(c) {
                Some(token) => said.push_str(&token),
                None => said.push(c),
            }
        }
        said
    }

    /// Text of `ids`, special tokens written out; empty where there is none.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.inner.decode(ids, false).unwrap_or_default()
    }

    /// How many ids `text` has; 0 for text that cannot be encoded.
    pub fn count(&self, text: &str) -> usize {
        self.encode(text).map_or(0, |ids| ids.len())
    }

    /// The id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The id of [`END_OF_PROMPT`].
    pub fn end_of_prompt(&self) -> u32 {
        self.end_of_prompt
    }
}
