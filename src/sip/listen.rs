//! Sockets of the endpoint: UDP and, as one kind of stream, TCP, TLS and WebSockets over either.
//!
//! Owns reading, framing, screening and writing. What passes [`screen`] reaches the stack; what does not is
//! answered here. Limits: connections in all and for one address, idle time, time for one write, and no
//! reading from a peer that does not read what it is sent.
//!
//! # Why
//! The stack has listeners of its own. They drop what they cannot parse without an answer, do not report a
//! bind that fails, do not bound connections, and their framing overflows on a huge `Content-Length`. It
//! takes a UDP socket behind a trait, and a pair of channels as a connection: those are the seams used here.

use std::{
    collections::HashMap,
    future::Future,
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::{Buf, BytesMut};
use futures_util::{SinkExt, StreamExt};
use metrics::counter;
use rsipstack::{
    platform::net::UdpSocket as StackSocket,
    sip::Transport,
    transaction::endpoint::EndpointInner,
    transport::{SipAddr, SipConnection, TransportEvent, channel::ChannelConnection},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, UdpSocket},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc::UnboundedReceiver},
    time::timeout,
};
use tokio_tungstenite::tungstenite::Message;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use super::{
    bridge,
    door::Door,
    parked::Parked,
    screen::{Frame, MAX_MESSAGE, Verdict, frame, screen},
    stateless::Stateless,
    stun,
    tls::Tls,
    websocket::{self, Origins},
};
use crate::{
    certificate,
    clock::{self, Sparse},
    fault,
    handover::{Arrived, Place},
};

/// Stream connections in all, and of one address.
const MAX_STREAMS: usize = 1_024;
const MAX_STREAMS_OF_ONE: usize = 64;
/// A stream that says nothing this long is closed; keep-alives count as saying something.
const IDLE: Duration = Duration::from_secs(300);
/// Time for a TLS handshake, and for one write.
const STALL: Duration = Duration::from_secs(5);
/// What the stack does between two datagrams takes microseconds: one that is away for this long does not come back.
const ABANDONED: Duration = Duration::from_secs(5);
/// Messages that may wait to be written before nothing more is read from the same peer.
const MAX_UNSENT: usize = 32;

/// A UDP socket that hands only screened datagrams to the stack.
pub(super) struct ScreenedUdp {
    pub(super) socket: UdpSocket,
    pub(super) guard: Guard,
    pub(super) place: Place,
    /// What the gateway that took this one's place passes on. Only the stack's one reader locks it.
    pub(super) arrived: tokio::sync::Mutex<Arrived>,
    pub(super) parked: Parked,
    /// As long as a datagram can be; the stack's is shorter.
    pub(super) buffer: Mutex<Vec<u8>>,
    /// Since when the stack has been busy with what it read; `None` while it waits for the next.
    pub(super) away: Mutex<Option<Instant>>,
}

/// What every message passes, whatever it came by.
#[derive(Clone)]
pub(super) struct Guard {
    pub(super) door: Arc<Door>,
    pub(super) stateless: Stateless,
    /// `Server` of our answers.
    pub(super) agent: Arc<str>,
    /// Set when screening panics: the task that reads is gone then.
    pub(super) broken: Arc<AtomicBool>,
}

/// Tells of a panic on its way through.
struct OnPanic<'a>(&'a AtomicBool);

impl Drop for OnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

/// Tells when the stack comes for a datagram and when it leaves with one.
struct Waiting<'a>(&'a Mutex<Option<Instant>>);

