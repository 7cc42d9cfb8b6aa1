//! Bad input of every kind, while a call is speaking: it gets the protocol's own error, and the call has no gap.

use std::time::Duration;

use antiphon::server::config::Token;
use antiphon_loadgen::codec::Codec;
use futures_util::{SinkExt, StreamExt};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio_tungstenite::tungstenite::Message;

use super::counted::Growth;
use super::raw::{Raw, audio_port, sdp};
use super::support::{PATIENCE, Rig, SENTENCE, gaps, hear_turn};
use super::watch::Watch;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_input_never_costs_another_call_a_frame() {
    let rig = Rig::start().await;
    let counts = Growth::of(&["antiphon_rtp_discarded_total{", "antiphon_webrtc_datagrams_dropped_total{"]);
    let call = rig.telephone("silent", Codec::Pcmu).await;
    let id = call.id().expect("named").to_owned();
    let asked = rig.speak(&call, &SENTENCE.repeat(6)).await;
    let onset = call.onset(asked, PATIENCE).await.expect("speech is heard");

    bad_http(&rig, &id).await;
    bad_sdp(&rig).await;
    bad_sip(&rig).await;
    bad_rtp(&rig).await;
    bad_datagrams(&rig).await;
    bad_sockets(&rig, &id).await;
    bad_frames(&rig, &id).await;

    let (_, end) = hear_turn(&call, asked).await;
    let stalls = gaps(&call.ear().heard(), onset, end);
    assert!(stalls.is_empty(), "{stalls:?}");
    counts.assert();
    // Each kind is in the log, and none of them fills it.
    let log = Watch::start();
    for words in [
        &["a request was refused", "status=400"][..],
        &["a connection ended badly"],
        &["malformed SIP message"],
        &["INVITE refused"],
        &["malformed RTP or RTCP was dropped"],
        &["a datagram was dropped"],
        &["a WebSocket ended badly"],
        &["bad frame from the agent"],
    ] {
        let lines = log.lines(words);
        assert!((1..200).contains(&lines), "{words:?}: {lines}");
    }
    call.hang_up().await;
    rig.app.drain().await;
}

/// Over UDP and TCP, with the answer that each deserves.
async fn bad_sip(rig: &Rig) {
    for (n, (method, headers, content, status)) in [
        ("INVITE", "", "v=0\r\nnonsense\r\n", "400"),
        ("INVITE", "", "v=0\r\no=- 1 1 IN IP4 127.0.0.1\r\ns=-\r\nt=0 0\r\nm=audio 9 RTP/AVP 18\r\n", "488"),
        ("INVITE", "Content-Type: text/plain\r\n", "hello", "415"),
        ("INVITE", "Content-Length: 9999\r\n", "", "400"),
        ("INVITE", "Require: nonsense\r\n", "", "420"),
        ("INVITE", "Max-Forwards: many\r\n", "", "400"),
        ("DANCE", "", "", "501"),
        ("BYE", "", "", "481"),
    ]
    .into_iter()
    .enumerate()
    {
        let mut telephone = Raw::new(rig.sip_udp(), &format!("bad-{n}")).await;
        telephone.ask(method, headers, content, &format!("SIP/2.0 {status}")).await;
    }
    let tcp = rig.app.gateway().sip.as_ref().and_then(|sip| sip.local_tcp()).expect("listens");
    for garbage in [&b"\x00\xff\r\n\r\n"[..], b"INVITE sip:x SIP/2.0\r\nContent-Length: -1\r\n\r\n", &[b'A'; 70_000]] {
        let mut stream = TcpStream::connect(tcp).await.expect("open");
        // It may be closed before all of it is taken.
        let _ = stream.write_all(garbage).await;
        let _ = stream.shutdown().await;
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(PATIENCE, stream.take(4_096).read_to_end(&mut answer)).await.expect("ends");
    }
}

