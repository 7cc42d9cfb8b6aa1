//! How long the words of a text take beside one another, from how they are spelled.
//!
//! # Why
//! Letters are a poor measure: "thought" has seven and four sounds, "a" one and, said among others, hardly that. So
//! letters that make one sound are counted once, vowels less than what stands around them, the small words that no
//! sentence stresses less than others, and the last word before a pause more: speech slows down there in all languages
//! (phrase-final lengthening: Klatt 1976, Vaissière 1983). The spelling rules are the commonest of each language and no
//! pronunciation dictionary: what is wanted is a share, and errors of single words cancel out between two pauses.

use super::{is_ideograph, weight};
use crate::text::Language;

/// Before a pause a word takes as much longer as so many sounds.
const FINAL: f64 = 2.5;
/// The same of an ideograph, which is a syllable.
const FINAL_SYLLABLE: f64 = 1.0;
/// Of a vowel, or of several together.
const VOWEL: f64 = 0.5;
/// What each word takes beside its sounds.
const WORD: f64 = 1.0;
/// Of a word that is not stressed.
const UNSTRESSED: f64 = 0.8;

/// The length of one word of `language`, in sounds; of an ideograph, of that. `last`: a pause follows. What makes no sound
/// has none.
pub(super) fn length(word: &str, language: Language, last: bool) -> f64 {
    let mut chars = word.chars().filter(|c| c.is_alphanumeric());
    let Some(first) = chars.next() else { return 0.0 };
    if is_ideograph(first) {
        let rest: f64 = chars.map(weight).sum();
        return weight(first) + rest + if last { FINAL_SYLLABLE } else { 0.0 };
    }
    let word: String = word.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect();
    let sounds = sounds(&word, language);
    let (mut length, mut vowels, mut before) = (WORD, 0, false);
    for c in sounds.chars() {
        let vowel = is_vowel(c);
        // A digit is read as a word.
        length += if c.is_numeric() { weight(c) } else { 1.0 };
        vowels += u32::from(vowel && !before);
        before = vowel;
    }
    length -= f64::from(vowels.max(1)) * (1.0 - VOWEL);
    if unstressed(language).contains(&word.as_str()) {
        length *= UNSTRESSED;
    }
    if last { length + FINAL } else { length }
}

fn is_vowel(c: char) -> bool {
    matches!(c, 'a' | 'e' | 'i' | 'o' | 'u' | 'y' | 'ä' | 'ö' | 'ü' | 'á' | 'é' | 'í' | 'ó' | 'ú' | 'à' | 'è' | 'ù'
        | 'â' | 'ê' | 'î' | 'ô' | 'û' | 'ë' | 'ï' | 'œ' | 'æ' | 'å' | 'ø')
}

/// `word`, in small letters, with about one letter for each of its sounds.
fn sounds(word: &str, language: Language) -> String {
    let mut sounds = String::with_capacity(word.len());
    let mut before = None;
    for c in word.chars() {
        // Twice the same letter is one sound; twice the same digit is two words.
        if before != Some(c) || c.is_numeric() {
            sounds.push(c);
        }
        before = Some(c);
    }
    mute(&mut sounds, language);
    for (letters, sound) in spellings(language) {
        if sounds.contains(letters) {
            sounds = sounds.replace(letters, sound);
        }
    }
    sounds
}

/// Takes off what is written at the end of a word and not said.
fn mute(word: &mut String, language: Language) {
    let long = word.chars().count() > 3;
    match language {
        Language::English if long => {
            let plural = word.ends_with('s');
            let stem = word.strip_suffix("es").or_else(|| word.strip_suffix('e'));
            if let Some(stem) = stem.filter(|stem| !stem.ends_with(is_vowel)) {
                *word = format!("{stem}{}", if plural { "s" } else { "" });
            }
            if word.ends_with("ed") {
                word.truncate(word.len() - 2);
                word.push('d');
            }
        }
        Language::German if word.ends_with("er") => {
            word.truncate(word.len() - 2);
            word.push('a');
        }
        Language::French if word.chars().count() > 2 => {
            let ends = ["ent", "es", "e", "s", "t", "d", "x", "p"];
            if let Some(stem) = ends.iter().find_map(|end| word.strip_suffix(end)) {
                *word = stem.to_owned();
            }
        }
        _ => {}
    }
}

