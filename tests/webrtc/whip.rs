//! The WHIP-style and the JSON routes, over real HTTP, and sessions that go wrong.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{Audio, Call, Peer, echo, gateway, within};
use antiphon::media::leg::{LegEnd, LegEvent};
use antiphon::media::webrtc::WebRtcLeg;
use antiphon::secret::Secret;
use antiphon::server::across_origins;
use antiphon::server::auth::Caller;
use antiphon::server::error::ApiError;
use antiphon::server::whip::{AcceptCall, Asked, WhipState, router};
use antiphon::webrtc::{Gateway, IceServer, Login, SessionId, WebRtcConfig};
use axum::http::StatusCode;
use reqwest::{Client, Method, Response};
use serde_json::{Value, json};
use webrtc::peer_connection::RTCPeerConnectionState;

/// Echoing calls, in the order they came.
#[derive(Clone, Default)]
struct Echo {
    calls: Arc<Mutex<Vec<Made>>>,
}

/// The agent that was asked for, and the call.
type Made = (Option<String>, Call);

impl AcceptCall for Echo {
    async fn accept(&self, leg: WebRtcLeg, Asked { agent, .. }: Asked, _: &SessionId) -> Result<String, ApiError> {
        if agent.as_deref() == Some("nobody") {
            return Err(ApiError::not_found("agent", "nobody"));
        }
        self.calls.lock().expect("no panic").push((agent, echo(leg)));
        Ok("c1".to_owned())
    }
}

struct Service {
    gateway: Gateway,
    calls: Echo,
    client: Client,
    base: String,
}

impl Service {
    async fn start(config: WebRtcConfig) -> Self {
        let gateway = gateway(config).await;
        let calls = Echo::default();
        let state = WhipState { gateway: gateway.clone(), accept: calls.clone() };
        let router = across_origins(router(state).layer(axum::Extension(Caller::anybody())), &["*".to_owned()]);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let base = format!("http://{}", listener.local_addr().expect("bound"));
        tokio::spawn(async move { axum::serve(listener, router).await });
        // The client is built without a TLS provider of its own.
        let _ = rustls::crypto::ring::default_provider().install_default();
        Self { gateway, calls, client: Client::new(), base }
    }

    fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.client.request(method, format!("{}{path}", self.base)).timeout(Duration::from_secs(30))
    }

    async fn get(&self, path: &str) -> Response {
        self.request(Method::GET, path).send().await.expect("a response")
    }

    async fn post(&self, path: &str, offer: String) -> Response {
        let request = self.request(Method::POST, path).header("content-type", "application/sdp").body(offer);
        request.send().await.expect("a response")
    }

    async fn patch(&self, location: &str, tag: Option<&str>, fragment: String) -> Response {
        let mut request =
            self.request(Method::PATCH, location).header("content-type", "application/trickle-ice-sdpfrag");
        if let Some(tag) = tag {
            request = request.header("if-match", tag);
        }
        request.body(fragment).send().await.expect("a response")
    }

    fn take_call(&self) -> Made {
        self.calls.calls.lock().expect("no panic").remove(0)
    }
}

fn header<'a>(response: &'a Response, name: &str) -> &'a str {
    response.headers().get(name).unwrap_or_else(|| panic!("a header {name}")).to_str().expect("ASCII")
}

async fn expect_error(response: Response, status: StatusCode, code: &str) {
    assert_eq!(response.status().as_u16(), status.as_u16());
    if status == StatusCode::SERVICE_UNAVAILABLE {
        assert!(response.headers().contains_key("retry-after"));
    }
    let body: Value = response.json().await.expect("JSON");
    assert_eq!(body["error"]["code"], code, "{body}");
    assert!(body["error"]["message"].as_str().is_some_and(|message| message.len() > 5), "{body}");
}

