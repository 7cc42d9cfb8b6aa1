//! Two calls that are joined: a caller, and a human who was called for them.
//!
//! Both are calls of their own, each with its leg, codec, limits and record; joined, each fills what it sends with what
//! the other hears. The caller's call is the one that an agent serves: it asks for the bridge, says what its agent does
//! meanwhile, and outlives it. The human's call has no agent and ends with the bridge.
//!
//! The two ends of a [`Link`] are bounded channels: a call that takes nothing loses sound and never holds up the other.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::command::Command;
use super::handle::CallHandle;
use super::{CallId, Dialling, EndReason, SpeakError};
use crate::media::decode;
use crate::media::relay::Sound;

/// Pieces that may wait for the other call: more than a second.
const PIECES: usize = 64;

/// What the agent does while the caller speaks with a human.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BridgeMode {
    /// It hears and says nothing.
    #[default]
    Leave,
    /// It hears both, and says nothing.
    Listen,
    /// It hears both, and speaks to the human only.
    Whisper,
    /// It hears both and speaks to both.
    Join,
}

impl BridgeMode {
    /// Its name in frames, events and records.
    pub fn label(self) -> &'static str {
        match self {
            BridgeMode::Leave => "leave",
            BridgeMode::Listen => "listen",
            BridgeMode::Whisper => "whisper",
            BridgeMode::Join => "join",
        }
    }

    /// Whether the agent is told what is said.
    pub fn hears(self) -> bool {
        self != BridgeMode::Leave
    }

    /// Whether the agent may speak.
    pub fn speaks(self) -> bool {
        matches!(self, BridgeMode::Whisper | BridgeMode::Join)
    }
}

/// A human to be called and joined with the caller.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BridgeRequest {
    /// Who: a SIP URI or a number, as of an outbound call.
    pub to: String,
    /// Who calls; `None`: as the trunk has it.
    #[serde(default)]
    pub from: Option<String>,
    /// Through which trunk; `None`: the one that serves the number.
    #[serde(default)]
    pub trunk: Option<String>,
    /// What the agent does once they speak.
    #[serde(default)]
    pub mode: BridgeMode,
    /// What the caller hears where the agent says nothing, until somebody picks up.
    #[serde(default)]
    pub wait: WaitTone,
    /// How long it may ring, in seconds; `None`: as of outbound calls.
    #[serde(default)]
    pub ring_timeout_s: Option<u64>,
}

/// What a caller hears while another telephone rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WaitTone {
    /// The ringing tone.
    #[default]
    Ringback,
    /// Nothing but the agent.
    None,
}

/// What is told of a bridge.
#[derive(Clone, Debug, PartialEq)]
pub enum BridgeState {
    /// The human's telephone, until it is picked up or not. Where it is over, nothing follows: the caller is with the agent.
    Dialling(Dialling),
    /// They speak; or the agent does something else from now on.
    Connected(BridgeMode),
    /// The human has hung up (or whatever ended that call), or was asked to go: the caller is with the agent again. `None`:
    /// the agent or the API ended it.
    Ended(Option<EndReason>),
}

impl BridgeState {
    /// Its name in frames, events and records.
    pub fn label(&self) -> &'static str {
        match self {
            BridgeState::Dialling(dialling) => dialling.label(),
            BridgeState::Connected(_) => "connected",
            BridgeState::Ended(_) => "ended",
        }
    }

    /// As JSON, without whose bridge it is.
    pub fn describe(&self) -> serde_json::Value {
        let mut value = serde_json::json!({ "state": self.label() });
        match self {
            BridgeState::Dialling(dialling) => {
                value["status"] = serde_json::json!(dialling.status());
                value["reason"] = serde_json::json!(dialling.reason());
            }
            BridgeState::Connected(mode) => value["mode"] = serde_json::json!(mode),
            BridgeState::Ended(reason) => value["reason"] = serde_json::json!(reason),
        }
        value
    }
}

/// Whose words they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Speaker {
    /// The caller's.
    Caller,
    /// The human's.
    Human,
}

/// Which call of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The one with an agent, which does this.
    Caller(BridgeMode),
    /// The other.
    Human,
    /// The one with an agent while the other rings: its peer hears what is played there, and speaks with its agent.
    Waiting,
    /// The other, which is not answered: what comes of it before that goes to the one that waits.
    Ringing,
}

/// What goes from one call to the other.
#[derive(Debug)]
pub enum Piece {
    /// 20 ms as it was heard.
    Heard(Box<[i16; decode::FRAME]>),
    /// The peer chose to send nothing for so long.
    Silence(Duration),
    /// 20 ms that the agent says to the human.
    Whisper(Box<Sound>),
    /// The peer pressed a key.
    Digit(char),
    /// The human said something.
    Said {
        /// The words.
        text: String,
        /// BCP 47 language, or empty.
        lang: String,
    },
    /// The call is over.
    Over(EndReason),
}

