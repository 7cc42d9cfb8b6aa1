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
use crate::socket::READ_BUFFER;

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

/// A peer that has not answered a Close frame for this long is gone.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

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
    Ok(bounded(upgrade, MAX_FRAME).on_upgrade(move |socket| serve(socket, gateway, id)))
}

/// Holds a peer to messages of `largest` bytes, and what is set aside for it to what it sends.
pub(super) fn bounded(upgrade: WebSocketUpgrade, largest: usize) -> WebSocketUpgrade {
    upgrade.max_message_size(largest).max_frame_size(largest).read_buffer_size(READ_BUFFER)
}

async fn serve(mut socket: WebSocket, gateway: Gateway, id: CallId) {
    let (to, outbox) = mpsc::channel(LINK_FRAMES);
    let (inbox, from) = mpsc::channel(LINK_INBOX);
    if gateway.agents.attach(&id, Link { to, from }).is_err() {
        let _ =
            write(&mut socket, r#"{"type":"error","description":"the call cannot be attached to now"}"#.into()).await;
        return;
    }
    pump(&mut socket, outbox, inbox).await;
    close(&mut socket).await;
}

/// Moves frames until the peer is gone, or the call has dropped its end of both ways and the peer has all of `outbox`.
async fn pump(socket: &mut WebSocket, mut outbox: mpsc::Receiver<String>, inbox: mpsc::Sender<String>) {
    let mut pulse = Pulse::new();
    loop {
        tokio::select! {
            lives = pulse.due() => {
                if inbox.capacity() == 0 {
                    pulse.heard();
                } else if !lives {
                    break;
                }
                if !ping(socket).await {
                    break;
                }
            }
            frame = outbox.recv() => {
                let Some(frame) = frame else { break };
                if !write(socket, frame).await {
                    break;
                }
            }
            // A full inbox stops the reading: the agent is slowed by TCP.
            message = socket.recv(), if inbox.capacity() > 0 => match message {
                Some(Ok(Message::Text(text))) => {
                    pulse.heard();
                    // overflow: cannot happen, there is capacity and this is the only sender. A call that reads no more
                    // has its last frames in the outbox.
                    let _ = inbox.try_send(text.as_str().to_owned());
                }
                Some(Ok(Message::Binary(_) | Message::Ping(_) | Message::Pong(_))) => pulse.heard(),
                Some(Err(error)) => {
                    fail(socket, error).await;
                    break;
                }
                Some(Ok(Message::Close(_))) | None => break,
            },
        }
    }
}

/// Ends a WebSocket (RFC 6455 section 7.1.2): what was sent is read before the connection goes.
pub(super) async fn close(socket: &mut WebSocket) {
    let closing = async {
        // A peer that is gone cannot be told.
        if socket.send(Message::Close(None)).await.is_ok() {
            while let Some(Ok(_)) = socket.recv().await {}
        }
    };
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, closing).await;
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

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::Router;
    use axum::routing::get;
    use futures_util::StreamExt as _;
    use tokio_tungstenite::tungstenite::Message as Frame;

    use super::*;

    /// A call that ends drops both of its ways at once.
    #[tokio::test]
    async fn the_last_frames_of_a_call_reach_its_agent_and_then_it_is_told_to_close() {
        let (to, outbox) = mpsc::channel(LINK_FRAMES);
        let (inbox, from) = mpsc::channel::<String>(LINK_INBOX);
        for number in 0..LINK_FRAMES {
            to.try_send(number.to_string()).expect("room");
        }
        drop((to, from));
        let ways = Arc::new(Mutex::new(Some((outbox, inbox))));
        let serve = move |upgrade: WebSocketUpgrade| async move {
            upgrade.on_upgrade(move |mut socket| async move {
                let ways = ways.lock().ok().and_then(|mut ways| ways.take());
                if let Some((outbox, inbox)) = ways {
                    pump(&mut socket, outbox, inbox).await;
                    close(&mut socket).await;
                }
            })
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("ws://{}/", listener.local_addr().expect("bound"));
        let server = tokio::spawn(async move { axum::serve(listener, Router::new().route("/", get(serve))).await });
        let (mut agent, _) = tokio_tungstenite::connect_async(url).await.expect("a WebSocket");
        let mut heard = 0;
        let last = loop {
            match agent.next().await {
                Some(Ok(Frame::Text(text))) => {
                    assert_eq!(text.as_str(), heard.to_string());
                    heard += 1;
                }
                other => break other,
            }
        };
        assert_eq!(heard, LINK_FRAMES);
        assert!(matches!(last, Some(Ok(Frame::Close(_)))), "{last:?}");
        server.abort();
    }
}
