//! HTTP connections: accepted up to a limit, with bounded patience, closed gracefully.
//!
//! # Why
//! `axum::serve` sets no time limit for a request's head, so that a client which connects and says nothing, or
//! one byte a minute, would hold a connection for ever. Here it holds it for [`HEAD_TIMEOUT`].
//!
//! A client that connects when there is no room is answered 503 on one of a few spare connections, and asked for nothing but
//! a quick request; `/healthz` and `/readyz` are answered there as ever, so that a flood does not look like a death.
//! Of the spare connections the oldest gives way: it had its time to ask.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
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

use super::crowd::{Bounds, Crowd};
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
const SPARE: usize = 64;
/// Largest head of a request: its line and its headers, bytes.
pub(super) const MAX_HEAD: usize = 16 << 10;
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
    let crowd = Arc::new(Mutex::new(Crowd::new(manners.bounds)));
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
                let place = Counted::take(&crowd, peer.ip());
                let full = place.is_none();
                let (router, stop, lent) = (router.clone(), stop.clone(), manners.place.clone());
                let connection = Connection { stream, peer, router, stop, lent, full };
                let acceptor = acceptor.clone();
                let task = connections.spawn(async move {
                    let _place = place;
                    connection.serve(acceptor).await;
                });
                if full {
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
                tokio::spawn(speak(stream, None, router.clone(), stop.clone(), None, false));
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

/// A connection's count in the crowd; dropping it counts it out.
struct Counted {
    crowd: Arc<Mutex<Crowd>>,
    peer: IpAddr,
}

impl Counted {
    fn take(crowd: &Arc<Mutex<Crowd>>, peer: IpAddr) -> Option<Self> {
        let room = crowd.lock().unwrap_or_else(PoisonError::into_inner).enter(peer);
        room.then(|| Self { crowd: crowd.clone(), peer })
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.crowd.lock().unwrap_or_else(PoisonError::into_inner).leave(self.peer);
    }
}

struct Connection {
    stream: TcpStream,
    peer: SocketAddr,
    router: Router,
    stop: watch::Receiver<bool>,
    lent: Place,
    /// There is no room for it: it gets a word and goes.
    full: bool,
}

impl Connection {
    async fn serve(self, acceptor: Option<TlsAcceptor>) {
        // Text in and events out are small and urgent: never wait for a full segment.
        let _ = self.stream.set_nodelay(true);
        let Self { stream, peer, router, stop, lent, full } = self;
        let Some(acceptor) = acceptor else { return speak(stream, Some(peer), router, stop, Some(lent), full).await };
        let limit = if full { SPARE_TIMEOUT } else { HEAD_TIMEOUT };
        match tokio::time::timeout(limit, acceptor.accept(stream)).await {
            Ok(Ok(stream)) => match stream.get_ref().1.alpn_protocol() {
                Some(b"h2") => speak_http2(stream, peer, router, stop, lent, full).await,
                Some(certificate::CHALLENGE) => {}
                _ => speak(stream, Some(peer), router, stop, Some(lent), full).await,
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
    full: bool,
) {
    let service = service_fn(move |request: axum::http::Request<Incoming>| {
        let mut request = request.map(hurried);
        if peer.is_none() {
            request.extensions_mut().insert(handed::Passed);
        }
        let peer = peer.unwrap_or_else(|| handed::peer(request.headers_mut()));
        request.extensions_mut().insert(ConnectInfo(peer));
        let (answering, lent) = (answer(router.clone(), request, full), lent.clone());
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
    let connection = http.serve_connection(TokioIo::new(Patient::new(stream)), service).with_upgrades();
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
    full: bool,
) {
    let streams = http2::Streams::new();
    let all = streams.clone();
    let service = service_fn(move |request: axum::http::Request<Incoming>| {
        let mut request = request.map(hurried);
        request.extensions_mut().insert(ConnectInfo(peer));
        let (open, answering) = (all.begin(), answer(router.clone(), request, full));
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

async fn answer(router: Router, request: Request<Body>, full: bool) -> Result<Response, std::convert::Infallible> {
    if full && !matches!(request.uri().path(), "/healthz" | "/readyz") {
        return Ok(ApiError::unavailable("there are as many connections as there may be", RETRY).into_response());
    }
    router.oneshot(request).await
}

fn ended_badly(peer: SocketAddr, error: &dyn std::fmt::Display) {
    static LINES: Sparse = Sparse::new();
    if let Some(missed) = LINES.admit(clock::now()) {
        tracing::info!(%peer, %error, missed, "a connection ended badly");
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    struct Served {
        address: SocketAddr,
        _stop: watch::Sender<bool>,
    }

    async fn served(all: usize) -> Served {
        served_with(all, None).await
    }

    async fn served_with(all: usize, certificate: Option<Certificate>) -> Served {
        let router = Router::new().route("/", get(|| async { "page" })).route("/healthz", get(|| async { "well" }));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let (stop, stopped) = watch::channel(false);
        let bounds = Bounds { all, per_address: 1 };
        let manners = Manners { bounds, certificate, grace: LIMIT, place: Place::default() };
        tokio::spawn(serve(listener, router, stopped, manners));
        Served { address, _stop: stop }
    }

    /// Everything that comes back for `request` until the connection is closed.
    async fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.expect("connects");
        // A server that has heard enough may close before everything is written.
        let _ = stream.write_all(request.as_bytes()).await;
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(LIMIT, stream.read_to_end(&mut answer)).await.expect("answered");
        String::from_utf8_lossy(&answer).into_owned()
    }

    fn get_of(path: &str) -> String {
        format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    }

    #[tokio::test]
    async fn the_excess_is_refused_while_health_is_answered() {
        let served = served(3).await;
        let mut idle = Vec::new();
        for _ in 0..3 {
            let mut stream = TcpStream::connect(served.address).await.expect("connects");
            stream.write_all(b"GET /").await.expect("written");
            idle.push(stream);
        }
        // More than there are spare connections, and all of them slow.
        for _ in 0..2 * SPARE {
            idle.push(TcpStream::connect(served.address).await.expect("connects"));
        }
        let health = ask(served.address, &get_of("/healthz")).await;
        assert!(health.starts_with("HTTP/1.1 200") && health.ends_with("well"), "{health}");
        let refused = ask(served.address, &get_of("/")).await;
        assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("retry-after"), "{refused}");
        drop(idle);
        let begun = tokio::time::Instant::now();
        while !ask(served.address, &get_of("/")).await.ends_with("page") {
            assert!(begun.elapsed() < LIMIT, "room again");
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_head_of_more_than_16_kb_is_refused() {
        let served = served(8).await;
        let head = |bytes: usize| {
            format!("GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Long: {}\r\n\r\n", "x".repeat(bytes))
        };
        assert!(ask(served.address, &head(12 << 10)).await.starts_with("HTTP/1.1 200"));
        // The rest of the head is not read, so that a reset may overtake the answer.
        let refused = ask(served.address, &head(20 << 10)).await;
        assert!(refused.is_empty() || refused.starts_with("HTTP/1.1 431"), "{refused}");
    }

    /// HTTPS with a certificate that `Secure::connect` trusts.
    struct Secure {
        served: Served,
        client: Arc<rustls::ClientConfig>,
    }

    impl Secure {
        async fn start() -> Secure {
            let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).expect("made");
            let folder = tempfile::tempdir().expect("a folder");
            let file = folder.path().join("both.pem");
            std::fs::write(&file, made.cert.pem() + &made.signing_key.serialize_pem()).expect("written");
            let certificate = Certificate::open("a test", &file, &file).expect("usable");
            let mut roots = rustls::RootCertStore::empty();
            roots.add(made.cert.der().clone()).expect("a root");
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let client = rustls::ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .expect("versions")
                .with_root_certificates(roots)
                .with_no_client_auth();
            Secure { served: served_with(8, Some(certificate)).await, client: Arc::new(client) }
        }

        async fn connect(&self, protocol: &[u8]) -> tokio_rustls::client::TlsStream<TcpStream> {
            let mut client = rustls::ClientConfig::clone(&self.client);
            client.alpn_protocols = vec![protocol.to_vec()];
            let stream = TcpStream::connect(self.served.address).await.expect("connects");
            let name = "localhost".try_into().expect("a name");
            let connector = tokio_rustls::TlsConnector::from(Arc::new(client));
            connector.connect(name, stream).await.expect("TLS")
        }

        /// A client of HTTP/2; the task ends with its connection.
        async fn http2(
            &self,
        ) -> (h2::client::SendRequest<bytes::Bytes>, tokio::task::JoinHandle<Result<(), h2::Error>>) {
            let stream = self.connect(b"h2").await;
            let (client, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
            (client, tokio::spawn(connection))
        }
    }

    fn asking(header: &str) -> axum::http::Request<()> {
        axum::http::Request::get("https://localhost/").header("x-long", header).body(()).expect("a request")
    }

    #[tokio::test]
    async fn http2_is_spoken_to_who_can_and_http11_to_others() {
        let secure = Secure::start().await;
        let (client, _connection) = secure.http2().await;
        let mut client = client.ready().await.expect("ready");
        let (answer, _) = client.send_request(asking("short"), true).expect("sent");
        let (head, mut body) = answer.await.expect("answered").into_parts();
        assert_eq!(head.status, 200);
        assert_eq!(body.data().await.expect("a body").expect("read").as_ref(), b"page");
        // Headers have the same bound.
        let mut client = client.ready().await.expect("ready");
        let (answer, _) = client.send_request(asking(&"x".repeat(20 << 10)), true).expect("sent");
        assert_eq!(answer.await.map(|answer| answer.status().as_u16()).unwrap_or(431), 431);
        let mut old = secure.connect(b"http/1.1").await;
        old.write_all(get_of("/").as_bytes()).await.expect("written");
        let mut answer = Vec::new();
        old.read_to_end(&mut answer).await.expect("read");
        assert!(answer.starts_with(b"HTTP/1.1 200") && answer.ends_with(b"page"));
    }

    #[tokio::test]
    async fn a_connection_that_only_takes_requests_back_is_closed_and_another_is_served() {
        let secure = Secure::start().await;
        let (mut client, connection) = secure.http2().await;
        let mut sent = 0;
        // The end of the connection shows in one of the two.
        while let Ok(ready) = tokio::time::timeout(LIMIT, client.clone().ready()).await.expect("not stuck") {
            client = ready;
            let Ok((answer, _)) = client.send_request(asking("short"), true) else { break };
            drop(answer);
            sent += 1;
            assert!(sent < 100_000, "still served");
            tokio::task::yield_now().await;
        }
        let ended = tokio::time::timeout(LIMIT, connection).await.expect("it ends");
        assert!(ended.is_ok(), "no panic");
        let (client, _connection) = secure.http2().await;
        let mut client = client.ready().await.expect("ready");
        let (answer, _) = client.send_request(asking("short"), true).expect("sent");
        assert_eq!(answer.await.expect("answered").status(), 200);
    }
}
