//! The vocabulary that calls, scheduler and voices share: plain data, no behaviour but cancellation and the check of a speed.

use std::fmt;
use std::ops::{Range, RangeInclusive};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

/// Speaking rates that may be asked for, 1.0 as the voice speaks.
pub const SPEEDS: RangeInclusive<f32> = 0.25..=4.0;

/// `speed`, where it may be asked for.
///
/// # Errors
/// It is none of [`SPEEDS`], which the message says.
pub fn checked_speed(speed: f32) -> Result<f32, String> {
    if SPEEDS.contains(&speed) {
        return Ok(speed);
    }
    Err(format!("speed {speed}: expected {} to {}, for example 1.2", SPEEDS.start(), SPEEDS.end()))
}

/// What is spoken one after the other: a call, a streamed request, one lane of a batch job.
///
/// The utterances of a stream are heard in the order they were submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub u64);

/// One utterance, unique in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UtteranceId(pub u64);

impl UtteranceId {
    /// The next unused id.
    pub fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl StreamId {
    /// The next unused id.
    pub fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl fmt::Display for UtteranceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "u{}", self.0)
    }
}

/// A stream's generation number. Raising it is the whole of cancelling: work that carries an older one is
/// dropped at its next boundary and no caller waits for an answer.
#[derive(Clone, Debug, Default)]
pub struct Epoch(Arc<AtomicU64>);

impl Epoch {
    /// Cancels everything that holds an earlier token.
    pub fn raise(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }

    /// A token for work that starts now.
    pub fn token(&self) -> TurnToken {
        TurnToken { epoch: self.0.load(Ordering::Acquire), current: self.0.clone() }
    }
}

/// Tells work whether its result is still wanted.
#[derive(Clone, Debug)]
pub struct TurnToken {
    epoch: u64,
    current: Arc<AtomicU64>,
}

impl TurnToken {
    /// Whether the stream has been cancelled since this token was made: one atomic load.
    pub fn is_stale(&self) -> bool {
        self.current.load(Ordering::Acquire) != self.epoch
    }

    /// A token that is never cancelled.
    pub fn forever() -> Self {
        Epoch::default().token()
    }
}

/// What work is for, and so what it may delay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// A caller listens now.
    Live,
    /// No listener waits; uses what live work leaves over.
    Batch,
}

impl Class {
    /// The metric label.
    pub fn label(self) -> &'static str {
        match self {
            Class::Live => "live",
            Class::Batch => "batch",
        }
    }
}

/// How soon a text is spoken that is still being written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Streaming {
    /// Words first: an unfinished sentence while the listener would hear silence, else sentence by sentence.
    #[default]
    Auto,
    /// Sentence by sentence.
    Sentence,
    /// Token by token where the voice can, else as [`Streaming::Auto`].
    Token,
}

/// What of a text is markup and not words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Markup {
    /// Nothing.
    #[default]
    None,
    /// The inline tags of the voice (`[breath]`, `<strong>`); those it does not know are not spoken.
    Tags,
    /// A subset of SSML ([`crate::text::ssml`]), and the inline tags of the voice in square brackets. It is read before
    /// an utterance is made: a voice gets [`Markup::Tags`].
    Ssml,
}

impl Markup {
    /// What of it is left for the voice to read.
    pub fn of_voice(self) -> Self {
        match self {
            Self::None => Self::None,
            Self::Tags | Self::Ssml => Self::Tags,
        }
    }
}

/// When each word of an utterance sounds. The voice writes it, once; who speaks the utterance reads it.
#[derive(Clone, Debug, Default)]
pub struct WordTimes(Arc<Told>);

#[derive(Debug, Default)]
struct Told {
    ends: OnceLock<Vec<WordEnd>>,
    begins: Mutex<Vec<NotBefore>>,
    /// Somebody will ask later, however little the utterance hurries.
    kept: AtomicBool,
    /// Those who wait for `ends`.
    changed: Notify,
}

/// The end of a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WordEnd {
    /// Bytes of the text up to the end of the word.
    pub text: usize,
    /// Samples of the speech up to its end.
    pub samples: u64,
}

/// What a voice that is given its text bit by bit had not been given yet: a word cannot sound before the voice has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotBefore {
    /// Characters of the text before it, white space left out.
    pub letters: usize,
    /// Samples of the speech before which nothing behind these characters sounds.
    pub samples: u64,
}

impl WordTimes {
    /// Bounds that are kept of an utterance: no text that is spoken as one comes in so many bits.
    const MOST_BEGINS: usize = 4_096;

