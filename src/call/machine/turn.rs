//! One turn of a call: its text, the utterances it becomes, and the speech that is made of them until it leaves.

use std::cell::OnceCell;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::part::{Audio, Buffer, Feed, Part, PartState};
use super::writing::{Hunger, Writing};
use crate::audio::RATE;
use crate::call::TurnId;
use crate::call::event::{Heard, Precision, TurnHow};
use crate::call::handle::Style;
use crate::call::heard::{self, Pace};
use crate::call::segment::{Cut, Piece, Script, SegmentConfig, is_closer, is_terminator};
use crate::media::playout::Playout;
use crate::text::ssml::{Event, Manner, Ssml};
use crate::text::{self, How, Say};
use crate::turn::{Class, Epoch, Markup, SPEEDS, StreamId, Streaming, Utterance, UtteranceId};
use crate::voice::loudness::Leveller;

/// Parts of one sentence that the next one is read behind: a number is read by the words just before it.
const CONTEXT: usize = 3;
/// Characters from which a sentence that a voice gets as it is written is cut: what it holds of an utterance is bounded.
const LONGEST: usize = 280;

/// One turn.
///
/// Why this struct is large: it is all that is known of a turn, and each part of the machine needs some of it.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) id: TurnId,
    pub(super) style: Style,
    pub(super) accepted: Instant,
    /// Nothing was being said when it was accepted.
    pub(super) immediate: bool,
    /// Raised to cancel it.
    pub(super) epoch: Epoch,
    pub(super) parts: Vec<Part>,
    /// While its text is still being written.
    pub(super) writing: Option<Writing>,
    /// The voice takes its text as it is written, word by word.
    pub(super) streams: bool,
    /// Reads its markup, where it has any, and how the voice speaks by it.
    ssml: Option<Box<Ssml>>,
    manner: Manner,
    /// Its first packet of speech has left.
    pub(super) sounded: bool,
    /// What went wrong, to be told at its end.
    pub(super) trouble: Option<TurnHow>,
    /// Refusals in a row.
    pub(super) refusals: u32,
    /// The engine refused or failed it and the fallback voice took over: the whole rest of it is that voice's.
    pub(super) fallback: bool,
    /// Bytes of its text that the backlog counts.
    pub(super) bytes: usize,
    /// Streamed audio: no events are told of it.
    pub(super) silent: bool,
    /// Its text gives phonemes.
    pub(super) gives_phonemes: bool,
    /// It answers words that may not be all: nothing of it leaves before the caller's turn has ended.
    pub(super) held: bool,
}

impl Turn {
    pub(super) fn new(id: TurnId, style: Style, accepted: Instant, immediate: bool) -> Self {
        let ssml = (style.markup == Markup::Ssml).then(Box::default);
        Self {
            id,
            style,
            accepted,
            immediate,
            epoch: Epoch::default(),
            parts: Vec::new(),
            writing: None,
            streams: false,
            ssml,
            manner: Manner::default(),
            sounded: false,
            trouble: None,
            refusals: 0,
            fallback: false,
            bytes: 0,
            silent: false,
            gives_phonemes: false,
            held: false,
        }
    }

    /// Of a whole text.
    ///
    /// # Errors
    /// The first mistake in its markup.
    pub(super) fn whole(
        id: TurnId,
        text: &str,
        style: Style,
        config: &SegmentConfig,
        accepted: Instant,
    ) -> Result<Self, String> {
        let cuts = Script::whole_reading(text, config.clone(), style.markup, &style.lexicon)?;
        let mut turn = Self::new(id, style, accepted, false);
        turn.bytes = text.len();
        cuts.into_iter().for_each(|cut| turn.add(cut));
        Ok(turn)
    }

    /// Adds what is to be synthesised.
    pub(super) fn add_text(&mut self, texts: Vec<String>) {
        for text in texts {
            let (text, given) = match &mut self.ssml {
                Some(ssml) => ssml.inlines.expand(&text),
                None => (text, Vec::new()),
            };
            self.add(Cut::Piece(Piece { text, given, manner: self.manner.clone() }));
        }
    }

