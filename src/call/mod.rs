//! One call, from leg to agent.
//!
//! A call is one task on one media shard. It owns the leg, the codec, the playout clock and everything that
//! is queued to be said; others hold a [`CallHandle`] and send. All decisions are made by a machine without
//! I/O (`machine`); `task` is the loop that moves packets and time in and out of it.
//!
//! Contract: text that was accepted is spoken in order, cut short by an event that says what was heard, or
//! ended by an event that says why it was not spoken. Exactly one [`CallEvent::Ended`] closes a call.
//!
//! # Why
//! - One owner, one loop: barge-in flushes the playout in the same wake that noticed it, with nothing to ask.
//! - Every turn has its own epoch rather than every call: an interruption that must spare a turn
//!   (`interruptible: none`) cancels the others without touching it.
//! - Text waits here, not in the engine: only a few utterances of a call are with the engine at a
//!   time, so an agent that floods one call holds its own text and nothing of the device.

#[cfg(feature = "bench")]
pub mod bench;
pub mod bridge;
mod caller;
pub mod command;
pub mod event;
pub mod handle;
mod heard;
pub mod info;
pub mod machine;
pub mod messages;
mod meters;
pub mod registry;
pub mod segment;
pub mod settings;
mod source;
pub mod speech;
mod task;
mod witness;

pub use bridge::{BridgeMode, BridgeRequest, BridgeState, Speaker};
pub use event::{
    BargeInOutcome, CallEvent, Cause, Dialling, Direction, EndReason, EventKind, Heard, Missed, Precision, Stages,
    TurnHow,
};
pub use handle::{CallHandle, CallMeta, PlayRequest, SpeakError, Style, TextDelta, TurnRequest};
pub use info::{CallInfo, MediaFrame, MediaTap, TapDirection};
pub use machine::{streamed_utterances, utterances};
pub use messages::{Messages, PeerMessage};
pub use registry::{Arriving, Calls, Grace, StartError};
pub use settings::{BargeIn, CallConfig, Interruptible};
pub use speech::{Refusal, Speech, StreamState};
pub use witness::Witness;

use std::fmt;
use std::sync::Arc;

use serde::{Serialize, Serializer};

use crate::node::{NodeName, fresh_id};

/// Names one call: what `/v1/calls/{id}` takes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallId(Arc<str>);

impl CallId {
    /// A new random id.
    pub fn random() -> Self {
        Self::of(None)
    }

    /// A new random id that names the machine, where there are others.
    pub fn of(node: Option<&NodeName>) -> Self {
        Self(fresh_id(node).into())
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Serialize for CallId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl From<&str> for CallId {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for CallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Names one turn of a call: `utteranceId` on the wire, because that is what agents call it. Chosen by the
/// agent, else made here.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TurnId(Arc<str>);

impl TurnId {
    /// A new id, unique in this process.
    pub fn next() -> Self {
        Self(crate::turn::UtteranceId::next().to_string().into())
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Serialize for TurnId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl From<&str> for TurnId {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for TurnId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