impl<'a> Waiting<'a> {
    fn begin(away: &'a Mutex<Option<Instant>>) -> Waiting<'a> {
        *away.lock().unwrap_or_else(PoisonError::into_inner) = None;
        Waiting(away)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(clock::now());
    }
}

impl Guard {
    /// Screens a message, and answers what needs no state.
    fn judge(&self, bytes: &[u8], from: SocketAddr, transport: Transport) -> Verdict {
        match screen(bytes, from, &self.agent) {
            Verdict::Pass { message, verbatim } => match self.stateless.answer(&message, from, transport) {
                Some(answer) => {
                    count("answered");
                    Verdict::Answer(answer)
                }
                None => {
                    count("passed");
                    Verdict::Pass { message, verbatim }
                }
            },
            Verdict::Answer(answer) => {
                count("malformed");
                tell(from, status_line(&answer));
                Verdict::Answer(answer)
            }
            Verdict::Ignore(reason) => {
                count("ignored");
                tell(from, reason);
                Verdict::Ignore(reason)
            }
        }
    }
}

type Boxed<'a, T> = Pin<Box<dyn Future<Output = rsipstack::Result<T>> + Send + 'a>>;

impl ScreenedUdp {
    /// The next datagram that passes. Cancel safe: nothing waits between receiving and returning.
    async fn next(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        let _waiting = Waiting::begin(&self.away);
        let mut arrived = self.arrived.lock().await;
        loop {
            let held = self.place.is_held();
            let passed = tokio::select! {
                ready = self.socket.readable(), if held => {
                    ready?;
                    self.take(buffer)?
                }
                Some(datagram) = arrived.recv() => {
                    let _watch = OnPanic(&self.guard.broken);
                    self.judged(&datagram.bytes, datagram.from, buffer)
                }
                () = self.place.until(!held) => None,
            };
            if let Some(passed) = passed {
                return Ok(passed);
            }
        }
    }

    /// Whether the stack has not come back for the next datagram for so long that its task must be gone.
    pub(super) fn is_abandoned(&self, now: Instant) -> bool {
        let away = *self.away.lock().unwrap_or_else(PoisonError::into_inner);
        away.is_some_and(|since| now.saturating_duration_since(since) > ABANDONED)
    }

    /// Takes one datagram. `None`: there is none, or it goes no further.
    fn take(&self, buffer: &mut [u8]) -> io::Result<Option<(usize, SocketAddr)>> {
        if !self.place.is_held() {
            // Another process reads it from now on.
            return Ok(None);
        }
        let _watch = OnPanic(&self.guard.broken);
        let mut own = self.buffer.lock().unwrap_or_else(PoisonError::into_inner);
        let (length, from) = match self.socket.try_recv_from(&mut own) {
            Ok(received) => received,
            // The latter: a port that was unreachable for an earlier answer; the socket is fine.
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionReset) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        fault::point("sip socket", self.socket.local_addr().map_or(0, |address| address.port()));
        if !self.guard.door.admits(from.ip()) {
            count("refused");
            return Ok(None);
        }
        if !self.guard.door.lets_in(clock::now(), from.ip()) {
            count("too_fast");
            return Ok(None);
        }
        let datagram = own.get(..length).unwrap_or_default();
        // RFC 5626 pings and the empty lines that RFC 3261 section 7.5 tells to skip.
        let start = datagram.iter().position(|b| !b"\r\n".contains(b)).unwrap_or(length);
        let datagram = &datagram[start..];
        if datagram.is_empty() {
            if length >= 4 {
                self.socket.try_send_to(b"\r\n", from).ok();
            }
            return Ok(None);
        }
        if let Some(answer) = stun::answer(datagram, from) {
            count("answered");
            // overflow: drops: it is asked again
            self.socket.try_send_to(&answer, from).ok();
            return Ok(None);
        }
        if bridge::passes(&self.place, from, datagram) {
            count("passed_on");
            return Ok(None);
        }
        Ok(self.judged(datagram, from, buffer))
    }

