//! The walk over a text: at each place where a token may begin the rules of a language are asked in order, and what
//! none of them takes is copied.
//!
//! # Why
//! - **Anchored patterns over a short window.** Every rule sees at most [`WINDOW`] bytes from where it begins, so
//!   that a text costs time in proportion to its length, whatever it holds. A match that fills the window while the
//!   text goes on is no match: how it ends is not known.
//! - **Rules are asked only where their match can begin.** Most places behind a word are a comma or a full stop, with which hardly any
//!   match begins. Asking all rules there took most of the time between a turn's text and its utterance, some 0.5 ms.
//! - **Spans beside the text.** What was heard is told in the words as written; the spans lead back to them.

use std::ops::{Range, RangeInclusive};

use regex::{Captures, Regex};
use regex_syntax::hir::{Class, Hir, HirKind};

/// Bytes that a rule may look at.
pub(super) const WINDOW: usize = 192;

/// A text as it is said, and where each piece of it was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spoken {
    /// What is said.
    pub text: String,
    /// In order and without gaps: the pieces of `text` and of what was written.
    pub spans: Vec<Span>,
}

/// A piece of a text on both sides. Offsets are in bytes, at character boundaries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Where it was written.
    pub written: Range<usize>,
    /// Where it is said.
    pub spoken: Range<usize>,
    /// Both are the same, byte for byte.
    pub copied: bool,
}

impl Spoken {
    /// `text` as it is.
    pub fn verbatim(text: &str) -> Self {
        let mut writer = Writer::default();
        writer.copy(text);
        writer.finish()
    }

    /// The length of the written text of which the first `spoken` bytes of what is said are all. A rewritten piece
    /// counts when all of it was said: half a date is no date.
    pub fn written_before(&self, spoken: usize) -> usize {
        let mut written = 0;
        for span in &self.spans {
            if spoken >= span.spoken.end {
                written = span.written.end;
            } else {
                if span.copied && spoken > span.spoken.start {
                    written = span.written.start + (spoken - span.spoken.start);
                }
                break;
            }
        }
        written
    }

    /// What is said of the text behind the first `written` bytes; `None` where a rewritten piece lies on both sides.
    pub(super) fn behind(&self, written: usize) -> Option<Spoken> {
        let first = self.spans.iter().position(|span| span.written.end > written)?;
        let from = match &self.spans[first] {
            span if span.written.start == written => span.spoken.start,
            span if span.copied => span.spoken.start + (written - span.written.start),
            _ => return None,
        };
        let shift = |span: &Span| Span {
            written: span.written.start.max(written) - written..span.written.end - written,
            spoken: span.spoken.start.max(from) - from..span.spoken.end - from,
            copied: span.copied,
        };
        Some(Spoken { text: self.text.get(from..)?.to_owned(), spans: self.spans[first..].iter().map(shift).collect() })
    }
}

/// Writes what is said, and the spans.
#[derive(Debug, Default)]
pub(super) struct Writer {
    spoken: Spoken,
    read: usize,
}

impl Writer {
    pub(super) fn copy(&mut self, text: &str) {
        let (from, read) = (self.spoken.text.len(), self.read);
        self.spoken.text.push_str(text);
        self.read += text.len();
        match self.spoken.spans.last_mut().filter(|span| span.copied) {
            Some(span) => {
                span.written.end = self.read;
                span.spoken.end = self.spoken.text.len();
            }
            None if text.is_empty() => {}
            None => self.push(read, from, true),
        }
    }

    pub(super) fn replace(&mut self, written: usize, said: &str) {
        let (from, read) = (self.spoken.text.len(), self.read);
        self.spoken.text.push_str(said);
        self.read += written;
        self.push(read, from, false);
    }

    fn push(&mut self, read: usize, from: usize, copied: bool) {
        let (written, spoken) = (read..self.read, from..self.spoken.text.len());
        self.spoken.spans.push(Span { written, spoken, copied });
    }

    /// The length of what is said so far.
    pub(super) fn said(&self) -> usize {
        self.spoken.text.len()
    }

