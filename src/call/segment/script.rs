//! A text and its markup, cut into what is synthesised one after the other.

use std::collections::VecDeque;
use std::time::Duration;

use super::{SegmentConfig, Segmenter};
use crate::text::ssml::{Event, Manner, Ssml};
use crate::text::{Given, Lexicon, clauses};
use crate::turn::Markup;

/// What is spoken as one utterance.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    /// As it was written, without tags.
    pub text: String,
    /// What of it is said otherwise.
    pub given: Vec<Given>,
    /// How.
    pub manner: Manner,
}

impl Piece {
    /// The same in pieces of one language each, where its clauses show several and none is given.
    pub fn by_language(self) -> Vec<Self> {
        let pieces = if self.manner.language.is_none() { clauses(&self.text) } else { Vec::new() };
        let within = |given: &Given, at: &std::ops::Range<usize>| {
            at.start <= given.at.start
                && given.at.end <= at.end
                && (given.at.start > at.start || at.start == 0 || !given.at.is_empty())
        };
        let cuts_none = self.given.iter().all(|given| pieces.iter().any(|(at, _)| within(given, at)));
        if pieces.is_empty() || !cuts_none {
            return vec![self];
        }
        let one = |(at, tag): &(std::ops::Range<usize>, &str)| {
            let written = &self.text[at.clone()];
            let text = written.trim();
            let from = at.start + written.len() - written.trim_start().len();
            let place = |at: usize| at.saturating_sub(from).min(text.len());
            let given = self.given.iter().filter(|given| within(given, at));
            let given =
                given.map(|given| Given { at: place(given.at.start)..place(given.at.end), say: given.say.clone() });
            let manner = Manner { language: Some((*tag).to_owned()), ..self.manner.clone() };
            Self { text: text.to_owned(), given: given.collect(), manner }
        };
        pieces.iter().map(one).filter(|piece| !piece.text.is_empty()).collect()
    }
}

/// One thing after the other.
#[derive(Clone, Debug, PartialEq)]
pub enum Cut {
    /// Speech.
    Piece(Piece),
    /// Silence.
    Break(Duration),
}

impl Cut {
    /// The same in pieces of one language each: [`Piece::by_language`].
    pub fn by_language(self) -> Vec<Self> {
        match self {
            Cut::Piece(piece) => piece.by_language().into_iter().map(Cut::Piece).collect(),
            silence => vec![silence],
        }
    }
}

impl From<String> for Cut {
    fn from(text: String) -> Self {
        Cut::Piece(Piece { text, ..Piece::default() })
    }
}

/// Cuts one text at a time, with the markup that it has.
#[derive(Debug)]
pub struct Script {
    segmenter: Segmenter,
    ssml: Option<Box<Ssml>>,
    manner: Manner,
    /// Mistakes in the markup, to be told.
    mistakes: VecDeque<String>,
}

impl Script {
    /// At the beginning of a text.
    pub fn new(config: SegmentConfig, markup: Markup) -> Self {
        let ssml = (markup == Markup::Ssml).then(Box::default);
        Self { segmenter: Segmenter::new(config), ssml, manner: Manner::default(), mistakes: VecDeque::new() }
    }

    /// Cuts no entry of `lexicon`.
    pub fn reading(self, lexicon: &Lexicon) -> Self {
        Self { segmenter: self.segmenter.reading(lexicon.clone()), ..self }
    }

    /// All parts of a whole text; cuts at sentences only.
    ///
    /// # Errors
    /// The first mistake in its markup.
    pub fn whole(text: &str, config: SegmentConfig, markup: Markup) -> Result<Vec<Cut>, String> {
        Self::whole_reading(text, config, markup, &Lexicon::default())
    }

    /// As [`Script::whole`], cutting no entry of `lexicon`.
    ///
    /// # Errors
    /// As there.
    pub fn whole_reading(
        text: &str,
        config: SegmentConfig,
        markup: Markup,
        lexicon: &Lexicon,
    ) -> Result<Vec<Cut>, String> {
        let mut script = Self::new(config, markup).reading(lexicon);
        let mut out = Vec::new();
        if script.ssml.is_none() {
            let mut texts = Vec::new();
            script.segmenter.whole(text, &mut texts);
            return Ok(texts.into_iter().map(Cut::from).collect());
        }
        let mut events = Vec::new();
        if let Some(ssml) = &mut script.ssml {
            ssml.push(text, &mut events);
            ssml.finish(&mut events);
        }
        script.follow(events, true, &mut out);
        script.flush(&mut out);
        script.mistakes.pop_front().map_or(Ok(out), Err)
    }

    /// Takes the next piece of a text; appends the parts that are complete now to `out`.
    pub fn push(&mut self, token: &str, out: &mut Vec<Cut>) {
        let Some(ssml) = &mut self.ssml else {
            let mut texts = Vec::new();
            self.segmenter.push(token, &mut texts);
            return self.add(texts, out);
        };
        let mut events = Vec::new();
        ssml.push(token, &mut events);
        self.follow(events, false, out);
    }

    /// The writer pauses: a sentence that is probably complete is appended to `out`.
    pub fn settle(&mut self, out: &mut Vec<Cut>) {
        let mut texts = Vec::new();
        self.segmenter.settle(&mut texts);
        self.add(texts, out);
    }

    /// The text is complete: appends the rest to `out`, and is ready for the next text.
    pub fn finish(&mut self, out: &mut Vec<Cut>) {
        let mut events = Vec::new();
        if let Some(ssml) = &mut self.ssml {
            ssml.finish(&mut events);
        }
        self.follow(events, false, out);
        self.flush(out);
    }

