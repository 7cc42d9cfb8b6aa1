//! What the caller says, as words: recognisers and turn taking.
//!
//! A call hands its caller's sound to a [`Feed`] and gets [`HearEvent`]s. Between them is one task a call
//! ([`ear`]) on the control runtime: it keeps the sound of the open turn, asks a [`Recogniser`] about it and lets
//! [`turn::Machine`] decide where turns begin and end.
//!
//! Contract: the feed never waits. Sound that the task has no time for, and turns that no recogniser could be had
//! for, are counted and told as [`HearEvent::Deaf`]. Every turn that was told of ends with one
//! [`Phase::EndOfTurn`].
//!
//! - [`turn`], [`delay`]: when a caller has finished
//! - [`ear`]: the task; [`pool`]: threads that recognise; [`whisper`], [`http`]: recognisers that are asked
//! - [`smart_turn`]: a network that hears whether a turn is over
//! - [`stream`]: the task where a service streams words

pub mod config;
pub mod delay;
pub mod ear;
pub mod http;
pub mod pool;
pub mod smart_turn;
pub mod stream;
pub mod turn;
pub mod whisper;

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use serde::Serialize;

pub use config::{Recognizer, Turns};
pub use delay::{Backchannel, Expect, backchannel};
pub use ear::{Ears, Feed};
pub use turn::Words;
pub use whisper::Stop;

/// Samples per second of what callers say.
pub const RATE: u32 = 16_000;

/// What is known of a turn now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Phase {
    /// The caller began to speak; no words yet.
    StartOfTurn,
    /// Words so far; later ones may replace them.
    Partial,
    /// The caller has probably finished.
    EagerEndOfTurn,
    /// The caller had not: speaks on.
    TurnResumed,
    /// The caller has finished. No words: nothing was understood.
    EndOfTurn,
}

/// A turn of the caller.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TurnEvent {
    /// What is told of it.
    pub phase: Phase,
    /// Its words so far.
    pub text: String,
    /// ISO 639 code or BCP 47 tag of them; empty where it is not known.
    pub language: String,
    /// When it began, in call time: since media began to flow.
    pub start: Duration,
    /// When its last voice was, in call time.
    pub end: Duration,
    /// How sure the recogniser is of the words, 0 to 1.
    pub confidence: f32,
    /// How often turns of this caller were told as [`Phase::EagerEndOfTurn`] so far: names the latest of them.
    pub eager: u64,
}

/// What a call is told of its caller.
#[derive(Clone, Debug, PartialEq)]
pub enum HearEvent {
    /// Of a turn.
    Turn(TurnEvent),
    /// So much of what the caller said was not heard.
    Deaf {
        /// How much.
        lost: Duration,
        /// Why, for people.
        reason: String,
    },
}

/// Sound to recognise.
#[derive(Clone, Debug)]
pub struct Request {
    /// Mono at [`RATE`].
    pub pcm: Vec<i16>,
    /// BCP 47 tag, where it is known.
    pub language: Option<String>,
    /// Somebody waits for it; else it may be refused when there is other work.
    pub urgent: bool,
    /// Set when the answer is not wanted any more.
    pub stop: Stop,
}

/// Why there are no words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Trouble {
    /// There is other work, and this is not waited for.
    #[error("other work comes first")]
    Busy,
    /// Too much waits already.
    #[error("the recogniser has too much to do")]
    Overloaded,
    /// It failed; the text is for people.
    #[error("{0}")]
    Failed(String),
}

/// The answer to a [`Request`]: words, or `None` when it was stopped.
pub type Answer = Pin<Box<dyn Future<Output = Result<Option<Words>, Trouble>> + Send>>;

/// Turns sound into words, for all calls. Dropping an answer gives it up.
pub trait Recogniser: Send + Sync + 'static {
    /// The metric label.
    fn kind(&self) -> &'static str;

    /// Recognises. Returns at once; the answer comes from elsewhere.
    fn recognise(&self, request: Request) -> Answer;
}
