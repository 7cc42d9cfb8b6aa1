//! Callers in front of services that behave as their documentation says, and of such that do not. Real sockets and time.

use std::sync::Mutex;

use axum::Router;
use axum::extract::ws::{Message as Seen, WebSocket, WebSocketUpgrade};
use axum::extract::{OriginalUri, State};
use axum::http::HeaderMap;
use axum::routing::get;
use serde_json::{Value, json};
use tokio::sync::mpsc::Receiver;

use super::*;
use crate::clock;
use crate::hear::ear::FRAME;
use crate::hear::{Ears, Turns};
use crate::telemetry::shown::counted;

/// Longest wait for what must happen.
const PATIENCE: Duration = Duration::from_secs(60);
const SAID: &str = "I would like a table for two.";

/// What a service does on one connection.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Manner {
    /// As documented.
    Good,
    /// Breaks the connection once it has heard half a second.
    Dies,
    /// Takes sound and never says a word.
    Mute,
    /// Sends what is no message.
    Rubbish,
    /// Refuses the handshake.
    Refuses,
}

#[derive(Clone)]
struct Script {
    /// One for each connection; the last one for all that follow.
    manners: Arc<Mutex<Vec<Manner>>>,
    /// Query, authorisation and samples of each connection.
    seen: Arc<Mutex<Vec<(String, String, usize)>>>,
}

impl Script {
    fn connections(&self) -> Vec<(String, String, usize)> {
        self.seen.lock().expect("no panic").clone()
    }
}

async fn serve_script(manners: &[Manner]) -> (String, Script) {
    let script = Script { manners: Arc::new(Mutex::new(manners.to_vec())), seen: Arc::default() };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("ws://{}", listener.local_addr().expect("bound"));
    let app = Router::new()
        .route("/v1/listen", get(upgrade))
        .route("/v2/listen", get(upgrade))
        .route("/v1/realtime", get(upgrade))
        .with_state(script.clone());
    tokio::spawn(async move { axum::serve(listener, app).await });
    (url, script)
}

async fn upgrade(
    State(script): State<Script>,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
    upgrade: WebSocketUpgrade,
) -> axum::response::Response {
    let manner = {
        let mut manners = script.manners.lock().expect("no panic");
        if manners.len() > 1 { manners.remove(0) } else { manners[0] }
    };
    let token = headers.get("authorization").and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    let number = {
        let mut seen = script.seen.lock().expect("no panic");
        seen.push((uri.query().unwrap_or_default().to_owned(), token, 0));
        seen.len() - 1
    };
    if manner == Manner::Refuses {
        return axum::response::IntoResponse::into_response(axum::http::StatusCode::PAYMENT_REQUIRED);
    }
    let flux = (uri.path() == "/v2/listen").then(Flux::default);
    upgrade.on_upgrade(move |socket| behave(socket, manner, script, number, flux))
}

/// Deepgram's Flux as its documentation has it: it finds the turns itself, in the sound, and tells of each what has happened, with
/// the whole of its text so far.
#[derive(Default)]
struct Flux {
    samples: usize,
    sequence: u32,
    turn: u32,
    /// Of the turn that is open: where it begins, its last voice, the last message about it.
    open: Option<(usize, usize, usize)>,
    eager: bool,
}

impl Flux {
    const EAGER: usize = 16_000 * 240 / 1_000;
    const END: usize = 16_000 * 640 / 1_000;
    const UPDATE: usize = 16_000 / 4;

    fn hear(&mut self, pcm: &[u8]) -> Vec<Value> {
        let mut answers = Vec::new();
        if self.sequence == 0 {
            answers.push(json!({ "type": "Connected", "request_id": "r", "sequence_id": 0 }));
        }
        let voiced = pcm.iter().any(|byte| *byte != 0);
        self.samples += pcm.len() / 2;
        let at = self.samples;
        let Some((_, voice, told)) = &mut self.open else {
            if voiced {
                self.open = Some((at - pcm.len() / 2, at, at));
                answers.push(self.info("StartOfTurn", "I"));
            }
            return answers;
        };
        if voiced {
            let resumed = std::mem::take(&mut self.eager);
            let due = resumed || at - *told >= Self::UPDATE;
            *voice = at;
            if due {
                *told = at;
                answers.push(self.info(if resumed { "TurnResumed" } else { "Update" }, "I would like"));
            }
        } else if at - *voice >= Self::END {
            answers.push(self.info("EndOfTurn", SAID));
            (self.open, self.eager) = (None, false);
            self.turn += 1;
        } else if at - *voice >= Self::EAGER && !std::mem::replace(&mut self.eager, true) {
            answers.push(self.info("EagerEndOfTurn", SAID));
        }
        answers
    }