    pub(super) fn finish(self) -> Spoken {
        self.spoken
    }
}

/// What a rule knows beside its match.
pub(super) struct Context<'a> {
    /// The text before the match, back to a few words.
    pub(super) before: &'a str,
    /// The text behind the match, a few words of it.
    pub(super) after: &'a str,
}

impl Context<'_> {
    /// The word before, without the space between; empty where there is none.
    pub(super) fn last_word(&self) -> &str {
        let text = self.before.trim_end();
        let start = text
            .rfind(|c: char| !c.is_alphanumeric() && c != '\'')
            .map_or(0, |at| at + text[at..].chars().next().map_or(1, char::len_utf8));
        &text[start..]
    }

    /// The character before.
    pub(super) fn last(&self) -> Option<char> {
        self.before.chars().next_back()
    }

    /// The character behind.
    pub(super) fn next(&self) -> Option<char> {
        self.after.chars().next()
    }

    /// The first word behind.
    pub(super) fn next_word(&self) -> &str {
        let text = self.after.trim_start();
        let end = text.find(|c: char| !c.is_alphanumeric()).unwrap_or(text.len());
        &text[..end]
    }
}

/// What a rule says; `None` leaves the text to the next rule.
pub(super) type Say = fn(&Captures<'_>, &Context<'_>) -> Option<String>;

/// What may stand behind a match.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// No letter or digit, and no sign that carries a number on.
    Word,
    /// No digit, and no sign that carries a number on: for scripts without spaces.
    Number,
    /// Anything.
    Any,
}

/// With which characters a match may begin: of ASCII these, and whether others too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct First {
    ascii: u128,
    others: bool,
}

impl First {
    /// Of `pattern`, and whether it matches nothing at all as well.
    fn of(pattern: &Hir) -> (Self, bool) {
        match pattern.kind() {
            HirKind::Empty | HirKind::Look(_) => (Self::default(), true),
            HirKind::Literal(literal) => match literal.0.first() {
                Some(byte) => (Self::default().with(u32::from(*byte)..=u32::from(*byte)), false),
                None => (Self::default(), true),
            },
            HirKind::Class(Class::Unicode(class)) => {
                let ranges = class.iter().map(|range| u32::from(range.start())..=u32::from(range.end()));
                (ranges.fold(Self::default(), Self::with), false)
            }
            HirKind::Class(Class::Bytes(class)) => {
                let ranges = class.iter().map(|range| u32::from(range.start())..=u32::from(range.end()));
                (ranges.fold(Self::default(), Self::with), false)
            }
            HirKind::Repetition(repeated) => {
                let (first, empty) = Self::of(&repeated.sub);
                (first, empty || repeated.min == 0)
            }
            HirKind::Capture(capture) => Self::of(&capture.sub),
            HirKind::Alternation(all) => all
                .iter()
                .map(Self::of)
                .fold((Self::default(), false), |(all, any), (one, empty)| (all.or(one), any || empty)),
            HirKind::Concat(all) => {
                let mut first = Self::default();
                for part in all {
                    let (one, empty) = Self::of(part);
                    first = first.or(one);
                    if !empty {
                        return (first, false);
                    }
                }
                (first, true)
            }
        }
    }

    /// What lies past ASCII is all one.
    fn with(self, range: RangeInclusive<u32>) -> Self {
        let ascii = range.clone().take_while(|c| *c < 128).fold(self.ascii, |all, c| all | 1 << c);
        Self { ascii, others: self.others || *range.end() >= 128 }
    }

    fn or(self, other: Self) -> Self {
        Self { ascii: self.ascii | other.ascii, others: self.others || other.others }
    }

    fn has(self, c: char) -> bool {
        if c.is_ascii() { self.ascii >> u32::from(c) & 1 == 1 } else { self.others }
    }
}

/// One pattern and what is said for it.
pub(super) struct Rule {
    pattern: Regex,
    first: First,
    end: End,
    say: Say,
}

