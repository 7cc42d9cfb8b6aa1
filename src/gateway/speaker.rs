//! The speech of one text that is no call's: what `/v1/audio/speech`, its WebSocket and `antiphon say` speak with.
//!
//! # Why
//! Speech requests are live work on a stream of their own, two utterances at a time, so that a reader that
//! stops reading holds two sentences of audio and nothing of the device.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::mpsc;

use crate::audio::RATE;
use crate::audio_file::AudioFileError;
use crate::call::Style;
use crate::call::segment::Cut;
use crate::synth::device::{Engine, Refused, RefusedReason, StreamNote};
use crate::text::{How, Lexicon, Normalise, read_given};
use crate::turn::{
    Class, Epoch, Markup, SpeechEvent, SpeechSink, StageTimes, StreamId, Utterance, UtteranceEnd, UtteranceId,
    WordTimes,
};
use crate::voice::loudness::Leveller;

/// Utterances of a request that are with the engine at a time.
const WINDOW: usize = 2;
/// Events that may wait for the reader; a full channel delays an unpaced stream.
const SINK_EVENTS: usize = 64;

/// How a text is to be spoken.
#[derive(Clone, Debug)]
pub struct Manner {
    /// Voice by name.
    pub voice: Option<String>,
    /// BCP 47 language; `None`: the one that the text shows.
    pub language: Option<String>,
    /// Whether numbers and signs are brought into words.
    pub normalise: Normalise,
    /// Manner of speaking.
    pub instructions: Option<String>,
    /// Same text, voice and seed: same audio.
    pub seed: u64,
    /// Speaking rate.
    pub speed: f32,
    /// What of the text is no words.
    pub markup: Markup,
    /// Amplitude, 1.0 as the voice speaks.
    pub volume: f32,
    /// Words that are said otherwise than they are written.
    pub lexicon: Lexicon,
    /// For fairness and limits.
    pub tenant: Arc<str>,
}

impl Manner {
    /// The default voice at its own rate, in the language that the text shows.
    pub fn plain(tenant: Arc<str>) -> Self {
        let Style { voice, language, normalise, instructions, seed, speed, markup, volume, lexicon, .. } =
            Style::default();
        Self { voice, language, normalise, instructions, seed, speed, markup, volume, lexicon, tenant }
    }
}

/// Why a request's speech ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpeechError {
    /// No capacity now, or a limit of the client is reached.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The text or voice cannot be spoken.
    #[error("{0}")]
    Failed(String),
    /// The engine is shutting down.
    #[error("the gateway is shutting down")]
    Closed,
}

impl From<AudioFileError> for SpeechError {
    fn from(error: AudioFileError) -> Self {
        SpeechError::Failed(error.to_string())
    }
}

/// About how fast people speak, until it shows.
const CHARS_A_SECOND: f64 = 15.0;

/// A part that is with the engine.
struct Open {
    id: UtteranceId,
    /// Brings it to its amplitude.
    level: Leveller,
    /// What came of it before its turn: a phrase that is kept may be there before the one ahead of it has been made.
    early: VecDeque<Vec<f32>>,
    ended: bool,
    /// Characters of its text as it was written.
    chars: usize,
}

/// How much of a text has been given out.
#[derive(Clone, Copy, Debug, Default)]
struct Given {
    /// Characters of all that was added.
    of: usize,
    /// Characters and samples of the parts that were given out whole, and samples of the one that is being given out.
    chars: usize,
    samples: usize,
    begun: usize,
}

/// Speaks the parts of one text in order, a few ahead. Dropping it cancels what is under way.
pub struct Speaker {
    engine: Engine,
    manner: Manner,
    stream: StreamId,
    epoch: Epoch,
    sink: SpeechSink,
    events: mpsc::Receiver<SpeechEvent>,
    waiting: VecDeque<Cut>,
    /// With the engine, in the order in which they are heard.
    open: VecDeque<Open>,
    index: u64,
    given: Given,
}

