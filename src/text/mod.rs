//! How a text is said: numbers, dates, units, addresses and abbreviations in words.
//!
//! Pure functions of the text: no state, no clock, no I/O. Time is proportional to the length of the text and memory
//! to its spoken form, whatever the text holds.
//!
//! # Why
//! - **Rules over a walk, not a finite-state transducer.** A rule is an anchored pattern and a function that says it;
//!   what no rule takes is copied, so that a text never gets worse than it was written ([`scan`]).
//! - **The written text stays known.** [`Spoken::spans`] lead from what was said back to what was written: captions
//!   and interruptions are told in the agent's own words.

mod address;
mod characters;
mod days;
mod en;
pub(crate) mod english;
mod europe;
mod given;
#[rustfmt::skip]
mod ipa;
mod ja;
mod language;
mod lexicon;
pub mod pinyin;
mod say_as;
mod scan;
pub mod ssml;
mod zh;

use serde::{Deserialize, Serialize};

pub use self::given::{Given, How, Say, read_given};
pub use self::language::{Language, TELLING, clauses, detect};
pub use self::lexicon::{Current as CurrentLexicon, Entries, Lexicon};
pub use self::say_as::SayAs;
pub use self::scan::{Span, Spoken, is_spaced};
use crate::turn::Sound;

/// Whether and by whose rules a text is brought into its spoken form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Normalise {
    /// By the rules of this module.
    #[default]
    On,
    /// By the voice's own rules only: what the original CosyVoice3 does without an external normaliser.
    Reference,
    /// Not at all.
    Off,
}

impl std::str::FromStr for Normalise {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "on" => Ok(Self::On),
            "reference" => Ok(Self::Reference),
            "off" => Ok(Self::Off),
            other => Err(format!("`{other}` is no way to normalise; use on, reference or off")),
        }
    }
}

/// `text` as it is said in `language`.
pub fn normalise(text: &str, language: Language) -> Spoken {
    match language {
        Language::English => en::GRAMMAR.say(text),
        Language::Chinese => zh::say(text),
        Language::Japanese => ja::GRAMMAR.say(text),
        Language::German => europe::GERMAN.say(text),
        Language::French => europe::FRENCH.say(text),
        Language::Spanish => europe::SPANISH.say(text),
        Language::Other => Spoken::verbatim(text),
    }
}

/// A text that is ready to be spoken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// How it is said.
    pub spoken: Spoken,
    /// Its language as a BCP 47 tag: the one that was given, else the one that it shows; `None` where it shows none.
    pub language: Option<String>,
    /// Pieces of what is said whose phonemes are given, in order.
    pub sounds: Vec<Sound>,
    /// Names of places, and how many bytes are said before each.
    pub marks: Vec<(usize, String)>,
}

impl Reading {
    fn plain(spoken: Spoken, language: Option<String>) -> Self {
        Self { spoken, language, sounds: Vec::new(), marks: Vec::new() }
    }
}

/// Reads `text`: in the language that is `given`, else in the one it shows, else in English.
pub fn read(text: &str, given: Option<&str>, how: Normalise) -> Reading {
    let language = given.filter(|tag| !tag.is_empty()).or_else(|| detect(text)).map(str::to_owned);
    let spoken = match how {
        Normalise::On => normalise(text, language.as_deref().map_or(Language::English, Language::of_tag)),
        Normalise::Reference | Normalise::Off => Spoken::verbatim(text),
    };
    Reading::plain(spoken, language)
}

/// Reads `text`, which goes on with the sentence that begins with `before`: what stands before a number decides how it is
/// read. What is said of `before` is not part of it.
pub fn read_after(before: &str, text: &str, given: Option<&str>, how: Normalise) -> Reading {
    let apart = |at: Option<char>| at.is_none_or(|c| c.is_whitespace() || language::is_dense(c));
    let gap = if apart(before.chars().next_back()) || apart(text.chars().next()) { "" } else { " " };
    let joined = read(&format!("{before}{gap}{text}"), given, how);
    match joined.spoken.behind(before.len() + gap.len()) {
        Some(spoken) => Reading::plain(spoken, joined.language),
        // One rule says the end of one and the beginning of the other.
        None => read(text, joined.language.as_deref(), how),
    }
}

/// `text` without control tokens of a language model (`<|...|>`): none of them may reach one from a text. An
/// opening without an end loses its sign.
pub fn without_tokens(text: &str) -> std::borrow::Cow<'_, str> {
    let Some(first) = text.find("<|") else { return text.into() };
    let mut kept = text[..first].to_owned();
    let mut rest = &text[first..];
    while let Some(at) = rest.find("<|") {
        kept.push_str(&rest[..at]);
        let inside = &rest[at + 2..];
        // The nearest end, unless another opening comes before it: a name has no `<`.
        let end = inside.find("|>").filter(|end| !inside[..*end].contains("<|"));
        rest = end.map_or(inside, |end| &inside[end + 2..]);
    }
    kept.push_str(rest);
    // What is left may have grown together: "<<|x|>|".
    if kept.contains("<|") { kept.replace("<|", " ").into() } else { kept.into() }
}

/// Bytes of a tag's name.
const TAG_NAME: usize = 32;

/// `text` without tags of a voice: a name of at most 32 letters, digits, `_`, `-` or `/` in brackets, square or angled.
pub fn without_tags(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['[', '<']) {
        let (before, from) = rest.split_at(at);
        kept.push_str(before);
        let close = if from.starts_with('[') { ']' } else { '>' };
        // A flood of openings must not be searched to its end for each.
        let name = from[1..].bytes().take(TAG_NAME + 1);
        let length = name.take_while(|c| c.is_ascii_alphanumeric() || matches!(c, b'_' | b'-' | b'/')).count();
        rest = match from[1 + length..].strip_prefix(close) {
            Some(rest) if (1..=TAG_NAME).contains(&length) => rest,
            _ => {
                kept.push_str(&from[..1]);
                &from[1..]
            }
        };
    }
    kept.push_str(rest);
    kept
}

#[cfg(test)]
mod tests;
