//! One utterance of a turn: its text, and the speech that is made of it until it leaves.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::oneshot;

use super::quiet::{Ending, Quiet, fade_end};
use crate::audio::FRAME_SAMPLES;
use crate::call::event::Precision;
use crate::call::heard::{self, Envelope, Pace};
use crate::call::segment::{is_closer, is_terminator};
use crate::media::playout::Playout;
use crate::text::{Language, Reading, Span, Spoken};
use crate::turn::{Saying, Sound, StageTimes, UtteranceId, VoiceStages, WordEnd, WordTimes};
use crate::voice::loudness::Leveller;

/// One utterance of a turn, or recorded audio.
///
/// Why this struct is large: it is an utterance's way from text to packets, and each step keeps what the next one asks for.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) utterance: UtteranceId,
    /// As the agent wrote it: what is told of it.
    pub(super) text: String,
    /// How it is said: what the engine gets.
    pub(super) reading: Reading,
    pub(super) state: PartState,
    /// Of a sentence that the voice gets as it is written.
    pub(super) feed: Option<Feed>,
    pub(super) audio: Audio,
    /// Samples that went to the playout.
    pub(super) pushed: u64,
    /// Samples that came.
    pub(super) received: u64,
    /// The fallback voice has it.
    pub(super) fallback: bool,
    /// Bytes of its text that were told of when a packet of it left.
    pub(super) told: usize,
    /// When it was handed to the engine.
    pub(super) submitted: Option<Instant>,
    /// When the first of its audio came.
    pub(super) made: Option<Instant>,
    /// Where the device tells how that came about, and what it told until it came.
    pub(super) stages: StageTimes,
    pub(super) voice: Option<VoiceStages>,
    /// The silence around what a voice makes of it; of recorded audio all is played.
    pub(super) quiet: Option<Quiet>,
    /// Times the amplitude that the voice speaks with, below full scale.
    pub(super) level: Leveller,
    /// Times the turn's own rate.
    pub(super) rate: f32,
    /// When each word sounds, where the voice tells.
    pub(super) words: WordTimes,
    /// How loud it is, and where its words are by that.
    pub(super) envelope: Envelope,
    pub(super) aligned: RefCell<Aligned>,
}

/// Where the words of a part are, as far as its sound tells.
#[derive(Debug, Default)]
pub(super) struct Aligned {
    /// Of so many bytes that are said, hops of sound, and whether that is all of it.
    of: (usize, usize, bool),
    ends: Option<Vec<WordEnd>>,
}

/// The text of a part on its way to a voice that takes it as it is written.
#[derive(Debug, Default)]
pub(super) struct Feed {
    /// What is said behind what the voice has.
    unsent: Saying,
    /// Nothing follows.
    pub(super) complete: bool,
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
pub(super) enum Audio {
    Buffer(Buffer),
    /// So many samples more.
    Silence(usize),
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
pub(super) struct Buffer {
    chunks: VecDeque<Vec<f32>>,
    /// Taken from the first chunk.
    offset: usize,
    length: usize,
}

impl Part {
    /// Whether its audio is being fetched.
    pub(super) fn is_fetched(&self) -> bool {
        self.state == PartState::Fetched
    }

    /// Whether its text is still being written, for a voice that takes it so.
    pub(super) fn is_written(&self) -> bool {
        self.feed.as_ref().is_some_and(|feed| !feed.complete)
    }

    /// The next words of it.
    pub(super) fn append(&mut self, text: &str, reading: Reading) {
        let gap = if is_dense(&self.text) { "" } else { " " };
        let spoken = &mut self.reading.spoken;
        let (written, said) = (self.text.len(), spoken.text.len());
        let place = |from: usize, range: std::ops::Range<usize>| range.start + from..range.end + from;
        spoken.spans.push(Span {
            written: place(written, 0..gap.len()),
            spoken: place(said, 0..gap.len()),
            copied: true,
        });
        spoken.spans.extend(reading.spoken.spans.into_iter().map(|span| Span {
            written: place(written + gap.len(), span.written),
            spoken: place(said + gap.len(), span.spoken),
            copied: span.copied,
        }));
        for (to, more) in [(&mut self.text, text), (&mut spoken.text, reading.spoken.text.as_str())] {
            to.push_str(gap);
            to.push_str(more);
        }
        let moved = |(at, phonemes): &Sound| (place(said + gap.len(), at.clone()), phonemes.clone());
        self.reading.sounds.extend(reading.sounds.iter().map(moved));
        if let Some(feed) = &mut self.feed {
            feed.unsent.push(&reading.spoken.text, reading.sounds);
            feed.unsent.push(if is_dense(&reading.spoken.text) { "" } else { " " }, []);
        }
    }

