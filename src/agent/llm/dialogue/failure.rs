//! Why a model gave no answer.

use std::time::Duration;

/// Why a request gave no answer, or not all of it. Closed: also a metric label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// No connection, or it broke before a response.
    Unreachable(String),
    /// A status that is no success.
    Status {
        /// Which.
        code: u16,
        /// What the server says, for the log.
        message: String,
        /// When it wants to be asked again.
        retry_after: Option<Duration>,
    },
    /// No word came in time.
    FirstToken,
    /// Words came, and then none.
    Stalled,
    /// The response is no stream of chunks.
    Garbage(String),
    /// The stream ended before the answer.
    Cut,
    /// Nothing was said in it.
    Empty,
    /// The model called tools again and again.
    TooManyRounds,
}

impl Failure {
    /// The metric label.
    pub fn label(&self) -> &'static str {
        match self {
            Failure::Unreachable(_) => "unreachable",
            Failure::Status { code: 429, .. } => "overloaded",
            Failure::Status { code: 500.., .. } => "server_error",
            Failure::Status { .. } => "refused",
            Failure::FirstToken => "first_token",
            Failure::Stalled => "stalled",
            Failure::Garbage(_) => "garbage",
            Failure::Cut => "cut",
            Failure::Empty => "empty",
            Failure::TooManyRounds => "tools",
        }
    }

    /// Whether the same request may do better.
    pub(super) fn may_pass(&self) -> bool {
        match self {
            Failure::Status { code, .. } => matches!(code, 408 | 409 | 425 | 429 | 500..),
            Failure::TooManyRounds => false,
            _ => true,
        }
    }

    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self {
            Failure::Status { retry_after, .. } => *retry_after,
            _ => None,
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::Unreachable(why) => write!(f, "the model cannot be reached: {why}"),
            Failure::Status { code, message, .. } => write!(f, "the model's server answered {code}: {message}"),
            Failure::FirstToken => f.write_str("no word of the model in time"),
            Failure::Stalled => f.write_str("the model stopped in the middle of its answer"),
            Failure::Garbage(why) => write!(f, "the model's server sent garbage: {why}"),
            Failure::Cut => f.write_str("the stream ended before the answer"),
            Failure::Empty => f.write_str("the answer was empty"),
            Failure::TooManyRounds => f.write_str("the model called tools without end"),
        }
    }
}