impl Rule {
    /// A rule for `pattern`, anchored.
    #[expect(clippy::expect_used, reason = "the patterns are constants and a test builds every one")]
    pub(super) fn new(pattern: &str, end: End, say: Say) -> Self {
        let (first, _) = First::of(&regex_syntax::parse(pattern).expect("a pattern of a language"));
        let pattern = Regex::new(&format!("^(?:{pattern})")).expect("a pattern of a language");
        Self { pattern, first, end, say }
    }
}

/// The rules of a language.
pub(super) struct Grammar {
    /// Those that begin with a digit, a sign or a currency.
    pub(super) numbers: Vec<Rule>,
    /// Those that begin with a letter.
    pub(super) words: Vec<Rule>,
    /// Words are not set apart by spaces: a rule may begin behind a letter.
    pub(super) dense: bool,
    /// Whether a space between a character and a number is dropped.
    pub(super) joins: bool,
    /// Whether a run of letters without digits or a full stop behind it needs no rule. Saves asking.
    pub(super) plain: fn(&str, &str) -> bool,
}

impl Grammar {
    /// `text` as it is said.
    pub(super) fn say(&self, text: &str) -> Spoken {
        let mut writer = Writer::default();
        let mut at = 0;
        while let Some(c) = text[at..].chars().next() {
            let before = &text[floor(text, at.saturating_sub(WINDOW / 2))..at];
            let window = &text[at..floor(text, (at + WINDOW).min(text.len()))];
            let more = at + window.len() < text.len();
            if let Some(length) = phone(window) {
                writer.copy(&window[..length]);
                at += length;
                continue;
            }
            let wide = window.contains(|c| half_width(c).is_some());
            let taken = if wide { self.take_wide(window, before, more) } else { self.take(window, before, c, more) };
            let length = if self.dense && self.joins && is_gap(before, window) {
                writer.replace(c.len_utf8(), "");
                c.len_utf8()
            } else if let Some((length, said)) = taken {
                writer.replace(length, &said);
                length
            } else if let Some(narrow) = half_width(c).filter(char::is_ascii_alphanumeric) {
                writer.replace(c.len_utf8(), narrow.encode_utf8(&mut [0; 4]));
                c.len_utf8()
            } else {
                let length = run_of(window, c, self.dense).max(c.len_utf8());
                writer.copy(&text[at..at + length]);
                length
            };
            at += length;
        }
        writer.finish()
    }

    /// As [`Grammar::take`], with what is written in full width read as if it were not.
    fn take_wide(&self, window: &str, before: &str, more: bool) -> Option<(usize, String)> {
        let narrow: String = window.chars().map(|c| half_width(c).unwrap_or(c)).collect();
        let before: String = before.chars().map(|c| half_width(c).unwrap_or(c)).collect();
        let (length, said) = self.take(&narrow, &before, narrow.chars().next()?, more)?;
        // The same number of characters is another number of bytes.
        let chars = narrow[..length].chars().count();
        Some((window.chars().take(chars).map(char::len_utf8).sum(), said))
    }

    fn take(&self, window: &str, before: &str, c: char, more: bool) -> Option<(usize, String)> {
        let run = run_of(window, c, self.dense);
        let last = before.chars().next_back();
        let rules = if c.is_alphabetic() {
            if (!self.dense && last.is_some_and(char::is_alphanumeric)) || (self.plain)(&window[..run], &window[run..])
            {
                return None;
            }
            &self.words
        } else if c.is_whitespace() {
            return None;
        } else {
            &self.numbers
        };
        for rule in rules.iter().filter(|rule| rule.first.has(c)) {
            let Some(found) = rule.pattern.captures(window) else { continue };
            let length = found.get(0).map_or(0, |all| all.end());
            if length == 0
                || (more && length == window.len())
                || !may_end(&window[..length], &window[length..], rule.end)
            {
                continue;
            }
            let context = Context { before, after: &window[length..] };
            if let Some(said) = (rule.say)(&found, &context) {
                return Some((length, said));
            }
        }
        None
    }
}

