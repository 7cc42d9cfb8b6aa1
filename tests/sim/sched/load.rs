//! What callers hear and what batch gets, at rising load.

use std::time::Duration;

use antiphon::audio::duration_of;
use antiphon::sched::Config;
use antiphon::turn::Class;
use serde::Deserialize;

use super::engine::{Costs, Engine, TOKEN, TOKEN_BYTES};
use super::policy::Kind;
use super::rng::Rng;
use super::world::{Event, Report, World, zero};

/// Tokens a second.
const TOKENS: f64 = 25.0;
const SEEDS: [u64; 3] = [1, 2, 3];
const MANY_SEEDS: [u64; 8] = [1, 2, 3, 4, 5, 6, 7, 8];
/// Learning and filling up; not measured.
const WARM: f64 = 5.0;
const MEASURED: f64 = 20.0;
/// Audio-seconds a second that live turns get of one H200 that has nothing else to do, and that batch gets.
const BUSIEST: f64 = 372.7;
const ALL_BATCH: f64 = 570.0;

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
    let boundless = Costs { memory: 0, ..costs.clone() };
    let report = runs(&boundless, &Kind::Fifo, 0.0, 4 * costs.slots as usize, &SEEDS[..1]);
    audio(&report, report.batch_samples)
}

/// Audio-seconds per second.
fn audio(report: &Report, samples: u64) -> f64 {
    samples as f64 / f64::from(antiphon::audio::RATE) / report.seconds
}

/// What arrives: Poisson arrivals of live turns, so many a second, and so many batch utterances that always wait.
struct Traffic<'a> {
    turns: f64,
    /// Of a turn's utterances.
    tokens: &'a dyn Fn(&mut Rng) -> Vec<u32>,
    backlog: usize,
    /// Of each utterance of the backlog.
    backlog_tokens: u32,
}

fn run(costs: &Costs, kind: &Kind, traffic: &Traffic<'_>, seed: u64, measured: f64) -> Report {
    let mut world = World::new(Engine::new(costs.clone(), seed), kind.build(costs));
    world.backlog = traffic.backlog;
    world.backlog_tokens = traffic.backlog_tokens;
    world.measure_from = zero() + Duration::from_secs_f64(WARM);
    let mut rng = Rng::new(seed);
    let (mut at, mut stream) = (Duration::ZERO, 0);
    let end = Duration::from_secs_f64(WARM + measured);
    loop {
        at += rng.gap(traffic.turns.max(1e-9));
        if at > end {
            break;
        }
        stream += 1;
        let tokens = (traffic.tokens)(&mut rng);
        world.at(at, Event::Turn { stream, class: Class::Live, tenant: "", tokens });
    }
    world.run(end);
    world.report
}

/// `rate` audio-seconds of live turns arrive each second, while `backlog` batch utterances wait.
fn runs(costs: &Costs, kind: &Kind, rate: f64, backlog: usize, seeds: &[u64]) -> Report {
    together(seeds, |seed| run(costs, kind, &turns(rate, backlog), seed, MEASURED))
}

/// Turns of one to three utterances.
fn turns(rate: f64, backlog: usize) -> Traffic<'static> {
    let tokens = &|rng: &mut Rng| (0..rng.range(1, 3)).map(|_| rng.range(40, 150) as u32).collect();
    // Two utterances of 95 tokens on average.
    let turn = 2.0 * 95.0 / TOKENS;
    Traffic { turns: rate / turn, tokens, backlog, backlog_tokens: 125 }
}

/// Turns of one utterance of so many tokens, `turns` a second, with a backlog of 8 s each.
fn long_runs(costs: &Costs, config: &Config, tokens: u32, turns: f64, backlog: usize, seeds: &[u64]) -> Report {
    let traffic = Traffic { turns, tokens: &|_| vec![tokens], backlog, backlog_tokens: 200 };
    together(seeds, |seed| run(costs, &Kind::Ours(config.clone()), &traffic, seed, MEASURED))
}

/// Runs that differ in nothing but their random numbers, together.
fn together(seeds: &[u64], run: impl Fn(u64) -> Report) -> Report {
    together_for(MEASURED, seeds, run)
}