    /// What the voice gets first. A gap behind the last word says that it is whole.
    pub(super) fn said_so_far(&self) -> String {
        let said = &self.reading.spoken.text;
        let gap = if self.is_written() && !is_dense(said) { " " } else { "" };
        format!("{said}{gap}")
    }

    /// What the voice, which has the part already, is to get of it now, and whether that is the end of it.
    pub(super) fn take_feed(&mut self) -> Option<(Saying, bool)> {
        let feed = self.feed.as_mut().filter(|feed| feed.complete || !feed.unsent.is_empty())?;
        let (said, complete) = (std::mem::take(&mut feed.unsent), feed.complete);
        if complete {
            self.feed = None;
        }
        Some((said, complete))
    }

    /// An engine took it with all its text so far; `streams`: and takes more.
    pub(super) fn taken(&mut self, streams: bool) {
        self.feed = self.feed.take().filter(|feed| streams && !feed.complete).map(|_| Feed::default());
    }

    /// Recorded audio, of which nothing is written.
    pub(super) fn sound(audio: Audio) -> Self {
        let reading = Reading { spoken: Spoken::default(), language: None, sounds: Vec::new(), marks: Vec::new() };
        Self::new(String::new(), reading, PartState::Ended, audio)
    }

    /// What is said of it.
    pub(super) fn said(&self) -> &str {
        &self.reading.spoken.text
    }

    /// Appends the marks that were reached when `sent` samples of it had left, all of them where that is all of it.
    pub(super) fn reach(&mut self, left: bool, sent: u64, pace: &Pace, reached: &mut Vec<String>) {
        if self.reading.marks.is_empty() || (sent == 0 && !left) {
            return;
        }
        let said = &self.reading.spoken.text;
        let passed = if left { said.len() } else { self.heard_of_said(sent, pace).0.len() };
        let is_reached = |at: usize| left || said.get(..at).unwrap_or_default().trim_end().len() <= passed;
        let count = self.reading.marks.iter().take_while(|(at, _)| is_reached(*at)).count();
        reached.extend(self.reading.marks.drain(..count).map(|(_, name)| name));
    }

    /// What of [`Self::said`] `sent` samples of it carried.
    pub(super) fn heard_of_said(&self, sent: u64, pace: &Pace) -> (&str, Precision) {
        let total = (self.state == PartState::Ended).then_some(self.received);
        let said = &self.reading.spoken.text;
        if let Some(words) = self.words.known().filter(|_| sent > 0) {
            // In samples that the voice made, of which the first may have been left out.
            let out = self.left_out();
            return heard::prefix(said, sent + out, total.map(|total| total + out), Some(words), pace);
        }
        let whole = total.is_some();
        self.align(whole, pace);
        let aligned = self.aligned.borrow();
        let (heard, precision) = heard::prefix(said, sent, total, aligned.ends.as_deref(), pace);
        // Better than a share of the time, and no certainty either.
        let precision = match precision {
            Precision::Word if whole => Precision::Proportional,
            Precision::Word => Precision::Estimated,
            other => other,
        };
        (heard, precision)
    }

    /// Finds where its words are by their lengths and its pauses, unless that is known of all the sound that is there.
    fn align(&self, whole: bool, pace: &Pace) {
        let said = &self.reading.spoken.text;
        let of = (said.len(), self.envelope.len(), whole);
        let mut aligned = self.aligned.borrow_mut();
        if aligned.of == of {
            return;
        }
        let language = self.reading.language.as_deref().map_or(Language::English, Language::of_tag);
        let mut ends = heard::aligned(said, language, &self.envelope, (!whole).then_some(pace));
        if let Some(ends) = &mut ends {
            heard::not_before(said, ends, &self.words.begins(), self.left_out());
        }
        *aligned = Aligned { of, ends };
    }

