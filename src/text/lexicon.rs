//! Words that are said otherwise than they are written: names, products, abbreviations of a trade.
//!
//! # Why
//! - **Whole words by Unicode's boundaries**, the longest first: "New York" before "York", and nothing inside a word.
//!   Scripts that do not set words apart have no such boundaries; there an entry is found anywhere.
//! - **A table by first word.** What an entry costs a text does not grow with their number.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

use serde::Deserialize;
use unicode_segmentation::UnicodeSegmentation;

use super::ipa::are_phonemes;
use super::language::is_dense;
use super::{Given, Language, Say};
use crate::turn::Phonemes;

/// Entries of one lexicon at most.
const MOST: usize = 20_000;
/// Bytes of an entry, of either side, at most.
const LONGEST: usize = 200;
/// Words of an entry at most: how far behind a word the text is looked at.
const MOST_WORDS: usize = 12;

/// Entries as they are configured: what is written, and how it is said.
pub type Entries = std::collections::BTreeMap<String, Entry>;

/// How a word is said.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Entry {
    /// As this would be read.
    Spelling(String),
    /// With more to say of it.
    Full(Full),
}

/// One entry with all that may be said of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Full {
    /// As this would be read.
    pub say: Option<String>,
    /// Phonemes in the mnemonics of espeak-ng; voices without them read what is written.
    pub phonemes: Option<String>,
    /// Pinyin, for Mandarin: `chong2 qing4` or `chóng qìng`. Voices without it read what is written.
    pub pinyin: Option<String>,
    /// BCP 47 language that it is for; none: all.
    pub language: Option<String>,
    /// Whether capitals count. By default where the entry has one behind its first letter ("US", "iOS").
    pub case: Option<bool>,
}

/// What to look for, and what to say in its place.
#[derive(Clone, Default)]
pub struct Lexicon(Arc<Table>);

#[derive(Debug, Default)]
struct Table {
    /// By the first word in small letters, the longest first. In scripts without spaces, by the first character.
    words: HashMap<String, Vec<Word>>,
}

#[derive(Debug)]
struct Word {
    written: String,
    /// In small letters, where capitals do not count.
    folded: Option<String>,
    language: Option<String>,
    say: Say,
}

impl std::fmt::Debug for Lexicon {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lexicon of {}", self.0.words.values().map(Vec::len).sum::<usize>())
    }
}

impl PartialEq for Lexicon {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || (self.is_empty() && other.is_empty())
    }
}

/// A lexicon that may be replaced while it is used; clones follow.
#[derive(Clone, Debug, Default)]
pub struct Current(Arc<RwLock<Lexicon>>);

impl Current {
    /// What it is now.
    pub fn get(&self) -> Lexicon {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes up other words.
    pub fn set(&self, lexicon: Lexicon) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = lexicon;
    }
}

impl PartialEq for Current {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.get() == other.get()
    }
}

impl Lexicon {
    /// The lexicon of `general` entries and of those of an agent, which go before them.
    ///
    /// # Errors
    /// The entry and what it must be.
    pub fn new(general: &Entries, own: &Entries) -> Result<Self, String> {
        let mut table = Table::default();
        let kept = general.iter().filter(|(written, _)| !own.contains_key(*written));
        if own.len() + general.len() > MOST {
            return Err(format!("{} entries: at most {MOST} are taken", own.len() + general.len()));
        }
        for (written, entry) in own.iter().chain(kept) {
            let word = word(written, entry).map_err(|error| format!("\"{written}\": {error}"))?;
            table.words.entry(first(written)).or_default().push(word);
        }
        for words in table.words.values_mut() {
            // One that is for a language goes before one for all. The sort is stable: an agent's own stay first.
            words.sort_by_key(|word| (std::cmp::Reverse(word.written.len()), word.language.is_none()));
        }
        Ok(Self(Arc::new(table)))
    }

    /// Whether it has no entry.
    pub fn is_empty(&self) -> bool {
        self.0.words.is_empty()
    }

    /// Adds what of `text`, which is in `language`, is said otherwise to `given`, in order, except within what is given
    /// already.
    pub(super) fn find(&self, text: &str, language: Option<&str>, given: &mut Vec<Given>) {
        if self.is_empty() {
            return;
        }
        let taken = given.clone();
        let (mut free, mut until) = (taken.iter().peekable(), 0);
        for (at, first) in starts(text) {
            while free.next_if(|given| given.at.end <= at).is_some() {}
            if at < until {
                continue;
            }
            // What is given has its place; a mark, which takes none, may stand at a word's start, but not inside one.
            let limit = match free.peek() {
                Some(given) if given.at.start <= at => continue,
                Some(given) => given.at.start,
                None => text.len(),
            };
            let Some(words) = self.words_from(first) else { continue };
            let found = words.iter().find_map(|word| Some((word, word.end_at(text, at, language)?)));
            let Some((word, end)) = found.filter(|(_, end)| *end <= limit) else { continue };
            given.push(Given { at: at..end, say: word.say.clone() });
            until = end;
        }
        given.sort_by_key(|given| (given.at.start, given.at.end));
    }