/// The same of runs that measure so many seconds.
fn together_for(measured: f64, seeds: &[u64], run: impl Fn(u64) -> Report) -> Report {
    let mut all = Report::default();
    for seed in seeds {
        let one = run(*seed);
        all.seconds += measured;
        all.first_audio.extend(one.first_audio);
        all.underruns.extend(one.underruns);
        all.refused += one.refused;
        all.turns += one.turns;
        all.live_samples += one.live_samples;
        all.batch_samples += one.batch_samples;
        all.live_busy += one.live_busy;
        all.busy += one.busy;
        all.displaced += one.displaced;
        all.restarted += one.restarted;
        all.most_behind_batch = all.most_behind_batch.max(one.most_behind_batch);
        for (sum, (seconds, slots)) in all.widths.iter_mut().zip(one.widths) {
            sum.0 += seconds;
            sum.1 += slots;
        }
        for (kind, (steps, seconds, slots)) in one.kinds {
            let sum = all.kinds.entry(kind).or_default();
            *sum = (sum.0 + steps, sum.1 + seconds, sum.2 + slots);
        }
    }
    all
}

fn header() -> String {
    format!(
        "{:>5} {:<18} {:>8} {:>8} {:>8} {:>6} {:>9} {:>7} {:>7} {:>7} {:>7} {:>9} {:<16}",
        "load",
        "policy",
        "p50 ms",
        "p95 ms",
        "p99 ms",
        "gaps",
        "refused",
        "live",
        "batch",
        "left",
        "nominal",
        "displaced",
        "widths"
    )
}

/// One line of the table. `left` is [`left`]; `nominal` the share of `full` that is not offered to live work.
fn row(name: &str, load: f64, report: &Report, full: f64, live: f64) -> String {
    let ms = |q: f64| report.quantile(q).as_secs_f64() * 1e3;
    let width = report.widths.map(|(seconds, slots)| (slots / seconds.max(1e-9)).round());
    let made = audio(report, report.live_samples);
    format!(
        "{:>3.0} % {name:<18} {:>8.1} {:>8.1} {:>8.1} {:>6} {:>9} {made:>7.1} {:>7.1} {:>7.1} {:>7.1} {:>9} {width:?}",
        load * 100.0,
        ms(0.5),
        ms(0.95),
        ms(0.99),
        report.underruns.len(),
        format!("{}/{}", report.refused, report.turns),
        audio(report, report.batch_samples),
        left(report, full),
        (1.0 - made / live).max(0.0) * full,
        report.displaced,
    )
}

/// What live work leaves to batch, in audio-seconds per second: what the engine makes with nothing but batch to do,
/// in the share of the device's time that live work did not use. A step with both is live work's for as long as it
/// would have taken without the batch rows, which pay only for what they add.
fn left(report: &Report, full: f64) -> f64 {
    (1.0 - report.live_busy / report.seconds) * full
}

