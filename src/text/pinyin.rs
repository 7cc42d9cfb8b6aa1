//! Pinyin: Mandarin in Latin letters, syllable by syllable.
//!
//! Source: GB/T 16159 and ISO 7098 for the spelling; which initial stands with which final is the table of syllables that
//! is found in any dictionary. Tones are written as marks (`chóng qìng`) or as digits (`chong2 qing4`); `v` and `u:` are
//! what keyboards without `ü` make of it.

/// Bytes of what is given.
const LONGEST: usize = 200;

/// Initials, longer ones first.
const INITIALS: [&str; 23] = [
    "zh", "ch", "sh", "b", "p", "m", "f", "d", "t", "n", "l", "g", "k", "h", "j", "q", "x", "r", "z", "c", "s", "y",
    "w",
];

/// Each final, as it is spelled, and the initials that it stands with; `0`: none.
#[rustfmt::skip]
const FINALS: [(&str, &str); 34] = [
    ("a", "0 b p m f d t n l g k h zh ch sh z c s y w"), ("ai", "0 b p m d t n l g k h zh ch sh z c s y w"),
    ("an", "0 b p m f d t n l g k h zh ch sh r z c s y w"), ("ang", "0 b p m f d t n l g k h zh ch sh r z c s y w"),
    ("ao", "0 b p m d t n l g k h zh ch sh r z c s y"), ("e", "0 m d t n l g k h zh ch sh r z c s y"),
    ("ei", "0 b p m f d t n l g k h zh sh z c w"), ("en", "0 b p m f d n g k h zh ch sh r z c s w"),
    ("eng", "0 b p m f d t n l g k h zh ch sh r z c s w"), ("er", "0"), ("i", "b p m d t n l j q x zh ch sh r z c s y"),
    ("ia", "d l j q x"), ("ian", "b p m d t n l j q x"), ("iang", "n l j q x"), ("iao", "b p m d t n l j q x"),
    ("ie", "b p m d t n l j q x"), ("in", "b p m n l j q x y"), ("ing", "b p m d t n l j q x y"), ("iong", "j q x"),
    ("iu", "m d n l j q x"), ("o", "0 b p m f l y w"), ("ong", "d t n l g k h zh ch r z c s y"),
    ("ou", "0 p m f d t n l g k h zh ch sh r z c s y"), ("u", "b p m f d t n l g k h j q x zh ch sh r z c s y w"),
    ("ua", "g k h zh ch sh r"), ("uai", "g k h zh ch sh"), ("uan", "d t n l g k h j q x zh ch sh r z c s y"),
    ("uang", "g k h zh ch sh"), ("ue", "j q x y"), ("ui", "d t g k h zh ch sh r z c s"),
    ("un", "d t n l g k h j q x zh ch sh r z c s y"), ("uo", "d t n l g k h zh ch sh r z c s"), ("ü", "n l"),
    ("üe", "n l"),
];

/// One syllable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Syllable {
    /// Consonants before the vowels, as they are spelled; none: empty. `y` and `w` are among them.
    pub initial: &'static str,
    /// The rest, as it is spelled without its tone; `ü` only behind `n` and `l`, as written.
    pub rime: &'static str,
    /// 1 to 4, and 5 for the neutral one.
    pub tone: u8,
}

impl std::fmt::Display for Syllable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}{}", self.initial, self.rime, self.tone)
    }
}

impl Syllable {
    /// Its rime with the mark of its tone over the vowel that bears it: `ǐ`, `óng`; the neutral tone has none.
    pub fn marked(&self) -> String {
        // An `a` or `e` bears it, else the `o` of `ou`, else the last vowel.
        let vowels = |c: &char| "aeiouü".contains(*c);
        let bearer = ['a', 'e']
            .into_iter()
            .find(|c| self.rime.contains(*c))
            .or_else(|| self.rime.starts_with("ou").then_some('o'))
            .or_else(|| self.rime.chars().rev().find(vowels));
        let marks = |c: char| MARKS.iter().find(|(vowel, _)| *vowel == c).map(|(_, marks)| *marks);
        let mark = |c: char| {
            let marked = marks(c).and_then(|marks| marks.chars().nth(usize::from(self.tone).checked_sub(1)?));
            marked.filter(|_| Some(c) == bearer).unwrap_or(c)
        };
        self.rime.chars().map(mark).collect()
    }
}

/// Vowels and the same with the marks of the four tones.
const MARKS: [(char, &str); 6] =
    [('a', "āáǎà"), ('e', "ēéěè"), ('i', "īíǐì"), ('o', "ōóǒò"), ('u', "ūúǔù"), ('ü', "ǖǘǚǜ")];
/// Marks of their own, as text that is decomposed has them.
const COMBINING: [char; 4] = ['\u{304}', '\u{301}', '\u{30c}', '\u{300}'];

