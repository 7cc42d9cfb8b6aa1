//! How many turns a second a device begins and speaks: open loop, short turns to long ones.
//!
//! `TURNS=all cargo test --test sim -- --nocapture turns_a_second` prints the whole table, without `TURNS` a part of it, with
//! `TURNS=100,150` those rates, with `TURNS=100x5,75x10` turns of so many seconds. A turn is in time if it was taken on, sounded within [`SOON`] and had no gap.

use std::time::Duration;

use antiphon::turn::Class;

use super::engine::{Costs, Engine};
use super::policy::Kind;
use super::rng::Rng;
use super::world::{Event, Report, World, zero};

/// Tokens a second.
const TOKENS: f64 = 25.0;
/// Learning and filling up; not measured.
const WARM: f64 = 4.0;
const MEASURED: f64 = 8.0;
/// First audio that a caller takes for an answer at once.
const SOON: Duration = Duration::from_millis(100);

/// The utterances of a turn of so many tokens: two where it is longer than six seconds.
pub(super) fn utterances(tokens: u32) -> Vec<u32> {
    if f64::from(tokens) > 6.0 * TOKENS { vec![tokens / 2, tokens - tokens / 2] } else { vec![tokens] }
}

/// A turn of `seconds`, a quarter longer or shorter.
fn turn(stream: u64, seconds: f64, rng: &mut Rng) -> Event {
    let tokens = (seconds * TOKENS * (0.75 + 0.5 * rng.unit())).round() as u32;
    Event::Turn { stream, class: Class::Live, tenant: "", tokens: utterances(tokens) }
}

/// Poisson arrivals of turns of `seconds`, so many a second, and how many of them were measured. Each varies by a quarter,
/// and one of more than 6 s is said in two utterances.
fn run(costs: &Costs, turns: f64, seconds: f64) -> (Report, usize) {
    let mut world = World::new(Engine::new(costs.clone(), 1), Kind::ours().build(costs));
    world.measure_from = zero() + Duration::from_secs_f64(WARM);
    let mut rng = Rng::new(1);
    let (mut at, mut stream, mut measured) = (Duration::ZERO, 0, 0);
    let end = Duration::from_secs_f64(WARM + MEASURED);
    loop {
        at += rng.gap(turns);
        if at > end {
            break;
        }
        stream += 1;
        measured += usize::from(at.as_secs_f64() >= WARM);
        world.at(at, turn(stream, seconds, &mut rng));
    }
    world.run(end);
    (world.report, measured)
}

/// On one H200 by the measured costs. With the rules of before, whole calls on the device had 6 and 27 % of their turns
/// stall at 77 and 100 turns of 2.7 s a second, p95 153 and 224 ms; this simulation had gaps in 0.3 and 78 %, 71 and 253 ms.
#[test]
#[expect(clippy::disallowed_methods, reason = "whoever runs it says how much of the table he wants")]
fn turns_a_second() {
    let costs = Costs::named("h200");
    println!(
        "{:>5} {:>6} {:>7} {:>7} {:>7} {:>6} {:>9} {:>7} {:>7} {:>8} {:<24} ms until first audio, by stage",
        "turns", "s each", "p50 ms", "p95 ms", "p99 ms", "gaps", "refused", "audio", "ms/turn", "in time", "widths"
    );
    let wanted = std::env::var("TURNS").unwrap_or_default();
    let all = wanted == "all";
    let row = |row: &str| match row.split_once('x') {
        Some((turns, seconds)) => Some((turns.parse().ok()?, seconds.parse().ok()?)),
        None => Some((row.parse().ok()?, 2.7)),
    };
    let named: Vec<(f64, f64)> = wanted.split(',').filter_map(row).collect();
    let lengths: &[f64] = if all { &[2.0, 2.7, 5.0, 10.0] } else { &[2.7] };
    let rates: &[f64] = if all {
        &[10.0, 25.0, 50.0, 75.0, 100.0, 125.0, 150.0, 200.0, 300.0]
    } else {
        &[50.0, 75.0, 100.0, 150.0, 200.0]
    };
    let table = lengths.iter().flat_map(|seconds| rates.iter().map(move |turns| (*turns, *seconds)));
    let rows: Vec<(f64, f64)> = if named.is_empty() { table.collect() } else { named.clone() };
    for (turns, seconds) in rows {
        let (report, measured) = run(&costs, turns, seconds);
        let ms = |q: f64| report.quantile(q).as_secs_f64() * 1e3;
        let soon = report.first_audio.iter().filter(|first| **first <= SOON).count();
        let width = report.widths.map(|(seconds, slots)| (slots / seconds.max(1e-9)).round());
        let until = report.until_first.map(|sum| sum / report.first_audio.len() as f64 * 1e3);
        println!(
            "{turns:>5.0} {seconds:>6.1} {:>7.1} {:>7.1} {:>7.1} {:>6} {:>9} {:>7.1} {:>7.2} {:>7.1}% {:<24} {until:.1?}",
            ms(0.5),
            ms(0.95),
            ms(0.99),
            report.gapped.len(),
            format!("{}/{}", report.refused, report.turns),
            report.live_samples as f64 / f64::from(antiphon::audio::RATE) / MEASURED,
            report.busy / report.first_audio.len() as f64 * 1e3,
            soon.saturating_sub(report.gapped.len()) as f64 / measured as f64 * 100.0,
            format!("{width:.0?}"),
        );
        if seconds == 2.7 && named.is_empty() {
            assert_eq!(report.gapped.len(), 0, "gaps at {turns} turns a second");
            let refused = f64::from(report.refused) / f64::from(report.turns);
            // The device makes some 138 such turns a second.
            let most = if turns <= 100.0 { 0.0 } else { (1.0 - 125.0 / turns).max(0.03) };
            assert!(refused <= most, "{refused} refused at {turns} turns a second");
            let most = [(75.0, 70), (100.0, 100)].iter().find(|(rate, _)| turns <= *rate).map_or(150, |(_, ms)| *ms);
            assert!(report.quantile(0.95) <= Duration::from_millis(most), "{:?}", report.quantile(0.95));
        }
    }
}

/// Everybody is called at the same instant: 64 turns of 2.7 s beside ten a second. 16 of them were refused, though the last of
/// the others was heard after 84 ms, while those that had come counted for what is to come as well. Of 128 the device refuses
/// those that it cannot serve in time, and no other is late.
#[test]
fn turns_that_begin_at_the_same_instant_are_taken_on_together() {
    let costs = Costs::named("h200");
    for (burst, refused) in [(64, 0..=0), (128, 32..=64)] {
        let mut world = World::new(Engine::new(costs.clone(), 1), Kind::ours().build(&costs));
        let mut rng = Rng::new(1);
        let (mut at, moment) = (Duration::ZERO, Duration::from_secs(10));
        let end = moment + Duration::from_secs(6);
        let usual = std::iter::from_fn(|| {
            at += rng.gap(10.0);
            (at < end).then_some(at)
        });
        let all: Vec<Duration> = usual.chain((0..burst).map(|_| moment)).collect();
        for (stream, at) in (0..).zip(all) {
            world.at(at, turn(stream, 2.7, &mut rng));
        }
        world.measure_from = zero() + moment;
        world.run(end);
        let report = &world.report;
        assert!(refused.contains(&report.refused), "{} of {burst} refused", report.refused);
        assert_eq!(report.gapped.len(), 0, "gaps of {burst}");
        assert!(report.quantile(1.0) <= Duration::from_millis(150), "{burst}: {:?}", report.quantile(1.0));
    }
}