/// On a call's own ports, from its own peer: the protocol has no answer to these, and the call goes on.
async fn bad_rtp(rig: &Rig) {
    let media = UdpSocket::bind("127.0.0.1:0").await.expect("a free port");
    let mut telephone = Raw::new(rig.sip_udp(), "bad-rtp").await;
    telephone.contact = format!("sip:silent@{}", rig.sip_udp());
    let invite = telephone.request("INVITE", "", &sdp(media.local_addr().expect("bound").port(), ""));
    telephone.send(&invite).await;
    let ok = telephone.expect("SIP/2.0 200").await;
    telephone.ack("").await;
    let port = audio_port(&ok);
    for datagram in [&b""[..], b"\x80", &[0; 172], &[0x90; 13], &[0xaf; 40], &[0x8f; 12], &[0xff; 2_000]] {
        for to in [port, port + 1] {
            media.send_to(datagram, ("127.0.0.1", to)).await.expect("sent");
        }
    }
    // They came by another socket than the BYE does and must not be overtaken by it.
    let told = async {
        while Watch::start().lines(&["malformed RTP or RTCP was dropped"]) == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, told).await.expect("the log tells of them");
    telephone.ask("BYE", "", "", "SIP/2.0 200").await;
}

/// Frames that are none (RFC 6455 section 5): a reserved opcode, reserved bits, no mask, a fragmented ping, text that
/// is not UTF-8, a length that nobody could send. The peer is told by a Close frame with the status for it.
async fn bad_frames(rig: &Rig, id: &str) {
    let paths = [format!("/v1/calls/{id}/agent"), format!("/v1/calls/{id}/media"), "/v1/audio/speech/stream".into()];
    for path in paths {
        for (frame, status) in [
            (&[0x83, 0x80, 0, 0, 0, 0][..], 1_002u16),
            (&[0xf1, 0x80, 0, 0, 0, 0], 1_002),
            (&[0x81, 0x02, b'h', b'i'], 1_002),
            (&[0x09, 0x80, 0, 0, 0, 0], 1_002),
            (&[0x81, 0x82, 0, 0, 0, 0, 0xff, 0xfe], 1_007),
            (&[0x81, 0xff, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0], 1_009),
        ] {
            let (socket, _) = tokio_tungstenite::connect_async(format!("{}{path}", rig.http.replace("http", "ws")))
                .await
                .expect("up");
            let tokio_tungstenite::MaybeTlsStream::Plain(mut stream) = socket.into_inner() else { unreachable!() };
            stream.write_all(frame).await.expect("taken");
            let mut heard = Vec::new();
            // Closed, be it by a reset behind the Close frame.
            let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut heard)).await.expect("it is closed");
            let close = [&[0x88, 2][..], &status.to_be_bytes()].concat();
            assert!(heard.ends_with(&close), "{path} {frame:x?}: {heard:x?}");
        }
    }
}

