//! Parts that calls cannot do without panic: the gateway says so, calls that are up go on, and the program ends to be started
//! anew. The panics are those of `fault-injection`, which tests alone switch on.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use antiphon::app::engines::Choice;
use antiphon::call::TurnRequest;
use antiphon::config::EngineKind;
use antiphon::fault;
use antiphon::recording::{Format, Mode};
use antiphon::records::Webhook;
use antiphon::secret::Secret;
use antiphon::server::config::Tls;
use antiphon::sip::TlsConfig;
use antiphon::synth::device::Loader;
use antiphon::synth::tone::Tone;
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::correlate;
use antiphon_loadgen::heard::Clip;
use antiphon_loadgen::sip::{self, Transport};
use antiphon_loadgen::speak::Idle;
use axum::http::Uri;
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::timeout;

use super::acme::handshake;
use super::program::Serve;
use super::raw::{Raw, sdp};
use super::support::{PATIENCE, Rig, SENTENCE, gaps, hear_turn, hear_turn_at_last};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_part_that_panics_makes_the_gateway_unready_and_calls_go_on() {
    for (part, shown) in [("sip", "sip"), ("sip socket", "sip"), ("dispatcher", "dispatcher")] {
        let rig = Rig::start().await;
        let call = rig.telephone("silent", Codec::Pcmu).await;
        let asked = rig.speak(&call, "One moment, please.").await;
        let onset = call.onset(asked, PATIENCE).await.expect("speech is heard");
        assert!(rig.app.gateway().faults().is_empty());
        fault::arm(part, rig.sip_udp().port());
        let mut telephone = Raw::new(rig.sip_udp(), "unlucky").await;
        let invite = telephone.request("INVITE", "", &sdp(4_000, ""));
        let unready = async {
            loop {
                // Again, as a telephone does that hears nothing.
                telephone.send(&invite).await;
                let (status, body) = rig.get("/readyz").await;
                if status == 503 {
                    return body;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        let body = timeout(PATIENCE, unready).await.expect("it is noticed");
        assert_eq!((&body["ready"], &body["faults"][0]["part"]), (&false.into(), &shown.into()), "{body}");
        // `serve` ends for such a fault.
        let faults = rig.app.gateway().faults();
        assert!(faults.iter().any(|fault| fault.part == shown && fault.fatal && !fault.mends), "{faults:?}");
        let (_, end) = hear_turn(&call, asked).await;
        let stalls = gaps(&call.ear().heard(), onset, end);
        assert!(stalls.is_empty(), "{part}: {stalls:?}");
        rig.app.drain().await;
    }
}

/// What comes by POST: the path and the body of each request, in order.
#[derive(Clone, Default)]
struct Posted(Arc<Mutex<Vec<(String, Value)>>>);

impl Posted {
    /// A server, and where it is.
    async fn start() -> (Posted, String) {
        let posted = Posted::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let base = format!("http://{}", listener.local_addr().expect("bound"));
        let kept = posted.clone();
        let take = move |uri: Uri, Json(body): Json<Value>| {
            kept.0.lock().expect("no panic").push((uri.path().to_owned(), body));
            async {}
        };
        tokio::spawn(async move { axum::serve(listener, Router::new().fallback(take)).await });
        (posted, base)
    }

    /// The names of the calls whose records came.
    fn records(&self) -> BTreeSet<String> {
        let all = self.0.lock().expect("no panic");
        let records = all.iter().filter(|(path, _)| path == "/records");
        records.map(|(_, record)| record["id"].as_str().expect("an id").to_owned()).collect()
    }

    /// What happened on the call, as it was told.
    fn events(&self, call: &str) -> Vec<String> {
        let all = self.0.lock().expect("no panic");
        let events = all.iter().filter(|(path, _)| path == "/news").flat_map(|(_, body)| body["events"].as_array());
        let of_call = events.flatten().filter(|event| event["callId"] == call);
        of_call.map(|event| event["event"].as_str().expect("a name").to_owned()).collect()
    }
}

/// Asks `path` until `done` says so.
async fn asked_until(rig: &Rig, path: &str, done: impl Fn(&Value) -> bool) -> Value {
    let asked = async {
        loop {
            let (_, body) = rig.get(path).await;
            if done(&body) {
                return body;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, asked).await.unwrap_or_else(|_| panic!("{path} never says so"))
}

/// Whether `/readyz` names this part among those that do not work.
fn names(body: &Value, part: &str) -> bool {
    body["faults"].as_array().is_some_and(|all| all.iter().any(|fault| fault["part"] == part))
}

/// Both calls, from here on.
const WHOLE: [&str; 2] = ["connected", "ended"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_part_that_panics_is_started_again_and_nothing_of_a_recorded_call_is_missing() {
    let text = SENTENCE.repeat(2);
    // What is made to panic, and the part that is told of.
    for (part, shown) in [
        ("batch", "batch"),
        ("records", "records"),
        ("deliveries", "records"),
        ("recordings", "recordings"),
        ("webhooks", "webhooks"),
    ] {
        let (posted, base) = Posted::start().await;
        let hook = json!({ "url": format!("{base}/news"), "secret": "news", "events": WHOLE });
        let hook = serde_json::from_value(hook).expect("valid");
        let mut state = PathBuf::new();
        let rig = Rig::with(|config| {
            state = config.state.dir.clone();
            (config.recording.mode, config.recording.format) = (Mode::All, Format::Wav);
            config.recording.consent.clear();
            config.records.webhook =
                Some(Webhook { url: format!("{base}/records"), secret: Secret::new("hook"), tries: 3 });
            config.webhook.insert("news".into(), hook);
        })
        .await;
        let call = rig.telephone("silent", Codec::Pcmu).await;
        let id = call.id().expect("named").to_owned();
        let asked = rig.speak(&call, &text).await;
        let onset = call.onset(asked, PATIENCE).await.expect("speech is heard");
        fault::arm(
            part,
            match part {
                "batch" | "records" => state.join(format!("{part}.sqlite")).display().to_string(),
                "recordings" => state.join(part).display().to_string(),
                "deliveries" => format!("{base}/records"),
                _ => format!("{base}/news"),
            },
        );
        // Something to do for each of them: a call that comes and goes, and a job.
        let work = async {
            let other = rig.telephone("silent", Codec::Pcmu).await;
            let id = other.id().expect("named").to_owned();
            let asked = rig.speak(&other, "Hello.").await;
            other.onset(asked, PATIENCE).await.expect("speech is heard");
            other.hang_up().await;
            let (status, job) = rig.post("/v1/audio/speech/batch", json!({ "items": ["For later."] })).await;
            assert!(status < 300, "{job}");
            (id, job["id"].as_str().expect("an id").to_owned())
        };
        let noticed = asked_until(&rig, "/readyz", |body| names(body, shown));
        let (body, (other, job)) = tokio::join!(noticed, work);
        assert_eq!(body["ready"], shown != "batch", "only jobs are promised to go on: {body}");
        let (_, end) = hear_turn(&call, asked).await;
        let stalls = gaps(&call.ear().heard(), onset, end);
        assert!(stalls.is_empty(), "{part}: {stalls:?}");
        asked_until(&rig, "/readyz", |body| body["ready"] == true && !names(body, shown)).await;
        call.hang_up().await;
        let metrics = rig.client.get(format!("{}/metrics", rig.http)).send().await.expect("HTTP").text().await;
        let counted = format!("antiphon_part_panics_total{{part=\"{shown}\"}} ");
        let counted = metrics.expect("text").lines().find_map(|line| line.strip_prefix(&counted)?.parse::<u64>().ok());
        assert!(counted >= Some(1), "{part}: {counted:?}");

        asked_until(&rig, &format!("/v1/jobs/{job}"), |job| job["state"] == "done").await;
        for id in [&id, &other] {
            let path = format!("/v1/records/{id}");
            let record = asked_until(&rig, &path, |record| {
                record["recording"]["durationMs"].is_u64() && record["endedMs"].is_u64()
            });
            assert_eq!(record.await["recording"]["gaps"], false, "{part}");
        }
        let told = async {
            let all = BTreeSet::from([id.clone(), other.clone()]);
            while posted.records() != all || [&id, &other].iter().any(|id| posted.events(id) != WHOLE) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        assert!(timeout(PATIENCE, told).await.is_ok(), "{part}: {:?}", posted.0);
        // What the caller heard is what was recorded, from its beginning to its end.
        let mut wav = hound::WavReader::open(state.join(format!("recordings/{id}.wav"))).expect("a recording");
        let rate = wav.spec().sample_rate;
        let said = wav.samples::<i16>().map(|sample| f32::from(sample.expect("whole")) / 32_768.0);
        let recorded = Clip { rate, pcm: said.skip(1).step_by(2).collect() };
        let found = correlate::correlate(&recorded, &rig.reference(&text).await).expect("comparable rates");
        assert!(found.value > 0.8, "{part}: {found:?}");
        rig.app.drain().await;
    }
}

/// Two devices: a call on each. What one was speaking when it panicked is lost, what the other speaks is not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_panics_costs_the_other_devices_calls_nothing_and_comes_back() {
    const UNLUCKY: &str = "Nobody will hear the rest of this.";
    let tone = || -> Loader { Box::new(|| Ok(Box::new(Tone::new()))) };
    let voices = Choice { loaders: vec![tone(), tone()], fallback: None, reasons: Vec::new() };
    let rig = Rig::with_voices(|_| {}, voices).await;
    let (lucky, unlucky) = (rig.telephone("silent", Codec::Pcmu).await, rig.telephone("silent", Codec::Pcmu).await);
    let asked = rig.speak(&lucky, &SENTENCE.repeat(4)).await;
    let onset = lucky.onset(asked, PATIENCE).await.expect("speech is heard");
    fault::arm("device", UNLUCKY);
    rig.speak(&unlucky, UNLUCKY).await;
    let failed = |body: &Value| {
        body["devices"].as_array().is_some_and(|all| all.iter().filter(|device| device["failures"] == 1).count() == 1)
    };
    let body = asked_until(&rig, "/readyz", failed).await;
    assert_eq!(body["ready"], true, "the other one speaks: {body}");
    let (_, end) = hear_turn_at_last(&lucky, asked).await;
    let stalls = gaps(&lucky.ear().heard(), onset, end);
    assert!(stalls.is_empty(), "{stalls:?}");
    let both = |body: &Value| {
        body["devices"]
            .as_array()
            .is_some_and(|all| all.iter().filter(|device| device["state"] == "ready").count() == 2)
    };
    asked_until(&rig, "/readyz", both).await;
    for call in [&lucky, &unlucky] {
        assert!(call.status().end.is_none(), "the call goes on");
        let asked = rig.speak(call, SENTENCE).await;
        let (_, end) = hear_turn_at_last(call, asked).await;
        rig.assert_heard(call, SENTENCE, (asked, end), 0.8).await;
        call.hang_up().await;
    }
    rig.app.drain().await;
}

/// Both databases, damaged and held by another program, before the start and while a recorded call speaks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_and_locked_databases_cost_a_recorded_call_nothing() {
    for damaged in [true, false] {
        let mut state = PathBuf::new();
        let mut held = Vec::new();
        let rig = Rig::with(|config| {
            state = config.state.dir.clone();
            (config.recording.mode, config.recording.consent) = (Mode::All, String::new());
            for name in ["batch.sqlite", "records.sqlite"] {
                let path = state.join(name);
                if damaged {
                    std::fs::write(&path, b"this is no database, and long enough to look at".repeat(100))
                        .expect("written");
                } else {
                    let other = rusqlite::Connection::open(&path).expect("opens");
                    other.execute_batch("BEGIN EXCLUSIVE; CREATE TABLE theirs (x);").expect("locked");
                    held.push(other);
                }
            }
        })
        .await;
        let call = rig.telephone("silent", Codec::Pcmu).await;
        let id = call.id().expect("named").to_owned();
        let asked = rig.speak(&call, SENTENCE).await;
        let onset = call.onset(asked, PATIENCE).await.expect("speech is heard");
        if !damaged {
            let body = asked_until(&rig, "/readyz", |body| names(body, "batch") && names(body, "records")).await;
            assert_eq!(body["ready"], true, "{body}");
            let (status, body) = rig.post("/v1/audio/speech/batch", json!({ "items": ["For later."] })).await;
            assert!(status >= 500, "{body}");
        }
        let (_, end) = hear_turn(&call, asked).await;
        let stalls = gaps(&call.ear().heard(), onset, end);
        assert!(stalls.is_empty(), "damaged: {damaged}: {stalls:?}");
        call.hang_up().await;
        for other in held.drain(..) {
            other.execute_batch("ROLLBACK").expect("given back");
        }
        let accepted = async {
            loop {
                let (status, job) = rig.post("/v1/audio/speech/batch", json!({ "items": ["For later."] })).await;
                if status < 300 {
                    return job["id"].as_str().expect("an id").to_owned();
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let job = timeout(PATIENCE, accepted).await.expect("a job is taken");
        asked_until(&rig, &format!("/v1/jobs/{job}"), |job| job["state"] == "done").await;
        let path = format!("/v1/records/{id}");
        asked_until(&rig, &path, |record| record["endedMs"].is_u64() && record["recording"]["durationMs"].is_u64())
            .await;
        asked_until(&rig, "/readyz", |body| body["faults"].as_array().is_some_and(Vec::is_empty)).await;
        let names = std::fs::read_dir(&state).expect("readable").map(|file| file.expect("there").file_name());
        let aside = names.filter(|name| name.to_string_lossy().contains(".damaged-")).count();
        assert_eq!(aside, if damaged { 2 } else { 0 });
        rig.app.drain().await;
    }
}

#[tokio::test]
async fn the_program_ends_with_an_error_when_a_part_is_gone_that_only_a_new_process_brings_back() {
    let (folder, state) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let mut program = Serve::start(folder.path(), state.path(), |command| {
        command.env("ANTIPHON_PANIC_IN", "dispatcher").env("ANTIPHON_ENGINE__KIND", "tone");
    });
    program.ready().await;
    let mut telephone = Raw::new(program.sip, "unlucky").await;
    let invite = telephone.request("INVITE", "", &sdp(4_000, ""));
    telephone.send(&invite).await;
    assert_eq!(program.ended().await, Some(1));
}

#[tokio::test]
async fn a_dead_name_server_leaves_a_gateway_ready() {
    let (folder, state) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let file = folder.path().join("gateway.toml");
    // Names below `invalid` are nowhere (RFC 6761 section 6.4), so every question fails.
    let trunk = "[[sip.trunk]]\nname = \"gone\"\nhost = \"carrier.invalid\"\nprefixes = [\"+49\"]\nusername = \"u\"\n\
                 password = \"long-enough\"\nregister = true\n";
    std::fs::write(&file, trunk).expect("written");
    let mut program = Serve::start(folder.path(), state.path(), |command| {
        command.arg("-c").arg(&file).env("ANTIPHON_ENGINE__KIND", "tone");
    });
    program.ready().await;
    let placing = reqwest::Client::new()
        .post(format!("{}/v1/calls?wait=answer", program.http))
        .json(&serde_json::json!({ "to": "+49301234567", "ringTimeoutS": 10 }))
        .send();
    let placing = tokio::spawn(placing);
    // Meanwhile, and after it.
    let mut telephone = Raw::new(program.sip, "meanwhile").await;
    telephone.ask("OPTIONS", "", "", "SIP/2.0 200").await;
    let status = timeout(PATIENCE, placing).await.expect("answered").expect("no panic").expect("HTTP").status();
    assert!(!status.is_success(), "{status}");
    program.ready().await;
    assert_eq!(program.terminate().await, Some(0));
}

/// HTTPS and SIP over TLS, with fifty calls whose signalling is on connections of the old certificate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_certificate_is_taken_up_beside_fifty_calls() {
    const CALLS: usize = 50;
    const SPEAKING: usize = 4;
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let folder = tempfile::tempdir().expect("a folder");
    let (cert, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
    let put = |from: &str, from_key: &str| {
        // The key first: a pair that does not fit is told of and left, until the other half is there.
        std::fs::copy(data.join(from_key), &key).expect("copied");
        std::fs::copy(data.join(from), &cert).expect("copied");
    };
    put("sip/test-only-cert.pem", "sip/test-only-key.pem");
    let rig = Rig::with(|config| {
        config.engine.kind = EngineKind::Tone;
        config.http.tls = Some(Tls { cert: cert.clone(), key: key.clone() });
        config.sip.tls = Some(TlsConfig { bind: ([127, 0, 0, 1], 0).into(), cert: cert.clone(), key: key.clone() });
    })
    .await;
    let sip_tls = rig.app.gateway().sip.as_ref().and_then(|sip| sip.local_tls()).expect("SIP listens");
    // Each question on a connection of its own, which is what a certificate is for.
    let shown = async || {
        let of = async |address| handshake(address, "localhost", &[]).await.expect("TLS").0;
        [of(rig.app.http()).await, of(sip_tls).await]
    };
    let first = shown().await;
    let mut calls = Vec::new();
    for _ in 0..CALLS {
        let idle = Idle::KeepAlive(Duration::from_secs(1));
        let config = sip::Config {
            transport: Transport::Tls,
            codecs: vec![Codec::Pcmu],
            idle,
            patience: PATIENCE,
            ..sip::Config::default()
        };
        let telephone = sip::Caller::bind(config).await.expect("free ports");
        calls.push(telephone.call(&format!("sip:silent@{sip_tls}")).await.expect("answered"));
    }
    // Some speak all the while; that all of them do is a matter of how fast this computer is.
    let asked = antiphon_loadgen::call::now();
    for call in &calls[..SPEAKING] {
        rig.handle(call).await.speak(TurnRequest::new(SENTENCE.repeat(2))).await.expect("taken");
    }
    let mut onsets = Vec::new();
    for call in &calls[..SPEAKING] {
        onsets.push(call.onset(asked, PATIENCE).await.expect("speech is heard"));
    }
    put("cluster/node.pem", "cluster/node-key.pem");
    let swapped = async {
        loop {
            let now = shown().await;
            if now[0] != first[0] && now[1] != first[1] {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    timeout(PATIENCE, swapped).await.expect("both show the other one");
    for (call, onset) in calls[..SPEAKING].iter().zip(onsets) {
        let (_, end) = hear_turn_at_last(call, asked).await;
        let stalls = gaps(&call.ear().heard(), onset, end);
        assert!(stalls.is_empty(), "{stalls:?}");
    }
    for call in &calls {
        // On the connection that it has had all the time.
        call.hold(true).await.expect("the gateway answers");
        assert!(call.status().end.is_none());
    }
    assert_eq!(rig.app.gateway().calls.count(), CALLS);
    for call in &calls {
        call.hang_up().await;
    }
    rig.app.drain().await;
}
