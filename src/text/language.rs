//! Which language a text is in.

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

/// The BCP 47 tag of the language that `text` is written in; `None` where that is not certain.
///
/// The script tells most of the world's languages; among those in Latin letters the small words do, which every
/// sentence has. A text of names and numbers has none and is of no certain language.
pub fn detect(text: &str) -> Option<&'static str> {
    let mut scripts = [0_usize; SCRIPTS.len()];
    let (mut han, mut latin) = (0, 0);
    for c in text.chars().take(LOOKED_AT) {
        match c {
            // One kana is enough: no other language has them.
            '\u{3041}'..='\u{30fa}' | '\u{31f0}'..='\u{31ff}' => return Some("ja"),
            '\u{3400}'..='\u{9fff}' | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3134f}' => han += 1,
            'a'..='z' | 'A'..='Z' | '\u{c0}'..='\u{24f}' => latin += 1,
            c if c.is_alphabetic() => {
                if let Some(at) = SCRIPTS.iter().position(|(from, to, _)| (*from..=*to).contains(&c)) {
                    scripts[at] += 1;
                }
            }
            _ => {}
        }
    }
    let (most, tag) = scripts.iter().zip(SCRIPTS).map(|(count, (_, _, tag))| (*count, *tag)).max_by_key(|(n, _)| *n)?;
    if most > 0 && most >= han && most * 2 >= latin {
        return Some(tag);
    }
    // An ideograph says about as much as four letters.
    if han > 0 && han * 4 >= latin {
        return Some("zh");
    }
    by_small_words(text)
}

/// Scripts of one widely spoken language.
const SCRIPTS: &[(char, char, &str)] = &[
    ('\u{370}', '\u{3ff}', "el"),
    ('\u{400}', '\u{4ff}', "ru"),
    ('\u{530}', '\u{58f}', "hy"),
    ('\u{590}', '\u{5ff}', "he"),
    ('\u{600}', '\u{6ff}', "ar"),
    ('\u{900}', '\u{97f}', "hi"),
    ('\u{980}', '\u{9ff}', "bn"),
    ('\u{b80}', '\u{bff}', "ta"),
    ('\u{c00}', '\u{c7f}', "te"),
    ('\u{e00}', '\u{e7f}', "th"),
    ('\u{10a0}', '\u{10ff}', "ka"),
    ('\u{ac00}', '\u{d7af}', "ko"),
];

/// The language whose small words `text` holds most of, if clearly more than of any other.
fn by_small_words(text: &str) -> Option<&'static str> {
    let mut found = [0_usize; SMALL_WORDS.len()];
    let shown: String = text.chars().take(LOOKED_AT).collect::<String>().to_lowercase();
    for word in shown.split(|c: char| !c.is_alphabetic()).filter(|word| !word.is_empty()) {
        for (count, (_, words)) in found.iter_mut().zip(SMALL_WORDS) {
            *count += usize::from(words.contains(&word));
        }
    }
    let best = (0..found.len()).max_by_key(|at| found[*at])?;
    let second = (0..found.len()).filter(|at| *at != best).map(|at| found[at]).max()?;
    (found[best] > 0 && found[best] >= second * 2).then_some(SMALL_WORDS[best].0)
}

/// Words that most sentences of a language hold, without those that two of these languages share in equal measure.
#[rustfmt::skip]
const SMALL_WORDS: &[(&str, &[&str])] = &[
    ("en", &["the", "and", "is", "are", "you", "your", "to", "of", "it", "that", "this", "for", "with", "have", "we", "my",
        "what", "how", "can", "please", "hello", "thank", "thanks", "not", "do", "will", "would", "at", "be", "i", "yes",
        "there", "from", "by", "let", "me", "was", "has", "they", "he", "she", "when", "where", "good", "okay", "our", "on"]),
    ("de", &["der", "die", "das", "und", "ist", "nicht", "sie", "ich", "ein", "eine", "einen", "mit", "für", "auf", "wir", "ihr",
        "ihre", "ihnen", "sind", "wie", "bitte", "danke", "guten", "tag", "hallo", "ja", "nein", "auch", "von", "zu", "dem",
        "den", "im", "haben", "wird", "kann", "können", "heute", "uhr", "zum", "zur", "noch", "aber", "oder", "was", "es", "morgen"]),
    ("fr", &["le", "les", "des", "et", "est", "une", "vous", "nous", "je", "pour", "avec", "dans", "qui", "pas", "votre", "sur",
        "bonjour", "merci", "oui", "non", "sont", "du", "au", "aux", "ce", "cette", "il", "elle", "mais", "ou", "où", "plaît",
        "être", "avez", "suis", "ça", "à", "comment", "très", "bien", "aujourd", "hui"]),
    ("es", &["el", "los", "las", "una", "y", "es", "en", "por", "para", "con", "usted", "su", "hola", "gracias", "sí", "del",
        "está", "son", "pero", "muy", "qué", "cómo", "puede", "buenos", "días", "buenas", "favor", "hoy", "mañana", "tiene",
        "nosotros", "yo", "lo", "al", "esta", "este", "cuánto", "bien"]),
    ("it", &["il", "gli", "di", "che", "è", "sono", "per", "della", "del", "nel", "ciao", "grazie", "buongiorno", "prego", "lei",
        "anche", "questo", "questa", "come", "può", "molto", "oggi", "domani", "una", "ma", "ho", "ha", "dei", "alla", "noi"]),
    ("pt", &["os", "as", "um", "uma", "não", "você", "obrigado", "obrigada", "olá", "bom", "dia", "para", "com", "está", "são",
        "muito", "também", "seu", "sua", "da", "em", "mas", "hoje", "amanhã", "eu", "ele", "isso"]),
    ("nl", &["het", "een", "en", "van", "niet", "dat", "u", "uw", "wij", "ik", "zijn", "voor", "met", "hallo", "dank", "goedemorgen",
        "alstublieft", "naar", "ook", "maar", "kunt", "heeft", "wordt", "vandaag", "goed", "deze", "hoe", "op"]),
];

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
        ] {
            assert_eq!(detect(text), Some(tag), "{text}");
        }
        for text in ["", "42", "Acme", "...", "Peter Schmidt"] {
            assert_eq!(detect(text), None, "{text}");
        }
    }
}
