//! What a call needs of the engine: a seam, so that calls run in tests without one.

use std::time::{Duration, Instant};

use crate::turn::{Saying, SpeechSink, StreamId, Utterance, UtteranceId};

/// Makes speech of utterances. Implemented in [`crate::gateway`] for the engine, and by fakes in tests.
pub trait Speech: Send + Sync + 'static {
    /// Takes `utterance`; its events go to `sink`. Never waits.
    ///
    /// # Errors
    /// There is no capacity; nothing was taken.
    fn submit(&self, utterance: Utterance, sink: SpeechSink) -> Result<(), Refusal>;

    /// As [`Speech::submit`], by the fallback voice. Without one it refuses.
    ///
    /// # Errors
    /// There is none, or it has no capacity either; nothing was taken.
    fn fallback(&self, _utterance: Utterance, _sink: SpeechSink) -> Result<(), Refusal> {
        Err(Refusal { retry_after: Duration::from_secs(1), reason: "there is no fallback voice".into() })
    }

    /// Where `voice` takes utterances whose text is still being written ([`Utterance::streamed`]): after how many text ids
    /// it begins to speak.
    fn starts_after(&self, _voice: Option<&str>) -> Option<u32> {
        None
    }

    /// Whether `voice` says phonemes that a text gives; others say the words that are written.
    fn says_phonemes(&self, _voice: Option<&str>) -> bool {
        true
    }

    /// Whether `voice` speaks the language of this BCP 47 tag, as far as is known.
    fn speaks(&self, _voice: Option<&str>, _tag: &str) -> bool {
        true
    }

    /// Goes on with the text of a streamed utterance that was taken; behind the `last` piece none follows, and each ends
    /// where a word does. Never waits.
    /// What belongs to an utterance that is over is dropped.
    fn append(&self, _stream: StreamId, _utterance: UtteranceId, _said: &Saying, _last: bool) {}

    /// A text is on its way that will be submitted within a millisecond: what sleeps wakes up meanwhile. Never waits.
    fn rouse(&self) {}

    /// Tells how the listener of `stream` fares.
    fn note(&self, stream: StreamId, note: StreamState);
}

/// Why an utterance was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// When trying again is worth while.
    pub retry_after: Duration,
    /// For people.
    pub reason: String,
}

/// What the engine needs to know of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamState {
    /// The first frame of a spurt left: playing time counts from `at`.
    Anchored {
        /// When it left.
        at: Instant,
    },
    /// So much of what was made is left out: silence around a sentence.
    Skipped {
        /// Samples.
        samples: u64,
    },
    /// Playing stopped; what was made waits.
    Held,
    /// Playing goes on.
    Resumed,
    /// What was made and not yet heard was dropped.
    Interrupted,
    /// The call is over.
    Closed,
}