/// One call's end of a bridge.
#[derive(Debug)]
pub struct Link {
    /// What this call is in it.
    pub role: Role,
    /// The other call.
    pub with: CallId,
    /// To the other.
    pub to: LinkSender,
    /// From the other; `None` when its sender is gone, with its call or with the bridge.
    pub from: mpsc::Receiver<Piece>,
}

impl Link {
    /// Both ends: the caller's and the human's.
    pub fn pair(caller: CallId, human: CallId, mode: BridgeMode) -> (Link, Link) {
        Self::between(caller, human, [Role::Caller(mode), Role::Human])
    }

    /// Both ends before the human has picked up.
    pub fn ahead(caller: CallId, human: CallId) -> (Link, Link) {
        Self::between(caller, human, [Role::Waiting, Role::Ringing])
    }

    fn between(caller: CallId, human: CallId, [of_caller, of_human]: [Role; 2]) -> (Link, Link) {
        let (to_human, from_caller) = mpsc::channel(PIECES);
        let (to_caller, from_human) = mpsc::channel(PIECES);
        let end = |role, with, to, from| Link { role, with, to: LinkSender(to), from };
        (end(of_caller, human, to_human, from_human), end(of_human, caller, to_caller, from_caller))
    }
}

/// Where a call puts what the other is to get.
#[derive(Clone, Debug)]
pub struct LinkSender(mpsc::Sender<Piece>);

impl LinkSender {
    /// Sends one piece.
    pub fn send(&self, piece: Piece) {
        // overflow: drops (counted): the other call is stuck or over, and must not hold up this one
        if let Err(mpsc::error::TrySendError::Full(_)) = self.0.try_send(piece) {
            metrics::counter!("antiphon_bridge_dropped_total").increment(1);
        }
    }
}

/// Whether a call is bridged, or about to be.
#[derive(Debug, Default)]
pub(super) struct Bridging {
    /// There is one, or will be; ends what dials for it. Locked for a moment, a few times a bridge.
    taken: Mutex<Option<CancellationToken>>,
    with: Mutex<Option<(CallId, BridgeMode)>>,
}