    /// The entries that begin with a word, or with what it is the possessive of.
    fn words_from(&self, first: &str) -> Option<&Vec<Word>> {
        let small = first.to_lowercase();
        self.0.words.get(&small).or_else(|| {
            let stem = small.strip_suffix("'s").or_else(|| small.strip_suffix("’s"))?;
            self.0.words.get(stem)
        })
    }

    /// Where entries of any language stand in `text`, in order: what is said of them is not cut.
    pub fn spans(&self, text: &str) -> Vec<Range<usize>> {
        let mut spans: Vec<Range<usize>> = Vec::new();
        if self.is_empty() {
            return spans;
        }
        for (at, first) in starts(text) {
            if spans.last().is_some_and(|last| at < last.end) {
                continue;
            }
            let longest = self.words_from(first).into_iter().flatten().filter_map(|word| word.ends(text, at)).max();
            spans.extend(longest.map(|end| at..end));
        }
        spans
    }

    /// Where a piece of text begins, at its end, that an entry may go on with: until then it may be read.
    pub fn open_at(&self, text: &str) -> Option<usize> {
        if self.is_empty() {
            return None;
        }
        let from = super::scan::floor(text, text.len().saturating_sub(LONGEST));
        starts(&text[from..]).filter(|(_, first)| !first.is_empty()).map(|(at, first)| (at + from, first)).find_map(
            |(at, first)| {
                let rest = text[at..].trim_end().to_lowercase();
                let words = self.words_from(first)?;
                let goes_on =
                    |word: &Word| word.written.to_lowercase().starts_with(&rest) && word.written.len() > rest.len();
                words.iter().any(goes_on).then_some(at)
            },
        )
    }
}

impl Word {
    /// Where it ends, if it stands at `at`.
    fn end_at(&self, text: &str, at: usize, language: Option<&str>) -> Option<usize> {
        if let Some(of) = &self.language
            && !language.is_some_and(|tag| is_of(tag, of))
        {
            return None;
        }
        self.ends(text, at)
    }

    /// Where it ends, if it stands at `at`, in whatever language.
    fn ends(&self, text: &str, at: usize) -> Option<usize> {
        let end = at + self.written.len();
        let end = match &self.folded {
            None => (text.get(at..end)? == self.written).then_some(end)?,
            // Small letters may be of another length than capitals: the text is folded character by character.
            Some(folded) => {
                let (mut rest, mut end) = (folded.as_str(), at);
                for c in text[at..].chars() {
                    if rest.is_empty() {
                        break;
                    }
                    let small: String = c.to_lowercase().collect();
                    rest = rest.strip_prefix(small.as_str())?;
                    end += c.len_utf8();
                }
                rest.is_empty().then_some(end)?
            }
        };
        let (last, next) = (text[..end].chars().next_back()?, text[end..].chars().next());
        let joined = |c: char| c.is_alphanumeric() && !is_dense(c);
        if let Some(behind) = text[end..].strip_prefix(['\'', '’']) {
            // "Anna's", but not "can't".
            let tail: String = behind.chars().take_while(|c| c.is_alphanumeric()).collect();
            return (tail.is_empty() || tail == "s").then_some(end);
        }
        (!(joined(last) && next.is_some_and(|next| joined(next) || is_combining(next)))).then_some(end)
    }
}

/// Marks that change the letter before them.
fn is_combining(c: char) -> bool {
    matches!(c, '\u{300}'..='\u{36f}' | '\u{200d}')
}

/// Whether a text in `tag` is in the language `of`: "en-GB" is "en", "en" is not "en-GB".
fn is_of(tag: &str, of: &str) -> bool {
    let (tag, of) = (tag.to_lowercase().replace('_', "-"), of.to_lowercase().replace('_', "-"));
    tag == of
        || tag.strip_prefix(&of).is_some_and(|rest| rest.starts_with('-'))
        || (!of.contains('-') && {
            let (tag, of) = (Language::of_tag(&tag), Language::of_tag(&of));
            tag == of && tag != Language::Other
        })
}

/// The places where a word begins, and the word; in scripts without spaces, each character.
fn starts(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.unicode_word_indices().flat_map(|(at, word)| {
        let dense = word.starts_with(is_dense);
        let chars = word.char_indices().filter(move |_| dense).map(move |(n, c)| (at + n, &word[n..n + c.len_utf8()]));
        chars.chain((!dense).then_some((at, word)))
    })
}

/// What an entry is found by.
fn first(written: &str) -> String {
    starts(written).next().map_or_else(String::new, |(_, word)| word.to_lowercase())
}