    /// Tells that nothing behind so many characters of the text sounds before so many samples. In order, both growing;
    /// what is not is left out.
    pub fn begin(&self, bound: NotBefore) {
        let mut begins = self.0.begins.lock().unwrap_or_else(PoisonError::into_inner);
        let grows = begins.last().is_none_or(|last| last.letters < bound.letters && last.samples <= bound.samples);
        if grows && begins.len() < Self::MOST_BEGINS {
            begins.push(bound);
        }
    }

    /// What was told by [`Self::begin`].
    pub fn begins(&self) -> Vec<NotBefore> {
        self.begins_after(0)
    }

    /// What was told by [`Self::begin`], without the first `known`.
    pub fn begins_after(&self, known: usize) -> Vec<NotBefore> {
        let begins = self.0.begins.lock().unwrap_or_else(PoisonError::into_inner);
        begins.get(known..).unwrap_or_default().to_vec()
    }

    /// Tells the ends of all words, in order. What was told before stays.
    pub fn tell(&self, ends: Vec<WordEnd>) {
        // Refused where they are known already: an utterance that is spoken anew says the same.
        let _ = self.0.ends.set(ends);
        self.0.changed.notify_waiters();
    }

    /// Waits until the ends of all words are known. Cancel safe.
    pub async fn told(&self) {
        loop {
            let changed = self.0.changed.notified();
            if self.known().is_some() {
                return;
            }
            changed.await;
        }
    }

    /// Whether anybody but the voice holds it.
    pub fn is_wanted(&self) -> bool {
        self.holders() > 1
    }

    /// How many hold it.
    pub fn holders(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    /// The utterance is kept, to be heard later: its words are wanted although no listener hears it now.
    pub fn keep(&self) {
        self.0.kept.store(true, Ordering::Release);
    }

    /// Whether it is; see [`Self::keep`].
    pub fn is_kept(&self) -> bool {
        self.0.kept.load(Ordering::Acquire)
    }

    /// The ends of all words; `None` while they are not known.
    pub fn known(&self) -> Option<&[WordEnd]> {
        self.0.ends.get().map(Vec::as_slice)
    }
}

/// Where the time from an utterance's acceptance to its first audio went, stage by stage. The parts add up; a stage that the
/// voice does not have is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VoiceStages {
    /// From its acceptance to the begin of its first step.
    pub wait: Duration,
    /// Its text and the voice's prompt through the language model.
    pub prefill: Option<Duration>,
    /// To the end of the first step that decodes; its first token may be there sooner, with the prefill.
    pub first_token: Option<Duration>,
    /// To the end of the last step that the first audio's mel frames needed.
    pub first_mel: Option<Duration>,
    /// To the first audio.
    pub first_pcm: Duration,
}

impl VoiceStages {
    /// As somebody sees it who waited for `whole` until the first audio came: what was done before that wait began is left
    /// out, and what the way to the device and back took counts as waiting.
    pub fn within(self, whole: Duration) -> Self {
        let mut left = whole;
        let mut take = |part: Duration| {
            let taken = part.min(left);
            left -= taken;
            taken
        };
        let first_pcm = take(self.first_pcm);
        let first_mel = self.first_mel.map(&mut take);
        let first_token = self.first_token.map(&mut take);
        let prefill = self.prefill.map(&mut take);
        Self { wait: left, prefill, first_token, first_mel, first_pcm }
    }
}

/// Where the device tells the stages of an utterance, once: before its first audio is handed over.
#[derive(Clone, Debug, Default)]
pub struct StageTimes(Arc<OnceLock<VoiceStages>>);

impl StageTimes {
    /// Tells them. What was told before stays.
    pub fn tell(&self, stages: VoiceStages) {
        // Refused where they are known: its first audio is the first of all that are made of it.
        let _ = self.0.set(stages);
    }

    /// What was told; `None` also where no device made the audio, since it was kept.
    pub fn known(&self) -> Option<VoiceStages> {
        self.0.get().copied()
    }
}

/// How a piece of a text sounds, where that is given.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Phonemes {
    /// In the mnemonics of espeak-ng.
    Espeak(String),
    /// In Mandarin.
    Pinyin {
        /// Syllables with a digit for their tone, a space between them: `chong2 qing4`. See [`crate::text::pinyin`].
        pinyin: String,
    },
}

/// A piece of a text in bytes, and how it sounds.
pub type Sound = (Range<usize>, Phonemes);

