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

/// The language of `text` by its script: kana are Japanese, other ideographs Chinese. `None` where letters alone do
/// not tell.
pub fn detect(text: &str) -> Option<Language> {
    let mut han = false;
    for c in text.chars() {
        match c {
            '\u{3041}'..='\u{30fa}' | '\u{31f0}'..='\u{31ff}' => return Some(Language::Japanese),
            '\u{3400}'..='\u{9fff}' | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3134f}' => han = true,
            _ => {}
        }
    }
    han.then_some(Language::Chinese)
}
