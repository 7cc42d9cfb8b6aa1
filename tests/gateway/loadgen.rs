//! What the load generator does beside plain calls, against the gateway it was made for.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use antiphon::app::engines::Choice;
use antiphon::secret::Secret;
use antiphon::sip::{TlsConfig, User};
use antiphon::synth::device::Loader;
use antiphon::synth::{
    Caps, EngineLimits, Outcome, PerStage, Progress, Seeds, Slot, Stage, Stages, Step, SynthError, Synthesizer,
    VoiceInfo,
};
use antiphon::turn::Utterance;
use antiphon_loadgen::call::{CallError, Leg, now};
use antiphon_loadgen::clock::sleep_until;
use antiphon_loadgen::codec::Codec;
use antiphon_loadgen::corpus::{self, Length};
use antiphon_loadgen::exchange::{Plan, Trigger, Waterfall};
use antiphon_loadgen::ladder::{self, Options};
use antiphon_loadgen::load::Behaviour;
use antiphon_loadgen::process::{Host, Usage};
use antiphon_loadgen::report::{GatewayMetrics, Knee, Level, Limits, Report};
use antiphon_loadgen::sip::{Caller, Config, Credentials, Transport};
use antiphon_loadgen::stages::ORDER;
use antiphon_loadgen::stats::Summary;
use antiphon_loadgen::{gateway, html, predict, sip, synthetic};
use serde_json::json;

