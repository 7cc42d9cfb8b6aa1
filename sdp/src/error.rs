//! What was wrong, and where.

use thiserror::Error;

/// A description that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: {reason}")]
pub struct ParseError {
    /// Line, counted from 1; 0 where the whole is meant.
    pub line: usize,
    /// What is wrong with it.
    pub reason: String,
}

impl ParseError {
    pub(crate) fn new(line: usize, reason: impl Into<String>) -> ParseError {
        ParseError { line, reason: reason.into() }
    }
}

/// An offer or answer that leads to no session.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NegotiateError {
    /// There is no active `m=audio` line over RTP.
    #[error("there is no m=audio line over RTP with a port")]
    NoAudio,
    /// No codec of ours is offered.
    #[error("none of our codecs ({ours}) is among those offered ({theirs})")]
    NoCommonCodec {
        /// Names of ours.
        ours: String,
        /// Their formats as written.
        theirs: String,
    },
    /// Encryption is required and not offered, or offered in no form we have.
    #[error("{0}")]
    Encryption(&'static str),
    /// The address is none that media can be sent to.
    #[error("the connection address `{0}` is not a unicast IP address")]
    Address(String),
    /// The answer does not fit the offer it answers.
    #[error("the answer does not fit the offer: {0}")]
    Mismatch(&'static str),
}