/// The length of a tag at the beginning of `window` that names a vowel of ARPAbet with its stress: `[AH0]`. A voice that has
/// such tags takes it as it is; the digit is no number to anybody.
fn phone(window: &str) -> Option<usize> {
    const VOWELS: [&str; 15] =
        ["AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW"];
    let name = window.strip_prefix('[')?.get(..4)?;
    let vowel = name.get(..2).is_some_and(|vowel| VOWELS.contains(&vowel));
    (vowel && matches!(&name[2..], "0]" | "1]" | "2]")).then_some(5)
}

/// The length of what is copied together: letters (of a language with spaces) and the marks on them, spaces.
fn run_of(window: &str, c: char, dense: bool) -> usize {
    let latin = |c: char| c.is_alphabetic() && (!dense || (c as u32) < 0x250);
    let same: &dyn Fn(char) -> bool = if latin(c) {
        &|c| latin(c) || is_mark(c)
    } else if c.is_whitespace() {
        &char::is_whitespace
    } else {
        return c.len_utf8();
    };
    window.find(|c| !same(c)).unwrap_or(window.len())
}

/// Whether `window` begins with a space between a number and a character of a script without spaces.
fn is_gap(before: &str, window: &str) -> bool {
    let mut chars = window.chars();
    let (Some(last), Some(' '), Some(next)) = (before.chars().next_back(), chars.next(), chars.next()) else {
        return false;
    };
    let number = |c: char| c.is_ascii_digit();
    (number(last) && !is_spaced(next)) || (!is_spaced(last) && number(next))
}

/// The ASCII character that `c` is the full-width form of.
fn half_width(c: char) -> Option<char> {
    matches!(c, '\u{ff01}'..='\u{ff5e}').then(|| char::from_u32(c as u32 - 0xfee0)).flatten()
}

/// Combining marks, of which a flood must not be taken one by one through all rules.
fn is_mark(c: char) -> bool {
    matches!(c, '\u{300}'..='\u{36f}' | '\u{1ab0}'..='\u{1aff}' | '\u{20d0}'..='\u{20ff}')
}

fn may_end(taken: &str, rest: &str, end: End) -> bool {
    let mut chars = rest.chars();
    let (first, second) = (chars.next(), chars.next());
    let digit = |c: Option<char>| c.is_some_and(|c| c.is_ascii_digit());
    // "5pm,4" is a list; "5,4" is one number.
    let listed = first == Some(',') && taken.ends_with(|c: char| c.is_alphabetic());
    let carried = matches!(first, Some('.' | ',' | ':' | '/' | '-' | '–')) && digit(second) && !listed;
    match end {
        End::Any => true,
        End::Number => !digit(first) && !carried,
        End::Word => !first.is_some_and(|c| c.is_alphanumeric() && is_spaced(c)) && !carried,
    }
}

/// Whether `c` is of a script that sets words apart by spaces.
pub fn is_spaced(c: char) -> bool {
    !matches!(c, '\u{3040}'..='\u{30ff}' | '\u{3400}'..='\u{9fff}' | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3134f}')
}

/// The character boundary at or before `at`.
pub(super) fn floor(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_match_begins_with_one_of_its_first_characters() {
        let first = |pattern: &str| First::of(&regex_syntax::parse(pattern).expect("a pattern")).0;
        let begins = |pattern: &str, c: char| first(pattern).has(c);
        for (pattern, with, without) in [
            (r"(?P<n>\d+)\s*(?i:km)", "09", "k m,"),
            (r"(?:[$€]|US\$)?\s?\d", "$€U 7", "S,."),
            (r"(?i)(jan|feb)\b", "jJfF", "aebn1"),
            (r"\b(?:x|ü)?[α-ω]", "xüα", "y1"),
            (r"-?\p{Lu}", "-AÄ", "a,"),
        ] {
            // Whatever is not ASCII counts as one.
            assert!(with.chars().all(|c| begins(pattern, c)), "{pattern}");
            assert!(without.chars().all(|c| !begins(pattern, c)), "{pattern}");
        }
    }
}
