//! Callers who are recognised: by a service, by one that is not there, and by a real model.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use antiphon::agent::config::Agent;
use antiphon::call::CallEvent;
use antiphon::hear::whisper::convert::convert;
use antiphon_loadgen::agent::Server;
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::dictation::{self, Condition};
use antiphon_loadgen::dispatch::Dispatch;
use antiphon_loadgen::exchange::{Plan, Trigger};
use antiphon_loadgen::{rtc, sip};
use axum::extract::Multipart;
use axum::response::{Html, IntoResponse};
use axum::routing::post;
use serde_json::json;
use tokio::sync::broadcast::Receiver;
use tokio::time::timeout;

use super::counted::Growth;
use super::support::{PATIENCE, Rig, SENTENCE, gaps};
use super::voice::voice;

pub(crate) const TEXT: &str = "I would like a table for two.";

/// A service that understands [`TEXT`] whatever it is sent.
pub(crate) async fn service() -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let answer = |mut form: Multipart| async move {
        while let Some(field) = form.next_field().await.expect("a form") {
            field.bytes().await.expect("bytes");
        }
        axum::Json(json!({ "text": TEXT }))
    };
    let app = axum::Router::new().route("/v1/audio/transcriptions", post(answer));
    tokio::spawn(async move { axum::serve(listener, app).await });
    url
}

