//! Where a sentence that is still being written may be cut, so that its first words sound before its end is known.
//!
//! Pure functions of the text: how long the writer has paused is the caller's to say ([`Patience`]).
//!
//! # Why
//! - A cut must not change what is said. A number, a date or a title is read by what stands around it, so both words
//!   at a cut are plain ones, and what is said of the phrase must be what is said of the same words in the whole text;
//!   the rest is read behind it ([`crate::text::read_after`]). What the writer may add next is not known; in its place
//!   stand the probes that most readings depend on.
//! - The word behind a cut must be complete, unless the writer pauses: then the last word counts as complete when it is
//!   a plain one. "Let me check that for you" before a tool call is spoken to its end; "it costs 3" waits for what may
//!   follow the number.

use std::cell::LazyCell;

use super::{ABBREVIATIONS, NUMBERED, is_day};
use crate::text::{Lexicon, is_spaced};

/// How long the writer has been silent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Patience {
    /// Not at all: only what is long enough is cut, behind a word that another one follows.
    Writing,
    /// For a moment: the last word is complete, if nothing that often follows would change how it is read.
    Paused,
    /// For so long that whatever is there is complete.
    Silent,
}

/// What often changes the reading of the words before it.
const PROBES: [&str; 4] = [" 5", " 101", " 1984", " XIV"];

/// Words behind a number that may still belong to it: "1 de mayo", "10 sq ft.", "123 Main St.".
const OF_A_NUMBER: usize = 3;

/// Letters that an ideograph is worth: it takes about as long to say.
const IDEOGRAPH: usize = 3;

/// Letters of the shortest phrase: an article alone is none.
const SHORTEST: usize = 4;

/// Longest name of a control token that is waited for.
const LONGEST_TOKEN: usize = 64;

/// Where `text` may be cut: the byte length of the phrase. `least`: letters that it must have while the writer goes on.
/// `say` reads a text aloud as it will be read; entries of `lexicon` are not cut, nor what may become one.
pub(super) fn cut(
    text: &str,
    least: usize,
    patience: Patience,
    say: &dyn Fn(&str) -> String,
    lexicon: &Lexicon,
) -> Option<usize> {
    let end = open_token(text).unwrap_or(text.len());
    // Behind a long silence an entry counts as complete, as a number does.
    let open = lexicon.open_at(text).filter(|_| patience < Patience::Silent);
    let end = open.map_or(end, |open| end.min(open));
    let entries = lexicon.spans(text);
    let written = text.trim_end().len();
    if patience == Patience::Silent && end == text.len() {
        return (written > 0).then_some(written);
    }
    let whole = LazyCell::new(|| words(&say(text)));
    let keeps = |at: usize| whole.starts_with(&words(&say(&text[..at])));
    let enough = length(text.trim()) >= SHORTEST;
    if patience == Patience::Paused && end == text.len() && enough && may_end(text) && probes_agree(text, say) {
        return Some(written);
    }
    let mut behind: Option<usize> = None;
    let places = places(&text[..end], open.is_some());
    let places = places.into_iter().filter(|at| !entries.iter().any(|entry| entry.start < *at && *at < entry.end));
    for at in places.rev() {
        if length(text[..at].trim()) < if patience == Patience::Writing { least } else { SHORTEST } {
            break;
        }
        // A clause is the better place, if there is one; any other is needed once.
        let clause = text[..at].ends_with(is_mark);
        if behind.is_some() && !clause {
            continue;
        }
        // What an entry begins with is said by it, whatever it looks like.
        let plain = open.is_some_and(|open| text[at..open].trim().is_empty()) || is_plain(first_word(&text[at..end]));
        if !(is_plain(last_word(&text[..at])) && plain && !of_days(&text[..at]) && keeps(at)) {
            continue;
        }
        if clause {
            return Some(at);
        }
        behind = behind.or(Some(at));
    }
    behind
}

/// Where the gaps begin behind which a whole word stands; `followed`: or the end, where a word follows.
fn places(text: &str, followed: bool) -> Vec<usize> {
    let mut places = Vec::new();
    let (mut gap, mut word) = (None, false);
    for (at, c) in text.char_indices() {
        if !c.is_whitespace() {
            word = true;
        } else if word {
            places.extend(gap);
            (gap, word) = (Some(at), false);
        }
    }
    if followed {
        places.extend(gap.filter(|_| !word));
    }
    places.retain(|at| !text[..*at].trim().is_empty());
    places
}

