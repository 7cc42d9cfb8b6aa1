//! An agent server: the gateway dials it for each call, and it sends the text turns (ConversationRelay frames).
//!
//! [`Server::bind`] listens; each connection is a [`Session`] with the gateway's `setup` frame already read.
//! Frames are JSON objects with a `type`; unknown ones are passed on untouched.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio_tungstenite::tungstenite::Message;
use tokio_util::task::AbortOnDropHandle;

use crate::caller::call::CallError;
use crate::clock;

/// Sessions not taken yet, and frames of a session not read yet.
const WAITING: usize = 256;

/// A WebSocket server for agents' sessions.
pub struct Server {
    local: SocketAddr,
    sessions: mpsc::Receiver<Session>,
    _accepting: AbortOnDropHandle<()>,
}

impl Server {
    /// Listens on `address` (port 0: any free one).
    ///
    /// # Errors
    /// The address is taken or not there.
    pub async fn bind(address: SocketAddr) -> Result<Server, CallError> {
        let listener = TcpListener::bind(address).await.map_err(CallError::io(format!("listen on {address}")))?;
        let local = listener.local_addr().map_err(CallError::io("local address"))?;
        let (sender, sessions) = mpsc::channel(WAITING);
        let accepting = AbortOnDropHandle::new(tokio::spawn(async move {
            // An error of one connection is no reason to stop.
            loop {
                let Ok((stream, _)) = listener.accept().await else { continue };
                tokio::spawn(serve(stream, sender.clone()));
            }
        }));
        Ok(Server { local, sessions, _accepting: accepting })
    }

    /// Where the gateway is to dial: `ws://address/`.
    pub fn url(&self) -> String {
        format!("ws://{}/", self.local)
    }

    /// The next session; `None` when none comes within `within`.
    pub async fn next_session(&mut self, within: Duration) -> Option<Session> {
        tokio::time::timeout(within, self.sessions.recv()).await.ok().flatten()
    }
}

/// One call's conversation with the gateway. Dropping it closes the connection.
pub struct Session {
    setup: Value,
    outgoing: mpsc::Sender<(String, oneshot::Sender<Instant>)>,
    incoming: mpsc::Receiver<(Instant, Value)>,
}

impl Session {
    /// The `setup` frame.
    pub fn setup(&self) -> &Value {
        &self.setup
    }

    /// Sends any frame; gives the instant it was handed to the connection.
    ///
    /// # Errors
    /// The gateway has closed the connection.
    pub async fn send(&self, frame: &Value) -> Result<Instant, CallError> {
        let (sent, when) = oneshot::channel();
        // overflow: awaited; the connection is slower than we are.
        self.outgoing.send((frame.to_string(), sent)).await.map_err(|_| CallError::Over)?;
        when.await.map_err(|_| CallError::Over)
    }

    /// Sends a whole turn in one `text` frame.
    ///
    /// # Errors
    /// As [`Session::send`].
    pub async fn say(&self, text: &str) -> Result<Instant, CallError> {
        self.send(&text_frame(text, true)).await
    }

    /// Sends a turn token by token (words with their spaces), one each `interval`; gives the instant of the first.
    ///
    /// # Errors
    /// As [`Session::send`].
    pub async fn say_by_tokens(&self, text: &str, interval: Duration) -> Result<Instant, CallError> {
        let tokens: Vec<&str> = text.split_inclusive(' ').collect();
        let start = clock::now();
        let mut first = None;
        for (n, token) in tokens.iter().enumerate() {
            clock::sleep_until(start + interval * n as u32).await;
            let at = self.send(&text_frame(token, n + 1 == tokens.len())).await?;
            first.get_or_insert(at);
        }
        first.ok_or(CallError::Over)
    }

    /// Ends the call.
    ///
    /// # Errors
    /// As [`Session::send`].
    pub async fn end(&self) -> Result<Instant, CallError> {
        self.send(&json!({ "type": "end" })).await
    }

    /// The next frame and when it came; `None` when none comes within `within` or the connection is closed.
    pub async fn recv(&mut self, within: Duration) -> Option<(Instant, Value)> {
        tokio::time::timeout(within, self.incoming.recv()).await.ok().flatten()
    }