fn word(written: &str, entry: &Entry) -> Result<Word, String> {
    let full = match entry {
        Entry::Spelling(say) => Full { say: Some(say.clone()), ..Full::default() },
        Entry::Full(full) => full.clone(),
    };
    if starts(written).next().is_none_or(|(at, _)| at != 0) || written.trim_end() != written {
        return Err("an entry begins with a letter or a digit and ends with no space".into());
    }
    if written.len() > LONGEST || starts(written).filter(|(_, word)| !word.starts_with(is_dense)).count() > MOST_WORDS {
        return Err(format!("longer than {LONGEST} bytes or {MOST_WORDS} words"));
    }
    let say = match (full.say, full.phonemes, full.pinyin) {
        (None, Some(phonemes), None) if are_phonemes(&phonemes) => Say::Phonemes(Phonemes::Espeak(phonemes)),
        (None, Some(_), None) => {
            return Err("phonemes: mnemonics of espeak-ng are ASCII without brackets, at most 200".into());
        }
        (None, None, Some(pinyin)) => Say::Phonemes(Phonemes::Pinyin { pinyin: super::pinyin::canonical(&pinyin)? }),
        (Some(say), None, None) if !say.trim().is_empty() && say.len() <= LONGEST => Say::Words(say.trim().to_owned()),
        (Some(_), None, None) => return Err(format!("how it is said is 1 to {LONGEST} bytes")),
        (None, None, None) => return Err("needs `say`, `phonemes` or `pinyin`".into()),
        _ => return Err("`say`, `phonemes` and `pinyin`: an entry has one of them; remove the others".into()),
    };
    let cased = full.case.unwrap_or_else(|| written.chars().skip(1).any(char::is_uppercase));
    let folded = (!cased).then(|| written.to_lowercase());
    Ok(Word { written: written.to_owned(), folded, language: full.language, say })
}

#[cfg(test)]
mod tests {
    use super::super::{How, Normalise, read_given};
    use super::*;

    fn lexicon(toml: &str) -> Lexicon {
        Lexicon::new(&toml::from_str(toml).expect("entries"), &Entries::new()).expect("a lexicon")
    }

    fn said(lexicon: &Lexicon, text: &str, language: &str) -> String {
        let how = How { language: Some(language), normalise: Normalise::On, lexicon };
        read_given("", text, &[], how).spoken.text
    }

    #[test]
    fn whole_words_are_replaced_the_longest_first() {
        let lexicon = lexicon(
            "nginx = 'engine x'\n'New York' = 'the big apple'\nYork = 'yorrk'\nUS = 'U S'\n'Siobhán' = 'shivawn'",
        );
        assert_eq!(
            said(&lexicon, "Nginx 5 in New York, not york.", "en"),
            "engine x five in the big apple, not yorrk."
        );
        assert_eq!(said(&lexicon, "nginxes and Yorkshire", "en"), "nginxes and Yorkshire", "nothing inside a word");
        assert_eq!(said(&lexicon, "US for us.", "en"), "U S for us.", "capitals count where an entry has them");
        assert_eq!(said(&lexicon, "Ask Siobhán's aunt", "en"), "Ask shivawn's aunt");
        assert_eq!(said(&lexicon, "Ask SIOBHÁN.", "en"), "Ask shivawn.");
    }

    #[test]
    fn an_entry_is_for_its_language_and_an_agents_own_go_first() {
        let general = lexicon("Chat = { say = 'tchat', language = 'en' }\n'重庆' = '崇庆'");
        assert_eq!(said(&general, "Chat", "en-GB"), "tchat");
        assert_eq!(said(&general, "Chat", "fr"), "Chat");
        assert_eq!(said(&general, "我在重庆工作", "zh"), "我在崇庆工作", "scripts without spaces have no boundaries");
        let parse = |text| toml::from_str::<Entries>(text).expect("entries");
        let both = Lexicon::new(&parse("AB = 'one'\nCD = 'two'"), &parse("AB = 'three'")).expect("a lexicon");
        assert_eq!(said(&both, "AB CD", "en"), "three two");
    }

    #[test]
    fn what_an_entry_may_go_on_with_is_known() {
        let lexicon = lexicon("'New York City' = 'here'");
        assert_eq!(lexicon.open_at("I love new"), Some(7));
        assert_eq!(lexicon.open_at("I love New York "), Some(7));
        assert_eq!(lexicon.open_at("I love New York City"), None);
        assert_eq!(lexicon.open_at("I love old York"), None);
        assert_eq!(lexicon.spans("I love New York City, New York City's."), [7..20, 22..35]);
        assert!(lexicon.spans("I love New York").is_empty());
    }

    #[test]
    fn a_wrong_entry_is_refused_with_what_it_must_be() {
        for (entry, expected) in [
            ("'' = 'x'", "begins with a letter"),
            ("a = ''", "1 to 200"),
            ("a = {}", "needs `say`"),
            ("a = { say = 'x', phonemes = 'x' }", "one of them"),
            ("a = { pinyin = 'ma1', phonemes = 'x' }", "one of them"),
            ("a = { pinyin = 'chongqing' }", "no syllable of Mandarin"),
            ("a = { phonemes = 'x]]' }", "mnemonics"),
        ] {
            let entries = toml::from_str(entry).expect("entries");
            let error = Lexicon::new(&entries, &Entries::new()).expect_err(entry);
            assert!(error.contains(expected), "{entry}: {error}");
        }
    }
}
