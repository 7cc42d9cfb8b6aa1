//! Text as an agent writes it, cut into utterances.
//!
//! Text comes in pieces that may split words anywhere and leaves in sentence-sized parts, as soon as it is
//! certain that a part is complete. The machine owns the unfinished rest; it knows nothing of time.
//!
//! What it does to the text before: control characters go, line breaks become spaces (an empty line ends a sentence),
//! and of what is written for the eye (Markdown, emoji, code, tables) only the words stay ([`markdown`]).
//!
//! # Why
//! - A full stop is the end of a sentence only with white space and then no small letter behind it: "3.5",
//!   "example.com", "e.g. this" go on. So the cut waits for the next word to begin, which costs one token.
//! - The first part of a streamed turn may end at a comma: somebody listens to silence. Later parts are
//!   synthesised while earlier ones sound, so they wait for sentences, which sound better.
//! - A writer who pauses behind a full stop has probably finished the sentence; the owner of time says when
//!   ([`Segmenter::settle`]).
//! - Very short sentences after the first join the next: voices do badly on single words.
//! - Where a listener would hear silence meanwhile, a part ends inside a sentence ([`Segmenter::phrase`]).

mod markdown;
mod phrase;
mod script;

pub use self::phrase::Patience;
pub use self::script::{Cut, Piece, Script};

use std::ops::Range;

use serde::{Deserialize, Serialize};

use self::markdown::{Cleaner, PARAGRAPH};
use crate::text::Lexicon;
use crate::text::ssml::{is_inline, is_place};

/// How streamed text is cut. Lengths are in characters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SegmentConfig {
    /// From this length the first part of a streamed turn may end at a clause.
    pub first_clause_chars: usize,
    /// Later sentences shorter than this join the next one.
    pub min_chars: usize,
    /// No part is longer; cut at a clause, else at a space, else anywhere.
    pub max_chars: usize,
    /// From this length an unfinished sentence may be spoken while nothing else sounds. An ideograph counts as three.
    pub phrase_chars: usize,
    /// A writer who pauses for so many milliseconds has finished the sentence, or, where nothing else sounds, a phrase.
    pub pause_ms: u64,
    /// Said in place of each block of code; empty: nothing.
    pub code_block: String,
}

impl Default for SegmentConfig {
    fn default() -> Self {
        // 24 characters are about 1.5 s of speech: enough for the next part to be ready behind it.
        // 200 ms are several times the usual time between two tokens of a model.
        // A phrase for code is of one language, and a text about it mostly says what it is: nothing is said.
        let code_block = String::new();
        Self { first_clause_chars: 24, min_chars: 12, max_chars: 280, phrase_chars: 24, pause_ms: 200, code_block }
    }
}

/// Cuts one turn at a time.
#[derive(Debug)]
pub struct Segmenter {
    config: SegmentConfig,
    pending: String,
    cleaner: Cleaner,
    first: bool,
    /// Entries of several words are not cut.
    lexicon: Lexicon,
    /// What was looked at in vain: how much text, with which patience.
    looked: Option<(usize, Patience)>,
}

impl Segmenter {
    /// At the beginning of a turn.
    pub fn new(config: SegmentConfig) -> Self {
        let (cleaner, lexicon) = (Cleaner::new(&config.code_block), Lexicon::default());
        Self { config, pending: String::new(), cleaner, first: true, lexicon, looked: None }
    }

    /// Cuts no entry of `lexicon`.
    pub fn reading(self, lexicon: Lexicon) -> Self {
        Self { lexicon, ..self }
    }

    /// Takes the next piece of a streamed turn; appends the parts that are complete now to `out`.
    pub fn push(&mut self, token: &str, out: &mut Vec<String>) {
        self.cleaner.clean(token, &mut self.pending);
        self.cut(Stage::Written, out);
    }

    /// Takes a whole turn; appends all its parts to `out`. Cuts at sentences only.
    pub fn whole(&mut self, text: &str, out: &mut Vec<String>) {
        self.cleaner.clean(text, &mut self.pending);
        self.cut(Stage::Complete, out);
        self.finish(out);
    }

    /// The turn is complete: appends the rest to `out`, and is ready for the next turn.
    pub fn finish(&mut self, out: &mut Vec<String>) {
        self.cleaner.finish(&mut self.pending);
        self.cut(Stage::Complete, out);
        emit(&std::mem::take(&mut self.pending), out);
        self.first = true;
    }