impl Speaker {
    /// Nothing to say yet.
    pub fn new(engine: Engine, manner: Manner) -> Self {
        let (sink, events) = mpsc::channel(SINK_EVENTS);
        let stream = StreamId::next();
        // The reader takes audio as fast as it comes; how fast it plays is its own business.
        engine.note(stream, StreamNote::Unpaced);
        Self {
            engine,
            manner,
            stream,
            epoch: Epoch::default(),
            sink,
            events,
            waiting: VecDeque::new(),
            open: VecDeque::new(),
            index: 0,
            given: Given::default(),
        }
    }

    /// More to say, after what waits.
    pub fn add(&mut self, parts: impl IntoIterator<Item = impl Into<Cut>>) {
        for cut in parts.into_iter().map(Into::into) {
            let cuts = if self.manner.language.is_none() { cut.by_language() } else { vec![cut] };
            self.given.of += cuts.iter().map(chars).sum::<usize>();
            self.waiting.extend(cuts);
        }
    }

    /// What share of all that was added has been given out, 0 to 1: exact between parts, within one by the pace of those
    /// before it.
    pub fn share(&self) -> f64 {
        let Given { of, chars, samples, begun } = self.given;
        let pace = if samples > 0 { chars as f64 / samples as f64 } else { CHARS_A_SECOND / f64::from(RATE) };
        let current = self.open.front().map_or(0, |open| open.chars) as f64;
        // The end of a part that takes longer than others is not there yet.
        let within = (begun as f64 * pace).min(0.98 * current);
        if of == 0 { 0.0 } else { (chars as f64 + within) / of as f64 }
    }

    /// Whether everything added has been spoken.
    pub fn is_idle(&self) -> bool {
        self.open.is_empty() && self.waiting.is_empty()
    }

    /// The next audio; `None` when all that was added has been spoken.
    ///
    /// # Errors
    /// A part could not be spoken; the rest is cancelled.
    pub async fn next(&mut self) -> Result<Option<Vec<f32>>, SpeechError> {
        loop {
            while let Some(first) = self.open.front_mut() {
                if let Some(pcm) = first.early.pop_front() {
                    self.given.begun += pcm.len();
                    return Ok(Some(pcm));
                }
                if !first.ended {
                    break;
                }
                self.given.chars += first.chars;
                self.given.samples += std::mem::take(&mut self.given.begun);
                self.open.pop_front();
            }
            // Silence has its place between what was spoken before it and what comes after.
            if self.open.is_empty()
                && let Some(Cut::Break(length)) = self.waiting.pop_front_if(|cut| matches!(cut, Cut::Break(_)))
            {
                return Ok(Some(vec![0.0; (length.as_secs_f64() * f64::from(RATE)) as usize]));
            }
            self.submit()?;
            if self.open.is_empty() {
                return Ok(None);
            }
            let Some(event) = self.events.recv().await else { return Err(SpeechError::Closed) };
            match event {
                SpeechEvent::Audio { utterance, mut pcm } => {
                    let Some(open) = self.open.iter_mut().find(|open| open.id == utterance) else { continue };
                    open.level.process(&mut pcm);
                    open.early.push_back(pcm);
                }
                SpeechEvent::End { utterance, how } => {
                    if let Some(open) = self.open.iter_mut().find(|open| open.id == utterance) {
                        open.ended = true;
                    }
                    match how {
                        UtteranceEnd::Done => {}
                        UtteranceEnd::Cancelled => return Err(SpeechError::Closed),
                        UtteranceEnd::Refused { retry_after } => {
                            return Err(Refused { reason: RefusedReason::Overloaded, retry_after }.into());
                        }
                        UtteranceEnd::Failed(reason) => return Err(SpeechError::Failed(reason)),
                    }
                }
            }
        }
    }