    /// What the stack gets of a datagram, if anything.
    fn judged(&self, datagram: &[u8], from: SocketAddr, buffer: &mut [u8]) -> Option<(usize, SocketAddr)> {
        match self.guard.judge(datagram, from, Transport::Udp) {
            Verdict::Pass { verbatim: true, .. } if datagram.len() <= buffer.len() => {
                buffer[..datagram.len()].copy_from_slice(datagram);
                Some((datagram.len(), from))
            }
            Verdict::Pass { message, .. } => self.parked.park(*message, from).map(|stub| {
                buffer[..stub.len()].copy_from_slice(&stub);
                (stub.len(), from)
            }),
            Verdict::Answer(answer) => {
                // overflow: drops: the peer sends its request again
                self.socket.try_send_to(&answer, from).ok();
                None
            }
            Verdict::Ignore(_) => None,
        }
    }
}

impl StackSocket for ScreenedUdp {
    fn recv_from<'life0, 'life1, 'async_trait>(
        &'life0 self,
        buf: &'life1 mut [u8],
    ) -> Boxed<'async_trait, (usize, SocketAddr)>
    where
        'life0: 'async_trait,
        'life1: 'async_trait,
        Self: 'async_trait,
    {
        Box::pin(async move { Ok(self.next(buf).await?) })
    }

    fn send_to<'life0, 'life1, 'async_trait>(
        &'life0 self,
        buf: &'life1 [u8],
        addr: SocketAddr,
    ) -> Boxed<'async_trait, usize>
    where
        'life0: 'async_trait,
        'life1: 'async_trait,
        Self: 'async_trait,
    {
        Box::pin(async move { Ok(self.socket.send_to(buf, addr).await?) })
    }

    fn local_addr(&self) -> rsipstack::Result<SocketAddr> {
        Ok(self.socket.local_addr()?)
    }
}

/// Accepts streams until `stop`.
pub(super) struct StreamListener {
    pub(super) listener: TcpListener,
    /// `None`: plain TCP.
    pub(super) tls: Option<Tls>,
    /// Messages come in WebSockets, which pages of these origins may open; `None`: as they are.
    pub(super) websocket: Option<Origins>,
    pub(super) guard: Guard,
    pub(super) stack: Arc<EndpointInner>,
    pub(super) stop: CancellationToken,
    pub(super) place: Place,
}

impl StreamListener {
    pub(super) async fn run(self) {
        let slots = Arc::new(Semaphore::new(MAX_STREAMS));
        let peers = Arc::new(Mutex::new(HashMap::new()));
        let mut look = tokio::time::interval(certificate::LOOK);
        loop {
            let accepted = tokio::select! {
                () = self.stop.cancelled() => return,
                accepted = self.place.accept(&self.listener) => accepted,
                _ = look.tick() => {
                    if let Some(tls) = &self.tls {
                        let certificate = tls.certificate.clone();
                        tokio::spawn(async move { certificate.look().await });
                    }
                    continue;
                }
            };
            let (stream, from) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, most likely: give calls a moment to end.
                    debug!(%error, "cannot accept a SIP connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let slot = slots.clone().try_acquire_owned().ok();
            let (Some(slot), Some(peer)) = (slot, Peer::enter(&peers, from.ip())) else {
                count("refused");
                continue;
            };
            if !self.guard.door.admits(from.ip()) {
                count("refused");
                continue;
            }
            stream.set_nodelay(true).ok();
            let connection = Connection {
                from,
                transport: match (&self.websocket, &self.tls) {
                    (Some(_), tls) => websocket::transport(tls.is_some()),
                    (None, Some(_)) => Transport::Tls,
                    (None, None) => Transport::Tcp,
                },
                guard: self.guard.clone(),
                stack: self.stack.clone(),
                stop: self.stop.child_token(),
                _slot: slot,
                _peer: peer,
            };
            let acceptor = self.tls.as_ref().map(|tls| tls.acceptor.clone());
            let origins = self.websocket.clone();
            tokio::spawn(async move {
                match acceptor {
                    None => connection.serve(stream, origins).await,
                    Some(acceptor) => match timeout(STALL, acceptor.accept(stream)).await {
                        Ok(Ok(stream)) => connection.serve(stream, origins).await,
                        _ => debug!(%from, "TLS handshake failed"),
                    },
                }
            });
        }
    }
}

/// One connection's place in the count of its address.
struct Peer {
    counts: Arc<Mutex<HashMap<IpAddr, usize>>>,
    ip: IpAddr,
}

impl Peer {
    fn enter(counts: &Arc<Mutex<HashMap<IpAddr, usize>>>, ip: IpAddr) -> Option<Peer> {
        let mut map = counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = map.entry(ip).or_default();
        (*count < MAX_STREAMS_OF_ONE).then(|| {
            *count += 1;
            Peer { counts: counts.clone(), ip }
        })
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let mut map = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = map.get_mut(&self.ip) {
            *count -= 1;
            if *count == 0 {
                map.remove(&self.ip);
            }
        }
    }
}

struct Connection {
    from: SocketAddr,
    transport: Transport,
    guard: Guard,
    stack: Arc<EndpointInner>,
    stop: CancellationToken,
    _slot: OwnedSemaphorePermit,
    _peer: Peer,
}

/// A connection as the stack knows it. Dropped, the stack forgets it.
struct Flow {
    incoming: rsipstack::transport::connection::TransportSender,
    outgoing: UnboundedReceiver<TransportEvent>,
    connection: SipConnection,
    address: SipAddr,
}

impl Connection {
    async fn serve<S: AsyncRead + AsyncWrite + Unpin>(self, stream: S, websocket: Option<Origins>) {
        let Some(origins) = websocket else { return self.run(stream).await };
        match timeout(STALL, websocket::accept(stream, &origins)).await {
            Ok(Some(socket)) => self.run_websocket(socket).await,
            _ => {
                count("refused");
                debug!(from = %self.from, "no WebSocket for SIP");
            }
        }
    }

