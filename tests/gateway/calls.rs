//! A text turn becomes speech on live calls of both kinds, and can be interrupted.

use std::time::Duration;

use antiphon::agent::builtin::GREETING;
use antiphon_loadgen::call::{Call, End, now};
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::correlate;
use serde_json::json;

use super::raw::{Raw, sdp};
use super::support::{PATIENCE, Rig, SENTENCE, gaps, hear_turn};

/// As the product promises: recognisable, by aligned correlation with the same sentence made directly.
async fn hears_the_sentence(rig: &Rig, call: &Call, limit: f32) {
    let asked = rig.speak(call, SENTENCE).await;
    let (onset, end) = hear_turn(call, asked).await;
    rig.assert_heard(call, SENTENCE, (asked, end), limit).await;
    assert_eq!(gaps(&call.ear().heard(), onset, end), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_browser_hears_the_turn() {
    let rig = Rig::start().await;
    let call = rig.browser("silent").await;
    assert_eq!(call.codec(), Codec::Opus);
    hears_the_sentence(&rig, &call, 0.9).await;
    call.hang_up().await;
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_telephone_hears_the_turn_in_every_codec() {
    let rig = Rig::start().await;
    for (codec, limit) in [(Codec::Pcmu, 0.8), (Codec::Pcma, 0.8), (Codec::G722, 0.8), (Codec::Opus, 0.9)] {
        let call = rig.telephone("silent", codec).await;
        assert_eq!(call.codec(), codec);
        hears_the_sentence(&rig, &call, limit).await;
        assert_eq!(call.hang_up().await, End::Local);
    }
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_demo_agent_greets_and_reads_keys_aloud() {
    let rig = Rig::start().await;
    let called = now();
    let call = rig.telephone("demo", Codec::Pcmu).await;
    let (_, end) = hear_turn(&call, called).await;
    rig.assert_heard(&call, GREETING, (called, end), 0.8).await;
    let pressed = now();
    call.press("7").await.expect("keys go out");
    let (_, end) = hear_turn(&call, pressed).await;
    rig.assert_heard(&call, "You pressed seven.", (pressed, end), 0.8).await;
    call.hang_up().await;
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interruption_silences_the_call_and_says_what_was_heard() {
    let rig = Rig::start().await;
    for call in [rig.telephone("silent", Codec::Pcmu).await, rig.browser("silent").await] {
        let id = call.id().expect("named").to_owned();
        let handle = rig.handle_of(&id).await;
        let mut events = handle.events();
        let text = SENTENCE.repeat(6);
        let asked = rig.speak(&call, &text).await;
        call.onset(asked, PATIENCE).await.expect("speech is heard");
        // Let some of it sound: what was heard is then neither nothing nor all.
        call.ear()
            .wait(PATIENCE, |heard| {
                (heard.clip_between(asked, now()).duration() > Duration::from_secs(2)).then_some(())
            })
            .await
            .expect("two seconds of it are heard");
        let (status, body) = rig.post(&format!("/v1/calls/{id}/interrupt"), json!({})).await;
        assert_eq!(status, 202, "{body}");
        let cut = now();
        call.silence(cut, Duration::from_secs(1), PATIENCE).await.expect("it is silent");
        let heard = loop {
            match events.recv().await.expect("the call lives") {
                antiphon::call::CallEvent::Interrupted { heard, .. } => break heard,
                _ => continue,
            }
        };
        assert!(heard.words > 0 && heard.sent_ms > 500, "{heard:?}");
        assert!(text.starts_with(heard.text.trim_end()) && heard.text.len() < text.len(), "{heard:?}");
        call.hang_up().await;
    }
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_are_listed_shown_and_ended_over_http() {
    let rig = Rig::start().await;
    let call = rig.browser("silent").await;
    let id = call.id().expect("named").to_owned();
    let (status, list) = rig.get("/v1/calls").await;
    assert_eq!((status, &list["calls"][0]["id"]), (200, &json!(id)));
    let (status, shown) = rig.get(&format!("/v1/calls/{id}")).await;
    assert_eq!((status, &shown["leg"]), (200, &json!("webrtc")));
    let ended = rig.client.delete(format!("{}/v1/calls/{id}", rig.http)).send().await.expect("HTTP");
    assert_eq!(ended.status(), 204);
    assert!(call.ended(PATIENCE).await.is_some(), "the browser is told");
    let (status, error) = rig.get(&format!("/v1/calls/{id}x")).await;
    assert_eq!((status, &error["error"]["code"]), (404, &json!("not_found")));
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_gateway_calls_a_telephone() {
    use antiphon_loadgen::sip;
    let rig = Rig::start().await;
    let caller = sip::Caller::bind(sip::Config::default()).await.expect("free ports");
    let uri = caller.uri();
    let answering = tokio::spawn(caller.answer(PATIENCE));
    let (status, body) = rig.post("/v1/calls", json!({ "to": uri, "agent": "demo" })).await;
    assert_eq!(status, 201, "{body}");
    let call = answering.await.expect("no panic").expect("answered");
    hear_turn(&call, call.setup().answered).await;
    rig.assert_heard(&call, GREETING, (call.setup().answered, now()), 0.8).await;
    let id = body["id"].as_str().expect("an id").to_owned();
    let ended = rig.client.delete(format!("{}/v1/calls/{id}", rig.http)).send().await.expect("HTTP");
    assert_eq!(ended.status(), 204);
    assert_eq!(call.ended(PATIENCE).await, Some(End::Remote));
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_not_allowed_is_refused_with_the_key() {
    let trunk = "name = \"t\"\nhost = \"127.0.0.1:9\"\nprefixes = [\"+49\"]";
    let rig = Rig::with(|config| config.sip.trunk = vec![toml::from_str(trunk).expect("valid")]).await;
    for (to, key) in [("+88212345", "prefixes"), ("sip:x@192.0.2.1", "[sip] outbound")] {
        let (status, error) = rig.post("/v1/calls", json!({ "to": to })).await;
        assert_eq!((status, &error["error"]["code"]), (403, &json!("call_denied")), "{error}");
        assert!(error["error"]["message"].as_str().is_some_and(|why| why.contains(key)), "{error}");
    }
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_agent_takes_a_call_before_its_ack() {
    let rig = Rig::start().await;
    let mut telephone = Raw::new(rig.sip_udp(), "unacknowledged").await;
    telephone.contact = format!("sip:silent@{}", rig.sip_udp());
    let invite = telephone.request("INVITE", "", &sdp(4_000, ""));
    telephone.send(&invite).await;
    telephone.expect("SIP/2.0 200").await;
    let (status, list) = rig.get("/v1/calls").await;
    assert_eq!((status, &list["calls"]), (200, &json!([])), "{list}");
    assert_eq!(list["half_open"][0]["call_id"], "unacknowledged", "{list}");
    telephone.ack("").await;
    let taken = async {
        loop {
            let (_, list) = rig.get("/v1/calls").await;
            if list["calls"][0]["agent"] == "silent" {
                return list;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let list = tokio::time::timeout(PATIENCE, taken).await.expect("the agent has it");
    assert_eq!(list["half_open"], json!([]), "{list}");
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_lets_the_turn_end_and_refuses_new_calls() {
    let rig = Rig::with(|config| config.call.drain_grace_s = 30).await;
    let call = rig.telephone("silent", Codec::Pcmu).await;
    let asked = rig.speak(&call, SENTENCE).await;
    call.onset(asked, PATIENCE).await.expect("speech is heard");
    let (http, client) = (rig.http.clone(), rig.client.clone());
    let reference = rig.reference(SENTENCE).await;
    let drain = tokio::spawn(rig.app.drain());
    assert_eq!(call.ended(PATIENCE).await, Some(End::Remote));
    let heard = call.ear().heard();
    let found = correlate::correlate(&heard.clip_between(asked, now()), &reference).expect("comparable rates");
    assert!(found.found > 0.9, "the turn was cut: {found:?}");
    drain.await.expect("no panic");
    assert!(client.get(format!("{http}/healthz")).send().await.is_err(), "nobody listens any more");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_is_going_down_has_no_human_pick_up_in_vain() {
    let rig = Rig::start().await;
    rig.app.gateway().calls.drain(Duration::ZERO).await;
    let mut telephone = Raw::new(rig.sip_udp(), "in-vain").await;
    let request = rig.client.post(format!("{}/v1/calls", rig.http)).json(&json!({ "to": telephone.uri() }));
    let response = tokio::select! {
        response = request.send() => response.expect("HTTP"),
        invite = telephone.expect("INVITE") => panic!("it rings: {invite}"),
    };
    assert_eq!(response.status(), 503);
    assert!(response.headers().contains_key("retry-after"));
    let error: serde_json::Value = response.json().await.expect("the error shape");
    assert!(error["error"]["message"].as_str().is_some_and(|why| why.contains("draining")), "{error}");
    rig.app.drain().await;
}

/// What a carrier says of the end of a call is in its record; calls that came and were never live have one, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_say_why_a_carrier_ended_a_call_and_which_calls_were_missed() {
    let trunk = "name = \"carrier\"\nhost = \"127.0.0.1:9\"";
    let rig = Rig::with(|config| {
        config.sip.trunk = vec![toml::from_str(trunk).expect("valid")];
        let agent = antiphon::agent::config::Agent::at("builtin:silent");
        let agent = antiphon::agent::config::Agent { announcement: SENTENCE.to_owned(), ..agent };
        config.agent.insert("announcing".to_owned(), agent);
    })
    .await;
    let mut events = rig.app.gateway().calls.events();
    let at = |agent: &str| format!("sip:{agent}@{}", rig.sip_udp());
    let mut dropped = Raw::new(rig.sip_udp(), "dropped").await;
    dropped.contact = at("silent");
    dropped.ask("INVITE", "", &sdp(4_000, ""), "SIP/2.0 200").await;
    dropped.ack("").await;
    dropped.ask("BYE", "Reason: Q.850;cause=34;text=\"No circuit\"\r\n", "", "SIP/2.0 200").await;
    let mut odd = Raw::new(rig.sip_udp(), "odd").await;
    odd.contact = at("silent");
    odd.ask("INVITE", "", &sdp(4_000, "").replace("RTP/AVP 0 101", "RTP/AVP 18 101"), "SIP/2.0 488").await;
    odd.ack("").await;
    let mut gone = Raw::new(rig.sip_udp(), "gone").await;
    gone.contact = at("announcing");
    let invite = gone.request("INVITE", "", &sdp(4_000, ""));
    gone.send(&invite).await;
    gone.expect("SIP/2.0 183").await;
    let cancel = gone.request("CANCEL", "Reason: SIP;cause=200;text=\"Completed elsewhere\"\r\n", "");
    gone.send(&cancel).await;
    gone.expect("SIP/2.0 487").await;
    gone.ack("").await;
    let ended = async {
        loop {
            let (_, page) = rig.get("/v1/records?direction=inbound").await;
            let records = page["records"].as_array().expect("a list").clone();
            if records.len() == 3 && records.iter().all(|record| record["state"] == "ended") {
                return records;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let records = tokio::time::timeout(PATIENCE, ended).await.expect("three records");
    let of = |agent: &str, cause: &str| {
        let found = records.iter().find(|record| record["agent"] == agent && record["cause"] == cause);
        found.unwrap_or_else(|| panic!("{agent}, {cause}: {records:?}"))
    };
    let up = of("silent", "remote");
    assert_eq!((&up["sip"]["status"], &up["trunk"], &up["endedBy"]), (&json!(200), &json!("carrier"), &json!("peer")));
    assert_eq!(up["peerCause"], json!({ "q850": 34, "sip": null, "text": "No circuit" }));
    let refused = of("silent", "refused");
    assert_eq!((&refused["sip"]["status"], &refused["trunk"]), (&json!(488), &json!("carrier")));
    assert!(refused["answeredMs"].is_null() && refused["endedBy"] == "gateway", "{refused}");
    let cancelled = of("announcing", "cancelled");
    assert_eq!((&cancelled["sip"]["status"], &cancelled["endedBy"]), (&json!(487), &json!("peer")));
    assert_eq!(cancelled["peerCause"]["sip"], 200);
    // The same as events, and a missed call is no usage.
    let told: Vec<_> = std::iter::from_fn(|| events.try_recv().ok()).map(|(id, event)| event.describe(&id)).collect();
    let kinds = ["peerCause", "missed"].map(|kind| told.iter().filter(|event| event["event"] == kind).count());
    assert_eq!(kinds, [2, 1], "{told:?}");
    assert!(told.iter().any(|event| event["event"] == "missed" && event["status"] == 488), "{told:?}");
    let (_, usage) = rig.get("/v1/usage").await;
    assert_eq!(usage["usage"][0]["inboundCalls"], 1, "{usage}");
    rig.app.drain().await;
}

/// A telephone of a trunk hears the agent's announcement before it is answered; a stranger, whose address may be another's, behind
/// the answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_announcement_is_heard_before_the_answer() {
    let announced = |config: &mut antiphon::config::Config| {
        let agent = antiphon::agent::config::Agent::at("builtin:silent");
        let agent = antiphon::agent::config::Agent { announcement: SENTENCE.to_owned(), ..agent };
        config.agent.insert("announcing".to_owned(), agent);
    };
    let trunk = "name = \"t\"\nhost = \"127.0.0.1:9\"\nprefixes = [\"+49\"]";
    let rig = Rig::with(|config| {
        config.sip.trunk = vec![toml::from_str(trunk).expect("valid")];
        announced(config);
    })
    .await;
    let media = tokio::net::UdpSocket::bind("127.0.0.1:0").await.expect("binds");
    let mut telephone = Raw::new(rig.sip_udp(), "announced").await;
    telephone.contact = format!("sip:announcing@{}", rig.sip_udp());
    let invite = telephone.request("INVITE", "", &sdp(media.local_addr().expect("bound").port(), ""));
    telephone.send(&invite).await;
    telephone.expect("SIP/2.0 183").await;
    let mut buffer = [0; 2_048];
    // Frames that are no silence: mu-law has 0xff and 0x7f for nothing.
    let mut sounding = 0;
    let answer = {
        let mut answered = std::pin::pin!(telephone.expect("SIP/2.0 200"));
        loop {
            tokio::select! {
                answer = &mut answered => break answer,
                packet = media.recv_from(&mut buffer) => {
                    let (length, _) = packet.expect("a packet");
                    let sound = buffer[12..length].iter().filter(|byte| !matches!(byte, 0xff | 0x7f)).count();
                    sounding += usize::from(sound > 40);
                }
            }
        }
    };
    assert!(sounding > 50, "a second of speech came before the answer: {sounding} packets");
    let id = super::raw::header(&answer, "X-Antiphon-Call").expect("named").to_owned();
    telephone.ack("").await;
    let taken = async {
        loop {
            let (_, list) = rig.get("/v1/calls").await;
            if list["calls"][0]["id"] == id.as_str() && list["calls"][0]["agent"] == "announcing" {
                assert_eq!(list["calls"][0]["trunk"], "t", "{list}");
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, taken).await.expect("the agent has it");
    rig.app.drain().await;

    let rig = Rig::with(announced).await;
    let asked = now();
    let call = rig.telephone("announcing", Codec::Pcmu).await;
    let (_, end) = hear_turn(&call, asked).await;
    rig.assert_heard(&call, SENTENCE, (asked, end), 0.8).await;
    call.hang_up().await;
    rig.app.drain().await;
}
