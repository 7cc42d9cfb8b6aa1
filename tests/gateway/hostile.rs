//! Bad input of every kind, while a call is speaking: it gets the protocol's own error, and the call has no gap.

use std::time::Duration;

use antiphon::secret::Secret;
use antiphon::server::config::Token;
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::listen;
use futures_util::{SinkExt, StreamExt};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio_tungstenite::tungstenite::Message;

use super::support::{PATIENCE, Rig, SENTENCE, hear_turn};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_input_never_costs_another_call_a_frame() {
    let rig = Rig::start().await;
    let call = rig.telephone("silent", Codec::Pcmu).await;
    let id = call.id().expect("named").to_owned();
    let asked = rig.speak(&call, &SENTENCE.repeat(3)).await;
    let onset = call.onset(asked, PATIENCE).await.expect("speech is heard");

    bad_http(&rig, &id).await;
    bad_sdp(&rig).await;
    bad_datagrams(&rig).await;
    bad_sockets(&rig, &id).await;

    let (_, end) = hear_turn(&call, asked).await;
    let stalls = listen::stalls(&call.ear().heard(), onset, end, Duration::from_millis(100));
    assert!(stalls.is_empty(), "{stalls:?}");
    call.hang_up().await;
    rig.app.drain().await;
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
    assert_eq!(rig.get("/v1/nothing").await.0, 404);
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_tokens_every_route_needs_one() {
    let rig = Rig::with(|config| {
        config.http.tokens = vec![Token { name: "t".into(), token: Secret::new("sesame"), scopes: Vec::new() }];
    })
    .await;
    for (path, status) in [("/healthz", 200), ("/readyz", 200), ("/", 200), ("/v1/calls", 401), ("/metrics", 401)] {
        assert_eq!(rig.get(path).await.0, status, "{path}");
    }
    let (status, error) = rig.post("/v1/webrtc", json!({})).await;
    assert_eq!((status, &error["error"]["type"]), (401, &json!("authentication_error")));
    let allowed = rig.client.get(format!("{}/metrics", rig.http)).bearer_auth("sesame").send().await.expect("HTTP");
    assert_eq!(allowed.status(), 200);
    assert!(allowed.text().await.expect("text").contains("antiphon_"));
    rig.app.drain().await;
}
