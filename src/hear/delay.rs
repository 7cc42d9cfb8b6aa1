//! Whether what was said so far sounds finished, by its words: how long to wait for more of them.
//!
//! Pure functions of text. What sounds finished in one language does not in another, so words are looked up for the
//! language that was recognised; where none is known, for all.

use serde::Deserialize;

/// What the agent expects of the next turn: `expect` on a `text` frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Expect {
    /// A number that is dictated: people pause between its groups.
    Digits,
    /// An address with `@`, spelt or said.
    Email,
    /// A person's name, perhaps spelt.
    Name,
    /// Yes or no.
    YesNo,
}

/// How finished it sounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing more is to be expected.
    Complete,
    /// It may be all.
    Open,
    /// More must come.
    Unfinished,
}

impl Verdict {
    /// One step more finished.
    pub fn sooner(self) -> Self {
        match self {
            Verdict::Complete | Verdict::Open => Verdict::Complete,
            Verdict::Unfinished => Verdict::Open,
        }
    }

    /// One step less finished.
    pub fn later(self) -> Self {
        match self {
            Verdict::Complete => Verdict::Open,
            Verdict::Open | Verdict::Unfinished => Verdict::Unfinished,
        }
    }
}

/// Words that ask for another: a sentence does not end in them.
const HANGING: &[(&str, &[&str])] = &[
    (
        "en",
        &[
            "a", "about", "an", "and", "at", "because", "but", "by", "can", "could", "er", "erm", "for", "from", "hm",
            "i'd", "i'll", "i'm", "if", "in", "into", "is", "it's", "like", "my", "of", "or", "our", "so", "than",
            "that's", "the", "their", "then", "this", "to", "uh", "uhm", "um", "was", "well", "when", "where", "which",
            "who", "with", "would", "your",
        ],
    ),
    (
        "de",
        &[
            "aber", "also", "am", "an", "auf", "aus", "bei", "das", "dass", "dem", "den", "der", "die", "ein", "eine",
            "einen", "einer", "für", "ich", "im", "in", "ist", "mein", "meine", "mit", "oder", "und", "von", "weil",
            "wenn", "zu", "zum", "zur", "äh", "ähm",
        ],
    ),
    (
        "fr",
        &[
            "alors", "au", "aux", "avec", "ce", "dans", "de", "des", "donc", "du", "en", "est", "et", "euh", "je",
            "la", "le", "les", "ma", "mais", "mon", "ou", "par", "parce", "pour", "que", "qui", "sur", "un", "une",
        ],
    ),
    (
        "es",
        &[
            "a", "al", "con", "de", "del", "el", "en", "es", "este", "la", "las", "los", "mi", "o", "para", "pero",
            "por", "porque", "que", "si", "un", "una", "y", "yo",
        ],
    ),
];

/// Whole answers to a question that has two.
const ANSWERS: &[(&str, &[&str])] = &[
    (
        "en",
        &[
            "yes",
            "no",
            "yeah",
            "yep",
            "yup",
            "nope",
            "nah",
            "sure",
            "okay",
            "ok",
            "right",
            "correct",
            "exactly",
            "absolutely",
            "certainly",
            "please",
            "thanks",
            "thank you",
            "yes please",
            "no thanks",
            "no thank you",
            "of course",
            "that's right",
            "that's correct",
            "not really",
            "i do",
            "i don't",
            "it is",
            "it isn't",
        ],
    ),
    ("de", &["ja", "nein", "genau", "richtig", "gerne", "ja bitte", "nein danke", "natürlich", "stimmt", "okay", "ok"]),
    ("fr", &["oui", "non", "d'accord", "bien sûr", "oui merci", "non merci", "exactement", "voilà", "ok"]),
    ("es", &["sí", "si", "no", "claro", "vale", "correcto", "exacto", "sí por favor", "no gracias", "por supuesto"]),
];

/// Sounds of somebody who listens.
const SOUNDS: &[&str] = &[
    "mm", "mmm", "mhm", "mm-hm", "mmhm", "mm-hmm", "mmhmm", "mhmm", "hm", "hmm", "uh-huh", "uhuh", "aha", "ah", "oh",
    "uh", "um", "hem", "ahem", "ähm", "äh", "hum", "euh",
];

