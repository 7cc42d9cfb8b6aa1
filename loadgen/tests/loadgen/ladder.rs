//! Loads and the ladder against a test gateway whose delays, gaps and losses are known.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::{Reply, Whip};
use antiphon_loadgen::call::Leg;
use antiphon_loadgen::corpus;
use antiphon_loadgen::exchange::{Exchange, Interjection, Plan, Trigger, Turn};
use antiphon_loadgen::ladder::{Options, climb};
use antiphon_loadgen::listen::StallCause;
use antiphon_loadgen::load::{self, Arrivals, Behaviour, Load};
use antiphon_loadgen::report::{Limits, Report};
use antiphon_loadgen::{rtc, sip, synthetic};

fn plan(server: &Whip) -> Plan {
    Plan {
        sip_target: None,
        sip: sip::Config::default(),
        webrtc: Some(rtc::Config { opus_rate: 16_000, ..rtc::Config::new(&server.url) }),
        gateway: None,
        trigger: Trigger::Http,
        voices: Vec::new(),
        references: Arc::default(),
        recognizer: None,
        buffer: Duration::from_millis(60),
        patience: Duration::from_secs(5),
    }
}

async fn turns(server: &Whip, change: impl FnOnce(&mut Plan), texts: &[&str]) -> Vec<Turn> {
    let mut plan = plan(server);
    change(&mut plan);
    let (mut exchange, _) = Exchange::open(Arc::new(plan), Leg::Webrtc).await.unwrap();
    let mut out = Vec::new();
    for text in texts {
        out.push(exchange.turn(text, None).await);
    }
    exchange.close().await;
    out
}

/// Within one frame, or 2 %, and what the machine added: how late packets of `turn` came by their RTP timestamps.
fn near(turn: &Turn, measured: Duration, known: Duration, what: &str) {
    let off = measured.abs_diff(known);
    let most = Duration::from_millis(20).max(known.mul_f64(0.02)) + late(turn);
    assert!(off <= most, "{what}: {measured:?}, not {known:?} ({:?} late)", late(turn));
}

