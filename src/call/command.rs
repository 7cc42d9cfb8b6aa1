//! What handles ask of the task of their call.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::bridge::{BridgeMode, BridgeRequest, Link, WaitTone};
use super::handle::{PlayRequest, SpeakError, TextDelta};
use super::machine::WholeTurn;
use super::settings::Interruptible;
use super::{BargeInOutcome, CallId, Dialling, EndReason, TurnId};
use crate::hear::ear::Listen;

/// What a handle asks of its call.
#[derive(Debug)]
pub enum Command {
    /// Text is on its way: the task wakes up, and that is all.
    Wake,
    /// Speak a whole turn.
    Speak {
        /// The turn.
        turn: WholeTurn,
        /// Where the answer goes.
        reply: oneshot::Sender<Result<TurnId, SpeakError>>,
    },
    /// The next piece of a streamed turn.
    Text(TextDelta),
    /// Say whether recorded audio would be taken now.
    Room {
        /// Where the answer goes.
        reply: oneshot::Sender<Result<(), SpeakError>>,
    },
    /// Play recorded audio.
    Play {
        /// How.
        request: PlayRequest,
        /// Mono at [`crate::audio::RATE`].
        clip: Arc<[f32]>,
        /// Where the answer goes.
        reply: oneshot::Sender<Result<TurnId, SpeakError>>,
    },
    /// Keep a place for recorded audio that is being fetched; [`Command::Arrived`] brings it.
    Await {
        /// How.
        request: PlayRequest,
        /// Dropped when the clip is not waited for any more.
        wanted: oneshot::Sender<std::convert::Infallible>,
        /// Where the answer goes.
        reply: oneshot::Sender<Result<TurnId, SpeakError>>,
    },
    /// Recorded audio was fetched.
    Arrived {
        /// Which turn waits for it.
        turn: TurnId,
        /// Mono at [`crate::audio::RATE`], or why there is none.
        clip: Result<Arc<[f32]>, String>,
    },
    /// The next piece of streamed audio.
    Audio {
        /// Mono samples.
        pcm: Vec<i16>,
        /// Samples per second.
        rate: u32,
        /// What cuts it off.
        interruptible: Option<Interruptible>,
    },
    /// Tell when everything queued has been sent.
    Mark(String),
    /// Cut off and forget.
    Interrupt,
    /// As [`Command::Interrupt`]; a media stream's word for it.
    Clear,
    /// Decide a pending barge-in.
    ResolveBargeIn(BargeInOutcome),
    /// Hold or resume.
    Hold(bool),
    /// Hand the peer over.
    Transfer {
        /// To whom.
        to: String,
        /// Whether we speak to them first.
        attended: bool,
        /// How long they may take to answer; `None`: as long as telephones ring.
        limit: Option<Duration>,
    },
    /// Call a human and join them with the peer.
    Bridge(BridgeRequest),
    /// No human is called, for this reason.
    BridgeRefused(String),
    /// How far that call is.
    Bridging {
        /// Which; `None`: none was placed.
        with: Option<CallId>,
        /// How far.
        state: Dialling,
        /// What the peer hears meanwhile.
        wait: WaitTone,
    },
    /// This call is one of two from now on.
    Join(Box<Link>),
    /// The agent does something else meanwhile.
    BridgeMode(BridgeMode),
    /// The bridge is not wanted any more.
    EndBridge,
    /// Send digits.
    Digits(String),
    /// Find out who answered; with `hold` nothing is said before that is known, and to a machine only after its beep.
    DetectAnswer {
        /// Whether speech waits.
        hold: bool,
    },
    /// The caller said something.
    Prompt {
        /// The words.
        text: String,
        /// BCP 47 language, or empty.
        lang: String,
    },
    /// Tell what the agent hands on.
    Handoff(String),
    /// Hear differently from now on.
    Listen(Listen),
    /// Send text on the data channel.
    Message(String),
    /// Send text on the data channel, if there is one.
    Caption(String),
    /// End when everything queued has been said.
    Finish(EndReason),
}