    fn info(&mut self, event: &str, transcript: &str) -> Value {
        self.sequence += 1;
        let words = transcript.split(' ').map(|word| json!({ "word": word, "confidence": 0.97 }));
        let seconds = |samples: usize| samples as f64 / 16_000.0;
        let start = self.open.map_or(0, |(start, ..)| start);
        json!({
            "type": "TurnInfo", "request_id": "r", "sequence_id": self.sequence, "event": event,
            "turn_index": self.turn, "audio_window_start": seconds(start), "audio_window_end": seconds(self.samples),
            "transcript": transcript, "words": words.collect::<Vec<_>>(), "end_of_turn_confidence": 0.8,
        })
    }
}

/// The services, told apart by what they are sent.
async fn behave(mut socket: WebSocket, manner: Manner, script: Script, number: usize, mut flux: Option<Flux>) {
    let (mut samples, mut items, mut vllm) = (0usize, 0, false);
    while let Some(Ok(message)) = socket.recv().await {
        let mut answers: Vec<Value> = Vec::new();
        match message {
            Seen::Binary(pcm) => {
                samples += pcm.len() / 2;
                answers.extend(flux.as_mut().into_iter().flat_map(|flux| flux.hear(&pcm)));
            }
            Seen::Text(text) => {
                let message: Value = serde_json::from_str(&text).expect("the gateway sends JSON");
                match message["type"].as_str().expect("a type") {
                    "session.update" => vllm = message.get("model").is_some(),
                    "input_audio_buffer.append" if vllm => {
                        use base64::Engine as _;
                        let audio = message["audio"].as_str().expect("sound");
                        samples += base64::engine::general_purpose::STANDARD.decode(audio).expect("base64").len() / 2;
                    }
                    "input_audio_buffer.commit" if vllm && message["final"] == true => {
                        answers.push(json!({ "type": "transcription.delta", "delta": "I wo" }));
                        answers.push(json!({ "type": "transcription.done", "text": SAID, "usage": null }));
                    }
                    "input_audio_buffer.commit" if vllm => {}
                    "Finalize" => {
                        let alternative = json!({ "transcript": SAID, "confidence": 0.98, "words": [] });
                        answers.push(json!({
                            "type": "Results", "start": 0.0, "duration": samples as f64 / 16_000.0, "is_final": true,
                            "speech_final": false, "from_finalize": true, "channel_index": [0, 1],
                            "channel": { "alternatives": [alternative] },
                        }));
                    }
                    "input_audio_buffer.append" => {
                        use base64::Engine as _;
                        let audio = message["audio"].as_str().expect("sound");
                        let bytes = base64::engine::general_purpose::STANDARD.decode(audio).expect("base64");
                        samples += bytes.len() / 2 * 2 / 3;
                    }
                    "input_audio_buffer.commit" => {
                        items += 1;
                        let id = format!("item_{items}");
                        let transcription = "conversation.item.input_audio_transcription";
                        answers.push(json!({ "type": "input_audio_buffer.committed", "item_id": id }));
                        answers
                            .push(json!({ "type": format!("{transcription}.delta"), "item_id": id, "delta": "I wo" }));
                        answers.push(
                            json!({ "type": format!("{transcription}.completed"), "item_id": id, "transcript": SAID }),
                        );
                    }
                    _ => {}
                }
            }
            _ => {}
        }
        script.seen.lock().expect("no panic")[number].2 = samples;
        match manner {
            Manner::Dies if samples >= 8_000 => return,
            Manner::Rubbish if samples > 0 => answers = vec![json!("what is this")],
            Manner::Mute => answers.clear(),
            _ => {}
        }
        for answer in answers {
            if socket.send(Seen::text(answer.to_string())).await.is_err() {
                return;
            }
        }
    }
}