    /// The next mistake in the markup that was not told yet.
    pub fn mistake(&mut self) -> Option<String> {
        self.mistakes.pop_front()
    }

    fn follow(&mut self, events: Vec<Event>, whole: bool, out: &mut Vec<Cut>) {
        for event in events {
            match event {
                Event::Text(text) => {
                    let mut texts = Vec::new();
                    if whole {
                        self.segmenter.whole(&text, &mut texts);
                    } else {
                        self.segmenter.push(&text, &mut texts);
                    }
                    self.add(texts, out);
                }
                Event::Manner(manner) => {
                    self.flush(out);
                    self.manner = manner;
                }
                Event::Break(length) => {
                    self.flush(out);
                    out.push(Cut::Break(length));
                }
                Event::Mistake(what) => self.mistakes.push_back(what),
            }
        }
    }

    fn flush(&mut self, out: &mut Vec<Cut>) {
        let mut texts = Vec::new();
        self.segmenter.finish(&mut texts);
        self.add(texts, out);
    }

    fn add(&mut self, texts: Vec<String>, out: &mut Vec<Cut>) {
        for text in texts {
            let (text, given) = match &mut self.ssml {
                Some(ssml) => ssml.inlines.expand(&text),
                None => (text, Vec::new()),
            };
            out.push(Cut::Piece(Piece { text, given, manner: self.manner.clone() }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::Say;

    fn shape(cuts: &[Cut]) -> Vec<String> {
        let one = |cut: &Cut| match cut {
            Cut::Piece(piece) => format!("{} x{} {}", piece.text, piece.manner.rate, piece.given.len()),
            Cut::Break(length) => format!("{length:?}"),
        };
        cuts.iter().map(one).collect()
    }

    #[test]
    fn markup_that_changes_the_voice_ends_a_part_and_the_rest_does_not() {
        let text = "<speak>Ask <sub alias='Doctor'>Dr.</sub> Who now.<mark name='m'/> Then <break time='2s'/>come \
                    <prosody rate='fast'>quickly home, as they say.</prosody></speak>";
        let cuts = Script::whole(text, SegmentConfig::default(), Markup::Ssml).expect("no mistake");
        assert_eq!(
            shape(&cuts),
            ["Ask Dr. Who now. x1 2", "Then x1 0", "2s", "come x1 0", "quickly home, as they say. x1.25 0"]
        );
        let Cut::Piece(first) = &cuts[0] else { panic!("text") };
        assert_eq!(first.given[1], Given { at: 16..16, say: Say::Mark("m".into()) });
        let mut script = Script::new(SegmentConfig::default(), Markup::Ssml);
        let mut out = Vec::new();
        for c in text.chars() {
            script.push(c.encode_utf8(&mut [0; 4]), &mut out);
        }
        script.finish(&mut out);
        assert_eq!(shape(&out)[1..], shape(&cuts)[1..]);
        assert_eq!(script.mistake(), None);
    }

    #[test]
    fn a_sentence_of_two_languages_is_two_pieces() {
        let pieces = |text: &str, language: Option<&str>| {
            let manner = Manner { language: language.map(str::to_owned), ..Manner::default() };
            let pieces = Piece { text: text.into(), given: Vec::new(), manner }.by_language();
            pieces.into_iter().map(|piece| (piece.text, piece.manner.language.unwrap_or_default())).collect::<Vec<_>>()
        };
        let two =
            |a: (&str, &str), b: (&str, &str)| vec![(a.0.to_owned(), a.1.to_owned()), (b.0.to_owned(), b.1.to_owned())];
        let text = "Guten Tag, how are you?";
        assert_eq!(pieces(text, None), two(("Guten Tag,", "de"), ("how are you?", "en")));
        assert_eq!(pieces(text, Some("de")), [(text.to_owned(), "de".to_owned())], "as it is told");
        assert_eq!(pieces("你好, how are you today?", None), two(("你好,", "zh"), ("how are you today?", "en")));
        for one in [
            "We live in La Paz, in Los Angeles, and in Der Spiegel.",
            "It costs 3,50, and that is it.",
            "我喜欢 Rust，Python 和 Go。",
            "Hello, 你",
        ] {
            assert_eq!(pieces(one, None), [(one.to_owned(), String::new())]);
        }
        // What is given keeps its place; where a change of language would cut it, nothing is cut.
        let text = "Guten Tag, how are you?";
        let given =
            vec![Given { at: 11..14, say: Say::Words("so".into()) }, Given { at: 23..23, say: Say::Mark("m".into()) }];
        let cut = Piece { text: text.into(), given, manner: Manner::default() }.by_language();
        assert_eq!(
            cut[1].given,
            [Given { at: 0..3, say: Say::Words("so".into()) }, Given { at: 12..12, say: Say::Mark("m".into()) }]
        );
        let given = vec![Given { at: 6..14, say: Say::Words("so".into()) }];
        assert_eq!(Piece { text: text.into(), given, manner: Manner::default() }.by_language().len(), 1);
    }

    #[test]
    fn without_ssml_a_tag_is_text_and_a_mistake_refuses_a_whole_text() {
        let cuts = Script::whole("Say <break/> now.", SegmentConfig::default(), Markup::None).expect("text");
        assert_eq!(shape(&cuts), ["Say <break/> now. x1 0"]);
        let error = Script::whole("Say <brake/> now.", SegmentConfig::default(), Markup::Ssml).expect_err("a mistake");
        assert!(error.contains("brake"), "{error}");
    }
}
