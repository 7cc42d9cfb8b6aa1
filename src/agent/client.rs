//! The gateway as WebSocket client: it dials the agent of a call.

use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use tokio::sync::{mpsc, oneshot};
use tokio_tungstenite::tungstenite::Message;

use super::config::Agent;
use super::frames::MAX_FRAME;
use super::relay::{LINK_FRAMES, LINK_INBOX, Link};
use crate::secret::Secret;
use crate::socket::{self, ConnectError, Socket};
use crate::telemetry::context::{TRACEPARENT, TraceContext};

/// Longest wait for TCP, TLS and the WebSocket handshake together: a caller is listening to silence.
const DIAL_TIMEOUT: Duration = Duration::from_secs(5);

/// Why an agent cannot be reached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DialError {
    /// The URL or a header is not usable, no server is there, or the handshake failed.
    #[error("agent {0}")]
    Connect(#[from] ConnectError),
    /// Nothing answered in time.
    #[error("agent did not answer within {} s", DIAL_TIMEOUT.as_secs())]
    Timeout,
}

/// Why a link ended that the gateway did not end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Closing {
    /// The peer closed it, as the protocol has it.
    Peer,
    /// It broke, or the peer showed no sign of life.
    Broken(String),
}

/// An open link.
#[derive(Debug)]
pub struct Dialled {
    /// Frame texts both ways.
    pub link: Link,
    /// Told when [`Link::from`] has ended; nothing where the gateway ended it.
    pub closing: oneshot::Receiver<Closing>,
}

/// Connects to `agent` and returns the link to it. The socket is served by a task of its own, which ends when
/// either half of the link is dropped, the peer closes, or the peer shows no sign of life for `stall_s`. The handshake says that
/// it is for the call whose span `trace` is.
///
/// # Errors
/// The agent cannot be reached.
pub async fn dial(agent: &Agent, trace: Option<&TraceContext>) -> Result<Link, DialError> {
    open(&agent.url, agent, trace).await.map(|dialled| dialled.link)
}

/// As [`dial`], at `url`, with how it ends.
///
/// # Errors
/// As [`dial`].
pub async fn open(url: &str, agent: &Agent, trace: Option<&TraceContext>) -> Result<Dialled, DialError> {
    tokio::time::timeout(DIAL_TIMEOUT, connect(url, agent, trace)).await.unwrap_or(Err(DialError::Timeout))
}

async fn connect(url: &str, agent: &Agent, trace: Option<&TraceContext>) -> Result<Dialled, DialError> {
    let trace = trace.map(|trace| (TRACEPARENT, Secret::new(trace.to_string())));
    // One of the configuration has the last word.
    let ours = trace.iter().map(|(name, value)| (*name, value));
    let headers = ours.chain(agent.headers.iter().map(|(name, value)| (name.as_str(), value)));
    let socket = socket::connect(url, headers, MAX_FRAME).await?;
    let (to, outbox) = mpsc::channel(LINK_FRAMES);
    let (inbox, from) = mpsc::channel(LINK_INBOX);
    let stall = Duration::from_secs(agent.stall_s.max(1));
    let (tell, closing) = oneshot::channel();
    tokio::spawn(async move {
        let mut socket = socket;
        if let Some(why) = serve(&mut socket, outbox, &inbox, stall).await {
            // Told before the inbox ends. Most agents' relays do not ask.
            let _ = tell.send(why);
        }
        drop(inbox);
        // A peer that is gone cannot be told; the call's task learns of it by the closed link.
        let _ = tokio::time::timeout(Duration::from_secs(1), socket.close(None)).await;
    });
    Ok(Dialled { link: Link { to, from }, closing })
}

/// Moves frames until the link ends; `None`: the gateway has ended it.
async fn serve(
    socket: &mut Socket,
    mut outbox: mpsc::Receiver<String>,
    inbox: &mpsc::Sender<String>,
    stall: Duration,
) -> Option<Closing> {
    let broken = |reason: &str| Some(Closing::Broken(reason.to_owned()));
    let mut ping = tokio::time::interval(stall / 3);
    ping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut silent_ticks = 0;
    loop {
        tokio::select! {
            frame = outbox.recv() => {
                let frame = frame?;
                // A peer that reads nothing must not hold the call's task: the write is bounded like silence.
                let write = tokio::time::timeout(stall, socket.send(Message::text(frame)));
                if !matches!(write.await, Ok(Ok(()))) {
                    return broken("it takes no frames");
                }
            }
            // Reading waits for the relay: a full inbox slows the agent by TCP, and pongs count again later.
            message = socket.next(), if inbox.capacity() > 0 => {
                silent_ticks = 0;
                match message {
                    Some(Ok(Message::Text(text))) => {
                        // overflow: cannot happen, there is capacity and this is the only sender
                        if inbox.try_send(text.as_str().to_owned()).is_err() {
                            return None;
                        }
                    }
                    Some(Ok(Message::Binary(_) | Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
                    Some(Ok(Message::Close(_))) => return Some(Closing::Peer),
                    Some(Err(error)) => return broken(&error.to_string()),
                    None => return broken("it ended without a word"),
                }
            }
            _ = ping.tick() => {
                if inbox.is_closed() {
                    return None;
                }
                silent_ticks = if inbox.capacity() > 0 { silent_ticks + 1 } else { 0 };
                if silent_ticks > 3 {
                    tracing::warn!("the agent stalled: no frame and no pong for {} s", stall.as_secs());
                    return broken("it stalled");
                }
                let write = tokio::time::timeout(stall, socket.send(Message::Ping(bytes::Bytes::new())));
                if !matches!(write.await, Ok(Ok(()))) {
                    return broken("it takes no frames");
                }
            }
        }
    }
}
