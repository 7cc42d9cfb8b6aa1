//! From samples that were sent to words that were heard.
//!
//! # Why
//! Where a voice tells when each word ends ([`WordEnd`]), those count that have ended. Where it does not, the position
//! inside an utterance is a share of its text. Characters are
//! weighted by how long they usually take (an ideograph is a syllable, a full stop is a pause), which halves
//! the error of counting them. At the boundaries of utterances nothing is estimated. Inside of them the lengths of words and
//! the pauses in their sound say more ([`align`]).

mod align;
#[rustfmt::skip]
mod lengths;

pub(super) use self::align::Envelope;
use super::event::Precision;
use crate::audio::RATE;
use crate::text::Language;
use crate::turn::{NotBefore, WordEnd};

/// Samples per unit of weight before anything was measured: about 15 letters a second.
const DEFAULT_PACE: f64 = RATE as f64 / 15.0;

/// How fast the voice of a call speaks, learned from utterances whose length is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    samples_per_weight: f64,
}

impl Default for Pace {
    fn default() -> Self {
        Self { samples_per_weight: DEFAULT_PACE }
    }
}

impl Pace {
    /// Learns from an utterance that took `samples`.
    pub(super) fn learn(&mut self, text: &str, samples: u64) {
        let weight = text.chars().map(weight).sum::<f64>();
        // Single words tell little.
        if weight >= 10.0 && samples > 0 {
            let seen = samples as f64 / weight;
            self.samples_per_weight += 0.3 * (seen - self.samples_per_weight);
        }
    }

    /// How much sound `text` is expected to make.
    pub(super) fn samples_of(&self, text: &str) -> f64 {
        text.chars().map(weight).sum::<f64>() * self.samples_per_weight
    }

    /// How many hops of an [`Envelope`] `text` is expected to sound, without its pauses.
    fn hops_of(&self, text: &str) -> f64 {
        let said = text.chars().filter(|c| !align::is_mark(*c)).map(weight).sum::<f64>();
        said * self.samples_per_weight / align::HOP as f64
    }
}

/// The part of `text` that `sent` samples of it carried. `total` is its length where that is known.
/// `words`: when each word ends, where the voice tells.
pub(super) fn prefix<'a>(
    text: &'a str,
    sent: u64,
    total: Option<u64>,
    words: Option<&[WordEnd]>,
    pace: &Pace,
) -> (&'a str, Precision) {
    if sent == 0 {
        return ("", Precision::Exact);
    }
    if let Some(words) = words.filter(|words| !words.is_empty() && total.is_none_or(|total| sent < total)) {
        let heard = words[..words.partition_point(|word| word.samples <= sent)].last();
        let end = heard.map_or(0, |word| word.text);
        return (text.get(..end).unwrap_or_default().trim_end(), Precision::Word);
    }
    let (length, precision) = match total {
        Some(total) if sent >= total => return (text, Precision::Exact),
        Some(total) => (total as f64, Precision::Proportional),
        None => (pace.samples_of(text), Precision::Estimated),
    };
    let all = text.chars().map(weight).sum::<f64>();
    let reached = (sent as f64 / length.max(1.0)).min(1.0) * all;
    let (mut passed, mut end) = (0.0, 0);
    let mut chars = text.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        passed += weight(c);
        if passed > reached {
            break;
        }
        let next = chars.peek().map(|(_, c)| *c);
        if is_ideograph(c) || next.is_none_or(|next| next.is_whitespace() || is_ideograph(next)) {
            end = at + c.len_utf8();
        }
    }
    (text[..end].trim_end(), precision)
}

/// When each word of `text` ends in the sound of `envelope`, by the lengths of its words and by its pauses. `pace`: the
/// voice's own, where the sound goes on.
pub(super) fn aligned(
    text: &str,
    language: Language,
    envelope: &Envelope,
    pace: Option<&Pace>,
) -> Option<Vec<WordEnd>> {
    align::words(text, language, envelope, pace.map(|pace| pace.hops_of(text)))
}

