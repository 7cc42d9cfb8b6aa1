//! The load generator's prediction against the scheduler itself: calls on simulated devices, light levels, what the
//! gateway would tell of itself, and the knee that comes of it.
//!
//! `PREDICT=all cargo test --test sim -- --nocapture the_knee_is_where` runs every set-up, `PREDICT="one H100"` one of them. The
//! first two and that of two H200 hold; for the others see `tests/bench/README.md`.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use antiphon::sched::by_suitability;
use antiphon::turn::Class;
use antiphon_loadgen::predict;
use antiphon_loadgen::process::Host;
use antiphon_loadgen::report::{GatewayMetrics, Level, Report};
use antiphon_loadgen::stats::Summary;
use serde_json::json;

use super::engine::{Costs, Engine};
use super::policy::Kind;
use super::rng::Rng;
use super::world::{Event, World, quantile, zero};

/// Tokens a second.
const TOKENS: f64 = 25.0;
/// Between the end of a turn and the next: until the end is heard, and a pause.
const PAUSE: (f64, f64) = (1.0, 1.4);
/// After the callers are all there.
const MEASURED: f64 = 6.0;
/// How often callers look whether their turn is over.
const TICK: Duration = Duration::from_millis(5);

struct SetUp {
    name: &'static str,
    costs: Costs,
    devices: usize,
    /// Turns arrive as a Poisson process, as many as so many callers would have.
    open: bool,
    seconds: f64,
}

/// What one level of `calls` measures.
fn level(set_up: &SetUp, calls: u32) -> Level {
    let mut worlds: Vec<World> = (0..set_up.devices)
        .map(|n| World::new(Engine::new(set_up.costs.clone(), 1 + n as u64), Kind::ours().build(&set_up.costs)))
        .collect();
    let cycle = set_up.seconds + f64::midpoint(PAUSE.0, PAUSE.1);
    let from = Duration::from_secs_f64(cycle);
    let until = from + Duration::from_secs_f64(MEASURED);
    worlds.iter_mut().for_each(|world| world.measure_from = zero() + from);
    let mut rng = Rng::new(u64::from(calls));
    let mut due: BinaryHeap<Reverse<(Instant, u64)>> = BinaryHeap::new();
    if set_up.open {
        let mut at = zero();
        let mut call = 0;
        while at < zero() + until {
            at += rng.gap(f64::from(calls) / cycle);
            call += 1;
            due.push(Reverse((at, call)));
        }
    } else {
        let begins = |call: u32| zero() + from.mul_f64(f64::from(call) / f64::from(calls));
        due.extend((0..calls).map(|call| Reverse((begins(call), u64::from(call)))));
    }
    let mut last = std::collections::HashMap::new();
    let (mut said, mut turns) = (0.0, 0u32);
    let holding = |worlds: &[World], now| worlds.iter().map(|world| world.load(now).holding).sum::<f64>();
    let mut held_before = None;
    let mut now = Duration::ZERO;
    while now < until {
        now += TICK;
        while let Some(Reverse((at, call))) = due.peek().copied().filter(|Reverse((at, _))| *at < zero() + now) {
            due.pop();
            let loads = worlds.iter().enumerate().map(|(device, world)| (device, world.load(at))).collect();
            let device = by_suitability(Class::Live, last.get(&call).copied(), loads)[0];
            last.insert(call, device);
            let tokens = (set_up.seconds * TOKENS * (0.75 + 0.5 * rng.unit())).round() as u32;
            if at >= zero() + from {
                (said, turns) = (said + f64::from(tokens) / TOKENS, turns + 1);
            }
            let tokens = if set_up.seconds > 6.0 { vec![tokens / 2, tokens - tokens / 2] } else { vec![tokens] };
            worlds[device].at(at - zero(), Event::Turn { stream: call, class: Class::Live, tenant: "", tokens });
        }
        worlds.iter_mut().for_each(|world| world.run(now));
        for (call, heard) in worlds.iter_mut().flat_map(|world| std::mem::take(&mut world.over)) {
            if !set_up.open {
                let pause = PAUSE.0 + (PAUSE.1 - PAUSE.0) * rng.unit();
                due.push(Reverse((heard + Duration::from_secs_f64(pause), call)));
            }
        }
        if now >= from && held_before.is_none() {
            held_before = Some(holding(&worlds, zero() + now));
        }
    }
    let mut first: Vec<Duration> = worlds.iter().flat_map(|world| world.report.first_audio.clone()).collect();
    first.sort();
    let seconds = |q| quantile(&first, q).as_secs_f64();
    let of = |told: fn(antiphon::sched::Load) -> f64| {
        Some(worlds.iter().map(|world| told(world.load(zero() + until))).sum::<f64>())
    };
    let stage = |n: usize| worlds.iter().map(|world| world.report.widths[n].0).sum::<f64>();
    let mut level = Level {
        level: calls,
        mode: if set_up.open { "open" } else { "closed" }.into(),
        seconds: MEASURED,
        offered: set_up.open.then_some(f64::from(calls) / cycle),
        turns_per_call: 1.0,
        turns: first.len() as u64,
        first_audio: Summary { p50: seconds(0.5), p95: seconds(0.95), ..Summary::default() },
        rtf: Summary { p95: 1.0, ..Summary::default() },
        speech: Summary { mean: said / f64::from(turns.max(1)), ..Summary::default() },
        stalled_turns: worlds.iter().map(|world| world.report.underruns.len() as u64).sum(),
        metrics: GatewayMetrics {
            stage_seconds: [("decode".to_owned(), stage(1)), ("flow".to_owned(), stage(2))].into(),
            holding_seconds: Some(holding(&worlds, zero() + until) - held_before.unwrap_or(0.0)),
            sustainable_streams: of(|load| load.sustainable),
            memory_streams: of(|load| load.memory_streams),
            ..GatewayMetrics::default()
        },
        ..Level::default()
    };
    let refused: u32 = worlds.iter().map(|world| world.report.refused).sum();
    if refused > 0 {
        level.failures.insert("refused".into(), u64::from(refused));
    }
    println!(
        "  {calls:>5} calls: {} turns, {:.1} audio-s/s, p95 {:.0} ms, {} stalls, {refused} refused; told: {:.0} streams, memory \
         for {:.0}",
        level.turns,
        said / MEASURED,
        level.first_audio.p95 * 1e3,
        level.stalled_turns,
        level.metrics.sustainable_streams.unwrap_or(0.0),
        level.metrics.memory_streams.unwrap_or(0.0),
    );
    level
}