fn service(dialect: Dialect, url: &str) -> Service {
    Service { dialect, url: url.into(), token: Some(Secret::new("key")), model: None, price: 0.6 }
}

fn ears(services: Vec<Service>, patience_ms: u64) -> Ears {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let services = Services { services, patience: Duration::from_millis(patience_ms) };
    Ears::streaming(services, Some("en".into()), Turns::default(), String::new(), tokio::runtime::Handle::current())
}

/// A second of voice, then silence until the turn has ended; in real time, as the link's clock is the frames'.
async fn converse(ears: &Ears) -> Vec<HearEvent> {
    say(ears, &[(500, 1_500)]).await
}

/// Voice at these times in ms, as [`converse`].
async fn say(ears: &Ears, voice: &[(u64, u64)]) -> Vec<HearEvent> {
    let (mut feed, mut told) = ears.open();
    let (began, mut events, mut n) = (clock::now(), Vec::new(), 0u64);
    let ended = |events: &[HearEvent]| {
        events.iter().any(|event| matches!(event, HearEvent::Turn(turn) if turn.phase == Phase::EndOfTurn))
    };
    while !ended(&events) {
        n += 1;
        let (ms, at) = (20 * n, Duration::from_millis(20 * n));
        let last = voice.iter().filter(|(start, _)| *start < ms).map(|(_, end)| (*end).min(ms)).max();
        let quiet = last.map(|last| Duration::from_millis(ms - last));
        let level = if quiet == Some(Duration::ZERO) { 1_000 } else { 0 };
        feed.frame(at, &[level; FRAME], quiet.filter(|quiet| quiet.as_millis() < 480));
        assert!(at < PATIENCE, "no end: {events:?}");
        tokio::time::sleep_until((began + at).into()).await;
        drain(&mut told, &mut events);
    }
    events
}

fn drain(told: &mut Receiver<HearEvent>, events: &mut Vec<HearEvent>) {
    while let Ok(event) = told.try_recv() {
        events.push(event);
    }
}

fn text(events: &[HearEvent]) -> String {
    let last = events.iter().rev().find_map(|event| match event {
        HearEvent::Turn(turn) if turn.phase == Phase::EndOfTurn => Some(turn.text.clone()),
        _ => None,
    });
    last.expect("the turn ended")
}

fn deaf(events: &[HearEvent]) -> usize {
    events.iter().filter(|event| matches!(event, HearEvent::Deaf { .. })).count()
}

fn phases(events: &[HearEvent]) -> Vec<Phase> {
    let turns = events.iter().filter_map(|event| match event {
        HearEvent::Turn(turn) => Some(turn.phase),
        HearEvent::Deaf { .. } => None,
    });
    turns.collect()
}

const DIALECTS: [Dialect; 4] = [Dialect::Listen, Dialect::Flux, Dialect::OpenAi, Dialect::Vllm];

#[tokio::test]
async fn what_a_service_streams_is_a_turn() {
    let heard = || counted("antiphon_recognizer_audio_seconds_total{");
    let cost = || counted("antiphon_recognizer_cost_micros_total{");
    let before = (heard(), cost());
    let each = DIALECTS.map(|dialect| async move {
        let (url, script) = serve_script(&[Manner::Good]).await;
        let events = converse(&ears(vec![service(dialect, &url)], 20_000)).await;
        assert_eq!((text(&events).as_str(), deaf(&events)), (SAID, 0), "{dialect:?}");
        assert_eq!(phases(&events), [Phase::StartOfTurn, Phase::EagerEndOfTurn, Phase::EndOfTurn], "{dialect:?}");
        let seen = script.connections();
        assert_eq!(seen.len(), 1);
        let (query, token, samples) = &seen[0];
        match dialect {
            Dialect::OpenAi => assert_eq!((query.as_str(), token.as_str()), ("intent=transcription", "Bearer key")),
            Dialect::Vllm => assert_eq!((query.as_str(), token.as_str()), ("", "Bearer key")),
            Dialect::Listen => {
                assert!(query.contains("sample_rate=16000") && query.contains("language=en") && token == "Token key");
            }
            Dialect::Flux => {
                assert!(query.contains("eager_eot_threshold=") && query.contains("sample_rate=16000"), "{query}");
                assert_eq!(token, "Token key");
            }
        }
        assert!(*samples >= 16_000, "{samples}");
    });
    futures_util::future::join_all(each).await;
    // A second at least of each, at 0.6 a minute. The last of it is counted when the call has ended.
    let counted = async {
        while heard() < before.0 + 4.0 || cost() < before.1 + 40_000.0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, counted).await.expect("what was streamed is counted, and what it costs");
}