    /// The next frame of type `kind`, passing others over.
    pub async fn recv_type(&mut self, kind: &str, within: Duration) -> Option<(Instant, Value)> {
        let deadline = clock::now() + within;
        loop {
            let (at, frame) = self.recv(deadline.saturating_duration_since(clock::now())).await?;
            if frame["type"] == kind {
                return Some((at, frame));
            }
        }
    }
}

/// A `text` frame with a whole turn, spoken with `voice` or the call's own.
pub fn turn_frame(text: &str, voice: Option<&str>) -> Value {
    let mut frame = text_frame(text, true);
    if let Some(voice) = voice {
        frame["voice"] = voice.into();
    }
    frame
}

/// A `text` frame.
pub fn text_frame(token: &str, last: bool) -> Value {
    json!({ "type": "text", "token": token, "last": last })
}

async fn serve(stream: TcpStream, sessions: mpsc::Sender<Session>) {
    // Small frames, each of which matters now.
    let _ = stream.set_nodelay(true);
    let Ok(mut socket) = tokio_tungstenite::accept_async(stream).await else { return };
    let Some(setup) = first_frame(&mut socket).await else { return };
    let (outgoing, mut out) = mpsc::channel::<(String, oneshot::Sender<Instant>)>(WAITING);
    let (frames, incoming) = mpsc::channel(WAITING);
    // overflow: refused; the connection is closed, which the gateway sees.
    if sessions.try_send(Session { setup, outgoing, incoming }).is_err() {
        return;
    }
    loop {
        tokio::select! {
            frame = socket.next() => match frame {
                Some(Ok(Message::Text(text))) => {
                    if let Ok(value) = serde_json::from_str(&text) {
                        // overflow: drops; a test that does not read its frames does not want them.
                        let _ = frames.try_send((clock::now(), value));
                    }
                }
                Some(Ok(Message::Close(_))) | Some(Err(_)) | None => return,
                Some(Ok(_)) => {}
            },
            text = out.recv() => match text {
                Some((text, sent)) => {
                    if socket.send(Message::text(text)).await.is_err() {
                        return;
                    }
                    let _ = sent.send(clock::now());
                }
                None => {
                    let _ = socket.close(None).await;
                    return;
                }
            },
        }
    }
}

async fn first_frame(socket: &mut tokio_tungstenite::WebSocketStream<TcpStream>) -> Option<Value> {
    let wait = async {
        loop {
            match socket.next().await? {
                Ok(Message::Text(text)) => return serde_json::from_str(&text).ok(),
                Ok(Message::Ping(_) | Message::Pong(_)) => {}
                _ => return None,
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(10), wait).await.ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_gateway_that_dials_is_given_its_turns_and_heard() {
        let long = Duration::from_secs(10);
        let mut server = Server::bind(([127, 0, 0, 1], 0).into()).await.unwrap();
        let (mut gateway, _) = tokio_tungstenite::connect_async(server.url()).await.unwrap();
        gateway.send(Message::text(r#"{"type":"setup","sessionId":"s"}"#)).await.unwrap();
        let mut session = server.next_session(long).await.unwrap();
        assert_eq!(session.setup()["sessionId"], "s");
        session.say_by_tokens("one two", Duration::from_millis(1)).await.unwrap();
        let mut tokens = Vec::new();
        for _ in 0..2 {
            let text = gateway.next().await.unwrap().unwrap().into_text().unwrap();
            tokens.push(serde_json::from_str::<Value>(&text).unwrap());
        }
        assert_eq!(tokens, [text_frame("one ", false), text_frame("two", true)]);
        gateway.send(Message::text("no JSON")).await.unwrap();
        gateway.send(Message::text(r#"{"type":"vad"}"#)).await.unwrap();
        gateway.send(Message::text(r#"{"type":"interrupt","durationUntilInterruptMs":7}"#)).await.unwrap();
        let (_, frame) = session.recv_type("interrupt", long).await.unwrap();
        assert_eq!(frame["durationUntilInterruptMs"], 7);
        drop(session);
        assert!(matches!(gateway.next().await, Some(Ok(Message::Close(_))) | None));
    }
}
