//! `GET /v1/calls/{id}/media`: both directions of a call's audio as Twilio Media Streams frames.
//!
//! For speech recognition and recording. Audio is mu-law at 8 kHz, 20 ms a frame, both tracks; with `?rate=leg` that of
//! the leg: a wideband call (G.722, Opus) comes as 16-bit little-endian samples at 16 kHz, the rate that callers are heard
//! at here. The client may play audio into the call (`media`, in the same form), ask when it has been sent (`mark`) and
//! throw away what waits (`clear`).

use axum::extract::rejection::QueryRejection;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Deserialize;
use tokio::sync::broadcast;

use super::auth::Caller;
use super::error::ApiError;
use super::sockets::{Pulse, bounded, close, ping, write};
use crate::agent::media::frames::{Form, Framing, Order};
use crate::audio;
use crate::call::{CallEvent, CallHandle, SpeakError, TapDirection};
use crate::gateway::Gateway;
use crate::media::leg::Codec;

/// A second of mu-law in base64 with room for the frame around it, times eight: clients send in pieces.
const MAX_FRAME: usize = 128 << 10;

/// `?rate=`; a browser's `access_token` may stand beside it.
#[derive(Deserialize)]
pub(super) struct Wanted {
    #[serde(default)]
    rate: Rate,
}

/// Which rate a client asks for.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
enum Rate {
    #[default]
    #[serde(rename = "8000")]
    Narrow,
    #[serde(rename = "16000")]
    Wide,
    #[serde(rename = "leg")]
    Leg,
}

/// What `rate` means on a leg with this codec.
fn form_of(rate: Rate, codec: &str) -> Form {
    match (rate, Codec::labelled(codec)) {
        (Rate::Narrow, _) | (Rate::Leg, Some(Codec::Pcmu | Codec::Pcma)) => Form::MuLaw,
        (Rate::Leg, Some(Codec::Opus | Codec::G722) | None) | (Rate::Wide, _) => Form::Linear(16_000),
    }
}

/// Upgrades and streams until the call or the client ends.
///
/// # Errors
/// 400 for an unknown rate; 404 when there is no such call, or it is another tenant's.
pub(super) async fn stream(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
    wanted: Result<Query<Wanted>, QueryRejection>,
    upgrade: WebSocketUpgrade,
) -> Result<Response, ApiError> {
    let Query(wanted) =
        wanted.map_err(|_| ApiError::bad_request("invalid_rate", "`rate` is 8000, 16000 or leg").param("rate"))?;
    let handle = super::calls::find(&gateway, &caller, &id).await?;
    let form = form_of(wanted.rate, handle.info().codec);
    let framing = Framing::new(handle.id().clone(), form)
        .map_err(|error| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "no_stream", error))?;
    Ok(bounded(upgrade, MAX_FRAME)
        .on_upgrade(move |socket| Stream { handle, is_wide: form.is_wide(), framing }.run(socket)))
}

struct Stream {
    handle: CallHandle,
    is_wide: bool,
    framing: Framing,
}

impl Stream {
    async fn run(mut self, mut socket: WebSocket) {
        let mut tap = if self.is_wide { self.handle.wide_tap() } else { self.handle.media_tap() };
        let mut events = self.handle.events();
        let connected = self.framing.connected();
        let start = self.framing.start(self.handle.meta(), &[TapDirection::Inbound, TapDirection::Outbound]);
        if !(write(&mut socket, connected).await && write(&mut socket, start).await) {
            return;
        }
        let mut pulse = Pulse::new();
        loop {
            let frame = tokio::select! {
                lives = pulse.due() => {
                    if !lives || !ping(&mut socket).await {
                        return;
                    }
                    None
                }
                // Frames that a slow reader loses are counted and show in the timestamps; the call is not delayed.
                frame = tap.recv() => match frame {
                    Some(frame) => self.framing.media(&frame),
                    None => break,
                },
                event = events.recv() => match event {
                    Ok(CallEvent::Digit(digit)) => Some(self.framing.dtmf(digit)),
                    Ok(CallEvent::Mark { name, .. }) => Some(self.framing.mark(&name)),
                    Ok(CallEvent::Ended(_)) | Err(broadcast::error::RecvError::Closed) => break,
                    Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => None,
                },
                message = socket.recv() => match message.inspect(|_| pulse.heard()) {
                    Some(Ok(Message::Text(text))) => {
                        self.obey(&text).err().map(|reason| self.framing.error(&reason))
                    }
                    Some(Ok(Message::Binary(_) | Message::Ping(_) | Message::Pong(_))) => None,
                    Some(Err(error)) => return super::sockets::fail(&mut socket, error).await,
                    Some(Ok(Message::Close(_))) | None => return,
                },
            };
            if let Some(frame) = frame
                && !write(&mut socket, frame).await
            {
                return;
            }
        }
        let stop = self.framing.stop();
        if write(&mut socket, stop).await {
            close(&mut socket).await;
        }
    }

    fn obey(&mut self, text: &str) -> Result<(), String> {
        let play = |pcm: Vec<i16>| match pcm.is_empty() {
            true => Ok(()),
            false => self.handle.inject_audio(pcm, audio::RATE, None),
        };
        let done: Result<(), SpeakError> = match self.framing.read(text)? {
            Some(Order::Play(pcm)) => play(pcm),
            Some(Order::Mark { rest, name }) => play(rest).and_then(|()| self.handle.mark(name)),
            Some(Order::Clear) => self.handle.clear(),
            None => Ok(()),
        };
        done.map_err(|error| error.to_string())
    }
}

/// Reads `text` as a frame of a client, sound of every form included; for fuzzing.
pub(super) fn fuzz(text: &str) {
    for form in [Form::MuLaw, Form::Linear(16_000), Form::Linear(24_000)] {
        if let Ok(mut framing) = Framing::new("fuzz".into(), form) {
            let _ = framing.read(text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leg_is_heard_at_its_own_rate_where_that_is_asked_for() {
        for (rate, codec, form) in [
            ("8000", "opus", Form::MuLaw),
            ("leg", "pcmu", Form::MuLaw),
            ("leg", "pcma", Form::MuLaw),
            ("leg", "g722", Form::Linear(16_000)),
            ("leg", "opus", Form::Linear(16_000)),
            ("16000", "pcmu", Form::Linear(16_000)),
        ] {
            let wanted: Wanted = serde_json::from_value(serde_json::json!({ "rate": rate })).expect("a rate");
            assert_eq!(form_of(wanted.rate, codec), form, "{rate} of {codec}");
        }
        assert!(serde_json::from_value::<Wanted>(serde_json::json!({ "rate": "44100" })).is_err());
    }
}