use super::chromium::Page;
use super::support::{PATIENCE, Rig, SENTENCE, hear_turn};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batch_work_is_accepted_followed_and_done() {
    let rig = Rig::start().await;
    let gateway = gateway::Gateway::at(&rig.http, None).expect("an address");
    let id = gateway.batch(&["One.".to_owned(), "Two and three.".to_owned()]).await.expect("accepted");
    let deadline = now() + PATIENCE;
    let done = loop {
        let (done, over) = gateway.job(&id).await.expect("followed");
        if over {
            break done;
        }
        assert!(now() < deadline, "the job ends");
        sleep_until(now() + Duration::from_millis(50)).await;
    };
    assert_eq!(done, 2);
    // A job that is over is removed by the same request that cancels one.
    let id = gateway.batch(&[SENTENCE.repeat(20)]).await.expect("accepted");
    gateway.cancel_job(&id).await.expect("cancelled");
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_telephone_calls_over_tls_with_protected_media() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/sip");
    let rig = Rig::with(|config| {
        config.sip.tls = Some(TlsConfig {
            bind: ([127, 0, 0, 1], 0).into(),
            cert: folder.join("test-only-cert.pem"),
            key: folder.join("test-only-key.pem"),
        });
    })
    .await;
    let target = rig.app.gateway().sip.as_ref().and_then(|sip| sip.local_tls()).expect("TLS listens");
    let config = Config { transport: Transport::Tls, srtp: true, codecs: vec![Codec::Pcmu], ..Config::default() };
    let caller = Caller::bind(config).await.expect("free ports");
    let call = caller.call(&format!("sip:silent@{target}")).await.expect("answered");
    let asked = rig.speak(&call, "This is said in private.").await;
    hear_turn(&call, asked).await;
    call.hang_up().await;
    rig.app.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_telephone_says_who_it_is() {
    let rig = Rig::with(|config| {
        config.sip.users = vec![User { username: "alice".into(), password: Secret::new("open sesame") }];
    })
    .await;
    let target = format!("sip:demo@{}", rig.sip_udp());
    let call = async |password: Option<&str>| {
        let credentials = password.map(|p| Credentials { username: "alice".to_owned(), password: p.to_owned() });
        Caller::bind(Config { credentials, ..Config::default() }).await.expect("free ports").call(&target).await
    };
    let known = call(Some("open sesame")).await.expect("answered");
    assert!(known.onset(known.setup().asked, PATIENCE).await.is_some(), "the greeting is heard");
    known.hang_up().await;
    for stranger in [None, Some("open barley")] {
        let refused = call(stranger).await;
        assert!(matches!(refused, Err(CallError::Refused { code: 401 | 403 | 407, .. })), "{:?}", refused.err());
    }
    rig.app.drain().await;
}

/// Climbs `levels` with telephones that have short turns spoken to them, `change`d, and sees to it that the report has
/// what it is to have whatever the machine could do: that `bound` is among what may run out, and how much is foreseen.
/// Where knee and prediction come to lie is a matter of timing here; that they agree is shown where time is not real
/// (`antiphon_loadgen::predict`).
async fn climbs(rig: &Rig, levels: &[u32], bound: &str, change: impl FnOnce(&mut Options)) -> Report {
    let gateway = gateway::Gateway::at(&rig.http, None).expect("an address");
    let ready = gateway.ready().await.expect("ready");
    let plan = Plan {
        sip_target: Some(format!("sip:silent@{}", rig.sip_udp())),
        sip: sip::Config { codecs: vec![Codec::Pcmu], ..sip::Config::default() },
        webrtc: None,
        gateway: Some(gateway),
        trigger: Trigger::Http,
        voices: Vec::new(),
        references: Arc::default(),
        recognizer: None,
        buffer: Duration::from_millis(60),
        patience: Duration::from_secs(30),
    };
    let mut options = Options {
        levels: levels.to_vec(),
        most: 16,
        duration: Duration::from_secs(8),
        open_loop: false,
        rate: None,
        turns: 1..=1,
        legs: vec![(Leg::Sip, 1.0)],
        texts: corpus::select(&["en".to_owned()], &[Length::Short]),
        think: (0.0, 0.0),
        behaviour: Behaviour::default(),
        // What is late on a busy machine breaks nothing; what a caller would hang up for does, and any failure.
        limits: Limits { first_audio_p95: 5.0, rtf_p95: 5.0, stalled_turns: 1.0, failures: 0.0 },
        seed: 1,
        sampled: 1,
        find_knee: false,
        stop: Default::default(),
    };
    change(&mut options);
    let mut report = Report { devices: ready["devices"].clone(), limits: options.limits, ..Report::default() };
    ladder::climb(Arc::new(plan), &options, &mut None, None, &mut report, |_, _, done| {
        if let Some(level) = done {
            println!("{}: {} turns, {:?}", level.level, level.turns, level.broken);
        }
    })
    .await;
    assert_eq!(report.ended_early, None);
    assert_eq!(report.levels.iter().map(|l| l.level).collect::<Vec<_>>(), levels);
    let predicted = predict::predict(&report).expect("a prediction");
    let verdict = predict::verdict(&report).expect("a highest level to compare with");
    println!("{}", verdict.text);
    assert!(predicted.bounds.iter().any(|b| b.what == bound), "{predicted:?}");
    assert!(predicted.capacity > 0.0, "{predicted:?}");
    assert!(verdict.text.starts_with(&format!("{:.0} calls", predicted.capacity)), "{}", verdict.text);
    let page = html::page(&report);
    let row = format!("<td>{}<td>{:.0}<td>", predicted.bound, predicted.capacity);
    assert!(page.contains("<h2>Prediction</h2>") && page.contains(&row), "the page has no {row}");
    assert!(page.contains(&format!("<tr><td>{bound}<td>")), "the page does not say what {bound} can bear");
    report
}

/// A gateway that admits two speaking streams, whatever the machine could do: eight callers are too many, and the places
/// are among what is foreseen to run out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ladder_tells_what_few_places_bear() {
    let rig = Rig::with(|config| {
        config.scheduler.max_live = 2;
        // Streams are busy nearly as long as their speech is heard.
        config.scheduler.max_lead_ms = 400;
    })
    .await;
    let report = climbs(&rig, &[1, 2, 8], "capacity", |_| {}).await;
    assert_eq!(report.at(1).expect("it was measured").broken, [""; 0], "one caller is served");
    let broken = &report.at(8).expect("it was measured").broken;
    assert!(broken.iter().any(|why| why.starts_with("failures: ") || why == "no turn was heard"), "{broken:?}");
    let refused = &report.at(8).expect("it was measured").metrics.refusals;
    assert!(refused.get("full").is_some_and(|count| *count >= 1.0), "{refused:?}");
    let shown = gateway::Gateway::at(&rig.http, None).expect("an address").metrics().await.expect("shown");
    assert!(shown.by("antiphon_refusals_total", "reason")["full"] >= 1.0);
    assert!(html::page(&report).contains("8 calls, turns that the gateway refused: "), "the page gives the reason");
    rig.app.drain().await;
}