/// Words of somebody who listens; alone they may also be an answer.
const AGREES: &[(&str, &[&str])] = &[
    ("en", &["yeah", "yes", "yep", "okay", "ok", "right", "sure", "i see", "got it", "all right", "alright"]),
    ("de", &["ja", "okay", "ok", "genau", "gut", "verstehe", "ach so", "klar", "stimmt"]),
    ("fr", &["oui", "d'accord", "ok", "voilà", "je vois", "ah oui"]),
    ("es", &["sí", "si", "vale", "ok", "claro", "ya", "entiendo", "ajá"]),
];

/// What somebody who listens says, to be polite or to agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backchannel {
    /// A sound: "mm-hm".
    Sound,
    /// A word: "yeah". It may be an answer, too.
    Word,
}

/// Whether `text` in `language` is only what listeners say; `None`: it is more than that, or nothing.
pub fn backchannel(text: &str, language: &str) -> Option<Backchannel> {
    let words = words(text);
    if words.is_empty() || words.len() > 4 {
        return None;
    }
    let is_sound = |word: &String| SOUNDS.contains(&word.as_str());
    if words.iter().all(is_sound) {
        return Some(Backchannel::Sound);
    }
    let rest: Vec<String> = words.into_iter().filter(|word| !is_sound(word)).collect();
    let agrees = listed(AGREES, language, &rest.join(" ")) || rest.iter().all(|word| listed(AGREES, language, word));
    agrees.then_some(Backchannel::Word)
}

/// Digits that are said as words.
const DIGITS: &[&str] = &[
    "zero", "oh", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "double", "triple", "null",
    "eins", "zwei", "zwo", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zéro", "un", "deux", "trois",
    "quatre", "cinq", "sept", "huit", "neuf", "cero", "uno", "dos", "tres", "cuatro", "cinco", "seis", "siete", "ocho",
    "nueve",
];

/// How finished `text` sounds in `language` (an ISO 639 code or a BCP 47 tag), where `expect` was asked for.
pub fn judge(text: &str, language: &str, expect: Option<Expect>) -> Verdict {
    let words = words(text);
    let Some(last) = words.last() else { return Verdict::Open };
    let said = words.join(" ");
    let answers = listed(ANSWERS, language, &said);
    match expect {
        Some(Expect::YesNo) if answers || listed(ANSWERS, language, &words[0]) && words.len() <= 4 => {
            return Verdict::Complete;
        }
        Some(Expect::Digits) => return number(&words),
        Some(Expect::Email) => return address(&said, last),
        // A given name waits for the family's; one that is spelt waits for the next letter.
        Some(Expect::Name) => {
            let spelt = last.chars().count() == 1;
            return if words.len() >= 2 && !spelt { Verdict::Open } else { Verdict::Unfinished };
        }
        _ => {}
    }
    let trimmed = text.trim_end();
    // A recogniser writes these where the voice stays up; it writes a full stop behind anything.
    if listed(HANGING, language, last) || trimmed.ends_with([',', '-', '–', '—', '…', ':']) || trimmed.ends_with("...")
    {
        return Verdict::Unfinished;
    }
    if answers || trimmed.ends_with(['.', '?', '!', '。', '？', '！']) {
        return Verdict::Complete;
    }
    Verdict::Open
}

fn number(words: &[String]) -> Verdict {
    let digits: usize = words.iter().map(|word| word.chars().filter(char::is_ascii_digit).count()).sum();
    let said = words.iter().filter(|word| DIGITS.contains(&word.as_str())).count();
    // Only the caller knows how long it is.
    if digits + said == 0 { Verdict::Open } else { Verdict::Unfinished }
}

fn address(said: &str, last: &str) -> Verdict {
    let at = said.contains('@') || [" at ", " arroba ", " arobase "].iter().any(|word| said.contains(word));
    let domain = said.rsplit(['@']).next().is_some_and(|host| host.contains('.')) && said.contains('@')
        || [" dot ", " punkt ", " point ", " punto "].iter().any(|word| said.contains(word));
    let ends =
        last.chars().filter(|c| c.is_alphabetic()).count() >= 2 && !["dot", "punkt", "point", "at"].contains(&last);
    if at && domain && ends { Verdict::Open } else { Verdict::Unfinished }
}

