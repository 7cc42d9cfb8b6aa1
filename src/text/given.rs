//! Pieces of a text whose reading is given, by markup or by a lexicon, among what the rules read.
//!
//! # Why
//! The rules see one private character in place of each piece, so that what stands beside it is read as it would be
//! beside any other word, and the piece itself is not read twice. Its place in the spans is put back afterwards.

use std::ops::Range;

use super::say_as::{SayAs, say_as};
use super::scan::{Spoken, Writer};
use super::{Language, Lexicon, Normalise, Reading, read, read_after};
use crate::turn::{Phonemes, Sound};

/// Stands for a piece while the rules read the rest. Private use: no rule and no language has it.
const VEIL: char = '\u{f0000}';

/// A piece of a written text and how it is said.
#[derive(Clone, Debug, PartialEq)]
pub struct Given {
    /// Where it is written, in bytes.
    pub at: Range<usize>,
    /// How it is said.
    pub say: Say,
}

/// How a piece is said.
#[derive(Clone, Debug, PartialEq)]
pub enum Say {
    /// As these words, which are read by the rules.
    Words(String),
    /// As this kind of thing.
    As(SayAs),
    /// By these phonemes; voices that lack them read what is written.
    Phonemes(Phonemes),
    /// As it is written, with a tag of the voice before it. Of an empty piece.
    Tag(&'static str),
    /// Not at all: a place in the text. Of an empty piece.
    Mark(String),
}

/// What decides how a text is read, beside the text.
#[derive(Clone, Copy, Debug)]
pub struct How<'a> {
    /// The language as a BCP 47 tag; `None`: the one that the text shows.
    pub language: Option<&'a str>,
    /// By whose rules.
    pub normalise: Normalise,
    /// Words that are said otherwise than they are written.
    pub lexicon: &'a Lexicon,
}

/// Reads `text`, which goes on with the sentence that begins with `before`; the pieces that are `given`, in order and
/// apart, are said as given.
pub fn read_given(before: &str, text: &str, given: &[Given], how: How<'_>) -> Reading {
    let plain = |text: &str| match before {
        "" => read(text, how.language, how.normalise),
        before => read_after(before, text, how.language, how.normalise),
    };
    if given.is_empty() && how.lexicon.is_empty() {
        return plain(text);
    }
    let shown = how.language.filter(|tag| !tag.is_empty()).or_else(|| super::detect(text));
    let mut all = given.to_vec();
    how.lexicon.find(text, shown, &mut all);
    if all.is_empty() {
        return plain(text);
    }
    let (mut veiled, mut places, mut from) = (String::with_capacity(text.len()), Vec::new(), 0);
    for given in &all {
        veiled.push_str(text.get(from..given.at.start).unwrap_or_default());
        places.push((veiled.len(), given));
        veiled.push(VEIL);
        from = given.at.end;
    }
    veiled.push_str(text.get(from..).unwrap_or_default());
    let around = plain(&veiled);
    let language = around.language.as_deref().map_or(Language::English, Language::of_tag);
    let mut unveiling =
        Unveiling { text, how, language, writer: Writer::default(), sounds: Vec::new(), marks: Vec::new() };
    let mut places = places.into_iter().peekable();
    for span in &around.spoken.spans {
        let inside = |(at, _): &(usize, &Given)| *at < span.written.end;
        if span.copied {
            let mut at = span.written.start;
            while let Some((place, given)) = places.next_if(inside) {
                unveiling.writer.copy(&veiled[at..place]);
                unveiling.say(given);
                at = place + VEIL.len_utf8();
            }
            unveiling.writer.copy(&veiled[at..span.written.end]);
            continue;
        }
        // A rule took the piece with what stands beside it: it is said as the rule says.
        let mut written = span.written.len();
        let said: String = around.spoken.text[span.spoken.clone()].chars().filter(|c| *c != VEIL).collect();
        let mut lost = Vec::new();
        while let Some((_, given)) = places.next_if(inside) {
            written = written + given.at.len() - VEIL.len_utf8();
            lost.push(given);
        }
        unveiling.writer.replace(written, &said);
        lost.into_iter().for_each(|given| unveiling.mark(given));
    }
    let Unveiling { writer, sounds, marks, .. } = unveiling;
    Reading { spoken: writer.finish(), language: around.language, sounds, marks }
}

