//! Every route of the API to success and every metric with a value, on the program as it is served.
//!
//! What each answers to bad input, and what it does in detail, has tests of its own. A route of `openapi.json` that is
//! neither here nor in [`ELSEWHERE`] fails the test, and so does a metric that tells nothing and is not in [`PROVOKED`].

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use antiphon::telemetry::metrics::METRICS;
use antiphon_loadgen::call::{Call, End, now};
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::rtc::peer::{Peer, Shape};
use antiphon_loadgen::{rtc, sip};
use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::{SinkExt, StreamExt};
use reqwest::{Client, Method, RequestBuilder, Response};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};

use super::program::Serve;
use super::provoked::PROVOKED;
use super::support::{PATIENCE, SENTENCE, hear_turn};

/// Operations that succeed in another test: method, path, file of this suite, test.
const ELSEWHERE: &[(&str, &str, &str, &str)] = &[
    (
        "post",
        "/v1/audio/voices",
        "gateway/voices.rs",
        "a_recording_becomes_a_voice_on_live_calls_and_other_callers_notice_nothing",
    ),
    (
        "post",
        "/v1/calls/{id}/bridge",
        "gateway/bridges.rs",
        "a_caller_speaks_with_a_human_the_agent_whispers_and_comes_back",
    ),
    (
        "delete",
        "/v1/calls/{id}/bridge",
        "gateway/bridges.rs",
        "a_human_who_does_not_come_leaves_the_caller_with_the_agent_who_is_told_why",
    ),
];

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// Asks a served gateway, and notes what succeeded.
struct Tour {
    client: Client,
    base: String,
    done: Mutex<BTreeSet<(String, String)>>,
    /// Metrics that were above zero at some scrape.
    told: Mutex<BTreeSet<&'static str>>,
}

impl Tour {
    fn note(&self, method: &str, route: &str) {
        self.done.lock().expect("no panic").insert((method.to_lowercase(), route.to_owned()));
    }

    /// Asks for `route` with `id` in its place; the answer has to be `wanted`.
    async fn ask(
        &self,
        (method, route): (&str, &str),
        id: &str,
        wanted: u16,
        change: impl FnOnce(RequestBuilder) -> RequestBuilder,
    ) -> Response {
        let url = format!("{}{}", self.base, route.replace("{id}", id).replace("{name}", id));
        let method_ = Method::from_bytes(method.as_bytes()).expect("a method");
        let response = change(self.client.request(method_, url)).send().await.expect("HTTP");
        if response.status().as_u16() != wanted {
            let status = response.status();
            panic!("{method} {route}: {status} {}", response.text().await.unwrap_or_default());
        }
        self.note(method, route.split('?').next().unwrap_or_default());
        response
    }

    async fn json(&self, operation: (&str, &str), id: &str, wanted: u16, body: Value) -> Value {
        let response = self.ask(operation, id, wanted, |request| request.json(&body)).await;
        response.json().await.unwrap_or(Value::Null)
    }

    async fn socket(&self, route: &str, id: &str) -> Socket {
        let url = format!("{}{}", self.base.replace("http", "ws"), route.replace("{id}", id));
        let (socket, response) = tokio_tungstenite::connect_async(url).await.expect("upgraded");
        assert_eq!(response.status().as_u16(), 101, "{route}");
        self.note("get", route);
        socket
    }

    async fn metrics(&self) -> String {
        let text = self.ask(("GET", "/metrics"), "", 200, |r| r).await.text().await.expect("text");
        let tells =
            |name: &str| ["{", " ", "_count{", "_count "].iter().any(|end| value(&text, &format!("{name}{end}")) > 0.0);
        self.told.lock().expect("no panic").extend(METRICS.iter().map(|metric| metric.name).filter(|name| tells(name)));
        text
    }
}

/// The next text frame that `wanted` says yes to.
async fn frame(socket: &mut Socket, wanted: impl Fn(&Value) -> bool) -> Value {
    let search = async {
        loop {
            let message = socket.next().await.expect("open").expect("sound");
            if let Ok(text) = message.to_text()
                && let Ok(value) = serde_json::from_str::<Value>(text)
                && wanted(&value)
            {
                return value;
            }
        }
    };
    timeout(PATIENCE, search).await.expect("the frame comes")
}

/// The events of all calls so far.
#[derive(Clone, Default)]
struct Events(Arc<Mutex<Vec<Value>>>);