    /// Has the stack know of it.
    async fn register(&self) -> Option<Flow> {
        let address = SipAddr::new(self.transport, self.from.into());
        // overflow: retained: neither queue can be bounded through the stack's types. The outgoing one is, in
        // effect, by MAX_UNSENT and STALL below; the incoming one by the stack reading at once.
        let (incoming, receiver) = unbounded();
        let (sender, outgoing) = unbounded();
        let channel =
            ChannelConnection::create_connection(receiver, sender, address.clone(), Some(self.stop.clone())).await;
        let connection = SipConnection::Channel(channel.ok()?);
        self.stack.transport_layer.add_connection(connection.clone());
        Some(Flow { incoming, outgoing, connection, address })
    }

    async fn run_websocket<S: AsyncRead + AsyncWrite + Unpin>(self, mut socket: tokio_tungstenite::WebSocketStream<S>) {
        let Some(mut flow) = self.register().await else { return };
        let reason = loop {
            let idle = tokio::time::sleep(IDLE);
            let mut answers = Vec::new();
            tokio::select! {
                () = self.stop.cancelled() => break "closed here",
                () = idle => break "idle",
                event = flow.outgoing.recv() => {
                    // The stack wraps what it sends as if it had arrived.
                    let Some(TransportEvent::Incoming(message, _, _)) = event else { break "closed here" };
                    answers.push(message.to_bytes().to_vec());
                }
                read = socket.next(), if flow.outgoing.len() < MAX_UNSENT => {
                    let bytes = match read {
                        Some(Ok(Message::Text(text))) => bytes::Bytes::from(text),
                        Some(Ok(Message::Binary(bytes))) => bytes,
                        // The library answers pings; their answers are signs of life.
                        Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => continue,
                        Some(Ok(Message::Close(_)) | Err(_)) | None => break "closed by the peer",
                    };
                    if bytes.iter().all(|byte| b"\r\n".contains(byte)) {
                        // A keep-alive of RFC 5626 section 4.4.1.
                        if bytes.len() >= 4 {
                            answers.push(b"\r\n".to_vec());
                        }
                    } else {
                        match self.pass(&bytes, &flow) {
                            Ok(answer) => answers.extend(answer),
                            Err(reason) => break reason,
                        }
                    }
                }
            }
            let mut written = true;
            for answer in answers {
                written &= matches!(timeout(STALL, socket.send(websocket::message(answer))).await, Ok(Ok(())));
            }
            if !written {
                break "cannot write";
            }
        };
        debug!(from = %self.from, reason, "SIP WebSocket ended");
        timeout(STALL, socket.close(None)).await.ok();
    }

