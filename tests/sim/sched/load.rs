//! What callers hear and what batch gets, at rising load.

use std::time::Duration;

use antiphon::sched::Config;
use antiphon::turn::Class;
use serde::Deserialize;

use super::engine::{Costs, Engine};
use super::policy::Kind;
use super::rng::Rng;
use super::world::{Event, Report, World, zero};

/// Tokens a second.
const TOKENS: f64 = 25.0;
const SEEDS: [u64; 3] = [1, 2, 3];
/// Learning and filling up; not measured.
const WARM: f64 = 5.0;
const MEASURED: f64 = 20.0;

#[derive(Deserialize)]
struct Scenarios {
    scenario: Vec<Scenario>,
}

#[derive(Deserialize)]
struct Scenario {
    load: f64,
}

fn scenarios() -> Vec<Scenario> {
    toml::from_str::<Scenarios>(include_str!("scenarios.toml")).expect("scenarios.toml").scenario
}

/// Audio-seconds per second that the engine makes with nothing but batch to do, in the widest steps it has.
fn capacity(costs: &Costs) -> f64 {
    let report = runs(costs, Kind::Fifo, 0.0, 4 * costs.slots as usize, &SEEDS[..1]);
    audio(&report, report.batch_samples)
}

/// Audio-seconds per second.
fn audio(report: &Report, samples: u64) -> f64 {
    samples as f64 / f64::from(antiphon::audio::RATE) / report.seconds
}

/// `rate` audio-seconds of live turns arrive each second, while `backlog` batch utterances wait.
fn run(costs: &Costs, kind: Kind, rate: f64, backlog: usize, seed: u64) -> Report {
    let config = Config::default();
    let mut world = World::new(Engine::new(costs.clone(), seed), kind.build(&config, costs.limits()));
    world.backlog = backlog;
    world.measure_from = zero() + Duration::from_secs_f64(WARM);
    let mut rng = Rng::new(seed);
    let (mut at, mut line) = (Duration::ZERO, 0);
    let end = Duration::from_secs_f64(WARM + MEASURED);
    // Two utterances of 95 tokens on average.
    let turn = 2.0 * 95.0 / TOKENS;
    loop {
        at += rng.gap(rate.max(1e-9) / turn);
        if at > end {
            break;
        }
        line += 1;
        let tokens = (0..rng.range(1, 3)).map(|_| rng.range(40, 150) as u32).collect();
        world.at(at, Event::Turn { line, class: Class::Live, tenant: "", tokens });
    }
    world.run(end);
    world.report
}

/// Runs that differ in nothing but their random numbers, together.
fn runs(costs: &Costs, kind: Kind, rate: f64, backlog: usize, seeds: &[u64]) -> Report {
    let mut all = Report::default();
    for seed in seeds {
        let one = run(costs, kind, rate, backlog, *seed);
        all.seconds += MEASURED;
        all.first_audio.extend(one.first_audio);
        all.underruns.extend(one.underruns);
        all.refused += one.refused;
        all.turns += one.turns;
        all.live_samples += one.live_samples;
        all.batch_samples += one.batch_samples;
        all.live_busy += one.live_busy;
        all.busy += one.busy;
        all.displaced += one.displaced;
        all.most_behind_batch = all.most_behind_batch.max(one.most_behind_batch);
        for (sum, (seconds, slots)) in all.widths.iter_mut().zip(one.widths) {
            sum.0 += seconds;
            sum.1 += slots;
        }
    }
    all
}

fn row(name: &str, load: f64, report: &Report) {
    let ms = |q: f64| report.quantile(q).as_secs_f64() * 1e3;
    let width = report.widths.map(|(seconds, slots)| slots / seconds.max(1e-9));
    println!(
        "{:>5.0} % {name:<16} first audio p50 {:>8.1} p95 {:>8.1} p99 {:>8.1} ms  underruns {:>5}  refused {:>4} of {:>5}  \
         live {:>6.1} batch {:>6.1} audio-s/s  busy {:.2} live {:.2}  widths {:.0?}  displaced {}",
        load * 100.0,
        ms(0.5),
        ms(0.95),
        ms(0.99),
        report.underruns.len(),
        report.refused,
        report.turns,
        audio(report, report.live_samples),
        audio(report, report.batch_samples),
        report.busy / report.seconds,
        report.live_busy / report.seconds,
        width,
        report.displaced,
    );
}

#[test]
fn callers_do_not_hear_batch_and_batch_gets_the_rest() {
    let costs = Costs::named("h200");
    let full = capacity(&costs);
    // Half as much again as batch could make is more than live work can get, with its narrow first steps.
    let most = runs(&costs, Kind::Ours, 1.5 * full, 0, &SEEDS[..1]);
    let live = audio(&most, most.live_samples);
    println!("capacity: batch alone {full:.1}, live alone {live:.1} audio-s/s\n");
    for Scenario { load } in scenarios() {
        let rate = live * load;
        let backlog = 2 * costs.slots as usize;
        let fifo = runs(&costs, Kind::Fifo, rate, backlog, &SEEDS[..1]);
        let shortest = runs(&costs, Kind::ShortestFirst, rate, backlog, &SEEDS[..1]);
        let alone = runs(&costs, Kind::Ours, rate, 0, &SEEDS);
        let ours = runs(&costs, Kind::Ours, rate, backlog, &SEEDS);
        row("fifo + batch", load, &fifo);
        row("shortest + batch", load, &shortest);
        row("ours", load, &alone);
        row("ours + batch", load, &ours);
        // What batch could have had: the device time that the live rows of each step would not have taken alone.
        let left = (1.0 - ours.live_busy / ours.seconds) * full;
        let batch = audio(&ours, ours.batch_samples);
        let blur = ours.quantile(0.95).as_secs_f64() / alone.quantile(0.95).as_secs_f64();
        println!(
            "       live work leaves {left:.1} audio-s/s, batch got {batch:.1}; p95 with batch is {blur:.2} of that without\n"
        );
        assert!(ours.most_behind_batch <= 1, "a first audio waited for {} steps of batch", ours.most_behind_batch);
        assert!(batch >= 0.9 * left - 0.01 * full, "batch got {batch} of {left} audio-s/s");
        if load <= 0.8 {
            assert!(
                fifo.quantile(0.95) >= 20 * ours.quantile(0.95),
                "not 20 times better than first come first served"
            );
            assert_eq!((ours.underruns.len(), alone.underruns.len()), (0, 0), "underruns");
            assert!(blur <= 1.15, "batch is heard");
        }
        // Whatever the load: what was accepted is on time, or next to it.
        assert!(ours.quantile(0.99) <= 2 * Duration::from_millis(Config::default().first_audio_target_ms.into()));
        assert!(ours.underruns.len() * 100 <= ours.first_audio.len(), "{} underruns", ours.underruns.len());
    }
}
