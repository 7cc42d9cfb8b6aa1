//! One turn of a call: its text, the utterances it becomes, and the speech that is made of them until it leaves.

use std::cell::OnceCell;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::writing::Writing;
use crate::audio::{FRAME_SAMPLES, RATE};
use crate::call::TurnId;
use crate::call::event::{Heard, Precision, TurnHow};
use crate::call::handle::Style;
use crate::call::heard::{self, Pace};
use crate::call::segment::{is_closer, is_terminator};
use crate::media::playout::Playout;
use crate::text::{self, Reading, Spoken};
use crate::turn::{Class, Epoch, StreamId, Utterance, UtteranceId};

/// Parts of one sentence that the next one is read behind: a number is read by the words just before it.
const CONTEXT: usize = 3;

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
    /// It answers words that may not be all: nothing of it leaves before the caller's turn has ended.
    pub(super) held: bool,
}

/// One utterance of a turn, or recorded audio.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) utterance: UtteranceId,
    /// As the agent wrote it: what is told of it.
    pub(super) text: String,
    /// How it is said: what the engine gets.
    reading: Reading,
    pub(super) state: PartState,
    audio: Audio,
    /// Samples that went to the playout.
    pushed: u64,
    /// Samples that came.
    received: u64,
    /// The fallback voice has it.
    pub(super) fallback: bool,
    /// Its first packet has left.
    sounded: bool,
    /// When it was handed to the engine.
    pub(super) submitted: Option<Instant>,
    /// When the first of its audio came.
    pub(super) made: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartState {
    /// Not with the engine yet.
    Waiting,
    /// With the engine; audio may have come.
    Submitted,
    /// Recorded audio that is being fetched: what comes later waits for it, and the engine has no part in it.
    Fetched,
    /// No more audio will come.
    Ended,
}

#[derive(Debug)]
enum Audio {
    Buffer(Buffer),
    /// `left` more times after this one; `None`: without end.
    Clip {
        pcm: Arc<[f32]>,
        at: usize,
        left: Option<u32>,
    },
    /// A clip that is being fetched, to be played so often. Dropping it ends the download.
    Awaited {
        times: u32,
        _wanted: oneshot::Sender<Infallible>,
    },
}

/// PCM as it came, taken frame by frame.
#[derive(Debug, Default)]
struct Buffer {
    chunks: VecDeque<Vec<f32>>,
    /// Taken from the first chunk.
    offset: usize,
    length: usize,
}

impl Turn {
    pub(super) fn new(id: TurnId, style: Style, accepted: Instant, immediate: bool) -> Self {
        Self {
            id,
            style,
            accepted,
            immediate,
            epoch: Epoch::default(),
            parts: Vec::new(),
            writing: None,
            sounded: false,
            trouble: None,
            refusals: 0,
            fallback: false,
            bytes: 0,
            silent: false,
            held: false,
        }
    }

    /// Adds what is to be synthesised.
    pub(super) fn add_text(&mut self, texts: Vec<String>) {
        for text in texts {
            let style = &self.style;
            let (before, language) = context(&self.parts);
            let given = style.language.as_deref();
            let mut reading = if before.is_empty() {
                text::read(&text, given, style.normalise)
            } else {
                text::read_after(&before, &text, given.or(language), style.normalise)
            };
            // "Ja, gut." alone is of no certain language: it is in that of what came before.
            if reading.language.is_none() && language.is_some() {
                reading = text::read(&text, language, style.normalise);
            }
            self.parts.push(Part::new(text, reading, PartState::Waiting, Audio::Buffer(Buffer::default())));
        }
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
        if self.parts.is_empty() {
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
            text: part.reading.spoken.text.clone(),
            voice: style.voice.clone(),
            language: part.reading.language.clone(),
            instructions: style.instructions.clone(),
            seed: style.seed,
            speed: style.speed,
            markup: style.markup,
            tenant: tenant.clone(),
        }
    }

    /// Whether more text may come.
    pub(super) fn is_open(&self) -> bool {
        self.writing.is_some()
    }

    /// When [`Self::look`] is due. `hungry`: nothing else is about to sound.
    pub(super) fn look_at(&self, hungry: bool) -> Option<Instant> {
        self.writing.as_ref()?.due(hungry)
    }

