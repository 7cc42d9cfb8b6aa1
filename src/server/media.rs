//! `GET /v1/calls/{id}/media`: both directions of a call's audio as Twilio Media Streams frames.
//!
//! For speech recognition and recording. Audio is mu-law at 8 kHz, 20 ms a frame, both tracks. The client may
//! play audio into the call (`media`), ask when it has been sent (`mark`) and throw away what waits (`clear`).

use std::sync::Arc;

use audio_codec::{
    Decoder, Encoder,
    pcmu::{PcmuDecoder, PcmuEncoder},
};
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::extract::{Path, State};
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

/// A second of mu-law in base64 with room for the frame around it, times eight: clients send in pieces.
const MAX_FRAME: usize = 128 << 10;
/// Rate of the stream.
const RATE: u32 = 8_000;

/// Upgrades and streams until the call or the client ends.
///
/// # Errors
/// 404 when there is no such call, or it is another tenant's.
pub(super) async fn stream(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
    upgrade: WebSocketUpgrade,
) -> Result<Response, ApiError> {
    let handle = super::calls::find(&gateway, &caller, &id).await?;
    Ok(upgrade
        .max_message_size(MAX_FRAME)
        .max_frame_size(MAX_FRAME)
        .on_upgrade(|socket| Stream::new(handle).run(socket)))
}

struct Stream {
    handle: CallHandle,
    id: String,
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
    fn new(handle: CallHandle) -> Self {
        let id = format!("MZ{}", uuid::Uuid::new_v4().simple());
        Self { handle, id, sequence: 0, chunks: [0; 2], encoder: PcmuEncoder::new() }
    }

    async fn run(mut self, mut socket: WebSocket) {
        let mut tap = self.handle.media_tap();
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
                    Some(frame) => Some(self.media(&frame)),
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
            "mediaFormat": { "encoding": "audio/x-mulaw", "sampleRate": RATE, "channels": 1 },
            "customParameters": self.handle.meta().headers,
        });
        self.numbered(json!({ "event": "start", "start": start }))
    }

    fn media(&mut self, frame: &MediaFrame) -> String {
        let (track, chunk) = match frame.direction {
            TapDirection::Inbound => ("inbound", &mut self.chunks[0]),
            TapDirection::Outbound => ("outbound", &mut self.chunks[1]),
        };
        *chunk += 1;
        let chunk = *chunk;
        let pcm: &Arc<[i16]> = &frame.pcm;
        let payload = STANDARD.encode(self.encoder.encode(pcm));
        self.numbered(json!({ "event": "media", "media": {
            "track": track, "chunk": chunk.to_string(), "timestamp": frame.at.as_millis().to_string(), "payload": payload,
        } }))
    }

    fn numbered(&mut self, mut frame: Value) -> String {
        self.sequence += 1;
        frame["sequenceNumber"] = json!(self.sequence.to_string());
        frame["streamSid"] = json!(self.id);
        frame.to_string()
    }

    fn obey(&self, text: &str) -> Result<(), String> {
        let frame: FromClient = serde_json::from_str(text).map_err(|e| format!("not a usable frame: {e}"))?;
        match frame {
            FromClient::Media { media } => {
                let bytes = STANDARD.decode(media.payload).map_err(|e| format!("media.payload: {e}"))?;
                let pcm = PcmuDecoder::new().decode(&bytes);
                self.handle.inject_audio(pcm, RATE)
            }
            FromClient::Mark { mark } => self.handle.mark(mark.name),
            FromClient::Clear {} => self.handle.clear(),
            FromClient::Connected {} | FromClient::Start {} | FromClient::Stop {} => Ok(()),
        }
        .map_err(|e| e.to_string())
    }
}
