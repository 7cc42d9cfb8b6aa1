//! SIP over WebSocket (RFC 7118): a client that can be reached by its connection only.

use crate::support::{event, limited, loopback, packet, raw::sdp, start, within};
use antiphon::{
    media::leg::{LegEvent, MediaLeg},
    sip::{SipConfig, TlsConfig},
};
use antiphon_loadgen::{
    rtc::peer::{Peer, Shape},
    rtp::Packet,
};
use futures_util::{SinkExt, StreamExt};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UdpSocket},
};
use tokio_tungstenite::{
    WebSocketStream, client_async,
    tungstenite::{Message, client::IntoClientRequest, http::HeaderValue},
};
use webrtc::{
    media_stream::track_remote::{TrackRemote, TrackRemoteEvent},
    peer_connection::RTCSessionDescription,
};

fn open() -> SipConfig {
    SipConfig { ws: Some(([127, 0, 0, 1], 0).into()), ..loopback() }
}

pub(crate) async fn connect<S>(
    stream: S,
    url: &str,
    headers: &[(&'static str, &str)],
) -> Result<WebSocketStream<S>, u16>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut request = url.into_client_request().expect("a URL");
    for (name, value) in headers {
        request.headers_mut().insert(*name, HeaderValue::from_str(value).expect("a value"));
    }
    match limited(client_async(request, stream)).await {
        Ok((socket, response)) => {
            assert_eq!(response.headers()["sec-websocket-protocol"], "sip");
            Ok(socket)
        }
        Err(tokio_tungstenite::tungstenite::Error::Http(response)) => Err(response.status().as_u16()),
        Err(error) => panic!("{error}"),
    }
}

/// The next SIP message whose first line contains `wanted`.
pub(crate) async fn expect<S>(socket: &mut WebSocketStream<S>, wanted: &str) -> String
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    loop {
        let Message::Text(text) = limited(socket.next()).await.expect("open").expect("reads") else { continue };
        if text.lines().next().unwrap_or_default().contains(wanted) {
            return text.to_string();
        }
    }
}

/// A request of a browser: what it says of its address leads nowhere. There is no Content-Length, as the message ends
/// with its frame.
pub(crate) fn request(method: &str, uri: &str, tag: &str, headers: &str, body: &str) -> Message {
    let number = if method == "BYE" { 2 } else { 1 };
    Message::text(format!(
        "{method} {uri} SIP/2.0\r\nVia: SIP/2.0/WS df7jal23ls0d.invalid;branch=z9hG4bK{method}\r\nMax-Forwards: 70\r\n\
         From: <sip:ada@example.com>;tag=ws\r\nTo: <sip:demo@example.com>{tag}\r\nCall-ID: ws-{uri}\r\n\
         CSeq: {number} {method}\r\nContact: <sip:ada@df7jal23ls0d.invalid;transport=ws>\r\n{headers}\r\n{body}"
    ))
}

async fn calls_and_hears<S>(mut socket: WebSocketStream<S>, endpoint: &antiphon::sip::Endpoint, calls: &mut Calls)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    // Keep-alives of both kinds.
    socket.send(Message::text("\r\n\r\n")).await.expect("sends");
    let pong = limited(socket.next()).await.expect("open").expect("reads");
    assert_eq!(pong, Message::text("\r\n"));
    socket.send(Message::Ping(b"1".to_vec().into())).await.expect("sends");
    assert!(matches!(limited(socket.next()).await.expect("open").expect("reads"), Message::Pong(_)));

    let ear = UdpSocket::bind("127.0.0.1:0").await.expect("binds");
    let port = ear.local_addr().expect("bound").port();
    let kind = "Content-Type: application/sdp\r\n";
    socket.send(request("INVITE", "sip:demo@example.com", "", kind, &sdp(port, ""))).await.expect("sends");
    let call = limited(calls.recv()).await.expect("a call");
    assert_eq!(call.user, "demo");
    let mut leg = limited(call.accept()).await.expect("accepted");
    let ok = expect(&mut socket, "SIP/2.0 200").await;
    assert!(header(&ok, "Via").contains("received=127.0.0.1"), "{ok}");
    acknowledge(&mut socket, &ok).await;
    leg.attach().await.expect("attaches");
    event(&mut leg, |e| *e == LegEvent::Connected).await;
    leg.send(packet(&leg, 7, b"heard")).await.expect("up");
    let mut buffer = [0; 2_048];
    let (length, _) = limited(ear.recv_from(&mut buffer)).await.expect("receives");
    assert_eq!(&buffer[12..length], b"heard");
    // A request of ours finds its way down the connection: nothing else leads to that name.
    leg.hang_up().await;
    ends(&mut socket).await;
    within("the call to be forgotten", || endpoint.calls() == 0).await;
}

