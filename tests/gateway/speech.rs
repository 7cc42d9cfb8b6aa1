//! `/v1/audio/speech` and its WebSocket sibling.

use antiphon::audio::from_i16;
use antiphon::voice::decode::decode;
use antiphon_loadgen::correlate;
use antiphon_loadgen::heard::Clip;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;

use super::support::{PATIENCE, Rig, SENTENCE};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_format_is_served_and_bad_requests_say_what_to_change() {
    let rig = Rig::start().await;
    let reference = rig.reference(SENTENCE).await;
    for (format, magic) in [("wav", &b"RIFF"[..]), ("flac", b"fLaC"), ("opus", b"OggS")] {
        let body = json!({ "model": "tts-1", "voice": "alloy", "input": SENTENCE, "response_format": format });
        let response = rig.client.post(format!("{}/v1/audio/speech", rig.http)).json(&body).send().await.expect("HTTP");
        assert_eq!(response.status(), 200);
        let bytes = response.bytes().await.expect("a body");
        assert!(bytes.starts_with(magic), "{format}: {:x?}", &bytes[..8.min(bytes.len())]);
        let sound = decode(bytes.to_vec()).unwrap_or_else(|error| panic!("{format}: {error}"));
        let sound = Clip { rate: sound.rate, pcm: sound.samples };
        let found = correlate::correlate(&sound, &reference).expect("comparable rates");
        assert!(found.value > 0.9 && found.shifts.is_empty(), "{format}: {found:?}");
        let difference = (sound.duration().as_secs_f64() - reference.duration().as_secs_f64()).abs();
        assert!(difference < 0.1, "{format}: {difference} s longer or shorter");
    }
    for (body, param) in [
        (json!({ "input": "x", "response_format": "mp3" }), "response_format"),
        (json!({ "input": " " }), "input"),
        (json!({ "input": "x".repeat(5_000) }), "input"),
        (json!({ "input": "x", "speed": 9 }), "speed"),
    ] {
        let (status, error) = rig.post("/v1/audio/speech", body).await;
        assert_eq!((status, &error["error"]["param"]), (400, &json!(param)), "{error}");
    }
    let (status, error) = rig.post("/v1/audio/speech", json!({ "input": "Hello.", "voice": "no-such-voice" })).await;
    assert_eq!(status, 400, "{error}");
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sse_carries_the_same_audio() {
    let rig = Rig::start().await;
    let body = json!({ "input": SENTENCE, "response_format": "pcm", "stream_format": "sse" });
    let response = rig.client.post(format!("{}/v1/audio/speech", rig.http)).json(&body).send().await.expect("HTTP");
    let text = response.text().await.expect("a body");
    let mut pcm = Vec::new();
    let mut done = false;
    for line in text.lines().filter_map(|line| line.strip_prefix("data: ")) {
        let event: Value = serde_json::from_str(line).expect("JSON");
        match event["type"].as_str() {
            Some("speech.audio.delta") => {
                use base64::Engine;
                let audio = event["audio"].as_str().expect("base64");
                pcm.extend(base64::engine::general_purpose::STANDARD.decode(audio).expect("base64"));
            }
            Some("speech.audio.done") => done = event["usage"].is_object(),
            other => panic!("{other:?}"),
        }
    }
    assert!(done);
    let body = json!({ "input": SENTENCE, "response_format": "pcm" });
    let whole = rig.client.post(format!("{}/v1/audio/speech", rig.http)).json(&body).send().await.expect("HTTP");
    assert!(whole.bytes().await.expect("a body") == pcm, "the events carry other audio than the plain answer");
    assert_eq!(pcm.len(), 2 * rig.reference(SENTENCE).await.pcm.len());
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_that_is_being_written_is_spoken_over_the_socket() {
    let rig = Rig::start().await;
    let url = format!("{}/v1/audio/speech/stream", rig.http.replace("http", "ws"));
    let (mut socket, _) = tokio_tungstenite::connect_async(url).await.expect("upgraded");
    let mut send = async |value: Value| socket.send(Message::text(value.to_string())).await.expect("sent");
    send(json!({ "type": "session.config", "response_format": "pcm" })).await;
    for word in SENTENCE.split_inclusive(' ') {
        send(json!({ "type": "input.text", "text": word })).await;
    }
    send(json!({ "type": "input.done" })).await;
    let mut bytes = Vec::new();
    loop {
        match socket.next().await.expect("open").expect("sound") {
            Message::Binary(audio) => bytes.extend_from_slice(&audio),
            Message::Text(text) if text.contains("audio.done") => break,
            Message::Text(text) => assert!(text.contains("session.created"), "{text}"),
            _ => {}
        }
    }
    let pcm = bytes.chunks_exact(2).map(|pair| from_i16(i16::from_le_bytes([pair[0], pair[1]]))).collect();
    let spoken = Clip { rate: antiphon::audio::RATE, pcm };
    let found = correlate::correlate(&spoken, &rig.reference(SENTENCE).await).expect("comparable rates");
    assert!(found.found > 0.9, "{found:?}");
    socket.send(Message::text(json!({ "type": "nonsense" }).to_string())).await.expect("sent");
    let answer = socket.next().await.expect("open").expect("sound").into_text().expect("text");
    assert!(answer.contains("\"error\""), "{answer}");

    // A sentence that is finished is spoken, though neither the next word comes nor the end.
    socket
        .send(Message::text(json!({ "type": "input.text", "text": "Hello there." }).to_string()))
        .await
        .expect("sent");
    let first = timeout(PATIENCE, socket.next()).await.expect("it is not waited for").expect("open").expect("sound");
    assert!(first.is_binary(), "{first}");
    socket.send(Message::text(json!({ "type": "input.done" }).to_string())).await.expect("sent");
    while !socket.next().await.expect("open").expect("sound").into_text().is_ok_and(|text| text.contains("audio.done"))
    {
    }
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_voice_that_says_no_phonemes_speaks_the_word_and_a_header_says_so() {
    let rig = Rig::with(|config| config.engine.kind = antiphon::config::EngineKind::Tone).await;
    let ask = async |input: &str| {
        let body = json!({ "input": input, "markup": "ssml", "response_format": "pcm" });
        let response = rig.client.post(format!("{}/v1/audio/speech", rig.http)).json(&body).send().await.expect("HTTP");
        assert_eq!(response.status(), 200);
        let warned = response.headers().get("x-antiphon-warning").map(|value| value.to_str().expect("text").to_owned());
        (warned, response.bytes().await.expect("a body"))
    };
    let (warned, given) =
        ask("<speak>Say <phoneme alphabet='x-espeak' ph=\"t@m'A:t@U\">tomato</phoneme> now.</speak>").await;
    assert!(warned.is_some_and(|warning| warning.contains("phoneme")));
    let (warned, plain) = ask("<speak>Say tomato now.</speak>").await;
    assert_eq!(warned, None);
    assert_eq!(given, plain, "the word is spoken");
    rig.app.drain().await;
}