    /// Adds what is to be synthesised, or silence.
    pub(super) fn add(&mut self, cut: Cut) {
        match cut {
            // A voice that takes words goes on in the same breath, whatever their language.
            Cut::Piece(piece) if self.streams || self.style.language.is_some() => self.add_piece(piece),
            Cut::Piece(piece) => piece.by_language().into_iter().for_each(|piece| self.add_piece(piece)),
            Cut::Break(length) => {
                let samples = (length.as_secs_f64() * f64::from(RATE)) as usize;
                self.complete_part();
                self.parts.push(Part::sound(Audio::Silence(samples)));
            }
        }
    }

    fn add_piece(&mut self, piece: Piece) {
        let Piece { text, given, manner } = piece;
        self.gives_phonemes |= given.iter().any(|given| matches!(given.say, Say::Phonemes(_)));
        let style = &self.style;
        let (before, language) = context(&self.parts);
        let named = manner.language.as_deref().or(style.language.as_deref());
        let how = |language| How { language, normalise: style.normalise, lexicon: &style.lexicon };
        let after = named.or(language.filter(|_| !before.is_empty()));
        let mut reading = text::read_given(&before, &text, &given, how(after));
        // "Ja, gut." alone is of no certain language: it is in that of what came before.
        if reading.language.is_none() && language.is_some() {
            reading = text::read_given("", &text, &given, how(language));
        }
        let silent = !reading.spoken.text.contains(|c: char| !c.is_whitespace());
        let level = Leveller::new(style.volume * manner.gain);
        let ends = ends_sentence(&text) || !self.streams;
        if let Some(part) = self.parts.last_mut().filter(|part| part.is_written() && !silent) {
            part.append(&text, reading);
            if ends || part.text.chars().count() >= LONGEST {
                self.complete_part();
            }
            return;
        }
        self.complete_part();
        let answers = self.parts.iter().all(|part| !part.is_spoken());
        let part = match silent {
            // Marks only: nothing is made of them.
            true => Part::new(text, reading, PartState::Ended, Audio::Silence(0)),
            false => Part::spoken(text, reading, answers),
        };
        let feed = (self.streams && !silent).then(Feed::default);
        self.parts.push(Part { level, rate: manner.rate, feed, ..part });
        if ends {
            self.complete_part();
        }
    }

    /// Nothing follows on what the voice gets as it is written.
    pub(super) fn complete_part(&mut self) {
        if let Some(feed) = self.parts.last_mut().and_then(|part| part.feed.as_mut()) {
            feed.complete = true;
        }
    }

    /// Whether the voice waits for the writer.
    pub(super) fn is_streaming(&self) -> bool {
        self.parts.last().is_some_and(Part::is_written)
    }

    /// What is wanted of its text. `hungry`: nothing else is about to sound.
    fn hunger(&self, hungry: bool) -> Hunger {
        let always = self.style.stream == Streaming::Token;
        match (self.streams && (hungry || always || self.is_streaming()), hungry) {
            (true, _) => Hunger::Words,
            (false, true) => Hunger::Phrases,
            (false, false) => Hunger::None,
        }
    }

    /// Takes the next piece of its text, while it is being written; gives the mistakes of its markup.
    pub(super) fn write(&mut self, now: Instant, token: &str) -> Vec<String> {
        let mut events = Vec::new();
        match &mut self.ssml {
            Some(ssml) => ssml.push(token, &mut events),
            None => events.push(Event::Text(token.to_owned())),
        }
        self.follow(now, events)
    }

    /// The text is complete; gives the mistakes of its markup.
    pub(super) fn finish_text(&mut self) -> Vec<String> {
        let mut events = Vec::new();
        if let Some(ssml) = &mut self.ssml {
            ssml.finish(&mut events);
        }
        let mistakes = self.follow(self.accepted, events);
        let mut texts = Vec::new();
        if let Some(writing) = self.writing.take() {
            writing.finish(&mut texts);
        }
        self.add_text(texts);
        self.complete_part();
        mistakes
    }

