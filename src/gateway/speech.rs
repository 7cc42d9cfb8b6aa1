//! The engine as what calls speak with, alone or with the default voice as its fallback.

use crate::call::{Refusal, Speech, StreamState};
use crate::synth::device::{Engine, StreamNote};
use crate::turn::{Saying, SpeechSink, StreamId, Utterance, UtteranceId};

impl Speech for Engine {
    fn submit(&self, utterance: Utterance, sink: SpeechSink) -> Result<(), Refusal> {
        Engine::submit(self, utterance, sink)
            .map_err(|refused| Refusal { retry_after: refused.retry_after, reason: refused.reason.to_string() })
    }

    fn starts_after(&self, voice: Option<&str>) -> Option<u32> {
        Engine::starts_after(self, voice)
    }

    fn says_phonemes(&self, voice: Option<&str>) -> bool {
        Engine::says_phonemes(self, voice)
    }

    fn speaks(&self, voice: Option<&str>, tag: &str) -> bool {
        Engine::speaks(self, voice, tag)
    }

    fn append(&self, stream: StreamId, utterance: UtteranceId, said: &Saying, last: bool) {
        Engine::append(self, stream, utterance, said, last);
    }

    fn rouse(&self) {
        Engine::rouse(self);
    }

    fn note(&self, stream: StreamId, note: StreamState) {
        let note = match note {
            StreamState::Anchored { at } => StreamNote::Anchored { at },
            StreamState::Skipped { samples } => StreamNote::Skipped { samples },
            StreamState::Held => StreamNote::Held,
            StreamState::Resumed => StreamNote::Resumed,
            StreamState::Interrupted => StreamNote::Interrupted,
            StreamState::Closed => StreamNote::Closed,
        };
        Engine::note(self, stream, note);
    }
}

/// An engine, and another whose default voice speaks what the first refuses or fails at.
pub struct WithFallback {
    engine: Engine,
    fallback: Engine,
}

impl WithFallback {
    /// `fallback` speaks where `engine` cannot.
    pub fn new(engine: Engine, fallback: Engine) -> Self {
        Self { engine, fallback }
    }
}

impl Speech for WithFallback {
    fn submit(&self, utterance: Utterance, sink: SpeechSink) -> Result<(), Refusal> {
        Speech::submit(&self.engine, utterance, sink)
    }

    fn fallback(&self, utterance: Utterance, sink: SpeechSink) -> Result<(), Refusal> {
        // The fallback engine has one voice and one manner of speaking, and speaks whole texts.
        let utterance = Utterance { voice: None, instructions: None, streamed: false, ..utterance };
        Speech::submit(&self.fallback, utterance, sink)?;
        metrics::counter!("antiphon_fallback_total").increment(1);
        // Its old name, which goes with the next release.
        metrics::counter!("antiphon_stand_in_total").increment(1);
        Ok(())
    }

    fn starts_after(&self, voice: Option<&str>) -> Option<u32> {
        Engine::starts_after(&self.engine, voice)
    }

    fn says_phonemes(&self, voice: Option<&str>) -> bool {
        Engine::says_phonemes(&self.engine, voice)
    }

    fn speaks(&self, voice: Option<&str>, tag: &str) -> bool {
        Engine::speaks(&self.engine, voice, tag)
    }

    fn append(&self, stream: StreamId, utterance: UtteranceId, said: &Saying, last: bool) {
        Engine::append(&self.engine, stream, utterance, said, last);
    }

    fn rouse(&self) {
        Speech::rouse(&self.engine);
    }

    fn note(&self, stream: StreamId, note: StreamState) {
        // An engine that does not know the stream does nothing.
        Speech::note(&self.engine, stream, note);
        Speech::note(&self.fallback, stream, note);
    }
}