    /// Whether what waits looks like the end of a sentence, so that only the next word is missing to be
    /// certain of it.
    pub fn is_probably_complete(&self) -> bool {
        // "Yahoo!" may go on with "Search".
        if self.lexicon.open_at(&self.pending).is_some() {
            return false;
        }
        let text = self.pending.trim_end().trim_end_matches(is_closer);
        let Some(last) = text.chars().next_back().filter(|c| is_terminator(*c)) else { return false };
        let before = &text[..text.len() - last.len_utf8()];
        // A number may go on behind its point, and a shortened word always does.
        let chars = before.char_indices().collect::<Vec<_>>();
        last != '.'
            || !(before.ends_with(|c: char| c.is_ascii_digit())
                || is_abbreviation(&chars)
                || is_numbered(&chars)
                || is_day(before))
    }

    /// The writer pauses: what is probably complete counts as complete and is appended to `out`.
    pub fn settle(&mut self, out: &mut Vec<String>) {
        if self.is_probably_complete() && emit(&std::mem::take(&mut self.pending), out) {
            self.first = false;
        }
    }

    /// Whether any text of the turn has come.
    pub fn has_begun(&self) -> bool {
        !self.first || !self.pending.is_empty()
    }

    /// Whether text waits for what follows it.
    pub fn is_waiting(&self) -> bool {
        !self.pending.trim().is_empty() || self.cleaner.is_holding()
    }

    /// Nothing else sounds: appends what can be spoken of the text that waits to `out`, whole sentences and then the
    /// beginning of the next. `say` gives the words that a text will be read as: a cut does not change them.
    /// `words`: a single word is enough, for a voice that takes text as it is written.
    pub fn phrase(&mut self, patience: Patience, words: bool, say: &dyn Fn(&str) -> String, out: &mut Vec<String>) {
        if patience == Patience::Silent {
            self.cleaner.give_up(&mut self.pending);
        }
        if !self.is_waiting() || self.looked == Some((self.pending.len(), patience)) {
            return;
        }
        // As at the beginning of a turn: short sentences and clauses are welcome.
        self.first = true;
        let before = out.len();
        self.cut(Stage::Written, out);
        let least = if words { 1 } else { self.config.phrase_chars };
        if out.len() == before
            && let Some(at) = phrase::cut(&self.pending, least, patience, say, &self.lexicon)
        {
            let part: String = self.pending.drain(..at).collect();
            emit(&part, out);
        }
        // In words, the end of a sentence joins nothing, however short it is.
        self.first = words || out.len() == before;
        self.looked = Some((self.pending.len(), patience));
    }

    fn cut(&mut self, stage: Stage, out: &mut Vec<String>) {
        let mut from = 0;
        while let Some(end) = self.boundary(&self.pending[from..], stage) {
            if emit(&self.pending[from..from + end], out) {
                self.first = false;
            }
            from += end;
        }
        self.pending.drain(..from);
    }

    /// The byte length of the first part of `text`, when it is certain.
    fn boundary(&self, text: &str, stage: Stage) -> Option<usize> {
        let early = stage == Stage::Written && self.first;
        let max = self.config.max_chars.max(8);
        // A few more than the maximum, to see whether a boundary at its end is one.
        let chars = text.char_indices().take(max + 8).collect::<Vec<_>>();
        let at = |n: usize| chars.get(n).map(|(_, c)| *c);
        let end_of = |n: usize| chars.get(n).map_or(text.len(), |(byte, _)| *byte);
        let entries = self.entries(&text[..end_of(chars.len())], stage);
        let (mut clause, mut space) = (None, None);
        for n in 0..chars.len().min(max) {
            let c = chars[n].1;
            if c == PARAGRAPH {
                return Some(end_of(n + 1));
            }
            // An entry ("Yahoo! Search") is one word.
            if entries.iter().any(|entry| entry.start <= chars[n].0 && end_of(n + 1) < entry.end) {
                continue;
            }
            if c.is_whitespace() {
                space = Some(n + 1);
            }
            if is_terminator(c) && !at(n + 1).is_some_and(is_terminator) {
                // Quotes and brackets that close behind it belong to the sentence.
                let mut behind = n + 1;
                while at(behind).is_some_and(is_closer) {
                    behind += 1;
                }
                let ends = match at(behind) {
                    None => false,
                    Some(_) if is_wide(c) => true,
                    Some(next) if next.is_whitespace() => {
                        // What follows the white space decides; until it is there, nothing is certain.
                        let word =
                            chars[behind..].iter().map(|(_, c)| *c).find(|c| !c.is_whitespace() || *c == PARAGRAPH);
                        let numbered = word.is_some_and(|next| next.is_ascii_digit()) && is_numbered(&chars[..n]);
                        // "Mo. - Fr.", "lun. 5 mai"
                        let goes_on = word
                            .is_some_and(|next| next.is_ascii_digit() || matches!(next, '-' | '–' | '—' | '/' | '&'));
                        let day = goes_on && ends_in_day(&chars[..n]);
                        let shortened = c == '.' && (numbered || day || is_abbreviation(&chars[..n]));
                        word.is_some_and(|next| !next.is_lowercase()) && !shortened
                    }
                    Some(_) => false,
                };
                let long_enough = self.first || behind >= self.config.min_chars;
                if ends && long_enough {
                    return Some(end_of(behind));
                }
            }
            let ends_clause = match c {
                // "Di., Mi. und Do."
                ',' if n > 1 && at(n - 1) == Some('.') && ends_in_day(&chars[..n - 1]) => false,
                ',' | ';' | ':' => at(n + 1).is_some_and(char::is_whitespace),
                '—' | '–' | '，' | '、' | '：' | '；' => at(n + 1).is_some(),
                _ => false,
            };
            if ends_clause {
                clause = Some(n + 1);
                if early && n + 1 >= self.config.first_clause_chars {
                    return Some(end_of(n + 1));
                }
            }
        }
        if chars.len() <= max {
            return None;
        }
        let cut = clause.filter(|n| *n > max / 3).or(space.filter(|n| *n > max / 3)).unwrap_or(max);
        Some(end_of(cut))
    }
}