    fn follow(&mut self, now: Instant, events: Vec<Event>) -> Vec<String> {
        let mut mistakes = Vec::new();
        for event in events {
            let mut texts = Vec::new();
            match (event, &mut self.writing) {
                (Event::Mistake(what), _) => mistakes.push(what),
                (_, None) => {}
                (Event::Text(text), Some(writing)) => {
                    writing.push(now, &text, &mut texts);
                    self.add_text(texts);
                }
                (Event::Manner(manner), Some(writing)) => {
                    writing.flush(&mut texts);
                    self.add_text(texts);
                    self.manner = manner;
                }
                (Event::Break(length), Some(writing)) => {
                    writing.flush(&mut texts);
                    self.add_text(texts);
                    self.add(Cut::Break(length));
                }
            }
        }
        mistakes
    }

    /// Names of the marks that the listener has reached since this was asked last.
    pub(super) fn reached(&mut self, playout: &Playout, pace: &Pace) -> Vec<String> {
        let mut reached = Vec::new();
        for part in &mut self.parts {
            let left = part.has_left(playout);
            part.reach(left, playout.sent(part.utterance).sent, pace, &mut reached);
            if !left {
                break;
            }
        }
        reached
    }

    /// Names of the marks that the listener has not reached.
    pub(super) fn unreached(&mut self) -> Vec<String> {
        self.parts.iter_mut().flat_map(|part| std::mem::take(&mut part.reading.marks)).map(|(_, name)| name).collect()
    }

    /// Adds recorded audio.
    pub(super) fn add_clip(&mut self, pcm: Arc<[f32]>, times: u32) {
        let left = times.checked_sub(1);
        self.parts.push(Part::sound(Audio::Clip { pcm, at: 0, left }));
    }

    /// Adds recorded audio that is being fetched.
    pub(super) fn await_clip(&mut self, wanted: oneshot::Sender<Infallible>, times: u32) {
        let mut part = Part::sound(Audio::Awaited { times, _wanted: wanted });
        part.state = PartState::Fetched;
        self.parts.push(part);
    }

    /// What [`Turn::await_clip`] waits for is there, or will never be.
    pub(super) fn clip_arrived(&mut self, clip: Result<Arc<[f32]>, String>) -> Result<(), String> {
        let Some(part) = self.parts.iter_mut().find(|part| part.is_fetched()) else { return Ok(()) };
        part.state = PartState::Ended;
        let Audio::Awaited { times, .. } = part.audio else { return Ok(()) };
        let (pcm, failed) = match clip {
            Ok(pcm) => (pcm, None),
            Err(reason) => (Arc::default(), Some(reason)),
        };
        // Without end only where there is something to play.
        let left = if failed.is_some() { Some(0) } else { times.checked_sub(1) };
        part.audio = Audio::Clip { pcm, at: 0, left };
        failed.map_or(Ok(()), Err)
    }

    /// Adds streamed audio.
    pub(super) fn add_pcm(&mut self, pcm: Vec<f32>) {
        // Behind a clip, such as the tones of keys, it is a part of its own.
        if !self.parts.last().is_some_and(|part| matches!(part.audio, Audio::Buffer(_))) {
            self.parts.push(Part::sound(Audio::Buffer(Buffer::default())));
        }
        if let Some(part) = self.parts.last_mut() {
            part.receive(pcm);
        }
    }

    /// What the engine gets of the part at `place`.
    pub(super) fn utterance(&self, place: usize, stream: StreamId, tenant: &Arc<str>) -> Utterance {
        let (part, style) = (&self.parts[place], &self.style);
        Utterance {
            id: part.utterance,
            stream,
            class: Class::Live,
            token: self.epoch.token(),
            text: part.said_so_far(),
            streamed: part.is_written(),
            voice: style.voice.clone(),
            language: part.reading.language.clone(),
            instructions: style.instructions.clone(),
            seed: style.seed,
            speed: (style.speed * part.rate).clamp(*SPEEDS.start(), *SPEEDS.end()),
            markup: style.markup.of_voice(),
            sounds: part.reading.sounds.clone(),
            words: part.words.clone(),
            stages: part.stages.clone(),
            tenant: tenant.clone(),
        }
    }

