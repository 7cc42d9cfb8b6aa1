//! Mouth to ear as the load generator measures it: callers speak, a recogniser and a language model that answer at once
//! stand behind the gateway, and the answer is listened for. With answers on speculation and without.
//!
//! `ANTIPHON_MOUTH_TO_EAR_S=240 chrt -r 5 cargo test --test gateway mouth_to_ear -- --nocapture` prints the figures of so many seconds
//! each, without the variable of fifteen.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use antiphon::agent::config::Agent;
use antiphon::agent::llm::config::Llm;
use antiphon_loadgen::call::Leg;
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::exchange::{Plan, Saying, Trigger};
use antiphon_loadgen::heard::Clip;
use antiphon_loadgen::load::{self, Arrivals, Behaviour, Load};
use antiphon_loadgen::report::{Level, Report};
use antiphon_loadgen::{html, sip};
use axum::routing::post;
use serde_json::json;

use super::hears::service;
use super::support::{PATIENCE, Rig};
use super::voice::voice;

/// A language model that answers at once, and how often it was asked.
async fn model() -> (Llm, Arc<AtomicUsize>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let llm = Llm::at(&format!("http://{}/v1", listener.local_addr().expect("bound")), "instant");
    let asked = Arc::new(AtomicUsize::new(0));
    let counter = asked.clone();
    let answer = move || async move {
        counter.fetch_add(1, Ordering::Relaxed);
        let chunk = json!({ "choices": [{ "index": 0, "delta": { "content": "Yes, for two." } }] });
        let end = json!({ "choices": [{ "index": 0, "delta": {}, "finish_reason": "stop" }] });
        let body = format!("data: {chunk}\n\ndata: {end}\n\ndata: [DONE]\n\n");
        ([(axum::http::header::CONTENT_TYPE, "text/event-stream")], body)
    };
    let app = axum::Router::new().route("/v1/chat/completions", post(answer));
    tokio::spawn(async move { axum::serve(listener, app).await });
    (llm, asked)
}

/// A second and a half of speech without a pause in it.
fn saying() -> Arc<Saying> {
    let Clip { rate, pcm } = voice();
    let loud = |frame: &&[f32]| frame.iter().map(|s| s * s).sum::<f32>() > 0.04;
    let pcm = pcm.chunks_exact(160).filter(loud).take(75).flatten().copied().collect();
    Arc::new(Saying::new("speech", Clip { rate, pcm }).expect("audible"))
}

/// How long callers speak, in each mode. A slow machine takes some seconds for a turn.
fn duration() -> Duration {
    let seconds = std::env::var_os("ANTIPHON_MOUTH_TO_EAR_S").and_then(|value| value.to_str()?.parse().ok());
    Duration::from_secs(seconds.unwrap_or(15))
}

async fn measure(speculate: bool) -> Level {
    let (llm, asked) = model().await;
    let service = service().await;
    let rig = Rig::with(|config| {
        config.recognizer.url = Some(service);
        config.recognizer.timeout_ms = 20_000;
        config.agent.insert("bot".into(), Agent::of(Llm { speculate, ..llm }));
    })
    .await;
    let plan = Plan {
        voices: Vec::new(),
        sip_target: Some(format!("sip:bot@{}", rig.sip_udp())),
        sip: sip::Config { codecs: vec![Codec::Pcmu], ..sip::Config::default() },
        webrtc: None,
        gateway: None,
        trigger: Trigger::Speech,
        references: Arc::default(),
        recognizer: None,
        buffer: Duration::from_millis(60),
        patience: PATIENCE,
    };
    let load = Load {
        arrivals: Arrivals::Closed(1),
        duration: duration(),
        warm_up: Duration::ZERO,
        cycles: Default::default(),
        legs: vec![(Leg::Sip, 1.0)],
        turns: Some(2..=2),
        think: (0.1, 0.2),
        texts: Vec::new(),
        says: vec![saying()],
        behaviour: Behaviour::default(),
        seed: 1,
        most: 1,
        sampled: 8,
        stop: Default::default(),
    };
    let (level, turns) = load::run(Arc::new(plan), load, None, |_| {}).await;
    let of = &level.mouth_to_ear;
    println!(
        "speculation {speculate}: mouth to ear p50 {:.0} ms, p95 {:.0} ms, of {} turns; {:?}; asked {}",
        of.p50 * 1e3,
        of.p95 * 1e3,
        of.count,
        level.failures,
        asked.load(Ordering::Relaxed)
    );
    assert!(turns.iter().all(|turn| turn.text == "speech" && turn.chars == 0), "{turns:?}");
    assert!(asked.load(Ordering::Relaxed) >= of.count as usize, "each answer was asked for");
    rig.app.drain().await;
    level
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_who_speak_measure_from_their_last_sample_to_the_first_of_the_answer() {
    for speculate in [true, false] {
        let level = measure(speculate).await;
        let of = &level.mouth_to_ear;
        assert!(of.count >= 1 && of.count == level.turns, "{level:?}");
        // The least silence that ends a turn is in it, and nobody answers before.
        assert!(of.p50 > 0.2 && of.p50 <= of.p95, "{of:?}");
        assert_eq!(level.first_audio, level.mouth_to_ear);
        let page = html::page(&Report { levels: vec![level], ..Report::default() });
        assert!(page.contains("mouth to ear: p50 "), "the report tells");
    }
}