    /// Cuts what can be spoken now of the text that waits.
    pub(super) fn look(&mut self, now: Instant, hungry: bool) {
        let Some(writing) = &mut self.writing else { return };
        let (parts, style) = (&self.parts, &self.style);
        // Most looks read nothing.
        let known = OnceCell::new();
        let say = |text: &str| {
            let (before, language) = known.get_or_init(|| context(parts));
            text::read_after(before, text, style.language.as_deref().or(*language), style.normalise).spoken.text
        };
        let mut texts = Vec::new();
        writing.look(now, hungry, &say, &mut texts);
        self.add_text(texts);
    }

    /// Whether audio of it is still to be made.
    pub(super) fn awaits_audio(&self) -> bool {
        self.parts.iter().rev().any(|part| part.state != PartState::Ended)
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
            let total = (part.state == PartState::Ended).then_some(part.received);
            let (text, precision) = part.heard(account.sent, total, pace);
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

    /// Takes note that a packet of `utterance` left; what begins with it and how long that takes, where it is the first.
    pub(super) fn begins(&mut self, utterance: UtteranceId, pace: &Pace) -> Option<(String, Duration)> {
        let part = self.parts.iter_mut().rev().find(|part| part.utterance == utterance)?;
        if std::mem::replace(&mut part.sounded, true) || part.text.trim().is_empty() {
            return None;
        }
        let samples = match part.state {
            PartState::Ended => part.received,
            _ => pace.samples_of(part.said()) as u64,
        };
        Some((part.text.trim().to_owned(), Duration::from_micros(samples * 1_000_000 / u64::from(RATE))))
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
        for part in parts {
            if matches!(part.audio, Audio::Buffer(_)) && !part.text.is_empty() {
                let (text, reading) = (std::mem::take(&mut part.text), part.reading.clone());
                *part = Part::new(text, reading, PartState::Waiting, Audio::Buffer(Buffer::default()));
            }
        }
    }
}

/// The beginning of the sentence that the text goes on with, which was cut already, and the language of the last part.
fn context(parts: &[Part]) -> (String, Option<&str>) {
    let mut before = Vec::new();
    for part in parts.iter().rev().take(CONTEXT) {
        if part.text.is_empty() || part.text.trim_end_matches(is_closer).ends_with(is_terminator) {
            break;
        }
        before.insert(0, part.text.as_str());
    }
    (before.join(" "), parts.last().and_then(|part| part.reading.language.as_deref()))
}

impl Part {
    /// Whether its audio is being fetched.
    pub(super) fn is_fetched(&self) -> bool {
        self.state == PartState::Fetched
    }

    /// Recorded audio, of which nothing is written.
    fn sound(audio: Audio) -> Self {
        let reading = Reading { spoken: Spoken::default(), language: None };
        Self::new(String::new(), reading, PartState::Ended, audio)
    }

    /// What is said of it.
    pub(super) fn said(&self) -> &str {
        &self.reading.spoken.text
    }

    /// The part of what was written that `sent` samples of its speech carried; `total` of them are all, if that is
    /// known.
    fn heard(&self, sent: u64, total: Option<u64>, pace: &Pace) -> (&str, Precision) {
        let spoken = &self.reading.spoken;
        let (said, precision) = heard::prefix(&spoken.text, sent, total, pace);
        let end = if said.len() == spoken.text.len() { self.text.len() } else { spoken.written_before(said.len()) };
        (self.text.get(..end).unwrap_or_default().trim_end(), precision)
    }

    fn new(text: String, reading: Reading, state: PartState, audio: Audio) -> Self {
        Self {
            utterance: UtteranceId::next(),
            text,
            reading,
            state,
            audio,
            pushed: 0,
            received: 0,
            fallback: false,
            sounded: false,
            submitted: None,
            made: None,
        }
    }

    pub(super) fn receive(&mut self, pcm: Vec<f32>) {
        self.received += pcm.len() as u64;
        if let Audio::Buffer(buffer) = &mut self.audio {
            buffer.push(pcm);
        }
    }

    pub(super) fn received(&self) -> u64 {
        self.received
    }

    /// Everything that came of it has left, and no more will come.
    fn has_left(&self, playout: &Playout) -> bool {
        self.state == PartState::Ended && self.available() == 0 && playout.sent(self.utterance).sent >= self.pushed
    }

    /// Samples that wait; of a clip without end, as many as there can be.
    pub(super) fn available(&self) -> usize {
        match &self.audio {
            Audio::Buffer(buffer) => buffer.length,
            Audio::Awaited { .. } => 0,
            Audio::Clip { left: None, .. } => usize::MAX,
            Audio::Clip { pcm, at, left: Some(left) } => pcm.len() * *left as usize + pcm.len() - at,
        }
    }

