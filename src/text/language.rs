//! Which language a text is in.

#[rustfmt::skip]
mod words;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::LazyLock;

use whatlang::{Detector, Lang};

use self::words::{LATIN, SMALL_WORDS};

/// The languages that have rules of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Language {
    /// English.
    English,
    /// Chinese, in either script.
    Chinese,
    /// Japanese.
    Japanese,
    /// German.
    German,
    /// French.
    French,
    /// Spanish.
    Spanish,
    /// Any other: a text is said as it is written.
    Other,
}

impl Language {
    /// The language of a BCP 47 tag: its first part decides, a name such as `zh-CN` is taken as `zh`.
    pub fn of_tag(tag: &str) -> Self {
        let primary = tag.split(['-', '_']).next().unwrap_or_default().to_ascii_lowercase();
        match primary.as_str() {
            "en" | "eng" => Self::English,
            "zh" | "cmn" | "yue" | "zho" => Self::Chinese,
            "ja" | "jp" | "jpn" => Self::Japanese,
            "de" | "deu" => Self::German,
            "fr" | "fra" => Self::French,
            "es" | "spa" => Self::Spanish,
            _ => Self::Other,
        }
    }

    /// The BCP 47 tag; empty for [`Language::Other`].
    pub fn tag(self) -> &'static str {
        match self {
            Self::English => "en",
            Self::Chinese => "zh",
            Self::Japanese => "ja",
            Self::German => "de",
            Self::French => "fr",
            Self::Spanish => "es",
            Self::Other => "",
        }
    }
}

/// Whether `c` is of a script that does not set words apart.
pub(super) fn is_dense(c: char) -> bool {
    matches!(c, '\u{3001}'..='\u{30ff}' | '\u{3400}'..='\u{9fff}' | '\u{f900}'..='\u{faff}' | '\u{ff01}'..='\u{ff1f}' | '\u{20000}'..='\u{3134f}')
}

/// Characters of a text that are looked at: what a text is written in shows early.
const LOOKED_AT: usize = 2_000;
/// Letters from which a text without small words is asked of statistics, which guess wrong on less.
const LONG: usize = 24;
/// Languages of the table of small words in Cyrillic letters.
const CYRILLIC: [&str; 4] = ["uk", "bg", "sr", "mk"];
/// Languages in Latin letters that one word is enough for.
const MOST: [&str; 7] = ["en", "de", "fr", "es", "it", "pt", "nl"];
/// Letters from which a text shows its language: one of fewer may be names and numbers.
pub const TELLING: usize = 30;

/// The BCP 47 tag of the language that `text` is written in; `None` where that is not certain.
///
/// The script tells many of the world's languages, or their family; among those in Latin letters the small words do,
/// which every sentence has. Where both leave a choice, letters that few languages write and `whatlang`'s trigrams
/// decide. A text of names and numbers is of no certain language.
pub fn detect(text: &str) -> Option<&'static str> {
    let counts = Counts::of(text);
    counts.by_script(text).unwrap_or_else(|| by_words(text, &counts))
}

/// Letters of a text by script.
struct Counts {
    kana: bool,
    han: usize,
    latin: usize,
    others: [usize; SCRIPTS.len()],
}

impl Counts {
    fn of(text: &str) -> Self {
        let mut counts = Self { kana: false, han: 0, latin: 0, others: [0; SCRIPTS.len()] };
        for c in text.chars().take(LOOKED_AT) {
            match c {
                '\u{3041}'..='\u{30fa}' | '\u{31f0}'..='\u{31ff}' => counts.kana = true,
                '\u{3400}'..='\u{9fff}' | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3134f}' => counts.han += 1,
                'a'..='z' | 'A'..='Z' | '\u{c0}'..='\u{24f}' | '\u{1e00}'..='\u{1eff}' => counts.latin += 1,
                c if c.is_alphabetic() => {
                    if let Some(at) = SCRIPTS.iter().position(|(from, to, _)| (*from..=*to).contains(&c)) {
                        counts.others[at] += 1;
                    }
                }
                _ => {}
            }
        }
        counts
    }

    /// `None`: it is in Latin letters.
    fn by_script(&self, text: &str) -> Option<Option<&'static str>> {
        // One kana is enough: no other language has them.
        if self.kana {
            return Some(Some("ja"));
        }
        let all = self.others.iter().zip(SCRIPTS).map(|(count, (_, _, tag))| (*count, *tag));
        let (most, tag) = all.max_by_key(|(count, _)| *count)?;
        if most > 0 && most >= self.han && most * 2 >= self.latin {
            return Some(Some(match tag {
                "ru" => cyrillic(text),
                // Letters that Arabic does not have, and those that of these two only Urdu has.
                "ar" if text.contains(['ٹ', 'ڈ', 'ڑ', 'ں', 'ے', 'ہ']) => "ur",
                "ar" if text.contains(['پ', 'چ', 'ژ', 'گ', 'ی', 'ک']) => "fa",
                "hi" if most >= LONG => {
                    among(text, &[("hi", Lang::Hin), ("mr", Lang::Mar), ("ne", Lang::Nep)]).unwrap_or(tag)
                }
                tag => tag,
            }));
        }
        // An ideograph says about as much as four letters.
        (self.han > 0 && self.han * 4 >= self.latin).then_some(Some("zh"))
    }
}