    /// The part of what was written that `sent` samples of its speech carried.
    pub(super) fn heard(&self, sent: u64, pace: &Pace) -> (&str, Precision) {
        let spoken = &self.reading.spoken;
        let (said, precision) = self.heard_of_said(sent, pace);
        let end = if said.len() == spoken.text.len() { self.text.len() } else { spoken.written_before(said.len()) };
        (self.text.get(..end).unwrap_or_default().trim_end(), precision)
    }

    pub(super) fn new(text: String, reading: Reading, state: PartState, audio: Audio) -> Self {
        Self {
            utterance: UtteranceId::next(),
            text,
            reading,
            state,
            feed: None,
            quiet: None,
            audio,
            pushed: 0,
            received: 0,
            fallback: false,
            told: 0,
            submitted: None,
            made: None,
            level: Leveller::new(1.0),
            rate: 1.0,
            words: WordTimes::default(),
            stages: StageTimes::default(),
            voice: None,
            envelope: Envelope::default(),
            aligned: RefCell::default(),
        }
    }

    /// One that a voice is to make; `answers`: the turn's first.
    pub(super) fn spoken(text: String, reading: Reading, answers: bool) -> Self {
        let quiet = if answers { Quiet::of_answer() } else { Quiet::default() };
        let part = Self::new(text, reading, PartState::Waiting, Audio::Buffer(Buffer::default()));
        Self { quiet: Some(quiet), ..part }
    }

    /// A voice makes it.
    pub(super) fn is_spoken(&self) -> bool {
        self.quiet.is_some()
    }

    pub(super) fn receive(&mut self, pcm: Vec<f32>) {
        let pcm = match &mut self.quiet {
            Some(quiet) => quiet.pass(pcm),
            None => pcm,
        };
        self.keep(pcm);
    }

    /// Samples that the voice made before the first that is heard.
    pub(super) fn left_out(&self) -> u64 {
        self.quiet.as_ref().map_or(0, Quiet::left_out)
    }

    /// All of it was made: what has not left of a silence at its end that is longer than natural is left out. Gives how many
    /// samples that is.
    pub(super) fn complete(&mut self) -> u64 {
        self.state = PartState::Ended;
        let Some(quiet) = &mut self.quiet else { return 0 };
        let rest = quiet.finish();
        let surplus = quiet.surplus(ending(&self.text));
        self.keep(rest);
        let Audio::Buffer(buffer) = &mut self.audio else { return 0 };
        let out = surplus.min(buffer.length);
        buffer.shorten(out);
        self.received -= out as u64;
        out as u64
    }

    fn keep(&mut self, mut pcm: Vec<f32>) {
        self.level.process(&mut pcm);
        self.envelope.push(&pcm);
        self.received += pcm.len() as u64;
        if let Audio::Buffer(buffer) = &mut self.audio {
            buffer.push(pcm);
        }
    }

    pub(super) fn received(&self) -> u64 {
        self.received
    }

    /// Whether it is played until it is cut off.
    pub(super) fn is_endless(&self) -> bool {
        matches!(self.audio, Audio::Clip { left: None, .. } | Audio::Awaited { times: 0, .. })
    }

    /// Everything that came of it has left, and no more will come.
    pub(super) fn has_left(&self, playout: &Playout) -> bool {
        self.state == PartState::Ended && self.available() == 0 && playout.sent(self.utterance).sent >= self.pushed
    }

    /// Samples that wait; of a clip without end, as many as there can be.
    pub(super) fn available(&self) -> usize {
        match &self.audio {
            Audio::Buffer(buffer) => buffer.length,
            Audio::Silence(left) => *left,
            Audio::Awaited { .. } => 0,
            Audio::Clip { left: None, .. } => usize::MAX,
            Audio::Clip { pcm, at, left: Some(left) } => pcm.len() * *left as usize + pcm.len() - at,
        }
    }