/// The syllables of `text`: set apart by spaces, apostrophes, hyphens, or by the digit of a tone. One without a tone is
/// neutral.
///
/// # Errors
/// What of it is no syllable, and what is expected.
pub fn syllables(text: &str) -> Result<Vec<Syllable>, String> {
    if text.len() > LONGEST {
        return Err(format!("pinyin: at most {LONGEST} bytes"));
    }
    let mut found = Vec::new();
    for word in text.split(|c: char| c.is_whitespace() || matches!(c, '\'' | '’' | '-')) {
        for one in word.split_inclusive(|c: char| c.is_ascii_digit()).filter(|one| !one.is_empty()) {
            found.push(syllable(one).ok_or_else(|| {
                format!(
                    "pinyin: `{one}` is no syllable of Mandarin with its tone; write `chong2 qing4` or `chóng qìng`, \
                     syllables set apart by spaces"
                )
            })?);
        }
    }
    if found.is_empty() { Err("pinyin: there is no syllable".into()) } else { Ok(found) }
}

/// The same with digits for tones, a space between syllables: how it is handed on.
///
/// # Errors
/// As [`syllables`].
pub(super) fn canonical(text: &str) -> Result<String, String> {
    let syllables = syllables(text)?;
    Ok(syllables.iter().map(Syllable::to_string).collect::<Vec<_>>().join(" "))
}

fn syllable(text: &str) -> Option<Syllable> {
    let (mut letters, mut tone) = (String::new(), None);
    for c in text.to_lowercase().chars() {
        let marked = MARKS.iter().find_map(|(vowel, marks)| Some((*vowel, marks.chars().position(|m| m == c)?)));
        let (letter, given) = match c {
            '0'..='5' => (None, Some(if c == '0' { 5 } else { c as u8 - b'0' })),
            '\u{308}' | ':' if letters.ends_with('u') => {
                letters.pop();
                (Some('ü'), None)
            }
            'v' => (Some('ü'), None),
            _ => match (marked, COMBINING.iter().position(|mark| *mark == c)) {
                (Some((vowel, at)), _) => (Some(vowel), Some(at as u8 + 1)),
                (None, Some(at)) => (None, Some(at as u8 + 1)),
                (None, None) => (Some(c), None),
            },
        };
        letters.extend(letter);
        if given.is_some() && std::mem::replace(&mut tone, given).is_some() {
            return None;
        }
    }
    let initial = INITIALS.into_iter().find(|initial| letters.starts_with(initial)).unwrap_or_default();
    let mut rime = letters.strip_prefix(initial)?.to_owned();
    // Behind these it is spelled without its dots.
    if matches!(initial, "j" | "q" | "x" | "y") {
        rime = rime.replace('ü', "u");
    }
    let with = if initial.is_empty() { "0" } else { initial };
    let (rime, _) = FINALS.iter().find(|(known, initials)| *known == rime && initials.split(' ').any(|i| i == with))?;
    Some(Syllable { initial, rime, tone: tone.unwrap_or(5) })
}

/// Every syllable there is, in every tone.
#[cfg(test)]
pub(crate) fn all() -> impl Iterator<Item = Syllable> {
    FINALS.iter().flat_map(|(rime, initials)| {
        initials.split(' ').flat_map(move |initial| {
            let initial = if initial == "0" { "" } else { initial };
            (1..=5).map(move |tone| Syllable { initial, rime, tone })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tones_are_marks_or_digits_and_give_the_same() {
        for (written, expected) in [
            ("chóng qìng", "chong2 qing4"),
            ("chong2qing4", "chong2 qing4"),
            ("Chóng-Qìng", "chong2 qing4"),
            ("Xī'ān", "xi1 an1"),
            ("nǚ lüè", "nü3 lüe4"),
            ("nv3 lve4", "nü3 lüe4"),
            ("nu:3", "nü3"),
            ("nü\u{30c}", "nü3"),
            ("nu\u{308}\u{30c}", "nü3"),
            ("jü2", "ju2"),
            ("mā ma", "ma1 ma5"),
            ("de0 de5", "de5 de5"),
            ("zhuāng", "zhuang1"),
        ] {
            assert_eq!(canonical(written).as_deref(), Ok(expected), "{written}");
        }
        for wrong in ["", " ", "chóngqìng", "bü3", "ji33", "jǐ3", "hello", "给", "zhx1", "5", &"ma1 ".repeat(60)] {
            assert!(canonical(wrong).is_err_and(|error| error.starts_with("pinyin: ")), "{wrong}");
        }
    }

    #[test]
    fn the_mark_is_over_the_vowel_that_bears_it() {
        for (written, expected) in [
            ("ji3", "ǐ"),
            ("gei3", "ěi"),
            ("jiu4", "iù"),
            ("gui1", "uī"),
            ("dou1", "ōu"),
            ("guo2", "uó"),
            ("jiong3", "iǒng"),
            ("lüe4", "üè"),
            ("nü3", "ǚ"),
            ("er2", "ér"),
            ("de5", "e"),
        ] {
            let read = syllables(written).expect(written);
            assert_eq!(read[0].marked(), expected);
            let again = syllables(&format!("{}{}", read[0].initial, read[0].marked())).expect(expected);
            assert_eq!(again, read);
        }
        let every: Vec<Syllable> = all().collect();
        assert_eq!(every.len(), 414 * 5);
        for one in every {
            assert_eq!(syllables(&one.to_string()).expect("one"), [one], "{one}");
            assert_eq!(syllables(&format!("{}{}", one.initial, one.marked())).expect("one"), [one], "{one}");
        }
    }
}