/// Splits an offer into itself without candidates and its candidate lines.
fn split(offer: &str) -> (String, Vec<String>) {
    let (candidates, rest): (Vec<&str>, Vec<&str>) =
        offer.lines().partition(|line| line.starts_with("a=candidate:") || *line == "a=end-of-candidates");
    let candidates = candidates.into_iter().filter(|line| line.starts_with("a=c")).map(str::to_owned).collect();
    (rest.join("\r\n") + "\r\n", candidates)
}

fn attribute<'a>(sdp: &'a str, name: &str) -> &'a str {
    sdp.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{name} in {sdp}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_is_made_trickled_to_and_deleted() {
    let server = IceServer {
        urls: vec!["turn:turn.example.net:3478".to_owned()],
        login: Some(Login::Fixed { username: "user".to_owned(), credential: Secret::new("pa\"ss") }),
    };
    let service = Service::start(WebRtcConfig { ice_servers: vec![server], ..WebRtcConfig::default() }).await;
    let told: serde_json::Value = service.get("/v1/webrtc").await.json().await.expect("JSON");
    let server =
        serde_json::json!({ "urls": ["turn:turn.example.net:3478"], "username": "user", "credential": "pa\"ss" });
    assert_eq!(told, serde_json::json!({ "iceServers": [server] }));
    let mut peer = Peer::new(Audio::RecvOnly, Some("agent")).await;
    let (offer, candidates) = split(&peer.offer().await);
    let (fragment, password) = (attribute(&offer, "a=ice-ufrag:"), attribute(&offer, "a=ice-pwd:"));
    let response = service.post("/v1/webrtc?agent=kiosk", offer.clone()).await;
    assert_eq!(response.status().as_u16(), 201);
    assert_eq!(header(&response, "content-type"), "application/sdp");
    assert_eq!(header(&response, "accept-patch"), "application/trickle-ice-sdpfrag");
    assert_eq!(header(&response, "x-antiphon-call"), "c1");
    let link = "<turn:turn.example.net:3478>; rel=\"ice-server\"; username=\"user\"; credential=\"pa\\\"ss\"; \
        credential-type=\"password\"";
    assert_eq!(header(&response, "link"), link);
    let location = header(&response, "location").to_owned();
    let tag = header(&response, "etag").to_owned();
    assert!(location.starts_with("/v1/webrtc/"), "{location}");
    let answer = response.text().await.expect("SDP");
    assert!(answer.contains("a=sendonly"), "a listener is only spoken to: {answer}");
    let (agent, mut call) = service.take_call();
    assert_eq!(agent.as_deref(), Some("kiosk"));

    let mut trickle = format!("a=ice-ufrag:{fragment}\r\na=ice-pwd:{password}\r\nm=audio 9 RTP/AVP 0\r\na=mid:0\r\n");
    for candidate in &candidates {
        trickle.push_str(&format!("{candidate}\r\n"));
    }
    let response = service.patch(&location, None, trickle.clone()).await;
    expect_error(response, StatusCode::PRECONDITION_REQUIRED, "precondition_required").await;
    let response = service.patch(&location, Some("\"other\""), trickle.clone()).await;
    expect_error(response, StatusCode::PRECONDITION_FAILED, "stale_etag").await;
    assert_eq!(service.patch(&location, Some(&tag), trickle).await.status().as_u16(), 204);
    let bad = "a=candidate:nonsense\r\n".to_owned();
    expect_error(service.patch(&location, Some(&tag), bad).await, StatusCode::BAD_REQUEST, "invalid_fragment").await;

    peer.accept(&answer).await;
    peer.state(RTCPeerConnectionState::Connected).await;
    peer.channel_open().await;
    peer.say("hello").await;
    assert_eq!(peer.next_text().await, "heard hello");

    let deleted = service.request(Method::DELETE, &location).send().await.expect("a response");
    assert_eq!(deleted.status().as_u16(), 200);
    call.next(|event| matches!(event, LegEvent::Connected)).await;
    assert_eq!(call.end().await, LegEnd::Remote);
    let again = service.request(Method::DELETE, &location).send().await.expect("a response");
    expect_error(again, StatusCode::NOT_FOUND, "not_found").await;
    service.gateway.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_are_wrong_are_told_what_to_change() {
    let service = Service::start(WebRtcConfig { max_sessions: 1, ..WebRtcConfig::default() }).await;
    let mut peer = Peer::new(Audio::SendRecv, None).await;
    let offer = peer.offer().await;

    let plain = service.request(Method::POST, "/whip").header("content-type", "text/plain").body(offer.clone());
    let response = plain.send().await.expect("a response");
    expect_error(response, StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type").await;
    expect_error(service.post("/whip", "v=1".to_owned()).await, StatusCode::BAD_REQUEST, "invalid_offer").await;
    let mute = offer.replace("a=sendrecv", "a=sendonly");
    expect_error(service.post("/whip", mute).await, StatusCode::BAD_REQUEST, "invalid_offer").await;
    let long = format!("{offer}{}", "a=x\r\n".repeat(20_000));
    expect_error(service.post("/whip", long).await, StatusCode::PAYLOAD_TOO_LARGE, "too_large").await;
    expect_error(service.post("/whip?agent=nobody", offer.clone()).await, StatusCode::NOT_FOUND, "not_found").await;
    // The refused session gives its place back.
    within("the place", async {
        while service.gateway.count() > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;

    let options = service.request(Method::OPTIONS, "/whip").send().await.expect("a response");
    assert_eq!(header(&options, "accept-post"), "application/sdp");
    let preflight = service
        .request(Method::OPTIONS, "/whip")
        .header("origin", "https://page.example")
        .header("access-control-request-method", "POST");
    let preflight = preflight.send().await.expect("a response");
    assert_eq!(header(&preflight, "access-control-allow-origin"), "*");

    let response = service.post("/whip", offer.clone()).await;
    assert_eq!(response.status().as_u16(), 201);
    assert!(header(&response, "location").starts_with("/whip/"));
    let location = header(&response, "location").to_owned();
    expect_error(service.post("/whip", offer).await, StatusCode::SERVICE_UNAVAILABLE, "unavailable").await;
    let wrong = service.request(Method::PATCH, &location).header("content-type", "application/sdp").body("a=x");
    let wrong = wrong.send().await.expect("a response");
    assert_eq!(header(&wrong, "accept-patch"), "application/trickle-ice-sdpfrag");
    expect_error(wrong, StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type").await;
    let nowhere = service.patch("/whip/none", Some("*"), "a=end-of-candidates\r\n".to_owned()).await;
    expect_error(nowhere, StatusCode::NOT_FOUND, "not_found").await;
    service.gateway.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_webrtc_client_connects_and_trickles() {
    let service = Service::start(WebRtcConfig::default()).await;
    let mut peer = Peer::new(Audio::SendRecv, Some("agent")).await;
    let (offer, candidates) = split(&peer.offer().await);
    let body =
        json!({"sdp": offer, "type": "offer", "pc_id": null, "restart_pc": false, "request_data": {"agent": "a"}});
    let response = service.request(Method::POST, "/api/offer").json(&body).send().await.expect("a response");
    assert_eq!(response.status().as_u16(), 200);
    let answer: Value = response.json().await.expect("JSON");
    assert_eq!(answer["type"], "answer");
    let id = answer["pc_id"].as_str().expect("an id").to_owned();
    peer.accept(answer["sdp"].as_str().expect("SDP")).await;
    let mut list: Vec<Value> =
        candidates.iter().map(|line| json!({"candidate": &line[2..], "sdp_mid": "0", "sdp_mline_index": 0})).collect();
    list.push(json!({"candidate": "", "sdp_mid": "0", "sdp_mline_index": 0}));
    let patch = json!({"pc_id": id, "candidates": list});
    let response = service.request(Method::PATCH, "/api/offer").json(&patch).send().await.expect("a response");
    assert_eq!(response.status().as_u16(), 200);
    let (agent, mut call) = service.take_call();
    assert_eq!(agent.as_deref(), Some("a"));
    peer.state(RTCPeerConnectionState::Connected).await;
    call.next(|event| matches!(event, LegEvent::Connected)).await;

    let bad = service.request(Method::POST, "/api/offer").json(&json!({"sdp": 1})).send().await.expect("a response");
    expect_error(bad, StatusCode::BAD_REQUEST, "invalid_json").await;
    let patch = json!({"pc_id": "none", "candidates": []});
    let bad = service.request(Method::PATCH, "/api/offer").json(&patch).send().await.expect("a response");
    expect_error(bad, StatusCode::NOT_FOUND, "not_found").await;

    // `restart_pc` ends the call and starts another.
    let mut other = Peer::new(Audio::SendRecv, None).await;
    let body = json!({"sdp": other.offer().await, "type": "offer", "pc_id": id, "restart_pc": true});
    let response = service.request(Method::POST, "/api/offer").json(&body).send().await.expect("a response");
    let answer: Value = response.json().await.expect("JSON");
    assert_ne!(answer["pc_id"], id);
    assert_eq!(call.end().await, LegEnd::Remote);
    service.gateway.shutdown().await;
}

/// Pipecat's client speaks on a channel of its own: a ping a second, the state of its tracks, and what its framework calls
/// RTVI, which is answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_webrtc_client_is_answered_on_its_own_channel() {
    let service = Service::start(WebRtcConfig::default()).await;
    let mut peer = Peer::new(Audio::SendRecv, Some("chat")).await;
    let body = json!({
        "sdp": peer.offer().await, "type": "offer", "pc_id": null, "restart_pc": false, "requestData": {"agent": "b"},
    });
    let response = service.request(Method::POST, "/api/offer").json(&body).send().await.expect("a response");
    let answer: Value = response.json().await.expect("JSON");
    let keys: Vec<&str> = answer.as_object().expect("an object").keys().map(String::as_str).collect();
    assert_eq!((keys, &answer["type"]), (vec!["pc_id", "sdp", "type"], &json!("answer")));
    peer.accept(answer["sdp"].as_str().expect("SDP")).await;
    let (agent, mut call) = service.take_call();
    assert_eq!(agent.as_deref(), Some("b"));
    call.next(|event| matches!(event, LegEvent::Connected)).await;
    peer.channel_open().await;
    for n in 0..100 {
        peer.say(&format!("ping: {n}")).await;
    }
    peer.say(
        &json!({"type": "signalling", "message": {"type": "trackStatus", "receiver_index": 0, "enabled": true}})
            .to_string(),
    )
    .await;
    let rtvi = |kind: &str, data: Value| json!({"label": "rtvi-ai", "type": kind, "id": "1", "data": data}).to_string();
    peer.say(&rtvi("client-ready", json!({"version": "2.1.0", "about": {"library": "@pipecat-ai/client-js"}}))).await;
    let answer_to_ready: Value = serde_json::from_str(&peer.next_text().await).expect("JSON");
    assert_eq!((&answer_to_ready["type"], &answer_to_ready["id"]), (&json!("bot-ready"), &json!("1")));
    peer.say(&rtvi("send-text", json!({"content": "When do you open?", "options": {"run_immediately": true}}))).await;
    call.next(|event| matches!(event, LegEvent::Prompt(text) if text == "When do you open?")).await;
    peer.say(&rtvi("dtmf", json!({"buttons": ["4", "#"]}))).await;
    call.next(|event| matches!(event, LegEvent::Digit('4'))).await;
    call.next(|event| matches!(event, LegEvent::Digit('#'))).await;
    // What comes after it all is sound both ways, and of frames of an agent the call has seen none.
    for n in 1..=20 {
        peer.send(n, u32::from(n) * 960, b"sound").await;
        if n > 10 {
            assert_eq!(&peer.next_rtp().await.payload[..], b"sound");
        }
    }
    let mut heard = 0;
    while let Ok(event) = call.events.try_recv() {
        assert!(!matches!(event, LegEvent::Message(_)), "{event:?}");
        heard += usize::from(matches!(event, LegEvent::Rtp(_)));
    }
    assert!(heard >= 10, "{heard}");
    // The same session goes on when the client negotiates anew.
    let id = answer["pc_id"].clone();
    let body = json!({"sdp": peer.offer().await, "type": "offer", "pc_id": id, "restart_pc": false});
    let response = service.request(Method::POST, "/api/offer").json(&body).send().await.expect("a response");
    let answer: Value = response.json().await.expect("JSON");
    assert_eq!(answer["pc_id"], id, "{answer}");
    peer.say(&rtvi("disconnect-bot", json!({}))).await;
    assert_eq!(call.end().await, LegEnd::Remote);
    service.gateway.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ice_restarts_under_a_live_call() {
    let service = Service::start(WebRtcConfig::default()).await;
    let mut peer = Peer::new(Audio::SendRecv, None).await;
    let response = service.post("/whip", peer.offer().await).await;
    let (location, tag) = (header(&response, "location").to_owned(), header(&response, "etag").to_owned());
    let answer = response.text().await.expect("SDP");
    let (_, mut call) = service.take_call();
    peer.accept(&answer).await;
    peer.state(RTCPeerConnectionState::Connected).await;
    call.next(|event| matches!(event, LegEvent::Connected)).await;
    peer.send(1, 960, b"before").await;
    assert_eq!(&peer.next_rtp().await.payload[..], b"before");

    let (offer, candidates) = split(&peer.restart().await);
    let (ufrag, pwd) = (attribute(&offer, "a=ice-ufrag:"), attribute(&offer, "a=ice-pwd:"));
    let fragment = format!("a=ice-ufrag:{ufrag}\r\na=ice-pwd:{pwd}\r\n{}\r\n", candidates.join("\r\n"));
    let response = service.patch(&location, Some("*"), fragment).await;
    assert_eq!(response.status().as_u16(), 200);
    let renewed = header(&response, "etag").to_owned();
    assert_ne!(renewed, tag);
    let fragment = response.text().await.expect("SDP");
    let (old, new) = (attribute(&answer, "a=ice-ufrag:"), attribute(&fragment, "a=ice-ufrag:"));
    assert_ne!(old, new);
    let restarted =
        answer.replace(old, new).replace(attribute(&answer, "a=ice-pwd:"), attribute(&fragment, "a=ice-pwd:"));
    peer.accept(&restarted).await;
    let stale = service.patch(&location, Some(&tag), "a=end-of-candidates\r\n".to_owned()).await;
    expect_error(stale, StatusCode::PRECONDITION_FAILED, "stale_etag").await;
    let current = service.patch(&location, Some(&renewed), "a=end-of-candidates\r\n".to_owned()).await;
    assert_eq!(current.status().as_u16(), 204);
    // Packets on the way may be lost while the pair changes; speech goes on.
    within("audio after the restart", async {
        for number in 2.. {
            peer.send(number, u32::from(number) * 960, b"after").await;
            tokio::select! {
                packet = peer.next_rtp() => {
                    assert_eq!(&packet.payload[..], b"after");
                    return;
                }
                () = tokio::time::sleep(Duration::from_millis(20)) => {}
            }
        }
    })
    .await;
    service.gateway.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_never_connects_is_reaped() {
    let service = Service::start(WebRtcConfig { connect_timeout_s: 1, max_sessions: 1, ..Default::default() }).await;
    let mut peer = Peer::new(Audio::SendRecv, None).await;
    let (offer, _) = split(&peer.offer().await);
    assert_eq!(service.post("/whip", offer.clone()).await.status().as_u16(), 201);
    let (_, call) = service.take_call();
    assert_eq!(call.end().await, LegEnd::Failed);
    within("the place", async {
        while service.gateway.count() > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(service.post("/whip", offer).await.status().as_u16(), 201);
    service.gateway.shutdown().await;
}