/// A device that takes 30 ms for each utterance, one after the other, is among what is foreseen to run out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ladder_tells_what_a_busy_device_bears() {
    let loader: Loader = Box::new(|| Ok(Box::new(Clockwork::new(Duration::from_millis(30)))));
    let voices = Choice { loaders: vec![loader], fallback: None, reasons: Vec::new() };
    let change = |config: &mut antiphon::config::Config| {
        // Turns are to wait, not to be refused.
        config.scheduler.first_audio_target_ms = 60_000;
        config.scheduler.load_limit = 1.0;
    };
    let rig = Rig::with_voices(change, voices).await;
    let open = |options: &mut Options| {
        options.open_loop = true;
        options.rate = Some(0.25);
    };
    climbs(&rig, &[10, 20], "device", open).await;
    rig.app.drain().await;
}

/// A report with everything in it that a page can show.
fn full_report() -> Report {
    let summary = |mean: f64| Summary {
        count: 400,
        mean,
        min: mean * 0.5,
        p50: mean,
        p95: mean * 1.4,
        p99: mean * 1.9,
        max: mean * 2.0,
    };
    let level = |n: u32| Level {
        level: n,
        mode: "closed".into(),
        seconds: 60.0,
        calls: n.into(),
        concurrency: n.into(),
        turns: u64::from(n) * 14,
        first_audio: summary(0.018 + f64::from(n) * 0.000_2),
        mouth_to_ear: summary(0.7),
        rtf: summary(1.0),
        service: summary(4.1),
        chars_per_s: f64::from(n) * 11.0,
        audio_s_per_s: f64::from(n) * 0.9,
        barge_in: summary(0.14),
        correlation: summary(0.93),
        gateway: Some(Usage { cores: f64::from(n) * 0.004, rss: 900_000_000, ..Usage::default() }),
        generator: Some(Usage { cores: f64::from(n) * 0.001, rss: 90_000_000, ..Usage::default() }),
        stages: ORDER.iter().chain(&["outside"]).map(|stage| ((*stage).to_owned(), summary(0.004))).collect(),
        failures: if n > 300 { [("first_audio_later_than_thirty_seconds".to_owned(), 3)].into() } else { [].into() },
        broken: if n > 300 { vec!["first audio p95 2.143 s > 2 s".to_owned()] } else { Vec::new() },
        metrics: GatewayMetrics {
            gpu_memory: 9.1e9,
            engine_rtf: Some(0.002),
            sustainable_streams: Some(500.0),
            refusals: [("overloaded".to_owned(), 12.0), ("full".to_owned(), 2.0)].into(),
            stage_seconds: ["decode", "flow", "prefill", "vocode"].map(|stage| (stage.to_owned(), 2.0)).into(),
            ..GatewayMetrics::default()
        },
        ..Level::default()
    };
    let card = json!({ "engine": "cosyvoice3", "device": "cuda:0", "state": "ready", "capacity": 900 });
    Report {
        name: "ladder".into(),
        command: format!("antiphon-loadgen ladder --target http://127.0.0.1:8080 {}", "--levels-and-more ".repeat(20)),
        targets: vec!["sip:loadgen@127.0.0.1:5060".into(), "http://127.0.0.1:8080".into()],
        host: Host { cpu: "A processor with a long name at 3.00 GHz".into(), cores: 16, ..Host::default() },
        devices: json!([card, card]),
        levels: [4, 8, 16, 48, 100, 200, 300, 400].map(level).to_vec(),
        knee: Some(Knee { level: 300, broken_at: Some(400) }),
        waterfall: Some(Waterfall {
            text: "To change the number on your account, please tell me the last four digits of the old one.".into(),
            leg: "sip".into(),
            first_packet: 0.031,
            first_audio: 0.034,
            last_audio: 4.1,
            stages: ORDER.iter().map(|stage| ((*stage).to_owned(), 0.003)).collect(),
            ..Waterfall::default()
        }),
        notes: vec!["a-word-that-nothing-breaks-".repeat(12)],
        ..Report::default()
    }
}