async fn bad_http(rig: &Rig, id: &str) {
    let url = |path: &str| format!("{}{path}", rig.http);
    let turns = url(&format!("/v1/calls/{id}/turns"));
    for body in ["", "{", "[]", "null", r#"{"text":5}"#, r#"{"text":"x","sped":1}"#, "\u{0}\u{0}"] {
        let request = rig.client.post(&turns).header("content-type", "application/json").body(body);
        let response = request.send().await.expect("HTTP");
        assert_eq!(response.status(), 400, "{body}");
        let error: serde_json::Value = response.json().await.expect("the error shape");
        assert!(error["error"]["message"].is_string(), "{error}");
    }
    let request = rig.client.post(&turns).body("text");
    assert_eq!(request.send().await.expect("HTTP").status(), 415);
    let request = rig.client.post(&turns).header("content-type", "application/json").body(vec![b' '; 2 << 20]);
    // The gateway answers before it has read it all, and closes; what the client sees of that is a matter of timing.
    match request.send().await {
        Ok(response) => assert_eq!(response.status(), 413),
        Err(error) => assert!(error.is_request(), "{error}"),
    }
    // On a connection of its own: the one before may be closed by now.
    let nothing = reqwest::Client::new().get(url("/v1/nothing")).send().await.expect("HTTP");
    assert_eq!(nothing.status(), 404);
    for garbage in [&b"\x16\x03\x01\x02\x00\x01\x00\x01"[..], b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n\r\n", &[0xff; 4096]]
    {
        let mut stream = TcpStream::connect(rig.app.http()).await.expect("open");
        stream.write_all(garbage).await.expect("taken");
        let mut answer = Vec::new();
        // Closed or answered with 400; either way it ends.
        let _ = tokio::time::timeout(PATIENCE, stream.take(4096).read_to_end(&mut answer)).await.expect("ends");
    }
}

async fn bad_sdp(rig: &Rig) {
    for (body, kind, status) in [
        ("", "application/sdp", 400),
        ("v=0", "application/sdp", 400),
        ("not sdp at all", "application/sdp", 400),
        ("{}", "application/json", 415),
    ] {
        let request = rig.client.post(format!("{}/v1/webrtc", rig.http)).header("content-type", kind).body(body);
        assert_eq!(request.send().await.expect("HTTP").status(), status, "{body}");
    }
}

async fn bad_datagrams(rig: &Rig) {
    let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a free port");
    let targets = [rig.sip_udp(), rig.app.gateway().webrtc.local_addr()];
    let mut byte = 7u8;
    for round in 0..200usize {
        let noise: Vec<u8> = (0..round * 5)
            .map(|_| {
                byte = byte.wrapping_mul(97).wrapping_add(31);
                byte
            })
            .collect();
        for target in targets {
            socket.send_to(&noise, target).await.expect("sent");
            let invite = format!("INVITE sip:x@y SIP/2.0\r\nVia: {round}\r\n\r\n");
            socket.send_to(invite.as_bytes(), target).await.expect("sent");
        }
    }
}

async fn bad_sockets(rig: &Rig, id: &str) {
    let base = rig.http.replace("http", "ws");
    for path in [format!("/v1/calls/{id}/agent"), format!("/v1/calls/{id}/media"), "/v1/audio/speech/stream".into()] {
        let (mut socket, _) = tokio_tungstenite::connect_async(format!("{base}{path}")).await.expect("upgraded");
        for text in ["", "{}", "[", r#"{"type":"text"}"#, r#"{"event":"media","media":{"payload":"!!"}}"#] {
            socket.send(Message::text(text)).await.expect("sent");
        }
        let mut errors = 0;
        while errors < 5 {
            let message = tokio::time::timeout(PATIENCE, socket.next()).await.expect("answered");
            if message.expect("open").expect("sound").to_text().is_ok_and(|text| text.contains("error")) {
                errors += 1;
            }
        }
        // Gone without a word.
        drop(socket);
    }
}

const SESAME: &str = "open-sesame-open-sesame";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_is_public_and_metrics_need_a_token() {
    let rig = Rig::with(|config| {
        config.http.tokens = vec![Token::new("t", SESAME, Vec::new())];
    })
    .await;
    for (path, status) in [("/healthz", 200), ("/readyz", 200), ("/", 200), ("/v1/calls", 401), ("/metrics", 401)] {
        assert_eq!(rig.get(path).await.0, status, "{path}");
    }
    let (status, error) = rig.post("/v1/webrtc", json!({})).await;
    assert_eq!((status, &error["error"]["type"]), (401, &json!("authentication_error")));
    let allowed = rig.client.get(format!("{}/metrics", rig.http)).bearer_auth(SESAME).send().await.expect("HTTP");
    assert_eq!(allowed.status(), 200);
    assert!(allowed.text().await.expect("text").contains("antiphon_"));
    rig.app.drain().await;
}