    /// Whether more text may come.
    pub(super) fn is_open(&self) -> bool {
        self.writing.is_some()
    }

    /// When [`Self::look`] is due. `hungry`: nothing else is about to sound.
    pub(super) fn look_at(&self, hungry: bool) -> Option<Instant> {
        self.writing.as_ref()?.due(self.hunger(hungry))
    }

    /// Cuts what can be spoken now of the text that waits.
    pub(super) fn look(&mut self, now: Instant, hungry: bool) {
        let hunger = self.hunger(hungry);
        let Some(writing) = &mut self.writing else { return };
        let (parts, style, manner) = (&self.parts, &self.style, &self.manner);
        // Most looks read nothing.
        let known = OnceCell::new();
        let say = |text: &str| {
            let (before, language) = known.get_or_init(|| context(parts));
            let named = manner.language.as_deref().or(style.language.as_deref());
            let how = How { language: named.or(*language), normalise: style.normalise, lexicon: &style.lexicon };
            text::read_given(before, text, &[], how).spoken.text
        };
        let mut texts = Vec::new();
        writing.look(now, hunger, &say, &mut texts);
        let silent = writing.is_silent();
        self.add_text(texts);
        // A voice that waits holds a place on the device: not for longer than the writer's pause.
        if silent {
            self.complete_part();
        }
    }

    /// Whether audio of it is still to be made.
    pub(super) fn awaits_audio(&self) -> bool {
        self.parts.iter().rev().any(|part| part.state != PartState::Ended)
    }

    /// Whether the engine makes its first sound.
    pub(super) fn awaits_onset(&self) -> bool {
        let at = self.parts.iter().find(|part| part.state != PartState::Ended);
        !self.sounded && at.is_some_and(|part| part.state == PartState::Submitted)
    }

    /// Whether all of it has left.
    pub(super) fn is_over(&self, playout: &Playout) -> bool {
        !self.is_open() && self.parts.iter().rev().all(|part| part.has_left(playout))
    }

    /// What left for the listener.
    pub(super) fn heard(&self, playout: &Playout, pace: &Pace) -> Heard {
        let mut heard = Heard::default();
        let (mut sent, mut acked) = (0, 0);
        for part in &self.parts {
            let account = playout.sent(part.utterance);
            sent += account.sent;
            acked += account.acked;
            let (text, precision) = part.heard(account.sent, pace);
            if !text.is_empty() {
                if !heard.text.is_empty() {
                    heard.text.push(' ');
                }
                heard.text.push_str(text);
            }
            if precision != Precision::Exact {
                heard.precision = precision;
            }
        }
        heard.words = heard::words(&heard.text);
        heard.sent_ms = sent * 1_000 / u64::from(RATE);
        heard.acked_ms = acked * 1_000 / u64::from(RATE);
        heard
    }

    /// Takes note that a packet of `utterance` left; what is said from there on and how long that takes, where it is the
    /// first, or the first since more was written.
    pub(super) fn begins(&mut self, utterance: UtteranceId, pace: &Pace) -> Option<(String, Duration)> {
        let part = self.parts.iter_mut().rev().find(|part| part.utterance == utterance)?;
        let before = std::mem::replace(&mut part.told, part.text.len());
        let text = part.text.get(before..).unwrap_or_default().trim().to_owned();
        if text.is_empty() {
            return None;
        }
        let samples = match part.state {
            PartState::Ended => part.received,
            _ => pace.samples_of(part.said()) as u64,
        };
        let samples = samples * text.len() as u64 / part.text.trim().len().max(1) as u64;
        Some((text, Duration::from_micros(samples * 1_000_000 / u64::from(RATE))))
    }

    /// Recorded audio that has begun to leave: it cannot be taken back, as text can.
    pub(super) fn is_underway(&self) -> bool {
        self.parts.iter().any(|part| part.text.is_empty() && part.pushed > 0)
    }

