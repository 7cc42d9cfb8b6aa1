//! The text of an utterance as the program is given it.

use crate::text::{Language, without_tags};
use crate::turn::{Markup, Phonemes, Utterance};

/// A word of an utterance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Token {
    /// As the program is given it.
    pub(super) form: String,
    /// Bytes of the utterance's text up to its end.
    pub(super) end: usize,
    /// Whether a space stands before it.
    pub(super) spaced: bool,
}

/// The words of `utterance`: what spaces set apart, or has its phonemes given; in scripts without spaces, characters.
/// What the program would take for a command is none.
pub(super) fn tokens(utterance: &Utterance) -> Vec<Token> {
    let text = &utterance.text;
    let (mut tokens, mut at) = (Vec::new(), 0);
    let given =
        utterance.sounds.iter().filter_map(|(range, phonemes)| Some((range.clone(), mnemonics(utterance, phonemes)?)));
    for (range, phonemes) in given.chain([(text.len()..text.len(), String::new())]) {
        // What is not a piece of the text is of no utterance: its phonemes are not said.
        let Some(before) = text.get(at..range.start).filter(|_| text.is_char_boundary(range.end)) else { continue };
        words(before, at, utterance.markup, &mut tokens);
        if !phonemes.is_empty() {
            tokens.push(Token { form: format!("[[{phonemes}]]"), end: range.end, spaced: true });
        }
        at = range.end;
    }
    tokens
}

/// The phonemes as its voice has them; pinyin only a voice that speaks Mandarin.
fn mnemonics(utterance: &Utterance, phonemes: &Phonemes) -> Option<String> {
    match phonemes {
        Phonemes::Espeak(mnemonics) => Some(mnemonics.clone()),
        Phonemes::Pinyin { pinyin } => {
            // Cantonese has other sounds.
            let mandarin = |tag: &str| Language::of_tag(tag) == Language::Chinese && !tag.starts_with("yue");
            super::pinyin::mnemonics(pinyin).filter(|_| utterance.language.as_deref().is_some_and(mandarin))
        }
    }
}

/// The tokens in one text, a marker before each where `marker` gives one.
pub(super) fn joined(tokens: &[Token], marker: impl Fn(usize) -> String) -> String {
    let mut joined = String::new();
    for (n, token) in tokens.iter().enumerate() {
        if token.spaced && n > 0 {
            joined.push(' ');
        }
        joined.push_str(&marker(n));
        joined.push_str(&token.form);
    }
    joined.push('\n');
    joined
}

fn words(text: &str, offset: usize, markup: Markup, tokens: &mut Vec<Token>) {
    let mut start: Option<usize> = None;
    let mut spaced = true;
    let mut finish = |start: &mut Option<usize>, end: usize, spaced: &mut bool| {
        let Some(from) = start.take() else { return };
        let form = match markup {
            Markup::None => plain(&text[from..end]),
            // It has no tags of its own.
            Markup::Tags | Markup::Ssml => plain(&without_tags(&text[from..end])),
        };
        if !form.is_empty() {
            tokens.push(Token { form, end: offset + end, spaced: std::mem::take(spaced) });
        }
    };
    for (at, c) in text.char_indices() {
        if c.is_whitespace() || c.is_control() {
            finish(&mut start, at, &mut spaced);
            spaced = true;
            continue;
        }
        // A character of a script without spaces is a word; signs belong to the word before them.
        if c.is_alphanumeric() && !crate::text::is_spaced(c) {
            finish(&mut start, at, &mut spaced);
        }
        start.get_or_insert(at);
    }
    finish(&mut start, text.len(), &mut spaced);
}

/// `[[` starts phoneme input.
fn plain(text: &str) -> String {
    text.replace("[[", "[ [").replace("[[", "[ [")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::turn::{Class, StreamId};

    fn forms(text: &str, sounds: &[(std::ops::Range<usize>, &str)], markup: Markup) -> Vec<(String, usize)> {
        let sounds =
            sounds.iter().map(|(range, phonemes)| (range.clone(), Phonemes::Espeak((*phonemes).to_owned()))).collect();
        let utterance = Utterance { sounds, markup, ..Utterance::plain(StreamId::next(), Class::Live, text) };
        let tokens = tokens(&utterance);
        assert_eq!(joined(&tokens, |_| String::new()).trim_end().matches("[[").count(), utterance.sounds.len());
        tokens.into_iter().map(|token| (token.form, token.end)).collect()
    }

    #[test]
    fn words_are_handed_over_without_commands_but_for_phonemes_that_are_given() {
        let plain = forms("Say [[[h@l'oU]] \u{1}50A now.", &[], Markup::None);
        assert_eq!(
            plain.iter().map(|(form, _)| form.as_str()).collect::<Vec<_>>(),
            ["Say", "[ [ [h@l'oU]]", "50A", "now."]
        );
        let given = forms("Say tomato now.", &[(4..10, "t@m'A:t@U")], Markup::None);
        assert_eq!(given, [("Say".into(), 3), ("[[t@m'A:t@U]]".into(), 10), ("now.".into(), 15)]);
        let tagged = forms("Well [breath] <strong>yes</strong>.", &[], Markup::Tags);
        assert_eq!(tagged, [("Well".into(), 4), ("yes.".into(), 35)]);
        let chinese = |language: &str| {
            let sounds = vec![(3..9, Phonemes::Pinyin { pinyin: "chong2 qing4".into() })];
            let plain = Utterance::plain(StreamId::next(), Class::Live, "在重庆");
            let tokens = tokens(&Utterance { sounds, language: Some(language.into()), ..plain });
            tokens.into_iter().map(|token| token.form).collect::<Vec<_>>()
        };
        assert_eq!(chinese("zh-CN"), ["在", "[[ts.h'ong35_tS;h'i51N]]"]);
        assert_eq!(chinese("yue"), ["在", "重", "庆"], "it has other sounds");
        assert_eq!(forms("你好，我 ok", &[], Markup::None).len(), 4);
        assert_eq!(forms("a b", &[(1..9, "x"), (0..1, "y")][..0], Markup::None).len(), 2);
    }
}