#[tokio::test]
async fn a_turn_that_a_service_takes_as_ended_too_early_is_resumed() {
    let (url, _) = serve_script(&[Manner::Good]).await;
    let ears = ears(vec![service(Dialect::Flux, &url)], 20_000);
    // A pause that is long enough for an eager end, and too short for an end.
    let events = say(&ears, &[(500, 1_300), (1_700, 2_500)]).await;
    let eager =
        [Phase::StartOfTurn, Phase::EagerEndOfTurn, Phase::TurnResumed, Phase::EagerEndOfTurn, Phase::EndOfTurn];
    assert_eq!((phases(&events).as_slice(), deaf(&events)), (&eager[..], 0), "{events:?}");
    assert_eq!(text(&events), SAID, "said once, not twice");
}

#[tokio::test]
async fn a_service_that_fails_in_any_way_costs_no_word_where_there_is_a_second() {
    let faults = [Manner::Dies, Manner::Mute, Manner::Rubbish, Manner::Refuses];
    let each = DIALECTS.iter().flat_map(|dialect| faults.map(|manner| (*dialect, manner)));
    let each = each.map(|(dialect, manner)| async move {
        let (first, failed) = serve_script(&[manner]).await;
        let (second, good) = serve_script(&[Manner::Good]).await;
        // A mute one is noticed after a while; the second then has as long.
        let patience = if manner == Manner::Mute { 4_000 } else { 20_000 };
        let other = if dialect == Dialect::OpenAi { Dialect::Flux } else { Dialect::OpenAi };
        let services = vec![service(dialect, &first), service(other, &second)];
        let events = converse(&ears(services, patience)).await;
        assert_eq!((text(&events).as_str(), deaf(&events)), (SAID, 0), "{dialect:?} {manner:?}");
        assert!(!failed.connections().is_empty());
        let sound = good.connections().iter().map(|(.., samples)| *samples).max();
        assert!(sound.is_some_and(|samples| samples >= 16_000), "{dialect:?} {manner:?}: all of it again: {sound:?}");
    });
    futures_util::future::join_all(each).await;
}

#[tokio::test]
async fn one_service_that_comes_back_hears_what_it_missed() {
    let each = DIALECTS.map(|dialect| async move {
        let (url, script) = serve_script(&[Manner::Dies, Manner::Refuses, Manner::Good]).await;
        let events = converse(&ears(vec![service(dialect, &url)], 20_000)).await;
        assert_eq!((text(&events).as_str(), deaf(&events)), (SAID, 0), "{dialect:?}");
        let seen = script.connections();
        assert!(seen.len() >= 3 && seen.last().expect("three").2 >= 16_000, "{dialect:?}: {seen:?}");
    });
    futures_util::future::join_all(each).await;
}

#[tokio::test]
async fn a_service_that_never_answers_makes_the_call_deaf_and_the_turn_ends() {
    let each = DIALECTS.map(|dialect| async move {
        let (url, _) = serve_script(&[Manner::Mute]).await;
        let events = converse(&ears(vec![service(dialect, &url)], 500)).await;
        assert_eq!((text(&events).as_str(), deaf(&events)), ("", 1), "{dialect:?}: {events:?}");
    });
    futures_util::future::join_all(each).await;
}

#[tokio::test]
async fn a_call_that_ends_dials_no_longer() {
    use tokio::io::AsyncReadExt;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("ws://{}", listener.local_addr().expect("bound"));
    let (feed, told) = ears(vec![service(Dialect::Listen, &url)], 20_000).open();
    let (mut socket, _) = timeout(PATIENCE, listener.accept()).await.expect("it dials").expect("a connection");
    drop((feed, told));
    // Nobody answers the handshake. A reset is an end, too.
    let _ = timeout(PATIENCE, socket.read_to_end(&mut Vec::new())).await.expect("the connection is given up");
}
