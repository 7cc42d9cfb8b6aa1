//! `GET /v1/calls/{id}/media`: both directions of a call's audio as Twilio Media Streams frames.
//!
//! For speech recognition and recording. Audio is mu-law at 8 kHz, 20 ms a frame, both tracks; with `?rate=leg` that of
//! the leg: a wideband call (G.722, Opus) comes as 16-bit little-endian samples at 16 kHz, the rate that callers are heard
//! at here. The client may play audio into the call (`media`, in the same form), ask when it has been sent (`mark`) and
//! throw away what waits (`clear`).

use audio_codec::{
    Decoder, Encoder,
    pcmu::{PcmuDecoder, PcmuEncoder},
};
use axum::extract::rejection::QueryRejection;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::extract::{Path, Query, State};
use axum::response::Response;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::broadcast;

use super::auth::Caller;
use super::error::ApiError;
use super::sockets::{Pulse, ping, write};
use crate::call::{CallEvent, CallHandle, MediaFrame, TapDirection};
use crate::gateway::Gateway;
use crate::media::leg::Codec;

/// A second of mu-law in base64 with room for the frame around it, times eight: clients send in pieces.
const MAX_FRAME: usize = 128 << 10;

/// `?rate=`
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
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

/// How samples are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Mu-law at 8 kHz.
    MuLaw,
    /// 16-bit little-endian samples at 16 kHz.
    Linear,
}

impl Form {
    /// What `rate` means on a leg with this codec.
    fn of(rate: Rate, codec: &str) -> Self {
        let narrow = [Codec::Pcmu, Codec::Pcma].iter().any(|narrow| narrow.label() == codec);
        match rate {
            Rate::Narrow => Form::MuLaw,
            Rate::Leg if narrow => Form::MuLaw,
            Rate::Leg | Rate::Wide => Form::Linear,
        }
    }

    fn rate(self) -> u32 {
        match self {
            Form::MuLaw => 8_000,
            Form::Linear => 16_000,
        }
    }

    fn encoding(self) -> &'static str {
        match self {
            Form::MuLaw => "audio/x-mulaw",
            Form::Linear => "audio/x-l16",
        }
    }

    /// The samples of what a client sends.
    fn decode(self, bytes: &[u8]) -> Result<Vec<i16>, String> {
        match self {
            Form::MuLaw => Ok(PcmuDecoder::new().decode(bytes)),
            Form::Linear if !bytes.len().is_multiple_of(2) => {
                Err(format!("media.payload: {} bytes are no whole number of 16-bit samples", bytes.len()))
            }
            Form::Linear => {
                Ok(bytes.chunks_exact(2).map(|sample| i16::from_le_bytes([sample[0], sample[1]])).collect())
            }
        }
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
    Ok(upgrade
        .max_message_size(MAX_FRAME)
        .max_frame_size(MAX_FRAME)
        .on_upgrade(move |socket| Stream::new(handle, wanted.rate).run(socket)))
}

struct Stream {
    handle: CallHandle,
    id: String,
    form: Form,
    sequence: u64,
    chunks: [u64; 2],
    encoder: PcmuEncoder,
}

#[derive(Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum FromClient {
    Media { media: Media },
    Mark { mark: Mark },
    Clear {},
    Connected {},
    Start {},
    Stop {},
}

#[derive(Deserialize)]
struct Media {
    payload: String,
}

#[derive(Deserialize)]
struct Mark {
    name: String,
}

impl Stream {
    fn new(handle: CallHandle, rate: Rate) -> Self {
        let form = Form::of(rate, handle.info().codec);
        let id = format!("MZ{}", uuid::Uuid::new_v4().simple());
        Self { handle, id, form, sequence: 0, chunks: [0; 2], encoder: PcmuEncoder::new() }
    }