    /// Samples that came from the engine and wait.
    pub(super) fn buffered(&self) -> usize {
        match &self.audio {
            Audio::Buffer(buffer) => buffer.length,
            Audio::Silence(_) | Audio::Clip { .. } | Audio::Awaited { .. } => 0,
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
            Audio::Silence(left) => {
                let taken = FRAME_SAMPLES.min(*left);
                *left -= taken;
                out.resize(taken, 0.0);
                self.received += taken as u64;
            }
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

/// What `text` ends in, as one hears it.
fn ending(text: &str) -> Ending {
    match text.trim_end_matches(is_closer).chars().next_back() {
        Some(last) if is_terminator(last) => Ending::Sentence,
        Some(',' | ';' | ':' | '—' | '–' | '，' | '、' | '：' | '；') => Ending::Clause,
        _ => Ending::Word,
    }
}

/// Whether what follows `text` needs no gap: a script that does not set words apart.
fn is_dense(text: &str) -> bool {
    text.chars().next_back().is_some_and(|c| c as u32 >= 0x3000)
}

impl Buffer {
    fn push(&mut self, pcm: Vec<f32>) {
        if !pcm.is_empty() {
            self.length += pcm.len();
            self.chunks.push_back(pcm);
        }
    }

    /// Takes the last `samples` back, so that what is left ends without a click.
    fn shorten(&mut self, samples: usize) {
        let mut left = samples.min(self.length);
        self.length -= left;
        while left > 0
            && let Some(mut chunk) = self.chunks.pop_back()
        {
            let from = if self.chunks.is_empty() { self.offset } else { 0 };
            if chunk.len() - from > left {
                chunk.truncate(chunk.len() - left);
                left = 0;
                fade_end(&mut chunk[from..]);
                self.chunks.push_back(chunk);
            } else {
                left -= chunk.len() - from;
            }
        }
        if self.chunks.is_empty() {
            self.offset = 0;
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
    fn a_buffer_is_shortened_from_its_end_whatever_was_taken() {
        for taken in 0..400 {
            for back in 0..=600 - taken {
                let mut buffer = Buffer::default();
                for chunk in [100usize, 300, 200] {
                    buffer.push(vec![1.0; chunk]);
                }
                let (mut before, mut after) = (Vec::new(), Vec::new());
                buffer.take(taken, &mut before);
                buffer.shorten(back);
                assert_eq!(buffer.length, 600 - taken - back);
                buffer.take(1_000, &mut after);
                assert_eq!((before.len(), after.len(), buffer.length), (taken, 600 - taken - back, 0));
            }
        }
    }

    /// A sentence of 200 ms between silences of 400 and 900 ms, whose voice tells when its words end.
    #[test]
    fn what_a_voice_is_silent_around_a_sentence_is_bounded_and_its_words_are_where_they_were() {
        const MS: usize = 24;
        let texts = [("One two.", 300), ("One two,", 150), ("One two", 60)];
        for ((text, behind), (answers, before)) in
            texts.into_iter().flat_map(|text| [(text, (false, 60)), (text, (true, 2))])
        {
            let reading = crate::text::read(text, Some("en"), crate::text::Normalise::On);
            let mut part = Part::spoken(text.to_owned(), reading, answers);
            part.state = PartState::Submitted;
            part.words.tell(vec![
                WordEnd { text: 3, samples: 500 * MS as u64 },
                WordEnd { text: text.len(), samples: 600 * MS as u64 },
            ]);
            let pcm = [vec![0.0; 400 * MS], vec![0.5; 200 * MS], vec![0.0; 900 * MS]].concat();
            pcm.chunks(MS * 70).for_each(|chunk| part.receive(chunk.to_vec()));
            assert_eq!(part.left_out(), (400 - before) as u64 * MS as u64);
            assert_eq!(part.complete(), ((900 - behind) * MS) as u64);
            let left = before + 200 + behind;
            assert_eq!((part.received(), part.available()), ((left * MS) as u64, left * MS), "{text}");
            let heard = |ms: usize| part.heard(((ms * MS) as u64).max(1), &Pace::default()).0.to_owned();
            let (one, two) = (before + 100, before + 200);
            assert_eq!((heard(0), heard(one - 1), heard(one)), (String::new(), String::new(), "One".to_owned()));
            assert_eq!((heard(two - 1), heard(two)), ("One".to_owned(), text.to_owned()));
            assert_eq!(heard(left), text);
        }
    }
}
