//! What a call has to say, in order: turns, their utterances, the speech made of them, marks.
//!
//! Owns text and PCM until they leave. Never encodes, never decides when something leaves, never talks to the
//! engine: the machine asks it what to submit and hands it what came back.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::event::{Heard, Precision, TurnHow};
use super::handle::Style;
use super::heard::{self, Pace};
use super::segment::Segmenter;
use super::{EndReason, TurnId};
use crate::audio::{FRAME_SAMPLES, RATE};
use crate::media::playout::Playout;
use crate::turn::{Class, Epoch, StreamId, Utterance, UtteranceId};

/// Utterances of one call that are with the engine at a time: what sounds next, what follows it without a gap,
/// and one more for a voice that makes several at once.
pub(super) const WINDOW: usize = 3;

/// A writer who pauses this long behind a full stop has finished the sentence: several times the usual time
/// between two tokens.
const WRITER_PAUSE: Duration = Duration::from_millis(200);

/// No further utterance is submitted while this much speech waits: it bounds what one call can hold.
const MAX_AHEAD: usize = 10 * RATE as usize;

/// The queue of one call.
#[derive(Debug, Default)]
pub(super) struct Stream {
    pub(super) entries: VecDeque<Entry>,
    pub(super) pace: Pace,
}

/// One thing after the other.
#[derive(Debug)]
pub(super) enum Entry {
    Turn(Box<Turn>),
    Mark(String),
    End(EndReason),
}

/// One turn.
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
    pub(super) segmenter: Option<Segmenter>,
    /// When the latest piece of its text came.
    pub(super) written: Instant,
    /// Its first packet of speech has left.
    pub(super) sounded: bool,
    /// What went wrong, to be told at its end.
    pub(super) trouble: Option<TurnHow>,
    /// Refusals in a row.
    pub(super) refusals: u32,
    /// The engine refused or failed it and another voice took over: the whole rest of it is that voice's.
    pub(super) fallback: bool,
    /// Bytes of its text that the backlog counts.
    pub(super) bytes: usize,
    /// Streamed audio: no events are told of it.
    pub(super) silent: bool,
}

/// One utterance of a turn, or recorded audio.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) utterance: UtteranceId,
    pub(super) text: String,
    pub(super) state: PartState,
    audio: Audio,
    /// Samples that went to the playout.
    pushed: u64,
    /// Samples that came.
    received: u64,
    /// Another voice has it than the engine's.
    pub(super) fallback: bool,
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
            segmenter: None,
            written: accepted,
            sounded: false,
            trouble: None,
            refusals: 0,
            fallback: false,
            bytes: 0,
            silent: false,
        }
    }

    /// Adds what is to be synthesised.
    pub(super) fn add_text(&mut self, texts: Vec<String>) {
        self.parts.extend(
            texts.into_iter().map(|text| Part::new(text, PartState::Waiting, Audio::Buffer(Buffer::default()))),
        );
    }

    /// Adds recorded audio.
    pub(super) fn add_clip(&mut self, pcm: Arc<[f32]>, times: u32) {
        let left = times.checked_sub(1);
        self.parts.push(Part::new(String::new(), PartState::Ended, Audio::Clip { pcm, at: 0, left }));
    }

    /// Adds streamed audio.
    pub(super) fn add_pcm(&mut self, pcm: Vec<f32>) {
        if self.parts.is_empty() {
            self.parts.push(Part::new(String::new(), PartState::Ended, Audio::Buffer(Buffer::default())));
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
            text: part.text.clone(),
            voice: style.voice.clone(),
            language: style.language.clone(),
            instructions: style.instructions.clone(),
            seed: style.seed,
            speed: style.speed,
            tenant: tenant.clone(),
        }
    }

    /// Whether more text may come.
    pub(super) fn is_open(&self) -> bool {
        self.segmenter.is_some()
    }

    /// When a pause of the writer completes the sentence that waits.
    pub(super) fn settles_at(&self) -> Option<Instant> {
        let waits = self.segmenter.as_ref().is_some_and(Segmenter::is_probably_complete);
        waits.then(|| self.written + WRITER_PAUSE)
    }

    /// The writer has paused.
    pub(super) fn settle(&mut self) {
        let mut texts = Vec::new();
        if let Some(segmenter) = &mut self.segmenter {
            segmenter.settle(&mut texts);
        }
        self.add_text(texts);
    }

    /// Whether audio of it is still to be made.
    pub(super) fn awaits_audio(&self) -> bool {
        self.parts.iter().rev().any(|part| part.state != PartState::Ended)
    }

    /// Whether all of it has left.
    fn is_over(&self, playout: &Playout) -> bool {
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
            let (text, precision) = heard::prefix(&part.text, account.sent, total, pace);
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

    /// Recorded audio that has begun to leave: it cannot be taken back, as text can.
    fn is_underway(&self) -> bool {
        self.parts.iter().any(|part| part.text.is_empty() && part.pushed > 0)
    }

    /// Takes back what was submitted and has not sounded; it will be submitted anew.
    fn withdraw(&mut self, playout: &mut Playout) {
        let parts = &mut self.parts;
        playout.flush(|owner| parts.iter().all(|part| part.utterance != owner));
        self.epoch.raise();
        self.epoch = Epoch::default();
        for part in parts {
            if matches!(part.audio, Audio::Buffer(_)) && !part.text.is_empty() {
                let text = std::mem::take(&mut part.text);
                *part = Part::new(text, PartState::Waiting, Audio::Buffer(Buffer::default()));
            }
        }
    }
}