impl Events {
    async fn listen(tour: &Tour) -> Events {
        let events = Events::default();
        let response = tour.ask(("GET", "/v1/events"), "", 200, |r| r).await;
        let kept = events.clone();
        tokio::spawn(async move {
            let mut body = response.bytes_stream();
            let mut text = String::new();
            while let Some(Ok(bytes)) = body.next().await {
                text.push_str(&String::from_utf8_lossy(&bytes));
                while let Some((event, rest)) = text.split_once("\n\n").map(|(a, b)| (a.to_owned(), b.to_owned())) {
                    text = rest;
                    let data = event.lines().filter_map(|line| line.strip_prefix("data: "));
                    let data: Vec<Value> = data.filter_map(|line| serde_json::from_str(line).ok()).collect();
                    kept.0.lock().expect("no panic").extend(data);
                }
            }
        });
        events
    }

    async fn has(&self, what: &str, wanted: impl Fn(&Value) -> bool) {
        let search = async {
            while !self.0.lock().expect("no panic").iter().any(&wanted) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let names = || -> Vec<String> {
            self.0.lock().expect("no panic").iter().map(|event| event["event"].to_string()).collect()
        };
        assert!(timeout(PATIENCE, search).await.is_ok(), "no event {what} among {:?}", names());
    }
}

/// A telephone call that the gateway places, with everything that can be asked of a call.
async fn telephone(tour: &Tour, events: &Events) {
    let caller = sip::Caller::bind(sip::Config { codecs: vec![Codec::Pcmu], ..sip::Config::default() });
    let caller = caller.await.expect("free ports");
    let uri = caller.uri();
    let answering = tokio::spawn(caller.answer(PATIENCE));
    let placed = tour.json(("POST", "/v1/calls"), "", 201, json!({ "to": uri, "agent": "silent", "wait": true })).await;
    let call: Call = answering.await.expect("no panic").expect("answered");
    let id = placed["id"].as_str().expect("an id");
    let listed = tour.json(("GET", "/v1/calls"), "", 200, Value::Null).await;
    assert_eq!(listed["calls"][0]["id"], id);
    assert_eq!(tour.json(("GET", "/v1/calls/{id}"), id, 200, Value::Null).await["leg"], "sip");
    // A call counts itself once its task runs, which may be after it was answered.
    let counted = async {
        while value(&tour.metrics().await, "antiphon_calls{leg=\"sip\"}") != 1.0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    assert!(timeout(PATIENCE, counted).await.is_ok(), "the call is not counted");

    let mut media = tour.socket("/v1/calls/{id}/media", id).await;
    frame(&mut media, |frame| frame["event"] == "start").await;
    let asked = now();
    tour.json(("POST", "/v1/calls/{id}/turns"), id, 202, json!({ "text": SENTENCE })).await;
    // The turn is in the stream of its audio: mu-law of which silence is 0xff or 0x7f.
    frame(&mut media, |frame| {
        let sound = frame["media"]["payload"].as_str().and_then(|text| STANDARD.decode(text).ok()).unwrap_or_default();
        frame["media"]["track"] == "outbound" && sound.iter().filter(|byte| **byte & 0x7f < 0x50).count() > 20
    })
    .await;
    hear_turn(&call, asked).await;
    // And what the reader of it says is heard by the caller.
    let spoken = now();
    let tone: Vec<u8> = (0..8_000u32).map(|n| if n % 16 < 8 { 0x10 } else { 0x90 }).collect();
    for piece in tone.chunks(160) {
        let frame = json!({ "event": "media", "media": { "payload": STANDARD.encode(piece) } });
        media.send(Message::text(frame.to_string())).await.expect("sent");
    }
    media
        .send(Message::text(json!({ "event": "mark", "mark": { "name": "played" } }).to_string()))
        .await
        .expect("sent");
    hear_turn(&call, spoken).await;
    frame(&mut media, |frame| frame["event"] == "mark" && frame["mark"]["name"] == "played").await;
    drop(media);

    for state in ["paused", "recording"] {
        let told = tour.json(("POST", "/v1/calls/{id}/recording"), id, 200, json!({ "state": state })).await;
        assert_eq!(told["state"], state);
    }
    tour.json(("POST", "/v1/calls/{id}/dtmf"), id, 202, json!({ "digits": "42#" })).await;
    let digits = call.ear().wait(PATIENCE, |heard| {
        let digits: String = heard.digits.iter().map(|digit| digit.digit).collect();
        (digits == "42#").then_some(())
    });
    digits.await.expect("the keys arrive");

    tour.json(("POST", "/v1/calls/{id}/turns"), id, 202, json!({ "text": SENTENCE.repeat(6) })).await;
    events.has("firstAudio", |event| event["event"] == "firstAudio").await;
    tour.json(("POST", "/v1/calls/{id}/interrupt"), id, 202, Value::Null).await;
    events.has("interrupted", |event| event["event"] == "interrupted" && event["callId"] == id).await;
    tour.json(("POST", "/v1/calls/{id}/hold"), id, 202, Value::Null).await;
    events.has("held", |event| event["event"] == "held" && event["held"] == true).await;
    tour.json(("POST", "/v1/calls/{id}/resume"), id, 202, Value::Null).await;
    events.has("resumed", |event| event["event"] == "held" && event["held"] == false).await;

    let mut agent = tour.socket("/v1/calls/{id}/agent", id).await;
    frame(&mut agent, |frame| frame["type"] == "setup" && frame["callSid"] == id).await;
    let asked = now();
    let text = json!({ "type": "text", "token": "This comes from an agent.", "last": true });
    agent.send(Message::text(text.to_string())).await.expect("sent");
    hear_turn(&call, asked).await;

    let told = json!({ "text": "Is anybody there?", "lang": "en" });
    tour.json(("POST", "/v1/calls/{id}/prompt"), id, 202, told).await;
    frame(&mut agent, |frame| frame["type"] == "prompt" && frame["voicePrompt"] == "Is anybody there?").await;

    // The synthetic telephone goes where it is told to.
    let to = json!({ "to": "sip:other@127.0.0.1:9" });
    tour.json(("POST", "/v1/calls/{id}/transfer"), id, 202, to).await;
    events.has("transferred", |event| event["event"] == "transferred" && event["callId"] == id).await;
    assert_eq!(call.ended(PATIENCE).await, Some(End::Remote));
    events.has("answered", |event| event["event"] == "answered" && event["callId"] == id).await;
    events.has("ended", |event| event["event"] == "ended" && event["callId"] == id).await;
    super::program::until(&format!("{}/v1/records/{id}", tour.base), |record| record["state"] == "ended").await;
    // Its last seconds are written when the call is over.
    let complete = async {
        let url = format!("{}/v1/calls/{id}/recording", tour.base);
        while tour.client.get(&url).send().await.expect("an answer").status() != 200 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(PATIENCE, complete).await.expect("the recording is completed");
    let sound = tour.ask(("GET", "/v1/calls/{id}/recording"), id, 200, |r| r).await;
    assert!(sound.bytes().await.expect("whole").starts_with(b"OggS"));
    let record = tour.json(("GET", "/v1/records/{id}"), id, 200, Value::Null).await;
    assert_eq!(record["cause"], "transferred", "{record}");
    assert_eq!(tour.json(("GET", "/v1/records"), "", 200, Value::Null).await["records"][0]["id"], id);
    let usage = tour.json(("GET", "/v1/usage"), "", 200, Value::Null).await;
    let calls = |kind: &str| usage["usage"][0][kind].as_u64().unwrap_or_default();
    assert!(calls("inboundCalls") + calls("outboundCalls") >= 1, "{usage}");
}

/// An offer with its candidates, and the peer that it is of.
pub(crate) async fn offer() -> (Peer, String) {
    let mut peer = Peer::new(Shape::default()).await.expect("a peer");
    let offer = peer.connection.create_offer(None).await.expect("an offer");
    peer.connection.set_local_description(offer).await.expect("an offer");
    let offer = peer.description().await.expect("gathered");
    (peer, offer)
}

/// The routes by which browsers come.
async fn browsers(tour: &Tour) {
    let header = |response: &Response, name: &str| -> String {
        response.headers().get(name).unwrap_or_else(|| panic!("a header {name}")).to_str().expect("ASCII").to_owned()
    };
    let servers = tour.json(("GET", "/v1/webrtc"), "", 200, Value::Null).await;
    assert!(servers["iceServers"].is_array(), "{servers}");
    for route in ["/v1/webrtc", "/whip"] {
        let (_peer, offer) = offer().await;
        let response = tour
            .ask(("POST", route), "", 201, |request| {
                request.header("content-type", "application/sdp").body(offer.clone())
            })
            .await;
        let (location, tag) = (header(&response, "location"), header(&response, "etag"));
        let id = location.rsplit('/').next().expect("an id").to_owned();
        let of_it = ["a=ice-ufrag:", "a=ice-pwd:", "a=candidate:"];
        let lines = offer.lines().filter(|line| of_it.iter().any(|start| line.starts_with(start)));
        let fragment = lines.collect::<Vec<_>>().join("\r\n") + "\r\n";
        tour.ask(("PATCH", "/v1/webrtc/{id}"), &id, 204, |request| {
            request.header("content-type", "application/trickle-ice-sdpfrag").header("if-match", tag).body(fragment)
        })
        .await;
        // Another connection of the same page; the first one's session lasts until that has connected.
        let (_other, offer) = self::offer().await;
        let other = tour.ask(("POST", "/v1/webrtc/{id}"), &id, 201, |request| {
            request.header("content-type", "application/sdp").body(offer)
        });
        let other = header(&other.await, "location");
        assert!(other.starts_with("/v1/webrtc/") && !other.ends_with(&id), "{other}");
        tour.ask(("DELETE", "/v1/webrtc/{id}"), &id, 200, |r| r).await;
    }
    let (_peer, offer) = offer().await;
    let answer = tour.json(("POST", "/api/offer"), "", 200, json!({ "sdp": offer, "type": "offer" })).await;
    let candidates: Vec<Value> = offer
        .lines()
        .filter(|line| line.starts_with("a=candidate:"))
        .map(|line| json!({ "candidate": &line[2..], "sdp_mid": "0", "sdp_mline_index": 0 }))
        .collect();
    let patch = json!({ "pc_id": answer["pc_id"], "candidates": candidates });
    tour.json(("PATCH", "/api/offer"), "", 200, patch).await;
    let id = answer["pc_id"].as_str().expect("an id");
    tour.ask(("DELETE", "/v1/webrtc/{id}"), id, 200, |r| r).await;

    let call = rtc::Caller::connect(rtc::Config { agent: Some("demo".into()), ..rtc::Config::new(tour.base.clone()) });
    let call = call.await.expect("answered");
    hear_turn(&call, call.setup().asked).await;
    assert_eq!(value(&tour.metrics().await, "antiphon_webrtc_sessions "), 1.0);
    call.hang_up().await;
}

/// Speech without calls, jobs and voices.
async fn speech(tour: &Tour, state: &Path) {
    let body = json!({ "input": SENTENCE, "response_format": "pcm" });
    let whole = tour.ask(("POST", "/v1/audio/speech"), "", 200, |r| r.json(&body)).await.bytes().await.expect("a body");
    assert!(whole.len() > 2 * 24_000, "{} bytes", whole.len());
    let mut socket = tour.socket("/v1/audio/speech/stream", "").await;
    for message in [
        json!({ "type": "session.config", "response_format": "pcm" }),
        json!({ "type": "input.text", "text": "Hello." }),
        json!({ "type": "input.done" }),
    ] {
        socket.send(Message::text(message.to_string())).await.expect("sent");
    }
    frame(&mut socket, |frame| frame["type"].as_str().is_some_and(|kind| kind.contains("audio.done"))).await;

    let job = tour.json(("POST", "/v1/audio/speech/batch"), "", 202, json!({ "input": SENTENCE })).await;
    let id = job["id"].as_str().expect("an id");
    // Followed to its end, where the stream ends, too.
    let told = tour.ask(("GET", "/v1/jobs/{id}/events"), id, 200, |r| r).await.text().await.expect("it ends");
    let last = told.rsplit("event: job\ndata: ").next().and_then(|event| event.lines().next()).expect("an event");
    assert_eq!(serde_json::from_str::<Value>(last).expect("JSON")["state"], "done", "{told}");
    assert_eq!(tour.json(("GET", "/v1/jobs/{id}"), id, 200, Value::Null).await["state"], "done");
    assert_eq!(tour.json(("GET", "/v1/jobs"), "", 200, Value::Null).await["jobs"][0]["id"], id);
    let audio = tour.ask(("GET", "/v1/jobs/{id}/audio"), id, 200, |r| r).await.bytes().await.expect("a body");
    assert!(audio.starts_with(b"RIFF"));
    assert!(value(&tour.metrics().await, "antiphon_batch_jobs{state=\"done\"}") == 1.0);
    tour.ask(("DELETE", "/v1/jobs/{id}"), id, 200, |r| r).await;

    let voices = tour.json(("GET", "/v1/audio/voices"), "", 200, Value::Null).await;
    assert!(voices["voices"].as_array().is_some_and(|list| !list.is_empty()), "{voices}");
    // Enrolled by others: the files are what counts.
    let model = tempfile::tempdir().expect("a folder");
    antiphon::synth::cosyvoice::random::write(
        model.path(),
        antiphon::synth::cosyvoice::random::Size::Tiny,
        1,
        |_, _| (),
    )
    .expect("written");
    let folder = state.join("antiphon/voices");
    std::fs::create_dir_all(&folder).expect("made");
    for name in ["anna", "berta"] {
        std::fs::copy(model.path().join("voices/random.safetensors"), folder.join(format!("{name}.safetensors")))
            .expect("copied");
    }
    let file = tour.ask(("GET", "/v1/audio/voices/{name}"), "berta", 200, |r| r).await.bytes().await.expect("a body");
    assert!(antiphon::voice::file::Voice::parse(&file, "berta").is_ok());
    tour.ask(("DELETE", "/v1/audio/voices/{name}"), "anna", 204, |r| r).await;
    let by_query = tour.client.delete(format!("{}/v1/audio/voices?name=berta", tour.base)).send().await.expect("HTTP");
    assert_eq!(by_query.status(), 204);
    tour.note("delete", "/v1/audio/voices");
    assert!(
        std::fs::read_dir(&folder)
            .expect("readable")
            .all(|entry| { !entry.expect("an entry").file_name().to_string_lossy().ends_with(".safetensors") })
    );
}

/// The sum of the samples that begin with `series`.
fn value(text: &str, series: &str) -> f64 {
    let samples = text.lines().filter(|line| line.starts_with(series));
    samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// A collector that takes every trace.
async fn collector() -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let router = Router::new().route("/v1/{signal}", post(async || StatusCode::OK));
    tokio::spawn(async move { axum::serve(listener, router).await });
    url
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_route_succeeds_and_every_metric_tells() {
    let (folder, state) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let otlp = collector().await;
    let mut program = Serve::start(folder.path(), state.path(), |command| {
        command.env("ANTIPHON_LOG__OTLP", otlp).env("ANTIPHON_CALL__DRAIN_GRACE_S", "1");
        command.env("ANTIPHON_RECORDING__MODE", "all").env("ANTIPHON_RECORDING__CONSENT", "");
    });
    program.ready().await;
    let tour =
        Tour { client: Client::new(), base: program.http.clone(), done: Mutex::default(), told: Mutex::default() };
    for route in ["/", "/antiphon.js", "/healthz", "/readyz", "/openapi.json"] {
        tour.ask(("GET", route), "", 200, |r| r).await;
    }
    let events = Events::listen(&tour).await;
    telephone(&tour, &events).await;
    let caller = sip::Caller::bind(sip::Config::default()).await.expect("free ports");
    let call = caller.call(&format!("sip:demo@{}", program.sip)).await.expect("answered");
    hear_turn(&call, call.setup().asked).await;
    tour.ask(("DELETE", "/v1/calls/{id}"), call.id().expect("named"), 204, |r| r).await;
    assert_eq!(call.ended(PATIENCE).await, Some(End::Remote));
    events.has("its end", |event| event["event"] == "ended" && event["callId"] == json!(call.id())).await;
    browsers(&tour).await;
    speech(&tour, state.path()).await;

    // A call counts as ended a moment after it was told to end.
    let ended = async {
        loop {
            let shown = tour.metrics().await;
            if value(&shown, "antiphon_calls_ended_total{leg=\"webrtc\"") >= 4.0 {
                return shown;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let shown = timeout(PATIENCE, ended).await.expect("four browser calls end");
    // Two telephone calls, three browsers that were told to go and one that went.
    for (series, wanted) in [
        ("antiphon_calls{", 0.0),
        ("antiphon_calls_ended_total{leg=\"sip\"", 2.0),
        ("antiphon_calls_ended_total{leg=\"webrtc\"", 4.0),
        // And two connections that were to follow others.
        ("antiphon_webrtc_sessions_total{", 6.0),
        ("antiphon_interruptions_total{", 1.0),
        ("antiphon_underruns_total", 0.0),
        ("antiphon_device_up{", 1.0),
        ("antiphon_batch_jobs{", 1.0),
    ] {
        assert_eq!(value(&shown, series), wanted, "{series}: {shown}");
    }
    let told = tour.told.lock().expect("no panic").clone();
    let zero: Vec<&str> = METRICS.iter().map(|metric| metric.name).filter(|name| !told.contains(name)).collect();
    let elsewhere = |name: &str| PROVOKED.iter().any(|(.., metrics)| metrics.contains(&name));
    let silent: Vec<_> = zero.into_iter().filter(|name| !elsewhere(name)).collect();
    assert!(silent.is_empty(), "metrics that tell nothing here (PROVOKED names the tests of such): {silent:?}");

    let tasks = tour.json(("GET", "/debug/tasks"), "", 200, Value::Null).await;
    let threads = tasks["threads"].as_array().cloned().unwrap_or_default();
    assert!(threads.iter().any(|thread| thread["name"] == "media-0"), "{tasks}");
    let turns = tour.json(("GET", "/debug/turns"), "", 200, Value::Null).await;
    assert!(turns["turns"].as_array().is_some_and(|all| all.iter().any(|turn| turn["how"] == "done")), "{turns}");
    // Where the time to the first packet went adds up, and so does the voice's part of it.
    let stages = turns["turns"].as_array().into_iter().flatten().find(|turn| turn["stages"]["voice"].is_object());
    let stages = &stages.unwrap_or_else(|| panic!("no turn tells of the voice: {turns}"))["stages"];
    let sum = |of: &Value| of.as_object().into_iter().flatten().filter_map(|(_, time)| time.as_f64()).sum::<f64>();
    let whole = stages["firstAudioMs"].as_f64().expect("a number");
    assert!(whole > 0.0 && (sum(&stages["voice"]) - whole).abs() < 0.01, "{stages}");
    let steps = tour.json(("GET", "/v1/devices/{id}/steps"), "0", 200, Value::Null).await;
    let steps = steps["steps"].as_array().cloned().unwrap_or_default();
    assert!(steps.iter().any(|step| step["stage"] == "vocode" && step["live"] == 1), "{steps:?}");
    let grow = steps.windows(2).all(|two| two[0]["beganMs"].as_f64() <= two[1]["beganMs"].as_f64());
    assert!(grow && steps.iter().all(|step| step["lastedMs"].as_f64() > Some(0.0)), "{steps:?}");
    let beyond = tour.client.get(format!("{}/v1/devices/9/steps", tour.base)).send().await.expect("HTTP");
    assert_eq!(beyond.status(), 404, "there is one device");
    let profile = tour.ask(("POST", "/debug/profile?seconds=1"), "", 200, |r| r).await;
    assert!(profile.headers()["content-type"].to_str().is_ok_and(|kind| kind.starts_with("text/plain")));
    let reloaded = tour.json(("POST", "/v1/admin/reload"), "", 200, Value::Null).await;
    assert_eq!(reloaded, json!({ "applied": [], "needsRestart": [] }));
    let config = tour.json(("GET", "/v1/admin/config"), "", 200, Value::Null).await;
    assert!(config["settings"].as_array().is_some_and(|all| all.len() > 50), "{config}");
    let token = tour.json(("POST", "/v1/tokens"), "", 201, json!({ "agent": "demo" })).await;
    assert!(token["token"].is_string(), "{token}");
    tour.json(("POST", "/v1/admin/drain"), "", 200, json!({ "drain": true })).await;
    tour.ask(("DELETE", "/v1/admin/drain"), "", 200, |r| r).await;
    tour.ask(("GET", "/readyz"), "", 200, |r| r).await;
    tour.ask(("POST", "/v1/admin/drain"), "", 200, |r| r).await;
    let ready = tour.client.get(format!("{}/readyz", tour.base)).send().await.expect("HTTP");
    assert_eq!(ready.status(), 503, "a drained gateway takes no calls");
    assert_eq!(program.terminate().await, Some(0));

    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/server/openapi.json"));
    let api: Value = serde_json::from_str(&text.expect("readable")).expect("JSON");
    let mut missing = Vec::new();
    for (path, operations) in api["paths"].as_object().expect("paths") {
        for method in operations.as_object().expect("operations").keys() {
            let here = tour.done.lock().expect("no panic").contains(&(method.clone(), path.clone()));
            let there = ELSEWHERE.iter().find(|(m, p, ..)| m == method && p == path);
            match there {
                Some((_, _, file, test)) => {
                    let suite = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(file);
                    let source = std::fs::read_to_string(suite).expect("readable");
                    assert!(source.contains(&format!("fn {test}(")), "{method} {path}: {file} has no test {test}");
                }
                None if !here => missing.push(format!("{method} {path}")),
                None => {}
            }
        }
    }
    assert!(missing.is_empty(), "routes that never succeed in a test: {missing:?}");
}