/// Puts the pieces back.
struct Unveiling<'a> {
    text: &'a str,
    how: How<'a>,
    language: Language,
    writer: Writer,
    sounds: Vec<Sound>,
    marks: Vec<(usize, String)>,
}

impl Unveiling<'_> {
    fn say(&mut self, given: &Given) {
        let written = self.text.get(given.at.clone()).unwrap_or_default();
        let read = |text: &str| read(text, Some(self.language.tag()), self.how.normalise).spoken;
        let from = self.writer.said();
        match &given.say {
            Say::Words(words) => self.writer.replace(written.len(), &read(words).text),
            Say::As(kind) => self.writer.replace(written.len(), &say_as(*kind, written, self.language)),
            Say::Phonemes(phonemes) => {
                self.copy_of(written, &read(written));
                self.sounds.push((from..self.writer.said(), phonemes.clone()));
            }
            Say::Tag(tag) => self.writer.replace(written.len(), tag),
            Say::Mark(_) => self.writer.replace(written.len(), ""),
        }
        self.mark(given);
    }

    fn copy_of(&mut self, written: &str, spoken: &Spoken) {
        if spoken.text == written {
            self.writer.copy(written);
        } else {
            self.writer.replace(written.len(), &spoken.text);
        }
    }

    fn mark(&mut self, given: &Given) {
        if let Say::Mark(name) = &given.say {
            self.marks.push((self.writer.said(), name.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(text: &str, given: &[Given]) -> Reading {
        let lexicon = Lexicon::default();
        read_given("", text, given, How { language: Some("en"), normalise: Normalise::On, lexicon: &lexicon })
    }

    #[test]
    fn what_is_given_is_said_as_given_among_what_the_rules_read() {
        let given = [
            Given { at: 8..11, say: Say::Words("World Wide Web Consortium".into()) },
            Given { at: 11..11, say: Say::Mark("here".into()) },
            Given { at: 21..25, say: Say::As(SayAs::Digits) },
        ];
        let text = "Ask the W3C for $5 or 1984 of it.";
        let given = [given[0].clone(), given[1].clone(), Given { at: 22..26, ..given[2].clone() }];
        let read = reading(text, &given);
        let said = "Ask the World Wide Web Consortium for five dollars or one nine eight four of it.";
        assert_eq!(read.spoken.text, said);
        assert_eq!(read.marks, [("Ask the World Wide Web Consortium".len(), "here".to_owned())]);
        let (mut at, mut spoken) = (0, 0);
        for span in &read.spoken.spans {
            assert_eq!((span.written.start, span.spoken.start), (at, spoken));
            (at, spoken) = (span.written.end, span.spoken.end);
        }
        assert_eq!((at, spoken), (text.len(), said.len()), "the spans cover both texts");
        assert_eq!(read.spoken.written_before("Ask the World Wide".len()), 8, "half a name is no name");
        assert_eq!(read.spoken.written_before("Ask the World Wide Web Consortium".len()), 11);
    }

    #[test]
    fn phonemes_stand_beside_the_words_that_other_voices_read() {
        let read =
            reading("I say tomato.", &[Given { at: 6..12, say: Say::Phonemes(Phonemes::Espeak("t@m'A:t@U".into())) }]);
        assert_eq!(read.spoken.text, "I say tomato.");
        assert_eq!(read.sounds, [(6..12, Phonemes::Espeak("t@m'A:t@U".into()))]);
    }
}