    async fn run(mut self, mut socket: WebSocket) {
        let mut tap = match self.form {
            Form::MuLaw => self.handle.media_tap(),
            Form::Linear => self.handle.wide_tap(),
        };
        let mut events = self.handle.events();
        let connected = json!({ "event": "connected", "protocol": "Call", "version": "1.0.0" });
        let start = self.start();
        if !(write(&mut socket, connected.to_string()).await && write(&mut socket, start).await) {
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
                    Some(frame) => self.media(&frame),
                    None => break,
                },
                event = events.recv() => match event {
                    Ok(CallEvent::Digit(digit)) => {
                        Some(self.numbered(json!({ "event": "dtmf", "dtmf": { "track": "inbound_track", "digit": digit.to_string() } })))
                    }
                    Ok(CallEvent::Mark { name, .. }) => {
                        Some(self.numbered(json!({ "event": "mark", "mark": { "name": name } })))
                    }
                    Ok(CallEvent::Ended(_)) | Err(broadcast::error::RecvError::Closed) => break,
                    Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => None,
                },
                message = socket.recv() => match message.inspect(|_| pulse.heard()) {
                    Some(Ok(Message::Text(text))) => self.obey(&text).err().map(|reason| {
                        json!({ "event": "error", "streamSid": self.id, "error": { "message": reason } }).to_string()
                    }),
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
        let stop = self.numbered(json!({ "event": "stop", "stop": { "callSid": self.handle.id() } }));
        let _ = write(&mut socket, stop).await;
    }

    fn start(&mut self) -> String {
        let start = json!({
            "streamSid": self.id,
            "callSid": self.handle.id(),
            "tracks": ["inbound", "outbound"],
            "mediaFormat": { "encoding": self.form.encoding(), "sampleRate": self.form.rate(), "channels": 1 },
            "customParameters": self.handle.meta().headers,
        });
        self.numbered(json!({ "event": "start", "start": start }))
    }

    /// `None` for one that was prepared before this stream asked for its rate.
    fn media(&mut self, frame: &MediaFrame) -> Option<String> {
        let payload = match self.form {
            Form::MuLaw => STANDARD.encode(self.encoder.encode(&frame.pcm)),
            Form::Linear => {
                let bytes: Vec<u8> = frame.wide.as_ref()?.iter().flat_map(|sample| sample.to_le_bytes()).collect();
                STANDARD.encode(bytes)
            }
        };
        let (track, chunk) = match frame.direction {
            TapDirection::Inbound => ("inbound", &mut self.chunks[0]),
            TapDirection::Outbound => ("outbound", &mut self.chunks[1]),
        };
        *chunk += 1;
        let chunk = *chunk;
        Some(self.numbered(json!({ "event": "media", "media": {
            "track": track, "chunk": chunk.to_string(), "timestamp": frame.at.as_millis().to_string(), "payload": payload,
        } })))
    }

    fn numbered(&mut self, mut frame: Value) -> String {
        self.sequence += 1;
        frame["sequenceNumber"] = json!(self.sequence.to_string());
        frame["streamSid"] = json!(self.id);
        frame.to_string()
    }

    fn obey(&self, text: &str) -> Result<(), String> {
        match read(text)? {
            FromClient::Media { media } => {
                self.handle.inject_audio(self.form.decode(&sound(&media)?)?, self.form.rate())
            }
            FromClient::Mark { mark } => self.handle.mark(mark.name),
            FromClient::Clear {} => self.handle.clear(),
            FromClient::Connected {} | FromClient::Start {} | FromClient::Stop {} => Ok(()),
        }
        .map_err(|e| e.to_string())
    }
}

fn read(text: &str) -> Result<FromClient, String> {
    serde_json::from_str(text).map_err(|e| format!("not a usable frame: {e}"))
}

fn sound(media: &Media) -> Result<Vec<u8>, String> {
    STANDARD.decode(&media.payload).map_err(|e| format!("media.payload: {e}"))
}

/// Reads `text` as a frame of a client, sound of every form included; for fuzzing.
pub(super) fn fuzz(text: &str) {
    if let Ok(FromClient::Media { media }) = read(text)
        && let Ok(bytes) = sound(&media)
    {
        let _ = (Form::MuLaw.decode(&bytes), Form::Linear.decode(&bytes));
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
            ("leg", "g722", Form::Linear),
            ("leg", "opus", Form::Linear),
            ("16000", "pcmu", Form::Linear),
        ] {
            let wanted: Wanted = serde_json::from_value(json!({ "rate": rate })).expect("a rate");
            assert_eq!(Form::of(wanted.rate, codec), form, "{rate} of {codec}");
        }
        assert!(serde_json::from_value::<Wanted>(json!({ "rate": "44100" })).is_err());
    }

    #[test]
    fn half_a_sample_is_refused() {
        assert_eq!(Form::Linear.decode(&[1, 0, 0xff, 0xff]), Ok(vec![1, -1]));
        assert!(Form::Linear.decode(&[1, 0, 2]).is_err());
    }
}