/// Whether the last word of `text` is one that the writer may stop behind.
fn may_end(text: &str) -> bool {
    let word = last_word(text.trim_end());
    let dense = word.chars().next_back().is_some_and(|c| !is_spaced(c));
    if dense {
        return !word.chars().rev().take(4).any(|c| c.is_ascii_digit());
    }
    let numbered =
        text.split_whitespace().rev().take(OF_A_NUMBER).any(|word| word.contains(|c: char| c.is_ascii_digit()));
    is_plain(word) && !numbered && !of_days(text)
}

/// Whether `text` ends in a day of the week as it is shortened, or in the word behind one: "Mo. bis" goes on with "Fr.".
fn of_days(text: &str) -> bool {
    let text = text.trim_end();
    is_day(text) || text.rsplit_once(char::is_whitespace).is_some_and(|(before, _)| is_day(before.trim_end()))
}

fn probes_agree(text: &str, say: &dyn Fn(&str) -> String) -> bool {
    let text = text.trim_end();
    let said = words(&say(text));
    PROBES.iter().all(|probe| words(&say(&format!("{text}{probe}"))).starts_with(&said))
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

fn last_word(text: &str) -> &str {
    text.rsplit(char::is_whitespace).next().unwrap_or_default()
}

fn first_word(text: &str) -> &str {
    text.split_whitespace().next().unwrap_or_default()
}

/// A word that is read as it is written, whatever stands beside it: letters only, no abbreviation, no initials.
fn is_plain(word: &str) -> bool {
    let word = word
        .trim_start_matches(['"', '“', '\'', '‘', '(', '«', '¿', '¡'])
        .trim_end_matches(['"', '”', '’', '\'', ')', '»'])
        .trim_end_matches(is_mark)
        .trim_end_matches(['"', '”', '’', '\'', ')', '»']);
    let spelled = |c: char| c.is_alphabetic() || matches!(c, '\'' | '’' | '-' | '\u{300}'..='\u{36f}');
    if !word.chars().any(char::is_alphabetic) || !word.chars().all(spelled) {
        return false;
    }
    let lower = word.to_lowercase();
    if ABBREVIATIONS.contains(&lower.as_str()) || NUMBERED.contains(&lower.as_str()) {
        return false;
    }
    let cased = word.chars().any(char::is_uppercase);
    !cased || word.chars().any(char::is_lowercase) || matches!(word, "I" | "A" | "O")
}

fn is_mark(c: char) -> bool {
    matches!(c, ',' | ';' | ':' | '—' | '–' | '，' | '、' | '；' | '：')
}

fn length(text: &str) -> usize {
    text.chars().map(|c| if is_spaced(c) { 1 } else { IDEOGRAPH }).sum()
}

/// Where a control token (`<|...|>`) begins whose end is not there yet.
fn open_token(text: &str) -> Option<usize> {
    if text.ends_with('<') {
        return Some(text.len() - 1);
    }
    let at = text.rfind("<|").filter(|at| !text[*at..].contains("|>"))?;
    (text.len() - at <= LONGEST_TOKEN).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{Normalise, read};

    fn phrase(text: &str, patience: Patience) -> Option<&str> {
        let say = |text: &str| read(text, Some("en"), Normalise::On).spoken.text;
        cut(text, 24, patience, &say, &Lexicon::default()).map(|at| &text[..at])
    }

    #[test]
    fn while_the_writer_goes_on_a_phrase_is_long_and_a_whole_word_follows_it() {
        assert_eq!(phrase("I would like to tell you ab", Patience::Writing), None, "what follows may go on");
        let text = "I would like to tell you about ";
        assert_eq!(phrase(text, Patience::Writing), Some("I would like to tell you"));
        assert_eq!(phrase("I would like to ", Patience::Writing), None, "too short");
        let text = "I would like to tell you, if I may, about all of ";
        assert_eq!(phrase(text, Patience::Writing), Some("I would like to tell you, if I may,"));
    }

    #[test]
    fn behind_a_pause_the_last_word_is_complete_unless_it_is_read_by_what_follows() {
        let spoken = |text| phrase(text, Patience::Paused);
        assert_eq!(spoken("Let me check that for you"), Some("Let me check that for you"));
        assert_eq!(spoken("It costs about 3"), Some("It costs"), "3.5, 3 million");
        assert_eq!(spoken("We moved here on May"), Some("We moved here"), "May 5");
        assert_eq!(spoken("Please ask for Dr"), Some("Please ask"));
        assert_eq!(spoken("$"), None);
        assert_eq!(phrase("It costs about 3", Patience::Silent), Some("It costs about 3"));
        assert_eq!(spoken("我想看看"), Some("我想看看"));
    }

    #[test]
    fn a_control_token_is_not_cut() {
        assert_eq!(phrase("I would like to tell you all <|end of", Patience::Silent), Some("I would like to tell you"));
        assert_eq!(phrase("Say it now <", Patience::Paused), Some("Say it"));
    }
}