pub(crate) fn header(message: &str, name: &str) -> String {
    let line = message.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("{name} in {message}")).trim_start_matches(':').trim().to_owned()
}

/// Acknowledges a 200.
async fn acknowledge<S>(socket: &mut WebSocketStream<S>, ok: &str)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let contact = header(ok, "Contact");
    assert!(contact.to_lowercase().contains(";transport=ws"), "{contact}");
    let tag = format!(";tag={}", header(ok, "To").split(";tag=").nth(1).expect("a tag"));
    let uri = contact.trim_start_matches('<').split('>').next().expect("an address").to_owned();
    // In the same dialog, whatever its Request-URI.
    let ack = match request("ACK", "sip:demo@example.com", &tag, "", "") {
        Message::Text(text) => Message::text(text.replacen("ACK sip:demo@example.com", &format!("ACK {uri}"), 1)),
        other => panic!("{other:?}"),
    };
    socket.send(ack).await.expect("sends");
}

/// Answers the BYE that comes.
pub(crate) async fn ends<S>(socket: &mut WebSocketStream<S>)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let bye = expect(socket, "BYE ").await;
    assert!(bye.lines().next().is_some_and(|line| line.contains("df7jal23ls0d.invalid")), "{bye}");
    let kept = ["Via", "From", "To", "Call-ID", "CSeq"];
    let lines = bye.lines().filter(|line| kept.contains(&line.split(':').next().unwrap_or_default()));
    let lines: String = lines.map(|line| format!("{line}\r\n")).collect();
    socket.send(Message::text(format!("SIP/2.0 200 OK\r\n{lines}\r\n"))).await.expect("sends");
}

/// As the SIP libraries of browsers do it: ICE and DTLS, by an offer in an INVITE.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_browsers_offer_is_answered_with_a_path_and_keys() {
    let (endpoint, mut calls) = start(open()).await;
    let at = endpoint.local_ws().0.expect("bound");
    let stream = TcpStream::connect(at).await.expect("connects");
    let protocol = ("sec-websocket-protocol", "sip");
    let mut socket = connect(stream, &format!("ws://{at}/"), &[protocol]).await.expect("taken");
    let mut browser = Peer::new(Shape { eager: true, ..Shape::default() }).await.expect("a peer");
    let offer = browser.connection.create_offer(None).await.expect("an offer");
    browser.connection.set_local_description(offer).await.expect("set");
    let offer = limited(browser.description()).await.expect("a description");
    assert!(offer.contains("UDP/TLS/RTP/SAVPF") && offer.contains("a=ice-ufrag"), "{offer}");
    let kind = "Content-Type: application/sdp\r\n";
    socket.send(request("INVITE", "sip:demo@example.com", "", kind, &offer)).await.expect("sends");
    let mut leg = limited(limited(calls.recv()).await.expect("a call").accept()).await.expect("accepted");
    assert!(leg.encrypted());
    let ok = expect(&mut socket, "SIP/2.0 200").await;
    let answer = ok.split_once("\r\n\r\n").expect("a body").1;
    let answer = RTCSessionDescription::answer(answer.to_owned()).expect("an answer");
    browser.connection.set_remote_description(answer).await.expect("fits");
    acknowledge(&mut socket, &ok).await;
    leg.attach().await.expect("attaches");
    // Said when there are keys, and not with the ACK alone.
    event(&mut leg, |e| *e == LegEvent::Connected).await;

    let microphone = browser.microphone.clone().expect("one");
    let (mut said, mut heard) = (0, false);
    let mut track: Option<std::sync::Arc<dyn TrackRemote>> = None;
    let mut back = false;
    let mut beat = tokio::time::interval(std::time::Duration::from_millis(20));
    limited(async {
        while !(heard && back) {
            tokio::select! {
                _ = beat.tick() => {
                    let payload = bytes::Bytes::from_static(b"from the browser");
                    let (sequence, timestamp) = (said, u32::from(said) * 960);
                    microphone.send(Packet { payload_type: 111, marker: said == 0, sequence, timestamp, ssrc: 0, payload })
                        .await
                        .expect("open");
                    leg.send(packet(&leg, said, b"to the browser")).await.expect("up");
                    said += 1;
                }
                event = leg.recv() => match event {
                    LegEvent::Rtp(packet) => heard |= packet.payload == b"from the browser"[..],
                    LegEvent::Closed(end) => panic!("over: {end:?}"),
                    _ => {}
                },
                Some(new) = browser.tracks.recv(), if track.is_none() => track = Some(new),
                event = async { track.as_ref().expect("checked").poll().await }, if track.is_some() => {
                    if let Some(TrackRemoteEvent::OnRtpPacket(packet)) = event {
                        back |= packet.payload == b"to the browser"[..];
                    }
                }
            }
        }
    })
    .await;
    leg.hang_up().await;
    ends(&mut socket).await;
    within("the call to be forgotten", || endpoint.calls() == 0).await;
    browser.connection.close().await.ok();
}