impl Segmenter {
    /// Where words of the lexicon stand in `text`; while it is being written, to its end where one may go on.
    fn entries(&self, text: &str, stage: Stage) -> Vec<Range<usize>> {
        let mut entries = self.lexicon.spans(text);
        if stage != Stage::Complete
            && let Some(open) = self.lexicon.open_at(text)
        {
            entries.push(open..text.len() + 1);
        }
        entries
    }
}

/// What is known of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// More may follow.
    Written,
    /// All of it.
    Complete,
}

/// Appends `part` if it has anything to say.
///
/// Control tokens of a model go here, where the part is whole: a piece may hold half of one.
fn emit(part: &str, out: &mut Vec<String>) -> bool {
    let part = crate::text::without_tokens(part);
    let part = part.trim();
    let speakable =
        part.chars().any(|c| c.is_alphanumeric() || matches!(c, '&' | '£' | '€' | '¥' | '$' | '%') || is_inline(c));
    if speakable {
        out.push(part.to_owned());
    }
    speakable
}

/// Ends a sentence.
pub(super) fn is_terminator(c: char) -> bool {
    matches!(c, '.' | '!' | '?' | '…') || is_wide(c)
}

/// Ends a sentence without white space behind it: CJK, and the danda of Indian scripts.
fn is_wide(c: char) -> bool {
    matches!(c, '。' | '！' | '？' | '．' | '｡' | '।' | '॥' | '؟')
}

/// Of a script that does not set words apart.
fn is_dense(c: char) -> bool {
    c as u32 >= 0x3000
}

/// Closes what a sentence may end in.
pub(super) fn is_closer(c: char) -> bool {
    matches!(c, '"' | '\'' | ')' | ']' | '”' | '’' | '»' | '」' | '』' | '）' | '】' | '》') || is_place(c)
}

/// Days of the week as they are shortened. Some are words as well: only what follows shows which they are.
const DAYS: [&str; 29] = [
    "mo", "di", "mi", "do", "fr", "sa", "so", "mon", "tue", "tues", "wed", "thu", "thur", "thurs", "fri", "sat", "sun",
    "lun", "mar", "mer", "jeu", "ven", "sam", "dim", "mié", "jue", "vie", "sáb", "dom",
];

/// Of these the ones that end no sentence, as they are written.
const ONLY_DAYS: [&str; 26] = [
    "Mo", "Di", "Mi", "Do", "Sa", "Mon", "Tue", "Wed", "Thu", "Fri", "lun", "jeu", "ven", "sam", "mié", "jue", "sáb",
    "Lun", "Mer", "Jeu", "Ven", "Mié", "Jue", "Sáb", "Sat", "Sun",
];

/// The last word of `before`.
fn last_word(before: &[(usize, char)]) -> String {
    let word = before.iter().rev().map(|(_, c)| *c).take_while(|c| c.is_alphanumeric()).collect::<Vec<_>>();
    word.into_iter().rev().collect()
}

fn ends_in_day(before: &[(usize, char)]) -> bool {
    DAYS.contains(&last_word(before).to_lowercase().as_str())
}