    /// Takes back what was submitted and has not sounded; it will be submitted anew.
    pub(super) fn withdraw(&mut self, playout: &mut Playout) {
        let parts = &mut self.parts;
        playout.flush(|owner| parts.iter().all(|part| part.utterance != owner));
        self.epoch.raise();
        self.epoch = Epoch::default();
        let answers = parts.iter().position(Part::is_spoken);
        for (n, part) in parts.iter_mut().enumerate() {
            if matches!(part.audio, Audio::Buffer(_)) && !part.text.is_empty() {
                let (text, reading) = (std::mem::take(&mut part.text), part.reading.clone());
                let again = Part::spoken(text, reading, answers == Some(n));
                *part = Part { level: part.level, rate: part.rate, ..again };
            }
        }
    }
}

/// Whether a sentence ends with `text`.
fn ends_sentence(text: &str) -> bool {
    text.trim_end_matches(is_closer).ends_with(is_terminator)
}

/// The beginning of the sentence that the text goes on with, which was cut already, and the language of the last part.
fn context(parts: &[Part]) -> (String, Option<&str>) {
    let mut before = Vec::new();
    for part in parts.iter().rev().take(CONTEXT) {
        if part.text.is_empty() || ends_sentence(&part.text) {
            break;
        }
        before.insert(0, part.text.as_str());
    }
    (before.join(" "), parts.last().and_then(|part| part.reading.language.as_deref()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::segment::SegmentConfig;
    use crate::text::Normalise;
    use crate::turn::{Phonemes, Saying, WordEnd};

    fn turn(style: Style, texts: &[&str]) -> Turn {
        let mut turn = Turn::new(TurnId::next(), style, crate::clock::now(), true);
        turn.add_text(texts.iter().map(|text| (*text).to_owned()).collect());
        turn
    }

    #[test]
    fn the_engine_gets_words_and_the_agent_is_told_what_it_wrote() {
        let turn = turn(Style::default(), &["It costs $3.50 in all."]);
        let tenant = "".into();
        assert_eq!(turn.utterance(0, StreamId::next(), &tenant).text, "It costs three dollars fifty cents in all.");
        let mut turn = turn;
        let part = &mut turn.parts[0];
        part.receive(vec![0.1; 24_000]);
        part.state = PartState::Ended;
        let heard = |part: &Part, sent| part.heard(sent, &Pace::default()).0.to_owned();
        assert_eq!(heard(part, 24_000), "It costs $3.50 in all.");
        assert_eq!(heard(part, 12_000), "It costs", "half an amount was not heard");
        assert_eq!(heard(part, 19_400), "It costs $3.50");
        assert_eq!(heard(part, 0), "");
        // The voice tells when each word sounds: "all" ends the sentence.
        let ends = [2, 8, 14, 22, 28, 34, 37, 42].map(|text| WordEnd { text, samples: text as u64 * 10 });
        part.words.tell(ends.to_vec());
        assert_eq!(heard(part, 339), "It costs");
        assert_eq!(heard(part, 340), "It costs $3.50");
    }

    #[test]
    fn a_voice_that_takes_text_as_it_is_written_gets_each_word_once() {
        let mut turn = turn(Style::default(), &[]);
        turn.streams = true;
        turn.add_text(vec!["It costs".into(), "about $3.50".into()]);
        assert_eq!((turn.parts.len(), turn.is_streaming()), (1, true));
        let first = turn.utterance(0, StreamId::next(), &"".into());
        assert!(first.streamed);
        assert_eq!(first.text, "It costs about three dollars fifty cents ");
        turn.parts[0].taken(true);
        assert_eq!(turn.parts[0].take_feed(), None, "it has that already");
        turn.add_text(vec!["in all.".into()]);
        assert_eq!(turn.parts[0].take_feed(), Some((Saying::from("in all. "), true)));
        assert!(!turn.is_streaming() && turn.parts[0].take_feed().is_none());
        turn.add_text(vec!["A whole sentence.".into()]);
        assert!(!turn.utterance(1, StreamId::next(), &"".into()).streamed, "nothing follows on it");
    }

    #[test]
    fn a_part_is_spoken_in_the_language_it_is_given_or_shows() {
        let languages = |style: Style, texts: &[&str]| {
            let turn = turn(style, texts);
            turn.parts.iter().map(|part| part.reading.language.clone().unwrap_or_default()).collect::<Vec<_>>()
        };
        let texts = ["Das ist gut, und wir haben 5.", "Genau 7.", "你好，很高兴认识你。"];
        assert_eq!(languages(Style::default(), &texts), ["de", "de", "zh"]);
        // Each clause in its own.
        let mixed = turn(Style::default(), &["Guten Tag, how are you? We have 5."]);
        let said: Vec<&str> = mixed.parts.iter().map(Part::said).collect();
        assert_eq!(said, ["Guten Tag,", "how are you? We have five."]);
        assert_eq!(languages(Style::default(), &["Guten Tag, how are you? We have 5."]), ["de", "en"]);
        let given = Style { language: Some("en-GB".into()), ..Style::default() };
        assert_eq!(languages(given, &texts), ["en-GB"; 3]);
        let plain = Style { normalise: Normalise::Off, ..Style::default() };
        assert_eq!(turn(plain, &["It is 3.5 now."]).parts[0].said(), "It is 3.5 now.");
    }

    /// The same words, once and in order, however a text is cut into pieces, by a writer who also pauses between words,
    /// for a listener who hears nothing else.
    #[test]
    fn streamed_text_is_said_as_the_whole_is() {
        let words = |parts: &[Part]| {
            let said: String = parts.iter().flat_map(|part| [part.said(), " "]).collect();
            let kept = |c: char| if c.is_alphanumeric() || c == '\'' { c } else { ' ' };
            let said: String = said.chars().map(kept).collect();
            let dense = |c: char| matches!(c, '\u{3001}'..='\u{9fff}');
            let joint = if said.contains(dense) { "" } else { " " };
            said.split_whitespace().collect::<Vec<_>>().join(joint).to_lowercase()
        };
        let (mut tried, mut wrong) = (0, Vec::new());
        for (language, file) in [
            ("en", include_str!("../../../tests/data/text/en.tsv")),
            ("en", include_str!("../../../tests/data/text/otherwise.tsv")),
            ("de", include_str!("../../../tests/data/text/de.tsv")),
            ("fr", include_str!("../../../tests/data/text/fr.tsv")),
            ("es", include_str!("../../../tests/data/text/es.tsv")),
            ("zh", include_str!("../../../tests/data/text/zh.tsv")),
            ("ja", include_str!("../../../tests/data/text/ja.tsv")),
        ] {
            let style = Style { language: Some(language.into()), ..Style::default() };
            let config = SegmentConfig { phrase_chars: 3, ..SegmentConfig::default() };
            let written = file.lines().filter_map(|line| line.split_once('\t'));
            for written in written.map(|(written, _)| written) {
                let text = format!("{written}{}", if matches!(language, "zh" | "ja") { "。" } else { " and so on" });
                let whole = words(&turn(style.clone(), &[&text]).parts);
                for stop in (0..text.len()).filter(|at| text.is_char_boundary(*at)) {
                    let mut now = crate::clock::now();
                    let mut turn = turn(style.clone(), &[]);
                    let mut writing = Writing::new(&config, style.stream, now);
                    let mut first = Vec::new();
                    writing.push(now, &text[..stop], &mut first);
                    turn.add_text(first);
                    turn.writing = Some(writing);
                    turn.look(now, true);
                    if text[stop..].starts_with(' ') {
                        now += std::time::Duration::from_millis(250);
                        turn.look(now, true);
                    }
                    let mut rest = Vec::new();
                    if let Some(mut writing) = turn.writing.take() {
                        writing.push(now, &text[stop..], &mut rest);
                        writing.finish(&mut rest);
                    }
                    turn.add_text(rest);
                    tried += 1;
                    let said = words(&turn.parts);
                    if said != whole {
                        let parts: Vec<&str> = turn.parts.iter().map(|part| part.text.as_str()).collect();
                        wrong.push(format!("{parts:?}: {said} / {whole}"));
                    }
                }
            }
        }
        assert!(wrong.is_empty(), "{} of {tried}: {:#?}", wrong.len(), &wrong[..wrong.len().min(40)]);
    }

    /// Entries of several words, of which some hold what ends a sentence or a clause, said by spelling or by phonemes: at
    /// every split of a text, with and without a pause there, the same is said as of the whole.
    #[test]
    fn entries_of_several_words_are_never_cut() {
        let entries = "'New York City' = 'en why see'\n'New York' = { phonemes = \"nu:'jo@k\" }\n\
                       'Yahoo! Search' = 'the search'\n'Smith, Jones and Co' = 'the lawyers'\n'St. Louis' = 'saint lewis'\n\
                       'of the numbers' = { phonemes = \"@vD@n'VmbEz\" }\n'重庆火锅' = '崇庆火锅'";
        let entries = toml::from_str(entries).expect("entries");
        let lexicon = text::Lexicon::new(&entries, &text::Entries::new()).expect("a lexicon");
        let style = Style { language: Some("en".into()), lexicon, ..Style::default() };
        let config = SegmentConfig { phrase_chars: 3, ..SegmentConfig::default() };
        let texts = [
            "We went to New York City and then to New York again, by way of St. Louis and old York.",
            "I found it with Yahoo! Search last week. Smith, Jones and Co told us about all of the numbers that we have.",
            "He said it is new. York is old, and New York is newer than that is.",
            "我们去吃重庆火锅吧。 Then we left.",
        ];
        let words = |parts: &[Part]| {
            let said: String = parts.iter().flat_map(|part| [part.said(), " "]).collect();
            let kept = |c: char| if c.is_alphanumeric() { c } else { ' ' };
            let said: String = said.chars().map(kept).collect();
            let sounds: Vec<Phonemes> =
                parts.iter().flat_map(|part| part.reading.sounds.clone()).map(|(_, s)| s).collect();
            (said.split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase(), sounds)
        };
        let mut wrong = Vec::new();
        for text in texts {
            let mut whole = turn(style.clone(), &[]);
            let cuts = crate::call::segment::Script::whole_reading(text, config.clone(), style.markup, &style.lexicon);
            cuts.expect("no markup").into_iter().for_each(|cut| whole.add(cut));
            let whole = words(&whole.parts);
            assert!(!whole.0.contains("yahoo") && !whole.0.contains("smith"), "{whole:?}");
            for stop in (0..text.len()).filter(|at| text.is_char_boundary(*at)) {
                for pauses in [false, true] {
                    let mut now = crate::clock::now();
                    let mut turn = turn(style.clone(), &[]);
                    turn.writing = Some(Writing::new(&config, style.stream, now).reading(&style.lexicon));
                    turn.write(now, &text[..stop]);
                    turn.look(now, true);
                    // A pause inside a word is no end of it: there the writer is only slow.
                    if pauses && (text[stop..].starts_with(' ') || text[..stop].ends_with(' ')) {
                        now += std::time::Duration::from_millis(250);
                        turn.look(now, true);
                    }
                    turn.write(now, &text[stop..]);
                    turn.look(now, true);
                    turn.finish_text();
                    let said = words(&turn.parts);
                    if said != whole {
                        let parts: Vec<&str> = turn.parts.iter().map(|part| part.text.as_str()).collect();
                        wrong.push(format!("{parts:?}: {said:?} / {whole:?}"));
                    }
                }
            }
        }
        assert!(wrong.is_empty(), "{}: {:#?}", wrong.len(), &wrong[..wrong.len().min(20)]);
    }

    /// A voice that takes words: what the lexicon gives of them reaches it whole and once, wherever a text is cut, though it
    /// is asked for more after every character; and what it is given is never half an entry.
    #[test]
    fn given_phonemes_reach_a_voice_that_takes_words() {
        let entries = "'New York' = { phonemes = \"nu:'jo@k\" }\n'tomato' = { phonemes = \"t@m'A:t@U\" }\n\
                       '重庆' = { pinyin = 'chóng qìng' }\n'给予' = { pinyin = 'ji3 yu3' }";
        let entries = toml::from_str(entries).expect("entries");
        let lexicon = text::Lexicon::new(&entries, &text::Entries::new()).expect("a lexicon");
        let pinyin = |pinyin: &str| Phonemes::Pinyin { pinyin: pinyin.into() };
        let (york, tomato) = (Phonemes::Espeak("nu:'jo@k".into()), Phonemes::Espeak("t@m'A:t@U".into()));
        let english = [("New York", york), ("tomato", tomato)];
        let chinese = [("重庆", pinyin("chong2 qing4")), ("给予", pinyin("ji3 yu3"))];
        for (language, text, expected) in [
            ("en", "We went to New York and then on to buy a tomato there today.", &english),
            ("zh", "我们昨天去了重庆，大家都给予好评。", &chinese),
        ] {
            let style = Style { language: Some(language.into()), lexicon: lexicon.clone(), ..Style::default() };
            let config = SegmentConfig { phrase_chars: 3, ..SegmentConfig::default() };
            for stop in (0..text.len()).filter(|at| text.is_char_boundary(*at)) {
                let mut now = crate::clock::now();
                let mut turn = turn(style.clone(), &[]);
                turn.streams = true;
                turn.writing = Some(Writing::new(&config, style.stream, now).reading(&style.lexicon));
                let mut given: Vec<Saying> = Vec::new();
                let mut take = |turn: &mut Turn| {
                    for place in 0..turn.parts.len() {
                        if turn.parts[place].state == PartState::Waiting {
                            given.push(turn.utterance(place, StreamId::next(), &"".into()).said());
                            let part = &mut turn.parts[place];
                            part.state = PartState::Submitted;
                            part.taken(true);
                        } else if let Some((more, _)) = turn.parts[place].take_feed() {
                            given.push(more);
                        }
                    }
                };
                for (n, piece) in [&text[..stop], &text[stop..]].into_iter().enumerate() {
                    turn.write(now, piece);
                    for _ in 0..2 {
                        turn.look(now, true);
                        take(&mut turn);
                        // A pause where a word ends.
                        let ends = n == 0 && (text[stop..].starts_with(' ') || language == "zh");
                        now += std::time::Duration::from_millis(if ends { 250 } else { 1 });
                    }
                }
                turn.finish_text();
                take(&mut turn);
                let sounds = given.iter().flat_map(|said| {
                    said.sounds.iter().map(|(at, sound)| (said.text.get(at.clone()).expect("of it"), sound.clone()))
                });
                assert_eq!(sounds.collect::<Vec<_>>(), expected, "{given:?}");
                // The same of the parts, for another voice that takes over.
                let kept = turn.parts.iter().flat_map(|part| {
                    part.reading.sounds.iter().map(|(at, sound)| (&part.said()[at.clone()], sound.clone()))
                });
                assert_eq!(kept.collect::<Vec<_>>(), expected);
                let all: String = given.iter().map(|said| said.text.as_str()).collect();
                let bare = |text: &str| text.split_whitespace().collect::<String>();
                assert_eq!(bare(&all), bare(text));
            }
        }
    }

    #[test]
    fn a_clip_plays_as_often_as_asked() {
        let clip: Arc<[f32]> = vec![1.0; 700].into();
        let mut turn = Turn::new(TurnId::next(), Style::default(), crate::clock::now(), true);
        turn.add_clip(clip.clone(), 3);
        let (mut total, mut out) = (0, Vec::new());
        while turn.parts[0].take(&mut out) {
            total += out.len();
            out.clear();
        }
        assert_eq!(total, 2_100);
        // What is streamed behind it is heard, too.
        turn.add_clip(vec![1.0; 480].into(), 1);
        turn.add_pcm(vec![0.5; 480]);
        let mut behind = Vec::new();
        for part in &mut turn.parts {
            while part.take(&mut out) {
                behind.append(&mut out);
            }
        }
        assert!(behind.len() == 960 && behind[0] > behind[959], "{}", behind.len());
        let mut endless = Turn::new(TurnId::next(), Style::default(), crate::clock::now(), true);
        endless.add_clip(clip, 0);
        for _ in 0..100 {
            out.clear();
            assert!(endless.parts[0].take(&mut out));
            assert_eq!(out.len(), 480);
        }
    }
}