/// In a real browser, on a desk and on a telephone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_of_a_report_fits_a_desk_and_a_telephone() {
    if !antiphon_skip::has_program("chromium", "chromium") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("ladder.html");
    let report = full_report();
    std::fs::write(&file, html::compared(&report, Some(&report))).expect("written");
    let mut page = Page::open(&folder.path().join("no-microphone.wav")).await;
    page.ask("Page.navigate", json!({ "url": format!("file://{}", file.display()) })).await;
    page.until("document.querySelectorAll('figure svg').length >= 8", "document.title").await;
    for (width, scheme) in [(1280, "light"), (390, "dark")] {
        page.resize(width, 844).await;
        let scheme = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        page.ask("Emulation.setEmulatedMedia", scheme).await;
        let wide = page.value("document.documentElement.scrollWidth").await;
        assert!(wide.as_u64().is_some_and(|wide| wide <= u64::from(width)), "{wide} at {width}");
        // What is wider scrolls in a box of its own, which begins and ends within the window.
        let out = "[...document.querySelectorAll('main > *, figure, table, svg')].filter(e => { \
            const r = e.getBoundingClientRect(); return r.left < -1 || r.right > innerWidth + 1; \
            }).map(e => e.tagName + ' ' + e.textContent.slice(0, 40))";
        assert_eq!(page.value(out).await, json!([]), "at {width}");
        let small = "[...document.querySelectorAll('svg text')].filter(e => { const svg = e.ownerSVGElement; \
            const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width; \
            return parseFloat(getComputedStyle(e).fontSize) * scale < 9; }).map(e => e.textContent).slice(0, 5)";
        assert_eq!(page.value(small).await, json!([]), "too small to read at {width}");
    }
    for words in [
        "refused: 2 full, 12 overloaded",
        "Where first audio goes",
        "gateway: vocoder",
        "2 GPUs",
        "Beside published systems",
    ] {
        let there = page.value(&format!("document.body.textContent.includes({words:?})")).await;
        assert_eq!(there, json!(true), "{words}");
    }
    assert!(page.errors.is_empty(), "{:?}", page.errors);
}

/// A voice that says the same for everything, and takes the same time for it.
struct Clockwork {
    caps: Caps,
    takes: Duration,
    free: Instant,
}

impl Clockwork {
    fn new(takes: Duration) -> Self {
        let limits = EngineLimits { parks: false, ..EngineLimits::of_one_stage(1_000, 1) };
        let caps = Caps { name: "clockwork", device: "none".into(), limits };
        Self { caps, takes, free: now() }
    }
}

impl Synthesizer for Clockwork {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn voices(&self) -> Vec<VoiceInfo> {
        vec![VoiceInfo { name: "clockwork".into(), languages: Vec::new(), starts_after: None }]
    }

    fn open(&mut self, _: Slot, _: &Utterance) -> Result<Stages, SynthError> {
        Ok(Stages::NONE.with(Stage::Vocode))
    }

    fn run(&mut self, step: &Step, out: &mut Vec<Progress>) -> Result<(), SynthError> {
        // A wake-up that came late is not paid for by those that follow at once.
        let lateness = now().saturating_duration_since(self.free);
        let begin = if lateness < self.takes { self.free } else { now() };
        self.free = begin + self.takes;
        while let Some(left) = self.free.checked_duration_since(now()).filter(|left| !left.is_zero()) {
            std::thread::park_timeout(left);
        }
        let pcm = synthetic::tone(antiphon::audio::RATE, 300.0, 1.0).pcm;
        let spoken = |slot: &Slot| {
            let outcome = Outcome { decoded: pcm.len() as u64, done: true, ..Outcome::ready(*slot, Stages::NONE) };
            Progress::new(outcome, pcm.clone())
        };
        out.extend(step.slots.iter().map(spoken));
        Ok(())
    }

    fn close(&mut self, _: Slot) {}

    fn warm_up(&mut self) -> Result<Seeds, SynthError> {
        Ok(PerStage::new([Duration::ZERO, Duration::ZERO, Duration::ZERO, self.takes]).into())
    }
}