impl Part {
    fn new(text: String, state: PartState, audio: Audio) -> Self {
        Self {
            utterance: UtteranceId::next(),
            text,
            state,
            audio,
            pushed: 0,
            received: 0,
            fallback: false,
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

    fn available(&self) -> usize {
        match &self.audio {
            Audio::Buffer(buffer) => buffer.length,
            Audio::Clip { left: None, .. } => usize::MAX,
            Audio::Clip { pcm, at, left: Some(left) } => pcm.len() * *left as usize + pcm.len() - at,
        }
    }

    /// Takes the next frame, if a whole one is there or the last one.
    fn take(&mut self, out: &mut Vec<f32>) -> bool {
        let available = self.available();
        let enough = available >= FRAME_SAMPLES || (self.state == PartState::Ended && available > 0);
        if !enough {
            return false;
        }
        match &mut self.audio {
            Audio::Buffer(buffer) => buffer.take(FRAME_SAMPLES, out),
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

impl Stream {
    pub(super) fn turns(&self) -> impl Iterator<Item = &Turn> {
        self.entries.iter().filter_map(|entry| match entry {
            Entry::Turn(turn) => Some(&**turn),
            Entry::Mark(_) | Entry::End(_) => None,
        })
    }

    pub(super) fn turns_mut(&mut self) -> impl Iterator<Item = &mut Turn> {
        self.entries.iter_mut().filter_map(|entry| match entry {
            Entry::Turn(turn) => Some(&mut **turn),
            Entry::Mark(_) | Entry::End(_) => None,
        })
    }

    /// The turn that sounds, or sounds next.
    pub(super) fn front(&self) -> Option<&Turn> {
        self.turns().next()
    }

    /// The turn whose text is still being written.
    pub(super) fn open(&mut self) -> Option<&mut Turn> {
        self.turns_mut().find(|turn| turn.is_open())
    }

    /// When [`Turn::settle`] is due on the open turn.
    pub(super) fn settles_at(&self) -> Option<Instant> {
        self.turns().find(|turn| turn.is_open())?.settles_at()
    }

    pub(super) fn part(&mut self, utterance: UtteranceId) -> Option<&mut Part> {
        self.turns_mut().flat_map(|turn| turn.parts.iter_mut().rev()).find(|part| part.utterance == utterance)
    }

    pub(super) fn turn_of(&mut self, utterance: UtteranceId) -> Option<&mut Turn> {
        self.turns_mut().find(|turn| turn.parts.iter().rev().any(|part| part.utterance == utterance))
    }

    /// Whether the call ends when everything is said.
    pub(super) fn is_ending(&self) -> bool {
        self.entries.iter().any(|entry| matches!(entry, Entry::End(_)))
    }

    /// Adds a turn behind the others, or behind the one that sounds (`ahead`).
    pub(super) fn add(&mut self, turn: Turn, ahead: bool, playout: &mut Playout) {
        let place = if ahead {
            let sounding = |entry: &Entry| matches!(entry, Entry::Turn(turn) if turn.sounded || turn.is_underway());
            let place = self.entries.iter().rposition(sounding).map_or(0, |place| place + 1);
            for entry in self.entries.range_mut(place..) {
                if let Entry::Turn(turn) = entry {
                    turn.withdraw(playout);
                }
            }
            place
        } else {
            // Behind an end nothing is heard: new text goes before it.
            let ends = |entry: &Entry| matches!(entry, Entry::End(_));
            self.entries.iter().position(ends).unwrap_or(self.entries.len())
        };
        self.entries.insert(place, Entry::Turn(Box::new(turn)));
    }

    /// The next utterance to submit, while the window and the buffers have room.
    pub(super) fn next_to_submit(&mut self) -> Option<(&mut Turn, usize)> {
        let (mut open, mut ahead) = (0, 0);
        for part in self.turns().flat_map(|turn| &turn.parts) {
            open += usize::from(part.state == PartState::Submitted);
            if let Audio::Buffer(buffer) = &part.audio {
                ahead += buffer.length;
            }
        }
        if open >= WINDOW || ahead >= MAX_AHEAD {
            return None;
        }
        self.turns_mut().find_map(|turn| {
            let place = turn.parts.iter().position(|part| part.state == PartState::Waiting)?;
            Some((turn, place))
        })
    }

    /// Takes the next frame of speech into `out`; returns whose it is.
    pub(super) fn take_frame(&mut self, out: &mut Vec<f32>) -> Option<UtteranceId> {
        out.clear();
        for entry in &mut self.entries {
            match entry {
                Entry::Turn(turn) => {
                    for part in &mut turn.parts {
                        if part.take(out) {
                            return Some(part.utterance);
                        }
                        if part.state != PartState::Ended {
                            return None;
                        }
                    }
                    if turn.is_open() {
                        return None;
                    }
                }
                Entry::Mark(_) => {}
                Entry::End(_) => return None,
            }
        }
        None
    }

    /// Whether only the end of the call is left.
    pub(super) fn is_last(&self) -> bool {
        matches!(self.entries.front(), Some(Entry::End(_)))
    }

    /// Removes the first entry if its time has come; the end of the call only when it `may_end`.
    pub(super) fn retire(&mut self, playout: &Playout, may_end: bool) -> Option<Entry> {
        self.entries.pop_front_if(|entry| match entry {
            Entry::Turn(turn) => turn.is_over(playout),
            Entry::Mark(_) => true,
            // The last frame must have left.
            Entry::End(_) => may_end && playout.is_empty() && !playout.is_dialing(),
        })
    }

    /// Samples of speech that wait.
    pub(super) fn waiting_samples(&self) -> usize {
        self.turns().flat_map(|turn| &turn.parts).fold(0, |sum, part| sum.saturating_add(part.available()))
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