/// The first sound of `turn` is told as what was due at `start` and took `way`.
fn heard_when_due(turn: &Turn, start: Instant, way: Duration) {
    let heard = turn.sent + turn.first_audio.unwrap();
    let after = heard.checked_duration_since(start + way).expect("nothing is heard before it was sent");
    near(turn, after, Duration::ZERO, "first audio");
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

#[tokio::test(flavor = "multi_thread")]
async fn known_delays_are_measured_within_a_frame() {
    // A tone is audible from its first sample, so that the delay is the whole of the first audio.
    let server = Whip::start(|_, text| {
        let delay: u64 = text.parse().unwrap();
        Reply::plain(ms(delay), synthetic::tone(24_000, 300.0, 1.0))
    })
    .await;
    let heard = turns(&server, |_| {}, &["0", "120", "700"]).await;
    let starts = server.starts.lock().unwrap().clone();
    for ((turn, delay), start) in heard.iter().zip([0, 120, 700]).zip(starts) {
        assert_eq!(turn.fault, None);
        assert!(turn.first_audio >= Some(ms(delay)), "{:?}", turn.first_audio);
        heard_when_due(turn, start, Duration::ZERO);
        near(turn, turn.speech, ms(1_000), "speech");
        near(turn, turn.speech.mul_f64(turn.rtf), ms(1_000), "listening");
        // What is later than the listener's buffer is a stall, and the machine's.
        assert!(turn.stalls.is_empty() || late(turn) > ms(60), "{:?}, {:?} late", turn.stalls, late(turn));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn known_gaps_and_losses_are_found_as_long_as_they_were() {
    let server = Whip::start(|_, text| {
        let mut reply = Reply::plain(ms(50), synthetic::tone(24_000, 300.0, 2.0));
        match text {
            "gap" => reply.pause = vec![(30, ms(250)), (70, ms(120))],
            "loss" => reply.drop = vec![20, 21, 50],
            _ => unreachable!(),
        }
        reply
    })
    .await;
    let heard = turns(&server, |_| {}, &["gap", "loss"]).await;
    let gap = &heard[0];
    let gaps: Vec<Duration> = gap.stalls.iter().filter(|s| s.cause == StallCause::Paused).map(|s| s.length).collect();
    assert_eq!(gaps.len(), 2, "{:?}", gap.stalls);
    near(gap, gaps[0], ms(250), "first gap");
    near(gap, gaps[1], ms(120), "second gap");
    near(gap, gap.speech, ms(2_000), "speech without gaps");
    near(gap, gap.speech.mul_f64(gap.rtf), ms(2_370), "listening");
    let loss = &heard[1];
    assert_eq!((loss.packets.0, loss.packets.1), (3, 97));
    assert!(loss.stalls.is_empty() || late(loss) > ms(60), "loss is no stall of the gateway: {:?}", loss.stalls);
    assert!(loss.mos < gap.mos);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_sends_what_it_should_not_is_found_out() {
    let words = synthetic::babble(40, 24_000, 2.0);
    let said = words.clone();
    let server = Whip::start(move |_, text| {
        let clip = match text {
            "right" => said.clone(),
            "silence" => antiphon_loadgen::heard::Clip { rate: 24_000, pcm: vec![0.0; 48_000] },
            "noise" => synthetic::noise(1, 24_000, 2.0),
            "other" => synthetic::babble(41, 24_000, 2.0),
            "cut" => antiphon_loadgen::heard::Clip { rate: 24_000, pcm: said.pcm[..18_000].to_vec() },
            _ => unreachable!(),
        };
        Reply::plain(ms(50), clip)
    })
    .await;
    let texts = ["right", "silence", "noise", "other", "cut"];
    let references = texts.iter().map(|t| ((*t).to_owned(), words.clone())).collect();
    let change = |plan: &mut Plan| {
        plan.references = Arc::new(references);
        plan.patience = ms(2_500);
    };
    let heard = turns(&server, change, &texts).await;
    let faults: Vec<Option<&str>> = heard.iter().map(|t| t.fault.as_deref()).collect();
    assert_eq!(faults, [None, Some("silence"), Some("noise"), Some("wrong_audio"), Some("cut_short")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_does_not_stop_is_found_out() {
    // The test gateway has no ears: it speaks on.
    let server = Whip::start(|_, _| Reply::plain(ms(20), synthetic::tone(24_000, 300.0, 7.0))).await;
    let (mut exchange, _) = Exchange::open(Arc::new(plan(&server)), Leg::Webrtc).await.unwrap();
    let speech = Some(Arc::new(synthetic::babble(3, 24_000, 0.5)));
    let interjection = Interjection { after: ms(300), speech, ..Interjection::default() };
    let turn = exchange.turn("x", Some(&interjection)).await;
    assert_eq!(turn.fault.as_deref(), Some("not_interrupted"));
    exchange.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interruption_is_measured_within_a_frame() {
    for delay in [60, 350] {
        let server = Whip::start(move |_, _| Reply {
            obeys: Some(ms(delay)),
            ..Reply::plain(ms(40), synthetic::tone(24_000, 300.0, 6.0))
        })
        .await;
        let (mut exchange, _) = Exchange::open(Arc::new(plan(&server)), Leg::Webrtc).await.unwrap();
        // A tone is audible from its first sample, and so heard when it was begun.
        let speech = Some(Arc::new(synthetic::tone(24_000, 500.0, 0.4)));
        let interjection = Interjection { after: ms(700), speech, ..Interjection::default() };
        let turn = exchange.turn("x", Some(&interjection)).await;
        assert_eq!(turn.fault, None);
        let stop = server.stops.lock().unwrap()[0];
        let barge_in = turn.barge_in.expect("an interruption");
        near(&turn, barge_in.silence, stop.ended - stop.heard, "silence after barging in");
        near(&turn, barge_in.heard, stop.sent, "what was heard");
        assert_eq!(barge_in.reported, Some(stop.sent), "the gateway's own report is read");
        exchange.close().await;
    }
}

fn options(levels: Vec<u32>) -> Options {
    Options {
        levels,
        most: 4,
        duration: Duration::from_secs(3),
        open_loop: false,
        rate: None,
        turns: 1..=1,
        legs: vec![(Leg::Webrtc, 1.0)],
        texts: corpus::select(&["en".to_owned()], &[corpus::Length::Short]),
        think: (0.1, 0.1),
        behaviour: Behaviour::default(),
        limits: Limits::default(),
        seed: 1,
        sampled: 1,
        find_knee: true,
        stop: Default::default(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ladder_ends_with_a_report() {
    // Made before it is asked for: in a build without optimisation that takes longer than the delay may be off.
    let said = synthetic::babble(5, 24_000, 0.8);
    let server = Whip::start(move |_, _| Reply::plain(ms(100), said.clone())).await;
    let mut options = options(vec![1, 2]);
    // Only a failure breaks a level: what is late on a busy machine is not the gateway's.
    options.limits = Limits { first_audio_p95: 30.0, rtf_p95: 30.0, stalled_turns: 1.0, failures: 0.0 };
    let mut report = Report::default();
    let mut seen = Vec::new();
    climb(Arc::new(plan(&server)), &options, &mut None, None, &mut report, |level, _, done| {
        if done.is_some() {
            seen.push(level);
        }
    })
    .await;
    assert_eq!(report.ended_early, None);
    assert_eq!(seen, [1, 2, 4]);
    for level in &report.levels {
        assert!(level.failures.is_empty(), "{:?}", level.failures);
        assert!(level.turns >= 1 && level.generator.is_some());
        // How exactly is asked of single turns above; a busy machine is late, and never early.
        assert!(level.first_audio.p50 >= 0.1, "{:?}", level.first_audio);
    }
    let one = report.at(1).unwrap();
    let four = report.at(4).unwrap();
    assert!(four.audio_s_per_s > one.audio_s_per_s * 2.5, "{} {}", four.audio_s_per_s, one.audio_s_per_s);
    assert!(report.waterfall.is_some() && report.knee.unwrap().level == 4);
    assert!(antiphon_loadgen::html::page(&report).contains("not reached: 4 calls pass"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_loop_counts_what_arrives() {
    let server = Whip::start(|_, _| Reply::plain(ms(40), synthetic::babble(5, 24_000, 0.4))).await;
    let arrivals = [0.1, 0.2, 0.3, 0.9].map(Duration::from_secs_f64).to_vec();
    let shared = options(vec![]);
    let load = Load {
        says: Vec::new(),
        arrivals: Arrivals::Trace(arrivals),
        duration: Duration::from_secs(2),
        warm_up: Duration::ZERO,
        cycles: Default::default(),
        legs: shared.legs,
        turns: Some(1..=1),
        think: (0.0, 0.0),
        texts: shared.texts,
        behaviour: Behaviour::default(),
        seed: 1,
        most: 3,
        sampled: 1,
        stop: Default::default(),
    };
    let (level, kept) = load::run(Arc::new(plan(&server)), load, None, |_| {}).await;
    let limited = level.failures.get("generator_limit").copied().unwrap_or(0);
    assert_eq!(level.calls + limited, 4, "{:?}", level.failures);
    assert_eq!(level.turns, level.calls);
    assert_eq!(kept.len() as u64, level.turns);
    assert_eq!(level.mode, "open");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_dies_in_mid_run_is_reported() {
    let server = Whip::start(|_, _| Reply::plain(ms(50), synthetic::babble(5, 24_000, 0.5))).await;
    let mut plan = plan(&server);
    plan.gateway = Some(antiphon_loadgen::gateway::Gateway::at(&server.url, None).unwrap());
    let mut report = Report::default();
    let mut server = Some(server);
    climb(Arc::new(plan), &options(vec![1, 2]), &mut None, None, &mut report, |_, progress, _| {
        if progress.turns > 0 {
            // Its listener closes.
            drop(server.take());
        }
    })
    .await;
    let why = report.ended_early.clone().expect("an early end");
    assert!(why.contains("cannot be reached") && why.contains("level 1"), "{why}");
    assert!(antiphon_loadgen::html::page(&report).contains("Ended early"));
}

/// A telephone that is called and speaks for two seconds `after` it was answered: what was heard of it, and when it
/// began.
async fn greeter(after: Duration, impairment: Option<antiphon_loadgen::relay::Impairment>) -> (Turn, Instant) {
    let called = sip::Caller::bind(sip::Config::default()).await.unwrap();
    let target = called.uri();
    let gateway = tokio::spawn(async move {
        let call = called.answer(Duration::from_secs(10)).await.unwrap();
        antiphon_loadgen::clock::sleep_until(call.setup().connected + after).await;
        let began = call.say(&synthetic::tone(8_000, 300.0, 2.0)).await.unwrap();
        assert!(call.ended(Duration::from_secs(20)).await.is_some());
        began
    });
    let config =
        sip::Config { codecs: vec![antiphon_loadgen::codec::Codec::Pcmu], impairment, ..sip::Config::default() };
    let plan = Plan {
        sip_target: Some(target),
        sip: config,
        webrtc: None,
        gateway: None,
        trigger: Trigger::Greeting,
        voices: Vec::new(),
        references: Arc::default(),
        recognizer: None,
        buffer: Duration::from_millis(60),
        patience: Duration::from_secs(5),
    };
    let (mut exchange, _) = Exchange::open(Arc::new(plan), Leg::Sip).await.unwrap();
    let turn = exchange.turn("", None).await;
    exchange.close().await;
    (turn, gateway.await.unwrap())
}

/// How late packets of `turn` came against the most punctual: what a busy machine adds to any of its instants.
fn late(turn: &Turn) -> Duration {
    turn.lateness.percentile(100.0)
}

/// That what [`greeter`] `began` to say was heard after the `way` it took, within a frame and what came late or was lost.
fn heard_when_begun(turn: &Turn, began: Instant, way: Duration) {
    let heard = turn.sent + turn.first_audio.unwrap();
    let after = heard.checked_duration_since(began + way).expect("nothing is heard before it has come");
    let lost = ms(2_000).saturating_sub(turn.speech);
    assert!(after <= ms(20) + late(turn) + lost, "{after:?}, {:?} late, {lost:?} lost", late(turn));
}

#[tokio::test(flavor = "multi_thread")]
async fn telephone_calls_are_measured_as_exactly_and_through_a_bad_network() {
    let (turn, began) = greeter(ms(300), None).await;
    assert_eq!((turn.fault.as_deref(), turn.packets.0), (None, 0));
    assert!(turn.first_audio >= Some(ms(290)), "{:?}", turn.first_audio);
    heard_when_begun(&turn, began, Duration::ZERO);
    assert!(turn.speech.abs_diff(ms(2_000)) <= ms(20) + late(&turn), "{:?}, {:?} late", turn.speech, late(&turn));

    let bad = antiphon_loadgen::relay::Impairment { loss: 0.1, delay_ms: 150.0, ..Default::default() };
    let (turn, began) = greeter(ms(300), Some(bad)).await;
    assert!(turn.first_audio >= Some(ms(435)), "{:?}", turn.first_audio);
    heard_when_begun(&turn, began, ms(150));
    let share = turn.packets.0 as f64 / (turn.packets.0 + turn.packets.1) as f64;
    assert!((0.02..0.25).contains(&share), "{share}");
    assert!(turn.mos < 4.2, "{}", turn.mos);
}

#[tokio::test(flavor = "multi_thread")]
async fn browsers_pass_the_bad_network_too() {
    let server = Whip::start(|_, _| Reply::plain(ms(50), synthetic::tone(24_000, 300.0, 1.0))).await;
    let bad = antiphon_loadgen::relay::Impairment { delay_ms: 80.0, ..Default::default() };
    let heard = turns(&server, |plan| plan.webrtc.as_mut().unwrap().impairment = Some(bad), &["x"]).await;
    assert_eq!(heard[0].fault, None);
    // There and back again.
    assert!(heard[0].first_audio >= Some(ms(50 + 160)), "{:?}", heard[0].first_audio);
    let start = server.starts.lock().unwrap()[0];
    heard_when_due(&heard[0], start, ms(80));
}