    async fn run<S: AsyncRead + AsyncWrite + Unpin>(self, mut stream: S) {
        let Some(mut flow) = self.register().await else { return };
        let mut buffer = BytesMut::with_capacity(4_096);
        let reason = loop {
            let idle = tokio::time::sleep(IDLE);
            tokio::select! {
                () = self.stop.cancelled() => break "closed here",
                () = idle => break "idle",
                event = flow.outgoing.recv() => {
                    // The stack wraps what it sends as if it had arrived.
                    let Some(TransportEvent::Incoming(message, _, _)) = event else { break "closed here" };
                    match timeout(STALL, stream.write_all(&message.to_bytes())).await {
                        Ok(Ok(())) => {}
                        _ => break "cannot write",
                    }
                }
                read = stream.read_buf(&mut buffer), if flow.outgoing.len() < MAX_UNSENT => {
                    if !matches!(read, Ok(1..)) {
                        break "closed by the peer";
                    }
                    match self.take(&mut buffer, &flow) {
                        Err(reason) => break reason,
                        Ok(answers) if answers.is_empty() => {}
                        Ok(answers) => match timeout(STALL, stream.write_all(&answers)).await {
                            Ok(Ok(())) => {}
                            _ => break "cannot write",
                        },
                    }
                }
            }
        };
        debug!(from = %self.from, reason, "SIP connection ended");
        timeout(STALL, stream.shutdown()).await.ok();
    }

    /// Takes every whole message from the buffer. Returns what must be written at once.
    fn take(&self, buffer: &mut BytesMut, flow: &Flow) -> Result<Vec<u8>, &'static str> {
        let mut answers = Vec::new();
        loop {
            let length = match frame(buffer) {
                Frame::More if buffer.len() > MAX_MESSAGE => return Err("message too long"),
                Frame::More => return Ok(answers),
                Frame::Broken(reason) => return Err(reason),
                Frame::KeepAlive(length, answer) => {
                    buffer.advance(length);
                    if answer {
                        answers.extend_from_slice(b"\r\n");
                    }
                    continue;
                }
                Frame::Message(length) => length,
            };
            let bytes = buffer.split_to(length);
            answers.extend(self.pass(&bytes, flow)?.unwrap_or_default());
        }
    }

    /// Screens one message and hands it to the stack. Returns what must be written at once.
    fn pass(&self, bytes: &[u8], flow: &Flow) -> Result<Option<Vec<u8>>, &'static str> {
        if !self.guard.door.lets_in(clock::now(), self.from.ip()) {
            count("too_fast");
            return Err("too many messages");
        }
        match self.guard.judge(bytes, self.from, self.transport) {
            Verdict::Pass { message, .. } => {
                let message = SipConnection::update_msg_received(*message, self.from, self.transport)
                    .map_err(|_| "Via that cannot be amended")?;
                let event = TransportEvent::Incoming(message, flow.connection.clone(), flow.address.clone());
                // overflow: retained: the stack takes it at once
                flow.incoming.send(event).map_err(|_| "closed here")?;
                Ok(None)
            }
            Verdict::Answer(answer) => Ok(Some(answer)),
            Verdict::Ignore(_) => Ok(None),
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "the stack's connection type takes no other kind of channel")]
fn unbounded() -> (rsipstack::transport::connection::TransportSender, UnboundedReceiver<TransportEvent>) {
    tokio::sync::mpsc::unbounded_channel()
}

/// What was wrong with a message that the stack does not see.
fn tell(from: SocketAddr, reason: &str) {
    static LINES: Sparse = Sparse::new();
    if let Some(missed) = LINES.admit(clock::now()) {
        info!(%from, reason, missed, "malformed SIP message");
    }
}

fn status_line(answer: &[u8]) -> &str {
    let line = answer.split(|byte| *byte == b'\r').next().unwrap_or_default();
    std::str::from_utf8(line).unwrap_or_default()
}

fn count(outcome: &'static str) {
    counter!("antiphon_sip_messages_total", "outcome" => outcome).increment(1);
}
