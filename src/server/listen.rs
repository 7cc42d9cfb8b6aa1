//! HTTP connections: accepted up to a limit, with bounded patience, closed gracefully.
//!
//! # Why
//! `axum::serve` sets no time limit for a request's head, so that a client which connects and says nothing, or
//! one byte a minute, would hold a connection for ever. Here it holds it for [`HEAD_TIMEOUT`].
//!
//! A client that connects when there is no room is answered 503 on one of a few spare connections, and asked for nothing but
//! a quick request; `/healthz` and `/readyz` are answered there as ever, so that a flood does not look like a death.
//! Of the spare connections the oldest gives way: it had its time to ask.
//!
//! Before that, a connection gives way on which no whole request came, the oldest first: it would hold its place for [`HEAD_TIMEOUT`]
//! and longer. One that has been there for a second gives way to whoever comes, any of them to a whole request on a spare connection.
//! So who opens connections and leaves them keeps nobody out. Sockets that stay open take three of four places at most.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{ConnectInfo, Request};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;

use super::crowd::{Bounds, Crowd, Entry};
use super::error::ApiError;
use super::handed;
use super::http2;
use super::stall::{Patient, hurried};
use crate::certificate::{self, Certificate};
use crate::clock::{self, Sparse};
use crate::handover::Place;

/// A request's head arrives within this, counted from the end of the request before; a TLS handshake, too.
const HEAD_TIMEOUT: Duration = Duration::from_secs(15);
/// The same on a spare connection.
const SPARE_TIMEOUT: Duration = Duration::from_secs(2);
/// Spare connections at once.
const SPARE: usize = 256;
/// Longest body of a request on a spare connection, bytes.
const SPARE_BODY: usize = 256 << 10;
/// Largest head of a request: its line and its headers, bytes.
pub(super) const MAX_HEAD: usize = 16 << 10;
/// So long a client that connects may take for its first request before its place is another's.
const YOUNG: Duration = Duration::from_secs(1);
/// When a client that found no room may come again.
const RETRY: Duration = Duration::from_secs(5);
/// What may be spoken behind TLS, the favourite first; an authority's question is answered by the handshake alone.
const PROTOCOLS: [&[u8]; 3] = [b"h2", b"http/1.1", certificate::CHALLENGE];

/// How the listener treats those who come.
#[derive(Clone)]
pub struct Manners {
    /// How many may.
    pub bounds: Bounds,
    /// Where HTTPS is spoken.
    pub certificate: Option<Certificate>,
    /// How long requests that are under way may take at the end.
    pub grace: Duration,
    /// Connections are accepted while it is held. When it is lent, those that are there end with their next answer, which says so:
    /// their clients come again and reach the gateway that has it, and no request is lost on its way. Sockets and event streams
    /// stay.
    pub place: Place,
}