#[test]
#[ignore = "a quarter of an hour; its row at 80 % is the test below"]
fn callers_do_not_hear_batch_and_batch_gets_the_rest() {
    let costs = Costs::named("h200");
    // Those that ours is compared with take memory to be enough.
    let boundless = Costs { memory: 0, ..costs.clone() };
    let full = capacity(&costs);
    // Half as much again as batch could make is more than live work can get, with its narrow first steps.
    let most = runs(&costs, &Kind::ours(), 1.5 * full, 0, &SEEDS[..1]);
    let live = audio(&most, most.live_samples);
    println!("capacity: batch alone {full:.1}, live alone {live:.1} audio-s/s\n\n{}", header());
    let backlog = 2 * costs.slots as usize;
    let mut verdicts = Vec::new();
    for Scenario { load } in scenarios() {
        let rate = live * load;
        let fifo = runs(&boundless, &Kind::Fifo, rate, backlog, &SEEDS[..1]);
        let shortest = runs(&boundless, &Kind::ShortestFirst, rate, backlog, &SEEDS[..1]);
        let alone = runs(&costs, &Kind::ours(), rate, 0, &SEEDS);
        let ours = runs(&costs, &Kind::ours(), rate, backlog, &SEEDS);
        // More for batch on a busy device is paid for it in first audio.
        let generous = Kind::Ours(Config { batch_ride: 3.0, ..Config::default() });
        let generous = runs(&costs, &generous, rate, backlog, &SEEDS);
        for (name, report) in [
            ("first come + batch", &fifo),
            ("shortest + batch", &shortest),
            ("ours", &alone),
            ("ours + batch", &ours),
            ("  batch_ride = 3", &generous),
        ] {
            println!("{}", row(name, load, report, full, live));
        }
        verdicts.push((load, fifo, alone, ours, generous));
    }
    println!();
    for (load, fifo, alone, ours, generous) in verdicts {
        let (left, batch) = (left(&ours, full), audio(&ours, ours.batch_samples));
        let blur = ours.quantile(0.95).as_secs_f64() / alone.quantile(0.95).as_secs_f64();
        let better = fifo.quantile(0.95).as_secs_f64() / ours.quantile(0.95).as_secs_f64();
        println!(
            "{:>4.0} %: live leaves {left:.1}, batch got {batch:.1} audio-s/s; p95 is {blur:.2} of that without batch, \
             {better:.0} times better than first come first served",
            load * 100.0
        );
        assert!(ours.most_behind_batch <= 1, "a first audio waited for {} steps of batch", ours.most_behind_batch);
        if load < 1.0 {
            assert!(batch >= 0.9 * left, "batch got {batch} of {left} audio-s/s at {load}");
            assert!(blur <= 1.15, "batch is heard: {blur} at {load}");
        }
        assert!(better >= 20.0, "only {better} times better than first come first served at {load}");
        // With leave to delay first audio, batch gets its share of all that is not offered to live work.
        let nominal = (1.0 - audio(&generous, generous.live_samples) / live).max(0.0) * full;
        let batch = audio(&generous, generous.batch_samples);
        if load <= 0.8 {
            assert!(batch >= 0.9 * nominal, "batch got {batch} of {nominal} audio-s/s at {load}");
            assert!(fifo.quantile(0.95) >= 20 * generous.quantile(0.95));
            assert!(generous.underruns.is_empty() && generous.refused == 0);

            assert_eq!((ours.underruns.len(), alone.underruns.len()), (0, 0), "underruns at {load}");
            assert_eq!((ours.refused, alone.refused), (0, 0), "refused at {load}");
        }
        // Whatever the load: what was accepted is on time, or next to it.
        assert!(ours.quantile(0.99) <= 2 * Duration::from_millis(Config::default().first_audio_target_ms.into()));
        assert!(ours.underruns.len() * 100 <= ours.first_audio.len(), "{} underruns", ours.underruns.len());
    }
}

/// The row of the table that matters most, small enough for every change: at 80 % of what live work can have, beside batch that
/// never ends, none is refused, nobody hears a gap, first audio is as without it, and batch has what is left.
#[test]
fn at_a_busy_hour_callers_do_not_hear_batch() {
    let costs = Costs::named("h200");
    let rate = 0.8 * BUSIEST;
    let measure = |backlog: usize| {
        let measured = 10.0;
        together_for(measured, &SEEDS, |seed| run(&costs, &Kind::ours(), &turns(rate, backlog), seed, measured))
    };
    let (alone, ours) = (measure(0), measure(2 * costs.slots as usize));
    let rows = [("ours", &alone), ("ours + batch", &ours)].map(|(name, r)| row(name, 0.8, r, ALL_BATCH, BUSIEST));
    println!("{}\n{}", header(), rows.join("\n"));
    let (left, batch) = (left(&ours, ALL_BATCH), audio(&ours, ours.batch_samples));
    let blur = ours.quantile(0.95).as_secs_f64() / alone.quantile(0.95).as_secs_f64();
    assert!(alone.first_audio.len() > 900 && ours.most_behind_batch <= 1, "waited for {}", ours.most_behind_batch);
    assert_eq!((ours.underruns.len(), alone.underruns.len()), (0, 0));
    assert_eq!((ours.refused, alone.refused), (0, 0));
    assert!(blur <= 1.15, "batch is heard: {blur}");
    assert!(batch >= 0.9 * left, "batch got {batch} of {left} audio-s/s");
}