/// Scripts of one widely spoken language, or of a family that has one.
const SCRIPTS: &[(char, char, &str)] = &[
    ('\u{370}', '\u{3ff}', "el"),
    ('\u{400}', '\u{4ff}', "ru"),
    ('\u{530}', '\u{58f}', "hy"),
    ('\u{590}', '\u{5ff}', "he"),
    ('\u{600}', '\u{6ff}', "ar"),
    ('\u{900}', '\u{97f}', "hi"),
    ('\u{980}', '\u{9ff}', "bn"),
    ('\u{a00}', '\u{a7f}', "pa"),
    ('\u{a80}', '\u{aff}', "gu"),
    ('\u{b80}', '\u{bff}', "ta"),
    ('\u{c00}', '\u{c7f}', "te"),
    ('\u{c80}', '\u{cff}', "kn"),
    ('\u{d00}', '\u{d7f}', "ml"),
    ('\u{d80}', '\u{dff}', "si"),
    ('\u{e00}', '\u{e7f}', "th"),
    ('\u{1000}', '\u{109f}', "my"),
    ('\u{10a0}', '\u{10ff}', "ka"),
    ('\u{1200}', '\u{137f}', "am"),
    ('\u{1780}', '\u{17ff}', "km"),
    ('\u{ac00}', '\u{d7af}', "ko"),
];

/// A language in Cyrillic letters, by those that only it has; where it shows none, by trigrams that are sure, else Russian.
fn cyrillic(text: &str) -> &'static str {
    let shown: Vec<char> = text.chars().take(LOOKED_AT).flat_map(char::to_lowercase).collect();
    let has = |letters: &str| shown.iter().any(|c| letters.contains(*c));
    // In Russian a hard sign stands before a soft vowel only.
    let vowel = |c: Option<&char>| c.is_some_and(|c| "еёюя".contains(*c));
    let hard = (0..shown.len()).any(|at| shown[at] == 'ъ' && !vowel(shown.get(at + 1)));
    match () {
        () if has("ў") => "be",
        () if has("ђћ") => "sr",
        () if has("ѓќѕ") => "mk",
        () if has("љњџј") => among(text, &[("sr", Lang::Srp), ("mk", Lang::Mkd)]).unwrap_or("sr"),
        () if has("әғқңөұүһ") => "kk",
        () if has("їєґ") || (has("і") && !has("ыэё")) => "uk",
        () if has("ыэё") => "ru",
        () if hard => "bg",
        () => {
            let text: String = shown.into_iter().collect();
            let found = by_small_words(&text).filter(|found| found.words >= 3 && CYRILLIC.contains(&found.tag));
            found.map_or("ru", |found| found.tag)
        }
    }
}