/// Moves the ends of words of `text` that cannot be: a voice that is given its text bit by bit says no word before it has
/// it (`begins`). `left_out`: samples of the voice before the first that is heard.
pub(super) fn not_before(text: &str, ends: &mut [WordEnd], begins: &[NotBefore], left_out: u64) {
    let (mut letters, mut from, mut next, mut earliest) = (0, 0, 0, 0);
    for end in ends {
        while let Some(begin) = begins.get(next).filter(|begin| begin.letters <= letters) {
            earliest = begin.samples.saturating_sub(left_out);
            next += 1;
        }
        end.samples = end.samples.max(earliest);
        letters += text.get(from..end.text).unwrap_or_default().chars().filter(|c| !c.is_whitespace()).count();
        from = end.text;
    }
}

/// Words of `text`; where a script has no spaces, its characters.
pub(super) fn words(text: &str) -> u32 {
    let mut words = 0;
    let mut inside = false;
    for c in text.chars() {
        if is_ideograph(c) {
            words += 1;
            inside = false;
        } else if c.is_alphanumeric() {
            words += u32::from(!inside);
            inside = true;
        } else if c.is_whitespace() {
            inside = false;
        }
    }
    words
}

/// How long a character takes, in Latin letters.
fn weight(c: char) -> f64 {
    match c {
        '.' | '!' | '?' | '…' | '。' | '！' | '？' => 4.0,
        ',' | ';' | ':' | '，' | '、' | '；' | '：' => 2.0,
        c if is_ideograph(c) => 3.0,
        // A digit is read as a word.
        c if c.is_numeric() => 3.5,
        c if c.is_alphabetic() => 1.0,
        _ => 0.5,
    }
}

/// Han, kana and hangul: a character is about a syllable, and words are not set apart.
fn is_ideograph(c: char) -> bool {
    matches!(c, '\u{3040}'..='\u{30ff}' | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}' | '\u{ac00}'..='\u{d7af}' | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3134f}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn boundaries_are_exact_and_the_inside_is_a_share() {
        let (text, pace) = ("one two three four", Pace::default());
        assert_eq!(prefix(text, 0, Some(1_000), None, &pace), ("", Precision::Exact));
        assert_eq!(prefix(text, 1_000, Some(1_000), None, &pace), (text, Precision::Exact));
        assert_eq!(prefix(text, 500, Some(1_000), None, &pace), ("one two", Precision::Proportional));
        assert_eq!(prefix(text, 1, Some(1_000), None, &pace), ("", Precision::Proportional));
        assert_eq!(prefix("你好世界", 500, Some(1_000), None, &pace).0, "你好");
    }

    #[test]
    fn without_a_length_the_pace_of_the_voice_decides() {
        let mut pace = Pace::default();
        let text = "alpha beta gamma delta epsilon";
        for _ in 0..30 {
            pace.learn(text, 96_000);
        }
        assert_eq!(prefix(text, 48_000, None, None, &pace), ("alpha beta", Precision::Estimated));
    }

    #[test]
    fn no_word_is_heard_before_the_voice_had_it() {
        let text = "one two three four";
        let mut ends: Vec<WordEnd> =
            [(3, 100), (7, 200), (13, 300), (18, 400)].map(|(text, samples)| WordEnd { text, samples }).into();
        // "three" came at 500 of the voice's samples, of which 50 were left out; "four" before it could be.
        let begins = [(0, 0), (6, 500), (11, 510)].map(|(letters, samples)| NotBefore { letters, samples });
        not_before(text, &mut ends, &begins, 50);
        assert_eq!(ends.iter().map(|end| end.samples).collect::<Vec<_>>(), [100, 200, 450, 460]);
        let mut unknown = ends.clone();
        not_before(text, &mut unknown, &[], 0);
        assert_eq!(unknown, ends);
    }

    #[test]
    fn words_are_counted_in_any_script() {
        assert_eq!(words("Hello, big world!"), 3);
        assert_eq!(words("don't stop"), 2);
        assert_eq!(words("你好 world"), 3);
        assert_eq!(words(" ... "), 0);
    }

    proptest! {
        #[test]
        fn a_prefix_grows_with_what_was_sent(text in any::<String>(), a in 0u64..2_000, b in 0u64..2_000) {
            let pace = Pace::default();
            let (less, more) = (a.min(b), a.max(b));
            let (short, long) = (prefix(&text, less, Some(1_500), None, &pace).0, prefix(&text, more, Some(1_500), None, &pace).0);
            prop_assert!(long.starts_with(short));
            prop_assert!(text.starts_with(long));
        }
    }
}
