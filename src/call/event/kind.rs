//! The events of a call by name, and as JSON.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{CallEvent, Dialling};
use crate::call::CallId;

/// What an event is called outside: `event` of its JSON, and what webhooks are configured by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum EventKind {
    /// An outbound call is being placed.
    Trying,
    /// Its called side rings.
    Ringing,
    /// Its called side sends sound before it answers.
    EarlyMedia,
    /// Somebody answered an outbound call.
    Answered,
    /// The called side is busy.
    Busy,
    /// The call was not answered in time.
    NoAnswer,
    /// The called side or a trunk refused.
    Refused,
    /// We gave the call up.
    Cancelled,
    /// It could not be placed.
    Failed,
    /// [`CallEvent::Connected`].
    Connected,
    /// [`CallEvent::TurnStarted`].
    TurnStarted,
    /// [`CallEvent::FirstAudio`].
    FirstAudio,
    /// [`CallEvent::Speaking`].
    Speaking,
    /// [`CallEvent::TurnEnded`].
    TurnEnded,
    /// [`CallEvent::Interrupted`].
    Interrupted,
    /// [`CallEvent::BargeInPending`].
    BargeInPending,
    /// [`CallEvent::BargeInResolved`].
    BargeInResolved,
    /// [`CallEvent::Vad`].
    Vad,
    /// [`CallEvent::Prompt`].
    Prompt,
    /// [`CallEvent::Answered`]: a caller's turn and its answer, with its latency.
    Turn,
    /// [`CallEvent::Handoff`].
    Handoff,
    /// [`CallEvent::Heard`].
    Heard,
    /// [`CallEvent::Deaf`].
    Deaf,
    /// [`CallEvent::AnsweredBy`].
    AnsweredBy,
    /// [`CallEvent::MessageOver`].
    MessageOver,
    /// [`CallEvent::Digit`].
    Dtmf,
    /// [`CallEvent::Mark`].
    Mark,
    /// [`CallEvent::Message`].
    Message,
    /// [`CallEvent::Held`].
    Held,
    /// [`CallEvent::Underrun`].
    Underrun,
    /// [`CallEvent::Flow`].
    Flow,
    /// [`CallEvent::Starved`].
    Starved,
    /// [`CallEvent::Error`].
    Error,
    /// [`CallEvent::TransferAccepted`].
    TransferAccepted,
    /// [`CallEvent::Transferred`].
    Transferred,
    /// [`CallEvent::TransferFailed`].
    TransferFailed,
    /// [`CallEvent::TransferProgress`].
    TransferProgress,
    /// [`CallEvent::HandedOver`].
    HandedOver,
    /// [`CallEvent::Bridge`].
    Bridge,
    /// [`CallEvent::Overheard`].
    Overheard,
    /// [`CallEvent::Missed`].
    Missed,
    /// [`CallEvent::PeerCause`].
    PeerCause,
    /// [`CallEvent::Ended`].
    Ended,
}

impl CallEvent {
    /// Which it is.
    pub fn kind(&self) -> EventKind {
        match self {
            CallEvent::Dialling(dialling) => match dialling {
                Dialling::Trying => EventKind::Trying,
                Dialling::Ringing { .. } => EventKind::Ringing,
                Dialling::EarlyMedia { .. } => EventKind::EarlyMedia,
                Dialling::Answered => EventKind::Answered,
                Dialling::Busy { .. } => EventKind::Busy,
                Dialling::NoAnswer { .. } => EventKind::NoAnswer,
                Dialling::Refused { .. } => EventKind::Refused,
                Dialling::Cancelled => EventKind::Cancelled,
                Dialling::Failed { .. } => EventKind::Failed,
            },
            CallEvent::Connected => EventKind::Connected,
            CallEvent::TurnStarted { .. } => EventKind::TurnStarted,
            CallEvent::FirstAudio { .. } => EventKind::FirstAudio,
            CallEvent::Speaking { .. } => EventKind::Speaking,
            CallEvent::TurnEnded { .. } => EventKind::TurnEnded,
            CallEvent::Interrupted { .. } => EventKind::Interrupted,
            CallEvent::BargeInPending { .. } => EventKind::BargeInPending,
            CallEvent::BargeInResolved { .. } => EventKind::BargeInResolved,
            CallEvent::Vad { .. } => EventKind::Vad,
            CallEvent::Prompt { .. } => EventKind::Prompt,
            CallEvent::Answered { .. } => EventKind::Turn,
            CallEvent::Handoff(_) => EventKind::Handoff,
            CallEvent::Heard(_) => EventKind::Heard,
            CallEvent::Deaf { .. } => EventKind::Deaf,
            CallEvent::AnsweredBy(_) => EventKind::AnsweredBy,
            CallEvent::MessageOver { .. } => EventKind::MessageOver,
            CallEvent::Digit(_) => EventKind::Dtmf,
            CallEvent::Mark { .. } => EventKind::Mark,
            CallEvent::Message { .. } => EventKind::Message,
            CallEvent::Held { .. } => EventKind::Held,
            CallEvent::Underrun { .. } => EventKind::Underrun,
            CallEvent::Flow { .. } => EventKind::Flow,
            CallEvent::Starved { .. } => EventKind::Starved,
            CallEvent::Error(_) => EventKind::Error,
            CallEvent::TransferAccepted => EventKind::TransferAccepted,
            CallEvent::Transferred(_) => EventKind::Transferred,
            CallEvent::TransferFailed(_) => EventKind::TransferFailed,
            CallEvent::TransferProgress(_) => EventKind::TransferProgress,
            CallEvent::HandedOver(_) => EventKind::HandedOver,
            CallEvent::Bridge { .. } => EventKind::Bridge,
            CallEvent::Overheard { .. } => EventKind::Overheard,
            CallEvent::Missed(_) => EventKind::Missed,
            CallEvent::PeerCause(_) => EventKind::PeerCause,
            CallEvent::Ended(_) => EventKind::Ended,
        }
    }

