//! The gateway as WebSocket client: it dials the agent of a call.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::http::{HeaderName, HeaderValue, Request};
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{Error as WsError, Message};

use super::config::Agent;
use super::frames::MAX_FRAME;
use super::relay::{LINK_FRAMES, LINK_INBOX, Link};

/// Longest wait for TCP, TLS and the WebSocket handshake together: a caller is listening to silence.
const DIAL_TIMEOUT: Duration = Duration::from_secs(5);

/// Why an agent cannot be reached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DialError {
    /// The URL or a header is not usable.
    #[error("agent url or headers: {0}")]
    Request(String),
    /// No connection.
    #[error("agent {host}: {source}")]
    Connect {
        /// Host and port.
        host: String,
        /// Why.
        source: std::io::Error,
    },
    /// The handshake failed; a status code other than 101 is in the text.
    #[error("agent handshake: {0}")]
    Handshake(#[from] Box<WsError>),
    /// Nothing answered in time.
    #[error("agent did not answer within {} s", DIAL_TIMEOUT.as_secs())]
    Timeout,
}

/// Connects to `agent` and returns the link to it. The socket is served by a task of its own, which ends when
/// either half of the link is dropped, the peer closes, or the peer shows no sign of life for `stall_s`.
///
/// # Errors
/// The agent cannot be reached.
pub async fn dial(agent: &Agent) -> Result<Link, DialError> {
    tokio::time::timeout(DIAL_TIMEOUT, connect(agent)).await.unwrap_or(Err(DialError::Timeout))
}

async fn connect(agent: &Agent) -> Result<Link, DialError> {
    let request = request(agent)?;
    let uri = request.uri().clone();
    let host = uri.host().ok_or_else(|| DialError::Request("the url names no host".into()))?.to_owned();
    let tls = uri.scheme_str() == Some("wss");
    let port = uri.port_u16().unwrap_or(if tls { 443 } else { 80 });
    // An IPv6 literal stands in brackets in a URI and without them in a socket address.
    let name = host.trim_matches(['[', ']']).to_owned();
    let unreachable = |source| DialError::Connect { host: format!("{host}:{port}"), source };
    let stream = TcpStream::connect((name.as_str(), port)).await.map_err(unreachable)?;
    stream.set_nodelay(true).map_err(unreachable)?;
    let stall = Duration::from_secs(agent.stall_s.max(1));
    if tls {
        let stream = secure(stream, name).await.map_err(unreachable)?;
        shake_hands(request, stream, stall).await
    } else {
        shake_hands(request, stream, stall).await
    }
}

fn request(agent: &Agent) -> Result<Request<()>, DialError> {
    let mut request = agent.url.as_str().into_client_request().map_err(|e| DialError::Request(e.to_string()))?;
    for (name, value) in &agent.headers {
        let bad = |e: &dyn std::fmt::Display| DialError::Request(format!("header `{name}`: {e}"));
        let header = HeaderName::try_from(name).map_err(|e| bad(&e))?;
        let mut value = HeaderValue::try_from(value.reveal()).map_err(|e| bad(&e))?;
        value.set_sensitive(true);
        request.headers_mut().insert(header, value);
    }
    Ok(request)
}

async fn secure(stream: TcpStream, name: String) -> std::io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
    use rustls_platform_verifier::ConfigVerifierExt;
    let config = rustls::ClientConfig::with_platform_verifier().map_err(std::io::Error::other)?;
    let name = rustls::pki_types::ServerName::try_from(name).map_err(std::io::Error::other)?;
    tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

async fn shake_hands<S>(request: Request<()>, stream: S, stall: Duration) -> Result<Link, DialError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let config = WebSocketConfig::default().max_message_size(Some(MAX_FRAME)).max_frame_size(Some(MAX_FRAME));
    let (socket, _) =
        tokio_tungstenite::client_async_with_config(request, stream, Some(config)).await.map_err(Box::new)?;
    let (to, outbox) = mpsc::channel(LINK_FRAMES);
    let (inbox, from) = mpsc::channel(LINK_INBOX);
    tokio::spawn(serve(socket, outbox, inbox, stall));
    Ok(Link { to, from })
}

async fn serve<S>(
    mut socket: WebSocketStream<S>,
    mut outbox: mpsc::Receiver<String>,
    inbox: mpsc::Sender<String>,
    stall: Duration,
) where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut ping = tokio::time::interval(stall / 3);
    ping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut silent_ticks = 0;
    loop {
        tokio::select! {
            frame = outbox.recv() => {
                let Some(frame) = frame else { break };
                // A peer that reads nothing must not hold the call's task: the write is bounded like silence.
                let write = tokio::time::timeout(stall, socket.send(Message::text(frame)));
                if !matches!(write.await, Ok(Ok(()))) {
                    break;
                }
            }
            // Reading waits for the relay: a full inbox slows the agent by TCP, and pongs count again later.
            message = socket.next(), if inbox.capacity() > 0 => {
                silent_ticks = 0;
                match message {
                    Some(Ok(Message::Text(text))) => {
                        // overflow: cannot happen, there is capacity and this is the only sender
                        if inbox.try_send(text.as_str().to_owned()).is_err() {
                            break;
                        }
                    }
                    Some(Ok(Message::Binary(_) | Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
                    Some(Ok(Message::Close(_)) | Err(_)) | None => break,
                }
            }
            _ = ping.tick() => {
                if inbox.is_closed() {
                    break;
                }
                silent_ticks = if inbox.capacity() > 0 { silent_ticks + 1 } else { 0 };
                if silent_ticks > 3 {
                    tracing::warn!("the agent stalled: no frame and no pong for {} s", stall.as_secs());
                    break;
                }
                let write = tokio::time::timeout(stall, socket.send(Message::Ping(bytes::Bytes::new())));
                if !matches!(write.await, Ok(Ok(()))) {
                    break;
                }
            }
        }
    }
    // A peer that is gone cannot be told; the call's task learns of it by the closed link.
    let _ = tokio::time::timeout(Duration::from_secs(1), socket.close(None)).await;
}