/// Small letters, without punctuation at the ends of words.
fn words(text: &str) -> Vec<String> {
    let outside = |c: char| !c.is_alphanumeric();
    text.split_whitespace()
        .map(|word| word.trim_matches(outside).replace('’', "'").to_lowercase())
        .filter(|word| !word.is_empty())
        .collect()
}

fn listed(lists: &[(&str, &[&str])], language: &str, word: &str) -> bool {
    let code = language.split(['-', '_']).next().unwrap_or_default();
    let known = lists.iter().any(|(of, _)| *of == code);
    lists.iter().filter(|(of, _)| !known && code.is_empty() || *of == code).any(|(_, words)| words.contains(&word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_tell_whether_more_must_come() {
        for (text, expected) in [
            ("Yes.", Verdict::Complete),
            ("yeah", Verdict::Complete),
            ("Can you tell me the price?", Verdict::Complete),
            ("I would like to book a table for", Verdict::Unfinished),
            ("I would like to book a table for.", Verdict::Unfinished),
            ("I need a car and", Verdict::Unfinished),
            ("Um", Verdict::Unfinished),
            ("My number is,", Verdict::Unfinished),
            ("I would like to book a table", Verdict::Open),
            ("", Verdict::Open),
        ] {
            assert_eq!(judge(text, "en", None), expected, "{text}");
        }
        assert_eq!(judge("Ich möchte und", "de-DE", None), Verdict::Unfinished);
        assert_eq!(judge("I live in und", "en", None), Verdict::Open, "no word of English");
        assert_eq!(judge("Ich möchte und", "", None), Verdict::Unfinished, "any language");
        assert_eq!(judge("pronto und", "it", None), Verdict::Open, "a language without a list");
    }

    #[test]
    fn what_listeners_say_is_told_from_what_callers_want() {
        for (text, language, expected) in [
            ("Mm-hm.", "en", Some(Backchannel::Sound)),
            ("mhm, mhm", "de", Some(Backchannel::Sound)),
            ("Yeah.", "en", Some(Backchannel::Word)),
            ("Oh, I see.", "en", Some(Backchannel::Word)),
            ("okay, yeah", "en", Some(Backchannel::Word)),
            ("Ja, genau.", "de-DE", Some(Backchannel::Word)),
            ("Stop.", "en", None),
            ("No.", "en", None),
            ("Yeah, but not on Friday.", "en", None),
            ("", "en", None),
        ] {
            assert_eq!(backchannel(text, language), expected, "{text}");
        }
    }

    #[test]
    fn what_the_agent_expects_counts_before_the_form() {
        let digits = Some(Expect::Digits);
        assert_eq!(judge("4 5 7.", "en", digits), Verdict::Unfinished);
        assert_eq!(
            judge("four five seven one.", "en", digits),
            Verdict::Unfinished,
            "its length is the caller's secret"
        );
        assert_eq!(judge("I do not have it.", "en", digits), Verdict::Open);
        let email = Some(Expect::Email);
        assert_eq!(judge("anna at example.", "en", email), Verdict::Unfinished);
        assert_eq!(judge("anna at example dot com.", "en", email), Verdict::Open);
        assert_eq!(judge("anna@example.com", "en", email), Verdict::Open);
        assert_eq!(judge("anna at example dot", "en", email), Verdict::Unfinished);
        let name = Some(Expect::Name);
        assert_eq!(judge("Anna.", "en", name), Verdict::Unfinished);
        assert_eq!(judge("Anna Meyer.", "en", name), Verdict::Open);
        assert_eq!(judge("Anna Meyer, M E Y", "en", name), Verdict::Unfinished);
        let answer = Some(Expect::YesNo);
        assert_eq!(judge("no, thanks", "en", answer), Verdict::Complete);
        assert_eq!(judge("Yes I think so", "en", answer), Verdict::Complete);
        assert_eq!(judge("I am calling about my", "en", answer), Verdict::Unfinished);
    }
}
