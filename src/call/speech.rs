//! What a call needs of the engine: a seam, so that calls run in tests without one.

use std::time::{Duration, Instant};

use crate::turn::{SpeechSink, StreamId, Utterance};

/// Makes speech of utterances. Implemented by the engine of the gateway and by fakes in tests.
pub trait Speech: Send + Sync + 'static {
    /// Takes `utterance`; its events go to `sink`. Never waits.
    ///
    /// # Errors
    /// There is no capacity; nothing was taken.
    fn submit(&self, utterance: Utterance, sink: SpeechSink) -> Result<(), Refusal>;

    /// As [`Speech::submit`], by the voice that speaks where the one above cannot. Without such a voice it refuses.
    ///
    /// # Errors
    /// There is none, or it has no capacity either; nothing was taken.
    fn stand_in(&self, _utterance: Utterance, _sink: SpeechSink) -> Result<(), Refusal> {
        Err(Refusal { retry_after: Duration::from_secs(1), reason: "no other voice stands in".into() })
    }

    /// Tells how the listener of `stream` fares.
    fn note(&self, stream: StreamId, note: StreamState);
}

/// One engine, and another whose default voice speaks what the first refuses or fails at.
pub struct WithStandIn {
    engine: crate::synth::device::Engine,
    other: crate::synth::device::Engine,
}

impl WithStandIn {
    /// `other` speaks where `engine` cannot.
    pub fn new(engine: crate::synth::device::Engine, other: crate::synth::device::Engine) -> Self {
        Self { engine, other }
    }
}

impl Speech for WithStandIn {
    fn submit(&self, utterance: Utterance, sink: SpeechSink) -> Result<(), Refusal> {
        Speech::submit(&self.engine, utterance, sink)
    }

    fn stand_in(&self, utterance: Utterance, sink: SpeechSink) -> Result<(), Refusal> {
        // Voices and manners are those of the other engine.
        Speech::submit(&self.other, Utterance { voice: None, instructions: None, ..utterance }, sink)?;
        metrics::counter!("antiphon_stand_in_total").increment(1);
        Ok(())
    }

    fn note(&self, stream: StreamId, note: StreamState) {
        // An engine that does not know the stream does nothing.
        Speech::note(&self.engine, stream, note);
        Speech::note(&self.other, stream, note);
    }
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
    /// Playing stopped; what was made waits.
    Held,
    /// Playing goes on.
    Resumed,
    /// What was made and not yet heard was dropped.
    Interrupted,
    /// Nobody listens any more.
    Closed,
}

impl Speech for crate::synth::device::Engine {
    fn submit(&self, utterance: Utterance, sink: SpeechSink) -> Result<(), Refusal> {
        crate::synth::device::Engine::submit(self, utterance, sink)
            .map_err(|refused| Refusal { retry_after: refused.retry_after, reason: refused.reason.to_string() })
    }

    fn note(&self, stream: StreamId, note: StreamState) {
        use crate::synth::device::StreamNote;
        let note = match note {
            StreamState::Anchored { at } => StreamNote::Anchored { at },
            StreamState::Held => StreamNote::Held,
            StreamState::Resumed => StreamNote::Resumed,
            StreamState::Interrupted => StreamNote::Interrupted,
            StreamState::Closed => StreamNote::Closed,
        };
        crate::synth::device::Engine::note(self, stream, note);
    }
}
