//! `GET /v1/events`: what happens on all calls and devices, as server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures_util::stream::{self, Stream};
use serde_json::{Value, json};
use tokio::sync::broadcast;

use crate::call::{CallEvent, CallId};
use crate::gateway::Gateway;

/// How often the state of the devices is told.
const DEVICES_EVERY: Duration = Duration::from_secs(1);

/// The stream. A reader that falls behind is told how many events it lost. Trunks are told of when it begins, and when
/// something about them has changed.
pub async fn stream(State(gateway): State<Gateway>) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let events = gateway.calls.events();
    let tick = tokio::time::interval(DEVICES_EVERY);
    let trunks = Vec::new();
    let stream =
        stream::unfold((events, tick, trunks, gateway), |(mut events, mut tick, mut trunks, gateway)| async move {
            let (name, data) = tokio::select! {
                event = events.recv() => match event {
                    Ok((id, event)) => ("call", describe(&id, &event)),
                    Err(broadcast::error::RecvError::Lagged(lost)) => ("lagged", json!({ "lost": lost })),
                    Err(broadcast::error::RecvError::Closed) => return None,
                },
                _ = tick.tick() => {
                    let before = std::mem::replace(&mut trunks, super::admin::trunks(&gateway));
                    if before != trunks {
                        ("trunks", json!({ "trunks": trunks }))
                    } else {
                        ("scheduler", json!({ "devices": super::admin::devices(&gateway) }))
                    }
                }
            };
            let event = Event::default().event(name).json_data(data).expect("plain JSON");
            Some((Ok(event), (events, tick, trunks, gateway)))
        });
    Sse::new(stream).keep_alive(KeepAlive::default())
}

/// One event of a call as JSON.
pub fn describe(id: &CallId, event: &CallEvent) -> Value {
    let ms = |d: &Duration| d.as_secs_f64() * 1e3;
    let mut value = match event {
        CallEvent::Dialling(dialling) => {
            json!({ "event": dialling.label(), "status": dialling.status(), "reason": dialling.reason() })
        }
        CallEvent::Connected => json!({ "event": "connected" }),
        CallEvent::TurnStarted { turn } => json!({ "event": "turnStarted", "utteranceId": turn }),
        CallEvent::FirstAudio { turn, after, immediate } => {
            json!({ "event": "firstAudio", "utteranceId": turn, "afterMs": ms(after), "immediate": immediate })
        }
        CallEvent::Speaking { turn, text, lasts } => {
            json!({ "event": "speaking", "utteranceId": turn, "text": text, "lastsMs": ms(lasts) })
        }
        CallEvent::TurnEnded { turn, how, heard } => {
            json!({
                "event": "turnEnded", "utteranceId": turn, "how": how.label(), "reason": how.reason(),
                "retryAfterMs": how.retry_after_ms(), "heard": heard,
            })
        }
        CallEvent::Interrupted { turn, cause, heard } => {
            json!({ "event": "interrupted", "utteranceId": turn, "cause": cause, "heard": heard })
        }
        CallEvent::BargeInPending { turn, cause, grace } => {
            json!({ "event": "bargeInPending", "utteranceId": turn, "cause": cause, "graceMs": ms(grace) })
        }
        CallEvent::BargeInResolved { turn, outcome } => {
            json!({ "event": "bargeInResolved", "utteranceId": turn, "outcome": outcome })
        }
        CallEvent::Vad { speaking } => json!({ "event": "vad", "speaking": speaking }),
        CallEvent::Prompt { text, lang, last, eager } => {
            json!({ "event": "prompt", "text": text, "lang": lang, "last": last, "speculation": eager })
        }
        CallEvent::Answered { turn, stages } => {
            let mut event = stages.describe();
            event["event"] = json!("turn");
            event["utteranceId"] = json!(turn);
            event
        }
        CallEvent::Handoff(data) => json!({ "event": "handoff", "data": data }),
        CallEvent::Heard(turn) => json!({
            "event": "heard", "phase": turn.phase, "text": turn.text, "lang": turn.language,
            "startMs": ms(&turn.start), "endMs": ms(&turn.end), "confidence": turn.confidence,
        }),
        CallEvent::Deaf { lost, reason } => json!({ "event": "deaf", "lostMs": ms(lost), "reason": reason }),
        CallEvent::Digit(digit) => json!({ "event": "dtmf", "digit": digit }),
        CallEvent::AnsweredBy(by) => json!({ "event": "answeredBy", "by": by }),
        CallEvent::MessageOver { beep } => json!({ "event": "messageOver", "beep": beep }),
        CallEvent::Mark { name, played } => json!({ "event": "mark", "name": name, "played": played }),
        // What a browser writes to its agent is between them.
        CallEvent::Message { bytes } => json!({ "event": "message", "bytes": bytes }),
        CallEvent::Held { held, by_peer } => json!({ "event": "held", "held": held, "byPeer": by_peer }),
        CallEvent::Underrun { turn, gap } => json!({ "event": "underrun", "utteranceId": turn, "gapMs": ms(gap) }),
        CallEvent::Flow { open } => json!({ "event": "flow", "open": open }),
        CallEvent::Starved { turn } => json!({ "event": "starved", "utteranceId": turn }),
        CallEvent::Error(message) => json!({ "event": "error", "message": message }),
        CallEvent::TransferAccepted => json!({ "event": "transferAccepted" }),
        CallEvent::TransferFailed(reason) => json!({ "event": "transferFailed", "error": reason }),
        CallEvent::Transferred(outcome) => json!({ "event": "transferred", "error": outcome.as_ref().err() }),
        CallEvent::Ended(reason) => json!({ "event": "ended", "reason": reason }),
    };
    value["callId"] = json!(id);
    value
}