/// What is predicted from two light levels.
fn predicted(set_up: &SetUp) -> (Report, predict::Prediction) {
    let capacity = set_up.costs.slots - 1;
    let devices = (0..set_up.devices).map(|_| json!({ "state": "ready", "capacity": capacity })).collect();
    let levels = [48, 100].map(|calls| level(set_up, calls * set_up.devices as u32)).into();
    let host = Host { cores: 64, ..Host::default() };
    let report = Report { host, levels, devices, ..Report::default() };
    let predicted = predict::predict(&report).expect("levels and a device");
    println!("{}: {:.0} calls, {:?}", set_up.name, predicted.capacity, predicted.bounds);
    (report, predicted)
}

fn set_ups() -> Vec<SetUp> {
    let (h200, h100) = (Costs::named("h200"), Costs::named("h100"));
    // First hops of ten tokens, and of twenty-five.
    let two_voices = Costs { other_first: Some(25), ..h200.clone() };
    let set_up =
        |name, costs: &Costs, devices, open, seconds| SetUp { name, costs: costs.clone(), devices, open, seconds };
    vec![
        set_up("one H200", &h200, 1, false, 3.0),
        set_up("one H200, open loop", &h200, 1, true, 3.0),
        set_up("one H100", &h100, 1, false, 3.0),
        set_up("two voices", &two_voices, 1, false, 3.0),
        set_up("turns of 2 s", &h200, 1, false, 2.0),
        set_up("turns of 12 s", &h200, 1, false, 12.0),
        set_up("two H200", &h200, 2, false, 3.0),
        set_up("four H200", &h200, 4, false, 3.0),
    ]
}

/// A level a tenth below what was predicted passes and one a tenth above it breaks: the knee lies between them. The
/// prediction is made before either is measured.
#[test]
#[expect(clippy::disallowed_methods, reason = "whoever runs it says how many set-ups he wants")]
fn the_knee_is_where_light_levels_predict_it() {
    let wanted = std::env::var("PREDICT").unwrap_or_default();
    for (n, set_up) in set_ups().into_iter().enumerate() {
        let chosen = if wanted.is_empty() { n == 0 } else { wanted == "all" || set_up.name == wanted };
        if !chosen {
            continue;
        }
        let (report, predicted) = predicted(&set_up);
        let at = |share: f64| level(&set_up, (predicted.capacity * share).round() as u32);
        let (below, above) = (report.limits.broken(&at(0.9)), report.limits.broken(&at(1.1)));
        println!(
            "{}: predicted {:.0}; a tenth below: {below:?}; a tenth above: {above:?}",
            set_up.name, predicted.capacity
        );
        assert!(below.is_empty() && !above.is_empty(), "{}: {below:?} {above:?}", set_up.name);
    }
}