/// Which of `languages` the trigrams of `text` are most like.
fn among(text: &str, languages: &[(&'static str, Lang)]) -> Option<&'static str> {
    let shown: String = text.chars().take(LOOKED_AT).collect();
    let allowed = languages.iter().map(|(_, lang)| *lang).collect();
    let found = Detector::with_allowlist(allowed).detect_lang(&shown)?;
    languages.iter().find(|(_, lang)| *lang == found).map(|(tag, _)| *tag)
}

/// How many small words of a language a text holds, and of the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Found {
    tag: &'static str,
    words: usize,
    next: Option<&'static str>,
    of_next: usize,
}

impl Found {
    /// More than a name or a loan would bring.
    fn is_strong(self) -> bool {
        self.words >= 2 && (self.words >= self.of_next * 2 || self.words >= self.of_next + 3)
    }
}

/// A language in Latin letters.
fn by_words(text: &str, counts: &Counts) -> Option<&'static str> {
    if counts.latin == 0 {
        return None;
    }
    let found = by_small_words(text);
    if let Some(found) = found.filter(|found| found.is_strong()) {
        return Some(found.tag);
    }
    let shown: String = text.chars().take(LOOKED_AT).collect();
    let foreign = |word: &&str| word.contains(is_rare);
    let foreign = shown.split(|c: char| !c.is_alphabetic()).filter(foreign).count();
    let words = found.map_or(0, |found| found.words);
    if foreign > 0 && foreign >= words {
        // A name among other words is no language.
        let all: Vec<(&str, Lang)> =
            LATIN.iter().filter(|(_, _, rare)| *rare).map(|(tag, lang, _)| (*tag, *lang)).collect();
        return if counts.latin >= LONG / 2 || foreign > 1 { among(text, &all) } else { None };
    }
    match found {
        // A word may be a name or a loan: from such a one no language is taken that few callers speak.
        Some(Found { tag, words: 1, of_next: 0, .. }) if !MOST.contains(&tag) => {
            Some(text).filter(|_| counts.latin >= LONG).and_then(sure)
        }
        Some(Found { tag, of_next: 0, .. }) => {
            let sure = Some(text).filter(|_| counts.latin >= 2 * LONG).and_then(sure);
            Some(sure.unwrap_or(tag))
        }
        // Words that two languages share.
        Some(Found { tag, next: Some(next), .. }) if counts.latin >= LONG / 2 => {
            let both: Vec<(&str, Lang)> =
                LATIN.iter().filter(|(t, ..)| [tag, next].contains(t)).map(|(tag, lang, _)| (*tag, *lang)).collect();
            among(text, &both)
        }
        Some(_) => None,
        None => Some(text).filter(|_| counts.latin >= LONG).and_then(sure),
    }
}

/// What the trigrams say, if they are sure of it.
fn sure(text: &str) -> Option<&'static str> {
    let shown: String = text.chars().take(LOOKED_AT).collect();
    let allowed = LATIN.iter().map(|(_, lang, _)| *lang).collect();
    let found = Detector::with_allowlist(allowed).detect(&shown).filter(whatlang::Info::is_reliable)?;
    LATIN.iter().find(|(_, lang, _)| *lang == found.lang()).map(|(tag, ..)| *tag)
}

/// Of each small word the languages that have it: bits in the order of [`SMALL_WORDS`]. A word in hand is looked up once, not
/// in the list of every language.
static LANGUAGES_OF: LazyLock<HashMap<&str, u64>> = LazyLock::new(|| {
    const { assert!(SMALL_WORDS.len() <= 64) };
    let mut languages = HashMap::new();
    for (at, (_, words)) in SMALL_WORDS.iter().enumerate() {
        words.iter().for_each(|word| *languages.entry(*word).or_default() |= 1 << at);
    }
    languages
});

/// The language whose small words `text` holds most of.
fn by_small_words(text: &str) -> Option<Found> {
    let mut found = [0_usize; SMALL_WORDS.len()];
    let shown: String = text.chars().take(LOOKED_AT).collect::<String>().to_lowercase();
    // The parts of an address ("com") are no words of a language.
    let is_address = |chunk: &&str| {
        let mut chars = chunk.chars().skip_while(|c| *c != '.').skip(1);
        chunk.contains('@') || chars.next().is_some_and(char::is_alphanumeric)
    };
    let chunks = shown.split_whitespace().filter(|chunk| !is_address(chunk));
    let words = chunks.flat_map(|chunk| chunk.split(|c: char| !c.is_alphabetic()));
    for word in words.filter(|word| !word.is_empty()) {
        let mut languages = LANGUAGES_OF.get(word).copied().unwrap_or_default();
        while languages != 0 {
            found[languages.trailing_zeros() as usize] += 1;
            languages &= languages - 1;
        }
    }
    // The first of equals: they stand in the order of how many speak them on telephones.
    let best = (0..found.len()).rev().max_by_key(|at| found[*at])?;
    let second = (0..found.len()).rev().filter(|at| *at != best).max_by_key(|at| found[*at])?;
    let (tag, next) = (SMALL_WORDS[best].0, SMALL_WORDS[second].0);
    let next = Some(next).filter(|_| found[second] > 0);
    (found[best] > 0).then_some(Found { tag, words: found[best], next, of_next: found[second] })
}

/// A letter that none of the seven most spoken languages in Latin letters writes.
fn is_rare(c: char) -> bool {
    matches!(c, '\u{c0}'..='\u{24f}' | '\u{1e00}'..='\u{1eff}')
        && !"äöüßàâæçéèêëîïôœùûÿñáíóúãõìòªº".contains(c.to_lowercase().next().unwrap_or(c))
}