/// Seen on the device: batch filled the memory, so that live streams were finished in a hurry instead of resting at their
/// lead limit, and streams counted as about to hear a gap by what chunks took together with batch. Batch had 201 of 490.
#[test]
fn batch_has_what_long_turns_leave_although_it_fills_the_memory() {
    let (costs, config) = (Costs::named("h200"), Config::default());
    // Few turns a second: the 95th percentile of three runs would be that of 17 turns.
    let measure = |turns, backlog| long_runs(&costs, &config, 200, turns, backlog, &MANY_SEEDS);
    let full = measure(0.0, 256);
    let full = audio(&full, full.batch_samples);
    for rate in [5.6, 8.0, 20.0] {
        let (alone, both) = (measure(rate, 0), measure(rate, 256));
        let (batch, live) = (audio(&both, both.batch_samples), audio(&both, both.live_samples));
        let (before, after) = (alone.quantile(0.95), both.quantile(0.95));
        println!(
            "{rate} turns a second: p95 {before:.1?}, with batch {after:.1?}; {live:.1} live, {batch:.1} batch of {full:.1}, \
             live leaves {:.1}",
            left(&both, full)
        );
        for ((stage, whose), (steps, seconds, slots)) in &both.kinds {
            let (share, steps) = (seconds / both.seconds * 100.0, *steps as f64);
            let (ms, width) = (seconds / steps * 1e3, *slots as f64 / steps);
            println!("{stage:>10} {whose:<5} {share:>5.1} % {steps:>6} steps of {ms:>5.2} ms, {width:>5.1} slots");
        }
        assert!(both.underruns.is_empty() && both.refused == 0, "{} gaps", both.underruns.len());
        assert!(after.as_secs_f64() <= 1.15 * before.as_secs_f64(), "batch is heard: {after:?}, without it {before:?}");
        assert!(batch >= 0.9 * left(&both, full), "batch got {batch} of {}", left(&both, full));
    }
}

/// On an engine that takes the memory of an utterance at once, it is held while its stream rests at the lead limit.
/// Slots and time are there, memory is not: a sentence that finds some is displaced by the next turn.
#[test]
fn batch_gets_on_beside_streams_that_hold_all_the_memory() {
    let mut costs = Costs::named("h200");
    costs.memory = 2 * 600 * TOKEN_BYTES;
    costs.grows = false;
    let made = |patience: u32| {
        let config = Config { batch_patience_s: patience, ..Config::default() };
        let report = long_runs(&costs, &config, 600, 20.0, 8, &SEEDS);
        assert!(report.underruns.is_empty() && report.refused > 0);
        println!(
            "patience of {patience} s: live {:.1?}, batch {:.1?}, displaced {}",
            duration_of(report.live_samples),
            duration_of(report.batch_samples),
            report.displaced
        );
        report.batch_samples
    };
    let (starved, fed) = (made(3_600), made(2));
    assert!(fed > 2 * starved, "batch gained nothing by having waited");
    // As much as one of its utterances in each run.
    assert!(fed >= SEEDS.len() as u64 * 200 * TOKEN, "batch gained only {:.1?}", duration_of(fed));
}

/// Promises at the longest speech that a text might become leave most of the memory empty; what is used of it admits
/// three times the turns, and no listener hears that.
#[test]
fn memory_that_is_used_admits_more_than_memory_that_is_promised() {
    let used = Costs { memory: 8_000_000, ..Costs::named("h200") };
    let run = |costs: &Costs, turns: f64| long_runs(costs, &Config::default(), 200, turns, 0, &SEEDS);
    // The same engine with each text promised its longest speech: every token counts for three and a third.
    let promised = Costs { grows: false, memory: used.memory * 3 / 10, ..used.clone() };
    for turns in [4.0, 6.0, 8.0] {
        let (now, before) = (run(&used, turns), run(&promised, turns));
        println!(
            "{turns} turns of 8 s a second, memory for 40: refused {} of {} where promises refuse {}; p95 {:.1?}, {} gaps, \
             {} live restarts",
            now.refused,
            now.turns,
            before.refused,
            now.quantile(0.95),
            now.underruns.len(),
            now.restarted
        );
        assert!(now.refused * 3 < before.refused.max(1) * 2, "{} refused, {} by promises", now.refused, before.refused);
        assert!(now.underruns.len() * 100 <= now.first_audio.len(), "{} gaps", now.underruns.len());
        assert!(now.quantile(0.95) <= Duration::from_millis(Config::default().first_audio_target_ms.into()));
    }
}
