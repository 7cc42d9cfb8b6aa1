//! `GET /v1/calls/{id}/agent`: an agent attaches to a call over WebSocket.

use std::time::Duration;

use axum::body::Bytes;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use axum::extract::{Path, State};
use axum::response::Response;
use tokio::sync::mpsc;
use tokio_tungstenite::tungstenite::Error as WsError;

use super::auth::Caller;
use super::error::ApiError;
use crate::agent::frames::MAX_FRAME;
use crate::agent::relay::{LINK_FRAMES, LINK_INBOX, Link};
use crate::call::CallId;
use crate::clock::{self, Sparse};
use crate::gateway::Gateway;

/// How often a peer is asked whether it is there.
const PING: Duration = Duration::from_secs(20);
/// A peer that has sent nothing for so long, not even an answer to a ping, is gone.
const SILENCE: Duration = Duration::from_secs(60);

/// Whether a peer still lives. Owns the time of the next ping and of the last message.
pub(super) struct Pulse {
    tick: tokio::time::Interval,
    heard: tokio::time::Instant,
}

impl Pulse {
    pub(super) fn new() -> Self {
        let now = tokio::time::Instant::now();
        Self { tick: tokio::time::interval_at(now + PING, PING), heard: now }
    }

    /// The peer lives, or is not listened to, which is no fault of its own.
    pub(super) fn heard(&mut self) {
        self.heard = tokio::time::Instant::now();
    }

    /// Waits until a ping is due; `false`: the peer has been silent for too long. Cancel safe.
    pub(super) async fn due(&mut self) -> bool {
        self.tick.tick().await;
        self.heard.elapsed() < SILENCE
    }
}

/// Asks the peer whether it is there; `false` when it is gone.
pub(super) async fn ping(socket: &mut WebSocket) -> bool {
    matches!(tokio::time::timeout(WRITE_TIMEOUT, socket.send(Message::Ping(Bytes::new()))).await, Ok(Ok(())))
}

/// A peer that takes no bytes for this long is gone.
pub(super) const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Upgrades, then hands the frames to the call's agent task.
///
/// # Errors
/// 404 when there is no such call, or it is another tenant's.
pub(super) async fn attach(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
    upgrade: WebSocketUpgrade,
) -> Result<Response, ApiError> {
    let handle = super::calls::find(&gateway, &caller, &id).await?;
    let id = handle.id().clone();
    Ok(upgrade
        .max_message_size(MAX_FRAME)
        .max_frame_size(MAX_FRAME)
        .on_upgrade(move |socket| serve(socket, gateway, id)))
}

async fn serve(mut socket: WebSocket, gateway: Gateway, id: CallId) {
    let (to, mut outbox) = mpsc::channel(LINK_FRAMES);
    let (inbox, from) = mpsc::channel(LINK_INBOX);
    if gateway.agents.attach(&id, Link { to, from }).is_err() {
        let _ =
            write(&mut socket, r#"{"type":"error","description":"the call cannot be attached to now"}"#.into()).await;
        return;
    }
    let mut pulse = Pulse::new();
    loop {
        tokio::select! {
            lives = pulse.due() => {
                if inbox.capacity() == 0 {
                    pulse.heard();
                } else if !lives {
                    break;
                }
                if !ping(&mut socket).await {
                    break;
                }
            }
            frame = outbox.recv() => {
                let Some(frame) = frame else { break };
                if !write(&mut socket, frame).await {
                    break;
                }
            }
            // A full inbox stops the reading: the agent is slowed by TCP.
            message = socket.recv(), if inbox.capacity() > 0 => match message {
                Some(Ok(Message::Text(text))) => {
                    pulse.heard();
                    // overflow: cannot happen, there is capacity and this is the only sender
                    if inbox.try_send(text.as_str().to_owned()).is_err() {
                        break;
                    }
                }
                Some(Ok(Message::Binary(_) | Message::Ping(_) | Message::Pong(_))) => pulse.heard(),
                Some(Err(error)) => {
                    fail(&mut socket, error).await;
                    break;
                }
                Some(Ok(Message::Close(_))) | None => break,
            },
            () = inbox.closed() => break,
        }
    }
}

/// A peer that does not keep to the protocol, or is gone without a word: it is told what it did by the status of a
/// Close frame (RFC 6455 section 7.4.1), where it still listens.
pub(super) async fn fail(socket: &mut WebSocket, error: axum::Error) {
    static LINES: Sparse = Sparse::new();
    if let Some(missed) = LINES.admit(clock::now()) {
        tracing::info!(%error, missed, "a WebSocket ended badly");
    }
    let code = match error.into_inner().downcast_ref::<WsError>() {
        Some(WsError::Protocol(_)) => close_code::PROTOCOL,
        Some(WsError::Utf8(_)) => close_code::INVALID,
        Some(WsError::Capacity(_)) => close_code::SIZE,
        _ => return,
    };
    let frame = Message::Close(Some(CloseFrame { code, reason: "".into() }));
    // A peer that is gone cannot be told.
    let _ = tokio::time::timeout(WRITE_TIMEOUT, socket.send(frame)).await;
}

/// Sends one text message; `false` when the peer is gone.
pub(super) async fn write(socket: &mut WebSocket, text: String) -> bool {
    matches!(tokio::time::timeout(WRITE_TIMEOUT, socket.send(Message::text(text))).await, Ok(Ok(())))
}