/// Pieces of `text` that are each of one certain language, where it has several: it changes at marks between clauses.
/// What is of no certain language goes with what is before it, at the beginning with the whole. Empty where the text is of one.
pub fn clauses(text: &str) -> Vec<(Range<usize>, &'static str)> {
    let mut pieces: Vec<(Range<usize>, Option<&'static str>)> = Vec::new();
    let mut from = 0;
    let marks = |(at, c): (usize, char)| ends_clause(c).then_some(at + c.len_utf8());
    let ends = text.char_indices().filter_map(marks).chain([text.len()]);
    for end in ends {
        // A decimal comma or a time ends no clause.
        let inside = text[end..].starts_with(|c: char| c.is_alphanumeric()) && text[..end].ends_with([',', ':', '.']);
        if end == from || inside {
            continue;
        }
        pieces.push((from..end, certain(&text[from..end])));
        from = end;
    }
    if pieces.len() < 2 || pieces.iter().filter_map(|(_, tag)| *tag).all(|tag| Some(tag) == pieces[0].1) {
        return Vec::new();
    }
    if pieces[0].1.is_none() {
        pieces[0].1 = detect(text);
    }
    let mut joined: Vec<(Range<usize>, Option<&'static str>)> = Vec::new();
    for (at, tag) in pieces {
        match joined.last_mut() {
            Some((before, known)) if tag.is_none() || known.is_none() || tag == *known => {
                (before.end, *known) = (at.end, known.or(tag));
            }
            _ => joined.push((at, tag)),
        }
    }
    if joined.len() < 2 {
        return Vec::new();
    }
    joined.into_iter().filter_map(|(at, tag)| Some((at, tag?))).collect()
}

/// The language of a clause, if there is no doubt of it.
fn certain(clause: &str) -> Option<&'static str> {
    let counts = Counts::of(clause);
    let others: usize = counts.others.iter().sum();
    // A foreign script among Latin letters is a name, or the other way about, unless there is nothing else.
    match counts.by_script(clause) {
        Some(tag) => tag.filter(|_| counts.latin == 0 && (counts.kana || counts.han + others >= 2)),
        None if counts.han + others > 0 => None,
        None => by_small_words(clause).filter(|found| found.is_strong()).map(|found| found.tag),
    }
}

/// Stands between clauses or sentences.
fn ends_clause(c: char) -> bool {
    matches!(
        c,
        ',' | ';'
            | ':'
            | '.'
            | '!'
            | '?'
            | '…'
            | '—'
            | '–'
            | '"'
            | '”'
            | '“'
            | '«'
            | '»'
            | '，'
            | '、'
            | '；'
            | '：'
            | '。'
            | '！'
            | '？'
            | '」'
            | '』'
            | '।'
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_language_shows_by_its_script_or_its_small_words() {
        for (text, tag) in [
            ("Hello, how can I help you today?", "en"),
            ("It costs $5.", "en"),
            ("Guten Tag, wie kann ich Ihnen helfen?", "de"),
            ("Das kostet 5 Euro.", "de"),
            ("Bonjour, comment puis-je vous aider ?", "fr"),
            ("Hola, ¿cómo puedo ayudarle hoy?", "es"),
            ("Buongiorno, come posso aiutarla?", "it"),
            ("Olá, bom dia, como posso ajudar você?", "pt"),
            ("Goedemorgen, hoe kan ik u helpen?", "nl"),
            ("今天天气怎么样？", "zh"),
            ("我喜欢 Rust 语言。", "zh"),
            ("今日はいい天気ですね。", "ja"),
            ("안녕하세요", "ko"),
            ("Здравствуйте, чем могу помочь?", "ru"),
            ("Γεια σας", "el"),
            ("مرحبا بكم", "ar"),
            // In Latin letters that others write, too, or with letters of their own.
            ("Dzień dobry, w czym mogę pomóc?", "pl"),
            ("Proszę poczekać chwilę.", "pl"),
            ("Hej, hur kan jag hjälpa dig idag?", "sv"),
            ("Hej, hvordan kan jeg hjælpe dig i dag?", "da"),
            ("Hei, kuinka voin auttaa sinua tänään?", "fi"),
            ("Merhaba, size nasıl yardımcı olabilirim?", "tr"),
            ("Dobrý den, jak vám mohu pomoci?", "cs"),
            ("Jó napot, miben segíthetek?", "hu"),
            ("Bună ziua, cu ce vă pot ajuta?", "ro"),
            ("Xin chào, tôi có thể giúp gì cho bạn?", "vi"),
            ("Halo, ada yang bisa saya bantu?", "id"),
            ("Let me call Łukasz for you.", "en"),
            ("Sure thing, I am on it.", "en"),
            // Of one script.
            ("Добрий день, чим я можу вам допомогти?", "uk"),
            ("Добър ден, как мога да ви помогна?", "bg"),
            ("Добар дан, како могу да вам помогнем?", "sr"),
            ("Подождите минуту, пожалуйста.", "ru"),
            ("سلام، چگونه می‌توانم به شما کمک کنم؟", "fa"),
            ("नमस्ते, मैं आपकी कैसे मदद कर सकता हूँ?", "hi"),
        ] {
            assert_eq!(detect(text), Some(tag), "{text}");
        }
        for text in ["", "42", "Acme", "...", "Peter Schmidt"] {
            assert_eq!(detect(text), None, "{text}");
        }
    }
}