type Calls = tokio::sync::mpsc::Receiver<antiphon::sip::IncomingCall>;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_without_an_address_calls_over_a_websocket_and_is_hung_up_on() {
    let (endpoint, mut calls) = start(open()).await;
    let at = endpoint.local_ws().0.expect("bound");
    let stream = TcpStream::connect(at).await.expect("connects");
    let protocol = ("sec-websocket-protocol", "sip");
    let socket = connect(stream, &format!("ws://{at}/"), &[protocol]).await.expect("taken");
    calls_and_hears(socket, &endpoint, &mut calls).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_over_tls() {
    use rustls::pki_types::{CertificateDer, pem::PemObject};
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/sip");
    let (cert, key) = (folder.join("test-only-cert.pem"), folder.join("test-only-key.pem"));
    let any = ([127, 0, 0, 1], 0).into();
    let tls = TlsConfig { bind: any, cert: cert.clone(), key };
    let (endpoint, mut calls) = start(SipConfig { tls: Some(tls), wss: Some(any), ..loopback() }).await;
    let at = endpoint.local_ws().1.expect("bound");
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&cert).expect("reads")).expect("a certificate");
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let tcp = TcpStream::connect(at).await.expect("connects");
    let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(config));
    let stream = limited(connector.connect("localhost".try_into().expect("a name"), tcp)).await.expect("shakes hands");
    let protocol = ("sec-websocket-protocol", "sip");
    let socket = connect(stream, &format!("ws://{at}/"), &[protocol]).await.expect("taken");
    calls_and_hears(socket, &endpoint, &mut calls).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_others_other_protocols_and_what_is_no_message_are_refused() {
    let (endpoint, _calls) = start(open()).await;
    let at = endpoint.local_ws().0.expect("bound");
    let url = format!("ws://{at}/");
    let protocol = ("sec-websocket-protocol", "sip");
    let tcp = || async { TcpStream::connect(at).await.expect("connects") };
    let evil = connect(tcp().await, &url, &[protocol, ("origin", "https://evil.example")]).await;
    assert_eq!(evil.err(), Some(403));
    assert_eq!(connect(tcp().await, &url, &[("sec-websocket-protocol", "msrp")]).await.err(), Some(400));
    let own = connect(tcp().await, &url, &[protocol, ("origin", "http://127.0.0.1:8080")]).await;
    let mut socket = own.expect("a page of the same host");
    // Nonsense is answered or dropped as over UDP, and the connection lives.
    socket.send(Message::text("hello")).await.expect("sends");
    socket.send(request("DANCE", "sip:demo@example.com", "", "", "")).await.expect("sends");
    expect(&mut socket, "SIP/2.0 501").await;
    // A message that is too long ends it.
    let long = "x".repeat(70_000);
    socket.send(Message::text(long)).await.expect("sends");
    let over = limited(async {
        loop {
            match socket.next().await {
                None | Some(Err(_) | Ok(Message::Close(_))) => return,
                Some(Ok(_)) => {}
            }
        }
    });
    over.await;
    // wss without a certificate is a mistake.
    let (sender, _receiver) = tokio::sync::mpsc::channel(1);
    let config = SipConfig { wss: Some(([127, 0, 0, 1], 0).into()), ..loopback() };
    let started = antiphon::sip::Endpoint::start(config, antiphon::sip::RtpConfig::default(), sender).await;
    assert!(started.err().expect("refused").to_string().contains("tls"));
}