/// Whether the last word of `text`, with or without its full stop, is a day of the week as it is shortened: one that is
/// written so nowhere else, or any behind another day.
fn is_day(text: &str) -> bool {
    let day = |word: &str, known: &[&str], low: bool| {
        let word = word.trim_end_matches(['.', ',']);
        if low { known.contains(&word.to_lowercase().as_str()) } else { known.contains(&word) }
    };
    let mut words = text.rsplit(|c: char| c.is_whitespace() || matches!(c, '-' | '–' | '/'));
    let (last, before) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    day(last, &ONLY_DAYS, false) || (day(last, &DAYS, true) && day(before, &ONLY_DAYS, false))
}

/// Whether the full stop behind `before` belongs to a word that is shortened before a number.
fn is_numbered(before: &[(usize, char)]) -> bool {
    let word = last_word(before).to_lowercase();
    (word.len() == 1 && word.starts_with(char::is_alphabetic)) || NUMBERED.contains(&word.as_str())
}

/// Shortened words that end no sentence when a number follows.
const NUMBERED: [&str; 21] = [
    "jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec", "apt", "tel", "art", "para",
    "max", "min", "abs", "kap", "rs",
];

/// Whether the full stop behind `before` belongs to a shortened word.
fn is_abbreviation(before: &[(usize, char)]) -> bool {
    let word =
        before.iter().rev().map(|(_, c)| *c).take_while(|c| c.is_alphanumeric() || *c == '.').collect::<Vec<_>>();
    let word = word.into_iter().rev().collect::<String>();
    let begins_text = word.chars().count() == before.iter().filter(|(_, c)| !c.is_whitespace()).count();
    // An initial ("J.", "z. B."), but not the word "I"; a Spanish plural ("EE. UU.").
    let mut letters = word.chars();
    let initial = match (letters.next(), letters.next(), letters.next()) {
        (Some(c), None, _) => c.is_alphabetic() && c != 'I' && !is_dense(c),
        (Some(c), Some(d), None) => c == d && c.is_uppercase(),
        _ => false,
    };
    // A number at the start of the text is that of a list item.
    let enumerator = begins_text && !word.is_empty() && word.chars().all(|c| c.is_ascii_digit());
    // "am 5. Januar", "der 3. Platz": German ordinals.
    let ordinal = word.len() <= 2 && word.chars().all(|c| c.is_ascii_digit()) && {
        let text = before.iter().map(|(_, c)| *c).collect::<String>();
        // "vom 1.-5. Mai", "vom 1. bis 5. Mai"
        let of_number = |c: char| c.is_ascii_digit() || matches!(c, '.' | '-' | '–' | ' ');
        let span = text.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end().trim_end_matches(['-', '–']);
        if span.len() < text.trim_end_matches(|c: char| c.is_ascii_digit()).len() && span.trim_end().ends_with('.') {
            return true;
        }
        let text = text.trim_end_matches(of_number);
        let text = text.strip_suffix(" bis").map_or(text, |from| from.trim_end_matches(of_number));
        let article = text.rsplit(' ').next();
        article.is_some_and(|word| BEFORE_ORDINALS.contains(&word.to_lowercase().as_str()))
    };
    // "U.S", "z.B": stops inside.
    let dotted = word.contains('.')
        && word.split('.').all(|part| part.chars().count() <= 2 && part.chars().all(char::is_alphabetic));
    initial || enumerator || ordinal || dotted || ABBREVIATIONS.contains(&word.to_lowercase().as_str())
}

/// German words that an ordinal ("5.") follows.
const BEFORE_ORDINALS: [&str; 14] =
    ["am", "der", "die", "das", "dem", "den", "des", "vom", "zum", "zur", "im", "beim", "seit", "jeden"];

/// Shortened words that are usually followed by a capital or a number. Those that often end sentences
/// ("etc.", "Inc.") are left out: a small letter behind them is enough of a sign.
const ABBREVIATIONS: [&str; 41] = [
    "dr", "mr", "mrs", "ms", "prof", "st", "sr", "sra", "jr", "mt", "ft", "vs", "no", "nos", "nr", "vol", "ch", "pp",
    "fig", "eq", "sec", "gen", "col", "lt", "sgt", "capt", "rev", "hon", "gov", "sen", "rep", "mme", "mlle", "hr",
    "fr", "ca", "approx", "ext", "maj", "cmdr", "av",
];

/// `text` without what should not be read aloud, in one line.
pub fn clean(text: &str) -> String {
    let mut cleaned = String::new();
    let mut cleaner = Cleaner::default();
    cleaner.clean(text, &mut cleaned);
    cleaner.finish(&mut cleaned);
    crate::text::without_tokens(&cleaned.replace(PARAGRAPH, " ")).trim().to_owned()
}

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod tests;