/// Letters that make one sound, or one letter that makes two; "#" stands for any one that is no vowel.
fn spellings(language: Language) -> &'static [(&'static str, &'static str)] {
    match language {
        Language::English => &[
            ("igh", "i"), ("ough", "o"), ("tion", "#n"), ("th", "#"), ("sh", "#"), ("ch", "#"), ("ck", "#"), ("ph", "#"),
            ("wh", "#"), ("gh", "#"), ("kn", "n"), ("wr", "n"), ("qu", "kw"), ("x", "ks"),
        ],
        Language::German => &[
            ("sch", "#"), ("ch", "#"), ("ck", "#"), ("ph", "#"), ("th", "#"), ("ng", "#"), ("ie", "i"), ("ah", "a"),
            ("oh", "o"), ("uh", "u"), ("z", "ts"),
        ],
        Language::French => &[
            ("eau", "o"), ("au", "o"), ("ou", "u"), ("oi", "a"), ("ai", "e"), ("ei", "e"), ("eu", "e"), ("ch", "#"),
            ("qu", "#"), ("gu", "#"), ("ph", "#"), ("gn", "#"),
        ],
        Language::Spanish => &[("ch", "#"), ("ll", "#"), ("qu", "#"), ("gu", "#"), ("h", "")],
        _ => &[],
    }
}

/// The small words of a language.
fn unstressed(language: Language) -> &'static [&'static str] {
    match language {
        Language::English => &[
            "a", "an", "the", "of", "to", "on", "at", "by", "in", "and", "or", "it", "he", "she", "him", "her", "his",
            "was", "is", "are", "for", "with", "that", "you", "we", "me", "us", "as", "but", "be", "had", "has", "can",
            "if", "do", "i", "am", "will", "would", "your", "our", "my", "from", "them", "they", "there", "this", "have",
            "been", "so", "than",
        ],
        Language::German => &[
            "der", "die", "das", "den", "dem", "des", "ein", "eine", "einen", "ich", "sie", "er", "es", "wir", "ihr",
            "und", "oder", "zu", "in", "im", "an", "am", "auf", "von", "mit", "ist", "hat", "kann", "wird", "so",
        ],
        Language::French => &[
            "le", "la", "les", "un", "une", "de", "du", "des", "et", "à", "en", "je", "il", "ne", "nous", "vous", "au", "ce",
        ],
        Language::Spanish => {
            &["el", "la", "los", "las", "un", "una", "y", "que", "de", "del", "en", "su", "lo", "por", "con", "se", "a"]
        }
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sounds_count_and_not_letters() {
        let said = |word: &str, language| sounds(word, language);
        assert_eq!(said("thought", Language::English), "#ot");
        assert_eq!(said("passes", Language::English), "pass");
        assert_eq!(said("station", Language::English), "sta#n");
        assert_eq!(said("schnell", Language::German), "#nel");
        assert_eq!(said("beaux", Language::French), "bo");
        assert_eq!(said("hacha", Language::Spanish), "a#a");
        assert_eq!(said("2255", Language::English), "2255");
    }

    #[test]
    fn stress_and_pauses_change_the_length_of_a_word() {
        let length = |word: &str, last| length(word, Language::English, last);
        assert!(length("the", false) < length("thy", false));
        assert!((length("there.", true) - length("there.", false) - FINAL).abs() < 1e-9);
        assert!(length("a", false) > 0.0);
        assert_eq!(length("—", false), 0.0);
        assert_eq!(super::length("你", Language::Chinese, false), 3.0);
        assert!(length("42", false) > length("at", false));
    }
}
