//! Ids and their meaning: the text of a checkpoint's tokens and its control tokens.

use std::collections::BTreeMap;
use std::path::Path;

use tokenizers::Tokenizer;

use super::config::{Config, LoadError};

/// Seconds from one timestamp token to the next.
pub(super) const TICK: f64 = 0.02;

/// The vocabulary and its control tokens. Ids below [`Tokens::end`] are text.
pub(super) struct Tokens {
    tokenizer: Tokenizer,
    /// Begins every text.
    pub(super) start: u32,
    /// Ends it.
    pub(super) end: u32,
    /// Says that the text has no timestamps. Those follow it in the vocabulary.
    pub(super) no_timestamps: u32,
    /// Its probability in the place of the first token is that there is no speech.
    pub(super) no_speech: u32,
    /// Of models of many languages: that the text is to be in the language that is spoken.
    pub(super) transcribe: Option<u32>,
    /// ISO 639 codes; empty for models that know English only.
    pub(super) languages: BTreeMap<String, u32>,
    /// Never chosen.
    pub(super) suppressed: Vec<u32>,
    /// Not chosen as the first token of a text.
    pub(super) suppressed_first: Vec<u32>,
    /// The latest time that a text may begin with, in ticks.
    pub(super) max_initial: Option<u32>,
}

impl Tokens {
    /// Reads `tokenizer.json` of `dir`.
    pub(super) fn load(dir: &Path, config: &Config) -> Result<Self, LoadError> {
        let path = dir.join("tokenizer.json");
        let tokenizer = Tokenizer::from_file(&path).map_err(|e| LoadError::file(&path, e))?;
        let rules = &config.generation;
        let count = config.sizes.vocab_size;
        let named = |given: Option<u32>, names: &[&str]| {
            let id = given.or_else(|| names.iter().find_map(|name| tokenizer.token_to_id(name)));
            id.filter(|id| (*id as usize) < count)
                .ok_or_else(|| LoadError::file(&path, format!("the vocabulary has no {}", names[0])))
        };
        let start = named(rules.decoder_start_token_id, &["<|startoftranscript|>"])?;
        let end = named(rules.eos_token_id, &["<|endoftext|>"])?;
        let no_timestamps = named(rules.no_timestamps_token_id, &["<|notimestamps|>"])?;
        // Its name changed between releases; its place did not.
        let no_speech = named(None, &["<|nospeech|>", "<|nocaptions|>"]).or_else(|e| match no_timestamps {
            0 => Err(e),
            id => Ok(id - 1),
        })?;
        let listed = rules.task_to_id.as_ref().and_then(|tasks| tasks.get("transcribe").copied());
        let multilingual = rules.is_multilingual.unwrap_or(listed.is_some());
        let (mut languages, mut transcribe) = (BTreeMap::new(), None);
        if multilingual {
            transcribe = Some(named(listed, &["<|transcribe|>"])?);
            let code = |name: &str| Some(name.strip_prefix("<|")?.strip_suffix("|>")?.to_owned());
            languages = match &rules.lang_to_id {
                Some(listed) => listed.iter().filter_map(|(name, id)| Some((code(name)?, *id))).collect(),
                None => tokenizer
                    .get_added_tokens_decoder()
                    .iter()
                    .filter(|(id, _)| (start + 1..no_timestamps).contains(*id))
                    .filter_map(|(id, token)| Some((code(&token.content)?, *id)))
                    .filter(|(code, _)| (2..=3).contains(&code.len()) && code.bytes().all(|b| b.is_ascii_lowercase()))
                    .collect(),
            };
            languages.retain(|_, id| (*id as usize) < count);
            if languages.is_empty() {
                let reason = "the model is for many languages, but none is listed in `lang_to_id`";
                return Err(LoadError::file(&dir.join("generation_config.json"), reason));
            }
        }
        // Some files hold -1 for "none".
        let ids = |list: &Option<Vec<i64>>| -> Vec<u32> {
            let list = list.iter().flatten().filter_map(|id| u32::try_from(*id).ok());
            list.filter(|id| (*id as usize) < count).collect()
        };
        Ok(Self {
            start,
            end,
            no_timestamps,
            no_speech,
            transcribe,
            languages,
            suppressed: ids(&rules.suppress_tokens),
            suppressed_first: ids(&rules.begin_suppress_tokens),
            max_initial: rules.max_initial_timestamp_index,
            tokenizer,
        })
    }

    /// What stands behind [`Tokens::start`] before the text. `language` only where the model knows many.
    pub(super) fn prompt(&self, language: Option<u32>, timestamps: bool) -> Vec<u32> {
        let silent = (!timestamps).then_some(self.no_timestamps);
        language.into_iter().chain(self.transcribe).chain(silent).collect()
    }

    /// The id of the language with this BCP 47 tag.
    pub(super) fn language(&self, tag: &str) -> Option<(String, u32)> {
        let primary = tag.split(['-', '_']).next().unwrap_or_default().to_ascii_lowercase();
        // Where the model's list has another code for it than today's registry.
        let listed = match primary.as_str() {
            "nb" => "no",
            "cmn" => "zh",
            "fil" => "tl",
            "iw" => "he",
            "jv" if !self.languages.contains_key("jv") => "jw",
            other => other,
        };
        self.languages.get(listed).map(|id| (listed.to_owned(), *id))
    }

    /// Seconds that a timestamp token means; `None` for other tokens.
    pub(super) fn seconds(&self, id: u32) -> Option<f64> {
        id.checked_sub(self.first_timestamp()).map(|ticks| f64::from(ticks) * TICK)
    }

    /// The token of 0 s.
    pub(super) fn first_timestamp(&self) -> u32 {
        self.no_timestamps + 1
    }

    /// The text of `ids`; control tokens and timestamps, which some tokenizers have no entry for, say nothing.
    pub(super) fn text(&self, ids: &[u32]) -> String {
        let words: Vec<u32> = ids.iter().copied().filter(|id| *id < self.end).collect();
        // Fails on ids without an entry only, and those were filtered out or are no text.
        self.tokenizer.decode(&words, false).unwrap_or_default()
    }
}