/// The first thing that `wanted` gives something for.
async fn find<T>(events: &mut Receiver<CallEvent>, mut wanted: impl FnMut(CallEvent) -> Option<T>) -> T {
    let found = async {
        loop {
            if let Some(found) = wanted(events.recv().await.expect("the call lives")) {
                return found;
            }
        }
    };
    timeout(PATIENCE, found).await.expect("it happens")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_caller_says_reaches_the_agent_as_a_prompt_and_before_its_end_where_wanted() {
    let server = Server::bind("127.0.0.1:0".parse().expect("an address")).await.expect("a free port");
    let (url, service) = (server.url(), service().await);
    let mut server = server;
    let rig = Rig::with(|config| {
        config.recognizer.url = Some(service);
        config.recognizer.timeout_ms = 20_000;
        let language = Some("en-GB".into());
        let configured = Agent { partials: true, language: language.clone(), ..Agent::at(&url) };
        config.agent.insert("configured".into(), configured);
        config.agent.insert("asks".into(), Agent { language, ..Agent::at(&url) });
    })
    .await;
    for agent in ["configured", "asks"] {
        let call = rig.telephone(agent, Codec::Pcmu).await;
        let mut session = server.next_session(PATIENCE).await.expect("the gateway dials");
        if agent == "asks" {
            session.send(&json!({ "type": "setup", "partials": true })).await.expect("the link is up");
        }
        call.say(&voice()).await.expect("the caller speaks");
        let mut phases = Vec::new();
        let prompt = loop {
            let (_, prompt) = session.recv_type("prompt", PATIENCE).await.expect("words come");
            assert_eq!(prompt["voicePrompt"], json!(TEXT));
            if prompt["last"] == json!(true) {
                break prompt;
            }
            phases.push(prompt["phase"].clone());
        };
        assert!(phases.contains(&json!("partial")) && phases.contains(&json!("eager")), "{agent}: {phases:?}");
        assert_eq!((&prompt["voicePrompt"], &prompt["lang"]), (&json!(TEXT), &json!("en-GB")));
        assert!(prompt.get("phase").is_none(), "as an unmodified agent knows it: {prompt}");
        call.hang_up().await;
    }
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_demo_agent_repeats_what_it_heard() {
    let service = service().await;
    let counts =
        Growth::of(&["antiphon_recognizer_seconds_count{", "antiphon_turn_seconds_count{phase=\"mouth_to_ear\"}"]);
    let rig = Rig::with(|config| {
        config.recognizer.url = Some(service);
        config.recognizer.timeout_ms = 20_000;
    })
    .await;
    let call = rig.browser("demo").await;
    let mut events = rig.handle(&call).await.events();
    call.say(&voice()).await.expect("the caller speaks");
    let (mut repeated, mut waited) = (false, None);
    let both = find(&mut events, |event| {
        match event {
            CallEvent::Answered { stages, .. } => waited = Some(stages),
            CallEvent::TurnEnded { heard, .. } => repeated |= heard.text.starts_with("You said"),
            _ => {}
        }
        waited.filter(|_| repeated)
    });
    let stages = both.await;
    assert!(
        stages.end_of_turn >= Duration::from_millis(200) && stages.mouth_to_ear() > stages.end_of_turn,
        "{stages:?}"
    );
    counts.assert();
    call.hang_up().await;
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recogniser_that_is_not_there_costs_an_apology_and_the_call_goes_on() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let gone = format!("http://{}", listener.local_addr().expect("bound"));
    drop(listener);
    let counts = Growth::of(&["antiphon_recognizer_errors_total{", "antiphon_deaf_seconds_count"]);
    let server = Server::bind("127.0.0.1:0".parse().expect("an address")).await.expect("a free port");
    let url = server.url();
    let mut server = server;
    let rig = Rig::with(|config| {
        config.recognizer.url = Some(gone);
        config.recognizer.timeout_ms = 20_000;
        config.call.barge_in.interruptible = antiphon::call::Interruptible::None;
        config.agent.insert("remote".into(), Agent::at(&url));
    })
    .await;
    let call = rig.telephone("remote", Codec::Pcmu).await;
    let mut session = server.next_session(PATIENCE).await.expect("the gateway dials");
    let handle = rig.handle(&call).await;
    let mut events = handle.events();
    call.say(&voice()).await.expect("the caller speaks");
    let reason = find(&mut events, |event| match event {
        CallEvent::Deaf { reason, lost } => {
            assert!(lost >= Duration::from_millis(100), "{lost:?}");
            Some((reason, lost))
        }
        _ => None,
    });
    let (reason, lost) = reason.await;
    let frame = loop {
        let (_, frame) = session.recv_type("info", PATIENCE).await.expect("the agent is told");
        if frame["name"] == json!("deaf") {
            break frame;
        }
    };
    assert_eq!((&frame["lostMs"], &frame["reason"]), (&json!(lost.as_millis() as u64), &json!(reason)));
    assert!(reason.contains("cannot be reached"));
    counts.assert();
    let apology = find(&mut events, |event| match event {
        CallEvent::TurnEnded { heard, .. } => Some(heard.text),
        _ => None,
    });
    assert!(apology.await.contains("did not hear"));
    assert!(!handle.has_ended());
    call.hang_up().await;
    rig.app.drain().await;
}

/// What a service answers that is none.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// Nothing, ever.
    Silent,
    /// The page of a proxy.
    Page,
    /// Text without end.
    Endless,
    /// More text than somebody can have said.
    Long,
    /// Words between control characters, of a terminal and others.
    Control,
}

/// A service with the fault that is set.
async fn faulty(fault: Arc<Mutex<Fault>>) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let answer = move |mut form: Multipart| async move {
        while let Some(field) = form.next_field().await.expect("a form") {
            field.bytes().await.expect("bytes");
        }
        let fault = *fault.lock().expect("whole");
        match fault {
            Fault::Silent => std::future::pending().await,
            Fault::Page => Html("<html><body><h1>502 Bad Gateway</h1>\0</body></html>").into_response(),
            Fault::Endless => {
                let piece = bytes::Bytes::from("{\"text\":\"and so on and on, ".repeat(1_000));
                let pieces = futures_util::stream::repeat_with(move || Ok::<_, std::io::Error>(piece.clone()));
                axum::body::Body::from_stream(pieces).into_response()
            }
            Fault::Long => axum::Json(json!({ "text": "and so on ".repeat(20_000) })).into_response(),
            Fault::Control => {
                axum::Json(json!({ "text": "I would\u{7} like\n a\u{0} table\u{9b}for\u{1b} two." })).into_response()
            }
        }
    };
    let app = axum::Router::new().route("/v1/audio/transcriptions", post(answer));
    tokio::spawn(async move { axum::serve(listener, app).await });
    url
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recogniser_that_answers_nonsense_costs_its_caller_an_apology_and_others_nothing() {
    let mut server = Server::bind("127.0.0.1:0".parse().expect("an address")).await.expect("a free port");
    let (url, fault) = (server.url(), Arc::new(Mutex::new(Fault::Silent)));
    let service = faulty(fault.clone()).await;
    let rig = Rig::with(|config| {
        config.recognizer.url = Some(service);
        config.recognizer.timeout_ms = 1_000;
        config.call.barge_in.interruptible = antiphon::call::Interruptible::None;
        config.agent.insert("remote".into(), Agent::at(&url));
        // A busy machine is late, and refuses nothing here.
        config.scheduler.first_audio_target_ms = 60_000;
    })
    .await;
    // Somebody else is spoken to meanwhile.
    let other = rig.telephone("silent", Codec::Pcma).await;
    let asked = rig.speak(&other, &SENTENCE.repeat(24)).await;
    let onset = other.onset(asked, PATIENCE).await.expect("the other caller hears it");
    for (now, told) in [
        (Fault::Silent, Some("in time")),
        (Fault::Page, Some("no transcription")),
        (Fault::Endless, Some("larger than")),
        (Fault::Long, None),
        (Fault::Control, None),
    ] {
        *fault.lock().expect("whole") = now;
        let call = rig.telephone("remote", Codec::Pcmu).await;
        let mut session = server.next_session(PATIENCE).await.expect("the gateway dials");
        let handle = rig.handle(&call).await;
        let mut events = handle.events();
        let spoke = call.say(&voice()).await.expect("the caller speaks") + voice().duration();
        match told {
            Some(told) => {
                let reason = find(&mut events, |event| match event {
                    CallEvent::Deaf { reason, .. } => Some(reason),
                    _ => None,
                });
                let reason = reason.await;
                assert!(reason.contains(told), "{now:?}: {reason}");
                loop {
                    let (_, frame) = session.recv(PATIENCE).await.expect("the agent is told");
                    assert!(frame["type"] != json!("prompt"), "{now:?}: {frame}");
                    if frame["name"] == json!("deaf") {
                        break;
                    }
                }
                let apology = find(&mut events, |event| match event {
                    CallEvent::TurnEnded { heard, .. } => Some(heard.text),
                    _ => None,
                });
                assert!(apology.await.contains("did not hear"), "{now:?}");
                call.onset(spoke, PATIENCE).await.expect("and the caller hears it");
            }
            None => {
                let (_, prompt) = session.recv_type("prompt", PATIENCE).await.expect("words come");
                let text = prompt["voicePrompt"].as_str().expect("a text");
                assert!(!text.chars().any(char::is_control) && text.len() <= 8 << 10, "{now:?}: {text:?}");
                assert!(now == Fault::Long || text == "I would like a table for two.", "{text:?}");
            }
        }
        assert!(!handle.has_ended(), "{now:?}: the call goes on");
        call.hang_up().await;
    }
    // Its turn has sounded all the time, without a packet too few.
    let (heard, until) = (other.ear().heard(), antiphon_loadgen::call::now());
    assert_eq!(gaps(&heard, onset, until), Vec::new());
    let speaking = other.onset(until, PATIENCE).await;
    assert!(speaking.is_some(), "the turn was long enough");
    other.hang_up().await;
    rig.app.drain().await;
}

/// Where `ANTIPHON_WHISPER_CT2` says that tiny.en of CTranslate2 lies (`.ci/run` fetches it).
#[allow(clippy::disallowed_methods, reason = "this variable belongs to the test, not to the gateway")]
fn model(folder: &Path) -> Option<PathBuf> {
    let Some(from) = std::env::var_os("ANTIPHON_WHISPER_CT2") else {
        antiphon_skip::skip("whisper", "ANTIPHON_WHISPER_CT2 names no folder with a checkpoint of CTranslate2");
        return None;
    };
    let to = folder.join("whisper-tiny.en");
    let tensors = convert(Path::new(&from), &to).expect("the checkpoint is converted");
    assert_eq!(tensors, 167);
    let report = antiphon::hear::whisper::verify::verify(&to);
    assert!(report.passed(), "{report}");
    Some(to)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn words_said_on_a_call_come_out_as_words() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(model) = model(folder.path()) else { return };
    let dispatch = Dispatch::bind("127.0.0.1:0".parse().expect("an address")).await.expect("a free port");
    let url = dispatch.url().to_owned();
    let rig = Rig::with(|config| {
        config.recognizer.model = Some(model.display().to_string());
        config.agent.insert("remote".into(), Agent::at(&url));
    })
    .await;
    let plan = Plan {
        voices: Vec::new(),
        sip_target: Some(format!("sip:remote@{}", rig.sip_udp())),
        sip: sip::Config::default(),
        webrtc: Some(rtc::Config { agent: Some("remote".into()), ..rtc::Config::new(rig.http.clone()) }),
        gateway: None,
        trigger: Trigger::Agent(Arc::new(dispatch)),
        references: Arc::default(),
        recognizer: None,
        buffer: Duration::from_millis(60),
        patience: PATIENCE,
    };
    let text = "Good morning. I would like to book a table for some friends on Friday evening.";
    let said = [dictation::sentence(text, &rig.reference(text).await).expect("audible")];
    for codec in [Codec::Pcmu, Codec::Opus] {
        let condition = Condition { codec, loss: 0.0, noise: None };
        let outcome = dictation::run(&plan, &said, condition, 1).await.expect("the call stays");
        eprintln!("{outcome}; {:?}", outcome.sentences);
        // A machine's voice on a telephone is not what the model was trained on.
        assert!(outcome.unheard == 0 && outcome.errors.rate() <= 0.34, "{outcome:?}");
    }
    rig.app.drain().await;
}