    fn submit(&mut self) -> Result<(), SpeechError> {
        while self.open.len() < WINDOW
            && let Some(Cut::Piece(piece)) = self.waiting.pop_front_if(|cut| matches!(cut, Cut::Piece(_)))
        {
            let manner = &self.manner;
            let language = piece.manner.language.as_deref().or(manner.language.as_deref());
            let how = How { language, normalise: manner.normalise, lexicon: &manner.lexicon };
            let reading = read_given("", &piece.text, &piece.given, how);
            if reading.spoken.text.trim().is_empty() {
                // Marks only, which a text without a call has no listener for.
                self.given.of -= piece.text.chars().count();
                continue;
            }
            let utterance = Utterance {
                id: UtteranceId::next(),
                stream: self.stream,
                class: Class::Live,
                token: self.epoch.token(),
                text: reading.spoken.text,
                streamed: false,
                voice: manner.voice.clone(),
                language: reading.language,
                instructions: manner.instructions.clone(),
                // Every part has a seed of its own, so that equal sentences are not spoken identically.
                seed: manner.seed.wrapping_add(self.index),
                speed: (manner.speed * piece.manner.rate).clamp(0.25, 4.0),
                markup: manner.markup.of_voice(),
                sounds: reading.sounds,
                words: WordTimes::default(),
                stages: StageTimes::default(),
                tenant: manner.tenant.clone(),
            };
            self.index += 1;
            let level = Leveller::new(manner.volume * piece.manner.gain);
            let chars = piece.text.chars().count();
            self.open.push_back(Open { id: utterance.id, level, early: VecDeque::new(), ended: false, chars });
            self.engine.submit(utterance, self.sink.clone())?;
        }
        Ok(())
    }
}

/// Characters of what is spoken.
fn chars(cut: &Cut) -> usize {
    match cut {
        Cut::Piece(piece) => piece.text.chars().count(),
        Cut::Break(_) => 0,
    }
}

impl Drop for Speaker {
    fn drop(&mut self) {
        self.epoch.raise();
        self.engine.note(self.stream, StreamNote::Closed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::device::Loader;
    use crate::synth::device::phrases::{Config, Keep};
    use crate::synth::tone::Tone;

    async fn spoken(engine: &Engine, parts: &[&str]) -> Vec<f32> {
        let mut speaker = Speaker::new(engine.clone(), Manner::plain("".into()));
        speaker.add(parts.iter().map(|part| (*part).to_owned()));
        let mut all = Vec::new();
        while let Some(pcm) = speaker.next().await.expect("spoken") {
            all.extend(pcm);
        }
        assert!(speaker.is_idle());
        all
    }

    #[tokio::test]
    async fn parts_that_are_kept_wait_for_those_before_them() {
        let loader: Loader = Box::new(|| Ok(Box::new(Tone::new())));
        let engine = Engine::start(vec![loader], crate::sched::Config::default()).expect("starts");
        engine.ready().await;
        let parts = ["one three five", "two", "four six"];
        let plain = spoken(&engine, &parts).await;
        engine.keep_phrases(&Config { keep: Keep::All, disk_mib: 0, ..Config::default() });
        // The second is kept, with the seed of a second part; the first is not.
        spoken(&engine, &["something else", "two"]).await;
        assert_eq!(spoken(&engine, &parts).await, plain);
        assert_eq!(spoken(&engine, &parts).await, plain, "all of it is kept");
        engine.shutdown();
    }

    #[tokio::test]
    async fn the_share_grows_with_what_is_given_out_and_ends_whole() {
        let loader: Loader = Box::new(|| Ok(Box::new(Tone::new())));
        let engine = Engine::start(vec![loader], crate::sched::Config::default()).expect("starts");
        engine.ready().await;
        let mut speaker = Speaker::new(engine.clone(), Manner::plain("".into()));
        assert_eq!(speaker.share(), 0.0);
        speaker.add(
            ["one three five.", "...", "two, and a little more of it than before.", "four six."].map(str::to_owned),
        );
        let mut shares = vec![speaker.share()];
        while speaker.next().await.expect("spoken").is_some() {
            shares.push(speaker.share());
        }
        assert!(shares.windows(2).all(|two| two[0] <= two[1] + 1e-9), "{shares:?}");
        assert!(shares.iter().filter(|share| (0.05..0.95).contains(*share)).count() >= 3, "{shares:?}");
        assert_eq!(speaker.share(), 1.0);
        engine.shutdown();
    }
}