    /// Samples that came from the engine and wait.
    pub(super) fn buffered(&self) -> usize {
        match &self.audio {
            Audio::Buffer(buffer) => buffer.length,
            Audio::Clip { .. } | Audio::Awaited { .. } => 0,
        }
    }

    /// Takes the next frame, if a whole one is there or the last one.
    pub(super) fn take(&mut self, out: &mut Vec<f32>) -> bool {
        let available = self.available();
        let enough = available >= FRAME_SAMPLES || (self.state == PartState::Ended && available > 0);
        if !enough {
            return false;
        }
        match &mut self.audio {
            Audio::Buffer(buffer) => buffer.take(FRAME_SAMPLES, out),
            // Nothing is available of it.
            Audio::Awaited { .. } => return false,
            Audio::Clip { pcm, at, left } => {
                while out.len() < FRAME_SAMPLES {
                    if *at == pcm.len() {
                        match left {
                            Some(0) => break,
                            Some(times) => *times -= 1,
                            None => {}
                        }
                        *at = 0;
                    }
                    let end = (*at + FRAME_SAMPLES - out.len()).min(pcm.len());
                    out.extend_from_slice(&pcm[*at..end]);
                    *at = end;
                }
                self.received += out.len() as u64;
            }
        }
        self.pushed += out.len() as u64;
        true
    }
}

impl Buffer {
    fn push(&mut self, pcm: Vec<f32>) {
        if !pcm.is_empty() {
            self.length += pcm.len();
            self.chunks.push_back(pcm);
        }
    }

    fn take(&mut self, want: usize, out: &mut Vec<f32>) {
        while out.len() < want {
            let Some(chunk) = self.chunks.front() else { return };
            let end = (self.offset + want - out.len()).min(chunk.len());
            out.extend_from_slice(&chunk[self.offset..end]);
            self.length -= end - self.offset;
            if end == chunk.len() {
                self.chunks.pop_front();
                self.offset = 0;
            } else {
                self.offset = end;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::segment::SegmentConfig;
    use crate::text::Normalise;

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
        let heard = |sent| turn.parts[0].heard(sent, Some(1_000), &Pace::default()).0;
        assert_eq!(heard(1_000), "It costs $3.50 in all.");
        assert_eq!(heard(500), "It costs", "half an amount was not heard");
        assert_eq!(heard(800), "It costs $3.50");
        assert_eq!(heard(0), "");
    }

    #[test]
    fn a_part_is_spoken_in_the_language_it_is_given_or_shows() {
        let languages = |style: Style, texts: &[&str]| {
            let turn = turn(style, texts);
            turn.parts.iter().map(|part| part.reading.language.clone().unwrap_or_default()).collect::<Vec<_>>()
        };
        let texts = ["Das ist gut, und wir haben 5.", "Genau 7.", "你好，很高兴认识你。"];
        assert_eq!(languages(Style::default(), &texts), ["de", "de", "zh"]);
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
            ("de", include_str!("../../../tests/data/text/de.tsv")),
            ("fr", include_str!("../../../tests/data/text/fr.tsv")),
            ("es", include_str!("../../../tests/data/text/es.tsv")),
            ("zh", include_str!("../../../tests/data/text/zh.tsv")),
            ("ja", include_str!("../../../tests/data/text/ja.tsv")),
        ] {
            let style = Style { language: Some(language.into()), ..Style::default() };
            let config = SegmentConfig { phrase_chars: 3, ..SegmentConfig::default() };
            for written in file.lines().filter_map(|line| line.split('\t').next()) {
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

    #[test]
    fn a_buffer_gives_back_what_it_was_given() {
        let mut buffer = Buffer::default();
        for chunk in [3usize, 500, 0, 1_000, 7] {
            let start = buffer.length;
            buffer.push((0..chunk).map(|n| (start + n) as f32).collect());
        }
        let (mut all, mut out) = (Vec::new(), Vec::new());
        while buffer.length > 0 {
            out.clear();
            buffer.take(480, &mut out);
            assert!(out.len() == 480 || buffer.length == 0);
            all.extend_from_slice(&out);
        }
        assert_eq!(all, (0..1_510).map(|n| n as f32).collect::<Vec<_>>());
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
        let mut endless = Turn::new(TurnId::next(), Style::default(), crate::clock::now(), true);
        endless.add_clip(clip, 0);
        for _ in 0..100 {
            out.clear();
            assert!(endless.parts[0].take(&mut out));
            assert_eq!(out.len(), 480);
        }
    }
}