/// Serves `router` until `stop` says so, then lets requests that are under way finish for the grace.
pub async fn serve(listener: TcpListener, router: Router, mut stop: watch::Receiver<bool>, manners: Manners) {
    let config = manners.certificate.as_ref().map(|certificate| certificate.config(&PROTOCOLS)).transpose();
    let acceptor = match config {
        Ok(config) => config.map(TlsAcceptor::from),
        Err(error) => {
            tracing::error!(%error, "HTTPS cannot be served");
            return;
        }
    };
    let house = Arc::new(House { crowd: Mutex::new(Crowd::new(manners.bounds)), unasked: Mutex::default() });
    let mut spare: VecDeque<AbortHandle> = VecDeque::new();
    let mut connections = JoinSet::new();
    let mut look = tokio::time::interval(certificate::LOOK);
    loop {
        let accepted = tokio::select! {
            accepted = manners.place.accept(&listener) => accepted,
            () = stopped(&mut stop) => break,
            Some(_) = connections.join_next() => continue,
            _ = look.tick() => {
                if let Some(certificate) = manners.certificate.clone() {
                    connections.spawn(async move { certificate.look().await });
                }
                continue;
            }
        };
        match accepted {
            Ok((stream, peer)) => {
                let room = Room::of(&house, peer.ip());
                let place = if let Room::Placed(place) = &room { Some(Arc::downgrade(place)) } else { None };
                let (router, stop, lent) = (router.clone(), stop.clone(), manners.place.clone());
                let task =
                    connections.spawn(Connection { stream, peer, router, stop, lent, room }.serve(acceptor.clone()));
                if let Some(place) = place {
                    house.unasked().push_back(Unasked { task, place, since: clock::now() });
                } else {
                    spare.retain(|task| !task.is_finished());
                    spare.push_back(task);
                    if spare.len() > SPARE
                        && let Some(oldest) = spare.pop_front()
                    {
                        oldest.abort();
                    }
                }
            }
            Err(error) => {
                // Out of file descriptors, usually: the connections there are go on, and some will end.
                static LINES: Sparse = Sparse::new();
                if let Some(missed) = LINES.admit(clock::now()) {
                    tracing::warn!(%error, missed, "a connection was not accepted");
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    drop(listener);
    let finished = async { while connections.join_next().await.is_some() {} };
    // Event streams and idle sockets would go on as long as they like; the drop closes them.
    let _ = tokio::time::timeout(manners.grace, finished).await;
}

/// Serves what another gateway passes on to this one, until `stop` says so.
pub async fn serve_passed(listener: UnixListener, router: Router, mut stop: watch::Receiver<bool>) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stopped(&mut stop) => return,
        };
        match accepted {
            Ok((stream, _)) => {
                tokio::spawn(speak(stream, None, router.clone(), stop.clone(), None, Room::Passed));
            }
            Err(error) => {
                tracing::warn!(%error, "a connection of the other gateway was not accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Waits for the word to stop; a sender that is gone means the same.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

/// Who is connected.
#[derive(Debug)]
struct House {
    crowd: Mutex<Crowd>,
    /// Connections with a place on which no whole request had come when they were last looked at, the oldest first.
    unasked: Mutex<VecDeque<Unasked>>,
}

impl House {
    fn crowd(&self) -> MutexGuard<'_, Crowd> {
        self.crowd.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unasked(&self) -> MutexGuard<'_, VecDeque<Unasked>> {
        self.unasked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for `peer`.
    fn take(self: &Arc<Self>, peer: IpAddr, displaces: bool) -> Result<Counted, Entry> {
        match self.crowd().enter(peer, displaces) {
            Entry::In => {
                let (asked, stays) = (AtomicBool::new(false), AtomicBool::new(false));
                Ok(Counted { house: self.clone(), peer, asked, stays })
            }
            refused => Err(refused),
        }
    }

    /// The place, for `peer`, of the oldest on which no whole request came, where that one has been there for `least`.
    fn displace(self: &Arc<Self>, peer: IpAddr, least: Duration) -> Option<Counted> {
        let one = idlest(&mut self.unasked(), clock::now(), least)?;
        one.task.abort();
        self.take(peer, true).ok()
    }
}

/// A connection's count in the crowd; dropping it counts it out.
#[derive(Debug)]
struct Counted {
    house: Arc<House>,
    peer: IpAddr,
    /// A whole request came on it.
    asked: AtomicBool,
    /// It is a socket that stays open.
    stays: AtomicBool,
}

impl Counted {
    /// It becomes a socket that stays open; `false`: there are too many.
    fn stay(&self) -> bool {
        let room = self.house.crowd().stay();
        self.stays.store(room, Relaxed);
        room
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut crowd = self.house.crowd();
        if self.stays.load(Relaxed) {
            crowd.end_stay();
        }
        crowd.leave(self.peer);
    }
}

#[derive(Debug)]
struct Unasked {
    task: AbortHandle,
    place: Weak<Counted>,
    since: Instant,
}

/// The one that is to give way, where it has been there for `least`.
fn idlest(unasked: &mut VecDeque<Unasked>, now: Instant, least: Duration) -> Option<Unasked> {
    while let Some(first) = unasked.front() {
        let waits = first.place.upgrade().is_some_and(|place| !place.asked.load(Relaxed));
        if waits && now.saturating_duration_since(first.since) < least {
            return None;
        }
        let first = unasked.pop_front();
        if waits {
            return first;
        }
    }
    None
}

struct Connection {
    stream: TcpStream,
    peer: SocketAddr,
    router: Router,
    stop: watch::Receiver<bool>,
    lent: Place,
    room: Room,
}

/// Whether there is room for a connection.
#[derive(Clone)]
enum Room {
    Placed(Arc<Counted>),
    /// There was none when it came: it gets a word and goes, but a whole request takes the place of one who asks nothing.
    Spare(Spare),
    /// Its address has what it may: it gets a word and goes.
    None,
    /// Another gateway passes on what it had room for.
    Passed,
}

#[derive(Clone)]
struct Spare {
    house: Arc<House>,
    peer: IpAddr,
    /// The place, once it has one; held as long as the connection.
    place: Arc<Mutex<Option<Counted>>>,
}

impl Spare {
    /// `request` with all of its body, once it has a place.
    async fn enter(&self, request: Request<Body>) -> Option<Request<Body>> {
        let (parts, body) = request.into_parts();
        let bytes = tokio::time::timeout(SPARE_TIMEOUT, to_bytes(body, SPARE_BODY)).await.ok()?.ok()?;
        let place = self.house.displace(self.peer, Duration::ZERO)?;
        *self.place.lock().unwrap_or_else(PoisonError::into_inner) = Some(place);
        Some(Request::from_parts(parts, bytes.into()))
    }
}

impl Room {
    /// For one who comes now.
    fn of(house: &Arc<House>, peer: IpAddr) -> Room {
        let place = house.take(peer, false);
        let full = matches!(place, Err(Entry::Full));
        match place.ok().or_else(|| full.then(|| house.displace(peer, YOUNG)).flatten()) {
            Some(place) => Room::Placed(Arc::new(place)),
            None if full => Room::Spare(Spare { house: house.clone(), peer, place: Arc::default() }),
            None => Room::None,
        }
    }

    fn is_full(&self) -> bool {
        matches!(self, Room::None | Room::Spare(_))
    }

    /// A whole request came on the connection, or one was answered.
    fn is_asked(&self) {
        if let Room::Placed(place) = self {
            place.asked.store(true, Relaxed);
        }
    }
}

impl Connection {
    async fn serve(self, acceptor: Option<TlsAcceptor>) {
        // Text in and events out are small and urgent: never wait for a full segment.
        let _ = self.stream.set_nodelay(true);
        let Self { stream, peer, router, stop, lent, room } = self;
        let Some(acceptor) = acceptor else { return speak(stream, Some(peer), router, stop, Some(lent), room).await };
        let limit = if room.is_full() { SPARE_TIMEOUT } else { HEAD_TIMEOUT };
        match tokio::time::timeout(limit, acceptor.accept(stream)).await {
            Ok(Ok(stream)) => match stream.get_ref().1.alpn_protocol() {
                Some(b"h2") => speak_http2(stream, peer, router, stop, lent, room).await,
                Some(certificate::CHALLENGE) => {}
                _ => speak(stream, Some(peer), router, stop, Some(lent), room).await,
            },
            Ok(Err(error)) => ended_badly(peer, &error),
            Err(_) => ended_badly(peer, &"no TLS handshake"),
        }
    }
}

/// HTTP on one connection, until `stop` and the answer under way, or the first answer while the place is `lent`. `peer` is `None`
/// where another gateway passes requests on and says of each whose it is.
async fn speak<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    peer: Option<SocketAddr>,
    router: Router,
    mut stop: watch::Receiver<bool>,
    lent: Option<Place>,
    room: Room,
) {
    let full = room.is_full();
    // A socket outlives what speaks HTTP on its connection, and keeps its place.
    let stream = Patient::holding(stream, if let Room::Placed(place) = &room { Some(place.clone()) } else { None });
    let service = service_fn(move |request: axum::http::Request<Incoming>| {
        let asked = room.clone();
        let mut request = request.map(|body| hurried(body, move || asked.is_asked()));
        if peer.is_none() {
            request.extensions_mut().insert(handed::Passed);
        }
        let peer = peer.unwrap_or_else(|| handed::peer(request.headers_mut()));
        request.extensions_mut().insert(ConnectInfo(peer));
        let (answering, lent) = (answer(router.clone(), request, room.clone()), lent.clone());
        async move {
            let mut response = answering.await?;
            let leaves = lent.is_some_and(|place| !place.is_held());
            if leaves && response.status() != StatusCode::SWITCHING_PROTOCOLS {
                response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<_, std::convert::Infallible>(response)
        }
    });
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(if full { SPARE_TIMEOUT } else { HEAD_TIMEOUT })
        .max_buf_size(MAX_HEAD)
        .keep_alive(!full);
    let connection = http.serve_connection(TokioIo::new(stream), service).with_upgrades();
    tokio::pin!(connection);
    let outcome = tokio::select! {
        outcome = connection.as_mut() => outcome,
        () = stopped(&mut stop) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let (Err(error), Some(peer)) = (outcome, peer) {
        ended_badly(peer, &error);
    }
}

/// As [`speak`], where the handshake chose HTTP/2, which says at once that it takes no more (RFC 9113 section 6.8).
async fn speak_http2<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    peer: SocketAddr,
    router: Router,
    mut stop: watch::Receiver<bool>,
    lent: Place,
    room: Room,
) {
    let full = room.is_full();
    let streams = http2::Streams::new();
    let all = streams.clone();
    let service = service_fn(move |request: axum::http::Request<Incoming>| {
        let asked = room.clone();
        let mut request = request.map(|body| hurried(body, move || asked.is_asked()));
        request.extensions_mut().insert(ConnectInfo(peer));
        let (open, answering) = (all.begin(), answer(router.clone(), request, room.clone()));
        async move { answering.await.map(|response| open.hold(response)) }
    });
    let connection = http2::builder(full).serve_connection(TokioIo::new(Patient::new(stream)), service);
    tokio::pin!(connection);
    let ending = async {
        match full {
            true => tokio::time::sleep(SPARE_TIMEOUT).await,
            false => match streams.over().await {
                http2::Over::Idle => {}
                // What is open is dropped with the connection: its client no longer waits for it.
                http2::Over::Abused => return Some("too many requests were taken back"),
            },
        }
        None
    };
    let outcome = tokio::select! {
        outcome = connection.as_mut() => outcome,
        () = stopped(&mut stop) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
        () = lent.until(false) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
        abused = ending => {
            if let Some(why) = abused {
                return ended_badly(peer, &why);
            }
            connection.as_mut().graceful_shutdown();
            // A peer that reads nothing does not read this either.
            tokio::time::timeout(SPARE_TIMEOUT, connection).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = outcome {
        ended_badly(peer, &error);
    }
}

async fn answer(router: Router, mut request: Request<Body>, room: Room) -> Result<Response, std::convert::Infallible> {
    let refused = |what: &str| {
        Ok(ApiError::unavailable(format!("there are as many {what} as there may be"), RETRY).into_response())
    };
    let health = matches!(request.uri().path(), "/healthz" | "/readyz");
    match &room {
        Room::None if !health => return refused("connections"),
        Room::Spare(spare) if !health => match spare.enter(request).await {
            Some(whole) => request = whole,
            None => return refused("connections"),
        },
        _ => {}
    }
    let response = router.oneshot(request).await?;
    room.is_asked();
    let stays = match &room {
        _ if response.status() != StatusCode::SWITCHING_PROTOCOLS => true,
        Room::Placed(place) => place.stay(),
        Room::Spare(_) | Room::None => false,
        Room::Passed => true,
    };
    if stays { Ok(response) } else { refused("sockets") }
}

fn ended_badly(peer: SocketAddr, error: &dyn std::fmt::Display) {
    static LINES: Sparse = Sparse::new();
    if let Some(missed) = LINES.admit(clock::now()) {
        tracing::info!(%peer, %error, missed, "a connection ended badly");
    }
}

#[cfg(test)]
mod tests;