    /// As JSON: what `/v1/events` and webhooks tell of it.
    pub fn describe(&self, call: &CallId) -> Value {
        let ms = |d: &Duration| d.as_secs_f64() * 1e3;
        let mut value = match self {
            CallEvent::Dialling(dialling) => {
                json!({ "status": dialling.status(), "reason": dialling.reason() })
            }
            CallEvent::Connected => json!({}),
            CallEvent::TurnStarted { turn } => json!({ "utteranceId": turn }),
            CallEvent::FirstAudio { turn, after, immediate, stages } => {
                json!({
                    "utteranceId": turn, "afterMs": ms(after), "immediate": immediate,
                    "stages": stages.describe_own(),
                })
            }
            CallEvent::Speaking { turn, text, lasts } => {
                json!({ "utteranceId": turn, "text": text, "lastsMs": ms(lasts) })
            }
            CallEvent::TurnEnded { turn, how, heard } => {
                json!({
                    "utteranceId": turn, "how": how.label(), "reason": how.reason(),
                    "retryAfterMs": how.retry_after_ms(), "heard": heard,
                })
            }
            CallEvent::Interrupted { turn, cause, heard } => {
                json!({ "utteranceId": turn, "cause": cause, "heard": heard })
            }
            CallEvent::BargeInPending { turn, cause, grace } => {
                json!({ "utteranceId": turn, "cause": cause, "graceMs": ms(grace) })
            }
            CallEvent::BargeInResolved { turn, outcome } => {
                json!({ "utteranceId": turn, "outcome": outcome })
            }
            CallEvent::Vad { speaking } => json!({ "speaking": speaking }),
            CallEvent::Prompt { text, lang, last, eager } => {
                json!({ "text": text, "lang": lang, "last": last, "speculation": eager })
            }
            CallEvent::Answered { turn, stages } => {
                let mut event = stages.describe();
                event["utteranceId"] = json!(turn);
                event
            }
            CallEvent::Handoff(data) => json!({ "data": data }),
            CallEvent::Heard(turn) => json!({
                "phase": turn.phase, "text": turn.text, "lang": turn.language,
                "startMs": ms(&turn.start), "endMs": ms(&turn.end), "confidence": turn.confidence,
            }),
            CallEvent::Deaf { lost, reason } => json!({ "lostMs": ms(lost), "reason": reason }),
            CallEvent::Digit(digit) => json!({ "digit": digit }),
            CallEvent::AnsweredBy(by) => json!({ "by": by }),
            CallEvent::MessageOver { beep } => json!({ "beep": beep }),
            CallEvent::Mark { name, played } => json!({ "name": name, "played": played }),
            // What a browser writes to its agent is between them.
            CallEvent::Message { bytes } => json!({ "bytes": bytes }),
            CallEvent::Held { held, by_peer } => json!({ "held": held, "byPeer": by_peer }),
            CallEvent::Underrun { turn, gap } => json!({ "utteranceId": turn, "gapMs": ms(gap) }),
            CallEvent::Flow { open } => json!({ "open": open }),
            CallEvent::Starved { turn } => json!({ "utteranceId": turn }),
            CallEvent::Error(message) => json!({ "message": message }),
            CallEvent::TransferAccepted => json!({}),
            CallEvent::TransferFailed(reason) => json!({ "error": reason }),
            CallEvent::TransferProgress(status) => json!({ "status": status }),
            CallEvent::HandedOver(with) => json!({ "to": with }),
            CallEvent::Transferred(outcome) => json!({ "error": outcome.as_ref().err() }),
            CallEvent::Bridge { with, state } => {
                let mut event = state.describe();
                event["with"] = json!(with);
                event
            }
            CallEvent::Overheard { speaker, text, lang } => {
                json!({ "speaker": speaker, "text": text, "lang": lang })
            }
            CallEvent::Missed(missed) => json!({
                "cause": missed.label(), "status": missed.status, "reason": missed.reason, "trunk": missed.trunk,
                "peerCause": missed.cause,
            }),
            CallEvent::PeerCause(cause) => json!(cause),
            CallEvent::Ended(reason) => json!({ "reason": reason }),
        };
        value["event"] = json!(self.kind());
        value["callId"] = json!(call);
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::TurnId;

    #[test]
    fn an_event_is_called_what_its_kind_is_called() {
        let call = CallId::from("7");
        for dialling in [Dialling::Trying, Dialling::Ringing { status: 180 }, Dialling::NoAnswer { status: None }] {
            // Calls and records have it by the same name.
            let label = dialling.label();
            assert_eq!(CallEvent::Dialling(dialling).describe(&call)["event"], label);
        }
        let told = CallEvent::TurnStarted { turn: TurnId::from("t") }.describe(&call);
        assert_eq!(told, json!({ "event": "turnStarted", "utteranceId": "t", "callId": "7" }));
        assert_eq!(CallEvent::Digit('5').describe(&call), json!({ "event": "dtmf", "digit": "5", "callId": "7" }));
        let kind: EventKind = serde_json::from_value(json!("bargeInPending")).expect("a kind");
        assert_eq!(kind, EventKind::BargeInPending);
    }
}