impl Bridging {
    /// Takes the one bridge that a call may have, and gives what ends the dialling; `None`: it is taken.
    pub(super) fn take(&self) -> Option<CancellationToken> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.is_some() {
            return None;
        }
        Some(taken.insert(CancellationToken::new()).clone())
    }

    pub(super) fn give_back(&self) {
        *self.taken.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The task that dials for it gives up; `false`: there is none.
    pub(super) fn cancel(&self) -> bool {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.as_ref().map(CancellationToken::cancel).is_some()
    }

    /// Whether it was given up before it began.
    pub(super) fn is_cancelled(&self) -> bool {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.as_ref().is_some_and(CancellationToken::is_cancelled)
    }

    pub(super) fn set(&self, with: Option<(CallId, BridgeMode)>) {
        *self.with.lock().unwrap_or_else(PoisonError::into_inner) = with;
    }

    pub(super) fn with(&self) -> Option<(CallId, BridgeMode)> {
        self.with.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl CallHandle {
    /// Whether its peer speaks with the peer of another call.
    pub fn is_bridged(&self) -> bool {
        self.shared.bridging.with().is_some()
    }

    /// Calls a human and joins them with the peer, told as [`super::CallEvent::Bridge`].
    ///
    /// # Errors
    /// The call takes no more commands. What is wrong with the request is told as an event.
    pub fn bridge(&self, request: BridgeRequest) -> Result<(), SpeakError> {
        self.send(Command::Bridge(request))
    }

    /// Changes what the agent does on a bridged call.
    ///
    /// # Errors
    /// The call is not bridged, or takes no more commands.
    pub fn set_bridge_mode(&self, mode: BridgeMode) -> Result<(), SpeakError> {
        match self.shared.bridging.with() {
            Some(_) => self.send(Command::BridgeMode(mode)),
            None => Err(SpeakError::Invalid("the call is not bridged; `to` says whom to call".into())),
        }
    }

    /// Ends the bridge, or gives up the call that is to become one: the peer is with its agent again.
    ///
    /// # Errors
    /// There is none, or the call takes no more commands.
    pub fn end_bridge(&self) -> Result<(), SpeakError> {
        if self.shared.bridging.cancel() || self.shared.bridging.with().is_some() {
            self.send(Command::EndBridge)
        } else {
            Err(SpeakError::Invalid("the call is not bridged".into()))
        }
    }

    /// Tells the agent that no human is called.
    pub(crate) fn bridge_refused(&self, reason: String) {
        // overflow: refused; the agent hears nothing of it, as of all else it asks for now
        let _ = self.send(Command::BridgeRefused(reason));
    }

    /// Keeps the one bridge that the call may have; `None`: there is one.
    pub(crate) fn claim_bridge(&self) -> Option<BridgeClaim> {
        let given_up = self.shared.bridging.take()?;
        Some(BridgeClaim { call: self.clone(), given_up, kept: false })
    }
}

/// The bridge of a call, from being asked for on. Dropped, it leaves room for another; once its dialling has begun, the
/// call itself says when it is over.
#[derive(Debug)]
pub(crate) struct BridgeClaim {
    call: CallHandle,
    given_up: CancellationToken,
    kept: bool,
}

impl BridgeClaim {
    /// The caller's call.
    pub(crate) fn call(&self) -> &CallHandle {
        &self.call
    }

    /// Says that it is not wanted any more.
    pub(crate) fn given_up(&self) -> &CancellationToken {
        &self.given_up
    }

    /// The dialling begins: its end will be told.
    pub(crate) fn keep(&mut self) {
        self.kept = true;
    }

    /// Tells the call how far the dialling is. `wait`: what its peer hears meanwhile.
    pub(crate) fn tell(&self, with: Option<CallId>, state: Dialling, wait: WaitTone) {
        let over = state.is_over();
        // overflow: refused: a call that is so far behind is told nothing of a telephone that rings
        if self.call.send(Command::Bridging { with, state, wait }).is_err() && over {
            self.call.shared.bridging.give_back();
        }
    }

    /// Lets the call hear what `human`'s network plays before somebody picks up there.
    pub(crate) fn hear(&self, human: &CallHandle) {
        let (caller, other) = Link::ahead(self.call.id().clone(), human.id().clone());
        // overflow: refused: the ringing tone goes on
        if human.send(Command::Join(Box::new(other))).is_ok() {
            let _ = self.call.send(Command::Join(Box::new(caller)));
        }
    }

    /// Joins the call with `human`.
    ///
    /// # Errors
    /// One of them takes no more commands; the human's call is then to be ended.
    pub(crate) fn join(&self, human: &CallHandle, mode: BridgeMode) -> Result<(), SpeakError> {
        let (caller, other) = Link::pair(self.call.id().clone(), human.id().clone(), mode);
        human.send(Command::Join(Box::new(other)))?;
        self.call.send(Command::Join(Box::new(caller)))
    }
}

impl Drop for BridgeClaim {
    fn drop(&mut self) {
        if !self.kept {
            self.call.shared.bridging.give_back();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::shown::Shown;

    #[test]
    fn a_call_has_one_bridge_at_a_time() {
        let bridging = Bridging::default();
        assert!(!bridging.cancel(), "there is nothing to cancel");
        let dialling = bridging.take().expect("free");
        assert!(bridging.take().is_none());
        assert!(bridging.cancel() && dialling.is_cancelled());
        bridging.give_back();
        assert!(!bridging.take().expect("free again").is_cancelled(), "what ended the last one is no end of this one");
    }

    #[test]
    fn a_call_that_takes_nothing_loses_pieces_and_does_not_hold_up_the_other() {
        let (caller, mut human) = Link::pair("a".into(), "b".into(), BridgeMode::Listen);
        assert_eq!((caller.role, human.role), (Role::Caller(BridgeMode::Listen), Role::Human));
        assert_eq!((caller.with.as_str(), human.with.as_str()), ("b", "a"));
        let shown = Shown::here();
        (0..1_000).for_each(|_| caller.to.send(Piece::Digit('1')));
        let came = std::iter::from_fn(|| human.from.try_recv().ok()).count();
        assert_eq!(came, PIECES);
        assert_eq!(shown.sum("antiphon_bridge_dropped_total"), (1_000 - PIECES) as f64);
        drop(caller);
        assert!(matches!(human.from.try_recv(), Err(mpsc::error::TryRecvError::Disconnected)));
    }

    #[test]
    fn a_request_needs_only_a_destination() {
        let request: BridgeRequest = serde_json::from_str(r#"{"to":"+49301","mode":"whisper"}"#).expect("valid");
        assert_eq!((request.mode, request.wait), (BridgeMode::Whisper, WaitTone::Ringback));
        assert!(serde_json::from_str::<BridgeRequest>(r#"{"mode":"leave"}"#).is_err());
    }

    #[test]
    fn states_are_told_by_name() {
        let busy = BridgeState::Dialling(Dialling::Busy { status: 486 });
        assert_eq!(busy.describe(), serde_json::json!({ "state": "busy", "status": 486, "reason": null }));
        let ended = BridgeState::Ended(Some(EndReason::Remote));
        assert_eq!(ended.describe(), serde_json::json!({ "state": "ended", "reason": "remote" }));
        let up = BridgeState::Connected(BridgeMode::Join);
        assert_eq!(up.describe(), serde_json::json!({ "state": "connected", "mode": "join" }));
    }
}
