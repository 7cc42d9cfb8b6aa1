//! The listener over real sockets.

use axum::extract::ws::WebSocketUpgrade;
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
    let socket = |socket: WebSocketUpgrade| async {
        socket.on_upgrade(|mut socket| async move { while socket.recv().await.is_some() {} })
    };
    let router = Router::new()
        .route("/", get(|| async { "page" }))
        .route("/healthz", get(|| async { "well" }))
        .route("/socket", get(socket));
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
        // They have asked and may ask again.
        let (stream, answer) = begin(served.address, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
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

/// A connection, and the first of what comes back for `request` on it.
async fn begin(address: SocketAddr, request: &str) -> (TcpStream, String) {
    let mut stream = TcpStream::connect(address).await.expect("connects");
    stream.write_all(request.as_bytes()).await.expect("written");
    let mut answer = vec![0; 1_024];
    let length = tokio::time::timeout(LIMIT, stream.read(&mut answer)).await.expect("answered").expect("readable");
    (stream, String::from_utf8_lossy(&answer[..length]).into_owned())
}

#[tokio::test]
async fn who_asks_takes_the_place_of_the_oldest_who_does_not() {
    let served = served(3).await;
    let mut idle = Vec::new();
    for _ in 0..3 {
        let mut stream = TcpStream::connect(served.address).await.expect("connects");
        stream.write_all(b"GET / HT").await.expect("written");
        idle.push(stream);
    }
    assert!(ask(served.address, &get_of("/")).await.ends_with("page"));
    let mut rest = Vec::new();
    let _ = tokio::time::timeout(LIMIT, idle[0].read_to_end(&mut rest)).await.expect("closed");
    assert!(rest.is_empty(), "the oldest has left without a word");
    for stream in &mut idle[1..] {
        let _ = stream.write_all(b"TP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await;
        let mut answer = String::new();
        let _ = tokio::time::timeout(LIMIT, stream.read_to_string(&mut answer)).await.expect("answered");
        assert!(answer.ends_with("page"), "one left, not more: {answer}");
    }
}

#[tokio::test]
async fn sockets_that_stay_open_leave_room_for_requests() {
    let served = served(4).await;
    let upgrade = "GET /socket HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                   Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    let mut sockets = Vec::new();
    for _ in 0..3 {
        let (socket, answer) = begin(served.address, upgrade).await;
        assert!(answer.starts_with("HTTP/1.1 101"), "{answer}");
        sockets.push(socket);
    }
    let (_, refused) = begin(served.address, upgrade).await;
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("retry-after"), "{refused}");
    let begun = tokio::time::Instant::now();
    // The refused one's connection may not have ended yet.
    while !ask(served.address, &get_of("/")).await.ends_with("page") {
        assert!(begun.elapsed() < LIMIT, "a place is left");
        tokio::task::yield_now().await;
    }
    drop(sockets.pop());
    while !begin(served.address, upgrade).await.1.starts_with("HTTP/1.1 101") {
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
    async fn http2(&self) -> (h2::client::SendRequest<bytes::Bytes>, tokio::task::JoinHandle<Result<(), h2::Error>>) {
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
