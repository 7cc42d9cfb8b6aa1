//! Outbound calls before anybody answers, and the records of calls.

use std::time::Duration;

use antiphon::call::{CallEvent, CallId, Dialling, EndReason, TapDirection};
use antiphon::gateway::webhooks;
use antiphon::records::Webhook;
use antiphon::secret::Secret;
use antiphon::server::config::Token;
use antiphon::sip::quota::Limits;
use antiphon::webhook::signature;
use antiphon_loadgen::call::End;
use antiphon_loadgen::codec::Codec;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::broadcast;

use super::counted::Growth;
use super::raw::{self, Raw, sdp};
use super::support::{PATIENCE, Rig, SENTENCE, hear_turn};

type Events = broadcast::Receiver<(CallId, CallEvent)>;

/// The next news of a call that is not live yet.
async fn dialling(events: &mut Events, id: &str) -> Dialling {
    loop {
        let event = tokio::time::timeout(PATIENCE, events.recv()).await.expect("there is news");
        if let (of, CallEvent::Dialling(state)) = event.expect("not behind")
            && of.as_str() == id
        {
            return state;
        }
    }
}

/// The record of `id` once `wanted` is true of it.
async fn record(rig: &Rig, id: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let look = async {
        loop {
            let (status, record) = rig.get(&format!("/v1/records/{id}")).await;
            if status == 200 && wanted(&record) {
                return record;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, look).await.expect("the record is written")
}

async fn place(rig: &Rig, body: Value) -> String {
    let (status, placed) = rig.post("/v1/calls", body).await;
    assert_eq!(status, 201, "{placed}");
    placed["id"].as_str().expect("an id").to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_has_its_id_while_it_rings_is_listed_and_can_be_cancelled() {
    let rig = Rig::start().await;
    let mut events = rig.app.gateway().calls.events();
    let mut telephone = Raw::new(rig.sip_udp(), "ringing").await;
    let id = place(&rig, json!({ "to": telephone.uri(), "agent": "silent" })).await;
    assert_eq!(dialling(&mut events, &id).await, Dialling::Trying);
    let invite = telephone.next("INVITE").await;
    telephone.answer(&invite, "180 Ringing", "").await;
    assert_eq!(dialling(&mut events, &id).await, Dialling::Ringing { status: 180 });
    let (status, shown) = rig.get(&format!("/v1/calls/{id}")).await;
    assert_eq!((status, &shown["state"], &shown["status"]), (200, &json!("ringing"), &json!(180)));
    let (_, list) = rig.get("/v1/calls").await;
    assert_eq!((&list["calls"][0]["id"], &list["calls"][0]["direction"]), (&json!(id), &json!("outbound")));
    let (status, error) = rig.post(&format!("/v1/calls/{id}/turns"), json!({ "text": "Hello." })).await;
    assert_eq!((status, &error["error"]["code"]), (409, &json!("call_ringing")));
    let kind = "Content-Type: application/sdp\r\n";
    telephone.answer_with(&invite, "183 Session Progress", kind, &sdp(40_000, "")).await;
    assert_eq!(dialling(&mut events, &id).await, Dialling::EarlyMedia { status: 183 });
    let ended = rig.client.delete(format!("{}/v1/calls/{id}", rig.http)).send().await.expect("HTTP");
    assert_eq!(ended.status(), 204);
    assert_eq!(dialling(&mut events, &id).await, Dialling::Cancelled);
    let cancel = telephone.next("CANCEL").await;
    telephone.answer(&cancel, "200 OK", "").await;
    telephone.answer(&invite, "487 Request Terminated", "").await;
    assert_eq!(rig.get(&format!("/v1/calls/{id}")).await.0, 404);
    let record = record(&rig, &id, |record| record["state"] == "ended").await;
    assert_eq!((&record["cause"], &record["endedBy"]), (&json!("cancelled"), &json!("gateway")));
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_became_of_a_call_is_told_with_its_status_and_to_clients_that_wait() {
    let rig = Rig::start().await;
    let mut events = rig.app.gateway().calls.events();
    let mut telephone = Raw::new(rig.sip_udp(), "busy").await;
    let id = place(&rig, json!({ "to": telephone.uri() })).await;
    let invite = telephone.next("INVITE").await;
    let why = "Reason: Q.850;cause=17;text=\"User busy\"\r\n";
    telephone.answer_with(&invite, "486 Busy Here", why, "").await;
    assert_eq!(dialling(&mut events, &id).await, Dialling::Trying);
    assert_eq!(dialling(&mut events, &id).await, Dialling::Busy { status: 486 });
    let busy = record(&rig, &id, |record| record["state"] == "ended").await;
    assert_eq!((&busy["cause"], &busy["sip"]["status"]), (&json!("busy"), &json!(486)));
    assert_eq!(busy["peerCause"], json!({ "q850": 17, "sip": null, "text": "User busy" }));
    // Nobody picks up.
    let mut asleep = Raw::new(rig.sip_udp(), "asleep").await;
    let id = place(&rig, json!({ "to": asleep.uri(), "ringTimeoutS": 3 })).await;
    let invite = asleep.next("INVITE").await;
    asleep.answer(&invite, "180 Ringing", "").await;
    assert_eq!(dialling(&mut events, &id).await, Dialling::Trying);
    assert_eq!(dialling(&mut events, &id).await, Dialling::Ringing { status: 180 });
    assert_eq!(dialling(&mut events, &id).await, Dialling::NoAnswer { status: None });
    // Who waits hears it in the response.
    let mut refuses = Raw::new(rig.sip_udp(), "refuses").await;
    let url = format!("{}/v1/calls?wait=answer", rig.http);
    let waiting = tokio::spawn(rig.client.post(url).json(&json!({ "to": refuses.uri() })).send());
    let invite = refuses.next("INVITE").await;
    refuses.answer_with(&invite, "603 Not Today", "Reason: Q.850;cause=21\r\n", "").await;
    let response = waiting.await.expect("no panic").expect("HTTP");
    assert_eq!(response.status(), 502);
    let error: Value = response.json().await.expect("the error shape");
    assert!(error["error"]["message"].as_str().is_some_and(|why| why.contains("603 Not Today")), "{error}");
    // Mistakes are told at once.
    for (body, code) in [
        (json!({ "to": "" }), "invalid_address"),
        (json!({ "to": "sip:a@127.0.0.1", "ringTimeoutS": 0 }), "invalid_request"),
        (json!({ "to": "sip:a@127.0.0.1", "trunk": "none" }), "unknown_trunk"),
    ] {
        let (status, error) = rig.post("/v1/calls", body).await;
        assert_eq!((status, &error["error"]["code"]), (400, &json!(code)), "{error}");
    }
    assert_eq!(rig.post("/v1/calls?wait=never", json!({ "to": "sip:a@127.0.0.1" })).await.0, 400);
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_said_on_a_call_before_it_is_known_who_answered() {
    let rig = Rig::start().await;
    let mut events = rig.app.gateway().calls.events();
    let mut telephone = Raw::new(rig.sip_udp(), "answers").await;
    let id = place(&rig, json!({ "to": telephone.uri(), "agent": "demo", "machineDetection": "hold" })).await;
    let invite = telephone.next("INVITE").await;
    let ear = tokio::net::UdpSocket::bind("127.0.0.1:0").await.expect("a free port");
    let port = ear.local_addr().expect("bound").port();
    telephone.answer_with(&invite, "200 OK", "Content-Type: application/sdp\r\n", &sdp(port, "")).await;
    let mut told = Vec::new();
    while !told.contains(&"firstAudio") {
        let event =
            tokio::time::timeout(PATIENCE, events.recv()).await.expect("the greeting comes").expect("not behind");
        told.push(match event {
            (of, _) if of.as_str() != id => continue,
            (_, CallEvent::AnsweredBy(by)) => {
                assert_eq!(by, antiphon::media::answer::Answerer::Silence);
                "answeredBy"
            }
            (_, CallEvent::FirstAudio { .. }) => "firstAudio",
            _ => continue,
        });
    }
    assert_eq!(told, ["answeredBy", "firstAudio"]);
    let (status, error) = rig.post("/v1/calls", json!({ "to": telephone.uri(), "machineDetection": "maybe" })).await;
    assert_eq!(status, 400, "{error}");
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_waits_for_its_answer_is_given_up_with_its_client() {
    let rig = Rig::start().await;
    let mut telephone = Raw::new(rig.sip_udp(), "left").await;
    let body = json!({ "to": telephone.uri(), "wait": true });
    let asking = tokio::spawn(rig.client.post(format!("{}/v1/calls", rig.http)).json(&body).send());
    let invite = telephone.next("INVITE").await;
    telephone.answer(&invite, "180 Ringing", "").await;
    asking.abort();
    let cancel = telephone.next("CANCEL").await;
    telephone.answer(&cancel, "200 OK", "").await;
    telephone.answer(&invite, "487 Request Terminated", "").await;
    rig.app.drain().await;
}

/// Takes one request, answers `status`, and gives head and body.
async fn receive(listener: &TcpListener, status: u16) -> (String, String) {
    let (mut stream, _) = tokio::time::timeout(PATIENCE, listener.accept()).await.expect("delivered").expect("open");
    let mut text = String::new();
    loop {
        let mut piece = [0; 4_096];
        let read = stream.read(&mut piece).await.expect("read");
        text.push_str(&String::from_utf8_lossy(&piece[..read]));
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length = header(head, "content-length").and_then(|value| value.parse::<usize>().ok()).unwrap_or(0);
        if body.len() >= length || read == 0 {
            let answer = format!("HTTP/1.1 {status} x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            stream.write_all(answer.as_bytes()).await.expect("written");
            return (head.to_owned(), body.to_owned());
        }
    }
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let lines = head.lines().filter_map(|line| line.split_once(':'));
    lines.filter(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim()).next()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_leaves_a_record_that_is_listed_exported_and_delivered() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}/calls", listener.local_addr().expect("bound"));
    let events = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let hook = json!({
        "url": format!("http://{}/events", events.local_addr().expect("bound")), "secret": "news",
        "events": ["connected", "handoff", "ended"],
    });
    let hook: webhooks::Webhook = serde_json::from_value(hook).expect("valid");
    let counts = Growth::of(&[
        "antiphon_webhooks_total{outcome=\"failed\"}",
        "antiphon_webhooks_total{outcome=\"delivered\"}",
        "antiphon_webhook_events_total{",
    ]);
    let rig = Rig::with(|config| {
        config.records.webhook = Some(Webhook { url, secret: Secret::new("hook"), tries: 3 });
        config.webhook.insert("crm".into(), hook);
    })
    .await;
    let call = rig.telephone("silent", Codec::Pcmu).await;
    let handle = rig.handle(&call).await;
    let id = handle.id().to_string();
    let open = record(&rig, &id, |record| !record["answeredMs"].is_null()).await;
    assert_eq!((&open["state"], &open["direction"], &open["leg"]), (&json!("open"), &json!("inbound"), &json!("sip")));
    let asked = rig.speak(&call, SENTENCE).await;
    hear_turn(&call, asked).await;
    handle.prompt("Thank you.", "en").expect("taken");
    handle.finish_with(EndReason::HungUp, "{\"ticket\":7}".into()).expect("taken");
    assert_eq!(call.ended(PATIENCE).await, Some(End::Remote));
    // What happened was told as it did, in as many requests as it took.
    let mut told = Vec::new();
    while told.last() != Some(&format!("{id} ended")) {
        let (head, body) = receive(&events, 204).await;
        let timestamp = header(&head, "x-antiphon-timestamp").and_then(|value| value.parse().ok()).expect("a time");
        assert_eq!(header(&head, "x-antiphon-signature"), Some(signature("news", timestamp, &body).as_str()));
        let body: Value = serde_json::from_str(&body).expect("JSON");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let events = body["events"].as_array().expect("a list").iter();
        told.extend(events.map(|event| format!("{} {}", text(&event["callId"]), text(&event["event"]))));
    }
    assert_eq!(told, ["connected", "handoff", "ended"].map(|event| format!("{id} {event}")));
    let (_, body) = receive(&listener, 500).await;
    let delivered: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!((&delivered["id"], &delivered["state"]), (&json!(id), &json!("ended")));
    let mut record = record(&rig, &id, |record| record["state"] == "ended").await;
    // Whether there is sound is looked up when it is asked for, and not delivered.
    assert_eq!(record.as_object_mut().and_then(|shown| shown.remove("recording")), Some(Value::Null));
    assert_eq!(record, delivered);
    assert_eq!((&record["cause"], &record["endedBy"]), (&json!("hung_up"), &json!("gateway")));
    assert_eq!((&record["handoffData"], &record["codec"]), (&json!("{\"ticket\":7}"), &json!("pcmu")));
    assert_eq!((&record["turns"][0]["heard"], &record["turns"][0]["how"]), (&json!(SENTENCE), &json!("done")));
    assert!(record["turns"][0]["firstAudioMs"].as_f64().is_some_and(|ms| ms > 0.0), "{record}");
    assert_eq!(record["prompts"][0]["text"], "Thank you.");
    assert!(record["rtp"]["packetsSent"].as_u64().is_some_and(|sent| sent > 50), "{record}");
    assert!(record["durationMs"].as_u64() >= Some(1_000), "{record}");
    // The delivery failed: it comes again, signed.
    let (head, body) = receive(&listener, 204).await;
    let timestamp = header(&head, "x-antiphon-timestamp").and_then(|value| value.parse().ok()).expect("a time");
    assert_eq!(header(&head, "x-antiphon-signature"), Some(signature("hook", timestamp, &body).as_str()));
    counts.comes().await;
    let (status, page) = rig.get("/v1/records?direction=inbound&limit=1").await;
    assert_eq!((status, &page["records"][0]["id"], &page["hasMore"]), (200, &json!(id), &json!(false)));
    let (_, none) = rig.get("/v1/records?direction=outbound").await;
    assert_eq!(none["records"], json!([]));
    for (query, status) in [("limit=0", 400), ("after=nothing", 400), ("nonsense=1", 400)] {
        assert_eq!(rig.get(&format!("/v1/records?{query}")).await.0, status, "{query}");
    }
    assert_eq!(rig.get("/v1/records/nothing").await.0, 404);
    let request = rig.client.get(format!("{}/v1/records", rig.http)).header("accept", "application/jsonl");
    let export = request.send().await.expect("HTTP");
    assert_eq!(export.headers()["content-type"], "application/jsonl");
    let lines = export.text().await.expect("text");
    assert_eq!(
        lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON")).collect::<Vec<_>>(),
        [record]
    );
    rig.app.drain().await;
}

/// As where the acknowledgement is lost, or is looked at after the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_hung_up_before_its_answer_is_acknowledged_has_a_record() {
    let rig = Rig::start().await;
    let mut telephone = Raw::new(rig.sip_udp(), "hasty").await;
    let answer = telephone.ask("INVITE", "", &sdp(9, ""), "SIP/2.0 200").await;
    let id = raw::header(&answer, "X-Antiphon-Call").expect("the call is named").to_owned();
    telephone.ask("BYE", "", "", "SIP/2.0 200").await;
    let record = record(&rig, &id, |record| record["state"] == "ended").await;
    assert_eq!((&record["cause"], &record["endedBy"]), (&json!("remote"), &json!("peer")));
    assert_eq!(rig.get("/v1/calls").await.1["calls"], json!([]));
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_calls_out_as_its_own_limits_allow_and_others_as_before() {
    const HELD: &str = "held-to-its-limits-held";
    const FREE: &str = "free-of-limits-free-of";
    let rig = Rig::with(|config| {
        let limits = Limits { max_calls: 1, calls_per_minute: 3, ..Limits::default() };
        let mut held = Token::new("held", HELD, Vec::new());
        held.outbound = Some(limits);
        config.http.tokens = vec![held, Token::new("free", FREE, Vec::new())];
    })
    .await;
    let ask = async |token: &str, path: &str, body: Value| {
        let request = rig.client.post(format!("{}{path}", rig.http)).bearer_auth(token).json(&body);
        let response = request.send().await.expect("HTTP");
        (response.status().as_u16(), response.json::<Value>().await.unwrap_or_default())
    };
    let refused = async |path: &str, to: &str, key: &str| {
        let (status, error) = ask(HELD, path, json!({ "to": to })).await;
        assert_eq!((status, &error["error"]["code"]), (429, &json!("tenant_full")), "{error}");
        assert!(error["error"]["message"].as_str().is_some_and(|why| why.contains(key)), "{error}");
    };
    let mut events = rig.app.gateway().calls.events();
    let mut telephone = Raw::new(rig.sip_udp(), "held").await;
    let (status, placed) = ask(HELD, "/v1/calls", json!({ "to": telephone.uri(), "agent": "silent" })).await;
    assert_eq!(status, 201, "{placed}");
    let invite = telephone.next("INVITE").await;
    refused("/v1/calls", &telephone.uri(), "max_calls = 1").await;
    // Another token has the limits of the trunks alone.
    let other = Raw::new(rig.sip_udp(), "free").await;
    assert_eq!(ask(FREE, "/v1/calls", json!({ "to": other.uri() })).await.0, 201);

    let id = placed["id"].as_str().expect("an id").to_owned();
    telephone.answer_with(&invite, "200 OK", "Content-Type: application/sdp\r\n", &sdp(40_000, "")).await;
    while dialling(&mut events, &id).await != Dialling::Answered {}
    // It is up, so it counts still; and what it is transferred to counts as another.
    let transfer = format!("/v1/calls/{id}/transfer");
    refused(&transfer, "sip:a@127.0.0.1", "max_calls = 1").await;
    let handle = rig.handle_of(&id).await;
    handle.hang_up(EndReason::HungUp);
    handle.ended().await;
    let freed = async {
        for call in 2..=3 {
            let to = Raw::new(rig.sip_udp(), &format!("held-{call}")).await.uri();
            let placed = loop {
                match ask(HELD, "/v1/calls", json!({ "to": to })).await {
                    (201, placed) => break placed,
                    _ => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            };
            let url = format!("{}/v1/calls/{}", rig.http, placed["id"].as_str().expect("an id"));
            let _ = rig.client.delete(url).bearer_auth(HELD).send().await.expect("HTTP");
        }
    };
    tokio::time::timeout(PATIENCE, freed).await.expect("the call is over and makes room");
    let fast = async {
        loop {
            let (_, error) = ask(HELD, "/v1/calls", json!({ "to": telephone.uri() })).await;
            if error["error"]["message"].as_str().is_some_and(|why| why.contains("calls_per_minute = 3")) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, fast).await.expect("three in a minute are all");
    rig.app.drain().await;
}

/// 20 ms of a loud square wave in G.711 mu-law.
fn packet(sequence: u16) -> Vec<u8> {
    let mut packet = vec![0x80, 0];
    packet.extend(sequence.to_be_bytes());
    packet.extend((u32::from(sequence) * 160).to_be_bytes());
    packet.extend(7_u32.to_be_bytes());
    // Plus and minus 8,031, eight samples each.
    packet.extend((0..160).map(|n| if n / 8 % 2 == 0 { 0x90 } else { 0x10 }));
    packet
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sound_before_the_answer_is_heard_and_the_agent_comes_with_the_answer() {
    let rig = Rig::start().await;
    let mut events = rig.app.gateway().calls.events();
    let mut telephone = Raw::new(rig.sip_udp(), "early").await;
    let sound = tokio::net::UdpSocket::bind("127.0.0.1:0").await.expect("binds");
    let port = sound.local_addr().expect("bound").port();
    let id = place(&rig, json!({ "to": telephone.uri(), "agent": "demo" })).await;
    let invite = telephone.next("INVITE").await;
    let kind = "Content-Type: application/sdp\r\n";
    telephone.answer_with(&invite, "183 Session Progress", kind, &sdp(port, "")).await;
    assert_eq!(dialling(&mut events, &id).await, Dialling::Trying);
    assert_eq!(dialling(&mut events, &id).await, Dialling::EarlyMedia { status: 183 });
    let call = rig.app.gateway().calls.find(&CallId::from(id.as_str())).await.expect("live before the answer");
    let mut tap = call.media_tap();
    let gateway = std::net::SocketAddr::from(([127, 0, 0, 1], super::raw::audio_port(&invite)));
    let heard = async {
        for sequence in 0.. {
            sound.send_to(&packet(sequence), gateway).await.expect("sends");
            let frame = tokio::time::timeout(Duration::from_millis(20), tap.recv()).await;
            if let Ok(frame) = frame
                && frame.expect("the call goes on").pcm.iter().any(|sample| *sample > 4_000)
            {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, heard).await.expect("what comes before the answer is heard");
    let (_, shown) = rig.get(&format!("/v1/calls/{id}")).await;
    assert_eq!(shown["state"], "earlyMedia", "{shown}");
    let (_, list) = rig.get("/v1/calls").await;
    assert_eq!(list["calls"].as_array().map(Vec::len), Some(1), "listed once: {list}");
    assert_eq!(call.info().turns, 0, "nobody is spoken to who has not answered");
    telephone.answer_with(&invite, "200 OK", kind, &sdp(port, "")).await;
    telephone.next("ACK").await;
    assert_eq!(dialling(&mut events, &id).await, Dialling::Answered);
    let spoken = async { while tap.recv().await.expect("goes on").direction != TapDirection::Outbound {} };
    tokio::time::timeout(PATIENCE, spoken).await.expect("the agent greets who has answered");
    let ended = rig.client.delete(format!("{}/v1/calls/{id}", rig.http)).send().await.expect("HTTP");
    assert_eq!(ended.status(), 204);
    let bye = telephone.next("BYE").await;
    telephone.answer(&bye, "200 OK", "").await;
    let record = record(&rig, &id, |record| record["state"] == "ended").await;
    assert_eq!((&record["cause"], record["answeredMs"].is_u64()), (&json!("hung_up"), true), "{record}");
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_was_heard_and_not_answered_ends_as_one_that_was_not_answered() {
    let rig = Rig::start().await;
    let mut events = rig.app.gateway().calls.events();
    let mut telephone = Raw::new(rig.sip_udp(), "unanswered").await;
    let id = place(&rig, json!({ "to": telephone.uri(), "agent": "demo" })).await;
    let invite = telephone.next("INVITE").await;
    let kind = "Content-Type: application/sdp\r\n";
    telephone.answer_with(&invite, "183 Session Progress", kind, &sdp(40_000, "")).await;
    let call = rig.app.gateway().calls.find(&CallId::from(id.as_str())).await.expect("live before the answer");
    telephone.answer(&invite, "486 Busy Here", "").await;
    assert_eq!(dialling(&mut events, &id).await, Dialling::Trying);
    assert_eq!(dialling(&mut events, &id).await, Dialling::EarlyMedia { status: 183 });
    assert_eq!(dialling(&mut events, &id).await, Dialling::Busy { status: 486 });
    assert!(call.has_ended());
    let record = record(&rig, &id, |record| record["state"] == "ended").await;
    let told = (&record["cause"], &record["codec"], &record["sip"]["status"], &record["answeredMs"]);
    assert_eq!(told, (&json!("busy"), &json!("pcmu"), &json!(486), &Value::Null), "{record}");
    // Hung up while it rings, by whoever has its handle.
    let mut telephone = Raw::new(rig.sip_udp(), "given-up").await;
    let id = place(&rig, json!({ "to": telephone.uri(), "agent": "demo" })).await;
    let invite = telephone.next("INVITE").await;
    telephone.answer_with(&invite, "180 Ringing", kind, &sdp(40_000, "")).await;
    let call = rig.app.gateway().calls.find(&CallId::from(id.as_str())).await.expect("live before the answer");
    call.hang_up(EndReason::HungUp);
    let cancel = telephone.next("CANCEL").await;
    telephone.answer(&cancel, "200 OK", "").await;
    telephone.answer(&invite, "487 Request Terminated", "").await;
    assert_eq!(dialling(&mut events, &id).await, Dialling::Trying);
    assert_eq!(dialling(&mut events, &id).await, Dialling::EarlyMedia { status: 180 });
    assert_eq!(dialling(&mut events, &id).await, Dialling::Cancelled);
    rig.app.drain().await;
}