/// What is said next of a text that is still being written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Saying {
    /// The words.
    pub text: String,
    /// Pieces of it whose phonemes are given, in order.
    pub sounds: Vec<Sound>,
}

impl Saying {
    /// Goes on with `text` and what is given of it.
    pub fn push(&mut self, text: &str, sounds: impl IntoIterator<Item = Sound>) {
        let from = self.text.len();
        self.sounds.extend(sounds.into_iter().map(|(at, sound)| (at.start + from..at.end + from, sound)));
        self.text.push_str(text);
    }

    /// Whether there is nothing of it.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }
}

impl From<&str> for Saying {
    fn from(text: &str) -> Self {
        Self { text: text.to_owned(), sounds: Vec::new() }
    }
}

/// A sentence-sized part of a turn, synthesised as a unit.
#[derive(Clone, Debug)]
pub struct Utterance {
    /// Unique in this process.
    pub id: UtteranceId,
    /// What it is heard on, in order.
    pub stream: StreamId,
    /// Live or batch.
    pub class: Class,
    /// Whether its result is still wanted.
    pub token: TurnToken,
    /// What to say, as written.
    pub text: String,
    /// The text is still being written: the rest follows piece by piece, for voices that take it so. `text` ends where a
    /// word does.
    pub streamed: bool,
    /// Voice name; `None` is the engine's default.
    pub voice: Option<String>,
    /// BCP 47 language tag, where the agent names one.
    pub language: Option<String>,
    /// Manner of speaking ("please say this cheerfully"), for voices that can.
    pub instructions: Option<String>,
    /// Same text, voice and seed: same audio.
    pub seed: u64,
    /// Speaking rate, 1.0 as recorded.
    pub speed: f32,
    /// What of the text is no words.
    pub markup: Markup,
    /// Pieces of `text` whose phonemes are given, in order.
    pub sounds: Vec<Sound>,
    /// Where the voice tells when each word sounds, once it knows.
    pub words: WordTimes,
    /// Where the device tells how its first audio came about.
    pub stages: StageTimes,
    /// For fairness and rate limits: the name of the API token, empty when there is none.
    pub tenant: Arc<str>,
}

impl Utterance {
    /// What is said of it, so far.
    pub fn said(&self) -> Saying {
        Saying { text: self.text.clone(), sounds: self.sounds.clone() }
    }

    /// `text` in the default voice as it speaks by itself, wanted until its stream is closed.
    pub fn plain(stream: StreamId, class: Class, text: impl Into<String>) -> Self {
        Self {
            id: UtteranceId::next(),
            stream,
            class,
            token: TurnToken::forever(),
            text: text.into(),
            streamed: false,
            voice: None,
            language: None,
            instructions: None,
            seed: 0,
            speed: 1.0,
            markup: Markup::None,
            sounds: Vec::new(),
            words: WordTimes::default(),
            stages: StageTimes::default(),
            tenant: "".into(),
        }
    }
}

/// What the device thread tells the sink of an utterance.
#[derive(Debug)]
pub enum SpeechEvent {
    /// The next audio of `utterance`: mono at [`crate::audio::RATE`], a whole number of frames except at the end.
    Audio {
        /// Whose audio.
        utterance: UtteranceId,
        /// Samples in -1..=1.
        pcm: Vec<f32>,
    },
    /// The last event of `utterance`.
    End {
        /// Which one ended.
        utterance: UtteranceId,
        /// How.
        how: UtteranceEnd,
    },
}

/// How an utterance ended. Closed: also a metric label.
#[derive(Clone, Debug, PartialEq)]
pub enum UtteranceEnd {
    /// All of it was synthesised.
    Done,
    /// Its token went stale.
    Cancelled,
    /// Accepting it would have broken a promise already made.
    Refused {
        /// When trying again is worth while.
        retry_after: Duration,
    },
    /// This utterance could not be synthesised; the reason is for people.
    Failed(String),
}

impl UtteranceEnd {
    /// The metric label.
    pub fn label(&self) -> &'static str {
        match self {
            UtteranceEnd::Done => "done",
            UtteranceEnd::Cancelled => "cancelled",
            UtteranceEnd::Refused { .. } => "refused",
            UtteranceEnd::Failed(_) => "failed",
        }
    }
}

/// Where the device thread puts the events of an utterance. It never waits: when the channel is full the
/// utterance fails (the lead limit keeps a listening sink far below its capacity), when it is closed the
/// utterance is cancelled.
pub type SpeechSink = tokio::sync::mpsc::Sender<SpeechEvent>;
